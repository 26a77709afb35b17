"""What must hold between settings that are each right by themselves.

A rule looks only at values that were read without a problem: one mistake is reported once.
"""

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

import msgspec

from gpuagent.config import Backpressure, LatencySource, Match, MpsGroup
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
    yield from _promises(values)
    yield from _hours(values)
    yield from _mps(values, wrong)
    yield from _runs(values)
    yield from _twice(values)
    yield from _latency_sources(values, wrong)
    yield from _cards(values, wrong)


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
    yield from _matches(values, wrong_tables)


_MATCH_KEYS = tuple(field.name for field in struct_type(Match).fields)


def matched(values: Values, tenant: Path) -> dict[str, str]:
    """The patterns that a tenant gives, by key."""
    given = ((key, values.get((*tenant, "match", key))) for key in _MATCH_KEYS)
    return {key: value for key, value in given if isinstance(value, str) and value}


def _matches(values: Values, wrong_tables: set[Path]) -> Iterator[Problem]:
    """Of two rules that ask for the same the second never counts."""
    first: dict[frozenset[tuple[str, str]], Path] = {}
    for tenant in tables(values, "tenants"):
        match: Path = (*tenant, "match")
        if match not in values or match in wrong_tables:
            continue
        asked = matched(values, tenant)
        if not asked:
            listed = ", ".join(_MATCH_KEYS[:-1])
            yield Problem(match, f"is empty; give at least one of {listed} or {_MATCH_KEYS[-1]}")
        elif (other := first.setdefault(frozenset(asked.items()), tenant)) != tenant:
            text = f"never counts: it is that of {spelled(other)}, which comes first"
            yield Problem(match, text)


_TRITON_SUM = re.compile(r"nv_inference_(request|queue|compute_[a-z]+)_duration_us")
"""Triton's own, cumulative: nothing but a mean can be had of them."""


def _latency_sources(values: Values, wrong: frozenset[Path]) -> Iterator[Problem]:
    """A window that no two scrapes lie within tells nothing. No window is below the default interval."""
    for source in (path for path in values if len(path) == 3 and path[2] == "latency_from"):
        metric = values.get((*source, "metric"))
        if isinstance(metric, str) and (found := _TRITON_SUM.fullmatch(metric)):
            text = (
                f"{metric} is a sum, of which no quantile can be had; start Triton with "
                f"--metrics-config summary_latencies=true and write nv_inference_{found[1]}_summary_us"
            )
            yield Problem((*source, "metric"), text)
        interval, window = (*source, "interval"), (*source, "window")
        every = values.get(interval)
        if not isinstance(every, float) or window in wrong:
            continue
        span = values.get(window, _default(LatencySource, "window"))
        assert isinstance(span, float)
        if every > span:
            most = _show(LatencySource, "window", span)
            yield Problem(
                interval,
                f"{_show(LatencySource, 'interval', every)} must not be more than window ({most})",
            )


def _default(section: type[msgspec.Struct], key: str) -> object:
    return next(field.default for field in struct_type(section).fields if field.name == key)


_CARD_SETTINGS = ("compute_mode", "persistence_mode", "time_slice", "clock_unlocked")


def _cards(values: Values, wrong: frozenset[Path]) -> Iterator[Problem]:
    earlier: list[tuple[str, Path]] = []
    wrong_entries = {path[:2] for path in wrong}
    for card in (path for path in values if len(path) == 2 and path[0] == "cards"):
        gpu = values.get((*card, "gpu"))
        if not isinstance(gpu, str) or card in wrong_entries:
            continue
        if _is_index(gpu):
            yield Problem((*card, "gpu"), _no_uuid(gpu))
            continue
        first = next((path for pattern, path in earlier if covers(pattern, gpu)), None)
        if first is not None:
            text = f"{shown(gpu)} never counts: {spelled(first)} comes first and fits all it fits"
            yield Problem((*card, "gpu"), text)
        earlier.append((gpu, card))
        if not any(values.get((*card, k)) not in (None, "") for k in _CARD_SETTINGS):
            listed = f"{', '.join(_CARD_SETTINGS[:-1])} or {_CARD_SETTINGS[-1]}"
            yield Problem((*card, "gpu"), f"nothing is declared of it; give {listed}")
        yield from _one_card(values, card, gpu)


