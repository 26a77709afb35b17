"""A trial whose every write is held against the invariants of DESIGN 5 and 6, in the moment it is made."""

from pathlib import Path
from typing import Any

from gpuagent.act.record import Book, decode_line, target_of
from gpuagent.lab.trial import Trial
from gpuagent.model.declare import On
from gpuagent.model.inventory import Level, Subject
from gpuagent.model.plan import Snapshot
from gpuagent.model.vocab import POWER_LIMIT, SUSPENDED, TERMINATED
from gpuagent.ports import Actuator
from gpuagent.sim.scenario import Hang, Scenario

ROUNDING_WATTS = 1e-3


class Watched:
    """Raises AssertionError in the midst of whatever breaks an invariant."""

    def __init__(self, scenario: Scenario, *, seed: int, folder: Path) -> None:
        self.folder = folder
        self.trial = Trial(scenario, seed=seed, folder=str(folder))
        self.writes = 0
        self.rivals: dict[tuple[str, str], str] = {}
        """What somebody else has set, by cgroup and file; the power limit of a card by its UUID."""
        self._hangs_until = float("-inf")
        self._watch()

    async def begin(self) -> None:
        await self.trial.__aenter__()

    async def end(self) -> None:
        await self.trial.__aexit__(None, None, None)

    async def tick(self, times: int = 1) -> Snapshot:
        for _ in range(times):
            snapshot = await self.trial.tick()
            self._check(snapshot)
        return snapshot

    async def crash(self) -> None:
        """Killed, and begun anew: what must be put back before the first decision is back."""
        await self.trial.crash()
        self._watch()
        self._check_back()

    async def restart(self) -> None:
        """Stopped in good order, and begun anew."""
        left = [t for t in await self.trial.stop() if not self._is_a_rivals(t)]
        if self._blind:  # a card that does not answer cannot be given back now
            left = [t for t in left if t.startswith("/")]
        assert not left, left
        await self.trial.crash()
        self._watch()

    def hang(self, card: int, seconds: float) -> None:
        """The driver does not answer for a while where a card is concerned."""
        host = self.trial.host
        host.happen(Hang(at=host.elapsed, card=card, seconds=seconds))
        self._hangs_until = max(self._hangs_until, host.elapsed + seconds)

    async def recover(self) -> None:
        """Time passes until the driver answers again."""
        while self._blind:
            await self.tick()

    def rival(self, path: str, file: str, text: str) -> None:
        """Somebody else writes a control file."""
        cgroups = self.trial.host.cgroups
        cgroups.write(path, cgroups.inode(path), file, text)
        self.rivals[path, file] = text

    # -- in the moment of each write -------------------------------------------------------------------

    def _watch(self) -> None:
        for actuator in self.trial.core.actuators:
            self._wrap(actuator)

    def _wrap(self, actuator: Actuator) -> None:
        write = actuator.set

        async def checked(subject: Subject, raw: str) -> None:
            self.writes += 1
            self._check_write(actuator, subject, raw)
            await write(subject, raw)

        hand: Any = actuator
        hand.set = checked

    def _check_write(self, actuator: Actuator, subject: Subject, raw: str) -> None:
        target = target_of(actuator.knob, subject)
        held = self.trial.kept.ledger.held(target)
        assert held is not None, f"{target}: nothing in the ledger"
        giving_back = raw == held.was.raw
        assert giving_back or raw in {k.raw for k in held.wrote}, f"{target}: {raw} not announced"
        durable = self._on_disk().entries.get(target)
        assert durable is not None, f"{target}: not durable"
        assert giving_back or raw in {k.raw for k in durable.wrote}, f"{target}: {raw} not durable"
        self._check_whose(subject, held.rule)
        if actuator.knob is POWER_LIMIT and not giving_back:
            self._check_sum(subject, int(raw) / 1000)

    def _on_disk(self) -> Book:
        book = Book()
        for line in (self.folder / "ledger.jsonl").read_bytes().splitlines(keepends=True):
            record = decode_line(line)
            assert record is not None
            book.apply(record)
        return book

    def _check_whose(self, subject: Subject, rule: str) -> None:
        """No knob of an L1's own, beyond what its limits declare."""
        if subject.on in {On.GPU, On.MPS} or rule.startswith("limits/"):
            return
        rules = {t.name: t for t in self.trial.config.tenants}
        for spec in self.trial.scenario.tenants:
            if spec.name in rules and rules[spec.name].sla is Level.L1:
                assert not (spec.path + "/").startswith(subject.cgroup + "/") or not subject.cgroup
                assert subject.tenant != spec.name

    def _check_sum(self, subject: Subject, watts: float) -> None:
        """What we raise fits with all that the other cards may draw now."""
        budget = self.trial.config.power.budget_watts
        cards = {c.uuid: c for c in self.trial.host.cards if not c.lost}
        card = cards.get(subject.gpu)
        if budget is None or card is None or watts <= card.limit_watts:
            return
        others = sum(c.limit_watts for c in cards.values() if c is not card)
        assert others + watts <= budget + ROUNDING_WATTS, (others, watts, budget)

    # -- after each tick -----------------------------------------------------------------------------

    @property
    def _blind(self) -> bool:
        """Whether a card could not be read or written a moment ago."""
        latest = self.trial.core.publisher.latest()
        cards = () if latest is None else latest.state.inventory.gpus or ()
        hangs = self.trial.host.elapsed <= self._hangs_until
        return hangs or any(c.blind for c in cards)

    def _check(self, snapshot: Snapshot) -> None:
        tenants = {t.name: t for t in snapshot.state.inventory.tenants or ()}
        for hold in snapshot.holds:
            who = tenants.get(hold.subject.tenant)
            if who is None:
                continue
            assert who.level is not Level.L1, hold
            ended = hold.rung in {SUSPENDED.family, TERMINATED.family}
            assert hold.share == 0.0 if ended else hold.share >= who.limits.min_share_ratio, hold
        for setting in snapshot.plan.settings:
            who = tenants.get(setting.subject.tenant)
            if who is not None and setting.rule.startswith("backpressure/"):
                assert setting.knob.family in who.levers, setting
        if not snapshot.posture.acts:
            return
        reach = self.trial.core.reconciler.reach
        for (knob, _), outcome in snapshot.outcomes.items():
            if outcome.result == "applied" and reach.families is not None:
                assert knob.family in reach.families, outcome

    def _check_back(self) -> None:
        """After a crash: of tenants' knobs nothing is left, and no limit of ours is over the budget."""
        left = [t for t in self.trial.traces() if t.startswith("/") and not self._is_a_rivals(t)]
        assert not left, left
        budget = self.trial.config.power.budget_watts
        held = self.trial.kept.ledger.entries
        if budget is not None and not self._blind and any(t.knob == POWER_LIMIT.name for t in held):
            sums = sum(c.limit_watts for c in self.trial.host.cards)
            originals = sum(e.original.value for e in held.values() if e.knob == POWER_LIMIT.name)
            assert sums <= max(budget, originals) + ROUNDING_WATTS

    def _is_a_rivals(self, trace: str) -> bool:
        """Whether a value that is not what it was is what somebody else has set it to."""
        where, _, value = trace.partition(": ")
        path, _, file = where.rpartition("/")
        return self.rivals.get((path, file)) == value
