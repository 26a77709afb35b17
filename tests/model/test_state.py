"""What is known: the ring of a series, history, and `fold`."""

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.model.declare import Signal
from gpuagent.model.inventory import (
    NODE,
    Gpu,
    GpuProcess,
    Level,
    Subject,
    Tenant,
    on_gpu,
    on_tenant,
    on_tenant_gpu,
)
from gpuagent.model.state import (
    Event,
    Frame,
    Health,
    History,
    Instant,
    Key,
    NodeState,
    Outcome,
    Reading,
    Sensed,
    Series,
    fold,
)
from gpuagent.model.vocab import (
    CPU_MAX,
    GPU_CLOCK_HERTZ,
    GPU_POWER_WATTS,
    GPU_TEMPERATURE_CELSIUS,
    GPU_XID_ERRORS,
    NODE_CPU_BUSY_RATIO,
    NODE_CPU_PRESSURE_RATIO,
    TENANT_CPU_CORES,
    TENANT_GPU_MEMORY_BYTES,
)

CARD = on_gpu("GPU-1")


def at(mono: float) -> Instant:
    return Instant(mono, 1.7e9 + mono)


def frame(mono: float, *readings: Reading, **parts: object) -> Frame:
    return Frame(at(mono), (Sensed(readings, **parts),))  # type: ignore[arg-type]  # as the test says


def power(value: float, mono: float) -> Reading:
    return Reading(GPU_POWER_WATTS, CARD, value, mono)


# -- series ------------------------------------------------------------------------------------------

steps = st.lists(st.tuples(st.floats(-1, 5), st.floats(-1e9, 1e9)), max_size=60)


def kept(added: Iterable[tuple[float, float]], size: int, gap: float) -> list[tuple[float, float]]:
    """What a series of plain lists would hold."""
    pairs: list[tuple[float, float]] = []
    for pair in added:
        if not pairs or pair[0] - pairs[-1][0] >= gap:
            pairs.append(pair)
    return pairs[-size:]


@given(steps, st.integers(1, 8), st.floats(0, 3), st.floats(-5, 200))
def test_a_series_holds_the_newest_in_order(
    moves: list[tuple[float, float]], size: int, gap: float, start: float
) -> None:
    series, added, now = Series(size, gap), [], 0.0
    for step, value in moves:
        now += step
        added.append((now, value))
        series.add(now, value)
    expected = kept(added, size, gap)
    assert series.since(float("-inf")) == expected
    assert series.newest == (expected[-1][0] if expected else float("-inf"))
    assert series.since(start) == [p for p in expected if p[0] >= start]


def test_a_series_wraps_around() -> None:
    series = Series(3, 1.0)
    assert series.since(float("-inf")) == []
    for n in range(7):
        series.add(float(n), n * 10.0)
    assert series.since(float("-inf")) == [(4.0, 40.0), (5.0, 50.0), (6.0, 60.0)]
    assert series.since(5.0) == [(5.0, 50.0), (6.0, 60.0)]
    assert series.since(6.5) == []


def test_what_is_too_close_or_older_is_not_added() -> None:
    series = Series(3, 1.0)
    for when in (10.0, 10.9, 9.0, 11.0, 11.0):
        series.add(when, when)
    assert [t for t, _ in series.since(0)] == [10.0, 11.0]


# -- history -----------------------------------------------------------------------------------------


def remembered(history: History, start: float = float("-inf")) -> list[tuple[float, float]]:
    return history.window(GPU_POWER_WATTS, CARD, start)


