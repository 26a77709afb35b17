"""A snapshot in which every signal is read, every result occurs and every kind of cause holds."""

import re
from collections.abc import Iterator

import msgspec

from gpuagent.expose import dcgm, metrics
from gpuagent.expose.access import Access
from gpuagent.expose.views import ListenerView
from gpuagent.model import declare, vocab
from gpuagent.model.declare import On
from gpuagent.model.inventory import (
    LEVERS,
    NODE,
    Gpu,
    Inventory,
    Level,
    Limits,
    MigInstance,
    Subject,
    on_cgroup,
    on_gpu,
    on_mig,
    on_mps,
    on_process,
    on_tenant,
    on_tenant_gpu,
)
from gpuagent.model.plan import Blocked, Cause, Hold, LoopStats, Plan, Setting, Snapshot
from gpuagent.model.state import RESULTS, Health, Instant, NodeState, Outcome, Reading
from gpuagent.model.vocab import KNOBS, SIGNALS
from tests.expose import snapshots
from tests.expose.snapshots import GPU0, GPU1, MIG1, MONO, TRAIN_SEAT

MIB = 1024**2

DIMS: dict[str, tuple[str, ...]] = {
    "domain": ("graphics", "sm", "memory"),
    "reason": ("sw_power_cap", "hw_thermal"),
    "type": ("corrected", "uncorrected"),
    "cause": ("correctable", "uncorrectable"),
    "direction": ("tx", "rx"),
    "xid": ("31", "79"),
    "quantile": ("0.5", "0.99"),
}

VALUES = {
    vocab.GPU_UTILIZATION_RATIO: 0.75,
    vocab.GPU_MEMORY_BUSY_RATIO: 0.29,
    vocab.GPU_MEMORY_TOTAL_BYTES: 81559 * MIB,
    vocab.GPU_MEMORY_USED_BYTES: 71680 * MIB,
    vocab.GPU_MEMORY_FREE_BYTES: 9264 * MIB,
    vocab.GPU_POWER_WATTS: 510.25,
    vocab.GPU_POWER_LIMIT_WATTS: 600,
    vocab.GPU_TEMPERATURE_CELSIUS: 71,
    vocab.GPU_MEMORY_TEMPERATURE_CELSIUS: 83,
    vocab.GPU_ENERGY_JOULES: 123456.789,
    vocab.GPU_PCIE_REPLAYS: 3,
}
"""Of the first card; what is not here is 1."""
OBJECTIVES_SECONDS = {"serve": 0.5, "train": 2.0}
"""Of the latency, which is 1 s: one is missed and one is met."""
BROKEN = Access(
    listeners=(
        ListenerView("unix", "/run/gpuagent/gpuagent.sock", up=True, why=""),
        ListenerView("network", "[::]:9486", up=False, why="its certificate cannot be used"),
    ),
    tokens_why="no token is valid: the file of tokens is damaged",
)
"""A listener that is closed, and a file of tokens that cannot be used."""
CLOCKS_HERTZ = {"graphics": 1.98e9, "sm": 1.755e9, "memory": 2.619e9}


def full(wall: float = snapshots.WALL) -> Snapshot:
    """Two cards, the second partitioned by MIG, and a tenant of each level on the first."""
    people = tuple(
        msgspec.structs.replace(
            snapshots.tenant(name, level=level, path=f"/system.slice/{name}.service"),
            limits=Limits(latency_slo_seconds=OBJECTIVES_SECONDS.get(name)),
            levers=(*LEVERS, "freeze", "suspend"),
        )
        for name, level in (("serve", Level.L1), ("batch", Level.L2), ("train", Level.L3))
    )
    state = NodeState(
        Instant(MONO, wall),
        inventory=Inventory(gpus=_cards(), gpu_processes=(), tenants=people),
        readings={r.key: r for r in _readings(wall)},
        health={
            "gpus": Health("gpus", up=True, last_success=MONO - 0.2, seconds=0.01),
            "ledger": Health("ledger", up=False, why="the disk is full", failures=2),
        },
    )
    return Snapshot(
        state,
        snapshots.ENFORCING,
        plan=_plan(),
        outcomes=dict(_outcomes()),
        holds=(
            Hold(on_tenant("train"), 0.49, "cpu_max", "memory", "cut twice", effect="applied"),
            Hold(on_gpu(GPU0), 0.8, "power_limit", "temperature", "too hot", effect="would"),
        ),
        outside_changes={"cgroup_cpu_max": 1},
        causes=tuple(
            Cause(kind, on, MONO - 12, "for a test")
            for kind, on in (
                ("memory", on_gpu(GPU0)),
                ("temperature", on_gpu(GPU0)),
                ("power", NODE),
                ("cpu", NODE),
                ("latency", on_tenant("serve")),
            )
        ),
        actions={(k.name, r): 2 for k in KNOBS for r in RESULTS},
        events_by_kind={"xid": 2, "reloaded": 0},
        stats=LoopStats(ticks=60, tick_seconds=0.002, lag_seconds=0.001),
    )


