"""How `io.weight` of a cgroup is read and encoded (cgroup v2 file).

Its text is "default WEIGHT", then a line for each device that has a weight of its own. Only the
default is turned; the lines of devices are left as they are.
"""

from concurrent.futures import Executor

from gpuagent.act.controlfile import ControlFile, FileKnob
from gpuagent.act.cpu import weight_below
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import Subject
from gpuagent.model.vocab import IO_WEIGHT
from gpuagent.ports import Cgroups, Real, Units

_DEFAULT = "default"


def _default_line(text: str) -> str:
    """The line of the default; all of the text where there is none, which is then not understood."""
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if line.startswith(f"{_DEFAULT} ")), text.strip())


class IoWeight(FileKnob):
    """`io.weight`: 1 to 10000, by default 100. The raw text is "default WEIGHT"."""

    knob: Knob = IO_WEIGHT

    def __init__(
        self, cgroups: Cgroups, executor: Executor | None = None, *, units: Units | None = None
    ) -> None:
        super().__init__(
            ControlFile(
                cgroups,
                "io.weight",
                executor,
                units=units,
                default=f"{_DEFAULT} 100",
                part=_default_line,
            )
        )

    def value(self, raw: str) -> float:
        word, weight = raw.split()
        if word != _DEFAULT:
            raise ValueError(raw)
        return float(int(weight))

    def encode(self, subject: Subject, value: float, original: Real) -> Real:
        return weight_below(value, original, f"{_DEFAULT} {{}}")
