"""`gpuagent evaluate`: what it prints and writes, what it refuses, and that an interrupt ends it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuagent.cli.exits import Exit
from gpuagent.lab import plots
from tests.cli.stage import run

TINY = ("--seeds", "2", "--seconds", "120", "--no-sweep")


CROWDED = """
name = "crowded"
about = "A service and a training job share a card."
seconds = 300
[[cards]]
profile = "a40"
[[tenants]]
name = "chat"
run = "chat"
set = { rate = 45.0 }
objective = { seconds = 0.1 }
[[tenants]]
name = "training"
run = "bert-training"
set = { launch = 0.9 }
[agent]
mode = "enforce"
[[agent.tenants]]
name = "chat"
sla = "L1"
match = { unit = "chat.service" }
latency_slo = "100ms"
[[agent.tenants]]
name = "training"
sla = "L3"
match = { unit = "training.service" }
"""


def test_two_policies_side_by_side(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    own = tmp_path / "own.toml"
    own.write_text(
        'name = "gentle"\nabout = "Cuts less."\ncontrol = "agent"\n'
        "[agent.backpressure]\ncut = 0.9\n"
    )
    host = tmp_path / "crowded.toml"
    host.write_text(CROWDED)
    words = ("--policy", "tgs", "--policy", str(own), *TINY, "--out", str(out))
    done = run("evaluate", str(host), *words)
    assert done.exit_code == 0, done.output
    assert "gentle against tgs" in done.stdout
    assert "2 seeds of 120 s, measured from second 60" in done.stdout
    assert [len(line) for line in done.stdout.splitlines() if len(line) > 80] == []
    told = json.loads((out / "report.json").read_text())
    assert [r["policy"] for r in told["rows"]] == ["none", "tgs", "gentle"]
    assert told["simulated"] is True
    text = (out / "report.txt").read_text()
    assert [line.rstrip() for line in done.stdout.splitlines()] == text.splitlines()
    assert ("latency.png" in os.listdir(out)) == plots.available()


def test_for_scripts_it_prints_the_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plots, "available", lambda: False)
    done = run(
        "evaluate", "co-location", "--policy", "aimd", *TINY[2:], "--seeds", "1", "--json",
        "--out", str(tmp_path),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["scenario"] == "co-location"
    assert told["judgements"][0]["candidate"] == "aimd"
    assert 0.0 <= told["rows"][0]["missed_ratio"]["value"] < 1.0
    assert done.stderr.endswith("There are no plots without matplotlib: pip install matplotlib\n")
    assert sorted(os.listdir(tmp_path)) == ["report.json", "report.txt"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("nowhere",), "'nowhere' is no scenario"),
        (("--policy", "best"), "'best' is no policy"),
        (("--policy", "aimd", "--policy", "static"), "static: the last policy is the one to be"),
        (("--policy", "aimd", "--policy", "aimd"), "aimd: is the name of two policies"),
        (("--policy", "aimd", "--seconds", "60"), "60 s are too few"),
        (("--policy", "aimd", "--out", "/dev/null/x"), "/dev/null/x cannot be made"),
        (("--seeds", "0"), "--seeds"),
        (("--socket", "/run/x.sock"), "--socket means nothing to evaluate"),
    ],
)
def test_what_it_cannot_do_it_says_at_once(words: tuple[str, ...], text: str) -> None:
    done = run("evaluate", *words)
    assert done.exit_code == Exit.USAGE
    assert text in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_ends_it_and_all_it_started(number: int, tmp_path: Path) -> None:
    process = _at_work(tmp_path)
    children = _children(process.pid)
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert process.returncode != 0
    assert out == ""
    assert os.listdir(tmp_path) == []
    assert [pid for pid in children if os.path.exists(f"/proc/{pid}")] == []


def test_its_workers_die_with_it(tmp_path: Path) -> None:
    process = _at_work(tmp_path)
    children = _children(process.pid)
    process.kill()
    process.communicate(timeout=20)
    for _ in range(1000):
        left = [pid for pid in children if _runs(pid)]
        if not left:
            return
        time.sleep(0.01)
    raise AssertionError(f"{left} run on")


def _at_work(folder: Path) -> "subprocess.Popen[str]":
    """A long evaluation of which at least one run has begun."""
    words = [sys.executable, "-m", "gpuagent", "evaluate", "--policy", "pi", "--policy", "aimd"]
    process = subprocess.Popen(
        [*words, "--seconds", "500000", "--seeds", "1", "--workers", "3", "--no-sweep"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    while not (_children(process.pid) and any(folder.glob("*/run-*"))):
        assert process.poll() is None
        time.sleep(0.02)
    return process


def _runs(pid: int) -> bool:
    """Whether it is there, and no zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _children(pid: int) -> list[int]:
    """Its workers; not the process that looks after their semaphores."""
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        found = [int(child) for child in file.read().split()]
    return [
        child for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
