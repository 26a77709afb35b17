"""The control law: how far one tenant is held back for one cause, as a number between floor and 1.

Theory of operation. Levers lag and their effect is not known beforehand, so the law is AIMD with a
memory, the shape that congestion control has: on trouble the share is multiplied by `cut`, at most
once per `dwell`; when the trouble has ended it comes back by `recover` per `dwell`, but only to
`margin` under the share at which trouble last began. There it stays for a pause, then tries a
little more. Trouble that comes back doubles the pause, up to `probe_max`: near its limit a tenant
is disturbed ever more rarely, and one whose trouble was passing is free again within a minute.
"""

import msgspec

from gpuagent.config import Backpressure


class Grip(msgspec.Struct, frozen=True):
    """How one tenant is held for one cause by one lever. Times are monotonic seconds."""

    floor: float
    share: float = 1.0
    trouble: float = 1.0
    """Share at which trouble last began."""
    pause: float = 0.0
    """How long to stay under `trouble` before trying more; 0 before the first trouble."""
    calm: bool = True
    """Whether the cause has ended since the last cut."""
    cut_at: float = float("-inf")
    moved_at: float = float("-inf")
    """Last change of the share, or of `calm`."""
    floor_since: float | None = None

    @property
    def at_floor(self) -> bool:
        return self.share <= self.floor


def cut(grip: Grip, now: float, law: Backpressure, *, dwell: float) -> Grip:
    """Hold it back further, unless the last cut is younger than `dwell`."""
    if now - grip.cut_at < dwell or (grip.at_floor and not grip.calm):
        return grip
    share = max(grip.floor, min(grip.share, 1.0) * law.cut)
    relapse = grip.calm
    pause = min(2 * grip.pause, law.probe_max) if grip.pause else law.probe_min
    return Grip(
        floor=grip.floor,
        share=share,
        trouble=grip.share if relapse else grip.trouble,
        pause=pause if relapse else grip.pause,
        calm=False,
        cut_at=now,
        moved_at=now,
        floor_since=now if share <= grip.floor else None,
    )


def ease(grip: Grip, now: float, law: Backpressure, *, dwell: float, known: bool = True) -> Grip:
    """Let go a step, the cause having ended.

    `known` is False where the cause can no longer be read: then nothing speaks for staying under
    the share at which trouble began, and the way back leads to 1.
    """
    if not grip.calm:
        return msgspec.structs.replace(grip, calm=True, moved_at=now, floor_since=None)
    ceiling = 1.0 if not known else max(grip.trouble - law.margin, grip.floor)
    waited = now - grip.moved_at
    if grip.share < ceiling:
        if waited < dwell:
            return grip
        return msgspec.structs.replace(
            grip, share=min(ceiling, grip.share + law.recover), moved_at=now
        )
    if grip.share >= 1.0 or waited < grip.pause:
        return grip
    share = min(1.0, grip.share + law.margin)
    return msgspec.structs.replace(
        grip, share=share, trouble=min(1.0, share) + law.margin, moved_at=now
    )


def forgotten(grip: Grip, now: float, law: Backpressure) -> bool:
    """Whether it has been free for so long that its past says nothing any more."""
    return grip.calm and grip.share >= 1.0 and now - grip.moved_at >= law.probe_max


def overdue(grip: Grip, now: float, law: Backpressure) -> bool:
    """Whether the lever has been at its floor for its time box and the cause still holds."""
    return not grip.calm and grip.floor_since is not None and now - grip.floor_since >= law.time_box
