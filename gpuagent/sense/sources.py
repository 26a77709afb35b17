"""Latencies that are read from the tenants' own pages of metrics, each at its own pace.

A tenant is asked only while it is there, one request at a time, and ever less often while it does
not answer. A failed scrape says nothing of a latency; what was known of it expires as any reading.
Where a tenant also reports by itself, the newer of the two counts (`LatencyMail.push`).
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Collection

import msgspec
import structlog

from gpuagent.clock import Clock
from gpuagent.config import Config, LatencySource, TenantRule
from gpuagent.errors import AgentError
from gpuagent.model.inventory import on_tenant
from gpuagent.model.source import SourceHealth
from gpuagent.model.state import Event
from gpuagent.ports import LatencyReport, Pages
from gpuagent.sense.exposition import Histogram, Sieve, Summary, Wanted
from gpuagent.sense.quantiles import Meter

SLOWEST_SECONDS = 30.0
"""Between two scrapes of what does not answer."""
TOLD_AFTER = 2
"""Failures in a row before one is told of: a tenant that ends is gone from the list by then."""
QUIET_SECONDS = 60.0
"""Between two changes of one source that are told: who answers now and then fills no log."""
_LEAST_PAUSE_SECONDS = 0.1
_EVENTS_KEPT = 64
_UNIT_SECONDS = {"seconds": 1.0, "milliseconds": 1e-3, "microseconds": 1e-6}

_log = structlog.get_logger()


class LatencySources:
    """A `Service`: `run` owns a task for each source. Without any it does nothing."""

    def __init__(
        self,
        *,
        pages: Pages,
        clock: Clock,
        push: Callable[[LatencyReport], None],
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`push` takes a report in; it raises an error of ours. `chance` is between 0 and 1."""
        self._pages = pages
        self._clock = clock
        self._push = push
        self._chance = chance
        self._sources: dict[str, Source] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._events: deque[Event] = deque(maxlen=_EVENTS_KEPT)
        self._group: asyncio.TaskGroup | None = None

    @property
    def health(self) -> tuple[SourceHealth, ...]:
        """Of each source, by tenant."""
        return tuple(self._sources[name].health for name in sorted(self._sources))

    def configure(self, config: Config) -> None:
        """Have these sources from now on. One that stays as it is goes on undisturbed."""
        rules = {rule.name: rule for rule in config.tenants if rule.latency_from is not None}
        for name in [n for n, s in self._sources.items() if not s.fits(rules.get(n))]:
            del self._sources[name]
            if name in self._tasks:
                self._tasks.pop(name).cancel()
        for name, rule in rules.items():
            if name not in self._sources:
                self._sources[name] = Source(rule)
                self._begin(name)

    def attend(self, tenants: Collection[str]) -> None:
        """Scrape those of these tenants, who are there now, and no others."""
        for name, source in self._sources.items():
            source.attend(present=name in tenants)

    def take_events(self) -> tuple[Event, ...]:
        """What there is to tell since the last call."""
        told = tuple(self._events)
        self._events.clear()
        return told

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                for name in self._sources:
                    self._begin(name)
                await asyncio.Event().wait()
            finally:
                self._group = None
                for task in self._tasks.values():
                    task.cancel()
                self._tasks.clear()

    def _begin(self, name: str) -> None:
        if self._group is not None:
            self._tasks[name] = self._group.create_task(self._follow(self._sources[name]))

    async def _follow(self, source: "Source") -> None:
        """Scrape as long as the source is configured; not all sources at once."""
        await self._clock.sleep(self._chance() * source.of.interval)
        while True:
            await source.present.wait()
            began = self._clock.now().mono
            await self._scrape(source, began)
            took = self._clock.now().mono - began
            await self._clock.sleep(max(source.pause - took, _LEAST_PAUSE_SECONDS))

    async def _scrape(self, source: "Source", at: float) -> None:
        sieve = Sieve(source.wanted)
        try:
            await self._pages.get(source.of.url, sieve.feed, seconds=source.of.interval)
            found = sieve.end()
            if not source.present.is_set():
                return
            report = source.measured(at, found)
            if report is not None:
                self._push(report)
        except AgentError as error:
            if not source.present.is_set():
                return
            source.failed(str(error))
        self._tell(source)

    def _tell(self, source: "Source") -> None:
        """A change, once in each direction; the first success is none."""
        now, health = self._clock.now().mono, source.health
        if not source.news(now):
            return
        if health.up:
            _log.info("latency can be read again", tenant=health.tenant, url=health.url)
            text = f"the latency of {health.tenant} can be read again from {health.url}"
        else:
            _log.warning(
                "latency cannot be read", tenant=health.tenant, url=health.url, why=health.why
            )
            text = f"the latency of {health.tenant} cannot be read from {health.url}: {health.why}"
        kind = "latency-source-up" if health.up else "latency-source-down"
        self._events.append(Event(kind, now, text, on_tenant(health.tenant), alert=not health.up))


