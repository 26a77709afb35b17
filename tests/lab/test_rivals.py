"""The policies that the agent's own are compared with: what they hold, by how much, and when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.config import Config
from gpuagent.lab.rivals import (
    CUT,
    GROWTH,
    LOOP_SECONDS,
    STEP,
    TOLERANCE,
    Rate,
    Static,
    TgsLike,
    stepped,
)
from gpuagent.model.inventory import Level, Tenant
from gpuagent.model.vocab import CPU_MAX
from tests.decide.world import World, gpu, tenant

OTHER = "GPU-bbbbbbbb-0000-0000-0000-000000000002"
CHAT = tenant("chat", Level.L1, slo=0.1)
BATCH = tenant("batch", Level.L2)
TRAIN = tenant("train", Level.L3)
CONFIG = Config()


def static(*tenants: Tenant, **shares: float) -> World:
    policy = Static(CONFIG, {Level[name]: share for name, share in shares.items()})
    return World(policy, gpus=[gpu()], tenants=tenants)


def cores(w: World) -> dict[str, float]:
    assert all(s.knob is CPU_MAX for s in w.decision.settings)
    return {s.subject.tenant: s.value for s in w.decision.settings if s.blocked is None}


# -- fixed shares ---------------------------------------------------------------------------------------


def test_a_share_is_of_what_was_used_before_the_first_cut() -> None:
    w = static(CHAT, BATCH, TRAIN, L3=0.5)
    w.run(5)
    w.uses("train", cores=4.0)
    w.run(5)
    assert cores(w) == {}, "ten seconds of it are not seen yet"
    w.run(2)
    assert cores(w) == {"train": 2.0}
    w.uses("train", cores=2.0)  # which is what the cut makes of it
    w.run(120)
    assert cores(w) == {"train": 2.0}
    assert w.share("train") == 0.5


def test_each_level_has_its_share_and_one_of_all_is_no_setting() -> None:
    w = static(CHAT, BATCH, TRAIN, L2=0.6, L3=0.3)
    w.run(15)
    assert cores(w) == {"batch": pytest.approx(1.2), "train": pytest.approx(0.6)}
    free = static(CHAT, BATCH, TRAIN, L2=1.0, L3=1.0)
    free.run(15)
    assert free.decision.settings == ()
    assert free.decision.holds == ()


def test_who_may_not_be_held_is_not() -> None:
    w = static(CHAT, tenant("own", enforce=False), tenant("sshd", refusal="shared"), L3=0.5)
    w.run(15)
    assert cores(w) == {}


def test_one_that_comes_later_is_measured_first_too() -> None:
    w = static(CHAT, L3=0.5)
    w.run(60)
    w.tenants = (CHAT, TRAIN)
    w.uses("train", cores=3.0)
    w.run(10)
    assert cores(w) == {}
    w.run(3)
    assert cores(w) == {"train": 1.5}


def test_one_in_a_new_cgroup_is_another() -> None:
    w = static(CHAT, TRAIN, L3=0.5)
    w.run(15)
    w.tenants = (CHAT, tenant("train", Level.L3, path="/system.slice/again.service"))
    w.values.clear()
    w.uses("train", cores=6.0)
    w.step()
    assert cores(w) == {}
    w.run(12)
    assert cores(w) == {"train": 3.0}


def test_without_knowing_who_is_where_nobody_is_held() -> None:
    w = static(CHAT, TRAIN, L3=0.5)
    w.run(15)
    w.says_tenants = False
    w.run(40)
    assert w.decision.settings == ()


# -- as TGS ---------------------------------------------------------------------------------------------


def tgs(*others: Tenant) -> World:
    w = World(TgsLike(CONFIG), gpus=[gpu(), gpu(OTHER, 1)], tenants=(CHAT, *others))
    w.latencies["chat"] = 0.05
    return w


def test_it_starts_at_the_floor_and_grows_by_half_while_nobody_suffers() -> None:
    w = tgs(TRAIN)
    w.run(12)
    assert w.share("train") == pytest.approx(0.2 * GROWTH)
    w.run(LOOP_SECONDS)
    assert w.share("train") == pytest.approx(0.2 * GROWTH**2)
    w.run(4 * LOOP_SECONDS)
    assert w.decision.holds == ()
    assert cores(w) == {}


def test_a_service_over_its_objective_stops_that_and_is_kept_by_small_steps() -> None:
    w = tgs(TRAIN)
    w.run(22)
    before = w.share("train")
    w.latencies["chat"] = 0.105
    w.run(LOOP_SECONDS)
    assert w.share("train") == pytest.approx(before / GROWTH)
    w.run(LOOP_SECONDS)
    assert w.share("train") == pytest.approx(before / GROWTH * (1 - CUT))
    w.latencies["chat"] = 0.102  # within the tolerance
    w.run(LOOP_SECONDS)
    assert w.share("train") == pytest.approx(before / GROWTH * (1 - CUT) + STEP)


def test_far_off_it_begins_anew() -> None:
    w = tgs(TRAIN)
    w.run(22)
    w.latencies["chat"] = 0.2
    w.run(2 * LOOP_SECONDS)
    assert w.share("train") == pytest.approx(0.2)
    w.latencies["chat"] = 0.05
    w.run(LOOP_SECONDS)
    assert w.share("train") == pytest.approx(0.2 * GROWTH)


def test_only_l3_on_the_card_of_a_service_is_held() -> None:
    w = tgs(BATCH, TRAIN, tenant("far", Level.L3, gpus=[OTHER]))
    w.run(12)
    assert {h.subject.tenant for h in w.decision.holds} == {"train"}


def test_what_is_not_known_changes_nothing() -> None:
    w = tgs(TRAIN)
    w.run(22)
    w.latencies["chat"] = 0.105
    w.run(LOOP_SECONDS)
    del w.latencies["chat"]
    w.run(60)  # by then the last report has expired
    held = w.share("train")
    w.run(60)
    assert w.share("train") == held < 1.0


def test_each_keeps_its_own_floor() -> None:
    w = tgs(TRAIN, tenant("other", Level.L3, floor=0.6))
    w.run(12)
    assert w.share("train") == pytest.approx(0.3)
    assert w.share("other") == pytest.approx(0.6)


@given(
    st.floats(0.0, 1.0),
    st.booleans(),
    st.lists(st.floats(0.0, 10.0), max_size=60),
    st.floats(0.05, 0.9),
)
def test_the_share_stays_in_its_range(
    share: float, starting: bool, offs: list[float], floor: float
) -> None:
    rate = Rate(share=share, starting=starting)
    for i, off in enumerate(offs):
        before = max(rate.share, floor)
        rate = stepped(rate, off, 5.0 * i, floor)
        assert floor <= rate.share <= 1.0
        if off > TOLERANCE:
            assert rate.share <= before
        else:
            assert rate.share >= min(before, 1.0)


def test_looking_more_often_changes_nothing() -> None:
    w = tgs(TRAIN)
    w.run(12, step=0.25)
    assert w.share("train") == pytest.approx(0.2 * GROWTH)
    w.run(LOOP_SECONDS, step=0.25)
    assert w.share("train") == pytest.approx(0.2 * GROWTH**2)