def test_a_window_is_fine_for_a_minute_and_coarse_for_an_hour() -> None:
    history = History()
    for n in range(5 * 3700):
        history.add(power(float(n), n / 5))
    end = (5 * 3700 - 1) / 5
    window = remembered(history)
    times = [t for t, _ in window]
    assert times == sorted(set(times)), "no time twice where coarse and fine meet"
    assert end - times[0] == pytest.approx(3600, abs=20)
    fine = [t for t in times if t > end - 59]
    assert len(fine) == pytest.approx(5 * 59, abs=2)
    gaps = {round(b - a, 1) for a, b in pairwise(times) if b < end - 62}
    assert gaps == {10.0}
    assert all(value == round(t * 5) for t, value in window)
    assert remembered(history, end - 30) == window[-151:]
    assert remembered(history, end + 1) == []


@given(
    st.lists(st.one_of(st.floats(0.01, 2), st.floats(10, 400)), min_size=1, max_size=60),
    st.floats(0, 1),
)
def test_a_window_joins_without_overlap_or_loss(gaps: list[float], back: float) -> None:
    history, now, added = History(), 0.0, []
    for gap in gaps:
        now += gap
        added.append((now, gap))
        history.add(power(gap, now))
    start = now - back * now
    window = remembered(history, start)
    times = [t for t, _ in window]
    assert times == sorted(set(times))
    assert set(window) <= {p for p in added if p[0] >= start}
    assert set(kept(added, *History.FINE)) & {p for p in added if p[0] >= start} <= set(window)


def test_an_unknown_series_is_an_empty_window() -> None:
    history = History()
    history.add(power(1.0, 5.0))
    assert history.window(GPU_POWER_WATTS, on_gpu("GPU-2"), 0.0) == []
    assert history.window(GPU_TEMPERATURE_CELSIUS, CARD, 0.0) == []
    assert history.window(GPU_POWER_WATTS, CARD, 0.0, ("sm",)) == []


def tenant_memory(name: str, mono: float) -> Reading:
    return Reading(TENANT_GPU_MEMORY_BYTES, on_tenant_gpu(name, "GPU-1"), 1.0, mono)


def window_of(history: History, name: str) -> list[tuple[float, float]]:
    return history.window(TENANT_GPU_MEMORY_BYTES, on_tenant_gpu(name, "GPU-1"), float("-inf"))


def test_the_longest_silent_makes_room_for_the_new() -> None:
    history = History(limit=3)
    for name, when in (("a", 0.0), ("b", 20.0), ("c", 40.0)):
        history.add(tenant_memory(name, when))
    history.add(tenant_memory("d", 70.0))
    assert len(history) == 3
    assert window_of(history, "a") == []
    assert [len(window_of(history, n)) for n in "bcd"] == [1, 1, 1]


def test_more_series_than_fit_do_not_push_each_other_out() -> None:
    history = History(limit=3)
    for second in range(200):
        for name in "abcde":
            history.add(tenant_memory(name, float(second)))
    assert len(history) == 3
    assert [len(window_of(history, n)) for n in "abcde"] == [200, 200, 200, 0, 0]
    # A place that becomes free goes to one of those that have had none.
    for second in range(200, 300):
        for name in "bcde":
            history.add(tenant_memory(name, float(second)))
    assert len(history) == 3
    assert window_of(history, "a") == []
    assert len(window_of(history, "d")) > 30


def test_history_is_bounded_in_bytes() -> None:
    history = History(limit=5)
    for n in range(5000):
        history.add(tenant_memory(f"t{n}", n * 100.0))
    assert len(history) == 5
    rings = [ring for pair in history._series.values() for ring in pair]
    held = sum(len(r._at) * r._at.itemsize + len(r._value) * r._value.itemsize for r in rings)
    assert held == 5 * 2 * (300 + 360) * 8


def test_what_has_been_silent_is_forgotten() -> None:
    history = History()
    history.add(tenant_memory("old", 0.0))
    history.add(tenant_memory("new", 100.0))
    history.forget(50.0)
    assert window_of(history, "old") == []
    assert len(window_of(history, "new")) == 1
    assert len(history) == 1


# -- what a state answers ----------------------------------------------------------------------------


