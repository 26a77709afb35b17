"""Causes, victims, rungs, time boxes: the policy on states that tests make."""

from itertools import pairwise

import msgspec
import pytest

from gpuagent.config import Backpressure as Law
from gpuagent.config import Config
from gpuagent.decide.backpressure import Backpressure
from gpuagent.model.inventory import Level, Tenant, on_cgroup, on_gpu
from gpuagent.model.plan import Setting
from gpuagent.model.state import Outcome
from gpuagent.model.vocab import CPU_MAX, CPU_WEIGHT, POWER_LIMIT
from tests.decide.world import CARD, GIB, World, gpu, seat, tenant


def world(*tenants: Tenant, law: Law | None = None) -> World:
    config = Config(backpressure=law or Law())
    return World(Backpressure(config), gpus=[gpu()], tenants=tenants)


@pytest.fixture
def pair() -> World:
    w = world(tenant("serve", Level.L1), tenant("train"))
    w.run(12)
    return w


def of(w: World, knob: object) -> list[Setting]:
    return [s for s in w.decision.settings if s.knob is knob]


def test_nothing_is_wished_while_nothing_is_wrong(pair: World) -> None:
    assert pair.decision.settings == ()
    assert pair.decision.causes == ()


def test_growth_over_the_mark_holds_the_best_effort_tenant_back(pair: World) -> None:
    pair.grow(5, by={"train": 1.0 * GIB})
    [setting] = pair.decision.settings
    where = pair.tenants[1].seats[0]
    assert setting.knob is CPU_MAX
    assert setting.subject == on_cgroup("train", where.path, where.inode)
    assert setting.value == pytest.approx(0.7 * 2.0)
    assert setting.rule == "backpressure/memory"
    assert "mark 85%" in setting.why
    assert dict(setting.numbers)["memory_total_bytes"] == 80 * GIB
    assert pair.share("train") == pytest.approx(0.7)
    assert pair.share("serve") == 1.0


def test_a_steady_ninety_percent_is_no_cause(pair: World) -> None:
    pair.card(used=72 * GIB)
    pair.run(20)  # the step up itself leaves the ten-second window
    pair.run(60)
    assert pair.decision.causes == ()
    assert pair.decision.settings == ()


def test_share_falls_step_by_step_to_its_floor_and_no_further(pair: World) -> None:
    shares = []
    for _ in range(40):
        pair.grow(1, by={"train": 0.3 * GIB})
        shares.append(pair.share("train"))
    assert min(shares) == pytest.approx(0.2)
    falls = [b for a, b in pairwise(shares) if b < a]
    assert falls[0] == pytest.approx(0.7)
    assert len(falls) == 5


def test_a_lever_that_does_not_help_is_let_go_and_remembered(pair: World) -> None:
    pair.grow(70, by={"train": 0.15 * GIB})
    assert pair.share("train") == 1.0
    [said] = of(pair, CPU_MAX)
    assert said.blocked is not None
    assert said.blocked.result == "ineffective"
    assert "30 s at its floor" in said.blocked.why
    assert pair.events.count("lever-let-go") == 1
    assert "no-lever-left" in pair.events


def test_an_ended_cause_lets_go_step_by_step(pair: World) -> None:
    pair.grow(6, by={"train": 1.0 * GIB})
    pair.card(used=40 * GIB)
    shares = []
    for _ in range(90):
        pair.step()
        shares.append(pair.share("train"))
    assert shares[-1] == 1.0
    assert pair.decision.settings == ()
    assert all(b >= a for a, b in pairwise(shares))


def test_stale_input_lets_go_slowly(pair: World) -> None:
    pair.grow(6, by={"train": 1.0 * GIB})
    held = pair.share("train")
    for _ in range(2):
        pair.step(read=False)
    assert pair.share("train") == held, "not stale yet"
    for _ in range(40):
        pair.step(read=False)
    assert pair.share("train") == 1.0


def test_the_one_that_grows_is_held_not_its_idle_neighbour() -> None:
    w = world(tenant("serve", Level.L1), tenant("still"), tenant("greedy"))
    w.uses("still", memory=30 * GIB)
    w.run(12)
    w.grow(30, by={"greedy": 0.4 * GIB})
    assert w.share("greedy") < 0.3
    assert w.share("still") == 1.0


def test_growth_that_no_process_explains_holds_the_largest_first() -> None:
    w = world(tenant("serve", Level.L1), tenant("small"), tenant("large"))
    w.uses("small", memory=2 * GIB)
    w.uses("large", memory=30 * GIB)
    w.run(12)
    for _ in range(6):
        w.grow(1, by={})
        w.used += GIB
    assert w.share("large") < 1.0
    assert w.share("small") == 1.0


