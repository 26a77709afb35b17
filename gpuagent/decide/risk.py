"""What a freeze would do to others than the one that is frozen (FACTS 3 and 5)."""

from gpuagent.model.inventory import Inventory, Level, Tenant


def freezing(inventory: Inventory, tenant: Tenant) -> str:
    """Why this tenant must not be frozen; empty where it may be.

    An MPS client that does not run holds up all that its server does for others. Who works together
    with processes on other hosts trips their watchdogs (NCCL): of a Slurm job we cannot tell.
    """
    if any(place.slurm_job for place in tenant.places):
        return "it is a Slurm job, which may span hosts: its collectives would time out"
    protected = _shares_a_server(inventory, tenant)
    if protected:
        return f"it shares an MPS server with {protected} (L1), whose work it would hold up"
    return ""


def uses_mps(inventory: Inventory, tenant: Tenant) -> bool:
    """Whether any process of the tenant is a client of an MPS server now."""
    own = {p.pid for p in tenant.processes}
    return any(c.pid in own for daemon in inventory.mps or () for c in daemon.clients)


def _shares_a_server(inventory: Inventory, tenant: Tenant) -> str:
    """An L1 tenant on a server of this tenant's; empty where there is none."""
    owner = {p.pid: t for t in inventory.tenants or () for p in t.processes}
    for daemon in inventory.mps or ():
        servers = {c.server for c in daemon.clients if owner.get(c.pid) == tenant}
        for client in daemon.clients:
            other = owner.get(client.pid)
            if client.server in servers and other is not None and other.level is Level.L1:
                return other.name
    return ""
