"""Whatever happens, in whatever order: what we changed ends as it was, what others set stays.

A random mix of plans, pauses, rivals, lost and slow targets, full disks and crashes at any await
point drives the reconciler; a child process that is really killed in the middle of its writes does
the same for the files.
"""

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from gpuagent.act.ledger import Ledger
from gpuagent.act.record import Book, decode_line, target_of
from gpuagent.act.restore import Occasion, put_back
from gpuagent.errors import Corrupt, Refused, Unavailable
from gpuagent.model.declare import BUDGET_RULE, Knob
from gpuagent.model.inventory import Subject
from gpuagent.model.plan import Posture, Setting
from gpuagent.model.vocab import CPU_MAX, POWER_LIMIT
from gpuagent.ports import Real
from tests.act.host import (
    ACTS,
    DEMOTED,
    OBSERVES,
    PAUSED,
    Agent,
    Clock,
    Dial,
    Inline,
    Tree,
    card,
    seat,
    wish,
)
from tests.act.test_actuators import anything

T = TypeVar("T")
SEATS = (seat("a", 1), seat("b", 2))
CARDS = (card(1), card(2), card(3))
SUBJECTS = st.sampled_from(SEATS + CARDS)


class Watched(Dial):
    """A dial that knows who wrote last, and what the last value was that was not ours."""

    def __init__(self, knob: Knob) -> None:
        super().__init__(knob)
        self.others: dict[Subject, str] = {}
        self.by_us: set[Subject] = set()
        self.racing: set[Subject] = set()
        """Between the beginning of our write and its read-back nobody can tell two writers apart."""
        self.unseen: set[Subject] = set()
        """Found again, and not read since: nobody can know what it has."""

    def make(self, subject: Subject, raw: str) -> Subject:
        self.others[subject] = raw
        return super().make(subject, raw)

    def rival(self, subject: Subject, raw: str) -> None:
        self.values[subject] = self.others[subject] = raw
        self.by_us.discard(subject)

    async def get(self, subject: Subject) -> Real:
        real = await super().get(subject)
        self.racing.discard(subject)
        self.unseen.discard(subject)
        return real

    def lose(self, subject: Subject) -> str:
        self.unseen.add(subject)
        return self.values.pop(subject)

    async def set(self, subject: Subject, raw: str) -> None:
        self.racing.add(subject)
        self.before_call(subject, raw)
        await super().set(subject, raw)
        self.by_us.add(subject)

    def before_call(self, subject: Subject, raw: str) -> None:
        """Replaced by the machine: what must hold when a write begins."""


def number(raw: str) -> float:
    return float("inf") if raw == "max" else float(raw)


def on_disk(folder: Path) -> Book:
    book = Book()
    for line in (folder / "ledger.jsonl").read_bytes().split(b"\n"):
        try:
            record = decode_line(line)
        except Corrupt:
            continue
        assert record is not None
        book.apply(record)
    return book


