"""A Prometheus that measures: asks for /metrics at a steady rate from a process of its own.

    python -m tests.bench.scrape PORT PER_SECOND SECONDS

prints a `Scrapes` as JSON. Each scrape has a connection of its own and takes gzip, as Prometheus does;
its time is from before the connection to the last byte. The agent renders a snapshot once, so that
only scrapes which are the first to meet a snapshot (`fresh`) show what it costs.
"""

import gzip
import http.client
import random
import re
import subprocess
import sys
import time

import msgspec

_TICKS = re.compile(rb"^gpuagent_loop_ticks_total (\S+)$", re.MULTILINE)


class Scrapes(msgspec.Struct):
    """What was seen; times in seconds."""

    seconds: list[float] = []
    fresh: list[float] = []
    """Those that met a snapshot which none before had met; all of them where it does not say."""
    series: int = 0
    size_bytes: int = 0
    """Of the last one, unzipped."""


def get(port: int, path: str, *, timeout: float = 10.0) -> tuple[float, bytes]:
    """Seconds and the whole body, unzipped. OSError or http.client.HTTPException where that fails."""
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("GET", path, headers={"Accept-Encoding": "gzip"})
        response = connection.getresponse()
        body = response.read()
        seconds = time.monotonic() - began
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise http.client.HTTPException(f"{path}: {response.status}")
    zipped = response.getheader("Content-Encoding") == "gzip"
    return seconds, gzip.decompress(body) if zipped else body


def scrape(port: int, *, per_second: float, seconds: float) -> Scrapes:
    """In this process. The pace varies a little, so as not to march in step with the agent's."""
    found = Scrapes()
    dice = random.Random(1)
    end = time.monotonic() + seconds
    due = time.monotonic()
    last: bytes | None = None
    while due < end:
        time.sleep(max(due - time.monotonic(), 0))
        took, body = get(port, "/metrics")
        found.seconds.append(took)
        match = _TICKS.search(body)
        if match is None or match[1] != last:
            found.fresh.append(took)
        last = match[1] if match else None
        found.series = sum(1 for line in body.splitlines() if line[:1] not in (b"#", b""))
        found.size_bytes = len(body)
        due += dice.uniform(0.8, 1.2) / per_second
    return found


def start(port: int, *, per_second: float, seconds: float) -> "subprocess.Popen[bytes]":
    """A process that scrapes; `finish` waits for it."""
    arguments = [str(port), str(per_second), str(seconds)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.bench.scrape", *arguments], stdout=subprocess.PIPE
    )


def finish(process: "subprocess.Popen[bytes]") -> Scrapes:
    """What it saw. RuntimeError where it failed."""
    said, _ = process.communicate(timeout=120)
    if process.returncode:
        raise RuntimeError(f"the scraper ended with {process.returncode}")
    return msgspec.json.decode(said, type=Scrapes)


if __name__ == "__main__":
    sys.stdout.buffer.write(
        msgspec.json.encode(
            scrape(int(sys.argv[1]), per_second=float(sys.argv[2]), seconds=float(sys.argv[3]))
        )
    )
