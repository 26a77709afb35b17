"""What the source says of types and their fields: the string below each field (PEP 258), by its name."""

import ast
import functools
import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any, get_origin

import msgspec
from msgspec import inspect as types


def structs_of(kinds: Iterable[Any]) -> list[type[msgspec.Struct]]:
    """The Structs that these types are made of, in whatever they are held; a generic one once."""
    found: dict[type[msgspec.Struct], None] = {}
    waiting: list[object] = list(types.multi_type_info(kinds))
    seen: set[int] = set()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue  # it holds itself
        seen.add(id(part))
        if isinstance(part, types.StructType):
            found[get_origin(part.cls) or part.cls] = None
        if isinstance(part, types.Type | types.Field):
            waiting += [getattr(part, name) for name in part.__struct_fields__]
        elif isinstance(part, tuple):
            waiting += part
    return list(found)


def field_texts(cls: type[msgspec.Struct]) -> Mapping[str, str]:
    """The text of each field that has one, by the field's name. Empty without the source."""
    texts: dict[str, str] = {}
    for kind in reversed(cls.__mro__):
        texts.update(_texts(kind.__module__).get(kind.__name__, {}))
    return texts


@functools.cache
def _texts(module: str) -> Mapping[str, Mapping[str, str]]:
    """The texts of a module's classes, by class and field."""
    if not module.startswith("gpuagent."):
        return {}
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return {}
    return {node.name: _of_fields(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _of_fields(node: ast.ClassDef) -> dict[str, str]:
    return {
        field.target.id: " ".join(below.value.value.split())
        for field, below in zip(node.body, node.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }
