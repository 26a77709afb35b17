"""The policy that keeps each card as [[cards]] declares it: compute mode, persistence mode, time slice.

Modes bring no relief and follow no cause: they are wished for as long as they are declared. A compute
mode that would keep a process of somebody's from starting again is reported, and not tried.
"""

from collections.abc import Iterator

from gpuagent.config import Card, Config
from gpuagent.decide.causes import label
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import Gpu, GpuProcess, on_gpu
from gpuagent.model.plan import Blocked, Decision, Setting
from gpuagent.model.state import NodeState
from gpuagent.model.vocab import COMPUTE_MODE, PERSISTENCE_MODE, TIME_SLICE

RULE = "cards/declared"
_PROHIBITED = 2
_EXCLUSIVE = 3
_COMPUTE_MODES = {"default": 0, "prohibited": _PROHIBITED, "exclusive_process": _EXCLUSIVE}
_TIME_SLICES = {"default": 0, "short": 1, "medium": 2, "long": 3}


class Cards:
    """See the module. It remembers nothing."""

    name = "cards"

    def __init__(self, config: Config) -> None:
        self._config = config

    def begin(self) -> tuple[()]:
        return ()

    def decide(self, memory: tuple[()], state: NodeState) -> tuple[tuple[()], Decision]:
        gpus = state.inventory.gpus
        if not self._config.cards or gpus is None:
            return memory, Decision(complete=not self._config.cards)
        return memory, Decision(settings=tuple(self._settings(state, gpus)))

    def _settings(self, state: NodeState, gpus: tuple[Gpu, ...]) -> Iterator[Setting]:
        for gpu in gpus:
            card = self._config.card(gpu.uuid)
            if card is None:
                continue
            if word := card.compute_mode:
                mode = _COMPUTE_MODES[word]
                conflict = _conflict(mode, gpu, state)
                yield _setting(COMPUTE_MODE, gpu, mode, card=card, word=word, conflict=conflict)
            if (on := card.persistence_mode) is not None:
                on_off = "on" if on else "off"
                yield _setting(PERSISTENCE_MODE, gpu, int(on), card=card, word=on_off)
            if name := card.time_slice:
                yield _setting(TIME_SLICE, gpu, _TIME_SLICES[name], card=card, word=name)


def _setting(
    knob: Knob, gpu: Gpu, value: int, *, card: Card, word: str, conflict: str = ""
) -> Setting:
    what = knob.name.removeprefix("gpu_").replace("_", " ")
    return Setting(
        knob,
        on_gpu(gpu.uuid),
        float(value),
        why=f"{what} {word}, as [[cards]] with gpu = {card.gpu!r} declares it",
        rule=RULE,
        blocked=Blocked("refused", conflict) if conflict else None,
    )


def _conflict(mode: int, gpu: Gpu, state: NodeState) -> str:
    """Whom this compute mode would keep from starting again; empty for nobody.

    All clients of an MPS server are one process to the driver, so that exclusive_process is right for
    them, and NVIDIA's manual recommends it.
    """
    if mode not in (_PROHIBITED, _EXCLUSIVE):
        return ""
    listed = state.inventory.gpu_processes
    if listed is None:
        return f"who has a context on {label(gpu)} is not known"
    present = [p for p in listed if p.gpu == gpu.uuid and p.kind != "graphics"]
    if mode == _PROHIBITED:
        return f"{_who(present, state)} could not start again on {label(gpu)}" if present else ""
    alone = [p for p in present if p.kind == "compute"]
    through_mps = len(present) > len(alone)
    # One process that is no client is the MPS server itself, as far as the driver lists it.
    if len(alone) <= 1:
        return ""
    beside = " beside MPS" if through_mps else ""
    return (
        f"{_who(alone, state)} share {label(gpu)}{beside}: but for one of these "
        f"{len(alone)} processes, none could start again"
    )


def _who(processes: list[GpuProcess], state: NodeState) -> str:
    """The tenants these processes belong to, in words; those of none by number."""
    owners = state.inventory.owners()
    names = sorted(
        {owners[p.pid].name if p.pid in owners else f"process {p.pid}" for p in processes}
    )
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
