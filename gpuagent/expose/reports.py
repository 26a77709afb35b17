"""What a tenant says of itself: its latency. The agent believes it, and asks nobody else."""

from typing import Annotated

import msgspec
from msgspec import Meta

from gpuagent.expose.problems import Trouble, not_found
from gpuagent.expose.routes import Ask, Do, For, Submit, Told, current
from gpuagent.expose.views import Done, View
from gpuagent.model.inventory import Tenant
from gpuagent.model.text import quantile_text, wire
from gpuagent.ports import LatencyReport

QUANTILES_MOST = 4
QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
"""Each is a value of a label, which must not be for tenants to make up."""
_SAME = 5e-5
"""Quantiles that are nearer to each other are one: 0.95 is not exact in binary."""
_LATENCY_MOST_SECONDS = 86400


class Latency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A latency that requests of a tenant had lately."""

    quantile: Annotated[float, Meta(gt=0, lt=1)]
    """0.5, 0.9, 0.95, 0.99, 0.999, or that of the tenant's own objective. A mean is none."""
    seconds: Annotated[float, Meta(gt=0, le=_LATENCY_MOST_SECONDS)]
    """What that share of the requests took at most."""
    window_seconds: Annotated[float, Meta(gt=0, le=_LATENCY_MOST_SECONDS)] | None = None
    """How long it was measured over. Checked and no more: what counts is when the report comes."""
    requests: Annotated[float, Meta(ge=1, le=2**53)] | None = None
    """How many requests it was measured on. Checked and no more: of none there is no latency."""


Latencies = Latency | Annotated[tuple[Latency, ...], Meta(min_length=1, max_length=QUANTILES_MOST)]
"""One, or several quantiles at once."""


async def _report(told: Told, ask: Ask, _submit: Submit) -> View:
    now = told.clock.now().mono
    tenant = _present(told, ask)
    told.intake.admit(tenant.name, now)
    said = (ask.body,) if isinstance(ask.body, Latency) else ask.body
    reports = [LatencyReport(tenant.name, _quantile(x, tenant), x.seconds, now) for x in said]
    for report in reports:
        told.intake.take(report)
    return Done(done=_noted(tenant, sorted({r.quantile for r in reports})))


def _noted(tenant: Tenant, quantiles: list[float]) -> str:
    """What was taken in, and whether it is what the tenant's objective is about."""
    listed = ", ".join(map(quantile_text, quantiles))
    text = f"noted: the latency of {wire(tenant.name)} at quantile {listed}"
    wanted = tenant.limits.latency_quantile
    if tenant.limits.latency_slo_seconds is None or wanted in quantiles:
        return text
    return f"{text}; its objective is for {quantile_text(wanted)}, so nothing is done for this"


def _present(told: Told, ask: Ask) -> Tenant:
    """The tenant. Whoever comes here may report for it, and so may know whether it exists."""
    for tenant in current(told).state.inventory.tenants or ():
        if wire(tenant.name) == ask.name:
            return tenant
    return not_found(
        f"there is no tenant {ask.name!r} here now",
        "it exists as long as it has a process; GET /v1/tenants lists those there are",
    )


def _quantile(said: Latency, tenant: Tenant) -> float:
    """As it is written here, whatever the digits that came. Raises Trouble (422)."""
    known = sorted({*QUANTILES, tenant.limits.latency_quantile})
    for quantile in known:
        if abs(said.quantile - quantile) < _SAME:
            return quantile
    raise Trouble(
        422,
        f"quantile {said.quantile!r} is none that is kept",
        f"report one of {', '.join(map(quantile_text, known))}",
    )


DOS: tuple[Do, ...] = (
    Do(
        path="/v1/tenants/{name}/latency",
        audience=For.REPORTERS,
        about="Say what latency the requests of a tenant had; it holds for 15 seconds.",
        answer=_report,
        method="PUT",
        body=Latencies,
        status=202,
        statuses=(429,),
    ),
)
