"""/metrics: the snapshot in the words of Prometheus; and what renders it and /metrics/dcgm.

Pages are rendered in a thread, one at a time, and a text is told for a second before the next one
is made: passes of the loop may come twenty times as often. What is told is therefore up to a second
older than the newest picture (a change of posture is told at once, for whoever has just ordered it);
`gpuagent_snapshot_timestamp_seconds` says of when it is.

A declared signal or knob is its own registration. A series vanishes when its reading expires. An
estimate has a second series, `gpuagent_reading_estimated`, with the same labels: a label on the
series itself would cut its history in two each time that an estimate becomes exact.
"""

import asyncio
import gzip
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from gpuagent.expose import dcgm
from gpuagent.expose.access import Access
from gpuagent.expose.families import Family, alone
from gpuagent.expose.labels import Labels, Names
from gpuagent.expose.picture import share_left, tight
from gpuagent.model.declare import On
from gpuagent.model.inventory import on_tenant
from gpuagent.model.plan import Posture, Snapshot
from gpuagent.model.state import ACTION_RESULTS
from gpuagent.model.text import quantile_text, wire
from gpuagent.model.vocab import KNOBS, SIGNALS, SUSPENDED

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_FAST_GZIP = 1
REUSED_SECONDS = 1.0


class Exposition:
    """The text of /metrics and /metrics/dcgm, never rendered on the loop's thread."""

    def __init__(
        self,
        version: str,
        hostname: str = "",
        *,
        now: Callable[[], float] = time.monotonic,
        access: Callable[[], Access] = Access,
    ) -> None:
        """`hostname` is the label of dcgm-exporter's; empty for this host's own name.

        `now` is monotonic seconds. `access` is asked on the loop's thread.
        """
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="metrics")
        name = hostname or os.uname().nodename

        def own(snapshot: Snapshot) -> Callable[[], bytes]:
            ways = access()
            return lambda: render(snapshot, version, ways)

        self._own = _Page(self._thread, own, now)
        self._dcgm = _Page(self._thread, lambda s: lambda: dcgm.render(s, name), now)

    async def text(self, snapshot: Snapshot, *, zipped: bool = False) -> bytes:
        """The exposition of `snapshot`, or of one told a moment ago, in format 0.0.4.

        Gzipped on request.
        """
        return await self._own.text(snapshot, zipped=zipped)

    async def dcgm_text(self, snapshot: Snapshot, *, zipped: bool = False) -> bytes:
        """The same under the names of dcgm-exporter, as far as they mean the same."""
        return await self._dcgm.text(snapshot, zipped=zipped)

    def close(self) -> None:
        """End the thread once it is done with what it is at."""
        self._thread.shutdown(wait=False)


class _Page:
    """A text made of a snapshot, plain and zipped: one at most in `REUSED_SECONDS`."""

    def __init__(
        self,
        thread: Executor,
        draw: Callable[[Snapshot], Callable[[], bytes]],
        now: Callable[[], float],
    ) -> None:
        """`draw` gives the work to be done in `thread`."""
        self._thread = thread
        self._draw = draw
        self._now = now
        self._one_at_a_time = asyncio.Lock()
        self._of: Snapshot | None = None
        self._until = float("-inf")
        """When the text is too old for another snapshot; monotonic seconds."""
        self._plain = b""
        self._zipped = b""

    async def text(self, snapshot: Snapshot, *, zipped: bool) -> bytes:
        async with self._one_at_a_time:
            if self._outdated_by(snapshot):
                self._plain = await self._run(self._draw(snapshot))
                self._zipped = b""
                self._of = snapshot
                self._until = self._now() + REUSED_SECONDS
            if zipped and not self._zipped:
                self._zipped = await self._run(lambda: gzip.compress(self._plain, _FAST_GZIP))
            return self._zipped if zipped else self._plain

    def _outdated_by(self, snapshot: Snapshot) -> bool:
        known = self._of
        if known is None or snapshot.posture != known.posture:
            return True
        return known is not snapshot and self._now() >= self._until

    async def _run(self, work: Callable[[], bytes]) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def render(snapshot: Snapshot, version: str, access: Access = Access()) -> bytes:
    """The exposition of `snapshot`, and the agent's own CPU time, memory and open files."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SnapshotCollector(snapshot, version, access))
    registry.register(_OwnProcess(_mark(snapshot)))
    return generate_latest(registry)


def _mark(snapshot: Snapshot) -> Labels:
    """No real host's series has this label: nothing simulated can be taken for one of them."""
    return {"simulated": "true"} if snapshot.posture.simulated else {}


