"""Suspends and resumes the CUDA state of a process, through NVIDIA's cuda-checkpoint.

    cuda-checkpoint --get-state --pid P                           running, locked, checkpointed, failed
    cuda-checkpoint --action lock --timeout MS --pid P            running -> locked
    cuda-checkpoint --action checkpoint|restore|unlock --pid P    -> checkpointed -> locked -> running

Options and states are those of the tool's README (NVIDIA/cuda-checkpoint, version 570: a lock with a
timeout came with it) and of CRIU's plugins/cuda/cuda_plugin.c. What else is known of it:

- It hangs on a frozen process (checkpoint-restore/criu#2470): it is not called before one is thawed.
- Its exit code is not to be trusted (cuda-checkpoint#53): each step is judged by the state afterwards,
  a suspension also by the driver's own list of who holds device memory.
- A restore that fails for want of device memory can never be repeated (cuda-checkpoint#44): it is not
  begun before the cards are known to have as much free as was given up, and nothing is suspended of
  which that is not known and kept, so that a later run knows it, too.
- Killed in the midst of a step it gets out of step with the driver (criu#2547): that is the last
  resort, after the whole deadline, and what is left is then asked and said.
- While one process of an NCCL job is locked, any call about another hangs (cuda-checkpoint#30): one
  call at a time is the caller's business, and a call about the state has a deadline of its own.
"""

import asyncio
from collections.abc import Mapping
from typing import Literal

import msgspec

from gpuagent import config
from gpuagent.clock import Clock
from gpuagent.errors import AgentError, Gone, NoRoom, Refused, Unavailable, Unsupported
from gpuagent.host.frozen import Frozen, Thaw
from gpuagent.host.nvml_memory import Memory
from gpuagent.host.tool import Ran, find, run
from gpuagent.ports import CudaState, Freed, Keep, Processes

State = Literal["running", "locked", "checkpointed", "failed"]

_SHOWN: dict[State, CudaState] = {
    "running": "runs",
    "locked": "locked",
    "checkpointed": "suspended",
}
_REMEDY = "get it from github.com/NVIDIA/cuda-checkpoint; it needs driver 570 or later"
_STATE_SECONDS = 10.0
"""How long the tool may take to say in which state a process is, or to unlock it."""
_LATE_SECONDS = 3.0
"""How long past its own timeout a lock may take to give up."""
_LOOK_SECONDS = 0.25
_LEFT_RATIO = 0.05
"""Of what it held: a process that still holds more has not been suspended."""
_MARGIN_BYTES = 256 * 1024**2
"""Free memory beyond what was given up, without which no restore is begun: its contexts take some."""
_FORCE = "to resume it all the same, stop the agent and run `gpuagent restore --force-resume`"


class _Target(msgspec.Struct, frozen=True):
    """A process, as everything here identifies it."""

    pid: int
    started: int

    def __str__(self) -> str:
        return f"process {self.pid}"


