"""A row of the table: one figure and its budget, and how rows are judged, printed and written."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.table import Table

Verdict = Literal["ok", "over budget", "FAILS", ""]


class Row(msgspec.Struct, frozen=True):
    """One figure. Less is better. Without `fails_above` it is for comparison only."""

    name: str
    value: float | None
    """None where it could not be measured."""
    unit: str = ""
    budget: float | None = None
    fails_above: float | None = None
    note: str = ""

    @property
    def passes(self) -> bool:
        """False beyond `fails_above`, and where a figure with a budget could not be measured."""
        if self.fails_above is None:
            return True
        return self.value is not None and self.value <= self.fails_above

    @property
    def verdict(self) -> Verdict:
        if not self.passes:
            return "FAILS"
        if self.budget is None or self.value is None:
            return ""
        return "ok" if self.value <= self.budget else "over budget"


def not_measured(name: str, why: str) -> Row:
    """A row that fails, for a group of rows that could not be measured."""
    return Row(f"{name}: not measured", None, budget=0.0, fails_above=0.0, note=why)


class Group(msgspec.Struct, frozen=True):
    """Rows that are measured together, as they are printed together."""

    name: str
    rows: tuple[Row, ...]


# -- statistics ----------------------------------------------------------------------------------------


def quantile(values: Iterable[float], q: float) -> float:
    """Nearest rank: a value that was really seen, the worst one where there are few.

    Raises ValueError where there is none.
    """
    ranked = sorted(values)
    if not ranked:
        raise ValueError("no values")
    return ranked[max(math.ceil(q * len(ranked)), 1) - 1]


def p99(values: Iterable[float]) -> float:
    return quantile(values, 0.99)


def median(values: Iterable[float]) -> float:
    return quantile(values, 0.5)


# -- what becomes of them ------------------------------------------------------------------------------

_STYLES: Mapping[Verdict, str] = {"ok": "green", "over budget": "yellow", "FAILS": "bold red"}


def figure(value: float | None) -> str:
    """Three significant digits, as people write them."""
    if value is None:
        return "-"
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def table(groups: Iterable[Group], caption: str) -> Table:
    out = Table(caption=caption, caption_justify="left", pad_edge=False)
    out.add_column("what", overflow="fold")
    for name in ("value", "unit", "budget", "fails above"):
        out.add_column(name, justify="left" if name == "unit" else "right")
    out.add_column("")
    out.add_column("how", style="dim", overflow="fold")
    for group in groups:
        out.add_section()
        for row in group.rows:
            out.add_row(
                row.name,
                figure(row.value),
                row.unit,
                "" if row.budget is None else figure(row.budget),
                "" if row.fails_above is None else figure(row.fails_above),
                f"[{_STYLES[row.verdict]}]{row.verdict}[/]" if row.verdict else "",
                row.note,
            )
    return out


def show(groups: Sequence[Group], caption: str) -> None:
    # Piped, rich would take 80 columns: too few for any of it.
    console = Console() if os.isatty(1) else Console(width=160)
    console.print(table(groups, caption))


def document(groups: Iterable[Group]) -> list[dict[str, Any]]:
    """The rows as `build/bench.json` has them."""
    return [
        {
            "name": row.name,
            "value": row.value,
            "unit": row.unit,
            "budget": row.budget,
            "fails_above": row.fails_above,
            "pass": row.passes,
        }
        for group in groups
        for row in group.rows
    ]


def write(groups: Iterable[Group], path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document(groups), file, indent=1)
        file.write("\n")
