"""What `gpuagent top` looks at, and how keys change that: values and pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gpuagent.cli.client import Document
from gpuagent.cli.latency import against
from gpuagent.log import printable

Sort = Literal["name", "level", "share", "latency", "memory", "cores"]
SORTS: tuple[Sort, ...] = ("name", "level", "share", "latency", "memory", "cores")

_PAGE = 10


@dataclass(frozen=True, slots=True)
class Told:
    """What the agent has answered. None where this user may not see it."""

    node: Document
    health: Document
    gpus: tuple[Document, ...] | None
    tenants: tuple[Document, ...] | None
    explanation: Document | None = None
    """Of the tenant that was chosen when it was asked."""
    overrides: tuple[Document, ...] | None = None

    def override_on(self, tenant: str) -> Document | None:
        """The override on this tenant, if there is one that this user may see."""
        return next((x for x in self.overrides or () if x["tenant"] == tenant), None)


@dataclass(frozen=True, slots=True)
class View:
    """What is looked at, and how."""

    sort: Sort = "name"
    wanted: str = ""
    """Only tenants whose name has this are shown."""
    typing: bool = False
    """Whether keys are the text of `wanted`."""
    selected: str = ""
    place: int = 0
    """Where the selected tenant was: its successor is selected when it leaves."""
    why: bool = False
    paused: bool = False
    help: bool = False
    over: bool = False


# -- keys ----------------------------------------------------------------------------------------------


def pressed(view: View, key: str, names: Sequence[str]) -> View:
    """The view after a key. `names` are the tenants shown, in their order."""
    if key in _STEPS:
        return _moved(view, key, names)
    if view.typing:
        return _typed(view, key)
    match key:
        case "q":
            return replace(view, over=True)
        case "?":
            return replace(view, help=not view.help)
        case "s":
            return replace(view, sort=SORTS[(SORTS.index(view.sort) + 1) % len(SORTS)])
        case "/":
            return replace(view, typing=True, help=False)
        case "escape":
            return replace(view, help=False) if view.help else replace(view, wanted="")
        case "w" | "enter":
            return replace(view, why=not view.why, help=False)
        case "p":
            return replace(view, paused=not view.paused)
        case "j" | "k":
            return _moved(view, "down" if key == "j" else "up", names)
        case _:
            return view


_STEPS = {
    "up": -1,
    "down": 1,
    "page up": -_PAGE,
    "page down": _PAGE,
    "home": -(10**9),
    "end": 10**9,
}


def _moved(view: View, key: str, names: Sequence[str]) -> View:
    view = settled(view, names)
    if not names:
        return view
    place = max(0, min(len(names) - 1, view.place + _STEPS[key]))
    return replace(view, selected=names[place], place=place)


def _typed(view: View, key: str) -> View:
    match key:
        case "enter":
            return replace(view, typing=False)
        case "escape":
            return replace(view, typing=False, wanted="")
        case "backspace":
            return replace(view, wanted=view.wanted[:-1])
        case _:
            return replace(view, wanted=view.wanted + key)


def settled(view: View, names: Sequence[str]) -> View:
    """The view with a tenant selected that is there, if there is one."""
    if view.selected in names:
        return replace(view, place=names.index(view.selected))
    if not names:
        return replace(view, selected="", place=0)
    place = min(view.place, len(names) - 1)
    return replace(view, selected=names[place], place=place)


def shown(view: View, told: Told | None) -> tuple[Document, ...]:
    """The tenants that the filter lets through, sorted."""
    rows = told.tenants if told is not None else None
    wanted = view.wanted.casefold()
    found = [r for r in rows or () if wanted in printable(r["name"]).casefold()]
    return tuple(sorted(found, key=lambda row: (_rank(row, view.sort), row["name"])))


def _rank(row: Document, sort: Sort) -> tuple[bool, float]:
    """Unknown comes last, whatever is sorted by."""
    match sort:
        case "share":
            value, sign = row["share_ratio"], 1
        case "latency":
            value, sign = against(row), -1  # who misses its objective most comes first
        case "memory":
            value, sign = row["gpu_memory_bytes"], -1
        case "cores":
            value, sign = row["cpu_cores"], -1
        case "level":
            return False, float(row["level"].removeprefix("L"))
        case "name":
            return False, 0.0
    known = isinstance(value, int | float)
    return not known, sign * value if known else 0.0
