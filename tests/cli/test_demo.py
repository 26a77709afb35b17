"""`gpuagent demo`: what it prints, what it takes, and that its addresses answer while it runs."""

import http.client
import io
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

from gpuagent.cli.demoview import conclusion, picture
from gpuagent.cli.exits import Exit
from gpuagent.lab.show import Beside, Summary
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
    ],
)
def test_what_makes_no_sense_is_said(words: tuple[str, ...], sentence: str) -> None:
    result = run("demo", *words)
    assert result.exit_code == Exit.USAGE
    assert sentence in result.output


@contextmanager
def running() -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """A demo of half a minute, with its socket and its port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gpuagent", "demo", "--for", "30s"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    head = "".join(next(process.stdout) for _ in range(4))
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
        connection.close()
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
        restored=False,
        left=("/a/cpu.max: 1 2",),
    )
    assert list(conclusion(summary))[-2:] == ["NOT PUT BACK:", "  /a/cpu.max: 1 2"]
