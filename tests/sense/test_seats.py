"""Seats: a cgroup is a tenant's own or refused with the names of those who live there too."""

import pytest

from gpuagent.config import Found, Match, TenantRule
from gpuagent.model.inventory import GpuProcess, Level, Process, Seat, Tenant
from gpuagent.sense.seats import ancestors, seat_paths, seated
from gpuagent.sense.tenancy import Rules, assign, own_processes
from tests.sense.fakes import process

ID = "0123456789abcdef" * 4
OTHER = ID[::-1]
POD_ = "8a1b2c3d_1111_2222_3333_444455556666"
POD_SLICE = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD_}.slice"
RULES = (
    TenantRule("train", Level.L3, Match(exe="/opt/train")),
    TenantRule("serve", Level.L1, Match(exe="/opt/serve")),
)


def tenants_of(
    *everybody: Process, gpu: tuple[int, ...] = (), missing: frozenset[str] = frozenset()
) -> dict[str, Tenant]:
    listed = [GpuProcess(pid, "GPU-a", "compute", 0) for pid in gpu]
    own = own_processes(everybody, 999)
    claims = assign(everybody, listed, rules=Rules(RULES), found=Found(), own=own)
    inodes = {p: 100 + i for i, p in enumerate(sorted(seat_paths(claims.tenants) - missing))}
    return {t.name: t for t in seated(claims, everybody, inodes=inodes, own=own)}


def train(pid: int, cgroup: str, **fields: object) -> Process:
    return process(pid, cgroup, exe="/opt/train", **fields)


def only_seat(tenant: Tenant) -> Seat:
    (seat,) = tenant.seats
    return seat


def test_a_unit_of_ones_own_can_be_held() -> None:
    found = tenants_of(
        train(5, "/batch.slice/train.service"), train(6, "/batch.slice/train.service/w")
    )
    seat = only_seat(found["train"])
    assert (seat.path, seat.refusal) == ("/batch.slice/train.service", "")
    assert seat.inode >= 100
    assert [(s.path, s.refusal) for s in seat.above] == [("/batch.slice", "")]


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (process(9, "/batch.slice/t.service/x", exe="/opt/serve"), "also home of tenant serve"),
        (process(9, "/batch.slice/t.service", exe="/bin/bash"), "also home of bash of t.service"),
        (
            process(9, "/batch.slice/t.service", exe="/usr/sbin/sshd", uid=0, user="root"),
            "also home of sshd",
        ),
        (
            process(9, "/batch.slice/t.service", exe="/usr/bin/dockerd", uid=0, user="root"),
            "also home of dockerd",
        ),
        (
            process(9, "/batch.slice/t.service", exe="/usr/bin/nvidia-cuda-mps-server"),
            "also home of a CUDA MPS server",
        ),
        (process(1, "/batch.slice/t.service", ppid=0), "also home of init"),
    ],
)
def test_who_else_lives_there_is_named(other: Process, text: str) -> None:
    tenant = tenants_of(train(5, "/batch.slice/t.service"), other)["train"]
    assert only_seat(tenant).refusal == text


def test_the_agent_is_never_held() -> None:
    own = process(999, "/batch.slice/t.service/deep")
    everybody = (train(5, "/batch.slice/t.service"), own)
    claims = assign(everybody, (), rules=Rules(RULES), found=Found(), own=frozenset({999}))
    inodes = {"/batch.slice/t.service": 7}
    (tenant,) = seated(claims, everybody, inodes=inodes, own=frozenset({999}))
    assert only_seat(tenant).refusal == "also home of gpuagent itself"


def test_many_others_are_counted() -> None:
    others = [process(10 + i, "/tenants/a", exe=f"/bin/{name}") for i, name in enumerate("edcba")]
    found = tenants_of(train(5, "/tenants/a"), *others)
    assert only_seat(found["train"]).refusal == "also home of a, b, c and 2 more"


def test_a_login_session_is_refused_even_when_alone() -> None:
    found = tenants_of(train(5, "/user.slice/user-1000.slice/session-3.scope"))
    assert only_seat(found["train"]).refusal == "a login session is never held back"


def test_a_tenants_own_sshd_in_its_container_is_no_way_out() -> None:
    cgroup = f"/system.slice/docker-{ID}.scope"
    found = tenants_of(
        process(5, cgroup),
        process(6, cgroup, exe="/usr/sbin/sshd", uid=0, user="root"),
        process(7, cgroup, exe="/usr/bin/dockerd", uid=0, user="root"),
        gpu=(5,),
    )
    assert only_seat(found[f"container:{ID[:12]}"]).refusal == ""


