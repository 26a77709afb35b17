"""What the reconciler writes, what it leaves alone, and what it says of both."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpuagent.act.ledger import Ledger
from gpuagent.act.restore import Occasion, put_back
from gpuagent.errors import Refused, Unavailable, Unsupported
from gpuagent.model.declare import BUDGET_RULE
from gpuagent.model.inventory import Subject, on_cgroup
from gpuagent.model.plan import Blocked
from gpuagent.model.state import ACTION_RESULTS
from gpuagent.model.vocab import CPU_MAX, CPU_WEIGHT, KNOBS, POWER_LIMIT
from tests.act.host import (
    ACTS,
    OBSERVES,
    PAUSED,
    Agent,
    Dial,
    Inline,
    card,
    cpu_dial,
    power_dial,
    seat,
    wish,
)

A, B = seat("a"), seat("b")
KEY_A, KEY_B = (CPU_MAX, A), (CPU_MAX, B)


def on_disk(folder: Path) -> Ledger:
    return Ledger(str(folder), boot="b1", executor=Inline())


# -- applying and putting back -----------------------------------------------------------------------


async def test_a_wish_is_applied_within_its_tick_and_put_back_when_it_ends(tmp_path: Path) -> None:
    dial = cpu_dial(a="max")
    async with Agent(tmp_path, dial) as agent:
        told = (await agent.tick(wish(CPU_MAX, A, 0.5)))[KEY_A]
        assert dial.values[A] == "0.5"
        assert (told.result, told.wanted, told.real) == ("applied", 0.5, 0.5)
        assert told.original == float("inf")
        assert await agent.tick() == {}
        assert dial.values[A] == "max"
        assert not agent.ledger.entries
        assert agent.reconciler.actions[CPU_MAX.name, "applied"] == 1
        assert agent.reconciler.actions[CPU_MAX.name, "put back"] == 1
        assert agent.woken == []


async def test_nothing_is_written_before_it_is_in_the_ledger_on_disk(tmp_path: Path) -> None:
    dial = cpu_dial(a="max", b="2.0")
    seen = []

    def check(subject: Subject, raw: str) -> None:
        entries = [e for e in on_disk(tmp_path).entries.values() if e.subject == subject]
        seen.append(raw)
        assert entries[0].wrote[-1].raw == raw or entries[0].was.raw == raw

    dial.before_set = check
    async with Agent(tmp_path, dial) as agent:
        for value in (0.5, 0.4, 1.0):
            await agent.tick(wish(CPU_MAX, A, value), wish(CPU_MAX, B, value))
        await agent.tick()
    assert len(seen) == 8


async def test_only_differences_are_written(tmp_path: Path) -> None:
    dial = cpu_dial(a="max")
    async with Agent(tmp_path, dial) as agent:
        for value in (0.5, 0.5, 0.505, 0.495):
            await agent.tick(wish(CPU_MAX, A, value))
        assert dial.writes == [(A, "0.5")]
        await agent.tick(wish(CPU_MAX, A, 0.4))
        assert dial.values[A] == "0.4"


async def test_an_original_is_never_loosened(tmp_path: Path) -> None:
    dial = cpu_dial(a="0.3")
    async with Agent(tmp_path, dial) as agent:
        told = (await agent.tick(wish(CPU_MAX, A, 0.5)))[KEY_A]
        assert (told.result, told.real, told.original) == ("applied", 0.3, None)
        assert "tighter" in told.why
        await agent.tick(wish(CPU_MAX, A, 0.2))
        told = (await agent.tick(wish(CPU_MAX, A, 0.9)))[KEY_A]
        assert dial.values[A] == "0.3"
        assert not agent.ledger.entries


@pytest.mark.parametrize(("original", "said"), [("0.4", True), ("0.4999", False)])
async def test_what_is_tighter_than_wished_is_said_but_for_rounding(
    tmp_path: Path, original: str, *, said: bool
) -> None:
    dial = cpu_dial(a=original)
    async with Agent(tmp_path, dial) as agent:
        told = (await agent.tick(wish(CPU_MAX, A, 0.5)))[KEY_A]
    assert told.result == "applied"
    assert ("tighter than wished" in told.why) is said


async def test_frequent_wakes_do_not_read_the_host_more_often(tmp_path: Path) -> None:
    dial = cpu_dial(a="max")
    async with Agent(tmp_path, dial) as agent:
        await agent.tick(wish(CPU_MAX, A, 0.5))
        reads = dial.reads
        for _ in range(8):
            await agent.tick(wish(CPU_MAX, A, 0.5), seconds=0.05)
        assert dial.reads == reads


async def test_a_renamed_tenant_keeps_its_hold(tmp_path: Path) -> None:
    dial = Dial(CPU_MAX)
    for name in ("old", "new"):
        dial.make(on_cgroup(name, "/x", 7), "max")
    dial.values = _Shared(dial.values)
    async with Agent(tmp_path, dial) as agent:
        await agent.tick(wish(CPU_MAX, on_cgroup("old", "/x", 7), 0.5))
        told = await agent.tick(wish(CPU_MAX, on_cgroup("new", "/x", 7), 0.5))
        assert list(told) == [(CPU_MAX, on_cgroup("new", "/x", 7))]
        assert len(dial.writes) == 1
        assert len(agent.ledger.entries) == 1


class _Shared(dict[Subject, str]):
    """One value whatever the tenant is called."""

    def __getitem__(self, key: Subject) -> str:
        return super().__getitem__(on_cgroup("old", key.cgroup, key.inode))

    def __setitem__(self, key: Subject, value: str) -> None:
        super().__setitem__(on_cgroup("old", key.cgroup, key.inode), value)


async def test_two_wishes_for_one_target_the_safer_counts(tmp_path: Path) -> None:
    dial = cpu_dial(a="max")
    async with Agent(tmp_path, dial) as agent:
        await agent.tick(wish(CPU_MAX, A, 0.5), wish(CPU_MAX, A, 0.25), wish(CPU_MAX, A, 0.75))
        assert dial.values[A] == "0.25"


# -- not acting --------------------------------------------------------------------------------------


async def test_observing_writes_nothing_and_says_what_would_be(tmp_path: Path) -> None:
    dial = cpu_dial(a="max")
    async with Agent(tmp_path, dial) as agent:
        told = (await agent.tick(wish(CPU_MAX, A, 0.5), posture=OBSERVES))[KEY_A]
        assert (told.result, told.wanted, told.original) == ("would", 0.5, None)
        assert told.real == float("inf")
        assert dial.writes == []
        assert not agent.ledger.entries


async def test_a_pause_puts_back_at_once(tmp_path: Path) -> None:
    dial = cpu_dial(a="max")
    async with Agent(tmp_path, dial) as agent:
        await agent.tick(wish(CPU_MAX, A, 0.5))
        told = (await agent.tick(wish(CPU_MAX, A, 0.5), posture=OBSERVES))[KEY_A]
        assert told.result == "would"
        assert dial.values[A] == "max"
        assert not agent.ledger.entries


async def test_a_blocked_setting_is_reported_never_tried_and_given_up(tmp_path: Path) -> None:
    dial = cpu_dial(a="max")
    blocked = Blocked("refused", "shared with sshd.service")
    async with Agent(tmp_path, dial) as agent:
        await agent.tick(wish(CPU_MAX, A, 0.5))
        told = (await agent.tick(wish(CPU_MAX, A, 0.4, blocked=blocked)))[KEY_A]
        assert (told.result, told.why) == ("refused", "shared with sshd.service")
        assert dial.values[A] == "max"


async def test_a_knob_without_an_actuator_is_refused(tmp_path: Path) -> None:
    async with Agent(tmp_path, cpu_dial(a="max")) as agent:
        told = await agent.tick(wish(CPU_WEIGHT, A, 10))
        assert told[CPU_WEIGHT, A].result == "refused"


# -- others ------------------------------------------------------------------------------------------


async def test_what_somebody_else_set_is_left_alone(tmp_path: Path) -> None:
    dial = cpu_dial(a="max")
    async with Agent(tmp_path, dial) as agent:
        await agent.tick(wish(CPU_MAX, A, 0.5))
        dial.values[A] = "0.7"
        await agent.tick()
        assert dial.values[A] == "0.7"
        assert not agent.ledger.entries
        assert agent.reconciler.outside_changes[CPU_MAX.name] == 1


async def test_another_s_value_becomes_the_original(tmp_path: Path) -> None:
    dial = cpu_dial(a="max")
    async with Agent(tmp_path, dial) as agent:
        await agent.tick(wish(CPU_MAX, A, 0.5))
        dial.values[A] = "0.7"
        told = (await agent.tick(wish(CPU_MAX, A, 0.5)))[KEY_A]
        assert dial.values[A] == "0.5"
        assert told.original == 0.7
        await agent.tick()
        assert dial.values[A] == "0.7"


async def test_another_s_tighter_value_is_respected(tmp_path: Path) -> None:
    dial = cpu_dial(a="max")
    async with Agent(tmp_path, dial) as agent:
        await agent.tick(wish(CPU_MAX, A, 0.5))
        dial.values[A] = "0.1"
        told = (await agent.tick(wish(CPU_MAX, A, 0.5)))[KEY_A]
        assert (told.result, told.real) == ("applied", 0.1)
        assert dial.values[A] == "0.1"


async def test_a_change_between_looking_and_writing_is_seen(tmp_path: Path) -> None:
    dial = cpu_dial(a="max")

    class Meddling(Inline):
        def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def]
            dial.values[A] = "0.6"
            return super().submit(fn, *args, **kwargs)

    agent = Agent(tmp_path, dial)
    agent.ledger._executor = Meddling()
    async with agent:
        told = (await agent.tick(wish(CPU_MAX, A, 0.5)))[KEY_A]
        assert told.original == 0.6
        await agent.tick()
        assert dial.values[A] == "0.6"


# -- failures ----------------------------------------------------------------------------------------


async def test_a_gone_target_is_no_failure(tmp_path: Path) -> None:
    dial = cpu_dial(a="max")
    async with Agent(tmp_path, dial) as agent:
        await agent.tick(wish(CPU_MAX, A, 0.5))
        del dial.values[A], dial.identities[A]
        assert (await agent.tick(wish(CPU_MAX, A, 0.5)))[KEY_A].result == "gone"
        assert not agent.ledger.entries
        assert await agent.tick() == {}


async def test_a_lost_card_that_returns_is_still_ours(tmp_path: Path) -> None:
    dial = power_dial(700.0)
    async with Agent(tmp_path, dial) as agent:
        await agent.tick(wish(POWER_LIMIT, card(1), 400))
        lost = dial.values.pop(card(1))
        assert (await agent.tick())[POWER_LIMIT, card(1)].result == "gone"
        assert agent.ledger.entries
        dial.values[card(1)] = lost
        await agent.tick(seconds=60)
        assert dial.values[card(1)] == "700.0"
        assert not agent.ledger.entries


async def test_a_refusal_is_said_and_retried_with_pauses(tmp_path: Path) -> None:
    dial = cpu_dial(a="max")
    dial.set_errors[A] = Refused("read-only mount")
    async with Agent(tmp_path, dial) as agent:
        told = [await agent.tick(wish(CPU_MAX, A, 0.5)) for _ in range(60)]
        assert {t[KEY_A].result for t in told} == {"refused"}
        assert "read-only mount" in told[-1][KEY_A].why
        assert dial.reads < 20
        assert agent.reconciler.outside_changes[CPU_MAX.name] == 0
        del dial.set_errors[A]
        await agent.tick(wish(CPU_MAX, A, 0.5), seconds=61)
        assert dial.values[A] == "0.5"


async def test_a_put_back_that_fails_is_retried(tmp_path: Path) -> None:
    dial = cpu_dial(a="max")
    async with Agent(tmp_path, dial) as agent:
        await agent.tick(wish(CPU_MAX, A, 0.5))
        dial.set_errors[A] = Refused("read-only mount")
        told = (await agent.tick())[KEY_A]
        assert (told.result, told.wanted, told.original) == ("refused", None, float("inf"))
        assert agent.ledger.entries
        del dial.set_errors[A]
        await agent.tick(seconds=6)
        assert dial.values[A] == "max"
        assert await agent.tick() == {}


@pytest.mark.parametrize(
    ("error", "acting", "observing"),
    [
        (Unavailable("the worker is down"), "in flight", "would"),
        (Unsupported("no such file"), "refused", "refused"),
    ],
)
async def test_a_target_that_cannot_be_read(
    tmp_path: Path, error: Unavailable | Unsupported, acting: str, observing: str
) -> None:
    dial = cpu_dial(a="max")
    dial.errors[A] = error
    async with Agent(tmp_path, dial) as agent:
        told = (await agent.tick(wish(CPU_MAX, A, 0.5), posture=OBSERVES))[KEY_A]
        assert (told.result, told.real) == (observing, None)
        told = (await agent.tick(wish(CPU_MAX, A, 0.5)))[KEY_A]
        assert (told.result, told.why) == (acting, str(error))


async def test_a_write_that_changes_nothing_is_not_called_applied(tmp_path: Path) -> None:
    dial = cpu_dial(a="max")
    dial.deaf.add(A)
    async with Agent(tmp_path, dial) as agent:
        assert (await agent.tick(wish(CPU_MAX, A, 0.5)))[KEY_A].result == "in flight"
        told = (await agent.tick(wish(CPU_MAX, A, 0.5), seconds=2))[KEY_A]
        assert told.result == "refused"
        assert "still reads" in told.why
        assert await agent.tick() == {}
        assert not agent.ledger.entries


async def test_a_target_that_rounds_is_written_once_and_put_back(tmp_path: Path) -> None:
    dial = power_dial(700.0)
    dial.rounding = round
    async with Agent(tmp_path, dial) as agent:
        for _ in range(5):
            told = await agent.tick(wish(POWER_LIMIT, card(1), 412.7))
            assert told[POWER_LIMIT, card(1)].result == "applied"
        assert len(dial.writes) == 1
        await agent.tick()
        assert dial.values[card(1)] == "700.0"


async def test_a_target_that_makes_something_else_of_it_is_refused_and_put_back(
    tmp_path: Path,
) -> None:
    dial = power_dial(700.0)
    dial.rounding = lambda value: max(value, 500.0)
    async with Agent(tmp_path, dial) as agent:
        told = (await agent.tick(wish(POWER_LIMIT, card(1), 300)))[POWER_LIMIT, card(1)]
        assert told.result == "refused"
        assert "reads back as 500.0" in told.why
        await agent.tick()
        assert dial.values[card(1)] == "700.0"
        assert agent.reconciler.outside_changes[POWER_LIMIT.name] == 0


async def test_a_full_disk_stops_new_writes_but_no_put_back(tmp_path: Path) -> None:
    dial = cpu_dial(a="max", b="max")
    async with Agent(tmp_path, dial) as agent:
        await agent.tick(wish(CPU_MAX, A, 0.5))
        agent.disk.full = True
        told = await agent.tick(wish(CPU_MAX, A, 0.5), wish(CPU_MAX, B, 0.5))
        assert told[KEY_B].result == "refused"
        assert "No space left" in told[KEY_B].why
        assert dial.values[B] == "max"
        await agent.tick()
        assert dial.values[A] == "max"


async def test_a_slow_target_holds_up_nobody(tmp_path: Path) -> None:
    dial = cpu_dial(a="max", b="max")
    dial.gates[A] = asyncio.Event()
    async with Agent(tmp_path, dial) as agent:
        for value in (0.5, 0.4, 0.3):
            told = await agent.tick(wish(CPU_MAX, A, value), wish(CPU_MAX, B, value))
            assert told[KEY_A].result == "in flight"
            assert told[KEY_B].result == "applied"
            assert float(dial.values[B]) == value
        told = await agent.tick(wish(CPU_MAX, A, 0.3), wish(CPU_MAX, B, 0.3), seconds=5)
        assert "no answer for" in told[KEY_A].why
        dial.gates[A].set()
        await agent.reconciler.settled()
        assert [w for w in dial.writes if w[0] == A] == [(A, "0.3")]  # only the latest counts
        assert any("applied" in w for w in agent.woken)


class Slow(Inline):
    """A disk that takes what it is given when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, partial(fn, *args, **kwargs)))
        return future

    def take(self) -> None:
        waiting, self.waiting = self.waiting, []
        for future, call in waiting:
            future.set_result(call())


