"""What the routes answer, over a real Unix socket."""

import asyncio
from urllib.parse import quote

import msgspec
import pytest

from gpuagent.errors import ConfigError, Gone, Refused, Unavailable, Unsupported
from gpuagent.expose.access import Access
from gpuagent.expose.api import GETS, to_json
from gpuagent.expose.picture import number
from gpuagent.model.plan import Pause, Posture, ReleaseGpus, Reload, ResumeGpus, Snapshot, Unpause
from gpuagent.model.state import RESULTS, Health, Instant, Result
from tests.expose import snapshots
from tests.expose.scene import Commands, Scene, ask, ask_loopback, serving


async def test_every_get_answers_on_every_kind_of_host() -> None:
    names = {"/v1/gpus/{name}": snapshots.GPU0, "default": "train"}
    for snapshot in (snapshots.busy(), snapshots.empty(), snapshots.unread(), snapshots.hostile()):
        async with serving(Scene(snapshot)) as (_, path):
            for get in GETS:
                name = names.get(get.path, names["default"])
                reply = await ask(path, get.path.replace("{name}", quote(name, safe="")))
                known = "{name}" not in get.path or reply.status == 200
                assert reply.status == 200 or not known, (get.path, reply.body)
                assert reply.status in {200, 404}
                assert reply.json is not None


async def test_unknown_is_null_and_not_zero() -> None:
    async with serving(Scene(snapshots.unread())) as (_, path):
        node = (await ask(path, "/v1/node")).json
    assert node["gpus"] is None
    assert node["tenants"] is None
    assert node["gpu_power_watts"] is None


async def test_no_gpu_is_zero_and_not_unknown() -> None:
    async with serving(Scene(snapshots.empty())) as (_, path):
        node = (await ask(path, "/v1/node")).json
        assert (node["gpus"], node["tenants"]) == (0, 0)
        health = (await ask(path, "/v1/health")).json
    assert health["ok"] is False
    assert health["sensors"][0]["why"] == "no driver is loaded"


# -- what is decided, and what is so -----------------------------------------------------------------------


@pytest.mark.parametrize("effect", [*RESULTS, None])
async def test_a_tenant_is_held_back_only_where_the_host_says_so(effect: Result | None) -> None:
    async with serving(Scene(snapshots.became(effect, "the reason"))) as (_, path):
        node = (await ask(path, "/v1/node")).json
        row = (await ask(path, "/v1/tenants/train")).json["row"]
        plan = (await ask(path, "/v1/plan")).json
    in_force = effect in {"applied", "in flight", "pending"}
    would = effect == "would"
    assert node["tenants_held_back"] == in_force
    assert node["tenants_would_be_held_back"] == would
    assert row["share_ratio"] == (0.49 if in_force else 1)
    assert row["would_share_ratio"] == (0.49 if would else None)
    held = row["held_back"]
    assert (held["share_ratio"], held["effect"], held["in_force"]) == (0.49, effect, in_force)
    assert held["effect_why"] == ("" if effect is None else "the reason")
    assert plan["held_back"] == [held]


async def test_of_several_decisions_the_one_in_force_counts() -> None:
    decided: tuple[tuple[Result, float], ...] = (
        ("refused", 0.2),
        ("applied", 0.7),
        ("applied", 0.5),
        ("would", 1.0),
    )
    holds = tuple(
        snapshots.holding("train", snapshots.TRAIN_SEAT, effect, why="w", share=share)
        for effect, share in decided
    )
    snapshot = msgspec.structs.replace(snapshots.busy(), holds=holds)
    async with serving(Scene(snapshot)) as (_, path):
        row = (await ask(path, "/v1/tenants/train")).json["row"]
        node = (await ask(path, "/v1/node")).json
    assert (row["share_ratio"], row["held_back"]["share_ratio"]) == (0.5, 0.5)
    assert row["would_share_ratio"] is None, "what takes nothing away holds nobody back"
    assert node["tenants_held_back"] == 1


