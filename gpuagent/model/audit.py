"""What the audit log says of one action."""

import msgspec

from gpuagent.model.inventory import Subject


class Action(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing done to the host, or the end of an attempt to do it. Base units of the knob."""

    wall: float
    knob: str
    subject: Subject
    did: str
    """set, put back, left alone, would set, or not set; of a run: started, or not started."""
    result: str
    why: str
    """The reason for it, or what stood in its way."""
    rule: str = ""
    before: str = ""
    """The value as the host showed it before, verbatim."""
    wrote: str = ""
    after: str = ""
    """The value as it read back, verbatim."""
    original: str = ""
    numbers: tuple[tuple[str, float], ...] = ()
    number: int = 0
    """Counts the actions that a run of the agent knows of, from 1; in no file."""