async def test_a_slow_disk_does_not_keep_a_wish_that_moves_from_being_followed(
    tmp_path: Path,
) -> None:
    dial, disk = cpu_dial(a="max"), Slow()
    agent = Agent(tmp_path, dial)
    agent.ledger._executor = disk
    async with agent:
        for value in (0.9, 0.8, 0.7, 0.6, 0.5):
            await agent.tick(wish(CPU_MAX, A, value))
            disk.take()
        assert dial.values[A] == "0.8"
        for _ in range(3):
            disk.take()
            await agent.tick(wish(CPU_MAX, A, 0.2))
        assert dial.values[A] == "0.2"
        # But what was wished before is not written where it is looser than what is wished now.
        await agent.tick(wish(CPU_MAX, A, 0.85))
        for _ in range(4):
            await agent.tick(wish(CPU_MAX, A, 0.3))
            disk.take()
        assert dial.values[A] == "0.3"
        assert (A, "0.85") not in dial.writes
        # Nor is anything, once nothing may be.
        await agent.tick(wish(CPU_MAX, A, 0.1))
        await agent.tick(wish(CPU_MAX, A, 0.1), posture=PAUSED)
        disk.take()
        await agent.tick(posture=PAUSED)
        assert (A, "0.1") not in dial.writes
        assert dial.values[A] == "max"
        disk.take()


