"""The ledger: what we have changed on this host and what it was before, durable before each write.

Every change goes `intend` (durable), then the write, then `confirm`, and at its end `done`. Only
`intend` waits for the disk and can be refused; `confirm` and `done` follow in the background, since
losing one leaves at worst an entry whose value no longer is one of ours, which is then left alone.
Records of one moment share one fdatasync. After any failure, and when most of the file is dead, the
next commit writes the whole file anew instead of appending.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor

import msgspec

from gpuagent.act.journal import Journal
from gpuagent.act.record import (
    Book,
    Confirm,
    Done,
    Entry,
    Intend,
    Kept,
    Record,
    Target,
    decode_line,
    encode_line,
    target_of,
)
from gpuagent.act.statedir import prepare
from gpuagent.clock import patiently
from gpuagent.errors import Corrupt, Refused
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import Subject
from gpuagent.ports import Real

_COMPACT_ABOVE_BYTES = 64 * 1024
_COMPACT_RATIO = 4
_PROBLEMS_MAX = 20
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def boot_id() -> str:
    """Identity of this boot; empty where the kernel does not say."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


class _Job(msgspec.Struct):
    """A record on its way to the disk, and who waits for it."""

    record: Record
    line: bytes
    waiter: "asyncio.Future[None] | None" = None


