"""Where an MPS control daemon of our own runs, so that it outlives the agent: a unit, or a session.

Under systemd it is `gpuagent-mps@NAME.service`, for whatever the agent starts by itself is in the
agent's cgroup and would be ended with it. Elsewhere it is a process in a session of its own.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from typing import Protocol

from gpuagent.config import MpsGroup
from gpuagent.errors import Unavailable
from gpuagent.host import tool
from gpuagent.host.mps_control import environment, run

MARK = "GPUAGENT_MPS_GROUP"
"""In the environment of our own daemons and their servers, by which they are found again."""
_START_SECONDS = 20.0
_END_SECONDS = 15.0
_TERM_SECONDS = 2.0
_POLL_SECONDS = 0.05


class Keeper(Protocol):
    """Begins and ends the process of a daemon. Whether it answers and works is asked by others."""

    async def begin(self, group: MpsGroup) -> None:
        """Raises Unsupported, Unavailable."""

    def running(self, group: MpsGroup) -> None:
        """It runs: see that what it needs to be ended well is there."""

    async def end(self, group: MpsGroup) -> None:
        """With all its servers, whoever is connected. Raises Unavailable where it stays."""


def settings(group: MpsGroup, program: str, logs: str) -> dict[str, str]:
    """The environment of a group's daemon."""
    return environment(group.pipe_directory) | {
        "CUDA_MPS_LOG_DIRECTORY": os.path.join(logs, group.name),
        "CUDA_VISIBLE_DEVICES": ",".join(group.gpus),
        "GPUAGENT_MPS_CONTROL": program,
        MARK: group.name,
    }


class Unit:
    """An instance of systemd's template `gpuagent-mps@.service`."""

    def __init__(
        self, program: str, *, folder: str, logs: str, systemctl: str = "systemctl"
    ) -> None:
        """`folder` is where the unit looks for its environment: /run/gpuagent-mps."""
        self._program = program
        self._folder = folder
        self._logs = logs
        self._systemctl = systemctl

    async def begin(self, group: MpsGroup) -> None:
        try:
            self._tell(group)
        except OSError as error:
            raise Unavailable(f"{self._folder}: {error.strerror}") from error
        await self._ask("start", group, _START_SECONDS)

    def running(self, group: MpsGroup) -> None:
        """Without its environment systemd cannot tell it to quit, and kills it with its clients."""
        with contextlib.suppress(OSError):  # the daemon works all the same
            self._tell(group)

    def _tell(self, group: MpsGroup) -> None:
        """See that the environment is where the unit looks for it. Raises OSError."""
        path = os.path.join(self._folder, f"{group.name}.env")
        text = environment_file(settings(group, self._program, self._logs))
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            if file.read() == text:
                return
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        _write(path, text)

    async def end(self, group: MpsGroup) -> None:
        await self._ask("stop", group, _END_SECONDS)

    async def _ask(self, verb: str, group: MpsGroup, seconds: float) -> None:
        unit = f"gpuagent-mps@{group.name}.service"
        systemctl = tool.find(self._systemctl, "systemd runs this host")
        ran = await tool.run((systemctl, "--no-ask-password", verb, unit), seconds=seconds)
        if ran.code:
            raise Unavailable(f"systemctl {verb} {unit} fails: {ran.line}")
        if not ran.in_time:
            raise Unavailable(f"systemctl {verb} {unit} takes longer than {seconds:g} s")


def _write(path: str, text: bytes) -> None:
    """Whole or not at all. Raises OSError."""
    fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(text)
    os.replace(f"{path}.new", path)


def environment_file(values: Mapping[str, str]) -> bytes:
    """As systemd reads it (systemd.exec(5), EnvironmentFile=)."""
    quoted = (
        (name, "".join(f"\\{c}" if c in '"\\$`' else c for c in value))
        for name, value in sorted(values.items())
    )
    return "".join(f'{name}="{value}"\n' for name, value in quoted).encode()


class Detached:
    """A process in a session of its own, where there is no systemd to start it."""

    def __init__(self, program: str, *, logs: str, proc: str = "/proc") -> None:
        self._program = program
        self._logs = logs
        self._proc = proc

    async def begin(self, group: MpsGroup) -> None:
        env = settings(group, self._program, self._logs)
        with contextlib.suppress(OSError):  # without one it only keeps no logs
            os.makedirs(env["CUDA_MPS_LOG_DIRECTORY"], mode=0o755, exist_ok=True)
        # With -d it comes back once it listens, and has left a child that is nobody's.
        code, out, complaint = await run((self._program, "-d"), env, seconds=_START_SECONDS)
        if code:
            words = complaint or out.strip() or f"exit code {code}"
            raise Unavailable(f"{self._program} -d fails: {words}")

    def running(self, group: MpsGroup) -> None:
        """Nobody but the agent ends it."""

    async def end(self, group: MpsGroup) -> None:
        mark = f"{MARK}={group.name}".encode()
        for number, seconds in ((signal.SIGTERM, _TERM_SECONDS), (signal.SIGKILL, _TERM_SECONDS)):
            left = await self._until_gone(mark, number, seconds)
            if not left:
                return
        raise Unavailable(f"processes of the MPS group {group.name} do not end: {left}")

    async def _until_gone(self, mark: bytes, number: signal.Signals, seconds: float) -> list[int]:
        """Signal those that bear the mark; who is left after so many seconds."""
        for pid in self._marked(mark):
            self._signal(pid, number, mark)
        deadline = asyncio.get_running_loop().time() + seconds
        while left := list(self._marked(mark)):
            if asyncio.get_running_loop().time() >= deadline:
                break
            await asyncio.sleep(_POLL_SECONDS)
        return left

    def _marked(self, mark: bytes) -> Iterator[int]:
        pids = [int(name) for name in os.listdir(self._proc) if name.isdecimal()]
        return (pid for pid in pids if self._bears(pid, mark))

    def _bears(self, pid: int, mark: bytes) -> bool:
        try:
            # Ours only: anybody can set a variable.
            if os.stat(f"{self._proc}/{pid}").st_uid != os.geteuid():
                return False
            with open(f"{self._proc}/{pid}/environ", "rb") as file:
                return mark in file.read().split(b"\0")
        except OSError:
            return False

    def _signal(self, pid: int, number: signal.Signals, mark: bytes) -> None:
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(pid)
            try:
                if self._bears(pid, mark):  # else the number is another's by now
                    signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)
