"""The host that checks are made on: a card, three tenants, the agent, and what drives them."""

from pathlib import Path

from tests.e2e import systemd
from tests.e2e.agent import UNIT as AGENT_UNIT
from tests.e2e.agent import Agent
from tests.e2e.pace import Pace
from tests.e2e.tenants import CONTROLLED, Tenant
from tests.fakes.nvml import GIB, H100_80GB, FakeNvml

DRIVER = Path("/dev/shm/e2e")
"""Under /dev, as the driver's own files are: the unit's sandbox leaves it alone."""

# What is slow in here must not pass for a fault; what is quick keeps the checks short.
CONFIG = """
mode = "{mode}"
[nvml]
sample_interval = "500ms"
call_deadline = "20s"
slow_interval = "30s"
[backpressure]
hold = "1s"
within = "5s"
dwell = "1s"
recover = "50%"
probe_min = "1s"
probe_max = "2s"
time_box = "1h"
ineffective_for = "1s"
cpu_pressure_high = "100%"
cpu_pressure_clear = "99%"
cpu_busy = "1%"
"""
SERVE = """
[[tenants]]
name = "serve"
sla = "L1"
match.unit = "serve.service"
latency_slo = "200ms"
"""
TRAIN = """
[[tenants]]
name = "train"
sla = "L3"
match.unit = "train.service"
"""
OTHERS = """
[[tenants]]
name = "plain"
sla = "L3"
match.unit = "plain.service"

[[tenants]]
name = "batch"
sla = "L3"
match.unit = "batch-*.scope"
"""


UNITS = ("serve.service", "train.service", "plain.service", "batch-1.scope")


def quiet() -> None:
    """Stop whatever of ours goes on."""
    systemd.run("systemctl", "stop", AGENT_UNIT, *UNITS)


class Host:
    """What a check gets. It begins with nobody held, a cool card and an agent that enforces."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.until = pace.until
        DRIVER.mkdir(exist_ok=True)
        (DRIVER / "nvml.state").unlink(missing_ok=True)
        self.driver = FakeNvml.create(DRIVER, [H100_80GB])
        self.card = self.driver.gpus[0]
        self.serve = self._tenant("serve", "serve.service", 0.1)
        self.train = self._tenant("train", "train.service", 0.5)
        self.batch = self._tenant("batch", "batch-1.scope", 0.3)
        self.plain = self._tenant("plain", "plain.service", 0.3, place="plain.slice")
        self.agent = Agent(self.driver, pace)
        self._used = 40 * GIB
        systemd.run("groupadd", "--system", "--force", "gpuagent")
        self.agent.install()
        for tenant in (self.serve, self.train):
            tenant.lay(CONTROLLED)
        self.plain.lay()
        systemd.read_again()

    def _tenant(self, name: str, unit: str, share: float, *, place: str = "system.slice") -> Tenant:
        return Tenant(name, unit, share=share, place=place, card=self.card, pace=self.pace)

    # ---- between the checks ----

    def prepare(self) -> None:
        """As every check finds it. What is as it should be already is left as it is."""
        self.relax()
        self.configure()
        for tenant in (self.serve, self.train):
            if not tenant.cgroup.is_dir() or tenant.held or systemd.properties_set(tenant.unit):
                tenant.start()
        if not self.agent.active:
            self.agent.start()
        self.until("the card and the tenants are known, and what they use", self._known, units=20)

    def _known(self) -> bool:
        if not self.agent.client.get("/v1/health")["ok"]:
            return False
        rows = {row["name"]: row for row in self.agent.client.get("/v1/tenants")["items"]}
        return all(
            name in rows and rows[name]["cpu_cores"] is not None for name in ("serve", "train")
        )

    def settle(self) -> None:
        """After a check: the agent lets go of everything and forgets why, and goes on."""
        self.relax()
        for tenant in (self.batch, self.plain):
            if tenant.cgroup.is_dir():
                tenant.stop()
        if self.agent.active:
            self.configure()
            self.agent.reload()
            self.agent.client.post("/v1/pause")
            self.until("all is put back", lambda: not self.agent.held and not self.train.held)
            self.agent.client.post("/v1/unpause")
            self.agent.forget_crashes()

    def clear(self) -> None:
        """After a check that failed: whatever it has left is removed."""
        self.agent.forget()
        for tenant in (self.serve, self.train, self.batch, self.plain):
            tenant.stop()
            systemd.forget_properties(tenant.unit)

    def end(self) -> None:
        """Nothing of ours goes on."""
        self.clear()
        self.driver.unload_driver(force=True)

    # ---- what goes on ----

    def configure(self, rest: str = "", *, mode: str = "enforce", tenants: str = "") -> None:
        """`rest` goes on in [backpressure], or is tables of its own."""
        rules = tenants or SERVE + TRAIN + OTHERS
        self.agent.configure(CONFIG.format(mode=mode) + rest + rules)

    def heat(self) -> None:
        self.card.set(temperature_celsius=86, utilization=0.95, demand_watts=600)

    def relax(self) -> None:
        """Cool, and with memory to spare."""
        self._used = 40 * GIB
        self.card.set(
            temperature_celsius=55, utilization=0.5, demand_watts=300, memory_used_bytes=self._used
        )

    def grow(self) -> None:
        """Train takes more device memory, beyond the mark and ever more."""
        self._used = min(max(self._used, 70 * GIB) + GIB // 8, 79 * GIB)
        self.train.wants_memory(self._used - 30 * GIB)
        self.card.set(memory_used_bytes=self._used)

    def hold(self, tenant: Tenant | None = None) -> Tenant:
        """Heat until the tenant is held back, by default train; gives the tenant."""
        held = tenant or self.train
        self.heat()
        self.until(f"{held.name} is held back", lambda: held.held)
        return held

    def put_back(self, tenant: Tenant | None = None, *, units: float = 12.0) -> None:
        """Wait until nothing of ours is left on a tenant, by default on train."""
        back = tenant or self.train
        self.until(f"cpu.max of {back.name} is put back", lambda: not back.held, units=units)
        self.no_trace(back)

    def no_trace(self, tenant: Tenant) -> None:
        """cpu.max as it was, and no drop-in of it. A file may come back a moment before systemd knows."""
        assert tenant.read("cpu.max") == "max 100000", tenant.read("cpu.max")
        assert tenant.read("cpu.weight") == "100", tenant.read("cpu.weight")
        self.until(
            f"no drop-in is left of {tenant.unit}",
            lambda: not systemd.properties_set(tenant.unit),
            units=2,
        )