async def test_a_hanging_write_is_known_at_the_end(tmp_path: Path) -> None:
    dial = cpu_dial(a="max", b="max")
    async with Agent(tmp_path, dial) as agent:
        await agent.tick(wish(CPU_MAX, A, 0.5), wish(CPU_MAX, B, 0.5))
        dial.gates[A] = asyncio.Event()
        await agent.tick(wish(CPU_MAX, A, 0.4), wish(CPU_MAX, B, 0.5))
        busy = await agent.reconciler.close(0.05)
        assert [t.subject.cgroup for t in busy] == ["/a"]
        report = await put_back(
            ledger=agent.ledger,
            actuators=agent.actuators,
            occasion=Occasion.STOP,
            clock=agent.clock,
            busy=busy,
            audit=agent.audit,
        )
        assert {i.entry.subject: i.what for i in report} == {A: "failed", B: "put back"}
        assert len(agent.ledger.entries) == 1


async def test_a_closed_reconciler_begins_nothing(tmp_path: Path) -> None:
    dial = cpu_dial(a="max")
    async with Agent(tmp_path, dial) as agent:
        await agent.reconciler.close()
        await agent.tick(wish(CPU_MAX, A, 0.5))
        assert dial.writes == []


async def test_a_bug_in_an_actuator_ends_the_service(tmp_path: Path) -> None:
    class Broken(Dial):
        def encode(self, subject, value, original):  # type: ignore[no-untyped-def]
            raise ZeroDivisionError

    dial = Broken(CPU_MAX)
    dial.make(A, "max")
    agent = Agent(tmp_path, dial)
    task = asyncio.create_task(agent.reconciler.run())
    await asyncio.sleep(0)
    await agent.tick(wish(CPU_MAX, A, 0.5))
    with pytest.raises(ExceptionGroup):
        await task
    await agent.die()


