"""The policy that lets training cost less energy: the power limit of the least energy for its work.

Off unless configured. Only for cards with nothing but declared L2 and L3 training (`crew`). The limit
as it was is measured first, then lower ones, each for `efficiency.settle` (`tally`), in the order that
`search` says; the best is kept while the load stays what it was. Anybody else's wish for the card (a
budget, heat, an override), another tenant, or readings that are missing or make no sense: then the
card goes back to the limit as it was, and what was measured counts no more.

While the agent only observes nothing answers a lever, so that the first limit to try is all there is.
"""

from collections.abc import Iterator

import msgspec

from gpuagent.config import Config
from gpuagent.config import Efficiency as Law
from gpuagent.decide.causes import label
from gpuagent.decide.crew import Crew, crews
from gpuagent.decide.search import Point, best, following
from gpuagent.decide.tally import BY_CLOCK, Measure, Tally
from gpuagent.model.inventory import on_gpu
from gpuagent.model.plan import Decision, Hold, Setting
from gpuagent.model.state import Event, NodeState
from gpuagent.model.vocab import GPU_POWER_LIMIT_WATTS, POWER_LIMIT

EFFICIENCY_RULE = "power/efficiency"
_LAG_SECONDS = 3.0
"""A new limit acts within half a second; averages and clocks need a little longer."""
_FOREIGN_SECONDS = 3.0
"""Somebody else's wish has to last so long: outcomes come a tick late."""
_PATIENCE_SECONDS = 60.0
"""A limit that is not in force for so long is doubted."""
_MOVED_RATIO = 0.08
"""A load is another one when progress or draw at the same limit are off by this part ..."""
_MOVED_TIMES = 2
"""... so many times in a row."""
_UNSTEADY_TIMES = 5
_FASTER_RATIO = 0.03
"""No lower limit makes work faster: one that seems to, by this part, says that the load has changed."""
_PAUSE_SETTLES = 5.0
"""After a doubt nothing is tried for so many times the time to settle."""
_WORTH_RATIO = 0.01


class Trial(msgspec.Struct, frozen=True):
    """One group of cards."""

    crew: Crew
    share: float = 1.0
    """Of their limits as they were: what is wished now; 1 for no wish."""
    in_force_at: float = 0.0
    """When it was last seen in force, or was first wished."""
    tally: Tally | None = None
    """What is measured at it; None while it is not in force."""
    points: tuple[Point, ...] = ()
    settled: Point | None = None
    moved: int = 0
    unsteady: int = 0
    foreign_since: float | None = None
    paused_until: float = float("-inf")


class Memory(msgspec.Struct, frozen=True):
    """By the first card of each group."""

    trials: dict[str, Trial] = {}


