"""/metrics/dcgm: golden text, units, what is left out, who may read it, and dashboard 12239."""

import gzip
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gpuagent.expose.dcgm import FIELDS, MEMORY, XID_NAME, Field, render
from gpuagent.model import vocab
from gpuagent.model.inventory import Gpu, Inventory, MigInstance, on_gpu, on_mig
from gpuagent.model.plan import Snapshot
from gpuagent.model.state import Instant, NodeState, Reading
from tests.expose import snapshots
from tests.expose.full import full
from tests.expose.scene import Scene, ask, ask_loopback, serving
from tests.prometheus import NONE_HERE, PROMETHEUS, watching

GPU0, GPU1 = snapshots.GPU0, snapshots.GPU1

promtool = shutil.which("promtool")

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def series(snapshot: Snapshot) -> Series:
    found: Series = {}
    for family in text_string_to_metric_families(render(snapshot, "node1").decode()):
        for sample in family.samples:
            # The parser ends a counter's name in _total where the text does not.
            key = (sample.name.removesuffix("_total"), frozenset(sample.labels.items()))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def of_card(snapshot: Snapshot, uuid: str = GPU0) -> dict[str, float]:
    """Values of the card itself by name, without DCGM's prefix."""
    return {
        name.removeprefix("DCGM_FI_DEV_"): value
        for (name, labels), value in series(snapshot).items()
        if ("UUID", uuid) in labels and "GPU_I_ID" not in dict(labels)
    }


def with_readings(*readings: Reading, at: float = snapshots.MONO, mig: bool = False) -> Snapshot:
    parts = (MigInstance("MIG-a", GPU0, 3, 0, "NVIDIA H100 MIG 2g.20gb", None),) if mig else ()
    inventory = Inventory(gpus=(Gpu(GPU0, 0, "NVIDIA H100", mig=parts),))
    state = NodeState(
        Instant(at, snapshots.WALL), inventory=inventory, readings={r.key: r for r in readings}
    )
    return Snapshot(state, snapshots.OBSERVING)


# -- what is told ------------------------------------------------------------------------------------------


def test_a_full_host_renders_to_exactly_the_golden_text() -> None:
    # When this fails and the new text is right, it is the golden text.
    golden = Path(__file__).with_name("golden_dcgm.txt").read_text(encoding="utf-8")
    assert render(full(), "node1").decode() == golden


def test_values_are_in_the_units_of_dcgm() -> None:
    assert of_card(full()) == {
        "SM_CLOCK": 1755,
        "MEM_CLOCK": 2619,
        "MEMORY_TEMP": 83,
        "GPU_TEMP": 71,
        "POWER_USAGE": 510.25,
        "TOTAL_ENERGY_CONSUMPTION": 123456789,
        "PCIE_REPLAY_COUNTER": 3,
        "GPU_UTIL": 75,
        "MEM_COPY_UTIL": 29,
        "FB_FREE": 9264,
        "FB_USED": 71680,
        "XID_ERRORS": 79,
    }


def test_labels_are_those_of_dcgm_exporter() -> None:
    labels = [dict(labels) for _, labels in series(full())]
    whole = {"gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname"}
    assert {frozenset(one) for one in labels} == {
        frozenset(whole),
        frozenset({*whole, "GPU_I_PROFILE", "GPU_I_ID"}),
    }
    assert {
        "gpu": "0",
        "UUID": GPU0,
        "pci_bus_id": "00000000:18:00.0",
        "device": "nvidia0",
        "modelName": "NVIDIA H100 80GB HBM3",
        "Hostname": "node1",
    } in labels


def test_a_partitioned_card_tells_memory_by_gpu_instance_once_each() -> None:
    told = {
        (dict(labels)["GPU_I_PROFILE"], dict(labels)["GPU_I_ID"])
        for (name, labels) in series(full())
        if name == "DCGM_FI_DEV_FB_USED" and ("UUID", GPU1) in labels
    }
    assert told == {("3g.40gb", "2"), ("1g.10gb+me", "9")}
    whole = Reading(vocab.GPU_MEMORY_USED_BYTES, on_gpu(GPU0), 1 << 30, snapshots.MONO)
    part = Reading(vocab.GPU_MEMORY_USED_BYTES, on_mig("MIG-a"), 1 << 29, snapshots.MONO)
    told_of = series(with_readings(whole, part, mig=True))
    assert list(told_of.values()) == [512], "a sum over the card and its parts would count twice"


# -- what is left out --------------------------------------------------------------------------------------


def test_what_was_not_measured_is_absent() -> None:
    assert render(snapshots.unread(), "node1") == b""
    assert render(snapshots.empty(), "node1") == b""
    assert render(with_readings(), "node1") == b""


def test_the_nvlink_rate_of_dcgm_is_never_made_up_from_our_count() -> None:
    assert b"NVLINK" not in render(full(), "node1")


@pytest.mark.parametrize("field", [*FIELDS, *MEMORY])
def test_a_series_vanishes_when_its_reading_expires(field: Field) -> None:
    reading = Reading(field.signal, on_gpu(GPU0), 8, snapshots.MONO, dims=field.dims)

    def at(seconds: float) -> set[str]:
        return {n for n, _ in series(with_readings(reading, at=snapshots.MONO + seconds))}

    assert at(field.signal.expires) == {field.name}
    assert at(field.signal.expires + 0.1) == set()


