"""The book of overrides: it is bounded, ends on time, survives a restart, and believes no stranger's file."""

import asyncio
import json
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.errors import Gone, Refused, Unavailable
from gpuagent.keptfile import Disk, Hung
from gpuagent.leases import Leases
from gpuagent.model.inventory import Subject, on_gpu, on_tenant
from gpuagent.model.lease import MOST_LEASES, MOST_USED, TTL_MAX_SECONDS, Lease, Override, Used
from gpuagent.model.state import Instant


def waiting(answers: threading.Event) -> Callable[[], None]:
    """A call that hangs until the disk answers."""

    def call() -> None:
        answers.wait(30)

    return call


class Clock:
    """Both clocks as the test sets them."""

    def __init__(self) -> None:
        self.mono = 1000.0
        self.wall = 1_700_000_000.0

    def now(self) -> Instant:
        return Instant(self.mono, self.wall)

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        self.mono += seconds
        self.wall += seconds


def override(name: str = "quiet", *, on: Subject | None = None, ttl: float = 60.0) -> Override:
    subject = on_tenant("train") if on is None else on
    value = 0.5 if subject.tenant else 250.0
    return Override(name, subject, value, ttl, "user 0", "because")


def book(folder: Path | str, clock: Clock, boot: str = "b1") -> Leases:
    leases = Leases(str(folder), boot=boot, clock=clock)
    leases.begin()
    return leases


def names(leases: Leases, clock: Clock) -> list[str]:
    return [x.id for x in leases.active(clock.now())]


@asynccontextmanager
async def kept_up(leases: Leases) -> AsyncIterator[None]:
    task = asyncio.create_task(leases.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_it_is_in_force_until_its_time_is_over_and_again_after_a_kill(tmp_path: Path) -> None:
    clock = Clock()
    leases = book(tmp_path, clock)
    said = await leases.set(override())
    assert "quiet is in force until 2023-11-14 22:14:20 UTC" in said
    (lease,) = leases.active(clock.now())
    assert lease.until == 1060.0
    clock.advance(45)
    again = book(tmp_path, clock)
    resumed = msgspec.structs.replace(lease, resumed=True)
    assert again.active(clock.now()) == (resumed,), "nobody said goodbye, nothing is lost"
    clock.advance(14.9)
    assert names(again, clock) == ["quiet"]
    clock.advance(0.1)
    assert names(again, clock) == []


async def test_what_is_active_is_the_same_object_while_nothing_changes(tmp_path: Path) -> None:
    clock = Clock()
    leases = book(tmp_path, clock)
    await leases.set(override())
    first = leases.active(clock.now())
    clock.advance(1)
    assert leases.active(clock.now()) is first


@pytest.mark.parametrize("step", [-3e7, 3e7, 30.0])
async def test_a_wall_clock_that_steps_changes_no_end(tmp_path: Path, step: float) -> None:
    clock = Clock()
    leases = book(tmp_path, clock)
    await leases.set(override())
    clock.wall += step
    for one in (leases, book(tmp_path, clock)):
        assert names(one, clock) == ["quiet"]
    clock.advance(59.9)
    for one in (leases, book(tmp_path, clock)):
        assert names(one, clock) == ["quiet"]
    clock.advance(0.2)
    for one in (leases, book(tmp_path, clock)):
        assert names(one, clock) == []


async def test_after_another_boot_the_wall_clock_decides(tmp_path: Path) -> None:
    clock = Clock()
    leases = book(tmp_path, clock)
    await leases.set(override())
    clock.advance(20)
    clock.mono = 5.0
    booted = book(tmp_path, clock, "b2")
    (lease,) = booted.active(clock.now())
    assert lease.until == pytest.approx(45.0)


async def test_a_wall_clock_set_back_over_a_boot_makes_no_lease_longer_than_asked(
    tmp_path: Path,
) -> None:
    clock = Clock()
    leases = book(tmp_path, clock)
    await leases.set(override())
    clock.mono, clock.wall = 5.0, 0.0
    (lease,) = book(tmp_path, clock, "b2").active(clock.now())
    assert lease.until == 65.0
    assert lease.until_wall == 60.0


async def test_boots_that_are_not_known_are_never_the_same(tmp_path: Path) -> None:
    clock = Clock()
    leases = book(tmp_path, clock, "")
    await leases.set(override())
    clock.mono += 1000
    (lease,) = book(tmp_path, clock, "").active(clock.now())
    assert lease.until == clock.mono + 60


async def test_what_ended_while_nobody_ran_is_told_once(tmp_path: Path) -> None:
    clock = Clock()
    await book(tmp_path, clock).set(override())
    clock.advance(61)
    again = Leases(str(tmp_path), boot="b1", clock=clock)
    (event,) = again.begin()
    assert event.kind == "override-expired"
    assert "while the agent did not run" in event.text
    async with kept_up(again):
        await until_file(tmp_path, 0)
    assert Leases(str(tmp_path), boot="b1", clock=clock).begin() == ()


async def until_file(folder: Path, count: int) -> None:
    """Until the file has so many overrides."""
    for _ in range(4000):
        if len(json.loads((folder / "overrides.json").read_text())["leases"]) == count:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"the file has not come to {count} overrides")