class _OwnProcess(Collector):
    """The agent's own process, which tells what it costs: with the mark as well."""

    def __init__(self, mark: Labels) -> None:
        self._mark = mark
        self._process = ProcessCollector(registry=None)

    def collect(self) -> Iterator[Metric]:
        for metric in self._process.collect():
            metric.samples = [s._replace(labels={**s.labels, **self._mark}) for s in metric.samples]
            yield metric


class SnapshotCollector(Collector):
    """All families of one snapshot, which no one changes while they are read."""

    def __init__(self, snapshot: Snapshot, version: str, access: Access = Access()) -> None:
        self._snapshot = snapshot
        self._version = version
        self._access = access
        self._names = Names(snapshot.state.inventory)
        self._mark = _mark(snapshot)

    def collect(self) -> Iterator[Metric]:
        for family in (
            *self._signals(),
            *self._cards(),
            *self._knobs(),
            *self._decisions(),
            *self._agent(),
            *self._ways_in(),
            *self._sensors(),
        ):
            if family:
                yield family.metric(self._mark)

    def _signals(self) -> Iterable[Family]:
        families = {
            name: Family(name, s.help, s.kind) for s in SIGNALS for name in map(s.name_on, s.on)
        }
        estimated = Family(
            "reading_estimated",
            "1 for each series of a signal whose value is an estimate; its labels are the series' own.",
        )
        for reading in self._snapshot.state.live():
            signal = reading.signal
            labels = self._names.of_reading(signal, reading.subject, reading.dims)
            name = signal.name_on(reading.subject.on)
            families[name].add(labels, reading.value)
            if not reading.exact:
                estimated.add({"signal": name, **labels}, 1)
        return (*families.values(), estimated)

    def _cards(self) -> Iterable[Family]:
        info = Family("gpu_info", "1 for each card, with what it is.")
        blind = Family("gpu_blind", "1 while nothing can be read from the card, else 0.")
        default = Family(
            "gpu_power_limit_default_watts", "Power limit that the card has if nobody sets one."
        )
        for card in self._snapshot.state.inventory.gpus or ():
            labels = self._names.of_card(card.uuid)
            what = {"model": card.name, "pci_bus_id": card.pci_bus_id, "driver": card.driver}
            info.add({**labels, **{name: wire(text) for name, text in what.items()}}, 1)
            blind.add(labels, float(bool(card.blind)))
            if card.power_default_watts is not None:
                default.add(labels, card.power_default_watts)
        return info, blind, default

    def _knobs(self) -> Iterable[Family]:
        wanted = {k: Family(k.wanted_name, f"Wanted by the agent: {k.help}") for k in KNOBS}
        outcome = Family(
            "setting_outcome",
            "How many settings came to what, or were not tried for what; of a process by its tenant.",
        )
        outcomes = self._snapshot.outcomes
        for (knob, subject), setting in self._snapshot.plan.by_key().items():
            wanted[knob].count(self._names.of_subject(subject), setting.value)
            if setting.blocked is not None and setting.key not in outcomes:
                labels = self._names.of_target(subject)
                outcome.count({"knob": knob.name, **labels, "result": setting.blocked.result}, 1)
        for (knob, subject), became in outcomes.items():
            labels = self._names.of_target(subject)
            outcome.count({"knob": knob.name, **labels, "result": became.result}, 1)
        return (*wanted.values(), outcome)

    def _decisions(self) -> Iterable[Family]:
        share = Family(
            "tenant_share_ratio",
            "How much of its usual activity a tenant is left in fact; 1 is all.",
        )
        hold = Family(
            "hold_share_ratio",
            "Share decided for a tenant or a whole card, and in `effect` what became of that.",
        )
        info = Family("tenant_info", "1 for each tenant, with the rule that claims it.")
        cause = Family("cause_active", "1 for each condition that calls for relief now.")
        objective = Family(
            "tenant_latency_objective_seconds",
            "Latency objective declared for a tenant, at a quantile; an L1's is protected.",
        )
        suspended = Family(
            "tenant_suspended_processes",
            "Processes of the tenant that the agent has suspended with cuda-checkpoint.",
        )
        holds, asleep = tight(self._snapshot), _suspended(self._snapshot)
        for tenant in self._snapshot.state.inventory.tenants or ():
            labels = self._names.of_tenant(tenant.name)
            if SUSPENDED.family in tenant.levers or tenant.name in asleep:
                suspended.add(labels, asleep[tenant.name])
            own = on_tenant(tenant.name)
            share.add(labels, share_left(h for h in holds if h.subject == own))
            info.add({**labels, "rule": wire(tenant.rule), "kind": tenant.kind}, 1)
            slo, quantile = tenant.limits.latency_slo_seconds, tenant.limits.latency_quantile
            if slo is not None:
                objective.add({**labels, "quantile": quantile_text(quantile)}, slo)
        for active in self._snapshot.causes:
            labels = {**self._names.of_card(active.subject.gpu), "cause": active.kind}
            cause.add({**labels, "tenant": wire(active.subject.tenant)}, 1)
        for decided in holds:
            labels = self._names.of_held(decided.subject)
            effect = {"cause": decided.cause, "effect": decided.effect or "unknown"}
            hold.add({**labels, **effect}, decided.share)
        return share, hold, info, objective, cause, suspended

    def _agent(self) -> Iterable[Family]:
        posture, stats = self._snapshot.posture, self._snapshot.stats
        build = Family("build_info", "1, with the version of the agent.")
        build.add({"version": self._version}, 1)
        mode = Family("mode", "1 for the mode that is configured, 0 for the other.")
        for name in ("observe", "enforce"):
            mode.add({"mode": name}, float(name == posture.mode))
        return (
            build,
            mode,
            *self._done(),
            alone(
                "snapshot_timestamp_seconds",
                "When the loop took the picture that is told here.",
                self._snapshot.state.now.wall,
            ),
            self._overrides(),
            *_posture(posture),
            alone("loop_ticks_total", "Passes of the control loop.", stats.ticks, "counter"),
            alone("loop_lag_seconds", "How late the last pass began.", stats.lag_seconds),
            alone("loop_tick_seconds", "Duration of the last pass.", stats.tick_seconds),
        )

    def _overrides(self) -> Family:
        family = Family("overrides", "Overrides in force, by what they are on.")
        leases = self._snapshot.state.leases
        for on in (On.TENANT, On.GPU):
            family.add({"on": on.value}, sum(x.subject.on is on for x in leases))
        return family

    def _done(self) -> Iterable[Family]:
        """Every combination from the start: a counter that appears at 1 has no increase."""
        actions = Family("actions_total", "Settings by knob and by what became of them.", "counter")
        outside = Family(
            "outside_changes_total",
            "Changes that somebody else made to a value that the agent had set.",
            "counter",
        )
        counted: dict[tuple[str, str], int] = {
            (k.name, r): 0 for k in KNOBS for r in ACTION_RESULTS
        }
        for (name, result), count in {**counted, **self._snapshot.actions}.items():
            actions.add({"knob": name, "result": result}, count)
        for knob in KNOBS:
            outside.add({"knob": knob.name}, self._snapshot.outside_changes.get(knob.name, 0))
        events = Family("events_total", "Events by kind.", "counter")
        for kind, count in self._snapshot.events_by_kind.items():
            events.add({"kind": kind}, count)
        return actions, outside, events

    def _ways_in(self) -> Iterable[Family]:
        up = Family("listener_up", "1 while the agent listens there, else 0.")
        faulty = Family(
            "listener_faulty",
            "1 while something is amiss with a listener, open or not; /v1/health says what.",
        )
        for one in self._access.listeners:
            labels = {"listener": one.name}
            up.add(labels, float(one.up))
            faulty.add(labels, float(bool(one.why) or not one.up))
        unusable = alone(
            "tokens_unusable",
            "1 while the file of tokens cannot be used, so that none is valid, else 0.",
            bool(self._access.tokens_why),
        )
        ends = Family("tls_certificate_expiry_timestamp_seconds", "When the certificate expires.")
        if self._access.certificate_ends_wall is not None:
            ends.add({"listener": "network"}, self._access.certificate_ends_wall)
        return up, faulty, unusable, ends

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


def _suspended(snapshot: Snapshot) -> Counter[str]:
    """How many processes of each tenant are suspended by us now."""
    return Counter(
        subject.tenant
        for (knob, subject), outcome in snapshot.outcomes.items()
        if knob is SUSPENDED and outcome.original is not None and outcome.real == 1
    )


def _posture(posture: Posture) -> Iterator[Family]:
    """What it may do, and why it may do no more."""
    flags = {
        "acting": ("while the agent may change anything, else 0.", posture.acts),
        "paused": ("while the agent is paused, else 0.", posture.paused),
        "demoted": (
            "while the agent only observes because it has crashed too often, else 0.",
            bool(posture.demoted),
        ),
        "released": ("while the driver has been let go on request, else 0.", posture.released),
        "config_error": (
            "while the configuration file has problems and an earlier one is in force.",
            bool(posture.config_error),
        ),
    }
    for name, (when, holds) in flags.items():
        yield alone(name, f"1 {when}", holds)
    yield alone(
        "config_last_load_timestamp_seconds",
        "When the configuration in force was read.",
        posture.config_loaded_wall,
    )
