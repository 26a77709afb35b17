"""`gpuagent explain`: why a tenant is treated as it is, and why a run was refused, as prose."""

import time

import click

from gpuagent.cli.client import Client, Document
from gpuagent.cli.exits import CODES, Failure
from gpuagent.cli.options import Options, common
from gpuagent.cli.override import value_of
from gpuagent.cli.show import Number, amount, emit, listed, say, seconds


@click.command(epilog=CODES)
@click.argument("tenant", required=False)
@common
def explain(tenant: str | None) -> None:
    """Say why TENANT is treated as it is: level, causes, every knob, and what is known of it.

    Without a name: what `gpuagent run` has started for you, how that fares, and what it refused you,
    and why.
    """
    options = Options.current()
    if tenant is None:
        explain_own(Client(options.socket), as_json=options.json)
        return
    told = Client(options.socket).tenant(tenant, "/explanation")
    if options.json:
        emit(told)
        return
    _say_who(told)
    if told["run"] is not None:
        say(words_of(told["run"]))
    _say_hours(told)
    say_held(told)
    _say_overrides(told["overrides"])
    _say_limits(told["limit_rows"])
    _say_causes(told["causes"])
    _say_knobs(told["knobs"])
    _say_seats(told["seats"])
    _say_readings(told["readings"])


def _say_who(told: Document) -> None:
    row = told["row"]
    claimed = f"claimed by the rule {row['rule']}" if row["rule"] else "found, no rule claims it"
    if told["run"] is not None:
        claimed = "started by gpuagent run"
    say(f"{row['name']} is {row['level']} ({told['level_means']}); it was {claimed}.")
    where = f"card {listed(row['gpus'])}" if row["gpus"] else "no card"
    say(
        f"Processes: {row['processes']}, on {where}; GPU memory: "
        f"{amount('bytes', row['gpu_memory_bytes'])}; CPU: {amount('cores', row['cpu_cores'])}."
    )
    _say_latency(row)
    _say_source(told["latency_source"])


def explain_own(client: Client, *, as_json: bool) -> None:
    """Those that are the caller's own; of everybody for who sees everything."""
    runs, refusals = list(client.items("/v1/runs")), client.get("/v1/refusals")["items"]
    if as_json:
        emit({"runs": runs, "refusals": refusals})
        return
    for run in runs:
        say(words_of(run))
        try:
            say_held(client.tenant(run["name"], "/explanation"))
        except Failure:
            say("How it fares is not known: it has only just begun, or has ended.")
        say(f"`gpuagent explain {run['name']}` says more.")
    if not runs:
        say("Nothing that `gpuagent run` has started for you lives now.")
    _title("Refused lately")
    for refusal in refusals:
        say(f"  {_time(refusal['wall'])}, {refusal['by']} ({refusal['asked']}): {refusal['why']}")
        if refusal["remedy"]:
            say(f"    what to do: {refusal['remedy']}")
        numbers = ", ".join(f"{n} {amount(n, v)}" for n, v in refusal["numbers"].items())
        if numbers:
            say(f"    numbers: {numbers}")
    if not refusals:
        say("  none")


def words_of(run: Document) -> str:
    """What was promised to a run."""
    memory, share = run["memory_bytes"], run["share_ratio"]
    parts = [f"{run['name']} was started with `gpuagent run` by {run['by']}, {run['level']}"]
    parts.append(f"on {listed(run['gpus'])}")
    if memory is not None:
        parts.append(f"with {amount('bytes', memory)} reserved on each card")
    if share is not None:
        enforced = (
            "" if any("share is not enforced" in n for n in run["notes"]) else " under CUDA MPS"
        )
        parts.append(f"and {amount('ratio', share)} of it{enforced}")
    where = f"in {run['scope']}" if run["scope"] else "without a scope of its own"
    return ". ".join((f"{' '.join(parts)}, {where}", *run["notes"])) + "."


def _time(wall: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall))


def _say_latency(row: Document) -> None:
    quantile = row["latency_quantile"]
    if quantile is None:
        return
    known = row["latency_seconds"]
    about = "about " if row["latency_estimated"] else ""
    measured = "is not reported now" if known is None else f"is {about}{_latency(known)}"
    objective = row["latency_objective_seconds"]
    if objective is None:
        wanted = "no objective is declared"
    else:
        wanted = f"its objective is {_latency(objective)}"
        if row["level"] != "L1":
            wanted += ", for which nobody is held back: it is not L1"
    say(f"Its p{100 * quantile:g} latency {measured}; {wanted}.")


def _say_source(source: Document | None) -> None:
    if source is None:
        return
    where = f"from {source['metric']} at {source['url']}"
    last = source["last_success_seconds"]
    ago = "never" if last is None else f"{seconds(last)} ago"
    if source["up"] is None:
        say(f"It is to be read {where}, which has not been tried since the tenant is there.")
    elif not source["up"]:
        say(f"It cannot be read {where}: {source['why']} (last read: {ago}).")
    else:
        say(f"It is read {where}, {ago}{': ' + source['why'] if source['why'] else ''}.")


def _latency(value: float) -> str:
    return f"{value * 1000:.3g} ms" if value < 0.9995 else f"{value:.3g} s"


def _say_hours(told: Document) -> None:
    if told["hours"] and not told["within_hours"]:
        hindered = f" But {told['hours_why']}." if told["hours_why"] else ""
        say(
            f"It may use all it gets at {listed(told['hours'])} only, and it is another time now."
            f"{hindered}"
        )