class CudaCheckpoint:
    """Implements `ports.Checkpoint`. One call at a time is the caller's business."""

    def __init__(
        self,
        settings: config.Suspend,
        *,
        processes: Processes,
        frozen: Frozen,
        memory: Memory,
        clock: Clock,
        seen_seconds: float = 8.0,
        forced: bool = False,
    ) -> None:
        """`seen_seconds` is how long the driver's list may take to show that memory has come free.

        `forced` resumes also where there may be no room.
        """
        self._settings = settings
        self._processes = processes
        self._thaw = Thaw(frozen, clock)
        self._memory = memory
        self._clock = clock
        self._seen_seconds = seen_seconds
        self._forced = forced
        self._unconfirmed: dict[_Target, tuple[int, float]] = {}
        """Those whose memory was not seen freed: bytes each held, and when it was checkpointed."""
        self._begun: set[_Target] = set()
        """Those that this run has begun to suspend: a lock on them is our own."""

    def reconfigure(self, settings: config.Suspend) -> None:
        """Take new deadlines at once."""
        self._settings = settings

    # -- ports.Checkpoint -----------------------------------------------------------------------------

    async def state(self, pid: int, started: int) -> CudaState:
        target = _Target(pid, started)
        state = await self._state(target)
        if state == "failed":
            raise Refused(_failed(target))
        if state == "checkpointed" and not self._seen_free(target):
            return "unconfirmed"
        return _SHOWN[state]

    async def suspend(self, pid: int, started: int, keep: Keep) -> None:
        target = _Target(pid, started)
        until = self._until()
        state = await self._ready(target)
        if state != "running" and target not in self._begun:
            raise Refused(_anothers(target, state))
        if state == "checkpointed":
            return
        self._begun.add(target)
        if state == "running":
            await self._lock(target)
        held = await self._held(target)
        try:
            await keep(held)
        except AgentError:
            await self._act(target, "unlock", _STATE_SECONDS)
            raise
        try:
            await self._checkpoint(target, until)
            await self._see_freed(target, sum(held.values()), until)
        except AgentError:
            if target not in self._begun:  # It runs, with all it had.
                await keep(None)
            raise

    async def resume(self, pid: int, started: int, freed: Freed | None) -> None:
        target = _Target(pid, started)
        until = self._until()
        state = await self._ready(target)
        if state == "checkpointed":
            if not self._forced:
                await self._see_room(target, freed)
            await self._restore(target, until)
        if state != "running":
            await self._unlock(target)
        self._forget(target)

    # -- steps ----------------------------------------------------------------------------------------

    async def _lock(self, target: _Target) -> None:
        """Bring it to rest, or leave it as it was. Raises Unavailable."""
        seconds = self._settings.lock_timeout
        ran = await self._act(
            target, "lock", seconds + _LATE_SECONDS, "--timeout", str(round(seconds * 1000))
        )
        state = await self._state_after(target, "lock", ran)
        if state == "locked":
            return
        # A lock that comes too late would leave it at rest for good.
        await self._act(target, "unlock", _STATE_SECONDS)
        left = await self._left(target)
        raise Unavailable(
            f"{target} did not come to rest within {seconds:g} s: {_words(ran)}; {left}"
        )

    async def _held(self, target: _Target) -> Mapping[str, int]:
        """What one at rest holds, by card; it can take no more. Raises Unavailable, and lets it run on."""
        since = self._now
        while not (held := self._memory.memory_of(target.pid, since)):
            if self._now >= since + self._seen_seconds:
                await self._act(target, "unlock", _STATE_SECONDS)
                raise Unavailable(
                    f"{target} is not suspended: the driver does not say how much memory it holds, so "
                    f"it could not be known when to resume it (see `nvidia-smi`); "
                    f"{await self._left(target)}"
                )
            await self._clock.sleep(_LOOK_SECONDS)
        return held

    async def _checkpoint(self, target: _Target, until: float) -> None:
        """Have its device memory copied and freed, or let it run on. Raises Refused, Unavailable."""
        try:
            await self._see_unfrozen(target)
        except (Refused, Unavailable) as error:
            raise Unavailable(f"{error}; it is locked until then") from error
        ran = await self._act(target, "checkpoint", until - self._now)
        state = await self._state_after(target, "checkpoint", ran)
        if state == "checkpointed":
            return
        why = f"{target} could not be checkpointed: {_words(ran)}"
        if state == "failed":
            raise Refused(f"{why}; {_failed(target)}")
        if state == "locked":
            await self._act(target, "unlock", _STATE_SECONDS)
        raise Unavailable(f"{why}; {await self._left(target)}")

    async def _see_freed(self, target: _Target, held: int, until: float) -> None:
        """See in the driver's own list that its memory is free; else let it run on.

        Where the driver does not say, `state` says that. Raises Unavailable.
        """
        since = self._now
        still: int | None = None
        while self._now < since + self._seen_seconds:
            found = self._memory.memory_of(target.pid, since)
            still = None if found is None else sum(found.values())
            if still is not None and still <= _LEFT_RATIO * held:
                return
            await self._clock.sleep(_LOOK_SECONDS)
        if still is None:
            self._unconfirmed[target] = held, since
            return
        why = f"{target} counts as checkpointed, but still holds {still} bytes of device memory"
        ran = await self._act(target, "restore", max(until - self._now, _STATE_SECONDS))
        if await self._state_after(target, "restore", ran) == "locked":
            await self._act(target, "unlock", _STATE_SECONDS)
        raise Unavailable(f"{why}; {await self._left(target)}")

    async def _see_room(self, target: _Target, freed: Freed | None) -> None:
        """Return if its cards are known to have as much free as it has given up.

        Raises NoRoom, Unavailable.
        """
        if freed is None:
            raise Unavailable(
                f"{target} stays suspended: it is not known how much device memory it needs, and a "
                f"restore for which there is too little can never be repeated; {_FORCE}"
            )
        since = self._now
        for uuid, held in freed.items():
            while (free := self._memory.memory_free(uuid, since)) is None:
                if self._now >= since + self._seen_seconds:
                    raise Unavailable(
                        f"{target} stays suspended until the driver says how much of {uuid} is free: "
                        f"it held {held} bytes of it; {_FORCE}"
                    )
                await self._clock.sleep(_LOOK_SECONDS)
            if free < held + _MARGIN_BYTES:
                raise NoRoom(
                    f"{target} waits for device memory: it held {held} bytes of {uuid}, and "
                    f"{free:.0f} are free; end or shrink what else runs there"
                )

    async def _restore(self, target: _Target, until: float) -> None:
        """Have its device memory copied back. Raises Refused, Unavailable."""
        ran = await self._act(target, "restore", until - self._now)
        state = await self._state_after(target, "restore", ran)
        if state in ("locked", "running"):
            return
        why = f"{target} could not be restored: {_words(ran)}"
        if state == "failed":
            raise Refused(f"{why}; {_failed(target)}")
        raise Unavailable(
            f"{why}; it stays suspended, and is tried again; "
            f"`cuda-checkpoint --action restore --pid {target.pid}` does the same by hand"
        )

    async def _unlock(self, target: _Target) -> None:
        if await self._state(target) == "running":
            return
        ran = await self._act(target, "unlock", _STATE_SECONDS)
        if await self._state_after(target, "unlock", ran) != "running":
            raise Unavailable(
                f"{target} could not be unlocked: {_words(ran)}; {await self._left(target)}"
            )

    def _seen_free(self, target: _Target) -> bool:
        """Whether the driver has shown by now that what it held is free."""
        if target not in self._unconfirmed:
            return True
        held, since = self._unconfirmed[target]
        found = self._memory.memory_of(target.pid, since)
        if found is None or sum(found.values()) > _LEFT_RATIO * held:
            return False
        del self._unconfirmed[target]
        return True

    # -- what is asked --------------------------------------------------------------------------------

    async def _ready(self, target: _Target) -> State:
        """The state of a process with which something is to be done. Raises Refused if it has none."""
        await self._see_unfrozen(target)
        state = await self._state(target)
        if state == "failed":
            raise Refused(_failed(target))
        return state

    async def _state(self, target: _Target) -> State:
        """Raises Gone, Unsupported where the tool tells no state, Unavailable where it hangs."""
        await self._see_same(target)
        tool = find(self._settings.command, _REMEDY)
        ran = await run([tool, "--get-state", "--pid", str(target.pid)], seconds=_STATE_SECONDS)
        await self._see_same(target)
        state = _said(ran)
        if state is not None:
            if state == "running":
                self._begun.discard(target)
                self._unconfirmed.pop(target, None)
            return state
        if not ran.in_time:
            raise Unavailable(
                f"cuda-checkpoint did not say within {_STATE_SECONDS:g} s how {target} is: "
                "a process it shares memory with may be suspended, and it answers once that runs again"
            )
        raise Unsupported(f"cuda-checkpoint knows no state of {target}: {ran.line}")

    async def _state_after(self, target: _Target, did: str, ran: Ran) -> State:
        """The state after a step, whatever the step said of itself."""
        try:
            return await self._state(target)
        except (Unsupported, Unavailable) as error:
            raise Unavailable(f"after {did} ({_words(ran)}) of {target}: {error}") from error

    async def _left(self, target: _Target) -> str:
        """How it was left after a step that failed, in words."""
        try:
            state = await self._state(target)
        except Gone:
            return "it has ended meanwhile"
        except AgentError as error:
            return f"it may be stopped: {error}; `cuda-checkpoint --get-state --pid {target.pid}` tells"
        unlock = f"`cuda-checkpoint --action unlock --pid {target.pid}`"
        return {
            "running": "it runs as before",
            "locked": f"it is locked, and runs again after {unlock}",
            "checkpointed": "it is suspended",
            "failed": _failed(target),
        }[state]

    async def _act(self, target: _Target, action: str, seconds: float, *more: str) -> Ran:
        """Run one action on the process, if it is still the same. Raises Gone."""
        await self._see_same(target)
        tool = find(self._settings.command, _REMEDY)
        command = [tool, "--action", action, *more, "--pid", str(target.pid)]
        return await run(command, seconds=max(seconds, 1.0))

    async def _see_same(self, target: _Target) -> None:
        try:
            found = await asyncio.to_thread(self._processes.read, target.pid)
        except Gone:
            self._forget(target)
            raise
        if found.started != target.started:
            self._forget(target)
            raise Gone(f"{target} has ended, and its number is another's")

    async def _see_unfrozen(self, target: _Target) -> None:
        await self._see_same(target)
        await self._thaw.see(target.pid, target.started)

    def _forget(self, target: _Target) -> None:
        self._begun.discard(target)
        self._unconfirmed.pop(target, None)

    def _until(self) -> float:
        return self._now + self._settings.deadline

    @property
    def _now(self) -> float:
        return self._clock.now().mono


def seen_seconds(nvml: config.Nvml) -> float:
    """How long the lists of who holds device memory may take to show that some has come free."""
    return 2 * nvml.process_interval + 2


def _said(ran: Ran) -> State | None:
    """The state that the tool tells; None where it tells none."""
    words = ran.text.lower().split()
    states: tuple[State, ...] = ("running", "locked", "checkpointed", "failed")
    if not ran.in_time or len(words) != 1:
        return None
    return next((s for s in states if s == words[0]), None)


def _words(ran: Ran) -> str:
    """What a step said of itself, which need not be true."""
    if not ran.in_time:
        return "it was past its deadline and killed"
    return f"exit code {ran.code}, {ran.line}"


def _anothers(target: _Target, state: State) -> str:
    """Why one that is at rest already is none to suspend."""
    if state == "locked":
        return (
            f"{target} is locked already, by somebody else or an attempt that was broken off: "
            f"`cuda-checkpoint --action unlock --pid {target.pid}` frees it"
        )
    return f"somebody else has suspended {target}: it is left to him"


def _failed(target: _Target) -> str:
    return f"the CUDA state of {target} has failed: it can only be ended"