def test_a_protected_process_stays_protected_under_a_wide_rule() -> None:
    sshd = process(6, "/system.slice/ssh.service", exe="/usr/sbin/sshd", uid=0, user="root")
    rules = Rules([TenantRule("roots", Level.L3, Match(user="root"))])
    claims = assign([sshd], (), rules=rules, found=Found())
    (tenant,) = seated(claims, [sshd], inodes={"/system.slice/ssh.service": 5})
    assert only_seat(tenant).refusal == "also home of sshd"


def test_each_ancestor_has_its_own_refusal() -> None:
    cgroup = f"{POD_SLICE}/cri-containerd-{ID}.scope"
    found = tenants_of(train(5, cgroup))
    seat = only_seat(found["train"])
    assert seat.refusal == ""
    assert [s.path for s in seat.above] == list(ancestors(cgroup))
    assert {s.refusal for s in seat.above} == {"managed by kubelet"}


def test_slices_of_systemd_are_never_used_and_shared_ones_name_the_neighbour() -> None:
    found = tenants_of(
        train(5, "/system.slice/a.service"),
        train(6, "/batch.slice/b.service"),
        process(7, "/batch.slice/c.service", exe="/opt/serve"),
    )
    above = {s.path: s.refusal for seat in found["train"].seats for s in seat.above}
    assert above == {
        "/system.slice": "managed by systemd, with all that is in it",
        "/batch.slice": "also home of tenant serve",
    }


@pytest.mark.parametrize(
    ("cgroup", "home", "text"),
    [
        ("/", "/", "root cgroup"),
        ("", "", "no cgroup v2 path"),
        ("/system.slice", "/system.slice", "shared out"),
        ("/../x.service", "/../x.service", "namespace"),
        ("/caf\ufffd.service", "/caf\ufffd.service", "not plain text"),
        (POD_SLICE, POD_SLICE, "shared out"),
        (
            "/system.slice/slurmstepd.scope/system",
            "/system.slice/slurmstepd.scope",
            "managed by Slurm",
        ),
        (
            "/user.slice/user-1000.slice/user@1000.service/x",
            "/user.slice/user-1000.slice/user@1000.service",
            "managed by systemd for the user",
        ),
        ("/system.slice/docker.service/x", "/system.slice/docker.service", "container runtime"),
    ],
)
def test_places_without_a_seat_say_why(cgroup: str, home: str, text: str) -> None:
    seat = only_seat(tenants_of(train(5, cgroup))["train"])
    assert seat.path == home
    assert text in seat.refusal


def test_a_cgroup_that_is_not_below_the_root_is_refused() -> None:
    found = tenants_of(train(5, "/a.slice/t.service"), missing=frozenset({"/a.slice/t.service"}))
    seat = only_seat(found["train"])
    assert (seat.inode, seat.refusal) == (0, "no such cgroup below the configured cgroup_root")


def test_one_hold_is_enough_for_nested_homes() -> None:
    found = tenants_of(train(5, "/tenants/a"), train(6, "/tenants/a/b"))
    assert [s.path for s in found["train"].seats] == ["/tenants/a"]
    found = tenants_of(train(5, "/tenants/a"), train(6, "/tenants/a/b"), process(7, "/tenants/a/c"))
    assert [(s.path, bool(s.refusal)) for s in found["train"].seats] == [
        ("/tenants/a", True),
        ("/tenants/a/b", False),
    ]


def test_a_slurm_job_is_held_with_its_own_supervisor_in_it() -> None:
    job = "/system.slice/slurmstepd.scope/job_12"
    root: dict[str, object] = {"uid": 0, "user": "root"}
    found = tenants_of(
        train(5, f"{job}/step_0/user/task_0"),
        process(6, f"{job}/step_0/slurm", exe="/usr/sbin/slurmstepd", **root),
        process(7, "/system.slice/slurmstepd.scope/system", exe="/usr/sbin/slurmstepd", **root),
    )
    seat = only_seat(found["train"])
    assert (seat.path, seat.refusal) == (job, "")
    assert seat.above[0].refusal == "managed by Slurm"


def test_the_pod_of_two_containers_has_a_seat_for_each() -> None:
    one, two = (f"{POD_SLICE}/crio-{i}.scope" for i in (ID, OTHER))
    found = tenants_of(process(5, one), process(6, two), gpu=(5,))
    tenant = found["pod:8a1b2c3d-1111-2222-3333-444455556666"]
    assert [(s.path, s.refusal) for s in tenant.seats] == [(one, ""), (two, "")]


def test_ancestors_are_nearest_first_without_the_root() -> None:
    assert list(ancestors("/a/b/c")) == ["/a/b", "/a"]
    assert list(ancestors("/a")) == list(ancestors("/")) == list(ancestors("")) == []