def test_growth_of_level_one_alone_holds_nobody_back() -> None:
    w = world(tenant("serve", Level.L1), tenant("still"))
    w.uses("still", memory=30 * GIB)
    w.run(12)
    w.grow(12, by={"serve": GIB})
    assert w.decision.settings == ()


def test_level_three_is_at_its_floor_before_level_two_is_touched() -> None:
    w = world(tenant("batch", Level.L2), tenant("train"))
    w.run(12)
    for _ in range(45):
        w.grow(1, by={"batch": 0.4 * GIB, "train": 0.1 * GIB})
        if w.share("batch") < 1.0:
            assert w.share("train") <= 0.2 + 1e-9
    assert w.share("batch") < 1.0


def test_level_one_is_never_touched() -> None:
    w = world(tenant("serve", Level.L1))
    w.run(12)
    w.grow(60, by={"serve": 0.2 * GIB})
    assert [c.kind for c in w.decision.causes] == ["memory"]
    assert w.decision.settings == ()
    assert "no-lever-left" in w.events


def test_a_shared_cgroup_is_refused_with_the_reason() -> None:
    w = world(tenant("serve", Level.L1), tenant("train", refusal="shared with sshd.service"))
    w.run(12)
    w.grow(6, by={"train": 1.0 * GIB})
    [setting] = w.decision.settings
    assert setting.blocked is not None
    assert setting.blocked.result == "refused"
    assert setting.blocked.why == "shared with sshd.service"
    assert w.share("train") == 1.0


def test_a_tenant_the_operator_did_not_release_is_left_alone() -> None:
    w = world(tenant("train", enforce=False))
    w.run(12)
    w.grow(30, by={"train": 0.4 * GIB})
    assert w.decision.settings == ()


def test_in_observe_only_the_first_step_of_the_first_lever_is_reported() -> None:
    w = world(
        tenant("serve", Level.L1),
        tenant("train"),
        tenant("batch1", Level.L2),
        tenant("batch2", Level.L2),
    )
    w.acts = False
    w.run(12)
    for _ in range(60):
        w.grow(1, by={"train": 0.1 * GIB, "batch1": 0.1 * GIB, "batch2": 0.1 * GIB})
        w.answer("would")
        assert {h.subject.tenant for h in w.decision.holds} <= {"train"}
    assert w.share("train") == pytest.approx(0.7)
    assert w.events == ["would-hold-back"], "and nothing is said to have been done"
    w.card(used=40 * GIB)
    w.run(5)
    assert w.decision.settings == (), "nothing was done, so nothing is let go slowly"


def test_what_was_held_before_a_pause_starts_anew_after_it(pair: World) -> None:
    pair.grow(20, by={"train": 0.5 * GIB})
    assert pair.share("train") < 0.4
    pair.acts = False
    pair.grow(1, by={"train": 0.5 * GIB})
    pair.acts = True
    pair.grow(2, by={"train": 0.1 * GIB})
    assert pair.share("train") >= 0.7


def test_a_refused_write_is_let_go_with_the_reason(pair: World) -> None:
    pair.grow(5, by={"train": 1.0 * GIB})
    pair.answer("refused", "cpu.max of train.service: read-only file system")
    pair.grow(1, by={"train": 1.0 * GIB})
    [setting] = pair.decision.settings
    assert setting.blocked is not None
    assert setting.blocked.why == "cpu.max of train.service: read-only file system"


def test_cpu_max_has_an_absolute_floor() -> None:
    w = world(tenant("train", floor=0.05))
    w.uses("train", cores=0.12)
    w.run(12)
    w.grow(30, by={"train": 0.4 * GIB})
    assert of(w, CPU_MAX)[0].value == pytest.approx(0.1)


def test_unknown_cpu_use_is_said_not_guessed() -> None:
    w = world(tenant("train"))
    w.values = {k: v for k, v in w.values.items() if not k[0].name.endswith("cpu_cores")}
    w.run(12)
    w.grow(6, by={"train": 1.0 * GIB})
    [setting] = w.decision.settings
    assert setting.blocked is not None
    assert "not known" in setting.blocked.why


# -- CPU pressure ----------------------------------------------------------------------------------


def test_cpu_pressure_turns_the_weight_first_and_then_cpu_max() -> None:
    w = world(tenant("serve", Level.L1), tenant("train"))
    w.pressure(0.6)
    w.run(5)
    [weight] = w.decision.settings
    assert weight.knob is CPU_WEIGHT
    assert weight.value == 70
    assert weight.subject.cgroup == "/system.slice/train.service"
    w.run(70)
    assert [s.value for s in of(w, CPU_MAX) if s.blocked is None]
    assert [s.blocked.result for s in of(w, CPU_WEIGHT) if s.blocked] == ["ineffective"]


