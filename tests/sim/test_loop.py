"""Every scenario under the real loop, sensors, policies and lanes, for ten simulated minutes."""

from pathlib import Path
from typing import Any

import pytest

from gpuagent.model.inventory import Level
from gpuagent.model.plan import Snapshot
from gpuagent.model.vocab import POWER_LIMIT
from gpuagent.sim import scenario
from gpuagent.sim.host import SimHost
from tests.sim.rig import SimRig

SECONDS = 600.0
ABOUT = {
    "memory-growth": {"cgroup_cpu_max"},
    "hot-card": {"cgroup_cpu_max"},
    "power-budget-cut": {"gpu_power_limit"},
}
"""Knobs that are turned where there is something to do."""
UNTOUCHED = {"cpu.max": "max 100000", "cpu.weight": "100"}


class Checked(SimRig):
    """Looks after every tick whether something happened that never may."""

    acted = 0

    def check(self, snapshot: Snapshot) -> None:
        levels = {t.name: t.level for t in snapshot.state.inventory.tenants or ()}
        for setting in snapshot.plan.settings:
            tenant = setting.subject.tenant
            assert not tenant or levels.get(tenant) is not Level.L1, "L1's own knobs stay"
            self.acted += setting.blocked is None
        for tenant, level in levels.items():
            if level is Level.L1:
                assert changed(self.sim, tenant) == {}
        for card in self.sim.cards:
            low, high = card.profile.power_min_watts.value, card.profile.power_max_watts.value
            assert low <= card.limit_watts <= high
            assert card.used_bytes <= card.memory_bytes
            assert card.lost or card.watts <= max(card.limit_watts, card.enforced_watts) + 1e-6


def changed(host: SimHost, tenant: str) -> dict[str, str]:
    """Control files of a running tenant, and of those above it, that are not as they were."""
    if tenant not in {t.name for t in host.scenario.tenants} or not host.progress(tenant).running:
        return {}
    found = {}
    path = host.cgroup(tenant)
    while path:
        for file, text in UNTOUCHED.items():
            if host.cgroups.read(path, file) != text:
                found[f"{path}/{file}"] = host.cgroups.read(path, file)
        path = path.rpartition("/")[0]
    return found


async def run(name: str, folder: Path, **changes: Any) -> tuple[SimHost, Checked]:
    host = SimHost(scenario.named(name), seed=1)
    async with Checked(folder, host, **changes) as rig:
        await rig.follow(SECONDS)
        if changes["mode"] == "enforce":
            await rig.put_back()
    return host, rig


@pytest.mark.parametrize("mode", ["observe", "enforce"])
@pytest.mark.parametrize("name", scenario.names())
async def test_nothing_is_violated_and_everything_is_put_back(
    name: str, mode: str, tmp_path: Path
) -> None:
    host, rig = await run(name, tmp_path, mode=mode)
    for tenant in host.scenario.tenants:
        assert changed(host, tenant.name) == {}
    for card in host.cards:
        assert card.limit_watts == card.profile.power_max_watts.value or card.lost
    if name == "quiet-night":
        assert rig.acted == 0
        assert not rig.reconciler.outcomes()
    applied = {
        knob for (knob, result), n in rig.reconciler.actions.items() if n and result == "applied"
    }
    assert applied >= (ABOUT.get(name, set()) if mode == "enforce" else set())
    assert mode == "enforce" or not applied


async def test_growth_is_slowed_and_the_card_stays_cooler_than_without(tmp_path: Path) -> None:
    for folder in ("observe", "enforce"):
        (tmp_path / folder).mkdir()
    full, hot = {}, {}
    for mode in ("observe", "enforce"):
        host = SimHost(scenario.named("memory-growth"), seed=1)
        async with Checked(tmp_path / mode, host, mode=mode) as rig:
            await rig.follow(400.0)
        full[mode] = host.cards[0].used_bytes
    for mode in ("observe", "enforce"):
        (tmp_path / mode / "hot").mkdir()
        host = SimHost(scenario.named("hot-card"), seed=1)
        async with Checked(tmp_path / mode / "hot", host, mode=mode) as rig:
            await rig.follow(330.0)
        hot[mode] = host.cards[0].celsius
    assert full["enforce"] < full["observe"]
    assert hot["enforce"] < hot["observe"] - 2


async def test_the_sum_of_the_limits_keeps_to_the_budget(tmp_path: Path) -> None:
    host = SimHost(scenario.named("power-budget-cut"), seed=1)
    async with Checked(tmp_path, host, mode="enforce") as rig:
        await rig.follow(130.0)
        for _ in range(28):
            await rig.follow(10.0)
            assert sum(c.limit_watts for c in host.cards) <= 380.0
            assert sum(c.watts for c in host.cards) <= 380.0
        assert POWER_LIMIT in {o.knob for o in rig.reconciler.outcomes()}
