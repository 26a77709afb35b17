"""`gpuagent demo`: the agent at work on a simulated host, watched live."""

import asyncio
import os
import tempfile
import time
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
from gpuagent.configfile import describe
from gpuagent.errors import ConfigError, Refused
from gpuagent.expose.api import Sources
from gpuagent.expose.server import Server
from gpuagent.lab.show import LEAST_SECONDS, Show, Summary
from gpuagent.model.plan import Snapshot
from gpuagent.quantities import QuantityError
from gpuagent.quantities import seconds as to_seconds
from gpuagent.sim import scenario

_METRICS_LISTEN = "127.0.0.1:0"
_PRINTED = 10
"""Pictures that are printed where there is no terminal."""


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


@click.command(epilog=CODES)
@click.argument("name", metavar="[SCENARIO]", default="co-location")
@click.option(
    "--for",
    "wall",
    type=_Duration(),
    default="60s",
    show_default=True,
    metavar="TIME",
    help="How long to take; at least ten simulated minutes go by in it.",
)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Of the chance.")
@common
def demo(name: str, wall: float, seed: int) -> None:
    """Show the agent at work on a simulated host, beside the same host without it.

    SCENARIO is one that comes with the agent, or a file. While it runs its API can be asked.
    """
    options = Options.current()
    try:
        chosen = scenario.named(name)
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
    if not summary.restored:
        raise Failure(Exit.PROBLEM, "not everything was put back")


async def _run(
    chosen: scenario.Scenario, wall: float, seed: int, folder: str, *, quiet: bool
) -> Summary:
    seconds = max(LEAST_SECONDS, chosen.seconds)
    books = os.path.join(folder, "state")
    socket = os.path.join(folder, "agent.sock")
    async with Show(chosen, seed=seed, folder=books, seconds=seconds) as show:
        server = _server(show, socket)
        await server.start()
        serving = asyncio.ensure_future(server.run())
        try:
            if not quiet:
                _addresses(socket, server)
            await _play(show, wall, _Screen(quiet=quiet))
            return await show.end()
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


def _server(show: Show, socket: str) -> Server:
    core = show.trial.core
    return Server(
        Sources(
            latest=core.publisher.latest,
            settings=lambda: describe(show.trial.config),
            clock=show.trial.host.clock,
            version=gpuagent.__version__,
            listen=core.publisher.listen,
        ),
        core.loop.inbox,
        path=socket,
        metrics_listen=_METRICS_LISTEN,
    )


def _addresses(socket: str, server: Server) -> None:
    click.echo("Ask it yourself while it runs:")
    click.echo(f"  curl --unix-socket {socket} http://gpuagent/v1/tenants")
    click.echo(f"  gpuagent --socket {socket} top")
    click.echo(f"  curl http://127.0.0.1:{server.metrics_port}/metrics\n")


async def _play(show: Show, wall: float, screen: "_Screen") -> None:
    """Tick by tick, spread over the wall time, or as fast as it goes where that is too short."""
    began = time.monotonic()
    with screen:
        while not show.over:
            snapshot = await show.tick()
            screen.draw(show, snapshot)
            due = began + wall * show.elapsed / show.seconds
            await asyncio.sleep(max(due - time.monotonic(), 0.0))


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
        view = picture(told, show.beside(), elapsed=show.elapsed, seconds=show.seconds)
        if self._live is not None:
            if time.monotonic() >= self._due or show.over:
                self._due = time.monotonic() + 0.1
                self._live.update(view, refresh=True)
        else:
            self._due += show.seconds / _PRINTED
            self._console.print(view)
