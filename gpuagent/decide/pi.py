"""The other control law: PI, which holds a cause midway between its two marks by shares in between.

Theory of operation. The error is how far a value is above the middle of its marks, as a share of
that middle; above it share is taken, below it share is given back. The law is in incremental form:
each step asks for a *change*, `gain` times what the error grew by plus `gain / time` times the error
for each second, and what a share between its floor and 1 cannot follow is dropped. So nothing winds
up while a share is at an end of its range: all that is remembered beside the shares is the last
sample that counted. Samples closer than a second to it do not count, so that looking more often
changes nothing. Changes follow one another every second, more often than a card's power limit may
move: that one is left to `share`, as is the way back when a cause has ended or can no longer be read.
"""

import math

import msgspec

from gpuagent.config import Backpressure
from gpuagent.decide.share import Grip

INTERVAL_SECONDS = 1.0
_SLACK_SECONDS = 1e-3
_LONGEST_SECONDS = 5.0
"""One sample speaks for no longer than this: before it, who knows."""
_MOST_ERROR = 1.0
"""A value of twice the middle asks for as much as one of ten times."""


class Past(msgspec.Struct, frozen=True):
    """The last sample that counted."""

    at: float = -math.inf
    """Monotonic seconds at which it was taken."""
    error: float = 0.0


def step(past: Past, at: float, error: float, law: Backpressure) -> tuple[Past, float]:
    """What to remember, and the change of share that a sample taken at `at` asks for.

    `past` itself and 0 where the sample does not count.
    """
    if at - past.at < INTERVAL_SECONDS - _SLACK_SECONDS:
        return past, 0.0
    now = Past(at, min(error, _MOST_ERROR))
    seconds = INTERVAL_SECONDS if math.isinf(past.at) else min(at - past.at, _LONGEST_SECONDS)
    grown = now.error - past.error
    return now, -law.pi_gain * (grown + now.error * seconds / law.pi_time)


def moved(grip: Grip, change: float, now: float) -> Grip:
    """With so much more or less share, as far as its range allows."""
    share = min(max(grip.share + change, grip.floor), 1.0)
    if share == grip.share:
        return grip
    cut_at = now if share < grip.share else grip.cut_at
    return msgspec.structs.replace(grip, share=share, cut_at=cut_at, moved_at=now, calm=False)
