"""What is set of MPS: read back, never looser, pending until a launch, and put back."""

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent import config
from gpuagent.act.mps import MpsDefaultThreads, MpsOwnDaemon, MpsThreads
from gpuagent.act.restore import Occasion
from gpuagent.config import Config, Match, MpsGroup, TenantRule
from gpuagent.errors import Gone, Refused, Unavailable, Unsupported
from gpuagent.model.declare import OWN_DAEMON_RULE, Knob
from gpuagent.model.inventory import Level, MpsDaemon, on_mps, on_tenant
from gpuagent.model.plan import Pause, Snapshot, Unpause
from gpuagent.model.vocab import MPS_DAEMON, MPS_DEFAULT_THREADS
from gpuagent.ports import Real
from tests.decide.world import CARD
from tests.fakes.host import Host
from tests.fakes.mps.values import FakeMps, daemon
from tests.rig import Rig

G = on_mps("g")
TRAIN = on_tenant("train")
WHOLE = Real(1.0, "100.0")


async def test_a_tenants_ceiling_is_kept_here_and_forgotten_with_us() -> None:
    threads = MpsThreads()
    assert await threads.get(TRAIN) == WHOLE
    want = threads.encode(TRAIN, 0.333, WHOLE)
    assert want == Real(0.333, "33.3")
    await threads.set(TRAIN, want.raw)
    assert await threads.get(TRAIN) == want
    assert await threads.get(on_tenant("other")) == WHOLE
    await threads.set(TRAIN, "100.0")
    assert await threads.get(TRAIN) == WHOLE
    await threads.verify(TRAIN, await threads.identity(TRAIN))
    with pytest.raises(Gone):
        await threads.verify(TRAIN, "other")
    assert await threads.owner(TRAIN) == 0


@given(value=st.floats(), original=st.integers(1, 1000))
def test_no_ceiling_is_looser_than_the_original_or_than_what_is_wished(
    value: float, original: int
) -> None:
    was = Real(original / 1000, f"{original / 10:.1f}")
    made = MpsThreads().encode(TRAIN, value, was)
    assert made.value <= was.value
    if made != was:
        assert 0.001 <= made.value <= max(value, 0.001) + 1e-9
        assert float(made.raw) == pytest.approx(made.value * 100)
    if math.isnan(value) or value <= 0:
        assert made == was


@pytest.mark.parametrize("raw", ["", "0", "-1", "100.1", "nan", "x", "1" * 200])
async def test_only_what_we_write_is_written(raw: str) -> None:
    mps = FakeMps(daemon())
    for actuator, subject in (
        (MpsThreads(), TRAIN),
        (MpsDefaultThreads(mps), G),
    ):
        with pytest.raises(Refused):
            await actuator.set(subject, raw)
    with pytest.raises(Refused):
        await MpsOwnDaemon(mps).set(G, f"{raw}2")
    assert mps.all["g"] == daemon()


async def test_a_daemons_default_is_known_by_where_it_is_reached() -> None:
    mps = FakeMps(daemon())
    threads = MpsDefaultThreads(mps)
    assert await threads.get(G) == WHOLE
    await threads.set(G, "50.5")
    assert await threads.get(G) == Real(0.505, "50.5")
    assert await threads.identity(G) == "/mps/g"
    await threads.verify(G, "/mps/g")
    with pytest.raises(Unavailable, match="set pipe_directory as it was"):
        await threads.verify(G, "/elsewhere")
    # An earlier configuration's: reached where it was held.
    old = on_mps("old")
    await threads.verify(old, "/mps/old")
    assert mps.place("old") == "/mps/old"
    mps.put(MpsDaemon("g", up=False))
    with pytest.raises(Gone):
        await threads.get(G)


async def test_a_daemon_of_our_own_is_started_and_ended() -> None:
    mps = FakeMps(MpsDaemon("g", up=False, pipe_directory="/mps/g"))
    own = MpsOwnDaemon(mps)
    down = await own.get(G)
    assert down == Real(0.0, "0")
    assert own.encode(G, 1.0, down) == Real(1.0, "1")
    assert own.encode(G, 0.0, down) == down
    await own.set(G, "1")
    assert await own.get(G) == Real(1.0, "1")
    mps.put(daemon(clients={20: 7}))
    with pytest.raises(Refused):
        await own.set(G, "0")
    mps.put(daemon())
    await own.set(G, "0")
    assert await own.get(G) == down


def test_a_daemon_of_our_own_outlives_us() -> None:
    for occasion, fate in (
        (Occasion.STOP, "hold"),
        (Occasion.CRASH, "adopt"),
        (Occasion.RESCUE, "hold"),
        (Occasion.BY_HAND, "put back"),
    ):
        assert occasion.fate(MPS_DAEMON, OWN_DAEMON_RULE, keep_on_stop=False) == fate


# -- through the loop ----------------------------------------------------------------------------------

RULES = (TenantRule("train", Level.L3, Match(unit="train.service")),)
LIMITED = MpsGroup("g", gpus=(CARD,), default_threads=0.5)
OWN = MpsGroup("g", gpus=(CARD,), own=True)