class Host(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        self.clock = Clock()
        self.dials = (Watched(CPU_MAX), Watched(POWER_LIMIT))
        self.plan: tuple[Setting, ...] = ()
        self.acts = True
        self.at_start = False
        """While no reconciler runs, and what one has left is put back, whatever the sum."""
        self.driving: asyncio.Task[Any] | None = None
        self.unique = 0
        self.lost: dict[Subject, str] = {}
        for dial in self.dials:
            dial.before_call = self.check_write  # type: ignore[method-assign]

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def dial(self, subject: Subject) -> Watched:
        return self.dials[0] if subject in SEATS else self.dials[1]

    @initialize()
    def begin(self) -> None:
        for subject, raw in zip(SEATS + CARDS, ("max", "0.95", "725", "725", "575"), strict=True):
            self.dial(subject).make(subject, raw)
        self.start()

    def start(self) -> None:
        self.agent = Agent(self.folder, *self.dials, clock=self.clock)
        self.do(self.agent.__aenter__())

    # -- what must hold ------------------------------------------------------------------------------

    def check_write(self, subject: Subject, raw: str) -> None:
        dial = self.dial(subject)
        entry = on_disk(self.folder).entries[target_of(dial.knob, subject)]
        assert raw in {entry.was.raw, *(k.raw for k in entry.wrote)}, "written before recorded"
        assert number(raw) <= number(dial.others[subject]), "looser than the original"
        raises = number(raw) > number(dial.values.get(subject, "inf"))
        wished = any(s.subject == subject for s in self.plan)
        budget = any(s.subject in CARDS and s.rule == BUDGET_RULE for s in self.plan)
        # What is wished no more waits only while there is a budget.
        if subject in CARDS and self.acts and raises and (wished or budget) and not self.at_start:
            for other in self.plan:
                # The agent cannot know yet what a rival has just set, nor what a lost card has.
                known = other.subject in dial.by_us - dial.unseen and other.subject in dial.values
                if other.subject in CARDS and other.subject != subject and known:
                    real = number(dial.values[other.subject])
                    assert real <= other.value, "raised before the cut"

    @invariant()
    def no_lane_has_failed(self) -> None:
        if hasattr(self, "agent") and self.agent.running.done():
            self.agent.running.result()

    @invariant()
    def observing_ends_at_the_originals(self) -> None:
        for dial in self.dials:
            for subject in dial.values.keys() - dial.by_us:
                assert dial.values[subject] == dial.others[subject]

    # -- what happens --------------------------------------------------------------------------------

    @rule(
        shares=st.lists(st.sampled_from([0.2, 0.3, 0.5, 0.8]), max_size=2),
        watts=st.lists(st.sampled_from([300.0, 350.0, 400.0, 600.0]), max_size=3),
        first=st.integers(0, 2),
        rules=st.tuples(*[st.sampled_from([BUDGET_RULE, "backpressure/temperature"])] * 3),
        posture=st.sampled_from([ACTS, ACTS, ACTS, ACTS, OBSERVES, PAUSED, DEMOTED]),
        complete=st.booleans(),
        steps=st.integers(0, 60),
        seconds=st.sampled_from([0.1, 1.0, 1.0, 20.0, 700.0]),
    )
    def drive(  # noqa: PLR0917  (hypothesis names them)
        self,
        shares: list[float],
        watts: list[float],
        first: int,
        rules: tuple[str, ...],
        posture: Posture,
        complete: bool,
        steps: int,
        seconds: float,
    ) -> None:
        self.finish()
        cpu = [wish(CPU_MAX, s, v) for s, v in zip(SEATS, shares, strict=False)]
        cards = CARDS[first:] + CARDS[:first]
        power = [
            wish(POWER_LIMIT, s, v, rule=r) for s, v, r in zip(cards, watts, rules, strict=False)
        ]

        async def tick() -> None:
            self.plan, self.acts = (*cpu, *power), posture.acts
            await self.agent.tick(*self.plan, posture=posture, complete=complete, seconds=seconds)

        self.driving = self.loop.create_task(tick())
        self.step(steps)

    @rule(steps=st.integers(1, 30))
    def step(self, steps: int) -> None:
        async def some() -> None:
            for _ in range(steps):
                await asyncio.sleep(0)

        self.do(some())

    @rule()
    def finish(self) -> None:
        if self.driving is not None:
            self.do(_result(self.driving))
            self.driving = None

    @rule(subject=SUBJECTS, base=st.sampled_from([1, 3, 4, 7, 8]))
    def rival(self, subject: Subject, base: int) -> None:
        dial = self.dial(subject)
        if subject in dial.racing or subject not in dial.values:
            return
        self.unique += 1
        value = base / 10 + 0.05 + self.unique * 1e-6
        dial.rival(subject, repr(value if subject in SEATS else round(value * 1000 - 25, 4)))

    @rule(subject=st.sampled_from(SEATS), uid=st.sampled_from([0, 1000]))
    def delegate(self, subject: Subject, uid: int) -> None:
        self.dials[0].owners[subject] = uid

    @rule(subject=SUBJECTS)
    def reset_by_the_driver(self, subject: Subject) -> None:
        """Somebody sets it back to what it was before us."""
        dial = self.dial(subject)
        if subject in dial.values and subject not in dial.racing:
            dial.rival(subject, dial.others[subject])

    @rule(subject=st.sampled_from(CARDS))
    def lose_or_find_a_card(self, subject: Subject) -> None:
        dial = self.dials[1]
        if subject in dial.values:
            self.lost[subject] = dial.lose(subject)
        else:
            dial.values[subject] = self.lost.pop(subject)

    @rule(subject=SUBJECTS)
    def slow_or_quick(self, subject: Subject) -> None:
        gates = self.dial(subject).gates
        if subject in gates:
            gates.pop(subject).set()
        else:
            gates[subject] = asyncio.Event()

    @rule(subject=SUBJECTS, error=st.sampled_from([None, Refused("no"), Unavailable("down")]))
    def refuse(self, subject: Subject, error: Refused | Unavailable | None) -> None:
        errors = self.dial(subject).set_errors
        errors.pop(subject, None)
        if error is not None:
            errors[subject] = error

    @rule()
    def fill_or_free_the_disk(self) -> None:
        self.agent.disk.full = not self.agent.disk.full

    @rule(occasion=st.sampled_from([None, Occasion.CRASH, Occasion.RESCUE]), adopts=st.booleans())
    def crash(self, occasion: Occasion | None, adopts: bool) -> None:
        self.kill()
        self.start()
        if occasion is None:
            return
        rules = {t: e.rule for t, e in self.agent.ledger.entries.items()}
        self.at_start = True
        report = self.do(
            put_back(
                ledger=self.agent.ledger,
                actuators=self.dials,
                occasion=occasion,
                clock=self.clock,
                call_seconds=0.01,
            )
        )
        self.at_start = False
        for dial in self.dials:
            dial.racing.clear()
        for item in report:
            kept = item.what in {"adopted", "held"}
            assert kept == (rules[item.entry.target] == BUDGET_RULE), item
        if adopts:
            self.agent.reconciler.adopt(report, now=self.clock.now())

    @precondition(lambda self: self.acts)
    @rule()
    def everything_settles(self) -> None:
        """With nothing in the way, what is wished is so, or tighter, or contested."""
        self.clear_the_way()
        self.finish()
        for _ in range(2):
            self.do(self.agent.tick(*self.plan, seconds=1200))
            self.do(self.agent.reconciler.settled())
        self.no_lane_has_failed()
        told = {(o.knob, o.subject): o for o in self.agent.reconciler.outcomes()}
        for setting in self.plan:
            outcome = told[setting.knob, setting.subject]
            assert outcome.result in {"applied", "contested"}, outcome
            real = number(self.dial(setting.subject).values[setting.subject])
            assert outcome.result == "contested" or real <= setting.value + 0.01
        assert told.keys() == {s.key for s in self.plan}

    def clear_the_way(self) -> None:
        self.agent.disk.full = False
        self.dials[1].values.update(self.lost)
        self.lost.clear()
        for dial in self.dials:
            dial.set_errors.clear()
            for gate in dial.gates.values():
                gate.set()
            dial.gates.clear()

    def kill(self) -> None:
        if self.driving is not None:
            self.driving.cancel()
            self.do(_ended(self.driving))
            self.driving = None
        self.do(self.agent.die())
        for dial in self.dials:
            dial.racing.clear()

    def teardown(self) -> None:
        if hasattr(self, "agent"):
            self.clear_the_way()
            self.kill()
            ledger = Ledger(str(self.folder), boot="b1", executor=Inline())
            hand, self.at_start = Occasion.BY_HAND, True
            self.do(put_back(ledger=ledger, actuators=self.dials, occasion=hand, clock=self.clock))
            self.do(ledger.close())
            assert not ledger.entries
            for dial in self.dials:
                assert dial.values == dial.others
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self.temporary.cleanup()


async def _result(task: "asyncio.Task[Any]") -> None:
    await task


async def _ended(task: "asyncio.Task[Any]") -> None:
    await asyncio.gather(task, return_exceptions=True)


TestHost = Host.TestCase
TestHost.settings = settings(max_examples=150, stateful_step_count=40)


# -- a process that is really killed -------------------------------------------------------------------

CHILD = """
import asyncio, sys
from pathlib import Path
from gpuagent.act.audit import AuditLog
from gpuagent.act.ledger import Ledger
from gpuagent.act.reconcile import Reconciler
from gpuagent.clock import SystemClock
from gpuagent.model.inventory import on_cgroup
from gpuagent.model.plan import Plan
from gpuagent.model.vocab import CPU_MAX, CPU_WEIGHT
from tests.act.host import ACTS, Tree, wish
from tests.act.test_actuators import anything

async def main(folder):
    tree = Tree(folder / "cg")
    ledger = Ledger(str(folder / "state"))
    clock = SystemClock()
    reconciler = Reconciler(
        actuators=anything(folder / "cg"), ledger=ledger, audit=AuditLog(str(folder / "state")),
        clock=clock, wake=lambda why: None,
    )
    seats = [on_cgroup(f"t{n}", f"/t{n}", tree.inode(f"/t{n}")) for n in range(20)]
    async with asyncio.TaskGroup() as group:
        group.create_task(reconciler.run())
        for turn in range(100_000):
            wishes = [wish(CPU_MAX, s, 0.1 + turn % 7 / 10) for s in seats[turn % 3 :]]
            wishes += [wish(CPU_WEIGHT, s, 10 + turn % 5) for s in seats[turn % 2 :]]
            await reconciler.drive(Plan(tuple(wishes)), posture=ACTS, now=clock.now())
            await asyncio.sleep(0.001)  # `drive` waits for nobody who was busy before
            print(turn, flush=True)

asyncio.run(main(Path(sys.argv[1])))
"""


def originals(tree: Tree) -> dict[str, str]:
    return {
        f"/t{n}/{file}": tree.read(f"/t{n}", file)
        for n in range(20)
        for file in ("cpu.max", "cpu.weight")
    }


def test_kill_9_in_the_middle_of_writes_leaves_no_trace(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "cg")
    for n in range(20):
        quota = "max 100000" if n % 2 else f"{90_000 + n} 100000"
        tree.make(f"/t{n}", cpu_max=quota, cpu_weight=str(100 + n))
    before = originals(tree)
    for turns in (1, 2, 5):
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            turn = 0
            while turn < turns or originals(tree) == before:  # a busy machine takes its time
                assert child.stdout.readline()
                turn += 1
            child.kill()
        asyncio.run(_restore(tmp_path, tree))
        assert originals(tree) == before


async def _restore(folder: Path, tree: Tree) -> None:
    ledger = Ledger(str(folder / "state"))
    report = await put_back(
        ledger=ledger,
        actuators=anything(tree.root),
        occasion=Occasion.RESCUE,
        clock=Clock(),
    )
    await ledger.close()
    assert {i.what for i in report} <= {"put back"}
    assert not ledger.entries
