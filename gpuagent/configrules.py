"""What must hold between settings that are each right by themselves.

A rule looks only at values that were read without a problem: one mistake is reported once.
"""

from collections.abc import Iterator, Mapping

import msgspec

from gpuagent.config import Backpressure, Match
from gpuagent.configschema import Problem, plain, spelled, struct_type
from gpuagent.model.inventory import Level
from gpuagent.quantities import shown
from gpuagent.tomllines import Path

Values = Mapping[Path, object]
"""What was given and is right, by path; a table's own path is there too."""

_APART = (
    ("memory_clear", "memory_high"),
    ("temperature_clear", "temperature_high"),
    ("cpu_pressure_clear", "cpu_pressure_high"),
    ("latency_clear", "latency_high"),
)
"""The first must be below the second, or a cause would end as it begins."""
_IN_ORDER = (("hold", "within"), ("probe_min", "probe_max"))
"""The first must not be above the second."""
_LONGEST_SOCKET_BYTES = 101
"""sun_path holds 108 with its final zero (unix(7))."""


def check(values: Values, wrong: frozenset[Path]) -> Iterator[Problem]:
    """The problems between the values; `wrong` are the paths that have one already."""
    yield from _orders(values, wrong)
    yield from _power(values, wrong)
    yield from _socket(values)
    yield from _network(values, wrong)
    yield from _tenants(values, wrong)


def _orders(values: Values, wrong: frozenset[Path]) -> Iterator[Problem]:
    defaults = Backpressure()
    for low, high in (*_APART, *_IN_ORDER):
        low_path, high_path = ("backpressure", low), ("backpressure", high)
        if low_path in wrong or high_path in wrong:
            continue
        lower = values.get(low_path, getattr(defaults, low))
        upper = values.get(high_path, getattr(defaults, high))
        assert isinstance(lower, float)
        assert isinstance(upper, float)
        apart = (low, high) in _APART
        if lower < upper or (lower == upper and not apart):
            continue
        lower_text = _show(Backpressure, low, lower)
        upper_text = _show(Backpressure, high, upper)
        if low_path in values:
            must = "must be below" if apart else "must not be more than"
            yield Problem(low_path, f"{lower_text} {must} {high} ({upper_text})")
        else:
            must = "must be above" if apart else "must not be less than"
            yield Problem(high_path, f"{upper_text} {must} {low} ({lower_text})")


def _show(section: type[msgspec.Struct], key: str, value: float) -> str:
    """A value of a section as TOML would write it."""
    kind = next(field.type for field in struct_type(section).fields if field.name == key)
    text = plain(kind, value)
    return text if isinstance(text, str) else f"{value:g}"


def _power(values: Values, wrong: frozenset[Path]) -> Iterator[Problem]:
    budget, panel, fraction = (("power", key) for key in ("budget", "panel", "budget_fraction"))
    if budget in values:
        for path in (panel, fraction):
            if path in values:
                yield Problem(path, "contradicts budget; keep one of the two")
        return
    if budget in wrong or panel in wrong or fraction in wrong:
        return
    if panel in values and fraction not in values:
        yield Problem(panel, "says nothing without budget_fraction, the share of it to use")
    if fraction in values and panel not in values:
        yield Problem(fraction, "says nothing without panel, the rating it is a share of")


def _socket(values: Values) -> Iterator[Problem]:
    path: Path = ("paths", "socket")
    text = values.get(path)
    if isinstance(text, str) and len(text.encode()) > _LONGEST_SOCKET_BYTES:
        most = _LONGEST_SOCKET_BYTES
        yield Problem(
            path, f"{shown(text)} is longer than {most} bytes, the most a socket can have"
        )


def _network(values: Values, wrong: frozenset[Path]) -> Iterator[Problem]:
    """Beyond this host nothing is ever said in plain text."""
    listen: Path = ("api", "network_listen")
    pair: tuple[Path, ...] = (("api", "tls_certificate"), ("api", "tls_key"))
    if not values.get(listen):
        return
    missing = [path[1] for path in pair if path not in wrong and not values.get(path)]
    if missing:
        yield Problem(listen, f"needs {' and '.join(str(m) for m in missing)}: it speaks TLS only")


def _tenants(values: Values, wrong: frozenset[Path]) -> Iterator[Problem]:
    first: dict[object, Path] = {}
    wrong_tables = {path[:3] for path in wrong}
    for tenant in (path for path in values if len(path) == 2 and path[0] == "tenants"):
        name = values.get((*tenant, "name"))
        if name is not None and first.setdefault(name, tenant) != tenant:
            text = f"{shown(name)} is the name of {spelled(first[name])} too"
            yield Problem((*tenant, "name"), text)
        if values.get((*tenant, "sla")) is Level.L1 and values.get((*tenant, "hold_back")) is True:
            text = "L1 is never held back; leave this out, or give another sla"
            yield Problem((*tenant, "hold_back"), text)
        match: Path = (*tenant, "match")
        if match in values and match not in wrong_tables:
            keys = [field.name for field in struct_type(Match).fields]
            if not any(values.get((*match, key)) for key in keys):
                listed = ", ".join(keys[:-1])
                yield Problem(match, f"is empty; give at least one of {listed} or {keys[-1]}")
