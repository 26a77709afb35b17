"""Limits as declared, used and enforced: each against what is known, and what is not."""

import msgspec
import pytest

from gpuagent.expose import discreet, explain
from gpuagent.expose.limits import rows
from gpuagent.expose.views import LimitView
from gpuagent.model import vocab
from gpuagent.model.declare import Knob, Signal
from gpuagent.model.inventory import (
    GpuProcess,
    Inventory,
    Level,
    Limits,
    MpsClient,
    MpsDaemon,
    MpsServer,
    Seat,
    Subject,
    Tenant,
    on_cgroup,
    on_gpu,
    on_tenant,
    on_tenant_gpu,
)
from gpuagent.model.plan import Blocked, Cause, Plan, Setting, Snapshot
from gpuagent.model.state import NodeState, Outcome, Reading, Result
from tests.expose import snapshots
from tests.sense.fakes import process

GIB = 1 << 30
EVERYTHING = Limits(
    memory_limit_bytes=8 * GIB,
    memory_reserved_bytes=4 * GIB,
    compute_share_ratio=0.5,
    mps_contexts=2,
    power_cap_watts=300.0,
    latency_slo_seconds=0.2,
    host_memory_high_bytes=16 * GIB,
    host_memory_max_bytes=32 * GIB,
)
SEAT = Seat("/train", 7)
TRAIN = Tenant(
    "train",
    Level.L2,
    limits=EVERYTHING,
    gpus=("GPU-1",),
    seats=(SEAT,),
    processes=(process(20), process(21)),
)
HIGH, MAX = (on_cgroup("train", "/train", 7),) * 2
CARD = on_gpu("GPU-1")


def reading(signal: Signal, subject: Subject, value: float, *dims: str) -> Reading:
    return Reading(signal, subject, value, snapshots.MONO, True, dims)


def outcome(knob: Knob, subject: Subject, real: float, result: Result = "applied") -> Outcome:
    return Outcome(knob, subject, real, real, 700.0, result, "for a test", 0.0)


def shown(
    *readings: Reading,
    tenants: tuple[Tenant, ...] = (TRAIN,),
    outcomes: tuple[Outcome, ...] = (),
    settings: tuple[Setting, ...] = (),
    causes: tuple[Cause, ...] = (),
    mps: tuple[MpsDaemon, ...] | None = None,
    listed: tuple[GpuProcess, ...] | None = None,
) -> Snapshot:
    busy = snapshots.busy()
    state = NodeState(
        busy.state.now,
        inventory=Inventory(tenants=tenants, mps=mps, gpu_processes=listed),
        readings={(r.signal, r.subject, r.dims): r for r in readings},
    )
    return msgspec.structs.replace(
        busy,
        state=state,
        plan=Plan(settings),
        outcomes={(o.knob, o.subject): o for o in outcomes},
        causes=causes,
    )


def told(snapshot: Snapshot, who: Tenant = TRAIN) -> dict[str, LimitView]:
    found = rows(snapshot, who)
    assert len({(r.limit, r.gpu) for r in found}) == len(found)
    return {r.limit: r for r in found}


def test_nothing_declared_is_nothing_told() -> None:
    bare = msgspec.structs.replace(TRAIN, limits=Limits())
    assert rows(shown(tenants=(bare,)), bare) == ()


def test_what_is_not_known_is_null_and_nothing_is_said_to_be_enforced() -> None:
    found = told(shown())
    assert set(found) == {
        "memory_limit",
        "memory_reserved",
        "compute_share",
        "mps_contexts",
        "power_cap",
        "latency_slo",
        "host_memory_high",
        "host_memory_max",
    }
    assert [r for r in found.values() if r.used is not None or r.enforced is not None] == []
    assert all(r.by for r in found.values())
    assert found["memory_limit"].declared == 8 * GIB
    assert found["compute_share"].why == "it is no MPS client"


