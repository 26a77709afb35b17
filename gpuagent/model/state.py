"""What is known: readings that expire, the node's state, its history, and `fold`."""

from array import array
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from gpuagent.model.declare import Knob, Signal
from gpuagent.model.inventory import Gpu, GpuProcess, Inventory, MpsDaemon, Subject, Tenant
from gpuagent.model.lease import Lease
from gpuagent.model.source import SourceHealth


class Instant(msgspec.Struct, frozen=True):
    """One moment on every clock the agent uses."""

    mono: float
    """Monotonic seconds: all intervals are differences of these."""
    wall: float
    """Seconds since the epoch; may jump."""
    utc_offset: float = 0.0
    """Seconds east of UTC, for schedules in local time."""


Key = tuple[Signal, Subject, tuple[str, ...]]
"""Names one reading: signal, subject, and the values of the signal's dimensions."""


class Reading(msgspec.Struct, frozen=True):
    """A value somebody measured, in the unit the signal's name ends in."""

    signal: Signal
    subject: Subject
    value: float
    at: float
    """Monotonic seconds of the measurement, not of its arrival."""
    exact: bool = True
    """False for an estimate."""
    dims: tuple[str, ...] = ()

    @property
    def key(self) -> Key:
        return (self.signal, self.subject, self.dims)


class Event(msgspec.Struct, frozen=True):
    """Something that happened once: an XID, a process's first use of a card, a change of health."""

    kind: str
    at: float
    text: str
    subject: Subject | None = None
    numbers: tuple[tuple[str, float], ...] = ()
    alert: bool = False
    """Whether somebody should look at it."""
    number: int = 0
    """Counts the events of a run of the agent, from 1; 0 until it is published."""


EVENT_KINDS = (
    "crash",
    "demoted",
    "efficiency-ended",
    "efficiency-settled",
    "gpu-blind",
    "gpu-found",
    "gpu-recovered",
    "gpu-removed",
    "held-back",
    "l1-card-limit-ended",
    "l1-card-limited",
    "latency-source-down",
    "latency-source-up",
    "ledger-damaged",
    "lever-let-go",
    "lever-missed",
    "lever-tested",
    "mps-contexts-over",
    "mps-down",
    "mps-fault",
    "mps-shared-with-l1",
    "mps-unstarted",
    "mps-up",
    "no-lever-left",
    "off-hours-began",
    "off-hours-ended",
    "override-dropped",
    "override-expired",
    "override-refused",
    "override-set",
    "overrides-unreadable",
    "power-budget-changed",
    "power-budget-unreachable",
    "power-cap-unused",
    "power-unknown",
    "released",
    "reloaded",
    "run-admitted",
    "run-ended",
    "run-refused",
    "runs-unreadable",
    "share-cut",
    "share-raised",
    "tenant-appeared",
    "tenant-left",
    "token-issued",
    "token-revoked",
    "tokens-damaged",
    "would-hold-back",
    "would-limit-l1-card",
    "xid",
)
"""Those that are counted from the start, so that their first event shows as an increase."""


class Sensed(msgspec.Struct, frozen=True):
    """What one sensor has to say. `None` in an inventory part means: nothing said about it."""

    readings: tuple[Reading, ...] = ()
    gpus: tuple[Gpu, ...] | None = None
    gpu_processes: tuple[GpuProcess, ...] | None = None
    tenants: tuple[Tenant, ...] | None = None
    mps: tuple[MpsDaemon, ...] | None = None
    events: tuple[Event, ...] = ()
    sources: tuple[SourceHealth, ...] | None = None


class Health(msgspec.Struct, frozen=True):
    """How a sensor or an actuator fares."""

    name: str
    up: bool | None
    """None until it has been asked once."""
    why: str = ""
    """The reason it is down, for the operator; empty while up."""
    last_success: float | None = None
    """Monotonic seconds."""
    seconds: float = 0.0
    """How long the last reading took."""
    failures: int = 0


Result = Literal[
    "applied", "in flight", "pending", "would", "refused", "gone", "ineffective", "contested"
]
RESULTS: tuple[Result, ...] = (
    "applied",
    "in flight",
    "pending",
    "would",
    "refused",
    "gone",
    "ineffective",
    "contested",
)

Ending = Literal["put back", "left alone"]
ActionResult = Result | Ending
ACTION_RESULTS: tuple[ActionResult, ...] = (
    *(r for r in RESULTS if r != "in flight"),  # nothing has come of it yet
    "put back",
    "left alone",
)
"""All that an action can end in: the second half of each key of `Snapshot.actions`."""


class Outcome(msgspec.Struct, frozen=True):
    """What became of a setting."""

    knob: Knob
    subject: Subject
    wanted: float | None
    """None where the original is being put back."""
    real: float | None
    """As last read back; None where it never was."""
    original: float | None
    """What it was before our first write; None while it is not ours."""
    result: Result
    why: str
    at: float


