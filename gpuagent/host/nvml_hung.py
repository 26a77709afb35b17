"""A card on which a driver call did not return: when it is tried again, over all its relapses."""

from gpuagent.host.nvml_frames import Frame
from gpuagent.host.worker import Worker

FIRST_TRY_SECONDS = 1.0
HEALED_SECONDS = 60.0
"""A card that has not hung for so long since it was taken back counts as one that never did."""


class HungCard:
    """Made when it hangs for the first time, and kept, since what has hung may hang again."""

    def __init__(self) -> None:
        self.worker: Worker[Frame] | None = None
        """The child that hangs: while the kernel holds it, there is no point in another."""
        self._pause = FIRST_TRY_SECONDS
        self._next_try = float("inf")
        self._back_at = float("-inf")

    def due(self, now: float) -> bool:
        """Whether it is time for another try, and nothing of the last one is left."""
        return now >= self._next_try and not (self.worker is not None and self.worker.alive)

    def hangs(self, worker: Worker[Frame] | None, at: float) -> None:
        """A call has not returned: the pause goes on growing, unless the card had healed."""
        if at - self._back_at > HEALED_SECONDS:
            self._pause = FIRST_TRY_SECONDS
        self.worker = worker
        self._next_try = at + self._pause

    def tried(self, at: float, longest: float) -> None:
        """It was tried: the next pause, for whichever reason, is twice as long."""
        self._pause = min(longest, 2 * self._pause)
        self._next_try = at + self._pause

    def back(self, at: float) -> None:
        """It has answered and is read with the others again."""
        self._back_at = at
