"""The checks. Each is a function of the host; its docstring is what must be so.

A check raises AssertionError where it is not so, and Skip where that cannot be asked here.
"""

import os
import re
import signal
import subprocess
from pathlib import Path

from tests.e2e import systemd
from tests.e2e.agent import CONFIG, UNIT
from tests.e2e.host import SERVE, TRAIN, Host
from tests.e2e.tenants import Tenant


class Skip(Exception):
    """Why it cannot be asked here."""


# ---- the unit, and who asks it ----


def check_unit_is_ready(host: Host) -> None:
    """The shipped unit is well-formed, has told systemd READY=1, and stays up."""
    flaws = systemd.run("systemd-analyze", "verify", f"/etc/systemd/system/{UNIT}")
    assert flaws.returncode == 0, flaws.stderr
    shown = host.agent.show("Type", "ActiveState", "SubState", "NRestarts", "Result")
    assert shown == {
        "Type": "notify",
        "ActiveState": "active",
        "SubState": "running",
        "NRestarts": "0",
        "Result": "success",
    }


def check_status(host: Host) -> None:
    """`gpuagent status` answers root with all of it, and anybody else with health and totals."""
    full = host.agent.command("status")
    assert full.returncode == 0, full.stdout + full.stderr
    assert "mode enforce, acting" in full.stdout
    assert "H100" in full.stdout
    little = host.agent.command("status", user="nobody")
    assert little.returncode == 0, little.stdout + little.stderr
    assert "Health: ok" in little.stdout
    assert "H100" not in little.stdout


# ---- holding back and letting go ----


def check_heat_slows_l3_and_never_l1(host: Host) -> None:
    """cpu.max of L3 falls, its CPU time with it, for a reason that is told; L1 is not touched."""
    before = host.train.cpu_used(4)
    protected = host.serve.controls
    host.hold()
    host.until("train is at its floor", lambda: host.train.cores <= 0.5 * before)
    used = host.train.cpu_used(6)
    assert used < 0.7 * before, f"{used:.2f} cores after {before:.2f}"
    [cause] = host.agent.client.explain("train")["causes"]
    assert cause["kind"] == "temperature"
    knob = host.agent.knob("train", "cgroup_cpu_max")
    assert knob is not None
    assert (knob["result"], knob["rule"]) == ("applied", "backpressure/temperature")
    assert host.serve.controls == protected


def check_growth_slows_who_grows(host: Host) -> None:
    """A card that fills up over its mark holds back whoever makes it grow."""

    def held() -> bool:
        host.grow()
        return host.train.held

    host.until("train is held back", held)
    [cause] = host.agent.client.explain("train")["causes"]
    assert cause["kind"] == "memory"


def check_release_leaves_nothing(host: Host) -> None:
    """When the cause ends, cpu.max comes back to what it was and no drop-in is left."""
    host.hold()
    host.relax()
    host.put_back(units=20)
    host.until("the ledger is empty", lambda: not host.agent.held, units=2)


def check_latency_turns_weight_first(host: Host) -> None:
    """L1 near its latency objective costs L3 its cpu.weight, and L1 nothing."""
    protected = host.serve.controls

    def lighter() -> bool:
        host.agent.tell_latency("serve", 0.3)
        return int(host.train.read("cpu.weight")) < 100

    host.until("train weighs less", lighter)
    assert host.serve.controls == protected

    def as_before() -> bool:
        host.agent.tell_latency("serve", 0.02)
        return host.train.read("cpu.weight") == "100" and not host.train.held

    host.until("train weighs as before", as_before, units=20)
    host.no_trace(host.train)


def check_scope_is_held_and_let_go(host: Host) -> None:
    """A tenant in a transient scope is held back as one in a service is."""
    host.batch.start()
    host.until("its CPU use is known", lambda: _uses_cpu(host, "batch"))
    host.hold(host.batch)
    host.relax()
    host.put_back(host.batch, units=20)


def _uses_cpu(host: Host, tenant: str) -> bool:
    rows = host.agent.client.get("/v1/tenants")["items"]
    return any(row["name"] == tenant and row["cpu_cores"] for row in rows)


