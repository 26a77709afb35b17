"""A tenant says what its latency is: taken at once, checked, and not too often."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuagent.errors import Refused
from gpuagent.expose.intake import REPORTS_PER_SECOND, TENANTS_MOST, Intake
from gpuagent.expose.metrics import render
from gpuagent.expose.problems import Trouble
from gpuagent.expose.reports import QUANTILES, QUANTILES_MOST
from gpuagent.model.state import Instant
from gpuagent.ports import LatencyReport
from gpuagent.sense.mail import LatencyMail
from tests.expose import snapshots
from tests.expose.scene import Commands, Reply, Scene, ask, serving
from tests.fakes.host import Host
from tests.rig import Rig

TARGET = "/v1/tenants/serve/latency"
P99 = {"quantile": 0.99, "seconds": 0.087}


async def put(path: str, body: object, target: str = TARGET) -> Reply:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await ask(path, target, method="PUT", body=raw)


async def test_a_report_is_taken_without_waiting_for_the_loop() -> None:
    scene, commands = Scene(snapshots.busy()), Commands()
    commands.hold = asyncio.Event()  # a loop that never answers
    async with serving(scene, commands) as (_, path):
        reply = await put(path, P99)
    assert reply.status == 202
    assert reply.json["done"].startswith("noted")
    assert scene.reports == [LatencyReport("serve", 0.99, 0.087, snapshots.MONO)]
    assert commands.seen == []


async def test_a_quantile_that_no_objective_is_about_is_taken_with_a_word() -> None:
    busy = snapshots.busy()
    tenants = tuple(
        msgspec.structs.replace(
            t, limits=msgspec.structs.replace(t.limits, latency_slo_seconds=0.1)
        )
        if t.name == "serve"
        else t
        for t in busy.state.inventory.tenants or ()
    )
    busy.state.inventory = msgspec.structs.replace(busy.state.inventory, tenants=tenants)
    async with serving(Scene(busy)) as (_, path):
        median = (await put(path, {**P99, "quantile": 0.5})).json["done"]
        both = (await put(path, [P99, {**P99, "quantile": 0.5}])).json["done"]
    assert median == (
        "noted: the latency of serve at quantile 0.5; "
        "its objective is for 0.99, so nothing is done for this"
    )
    assert both == "noted: the latency of serve at quantile 0.5, 0.99"


async def test_several_quantiles_come_at_once() -> None:
    scene = Scene(snapshots.busy())
    body = [{**P99, "window_seconds": 10, "requests": 312}, {"quantile": 0.5, "seconds": 0.01}]
    async with serving(scene) as (_, path):
        assert (await put(path, body)).status == 202
    assert [(r.quantile, r.seconds) for r in scene.reports] == [(0.99, 0.087), (0.5, 0.01)]


async def test_quantiles_are_those_of_a_short_list_and_of_the_own_objective() -> None:
    busy = snapshots.busy()
    tenants = tuple(
        msgspec.structs.replace(
            t, limits=msgspec.structs.replace(t.limits, latency_slo_seconds=1, latency_quantile=0.8)
        )
        if t.name == "serve"
        else t
        for t in busy.state.inventory.tenants or ()
    )
    busy.state.inventory = msgspec.structs.replace(busy.state.inventory, tenants=tenants)
    scene = Scene(busy)
    written = [*QUANTILES, 0.8, 0.949999999, 0.99000000001]
    async with serving(scene) as (_, path):
        for quantile in written:
            assert (await put(path, {**P99, "quantile": quantile})).status == 202
        of_another = await put(path, {**P99, "quantile": 0.8}, "/v1/tenants/train/latency")
    assert [r.quantile for r in scene.reports] == [*QUANTILES, 0.8, 0.95, 0.99]
    assert of_another.status == 422
    assert of_another.json["remedy"] == "report one of 0.5, 0.9, 0.95, 0.99, 0.999"


WRONG = [
    {},
    [],
    None,
    7,
    "0.087",
    {"quantile": 0.99},
    {"seconds": 0.1},
    {**P99, "quantile": 0},
    {**P99, "quantile": 1},
    {**P99, "quantile": "0.99"},
    {**P99, "quantile": None},
    {**P99, "quantile": 0.9901},
    {**P99, "quantile": 0.123456},
    [P99, {**P99, "quantile": 0.42}],
    {**P99, "seconds": 0},
    {**P99, "seconds": -0.1},
    {**P99, "seconds": 1e9},
    {**P99, "seconds": True},
    {**P99, "requests": 0},
    {**P99, "requests": "many"},
    {**P99, "window_seconds": 0},
    {**P99, "latency": 0.1},
    [P99, {**P99, "seconds": 0}],
    [P99] * (QUANTILES_MOST + 1),
]


@pytest.mark.parametrize("body", WRONG, ids=json.dumps)
async def test_what_is_no_latency_is_refused_as_a_whole(body: object) -> None:
    scene = Scene(snapshots.busy())
    async with serving(scene) as (_, path):
        reply = await put(path, body)
    assert reply.status == 422
    assert reply.headers["content-type"] == "application/problem+json"
    assert scene.reports == []


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"\xff", b'{"quantile":0.99,"seconds":NaN}', b'{"quantile":0.99,"seconds":1e999}'],
)
async def test_what_is_no_json_is_refused(raw: bytes) -> None:
    scene = Scene(snapshots.busy())
    async with serving(scene) as (_, path):
        assert (await put(path, raw)).status in {400, 422}
    assert scene.reports == []


@settings(max_examples=60, deadline=None)
@given(
    st.binary(max_size=100)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["quantile", "seconds", "requests"]), inner, max_size=3
            )
        ),
        max_leaves=6,
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_body_is_taken_or_refused(raw: bytes) -> None:
    async def scenario() -> None:
        scene = Scene(snapshots.busy())
        async with serving(scene, listen="") as (_, path):
            reply = await put(path, raw)
        assert reply.status in {202, 400, 422}
        assert (reply.status == 202) == bool(scene.reports)
        for report in scene.reports:
            assert 0 < report.quantile < 1
            assert 0 < report.seconds < float("inf")

    asyncio.run(scenario())


async def test_of_nobody_nothing_is_taken() -> None:
    scene = Scene(snapshots.busy())
    async with serving(scene) as (_, path):
        reply = await put(path, P99, "/v1/tenants/nobody/latency")
        scene.show(None)
        before = await put(path, P99)
    assert reply.status == 404
    assert "as long as it has a process" in reply.json["remedy"]
    assert before.status == 503
    assert scene.reports == []


@pytest.mark.parametrize("name", snapshots.HOSTILE)
async def test_a_tenant_is_found_whatever_its_name(name: str) -> None:
    scene = Scene(snapshots.hostile((name,)))
    quoted = quote(name.encode("utf-8", "backslashreplace"), safe="").replace(".", "%2E")
    async with serving(scene) as (_, path):
        reply = await put(path, P99, f"/v1/tenants/{quoted}/latency")
    assert reply.status == 202
    assert scene.reports[0].tenant == name


async def test_too_many_within_a_second_are_told_when_to_come_again() -> None:
    scene = Scene(snapshots.busy())
    async with serving(scene) as (_, path):
        for _ in range(REPORTS_PER_SECOND):
            assert (await put(path, P99)).status == 202
        refused = await put(path, P99)
        other = await put(path, P99, "/v1/tenants/train/latency")
        scene.clock.instant = Instant(snapshots.MONO + 1, snapshots.WALL + 1)
        again = await put(path, P99)
    assert refused.status == 429
    assert refused.headers["retry-after"] == "1"
    assert (other.status, again.status) == (202, 202)
    assert len(scene.reports) == REPORTS_PER_SECOND + 2


async def test_what_the_mailbox_refuses_is_said() -> None:
    scene = Scene(snapshots.busy())

    def full(_report: LatencyReport) -> None:
        raise Refused("latencies of 256 tenants are known already")

    scene.intake = Intake(full)
    async with serving(scene) as (_, path):
        reply = await put(path, P99)
    assert reply.status == 409
    assert "256 tenants" in reply.json["detail"]


async def test_an_agent_that_takes_none_says_so() -> None:
    scene = Scene(snapshots.busy())
    scene.intake = Intake()
    async with serving(scene) as (_, path):
        assert (await put(path, P99)).status == 501


@given(st.lists(st.tuples(st.integers(0, 3 * TENANTS_MOST), st.floats(0, 0.01)), max_size=800))
def test_the_memory_of_who_reported_is_bounded(calls: list[tuple[int, float]]) -> None:
    intake, now = Intake(), 0.0
    for tenant, pause in calls:
        now += pause
        with contextlib.suppress(Trouble):
            intake.admit(str(tenant), now)
        assert len(intake._allowances) <= TENANTS_MOST


# -- the whole way ---------------------------------------------------------------------------------------


def series(rig: Rig) -> list[str]:
    latest: Any = rig.publisher.latest()
    text = render(latest, "1").decode()
    return [x for x in text.splitlines() if x.startswith("gpuagent_tenant_latency_seconds{")]


async def test_what_is_pushed_becomes_a_reading_and_a_series_and_is_forgotten(
    tmp_path: Path,
) -> None:
    mail = LatencyMail()
    host = Host()
    host.arrive("serve", 10)
    async with Rig(tmp_path, host, latencies=mail) as rig:
        await rig.run(5)
        scene = Scene(rig.publisher.latest())
        scene.intake = Intake(mail.push)
        scene.clock.instant = host.clock.now()
        async with serving(scene, listen="") as (_, path):
            assert (await put(path, P99)).status == 202
        assert series(rig) == [], "not before the next pass"
        await rig.tick()
        (line,) = series(rig)
        assert line.endswith(" 0.087")
        assert 'tenant="serve"' in line
        assert 'quantile="0.99"' in line
        await rig.run(13)
        assert len(series(rig)) == 1
        await rig.run(3)
        assert series(rig) == []
