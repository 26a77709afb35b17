"""A long simulated life of the agent: tenants come and go, things break, operators change their minds.

Every tick is held against the invariants of DESIGN 5 and 6; every hour what could grow is measured.
"""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec

from gpuagent.expose.metrics import render
from gpuagent.lab.trial import Trial
from gpuagent.model.inventory import Level
from gpuagent.model.plan import Pause, Snapshot, Unpause
from gpuagent.model.vocab import CPU_MAX, POWER_LIMIT
from gpuagent.sim.scenario import Hang, Happening, Load, Patch, Scenario, Start, Stop, Xid

HOUR = 3600.0
_BUDGETS = (420.0, 500.0, 600.0)
_LEVELS = {
    "chat": "L1",
    "batch": "L2",
    "decode": "L2",
    "training": "L3",
    "graph": "L3",
    "grower": "L3",
    "notebook": "L3",
}
_RUNS = {
    "chat": ("chat", 0),
    "batch": ("batch-inference", 0),
    "training": ("bert-training", 0),
    "grower": ("grower", 0),
    "decode": ("llm-decode", 1),
    "graph": ("graph-training", 1),
    "notebook": ("notebook", 1),
}
SETTLE_SECONDS = 20.0
"""A pause, and a budget that has been cut, have taken hold after so long."""


def life(seconds: float, seed: int) -> Scenario:
    """Two cards, seven tenants, and something every few minutes."""
    made = {
        "name": "week",
        "about": "A long life.",
        "seconds": seconds,
        "cards": [{"profile": "a40"}, {"profile": "a40"}],
        "tenants": [
            {
                "name": name,
                "run": run,
                "card": card,
                **({"objective": {"seconds": 0.12}} if name == "chat" else {}),
            }
            for name, (run, card) in _RUNS.items()
        ],
        "agent": {
            "mode": "enforce",
            "power": {"budget": "500W"},
            "tenants": [
                {
                    "name": name,
                    "sla": level,
                    "match": {"unit": f"{name}.service"},
                    **({"latency_slo": "120ms"} if name == "chat" else {}),
                }
                for name, level in _LEVELS.items()
            ],
        },
    }
    return msgspec.structs.replace(
        msgspec.convert(made, Scenario), timeline=tuple(_happenings(seconds, seed))
    )


def _happenings(seconds: float, seed: int) -> Iterator[Happening]:
    random = Random(seed)
    at = 120.0
    while at < seconds - 60.0:
        name = random.choice([n for n in _RUNS if n != "chat"])
        match random.randrange(7):
            case 0:
                yield Stop(at=at, tenant=name)
                yield Start(at=at + random.uniform(1, 300), tenant=name)
            case 1:
                yield Load(at=at, tenant="chat", rate=random.choice([10.0, 25.0, 45.0]))
            case 2:
                yield Hang(at=at, card=random.randrange(2), seconds=random.uniform(1, 40))
            case 3:
                yield Xid(at=at, card=_RUNS[name][1], xid=31, tenant=name)
                yield Start(at=at + random.uniform(1, 120), tenant=name)
            case 4:
                budget = f"{random.choice(_BUDGETS):g}W"
                yield Patch(at=at, agent={"power": {"budget": budget}})
            case 5:
                yield Stop(at=at, tenant="chat")
                yield Start(at=at + random.uniform(1, 60), tenant="chat")
            case 6:
                mode = random.choice(["observe", "enforce", "enforce"])
                yield Patch(at=at, agent={"mode": mode})
        at += random.uniform(30, 600)


class Size(msgspec.Struct, frozen=True):
    """What could grow."""

    resident_bytes: int
    readings: int
    history: int
    series: int
    lanes: int
    ledger_bytes: int
    books_bytes: int
    """All files of the state directory."""
    files: int
    """Open file descriptors of this process."""


