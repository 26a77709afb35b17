"""Cards and processes of values, for the knobs on them: what a driver would keep, and how it can fail."""

from collections.abc import Callable, Mapping

from gpuagent.act.cards import ClockLimit, ComputeMode, PersistenceMode, TimeSlice
from gpuagent.act.ledger import Ledger
from gpuagent.act.record import Entry, Kept, Target
from gpuagent.errors import AgentError, Gone
from gpuagent.ports import Actuator, CardSettings, CudaState, Freed, Keep, TimeSlices


class Cards:
    """`ports.CardSettings`. No call reads back `locks`, but a test may."""

    def __init__(self, *uuids: str) -> None:
        self.locks: dict[str, float | None] = dict.fromkeys(uuids)
        self.modes = dict.fromkeys(uuids, 0)
        self.persistence = dict.fromkeys(uuids, False)
        self.fails: AgentError | None = None
        self.loses_answers = False
        """Whether a write is made, and then fails all the same."""
        self.calls = 0

    def _pass(self, uuid: str, write: Callable[[], None] = lambda: None) -> None:
        self.calls += 1
        if uuid not in self.locks:
            raise Gone(f"there is no GPU {uuid}")
        if self.fails is None or self.loses_answers:
            write()
        if self.fails is not None:
            raise self.fails

    async def set_clock_limit(self, uuid: str, hertz: float | None) -> None:
        self._pass(uuid, lambda: self.locks.__setitem__(uuid, hertz))

    async def compute_mode(self, uuid: str) -> int:
        self._pass(uuid)
        return self.modes[uuid]

    async def set_compute_mode(self, uuid: str, mode: int) -> None:
        self._pass(uuid, lambda: self.modes.__setitem__(uuid, mode))

    async def persistence_mode(self, uuid: str) -> bool:
        self._pass(uuid)
        return self.persistence[uuid]

    async def set_persistence_mode(self, uuid: str, on: bool) -> None:
        self._pass(uuid, lambda: self.persistence.__setitem__(uuid, on))


class Slices:
    """`ports.TimeSlices`."""

    def __init__(self, *uuids: str) -> None:
        self.values = dict.fromkeys(uuids, 0)

    async def get(self, uuid: str) -> int:
        if uuid not in self.values:
            raise Gone(f"there is no GPU {uuid}")
        return self.values[uuid]

    async def set(self, uuid: str, slice_: int) -> None:
        await self.get(uuid)
        self.values[uuid] = slice_


class Checkpoints:
    """`ports.Checkpoint`: a process runs until it is suspended."""

    def __init__(self) -> None:
        self.suspended: set[int] = set()

    async def state(self, pid: int, started: int) -> CudaState:
        return "suspended" if pid in self.suspended else "runs"

    async def suspend(self, pid: int, started: int, keep: Keep) -> None:
        await keep({"GPU-1": 1})
        self.suspended.add(pid)

    async def resume(self, pid: int, started: int, freed: Freed | None) -> None:
        self.suspended.discard(pid)


class Notes:
    """What `Suspensions` needs of a ledger: a real one where a test has one, else what was kept here."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = ledger
        self.own: dict[Target, Entry] = {}

    @property
    def entries(self) -> Mapping[Target, Entry]:
        return self.own if self.ledger is None else self.ledger.entries

    def held(self, target: Target) -> Entry | None:
        return self.entries.get(target)

    async def keep(self, target: Target, freed: Mapping[str, int] | None) -> None:
        if self.ledger is not None:
            await self.ledger.keep(target, freed)
            return
        self.hold(target, freed=None if freed is None else tuple(sorted(freed.items())))

    def hold(self, target: Target, *, freed: tuple[tuple[str, int], ...] | None = None) -> None:
        was = Kept("runs", 0.0)
        self.own[target] = Entry(
            1, target.knob, target.subject, "", "b1", was, (), pending=False, wall=0, freed=freed
        )


def dials(
    cards: CardSettings,
    slices: TimeSlices,
    *,
    unlocked: bool = True,
    ledger: Callable[[], Ledger | None] = lambda: None,
) -> tuple[Actuator, ...]:
    """The four knobs, as a run with this ledger makes them."""

    def held(target: Target) -> bool:
        book = ledger()
        return book is not None and book.held(target) is not None

    return (
        ClockLimit(cards, unlocked=lambda _: unlocked, held=held),
        ComputeMode(cards),
        PersistenceMode(cards),
        TimeSlice(slices),
    )
