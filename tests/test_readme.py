"""What README.md shows can be typed, and what its tables say is what the code has."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import click
import pytest

from gpuagent.cli.main import cli
from gpuagent.config import Config, Family, Lever
from gpuagent.configfile import parse
from gpuagent.configschema import SCHEMA
from gpuagent.decide.ladder import RUNGS
from gpuagent.expose.api import DOS, GETS
from gpuagent.expose.openapi import EVENTS
from gpuagent.model.vocab import KNOBS, SIGNAL
from tests.test_config_reference import keys

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
PROSE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
SPANS = re.findall(r"`([^`\n]+)`", PROSE)
LEVERS = get_args(Lever)
SEPARATORS = frozenset({";", "|", "&&", ">", ">>"})


def blocks(language: str) -> list[str]:
    """What stands between the fences of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def commands(script: str) -> Iterator[list[str]]:
    """The words of each command, without redirections."""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if word not in SEPARATORS:
                words.append(word)
                continue
            yield words
            words = []
        yield words


def typed(program: str) -> list[list[str]]:
    """The arguments of every command of this program in the scripts."""
    found = [words for script in blocks("sh") for words in commands(script)]
    return [words[1:] for words in found if words and words[0].endswith(program)]


def found(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that these words name, and what is left of them."""
    command: click.Command = cli
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        inner = command.get_command(click.Context(command), words[0])
        assert inner is not None, words
        command, words = inner, words[1:]
    return command, words


def table(head: str) -> list[list[str]]:
    """The rows of the table whose head begins so."""
    lines = TEXT[TEXT.index(f"| {head}") :].split("\n\n", 1)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


# -- what is typed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", blocks("toml"))
def test_every_configuration_loads(text: str) -> None:
    assert parse(text, source="README.md") != Config()


def test_all_configurations_are_one_language() -> None:
    assert len(blocks("toml")) == TEXT.count("```toml") > 1


@pytest.mark.parametrize("words", typed("gpuagent"), ids=" ".join)
def test_every_command_line_parses(words: list[str]) -> None:
    command, rest = found(words)
    with command.make_context("gpuagent", rest):
        pass


def test_a_wrong_command_line_does_not_parse() -> None:
    command, rest = found(["override", "set", "quiet", "--tenent", "x"])
    with pytest.raises(click.UsageError), command.make_context("gpuagent", rest):
        pass


@pytest.mark.parametrize(
    "words", [s.split()[1:] for s in SPANS if s.startswith("gpuagent ")], ids=" ".join
)
def test_every_command_in_a_sentence_is_one(words: list[str]) -> None:
    command, rest = found(words)
    options = {name for param in command.params for name in param.opts}
    assert {w for w in rest if w.startswith("--") and w != "--"} <= options


def test_every_make_target_is_one() -> None:
    named = {words[0] for words in typed("make")} | set(re.findall(r"`make ([a-z0-9-]+)", PROSE))
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"demo", "test", "e2e"} <= named <= set(targets)


def test_every_file_that_is_named_is_there() -> None:
    folders = ("gpuagent/", "tests/", "config/", "systemd/", "packaging/")
    words = [w for script in blocks("sh") for line in commands(script) for w in line]
    named = {w for w in (*SPANS, *words) if w.startswith(folders)}
    assert len(named) > 5
    assert {name for name in named if not list(ROOT.glob(name.rstrip("/")))} == set()


def test_every_setting_that_is_named_with_its_section_is_one() -> None:
    known = keys(SCHEMA, "")
    sections = {key.partition(".")[0] for key in known if "." in key}
    named = {s.split(" ")[0] for s in SPANS if re.match(r"[a-z]+\.[a-z_]+( = |$)", s)}
    settings = {name for name in named if name.partition(".")[0] in sections}
    assert "power.keep_on_stop" in settings
    assert settings <= known


# -- what the tables say -------------------------------------------------------------------------------


def test_every_lever_and_every_family_has_its_row() -> None:
    rungs = [row[1].strip("`") for row in table("rung | name")]
    assert rungs == [*LEVERS[:5], "power_limit", "clock_limit", *LEVERS[5:]]
    declared = {row[0].strip("`") for row in table("family | keys")}
    assert set(get_args(Family)) - set(rungs) == declared - set(rungs) - {"(none)"}


def test_the_default_levers_are_those_of_the_code() -> None:
    shown = re.search(r"take\s+the place of the default, `(\[[^`]*\])`", TEXT)
    assert shown is not None
    text = f'[[tenants]]\nname = "a"\nsla = "L3"\nmatch.unit = "a"\nlevers = {shown[1]}'
    [rule] = parse(text, source="README.md").tenants
    [default] = parse(text.rpartition("\n")[0], source="README.md").tenants
    assert rule == default


def test_each_lever_relieves_what_the_ladder_pulls_it_for() -> None:
    for row in table("rung | name"):
        name, said = row[1].strip("`"), set(re.findall("[a-z]+", row[5]))
        pulled = {kind for kind, knobs in RUNGS.items() if name in {k.family for k in knobs}}
        if pulled:
            assert said & RUNGS.keys() == pulled, name


def test_each_cause_lists_the_levers_of_its_ladder_in_order() -> None:
    rows = {row[0]: row[2] for row in table("cause | when")}
    for kind, knobs in RUNGS.items():
        listed = [name for name in re.findall("`([a-z_]+)`", rows[kind]) if name != "mps"]
        assert listed == [knob.family for knob in knobs], kind


def test_each_lever_takes_effect_when_its_knob_does() -> None:
    for row in table("rung | name"):
        [effect] = {k.takes_effect for k in KNOBS if k.family == row[1].strip("`")} - {
            "when the daemon starts its next server"
        }
        assert row[4].startswith(effect), row[1]


def test_the_table_of_the_api_has_every_route() -> None:
    listed = set()
    for cell, *_ in table("path | what | who"):
        for methods, paths in re.findall("((?:[A-Z]+,? )*)((?:`[^`]+`(?:, )?)+)", cell):
            for path in re.findall("`([^`]+)`", re.sub("NAME|UUID|ID", "{name}", paths)):
                listed |= {(m, f"/v1/{path}") for m in re.findall("[A-Z]+", methods) or ["GET"]}
    routes = {("GET", EVENTS.path)} | {("GET", route.path) for route in GETS}
    assert listed == routes | {(route.method, route.path) for route in DOS}


def test_every_metric_that_is_named_is_one() -> None:
    sources = [(ROOT / "gpuagent/expose/metrics.py").read_text(), *SIGNAL]
    named = [s.removeprefix("gpuagent_") for s in SPANS if re.fullmatch("gpuagent_[a-z_]+", s)]
    assert named
    assert [name for name in named if not any(name in text for text in sources)] == []
