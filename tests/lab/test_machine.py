"""Random lives: tenants, pressures, faults, crashes, overrides, rivals, and what holds at every write."""

import asyncio
import tempfile
from pathlib import Path

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from gpuagent.errors import AgentError, Gone
from gpuagent.model.inventory import on_gpu, on_tenant
from gpuagent.model.lease import Override
from gpuagent.model.plan import Command, DropOverride, Pause, SetOverride, Unpause
from gpuagent.sim.scenario import Ambient, Load, Scenario, Xid
from tests.lab.watched import Watched

RUNS = {
    "chat": ("chat", 0),
    "batch": ("batch-inference", 0),
    "training": ("bert-training", 0),
    "grower": ("grower", 0),
    "graph": ("graph-training", 1),
    "notebook": ("notebook", 1),
}
OTHERS = [name for name in RUNS if name != "chat"]
LEVERS = ("notice", "cpu_weight", "io_weight", "cpu_max", "mps", "freeze", "suspend", "terminate")
FAMILIES = (*LEVERS, "power_limit", "host_memory", "clock_limit", "card_mode")

OFTEN = (("cpu_weight", "cpu_max"), ("freeze",), ("suspend",), ("cpu_max", "terminate"))


def some(names: tuple[str, ...]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(names), unique=True)


tenants = st.sampled_from(OTHERS)
cards = st.integers(0, 1)


@st.composite
def rules(draw: st.DrawFn, name: str) -> dict[str, object]:
    """A tenant's rule: any level below L1, any levers, any floor, some hours, some reservation."""
    if name == "chat":
        promised = draw(st.sampled_from([None, "4GiB", "30GiB"]))
        return {
            "name": name,
            "sla": "L1",
            "match": {"unit": "chat.service"},
            "latency_slo": draw(st.sampled_from(["30ms", "150ms"])),
            **({} if promised is None else {"memory_reserved": promised}),
        }
    levers = draw(st.sampled_from([[*x] for x in (LEVERS, *OFTEN)]) | some(LEVERS))
    hours = [[], ["00:00-12:00"], ["12:00-00:00"]] if "cpu_max" in levers else [[]]
    return {
        "name": name,
        "sla": draw(st.sampled_from(["L2", "L3"])),
        "match": {"unit": f"{name}.service"},
        "levers": levers,
        "min_share": draw(st.sampled_from(["5%", "20%", "80%"])),
        "hours": draw(st.sampled_from(hours)),
        "observe": draw(st.sampled_from([False] * 5 + [True])),
        "hold_back": draw(st.sampled_from([True] * 5 + [False])),
    }


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """A host with two cards on which all of them run, and an agent that acts."""
    families = draw(st.none() | st.none() | some(FAMILIES))
    made = {
        "name": "machine",
        "about": "Anything at all.",
        "seconds": 600_000.0,
        "cards": [{"profile": "a40"}, {"profile": draw(st.sampled_from(["a40", "v100"]))}],
        "tenants": [
            {
                "name": name,
                "run": run,
                "card": card,
                **({"objective": {"seconds": 0.15}} if name == "chat" else {}),
            }
            for name, (run, card) in RUNS.items()
        ],
        "agent": {
            "mode": "enforce",
            "power": {"budget": draw(st.sampled_from(["300W", "420W", "500W"]))},
            "backpressure": {
                "control": draw(st.sampled_from(["aimd", "pi"])),
                "dwell": "1s",
                "time_box": "5s",
                "probe_min": "5s",
            },
            "efficiency": {"enabled": draw(st.booleans()), "settle": "5s"},
            "tenants": [draw(rules(name)) for name in RUNS],
            **({} if families is None else {"enforce": {"families": families}}),
        },
    }
    return msgspec.convert(made, Scenario)


