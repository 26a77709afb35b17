"""Where each key of a TOML document is written: the line numbers that the TOML reader does not give.

The document has been read by tomli before, so it is valid, and the scan need not judge it: it only
has to tell keys, values and comments apart. What a path means is what tomli makes of it: a table's
key, an index in an array, the latest element where a header goes through an array of tables. A key
and the beginning of its value are always on one line (TOML 1.0, "Key/Value Pair").
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import tomli

Path = tuple[str | int, ...]
"""Keys and indexes from the top of the document: `("tenants", 0, "match")`."""

DEEPEST = 8
"""Paths longer than this are not recorded: no setting is that deep, and hostile nesting is cheap."""

_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*+")
_SPACES = re.compile(r"[ \t]*+")
_SEPARATORS = re.compile(r"(?:[ \t\n,]|#[^\n]*)*+")
_STRING = r"""
    "{3} (?: \\. | "{1,2}(?!") | [^"\\]+ )*+ "{3,5}
  | '{3} (?: '{1,2}(?!') | [^']+ )*+ '{3,5}
  | " (?: \\. | [^"\\]+ )*+ "
  | ' [^']*+ '
"""
_VALUE = re.compile(rf"{_STRING} | [^,\]}}\#\n]+", re.VERBOSE | re.DOTALL)
_KEY_PART = re.compile(
    rf"[ \t]* (?: (?P<bare> [A-Za-z0-9_-]+ ) | (?P<quoted> {_STRING} ) ) [ \t]* (?P<dot> \.? )",
    re.VERBOSE | re.DOTALL,
)


def locate(text: str) -> dict[Path, int]:
    """The line, counted from 1, of every key, table and array element of a valid document."""
    return _Scan(text.replace("\r\n", "\n")).run()


def line_of(lines: Mapping[Path, int], path: Path) -> int:
    """The line of a path, or of the nearest table above it that is written down; 1 at the top."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)


@dataclass(slots=True)
class _Open:
    """An inline table or array whose end has not come yet."""

    path: Path
    elements: int | None
    """Elements begun so far; None for a table."""


class _Scan:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._counted = 0
        self._line = 1
        self._lines: dict[Path, int] = {}
        self._latest: dict[Path, int] = {}
        """Index of the latest element of each array of tables."""

    def run(self) -> dict[Path, int]:
        table: Path = ()
        while self._skip(_BLANK):
            if self._text.startswith("[[", self._at):
                table = self._element_header()
            elif self._text[self._at] == "[":
                table = self._table_header()
            else:
                self._values(self._key(table))
        return self._lines

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        """Passes over what matches; false at the end of the document."""
        found = pattern.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return self._at < len(self._text)

    def _mark(self, path: Path, *, again: bool = False) -> None:
        """Records where a path is written first; `again` for the header that spells it out."""
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        if again or path not in self._lines:
            self._lines[path] = self._line

    def _parts(self) -> list[str]:
        """The parts of a dotted key; stands behind it afterwards."""
        parts: list[str] = []
        while found := _KEY_PART.match(self._text, self._at):
            self._at = found.end()
            quoted = found["quoted"]
            parts.append(tomli.loads(f"key = {quoted}")["key"] if quoted else found["bare"])
            if not found["dot"]:
                break
        return parts

    def _walk(self, path: Path, parts: list[str]) -> Path:
        """Follows parts from a path into the latest elements of arrays, marking what is new."""
        for part in parts:
            if len(path) >= DEEPEST:
                break
            path = (*path, part)
            self._mark(path)
            if path in self._latest and len(path) < DEEPEST:
                path = (*path, self._latest[path])
        return path

    def _table_header(self) -> Path:
        self._at += len("[")
        path = self._walk((), self._parts())
        self._mark(path, again=True)
        self._at += len("]")
        return path

    def _element_header(self) -> Path:
        self._at += len("[[")
        *above, name = self._parts()
        array = self._walk((), above)
        if len(array) < DEEPEST:
            array = (*array, name)
            self._mark(array)
        index = self._latest[array] = self._latest.get(array, -1) + 1
        element = (*array, index)[:DEEPEST]
        self._mark(element)
        self._at += len("]]")
        return element

    def _key(self, table: Path) -> Path:
        """Reads `key =` in a table; stands before the value afterwards."""
        path = self._walk(table, self._parts())
        self._at += len("=")
        return path

    def _values(self, path: Path) -> None:
        """Passes over a value; inline tables and arrays are followed, without recursion."""
        inside: list[_Open] = []
        while True:
            self._one(path, inside)
            while inside and self._skip(_SEPARATORS) and self._text[self._at] in "]}":
                self._at += 1
                inside.pop()
            if not inside:
                return
            path = self._next(inside[-1])

    def _one(self, path: Path, inside: list[_Open]) -> None:
        self._skip(_SPACES)
        char = self._text[self._at]
        if char in "[{":
            self._at += 1
            inside.append(_Open(path, 0 if char == "[" else None))
        else:
            self._skip(_VALUE)

    def _next(self, container: _Open) -> Path:
        """The path of the value that comes next in an inline table or array."""
        if container.elements is None:
            return self._key(container.path)
        path = (*container.path, container.elements)[:DEEPEST]
        container.elements += 1
        self._mark(path)
        return path
