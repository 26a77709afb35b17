"""Hours: who is held outside of his, to what, and that nobody is held within them."""

from datetime import UTC, datetime

import msgspec
import pytest

from gpuagent.config import Config
from gpuagent.decide.hours import Hours
from gpuagent.model.inventory import Level, Tenant
from gpuagent.model.plan import Setting
from gpuagent.model.vocab import CPU_MAX
from tests.decide.world import World, gpu, tenant

NIGHT = ("23:00-06:00",)
NOON = datetime(2026, 11, 30, 12, tzinfo=UTC).timestamp()
MIDNIGHT = datetime(2026, 12, 1, 0, tzinfo=UTC).timestamp()


def nightly(name: str = "train", level: Level = Level.L3, **limits: object) -> Tenant:
    made = tenant(name, level)
    return msgspec.structs.replace(
        made, hours=NIGHT, limits=msgspec.structs.replace(made.limits, **limits)
    )


def world(*tenants: Tenant, wall: float = NOON) -> World:
    w = World(Hours(Config()), gpus=[gpu()], tenants=tenants)
    w.epoch = wall - w.now
    return w


def tried(w: World) -> list[Setting]:
    return [s for s in w.decision.settings if s.blocked is None]


def test_outside_of_its_hours_it_is_held_to_its_floor() -> None:
    w = world(nightly())
    w.run(12)
    [setting] = tried(w)
    assert setting.knob is CPU_MAX
    assert setting.value == pytest.approx(0.2 * 2.0)
    assert setting.rule == "hours/off"
    assert "outside of the hours of train (23:00-06:00)" in setting.why
    assert w.share("train") == pytest.approx(0.2)
    assert w.events == ["off-hours-began"]


def test_or_to_the_share_it_may_have_then_but_not_under_its_floor() -> None:
    for share, gets in ((0.5, 0.5), (0.1, 0.2)):
        w = world(nightly(off_hours_share_ratio=share))
        w.run(12)
        assert [s.value for s in tried(w)] == [pytest.approx(gets * 2.0)]


def test_within_its_hours_nothing_is_wished_and_the_end_is_said_once() -> None:
    w = world(nightly())
    w.run(12)
    w.epoch = MIDNIGHT - w.now
    w.run(5)
    assert w.decision.settings == ()
    assert w.decision.holds == ()
    assert w.events == ["off-hours-began", "off-hours-ended"]


def test_who_has_no_hours_or_may_not_be_held_is_left_alone() -> None:
    others = (
        tenant("always"),
        msgspec.structs.replace(nightly("served"), enforce=False),
        nightly("chat", Level.L1),
        msgspec.structs.replace(nightly("sealed"), levers=("suspend",)),
        nightly("full", off_hours_share_ratio=1.0),
    )
    w = world(*others)
    w.run(12)
    assert w.decision.settings == ()
    assert w.events == []


def test_the_share_is_of_what_it_used_before_and_stays_that() -> None:
    w = world(nightly())
    w.run(12)
    wished = tried(w)[0].value
    w.answer("applied")
    w.outcomes = [
        msgspec.structs.replace(o, original=float("inf"), real=wished) for o in w.outcomes
    ]
    w.uses("train", cores=0.4)
    w.run(600)
    assert tried(w)[0].value == pytest.approx(wished)


def test_nobody_is_held_while_it_is_not_known_who_is_where() -> None:
    w = world(nightly())
    w.run(12)
    w.says_tenants = False
    w.run(40)
    assert w.decision.settings == ()
    assert w.events == ["off-hours-began"]
    w.says_tenants = True
    w.run(2)
    assert tried(w)
    assert w.events == ["off-hours-began"]


def test_of_one_that_is_only_observed_it_is_said_what_it_would_be_held_to() -> None:
    w = world(msgspec.structs.replace(nightly(), observed=("cpu_max",)))
    w.run(12)
    [setting] = w.decision.settings
    assert setting.blocked is not None
    assert setting.blocked.result == "would"
    [hold] = w.decision.holds
    assert hold.share == pytest.approx(0.2)
    assert hold.settings == (setting.key,)
    assert w.events == []
