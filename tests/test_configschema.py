"""What a document may say: every problem is told once, with its line and its remedy."""

import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from gpuagent.config import Config, Match, TenantRule
from gpuagent.configfile import parse
from gpuagent.configschema import FORMS, SCHEMA, unwrapped
from gpuagent.errors import ConfigError
from gpuagent.model.inventory import Level
from gpuagent.reference import reference


def problems(text: str) -> list[str]:
    """What is wrong with a document, without the file's name."""
    with pytest.raises(ConfigError) as caught:
        parse(text, source="f")
    return [problem.removeprefix("f:") for problem in caught.value.problems]


def tenant(**settings: str) -> str:
    """A tenant with these settings, in TOML, begun on line 1."""
    lines = {"name": '"a"', "sla": '"L3"', "match": '{ user = "a" }'} | settings
    return "\n".join(["[[tenants]]", *(f"{k} = {v}" for k, v in lines.items() if v)])


def test_an_empty_document_is_all_defaults() -> None:
    assert parse("", source="f") == Config()


def test_settings_are_read_into_base_units() -> None:
    config = parse(
        """
        mode = "enforce"
        nvml.sample_interval = "500ms"
        [backpressure]
        memory_high = 0.9
        memory_growth = "1GiB"
        temperature_high = 85
        [power]
        panel = "10kW"
        budget_fraction = "80%"
        [[tenants]]
        name = "chat"
        sla = "L1"
        match = { unit = "triton.service", user = "alice" }
        kind = "inference"
        memory_limit = "40GB"
        [[tenants]]
        name = "batch/a@b"
        sla = "L2"
        hold_back = false
        [tenants.match]
        exe = "/opt/*"
        """,
        source="f",
    )
    assert config.mode == "enforce"
    assert config.nvml.sample_interval == 0.5
    assert config.backpressure.memory_high == 0.9
    assert config.backpressure.memory_growth == 1024**3
    assert config.backpressure.temperature_high == 85.0
    assert isinstance(config.backpressure.temperature_high, float)
    assert config.power.budget_watts == 8000
    assert config.tenants == (
        TenantRule(
            name="chat",
            sla=Level.L1,
            match=Match(unit="triton.service", user="alice"),
            kind="inference",
            memory_limit=40 * 10**9,
        ),
        TenantRule(name="batch/a@b", sla=Level.L2, match=Match(exe="/opt/*"), hold_back=False),
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        # Keys.
        ("[backpressure]\nmemory_hihg = 1", "2: backpressure.memory_hihg: unknown key (did you mean memory_high?)"),
        ("[backpressure]\nbudget = 1", "2: backpressure.budget: unknown key (belongs in [power])"),
        ("[nvml]\ndwell = 1", "2: nvml.dwell: unknown key (belongs in [backpressure] or [power])"),
        ("[power]\n\nmode = 1", "3: power.mode: unknown key (belongs at the top, before the first section)"),
        ("[api.log]", "1: api.log: unknown key (write [log])"),
        ("unit = 1", "1: unit: unknown key (belongs in [tenants.match] or [tenants.latency_from])"),
        ("qqq = 1", "1: qqq: unknown key"),
        ("[backpresure]\nx = 1", "1: backpresure: unknown section (did you mean [backpressure]?)"),
        ("[[tenant]]", "1: tenant: unknown section (did you mean [[tenants]]?)"),
        ('"we\\u001b ird" = 1', '1: "we\\u001b ird": unknown key'),
        # Values.
        ("tick = 1", "1: tick: 1 has no unit; write 1s or 1min, in quotes"),
        ('tick = "3s"', '1: tick: "3s" is out of range; it must be at least 100ms and at most 2s'),
        ('mode = "enfroce"', '1: mode: "enfroce" is not one of "enforce", "observe" (did you mean "enforce"?)'),
        ("mode = 3", '1: mode: 3 is not one of "enforce", "observe"'),
        ("[found]\nhold_back = 'yes'", '2: found.hold_back: "yes" is not true or false, written without quotes'),
        ("[found]\nsla = 1", '2: found.sla: 1 is not one of "L1", "L2", "L3"'),
        ("[api]\ngroup = 1", "2: api.group: 1 is not text; write it in quotes"),
        ("[api]\ngroup = 'a\tb'", '2: api.group: "a\\tb" has a control character in it, such as a newline'),
        ("[api]\nmetrics_listen = '0.0.0.0:1'", '2: api.metrics_listen: "0.0.0.0:1" is not a loopback address; write "127.0.0.1:9485" or "[::1]:9485"'),
        ("[paths]\nsocket = '@x'", '2: paths.socket: "@x" is not an absolute path; it must start with /'),
        ("[backpressure]\ncut = 1", "2: backpressure.cut: 1 is out of range; it must be more than 0% and less than 100%"),
        ("[backpressure]\nmin_cores = 0", "2: backpressure.min_cores: 0 is out of range; it must be more than 0"),
        ("[backpressure]\nmin_cores = nan", "2: backpressure.min_cores: nan is not a number that could be meant here"),
        ("[backpressure]\nmin_cores = true", "2: backpressure.min_cores: true is not a number; write it without unit and quotes"),
        ("[backpressure]\ntemperature_high = '80'", '2: backpressure.temperature_high: "80" is not a number; write it without unit and quotes'),
        ("power = 5", "1: power: 5 is not a table; write [power], its keys below it"),
        ("[[power]]", "1: power: an array is not a table; write [power], its keys below it"),
        ("[tenants]\nname = 'a'", "1: tenants: a table is not a list; write [[tenants]] for each of them"),
        ("tenants = [1]", "1: tenants[0]: 1 is not a table; write [[tenants]], its keys below it"),
        # Tenants.
        (tenant(sla=""), "1: tenants[0].sla: missing, and it has no default"),
        (tenant(match=""), "1: tenants[0].match: missing, and it has no default"),
        (tenant(match="{}"), "4: tenants[0].match: is empty; give at least one of unit, cgroup, container, pod, slurm_job, user or exe"),
        (tenant(match='{ unit = "" }'), "4: tenants[0].match: is empty; give at least one of unit, cgroup, container, pod, slurm_job, user or exe"),
        (tenant(match='{ unti = "a" }'), "4: tenants[0].match.unti: unknown key (did you mean unit?)"),
        (tenant(match='{ unit = "a\\nb" }'), '4: tenants[0].match.unit: "a\\nb" has a control character in it, such as a newline'),
        (tenant(name='"unit:a"'), "2: tenants[0].name: \"unit:a\" is not a tenant's name; write at most 63 letters, digits and ._@/- (a colon is kept for names that the agent gives)"),
        (tenant(memory_limit='"8 GB/s"'), '5: tenants[0].memory_limit: "8 GB/s" is not a size; write 8GiB or 8GB'),
        (tenant(latency_slo='"0s"'), '5: tenants[0].latency_slo: "0s" is out of range; it must be more than 0s'),
        (tenant(latency_slo="0.1"), "5: tenants[0].latency_slo: 0.1 has no unit; write 0.1s or 0.1min, in quotes"),
        (tenant(latency_quantile="1"), "5: tenants[0].latency_quantile: 1 is out of range; it must be more than 0% and less than 100%"),
        (tenant(sla='"L1"', hold_back="true"), "5: tenants[0].hold_back: L1 is never held back; leave this out, or give another sla"),
        (tenant(levers='"freeze"'), '5: tenants[0].levers: "freeze" is not a list; write ["freeze"]'),
        (tenant(levers='["frezee"]'), '5: tenants[0].levers[0]: "frezee" is not one of "cpu_max", "cpu_weight", "freeze", "io_weight", "mps", "notice", "suspend", "terminate" (did you mean "freeze"?)'),
        (tenant(hours='["23:00"]'), '5: tenants[0].hours[0]: "23:00" is not hours; write "23:00-06:00" or "mon-fri 18:00-08:00"'),
        (tenant(hours='["mon-fry 1:00-2:00"]'), '5: tenants[0].hours[0]: "mon-fry 1:00-2:00" is not hours; write "23:00-06:00" or "mon-fri 18:00-08:00"'),
        (tenant(sla='"L1"', hours='["23:00-06:00"]'), "5: tenants[0].hours: L1 is never held back; leave this out, or give another sla"),
        (tenant(memory_limit='"1GiB"', memory_reserved='"2GiB"'), "6: tenants[0].memory_reserved: is more than memory_limit of the same tenant; make it less"),
        (tenant(host_memory_high='"2GiB"', host_memory_max='"1GiB"'), "5: tenants[0].host_memory_high: is more than host_memory_max of the same tenant; make it less"),
        (tenant(levers="[]", notice_signal='"SIGUSR1"'), '6: tenants[0].notice_signal: says nothing without "notice" in levers'),
        (tenant(latency_from='{ url = "ftp://x", metric = "a" }'), '5: tenants[0].latency_from.url: "ftp://x" is not an address of metrics; write http://127.0.0.1:8000/metrics'),
        ("[levels.L1]\nhours = ['23:00-06:00']", "2: levels.L1.hours: L1 is never held back; leave this out, or give another sla"),
        ("[[mps.groups]]\nname = 'a'\nown = true", "3: mps.groups[0].own: needs gpus: the cards of the daemon, by UUID"),
        ("[[mps.groups]]\nname = 'a'\n[[mps.groups]]\nname = 'a'\npipe_directory = '/x'", '4: mps.groups[1].name: "a" is that of mps.groups[0] too'),
        (f"[[mps.groups]]\nname = 'a'\npipe_directory = '/{'x' * 81}'", "3: mps.groups[0].pipe_directory: is longer than 81 bytes, the most a daemon of MPS can use"),
        ("[[mps.groups]]\nname = 'a'\n[[mps.groups]]\nname = 'b'", '3: mps.groups[1]: pipe_directory: "/tmp/nvidia-mps" is that of mps.groups[0] too'),
        ("[[mps.groups]]\nname = 'a/b'\nown = true\ngpus = ['GPU-1']", '2: mps.groups[0].name: "a/b" cannot name the unit of a daemon of the agent\'s own; leave out / and @'),
        ("[[mps.groups]]\nname = 'a'\nown = true\ngpus = ['GPU-1', '*']", '4: mps.groups[0].gpus[1]: "*" is no UUID, which own = true needs'),
        ("[[run.allow]]\nsla = ['L3']", "1: run.allow[0]: allows nobody in particular; give user or group"),
        ("[enforce]\nfamilies = ['cpu']", '2: enforce.families[0]: "cpu" is not one of "card_mode", "clock_limit", "cpu_max", "cpu_weight", "freeze", "host_memory", "io_weight", "mps", "notice", "power_limit", "suspend", "terminate" (did you mean "cpu_max"?)'),
        (tenant() + "\n" + tenant(match='{ user = "b" }'), '6: tenants[1].name: "a" is the name of tenants[0] too'),
        (tenant() + "\n" + tenant(name='"b"'), "8: tenants[1].match: never counts: it is that of tenants[0], which comes first"),
        (tenant(hours='["25:00-06:00"]'), '5: tenants[0].hours[0]: "25:00-06:00": 25:00 is not a time of day'),
        (tenant(hours='["fre 23:00-06:00"]'), '5: tenants[0].hours[0]: "fre 23:00-06:00": fre is not a day; write mon, tue, wed, thu, fri, sat, sun or mon-fri'),
        (tenant(hours='["24:00-06:00"]'), '5: tenants[0].hours[0]: "24:00-06:00": 24:00 is where a day ends; begin at 00:00'),
        (tenant(hours='["06:00-06:00"]'), '5: tenants[0].hours[0]: "06:00-06:00" is of no length; for whole days write "00:00-24:00"'),
        (tenant(hours='"fri 23:00-06:00"'), '5: tenants[0].hours: "fri 23:00-06:00" is not a list; write ["fri 23:00-06:00"]'),
        (tenant(levers='["freeze"]', hours='["22:00-05:00"]'), '6: tenants[0].hours: says nothing without "cpu_max" in levers, by which hours are kept'),
        (tenant(levers='["mps", "freeze", "mps"]'), '5: tenants[0].levers[2]: "mps" is there twice'),
        ("[enforce]\nfamilies = ['mps', 'mps']", '2: enforce.families[1]: "mps" is there twice'),
        (tenant(notice_signal='"SIGKILL"'), '5: tenants[0].notice_signal: "SIGKILL" cannot be caught, so it warns nobody; write "SIGTERM" or another'),
        (tenant(notice_command="'/opt/x --now'"), '5: tenants[0].notice_command: "/opt/x --now" is not a list; write ["/opt/x", "--now"]'),
        (tenant(notice_command="""'/opt/x "a b'"""), '5: tenants[0].notice_command: "/opt/x \\"a b" is not a list; write ["/opt/x \\"a b"]'),
        (tenant(notice_command='["bin/x"]'), '5: tenants[0].notice_command[0]: "bin/x" is relative, and to what is not known; begin it with /'),
        (tenant(host_memory_max='"1kB"'), '5: tenants[0].host_memory_max: "1kB" is out of range; it must be at least 1MiB'),
        ("[run]\nslice = 'foo'", '2: run.slice: "foo" is not a slice of systemd; write a name such as "gpuagent-tenants.slice"'),
        ("[run]\ndevices = ['/dev/fuse', 'fuse']", '2: run.devices[1]: "fuse" is no device; write /dev/NAME, or char-NAME as in /proc/devices'),
        ("[run]\ndevices = ['char-']", '2: run.devices[0]: "char-" is no device; write /dev/NAME, or char-NAME as in /proc/devices'),
        ("[[run.allow]]\ngroup = 'ml'\nsla = 'L3'", '3: run.allow[0].sla: "L3" is not a list; write ["L3"]'),
        ("[[mps.groups]]\nname = '../x'", '2: mps.groups[0].name: "../x" is not the name of an MPS group; write at most 63 letters, digits and ._@/-, of which the first is a letter or a digit'),
        ("[[mps.groups]]\nname = 'a'\nown = true\ngpus = ['0']", '4: mps.groups[0].gpus[0]: "0" is an index, which fits no UUID; write the UUID that nvidia-smi -L shows'),
        ("[[mps.groups]]\nname = 'a'\ngpus = ['GPU-1', 'GPU-1']", '3: mps.groups[0].gpus[1]: "GPU-1" is there twice'),
        ("[[mps.groups]]\nname = 'a'\nown = true\ngpus = ['GPU-1']\n[[mps.groups]]\nname = 'b'\npipe_directory = '/b'\nown = true\ngpus = ['GPU-2', 'GPU-1']", '9: mps.groups[1].gpus[1]: "GPU-1" is in mps.groups[0] too; a card has one daemon'),
        # Settings against each other.
        ("[backpressure]\nmemory_clear = '90%'", "2: backpressure.memory_clear: 90% must be below memory_high (85%)"),
        ("[backpressure]\nmemory_clear = '85%'", "2: backpressure.memory_clear: 85% must be below memory_high (85%)"),
        ("[backpressure]\nlatency_clear = '95%'", "2: backpressure.latency_clear: 95% must be below latency_high (90%)"),
        ("[backpressure]\nmemory_high = '50%'", "2: backpressure.memory_high: 50% must be above memory_clear (80%)"),
        ("[backpressure]\ntemperature_high = 70", "2: backpressure.temperature_high: 70 must be above temperature_clear (75)"),
        ("[backpressure]\ncpu_pressure_clear = 0.5", "2: backpressure.cpu_pressure_clear: 50% must be below cpu_pressure_high (40%)"),
        ("[backpressure]\nhold = '4s'", "2: backpressure.hold: 4s must not be more than within (3s)"),
        ("[backpressure]\nwithin = '1s'", "2: backpressure.within: 1s must not be less than hold (2s)"),
        ("[backpressure]\nprobe_max = '10s'", "2: backpressure.probe_max: 10s must not be less than probe_min (30s)"),
        ("[power]\nbudget = '3kW'\npanel = '9kW'", "3: power.panel: contradicts budget; keep one of the two"),
        ("[power]\npanel = '9kW'", "2: power.panel: says nothing without budget_fraction, the share of it to use"),
        ("[power]\nbudget_fraction = '9%'", "2: power.budget_fraction: says nothing without panel, the rating it is a share of"),
    ],
)  # fmt: skip
def test_a_problem_is_told_once_with_its_line_and_its_remedy(text: str, told: str) -> None:
    assert problems(text) == [told]


