"""A recorded list of frames turns into exactly the same plans again, also after a trip to disk."""

import msgspec
import pytest

from gpuagent.config import Config, Power
from gpuagent.decide import POLICIES
from gpuagent.decide.backpressure import Backpressure
from gpuagent.errors import Corrupt
from gpuagent.model.inventory import Level, Process
from gpuagent.model.plan import Plan
from gpuagent.model.state import Frame, Instant, NodeState, Sensed
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


def test_a_stepped_clock_changes_no_plan() -> None:
    """Wall time may jump by years and the zone may change: all intervals are monotonic."""
    w = recording()
    stepped = [
        msgspec.structs.replace(
            f,
            now=Instant(f.now.mono, f.now.wall + (-1) ** n * 3e7 * (n % 7), 3600.0 * (n % 5)),
        )
        for n, f in enumerate(w.frames)
    ]
    assert replay(stepped, [make(CONFIG) for make in POLICIES]) == plans(w)


def test_junk_is_refused() -> None:
    with pytest.raises(Corrupt):
        decode(b"\x93junk")


def sparse(w: World) -> list[Frame]:
    """As the daemon's frames are: the cards are said once, the tenants every time."""
    first, *rest = w.frames
    return [
        first,
        *(
            msgspec.structs.replace(
                f, sensed=tuple(msgspec.structs.replace(s, gpus=None) for s in f.sensed)
            )
            for f in rest
        ),
    ]


def test_the_flight_recorder_is_bounded_and_its_dump_replays() -> None:
    w = recording()
    recorder = FlightRecorder(values=300)
    for frame in sparse(w):
        recorder.before(w.state, {"backpressure": w.memory}, frame)
    data, memories = recorder.dump()
    kept = decode(data)
    assert 1 < len(kept) < len(w.frames)
    assert [f.now for f in kept] == [f.now for f in w.frames[-len(kept) :]]
    assert "backpressure: Memory(" in memories
    last = replay(kept, [make(CONFIG) for make in POLICIES])[-1]
    assert [s.knob.name for s in last.settings] == ["gpu_power_limit"]
    assert last.settings == plans(w)[-1].settings


def test_many_processes_fill_the_recorder_once_not_every_tick() -> None:
    crowd = msgspec.structs.replace(
        tenant("train"),
        processes=tuple(Process(p, p, 1, 0, "root", "x", "/x", "/t") for p in range(500)),
    )
    same, other = (crowd,), (msgspec.structs.replace(crowd, since=1.0),)
    still, churning = FlightRecorder(values=2000), FlightRecorder(values=2000)
    for number in range(400):
        now = Instant(float(number), 0.0)
        still.before(NodeState(now), {}, Frame(now, (Sensed(tenants=same),)))
        said = same if number % 2 else other
        churning.before(NodeState(now), {}, Frame(now, (Sensed(tenants=said),)))
    assert len(decode(still.dump()[0])) == 400
    assert len(decode(churning.dump()[0])) <= 5
