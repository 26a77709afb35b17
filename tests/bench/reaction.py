"""How soon the agent acts, how soon it is there, and how soon a crash leaves no trace."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from tests.bench.pace import Pace
from tests.bench.rows import Row, median, p99
from tests.bench.scene import Scene, answers, scene
from tests.fakes.nvml import GIB, FakeGpu
from tests.stage import Staged
from tests.stage.stage import Daemon

_ORIGINAL = "max 100000"
_OVER_THE_MARK = 74 * GIB
_SAMPLE_CALL = "nvmlDeviceGetUtilizationRates"
"""The first call of each sample, made for nothing else."""
_AFTER_SAMPLE_SECONDS = 0.02
_HOLD_SECONDS = 2.0
"""`backpressure.hold` by default: how long a condition has to hold."""


def measure(pace: Pace) -> Iterator[Row]:
    yield from _reaction(pace)
    yield from _start(pace)
    yield from _put_back(pace)


def _wait(what: str, condition: Callable[[], bool], *, seconds: float = 20.0) -> None:
    """Look every millisecond. AssertionError with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds:g} s")
        time.sleep(0.001)


# -- from the sample to the write ----------------------------------------------------------------------


class Crossing:
    """A card whose memory goes over the mark, and what comes of it; monotonic seconds, 0 for not yet.

    `look` is called every millisecond. It raises memory a little after a sample and so well before
    the next, which leaves no doubt which sample is the first over the mark.
    """

    def __init__(self, here: Scene, card: FakeGpu, staged: Staged) -> None:
        self._driver = here.stage.driver
        self._card = card
        self._staged = staged
        self._count = self._samples()
        self._before = 0.0
        """When the sample was taken after which memory rises."""
        self._risen = False
        self.sampled = 0.0
        self.written = 0.0

    @property
    def seconds(self) -> float:
        """From the completion of the condition to the write."""
        return self.written - (self.sampled + _HOLD_SECONDS)

    def look(self) -> None:
        now = time.monotonic()
        if not self._before:
            self._before = now if self._samples() > self._count else 0.0
        elif not self._risen:
            if now >= self._before + _AFTER_SAMPLE_SECONDS:
                self._rise()
        elif not self.sampled:
            self.sampled = now if self._samples() > self._count else 0.0
        elif not self.written and self._staged.cgroup.read("cpu.max") != _ORIGINAL:
            self.written = _changed_at(self._staged)

    def _samples(self) -> int:
        return self._driver.calls(_SAMPLE_CALL, gpu=self._card)

    def _rise(self) -> None:
        with self._driver.writing():
            self._card.set(memory_used_bytes=_OVER_THE_MARK)
            self._card.add_process(self._staged.pid, memory_bytes=_OVER_THE_MARK - GIB)
            self._count = self._samples()
        self._risen = True


def _reaction(pace: Pace) -> Iterator[Row]:
    """Each card goes over its mark once, one after the other, with one tenant of level L3 on it.

    The driver counts calls, so the time of the first sample over the mark is known to a millisecond
    or two. The condition is complete `hold` seconds after it. The write is the file's mtime.
    """
    cards = 4 if pace.quick else 16
    latencies: list[float] = []
    for _ in range(pace.runs(2)):
        with _one_tenant_a_card(cards) as here, here.running() as daemon:
            _busy(here, 3.0)
            crossings = _cross(here)
            latencies += [c.seconds for c in crossings]
            daemon.stop()
    yield Row(
        "write after the completing sample, p99",
        1e3 * p99(latencies),
        "ms",
        100.0,
        1000.0,
        f"{len(latencies)} cards; memory grows over the mark; from sample + hold to cpu.max",
    )
    yield Row("write after the completing sample, median", 1e3 * median(latencies), "ms")


@contextlib.contextmanager
def _one_tenant_a_card(cards: int) -> Iterator[Scene]:
    with scene(cards=cards, tenants=0) as here:
        text = here.stage.config.read_text()
        for number, card in enumerate(here.stage.cards):
            name = f"train{number}"
            card.add_process(here.stage.tenant(name).pid, memory_bytes=50 * GIB)
            text += here.stage.rule(name, "L3")
        here.stage.config.write_text(text)
        yield here


def _busy(here: Scene, seconds: float) -> None:
    """All tenants use half a core each."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        _use(here, 0.25)
        time.sleep(0.25)


def _use(here: Scene, seconds: float) -> None:
    for staged in here.stage.tenants.values():
        staged.use_cpu(0.5 * seconds)


def _cross(here: Scene) -> list[Crossing]:
    """Start a crossing every 270 ms, and watch them all, looking every millisecond."""
    waiting = list(zip(here.stage.cards, here.stage.tenants.values(), strict=True))
    crossings: list[Crossing] = []
    next_start = next_use = time.monotonic()
    deadline = next_start + len(waiting) + 20
    while waiting or not all(c.written for c in crossings):
        now = time.monotonic()
        if now > deadline:
            raise AssertionError(f"{sum(not c.written for c in crossings)} cards without a write")
        if now >= next_use:
            _use(here, 0.25)
            next_use += 0.25
        if waiting and now >= next_start:
            crossings.append(Crossing(here, *waiting.pop(0)))
            next_start += 0.27
        for crossing in crossings:
            crossing.look()
        time.sleep(0.001)
    return crossings


def _changed_at(staged: Staged) -> float:
    """mtime of cpu.max as monotonic seconds."""
    changed = os.stat(staged.cgroup.files / "cpu.max").st_mtime_ns / 1e9
    return changed - (time.time() - time.monotonic())


# -- start, crash and start ----------------------------------------------------------------------------


def _launch(here: Scene) -> tuple[float, Daemon]:
    began = time.monotonic()
    return began, here.stage.daemon()


def _start(pace: Pace) -> Iterator[Row]:
    taken: list[float] = []
    with scene(cards=8, tenants=32, processes=64) as here:
        for _ in range(max(pace.runs(7), 2)):
            began, daemon = _launch(here)
            _wait("the agent is ready", lambda: answers(here.port, "/readyz"), seconds=30)
            taken.append(time.monotonic() - began)
            daemon.stop()
    yield Row(
        "start to ready, median",
        median(taken),
        "s",
        1.5,
        5.0,
        f"{len(taken)} starts, 8 GPUs, 32 tenants; from exec to /readyz",
    )
    yield Row("start to ready, worst", max(taken), "s")


def _put_back(pace: Pace) -> Iterator[Row]:
    """A tenant is held back; SIGKILL; from exec of the next agent to the original value."""
    taken = [_put_back_once() for _ in range(pace.runs(4))]
    yield Row(
        "put back after kill -9 and restart, worst",
        max(taken),
        "s",
        5.0,
        15.0,
        f"{len(taken)} times; from exec of the new agent to cpu.max at its original",
    )


def _put_back_once() -> float:
    """On a host of its own: the third crash within ten minutes would only be observed."""
    with _one_tenant_a_card(2) as here:
        card, (staged, _) = here.stage.cards[0], here.stage.tenants.values()
        daemon = here.stage.daemon().ready()
        _busy(here, 3.0)
        card.set(memory_used_bytes=_OVER_THE_MARK)
        _wait("the tenant is held back", lambda: staged.cgroup.read("cpu.max") != _ORIGINAL)
        daemon.kill()
        began, again = _launch(here)
        _wait("cpu.max is back", lambda: staged.cgroup.read("cpu.max") == _ORIGINAL)
        seconds = _changed_at(staged) - began
        again.ready().stop()
    return seconds
