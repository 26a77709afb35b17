"""Whose a process is: rules in order, generated names, and what is nobody's."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.config import Found, Match, TenantRule
from gpuagent.model.inventory import GpuProcess, Level, Limits, Process
from gpuagent.sense.tenancy import (
    Claims,
    Rules,
    assign,
    found_name,
    own_processes,
    serves_mps,
)
from gpuagent.sense.terms import Terms
from tests.sense.fakes import process

ID = "0123456789abcdef" * 4
POD = "8a1b2c3d-1111-2222-3333-444455556666"
DOCKER = f"/system.slice/docker-{ID}.scope"
CRIO = f"/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/crio-{ID}.scope"
MANAGER = "/user.slice/user-1000.slice/user@1000.service"


def rule(name: str, sla: Level = Level.L3, **match: str) -> TenantRule:
    return TenantRule(name, sla, Match(**match))


def on_gpu(*pids: int, gpu: str = "GPU-a") -> tuple[GpuProcess, ...]:
    return tuple(GpuProcess(pid, gpu, "compute", 1 << 30) for pid in pids)


def names(claims: Claims) -> dict[str, list[int]]:
    return {t.name: [p.pid for p in t.processes] for t in claims.tenants}


@pytest.mark.parametrize(
    ("match", "fits"),
    [
        ({"unit": "train.service"}, True),
        ({"unit": "train-*.service"}, False),
        ({"unit": "tr*"}, True),
        ({"unit": "TRAIN.service"}, False),
        ({"cgroup": "/system.slice"}, True),
        ({"cgroup": "/system.slice/tr*"}, True),
        ({"cgroup": "/system.slice/train.service/"}, True),
        ({"cgroup": "/system.slice/train"}, False),
        ({"cgroup": "train.service"}, False),
        ({"user": "alice"}, True),
        ({"user": "1000"}, True),
        ({"user": "al"}, False),
        ({"exe": "/usr/bin/python3*"}, True),
        ({"exe": "python3.11"}, False),
        ({"exe": "/usr/bin/python3*", "user": "bob"}, False),
        ({"exe": "/usr/bin/python3*", "user": "alice", "unit": "train.service"}, True),
        ({"container": "*"}, False),
        ({"pod": "*"}, False),
        ({"slurm_job": "*"}, False),
        ({}, False),
    ],
)
def test_all_that_is_given_must_fit(match: dict[str, str], fits: bool) -> None:
    one = process(7, "/system.slice/train.service/worker")
    assert (Rules([rule("t", Level.L3, **match)]).claim(one) is not None) is fits


@pytest.mark.parametrize(
    ("cgroup", "match", "fits"),
    [
        (DOCKER, {"container": ID}, True),
        (DOCKER, {"container": ID[:12]}, True),
        (DOCKER, {"container": ID[:5]}, False),
        (DOCKER, {"container": ID[:3] + "*"}, True),
        ("/lxc.payload.web2", {"container": "web"}, False),
        ("/lxc.payload.web2", {"container": "web?"}, True),
        (CRIO, {"pod": POD}, True),
        (CRIO, {"pod": POD.replace("-", "_")}, True),
        (CRIO, {"pod": "8a1b2c3d"}, False),
        ("/slurm/uid_1000/job_12/step_0", {"slurm_job": "12"}, True),
        ("/slurm/uid_1000/job_12/step_0", {"slurm_job": "1"}, False),
    ],
)
def test_containers_pods_and_jobs(cgroup: str, match: dict[str, str], fits: bool) -> None:
    assert (Rules([rule("t", Level.L3, **match)]).claim(process(7, cgroup)) is not None) is fits


@pytest.mark.parametrize(
    ("match", "fits"),
    [
        ({"unit": "triton.service"}, False),
        ({"cgroup": "*/triton.service"}, False),
        ({"unit": "triton.service", "user": "alice"}, True),
        ({"cgroup": "/user.slice/user-1000.slice/*"}, True),
        ({"cgroup": "/user.slice/user-1000.slice/*", "exe": "/usr/bin/python3.11"}, True),
        ({"exe": "/usr/bin/python3.11"}, False),
        ({"exe": "/usr/bin/python3.11", "user": "alice"}, True),
        ({"user": "alice"}, True),
    ],
)
def test_a_user_cannot_name_himself_into_a_tenant(match: dict[str, str], fits: bool) -> None:
    forged = process(7, f"{MANAGER}/app.slice/triton.service")
    assert (Rules([rule("l1", Level.L1, **match)]).claim(forged) is not None) is fits


def test_the_first_rule_that_fits_claims_gpu_or_not() -> None:
    rules = Rules([rule("special", user="alice", exe="/opt/*"), rule("all", user="alice")])
    claims = assign(
        [process(1, exe="/opt/train"), process(2), process(3, user="bob", uid=7)],
        on_gpu(2),
        rules=rules,
        terms=Terms(),
    )
    assert names(claims) == {"special": [1], "all": [2]}
    assert claims.owner == {1: "special", 2: "all"}


def test_a_rule_gives_level_kind_and_limits() -> None:
    given = TenantRule(
        "serve",
        Level.L2,
        Match(user="alice"),
        kind="inference",
        hold_back=True,
        min_share=0.5,
        memory_limit=1 << 30,
        latency_slo=0.2,
        latency_quantile=0.95,
    )
    (tenant,) = assign(
        [process(1)], on_gpu(1), rules=Rules([given]), terms=Terms(), since={"serve": 7.0}
    ).tenants
    assert (tenant.level, tenant.kind, tenant.rule, tenant.enforce) == (
        Level.L2,
        "inference",
        "serve",
        True,
    )
    assert tenant.limits == Limits(
        memory_limit_bytes=1 << 30,
        min_share_ratio=0.5,
        latency_slo_seconds=0.2,
        latency_quantile=0.95,
    )
    assert (tenant.gpus, tenant.users, tenant.since) == (("GPU-a",), ("alice",), 7.0)


def test_l1_is_never_held_back_whatever_the_rule_says() -> None:
    rules = Rules([TenantRule("serve", Level.L1, Match(user="alice"), hold_back=True)])
    (tenant,) = assign([process(1)], (), rules=rules, terms=Terms()).tenants
    assert tenant.enforce is False


def test_what_is_found_follows_the_configuration() -> None:
    found = Found(sla=Level.L2, hold_back=True)
    (tenant,) = assign([process(1, DOCKER)], on_gpu(1), rules=Rules(), terms=Terms(found)).tenants
    assert (tenant.level, tenant.enforce, tenant.rule) == (Level.L2, True, "")
    (tenant,) = assign([process(1, DOCKER)], on_gpu(1), rules=Rules(), terms=Terms()).tenants
    assert tenant.enforce is False


@pytest.mark.parametrize(
    ("cgroup", "name"),
    [
        (CRIO, f"pod:{POD}"),
        ("/system.slice/slurmstepd.scope/job_12/step_0/user/task_0", "job:12"),
        (DOCKER, f"container:{ID[:12]}"),
        ("/lxc.payload.a-long-name-of-lxc", "container:a-long-name-of-lxc"),
        (f"{MANAGER}/user.slice/libpod-{ID}.scope", f"container:1000/{ID[:12]}"),
        ("/system.slice/jupyter.service/inner", "unit:jupyter.service"),
        (f"{MANAGER}/app.slice/jupyter.service", "unit:1000/jupyter.service"),
        ("/tenants/train", "cgroup:/tenants/train"),
        ("/user.slice/user-1000.slice/session-3.scope", "user:alice"),
        ("/system.slice", "user:alice"),
        ("/", "user:alice"),
        ("", "user:alice"),
    ],
)
def test_generated_names_come_from_the_most_specific_place(cgroup: str, name: str) -> None:
    assert found_name(process(1, cgroup)) == name
    assert names(assign([process(1, cgroup)], on_gpu(1), rules=Rules(), terms=Terms())) == {
        name: [1]
    }


def test_a_found_tenant_has_all_of_its_place_but_not_all_of_its_user() -> None:
    everybody = [
        process(1, DOCKER),
        process(2, f"{DOCKER}/inner"),
        process(3, "/"),
        process(4, "/"),
        process(5, "/system.slice/other.service"),
    ]
    claims = assign(everybody, on_gpu(1, 3), rules=Rules(), terms=Terms())
    assert names(claims) == {f"container:{ID[:12]}": [1, 2], "user:alice": [3]}


def test_mps_servers_and_the_agent_are_nobodys() -> None:
    unit = "/system.slice/mps.service"
    server = process(1, unit, exe="/usr/bin/nvidia-cuda-mps-server", uid=0)
    everybody = [server, process(2, unit), process(3, unit)]
    rules = Rules([rule("all", unit="mps.service")])
    claims = assign(everybody, on_gpu(1, 2, 3), rules=rules, terms=Terms(), own=frozenset({3}))
    assert names(claims) == {"all": [2]}
    assert claims.mps == {1}
    assert rules.claim(server) is None
    claims = assign(everybody, on_gpu(1), rules=Rules(), terms=Terms())
    assert claims.tenants == ()


def test_a_crowd_is_counted_and_those_on_a_card_are_listed() -> None:
    everybody = [process(pid, DOCKER) for pid in range(1, 5001)]
    claims = assign(everybody, on_gpu(4000, 4999), rules=Rules(), terms=Terms())
    (tenant,) = claims.tenants
    assert tenant.process_count == 5000
    assert [p.pid for p in tenant.processes] == [*range(1, 255), 4000, 4999]
    assert len(claims.owner) == 5000
    everyone = assign(everybody, on_gpu(*range(1, 1001)), rules=Rules(), terms=Terms())
    assert len(everyone.tenants[0].processes) == 1000, "memory on a card is summed over these"


def test_places_with_a_process_on_a_card_come_first() -> None:
    everybody = [process(i, f"/system.slice/{c}.service") for i, c in enumerate("abc", 1)]
    (tenant,) = assign(
        everybody, on_gpu(2), rules=Rules([rule("all", user="alice")]), terms=Terms()
    ).tenants
    assert [p.unit for p in tenant.places] == ["b.service", "a.service", "c.service"]


def test_the_agents_own_are_its_children_and_its_unit() -> None:
    unit = "/system.slice/gpuagent.service"
    everybody = [
        process(1, "/init.scope", ppid=0),
        process(10, unit),
        process(11, "/", ppid=10),
        process(12, "/", ppid=11),
        process(13, f"{unit}/worker"),
        process(14, "/"),
    ]
    assert own_processes(everybody, 10) == {10, 11, 12, 13}


def test_an_agent_in_a_login_session_does_not_own_the_session() -> None:
    session = "/user.slice/user-0.slice/session-1.scope"
    assert own_processes([process(10, session), process(11, session)], 10) == {10}


def test_a_long_line_of_parents_takes_little_time() -> None:
    line = [process(pid, ppid=pid - 1) for pid in range(10_000, 0, -1)]
    began = time.process_time()
    assert own_processes(line, 20_000) == {20_000}
    assert own_processes(line, 1) == set(range(1, 10_001))
    # Some 20 ms each; hours if every process walked all of the line.
    assert time.process_time() - began < 5


def test_parents_in_a_circle_end() -> None:
    everybody = [process(5, ppid=6), process(6, ppid=5), process(7, ppid=7)]
    assert own_processes(everybody, 99) == {99}


PROCESSES = st.builds(
    process,
    st.integers(1, 12),
    st.sampled_from([DOCKER, CRIO, "/", "", "/system.slice/x.service", f"{MANAGER}/a.service"]),
    ppid=st.integers(0, 12),
    uid=st.sampled_from([0, 1000]),
    user=st.sampled_from(["alice", "bob"]),
    exe=st.sampled_from(["/usr/bin/nvidia-cuda-mps-server", "/bin/a", ""]),
)


@given(
    st.lists(PROCESSES, max_size=12, unique_by=lambda p: p.pid),
    st.sets(st.integers(1, 14)),
    st.integers(1, 14),
)
def test_no_process_has_two_tenants_and_none_is_lost(
    everybody: list[Process], listed: set[int], agent: int
) -> None:
    rules = Rules([rule("a", unit="x.service"), rule("b", user="bob")])
    own = own_processes(everybody, agent)
    claims = assign(everybody, on_gpu(*listed), rules=rules, terms=Terms(), own=own)
    pids = [p.pid for t in claims.tenants for p in t.processes]
    assert len(pids) == len(set(pids)) == len(claims.owner)
    assert claims.mps == {p.pid for p in everybody if serves_mps(p)}
    owed = {p.pid for p in everybody if p.pid in listed} - own - claims.mps
    assert owed <= set(pids)
    assert not own & set(pids)
    assert [t.name for t in claims.tenants] == sorted({t.name for t in claims.tenants})
    for tenant in claims.tenants:
        assert tenant.rule or tenant.gpus
        assert tenant.process_count == len(tenant.processes)
    owners = {p.cgroup: claims.owner.get(p.pid) for p in everybody if p.pid not in own}
    for p in everybody:
        if p.cgroup in {DOCKER, CRIO} and p.pid not in own:
            assert claims.owner.get(p.pid) == owners[p.cgroup], "one place, one owner"


def test_the_path_alone_tells_whom_a_process_could_not_belong_to() -> None:
    rules = Rules(
        [
            rule("unit", Level.L1, unit="train*.service"),
            rule("both", Level.L2, unit="train.service", user="alice"),
            rule("tree", Level.L3, cgroup="/batch.slice/*"),
        ]
    )
    assert rules.may_claim("/batch.slice/train.service") == {"unit", "both", "tree"}
    assert rules.may_claim("/system.slice/train2.service") == {"unit"}
    assert rules.may_claim("/system.slice/ssh.service") == set()
    assert rules.may_claim("") == set()
    anywhere = Rules([rule("exe", Level.L3, exe="/opt/*")])
    assert anywhere.may_claim("/system.slice/ssh.service") == {"exe"}, "the path cannot tell"


@given(
    st.sampled_from(["/batch.slice/a.service", "/system.slice/b.service", "/x", "/", ""]),
    st.sampled_from(["alice", "bob"]),
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "unit": st.sampled_from(["a.service", "*.service"]),
                "cgroup": st.sampled_from(["/batch.slice", "/x"]),
                "user": st.just("alice"),
            },
        ),
        max_size=4,
    ),
)
def test_whoever_is_claimed_could_be(cgroup: str, user: str, matches: list[dict[str, str]]) -> None:
    rules = Rules([rule(f"t{i}", Level.L3, **match) for i, match in enumerate(matches)])
    claimed = rules.claim(process(7, cgroup, user=user))
    assert claimed is None or claimed.name in rules.may_claim(cgroup)
