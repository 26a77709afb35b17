"""Declared host memory: set where it is the tenant's own, never so that it ends what runs."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.config import Config
from gpuagent.decide import POLICIES
from gpuagent.decide.limits import RULE, Limits
from gpuagent.decide.merge import Violation, merge
from gpuagent.model.inventory import Level, Tenant, on_tenant
from gpuagent.model.state import Outcome
from gpuagent.model.vocab import MEMORY_HIGH, MEMORY_MAX, TENANT_HOST_MEMORY_BYTES
from tests.decide.world import GIB, World, seat, tenant


def limited(
    high: int | None = None, most: int | None = None, *, name: str = "train", **more: Any
) -> Tenant:
    made = tenant(name, **more)
    limits = msgspec.structs.replace(
        made.limits, host_memory_high_bytes=high, host_memory_max_bytes=most
    )
    return msgspec.structs.replace(made, limits=limits)


def world(*tenants: Tenant, used: float | None = 10.0 * GIB) -> World:
    w = World(Limits(Config()), tenants=tenants)
    for one in tenants:
        w.values[TENANT_HOST_MEMORY_BYTES, on_tenant(one.name)] = used
    return w


def in_force(w: World, value: float, original: float | None = float("inf")) -> None:
    [setting] = w.decision.settings
    w.outcomes = [
        Outcome(setting.knob, setting.subject, value, value, original, "applied", "", w.now)
    ]


def test_it_is_one_of_the_policies() -> None:
    assert Limits in POLICIES


def test_both_are_set_as_declared() -> None:
    high, most = world(limited(20 * GIB, 30 * GIB)).step().settings
    assert (high.knob, high.value, high.blocked) == (MEMORY_HIGH, 20.0 * GIB, None)
    assert (most.knob, most.value, most.blocked) == (MEMORY_MAX, 30.0 * GIB, None)
    assert high.subject == most.subject
    assert high.subject.cgroup == "/system.slice/train.service"
    assert high.rule == most.rule == RULE
    assert "20.00 GiB" in high.why
    assert dict(high.numbers) == {"declared_bytes": 20.0 * GIB, "used_bytes": 10.0 * GIB}


def test_nothing_is_set_where_nothing_is_declared() -> None:
    assert world(limited()).step().settings == ()


def test_l1_may_have_its_own_and_nobody_else_may_turn_it() -> None:
    w = world(limited(20 * GIB, 30 * GIB, level=Level.L1))
    plan = merge(w.step().settings, w.state)
    assert [s.knob for s in plan.settings] == [MEMORY_HIGH, MEMORY_MAX]
    foreign = msgspec.structs.replace(plan.settings[0], rule="backpressure/cpu")
    with pytest.raises(Violation):
        merge([foreign], w.state)


def test_max_is_never_set_below_what_is_in_use() -> None:
    w = world(limited(most=8 * GIB))
    [setting] = w.run(20).settings
    assert setting.blocked is not None
    assert setting.blocked.result == "refused"
    assert "10.00 GiB" in setting.blocked.why
    assert w.events == ["limit-unused"]
    w.values[TENANT_HOST_MEMORY_BYTES, on_tenant("train")] = 7.0 * GIB
    assert w.step().settings[0].blocked is None


def test_max_waits_until_it_is_known_what_is_in_use() -> None:
    w = world(limited(most=8 * GIB), used=None)
    [setting] = w.run(3).settings
    assert setting.blocked is not None
    assert "not known" in setting.blocked.why
    assert w.events == []


@pytest.mark.parametrize("used", [None, 8.5 * GIB])
def test_max_that_is_in_force_stays_whatever_is_read(used: float | None) -> None:
    w = world(limited(most=8 * GIB), used=2.0 * GIB)
    w.step()
    in_force(w, 8.0 * GIB)
    w.values[TENANT_HOST_MEMORY_BYTES, on_tenant("train")] = used
    assert w.run(30).settings[0].blocked is None


@pytest.mark.parametrize(("real", "original"), [(9.0 * GIB, float("inf")), (8.0 * GIB, None)])
def test_another_value_in_the_file_is_none_in_force(real: float, original: float | None) -> None:
    w = world(limited(most=8 * GIB))
    w.step()
    in_force(w, real, original)
    assert w.step().settings[0].blocked is not None


def test_high_below_what_is_in_use_is_set_and_told_once() -> None:
    w = world(limited(high=8 * GIB))
    assert w.run(3).settings[0].blocked is None
    for used in (8.1, 7.9) * 20:
        w.values[TENANT_HOST_MEMORY_BYTES, on_tenant("train")] = used * GIB
        w.step()
    assert w.events == ["limit-exceeded"]
    w.values[TENANT_HOST_MEMORY_BYTES, on_tenant("train")] = 4.0 * GIB
    w.step()
    w.values[TENANT_HOST_MEMORY_BYTES, on_tenant("train")] = 9.0 * GIB
    w.step()
    assert w.events == ["limit-exceeded"] * 2


def test_who_shares_his_control_group_gets_none() -> None:
    w = world(limited(20 * GIB, 30 * GIB, refusal="also home of sshd"))
    assert {s.blocked.why for s in w.step().settings if s.blocked} == {"also home of sshd"}
    assert len(w.decision.settings) == 2


def test_a_limit_is_not_cut_up_for_several_control_groups() -> None:
    two = msgspec.structs.replace(
        limited(20 * GIB), seats=(seat("/system.slice/a.service"), seat("/system.slice/b.service"))
    )
    w = world(two)
    blocked = [s.blocked for s in w.step().settings]
    assert len(blocked) == 2
    assert all(b is not None and "2 control groups" in b.why for b in blocked)


def test_who_the_tenants_are_must_be_known() -> None:
    w = world(limited(20 * GIB))
    assert w.step().settings
    w.says_tenants = False
    assert w.run(600).settings == ()


@given(
    used=st.none() | st.floats(0, 1e12),
    high=st.none() | st.integers(1, 10**12),
    most=st.none() | st.integers(1, 10**12),
    level=st.sampled_from(Level),
)
def test_no_tried_max_is_below_what_is_in_use(
    used: float | None, high: int | None, most: int | None, level: Level
) -> None:
    w = world(limited(high, most, level=level), used=used)
    plan = merge(w.step().settings, w.state)
    for setting in plan.settings:
        assert setting.value == (high if setting.knob is MEMORY_HIGH else most)
        if setting.knob is MEMORY_MAX and setting.blocked is None:
            assert used is not None
            assert used <= setting.value
