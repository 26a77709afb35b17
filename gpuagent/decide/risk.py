"""What a freeze would do to others than the one that is frozen (FACTS 3 and 5)."""

from collections.abc import Mapping

from gpuagent.model.inventory import Inventory, Level, MpsClient, MpsDaemon, Tenant

_UNKNOWN = "who else its MPS server works for is not known; name its daemon in [[mps.groups]]"


def freezing(inventory: Inventory, tenant: Tenant) -> str:
    """Why this tenant must not be frozen; empty where it may be.

    An MPS client that does not run holds up all that its server does for others: unless all of these
    are known, and none is L1, it is left alone. Who works together with processes on other hosts trips
    their watchdogs (NCCL): of a Slurm job we cannot tell.
    """
    if any(place.slurm_job for place in tenant.places):
        return "it is a Slurm job, which may span hosts: its collectives would time out"
    owners = {p.pid: t for t in inventory.tenants or () for p in t.processes}
    reasons = (_sharing(inventory, pid, owners) for pid in sorted(_clients(inventory, tenant)))
    return next((why for why in reasons if why), "")


def uses_mps(inventory: Inventory, tenant: Tenant) -> bool:
    """Whether any process of the tenant is a client of an MPS server now."""
    return bool(_clients(inventory, tenant))


def _clients(inventory: Inventory, tenant: Tenant) -> set[int]:
    """Its processes that are clients of MPS, as the driver or a control daemon says."""
    listed = {p.pid for p in inventory.gpu_processes or () if p.kind == "mps"}
    listed |= {c.pid for daemon in inventory.mps or () for c in daemon.clients}
    return listed & {p.pid for p in tenant.processes}


def _sharing(inventory: Inventory, pid: int, owners: Mapping[int, Tenant]) -> str:
    """What speaks against freezing a client: an L1 on its server, or that this is not known."""
    mine: list[tuple[MpsDaemon, MpsClient]] = [
        (daemon, client)
        for daemon in inventory.mps or ()
        for client in daemon.clients
        if client.pid == pid
    ]
    if not mine or any(daemon.why or not daemon.up for daemon, _ in mine):
        return _UNKNOWN
    servers = {client.server for _, client in mine}
    for daemon, _ in mine:
        for other in daemon.clients:
            who = owners.get(other.pid)
            if other.server not in servers:
                continue
            if who is None:
                return f"process {other.pid} of nobody known shares an MPS server with it"
            if who.level is Level.L1:
                return f"it shares an MPS server with {who.name} (L1), whose work it would hold up"
    return ""