async def test_what_has_ended_leaves_the_file(tmp_path: Path) -> None:
    clock = Clock()
    leases = book(tmp_path, clock)
    async with kept_up(leases):
        await leases.set(override())
        clock.advance(61)
        assert leases.active(clock.now()) == ()
        await until_file(tmp_path, 0)


async def test_the_end_of_one_is_written_again_until_the_disk_takes_it(tmp_path: Path) -> None:
    clock = Clock()
    leases = book(tmp_path, clock)
    async with kept_up(leases):
        await leases.set(override())
        block(tmp_path)
        clock.advance(61)
        assert leases.active(clock.now()) == ()
        began = clock.mono
        await until(lambda: clock.mono > began + 10)
        (tmp_path / "overrides.json.new").rmdir()
        await until_file(tmp_path, 0)


async def test_one_that_could_not_be_written_is_not_in_the_file_either(tmp_path: Path) -> None:
    """The write may have failed after the file was replaced."""
    clock = Clock()
    leases = book(tmp_path, clock)
    await leases.set(override())
    replaced = (tmp_path / "overrides.json").read_bytes()
    await leases.drop("quiet")
    block(tmp_path)
    with pytest.raises(Unavailable, match="would not remember"):
        await leases.set(override())
    (tmp_path / "overrides.json.new").rmdir()
    (tmp_path / "overrides.json").write_bytes(replaced)
    async with kept_up(leases):
        await until_file(tmp_path, 0)


async def test_one_that_was_dropped_on_a_full_disk_leaves_the_file_later(tmp_path: Path) -> None:
    leases = book(tmp_path, Clock())
    await leases.set(override())
    block(tmp_path)
    with pytest.raises(Unavailable, match="dropped, but"):
        await leases.drop("quiet")
    (tmp_path / "overrides.json.new").rmdir()
    async with kept_up(leases):
        await until_file(tmp_path, 0)


async def test_what_a_tenant_used_outlives_a_restart_but_no_boot(tmp_path: Path) -> None:
    clock = Clock()
    leases = book(tmp_path, clock)
    used = (Used("/train", 7, 2.5),)
    async with kept_up(leases):
        await leases.set(override())
        leases.learn({"quiet": used, "nobody": used})
        await until(lambda: b"2.5" in (tmp_path / "overrides.json").read_bytes())
    (lease,) = leases.active(clock.now())
    assert lease.used == (), "it is for the next run"
    (again,) = book(tmp_path, clock).active(clock.now())
    assert again.used == used
    (later,) = book(tmp_path, clock, boot="b2").active(clock.now())
    assert later.used == ()


