"""Scenario files: those that come with the agent are right, and wrong ones are told off by key."""

import re
from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuagent.configfile import parse as parse_config
from gpuagent.errors import ConfigError
from gpuagent.model.inventory import Level
from gpuagent.sim import profiles, scenario

NAMES = scenario.names()

SMALL = """
name = "small"
about = "One tenant."
seconds = 60
[[cards]]
profile = "a40"
[[tenants]]
name = "train"
run = "bert-training"
"""


def test_the_scenarios_are_there() -> None:
    assert {
        "co-location",
        "memory-growth",
        "hot-card",
        "mps-neighbours",
        "power-budget-cut",
        "driver-fault",
        "quiet-night",
    } <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_scenario_says_who_is_who_in_words_the_agent_reads(name: str) -> None:
    made = scenario.named(name)
    assert made.name == name
    for at in (0.0, *made.agent_changes()):
        config = parse_config(made.agent_toml(at), source=name)
        assert config.mode == "enforce"
        assert any(rule.sla is Level.L1 for rule in config.tenants)
        assert {rule.name for rule in config.tenants} <= {t.name for t in made.tenants}


def test_changes_of_the_configuration_add_up() -> None:
    made = scenario.named("power-budget-cut")
    budgets = [parse_config(made.agent_toml(at), source="t").power.budget for at in (0, 120, 420)]
    assert budgets == [560.0, 380.0, 560.0]
    assert len(parse_config(made.agent_toml(120), source="t").tenants) == 3


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ('kind = "x"', "s.toml: tenants[0].kind: unknown key; there are name, run, "),
        ("crad = 1", "tenants[0].crad: unknown key (did you mean card?)"),
        ("card = 3", "s.toml: tenants[0].card: there is no card 3"),
        ("set = { rate = 3 }", "s.toml: tenants[0].set.rate: unknown key; there are kind, "),
        ('set = { shape = "cake" }', "tenants[0].set.shape: a40 has no cake"),
        ("set = { launch = 2.0 }", "tenants[0].set.launch: Expected `float` <= 1.0"),
        ('cgroup = "train"', "s.toml: tenants[0].cgroup: "),
        ('[[tenants]]\nname = "train"\nrun = "holder"', "train is given twice"),
        ("set = { launch = nan }", "tenants[0].set.launch: nan is no finite number"),
        (
            "set = { iteration_seconds = 1e-300 }",
            "set.iteration_seconds: Expected `float` >= 1e-06",
        ),
        ("set = { memory_bytes = inf }", "tenants[0].set.memory_bytes: inf is no finite number"),
        ("start = inf", "tenants[0].start: inf is no finite number"),
        ("start = 1e300", "tenants[0].start: Expected `float` <= 604800.0"),
        ("objective = { seconds = 1e-300 }", "tenants[0].objective.seconds: Expected `float` >= "),
        ('cgroup = "/../../etc/x"', "tenants[0].cgroup: '/../../etc/x' is no control group"),
        ('cgroup = "/a/./b"', "is no control group: write it as /"),
        ('cgroup = "/a/"', "tenants[0].cgroup: '/a/' is no control group"),
        ('cgroup = "/a\\nb"', "tenants[0].cgroup: write a path on one line"),
        ('cgroup = "/a\\u0000b"', "tenants[0].cgroup: write a path on one line"),
        (f'cgroup = "/{"a" * 300}"', "is no control group"),
        (f'cgroup = "{"/a" * 600}"', "of 1024 bytes at most"),
        ('user = "a\\n"', "tenants[0].user: "),
        (
            '[[cards]]\nprofile = "v100"\nset = { idle_watts = nan }',
            "cards[1].set.idle_watts: nan is no finite number",
        ),
        (
            '[[cards]]\nprofile = "v100"\nset = { idle_watts = -1 }',
            "cards[1].set.idle_watts: Expected `float` >= 0.0",
        ),
        (
            '[[cards]]\nprofile = "v100"\nambient_celsius = -inf',
            "ambient_celsius: -inf is no finite",
        ),
        (
            '[[cards]]\nprofile = "v100"\nambient_celsius = 1e9',
            "ambient_celsius: Expected `float` <= 150.0",
        ),
        (
            '[[timeline]]\nat = 1\ndo = "ambient"\ncard = 0\ncelsius = nan',
            "timeline[0].celsius: nan is no finite number",
        ),
        (
            '[[timeline]]\nat = 1\ndo = "hang"\ncard = 0\nseconds = 1e12',
            "timeline[0].seconds: Expected `float` <= 604800.0",
        ),
        (
            '[[timeline]]\nat = inf\ndo = "lose"\ncard = 0',
            "timeline[0].at: inf is no finite number",
        ),
        (
            '[[tenants]]\nname = "c"\nrun = "chat"\nset = { rate = 1e9 }',
            "tenants[1].set.rate: Expected `float` <= 10000.0",
        ),
        (
            '[[tenants]]\nname = "c"\nrun = "chat"\nset = { trace = [0.0], trace_seconds = 1e-300 }',
            "tenants[1].set.trace_seconds: 1e-300 is less than the trace takes",
        ),
        (
            '[[tenants]]\nname = "other"\nrun = "cake"',
            "tenants[1].run: 'cake' is no workload; there are chat",
        ),
        ('[[cards]]\nprofile = "h999"', "cards[1]: h999 is no kind of card"),
        (
            '[[cards]]\nprofile = "v100"\nset = { price = 3 }',
            "cards[1]: set.price: no number of v100",
        ),
        (
            '[[timeline]]\nat = 1\ndo = "dance"',
            "s.toml: timeline[0].do: 'dance' is none of them; write one of start, stop, restart",
        ),
        (
            '[[timeline]]\nat = 1\ndo = "stop"\ntenant = "x"',
            "tenant: there is no tenant x; there are train",
        ),
        (
            '[[timeline]]\nat = 1\ndo = "lose"\ncard = 1',
            "timeline[0].card: there is no card 1; there is only card 0",
        ),
        (
            '[[timeline]]\nat = 1\ndo = "load"\ntenant = "train"\nrate = 2',
            "train has no rate of requests",
        ),
        ("[[mps]]\ncards = []", "mps[0].cards"),
        ("[[mps]]\ncards = [1]", "mps[0].cards: there is no card 1"),
        ("[[mps]]\ncards = [0]\n[[mps]]\ncards = [0]", "mps[1].cards: card 0 is given twice"),
        ("[[mps]]\ncards = [0]\npercentage = 0", "mps[0].percentage"),
        ("[[mps]]\ncards = [0]\nset = { width = 1 }", "mps[0]: set.width: no number of mps"),
        ("thread_percentage = 101", "tenants[0].thread_percentage"),
        ("thread_percentage = 50", "tenants[0]: its MPS limits mean nothing; card 0 has no MPS"),
        (
            '[[mps]]\ncards = [0]\n[[tenants]]\nname = "b"\nrun = "holder"\nuser = "bob"',
            "mps[0]: a server works for one user at a time; give alice and bob one",
        ),
        (
            '[[timeline]]\nat = 1\ndo = "mps"\npercentage = 5',
            "timeline[0].mps: there is no MPS group 0",
        ),
        (
            '[[mps]]\ncards = [0]\n[[timeline]]\nat = 1\ndo = "mps"',
            "timeline[0]: give percentage or memory_limit_bytes; it sets nothing",
        ),
        (
            '[[timeline]]\nat = 61\ndo = "stop"\ntenant = "train"',
            "timeline[0].at: 61 is after the end: the scenario has 60 seconds",
        ),
        ('[[timeline]]\nat = 1\ndo = "restart"\ntenant = "x"', "timeline[0].tenant: there is no"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_key(more: str, said: str) -> None:
    found = [re.sub(r"^s\.toml:\d+: ", "s.toml: ", problem) for problem in problems(SMALL + more)]
    assert any(said in problem for problem in found)


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        scenario.parse(text, source="s.toml")
    return list(caught.value.problems)


def test_all_that_is_wrong_is_said_at_once_with_its_line() -> None:
    text = SMALL.replace("seconds = 60", 'seconds = "long"\nspeed = 1') + "card = -1"
    assert [p.split(": ")[:2] for p in problems(text)] == [
        ["s.toml:4", "seconds"],
        ["s.toml:5", "speed"],
        ["s.toml:11", "tenants[0].card"],
    ]
    assert problems(SMALL + "\nname = ")[0].startswith("s.toml:11: not valid TOML")


def test_a_wrong_workload_is_said_once_whatever_else_is_said_of_its_tenant() -> None:
    loads = 2 * '\n[[timeline]]\nat = 1\ndo = "load"\ntenant = "train"\nrate = 1'
    [found] = problems(SMALL.replace("bert-training", "cake") + loads)
    assert found.startswith("s.toml:9: tenants[0].run: 'cake' is no workload; there are ")


@pytest.mark.parametrize("text", ["a = " + "[" * 2000, "a = " + "9" * 9000])
def test_hostile_documents_are_refused(text: str) -> None:
    assert "not valid TOML" in problems(text)[0]


def test_files_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        scenario.named(str(tmp_path / "none.toml"))
    (tmp_path / "odd.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        scenario.named(str(tmp_path / "odd.toml"))
    with pytest.raises(ConfigError, match=r"is no scenario; .* co-location"):
        scenario.named("nowhere")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e300", "0", "-5", "1e-300"])
def test_it_takes_no_absurd_time(value: str) -> None:
    text = SMALL.replace("seconds = 60", f"seconds = {value}")
    assert text != SMALL
    assert any(": seconds: " in problem for problem in problems(text))


@given(st.text(max_size=60))
def test_any_text_is_read_or_told_off(text: str) -> None:
    with pytest.raises(ConfigError):
        scenario.parse(text, source="s.toml")


SCALARS = st.one_of(
    st.booleans(), st.integers(-(2**60), 2**60), st.text(max_size=9), st.floats(0, 9)
)
KEYS = st.from_regex("[a-z_]{1,9}", fullmatch=True)
TABLES: st.SearchStrategy[Any] = st.recursive(
    st.dictionaries(KEYS, st.one_of(SCALARS, st.lists(SCALARS, max_size=3)), max_size=4),
    lambda below: st.dictionaries(
        KEYS, st.one_of(SCALARS, below, st.lists(below, min_size=1, max_size=3)), max_size=4
    ),
    max_leaves=12,
)


@settings(max_examples=50)
@given(TABLES)
def test_the_agents_table_is_written_as_it_was_read(table: dict[str, Any]) -> None:
    made = scenario.parse(SMALL, source="s.toml")
    made = scenario.Scenario(
        name=made.name,
        about=made.about,
        seconds=made.seconds,
        cards=made.cards,
        tenants=made.tenants,
        agent=table,
    )
    assert tomli.loads(made.agent_toml()) == table


def test_every_coefficient_has_its_source() -> None:
    for kind in profiles.cards():
        made = profiles.card(kind)
        for name in made.__struct_fields__:
            value = getattr(made, name)
            sources = [s.source for s in value.values()] if name == "shapes" else []
            sources += [value.source] if isinstance(value, profiles.Number | profiles.Flag) else []
            for source in sources:
                assert any(w in source for w in ("assumed", "Zeus", "FACTS", "measured")), source
    assert profiles.host().cpus.source
