"""The vocabulary holds together: names, units, labels, and how long a reading stays true."""

import re
from typing import get_args, get_type_hints

import msgspec
import pytest

from gpuagent import config
from gpuagent.clock import SystemClock
from gpuagent.host.nvml import NvmlGpus
from gpuagent.host.nvml_fields import READS
from gpuagent.model import vocab
from gpuagent.model.declare import BUDGET_RULE, Fate, Knob, On, Signal
from gpuagent.model.vocab import KNOB, KNOBS, SIGNAL, SIGNALS
from gpuagent.sense.cgroups import CgroupUse
from gpuagent.sense.mps import ASK_SECONDS
from gpuagent.sense.node import Host

UNITS = (
    "ratio",
    "bytes",
    "bytes_per_second",
    "watts",
    "joules",
    "celsius",
    "hertz",
    "seconds",
    "cores",
)
COUNTED = (
    "node_cpus",
    "gpu_remapped_rows",
    "tenant_processes",
    "tenant_gpu_processes",
    "tenant_mps_clients",
    "mps_servers",
    "mps_faulted_servers",
    "mps_clients",
)
"""Numbers of things, which have no unit but what is counted."""
FLAGS = (
    "gpu_throttled",
    "gpu_row_remap_pending",
    "gpu_row_remap_failed",
    "mps_up",
    "tenant_latency_source_up",
)
PLAIN = ("cgroup_cpu_weight",)
"""The kernel's own scale, which has no unit."""
ALSO_READ = ("cgroup_cpu_weight", "cgroup_cpu_max", "gpu_power_limit")
"""Knobs whose real value is a signal as well, whether the agent turns them or not."""
EVENTS = (
    "gpu_ecc_errors_total",
    "gpu_pcie_replays_total",
    "gpu_xid_errors_total",
    "tenant_freezes_total",
)
"""Counters of events, not of a quantity."""

LABELS = {
    On.NODE: 0,
    On.GPU: 2,
    On.MIG: 3,
    On.TENANT: 2,
    On.TENANT_GPU: 4,
    On.CGROUP: 3,
    On.PROCESS: 2,
    On.MPS: 1,
}
"""How many labels name a subject: a card its index and UUID, a tenant its name and level, ..."""
LABELS_MOST = 8

TICK_MOST = 2.0


def most(settings: type[msgspec.Struct], key: str) -> float:
    """The highest value that a setting may have."""
    metadata = get_type_hints(settings, include_extras=True)[key].__metadata__
    (bound,) = {m.le for m in metadata if m.le is not None}
    assert isinstance(bound, int | float)
    return bound


def slowest_nvml() -> dict[str, float]:
    """Longest interval of each NVML signal that a configuration can bring about."""
    names = ("sample_interval", "process_interval", "slow_interval")
    settings = config.Nvml(**{n: most(config.Nvml, n) for n in names})
    gpus = NvmlGpus(settings=settings, library="", clock=SystemClock(), wake=lambda _: None)
    every = gpus._every()
    return {name: every[read.rate] for read in READS for name in read.gives}


def intervals() -> dict[Signal, float]:
    """Longest time between two readings of each signal, without the wait for the next tick."""
    nvml = {SIGNAL[name]: seconds for name, seconds in slowest_nvml().items()}
    listed = most(config.Nvml, "process_interval")
    return {
        **nvml,
        **{s: Host.interval for s in SIGNALS if s.on == (On.NODE,)},
        **{s: CgroupUse.interval for s in SIGNALS if s.on in {(On.TENANT,), (On.CGROUP,)}},
        **{s: listed for s in SIGNALS if s.on == (On.TENANT_GPU,)},
        vocab.NODE_POWER_WATTS: nvml[vocab.GPU_POWER_WATTS],
        vocab.TENANT_PROCESSES: most(config.Found, "table_interval"),
        vocab.TENANT_MPS_CLIENTS: ASK_SECONDS,
        **{s: ASK_SECONDS for s in SIGNALS if s.on == (On.MPS,)},
    }


each_signal = pytest.mark.parametrize("signal", SIGNALS, ids=lambda s: s.name)
each_knob = pytest.mark.parametrize("knob", KNOBS, ids=lambda k: k.name)


