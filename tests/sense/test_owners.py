"""Who is taken for whom: what counts where, one owner for each household, and no way to pass for another."""

import pytest

from gpuagent.config import Match, TenantRule
from gpuagent.model.inventory import GpuProcess, Level, Process
from gpuagent.sense.tenancy import Rules, assign, mps_servers
from gpuagent.sense.terms import Terms
from tests.sense.fakes import process

ID = "0123456789abcdef" * 4
POD = "8a1b2c3d-1111-2222-3333-444455556666"
DOCKER = f"/system.slice/docker-{ID}.scope"
CRIO = f"/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/crio-{ID}.scope"
MANAGER = "/user.slice/user-1000.slice/user@1000.service"
PODMAN = f"{MANAGER}/user.slice/libpod-{ID}.scope"
JOB = "/system.slice/slurmstepd.scope/job_12"
HUB = "/system.slice/jupyterhub.service"
MPS = {"exe": "/usr/bin/nvidia-cuda-mps-server", "name": "nvidia-cuda-mps"}
CONTROL = {"exe": "/usr/bin/nvidia-cuda-mps-control"}
ROOT = {"uid": 0, "user": "root"}


def rule(name: str, **match: str) -> TenantRule:
    return TenantRule(name, Level.L3, Match(**match))


@pytest.mark.parametrize(
    ("cgroup", "match", "fits"),
    [
        (DOCKER, {"user": "alice"}, False),
        (DOCKER, {"user": "1000"}, False),
        (DOCKER, {"exe": "/usr/bin/python3*"}, False),
        (DOCKER, {"cgroup": "/system.slice/*", "exe": "/usr/bin/python3*"}, False),
        (DOCKER, {"container": ID, "user": "alice"}, True),
        (DOCKER, {"container": ID[:12], "exe": "/usr/bin/python3*"}, True),
        (CRIO, {"user": "alice"}, False),
        (CRIO, {"pod": POD, "exe": "/usr/bin/python3*"}, True),
        (f"/jobs/{ID}", {"user": "alice"}, False),
        ("/lxc.payload.web", {"exe": "*"}, False),
        ("/machine.slice/machine-web.scope", {"user": "alice"}, False),
        ("/machine.slice/machine-web.scope", {"unit": "machine-web.scope"}, True),
        # A job is its user's: who he is counts, what he runs does only beside that.
        (f"{JOB}/step_0/user/task_0", {"user": "alice"}, True),
        (f"{JOB}/step_0/user/task_0", {"exe": "/usr/bin/python3*"}, False),
        (f"{JOB}/step_0/user/task_0", {"exe": "/usr/bin/python3*", "user": "alice"}, True),
        (f"{JOB}/step_0/user/task_0", {"exe": "/usr/bin/python3*", "slurm_job": "12"}, True),
        ("/slurm/uid_1000/job_12/step_0", {"user": "alice"}, True),
        ("/slurm/uid_1001/job_12/step_0", {"user": "alice"}, False),
        # So is a tree of his own, but for the containers that others put into his slice.
        (PODMAN, {"user": "alice"}, True),
        (f"/user.slice/user-1000.slice/docker-{ID}.scope", {"user": "alice"}, False),
        (f"{MANAGER.replace('1000', '1001')}/app.slice/x.service", {"user": "alice"}, False),
        # What a place calls its inner cgroups tells nothing.
        (f"{DOCKER}/triton.service", {"cgroup": "*/triton.service"}, False),
        ("/system.slice/a.service/triton.service", {"cgroup": "*/triton.service"}, False),
    ],
)
def test_user_and_executable_count_only_where_somebody_vouches_for_them(
    cgroup: str, match: dict[str, str], fits: bool
) -> None:
    assert (Rules([rule("t", **match)]).claim(process(7, cgroup)) is not None) is fits


CHAT = rule("chat", exe="/opt/chat")
ALICE = rule("alice", user="alice")


def whose(rules: list[TenantRule], *everybody: Process) -> dict[int, str]:
    """Owner by pid, with every process on a card."""
    listed = [GpuProcess(p.pid, "GPU-a", "compute", 1) for p in everybody]
    return dict(assign(everybody, listed, rules=Rules(rules), terms=Terms()).owner)


@pytest.mark.parametrize(
    "bob",
    [DOCKER, CRIO, f"{JOB}/step_0", "/machine.slice/machine-bob.scope", f"/jobs/{ID}"],
)
@pytest.mark.parametrize("older", [True, False])
def test_a_stray_process_does_not_make_a_container_anothers(bob: str, older: bool) -> None:
    stray = process(2, bob, exe="/opt/chat", started=1 if older else 9999)
    everybody = (process(1, bob, uid=1001, user="bob"), stray)
    rules = [CHAT, ALICE] if not (older and JOB in bob) else [CHAT]
    (name,) = set(whose(rules, *everybody).values())
    assert name not in {"chat", "alice"}


