"""The real host: what implements each protocol of `ports` on this machine."""

from gpuagent.clock import Clock
from gpuagent.config import Nvml, Paths
from gpuagent.host.cgroups import CgroupTree
from gpuagent.host.kmsg import Kmsg
from gpuagent.host.netlink import ProcessEvents
from gpuagent.host.nvml import NvmlGpus
from gpuagent.host.procfs import HostNode, ProcTable
from gpuagent.ports import Wake


class Machine:
    """Implements `ports.Host`. `gpus` and `events` are services: somebody has to run them."""

    def __init__(self, paths: Paths, nvml: Nvml, *, clock: Clock, wake: Wake) -> None:
        self.clock = clock
        self.gpus = NvmlGpus(settings=nvml, library=paths.nvml_library, clock=clock, wake=wake)
        self.events = ProcessEvents(wake=wake, clock=clock)
        self.cgroups = CgroupTree(paths.cgroup_root)
        self.processes = ProcTable()
        self.node = HostNode(cgroup_root=paths.cgroup_root)
        self.kernel_log = Kmsg(paths.kernel_log)
