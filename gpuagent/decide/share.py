"""The control law: how far one tenant is held back for one cause, as a number between floor and 1.

Theory of operation. Levers lag and their effect is not known beforehand, so the law is AIMD with a
memory, the shape that congestion control has: on trouble the share is multiplied by `cut`, at most
once per `dwell`; when the trouble has ended it comes back by `recover` per `dwell`, but only to
`margin` under the share at which trouble last began. There it stays for a pause, then tries a
little more. Trouble that comes of trying doubles the pause, up to `probe_max`: near its limit a tenant
is disturbed ever more rarely, and one whose trouble was passing is free again within a minute.

Two more things are learnt. Trouble that comes back is met in one step with the share that ended it the
last time, or with one step above that where the last time the first step was enough. And where there
is ample room, the value being under its marks by as much again as they are apart, the load has likely
become another: then a step more is given whatever is remembered. If trouble comes of that, it was the
lever that made the room, and the next time it is doubted longer.
"""

from typing import Protocol

import msgspec

from gpuagent.config import Backpressure

_DOUBT_SECONDS = 10.0
"""How long ample room must have lasted at first: as long as readings look back."""
_REVERSALS_SECONDS = 120.0
"""Two reversals, a raise and the cut that it brings, are at least so far apart where it saws."""
_LONGEST_SECONDS = 5.0
"""One sample speaks for no longer than this: before it, who knows."""


class Value(Protocol):
    """What a cause is judged by: see `causes.Sample`."""

    @property
    def ample(self) -> bool: ...


class Grip(msgspec.Struct, frozen=True):
    """How one tenant is held for one cause by one lever. Times are monotonic seconds."""

    floor: float
    share: float = 1.0
    trouble: float = 1.0
    """Share at which trouble last began."""
    pause: float = 0.0
    """How long to stay under `trouble` before trying more; 0 before the first trouble."""
    eased: float = 1.0
    """Share with which to meet trouble that comes back; 1 where nothing is known."""
    deeper: bool = False
    """Whether the trouble has taken more than one cut."""
    ample_since: float | None = None
    """Since when there has been ample room; None while there is not."""
    doubt: float = _DOUBT_SECONDS
    """How long there must be before it is believed."""
    raised: bool = False
    """Whether it has been raised since the trouble ended."""
    by_room: bool = False
    """Whether the last raise was made because of ample room."""
    calm: bool = True
    """Whether the cause has ended since the last cut."""
    cut_at: float = float("-inf")
    moved_at: float = float("-inf")
    """Last change of the share, or of `calm`."""
    floor_since: float | None = None
    """Since when it has been at its floor and helped nothing; see `judged`."""
    judged_at: float = float("-inf")
    """When the sample was taken by which it was last judged."""

    @property
    def at_floor(self) -> bool:
        return self.share <= self.floor


def cut(grip: Grip, now: float, law: Backpressure, *, dwell: float, shows: float) -> Grip:
    """Hold it back further, unless the last cut is younger than `dwell`.

    Trouble that comes within `shows` seconds of a raise has come of it.
    """
    if now - grip.cut_at < dwell or (grip.at_floor and not grip.calm):
        return grip
    begins = grip.calm
    share = min(grip.share, 1.0) * law.cut
    share = max(grip.floor, min(share, grip.eased) if begins else share)
    grip = _warned(grip, now, law, shows=shows) if begins else grip
    return msgspec.structs.replace(
        grip,
        share=share,
        deeper=not begins,
        calm=False,
        cut_at=now,
        moved_at=now,
        floor_since=now if share <= grip.floor else None,
        judged_at=now,
    )


def _warned(grip: Grip, now: float, law: Backpressure, *, shows: float) -> Grip:
    """With where trouble has begun, and with longer pauses where trying more has brought it."""
    pause, doubt = grip.pause or law.probe_min, grip.doubt
    if grip.raised and now - grip.moved_at <= shows:
        pause = min(2 * pause, law.probe_max)
        doubt = min(2 * doubt, law.probe_max) if grip.by_room else doubt
    return msgspec.structs.replace(
        grip, trouble=grip.share, pause=pause, doubt=doubt, ample_since=None
    )


