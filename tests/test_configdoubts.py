"""What a configuration hardly means: it is loaded, with a warning on the line in question."""

from pathlib import Path

import pytest

from gpuagent.configfile import load, parse
from tests.test_configschema import tenant

L1 = {"sla": '"L1"'}
VLLM = '{ url = "http://[::1]:8000/metrics", metric = "vllm:x_seconds" }'
SUMMARY = '{ url = "http://[::1]:8002/metrics", metric = "nv_inference_request_summary_us"'
LEVEL = "\n[levels.L3]\nhours = ['23:00-06:00']"


def warnings(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "f.toml"
    file.write_text(text)
    file.chmod(0o600)
    return [warning.removeprefix(f"{file}:") for warning in load(str(file)).warnings]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (tenant(**L1, levers='["cpu_max"]'), ["5: tenants[0].levers: L1 is never held back, so this does nothing"]),
        (tenant(**L1, notice_signal='"SIGUSR1"'), ["5: tenants[0].notice_signal: L1 is never held back, so this does nothing"]),
        (tenant(hold_back="false", hours='["23:00-06:00"]'), ["6: tenants[0].hours: does nothing while hold_back = false"]),
        (tenant(off_hours_share='"30%"'), ["5: tenants[0].off_hours_share: does nothing: neither the tenant nor [levels.L3] has hours"]),
        (tenant(levers='["mps"]') + LEVEL, ['5: tenants[0].levers: without "cpu_max" it is not held to the hours of [levels.L3]']),
        (tenant(**L1, latency_from=VLLM), ["5: tenants[0].latency_from: is read, but protects nothing without latency_slo"]),
        (tenant(latency_from=SUMMARY + " }"), ['5: tenants[0].latency_from.metric: nv_inference_request_summary_us counts in microseconds, it seems, and not in seconds; write unit = "microseconds"']),
        (tenant(latency_from=SUMMARY + ', unit = "milliseconds" }'), ['5: tenants[0].latency_from.unit: nv_inference_request_summary_us counts in microseconds, it seems, and not in milliseconds; write unit = "microseconds"']),
        (tenant(match='{ user = "*" }') + "\n" + tenant(name='"b"', match='{ user = "b", exe = "/x" }'), ["8: tenants[1].match: hardly ever counts: tenants[0] comes first and fits all it fits"]),
        (tenant(match='{ unit = "train-*" }') + "\n" + tenant(name='"b"', match='{ unit = "train-1.service" }'), ["8: tenants[1].match: hardly ever counts: tenants[0] comes first and fits all it fits"]),
    ],
)  # fmt: skip
def test_what_does_nothing_is_told_with_its_line(
    tmp_path: Path, text: str, told: list[str]
) -> None:
    assert warnings(tmp_path, text) == told
    assert parse(text, source="f").tenants


@pytest.mark.parametrize(
    "text",
    [
        "",
        tenant(levers='["cpu_max"]') + LEVEL,
        tenant() + LEVEL,
        tenant(levers='["mps"]', hours="[]") + LEVEL,
        tenant(off_hours_share='"30%"') + LEVEL,
        tenant(off_hours_share='"30%"', hours='["23:00-06:00"]'),
        tenant(latency_from=VLLM),
        tenant(**L1, latency_slo='"1s"', latency_from=VLLM),
        tenant(latency_from=SUMMARY + ', unit = "microseconds" }'),
        # The particular before the general; and a rule that names a place is asked first anyway.
        tenant(match='{ user = "b", exe = "/x" }') + "\n" + tenant(name='"b"', match='{ user = "*" }'),
        tenant(match='{ user = "*" }') + "\n" + tenant(name='"b"', match='{ unit = "x", user = "b" }'),
        tenant(match='{ unit = "a*" }') + "\n" + tenant(name='"b"', match='{ unit = "*" }'),
    ],
)  # fmt: skip
def test_what_is_meant_is_no_doubt(tmp_path: Path, text: str) -> None:
    assert warnings(tmp_path, text) == []
