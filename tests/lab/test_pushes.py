"""Whoever pushes a latency is believed in the place of the simulated service, for a while."""

from gpuagent.lab.pushes import STANDS_SECONDS, Pushes
from gpuagent.ports import LatencyReport
from gpuagent.sim.clock import VirtualClock


class Services:
    """Two services that tell 80 ms whenever they are asked."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def take(self) -> tuple[LatencyReport, ...]:
        return tuple(LatencyReport(name, 0.99, 0.08, self._clock.mono) for name in ("a", "b"))


def test_a_push_stands_for_a_while() -> None:
    clock = VirtualClock()
    pushes = Pushes(Services(clock), clock)

    def taken() -> dict[str, float]:
        found = pushes.take()
        assert len({(r.tenant, r.quantile) for r in found}) == len(found)
        return {r.tenant: r.seconds for r in found}

    assert taken() == {"a": 0.08, "b": 0.08}
    pushes.push(LatencyReport("a", 0.99, 0.5, clock.mono))
    assert taken() == {"a": 0.5, "b": 0.08}
    clock.advance_to(clock.mono + STANDS_SECONDS - 1.0)
    assert taken() == {"b": 0.08}
    clock.advance_to(clock.mono + 1.0)
    assert taken() == {"a": 0.08, "b": 0.08}


def test_another_quantile_stands_beside() -> None:
    clock = VirtualClock()
    pushes = Pushes(Services(clock), clock)
    pushes.push(LatencyReport("a", 0.5, 0.04, clock.mono))
    assert {(r.tenant, r.quantile) for r in pushes.take()} == {("a", 0.5), ("a", 0.99), ("b", 0.99)}
