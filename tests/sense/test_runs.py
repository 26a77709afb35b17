"""Runs as tenants: whose a process in a scope, or below a run without one, is; and when a run has ended."""

from collections.abc import Collection
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.config import Config, Match, TenantRule
from gpuagent.errors import Unavailable
from gpuagent.model.inventory import GpuProcess, Inventory, Level
from gpuagent.model.run import Key, Reservation
from gpuagent.model.state import Instant, NodeState
from gpuagent.ports import Runs, Sensor
from gpuagent.sense.runs import NoRuns, RunEnds, descended, rule_of
from gpuagent.sense.tenancy import Claims, Rules, assign
from gpuagent.sense.tenants import Tenants
from gpuagent.sense.terms import Terms
from tests.sense.fakes import FakeCgroups, FakeProcesses, process

SCOPE = "/gpuagent.slice/gpuagent-tenants.slice/gpuagent-run-100-1100.scope"
SESSION = "/user.slice/user-1000.slice/session-3.scope"
NOW = Instant(100.0, 1000.0)


def run(name: str = "job", pid: int = 100, cgroup: str = SCOPE, **fields: Any) -> Reservation:
    return Reservation(
        **{
            "name": name,
            "level": Level.L2,
            "pid": pid,
            "started": 1000 + pid,
            "uid": 1000,
            "by": "user 1000",
            "gpus": ("GPU-a",),
            "memory_bytes": 8 << 30,
            "share_ratio": 0.4,
            "began_wall": 900.0,
            "cgroup": cgroup,
            **fields,
        }
    )


class FakeRuns:
    """Those that the test names."""

    def __init__(self, *runs: Reservation) -> None:
        self.runs = runs

    def active(self) -> tuple[Reservation, ...]:
        return self.runs

    def end(self, keys: Collection[Key]) -> None:
        if keys:
            self.runs = tuple(r for r in self.runs if r.key not in keys)


def names(claims: Claims) -> dict[str, list[int]]:
    return {t.name: [p.pid for p in t.processes] for t in claims.tenants}


def claimed(*processes: Any, runs: Collection[Reservation], rules: Any = ()) -> Claims:
    return assign(processes, (), rules=Rules(rules, runs), terms=Terms())


# -- as tenants ----------------------------------------------------------------------------------------


def test_what_is_in_its_scope_is_the_run_with_what_it_was_promised() -> None:
    rules = [TenantRule("alices", Level.L3, Match(user="alice"))]
    inside, deeper, other = (
        process(100, SCOPE),
        process(101, f"{SCOPE}/inner", uid=0, user="root"),
        process(102, SESSION),
    )
    claims = claimed(inside, deeper, other, runs=[run()], rules=rules)
    assert names(claims) == {"job": [100, 101], "alices": [102]}
    job = next(t for t in claims.tenants if t.name == "job")
    assert job.level is Level.L2
    assert job.enforce
    assert job.limits.memory_reserved_bytes == job.limits.memory_limit_bytes == 8 << 30
    assert job.limits.compute_share_ratio == 0.4


def test_it_comes_before_every_rule_and_only_for_its_own_scope() -> None:
    rules = [TenantRule("all", Level.L1, Match(cgroup="/gpuagent.slice"))]
    beside = SCOPE.replace("100-1100", "7-1007")
    claims = claimed(process(100, SCOPE), process(7, beside), runs=[run()], rules=rules)
    assert names(claims) == {"all": [7], "job": [100]}


def test_a_path_is_no_pattern() -> None:
    odd = "/a.slice/x[ab]*.scope"
    rules = Rules((), [run(cgroup=odd)])
    assert rules.claim(process(1, odd)) == rule_of(run(cgroup=odd))
    assert rules.claim(process(1, "/a.slice/xa.scope")) is None


def test_without_a_scope_its_descendants_are_the_run() -> None:
    lone = run(cgroup="")
    everybody = (
        process(100, SESSION, ppid=50),
        process(101, SESSION, ppid=100),
        process(102, SESSION, ppid=101),
        process(50, SESSION, ppid=1),
        process(103, SESSION, ppid=50),
    )
    assert names(claimed(*everybody, runs=[lone])) == {"job": [100, 101, 102]}
    # Another process that has its number by now is nobody's.
    again = msgspec.structs.replace(everybody[0], started=9)
    assert names(claimed(again, *everybody[1:], runs=[lone])) == {}


def test_of_two_runs_above_a_process_the_nearest_counts() -> None:
    outer, inner = run("outer", 100, ""), run("inner", 101, "")
    line = (process(100), process(101, ppid=100), process(102, ppid=101))
    assert names(claimed(*line, runs=[outer, inner])) == {"outer": [100], "inner": [101, 102]}


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 13)), unique_by=lambda p: p[0]),
    st.sets(st.integers(1, 12), max_size=3),
)
def test_every_process_is_somebodys_once_whatever_the_table_says(
    pairs: list[tuple[int, int]], roots: set[int]
) -> None:
    """Parents that are not there, that are themselves, or that are in a ring."""
    everybody = [process(pid, ppid=ppid) for pid, ppid in pairs]
    rules = {(pid, 1000 + pid): rule_of(run(f"r{pid}", pid, "")) for pid in roots}
    members, others = descended(everybody, rules)
    found = sorted([p.pid for _, some in members.values() for p in some] + [p.pid for p in others])
    assert found == sorted(pid for pid, _ in pairs)
    for pid in roots & {pid for pid, _ in pairs}:
        assert pid in [p.pid for p in members[f"r{pid}"][1]]


