"""The latest snapshot with its events, and the log: each change once."""

import asyncio
import re
import socket
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

import gpuagent
from gpuagent.host.notify import Notify
from gpuagent.model.audit import Action
from gpuagent.model.inventory import Inventory, Level, Tenant, on_cgroup, on_gpu, on_tenant
from gpuagent.model.plan import Hold, Plan, Posture, Setting, Snapshot
from gpuagent.model.state import (
    EVENT_KINDS,
    RESULTS,
    Event,
    Health,
    Instant,
    NodeState,
    Outcome,
    Result,
)
from gpuagent.model.vocab import CPU_MAX
from gpuagent.publish import EVENTS_KEPT, KINDS_MOST, SHARE_STEP, Publisher, Shares

SEAT = on_cgroup("train", "/train.service", 7)
Line = MutableMapping[str, Any]


def snapshot(
    at: float = 0.0,
    *,
    events: tuple[Event, ...] = (),
    outcomes: tuple[Outcome, ...] = (),
    plan: Plan | None = None,
    health: tuple[Health, ...] = (),
) -> Snapshot:
    state = NodeState(Instant(at, at), health={h.name: h for h in health})
    return Snapshot(
        state,
        Posture(mode="enforce"),
        plan=plan or Plan(),
        outcomes={(o.knob, o.subject): o for o in outcomes},
        events=events,
    )


def outcome(result: Result, why: str = "", real: float | None = None) -> Outcome:
    return Outcome(CPU_MAX, SEAT, 1.0, real, None, result, why, 0.0)


def event(number: int) -> Event:
    return Event("test", float(number), f"event {number}")


@pytest.fixture
def lines() -> Iterator[list[Line]]:
    with structlog.testing.capture_logs() as captured:
        yield captured


@pytest.fixture
def publisher() -> Publisher:
    return Publisher(Notify())


# -- the snapshot ------------------------------------------------------------------------------------


def test_before_the_first_tick_there_is_nothing(publisher: Publisher) -> None:
    assert publisher.latest() is None
    given_one = snapshot(1.0)
    publisher.publish(given_one)
    latest = publisher.latest()
    assert latest is not None
    assert latest.state is given_one.state


async def test_a_reader_can_wait_for_a_tick_that_began_after_now(publisher: Publisher) -> None:
    publisher.publish(snapshot(1.0))
    waiting = asyncio.ensure_future(publisher.shown(1.5))
    for at in (1.2, 1.5, 2.0):
        await asyncio.sleep(0)
        assert not waiting.done()
        publisher.publish(snapshot(at))
    shown = await waiting
    assert shown is not None
    assert shown.state.now.mono == 2.0


async def test_but_not_for_ever(publisher: Publisher) -> None:
    assert await publisher.shown(0.0, seconds=0.01) is None


@given(st.lists(st.integers(0, 400), max_size=12))
def test_the_latest_events_are_kept_oldest_first_and_numbered(counts: list[int]) -> None:
    publisher, all_events = Publisher(Notify()), list[Event]()
    runs = set()
    with structlog.testing.capture_logs():
        for count in counts:
            new = tuple(event(len(all_events) + n) for n in range(count))
            all_events += [
                msgspec.structs.replace(e, number=number)
                for number, e in enumerate(new, len(all_events) + 1)
            ]
            publisher.publish(snapshot(events=new))
            latest = publisher.latest()
            assert latest is not None
            assert latest.events == tuple(all_events[-EVENTS_KEPT:])
            assert latest.events_by_kind.get("test", 0) == len(all_events)
            runs.add(latest.run)
    assert len(runs) <= 1


def test_a_note_is_in_its_place_among_the_events(publisher: Publisher, lines: list[Line]) -> None:
    publisher.note(event(1))
    publisher.publish(snapshot(events=(event(2),)))
    before = publisher.latest()
    publisher.note(event(3))
    publisher.publish(snapshot(events=(event(4),)))
    latest = publisher.latest()
    assert before is not None
    assert latest is not None
    assert [e.at for e in before.events] == [1, 2], "and a snapshot once published stays as it is"
    assert [e.at for e in latest.events] == [1, 2, 3, 4]
    assert [line["event"] for line in lines] == [f"event {n}" for n in (1, 2, 3, 4)]


def test_a_snapshot_has_the_latest_actions() -> None:
    done = Action(1.0, "cgroup_cpu_max", SEAT, "set", "applied", "why", number=1)
    publisher = Publisher(Notify(), lambda: (done,))
    publisher.publish(snapshot())
    latest = publisher.latest()
    assert latest is not None
    assert latest.audit == (done,)