async def test_a_limited_card_is_not_counted_among_the_tenants() -> None:
    effects: tuple[Result, ...] = ("applied", "would")
    for effect in effects:
        holds = (snapshots.limited_card(effect),)
        snapshot = msgspec.structs.replace(snapshots.busy(), holds=holds)
        async with serving(Scene(snapshot)) as (_, path):
            node = (await ask(path, "/v1/node")).json
            [held] = (await ask(path, "/v1/plan")).json["held_back"]
        assert (node["tenants_held_back"], node["tenants_would_be_held_back"]) == (0, 0)
        assert node["gpus_limited"] == (effect == "applied")
        assert node["gpus_would_be_limited"] == (effect == "would")
        assert (held["gpu"], held["tenant"]) == (snapshots.GPU0, None)


# -- health ------------------------------------------------------------------------------------------------


async def test_what_a_restart_would_not_remember_is_a_matter_of_health() -> None:
    scene = Scene(snapshots.busy())
    async with serving(scene) as (_, path):
        well = (await ask(path, "/v1/health")).json
        scene.access_now = Access(unsaved_why="/s/tokens.json cannot be written: no room")
        worse = (await ask(path, "/v1/health")).json
    assert (well["degraded"], well["unsaved_why"]) == (False, "")
    assert worse["degraded"] is True
    assert worse["ok"] == well["ok"]
    assert worse["unsaved_why"] == "/s/tokens.json cannot be written: no room"


def with_health(*found: Health) -> Snapshot:
    snapshot = snapshots.busy()
    snapshot.state.health = {h.name: h for h in found}
    return snapshot


@pytest.mark.parametrize("name", ["process_events", "kernel_log"])
async def test_a_host_without_what_can_be_done_without_is_degraded(name: str) -> None:
    snapshot = with_health(Health("gpus", True), Health(name, False, "no right to listen"))
    async with serving(Scene(snapshot)) as (_, path):
        health = (await ask(path, "/v1/health")).json
    assert (health["ok"], health["degraded"]) == (True, True)
    assert {s["name"]: s["essential"] for s in health["sensors"]} == {"gpus": True, name: False}


@pytest.mark.parametrize("name", ["gpus", "tenants", "cgroups", "node", "ledger"])
async def test_a_host_without_what_is_essential_is_not_ok(name: str) -> None:
    async with serving(Scene(with_health(Health(name, False, "broken")))) as (_, path):
        health = (await ask(path, "/v1/health")).json
    assert (health["ok"], health["degraded"]) == (False, False)


async def test_who_only_observes_can_do_without_cgroups() -> None:
    snapshot = snapshots.busy(posture=Posture(mode="observe"))
    snapshot.state.health = {"cgroups": Health("cgroups", False, "no cgroup v2 mount")}
    async with serving(Scene(snapshot)) as (_, path):
        health = (await ask(path, "/v1/health")).json
    assert (health["ok"], health["degraded"]) == (True, True)


async def test_a_blind_card_is_not_ok_and_says_why() -> None:
    async with serving(Scene(snapshots.hostile(("a call hangs",)))) as (_, path):
        health = (await ask(path, "/v1/health")).json
    assert health["blind"] == [{"index": 0, "why": "a call hangs"}]
    assert health["ok"] is False


# -- lists -------------------------------------------------------------------------------------------------


async def test_cards_come_in_pages_in_a_stable_order() -> None:
    scene = Scene(snapshots.large(cards=12, tenants=1))
    async with serving(scene) as (_, path):
        seen: list[int] = []
        target = "/v1/gpus?limit=5"
        while True:
            page = (await ask(path, target)).json
            seen += [g["index"] for g in page["items"]]
            assert page["total"] == 12
            assert len(page["items"]) <= 5
            if page["next"] is None:
                break
            target = f"/v1/gpus?limit=5&after={quote(page['next'], safe='')}"
        assert (await ask(path, "/v1/gpus?limit=nine")).status == 400
    assert seen == list(range(12))