def test_weight_goes_to_the_branch_that_competes() -> None:
    deep = tenant("train", path="/user.slice/user-1000.slice/app.slice/train.service")
    w = world(tenant("serve", Level.L1), deep)
    w.pressure(0.6)
    w.run(5)
    said = of(w, CPU_WEIGHT)[0]
    assert said.subject.cgroup == "/user.slice", "siblings of system.slice, not of the service"
    assert said.blocked is not None
    assert said.blocked.result == "refused"
    assert of(w, CPU_MAX)[0].blocked is None, "so the next rung is used at once"


def test_without_anybody_to_protect_the_weight_is_ineffective() -> None:
    w = world(tenant("train"))
    w.pressure(0.6)
    w.run(5)
    assert of(w, CPU_WEIGHT)[0].blocked is not None
    assert of(w, CPU_MAX)[0].blocked is None


# -- heat ------------------------------------------------------------------------------------------


def test_heat_holds_tenants_first_and_then_the_card() -> None:
    w = world(tenant("serve", Level.L1), tenant("train"))
    w.uses("train", utilization=0.8)
    w.card(celsius=84)
    w.run(6)
    assert of(w, CPU_MAX)
    assert not of(w, POWER_LIMIT)
    w.run(70)
    [limit] = of(w, POWER_LIMIT)
    assert limit.subject == on_gpu(CARD)
    assert 200 <= limit.value < 700
    assert "l1-card-limited" in w.events
    w.run(400)
    assert min(s.value for s in of(w, POWER_LIMIT) or [limit]) >= 200


def test_a_card_that_cannot_be_read_keeps_its_limit() -> None:
    w = world()
    w.card(celsius=90)
    w.run(30)
    w.outcomes = [Outcome(POWER_LIMIT, on_gpu(CARD), 500.0, 500.0, 700.0, "applied", "", w.now)]
    for _ in range(8):
        w.step(read=False)
    assert w.decision.causes == (), "not known any more"
    [limit] = of(w, POWER_LIMIT)
    for _ in range(120):
        w.step(read=False)
    assert [s.value for s in of(w, POWER_LIMIT)] == [limit.value]


def test_a_tenant_that_stops_contributing_is_let_go_and_the_card_is_next() -> None:
    w = world(tenant("serve", Level.L1), tenant("train"))
    w.uses("train", utilization=0.8)
    w.uses("serve", utilization=0.9)
    w.card(celsius=85)
    w.run(6)
    assert w.share("train") < 1.0
    w.uses("train", utilization=0.0)
    w.run(20)
    assert of(w, POWER_LIMIT), "the heat is not its doing, and the card is the last resort"
    w.run(40)
    assert w.share("train") == 1.0


def test_a_hold_makes_no_cause_of_its_own() -> None:
    """PSI counts tasks that wait for their quota, so a hold alone lifts it on an idle host."""
    w = world(tenant("serve", Level.L1), tenant("hot"), tenant("other"))
    w.uses("hot", utilization=0.8)
    w.uses("other", utilization=0.0)
    w.pressure(0.02, busy=0.2)
    w.card(celsius=85)
    for _ in range(120):
        held = any(s.blocked is None for s in of(w, CPU_MAX))
        w.pressure(0.97 if held else 0.02, busy=0.2)
        w.card(celsius=85 if w.now < 1012 else 60)
        w.step()
        assert {c.kind for c in w.decision.causes} <= {"temperature"}
        assert w.share("other") == 1.0
    w.run(60)
    assert w.decision.settings == ()


def test_a_tenant_that_uses_no_cpu_is_not_pinned_to_nothing() -> None:
    w = world(tenant("train"))
    w.uses("train", cores=0.0)
    w.run(12)
    w.grow(8, by={"train": 1.0 * GIB})
    [said] = of(w, CPU_MAX)
    assert said.blocked is not None
    assert said.blocked.result == "ineffective"
    assert w.share("train") == 1.0


def test_a_new_name_does_not_make_a_held_cgroup_smaller_still(pair: World) -> None:
    pair.grow(40, by={"train": 0.2 * GIB})
    held = of(pair, CPU_MAX)[0]
    assert held.value == pytest.approx(0.2 * 2.0)
    pair.tenants = (
        pair.tenants[0],
        tenant("renamed", path="/system.slice/train.service"),
    )
    pair.outcomes = [
        Outcome(CPU_MAX, held.subject, 0.4, 0.4, float("inf"), "applied", "", pair.now)
    ]
    pair.memory_of["renamed"] = pair.memory_of.pop("train")
    pair.uses("renamed", cores=0.4)
    pair.grow(40, by={"renamed": 0.2 * GIB})
    values = [s.value for s in of(pair, CPU_MAX) if s.blocked is None]
    assert values == [] or min(values) >= 0.2 * 2.0 - 1e-9


