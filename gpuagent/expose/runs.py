"""Runs: the routes that start one and list them, and why one was refused.

Only who comes over the Unix socket can start one: the kernel says which process that is, and nothing
that is sent can name another. The process stays where it is asked from until it is admitted; who runs
in a tenant, or in a container, would leave what holds it, and is refused.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gpuagent.expose import environment
from gpuagent.expose.auth import Peer
from gpuagent.expose.gate import forbidden
from gpuagent.expose.paging import AFTER, BEFORE, LIMIT, mark, newest_first, part
from gpuagent.expose.picture import number, numbers
from gpuagent.expose.problems import Trouble
from gpuagent.expose.routes import Ask, Do, For, Get, Submit, Told, current
from gpuagent.expose.views import (
    Page,
    RefusalView,
    RunView,
    StartedView,
    VariableView,
    View,
)
from gpuagent.model.inventory import Inventory, Level
from gpuagent.model.plan import Snapshot, StartRun
from gpuagent.model.run import (
    BYTES_MOST,
    CARD,
    CPU_WEIGHT_MOST,
    MOST_CARDS,
    NAME,
    Refusal,
    Reservation,
    RunAsk,
)
from gpuagent.model.text import wire

_ASKED = "as the process starts"
_CARD_WORDS = {"words": "the UUID or the index of a card"}
_NAME_WORDS = {
    "words": "1 to 63 letters, digits and ._@-, of which the first is a letter or a digit"
}
"""What a text of these patterns is, for people."""


class RunBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the process that asks is to become."""

    sla: Literal["L1", "L2", "L3"]
    """L1 latency-critical, L2 batch, L3 best effort."""
    gpu_memory_bytes: Annotated[int, Meta(gt=0, le=BYTES_MOST)] | None = None
    """Device memory on each of its cards, reserved for it and its limit; null for neither."""
    share_ratio: Annotated[float, Meta(ge=0.01, le=1)] | None = None
    """Part of the multiprocessors of each card that it may use at most, under CUDA MPS."""
    gpus: Annotated[
        tuple[Annotated[str, Meta(pattern=f"^{CARD.pattern}$", extra=_CARD_WORDS)], ...],
        Meta(max_length=MOST_CARDS),
    ] = ()
    """Its cards, by UUID or index; empty for any `gpu_count` that it fits on."""
    gpu_count: Annotated[int, Meta(ge=1, le=MOST_CARDS)] = 1
    name: Annotated[str, Meta(pattern=f"^({NAME.pattern})?$", extra=_NAME_WORDS)] = ""
    """What it is to be called; empty to be given a name."""
    cpu_weight: Annotated[int, Meta(ge=1, le=CPU_WEIGHT_MOST)] | None = None
    host_memory_bytes: Annotated[int, Meta(gt=0, le=BYTES_MOST)] | None = None
    """Host memory beyond which the kernel ends a process of it."""
    strict: bool = False
    """Whether it is refused where it cannot have a scope of its own."""


# -- what is told --------------------------------------------------------------------------------------


def run_view(run: Reservation) -> RunView:
    return RunView(
        name=run.name,
        level=run.level.name,
        by=wire(run.by),
        gpus=run.gpus,
        memory_bytes=run.memory_bytes,
        share_ratio=run.share_ratio,
        began_at=number(run.began_wall),
        scope=run.unit or None,
        notes=tuple(map(wire, run.notes)),
    )


def _refusal_view(snapshot: Snapshot, refusal: Refusal) -> RefusalView:
    return RefusalView(
        id=mark(snapshot.run, refusal.number),
        wall=refusal.wall,
        by=wire(refusal.by),
        asked=wire(refusal.asked),
        kind=refusal.kind,
        why=wire(refusal.why),
        remedy=wire(refusal.remedy),
        numbers=numbers(refusal.numbers),
    )


def _own(peer: Peer, uid: int) -> bool:
    """Whether what this user of the host has asked for is for this reader."""
    if peer.sees_all:
        return True
    return peer.local and peer.caller is not None and peer.caller.credentials.uid == uid


def _runs(told: Told, ask: Ask) -> View:
    active = [r for r in current(told).runs.active if _own(ask.peer, r.uid)]
    wanted, after = part(ask.query, [r.name for r in active])
    return Page(items=tuple(map(run_view, active[wanted])), next=after, total=len(active))


