"""The NVIDIA driver behind a child process: keeps it running, and is `ports.Gpus` to the agent.

A child that hangs on a card is killed, the card is blind, and a new child leaves it out at once; the
card is tried again in a child of its own, so that the others are not disturbed, after pauses that grow
also over its relapses: each costs the others the readings of a call's deadline. A child that finds no
driver ends, and a new one looks again after growing pauses. Letting go of the driver
means ending the child: an open handle blocks MIG changes, resets and unloading (FACTS 2).
"""

import asyncio
import contextlib
from collections.abc import Mapping

from gpuagent import config
from gpuagent.clock import Clock
from gpuagent.errors import AgentError, Gone, Unavailable
from gpuagent.host import nvml_frames as frames
from gpuagent.host.nvml_errors import SUCCESS, failed, no_driver
from gpuagent.host.nvml_hung import HungCard
from gpuagent.host.nvml_memory import Memory
from gpuagent.host.nvml_picture import Picture
from gpuagent.host.worker import Ending, Worker
from gpuagent.model.inventory import on_gpu
from gpuagent.model.state import Reading, Sensed
from gpuagent.model.vocab import (
    GPU_ECC_ERRORS,
    GPU_NVLINK_BYTES,
    GPU_POWER_LIMIT_WATTS,
    GPU_THROTTLED,
)
from gpuagent.ports import Wake

MODULE = "gpuagent.host.nvml_worker"
QUIET_SECONDS = 3.0
"""The child shows that it is alive at least twice a second."""
KERNEL_LISTING = "/proc/driver/nvidia/gpus"
"""Folder in which the kernel module lists the cards; it changes when one comes or goes."""

_FIRST_PAUSE_SECONDS = 0.1
_STEADY_AFTER_SECONDS = 10.0
"""A child that lived this long was not a failed start."""
_CENSUS_SECONDS = 5.0
_EVENTS_SECONDS = 0.5


def pause_after(failures: int, longest: float) -> float:
    """Seconds before the next try, which double with each failure in a row."""
    return min(longest, _FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 20))


