"""Defaults of MPS daemons are wished only where nobody that they could reach is L1."""

import msgspec
import pytest

from gpuagent import config
from gpuagent.config import Config, MpsGroup
from gpuagent.decide.mps import DEFAULT_RULE, Memory, MpsGroups
from gpuagent.model.declare import OWN_DAEMON_RULE
from gpuagent.model.inventory import Inventory, Level, MpsDaemon, Tenant, on_mps
from gpuagent.model.plan import Decision, Setting
from gpuagent.model.state import Instant, NodeState, Outcome, Result
from gpuagent.model.vocab import MPS_DAEMON, MPS_DEFAULT_THREADS
from tests.fakes.mps.values import daemon
from tests.sense.fakes import process

CARD, OTHER = "GPU-1", "GPU-2"
GROUP = MpsGroup("g", gpus=(CARD,), default_threads=0.5)


def policy(*groups: MpsGroup) -> MpsGroups:
    return MpsGroups(Config(mps=config.Mps(groups=groups or (GROUP,))))


def someone(name: str, level: Level, *pids: int, gpus: tuple[str, ...] = ()) -> Tenant:
    return Tenant(name, level, processes=tuple(process(p) for p in pids), gpus=gpus)


def state(
    *tenants: Tenant, mps: tuple[MpsDaemon, ...] | None = (), heard: float = 100.0
) -> NodeState:
    return NodeState(
        Instant(100.0, 1e9), inventory=Inventory(tenants=tenants, tenants_at=heard, mps=mps)
    )


def wished(decision: Decision) -> Setting:
    (setting,) = decision.settings
    return setting


def decided(*tenants: Tenant, clients: dict[int, int]) -> Setting:
    known = state(*tenants, mps=(daemon(clients=clients, gpus=(CARD,)),))
    return wished(policy().decide(Memory(), known)[1])


def test_a_default_where_all_are_l2_or_l3() -> None:
    setting = decided(
        someone("train", Level.L3, 20), someone("infer", Level.L2, 30), clients={20: 7, 30: 7}
    )
    assert (setting.knob, setting.subject, setting.value, setting.rule, setting.blocked) == (
        MPS_DEFAULT_THREADS,
        on_mps("g"),
        0.5,
        DEFAULT_RULE,
        None,
    )
    assert "50%" in setting.why


@pytest.mark.parametrize(
    ("tenant", "clients", "why"),
    [
        (someone("serve", Level.L1, 30), {30: 7}, "serve (L1) is a client of it"),
        (someone("serve", Level.L1, 30, gpus=(CARD,)), {}, "serve (L1) uses a card of it"),
        (someone("train", Level.L3, 30), {31: 7}, "whose its client 31 is"),
    ],
)
def test_no_default_where_it_could_reach_an_l1(
    tenant: Tenant, clients: dict[int, int], why: str
) -> None:
    blocked = decided(tenant, clients=clients).blocked
    assert blocked is not None
    assert blocked.result == "refused"
    assert why in blocked.why


def test_no_default_while_some_of_its_clients_may_not_be_known() -> None:
    here = msgspec.structs.replace(daemon(gpus=(CARD,)), why="server 7 has not answered")
    blocked = wished(policy().decide(Memory(), state(mps=(here,)))[1]).blocked
    assert blocked is not None
    assert blocked.result == "refused"
    assert "server 7 has not answered" in blocked.why


def test_an_l1_on_another_card_is_no_hindrance() -> None:
    assert decided(someone("serve", Level.L1, 30, gpus=(OTHER,)), clients={}).blocked is None


def test_nothing_new_is_wished_while_it_is_not_known_who_is_there() -> None:
    asked = policy()
    here = (daemon(clients={20: 7}, gpus=(CARD,)),)
    train = someone("train", Level.L3, 20)
    memory, decision = asked.decide(Memory(), state(train, mps=here, heard=0.0))
    assert (decision.settings, decision.complete) == ((), False)
    memory, decision = asked.decide(memory, state(train, mps=here))
    assert (wished(decision).value, decision.complete) == (0.5, True)
    memory, decision = asked.decide(memory, state(train, mps=here, heard=0.0))
    assert (wished(decision).value, decision.complete) == (0.5, False), "as it was"
    memory, decision = asked.decide(memory, state(train, mps=None))
    assert wished(decision).value == 0.5
    # The group is configured otherwise by now.
    changed = policy(msgspec.structs.replace(GROUP, default_threads=0.7))
    assert changed.decide(memory, state(train, mps=None))[1].settings == ()


def test_a_daemon_that_nobody_has_met_is_left_alone() -> None:
    assert policy().decide(Memory(), state(mps=()))[1].settings == ()


def test_a_daemon_of_our_own_is_wished_whatever_is_known() -> None:
    own = MpsGroup("g", gpus=(CARD,), own=True)
    for known in (state(mps=None), state(mps=(), heard=0.0)):
        decision = policy(own).decide(Memory(), known)[1]
        setting = wished(decision)
        assert (setting.knob, setting.value, setting.rule) == (MPS_DAEMON, 1.0, OWN_DAEMON_RULE)
        assert decision.complete
    assert MpsGroups(Config()).decide(Memory(), state())[1] == Decision()


def test_one_of_our_own_that_cannot_be_started_is_told_of_once() -> None:
    rule, memory = policy(MpsGroup("g", gpus=(CARD,), own=True)), Memory()
    told = []
    results: tuple[Result, ...] = (
        "in flight",
        "refused",
        "refused",
        "contested",
        "pending",
        "refused",
    )
    for result in results:
        here = state()
        key = (MPS_DAEMON, on_mps("g"))
        here.outcomes = {key: Outcome(*key, 1.0, 0.0, None, result, "no such program", 0.0)}
        memory, decision = rule.decide(memory, here)
        told.append([e.kind for e in decision.events])
        assert all(e.alert and "no such program" in e.text for e in decision.events)
    assert told == [[], ["mps-unstarted"], [], [], [], ["mps-unstarted"]]
