"""Real cgroups for real processes, and plain control files at the same paths for the agent."""

import contextlib
import os
import shutil
from pathlib import Path


def cgroup2_mount() -> Path | None:
    """Where cgroup v2 is mounted and cgroups can be made; None where that cannot be done."""
    with open("/proc/mounts", encoding="utf-8") as file:
        mounts = [line.split() for line in file]
    for _, where, kind, options, *_ in mounts:
        if kind == "cgroup2" and "rw" in options.split(",") and os.access(where, os.W_OK):
            return Path(where)
    return None


CONTROLS = {
    "cpu.max": "max 100000",
    "cpu.weight": "100",
    "cpu.stat": "usage_usec 0\nuser_usec 0\nsystem_usec 0\nnr_periods 0\nnr_throttled 0\n"
    "throttled_usec 0",
    "cpu.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    "full avg10=0.00 avg60=0.00 avg300=0.00 total=0",
    "memory.current": str(64 * 1024**2),
}


class CgroupMirror:
    """A folder of control files that stands for a cgroup, and the real cgroup of the same path."""

    def __init__(self, mount: Path, tree: Path, path: str) -> None:
        self.path = path
        self.files = tree / path.lstrip("/")
        self.real = mount / path.lstrip("/")

    def make(self) -> None:
        self.real.mkdir(parents=True, exist_ok=True)
        folder = self.files
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in CONTROLS.items():
            (folder / name).write_text(text + "\n")

    def take(self, pid: int) -> None:
        (self.real / "cgroup.procs").write_text(str(pid))

    def read(self, file: str) -> str:
        return (self.files / file).read_text().strip()

    def write(self, file: str, text: str) -> None:
        """As the kernel or a rival would: the file stays the same file."""
        with (self.files / file).open("r+") as control:
            control.write(text + "\n")
            control.truncate()

    @property
    def cores(self) -> float:
        """cpu.max in cores; infinite when unlimited."""
        quota, period = self.read("cpu.max").split()
        return float("inf") if quota == "max" else int(quota) / int(period)

    def vanish(self) -> None:
        """Remove both; the processes must have ended."""
        with contextlib.suppress(OSError):
            self.real.rmdir()
        shutil.rmtree(self.files, ignore_errors=True)
