"""What an earlier run left on the host stays until it is decided upon, or is told to go."""

from pathlib import Path

import pytest

from gpuagent.act.restore import Occasion, put_back
from gpuagent.errors import Unavailable
from gpuagent.model.declare import BUDGET_RULE
from gpuagent.model.plan import Posture
from gpuagent.model.vocab import CPU_MAX, POWER_LIMIT
from tests.act.host import (
    ACTS,
    DEMOTED,
    OBSERVES,
    PAUSED,
    Agent,
    Dial,
    card,
    cpu_dial,
    power_dial,
    seat,
    wish,
)

A, B = seat("a"), seat("b")

KEY_1 = (POWER_LIMIT, card(1))


async def crashed(folder: Path, *dials: Dial, rule: str = BUDGET_RULE) -> None:
    async with Agent(folder, *dials) as agent:
        values = [
            (d.knob, s, 400 if d.knob is POWER_LIMIT else 0.5) for d in dials for s in d.values
        ]
        await agent.tick(*(wish(*v, rule=rule) for v in values))


async def begin(agent: Agent, occasion: Occasion = Occasion.CRASH) -> None:
    """What the daemon does before its first decision."""
    report = await put_back(
        ledger=agent.ledger, actuators=agent.actuators, occasion=occasion, clock=agent.clock
    )
    agent.reconciler.adopt(report, now=agent.clock.now())


async def test_adopted_values_wait_for_the_first_decision(tmp_path: Path) -> None:
    dial = power_dial(700.0)
    await crashed(tmp_path, dial)
    async with Agent(tmp_path, dial) as agent:
        await begin(agent)
        # The first decision needs the original: the most that the card may have.
        assert [o.original for o in agent.reconciler.outcomes()] == [700]
        told = (await agent.tick())[KEY_1]
        assert (told.result, told.real, told.original) == ("applied", 400, 700)
        assert "until a first complete decision, for 30 s at most" in told.why
        await agent.tick(wish(POWER_LIMIT, card(1), 350))
        assert dial.values[card(1)] == "350"
        await agent.tick()
        assert dial.values[card(1)] == "700.0"


@pytest.mark.parametrize("ended_by", ["decision", "time", "observe", "pause", "nothing"])
async def test_adoption_ends(tmp_path: Path, ended_by: str) -> None:
    dial = power_dial(700.0)
    await crashed(tmp_path, dial)
    async with Agent(tmp_path, dial) as agent:
        await begin(agent)
        await agent.tick()
        assert dial.values[card(1)] == "400"
        posture = {"observe": OBSERVES, "pause": PAUSED}.get(ended_by, ACTS)
        await agent.tick(
            posture=posture,
            complete=ended_by == "decision",
            seconds=31 if ended_by == "time" else 1,
        )
        assert dial.values[card(1)] == ("400" if ended_by == "nothing" else "700.0")
        await agent.tick()
        assert dial.values[card(1)] == ("400" if ended_by == "nothing" else "700.0")


async def test_a_complete_decision_that_wishes_it_takes_over(tmp_path: Path) -> None:
    dial = power_dial(700.0)
    await crashed(tmp_path, dial)
    async with Agent(tmp_path, dial) as agent:
        await begin(agent)
        told = await agent.tick(wish(POWER_LIMIT, card(1), 400), complete=True)
        assert (told[KEY_1].result, told[KEY_1].original) == ("applied", 700)
        assert len(dial.writes) == 1


@pytest.mark.parametrize("wished", [True, False])
async def test_the_third_crash_holds_while_observing(tmp_path: Path, wished: bool) -> None:
    dial = power_dial(700.0)
    await crashed(tmp_path, dial)
    async with Agent(tmp_path, dial) as agent:
        await begin(agent, Occasion.RESCUE)
        wishes = [wish(POWER_LIMIT, card(1), 350)] if wished else []
        for seconds in (1, 1e6):
            told = await agent.tick(*wishes, posture=DEMOTED, complete=wished, seconds=seconds)
            assert dial.values[card(1)] == "400"
            wanted = 350 if wished else None
            assert (told[KEY_1].wanted, told[KEY_1].original) == (wanted, 700)
            assert told[KEY_1].result == ("would" if wished else "applied")
            assert "held from before the crash" in told[KEY_1].why


DEMOTED_AND = {
    "paused": Posture("enforce", demoted="three crashes", paused=True),
    "told to observe": Posture("observe", demoted="three crashes"),
}


@pytest.mark.parametrize("ended_by", ["paused", "told to observe", "rule removed"])
async def test_an_operator_ends_what_the_third_crash_holds(tmp_path: Path, ended_by: str) -> None:
    dial = power_dial(700.0)
    await crashed(tmp_path, dial)
    async with Agent(tmp_path, dial) as agent:
        await begin(agent, Occasion.RESCUE)
        held = wish(POWER_LIMIT, card(1), 400)
        await agent.tick(held, posture=DEMOTED, complete=True)
        assert dial.values[card(1)] == "400"
        wishes = [] if ended_by == "rule removed" else [held]
        posture = DEMOTED_AND.get(ended_by, DEMOTED)
        await agent.tick(*wishes, posture=posture, complete=True)
        assert dial.values[card(1)] == "700.0"
        await agent.tick(held, posture=DEMOTED)
        assert not agent.ledger.entries


async def test_what_is_held_and_changed_by_another_is_no_longer_ours(tmp_path: Path) -> None:
    dial = power_dial(700.0)
    await crashed(tmp_path, dial)
    async with Agent(tmp_path, dial) as agent:
        await begin(agent, Occasion.RESCUE)
        await agent.tick(posture=DEMOTED)
        dial.values[card(1)] = "500"
        assert await agent.tick(posture=DEMOTED) == {}
        assert dial.values[card(1)] == "500"
        assert agent.reconciler.outside_changes[POWER_LIMIT.name] == 1


async def test_a_limit_for_heat_is_put_back_before_the_first_decision(tmp_path: Path) -> None:
    dial = power_dial(700.0)
    await crashed(tmp_path, dial, rule="backpressure/temperature")
    async with Agent(tmp_path, dial) as agent:
        await begin(agent)
        assert dial.values[card(1)] == "700.0"


async def test_what_could_not_be_put_back_at_the_start_is_not_adopted(tmp_path: Path) -> None:
    dial = cpu_dial(a="max")
    await crashed(tmp_path, dial)
    async with Agent(tmp_path, dial) as agent:
        dial.set_errors[A] = Unavailable("not yet")
        await begin(agent)
        del dial.set_errors[A]
        await agent.tick()
        assert dial.values[A] == "max"


async def test_what_is_done_at_the_start_is_counted(tmp_path: Path) -> None:
    cpu, power = cpu_dial(a="max", b="max"), power_dial(700.0)
    await crashed(tmp_path, cpu, power)
    cpu.values[B] = "0.7"
    async with Agent(tmp_path, cpu, power) as agent:
        await begin(agent)
        actions = agent.reconciler.actions
        assert actions[CPU_MAX.name, "put back"] == 1
        assert actions[CPU_MAX.name, "left alone"] == 1
        assert agent.reconciler.outside_changes[CPU_MAX.name] == 1
        assert not any(n for (knob, _), n in actions.items() if knob == POWER_LIMIT.name)


async def test_what_was_never_adopted_is_put_back(tmp_path: Path) -> None:
    dial = power_dial(700.0)
    await crashed(tmp_path, dial)
    async with Agent(tmp_path, dial) as agent:
        assert await agent.tick() == {}
        assert dial.values[card(1)] == "700.0"
