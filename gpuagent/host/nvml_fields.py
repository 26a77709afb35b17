"""What is read of a card: one table of NVML calls, how often, and the signals they give.

Runs in the NVML child: standard library only. Signals are named as in `model.vocab`, and values are
in its base units; a test holds the table against it.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

Row = tuple[Any, ...]
"""(signal, value), (signal, value, dimension), or (signal, value, dimension, exact)."""

SAMPLE, STATUS, LINKS, SLOW = "sample", "status", "links", "slow"
"""Rates, by cost: microseconds, tens of microseconds, tens of milliseconds, and rarely needed."""

_MEMORY_V2 = 0x02000028
_DIE = 0
_ALL_LINKS = 0xFFFFFFFF
_VOLATILE = 0
POWER_AVERAGE, POWER_INSTANT, MEMORY_TEMPERATURE = 185, 186, 82
_NVLINK_TX_KIB, _NVLINK_RX_KIB = 138, 139

_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Of nvmlValue_t, by nvmlValueType_t."""

THROTTLE_REASONS = (
    (0x001, "gpu_idle"),
    (0x002, "applications_clocks"),
    (0x004, "sw_power_cap"),
    (0x008, "hw_slowdown"),
    (0x010, "sync_boost"),
    (0x020, "sw_thermal"),
    (0x040, "hw_thermal"),
    (0x080, "hw_power_brake"),
    (0x100, "display_clock"),
)
"""Bits of nvmlClocksEventReasons, from nvml.h."""


class Read(NamedTuple):
    """One question to a card. The first of `calls` that the library and the card know is used."""

    rate: str
    calls: tuple[tuple[str, tuple[Any, ...]], ...]
    """(name of the pynvml function, arguments after the handle), newest first."""
    rows: Callable[[Any], Iterable[Row]]
    """From what the call returned to readings."""
    gives: tuple[str, ...]
    """The signals that may come of it."""
    mig: bool = False
    """Whether it is asked of each MIG instance too, where MIG is on."""


def _utilization(rates: Any) -> Iterable[Row]:
    return (
        ("gpu_utilization_ratio", rates.gpu / 100),
        ("gpu_memory_busy_ratio", rates.memory / 100),
    )


def memory_rows(info: Any) -> Iterable[Row]:
    """Version 1 counts the driver's reserve as used, so that what is used is an estimate."""
    reserved = getattr(info, "reserved", None)
    rows: tuple[Row, ...] = (
        ("gpu_memory_total_bytes", info.total),
        ("gpu_memory_used_bytes", info.used, "", reserved is not None),
        ("gpu_memory_free_bytes", info.free),
    )
    return rows if reserved is None else (*rows, ("gpu_memory_reserved_bytes", reserved))


def field_value(field: Any) -> float | None:
    """Value of a c_nvmlFieldValue_t, or None where the card has none."""
    kind = field.valueType
    if field.nvmlReturn != 0 or not 0 <= kind < len(_MEMBERS):
        return None
    return float(getattr(field.value, _MEMBERS[kind]))


def _momentary(fields: Any) -> Iterable[Row]:
    rows: list[Row] = []
    power, temperature = field_value(fields[0]), field_value(fields[1])
    if power is not None:
        rows.append(("gpu_power_instant_watts", power / 1000))
    if temperature:  # 0 where the memory has no sensor
        rows.append(("gpu_memory_temperature_celsius", temperature))
    return rows


def power_average_rows(fields: Any) -> Iterable[Row]:
    """For GA100, whose nvmlDeviceGetPowerUsage is momentary."""
    value = field_value(fields[0])
    if value is not None:
        yield "gpu_power_watts", value / 1000


def _throttled(mask: int) -> Iterable[Row]:
    for bit, reason in THROTTLE_REASONS:
        yield "gpu_throttled", 1 if mask & bit else 0, reason


def _nvlink(fields: Any) -> Iterable[Row]:
    for field, direction in zip(fields, ("tx", "rx"), strict=True):
        value = field_value(field)
        if value is not None:
            yield "gpu_nvlink_bytes_total", value * 1024, direction


def _remapped(rows: tuple[int, int, int, int]) -> Iterable[Row]:
    corrected, uncorrected, pending, failed = rows
    yield "gpu_remapped_rows", corrected, "correctable"
    yield "gpu_remapped_rows", uncorrected, "uncorrectable"
    yield "gpu_row_remap_pending", 1 if pending else 0
    yield "gpu_row_remap_failed", 1 if failed else 0


