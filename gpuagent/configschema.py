"""From TOML values to the structs of `config` and back, by what their types say.

Nothing is guessed or skipped: whatever a value, a bound or a key has wrong becomes one `Problem`
with its path, and the walk goes on, so that the operator sees all of them at once.
"""

import contextlib
import difflib
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import inspect

from gpuagent.config import Config
from gpuagent.model.hours import parse as parse_hours
from gpuagent.quantities import QUANTITIES, QuantityError, shown, split_address
from gpuagent.tomllines import Path

_SUGGESTED_FOR_AT_MOST = 100
"""Problems that get a suggestion: looking for near misses takes time that junk is not worth."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_UNCATCHABLE = ("SIGKILL", "SIGSTOP")
"""signal(7)."""
_WORDS_SHOWN = 8
FORMS = {
    "path": "an absolute path; it must start with /",
    "name": (
        "a tenant's name; write at most 63 letters, digits and ._@/- (a colon is kept for names "
        "that the agent gives)"
    ),
    "group": (
        "the name of an MPS group; write at most 63 letters, digits and ._@/-, of which the first is "
        "a letter or a digit"
    ),
    "label": 'a label; write "model_name=llama"',
    "metric": "the name of a metric; write it as the page has it, without { } and labels",
    "slice": 'a slice of systemd; write a name such as "gpuagent-tenants.slice"',
}
"""What a text is that has a pattern, by its quantity, as it is told where it is not."""


class Problem(NamedTuple):
    """What is wrong, and at which path of the document."""

    path: Path
    text: str


def spelled(path: Path) -> str:
    """A path as an operator would write it: `tenants[0].match.unit`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            bare = re.fullmatch("[A-Za-z0-9_-]{1,64}", part)
            text += ("." if text else "") + (part if bare else shown(part))
    return text


def unwrapped(kind: inspect.Type) -> tuple[inspect.Type, str]:
    """A field's type without its annotations and without None, and its quantity, "" for none."""
    quantity = ""
    while isinstance(kind, inspect.Metadata | inspect.UnionType):
        if isinstance(kind, inspect.UnionType):
            kind = next(t for t in kind.types if not isinstance(t, inspect.NoneType))
        else:
            quantity = (kind.extra or {}).get("quantity", quantity)
            kind = kind.type
    return kind, quantity


def struct_type(cls: type[msgspec.Struct]) -> inspect.StructType:
    """What the type says about its fields."""
    kind = inspect.type_info(cls)
    assert isinstance(kind, inspect.StructType)
    return kind


SCHEMA = struct_type(Config)


