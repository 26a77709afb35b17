"""Overrides as settings: what they win over, what they never do, and that nobody takes fright at them."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.config import Config, Power
from gpuagent.decide import POLICIES
from gpuagent.decide.backpressure import Backpressure
from gpuagent.decide.merge import Violation, check, merge
from gpuagent.decide.overrides import Overrides
from gpuagent.leases import used_in
from gpuagent.model.inventory import Level, Tenant, on_cgroup, on_gpu, on_tenant
from gpuagent.model.lease import Lease, Used
from gpuagent.model.plan import Decision, Plan, Setting
from gpuagent.model.state import Frame, Outcome
from gpuagent.model.vocab import CPU_MAX, CPU_WEIGHT, POWER_LIMIT
from gpuagent.record import decode, encode, replay
from tests.decide.world import CARD, GIB, World, gpu, tenant

CONFIG = Config()
SERVE = tenant("serve", Level.L1)
TRAIN = tenant("train")
BATCH = tenant("batch", Level.L2)


def lease(
    value: float = 0.5, *, on: str = "train", name: str = "quiet", until: float = 1e9
) -> Lease:
    subject = on_gpu(on) if on.startswith("GPU-") else on_tenant(on)
    return Lease(
        name,
        subject,
        value,
        3600.0,
        "user 0",
        "a demo",
        until=until,
        until_wall=2e9,
        created_wall=1e9,
    )


class Node(World):
    """A world with all policies, and lanes that do at once what the plan says."""

    def __init__(
        self,
        *tenants: Tenant,
        config: Config = CONFIG,
        cards: Sequence[Any] = (),
    ) -> None:
        self.all = [make(config) for make in POLICIES]
        super().__init__(Overrides(config), gpus=cards or [gpu()], tenants=tenants)
        self.memories: dict[str, Any] = {p.name: p.begin() for p in self.all}
        self.plan = Plan()
        self.plans: list[Plan] = []
        self.leases: tuple[Lease, ...] = ()
        self.heard: list[str] = []
        self.policy = self  # what the world asks

    name = "all"

    def begin(self) -> None:
        return None

    def decide(self, _memory: None, state: Any) -> tuple[None, Decision]:
        state.leases = self.leases
        self.frames[-1] = msgspec.structs.replace(self.frames[-1], leases=self.leases)
        decisions = []
        for policy in self.all:
            self.memories[policy.name], decision = policy.decide(self.memories[policy.name], state)
            decisions.append(decision)
        self.plan = merge((s for d in decisions for s in d.settings), state)
        self.plans.append(self.plan)
        self.outcomes = [
            Outcome(s.knob, s.subject, s.value, s.value, s.value + 1e3, "applied", "", self.now)
            for s in self.plan.settings
            if s.blocked is None and self.acts
        ]
        events = tuple(e for d in decisions for e in d.events)
        self.heard += [e.kind for e in events]
        return None, Decision(
            settings=self.plan.settings,
            holds=tuple(h for d in decisions for h in d.holds),
            events=events,
            look_again=min((d.look_again for d in decisions if d.look_again), default=None),
        )

    def of(self, name: str) -> dict[str, Setting]:
        """The settings on a tenant that are tried, by knob."""
        return {
            s.knob.name: s
            for s in self.plan.settings
            if s.subject.tenant == name and s.blocked is None
        }


def hot(node: Node, seconds: int) -> None:
    node.card(celsius=90)
    node.run(seconds)


def test_a_tenant_is_held_to_its_share_without_any_cause() -> None:
    node = Node(SERVE, TRAIN)
    node.run(11)
    node.leases = (lease(),)
    decision = node.step()
    (setting,) = node.of("train").values()
    assert (setting.knob, setting.value, setting.rule) == (CPU_MAX, 1.0, "override/quiet")
    assert "50% of the 2.00 it used before" in setting.why
    assert 'override quiet of user 0 until 2033-05-18 03:33:20 UTC: "a demo"' in setting.why
    (hold,) = decision.holds
    assert (hold.share, hold.cause, hold.rung) == (0.5, "override", "cpu_max")
    assert decision.look_again == 1e9
    node.uses("train", cores=1.0)  # it is held now: that is no reason to hold it further
    node.run(300)
    assert node.of("train")["cgroup_cpu_max"].value == 1.0
    node.leases = ()
    node.step()
    assert not node.of("train")
    assert node.heard == ["override-set", "override-dropped"]


def test_one_whose_time_is_over_has_expired() -> None:
    node = Node(TRAIN)
    node.leases = (lease(until=1003.0),)
    node.run(2)
    node.leases = ()
    node.run(2)
    assert node.heard == ["override-set", "override-expired"]


def test_it_wins_over_what_the_policies_wish_tighter_or_looser() -> None:
    node = Node(SERVE, TRAIN)
    node.run(5)
    hot(node, 40)
    before = node.of("train")["cgroup_cpu_max"]
    assert before.value == pytest.approx(0.4), "at its floor"
    node.leases = (lease(0.8),)
    node.step()
    after = node.of("train")["cgroup_cpu_max"]
    assert after.value == pytest.approx(1.6)
    assert after.rule == "override/quiet"
    node.leases = (lease(0.2),)
    node.step()
    assert node.of("train")["cgroup_cpu_max"].value == pytest.approx(0.4)


def test_who_is_left_alone_is_not_held_for_any_cause() -> None:
    node = Node(SERVE, TRAIN)
    node.run(5)
    hot(node, 20)
    assert node.of("train")
    node.leases = (lease(1.0),)
    node.run(5)
    assert not node.of("train")


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_no_lever_is_judged_by_what_an_override_did(share: float) -> None:
    """Longer than every time box: nothing is let go as ineffective."""
    node = Node(SERVE, TRAIN)
    node.run(5)
    node.pressure(0.9)
    node.run(40)
    assert "backpressure/cpu" in {s.rule for s in node.of("train").values()}
    node.leases = (lease(share),)
    node.run(300)
    assert {s.rule for s in node.of("train").values()} <= {"override/quiet"}
    assert "lever-let-go" not in node.heard
    assert node.memories["backpressure"].futile == ()
    node.leases = ()
    node.run(10)
    assert "backpressure/cpu" in {s.rule for s in node.of("train").values()}


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_when_it_ends_others_go_on_from_what_the_tenant_used_before(share: float) -> None:
    node = Node(SERVE, TRAIN)
    node.run(15)
    node.leases = (lease(share),)
    node.run(3)
    if share < 1.0:
        node.uses("train", cores=2.0 * share)
    hot(node, 100)
    node.leases = ()
    node.run(4)
    setting = node.of("train")["cgroup_cpu_max"]
    assert setting.rule == "backpressure/temperature"
    assert setting.value == pytest.approx(1.4)


def test_the_others_are_held_in_its_place() -> None:
    node = Node(SERVE, BATCH, TRAIN)
    node.run(5)
    node.leases = (lease(1.0),)
    hot(node, 20)
    assert not node.of("train")
    assert node.of("batch")


def test_its_floor_and_protection_hold_when_they_come_later() -> None:
    node = Node(SERVE, TRAIN)
    node.run(11)
    node.leases = (lease(0.3),)
    node.step()
    node.tenants = (SERVE, tenant("train", floor=0.6))
    node.step()
    assert node.of("train")["cgroup_cpu_max"].value == pytest.approx(1.2)
    for other in (tenant("train", Level.L1), tenant("train", enforce=False)):
        node.tenants = (SERVE, other)
        node.run(15)
        assert not node.of("train")
    assert node.heard.count("override-refused") == 1


def test_a_tenant_that_leaves_is_held_again_when_it_returns() -> None:
    node = Node(SERVE, TRAIN)
    node.leases = (lease(),)
    node.run(12)
    assert node.of("train")
    node.tenants = (SERVE,)
    node.run(120)
    assert not node.plan.settings
    node.tenants = (SERVE, TRAIN)
    node.run(12)
    assert node.of("train")
    assert node.heard == ["override-set"], "that it is away is no refusal"


def test_an_l1_below_the_cgroup_is_never_turned() -> None:
    inside = msgspec.structs.replace(
        SERVE,
        seats=(msgspec.structs.replace(SERVE.seats[0], path="/system.slice/train.service/x"),),
    )
    node = Node(inside, TRAIN)
    node.leases = (lease(),)
    node.run(12)
    assert not node.of("train")
    (blocked,) = (s for s in node.plan.settings if s.subject.tenant == "train")
    assert blocked.blocked is not None
    assert blocked.blocked.why == "serve (L1) lives there"
    assert node.heard == ["override-set", "override-refused"]


def test_the_check_still_guards() -> None:
    node = Node(SERVE, TRAIN)
    node.step()
    seat = SERVE.seats[0]
    wrong = Setting(CPU_MAX, on_cgroup("serve", seat.path, seat.inode), 1.0, "", "override/x")
    with pytest.raises(Violation, match=r"serve \(L1\) lives"):
        check(Plan((wrong,)), node.state)


def test_a_card_gets_what_is_ordered_within_its_range() -> None:
    node = Node(TRAIN)
    node.step()
    for watts, real in ((300.0, 300.0), (100.0, 200.0), (900.0, 700.0)):
        node.leases = (lease(watts, on=CARD),)
        node.step()
        (setting,) = node.plan.settings
        assert (setting.knob, setting.value) == (POWER_LIMIT, real)


def test_a_card_never_gets_more_than_the_budget_or_the_heat_allows() -> None:
    config = Config(power=Power(budget=500))
    node = Node(config=config)
    node.run(15)
    for watts in (600.0, 300.0):
        node.leases = (lease(watts, on=CARD),)
        node.step()
        (setting,) = node.plan.settings
        assert setting.value == min(500.0, watts)
        assert {"override/quiet", "power/budget"} == {setting.rule, *setting.also}
        assert setting.purpose == "power/budget", "a crash leaves what serves the budget"
    node.leases = (lease(600.0, on=CARD),)
    hot(node, 60)
    (setting,) = node.plan.settings
    assert setting.value < 500.0
    assert setting.rule == "backpressure/temperature"


def test_the_card_of_an_l1_is_limited_with_an_alert() -> None:
    node = Node(SERVE)
    node.step()
    node.leases = (lease(300.0, on=CARD),)
    node.run(3)
    assert node.heard == ["override-set", "l1-card-limited"]


def test_that_alert_comes_whenever_it_is_first_so() -> None:
    node = Node(TRAIN)
    node.acts = False
    node.leases = (lease(300.0, on=CARD),)
    node.run(3)
    node.tenants = (SERVE, TRAIN)
    node.run(3)
    assert node.heard == ["override-set"], "while it observes nothing is limited"
    node.acts = True
    node.run(3)
    assert node.heard == ["override-set", "l1-card-limited"]
    node.tenants = (SERVE, TRAIN, tenant("other", Level.L1))
    node.run(3)
    assert node.heard.count("l1-card-limited") == 2
    node.acts = False
    node.run(3)
    node.acts = True
    node.run(3)
    assert node.heard.count("l1-card-limited") == 2, "of each it has been told"
    node.leases = (lease(250.0, on=CARD),)
    node.run(3)
    assert node.heard.count("l1-card-limited") == 4, "another limit is news"


def restarted(cores: float) -> Node:
    """A tenant that has just started, while an override of an earlier day is on it."""
    node = Node(SERVE, TRAIN)
    node.leases = (lease(),)
    node.uses("train", cores=cores)
    return node


def test_a_tenant_that_has_just_started_is_not_held_to_a_share_of_its_first_seconds() -> None:
    node = restarted(0.3)
    node.run(2)
    assert not node.of("train"), "it loads"
    node.uses("train", cores=8.0)
    node.run(8)
    assert not node.of("train")
    node.run(2)
    assert node.of("train")["cgroup_cpu_max"].value == 4.0
    node.run(100)
    assert node.of("train")["cgroup_cpu_max"].value == 4.0
    assert node.heard == ["override-set"], "that it waits is no refusal"


def test_after_a_restart_of_the_agent_a_share_is_of_what_was_used_before() -> None:
    node = restarted(0.3)  # it writes a checkpoint
    seat = TRAIN.seats[0]
    node.leases = (
        msgspec.structs.replace(lease(), used=(Used(seat.path, seat.inode, 8.0),), resumed=True),
    )
    node.step()
    assert node.of("train")["cgroup_cpu_max"].value == 4.0
    node.run(100)
    assert node.of("train")["cgroup_cpu_max"].value == 4.0
    assert node.heard == [], "the run before has told of it"


def test_what_another_cgroup_used_says_nothing() -> None:
    node = restarted(2.0)
    seat = TRAIN.seats[0]
    node.leases = (msgspec.structs.replace(lease(), used=(Used(seat.path, seat.inode + 1, 8.0),)),)
    node.run(5)
    assert not node.of("train")
    node.run(7)
    assert node.of("train")["cgroup_cpu_max"].value == 1.0


def test_what_was_used_is_told_for_the_next_run() -> None:
    node = Node(SERVE, TRAIN)
    node.leases = (lease(),)
    node.run(12)
    seat = TRAIN.seats[0]
    assert used_in(node.plan) == {"quiet": (Used(seat.path, seat.inode, 2.0),)}


def test_one_that_goes_on_after_a_restart_is_not_set_once_more() -> None:
    node = Node(TRAIN)
    node.leases = (msgspec.structs.replace(lease(), resumed=True),)
    node.run(3)
    assert node.heard == []
    node.leases = (lease(0.7),)
    node.step()
    node.leases = ()
    node.step()
    assert node.heard == ["override-set", "override-dropped"]


def test_while_observing_it_is_said_and_nothing_is_remembered() -> None:
    node = Node(SERVE, TRAIN)
    node.acts = False
    node.leases = (lease(),)
    node.run(12)
    assert node.of("train")["cgroup_cpu_max"].value == 1.0
    node.uses("train", cores=4.0)
    node.run(20)
    assert node.of("train")["cgroup_cpu_max"].value == 2.0, "as it would be now"


def test_without_knowing_who_is_where_nobody_is_held() -> None:
    node = Node(SERVE, TRAIN)
    node.leases = (lease(),)
    node.run(3)
    node.says_tenants = False
    node.run(40)
    assert not node.of("train")


def test_what_is_refused_on_the_host_is_said_once() -> None:
    policy = Overrides(CONFIG)
    world = World(
        policy, gpus=[gpu()], tenants=[SERVE, tenant("train", refusal="shared with sshd")]
    )
    memory = policy.begin()
    kinds = []
    for _ in range(60):
        world.step()
        world.state.leases = (lease(),)
        memory, decision = policy.decide(memory, world.state)
        kinds += [e.kind for e in decision.events]
        assert all(s.blocked is not None for s in decision.settings)
    assert kinds == ["override-set", "override-refused"]


def test_other_wishes_for_its_knobs_count_for_nothing() -> None:
    node = Node(SERVE, TRAIN, BATCH)
    node.step()
    node.state.leases = (lease(1.0),)
    seats = {t.name: on_cgroup(t.name, t.seats[0].path, t.seats[0].inode) for t in (TRAIN, BATCH)}
    wishes = [
        Setting(knob, seats[name], 1.0, "", "another/policy")
        for knob in (CPU_MAX, CPU_WEIGHT)
        for name in seats
    ]
    assert {s.subject.tenant for s in merge(wishes, node.state).settings} == {"batch"}


# -- any course of things ------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["set", "drop", "hot", "cool", "grow", "pause", "act", "wall"]),
        st.sampled_from(["train", "batch", "serve", "nobody", CARD]),
        st.floats(0.05, 1.0),
        st.integers(1, 8),
    ),
    max_size=12,
)


@given(STEPS)
def test_whatever_is_ordered_the_safe_range_holds_and_it_replays(
    steps: list[tuple[str, str, float, int]],
) -> None:
    config = Config(power=Power(budget=600))
    node = Node(SERVE, BATCH, TRAIN, config=config)
    node.run(3)
    for what, on, value, seconds in steps:
        leases = {x.id: x for x in node.leases}
        if what == "set":
            leases[on] = lease(value * 700 if on == CARD else value, on=on, name=on)
        elif what == "drop":
            leases.pop(on, None)
        elif what in ("hot", "cool"):
            node.card(celsius=90 if what == "hot" else 50)
        elif what == "grow":
            node.grow(seconds, by={"train": GIB})
        elif what in ("pause", "act"):
            node.acts = what == "act"
        node.leases = tuple(leases[n] for n in sorted(leases))
        node.run(seconds)
        for setting in node.plan.settings:
            if setting.blocked is not None:
                continue
            assert setting.subject.tenant != "serve"
            if setting.knob is POWER_LIMIT:
                assert 200 <= setting.value <= 600
            if setting.knob is CPU_MAX:
                assert 0.2 * 2.0 - 1e-9 <= setting.value <= 2.0
    frames = wall_steps(node.frames)
    assert replay(frames, [make(config) for make in POLICIES]) == node.plans
    assert replay(decode(encode(frames)), [make(config) for make in POLICIES]) == node.plans


def wall_steps(frames: list[Frame]) -> list[Frame]:
    """The same with a wall clock that jumps about."""
    return [
        msgspec.structs.replace(
            f, now=msgspec.structs.replace(f.now, wall=f.now.wall + (-1) ** n * 1e7 * (n % 5))
        )
        for n, f in enumerate(frames)
    ]


def test_backpressure_alone_lets_go_of_whom_somebody_else_decides_on() -> None:
    world = World(Backpressure(CONFIG), gpus=[gpu()], tenants=[SERVE, TRAIN])
    world.run(5)
    world.card(celsius=90)
    world.run(10)
    assert world.share("train") < 1.0
    world.state.leases = (lease(1.0),)
    memory, decision = world.policy.decide(world.memory, world.state)
    assert decision.settings == ()
    assert memory.held == ()
