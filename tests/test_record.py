"""Frames on disk: hostile names, junk, and what the flight recorder may hold."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.errors import Corrupt
from gpuagent.model.inventory import NODE, Level, Tenant, on_cgroup, on_tenant
from gpuagent.model.state import (
    Event,
    Frame,
    Health,
    Instant,
    NodeState,
    Outcome,
    Reading,
    Sensed,
)
from gpuagent.model.vocab import CGROUP_CPU_MAX_CORES, CPU_MAX, NODE_CPU_COUNT
from gpuagent.record import FlightRecorder, decode, encode, replay

STATE = NodeState(Instant(0, 0))


def frame(
    number: int, *, readings: int = 0, events: int = 0, outcomes: int = 0, text: str = ""
) -> Frame:
    return Frame(
        Instant(number, number),
        (
            Sensed(
                tuple(Reading(NODE_CPU_COUNT, NODE, n, number) for n in range(readings)),
                events=tuple(Event("test", number, text) for _ in range(events)),
            ),
        ),
        outcomes=tuple(
            Outcome(CPU_MAX, on_tenant(text), 1.0, 1.0, None, "applied", text, number)
            for _ in range(outcomes)
        ),
        health=(Health("gpus", True, text),),
    )


def test_what_json_could_not_hold_survives() -> None:
    unlimited = Reading(CGROUP_CPU_MAX_CORES, on_cgroup("a", "/a", 1), float("inf"), 1.0)
    frames = [Frame(Instant(1.0, 1.0), (Sensed((unlimited,)),))]
    assert decode(encode(frames)) == frames


@given(st.text(st.characters(codec=None)), st.text("a\udcff\ud800", min_size=1))
def test_names_that_are_not_utf8_lose_no_record(name: str, hostile: str) -> None:
    said = Sensed(tenants=(Tenant(name + hostile, Level.L3),), events=(Event("x", 1.0, hostile),))
    frames = [Frame(Instant(1.0, 1.0), (said,)), frame(2, readings=1, outcomes=1, text=name)]
    back = decode(encode(frames))
    assert len(back) == 2
    assert back[0].sensed[0].events[0].text == hostile.encode("utf-8", "backslashreplace").decode()
    assert back[1].sensed[0].readings == frames[1].sensed[0].readings


@given(st.binary(max_size=200))
def test_junk_is_corrupt_or_a_record(junk: bytes) -> None:
    try:
        decoded = decode(junk)
    except Corrupt as error:
        assert "not a record of frames" in str(error)  # noqa: PT017  (either is right)
    else:
        assert decode(encode(decoded)) == decoded


@given(st.data())
def test_a_damaged_record_is_corrupt_or_a_record(data: st.DataObject) -> None:
    whole = bytearray(encode([frame(n, readings=2, events=1, outcomes=1) for n in range(3)]))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    for damaged in (bytes(whole), cut):
        try:
            assert isinstance(decode(damaged), list)
        except Corrupt:
            continue


def test_nesting_without_end_is_corrupt() -> None:
    with pytest.raises(Corrupt):
        decode(b"\x91\x81\xa3xxx" + b"\x91" * 50_000)


def test_a_name_that_is_not_declared_is_corrupt() -> None:
    record = encode([frame(1, readings=1)])
    assert b"node_cpus" in record
    with pytest.raises(Corrupt, match="no signal is called 'node_gpus'"):
        decode(record.replace(b"node_cpus", b"node_gpus"))


def test_no_frames_are_no_plans() -> None:
    assert replay([], []) == []
    assert decode(encode([])) == []


@given(st.lists(st.tuples(*[st.integers(0, 30)] * 3), min_size=1, max_size=40))
def test_the_flight_recorder_holds_so_many_values_and_the_newest_frame(
    given_sizes: list[tuple[int, int, int]],
) -> None:
    recorder = FlightRecorder(values=100)
    frames = []
    for number, (readings, events, outcomes) in enumerate(given_sizes):
        frames.append(frame(number, readings=readings, events=events, outcomes=outcomes))
        recorder.before(STATE, {"number": number}, frames[-1])
        kept = decode(recorder.dump()[0])
        dropped = len(frames) - len(kept)
        if dropped:  # the first frame kept is told what those before it had told
            first = kept[0]
            kept[0] = msgspec.structs.replace(first, sensed=first.sensed[1:])
        assert kept == frames[dropped:]
        values = sum(
            len(f.sensed[0].readings) + len(f.sensed[0].events) + len(f.outcomes) for f in kept
        )
        assert len(kept) == 1 or values + 2 * len(kept) <= 100
        assert recorder.dump()[1] == f"number: {number}"


def test_what_is_remembered_is_as_it_was_before_the_decision() -> None:
    recorder, memories = FlightRecorder(), {"policy": 1}
    recorder.before(STATE, memories, frame(1))
    memories["policy"] = 2
    assert recorder.dump()[1] == "policy: 1"


def test_what_has_no_place_in_a_record_is_a_bug() -> None:
    strange = msgspec.structs.replace(frame(1), outcomes=(object(),))
    with pytest.raises(TypeError, match="no place in a record"):
        encode([strange])
