"""The driver of the simulated cards, as `ports.Gpus` asks it: samples, process lists, limits, faults."""

from collections.abc import Collection, Iterable, Iterator, Mapping

from gpuagent.config import Nvml
from gpuagent.errors import Gone, Refused, Unavailable
from gpuagent.model.declare import Signal
from gpuagent.model.inventory import Gpu, GpuProcess, on_gpu
from gpuagent.model.state import Event, Key, Reading, Sensed
from gpuagent.model.vocab import (
    GPU_CLOCK_HERTZ,
    GPU_ENERGY_JOULES,
    GPU_MEMORY_FREE_BYTES,
    GPU_MEMORY_TOTAL_BYTES,
    GPU_MEMORY_USED_BYTES,
    GPU_POWER_INSTANT_WATTS,
    GPU_POWER_LIMIT_ENFORCED_WATTS,
    GPU_POWER_LIMIT_WATTS,
    GPU_POWER_WATTS,
    GPU_TEMPERATURE_CELSIUS,
    GPU_THROTTLED,
    GPU_UTILIZATION_RATIO,
)
from gpuagent.ports import Wake
from gpuagent.sim.card import Card
from gpuagent.sim.clock import VirtualClock

_RATES = Nvml()
_KEPT_PER_KEY = 64
_MEMORY_RATIO = "gpu_memory_used_ratio"


