"""Putting back: one target for the lanes, all of them at a stop, after a crash, or by hand.

A value is put back only if it is still ours. What is ours no longer, or was made void by a reboot,
is left as it is.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack
from enum import StrEnum, unique
from typing import Literal

import msgspec

from gpuagent.act.audit import AuditLog
from gpuagent.act.ledger import Ledger
from gpuagent.act.lingering import identified, let_go
from gpuagent.act.record import Entry, Target
from gpuagent.clock import Clock
from gpuagent.errors import AgentError, Gone, Refused, Unavailable, Unsupported
from gpuagent.model.audit import Action
from gpuagent.model.declare import Fate, Knob, On
from gpuagent.model.state import ActionResult
from gpuagent.model.vocab import KNOB
from gpuagent.ports import Actuator, Orderly, Real

CALL_SECONDS = 5.0
"""How long the put-back of one target may take before it is reported as failed."""


@unique
class Occasion(StrEnum):
    """Why things are put back: it decides which (DESIGN 2)."""

    STOP = "stop"
    CRASH = "start after a crash"
    RESCUE = "rescue after a crash"
    BY_HAND = "by hand"

    def fate(self, knob: Knob, rule: str, *, keep_on_stop: bool) -> Fate:
        """What becomes of a setting of this rule: put back, held or adopted."""
        fates = knob.fates_under(rule)
        match self:
            case Occasion.STOP if fates.stop is Fate.AS_CONFIGURED:
                return Fate.HOLD if keep_on_stop else Fate.PUT_BACK
            case Occasion.STOP:
                return fates.stop
            case Occasion.CRASH:
                return fates.crash
            case Occasion.RESCUE:
                return fates.rescue
            case Occasion.BY_HAND:
                return Fate.PUT_BACK


class Returned(msgspec.Struct, frozen=True):
    """How one target ended: the original is there, or somebody else's value is."""

    what: Literal["put back", "left alone"]
    why: str
    before: Real
    after: Real


def _at_once() -> str:
    return ""


async def return_original(
    actuator: Actuator, entry: Entry, *, must_wait: Callable[[], str] = _at_once
) -> Returned:
    """Write the original if the value is still ours, and read it back.

    Raises Gone where the target or its identity is; Refused, Unsupported and Unavailable where it
    could not be put back, or where `must_wait` says why it must not be yet, and then it is still
    ours to try again.
    """
    subject, original, deadband = entry.subject, entry.original, actuator.knob.deadband
    await identified(actuator, subject, entry)
    before = await actuator.get(subject)
    if before.raw == original.raw:
        await let_go(actuator, entry)
        return Returned("put back", f"it is back at {original.raw} already", before, before)
    if not entry.explains(before, deadband):
        await let_go(actuator, entry)
        why = f"somebody else has set it to {before.raw} since; it is left so"
        return Returned("left alone", why, before, before)
    if reason := must_wait():
        raise Unavailable(reason)
    await actuator.set(subject, original.raw)
    after = await actuator.get(subject)
    if after.raw == original.raw or abs(after.value - original.value) < deadband:
        await let_go(actuator, entry)
        return Returned("put back", f"{before.raw} was ours, {original.raw} before", before, after)
    if entry.explains(after, deadband):
        raise Unavailable(f"{original.raw} was written, but it still reads {after.raw}")
    await let_go(actuator, entry)
    why = f"somebody else set it to {after.raw} while it was put back; it is left so"
    return Returned("left alone", why, before, after)


async def believed(actuator: Actuator, entry: Entry | None, error: AgentError) -> AgentError:
    """The error, unless it says that a held target is gone and that one is only out of sight."""
    if entry is not None and isinstance(error, Gone):
        try:
            await identified(actuator, entry.subject, entry)
        except (Gone, Refused, Unsupported, Unavailable) as surer:
            return surer
    return error


def ends_with_its_target(entry: Entry) -> bool:
    """Whether a target that is gone can never come back as itself.

    A cgroup's inode is not given twice, nor are a process's number and start time; a lost card may
    return with our limit still on it, so its entry stays until the next boot.
    """
    return entry.subject.on in {On.CGROUP, On.PROCESS}


What = Literal["put back", "held", "adopted", "left alone", "gone", "failed"]


class Item(msgspec.Struct, frozen=True):
    """What became of one entry of the ledger."""

    entry: Entry
    what: What
    why: str
    before: str = ""
    after: str = ""

    @property
    def ended(self) -> ActionResult | None:
        """How it counts among the agent's actions; None where nothing was done."""
        match self.what:
            case "held" | "adopted":
                return None
            case "failed":
                return "refused"
            case _:
                return self.what


Report = tuple[Item, ...]


