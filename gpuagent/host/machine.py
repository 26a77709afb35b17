"""The real host: what implements each protocol of `ports` on this machine."""

from gpuagent.clock import Clock
from gpuagent.config import Config
from gpuagent.host.cgroups import CgroupTree
from gpuagent.host.checkpoint import CudaCheckpoint, seen_seconds
from gpuagent.host.ender import ProcessEnder
from gpuagent.host.freezer import CgroupFreezer
from gpuagent.host.frozen import frozen_by_cgroup
from gpuagent.host.kmsg import Kmsg
from gpuagent.host.mps import MpsDaemons
from gpuagent.host.netlink import ProcessEvents
from gpuagent.host.nvidia_smi import ComputePolicy
from gpuagent.host.nvml import NvmlGpus
from gpuagent.host.nvml_settings import NvmlSettings
from gpuagent.host.procfs import HostNode, ProcTable
from gpuagent.host.units import SystemdUnits
from gpuagent.ports import Wake


class Machine:
    """Implements `ports.Host`. `gpus`, `events` and `freezer` are services: somebody has to run them."""

    def __init__(self, config: Config, *, clock: Clock, wake: Wake) -> None:
        paths = config.paths
        self.clock = clock
        self.gpus = NvmlGpus(
            settings=config.nvml, library=paths.nvml_library, clock=clock, wake=wake
        )
        self.events = ProcessEvents(wake=wake, clock=clock)
        self.cgroups = CgroupTree(paths.cgroup_root)
        self.units = SystemdUnits(
            clock=clock, own_slice=config.run.slice, cgroup_root=paths.cgroup_root
        )
        self.freezer = CgroupFreezer(self.cgroups, config.freeze)
        self.mps = MpsDaemons(config.mps)
        self.ender = ProcessEnder(self.cgroups)
        self.processes = ProcTable()
        self.node = HostNode(cgroup_root=paths.cgroup_root)
        self.kernel_log = Kmsg(paths.kernel_log)
        self.card_settings = NvmlSettings(self.gpus)
        self.time_slices = ComputePolicy(paths.nvidia_smi)
        self.checkpoint = CudaCheckpoint(
            config.suspend,
            processes=self.processes,
            frozen=frozen_by_cgroup(self.processes, self.cgroups),
            memory=self.gpus.memory,
            clock=clock,
            seen_seconds=seen_seconds(config.nvml),
        )
