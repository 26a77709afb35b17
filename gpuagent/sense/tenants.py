"""Sensor `tenants`: which process of which tenant is on which card, and through what it can be held.

Processes on a card come from the driver's list and are read at once; everybody else from the whole
process table, every `found.table_interval` or sooner when an event says that it has changed. Events
tell of exits and of the first process of a tenant with a rule within milliseconds; nothing is
missed for good without them.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gpuagent.config import Config
from gpuagent.errors import Gone, Refused, Unavailable, Unsupported
from gpuagent.model.inventory import (
    GpuProcess,
    Process,
    Tenant,
    on_tenant,
    on_tenant_gpu,
    owners_of,
)
from gpuagent.model.state import Event, Instant, NodeState, Reading, Sensed
from gpuagent.model.vocab import (
    TENANT_GPU_MEMORY_BYTES,
    TENANT_GPU_PROCESSES,
    TENANT_GPU_UTILIZATION_RATIO,
    TENANT_PROCESSES,
)
from gpuagent.ports import Cgroups, Processes, ProcessEvents, Runs
from gpuagent.sense.runs import NoRuns
from gpuagent.sense.seats import seat_paths, seated
from gpuagent.sense.tenancy import Rules, assign, own_processes
from gpuagent.sense.terms import Terms

_FEW = 8
"""Of a tenant with more processes than this, only the exits of those on a card are listened for."""


class _Picture(msgspec.Struct, frozen=True):
    """What was found at one time."""

    table: Mapping[int, Process]
    on_cards: tuple[GpuProcess, ...]
    """The driver's list, without processes that have ended since or whose number is another's now."""
    inodes: Mapping[str, int]
    rules: Rules
    tenants: tuple[Tenant, ...]


class Tenants:
    """Tenants with their processes, cards and seats, and what the driver says of each on a card."""

    name = "tenants"
    interval = 0.0
    """Every tick: most of them find nothing new, and cost next to nothing."""

    def __init__(
        self,
        *,
        processes: Processes,
        cgroups: Cgroups,
        config: Config,
        agent_pid: int,
        events: ProcessEvents | None = None,
        runs: Runs | None = None,
    ) -> None:
        self._processes = processes
        self._runs: Runs = NoRuns() if runs is None else runs
        self._active = self._runs.active()
        self._cgroups = cgroups
        self._events = events
        self._agent_pid = agent_pid
        self._listed: tuple[GpuProcess, ...] | None = None
        self._started: dict[int, int] = {}
        self._picture: _Picture | None = None
        self._since: dict[str, float] = {}
        self._once: set[int] = set()
        """Processes that live and have been on a card."""
        self._present: frozenset[tuple[str, str]] = frozenset()
        self._table_read = float("-inf")
        self._hearing = False
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Take other rules; the next reading follows them."""
        self._given = config.tenants
        self._terms = Terms.of(config)
        self._rules = Rules(self._given, self._active)

    async def read(self, now: Instant, state: NodeState) -> Sensed:
        """Tenants, and readings where there is news. Raises Unavailable where /proc cannot be read.

        The tenants are said every time, the same objects while nothing changes: silence would mean
        that nobody looks any more.
        """
        heard = self._heard() | self._started_runs()
        listed = state.inventory.gpu_processes
        new_list = listed is not None and listed is not self._listed
        due = now.mono - self._table_read >= self._terms.found.table_interval
        before = self._picture
        changed_rules = before is not None and before.rules is not self._rules
        if not (heard or new_list or due or changed_rules):
            return Sensed(tenants=before.tenants if before is not None else None)
        picture = await asyncio.to_thread(
            self._look, now, listed if new_list else None, heard, due or before is None
        )
        if due or before is None:
            self._table_read = now.mono
        self._picture = picture
        if new_list:
            self._listed = listed
        changed = before is None or picture.tenants is not before.tenants
        if changed:
            self._listen(picture)
        return Sensed(
            readings=(
                *_counts(picture.tenants, now.mono),
                *(_on_cards(picture, now.mono) if new_list else ()),
            ),
            tenants=picture.tenants,
            events=self._turned(picture.tenants, now.mono) if changed else (),
        )

    def _started_runs(self) -> frozenset[int]:
        """Processes of the runs that are new, or that have their scope since: tenants by word."""
        active = self._runs.active()
        if active is self._active:
            return frozenset()
        news = frozenset(r.pid for r in active if r not in self._active)
        self._active = active
        self._rules = Rules(self._given, active)
        return news

    def _heard(self) -> frozenset[int]:
        """Processes with news. When hearing sets in again, the table has to make up for the gap."""
        if self._events is None:
            return frozenset()
        hearing = self._events.health.up is True
        if hearing and not self._hearing:
            self._table_read = float("-inf")
        self._hearing = hearing
        return frozenset(pid for pid, _ in self._events.take())

    def _look(
        self,
        now: Instant,
        new_list: Sequence[GpuProcess] | None,
        heard: frozenset[int],
        whole: bool,
    ) -> _Picture:
        """What is there now; the tenants of before where nothing has changed. Blocks: in a thread."""
        before = self._picture
        table = dict(before.table) if before is not None else {}
        if whole:
            table = {p.pid: p for p in self._processes.table()}
        listed = new_list if new_list is not None else self._listed or ()
        for pid in heard:
            self._read_again(table, pid, afresh=True)
        if new_list is not None:
            self._take_list(table, new_list)
        on_cards = tuple(
            p for p in listed if p.pid in table and table[p.pid].started == self._started.get(p.pid)
        )
        if before is not None and (
            before.rules is self._rules
            and before.table == table
            and _relation(before.on_cards) == _relation(on_cards)
            and (not whole or before.inodes == self._inodes(before.tenants))
        ):
            return msgspec.structs.replace(before, on_cards=on_cards)
        return self._found_in(table, on_cards, now)

    def _take_list(self, table: dict[int, Process], listed: Sequence[GpuProcess]) -> None:
        """See who they are whom the driver lists. What it says of a card it says in one piece: what
        is the same object as before was not said again, and is about those of before.
        """
        said_before = {id(p) for p in self._listed or ()}
        news = {p.pid for p in listed if id(p) not in said_before}
        for pid in news:
            self._read_again(table, pid, afresh=False)
        known = {pid: table[pid].started for pid in news if pid in table}
        others = {p.pid for p in listed} - news
        self._started = {pid: self._started[pid] for pid in others & self._started.keys()} | known

    def _read_again(self, table: dict[int, Process], pid: int, *, afresh: bool) -> None:
        known = None if afresh else table.get(pid)
        try:
            process = self._processes.read(pid) if known is None else self._processes.again(known)
        except Gone:
            table.pop(pid, None)
        else:
            table[pid] = process

    def _found_in(
        self, table: Mapping[int, Process], on_cards: tuple[GpuProcess, ...], now: Instant
    ) -> _Picture:
        processes = table.values()
        rules = self._rules
        own = own_processes(processes, self._agent_pid)
        self._once = {p.pid for p in on_cards} | (self._once & table.keys())
        claims = assign(
            processes, on_cards, rules=rules, terms=self._terms, own=own, once=self._once
        )
        self._since = {t.name: self._since.get(t.name, now.mono) for t in claims.tenants}
        dated = tuple(msgspec.structs.replace(t, since=self._since[t.name]) for t in claims.tenants)
        claims = msgspec.structs.replace(claims, tenants=dated)
        inodes = self._inodes(dated)
        tenants = seated(claims, processes, inodes=inodes, own=own)
        before = self._picture
        if before is not None and before.tenants == tenants:
            tenants = before.tenants
        return _Picture(table=table, on_cards=on_cards, inodes=inodes, rules=rules, tenants=tenants)

    def _inodes(self, tenants: Iterable[Tenant]) -> dict[str, int]:
        found: dict[str, int] = {}
        try:
            self._cgroups.tree()
        except Unavailable:
            return found  # who is whose is known without; the sensor of cgroups says why
        for path in seat_paths(tenants):
            try:
                found[path] = self._cgroups.inode(path)
            except (Gone, Refused, Unsupported):
                continue  # no seat there; the refusal says so
        return found

    def _listen(self, picture: _Picture) -> None:
        """Hear of what changes tenants: exits on a card or of the last few, a tenant's first exec."""
        if self._events is None:
            return
        on_card = {p.pid for p in picture.on_cards}
        wanted = {
            p.pid
            for t in picture.tenants
            for p in t.processes
            if len(t.processes) <= _FEW or p.pid in on_card
        }
        present = {t.name for t in picture.tenants}

        def begins_tenant(pid: int) -> bool:
            try:
                # One small file tells of most that they cannot; only for the others it is four.
                if self._rules.may_claim(self._processes.cgroup(pid)) <= present:
                    return False
                rule = self._rules.claim(self._processes.read(pid))
            except (Gone, Unavailable):
                return False
            return rule is not None and rule.name not in present

        absent = any(rule not in present for rule in self._rules.names)
        self._events.watch(wanted, begins_tenant if absent else None)

    def _turned(self, tenants: Sequence[Tenant], at: float) -> tuple[Event, ...]:
        """Who has come and gone since the tenants before."""
        present = frozenset((t.name, gpu) for t in tenants for gpu in (t.gpus or ())) | frozenset(
            (t.name, "") for t in tenants
        )
        came, left = present - self._present, self._present - present
        self._present = present
        names = {t.name for t in tenants}
        with_card = {name for name, gpu in came if gpu}
        events = [
            _event("tenant-appeared", name, gpu, "first process on" if gpu else "first process", at)
            for name, gpu in sorted(came)
            if gpu or name not in with_card
        ]
        events += [
            _event("tenant-left", name, gpu, "no process left on" if gpu else "has ended", at)
            for name, gpu in sorted(left)
            if not gpu or name in names
        ]
        return tuple(events)


