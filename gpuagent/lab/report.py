"""How the report of an evaluation reads: tables and sentences for 80 columns."""

import io
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpuagent.lab.stats import Interval
from gpuagent.lab.study import BASE, Report
from gpuagent.lab.verdict import L3_GOAL, MISSES_GOAL, Check, Judgement, Met, Regime, Row, together
from gpuagent.log import printable
from gpuagent.model.inventory import Level

WIDTH = 80
_UNKNOWN = "-"
_STYLES: dict[Met, str] = {"yes": "green", "no": "red", "unclear": "yellow"}
_WORDS: dict[Met, str] = {"yes": "reached", "no": "MISSED", "unclear": "unclear"}
_MARKS: dict[Regime, str] = {"levers act": "", "no lever acts": " 1", "nothing to protect": " 2"}
_NOTES: dict[Regime, str] = {
    "no lever acts": "1: no lever has any effect; it must do no harm.",
    "nothing to protect": "2: the objective is kept without control; it must cost little.",
}
_SHORT = {"misses": "misses", "p99": "p99", "total throughput": "work", "L3 keeps": "L3 keeps"}


def text(report: Report) -> str:
    """All of it, plain."""
    out = Console(file=io.StringIO(), width=WIDTH, highlight=False, markup=False, emoji=False)
    out.print(picture(report))
    assert isinstance(out.file, io.StringIO)
    return "\n".join(line.rstrip() for line in out.file.getvalue().splitlines()) + "\n"


def picture(report: Report) -> Group:
    """All of it, with colours where there are any."""
    parts: list[RenderableType] = [*_head(report), Text(), _policies(report), *_notes(report)]
    for judgement in report.judgements:
        parts += [Text(), *_judged(judgement)]
        if report.sweep:
            parts += [Text(), *_swept(report, judgement.candidate)]
    if report.not_swept:
        left = ", ".join(report.not_swept)
        parts += [Text(), Text(printable(f"No run depends on: {left}."), style="dim")]
    parts += [Text(), *_conclusions(report)]
    return Group(*parts)


def _head(report: Report) -> Iterator[Text]:
    yield Text(printable(f"{report.scenario}: {report.about}"), style="bold")
    goals = ", ".join(f"{n} {s * 1000:g} ms" for n, s in report.objectives.items())
    yield Text(
        f"Simulated; {len(report.seeds)} seeds of {report.seconds:g} s, measured from second "
        f"{report.measured_from_seconds:g}. Objective: {printable(goals)}. "
        "Intervals are 95 %."
    )


# -- policies as modelled -------------------------------------------------------------------------------


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=True, overflow="ellipsis")
    return table


def _policies(report: Report) -> Table:
    levels = [n for n in ("L2", "L3") if any(n in r.kept_ratio for r in report.rows)]
    table = _table("in %", "Misses", "p99/goal", *levels, "Work", "Energy")
    for row in report.rows:
        if _shown(report, row):
            mark = "*" if row.policy == report.best_static else ""
            table.add_row(
                printable(row.policy) + mark,
                percent(row.missed_ratio, digits=2),
                percent(row.p99_ratio, digits=0),
                *(percent(row.kept_ratio.get(n), digits=0, spread=False) for n in levels),
                percent(row.throughput_ratio),
                percent(row.joules_ratio, digits=0, spread=False),
            )
    return table


def _shown(report: Report, row: Row) -> bool:
    """Of static shares only those that nothing beats, and the best."""
    hidden = row.policy in report.statics and not row.frontier
    return not hidden or row.policy == report.best_static


def _notes(report: Report) -> Iterator[Text]:
    hidden = sum(1 for r in report.rows if not _shown(report, r))
    notes = [
        "L2, L3: work of their tenants, of that without control; Work: the mean over all tenants."
    ]
    if report.best_static is not None:
        notes.append(f"* the best static shares: fewest misses while L3 keeps {L3_GOAL:.0%}.")
    if hidden:
        notes.append(
            f"{hidden} static shares are not shown: others have no more misses and no less work."
        )
    yield from (Text(note, style="dim") for note in notes)


