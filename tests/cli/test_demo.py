"""`gpuagent demo`: what it prints, what it takes, and that its addresses answer while it runs."""

import http.client
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from gpuagent.cli.demoview import conclusion, picture
from gpuagent.cli.exits import Exit
from gpuagent.lab.peaks import Peaks
from gpuagent.lab.show import Beside, Summary
from gpuagent.model.state import Event
from gpuagent.sim import scenario
from gpuagent.sim.scenario import Objective
from tests.cli.stage import run
from tests.expose import full


def test_for_scripts_it_ends_with_one_object() -> None:
    result = run("demo", "--for", "1s", "--seed", "2", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["simulated"] is True
    assert told["simulated_seconds"] >= 600
    assert told["ticks"] >= 600
    assert told["restored"] is True
    assert told["l1_p99_seconds_with"] <= 0.9 * told["l1_p99_seconds_without"]
    assert told["l3_throughput_kept"] > 0.2
    assert {t["name"]: (t["level"], t["class"]) for t in told["tenants"]} == {
        "chat": ("L1", "inference"),
        "batch": ("L2", "inference"),
        "training": ("L3", "training"),
    }
    assert sum(told["actions"].values()) > 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("nonsense",), "is no scenario"),
        (("/nowhere/at-all.toml",), "cannot be read"),
        (("--for", "soon"), "soon"),
        (("--seed", "-1"), "-1"),
        (("--socket", "/run/x.sock"), "--socket means nothing to demo"),
        (("--config", "/etc/x.toml"), "--config means nothing to demo"),
    ],
)
def test_what_makes_no_sense_is_said(words: tuple[str, ...], sentence: str) -> None:
    result = run("demo", *words)
    assert result.exit_code == Exit.USAGE
    assert sentence in result.output


def test_the_help_lists_the_scenarios() -> None:
    told = run("demo", "--help").stdout
    assert all(name in " ".join(told.split()) for name in scenario.names())


def test_a_short_scenario_is_said_to_be_longer(tmp_path: Path) -> None:
    short = tmp_path / "short.toml"
    text = Path(scenario.path_of("quiet-night")).read_text()
    short.write_text(text.replace("seconds = 900", "seconds = 300"))
    result = run("demo", str(short), "--for", "1s", "--json")
    assert "600 s are simulated, the least, although quiet-night has 300" in result.stderr
    assert json.loads(result.stdout)["simulated_seconds"] == 600
    assert "/agent.sock top" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_whoever_ends_it_gets_what_came_of_it_and_nothing_is_left(number: int) -> None:
    # The path of a socket has to be short, which that of a test's own folder may not be.
    with tempfile.TemporaryDirectory(prefix="d") as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "gpuagent", "demo", "--for", "1h"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": folder},
        )
        assert process.stdout is not None
        while "simulated 1 of" not in next(process.stdout):
            pass
        process.send_signal(number)
        told, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "everything was put back" in told
        assert os.listdir(folder) == []


