"""What `explain`, `status` and `tenants` say of what is not done, and how that reads in a pipe."""

import contextlib
import io
import json

import msgspec
import pytest

from gpuagent.cli import show
from gpuagent.model import vocab
from gpuagent.model.inventory import Level, MpsDaemon, on_gpu, on_mps, on_tenant
from gpuagent.model.lease import Lease
from gpuagent.model.plan import Blocked, Cause, Plan, Setting, Snapshot
from gpuagent.model.state import NodeState, Outcome, Reading, Result
from tests.cli.stage import agent, run
from tests.expose import snapshots

UUID_OF_GROUP = "GPU-0f0f0f0f-0000-0000-0000-000000000000"


def said(snapshot: Snapshot, *words: str, columns: int = 400) -> str:
    with agent(snapshot) as path:
        done = run("--socket", path, *words, columns=columns)
    assert done.exit_code in (0, 1), done.output
    return done.stdout


def changed(snapshot: Snapshot, **tenant: object) -> Snapshot:
    """With the tenant `train` so."""
    state = snapshot.state
    tenants = tuple(
        msgspec.structs.replace(t, **tenant) if t.name == "train" else t
        for t in state.inventory.tenants or ()
    )
    return with_state(snapshot, inventory=msgspec.structs.replace(state.inventory, tenants=tenants))


def with_state(snapshot: Snapshot, **fields: object) -> Snapshot:
    old = snapshot.state
    parts = {name: getattr(old, name) for name in ("inventory", "readings", "health", "leases")}
    return msgspec.structs.replace(snapshot, state=NodeState(old.now, **(parts | fields)))


# -- hours -----------------------------------------------------------------------------------------------


def otherwise() -> str:
    """Hours that the pictures are not in: they are taken at 08:00 UTC."""
    return "23:00-06:00"


def test_hours_that_cannot_be_enforced_are_told_with_the_reason() -> None:
    bare = msgspec.structs.replace(snapshots.busy(), holds=(), causes=(), outcomes={})
    lacks = changed(bare, hours=(otherwise(),), levers=("notice", "suspend"))
    text = said(lacks, "explain", "train")
    assert "hours cannot be enforced: cpu_max is not among its levers." in text
    for fields, why in (
        ({"enforce": False}, "hold_back is false for it"),
        ({"level": Level.L1}, "it is L1"),
    ):
        told = changed(bare, hours=(otherwise(),), **fields)
        assert f"hours cannot be enforced: {why}" in said(told, "explain", "train")
    assert "cannot be enforced" not in said(changed(bare, hours=(otherwise(),)), "explain", "train")
    assert "cannot be enforced" not in said(
        changed(bare, hours=("00:00-24:00",), levers=()), "explain", "train"
    )


def test_an_override_decides_instead_of_the_hours() -> None:
    ordered = Lease(
        id="free",
        subject=on_tenant("train"),
        value=1.0,
        until=9e9,
        until_wall=9e9,
        ttl_seconds=3600,
        by="root",
        why="a demo",
        created_wall=0.0,
    )
    told = with_state(changed(snapshots.busy(), hours=(otherwise(),)), leases=(ordered,))
    assert "But an override decides instead." in said(told, "explain", "train")


# -- what is only observed ---------------------------------------------------------------------------------


def test_what_is_only_observed_is_told_as_such_while_the_agent_acts() -> None:
    told = snapshots.became("would", "of this tenant it is only said")
    text = said(told, "explain", "train")
    assert "It would be held back to 49 % of its usual activity for memory, which is only " in text
    assert "It is not held back now" not in text
    assert "would 49 %" in said(told, "tenants")
    assert "held back 0, would be held back 1" in said(told, "status")


# -- causes -------------------------------------------------------------------------------------------------


def test_a_neighbours_cause_that_holds_it_is_among_its_causes() -> None:
    why = "p99 of chat is 120 ms of 100 ms"
    busy = snapshots.busy()
    holds = (msgspec.structs.replace(busy.holds[0], cause="latency", why=why),)
    others = (
        Cause("latency", on_tenant("chat"), 0.0, why),
        Cause("latency", on_tenant("voice"), 0.0, "p99 of voice is 9 ms of 8 ms"),
    )
    told = msgspec.structs.replace(busy, holds=holds, causes=others)
    text = said(told, "explain", "train")
    causes = text[text.index("Causes now") : text.index("Knobs")]
    assert why in causes
    assert "voice" not in causes
    assert why not in said(told, "explain", "serve")