class Efficiency:
    """See the module."""

    name = "efficiency"

    def __init__(self, config: Config, measure: Measure = BY_CLOCK) -> None:
        """`measure` says how progress is seen: the place for something better than a proxy."""
        self._law: Law = config.efficiency
        self._measure = measure

    def begin(self) -> Memory:
        return Memory()

    def decide(self, memory: Memory, state: NodeState) -> tuple[Memory, Decision]:
        if not self._law.enabled:
            return Memory(), Decision()
        if not state.tenants_known:
            # Held where it is, and nothing is learned: who is there may be another soon.
            kept = {k: msgspec.structs.replace(t, tally=None) for k, t in memory.trials.items()}
            return Memory(kept), self._decision(kept, [])
        trials: dict[str, Trial] = {}
        events: list[Event] = []
        for crew in crews(state):
            key = crew.cards[0]
            known = memory.trials.get(key)
            if known is None or known.crew != crew:
                # A pause outlasts a limit that reads otherwise for a moment after it was put back.
                same = known is not None and known.crew.tenants == crew.tenants
                pause = known.paused_until if known is not None and same else float("-inf")
                known = Trial(crew, in_force_at=state.now.mono, paused_until=pause)
            trials[key], said = self._after(known, state)
            events += said
        for key, trial in memory.trials.items():
            if trial.settled is not None and trial.crew != (
                trials[key].crew if key in trials else None
            ):
                events += _ended(trial, state, "other work or other tenants are there")
        return Memory(trials), self._decision(trials, events)

    # -- one group -----------------------------------------------------------------------------------

    def _after(self, trial: Trial, state: NodeState) -> tuple[Trial, list[Event]]:
        now = state.now.mono
        trial, why = _foreign(trial, state)
        if why:
            return self._back(trial, state, why, pause=0.0)
        if trial.foreign_since is not None or now < trial.paused_until:
            return msgspec.structs.replace(trial, tally=None), []
        if not _in_force(trial, state):
            late = now - trial.in_force_at > _PATIENCE_SECONDS
            if late and not _only_said(trial, state):
                return self._doubt(trial, state, "the limit is not in force")
            return msgspec.structs.replace(trial, tally=None), []
        tally = trial.tally or Tally(now + _LAG_SECONDS)
        if now >= tally.since:
            tally = tally.after(
                state, trial.crew.cards, measure=self._measure, span=self._law.settle
            )
        trial = msgspec.structs.replace(trial, tally=tally, in_force_at=now)
        if not tally.complete(now, self._law.settle):
            return trial, []
        point = tally.point(trial.share, trial.crew.tops)
        trial = msgspec.structs.replace(trial, tally=Tally(now))
        if point is None:
            if trial.unsteady + 1 >= _UNSTEADY_TIMES:
                return self._doubt(trial, state, "its load is too unsteady to be measured")
            return msgspec.structs.replace(trial, unsteady=trial.unsteady + 1), []
        trial = msgspec.structs.replace(trial, unsteady=0)
        return (
            self._watch(trial, point, state) if trial.settled else self._go_on(trial, point, state)
        )

    def _go_on(self, trial: Trial, point: Point, state: NodeState) -> tuple[Trial, list[Event]]:
        """The search after one more point."""
        points = (*trial.points, point)
        if point.rate > points[0].rate * (1 + _FASTER_RATIO):
            return self._back(trial, state, "its load has changed", pause=0.0)
        share = following(points, floor=trial.crew.floor, slowdown=self._law.slowdown)
        trial = msgspec.structs.replace(trial, points=points)
        if share is not None:
            return _moved_to(trial, share, state), []
        found = best(points, self._law.slowdown)
        if found.cost > points[0].cost * (1 - _WORTH_RATIO):
            found = points[0]
        trial = msgspec.structs.replace(_moved_to(trial, found.share, state), settled=found)
        return trial, [self._settled(trial, found, state)]

    def _watch(self, trial: Trial, point: Point, state: NodeState) -> tuple[Trial, list[Event]]:
        """A settled group after one more point at the same limit."""
        settled = trial.settled
        assert settled is not None
        off = max(abs(point.rate / settled.rate - 1), abs(point.watts / settled.watts - 1))
        if off <= _MOVED_RATIO:
            return msgspec.structs.replace(trial, moved=0), []
        if trial.moved + 1 < _MOVED_TIMES:
            return msgspec.structs.replace(trial, moved=trial.moved + 1), []
        return self._back(trial, state, f"its load has changed by {off:.0%}", pause=0.0)

    def _doubt(self, trial: Trial, state: NodeState, why: str) -> tuple[Trial, list[Event]]:
        return self._back(trial, state, why, pause=_PAUSE_SETTLES * self._law.settle)

    def _back(
        self, trial: Trial, state: NodeState, why: str, *, pause: float
    ) -> tuple[Trial, list[Event]]:
        """To the limit as it was, and everything anew."""
        now = state.now.mono
        events = _ended(trial, state, why) if trial.settled is not None else []
        return (
            Trial(
                trial.crew,
                in_force_at=now,
                foreign_since=trial.foreign_since,
                paused_until=now + pause,
            ),
            events,
        )

    # -- what is wished and said ---------------------------------------------------------------------

    def _decision(self, trials: dict[str, Trial], events: list[Event]) -> Decision:
        settings = tuple(s for t in trials.values() for s in self._settings(t))
        holds = tuple(
            Hold(
                s.subject,
                dict(s.numbers)["share"],
                POWER_LIMIT.family,
                "efficiency",
                s.why,
                (s.key,),
            )
            for s in settings
        )
        return Decision(settings=settings, holds=holds, events=tuple(events))

    def _settings(self, trial: Trial) -> Iterator[Setting]:
        if trial.share >= 1:
            return
        because, numbers = self._because(trial)
        for card, top in zip(trial.crew.cards, trial.crew.tops, strict=True):
            watts = trial.share * top
            yield Setting(
                POWER_LIMIT,
                on_gpu(card),
                watts,
                why=f"{watts:.0f} W, {trial.share:.0%} of its {top:.0f} W: {because}",
                rule=EFFICIENCY_RULE,
                numbers=(("share", trial.share), *numbers),
            )

    def _because(self, trial: Trial) -> tuple[str, tuple[tuple[str, float], ...]]:
        settled = trial.settled
        if settled is None:
            n, bound = len(trial.points), self._law.slowdown
            return (
                f"it is measured whether training costs less energy there, after {n} other "
                f"limit{'s' if n != 1 else ''}; progress is seen as {self._measure.name}, and may "
                f"be {bound:.0%} slower"
            ), (("slowdown_bound", bound),)
        saved, slower = _gain(trial, settled)
        return (
            f"of {len(trial.points)} limits measured the least energy for the work of "
            f"{', '.join(trial.crew.tenants[:3])}: {saved:.0%} less, {slower:.1%} slower; progress "
            f"is seen as {self._measure.name}"
        ), (("energy_saved", saved), ("slowdown", slower), ("draw_watts", settled.watts))

    def _settled(self, trial: Trial, found: Point, state: NodeState) -> Event:
        saved, slower = _gain(trial, found)
        if found.share >= 1:
            text = f"{_cards(trial, state)}: no lower power limit makes training cost less energy"
        else:
            text = (
                f"{_cards(trial, state)}: {found.share:.0%} of the power limit makes training cost "
                f"{saved:.0%} less energy and {slower:.1%} slower, by {self._measure.name}"
            )
        numbers = (("share", found.share), ("energy_saved", saved), ("slowdown", slower))
        return Event(
            "efficiency-settled", state.now.mono, text, on_gpu(trial.crew.cards[0]), numbers
        )