@contextmanager
def running() -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """A demo of half a minute, with its socket and its port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gpuagent", "demo", "--for", "30s"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    head = ""
    while "/metrics" not in head:
        head += next(process.stdout)
    assert " -m gpuagent --socket " in head
    path = re.search(r"--unix-socket (\S+)", head)
    port = re.search(r"127\.0\.0\.1:(\d+)", head)
    assert path is not None
    assert port is not None
    try:
        yield process, path[1], int(port[1])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_it_answers_while_it_runs_and_says_that_it_is_simulated() -> None:
    with running() as (_, path, port):
        connection = http.client.HTTPConnection("gpuagent")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(20)
        connection.sock.connect(path)
        connection.request("GET", "/v1/node")
        assert json.loads(connection.getresponse().read())["simulated"] is True
        connection.request("GET", "/v1/health")
        health = json.loads(connection.getresponse().read())
        assert [one["name"] for one in health["listeners"]] == ["unix", "admin", "loopback"]
        body = json.dumps({"quantile": 0.99, "seconds": 0.9})
        kind = {"Content-Type": "application/json"}
        connection.request("PUT", "/v1/tenants/chat/latency", body, kind)
        assert connection.getresponse().status == 202
        connection.close()
        words = ("token", "issue", "--socket", path, "--scope", "read", "--expires", "1h")
        issued = run(*words)
        assert issued.exit_code == 0, issued.output
        metrics = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        metrics.request("GET", "/metrics")
        text = metrics.getresponse().read().decode()
        metrics.close()
    series = [line for line in text.splitlines() if not line.startswith("#")]
    assert any(line.startswith("process_cpu_seconds_total{") for line in series)
    assert all('simulated="true"' in line for line in series)


def test_the_picture_fits_and_shows_what_matters() -> None:
    snapshot = full.full()
    console = Console(width=80, record=True, file=io.StringIO())
    tenants = snapshot.state.inventory.tenants or ()
    beside = {tenants[0].name: Beside(Objective(0.1), 0.08, 0.15)}
    console.print(picture(snapshot, beside, elapsed=10.0, seconds=600.0))
    text = console.export_text()
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "simulated 10 of 600 s" in text
    assert "80 ms" in text
    assert "150 ms" in text


def test_what_the_scenario_brings_is_not_pushed_out_by_many_events() -> None:
    snapshot = full.full()
    now = snapshot.state.now.mono
    busy = msgspec.structs.replace(
        snapshot, events=tuple(Event("x", now - 1.0, f"deed {i}") for i in range(9))
    )

    def lines(ago: float) -> str:
        console = Console(width=80, record=True, file=io.StringIO())
        happened = [(now - ago, "chat gets 65 requests a second")]
        console.print(picture(busy, {}, elapsed=9.0, seconds=600.0, happened=happened))
        return console.export_text()

    assert "* chat gets 65 requests a second" in lines(30.0)
    assert "* chat gets" not in lines(90.0)


def test_what_was_not_put_back_is_listed() -> None:
    summary = Summary(
        scenario="x",
        seed=1,
        simulated_seconds=600.0,
        measured_seconds=500.0,
        ticks=600,
        tenants=(),
        actions={},
        l1_tenant=None,
        l1_objective_seconds=None,
        l1_p99_seconds_without=None,
        l1_p99_seconds_with=None,
        l1_missed_ratio_without=None,
        l1_missed_ratio_with=None,
        l3_throughput_kept=None,
        peaks_with=None,
        peaks_without=None,
        restored=False,
        left=("/a/cpu.max: 1 2",),
    )
    assert list(conclusion(summary))[-2:] == ["NOT PUT BACK:", "  /a/cpu.max: 1 2"]
    did = msgspec.structs.replace(summary, actions={"cgroup_cpu_max refused": 3})
    assert list(conclusion(did))[1:3] == [
        "what the agent did, how often, and what came of it:",
        "  cgroup_cpu_max refused: 3 (it cannot be turned here)",
    ]
    whole = msgspec.structs.replace(summary, restored=True, left=(), lost_cards=(1,))
    assert list(conclusion(whole))[-2:] == [
        "card 1 fell off the bus: what was set on it is gone with it",
        "everything that still exists was put back",
    ]
    peaks = Peaks(
        celsius=82.6,
        memory_bytes=48 * 2**30,
        memory_end_bytes=0.0,
        memory_full_seconds=224.0,
        watts=500.0,
        over_budget_watts=120.0,
        over_budget_seconds=300.0,
    )
    calm = msgspec.structs.replace(peaks, celsius=80.1, memory_full_seconds=0.0)
    told = "\n".join(
        conclusion(msgspec.structs.replace(summary, peaks_without=peaks, peaks_with=calm))
    )
    assert "hottest card: 83 C without the agent, 80 C with it" in told
    assert "48.0 GiB (full for 224 s) without the agent, 48.0 GiB with it" in told
    assert "over the power budget: 300 s without the agent (by 120 W at most)" in told