KnobKey = tuple[Knob, Subject]


class Series:
    """A ring of (time, value) pairs in 16 bytes each: the newest `size`, at least `gap` apart."""

    __slots__ = ("_at", "_count", "_next", "_value", "gap", "newest")

    def __init__(self, size: int, gap: float) -> None:
        self.newest = float("-inf")
        self._at = array("d", bytes(8 * size))
        self._value = array("d", bytes(8 * size))
        self.gap = gap
        self._next = 0
        self._count = 0

    def add(self, at: float, value: float) -> None:
        """Append; a pair closer than `gap` to the one before, or older than it, is dropped."""
        if at - self.newest < self.gap:
            return
        self.newest = self._at[self._next] = at
        self._value[self._next] = value
        self._next = (self._next + 1) % len(self._at)
        self._count = min(self._count + 1, len(self._at))

    def since(self, start: float) -> list[tuple[float, float]]:
        """Pairs at or after `start`, oldest first."""
        at, value = self._at, self._value
        found: list[tuple[float, float]] = []
        i = self._next - 1  # a negative index wraps, as a ring does
        for _ in range(self._count):
            if at[i] < start:
                break
            found.append((at[i], value[i]))
            i -= 1
        found.reverse()
        return found


class History:
    """Bounded memory of the signals that keep one: 5 Hz for a minute, one in ten seconds for an hour.

    Each series costs 2 x (300 + 360) x 8 bytes = 10.3 KiB; there are never more than `limit`
    series. A new one takes the place of the longest silent; while all are heard it is not kept, so
    that those which are stay whole. Owned by `fold`; others take copies through `window`.
    """

    FINE = (300, 0.19)
    COARSE = (360, 9.9)
    SILENT_SECONDS = 60.0

    def __init__(self, limit: int = 1000) -> None:
        self._limit = limit
        self._series: dict[Key, tuple[Series, Series]] = {}
        self._full_until = float("-inf")
        """No series has been silent for long before then."""

    def __len__(self) -> int:
        return len(self._series)

    def add(self, reading: Reading) -> None:
        pair = self._series.get(reading.key)
        if pair is None:
            if not self._room(reading.at):
                return
            pair = self._series[reading.key] = (Series(*self.FINE), Series(*self.COARSE))
        for series in pair:
            if reading.at - series.newest >= series.gap:
                series.add(reading.at, reading.value)

    def _room(self, at: float) -> bool:
        """Whether there is room for one more series at this time, made if need be."""
        if len(self._series) < self._limit:
            return True
        if at < self._full_until:
            return False
        longest = min(self._series, key=lambda k: self._series[k][0].newest)
        self._full_until = self._series[longest][0].newest + self.SILENT_SECONDS
        if at < self._full_until:
            return False
        del self._series[longest]
        return True

    def window(
        self, signal: Signal, subject: Subject, start: float, dims: tuple[str, ...] = ()
    ) -> list[tuple[float, float]]:
        """(monotonic seconds, value) since `start`, oldest first; coarse where fine has ended."""
        pair = self._series.get((signal, subject, dims))
        if pair is None:
            return []
        fine = pair[0].since(start)
        edge = fine[0][0] if fine else float("inf")
        return [p for p in pair[1].since(start) if p[0] < edge] + fine

    def forget(self, before: float) -> None:
        """Drop series whose newest value is older than `before`."""
        for key in [k for k, (_, coarse) in self._series.items() if coarse.newest < before]:
            del self._series[key]


TENANTS_EXPIRE_SECONDS = 30.0