# -- a budget ----------------------------------------------------------------------------------------


async def test_a_raise_waits_until_the_cut_is_verified(tmp_path: Path) -> None:
    one, two = (POWER_LIMIT, card(1)), (POWER_LIMIT, card(2))
    dial = power_dial(700.0, 700.0)
    async with Agent(tmp_path, dial) as agent:
        await agent.tick(wish(*one, 400), wish(*two, 300))
        dial.gates[card(1)] = asyncio.Event()
        told = await agent.tick(wish(*one, 300), wish(*two, 400))
        assert dial.values[card(2)] == "300"
        assert told[two].result == "in flight"
        assert "GPU-1" in told[two].why
        dial.gates[card(1)].set()
        await agent.reconciler.settled()
        assert (dial.values[card(1)], dial.values[card(2)]) == ("300", "400")


async def test_a_cut_that_fails_keeps_every_raise_waiting(tmp_path: Path) -> None:
    one, two = (POWER_LIMIT, card(1)), (POWER_LIMIT, card(2))
    dial = power_dial(700.0, 700.0)
    async with Agent(tmp_path, dial) as agent:
        await agent.tick(wish(*one, 400), wish(*two, 300))
        dial.set_errors[card(1)] = Refused("no permission")
        for _ in range(5):
            told = await agent.tick(wish(*one, 300), wish(*two, 400))
            assert told[one].result == "refused"
            assert told[two].result == "in flight"
        assert dial.values[card(2)] == "300"
        del dial.set_errors[card(1)]
        told = await agent.tick(wish(*one, 300), wish(*two, 400), seconds=20)
        assert {told[one].result, told[two].result} == {"applied"}


