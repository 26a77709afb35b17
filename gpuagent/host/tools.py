"""The programs and interfaces of others that single rungs need, for `gpuagent check`.

Each probe changes nothing and raises nothing; what may take a while is asked by the caller.
"""

import os
import shutil
from collections.abc import Sequence

from gpuagent.config import Config
from gpuagent.host.offers import Offer
from gpuagent.model.inventory import MpsDaemon

MPS = "MPS control"
CHECKPOINT = "cuda-checkpoint"
NVIDIA_SMI = "nvidia-smi"
FREEZER = "cgroup.freeze"
UNITS = "systemd units"
_CHECKPOINT_DRIVER = 570
"""From which on it locks with a timeout (its README)."""


def mps(config: Config) -> Offer:
    """The control program of CUDA MPS."""
    return _program(
        MPS,
        config.mps.control,
        "daemons in [[mps.groups]]",
        "Debian: apt install nvidia-cuda-mps (non-free); RHEL: it comes with the driver package; "
        "or set mps.control",
    )


def checkpoint(config: Config, driver: str) -> Offer:
    """NVIDIA's cuda-checkpoint. `driver` is its version, empty where it is not known."""
    offer = _program(
        CHECKPOINT,
        config.suspend.command,
        'the lever "suspend"',
        "get it from github.com/NVIDIA/cuda-checkpoint, or set suspend.command",
    )
    major = driver.partition(".")[0]
    if offer.state == "ok" and major.isdecimal() and int(major) < _CHECKPOINT_DRIVER:
        what = f"{offer.what}; driver {driver} is older than {_CHECKPOINT_DRIVER}"
        return Offer(CHECKPOINT, "partial", what, f"install driver {_CHECKPOINT_DRIVER} or later")
    return offer


def nvidia_smi(config: Config) -> Offer:
    """What alone sets the time slice of a card."""
    return _program(
        NVIDIA_SMI,
        config.paths.nvidia_smi,
        "time_slice in [[cards]]",
        "it comes with the driver: Debian: apt install nvidia-smi (non-free); or set "
        "paths.nvidia_smi",
    )


def freezer(root: str) -> Offer:
    """Whether control groups can be frozen: the root itself has no such file."""
    try:
        with os.scandir(root) as entries:
            found = any(e.is_dir() and os.path.exists(f"{e.path}/cgroup.freeze") for e in entries)
    except OSError:
        found = False
    if found:
        return Offer(FREEZER, "ok", f"in {root}, for the lever " + '"freeze"')
    what = f'no control group in {root} has one; needed only for the lever "freeze"'
    return Offer(FREEZER, "missing", what, "mount cgroup v2 there; Linux has it from 5.2 on")


def units(trouble: str, *, booted: bool) -> Offer:
    """Whether systemd can be asked to set what it owns. `trouble` is what came of asking it."""
    if not booted:
        what = "systemd does not run this host: limits are written into the control files instead"
        return Offer(UNITS, "missing", what, "nothing is to be done: that does the same here")
    if trouble:
        what = f"{trouble}: what is written into its files instead is lost at a daemon-reload"
        return Offer(
            UNITS, "partial", what, "start dbus (systemctl start dbus), and run the agent as root"
        )
    return Offer(UNITS, "ok", "systemd answers over D-Bus: limits of units are set as properties")


def daemon(found: MpsDaemon, *, own: bool, enforce: bool, mixed: Sequence[str]) -> Offer:
    """One of [[mps.groups]]; `mixed` says of each L1 tenant with whom it shares a server of it.

    The agent starts its `own` ones, but only where it is to `enforce`.
    """
    name = f"MPS group {found.name}"
    if mixed:
        return Offer(
            name,
            "partial",
            f"{'; '.join(mixed)}: a fault of any of them ends the work of all",
            "give the L1 tenant a daemon of its own, on cards of its own, or run it without MPS",
        )
    if found.up:
        what = f"a daemon answers in {found.pipe_directory}, {len(found.clients)} clients"
        return Offer(name, "partial" if found.why else "ok", what + _after(found.why))
    why = found.why or f"no MPS control daemon runs in {found.pipe_directory}"
    if own:
        first = "start the agent: it" if enforce else 'set mode = "enforce": the agent'
        return Offer(name, "partial", why, f"{first} then starts the daemon itself")
    by_hand = f"CUDA_MPS_PIPE_DIRECTORY={found.pipe_directory} nvidia-cuda-mps-control -d"
    return Offer(
        name, "missing", why, f"start it (`{by_hand}`), or have the agent do so: own = true"
    )


def _program(name: str, command: str, use: str, remedy: str) -> Offer:
    path = shutil.which(command)
    if path is not None:
        return Offer(name, "ok", f"{path}, for {use}")
    where = "is not an executable" if "/" in command else "is not in PATH"
    return Offer(name, "missing", f"{command} {where}; needed only for {use}", remedy)


def _after(why: str) -> str:
    return f"; {why}" if why else ""
