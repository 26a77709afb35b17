"""A card's invariants under any work, limit and weather, and what each of its levers does."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.sim import profiles
from gpuagent.sim.card import Card, Window
from gpuagent.sim.starting import begin

STEP = 0.05
WORKS = ("chat", "bert-training", "resnet-training", "llm-decode", "grower", "notebook", "holder")


def card(kind: str = "a40", seed: int = 1, ambient: float = 28.0) -> Card:
    profile = profiles.card(kind)
    return Card(profile, index=0, ambient_celsius=ambient, step=STEP, random=Random(seed))


def put(card: Card, *works: str) -> dict[int, float]:
    """Work begins; the CPU it gets by pid."""
    for pid, name in enumerate(works, 1):
        begin(profiles.work(name, {}, where="t"), card, pid, random=Random(pid), at=0.0)
    return dict.fromkeys(range(1, len(works) + 1), 1.0)


def run(card: Card, cpu: dict[int, float], seconds: float, begin: float = 0.0) -> list[float]:
    """Watts of each step."""
    watts = []
    for i in range(round(seconds / STEP)):
        card.step(begin + i * STEP, cpu)
        watts.append(card.watts)
    return watts


@given(
    st.sampled_from(profiles.cards()),
    st.lists(st.sampled_from(WORKS), max_size=6),
    st.lists(st.floats(100, 250), max_size=4),
    st.floats(0.05, 1),
    st.floats(10, 70),
)
def test_whatever_runs_the_card_keeps_its_word(
    kind: str, works: list[str], limits: list[float], share: float, ambient: float
) -> None:
    here = card(kind, ambient=ambient)
    cpu = dict.fromkeys(put(here, *works), share)
    at, joules = 0.0, 0.0
    for limit in [here.limit_watts, *limits]:
        here.limit(limit, at)
        for i in range(60):
            here.step(at, cpu)
            at += STEP
            joules += here.watts * STEP
            assert 0 <= here.utilization.mean <= 1 + 1e-9
            assert 0 < here.clock <= 1
            assert here.used_bytes <= here.memory_bytes
            assert here.watts >= here.profile.idle_watts.value - 1e-9
            assert here.celsius < 200
            if i * STEP >= here.profile.limit_delay_max_seconds.value + 2 * STEP:
                assert here.enforced_watts == limit
                assert here.watts <= limit + 1e-6
    assert here.joules == pytest.approx(joules)


def test_a_new_limit_acts_after_a_while_and_the_latest_wins() -> None:
    delays = []
    for seed in range(40):
        here = card(seed=seed)
        here.limit(150.0, 0.0)
        assert (here.limit_watts, here.enforced_watts) == (150.0, 300.0)
        steps = 0
        while here.enforced_watts != 150.0:
            here.step(steps * 0.001, {})
            steps += 1
        delays.append(steps * 0.001)
        here.limit(200.0, 10.0)
        here.limit(180.0, 10.0)
        run(here, {}, 1.0, begin=10.0)
        assert here.enforced_watts == 180.0
    assert min(delays) >= 0.01
    assert max(delays) <= 0.51
    assert max(delays) - min(delays) > 0.2


@pytest.mark.parametrize("kind", profiles.cards())
def test_a_limit_slows_training_as_the_curve_says(kind: str) -> None:
    profile = profiles.card(kind)
    done = {}
    half = profile.power_max_watts.value / 2
    for limit in (profile.power_max_watts.value, half):
        here = card(kind)
        changes: dict[str, object] = {"evaluate_every": 10**6, "checkpoint_every": 10**6}
        work = profiles.work("bert-training", {**changes, "launch": 0.1}, where="t")
        job = begin(work, here, 1, random=Random(1), at=0.0)
        here.limit(limit, 0.0)
        run(here, {1: 1.0}, 400)
        done[limit] = job.progress().iterations
    top = profile.power_max_watts.value
    shape = profile.shapes["bert"]
    expected = profile.curve.predict(top, shape)[0] / profile.curve.predict(half, shape)[0]
    assert done[half] / done[top] == pytest.approx(expected, rel=0.04)


def test_an_idle_card_draws_little_and_gets_cool() -> None:
    here = card()
    assert set(run(here, {}, 300)) == {here.profile.idle_watts.value}
    assert here.celsius == pytest.approx(28 + 0.16 * here.watts, abs=0.1)
    assert here.utilization.mean == 0


def test_heat_follows_power_and_the_driver_takes_clocks_down() -> None:
    here = card("v100")
    cpu = put(here, "bert-training")
    run(here, cpu, 300)
    cool = here.celsius
    assert 55 < cool < 80
    assert not here.too_hot
    here.ambient_celsius = 70.0
    run(here, cpu, 300, begin=300.0)
    slowdown = here.profile.slowdown_celsius.value
    assert here.clock < 0.9
    assert cool < here.celsius < slowdown + 2
    here.ambient_celsius = 28.0
    run(here, cpu, 300, begin=600.0)
    assert here.clock > 0.95


def test_memory_is_refused_beyond_the_card_and_given_back() -> None:
    here = card()
    room = here.memory_bytes - 2 * here.profile.context_bytes.value
    assert here.enter(1)
    assert here.enter(2)
    assert here.take(1, room - 10)
    assert not here.take(2, 11)
    assert here.take(2, 10)
    assert here.used_bytes == here.memory_bytes
    assert not here.enter(3)
    here.leave(1)
    assert here.enter(3)


@given(st.lists(st.floats(-1e3, 1e3), max_size=50), st.integers(1, 10))
def test_a_window_is_the_mean_of_the_last(values: list[float], size: int) -> None:
    window = Window(size)
    for value in values:
        window.add(value)
    last = ([0.0] * size + values)[-size:]
    assert window.mean == pytest.approx(sum(last) / size, abs=1e-6)
