"""What a freeze would do to others than the one that is frozen (FACTS 3 and 5)."""

from gpuagent.model.inventory import Tenant


def freezing(tenant: Tenant) -> str:
    """Why this tenant must not be frozen; empty where it may be.

    An MPS client that does not run holds up all that its server does for others. Who works together
    with processes on other hosts trips their watchdogs (NCCL): of a Slurm job we cannot tell.
    """
    if any(place.slurm_job for place in tenant.places):
        return "it is a Slurm job, which may span hosts: its collectives would time out"
    return ""
