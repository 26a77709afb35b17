"""Whether a lever has plainly done something: a cause's error now against the worst of it.

Both are smoothed, for a quantile over some hundred requests moves by itself, and its worst single
value would be beaten by doing nothing. The worst is looked for until the lever has been at its floor
for as long as an effect takes to show: while a load rises, what was before the first cut says little.
"""

import math

import msgspec

_SMOOTH_SECONDS = 10.0
"""As long as readings look back."""
_SOON_SECONDS = 60.0
"""What comes of letting go shows within this time; later it is the load that may have changed."""
_LATE_FACTOR = 1.5


class Relief(msgspec.Struct, frozen=True):
    """Of what `causes.Sample` has as its effect."""

    at: float
    """When the last sample was taken, monotonic seconds."""
    level: float
    worst: float
    plain_ratio: float
    """A value that is lower by this part has not come down by chance."""
    let_go_at: float | None = None
    """Since when it is watched what comes of doing without the lever; None while it is used."""

    @classmethod
    def begun(cls, at: float, effect: float, plain_ratio: float) -> "Relief":
        """At the first cut, for a sample taken `at`."""
        return cls(at, effect, effect, plain_ratio)

    def after(self, at: float, effect: float, *, settled: bool) -> "Relief":
        """With one more sample; `settled` once the lever has had its full effect."""
        if at <= self.at:
            return self
        level = self.level + (effect - self.level) * -math.expm1((self.at - at) / _SMOOTH_SECONDS)
        worst = self.worst if settled else max(self.worst, level)
        return msgspec.structs.replace(self, at=at, level=level, worst=worst)

    @property
    def plain(self) -> bool:
        """Whether the value is plainly lower than at its worst, or half of the error is gone.

        The latter counts from half of what is plain on: small errors are halved by chance.
        """
        fallen = (self.worst - self.level) / (1.0 + self.worst)
        halved = self.level <= self.worst / 2
        return fallen >= (self.plain_ratio / 2 if halved else self.plain_ratio)

    def let_go(self) -> "Relief":
        """From here on it is watched what comes of doing without the lever."""
        return msgspec.structs.replace(self, worst=self.level, let_go_at=self.at)

    @property
    def regretted(self) -> bool:
        """After `let_go`: whether the value is plainly higher without the lever.

        Later than soon after it has to be much higher: over a long time chance brings everything.
        """
        ratio = self.plain_ratio if self.soon else _LATE_FACTOR * self.plain_ratio
        return self.let_go_at is not None and self.level >= self.worst + ratio * (1.0 + self.worst)

    @property
    def soon(self) -> bool:
        """Whether it has been let go of only just now, so that what is seen has come of that."""
        return self.let_go_at is not None and self.at - self.let_go_at <= _SOON_SECONDS
