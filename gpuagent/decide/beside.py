"""What is wished beside the lever in use: that the tenant is told, and what its next launch gets."""

from collections.abc import Iterable, Iterator, Mapping

from gpuagent.decide.held import Held
from gpuagent.model.inventory import Tenant, on_tenant
from gpuagent.model.plan import Setting
from gpuagent.model.vocab import NOTICED


def beside(held: Iterable[Held], tenants: Mapping[str, Tenant]) -> Iterator[Setting]:
    """At most one notice for each tenant that is held back."""
    told: set[str] = set()
    for one in held:
        tenant = tenants.get(one.tenant)
        if tenant is None or one.grip.share >= 1.0 or one.tenant in told:
            continue
        if tenant.notice and _may(tenant, "notice"):
            told.add(one.tenant)
            yield Setting(
                NOTICED,
                on_tenant(one.tenant),
                1.0,
                why=f"it is told that it is held back: {one.why}",
                rule=f"backpressure/{one.cause.kind}",
            )


def _may(tenant: Tenant, family: str) -> bool:
    return family in tenant.levers and family not in tenant.observed