class Ledger:
    """`ledger.jsonl` of a state directory, and what it adds up to. For one event loop at a time."""

    def __init__(
        self,
        directory: str,
        *,
        boot: str | None = None,
        executor: Executor | None = None,
        journal: Journal | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Read the ledger, creating it where there is none.

        `executor` runs the blocking calls, one at a time; None for a thread of its own. Raises
        Refused where the directory cannot be used, Corrupt where the file is not a ledger at all.
        """
        prepare(directory)
        self._boot = boot_id() if boot is None else boot
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._journal = journal or Journal(os.path.join(directory, "ledger.jsonl"))
        self._wall = wall
        self._book = Book()
        self._newer: list[bytes] = []
        self._queue: list[_Job] = []
        self._busy = False
        self._closed = False
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._rewrite_due = False
        self._compact_at = _COMPACT_ABOVE_BYTES
        self.problems: tuple[str, ...] = ()
        """What could not be read when it was opened, one sentence each."""
        self.void: tuple[Entry, ...] = ()
        """Entries of an earlier boot: the kernel and the driver have forgotten what we set."""
        self.trouble = ""
        """Why the last commit failed; empty while the disk takes what it is given."""
        self._load()

    # -- what it says --------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        return self._journal.path

    @property
    def entries(self) -> Mapping[Target, Entry]:
        """All that is held, in no particular order. A view: copy it before awaiting."""
        return self._book.entries

    def held(self, target: Target) -> Entry | None:
        return self._book.entries.get(target)

    # -- what is told to it --------------------------------------------------------------------------

    async def intend(
        self,
        *,
        knob: Knob,
        subject: Subject,
        identity: str,
        original: Real,
        write: Real,
        rule: str,
        budget: Real | None = None,
    ) -> None:
        """Announce a write; durable on return. `budget` is `Entry.budget`. Raises Refused, and then nothing may be written."""
        known = self.held(target_of(knob, subject))
        record = Intend(
            hold=known.hold if known is not None else self._book.new_hold(),
            knob=knob.name,
            subject=subject,
            identity=identity,
            boot=self._boot,
            was=Kept.of(original),
            write=Kept.of(write),
            wall=self._wall(),
            rule=rule,
            budget=None if budget is None else Kept.of(budget),
        )
        await self._durable(record)

    def confirm(self, target: Target, read: Real) -> None:
        """Remember what our write read back as. Does nothing where the target is not held."""
        entry = self.held(target)
        if entry is None or (not entry.pending and entry.wrote[-1].raw == read.raw):
            return
        self._note(Confirm(entry.hold, Kept.of(read)))

    def serve(self, target: Target, rule: str, budget: Real | None = None) -> None:
        """Another rule wants the value as it is. Does nothing where the target is not held."""
        entry, kept = self.held(target), None if budget is None else Kept.of(budget)
        if entry is not None and (entry.rule, entry.budget) != (rule, kept):
            self._note(msgspec.structs.replace(entry, rule=rule, budget=kept))

    async def keep(self, target: Target, freed: Mapping[str, int] | None) -> None:
        """Remember what the target gives up (`Entry.freed`); durable on return, unless it is None.

        Raises Refused, and then nothing may be given up.
        """
        entry, bytes_ = self.held(target), None if freed is None else tuple(sorted(freed.items()))
        if bytes_ is None:
            if entry is not None and entry.freed is not None:
                self._note(msgspec.structs.replace(entry, freed=None))
            return
        if entry is None:
            raise Refused(f"{target} is not in the ledger, so what it gives up cannot be recorded")
        await self._durable(msgspec.structs.replace(entry, freed=bytes_))

    def done(self, target: Target, what: str, why: str) -> None:
        """The target is ours no longer. Does nothing where it was not."""
        entry = self.held(target)
        if entry is not None:
            why = why.encode("utf-8", "backslashreplace").decode()
            self._note(Done(entry.hold, what, why, self._wall()))

    async def flush(self) -> None:
        """Until all that was told has been written, or has failed to be."""
        await self._quiet.wait()

    async def close(self, seconds: float = 5.0) -> None:
        """Write what is left, for at most so long, and let go of the file."""
        await patiently(self.flush(), seconds)
        self._closed = True
        self._executor.shutdown(wait=not self._busy, cancel_futures=True)
        if not self._busy:
            self._journal.close()

    # -- reading -------------------------------------------------------------------------------------

    def _load(self) -> None:
        try:
            content = self._journal.open()
        except Refused:
            self._journal.close()
            raise
        except OSError as error:
            self._journal.close()
            kind = Refused if isinstance(error, PermissionError) else Corrupt
            raise kind(
                f"cannot read the ledger {self.path}: {error.strerror}; make it a readable plain "
                f"file, or move it away (what it recorded can then no longer be put back)"
            ) from error
        problems = []
        damaged = False
        lines = content.split(b"\n")
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = decode_line(line)
            except Corrupt as error:
                problems.append(self._problem(number, last=number == len(lines), error=error))
                damaged = damaged or number < len(lines)
                continue
            if record is None:
                self._newer.append(line + b"\n")
            else:
                self._book.apply(record)
        if damaged:
            self._journal.set_aside(content)
        if self._newer:
            problems.append(
                f"{self.path}: {len(self._newer)} lines of a newer version are kept, not understood"
            )
        if len(problems) > _PROBLEMS_MAX:
            more = len(problems) - _PROBLEMS_MAX
            problems = [*problems[:_PROBLEMS_MAX], f"{self.path}: {more} more such lines"]
        self.problems = tuple(problems)
        self._drop_void()
        torn = bool(content) and not content.endswith(b"\n")
        self._rewrite_due = torn or bool(problems or self.void)

    def _problem(self, number: int, *, last: bool, error: Corrupt) -> str:
        if last:
            return f"{self.path}:{number}: the last line was cut short by a crash; nothing is lost"
        return f"{self.path}:{number}: skipped: {error}; a copy is in {self.path}.damaged"

    def _drop_void(self) -> None:
        """After a reboot cgroups are gone and drivers are loaded anew: nothing there is ours."""
        if not self._boot:
            return
        self.void = tuple(e for e in self.entries.values() if e.boot not in {"", self._boot})
        self._book.drop([e.target for e in self.void])

    # -- committing ----------------------------------------------------------------------------------

    async def _durable(self, record: Intend | Entry) -> None:
        """Write, and believe once it is written. Raises Refused."""
        try:
            line = encode_line(record)
        except UnicodeEncodeError as error:
            raise Refused("its name is not UTF-8, so it cannot be recorded or changed") from error
        if self._closed:
            raise Refused("the ledger is closed: the agent is stopping")
        waiter = asyncio.get_running_loop().create_future()
        self._enqueue(_Job(record, line, waiter))
        await waiter

    def _note(self, record: Record) -> None:
        """Believe at once, write in the background."""
        self._book.apply(record)
        if not self._closed:
            self._enqueue(_Job(record, encode_line(record)))

    def _enqueue(self, job: _Job) -> None:
        self._queue.append(job)
        if not self._busy:
            self._busy = True
            self._quiet.clear()
            # One pass later, so that all records of this moment go together.
            asyncio.get_running_loop().call_soon(self._commit)

    def _commit(self) -> None:
        jobs, self._queue = self._queue, []
        lines = b"".join(j.line for j in jobs)
        if self._rewrite_due or self._journal.size > self._compact_at:
            held = b"".join(encode_line(e) for e in self.entries.values())
            content = b"".join(self._newer) + held + lines
            self._compact_at = max(_COMPACT_ABOVE_BYTES, _COMPACT_RATIO * len(content))
            call, argument = self._journal.replace, content
        else:
            call, argument = self._journal.append, lines
        future = asyncio.get_running_loop().run_in_executor(self._executor, call, argument)
        future.add_done_callback(lambda done: self._committed(jobs, done))

    def _committed(self, jobs: list[_Job], future: "asyncio.Future[None]") -> None:
        if future.cancelled():
            return
        error = future.exception()
        self._rewrite_due = error is not None
        self.trouble = "" if error is None else f"cannot write {self.path}: {_text(error)}"
        for job in jobs:
            if job.waiter is None:
                continue
            if error is None and isinstance(job.record, Entry):
                self._book.renew(job.record)
            elif error is None:
                self._book.apply(job.record)
            _answer(job.waiter, error, self.trouble)
        if self._queue:
            self._commit()
        else:
            self._busy = False
            self._quiet.set()


def _answer(waiter: "asyncio.Future[None]", error: BaseException | None, trouble: str) -> None:
    if waiter.done():
        return
    if error is None:
        waiter.set_result(None)
    elif isinstance(error, OSError):
        waiter.set_exception(Refused(f"{trouble}; nothing is changed that cannot be recorded"))
    else:
        waiter.set_exception(error)


def _text(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
