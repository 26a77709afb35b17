"""What levers that are only observed would hold back is told as a hold, while the agent acts."""

import msgspec

from gpuagent.config import Backpressure as Law
from gpuagent.decide.shown import would_hold
from gpuagent.model.inventory import on_tenant
from gpuagent.model.plan import Hold
from gpuagent.model.state import Outcome
from tests.decide.test_rungs import GENTLE, batch, suffer, world
from tests.decide.world import World


def with_effects(w: World) -> list[Hold]:
    """The holds with what a reconciler makes of settings that are blocked: their result."""
    outcomes = {
        s.key: Outcome(s.knob, s.subject, s.value, None, None, s.blocked.result, s.blocked.why, 0.0)
        for s in w.decision.settings
        if s.blocked is not None
    }
    return [h.with_effect(outcomes) for h in w.decision.holds]


def test_a_tenant_that_is_only_observed_would_be_held_to_the_first_step() -> None:
    w = world(batch(GENTLE, observed=GENTLE))
    suffer(w, 10)
    [hold] = with_effects(w)
    assert (hold.subject, hold.share, hold.rung) == (on_tenant("train"), Law().cut, "cpu_max")
    assert (hold.cause, hold.effect, hold.in_force) == ("latency", "would", False)
    assert hold.settings


def test_who_is_held_by_another_lever_is_told_of_that_only() -> None:
    w = world(batch(("cpu_max", "suspend"), observed=("cpu_max",)))
    suffer(w, 10)
    [hold] = w.decision.holds
    assert hold.rung == "suspend"


def test_one_that_would_be_suspended_would_be_left_nothing() -> None:
    w = world(batch(("suspend",), observed=("suspend",)))
    suffer(w, 10)
    [hold] = with_effects(w)
    assert (hold.share, hold.effect) == (0.0, "would")


def test_nobody_would_be_ended_before_a_time_box_has_passed() -> None:
    w = world(batch(("terminate",), observed=("terminate",)))
    suffer(w, 25)
    assert w.decision.holds == ()
    suffer(w, 15)
    assert [h.share for h in with_effects(w)] == [0.0]


def test_what_is_refused_or_has_no_effect_would_hold_nobody() -> None:
    w = world(batch(GENTLE, observed=GENTLE))
    suffer(w, 10)
    for blocked in (None, *(s.blocked for s in w.decision.settings if s.blocked)):
        settings = [
            msgspec.structs.replace(s, blocked=blocked)
            for s in w.decision.settings
            if blocked is None or blocked.result != "would"
        ]
        assert would_hold(settings, ()) == ()