def test_unknown_is_none_and_never_zero() -> None:
    state = fold(NodeState(at(0)), frame(10, power(0.0, 10)))
    assert state.fresh(GPU_POWER_WATTS, CARD) == 0.0, "zero is a value"
    assert state.fresh(GPU_POWER_WATTS, on_gpu("GPU-2")) is None
    assert state.fresh(GPU_TEMPERATURE_CELSIUS, CARD) is None
    assert state.fresh(GPU_POWER_WATTS, NODE) is None
    assert state.fresh(GPU_POWER_WATTS, CARD, ("sm",)) is None
    assert state.reading(GPU_POWER_WATTS, on_gpu("GPU-2")) is None


def test_a_reading_is_told_until_it_expires() -> None:
    state = fold(NodeState(at(0)), frame(10, power(100.0, 10)))
    edge = 10 + GPU_POWER_WATTS.expires
    for now, value in ((10.0, 100.0), (edge, 100.0), (edge + 0.01, None)):
        later = NodeState(at(now), readings=state.readings)
        assert later.fresh(GPU_POWER_WATTS, CARD) == value
        assert [r.value for r in later.live()] == ([] if value is None else [value])


def test_dimensions_are_told_apart() -> None:
    clocks = [Reading(GPU_CLOCK_HERTZ, CARD, hz, 5.0, dims=(d,)) for d, hz in (("sm", 1), ("m", 2))]
    state = fold(NodeState(at(0)), frame(5, *clocks))
    assert state.fresh(GPU_CLOCK_HERTZ, CARD, ("sm",)) == 1
    assert state.fresh(GPU_CLOCK_HERTZ, CARD, ("m",)) == 2
    assert state.fresh(GPU_CLOCK_HERTZ, CARD) is None


# -- fold --------------------------------------------------------------------------------------------


def test_an_older_reading_never_replaces_a_newer() -> None:
    state = fold(NodeState(at(0)), frame(10, power(100.0, 9.5)))
    state = fold(state, frame(11, power(1.0, 9.0)))
    assert state.fresh(GPU_POWER_WATTS, CARD) == 100.0
    state = fold(state, frame(11, power(2.0, 9.5)))
    assert state.fresh(GPU_POWER_WATTS, CARD) == 2.0, "of two at one time the later told"


def test_the_newest_of_a_frame_wins_whatever_the_order() -> None:
    three = [power(float(n), n) for n in (7, 9, 8)]
    assert fold(NodeState(at(0)), frame(10, *three)).fresh(GPU_POWER_WATTS, CARD) == 9.0
    split = Frame(at(10), tuple(Sensed((r,)) for r in three))
    assert fold(NodeState(at(0)), split).fresh(GPU_POWER_WATTS, CARD) == 9.0


def test_what_has_expired_is_dropped_but_what_happened_is_kept() -> None:
    xid = Reading(GPU_XID_ERRORS, CARD, 3.0, 10, dims=("79",))
    state = fold(NodeState(at(0)), frame(10, power(1.0, 10), xid))
    state = fold(state, frame(1e6))
    assert list(state.readings) == [xid.key]
    assert state.fresh(GPU_XID_ERRORS, CARD, ("79",)) == 3.0


def test_none_in_an_inventory_part_says_nothing() -> None:
    card, tenant = Gpu("GPU-1", 0, "H100"), Tenant("chat", Level.L1)
    listed = GpuProcess(7, "GPU-1", "compute", 1)
    state = fold(
        NodeState(at(0)), frame(1, gpus=(card,), gpu_processes=(listed,), tenants=(tenant,))
    )
    silent = fold(state, frame(2))
    assert silent.inventory == state.inventory
    assert silent.inventory.tenants is state.inventory.tenants
    gone = fold(silent, frame(3, gpus=()))
    assert gone.inventory.gpus == ()
    assert gone.inventory.gpu_processes == (listed,)
    assert gone.inventory.tenants == (tenant,)


