"""What of ours outlives a value: who still is the target that was held, and what is undone when not."""

from gpuagent.act.record import Entry
from gpuagent.errors import Gone
from gpuagent.model.inventory import Subject
from gpuagent.ports import Actuator, Lingering


async def identified(actuator: Actuator, subject: Subject, entry: Entry | None) -> str:
    """Identity of a target, which is that of its entry where it is held.

    For where it is held, part of it says what was so before. What of ours outlives a target that has
    gone is undone. Raises as `Actuator.verify`.
    """
    if entry is None:
        return await actuator.identity(subject)
    try:
        await actuator.verify(subject, entry.identity)
    except Gone:
        await let_go(actuator, entry)
        raise
    return entry.identity


async def let_go(actuator: Actuator, entry: Entry) -> None:
    """Undo what our writes have left behind beside the value. Raises as `Lingering.let_go`."""
    if isinstance(actuator, Lingering):
        ours = [kept.raw for kept in (*entry.wrote, entry.was)]
        await actuator.let_go(entry.subject, entry.identity, ours)
