"""The options that every command takes, before the command's name or after it."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from gpuagent.cli.exits import Exit, Failure
from gpuagent.salvage import socket_in

DEFAULT_CONFIG = "/etc/gpuagent/gpuagent.toml"
DEFAULT_SOCKET = "/run/gpuagent/gpuagent.sock"
_KEY = "gpuagent.options"

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    config: str
    json: bool
    named_socket: str = ""
    """As given; else the configuration says where it is."""

    @classmethod
    def current(cls) -> "Options":
        """Of the command that runs now."""
        given = click.get_current_context().meta.get(_KEY, {})
        return cls(
            config=given.get("config") or DEFAULT_CONFIG,
            json=bool(given.get("json")),
            named_socket=given.get("socket") or "",
        )

    @property
    def socket(self) -> str:
        """Where the agent is asked. Raises Failure (USAGE) where that cannot be made out.

        Whether the file is valid is not asked: a broken one keeps nobody from pausing the agent. Nor
        must whoever may only use the socket be able to read the file in its usual place.
        """
        if self.named_socket:
            return self.named_socket
        try:
            found = socket_in(self.config)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
            if self.config == DEFAULT_CONFIG:
                return DEFAULT_SOCKET
            why = error.strerror if isinstance(error, OSError) else error
            raise _unknown(f"{self.config} cannot be read ({why})") from None
        if found is None:
            raise _unknown(f"{self.config} is not valid, and its paths.socket cannot be made out")
        return found or DEFAULT_SOCKET


def _unknown(what: str) -> Failure:
    return Failure(
        Exit.USAGE, f"{what}, so the agent's socket is not known", "name it with --socket PATH"
    )


def _keep(context: click.Context, parameter: click.Parameter, value: object) -> None:
    if value:
        context.meta.setdefault(_KEY, {})[parameter.name] = value


def common(command: Command) -> Command:
    """Add --socket, --config and --json; `Options.current` has their values."""
    for add in (
        click.option(
            "--json",
            is_flag=True,
            expose_value=False,
            callback=_keep,
            help="Print JSON on standard output, and a failure as JSON on standard error.",
        ),
        click.option(
            "--config",
            metavar="FILE",
            envvar="GPUAGENT_CONFIG",
            expose_value=False,
            callback=_keep,
            help=f"Configuration file ({DEFAULT_CONFIG}).",
        ),
        click.option(
            "--socket",
            metavar="PATH",
            envvar="GPUAGENT_SOCKET",
            expose_value=False,
            callback=_keep,
            help="Socket of the agent (as the configuration file says).",
        ),
    ):
        command = add(command)
    return command


def absolute(path: str) -> str:
    """`path` as the daemon would see it, wherever it runs."""
    return os.path.abspath(path)