def _refusals(told: Told, ask: Ask) -> View:
    snapshot = current(told)
    some = [r for r in snapshot.runs.refused if _own(ask.peer, r.uid)]
    found, after = newest_first(ask.query, some, snapshot.run)
    items = tuple(_refusal_view(snapshot, r) for r in found)
    return Page(items=items, next=after, total=len(some))


# -- its environment -----------------------------------------------------------------------------------


def variables(snapshot: Snapshot, run: Reservation, told: Told) -> tuple[VariableView, ...]:
    """All that its process is to have in its environment; each name once."""
    cards = snapshot.state.inventory.gpus
    socket = next((one.address for one in told.access().listeners if one.name == "unix"), "")
    promise = environment.Promise(run.name, run.level, run.memory_bytes, present=True)
    common = environment.variables(promise, None if cards is None else len(cards), socket)
    own = tuple(_of_run(run, snapshot.state.inventory))
    named = {v.name for v in own}
    return (*(v for v in common if v.name not in named), *own)


def _of_run(run: Reservation, inventory: Inventory) -> Iterator[VariableView]:
    yield VariableView(
        "CUDA_VISIBLE_DEVICES", ",".join(run.gpus), "the cards that it was admitted to", _ASKED
    )
    if run.share_ratio is not None:
        yield VariableView(
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
            f"{100 * run.share_ratio:g}",
            "the share that it was admitted with: a ceiling under CUDA MPS, and nothing without",
            "as the process starts, if it is a client of an MPS server then",
        )
    daemon = environment.daemon_on(inventory, run.gpus)
    if daemon is not None:
        yield VariableView(
            "CUDA_MPS_PIPE_DIRECTORY", daemon.pipe_directory, "the MPS daemon of its cards", _ASKED
        )


# -- starting ------------------------------------------------------------------------------------------


async def _start(told: Told, ask: Ask, submit: Submit) -> View:
    asked = _asked(ask.peer, ask.body)
    if not asked.admin:
        told.knocks.admit(asked.uid, told.clock.now().mono)
    await submit(StartRun(asked))
    snapshot = current(told)
    made = snapshot.runs.of_process(asked.key)
    if made is None:
        raise Trouble(
            503, "the run is admitted, but the loop has not taken it up", "try again", retry_after=1
        )
    return StartedView(
        run=run_view(made),
        variables=variables(snapshot, made, told),
        numa_nodes=_nodes(snapshot, made),
    )


def _nodes(snapshot: Snapshot, run: Reservation) -> tuple[int, ...]:
    cards = (snapshot.state.inventory.gpu(uuid) for uuid in run.gpus)
    nodes = [None if card is None else card.numa_node for card in cards]
    return tuple(sorted({n for n in nodes if n is not None})) if None not in nodes else ()


def _asked(peer: Peer, body: RunBody) -> RunAsk:
    """Raises Trouble (403) where it is not the host's kernel that says who asks, or from where."""
    caller = peer.caller
    if caller is None or caller.origin is None or not peer.local:
        raise forbidden(peer, "start a tenant")
    credentials = caller.credentials
    return RunAsk(
        pid=credentials.pid,
        started=caller.origin.started,
        uid=credentials.uid,
        gids=credentials.groups,
        admin=peer.admin,
        by=peer.label,
        level=Level[body.sla],
        name=body.name,
        memory_bytes=body.gpu_memory_bytes,
        share_ratio=body.share_ratio,
        gpus=body.gpus,
        count=body.gpu_count,
        cpu_weight=body.cpu_weight,
        host_memory_bytes=body.host_memory_bytes,
        strict=body.strict,
    )


GETS: tuple[Get, ...] = (
    Get(
        path="/v1/runs",
        audience=For.ANYONE,
        about="What `gpuagent run` has started and lives, by name: all for who sees everything, "
        "their own for others.",
        answer=_runs,
        view=Page[RunView],
        query=(LIMIT, AFTER),
    ),
    Get(
        path="/v1/refusals",
        audience=For.ANYONE,
        about="What it was refused lately, and why, the latest first: of all users for who sees "
        "everything, their own for others.",
        answer=_refusals,
        view=Page[RefusalView],
        query=(LIMIT, BEFORE),
        statuses=(404,),
    ),
)
DOS: tuple[Do, ...] = (
    Do(
        path="/v1/runs",
        audience=For.LOCALS,
        about="Make a tenant of the process that asks, over the Unix socket, if it fits. Who may "
        "start what is configured ([run]).",
        answer=_start,
        view=StartedView,
        body=RunBody,
        status=201,
        statuses=(404, 409, 429),
    ),
)
