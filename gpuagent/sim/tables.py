"""Tables of a TOML document: laid over each other, and written down again."""

import json
from collections.abc import Iterator, Mapping

Table = dict[str, object]


def merged(table: Mapping[str, object], patch: Mapping[str, object]) -> Table:
    """The same with other values: tables are merged, everything else is replaced."""
    made = dict(table)
    for key, value in patch.items():
        known = made.get(key)
        both = isinstance(known, dict) and isinstance(value, dict)
        made[key] = merged(known, value) if both else value  # type: ignore[arg-type]  # `both`
    return made


def lines(table: Mapping[str, object], path: tuple[str, ...]) -> Iterator[str]:
    """Values first, then tables, then arrays of tables: so that each key is in its own table."""
    later: list[tuple[str, object]] = []
    for key, value in table.items():
        if isinstance(value, dict) or _tables(value):
            later.append((key, value))
        else:
            yield f"{key} = {_value(value)}"
    for key, value in later:
        below = (*path, key)
        if isinstance(value, dict):
            yield f"[{'.'.join(below)}]"
            yield from lines(value, below)
        elif isinstance(value, list):
            for one in value:
                yield f"[[{'.'.join(below)}]]"
                yield from lines(one, below)


def _tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def _value(value: object) -> str:
    """A JSON text, number, truth value or list of them is the same in TOML, but for one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