class SimGpus:
    """Implements `ports.Gpus`."""

    def __init__(self, cards: Collection[Card], clock: VirtualClock, wake: Wake) -> None:
        self._cards = tuple(cards)
        self._clock = clock
        self._now = clock.mono
        """End of the last step: what is said is as of then."""
        self._wake = wake
        self._blind: dict[str, str] = {}
        self._hung_until: dict[str, float] = {}
        self._readings: dict[Key, list[Reading]] = {}
        self._events: list[Event] = []
        self._changed = True
        self._listed: dict[str, tuple[GpuProcess, ...]] = {c.uuid: () for c in cards}
        self._relisted = True
        self._listed_at = {c.uuid: clock.mono for c in cards}
        self._used: dict[int, float] = {}
        """Kernel seconds by pid when the list was last made."""
        self._marks: dict[str, float] = {}
        self._above: set[tuple[str, str]] = set()
        self._released = False
        self._sampled_at = float("-inf")
        self._status_at = float("-inf")
        self._processes_at = float("-inf")
        self._next_at = float("-inf")
        """No sample is due before: fields are read at least as often as anything else."""

    # -- ports.Gpus -----------------------------------------------------------------------------------

    def drain(self) -> Sensed:
        if self._released:
            raise Unavailable(
                "the GPUs were released on request; `gpuagent resume` takes them up again"
            )
        said = Sensed(
            readings=tuple(r for kept in self._readings.values() for r in kept),
            gpus=tuple(self._described(c) for c in self._cards) if self._changed else None,
            gpu_processes=tuple(p for listed in self._listed.values() for p in listed)
            if self._relisted
            else None,
            events=tuple(self._events),
        )
        self._readings.clear()
        self._events.clear()
        self._changed = self._relisted = False
        return said

    def watch(self, marks: Mapping[str, float]) -> None:
        self._marks = dict(marks)
        self._above = {each for each in self._above if each[0] in self._marks}

    async def power_limit(self, uuid: str) -> float:
        """Raises Gone, Unavailable."""
        return self.card(uuid).limit_watts

    async def set_power_limit(self, uuid: str, watts: float) -> None:
        """Raises Gone, Unavailable, Refused."""
        card = self.card(uuid)
        low, high = card.profile.power_min_watts.value, card.profile.power_max_watts.value
        if not low <= watts <= high:
            raise Refused(f"GPU {card.index}: {watts:g} W is not within {low:g} to {high:g} W")
        card.limit(watts, self._clock.mono)
        self._add(GPU_POWER_LIMIT_WATTS, card, watts)

    async def release(self) -> None:
        self._released = True
        self._readings.clear()

    async def resume(self) -> None:
        self._released = False
        self._changed = self._relisted = True

    def card(self, uuid: str) -> Card:
        """The card itself. Raises Gone, Unavailable."""
        if self._released:
            raise Unavailable("the GPUs were released on request")
        card = next((c for c in self._cards if c.uuid == uuid), None)
        if card is None:
            raise Gone(f"there is no GPU {uuid}")
        if uuid in self._blind:
            raise Unavailable(f"GPU {card.index} ({card.profile.name}): {self._blind[uuid]}")
        return card

    # -- what happens to the cards --------------------------------------------------------------------

    def hang(self, card: Card, until: float) -> None:
        """Every call to the card hangs until then (monotonic seconds); its work goes on."""
        self._hung_until[card.uuid] = until
        self._go_blind(card, "a driver call hangs")

    def lose(self, card: Card) -> None:
        """The card has fallen off the bus, for good."""
        self._hung_until.pop(card.uuid, None)
        self._listed[card.uuid] = ()
        self._relisted = True
        self._go_blind(card, "lost")

    def xid(self, card: Card, xid: int) -> None:
        """The driver reports an error of the card."""
        text = f"XID {xid} on GPU {card.index} ({card.profile.name})"
        self._event("xid", card, text, (("xid", float(xid)),))
        self._wake(f"XID {xid}")

    def _go_blind(self, card: Card, why: str) -> None:
        self._blind[card.uuid] = why
        self._changed = True
        self._event("gpu-blind", card, f"GPU {card.index} cannot be read: {why}")
        self._wake(f"GPU {card.index}: {why}")

    def _event(
        self, kind: str, card: Card, text: str, numbers: tuple[tuple[str, float], ...] = ()
    ) -> None:
        self._events.append(Event(kind, self._now, text, on_gpu(card.uuid), numbers))

    # -- samples --------------------------------------------------------------------------------------

    def sample(self, now: float) -> None:
        """Take what is due; called after each step, with its monotonic seconds."""
        self._now = now
        if self._hung_until:
            self._recover(now)
        if self._released or now < self._next_at:
            return
        fields, status, lists = (
            now - at >= every - 1e-6
            for at, every in (
                (self._sampled_at, _RATES.sample_interval),
                (self._status_at, _RATES.process_interval),
                (self._processes_at, _RATES.process_interval),
            )
        )
        for card in self._cards if fields or status or lists else ():
            if card.uuid not in self._blind:
                self._look(card, fields=fields, status=status, lists=lists)
        self._sampled_at = now if fields else self._sampled_at
        self._status_at = now if status else self._status_at
        self._processes_at = now if lists else self._processes_at
        self._next_at = self._sampled_at + _RATES.sample_interval - 1e-6

    def _recover(self, now: float) -> None:
        for uuid in [u for u, until in self._hung_until.items() if now >= until]:
            del self._hung_until[uuid], self._blind[uuid]
            card = self.card(uuid)
            self._changed = True
            self._event("gpu-recovered", card, f"GPU {card.index} answers again")
            self._wake(f"GPU {card.index} answers again")

    def _look(self, card: Card, *, fields: bool, status: bool, lists: bool) -> None:
        if fields:
            for signal, value in _sampled(card):
                self._add(signal, card, value)
            self._mark(card)
        if status:
            self._add(GPU_POWER_LIMIT_WATTS, card, card.limit_watts)
            self._add(GPU_POWER_LIMIT_ENFORCED_WATTS, card, card.enforced_watts)
            clock = round(card.profile.clock_hertz.value * card.clock, -6)
            self._add(GPU_CLOCK_HERTZ, card, clock, "sm")
            for reason, on in _throttled(card):
                self._add(GPU_THROTTLED, card, float(on), reason)
        if lists:
            self._list(card)

    def _add(self, signal: Signal, card: Card, value: float, *dims: str) -> None:
        reading = Reading(signal, on_gpu(card.uuid), value, self._now, dims=dims)
        kept = self._readings.setdefault(reading.key, [])
        if len(kept) >= (_KEPT_PER_KEY if signal.history else 1):
            del kept[0]
        kept.append(reading)

    def _mark(self, card: Card) -> None:
        """Wake the loop for a value that has risen over its mark."""
        values = {
            _MEMORY_RATIO: card.used_bytes / card.memory_bytes,
            GPU_TEMPERATURE_CELSIUS.name: card.celsius,
            GPU_POWER_WATTS.name: card.watts,
        }
        for name, mark in self._marks.items():
            key = (name, card.uuid)
            above = values.get(name, float("-inf")) > mark
            if above and key not in self._above:
                self._above.add(key)
                self._wake(f"{name} of GPU {card.index} is over {mark:g}")
            elif not above:
                self._above.discard(key)

    def _list(self, card: Card) -> None:
        """Under MPS all work is the server's (FACTS 2): of each client's own, nothing is known."""
        now = self._now
        passed = now - self._listed_at[card.uuid]
        clients = () if card.side_by_side is None else card.side_by_side.places
        listed = []
        for pid, memory in card.memory.items():
            if pid in clients:
                # That the driver tells a client's memory is assumed (FACTS 8.3).
                listed.append(GpuProcess(pid, card.uuid, "mps", int(memory)))
                continue
            used = card.used_seconds[pid]
            before = self._used.get(pid)
            ratio = None if before is None or passed <= 0 else (used - before) / passed
            listed.append(
                GpuProcess(
                    pid,
                    card.uuid,
                    "compute",
                    int(memory),
                    utilization_ratio=None if ratio is None else min(max(ratio, 0.0), 1.0),
                )
            )
        gone = {p.pid for p in self._listed[card.uuid]} - set(card.memory)
        for pid in gone:
            self._used.pop(pid, None)
        self._used.update(card.used_seconds)
        self._listed_at[card.uuid] = now
        self._listed[card.uuid] = tuple(listed)
        self._relisted = True

    def _described(self, card: Card) -> Gpu:
        domain, bus, device = card.pci
        profile = card.profile
        return Gpu(
            uuid=card.uuid,
            index=card.index,
            name=profile.name,
            pci_bus_id=f"{domain:08x}:{bus:02x}:{device:02x}.0",
            memory_bytes=int(profile.memory_bytes.value),
            power_min_watts=profile.power_min_watts.value,
            power_max_watts=profile.power_max_watts.value,
            power_default_watts=profile.power_max_watts.value,
            driver="simulated",
            mig_enabled=False,
            blind=self._blind.get(card.uuid, ""),
        )


def _sampled(card: Card) -> Iterator[tuple[Signal, float]]:
    used, total = int(card.used_bytes), card.memory_bytes
    average = card.average_watts.mean if card.profile.power_averaged.value else card.watts
    yield GPU_UTILIZATION_RATIO, round(min(max(card.utilization.mean, 0.0), 1.0), 2)
    yield GPU_MEMORY_TOTAL_BYTES, total
    yield GPU_MEMORY_USED_BYTES, used
    yield GPU_MEMORY_FREE_BYTES, total - used
    yield GPU_POWER_WATTS, card.noisy(average)
    yield GPU_POWER_INSTANT_WATTS, card.noisy(card.watts)
    yield GPU_TEMPERATURE_CELSIUS, round(card.celsius)
    yield GPU_ENERGY_JOULES, round(card.joules, 3)


def _throttled(card: Card) -> Iterable[tuple[str, bool]]:
    """The reasons that are simulated, by NVML's names."""
    return (
        ("gpu_idle", not card.jobs),
        ("sw_power_cap", card.power_capped),
        ("sw_thermal", card.too_hot),
    )
