"""Sensor `cgroups`: CPU use, throttling, memory and pressure of tenants, and their knobs as they are.

Values of a tenant are those of its seats, and known only while it has each of them to itself: what a
shared cgroup used is nobody's in particular. File formats: Documentation/admin-guide/cgroup-v2.rst.
"""

import asyncio
import math
from collections.abc import Iterable, Iterator

import msgspec

from gpuagent.clock import Clock
from gpuagent.errors import Gone, Refused
from gpuagent.model.inventory import Seat, Subject, Tenant, on_cgroup, on_tenant
from gpuagent.model.state import Instant, NodeState, Reading, Sensed
from gpuagent.model.vocab import (
    CGROUP_CPU_CORES,
    CGROUP_CPU_MAX_CORES,
    CGROUP_CPU_WEIGHT,
    TENANT_CPU_CORES,
    TENANT_CPU_PRESSURE_RATIO,
    TENANT_CPU_THROTTLED_RATIO,
    TENANT_HOST_MEMORY_BYTES,
)
from gpuagent.ports import Cgroups, Units

_SHORTEST_SECONDS = 0.1
"""Between two readings of a counter whose difference is still a rate."""
_KNOBS = ("cpu.weight", "cpu.max")
_DEFAULT_WEIGHT = 100.0
_RATES = (*_KNOBS, "cpu.stat")
_USE = (*_RATES, "cpu.pressure", "memory.current")


class _Files(msgspec.Struct, frozen=True):
    """Control files of a cgroup as they were at one time."""

    at: float
    texts: dict[str, str]

    def text(self, name: str) -> str:
        """Content; empty where the cgroup has no such file."""
        return self.texts.get(name, "")


class _Counters(msgspec.Struct, frozen=True):
    """cpu.stat at one time. The last two are None where cpu.max does not exist."""

    at: float
    usage_usec: int
    periods: int | None
    throttled_periods: int | None


class _Seen(msgspec.Struct, frozen=True):
    """What one seat's files say of its tenant; None where they do not."""

    cores: float | None
    throttled_ratio: float | None
    pressure_ratio: float | None
    memory_bytes: int | None