async def test_gpus_show_fresh_readings_only() -> None:
    async with serving(Scene(snapshots.busy())) as (_, path):
        page = (await ask(path, "/v1/gpus")).json
    first = page["items"][0]
    names = {r["name"] for r in first["readings"]}
    assert first["tenants"] == ["serve", "train"]
    assert "gpu_power_watts" in names
    assert "gpu_clock_hertz" not in names, "it has expired"
    assert page["items"][1]["readings"][0]["labels"] == {"gpu": snapshots.MIG1}


async def test_an_explanation_says_every_knob_and_why() -> None:
    async with serving(Scene(snapshots.busy())) as (_, path):
        told = (await ask(path, "/v1/tenants/train/explanation")).json
    knobs = {k["knob"]: k for k in told["knobs"]}
    cpu_max = knobs["cgroup_cpu_max"]
    assert (cpu_max["wanted"], cpu_max["real"], cpu_max["original"]) == (2.1, 2.1, "+Inf")
    assert (cpu_max["result"], cpu_max["rule"]) == ("applied", "backpressure/memory")
    assert "87 %" in cpu_max["why"]
    assert cpu_max["numbers"] == {"memory_used_ratio": 0.875}
    assert knobs["cgroup_cpu_weight"]["result"] == "ineffective"
    assert knobs["cgroup_cpu_weight"]["outcome_why"] == "no sibling competes with it"
    assert knobs["gpu_power_limit"]["wanted"] is None
    assert knobs["gpu_power_limit"]["real"] == 700
    assert told["causes"][0]["held_seconds"] == 12
    assert {r["name"]: r["estimated"] for r in told["readings"]}["tenant_gpu_utilization_ratio"]


async def test_an_l1_tenant_is_told_why_it_is_left_alone() -> None:
    async with serving(Scene(snapshots.busy())) as (_, path):
        told = (await ask(path, "/v1/tenants/serve/explanation")).json
    assert told["row"]["may_be_held_back"] is False
    own = [k for k in told["knobs"] if k["cgroup"]]
    assert own
    assert all("L1" in k["why"] and k["wanted"] is None for k in own)


async def test_a_refused_seat_is_named() -> None:
    snapshot = snapshots.busy()
    shared = snapshots.tenant(
        "shared", path="/system.slice/ssh.service", refusal="shared with sshd"
    )
    inventory = msgspec.structs.replace(snapshot.state.inventory, tenants=(shared,))
    snapshot.state.inventory = inventory
    async with serving(Scene(snapshot)) as (_, path):
        told = (await ask(path, "/v1/tenants/shared/explanation")).json
    assert told["seats"][0]["refusal"] == "shared with sshd"
    assert told["knobs"][0]["why"] == "cannot be used here: shared with sshd"


async def test_tenants_come_in_pages_in_a_stable_order() -> None:
    async with serving(Scene(snapshots.large())) as (_, path):
        names: list[str] = []
        target = "/v1/tenants?limit=70"
        sizes = []
        while True:
            page = (await ask(path, target)).json
            names += [t["name"] for t in page["items"]]
            sizes.append(len(page["items"]))
            assert page["total"] == 200
            if page["next"] is None:
                break
            target = f"/v1/tenants?limit=70&after={quote(page['next'], safe='')}"
    assert sizes == [70, 70, 60]
    assert names == sorted(set(names))


async def test_a_page_goes_on_where_a_tenant_has_vanished() -> None:
    scene = Scene(snapshots.busy())
    async with serving(scene) as (_, path):
        page = (await ask(path, "/v1/tenants?limit=1")).json
        assert page["next"] == "serve"
        inventory = scene.latest().state.inventory  # type: ignore[union-attr]
        rest = tuple(t for t in inventory.tenants or () if t.name != "serve")
        scene.snapshot.state.inventory = msgspec.structs.replace(  # type: ignore[union-attr]
            inventory, tenants=rest
        )
        page = (await ask(path, "/v1/tenants?limit=1&after=serve")).json
    assert [t["name"] for t in page["items"]] == ["train"]
    assert page["next"] is None