def test_what_is_used_and_in_force() -> None:
    daemon = MpsDaemon(
        "g", up=True, servers=(MpsServer(7),), clients=(MpsClient(20, 7, 0.5), MpsClient(9, 7))
    )
    found = told(
        shown(
            reading(vocab.TENANT_GPU_MEMORY_BYTES, on_tenant_gpu("train", "GPU-1"), 9 * GIB),
            reading(vocab.GPU_POWER_WATTS, CARD, 290.0),
            reading(vocab.TENANT_LATENCY_SECONDS, on_tenant("train"), 0.3, "0.99"),
            reading(vocab.TENANT_HOST_MEMORY_BYTES, on_tenant("train"), 5 * GIB),
            outcomes=(
                outcome(vocab.POWER_LIMIT, CARD, 300.0),
                outcome(vocab.MEMORY_HIGH, HIGH, 16 * GIB),
                outcome(vocab.MEMORY_MAX, MAX, float("inf"), "refused"),
            ),
            mps=(daemon,),
            listed=(
                GpuProcess(20, "GPU-1", "compute", None),
                GpuProcess(21, "GPU-1", "compute", None),
            ),
        )
    )
    values = {n: (r.used, r.enforced) for n, r in found.items()}
    assert values == {
        "memory_limit": (9 * GIB, None),
        "memory_reserved": (9 * GIB, None),
        "compute_share": (None, 0.5),
        "mps_contexts": (1, None),
        "power_cap": (290.0, 300.0),
        "latency_slo": (0.3, None),
        "host_memory_high": (5 * GIB, 16 * GIB),
        "host_memory_max": (5 * GIB, None),
    }
    assert found["memory_limit"].why == "it uses more"
    assert found["latency_slo"].why == "its p99 is over it"
    assert found["latency_slo"].by.startswith("nothing")
    assert found["host_memory_max"].why == "refused: for a test"
    assert found["power_cap"].why == ""


@pytest.mark.parametrize(
    ("ratios", "enforced", "why"),
    [
        ((0.5, 0.4), 0.5, ""),
        ((0.5, 1.0), 1.0, "a client has started with more, and no command changes that"),
        ((0.5, None), None, "with what its clients have started is not known"),
    ],
)
def test_the_ceiling_is_that_of_the_client_with_the_most(
    ratios: tuple[float | None, float | None], enforced: float | None, why: str
) -> None:
    clients = tuple(MpsClient(20 + i, 7, ratio) for i, ratio in enumerate(ratios))
    row = told(shown(mps=(MpsDaemon("g", up=True, clients=clients),)))["compute_share"]
    assert (row.enforced, row.why) == (enforced, why)


def test_a_cap_that_is_not_in_force_says_why() -> None:
    beside = Tenant("serve", Level.L1, gpus=("GPU-1",))
    shared = told(shown(tenants=(TRAIN, beside)))["power_cap"]
    assert (shared.enforced, shared.why) == (None, "the card is used by serve too")
    high = told(shown(outcomes=(outcome(vocab.POWER_LIMIT, CARD, 500.0),)))["power_cap"]
    assert high.enforced is None
    blocked = Setting(
        vocab.POWER_LIMIT, CARD, 300, "w", "r", blocked=Blocked("would", "it only observes")
    )
    assert told(shown(settings=(blocked,)))["power_cap"].why == "would: it only observes"
    nowhere = msgspec.structs.replace(TRAIN, gpus=())
    assert told(shown(tenants=(nowhere,)), nowhere)["power_cap"].why == "it is on no card"


def test_a_reservation_that_is_not_met_and_one_that_nobody_can_keep() -> None:
    cause = Cause("reserved", on_tenant_gpu("train", "GPU-1"), 0.0, "sweep has 70 GiB of it")
    unmet = told(shown(causes=(cause,)))["memory_reserved"]
    assert unmet.why == "not met: sweep has 70 GiB of it"
    lowest = msgspec.structs.replace(TRAIN, level=Level.L3)
    assert told(shown(), lowest)["memory_reserved"].by.startswith("nothing")


def test_several_control_groups_have_no_host_limit() -> None:
    two = msgspec.structs.replace(TRAIN, seats=(SEAT, Seat("/other", 8)))
    assert "has 2 control groups" in told(shown(), two)["host_memory_high"].why


def test_who_sees_his_own_only_learns_of_nobody_else() -> None:
    snapshot = shown(tenants=(TRAIN, Tenant("secret", Level.L1, gpus=("GPU-1",))))
    full = explain.tenant(snapshot, TRAIN)
    assert b"secret" in msgspec.json.encode(full.limit_rows)
    told_to_him = discreet.full(full)
    assert b"secret" not in msgspec.json.encode(told_to_him.limit_rows)
    explained = discreet.explanation(explain.explanation(snapshot, TRAIN))
    assert b"secret" not in msgspec.json.encode(explained.limit_rows)
    assert [r.declared for r in explained.limit_rows] == [r.declared for r in full.limit_rows]
