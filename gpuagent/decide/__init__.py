"""Pure decisions: states in, wishes out. No clock, I/O, logging, asyncio or randomness here."""

from collections.abc import Callable
from typing import Any

from gpuagent.config import Config
from gpuagent.decide.backpressure import Backpressure
from gpuagent.decide.cards import Cards
from gpuagent.decide.efficiency import Efficiency
from gpuagent.decide.hours import Hours
from gpuagent.decide.limits import Limits
from gpuagent.decide.mps import MpsGroups
from gpuagent.decide.overrides import Overrides
from gpuagent.decide.power import PowerBudget
from gpuagent.decide.powercap import PowerCap
from gpuagent.ports import Policy

POLICIES: tuple[Callable[[Config], Policy[Any]], ...] = (
    Backpressure,
    PowerBudget,
    PowerCap,
    Efficiency,
    Cards,
    Overrides,
    Hours,
    MpsGroups,
    Limits,
)
"""Every policy there is, in the order in which they are asked. To add one, add it here."""
