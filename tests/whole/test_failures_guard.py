"""The guard of what is frozen fails (DESIGN 9): a real tenant is never left frozen, and the loop goes on."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.stage import Daemon, until
from tests.whole.conftest import Host
from tests.whole.watch import goes_on, knob

RUNNING = "cgroup_running"


class Freezing:
    """Train may be frozen, in its real cgroup, and the card it is on is too hot."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.cgroup = host.train.cgroup.real
        host.stage.configure(
            host.serve_rule
            + host.stage.rule("train", "L3")
            + 'levers = ["freeze"]\n[freeze]\npulse = "200ms"\n'
        )
        text = host.stage.config.read_text()
        tree = f'cgroup_root = "{host.stage.tree}"'
        assert tree in text
        host.stage.config.write_text(text.replace(tree, f'cgroup_root = "{host.stage.mount}"'))
        host.card.set(temperature_celsius=88)

    def frozen(self) -> bool:
        return "frozen 1" in (self.cgroup / "cgroup.events").read_text()

    def frozen_soon(self, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.frozen():
            assert time.monotonic() < deadline, "train is not frozen"
            time.sleep(0.002)

    def thawed_for_good(self) -> None:
        until("it is thawed", lambda: not self.frozen())
        until_ = time.monotonic() + 1.0
        while time.monotonic() < until_:
            assert not self.frozen()
            time.sleep(0.005)


@pytest.fixture
def freezing(host: Host) -> Freezing:
    return Freezing(host)


def guard(daemon: Daemon) -> int | None:
    """Process number of the agent's guard."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == daemon.process.pid and b"guard.py" in words:
            return int(folder.name)
    return None


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_a_guard_that_is_killed_or_stopped_is_replaced(freezing: Freezing, by: int) -> None:
    daemon = freezing.host.stage.daemon().ready()
    freezing.frozen_soon()
    first = until("there is a guard", lambda: guard(daemon))
    assert first is not None
    os.kill(first, by)
    until("it is thawed", lambda: not freezing.frozen(), seconds=15)
    goes_on(daemon)
    until("there is another guard", lambda: guard(daemon) not in (None, first), seconds=30)
    freezing.frozen_soon()

    def applied() -> bool:
        told = knob(daemon, RUNNING)
        return told is not None and told["result"] == "applied"

    until("the hold is said to be in force", applied)
    assert daemon.stop() == 0
    freezing.thawed_for_good()
    assert "Traceback" not in daemon.log


def test_a_daemon_that_is_killed_or_stopped_in_a_pulse_leaves_nobody_frozen(
    freezing: Freezing,
) -> None:
    daemon = freezing.host.stage.daemon().ready()
    freezing.frozen_soon()
    daemon.signal(signal.SIGSTOP)
    until("silence is as good as death", lambda: not freezing.frozen(), seconds=15)
    time.sleep(1.0)
    assert not freezing.frozen()
    daemon.signal(signal.SIGCONT)
    goes_on(daemon)
    freezing.frozen_soon()
    daemon.kill()
    freezing.thawed_for_good()
    assert freezing.host.stage.command("restore").returncode == 0
    freezing.thawed_for_good()
