"""What is done for `gpuagent run`: one decision at a time, a place for the process, and what is told of it.

The decision and its registration are one step: two who ask at once are never promised the same memory.
A run that is registered is promised what it asked for from then on, also while its scope is made.
"""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from gpuagent.clock import Clock
from gpuagent.config import Config, Launch
from gpuagent.decide.admission import Grant, Ground, admit, unshared
from gpuagent.errors import AgentError, Forbidden, Gone, Refused, Unavailable, Unsupported
from gpuagent.model.audit import Action
from gpuagent.model.inventory import NODE, Gpu, on_tenant
from gpuagent.model.plan import Posture
from gpuagent.model.run import Refusal, Reservation, RunAsk, Starter, gib
from gpuagent.model.state import Event, NodeState
from gpuagent.ports import Processes, Scopes, ScopeWish
from gpuagent.runbook import RunBook

_CARD_FILES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
"""What every CUDA process opens beside its cards (open-gpu-kernel-modules, nvidia-modprobe)."""
_ERRORS = {"forbidden": Forbidden, "refused": Refused, "unavailable": Unavailable}
TOLD_AGAIN_SECONDS = 60.0
"""A refusal that one user gets again and again is an event so often."""


class Registrar:
    """Admits runs, or says why not. Everything it needs of the host is given to it."""

    def __init__(
        self,
        *,
        book: RunBook,
        scopes: Scopes,
        processes: Processes,
        starters: Callable[[Sequence[Launch]], tuple[Starter, ...]],
        config: Callable[[], Config],
        state: Callable[[], tuple[NodeState, Posture] | None],
        clock: Clock,
        tell: Callable[[Event], None],
        audit: Callable[[Action], None],
    ) -> None:
        """`starters` looks users and groups up, and may wait for that: it is called in a thread.

        `state` is what was published last; None before the first tick.
        """
        self._book = book
        self._scopes = scopes
        self._processes = processes
        self._starters = starters
        self._config = config
        self._state = state
        self._clock = clock
        self._tell = tell
        self._audit = audit
        self._told: dict[tuple[int, str], float] = {}

    async def start(self, ask: RunAsk) -> str:
        """Admit a run and make its scope. Returns a sentence on it.

        Raises Forbidden, Refused, Unavailable, Gone with what to do; then nothing is reserved.
        """
        made, cards = await self._register(ask)
        try:
            made = await self._placed(ask, made, cards)
        except AgentError as error:
            self._book.end((made.key,))
            if not isinstance(error, Gone):
                self._note_refusal(Refusal(kind="refused", why=str(error)), ask)
            raise
        except BaseException:  # cancelled: nobody waits for it any more
            self._book.end((made.key,))
            raise
        self._book.amend(made)
        text = f"run {made.name} of {ask.by} is admitted: {_promised(made, cards)}"
        self._note_admission("; ".join((text, *made.notes)), made)
        return text

    async def _register(self, ask: RunAsk) -> tuple[Reservation, tuple[Gpu, ...]]:
        config = self._config()
        starters = await asyncio.to_thread(self._starters, config.run.allow)
        async with self._book.changing:
            await asyncio.to_thread(self._check_alive, ask)
            ground = self._ground(config, starters)
            verdict = admit(ask, ground)
            if isinstance(verdict, Refusal):
                self._note_refusal(verdict, ask)
                raise _ERRORS[verdict.kind](verdict.text)
            unmet = unshared(ask, verdict.gpus, ground.state.inventory)
            made = self._reservation(ask, verdict, notes=(unmet,) if unmet else ())
            await self._book.add(made)
        return made, verdict.gpus

    def _check_alive(self, ask: RunAsk) -> None:
        """Raises Gone where another process has its number by now."""
        if self._processes.read(ask.pid).started != ask.started:
            raise Gone(f"process {ask.pid} has ended")

    def _ground(self, config: Config, starters: tuple[Starter, ...]) -> Ground:
        """Raises Unavailable before the first look at the host."""
        found = self._state()
        if found is None:
            raise Unavailable("the agent has not finished its first look at the host; try again")
        state, posture = found
        return Ground(
            state=state,
            runs=self._book.active(),
            starters=starters,
            levels=config.levels,
            declared=frozenset(t.name for t in config.tenants),
            released=posture.released,
        )

    def _reservation(self, ask: RunAsk, grant: Grant, *, notes: tuple[str, ...]) -> Reservation:
        return Reservation(
            name=grant.name,
            level=ask.level,
            pid=ask.pid,
            started=ask.started,
            uid=ask.uid,
            by=ask.by,
            gpus=tuple(g.uuid for g in grant.gpus),
            memory_bytes=ask.memory_bytes,
            share_ratio=ask.share_ratio,
            began_wall=self._clock.now().wall,
            notes=notes,
        )

    # -- its scope -----------------------------------------------------------------------------------

    async def _placed(self, ask: RunAsk, made: Reservation, cards: tuple[Gpu, ...]) -> Reservation:
        """The same in a scope, or with the reason why it has none. Raises as `Scopes.start`."""
        devices = device_files(cards, self._config().run.devices)
        lacks: tuple[str, ...] = ()
        if devices is None:
            lacks = (
                "which device files its cards have is not known: it may open those of any card",
            )
            if ask.strict:
                raise Refused(f"{lacks[0]}; --strict needs them")
        wish = ScopeWish(
            unit=f"gpuagent-run-{made.pid}-{made.started}.scope",
            slice=self._config().run.slice,
            description=f"gpuagent run {made.name} ({made.level.name})",
            pid=made.pid,
            started=made.started,
            uid=made.uid,
            devices=devices,
            cpu_weight=ask.cpu_weight,
            memory_max_bytes=ask.host_memory_bytes,
        )
        try:
            cgroup = await self._scopes.start(wish)
        except (Unsupported, Refused, Unavailable) as error:
            if ask.strict:
                raise type(error)(f"--strict needs a scope, and there is none: {error}") from error
            lacks = (f"it has no scope of its own ({error}), so that it is not held back",)
            return msgspec.structs.replace(made, notes=(*made.notes, *lacks))
        notes = (*made.notes, *lacks)
        return msgspec.structs.replace(made, unit=wish.unit, cgroup=cgroup, notes=notes)

    # -- what is told --------------------------------------------------------------------------------

    def _note_refusal(self, verdict: Refusal, ask: RunAsk) -> None:
        now = self._clock.now()
        refusal = self._book.refuse(
            msgspec.structs.replace(verdict, uid=ask.uid, by=ask.by, asked=ask.words, wall=now.wall)
        )
        key = (ask.uid, refusal.kind)
        self._told = {k: at for k, at in self._told.items() if now.mono - at < TOLD_AGAIN_SECONDS}
        if key in self._told:
            return
        self._told[key] = now.mono
        text = f"a run of {ask.by} ({ask.words}) is refused: {refusal.why}"
        self._tell(Event("run-refused", now.mono, text, numbers=refusal.numbers))
        self._audit(
            Action(
                wall=now.wall,
                knob="run",
                subject=NODE,
                did="not started",
                result="refused",
                why=text,
                rule=f"run/{refusal.kind}",
                numbers=refusal.numbers,
            )
        )

    def _note_admission(self, text: str, made: Reservation) -> None:
        now, subject, numbers = self._clock.now(), on_tenant(made.name), _numbers(made)
        self._tell(Event("run-admitted", now.mono, text, subject, numbers))
        self._audit(
            Action(
                wall=now.wall,
                knob="run",
                subject=subject,
                did="started",
                result="applied",
                why=text,
                rule="run/admitted",
                after=made.unit,
                numbers=numbers,
            )
        )


def device_files(cards: Sequence[Gpu], more: Sequence[str]) -> tuple[str, ...] | None:
    """What a process on these cards has to open; None where the number of a card's file is not known."""
    numbers = [card.minor for card in cards]
    if None in numbers:
        return None
    return (*(f"/dev/nvidia{n}" for n in numbers), *_CARD_FILES, *more)


def _promised(made: Reservation, cards: Sequence[Gpu]) -> str:
    where = f"{made.level.name} on GPU {', '.join(str(g.index) for g in cards)}"
    if made.memory_bytes is None:
        return where
    return f"{where}, {gib(made.memory_bytes)} reserved on each"


def _numbers(made: Reservation) -> tuple[tuple[str, float], ...]:
    pairs = (("memory_bytes", made.memory_bytes), ("share_ratio", made.share_ratio))
    return tuple((name, float(value)) for name, value in pairs if value is not None)
