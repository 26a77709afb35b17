"""`gpuagent run`: starts a command with the environment that its tenant should have."""

import contextlib
import os
import signal
import sys

import click
import msgspec

from gpuagent.cli.client import Client, Document
from gpuagent.cli.exits import CODES, Exit, Failure
from gpuagent.cli.options import Options, common
from gpuagent.log import printable

PATIENCE_SECONDS = 3.0
"""An agent that hangs must not keep the command from starting."""
_NOT_EXECUTABLE = 126
_NOT_FOUND = 127
"""As a shell has it (POSIX, "Exit Status for Commands")."""

_CODES = f"""{CODES}  126  COMMAND cannot be executed
  127  COMMAND was not found
  Once COMMAND has begun, the exit code is its own.
"""


@click.command(epilog=_CODES, context_settings={"allow_interspersed_args": False})
@click.option("--tenant", "name", required=True, metavar="NAME", help="Whose process it will be.")
@click.option("--strict", is_flag=True, help="Do not start it without that environment.")
@click.argument("words", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@common
def run(name: str, words: tuple[str, ...], *, strict: bool) -> None:
    """Start COMMAND with the environment of a tenant: MPS priority and limits, and how to report.

    Where the agent does not run, or does not say, the command is started as it is, with a warning.
    What the agent sets replaces variables of the same name.
    """
    try:
        client = Client(Options.current().socket, patience=PATIENCE_SECONDS)
        added = _variables(client.tenant(name, "/environment"))
    except Failure as failure:
        if strict:
            raise
        click.echo(
            f"gpuagent: warning: {printable(str(failure))}; the command starts as it is", err=True
        )
        added = {}
    _become(words, {**os.environ, **added})


class _Variable(msgspec.Struct):
    """As much as is needed of `expose.views.VariableView`, of whatever version the agent is."""

    name: str
    value: str


def _variables(document: Document) -> dict[str, str]:
    """Raises Failure for anything but names and values that a process can have."""
    with contextlib.suppress(msgspec.ValidationError):
        rows = msgspec.convert(document.get("variables"), list[_Variable])
        if all(v.name and "=" not in v.name and "\0" not in v.name + v.value for v in rows):
            return {v.name: v.value for v in rows}
    raise Failure(
        Exit.UNREACHABLE,
        "the agent's answer is no environment",
        "is it of the same version as this command?",
    )


def _become(words: tuple[str, ...], environment: dict[str, str]) -> None:
    """Run the command in the place of this process. Returns only by an exit where it cannot."""
    # Python ignores these two, and a command would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(words[0], words, environment)  # noqa: S606 - the caller's own command
    except OSError as error:
        click.echo(f"gpuagent: cannot run {printable(words[0])}: {error.strerror}", err=True)
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        click.get_current_context().exit(_NOT_FOUND if missing else _NOT_EXECUTABLE)
