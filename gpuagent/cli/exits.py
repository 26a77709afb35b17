"""Exit codes of the command line, and how a command ends with one."""

import json
from enum import IntEnum, unique

import click

from gpuagent.log import printable


@unique
class Exit(IntEnum):
    """What the exit code of any command means."""

    OK = 0
    PROBLEM = 1
    """Something needed is missing, or could not be done or put back."""
    USAGE = 2
    """The command line or the configuration is invalid."""
    UNREACHABLE = 3
    """The agent does not run, or does not answer."""
    FORBIDDEN = 4
    """You may not do this."""
    UNKNOWN_TENANT = 5
    REFUSED = 6
    """The agent understood and declined: not now, or not on this host."""


CODES = """\b
Exit codes:
  0  done
  1  a problem was found, or something could not be put back
  2  the command line or the configuration is invalid
  3  the agent does not run, or does not answer
  4  you may not do this
  5  there is no such tenant
  6  the agent declined: not now, or not on this host
"""


class Failure(Exception):
    """Ends a command: a sentence for stderr with what to do, and the exit code."""

    def __init__(self, code: Exit, sentence: str, remedy: str = "") -> None:
        super().__init__(f"{sentence}; {remedy}" if remedy else sentence)
        self.code = code
        self.sentence = sentence
        self.remedy = remedy

    def show(self, *, as_json: bool = False) -> None:
        """Say it on standard error, where what is read from standard output stays empty."""
        if as_json:
            error = {"exit_code": int(self.code), "detail": self.sentence, "remedy": self.remedy}
            click.echo(json.dumps({"error": error}).replace("\x7f", "\\u007f"), err=True)
            return
        lines = (printable(line) for line in str(self).splitlines())
        click.echo("gpuagent: " + "\n".join(lines), err=True)