def grouped(group: MpsGroup) -> Config:
    return Config(mode="enforce", tenants=RULES, mps=config.Mps(groups=(group,)))


def outcome(snapshot: Snapshot, knob: Knob) -> tuple[str, str]:
    found = snapshot.outcomes[knob, G]
    return found.result, found.why


def training(*daemons: MpsDaemon) -> Host:
    host = Host()
    host.arrive("train", 20)
    host.mps = FakeMps(*daemons)
    return host


async def test_a_default_is_set_and_pending_and_put_back(tmp_path: Path) -> None:
    host = training(daemon(clients={20: 7}, gpus=(CARD,)))
    async with Rig(tmp_path, host, grouped(LIMITED)) as rig:
        await rig.run(3)
        snapshot = await rig.tick()
        assert host.mps.all["g"].default_threads_ratio == 0.5
        assert outcome(snapshot, MPS_DEFAULT_THREADS) == (
            "pending",
            "the next launch gets 50.0; what runs keeps what it started with",
        )
        assert snapshot.actions["mps_default_threads", "pending"] == 1
        assert snapshot.actions["mps_default_threads", "applied"] == 0
        said = [a for a in rig.audit.latest() if a.knob == "mps_default_threads"]
        assert [(a.did, a.result, a.wrote) for a in said] == [("set", "pending", "50.0")]
        # Somebody else sets it: noticed, but not by asking once a second.
        await host.mps.set_default_threads("g", 0.8)
        await rig.ask(Pause(by="test"))
        await rig.tick()
        assert host.mps.all["g"].default_threads_ratio == 0.8, "no longer ours"
        await rig.ask(Unpause(by="test"))
        await rig.run(2)
        assert host.mps.all["g"].default_threads_ratio == 0.5
        await rig.ask(Pause(by="test"))
        assert host.mps.all["g"].default_threads_ratio == 0.8
        assert not rig.ledger.entries


async def test_a_default_that_could_reach_an_l1_is_put_back(tmp_path: Path) -> None:
    host = training(daemon(clients={20: 7}, gpus=(CARD,)))
    rules = (*RULES, TenantRule("serve", Level.L1, Match(unit="serve.service")))
    given = msgspec.structs.replace(grouped(LIMITED), tenants=rules)
    async with Rig(tmp_path, host, given) as rig:
        await rig.run(4)
        assert host.mps.all["g"].default_threads_ratio == 0.5
        host.arrive("serve", 30)
        snapshot = await rig.run(15)
        assert host.mps.all["g"].default_threads_ratio == 1.0
        result, why = outcome(snapshot, MPS_DEFAULT_THREADS)
        assert (result, "serve (L1) uses a card of it" in why) == ("refused", True)


async def test_a_daemon_of_our_own_is_started_and_started_again(tmp_path: Path) -> None:
    host = training(MpsDaemon("g", up=False, pipe_directory="/mps/g"))
    async with Rig(tmp_path, host, grouped(OWN)) as rig:
        snapshot = await rig.run(3)
        assert host.mps.all["g"].up
        assert outcome(snapshot, MPS_DAEMON)[0] == "applied"
        host.mps.put(msgspec.structs.replace(host.mps.all["g"], up=False))
        await rig.run(20)
        assert host.mps.all["g"].up
        # Paused, it is ended, but not under a client.
        host.mps.put(daemon(clients={20: 7}))
        await rig.ask(Pause(by="test"))
        snapshot = await rig.tick()
        assert host.mps.all["g"].up
        assert outcome(snapshot, MPS_DAEMON) == ("refused", "it has clients")
        host.mps.put(daemon())
        await rig.run(20)
        assert not host.mps.all["g"].up


async def test_a_daemon_that_was_there_is_not_ours_to_end(tmp_path: Path) -> None:
    host = training(daemon())
    async with Rig(tmp_path, host, grouped(OWN)) as rig:
        snapshot = await rig.run(3)
        assert outcome(snapshot, MPS_DAEMON)[0] == "applied"
        assert not rig.ledger.entries
        await rig.ask(Pause(by="test"))
        assert host.mps.all["g"].up


async def test_a_daemon_that_cannot_work_is_refused_with_the_reason(tmp_path: Path) -> None:
    host = training(MpsDaemon("g", up=False, pipe_directory="/mps/g"))
    host.mps.fails = Unsupported("its server cannot start; it has been taken down")
    async with Rig(tmp_path, host, grouped(OWN)) as rig:
        snapshot = await rig.run(5)
        assert outcome(snapshot, MPS_DAEMON) == ("refused", str(host.mps.fails))
        assert not host.mps.all["g"].up


async def test_in_observe_nothing_is_started(tmp_path: Path) -> None:
    host = training(MpsDaemon("g", up=False, pipe_directory="/mps/g"))
    given = msgspec.structs.replace(grouped(OWN), mode="observe")
    async with Rig(tmp_path, host, given) as rig:
        snapshot = await rig.run(3)
        assert outcome(snapshot, MPS_DAEMON)[0] == "would"
        assert not host.mps.all["g"].up
