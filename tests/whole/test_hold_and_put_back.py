"""What it is all for: held back with a reason when it must be, and no trace left, whatever happens."""

import json
import signal

import pytest

from tests.whole.conftest import UNTOUCHED, Host

BUDGET = '[power]\nbudget = "500W"\n'


def cores(text: str) -> float:
    quota, period = text.split()
    return int(quota) / int(period)


def test_held_back_with_its_reason_then_killed_and_put_back(host: Host) -> None:
    host.stage.configure(BUDGET + host.rules)
    daemon = host.run()
    assert host.untouched()
    held = host.press()
    assert 0.1 <= cores(held) <= 0.75 * 2.0, "a share of the two cores it used"
    assert host.card.power_limit_watts == 500, "the only card gets the whole budget"

    said = daemon.client.explain("train")
    [cause] = said["causes"]
    assert cause["kind"] == "memory"
    knob = next(k for k in said["knobs"] if k["knob"] == "cgroup_cpu_max")
    assert knob["result"] == "applied"
    assert knob["original"] == "+Inf"
    assert knob["rule"] == "backpressure/memory"
    assert "mark 85%" in knob["why"]
    assert knob["numbers"]["memory_used_bytes"] > 0.85 * knob["numbers"]["memory_total_bytes"]
    assert host.serve.cgroup.read("cpu.max") == UNTOUCHED
    assert host.serve.cgroup.read("cpu.weight") == "100"

    host.relax()
    daemon.kill()
    assert not host.untouched(), "nobody was left to put it back"
    again = host.stage.daemon().ready()
    host.put_back()
    assert host.card.power_limit_watts == 500, "adopted: never above the budget, not for a moment"
    limit = next(k for k in again.client.get("/v1/plan")["knobs"] if k["knob"] == "gpu_power_limit")
    assert limit["original"] == 700
    assert again.stop() == 0
    stopped = next(x for x in map(json.loads, again.log.splitlines()) if x["event"] == "stopped")
    assert (stopped["put_back"], stopped["exit_code"]) == (1, 0)
    assert host.card.power_limit_watts == 700
    assert host.train.cgroup.read("cpu.weight") == "100"


def test_a_removed_rule_puts_back_at_once(host: Host) -> None:
    daemon = host.run()
    host.press()
    host.stage.configure(host.serve_rule)
    assert daemon.client.post("/v1/reload")["done"]
    host.put_back(seconds=5)
    host.idle(1.0)
    assert host.untouched(), "and it stays so, although the cause still holds"


def test_back_to_observe_by_signal_puts_back_at_once(host: Host) -> None:
    daemon = host.run()
    host.press()
    host.stage.configure(host.rules, mode="observe")
    daemon.signal(signal.SIGHUP)
    host.put_back(seconds=5)
    knobs = {k["knob"]: k for k in daemon.client.explain("train")["knobs"]}
    assert knobs["cgroup_cpu_max"]["result"] == "would"


def test_observe_touches_nothing_and_says_what_it_would_do(host: Host) -> None:
    host.stage.configure(BUDGET + host.rules, mode="observe")
    daemon = host.run()
    stamps = {p: p.stat().st_mtime_ns for p in host.train.cgroup.files.glob("cpu.[mw]*")}
    for _ in range(40):
        host.work(grow=2**28)
    knobs = {k["knob"]: k for k in daemon.client.explain("train")["knobs"]}
    assert knobs["cgroup_cpu_max"]["result"] == "would"
    assert knobs["cgroup_cpu_max"]["wanted"] == pytest.approx(1.4, rel=0.2), "the first step only"
    assert knobs["gpu_power_limit"]["result"] == "would"
    assert {p: p.stat().st_mtime_ns for p in stamps} == stamps
    assert host.card.power_limit_watts == 700
    assert host.stage.driver.calls("nvmlDeviceSetPowerManagementLimit") == 0
    assert daemon.stop() == 0
    assert (host.stage.folder / "state" / "ledger.jsonl").read_text() == ""


def test_let_go_when_the_cause_has_ended(host: Host) -> None:
    host.run()
    host.press()
    host.relax()
    host.put_back(seconds=30)


def test_pause_puts_back_and_outlives_a_restart(host: Host) -> None:
    daemon = host.run()
    host.press()
    assert host.stage.command("pause").returncode == 0
    host.put_back(seconds=5)
    daemon.kill()
    again = host.run()
    for _ in range(20):
        host.work(grow=2**28)
    assert host.untouched()
    assert again.client.get("/v1/health")["paused"] is True
    assert host.stage.command("unpause").returncode == 0
    host.relax()
    host.idle(1.5)
    host.press()


def test_restore_by_hand_puts_back_everything_a_dead_agent_left(host: Host) -> None:
    host.stage.configure(BUDGET + host.rules)
    daemon = host.run()
    host.press()
    refused = host.stage.command("restore")
    assert refused.returncode != 0
    assert "another gpuagent" in refused.stderr
    daemon.kill()
    done = host.stage.command("restore")
    assert done.returncode == 0, done.stderr
    assert host.untouched()
    assert host.card.power_limit_watts == 700
    assert host.stage.command("restore").returncode == 0, "nothing left to do is no failure"


def test_rescue_after_a_crash_holds_the_power_limits(host: Host) -> None:
    host.stage.configure(BUDGET + host.rules)
    daemon = host.run()
    host.press()
    daemon.kill()
    done = host.stage.command("restore", "--rescue")
    assert done.returncode == 0, done.stderr
    assert host.untouched()
    assert host.card.power_limit_watts == 500
    assert host.stage.command("restore").returncode == 0
    assert host.card.power_limit_watts == 700


def test_limits_that_serve_the_budget_may_stay_on_a_clean_stop(host: Host) -> None:
    host.stage.configure(BUDGET + "keep_on_stop = true\n" + host.rules)
    daemon = host.run()
    host.press()
    assert daemon.stop() == 0
    assert host.untouched()
    assert host.card.power_limit_watts == 500
    assert host.stage.command("restore").returncode == 0
    assert host.card.power_limit_watts == 700


def test_what_somebody_else_has_set_since_is_left_alone(host: Host) -> None:
    daemon = host.run()
    host.press()
    daemon.kill()
    host.train.cgroup.write("cpu.max", "77000 100000")
    again = host.stage.daemon().ready()
    host.relax()
    host.idle(1.0)
    assert host.train.cgroup.read("cpu.max") == "77000 100000"
    again.stop()
    assert host.train.cgroup.read("cpu.max") == "77000 100000"


def test_a_rival_is_resisted_three_times_and_then_left_alone(host: Host) -> None:
    daemon = host.run()
    host.press()
    seen = set()
    for _ in range(60):
        host.work(grow=2**26)
        host.train.cgroup.write("cpu.max", "123000 100000")
        host.work()
        knobs = {k["knob"]: k for k in daemon.client.explain("train")["knobs"]}
        seen.add(knobs["cgroup_cpu_max"]["result"])
        if "contested" in seen:
            break
    assert "contested" in seen
    host.idle(1.0)
    assert host.train.cgroup.read("cpu.max") == "123000 100000"