def _event(kind: str, name: str, gpu: str, what: str, at: float) -> Event:
    subject = on_tenant_gpu(name, gpu) if gpu else on_tenant(name)
    return Event(kind, at, f"tenant {name}: {what} {gpu}".rstrip(), subject)


def _relation(listed: Iterable[GpuProcess]) -> set[tuple[int, str]]:
    return {(p.pid, p.gpu) for p in listed}


def _counts(tenants: Iterable[Tenant], at: float) -> list[Reading]:
    return [Reading(TENANT_PROCESSES, on_tenant(t.name), t.process_count, at) for t in tenants]


def _on_cards(picture: _Picture, at: float) -> list[Reading]:
    """Memory, utilisation and number of processes of each tenant on each card, as far as known."""
    owners = owners_of(picture.tenants)
    lists: dict[tuple[str, str], list[GpuProcess]] = {}
    for listed in picture.on_cards:
        if listed.pid in owners:
            lists.setdefault((owners[listed.pid].name, listed.gpu), []).append(listed)
    readings: list[Reading] = []
    for (name, gpu), some in lists.items():
        subject = on_tenant_gpu(name, gpu)
        memory, utilization = _memory_bytes(some), _utilization_ratio(some)
        readings.append(Reading(TENANT_GPU_PROCESSES, subject, len({p.pid for p in some}), at))
        if memory is not None:
            readings.append(Reading(TENANT_GPU_MEMORY_BYTES, subject, memory, at))
        if utilization is not None:
            ratio, exact = utilization
            readings.append(Reading(TENANT_GPU_UTILIZATION_RATIO, subject, ratio, at, exact=exact))
    return readings


def _memory_bytes(listed: Iterable[GpuProcess]) -> int | None:
    """Memory of these processes; None unless all of it is known.

    A process that both computes and draws is listed twice with the same memory.
    """
    of: dict[tuple[int, str], int] = {}
    for process in listed:
        if process.memory_bytes is None:
            return None
        key = (process.pid, process.mig)
        of[key] = max(of.get(key, 0), process.memory_bytes)
    return sum(of.values())


def _utilization_ratio(listed: Iterable[GpuProcess]) -> tuple[float, bool] | None:
    """Share of time in which their kernels ran, at most 1, and whether all of it is known."""
    of: dict[int, float | None] = {}
    for process in listed:
        said, known = process.utilization_ratio, of.get(process.pid)
        of[process.pid] = said if known is None or (said is not None and said > known) else known
    known_ones = [ratio for ratio in of.values() if ratio is not None]
    if not known_ones:
        return None
    return min(max(sum(known_ones), 0.0), 1.0), len(known_ones) == len(of)
