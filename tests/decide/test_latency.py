"""Latency as a cause: whose counts, who is held for it, through what, and when it is let go."""

from collections.abc import Iterator
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuagent.config import Backpressure as Law
from gpuagent.config import Config
from gpuagent.decide.backpressure import Backpressure
from gpuagent.decide.merge import merge
from gpuagent.model.inventory import NODE, Level, Tenant, on_tenant
from gpuagent.model.plan import Decision, Setting
from gpuagent.model.state import Event
from gpuagent.model.vocab import CPU_MAX, CPU_WEIGHT, NODE_CPU_BUSY_RATIO
from gpuagent.record import decode, encode, replay
from tests.decide.world import GIB, World, gpu, tenant

OTHER = "GPU-bbbbbbbb-0000-0000-0000-000000000002"
CHAT = tenant("chat", Level.L1, slo=0.1)
LAWS = pytest.mark.parametrize("law", [Law(), Law(control="pi")], ids=["aimd", "pi"])


def world(*others: Tenant, law: Law | None = None, chat: Tenant = CHAT) -> World:
    config = Config(backpressure=law or Law())
    w = World(Backpressure(config), gpus=[gpu(), gpu(OTHER, 1)], tenants=[chat, *others])
    w.pressure(0.05, busy=0.3)
    w.latencies["chat"] = 0.05
    w.run(12)
    return w


def of(w: World, knob: object) -> list[Setting]:
    return [s for s in w.decision.settings if s.knob is knob]


def drive(w: World, seconds: int, *, alone: float = 0.06, each: float = 0.06) -> list[float]:
    """The latency follows the shares of the others, as it would on a card that they share."""
    seen = []
    for _ in range(seconds):
        w.latencies["chat"] = alone + each * sum(w.share(t.name) for t in w.tenants[1:])
        seen.append(w.latencies["chat"])
        w.step()
    return seen


@LAWS
def test_a_latency_near_its_objective_holds_the_neighbour_back(law: Law) -> None:
    w = world(tenant("train"), law=law)
    w.latencies["chat"] = 0.093
    w.run(5)
    [cause] = w.decision.causes
    assert (cause.kind, cause.subject) == ("latency", on_tenant("chat"))
    assert cause.why == "p99 of chat at 93 ms (objective 100 ms, mark 90 ms)"
    assert dict(cause.numbers) == {"latency_seconds": 0.093, "objective_seconds": 0.1}
    [setting] = [s for s in w.decision.settings if s.blocked is None]
    assert setting.knob is CPU_MAX
    assert setting.rule == "backpressure/latency"
    assert w.share("train") < 1.0
    assert w.events == ["held-back"]


@LAWS
def test_what_is_said_of_holding_is_about_who_is_held(law: Law) -> None:
    w = world(tenant("train"), law=law)
    said: list[Event] = []
    for latency, seconds in ((0.12, 20), (0.05, 200)):
        w.latencies["chat"] = latency
        for _ in range(seconds):
            w.step()
            said += w.decision.events
    assert {"held-back", "released"} <= {e.kind for e in said}
    assert {str(e.subject) for e in said} == {str(on_tenant("train"))}
    held = next(e for e in said if e.kind == "held-back")
    assert dict(held.numbers) == {"latency_seconds": 0.12, "objective_seconds": 0.1}


@pytest.mark.parametrize(
    "chat",
    [
        tenant("chat", Level.L1),
        tenant("chat", Level.L2, slo=0.1),
        tenant("chat", Level.L3, slo=0.1),
    ],
    ids=["no objective", "L2", "L3"],
)
def test_nobody_else_is_protected(chat: Tenant) -> None:
    w = world(tenant("train"), chat=chat)
    w.latencies["chat"] = 5.0
    w.run(20)
    assert w.decision.causes == ()
    assert w.decision.settings == ()


def test_only_the_quantile_of_the_objective_counts() -> None:
    median = msgspec.structs.replace(CHAT.limits, latency_quantile=0.5)
    w = world(tenant("train"), chat=msgspec.structs.replace(CHAT, limits=median))
    w.latencies["chat"] = 5.0  # the p99
    w.run(20)
    assert w.decision.causes == ()


