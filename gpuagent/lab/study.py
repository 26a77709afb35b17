"""An evaluation from beginning to end: which runs it takes, and the report that comes of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from gpuagent.errors import ConfigError
from gpuagent.lab.evaluate import (
    EDGES,
    POINTS,
    Job,
    Progress,
    Run,
    configuration,
    jobs_of,
    measured_from,
)
from gpuagent.lab.outcome import levels_of
from gpuagent.lab.policies import Member, PolicyFile, named
from gpuagent.lab.verdict import (
    L3_GOAL,
    Judgement,
    Row,
    Runs,
    best_static,
    by_policy,
    judge,
    kept,
    rows,
)
from gpuagent.model.inventory import Level
from gpuagent.sim.scenario import Scenario
from gpuagent.sim.vary import VARIATIONS, varied

BASE = VARIATIONS[0].name
SWEEP_SEEDS = 5
"""At most, for each variation."""
_SHORTLIST = 5
"""Static shares that are tried with all seeds of a variation, after one seed of the whole grid."""
_NEARLY = 0.05
"""How far under the goal for L3 one seed may be, so that they are on the list."""


class Player(Protocol):
    """Makes runs: `evaluate.Pool`."""

    def play(self, jobs: Sequence[Job], progress: Progress) -> list[Run]: ...


class Curve(msgspec.Struct, frozen=True):
    """Of one policy as modelled, over all seeds, for the plots."""

    policy: str
    latencies: Mapping[str, tuple[tuple[int, ...], ...]]
    """By service: one row for each seed, as in `Run`."""
    shares: Mapping[str, tuple[tuple[float | None, ...], ...]]
    """By tenant, likewise."""


class Figures(msgspec.Struct, frozen=True):
    """One run, without its curves."""

    policy: str
    variation: str
    seed: int
    missed_ratio: float | None
    p99_ratio: float | None
    joules: float
    work: Mapping[str, float]
    mean_share: Mapping[str, float]
    let_go: int
    held_at_end: tuple[str, ...]
    left: tuple[str, ...]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that an evaluation found. Everything is of a simulation."""

    scenario: str
    about: str
    simulated: bool = True
    seconds: float
    measured_from_seconds: float
    seeds: tuple[int, ...]
    sweep_seeds: tuple[int, ...]
    """None of them where there was no sweep."""
    objectives: Mapping[str, float]
    """Seconds, by L1 service."""
    policies: Mapping[str, str]
    """What each file says of itself, by name."""
    rows: tuple[Row, ...]
    """As modelled."""
    statics: tuple[str, ...]
    best_static: str | None
    judgements: tuple[Judgement, ...]
    """As modelled, by candidate."""
    sweep: tuple[Judgement, ...]
    swept_rows: Mapping[str, tuple[Row, ...]]
    """By variation: what each judgement rests on."""
    not_swept: tuple[str, ...]
    """Variations that change nothing in this scenario, or no run of the first seed."""
    edges: tuple[float, ...] = EDGES
    points: int = POINTS
    curves: tuple[Curve, ...]
    runs: tuple[Figures, ...]

    def row(self, policy: str) -> Row:
        return next(r for r in self.rows if r.policy == policy)


