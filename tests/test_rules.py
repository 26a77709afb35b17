"""The alert rules: valid, each shown to fire and to keep still, and each says what to do."""

import re
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuagent.cli.main import COMMANDS
from gpuagent.model.plan import Snapshot
from tests.expose.full import BROKEN, emitted, full
from tests.expose.scene import Scene, serving
from tests.prometheus import NONE_HERE, PROMETHEUS, PROMTOOL, metrics_in, watching

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "config/prometheus/gpuagent.rules.yml"
CASES = ROOT / "tests/rules/gpuagent.test.yml"

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason=NONE_HERE)


def promtool(*words: str) -> "subprocess.CompletedProcess[str]":
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *words], capture_output=True, text=True, check=False)


def alerts() -> list[str]:
    return re.findall(r"^ +- alert: (\w+)$", RULES.read_text(encoding="utf-8"), re.MULTILINE)


@needs_promtool
def test_promtool_accepts_the_rules() -> None:
    done = promtool("check", "rules", "--lint-fatal", str(RULES))
    assert done.returncode == 0, done.stderr
    assert f"{len(alerts())} rules found" in done.stdout


@needs_promtool
def test_each_alert_fires_when_it_should_and_not_before() -> None:
    done = promtool("test", "rules", str(CASES))
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_shown_to_fire() -> None:
    fires = re.findall(r'alertname="(\w+)"', CASES.read_text(encoding="utf-8"))
    assert set(fires) == set(alerts())
    assert len(set(alerts())) == len(alerts())


async def evaluated(snapshot: Snapshot, folder: Path) -> list[dict[str, Any]]:
    """The rules, as a real Prometheus that watches this host has evaluated them."""
    scene = Scene(snapshot)
    scene.access_now = BROKEN
    async with serving(scene) as (server, _):
        assert server.metrics_port is not None
        async with watching(server.metrics_port, folder, RULES) as prometheus:
            return await prometheus.rules()


@pytest.mark.skipif(PROMETHEUS is None, reason=NONE_HERE)
async def test_prometheus_runs_them_and_their_texts_have_values(tmp_path: Path) -> None:
    known = {"up", *emitted()}
    rules = await evaluated(full(time.time()), tmp_path)
    assert [r["name"] for r in rules] == alerts()
    active = {r["name"]: r["alerts"] for r in rules if r["alerts"]}
    for rule in rules:
        assert rule["health"] == "ok", rule
        assert metrics_in(rule["query"]) <= known, rule["name"]
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert set(rule["annotations"]) == {"summary", "description", "what_to_do"}
    for name, raised in active.items():
        for alert in raised:
            for text in alert["annotations"].values():
                assert "<no value>" not in text, (name, text)
                assert "error expanding" not in text, (name, text)
    # The busy host has one of nearly everything.
    assert {
        "GpuagentCardBlind",
        "GpuagentXid",
        "GpuagentXidHardware",
        "GpuagentLedgerTrouble",
        "GpuagentPowerBudgetUnreachable",
        "GpuagentL1CardLimited",
        "GpuagentHeldBackLong",
        "GpuagentLeverIneffective",
        "GpuagentLeverContested",
        "GpuagentLeverRefused",
        "GpuagentMemoryCauseLong",
        "GpuagentHeatLong",
        "GpuagentRowRemapFailed",
        "GpuagentLatencyMissed",
        "GpuagentNothingToHoldBack",
        "GpuagentListenerTrouble",
        "GpuagentTokensUnusable",
    } <= set(active)


@pytest.mark.skipif(PROMETHEUS is None, reason=NONE_HERE)
async def test_none_is_raised_for_a_simulated_host(tmp_path: Path) -> None:
    snapshot = full(time.time())
    posture = msgspec.structs.replace(snapshot.posture, simulated=True)
    rules = await evaluated(msgspec.structs.replace(snapshot, posture=posture), tmp_path)
    assert [r["name"] for r in rules] == alerts()
    assert [r["name"] for r in rules if r["alerts"]] == []


def test_each_metric_is_asked_for_without_the_mark_of_simulation() -> None:
    text = RULES.read_text(encoding="utf-8")
    for rule in re.findall(r"^ +expr: (.*?)^ +for:", text, re.MULTILINE | re.DOTALL):
        for metric, labels in re.findall(r"\b(gpuagent_\w+)(\{[^}]*\})?", rule):
            assert 'simulated="' in labels, (metric, rule)


def test_what_to_do_names_commands_that_exist() -> None:
    text = RULES.read_text(encoding="utf-8")
    advice = re.findall(r"what_to_do: (.*)", text)
    assert len(advice) == len(alerts())
    for sentence in advice:
        assert "`" in sentence, "no command in: " + sentence
        for command in re.findall(r"`gpuagent ([a-z]+)", sentence):
            assert command in COMMANDS, sentence


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ('sum by (a) (rate(x_total{b="c d"}[5m])) > 0.5', {"x_total"}),
        ("x and on (a, b) y unless ignoring (c) z == 1", {"x", "y", "z"}),
        ("avg_over_time(x[5m:1s] offset 1h) / on (a) group_left (b) y", {"x", "y"}),
        ("time() - x < 9e2", {"x"}),
        ('label_replace(x, "a", "$1", "b", "(y)")', {"x"}),
    ],
)
def test_the_names_in_a_query_are_found(query: str, names: set[str]) -> None:
    assert metrics_in(query) == names
