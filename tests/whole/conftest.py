"""A stage with one protected and one best-effort tenant on one card, and a load to drive it."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.nvml import GIB, H100_80GB
from tests.stage import Daemon, Stage, cgroup2_mount, until

UNTOUCHED = "max 100000"


class Host:
    """A stage, and what goes on on it."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.card = stage.cards[0]
        self.serve = stage.tenant("serve")
        self.train = stage.tenant("train")
        self.serve_rule = stage.rule("serve", "L1")
        self.rules = self.serve_rule + stage.rule("train", "L3")
        stage.configure(self.rules)
        self.used = 66 * GIB
        self.card.set(memory_used_bytes=self.used, utilization=0.8, demand_watts=400)
        for tenant in (self.serve, self.train):
            self.card.add_process(tenant.pid, kind="compute", memory_bytes=20 * GIB)

    def work(self, seconds: float = 0.1, *, grow: int = 0) -> None:
        """Time passes: CPU is used, and device memory grows by so many bytes."""
        time.sleep(seconds)
        for tenant in (self.serve, self.train):
            tenant.use_cpu(2.0 * seconds)
        if grow:
            self.used = min(self.used + grow, 79 * GIB)
            self.card.set(memory_used_bytes=self.used)

    def settle(self, seconds: float = 2.3) -> None:
        """Until CPU use is known: two readings of a sensor that comes every two seconds."""
        self.idle(seconds)

    def idle(self, seconds: float) -> None:
        until_ = time.monotonic() + seconds
        while time.monotonic() < until_:
            self.work()

    def press(self, *, seconds: float = 30.0) -> str:
        """Grow over the mark until train is held back; its cpu.max then."""

        def held() -> str:
            self.work(grow=GIB // 2)
            text = self.train.cgroup.read("cpu.max")
            return "" if text == UNTOUCHED else text

        return until("train is held back", held, seconds=seconds)

    def relax(self) -> None:
        """The load goes away."""
        self.used = 30 * GIB
        self.card.set(memory_used_bytes=self.used)

    def untouched(self) -> bool:
        return self.train.cgroup.read("cpu.max") == UNTOUCHED

    def put_back(self, seconds: float = 20.0) -> None:
        def back() -> bool:
            self.work()
            return self.untouched()

        until("cpu.max is as it was", back, seconds=seconds)

    def run(self) -> Daemon:
        daemon = self.stage.daemon().ready()
        self.settle()
        return daemon


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    if cgroup2_mount() is None:
        pytest.skip("needs a writable cgroup v2 mount: run as root where one is mounted")
    with Stage(tmp_path, [H100_80GB]) as stage:
        yield Host(stage)


@pytest.fixture
def small(host: Host) -> Iterator[Path]:
    """The state directory on a disk of 64 KiB."""
    state = host.stage.folder / "state"
    state.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "none", state], check=True)
    yield state
    for daemon in host.stage.daemons:
        if daemon.process.poll() is None:
            daemon.stop()
    subprocess.run(["umount", state], check=True)


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 512)
        except OSError:
            return
