"""A tenant's declared power cap: on cards of its own, clamped to what the card takes."""

import msgspec
import pytest

from gpuagent.config import Config
from gpuagent.decide.merge import merge
from gpuagent.decide.powercap import CAP_RULE, PowerCap
from gpuagent.model.declare import Fate
from gpuagent.model.inventory import Level, Tenant, on_gpu
from gpuagent.model.state import Outcome
from gpuagent.model.vocab import GPU_POWER_LIMIT_WATTS, POWER_LIMIT
from tests.decide.world import CARD, World, gpu, tenant


def capped(
    watts: float | None, level: Level = Level.L3, name: str = "train", *, observed: bool = False
) -> Tenant:
    made = tenant(name, level)
    return msgspec.structs.replace(
        made,
        limits=msgspec.structs.replace(made.limits, power_cap_watts=watts),
        observed=("power_limit",) if observed else (),
    )


def world(*tenants: Tenant) -> World:
    return World(PowerCap(Config()), gpus=[gpu()], tenants=tenants)


def test_it_is_the_limit_of_a_card_that_the_tenant_has_to_itself() -> None:
    w = world(capped(350))
    [setting] = w.step().settings
    assert (setting.knob, setting.subject, setting.value) == (POWER_LIMIT, on_gpu(CARD), 350)
    assert (setting.rule, setting.blocked) == (CAP_RULE, None)
    assert dict(setting.numbers)["declared_watts"] == 350
    assert [h.share for h in w.decision.holds] == [0.5]
    assert POWER_LIMIT.fates_under(CAP_RULE).stop is Fate.PUT_BACK


@pytest.mark.parametrize(("cap", "watts"), [(120, 200), (900, 700)])
def test_what_the_card_does_not_take_is_clamped_and_said(cap: float, watts: float) -> None:
    [setting] = world(capped(cap)).step().settings
    assert setting.value == watts
    assert f"{cap} W" in setting.why
    assert f"{watts} W, as the card" in setting.why


def test_an_l1_tenants_own_cap_is_allowed() -> None:
    w = world(capped(350, Level.L1))
    plan = merge(w.step().settings, w.state)
    assert [s.value for s in plan.settings] == [350]


def test_on_a_shared_card_it_is_said_why_not_and_once() -> None:
    w = world(capped(350), tenant("other"))
    w.run(20)
    [setting] = w.decision.settings
    assert setting.blocked is not None
    assert setting.blocked.result == "refused"
    assert "other would be slowed" in setting.blocked.why
    assert w.events == ["power-cap-unused"]
    assert w.decision.holds == ()
    w.tenants = w.tenants[:1]
    assert w.step().settings[0].blocked is None


def test_of_a_tenant_that_is_only_observed_it_is_only_said() -> None:
    [setting] = world(capped(350, observed=True)).step().settings
    assert setting.blocked is not None
    assert setting.blocked.result == "would"


def test_it_stays_below_what_the_operator_set_and_ends_with_its_declaration() -> None:
    w = world(capped(350))
    w.step()
    w.outcomes = [Outcome(POWER_LIMIT, on_gpu(CARD), 350, 350, 700.0, "applied", "", w.now)]
    w.card(limit=350)
    assert w.step().settings[0].value == 350
    w.tenants = (capped(None),)
    assert w.step().settings == ()


def test_nothing_is_wished_for_a_card_whose_range_is_not_known() -> None:
    w = world(capped(350))
    w.values[GPU_POWER_LIMIT_WATTS, on_gpu(CARD)] = None
    assert w.step().settings == ()