@LAWS
def test_only_those_beside_it_are_held(law: Law) -> None:
    far = tenant("far", gpus=(OTHER,))
    w = world(tenant("train"), far, law=law)
    w.latencies["chat"] = 0.2
    w.run(100)
    assert w.share("far") == 1.0
    assert "held-back" in w.events


@LAWS
def test_best_effort_is_at_its_floor_or_of_no_use_before_batch_is_touched(law: Law) -> None:
    w = world(tenant("batch", Level.L2), tenant("train"), law=law)
    w.latencies["chat"] = 0.2
    touched = False
    for _ in range(100):
        w.step()
        if w.share("batch") < 1.0:
            touched = True
            assert w.share("train") <= 0.2 + 1e-9 or "lever-let-go" in w.events
        assert w.share("chat") == 1.0
    assert touched


@LAWS
def test_batch_gets_its_share_back_before_best_effort_does(law: Law) -> None:
    w = world(tenant("batch", Level.L2), tenant("train"), law=law)
    drive(w, 40, alone=0.1)
    assert w.share("batch") < 1.0
    w.latencies["chat"] = 0.03
    for _ in range(200):
        w.step()
        if law.control == "pi" and w.share("train") > 0.2 + 1e-9:
            assert w.share("batch") == 1.0
    assert w.share("train") == w.share("batch") == 1.0
    assert w.decision.settings == ()


def test_whoever_is_busiest_on_the_shared_card_comes_first() -> None:
    w = world(tenant("calm"), tenant("busy"), tenant("quiet"))
    w.uses("calm", cores=30.0, utilization=0.1)
    w.uses("busy", cores=1.0, utilization=0.7)
    w.uses("quiet", cores=30.0, utilization=0.0)
    w.latencies["chat"] = 0.2
    w.run(16)
    assert w.share("busy") < w.share("calm") == w.share("quiet") == 1.0
    w.run(200)
    assert not [s for s in w.decision.settings if s.subject.tenant == "quiet"], "it runs no kernels"


def test_known_kernels_come_before_known_cpu_and_that_before_nothing_known() -> None:
    w = world(tenant("unknown"), tenant("cpu"), tenant("idle"), tenant("kernels"))
    w.values = {k: v for k, v in w.values.items() if k[1].tenant != "unknown"}
    w.uses("cpu", cores=60.0)
    w.uses("idle", cores=0.01)
    w.uses("kernels", cores=0.5, utilization=0.02)
    w.latencies["chat"] = 0.2
    order: list[str] = []
    for _ in range(150):
        w.step()
        order += [h.subject.tenant for h in w.decision.holds if h.subject.tenant not in order]
    assert order == ["kernels", "cpu"], "what the unknown one uses has no share to take"
    refused = [s for s in w.decision.settings if s.subject.tenant == "unknown"]
    assert refused
    assert all(s.blocked is not None for s in refused)
    assert not [s for s in w.decision.settings if s.subject.tenant == "idle"]


def test_a_pause_between_kernels_is_not_idleness() -> None:
    w = world(tenant("train"))
    w.latencies["chat"] = 0.12
    for second in range(40):
        w.uses("train", utilization=0.9 if second % 5 == 0 else 0.0)
        w.step()
    assert w.share("train") == pytest.approx(0.2)


# -- cpu.weight ------------------------------------------------------------------------------------


@pytest.mark.parametrize("busy", [0.3, None])
def test_a_weight_is_no_lever_while_no_cpu_is_short(busy: float | None) -> None:
    w = world(tenant("train"))
    w.values[NODE_CPU_BUSY_RATIO, NODE] = busy
    w.run(8)
    w.latencies["chat"] = 0.2
    w.run(5)
    [weight] = of(w, CPU_WEIGHT)
    assert weight.blocked is not None
    assert weight.blocked.result == "ineffective"
    assert ("30%" if busy else "not known") in weight.blocked.why
    assert "has ended" not in weight.why
    [quota] = of(w, CPU_MAX)
    assert quota.blocked is None


