"""How values look on a terminal: units, unknown as "-", names without the power to do harm."""

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

import click

from gpuagent.log import printable

UNKNOWN = "-"
Number = float | str | None

_GIB = 1024**3
_NO_END = 100_000
"""Columns of what is no terminal: more than any line has."""


def emit(document: object) -> None:
    """Print JSON: ASCII only, so that no name reaches the terminal as it is."""
    # DEL is the one ASCII control character that JSON does not escape.
    click.echo(json.dumps(document, indent=2).replace("\x7f", "\\u007f"))


def say(text: str = "", hang: int = 2) -> None:
    """Print one line, wrapped at the width of the terminal, continued `hang` columns further in.

    Where there is no terminal it is one line, for whatever reads it.
    """
    indent = " " * (len(text) - len(text.lstrip(" ")))
    for line in textwrap.wrap(
        printable(text),
        width(),
        subsequent_indent=indent + " " * hang,
        break_on_hyphens=False,
        break_long_words=False,  # a path is for copying
    ) or [""]:
        click.echo(line)


def width() -> int:
    """Columns of the terminal, or as COLUMNS says; where there is neither, as many as it takes."""
    if not (sys.stdout.isatty() or os.environ.get("COLUMNS")):
        return _NO_END
    return max(40, shutil.get_terminal_size((80, 24)).columns)


def amount(name: str, value: Number) -> str:
    """`value` of something whose name, or unit, ends in its base unit."""
    if value is None:
        return UNKNOWN
    if isinstance(value, str):
        return "unlimited" if value == "+Inf" else printable(value)
    unit = name.rpartition("_")[2]
    if unit == "bytes":
        return f"{value / _GIB:.1f} GiB"
    if unit == "ratio":
        return f"{value * 100:.0f} %"
    if unit == "watts":
        return f"{value:.0f} W"
    if unit in _SYMBOLS:
        return f"{_short(value)} {_SYMBOLS[unit]}"
    return _short(value)


_SYMBOLS = {
    "celsius": "C",
    "cores": "cores",
    "seconds": "s",
    "hertz": "Hz",
    "joules": "J",
}


def _short(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def seconds(value: float | None) -> str:
    """A duration in the unit that suits it."""
    if value is None:
        return UNKNOWN
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if value >= 2 * size:
            return f"{value / size:.0f} {unit}"
    return f"{value:.0f} s"


def listed(names: Iterable[object]) -> str:
    return ", ".join(printable(str(n)) for n in names) or UNKNOWN


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print columns, each as wide as it needs and the terminal allows."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in head:
        columns.add_column(Text(name), overflow="fold")
    for row in rows:
        columns.add_row(*(Text(printable(cell)) for cell in row))
    Console(file=sys.stdout, width=width(), highlight=False, markup=False, emoji=False).print(
        columns
    )
