"""Scenario files as an agent is to run them: what `[agent]` says is checked too, with file and line."""

from collections.abc import Iterator, Mapping

from gpuagent import configrules
from gpuagent.config import Config
from gpuagent.configschema import Reader
from gpuagent.errors import ConfigError
from gpuagent.sim import scenario
from gpuagent.sim.reading import Problem, located
from gpuagent.sim.scenario import Patch, Scenario
from gpuagent.tomllines import Path


def named(name: str) -> Scenario:
    """A scenario that comes with the agent, by name, or any by its path. Raises ConfigError."""
    path = scenario.path_of(name)
    return parse(scenario.read(path), source=path)


def parse(text: str, *, source: str) -> Scenario:
    """A scenario from its text. Raises ConfigError with every problem, its line and its key."""
    made = scenario.parse(text, source=source)
    problems = list(_problems(made))
    if problems:
        raise ConfigError(located(problems, text, source=source))
    return made


def configuration(table: Mapping[str, object], *, source: str) -> Config:
    """The agent's configuration from values. Raises ConfigError; `source` says whose they are."""
    config, problems = _read(table)
    if problems or config is None:
        raise ConfigError(f"{source}: {problem}" for problem in problems)
    return config


def unread(table: Mapping[str, object]) -> list[Problem]:
    """What no agent would read of a part of its configuration, whatever the rest is."""
    reader = Reader()
    reader.read(table)
    return [Problem(path, text) for path, text in reader.problems]


def _read(table: Mapping[str, object]) -> tuple[Config | None, list[Problem]]:
    reader = Reader()
    config = reader.read(table)
    found = frozenset(problem.path for problem in reader.problems)
    every = [*reader.problems, *configrules.check(reader.values, found)]
    return config, [Problem(("agent", *path), text) for path, text in every]


def _problems(made: Scenario) -> Iterator[Problem]:
    if not made.agent:
        what = 'missing; without it nobody is looked after: write mode = "enforce" below [agent]'
        yield Problem(("agent",), f"{what}, and [[agent.tenants]] for each tenant")
        return
    for at in dict.fromkeys((0.0, *made.agent_changes())):
        _, problems = _read(made.agent_table(at))
        yield from (Problem(_written(made, at, p.path), p.text) for p in problems)


def _written(made: Scenario, at: float, path: Path) -> Path:
    """Where in the file the value stands: in the last change by then that has it, or in [agent]."""
    changes = [
        (h.at, i) for i, h in enumerate(made.timeline) if isinstance(h, Patch) and h.at <= at
    ]
    for _, i in sorted(changes, reverse=True):
        change = made.timeline[i]
        if isinstance(change, Patch) and _has(change.agent, path[1:]):
            return ("timeline", i, *path)
    return path


def _has(value: object, path: Path) -> bool:
    """Whether a table has what a path leads to, or a table above its last key."""
    for part in path[:-1]:
        below: object = dict(enumerate(value)) if isinstance(value, list) else value
        if not isinstance(below, dict) or part not in below:
            return False
        value = below[part]
    return isinstance(value, dict) and (len(path) > 1 or path[-1] in value)
