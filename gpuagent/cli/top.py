"""`gpuagent top`: the live view on a running agent."""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import click

from gpuagent.cli.client import Client, Document
from gpuagent.cli.exits import CODES, Exit, Failure
from gpuagent.cli.options import Options, common
from gpuagent.cli.screen import Keys, Screen, Signals, drained, readable
from gpuagent.cli.show import emit, width
from gpuagent.cli.topdraw import lines, once
from gpuagent.cli.topview import Told, View, pressed, settled, shown

_ESCAPE_SECONDS = 0.05
"""An escape that is followed by nothing for this long is the key of that name."""
_GAP_SECONDS = 0.1
"""Between two questions at least, however fast another tenant is chosen."""
_PATIENCE_SECONDS = 3.0
"""An answer that takes longer is spoken of."""


def _number(_context: click.Context, _parameter: click.Parameter, value: float) -> float:
    """NaN is in every range."""
    if math.isnan(value):
        raise click.BadParameter("nan is not a number of seconds")
    return value


@click.command(epilog=CODES)
@click.option(
    "--interval",
    type=click.FloatRange(0.2, 3600),
    callback=_number,
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks.",
)
@common
def top(interval: float) -> None:
    """Show cards and tenants live, until q is pressed; ? lists the keys.

    Without a terminal it prints once.
    """
    options = Options.current()
    client = Client(options.socket)
    if options.json:
        told = ask(client)
        emit(
            {
                "node": told.node,
                "health": told.health,
                "gpus": told.gpus,
                "tenants": told.tenants,
                "overrides": told.overrides,
            }
        )
    elif sys.stdin.isatty() and sys.stdout.isatty():
        ended_by = _live(client, interval)
        if ended_by is not None and ended_by != signal.SIGINT:
            sys.exit(128 + ended_by)
    else:
        for line in once(ask(client), width()):
            click.echo(line.text.rstrip())


def ask(client: Client, chosen: str = "") -> Told:
    """Everything that is shown, and why `chosen` is treated as it is. Raises Failure."""
    node, health = client.get("/v1/node"), client.get("/v1/health")
    gpus = _allowed(lambda: tuple(client.get("/v1/gpus")["items"]))
    tenants = _allowed(lambda: tuple(client.items("/v1/tenants")))
    overrides = _allowed(lambda: tuple(client.items("/v1/overrides")))
    why = _explained(client, chosen) if chosen else None
    return Told(node, health, gpus, tenants, why, overrides)


def _allowed(read: Callable[[], tuple[Document, ...]]) -> tuple[Document, ...] | None:
    """What `read` gives, or None where this user may not see it."""
    try:
        return read()
    except Failure as failure:
        if failure.code is not Exit.FORBIDDEN:
            raise
        return None


def _explained(client: Client, name: str) -> Document | None:
    """None for a tenant that has left, or that this user may not see."""
    try:
        return client.tenant(name, "/explanation")
    except Failure as failure:
        if failure.code not in {Exit.UNKNOWN_TENANT, Exit.FORBIDDEN}:
            raise
        return None


@dataclass(frozen=True, slots=True)
class _Answer:
    """The last good answer, and what is wrong since."""

    told: Told | None = None
    trouble: str = ""


class _Asker:
    """Asks the agent again and again, in a thread: a slow answer never holds up a key."""

    def __init__(self, client: Client, interval: float, wake: Callable[[], None]) -> None:
        self._client = client
        self._interval = interval
        self._wake = wake
        self._now = threading.Event()
        self._chosen = ""
        self._asked: float | None = None
        self.answer = _Answer()
        # A daemon: an agent that hangs must not keep the command from ending.
        threading.Thread(target=self._run, name="asker", daemon=True).start()

    def choose(self, name: str) -> None:
        """The tenant to be explained from now on; empty for none."""
        if name != self._chosen:
            self._chosen = name
            self._now.set()

    @property
    def waiting_seconds(self) -> float:
        """How long the answer that is waited for has taken by now; 0 between two."""
        asked = self._asked
        return 0.0 if asked is None else time.monotonic() - asked

    def _run(self) -> None:
        while True:
            self._asked = time.monotonic()
            try:
                self.answer = _Answer(ask(self._client, self._chosen))
            except Failure as failure:
                self.answer = _Answer(self.answer.told, f"No answer: {failure}")
            except (KeyError, TypeError) as error:
                why = f"what answers is not an agent of this version (it lacks {error})"
                self.answer = _Answer(self.answer.told, f"No answer: {why}")
            self._asked = None
            self._wake()
            time.sleep(_GAP_SECONDS)
            self._now.wait(self._interval - _GAP_SECONDS)
            self._now.clear()


def _live(client: Client, interval: float) -> int | None:
    """Show until quit. Returns the signal that ended it, if one did."""
    with Signals() as signals, Screen.of_this_process() as screen:
        asker = _Asker(client, interval, signals.wake)
        # A terminal that goes away shows as an error of writing; its SIGHUP may come later.
        with contextlib.suppress(OSError):
            _Watch(signals, screen, asker).run()
    return signals.ended_by


class _Watch:
    """The loop of the live view: wait, take keys and answers, draw."""

    def __init__(self, signals: Signals, screen: Screen, asker: _Asker) -> None:
        self._signals = signals
        self._screen = screen
        self._asker = asker
        self._keys = Keys()
        self._view = View()
        self._told: Told | None = None

    def run(self) -> None:
        while not self._view.over and self._signals.ended_by is None:
            self._draw()
            self._take(self._wait())
            if self._signals.suspend:
                self._step_aside()

    def _draw(self) -> None:
        answer = self._asker.answer
        if not self._view.paused or self._told is None:
            self._told = answer.told
        self._view = settled(self._view, self._names())
        self._asker.choose(self._view.selected if self._view.why else "")
        if self._signals.redraw:
            self._signals.redraw = False
            self._screen.forget()
        columns, rows = self._screen.size()
        self._screen.show(lines(self._view, self._told, self._trouble(answer), columns, rows))

    def _trouble(self, answer: _Answer) -> str:
        waiting = self._asker.waiting_seconds
        if answer.trouble or waiting < _PATIENCE_SECONDS:
            return answer.trouble
        return f"The agent has not answered for {waiting:.0f} s."

    def _names(self) -> list[str]:
        return [row["name"] for row in shown(self._view, self._told)]

    def _wait(self) -> list[str]:
        """Keys, once there is a key, an answer or a signal, or a second has passed."""
        stdin, woken = sys.stdin.fileno(), self._signals.woken
        seconds = _ESCAPE_SECONDS if self._keys.pending else 1.0
        ready = readable((stdin, woken), seconds)
        if woken in ready:
            drained(woken)
        if stdin not in ready:
            return self._keys.settle() if not ready else []
        data = drained(stdin)
        return self._keys.feed(data) if data else ["q"]  # nobody is left to press it

    def _take(self, keys: list[str]) -> None:
        for key in keys:
            self._view = pressed(self._view, key, self._names())
            if self._view.over:
                return

    def _step_aside(self) -> None:
        """Stop as Ctrl-Z asks, with the terminal as it was; go on when told."""
        self._signals.suspend = False
        self._screen.leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._screen.enter()
