"""`gpuagent config check` and `gpuagent config show`."""

from collections.abc import Iterator

import click

from gpuagent.cli.client import Client
from gpuagent.cli.exits import CODES, Exit
from gpuagent.cli.options import Options, absolute, common
from gpuagent.cli.show import emit, say
from gpuagent.log import printable


@click.group(epilog=CODES)
@common
def config() -> None:
    """Check the configuration file, or show what is in force."""


@config.command(epilog=CODES)
@click.argument("file", required=False)
@common
def check(file: str | None) -> None:
    """Check FILE, or the agent's own, and name every problem with its line.

    The agent need not run.
    """
    from gpuagent.configfile import load
    from gpuagent.errors import ConfigError

    options = Options.current()
    path = absolute(file or options.config)
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    try:
        loaded = load(path)
        warnings, problems = loaded.warnings, loaded.troubles
    except ConfigError as error:
        problems = error.problems
    if options.json:
        emit({"file": path, "valid": not problems, "problems": problems, "warnings": warnings})
    else:
        for line in problems:
            click.echo(printable(line), err=True)
        for line in warnings:
            click.echo(f"warning: {printable(line)}", err=True)
        if not problems:
            say(f"{path} is valid")
    click.get_current_context().exit(Exit.USAGE if problems else Exit.OK)


@config.command(epilog=CODES)
@common
def show() -> None:
    """Show the configuration that is in force in the running agent."""
    options = Options.current()
    settings = Client(options.socket).get("/v1/config")
    if options.json:
        emit(settings)
        return
    for key, value in _flat("", settings):
        click.echo(printable(f"{key} = {_plain(value)}"))


def _flat(prefix: str, value: object) -> Iterator[tuple[str, object]]:
    """Dotted keys, as error texts name them."""
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), part)
    elif isinstance(value, list) and any(isinstance(part, dict) for part in value):
        for index, part in enumerate(value):
            yield from _flat(f"{prefix}[{index}]", part)
    else:
        yield prefix, value


def _plain(value: object) -> str:
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
