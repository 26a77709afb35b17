"""The agent in the virtual machine, as it is shipped: its unit, its socket, its command line."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from gpuagent.act.record import Book, decode_line
from tests.e2e import systemd
from tests.e2e.pace import Pace
from tests.fakes.nvml import FakeNvml
from tests.stage.client import ApiError, Client

UNIT = "gpuagent.service"
_DROP_IN = f"{UNIT}.d/e2e.conf"
SOCKET = "/run/gpuagent/gpuagent.sock"
STATE = Path("/var/lib/gpuagent")
CONFIG = Path("/etc/gpuagent/gpuagent.toml")
_SHIPPED = Path(__file__).parents[2] / "systemd"


class Agent:
    """`gpuagent.service`. Nothing in here knows how the agent works."""

    def __init__(self, driver: FakeNvml, pace: Pace) -> None:
        self._pace = pace
        self.client = Client(SOCKET, timeout=10 * pace.unit)
        self._configured = ""
        variable, value = next(item for item in driver.env.items() if item[0] != "LD_LIBRARY_PATH")
        self._driver = f"[Service]\nEnvironment={variable}={value}\n"

    def install(self) -> None:
        """As the unit's own comment says; beside it what stands for the driver. Takes a read_again."""
        for file in _SHIPPED.glob("*.*"):
            shutil.copy(file, "/etc/systemd/system")
        systemd.lay(_DROP_IN, self._driver)

    def amend(self, text: str = "") -> None:
        """Put lines of [Service] into a drop-in of the unit; none takes them away again."""
        if systemd.lay(_DROP_IN, self._driver + text):
            systemd.read_again()

    # ---- life ----

    def configure(self, text: str) -> None:
        CONFIG.parent.mkdir(exist_ok=True)
        CONFIG.write_text(text)

    def start(self) -> None:
        """It has told systemd that it is ready, and has looked at the host, when this returns."""
        systemd.run("systemctl", "reset-failed", UNIT)
        systemd.call("systemctl", "start", UNIT)
        self.ready()

    def ready(self) -> None:
        self._pace.until("the agent is ready", self._is_ready, units=20)

    def _is_ready(self) -> bool:
        try:
            return self.client.text("/readyz").startswith("ready")
        except (OSError, ApiError):
            return False

    @property
    def active(self) -> bool:
        return self.show("ActiveState")["ActiveState"] == "active"

    def stop(self) -> None:
        systemd.call("systemctl", "stop", UNIT)

    def kill(self) -> None:
        """SIGKILL to the agent itself."""
        systemd.call("systemctl", "kill", "--kill-whom=main", "--signal=KILL", UNIT)

    def reload(self) -> None:
        systemd.call("systemctl", "reload", UNIT)

    def forget(self) -> None:
        """Stop it, whatever it does, and remove what it has kept."""
        self.amend()
        systemd.run("systemctl", "stop", UNIT)
        shutil.rmtree(STATE, ignore_errors=True)

    def show(self, *names: str) -> dict[str, str]:
        return systemd.show(UNIT, *names)

    # ---- what it says ----

    def command(self, *arguments: str, user: str = "root") -> subprocess.CompletedProcess[str]:
        """The command line, as a user."""
        return systemd.run("runuser", "-u", user, "--", "gpuagent", *arguments)

    def knob(self, tenant: str, knob: str) -> dict[str, Any] | None:
        """What it says of a tenant's knob; None where it has nothing to say, or knows no such tenant."""
        try:
            said = self.client.explain(tenant)["knobs"]
        except ApiError as problem:
            if problem.status == 404:
                return None
            raise
        found: list[dict[str, Any]] = [k for k in said if k["knob"] == knob]
        return found[0] if found else None

    def result(self, tenant: str, knob: str = "cgroup_cpu_max") -> str:
        found = self.knob(tenant, knob)
        return found["result"] if found else ""

    def tell_latency(self, tenant: str, seconds: float) -> None:
        """As the tenant does: a p99."""
        body = json.dumps({"quantile": 0.99, "seconds": seconds})
        self.client.text(f"/v1/tenants/{tenant}/latency", "PUT", body)

    @property
    def held(self) -> list[str]:
        """What the ledger has still to put back."""
        file, book = STATE / "ledger.jsonl", Book()
        whole, _, _ = file.read_bytes().rpartition(b"\n") if file.exists() else (b"", b"", b"")
        for line in whole.splitlines():
            record = decode_line(line)
            if record is not None:
                book.apply(record)
        return [f"{entry.knob} of {entry.subject}" for entry in book.entries.values()]

    def forget_crashes(self) -> None:
        """So that no later start takes them for a row of its own and only observes."""
        (STATE / "starts.json").unlink(missing_ok=True)

    @property
    def log(self) -> str:
        return systemd.run("journalctl", "-u", UNIT, "-o", "cat", "-n", "30", "--no-pager").stdout
