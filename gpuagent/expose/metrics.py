"""/metrics: the snapshot in the words of Prometheus, rendered in a thread, once for each snapshot.

A declared signal or knob is its own registration. A series vanishes when its reading expires. An
estimate has a second series, `gpuagent_reading_estimated`, with the same labels: a label on the
series itself would cut its history in two each time that an estimate becomes exact.
"""

import asyncio
import gzip
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from gpuagent.expose.picture import wire
from gpuagent.model.inventory import Inventory, Subject
from gpuagent.model.plan import Snapshot
from gpuagent.model.state import RESULTS
from gpuagent.model.vocab import KNOBS, SIGNALS, On, Signal

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_PREFIX = "gpuagent_"
_FAST_GZIP = 1

Labels = dict[str, str]


class Exposition:
    """The text of /metrics. Renders each snapshot at most once, and never on the loop's thread."""

    def __init__(self, version: str) -> None:
        self._version = version
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="metrics")
        self._one_at_a_time = asyncio.Lock()
        self._of: Snapshot | None = None
        self._plain = b""
        self._zipped = b""

    async def text(self, snapshot: Snapshot, *, zipped: bool = False) -> bytes:
        """The exposition of `snapshot` in format 0.0.4, gzipped on request."""
        async with self._one_at_a_time:
            if self._of is not snapshot:
                self._plain = await self._run(lambda: render(snapshot, self._version))
                self._zipped = b""
                self._of = snapshot
            if zipped and not self._zipped:
                self._zipped = await self._run(lambda: gzip.compress(self._plain, _FAST_GZIP))
            return self._zipped if zipped else self._plain

    async def _run(self, work: Callable[[], bytes]) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """End the thread once it is done with what it is at."""
        self._thread.shutdown(wait=False)