class Study:
    """One evaluation. `run` makes it."""

    def __init__(
        self,
        scenario: Scenario,
        files: Sequence[PolicyFile],
        *,
        candidates: Sequence[str],
        seeds: int,
        seconds: float | None = None,
        sweep: bool = True,
    ) -> None:
        """`candidates` are names of `files`. Raises ConfigError for what cannot be run or compared."""
        self._scenario = scenario
        self._seconds = scenario.seconds if seconds is None else seconds
        self._from = measured_from(scenario, self._seconds)
        self._files = _with_free(files)
        self._free = next(f.name for f in self._files if f.control == "none")
        self._members = tuple(m for f in self._files for m in f.members())
        self._candidates = tuple(candidates)
        self._seeds = tuple(range(1, seeds + 1))
        self._swept = self._seeds[:SWEEP_SEEDS] if sweep else ()
        self._variations = {v.name: varied(scenario, v) for v in VARIATIONS if v.name != BASE}
        self._not_swept = tuple(n for n, s in self._variations.items() if s == scenario)
        self._check()

    def _check(self) -> None:
        names = [f.name for f in self._files]
        problems = [f"{n}: is the name of two policies" for n in names if names.count(n) > 1]
        for member in self._members:
            try:
                configuration(Job(member, self._scenario, BASE, 1, self._seconds))
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(dict.fromkeys(problems))
        if not self._objectives():
            raise ConfigError(
                [f"{self._scenario.name}: no L1 tenant has an objective; there is nothing to judge"]
            )

    def _objectives(self) -> dict[str, float]:
        config = configuration(Job(self._members[0], self._scenario, BASE, 1, self._seconds))
        levels = levels_of(config)
        return {
            t.name: t.objective.seconds
            for t in self._scenario.tenants
            if t.objective is not None and levels.get(t.name) is Level.L1
        }

    @property
    def _statics(self) -> tuple[str, ...]:
        return tuple(m.name for m in self._members if m.control == "static")

    @property
    def _allowed(self) -> float:
        """Part of the requests that the objectives allow to miss them, at most."""
        judged = self._objectives()
        return max(
            1.0 - t.objective.quantile
            for t in self._scenario.tenants
            if t.objective is not None and t.name in judged
        )

    def run(self, pool: Player, progress: Progress = lambda _done, _all: None) -> Report:
        """Make all runs. Raises Failed."""
        first = [*self._jobs(BASE, self._members, self._seeds), *self._pilots()]
        most = len(first) + self._later_count()
        found = pool.play(first, lambda done, _: progress(done, most))
        swept, idle = self._sorted(found)
        found = [run for run in found if run.variation not in idle]
        later = [job for variation in swept for job in self._later(variation, found)]
        every = len(first) + len(later)
        found += pool.play(later, lambda done, _: progress(len(first) + done, every))
        return self._report(found, swept, idle)

    # -- which runs ----------------------------------------------------------------------------------

    def _jobs(self, variation: str, members: Iterable[Member], seeds: Iterable[int]) -> list[Job]:
        scenario = self._variations.get(variation, self._scenario)
        return list(jobs_of(members, scenario, variation, seeds=seeds, seconds=self._seconds))

    def _sweep(self) -> list[str]:
        return [n for n in self._variations if n not in self._not_swept] if self._swept else []

    def _judged(self) -> list[Member]:
        """Those that a sweep takes beside the static shares."""
        also = {self._free, *self._candidates}
        also |= {self._baseline} if self._baseline is not None else set()
        return [m for m in self._members if m.name in also]

    @property
    def _baseline(self) -> str | None:
        """What is compared with where no static shares are given: the first that is no candidate."""
        if self._statics:
            return None
        others = (f.name for f in self._files if f.name not in {*self._candidates, self._free})
        return next(others, None)

    def _pilots(self) -> Iterator[Job]:
        """One seed of everything in every variation."""
        statics = [m for m in self._members if m.control == "static"]
        for variation in self._sweep():
            yield from self._jobs(variation, [*self._judged(), *statics], self._swept[:1])

    def _later_count(self) -> int:
        each = len(self._judged()) + min(_SHORTLIST, len(self._statics))
        return each * len(self._swept[1:]) * len(self._sweep())

    def _sorted(self, pilots: Sequence[Run]) -> tuple[list[str], list[str]]:
        """Variations in which anything is otherwise, and those in which no run of a seed is."""
        seeds = self._swept[:1]
        known = {r.policy: r for r in pilots if r.variation == BASE and r.seed in seeds}
        other = {
            run.variation
            for run in pilots
            if run.variation != BASE
            and msgspec.structs.replace(run, variation=BASE) != known.get(run.policy)
        }
        swept = [v for v in self._sweep() if v in other]
        return swept, [v for v in self._sweep() if v not in other]

    def _later(self, variation: str, pilots: Sequence[Run]) -> list[Job]:
        """What is left to run after one seed: static shares only where they may be the best."""
        seen = by_policy(r for r in pilots if r.variation == variation)
        listed = set(self._shortlist(seen))
        members = [m for m in self._members if m.name in listed]
        return self._jobs(variation, [*self._judged(), *members], self._swept[1:])

    def _shortlist(self, seen: Runs) -> list[str]:
        """The static shares that may turn out the best of a variation, by its first seed."""
        seed = self._swept[0]
        free = seen[self._free][seed]

        def rank(name: str) -> tuple[bool, float]:
            run = seen[name][seed]
            keeps = kept(run, free, Level.L3)
            keeps = 1.0 if keeps is None else keeps
            missed = 1.0 if run.missed_ratio is None else run.missed_ratio
            short = keeps < L3_GOAL - _NEARLY
            return short, -keeps if short else missed

        return sorted(self._statics, key=rank)[:_SHORTLIST]

    # -- what comes of them --------------------------------------------------------------------------

    def _report(
        self, runs: Sequence[Run], variations: Sequence[str], idle: Sequence[str]
    ) -> Report:
        base = by_policy(r for r in runs if r.variation == BASE)
        swept = {v: by_policy(r for r in runs if r.variation == v) for v in variations}
        table = rows(base, self._free)
        statics = [r for r in table if r.policy in self._statics]
        best = best_static(statics)
        return Report(
            scenario=self._scenario.name,
            about=self._scenario.about,
            seconds=self._seconds,
            measured_from_seconds=self._from,
            seeds=self._seeds,
            sweep_seeds=self._swept,
            objectives=self._objectives(),
            policies={f.name: f.about for f in self._files},
            rows=table,
            statics=self._statics,
            best_static=None if best is None else best[0].policy,
            judgements=self._judgements(BASE, base),
            sweep=tuple(j for v, mine in swept.items() for j in self._judgements(v, mine)),
            swept_rows={v: rows(mine, self._free) for v, mine in swept.items()},
            not_swept=(*idle, *self._not_swept) if self._swept else (),
            curves=tuple(_curve(name, mine.values()) for name, mine in base.items()),
            runs=tuple(map(_figures, runs)),
        )

    def _judgements(self, variation: str, runs: Runs) -> tuple[Judgement, ...]:
        return tuple(
            judge(
                runs,
                candidate=candidate,
                free=self._free,
                statics=self._statics,
                variation=variation,
                allowed=self._allowed,
                baseline=self._baseline,
            )
            for candidate in self._candidates
        )


def _with_free(files: Sequence[PolicyFile]) -> tuple[PolicyFile, ...]:
    """With no control, which everything is measured by, first."""
    free = [f for f in files if f.control == "none"][:1] or [named("none")]
    return (*free, *(f for f in files if f not in free))


def _curve(policy: str, runs: Iterable[Run]) -> Curve:
    made = tuple(runs)
    services = dict.fromkeys(name for run in made for name in run.latencies)
    tenants = dict.fromkeys(name for run in made for name in run.shares)
    return Curve(
        policy=policy,
        latencies={n: tuple(r.latencies[n] for r in made if n in r.latencies) for n in services},
        shares={n: tuple(r.shares[n] for r in made if n in r.shares) for n in tenants},
    )


def _figures(run: Run) -> Figures:
    return Figures(
        policy=run.policy,
        variation=run.variation,
        seed=run.seed,
        missed_ratio=run.missed_ratio,
        p99_ratio=run.p99_ratio,
        joules=run.joules,
        work=run.work(),
        mean_share={t.name: t.mean_share for t in run.tenants},
        let_go=run.let_go,
        held_at_end=run.held_at_end,
        left=run.left,
    )