def _one(signal: str, factor: float = 1, *dims: str) -> Callable[[Any], Iterable[Row]]:
    return lambda value: ((signal, value * factor, *dims),)


def _clock(domain: int, name: str) -> Read:
    calls = (("nvmlDeviceGetClockInfo", (domain,)),)
    signal = "gpu_clock_hertz"
    return Read(STATUS, calls, _one(signal, 1e6, name), (signal,))


def _pcie(counter: int, direction: str) -> Read:
    calls = (("nvmlDeviceGetPcieThroughput", (counter,)),)
    signal = "gpu_pcie_bytes_per_second"
    return Read(LINKS, calls, _one(signal, 1024, direction), (signal,))


def _ecc(error: int, kind: str) -> Read:
    calls = (("nvmlDeviceGetTotalEccErrors", (error, _VOLATILE)),)
    signal = "gpu_ecc_errors_total"
    return Read(SLOW, calls, _one(signal, 1, kind), (signal,))


def _plain(rate: str, call: str, signal: str, factor: float = 1) -> Read:
    return Read(rate, ((call, ()),), _one(signal, factor), (signal,))


_MEMORY_SIGNALS = (
    "gpu_memory_total_bytes",
    "gpu_memory_used_bytes",
    "gpu_memory_free_bytes",
    "gpu_memory_reserved_bytes",
)

MEMORY = Read(
    SAMPLE,
    (("nvmlDeviceGetMemoryInfo", (_MEMORY_V2,)), ("nvmlDeviceGetMemoryInfo", ())),
    memory_rows,
    _MEMORY_SIGNALS,
    mig=True,
)
POWER = _plain(SAMPLE, "nvmlDeviceGetPowerUsage", "gpu_power_watts", 1e-3)
POWER_GA100 = Read(
    SAMPLE,
    (("nvmlDeviceGetFieldValues", ((POWER_AVERAGE,),)),),
    power_average_rows,
    ("gpu_power_watts",),
)

READS: tuple[Read, ...] = (
    Read(
        SAMPLE,
        (("nvmlDeviceGetUtilizationRates", ()),),
        _utilization,
        ("gpu_utilization_ratio", "gpu_memory_busy_ratio"),
    ),
    MEMORY,
    POWER,
    Read(
        SAMPLE,
        (("nvmlDeviceGetFieldValues", ((POWER_INSTANT, MEMORY_TEMPERATURE),)),),
        _momentary,
        ("gpu_power_instant_watts", "gpu_memory_temperature_celsius"),
    ),
    Read(
        SAMPLE,
        # The library of driver 550 lacks the first, one of the next major version the second.
        (("nvmlDeviceGetTemperatureV", (_DIE,)), ("nvmlDeviceGetTemperature", (_DIE,))),
        _one("gpu_temperature_celsius"),
        ("gpu_temperature_celsius",),
    ),
    _plain(STATUS, "nvmlDeviceGetPowerManagementLimit", "gpu_power_limit_watts", 1e-3),
    _plain(STATUS, "nvmlDeviceGetEnforcedPowerLimit", "gpu_power_limit_enforced_watts", 1e-3),
    _plain(STATUS, "nvmlDeviceGetTotalEnergyConsumption", "gpu_energy_joules_total", 1e-3),
    Read(
        STATUS,
        (
            ("nvmlDeviceGetCurrentClocksEventReasons", ()),
            ("nvmlDeviceGetCurrentClocksThrottleReasons", ()),
        ),
        _throttled,
        ("gpu_throttled",),
    ),
    _clock(0, "graphics"),
    _clock(1, "sm"),
    _clock(2, "memory"),
    _clock(3, "video"),
    _pcie(0, "tx"),
    _pcie(1, "rx"),
    Read(
        LINKS,
        (
            (
                "nvmlDeviceGetFieldValues",
                (((_NVLINK_TX_KIB, _ALL_LINKS), (_NVLINK_RX_KIB, _ALL_LINKS)),),
            ),
        ),
        _nvlink,
        ("gpu_nvlink_bytes_total",),
    ),
    _ecc(0, "corrected"),
    _ecc(1, "uncorrected"),
    Read(
        SLOW,
        (("nvmlDeviceGetRemappedRows", ()),),
        _remapped,
        ("gpu_remapped_rows", "gpu_row_remap_pending", "gpu_row_remap_failed"),
    ),
    _plain(SLOW, "nvmlDeviceGetPcieReplayCounter", "gpu_pcie_replays_total"),
)
