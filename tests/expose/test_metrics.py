"""/metrics: golden text, promtool, hostile names, series that vanish, and rendering once."""

import asyncio
import gzip
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gpuagent.expose.metrics import Exposition, render
from gpuagent.model import vocab
from gpuagent.model.inventory import Inventory, on_cgroup, on_gpu, on_mig, on_process
from gpuagent.model.plan import LoopStats, Plan, Posture, Snapshot
from gpuagent.model.state import ACTION_RESULTS, Instant, NodeState, Outcome, Reading, Result
from gpuagent.model.vocab import KNOBS, SIGNALS
from tests.expose import snapshots
from tests.expose.full import BROKEN, full
from tests.expose.scene import Scene, StillClock, ask, ask_loopback, serving

promtool = shutil.which("promtool")


def own_lines(text: bytes) -> str:
    """Without the families of the process itself, whose values change."""
    own = re.compile(r"(# (HELP|TYPE) )?process_")
    return "\n".join(x for x in text.decode().splitlines() if not own.match(x))


def series(snapshot: Snapshot) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {}
    for family in text_string_to_metric_families(render(snapshot, "1").decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def names(snapshot: Snapshot) -> set[str]:
    return {name for name, _ in series(snapshot)}


def test_a_busy_host_renders_to_exactly_the_golden_text() -> None:
    # When this fails and the new text is right, it is the golden text.
    golden = Path(__file__).with_name("golden_metrics.txt").read_text(encoding="utf-8")
    assert own_lines(render(snapshots.busy(), "1.2.3")) + "\n" == golden


def test_every_action_exists_from_the_start() -> None:
    found = series(snapshots.unread())
    for knob in KNOBS:
        for result in ACTION_RESULTS:
            labels = frozenset({"knob": knob.name, "result": result}.items())
            assert found["gpuagent_actions_total", labels] == 0
        labels = frozenset({"knob": knob.name}.items())
        assert found["gpuagent_outside_changes_total", labels] == 0


def test_events_are_counted_by_kind() -> None:
    text = render(full(), "1").decode()
    assert "# TYPE gpuagent_events_total counter" in text
    assert 'gpuagent_events_total{kind="xid"} 2.0' in text
    assert 'gpuagent_events_total{kind="reloaded"} 0.0' in text


def test_a_busy_host_says_what_is_wanted_real_and_why_not() -> None:
    found = series(snapshots.busy())
    seat = {"tenant": "train", "level": "L3", "cgroup": snapshots.TRAIN_PATH}
    card = {"gpu": "0", "uuid": snapshots.GPU0}
    target = {**seat, "gpu": "", "uuid": ""}
    both = {"tenant": "train", "level": "L3", **card}

    def value(name: str, **labels: str) -> float | None:
        return found.get((f"gpuagent_{name}", frozenset(labels.items())))

    assert value("cgroup_cpu_max_wanted_cores", **seat) == 2.1
    assert value("cgroup_cpu_max_cores", **seat) == float("inf")
    assert value("setting_outcome", knob="cgroup_cpu_max", result="applied", **target) == 1
    assert value("setting_outcome", knob="cgroup_cpu_weight", result="ineffective", **target) == 1
    assert value("actions_total", knob="cgroup_cpu_max", result="applied") == 4
    assert value("actions_total", knob="cgroup_cpu_max", result="left alone") == 1
    assert value("outside_changes_total", knob="gpu_power_limit") == 2
    assert value("tenant_share_ratio", tenant="train", level="L3") == 0.49
    assert value("tenant_share_ratio", tenant="serve", level="L1") == 1
    assert value("cause_active", cause="memory", tenant="", **card) == 1
    assert (
        value("mig_memory_used_bytes", gpu="1", uuid=snapshots.GPU1, mig=snapshots.MIG1) == 1 << 30
    )
    assert value("gpu_xid_errors_total", xid="79", **card) == 2
    assert value("tenant_gpu_utilization_ratio", **both) == 0.6
    assert value("reading_estimated", signal="tenant_gpu_utilization_ratio", **both) == 1
    assert value("reading_estimated", signal="tenant_gpu_memory_bytes", **both) is None
    assert value("acting") == 1
    assert value("demoted") == value("released") == 0
    assert value("snapshot_timestamp_seconds") == snapshots.WALL
    assert value("sensor_up", sensor="netlink") is None, "it has not been asked yet"
    assert value("sensor_failures_total", sensor="netlink") == 0


def test_suspended_processes_are_counted_and_those_of_others_not() -> None:
    busy = snapshots.busy()
    may = snapshots.tenant("train"), snapshots.tenant("sweep"), snapshots.tenant("batch")
    tenants = tuple(
        msgspec.structs.replace(t, levers=("suspend",) if t.name != "batch" else ()) for t in may
    )
    outcomes = {}
    for pid, real, original in ((1, 1.0, 0.0), (2, 1.0, 0.0), (3, 0.0, 0.0), (4, 1.0, None)):
        subject = on_process("train", pid, 1)
        key = (vocab.SUSPENDED, subject)
        outcomes[key] = Outcome(*key, 1.0, real, original, "applied", "", 0.0)
    state = NodeState(busy.state.now, inventory=Inventory(tenants=tenants))
    shown = msgspec.structs.replace(busy, state=state, outcomes=outcomes, plan=Plan())
    found = {
        dict(labels)["tenant"]: value
        for (name, labels), value in series(shown).items()
        if name == "gpuagent_tenant_suspended_processes"
    }
    assert found == {"train": 2, "sweep": 0}


@pytest.mark.parametrize(
    ("effect", "share"),
    [
        ("applied", 0.49),
        ("in flight", 0.49),
        ("pending", 0.49),
        ("would", 1),
        ("refused", 1),
        ("ineffective", 1),
        ("contested", 1),
        ("gone", 1),
        (None, 1),
    ],
)
def test_a_share_is_what_the_host_has_and_not_what_was_decided(
    effect: Result | None, share: float
) -> None:
    found = series(snapshots.became(effect))
    tenant = {"tenant": "train", "level": "L3"}
    assert found["gpuagent_tenant_share_ratio", frozenset(tenant.items())] == share
    decided = {**tenant, "gpu": "", "uuid": "", "cause": "memory", "effect": effect or "unknown"}
    assert found["gpuagent_hold_share_ratio", frozenset(decided.items())] == 0.49


def test_a_limited_card_is_no_tenant() -> None:
    snapshot = msgspec.structs.replace(snapshots.busy(), holds=(snapshots.limited_card("applied"),))
    found = series(snapshot)
    held = {k: v for k, v in found.items() if k[0] == "gpuagent_hold_share_ratio"}
    [((_, labels), share)] = held.items()
    assert share == 0.8
    assert dict(labels).items() >= {"tenant": "", "uuid": snapshots.GPU0, "gpu": "0"}.items()
    shares = [v for (n, _), v in found.items() if n == "gpuagent_tenant_share_ratio"]
    assert shares == [1, 1]


def test_why_it_does_not_act_is_told() -> None:
    posture = Posture(mode="enforce", released=True, demoted="three crashes")
    found = series(snapshots.empty(posture=posture))
    assert found["gpuagent_demoted", frozenset()] == 1
    assert found["gpuagent_released", frozenset()] == 1
    assert found["gpuagent_acting", frozenset()] == 0


def test_listeners_and_tokens_in_trouble_are_told() -> None:
    text = render(snapshots.busy(), "1", BROKEN).decode()
    for line in (
        'gpuagent_listener_up{listener="unix"} 1.0',
        'gpuagent_listener_up{listener="network"} 0.0',
        'gpuagent_listener_faulty{listener="unix"} 0.0',
        'gpuagent_listener_faulty{listener="network"} 1.0',
        "gpuagent_tokens_unusable 1.0",
    ):
        assert line in text.splitlines()


def test_when_the_certificate_expires_is_told_where_there_is_one() -> None:
    name = "gpuagent_tls_certificate_expiry_timestamp_seconds"
    assert name not in render(snapshots.busy(), "1", BROKEN).decode()
    known = msgspec.structs.replace(BROKEN, certificate_ends_wall=1.9e9)
    text = render(snapshots.busy(), "1", known).decode()
    assert f'{name}{{listener="network"}} 1.9e+09' in text.splitlines()


async def test_the_listeners_of_the_server_itself_are_told() -> None:
    scene = Scene(snapshots.busy())
    scene.access_now = BROKEN
    async with serving(scene) as (_, path):
        page = await ask(path, "/metrics")
    assert b'gpuagent_listener_up{listener="network"} 0.0' in page.body


def test_a_sum_over_cards_counts_nothing_twice() -> None:
    snapshot = snapshots.busy()
    snapshot.state.readings = {
        r.key: r
        for r in (
            Reading(vocab.GPU_MEMORY_USED_BYTES, on_gpu(snapshots.GPU1), 5, snapshots.MONO),
            Reading(vocab.GPU_MEMORY_USED_BYTES, on_mig(snapshots.MIG1), 5, snapshots.MONO),
            Reading(vocab.GPU_MEMORY_USED_BYTES, on_mig("MIG-left"), 1, snapshots.MONO),
        )
    }
    found = series(snapshot)
    whole = [v for (n, _), v in found.items() if n == "gpuagent_gpu_memory_used_bytes"]
    parts = {dict(k)["mig"]: v for (n, k), v in found.items() if n.startswith("gpuagent_mig_")}
    assert whole == [5]
    assert parts == {snapshots.MIG1: 5, "MIG-left": 1}


@pytest.mark.parametrize("make", ["busy", "hostile", "full"])
def test_every_metric_of_settings_has_one_set_of_labels(make: str) -> None:
    snapshot = full() if make == "full" else getattr(snapshots, make)()
    for metric in ("setting_outcome", "hold_share_ratio", "cause_active", "actions_total"):
        sets = {frozenset(dict(k)) for n, k in series(snapshot) if n == f"gpuagent_{metric}"}
        assert len(sets) <= 1, metric


def test_a_series_vanishes_when_its_reading_expires() -> None:
    reading = Reading(vocab.GPU_POWER_WATTS, on_gpu("a"), 100, snapshots.MONO)
    counted = Reading(vocab.GPU_XID_ERRORS, on_gpu("a"), 1, snapshots.MONO, dims=("79",))
    readings = {r.key: r for r in (reading, counted)}

    def at(seconds: float) -> set[str]:
        now = Instant(snapshots.MONO + seconds, snapshots.WALL)
        return names(Snapshot(NodeState(now, readings=readings), snapshots.OBSERVING))

    assert "gpuagent_gpu_power_watts" in at(vocab.GPU_POWER_WATTS.expires)
    assert "gpuagent_gpu_power_watts" not in at(vocab.GPU_POWER_WATTS.expires + 0.1)
    assert "gpuagent_gpu_xid_errors_total" in at(1e6)


def test_unknown_is_absent() -> None:
    assert not {
        n for n in names(snapshots.unread()) if n.startswith(("gpuagent_gpu_", "gpuagent_node_"))
    }


def test_the_conventions_hold_for_every_declaration() -> None:
    for signal in SIGNALS:
        assert (signal.kind == "counter") == signal.name.endswith("_total"), signal
    for snapshot in (snapshots.busy(), snapshots.hostile(), snapshots.large(2, 3)):
        for _, labels in series(snapshot):
            assert len(labels) <= 8
            assert "pid" not in dict(labels)


@pytest.mark.skipif(promtool is None, reason="promtool (Debian: prometheus) is not installed")
@pytest.mark.parametrize("make", ["empty", "unread", "busy", "hostile", "large"])
def test_promtool_has_nothing_to_say(make: str) -> None:
    assert promtool is not None
    text = render(getattr(snapshots, make)(), "1")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, b"", b"")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=()), max_size=20),
        min_size=1,
        max_size=5,
        unique=True,
    )
)
def test_any_name_is_one_series_and_parses(hostile: list[str]) -> None:
    snapshot = snapshots.hostile(tuple(hostile))
    shown = {
        dict(labels)["tenant"]
        for name, labels in series(snapshot)
        if name == "gpuagent_tenant_info"
    }
    assert shown == {n.encode("utf-8", "backslashreplace").decode() for n in hostile}


