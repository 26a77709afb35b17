"""A simulated service tells its latency, and the agent keeps it: the p99 with and without."""

from pathlib import Path

import msgspec
import pytest

from gpuagent.config import Backpressure
from gpuagent.ports import Latencies, LatencyReport
from gpuagent.sim import scenario
from gpuagent.sim.host import SimHost
from gpuagent.sim.latency import WINDOW_SECONDS, SimLatency
from gpuagent.sim.scenario import Scenario
from tests.sim.test_loop import Checked, changed

BEGIN, END = 90.0, 300.0
"""The window that is compared: the load starts within the first 30 s."""


def busy() -> Scenario:
    """The co-location with its service busy all the time."""
    made = scenario.named("co-location")
    tenants = tuple(
        msgspec.structs.replace(t, set={**t.set, "rate": 65.0}) if t.name == "chat" else t
        for t in made.tenants
    )
    return msgspec.structs.replace(made, tenants=tenants, timeline=())


def test_each_service_reports_its_objective_once_a_second() -> None:
    host = SimHost(busy(), seed=1)
    latency = SimLatency(host)
    box: Latencies = latency
    reported: list[LatencyReport] = []
    for _ in range(30 * 20):
        host.advance(0.05)
        reported += box.take()
    assert {(r.tenant, r.quantile) for r in reported} == {("chat", 0.99)}
    times = [r.at for r in reported]
    began = host.clock.mono - host.elapsed
    assert times == pytest.approx([began + second for second in range(2, 31)])
    for report in reported[-3:]:
        assert report.seconds == latency.read("chat", 0.99, WINDOW_SECONDS, report.at)


def test_how_often_it_is_asked_changes_nothing_but_how_much_it_tells() -> None:
    fine, coarse = (SimHost(busy(), seed=1) for _ in range(2))
    often, seldom = SimLatency(fine), SimLatency(coarse)
    told, few = {}, {}
    for _ in range(600):
        fine.advance(0.05)
        told.update({round(r.at, 3): r.seconds for r in often.take()})
    for _ in range(6):
        coarse.advance(5.0)
        few.update({round(r.at, 3): r.seconds for r in seldom.take()})
    assert len(few) == 6
    assert few.items() <= told.items()


async def measure(folder: Path, mode: str, control: str) -> tuple[float, float, Checked]:
    """p99 in seconds over the window, and the share of requests over the objective."""
    host = SimHost(busy(), seed=1)
    law = Backpressure(control=control)  # type: ignore[arg-type]  # a literal, as parametrized
    async with Checked(folder, host, mode=mode, backpressure=law) as rig:
        began = host.clock.mono
        await rig.follow(END)
        seen = sorted(seconds for _, seconds in host.latencies("chat", began + BEGIN))
        if mode == "enforce":
            await rig.put_back()
    for tenant in host.scenario.tenants:
        assert changed(host, tenant.name) == {}
    objective = next(t.objective for t in host.scenario.tenants if t.name == "chat")
    assert objective is not None
    missed = sum(s > objective.seconds for s in seen) / len(seen)
    return seen[int(0.99 * len(seen))], missed, rig


async def test_the_latency_is_kept_under_either_law_and_everything_is_put_back(
    tmp_path: Path,
) -> None:
    folders = {name: tmp_path / name for name in ("observe", "aimd", "pi")}
    for folder in folders.values():
        folder.mkdir()
    without, missed, observed = await measure(folders["observe"], "observe", "aimd")
    assert observed.acted > 0, "something would be done"
    assert not sum(n for (_, what), n in observed.reconciler.actions.items() if what == "applied")
    for control in ("aimd", "pi"):
        kept, still, rig = await measure(folders[control], "enforce", control)
        assert kept < 0.8 * without
        assert still < 0.5 * missed
        assert rig.reconciler.actions["cgroup_cpu_max", "applied"] > 0
