"""CPU time, memory and wall time of processes, as /proc tells them."""

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence

import msgspec
import psutil

MIB = 1024**2


def family(pid: int) -> list[int]:
    """The process and all that descend from it."""
    root = psutil.Process(pid)
    return [pid, *(p.pid for p in root.children(recursive=True))]


def child_of(pid: int, word: str) -> int:
    """The descendant that has `word` on its command line. AssertionError if there is not one."""
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(word in argument for argument in child.cmdline()):
                return int(child.pid)
    raise AssertionError(f"process {pid} has no child that runs {word}")


def cpu_seconds(pid: int) -> float:
    """User and system time of the process and of its children, those that have ended included.

    The kernel counts it exactly and tells it in hundredths of a second.
    """
    total = 0.0
    for member in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(psutil.Process(member).cpu_times()[:4])
    return total


def resident_mib(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss) / MIB


class CpuWindow:
    """How much of one core a family of processes uses, from here until `percent`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began = time.monotonic()
        self._before = cpu_seconds(pid)

    def percent(self) -> float:
        used = cpu_seconds(self._pid) - self._before
        return 100 * used / (time.monotonic() - self._began)


class Spent(msgspec.Struct, frozen=True):
    """What a command took."""

    seconds: float
    peak_mib: float


def command(arguments: Sequence[str], environment: Mapping[str, str]) -> Spent:
    """Run a command to its end. RuntimeError, with its words, if it fails.

    The peak is looked for every few milliseconds: wait4(2) would tell at least our own, which the
    kernel passes on to whatever a process executes.
    """
    with tempfile.TemporaryFile() as said:
        began = time.monotonic()
        with subprocess.Popen(
            arguments, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=said
        ) as process:
            peak = 0.0
            while process.poll() is None:
                peak = max(peak, _peak_mib(process.pid))
                time.sleep(0.003)
        seconds = time.monotonic() - began
        if process.returncode:
            said.seek(0)
            raise RuntimeError(f"{arguments}: {said.read().decode(errors='replace')}")
    return Spent(seconds, peak)


def _peak_mib(pid: int) -> float:
    """VmHWM of proc_pid_status(5); 0 once the process has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return 0.0
