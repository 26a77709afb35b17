"""The ladder beyond the first rungs: opt-in levers, reservations, notices, families that only say."""

from collections.abc import Sequence

import msgspec
import pytest

from gpuagent.config import Backpressure as Law
from gpuagent.config import Config
from gpuagent.decide.backpressure import Backpressure
from gpuagent.decide.merge import Violation, merge
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import (
    GpuProcess,
    Level,
    MpsClient,
    MpsDaemon,
    Notice,
    Place,
    Process,
    Tenant,
    on_cgroup,
    on_gpu,
    on_process,
    on_tenant,
    on_tenant_gpu,
)
from gpuagent.model.plan import Setting
from gpuagent.model.state import Outcome
from gpuagent.model.vocab import (
    CPU_MAX,
    GPU_MEMORY_FREE_BYTES,
    GPU_MEMORY_USED_BYTES,
    MPS_THREADS,
    NOTICED,
    RUNNING,
    SUSPENDED,
    TERMINATED,
)
from tests.decide.world import CARD, GIB, World, gpu, tenant

CHAT = tenant("chat", Level.L1, slo=0.1)
GENTLE = ("cpu_weight", "cpu_max")
LAWS = pytest.mark.parametrize("law", [Law(), Law(control="pi")], ids=["aimd", "pi"])


def process(pid: int) -> Process:
    return Process(pid, 100 * pid, 1, 1000, "u", "python3", "/usr/bin/python3", "/x")


def batch(
    levers: Sequence[str], *, name: str = "train", pids: Sequence[int] = (7, 8), **fields: object
) -> Tenant:
    made = tenant(name)
    some = tuple(process(p) for p in pids)
    return msgspec.structs.replace(made, levers=tuple(levers), processes=some, **fields)


def world(*others: Tenant, law: Law | None = None, chat: Tenant = CHAT) -> World:
    w = World(
        Backpressure(Config(backpressure=law or Law())), gpus=[gpu()], tenants=[chat, *others]
    )
    w.pressure(0.05, busy=0.3)
    w.latencies["chat"] = 0.05
    w.listed = tuple(
        GpuProcess(p.pid, CARD, "compute", GIB) for t in others for p in t.processes if p.pid != 9
    )
    w.run(12)
    return w


def tried(w: World) -> list[Setting]:
    return [s for s in w.decision.settings if s.blocked is None]


def suffer(w: World, seconds: int, latency: float = 0.12) -> None:
    """The latency stays over its objective, and every setting is made."""
    w.latencies["chat"] = latency
    for _ in range(seconds):
        w.step()
        w.outcomes = [
            Outcome(s.knob, s.subject, s.value, s.value, 1.0, "applied", "", w.now)
            for s in tried(w)
        ]


def test_what_is_not_allowed_is_never_pulled() -> None:
    w = world(batch(GENTLE))
    seen = set()
    for _ in range(300):
        suffer(w, 1)
        seen |= {s.knob for s in w.decision.settings}
    assert seen <= {CPU_MAX} | {s.knob for s in w.decision.settings if s.blocked}
    assert not seen & {RUNNING, SUSPENDED, TERMINATED}
    assert "no-lever-left" in w.events


@LAWS
def test_freezing_comes_after_cpu_max_has_had_its_time(law: Law) -> None:
    w = world(batch((*GENTLE, "freeze")), law=law)
    first = None
    for second in range(200):
        suffer(w, 1)
        if any(s.knob is RUNNING for s in tried(w)):
            first = second
            break
    assert first is not None
    assert first > law.time_box
    suffer(w, 8)
    [setting] = [s for s in tried(w) if s.knob is RUNNING]
    where = w.tenants[1].seats[0]
    assert setting.subject == on_cgroup("train", where.path, where.inode)
    assert 0.2 <= setting.value < 1.0
    assert "frozen in pulses" in setting.why
    assert w.share("train") == pytest.approx(setting.value)


