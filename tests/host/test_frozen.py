"""host.frozen: who waits to be thawed, and who waits in vain."""

import pytest

from gpuagent.errors import AgentError, Gone, Refused, Unavailable
from gpuagent.host.frozen import Thaw, frozen_by_cgroup
from gpuagent.ports import Cgroups
from tests.act.host import Clock
from tests.sense.fakes import FakeCgroups, FakeProcesses, process


class Closed(FakeCgroups):
    """A tree that cannot be read."""

    def __init__(self, error: AgentError) -> None:
        super().__init__()
        self._error = error

    def read(self, path: str, file: str) -> str:
        raise self._error


def test_a_process_is_frozen_where_its_cgroup_or_one_above_is() -> None:
    cgroups = FakeCgroups()
    cgroups.make("/a", cgroup_events="populated 1\nfrozen 1")
    cgroups.make("/b", cgroup_events="populated 1\nfrozen 0")
    cgroups.make("/c")
    paths = ("/a", "/b", "/c", "/", "")
    processes = FakeProcesses(*(process(n, path) for n, path in enumerate(paths, start=1)))
    tree: Cgroups = cgroups
    frozen = frozen_by_cgroup(processes, tree)
    assert [frozen(pid) for pid in range(1, 6)] == [True, False, None, False, False]
    with pytest.raises(Gone):
        frozen(6)


@pytest.mark.parametrize("kind", [Unavailable, Refused])
def test_where_the_tree_cannot_be_read_it_is_not_known(kind: type[AgentError]) -> None:
    frozen = frozen_by_cgroup(FakeProcesses(process(1, "/a")), Closed(kind("no")))
    assert frozen(1) is None


async def test_one_that_stays_frozen_is_refused_after_a_while_and_only_then() -> None:
    clock, frozen = Clock(), dict[int, bool | None]()
    thaw = Thaw(lambda pid: frozen.get(pid, False), clock)
    await thaw.see(7, 1)
    frozen[7] = True
    for _ in range(3):
        with pytest.raises(Unavailable, match="waits until it is thawed"):
            await thaw.see(7, 1)
        clock.mono += 10
    with pytest.raises(Refused, match="somebody else has frozen process 7, for 30 s"):
        await thaw.see(7, 1)
    with pytest.raises(Unavailable):
        await thaw.see(7, 2)  # Another process of the same number.
    frozen[7] = False
    await thaw.see(7, 1)
    frozen[7] = True
    with pytest.raises(Unavailable):
        await thaw.see(7, 1)


async def test_one_of_which_it_is_not_known_waits_for_ever() -> None:
    clock = Clock()
    thaw = Thaw(lambda _pid: None, clock)
    for _ in range(3):
        with pytest.raises(Unavailable, match="not known whether process 7 is frozen"):
            await thaw.see(7, 1)
        clock.mono += 100