async def test_what_was_used_never_makes_the_file_too_long_to_be_read(tmp_path: Path) -> None:
    clock = Clock()
    leases = book(tmp_path, clock)
    many = tuple(Used("/" + "x" * 4000, n, 1.0) for n in range(2 * MOST_USED))
    for n in range(8):
        await leases.set(override(f"n{n}", on=on_tenant(f"t{n}")))
    leases.learn({f"n{n}": many for n in range(8)})
    await leases.set(override("last", on=on_tenant("last")))
    assert len(names(book(tmp_path, clock), clock)) == 9


def block(folder: Path) -> None:
    """Nothing can be written until this is removed."""
    (folder / "overrides.json.new").mkdir()


async def until(so: Callable[[], bool]) -> None:
    for _ in range(4000):
        if so():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it has not come so far")


async def test_one_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    clock = Clock()
    leases = book(tmp_path, clock)
    await leases.set(override())
    clock.advance(30)
    await leases.set(override(on=on_gpu("GPU-1"), ttl=10))
    (lease,) = leases.active(clock.now())
    assert (lease.subject, lease.until) == (on_gpu("GPU-1"), clock.mono + 10)
    resumed = msgspec.structs.replace(lease, resumed=True)
    assert book(tmp_path, clock).active(clock.now()) == (resumed,)


async def test_a_second_one_on_the_same_tenant_is_refused(tmp_path: Path) -> None:
    clock = Clock()
    leases = book(tmp_path, clock)
    await leases.set(override())
    with pytest.raises(Refused, match="train has an override already: set quiet anew"):
        await leases.set(override("loud"))
    assert names(leases, clock) == ["quiet"]


async def test_there_are_never_more_than_so_many(tmp_path: Path) -> None:
    clock = Clock()
    leases = book(tmp_path, clock)
    for n in range(MOST_LEASES):
        await leases.set(override(f"n{n}", on=on_tenant(f"t{n}")))
    with pytest.raises(Refused, match="which is the most"):
        await leases.set(override("more", on=on_tenant("more")))
    await leases.set(override("n0", on=on_tenant("other")))
    assert len(book(tmp_path, clock).active(clock.now())) == MOST_LEASES


async def test_a_dropped_one_stays_dropped(tmp_path: Path) -> None:
    clock = Clock()
    leases = book(tmp_path, clock)
    await leases.set(override())
    assert await leases.drop("quiet") == "override quiet is dropped"
    assert names(leases, clock) == names(book(tmp_path, clock), clock) == []
    with pytest.raises(Gone, match="no override 'quiet'"):
        await leases.drop("quiet")


