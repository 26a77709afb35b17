"""A trial runs the agent's own core on a simulated host, and leaves nothing behind."""

import asyncio
from pathlib import Path

import pytest

from gpuagent.errors import ConfigError
from gpuagent.lab.trial import Trial
from gpuagent.model.plan import Pause, Reload, Snapshot
from gpuagent.model.vocab import TENANT_LATENCY_SECONDS
from gpuagent.sim import scenario
from gpuagent.sim.scenario import Patch

CO_LOCATION = scenario.named("co-location")


async def followed(trial: Trial, seconds: float) -> list[Snapshot]:
    return [snapshot async for snapshot in trial.follow(seconds)]


@pytest.mark.parametrize("name", scenario.names())
async def test_every_scenario_ends_as_it_began(name: str, tmp_path: Path) -> None:
    made = scenario.named(name).with_agent({"mode": "enforce"})
    async with Trial(made, seed=3, folder=str(tmp_path)) as trial:
        snapshots = await followed(trial, 300.0)
        assert await trial.stop() == ()
    assert len(snapshots) == 300
    assert all(s.posture.simulated for s in snapshots)
    assert trial.host.elapsed == pytest.approx(300.0)


async def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    ends = []
    for number in range(2):
        async with Trial(CO_LOCATION, seed=5, folder=str(tmp_path / str(number))) as trial:
            last = (await followed(trial, 200.0))[-1]
            ends.append((last.plan, last.holds, trial.host.progress("training")))
    assert ends[0] == ends[1]


async def test_what_is_changed_shows_until_it_is_put_back(tmp_path: Path) -> None:
    async with Trial(CO_LOCATION, seed=1, folder=str(tmp_path)) as trial:
        async for _ in trial.follow(400.0):
            if trial.traces():
                break
        assert any(".service/cpu.max" in t for t in trial.traces())
        assert await trial.stop() == ()
        assert trial.traces() == ()


async def test_somebody_elses_change_is_told(tmp_path: Path) -> None:
    async with Trial(CO_LOCATION, seed=1, folder=str(tmp_path)) as trial:
        await followed(trial, 60.0)
        path = trial.host.cgroup("training")
        groups = trial.host.cgroups
        groups.write(path, groups.inode(path), "cpu.max", "50000 100000")
        trial.host.cards[0].limit_watts -= 10
        assert await trial.stop() == (
            f"{path}/cpu.max: 50000 100000",
            f"power limit of card 0: {trial.host.cards[0].limit_watts:g} W",
        )


async def test_what_is_so_from_the_beginning_is_no_trace(tmp_path: Path) -> None:
    async with Trial(CO_LOCATION, seed=1, folder=str(tmp_path)) as trial:
        groups, path = trial.host.cgroups, trial.host.cgroup("training")
        groups.write("/init.scope", groups.inode("/init.scope"), "cpu.weight", "300")
        trial.host.stop("training")
        trial.host.start("training")  # its unit has a quota of its own
        groups.write(path, groups.inode(path), "cpu.max", "800000 100000")
        await trial.tick()
        assert trial.traces() == ()
        groups.write(path, groups.inode(path), "cpu.max", "max 100000")
        assert trial.traces() == (f"{path}/cpu.max: max 100000",)


async def test_after_a_crash_the_next_run_goes_on_with_what_is_held(tmp_path: Path) -> None:
    async with Trial(CO_LOCATION, seed=1, folder=str(tmp_path)) as trial:
        async for _ in trial.follow(400.0):
            if trial.traces():
                break
        held, before = trial.kept.ledger.entries, trial.core
        assert held
        await trial.crash()
        assert trial.core is not before
        # Only what DESIGN 2 adopts is still as it was.
        assert set(trial.kept.ledger.entries) <= set(held)
        assert {e.subject.cgroup for e in trial.kept.ledger.entries.values()} >= {
            t.partition("/cpu.")[0] for t in trial.traces()
        }
        await followed(trial, 60.0)
        assert await trial.stop() == ()


async def test_the_services_tell_their_latency(tmp_path: Path) -> None:
    async with Trial(CO_LOCATION, seed=1, folder=str(tmp_path)) as trial:
        last = (await followed(trial, 60.0))[-1]
    told = {r.subject.tenant for r in last.state.live() if r.signal is TENANT_LATENCY_SECONDS}
    assert told == {"chat"}


async def test_the_configuration_changes_with_the_timeline(tmp_path: Path) -> None:
    made = CO_LOCATION.with_agent({"mode": "observe"})
    patch = Patch(at=50.0, agent={"mode": "enforce"})
    changed = type(made)(
        **{f: getattr(made, f) for f in made.__struct_fields__ if f != "timeline"},
        timeline=(*made.timeline, patch),
    )
    async with Trial(changed, seed=1, folder=str(tmp_path)) as trial:
        snapshots = await followed(trial, 60.0)
    assert [s.posture.mode for s in snapshots[:50]] == ["observe"] * 50
    assert snapshots[-1].posture.mode == "enforce"


async def test_commands_are_obeyed(tmp_path: Path) -> None:
    async with Trial(CO_LOCATION, seed=1, folder=str(tmp_path)) as trial:
        await trial.tick()
        inbox = trial.core.loop.inbox
        for command, word in ((Reload("a test"), "co-location"), (Pause("a test"), "paused")):
            answer = asyncio.ensure_future(inbox.submit(command))
            for _ in range(50):
                await trial.tick()
                if answer.done():
                    break
            assert word in answer.result()
        assert not trial.core.loop.posture.acts


async def test_a_configuration_with_problems_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="moode"):
        Trial(CO_LOCATION.with_agent({"moode": "x"}), seed=1, folder=str(tmp_path))
