"""`make demo-host`: the real daemon on a fake driver, with a scripted load and a live table.

The processes, the cgroups that they are in and the daemon are real; the cards are not, nor are the control
files of those cgroups, which are plain files (see tests/stage). Nothing outside a temporary folder is changed, apart from two empty cgroups that are
removed again.
"""

import argparse
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tests.fakes.nvml import GIB, H100_80GB
from tests.stage import ApiError, Daemon, Stage, Staged

SETTINGS = """
[power]
budget = "1000W"
[nvml]
process_interval = "1s"
"""
LEVELS = {"chat-api": "L1", "batch-embed": "L2", "finetune": "L3"}
STEP_SECONDS = 0.5
PAUSE_SECONDS = 1.5
"""Between death and new start, to see what is left behind."""
FULL_CORES = 3.0


class Load:
    """What the tenants do: a fine-tuning job loads its data beside a chat service, then runs hot."""

    def __init__(self, stage: Stage) -> None:
        self.hot, self.cool = stage.cards
        self.chat = stage.tenant("chat-api")
        self.tune = stage.tenant("finetune")
        self.batch = stage.tenant("batch-embed")
        self.tune_memory = 18.0 * GIB
        self.celsius = 58.0
        self._listed: list[tuple[Any, int]] = []

    def step(self, at: float) -> str:
        """Advance to second `at`; what is going on, in words."""
        part = min(self.tune.cgroup.cores, FULL_CORES) / FULL_CORES
        growing, hot = 6 <= at < 26, 30 <= at < 44
        if growing:
            self.tune_memory += 0.9 * GIB * part * STEP_SECONDS
        elif at >= 26:
            self.tune_memory = 22.0 * GIB
        goal = 62 + (30 * part if hot else 4 * part)
        self.celsius += (goal - self.celsius) * 0.4 * STEP_SECONDS
        self._show(at, part)
        for tenant, cores in ((self.chat, 0.8), (self.tune, FULL_CORES * part), (self.batch, 1.5)):
            tenant.use_cpu(cores * STEP_SECONDS)
        if growing:
            return "finetune loads its data set and wants ever more device memory"
        if hot:
            return "the data set is loaded and most of it freed; finetune now runs the card hot"
        return "finetune is quiet"

    def _show(self, at: float, part: float) -> None:
        chat = 46 * GIB
        self.hot.set(
            utilization=0.55 + 0.4 * part,
            memory_used_bytes=int(chat + self.tune_memory),
            temperature_celsius=round(self.celsius),
            demand_watts=330 + 320 * part,
        )
        self.cool.set(
            utilization=0.6,
            memory_used_bytes=24 * GIB,
            temperature_celsius=55,
            demand_watts=380 + 60 * (at % 7 > 3),
        )
        self._list(self.hot, self.chat, chat)
        self._list(self.hot, self.tune, self.tune_memory)
        self._list(self.cool, self.batch, 24 * GIB)

    def _list(self, card: Any, tenant: Staged, memory: float) -> None:
        if tenant.pid in card.pids:
            card.remove_process(tenant.pid)
        card.add_process(tenant.pid, kind="compute", memory_bytes=int(memory))


def cards_table(gpus: Sequence[dict[str, Any]]) -> Table:
    table = Table("card", "busy", "memory", "°C", "draws", "limit", box=None, pad_edge=False)
    for gpu in gpus:
        read = {r["name"].removeprefix("gpu_"): r["value"] for r in gpu["readings"]}
        used, total = read.get("memory_used_bytes"), read.get("memory_total_bytes")
        table.add_row(
            f"{gpu['index']} {gpu['name'].removeprefix('NVIDIA ')}",
            unknown(read.get("utilization_ratio"), "{:.0%}"),
            "-" if not used or not total else f"{used / GIB:.1f} of {total / GIB:.0f} GiB",
            unknown(read.get("temperature_celsius"), "{:.0f}"),
            unknown(read.get("power_watts"), "{:.0f} W"),
            unknown(read.get("power_limit_watts"), "{:.0f} W"),
        )
    return table


def unknown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def tenants_table(daemon: Daemon, load: Load) -> Table:
    table = Table(
        "tenant", "level", "share", "cpu.max in the file", "why", box=None, pad_edge=False
    )
    files = {"chat-api": load.chat, "finetune": load.tune, "batch-embed": load.batch}
    for row in daemon.client.get("/v1/tenants")["items"]:
        held = row["held_back"]
        table.add_row(
            row["name"],
            row["level"],
            unknown(row["share_ratio"], "{:.0%}"),
            files[row["name"]].cgroup.read("cpu.max"),
            Text(
                held["why"] if held and held["in_force"] else "", overflow="ellipsis", no_wrap=True
            ),
        )
    return table


