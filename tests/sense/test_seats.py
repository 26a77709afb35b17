"""Seats: a cgroup is a tenant's own or refused with the names of those who live there too."""

import time

import pytest

from gpuagent.config import Match, TenantRule
from gpuagent.model.inventory import GpuProcess, Level, Process, Seat, Tenant
from gpuagent.sense.seats import ancestors, seat_paths, seated
from gpuagent.sense.tenancy import Rules, assign, own_processes
from gpuagent.sense.terms import Terms
from tests.sense.fakes import process

ID = "0123456789abcdef" * 4
OTHER = ID[::-1]
POD_ = "8a1b2c3d_1111_2222_3333_444455556666"
POD_SLICE = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD_}.slice"
RULES = (
    TenantRule("train", Level.L3, Match(exe="/opt/train")),
    TenantRule("mine", Level.L3, Match(pod="8a1b2c3d-*")),
    TenantRule("mine", Level.L3, Match(slurm_job="12")),
    TenantRule("serve", Level.L1, Match(exe="/opt/serve")),
)


def tenants_of(
    *everybody: Process, gpu: tuple[int, ...] = (), missing: frozenset[str] = frozenset()
) -> dict[str, Tenant]:
    listed = [GpuProcess(pid, "GPU-a", "compute", 0) for pid in gpu]
    own = own_processes(everybody, 999)
    claims = assign(everybody, listed, rules=Rules(RULES), terms=Terms(), own=own)
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
        (
            process(9, "/batch.slice/t.service/x", exe="/opt/serve", uid=7, user="bob"),
            "also home of tenant serve",
        ),
        (
            process(9, "/batch.slice/t.service", exe="/bin/bash", uid=7, user="bob"),
            "also home of bash of t.service",
        ),
        (
            process(9, "/batch.slice/t.service", exe="/usr/sbin/sshd", uid=0, user="root"),
            "also home of sshd",
        ),
        (
            process(9, "/batch.slice/t.service", exe="/usr/bin/dockerd", uid=0, user="root"),
            "also home of dockerd",
        ),
        (
            process(
                9,
                "/batch.slice/t.service",
                exe="/usr/bin/nvidia-cuda-mps-server",
                uid=0,
                user="root",
            ),
            "also home of a CUDA MPS server",
        ),
        (process(1, "/batch.slice/t.service", ppid=0), "also home of init"),
    ],
)
def test_who_else_lives_there_is_named(other: Process, text: str) -> None:
    tenant = tenants_of(train(5, "/batch.slice/t.service"), other)["train"]
    assert only_seat(tenant).refusal == text


@pytest.mark.parametrize("exe", ["/bin/bash", "/opt/serve", "/usr/bin/nvidia-cuda-mps-server"])
def test_what_a_tenant_starts_beside_is_no_way_out(exe: str) -> None:
    found = tenants_of(
        train(5, "/batch.slice/t.service"), process(9, "/batch.slice/t.service", exe=exe)
    )
    assert list(found) == ["train"]
    assert only_seat(found["train"]).refusal == ""


@pytest.mark.parametrize("fields", [{"exe": "/opt/serve"}, {"uid": 0, "exe": "/usr/sbin/sshd"}])
def test_nor_is_what_runs_in_a_container(fields: dict[str, object]) -> None:
    cgroup = f"/system.slice/docker-{ID}.scope"
    found = tenants_of(process(5, cgroup), process(9, cgroup, **fields), gpu=(5,))
    (tenant,) = found.values()
    assert (tenant.level, only_seat(tenant).refusal) == (Level.L3, "")


def test_nor_is_a_machine() -> None:
    cgroup = "/machine.slice/machine-a.scope"
    sshd = process(9, cgroup, exe="/usr/sbin/sshd", uid=0, user="root")
    found = tenants_of(process(5, cgroup), sshd, gpu=(5, 9))
    assert only_seat(found["unit:machine-a.scope"]).refusal == ""


def test_the_agent_is_never_held() -> None:
    own = process(999, "/batch.slice/t.service/deep")
    everybody = (train(5, "/batch.slice/t.service"), own)
    claims = assign(everybody, (), rules=Rules(RULES), terms=Terms(), own=frozenset({999}))
    inodes = {"/batch.slice/t.service": 7}
    (tenant,) = seated(claims, everybody, inodes=inodes, own=frozenset({999}))
    assert only_seat(tenant).refusal == "also home of gpuagent itself"


