"""When which tenant's page is asked, what comes of it, and what is told of one that fails."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuagent.config import Config, LatencySource, Match, TenantRule
from gpuagent.errors import AgentError, Refused, Unavailable
from gpuagent.host.pages import HttpPages
from gpuagent.model.inventory import Inventory, Level, Tenant, on_tenant
from gpuagent.model.state import Instant, NodeState, Sensed
from gpuagent.model.vocab import TENANT_LATENCY_SECONDS, TENANT_LATENCY_SOURCE_UP
from gpuagent.ports import LatencyReport, Pages, Sensor, Service, TakePiece
from gpuagent.sense.latency import ServiceLatency, SourceStates
from gpuagent.sense.mail import LatencyMail, marks
from gpuagent.sense.sources import (
    QUIET_SECONDS,
    SLOWEST_SECONDS,
    LatencySources,
    trouble,
)
from gpuagent.sim.clock import VirtualClock
from tests.host.test_pages import application
from tests.sense.pages import triton, vllm

E2E = "vllm:e2e_request_latency_seconds"
CHAT = "http://127.0.0.1:8000/metrics"


def rule(name: str = "chat", url: str = CHAT, **source: Any) -> TenantRule:
    values: dict[str, Any] = {"url": url, "metric": E2E, "interval": 2.0, "window": 30.0, **source}
    return TenantRule(
        name,
        Level.L1,
        Match(unit=f"{name}.service"),
        latency_slo=1.0,
        latency_from=LatencySource(**values),
    )


class FakePages:
    """Pages as the test has them now, by url; one that is not there refuses."""

    def __init__(self) -> None:
        self.pages: dict[str, str | AgentError] = {}
        self.asked: list[str] = []
        self.gate: asyncio.Event | None = None
        self.open = 0
        self.most_open = 0

    async def get(self, url: str, take: TakePiece, *, seconds: float) -> None:
        self.asked.append(url)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            if self.gate is not None:
                await self.gate.wait()
        finally:
            self.open -= 1
        page = self.pages.get(url, Unavailable("cannot be reached: Connection refused"))
        if isinstance(page, AgentError):
            raise page
        take(page.encode())


class Stand:
    """Sources that run, by a clock of the test's."""

    def __init__(self, *rules: TenantRule) -> None:
        self.clock = VirtualClock()
        self.pages = FakePages()
        self.woken: list[str] = []
        self.mail = LatencyMail(self.woken.append)
        self.sources = LatencySources(
            pages=self.pages, clock=self.clock, push=self.mail.push, chance=lambda: 0.5
        )
        self.config = Config(tenants=rules)
        self.sources.configure(self.config)
        self.sensor = SourceStates(self.sources)
        self.sensed: list[Sensed] = []
        self.present: set[str] | None = {r.name for r in rules}

    async def sense(self) -> None:
        there = None
        if self.present is not None:
            there = tuple(Tenant(name, Level.L1) for name in sorted(self.present))
        state = NodeState(self.clock.now(), inventory=Inventory(tenants=there))
        self.sensed.append(await self.sensor.read(self.clock.now(), state))

    async def turns(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def go_on(self, seconds: float, *, step: float = 0.5) -> None:
        """Time passes, and the sensor is read every second."""
        end = self.clock.mono + seconds
        while self.clock.mono < end - 1e-9:
            if (self.clock.mono * 2) % 2 == 0:
                await self.sense()
            self.clock.advance_to(self.clock.mono + step)
            await self.turns()

    def told(self) -> list[str]:
        return [e.kind for s in self.sensed for e in s.events]

    def up(self, name: str = "chat") -> bool | None:
        return next(h.up for h in self.sources.health if h.tenant == name)

    def why(self, name: str = "chat") -> str:
        return next(h.why for h in self.sources.health if h.tenant == name)


@contextlib.asynccontextmanager
async def running(*rules: TenantRule) -> AsyncIterator[Stand]:
    stand = Stand(*rules)
    task = asyncio.ensure_future(stand.sources.run())
    await stand.turns()
    try:
        yield stand
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


_fits: tuple[Pages, Sensor, Service] = (
    FakePages(),
    SourceStates(None),
    LatencySources(pages=FakePages(), clock=VirtualClock(), push=print),
)


# -- what comes of a page ----------------------------------------------------------------------------


async def test_a_histogram_becomes_an_estimate_from_the_second_scrape_on() -> None:
    async with running(rule()) as stand:
        stand.pages.pages[CHAT] = vllm([9.0])
        await stand.go_on(2.0)
        assert stand.mail.take() == ()
        assert stand.up() is True
        assert stand.why() == "p99 is counted since this scrape only"
        stand.pages.pages[CHAT] = vllm([9.0, 0.4])
        asked = stand.clock.mono + 1.0
        await stand.go_on(2.0)
        [report] = stand.mail.take()
        assert report.seconds == pytest.approx(0.498)
        assert report == LatencyReport("chat", 0.99, report.seconds, asked, exact=False)
        assert stand.why() == ""


async def test_a_summary_is_taken_as_the_service_says_it() -> None:
    source = rule(
        metric="nv_inference_request_summary_us", unit="microseconds", labels=("model=a",)
    )
    async with running(source) as stand:
        stand.pages.pages[CHAT] = triton({"a": 5200.0, "b": 9e9})
        await stand.go_on(2.0)
        [report] = stand.mail.take()
        assert report.seconds == pytest.approx(0.0052)
        assert report.exact
        stand.pages.pages[CHAT] = triton({"a": float("nan"), "b": 9e9})
        await stand.go_on(2.0)
        assert stand.mail.take() == ()
        assert stand.up() is True
        assert stand.why() == "p99 is not known: no request within 30 s"


async def test_a_value_over_its_mark_wakes_the_loop() -> None:
    async with running(rule()) as stand:
        stand.mail.watch(marks(stand.config))
        stand.pages.pages[CHAT] = vllm()
        await stand.go_on(2.0)
        stand.pages.pages[CHAT] = vllm([5.0])
        await stand.go_on(2.0)
        assert stand.woken == ["a latency has risen over its mark"]


async def test_what_the_tenant_reports_itself_and_what_is_read_the_newer_counts() -> None:
    async with running(rule()) as stand:
        stand.pages.pages[CHAT] = vllm()
        await stand.go_on(2.0)
        stand.pages.pages[CHAT] = vllm([0.4])
        await stand.go_on(2.0)
        read_at = stand.clock.mono - 1.0
        stand.mail.push(LatencyReport("chat", 0.99, 0.7, read_at - 0.1))
        assert [r.seconds for r in stand.mail.take()] == [pytest.approx(0.498)]
        stand.mail.push(LatencyReport("chat", 0.99, 0.8, read_at + 0.1))
        assert [r.seconds for r in stand.mail.take()] == [0.8]
        await stand.go_on(2.0)
        assert [r.seconds for r in stand.mail.take()] == [pytest.approx(0.498)]


async def test_the_reading_says_that_it_is_an_estimate() -> None:
    mail = LatencyMail()
    mail.push(LatencyReport("chat", 0.99, 0.2, 1.0, exact=False))
    mail.push(LatencyReport("chat", 0.5, 0.1, 1.0))
    state = NodeState(Instant(2.0, 0.0), inventory=Inventory(tenants=(Tenant("chat", Level.L1),)))
    found = (await ServiceLatency(mail).read(state.now, state)).readings
    assert {(r.signal, r.dims, r.exact) for r in found} == {
        (TENANT_LATENCY_SECONDS, ("0.99",), False),
        (TENANT_LATENCY_SECONDS, ("0.5",), True),
    }


# -- when it is asked --------------------------------------------------------------------------------


async def test_it_is_asked_at_its_interval_and_not_at_once() -> None:
    async with running(rule(interval=4.0)) as stand:
        stand.pages.pages[CHAT] = vllm()
        await stand.go_on(1.5)
        assert stand.pages.asked == []
        await stand.go_on(18.5)
        assert len(stand.pages.asked) == 5


async def test_a_tenant_that_is_not_there_is_not_asked() -> None:
    async with running(rule()) as stand:
        stand.present = None
        await stand.go_on(10.0)
        stand.present = {"other"}
        await stand.go_on(10.0)
        assert stand.pages.asked == []
        assert stand.up() is None
        assert stand.sensed[-1].readings == ()
        stand.present = {"chat"}
        stand.pages.pages[CHAT] = vllm([0.4])
        await stand.go_on(10.0)
        assert len(stand.pages.asked) == 5
        stand.present = None  # not known for a moment, which changes nothing
        await stand.go_on(4.0)
        assert len(stand.pages.asked) == 7


async def test_one_that_comes_back_is_another_process_whose_counts_begin_anew() -> None:
    async with running(rule()) as stand:
        stand.pages.pages[CHAT] = vllm([0.4])
        await stand.go_on(4.0)
        stand.present = set()
        await stand.go_on(2.0)
        stand.present = {"chat"}
        stand.pages.pages[CHAT] = vllm([0.4, 5.0])
        await stand.go_on(2.0)
        assert stand.mail.take() == ()
        assert stand.why() == "p99 is counted since this scrape only"


async def test_one_request_at_a_time_and_none_waits_for_another_source() -> None:
    async with running(rule(), rule("other", "http://other/")) as stand:
        stand.pages.pages = {CHAT: vllm(), "http://other/": vllm()}
        stand.pages.gate = asyncio.Event()
        await stand.go_on(20.0)
        assert sorted(stand.pages.asked) == [CHAT, "http://other/"]
        assert stand.pages.most_open == 2
        stand.pages.gate.set()
        await stand.go_on(6.0)
        assert len(stand.pages.asked) > 4


async def test_a_tenant_that_left_while_it_was_asked_leaves_nothing() -> None:
    async with running(rule()) as stand:
        stand.pages.gate = asyncio.Event()
        await stand.go_on(2.0)
        assert stand.pages.open == 1
        stand.present = set()
        await stand.sense()
        stand.pages.gate.set()
        await stand.turns()
        assert stand.up() is None
        assert stand.told() == []


async def test_what_does_not_answer_is_asked_ever_less_often_and_at_once_at_its_pace_again() -> (
    None
):
    async with running(rule()) as stand:
        await stand.go_on(1200.0)
        assert 1200 / SLOWEST_SECONDS <= len(stand.pages.asked) <= 1200 / SLOWEST_SECONDS + 6
        stand.pages.pages[CHAT] = vllm()
        await stand.go_on(SLOWEST_SECONDS)
        before = len(stand.pages.asked)
        await stand.go_on(10.0)
        assert len(stand.pages.asked) - before == 5


# -- what is told ------------------------------------------------------------------------------------


async def test_a_failure_is_told_once_in_each_direction() -> None:
    async with running(rule()) as stand:
        stand.pages.pages[CHAT] = vllm()
        await stand.go_on(10.0)
        assert stand.told() == []
        del stand.pages.pages[CHAT]
        await stand.go_on(300.0)
        assert stand.told() == ["latency-source-down"]
        [event] = [e for s in stand.sensed for e in s.events]
        assert event.alert
        assert event.subject == on_tenant("chat")
        assert event.text == (
            f"the latency of chat cannot be read from {CHAT}: cannot be reached: Connection refused"
        )
        stand.pages.pages[CHAT] = vllm()
        await stand.go_on(60.0)
        assert stand.told() == ["latency-source-down", "latency-source-up"]


async def test_a_failure_soon_after_the_first_success_is_told_without_delay() -> None:
    async with running(rule()) as stand:
        stand.pages.pages[CHAT] = vllm()
        await stand.go_on(10.0)
        del stand.pages.pages[CHAT]
        await stand.go_on(20.0)
        assert stand.told() == ["latency-source-down"]


async def test_a_single_failure_is_health_and_no_news() -> None:
    async with running(rule()) as stand:
        stand.pages.pages[CHAT] = vllm()
        await stand.go_on(10.0)
        stand.pages.pages[CHAT] = Unavailable("no whole answer within 2 s")
        await stand.go_on(2.0)
        assert stand.up() is False
        stand.pages.pages[CHAT] = vllm()
        await stand.go_on(10.0)
        assert stand.up() is True
        assert stand.told() == []


async def test_who_answers_now_and_then_is_told_of_once_a_minute() -> None:
    async with running(rule()) as stand:
        for _ in range(60):
            stand.pages.pages.pop(CHAT, None)
            await stand.go_on(8.0)
            stand.pages.pages[CHAT] = vllm()
            await stand.go_on(8.0)
        assert 2 <= len(stand.told()) <= 60 * 16 / QUIET_SECONDS + 1


async def test_health_is_a_reading_of_those_that_were_asked() -> None:
    async with running(rule(), rule("other", "http://other/")) as stand:
        stand.pages.pages[CHAT] = vllm()
        await stand.go_on(6.0)
        stand.present = {"chat"}
        await stand.sense()
        await stand.sense()
        last = stand.sensed[-1]
        assert {(r.signal, r.subject, r.value) for r in last.readings} == {
            (TENANT_LATENCY_SOURCE_UP, on_tenant("chat"), 1.0)
        }
        assert last.sources == stand.sources.health
        assert [(h.tenant, h.up) for h in stand.sources.health] == [("chat", True), ("other", None)]


async def test_a_page_without_the_metric_and_a_latency_that_is_none_are_down_with_the_reason() -> (
    None
):
    async with running(rule()) as stand:
        stand.pages.pages[CHAT] = "<html></html>"
        await stand.go_on(2.0)
        assert stand.why() == f"the page has no metric {E2E}; look there for what it is called"
        stand.pages.pages[CHAT] = f'{E2E}{{quantile="0.99"}} -4\n'
        await stand.go_on(8.0)
        assert stand.why().startswith("-4.0 is not a latency")
        assert stand.mail.take() == ()
        assert await trouble(rule(), stand.pages) == ""
        stand.pages.pages[CHAT] = Refused("answers 404")
        assert await trouble(rule(), stand.pages) == "answers 404"


# -- another configuration ---------------------------------------------------------------------------


async def test_a_reload_leaves_what_stays_and_begins_what_is_new() -> None:
    async with running(rule(), rule("other", "http://other/")) as stand:
        stand.pages.pages = {CHAT: vllm(), "http://other/": vllm(), "http://new/": vllm()}
        await stand.go_on(4.0)
        stand.sources.configure(Config(tenants=(rule(), rule("new", "http://new/"))))
        stand.present = {"chat", "new", "other"}
        stand.pages.asked.clear()
        stand.pages.pages[CHAT] = vllm([0.4])
        await stand.go_on(4.0)
        assert set(stand.pages.asked) == {CHAT, "http://new/"}
        assert [r.tenant for r in stand.mail.take()] == ["chat"], "its window was not begun anew"
        stand.sources.configure(
            Config(
                tenants=(rule(window=60.0), TenantRule("new", Level.L1, Match(unit="new.service")))
            )
        )
        stand.pages.asked.clear()
        await stand.go_on(4.0)
        assert set(stand.pages.asked) == {CHAT}
        assert stand.why() == "p99 is not known: no request within 60 s"
        stand.sources.configure(Config())
        assert stand.sources.health == ()
        stand.pages.asked.clear()
        await stand.go_on(10.0)
        assert stand.pages.asked == []


async def test_a_source_that_is_being_asked_can_be_taken_away() -> None:
    async with running(rule()) as stand:
        stand.pages.gate = asyncio.Event()
        await stand.go_on(2.0)
        stand.sources.configure(Config())
        await stand.turns()
        assert stand.pages.open == 0
        assert stand.sources.health == ()


async def test_without_sources_nothing_is_said() -> None:
    sensed = await SourceStates(None).read(Instant(0.0, 0.0), NodeState(Instant(0.0, 0.0)))
    assert sensed == Sensed()
    async with running() as stand:
        await stand.go_on(5.0)
        assert stand.sensed[-1] == Sensed(sources=())


# -- over a real socket ------------------------------------------------------------------------------


async def test_a_service_that_restarts_over_a_real_socket() -> None:
    """From requests to a report: the counters fall, and what came since then counts."""
    from aiohttp import web

    seen: list[float] = []

    async def handler(_request: web.Request) -> web.StreamResponse:
        answer = web.Response(text=vllm(seen))
        answer.enable_compression()
        return answer

    async with application(handler) as url:
        stand = Stand(rule(url=url))
        pages = HttpPages()
        stand.sources._pages = pages
        source = stand.sources._sources["chat"]
        source.attend(present=True)
        for at, now in enumerate(([9.0] * 5, [9.0] * 5 + [0.4], [0.2, 0.2])):
            seen[:] = now
            await stand.sources._scrape(source, 2.0 * at)
        assert stand.up() is True
        [report] = stand.mail.take()
        assert report.at == 4.0
        assert 0.3 < report.seconds <= 0.5, "the one of before and the two since"
        await pages.close()


# -- anything ----------------------------------------------------------------------------------------

STEPS = st.lists(
    st.sampled_from(["fine", "more", "fell", "nan", "empty", "garbage", "refused", "gone", "back"]),
    max_size=40,
)


@settings(max_examples=40, deadline=None)
@given(STEPS)
async def test_whatever_the_page_does_only_latencies_come_out_and_little_is_told(
    steps: list[str],
) -> None:
    async with running(rule(window=8.0)) as stand:
        seconds = [0.4]
        for step in steps:
            match step:
                case "more":
                    seconds.append(2.2)
                case "fell":
                    seconds = [0.1]
                case "gone":
                    stand.present = set()
                case "back":
                    stand.present = {"chat"}
            stand.pages.pages[CHAT] = {
                "empty": "",
                "nan": f'{E2E}_bucket{{le="1"}} NaN\n',
                "garbage": f'{E2E}_bucket{{le="\x00',
            }.get(step, vllm(seconds))
            if step == "refused":
                stand.pages.pages[CHAT] = Refused("answers 500")
            await stand.go_on(4.0)
            for report in stand.mail.take():
                assert 0 < report.seconds <= 2.5
                assert not report.exact
            assert (stand.up() is None) <= (stand.why() == "")
        changes = [k for k in stand.told() if k.startswith("latency-source")]
        assert len(changes) <= 2 + 4 * len(steps) / QUIET_SECONDS + steps.count("gone")


def test_a_source_is_the_same_while_nothing_that_it_depends_on_changes() -> None:
    sources = LatencySources(pages=FakePages(), clock=VirtualClock(), push=print)
    one = rule()
    sources.configure(Config(tenants=(one,)))
    same = sources._sources["chat"]
    sources.configure(Config(tenants=(msgspec.structs.replace(one, min_share=0.5),)))
    assert sources._sources["chat"] is same
    sources.configure(Config(tenants=(msgspec.structs.replace(one, latency_quantile=0.9),)))
    assert sources._sources["chat"] is not same
