"""Families and tenants that are only observed: what would be done is said, and nothing is written."""

from pathlib import Path

import pytest

from gpuagent.act.desk import Reach
from gpuagent.model.vocab import CPU_MAX, POWER_LIMIT
from tests.act.host import OBSERVES, Agent, card, cpu_dial, power_dial, seat, wish

ONLY_POWER = Reach(families=frozenset({"power_limit"}))
NOT_A = Reach(observed=frozenset({"a"}))


async def test_a_family_that_is_left_out_is_only_said(tmp_path: Path) -> None:
    cpu, power = cpu_dial(a="4"), power_dial(700.0)
    async with Agent(tmp_path, cpu, power) as agent:
        agent.reconciler.reach = ONLY_POWER
        told = await agent.tick(wish(CPU_MAX, seat("a"), 2), wish(POWER_LIMIT, card(1), 300))
        assert told[CPU_MAX, seat("a")].result == "would"
        assert told[CPU_MAX, seat("a")].why == "enforce.families leaves cpu_max out"
        assert told[POWER_LIMIT, card(1)].result == "applied"
        assert cpu.writes == []


async def test_so_is_a_tenant_and_no_other(tmp_path: Path) -> None:
    cpu = cpu_dial(a="4", b="4")
    async with Agent(tmp_path, cpu) as agent:
        agent.reconciler.reach = NOT_A
        told = await agent.tick(*(wish(CPU_MAX, seat(n), 2) for n in "ab"))
        assert told[CPU_MAX, seat("a")].why == "a is only observed, as its rule says"
        assert [s for s, _ in cpu.writes] == [seat("b")]


@pytest.mark.parametrize("reach", [Reach(families=frozenset()), NOT_A])
async def test_what_is_held_when_it_comes_out_of_reach_is_put_back(
    tmp_path: Path, reach: Reach
) -> None:
    cpu = cpu_dial(a="4")
    async with Agent(tmp_path, cpu) as agent:
        await agent.tick(wish(CPU_MAX, seat("a"), 2))
        assert cpu.values[seat("a")] == "2"
        agent.reconciler.reach = reach
        told = await agent.tick(wish(CPU_MAX, seat("a"), 2))
        assert told[CPU_MAX, seat("a")].result == "would"
        assert cpu.values[seat("a")] == "4"
        assert not agent.ledger.entries


async def test_an_agent_that_only_observes_says_that(tmp_path: Path) -> None:
    async with Agent(tmp_path, cpu_dial(a="4")) as agent:
        agent.reconciler.reach = NOT_A
        told = await agent.tick(wish(CPU_MAX, seat("a"), 2), posture=OBSERVES)
        assert told[CPU_MAX, seat("a")].why == "the agent only observes now"