def check_service_without_cpu_controller(host: Host) -> None:
    """Where systemd has not enabled the CPU controller, as is its default, a service is held all the same."""
    host.plain.start()
    if (host.plain.cgroup / "cpu.max").exists():
        raise Skip("systemd turns the CPU controller on here for every unit")
    host.until("its CPU use is known", lambda: _uses_cpu(host, "plain"))
    host.hold(host.plain)
    host.relax()
    host.until("its quota is put back", lambda: not host.plain.held, units=20)
    kept = systemd.properties_set
    host.until("systemd keeps nothing of it", lambda: not kept(host.plain.unit), units=2)


def check_host_memory_is_as_declared(host: Host) -> None:
    """memory.high and memory.max are as the rules say, L1's too; no max below what is in use."""

    def limits(tenant: Tenant) -> tuple[str, str]:
        return tenant.read("memory.high"), tenant.read("memory.max")

    high, most = 'host_memory_high = "256MiB"\n', 'host_memory_max = "512MiB"\n'
    host.configure(tenants=SERVE + high + TRAIN + high + most)
    host.agent.reload()
    size = str(256 * 2**20)
    host.until("train has both", lambda: limits(host.train) == (size, str(512 * 2**20)))
    host.until("serve has its own", lambda: limits(host.serve) == (size, "max"))
    host.configure(tenants=SERVE + TRAIN + 'host_memory_max = "64KiB"\n')
    host.agent.reload()
    host.until("it is said", lambda: host.agent.result("train", "cgroup_memory_max") == "refused")
    for tenant in (host.train, host.serve):
        host.until(
            f"{tenant.name} has none again",
            lambda: limits(tenant) == ("max", "max") and not systemd.properties_set(tenant.unit),  # noqa: B023
        )


# ---- putting back ----


def check_pause_puts_back(host: Host) -> None:
    """`gpuagent pause` puts back although the cause goes on; unpaused, it holds again."""
    host.hold()
    assert host.agent.command("pause").returncode == 0
    host.put_back(units=4)
    host.pace.during(3, lambda: host.no_trace(host.train))
    host.agent.client.post("/v1/unpause")
    host.hold()


def check_reload_to_observe_puts_back(host: Host) -> None:
    """A file that says observe, taken into use by `systemctl reload`, ends the hold."""
    host.hold()
    host.configure(mode="observe")
    host.agent.reload()
    host.put_back(units=4)
    assert host.agent.result("train") == "would"


def check_reload_of_a_broken_file_changes_nothing(host: Host) -> None:
    """A file with a mistake is refused and told, and the hold goes on."""
    host.hold()
    CONFIG.write_text(CONFIG.read_text().replace("[nvml]", "[nmvl]"))
    host.agent.reload()
    health = "/v1/health"
    host.until("it is told", lambda: "nmvl" in host.agent.client.get(health)["config_error"])
    host.pace.during(2, lambda: _still_held(host))


def _still_held(host: Host) -> None:
    assert host.train.held


def check_a_removed_rule_puts_back(host: Host) -> None:
    """Who is no tenant of ours any more is let go."""
    host.hold()
    host.configure(tenants=SERVE)
    host.agent.reload()
    host.put_back(units=4)


def check_stop_puts_back(host: Host) -> None:
    """`systemctl stop` returns with everything put back and nothing in the ledger."""
    host.hold()
    host.agent.stop()
    host.no_trace(host.train)
    assert host.agent.held == []
    assert host.agent.show("Result") == {"Result": "success"}


def check_kill_is_put_back_by_the_unit(host: Host) -> None:
    """After kill -9 the unit's ExecStopPost puts back, before the agent starts again and holds on."""
    host.hold()
    host.agent.kill()
    host.put_back()
    assert host.agent.show("MainPID") == {"MainPID": "0"}, "put back only by the next start"
    host.until("it runs again", lambda: host.agent.active, units=20)
    assert host.agent.show("NRestarts") == {"NRestarts": "1"}
    host.agent.ready()
    host.hold()


