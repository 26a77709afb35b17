"""What a body has wrong, in plain words: the field, and all that it may be."""

import re
from typing import Any

import msgspec
from msgspec import inspect

from gpuagent.log import printable

# How msgspec says it (msgspec 0.18 to 0.20); what it says otherwise is told as it is.
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`( - at `\$[^`]*`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `([^`]*)`( - at `\$[^`]*`)?")
_AT = re.compile(r" - at `(\$[^`]*)`\Z")
_STEP = re.compile(r"\.([A-Za-z0-9_]+)|\[[^\]]*\]")
_NAME_MOST = 64
"""Characters of a field's name that are repeated."""


def misfit(error: msgspec.ValidationError, kind: Any) -> str:
    """What is wrong with a body that is to be of this type."""
    said, whole = str(error), inspect.type_info(kind)
    place = _AT.search(said)
    if found := _UNKNOWN.fullmatch(said):
        return f"there is no field {printable(found[1][:_NAME_MOST])}; {_fields(whole)}"
    if found := _MISSING.fullmatch(said):
        return f"{found[1]} is missing"
    steps = list(_STEP.finditer(place[1])) if place else []
    names = [step[1] for step in steps if step[1]]
    meant: inspect.Type | None = whole
    for step in steps:
        meant = None if meant is None else _part(meant, step[1] or "")
    words = "" if meant is None else _words(meant)
    if not words:
        return printable(said)
    of_list = bool(steps) and not steps[-1][1]
    name = names[-1] if names else "it"
    return f"{'each of ' if of_list and names else ''}{name} must be {words}"


def _plain(kind: inspect.Type) -> list[inspect.Type]:
    """The types that it may be, without null and annotations."""
    if isinstance(kind, inspect.Metadata):
        return _plain(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [one for part in kind.types for one in _plain(part)]
    return [] if isinstance(kind, inspect.NoneType) else [kind]


def _part(kind: inspect.Type, field: str) -> inspect.Type | None:
    """The type of a field, or of a list's elements where none is named."""
    for one in _plain(kind):
        if field and isinstance(one, inspect.StructType):
            found = next((f.type for f in one.fields if f.encode_name == field), None)
            if found is not None:
                return found
        if not field and isinstance(one, inspect.VarTupleType):
            return one.item_type
    return None


def _fields(kind: inspect.Type) -> str:
    parts = _plain(kind)
    parts += [
        p for one in parts if isinstance(one, inspect.VarTupleType) for p in _plain(one.item_type)
    ]
    names = {
        f.encode_name: None for p in parts if isinstance(p, inspect.StructType) for f in p.fields
    }
    return f"there are {', '.join(names)}"


def _words(kind: inspect.Type) -> str:
    """What a value has to be; empty where there are no words for it."""
    if isinstance(kind, inspect.Metadata):
        said = (kind.extra or {}).get("words") or (kind.extra_json_schema or {}).get("description")
        return str(said) if said else _words(kind.type)
    if isinstance(kind, inspect.UnionType):
        told = [_words(p) for p in kind.types if not isinstance(p, inspect.NoneType)]
        return " or ".join(told) if all(told) else ""
    match kind:
        case inspect.FloatType():
            return "a number" + _range(kind)
        case inspect.IntType():
            return "a whole number" + _range(kind)
        case inspect.BoolType():
            return "true or false"
        case inspect.StructType():
            return "an object"
        case inspect.LiteralType():
            return f"one of {', '.join(map(str, kind.values))}"
        case inspect.StrType(pattern=None):
            return "text" + _length(kind.min_length, kind.max_length, "characters")
        case inspect.VarTupleType():
            return "a list" + _length(kind.min_length, kind.max_length, "entries")
    return ""


def _range(kind: inspect.FloatType | inspect.IntType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" from {_number(kind.ge)} to {_number(kind.le)}"
    bounds = (
        ("at least", kind.ge),
        ("more than", kind.gt),
        ("at most", kind.le),
        ("less than", kind.lt),
    )
    told = [f"{words} {_number(bound)}" for words, bound in bounds if bound is not None]
    return f", {' and '.join(told)}" if told else ""


def _length(least: int | None, most: int | None, what: str) -> str:
    if most is None:
        return f" of at least {least} {what}" if least else ""
    return f" of {least or 0} to {most} {what}" if least else f" of at most {most} {what}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:g}"
