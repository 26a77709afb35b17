"""The same load with the agent and without: what is shown, and what it comes to."""

from pathlib import Path

import pytest

from gpuagent.lab.show import Show, Summary
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