def test_a_slurm_job_is_not_frozen_for_it_may_span_hosts() -> None:
    job = batch((*GENTLE, "freeze"), places=(Place(slurm_job="12"),))
    w = world(job)
    suffer(w, 120)
    blocked = [s for s in w.decision.settings if s.knob is RUNNING]
    assert [s.blocked.result for s in blocked if s.blocked] == ["refused"]
    assert "span hosts" in (blocked[0].blocked.why if blocked[0].blocked else "")


@LAWS
def test_suspending_takes_every_process_on_the_card_at_once(law: Law) -> None:
    w = world(batch(("suspend",), pids=(7, 8, 9)), law=law)
    suffer(w, 6)
    assert {s.subject for s in tried(w)} == {
        on_process("train", 7, 700),
        on_process("train", 8, 800),
    }
    assert {(s.knob, s.value) for s in tried(w)} == {(SUSPENDED, 1.0)}
    assert w.share("train") == 0.0


@LAWS
def test_it_is_resumed_once_the_trouble_is_over_and_does_not_saw(law: Law) -> None:
    w = world(batch(("suspend",)), law=law)
    suffer(w, 10)
    changes, was = 0, True
    for _ in range(900):  # relieved while it is suspended, in trouble as soon as it runs
        suffer(w, 1, latency=0.05 if was else 0.12)
        now = any(s.knob is SUSPENDED for s in tried(w))
        changes += now is not was
        was = now
    assert 2 <= changes <= 2 * 900 / 60, "at most one reversal a minute, and it is tried again"


@LAWS
def test_who_is_suspended_stays_so_although_the_driver_lists_it_no_more(law: Law) -> None:
    w = world(batch(("suspend",)), law=law)
    suffer(w, 6)
    assert len(tried(w)) == 2
    w.listed = ()
    w.tenants = (w.tenants[0], msgspec.structs.replace(w.tenants[1], gpus=()))
    suffer(w, 15, latency=0.05)
    assert len(tried(w)) == 2
    suffer(w, 15)
    assert len(tried(w)) == 2


def test_an_mps_client_gets_less_at_its_next_launch_whichever_lever_is_in_use() -> None:
    w = world(batch(("mps", *GENTLE)))
    suffer(w, 6)
    assert {s.knob for s in tried(w)} == {CPU_MAX}
    w.mps = (MpsDaemon("main", up=True, clients=(MpsClient(7, 3),)),)
    suffer(w, 6)
    assert {s.knob for s in tried(w)} == {CPU_MAX, MPS_THREADS}
    [threads] = [s for s in tried(w) if s.knob is MPS_THREADS]
    assert threads.value == pytest.approx(w.share("train"))


SHARED = MpsDaemon("main", up=True, clients=(MpsClient(7, 3), MpsClient(50, 3)))
APART = MpsDaemon("main", up=True, clients=(MpsClient(7, 3), MpsClient(50, 4)))
STRANGER = MpsDaemon("main", up=True, clients=(MpsClient(7, 3), MpsClient(99, 3)))
UNREAD = MpsDaemon("main", up=True, why="server 3 does not answer", clients=(MpsClient(7, 3),))
DOWN = MpsDaemon("main", up=False, why="no daemon")


@pytest.mark.parametrize(
    ("daemons", "why"),
    [
        ((APART,), ""),
        ((SHARED,), "chat (L1)"),
        ((STRANGER,), "process 99"),
        ((UNREAD,), "not known"),
        ((DOWN,), "not known"),
        ((), "not known"),
        (None, "not known"),
    ],
)
def test_an_mps_client_is_frozen_only_where_its_server_is_known_to_work_for_no_l1(
    daemons: tuple[MpsDaemon, ...] | None, why: str
) -> None:
    chat = msgspec.structs.replace(CHAT, processes=(process(50),))
    w = world(batch(("freeze",), pids=(7,)), chat=chat)
    w.listed = tuple(msgspec.structs.replace(p, kind="mps") for p in w.listed or ())
    w.mps = daemons
    suffer(w, 6)
    [setting] = [s for s in w.decision.settings if s.knob is RUNNING]
    said = setting.blocked.why if setting.blocked else ""
    assert bool(said) == bool(why)
    assert why in said


