"""`gpuagent run`: starts a command as a tenant: in its place, with its environment."""

import contextlib
import os
import signal
import sys

import click
import msgspec

from gpuagent.cli.binding import bind
from gpuagent.cli.client import Client, Document
from gpuagent.cli.exits import CODES, Exit, Failure
from gpuagent.cli.options import Options, common
from gpuagent.log import printable
from gpuagent.quantities import bytes_, ratio

PATIENCE_SECONDS = 3.0
"""An agent that hangs must not keep the command from starting."""
_DECLINED = (Exit.FORBIDDEN, Exit.UNKNOWN_TENANT, Exit.REFUSED)
"""The agent has answered, and there is no such environment to be had."""
_NOT_EXECUTABLE = 126
_NOT_FOUND = 127
"""As a shell has it (POSIX, "Exit Status for Commands")."""

_CODES = f"""{CODES}  126  COMMAND cannot be executed
  127  COMMAND was not found
  Once COMMAND has begun, the exit code is its own.
"""

_ADMISSION = ("gpu_memory", "share", "gpus", "count", "name", "cpu_weight", "host_memory")
"""Options that go with --sla."""


@click.command(epilog=_CODES, context_settings={"allow_interspersed_args": False})
@click.option("--sla", type=click.Choice(["L1", "L2", "L3"]), help="Level of the new tenant.")
@click.option(
    "--gpu-memory",
    metavar="SIZE",
    help="Device memory reserved on each card, which is its limit too: 8GiB.",
)
@click.option(
    "--share", metavar="RATIO", help="The most that it may use of each card, under CUDA MPS: 40%."
)
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    metavar="UUID|INDEX",
    help="On this card; give it again for one more.",
)
@click.option(
    "--gpus", "count", type=int, metavar="N", help="On so many cards, whichever it fits on (1)."
)
@click.option("--name", metavar="NAME", help="What the new tenant is called.")
@click.option("--cpu-weight", type=int, metavar="N", help="CPUWeight of its scope: 1 to 10000.")
@click.option("--host-memory", metavar="SIZE", help="MemoryMax of its scope: 16GiB.")
@click.option("--no-bind", is_flag=True, help="Do not keep it on the NUMA node of its cards.")
@click.option(
    "--tenant", metavar="NAME", help="Start in the environment of this declared tenant instead."
)
@click.option(
    "--strict",
    is_flag=True,
    help="Do not start it without a scope of its own; with --tenant, without its environment.",
)
@click.argument("words", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@common
def run(
    words: tuple[str, ...],
    *,
    sla: str | None,
    tenant: str | None,
    strict: bool,
    no_bind: bool,
    **asked: object,
) -> None:
    """Start COMMAND as a tenant, right from its first CUDA call.

    Example: `gpuagent run --sla L3 --gpu-memory 8GiB -- python train.py`.

    With --sla it becomes a tenant of its own, if it fits: its device memory is reserved for as long as
    it lives, it sees its cards only, runs on their NUMA node, and, under systemd, has a scope of its
    own. Where the agent does not answer or does not admit it, it is not started; `gpuagent explain`
    says why. Who may start which level is configured, with [[run.allow]].

    With --tenant it gets the environment of a tenant that is declared. Where the agent does not run,
    or does not answer, COMMAND is started as it is, with a warning; where it answers that there is no
    such tenant, or that it is not yours, COMMAND is not started.

    What the agent sets replaces variables of the same name.
    """
    given = {key: value for key, value in asked.items() if value not in (None, ())}
    if sla is not None and tenant is None:
        added = _admitted(sla, given, strict=strict, bound=not no_bind)
    elif tenant is not None and sla is None and not given:
        added = _environment(tenant, strict=strict)
    else:
        raise _mixed(sla, tenant)
    _become(words, {**os.environ, **added})


def _mixed(sla: str | None, tenant: str | None) -> Failure:
    if sla is None and tenant is None:
        return Failure(
            Exit.USAGE, "Missing option --sla or --tenant", "give --sla for a new tenant"
        )
    return Failure(
        Exit.USAGE,
        "--tenant is for a tenant that is declared already",
        "give it alone, or --sla with the options of a new one",
    )


# -- a new tenant --------------------------------------------------------------------------------------


def _admitted(sla: str, given: dict[str, object], *, strict: bool, bound: bool) -> dict[str, str]:
    """The environment of this process as the tenant that it now is. Raises Failure."""
    body = {"sla": sla, "strict": strict, **_body(given)}
    started = Client(Options.current().socket).post("/v1/runs", body)
    added = _variables(started)
    found = _started(started)
    for note in found.run.notes:
        _warn(note)
    if bound and found.numa_nodes:
        for why in bind(found.numa_nodes):
            _warn(why)
    return added


_KEYS = {
    "gpu_memory": "gpu_memory_bytes",
    "share": "share_ratio",
    "gpus": "gpus",
    "count": "gpu_count",
    "name": "name",
    "cpu_weight": "cpu_weight",
    "host_memory": "host_memory_bytes",
}


def _body(given: dict[str, object]) -> dict[str, object]:
    """Raises Failure for what is no quantity."""
    parse = {"gpu_memory": bytes_, "host_memory": bytes_, "share": ratio}
    made: dict[str, object] = {}
    for key, value in given.items():
        try:
            made[_KEYS[key]] = parse[key](str(value)) if key in parse else value
        except ValueError as error:
            raise Failure(Exit.USAGE, f"--{key.replace('_', '-')}: {error}") from None
    return made


class _Run(msgspec.Struct):
    notes: list[str]


class _Started(msgspec.Struct):
    """As much as is needed of `expose.views.StartedView`."""

    run: _Run
    numa_nodes: list[int]


def _started(document: Document) -> _Started:
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(document, _Started)
    raise _foreign("no run")


# -- a tenant that is declared -------------------------------------------------------------------------


def _environment(name: str, *, strict: bool) -> dict[str, str]:
    try:
        client = Client(Options.current().socket, patience=PATIENCE_SECONDS)
        return _variables(client.tenant(name, "/environment"))
    except Failure as failure:
        if strict or failure.code in _DECLINED:
            raise
        _warn(f"{failure}; the command starts as it is")
        return {}


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
    raise _foreign("no environment")


# -- the command ---------------------------------------------------------------------------------------


def _foreign(what: str) -> Failure:
    return Failure(
        Exit.UNREACHABLE,
        f"the agent's answer is {what}",
        "is it of the same version as this command?",
    )


def _warn(text: str) -> None:
    click.echo(f"gpuagent: warning: {printable(text)}", err=True)


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