class CgroupUse:
    """Reads the control files of every seat, and of the ancestors that a tenant has to itself."""

    name = "cgroups"
    interval = 2.0

    def __init__(self, cgroups: Cgroups, clock: Clock, units: Units | None = None) -> None:
        """`units` is None where there is no systemd."""
        self._cgroups = cgroups
        self._units = units
        self._clock = clock
        self._before: dict[Subject, _Counters] = {}

    async def read(self, now: Instant, state: NodeState) -> Sensed:
        """Readings of all tenants; cgroups that have gone or lack a file are left out.

        Raises Unavailable where there is no cgroup tree, with or without tenants.
        """
        tenants = state.inventory.tenants or ()
        return Sensed(readings=tuple(await asyncio.to_thread(self._all, tenants)))

    def _all(self, tenants: Iterable[Tenant]) -> list[Reading]:
        readings: list[Reading] = []
        counters: dict[Subject, _Counters] = {}
        self._cgroups.tree()
        for tenant in tenants:
            readings += self._of(tenant, counters)
        self._before = counters
        return readings

    def _of(self, tenant: Tenant, counters: dict[Subject, _Counters]) -> Iterator[Reading]:
        subject = on_tenant(tenant.name)
        seen: list[_Seen] = []
        for seat in tenant.seats:
            if not seat.inode:
                continue
            cgroup = on_cgroup(tenant.name, seat.path, seat.inode)
            try:
                files = self._files(cgroup, _USE)
            except (Gone, Refused):
                continue  # the tenants' sensor will notice
            use = self._use(cgroup, files, counters)
            yield from self._knobs(cgroup, files)
            if use.cores is not None:
                yield Reading(CGROUP_CPU_CORES, cgroup, use.cores, files.at)
            if not seat.refusal:
                seen.append(use)
        for above in _exclusive_above(tenant):
            cgroup = on_cgroup(tenant.name, above.path, above.inode)
            try:
                files = self._files(cgroup, _RATES)
            except (Gone, Refused):
                continue
            yield from self._knobs(cgroup, files)
            cores, _ = self._rates(cgroup, files, counters)
            if cores is not None:
                yield Reading(CGROUP_CPU_CORES, cgroup, cores, files.at)
        if seen and len(seen) == len(tenant.seats):
            yield from self._sums(subject, seen)

    def _files(self, cgroup: Subject, names: tuple[str, ...]) -> _Files:
        """Raises Gone where the path is another's by now."""
        texts = self._cgroups.read_all(cgroup.cgroup, cgroup.inode, names)
        return _Files(self._clock.now().mono, texts)

    def _sums(self, subject: Subject, seen: list[_Seen]) -> Iterator[Reading]:
        """What is known of each seat, taken together."""
        at = self._clock.now().mono
        together = (
            (TENANT_CPU_CORES, [s.cores for s in seen], sum),
            (TENANT_HOST_MEMORY_BYTES, [s.memory_bytes for s in seen], sum),
            (TENANT_CPU_THROTTLED_RATIO, [s.throttled_ratio for s in seen], max),
            (TENANT_CPU_PRESSURE_RATIO, [s.pressure_ratio for s in seen], max),
        )
        for signal, values, combine in together:
            known = [v for v in values if v is not None]
            if len(known) == len(values):
                yield Reading(signal, subject, float(combine(known)), at)

    def _use(self, cgroup: Subject, files: _Files, counters: dict[Subject, _Counters]) -> _Seen:
        cores, throttled = self._rates(cgroup, files, counters)
        memory = files.text("memory.current")
        return _Seen(
            cores=cores,
            throttled_ratio=throttled,
            pressure_ratio=parse_pressure(files.text("cpu.pressure")),
            memory_bytes=int(memory) if _is_number(memory) else None,
        )

    def _knobs(self, cgroup: Subject, files: _Files) -> Iterator[Reading]:
        """cpu.weight and cpu.max as they are.

        A unit without cpu.weight weighs as one that has the default: it gets the file, with that
        weight, as soon as systemd is told any other.
        """
        weight = parse_weight(files.text("cpu.weight"))
        cores = parse_max(files.text("cpu.max"))
        if weight is not None:
            yield Reading(CGROUP_CPU_WEIGHT, cgroup, weight, files.at)
        elif self._units is not None and self._units.manages(cgroup.cgroup):
            yield Reading(CGROUP_CPU_WEIGHT, cgroup, _DEFAULT_WEIGHT, files.at, exact=False)
        if cores is not None:
            yield Reading(CGROUP_CPU_MAX_CORES, cgroup, cores, files.at)

    def _rates(
        self, cgroup: Subject, files: _Files, counters: dict[Subject, _Counters]
    ) -> tuple[float | None, float | None]:
        """Cores used, and share of cpu.max periods with throttling, since the reading before."""
        stat = parse_flat(files.text("cpu.stat"))
        usage = stat.get("usage_usec")
        if usage is None:
            return None, None
        now = _Counters(files.at, usage, stat.get("nr_periods"), stat.get("nr_throttled"))
        before = self._before.get(cgroup)
        counters[cgroup] = now
        if before is None or now.at - before.at < _SHORTEST_SECONDS:
            return None, None
        used = now.usage_usec - before.usage_usec
        cores = used / 1e6 / (now.at - before.at) if used >= 0 else None
        return cores, _throttled_ratio(before, now)


def _exclusive_above(tenant: Tenant) -> list[Seat]:
    """Ancestors that the tenant has to itself, each once."""
    above = {s.path: s for seat in tenant.seats for s in seat.above if s.inode and not s.refusal}
    seats = {seat.path for seat in tenant.seats}
    return [seat for path, seat in sorted(above.items()) if path not in seats]


def _throttled_ratio(before: _Counters, now: _Counters) -> float | None:
    """Share of the periods in which the quota ran out; 0 where no period passed under a quota."""
    if (
        now.periods is None
        or now.throttled_periods is None
        or before.periods is None
        or before.throttled_periods is None
    ):
        return None
    periods = now.periods - before.periods
    throttled = now.throttled_periods - before.throttled_periods
    if periods < 0 or throttled < 0:
        return None
    return min(throttled / periods, 1.0) if periods else 0.0


def parse_flat(text: str) -> dict[str, int]:
    """Numbers by name from a flat keyed file; lines that are not "name number" are left out."""
    pairs = (line.split() for line in text.splitlines())
    return {p[0]: int(p[1]) for p in pairs if len(p) == 2 and _is_number(p[1])}


def parse_weight(text: str) -> float | None:
    return float(text) if _is_number(text) else None


def parse_max(text: str) -> float | None:
    """cpu.max ("quota period" in microseconds) in cores: infinite for "max", None for anything else."""
    words = text.split()
    if len(words) != 2 or not _is_number(words[1]) or int(words[1]) == 0:
        return None
    if words[0] == "max":
        return math.inf
    return int(words[0]) / int(words[1]) if _is_number(words[0]) else None


def parse_pressure(text: str) -> float | None:
    """Share of the last 10 s in which some task waited ("some avg10=..." of a PSI file)."""
    for line in text.splitlines():
        if line.startswith("some "):
            values = dict(w.split("=", 1) for w in line.split()[1:] if "=" in w)
            try:
                ratio = float(values.get("avg10", "")) / 100
            except ValueError:
                return None
            return min(max(ratio, 0.0), 1.0) if math.isfinite(ratio) else None
    return None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 20