def render(snapshot: Snapshot, version: str) -> bytes:
    """The exposition of `snapshot`, and the agent's own CPU time, memory and open files."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SnapshotCollector(snapshot, version))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class Family:
    """One metric and its series. A series given twice keeps the later value."""

    def __init__(self, name: str, text: str, kind: str = "gauge") -> None:
        self._name = _PREFIX + name
        self._text = text
        self._kind = kind
        self._series: dict[tuple[str, ...], tuple[Labels, float]] = {}

    def add(self, labels: Labels, value: float) -> None:
        self._series[tuple(labels.values())] = (labels, value)

    def metric(self) -> Metric:
        # prometheus_client wants a counter's name without the suffix, its samples' with it.
        name = self._name.removesuffix("_total") if self._kind == "counter" else self._name
        metric = Metric(name, self._text, self._kind)
        metric.samples = [
            Sample(self._name, labels, value) for labels, value in self._series.values()
        ]
        return metric

    def __bool__(self) -> bool:
        return bool(self._series)


class SnapshotCollector(Collector):
    """All families of one snapshot, which no one changes while they are read."""

    def __init__(self, snapshot: Snapshot, version: str) -> None:
        self._snapshot = snapshot
        self._version = version
        self._names = Names(snapshot.state.inventory)

    def collect(self) -> Iterator[Metric]:
        for family in (
            *self._signals(),
            *self._knobs(),
            *self._decisions(),
            *self._agent(),
            *self._sensors(),
        ):
            if family:
                yield family.metric()

    def _signals(self) -> Iterable[Family]:
        families = {s: Family(s.name, s.help, s.kind) for s in SIGNALS}
        estimated = Family(
            "reading_estimated",
            "1 for each series of a signal whose value is an estimate; its labels are the series' own.",
        )
        for reading in self._snapshot.state.live():
            signal = reading.signal
            labels = self._names.of_reading(signal, reading.subject, reading.dims)
            families[signal].add(labels, reading.value)
            if not reading.exact:
                estimated.add({"signal": signal.name, **labels}, 1)
        return (*families.values(), estimated)

    def _knobs(self) -> Iterable[Family]:
        wanted = {k: Family(k.wanted_name, f"Wanted by the agent: {k.help}") for k in KNOBS}
        outcome = Family(
            "setting_outcome", "1 for what became of each setting, or for why it was not tried."
        )
        settings = self._snapshot.plan.by_key()
        for (knob, subject), setting in settings.items():
            wanted[knob].add(self._names.of_subject(subject), setting.value)
            if setting.blocked is not None and setting.key not in self._snapshot.outcomes:
                labels = self._names.of_subject(subject)
                outcome.add({"knob": knob.name, **labels, "result": setting.blocked.result}, 1)
        for (knob, subject), became in self._snapshot.outcomes.items():
            labels = self._names.of_subject(subject)
            outcome.add({"knob": knob.name, **labels, "result": became.result}, 1)
        return (*wanted.values(), outcome)

    def _decisions(self) -> Iterable[Family]:
        share = Family(
            "tenant_share_ratio", "How much of its usual activity a tenant is left; 1 is all."
        )
        info = Family("tenant_info", "1 for each tenant, with the rule that claims it.")
        cause = Family("cause_active", "1 for each condition that calls for relief now.")
        held = {h.tenant: h.share for h in self._snapshot.holds}
        for tenant in self._snapshot.state.inventory.tenants or ():
            labels = self._names.of_tenant(tenant.name)
            share.add(labels, held.get(tenant.name, 1.0))
            info.add({**labels, "rule": wire(tenant.rule), "kind": tenant.kind}, 1)
        for active in self._snapshot.causes:
            labels = {**self._names.of_card(active.subject.gpu), "cause": active.kind}
            cause.add({**labels, "tenant": wire(active.subject.tenant)}, 1)
        return share, info, cause

    def _agent(self) -> Iterable[Family]:
        posture, stats = self._snapshot.posture, self._snapshot.stats
        build = Family("build_info", "1, with the version of the agent.")
        build.add({"version": self._version}, 1)
        mode = Family("mode", "1 for the mode that is configured, 0 for the other.")
        for name in ("observe", "enforce"):
            mode.add({"mode": name}, float(name == posture.mode))
        actions = Family("actions_total", "Settings by knob and by what became of them.", "counter")
        for knob in KNOBS:
            for result in RESULTS:
                count = self._snapshot.actions.get((knob.name, result), 0)
                actions.add({"knob": knob.name, "result": result}, count)
        return (
            build,
            mode,
            actions,
            _alone("acting", "1 while the agent may change anything, else 0.", posture.acts),
            _alone("paused", "1 while the agent is paused, else 0.", posture.paused),
            _alone(
                "config_error",
                "1 while the configuration file has problems and an earlier one is in force.",
                bool(posture.config_error),
            ),
            _alone(
                "config_last_load_timestamp_seconds",
                "When the configuration in force was read.",
                posture.config_loaded_wall,
            ),
            _alone("loop_ticks_total", "Passes of the control loop.", stats.ticks, "counter"),
            _alone("loop_lag_seconds", "How late the last pass began.", stats.lag_seconds),
            _alone("loop_tick_seconds", "Duration of the last pass.", stats.tick_seconds),
        )

    def _sensors(self) -> Iterable[Family]:
        up = Family("sensor_up", "1 if the last reading succeeded, 0 if not.")
        success = Family("sensor_last_success_timestamp_seconds", "When a reading last succeeded.")
        duration = Family("sensor_duration_seconds", "Duration of the last reading.")
        failures = Family("sensor_failures_total", "Readings that failed.", "counter")
        now = self._snapshot.state.now
        for name, health in self._snapshot.state.health.items():
            labels = {"sensor": name}
            failures.add(labels, health.failures)
            if health.up is None:
                continue
            up.add(labels, float(health.up))
            duration.add(labels, health.seconds)
            if health.last_success is not None:
                success.add(labels, now.wall - now.mono + health.last_success)
        return up, success, duration, failures


def _alone(name: str, text: str, value: float, kind: str = "gauge") -> Family:
    family = Family(name, text, kind)
    family.add({}, float(value))
    return family


class Names:
    """Labels of what is measured. The index is for people, the UUID for joins."""

    def __init__(self, inventory: Inventory) -> None:
        self._cards: dict[str, Labels] = {}
        for card in inventory.gpus or ():
            self._cards[card.uuid] = {"gpu": str(card.index), "uuid": card.uuid}
            for part in card.mig:
                self._cards[part.uuid] = {**self._cards[card.uuid], "mig": part.uuid}
        self._tenants = {
            t.name: {"tenant": wire(t.name), "level": t.level.name} for t in inventory.tenants or ()
        }

    def of_card(self, uuid: str) -> Labels:
        """Labels of a card or MIG instance; a card that has left the inventory keeps its UUID."""
        return self._cards.get(uuid, {"gpu": "", "uuid": uuid})

    def of_tenant(self, name: str) -> Labels:
        return self._tenants.get(name, {"tenant": wire(name), "level": ""})

    def of_subject(self, subject: Subject) -> Labels:
        on = subject.on
        if on is On.GPU or on is On.MIG:
            return self.of_card(subject.gpu)
        if on is On.TENANT:
            return self.of_tenant(subject.tenant)
        if on is On.TENANT_GPU:
            return {**self.of_tenant(subject.tenant), **self.of_card(subject.gpu)}
        if on is On.CGROUP:
            return {**self.of_tenant(subject.tenant), "cgroup": wire(subject.cgroup)}
        return {}

    def of_reading(self, signal: Signal, subject: Subject, dims: tuple[str, ...]) -> Labels:
        labels = self.of_subject(subject)
        if not signal.dims:
            return labels
        return {**labels, **dict(zip(signal.dims, map(wire, dims), strict=False))}
