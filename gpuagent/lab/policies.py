"""Policy files: what can be compared with what, as `config/policies/*.toml` have it."""

import itertools
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from gpuagent.config import Config
from gpuagent.core import Policies, shipped
from gpuagent.decide.power import PowerBudget
from gpuagent.errors import ConfigError
from gpuagent.lab.rivals import Static, TgsLike
from gpuagent.lab.scenarios import unread
from gpuagent.model.inventory import Level
from gpuagent.ports import Policy
from gpuagent.sim.reading import Problem, document, located
from gpuagent.sim.scenario import Scenario
from gpuagent.sim.tables import Table

CONTROLS = ("none", "static", "tgs", "agent")
SHIPPED = ("none", "static", "tgs", "aimd", "pi")
"""Those that come with the agent, in the order in which they are shown."""
_KEYS = ("name", "about", "control", "agent", "shares")
_HELD = {"L2": Level.L2, "L3": Level.L3}
_LONGEST_NAME = 24
_MOST_MEMBERS = 200


class Member(msgspec.Struct, frozen=True):
    """One policy to run: a file, or one combination of shares of a file with a grid of them."""

    name: str
    control: str
    file: str
    """Name of the file's policy, which all members of a grid have in common."""
    agent: Table = {}
    """Laid over the agent's configuration in a scenario."""
    shares: Mapping[str, float] = {}
    """By level, for fixed shares."""

    def scenario(self, scenario: Scenario) -> Scenario:
        """The scenario as this policy runs it."""
        return scenario.with_agent(self.agent) if self.agent else scenario

    def policies(self) -> Policies:
        """What decides. A power budget is kept under every one of them."""
        if self.control == "agent":
            return shipped
        shares = {_HELD[level]: share for level, share in self.shares.items()}
        return partial(_rival, self.control, shares)


def _rival(control: str, shares: Mapping[Level, float], config: Config) -> list[Policy[Any]]:
    made = Static(config, shares) if control == "static" else TgsLike(config)
    return [made, PowerBudget(config)]


class PolicyFile(msgspec.Struct, frozen=True):
    """One file."""

    name: str
    about: str
    control: str
    agent: Table = {}
    shares: Mapping[str, tuple[float, ...]] = {}

    def members(self) -> tuple[Member, ...]:
        """All that it stands for: of a grid, every combination."""
        if self.control != "static":
            return (Member(self.name, self.control, self.name, self.agent),)
        levels = sorted(self.shares, reverse=True)
        return tuple(
            Member(
                f"{self.name} {' '.join(f'{n}={s:g}' for n, s in zip(levels, point, strict=True))}",
                self.control,
                self.name,
                self.agent,
                dict(zip(levels, point, strict=True)),
            )
            for point in itertools.product(*(self.shares[level] for level in levels))
        )


# -- files ----------------------------------------------------------------------------------------------


def named(name: str) -> PolicyFile:
    """A policy that comes with the agent, by name, or any by its path. Raises ConfigError."""
    if name in SHIPPED:
        return load(str(_folder() / f"{name}.toml"))
    if os.sep in name or name.endswith(".toml"):
        return load(name)
    known = ", ".join(SHIPPED)
    raise ConfigError([f"{name!r} is no policy; give the path of a file, or one of {known}"])


def _folder() -> Path:
    """Where they are: in the installed package, or in the source tree around it."""
    package = Path(__file__).parent.parent
    installed = package / "data" / "policies"
    return installed if installed.is_dir() else package.parent / "config" / "policies"


def load(path: str) -> PolicyFile:
    """Read a policy file and check all it says. Raises ConfigError with file and key."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise ConfigError([f"{path}: not UTF-8; save it as UTF-8"]) from None
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError([f"{path}: cannot be read: {reason}"]) from error
    return parse(text, source=path)


def parse(text: str, *, source: str) -> PolicyFile:
    """A policy from its text. Raises ConfigError with every problem; `source` is the file's name."""
    table = document(text, where=source)
    problems = [*_problems(table), *_agent_problems(table)]
    if problems:
        raise ConfigError(located(problems, text, source=source))
    return msgspec.convert(table, PolicyFile)


def _agent_problems(table: Mapping[str, object]) -> Iterator[Problem]:
    """What no agent would read; how it goes with a scenario's configuration is seen with that."""
    agent = table.get("agent")
    if isinstance(agent, dict) and table.get("control") != "none":
        yield from (Problem(("agent", *p.path), p.text) for p in unread(agent))


def _problems(table: Mapping[str, object]) -> Iterator[Problem]:
    for key in table:
        if key not in _KEYS:
            yield Problem((key,), f"unknown key; there are {', '.join(_KEYS)}")
    for key in ("name", "about"):
        value = table.get(key)
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            yield Problem((key,), "write a text on one line")
        elif key == "name" and len(value) > _LONGEST_NAME:
            yield Problem(("name",), f"is longer than {_LONGEST_NAME} characters")
    control = table.get("control")
    if control not in CONTROLS:
        yield Problem(("control",), f"write one of {', '.join(CONTROLS)}")
    agent = table.get("agent", {})
    if not isinstance(agent, dict):
        yield Problem(("agent",), "write a table, as the agent's configuration has it")
    elif agent and control == "none":
        yield Problem(("agent",), "without an agent nothing reads it; leave it out")
    shares = table.get("shares")
    if control == "static":
        yield from _wrong_shares(shares)
    elif shares is not None and control in CONTROLS:
        yield Problem(("shares",), f"control {control} has no fixed shares; leave it out")


def _wrong_shares(shares: object) -> Iterator[Problem]:
    if not isinstance(shares, dict) or not shares:
        yield Problem(("shares",), "write a table, such as L3 = [0.5, 1.0]")
        return
    count = 1
    for level, values in shares.items():
        at = ("shares", level)
        if level not in _HELD:
            yield Problem(at, "is no level that is held back; there are L2 and L3")
        if not isinstance(values, list) or not values:
            yield Problem(at, "write a list of shares, such as [0.5, 1.0]")
            continue
        count *= len(values)
        for i, value in enumerate(values):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value <= 1:
                yield Problem((*at, i), "write a share above 0 and up to 1")
            elif value in values[:i]:
                yield Problem((*at, i), f"{value:g} is given twice")
    if count > _MOST_MEMBERS:
        yield Problem(("shares",), f"{count} combinations are more than {_MOST_MEMBERS}")