def test_a_raised_floor_counts_at_once(pair: World) -> None:
    pair.grow(40, by={"train": 0.2 * GIB})
    assert pair.share("train") == pytest.approx(0.2)
    pair.tenants = (pair.tenants[0], tenant("train", floor=0.8))
    pair.grow(1, by={"train": 0.2 * GIB})
    assert pair.share("train") == pytest.approx(0.8)


def test_stale_tenants_are_let_go_however_fresh_the_cause(pair: World) -> None:
    pair.grow(8, by={"train": 1.0 * GIB})
    held = pair.share("train")
    pair.says_tenants = False
    pair.grow(25, by={"train": 0.1 * GIB})
    assert pair.share("train") <= held
    for _ in range(60):
        pair.grow(1, by={"train": 0.05 * GIB})
    assert pair.share("train") == 1.0


def test_cards_are_told_apart_in_what_is_said() -> None:
    w = World(Backpressure(Config()), gpus=[gpu("GPU-a", 0), gpu("GPU-b", 1)], tenants=[])
    for uuid in ("GPU-a", "GPU-b"):
        w.card(uuid, celsius=90)
    w.run(40)
    assert {h.subject for h in w.decision.holds} == {on_gpu("GPU-a"), on_gpu("GPU-b")}


def test_the_card_waits_until_the_levers_on_tenants_are_known() -> None:
    w = world(tenant("serve", Level.L1), tenant("train"))
    w.uses("train", utilization=0.8)
    known = dict(w.values)
    w.values = {k: v for k, v in w.values.items() if not k[0].name.endswith("cpu_cores")}
    w.card(celsius=84)
    w.run(6)
    assert not of(w, POWER_LIMIT)
    w.values = known
    w.card(celsius=84)
    w.run(3)
    assert of(w, CPU_MAX)[0].blocked is None
    assert not of(w, POWER_LIMIT)


def test_one_tenant_for_two_causes_is_held_once_for_the_worst() -> None:
    w = world(tenant("serve", Level.L1), tenant("train"))
    w.uses("train", utilization=0.8)
    w.run(12)
    w.card(celsius=84)
    w.grow(8, by={"train": 1.0 * GIB})
    kinds = {c.kind for c in w.decision.causes}
    assert kinds == {"memory", "temperature"}
    values = {s.value for s in of(w, CPU_MAX)}
    assert min(values) == pytest.approx(2.0 * w.share("train"))


def test_gone_tenants_are_forgotten(pair: World) -> None:
    pair.grow(6, by={"train": 1.0 * GIB})
    pair.tenants = pair.tenants[:1]
    pair.step()
    assert pair.decision.settings == ()
    assert pair.decision.holds == ()


def test_seat_helper_matches_the_hosts_shape() -> None:
    assert [s.path for s in seat("/a/b/c").above] == ["/a/b", "/a"]


def test_what_helps_a_little_against_heat_keeps_no_card_from_its_turn() -> None:
    w = world(tenant("train"))
    w.uses("train", utilization=0.9)
    celsius, both, hot = 96.0, False, 0
    for second in range(900):
        limited = min((s.value for s in of(w, POWER_LIMIT)), default=700.0)
        goal = 50 + 31 * limited / 700 + 15 * w.share("train")
        celsius += (goal - celsius) / 20
        w.card(celsius=round(celsius))
        w.step()
        both = both or (w.share("train") < 1.0 and bool(of(w, POWER_LIMIT)))
        hot += second > 300 and celsius >= 81
    assert both, "both, where one is not enough"
    assert hot < 150, "of 600 s"


def test_best_effort_that_comes_and_goes_shields_nobody() -> None:
    """A crowd of short-lived jobs without a usable lever: batch and the card are held all the same."""
    w = world(tenant("serve", Level.L1), tenant("batch", Level.L2))
    w.uses("batch", utilization=0.9)
    batch = w.tenants[1]
    held = 0
    for second in range(60):
        if second % 9 == 0:
            flash = msgspec.structs.replace(tenant("flash", refusal="shared"), since=w.now)
            w.tenants = (w.tenants[0], batch, flash)
            w.uses("flash", utilization=0.5)
        w.card(celsius=90)
        w.step()
        held += w.share("batch") < 1.0 or bool(of(w, POWER_LIMIT))
    assert held > 40
