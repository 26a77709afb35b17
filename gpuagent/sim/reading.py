"""From TOML values to structs: every problem with its key, its line, and what may stand there."""

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, get_args

import msgspec
import tomli
from msgspec import inspect

from gpuagent.errors import ConfigError
from gpuagent.tomllines import Path, line_of, locate

_LONGEST_SHOWN = 60
_MOST_PROBLEMS = 50
"""Listed; a file with more of them is another kind of file."""


class Problem(NamedTuple):
    """What is wrong, and at which path of the document."""

    path: Path
    text: str

    def __str__(self) -> str:
        return f"{spelled(self.path)}: {self.text}" if self.path else self.text


def spelled(path: Path) -> str:
    """A path as it would be written: `tenants[0].set.rate`."""
    parts = (f"[{p}]" if isinstance(p, int) else f".{p[:_LONGEST_SHOWN]}" for p in path)
    return "".join(parts).removeprefix(".")


def document(text: str, *, where: str) -> dict[str, object]:
    """A TOML text as values. Raises ConfigError that names the line."""
    try:
        return tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        # Some of its texts quote the whole key, however long.
        what = f"not valid TOML: {error.msg[:200]}"
        raise ConfigError([f"{where}:{error.lineno}: {what}"]) from None
    except RecursionError:
        raise ConfigError([f"{where}: not valid TOML: nested too deeply"]) from None
    except ValueError:  # from int(), for thousands of digits
        raise ConfigError([f"{where}: not valid TOML: a number has too many digits"]) from None


def located(problems: Iterable[Problem], text: str, *, source: str) -> list[str]:
    """The problems with file, line and key, ordered by line; each once."""
    lines = locate(text)
    found = sorted(((line_of(lines, p.path), p) for p in problems), key=lambda one: one[0])
    told = list(dict.fromkeys(f"{source}:{line}: {problem}" for line, problem in found))
    if len(told) > _MOST_PROBLEMS:
        more = f"{source}: {len(told) - _MOST_PROBLEMS} more problems are not shown"
        return [*told[:_MOST_PROBLEMS], more]
    return told


def wrong(kind: object, value: object, path: Path = ()) -> Iterator[Problem]:
    """All that `msgspec.convert(value, kind)` would object to: it ends at the first."""
    bare = _bare(inspect.type_info(kind))
    structs = _structs(bare)
    if structs:
        yield from _table(structs, value, path)
    elif isinstance(bare, inspect.DictType) and isinstance(value, Mapping):
        inner = _arguments(kind)[1]
        for key, one in value.items():
            yield from wrong(inner, one, (*path, key))
    elif isinstance(bare, inspect.VarTupleType) and isinstance(value, list) and value:
        inner = _arguments(kind)[0]
        for i, one in enumerate(value):
            yield from wrong(inner, one, (*path, i))
    else:
        yield from _scalar(kind, value, path)


def _bare(kind: inspect.Type) -> inspect.Type:
    """Without its annotations, and without None."""
    while isinstance(kind, inspect.Metadata | inspect.UnionType):
        if isinstance(kind, inspect.Metadata):
            kind = kind.type
            continue
        given = [t for t in kind.types if not isinstance(t, inspect.NoneType)]
        if len(given) > 1:
            return kind
        kind = given[0]
    return kind


def _structs(kind: inspect.Type) -> tuple[type[msgspec.Struct], ...]:
    """The struct, or the tagged ones of which it is one; none for anything else."""
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return tuple(k.cls for k in kinds if isinstance(k, inspect.StructType))


def _arguments(kind: object) -> tuple[object, ...]:
    """Of `dict[str, X]` or `tuple[X, ...]`, whatever is around it."""
    while hasattr(kind, "__metadata__"):
        kind = get_args(kind)[0]
    return get_args(kind)


def _scalar(kind: object, value: object, path: Path) -> Iterator[Problem]:
    if isinstance(value, float) and not math.isfinite(value):
        yield Problem(path, f"{value} is no finite number")
        return
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text, _, _ = str(error).partition(" - at ")
        yield Problem(path, f"{text}, got {_shown(value)}" if "got" not in text else text)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _table(
    structs: tuple[type[msgspec.Struct], ...], value: object, path: Path
) -> Iterator[Problem]:
    if not isinstance(value, Mapping):
        yield Problem(path, f"{_shown(value)} is not a table")
        return
    tag = structs[0].__struct_config__.tag_field
    cls = structs[0]
    if tag is not None:
        kinds = {str(s.__struct_config__.tag): s for s in structs}
        given = value.get(tag)
        if not isinstance(given, str) or given not in kinds:
            what = f"{_shown(given)} is none of them" if tag in value else "missing"
            yield Problem((*path, tag), f"{what}; write one of {', '.join(kinds)}")
            return
        cls = kinds[given]
    yield from _fields(cls, tag, value, path)


def _fields(
    cls: type[msgspec.Struct], tag: str | None, value: Mapping[str, object], path: Path
) -> Iterator[Problem]:
    fields = {f.encode_name: f for f in msgspec.structs.fields(cls)}
    known = [*([tag] if tag else []), *fields]
    for key in value:
        if key not in known:
            yield Problem((*path, key), _unknown(key, known))
    for name, field in fields.items():
        if name in value:
            yield from wrong(field.type, value[name], (*path, name))
        elif field.required:
            yield Problem((*path, name), "missing, and it has no default")


def _unknown(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key[:_LONGEST_SHOWN], known, n=1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    return f"unknown key{meant}; there are {', '.join(known)}"
