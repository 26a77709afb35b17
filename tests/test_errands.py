"""What each command does, and what its sender is told."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import MemberDescriptorType

import pytest

from gpuagent.errands import Errands
from gpuagent.errors import AgentError, ConfigError, Gone, Refused, Unavailable, Unsupported
from gpuagent.keptfile import Disk
from gpuagent.leases import Leases
from gpuagent.model.inventory import on_cgroup
from gpuagent.model.plan import (
    Command,
    IssueToken,
    Pause,
    Posture,
    ReleaseGpus,
    Reload,
    ResumeGpus,
    RevokeToken,
    Snapshot,
    Unpause,
)
from gpuagent.model.state import Instant, NodeState, Outcome
from gpuagent.model.token import digest, spelled
from gpuagent.model.vocab import CPU_MAX
from gpuagent.starts import PauseMark
from gpuagent.tokens import TokenBook
from tests.act.host import Clock
from tests.fakes.host import FakeGpus
from tests.tokens import token


class Desk:
    """Errands with what they work on."""

    def __init__(self, folder: Path, tokens: TokenBook | None = None) -> None:
        self.folder = folder
        self.posture = Posture(mode="enforce")
        self.gpus = FakeGpus(Clock())
        self.mark = PauseMark(str(folder))
        self.leases = Leases(str(folder), boot="b1", clock=Clock())
        self.woken: list[str] = []
        self.reloads: list[str] = []
        self.reload_fails: Exception | None = None
        self.told: list[tuple[str, str]] = []
        self.picture: Snapshot | None = Snapshot(NodeState(Instant(0, 0)), self.posture)
        self.gate: asyncio.Event | None = None
        self.errands = Errands(
            gpus=self.gpus,
            mark=self.mark,
            tokens=tokens,
            leases=self.leases,
            reload=self._reload,
            wake=self.woken.append,
            posture=lambda: self.posture,
            take=self._take,
            shown=self._shown,
            tell=lambda kind, text: self.told.append((kind, text)),
        )
        self.task = asyncio.create_task(self.errands.run())

    def give(self, command: Command) -> "asyncio.Future[str]":
        """As the loop does in its tick."""
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.errands.obey((command, answer))
        return answer

    def paused(self) -> bool:
        return self.posture.paused

    async def do(self, command: Command) -> str:
        return await asyncio.wait_for(self.give(command), 30)

    def _take(self, posture: Posture) -> None:
        self.posture = posture

    async def _shown(self) -> Snapshot | None:
        return self.picture

    async def _reload(self, by: str) -> str:
        self.reloads.append(by)
        if self.gate is not None:
            await self.gate.wait()
        if self.reload_fails is not None:
            raise self.reload_fails
        return "configuration is in force"


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    one = Desk(tmp_path)
    await asyncio.sleep(0)
    yield one
    one.task.cancel()
    await asyncio.gather(one.task, return_exceptions=True)


async def test_pause_is_in_force_before_anything_else_happens(desk: Desk) -> None:
    answer = desk.give(Pause("uid 0"))
    assert desk.paused(), "the very tick that drains the inbox must not write any more"
    assert not desk.posture.acts
    assert "paused" in await answer
    assert desk.mark.read() == "uid 0"
    assert desk.woken == ["a command is done"]


async def test_pause_says_what_is_still_to_be_put_back(desk: Desk) -> None:
    assert "everything is put back" in await desk.do(Pause("uid 0"))
    subject = on_cgroup("train", "/train", 1)
    held = Outcome(CPU_MAX, subject, None, 0.5, float("inf"), "in flight", "", 0)
    desk.picture = Snapshot(
        NodeState(Instant(0, 0)), desk.posture, outcomes={(CPU_MAX, subject): held}
    )
    assert "1 settings are being put back" in await desk.do(Pause("uid 0"))
    desk.picture = None
    assert "look again" in await desk.do(Pause("uid 0"))


async def test_pause_outlives_the_run_and_unpause_ends_it(desk: Desk) -> None:
    await desk.do(Pause("uid 0"))
    assert PauseMark(str(desk.folder)).read() == "uid 0"
    assert "enforce" in await desk.do(Unpause("uid 0"))
    assert not desk.paused()
    assert PauseMark(str(desk.folder)).read() is None


async def test_the_later_of_pause_and_unpause_counts(desk: Desk) -> None:
    await desk.do(Pause("a"))
    await asyncio.gather(desk.give(Unpause("b")), desk.give(Pause("c")))
    assert desk.paused()
    assert desk.mark.read() == "c"
    await asyncio.gather(desk.give(Pause("d")), desk.give(Unpause("e")))
    assert not desk.paused()
    assert desk.mark.read() is None


async def test_a_pause_that_cannot_be_kept_is_in_force_and_says_so(desk: Desk) -> None:
    desk.folder.rmdir()
    with pytest.raises(Unavailable, match="a restart will not remember it"):
        await desk.do(Pause("uid 0"))
    assert desk.paused()
    desk.folder.mkdir()


async def test_a_disk_that_hangs_delays_no_pause_and_is_said(desk: Desk) -> None:
    answers = threading.Event()
    desk.errands._disk = Disk(seconds=0.02)
    desk.mark = HungMark(str(desk.folder), answers)
    desk.errands._mark = desk.mark
    for _ in range(2):
        with pytest.raises(
            Unavailable, match="paused, but a restart may not remember it: the disk"
        ):
            await desk.do(Pause("uid 0"))
        assert desk.paused()
    answers.set()


class HungMark(PauseMark):
    """One on a disk that does not answer yet."""

    def __init__(self, folder: str, answers: threading.Event) -> None:
        super().__init__(folder)
        self._answers = answers

    def set(self, by: str) -> None:
        self._answers.wait(30)
        super().set(by)


async def test_an_unpause_that_cannot_be_kept_is_not_in_force(desk: Desk) -> None:
    await desk.do(Pause("uid 0"))
    (desk.folder / "paused").unlink()
    (desk.folder / "paused").mkdir()
    with pytest.raises(Unavailable, match="cannot remove"):
        await desk.do(Unpause("uid 0"))
    assert desk.paused()


async def test_reload_tells_what_it_was_told(desk: Desk) -> None:
    assert await desk.do(Reload("SIGHUP")) == "configuration is in force"
    assert desk.reloads == ["SIGHUP"]
    desk.reload_fails = ConfigError(["gpuagent.toml:3: mode: no", "gpuagent.toml:4: tick: no"])
    with pytest.raises(ConfigError, match=r"gpuagent.toml:4"):
        await desk.do(Reload("SIGHUP"))


async def test_release_and_resume(desk: Desk) -> None:
    assert "resume" in await desk.do(ReleaseGpus("a"))
    assert (desk.gpus.released, desk.posture.released) == (True, True)
    await desk.do(ResumeGpus("a"))
    assert (desk.gpus.released, desk.posture.released) == (False, False)


async def test_a_release_that_fails_says_so_and_can_be_resumed(desk: Desk) -> None:
    desk.gpus.fails = Unavailable("process 7 hangs in a driver call and keeps its handles open")
    with pytest.raises(Unavailable, match="process 7"):
        await desk.do(ReleaseGpus("a"))
    assert desk.posture.released, "it has let go of what it could, and reads no more"
    with pytest.raises(Unavailable):
        await desk.do(ResumeGpus("a"))
    assert desk.posture.released
    desk.gpus.fails = None
    await desk.do(ResumeGpus("a"))
    assert not desk.posture.released


async def test_a_slow_errand_holds_up_no_other(desk: Desk) -> None:
    desk.gate = asyncio.Event()
    slow = desk.give(Reload("a"))
    assert "paused" in await desk.do(Pause("b"))
    assert not slow.done()
    desk.gate.set()
    assert await slow == "configuration is in force"


@pytest.mark.parametrize("fails", [None, Refused("no")])
async def test_a_sender_who_has_gone_disturbs_nothing(desk: Desk, fails: AgentError | None) -> None:
    desk.gate, desk.reload_fails = asyncio.Event(), fails
    answer = desk.give(Reload("a"))
    await asyncio.sleep(0)
    answer.cancel()
    desk.gate.set()
    desk.reload_fails = None
    assert await desk.do(Reload("b")) == "configuration is in force"
    assert desk.reloads == ["a", "b"]


async def test_before_and_after_the_run_it_says_so_but_a_pause_is_in_force(tmp_path: Path) -> None:
    one = Desk(tmp_path)
    with pytest.raises(Unavailable, match="starting or stopping"):
        await one.give(Unpause("early"))
    await asyncio.sleep(0)
    one.gate = asyncio.Event()
    begun, fresh = one.give(Reload("a")), one.give(Reload("b"))
    await asyncio.sleep(0)
    fresh = one.give(Reload("not begun"))
    one.task.cancel()
    await asyncio.gather(one.task, return_exceptions=True)
    late = one.give(Pause("late"))
    for answer in (begun, fresh, late):
        with pytest.raises(Unavailable, match="starting or stopping"):
            await asyncio.wait_for(answer, 30)
    assert one.paused()


async def test_a_bug_ends_the_run_and_leaves_nobody_waiting(tmp_path: Path) -> None:
    one = Desk(tmp_path)
    await asyncio.sleep(0)
    one.reload_fails = ZeroDivisionError("bug")
    answer = one.give(Reload("a"))
    with pytest.raises(ExceptionGroup) as failure:
        await asyncio.wait_for(one.task, 30)
    assert failure.group_contains(ZeroDivisionError)
    with pytest.raises(Unavailable):
        await answer


def test_every_command_says_who_asked() -> None:
    assert {c.__struct_config__.tag for c in Command.__args__} == {
        "pause",
        "unpause",
        "reload",
        "release",
        "resume",
        "set-override",
        "start-run",
        "drop-override",
        "issue-token",
        "revoke-token",
    }
    assert all(isinstance(vars(c)["by"], property | MemberDescriptorType) for c in Command.__args__)


async def test_tokens_are_the_books_business(tmp_path: Path) -> None:
    clock = Clock()
    book = TokenBook(str(tmp_path), clock)
    desk = Desk(tmp_path, tokens=book)
    await asyncio.sleep(0)
    text = spelled("0badcafe", b"1" * 32)
    issue = IssueToken("user 0", token("0badcafe", clock), digest(text))
    assert "valid" in await desk.do(issue)
    assert book.known(text) is not None
    assert "revoked" in await desk.do(RevokeToken("user 0", "0badcafe"))
    assert book.known(text) is None
    (issued, revoked) = desk.told
    assert issued[0] == "token-issued"
    assert all(word in issued[1] for word in ("0badcafe", "user 0", "scopes read", "UTC"))
    assert revoked == ("token-revoked", "token 0badcafe is revoked by user 0")
    assert not any(secret in str(desk.told) for secret in (text, text[-20:], digest(text)))
    with pytest.raises(Gone):
        await desk.do(RevokeToken("user 0", "0badcafe"))
    desk.task.cancel()
    await asyncio.gather(desk.task, return_exceptions=True)


async def test_a_run_without_a_book_says_so(desk: Desk) -> None:
    with pytest.raises(Unsupported, match="keeps no tokens"):
        await desk.do(RevokeToken("user 0", "0badcafe"))
