"""What fits, on which cards, and why not: never more than there is, whoever asks for what."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.config import LevelRule, Levels
from gpuagent.decide.admission import (
    Grant,
    Ground,
    admit,
    owed_bytes,
    promised_share_ratio,
    unshared,
)
from gpuagent.model.inventory import (
    Gpu,
    Inventory,
    Level,
    Limits,
    MpsDaemon,
    Tenant,
    on_gpu,
    on_tenant_gpu,
)
from gpuagent.model.run import MOST_RUNS_OF_USER, Refusal, Reservation, RunAsk, Starter
from gpuagent.model.state import Instant, NodeState, Reading
from gpuagent.model.vocab import (
    GPU_MEMORY_FREE_BYTES,
    GPU_MEMORY_TOTAL_BYTES,
    TENANT_GPU_MEMORY_BYTES,
)
from tests.decide.world import GIB, gpu

NOON = 12 * 3600.0
ANYBODY = (Starter(None, None, (Level.L1, Level.L2, Level.L3)),)
UUIDS = ("GPU-a", "GPU-b", "GPU-c")


def asking(**fields: object) -> RunAsk:
    given_: dict[str, object] = {
        "pid": 100,
        "started": 1,
        "uid": 1000,
        "by": "user 1000",
        "level": Level.L3,
        "memory_bytes": 8 * GIB,
    }
    return msgspec.convert(_plain(given_ | fields), RunAsk)


def reserved(name: str, *gpus: str, memory: int | None = 0, **fields: object) -> Reservation:
    given_: dict[str, object] = {
        "name": name,
        "level": Level.L3,
        "pid": sum(map(ord, name)),
        "started": 1,
        "uid": 1000,
        "by": "user 1000",
        "gpus": gpus,
        "memory_bytes": memory or None,
        "began_wall": 0.0,
    }
    return msgspec.convert(_plain(given_ | fields), Reservation)


def _plain(fields: dict[str, object]) -> object:
    """Levels may be given by name."""
    level = fields["level"]
    return msgspec.to_builtins(
        fields | {"level": Level[level] if isinstance(level, str) else level}
    )


def ground(
    *,
    cards: Sequence[Gpu] | None = None,
    free: dict[str, float] | None = None,
    used: dict[tuple[str, str], float] | None = None,
    tenants: Sequence[Tenant] = (),
    runs: Sequence[Reservation] = (),
    starters: tuple[Starter, ...] = ANYBODY,
    levels: Levels = Levels(),
    wall: float = NOON,
    mono: float = 10.0,
    declared: frozenset[str] = frozenset(),
    released: bool = False,
) -> Ground:
    """Two cards of 80 GiB, all free, unless something else is said."""
    shown = [gpu("GPU-a", 0), gpu("GPU-b", 1)] if cards is None else list(cards)
    rows = [Reading(GPU_MEMORY_TOTAL_BYTES, on_gpu(g.uuid), 80 * GIB, 10.0) for g in shown]
    for card in shown:
        left = (free or {}).get(card.uuid, 80.0 * GIB)
        rows.append(Reading(GPU_MEMORY_FREE_BYTES, on_gpu(card.uuid), left, 10.0))
    for (name, uuid), size in (used or {}).items():
        rows.append(Reading(TENANT_GPU_MEMORY_BYTES, on_tenant_gpu(name, uuid), size, 10.0))
    state = NodeState(
        Instant(mono, wall),
        inventory=Inventory(gpus=tuple(shown), tenants=tuple(tenants)),
        readings={r.key: r for r in rows},
    )
    return Ground(
        state=state,
        runs=tuple(runs),
        starters=starters,
        levels=levels,
        declared=declared,
        released=released,
    )


def cards(verdict: Grant | Refusal) -> list[int]:
    assert isinstance(verdict, Grant), verdict
    return [g.index for g in verdict.gpus]


def why(verdict: Grant | Refusal) -> str:
    assert isinstance(verdict, Refusal)
    return verdict.text


def test_it_goes_where_it_fits() -> None:
    assert cards(admit(asking(), ground(free={"GPU-a": 7.0 * GIB}))) == [1]
    assert cards(admit(asking(gpus=["0"]), ground())) == [0]
    assert cards(admit(asking(gpus=["GPU-b", "1"]), ground())) == [1]
    assert cards(admit(asking(count=2), ground())) == [0, 1]
    assert cards(admit(asking(memory_bytes=None), ground(free={"GPU-a": 0.0, "GPU-b": 0.0}))) == [0]


def test_the_less_important_fit_tightly_and_others_have_room() -> None:
    some = {"GPU-a": 60.0 * GIB, "GPU-b": 20.0 * GIB}
    assert cards(admit(asking(), ground(free=some))) == [1]
    assert cards(admit(asking(level="L1"), ground(free=some))) == [0]


def test_the_less_important_keep_away_from_l1() -> None:
    serve = Tenant("serve", Level.L1, gpus=("GPU-b",))
    tight = {"GPU-b": 20.0 * GIB}
    assert cards(admit(asking(), ground(free=tight, tenants=[serve]))) == [0]
    beside = reserved("serve", "GPU-b", level="L1")
    assert cards(admit(asking(), ground(free=tight, runs=[beside]))) == [0]


def test_what_is_promised_and_not_used_yet_is_not_free() -> None:
    first = reserved("first", "GPU-a", memory=60 * GIB)
    told = why(admit(asking(memory_bytes=30 * GIB, gpus=["0"]), ground(runs=[first])))
    assert "GPU 0: 30 GiB are asked for; 80 GiB are free, of which 60 GiB are reserved" in told
    # What it uses is free no more: it is not counted twice.
    half = ground(runs=[first], free={"GPU-a": 40.0 * GIB}, used={("first", "GPU-a"): 40.0 * GIB})
    assert owed_bytes(gpu("GPU-a"), half) == 20 * GIB
    assert cards(admit(asking(memory_bytes=20 * GIB, gpus=["0"]), half)) == [0]
    assert isinstance(admit(asking(memory_bytes=20 * GIB + 1, gpus=["0"]), half), Refusal)


def test_more_than_the_card_is_never_promised_whatever_is_read() -> None:
    """As if the first had just freed what it was last seen to use."""
    first = reserved("first", "GPU-a", memory=60 * GIB)
    stale = ground(runs=[first], used={("first", "GPU-a"): 60.0 * GIB})
    told = why(admit(asking(memory_bytes=30 * GIB, gpus=["0"]), stale))
    assert "60 GiB of 80 GiB are reserved" in told


def test_what_declared_tenants_are_promised_counts_on_their_cards() -> None:
    limits = Limits(memory_reserved_bytes=60 * GIB)
    serve = Tenant("serve", Level.L1, gpus=("GPU-a",), limits=limits)
    big = asking(memory_bytes=30 * GIB)
    assert cards(admit(big, ground(tenants=[serve]))) == [1]
    # A run is a tenant as well: its promise counts once.
    run = reserved("serve", "GPU-a", memory=60 * GIB, level="L1")
    both = ground(tenants=[serve], runs=[run])
    assert owed_bytes(gpu("GPU-a"), both) == 60 * GIB


def test_shares_of_l1_and_l2_add_up_to_a_card_and_those_of_l3_are_ceilings() -> None:
    half = reserved("a", "GPU-a", share_ratio=0.6, level="L2")
    on = {"gpus": ["0"], "share_ratio": 0.5}
    told = why(admit(asking(level="L1", **on), ground(runs=[half])))
    assert "50% are asked for; 60% are promised" in told
    assert cards(admit(asking(level="L1", gpus=["0"], share_ratio=0.4), ground(runs=[half]))) == [0]
    assert cards(admit(asking(level="L3", **on), ground(runs=[half]))) == [0]


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"blind": "a call hangs"}, "unavailable", "it cannot be read (a call hangs)"),
        ({"mig_enabled": True}, "refused", "it is in MIG mode"),
    ],
)
def test_a_card_that_cannot_take_it(change: dict[str, object], kind: str, said: str) -> None:
    card = msgspec.structs.replace(gpu("GPU-a"), **change)
    for named in ([], ["0"]):
        verdict = admit(asking(gpus=named), ground(cards=[card]))
        assert isinstance(verdict, Refusal)
        assert (verdict.kind, said in verdict.why) == (kind, True)


def test_what_is_not_known_is_not_given_away() -> None:
    blank = ground()
    empty = msgspec.structs.replace(blank, state=NodeState(Instant(10.0, NOON)))
    assert admit(asking(), empty) == Refusal(
        kind="unavailable", why="which cards there are is not known now"
    )
    assert "its memory is not known now" in why(admit(asking(), ground(mono=60.0)))
    assert "this host has no card" in why(admit(asking(), ground(cards=[])))
    assert "the driver is let go of" in why(admit(asking(), ground(released=True)))


def test_a_card_that_is_not_there_and_a_slice() -> None:
    assert "7: no such card" in why(admit(asking(gpus=["7"]), ground()))
    assert "a MIG instance cannot be reserved" in why(admit(asking(gpus=["MIG-1"]), ground()))


@pytest.mark.parametrize(
    ("starter", "level", "allowed"),
    [
        (Starter(1000, None, (Level.L3,)), "L3", True),
        (Starter(1000, None, (Level.L3,)), "L2", False),
        (Starter(1001, None, (Level.L3,)), "L3", False),
        (Starter(None, 50, (Level.L2,)), "L2", True),
        (Starter(None, 51, (Level.L2,)), "L2", False),
        (Starter(1000, 51, (Level.L3,)), "L3", False),
        (Starter(None, None, (Level.L3,)), "L3", True),
    ],
)
def test_who_may_start_what(starter: Starter, level: str, allowed: bool) -> None:
    ask = asking(level=level, gids=[50, 60])
    verdict = admit(ask, ground(starters=(starter,)))
    assert isinstance(verdict, Grant) is allowed
    if isinstance(verdict, Refusal):
        assert verdict.kind == "forbidden"
    assert isinstance(admit(msgspec.structs.replace(ask, admin=True), ground(starters=())), Grant)
    assert isinstance(admit(ask, ground(starters=())), Refusal)


def test_names_are_nobody_elses() -> None:
    known = ground(
        declared=frozenset({"train"}),
        tenants=[Tenant("unit:x.service", Level.L3), Tenant("alice", Level.L3)],
        runs=[reserved("mine", "GPU-a")],
    )
    for name, said in (("train", "a rule declares"), ("alice", "already"), ("mine", "already")):
        assert said in why(admit(asking(name=name), known))
    for name in ("unit:x.service", "a b", "-x", "../x", "a\n", "x" * 64):
        assert "the name of a run" in why(admit(asking(name=name), known))
    given_ = admit(asking(), ground(runs=[reserved("run-100", "GPU-a", pid=7)]))
    assert isinstance(given_, Grant)
    assert given_.name == "run-100-1"


def test_a_process_is_one_run_and_a_user_has_so_many() -> None:
    assert "a run already" in why(admit(asking(), ground(runs=[reserved("x", pid=100)])))
    crowd = [reserved(f"r{i}", pid=i + 1000) for i in range(MOST_RUNS_OF_USER)]
    assert "which is the most" in why(admit(asking(), ground(runs=crowd)))
    assert isinstance(admit(asking(admin=True), ground(runs=crowd)), Grant)
    assert isinstance(admit(asking(uid=1001), ground(runs=crowd)), Grant)


def test_best_effort_runs_at_its_hours_only() -> None:
    night = Levels(L3=LevelRule(hours=("23:00-06:00",)))
    told = why(admit(asking(), ground(levels=night)))
    assert "may run at 23:00-06:00, and it is 12:00" in told
    assert isinstance(admit(asking(), ground(levels=night, wall=23.5 * 3600)), Grant)
    assert isinstance(admit(asking(level="L2"), ground(levels=night)), Grant)
    less = Levels(L3=LevelRule(hours=("23:00-06:00",), off_hours_share=0.5))
    assert isinstance(admit(asking(), ground(levels=less)), Grant), "it is said what it may have"


def test_a_refusal_has_the_numbers_that_led_to_it() -> None:
    verdict = admit(asking(memory_bytes=90 * GIB, gpus=["1"]), ground())
    assert isinstance(verdict, Refusal)
    assert dict(verdict.numbers) == {
        "gpu_index": 1,
        "memory_asked_bytes": 90 * GIB,
        "memory_free_bytes": 80 * GIB,
        "memory_owed_bytes": 0,
        "memory_promised_bytes": 0,
        "memory_total_bytes": 80 * GIB,
    }
    both = admit(asking(memory_bytes=90 * GIB), ground())
    assert isinstance(both, Refusal)
    assert dict(both.numbers)["gpu1_memory_free_bytes"] == 80 * GIB


# -- whoever asks for what -----------------------------------------------------------------------------

SIZES = st.integers(0, 90).map(lambda n: n * GIB)
WISHES = st.builds(
    asking,
    level=st.sampled_from(["L1", "L2", "L3"]),
    memory_bytes=st.none() | st.integers(1, 90).map(lambda n: n * GIB),
    share_ratio=st.none() | st.sampled_from([0.1, 0.4, 0.5, 1.0]),
    gpus=st.lists(st.sampled_from([*UUIDS, "0", "2", "9"]), max_size=3),
    count=st.integers(1, 4),
    uid=st.integers(1000, 1002),
)
STEPS = st.lists(
    st.tuples(WISHES, st.integers(0, 5), st.floats(0, 1.5), st.booleans()), min_size=1, max_size=25
)


@given(STEPS)
def test_never_more_is_promised_than_there_is(steps: list[tuple[RunAsk, int, float, bool]]) -> None:
    """Runs come, allocate as much as they like of what they were promised or more, and end."""
    shown = [gpu(uuid, index) for index, uuid in enumerate(UUIDS)]
    runs: list[Reservation] = []
    used: dict[tuple[str, str], float] = {}
    for number, (wish, other, part, ends) in enumerate(steps):
        if ends and runs:
            gone = runs.pop(other % len(runs))
            used = {key: size for key, size in used.items() if key[0] != gone.name}
        free = {
            uuid: max(0.0, 80.0 * GIB - sum(s for (_, g), s in used.items() if g == uuid))
            for uuid in UUIDS
        }
        known = ground(cards=shown, runs=runs, used=used, free=free)
        ask = msgspec.structs.replace(wish, pid=number + 1, name=f"r{number}")
        verdict = admit(ask, known)
        if isinstance(verdict, Grant):
            assert ask.gpus or len(verdict.gpus) == ask.count
            for card in verdict.gpus:
                if ask.memory_bytes is not None:
                    assert ask.memory_bytes + owed_bytes(card, known) <= free[card.uuid]
            made = reserved(
                f"r{number}",
                *(g.uuid for g in verdict.gpus),
                memory=ask.memory_bytes,
                share_ratio=ask.share_ratio,
                level=ask.level.name,
                pid=number + 1,
            )
            runs.append(made)
        else:
            assert verdict.why
        if runs:
            taker = runs[other % len(runs)]
            for uuid in taker.gpus:
                used[taker.name, uuid] = part * (taker.memory_bytes or GIB)
        for card in shown:
            after = ground(cards=shown, runs=runs)
            assert sum(r.memory_bytes or 0 for r in runs if card.uuid in r.gpus) <= 80 * GIB
            assert promised_share_ratio(card, after) <= 1 + 1e-9


@given(
    st.builds(
        asking,
        name=st.text(max_size=70),
        memory_bytes=st.none() | st.integers(-(2**62), 2**62),
        share_ratio=st.none() | st.floats(allow_nan=True),
        gpus=st.lists(st.text(max_size=70), max_size=3),
        count=st.integers(-5, 2**40),
        cpu_weight=st.none() | st.integers(-(2**40), 2**40),
        host_memory_bytes=st.none() | st.integers(-(2**62), 2**62),
    )
)
def test_anything_can_be_asked_for(ask: RunAsk) -> None:
    verdict = admit(ask, ground())
    assert (ask.fault() == "") or isinstance(verdict, Refusal)


def test_what_is_free_and_promised_is_told_so_that_it_can_be() -> None:
    promised = reserved("one", "GPU-a", memory=40 * GIB)
    for free, said in (
        (60.0, "60 GiB are free, of which 40 GiB are reserved for others"),
        (27.18, "27.18 GiB are free, but others were promised 40 GiB more than they use now"),
    ):
        found = admit(
            asking(memory_bytes=30 * GIB, gpus=("GPU-a",)),
            ground(free={"GPU-a": free * GIB}, runs=(promised,)),
        )
        assert isinstance(found, Refusal)
        assert said in found.why
        assert found.remedy


def test_a_share_that_no_daemon_of_mps_enforces_is_told() -> None:
    one, two = gpu("GPU-a", 0), gpu("GPU-b", 1)

    def told(*daemons: MpsDaemon, share: float | None = 0.4) -> str:
        return unshared(asking(share_ratio=share), (one, two), Inventory(mps=daemons))

    a, b = (MpsDaemon(u, up=True, gpus=(u,)) for u in ("GPU-a", "GPU-b"))
    both = MpsDaemon("both", up=True, gpus=("GPU-a", "GPU-b"))
    assert told(a) == "no MPS daemon serves GPU 1: share is not enforced"
    assert told() == "no MPS daemon serves GPU 0, 1: share is not enforced"
    assert told(a, b) == "no single MPS daemon serves GPU 0, 1: share is not enforced"
    assert told(both) == ""
    assert "not enforced" in told(msgspec.structs.replace(both, up=False))
    assert told(share=None) == ""
    assert unshared(asking(share_ratio=0.4), (one,), Inventory()) == "", "not known"


def test_what_is_asked_for_is_told_in_words() -> None:
    for fields, words in (
        ({"gpus": ("9",)}, "L3 on GPU 9 with 8 GiB on each"),
        ({"gpus": ("GPU-a", "1")}, "L3 on GPU-a, GPU 1 with 8 GiB on each"),
        ({}, "L3 on one card with 8 GiB on each"),
        ({"count": 2}, "L3 on 2 cards with 8 GiB on each"),
    ):
        assert asking(**fields).words == words
