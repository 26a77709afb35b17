"""Tenants in the virtual machine: real services and scopes that use CPU and are on the fake card."""

import sys
import time
from pathlib import Path

from tests.e2e import systemd
from tests.e2e.pace import Pace
from tests.fakes.nvml import GIB, FakeGpu

UNLIMITED = float("inf")
_BURNER = Path(__file__).with_name("burner.py")
_SERVICE = """[Unit]
Description=e2e: a tenant
[Service]
Type=exec
Slice={place}
ExecStart={command}
"""
# Without such a property of its own or of a sibling, a unit has no cpu.max and no cpu.weight.
CONTROLLED = "CPUWeight=100\n"
CONTROLS = ("cpu.max", "cpu.weight", "io.weight", "memory.high", "memory.max", "cgroup.freeze")
"""Control files that the agent might ever write."""


class Tenant:
    """One process in a unit of its own, with memory on the card while it runs."""

    def __init__(
        self, name: str, unit: str, *, share: float, place: str, card: FakeGpu, pace: Pace
    ) -> None:
        """`share` of a CPU is what it wants; `place` is the slice it runs in."""
        self.name = name
        self.unit = unit
        self._place = place
        self._share = share
        self._card = card
        self._pace = pace
        self._pid = 0

    # ---- life ----

    @property
    def _command(self) -> str:
        return f"{sys.executable} -S {_BURNER} {self._share}"

    def lay(self, more: str = "") -> bool:
        """Write its unit file; whether that changes anything."""
        return systemd.lay(
            self.unit, _SERVICE.format(place=self._place, command=self._command) + more
        )

    def start(self) -> None:
        """Anew, with nothing set that its unit does not say."""
        self.stop()
        systemd.forget_properties(self.unit)
        if self.unit.endswith(".service"):
            systemd.call("systemctl", "start", self.unit)
        else:
            scope = ["systemd-run", "--scope", "--quiet", "--collect", "-p", CONTROLLED.strip()]
            where = [f"--unit={self.unit}", f"--slice={self._place}"]
            systemd.begin(*scope, *where, *self._command.split())
            self._pace.until(f"{self.unit} is there", self.cgroup.is_dir)
        self.appear()

    def restart(self) -> None:
        """As an operator restarts it: what is set for the unit stays."""
        self.vanish()
        systemd.call("systemctl", "restart", self.unit)
        self.appear()

    def stop(self) -> None:
        self.vanish()
        systemd.run("systemctl", "stop", self.unit)
        systemd.run("systemctl", "reset-failed", self.unit)

    def appear(self) -> None:
        """On the card: it has used CUDA."""

        def seen() -> int:
            text = (self.cgroup / "cgroup.procs").read_text()
            return next((int(line) for line in text.split() if _burns(line)), 0)

        self._pid = self._pace.until(f"{self.unit} has a process", seen)
        self._card.add_process(self._pid, kind="compute", memory_bytes=20 * GIB)

    def vanish(self) -> None:
        if self._pid in self._card.pids:
            self._card.remove_process(self._pid)

    def wants_memory(self, size: int) -> None:
        self._card.add_process(self._pid, kind="compute", memory_bytes=size)

    # ---- its cgroup ----

    @property
    def cgroup(self) -> Path:
        return systemd.CGROUPS / self._place / self.unit

    def read(self, file: str) -> str:
        return (self.cgroup / file).read_text().strip()

    def write(self, file: str, text: str) -> None:
        """As a rival does, past systemd."""
        with (self.cgroup / file).open("r+") as control:
            control.write(text)

    @property
    def cores(self) -> float:
        """cpu.max in cores; without the CPU controller nothing limits it."""
        try:
            quota, period = self.read("cpu.max").split()
        except FileNotFoundError:
            return UNLIMITED
        return UNLIMITED if quota == "max" else int(quota) / int(period)

    @property
    def held(self) -> bool:
        return self.cores != UNLIMITED

    @property
    def frozen(self) -> bool:
        """Whether all of it stands still just now."""
        return "frozen 1" in self.read("cgroup.events").splitlines()

    @property
    def controls(self) -> dict[str, str]:
        """Every control file that the agent might ever write, and what systemd keeps for the unit."""
        there = [name for name in CONTROLS if (self.cgroup / name).exists()]
        return {name: self.read(name) for name in there} | systemd.properties_set(self.unit)

    def cpu_used(self, seconds: float) -> float:
        """Cores used on average from now on for so long."""
        began, used = time.monotonic(), self._cpu_seconds()
        time.sleep(seconds)
        return (self._cpu_seconds() - used) / (time.monotonic() - began)

    def _cpu_seconds(self) -> float:
        lines = (line.split() for line in self.read("cpu.stat").splitlines())
        return int(dict(lines)["usage_usec"]) / 1e6


def _burns(pid: str) -> bool:
    """Whether it is past its exec."""
    try:
        return str(_BURNER).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
