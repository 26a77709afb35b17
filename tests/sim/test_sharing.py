"""How jobs share a card, whatever they are: nobody gets more than there is, and alone all of it."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.sim import profiles
from gpuagent.sim.jobs import Cycle, DecodeJob, Job, Turn
from gpuagent.sim.profiles import CardProfile
from gpuagent.sim.sharing import NOBODY, SideBySide, TimeSlices
from gpuagent.sim.work import Decode

CARD = profiles.card("a40")
STEP = 0.05
SERVER = 99
CLIENTS = st.lists(
    st.tuples(st.sampled_from(sorted(CARD.shapes)), st.floats(1, 100)), min_size=1, max_size=8
)


def jobs(*shapes: str) -> dict[int, Job]:
    made = profiles.work("llm-decode", {}, where="t")
    assert isinstance(made, Decode)
    return {
        pid: DecodeJob(made, CARD.shapes[s], take=lambda _: True, random=Random(pid))
        for pid, s in enumerate(shapes)
    }


def side_by_side(
    *clients: tuple[str, float], card: CardProfile = CARD, **changes: float
) -> tuple[SideBySide, dict[int, float]]:
    used = {SERVER: 0.0}
    sharing = SideBySide(card, profiles.mps(changes), set(range(len(clients))), used)
    sharing.server_pid = SERVER
    for pid, (shape, percentage) in enumerate(clients):
        sharing.admit(pid, shape, percentage)
    return sharing, used


def turn(clock: float = 1.0) -> Turn:
    made = Turn()
    made.seconds, made.clock = STEP, clock
    return made


@given(CLIENTS, st.floats(0.2, 1), st.sets(st.integers(0, 7)))
def test_clients_together_never_use_more_than_the_card(
    clients: list[tuple[str, float]], clock: float, frozen: set[int]
) -> None:
    sharing, seconds = side_by_side(*clients)
    running = jobs(*(shape for shape, _ in clients))
    for step in range(30):
        used = sharing.step(
            running, turn(clock), dict.fromkeys(running, 1.0), frozen if step > 15 else NOBODY
        )
        total = sum(job.gpu_share * sharing.places[pid].used for pid, job in running.items())
        # What jobs do next follows from what they did last: in the first steps that is not yet so.
        assert total <= 1 + 1e-9 or step < 10
        assert 0 <= used.running <= 1
        assert 0 <= used.dynamic_watts <= 8 * CARD.power_max_watts.value
    assert 0 <= seconds[SERVER] <= 30 * STEP + 1e-9
    for pid, (_, percentage) in enumerate(clients):
        assert sharing.places[pid].used <= percentage / 100 + 1e-9


@given(st.lists(st.just("bert"), min_size=1, max_size=5))
def test_full_width_without_interference_is_the_law_of_time_slices(shapes: list[str]) -> None:
    sharing, _ = side_by_side(*((s, 100.0) for s in shapes), interference_ratio=0.0)
    slices = TimeSlices(CARD, dict.fromkeys(range(len(shapes)), 0.0))
    one, other = jobs(*shapes), jobs(*shapes)
    cpu = dict.fromkeys(one, 1.0)
    for _ in range(100):
        sharing.step(one, turn(), cpu, NOBODY)
        slices.step(other, turn(), cpu, NOBODY)
    for pid in one:
        assert one[pid].gpu_share == pytest.approx(other[pid].gpu_share, rel=1e-6)


def test_contention_can_be_felt_in_part_or_not_at_all() -> None:
    tokens = {}
    for contention in (0.0, 0.5, 1.0):
        card = profiles.card("a40", {"contention_ratio": contention})
        for mps in (False, True):
            running = jobs("bert", "bert", "bert")
            sharing: TimeSlices | SideBySide = TimeSlices(card, dict.fromkeys(running, 0.0))
            if mps:
                sharing, _ = side_by_side(*[("bert", 100.0)] * 3, card=card)
            for _ in range(400):
                sharing.step(running, turn(), dict.fromkeys(running, 1.0), NOBODY)
            tokens[mps, contention] = running[0].progress().tokens
    alone = jobs("bert")
    for _ in range(400):
        TimeSlices(CARD, {0: 0.0}).step(alone, turn(), {0: 1.0}, NOBODY)
    for mps in (False, True):
        assert tokens[mps, 0.0] == alone[0].progress().tokens
        assert tokens[mps, 0.0] > 1.3 * tokens[mps, 0.5] > 1.3 * 1.3 * tokens[mps, 1.0]


def test_a_percentage_that_is_not_kept_to_changes_nothing() -> None:
    sharing, _ = side_by_side(("bert", 10.0), ceiling_effect=0.0)
    assert sharing.places[0] == (1.0, 1.0)
    half, _ = side_by_side(("bert", 10.0), ceiling_effect=0.5)
    assert half.places[0].used == pytest.approx(0.55)


def test_every_shape_has_a_width_and_every_coefficient_of_mps_its_source() -> None:
    mps = profiles.mps()
    for kind in profiles.cards():
        assert profiles.card(kind).shapes.keys() == mps.width.keys()
    numbers = [v for v in map(mps.__getattribute__, mps.__struct_fields__) if v is not mps.width]
    for number in (*numbers, *mps.width.values()):
        assert any(word in number.source for word in ("assumed", "FACTS"))


@given(st.floats(0.01, 5), st.floats(0.01, 1), st.floats(0.2, 1), st.floats(1, 6))
def test_what_a_frozen_job_still_runs_is_bounded_by_what_it_had_submitted(
    queued: float, launch: float, clock: float, stretch: float
) -> None:
    shape = CARD.shapes["bert"]
    cycle = Cycle(
        shape,
        seconds=0.3,
        launch=launch,
        jitter=0.0,
        queued=queued,
        host_cpu=1.0,
        random=Random(1),
    )
    here = turn(clock)
    here.stretch = stretch
    for _ in range(7):
        cycle.step(here)
    done, ran = cycle.done, 0.0
    for _ in range(200):
        cycle.drain(here)
        ran += cycle.gpu_share * STEP
    assert cycle.done == done
    assert (cycle.pending, cycle.gpu_share) == (0, 0)
    assert ran <= min(queued, 0.3) * shape.gpu_share(clock) + 1e-9
    while cycle.done == done:
        cycle.step(here)
