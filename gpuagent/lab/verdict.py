"""What a comparison shows: each policy in figures, and whether a candidate reaches its goals. Pure.

Work is compared with what the same tenant does without any agent under the same seed: a tenant *keeps*
the ratio of the two, a level the mean over its tenants, and *total throughput* is the mean over all
tenants, so that iterations and requests can be added up. What others reached (arXiv 2508.20274, FACTS
7) is the goal: against the best static shares 32 % fewer requests over their objective, a p99 lower
by 15 %, at most 5 % less total throughput, and L3 keeps 80 % of its work. The best static shares are
those of the fewest misses under which L3 keeps that much too.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from gpuagent.lab import stats
from gpuagent.lab.evaluate import Run
from gpuagent.lab.stats import Interval
from gpuagent.model.inventory import Level

MISSES_GOAL = -0.32
P99_GOAL = -0.15
THROUGHPUT_GOAL = -0.05
L3_GOAL = 0.80
HARM_GOAL = -0.02
"""See the module; the last is for where no lever has any effect."""
LEAST_EFFECT = 0.10
"""Levers act where the tightest static shares take away this part of the misses; less may be chance."""

Runs = Mapping[str, Mapping[int, Run]]
"""Of one variation: by policy, then by seed."""
Met = Literal["yes", "no", "unclear"]
Regime = Literal["levers act", "no lever acts", "nothing to protect"]


def by_policy(runs: Iterable[Run]) -> dict[str, dict[int, Run]]:
    """Runs of one variation in order."""
    found: dict[str, dict[int, Run]] = {}
    for run in runs:
        found.setdefault(run.policy, {})[run.seed] = run
    return found


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One policy in one variation: means over its seeds. None where it is not known."""

    policy: str
    seeds: int
    missed_ratio: Interval | None
    p99_ratio: Interval | None
    """p99 of the L1 services as a part of their objective."""
    kept_ratio: Mapping[str, Interval]
    """By level."""
    throughput_ratio: Interval | None
    joules_ratio: Interval | None
    """Energy, of that without control."""
    mean_share: Mapping[str, float]
    """By level, over the window."""
    frontier: bool = False
    """Whether no other policy has both fewer misses and more throughput."""

    def keeps(self, level: Level) -> float:
        """What a level keeps; 1 where it has no tenants."""
        kept = self.kept_ratio.get(level.name)
        return 1.0 if kept is None else kept.value


