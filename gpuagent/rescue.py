"""`gpuagent restore`: puts back what the ledger holds, without a daemon and with a broken file, too."""

import asyncio
import os

import msgspec

from gpuagent import act, trail
from gpuagent.act.audit import AuditLog
from gpuagent.act.ledger import Ledger
from gpuagent.act.restore import Occasion, Report, put_back
from gpuagent.act.statedir import hold
from gpuagent.act.suspensions import Suspensions
from gpuagent.clock import SystemClock, patiently
from gpuagent.config import Config, Paths
from gpuagent.configfile import load
from gpuagent.errors import ConfigError, Refused
from gpuagent.host.cgroups import CgroupTree
from gpuagent.host.checkpoint import CudaCheckpoint, seen_seconds
from gpuagent.host.ender import ProcessEnder
from gpuagent.host.freezer import CgroupFreezer
from gpuagent.host.frozen import frozen_by_cgroup
from gpuagent.host.mps import MpsDaemons
from gpuagent.host.notify import STOP_MOST_SECONDS, Notify
from gpuagent.host.nvidia_smi import ComputePolicy
from gpuagent.host.nvml import NvmlGpus
from gpuagent.host.nvml_settings import NvmlSettings
from gpuagent.host.procfs import ProcTable
from gpuagent.host.units import SystemdUnits
from gpuagent.model.declare import On
from gpuagent.model.inventory import Inventory
from gpuagent.salvage import salvaged

_NVML_PATIENCE_SECONDS = 5.0


def restore(config_path: str, *, rescue: bool, force_resume: bool = False) -> Report:
    """Put back what the ledger holds, without a daemon: all of it, or after a crash what must be.

    `force_resume` resumes suspended processes also where it is not known that their cards have room.
    A configuration with problems, or one that names other paths by now, does not keep anything from
    being put back: what the run before has left of its paths counts, else the file's as far as they
    can be made out. Raises Refused while a daemon runs, and where the ledger was looked
    for at a guessed path and is not there; Corrupt where it cannot be read.
    """
    guessed = ""
    try:
        config = load(config_path).config
    except ConfigError as error:
        found = salvaged(config_path)
        guessed = "" if "state_dir" in found else str(error)
        config = Config(paths=Paths(**found))
    earlier = trail.left(config.paths)
    if earlier is not None:
        guessed = ""
        config = msgspec.structs.replace(config, paths=earlier)
    occasion = Occasion.RESCUE if rescue else Occasion.BY_HAND
    report = put_back_at(config, occasion, force_resume=force_resume)
    if guessed and not report:
        raise Refused(
            f"{guessed}\nSo it is not known where the ledger is, and there is nothing in "
            f"{config.paths.state_dir}: name the agent's configuration with --config"
        )
    return report


def put_back_at(config: Config, occasion: Occasion, *, force_resume: bool = False) -> Report:
    """Put back what the ledger of this configuration's state directory holds. Blocks."""
    # As ExecStopPost of the unit it may have processes to resume, as a stop has.
    notify = Notify.from_environment(dict(os.environ))
    with hold(config.paths.state_dir):
        return asyncio.run(
            notify.meanwhile(
                _restore(config, occasion, force_resume=force_resume),
                most_seconds=STOP_MOST_SECONDS,
            )
        )


async def _restore(config: Config, occasion: Occasion, *, force_resume: bool) -> Report:
    clock = SystemClock()
    ledger = Ledger(config.paths.state_dir)
    audit = AuditLog(config.paths.state_dir)
    gpus = NvmlGpus(
        settings=config.nvml, library=config.paths.nvml_library, clock=clock, wake=lambda _: None
    )
    tree, processes = CgroupTree(config.paths.cgroup_root), ProcTable()
    units = SystemdUnits(
        clock=clock, own_slice=config.run.slice, cgroup_root=config.paths.cgroup_root
    )
    checkpoint = CudaCheckpoint(
        config.suspend,
        processes=processes,
        frozen=frozen_by_cgroup(processes, tree),
        memory=gpus.memory,
        clock=clock,
        seen_seconds=seen_seconds(config.nvml),
        forced=force_resume,
    )
    means = act.Means(
        cgroups=tree,
        units=units,
        gpus=gpus,
        cpu_period_seconds=config.backpressure.cpu_period,
        freezer=CgroupFreezer(tree, config.freeze),
        ender=ProcessEnder(tree),
        mps=MpsDaemons(config.mps),
        suspensions=Suspensions(
            checkpoint, level=config.level, clock=clock, ledger=ledger, cgroup=processes.cgroup
        ),
        card_settings=NvmlSettings(gpus),
        time_slices=ComputePolicy(config.paths.nvidia_smi),
        clock_unlocked=config.clock_unlocked,
        held=lambda target: ledger.held(target) is not None,
        grace_seconds=lambda: config.terminate.grace,
        seen=Inventory,
    )
    reading = asyncio.ensure_future(gpus.run())
    try:
        # A process is resumed only where its cards are known to have room.
        if any(e.subject.gpu or e.subject.on is On.PROCESS for e in ledger.entries.values()):
            await patiently(gpus.settled(), _NVML_PATIENCE_SECONDS)
        return await put_back(
            ledger=ledger,
            actuators=act.actuators(means),
            occasion=occasion,
            clock=clock,
            audit=audit,
        )
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        units.close()
        await ledger.close()
        await asyncio.to_thread(audit.close)