async def test_a_new_run_is_a_tenant_with_the_next_reading_and_gone_with_its_end() -> None:
    processes, cgroups = FakeProcesses(process(1, "/init.scope", ppid=0)), FakeCgroups()
    runs = FakeRuns()
    sensor = Tenants(
        processes=processes, cgroups=cgroups, config=Config(), agent_pid=4000, runs=runs
    )
    state = NodeState(NOW, inventory=Inventory(gpu_processes=()))
    assert (await sensor.read(NOW, state)).tenants == ()
    tables = processes.tables
    processes.put(process(100, SESSION))
    runs.runs = (run(cgroup=""),)
    (tenant,) = (await sensor.read(NOW, state)).tenants or ()
    assert (tenant.name, [p.pid for p in tenant.processes]) == ("job", [100])
    # It is moved to its scope.
    cgroups.make(SCOPE)
    processes.put(process(100, SCOPE))
    runs.runs = (run(),)
    (tenant,) = (await sensor.read(NOW, state)).tenants or ()
    assert [s.path for s in tenant.seats] == [SCOPE]
    assert tenant.seats[0].refusal == ""
    runs.runs = ()
    del processes.all[100]
    sensed = await sensor.read(NOW, state)
    assert sensed.tenants is not None
    assert processes.tables == tables, "nobody reads the whole table for it"


async def test_a_reload_keeps_the_runs() -> None:
    processes = FakeProcesses(process(1, "/init.scope", ppid=0), process(100, SCOPE))
    sensor = Tenants(
        processes=processes,
        cgroups=FakeCgroups(),
        config=Config(),
        agent_pid=4000,
        runs=FakeRuns(run()),
    )
    state = NodeState(NOW, inventory=Inventory(gpu_processes=()))
    sensor.configure(Config(tenants=(TenantRule("x", Level.L3, Match(user="bob")),)))
    assert [t.name for t in (await sensor.read(NOW, state)).tenants or ()] == ["job"]


# -- when it has ended ---------------------------------------------------------------------------------


class Stage:
    def __init__(self, *runs: Reservation) -> None:
        self.runs = FakeRuns(*runs)
        self.processes = FakeProcesses(process(100, SCOPE), process(101, SESSION))
        self.cgroups = FakeCgroups()
        self.cgroups.make(SCOPE, cgroup_events="populated 1\nfrozen 0")
        self.sensor = RunEnds(self.runs, processes=self.processes, cgroups=self.cgroups)

    async def ended(self) -> list[str]:
        sensed = await self.sensor.read(NOW, NodeState(NOW))
        return [e.text for e in sensed.events]


async def test_it_lives_as_long_as_its_process_or_its_scope() -> None:
    stage = Stage(run())
    assert await stage.ended() == []
    del stage.processes.all[100]
    assert await stage.ended() == [], "a child of it lives on in its scope"
    stage.cgroups.files[SCOPE]["cgroup.events"] = "populated 0\nfrozen 0"
    assert await stage.ended() == [
        "run job of user 1000 has ended after 100 s; the 8 GiB on each of its cards are free again"
    ]
    assert stage.runs.runs == ()
    assert await stage.ended() == []


@pytest.mark.parametrize("gone", ["file", "cgroup", "tree"])
async def test_a_run_ends_with_its_scope_and_not_because_that_cannot_be_seen(gone: str) -> None:
    stage = Stage(run())
    del stage.processes.all[100]
    if gone == "file":
        del stage.cgroups.files[SCOPE]["cgroup.events"]
    elif gone == "cgroup":
        stage.cgroups.remove(SCOPE)
    else:
        stage.cgroups.broken = "no tree"
    assert len(await stage.ended()) == (gone == "cgroup")


async def test_another_process_with_its_number_is_not_it() -> None:
    stage = Stage(run(cgroup="", memory_bytes=None))
    stage.processes.put(process(100, SCOPE, started=5))
    assert await stage.ended() == ["run job of user 1000 has ended after 100 s"]


async def test_where_processes_cannot_be_read_nobody_has_ended() -> None:
    class Broken(FakeProcesses):
        def read(self, pid: int) -> Any:
            raise Unavailable("/proc is not there")

    runs = FakeRuns(run())
    sensor = RunEnds(runs, processes=Broken(), cgroups=FakeCgroups())
    with pytest.raises(Unavailable):
        await sensor.read(NOW, NodeState(NOW))
    assert len(runs.runs) == 1


async def test_where_there_is_none_nothing_is_read() -> None:
    processes = FakeProcesses()
    sensor = RunEnds(NoRuns(), processes=processes, cgroups=FakeCgroups())
    assert (await sensor.read(NOW, NodeState(NOW))).events == ()
    assert processes.reads == 0
    NoRuns().end([(1, 2)])


def test_a_gpu_process_in_its_scope_puts_it_on_the_card() -> None:
    claims = assign(
        [process(100, SCOPE)],
        [GpuProcess(100, "GPU-a", "compute", 1 << 30)],
        rules=Rules((), [run()]),
        terms=Terms(),
    )
    assert claims.tenants[0].gpus == ("GPU-a",)


_fits: tuple[Runs, Runs, Sensor] = (
    FakeRuns(),
    NoRuns(),
    RunEnds(NoRuns(), processes=FakeProcesses(), cgroups=FakeCgroups()),
)


@pytest.mark.parametrize("scope", [SCOPE, ""])
def test_a_rule_that_is_declared_under_a_runs_name_is_another_tenant(scope: str) -> None:
    service = process(7, "/system.slice/train.service")
    inside = process(100, scope or SESSION)
    declared = TenantRule(name="train", sla=Level.L1, match=Match(unit="train.service"))
    claims = claimed(service, inside, runs=[run("train", cgroup=scope)], rules=[declared])
    levels = {t.name: (t.level, [p.pid for p in t.processes]) for t in claims.tenants}
    assert levels == {"train": (Level.L1, [7]), "run:train": (Level.L2, [100])}
