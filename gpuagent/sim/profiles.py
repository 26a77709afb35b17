"""What the simulated cards, the host and the workloads are made of, from the files in `profiles/`.

Every coefficient has its source there, or the word "assumed"; none is written in the code.
"""

from collections.abc import Mapping
from importlib import resources
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from gpuagent.errors import ConfigError
from gpuagent.sim.curve import Curve, Shape
from gpuagent.sim.reading import Problem, document, wrong
from gpuagent.sim.work import Work

Source = Annotated[str, Meta(min_length=7)]
Coefficient = Annotated[float, Meta(ge=0, le=2**60)]
T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


class Number(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A coefficient and where it comes from."""

    value: Coefficient
    source: Source


class Flag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    value: bool
    source: Source


class CardProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of card."""

    name: str
    idle_watts: Number
    knee: Number
    order: Number
    memory_bytes: Number
    context_bytes: Number
    """Device memory that a process takes by using the card at all."""
    power_min_watts: Number
    power_max_watts: Number
    """Range of the limit; the highest is the default."""
    power_averaged: Flag
    """Whether the power that is read is an average over a second."""
    power_noise_ratio: Number
    """Standard deviation of what is read."""
    clock_hertz: Number
    """Highest clock of the SMs."""
    limit_delay_min_seconds: Number
    limit_delay_max_seconds: Number
    """Until a new power limit acts."""
    thermal_celsius_per_watt: Number
    thermal_seconds: Number
    slowdown_celsius: Number
    """Temperature at which the driver takes clocks down."""
    slowdown_clock_per_second: Number
    time_slice_seconds: Number
    """How long another tenant keeps the card once it has it."""
    contention_ratio: Number
    """How much of the law of `sharing` tenants feel of each other: 1 for all of it, 0 for nothing."""
    utilization_window_seconds: Number
    shapes: dict[str, Shape]

    @property
    def curve(self) -> Curve:
        return Curve(idle_watts=self.idle_watts.value, knee=self.knee.value, order=self.order.value)


class HostProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The host around the cards."""

    cpus: Number
    memory_bytes: Number
    memory_system_bytes: Number
    throttled_counts_in_node_pressure: Flag
    """Whether threads that cpu.max holds count as waiting in the pressure of the whole host."""


class MpsProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """CUDA MPS: see `sharing` for what the ratios do."""

    contexts_per_card: Number
    server_bytes: Number
    interference_ratio: Number
    ceiling_effect: Number
    """How much of a thread percentage is kept to: 1 for all of it, 0 for nothing."""
    frozen_client_stretch: Number
    width: dict[str, Number]
    """By the name of the shape."""


def converted(value: object, kind: type[T], *, where: str) -> T:
    """A TOML value as a struct. Raises ConfigError with every problem and its key."""
    problems = [f"{where}: {problem}" for problem in wrong(kind, value)]
    if problems:
        raise ConfigError(problems)
    return msgspec.convert(value, kind)


def _read(name: str) -> dict[str, object]:
    text = resources.files("gpuagent.sim").joinpath("profiles", f"{name}.toml").read_text("utf-8")
    return document(text, where=f"profiles/{name}.toml")


def cards() -> tuple[str, ...]:
    """Names of the kinds of card there are."""
    folder = resources.files("gpuagent.sim").joinpath("profiles")
    names = (entry.name.removesuffix(".toml") for entry in folder.iterdir())
    return tuple(sorted(name for name in names if name not in {"host", "mps", "workloads"}))


def card(name: str, changes: Mapping[str, float] | None = None) -> CardProfile:
    """A kind of card, with other values for some of its numbers.

    Raises ConfigError where there is no such kind of card or number.
    """
    known = cards()
    if name not in known:
        raise ConfigError([f"{name} is no kind of card; there are {', '.join(known)}"])
    return _changed(name, CardProfile, changes or {})


def mps(changes: Mapping[str, float] | None = None) -> MpsProfile:
    """CUDA MPS, with other values for some of its numbers. Raises ConfigError."""
    return _changed("mps", MpsProfile, changes or {})


def _changed(name: str, kind: type[S], changes: Mapping[str, float]) -> S:
    made = converted(_read(name), kind, where=f"profiles/{name}.toml")
    numbers = [f for f in made.__struct_fields__ if isinstance(getattr(made, f), Number)]
    unknown = [c for c in changes if c not in numbers]
    if unknown:
        raise ConfigError(
            [f"set.{c}: no number of {name}; it has {', '.join(numbers)}" for c in unknown]
        )
    given = {c: Number(value, "given by the scenario") for c, value in changes.items()}
    return msgspec.structs.replace(made, **given)


def host() -> HostProfile:
    return converted(_read("host"), HostProfile, where="profiles/host.toml")


def work_problems(name: str, changes: dict[str, object]) -> list[Problem]:
    """What is wrong with a workload and the changes to it: at `run`, or at keys of `set`."""
    known = _read("workloads")
    preset = known.get(name)
    if not isinstance(preset, dict):
        return [Problem(("run",), f"{name!r} is no workload; there are {', '.join(known)}")]
    found = wrong(Work, {**preset, **changes})
    return [Problem(("set", *problem.path), problem.text) for problem in found]


def work(name: str, changes: dict[str, object], *, where: str) -> Work:
    """A workload of `profiles/workloads.toml` with changes. Raises ConfigError."""
    problems = [f"{where}: {problem}" for problem in work_problems(name, changes)]
    if problems:
        raise ConfigError(problems)
    preset = _read("workloads")[name]
    assert isinstance(preset, dict)  # else there were problems
    made: Work = msgspec.convert({**preset, **changes}, Work)
    return made