def ease(grip: Grip, now: float, law: Backpressure, *, dwell: float, value: Value | None) -> Grip:
    """Let go a step, the cause having ended.

    `value` is None where the cause can no longer be read: then nothing speaks for staying under
    the share at which trouble began, and the way back leads to 1.
    """
    if not grip.calm:
        return _calmed(grip, now, law)
    if value is None:
        ceiling = 1.0
    else:
        grip = _with_room(grip, now, law, ample=value.ample)
        ceiling = max(grip.trouble - law.margin, grip.floor)
    waited = now - grip.moved_at
    if grip.share < ceiling:
        to = min(ceiling, grip.share + law.recover)
        return (
            grip
            if waited < _rest(grip, law, dwell, known=value is not None)
            else _raised(grip, now, to)
        )
    if grip.share >= 1.0 or waited < grip.pause:
        return grip
    to = min(1.0, grip.share + law.margin)
    return msgspec.structs.replace(_raised(grip, now, to), trouble=to + law.margin)


def _rest(grip: Grip, law: Backpressure, dwell: float, *, known: bool) -> float:
    """How long to wait before the next step of the way back.

    The first step after a cut is a reversal. Where trying more has brought the trouble, it waits so
    long that there is one reversal a minute at most.
    """
    saws = known and not grip.raised and grip.pause > law.probe_min
    return max(dwell, min(grip.pause, _REVERSALS_SECONDS)) if saws else dwell


def _calmed(grip: Grip, now: float, law: Backpressure) -> Grip:
    """The trouble has ended. A first step that was enough may have been more than was needed."""
    return msgspec.structs.replace(
        grip,
        calm=True,
        eased=grip.share if grip.deeper else min(1.0, grip.share / law.cut),
        raised=False,
        moved_at=now,
        floor_since=None,
    )


def _with_room(grip: Grip, now: float, law: Backpressure, *, ample: bool) -> Grip:
    """A step more, whatever is remembered, once there has been ample room for long enough."""
    if not ample:
        known = grip.ample_since is None
        return grip if known else msgspec.structs.replace(grip, ample_since=None)
    if grip.ample_since is None:
        return msgspec.structs.replace(grip, ample_since=now)
    if grip.share >= 1.0 or now - max(grip.ample_since, grip.moved_at) < grip.doubt:
        return grip
    to = min(1.0, grip.share + law.recover)
    trouble = max(grip.trouble, to + law.margin)
    return msgspec.structs.replace(_raised(grip, now, to, by_room=True), trouble=trouble)


def _raised(grip: Grip, now: float, to: float, *, by_room: bool = False) -> Grip:
    return msgspec.structs.replace(grip, share=to, moved_at=now, raised=True, by_room=by_room)


def judged(grip: Grip, now: float, at: float, *, over: bool) -> Grip:
    """With what a sample taken `at` says of a lever at its floor: whether the value is `over` its mark.

    Time under the mark counts against time over it. A lever that keeps a value under its mark has
    eased the cause, even where that has not ended yet, and one good sample among many proves nothing.
    """
    since = grip.floor_since
    if since is None:
        return (
            msgspec.structs.replace(grip, floor_since=now, judged_at=at) if grip.at_floor else grip
        )
    if at <= grip.judged_at:
        return grip
    if not over:
        spoken_for = min(at - grip.judged_at, _LONGEST_SECONDS)
        since = min(now, since + 2 * spoken_for) if grip.at_floor else None
    return msgspec.structs.replace(grip, floor_since=since, judged_at=at)


def forgotten(grip: Grip, now: float, law: Backpressure) -> bool:
    """Whether it has been free for so long that its past says nothing any more."""
    return grip.calm and grip.share >= 1.0 and now - grip.moved_at >= law.probe_max


def overdue(grip: Grip, now: float, law: Backpressure) -> bool:
    """Whether the lever has been at its floor for its time box and has not eased the cause."""
    return not grip.calm and grip.floor_since is not None and now - grip.floor_since >= law.time_box
