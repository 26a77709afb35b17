"""Where a latency is read from and how that fares, as people are told it."""

import msgspec
import pytest

from gpuagent.expose import picture
from gpuagent.expose.access import Access
from gpuagent.expose.auth import Peer
from gpuagent.model.inventory import Inventory
from gpuagent.model.plan import Snapshot
from gpuagent.model.source import SourceHealth
from gpuagent.model.state import Frame, NodeState, Sensed, fold
from tests.cli.stage import agent, run
from tests.expose.snapshots import ENFORCING, MONO, NOW, tenant

URL = "http://127.0.0.1:8000/metrics"
FINE = SourceHealth("chat", URL, "x_seconds", up=True, last_success=MONO - 2.0)


def snapshot(*sources: SourceHealth) -> Snapshot:
    tenants = (tenant("chat"), tenant("other"))
    state = NodeState(NOW, inventory=Inventory(gpus=(), tenants=tenants), sources=sources)
    return Snapshot(state, ENFORCING)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (FINE, f"It is read from x_seconds at {URL}, 2 s ago."),
        (
            msgspec.structs.replace(FINE, why="p99 is not known: no request within 30 s"),
            f"It is read from x_seconds at {URL}, 2 s ago: p99 is not known: no request within 30 s.",
        ),
        (
            msgspec.structs.replace(FINE, up=False, why="answers 404"),
            f"It cannot be read from x_seconds at {URL}: answers 404 (last read: 2 s ago).",
        ),
        (
            SourceHealth("chat", URL, "x_seconds", up=False, why="answers 404"),
            f"It cannot be read from x_seconds at {URL}: answers 404 (last read: never).",
        ),
        (
            SourceHealth("chat", URL, "x_seconds"),
            f"It is to be read from x_seconds at {URL}, which has not been tried since the tenant is there.",
        ),
    ],
    ids=["fine", "no requests", "down", "never up", "not tried"],
)
def test_explain_says_where_it_comes_from(source: SourceHealth, line: str) -> None:
    with agent(snapshot(source)) as socket:
        said = run("--socket", socket, "explain", "chat", columns=300).output
        other = run("--socket", socket, "explain", "other", columns=300).output
    assert line in said.splitlines()
    assert URL not in other


def test_status_counts_sources_that_are_down_and_names_nobody() -> None:
    down = msgspec.structs.replace(FINE, up=False, why="answers 404")
    other = msgspec.structs.replace(FINE, tenant="other")
    shown = snapshot(down, other)
    view = picture.health(shown, Peer(label="nobody"), MONO, Access())
    assert (view.latency_sources, view.latency_sources_down) == (2, 1)
    assert view.degraded
    assert view.ok
    with agent(shown) as socket:
        said = run("--socket", socket, "status", columns=200).output
    assert "  latency: 1 of 2 sources cannot be read; `gpuagent explain TENANT` says why" in said
    assert "chat" not in msgspec.json.encode(view).decode()


def test_a_source_that_has_not_been_tried_is_nothing_amiss() -> None:
    view = picture.health(
        snapshot(SourceHealth("chat", URL, "x")), Peer(label="nobody"), MONO, Access()
    )
    assert (view.latency_sources, view.latency_sources_down, view.degraded) == (1, 0, False)


def test_the_state_keeps_what_was_last_said_of_all_sources() -> None:
    state = fold(NodeState(NOW), Frame(NOW, (Sensed(sources=(FINE,)), Sensed())))
    assert state.sources == (FINE,)
    state = fold(state, Frame(NOW, (Sensed(),)))
    assert state.sources == (FINE,)
    assert fold(state, Frame(NOW, (Sensed(sources=()),))).sources == ()