@pytest.mark.parametrize(
    "text",
    [
        "[backpressure]\nhold = '3s'\nprobe_min = '10min'",  # Equal is in order.
        "[power]\nbudget = '3kW'",
        "[enforce]\nfamilies = []",
        "[levels.L3]\nhours = ['23:00-06:00', 'sat,sun 00:00-24:00']\noff_hours_share = '30%'",
        "[[mps.groups]]\nname = 'a'\nown = true\ngpus = ['GPU-1']",
        "[[run.allow]]\ngroup = 'ml'\nsla = ['L2', 'L3']",
        tenant(levers='["cpu_max", "terminate"]', hours='["22:00-05:00"]'),
        tenant(latency_from='{ url = "http://[::1]:8000/metrics", metric = "vllm:x_seconds" }'),
        "[api]\nmetrics_listen = ''",
        tenant(sla='"L1"'),
        tenant(sla='"L1"', hold_back="false"),
        tenant() + "\n" + tenant(name='"A"', match='{ user = "b" }'),
        tenant(notice_command='["logger", "a/b"]'),
        tenant(host_memory_max='"1MiB"'),
        "[run]\ndevices = ['/dev/fuse', 'char-infiniband_verbs', 'block-*']",
        "tenants = []",
    ],
)
def test_what_is_right_is_no_problem(text: str) -> None:
    assert parse(text, source="f").mode == "observe"


