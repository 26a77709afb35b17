"""The real MPS control daemons and a stand-in for them: where they are, how a test runs them."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

BUILT = Path(__file__).resolve().parents[3] / "build" / "mps"
"""`make setup` unpacks the real ones there."""
VERSIONS = ("535", "550")
_CONTROL = Path(__file__).with_name("control.py")
_SERVER = """#!/bin/sh
exec sleep 300
"""


class Program:
    """A control program, and the folder of the daemon that a test starts with it."""

    def __init__(self, path: Path, folder: Path, env: Mapping[str, str]) -> None:
        self.path = str(path)
        self.pipes = str(folder / "p")
        self.logs = str(folder / "l")
        self._env = {
            "PATH": f"{folder}/bin:{path.parent}:/usr/bin:/bin",
            "CUDA_MPS_PIPE_DIRECTORY": self.pipes,
            "CUDA_MPS_LOG_DIRECTORY": self.logs,
            **env,
        }

    async def start(self, **env: str) -> None:
        os.makedirs(self.logs, exist_ok=True)
        process = await asyncio.create_subprocess_exec(
            self.path, "-d", env={**self._env, **env}, start_new_session=True
        )
        assert await process.wait() == 0

    async def say(self, command: str) -> str:
        """What it answers."""
        process = await asyncio.create_subprocess_exec(
            self.path,
            env=self._env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate(f"{command}\n".encode())
        return out.decode()

    def processes(self) -> list[int]:
        """The daemon and its servers, by the folder that is in their environment."""
        mark = f"CUDA_MPS_PIPE_DIRECTORY={self.pipes}"
        return [pid for pid in _pids() if carries(pid, mark)]

    async def end(self) -> None:
        """Kill them, and see them gone."""
        self.kill()
        await self.gone()

    async def gone(self) -> None:
        """Until there is none of them."""
        async with asyncio.timeout(10):
            while self.processes():  # noqa: ASYNC110 - the kernel tells nobody
                await asyncio.sleep(0.01)

    def kill(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)


def fake(folder: Path, **env: str) -> Program:
    """The stand-in, as an executable of its real name."""
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    program = folder / "bin" / "nvidia-cuda-mps-control"
    text = _CONTROL.read_text(encoding="utf-8")
    program.write_text(f"#!{os.path.realpath(sys.executable)} -IS\n{text}", encoding="utf-8")
    program.chmod(0o755)
    return Program(program, folder, env)


def real(version: str, folder: Path, *, server: bool = True) -> Program:
    """The real one, in front of a server that stays, or of the real one, which ends for want of cards."""
    path = BUILT / version / "usr" / "bin" / "nvidia-cuda-mps-control"
    if not os.access(path, os.X_OK):
        pytest.skip(f"no MPS control daemon {version} in {BUILT}: `make setup` could not get it")
    (folder / "bin").mkdir(parents=True)
    if server:
        stands = folder / "bin" / "nvidia-cuda-mps-server"
        stands.write_text(_SERVER, encoding="utf-8")
        stands.chmod(0o755)
    return Program(path, folder, {})


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def carries(pid: int, word: str) -> bool:
    """Whether a process was started with NAME=VALUE in its environment."""
    try:
        return word.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