class Week:
    """One such life. `run` raises AssertionError at the first tick that breaks an invariant."""

    def __init__(self, seconds: float, *, seed: int, folder: Path) -> None:
        self.seconds = seconds
        self.folder = folder
        self.trial = Trial(life(seconds, seed), seed=seed, folder=str(folder))
        self.sizes: list[Size] = []
        self.applied = 0
        self._random = Random(seed + 1)
        self._quiet_since: float | None = None
        self._asked: asyncio.Future[str] | None = None
        self._budget = (0.0, 0.0)
        """In watts, and since when."""

    async def run(self, every: float = HOUR) -> None:
        """All of it; a size is taken so often."""
        due = every
        async with self.trial as trial:
            async for snapshot in trial.follow(self.seconds):
                self._check(snapshot)
                self._now_and_then(snapshot)
                if trial.host.elapsed >= due:
                    due += every
                    self.sizes.append(self._size(snapshot))
            left = await trial.stop()
            assert left == (), left
            assert not trial.kept.ledger.entries
            self.applied = sum(
                n for (_, result), n in trial.core.reconciler.actions.items() if result == "applied"
            )

    def _now_and_then(self, snapshot: Snapshot) -> None:
        """Somebody pauses it, and later lets it go on."""
        chance, command = (0.01, Unpause) if snapshot.posture.paused else (0.001, Pause)
        if self._random.random() < chance and (self._asked is None or self._asked.done()):
            inbox = self.trial.core.loop.inbox
            self._asked = asyncio.ensure_future(inbox.submit(command("somebody")))

    # -- what must hold ------------------------------------------------------------------------------

    def _check(self, snapshot: Snapshot) -> None:
        levels = {t.name: t.level for t in snapshot.state.inventory.tenants or ()}
        for setting in snapshot.plan.settings:
            tenant = setting.subject.tenant
            assert not tenant or levels.get(tenant) is not Level.L1, setting
            if setting.knob is CPU_MAX and setting.blocked is None:
                assert setting.value >= self.trial.config.backpressure.min_cores, setting
        for hold in snapshot.holds:
            assert 0.0 < hold.share <= 1.0, hold
        self._check_traces(snapshot)
        self._check_budget(snapshot)

    def _check_traces(self, snapshot: Snapshot) -> None:
        """What is not as it was is in the ledger; nothing of L1's is; and none while it is passive."""
        now = snapshot.state.now.mono
        traces = self.trial.traces()
        known = {e.subject.cgroup for e in self.trial.kept.ledger.entries.values()}
        for trace in traces:
            assert "/chat.service/" not in trace, trace
            if trace.startswith("/"):
                assert trace.partition("/cpu.")[0] in known, trace
        if snapshot.posture.acts:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
        elif now - self._quiet_since > SETTLE_SECONDS:
            hung = any(c.blind for c in snapshot.state.inventory.gpus or ())
            assert hung or not traces, traces

    def _check_budget(self, snapshot: Snapshot) -> None:
        """Our own limits keep to the budget once it has been in force for a while."""
        budget, now = self.trial.config.power.budget_watts, snapshot.state.now.mono
        if budget is None or not snapshot.posture.acts:
            self._budget = (0.0, now)
            return
        blind = any(c.blind for c in snapshot.state.inventory.gpus or ())
        if budget != self._budget[0] or blind:
            self._budget = (budget, now)
        elif now - self._budget[1] > SETTLE_SECONDS:
            limits = sum(card.limit_watts for card in self.trial.host.cards)
            ours = [s for s in snapshot.plan.settings if s.knob is POWER_LIMIT]
            assert not ours or limits <= budget + 1e-6, (limits, budget)

    # -- what may not grow ---------------------------------------------------------------------------

    def _size(self, snapshot: Snapshot) -> Size:
        text = render(snapshot, "0").decode()
        return Size(
            resident_bytes=_resident_bytes(),
            readings=len(snapshot.state.readings),
            history=len(snapshot.state.history),
            series=sum(1 for line in text.splitlines() if not line.startswith("#")),
            lanes=len(self.trial.core.reconciler.outcomes()),
            ledger_bytes=os.path.getsize(self.trial.kept.ledger.path),
            books_bytes=sum(p.stat().st_size for p in self.folder.iterdir() if p.is_file()),
            files=len(os.listdir("/proc/self/fd")),
        )


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def trend(values: list[int]) -> float:
    """How much larger the largest of the last third is than that of the first two; 1 is no growth."""
    cut = max(1, 2 * len(values) // 3)
    return max(values[cut:], default=0) / max(*values[:cut], 1)