class NodeState:
    """Everything known at one instant. Not changed after `fold` has returned it.

    `history` is the one part that is shared between successive states: it only ever grows at its
    end, so a state must not be asked for windows once a later one exists.
    """

    __slots__ = (
        "acts",
        "events",
        "health",
        "history",
        "inventory",
        "leases",
        "now",
        "outcomes",
        "readings",
        "sources",
    )

    def __init__(
        self,
        now: Instant,
        *,
        inventory: Inventory | None = None,
        readings: Mapping[Key, Reading] | None = None,
        outcomes: Mapping[KnobKey, Outcome] | None = None,
        health: Mapping[str, Health] | None = None,
        events: tuple[Event, ...] = (),
        history: History | None = None,
        acts: bool = True,
        leases: tuple[Lease, ...] = (),
        sources: tuple[SourceHealth, ...] = (),
    ) -> None:
        self.now = now
        self.acts = acts
        self.leases = leases
        """The overrides in force, by name."""
        self.inventory = inventory if inventory is not None else Inventory()
        self.readings: Mapping[Key, Reading] = readings if readings is not None else {}
        self.outcomes: Mapping[KnobKey, Outcome] = outcomes if outcomes is not None else {}
        self.health: Mapping[str, Health] = health if health is not None else {}
        self.events = events
        """What happened since the state before."""
        self.sources = sources
        """Where latencies are read from, by tenant."""
        self.history = history if history is not None else History()

    def reading(
        self, signal: Signal, subject: Subject, dims: tuple[str, ...] = ()
    ) -> Reading | None:
        """The reading, or None when missing or older than its signal allows."""
        found = self.readings.get((signal, subject, dims))
        if found is None or self.now.mono - found.at > signal.expires:
            return None
        return found

    def fresh(self, signal: Signal, subject: Subject, dims: tuple[str, ...] = ()) -> float | None:
        """The value, or None when missing or stale. Never zero for unknown."""
        found = self.reading(signal, subject, dims)
        return None if found is None else found.value

    @property
    def cards_known(self) -> bool:
        """Whether every card there is can be read."""
        return self.inventory.gpus is not None and not any(g.blind for g in self.inventory.gpus)

    @property
    def tenants_known(self) -> bool:
        """Whether who is where, and who shares a cgroup with whom, is recent enough to act on."""
        return self.now.mono - self.inventory.tenants_at <= TENANTS_EXPIRE_SECONDS

    def live(self) -> Iterator[Reading]:
        """All readings that have not expired."""
        now = self.now.mono
        return (r for r in self.readings.values() if now - r.at <= r.signal.expires)


class Frame(msgspec.Struct, frozen=True):
    """The input of one tick: with the frames before it, it determines the state and the plan."""

    now: Instant
    sensed: tuple[Sensed, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    health: tuple[Health, ...] = ()
    acts: bool = True
    """Whether the agent may change anything: in observe nothing answers a lever."""
    leases: tuple[Lease, ...] = ()
    """The overrides in force."""


_FORGET_AFTER = 3600.0
_SWEEP_SECONDS = 10.0
"""Between two removals of readings that have expired; who asks for one of them is told None anyway."""


def fold(state: NodeState, frame: Frame) -> NodeState:
    """The state after `frame`. Pure but for `history`, which moves on to the new state."""
    inventory = _merge_inventory(state.inventory, frame)
    readings = _merge_readings(state, frame)
    if inventory.tenants is not state.inventory.tenants:
        _drop_departed(readings, inventory)
    history = state.history
    if frame.now.mono // 60 != state.now.mono // 60:  # once a minute is often enough
        history.forget(frame.now.mono - _FORGET_AFTER)
    return NodeState(
        frame.now,
        inventory=inventory,
        readings=readings,
        outcomes={(o.knob, o.subject): o for o in frame.outcomes},
        health={**state.health, **{h.name: h for h in frame.health}},
        events=tuple(e for s in frame.sensed for e in s.events),
        history=history,
        acts=frame.acts,
        leases=frame.leases,
        sources=next(
            (s.sources for s in reversed(frame.sensed) if s.sources is not None), state.sources
        ),
    )


def _merge_readings(state: NodeState, frame: Frame) -> dict[Key, Reading]:
    """Newest of each key, and what has a history added to it.

    What has expired for good is dropped now and then, so that memory is bounded.
    """
    now, history = frame.now.mono, state.history
    if now // _SWEEP_SECONDS == state.now.mono // _SWEEP_SECONDS:
        merged = dict(state.readings)
    else:
        merged = {k: r for k, r in state.readings.items() if now - r.at <= r.signal.expires}
    for sensed in frame.sensed:
        for reading in sensed.readings:
            key = reading.key
            known = merged.get(key)
            if known is None or known.at <= reading.at:
                merged[key] = reading
            if reading.signal.history:
                history.add(reading)
    return merged


def _drop_departed(readings: dict[Key, Reading], inventory: Inventory) -> None:
    """What was read of a tenant is true no longer once it has left."""
    present = {"", *(t.name for t in inventory.tenants or ())}
    for key in [k for k, r in readings.items() if r.subject.tenant not in present]:
        del readings[key]


def _merge_inventory(known: Inventory, frame: Frame) -> Inventory:
    gpus, processes, tenants = known.gpus, known.gpu_processes, known.tenants
    tenants_at, mps = known.tenants_at, known.mps
    for said in frame.sensed:
        mps = said.mps if said.mps is not None else mps
        gpus = said.gpus if said.gpus is not None else gpus
        processes = said.gpu_processes if said.gpu_processes is not None else processes
        if said.tenants is not None:
            tenants, tenants_at = said.tenants, frame.now.mono
    return Inventory(
        gpus=gpus, gpu_processes=processes, tenants=tenants, tenants_at=tenants_at, mps=mps
    )
