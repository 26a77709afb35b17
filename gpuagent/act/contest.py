"""When a value that somebody else keeps changing is given up, and when it is not."""

from collections import deque

from gpuagent.model.state import Result

TIMES = 3
WINDOW_SECONDS = 600.0
STAND_DOWN_SECONDS = 3600.0
OWNER_PAUSE_SECONDS = 5.0


class Contest:
    """Outside changes to one target and our answers to them, in monotonic seconds.

    We assert our value again at most `TIMES` times within `WINDOW_SECONDS`; the next time we stand
    down for `STAND_DOWN_SECONDS`, or until another rule wishes, and even then keep to that rate.

    A tenant who owns the control file of his cgroup must not get rid of a limit that way. What may
    be his change we answer for as long as it is wished, once in `OWNER_PAUSE_SECONDS`.
    """

    def __init__(self) -> None:
        self._answers: deque[float] = deque(maxlen=TIMES)
        self._changed = False
        self._until = float("-inf")
        self._rule = ""
        self._answered_owner = float("-inf")
        self.owner = 0
        """UID of the owner who may have made the last change; 0 where only root could."""
        self.times = 0
        """How many changes in a row were possibly that owner's."""

    def changed(self, owner: int) -> None:
        """Somebody else has changed the value: our next write, whenever it comes, is an answer."""
        self._changed = True
        self.times = self.times + 1 if owner == self.owner else 1
        self.owner = owner

    def may_write(self, now: float, rule: str) -> bool:
        """Whether the next write would still be within bounds; if not, we wait or stand down."""
        if self._changed and self.owner:
            return now >= self._answered_owner + OWNER_PAUSE_SECONDS
        if now < self._until and rule == self._rule:
            return False
        if self._changed and self._spent(now):
            self._until, self._rule = now + STAND_DOWN_SECONDS, rule
            return False
        return True

    def says(self, raw: str) -> tuple[Result, str]:
        """What is to be told while we may not write, and somebody else's value is `raw`."""
        if self._changed and self.owner:
            again = f"it is set again every {OWNER_PAUSE_SECONDS:g} s"
            return "in flight", f"{self.undone}, now to {raw}; {again}"
        hours = STAND_DOWN_SECONDS / 3600
        why = f"somebody else keeps setting it, now to {raw}; it is left alone for {hours:g} h, "
        return "contested", why + "or until another rule wishes"

    @property
    def undone(self) -> str:
        """What its owner may have done to it, in words."""
        times = "once" if self.times == 1 else f"{self.times} times"
        return f"uid {self.owner}, who owns its control file, has undone it {times}"

    def writing(self, now: float) -> None:
        """We write; if over somebody else's change, this is one of the answers."""
        if self._changed and self.owner:
            self._answered_owner = now
        elif self._changed:
            self._answers.append(now)
        self._changed = False

    def remembers(self, now: float) -> bool:
        """Whether forgetting this would let us write more often than we may."""
        recent = bool(self._answers) and now - self._answers[-1] < WINDOW_SECONDS
        return recent or now < max(self._until, self._answered_owner + OWNER_PAUSE_SECONDS)

    def _spent(self, now: float) -> bool:
        return len(self._answers) == TIMES and now - self._answers[0] < WINDOW_SECONDS
