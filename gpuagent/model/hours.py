"""Spans of local time, such as "23:00-06:00" or "mon-fri 18:00-08:00", and whether a moment is in one.

A span is a matter of what the clock on the wall shows, so a night in which the clocks are changed is
an hour shorter or longer, and an hour that comes twice is inside both times.
"""

import re
from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY_MINUTES = 24 * 60
_TEXT = re.compile(r"(?:([a-z,-]+) +)?([0-9]{2}):([0-9]{2})-([0-9]{2}):([0-9]{2})")


class Span(msgspec.Struct, frozen=True):
    """From `start` to before `end`, in minutes of a day, on days counted from Monday as 0.

    One whose end is not after its start goes on into the next day; the day is that of its start.
    """

    days: frozenset[int]
    start: int
    end: int

    def contains(self, day: int, minute: int) -> bool:
        """Whether this minute of this day of the week is in it."""
        if self.start < self.end:
            return day in self.days and self.start <= minute < self.end
        late = day in self.days and minute >= self.start
        return late or ((day - 1) % 7 in self.days and minute < self.end)


def parse(text: str) -> Span:
    """Raises ValueError; the text is a sentence of its own, or goes on from the span: "is not hours"."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError('is not hours; write "23:00-06:00" or "mon-fri 18:00-08:00"')
    start, end = (_minutes(*found.group(i, i + 1)) for i in (2, 4))
    if start == _DAY_MINUTES:
        raise ValueError("24:00 is where a day ends; begin at 00:00")
    if start == end:
        raise ValueError('is of no length; for whole days write "00:00-24:00"')
    days = range(7) if found[1] is None else _days(found[1])
    return Span(frozenset(days), start, end)


def _minutes(hour: str, minute: str) -> int:
    total = int(hour) * 60 + int(minute)
    if int(minute) > 59 or total > _DAY_MINUTES:
        raise ValueError(f"{hour}:{minute} is not a time of day")
    return total


def _days(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if first not in DAYS or (dash and last not in DAYS):
            raise ValueError(f"{part} is not a day; write {', '.join(DAYS)} or mon-fri")
        begin, end = DAYS.index(first), DAYS.index(last or first)
        found |= {(begin + i) % 7 for i in range((end - begin) % 7 + 1)}
    return found


def within(hours: Iterable[str], wall: float, utc_offset: float) -> bool:
    """Whether a moment is in one of these spans; no spans are all hours.

    `wall` is in seconds since the epoch, `utc_offset` in seconds east of UTC at that moment.
    """
    spans = [parse(text) for text in hours]
    local = datetime.fromtimestamp(wall + utc_offset, UTC)
    minute = local.hour * 60 + local.minute
    return not spans or any(s.contains(local.weekday(), minute) for s in spans)