async def test_what_a_restart_would_not_remember_is_not_in_force(tmp_path: Path) -> None:
    clock = Clock()
    folder = tmp_path / "state"
    folder.mkdir()
    leases = book(folder, clock)
    await leases.set(override())
    (folder / "overrides.json.new").mkdir()  # nothing can be written in its place
    with pytest.raises(Unavailable, match="a restart would not remember it"):
        await leases.set(override("other", on=on_tenant("other")))
    assert names(leases, clock) == ["quiet"]
    with pytest.raises(Unavailable, match="dropped, but a restart may bring it back"):
        await leases.drop("quiet")
    assert names(leases, clock) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"id": "../x"}, "the name of an override"),
        ({"id": ""}, "the name of an override"),
        ({"ttl_seconds": 0.5}, "an override is for"),
        ({"ttl_seconds": TTL_MAX_SECONDS + 1}, "an override is for"),
        ({"ttl_seconds": float("nan")}, "an override is for"),
        ({"why": "  "}, "say why"),
        ({"why": "x" * 201}, "say why"),
        ({"why": "a\x1b[31mb"}, "without control characters"),
        ({"why": "two\nlines"}, "without control characters"),
        ({"by": "user 0\n"}, "without control characters"),
        ({"value": 0.04}, "a share is between"),
        ({"value": 1.01}, "a share is between"),
        ({"value": float("nan")}, "a share is between"),
        ({"subject": on_gpu("GPU-1"), "value": float("inf")}, "a power limit is"),
        ({"subject": on_gpu("GPU-1"), "value": -1.0}, "a power limit is"),
        ({"subject": on_tenant("")}, "on a tenant or on a card"),
    ],
)
async def test_what_makes_no_sense_is_refused(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    leases = book(tmp_path, Clock())
    with pytest.raises(Refused, match=words):
        await leases.set(msgspec.structs.replace(override(), **change))
    assert not (tmp_path / "overrides.json").exists()


async def test_a_name_that_is_not_utf8_is_kept(tmp_path: Path) -> None:
    clock = Clock()
    await book(tmp_path, clock).set(override(on=on_tenant("a\udcff\u202e")))
    (lease,) = book(tmp_path, clock).active(clock.now())
    assert lease.subject.tenant == "a\udcff\u202e"


async def test_a_second_drop_writes_again_until_the_file_agrees(tmp_path: Path) -> None:
    clock = Clock()
    leases = book(tmp_path, clock)
    await leases.set(override())
    block(tmp_path)
    for _ in range(2):
        with pytest.raises(Unavailable, match="dropped, but"):
            await leases.drop("quiet")
        assert "cannot be written" in leases.trouble
    with pytest.raises(Gone):
        await leases.drop("another")
    (tmp_path / "overrides.json.new").rmdir()
    assert await leases.drop("quiet") == "override quiet is dropped"
    assert leases.trouble == ""
    assert names(book(tmp_path, clock), clock) == []
    with pytest.raises(Gone):
        await leases.drop("quiet")


async def test_one_that_was_dropped_on_a_full_disk_does_not_come_back(tmp_path: Path) -> None:
    clock = Clock()
    leases = book(tmp_path, clock)
    await leases.set(override())
    block(tmp_path)
    with pytest.raises(Unavailable):
        await leases.drop("quiet")
    (tmp_path / "overrides.json.new").rmdir()
    await leases.close()
    assert names(book(tmp_path, clock), clock) == []


async def test_a_disk_that_hangs_refuses_in_time(tmp_path: Path) -> None:
    clock = Clock()
    disk, answers = Disk(seconds=0.02), threading.Event()
    leases = Leases(str(tmp_path), boot="b1", clock=clock, disk=disk)
    leases.begin()
    await leases.set(override())
    with pytest.raises(Hung):
        await disk.do(waiting(answers))
    with pytest.raises(Unavailable, match="not in force"):
        await leases.set(override("other", on=on_tenant("other")))
    with pytest.raises(Unavailable, match="dropped, but"):
        await leases.drop("quiet")
    assert names(leases, clock) == []
    answers.set()
    await until(lambda: not any(t.name == "disk" for t in threading.enumerate()))
    await asyncio.sleep(0.01)  # and the loop has been told
    await leases.close()
    assert names(book(tmp_path, clock), clock) == []


@pytest.mark.parametrize("mode", [0o620, 0o602])
async def test_a_file_that_others_can_write_holds_nobody_back(tmp_path: Path, mode: int) -> None:
    clock = Clock()
    await book(tmp_path, clock).set(override())
    (tmp_path / "overrides.json").chmod(mode)
    (event,) = Leases(str(tmp_path), boot="b1", clock=clock).begin()
    assert "others can write it" in event.text
    assert names(book(tmp_path, clock), clock) == []


# -- files of strangers --------------------------------------------------------------------------------


def begun(folder: Path | str) -> tuple[Leases, list[str]]:
    leases = Leases(str(folder), boot="b1", clock=Clock())
    return leases, [e.kind for e in leases.begin()]


@given(st.binary(max_size=200) | st.text('[]{}":,0123456789e.-ntf', max_size=80).map(str.encode))
def test_junk_is_no_override_and_no_crash(junk: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "overrides.json").write_bytes(junk)
        leases, told = begun(folder)
        assert leases.active(Instant(0, 0)) == ()
        assert told == ["overrides-unreadable"]


@given(st.data())
def test_a_damaged_file_is_none_or_holds_what_could_be_written(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, clock = Path(folder) / "overrides.json", Clock()
        leases = book(folder, clock)
        asyncio.run(leases.set(override()))
        asyncio.run(book(folder, clock).set(override("cool", on=on_gpu("GPU-1"))))
        whole = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
        found, told = begun(folder)
        for lease in found.active(clock.now()):
            assert not lease.fault()
            assert lease.until - clock.mono <= lease.ttl_seconds
        assert told in (
            [],
            ["overrides-unreadable"],
            ["override-expired"],
            ["override-expired"] * 2,
        )


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        '{"version": 2, "boot": "b1", "leases": []}',
        '{"version": 1, "boot": "b1", "leases": [{"id": "x"}]}',
        '{"version": 1, "boot": "b1", "leases": NaN}',
        '{"version": 1' + "0" * 5000 + "}",
        " " * (1 << 20) + "  ",
    ],
)
def test_a_foreign_file_is_no_override_and_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "overrides.json").write_text(content)
    leases, told = begun(tmp_path)
    assert told == ["overrides-unreadable"]
    assert leases.active(Instant(0, 0)) == ()


