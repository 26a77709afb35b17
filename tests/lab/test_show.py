"""The same load with the agent and without: what is shown, and what it comes to."""

from pathlib import Path

import pytest

from gpuagent.lab.show import Show, Summary
from gpuagent.ports import LatencyReport
from gpuagent.sim import scenario
from gpuagent.sim.host import SimHost


async def shown(name: str, folder: Path, *, seed: int = 1, seconds: float = 300.0) -> Summary:
    async with Show(scenario.named(name), seed=seed, folder=str(folder), seconds=seconds) as show:
        while not show.over:
            await show.tick()
        return await show.end()


async def test_the_hosts_are_alike_but_for_the_agent(tmp_path: Path) -> None:
    made = scenario.named("co-location")
    async with Show(made, seed=2, folder=str(tmp_path), seconds=120.0) as show:
        while not show.over:
            await show.tick()
        assert show.alone.elapsed == pytest.approx(show.elapsed)
        untouched = SimHost(made, seed=2)
        untouched.advance(120.0)
        assert show.alone.latencies("chat", 0.0) == untouched.latencies("chat", 0.0)
        assert set(show.beside()) == {"chat"}


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_the_service_is_kept_and_training_goes_on(seed: int, tmp_path: Path) -> None:
    summary = await shown("co-location", tmp_path, seed=seed, seconds=600.0)
    here, there = summary.l1_p99_seconds_with, summary.l1_p99_seconds_without
    assert here is not None
    assert there is not None
    assert here <= 0.9 * there
    assert summary.l3_throughput_kept is not None
    assert summary.l3_throughput_kept > 0.2
    assert summary.restored
    assert summary.ticks == 600
    assert summary.measured_seconds == pytest.approx(510.0)
    assert {t.name: (t.level, t.kind) for t in summary.tenants} == {
        "chat": ("L1", "inference"),
        "batch": ("L2", "inference"),
        "training": ("L3", "training"),
    }


async def test_where_nothing_happens_nothing_is_claimed(tmp_path: Path) -> None:
    summary = await shown("quiet-night", tmp_path, seconds=200.0)
    assert summary.actions == {}
    assert summary.restored
    kept = summary.l3_throughput_kept
    assert kept is None or kept == pytest.approx(1.0)


async def test_a_show_that_is_over_before_the_window_measures_nothing(tmp_path: Path) -> None:
    summary = await shown("co-location", tmp_path, seconds=40.0)
    assert summary.measured_seconds == 0.0
    assert summary.l1_p99_seconds_with is None
    assert summary.l3_throughput_kept is None
    assert summary.restored


async def test_a_lost_card_cannot_be_put_back_and_is_no_fault(tmp_path: Path) -> None:
    summary = await shown("driver-fault", tmp_path, seconds=380.0)
    assert summary.lost_cards == (1,)
    assert summary.restored
    assert summary.left == ()


@pytest.mark.parametrize(
    ("name", "seconds"),
    [("hot-card", 300.0), ("memory-growth", 450.0), ("power-budget-cut", 200.0)],
)
async def test_the_summary_shows_what_a_scenario_is_about(
    name: str, seconds: float, tmp_path: Path
) -> None:
    summary = await shown(name, tmp_path, seconds=seconds)
    here, there = summary.peaks_with, summary.peaks_without
    assert here is not None
    assert there is not None
    if name == "hot-card":
        assert here.celsius < there.celsius - 1.0
    elif name == "memory-growth":
        assert here.memory_end_bytes < there.memory_end_bytes
        assert here.memory_full_seconds < there.memory_full_seconds
    else:
        assert here.over_budget_seconds is not None
        assert there.over_budget_seconds is not None
        assert here.over_budget_seconds < 0.2 * there.over_budget_seconds
    assert summary.restored


async def test_the_neighbours_through_mps_are_held_for_the_service(tmp_path: Path) -> None:
    summary = await shown("mps-neighbours", tmp_path, seconds=390.0)
    here, there = summary.l1_missed_ratio_with, summary.l1_missed_ratio_without
    assert here is not None
    assert there is not None
    assert here < 0.5 * there
    assert summary.actions["cgroup_cpu_max applied"] > 0


async def test_what_the_scenario_brings_is_told_as_it_comes(tmp_path: Path) -> None:
    made = scenario.named("co-location")
    async with Show(made, seed=1, folder=str(tmp_path), seconds=40.0) as show:
        await show.tick()
        assert [text for _, text in show.happened()] == ["chat starts"]
        while not show.over:
            snapshot = await show.tick()
        assert [text for _, text in show.happened()] == [
            "chat starts",
            "batch starts",
            "training starts",
        ]
        assert all(at <= snapshot.state.now.mono for at, _ in show.happened())


async def test_a_pushed_latency_is_what_the_agent_goes_by(tmp_path: Path) -> None:
    made = scenario.named("co-location")
    async with Show(made, seed=1, folder=str(tmp_path), seconds=60.0) as show:
        while not show.over:
            clock = show.trial.host.clock
            show.trial.push(LatencyReport("chat", 0.99, 0.9, clock.mono))
            snapshot = await show.tick()
        assert "latency" in {cause.kind for cause in snapshot.causes}
