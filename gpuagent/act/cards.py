"""How a card's clock limit, modes and time slice are read, encoded and written.

Modes have no looser end: what is wished is written, in either direction, and the original put back.
"""

import math
from collections.abc import Callable

from gpuagent.act.record import Target, target_of
from gpuagent.errors import AgentError, Gone, Refused, Unavailable
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import Subject
from gpuagent.model.vocab import CLOCK_LIMIT, COMPUTE_MODE, PERSISTENCE_MODE, TIME_SLICE
from gpuagent.ports import CardSettings, Real, TimeSlices

_UNLOCKED = Real(math.inf, "unlocked")
_UNKNOWN = Real(math.inf, CLOCK_LIMIT.leftover)
"""A lock of ours may be on the card, or may not: it counts as the loosest there can be."""


class OnCard:
    """What all of them have in common: a card is its UUID, and only root may set it."""

    async def identity(self, subject: Subject) -> str:
        """The card's UUID, which no other card has. Whether it is there shows when it is read."""
        return subject.gpu

    async def verify(self, subject: Subject, identity: str) -> None:
        if subject.gpu != identity:
            raise Gone(f"{subject} is not {identity}")

    async def owner(self, subject: Subject) -> int:
        return 0


class ClockLimit(OnCard):
    """The raw text is whole hertz, "unlocked", or "unknown".

    No call reads a lock back, so what is told is what was written last. Before anything was: unlocked
    where the operator has declared that, and unknown where an earlier run of ours has left an entry
    in the ledger, or the last write got no answer.
    """

    knob: Knob = CLOCK_LIMIT

    def __init__(
        self,
        cards: CardSettings,
        *,
        unlocked: Callable[[str], bool],
        held: Callable[[Target], bool],
    ) -> None:
        """`unlocked` is what is declared of a card, `held` whether the ledger has an entry."""
        self._cards = cards
        self._unlocked = unlocked
        self._held = held
        self._wrote: dict[str, Real] = {}

    async def get(self, subject: Subject) -> Real:
        """Raises Refused where it is not known whether the card's clocks are locked."""
        known = self._wrote.get(subject.gpu)
        if known is not None:
            return known
        if self._held(target_of(self.knob, subject)):
            return _UNKNOWN
        if self._unlocked(subject.gpu):
            return _UNLOCKED
        raise Refused(
            "no call tells whether somebody has locked the clocks of this card: run "
            "`nvidia-smi -rgc` and declare it with clock_unlocked = true in [[cards]]"
        )

    def encode(self, subject: Subject, value: float, original: Real) -> Real:
        """Rounded down to a hertz; the card takes the nearest clock below."""
        # Written so that not-a-number, too, asks for nothing.
        if not 0 < value < original.value:
            return original
        hertz = max(1, math.floor(value))
        return Real(float(hertz), str(hertz))

    async def set(self, subject: Subject, raw: str) -> None:
        after = _clock(raw)
        before = self._wrote.get(subject.gpu)
        # A write that gets no answer may have been made, and may have not.
        self._wrote[subject.gpu] = _UNKNOWN
        try:
            await self._cards.set_clock_limit(subject.gpu, _hertz(after))
        except Unavailable:
            raise
        except AgentError:
            self._restore(subject, before)
            raise
        self._wrote[subject.gpu] = after

    def _restore(self, subject: Subject, before: Real | None) -> None:
        """The write was refused: the clocks are as they were."""
        if before is not None:
            self._wrote[subject.gpu] = before
        elif self._unlocked(subject.gpu):
            self._wrote[subject.gpu] = _UNLOCKED


def _clock(raw: str) -> Real:
    if raw == _UNLOCKED.raw:
        return _UNLOCKED
    if not (raw.isascii() and raw.isdecimal() and 0 < len(raw) <= 15 and int(raw)):
        raise Refused(f"{raw[:80]!r} is not a clock in hertz")
    return Real(float(int(raw)), raw)


def _hertz(clock: Real) -> float | None:
    return None if clock.raw == _UNLOCKED.raw else clock.value


class Mode(OnCard):
    """A setting that is one of a few numbers. The raw text is the number."""

    knob: Knob
    _legal: tuple[int, ...]

    def encode(self, subject: Subject, value: float, original: Real) -> Real:
        """The wanted number as it is: no mode is looser than another. One that is none: the original."""
        if value not in self._legal:
            return original
        return _mode(int(value))

    def _number(self, raw: str) -> int:
        if raw not in {str(n) for n in self._legal}:
            raise Refused(f"{raw[:80]!r} is no value of {self.knob.name}")
        return int(raw)


def _mode(number: int) -> Real:
    return Real(float(number), str(number))


class ComputeMode(Mode):
    """NVML's number: 0 default, 2 prohibited, 3 exclusive process; 1 is gone since CUDA 8."""

    knob = COMPUTE_MODE
    _legal = (0, 2, 3)

    def __init__(self, cards: CardSettings) -> None:
        self._cards = cards

    async def get(self, subject: Subject) -> Real:
        return _mode(await self._cards.compute_mode(subject.gpu))

    async def set(self, subject: Subject, raw: str) -> None:
        await self._cards.set_compute_mode(subject.gpu, self._number(raw))


class PersistenceMode(Mode):
    """1 on, 0 off."""

    knob = PERSISTENCE_MODE
    _legal = (0, 1)

    def __init__(self, cards: CardSettings) -> None:
        self._cards = cards

    async def get(self, subject: Subject) -> Real:
        return _mode(int(await self._cards.persistence_mode(subject.gpu)))

    async def set(self, subject: Subject, raw: str) -> None:
        await self._cards.set_persistence_mode(subject.gpu, bool(self._number(raw)))


class TimeSlice(Mode):
    """0 default, 1 short, 2 medium, 3 long."""

    knob = TIME_SLICE
    _legal = (0, 1, 2, 3)

    def __init__(self, slices: TimeSlices) -> None:
        self._slices = slices

    async def get(self, subject: Subject) -> Real:
        return _mode(await self._slices.get(subject.gpu))

    async def set(self, subject: Subject, raw: str) -> None:
        await self._slices.set(subject.gpu, self._number(raw))
