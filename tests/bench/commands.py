"""What one look from the command line takes, beside nvitop and gpustat on the same cards."""

import sys
from collections.abc import Iterator

from tests.bench.meter import Spent, command
from tests.bench.pace import Pace
from tests.bench.rows import Row, median
from tests.bench.scene import scene


def measure(pace: Pace) -> Iterator[Row]:
    runs = max(pace.runs(5), 2)
    with scene(cards=8, tenants=32, processes=64) as here, here.running():
        ours = ["-m", "gpuagent", "--config", str(here.stage.config), "status", "--json"]
        looks: dict[str, list[str]] = {
            "gpuagent status --json": ours,
            "nvitop -1": ["-m", "nvitop", "-1"],
            "gpustat": ["-m", "gpustat"],
        }
        spent: dict[str, list[Spent]] = {name: [] for name in looks}
        for _ in range(runs):  # in turns
            for name, arguments in looks.items():
                spent[name].append(command([sys.executable, *arguments], here.stage.driver.env))
    how = f"median of {runs}, in turns; 8 GPUs, 64 processes"
    for name, each in spent.items():
        yield Row(f"{name}: time", 1e3 * median(s.seconds for s in each), "ms", note=how)
        yield Row(f"{name}: peak memory", max(s.peak_mib for s in each), "MiB")
