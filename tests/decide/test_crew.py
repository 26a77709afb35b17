"""Which cards may be run for efficiency, and which of them together."""

from typing import Any

import msgspec
import pytest

from gpuagent.config import Config
from gpuagent.decide.crew import crews
from gpuagent.decide.efficiency import Efficiency
from gpuagent.model.inventory import GpuProcess, Level, Tenant
from tests.decide.world import World, gpu, tenant

A, B, C = "GPU-a", "GPU-b", "GPU-c"


def training(name: str, *gpus: str, **changes: Any) -> Tenant:
    return msgspec.structs.replace(tenant(name, gpus=gpus), **{"kind": "training", **changes})


def found(*tenants: Tenant, listed: tuple[GpuProcess, ...] | None = ()) -> list[tuple[str, ...]]:
    w = World(Efficiency(Config()), gpus=[gpu(A, 0), gpu(B, 1), gpu(C, 2)], tenants=tenants)
    w.listed = listed
    w.step()
    return [c.cards for c in crews(w.state)]


def test_cards_that_share_a_job_move_as_one() -> None:
    assert found(training("x", A, B), training("y", C)) == [(A, B), (C,)]
    assert found(training("x", A, B), training("y", B, C)) == [(A, B, C)]


def test_a_card_with_nobody_is_left() -> None:
    assert found(training("x", A)) == [(A,)]


@pytest.mark.parametrize(
    "other",
    [
        training("y", A, kind=""),
        training("y", A, kind="inference"),
        training("y", A, level=Level.L1),
        training("y", A, enforce=False),
        training("y", A, observed=("power_limit",)),
    ],
)
def test_one_who_does_not_fit_keeps_the_whole_group_out(other: Tenant) -> None:
    assert found(training("x", A, B), other) == []
    assert found(training("x", B), other) == [(B,)]


def test_a_process_of_nobody_is_doubt_enough() -> None:
    listed = (GpuProcess(4711, A, "compute", None),)
    assert found(training("x", A), training("y", B), listed=listed) == [(B,)]
    assert found(training("x", A), listed=None) == []


def test_a_declared_cap_is_where_it_begins() -> None:
    capped = training("x", A)
    limits = msgspec.structs.replace(capped.limits, power_cap_watts=400)
    w = World(
        Efficiency(Config()),
        gpus=[gpu(A)],
        tenants=[msgspec.structs.replace(capped, limits=limits)],
    )
    w.step()
    [crew] = crews(w.state)
    assert (crew.tops, crew.floor) == ((400,), 0.5)
