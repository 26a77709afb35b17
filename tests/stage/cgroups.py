"""Real cgroups for real processes, and plain control files at the same paths for the agent."""

import contextlib
import os
import re
import shutil
import time
from pathlib import Path

_STAGE = re.compile(r"stage(\d+)x\d+\.slice")


def stage_slice(serial: int) -> str:
    """The name of the slice of a stage of this process."""
    return f"stage{os.getpid()}x{serial}.slice"


def sweep(mount: Path) -> None:
    """Remove the slices of stages whose process has been killed; those in use are left alone.

    Cgroups in which somebody still lives cannot be removed, so that a process number which means
    somebody else here (another namespace, a number used again) does no harm.
    """
    for folder in mount.glob("stage*.slice"):
        found = _STAGE.fullmatch(folder.name)
        if found is None or Path("/proc", found[1]).exists():
            continue
        with contextlib.suppress(OSError):
            for unit in folder.iterdir():
                if unit.is_dir():
                    unit.rmdir()
            folder.rmdir()


def remove(folder: Path, *, seconds: float = 5.0) -> None:
    """Remove a cgroup whose processes have been killed: they leave a moment after their parent knows.

    Nothing is said of one that stays: the next stage sweeps it away.
    """
    deadline = time.monotonic() + seconds
    while folder.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.01)


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
    "cgroup.events": "populated 1\nfrozen 0",
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
        remove(self.real)
        shutil.rmtree(self.files, ignore_errors=True)
