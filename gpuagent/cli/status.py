"""`gpuagent status` and `gpuagent tenants`: what there is and how it fares."""

from collections.abc import Callable
from typing import TypeVar

import click

from gpuagent.cli.client import Client, Document
from gpuagent.cli.exits import CODES, Exit, Failure
from gpuagent.cli.latency import against, at, known, latency
from gpuagent.cli.options import Options, common
from gpuagent.cli.show import UNKNOWN, amount, emit, listed, say, seconds, table, width

Answer = TypeVar("Answer")


@click.command(epilog=CODES)
@common
def status() -> None:
    """Show the node, its cards, and whether the agent is well.

    Exits with 1 if it is not: something essential cannot be read, or is not as configured.
    """
    options = Options.current()
    client = Client(options.socket)
    node, health = client.get("/v1/node"), client.get("/v1/health")
    gpus = _or_none(lambda: client.get("/v1/gpus"))
    mps = _or_none(lambda: client.get("/v1/mps"))
    if options.json:
        emit({"node": node, "health": health, "gpus": gpus, "mps": mps})
    else:
        rows = _or_none(lambda: list(client.items("/v1/tenants")))
        _say_node(node, health)
        _say_health(health)
        if gpus is None:
            say("Cards and tenants are shown to administrators and to the tenants' own users.")
        elif gpus["items"]:
            say()
            _say_cards(gpus["items"])
            _say_settings(_or_none(lambda: client.get("/v1/plan")), gpus["items"])
        _say_mps(mps)
        _say_latencies([row for row in rows or () if known(row)])
    click.get_current_context().exit(Exit.OK if health["ok"] else Exit.PROBLEM)


def _or_none(read: Callable[[], Answer]) -> Answer | None:
    """What `read` gives, or None where this user may not see it."""
    try:
        return read()
    except Failure as failure:
        if failure.code is not Exit.FORBIDDEN:
            raise
        return None


def _say_node(node: Document, health: Document) -> None:
    doing = "acting" if node["acts"] else "changing nothing"
    simulated = "SIMULATED HOST, " if node["simulated"] else ""
    say(f"gpuagent {node['version']}, {simulated}mode {node['mode']}, {doing}")
    if health["passive_why"]:
        say(f"  why: {health['passive_why']}")
    if node["released"]:
        say("  the driver has been released; `gpuagent resume` takes it up again")
    say(
        f"Cards {_count(node['gpus'])}, drawing {amount('watts', node['gpu_power_watts'])}; "
        f"tenants {_count(node['tenants'])}, {_limited(node)}; "
        f"causes {node['active_causes']}; "
        f"CPU busy {amount('ratio', node['cpu_busy_ratio'])}, "
        f"host memory free {amount('bytes', node['memory_available_bytes'])}"
    )


