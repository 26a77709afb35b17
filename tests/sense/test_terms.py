"""What holds for a tenant: its rule, else its level, else the host's own terms."""

import pytest

from gpuagent.config import (
    Config,
    Enforce,
    Found,
    LevelRule,
    Levels,
    Match,
    TenantRule,
)
from gpuagent.model.inventory import LEVERS, Level, Notice
from gpuagent.sense.terms import Terms

LEVELS = Levels(
    L3=LevelRule(hours=("23:00-06:00",), off_hours_share=0.4, memory_reserved=7),
)


def rule(**fields: object) -> TenantRule:
    return TenantRule(name="t", match=Match(unit="t.service"), **({"sla": Level.L3} | fields))  # type: ignore[arg-type]


def test_a_rule_that_says_nothing_has_what_its_level_has() -> None:
    bond = Terms(levels=LEVELS).bind(rule())
    assert bond.hours == ("23:00-06:00",)
    assert bond.limits.off_hours_share_ratio == 0.4
    assert bond.limits.memory_reserved_bytes == 7
    assert bond.levers == LEVERS
    assert bond.observed == ()
    assert bond.holds


def test_a_rule_comes_before_its_level() -> None:
    own = rule(hours=(), off_hours_share=0.9, memory_reserved=9, levers=("freeze",))
    bond = Terms(levels=LEVELS).bind(own)
    assert bond.hours == ()
    assert (bond.limits.off_hours_share_ratio, bond.limits.memory_reserved_bytes) == (0.9, 9)
    assert bond.levers == ("freeze",)


def test_who_was_found_has_what_its_level_has_and_can_lose_no_work() -> None:
    bond = Terms(Found(hold_back=True), LEVELS).bind(None)
    assert (bond.level, bond.holds) == (Level.L3, True)
    assert bond.hours == ("23:00-06:00",)
    assert bond.levers == LEVERS
    assert not {"freeze", "suspend", "terminate"} & {*bond.levers}
    assert not bond.notice


def test_l1_is_never_held_whatever_is_said() -> None:
    assert not Terms(Found(Level.L1, hold_back=True)).bind(None).holds
    assert not Terms().bind(rule(sla=Level.L1, hold_back=True)).holds


@pytest.mark.parametrize(
    ("enforce", "observe", "observed"),
    [
        (Enforce(), False, ()),
        (Enforce(("cpu_max",)), False, ("cpu_weight",)),
        (Enforce(()), False, ("cpu_weight", "cpu_max")),
        (Enforce(), True, ("cpu_weight", "cpu_max")),
    ],
)
def test_what_is_only_observed(
    enforce: Enforce, observed: tuple[str, ...], *, observe: bool
) -> None:
    bond = Terms(enforce=enforce).bind(rule(levers=("cpu_weight", "cpu_max"), observe=observe))
    assert bond.levers == ("cpu_weight", "cpu_max")
    assert bond.observed == observed


def test_the_notice_is_as_the_rule_says() -> None:
    bond = Terms().bind(rule(notice_signal="SIGUSR1", notice_command=("/bin/true",)))
    assert bond.notice == Notice("SIGUSR1", ("/bin/true",))


def test_the_configuration_has_all_of_it() -> None:
    config = Config(levels=LEVELS, found=Found(Level.L2), enforce=Enforce(("mps",)))
    assert Terms.of(config) == Terms(config.found, config.levels, config.enforce)