@pytest.mark.parametrize(
    ("match", "bob"),
    [
        ({"container": ID}, DOCKER),
        ({"pod": POD}, CRIO),
        ({"slurm_job": "12"}, f"{JOB}/step_0/user"),
        ({"unit": "bob.service"}, "/system.slice/bob.service"),
        ({"cgroup": "/tenants/bob"}, "/tenants/bob"),
    ],
)
def test_a_rule_that_names_the_place_has_all_of_it(match: dict[str, str], bob: str) -> None:
    everybody = (
        process(1, bob, exe="/opt/chat"),
        process(2, bob),
        process(3, bob, uid=0, user="root", exe="/bin/bash"),
    )
    rules = [CHAT, ALICE, rule("bob", **match)]
    assert whose(rules, *everybody) == {1: "bob", 2: "bob", 3: "bob"}


def test_a_users_job_stays_his_whatever_runs_in_it() -> None:
    everybody = (
        process(1, f"{JOB}/step_extern", uid=0, user="root", exe="/usr/sbin/slurmstepd"),
        process(2, f"{JOB}/step_0", uid=1001, user="bob"),
        process(3, f"{JOB}/step_0"),
    )
    assert set(whose([ALICE, rule("bobs", user="bob")], *everybody).values()) == {"bobs"}


def test_a_container_of_a_users_own_is_his_with_all_its_users() -> None:
    everybody = (process(1, PODMAN), process(2, PODMAN, uid=100_033, user="100033"))
    assert whose([ALICE], *everybody) == {1: "alice", 2: "alice"}


def test_in_a_unit_the_oldest_process_decides_for_those_of_its_user() -> None:
    unit = "/system.slice/x.service"
    bash = process(1, unit, exe="/bin/bash")
    chat = process(2, unit, exe="/opt/chat")
    assert whose([CHAT], bash, chat) == {1: "chat", 2: "chat"}, "a wrapper goes with its service"
    assert whose([CHAT, ALICE], bash, chat) == {1: "alice", 2: "alice"}, "started later"
    older = process(2, unit, exe="/opt/chat", started=1)
    assert whose([CHAT, ALICE], bash, older) == {1: "chat", 2: "chat"}, "her service, by the order"


def test_users_who_share_a_unit_stay_apart() -> None:
    everybody = (
        process(1, HUB, uid=0, user="root"),
        process(2, HUB),
        process(3, HUB, uid=1001, user="bob"),
        process(4, HUB, exe="/bin/bash"),
    )
    bobs = rule("bobs", user="bob")
    assert whose([ALICE, bobs], *everybody) == {
        1: "unit:jupyterhub.service",
        2: "alice",
        3: "bobs",
        4: "alice",
    }
    split = [rule("alice", unit="jupyterhub.service", user="alice"), rule("hub", unit="jupyter*")]
    assert whose(split, *everybody) == {1: "hub", 2: "alice", 3: "hub", 4: "alice"}


def test_in_a_login_session_each_process_stands_for_itself() -> None:
    session = "/user.slice/user-1000.slice/session-3.scope"
    sudo = process(3, session, uid=0, user="root", exe="/usr/bin/sudo")
    everybody = (process(1, session), process(2, session, exe="/opt/chat"), sudo)
    assert whose([CHAT, ALICE], *everybody) == {1: "alice", 2: "chat", 3: "user:root"}


@pytest.mark.parametrize(
    ("server", "parent", "serves"),
    [
        (process(2, "/system.slice/mps.service", **MPS, **ROOT), None, True),
        (process(2, "/", **MPS, **ROOT), None, True),
        (process(2, "/", ppid=3, **MPS), process(3, "/", **CONTROL, **ROOT), True),
        (process(2, "/", **MPS), process(3, "/", **CONTROL, **ROOT), False),
        (process(2, "/", ppid=3, **MPS), process(3, "/", **CONTROL), False),
        (process(2, "/", ppid=3, **MPS), process(3, "/", **ROOT), False),
        (process(2, "/", ppid=3, **MPS), process(3, DOCKER, **CONTROL, **ROOT), False),
        (process(2, "/system.slice/bob.service", **MPS), None, False),
        (process(2, DOCKER, **MPS, **ROOT), None, False),
        (process(2, f"{JOB}/step_0", **MPS), None, False),
        (process(2, f"{MANAGER}/app.slice/mps.service", **MPS), None, False),
        (process(2, "/", exe="/opt/train", **ROOT), None, False),
    ],
)
def test_only_the_hosts_own_mps_serves_others(
    server: Process, parent: Process | None, serves: bool
) -> None:
    everybody = [server] if parent is None else [server, parent]
    assert (server.pid in mps_servers(everybody)) is serves


def test_who_calls_his_program_an_mps_server_stays_who_he_is() -> None:
    fake = process(2, DOCKER, **MPS, **ROOT)
    assert whose([rule("bob", container=ID)], process(1, DOCKER), fake) == {1: "bob", 2: "bob"}