def test_every_form_of_a_text_is_told_in_words() -> None:
    def quantities(kind: inspect.Type) -> set[str]:
        inner, quantity = unwrapped(kind)
        if isinstance(inner, inspect.StructType):
            return {q for f in inner.fields for q in quantities(f.type)}
        if isinstance(inner, inspect.VarTupleType):
            return quantities(inner.item_type)
        return {quantity} if isinstance(inner, inspect.StrType) and inner.pattern else set()

    assert quantities(SCHEMA) == set(FORMS)


@pytest.mark.parametrize("size", [4096, 100_000])
def test_texts_without_end_are_refused_and_not_repeated(size: int) -> None:
    long = "/" + "x" * size
    (told,) = problems(f"[paths]\ncgroup_root = '{long}'")
    assert told.endswith("is longer than 4095 characters")
    assert len(told) < 200
    (told,) = problems(tenant(match=f"{{ unit = '{long}' }}"))
    assert told.endswith("is longer than 1024 characters")


def test_a_socket_path_has_the_length_that_the_kernel_takes() -> None:
    longest = "/" + "é" * 50
    assert parse(f"paths.socket = '{longest}'", source="f").paths.socket == longest
    (told,) = problems(f"paths.socket = '{longest}x'")
    assert told.endswith("is longer than 101 bytes, the most a socket can have")


