"""host.nvidia_smi over the fake tool: what is set, what is read back, and what is not believed."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.errors import Gone, Refused, Unavailable, Unsupported
from gpuagent.host.nvidia_smi import SLICES, ComputePolicy, slice_in
from tests.fakes.nvidia_smi import FakeSmi

ONE, TWO = "GPU-00000000-1", "GPU-00000000-2"


@pytest.fixture
def smi(tmp_path: Path) -> FakeSmi:
    return FakeSmi(tmp_path, [ONE, TWO])


async def test_the_time_slice_is_read_and_set(smi: FakeSmi) -> None:
    policy = ComputePolicy(smi.program)
    assert await policy.get(ONE) == 0
    await policy.set(ONE, 3)
    assert dict(smi.slices) == {ONE: 3, TWO: 0}
    assert await policy.get(ONE) == 3
    await policy.set(ONE, 0)
    assert dict(smi.slices) == {ONE: 0, TWO: 0}
    smi.slices[TWO] = 2  # somebody else
    assert await policy.get(TWO) == 2


async def test_the_exit_code_says_nothing(smi: FakeSmi) -> None:
    policy = ComputePolicy(smi.program)
    smi.mode = "lies"
    with pytest.raises(Refused, match="stays default; nvidia-smi says: Timeslice config set"):
        await policy.set(ONE, 1)
    smi.mode = "fails"
    await policy.set(ONE, 1)
    assert smi.slices[ONE] == 1
    smi.mode = "denies"
    with pytest.raises(Refused, match="Insufficient Permissions"):
        await policy.set(ONE, 2)
    assert smi.slices[ONE] == 1


async def test_what_cannot_work_says_why(smi: FakeSmi, tmp_path: Path) -> None:
    policy = ComputePolicy(smi.program)
    with pytest.raises(Gone, match="No devices"):
        await policy.get("GPU-other")
    with pytest.raises(Unsupported, match="no card that nvidia-smi knows"):
        await policy.get("--help")
    smi.mode = "old"
    with pytest.raises(Unsupported, match="Unrecognized"):
        await policy.get(ONE)
    smi.mode = "babbles"
    with pytest.raises(Unsupported, match="not understood"):
        await policy.get(ONE)
    with pytest.raises(Refused, match="no time slice 4"):
        await policy.set(ONE, 4)
    with pytest.raises(Unsupported, match="comes with the NVIDIA driver"):
        await ComputePolicy(str(tmp_path / "none")).get(ONE)


async def test_a_tool_that_hangs_is_given_up(smi: FakeSmi) -> None:
    smi.mode = "hangs"
    policy = ComputePolicy(smi.program, seconds=0.3)
    with pytest.raises(Unavailable, match=r"within 0\.3 s"):
        await policy.set(ONE, 1)
    smi.mode = ""
    assert smi.slices[ONE] == 0
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("GPU 0: Timeslice: Default\n", 0),
        ("| GPU  | Time-slice |\n|  0   | MEDIUM     |\n", 2),
        ("default policies\nGPU 0 timeslice = long (3)\n", 3),
        ("Time slice\n  short\n", 1),
        ("short long", None),
        ("Timeslice: 1", None),
        ("longest shortage", None),
        ("", None),
    ],
)
def test_an_answer_is_understood_however_it_is_framed(text: str, found: int | None) -> None:
    assert slice_in(text) == found


@given(
    st.text() | st.lists(st.sampled_from([*SLICES, "timeslice", "GPU", "\n", ":"])).map(" ".join)
)
def test_any_answer_gives_a_slice_that_it_names_or_none(text: str) -> None:
    found = slice_in(text)
    assert found is None or SLICES[found] in text.lower()
