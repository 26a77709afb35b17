"""The loop with everything it drives, over a host of values: what a tick does, and when one comes."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from gpuagent.config import Power
from gpuagent.errors import Refused, Unavailable
from gpuagent.model.inventory import NODE, on_gpu, on_tenant
from gpuagent.model.plan import (
    Command,
    Decision,
    Pause,
    ReleaseGpus,
    Reload,
    ResumeGpus,
    Snapshot,
    Unpause,
)
from gpuagent.model.state import NodeState, Reading, Sensed
from gpuagent.model.vocab import (
    CPU_MAX,
    GPU_TEMPERATURE_CELSIUS,
    NODE_CPU_COUNT,
    TENANT_CPU_CORES,
)
from tests.decide.world import CARD, GIB
from tests.fakes.host import Host, Scripted
from tests.rig import CONFIG, RULES, Rig

OTHER = "GPU-bbbbbbbb-0000-0000-0000-000000000002"
FREE = "max 100000"


def busy_host() -> Host:
    """A service and a training share a card that is nearly full."""
    host = Host()
    host.arrive("serve", 10)
    host.arrive("train", 20)
    host.gpus.used[CARD] = 66.0 * GIB
    return host


def results(snapshot: Snapshot) -> dict[str, str]:
    return {o.knob.name: o.result for o in snapshot.outcomes.values()}


# -- one tick ----------------------------------------------------------------------------------------


async def test_a_tenant_that_grows_is_held_back_says_why_and_is_let_go(tmp_path: Path) -> None:
    host = busy_host()
    async with Rig(tmp_path, host) as rig:
        await rig.run(5)
        assert host.cpu_max("train") == FREE
        snapshot = await rig.press(8)
        assert host.cpu_max("train") == "28000 20000", "70 % of the two cores it used"
        (setting,) = (s for s in snapshot.plan.settings if s.knob is CPU_MAX)
        assert setting.rule == "backpressure/memory"
        assert "memory of GPU 0" in setting.why
        assert snapshot.outcomes[setting.key].real == pytest.approx(1.4)
        assert [h.subject.tenant for h in snapshot.holds] == ["train"]
        assert host.cpu_max("serve") == FREE
        await rig.run(180)
        assert host.cpu_max("train") == FREE
        assert not rig.ledger.entries


async def test_what_is_sensed_in_a_tick_is_decided_on_in_the_same(tmp_path: Path) -> None:
    sensor = Scripted()
    seen: list[float | None] = []

    class Looks:
        name = "looks"

        def begin(self) -> int:
            return 0

        def decide(self, memory: int, state: NodeState) -> tuple[int, Decision]:
            seen.append(state.fresh(NODE_CPU_COUNT, NODE))
            assert memory == len(seen) - 1, "what it returned is what it is given"
            return memory + 1, Decision()

    host = Host()
    async with Rig(tmp_path, host, sensors=[sensor], policies=[Looks()]) as rig:
        for value in (4.0, 8.0):
            at = host.own_clock.mono + 1
            sensor.says = Sensed((Reading(NODE_CPU_COUNT, NODE, value, at),))
            snapshot = await rig.tick()
            assert snapshot.state.now.mono == at
    assert seen == [4.0, 8.0]
    assert [s.stats.ticks for s in rig.snapshots] == [1, 2]


async def test_observing_changes_nothing_and_says_what_would_be_done(tmp_path: Path) -> None:
    host = busy_host()
    config = msgspec.structs.replace(CONFIG, mode="observe", power=Power(budget=300.0))
    async with Rig(tmp_path, host, config) as rig:
        await rig.run(5)
        snapshot = await rig.press(20)
        assert results(snapshot) == {"cgroup_cpu_max": "would", "gpu_power_limit": "would"}
        assert host.cpu_max("train") == FREE
        assert host.gpus.limits[CARD] == 700
        assert not rig.ledger.entries
        (would,) = (s for s in snapshot.plan.settings if s.knob is CPU_MAX)
        assert dict(would.numbers)["share"] == pytest.approx(0.7), "the first step only"


async def test_a_limit_that_somebody_else_changes_is_set_again(tmp_path: Path) -> None:
    host = busy_host()
    config = msgspec.structs.replace(CONFIG, power=Power(budget=500.0))
    async with Rig(tmp_path, host, config) as rig:
        await rig.run(3)
        assert host.gpus.limits[CARD] == 500
        host.gpus.limits[CARD] = 700.0  # somebody ran nvidia-smi -pl 700
        await rig.tick()
        assert host.gpus.limits[CARD] == 500


async def test_two_cards_share_a_budget(tmp_path: Path) -> None:
    host = Host(CARD, OTHER)
    host.arrive("serve", 10)
    host.arrive("train", 20, card=OTHER)
    host.gpus.watts = {CARD: 650.0, OTHER: 650.0}
    config = msgspec.structs.replace(CONFIG, power=Power(budget=1000.0))
    async with Rig(tmp_path, host, config) as rig:
        for _ in range(40):
            await rig.tick()
            assert sum(host.gpus.limits.values()) <= 1400
            for uuid, limit in host.gpus.limits.items():
                host.gpus.watts[uuid] = min(650.0, limit)
        assert sum(host.gpus.limits.values()) <= 1000
        assert host.gpus.limits[CARD] > host.gpus.limits[OTHER]


async def test_a_published_snapshot_never_changes(tmp_path: Path) -> None:
    host = busy_host()
    async with Rig(tmp_path, host) as rig:
        await rig.run(5)
        await rig.press(15)
        kept = rig.publisher.latest()
        assert kept is not None

        def picture() -> tuple[object, ...]:
            return (
                dict(kept.state.readings),
                dict(kept.state.outcomes),
                dict(kept.state.health),
                kept.state.inventory,
                kept.state.events,
                kept.plan,
                dict(kept.outcomes),
                dict(kept.actions),
                kept.holds,
                kept.causes,
                kept.events,
                kept.stats,
                kept.posture,
                [r.key for r in kept.state.live()],
            )

        before = picture()
        host.leave(20)
        await rig.ask(Pause("test"))
        await rig.run(20)
        assert picture() == before
        assert rig.publisher.latest() is not kept


# -- when it must stop at once -----------------------------------------------------------------------


async def test_pause_puts_back_in_its_tick_and_unpause_resumes(tmp_path: Path) -> None:
    host = busy_host()
    async with Rig(tmp_path, host) as rig:
        await rig.run(5)
        await rig.press(15)
        assert host.cpu_max("train") != FREE
        asked = asyncio.ensure_future(rig.loop.inbox.submit(Pause("uid 0")))
        await asyncio.sleep(0)
        await rig.tick()
        assert host.cpu_max("train") == FREE
        assert not asked.done(), "it is answered once a later tick shows what it has done"
        while not asked.done():  # the mark is written by a thread
            await asyncio.sleep(0.001)
            await rig.tick()
        assert "everything is put back" in await asked
        assert not rig.ledger.entries
        assert rig.mark.read() == "uid 0"
        await rig.press(20)
        assert host.cpu_max("train") == FREE
        assert "enforce" in await rig.ask(Unpause("uid 0"))
        await rig.press(10)
        assert host.cpu_max("train") != FREE
        assert rig.mark.read() is None


async def test_a_rule_that_is_removed_puts_its_tenant_back_at_once(tmp_path: Path) -> None:
    host = busy_host()
    async with Rig(tmp_path, host) as rig:
        await rig.run(5)
        await rig.press(15)
        assert host.cpu_max("train") != FREE
        rig.config = msgspec.structs.replace(CONFIG, tenants=RULES[:1])
        await rig.ask(Reload("SIGHUP"))
        snapshot = await rig.tick()
        assert host.cpu_max("train") == FREE
        assert not rig.ledger.entries
        assert snapshot.state.inventory.tenant("train") is None
        assert snapshot.state.inventory.tenant("unit:train.service") is not None


async def test_back_to_observe_puts_back_at_once(tmp_path: Path) -> None:
    host = busy_host()
    rig_config = msgspec.structs.replace(CONFIG, power=Power(budget=500.0))
    async with Rig(tmp_path, host, rig_config) as rig:
        await rig.run(5)
        await rig.press(15)
        assert (host.cpu_max("train") != FREE, host.gpus.limits[CARD]) == (True, 500)
        rig.config = msgspec.structs.replace(rig_config, mode="observe")
        await rig.ask(Reload("SIGHUP"))
        await rig.tick()
        assert (host.cpu_max("train"), host.gpus.limits[CARD]) == (FREE, 700)
        assert not rig.ledger.entries


async def test_a_tenant_that_leaves_takes_its_readings_and_its_hold_with_it(tmp_path: Path) -> None:
    host = busy_host()
    async with Rig(tmp_path, host) as rig:
        await rig.run(5)
        await rig.press(15)
        host.leave(20)
        await rig.tick()
        snapshot = await rig.tick()
        assert snapshot.state.inventory.tenant("train") is None
        assert not [r for r in snapshot.state.live() if r.subject.tenant == "train"]
        assert snapshot.plan.settings == ()
        assert not rig.ledger.entries
        assert snapshot.state.fresh(TENANT_CPU_CORES, on_tenant("serve")) is not None


async def test_every_command_is_answered(tmp_path: Path) -> None:
    host = busy_host()
    async with Rig(tmp_path, host) as rig:
        commands: list[Command] = [
            Pause("a"),
            Unpause("a"),
            Reload("a"),
            ReleaseGpus("a"),
            ResumeGpus("a"),
        ]
        answers = [await rig.ask(c) for c in commands]
        assert all(answers)
        assert len(set(answers)) == len(answers)
        await rig.run(2)
        assert rig.loop.posture.mode == "enforce"
        assert not rig.loop.posture.released


async def test_released_cards_are_unknown_not_fine(tmp_path: Path) -> None:
    host = busy_host()
    async with Rig(tmp_path, host) as rig:
        await rig.run(5)
        await rig.ask(ReleaseGpus("a"))
        snapshot = await rig.run(6)
        health = snapshot.state.health["gpus"]
        assert (health.up, "released" in health.why) == (False, True)
        assert snapshot.state.fresh(GPU_TEMPERATURE_CELSIUS, on_gpu(CARD)) is None
        await rig.ask(ResumeGpus("a"))
        snapshot = await rig.run(2)
        assert snapshot.state.health["gpus"].up
        assert snapshot.state.fresh(GPU_TEMPERATURE_CELSIUS, on_gpu(CARD)) == 50


# -- sensors that misbehave --------------------------------------------------------------------------


async def test_a_sensor_that_hangs_holds_up_no_tick(tmp_path: Path) -> None:
    stuck, well = Scripted("stuck"), Scripted("well")
    stuck.gate = asyncio.Event()
    host = Host()
    async with Rig(tmp_path, host, sensors=[stuck, well], patience=0.05) as rig:
        snapshot = await rig.run(15)
        assert len(well.asked_at) == 15
        assert len(stuck.asked_at) == 1
        assert snapshot.state.health["well"].up
        assert snapshot.state.health["stuck"].up is False
        assert "has not answered for 14 s" in snapshot.state.health["stuck"].why
        stuck.gate.set()
        await rig.tick()
        assert (await rig.tick()).state.health["stuck"].up


@pytest.mark.parametrize("error", [Unavailable("gone fishing"), Refused("no"), ValueError("bug")])
async def test_a_sensor_that_fails_is_down_and_up_again(tmp_path: Path, error: Exception) -> None:
    sensor = Scripted()
    host = Host()
    async with Rig(tmp_path, host, sensors=[sensor]) as rig:
        assert (await rig.tick()).state.health["scripted"].up
        sensor.says = error
        health = (await rig.run(3)).state.health["scripted"]
        assert (health.up, health.failures) == (False, 3)
        assert str(error) in health.why
        sensor.says = Sensed()
        health = (await rig.tick()).state.health["scripted"]
        assert (health.up, health.why, health.failures) == (True, "", 3)


async def test_the_whole_driver_may_be_missing(tmp_path: Path) -> None:
    host = busy_host()
    host.gpus.down = Unavailable("the GPU reader is down")
    async with Rig(tmp_path, host) as rig:
        snapshot = await rig.run(10)
        assert snapshot.state.inventory.gpus is None
        assert snapshot.state.health["gpus"].why == "the GPU reader is down"
        assert snapshot.state.inventory.tenant("serve") is not None
        assert snapshot.plan.settings == ()
