"""A long simulated life of the agent: tenants come and go, things break, operators change their minds.

They pause it, override it and hand out tokens; now and then it is killed, and starts again on the host
as it stands. Every tick is held against the invariants of DESIGN 5 and 6; every hour what could grow is measured.
"""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec

from gpuagent.config import Config
from gpuagent.errors import AgentError
from gpuagent.expose.metrics import render
from gpuagent.lab.trial import Trial
from gpuagent.model.inventory import Level, on_gpu, on_tenant
from gpuagent.model.lease import Override
from gpuagent.model.plan import (
    Command,
    DropOverride,
    IssueToken,
    Pause,
    RevokeToken,
    SetOverride,
    Snapshot,
    Unpause,
)
from gpuagent.model.vocab import CPU_MAX, POWER_LIMIT
from gpuagent.sim.scenario import Hang, Happening, Load, Patch, Scenario, Start, Stop, Xid
from tests.tokens import token

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
_CRASHES = (7.0, 1.0 / (7 * HOUR))
"""So many, and so many more for each second of a life; all in its first third, for what grows is
looked for in the last, and a new run begins small."""
SETTLE_SECONDS = 20.0
"""A pause, a budget that has been cut, and the end of an override have taken hold after so long."""
_PAUSES, _UNPAUSES = 0.001, 0.01
_OVERRIDES, _DROPS = 0.006, 0.001
_TOKENS = 0.004
"""Chances in a second."""


