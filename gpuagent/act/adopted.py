"""Values that an earlier run left on the host: which of them still wait for a decision of this one."""

from collections.abc import Collection, Iterable

import msgspec

from gpuagent.act.record import Target
from gpuagent.model.plan import Posture

GRACE_SECONDS = 30.0
"""How long adopted values wait for the first complete decision before they are put back."""


class Adopted:
    """The targets that are kept as they are. An end is final: nothing is adopted twice."""

    def __init__(
        self, targets: Iterable[Target] = (), *, acting_until: float = float("-inf")
    ) -> None:
        """`acting_until` is the monotonic time at which an agent that acts waits no longer."""
        self._targets = set(targets)
        self._acting_until = acting_until

    def kept(
        self, wished: Collection[Target], *, posture: Posture, complete: bool, now: float
    ) -> Collection[Target]:
        """What is neither put back nor written after this plan.

        An agent that acts keeps a target until a plan wishes it, the first `complete` one does not,
        or the time is over. One that only observes after its third crash keeps what it would wish.
        One that is paused, or told to observe, keeps nothing.
        """
        if not posture.acts and not _holds(posture):
            self._targets.clear()
        if complete:
            self._targets.intersection_update(wished)
        if posture.acts:
            self._targets.difference_update(wished)
            if now >= self._acting_until:
                self._targets.clear()
        return self._targets


def _holds(posture: Posture) -> bool:
    """Whether nothing but the third crash keeps the agent from acting."""
    return bool(posture.demoted) and msgspec.structs.replace(posture, demoted="").acts
