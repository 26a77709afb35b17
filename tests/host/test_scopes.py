"""Scopes: what systemd is asked for, and that the process is really in there, and the right one."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from dbus_fast import Message, Variant

from gpuagent.errors import AgentError, Gone, Refused, Unavailable, Unsupported
from gpuagent.host.bus import SystemBus
from gpuagent.host.scopes import CALL_SECONDS, SystemdScopes, properties
from gpuagent.ports import Scopes, ScopeWish
from tests.sense.fakes import OwnClock

WISH = ScopeWish(
    unit="gpuagent-run-100-7.scope",
    slice="gpuagent-tenants.slice",
    description="gpuagent run job (L3)",
    pid=100,
    started=7,
    uid=1000,
)
CGROUP = "/gpuagent.slice/gpuagent-tenants.slice/gpuagent-run-100-7.scope"


class Systemd(SystemBus):
    """Moves the process by writing where it is, as the kernel would show it."""

    def __init__(self, proc: Path, clock: OwnClock) -> None:
        super().__init__("unix:path=/nowhere", clock=clock)
        self.asked: list[list[Any]] = []
        self.fails: AgentError | None = None
        self.moves = True
        self._proc = proc

    async def ask(
        self,
        path: str,
        interface: str,
        member: str,
        signature: str = "",
        *body: Any,
        seconds: float | None = None,
    ) -> list[Any]:
        assert seconds == CALL_SECONDS
        assert (path, interface, member) == (
            "/org/freedesktop/systemd1",
            "org.freedesktop.systemd1.Manager",
            "StartTransientUnit",
        )
        # What the library cannot marshal it says here.
        Message(path=path, member=member, signature=signature, body=list(body), serial=1)._marshall(
            False
        )
        self.asked.append(list(body))
        if self.fails is not None:
            raise self.fails
        if self.moves:
            (self._proc / "100/cgroup").write_text(f"0::{CGROUP}\n")
        return ["/org/freedesktop/systemd1/job/1"]


class Host:
    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        (self.proc / "100").mkdir(parents=True)
        self.booted = folder / "systemd"
        self.booted.mkdir()
        self.clock = OwnClock()
        self.systemd = Systemd(self.proc, self.clock)
        self.scopes = SystemdScopes(
            self.systemd, clock=self.clock, booted=str(self.booted), proc=str(self.proc)
        )
        self.is_process()

    def is_process(self, *, started: int = 7, uids: str = "1000 1000 1000 1000") -> None:
        fields = " ".join(["S", "1", *["0"] * 17, str(started), "0"])
        (self.proc / "100/stat").write_text(f"100 (a) b) {fields}\n")
        (self.proc / "100/status").write_text(f"Name:\tx\nUid:\t{uids}\nGid:\t0 0 0 0\n")
        (self.proc / "100/cgroup").write_text("0::/user.slice/user-1000.slice/session-3.scope\n")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


async def test_it_is_in_its_scope_once_that_is_said(host: Host) -> None:
    assert await host.scopes.start(WISH) == CGROUP
    ((unit, mode, wanted, aux),) = host.systemd.asked
    assert (unit, mode, aux) == (WISH.unit, "fail", [])
    assert ["PIDs", Variant("au", [100])] in wanted
    assert ["Slice", Variant("s", "gpuagent-tenants.slice")] in wanted
    assert not {"DevicePolicy", "DeviceAllow", "CPUWeight", "MemoryMax"} & {n for n, _ in wanted}


async def test_what_is_asked_of_it_is_asked_of_systemd(host: Host) -> None:
    wish = msgspec.structs.replace(
        WISH, devices=("/dev/nvidia3", "char-pts"), cpu_weight=50, memory_max_bytes=1 << 34
    )
    await host.scopes.start(wish)
    found = {name: value for name, _, value in properties(wish)}
    assert found["DevicePolicy"] == "closed"
    assert found["DeviceAllow"] == [["/dev/nvidia3", "rw"], ["char-pts", "rw"]]
    assert (found["CPUWeight"], found["MemoryMax"]) == (50, 1 << 34)
    none = {n: v for n, _, v in properties(msgspec.structs.replace(WISH, devices=()))}
    assert (none["DevicePolicy"], none["DeviceAllow"]) == ("closed", [])


async def test_without_systemd_nothing_is_asked(host: Host) -> None:
    host.booted.rmdir()
    with pytest.raises(Unsupported, match="does not run systemd"):
        await host.scopes.start(WISH)
    assert host.systemd.asked == []


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"started": 8}, Gone),
        ({"uids": "1000 0 0 0"}, Refused),
        ({"uids": "0 0 0 0"}, Refused),
        ({"uids": ""}, Refused),
    ],
)
async def test_another_process_or_another_users_program_is_left_alone(
    host: Host, change: dict[str, Any], error: type[AgentError]
) -> None:
    host.is_process(**change)
    with pytest.raises(error):
        await host.scopes.start(WISH)
    assert host.systemd.asked == []


async def test_a_process_that_has_ended_is_gone(host: Host) -> None:
    for file in (host.proc / "100").iterdir():
        file.unlink()
    with pytest.raises(Gone):
        await host.scopes.start(WISH)
    (host.proc / "100/stat").write_text("100 no stat line")
    with pytest.raises(Gone):
        await host.scopes.start(WISH)


async def test_success_is_judged_by_where_it_is(host: Host) -> None:
    host.systemd.moves = False
    before = host.clock.mono
    with pytest.raises(Unavailable, match="has not moved process 100"):
        await host.scopes.start(WISH)
    assert host.clock.mono - before < 10


@pytest.mark.parametrize("error", [Unavailable("no bus"), Refused("masked")])
async def test_what_systemd_says_is_passed_on(host: Host, error: AgentError) -> None:
    host.systemd.fails = error
    with pytest.raises(type(error), match=str(error)):
        await host.scopes.start(WISH)


def _fits(scopes: SystemdScopes) -> Scopes:
    return scopes
