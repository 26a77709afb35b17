"""What the model assumes can be varied by name, within bounds, and a lever that does nothing does nothing."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuagent.errors import ConfigError
from gpuagent.sim import profiles, scenario
from gpuagent.sim.host import SimHost
from gpuagent.sim.jobs import Progress
from gpuagent.sim.vary import ASSUMPTIONS, VARIATIONS, Variation, varied
from gpuagent.sim.work import Idle, Inference
from tests.sim.test_host import digest, eight_tenants

CO_LOCATION = scenario.named("co-location")


def changed(**values: float) -> scenario.Scenario:
    return varied(CO_LOCATION, Variation("test", values))


@pytest.mark.parametrize("name", scenario.names())
@pytest.mark.parametrize("variation", VARIATIONS, ids=lambda v: v.name)
def test_every_scenario_can_be_had_in_every_variation(name: str, variation: Variation) -> None:
    made = varied(scenario.named(name), variation)
    SimHost(made, seed=1).advance(40.0)
    assert made.agent_toml() == scenario.named(name).agent_toml()
    assert made == varied(scenario.named(name), variation), "pure"


def test_as_modelled_is_the_scenario_itself_and_so_is_full_effect() -> None:
    assert varied(CO_LOCATION, VARIATIONS[0]) == CO_LOCATION
    same = changed(cpu_effect=1.0, rate_scale=1.0, contention_ratio=1.0, ceiling_effect=1.0)
    runs = []
    for made in (CO_LOCATION, same):
        host = SimHost(made, seed=4)
        host.advance(120.0)
        runs.append(digest(host))
    assert runs[0] == runs[1]


@settings(max_examples=20)
@given(st.floats(0.01, 16), st.integers(0, 99))
def test_without_effect_no_quota_changes_what_anybody_gets_done(quota: float, seed: int) -> None:
    deaf = varied(eight_tenants(), Variation("deaf", {"cpu_effect": 0.0}))
    done: list[list[Progress]] = []
    for text in (f"{quota * 1e5:.0f} 100000", "max"):
        host = SimHost(deaf, seed=seed)
        host.advance(1.0)
        for tenant in deaf.tenants:
            path = host.cgroup(tenant.name)
            host.cgroups.write(path, host.cgroups.inode(path), "cpu.max", text)
        host.advance(9.0)
        done.append([host.progress(t.name) for t in deaf.tenants])
    assert done[0] == done[1]


@given(st.floats(0, 1))
def test_less_effect_is_less_lost(effect: float) -> None:
    for tenant in CO_LOCATION.tenants:
        base = CO_LOCATION.work(tenant)
        spec = next(t for t in changed(cpu_effect=effect).tenants if t.name == tenant.name)
        work = CO_LOCATION.work(spec)
        assert not isinstance(work, Idle)
        assert not isinstance(base, Idle)
        if isinstance(work, Inference):
            assert isinstance(base, Inference)
            assert work.host_seconds == base.host_seconds * effect
            whole = base.host_seconds + base.item_seconds
            assert work.host_seconds + work.item_seconds == pytest.approx(whole)
        else:
            assert not isinstance(base, Inference)
            assert (work.launch, work.host_cpu) == (base.launch * effect, base.host_cpu * effect)


def test_one_tenant_alone_can_be_deaf() -> None:
    made = varied(CO_LOCATION, Variation("t", {"cpu_effect": 0.0}, tenant="training"))
    assert made.tenants[:2] == CO_LOCATION.tenants[:2]
    assert made.tenants[2].set == {"launch": 0.0, "host_cpu": 0.0}
    with pytest.raises(ConfigError, match="t: co-location has no tenant nobody"):
        varied(CO_LOCATION, Variation("t", {"cpu_effect": 0.0}, tenant="nobody"))


def test_rates_are_scaled_on_the_timeline_too() -> None:
    night = scenario.named("quiet-night")
    made = varied(night, Variation("t", {"rate_scale": 2.0}))
    rates = [h.rate for h in made.timeline if isinstance(h, scenario.Load)]
    assert rates == [1.0]
    assert made.tenants[0].set["rate"] == 4.0
    other = varied(night, Variation("t", {"rate_scale": 2.0}, tenant="holder"))
    assert other.timeline == night.timeline


def test_limits_act_as_late_as_is_said_or_never() -> None:
    for seconds, low, high in ((0.0, 0.0, 0.05), (5.0, 0.01, 5.0), (86_400.0, 86_400.0, 86_400.0)):
        spec = changed(limit_delay_seconds=seconds).cards[0]
        profile = profiles.card(spec.profile, spec.set)
        assert profile.limit_delay_max_seconds.value == seconds
        host = SimHost(changed(limit_delay_seconds=seconds), seed=1)
        host.cards[0].limit(150.0, host.clock.mono)
        host.advance(min(high, 60.0) + 0.1)
        assert (host.cards[0].enforced_watts == 150.0) == (high <= 60.0)
        assert profile.limit_delay_min_seconds.value == low


def test_noise_contention_and_mps_reach_the_cards() -> None:
    made = varied(
        scenario.named("mps-neighbours"),
        Variation(
            "t",
            {
                "power_noise_ratio": 0.2,
                "contention_ratio": 0.5,
                "interference_ratio": 0.0,
                "ceiling_effect": 0.5,
            },
        ),
    )
    assert made.cards[0].set == {"power_noise_ratio": 0.2, "contention_ratio": 0.5}
    assert made.mps[0].set == {"interference_ratio": 0.0, "ceiling_effect": 0.5}
    host = SimHost(made, seed=1)
    assert host.cards[0].profile.power_noise_ratio.value == 0.2


@given(st.text(max_size=9), st.floats())
def test_what_is_out_of_bounds_or_unknown_is_told_off(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match="is no assumption; there are cpu_effect"):
        Variation("t", {f"x{name}": 0.0})
    for known, bounds in ASSUMPTIONS.items():
        if bounds.low <= value <= bounds.high:
            assert Variation("t", {known: value}).values == {known: value}
        else:
            with pytest.raises(ConfigError, match=f"t: {known} = .* is not within"):
                Variation("t", {known: value})


def test_what_is_wrong_is_said_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Variation("t", {"cpu_effect": 2.0, "cake": 1.0, "rate_scale": -1.0})
    assert len(caught.value.problems) == 3
    assert len({v.name for v in VARIATIONS}) == len(VARIATIONS)
    assert msgspec.json.decode(msgspec.json.encode(VARIATIONS[2]), type=Variation) == VARIATIONS[2]