@LAWS
def test_a_weight_comes_first_while_cpus_are_short_and_goes_with_that(law: Law) -> None:
    w = world(tenant("train"), law=law)
    w.pressure(0.1, busy=0.97)
    w.latencies["chat"] = 0.2
    w.run(4)
    [weight] = w.decision.settings
    assert weight.knob is CPU_WEIGHT
    assert weight.blocked is None
    w.pressure(0.1, busy=0.5)
    w.step()
    assert [s.blocked is not None for s in of(w, CPU_WEIGHT)] == [True]
    assert "lever-let-go" in w.events
    w.run(6)
    assert [s.blocked for s in of(w, CPU_MAX)] == [None]
    w.pressure(0.1, busy=0.97)
    w.run(10)
    assert all(s.blocked is not None for s in of(w, CPU_WEIGHT)), "no to and fro"
    assert [s.blocked for s in of(w, CPU_MAX)] == [None]


def test_a_busy_ratio_that_is_missing_does_not_end_a_weight_in_use() -> None:
    w = world(tenant("train"))
    w.pressure(0.1, busy=0.97)
    w.latencies["chat"] = 0.2
    w.run(4)
    del w.values[NODE_CPU_BUSY_RATIO, NODE]
    w.run(8)
    assert [s.blocked for s in of(w, CPU_WEIGHT)] == [None]


def test_while_observing_a_weight_that_would_not_help_is_not_said_to_be_let_go() -> None:
    w = world(tenant("train"))
    w.acts = False
    w.pressure(0.1, busy=0.97)
    w.latencies["chat"] = 0.2
    w.run(4)
    w.pressure(0.1, busy=0.5)
    w.run(10)
    assert set(w.events) == {"would-hold-back"}


# -- the end of it ---------------------------------------------------------------------------------


@LAWS
def test_an_ended_cause_gives_everything_back(law: Law) -> None:
    w = world(tenant("train"), law=law)
    w.latencies["chat"] = 0.12
    w.run(20)
    assert w.share("train") < 0.9
    w.latencies["chat"] = 0.05
    w.run(200)
    assert w.share("train") == 1.0
    assert w.decision.settings == ()
    assert w.events[-1] == "released"


@LAWS
def test_a_latency_that_is_not_reported_any_more_is_let_go_slowly(law: Law) -> None:
    w = world(tenant("train"), law=law)
    w.latencies["chat"] = 0.2
    w.run(12)
    del w.latencies["chat"]
    w.run(6)  # what was measured since the last cut may count once more
    held = w.share("train")
    w.run(9)
    assert w.share("train") == held, "nothing new was measured, so nothing more is taken"
    shares = []
    for _ in range(40):
        w.step()
        shares.append(w.share("train"))
    assert w.decision.causes == ()
    assert shares[-1] == 1.0
    assert shares[5] < 1.0
    assert shares == sorted(shares)


@LAWS
def test_a_lever_that_does_not_help_is_let_go(law: Law) -> None:
    w = world(tenant("train"), law=law)
    for second in range(150):
        w.latencies["chat"] = 0.14 + 0.03 * (second % 7 - 3) / 3
        w.step()
    assert w.share("train") == 1.0
    assert w.events.count("lever-let-go") == 1
    [said] = of(w, CPU_MAX)
    assert said.blocked is not None
    assert "did not ease this" in said.blocked.why


