"""The policy that holds the less important back while a cause lasts, and lets go when it ends.

One `Held` is one lever on one tenant (or on a whole card, for heat) for one cause. A cause cuts one
of them at a time, the candidate that comes first and is not at its floor yet; a lever that has been
at its floor for its time box without easing the cause is let go, remembered as futile for that
tenant and cause, and the next rung is tried. Where letting go has plainly made things worse, the
lever was of use after all, and is used again. How far and how often, the control law says: `share` (AIMD) or `pi`, as
configured; all else is the same under both. A tenant that no longer contributes is let go as if the
cause had ended. What a tenant gets in the end is the safest of what its levers ask for: `merge` sees
to that. While the agent only observes nothing answers a lever, so the first step is all there is.
"""

from gpuagent.config import Backpressure as Law
from gpuagent.config import Config
from gpuagent.decide.causes import look
from gpuagent.decide.held import Memory
from gpuagent.decide.shown import would_hold
from gpuagent.decide.turn import Turn
from gpuagent.model.plan import Decision
from gpuagent.model.state import NodeState


class Backpressure:
    """See the module."""

    name = "backpressure"

    def __init__(self, config: Config) -> None:
        self._law: Law = config.backpressure
        self._power_dwell = config.power.dwell

    def begin(self) -> Memory:
        return Memory()

    def decide(self, memory: Memory, state: NodeState) -> tuple[Memory, Decision]:
        samples = {s.key: s for s in look(state, self._law)}
        watch, causes, look_again = memory.watch.after(samples.values(), state.now.mono, self._law)
        turn = Turn(state, memory, samples=samples, law=self._law, power_dwell=self._power_dwell)
        if state.tenants_known:
            for cause in causes:
                turn.press(cause)
            active = {(c.kind, c.subject) for c in causes}
        else:
            active = set()  # without knowing who is where, no cut is safe
        turn.ease(active)
        settings, holds = turn.settings(), turn.holds()
        decision = Decision(
            settings=settings,
            holds=(*holds, *would_hold(settings, holds)),
            causes=causes,
            events=turn.events,
            look_again=look_again,
        )
        return turn.memory(watch), decision