def check_kill_mid_freeze_thaws(host: Host) -> None:
    """After kill -9 in a pulse the guard thaws, before the unit puts back, and nothing freezes again meanwhile."""
    host.configure('[freeze]\npulse = "2s"\n', tenants=SERVE + TRAIN + 'levers = ["freeze"]\n')
    host.agent.reload()
    host.heat()
    host.until("train is frozen", lambda: host.train.frozen)
    assert not host.serve.frozen
    agent = host.agent.show("MainPID")["MainPID"]
    host.until("train is frozen again", lambda: host.train.frozen)
    os.kill(int(agent), signal.SIGKILL)
    host.relax()
    host.until("it is thawed", lambda: not host.train.frozen, units=0.5)
    assert host.agent.held, "thawed by the unit, and not by the guard"

    def runs_again() -> bool:
        assert not host.train.frozen, "frozen with nobody to thaw it"
        return host.agent.active and host.agent.show("MainPID")["MainPID"] not in {"0", agent}

    host.until("it runs again", runs_again, units=20)
    host.agent.ready()
    assert host.train.read("cgroup.freeze") == "0"
    host.until("the ledger is empty", lambda: not host.agent.held, units=2)


def check_start_puts_back_what_nobody_did(host: Host) -> None:
    """After kill -9 with nobody to put back, the next start does, before it decides anything."""
    host.hold()
    host.agent.amend("Restart=no\nExecStopPost=\n")
    host.agent.kill()
    host.until("it has died", lambda: not host.agent.active)
    assert host.train.held, "nobody was there to put it back"
    host.relax()
    host.agent.amend()
    host.agent.start()
    host.no_trace(host.train)
    host.until("the ledger is empty", lambda: not host.agent.held, units=2)


# ---- others who turn the same knobs ----


def check_rival_in_the_file(host: Host) -> None:
    """Who keeps writing cpu.max is answered three times; then it is contested, and is left alone."""
    host.hold()

    def contested() -> bool:
        # Not so soon that the agent cannot read back what it has just written.
        if host.agent.result("train") == "applied" and host.train.cores < 1:
            host.train.write("cpu.max", "123000 100000")
        return host.agent.result("train") == "contested"

    host.until("it is contested", contested, units=24)
    host.train.write("cpu.max", "123000 100000")
    host.pace.during(4, lambda: _reads(host, "123000 100000"))
    host.train.start()


def check_rival_through_systemd(host: Host) -> None:
    """The same of one who keeps running `systemctl set-property`."""
    host.hold()

    def contested() -> bool:
        if host.train.read("cpu.max") != "123000 100000":
            systemd.call("systemctl", "set-property", "--runtime", host.train.unit, "CPUQuota=123%")
        return host.agent.result("train") == "contested"

    host.until("it is contested", contested, units=24)
    host.pace.during(4, lambda: _reads(host, "123000 100000"))
    host.train.start()


def _reads(host: Host, text: str) -> None:
    assert host.train.read("cpu.max") == text


def check_daemon_reload_while_held(host: Host) -> None:
    """`systemctl daemon-reload` neither frees the tenant for good nor makes it contested."""
    host.hold()
    for _ in range(2):
        systemd.call("systemctl", "daemon-reload")
        host.until("train is held", lambda: host.train.held, units=4)
    host.pace.during(3, lambda: host.until("train is held", lambda: host.train.held, units=2))
    assert host.agent.result("train") in {"applied", "in flight"}
    host.relax()
    host.put_back(units=20)


def check_property_of_somebody_else(host: Host) -> None:
    """What somebody sets of another property while we hold stays his, and stays."""
    host.hold()
    systemd.call("systemctl", "set-property", "--runtime", host.train.unit, "CPUWeight=50")
    host.until("train is held", lambda: host.train.held, units=4)
    host.relax()
    host.until("cpu.max is put back", lambda: not host.train.held, units=20)
    assert host.train.read("cpu.weight") == "50"

    def ours() -> list[str]:
        return [file for file in systemd.properties_set(host.train.unit) if "CPUQuota" in file]

    host.until("systemd keeps nothing of ours", lambda: not ours(), units=2)
    left = systemd.properties_set(host.train.unit)
    assert any("CPUWeight=50" in text for text in left.values()), left
    host.train.start()


