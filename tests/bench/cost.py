"""What the agent costs: CPU and memory, and nvitop-exporter beside it on the same cards."""

import time
from collections.abc import Iterator

from tests.bench import scrape
from tests.bench.meter import CpuWindow, child_of, resident_mib
from tests.bench.pace import Pace
from tests.bench.rows import Row, p99
from tests.bench.scene import Scene, exporter, scene
from tests.bench.storm import storm

NVML_CHILD = "gpuagent.host.nvml_worker"
_STARTS_PER_SECOND = 100
_WARM_UP_SECONDS = 6.0


def measure(pace: Pace) -> Iterator[Row]:
    with scene(cards=8, tenants=32, processes=64) as here, here.running() as daemon:
        pid = daemon.process.pid
        scrape.get(here.port, "/metrics")
        time.sleep(pace.seconds(_WARM_UP_SECONDS))
        yield from _cpu(here, pid, pace)
        yield from _beside_exporter(here, pid, pace)
        yield from _memory(pid)


def _cpu(here: Scene, pid: int, pace: Pace) -> Iterator[Row]:
    """The storm is on before the window begins, and the window sees a scrape each ten seconds.

    One tenant of the configuration is absent, so that the agent looks at execs: the dearer case.
    """
    child = child_of(pid, NVML_CHILD)
    seconds = pace.seconds(24)
    with storm(_STARTS_PER_SECOND) as weather:
        time.sleep(2)
        scraping = scrape.start(here.port, per_second=0.1, seconds=seconds)
        all_of_it, driver_part = CpuWindow(pid), CpuWindow(child)
        time.sleep(seconds)
        total, reader = all_of_it.percent(), driver_part.percent()
        scrape.finish(scraping)
    yield Row(
        "CPU of all our processes, 8 GPUs, 32 tenants, 5 Hz, 100 process starts/s",
        total,
        "% of a core",
        1.0,
        3.0,
        f"64 processes; over {seconds:.0f} s, one scrape in 10 s",
    )
    yield Row("CPU of the NVML child alone", reader, "% of a core")
    yield Row("process starts meanwhile", weather.per_second, "1/s")
    yield from _all_present(here, pid, pace)


def _all_present(here: Scene, pid: int, pace: Pace) -> Iterator[Row]:
    """The same once every tenant of the configuration has begun: no exec is listened for then."""
    last = here.stage.tenant("absent")
    here.stage.cards[0].add_process(last.pid, memory_bytes=1 << 30)
    seconds = pace.seconds(10)
    with storm(_STARTS_PER_SECOND):
        time.sleep(5)
        window = CpuWindow(pid)
        time.sleep(seconds)
        percent = window.percent()
    name = "CPU of all our processes, the same with no configured tenant absent"
    yield Row(name, percent, "% of a core", note=f"over {seconds:.0f} s")


def _beside_exporter(here: Scene, pid: int, pace: Pace) -> Iterator[Row]:
    """In turns, A B A B, both running all the time; only the one that is measured is scraped."""
    ours: list[float] = []
    theirs: list[float] = []
    our_scrapes: list[float] = []
    their_scrapes: list[float] = []
    seconds = pace.seconds(7)
    with exporter(here) as (peer, port):
        scrape.get(port, "/metrics")
        for _ in range(2):
            for who, where, cpu, scrapes in (
                (pid, here.port, ours, our_scrapes),
                (peer, port, theirs, their_scrapes),
            ):
                window = CpuWindow(who)
                scraping = scrape.start(where, per_second=1, seconds=seconds)
                time.sleep(seconds)
                cpu.append(window.percent())
                scrapes += scrape.finish(scraping).seconds
        resident = resident_mib(peer)
    how = f"8 GPUs, 64 processes, scraped 1/s; {len(ours)} x {seconds:.0f} s in turns"
    rate = "% of a core"
    yield Row("CPU while scraped 1/s: gpuagent", sum(ours) / len(ours), rate, note=how)
    yield Row("CPU while scraped 1/s: nvitop-exporter", sum(theirs) / len(theirs), rate, note=how)
    few = f"{len(our_scrapes)} scrapes each"
    yield Row("/metrics p99 while scraped 1/s: gpuagent", 1e3 * p99(our_scrapes), "ms", note=few)
    yield Row(
        "/metrics p99 while scraped 1/s: nvitop-exporter", 1e3 * p99(their_scrapes), "ms", note=few
    )
    yield Row("memory: nvitop-exporter", resident, "MiB", note="resident, at the end")


def _memory(pid: int) -> Iterator[Row]:
    how = "resident, at the end, after many scrapes"
    yield Row("memory: main process", resident_mib(pid), "MiB", 72.0, 96.0, how)
    child = child_of(pid, NVML_CHILD)
    yield Row("memory: NVML child", resident_mib(child), "MiB", 20.0, 32.0, how)
