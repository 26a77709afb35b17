"""What is wished beside the lever in use, and what must not be wished beside it."""

from collections.abc import Iterable, Iterator

from gpuagent.decide.held import Held
from gpuagent.decide.risk import uses_mps
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import Inventory, Tenant, on_tenant
from gpuagent.model.plan import Setting
from gpuagent.model.state import NodeState
from gpuagent.model.vocab import MPS_THREADS, NOTICED, RUNNING, SUSPENDED


def beside(held: Iterable[Held], tenant: Tenant, inventory: Inventory) -> Iterator[Setting]:
    """For one tenant and all that it is held by.

    The thread percentage goes with a latency, which it can relieve, whichever lever is in use: it
    acts at the next launch only, and nobody waits a time box for that.
    """
    tight = sorted((h for h in held if h.grip.share < 1.0), key=lambda h: h.grip.share)
    if tight and tenant.notice and _may(tenant, NOTICED):
        yield _setting(NOTICED, tenant, tight[0], 1.0, "it is told that it is held back")
    late = [h for h in tight if h.cause.kind == "latency"]
    if late and _may(tenant, MPS_THREADS) and uses_mps(inventory, tenant):
        share = late[0].grip.share
        what = f"its next MPS client gets {share:.0%} of the multiprocessors at most"
        yield _setting(MPS_THREADS, tenant, late[0], share, what)


def _may(tenant: Tenant, knob: Knob) -> bool:
    return knob.family in tenant.levers and knob.family not in tenant.observed


def _setting(knob: Knob, tenant: Tenant, held: Held, value: float, what: str) -> Setting:
    return Setting(
        knob,
        on_tenant(tenant.name),
        value,
        why=f"{what}: {held.why}",
        rule=f"backpressure/{held.cause.kind}",
        numbers=(*held.cause.numbers, ("share", held.grip.share)),
    )


def thawed(wished: Iterable[Setting], state: NodeState) -> list[Setting]:
    """Without the pulses of whoever is suspended, or is to be: cuda-checkpoint hangs on a frozen process.

    Another cause may have frozen it; a suspended tenant disturbs nobody, so nothing is lost.
    """
    wishes = list(wished)
    suspended = {s.subject.tenant for s in wishes if s.knob is SUSPENDED and s.blocked is None} | {
        subject.tenant
        for (knob, subject), outcome in state.outcomes.items()
        if knob is SUSPENDED and outcome.original is not None
    }
    return [s for s in wishes if s.knob is not RUNNING or s.subject.tenant not in suspended]
