"""What a test asks of a running daemon: what it says of its parts, of a knob, and that it goes on."""

from collections.abc import Callable
from typing import Any

from tests.stage import Daemon, until

FILE_KNOB = "cgroup_cpu_max"


def sensor(daemon: Daemon, name: str) -> Any:
    return next(s for s in daemon.client.get("/v1/health")["sensors"] if s["name"] == name)


def gpus(daemon: Daemon) -> list[Any]:
    return list(daemon.client.get("/v1/gpus")["items"])


def metric(daemon: Daemon, name: str) -> list[float]:
    """Values of all series of this name."""
    lines = daemon.client.text("/metrics").splitlines()
    return [float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith((name + "{", name + " "))]


def knob(daemon: Daemon, name: str = FILE_KNOB, *, tenant: str = "train") -> Any:
    """What is said of a tenant's knob; None where nothing is."""
    knobs = daemon.client.explain(tenant)["knobs"]
    return next((k for k in knobs if k["knob"] == name), None)


def events(daemon: Daemon, kind: str) -> list[Any]:
    """Those of one kind that are kept, newest first."""
    return [e for e in daemon.client.get("/v1/events")["items"] if e["kind"] == kind]


def goes_on(daemon: Daemon, work: Callable[[], object] = lambda: None, *, passes: int = 3) -> None:
    """The loop comes round a few times more, whatever is amiss meanwhile."""

    def ticks() -> float:
        (count,) = metric(daemon, "gpuagent_loop_ticks_total")
        return count

    before = ticks()

    def on() -> bool:
        work()
        return ticks() >= before + passes

    until("the loop goes on", on)
    assert daemon.process.poll() is None