def test_many_others_are_counted() -> None:
    others = [
        process(10 + i, "/tenants/a", exe=f"/bin/{name}", uid=7) for i, name in enumerate("edcba")
    ]
    found = tenants_of(train(5, "/tenants/a"), *others)
    assert only_seat(found["train"]).refusal == "also home of a, b, c and 2 more"
    found = tenants_of(train(5, "/tenants/a"), *others[:3])
    assert only_seat(found["train"]).refusal == "also home of c, d, e"


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
    claims = assign([sshd], (), rules=rules, terms=Terms())
    (tenant,) = seated(claims, [sshd], inodes={"/system.slice/ssh.service": 5})
    assert only_seat(tenant).refusal == "also home of sshd"


def test_each_ancestor_has_its_own_refusal() -> None:
    cgroup = f"{POD_SLICE}/cri-containerd-{ID}.scope"
    found = tenants_of(process(5, cgroup))
    seat = only_seat(found["mine"])
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
    (tenant,) = tenants_of(train(5, cgroup), gpu=(5,)).values()
    seat = only_seat(tenant)
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
        process(5, f"{job}/step_0/user/task_0"),
        process(6, f"{job}/step_0/slurm", exe="/usr/sbin/slurmstepd", **root),
        process(7, "/system.slice/slurmstepd.scope/system", exe="/usr/sbin/slurmstepd", **root),
    )
    seat = only_seat(found["mine"])
    assert (seat.path, seat.refusal) == (job, "")
    assert seat.above[0].refusal == "managed by Slurm"


def test_the_pod_of_two_containers_has_a_seat_for_each() -> None:
    one, two = (f"{POD_SLICE}/crio-{i}.scope" for i in (ID, OTHER))
    found = tenants_of(process(5, one), process(6, two), gpu=(5,))
    tenant = found["mine"]
    assert [(s.path, s.refusal) for s in tenant.seats] == [(one, ""), (two, "")]


def services(count: int) -> list[Process]:
    """So many services of alice's own systemd, with one process each."""
    app = "/user.slice/user-1000.slice/user@1000.service/app.slice"
    return [process(1000 + n, f"{app}/s{n:05}.service") for n in range(1, count + 1)]


def of_alice(everybody: list[Process], gpu: tuple[int, ...] = ()) -> Tenant:
    listed = [GpuProcess(pid, "GPU-a", "compute", 0) for pid in gpu]
    rules = Rules([TenantRule("alice", Level.L3, Match(user="alice"))])
    claims = assign(everybody, listed, rules=rules, terms=Terms())
    inodes = dict.fromkeys(seat_paths(claims.tenants), 5)
    (tenant,) = seated(claims, everybody, inodes=inodes)
    return tenant


def test_of_too_many_cgroups_those_on_a_card_are_held_and_the_others_are_told() -> None:
    tenant = of_alice(services(100), gpu=(1099, 1050))
    *held, more = tenant.seats
    assert [s.path[-13:-8] for s in held] == [f"{n:05}" for n in (*range(1, 31), 50, 99)]
    assert {s.refusal for s in held} == {""}
    assert (more.path[-13:], more.inode, more.refusal) == (
        "00031.service",
        0,
        "68 more cgroups: too many to hold back",
    )


def test_as_many_as_can_be_held_leave_nothing_to_tell() -> None:
    assert {s.refusal for s in of_alice(services(32)).seats} == {""}
    assert of_alice(services(33)).seats[-1].refusal == "1 more cgroup: too many to hold back"


def test_what_is_held_from_above_is_not_left_out() -> None:
    inner = [process(pid, f"/tenants/a/c{pid:03}") for pid in range(12, 100)]
    assert [s.path for s in of_alice([process(11, "/tenants/a"), *inner]).seats] == ["/tenants/a"]


def test_processes_without_a_home_count_as_well() -> None:
    slices = [process(pid, f"/a{pid:03}.slice") for pid in range(1, 41)]
    seats = of_alice(slices).seats
    assert len(seats) == 33
    assert seats[-1].refusal == "8 more cgroups: too many to hold back"


def test_a_crowd_of_neighbours_is_seated_in_little_time() -> None:
    everybody = [process(pid, f"/batch.slice/s{pid}.service") for pid in range(1001, 5001)]
    listed = [GpuProcess(p.pid, "GPU-a", "compute", 0) for p in everybody]
    claims = assign(everybody, listed, rules=Rules(), terms=Terms())
    inodes = dict.fromkeys(seat_paths(claims.tenants), 5)
    began = time.process_time()
    tenants = seated(claims, everybody, inodes=inodes)
    # Some 0.1 s; a list of all neighbours for each of them takes half a minute.
    assert time.process_time() - began < 5
    assert len(tenants) == 4000
    (above,) = only_seat(tenants[0]).above
    assert above.refusal.endswith(" and 3996 more")


def test_ancestors_are_nearest_first_without_the_root() -> None:
    assert list(ancestors("/a/b/c")) == ["/a/b", "/a"]
    assert list(ancestors("/a")) == list(ancestors("/")) == list(ancestors("")) == []
