"""Commands to the running agent: pause, unpause, release, resume, reload."""

import click

from gpuagent.cli.client import Client
from gpuagent.cli.exits import CODES
from gpuagent.cli.options import Options, common
from gpuagent.cli.show import emit, say


def _command(what: str) -> None:
    options = Options.current()
    done = Client(options.socket).post(f"/v1/{what}")
    if options.json:
        emit(done)
    else:
        say(str(done["done"]))


@click.command(epilog=CODES)
@common
def pause() -> None:
    """Put everything back and only observe, until unpaused."""
    _command("pause")


@click.command(epilog=CODES)
@common
def unpause() -> None:
    """Let the agent act again, as configured."""
    _command("unpause")


@click.command(epilog=CODES)
@common
def release() -> None:
    """Let go of the driver, so that MIG can be changed or the driver unloaded."""
    _command("release")


@click.command(epilog=CODES)
@common
def resume() -> None:
    """Take the driver up again."""
    _command("resume")


@click.command(epilog=CODES)
@common
def reload() -> None:
    """Read the configuration file again; one with problems changes nothing."""
    _command("reload")
