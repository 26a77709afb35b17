"""Latencies on their way in: a bounded mailbox, and the sensor that empties it."""

import contextlib
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuagent.config import Backpressure, Config, Match, TenantRule
from gpuagent.errors import Refused
from gpuagent.model.inventory import Inventory, Level, Tenant, on_tenant
from gpuagent.model.state import Instant, NodeState
from gpuagent.model.vocab import TENANT_LATENCY_SECONDS
from gpuagent.ports import Latencies, LatencyReport, Sensor
from gpuagent.sense.latency import ServiceLatency
from gpuagent.sense.mail import (
    KEPT_SECONDS,
    MOST_QUANTILES,
    MOST_TENANTS,
    WAKES_PER_SECOND,
    LatencyMail,
    marks,
)

NOW = Instant(100.0, 1e9)


def said(
    tenant: str = "chat", seconds: float = 0.1, *, quantile: float = 0.99, at: float = 99.0
) -> LatencyReport:
    return LatencyReport(tenant, quantile, seconds, at)


class Fixed:
    def __init__(self, *reports: LatencyReport) -> None:
        self._reports = reports

    def take(self) -> Sequence[LatencyReport]:
        return self._reports


def state(*tenants: str, known: bool = True) -> NodeState:
    there = tuple(Tenant(name, Level.L1) for name in tenants)
    return NodeState(NOW, inventory=Inventory(tenants=there if known else None))


# -- the sensor ------------------------------------------------------------------------------------


async def test_a_report_becomes_a_reading_of_its_tenant() -> None:
    sensor: Sensor = ServiceLatency(Fixed(said(), said(quantile=0.5, seconds=0.02)))
    readings = (await sensor.read(NOW, state("chat"))).readings
    assert {(r.signal, r.subject, r.value, r.at, r.dims) for r in readings} == {
        (TENANT_LATENCY_SECONDS, on_tenant("chat"), 0.1, 99.0, ("0.99",)),
        (TENANT_LATENCY_SECONDS, on_tenant("chat"), 0.02, 99.0, ("0.5",)),
    }


async def test_nothing_is_believed_of_those_who_are_not_there() -> None:
    sensor = ServiceLatency(Fixed(said("chat"), said("ghost")))
    found = (await sensor.read(NOW, state("chat"))).readings
    assert [r.subject.tenant for r in found] == ["chat"]
    assert (await sensor.read(NOW, state(known=False))).readings == ()


async def test_a_measurement_of_the_future_is_one_of_now() -> None:
    [reading] = (await ServiceLatency(Fixed(said(at=1e9))).read(NOW, state("chat"))).readings
    assert reading.at == NOW.mono


# -- the mailbox -----------------------------------------------------------------------------------


def test_the_newest_of_each_tenant_and_quantile_is_told_once() -> None:
    mail = LatencyMail()
    box: Latencies = mail
    for report in (
        said(seconds=0.1, at=1.0),
        said(seconds=0.3, at=3.0),
        said(seconds=0.2, at=2.0),
        said(seconds=0.05, quantile=0.5, at=1.0),
        said("other", at=1.0),
    ):
        mail.push(report)
    assert {(r.tenant, r.quantile, r.seconds) for r in box.take()} == {
        ("chat", 0.99, 0.3),
        ("chat", 0.5, 0.05),
        ("other", 0.99, 0.1),
    }
    assert list(box.take()) == []
    mail.push(said(seconds=0.2, at=2.5))
    assert list(box.take()) == [], "older than what was told already"


@pytest.mark.parametrize("bad", [0.0, -0.1, math.inf, -math.inf, math.nan])
def test_what_is_no_latency_is_refused(bad: float) -> None:
    mail = LatencyMail()
    with pytest.raises(Refused, match="is not a latency"):
        mail.push(said(seconds=bad))
    assert mail.take() == ()


@pytest.mark.parametrize("bad", [0.0, 1.0, 99.0, -0.5, math.inf, math.nan])
def test_what_is_no_quantile_is_refused(bad: float) -> None:
    with pytest.raises(Refused, match="is not a quantile"):
        LatencyMail().push(said(quantile=bad))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_no_time_is_refused(bad: float) -> None:
    with pytest.raises(Refused, match="is not a time"):
        LatencyMail().push(said(at=bad))


def test_tenants_are_bounded_and_one_that_falls_silent_makes_room() -> None:
    mail = LatencyMail()
    for number in range(MOST_TENANTS):
        mail.push(said(f"t{number}", at=100.0 + number))
    with pytest.raises(Refused, match="256 tenants"):
        mail.push(said("late", at=100.0 + KEPT_SECONDS))
    mail.push(said("t3", at=200.0))
    mail.push(said("late", at=101.5 + KEPT_SECONDS))
    names = {r.tenant for r in mail.take()}
    assert "late" in names
    assert names.isdisjoint({"t0", "t1"}), "silent for too long, and never told"
    assert len(names) == MOST_TENANTS - 1


