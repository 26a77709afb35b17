"""The Grafana dashboards: their form, and that every query of theirs returns data from a real server."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.expose.full import BROKEN, emitted, full
from tests.expose.scene import Scene, serving
from tests.prometheus import NONE_HERE, PROMETHEUS, Prometheus, metrics_in, watching

FOLDER = Path(__file__).resolve().parent.parent / "config/grafana"
FILES = sorted(FOLDER.glob("*.json"))
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

# As Grafana fills them in.
VALUES = {
    "$__range": "1m",
    "$__rate_interval": "15s",
    "$instance": ".+",
    "$tenant": "train",
}


SHOWN = (
    "gpuagent_tenant_",
    "gpuagent_loop_",
    "gpuagent_events_",
    "gpuagent_overrides",
    "gpuagent_listener_",
    "gpuagent_tokens_",
)
"""What is on a dashboard whatever it is called after that."""


def load(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def queries(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(title of the panel, query)."""
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def filled(query: str) -> str:
    for name, value in VALUES.items():
        query = query.replace(name, value)
    assert "$" not in query, f"a variable that no test knows: {query}"
    return query


def test_there_is_one_for_hosts_and_one_for_a_tenant() -> None:
    boards = [load(f) for f in FILES]
    assert [b["uid"] for b in boards] == ["gpuagent-host", "gpuagent-tenant"]
    names = [[v["name"] for v in b["templating"]["list"]] for b in boards]
    assert names == [["datasource", "instance"], ["datasource", "instance", "tenant"]]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_the_form_is_one_that_grafana_takes(file: Path) -> None:
    board = load(file)
    panels = board["panels"]
    assert len({p["id"] for p in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert at["x"] + at["w"] <= 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == SOURCE, panel["title"]
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert target["datasource"] == SOURCE
            assert re.search(r'instance=~"\$instance"', target["expr"]), panel["title"]
        assert len({t["refId"] for t in panel["targets"]}) == len(panel["targets"])


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_only_metrics_that_we_emit_are_asked_for(file: Path) -> None:
    known = emitted()
    for title, query in queries(load(file)):
        names = metrics_in(filled(query))
        assert names, title
        assert names <= known, (title, names - known)


def test_every_tenant_and_agent_metric_is_on_a_dashboard() -> None:
    shown = {n for f in FILES for _, q in queries(load(f)) for n in metrics_in(filled(q))}
    wanted = {n for n in emitted() if n.startswith(SHOWN)}
    assert wanted <= shown, wanted - shown


async def variables(board: dict[str, Any], prometheus: Prometheus) -> dict[str, list[str]]:
    found = {}
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert asked is not None, variable
            found[variable["name"]] = await prometheus.label_values(filled(asked[1]), asked[2])
    return found


@pytest.mark.skipif(PROMETHEUS is None, reason=NONE_HERE)
async def test_every_query_returns_data_from_the_real_server(tmp_path: Path) -> None:
    scene = Scene(full(time.time()))
    scene.access_now = BROKEN
    async with serving(scene) as (server, _):
        assert server.metrics_port is not None
        async with watching(server.metrics_port, tmp_path) as prometheus:
            for board in map(load, FILES):
                for title, query in queries(board):
                    assert await prometheus.query(filled(query)), (title, query)
                choices = await variables(board, prometheus)
                assert choices["instance"] == [f"127.0.0.1:{server.metrics_port}"]
                if "tenant" in choices:
                    assert choices["tenant"] == ["batch", "serve", "train"]