def _gain(trial: Trial, found: Point) -> tuple[float, float]:
    """Energy saved for each unit of work, and how much slower, as parts of what was."""
    base = trial.points[0]
    return 1 - found.cost / base.cost, 1 - found.rate / base.rate


def _ended(trial: Trial, state: NodeState, why: str) -> list[Event]:
    text = f"{_cards(trial, state)}: the power limit is as it was again: {why}"
    if trial.settled is None or trial.settled.share >= 1:
        return []
    return [Event("efficiency-ended", state.now.mono, text, on_gpu(trial.crew.cards[0]))]


def _cards(trial: Trial, state: NodeState) -> str:
    gpus = (state.inventory.gpu(c) for c in trial.crew.cards)
    return ", ".join(label(g) for g in gpus if g is not None) or trial.crew.cards[0]


def _moved_to(trial: Trial, share: float, state: NodeState) -> Trial:
    return msgspec.structs.replace(
        trial, share=share, in_force_at=state.now.mono, tally=None, moved=0, unsteady=0
    )


def _foreign(trial: Trial, state: NodeState) -> tuple[Trial, str]:
    """Whether somebody else wishes something for one of the cards; and why to stand back, if so long."""
    if not any(_wished_by_others(trial, c, top, state) for c, top in _pairs(trial)):
        return msgspec.structs.replace(trial, foreign_since=None), ""
    now = state.now.mono
    since = now if trial.foreign_since is None else trial.foreign_since
    lasts = now - since >= _FOREIGN_SECONDS and (trial.share < 1 or bool(trial.points))
    trial = msgspec.structs.replace(trial, foreign_since=since)
    return trial, "something else acts on the card" if lasts else ""


def _wished_by_others(trial: Trial, card: str, top: float, state: NodeState) -> bool:
    outcome = state.outcomes.get((POWER_LIMIT, on_gpu(card)))
    if outcome is None or outcome.wanted is None or outcome.result in ("refused", "gone"):
        return False
    return abs(outcome.wanted - trial.share * top) >= POWER_LIMIT.deadband


def _only_said(trial: Trial, state: NodeState) -> bool:
    """Whether nothing answers this lever: then the first limit to try stays all there is."""
    found = (state.outcomes.get((POWER_LIMIT, on_gpu(c))) for c in trial.crew.cards)
    return not state.acts or any(o is not None and o.result == "would" for o in found)


def _in_force(trial: Trial, state: NodeState) -> bool:
    """Whether every card has the limit that is wished."""
    for card, top in _pairs(trial):
        as_set = state.fresh(GPU_POWER_LIMIT_WATTS, on_gpu(card))
        if as_set is None or abs(as_set - trial.share * top) >= POWER_LIMIT.deadband:
            return False
    return True


def _pairs(trial: Trial) -> Iterator[tuple[str, float]]:
    return zip(trial.crew.cards, trial.crew.tops, strict=True)
