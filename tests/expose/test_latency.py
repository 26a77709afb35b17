"""Latency and its objective, as people and Prometheus are told them."""

import msgspec
import pytest

from gpuagent.expose import picture
from gpuagent.expose.auth import Peer
from gpuagent.expose.metrics import render
from gpuagent.model.inventory import Inventory, Level, on_tenant
from gpuagent.model.plan import Snapshot
from gpuagent.model.state import NodeState, Reading
from gpuagent.model.text import quantile_text
from gpuagent.model.vocab import TENANT_LATENCY_SECONDS
from tests.cli.stage import agent, run
from tests.expose.snapshots import ENFORCING, MONO, NOW, tenant


def snapshot(slo: float | None, level: Level = Level.L1, **measured: float | None) -> Snapshot:
    """One tenant with an objective at its p95, and what it reports at each quantile (`p95=0.1`)."""
    who = tenant("chat", level=level)
    limits = msgspec.structs.replace(who.limits, latency_slo_seconds=slo, latency_quantile=0.95)
    who = msgspec.structs.replace(who, limits=limits)
    readings = [
        Reading(
            TENANT_LATENCY_SECONDS,
            on_tenant("chat"),
            value,
            MONO - 1,
            dims=(quantile_text(int(name[1:]) / 100),),
        )
        for name, value in measured.items()
        if value is not None
    ]
    state = NodeState(
        NOW,
        inventory=Inventory(gpus=(), tenants=(who,)),
        readings={r.key: r for r in readings},
    )
    return Snapshot(state, ENFORCING)


@pytest.mark.parametrize(
    ("slo", "p95", "told"),
    [
        (0.1, 0.093, (0.093, 0.1, 0.95)),
        (0.1, None, (None, 0.1, 0.95)),
        (None, 0.093, (0.093, None, 0.95)),
        (None, None, (None, None, None)),
    ],
)
def test_a_row_tells_latency_and_objective_of_one_quantile(
    slo: float | None, p95: float | None, told: tuple[float | None, ...]
) -> None:
    shown = snapshot(slo, p95=p95, p50=0.5)
    row = picture.row(shown, picture.tenants(shown, Peer(label="root", admin=True))[0])
    assert (row.latency_seconds, row.latency_objective_seconds, row.latency_quantile) == told


def test_both_are_metrics_with_the_quantile_as_prometheus_writes_it() -> None:
    text = render(snapshot(0.1, p95=0.093, p50=0.04), "1").decode()
    labels = 'level="L1",quantile="0.95",tenant="chat"'
    assert f"gpuagent_tenant_latency_seconds{{{labels}}} 0.093\n" in text
    assert f"gpuagent_tenant_latency_objective_seconds{{{labels}}} 0.1\n" in text
    assert f"gpuagent_tenant_latency_seconds{{{labels.replace('95', '5')}}} 0.04\n" in text
    assert "objective_seconds" not in render(snapshot(None, p95=0.093), "1").decode()


@pytest.mark.parametrize(
    ("shown", "line"),
    [
        (snapshot(0.1, p95=0.093), "Its p95 latency is 93 ms; its objective is 100 ms."),
        (snapshot(0.1), "Its p95 latency is not reported now; its objective is 100 ms."),
        (
            snapshot(0.1, Level.L3, p95=0.2),
            "its objective is 100 ms, for which nobody is held back: it is not L1.",
        ),
        (snapshot(None, p95=2.5), "Its p95 latency is 2.5 s; no objective is declared."),
    ],
    ids=["both", "silent", "L3", "no objective"],
)
def test_explain_says_how_it_stands(shown: Snapshot, line: str) -> None:
    with agent(shown) as socket:
        said = run("--socket", socket, "explain", "chat", columns=200).output
    assert [one for one in said.splitlines() if one.endswith(line)]


def test_explain_says_nothing_of_what_there_is_not() -> None:
    with agent(snapshot(None)) as socket:
        assert "latency is" not in run("--socket", socket, "explain", "chat").output
