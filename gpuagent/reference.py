"""The text of `config/gpuagent.toml`: every key, its default and its docstring as the one comment.

The package ships that text as a file, and a test holds the file against this. To write it anew:
`python -m gpuagent.reference > config/gpuagent.toml`.
"""

import ast
import json
import textwrap
from collections.abc import Iterator
from inspect import getsource

import msgspec
from msgspec import inspect

from gpuagent import config
from gpuagent.configschema import SCHEMA, plain, unwrapped

_HEAD = """\
# gpuagent: every setting with its default. An empty file means the same.
#
# A quantity carries its unit, in quotes:
#   time "200ms" "5s" "10min" "1h" "2d"   size "512MiB" "8GiB" (1024³) "8GB" (1000³)
#   power "250W" "1.5kW"                  share "40%" or 0.4
# A line that begins with # and no space is a setting that is not given: remove the # to give it.
# `gpuagent config check` names every problem with its line. `systemctl reload gpuagent` takes a
# changed file into use; one with a problem changes nothing.
"""

_TENANTS = """\
# Tenants: whose processes are whose, and who comes first. They are asked in this order, so the
# particular comes before the general. Each begins with its own [[tenants]] line.
"""

_CARDS = """\
# Cards: what is kept as declared. Each begins with its own [[cards]] line.
"""

_SECOND_TENANT = """\
#[[tenants]]
#name = "chat"
#sla = "L1"
#match = { unit = "triton.service" }
#kind = "inference"
#latency_slo = "200ms"
"""

# What is written for a key that has no default, or a default that shows nothing.
_EXAMPLES: dict[str, object] = {
    "power.budget": "3kW",
    "power.panel": "17kW",
    "power.budget_fraction": "80%",
    "enforce.families": ["cpu_weight", "cpu_max"],
    "tenants.name": "nightly-training",
    "tenants.sla": "L3",
    "tenants.memory_limit": "40GiB",
    "tenants.latency_slo": "200ms",
    "tenants.match.unit": "train-*.service",
    "tenants.levers": ["notice", "cpu_weight", "io_weight", "cpu_max", "mps"],
    "tenants.hours": ["23:00-06:00", "sat,sun 00:00-24:00"],
    "tenants.off_hours_share": "20%",
    "tenants.memory_reserved": "16GiB",
    "tenants.compute_share": "40%",
    "tenants.mps_contexts": 8,
    "tenants.power_cap": "250W",
    "tenants.host_memory_high": "64GiB",
    "tenants.host_memory_max": "80GiB",
    "tenants.latency_from.url": "http://127.0.0.1:8000/metrics",
    "tenants.latency_from.metric": "vllm:e2e_request_latency_seconds",
    "cards.gpu": "*",
    "run.allow.group": "ml",
    "cards.persistence_mode": True,
    "mps.groups.name": "training-cards",
    "mps.groups.default_threads": "50%",
    "levels.L1.off_hours_share": "20%",
    "levels.L2.off_hours_share": "20%",
    "levels.L3.off_hours_share": "20%",
    "levels.L1.memory_reserved": "16GiB",
    "levels.L2.memory_reserved": "16GiB",
    "levels.L3.memory_reserved": "16GiB",
}


_COMMENTED_OUT = ("[[", "[tenants.")
"""Tables of which there may be none."""


def reference() -> str:
    """The whole file. Needs the source of `config`, so it is for development and packaging only."""
    comments = _docstrings()
    parts = [_HEAD, *_section(SCHEMA, "", comments)]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _docstrings() -> dict[str, str]:
    """The docstring of every struct (`Power`) and field (`Power.budget`) of `config`."""
    found: dict[str, str] = {}
    for node in ast.parse(getsource(config)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        found[node.name] = ast.get_docstring(node) or ""
        for field, after in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                found[f"{node.name}.{ast.unparse(field.target)}"] = ast.literal_eval(after.value)
    return found


def _section(
    kind: inspect.StructType, header: str, comments: dict[str, str], about: str = ""
) -> Iterator[str]:
    """The text of a table and of the tables below it, one string each; `about` is said of it first."""
    off = "#" if header.startswith(_COMMENTED_OUT) else ""
    lines = []
    if header:
        lines = [_comment(f"{about} {comments[kind.cls.__name__]}"), off + header]
    below: list[str] = []
    for field in kind.fields:
        name = f"{header.strip('[]')}.{field.name}".lstrip(".")
        inner, _ = unwrapped(field.type)
        element = inner.item_type if isinstance(inner, inspect.VarTupleType) else None
        if isinstance(inner, inspect.StructType):
            own = comments.get(f"{kind.cls.__name__}.{field.name}", "")
            below += _section(inner, f"[{name}]", comments, own)
        elif isinstance(element, inspect.StructType):
            first, *rest = _section(element, f"[[{name}]]", comments)
            head = {"tenants": _TENANTS + "\n", "cards": _CARDS + "\n"}.get(name, "")
            below += [head + first, *rest, *([_SECOND_TENANT] if name == "tenants" else ())]
        else:
            lines.append(_comment(comments[f"{kind.cls.__name__}.{field.name}"]))
            absent = field.default is None
            lines.append((off or "#" * absent) + _setting(field, name))
    yield "\n".join(lines)
    yield from below


def _setting(field: inspect.Field, name: str) -> str:
    """`key = value` with the default, or with an example where there is none to show."""
    known = field.default not in (None, msgspec.NODEFAULT)
    value = plain(field.type, field.default) if known else None
    return f"{field.name} = {json.dumps(_EXAMPLES.get(name, value))}"


def _comment(text: str) -> str:
    wrapped = textwrap.wrap(" ".join(text.split()), width=98)
    return "\n".join(f"# {line}" for line in wrapped)


if __name__ == "__main__":
    print(reference(), end="")