def percent(found: Interval | None, *, digits: int = 1, spread: bool = True) -> str:
    """A ratio in percent, with half its interval's width."""
    if found is None:
        return _UNKNOWN
    value = f"{100 * found.value:.{digits}f}"
    if not spread or found.high is None:
        return value
    return f"{value} ±{100 * (found.high - found.value):.{digits}f}"


# -- goals ----------------------------------------------------------------------------------------------


def _judged(judgement: Judgement) -> Iterator[RenderableType]:
    if judgement.against is None:
        what = f"{judgement.candidate}: {judgement.regime}; it must do no harm"
    elif not judgement.static:
        what = f"{judgement.candidate} against {judgement.against}"
    elif judgement.enough:
        what = f"{judgement.candidate} against the best static shares, {judgement.against}"
    else:
        what = (
            f"{judgement.candidate} against {judgement.against}: under no static shares does L3 "
            f"keep {L3_GOAL:.0%} of its work, under these the most"
        )
    yield Text(printable(what), style="bold")
    table = _table("Goal", "", "Found", "95 %", "")
    for check in judgement.checks:
        table.add_row(
            check.name,
            "" if check.text else _goal(check),
            check.text or _change(check),
            _bounds(check.found),
            Text(_WORDS[check.met], style=_STYLES[check.met]),
        )
    yield table


def _signed(check: Check) -> str:
    return "" if check.name == "L3 keeps" else "+"


def _goal(check: Check) -> str:
    if check.name in ("misses", "p99"):
        return f"at most {100 * check.goal:+.0f} %"
    return f"at least {100 * check.goal:{_signed(check)}.0f} %"


def _change(check: Check) -> str:
    if check.found is None:
        return _UNKNOWN
    return f"{100 * check.found.value:{_signed(check)}.1f} %"


def _bounds(found: Interval | None) -> str:
    if found is None or found.low is None or found.high is None:
        return ""
    return f"{100 * found.low:.1f} to {100 * found.high:.1f}"


# -- sweep ----------------------------------------------------------------------------------------------


def _swept(report: Report, candidate: str) -> Iterator[RenderableType]:
    mine = [j for j in report.sweep if j.candidate == candidate]
    title = f"{candidate}, where the model is otherwise ({len(report.sweep_seeds)} seeds)"
    yield Text(printable(title), style="bold")
    table = _table("", "Misses", "p99", "Work", "L3 keeps", "")
    for judgement in mine:
        by_name = {c.name: c for c in judgement.checks}
        found = (by_name.get(n) for n in ("misses", "p99", "total throughput", "L3 keeps"))
        table.add_row(
            printable(judgement.variation),
            *(Text() if c is None else Text(_change(c), style=_STYLES[c.met]) for c in found),
            Text(_WORDS[judgement.met] + _MARKS[judgement.regime], style=_STYLES[judgement.met]),
        )
    yield table
    yield from (Text(_NOTES[r], style="dim") for r in _NOTES if r in {j.regime for j in mine})


# -- what it comes to -----------------------------------------------------------------------------------


def _conclusions(report: Report) -> Iterator[Text]:
    for judgement in report.judgements:
        met = conclusion(report, judgement.candidate)
        for i, line in enumerate(sentences(report, judgement)):
            style = "" if i else _STYLES[met]
            yield Text(_hung(printable(line)), style=style)


