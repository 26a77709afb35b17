"""Levers that are only observed, as holds for people: how far they would hold somebody back, and for what."""

from collections.abc import Iterable

from gpuagent.decide.ladder import AT_ONCE
from gpuagent.model.declare import On
from gpuagent.model.inventory import on_tenant
from gpuagent.model.plan import Hold, Setting


def would_hold(settings: Iterable[Setting], holds: Iterable[Hold]) -> tuple[Hold, ...]:
    """Of each tenant that is not held, the first lever of which it is only said what it would do."""
    held = {h.subject for h in holds if h.share < 1.0}
    found: dict[str, list[Setting]] = {}
    for setting in settings:
        on = setting.subject
        shown = setting.blocked is not None and setting.blocked.result == "would"
        if not shown or on.on is On.GPU or not on.tenant or on_tenant(on.tenant) in held:
            continue
        mine = found.setdefault(on.tenant, [])
        if not mine or (mine[0].knob is setting.knob and mine[0].rule == setting.rule):
            mine.append(setting)
    return tuple(_hold(name, mine) for name, mine in found.items())


def _hold(name: str, settings: list[Setting]) -> Hold:
    first = settings[0]
    share = 0.0 if first.knob.name in AT_ONCE else dict(first.numbers)["share"]
    return Hold(
        subject=on_tenant(name),
        share=share,
        rung=first.knob.family,
        cause=first.rule.partition("/")[2],
        why=first.why,
        settings=tuple(s.key for s in settings),
    )
