"""`gpuagent evaluate`: policies compared on a simulated host, over many seeds and assumptions."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from gpuagent.cli.exits import CODES, Exit, Failure
from gpuagent.cli.options import Options, common
from gpuagent.cli.show import emit
from gpuagent.cli.show import seconds as duration
from gpuagent.cli.simulated import simulated_only
from gpuagent.errors import ConfigError
from gpuagent.lab import evaluate as lab
from gpuagent.lab import plots, policies, report, scenarios
from gpuagent.lab.study import Report, Study

_SEEDS = 10
_MOST_SEEDS = 1000
_FIRST_LINE_SECONDS = 8.0


@click.command(epilog=CODES)
@click.argument("name", metavar="[SCENARIO]", default="co-location")
@click.option(
    "--policy",
    "chosen",
    multiple=True,
    metavar="POLICY",
    help="To compare: one that comes with the agent, or a file. The last one is judged. "
    f"[default: {', '.join(policies.SHIPPED)}; every one that is the agent's own is judged]",
)
@click.option(
    "--seeds",
    type=click.IntRange(1, _MOST_SEEDS),
    default=_SEEDS,
    show_default=True,
    help="Runs of each policy.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1.0, max=604800.0),
    help="Simulated in each run: at least 90 after the last tenant has started. "
    "[default: as the scenario says]",
)
@click.option(
    "--sweep/--no-sweep",
    default=True,
    show_default=True,
    help="Try it also where the simulation's assumptions are otherwise.",
)
@click.option(
    "--workers", type=click.IntRange(1, 1024), help="Processes. [default: one for each CPU]"
)
@click.option("--out", metavar="DIR", help="Write report.json, report.txt and plots into it.")
@common
def evaluate(
    name: str,
    chosen: tuple[str, ...],
    seeds: int,
    seconds: float | None,
    *,
    sweep: bool,
    workers: int | None,
    out: str | None,
) -> None:
    """Compare policies on a simulated host: many runs of each, with the same load for all.

    SCENARIO is one that comes with the agent, or a file. Nothing on this host is touched. It takes
    minutes on some CPUs: how many is said on the way; less of --seeds, and --no-sweep, take less.
    """
    options = Options.current()
    simulated_only()
    try:
        study = _study(name, chosen, seeds=seeds, seconds=seconds, sweep=sweep)
        _make(out)
        with _ends_like_an_interrupt(), lab.Pool(workers) as pool, _progress() as progress:
            found = study.run(pool, progress)
    except ConfigError as error:
        raise Failure(Exit.USAGE, str(error)) from error
    except lab.Failed as error:
        raise Failure(Exit.PROBLEM, f"a run broke: {error}") from error
    if options.json:
        emit(msgspec.to_builtins(found))
    else:
        _print(found)
    if out is not None:
        _write(found, out)


def _study(
    name: str, chosen: tuple[str, ...], *, seeds: int, seconds: float | None, sweep: bool
) -> Study:
    files = [policies.named(one) for one in chosen or policies.SHIPPED]
    judged = [f.name for f in files if f.control == "agent"]
    if chosen:
        judged = [files[-1].name]
        if files[-1].control in ("none", "static"):
            raise ConfigError(
                [f"{chosen[-1]}: the last policy is the one to be judged; give one that controls"]
            )
    return Study(
        scenarios.named(name), files, candidates=judged, seeds=seeds, seconds=seconds, sweep=sweep
    )


@contextlib.contextmanager
def _progress() -> Iterator[lab.Progress]:
    """How far it is, and how much longer it takes."""
    if not sys.stderr.isatty():
        yield _Lines().tell
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("runs", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    """Where there is no terminal: a line now and then."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._due = 0.0

    def tell(self, done: int, total: int) -> None:
        """So many runs are done."""
        taken = time.monotonic() - self._began
        if taken >= self._due and 0 < done < total:
            self._due = max(taken, _FIRST_LINE_SECONDS) * 1.5
            left = duration(taken / done * (total - done))
            click.echo(f"gpuagent: {done} of {total} runs are done, about {left} to go", err=True)


@contextlib.contextmanager
def _ends_like_an_interrupt() -> Iterator[None]:
    """Whoever ends it finds nothing left behind, however he does."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _print(found: Report) -> None:
    console = Console(highlight=False, markup=False, emoji=False, width=report.WIDTH)
    console.print(report.picture(found))


def _make(out: str | None) -> None:
    """The folder, before minutes are spent on what goes into it."""
    if out is None:
        return
    try:
        os.makedirs(out, exist_ok=True)
    except OSError as error:
        raise Failure(Exit.USAGE, f"{out} cannot be made: {error.strerror}") from error


def _write(found: Report, out: str) -> None:
    document = msgspec.json.format(msgspec.json.encode(found), indent=1).decode()
    try:
        for file, content in (("report.json", document + "\n"), ("report.txt", report.text(found))):
            with open(os.path.join(out, file), "w", encoding="utf-8") as handle:
                handle.write(content)
        if plots.available():
            plots.draw(found, out)
    except OSError as error:
        raise Failure(
            Exit.PROBLEM, f"{error.filename} cannot be written: {error.strerror}"
        ) from error
    if not plots.available():
        click.echo(f"There are no plots without matplotlib: {plots.INSTALL}", err=True)