@pytest.mark.parametrize("limit", ["0", "-1", "x", "", "1e3", "9" * 30, "\u0663"])
async def test_a_limit_that_is_none_is_refused(limit: str) -> None:
    async with serving(Scene(snapshots.busy())) as (_, path):
        reply = await ask(path, f"/v1/tenants?limit={quote(limit)}")
    assert reply.status == 400
    assert "limit" in reply.json["detail"]


async def test_hostile_names_are_found_by_the_name_that_was_listed() -> None:
    async with serving(Scene(snapshots.hostile())) as (_, path):
        page = (await ask(path, "/v1/tenants")).json
        assert page["total"] == len(snapshots.HOSTILE)
        for row in page["items"]:
            target = f"/v1/tenants/{quote(row['name'], safe='')}"
            reply = await ask(path, target)
            assert reply.status == 200, row["name"]
            assert reply.json["row"]["name"] == row["name"]
            assert (await ask(path, target + "/explanation")).status == 200


async def test_events_come_newest_first_with_wall_time() -> None:
    async with serving(Scene(snapshots.busy())) as (_, path):
        page = (await ask(path, "/v1/events?limit=1")).json
    assert page["total"] == 2
    assert page["items"][0]["kind"] == "xid"
    assert page["items"][0]["wall"] == snapshots.WALL - 30


async def test_config_is_told_as_it_is_in_force() -> None:
    scene = Scene(snapshots.busy())
    async with serving(scene) as (_, path):
        assert (await ask(path, "/v1/config")).json == scene.settings_now


# -- problems ------------------------------------------------------------------------------------------


async def test_before_the_first_look_gets_say_when_to_come_again() -> None:
    async with serving(Scene(None)) as (server, path):
        reply = await ask(path, "/v1/node")
        assert reply.status == 503
        assert reply.headers["retry-after"] == "1"
        assert (await ask(path, "/readyz")).status == 503
        assert (await ask(path, "/metrics")).status == 503
        assert (await ask(path, "/healthz")).status == 200
        assert server.metrics_port is not None
        assert (await ask_loopback(server.metrics_port, "/readyz")).status == 503


async def test_a_stuck_loop_is_not_healthy() -> None:
    scene = Scene(snapshots.busy())
    async with serving(scene) as (server, path):
        assert server.metrics_port is not None
        assert (await ask_loopback(server.metrics_port, "/healthz")).status == 200
        scene.clock.instant = Instant(snapshots.MONO + 31, snapshots.WALL)
        reply = await ask_loopback(server.metrics_port, "/healthz")
        assert (await ask(path, "/v1/health")).json["loop"]["age_seconds"] == 31
    assert reply.status == 503
    assert "stuck for 31 s" in reply.json["detail"]


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/nodes", 404),
        ("GET", "/v1/tenants/nobody", 404),
        ("GET", "/v1/tenants/nobody/explanation", 404),
        ("GET", "/v1/tenants/train/explanation/more", 404),
        ("GET", "/v1/gpus/GPU-none", 404),
        ("GET", "/v1/pause", 405),
        ("POST", "/v1/node", 405),
        ("DELETE", "/v1/tenants/train", 405),
        ("PATCH", "/v1/node", 405),
    ],
)
async def test_what_is_not_there_is_a_problem_document(
    method: str, target: str, status: int
) -> None:
    async with serving(Scene(snapshots.busy())) as (_, path):
        reply = await ask(path, target, method=method)
    assert reply.status == status
    assert reply.headers["content-type"] == "application/problem+json"
    problem = reply.json
    assert problem["status"] == status
    assert problem["title"]
    assert problem["remedy"]
    assert ("allow" in reply.headers) == (status == 405)


