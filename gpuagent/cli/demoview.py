"""The picture that `gpuagent demo` draws: cards, tenants, and a service with and without the agent."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpuagent.cli.show import UNKNOWN, amount
from gpuagent.lab.peaks import Peaks
from gpuagent.lab.show import Beside, Summary
from gpuagent.log import printable
from gpuagent.model import vocab
from gpuagent.model.inventory import Gpu, Tenant, on_gpu
from gpuagent.model.plan import Hold, Snapshot

_EVENTS = 5
_FRESH_SECONDS = 60.0
_LONGEST_NAME = 16
"""Of a tenant; a longer one would take the room of the other columns."""
_GIB = 1024**3
_CAME_OF_IT = {
    "applied": "written, and read back",
    "pending": "acts on what is started from now on",
    "would": "only said",
    "refused": "it cannot be turned here",
    "gone": "what was to be turned has gone",
    "ineffective": "it would have had no effect",
    "contested": "somebody else keeps undoing it",
    "put back": "as it was before",
    "left alone": "somebody else had changed it",
}


def picture(
    snapshot: Snapshot,
    beside: Mapping[str, Beside],
    *,
    elapsed: float,
    seconds: float,
    about: str = "",
    happened: Sequence[tuple[float, str]] = (),
) -> Group:
    """All of it, for 80 columns. `happened` is what the scenario has brought, as `Show.happened` has it."""
    head = (
        f"simulated {elapsed:.0f} of {seconds:.0f} s   mode {snapshot.posture.mode}   "
        f"causes {len(snapshot.causes)}"
    )
    parts: list[RenderableType] = [
        Text(head, style="bold"),
        *([Text(printable(about), style="dim")] if about else []),
        Text(),
        _cards(snapshot),
        Text(),
        _tenants(snapshot, beside),
        Text(),
        *_reasons(snapshot),
        *_last_events(snapshot, happened),
    ]
    return Group(*parts)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    return table


def _cards(snapshot: Snapshot) -> Table:
    table = _table("Card", "Name", "Busy", "Memory", "Power", "Limit", "Heat")
    for gpu in snapshot.state.inventory.gpus or ():
        table.add_row(str(gpu.index), printable(gpu.name), *_card(snapshot, gpu))
    return table


def _card(snapshot: Snapshot, gpu: Gpu) -> Iterator[str]:
    if gpu.blind:
        yield from (gpu.blind, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN)
        return
    on = on_gpu(gpu.uuid)
    fresh = snapshot.state.fresh
    used, total = fresh(vocab.GPU_MEMORY_USED_BYTES, on), fresh(vocab.GPU_MEMORY_TOTAL_BYTES, on)
    yield amount("ratio", fresh(vocab.GPU_UTILIZATION_RATIO, on))
    yield UNKNOWN if used is None or not total else f"{used / _GIB:.1f}/{total / _GIB:.0f} GiB"
    yield _rounded("watts", fresh(vocab.GPU_POWER_WATTS, on))
    yield amount("watts", fresh(vocab.GPU_POWER_LIMIT_WATTS, on))
    yield _rounded("celsius", fresh(vocab.GPU_TEMPERATURE_CELSIUS, on))


def _rounded(unit: str, value: float | None) -> str:
    return amount(unit, None if value is None else float(round(value)))


def _tenants(snapshot: Snapshot, beside: Mapping[str, Beside]) -> Table:
    table = _table("Tenant", "Lvl", "Class", "Share", "Latency", "Without", "Goal", "Held by")
    holds = {h.subject.tenant: h for h in snapshot.holds if h.subject.tenant}
    for tenant in snapshot.state.inventory.tenants or ():
        table.add_row(*_tenant(tenant, holds.get(tenant.name), beside.get(tenant.name)))
    return table


def _tenant(tenant: Tenant, hold: Hold | None, beside: Beside | None) -> Iterator[str | Text]:
    held = hold is not None and hold.in_force and hold.share < 1.0
    name = printable(tenant.name)
    yield name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
    yield tenant.level.name
    yield tenant.kind or UNKNOWN
    yield amount("ratio", hold.share if held and hold is not None else 1.0)
    if beside is None:
        yield from ("", "", "")
    else:
        yield _latency(beside.with_agent, beside.objective.seconds)
        yield _latency(beside.without, beside.objective.seconds)
        yield f"p{beside.objective.quantile * 100:g} {_milliseconds(beside.objective.seconds)}"
    yield f"{hold.cause} ({hold.rung})" if held and hold is not None else ""


def _latency(seconds: float | None, objective: float) -> Text:
    if seconds is None:
        return Text(UNKNOWN)
    return Text(_milliseconds(seconds), style="red" if seconds > objective else "green")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def _reasons(snapshot: Snapshot) -> Iterator[Text]:
    for cause in snapshot.causes[:2]:
        yield Text(printable(f"{cause.kind}: {cause.why}"), no_wrap=True, overflow="ellipsis")


def _last_events(snapshot: Snapshot, happened: Sequence[tuple[float, str]]) -> Iterator[Text]:
    """What was done last, and why, and what the scenario brought last; the newest first.

    What is brought has a line to itself for a minute: many deeds of the agent do not push it out.
    """
    now = snapshot.state.now.mono
    brought = [(at, f"* {text}", "bold") for at, text in happened if at <= now][-_EVENTS:]
    done = [(event.at, event.text, "dim") for event in snapshot.events[-_EVENTS:]]
    every = sorted((*brought, *done), key=lambda one: -one[0])
    shown = every[:_EVENTS]
    if brought and brought[-1] not in shown and now - brought[-1][0] <= _FRESH_SECONDS:
        shown = [*shown[: _EVENTS - 1], brought[-1]]
    for at, text, style in shown:
        line = printable(f"{now - at:4.0f} s ago  {text}")
        yield Text(line, style=style, no_wrap=True, overflow="ellipsis")


def conclusion(summary: Summary) -> Iterator[str]:
    """What it came to, in sentences."""
    seconds = summary.simulated_seconds
    yield f"{summary.scenario}, seed {summary.seed}: {seconds:.0f} simulated seconds"
    here, there = summary.l1_p99_seconds_with, summary.l1_p99_seconds_without
    if here is not None and there is not None:
        yield (
            f"p99 of {summary.l1_tenant}: {_milliseconds(there)} without the agent, "
            f"{_milliseconds(here)} with it ({here / there:.0%})"
        )
    missed, before = summary.l1_missed_ratio_with, summary.l1_missed_ratio_without
    if missed is not None and before is not None and summary.l1_objective_seconds is not None:
        goal = _milliseconds(summary.l1_objective_seconds)
        yield f"requests over {goal}: {before:.1%} without the agent, {missed:.1%} with it"
    if summary.l3_throughput_kept is not None:
        yield f"L3 kept {summary.l3_throughput_kept:.0%} of the work it does without the agent"
    yield from _peaks(summary)
    if summary.actions:
        yield "what the agent did, how often, and what came of it:"
    for name, count in summary.actions.items():
        meaning = _CAME_OF_IT.get(name.partition(" ")[2], "")
        yield f"  {name}: {count}{f' ({meaning})' if meaning else ''}"
    for card in summary.lost_cards:
        yield f"card {card} fell off the bus: what was set on it is gone with it"
    rest = " that still exists" if summary.lost_cards else ""
    yield f"everything{rest} was put back" if summary.restored else "NOT PUT BACK:"
    yield from (f"  {text}" for text in summary.left)


def _fullest(peaks: Peaks) -> str:
    text = f"{peaks.memory_bytes / _GIB:.1f} GiB"
    full = peaks.memory_full_seconds
    return f"{text} (full for {full:.0f} s)" if full else text


def _peaks(summary: Summary) -> Iterator[str]:
    """What the cards came to, where it can be compared."""
    here, there = summary.peaks_with, summary.peaks_without
    if here is None or there is None:
        return
    yield f"hottest card: {there.celsius:.0f} C without the agent, {here.celsius:.0f} C with it"
    yield (f"fullest card: {_fullest(there)} without the agent, {_fullest(here)} with it")
    if here.over_budget_seconds is not None and there.over_budget_seconds is not None:
        yield (
            f"over the power budget: {there.over_budget_seconds:.0f} s without the agent (by "
            f"{there.over_budget_watts or 0.0:.0f} W at most), {here.over_budget_seconds:.0f} s "
            f"with it (by {here.over_budget_watts or 0.0:.0f} W)"
        )
