"""A stop, a crash, a rescue and a hand put back what the table says, and nothing else."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gpuagent.act.cpu import CpuMax
from gpuagent.act.ledger import Ledger
from gpuagent.act.record import target_of
from gpuagent.act.restore import Item, Occasion, failed, put_back
from gpuagent.config import Config, Power
from gpuagent.decide.power import PowerBudget
from gpuagent.errors import Refused, Unavailable
from gpuagent.model.declare import BUDGET_RULE
from gpuagent.model.inventory import on_cgroup
from gpuagent.model.vocab import CPU_MAX, CPU_WEIGHT, POWER_LIMIT
from gpuagent.ports import Actuator, Real
from tests.act.host import Agent, Clock, Dial, Inline, Tree, card, cpu_dial, seat, wish
from tests.decide.world import World, gpu, tenant

A, B = seat("a"), seat("b")
HEAT = "backpressure/temperature"


async def restored(
    folder: Path,
    *dials: Actuator,
    occasion: Occasion = Occasion.BY_HAND,
    boot: str = "b1",
    **more: Any,
) -> dict[object, Item]:
    ledger = Ledger(str(folder), boot=boot, executor=Inline())
    report = await put_back(
        ledger=ledger, actuators=dials, occasion=occasion, clock=Clock(), **more
    )
    await ledger.close()
    return {i.entry.subject: i for i in report}


async def killed(folder: Path, *dials: Dial, rule: str = "test/rule") -> None:
    """An agent that has held back /a and the card GPU-1, and was killed."""
    async with Agent(folder, *dials) as agent:
        await agent.tick(
            *(
                wish(d.knob, s, 400 if d.knob is POWER_LIMIT else 0.5, rule=rule)
                for d in dials
                for s in list(d.values)
            )
        )


def power() -> Dial:
    dial = Dial(POWER_LIMIT)
    dial.make(card(1), "700.0")
    return dial


@pytest.mark.parametrize(
    ("occasion", "keep", "what"),
    [
        (Occasion.STOP, False, "put back"),
        (Occasion.STOP, True, "held"),
        (Occasion.CRASH, False, "adopted"),
        (Occasion.RESCUE, False, "held"),
        (Occasion.BY_HAND, True, "put back"),
    ],
)
@pytest.mark.parametrize("rule", [BUDGET_RULE, HEAT, ""])
async def test_each_occasion_ends_as_the_table_says(
    tmp_path: Path, rule: str, occasion: Occasion, keep: bool, what: str
) -> None:
    if rule != BUDGET_RULE:
        what = "put back"
    cpu, cards = cpu_dial(a="max"), power()
    await killed(tmp_path, cpu, cards, rule=rule)
    report = await restored(tmp_path, cpu, cards, occasion=occasion, keep_on_stop=keep)
    assert cpu.values[A] == "max"
    assert cards.values[card(1)] == ("700.0" if what == "put back" else "400")
    assert (report[A].what, report[card(1)].what) == ("put back", what)
    # What was kept is still known, so that a hand can put it back later.
    await restored(tmp_path, cpu, cards)
    assert cards.values[card(1)] == "700.0"
    assert await restored(tmp_path, cpu, cards) == {}


@pytest.mark.parametrize(("last", "limit"), [(BUDGET_RULE, "400"), (HEAT, "700.0")])
@pytest.mark.parametrize("watts", [350, 400])
async def test_of_several_rules_the_last_one_counts(
    tmp_path: Path, last: str, limit: str, watts: float
) -> None:
    cards = power()
    first = HEAT if last == BUDGET_RULE else BUDGET_RULE
    async with Agent(tmp_path, cards) as agent:
        await agent.tick(wish(POWER_LIMIT, card(1), watts, rule=first))
        # Also where the value is so already, so that nothing is written.
        await agent.tick(wish(POWER_LIMIT, card(1), 400, rule=last))
        assert len(cards.writes) == (1 if watts == 400 else 2)
        await agent.ledger.flush()
    await restored(tmp_path, cards, occasion=Occasion.RESCUE)
    assert cards.values[card(1)] == limit


OVERRIDE = "override/quiet"


async def overridden(folder: Path, cards: Dial, *more: Any) -> None:
    """An agent under a budget of 600 W for a card, which an override held to 300 W; then killed."""
    async with Agent(folder, cards) as agent:
        wished = wish(
            POWER_LIMIT, card(1), 300, rule=OVERRIDE, also=(BUDGET_RULE,), budget_value=600.0
        )
        await agent.tick(wished, *more)
        await agent.ledger.flush()


@pytest.mark.parametrize(
    ("occasion", "keep", "watts"),
    [
        (Occasion.STOP, False, "700.0"),
        (Occasion.STOP, True, "600.0"),
        (Occasion.CRASH, False, "300"),
        (Occasion.RESCUE, False, "600.0"),
        (Occasion.BY_HAND, True, "700.0"),
    ],
)
async def test_an_override_does_not_outlive_the_agent_nor_break_the_budget(
    tmp_path: Path, occasion: Occasion, keep: bool, watts: str
) -> None:
    cards = power()
    await overridden(tmp_path, cards)
    assert cards.values[card(1)] == "300"
    for _ in range(2):  # the second time there is nothing left to ease
        report = await restored(tmp_path, cards, occasion=occasion, keep_on_stop=keep)
        assert not failed(report.values())
        assert cards.values[card(1)] == watts
    await restored(tmp_path, cards)
    assert cards.values[card(1)] == "700.0"
    assert await restored(tmp_path, cards) == {}


async def test_what_the_budget_asks_for_follows_without_a_write(tmp_path: Path) -> None:
    cards = power()
    async with Agent(tmp_path, cards) as agent:
        for budget in (600.0, 500.0):
            await agent.tick(
                wish(
                    POWER_LIMIT,
                    card(1),
                    300,
                    rule=OVERRIDE,
                    also=(BUDGET_RULE,),
                    budget_value=budget,
                )
            )
        assert len(cards.writes) == 1
        await agent.ledger.flush()
    await restored(tmp_path, cards, occasion=Occasion.RESCUE)
    assert cards.values[card(1)] == "500.0"


async def test_it_is_not_eased_while_another_card_may_have_more(tmp_path: Path) -> None:
    cards = power()
    cards.make(card(2), "700.0")
    cards.set_errors[card(2)] = Refused("no")
    await overridden(tmp_path, cards, wish(POWER_LIMIT, card(2), 400, rule=BUDGET_RULE))
    report = await restored(tmp_path, cards, occasion=Occasion.RESCUE)
    assert cards.values[card(1)] == "300"
    assert report[card(1)].what == "held"


async def test_easing_that_fails_is_told_and_tried_again(tmp_path: Path) -> None:
    cards = power()
    await overridden(tmp_path, cards)
    cards.set_errors[card(1)] = Refused("no")
    report = await restored(tmp_path, cards, occasion=Occasion.RESCUE)
    assert report[card(1)].what == "failed"
    del cards.set_errors[card(1)]
    await restored(tmp_path, cards, occasion=Occasion.RESCUE)
    assert cards.values[card(1)] == "600.0"


async def test_what_somebody_else_set_is_not_eased(tmp_path: Path) -> None:
    cards = power()
    await overridden(tmp_path, cards)
    cards.values[card(1)] = "450.0"
    report = await restored(tmp_path, cards, occasion=Occasion.RESCUE)
    assert report[card(1)].what == "left alone"
    assert cards.values[card(1)] == "450.0"


def test_the_budget_policy_makes_settings_of_the_budget_s_rule() -> None:
    policy = PowerBudget(Config(power=Power(budget=1000.0)))
    world = World(
        policy, gpus=[gpu("GPU-1", 0), gpu("GPU-2", 1)], tenants=[tenant("a", gpus=["GPU-1"])]
    )
    assert {s.rule for s in world.run(15).settings} == {BUDGET_RULE}


async def test_what_somebody_else_set_since_is_left_alone(tmp_path: Path) -> None:
    cpu = cpu_dial(a="max", b="max")
    await killed(tmp_path, cpu)
    cpu.values[A] = "0.7"
    report = await restored(tmp_path, cpu)
    assert (cpu.values[A], cpu.values[B]) == ("0.7", "max")
    assert report[A].what == "left alone"
    assert "0.7" in report[A].why
    assert await restored(tmp_path, cpu) == {}


async def test_any_of_our_writes_is_ours(tmp_path: Path) -> None:
    cpu = cpu_dial(a="max")
    async with Agent(tmp_path, cpu) as agent:
        for value in (0.5, 0.4, 0.3):
            await agent.tick(wish(CPU_MAX, A, value))
    cpu.values[A] = "0.4"
    await restored(tmp_path, cpu)
    assert cpu.values[A] == "max"


async def test_another_target_in_its_place_is_not_touched(tmp_path: Path) -> None:
    cpu = cpu_dial(a="max")
    await killed(tmp_path, cpu)
    cpu.identities[A] = "another"
    assert (await restored(tmp_path, cpu))[A].what == "gone"
    assert cpu.values[A] == "0.5"
    assert await restored(tmp_path, cpu) == {}


async def test_a_reboot_makes_it_all_void(tmp_path: Path) -> None:
    cpu, cards = cpu_dial(a="max"), power()
    await killed(tmp_path, cpu, cards)
    report = await restored(tmp_path, cpu, cards, boot="b2")
    assert {i.what for i in report.values()} == {"gone"}
    assert (cpu.values[A], cards.values[card(1)]) == ("0.5", "400")


async def test_a_failure_is_reported_kept_and_can_be_tried_again(tmp_path: Path) -> None:
    cpu = cpu_dial(a="max", b="max")
    await killed(tmp_path, cpu)
    cpu.set_errors[A] = Refused("read-only mount")
    report = await restored(tmp_path, cpu)
    assert (report[A].what, report[A].why) == ("failed", "read-only mount")
    assert failed(report.values())
    assert cpu.values[B] == "max"
    del cpu.set_errors[A]
    report = await restored(tmp_path, cpu)
    assert not failed(report.values())
    assert cpu.values[A] == "max"


async def test_a_target_that_hangs_holds_up_nobody(tmp_path: Path) -> None:
    cpu = cpu_dial(a="max", b="max")
    await killed(tmp_path, cpu)
    cpu.gates[A] = asyncio.Event()
    report = await restored(tmp_path, cpu, call_seconds=0.05)
    assert "no answer" in report[A].why
    assert cpu.values[B] == "max"


async def test_a_write_that_does_not_take_is_a_failure(tmp_path: Path) -> None:
    cpu = cpu_dial(a="max")
    await killed(tmp_path, cpu)
    cpu.deaf.add(A)
    assert (await restored(tmp_path, cpu))[A].what == "failed"
    cpu.deaf.clear()
    assert (await restored(tmp_path, cpu))[A].what == "put back"


async def test_a_worker_that_is_down_is_a_failure(tmp_path: Path) -> None:
    cards = power()
    await killed(tmp_path, cards)
    cards.errors[card(1)] = Unavailable("the worker is down")
    assert (await restored(tmp_path, cards))[card(1)].what == "failed"


async def test_a_knob_of_another_version_is_kept(tmp_path: Path) -> None:
    weight = Dial(CPU_WEIGHT)
    weight.make(A, "100")
    await killed(tmp_path, weight)
    report = await restored(tmp_path, cpu_dial(a="max"))
    assert report[A].what == "failed"
    assert "no such knob" in report[A].why


async def test_a_full_disk_does_not_stop_putting_back(tmp_path: Path) -> None:
    cpu = cpu_dial(a="max")
    async with Agent(tmp_path, cpu) as agent:
        await agent.tick(wish(CPU_MAX, A, 0.5))
        agent.disk.full = True
        await put_back(
            ledger=agent.ledger,
            actuators=[cpu],
            occasion=Occasion.STOP,
            clock=agent.clock,
            audit=agent.audit,
        )
        await agent.ledger.flush()
    assert cpu.values[A] == "max"
    # Its end could not be recorded: seen again, it is found put back, and nothing is written.
    writes = len(cpu.writes)
    assert (await restored(tmp_path, cpu))[A].what == "put back"
    assert len(cpu.writes) == writes
    assert '"did":"put back"' in (tmp_path / "audit.jsonl").read_text()


@pytest.mark.parametrize("recorded", ["tree and inode", "inode"])
@pytest.mark.parametrize("cgroup_root", ["missing", "another tree"])
async def test_in_another_cgroup_tree_nothing_is_gone(
    tmp_path: Path, cgroup_root: str, recorded: str
) -> None:
    tree, elsewhere = Tree(tmp_path / "cg"), Tree(tmp_path / "none")
    subject = on_cgroup("a", "/a", tree.make("/a", cpu_max="5 10"))
    if cgroup_root == "another tree":
        elsewhere.make("/b", cpu_max="max 10")
    right, wrong = (CpuMax(t, period_seconds=0.02, executor=Inline()) for t in (tree, elsewhere))
    ledger = Ledger(str(tmp_path), boot="b1", executor=Inline())
    identity = await right.identity(subject)
    await ledger.intend(
        knob=CPU_MAX,
        subject=subject,
        identity=identity if recorded == "tree and inode" else str(subject.inode),
        original=Real(1.0, "10 10"),
        write=Real(0.5, "5 10"),
        rule="test/rule",
    )
    await ledger.close()
    kept = recorded == "tree and inode" or cgroup_root == "missing"
    (item,) = (await restored(tmp_path, wrong)).values()
    assert item.what == ("failed" if kept else "gone")
    if kept:
        # Nor is the entry lost to an agent that runs with it, whatever it may want of it.
        async with Agent(tmp_path, wrong) as agent:
            await agent.tick()
            await agent.tick(wish(CPU_MAX, subject, 0.25), seconds=100.0)
            assert len(agent.ledger.entries) == 1
        (item,) = (await restored(tmp_path, right)).values()
        assert item.what == "put back"
        assert tree.read("/a", "cpu.max") == "10 10"


async def test_a_crash_between_announcing_and_writing_changes_nothing(tmp_path: Path) -> None:
    cpu = cpu_dial(a="0.9")
    ledger = Ledger(str(tmp_path), boot="b1", executor=Inline())
    await ledger.intend(
        knob=CPU_MAX,
        subject=A,
        identity=cpu.identities[A],
        original=Real(0.9, "0.9"),
        write=Real(0.5, "0.5"),
        rule="test/rule",
    )
    assert ledger.held(target_of(CPU_MAX, A)) is not None
    await ledger.close()
    assert (await restored(tmp_path, cpu))[A].what == "put back"
    assert cpu.writes == []
