"""Whether a lever has plainly done something: a cause's error now against the worst of it.

Both are smoothed, for a quantile over some hundred requests moves by itself, and its worst single
value would be beaten by doing nothing. The worst is looked for until the lever has been at its floor
for as long as an effect takes to show: while a load rises, what was before the first cut says little.
"""

import math

import msgspec

_SMOOTH_SECONDS = 10.0
"""As long as readings look back."""
_PLAIN_RATIO = 0.15
"""A value that is lower by this part has not come down by chance."""


class Relief(msgspec.Struct, frozen=True):
    """Of what `causes.Sample` has as its effect."""

    at: float
    """When the last sample was taken, monotonic seconds."""
    level: float
    worst: float

    @classmethod
    def begun(cls, at: float, error: float) -> "Relief":
        """At the first cut, for a sample taken `at`."""
        return cls(at, error, error)

    def after(self, at: float, error: float, *, settled: bool) -> "Relief":
        """With one more sample; `settled` once the lever has had its full effect."""
        if at <= self.at:
            return self
        level = self.level + (error - self.level) * -math.expm1((self.at - at) / _SMOOTH_SECONDS)
        return Relief(at, level, self.worst if settled else max(self.worst, level))

    @property
    def plain(self) -> bool:
        """Whether half of the error is gone, or 15 % of the value."""
        return self.level <= max(self.worst / 2, self.worst - _PLAIN_RATIO * (1.0 + self.worst))

    def let_go(self) -> "Relief":
        """From here on it is watched what comes of doing without the lever."""
        return Relief(self.at, self.level, self.level)

    @property
    def regretted(self) -> bool:
        """After `let_go`: whether the value is plainly higher without the lever, by 15 %."""
        return self.level >= self.worst + _PLAIN_RATIO * (1.0 + self.worst)