def test_what_was_read_of_a_tenant_goes_with_it() -> None:
    def cores(name: str, mono: float) -> Reading:
        return Reading(TENANT_CPU_CORES, on_tenant(name), 1.0, mono)

    chat, train = Tenant("chat", Level.L1), Tenant("train", Level.L3)
    state = fold(
        NodeState(at(0)),
        frame(1, cores("chat", 1), cores("train", 1), power(1.0, 1), tenants=(chat, train)),
    )
    assert state.fresh(TENANT_CPU_CORES, on_tenant("train")) == 1.0
    state = fold(state, frame(2, cores("train", 2), tenants=(chat,)))
    assert {r.subject for r in state.live()} == {on_tenant("chat"), CARD}


def test_outcomes_are_those_of_now_and_health_that_was_last_heard() -> None:
    outcome = Outcome(CPU_MAX, NODE, 1.0, 1.0, 2.0, "applied", "", 1.0)
    heard = Event("xid", 1.0, "text")
    first = Frame(
        at(1),
        (Sensed(events=(heard,)),),
        outcomes=(outcome,),
        health=(Health("a", True), Health("b", None)),
    )
    state = fold(NodeState(at(0)), first)
    assert state.outcomes == {(CPU_MAX, NODE): outcome}
    assert state.events == (heard,)
    state = fold(state, Frame(at(2), health=(Health("b", False, "why"),)))
    assert state.outcomes == {}
    assert state.events == ()
    assert {n: h.up for n, h in state.health.items()} == {"a": True, "b": False}


def test_only_signals_that_say_so_have_a_history_and_silence_ends_it() -> None:
    busy = Reading(NODE_CPU_BUSY_RATIO, NODE, 0.5, 1.0)
    pressed = Reading(NODE_CPU_PRESSURE_RATIO, NODE, 0.5, 1.0)
    state = fold(NodeState(at(0)), frame(1, busy, pressed))
    assert not NODE_CPU_BUSY_RATIO.history
    assert state.history.window(NODE_CPU_BUSY_RATIO, NODE, 0) == []
    assert state.history.window(NODE_CPU_PRESSURE_RATIO, NODE, 0) == [(1.0, 0.5)]
    assert len(fold(state, frame(3500)).history) == 1
    assert len(fold(state, frame(3700)).history) == 0


signals = st.sampled_from([GPU_POWER_WATTS, GPU_CLOCK_HERTZ, GPU_XID_ERRORS, NODE_CPU_BUSY_RATIO])
some_subjects = st.sampled_from([NODE, CARD, on_gpu("GPU-2")])
told = st.tuples(
    signals, some_subjects, st.floats(allow_nan=False), st.floats(0, 30), st.sampled_from("xy")
)
frames = st.lists(st.tuples(st.floats(0, 12), st.lists(told, max_size=6)), max_size=10)


@given(frames)
def test_fold_keeps_the_newest_that_is_still_true(
    moves: list[tuple[float, list[tuple[Signal, Subject, float, float, str]]]],
) -> None:
    now, state = 100.0, NodeState(at(100.0))
    before: list[tuple[NodeState, dict[Key, Reading]]] = []
    for step, said in moves:
        known = dict(state.readings)
        before.append((state, known))
        now += step
        readings = [Reading(s, on, v, now - age, dims=(dim,)) for s, on, v, age, dim in said]
        state = fold(state, frame(now, *readings))
        expected: dict[Key, Reading] = {}
        for reading in (*known.values(), *readings):
            kept_one = expected.get(reading.key)
            if kept_one is None or kept_one.at <= reading.at:
                expected[reading.key] = reading
        expected = {k: r for k, r in expected.items() if now - r.at <= r.signal.expires}
        assert {r.key: r for r in state.live()} == expected
        for key, reading in expected.items():
            assert state.fresh(reading.signal, reading.subject, reading.dims) == reading.value, key
    assert all(old.readings == was for old, was in before), "a state is not changed once returned"