def say_held(told: Document) -> None:
    row = told["row"]
    held = row["held_back"]
    if held is not None:
        say(_held(held, acts=told["acts"]))
    elif row["may_be_held_back"]:
        say("It is not held back now.")
    else:
        say("It is not held back, and will not be.")
    for card in told["cards_held"]:
        verb = "is" if card["in_force"] else "would be"
        share = amount("ratio", card["share_ratio"])
        say(
            f"A card of it, {card['gpu']}, {verb} limited to {share} of its power for "
            f"{card['cause']}, which slows everybody on it: {card['why']}."
        )
    if told["passive_why"]:
        say(f"Nothing is changed now: {told['passive_why']}.")


_EFFECT = {
    "applied": "It is held back to {share} for {cause}: {why}.",
    "in flight": "It is being held back to {share} for {cause}: {why}.",
    "pending": "It is held back to {share} for {cause} as soon as it starts anew: {why}.",
    "would": "It would be held back to {share} for {cause}{only_if}: {why}.",
    "refused": "It is to be held back to {share} for {cause}: {why}. That is refused{hindrance}.",
    "ineffective": "It is to be held back to {share} for {cause}: {why}. "
    "That has no effect{hindrance}.",
    "contested": "It is to be held back to {share} for {cause}: {why}. "
    "Somebody else keeps undoing that{hindrance}.",
    "gone": "It is to be held back to {share} for {cause}: {why}. "
    "What was to be turned has gone{hindrance}.",
    None: "It is to be held back to {share} for {cause}: {why}. "
    "What became of that is not known yet.",
}
"""By what became of the decision: only the first three are in force."""


def _held(held: Document, *, acts: bool) -> str:
    """`acts` is whether the agent does: what would be done by one that does is left out as configured."""
    only_if = ", which is only observed" if acts else " if the agent acted"
    hindrance = f": {held['effect_why']}" if held["effect_why"] else ""
    share = f"{amount('ratio', held['share_ratio'])} of its usual activity"
    return _EFFECT[held["effect"]].format(
        share=share, cause=held["cause"], why=held["why"], hindrance=hindrance, only_if=only_if
    )


def _say_overrides(overrides: list[Document]) -> None:
    if not overrides:
        return
    _title("Overrides")
    for item in overrides:
        on = f"card {item['gpu']} to {value_of(item)}" if item["gpu"] else f"to {value_of(item)}"
        left = seconds(item["remaining_seconds"])
        whose = f", by {item['by']}: {item['why']}" if item["by"] else ""
        say(f"  {item['name'] or 'an override'}: {on}, for {left} more{whose}")
        why = f": {item['effect_why']}" if item["effect_why"] else ""
        say(f"    {item['effect'] or 'nothing has come of it yet'}{why}")


def _say_limits(rows: list[Document]) -> None:
    if not rows:
        return
    _title("Limits: declared / used / enforced")
    for row in rows:
        unit = row["unit"]
        values = " / ".join(_limit(unit, row[k]) for k in ("declared", "used", "enforced"))
        say(f"  {row['limit']}{' on ' + row['gpu'] if row['gpu'] else ''}: {values}")
        say(f"    by {row['by']}")
        if row["why"]:
            say(f"    {row['why']}")


def _limit(unit: str, value: Number) -> str:
    return (
        _latency(value) if unit == "seconds" and isinstance(value, float) else amount(unit, value)
    )


def _say_causes(causes: list[Document]) -> None:
    _title("Causes now")
    for cause in causes:
        where = f" on {cause['gpu']}" if cause["gpu"] else ""
        say(f"  {cause['kind']}{where}, for {seconds(cause['held_seconds'])}: {cause['why']}")
    if not causes:
        say("  none")


def _say_knobs(knobs: list[Document]) -> None:
    _title("Knobs")
    for knob in knobs:
        say(f"  {knob['knob']} of {_where(knob)}")
        unit = knob["unit"]
        values = f"wanted {amount(unit, knob['wanted'])}, real {amount(unit, knob['real'])}"
        if knob["original"] is not None:
            values += f", before us {amount(unit, knob['original'])}"
        say(f"    {values}: {knob['result'] or 'not turned'}")
        if knob["outcome_why"]:
            say(f"    {knob['outcome_why']}")
        say(f"    why: {knob['why']}")
        if knob["rule"]:
            numbers = ", ".join(f"{n} {amount(n, v)}" for n, v in knob["numbers"].items())
            say(f"    rule: {knob['rule']}" + (f" ({numbers})" if numbers else ""))


def _where(knob: Document) -> str:
    return knob["cgroup"] or knob["gpu"] or knob["mps"] or knob["tenant"] or "the node"


def _say_seats(seats: list[Document]) -> None:
    _title("Where it can be held back")
    for seat in seats:
        say(f"  {seat['path']}: {seat['refusal'] or 'its own'}")
    if not seats:
        say("  nowhere: no cgroup of it is known")


def _say_readings(readings: list[Document]) -> None:
    _title("What is known of it")
    for reading in readings:
        labels = listed(reading["labels"].values()) if reading["labels"] else ""
        kind = "estimated" if reading["estimated"] else "exact"
        value = amount(reading["name"], reading["value"])
        age = seconds(reading["age_seconds"])
        say(f"  {reading['name']} {value} ({kind}, {age} ago){' ' + labels if labels else ''}")
    if not readings:
        say("  nothing yet")


def _title(text: str) -> None:
    say()
    say(text)
