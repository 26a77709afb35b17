"""How slow it is in here: deadlines are multiples of a piece of work that is measured first."""

import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_LEAST_SECONDS = 3.0
"""The agent's own times, of seconds, do not shrink on a machine that is quick."""
_POLL_SECONDS = 0.2


MOST_SECONDS = 12.0
"""Of one unit. Beyond it the agent's own deadlines, which are for real hosts, are missed: it takes its
driver's child for dead after three seconds without a sign of life, and starts it again for ever."""


class Late(AssertionError):
    """Something did not come about in time."""


class Pace:
    """One unit is one start of a command of ours: a second on real hardware, ten under emulation."""

    def __init__(self, unit: float) -> None:
        self.unit = unit

    @classmethod
    def measured(cls) -> "Pace":
        """By the slower of two starts; the first also reads it all into memory."""
        took = []
        for _ in range(3):
            began = time.monotonic()
            subprocess.run(["gpuagent", "--version"], check=True, capture_output=True)
            took.append(time.monotonic() - began)
        return cls(max(_LEAST_SECONDS, *took[1:]))

    def until(self, what: str, condition: Callable[[], T], *, units: float = 12.0) -> T:
        """The first true value of `condition`. Raises Late with `what`."""
        began = time.monotonic()
        while True:
            value = condition()
            if value:
                return value
            waited = time.monotonic() - began
            if waited > units * self.unit:
                raise Late(f"{what}: not within {waited:.0f} s")
            time.sleep(_POLL_SECONDS)

    def during(self, seconds: float, step: Callable[[], object]) -> None:
        """Do `step` again and again for so long, by the clock."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            step()
            time.sleep(_POLL_SECONDS)