def test_ending_is_the_last_of_all() -> None:
    w = world(batch((*GENTLE, "freeze", "suspend", "terminate")))
    order: list[str] = []
    for _ in range(600):
        suffer(w, 1)
        for s in tried(w):
            if s.knob.name not in order:
                order.append(s.knob.name)
    assert order == [k.name for k in (CPU_MAX, RUNNING, SUSPENDED, TERMINATED)]


def refuse(w: World, knob: Knob) -> None:
    """What was tried of a knob is refused; everything else is made."""
    w.outcomes = [
        Outcome(s.knob, s.subject, s.value, None, None, "refused", "no such tool", w.now)
        if s.knob is knob
        else Outcome(s.knob, s.subject, s.value, s.value, 1.0, "applied", "", w.now)
        for s in tried(w)
    ]


@LAWS
def test_a_gentler_lever_that_is_refused_is_no_reason_to_end_anybody_sooner(law: Law) -> None:
    w = world(batch(("suspend", "terminate")), law=law)
    w.latencies["chat"] = 0.2
    refused_at = ended_at = None
    for second in range(120):
        w.step()
        if any(s.knob is SUSPENDED for s in tried(w)):
            refused_at = second
        if any(s.knob is TERMINATED for s in tried(w)):
            ended_at = second
            break
        refuse(w, SUSPENDED)
    assert refused_at is not None
    assert ended_at is not None
    assert ended_at - refused_at >= law.time_box


def test_nobody_is_ended_for_trouble_that_is_shorter_than_a_time_box() -> None:
    w = world(batch(("terminate",)))
    suffer(w, 25)
    assert tried(w) == []
    suffer(w, 15)
    assert {s.knob for s in tried(w)} == {TERMINATED}


def test_who_is_suspended_for_one_cause_is_not_frozen_for_another() -> None:
    w = promised(("freeze", "suspend"))
    suffer(w, 10)
    assert {s.knob for s in tried(w)} == {SUSPENDED}


def test_a_tenant_without_a_cgroup_can_be_suspended() -> None:
    w = world(batch(("suspend",), seats=()))
    suffer(w, 6)
    assert {s.knob for s in tried(w)} == {SUSPENDED}


def test_heat_ends_nobody() -> None:
    hot = batch(("terminate", "suspend"))
    w = world(hot)
    w.uses("train", utilization=0.9)
    w.card(celsius=90)
    w.run(300)
    assert not [s for s in w.decision.settings if s.knob in {SUSPENDED, TERMINATED}]


def test_of_a_family_that_is_only_observed_it_is_said_what_would_be_done() -> None:
    shown = batch(("cpu_max", "suspend"), observed=("cpu_max",))
    w = world(shown)
    suffer(w, 10)
    [said] = [s for s in w.decision.settings if s.knob is CPU_MAX]
    assert said.blocked is not None
    assert said.blocked.result == "would"
    assert {s.knob for s in tried(w)} == {SUSPENDED}


def test_a_tenant_that_is_only_observed_does_not_stand_before_the_next() -> None:
    shown = batch(GENTLE, observed=GENTLE)
    w = world(shown, batch(GENTLE, name="other", pids=(20,)))
    suffer(w, 10)
    assert {s.subject.tenant for s in tried(w)} == {"other"}
    assert ("train", "would") in {
        (s.subject.tenant, s.blocked.result) for s in w.decision.settings if s.blocked
    }


def test_the_notice_goes_out_with_the_first_cut_and_ends_with_the_last() -> None:
    asked = batch(("notice", *GENTLE), notice=Notice("SIGUSR1"))
    w = world(asked)
    suffer(w, 5)
    [notice] = [s for s in tried(w) if s.knob is NOTICED]
    assert (notice.subject, notice.value) == (on_tenant("train"), 1.0)
    suffer(w, 300, latency=0.03)
    assert tried(w) == []