class Check(msgspec.Struct, frozen=True):
    """One goal, and how it was met. "unclear" where the interval has the goal within it."""

    name: str
    goal: float
    found: Interval | None
    met: Met
    text: str = ""
    """Instead of a figure."""


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate in one variation."""

    candidate: str
    variation: str
    regime: Regime
    against: str | None
    """The best static shares, or the control that was given instead; None for no control at all."""
    static: bool
    """Whether that is a static share."""
    enough: bool
    """Whether L3 keeps enough under it; where it keeps so under none, it is that of the most."""
    checks: tuple[Check, ...]

    @property
    def met(self) -> Met:
        return together(c.met for c in self.checks)


def together(these: Iterable[Met]) -> Met:
    """All of them as one."""
    found = set(these)
    if "no" in found:
        return "no"
    return "unclear" if "unclear" in found else "yes"


# -- figures --------------------------------------------------------------------------------------------


def kept(run: Run, free: Run, level: Level | None = None) -> float | None:
    """Mean over the tenants (of one level) of work by that without control; None where that is none."""
    before = free.work()
    parts = [
        t.work / before[t.name]
        for t in run.tenants
        if before.get(t.name) and (level is None or t.level is level)
    ]
    return sum(parts) / len(parts) if parts else None


def rows(runs: Runs, free: str) -> tuple[Row, ...]:
    """Every policy; `free` is the name of the one without control."""
    made = [_row(name, mine, runs[free]) for name, mine in runs.items()]
    return tuple(
        msgspec.structs.replace(row, frontier=not any(_beats(other, row) for other in made))
        for row in made
    )


def _row(name: str, mine: Mapping[int, Run], free: Mapping[int, Run]) -> Row:
    pairs = [(run, free[seed]) for seed, run in mine.items() if seed in free]
    levels = sorted({t.level for run, _ in pairs for t in run.tenants if t.level is not None})
    by_level = {v.name: stats.mean([kept(r, f, v) for r, f in pairs]) for v in levels}
    return Row(
        policy=name,
        seeds=len(pairs),
        missed_ratio=stats.mean([r.missed_ratio for r, _ in pairs]),
        p99_ratio=stats.mean([r.p99_ratio for r, _ in pairs]),
        kept_ratio={level: found for level, found in by_level.items() if found is not None},
        throughput_ratio=stats.mean([kept(r, f) for r, f in pairs]),
        joules_ratio=stats.ratio([r.joules for r, _ in pairs], [f.joules for _, f in pairs]),
        mean_share={v.name: _mean_share([r for r, _ in pairs], v) for v in levels},
    )


def _mean_share(these: Iterable[Run], level: Level) -> float:
    found = [t.mean_share for run in these for t in run.tenants if t.level is level]
    return sum(found) / len(found) if found else 1.0


def _beats(one: Row, other: Row) -> bool:
    """Better in one and no worse in the other; never for one that is not known."""
    figures = (one.missed_ratio, one.throughput_ratio, other.missed_ratio, other.throughput_ratio)
    if any(f is None for f in figures):
        return False
    misses, work, other_misses, other_work = (f.value for f in figures if f is not None)
    no_worse = misses <= other_misses and work >= other_work
    return no_worse and (misses, work) != (other_misses, other_work)


def best_static(found: Sequence[Row]) -> tuple[Row, bool] | None:
    """The best static shares, and whether L3 keeps enough under them; None where there are none.

    Only those of the most seeds count. Where L3 keeps enough under none: the one under which most.
    """
    most = max((r.seeds for r in found), default=0)
    known = [r for r in found if r.seeds == most and r.missed_ratio is not None]
    enough = [r for r in known if r.keeps(Level.L3) >= L3_GOAL]
    if enough:
        return min(enough, key=_misses), True
    return (max(known, key=lambda r: r.keeps(Level.L3)), False) if known else None


def _misses(row: Row) -> float:
    return row.missed_ratio.value if row.missed_ratio is not None else 1.0


def regime_of(runs: Runs, free: str, allowed: float, witness: str | None) -> Regime:
    """Whether there is something to protect, and whether the levers can protect it.

    `allowed` is the part of the requests that may miss the objective. The `witness` says whether
    levers act, and never the candidate: one that holds nobody would testify for itself. Without a
    witness they are taken to act.
    """
    missed = stats.mean([r.missed_ratio for r in runs[free].values()])
    if missed is None or missed.value <= allowed:
        return "nothing to protect"
    if witness is None:
        return "levers act"
    mine = runs[witness]
    seeds = sorted(set(mine) & set(runs[free]))
    found = stats.ratio(
        [mine[s].missed_ratio for s in seeds], [runs[free][s].missed_ratio for s in seeds]
    )
    acts = found is not None and found.value <= 1.0 - LEAST_EFFECT
    return "levers act" if acts else "no lever acts"


def floor_of(runs: Runs, statics: Sequence[str]) -> str | None:
    """The static shares that leave the least: what these do not relieve, no lever does.

    One for all, for of many that do nothing one comes out better by chance.
    """

    def left(name: str) -> float:
        shares = [t.mean_share for r in runs[name].values() for t in r.tenants]
        return sum(shares) / len(shares) if shares else 1.0

    return min((name for name in statics if name in runs), key=left, default=None)


# -- goals ----------------------------------------------------------------------------------------------


def judge(
    runs: Runs, *, candidate: str, free: str, statics: Sequence[str], variation: str,
    allowed: float, baseline: str | None = None,
) -> Judgement:  # fmt: skip
    """One candidate in one variation. `baseline` is compared with where there are no statics."""
    regime = regime_of(runs, free, allowed, floor_of(runs, statics) or baseline)
    table = {row.policy: row for row in rows(runs, free)}
    best = best_static([table[name] for name in statics if name in table])
    against = best[0].policy if best is not None else baseline
    acts = regime == "levers act"
    if acts and against is not None:
        checks = _against(runs, candidate, against, free, static=best is not None)
    else:
        checks = _harmless(runs, candidate, free, acts=regime == "nothing to protect")
    return Judgement(
        candidate=candidate,
        variation=variation,
        regime=regime,
        against=against if acts else None,
        static=acts and best is not None,
        enough=best is None or best[1],
        checks=checks,
    )


def _against(
    runs: Runs, candidate: str, against: str, free: str, *, static: bool
) -> tuple[Check, ...]:
    """Of another control that is compared with, it is only asked whether the candidate is better."""

    def change(figure: Callable[[Run, Run], float | None]) -> Interval | None:
        found = stats.ratio(*_figures(runs, candidate, against, free, figure))
        return None if found is None else found.shifted(-1.0)

    keeps, _ = _figures(runs, candidate, against, free, _l3)
    checks = [
        _at_most("misses", MISSES_GOAL if static else 0.0, change(lambda r, _: r.missed_ratio)),
        _at_most("p99", P99_GOAL if static else 0.0, change(lambda r, _: r.p99_ratio)),
        _at_least("total throughput", THROUGHPUT_GOAL, change(kept)),
    ]
    if any(k is not None for k in keeps):
        checks.append(_at_least("L3 keeps", L3_GOAL, stats.mean(keeps)))
    return tuple(checks)


def _figures(
    runs: Runs, one: str, other: str, free: str, figure: Callable[[Run, Run], float | None]
) -> tuple[list[float | None], list[float | None]]:
    """A figure under two policies, seed by seed."""
    seeds = sorted(set(runs[one]) & set(runs[other]) & set(runs[free]))
    return (
        [figure(runs[one][s], runs[free][s]) for s in seeds],
        [figure(runs[other][s], runs[free][s]) for s in seeds],
    )


def _l3(run: Run, free: Run) -> float | None:
    return kept(run, free, Level.L3)


def _harmless(runs: Runs, candidate: str, free: str, *, acts: bool) -> tuple[Check, ...]:
    """Against no control. Where no lever acts nobody may be held in vain, and nothing may be lost.

    Where one acts and nothing needs it, what it costs is bounded as it is elsewhere.
    """
    mine, _ = _figures(runs, candidate, free, free, kept)
    found = stats.mean(mine)
    lost = None if found is None else found.shifted(-1.0)
    every = [runs[candidate][s] for s in sorted(runs[candidate])]
    checks = [_at_least("total throughput", THROUGHPUT_GOAL if acts else HARM_GOAL, lost)]
    keeps, _ = _figures(runs, candidate, free, free, _l3)
    if acts and any(k is not None for k in keeps):
        checks.append(_at_least("L3 keeps", L3_GOAL, stats.mean(keeps)))
    if not acts:
        checks.append(_nobody(every, held=True))
    return (*checks, _nobody(every, held=False))


def _nobody(these: Sequence[Run], *, held: bool) -> Check:
    """Nobody held at the end; or nothing left behind when the agent had stopped."""
    found = [r.held_at_end if held else r.left for r in these]
    bad = sum(1 for f in found if f)
    names = ", ".join(sorted({n for f in found for n in f})[:3])
    name = "let go at the end" if held else "put back"
    text = f"not in {bad} of {len(these)} runs: {names}" if bad else f"in all {len(these)} runs"
    return Check(name, 0.0, None, "no" if bad else "yes", text)


def _at_most(name: str, goal: float, found: Interval | None) -> Check:
    turned = None
    if found is not None:
        high, low = found.high, found.low
        turned = Interval(
            -found.value,
            None if high is None else -high,
            None if low is None else -low,
            found.count,
        )
    return Check(name, goal, found, _reaches(turned, -goal))


def _at_least(name: str, goal: float, found: Interval | None) -> Check:
    return Check(name, goal, found, _reaches(found, goal))


def _reaches(found: Interval | None, goal: float) -> Met:
    """Whether all of an interval is at the goal or above it."""
    if found is None:
        return "unclear"
    if found.low is None or found.high is None:
        return "no" if found.value < goal else "unclear"
    if found.low >= goal:
        return "yes"
    return "no" if found.high < goal else "unclear"
