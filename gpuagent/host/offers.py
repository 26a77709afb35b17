"""What this host offers the agent, what is missing, and how to get it: for `gpuagent check`.

Each probe asks one thing, changes nothing, and raises nothing.
"""

import errno
import os
import socket
from typing import Literal

import msgspec

from gpuagent.config import LatencySource
from gpuagent.host.cgroups import TELLTALE, WITHOUT_V2
from gpuagent.host.nvml_probe import NvmlOffer

State = Literal["ok", "partial", "missing"]

_NETLINK_CONNECTOR = 11  # include/uapi/linux/netlink.h
_CN_IDX_PROC = 1  # include/uapi/linux/connector.h: group of process events
_SERVICES = "system.slice"
"""Where systemd keeps the services of the host, tenants among them."""
_WISHED_CONTROLLERS = ("cpu", "memory", "io")


class Offer(msgspec.Struct, frozen=True):
    """One thing that the agent can use."""

    name: str
    state: State
    what: str
    """What was found, or what is missing."""
    remedy: str = ""
    """How to get it on Debian and RHEL; empty where nothing is to be done."""


def nvml(found: NvmlOffer) -> Offer:
    """The driver and its cards."""
    if found.problem:
        return Offer(
            "NVML",
            "missing",
            found.problem,
            "Debian: apt install nvidia-driver (non-free); RHEL: dnf install nvidia-driver "
            "from NVIDIA's CUDA repository; or set paths.nvml_library",
        )
    blind = [card for card in found.cards if card.blind]
    what = f"driver {found.driver or 'of unknown version'}, {len(found.cards)} cards"
    if blind:
        first = blind[0]
        what += f"; card {first.index} does not answer: {first.blind}"
        return Offer("NVML", "partial", what, "look at `dmesg` for XIDs; the card may need a reset")
    if found.missing:
        what += f"; this library lacks {', '.join(found.missing)}, others take their place"
    return Offer("NVML", "ok", what)


def cgroups(root: str) -> Offer:
    """cgroup v2, and the controllers through which tenants can be held back."""  # noqa: D403
    name = "cgroup v2"
    text = _text(f"{root}/{TELLTALE}")
    if text is None:
        return Offer(name, "missing", f"{root} is no cgroup v2 mount", WITHOUT_V2)
    lacking = [c for c in _WISHED_CONTROLLERS if c not in text.split()]
    if "cpu" in lacking:
        return Offer(name, "partial", f"{root} has no controller for {_and(lacking)}", WITHOUT_V2)
    if not os.access(root, os.W_OK):
        what = f"{root} cannot be written: tenants can be watched, not held back"
        return Offer(name, "partial", what, "run as root, outside a container, on a writable mount")
    passed_on = _text(f"{root}/{_SERVICES}/cgroup.subtree_control")
    if passed_on is not None and "cpu" not in passed_on.split():
        # systemd enables a controller below a slice once a unit there asks for it.
        what = f"{root}/{_SERVICES} does not pass the cpu controller on: no cpu.weight there yet"
        return Offer(name, "partial", what, "systemctl set-property UNIT CPUWeight=100 (any unit)")
    what = f"{root}, controllers {', '.join(text.split())}"
    return Offer(name, "ok", what + (f"; none for {_and(lacking)}" if lacking else ""))


def pressure(root: str = "/") -> Offer:
    """Pressure stall information, by which host CPU pressure is a cause."""
    if _text(os.path.join(root, "proc/pressure/cpu")) is None:
        remedy = "boot with psi=1 (RHEL has it off by default)"
        return Offer("pressure (PSI)", "missing", "the kernel does not measure pressure", remedy)
    return Offer("pressure (PSI)", "ok", "measured by the kernel")


def systemd(root: str = "/") -> Offer:
    """Whether systemd runs this host (sd_booted(3))."""
    if os.path.isdir(os.path.join(root, "run/systemd/system")):
        return Offer("systemd", "ok", "runs this host")
    what = "does not run this host: nothing restarts the agent or puts things back if it dies"
    return Offer("systemd", "missing", what, "run `gpuagent restore --rescue` from your supervisor")


def kernel_log(path: str) -> Offer:
    """The kernel log, in which XIDs stand that NVML never reports."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        return Offer(
            "kernel log", "missing", f"{path}: {error.strerror}", "run as root, or with CAP_SYSLOG"
        )
    return Offer("kernel log", "ok", f"{path} can be read")


def netlink() -> Offer:
    """Process events, by which a tenant's new process is seen within milliseconds."""
    name = "process events"
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_CONNECTOR) as sock:
            sock.bind((0, _CN_IDX_PROC))
    except OSError as error:
        if error.errno in {errno.EPERM, errno.EACCES}:
            what, remedy = "no right to listen", "run as root, or with CAP_NET_ADMIN"
        else:
            what = f"not in this kernel ({error.strerror})"
            remedy = "CONFIG_PROC_EVENTS is on in the kernels of Debian and RHEL"
        return Offer(name, "partial", f"{what}: the process table is read instead", remedy)
    return Offer(name, "ok", "the kernel tells of new processes")


def _text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def _and(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def latency(tenant: str, source: LatencySource | None, problem: str) -> Offer:
    """A tenant's own metrics, of which one is its latency."""
    assert source is not None
    name, where = f"latency of {tenant}", f"{source.metric} at {source.url}"
    if not problem:
        return Offer(name, "ok", where)
    return Offer(
        name,
        "missing",
        f"{where}: {problem}",
        f"start the service, or mend latency_from of {tenant}; `curl {source.url}` shows the page",
    )