async def put_back(
    *,
    ledger: Ledger,
    actuators: Sequence[Actuator],
    occasion: Occasion,
    clock: Clock,
    keep_on_stop: bool = False,
    busy: Collection[Target] = (),
    audit: AuditLog | None = None,
    call_seconds: float = CALL_SECONDS,
) -> Report:
    """Treat every entry of the ledger as the occasion demands, all at once. Never raises.

    `busy` are targets with a write that has not returned (`Reconciler.close`): whatever is written
    now could be overtaken by it, so they stay in the ledger. What is held, adopted or failed stays
    there too. What is held for the budget is held at what the budget alone asked for: an override
    does not outlive the agent.
    """
    by_name = {a.knob.name: a for a in actuators}
    entries = sorted(ledger.entries.values(), key=lambda e: e.target)
    items = [_void(e) for e in ledger.void]
    unsure = {e.target for e in entries if _is_budgeted(e) and (e.pending or e.target in busy)}
    async with _all_at_once(actuators), asyncio.TaskGroup() as group:
        tasks = []
        for entry in entries:
            knob, actuator = KNOB.get(entry.knob), by_name.get(entry.knob)
            if knob is None or actuator is None:
                items.append(Item(entry, "failed", "this version has no such knob; it is kept"))
                continue
            if entry.target in busy:
                items.append(Item(entry, "failed", "an earlier write has not returned yet"))
                continue
            fate = occasion.fate(knob, entry.rule, keep_on_stop=keep_on_stop)
            # Where a sum is not known nothing is added to it.
            if fate is Fate.HOLD and entry.budget is not None and unsure <= {entry.target}:
                work = _eased(ledger, actuator, entry)
            elif fate in {Fate.HOLD, Fate.ADOPT}:
                items.append(_kept(entry, fate))
                continue
            else:
                work = _returned(actuator, entry)
            tasks.append(
                group.create_task(_one(entry, work, max(call_seconds, knob.put_back_seconds)))
            )
    items += [t.result() for t in tasks]
    _conclude(ledger, items)
    if audit is not None:
        _tell(audit, items, occasion, clock.now().wall)
    return tuple(items)


def _all_at_once(actuators: Iterable[Actuator]) -> AsyncExitStack:
    stack = AsyncExitStack()
    for actuator in actuators:
        if isinstance(actuator, Orderly):
            stack.enter_context(actuator.all_at_once())
    return stack


def failed(report: Iterable[Item]) -> bool:
    """Whether anything that should have been put back was not."""
    return any(i.what == "failed" for i in report)


def _is_budgeted(entry: Entry) -> bool:
    knob = KNOB.get(entry.knob)
    return knob is not None and knob.budgeted


def _kept(entry: Entry, fate: Fate) -> Item:
    if fate is Fate.ADOPT:
        return Item(entry, "adopted", "it stays, and the next decision starts from it")
    return Item(entry, "held", "it stays as it is, and in the ledger")


def _void(entry: Entry) -> Item:
    return Item(entry, "gone", "the host has been started anew since: nothing of ours is left")


async def _eased(ledger: Ledger, actuator: Actuator, entry: Entry) -> Item:
    """Write what the budget alone asks for, where something that passes held it tighter.

    It stays in the ledger. Raises as `return_original`, also where the ledger cannot be written.
    """
    assert entry.budget is not None
    want = entry.budget.real
    await actuator.verify(entry.subject, entry.identity)
    before = await actuator.get(entry.subject)
    if not entry.explains(before, actuator.knob.deadband):
        why = f"somebody else has set it to {before.raw} since; it is left so"
        return Item(entry, "left alone", why, before.raw, before.raw)
    if before.raw == want.raw:
        return _kept(entry, Fate.HOLD)
    await ledger.intend(
        knob=actuator.knob,
        subject=entry.subject,
        identity=entry.identity,
        original=entry.original,
        write=want,
        rule=entry.rule,
        budget=want,
    )
    await actuator.set(entry.subject, want.raw)
    after = await actuator.get(entry.subject)
    if after.raw == before.raw:
        raise Unavailable(f"{want.raw} was written, but it still reads {after.raw}")
    ledger.confirm(entry.target, after)
    ledger.serve(entry.target, entry.rule)
    why = f"{before.raw} has passed; {after.raw} serves the budget, and stays in the ledger"
    return Item(entry, "held", why, before.raw, after.raw)


async def _returned(actuator: Actuator, entry: Entry) -> Item:
    done = await return_original(actuator, entry)
    return Item(entry, done.what, done.why, done.before.raw, done.after.raw)


async def _one(entry: Entry, work: Awaitable[Item], call_seconds: float) -> Item:
    try:
        async with asyncio.timeout(call_seconds):
            return await work
    except Gone as error:
        return Item(entry, "gone", str(error))
    except (Refused, Unsupported, Unavailable) as error:
        return Item(entry, "failed", str(error))
    except TimeoutError:
        return Item(entry, "failed", f"no answer within {call_seconds:g} s")


def _conclude(ledger: Ledger, items: Iterable[Item]) -> None:
    for item in items:
        if item.what in {"put back", "left alone"} or (
            item.what == "gone" and ends_with_its_target(item.entry)
        ):
            ledger.done(item.entry.target, item.what, item.why)


def _tell(audit: AuditLog, items: Iterable[Item], occasion: Occasion, wall: float) -> None:
    for item in items:
        audit.record(
            Action(
                wall=wall,
                knob=item.entry.knob,
                subject=item.entry.subject,
                did=item.what,
                result="refused" if item.what == "failed" else "applied",
                why=item.why,
                rule=f"restore/{occasion.value}",
                before=item.before,
                after=item.after,
                original=item.entry.was.raw,
            )
        )
