"""Whom the agent answers, how often, and when it gives in."""

from pathlib import Path

import pytest

from gpuagent.act.contest import STAND_DOWN_SECONDS
from gpuagent.model.vocab import CPU_MAX
from tests.act.host import (
    Agent,
    cpu_dial,
    seat,
    wish,
)

A = seat("a")
KEY_A = (CPU_MAX, A)


async def test_a_contested_value_is_given_up_after_three_answers(tmp_path: Path) -> None:
    dial = cpu_dial(a="max")
    async with Agent(tmp_path, dial) as agent:
        for _ in range(4):
            told = (await agent.tick(wish(CPU_MAX, A, 0.5)))[KEY_A]
            assert told.result == "applied"
            dial.values[A] = "max"
        writes = len(dial.writes)
        for _ in range(10):
            told = (await agent.tick(wish(CPU_MAX, A, 0.5)))[KEY_A]
            assert told.result == "contested"
            assert told.original is None
        assert len(dial.writes) == writes == 4
        assert not agent.ledger.entries
        assert agent.reconciler.outside_changes[CPU_MAX.name] == 4
        assert agent.reconciler.actions[CPU_MAX.name, "contested"] == 1


async def test_a_wish_that_comes_and_goes_does_not_lift_the_bound(tmp_path: Path) -> None:
    dial = cpu_dial(a="max")
    async with Agent(tmp_path, dial) as agent:
        for _ in range(20):
            await agent.tick(wish(CPU_MAX, A, 0.5))
            dial.values[A] = "max"
            await agent.tick(wish(CPU_MAX, A, 0.5))
            dial.values[A] = "max"
            await agent.tick()
        answers = len(dial.writes)
        assert answers <= 20 + 3


@pytest.mark.parametrize("lifted_by", ["time", "rule"])
async def test_a_contest_ends_with_time_or_another_rule(tmp_path: Path, lifted_by: str) -> None:
    dial = cpu_dial(a="max")
    async with Agent(tmp_path, dial) as agent:
        for _ in range(5):
            await agent.tick(wish(CPU_MAX, A, 0.5))
            dial.values[A] = "max"
        other = wish(CPU_MAX, A, 0.5, rule="another/rule")
        assert (await agent.tick(other))[KEY_A].result == "contested"  # the rate still holds
        if lifted_by == "time":
            told = await agent.tick(other, seconds=STAND_DOWN_SECONDS + 1)
        else:
            told = await agent.tick(wish(CPU_MAX, A, 0.5), seconds=601)
        assert told[KEY_A].result == "applied"


async def test_an_owner_who_keeps_undoing_a_limit_is_answered_without_end(tmp_path: Path) -> None:
    dial = cpu_dial(a="max")
    dial.owners[A] = 1000
    async with Agent(tmp_path, dial) as agent:
        for _ in range(20):
            told = (await agent.tick(wish(CPU_MAX, A, 0.5), seconds=6))[KEY_A]
            assert (told.result, dial.values[A]) == ("applied", "0.5")
            dial.values[A] = "max"
        assert told.why == (
            "it reads 0.5; uid 1000, who owns its control file, has undone it 19 times"
        )
        assert agent.reconciler.actions[CPU_MAX.name, "contested"] == 0
        assert agent.reconciler.outside_changes[CPU_MAX.name] == 19


async def test_an_owner_is_answered_at_a_bounded_rate(tmp_path: Path) -> None:
    dial = cpu_dial(a="max")
    dial.owners[A] = 1000
    async with Agent(tmp_path, dial) as agent:
        waiting = 0
        for _ in range(100):
            told = (await agent.tick(wish(CPU_MAX, A, 0.5)))[KEY_A]
            waiting += told.result == "in flight"
            if told.result == "in flight":
                assert "uid 1000" in told.why
                assert "now to max; it is set again every 5 s" in told.why
            dial.values[A] = "max"
        assert len(dial.writes) <= 1 + 100 / 5
        assert waiting == 100 - len(dial.writes)
        # What he set last is his, and stays.
        await agent.tick()
        assert dial.values[A] == "max"
        assert not agent.ledger.entries