def _one_card(values: Values, card: Path, gpu: str) -> Iterator[Problem]:
    """What one entry contradicts elsewhere."""
    off = values.get((*card, "persistence_mode")) is False
    if off and values.get(("power", "keep_on_stop")) is True:
        text = (
            "contradicts power.keep_on_stop: without it the driver forgets every limit at our end"
        )
        yield Problem((*card, "persistence_mode"), text)
    if values.get((*card, "compute_mode")) == "prohibited":
        groups = {path[:3] for path in values if path[:2] == ("mps", "groups") and len(path) > 2}
        for group in sorted(groups):
            for uuid in _texts(values.get((*group, "gpus"))):
                if covers(gpu, uuid):
                    text = f"contradicts {spelled(group)}, which runs MPS on {shown(uuid)}"
                    yield Problem((*card, "compute_mode"), text)
                    break


def _is_index(gpu: str) -> bool:
    return gpu.isascii() and gpu.isdecimal()


def _no_uuid(gpu: str) -> str:
    return f"{shown(gpu)} is an index, which fits no UUID; write the UUID that nvidia-smi -L shows"


def _texts(value: object) -> tuple[str, ...]:
    return tuple(v for v in value if isinstance(v, str)) if isinstance(value, tuple | list) else ()


def covers(pattern: str, other: str) -> bool:
    """Whether a pattern of UUIDs fits all that another fits, as far as that is plain to see."""
    return pattern in ("*", other) or (
        not any(c in other for c in "*?[") and fnmatchcase(other, pattern)
    )


_NOT_ABOVE = (("memory_reserved", "memory_limit"), ("host_memory_high", "host_memory_max"))
"""Of a tenant: the first must not be above the second, or one of the two says nothing."""


def tables(values: Values, *name: str) -> Iterator[Path]:
    """Every table of a list of tables, in order."""
    depth = len(name) + 1
    return (p for p in values if len(p) == depth and p[:-1] == name and isinstance(p[-1], int))


def _promises(values: Values) -> Iterator[Problem]:
    for tenant in tables(values, "tenants"):
        for low, high in _NOT_ABOVE:
            lower, upper = values.get((*tenant, low)), values.get((*tenant, high))
            if isinstance(lower, int) and isinstance(upper, int) and lower > upper:
                text = f"is more than {high} of the same tenant; make it less"
                yield Problem((*tenant, low), text)
        levers = values.get((*tenant, "levers"))
        told = [k for k in ("notice_signal", "notice_command") if values.get((*tenant, k))]
        if isinstance(levers, tuple) and "notice" not in levers and told:
            yield Problem((*tenant, told[0]), 'says nothing without "notice" in levers')
        command = _texts(values.get((*tenant, "notice_command")))
        if command and "/" in command[0] and not command[0].startswith("/"):
            text = f"{shown(command[0])} is relative, and to what is not known; begin it with /"
            yield Problem((*tenant, "notice_command", 0), text)


def _hours(values: Values) -> Iterator[Problem]:
    """Whoever is never held back has no hours outside of which it would be."""
    level: Path = ("levels", "L1", "hours")
    tenants = (
        (*t, "hours") for t in tables(values, "tenants") if values.get((*t, "sla")) is Level.L1
    )
    for path in (level, *tenants):
        if values.get(path):
            yield Problem(path, "L1 is never held back; leave this out, or give another sla")
    for tenant in tables(values, "tenants"):
        levers = values.get((*tenant, "levers"))
        kept = values.get((*tenant, "sla")) is Level.L1 or "cpu_max" in _texts(levers)
        if levers is not None and not kept and values.get((*tenant, "hours")):
            text = 'says nothing without "cpu_max" in levers, by which hours are kept'
            yield Problem((*tenant, "hours"), text)


