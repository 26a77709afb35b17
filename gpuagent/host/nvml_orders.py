"""What the parent may ask of one card: each order as the NVML child carries it out, and answers it.

Standard library and pynvml only. Values are NVML's own: milliwatts, megahertz, numbers of modes.
"""

from collections.abc import Callable
from typing import Any

from gpuagent.host.nvml_driver import CardLost, DriverGone, NoValue

Ask = Callable[..., Any]
"""Calls a pynvml function on the card, by name. Raises NoValue or one of its kinds."""


def obey(ask: Ask, do: str, value: int | None) -> int:
    """Carry out an order; what is so now, or for a lock of clocks the megahertz that were asked for.

    Raises NoValue or one of its kinds, KeyError for an order that nobody knows.
    """
    return _ORDERS[do](ask, value)


def _power_limit(ask: Ask, value: int | None) -> int:
    if value is not None:
        ask("nvmlDeviceSetPowerManagementLimit", value)
    return int(ask("nvmlDeviceGetPowerManagementLimit"))


def _compute_mode(ask: Ask, value: int | None) -> int:
    if value is not None:
        ask("nvmlDeviceSetComputeMode", value)
    return int(ask("nvmlDeviceGetComputeMode"))


def _persistence_mode(ask: Ask, value: int | None) -> int:
    if value is not None:
        ask("nvmlDeviceSetPersistenceMode", value)
    return int(ask("nvmlDeviceGetPersistenceMode"))


def _clock_limit(ask: Ask, value: int | None) -> int:
    """Lock the clocks between the lowest the card has and the highest that is not above `value`."""
    if value is None:
        ask("nvmlDeviceResetGpuLockedClocks")
        return 0
    steps = _steps(ask)
    low = min(steps, default=0)
    high = max((s for s in steps if s <= value), default=low or max(value, 1))
    ask("nvmlDeviceSetGpuLockedClocks", low, high)
    return high


def _steps(ask: Ask) -> list[int]:
    """Clocks that the card supports with its fastest memory clock; none where it does not say."""
    try:
        memory = max(ask("nvmlDeviceGetSupportedMemoryClocks"), default=0)
        return list(ask("nvmlDeviceGetSupportedGraphicsClocks", memory))
    except (CardLost, DriverGone):
        raise
    except NoValue:
        return []


_ORDERS: dict[str, Callable[[Ask, int | None], int]] = {
    "power_limit": _power_limit,
    "clock_limit": _clock_limit,
    "compute_mode": _compute_mode,
    "persistence_mode": _persistence_mode,
}
"""By name. Without a value they only tell what is so, but for `clock_limit`, which then unlocks."""