def test_the_cgroup_that_took_a_path_over_is_one_series() -> None:
    old = on_cgroup("train", "/x", 1)
    new = on_cgroup("train", "/x", 2)
    readings = [
        Reading(vocab.CGROUP_CPU_WEIGHT, old, 10, snapshots.MONO - 1),
        Reading(vocab.CGROUP_CPU_WEIGHT, new, 100, snapshots.MONO),
    ]
    state = NodeState(snapshots.NOW, readings={r.key: r for r in readings})
    found = series(Snapshot(state, snapshots.OBSERVING))
    assert [v for (n, _), v in found.items() if n == "gpuagent_cgroup_cpu_weight"] == [100]


def test_a_large_host_has_about_ten_thousand_series() -> None:
    assert 8_000 < len(series(snapshots.large())) < 12_000


# -- rendering -------------------------------------------------------------------------------------------


class Watched(NodeState):
    """A state that notes who goes through its readings."""

    __slots__ = ("threads",)

    def __init__(self) -> None:
        super().__init__(snapshots.NOW)
        self.threads: list[threading.Thread] = []

    def live(self) -> Iterator[Reading]:
        self.threads.append(threading.current_thread())
        return super().live()


async def test_each_snapshot_is_rendered_once_and_off_the_loop() -> None:
    state = Watched()
    snapshot = Snapshot(state, snapshots.OBSERVING)
    clock = StillClock()
    exposition = Exposition("1", now=lambda: clock.instant.mono)
    texts = await asyncio.gather(*(exposition.text(snapshot) for _ in range(20)))
    assert len(set(texts)) == 1
    assert len(state.threads) == 1
    assert state.threads[0] is not threading.main_thread()
    exposition.close()


