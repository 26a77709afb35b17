"""What a configuration may say, though it hardly means it: warnings, each with its line.

What is certainly wrong is a problem, and has its rule in `configrules`.
"""

from collections.abc import Iterator

from gpuagent.configrules import Values, covers, matched, tables
from gpuagent.configschema import Problem, spelled
from gpuagent.model.inventory import Level
from gpuagent.tomllines import Path

_NAME_NO_PLACE = frozenset({"user", "exe"})
"""Rules with nothing else are asked after all others."""
_HELD_BACK = ("levers", "notice_signal", "notice_command", "off_hours_share")
"""Of a tenant: how it is held back."""
_SUFFIXES = {
    "_seconds": "seconds",
    "_ms": "milliseconds",
    "_milliseconds": "milliseconds",
    "_us": "microseconds",
    "_microseconds": "microseconds",
}
"""What a metric counts in, by the end of its name."""


def doubts(values: Values) -> Iterator[Problem]:
    """What is doubtful in values that have no problem."""
    for tenant in tables(values, "tenants"):
        yield from _without_effect(values, tenant)
        yield from _off_hours(values, tenant)
        yield from _latency(values, tenant)
    yield from _covered(values)


def _without_effect(values: Values, tenant: Path) -> Iterator[Problem]:
    given = [key for key in _HELD_BACK if values.get((*tenant, key))]
    if values.get((*tenant, "sla")) is Level.L1:
        for key in given:
            yield Problem((*tenant, key), "L1 is never held back, so this does nothing")
    elif values.get((*tenant, "hold_back")) is False:
        for key in (*given, *(["hours"] if values.get((*tenant, "hours")) else [])):
            yield Problem((*tenant, key), "does nothing while hold_back = false")


def _off_hours(values: Values, tenant: Path) -> Iterator[Problem]:
    """Hours may be the tenant's own or its level's; both are kept by cpu.max."""
    level = values.get((*tenant, "sla"))
    if not isinstance(level, Level) or level is Level.L1:
        return
    if values.get((*tenant, "hold_back")) is False:
        return
    own: Path = (*tenant, "hours")
    hours = own if own in values else ("levels", level.name, "hours")
    if not values.get(hours):
        if (*tenant, "off_hours_share") in values:
            text = f"does nothing: neither the tenant nor [levels.{level.name}] has hours"
            yield Problem((*tenant, "off_hours_share"), text)
        return
    levers = values.get((*tenant, "levers"))
    if isinstance(levers, tuple) and "cpu_max" not in levers:
        text = f'without "cpu_max" it is not held to the hours of [levels.{level.name}]'
        yield Problem((*tenant, "levers"), text)


def _latency(values: Values, tenant: Path) -> Iterator[Problem]:
    source: Path = (*tenant, "latency_from")
    if source not in values:
        return
    if values.get((*tenant, "sla")) is Level.L1 and (*tenant, "latency_slo") not in values:
        yield Problem(source, "is read, but protects nothing without latency_slo")
    metric = values.get((*source, "metric"))
    unit = values.get((*source, "unit"), "seconds")
    if isinstance(metric, str):
        meant = next((u for end, u in _SUFFIXES.items() if metric.endswith(end)), unit)
        if meant != unit:
            place: Path = (*source, "unit" if (*source, "unit") in values else "metric")
            text = (
                f'{metric} counts in {meant}, it seems, and not in {unit}; write unit = "{meant}"'
            )
            yield Problem(place, text)


def _covered(values: Values) -> Iterator[Problem]:
    """Rules of which an earlier one has all that they could have."""
    earlier: list[tuple[dict[str, str], Path]] = []
    for tenant in tables(values, "tenants"):
        asked = matched(values, tenant)
        first = next((path for wide, path in earlier if _wider(wide, asked)), None)
        if first is not None:
            text = f"hardly ever counts: {spelled(first)} comes first and fits all it fits"
            yield Problem((*tenant, "match"), text)
        earlier.append((asked, tenant))


def _wider(wide: dict[str, str], narrow: dict[str, str]) -> bool:
    """Whether a rule is asked before another and fits all that this fits."""
    late = wide.keys() <= _NAME_NO_PLACE
    return late == (narrow.keys() <= _NAME_NO_PLACE) and all(
        key in narrow and covers(pattern, narrow[key]) for key, pattern in wide.items()
    )
