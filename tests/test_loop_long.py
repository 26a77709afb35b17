"""The loop over a day, in virtual time: nothing grows, and how often it looks changes nothing."""

import sys
from pathlib import Path

import msgspec
import structlog

from gpuagent.config import Found, Power
from gpuagent.decide.held import Memory
from gpuagent.model.plan import Pause, Plan, Unpause
from gpuagent.model.state import Event, Sensed
from gpuagent.ports import KernelXid
from gpuagent.publish import EVENTS_KEPT
from tests.decide.world import CARD, GIB
from tests.fakes.host import Host, Scripted
from tests.rig import CONFIG, RULES, Rig

DAY = 86_400.0
EPISODE = 600.0
FREE = "max 100000"


def sizes(rig: Rig) -> dict[str, int]:
    """How much every part of the agent that remembers something holds."""
    loop, state = rig.loop, rig.loop._state
    latest = rig.publisher.latest()
    assert latest is not None
    memory = loop._memories["backpressure"]
    assert isinstance(memory, Memory)
    return {
        "readings": len(state.readings),
        "history": len(state.history),
        "outcomes": len(state.outcomes),
        "health": len(state.health),
        "events": len(latest.events),
        "lanes": len(rig.reconciler._lanes),
        "ledger entries": len(rig.ledger.entries),
        "ledger bytes": rig.disk.size,
        "actions": len(latest.actions),
        "said": len(rig.publisher._said),
        "memories": len(loop._memories),
        "watched": len(memory.watch.seen),
        "held": len(memory.held),
        "origins": len(memory.origins),
        "futile": len(memory.futile),
        "cuts": len(memory.cut_at),
        "helpless": len(memory.helpless),
        "recorded": rig.recorder._size,
        "sensors asked": len(rig.sensing._asked),
        "sensors running": len(rig.sensing._running),
        "inbox": len(rig.loop.inbox._letters),
    }


async def trouble(rig: Rig, number: int) -> None:
    """A tenant of its own comes, presses the card until it is held back, and leaves."""
    host, name, pid = rig.host, f"train{number}", 1000 + number
    host.gpus.used[CARD] = 66.0 * GIB
    host.gpus.watts[CARD] = 100.0 + number % 7 * 90
    host.arrive(name, pid)
    host.kernel_log.lines = [KernelXid((0, number % 3, 0), 13, "text")]
    await rig.run(5)
    await rig.press(10, pid=pid)
    assert host.cpu_max(name) != FREE
    if number % 12 == 0:
        await rig.ask(Pause("test"))
        assert host.cpu_max(name) == FREE
        await rig.ask(Unpause("test"))
    if number % 24 == 1:  # so long that its lever is given up
        snapshot = await rig.press(75, pid=pid)
        assert {o.result for o in snapshot.outcomes.values()} >= {"ineffective"}
        assert host.cpu_max(name) == FREE
    if number % 5 == 0:
        host.gpus.limits[CARD] = 700.0
    await rig.run(3)
    host.leave(pid)
    await rig.run(2)


async def test_nothing_grows_over_a_day(tmp_path: Path) -> None:
    host = Host()
    host.arrive("serve", 10)
    config = msgspec.structs.replace(
        CONFIG, tenants=RULES[:1], found=Found(hold_back=True), power=Power(budget=500.0)
    )
    after: list[dict[str, int]] = []
    with structlog.testing.capture_logs():
        async with Rig(tmp_path, host, config) as rig:
            rig.keep_snapshots = False
            for number in range(int(DAY / EPISODE)):
                began = host.own_clock.mono
                await trouble(rig, number)
                # The rest of the episode in steps that let every reading expire.
                while host.own_clock.mono < began + EPISODE:
                    await rig.tick(60.0)
                after.append(sizes(rig))
            assert host.own_clock.mono - 1000.0 >= DAY
            assert {str(e.subject) for e in rig.ledger.entries.values()} <= {f"gpu:{CARD}"}
    last_hours = after[-12:]
    for what in after[0]:
        # Each part may be as full as it was after three hours: later tenants take the places of
        # those before.
        early = max(a[what] for a in after[:18])
        late = max(a[what] for a in last_hours)
        bound = {"events": EVENTS_KEPT, "recorded": 20_000, "ledger bytes": 80 * 1024}.get(what)
        assert late <= (bound if bound is not None else early), f"{what}: {early}, then {late}"
    assert last_hours[-1]["lanes"] <= 3
    assert last_hours[-1]["readings"] < 60


def wishes(plan: Plan) -> list[tuple[object, ...]]:
    """All but the words: which stage a limit is at depends on whether it has been read back already."""
    return [
        (s.knob, s.subject, s.value, s.rule, s.blocked, [n for n in s.numbers if n[0] != "stage"])
        for s in plan.settings
    ]


async def test_extra_wakes_change_nothing_in_the_plans(tmp_path: Path) -> None:
    """What is sensed comes once a second; the second agent looks six times as often."""
    plans: list[list[Plan]] = []
    for extra in (0, 5):
        folder = tmp_path / str(extra)
        folder.mkdir()
        host = Host()
        host.arrive("serve", 10)
        host.arrive("train", 20)
        host.gpus.used[CARD] = 66.0 * GIB
        config = msgspec.structs.replace(CONFIG, power=Power(budget=500.0))
        async with Rig(folder, host, config) as rig:
            made = []
            for second in range(180):
                host.node.pressure = 0.7 if 60 <= second < 90 else 0.1
                host.gpus.celsius[CARD] = 85.0 if 100 <= second < 130 else 60.0
                host.gpus.watts[CARD] = 120.0 + second % 30 * 12
                if 10 <= second < 40:
                    host.grow(20, 2.0**29)
                snapshot = await rig.tick(1.0)
                made.append(snapshot.plan)
                at = host.own_clock.mono
                for number in range(1, extra + 1):
                    host.own_clock.mono = at + number / 8
                    await rig.loop.tick()
                    await rig.reconciler.settled()
                host.own_clock.mono = at
            plans.append(made)
    assert [wishes(p) for p in plans[0]] == [wishes(p) for p in plans[1]]
    knobs = {s.knob.name for p in plans[0] for s in p.settings if s.blocked is None}
    assert knobs == {"cgroup_cpu_weight", "cgroup_cpu_max", "gpu_power_limit"}


async def test_a_storm_of_events_is_bounded(tmp_path: Path) -> None:
    sensor = Scripted()
    host = Host()
    sensor.says = Sensed(events=tuple(Event("xid", 0.0, f"event {n}") for n in range(300)))
    with structlog.testing.capture_logs():
        async with Rig(tmp_path, host, sensors=[sensor]) as rig:
            await rig.run(200)
            latest = rig.publisher.latest()
            assert latest is not None
            assert len(latest.events) == EVENTS_KEPT
            assert len(latest.state.events) == 300
            assert rig.recorder._size <= 20_000
            assert sys.getsizeof(rig.recorder._frames) < 1_000_000
