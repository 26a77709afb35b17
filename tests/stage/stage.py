"""The stage: cards, tenants, a configuration, and daemons to run on it."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self, TypeVar

from tests.fakes.nvml import H100_80GB, FakeNvml, Profile
from tests.stage.cgroups import CgroupMirror, cgroup2_mount, remove, stage_slice, sweep
from tests.stage.client import ApiError, Client

T = TypeVar("T")
_SERIAL = itertools.count()

# CPU pressure of the machine that runs the tests is nobody's business but its own.
CONFIG = """
mode = "{mode}"
[paths]
state_dir = "{folder}/state"
socket = "{folder}/agent.sock"
cgroup_root = "{folder}/cgroup"
kernel_log = "{folder}/kmsg"
[api]
group = ""
metrics_listen = "127.0.0.1:0"
[log]
level = "debug"
format = "json"
[backpressure]
cpu_pressure_high = "100%"
cpu_pressure_clear = "99%"
"""

QUICK = """
hold = "400ms"
within = "1s"
dwell = "500ms"
probe_min = "1s"
probe_max = "2s"
[nvml]
sample_interval = "100ms"
process_interval = "500ms"
slow_interval = "1s"
"""
"""For tests: the same behaviour, sooner."""


def until(what: str, condition: Callable[[], T], *, seconds: float = 20.0) -> T:
    """The first true value of `condition`; AssertionError with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds:g} s")
        time.sleep(0.05)


class Staged:
    """A tenant: one process that does nothing, in a cgroup of its own, with memory on a card."""

    def __init__(self, stage: "Stage", name: str) -> None:
        self.name = name
        self.cgroup = CgroupMirror(stage.mount, stage.tree, f"/{stage.slice}/{stage.unit(name)}")
        self.cgroup.make()
        self._stage = stage
        self.processes = [stage.idler()]
        self.cgroup.take(self.pid)
        self._used_usec = 0.0

    @property
    def pid(self) -> int:
        return self.processes[0].pid

    def one_more(self) -> int:
        """Another process of the tenant; its pid."""
        process = self._stage.idler()
        self.processes.append(process)
        self.cgroup.take(process.pid)
        return process.pid

    def use_cpu(self, core_seconds: float) -> None:
        """As if it had used so much CPU since the last call."""
        self._used_usec += core_seconds * 1e6
        self.cgroup.write(
            "cpu.stat",
            f"usage_usec {self._used_usec:.0f}\nnr_periods 0\nnr_throttled 0\nthrottled_usec 0",
        )

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


class Daemon:
    """`gpuagent daemon` in a process of its own."""

    def __init__(self, stage: "Stage") -> None:
        self._log = stage.folder / f"daemon-{next(_SERIAL)}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                stage.words("daemon"),
                env=os.environ | stage.driver.env | stage.environment,
                stderr=log,
                stdout=log,
            )
        self.client = Client(str(stage.folder / "agent.sock"))

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def ready(self, seconds: float = 30.0) -> Self:
        """Wait until it has looked at the host once."""

        def asked() -> bool:
            assert self.process.poll() is None, f"the daemon ended: {self.log}"
            with contextlib.suppress(OSError, ApiError):
                return self.client.text("/readyz").startswith("ready")
            return False

        until("the daemon is ready", asked, seconds=seconds)
        return self

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self, seconds: float = 20.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def kill(self) -> None:
        """SIGKILL: nothing is put back by the one who dies."""
        self.process.kill()
        self.process.wait()


class Stage:
    """Use as a context: whatever was started is ended, whatever was made is removed."""

    def __init__(self, folder: Path, cards: Sequence[Profile] = (H100_80GB,)) -> None:
        mount = cgroup2_mount()
        if mount is None:
            raise RuntimeError("a writable cgroup v2 mount is needed to put tenants into cgroups")
        sweep(mount)
        self.mount = mount
        self.folder = folder
        self.tree = folder / "cgroup"
        self.tree.mkdir()
        (self.tree / "cgroup.controllers").write_text("cpu memory\n")
        (folder / "kmsg").touch()
        self.config = folder / "gpuagent.toml"
        self.slice = stage_slice(next(_SERIAL))
        # Open as long as this process lives: who reads it ends with it, whatever ends it.
        self._lifeline = os.pipe()
        self.environment: dict[str, str] = {}
        self.before: tuple[str, ...] = ()
        """Words before each command of ours, which end in running it."""
        self.driver = FakeNvml.create(folder, cards)
        self.cards = self.driver.gpus
        for card in self.cards:
            card.idle()
        self.tenants: dict[str, Staged] = {}
        self.daemons: list[Daemon] = []
        self.configure()

    def configure(self, rest: str = "", *, mode: str = "enforce", law: str = QUICK) -> None:
        """`law` goes on in the table [backpressure]; `rest` holds further tables."""
        self.config.write_text(CONFIG.format(mode=mode, folder=self.folder) + law + rest)

    def unit(self, name: str) -> str:
        """The service that a tenant of this name runs in: no other stage on this host has it."""
        return f"{self.slice.removesuffix('.slice')}-{name}.service"

    def rule(self, name: str, level: str) -> str:
        """A table of the configuration that claims the tenant of this name."""
        return f"""
[[tenants]]
name = "{name}"
sla = "{level}"
match.unit = "{self.unit(name)}"
"""

    def tenant(self, name: str) -> Staged:
        staged = self.tenants[name] = Staged(self, name)
        return staged

    def idler(self) -> subprocess.Popen[bytes]:
        """A process that waits for this one to end."""
        return subprocess.Popen(["/bin/cat"], stdin=self._lifeline[0])

    def daemon(self) -> Daemon:
        daemon = Daemon(self)
        self.daemons.append(daemon)
        return daemon

    @contextlib.contextmanager
    def running(self) -> Iterator[Daemon]:
        daemon = self.daemon().ready()
        try:
            yield daemon
        finally:
            daemon.stop()

    def words(self, *args: str) -> list[str]:
        """Of a command of ours."""
        return [*self.before, sys.executable, "-m", "gpuagent", "--config", str(self.config), *args]

    def command(self, *args: str) -> subprocess.CompletedProcess[str]:
        """The command line, to its end."""
        return subprocess.run(
            self.words(*args),
            env=os.environ | self.driver.env | self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def close_daemons(self) -> None:
        """End those that run, at once."""
        for daemon in self.daemons:
            if daemon.process.poll() is None:
                daemon.kill()

    def close(self) -> None:
        self.close_daemons()
        for staged in self.tenants.values():
            staged.end()
        for staged in self.tenants.values():
            remove(staged.cgroup.real)
        remove(self.mount / self.slice)
        for end in self._lifeline:
            os.close(end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
