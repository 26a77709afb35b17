"""Lists in parts: how many items are asked for, and from where on."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Protocol, TypeVar

import msgspec

from gpuagent.expose.problems import Trouble
from gpuagent.expose.routes import Parameter

PAGE = 100
PAGE_MOST = 1000
_MARK = re.compile("[0-9A-Za-z]{1,32}-[0-9]{1,15}")
Mark = Annotated[str, msgspec.Meta(pattern=f"^{_MARK.pattern}$")]
"""Names one event or action: RUN-NUMBER."""

LIMIT = Parameter(
    "limit",
    Annotated[int, msgspec.Meta(ge=1, le=99_999_999)],
    f"How many items; {PAGE} by default, and {PAGE_MOST} at most whatever is asked for.",
)
AFTER = Parameter("after", str, "The `next` of the part before.")
BEFORE = Parameter("after", Mark, "The `next` of the part before; older ones follow.")


class Numbered(Protocol):
    """What happened once, with its number within a run of the agent."""

    @property
    def number(self) -> int: ...


Item = TypeVar("Item", bound=Numbered)


def size(query: Mapping[str, str]) -> int:
    """How many items are asked for. Raises Trouble (400)."""
    text = query.get("limit", str(PAGE))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and int(text) > 0):
        raise Trouble(400, f"limit={text!r} is no number of items", f"use 1 to {PAGE_MOST}")
    return min(int(text), PAGE_MOST)


def part(query: Mapping[str, str], marks: Sequence[str]) -> tuple[slice, str | None]:
    """Which of the items, marked in ascending order, are asked for, and the `after` of the next part.

    What `after` names need not exist any more. Raises Trouble (400).
    """
    after = query.get("after")
    start = 0 if after is None else sum(1 for m in marks if m <= after)
    end = start + size(query)
    return slice(start, end), marks[end - 1] if end < len(marks) else None


def newest_first(
    query: Mapping[str, str], items: Sequence[Item], run: str
) -> tuple[tuple[Item, ...], str | None]:
    """The part asked for of items in ascending order, the latest first, and the `after` of the next.

    Raises Trouble (400; 404 where `after` is of another run).
    """
    end = len(items)
    if (after := query.get("after")) is not None:
        of_run, number = parted(after)
        if of_run != run:
            what = f"after={after!r} is of a run of the agent that has ended"
            raise Trouble(404, what, "begin with the newest, without `after`")
        end = sum(1 for item in items if item.number < number)
    start = max(0, end - size(query))
    found = tuple(items[start:end][::-1])
    return found, mark(run, found[-1].number) if start and found else None


def mark(run: str, number: int) -> str:
    """The name of one event or action."""
    return f"{run}-{number}"


def parted(text: str) -> tuple[str, int]:
    """Run and number of a mark. Raises Trouble (400)."""
    if _MARK.fullmatch(text) is None:
        what = f"{text[:80]!r} names no event and no action"
        raise Trouble(400, what, "give it as an earlier answer had it, such as 1f0c2a94-17")
    run, _, number = text.partition("-")
    return run, int(number)