def life(seconds: float, seed: int, control: str = "aimd", tick: str = "1s") -> Scenario:
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
            "tick": tick,
            "power": {"budget": "500W"},
            "backpressure": {"control": control},
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

    def __init__(
        self,
        seconds: float,
        *,
        seed: int,
        folder: Path,
        control: str = "aimd",
        tick: str = "1s",
    ) -> None:
        self.seconds = seconds
        self.folder = folder
        self.trial = Trial(life(seconds, seed, control, tick), seed=seed, folder=str(folder))
        self.sizes: list[Size] = []
        self.applied = 0
        self.crashes = 0
        self.tokens = 0
        """Issued."""
        self.overridden = 0
        """Ticks in which an override was in force."""
        self._random = Random(seed + 1)
        self._quiet_since: float | None = None
        self._asked: asyncio.Future[str] | None = None
        self._budget = (0.0, 0.0)
        """In watts, and since when."""
        self._blind_at = float("-inf")
        self._ended: dict[str, float] = {}
        """When each override was last in force, by its rule."""

    async def run(self, every: float = HOUR) -> None:
        """All of it; a size is taken so often."""
        due = every
        async with self.trial as trial:
            async for snapshot in trial.follow(self.seconds):
                self._check(snapshot)
                self._heard()
                if self._asked is None:
                    self._now_and_then(snapshot)
                if self._asked is None and self._random.random() < self._crash_chance:
                    await self._crash()
                if trial.host.elapsed >= due:
                    due += every
                    self.sizes.append(self._size(snapshot))
            left = await trial.stop()
            assert left == (), left
            assert not trial.kept.ledger.entries
            self._count_applied()

    @property
    def _crash_chance(self) -> float:
        third = self.seconds / 3
        return (
            (_CRASHES[0] + _CRASHES[1] * third) / third if self.trial.host.elapsed < third else 0.0
        )

    def _count_applied(self) -> None:
        actions = self.trial.core.reconciler.actions
        self.applied += sum(n for (_, result), n in actions.items() if result == "applied")

    async def _crash(self) -> None:
        """Killed between two ticks: what somebody has asked for, and was told is so, outlives that."""
        before = self._remembered()
        self._count_applied()
        await self.trial.crash()
        self.crashes += 1
        assert self._remembered() == before

    def _remembered(self) -> tuple[bool, dict[str, float], tuple[str, ...]]:
        kept, now = self.trial.kept, self.trial.host.clock.now()
        assert kept.tokens is not None
        return (
            self.trial.core.loop.posture.paused,
            {lease.id: lease.until for lease in kept.leases.active(now)},
            tuple(t.id for t in kept.tokens.listed()),
        )

    # -- what people do ------------------------------------------------------------------------------

    def _heard(self) -> None:
        """An answer, or a refusal in our own words."""
        if self._asked is None or not self._asked.done():
            return
        error = self._asked.exception()
        assert error is None or isinstance(error, AgentError), error
        self._asked = None

    def _now_and_then(self, snapshot: Snapshot) -> None:
        """Somebody pauses it and later lets it go on, overrides it, or gives out a token."""
        command = self._command(snapshot)
        if command is not None:
            self._asked = asyncio.ensure_future(self.trial.core.loop.inbox.submit(command))

    def _command(self, snapshot: Snapshot) -> Command | None:
        chance = self._random.random
        if chance() < (_UNPAUSES if snapshot.posture.paused else _PAUSES):
            return (Unpause if snapshot.posture.paused else Pause)("somebody")
        if chance() < _OVERRIDES:
            return SetOverride(self._override())
        if chance() < _DROPS:
            return DropOverride("somebody", f"o{self._random.randrange(5)}")
        if chance() < _TOKENS:
            return self._about_a_token()
        return None

    def _override(self) -> Override:
        """On any tenant, the L1 included, or on a card."""
        pick = self._random.choice
        if self._random.random() < 0.7:
            subject, value = on_tenant(pick([*_RUNS])), pick([0.1, 0.5, 1.0])
        else:
            subject, value = on_gpu(pick(self.trial.host.cards).uuid), pick([150.0, 220.0, 300.0])
        return Override(
            id=f"o{self._random.randrange(5)}",
            subject=subject,
            value=value,
            ttl_seconds=self._random.uniform(20, 600),
            by="somebody",
            why="to see what comes of it",
        )

    def _about_a_token(self) -> Command:
        book, clock = self.trial.kept.tokens, self.trial.host.clock
        assert book is not None
        held = [t.id for t in book.listed()]
        if len(held) > 3:
            return RevokeToken("somebody", self._random.choice(held))
        self.tokens += 1
        made = token(f"{self._random.randrange(16**8):08x}", clock, seconds=3600.0)
        return IssueToken("somebody", made, f"{self._random.randrange(16**64):064x}")

    # -- what must hold ------------------------------------------------------------------------------

    def _check(self, snapshot: Snapshot) -> None:
        if any(c.blind for c in snapshot.state.inventory.gpus or ()):
            self._blind_at = snapshot.state.now.mono
        levels = {t.name: t.level for t in snapshot.state.inventory.tenants or ()}
        for setting in snapshot.plan.settings:
            tenant = setting.subject.tenant
            assert not tenant or levels.get(tenant) is not Level.L1, setting
            if setting.knob is CPU_MAX and setting.blocked is None:
                assert setting.value >= self._config.backpressure.min_cores, setting
        for hold in snapshot.holds:
            assert 0.0 < hold.share <= 1.0, hold
            assert levels.get(hold.subject.tenant) is not Level.L1, hold
        self._check_traces(snapshot)
        self._check_budget(snapshot)
        self._check_overrides(snapshot)

    @property
    def _config(self) -> Config:
        return self.trial.config

    def _check_overrides(self, snapshot: Snapshot) -> None:
        """Who is overridden is not also held by a policy; and with its time, its effect ends."""
        now, leases = snapshot.state.now.mono, snapshot.state.leases
        assert all(now < lease.until <= now + lease.ttl_seconds for lease in leases), leases
        self._ended.update({lease.rule: now for lease in leases})
        taken = {x.subject.tenant for x in leases if x.subject.tenant}
        assert not taken & {h.subject.tenant for h in snapshot.holds if h.cause != "override"}
        if leases and snapshot.posture.acts:
            self.overridden += 1
        if not snapshot.posture.acts or now - self._blind_at <= SETTLE_SECONDS:
            return  # the one is checked as a trace; in the other nothing can be put back
        for entry in self.trial.kept.ledger.entries.values():
            if entry.rule.startswith("override/"):
                assert now - self._ended[entry.rule] <= SETTLE_SECONDS, entry

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
            hung = now - self._blind_at <= SETTLE_SECONDS
            assert hung or not traces, traces

    def _check_budget(self, snapshot: Snapshot) -> None:
        """Our own limits keep to the budget once it has been in force for a while."""
        budget, now = self._config.power.budget_watts, snapshot.state.now.mono
        if budget is None or not snapshot.posture.acts:
            self._budget = (0.0, now)
            return
        if budget != self._budget[0] or now == self._blind_at:
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
