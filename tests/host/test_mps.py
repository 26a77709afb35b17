"""The adapter where there are servers with clients and faults, and daemons of our own."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from gpuagent import config
from gpuagent.errors import Gone, Refused, Unavailable, Unsupported
from gpuagent.host.mps import LOG_FOLDER, UNIT_FOLDER, MpsDaemons
from gpuagent.host.mps_control import Control
from gpuagent.host.mps_keeper import Detached, Unit, environment_file, settings
from gpuagent.model.inventory import MpsClient
from tests.fakes.mps import Program, carries, fake
from tests.host.mps_rig import Programs, programs

__all__ = ["programs"]


def daemons(
    program: Program, *, own: bool = False, proc: str = "/proc", default: float | None = None
) -> MpsDaemons:
    group = config.MpsGroup(
        "g", pipe_directory=program.pipes, own=own, gpus=("GPU-1",), default_threads=default
    )
    return MpsDaemons(
        config.Mps(control=program.path, groups=(group,)),
        kept_by=lambda path: Detached(path, logs=program.logs),
        proc=proc,
    )


def put(proc: Path, pid: int, environ: str, started: int = 5) -> None:
    folder = proc / str(pid)
    folder.mkdir(exist_ok=True)
    (folder / "environ").write_bytes(environ.encode())
    (folder / "stat").write_text(f"{pid} (a b) c) S " + "0 " * 18 + f"{started} 0 0\n")


async def test_clients_and_what_they_started_with(programs: Programs, tmp_path: Path) -> None:
    program = programs.take(fake(programs.folder))
    await program.start()
    for command in ("fake_server 7 ACTIVE", "fake_client 7 70", "fake_client 7 71"):
        await program.say(command)
    await program.say("set_active_thread_percentage 7 60")
    put(tmp_path, 70, "A=1\0CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25\0B=2\0")
    put(tmp_path, 71, "HOME=/\0")
    mps = daemons(program, proc=str(tmp_path))
    (told,) = await mps.daemons()
    assert told.servers[0].state == "ACTIVE"
    assert told.clients == (MpsClient(70, 7, 0.25), MpsClient(71, 7, 0.6))
    # What is set later changes no running client; whoever has its number later is another.
    await program.say("set_active_thread_percentage 7 10")
    put(tmp_path, 71, "HOME=/\0", started=6)
    await program.say("fake_client 7 72")
    (told,) = await mps.daemons()
    assert told.clients == (MpsClient(70, 7, 0.25), MpsClient(71, 7, 0.1), MpsClient(72, 7))


@pytest.mark.parametrize("percent", ["0", "-3", "101", "x", "nan", ""])
async def test_what_a_client_made_of_nonsense_is_not_known(
    percent: str, programs: Programs, tmp_path: Path
) -> None:
    program = programs.take(fake(programs.folder))
    await program.start()
    for command in ("fake_server 7 ACTIVE", "fake_client 7 70"):
        await program.say(command)
    put(tmp_path, 70, f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={percent}\0")
    (told,) = await daemons(program, proc=str(tmp_path)).daemons()
    assert told.clients == (MpsClient(70, 7, None),)


async def test_a_client_is_ended_and_seen_gone(programs: Programs) -> None:
    program = programs.take(fake(programs.folder))
    await program.start()
    for command in ("fake_server 7 ACTIVE", "fake_client 7 70", "fake_client 7 71"):
        await program.say(command)
    mps = daemons(program)
    assert await mps.terminate_client(70) is True
    assert await mps.terminate_client(70) is False
    (told,) = await mps.daemons()
    assert [c.pid for c in told.clients] == [71]


async def test_a_client_that_stays_is_not_said_to_be_gone(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuagent.host.mps._TERMINATE_TRIES", 2)
    program = programs.take(fake(programs.folder))
    await program.start()
    for command in ("fake_server 7 ACTIVE", "fake_client 7 70", "fake_stubborn 70"):
        await program.say(command)
    with pytest.raises(Unavailable, match="still a client"):
        await daemons(program).terminate_client(70)


async def test_a_set_that_is_not_taken_is_refused(programs: Programs) -> None:
    program = programs.take(fake(programs.folder, FAKE_MPS_KEEPS="80"))
    await program.start()
    with pytest.raises(Refused, match=r"keeps 80.0 % and takes no 50.0 %"):
        await daemons(program).set_default_threads("g", 0.5)


async def test_a_daemon_of_our_own(programs: Programs) -> None:
    program = programs.take(fake(programs.folder))
    mps = daemons(program, own=True)
    assert await mps.running("g") is False
    await mps.start("g")
    assert await mps.running("g") is True
    assert await program.say("get_server_list") == ""  # that which proved it has been ended
    (pid,) = program.processes()
    assert os.getsid(pid) not in {0, os.getsid(0)}
    assert carries(pid, "CUDA_VISIBLE_DEVICES=GPU-1")
    await mps.start("g")  # already there
    assert program.processes() == [pid]
    await program.say("fake_server 7 ACTIVE")
    await program.say("fake_client 7 70")
    with pytest.raises(Refused, match=r"1 clients \(pid 70\)"):
        await mps.stop("g")
    assert await mps.running("g") is True
    await program.say("fake_leave 70")
    await mps.stop("g")
    assert await mps.running("g") is False


@pytest.mark.parametrize(
    ("fate", "version"), [("dies", "535"), ("dies", "550"), ("fault", "550"), ("hangs", "550")]
)
async def test_a_daemon_that_does_not_work_is_not_left(
    fate: str, version: str, programs: Programs
) -> None:
    program = programs.take(fake(programs.folder))
    # A control program of its own environment: the agent hands on nothing.
    script = programs.folder / "bin" / "wrapped"
    script.write_text(
        f'#!/bin/sh\nFAKE_MPS_SERVER={fate} FAKE_MPS_VERSION={version} exec {program.path} "$@"\n'
    )
    script.chmod(0o755)
    program.path = str(script)
    mps = daemons(program, own=True)
    mps._daemons["g"].own._proof = 0.3
    with pytest.raises(Unsupported, match="taken down"):
        await mps.start("g")
    assert await mps.running("g") is False
    await program.gone()


async def test_what_is_not_ours_is_not_started(programs: Programs) -> None:
    mps = daemons(programs.take(fake(programs.folder)))
    with pytest.raises(Refused, match="not the agent's own"):
        await mps.start("g")
    with pytest.raises(Gone):
        await mps.running("other")


async def test_what_does_not_end_is_ended(programs: Programs) -> None:
    program = programs.take(fake(programs.folder))
    keeper = Detached(program.path, logs=program.logs)
    group = config.MpsGroup("g", pipe_directory=program.pipes, gpus=("GPU-1",))
    await keeper.begin(group)
    assert len(program.processes()) == 1
    await keeper.end(group)
    assert program.processes() == []


async def test_a_daemon_that_hangs_is_down_with_the_reason(programs: Programs) -> None:
    program = programs.folder / "control"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    (programs.folder / "p").mkdir()
    sock = await asyncio.start_unix_server(lambda *_: None, programs.folder / "p" / "control")
    control = Control(str(program), str(programs.folder / "p"), seconds=0.2)
    with pytest.raises(Unavailable, match=r"has not answered within 0.2 s"):
        await control.servers()
    sock.close()


@asynccontextmanager
async def stands_for(text: str, folder: Path) -> AsyncIterator[Control]:
    """A control program that does this, for a daemon that is only a socket."""
    program = folder / "control"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    (folder / "p").mkdir()
    sock = await asyncio.start_unix_server(lambda *_: None, folder / "p" / "control")
    yield Control(str(program), str(folder / "p"), seconds=0.5)
    sock.close()


@pytest.mark.parametrize("own", ["exec sleep 60", "exit 0"])
async def test_who_holds_the_pipe_of_a_control_program_holds_nobody_up(
    own: str, programs: Programs
) -> None:
    """Neither a grandchild that lives on, nor those who wait for the daemon after it."""
    note = programs.folder / "pid"
    script = f"echo 7; sleep 60 & echo $! > {note}; {own}"
    async with stands_for(script, programs.folder) as control, asyncio.timeout(20):
        for _ in range(2):
            if own == "exit 0":
                assert await control.servers() == (7,)
                os.kill(int(note.read_text()), signal.SIGKILL)
            else:
                with pytest.raises(Unavailable, match="not answered"):
                    await control.servers()


@pytest.mark.parametrize("script", ["exec yes 7", "yes 7 | head -c 100000"])
async def test_an_answer_without_end_is_none(script: str, programs: Programs) -> None:
    async with stands_for(script, programs.folder) as control, asyncio.timeout(20):
        with pytest.raises(Unavailable, match=r"answered within|without end"):
            await control.servers()


async def test_a_server_that_cannot_be_read_is_not_one_without_clients(programs: Programs) -> None:
    program = programs.take(fake(programs.folder))
    await program.start()
    for command in ("fake_server 7 ACTIVE", "fake_client 7 70", "fake_server 8 ACTIVE"):
        await program.say(command)
    (told,) = await daemons(program).daemons()
    assert (told.clients_known, len(told.clients)) == (True, 1)
    script = programs.folder / "bin" / "wrapped"
    script.write_text(
        '#!/bin/sh\nread -r line\ncase "$line" in *_list\\ 7) echo nonsense; exit 0;; esac\n'
        f'echo "$line" | exec {program.path}\n'
    )
    script.chmod(0o755)
    program.path = str(script)
    (told,) = await daemons(program).daemons()
    assert (told.up, told.clients_known, told.clients) == (True, False, ())
    assert "nonsense" in told.why
    await program.say("fake_leave 70")
    await program.say("quit")
    (told,) = await daemons(program).daemons()
    assert (told.up, told.clients_known) == (False, False)


async def test_a_daemon_of_somebody_else_is_not_asked(programs: Programs) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to make another's file")
    program = programs.take(fake(programs.folder))
    await program.start()
    os.chown(f"{program.pipes}/control", 1234, 1234)
    (told,) = await daemons(program).daemons()
    assert told.why == f"{program.pipes}/control belongs to user 1234: only root's MPS is asked"
    with pytest.raises(Refused):
        await daemons(program).set_default_threads("g", 0.5)
    assert not await daemons(program).terminate_client(70), "it keeps nobody from being ended"


async def test_a_program_that_is_not_there(programs: Programs) -> None:
    program = programs.take(fake(programs.folder))
    await program.start()
    program.path = "/nowhere/control"
    (told,) = await daemons(program).daemons()
    assert told.why.startswith("/nowhere/control is not there: ")
    with pytest.raises(Unsupported):
        await daemons(program).set_default_threads("g", 0.5)


async def test_what_is_configured_no_longer_can_still_be_put_back(programs: Programs) -> None:
    program = programs.take(fake(programs.folder))
    await program.start()
    mps = daemons(program)
    await mps.set_default_threads("g", 0.5)
    mps.reconfigure(config.Mps(control=program.path))
    assert list(await mps.daemons()) == []
    await mps.set_default_threads("g", 1.0)
    assert await mps.default_threads("g") == 1.0
    other = MpsDaemons(config.Mps(control=program.path))
    with pytest.raises(Gone):
        other.place("g")
    other.recall("g", program.pipes)
    assert (other.place("g"), await other.default_threads("g")) == (program.pipes, 1.0)


async def test_a_unit_is_started_with_its_environment(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(
        f'#!/bin/sh\necho "$@" >> {asked}\n[ "$2" = start ] || {{ echo "no such unit" >&2; exit 5; }}\n'
    )
    systemctl.chmod(0o755)
    unit = Unit("control", folder=str(tmp_path / "mps"), logs="/l", systemctl=str(systemctl))
    group = config.MpsGroup("g", pipe_directory='/a "b"', gpus=("GPU-1", "GPU-2"))
    await unit.begin(group)
    assert asked.read_text() == "--no-ask-password start gpuagent-mps@g.service\n"
    lines = (tmp_path / "mps" / "g.env").read_text().splitlines()
    assert 'CUDA_MPS_PIPE_DIRECTORY="/a \\"b\\""' in lines
    assert 'CUDA_VISIBLE_DEVICES="GPU-1,GPU-2"' in lines
    assert 'GPUAGENT_MPS_CONTROL="control"' in lines
    assert (tmp_path / "mps").stat().st_mode & 0o777 == 0o700
    with pytest.raises(Unavailable, match=r"systemctl stop .* fails: no such unit"):
        await unit.end(group)


async def test_a_unit_that_is_found_running_has_its_environment(programs: Programs) -> None:
    """Without it systemd could not tell the daemon to quit, and would kill it with its clients."""
    program = programs.take(fake(programs.folder))
    await program.start()
    file = programs.folder / "units" / "g.env"
    unit = Unit(program.path, folder=str(file.parent), logs="/l", systemctl="false")
    group = config.MpsGroup("g", pipe_directory=program.pipes, own=True, gpus=("GPU-1",))

    def known(*groups: config.MpsGroup) -> MpsDaemons:
        return MpsDaemons(
            config.Mps(control=program.path, groups=groups), kept_by=lambda _program: unit
        )

    # What is configured no longer is known too little of.
    other = known()
    other.recall("g", program.pipes)
    assert await other.running("g") is True
    assert await known(msgspec.structs.replace(group, own=False)).running("g") is True
    assert not file.exists()
    mps = known(group)
    assert await mps.running("g") is True
    wanted = environment_file(settings(group, program.path, "/l"))
    assert file.read_bytes() == wanted
    made = file.stat().st_ino
    assert await mps.running("g") is True
    assert file.stat().st_ino == made  # what is as it should be is left
    file.write_text("old")
    assert await mps.running("g") is True
    assert file.read_bytes() == wanted
    await program.say("quit")
    file.unlink()
    assert await mps.running("g") is False
    assert not file.exists()


def test_a_value_is_quoted_as_systemd_reads_it() -> None:
    assert environment_file({"B": "x", "A": 'a"b\\c$d`e'}) == b'A="a\\"b\\\\c\\$d\\`e"\nB="x"\n'


def test_the_unit_is_where_the_agent_looks_for_it() -> None:
    """What the template says in systemd's words is what is written and read here."""
    unit = Path(__file__).parents[2].joinpath("systemd/gpuagent-mps@.service").read_text()
    lines = unit.splitlines()
    assert f"EnvironmentFile={UNIT_FOLDER}/%i.env" in lines
    agent = Path(__file__).parents[2].joinpath("systemd/gpuagent.service").read_text().splitlines()
    # Not in a folder that goes when the agent stops, and one that it may write to.
    (goes,) = (x for x in agent if x.startswith("RuntimeDirectory="))
    folders = goes.partition("=")[2].split()
    assert not f"{UNIT_FOLDER}/".startswith(tuple(f"/run/{name}/" for name in folders))
    assert f"ExecStartPre=+/bin/mkdir -p -m 0700 {UNIT_FOLDER}" in agent
    (writes,) = (x for x in agent if x.startswith("ReadWritePaths="))
    assert f"-{UNIT_FOLDER}" in writes.split()
    assert f"LogsDirectory={LOG_FOLDER.removeprefix('/var/log/')}/%i" in lines
    group = config.MpsGroup("g", gpus=("GPU-1",))
    assert "GPUAGENT_MPS_CONTROL" in settings(group, "control", LOG_FOLDER)
    assert "ExecStart=/usr/bin/env ${GPUAGENT_MPS_CONTROL} -d" in lines
    # It must outlive the agent, and not come up unproven.
    assert "Restart=no" in lines
    assert not [x for x in lines if x.startswith(("BindsTo=", "PartOf=", "Requires="))]