def test_a_latency_that_is_estimated_is_marked() -> None:
    for exact, text, row in ((True, "is 93 ms", " 93 ms"), (False, "is about 93 ms", " ~93 ms")):
        read = Reading(
            vocab.TENANT_LATENCY_SECONDS,
            on_tenant("train"),
            0.093,
            snapshots.MONO,
            dims=("0.99",),
            exact=exact,
        )
        busy = snapshots.busy()
        told = with_state(busy, readings={**busy.state.readings, read.key: read})
        assert f"Its p99 latency {text};" in said(told, "explain", "train")
        assert row in said(told, "tenants")
        assert row in said(told, "top")


# -- MPS and cards -----------------------------------------------------------------------------------------


def with_mps(
    result: Result = "refused", why: str = "nvidia-cuda-mps-control: not found"
) -> Snapshot:
    down = MpsDaemon(
        "jobs", up=False, why="no MPS control daemon runs there", gpus=(UUID_OF_GROUP,)
    )
    up = MpsDaemon("shared", up=True, gpus=(snapshots.GPU0,), default_threads_ratio=0.5)
    busy = snapshots.busy()
    inventory = msgspec.structs.replace(busy.state.inventory, mps=(down, up))
    own = Setting(vocab.MPS_DAEMON, on_mps("jobs"), 1.0, "configured", "mps/own")
    outcome = Outcome(own.knob, own.subject, 1.0, 0.0, None, result, why, snapshots.MONO)
    plan = Plan((*busy.plan.settings, own))
    outcomes = {**busy.outcomes, own.key: outcome}
    return msgspec.structs.replace(
        with_state(busy, inventory=inventory), plan=plan, outcomes=outcomes
    )


def test_status_has_the_mps_daemons_and_why_one_of_ours_could_not_be_started() -> None:
    text = said(with_mps(), "status")
    assert "Health: ok, degraded" in text
    assert "the MPS daemon jobs is not as wished: nvidia-cuda-mps-control: not found" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["jobs", "down", "yes", UUID_OF_GROUP, "0", "0", "-"] in lines
    assert ["shared", "up", "no", snapshots.GPU0, "0", "0", "50", "%"] in lines
    well = said(with_mps("pending", ""), "status")
    assert "Health: ok\n" in well
    assert "not as wished" not in well
    assert "MPS daemon" not in said(snapshots.busy(), "status")
    found = json.loads(said(with_mps(), "status", "--json"))
    assert [d["name"] for d in found["mps"]["daemons"]] == ["jobs", "shared"]
    assert found["mps"]["daemons"][0]["own_why"] == "nvidia-cuda-mps-control: not found"
    assert found["mps"]["daemons"][1]["own_why"] == ""


def test_status_names_the_settings_of_cards_that_are_refused() -> None:
    blocked = Blocked("refused", "the driver does not allow it")
    mode = Setting(
        vocab.PERSISTENCE_MODE, on_gpu(snapshots.GPU0), 1, "wished", "cards/mode", (), blocked
    )
    text = said(msgspec.structs.replace(snapshots.busy(), plan=Plan((mode,))), "status")
    assert "Card 0: gpu_persistence_mode 1: refused: the driver does not allow it" in text
    assert "refused" not in said(snapshots.busy(), "status")


def test_the_plan_tells_a_group_of_mps_from_a_card() -> None:
    with agent(with_mps()) as path:
        from gpuagent.cli.client import Client

        knobs = Client(path).get("/v1/plan")["knobs"]
    [own] = [k for k in knobs if k["knob"] == vocab.MPS_DAEMON.name]
    assert (own["gpu"], own["mps"]) == (None, "jobs")
    assert all(k["mps"] is None for k in knobs if k is not own)


# -- pipes and terminals -----------------------------------------------------------------------------------


def test_a_pipe_is_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    long = "word " * 60
    for columns, count in (("", 1), ("80", 4)):
        monkeypatch.setenv("COLUMNS", columns)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            show.say(long.strip())
            show.table(("A", "B"), [(UUID_OF_GROUP, "x" * 100)])
        lines = out.getvalue().splitlines()
        assert (len([x for x in lines if "word" in x]) == 1) == (count == 1)
        whole = any(UUID_OF_GROUP in x and "x" * 100 in x for x in lines)
        assert whole == (count == 1)


def test_watts_are_whole() -> None:
    assert show.amount("watts", 333.94) == "334 W"