@LAWS
def test_a_lever_that_helps_is_kept_even_where_it_does_not_help_enough(law: Law) -> None:
    w = world(tenant("train"), law=law)
    seen = drive(w, 300, alone=0.082, each=0.06)
    assert "lever-let-go" not in w.events
    assert sorted(seen)[len(seen) // 2] < 0.1 < seen[0]


@LAWS
def test_whoever_is_protected_no_longer_holds_nobody(law: Law) -> None:
    for after in (
        [tenant("train")],
        [tenant("chat", Level.L2, slo=0.1), tenant("train")],
        [tenant("chat", Level.L1), tenant("train")],
        [tenant("chat", Level.L1, slo=0.1, gpus=(OTHER,)), tenant("train")],
    ):
        w = world(tenant("train"), law=law)
        w.latencies["chat"] = 0.2
        w.run(8)
        assert w.share("train") < 1.0
        w.tenants = tuple(after)
        w.step()
        assert w.decision.settings == ()
        assert w.share("train") == 1.0


@LAWS
def test_the_tightest_of_two_causes_holds(law: Law) -> None:
    w = world(tenant("train"), law=law)
    w.uses("train", utilization=0.5)
    w.latencies["chat"] = 0.12
    for _ in range(12):
        w.grow(1, by={"train": GIB})
        asked = [s.value for s in of(w, CPU_MAX) if s.blocked is None]
        won = [s.value for s in merge(w.decision.settings, w.state).settings if s.knob is CPU_MAX]
        assert won == ([min(asked)] if asked else [])
        if asked:
            assert min(asked) == pytest.approx(2.0 * w.share("train"))
    assert {c.kind for c in w.decision.causes} == {"memory", "latency"}


@LAWS
def test_observe_reports_the_first_step_only(law: Law) -> None:
    w = world(tenant("batch", Level.L2), tenant("train"), law=law)
    w.acts = False
    w.latencies["chat"] = 0.2
    w.run(4)
    first = w.share("train")
    assert first < 1.0
    for _ in range(60):
        w.step()
        w.answer("would")
        assert w.share("train") == first
        assert w.share("batch") == 1.0
    assert w.events == ["would-hold-back"]
    w.latencies["chat"] = 0.05
    w.run(5)
    assert w.decision.settings == ()


# -- whatever happens ------------------------------------------------------------------------------

SECONDS = st.tuples(
    st.one_of(st.none(), st.floats(0.001, 3.0)), st.integers(1, 8), st.sampled_from([0.1, 0.95])
)
"""A latency (or silence), for how long, and how busy the CPUs are meanwhile."""


def crowd(law: Law) -> World:
    return world(
        tenant("batch", Level.L2, floor=0.5),
        tenant("train", floor=0.1),
        tenant("train2"),
        law=law,
    )


def play(
    w: World, script: list[tuple[float | None, int, float]], *, looks: tuple[float, ...] = ()
) -> Iterator[Decision]:
    """One decision a second; `looks` are the lengths of looks between, at nothing new."""
    silent = 0
    for latency, seconds, busy in script:
        w.pressure(0.05, busy=busy)
        for _ in range(seconds):
            silent = silent + 1 if latency is None else 0
            w.latencies = {} if latency is None and silent < 14 else {"chat": latency or 0.05}
            for length in looks:
                w.step(length, read=False)
            yield w.step(1.0 - sum(looks))


@LAWS
@settings(max_examples=25)
@given(st.lists(SECONDS, max_size=16))
def test_invariants(law: Law, script: list[tuple[float | None, int, float]]) -> None:
    w = crowd(law)
    floors = {"batch": 0.5, "train": 0.1, "train2": 0.2}
    before, silent = dict.fromkeys(floors, 1.0), 0
    for decision in play(w, script):
        merge(decision.settings, w.state)  # raises where L1 would be touched
        assert {s.subject.tenant for s in decision.settings} <= floors.keys()
        shares = {name: w.share(name) for name in floors}
        assert all(floors[name] <= shares[name] <= 1.0 for name in floors)
        silent = 0 if w.latencies else silent + 1
        if silent > law.dwell + 1:
            assert all(shares[n] >= before[n] for n in floors), "nothing is taken unmeasured"
        before = shares


@LAWS
@settings(max_examples=15)
@given(st.lists(SECONDS, max_size=16))
def test_extra_wakes_change_nothing(
    law: Law, script: list[tuple[float | None, int, float]]
) -> None:
    calm, woken = crowd(law), crowd(law)
    for one, other in zip(play(calm, script), play(woken, script, looks=(0.25, 0.25)), strict=True):
        assert one.settings == other.settings
        assert one.holds == other.holds


@LAWS
@settings(max_examples=10)
@given(st.lists(SECONDS, max_size=12))
def test_a_replay_decides_the_same(law: Law, script: list[tuple[float | None, int, float]]) -> None:
    w = crowd(law)
    for _ in play(w, script):
        pass
    policy = Backpressure(Config(backpressure=law))
    first = replay(w.frames, [policy])
    assert first == replay(decode(encode(w.frames)), [policy])
    assert first[-1] == merge(w.decision.settings, w.state)


# -- what is learnt of a lever -----------------------------------------------------------------------


def test_under_its_mark_nothing_more_is_taken() -> None:
    w = world(tenant("train"))
    w.latencies["chat"] = 0.12
    w.run(8)
    held = w.share("train")
    assert held < 1.0
    w.latencies["chat"] = 0.085  # between the marks: the cause goes on
    w.run(25)
    assert w.decision.causes
    assert w.share("train") == held
    w.run(60)
    assert w.decision.causes
    assert w.share("train") > 0.9, "as good as over"
    assert "lever-let-go" not in w.events


@LAWS
def test_a_lever_that_helps_but_not_enough_is_not_let_go(law: Law) -> None:
    w = world(tenant("train"), law=law)
    drive(w, 140, alone=0.14, each=0.2)
    assert w.share("train") == pytest.approx(0.2)
    assert "lever-let-go" not in w.events


@LAWS
def test_what_helps_but_not_enough_is_tested_ever_more_rarely(law: Law) -> None:
    w = world(tenant("train"), law=law)
    tested, free = [], 0
    for second in range(3600):
        drive(w, 1, alone=0.14, each=0.2)
        if "lever-tested" in [e.kind for e in w.decision.events]:
            tested.append(second)
        free += w.share("train") > 0.5
    gaps = [b - a for a, b in pairwise(tested)]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 600
    assert w.events.count("lever-missed") == len(tested)
    assert free < 3600 * 0.06, "a test takes seconds"


@LAWS
@pytest.mark.parametrize("burst", [(0.3, 6), (0.14, 6), (0.16, 30)])
def test_a_load_that_falls_by_itself_is_no_merit_of_the_lever(
    law: Law, burst: tuple[float, int]
) -> None:
    """After a burst the latency stays over its mark, whatever is done."""
    w = world(tenant("train"), law=law)
    held = 0
    for second in range(1800):
        w.latencies["chat"] = burst[0] if second < burst[1] else 0.105
        w.step()
        held += w.share("train") < 1.0
    assert held < 600


@LAWS
def test_a_lever_that_does_nothing_is_let_go_and_not_missed(law: Law) -> None:
    w = world(tenant("train"), law=law)
    drive(w, 300, alone=0.2, each=0.0)
    assert w.share("train") == 1.0
    assert w.events.count("lever-let-go") == 1
    assert "lever-missed" not in w.events


@LAWS
def test_a_lever_that_is_missed_is_used_again_at_once(law: Law) -> None:
    """Cut before the trouble was there to be seen, it seems to do nothing, until it is let go."""
    w = world(tenant("train"), law=law)
    for second in range(900):
        heavier = 0.0 if second < 400 else 0.08
        w.latencies["chat"] = 0.095 + heavier * (w.share("train") - 0.2)
        w.step()
    assert "lever-let-go" in w.events
    after = w.events[w.events.index("lever-let-go") :]
    assert "lever-missed" in after
    assert w.share("train") == pytest.approx(0.2)
    assert after.count("lever-let-go") == 1, "and kept from then on"


def test_batch_is_not_held_in_the_place_of_best_effort_that_has_only_just_come() -> None:
    w = world(tenant("batch", Level.L2), law=Law())
    w.latencies["chat"] = 0.2
    late = msgspec.structs.replace(tenant("train"), since=w.now)
    w.tenants = (*w.tenants, late)  # and nobody knows yet what it uses
    w.run(8)
    assert w.share("batch") == 1.0
    w.uses("train", cores=2.0)
    w.run(4)
    assert w.share("train") < w.share("batch") == 1.0
