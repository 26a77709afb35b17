"""Reads the configuration file: all problems at once, each with its file and line.

`load` is all the daemon needs; `describe` shows a configuration as an operator would write it, and
`changed_needs_restart` says what a reload cannot change.
"""

import hashlib
import os
import stat
import time

import msgspec
import tomli

from gpuagent import configdoubts, configrules
from gpuagent.config import Config
from gpuagent.configschema import SCHEMA, Problem, Reader, plain, spelled
from gpuagent.errors import ConfigError
from gpuagent.tomllines import line_of, locate

_MOST_BYTES = 1024 * 1024
_MOST_PROBLEMS = 100
"""Listed; more of them is a wrong file, and a text of that size would drown log and API."""
_READ_AT_START = ("paths", "api")

# What tomli says, by how it begins, and what that usually is.
_SYNTAX_HINTS = {
    "Invalid value": "text is written in quotes",
    "Expected newline or end of document after a statement": (
        'a value with a unit is written in quotes: "250W"'
    ),
    "Cannot overwrite a value": "this key is given twice",
    "Duplicate inline table key": "this key is given twice",
    "Cannot declare": "this table is given twice",
    "Cannot redefine namespace": "this table is given twice",
    "Cannot mutate immutable namespace": "this table or list is already complete",
    "Illegal character '\\n'": "the text has no closing quote on its line",
}


class Loaded(msgspec.Struct, frozen=True):
    """A configuration file that was read without a problem."""

    config: Config
    path: str
    digest: str
    """SHA-256 of the file, in hexadecimal: whether two hosts run the same file."""
    warnings: tuple[str, ...] = ()
    """What the operator should know, each one line; none of it stops the agent."""
    troubles: tuple[str, ...] = ()
    """What a part of the agent will do without, each with its line: files that cannot be used.

    Problems to whoever checks the file. The agent runs: a certificate is no reason to let go of all
    else, and may be put in order while it does.
    """


def load(path: str) -> Loaded:
    """Reads and checks a configuration file.

    Raises ConfigError with every problem, ordered by line.
    """
    raw, warnings = _read(path)
    text = _decoded(raw, path)
    config, meant = _parsed(text, path)
    troubles, doubts = _pair(config, text, path)
    return Loaded(
        config=config,
        path=path,
        digest=hashlib.sha256(raw).hexdigest(),
        warnings=(*warnings, *meant, *doubts),
        troubles=troubles,
    )


def _pair(config: Config, text: str, source: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is wrong with the certificate and the key of the network listener, and what is doubtful."""
    api = config.api
    if not api.network_listen:
        return (), ()
    # Only here: it loads OpenSSL, which no other configuration needs.
    from gpuagent import tlspair

    wrong = tlspair.problems(api.tls_certificate, api.tls_key)
    troubles = _with_lines([Problem(("api", key), what) for key, what in wrong], text, source)
    return tuple(troubles), tlspair.doubts(api.tls_certificate, api.tls_key, wall=time.time())


def parse(text: str, *, source: str) -> Config:
    """The configuration that a TOML document holds; an empty one is all defaults.

    `source` is the file's name in the problems. Raises ConfigError with every problem.
    """
    config, _ = _parsed(text, source)
    return config


def _parsed(text: str, source: str) -> tuple[Config, tuple[str, ...]]:
    """The configuration, and what is doubtful in it. Raises ConfigError."""
    document = _document(text, source)
    reader = Reader()
    config = reader.read(document)
    wrong = frozenset(problem.path for problem in reader.problems)
    problems = [*reader.problems, *configrules.check(reader.values, wrong)]
    if problems or config is None:
        raise ConfigError(_with_lines(problems, text, source))
    return config, tuple(_with_lines([*configdoubts.doubts(reader.values)], text, source))


def describe(config: Config) -> dict[str, object]:
    """The configuration as TOML would hold it: plain values, text with units, nothing for none."""
    described = plain(SCHEMA, config)
    assert isinstance(described, dict)
    return described


def changed_needs_restart(old: Config, new: Config) -> list[str]:
    """The keys that differ and are read at start only, such as `paths.socket`."""
    return [
        f"{section}.{key}"
        for section in _READ_AT_START
        for key in getattr(old, section).__struct_fields__
        if getattr(getattr(old, section), key) != getattr(getattr(new, section), key)
    ]


def _read(path: str) -> tuple[bytes, tuple[str, ...]]:
    """The file's bytes and what is doubtful about it. Raises ConfigError."""
    try:
        # Without O_NONBLOCK a FIFO that nobody writes would hold up the start for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        remedy = "write one (an empty one is all defaults) or give another"
        raise ConfigError([f"{path}: no such file; {remedy}"]) from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path.
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError([f"{path}: cannot be opened: {reason}"]) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise ConfigError([f"{path}: is {kind}; give the path of a file"])
        with open(descriptor, "rb", closefd=False) as file:
            raw = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    finally:
        os.close(descriptor)
    if len(raw) > _MOST_BYTES:
        raise ConfigError([f"{path}: is larger than 1 MiB; no configuration is"])
    return raw, _doubts(path, status)


def _doubts(path: str, status: os.stat_result) -> tuple[str, ...]:
    """Who else can write the file: they command the agent, and it commands the host.

    Raises ConfigError where that is everybody.
    """
    if status.st_mode & stat.S_IWOTH:
        raise ConfigError([f"{path}: everybody can write it; run chmod o-w {path}"])
    warnings = []
    if status.st_mode & stat.S_IWGRP and status.st_gid != 0:
        warnings.append(f"{path}: group {status.st_gid} can write it, and so command the agent")
    if status.st_uid not in (0, os.geteuid()):
        warnings.append(f"{path}: user {status.st_uid} owns it, and so commands the agent")
    return tuple(warnings)


def _decoded(raw: bytes, path: str) -> str:
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        byte = f"byte 0x{raw[error.start]:02x}"
        raise ConfigError([f"{path}:{line}: not UTF-8 ({byte}); save it as UTF-8"]) from None
    if text.startswith("\ufeff"):
        raise ConfigError([f"{path}:1: starts with a byte order mark; save it as plain UTF-8"])
    return text


def _document(text: str, source: str) -> dict[str, object]:
    try:
        return tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        hint = next((h for start, h in _SYNTAX_HINTS.items() if error.msg.startswith(start)), "")
        # Some of its texts quote the whole key, however long.
        message = error.msg[:200] + (f"; {hint}" if hint else "")
        where = f"{source}:{error.lineno}"
        raise ConfigError([f"{where}: not valid TOML at column {error.colno}: {message}"]) from None
    except RecursionError:
        raise ConfigError([f"{source}: not valid TOML: nested too deeply"]) from None
    except ValueError:  # From int(), for thousands of digits.
        raise ConfigError([f"{source}: not valid TOML: a number has too many digits"]) from None


def _with_lines(problems: list[Problem], text: str, source: str) -> list[str]:
    """The problems as the operator sees them, ordered by line."""
    lines = locate(text)
    located = sorted(
        ((line_of(lines, problem.path), problem) for problem in problems), key=lambda p: p[0]
    )
    listed = [f"{source}:{line}: {spelled(p.path)}: {p.text}" for line, p in located]
    if len(listed) > _MOST_PROBLEMS:
        more = f"{source}: {len(listed) - _MOST_PROBLEMS} more problems are not shown"
        return [*listed[:_MOST_PROBLEMS], more]
    return listed