class Life(RuleBasedStateMachine):
    """Everything that can happen to an agent that acts."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self._runner = asyncio.Runner()
        self._life: Watched | None = None
        self._asked: list[asyncio.Future[str]] = []

    @property
    def life(self) -> Watched:
        assert self._life is not None
        return self._life

    @initialize(scenario=scenarios(), seed=st.integers(0, 1000))
    def begin(self, scenario: Scenario, seed: int) -> None:
        async def begin() -> Watched:
            life = Watched(scenario, seed=seed, folder=Path(self._folder.name))
            await life.begin()
            return life

        self._life = self._runner.run(begin())

    @rule(times=st.integers(1, 5))
    def a_moment_passes(self, times: int) -> None:
        self._runner.run(self._ticks(times))

    @rule(times=st.integers(15, 40))
    def a_while_passes(self, times: int) -> None:
        self._runner.run(self._ticks(times))

    @rule()
    def a_minute_passes(self) -> None:
        self._runner.run(self._ticks(60))

    async def _ticks(self, times: int) -> None:
        await self.life.tick(times)
        for asked in [a for a in self._asked if a.done()]:
            error = asked.exception()
            assert error is None or isinstance(error, AgentError), error
            self._asked.remove(asked)

    # -- what the tenants do -------------------------------------------------------------------------

    @rule(name=tenants | st.just("chat"))
    def one_stops(self, name: str) -> None:
        self.life.trial.host.stop(name)

    @rule(name=tenants | st.just("chat"))
    def one_starts(self, name: str) -> None:
        self.life.trial.host.start(name)

    @rule(rate=st.sampled_from([5.0, 45.0, 80.0]))
    def the_load_changes(self, rate: float) -> None:
        self.life.trial.host.happen(Load(at=0.0, tenant="chat", rate=rate))

    # -- what the host does --------------------------------------------------------------------------

    @rule(card=cards, celsius=st.sampled_from([20.0, 45.0]))
    def the_air_changes(self, card: int, celsius: float) -> None:
        self.life.trial.host.happen(Ambient(at=0.0, card=card, celsius=celsius))

    @rule(card=cards, seconds=st.floats(0.5, 8.0))
    def the_driver_hangs(self, card: int, seconds: float) -> None:
        self.life.hang(card, seconds)

    @rule(card=cards, name=tenants)
    def a_process_faults(self, card: int, name: str) -> None:
        self.life.trial.host.happen(Xid(at=0.0, card=card, xid=31, tenant=name))

    # -- what people do ------------------------------------------------------------------------------

    @rule(name=tenants, text=st.sampled_from(["50000 100000", "max 100000", "20000 20000"]))
    def a_rival_sets_a_quota(self, name: str, text: str) -> None:
        try:
            self.life.rival(f"/system.slice/{name}.service", "cpu.max", text)
        except Gone:
            return

    @rule(share=st.sampled_from([0.1, 0.5, 1.0]), name=st.sampled_from([*RUNS]))
    def a_share_is_overridden(self, share: float, name: str) -> None:
        self._ask(SetOverride(_override(on_tenant(name), share)))

    @rule(watts=st.sampled_from([150.0, 250.0]), card=cards)
    def a_card_is_overridden(self, watts: float, card: int) -> None:
        uuid = self.life.trial.host.cards[card].uuid
        self._ask(SetOverride(_override(on_gpu(uuid), watts)))

    @rule()
    def an_override_is_dropped(self) -> None:
        self._ask(DropOverride("somebody", "o"))

    @rule()
    def it_is_paused(self) -> None:
        self._ask(Pause("somebody"))

    @rule()
    def it_may_go_on(self) -> None:
        self._ask(Unpause("somebody"))

    def _ask(self, command: Command) -> None:
        async def ask() -> None:
            inbox = self.life.trial.core.loop.inbox
            self._asked.append(asyncio.ensure_future(inbox.submit(command)))
            await asyncio.sleep(0)

        self._runner.run(ask())

    # -- how it ends ---------------------------------------------------------------------------------

    @rule()
    def it_is_killed(self) -> None:
        self._runner.run(self._again(self.life.crash()))

    @precondition(lambda self: self._life is not None)
    @rule()
    def it_is_restarted(self) -> None:
        self._runner.run(self._again(self.life.restart()))

    async def _again(self, ending: object) -> None:
        await ending  # type: ignore[misc]
        for asked in self._asked:
            asked.cancel()
        self._asked.clear()

    def teardown(self) -> None:
        if self._life is not None:
            self._runner.run(self._end())
        self._runner.close()
        self._folder.cleanup()

    async def _end(self) -> None:
        for asked in self._asked:
            asked.cancel()
        await self.life.recover()
        await self.life.restart()
        await self.life.end()


def _override(subject: object, value: float) -> Override:
    return Override(
        id="o",
        subject=subject,  # type: ignore[arg-type]
        value=value,
        ttl_seconds=30.0,
        by="somebody",
        why="to see what comes of it",
    )


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=5,
    stateful_step_count=14,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