def emitted() -> set[str]:
    """Names of all series that our two pages for Prometheus have."""
    snapshot = full()
    text = metrics.render(snapshot, "1", BROKEN) + dcgm.render(snapshot, "node1")
    return set(re.findall(r"^([a-zA-Z_]\w*)", text.decode(), re.MULTILINE))


def _cards() -> tuple[Gpu, ...]:
    return (
        Gpu(
            uuid=GPU0,
            index=0,
            name="NVIDIA H100 80GB HBM3",
            pci_bus_id="00000000:18:00.0",
            memory_bytes=81559 * MIB,
            power_default_watts=700,
            driver="550.54.15",
        ),
        Gpu(
            uuid=GPU1,
            index=1,
            name="NVIDIA H100 80GB HBM3",
            pci_bus_id="00000000:2A:00.0",
            mig_enabled=True,
            mig=(
                MigInstance(MIG1, GPU1, 2, 0, "NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb", 40448 * MIB),
                MigInstance(
                    "MIG-second", GPU1, 2, 1, "NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb", 40448 * MIB
                ),
                MigInstance(
                    "MIG-third", GPU1, 9, 0, "NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", 9856 * MIB
                ),
            ),
            blind="a call hangs",
        ),
    )


def _readings(wall: float) -> Iterator[Reading]:
    for signal in SIGNALS:
        for subject in _subjects(signal.on):
            for dims in _dims(signal.dims):
                value = VALUES.get(signal, 1.0) if subject.gpu != GPU1 else 1.0
                if signal is vocab.GPU_CLOCK_HERTZ:
                    value = CLOCKS_HERTZ[dims[0]]
                if signal is vocab.GPU_XID_LAST_SECONDS:
                    value = wall - (60 if dims == ("79",) else 300)
                exact = signal is not vocab.TENANT_GPU_UTILIZATION_RATIO
                yield Reading(signal, subject, value, MONO - 1, exact, dims)


def _subjects(on: tuple[On, ...]) -> Iterator[Subject]:
    if On.NODE in on:
        yield NODE
    if On.GPU in on:
        yield on_gpu(GPU0)
    if On.MIG in on:
        yield from (on_mig(MIG1), on_mig("MIG-second"), on_mig("MIG-third"))
    if On.CGROUP in on:
        yield TRAIN_SEAT
    if On.MPS in on:
        yield on_mps("shared")
    for name in ("serve", "batch", "train"):
        if On.TENANT in on:
            yield on_tenant(name)
        if On.TENANT_GPU in on:
            yield on_tenant_gpu(name, GPU0)


def _dims(names: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Values of the one dimension that a signal may have."""
    return tuple((v,) for v in DIMS[names[0]]) if names else ((),)


def _target(knob: declare.Knob) -> Subject:
    return {
        On.CGROUP: TRAIN_SEAT,
        On.TENANT: on_tenant("train"),
        On.PROCESS: on_process("train", 4242, 7),
        On.MPS: on_mps("shared"),
    }.get(knob.on, on_gpu(GPU0))


def _plan() -> Plan:
    wished = tuple(Setting(k, _target(k), 500, "for a test", "backpressure/memory") for k in KNOBS)
    hindered = Setting(
        vocab.CPU_WEIGHT,
        on_cgroup("batch", "/system.slice/batch.service", 78),
        25,
        "for a test",
        "backpressure/cpu",
        blocked=Blocked("ineffective", "no sibling competes with it"),
    )
    return Plan((*wished, hindered))


def _outcomes() -> Iterator[tuple[tuple[declare.Knob, Subject], Outcome]]:
    for knob in KNOBS:
        yield (
            (knob, _target(knob)),
            Outcome(knob, _target(knob), 500, 500, 700, "applied", "", MONO),
        )
    for i, result in enumerate(RESULTS):
        seat = on_cgroup("batch", f"/system.slice/batch-{i}.service", 100 + i)
        yield (
            (vocab.CPU_MAX, seat),
            Outcome(vocab.CPU_MAX, seat, 1, 1, 4, result, "for a test", MONO),
        )