@pytest.mark.parametrize("field", [*FIELDS, *MEMORY])
def test_an_estimate_is_left_out(field: Field) -> None:
    reading = Reading(field.signal, on_gpu(GPU0), 8, snapshots.MONO, False, field.dims)
    assert render(with_readings(reading), "node1") == b""


def test_the_last_xid_is_the_latest_not_the_largest() -> None:
    def seen(xid: int, wall: float) -> Reading:
        return Reading(
            vocab.GPU_XID_LAST_SECONDS, on_gpu(GPU0), wall, snapshots.MONO, dims=(str(xid),)
        )

    assert of_card(with_readings(seen(79, 100), seen(31, 200))) == {"XID_ERRORS": 31}
    assert of_card(with_readings(seen(79, 300), seen(31, 200))) == {"XID_ERRORS": 79}
    assert "XID_ERRORS" not in of_card(with_readings())


# -- its form ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(promtool is None, reason=NONE_HERE)
@pytest.mark.parametrize("snapshot", [full(), snapshots.hostile(), snapshots.large()])
def test_promtool_objects_only_to_the_foreign_names(snapshot: Snapshot) -> None:
    assert promtool is not None
    done = subprocess.run(
        [promtool, "check", "metrics"],
        input=render(snapshot, "node1"),
        capture_output=True,
        check=False,
    )
    said = set(done.stderr.decode().splitlines())
    names = {f.name for f in (*FIELDS, *MEMORY)} | {XID_NAME}
    # dcgm-exporter's own: counters that do not end in _total, one that ends in COUNTER, modelName.
    forced = {
        *(f'{f.name} counter metrics should have "_total" suffix' for f in FIELDS),
        *(f"{n} label names should be written in 'snake_case' not 'camelCase'" for n in names),
        "DCGM_FI_DEV_PCIE_REPLAY_COUNTER metric name should not include type 'counter'",
    }
    assert said <= forced, said - forced


@given(st.text(st.characters(exclude_categories=()), max_size=20))
def test_any_model_and_host_name_parse(name: str) -> None:
    card = Gpu(GPU0, 0, name, pci_bus_id=name)
    reading = Reading(vocab.GPU_POWER_WATTS, on_gpu(GPU0), 1, snapshots.MONO)
    state = NodeState(
        snapshots.NOW, inventory=Inventory(gpus=(card,)), readings={reading.key: reading}
    )
    text = render(Snapshot(state, snapshots.OBSERVING), name).decode()
    (family,) = text_string_to_metric_families(text)
    shown = name.encode("utf-8", "backslashreplace").decode()
    assert family.samples[0].labels["modelName"] == shown
    assert family.samples[0].labels["Hostname"] == shown


# -- where it is told --------------------------------------------------------------------------------------


async def test_both_listeners_serve_it_zipped_if_asked() -> None:
    async with serving(Scene(full())) as (server, path):
        assert server.metrics_port is not None
        plain = await ask(path, "/metrics/dcgm")
        zipped = await ask(path, "/metrics/dcgm", headers="Accept-Encoding: gzip\r\n")
        loopback = await ask_loopback(server.metrics_port, "/metrics/dcgm")
        foreign = await ask_loopback(
            server.metrics_port, "/metrics/dcgm", headers="Host: evil.example\r\n"
        )
        own = await ask_loopback(server.metrics_port, "/metrics")
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert gzip.decompress(zipped.body) == plain.body == loopback.body
    assert plain.body.startswith(b"# HELP DCGM_FI_DEV_")
    assert foreign.status == 403
    assert b"DCGM" not in own.body


async def test_before_the_first_look_there_is_none() -> None:
    async with serving(Scene(None)) as (server, path):
        assert server.metrics_port is not None
        assert (await ask(path, "/metrics/dcgm")).status == 503
        assert (await ask_loopback(server.metrics_port, "/metrics/dcgm")).status == 503


# -- dashboard 12239 ---------------------------------------------------------------------------------------

_OF = '{instance=~".+", gpu=~".+"}'
DASHBOARD_12239 = (
    f"DCGM_FI_DEV_GPU_TEMP{_OF}",
    f"avg(DCGM_FI_DEV_GPU_TEMP{_OF})",
    f"DCGM_FI_DEV_POWER_USAGE{_OF}",
    f"sum(DCGM_FI_DEV_POWER_USAGE{_OF})",
    f"DCGM_FI_DEV_SM_CLOCK{_OF} * 1000000",
    f"DCGM_FI_DEV_GPU_UTIL{_OF}",
    f"DCGM_FI_DEV_FB_USED{_OF}",
)
"""What its panels ask, by metric and label (FACTS 6); the tensor panel needs profiling counters."""


@pytest.mark.skipif(PROMETHEUS is None, reason=NONE_HERE)
async def test_the_queries_of_dashboard_12239_return_data(tmp_path: Path) -> None:
    async with serving(Scene(full(time.time()))) as (server, _):
        assert server.metrics_port is not None
        async with watching(server.metrics_port, tmp_path) as prometheus:
            for query in DASHBOARD_12239:
                assert await prometheus.query(query), query
            target = [f"127.0.0.1:{server.metrics_port}"]
            name = "DCGM_FI_DEV_GPU_TEMP"
            assert await prometheus.label_values(name, "instance") == target
            assert await prometheus.label_values(name, "gpu") == ["0"]
            (heat,) = await prometheus.query(DASHBOARD_12239[1])
            assert float(heat["value"][1]) == 71