async def test_a_body_too_large_is_refused() -> None:
    async with serving(Scene(snapshots.busy())) as (_, path):
        announced = await ask(path, "/v1/pause", method="POST", body=b"x" * 5000)
        chunked = await ask(
            path,
            "/v1/pause",
            method="PUT",
            headers="Transfer-Encoding: chunked\r\n",
        )
    assert announced.status == 413
    assert announced.headers["content-type"] == "application/problem+json"
    assert chunked.status in {400, 405}


# -- commands ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("/v1/pause", Pause),
        ("/v1/unpause", Unpause),
        ("/v1/reload", Reload),
        ("/v1/release", ReleaseGpus),
        ("/v1/resume", ResumeGpus),
    ],
)
async def test_commands_reach_the_inbox(target: str, kind: type) -> None:
    commands = Commands()
    async with serving(Scene(None), commands) as (_, path):
        reply = await ask(path, target, method="POST", body=b"{}")
    assert reply.status == 200
    assert reply.json == {"done": "done as you wished"}
    assert commands.seen == [kind(by="root")]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Gone("it has gone"), 404),
        (Refused("not now"), 409),
        (Unsupported("never here"), 501),
        (Unavailable("busy"), 503),
    ],
)
async def test_errors_of_a_command_have_one_table(error: Exception, status: int) -> None:
    commands = Commands()
    commands.answer = error
    async with serving(Scene(None), commands) as (_, path):
        reply = await ask(path, "/v1/pause", method="POST")
    assert reply.status == status
    assert reply.json["detail"] == str(error)


async def test_all_problems_of_a_configuration_are_told() -> None:
    commands = Commands()
    commands.answer = ConfigError(["a.toml:1: x: unknown key", "a.toml:2: y: not a size"])
    async with serving(Scene(None), commands) as (_, path):
        reply = await ask(path, "/v1/reload", method="POST")
    assert reply.status == 422
    assert reply.json["problems"] == ["a.toml:1: x: unknown key", "a.toml:2: y: not a size"]


async def test_waiting_commands_are_bounded_and_reads_go_on() -> None:
    commands = Commands()
    commands.hold = asyncio.Event()
    async with serving(Scene(snapshots.busy()), commands) as (_, path):
        asked = [asyncio.ensure_future(ask(path, "/v1/pause", method="POST")) for _ in range(16)]
        await commands.until_seen(16)
        assert (await ask(path, "/v1/pause", method="POST")).status == 503
        assert (await ask(path, "/v1/node")).status == 200
        commands.hold.set()
        assert [r.status for r in await asyncio.gather(*asked)] == [200] * 16


async def test_a_fault_of_ours_is_a_problem_and_not_the_end() -> None:
    scene = Scene(snapshots.busy())
    async with serving(scene) as (_, path):
        scene.settings = lambda: 1 / 0  # type: ignore[assignment,method-assign,return-value]
        reply = await ask(path, "/v1/config")
        assert reply.status == 500
        assert "ZeroDivision" not in reply.body.decode()
        assert (await ask(path, "/v1/node")).status == 200


def test_json_takes_names_that_are_no_text() -> None:
    text = {"a": "x\udc80", "b": [1.5, ("\udcff",)], "\udc81": True}
    assert to_json(text) == b'{"a":"x\\\\udc80","b":[1.5,["\\\\udcff"]],"\\\\udc81":true}'


def test_infinity_has_a_name_and_nan_is_unknown() -> None:
    values = (float("inf"), float("-inf"), float("nan"), None, 1.5)
    assert [number(v) for v in values] == ["+Inf", "-Inf", None, None, 1.5]
    assert number(1 - 0.17 + 1e-16) == 0.83
    assert number(1e9 + 0.25) == 1e9 + 0.25
