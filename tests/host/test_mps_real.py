"""The adapter in front of the real control daemons, and the stand-in beside them."""

import asyncio
import os

import pytest

from gpuagent import config
from gpuagent.errors import Gone, Refused, Unsupported
from gpuagent.host.mps import MpsDaemons
from gpuagent.host.mps_control import Control
from gpuagent.host.mps_keeper import MARK, Detached
from tests.fakes.mps import VERSIONS, Program, carries, fake, real
from tests.host.mps_rig import Programs, programs

__all__ = ["programs"]
GIB = 1024**3
versions = pytest.mark.parametrize("version", VERSIONS)

COMMON = (
    "get_default_active_thread_percentage",
    "set_default_active_thread_percentage 50",
    "set_default_active_thread_percentage 33.333333",
    "set_default_active_thread_percentage 0",
    "set_default_active_thread_percentage 101",
    "set_default_active_thread_percentage abc",
    "set_default_active_thread_percentage",
    "get_default_active_thread_percentage",
    "get_default_device_pinned_mem_limit 0",
    "set_default_device_pinned_mem_limit 0 2G",
    "get_default_device_pinned_mem_limit 0",
    "set_default_device_pinned_mem_limit 0 1536M",
    "get_default_device_pinned_mem_limit 0",
    "set_default_device_pinned_mem_limit 1 2T",
    "get_default_device_pinned_mem_limit 1",
    "set_default_device_pinned_mem_limit 1 2.5G",
    "get_default_device_pinned_mem_limit 1",
    "set_default_device_pinned_mem_limit GPU-aaaa 1G",
    "get_default_device_pinned_mem_limit 0",
    "get_default_device_pinned_mem_limit 32",
    "get_default_client_priority",
    "set_default_client_priority 2",
    "set_default_client_priority 1",
    "get_default_client_priority",
    "get_server_list",
    "get_server_status 1",
    "get_client_list 1",
    "set_active_thread_percentage 1 50",
    "get_active_thread_percentage 1",
    "shutdown_server 1",
    "terminate_client 1 1",
    "start_server",
    "lspart",
    "help",
    "",
)
WITH_A_SERVER = (
    "get_server_status {}",
    "get_client_list {}",
    "get_active_thread_percentage {}",
    "set_active_thread_percentage {} 40",
    "get_active_thread_percentage {}",
    "start_server -uid 1000",
)


async def said(program: Program, *commands: str) -> list[tuple[str, str]]:
    return [(command, await program.say(command)) for command in commands]


@versions
async def test_the_stand_in_answers_as_the_real_one(version: str, programs: Programs) -> None:
    true = programs.take(real(version, programs.folder / "r"))
    stand_in = programs.take(
        fake(programs.folder / "f", FAKE_MPS_VERSION=version, FAKE_MPS_SERVER="hangs")
    )
    await asyncio.gather(true.start(), stand_in.start())
    answers = await asyncio.gather(said(stand_in, *COMMON), said(true, *COMMON))
    assert answers[0] == answers[1]
    texts = []
    for program in (true, stand_in):
        assert await program.say("start_server -uid 0") == ""
        server = (await program.say("get_server_list")).strip()
        asked = [await program.say(command.format(server)) for command in WITH_A_SERVER]
        texts.append([text.replace(server, "PID") for text in asked])
    assert texts[0] == texts[1]


@versions
async def test_an_idle_daemon_is_read_and_set(version: str, programs: Programs) -> None:
    program = programs.take(real(version, programs.folder))
    await program.start()
    mps = _daemons(program)
    (told,) = await mps.daemons()
    assert (told.up, told.why, told.servers, told.clients) == (True, "", (), ())
    assert told.default_threads_ratio == 1.0
    await mps.set_default_threads("g", 0.505)
    assert await mps.default_threads("g") == pytest.approx(0.505)
    control = Control(program.path, program.pipes)
    await control.set_memory_limit(0, 2 * GIB)
    assert await control.memory_limit(0) == 2 * GIB
    assert await control.memory_limit(1) is None
    assert await mps.terminate_client(1) is False


