"""Sensors `latency` and `latency_sources`: what tenants say of their own latency, as readings."""

from gpuagent.model.inventory import on_tenant
from gpuagent.model.state import Instant, NodeState, Reading, Sensed
from gpuagent.model.text import quantile_text
from gpuagent.model.vocab import TENANT_LATENCY_SECONDS, TENANT_LATENCY_SOURCE_UP
from gpuagent.ports import Latencies
from gpuagent.sense.sources import LatencySources


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
                    said.exact,
                    dims=(quantile_text(said.quantile),),
                )
                for said in self._latencies.take()
                if said.tenant in present
            )
        )


class SourceStates:
    """Tells the sources which tenants are there, and how each source fares."""

    name = "latency_sources"
    interval = 1.0

    def __init__(self, sources: LatencySources | None) -> None:
        """None where none can be configured."""
        self._sources = sources

    async def read(self, now: Instant, state: NodeState) -> Sensed:
        """Who is there is left as it was while that is not known."""
        if self._sources is None:
            return Sensed()
        if state.inventory.tenants is not None:
            self._sources.attend({t.name for t in state.inventory.tenants})
        health = self._sources.health
        return Sensed(
            readings=tuple(
                Reading(TENANT_LATENCY_SOURCE_UP, on_tenant(h.tenant), float(h.up), now.mono)
                for h in health
                if h.up is not None
            ),
            events=self._sources.take_events(),
            sources=health,
        )