def test_quantiles_of_a_tenant_are_bounded_also_over_time() -> None:
    mail = LatencyMail()
    for number in range(MOST_QUANTILES):
        mail.push(said(quantile=0.1 + number / 10, at=10.0))
        mail.take()
    with pytest.raises(Refused, match="4 quantiles of chat"):
        mail.push(said(quantile=0.99, at=50.0))
    mail.push(said(quantile=0.1, at=50.0))
    mail.push(said("other", quantile=0.99, at=50.0))
    mail.push(said(quantile=0.99, at=11.0 + KEPT_SECONDS))
    assert {(r.tenant, r.quantile) for r in mail.take()} == {
        ("chat", 0.1),
        ("other", 0.99),
        ("chat", 0.99),
    }


def test_a_value_that_rises_over_its_mark_wakes_the_loop_once() -> None:
    woken: list[str] = []
    mail = LatencyMail(woken.append)
    mail.watch({("chat", 0.99): 0.09})
    told = ((0.05, 0), (0.2, 1), (0.3, 1), (0.08, 1), (0.09, 2), (0.1, 2))
    for at, (seconds, times) in enumerate(told):
        mail.push(said(seconds=seconds, at=float(at)))
        assert len(woken) == times
    for other in (said("batch", 9.0, at=50.0), said(seconds=9.0, quantile=0.5, at=50.0)):
        mail.push(other)
    mail.push(said(seconds=0.01, at=2.0))
    mail.push(said(seconds=0.2, at=51.0))
    assert len(woken) == 2, "others have no mark, and an old report says nothing of now"
    mail.watch({})
    mail.watch({("chat", 0.99): 0.09})
    mail.push(said(seconds=0.2, at=60.0))
    assert len(woken) == 3


def test_who_swings_around_his_mark_wakes_the_loop_once_a_second() -> None:
    woken: list[str] = []
    mail = LatencyMail(woken.append)
    mail.watch({("chat", 0.99): 0.09})
    for number in range(100):
        mail.push(said(seconds=0.2 if number % 2 else 0.01, at=100.0 + number / 10))
    assert len(woken) == 10


def test_a_rise_that_found_no_wake_is_not_forgotten() -> None:
    woken: list[str] = []
    mail = LatencyMail(woken.append)
    mail.watch({("chat", 0.99): 0.09})
    for at, seconds in ((1.0, 0.2), (1.1, 0.01), (1.2, 0.2), (2.1, 0.2)):
        mail.push(said(seconds=seconds, at=at))
    assert len(woken) == 2


def test_all_together_wake_the_loop_so_many_times_a_second() -> None:
    woken: list[str] = []
    mail = LatencyMail(woken.append)
    names = [f"t{n}" for n in range(50)]
    mail.watch({(n, 0.99): 0.09 for n in names})
    for name in names:
        mail.push(said(name, seconds=1.0, at=5.0))
    assert len(woken) == WAKES_PER_SECOND


def test_who_is_to_be_protected_has_room_whatever_others_fill() -> None:
    mail = LatencyMail()
    mail.watch({("chat", 0.99): 0.09})
    for number in range(MOST_TENANTS):
        mail.push(said(f"t{number}", at=100.0))
    mail.push(said("chat", at=100.0))
    assert "chat" in {r.tenant for r in mail.take()}
    for number in range(MOST_QUANTILES - 1):
        mail.push(said("chat", quantile=0.1 + number / 10, at=101.0))
    with pytest.raises(Refused, match="4 quantiles of chat"):
        mail.push(said("chat", quantile=0.6, at=101.0))
    mail.push(said("chat", at=102.0))


REPORTS = st.builds(
    LatencyReport,
    tenant=st.sampled_from(["a", "b", "c"]) | st.text(max_size=3),
    quantile=st.floats() | st.sampled_from([0.5, 0.9, 0.99]),
    seconds=st.floats(),
    at=st.floats() | st.floats(0, 1000),
)


@settings(max_examples=60)
@given(st.lists(REPORTS | st.none(), max_size=80))
def test_whatever_is_pushed_only_latencies_come_out_and_never_many(
    reports: list[LatencyReport | None],
) -> None:
    mail = LatencyMail()
    mail.watch({("a", 0.99): 0.1})
    for report in reports:
        if report is not None:
            with contextlib.suppress(Refused):
                mail.push(report)
            continue
        told = mail.take()
        assert len({(r.tenant, r.quantile) for r in told}) == len(told)
        for tenant in {r.tenant for r in told}:
            assert sum(r.tenant == tenant for r in told) <= MOST_QUANTILES
        assert all(0 < r.quantile < 1 and 0 < r.seconds < math.inf for r in told)


# -- the marks -------------------------------------------------------------------------------------


def test_the_marks_are_those_of_protected_tenants() -> None:
    rules = (
        TenantRule("chat", Level.L1, Match(unit="a"), latency_slo=0.2, latency_quantile=0.9),
        TenantRule("plain", Level.L1, Match(unit="b")),
        TenantRule("batch", Level.L2, Match(unit="c"), latency_slo=0.2),
    )
    config = Config(backpressure=Backpressure(latency_high=0.8), tenants=rules)
    assert marks(config) == {("chat", 0.9): pytest.approx(0.16)}
