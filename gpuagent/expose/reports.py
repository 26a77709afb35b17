"""What a tenant says of itself: its latency. The agent believes it, and asks nobody else."""

from typing import Annotated

import msgspec
from msgspec import Meta

from gpuagent.expose.problems import not_found
from gpuagent.expose.routes import Ask, Do, For, Submit, Told, current
from gpuagent.expose.views import Done, View
from gpuagent.model.text import wire
from gpuagent.ports import LatencyReport

QUANTILES_MOST = 4
_LATENCY_MOST_SECONDS = 86400


class Latency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A latency that requests of a tenant had lately."""

    quantile: Annotated[float, Meta(gt=0, lt=1)]
    """Between 0 and 1: 0.99 for p99. A mean is none."""
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
    name = _present(told, ask)
    told.intake.admit(name, now)
    said = (ask.body,) if isinstance(ask.body, Latency) else ask.body
    for latency in said:
        told.intake.take(LatencyReport(name, latency.quantile, latency.seconds, now))
    return Done(done=f"noted: {len(said)} of {wire(name)}, for the next pass of the loop")


def _present(told: Told, ask: Ask) -> str:
    """The tenant's name. Whoever comes here may report for it, and so may know whether it exists."""
    for tenant in current(told).state.inventory.tenants or ():
        if wire(tenant.name) == ask.name:
            return tenant.name
    return not_found(
        f"there is no tenant {ask.name!r} here now",
        "it exists as long as it has a process; GET /v1/tenants lists those there are",
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