async def test_a_cut_freed_its_raise_within_the_same_tick(tmp_path: Path) -> None:
    one, two = (POWER_LIMIT, card(1)), (POWER_LIMIT, card(2))
    dial = power_dial(700.0, 700.0)
    async with Agent(tmp_path, dial) as agent:
        await agent.tick(wish(*one, 400), wish(*two, 300))
        told = await agent.tick(wish(*one, 300), wish(*two, 400))
        assert {told[one].result, told[two].result} == {"applied"}
        assert [w[0] for w in dial.writes[2:]] == [card(1), card(2)]


async def test_a_float_that_is_not_quite_whole_keeps_no_raise_waiting(tmp_path: Path) -> None:
    one, two = (POWER_LIMIT, card(1)), (POWER_LIMIT, card(2))
    dial = power_dial(700.0, 700.0)
    dial.rounding = lambda watts: round(watts, 3)
    async with Agent(tmp_path, dial) as agent:
        await agent.tick(wish(*one, 221.35299999999998), wish(*two, 300))
        assert dial.values[card(1)] == "221.353"
        told = await agent.tick(wish(*one, 221.35299999999998), wish(*two, 400))
        assert {told[one].result, told[two].result} == {"applied"}


async def test_a_raise_still_under_way_counts_as_made(tmp_path: Path) -> None:
    one, two = (POWER_LIMIT, card(1)), (POWER_LIMIT, card(2))
    dial = power_dial(700.0, 700.0)
    async with Agent(tmp_path, dial) as agent:
        await agent.tick(wish(*one, 300), wish(*two, 300))
        dial.set_gates[card(1)] = asyncio.Event()
        await agent.tick(wish(*one, 600), wish(*two, 300))
        told = await agent.tick(wish(*one, 300), wish(*two, 600))
        assert told[two].result == "in flight"
        assert dial.values[card(2)] == "300"
        dial.set_gates[card(1)].set()
        await agent.reconciler.settled()
        assert (dial.values[card(1)], dial.values[card(2)]) == ("300", "600")