def _sections(kind: inspect.StructType, header: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Every table of the file, as its header is written, and the keys it has."""
    yield header, frozenset(f.name for f in kind.fields)
    for field in kind.fields:
        inner, _ = unwrapped(field.type)
        name = f"{header.strip('[]')}.{field.name}".lstrip(".")
        if isinstance(inner, inspect.StructType):
            yield from _sections(inner, f"[{name}]")
        elif isinstance(inner, inspect.VarTupleType):
            element, _ = unwrapped(inner.item_type)
            if isinstance(element, inspect.StructType):
                yield from _sections(element, f"[[{name}]]")


_SECTIONS = tuple(_sections(SCHEMA, ""))
_HEADERS = {header.strip("[]"): header for header, _ in _SECTIONS if header}


class Reader:
    """Reads one document. `values` is what was given and is right, `problems` all that is not."""

    def __init__(self) -> None:
        self.values: dict[Path, object] = {}
        self.problems: list[Problem] = []

    def read(self, document: Mapping[str, object]) -> Config | None:
        """The configuration; None where required keys are missing or wrong."""
        config = self._struct(SCHEMA, document, ())
        assert config is None or isinstance(config, Config)
        return config

    def _problem(self, path: Path, text: str) -> None:
        self.problems.append(Problem(path, text))

    def _value(self, kind: inspect.Type, value: object, path: Path) -> object | None:
        """The value converted; None after a problem was noted, which no setting ever is."""
        inner, quantity = unwrapped(kind)
        if isinstance(inner, inspect.StructType):
            return self._struct(inner, value, path)
        if isinstance(inner, inspect.VarTupleType):
            return self._elements(inner, value, path)
        try:
            converted = _scalar(inner, quantity, value)
        except QuantityError as error:
            self._problem(path, str(error))
            return None
        self.values[path] = converted
        return converted

    def _elements(self, kind: inspect.VarTupleType, value: object, path: Path) -> object | None:
        if not isinstance(value, list):
            header = _HEADERS.get(".".join(p for p in path if isinstance(p, str)))
            remedy = f"write {header} for each of them" if header else _as_list(kind, value)
            self._problem(path, f"{shown(value)} is not a list; {remedy}")
            return None
        if not isinstance(unwrapped(kind.item_type)[0], inspect.StructType):
            self.values[path] = tuple(value)
        read = [self._value(kind.item_type, one, (*path, i)) for i, one in enumerate(value)]
        return tuple(one for one in read if one is not None)

    def _struct(self, kind: inspect.StructType, table: object, path: Path) -> object | None:
        if not isinstance(table, Mapping):
            header = _HEADERS.get(".".join(p for p in path if isinstance(p, str)), "")
            self._problem(path, f"{shown(table)} is not a table; write {header}, its keys below it")
            return None
        self.values[path] = kind.cls
        fields = {field.name: field for field in kind.fields}
        for key, value in table.items():
            if key not in fields:
                self._unknown(key, value, path)
        found: dict[str, object] = {}
        lacking = False
        for name, field in fields.items():
            value = None
            if name in table:
                value = self._value(field.type, table[name], (*path, name))
            elif field.required:
                self._problem((*path, name), "missing, and it has no default")
            if value is not None:
                found[name] = value
            elif field.required:
                lacking = True
        return None if lacking else kind.cls(**found)

    def _unknown(self, key: str, value: object, path: Path) -> None:
        tables = value if isinstance(value, list) else [value]
        section = not path and tables and all(isinstance(one, Mapping) for one in tables)
        hint = ""
        if len(self.problems) < _SUGGESTED_FOR_AT_MOST:
            hint = _hint(key, ".".join(p for p in path if isinstance(p, str)))
        self._problem((*path, key), f"unknown {'section' if section else 'key'}{hint}")


def _as_list(kind: inspect.VarTupleType, value: object) -> str:
    """How to write a value as the list that it should be."""
    inner, quantity = unwrapped(kind.item_type)
    if not isinstance(value, str) or isinstance(inner, inspect.StructType):
        return "write it in [ ]"
    words = [value]
    if not quantity:
        with contextlib.suppress(ValueError):
            words = shlex.split(value)
    if not words or len(words) > _WORDS_SHOWN:
        return "write it in [ ]"
    return f"write [{', '.join(map(shown, words))}]"


def _hint(key: str, section: str) -> str:
    """Where a key that this section does not have belongs, or what was probably meant."""
    if key in _HEADERS:
        return f" (write {_HEADERS[key]})"
    homes = [
        header or "at the top, before the first section"
        for header, keys in _SECTIONS
        if key in keys and header.strip("[]") != section
    ]
    if homes:
        return f" (belongs {'in ' if homes[0].startswith('[') else ''}{' or '.join(homes)})"
    here = next((keys for header, keys in _SECTIONS if header.strip("[]") == section), frozenset())
    near = difflib.get_close_matches(key[:64], sorted(here), n=1)
    return f" (did you mean {_HEADERS.get(near[0], near[0])}?)" if near else ""


def _scalar(kind: inspect.Type, quantity: str, value: object) -> object:
    """A value that is not a table or a list, converted. Raises QuantityError."""
    if quantity in QUANTITIES:
        number = QUANTITIES[quantity].parse(value)
        _check_bounds(kind, number, value, QUANTITIES[quantity].show)
        return number
    match kind:
        case inspect.BoolType():
            if not isinstance(value, bool):
                raise QuantityError(f"{shown(value)} is not true or false, written without quotes")
            return value
        case inspect.FloatType() | inspect.IntType():
            return _number(kind, value)
        case inspect.StrType():
            return _text(kind, quantity, value)
        case inspect.LiteralType():
            if quantity == "signal" and value in _UNCATCHABLE:
                raise QuantityError(
                    f'{shown(value)} cannot be caught, so it warns nobody; write "SIGTERM" or another'
                )
            return _choice({str(v): v for v in kind.values}, value)
        case inspect.EnumType():
            return _choice({member.name: member for member in kind.cls}, value)
        case _:
            raise TypeError(f"the schema has a type that is not read here: {kind}")


def _number(kind: inspect.FloatType | inspect.IntType, value: object) -> float:
    whole = isinstance(kind, inspect.IntType)
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        what = "a whole number" if whole else "a number"
        raise QuantityError(f"{shown(value)} is not {what}; write it without unit and quotes")
    if not -(2**63) <= value < 2**63:  # Neither nan nor inf passes.
        raise QuantityError(f"{shown(value)} is not a number that could be meant here")
    number = value if whole else float(value)
    _check_bounds(kind, number, value, lambda n: f"{n:g}")
    return number


def _text(kind: inspect.StrType, quantity: str, value: object) -> str:
    if not isinstance(value, str):
        raise QuantityError(f"{shown(value)} is not text; write it in quotes")
    if _CONTROL.search(value):
        raise QuantityError(f"{shown(value)} has a control character in it, such as a newline")
    if kind.max_length is not None and len(value) > kind.max_length:
        raise QuantityError(f"{shown(value)} is longer than {kind.max_length} characters")
    if kind.pattern is not None and not re.search(kind.pattern, value):
        meaning = FORMS[quantity]
        raise QuantityError(f"{shown(value)} is not {meaning}")
    if quantity in _READABLE:
        _READABLE[quantity](value)
    return value


def _hours(text: str) -> None:
    try:
        parse_hours(text)
    except ValueError as error:
        joint = " " if str(error).startswith("is ") else ": "
        raise QuantityError(f"{shown(text)}{joint}{error}") from None


def _address(text: str) -> None:
    if text:
        split_address(text)


def _network(text: str) -> None:
    if text:
        split_address(text, anywhere=True)


def _url(text: str) -> None:
    """For what a tenant's own service publishes: plain HTTP to an address that can be dialled."""
    try:
        parts = urlsplit(text)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        secret = parts.username is not None or parts.password is not None
    except ValueError:
        usable = secret = False
    if secret:
        # Not quoted here either: the text goes to the log.
        raise QuantityError("has a user name or password in it, which status and log would show")
    if not usable or " " in text:
        raise QuantityError(
            f"{shown(text)} is not an address of metrics; write http://127.0.0.1:8000/metrics"
        )


_READABLE = {"address": _address, "network": _network, "hours": _hours, "url": _url}
"""What a text of some quantities has to be. Each raises QuantityError."""


def _choice(choices: Mapping[str, object], value: object) -> object:
    if isinstance(value, str) and value in choices:
        return choices[value]
    names = [name for name in choices if name]
    listed = ", ".join(shown(name) for name in names)
    near = difflib.get_close_matches(value[:64], names, n=1) if isinstance(value, str) else []
    hint = f" (did you mean {shown(near[0])}?)" if near else ""
    raise QuantityError(f"{shown(value)} is not one of {listed}{hint}")


def _check_bounds(
    kind: inspect.Type, number: float, given: object, show: Callable[[float], str]
) -> None:
    assert isinstance(kind, inspect.FloatType | inspect.IntType)
    low, above = kind.ge, kind.gt
    high, below = kind.le, kind.lt
    inside = (
        (low is None or number >= low)
        and (above is None or number > above)
        and (high is None or number <= high)
        and (below is None or number < below)
    )
    if inside:
        return
    bounds = [
        f"{words} {show(bound)}"
        for words, bound in (
            ("at least", low),
            ("more than", above),
            ("at most", high),
            ("less than", below),
        )
        if bound is not None
    ]
    raise QuantityError(f"{shown(given)} is out of range; it must be {' and '.join(bounds)}")


def plain(kind: inspect.Type, value: object) -> object:
    """A value of the configuration as TOML would write it: tables, lists, text with units."""
    inner, quantity = unwrapped(kind)
    if isinstance(inner, inspect.StructType):
        fields = ((f, getattr(value, f.name)) for f in inner.fields)
        return {f.name: plain(f.type, v) for f, v in fields if v is not None}
    if isinstance(inner, inspect.VarTupleType):
        assert isinstance(value, tuple)
        return [plain(inner.item_type, one) for one in value]
    if quantity in QUANTITIES:
        assert isinstance(value, int | float)
        return QUANTITIES[quantity].show(value)
    return value.name if isinstance(value, Enum) else value
