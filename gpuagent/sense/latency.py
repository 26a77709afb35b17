"""Sensor `latency`: what tenants say of their own latency, as readings."""

from gpuagent.model.inventory import on_tenant
from gpuagent.model.state import Instant, NodeState, Reading, Sensed
from gpuagent.model.text import quantile_text
from gpuagent.model.vocab import TENANT_LATENCY_SECONDS
from gpuagent.ports import Latencies


class ServiceLatency:
    """Passes on what came in since the last tick, of the tenants that exist."""

    name = "latency"
    interval = 0.0

    def __init__(self, latencies: Latencies) -> None:
        self._latencies = latencies

    async def read(self, now: Instant, state: NodeState) -> Sensed:
        """One reading for each tenant and quantile; what is said of others is left out."""
        present = {t.name for t in state.inventory.tenants or ()}
        return Sensed(
            readings=tuple(
                Reading(
                    TENANT_LATENCY_SECONDS,
                    on_tenant(said.tenant),
                    said.seconds,
                    min(said.at, now.mono),  # a measurement of the future would never expire
                    dims=(quantile_text(said.quantile),),
                )
                for said in self._latencies.take()
                if said.tenant in present
            )
        )