def test_no_two_runs_have_one_name() -> None:
    shown = []
    for _ in range(2):
        publisher = Publisher(Notify())
        publisher.publish(snapshot())
        shown.append(publisher.latest())
    first, second = (s.run for s in shown if s is not None)
    assert first
    assert first != second


def test_every_known_kind_is_counted_from_the_start_and_strange_ones_are_bounded(
    publisher: Publisher, lines: list[Line]
) -> None:
    publisher.publish(snapshot(events=(Event("xid", 1.0, "XID 79"),)))
    latest = publisher.latest()
    assert latest is not None
    assert latest.events_by_kind == {**dict.fromkeys(EVENT_KINDS, 0), "xid": 1}
    strange = tuple(Event(f"kind-{n}", 1.0, "?") for n in range(1000))
    publisher.publish(snapshot(events=strange))
    latest = publisher.latest()
    assert latest is not None
    assert len(latest.events_by_kind) == KINDS_MOST + 1
    assert sum(latest.events_by_kind.values()) == 1001
    assert latest.events_by_kind["other"] == 1000 - (KINDS_MOST - len(EVENT_KINDS))


def test_every_kind_that_is_written_out_in_the_source_is_counted_from_the_start() -> None:
    root = Path(gpuagent.__file__).parent
    written = {
        kind
        for path in root.rglob("*.py")
        for kind in re.findall(r"\b(?:Event|_?event)\(\s*\"([a-z0-9-]+)\"", path.read_text())
    }
    assert {"xid", "tenant-left", "reloaded"} <= written
    assert written <= set(EVENT_KINDS), "name them in model.state.EVENT_KINDS"


@given(st.lists(st.integers(0, 5), max_size=20))
def test_listeners_are_told_once_for_each_snapshot_and_see_it(counts: list[int]) -> None:
    publisher, seen = Publisher(Notify()), []
    publisher.listen(lambda: seen.append(publisher.latest()))
    with structlog.testing.capture_logs():
        for count in counts:
            publisher.publish(snapshot(events=tuple(event(n) for n in range(count))))
            assert seen[-1] is publisher.latest()
    assert len(seen) == len(counts)


# -- what a tenant is left ---------------------------------------------------------------------------


def left(share: float, effect: Result | None = "applied", name: str = "train") -> Snapshot:
    """A host with one tenant that is left this share."""
    who = Tenant(name, Level.L3)
    state = NodeState(Instant(1.0, 1.0), inventory=Inventory(tenants=(who,)))
    hold = Hold(on_tenant(name), share, "cpu_max", "memory", "card 0 is full", effect=effect)
    return Snapshot(state, Posture(mode="enforce"), holds=(hold,))


def told(shares: Shares, snapshot: Snapshot) -> list[tuple[str, float]]:
    return [(e.kind, dict(e.numbers)["share_ratio"]) for e in shares.news(snapshot)]


def test_a_tenant_is_told_what_it_is_left_and_when_that_is_over() -> None:
    shares = Shares()
    assert told(shares, left(1.0)) == []
    assert told(shares, left(0.95)) == [("share-cut", 0.95)]
    assert told(shares, left(0.9)) == [], "so little is no news"
    assert told(shares, left(0.5)) == [("share-cut", 0.5)]
    assert told(shares, left(0.7)) == [("share-raised", 0.7)]
    assert told(shares, left(1.0)) == [("share-raised", 1.0)]
    assert told(shares, left(1.0)) == []


@pytest.mark.parametrize("effect", [None, *RESULTS])
def test_but_only_of_what_is_so(effect: Result | None) -> None:
    in_force = effect in {"applied", "in flight", "pending"}
    assert bool(told(Shares(), left(0.5, effect))) == in_force


def test_it_is_told_to_the_tenant_with_the_reason(publisher: Publisher, lines: list[Line]) -> None:
    publisher.publish(left(0.49))
    latest = publisher.latest()
    assert latest is not None
    (cut,) = latest.events
    assert cut.subject == on_tenant("train")
    assert cut.text.startswith("tenant train is left 49 % of its usual activity: ")
    assert "card 0 is full" not in cut.text, "what is said in full may name others"


def test_who_has_left_is_forgotten() -> None:
    shares = Shares()
    assert told(shares, left(0.5))
    gone = msgspec.structs.replace(left(0.5), state=NodeState(Instant(2.0, 2.0)))
    assert told(shares, gone) == []
    assert told(shares, left(0.5)) == [("share-cut", 0.5)]


