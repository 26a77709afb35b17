"""Overrides over HTTP: what may be asked for, what is refused and how, and what is told of each."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuagent.errors import Gone, Refused
from gpuagent.expose import explain, overrides
from gpuagent.expose.metrics import render
from gpuagent.expose.overrides import OverrideBody
from gpuagent.model.inventory import Level, Subject, on_gpu, on_tenant
from gpuagent.model.lease import Lease
from gpuagent.model.plan import DropOverride, Plan, SetOverride, Setting, Snapshot
from gpuagent.model.state import NodeState
from gpuagent.model.vocab import CPU_MAX, POWER_LIMIT
from tests.expose import snapshots
from tests.expose.scene import Commands, Reply, Scene, ask, serving
from tests.expose.snapshots import GPU0, MONO, TRAIN_SEAT, WALL

HOUR = {"ttl_seconds": 3600, "why": "a demo"}
QUIET = {**HOUR, "tenant": "train", "share_ratio": 0.5}
COOL = {**HOUR, "gpu": GPU0, "power_limit_watts": 300}


def lease(name: str = "quiet", *, on: Subject | None = None, value: float = 0.5) -> Lease:
    return Lease(
        name,
        on_tenant("train") if on is None else on,
        value,
        3600.0,
        "user 0",
        "a demo",
        until=MONO + 600.0,
        until_wall=WALL + 600.0,
        created_wall=WALL - 3000.0,
    )


def with_leases(*leases: Lease, snapshot: Snapshot | None = None) -> Snapshot:
    found = snapshots.busy() if snapshot is None else snapshot
    found.state.leases = leases
    return found


async def put(path: str, body: object, name: str = "quiet") -> Reply:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await ask(path, f"/v1/overrides/{name}", method="PUT", body=content)


async def test_what_is_asked_for_is_handed_in_whole() -> None:
    commands = Commands()
    async with serving(Scene(snapshots.busy()), commands) as (_, path):
        done = await put(path, QUIET)
        assert (done.status, done.json) == (200, {"done": "done as you wished"})
        assert (await put(path, COOL, "cool")).status == 200
        gone = await ask(path, "/v1/overrides/quiet", method="DELETE")
        assert gone.status == 200
    first, second, third = commands.seen
    assert isinstance(first, SetOverride)
    asked = first.override
    assert (asked.id, asked.subject, asked.value) == ("quiet", on_tenant("train"), 0.5)
    assert (asked.ttl_seconds, asked.why) == (3600, "a demo")
    assert isinstance(second, SetOverride)
    assert (second.override.subject, second.override.value) == (on_gpu(GPU0), 300)
    assert isinstance(third, DropOverride)
    assert (third.id, third.by) == ("quiet", asked.by)


async def test_while_observing_the_answer_says_that_nothing_happens() -> None:
    scene = Scene(snapshots.busy(posture=snapshots.OBSERVING))
    async with serving(scene, Commands()) as (_, path):
        done = await put(path, QUIET)
    assert "nothing is changed now: the configuration says" in done.json["done"]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({**QUIET, "tenant": "nobody"}, 404, "there is no tenant 'nobody' here"),
        ({**COOL, "gpu": "GPU-x"}, 404, "there is no card 'GPU-x' here"),
        ({**QUIET, "tenant": "serve"}, 409, "serve is L1: its own knobs are never turned"),
        ({**QUIET, "share_ratio": 0.1}, 422, "10% is below the floor of train, 20%"),
        ({**QUIET, "share_ratio": 0.01}, 422, "share_ratio must be a number from 0.05 to 1"),
        ({**QUIET, "share_ratio": 1.5}, 422, "the body does not fit"),
        ({**COOL, "power_limit_watts": 50}, 422, "takes a power limit of at least"),
        ({**COOL, "power_limit_watts": 5000}, 422, "takes a power limit of at least"),
        ({**QUIET, "ttl_seconds": 0}, 422, "fit: ttl_seconds must be a number from 1 to 2592000"),
        ({**QUIET, "ttl_seconds": 1e9}, 422, "the body does not fit"),
        ({**QUIET, "why": ""}, 422, "why must be text of 1 to 200 characters"),
        ({**QUIET, "why": " "}, 422, "say why"),
        ({**QUIET, "gpu": GPU0}, 422, "a share of a tenant or a power limit of a card"),
        ({**HOUR, "tenant": "train", "power_limit_watts": 300}, 422, "a share of a tenant or"),
        (HOUR, 422, "a share of a tenant or a power limit of a card"),
        ({**QUIET, "more": 1}, 422, "there is no field more; there are ttl_seconds, why, tenant,"),
        ([], 422, "the body does not fit: it must be an object"),
        (b"", 400, "no JSON"),
        (b"{", 400, "no JSON"),
    ],
)
async def test_what_is_not_safe_or_makes_no_sense_is_refused(
    body: object, status: int, words: str
) -> None:
    commands = Commands()
    async with serving(Scene(snapshots.busy()), commands) as (_, path):
        reply = await put(path, body)
    assert reply.status == status
    assert words in reply.json["detail"]
    assert commands.seen == []


async def test_a_tenant_that_is_only_observed_is_refused() -> None:
    snapshot = snapshots.busy()
    tenants = snapshot.state.inventory.tenants or ()
    inventory = msgspec.structs.replace(
        snapshot.state.inventory,
        tenants=tuple(msgspec.structs.replace(t, enforce=False) for t in tenants),
    )
    scene = Scene(
        msgspec.structs.replace(snapshot, state=NodeState(snapshots.NOW, inventory=inventory))
    )
    async with serving(scene, Commands()) as (_, path):
        reply = await put(path, QUIET)
    assert reply.status == 409
    assert "hold_back = true" in reply.json["remedy"]


async def test_nobody_knows_yet_who_is_there() -> None:
    async with serving(Scene(snapshots.unread()), Commands()) as (_, path):
        assert [(await put(path, body)).status for body in (QUIET, COOL)] == [503, 503]
    async with serving(Scene(None), Commands()) as (_, path):
        assert (await put(path, QUIET)).status == 503


@pytest.mark.parametrize("name", ["%2E%2E", "a%2Fb", "a%20b", "%1b", "x" * 65, "-a"])
async def test_a_name_is_plain(name: str) -> None:
    async with serving(Scene(snapshots.busy()), Commands()) as (_, path):
        reply = await put(path, QUIET, name)
    assert reply.status == 422
    assert "the name of an override" in reply.json["detail"]


@pytest.mark.parametrize(("error", "status"), [(Gone("no such"), 404), (Refused("full"), 409)])
async def test_what_the_book_says_is_told(error: Exception, status: int) -> None:
    commands = Commands()
    commands.answer = error
    async with serving(Scene(snapshots.busy()), commands) as (_, path):
        assert (await put(path, QUIET)).status == status
        assert (await ask(path, "/v1/overrides/x", method="DELETE")).status == status


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda x: (
            st.lists(x, max_size=2)
            | st.dictionaries(st.sampled_from([*QUIET, *COOL]) | st.text(max_size=3), x, max_size=5)
        ),
        max_leaves=8,
    ).map(lambda x: json.dumps(x).encode())
)
def test_a_body_is_what_it_must_be_or_refused(body: bytes) -> None:
    try:
        found = msgspec.json.decode(body, type=OverrideBody)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    assert 1 <= found.ttl_seconds <= 30 * 86400
    assert 1 <= len(found.why) <= 200


# -- what is told --------------------------------------------------------------------------------------


async def test_the_list_is_by_name_in_parts_with_the_time_that_remains() -> None:
    leases = (lease("a"), lease("b", on=on_gpu(GPU0), value=300.0))
    scene = Scene(with_leases(*leases))
    async with serving(scene) as (_, path):
        first = (await ask(path, "/v1/overrides?limit=1")).json
        second = (await ask(path, f"/v1/overrides?limit=1&after={first['next']}")).json
    assert (first["total"], second["next"]) == (2, None)
    (a,), (b,) = first["items"], second["items"]
    assert (a["name"], a["tenant"], a["share_ratio"]) == ("a", "train", 0.5)
    assert (a["gpu"], a["power_limit_watts"]) == (None, None)
    assert (b["name"], b["gpu"], b["power_limit_watts"]) == ("b", GPU0, 300)
    assert a["remaining_seconds"] == 600
    assert (a["by"], a["why"]) == ("user 0", "a demo")


def told(snapshot: Snapshot, one: Lease) -> tuple[Any, str]:
    view = overrides.view(snapshot, one, MONO)
    return view.effect, view.effect_why


def planned(*settings: Setting) -> Snapshot:
    return msgspec.structs.replace(snapshots.busy(), plan=Plan(settings))


def test_the_effect_is_what_became_of_its_settings() -> None:
    own = Setting(CPU_MAX, TRAIN_SEAT, 2.1, "", "override/quiet")
    assert told(planned(own), lease())[0] == "applied"
    nothing = msgspec.structs.replace(planned(own), outcomes={})
    assert told(nothing, lease())[0] is None


def test_that_another_rule_asks_for_less_is_told() -> None:
    both = Setting(
        POWER_LIMIT, on_gpu(GPU0), 500.0, "the budget", "power/budget", also=("override/cool",)
    )
    said = told(planned(both), lease("cool", on=on_gpu(GPU0), value=600.0))[1]
    assert said == "power/budget asks for less: the budget"


def test_what_does_not_apply_here_says_why() -> None:
    away = told(snapshots.busy(), lease(on=on_tenant("gone")))
    assert away == (None, "there is no tenant 'gone' here; it applies if that comes")
    assert told(snapshots.busy(), lease(on=on_tenant("serve")))[0] == "refused"


def test_who_is_left_alone_is_so_once_all_is_put_back() -> None:
    snapshot = snapshots.busy()
    assert told(msgspec.structs.replace(snapshot, plan=Plan()), lease(value=1.0))[0] == "in flight"
    free = msgspec.structs.replace(snapshot, plan=Plan(), outcomes={})
    assert told(free, lease(value=1.0)) == ("applied", "it is left alone")


def test_a_tenants_explanation_shows_those_on_it_and_its_cards() -> None:
    others = (lease("c", on=on_tenant("serve")), lease("d", on=on_gpu("GPU-other"), value=300.0))
    snapshot = with_leases(lease("a"), lease("b", on=on_gpu(GPU0), value=300.0), *others)
    who = snapshot.state.inventory.tenant("train")
    assert who is not None
    assert who.level is Level.L3
    assert [x.name for x in explain.explanation(snapshot, who).overrides] == ["a", "b"]


def test_they_are_counted_by_what_they_are_on() -> None:
    snapshot = with_leases(lease("a"), lease("b", on=on_gpu(GPU0), value=300.0), lease("c"))
    text = render(snapshot, "1").decode()
    assert 'gpuagent_overrides{on="tenant"} 2.0' in text
    assert 'gpuagent_overrides{on="gpu"} 1.0' in text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(snapshots.HOSTILE))
def test_hostile_names_are_told_with_escapes(name: str) -> None:
    view = overrides.view(snapshots.hostile(), lease(on=on_tenant(name)), MONO)
    msgspec.json.encode(view)


async def test_who_limits_the_card_of_an_l1_is_told_so() -> None:
    async with serving(Scene(snapshots.busy()), Commands()) as (_, path):
        limited, quiet = await put(path, COOL), await put(path, QUIET)
    assert "GPU 0 is used by serve (L1), which a lower limit slows too" in limited.json["done"]
    assert "(L1)" not in quiet.json["done"]
