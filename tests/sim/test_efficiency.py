"""Efficiency mode on every kind of simulated card, against exhaustive search over all its limits."""

from collections.abc import Callable, Iterable
from pathlib import Path

from gpuagent.decide.efficiency import Efficiency
from gpuagent.decide.tally import Measure
from gpuagent.model.inventory import Subject
from gpuagent.model.state import NodeState
from gpuagent.sim import profiles, scenario
from gpuagent.sim.card import Card
from gpuagent.sim.host import SimHost
from tests.sim.rig import SimRig

SHAPES = ("bert", "resnet", "speech", "shufflenet", "ncf")
"""Those that were fitted to measured traces of training."""
CASES = tuple((card, shape) for card in profiles.cards() for shape in SHAPES)
SLOWDOWN = 0.05
WITHIN = 1.05
SECONDS = 560.0


NEVER = 2**31


def described(cases: Iterable[tuple[str, str]], *, phases: bool) -> str:
    lines = ['name = "efficiency"', 'about = "Trainings of every shape."', "seconds = 3600"]
    lines += ["[host]", "cpus = 128"]
    rules = ["[agent]", 'mode = "enforce"', "[agent.efficiency]", "enabled = true"]
    rules += [f'slowdown = "{SLOWDOWN:.0%}"', 'settle = "30s"']
    for i, (card, shape) in enumerate(cases):
        name = f"{shape}-{card}"
        lines += ["[[cards]]", f'profile = "{card}"']
        lines += ["[[tenants]]", f'name = "{name}"', 'run = "graph-training"', f"card = {i}"]
        often = "" if phases else f", evaluate_every = {NEVER}, checkpoint_every = {NEVER}"
        lines += [f'set = {{ shape = "{shape}"{often} }}']
        rules += ["[[agent.tenants]]", f'name = "{name}"', 'sla = "L3"', 'kind = "training"']
        rules += [f'match = {{ unit = "{name}.service" }}']
    return "\n".join((*lines, *rules))


def made(cases: Iterable[tuple[str, str]], *, phases: bool = False) -> SimHost:
    return SimHost(scenario.parse(described(cases, phases=phases), source="test"), seed=1)


class Physics:
    """What the card's curve says of one kind of work at a limit."""

    def __init__(self, card: str, shape: str) -> None:
        self.profile = profiles.card(card)
        self.shape = self.profile.shapes[shape]
        self.curve = self.profile.curve
        self.top = self.profile.power_max_watts.value

    def rate(self, limit: float) -> float:
        """Steps a second, 1 for full clocks."""
        return 1 / self.curve.predict(limit, self.shape)[0]

    def proxy(self, limit: float) -> float:
        """Utilisation times clock, as a share of the highest."""
        busy = 1 - self.shape.host * self.rate(limit)
        return busy * self.curve.clock(limit, self.shape.busy_watts)

    def watts(self, limit: float) -> float:
        return self.curve.predict(limit, self.shape)[1]

    def excess(self, limit: float, progress: Callable[[float], float]) -> float:
        """Energy for a unit of progress, as a multiple of the least at any limit that is fast enough."""
        lowest = round(self.profile.power_min_watts.value)
        least = min(
            self.watts(w) / progress(w)
            for w in range(lowest, round(self.top) + 1)
            if progress(w) >= (1 - SLOWDOWN) * progress(self.top)
        )
        return self.watts(limit) / progress(limit) / least


async def test_it_is_within_five_percent_of_exhaustive_search_and_within_the_bound(
    tmp_path: Path,
) -> None:
    host, free = made(CASES), made(CASES)
    rig = SimRig(tmp_path, host)
    async with rig:
        await rig.follow(SECONDS)
        limits = [c.limit_watts for c in host.cards]
        before = taken(host)
        await rig.follow(100.0)
        assert [c.limit_watts for c in host.cards] == limits, "settled is settled"
        held = [b - a for a, b in zip(before, taken(host), strict=True)]
    free.advance(SECONDS)
    before = taken(free)
    free.advance(100.0)
    full = [b - a for a, b in zip(before, taken(free), strict=True)]
    for (card, shape), limit, slow, fast in zip(CASES, limits, held, full, strict=True):
        physics = Physics(card, shape)
        told = f"{shape} on {card} at {limit:.0f} W"
        assert physics.excess(limit, physics.proxy) <= WITHIN, f"{told}, as the agent sees it"
        if physics.shape.memory < 0.2:
            assert physics.excess(limit, physics.rate) <= WITHIN, f"{told}, by real progress"
        assert physics.rate(limit) >= (1 - SLOWDOWN) * physics.rate(physics.top), told
        assert slow >= (1 - SLOWDOWN - 0.01) * fast, f"{told}: {slow} of {fast} iterations"


def taken(host: SimHost) -> list[int]:
    return [host.progress(t.name).iterations for t in host.scenario.tenants]


async def test_evaluations_and_checkpoints_do_not_lead_it_astray(tmp_path: Path) -> None:
    cases = [(card, "bert") for card in profiles.cards()]
    host = made(cases, phases=True)
    async with SimRig(tmp_path, host) as rig:
        await rig.follow(900.0)
    for card, case in zip(host.cards, cases, strict=True):
        physics = Physics(*case)
        assert physics.excess(card.limit_watts, physics.rate) <= WITHIN
        assert physics.rate(card.limit_watts) >= (1 - SLOWDOWN) * physics.rate(physics.top)


async def test_where_progress_itself_is_counted_kernels_that_wait_for_memory_do_no_harm(
    tmp_path: Path,
) -> None:
    """The proxy takes their wait for slowdown. With a count of the work the best is found here too."""
    cases = [("v100", "speech"), ("v100", "shufflenet")]
    host = made(cases)
    physics = {c.uuid: Physics(*case) for c, case in zip(host.cards, cases, strict=True)}
    cards: dict[str, Card] = {c.uuid: c for c in host.cards}

    def counted(state: NodeState, card: Subject, since: float) -> tuple[float, ...]:
        assert state.now.mono >= since
        return (physics[card.gpu].rate(cards[card.gpu].enforced_watts),)

    rig = SimRig(tmp_path, host)
    rig.loop.policies = (Efficiency(rig.config, Measure("steps", counted)),)
    async with rig:
        await rig.follow(SECONDS)
    for card in host.cards:
        of = physics[card.uuid]
        assert of.excess(card.limit_watts, of.rate) <= WITHIN
        assert of.rate(card.limit_watts) >= (1 - SLOWDOWN) * of.rate(of.top)