@versions
async def test_a_server_that_comes_up_is_seen(version: str, programs: Programs) -> None:
    program = programs.take(real(version, programs.folder))
    await program.start()
    assert await program.say("start_server -uid 0") == ""
    (told,) = await _daemons(program).daemons()
    (server,) = told.servers
    assert server.state == ("" if version == "535" else "INITIALIZING")
    assert server.threads_ratio is None
    assert told.clients == ()
    if version == "550":
        await program.say(f"shutdown_server {server.pid}")
        (told,) = await _daemons(program).daemons()
        assert told.servers[0].state == "FAULT"  # as it says of one that takes no more clients


@versions
async def test_the_state_of_a_server_is_asked_for_where_it_can_be(
    version: str, programs: Programs
) -> None:
    program = programs.take(real(version, programs.folder))
    await program.start()
    control = Control(program.path, program.pipes)
    expected = Unsupported if version == "535" else Gone
    for _ in range(2):
        with pytest.raises(expected):
            await control.state(1)
    await control.servers()  # by now what came before is in the log
    asked = (programs.folder / "l" / "control.log").read_text().count("get_server_status")
    # The second time 535 is not asked at all, but for the answer that the log repeats.
    assert asked == 2


@versions
async def test_a_daemon_whose_server_dies_is_taken_down_again(
    version: str, programs: Programs
) -> None:
    """There are no cards here: the real server ends at once."""
    program = programs.take(real(version, programs.folder, server=False))
    mps = _daemons(program, own=True)
    with pytest.raises(Unsupported, match="every client would fail; it has been taken down"):
        await mps.start("g")
    assert await mps.running("g") is False
    await program.gone()


@versions
async def test_a_daemon_of_our_own_outlives_us_and_ends_without_clients(
    version: str, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = programs.take(real(version, programs.folder))
    monkeypatch.setenv("PATH", f"{programs.folder}/bin:{os.environ['PATH']}")
    mps = _daemons(program, own=True)
    if version == "550":  # a server that stays INITIALIZING is none
        mps._daemons["g"].own._proof = 0.3
        with pytest.raises(Unsupported, match=r"not ready after 0.3 s; it has been taken down"):
            await mps.start("g")
        await program.gone()
        return
    await mps.start("g")
    assert await mps.running("g") is True
    (pid, *_) = program.processes()
    assert os.getsid(pid) != os.getsid(0)
    assert carries(pid, f"{MARK}=g")


async def test_no_daemon_is_no_failure(programs: Programs) -> None:
    program = programs.take(real("550", programs.folder))
    mps = _daemons(program)
    (told,) = await mps.daemons()
    assert (told.up, told.why) == (False, f"no MPS control daemon runs in {program.pipes}")
    with pytest.raises(Gone):
        await mps.default_threads("g")
    # One that was killed leaves its socket behind.
    await program.start()
    await program.end()
    assert (programs.folder / "p" / "control").exists()
    (told,) = await mps.daemons()
    assert (told.up, told.why) == (False, f"no MPS control daemon runs in {program.pipes}")


async def test_another_users_set_is_refused(programs: Programs) -> None:
    """What a daemon answers to somebody without the right is no value."""
    if os.geteuid() != 0:
        pytest.skip("needs root to be somebody else")
    program = programs.take(real("550", programs.folder))
    await program.start()
    programs.folder.chmod(0o755)
    told = await asyncio.create_subprocess_exec(
        "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", program.path,
        env={"CUDA_MPS_PIPE_DIRECTORY": program.pipes},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await told.communicate(b"set_default_active_thread_percentage 10\n")
    assert out.startswith(b"Insufficient privileges for UID 65534")
    assert await _daemons(program).default_threads("g") == 1.0


def _daemons(program: Program, *, own: bool = False) -> MpsDaemons:
    group = config.MpsGroup("g", pipe_directory=program.pipes, own=own, gpus=("GPU-1",))
    return MpsDaemons(
        config.Mps(control=program.path, groups=(group,)),
        kept_by=lambda path: Detached(path, logs=program.logs),
    )


async def test_a_path_that_is_too_long_is_refused() -> None:
    folder = "/tmp/" + "x" * 90
    group = config.MpsGroup("g", pipe_directory=folder)
    (told,) = await MpsDaemons(config.Mps(groups=(group,))).daemons()
    assert "longer than 100 bytes" in told.why
    with pytest.raises(Refused):
        await Control("nvidia-cuda-mps-control", folder).servers()
