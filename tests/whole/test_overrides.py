"""Overrides over the socket: in force at once, over a crash, and gone without a trace at their end."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tests.stage import Daemon, until
from tests.whole.conftest import UNTOUCHED, Host
from tests.whole.test_hold_and_put_back import cores

T = TypeVar("T")


def held(host: Host, seconds: float = 15.0) -> float:
    """Until cpu.max of train is ours; the cores it has then."""

    def ours() -> str:
        host.work()
        text = host.train.cgroup.read("cpu.max")
        return "" if text == UNTOUCHED else text

    return cores(until("train is held", ours, seconds=seconds))


def used(host: Host) -> float:
    """The cores that the file of overrides says train used before it was held."""
    (lease,) = json.loads((host.stage.folder / "state/overrides.json").read_text())["leases"]
    return max((place["cores"] for place in lease["used"]), default=0.0)


def listed(daemon: Daemon) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = daemon.client.get("/v1/overrides")["items"]
    return items


def meanwhile(host: Host, do: Callable[[], T]) -> T:
    """Do something while the tenants go on using their two cores."""
    with ThreadPoolExecutor(1) as pool:
        doing = pool.submit(do)
        while not doing.done():
            host.work()
        return doing.result()


def order(host: Host, *words: str) -> str:
    done = meanwhile(host, lambda: host.stage.command("override", *words))
    assert done.returncode == 0, done.stderr
    return done.stdout


QUIET = ("set", "quiet", "--tenant", "train", "--share", "50%", "--why", "a demo")


def test_in_force_over_a_crash_with_the_time_that_was_left(host: Host) -> None:
    daemon = host.run()
    said = order(host, *QUIET, "--for", "2min")
    assert "override quiet is in force until" in said
    assert 0.1 <= held(host) <= 1.1, "half of the two cores at most that it used, without a cause"
    knob = next(k for k in daemon.client.explain("train")["knobs"] if k["knob"] == "cgroup_cpu_max")
    assert knob["rule"] == "override/quiet"
    assert "a demo" in knob["why"]
    (item,) = daemon.client.explain("train")["overrides"]
    assert (item["name"], item["effect"], item["share_ratio"]) == ("quiet", "applied", 0.5)

    until("the next run is to know what it used", lambda: used(host) > 0.2, seconds=5.0)
    daemon.kill()
    assert not host.untouched(), "nobody was left to put it back"
    killed = time.monotonic()
    again = meanwhile(host, host.stage.daemon().ready)
    (item,) = listed(again)
    left = 120 - item["remaining_seconds"]
    assert left >= 2.0, "its time went on"
    assert 0.1 <= held(host) <= 1.1
    assert time.monotonic() - killed < 60
    assert "quiet" in order(host, "list")
    assert json.loads(order(host, "list", "--json"))["items"][0]["by"] == item["by"]

    order(host, "drop", "quiet")
    host.put_back(seconds=5)
    assert listed(again) == []
    kinds = [e["kind"] for e in again.client.get("/v1/events")["items"]]
    assert "override-dropped" in kinds
    assert "override-set" not in kinds, "that was told by the run before"
    assert again.stop() == 0


def test_it_ends_by_itself_and_a_pause_puts_it_back(host: Host) -> None:
    daemon = host.run()
    order(host, *QUIET, "--for", "30s")
    held(host)
    assert host.stage.command("pause").returncode == 0
    host.put_back(seconds=5)
    (item,) = listed(daemon)
    assert item["effect"] == "would"
    assert host.stage.command("unpause").returncode == 0
    held(host)
    host.put_back(seconds=30)
    assert listed(daemon) == []
    kinds = [e["kind"] for e in daemon.client.get("/v1/events")["items"]]
    assert "override-expired" in kinds
    assert daemon.stop() == 0
    assert host.untouched()


def test_a_card_gets_less_and_never_more_than_the_budget_allows(host: Host) -> None:
    host.stage.configure('[power]\nbudget = "500W"\n' + host.rules)
    daemon = host.run()
    until("the budget is kept", lambda: host.card.power_limit_watts == 500)
    order(host, "set", "cool", "--gpu", "0", "--power", "300W", "--for", "1h", "--why", "a fan")
    until("the card is limited", lambda: host.card.power_limit_watts == 300)
    order(host, "set", "cool", "--gpu", "0", "--power", "600W", "--for", "1h", "--why", "more")
    until("the budget is kept", lambda: host.card.power_limit_watts == 500)
    (item,) = listed(daemon)
    assert "power/budget asks for less" in item["effect_why"]
    assert daemon.stop() == 0
    assert host.card.power_limit_watts == 700


def test_who_is_left_alone_is_not_held_back_whatever_the_cause(host: Host) -> None:
    daemon = host.run()
    host.press()
    order(
        host, "set", "vip", "--tenant", "train", "--share", "100%", "--for", "1h", "--why", "paper"
    )
    host.put_back(seconds=5)
    for _ in range(20):
        host.work(grow=2**28)
    assert host.untouched()
    order(host, "drop", "vip")
    host.press()
    assert daemon.stop() == 0


def test_what_is_not_safe_is_refused_with_the_reason(host: Host) -> None:
    host.run()
    for words, code, reason in (
        (("--tenant", "serve", "--share", "50%"), 6, "serve is L1"),
        (("--tenant", "train", "--share", "10%"), 2, "below the floor of train, 20%"),
        (("--tenant", "nobody", "--share", "50%"), 5, "there is no tenant"),
        (("--gpu", "0", "--power", "50W"), 2, "takes a power limit of at least"),
        (("--gpu", "7", "--power", "250W"), 1, "no card with the index 7"),
        (("--tenant", "train", "--power", "250W"), 2, "give --tenant with --share"),
        (("--tenant", "train", "--share", "50"), 2, "is not a share"),
    ):
        done = host.stage.command("override", "set", "x", *words, "--for", "1h", "--why", "test")
        assert done.returncode == code, (words, done.stderr)
        assert reason in done.stderr
    assert host.stage.command("override", "drop", "x").returncode == 1
    host.idle(1.0)
    assert host.untouched()