_LONGEST_PIPE_BYTES = 81
"""With `/control_privileged` 100: a daemon fails without a word where a socket's path is much longer."""


def _mps(values: Values, wrong: frozenset[Path]) -> Iterator[Problem]:
    seen: dict[tuple[str, object], Path] = {}
    for group in tables(values, "mps", "groups"):
        for key in ("name", "pipe_directory"):
            value = values.get((*group, key))
            place: Path = (*group, key)
            if value is None and key == "pipe_directory" and place not in wrong:
                value, place = _default(MpsGroup, key), group
            if value is not None and (first := seen.setdefault((key, value), group)) != group:
                of = "" if place != group else f"{key}: "
                yield Problem(place, f"{of}{shown(value)} is that of {spelled(first)} too")
        pipe = values.get((*group, "pipe_directory"))
        if isinstance(pipe, str) and len(pipe.encode()) > _LONGEST_PIPE_BYTES:
            text = f"is longer than {_LONGEST_PIPE_BYTES} bytes, the most a daemon of MPS can use"
            yield Problem((*group, "pipe_directory"), text)
        if values.get((*group, "own")) is True and not values.get((*group, "gpus")):
            yield Problem((*group, "own"), "needs gpus: the cards of the daemon, by UUID")
        for i, gpu in enumerate(_texts(values.get((*group, "gpus")))):
            if _is_index(gpu):
                yield Problem((*group, "gpus", i), _no_uuid(gpu))
        if values.get((*group, "own")) is True:
            yield from _own_daemon(values, group)
    yield from _shared_cards(values)


def _shared_cards(values: Values) -> Iterator[Problem]:
    """A card has one MPS server at a time: a second daemon's would never start."""
    first: dict[str, Path] = {}
    for group in tables(values, "mps", "groups"):
        if values.get((*group, "own")) is not True:
            continue
        for i, gpu in enumerate(_texts(values.get((*group, "gpus")))):
            if (other := first.setdefault(gpu, group)) != group:
                text = f"{shown(gpu)} is in {spelled(other)} too; a card has one daemon"
                yield Problem((*group, "gpus", i), text)


def _own_daemon(values: Values, group: Path) -> Iterator[Problem]:
    """What stands in the name of a unit, and in the environment of a daemon that knows no patterns."""
    name, gpus = values.get((*group, "name")), values.get((*group, "gpus"))
    if isinstance(name, str) and set(name) & set("/@"):
        text = (
            f"{shown(name)} cannot name the unit of a daemon of the agent's own; leave out / and @"
        )
        yield Problem((*group, "name"), text)
    for i, gpu in enumerate(gpus if isinstance(gpus, tuple) else ()):
        if isinstance(gpu, str) and set(gpu) & set("*?["):
            yield Problem((*group, "gpus", i), f"{shown(gpu)} is no UUID, which own = true needs")


_ONCE = (("enforce", "families"), ("tenants", "levers"), ("mps", "groups", "gpus"))
"""Lists in which each entry stands once, by the names of their paths."""


def _twice(values: Values) -> Iterator[Problem]:
    for path in values:
        if tuple(part for part in path if isinstance(part, str)) not in _ONCE:
            continue
        given = values[path]
        entries = given if isinstance(given, tuple) else ()
        for i, entry in enumerate(entries):
            if isinstance(entry, str) and entry in entries[:i]:
                yield Problem((*path, i), f"{shown(entry)} is there twice")


_DEVICES = ("/dev/", "char-", "block-")
"""What DeviceAllow= takes (systemd.resource-control(5))."""


def _runs(values: Values) -> Iterator[Problem]:
    for i, device in enumerate(_texts(values.get(("run", "devices")))):
        if not any(device.startswith(begin) and device != begin for begin in _DEVICES):
            text = (
                f"{shown(device)} is no device; write /dev/NAME, or char-NAME as in /proc/devices"
            )
            yield Problem(("run", "devices", i), text)
    for one in tables(values, "run", "allow"):
        if not values.get((*one, "user")) and not values.get((*one, "group")):
            yield Problem(one, "allows nobody in particular; give user or group")