def test_all_problems_are_told_at_once_in_the_order_of_the_lines() -> None:
    text = """\
[power]
budget = "lots"
[api]
metrics_listen = "x"
[[tenants]]
name = "a"
[[tenants]]
name = "a"
sla = "L4"
[backpressure]
hold = "1m"
"""
    told = [problem.rsplit(": ", 1)[0] for problem in problems(text)]
    assert told == [
        "2: power.budget",
        "4: api.metrics_listen",
        "5: tenants[0].sla",
        "5: tenants[0].match",
        "7: tenants[1].match",
        "8: tenants[1].name",
        "9: tenants[1].sla",
        "11: backpressure.hold",
    ]


def test_a_junk_file_does_not_drown_the_log() -> None:
    told = problems("\n".join(f"k{i} = {i}" for i in range(20_000)))
    assert len(told) == 101
    assert told[0] == "1: k0: unknown key"
    assert told[-1].endswith("19900 more problems are not shown")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a = 1\nb =\n", "2: not valid TOML at column 4: Invalid value; text is written in quotes"),
        ("mode = observe", "1: not valid TOML at column 8: Invalid value; text is written in quotes"),
        ("\ntick = 1s", '2: not valid TOML at column 9: Expected newline or end of document after a statement; a value with a unit is written in quotes: "250W"'),
        ("tick = '1s'\ntick = '2s'", "2: not valid TOML at column 12: Cannot overwrite a value; this key is given twice"),
        ("[log]\n[api]\n[log]", "3: not valid TOML at column 5: Cannot declare ('log',) twice; this table is given twice"),
        ('mode = "obs\n', "1: not valid TOML at column 12: Illegal character '\\n'; the text has no closing quote on its line"),
        ("a = 1\n\x00", "2: not valid TOML at column 1: Invalid statement"),
    ],
)  # fmt: skip
def test_a_syntax_error_is_told_with_its_line(text: str, told: str) -> None:
    assert problems(text) == [told]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a = " + "9" * 5000, "a number has too many digits"),
        ("a = " + "[" * 5000, "nested too deeply"),
        ("a." * 5000 + "a = 1", "nested too deeply"),
    ],
)
def test_what_breaks_the_reader_itself_is_a_problem_too(text: str, told: str) -> None:
    (problem,) = problems(text)
    assert problem.endswith(told)