def test_without_a_signal_or_command_there_is_no_notice() -> None:
    w = world(batch(("notice", *GENTLE)))
    suffer(w, 5)
    assert {s.knob for s in tried(w)} == {CPU_MAX}


# -- reservations ----------------------------------------------------------------------------------------


def promised(levers: Sequence[str], *, reserved: int = 40, level: Level = Level.L1) -> World:
    """80 GiB: `chat` was promised some and uses 10, `train` uses 50."""
    limits = msgspec.structs.replace(CHAT.limits, memory_reserved_bytes=reserved * GIB)
    chat = msgspec.structs.replace(CHAT, level=level, limits=limits)
    w = world(batch(levers), chat=chat)
    fill(w, chat=10, train=50)
    return w


def fill(w: World, **gib: float) -> None:
    used = sum(gib.values()) * GIB
    w.values[GPU_MEMORY_USED_BYTES, on_gpu(CARD)] = used
    w.values[GPU_MEMORY_FREE_BYTES, on_gpu(CARD)] = 80.0 * GIB - used
    for name, size in gib.items():
        w.uses(name, memory=size * GIB)


def test_a_reservation_that_is_not_met_suspends_the_less_important() -> None:
    w = promised(("cpu_max", "suspend"))
    w.run(6)
    [cause] = [c for c in w.decision.causes if c.kind == "reserved"]
    assert cause.subject == on_tenant_gpu("chat", CARD)
    assert cause.why == "chat was promised 40 GiB of GPU 0; it uses 10 GiB and 20 GiB are free"
    assert {s.knob for s in tried(w)} == {SUSPENDED}
    fill(w, chat=10, train=0)
    w.run(30)
    assert not [c for c in w.decision.causes if c.kind == "reserved"]


def test_slowing_it_helps_a_reservation_only_while_its_memory_grows() -> None:
    w = promised(("cpu_max",))
    w.run(12)
    assert tried(w) == []
    for size in range(51, 63):
        fill(w, chat=10, train=size)
        w.step()
    assert {s.knob for s in tried(w)} == {CPU_MAX}


def test_a_reservation_that_is_met_or_cannot_be_met_holds_nobody() -> None:
    for w in (promised(("suspend",), reserved=25), promised(("suspend",), level=Level.L3)):
        w.run(20)
        assert tried(w) == []
    alone = promised(("suspend",), reserved=200)
    fill(alone, chat=30, train=0)
    alone.run(20)
    assert tried(alone) == []


# -- the invariant ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("knob", [SUSPENDED, TERMINATED, NOTICED, RUNNING])
def test_a_plan_that_turns_an_l1_tenants_own_knob_is_a_bug(knob: Knob) -> None:
    w = world(batch(GENTLE))
    where = CHAT.seats[0]
    subject = {
        SUSPENDED: on_process("chat", 7, 1),
        TERMINATED: on_process("chat", 7, 1),
        NOTICED: on_tenant("chat"),
        RUNNING: on_cgroup("chat", where.path, where.inode),
    }[knob]
    with pytest.raises(Violation, match=r"chat \(L1\)"):
        merge([Setting(knob, subject, 0.5, why="", rule="backpressure/latency")], w.state)
    declared = Setting(knob, subject, 0.5, why="", rule="limits/host_memory")
    assert merge([declared], w.state).settings


@pytest.mark.parametrize(("levers", "observed"), [((), ()), (("freeze",), ("freeze",))])
def test_a_lever_that_a_reload_takes_out_of_the_rule_is_let_go_at_once(
    levers: tuple[str, ...], observed: tuple[str, ...]
) -> None:
    w = world(batch(("freeze",)))
    suffer(w, 6)
    assert {s.knob for s in tried(w)} == {RUNNING}
    train = msgspec.structs.replace(w.tenants[1], levers=levers, observed=observed)
    w.tenants = (w.tenants[0], train)
    suffer(w, 1)
    assert tried(w) == []
    assert w.events[-1] == "released"