def picture(daemon: Daemon, load: Load, at: float, seconds: float, doing: str) -> Group:
    head = Text(f"{at:4.0f} s of {seconds:.0f}   {doing}", style="bold")
    try:
        parts: list[Table | Text] = [
            cards_table(daemon.client.get("/v1/gpus")["items"]),
            tenants_table(daemon, load),
            *(Text(e["text"], style="dim") for e in daemon.client.get("/v1/events")["items"][:4]),
        ]
    except (OSError, ApiError):
        parts = [Text("the daemon does not answer")]
    shown: list[RenderableType] = [Panel(p) if isinstance(p, Table) else p for p in parts]
    return Group(head, *shown)


def play(stage: Stage, console: Console, seconds: float, *, keep: bool) -> bool:
    """The whole minute, and then on if it is to be kept. Whether everything was found as it had been."""
    load = Load(stage)
    load.step(0)
    limits = [card.power_limit_watts for card in stage.cards]
    daemon = stage.daemon().ready()
    sock = stage.folder / "agent.sock"
    console.print("ask it yourself:", soft_wrap=True)
    url = "http://gpuagent/v1/tenants/finetune/explanation"
    console.print(f"curl --unix-socket {sock} {url}", soft_wrap=True)
    console.print(f"configuration: {stage.config}\n", soft_wrap=True)
    killed: float | None = None
    doing, shown = "", 0.0
    began = time.monotonic()
    with live(console) as screen:
        while (at := time.monotonic() - began) < seconds:
            scripted = at * 60 / seconds
            doing = load.step(scripted)
            if scripted >= 36 and killed is None and load.tune.cgroup.cores < FULL_CORES:
                doing = (
                    "kill -9: the daemon dies while it holds finetune back, and is started again"
                )
                show(screen, console, picture(daemon, load, at, seconds, doing))
                daemon.kill()
                time.sleep(PAUSE_SECONDS)
                show(screen, console, picture(daemon, load, at, seconds, doing))
                daemon = stage.daemon().ready()
                killed = scripted
            elif killed is not None and scripted - killed < 6:
                doing = "started again: cpu.max was put back, and power limits stay in the budget"
            if screen is not None or at - shown >= seconds / 12:
                shown = at
                show(screen, console, picture(daemon, load, at, seconds, doing))
            time.sleep(STEP_SECONDS)
    if keep:
        console.print("\nit stays up for you to ask; Ctrl-C stops it", soft_wrap=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                load.step(60)
                time.sleep(STEP_SECONDS)
    code = daemon.stop()
    left = [t.cgroup.read("cpu.max") for t in stage.tenants.values()]
    ok = (
        code == 0
        and set(left) == {"max 100000"}
        and limits == [card.power_limit_watts for card in stage.cards]
    )
    console.print(f"\nstopped: cpu.max is {', '.join(left)}")
    console.print(
        f"power limits are {', '.join(f'{c.power_limit_watts:.0f} W' for c in stage.cards)}"
    )
    console.print("everything is as it was" if ok else "SOMETHING WAS NOT PUT BACK", style="bold")
    return ok


def show(screen: Live | None, console: Console, view: Group) -> None:
    if screen is not None:
        screen.update(view, refresh=True)
    else:
        console.print(view)


@contextlib.contextmanager
def live(console: Console) -> Any:
    if not console.is_terminal:
        yield None
        return
    with Live(console=console, refresh_per_second=4) as screen:
        yield screen


def main() -> int:
    parser = argparse.ArgumentParser(prog="make demo-host", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long it takes")
    parser.add_argument(
        "--keep", action="store_true", help="keep it up after that, until Ctrl-C, to be asked"
    )
    asked = parser.parse_args()
    console = Console(soft_wrap=not sys.stdout.isatty())
    folder = Path(tempfile.mkdtemp(prefix="gpuagent-demo-"))
    try:
        with Stage(folder, [H100_80GB, H100_80GB]) as stage:
            rules = (stage.rule(name, level) for name, level in LEVELS.items())
            stage.configure(SETTINGS + "".join(rules), law="")
            return 0 if play(stage, console, asked.seconds, keep=asked.keep) else 1
    except (RuntimeError, AssertionError) as error:
        console.print(f"demo: {error}", style="bold")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
