"""Commands on a simulated host: what is asked of a real agent means nothing to them."""

import click
from click.core import ParameterSource

from gpuagent.cli.exits import Exit, Failure

_MEANINGLESS = ("socket", "config")


def simulated_only() -> None:
    """Refuse --socket and --config where the command line has them. Raises Failure."""
    context: click.Context | None = click.get_current_context()
    name = context.info_name if context is not None else ""
    while context is not None:
        for option in _MEANINGLESS:
            if context.get_parameter_source(option) is ParameterSource.COMMANDLINE:
                raise Failure(
                    Exit.USAGE,
                    f"--{option} means nothing to {name}: its host is simulated, and its agent is "
                    "configured by the scenario",
                    "leave it out",
                )
        context = context.parent