async def test_many_snapshots_a_second_are_rendered_once_a_second() -> None:
    state = Watched()
    clock = StillClock()
    exposition = Exposition("1", now=lambda: clock.instant.mono)

    async def scrape(seconds: float) -> bytes:
        clock.instant = Instant(snapshots.MONO + seconds, snapshots.WALL)
        ticks = LoopStats(ticks=int(seconds * 1000))
        return await exposition.text(Snapshot(state, snapshots.OBSERVING, stats=ticks))

    first = await scrape(0)
    assert {await scrape(t) for t in (0.05, 0.5, 0.99)} == {first}
    assert len(state.threads) == 1
    assert b"gpuagent_loop_ticks_total 1000.0" in await scrape(1)
    assert len(state.threads) == 2
    paused = msgspec.structs.replace(snapshots.OBSERVING, paused=True)
    text = await exposition.text(Snapshot(state, paused))
    assert b"gpuagent_paused 1.0" in text, "who has just ordered it is told at once"
    exposition.close()


async def test_gzip_if_asked() -> None:
    async with serving(Scene(snapshots.busy())) as (server, path):
        plain = await ask(path, "/metrics")
        zipped = await ask(path, "/metrics", headers="Accept-Encoding: gzip\r\n")
        assert server.metrics_port is not None
        loopback = await ask_loopback(server.metrics_port, "/metrics")
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert zipped.headers["content-encoding"] == "gzip"
    assert gzip.decompress(zipped.body) == plain.body == loopback.body