def _hung(line: str) -> str:
    """Wrapped, and continued further in."""
    indent = " " * (len(line) - len(line.lstrip(" ")) + 2)
    return textwrap.fill(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def conclusion(report: Report, candidate: str) -> Met:
    """Whether a candidate reaches its goals wherever it was tried."""
    every = (*report.judgements, *report.sweep)
    return together(j.met for j in every if j.candidate == candidate)


def sentences(report: Report, judgement: Judgement) -> Iterator[str]:
    """What a candidate comes to; where it does not reach its goals, why, and what comes nearest."""
    name = judgement.candidate
    swept = [j for j in report.sweep if j.candidate == name]
    met = conclusion(report, name)
    range_ = f"as modelled and in {len(swept)} variations" if swept else "as modelled, not swept"
    if met == "yes":
        idle = [j.variation for j in swept if j.regime == "no lever acts"]
        harmless = f"; no harm where no lever acts ({', '.join(idle)})" if idle else ""
        reached = "all goals are reached"
        if judgement.regime != "levers act":
            reached = f"{judgement.regime}, and it does no harm"
        yield f"{name}: {reached}, {range_}{harmless}."
        return
    word = "not all goals are reached" if met == "no" else "it is not clear yet; take more seeds"
    yield f"{name}: {word}; tried {range_}."
    for one in (judgement, *swept):
        if one.met != "yes":
            yield f"  {one.variation}: {'; '.join([*map(_short, _open(one.checks)), *_why(report, one)])}"
    if judgement.met == "no":
        yield from _trade_off(report, judgement)


def _open(checks: Iterable[Check]) -> list[Check]:
    return [c for c in checks if c.met != "yes"]


def _why(report: Report, judgement: Judgement) -> Iterator[str]:
    """What the runs say of the reason."""
    key = (judgement.candidate, judgement.variation)
    mine = [r for r in report.runs if (r.policy, r.variation) == key]
    gone = sum(1 for r in mine if r.let_go)
    if gone and judgement.regime == "levers act":
        yield f"levers were let go as of no use in {gone} of {len(mine)} runs"
    most = _most(report, judgement)
    if most is not None and most[1] > MISSES_GOAL:
        yield f"no policy tried does more for misses than {most[0]}, {100 * most[1]:+.0f} %"


def _most(report: Report, judgement: Judgement) -> tuple[str, float] | None:
    """The policy of the fewest misses in a variation, and what it changes of the baseline's."""
    found = report.swept_rows.get(judgement.variation, report.rows)
    against = [r for r in found if r.policy == judgement.against]
    misses = [c for c in judgement.checks if c.name == "misses" and c.met == "no"]
    if not against or not misses or not _misses(against[0]):
        return None
    fewest = min(found, key=_misses)
    return fewest.policy, _misses(fewest) / _misses(against[0]) - 1.0


def _short(check: Check) -> str:
    if check.text:
        return f"{check.name}: {check.text}"
    unclear = "unclear, " if check.met == "unclear" else ""
    return f"{unclear}{_SHORT[check.name]} {_change(check)}, goal {_goal(check)}"


def _trade_off(report: Report, judgement: Judgement) -> Iterator[str]:
    """The best of all that was tried, and what stands in the candidate's way."""
    known = [r for r in report.rows if r.missed_ratio is not None]
    enough = [r for r in known if r.keeps(Level.L3) >= L3_GOAL]
    if enough:
        best = min(enough, key=_misses)
        yield f"  Best trade-off while L3 keeps {L3_GOAL:.0%}: {_figures(best)}."
    mine = report.row(judgement.candidate)
    yield f"  The candidate: {_figures(mine)}; mean share {_shares(mine)}."
    nearest = _same_misses(known, report.statics, mine)
    if nearest is not None:
        yield f"  Static shares of as few misses: {_figures(nearest)}."


def _same_misses(known: Sequence[Row], statics: Sequence[str], mine: Row) -> Row | None:
    """What static shares have to take from L3 for as few misses."""
    as_few = [r for r in known if r.policy in statics and _misses(r) <= _misses(mine)]
    return max(as_few, key=lambda r: r.keeps(Level.L3), default=None)


def _misses(row: Row) -> float:
    return 1.0 if row.missed_ratio is None else row.missed_ratio.value


def _figures(row: Row) -> str:
    p99 = percent(row.p99_ratio, digits=0, spread=False)
    return (
        f"{row.policy}, misses {100 * _misses(row):.2f} %, p99 {p99} % of the objective, "
        f"L3 keeps {row.keeps(Level.L3):.0%}"
    )


def _shares(row: Row) -> str:
    return ", ".join(f"{n} {s:.2f}" for n, s in row.mean_share.items() if n != Level.L1.name)


def head_of(report: Report) -> str:
    """One line for a plot."""
    return f"{report.scenario}, {BASE}, {len(report.seeds)} seeds (simulated)"