def written(*leases: Lease) -> str:
    return json.dumps(
        {"version": 1, "boot": "b1", "leases": [msgspec.to_builtins(x) for x in leases]}
    )


def lease(name: str = "a", on: Subject | None = None, **fields: object) -> Lease:
    asked = msgspec.structs.asdict(override(name, on=on))
    return Lease(**{**asked, "until": 1e6, "until_wall": 2e9, "created_wall": 1.0, **fields})


@pytest.mark.parametrize(
    "leases",
    [
        (lease("a"), lease("a", on_gpu("GPU-1"))),
        (lease("a"), lease("b")),
        (lease(value=7.0),),
        (lease(until=float("inf")),),
        tuple(lease(f"n{n}", on_tenant(f"t{n}")) for n in range(MOST_LEASES + 1)),
    ],
)
def test_what_no_agent_writes_is_not_believed(tmp_path: Path, leases: tuple[Lease, ...]) -> None:
    (tmp_path / "overrides.json").write_text(written(*leases))
    assert begun(tmp_path)[1] == ["overrides-unreadable"]


def test_a_lease_that_was_made_longer_is_cut(tmp_path: Path) -> None:
    (tmp_path / "overrides.json").write_text(written(lease()))
    leases, told = begun(tmp_path)
    (found,) = leases.active(Clock().now())
    assert told == []
    assert found.until == 1060.0


def test_a_pipe_does_not_keep_the_agent_from_starting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "overrides.json")
    assert begun(tmp_path)[1] == ["overrides-unreadable"]


def test_a_directory_is_no_override(tmp_path: Path) -> None:
    (tmp_path / "overrides.json").mkdir()
    assert begun(tmp_path)[1] == ["overrides-unreadable"]


# -- any course of things ------------------------------------------------------------------------------

STEPS = st.one_of(
    st.tuples(st.just("set"), st.integers(0, 5), st.floats(1, 100)),
    st.tuples(st.just("drop"), st.integers(0, 5), st.just(0.0)),
    st.tuples(st.just("pass"), st.just(0), st.floats(0, 50)),
    st.tuples(st.just("wall"), st.just(0), st.floats(-1e8, 1e8)),
    st.tuples(st.just("kill"), st.just(0), st.just(0.0)),
)


@given(st.lists(STEPS, max_size=25))
def test_whatever_happens_each_ends_when_it_was_to_end(steps: list[tuple[str, int, float]]) -> None:
    async def course(folder: str) -> None:
        clock, ends = Clock(), dict[str, float]()
        leases = book(folder, clock)
        for what, which, amount in steps:
            name = f"n{which}"
            if what == "set":
                await leases.set(override(name, on=on_tenant(name), ttl=amount))
                ends[name] = clock.mono + amount
            elif what == "drop" and name in names(leases, clock):
                await leases.drop(name)
                del ends[name]
            elif what == "pass":
                clock.advance(amount)
            elif what == "wall":
                clock.wall += amount
            elif what == "kill":
                leases = book(folder, clock)
            ends = {n: end for n, end in ends.items() if end > clock.mono}
            assert {x.id: x.until for x in leases.active(clock.now())} == ends

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(course(folder))
