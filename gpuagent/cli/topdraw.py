"""The picture that `gpuagent top` draws of an answer: pure functions, no terminal."""

import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len, set_cell_size

from gpuagent.cli.client import Document
from gpuagent.cli.latency import at, known, latency, over
from gpuagent.cli.override import value_of
from gpuagent.cli.screen import Line, Style
from gpuagent.cli.show import UNKNOWN, amount, listed, seconds
from gpuagent.cli.topview import SORTS, Sort, Told, View, shown
from gpuagent.log import printable

_CARD_FRACTION = 4
"""Cards take at most this part of the screen, so that tenants have room."""
_TROUBLES = 3

HELP = (
    ("q", "quit"),
    ("s", "sort by the next of: " + ", ".join(SORTS)),
    ("/", "show only tenants whose name has what you type; Escape shows all"),
    ("arrows, j, k", "choose a tenant; Page Up, Page Down, Home and End work, too"),
    ("w, Enter", "say why the chosen tenant is treated as it is, or stop saying it"),
    ("p", "freeze the display, or let it go on; the agent goes on in any case"),
    ("?", "this list, or back"),
)


def lines(view: View, told: Told | None, trouble: str, columns: int, rows: int) -> list[Line]:
    """The whole picture: `rows` lines of at most `columns` cells each, keys on the last."""
    page = _Page(columns)
    page.extend(_head(view, told, trouble, columns))
    if view.help:
        page.add("")
        for key, what in HELP:
            page.wrap(f"{key:<14}{what}", hang=14)
    elif told is not None:
        left = rows - 1
        _cards(page, told, most=max(1, left // _CARD_FRACTION))
        pane = _why(view, told, columns) if view.why else []
        room = left - len(page) - 2
        pane = pane[: max(3, room // 2)]
        _tenants(page, view, told, most=room - len(pane))
        page.extend(pane)
    del page.lines[max(0, rows - 1) :]
    while len(page) < rows - 1:
        page.add("")
    page.add(_foot(view))
    return page.lines[:rows]


def once(told: Told, columns: int) -> list[Line]:
    """The same, as long as it needs to be, for where there is no terminal."""
    page = _Page(columns)
    page.extend(_head(View(), told, "", columns))
    _cards(page, told, most=len(told.gpus or ()))
    _tenants(page, View(), told, most=len(told.tenants or ()) + 1, choose=False)
    return page.lines


class _Page:
    """Lines, each made harmless and cut to the width."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.lines: list[Line] = []

    def __len__(self) -> int:
        return len(self.lines)

    def add(self, text: str, style: Style = "") -> None:
        self.lines.append(Line(fit(text, self.columns), style))

    def wrap(self, text: str, style: Style = "", hang: int = 2) -> None:
        for line in _wrapped(text, self.columns, hang):
            self.add(line, style)

    def extend(self, more: Iterable[Line]) -> None:
        for line in more:
            self.add(line.text, line.style)


def fit(text: str, cells: int) -> str:
    """`text` without the power to do harm, and cut to so many cells; what is cut ends in "~"."""
    text = printable(text)
    if cell_len(text) <= cells:
        return text
    return set_cell_size(text, max(0, cells - 1)) + "~"[:cells]


def _wrapped(text: str, columns: int, hang: int = 2) -> list[str]:
    return textwrap.wrap(
        printable(text), max(columns, hang + 10), subsequent_indent=" " * hang
    ) or [""]


def _head(view: View, told: Told | None, trouble: str, columns: int) -> Iterator[Line]:
    if told is None:
        yield Line("gpuagent", "head")
    else:
        yield from _summary(told)
        for text in _few(_complaints(told)):
            yield Line(text, "bad")
    if trouble:
        yield from (Line(x, "bad") for x in _wrapped(trouble, columns)[:_TROUBLES])
    if view.paused:
        yield Line("The display is frozen; p lets it go on.", "bad")


def _summary(told: Told) -> Iterator[Line]:
    node = told.node
    doing = "acting" if node["acts"] else "changing nothing"
    clock = time.strftime("%H:%M:%S", time.localtime(node["taken_at"]))
    simulated = "SIMULATED HOST   " if node["simulated"] else ""
    yield Line(
        f"gpuagent {node['version']}   {simulated}mode {node['mode']}, {doing}   {clock}", "head"
    )
    yield Line(
        f"Cards {_count(node['gpus'])}, {amount('watts', node['gpu_power_watts'])}   "
        f"Tenants {_count(node['tenants'])}, held back {_held_back(node)}   "
        f"Causes {node['active_causes']}   "
        f"CPU {amount('ratio', node['cpu_busy_ratio'])}   "
        f"Free {amount('bytes', node['memory_available_bytes'])}"
    )


def _held_back(node: Document) -> str:
    would = node["tenants_would_be_held_back"]
    return f"{node['tenants_held_back']}" + (f" (would be {would})" if would else "")


def _count(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def _complaints(told: Told) -> list[str]:
    health, node = told.health, told.node
    found = []
    if health["passive_why"]:
        found.append(f"Nothing is changed: {health['passive_why']}")
    if node["released"]:
        found.append("The driver has been released; `gpuagent resume` takes it up again")
    if health["config_error"]:
        found.append(f"Configuration: {health['config_error'].splitlines()[0]}")
    down = [s for s in health["sensors"] if s["up"] is False]
    found += [f"Sensor {s['name']}: {s['why']}" for s in down]
    found += [f"Card {g['index']} cannot be read: {g['why']}" for g in health["blind"]]
    amiss = [one for one in health["listeners"] if one["why"] or not one["up"]]
    found += [f"Listener {x['name']}: {x['why'] or 'it is not open'}" for x in amiss]
    said = {
        "MPS": health["mps_why"],
        "Tokens": health["tokens_why"],
        "Not saved": health["unsaved_why"],
    }
    return found + [f"{what}: {why}" for what, why in said.items() if why]


def _few(complaints: list[str]) -> list[str]:
    if len(complaints) <= _TROUBLES:
        return complaints
    first = complaints[: _TROUBLES - 1]
    return [*first, f"... and {len(complaints) - len(first)} more; `gpuagent status` tells all"]


# -- tables --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    width: int
    right: bool = False


_MODEL = _Column("Name", 20)
_CARD_COLUMNS = (
    _Column("Card", 4),
    _MODEL,
    _Column("Busy", 5, right=True),
    _Column("Memory", 15, right=True),
    _Column("Power", 10, right=True),
    _Column("Heat", 5, right=True),
    _Column("Tenants", 0),
)
_NAME = _Column("Tenant", 16)
_MEMORY, _CORES = _Column("GPU mem", 9, right=True), _Column("Cores", 5, right=True)
_TENANT_COLUMNS = (
    _NAME,
    _Column("Lvl", 3),
    _Column("Class", 9),
    _Column("Share", 5, right=True),
    _Column("Latency", 12, right=True),
    _Column("Cards", 7),
    _MEMORY,
    _CORES,
    _Column("Procs", 5, right=True),
    _Column("Held back for", 0),
)
_GIVES_WAY = ("Procs", "Cores", "Cards", "GPU mem")
"""Where the screen is narrow, the first of these goes first. The table of cards has who is on which."""
_SORTED_BY: dict[Sort, _Column] = {"memory": _MEMORY, "cores": _CORES}
"""A column that is sorted by stays."""
_CURSOR = 2
_REASON = 17
"""Cells that "Held back for" is to have at least: "memory (cpu_max)", "override to 50 %"."""


def _columns(sort: Sort, width: int) -> tuple[_Column, ...]:
    """Those of the tenants that a screen of this width has room for.

    Of what it has beyond all of them the names get half, up to as much again; the reason has the rest.
    """
    columns = list(_TENANT_COLUMNS)
    left = width - _CURSOR - _REASON - sum(c.width for c in columns) - (len(columns) - 1)
    for title in _GIVES_WAY:
        column = next(c for c in columns if c.title == title)
        if left < 0 and column is not _SORTED_BY.get(sort):
            columns.remove(column)
            left += column.width + 1
    return _widened(columns, _NAME, left // 2)


def _widened(columns: Sequence[_Column], one: _Column, cells: int) -> tuple[_Column, ...]:
    """With that one wider by so many cells, at most by as much again."""
    wider = replace(one, width=one.width + max(0, min(cells, one.width)))
    return tuple(wider if c is one else c for c in columns)


def _row(columns: Sequence[_Column], cells: Sequence[str]) -> str:
    parts = []
    for column, cell in zip(columns, cells, strict=True):
        text = fit(cell, column.width) if column.width else printable(cell)
        gap = " " * (column.width - cell_len(text))
        parts.append(gap + text if column.right else text + gap)
    return " ".join(parts)


def _cards(page: _Page, told: Told, *, most: int) -> None:
    page.add("")
    if told.gpus is None:
        page.wrap("Cards and tenants are shown to administrators and to the tenants' own users.")
        return
    if not told.gpus:
        page.add("There are no cards.")
        return
    columns = _widened(_CARD_COLUMNS, _MODEL, page.columns - 80)
    page.add(_row(columns, [c.title for c in columns]), "head")
    fit_in = most if len(told.gpus) <= most else most - 1
    for card in told.gpus[:fit_in]:
        page.add(_row(columns, _card(card)), "bad" if card["blind"] else "")
    if len(told.gpus) > fit_in:
        page.add(f"... and {len(told.gpus) - fit_in} more; `gpuagent status` lists all")


def _card(card: Document) -> tuple[str, ...]:
    read = {r["name"]: r["value"] for r in card["readings"] if r["labels"] == {"gpu": card["uuid"]}}
    memory = amount("bytes", read.get("gpu_memory_used_bytes")).removesuffix(" GiB")
    drawn = read.get("gpu_power_watts")
    power = amount("watts", None if drawn is None else round(drawn)).removesuffix(" W")
    return (
        str(card["index"]),
        card["name"],
        amount("ratio", read.get("gpu_utilization_ratio")),
        _of(memory, amount("bytes", card["memory_bytes"])),
        _of(power, amount("watts", read.get("gpu_power_limit_watts"))),
        amount("celsius", read.get("gpu_temperature_celsius")),
        listed(card["tenants"]),
    )


def _of(part: str, whole: str) -> str:
    return UNKNOWN if part == whole == UNKNOWN else f"{part}/{whole}"


def _tenants(page: _Page, view: View, told: Told, *, most: int, choose: bool = True) -> None:
    """The table, scrolled so that the selected tenant is in it."""
    if told.tenants is None:
        return
    rows = shown(view, told)
    page.add("")
    if not rows:
        page.add("There are no tenants" + (f' with "{view.wanted}"' if view.wanted else "") + ".")
        return
    room = max(1, most)
    start = max(0, min(view.place - room // 2, len(rows) - room))
    columns = _columns(view.sort, page.columns)
    page.add("  " + _row(columns, [c.title for c in columns]), "head")
    for row in rows[start : start + room]:
        chosen = choose and row["name"] == view.selected
        cells = _tenant(row, told.override_on(row["name"]))
        text = _row(columns, [cells[c.title] for c in columns])
        style: Style = "chosen" if chosen else "bad" if over(row) else ""
        page.add(("> " if chosen else "  ") + text, style)


def _tenant(row: Document, override: Document | None) -> dict[str, str]:
    """Its cells, by title."""
    return {
        "Tenant": row["name"],
        "Lvl": row["level"],
        "Class": row["kind"] or UNKNOWN,
        "Share": amount("ratio", row["share_ratio"]),
        "Latency": latency(row),
        "Cards": listed(row["gpus"]),
        "GPU mem": amount("bytes", row["gpu_memory_bytes"]),
        "Cores": amount("", row["cpu_cores"]),
        "Procs": str(row["processes"]),
        "Held back for": _held(row["held_back"], override),
    }


def _held(held: Document | None, override: Document | None) -> str:
    """Such as "memory (cpu_max)"; with what became of it first where that is no holding back.

    Of an override how it is to be treated, as that may be to be left alone.
    """
    if override is not None:
        what, effect = f"override to {value_of(override)}", override["effect"]
        return what if effect in _IN_FORCE else f"{effect or 'decided'}: {what}"
    if held is None:
        return ""
    what = f"{held['cause']} ({held['rung']})"
    return what if held["in_force"] else f"{held['effect'] or 'decided'}: {what}"


_IN_FORCE = ("applied", "in flight", "pending")
"""Effects of an override that is so, or is being made so."""


# -- why -----------------------------------------------------------------------------------------------


def _why(view: View, told: Told, columns: int) -> list[Line]:
    page = _Page(columns)
    page.add("")
    why = told.explanation
    if not view.selected:
        page.add("No tenant is chosen.")
    elif why is None or why["row"]["name"] != view.selected:
        page.wrap(f"Asking why {view.selected} is treated as it is ...")
    else:
        page.add(f"Why {why['row']['name']} ({why['row']['level']}, {why['level_means']})", "head")
        for text in _reasons(why):
            page.wrap(text)
    return page.lines


def _reasons(why: Document) -> Iterator[str]:
    """Sentences, the most important first: the pane shows as many as it has room for."""
    row = why["row"]
    held = row["held_back"]
    if held is not None:
        share = amount("ratio", held["share_ratio"])
        effect = "" if held["in_force"] else f" (not in force: {held['effect'] or 'not known yet'})"
        yield f"Held back to {share} for {held['cause']}{effect}: {held['why']}"
    else:
        yield "Not held back" + ("" if row["may_be_held_back"] else ", and will not be")
    yield from map(_ordered, why["overrides"])
    if known(row):
        missed = ", which is over its objective" if over(row) else ""
        yield f"Latency at {at(row)}, of its objective: {latency(row)}{missed}"
    for cause in why["causes"]:
        yield f"Cause {cause['kind']}, for {seconds(cause['held_seconds'])}: {cause['why']}"
    for knob in sorted(why["knobs"], key=lambda k: k["original"] is None):
        if knob["result"] is not None or knob["original"] is not None:
            unit = knob["unit"]
            hindered = f" ({knob['outcome_why']})" if knob["outcome_why"] else ""
            yield (
                f"{knob['knob']}: wanted {amount(unit, knob['wanted'])}, "
                f"real {amount(unit, knob['real'])}: {knob['result'] or 'not turned'}{hindered}"
            )
    for seat in why["seats"]:
        if seat["refusal"]:
            yield f"Cannot be held through {seat['path']}: {seat['refusal']}"


def _ordered(override: Document) -> str:
    """What somebody has ordered for the tenant or for a card of it, and what became of that."""
    whose = f"card {override['gpu']} to " if override["gpu"] else "to "
    effect = override["effect"] or "nothing has come of it yet"
    hindered = f" ({override['effect_why']})" if override["effect_why"] else ""
    return (
        f"Override {override['name']} of {override['by']}: {whose}{value_of(override)}, "
        f"{seconds(override['remaining_seconds'])} more: {effect}{hindered}; {override['why']}"
    )


def _foot(view: View) -> str:
    if view.typing:
        return f"Tenants with: {view.wanted}_   (Enter keeps it, Escape shows all)"
    only = f" {view.wanted}" if view.wanted else ""
    return f"q quit  s sort: {view.sort}  / filter:{only or ' all'}  w why  p freeze  ? help"
