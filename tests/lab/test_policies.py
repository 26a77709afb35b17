"""Policy files: those that come with the agent, and all that can be wrong with one."""

import contextlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.config import Config
from gpuagent.configfile import parse as parse_config
from gpuagent.decide.backpressure import Backpressure
from gpuagent.errors import ConfigError
from gpuagent.lab import policies
from gpuagent.lab.policies import PolicyFile, named, parse
from gpuagent.lab.rivals import Static, TgsLike
from gpuagent.sim import scenario
from gpuagent.sim.profiles import converted

GRID = """
name = "grid"
about = "Some shares."
control = "static"
[shares]
L3 = [0.2, 1.0]
L2 = [0.5, 0.75, 1]
"""


MANY = [n / 1000 for n in range(1, 300)]


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(text, source="p.toml")
    return list(caught.value.problems)


@pytest.mark.parametrize("name", policies.SHIPPED)
def test_those_that_come_with_the_agent_run_on_every_scenario(name: str) -> None:
    file = named(name)
    assert file.name == name
    for one in scenario.names():
        patched = file.members()[0].scenario(scenario.named(one))
        parse_config(patched.agent_toml(), source=one)


def test_every_file_that_comes_with_the_agent_is_known() -> None:
    folder = Path(policies.__file__).parents[2] / "config" / "policies"
    assert {p.stem for p in folder.iterdir()} == set(policies.SHIPPED)


def test_a_grid_is_every_combination_and_each_has_a_name() -> None:
    members = parse(GRID, source="p.toml").members()
    assert [m.name for m in members[:2]] == ["grid L3=0.2 L2=0.5", "grid L3=0.2 L2=0.75"]
    assert len({m.name for m in members}) == len(members) == 6
    assert members[-1].shares == {"L2": 1.0, "L3": 1.0}


def test_a_policy_changes_what_it_says_and_nothing_else() -> None:
    base = scenario.named("co-location")
    [member] = named("pi").members()
    config = parse_config(member.scenario(base).agent_toml(), source="")
    plain = parse_config(base.agent_toml(), source="")
    assert config.backpressure.control == "pi"
    assert plain.backpressure.control == "aimd"
    assert config.tenants == plain.tenants


def test_what_decides() -> None:
    kinds = {
        name: [type(p).__name__ for p in named(name).members()[0].policies()(Config())]
        for name in ("static", "tgs", "aimd", "pi")
    }
    assert kinds["static"] == [Static.__name__, "PowerBudget"]
    assert kinds["tgs"] == [TgsLike.__name__, "PowerBudget"]
    assert kinds["aimd"] == kinds["pi"]
    assert Backpressure.__name__ in kinds["aimd"]


def test_all_problems_are_told_at_once_with_file_and_key() -> None:
    found = problems(
        'name = ""\ncontrol = "static"\nspeed = 3\nagent = 1\n'
        '[shares]\nL1 = [0.5]\nL3 = [0, 1.5, "x", true, 0.5, 0.5]\nL2 = []\n'
    )
    assert [tuple(p.split(": ")[:2]) for p in found] == [
        ("p.toml:1", "name"),
        ("p.toml:1", "about"),
        ("p.toml:3", "speed"),
        ("p.toml:4", "agent"),
        ("p.toml:6", "shares.L1"),
        ("p.toml:7", "shares.L3[0]"),
        ("p.toml:7", "shares.L3[1]"),
        ("p.toml:7", "shares.L3[2]"),
        ("p.toml:7", "shares.L3[3]"),
        ("p.toml:7", "shares.L3[5]"),
        ("p.toml:8", "shares.L2"),
    ]


def test_what_no_agent_would_read_is_told_with_its_line() -> None:
    head = 'name = "a"\nabout = "b"\ncontrol = "agent"\n'
    [found] = problems(head + '[agent.backpressure]\ncontrol = "magic"')
    assert found.startswith("p.toml:5: agent.backpressure.control: ")
    assert "aimd" in found


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('name = "a"\nabout = "b"\ncontrol = "maybe"', "control"),
        ('name = "a"\nabout = "b"\ncontrol = "none"\n[agent]\ntick = 1', "agent"),
        ('name = "a"\nabout = "b"\ncontrol = "tgs"\n[shares]\nL3 = [0.5]', "shares"),
        ('name = "a"\nabout = "b"\ncontrol = "static"', "shares"),
        ('name = "a\\u001b[2J"\nabout = "b"\ncontrol = "none"', "name"),
        (f'name = "{"a" * 40}"\nabout = "b"\ncontrol = "none"', "name"),
        (
            'name = "a"\nabout = "b"\ncontrol = "static"\n[shares]\nL3 = ' + str(MANY),
            "shares",
        ),
    ],
)
def test_one_problem(text: str, key: str) -> None:
    [found] = problems(text)
    assert re.match(rf"p\.toml:\d+: {key}: ", found)


def test_broken_toml_names_its_line() -> None:
    assert problems("name = \n") == ["p.toml:1: not valid TOML: Invalid value"]


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GRID)
    assert named(str(path)) == parse(GRID, source="")
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        named(str(path))
    with pytest.raises(ConfigError, match=r"gone\.toml: cannot be read"):
        named(str(tmp_path / "gone.toml"))
    with pytest.raises(ConfigError, match="cannot be read"):
        named(f"{tmp_path}/a\0.toml")
    with pytest.raises(ConfigError, match=r"'best' is no policy; .* none, static, tgs, aimd, pi"):
        named("best")


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
KEYS = st.sampled_from(["name", "about", "control", "agent", "shares", "L3", "x"])


@given(st.dictionaries(KEYS, SCALARS | st.lists(SCALARS) | st.dictionaries(KEYS, SCALARS)))
def test_any_table_is_a_policy_or_has_problems(table: dict[str, object]) -> None:
    found = list(policies._problems(table))
    assert all(p.path and p.text.isprintable() for p in found)
    if not found:
        assert isinstance(converted(table, PolicyFile, where=""), PolicyFile)


@given(st.text(max_size=80))
def test_any_text_is_refused_or_understood(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(parse(text, source="p.toml"), PolicyFile)
