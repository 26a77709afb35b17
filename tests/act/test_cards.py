"""Clock limits, modes and time slices of cards: both directions, and back after every kind of end."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.act.ledger import Ledger
from gpuagent.act.restore import Occasion, Report, put_back
from gpuagent.errors import AgentError, Gone, Refused, Unavailable, Unsupported
from gpuagent.model.declare import Knob
from gpuagent.model.vocab import CLOCK_LIMIT, COMPUTE_MODE, PERSISTENCE_MODE, TIME_SLICE
from gpuagent.ports import Actuator, Real
from tests.act.host import OBSERVES, Agent, Clock, Inline, card, wish
from tests.act.settings import Cards, Slices, dials

ONE = card(1)
GHZ = 1e9


class World:
    """Two cards and whoever turns their knobs, run after run over one state directory."""

    def __init__(self, folder: Path, *, unlocked: bool = True) -> None:
        self.folder = folder
        self.cards = Cards("GPU-1", "GPU-2")
        self.slices = Slices("GPU-1", "GPU-2")
        self.unlocked = unlocked

    def agent(self) -> Agent:
        found: list[Agent] = []
        made = dials(
            self.cards,
            self.slices,
            unlocked=self.unlocked,
            ledger=lambda: found[0].ledger if found else None,
        )
        found.append(Agent(self.folder, *made))
        return found[0]

    async def put_back(self, occasion: Occasion) -> Report:
        """As a new process does it, with a new ledger and new actuators."""
        ledger = Ledger(str(self.folder), boot="b1", executor=Inline())
        try:
            made = dials(self.cards, self.slices, unlocked=self.unlocked, ledger=lambda: ledger)
            return await put_back(ledger=ledger, actuators=made, occasion=occasion, clock=Clock())
        finally:
            await ledger.close()

    def value(self, knob: Knob) -> float | None:
        """What the first card really has."""
        return {
            CLOCK_LIMIT: self.cards.locks["GPU-1"],
            COMPUTE_MODE: self.cards.modes["GPU-1"],
            PERSISTENCE_MODE: self.cards.persistence["GPU-1"],
            TIME_SLICE: self.slices.values["GPU-1"],
        }[knob]

    def put(self, knob: Knob, value: int) -> None:
        """Somebody else sets it."""
        if knob is COMPUTE_MODE:
            self.cards.modes["GPU-1"] = value
        elif knob is PERSISTENCE_MODE:
            self.cards.persistence["GPU-1"] = bool(value)
        else:
            self.slices.values["GPU-1"] = value


CHANGES = [
    (CLOCK_LIMIT, None, 1.4 * GHZ),
    (COMPUTE_MODE, 0, 3),
    (COMPUTE_MODE, 3, 0),
    (COMPUTE_MODE, 2, 3),
    (PERSISTENCE_MODE, 0, 1),
    (PERSISTENCE_MODE, 1, 0),
    (TIME_SLICE, 0, 3),
    (TIME_SLICE, 3, 1),
]


MORE_THAN_TWO = [c for c in CHANGES if c[0] in (COMPUTE_MODE, TIME_SLICE)]
"""Of the others, what somebody else sets is the original or ours."""


@pytest.mark.parametrize(("knob", "before", "wanted"), CHANGES)
async def test_a_change_in_either_direction_is_made_and_put_back(
    tmp_path: Path, knob: Knob, before: int | None, wanted: float
) -> None:
    world = World(tmp_path)
    if before is not None:
        world.put(knob, before)
    async with world.agent() as agent:
        told = await agent.tick(wish(knob, ONE, wanted))
        await agent.reconciler.settled()
        assert world.value(knob) == wanted
        told = await agent.tick(wish(knob, ONE, wanted))
        assert told[knob, ONE].result == "applied"
        await agent.tick()
        await agent.reconciler.settled()
        assert world.value(knob) == before
        assert not agent.ledger.entries
        assert not agent.reconciler.outside_changes[knob.name]


@pytest.mark.parametrize(("knob", "before", "wanted"), CHANGES)
@pytest.mark.parametrize("occasion", [Occasion.CRASH, Occasion.RESCUE, Occasion.BY_HAND])
async def test_after_kill_9_a_new_process_puts_it_back(
    tmp_path: Path, knob: Knob, before: int | None, wanted: float, occasion: Occasion
) -> None:
    world = World(tmp_path)
    if before is not None:
        world.put(knob, before)
    async with world.agent() as agent:
        await agent.tick(wish(knob, ONE, wanted))
        await agent.reconciler.settled()
        assert world.value(knob) == wanted
        await agent.die()
    (item,) = await world.put_back(occasion)
    assert (item.what, world.value(knob)) == ("put back", before)
    assert await world.put_back(Occasion.BY_HAND) == ()


@pytest.mark.parametrize(("knob", "before", "wanted"), MORE_THAN_TWO)
async def test_what_somebody_else_set_since_is_left(
    tmp_path: Path, knob: Knob, before: int, wanted: float
) -> None:
    world = World(tmp_path)
    world.put(knob, before)
    async with world.agent() as agent:
        await agent.tick(wish(knob, ONE, wanted))
        await agent.reconciler.settled()
        await agent.die()
    other = next(n for n in (0, 2, 3) if n not in (before, wanted))
    world.put(knob, other)
    (item,) = await world.put_back(Occasion.CRASH)
    assert (item.what, world.value(knob)) == ("left alone", other)


# -- the clock limit, which nobody can read back ---------------------------------------------------------


async def test_clocks_are_not_touched_unless_they_are_declared_unlocked(tmp_path: Path) -> None:
    world = World(tmp_path, unlocked=False)
    async with world.agent() as agent:
        told = await agent.tick(wish(CLOCK_LIMIT, ONE, GHZ))
        assert told[CLOCK_LIMIT, ONE].result == "refused"
        assert "clock_unlocked = true in [[cards]]" in told[CLOCK_LIMIT, ONE].why
        assert not agent.ledger.entries
    assert world.cards.calls == 0


async def test_a_lock_of_before_the_crash_is_undone_though_nothing_is_declared_any_more(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    async with world.agent() as agent:
        await agent.tick(wish(CLOCK_LIMIT, ONE, GHZ))
        await agent.reconciler.settled()
        await agent.die()
    world.unlocked = False
    (item,) = await world.put_back(Occasion.CRASH)
    assert (item.what, world.cards.locks["GPU-1"]) == ("put back", None)


async def test_a_lock_that_got_no_answer_is_written_again_and_undone(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.agent() as agent:
        world.cards.fails, world.cards.loses_answers = Unavailable("no answer"), True
        told = await agent.tick(wish(CLOCK_LIMIT, ONE, GHZ))
        assert (told[CLOCK_LIMIT, ONE].result, world.cards.locks["GPU-1"]) == ("in flight", GHZ)
        assert "no answer" in told[CLOCK_LIMIT, ONE].why
        world.cards.fails = None
        calls = world.cards.calls
        told = await agent.tick(wish(CLOCK_LIMIT, ONE, GHZ), seconds=5)
        await agent.reconciler.settled()
        assert world.cards.calls == calls + 1
        world.cards.fails = Unavailable("no answer")
        await agent.tick(wish(CLOCK_LIMIT, ONE, 2 * GHZ), seconds=5)
        world.cards.fails, world.cards.loses_answers = None, False
        await agent.tick(seconds=15)
        await agent.reconciler.settled()
        assert world.cards.locks["GPU-1"] is None
        assert not agent.ledger.entries


async def test_a_lock_that_is_refused_leaves_nothing_to_put_back(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.agent() as agent:
        world.cards.fails = Refused("only root")
        told = await agent.tick(wish(CLOCK_LIMIT, ONE, GHZ))
        assert told[CLOCK_LIMIT, ONE].result == "refused"
        assert told[CLOCK_LIMIT, ONE].real == math.inf
        calls = world.cards.calls
        await agent.tick(seconds=70)
        await agent.reconciler.settled()
        assert world.cards.calls == calls
        assert not agent.ledger.entries


async def test_observing_reads_no_card_and_writes_none(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.agent() as agent:
        told = await agent.tick(wish(CLOCK_LIMIT, ONE, GHZ), posture=OBSERVES)
        assert told[CLOCK_LIMIT, ONE].result == "would"
    assert world.cards.calls == 0


async def test_a_lock_is_raised_and_lowered(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.agent() as agent:
        for hertz in (1.2 * GHZ, 1.8 * GHZ, 0.9 * GHZ):
            await agent.tick(wish(CLOCK_LIMIT, ONE, hertz))
            await agent.reconciler.settled()
            assert world.cards.locks == {"GPU-1": hertz, "GPU-2": None}


# -- what is written, and what is not --------------------------------------------------------------------


def _all() -> tuple[Actuator, ...]:
    return dials(Cards("GPU-1"), Slices("GPU-1"))


@given(st.floats(), st.sampled_from([0, 1, 2, 3]))
def test_what_is_encoded_can_be_written(value: float, before: int) -> None:
    for dial in _all():
        was = Real(float(before), str(before))
        if dial.knob is CLOCK_LIMIT:
            was = Real(math.inf, "unlocked")
            new = dial.encode(ONE, value, was)
            assert new == was or new.value <= max(value, 1)
            continue
        new = dial.encode(ONE, value, was)
        assert new in (was, Real(value, f"{value:.0f}" if math.isfinite(value) else ""))


@pytest.mark.parametrize("raw", ["", "x", "-1", "0x1", "1.5", "9" * 40, "0\n", "unknown", "²"])
async def test_what_is_no_value_is_refused(raw: str) -> None:
    for dial in _all():
        with pytest.raises(Refused):
            await dial.set(ONE, raw)


@pytest.mark.parametrize("error", [Gone("x"), Refused("x"), Unsupported("x"), Unavailable("x")])
async def test_errors_pass(error: AgentError) -> None:
    cards = Cards("GPU-1")
    cards.fails = error
    _, compute, persistence, slices = dials(cards, Slices())
    for dial in (compute, persistence):
        with pytest.raises(type(error)):
            await dial.get(ONE)
    with pytest.raises(Gone):
        await slices.get(ONE)


async def test_a_card_is_its_uuid() -> None:
    for dial in _all():
        assert await dial.identity(ONE) == "GPU-1"
        await dial.verify(ONE, "GPU-1")
        with pytest.raises(Gone):
            await dial.verify(ONE, "GPU-2")
        assert await dial.owner(ONE) == 0
