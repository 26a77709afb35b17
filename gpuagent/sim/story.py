"""What happens in a scenario, in words."""

from gpuagent.sim.scenario import (
    Ambient,
    Hang,
    Happening,
    Load,
    Lose,
    Mps,
    Patch,
    Restart,
    Start,
    Stop,
    Xid,
)
from gpuagent.sim.tables import lines


def told(happening: Happening) -> str:
    """One happening as a short sentence."""
    match happening:
        case Start(tenant=tenant):
            return f"{tenant} starts"
        case Stop(tenant=tenant):
            return f"{tenant} stops"
        case Restart(tenant=tenant):
            return f"{tenant} ends and starts again"
        case Load(tenant=tenant, rate=rate):
            return f"{tenant} gets {rate:g} requests a second"
        case Hang(card=card, seconds=seconds):
            return f"driver calls to card {card} hang for {seconds:g} s"
        case Lose(card=card):
            return f"card {card} falls off the bus"
        case Xid(card=card, xid=xid, tenant=tenant):
            return f"the driver reports XID {xid} on card {card}" + (
                f": {tenant} ends" if tenant else ""
            )
        case Ambient(card=card, celsius=celsius):
            return f"the air around card {card} has {celsius:g} C"
        case Mps():
            return f"the operator sets what MPS gives its next clients: {_limits(happening)}"
        case Patch(agent=agent):
            said = [line for line in lines(agent, ()) if line]
            return f"the operator changes the configuration: {' '.join(said)}"


def _limits(what: Mps) -> str:
    found = []
    if what.percentage is not None:
        found.append(f"{what.percentage:g} % of the threads")
    if what.memory_limit_bytes is not None:
        found.append(f"{what.memory_limit_bytes / 2**30:.1f} GiB")
    return ", ".join(found)
