"""The options that every command takes, before the command's name or after it."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click
import tomli

DEFAULT_CONFIG = "/etc/gpuagent/gpuagent.toml"
DEFAULT_SOCKET = "/run/gpuagent/gpuagent.sock"
_KEY = "gpuagent.options"

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    socket: str
    config: str
    json: bool

    @classmethod
    def current(cls) -> "Options":
        """Of the command that runs now."""
        given = click.get_current_context().meta.get(_KEY, {})
        config = given.get("config") or DEFAULT_CONFIG
        return cls(
            socket=given.get("socket") or socket_in(config) or DEFAULT_SOCKET,
            config=config,
            json=bool(given.get("json")),
        )


def socket_in(config: str) -> str:
    """`paths.socket` of a configuration file; empty where it does not say or cannot be read.

    Whether the file is valid is not asked: whoever may only read the socket need not read the file.
    """
    try:
        with open(config, "rb") as file:
            found = tomli.load(file).get("paths", {}).get("socket", "")
    except (OSError, ValueError, AttributeError):
        return ""
    return found if isinstance(found, str) else ""


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
            help="Print JSON on standard output.",
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
