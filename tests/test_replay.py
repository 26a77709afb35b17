"""A recorded list of frames turns into exactly the same plans again, also after a trip to disk."""

import pytest

from gpuagent.config import Config, Power
from gpuagent.decide import POLICIES
from gpuagent.decide.backpressure import Backpressure
from gpuagent.errors import Corrupt
from gpuagent.model.inventory import Level
from gpuagent.model.plan import Plan
from gpuagent.record import FlightRecorder, decode, encode, replay
from tests.decide.world import GIB, World, gpu, tenant

CONFIG = Config(power=Power(budget=500))


def recording() -> World:
    w = World(
        Backpressure(CONFIG),
        gpus=[gpu()],
        tenants=[tenant("serve", Level.L1), tenant("batch", Level.L2), tenant("train")],
    )
    w.pressure(0.1)
    w.run(5)
    w.grow(20, by={"train": 0.5 * GIB, "batch": 0.1 * GIB})
    w.pressure(0.7)
    w.card(celsius=85)
    w.run(40)
    w.card(celsius=60)
    w.pressure(0.1)
    w.run(60)
    return w


def plans(w: World) -> list[Plan]:
    return replay(w.frames, [make(CONFIG) for make in POLICIES])


def test_same_frames_same_plans() -> None:
    w = recording()
    first = plans(w)
    assert first == plans(w)
    assert sum(bool(p.settings) for p in first) > 50
    assert {s.knob.family for p in first for s in p.settings} == {
        "cpu_max",
        "cpu_weight",
        "power_limit",
    }


def test_also_from_bytes() -> None:
    w = recording()
    again = decode(encode(w.frames))
    assert again == w.frames
    assert replay(again, [make(CONFIG) for make in POLICIES]) == plans(w)


def test_extra_wakes_change_no_share() -> None:
    """Seconds, not ticks: five times the looks at the same world hold the same tenant as far."""
    slow, fast = (
        World(Backpressure(CONFIG), gpus=[gpu()], tenants=[tenant("s", Level.L1), tenant("train")])
        for _ in range(2)
    )
    for w, step in ((slow, 1.0), (fast, 0.2)):
        w.card(celsius=85)
        w.run(24, step=step)
    assert slow.share("train") == pytest.approx(fast.share("train"))


def test_junk_is_refused() -> None:
    with pytest.raises(Corrupt):
        decode(b"\x93junk")


def test_the_flight_recorder_is_bounded_and_its_dump_replays() -> None:
    w = recording()
    recorder = FlightRecorder(readings=200)
    for frame in w.frames:
        recorder.before(w.state, {"backpressure": w.memory}, frame)
    data, memories = recorder.dump()
    kept = decode(data)
    assert 1 < len(kept) < len(w.frames)
    assert kept == w.frames[-len(kept) :]
    assert "backpressure: Memory(" in memories
