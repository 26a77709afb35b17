"""Sensor `gpus`: what the driver says of the cards, their power taken together, and their XIDs."""

from collections.abc import Iterable

import msgspec

from gpuagent.model.inventory import NODE, Gpu
from gpuagent.model.state import Event, Instant, NodeState, Reading, Sensed
from gpuagent.model.vocab import GPU_POWER_WATTS, NODE_POWER_WATTS
from gpuagent.ports import Gpus
from gpuagent.sense.xids import XidCounts, describe


class GpuReadings:
    """Passes on what was read of the cards since the last tick, and adds what only the sum shows."""

    name = "gpus"
    interval = 0.0

    def __init__(self, gpus: Gpus, xids: XidCounts) -> None:
        self._gpus = gpus
        self._xids = xids
        self._power: dict[str, Reading] = {}
        self._cards: tuple[Gpu, ...] = ()

    async def read(self, now: Instant, state: NodeState) -> Sensed:
        """Raises Unsupported where there is no driver, Unavailable while it cannot be asked."""
        sensed = self._gpus.drain()
        if sensed.gpus is not None:
            self._cards = sensed.gpus
        counted, events = self._count(sensed.events, now)
        return msgspec.structs.replace(
            sensed,
            readings=(*sensed.readings, *self._sum(sensed.readings, now), *counted),
            events=events,
        )

    def _sum(self, readings: Iterable[Reading], now: Instant) -> Iterable[Reading]:
        """Power of all cards, as old as the oldest of its parts; nothing if one is not known."""
        for reading in readings:
            if reading.signal is GPU_POWER_WATTS:
                self._power[reading.subject.gpu] = reading
        uuids = {card.uuid for card in self._cards}
        self._power = {
            uuid: r
            for uuid, r in self._power.items()
            if uuid in uuids and now.mono - r.at <= GPU_POWER_WATTS.expires
        }
        if not uuids or any(card.blind for card in self._cards) or len(self._power) < len(uuids):
            return
        parts = self._power.values()
        watts, at = sum(r.value for r in parts), min(r.at for r in parts)
        yield Reading(NODE_POWER_WATTS, NODE, watts, at, all(r.exact for r in parts))

    def _count(
        self, events: Iterable[Event], now: Instant
    ) -> tuple[list[Reading], tuple[Event, ...]]:
        """Count the XIDs among the events; what the kernel log has told already is left out."""
        readings: list[Reading] = []
        kept: list[Event] = []
        for event in events:
            if event.kind != "xid" or event.subject is None:
                kept.append(event)
                continue
            xid = int(dict(event.numbers)["xid"])
            news = self._xids.from_nvml(event.subject.gpu, xid, now, event.at)
            readings += news
            if news:
                text = event.text.replace(f"XID {xid}", describe(xid), 1)
                kept.append(msgspec.structs.replace(event, text=text))
        return readings, tuple(kept)
