"""Whom nothing harsh is done to, looked at once more at the last moment: L1, the unknown, MPS clients."""

from collections.abc import Callable

from gpuagent.errors import Refused, Unavailable
from gpuagent.model.inventory import Inventory, Level, Tenant

Seen = Callable[[], Inventory]
"""What is known now of who and what there is."""


def see_none_lives_in(inventory: Inventory, cgroup: str) -> None:
    """Raises Refused where an L1 tenant lives in this cgroup or below it, Unavailable if unknown."""
    below = cgroup.rstrip("/") + "/"
    for tenant in _protected(inventory):
        paths = {s.path for s in tenant.seats} | {p.cgroup for p in tenant.processes}
        if any((path.rstrip("/") + "/").startswith(below) for path in paths if path):
            raise Refused(f"{tenant.name} (L1) lives in {cgroup}")


def see_none_is(inventory: Inventory, pid: int, started: int) -> None:
    """Raises Refused where the process is an L1 tenant's, Unavailable if unknown."""
    for tenant in _protected(inventory):
        if any((p.pid, p.started) == (pid, started) for p in tenant.processes):
            raise Refused(f"process {pid} is a process of {tenant.name} (L1)")


def is_mps_client(inventory: Inventory, pid: int) -> bool:
    """Whether the driver lists the process as a client of an MPS server."""
    return any(p.pid == pid and p.kind == "mps" for p in inventory.gpu_processes or ())


def _protected(inventory: Inventory) -> tuple[Tenant, ...]:
    if inventory.tenants is None:
        raise Unavailable("it is not known yet who the tenants are")
    return tuple(t for t in inventory.tenants if t.level is Level.L1)