async def test_a_put_back_waits_for_the_cuts_of_a_budget(tmp_path: Path) -> None:
    """A card that the budget no longer limits counts with its original; the others make room first."""
    dial = power_dial(700.0, 700.0)
    async with Agent(tmp_path, dial) as agent:
        cards = (card(1), card(2))
        await agent.tick(*(wish(POWER_LIMIT, c, 400, rule=BUDGET_RULE) for c in cards))
        dial.gates[card(1)] = asyncio.Event()
        told = await agent.tick(wish(POWER_LIMIT, card(1), 100, rule=BUDGET_RULE))
        assert dial.values[card(2)] == "400"
        assert told[POWER_LIMIT, card(2)].result == "in flight"
        assert "GPU-1" in told[POWER_LIMIT, card(2)].why
        dial.gates.pop(card(1)).set()
        await agent.reconciler.settled()
        assert (dial.values[card(1)], dial.values[card(2)]) == ("100", "700.0")


@pytest.mark.parametrize("let_go_by", ["pause", "no budget"])
async def test_a_cut_that_fails_does_not_keep_us_from_letting_go(
    tmp_path: Path, let_go_by: str
) -> None:
    rule = BUDGET_RULE if let_go_by == "pause" else "backpressure/temperature"
    dial = power_dial(700.0, 700.0)
    async with Agent(tmp_path, dial) as agent:
        await agent.tick(*(wish(POWER_LIMIT, card(n), 400, rule=rule) for n in (1, 2)))
        dial.set_errors[card(1)] = Refused("no permission")
        cut = wish(POWER_LIMIT, card(1), 300, rule=rule)
        await agent.tick(cut)
        await agent.tick(cut, posture=PAUSED if let_go_by == "pause" else ACTS)
        assert dial.values[card(2)] == "700.0"


