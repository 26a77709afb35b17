"""The configuration file: hostile files and junk, describing, and what a reload cannot change."""

import json
import os
import re
import stat
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from gpuagent.config import Config, Match
from gpuagent.configfile import Loaded, changed_needs_restart, describe, load, parse
from gpuagent.configschema import SCHEMA, unwrapped
from gpuagent.errors import ConfigError
from gpuagent.model.inventory import Level
from gpuagent.reference import reference


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "gpuagent.toml"
    file.write_text('mode = "enforce"\n')
    file.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(file, 0, 0)
    return file


def refused(path: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(str(path))
    (problem,) = caught.value.problems
    return problem.removeprefix(f"{path}")


def test_a_file_is_loaded(path: Path) -> None:
    loaded = load(str(path))
    assert loaded.config == Config(mode="enforce")
    assert loaded.path == str(path)
    assert re.fullmatch("[0-9a-f]{64}", loaded.digest)
    other = path.with_name("other")
    other.write_text('mode = "enforce" # the same, said otherwise\n')
    assert load(str(other)).digest != loaded.digest


def test_an_empty_file_and_a_link_are_fine(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    assert load(str(link)).config.mode == "enforce"
    path.write_bytes(b"")
    assert load(str(link)).config == Config()


def test_problems_of_a_file_have_its_name(path: Path) -> None:
    path.write_text("\nmood = 1\n")
    assert refused(path) == ":2: mood: unknown key (did you mean mode?)"


def test_a_file_that_is_not_there(path: Path) -> None:
    path.unlink()
    assert (
        refused(path) == ": no such file; write one (an empty one is all defaults) or give another"
    )


def test_a_directory(path: Path) -> None:
    assert refused(path.parent) == ": is a directory; give the path of a file"


def test_a_pipe_does_not_hold_up_the_start(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)
    assert refused(path) == ": is not a regular file; give the path of a file"


def test_paths_that_cannot_be_opened(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(link)
    assert refused(link) == ": cannot be opened: Too many levels of symbolic links"
    assert refused(path / "below") == ": cannot be opened: Not a directory"
    assert "cannot be opened" in refused("nul\0byte")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(path: Path) -> None:
    path.chmod(0)
    assert refused(path) == ": cannot be opened: Permission denied"


def test_a_file_that_is_not_utf8(path: Path) -> None:
    path.write_bytes(b"# one\n# two \xff\n")
    assert refused(path) == ":2: not UTF-8 (byte 0xff); save it as UTF-8"
    path.write_bytes(b"\xef\xbb\xbf# a mark\n")
    assert refused(path) == ":1: starts with a byte order mark; save it as plain UTF-8"


def test_a_file_of_a_megabyte_is_read_and_one_byte_more_is_not(path: Path) -> None:
    path.write_bytes(b"#" + b"x" * (1024 * 1024 - 1))
    assert load(str(path)).config == Config()
    path.write_bytes(b"#" + b"x" * (1024 * 1024))
    assert refused(path) == ": is larger than 1 MiB; no configuration is"


def test_a_file_that_everybody_can_write_is_refused(path: Path) -> None:
    path.chmod(0o646)
    assert refused(path) == f": everybody can write it; run chmod o-w {path}"


def test_a_file_that_a_group_can_write_is_read_with_a_warning(path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(path, 0, 4321)
    assert load(str(path)).warnings == ()
    path.chmod(0o660)
    group = path.stat().st_gid
    warning = f"{path}: group {group} can write it, and so command the agent"
    assert load(str(path)).warnings == (warning,)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_that_somebody_else_owns_is_read_with_a_warning(path: Path) -> None:
    os.chown(path, 4321, 0)
    assert load(str(path)).warnings == (f"{path}: user 4321 owns it, and so commands the agent",)


# -- junk -------------------------------------------------------------------------------------------


def load_junk(path: Path, raw: bytes) -> Loaded | None:
    """Whatever is not a configuration is a ConfigError whose lines exist and are in order."""
    path.write_bytes(raw)
    try:
        return load(str(path))
    except ConfigError as error:
        problems = error.problems
    assert problems
    lines = [
        int(found[1])
        for problem in problems
        if (found := re.match(rf"{re.escape(str(path))}:([0-9]+): ", problem))
    ]
    assert lines == sorted(lines)
    assert all(1 <= line <= raw.count(b"\n") + 1 for line in lines)
    assert all(problem.isprintable() for problem in problems)
    return None


@pytest.fixture(scope="module")
def junk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("junk") / "f.toml"
    file.touch(0o600)
    assert not file.stat().st_mode & stat.S_IWOTH
    return file


@settings(deadline=None, max_examples=200)
@given(raw=st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_else(junk: Path, raw: bytes) -> None:
    load_junk(junk, raw)


_KEYS = sorted(set(re.findall("^#?([a-z_]+) =", reference(), re.MULTILINE)))
_HEADERS = sorted(set(re.findall(r"^#?(\[.*\])$", reference(), re.MULTILINE)))
_VALUES = [
    *("1", "0", "-1", "1e999", "nan", "true", "[]", "{}", "[{}]", "1979-05-27", "0x" + "f" * 5000),
    *('""', '"L1"', '"5s"', '"40%"', '"8GiB"', '"\\u0000"', '"/x"', '"x:1"', "'''\n'''"),
]
_LINES = st.one_of(
    st.sampled_from(_HEADERS),
    st.builds("{} = {}".format, st.sampled_from(_KEYS), st.sampled_from(_VALUES)),
    st.text(alphabet="abc.[]{}=\"'#\\ \n0é\x7f", max_size=12),
)


@settings(deadline=None, max_examples=400)
@given(lines=st.lists(_LINES, max_size=8))
def test_what_looks_like_a_configuration_raises_nothing_else(junk: Path, lines: list[str]) -> None:
    load_junk(junk, "\n".join(lines).encode())


# -- describing and comparing -------------------------------------------------------------------------

TENANT = """
[[tenants]]
name = 'a'
sla = 'L3'
match.user = 'a'
memory_limit = '8GiB'
"""


def test_a_configuration_is_described_in_tomls_terms() -> None:
    described = describe(parse(TENANT, source="f"))
    assert described["tick"] == "1s"
    assert described["power"] == {"dwell": "10s", "headroom": "10%", "keep_on_stop": False}
    assert isinstance(described["tenants"], list)
    (rule,) = described["tenants"]
    assert (rule["sla"], rule["memory_limit"], rule["match"]["user"]) == ("L3", "8GiB", "a")
    assert json.loads(msgspec.json.encode(described)) == described


_IN_RULES = {"name", "match", "budget", "panel", "budget_fraction"} | {
    *("memory_high", "memory_clear", "temperature_high", "temperature_clear", "hold", "within"),
    *("cpu_pressure_high", "cpu_pressure_clear", "probe_min", "probe_max", "metrics_listen"),
    *("latency_high", "latency_clear", "network_listen", "levers", "hours", "memory_reserved"),
    *("host_memory_high", "host_memory_max", "interval", "window"),
}
_ALWAYS = {"hours": "23:00-06:00", "url": "http://[::1]:1/metrics"}
_GIVEN = {"metric": "a:b_seconds", "slice": "tenants.slice"}
_ENTRIES = {"tenants"}
"""Lists of tables that are made at random; of the others the rules have more to say."""


def valid(field: inspect.Field) -> st.SearchStrategy[object]:
    """Values of a field that no rule binds to another."""
    kind, quantity = unwrapped(field.type)
    if field.name in _IN_RULES:
        return st.just(field.default)
    if quantity in _ALWAYS or field.name in _GIVEN:
        return st.just(_ALWAYS.get(quantity) or _GIVEN[field.name])
    if isinstance(kind, inspect.FloatType | inspect.IntType):
        most = {"ratio": 1, "bytes": 2**50, "watts": 10**6, "seconds": 365 * 86400}
        high = min(x for x in (kind.le, kind.lt, most.get(quantity, 10**9)) if x is not None)
        low = max(kind.ge or 0, kind.gt or 0)
        if isinstance(kind, inspect.IntType):
            return st.integers(int(low) + 1, int(high))
        return st.floats(low + 1e-6, high - 1e-9)
    if isinstance(kind, inspect.EnumType):
        return st.sampled_from([Level.L2, Level.L3])
    if isinstance(kind, inspect.LiteralType):
        return st.sampled_from(kind.values)
    if isinstance(kind, inspect.BoolType):
        return st.booleans()
    start = "/" if quantity == "path" else ""
    return st.text("aé \"'\\#[]=*", max_size=20).map(lambda text: start + text)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    def build(kind: inspect.StructType, **fixed: object) -> msgspec.Struct:
        values = dict(fixed)
        for field in kind.fields:
            inner, _ = unwrapped(field.type)
            if field.name in fixed:
                continue
            if isinstance(inner, inspect.StructType):
                values[field.name] = build(inner)
            elif isinstance(inner, inspect.VarTupleType):
                element = inner.item_type
                if not isinstance(element, inspect.StructType):
                    values[field.name] = field.default
                elif field.name in _ENTRIES:
                    rules = [
                        build(element, name=f"t{i}", match=Match(exe=f"/{i}"))
                        for i in range(draw(st.integers(0, 2)))
                    ]
                    values[field.name] = tuple(rules)
            else:
                values[field.name] = draw(valid(field))
        built = kind.cls(**values)
        assert isinstance(built, msgspec.Struct)
        return built

    config = build(SCHEMA)
    assert isinstance(config, Config)
    return config


def in_toml(value: object) -> str:
    """A described value as inline TOML, whose strings, for these, are those of JSON."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {in_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(in_toml, value)) + "]"
    return json.dumps(value)


@settings(deadline=None)
@given(configs())
def test_what_is_described_reads_back_as_the_same_configuration(config: Config) -> None:
    text = "\n".join(f"{key} = {in_toml(value)}" for key, value in describe(config).items())
    assert parse(text, source="f") == config


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('network_listen = "0.0.0.0:1"', "needs tls_certificate and tls_key"),
        ('network_listen = "0.0.0.0:1"\ntls_key = "/k"', "needs tls_certificate"),
        ('network_listen = "gpu7:1"', "not an address of this host"),
        ('network_listen = "0.0.0.0"', "not a host and a port"),
        ('tls_key = "k"', "must start with /"),
        ('metrics_token = "yes"', "not true or false"),
    ],
)
def test_the_network_is_reached_by_tls_or_not_at_all(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        parse(f"[api]\n{text}\n", source="f")
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("listen", ["", "0.0.0.0:9486", "[::]:9486", "192.0.2.7:1"])
def test_any_address_can_be_the_networks(listen: str) -> None:
    text = f'[api]\nnetwork_listen = "{listen}"\ntls_certificate = "/c"\ntls_key = "/k"'
    config = parse(text, source="f")
    assert config.api.network_listen == listen
    assert changed_needs_restart(Config(), config)[-2:] == ["api.tls_certificate", "api.tls_key"]


def test_a_reload_names_what_it_cannot_change() -> None:
    old = parse("", source="f")
    new = parse(
        """
        mode = "enforce"
        paths = { socket = "/run/x.sock", cgroup_root = "/x" }
        api.group = "wheel"
        """,
        source="f",
    )
    assert changed_needs_restart(old, new) == ["paths.socket", "paths.cgroup_root", "api.group"]
    assert changed_needs_restart(old, parse("tick = '2s'", source="f")) == []
