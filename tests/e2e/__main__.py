"""`make e2e`: makes the image and the payload, boots, has the checks run and prints one line for each."""

import argparse
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.e2e import payload
from tests.e2e.pace import MOST_SECONDS
from tests.e2e.runner import found
from tests.e2e.vm import Impossible, Vm

CACHE = payload.ROOT / "build" / "e2e"
LIMIT_SECONDS = 900.0
_WIDTH = 46


def image(cache: Path) -> Path:
    """The image, built where it is not there yet. Raises Impossible."""
    script = Path(__file__).with_name("image.sh")
    done = subprocess.run([script, cache], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise Impossible("there is no image to boot; the reason is above")
    return Path(done.stdout.strip())


def answers(vm: Vm, words: Sequence[str], deadline: float) -> Iterator[dict[str, Any]]:
    """What the runner inside tells, until it ends or the time is up."""
    runner = [f"{payload.AGENT}/bin/python", "-m", "tests.e2e.runner"]
    process = vm.start(payload.CHECKS, [*runner, *(f"'{word}'" for word in words)])
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    assert process.stdout is not None
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    try:
        while line := lines.get(timeout=max(0.0, deadline - time.monotonic())):
            yield json.loads(line)
    except queue.Empty:
        pass
    finally:
        process.kill()
        process.wait()


def _read(stream: Any, lines: "queue.SimpleQueue[str]") -> None:
    for line in stream:
        lines.put(line)
    lines.put("")


def show(name: str, result: str, seconds: float | None, why: str) -> None:
    took = "" if seconds is None else f"{seconds:6.1f} s"
    print(f"{result:4}  {name:{_WIDTH}} {took:>8}  {why}".rstrip(), flush=True)


def tell(said: dict[str, Any]) -> None:
    show(said["check"], said["result"], said["seconds"], said["why"].replace("\n", " / "))
    for line in said.get("log", "").splitlines():
        print(f"      | {line}", flush=True)


def run(vm: Vm, words: Sequence[str], limit: float) -> bool:
    """Whether nothing failed. What is not reached in time is a skip; what ends too early, a failure."""
    deadline = time.monotonic() + limit
    left = list(found(words))
    failed = False
    for said in answers(vm, words, deadline):
        if "unit" in said:
            pace = f"one start of a command takes {said['unit']:.1f} s in there"
            if said["unit"] > MOST_SECONDS:
                raise Impossible(f"too slow: {pace}")
            print(f"e2e: {pace}", flush=True)
            continue
        tell(said)
        left.remove(said["check"])
        failed |= said["result"] == "fail"
    late = time.monotonic() >= deadline
    why = f"not reached within {limit:.0f} s" if late else "the runner inside has ended"
    for name in left:
        show(name, "skip" if late else "fail", None, why)
    return not failed and (late or not left)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e", description=__doc__)
    parser.add_argument("words", nargs="*", help="only checks with one of these in their name")
    parser.add_argument("--list", action="store_true", help="the checks there are")
    parser.add_argument("--keep", action="store_true", help="let the machine run on afterwards")
    parser.add_argument("--down", action="store_true", help="end a machine that was kept")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds for all checks")
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help="where image and payload are kept"
    )
    return parser.parse_args()


def main() -> int:
    given = arguments()
    if given.list:
        for name, check in found(given.words).items():
            print(f"{name:{_WIDTH}} {(check.__doc__ or '').strip()}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    cache = given.cache.resolve()
    try:
        vm = Vm(image(cache), cache / "vm")
        if given.down:
            vm.down()
            return 0
        return 0 if rounds(vm, given, cache) else 1
    except Impossible as why:
        print(f"e2e: skipped: {why}", flush=True)
        return 0


def rounds(vm: Vm, given: argparse.Namespace, cache: Path) -> bool:
    began = time.monotonic()
    keep = given.keep or vm.pid is not None
    try:
        vm.up(payload.make(cache), keep=keep)
        vm.unpack(payload.REMOVED)
        print(f"e2e: ready after {time.monotonic() - began:.0f} s", flush=True)
        good = run(vm, given.words, given.limit)
    finally:
        if keep and vm.pid is not None:
            print(f"e2e: the machine runs on: {' '.join(vm.ssh)}", flush=True)
        else:
            vm.down()
    print(f"e2e: {'ok' if good else 'FAILED'} after {time.monotonic() - began:.0f} s", flush=True)
    return good


if __name__ == "__main__":
    sys.exit(main())
