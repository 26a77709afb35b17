"""The control law: how far one tenant is held back for one cause, as a number between floor and 1.

Theory of operation. Levers lag and their effect is not known beforehand, so the law is AIMD with a
memory, the shape that congestion control has: on trouble the share is multiplied by `cut`, at most
once per `dwell`; when the trouble has ended it comes back by `recover` per `dwell`, but only to
`margin` under the share at which trouble last began. There it stays for a pause, then tries a
little more. Trouble that comes back doubles the pause, up to `probe_max`: near its limit a tenant
is disturbed ever more rarely, and one whose trouble was passing is free again within a minute.

Two more things are learnt. Trouble that comes back is met with the share that ended it the last
time, in one step. And what the value came down to at that share tells a change of load from an effect
of the lever: where it is lower by as much as its two marks are apart, though the tenant has no less
share than then, the load is another; where trouble began says nothing of it any more, and the way
back leads to 1. That is believed the later, the longer the pause has become.
"""

from typing import Protocol

import msgspec

from gpuagent.config import Backpressure

_SHOWS_SECONDS = 15.0
"""Within this time what was done shows: readings are of the last ten seconds, and levers lag."""
_BELIEVED = 6.0
"""A lighter load is believed after this part of the pause: 5 s at first, 100 s in the end."""


class Value(Protocol):
    """What a cause is judged by: see `causes.Sample`."""

    @property
    def error(self) -> float: ...
    @property
    def band(self) -> float: ...


class Grip(msgspec.Struct, frozen=True):
    """How one tenant is held for one cause by one lever. Times are monotonic seconds."""

    floor: float
    share: float = 1.0
    trouble: float = 1.0
    """Share at which trouble last began."""
    pause: float = 0.0
    """How long to stay under `trouble` before trying more; 0 before the first trouble."""
    eased: float = 1.0
    """Share at which trouble last ended."""
    eased_at: float = float("-inf")
    settled: float = 0.0
    """The lowest error that was seen soon after that."""
    lighter_since: float | None = None
    """Since when the load has looked lighter than then; None while it does not."""
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


def cut(grip: Grip, now: float, law: Backpressure, *, dwell: float) -> Grip:
    """Hold it back further, unless the last cut is younger than `dwell`."""
    if now - grip.cut_at < dwell or (grip.at_floor and not grip.calm):
        return grip
    relapse = grip.calm
    share = max(grip.floor, min(grip.share, 1.0) * law.cut)
    if relapse:
        share = max(grip.floor, min(share, grip.eased))
    pause = grip.pause or law.probe_min
    # Trouble that comes by itself says nothing against trying more.
    if grip.pause and grip.share > grip.eased and now - grip.moved_at <= _SHOWS_SECONDS:
        pause = min(2 * grip.pause, law.probe_max)
    return Grip(
        floor=grip.floor,
        share=share,
        trouble=grip.share if relapse else grip.trouble,
        pause=pause if relapse else grip.pause,
        eased=grip.eased,
        calm=False,
        cut_at=now,
        moved_at=now,
        floor_since=now if share <= grip.floor else None,
        judged_at=now,
    )


def ease(
    grip: Grip,
    now: float,
    law: Backpressure,
    *,
    dwell: float,
    value: Value | None,
) -> Grip:
    """Let go a step, the cause having ended.

    `value` is None where the cause can no longer be read: then nothing speaks for staying under
    the share at which trouble began, and the way back leads to 1.
    """
    if not grip.calm:
        return msgspec.structs.replace(
            grip,
            calm=True,
            eased=grip.share,
            eased_at=now,
            settled=0.0 if value is None else value.error,
            lighter_since=None,
            moved_at=now,
            floor_since=None,
        )
    if value is None:
        ceiling = 1.0
    else:
        grip = _compared(grip, now, law, value)
        ceiling = max(grip.trouble - law.margin, grip.floor)
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


def _compared(grip: Grip, now: float, law: Backpressure, value: Value) -> Grip:
    """With what the value says of the load, against what it came down to when trouble ended."""
    if now - grip.eased_at <= _SHOWS_SECONDS:
        settled = min(grip.settled, value.error)
        return grip if settled == grip.settled else msgspec.structs.replace(grip, settled=settled)
    if grip.share < grip.eased or value.error > grip.settled - value.band:
        return grip if grip.lighter_since is None else _since(grip, None)
    if grip.lighter_since is None:
        return _since(grip, now)
    if now - grip.lighter_since < grip.pause / _BELIEVED or grip.trouble > 1.0:
        return grip
    return msgspec.structs.replace(grip, trouble=1.0 + law.margin)


def _since(grip: Grip, lighter: float | None) -> Grip:
    return msgspec.structs.replace(grip, lighter_since=lighter)


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
        since = min(now, since + 2 * (at - grip.judged_at)) if grip.at_floor else None
    return msgspec.structs.replace(grip, floor_since=since, judged_at=at)


def forgotten(grip: Grip, now: float, law: Backpressure) -> bool:
    """Whether it has been free for so long that its past says nothing any more."""
    return grip.calm and grip.share >= 1.0 and now - grip.moved_at >= law.probe_max


def overdue(grip: Grip, now: float, law: Backpressure) -> bool:
    """Whether the lever has been at its floor for its time box and has not eased the cause."""
    return not grip.calm and grip.floor_since is not None and now - grip.floor_since >= law.time_box