class Source:
    """One tenant's page, and what is remembered of it."""

    def __init__(self, rule: TenantRule) -> None:
        assert rule.latency_from is not None
        self.of: LatencySource = rule.latency_from
        self._basis = _basis(rule)
        self._quantile = rule.latency_quantile
        labels = tuple(text.partition("=")[::2] for text in self.of.labels)
        self.wanted = Wanted(self.of.metric, rule.latency_quantile, labels)
        self._meter = Meter(
            quantile=rule.latency_quantile,
            unit_seconds=_UNIT_SECONDS[self.of.unit],
            window=self.of.window,
            objective=rule.latency_slo,
        )
        self.present = asyncio.Event()
        self.health = SourceHealth(rule.name, self.of.url, self.of.metric)
        self._failures = 0
        self._told: bool | None = None
        self._told_at = float("-inf")

    def fits(self, rule: TenantRule | None) -> bool:
        """Whether this is the source of such a rule."""
        return rule is not None and _basis(rule) == self._basis

    @property
    def pause(self) -> float:
        """Seconds between the last scrape and the next."""
        interval = self.of.interval
        return min(interval * 2.0**self._failures, max(interval, SLOWEST_SECONDS))

    def attend(self, *, present: bool) -> None:
        if present is self.present.is_set():
            return
        if present:
            self.present.set()
            return
        self.present.clear()
        self._meter.begin()
        self._failures, self._told = 0, None
        self.health = msgspec.structs.replace(self.health, up=None, why="")

    def measured(self, at: float, found: Histogram | Summary) -> LatencyReport | None:
        """Take in a page; what it says of the latency, if anything."""
        said = self._meter.after(at, found)
        self._failures = 0
        self.health = msgspec.structs.replace(self.health, up=True, why=said.why, last_success=at)
        if said.seconds is None:
            return None
        return LatencyReport(self.health.tenant, self._quantile, said.seconds, at, said.exact)

    def failed(self, why: str) -> None:
        self._failures = min(self._failures + 1, 16)
        self.health = msgspec.structs.replace(self.health, up=False, why=why)

    def news(self, now: float) -> bool:
        """Whether there is a change to be told now; it counts as told."""
        up = bool(self.health.up)
        if up is self._told or (not up and self._failures < TOLD_AFTER):
            return False
        if self._told is not None and now - self._told_at < QUIET_SECONDS:
            return False
        first_success = up and self._told is None
        self._told = up
        if first_success:
            return False
        self._told_at = now
        return True


def _basis(rule: TenantRule) -> tuple[object, ...]:
    return (rule.latency_from, rule.latency_quantile, rule.latency_slo)


async def trouble(rule: TenantRule, pages: Pages) -> str:
    """Why a rule's latency cannot be read now; empty where it can."""
    source = Source(rule)
    sieve = Sieve(source.wanted)
    try:
        await pages.get(source.of.url, sieve.feed, seconds=source.of.interval)
        sieve.end()
    except AgentError as error:
        return str(error)
    return ""