@given(st.lists(st.floats(0.05, 1.0), max_size=60))
def test_what_was_told_last_is_never_far_from_what_is_so(values: list[float]) -> None:
    shares, last = Shares(), 1.0
    for share in values:
        for _, ratio in told(shares, left(share)):
            assert ratio == share
            last = ratio
        assert abs(last - share) < SHARE_STEP or last == share
        assert (last == 1.0) == (share == 1.0)


# -- the log -----------------------------------------------------------------------------------------


def test_an_event_says_what_it_is_about(publisher: Publisher, lines: list[Line]) -> None:
    lost = Event("gpu-lost", 1.0, "it is 100 % lost: {card} %s", on_gpu("GPU-1"))
    publisher.publish(snapshot(events=(lost,)))
    publisher.publish(snapshot())
    (line,) = lines
    assert line["event"] == lost.text
    assert (line["kind"], line["subject"]) == ("gpu-lost", "gpu:GPU-1")


def test_an_outcome_is_said_once_for_each_result(publisher: Publisher, lines: list[Line]) -> None:
    for result in RESULTS:
        for _ in range(5):
            publisher.publish(snapshot(outcomes=(outcome(result, "why"),)))
    assert [line["result"] for line in lines] == list(RESULTS)
    assert lines[0]["knob"] == "cgroup_cpu_max"
    assert lines[0]["subject"] == "cgroup:train:/train.service"


def test_it_says_why_it_was_wished_and_why_it_was_not_done(
    publisher: Publisher, lines: list[Line]
) -> None:
    wish = Setting(CPU_MAX, SEAT, 1.0, "memory is short", "backpressure/memory")
    publisher.publish(snapshot(outcomes=(outcome("refused", "no permission"),), plan=Plan((wish,))))
    assert (lines[0]["why"], lines[0]["became"]) == ("memory is short", "no permission")
    publisher.publish(snapshot(outcomes=(outcome("in flight", "it is put back"),)))
    assert (lines[1]["why"], lines[1]["became"]) == ("", "it is put back")


def test_a_new_reason_is_said_but_not_one_that_only_counts_on(
    publisher: Publisher, lines: list[Line]
) -> None:
    for seconds in range(30):
        told = outcome("in flight", f"no answer for {seconds} s")
        publisher.publish(snapshot(outcomes=(told,)))
    for number in range(30):
        told = outcome("contested", f"somebody else keeps setting it, now to {number}.5 100000")
        publisher.publish(snapshot(outcomes=(told,)))
    publisher.publish(snapshot(outcomes=(outcome("refused", "permission denied"),)))
    publisher.publish(snapshot(outcomes=(outcome("refused", "read-only file system"),)))
    assert [line["result"] for line in lines] == ["in flight", "contested", "refused", "refused"]


def test_the_numbers_of_what_is_applied_are_no_news(
    publisher: Publisher, lines: list[Line]
) -> None:
    for number in range(10):
        told = outcome("applied", f"it reads {number}", float(number))
        publisher.publish(snapshot(outcomes=(told,)))
    assert len(lines) == 1


def test_an_end_is_said_and_what_begins_again_is_said_again(
    publisher: Publisher, lines: list[Line]
) -> None:
    for _ in range(2):
        publisher.publish(snapshot(outcomes=(outcome("applied"),)))
        publisher.publish(snapshot())
        publisher.publish(snapshot())
    assert [line["event"] for line in lines] == ["setting", "setting ended"] * 2
    assert not publisher._said


def test_a_change_of_health_is_said_once_in_both_directions(
    publisher: Publisher, lines: list[Line]
) -> None:
    ups: list[bool | None] = [None, True, True, False, False, False, True, True]
    for second, up in enumerate(ups):
        why = "" if up else f"has not answered for {second} s"
        publisher.publish(snapshot(float(second), health=(Health("gpus", up, why),)))
    assert [(line["event"], line["log_level"]) for line in lines] == [
        ("cannot read", "warning"),
        ("reads again", "info"),
    ]
    assert lines[1]["down_seconds"] == 3


# -- the service manager -----------------------------------------------------------------------------


def test_each_snapshot_is_a_sign_of_life(tmp_path: Path) -> None:
    address = str(tmp_path / "n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.setblocking(False)
        publisher = Publisher(Notify(address))
        publisher.note(event(1))
        with pytest.raises(BlockingIOError):
            manager.recv(100)
        for _ in range(2):
            publisher.publish(snapshot())
            assert manager.recv(100) == b"WATCHDOG=1"