def test_every_declaration_is_in_its_list_once() -> None:
    signals = [v for v in vars(vocab).values() if isinstance(v, Signal)]
    knobs = [v for v in vars(vocab).values() if isinstance(v, Knob)]
    assert set(signals) == set(SIGNALS) == set(SIGNAL.values())
    assert set(knobs) == set(KNOBS) == set(KNOB.values())
    assert len(SIGNAL) == len(SIGNALS) == len(set(SIGNALS))
    assert len(KNOB) == len(KNOBS) == len(set(KNOBS))
    assert all(SIGNAL[s.name] is s for s in SIGNALS)


@each_signal
def test_a_name_is_a_metrics_name_and_ends_in_its_unit(signal: Signal) -> None:
    assert re.fullmatch("[a-z][a-z0-9]*(_[a-z0-9]+)*", signal.name)
    quantity = signal.name.removesuffix("_total")
    unitless = signal.name in (*COUNTED, *FLAGS, *PLAIN, *EVENTS)
    assert unitless or quantity.endswith(tuple(f"_{u}" for u in UNITS))
    assert (signal.kind == "counter") == signal.name.endswith("_total")
    assert signal.help.endswith(".")
    assert "\n" not in signal.help


@each_signal
def test_labels_are_few_and_legal(signal: Signal) -> None:
    assert signal.on
    assert all(re.fullmatch("[a-z][a-z0-9_]*", d) for d in signal.dims)
    assert not set(signal.dims) & {"gpu", "uuid", "mig", "tenant", "level", "cgroup", "signal"}
    # One more is what `reading_estimated` adds.
    assert max(LABELS[on] for on in signal.on) + len(signal.dims) + 1 <= LABELS_MOST


@each_signal
def test_a_reading_outlives_the_wait_for_the_next(signal: Signal) -> None:
    if signal in (vocab.GPU_XID_ERRORS, vocab.GPU_XID_LAST_SECONDS):
        assert signal.expires == float("inf"), "what has happened stays true"
        return
    interval = intervals()[signal]
    assert signal.expires >= 2 * interval, "one reading may be missed"
    assert signal.expires >= interval + TICK_MOST + 0.4, "the loop takes it with its next tick"


def test_the_tick_is_as_long_as_assumed_here() -> None:
    assert most(config.Config, "tick") == TICK_MOST


@each_signal
def test_a_signal_with_history_is_read_often_enough_to_have_one(signal: Signal) -> None:
    if signal.history:
        assert signal.kind == "gauge"
        assert not signal.dims, "each dimension costs a ring of its own"
        assert intervals()[signal] <= 5


@each_knob
def test_what_a_knob_really_is_is_a_signal_in_the_same_unit(knob: Knob) -> None:
    signal = SIGNAL.get(knob.real_name)
    assert (signal is not None) == (knob.name in ALSO_READ)
    if signal is None:
        return
    assert signal.on == (knob.on,)
    assert signal.dims == ()
    assert signal.name.endswith(f"_{knob.unit}") if knob.unit else signal.name in PLAIN


@each_knob
def test_what_is_wanted_of_a_knob_has_a_name_of_its_own(knob: Knob) -> None:
    assert re.fullmatch("[a-z][a-z0-9]*(_[a-z0-9]+)*", knob.wanted_name)
    assert knob.wanted_name not in SIGNAL
    assert knob.wanted_name.endswith(knob.unit)
    assert len({k.wanted_name for k in KNOBS}) == len(KNOBS)
    assert {k.family for k in KNOBS} == set(get_args(config.Family))
    assert knob.deadband > 0
    assert LABELS[knob.on] + 2 <= LABELS_MOST, "knob and result come beside its subject"


@each_knob
def test_what_becomes_of_a_knob_is_the_table_of_the_design(knob: Knob) -> None:
    def under(rule: str) -> tuple[Fate, ...]:
        fates = knob.fates_under(rule)
        return fates.stale, fates.stop, fates.crash, fates.rescue

    card = knob.on in {On.GPU, On.MPS}
    stale = Fate.HOLD if card else Fate.RELEASE
    for rule in ("backpressure/temperature", "", *(() if knob.budgeted else (BUDGET_RULE,))):
        assert under(rule) == (stale, Fate.PUT_BACK, Fate.PUT_BACK, Fate.PUT_BACK)
    if knob.budgeted:
        assert under(BUDGET_RULE) == (Fate.HOLD, Fate.AS_CONFIGURED, Fate.ADOPT, Fate.HOLD)


@each_knob
def test_the_safer_of_two_values_is_in_the_safer_direction(knob: Knob) -> None:
    assert knob.safest(1, 2) == knob.safest(2, 1) == (1 if knob.safer == "min" else 2)