class NvmlGpus:
    """Implements `ports.Gpus` and `ports.Service`."""

    def __init__(
        self,
        *,
        settings: config.Nvml,
        library: str,
        clock: Clock,
        wake: Wake,
        listing: str = KERNEL_LISTING,
    ) -> None:
        """`library` is the libnvidia-ml.so.1 to load; empty for the one the linker finds."""
        self._settings = settings
        self._library = library
        self._listing = listing
        self._clock = clock
        self._wake = wake
        self._picture = Picture()
        self._driver = ""
        self._down: AgentError | None = Unavailable("the GPUs are about to be read")
        self._worker: Worker[frames.Frame] | None = None
        self._look: Worker[frames.Frame] | None = None
        self._bye: frames.Bye | None = None
        self._hung: dict[int, HungCard] = {}
        self._relapsing: dict[int, HungCard] = {}
        """Every card that ever hung, with what that has taught."""
        self._any_hung = asyncio.Event()
        self._awaited: set[int] = set()
        """Cards of which the present child has not spoken yet."""
        self._settled = asyncio.Event()
        self._released = False
        self._kick = asyncio.Event()
        self._failures = 0
        self._waiting: dict[int, asyncio.Future[frames.Answer]] = {}
        self._asked = 0

    # -- ports.Gpus -----------------------------------------------------------------------------------

    def drain(self) -> Sensed:
        said = self._picture.drain()
        if said is not None:
            return said
        if self._down is not None:
            raise type(self._down)(*self._down.args)
        return Sensed()

    def watch(self, marks: Mapping[str, float]) -> None:
        self._picture.watch(marks)

    async def power_limit(self, uuid: str) -> float:
        """Raises Gone, Unsupported, Unavailable."""
        return await self._limit(uuid)

    async def set_power_limit(self, uuid: str, watts: float) -> None:
        """Raises Refused (out of range, no permission), Gone, Unsupported, Unavailable."""
        await self._limit(uuid, watts)

    async def release(self) -> None:
        """Raises Unavailable where a driver call holds the child, and with it its handles."""
        self._released = True
        why = "the GPUs were released on request; `gpuagent resume` takes them up again"
        self._go_down(Unavailable(why), "released on request")
        held = [w for w in (self._worker, self._look) if w is not None]
        for worker in held:
            worker.stop("released on request")
        held += [h.worker for h in self._hung.values() if h.worker is not None]
        for worker in held:
            await worker.ended(3.0)
        stuck = [str(w.pid) for w in held if w.alive]
        if stuck:
            raise Unavailable(
                f"process {', '.join(stuck)} hangs in a driver call and keeps its handles open"
            )

    async def resume(self) -> None:
        """The cards come back within moments."""
        self._released = False
        self._failures = 0
        self._kick.set()

    # -- beyond the port ------------------------------------------------------------------------------

    @property
    def memory(self) -> Memory:
        """Who holds how much of which card, as it was last read."""
        return self._picture

    async def settled(self) -> None:
        """Until every card has been heard of once, or there is a reason why not."""
        await self._settled.wait()

    @property
    def child(self) -> int | None:
        """PID of the child that reads the cards, for cost accounting; None while there is none."""
        return None if self._worker is None else self._worker.pid

    def reconfigure(self, settings: config.Nvml) -> None:
        """Take new intervals and deadlines at once."""
        self._settings = settings
        if self._worker is not None:
            self._worker.deadline = settings.call_deadline
            # Where it has just ended: the next child gets them at its start.
            with contextlib.suppress(Unavailable):
                every, retry_max = self._every(), settings.retry_max
                self._send(self._worker, "rates", every=every, retry_max=retry_max)
        self._kick.set()

    async def run(self) -> None:
        """Until cancelled; every child has then ended."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_reading())
            tasks.create_task(self._retry_hung())

    # -- the child ------------------------------------------------------------------------------------

    def _every(self) -> dict[str, float]:
        """Seconds between readings by rate: as configured, but never too long for a value to live."""
        set_ = self._settings
        return {
            "sample": set_.sample_interval,
            "events": max(set_.sample_interval, _EVENTS_SECONDS),
            "status": min(set_.process_interval, GPU_THROTTLED.expires / 2),
            "processes": set_.process_interval,
            "links": min(set_.slow_interval, GPU_NVLINK_BYTES.expires / 2),
            "slow": min(set_.slow_interval, GPU_ECC_ERRORS.expires / 2),
            "census": min(set_.slow_interval, _CENSUS_SECONDS),
        }

    def _make(self, *, skip: tuple[int, ...] = (), only: int | None = None) -> Worker[frames.Frame]:
        look = only is not None
        return Worker(
            MODULE,
            settings={
                "library": self._library,
                "every": self._every(),
                "listing": self._listing,
                "retry_max": self._settings.retry_max,
                "skip": skip,
                "look": look,
                "only": only,
            },
            decode=frames.decode,
            take=_ignore if look else self._take,
            deadline=self._settings.call_deadline,
            quiet=QUIET_SECONDS,
        )

    async def _keep_reading(self) -> None:
        while True:
            if self._released:
                await self._kicked(None)
                continue
            began = self._clock.now().mono
            self._bye = None
            worker = self._worker = self._make(skip=tuple(self._hung))
            try:
                ending = await worker.run()
            except Unavailable as error:
                ending = Ending(str(error))
            finally:
                self._worker = None
                self._fail_waiting()
            lived = self._clock.now().mono - began
            await self._kicked(self._after(ending, worker, lived))

    async def _kicked(self, seconds: float | None) -> None:
        """Wait so long, or until something has changed that makes another try worth while."""
        self._kick.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._kick.wait()

    def _after(self, ending: Ending, worker: Worker[frames.Frame], lived: float) -> float:
        """Draw the consequences of a child's end; seconds to wait before the next."""
        if lived > _STEADY_AFTER_SECONDS:
            self._failures = 0
        if ending.asked:
            return 0.0
        if ending.call and ending.target >= 0:
            self._hangs(ending, worker)
            return _FIRST_PAUSE_SECONDS
        self._failures += 1
        pause = pause_after(self._failures, self._settings.retry_max)
        if self._bye is not None:
            if self._bye.code == SUCCESS:  # Cards have come or gone: only a new child sees which.
                return pause
            self._go_down(no_driver(self._bye.why, self._bye.code), self._bye.why)
            return pause
        error = Unavailable(f"the GPU reader starts again: {ending.why}")
        # One new start takes a moment, in which the other cards just give no samples.
        self._go_down(error, ending.why if self._failures > 1 else "")
        return pause

    def _hangs(self, ending: Ending, worker: Worker[frames.Frame]) -> None:
        """One card hangs, and is left out from now on; the others just give no samples meanwhile."""
        now = self._clock.now().mono
        card = self._relapsing.setdefault(ending.target, HungCard())
        card.hangs(worker, now)
        self._hung[ending.target] = card
        self._any_hung.set()
        self._picture.blind(ending.target, f"a driver call hangs: {ending.why}", now)
        self._go_down(Unavailable(f"the GPU reader starts again: {ending.why}"), "")

    def _go_down(self, error: AgentError, blind: str) -> None:
        """Nothing can be read; `blind` is why the cards count as blind, or empty if they do not."""
        if self._down is None or str(self._down) != str(error):
            self._wake(str(error))
        self._down = error
        if blind:
            self._picture.all_blind(blind, self._clock.now().mono)
        self._settled.set()

    def _fail_waiting(self) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Unavailable("the GPU reader ended before it answered"))

    # -- cards that hung ------------------------------------------------------------------------------

    async def _retry_hung(self) -> None:
        """Try each hung card in a child of its own, and give it back to the reader if it answers."""
        while True:
            await self._any_hung.wait()
            await self._clock.sleep(0.25)
            for index, hung in list(self._hung.items()):
                if hung.due(self._clock.now().mono) and not self._released:
                    await self._retry(index, hung)
            if not self._hung:
                self._any_hung.clear()

    async def _retry(self, index: int, hung: HungCard) -> None:
        self._look = hung.worker = self._make(only=index)
        try:
            ending = await self._look.run()
        except Unavailable:
            return
        finally:
            self._look = None
            hung.tried(self._clock.now().mono, self._settings.retry_max)
        if ending.exit_code == 0:
            self._hung.pop(index, None)
            hung.back(self._clock.now().mono)
            self._give_back(index)

    def _give_back(self, index: int) -> None:
        if self._worker is not None:
            # Where it has just ended: the next child leaves out no card that is not hung.
            with contextlib.suppress(Unavailable):
                self._send(self._worker, "adopt", i=index)

    # -- frames ---------------------------------------------------------------------------------------

    def _take(self, frame: frames.Frame) -> None:
        """One frame of the child. Raises msgspec.DecodeError where it makes no sense."""
        now = self._clock.now().mono
        match frame:
            case frames.RowsFrame():
                if risen := self._picture.rows(frame):
                    self._wake(risen)
            case frames.ProcessesFrame():
                self._picture.processes(frame)
            case frames.CardFrame():
                if self._picture.card(frame, self._driver, now):
                    self._wake(f"{self._picture.label(frame.i)} was found")
            case frames.Introduced():
                self._heard_of(frame.i)
            case frames.BlindFrame():
                if self._picture.blind(frame.i, frame.why, now):
                    self._wake(f"{self._picture.label(frame.i)}: {frame.why}")
                self._heard_of(frame.i)
            case frames.XidFrame():
                self._picture.xid(frame)
                self._wake(f"XID {frame.xid}")
            case frames.Answer():
                future = self._waiting.get(frame.id)
                if future is not None and not future.done():
                    future.set_result(frame)
            case frames.Hello():
                self._driver = frame.driver
                self._down = None
                for index in [i for i in self._relapsing if i >= frame.count]:
                    del self._relapsing[index]
                    self._hung.pop(index, None)
                self._picture.begin(tuple(self._hung))
                self._awaited = set(range(frame.count)) - set(self._hung)
                self._heard_of(-1)
            case frames.Bye():
                self._bye = frame

    def _heard_of(self, index: int) -> None:
        self._awaited.discard(index)
        if not self._awaited:
            self._picture.settle(self._clock.now().mono)
            self._settled.set()

    # -- commands -------------------------------------------------------------------------------------

    def _send(self, worker: Worker[frames.Frame], do: str, **more: object) -> int:
        self._asked += 1
        worker.send({"id": self._asked, "do": do, **more})
        return self._asked

    async def _limit(self, uuid: str, watts: float | None = None) -> float:
        value = None if watts is None else round(watts * 1000)
        real = await self.order(uuid, "power_limit", value) / 1000
        at = self._clock.now().mono
        self._picture.reading(Reading(GPU_POWER_LIMIT_WATTS, on_gpu(uuid), real, at))
        return real

    async def order(self, uuid: str, do: str, value: int | None = None) -> int:
        """Have an order of `nvml_orders` carried out on a card; what it answers.

        Raises Gone, Unsupported, Refused, Unavailable.
        """
        worker = self._worker
        gpu = self._picture.gpu(uuid)
        if worker is None or self._down is not None:
            raise Unavailable(str(self._down or "the GPU reader is being started"))
        if gpu is None and (self._awaited or not self._picture.complete):
            raise Unavailable(f"GPU {uuid} may be one that has not answered yet")
        if gpu is None:
            raise Gone(f"there is no GPU {uuid}")
        if gpu.blind:
            raise Unavailable(f"{self._picture.label(gpu.index)}: {gpu.blind}")
        answer = await self._answer(self._send(worker, do, uuid=uuid, value=value))
        if answer.code != SUCCESS or answer.value is None:
            raise failed(answer, self._picture.label(gpu.index), do, value, gpu)
        return answer.value

    async def _answer(self, number: int) -> frames.Answer:
        """Raises Unavailable when the child does not answer, or ends first."""
        future: asyncio.Future[frames.Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            # A call that hangs is found by its own deadline; this bounds the wait for its turn.
            async with asyncio.timeout(2 * self._settings.call_deadline + 1):
                return await future
        except TimeoutError as error:
            raise Unavailable("the GPU reader is too busy to answer") from error
        finally:
            del self._waiting[number]


def _ignore(frame: frames.Frame) -> None:
    """What a mere look finds is read again by the reader."""
