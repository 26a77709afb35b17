"""`gpuagent demo`: the agent at work on a simulated host, watched live."""

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Self

import click
import msgspec
from rich.console import Console
from rich.live import Live

import gpuagent
from gpuagent import log
from gpuagent.cli.demoview import conclusion, picture
from gpuagent.cli.exits import CODES, Exit, Failure
from gpuagent.cli.options import Options, common
from gpuagent.cli.show import emit, say
from gpuagent.cli.simulated import simulated_only
from gpuagent.clock import patiently
from gpuagent.configfile import describe
from gpuagent.errors import ConfigError, Refused
from gpuagent.expose.access import Access
from gpuagent.expose.api import Sources
from gpuagent.expose.intake import Intake
from gpuagent.expose.server import Server
from gpuagent.lab import scenarios
from gpuagent.lab.show import LEAST_SECONDS, Show, Summary
from gpuagent.model.plan import Snapshot
from gpuagent.quantities import QuantityError
from gpuagent.quantities import seconds as to_seconds
from gpuagent.sim import scenario

_METRICS_LISTEN = "127.0.0.1:0"
_PRINTED = 10
"""Pictures that are printed where there is no terminal."""
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LATE_SECONDS = 2.0
_LATE_RATIO = 0.2
"""By so much more than was asked for it may take before that is said."""


class _Duration(click.ParamType[float]):
    """Such as 20s or 2min."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            return to_seconds(value)
        except QuantityError as error:
            self.fail(str(error), param, ctx)


@click.command(epilog=f"Scenarios: {', '.join(scenario.names())}.\n\n{CODES}")
@click.argument("name", metavar="[SCENARIO]", default="co-location")
@click.option(
    "--for",
    "wall",
    type=_Duration(),
    default="60s",
    show_default=True,
    metavar="TIME",
    help="How long to take, if this machine can; at least ten simulated minutes go by in it.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Of the random numbers: with the same one the load is the same.",
)
@common
def demo(name: str, wall: float, seed: int) -> None:
    """Show the agent at work on a simulated host, beside the same host without it.

    SCENARIO is one that comes with the agent, or a file. While it runs its API can be asked.
    Ctrl-C ends it early: it puts everything back, and says what came of it so far.
    """
    options = Options.current()
    simulated_only()
    began = time.monotonic()
    try:
        chosen = scenarios.named(name)
        _announce(chosen, quiet=options.json)
        log.setup(level="error")
        with tempfile.TemporaryDirectory(prefix="gpuagent-demo-") as folder:
            summary = asyncio.run(_run(chosen, wall, seed, folder, quiet=options.json))
    except ConfigError as error:
        raise Failure(Exit.USAGE, str(error)) from error
    except Refused as error:
        raise Failure(Exit.REFUSED, str(error)) from error
    if options.json:
        emit(msgspec.to_builtins(summary))
    else:
        say()
        for line in conclusion(summary):
            say(line)
    taken = time.monotonic() - began
    if taken > wall + max(_LATE_SECONDS, _LATE_RATIO * wall):
        click.echo(f"gpuagent: it took {taken:.0f} s: this machine simulates no faster", err=True)
    if not summary.restored:
        raise Failure(Exit.PROBLEM, "not everything was put back")


def _announce(chosen: scenario.Scenario, *, quiet: bool) -> None:
    """What there is to see."""
    if chosen.seconds < LEAST_SECONDS:
        click.echo(
            f"gpuagent: {LEAST_SECONDS:.0f} s are simulated, the least, although {chosen.name} "
            f"has {chosen.seconds:g}",
            err=True,
        )
    if not quiet:
        say(f"{chosen.name}: {chosen.about}")
        say()


async def _run(
    chosen: scenario.Scenario, wall: float, seed: int, folder: str, *, quiet: bool
) -> Summary:
    seconds = max(LEAST_SECONDS, chosen.seconds)
    books = os.path.join(folder, "state")
    socket = os.path.join(folder, "agent.sock")
    with _asked_to_end() as ended:
        async with Show(chosen, seed=seed, folder=books, seconds=seconds) as show:
            server = _server(show, socket)
            await server.start()
            serving = asyncio.ensure_future(server.run())
            try:
                _addresses(socket, server, err=quiet)
                await _play(show, wall, _Screen(quiet=quiet), ended)
                return await show.end()
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)


@contextlib.contextmanager
def _asked_to_end() -> Iterator[asyncio.Event]:
    """Set when somebody ends it, however he does: everything is put back, and nothing is left behind."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _ENDS:
        loop.add_signal_handler(number, ended.set)
    try:
        yield ended
    finally:
        for number in _ENDS:
            loop.remove_signal_handler(number)


def _server(show: Show, socket: str) -> Server:
    trial = show.trial
    core, tokens = trial.core, trial.kept.tokens
    server: Server

    def access() -> Access:
        if tokens is None:
            return Access(server.listeners())
        return Access(server.listeners(), tokens.listed(), tokens.trouble)

    server = Server(
        Sources(
            latest=core.publisher.latest,
            settings=lambda: describe(trial.config),
            clock=trial.host.clock,
            version=gpuagent.__version__,
            listen=core.publisher.listen,
            intake=Intake(trial.push),
            access=access,
        ),
        core.loop.inbox,
        path=socket,
        metrics_listen=_METRICS_LISTEN,
        tokens=tokens,
    )
    return server


def _addresses(socket: str, server: Server, *, err: bool) -> None:
    click.echo("Ask it yourself while it runs:", err=err)
    click.echo(f"  curl --unix-socket {socket} http://gpuagent/v1/tenants", err=err)
    click.echo(f"  {called()} --socket {socket} top", err=err)
    click.echo(f"  curl http://127.0.0.1:{server.metrics_port}/metrics\n", err=err)


def called() -> str:
    """This command line as it was called, for calling it once more."""
    if os.path.basename(sys.argv[0]) == "gpuagent":
        return shlex.quote(sys.argv[0])
    return f"{shlex.quote(sys.executable)} -m gpuagent"


async def _play(show: Show, wall: float, screen: "_Screen", ended: asyncio.Event) -> None:
    """Tick by tick, spread over the wall time, or as fast as it goes where that is too short."""
    began = time.monotonic()
    with screen:
        while not (show.over or ended.is_set()):
            snapshot = await show.tick()
            screen.draw(show, snapshot)
            due = began + wall * show.elapsed / show.seconds
            await asyncio.sleep(0)  # who asks has his turn, however late we are
            await patiently(ended.wait(), max(due - time.monotonic(), 0.0))


class _Screen:
    """Draws on a terminal several times a second; elsewhere prints now and then."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._console = Console(highlight=False, markup=False, emoji=False)
        self._live: Live | None = None
        self._due = 0.0

    def __enter__(self) -> Self:
        if not self._quiet and self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.__enter__()
        return self

    def __exit__(self, *gone: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def draw(self, show: Show, snapshot: Snapshot) -> None:
        if self._quiet or (self._live is None and show.elapsed < self._due):
            return
        told = show.trial.core.publisher.latest() or snapshot
        view = picture(
            told,
            show.beside(),
            elapsed=show.elapsed,
            seconds=show.seconds,
            happened=show.happened(),
        )
        if self._live is not None:
            if time.monotonic() >= self._due or show.over:
                self._due = time.monotonic() + 0.1
                self._live.update(view, refresh=True)
        else:
            self._due += show.seconds / _PRINTED
            self._console.print(view)
