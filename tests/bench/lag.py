"""How late an event loop serves what is due, with the whole agent in it or with nothing.

    python -m tests.bench.lag OUT [CONFIG]

runs `daemon.Agent` on CONFIG exactly as `gpuagent daemon` does and, in the same event loop, a task
that is due every 5 ms; without CONFIG that task alone, which shows what the machine itself adds. On
SIGTERM it ends and writes to OUT a list of [monotonic seconds at which due, seconds late].

A task that sleeps anew after each turn would count a standstill of 100 ms once. Here every turn that
fell into it counts, each with its own lateness, as requests that arrive at random would see it.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from gpuagent import log
from gpuagent.act.statedir import hold
from gpuagent.configfile import load
from gpuagent.daemon import Agent

EVERY_SECONDS = 0.005

Lags = list[tuple[float, float]]


async def sample(lags: Lags) -> None:
    """Until cancelled."""
    due = time.monotonic()
    while True:
        due += EVERY_SECONDS
        await asyncio.sleep(due - time.monotonic())
        lags.append((due, time.monotonic() - due))


async def _alone(lags: Lags) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    async with asyncio.TaskGroup() as group:
        sampling = group.create_task(sample(lags))
        await stopping.wait()
        sampling.cancel()


async def _with_agent(config: str, lags: Lags) -> None:
    loaded = load(config)
    log.setup(level=loaded.config.log.level, form=loaded.config.log.format)
    with hold(loaded.config.paths.state_dir):
        async with asyncio.TaskGroup() as group:
            sampling = group.create_task(sample(lags))
            await Agent(loaded).run()
            sampling.cancel()


class Lagging:
    """Such a process. Use as a context: it does not outlive it."""

    def __init__(
        self, folder: Path, config: str = "", env: Mapping[str, str] | None = None
    ) -> None:
        name = "agent" if config else "alone"
        self._out = folder / f"lag-{name}.json"
        self._log = folder / f"lag-{name}.log"
        arguments = [str(self._out), *([config] if config else [])]
        with self._log.open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.bench.lag", *arguments],
                env={**os.environ, **(env or {})},
                stdout=said,
                stderr=said,
            )

    def end(self) -> Lags:
        """End it; what it has seen. RuntimeError, with its last words, where it failed."""
        self._process.send_signal(signal.SIGTERM)
        if self._process.wait(30):
            raise RuntimeError(self._log.read_text(errors="replace")[-500:])
        return [(due, late) for due, late in json.loads(self._out.read_text())]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def main(out: str, config: str = "") -> None:
    lags: Lags = []
    asyncio.run(_with_agent(config, lags) if config else _alone(lags))
    with open(out, "w", encoding="ascii") as file:
        json.dump(lags, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