async def test_a_cut_that_comes_during_a_put_back_stops_it(tmp_path: Path) -> None:
    dial = power_dial(700.0, 700.0)
    async with Agent(tmp_path, dial) as agent:
        first = [wish(POWER_LIMIT, card(n), 400, rule=BUDGET_RULE) for n in (1, 2)]
        await agent.tick(*first)
        dial.gates[card(2)] = asyncio.Event()
        await agent.tick(first[0])  # the put-back of the second hangs while it looks
        dial.set_errors[card(1)] = Refused("no permission")
        await agent.tick(wish(POWER_LIMIT, card(1), 100, rule=BUDGET_RULE))
        dial.gates.pop(card(2)).set()
        await agent.reconciler.settled()
        assert (dial.values[card(1)], dial.values[card(2)]) == ("400", "400")
        del dial.set_errors[card(1)]
        await agent.tick(wish(POWER_LIMIT, card(1), 100, rule=BUDGET_RULE), seconds=20)
        assert (dial.values[card(1)], dial.values[card(2)]) == ("100", "700.0")


async def test_small_excesses_over_a_budget_are_cut_all_the_same(tmp_path: Path) -> None:
    dial = power_dial(303.0)
    async with Agent(tmp_path, dial) as agent:
        await agent.tick(wish(POWER_LIMIT, card(1), 300))
        assert dial.values[card(1)] == "300"
        await agent.tick(wish(POWER_LIMIT, card(1), 302))
        assert dial.values[card(1)] == "300"


# -- what is told ------------------------------------------------------------------------------------


async def test_every_count_exists_from_the_start(tmp_path: Path) -> None:
    async with Agent(tmp_path, cpu_dial(a="max")) as agent:
        pairs = {(k.name, r) for k in KNOBS for r in ACTION_RESULTS}
        assert agent.reconciler.actions.keys() == pairs
        assert {"put back", "left alone", "applied"} < set(ACTION_RESULTS)
        assert agent.reconciler.outside_changes.keys() == {k.name for k in KNOBS}


async def test_the_audit_log_has_every_write_with_its_reason(tmp_path: Path) -> None:
    dial = cpu_dial(a="max")
    async with Agent(tmp_path, dial) as agent:
        await agent.tick(wish(CPU_MAX, A, 0.5, numbers=(("gpu_memory_used_ratio", 0.91),)))
        await agent.tick()
    first, second = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert '"did":"set"' in first
    assert '"why":"0.5 is wished"' in first
    assert '["gpu_memory_used_ratio",0.91]' in first
    assert '"did":"put back"' in second