def check_restart_of_the_tenant(host: Host) -> None:
    """A tenant that is restarted while held is held in its new cgroup, and let go of as it was."""
    inode = host.hold().cgroup.stat().st_ino
    host.train.restart()
    assert host.train.cgroup.stat().st_ino != inode
    host.until("it is known again", lambda: _uses_cpu(host, "train"))
    host.hold()
    host.until("its hold is told", lambda: host.agent.result("train") == "applied")
    host.relax()
    host.put_back(units=20)
    host.until("the ledger is empty", lambda: not host.agent.held, units=2)


def check_stop_of_the_tenant(host: Host) -> None:
    """A tenant that ends while held leaves nothing in the ledger and nothing with systemd."""
    host.hold()
    host.train.stop()
    host.until("the ledger is empty", lambda: not host.agent.held)
    assert not systemd.properties_set(host.train.unit)
    host.relax()
    host.train.start()
    host.no_trace(host.train)


# ---- tenants that it starts ----

_LOOK = """
cat /proc/self/cgroup; echo "cards $CUDA_VISIBLE_DEVICES"
cd /sys/fs/cgroup$(cut -d: -f3 /proc/self/cgroup); head cpu.weight memory.max
for node in nvidia0 nvidia1 kmsg null; do (exec 3</dev/$node) 2>&1 || true; done
exit 42
"""
_JOB = ("run", "--sla", "L3", "--gpu-memory", "8GiB", "--name", "job")


def check_run_is_right_from_the_start(host: Host) -> None:
    """`gpuagent run`: a scope in our slice, its limits, its environment, its card's device file only."""
    for minor in (0, 1):
        systemd.run("mknod", f"/dev/nvidia{minor}", "c", "195", str(minor))
    limits = ("--cpu-weight", "50", "--host-memory", "256MiB")
    done = host.agent.command(*_JOB, "--strict", *limits, "--", "sh", "-c", _LOOK)
    assert done.returncode == 42, done.stdout + done.stderr
    scope = r"0::/gpuagent\.slice/gpuagent-tenants\.slice/gpuagent-run-\d+-\d+\.scope\n"
    assert re.match(scope, done.stdout), done.stdout
    card = host.agent.client.get("/v1/gpus")["items"][0]["uuid"]
    assert f"cards {card}\n" in done.stdout
    assert "==> cpu.weight <==\n50\n" in done.stdout, done.stdout
    assert f"==> memory.max <==\n{256 << 20}\n" in done.stdout, done.stdout
    # There is no driver behind the first: that it is asked at all is what counts.
    assert "/dev/nvidia0: No such device" in done.stdout, done.stdout
    for node in ("nvidia1", "kmsg"):
        assert f"/dev/{node}: Operation not permitted" in done.stdout, done.stdout
    assert "/dev/null" not in done.stdout


def check_run_lives_as_long_as_its_process(host: Host) -> None:
    """A signal is the command's own; with it scope, reservation and tenant end, and nothing is left."""
    with subprocess.Popen(["gpuagent", *_JOB, "--", "sleep", "600"]) as process:
        try:
            host.until("it is a tenant", lambda: "job" in _tenants(host), units=20)
            [run] = host.agent.client.get("/v1/runs")["items"]
            assert run["scope"] == _unit_of(process.pid)
            [seat] = host.agent.client.explain("job")["seats"]
            assert seat["refusal"] == "", seat
            refused = host.agent.command(*_JOB[:3], "--gpu-memory", "79GiB", "--", "true")
            assert refused.returncode == 6, refused.stdout + refused.stderr
            assert "8 GiB are reserved for others" in refused.stderr
            assert "8 GiB are reserved" in " ".join(host.agent.command("explain").stdout.split())
        finally:
            process.terminate()
    assert process.returncode == -signal.SIGTERM
    host.until("it is forgotten", lambda: not host.agent.client.get("/v1/runs")["items"])
    host.until("it is no tenant", lambda: "job" not in _tenants(host), units=20)
    assert systemd.show(run["scope"], "LoadState") == {"LoadState": "not-found"}


def _unit_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text().strip().rpartition("/")[2]


def _tenants(host: Host) -> list[str]:
    return [row["name"] for row in host.agent.client.get("/v1/tenants")["items"]]