_SETTING = re.compile(r"([a-z_]+) = (.*)")
_SPOILERS: list[Callable[[re.Match[str]], str]] = [
    lambda setting: f"{setting[1]} = [[]]",
    lambda setting: f"{setting[1]} = 1979-05-27",
    lambda setting: f"{setting[1]}_x = {setting[2]}",
    lambda setting: f'"{setting[1]} " = {setting[2]}',
    lambda setting: f"{setting[1]} = {{ a.b = [\n'''\n'''] }}",
]
_NOISE = ["", "# x = 1", "  # [power]", "\t"]


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_every_spoilt_line_and_no_other_is_told(data: st.DataObject) -> None:
    """Takes the reference file, spoils some settings, and knows on which lines they end up."""
    original = reference().splitlines()
    whole = [i for i, line in enumerate(original) if _SETTING.fullmatch(line)]
    spoilt = data.draw(st.sets(st.sampled_from(whole), min_size=1, max_size=6))
    text, expected = "", []
    for index, line in enumerate(original):
        text += data.draw(st.sampled_from(_NOISE)) + "\n" if index % 9 == 0 else ""
        setting = _SETTING.fullmatch(line)
        if setting and index in spoilt:
            expected.append(1 + text.count("\n"))
            line = data.draw(st.sampled_from(_SPOILERS))(setting)
        text += line + "\n"
    assert [int(problem.split(":")[0]) for problem in problems(text)] == expected
