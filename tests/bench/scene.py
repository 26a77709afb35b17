"""Hosts to measure on: cards with work on them, tenants of all levels, an agent as an operator has it."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

from tests.bench.scrape import get
from tests.fakes.nvml import GIB, H100_80GB
from tests.stage import Daemon, Stage
from tests.stage.stage import until

LEVELS = ("L1", "L2", "L3", "L3")

# Everything as it comes, but for the places, and for CPU pressure: that of the machine which measures
# is nobody's business. One tenant never appears, so that the agent has to look at each exec.
_CONFIG = """
mode = "enforce"
tick = "{tick}"
[paths]
state_dir = "{folder}/state"
socket = "{folder}/agent.sock"
cgroup_root = "{folder}/cgroup"
kernel_log = "{folder}/kmsg"
[api]
group = ""
metrics_listen = "127.0.0.1:{port}"
[log]
format = "json"
[backpressure]
cpu_pressure_high = "100%"
cpu_pressure_clear = "99%"
"""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody has now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Scene:
    """A host, and where its agent is asked for metrics."""

    def __init__(self, stage: Stage, port: int) -> None:
        self.stage = stage
        self.port = port

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that is to see the cards."""
        return {**os.environ, **self.stage.driver.env}

    def populate(self, tenants: int, processes: int) -> None:
        """So many tenants, level after level, with so many processes, all of them on a card."""
        staged = [self.stage.tenant(f"tenant{number:03d}") for number in range(tenants)]
        pids = [s.pid for s in staged]
        pids += [staged[number % tenants].one_more() for number in range(processes - tenants)]
        cards = self.stage.cards
        share = 55 * GIB * len(cards) // max(len(pids), 1)
        for number, pid in enumerate(pids):
            cards[number % len(cards)].add_process(pid, memory_bytes=share)
        for card in cards:
            card.set(
                memory_used_bytes=56 * GIB,
                temperature_celsius=62,
                demand_watts=420,
                utilization=0.7,
            )

    def work(self, dice: random.Random) -> None:
        """A second's work: what the driver says of cards and processes changes."""
        for card in self.stage.cards:
            with self.stage.driver.writing():
                busy = dice.uniform(0.5, 0.9)
                card.set(utilization=busy, demand_watts=300 + 200 * busy)
                for pid in (pids := card.pids):
                    card.utilization_sample(pid, sm=busy / len(pids), memory=0.1)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Work goes on while this lasts."""
        stop = threading.Event()
        dice = random.Random(2)

        def every_second() -> None:
            while not stop.wait(1.0):
                self.work(dice)

        thread = threading.Thread(target=every_second)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    @contextlib.contextmanager
    def running(self) -> Iterator[Daemon]:
        """The agent, ready, and work for it to see."""
        with self.stage.running() as daemon, self.working():
            yield daemon


@contextlib.contextmanager
def scene(*, cards: int, tenants: int, processes: int = 0, tick: str = "1s") -> Iterator[Scene]:
    """Everything ends with the context."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        Stage(Path(folder), [H100_80GB] * cards) as stage,
    ):
        here = Scene(stage, free_port())
        here.populate(tenants, max(processes, tenants))
        text = _CONFIG.format(folder=folder, port=here.port, tick=tick)
        text += stage.rule("absent", "L1")
        for number, name in enumerate(stage.tenants):
            text += stage.rule(name, LEVELS[number % len(LEVELS)])
        stage.config.write_text(text)
        yield here


def answers(port: int, path: str) -> bool:
    """Whether an HTTP server on this port says 200."""
    with contextlib.suppress(OSError, HTTPException):
        get(port, path)
        return True
    return False


@contextlib.contextmanager
def exporter(here: Scene) -> Iterator[tuple[int, int]]:
    """nvitop-exporter on the same cards: its PID and its port."""
    port = free_port()
    arguments = ["-m", "nvitop_exporter", "--bind-address", "127.0.0.1", "--port", str(port)]
    with (here.stage.folder / "exporter.log").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, *arguments], env=here.environment, stdout=said, stderr=said
        )
    try:
        until("nvitop-exporter answers", lambda: answers(port, "/metrics"), seconds=30)
        yield process.pid, port
    finally:
        process.kill()
        process.wait()
