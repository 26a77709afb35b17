"""When a value that somebody else keeps changing is given up."""

from collections import deque

TIMES = 3
WINDOW_SECONDS = 600.0
STAND_DOWN_SECONDS = 3600.0


class Contest:
    """Outside changes to one target and our answers to them, in monotonic seconds.

    We assert our value again at most `TIMES` times within `WINDOW_SECONDS`; the next time we stand
    down for `STAND_DOWN_SECONDS`, or until another rule wishes, and even then keep to that rate.
    """

    def __init__(self) -> None:
        self._answers: deque[float] = deque(maxlen=TIMES)
        self._changed = False
        self._until = float("-inf")
        self._rule = ""

    def changed(self) -> None:
        """Somebody else has changed the value: our next write, whenever it comes, is an answer."""
        self._changed = True

    def may_write(self, now: float, rule: str) -> bool:
        """Whether the next write would still be within bounds; if not, we stand down."""
        if now < self._until and rule == self._rule:
            return False
        if self._changed and self._spent(now):
            self._until, self._rule = now + STAND_DOWN_SECONDS, rule
            return False
        return True

    def writing(self, now: float) -> None:
        """We write; if over somebody else's change, this is one of the answers."""
        if self._changed:
            self._answers.append(now)
            self._changed = False

    def remembers(self, now: float) -> bool:
        """Whether forgetting this would let us write more often than we may."""
        recent = bool(self._answers) and now - self._answers[-1] < WINDOW_SECONDS
        return recent or now < self._until

    def _spent(self, now: float) -> bool:
        return len(self._answers) == TIMES and now - self._answers[0] < WINDOW_SECONDS
