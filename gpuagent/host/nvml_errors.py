"""What NVML's error codes mean to an operator, and which of our errors they are."""

from gpuagent.errors import AgentError, Refused, Unavailable, Unsupported
from gpuagent.host.nvml_frames import Answer
from gpuagent.model.inventory import Gpu

SUCCESS = 0
_INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION, _NOT_LOADED = 2, 3, 4, 9
_NO_LIBRARY, _NO_FUNCTION, _MISMATCH = 12, 13, 18

_REMEDIES = {
    _NO_PERMISSION: "run the agent as root, or let its user open /dev/nvidiactl",
    _NOT_LOADED: "load it with `modprobe nvidia`, or install it",
    _NO_LIBRARY: "install the NVIDIA driver's libraries, or set paths.nvml_library",
    _MISMATCH: "the driver was updated: reboot, or reload its kernel module",
}
"""By code: what can be done where there is no driver to talk to."""


def no_driver(why: str, code: int) -> AgentError:
    """The error for a child that ended itself with this code."""
    remedy = _REMEDIES.get(code)
    return Unavailable(why) if remedy is None else Unsupported(f"{why}: {remedy}")


_NAMES = {
    "power_limit": "power limit",
    "clock_limit": "clock limit",
    "compute_mode": "compute mode",
    "persistence_mode": "persistence mode",
}
"""By order (`nvml_orders`): what it is about, in words."""


def failed(answer: Answer, where: str, do: str, value: int | None, gpu: Gpu) -> AgentError:
    """The error for an order that was not carried out, with the value it was to set."""
    code, name = answer.code, _NAMES.get(do, do)
    if code == _INVALID_ARGUMENT and value is not None:
        return Refused(f"{where}: {_out_of_range(do, value, gpu)}")
    if code == _NO_PERMISSION:
        return Refused(f"{where}: the driver lets only root set the {name}")
    if code in (_NOT_SUPPORTED, _NO_FUNCTION):
        return Unsupported(f"{where}: the card has no {name} that can be read or set")
    # A lost card may come back with what was set, so that nobody may forget it: not Gone.
    return Unavailable(f"{where}: {answer.why}")


def _out_of_range(do: str, value: int, gpu: Gpu) -> str:
    if do != "power_limit":
        return f"the driver takes no {_NAMES.get(do, do)} of {value}"
    low, high = gpu.power_min_watts, gpu.power_max_watts
    span = "" if low is None or high is None else f", {low:g} to {high:g} W"
    return f"{value / 1000:g} W is outside its range{span}"