def _count(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def _limited(node: Document) -> str:
    """What is held back in fact, and what would be if the agent acted."""
    parts = [f"held back {node['tenants_held_back']}"]
    if node["tenants_would_be_held_back"]:
        parts.append(f"would be held back {node['tenants_would_be_held_back']}")
    if node["gpus_limited"]:
        parts.append(f"cards limited {node['gpus_limited']}")
    if node["gpus_would_be_limited"]:
        parts.append(f"cards that would be limited {node['gpus_would_be_limited']}")
    return ", ".join(parts)


def _say_health(health: Document) -> None:
    word = "ok" if health["ok"] else "not ok"
    say(f"Health: {word}, degraded" if health["degraded"] else f"Health: {word}")
    if health["demoted"]:
        say(f"  only observing: {health['demoted']}")
    for line in health["config_error"].splitlines():
        say(f"  configuration: {line}")
    for sensor in health["sensors"]:
        if sensor["up"] is False:
            last = sensor["last_success_seconds"]
            ago = "never" if last is None else f"{seconds(last)} ago"
            name = sensor["name"] if sensor["essential"] else f"{sensor['name']} (optional)"
            say(f"  {name}: {sensor['why']} (last read: {ago})")
    if health["latency_sources_down"]:
        of = f"{health['latency_sources_down']} of {health['latency_sources']}"
        say(f"  latency: {of} sources cannot be read; `gpuagent explain TENANT` says why")
    for listener in health["listeners"]:
        if listener["why"]:
            say(f"  listener {listener['name']} ({listener['address']}): {listener['why']}")
    for key in ("mps_why", "tokens_why", "unsaved_why"):
        if health[key]:
            say(f"  {health[key]}")
    for card in health["blind"]:
        say(f"  card {card['index']} cannot be read: {card['why']}")


def _say_cards(cards: list[Document]) -> None:
    rows = []
    for card in cards:
        read = {
            r["name"]: r["value"] for r in card["readings"] if r["labels"] == {"gpu": card["uuid"]}
        }
        rows.append(
            (
                str(card["index"]),
                card["name"],
                amount("ratio", read.get("gpu_utilization_ratio")),
                _of("bytes", read.get("gpu_memory_used_bytes"), card["memory_bytes"]),
                _of("watts", read.get("gpu_power_watts"), read.get("gpu_power_limit_watts")),
                amount("celsius", read.get("gpu_temperature_celsius")),
                listed(card["tenants"]),
            )
        )
    table(("Card", "Name", "Busy", "Memory", "Power", "Heat", "Tenants"), rows)


_CARD_SETTINGS = (
    "gpu_power_limit",
    "gpu_clock_limit",
    "gpu_compute_mode",
    "gpu_persistence_mode",
    "gpu_time_slice",
)
_UNMET = ("refused", "contested", "ineffective")


def _say_settings(plan: Document | None, cards: list[Document]) -> None:
    """Settings of cards that are wished and cannot be had."""
    index = {card["uuid"]: card["index"] for card in cards}
    for knob in (plan or {"knobs": ()})["knobs"]:
        if knob["knob"] in _CARD_SETTINGS and knob["result"] in _UNMET:
            on, why = index.get(knob["gpu"], knob["gpu"]), knob["outcome_why"]
            wanted = amount(knob["unit"], knob["wanted"])
            say(f"Card {on}: {knob['knob']} {wanted}: {knob['result']}{': ' + why if why else ''}")


def _say_mps(mps: Document | None) -> None:
    """The control daemons of CUDA MPS, where any are configured."""
    daemons = (mps or {"daemons": None})["daemons"]
    if not daemons:
        return
    say()
    table(
        ("MPS daemon", "Is", "Own", "Cards", "Servers", "Clients", "Default share"),
        (
            (
                daemon["name"],
                "up" if daemon["up"] else "down",
                "yes" if daemon["own"] else "no",
                listed(daemon["gpus"]),
                str(len(daemon["servers"])),
                str(len(daemon["clients"])),
                amount("ratio", daemon["default_threads_ratio"]),
            )
            for daemon in daemons
        ),
    )
    for daemon in daemons:
        for why in dict.fromkeys(w for w in (daemon["why"], daemon["own_why"]) if w):
            say(f"  {daemon['name']}: {why}")


def _say_latencies(rows: list[Document]) -> None:
    """Those over their objective come first, those without a known latency or objective last."""
    if not rows:
        return
    say()
    rows.sort(key=lambda row: (-(against(row) or 0.0), row["name"]))
    table(
        ("Tenant", "Level", "Latency", "At"),
        ((row["name"], row["level"], latency(row), at(row)) for row in rows),
    )
    say("Latency is against its objective; ! is over it.")


def _of(unit: str, part: float | None, whole: float | None) -> str:
    """Such as "70.0/80.0 GiB"."""
    number, _, symbol = amount(unit, part).partition(" ")
    total, _, total_symbol = amount(unit, whole).partition(" ")
    return f"{number}/{total} {symbol or total_symbol}".strip()


@click.command(epilog=CODES)
@common
def tenants() -> None:
    """List the tenants, their level, and how far each is held back."""
    options = Options.current()
    rows = list(Client(options.socket).items("/v1/tenants"))
    if options.json:
        emit({"items": rows})
    elif not rows:
        say("There are no tenants.")
    else:
        wide = width() >= _WIDE
        columns = [c for c in _TENANT_COLUMNS if wide or c[0] not in _WIDE_ONLY]
        table([name for name, _ in columns], ([cell(row) for _, cell in columns] for row in rows))


def _share(row: Document) -> str:
    """What the tenant is left; where nothing is done, what it would be."""
    would = row["would_share_ratio"]
    if would is not None and row["share_ratio"] == 1:
        return f"would {amount('ratio', would)}"
    return amount("ratio", row["share_ratio"])


def _reason(held: Document) -> str:
    reason = f"{held['cause']} ({held['rung']})"
    if held["in_force"] or held["effect"] == "would":
        return reason
    return f"{reason}: {held['effect'] or 'not known yet'}"


_TENANT_COLUMNS: tuple[tuple[str, Callable[[Document], str]], ...] = (
    ("Tenant", lambda row: str(row["name"])),
    ("Level", lambda row: str(row["level"])),
    ("Class", lambda row: row["kind"] or UNKNOWN),
    ("Share", _share),
    ("Latency", latency),
    ("Cards", lambda row: listed(row["gpus"])),
    ("GPU memory", lambda row: amount("bytes", row["gpu_memory_bytes"])),
    ("Cores", lambda row: amount("", row["cpu_cores"])),
    ("Procs", lambda row: str(row["processes"])),
    ("Held back for", lambda row: _reason(row["held_back"]) if row["held_back"] else ""),
)
_WIDE_ONLY = frozenset({"Cores", "Procs"})
_WIDE = 100
"""Columns of a terminal on which all of that has room."""
