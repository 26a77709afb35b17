"""Overrides: how a tenant or a card is to be treated, by somebody's word, for a limited time."""

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec

from gpuagent.model.declare import On
from gpuagent.model.inventory import Gpu, Inventory, Level, Subject, Tenant

MOST_LEASES = 64
USED_CORES = "used_before_cores"
"""Names, among the numbers of a setting, the CPU that its share is a share of."""
MOST_USED = 64
"""Cgroups of one tenant of which is kept what they used."""
TTL_MIN_SECONDS = 1.0
TTL_MAX_SECONDS = 30 * 86400.0
SHARE_MIN_RATIO = 0.05
WATTS_MAX = 1e6
WHY_MOST = 200
"""Characters."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What an override may be called."""


class Used(msgspec.Struct, frozen=True):
    """The CPU that one cgroup used before it was held: a share is a share of this."""

    cgroup: str
    inode: int
    cores: float


class Override(msgspec.Struct, frozen=True):
    """What is asked for."""

    id: str
    """Its name, chosen by who asks; see `NAME`."""
    subject: Subject
    """A tenant or a card."""
    value: float
    """Of a tenant the share it is held to, of a card its power limit in watts. A share of 1 leaves the
    tenant alone, whatever the policies wish."""
    ttl_seconds: float
    by: str
    why: str

    @property
    def rule(self) -> str:
        """The rule of the settings that it leads to."""
        return f"override/{self.id}"

    @property
    def on_tenant(self) -> bool:
        return self.subject.on is On.TENANT

    def fault(self) -> str:
        """What is wrong with it, whatever the host is like; empty if nothing is."""
        if not NAME.fullmatch(self.id):
            return (
                "the name of an override has 1 to 64 letters, digits, dots, dashes and underscores, "
                "and begins with a letter or a digit"
            )
        if not TTL_MIN_SECONDS <= self.ttl_seconds <= TTL_MAX_SECONDS:
            return f"an override is for {TTL_MIN_SECONDS:g} s to {TTL_MAX_SECONDS / 86400:g} days"
        if not self.why.strip() or len(self.why) > WHY_MOST:
            return f"say why, in 1 to {WHY_MOST} characters"
        if not self.why.isprintable() or not self.by.isprintable():
            return "say why and by whom on one line, without control characters"
        named = {On.TENANT: self.subject.tenant, On.GPU: self.subject.gpu}
        if not named.get(self.subject.on):
            return "an override is on a tenant or on a card"
        if self.on_tenant and not SHARE_MIN_RATIO <= self.value <= 1:
            return f"a share is between {SHARE_MIN_RATIO:g} and 1"
        if not self.on_tenant and not 0 < self.value <= WATTS_MAX:
            return f"a power limit is more than 0 and at most {WATTS_MAX:g} W"
        return ""


class Lease(Override, frozen=True):
    """An override in force. It ends by itself."""

    until: float
    """Monotonic seconds: what the wall clock does neither prolongs nor ends it."""
    until_wall: float
    """The same as the wall clock would have shown it when the lease began."""
    created_wall: float
    resumed: bool = False
    """Whether a run before this one has begun it: then it has been told of."""
    used: tuple["Used", ...] = ()
    """Of a resumed one: what its tenant used before an earlier run held it."""

    @property
    def words(self) -> str:
        """Whose it is, until when, and why, for the operator."""
        return f'override {self.id} of {self.by} until {utc(self.until_wall)}: "{self.why}"'

    def fault(self) -> str:
        """As of an override, and of its times."""
        if not all(map(math.isfinite, (self.until, self.until_wall, self.created_wall))):
            return "its times are no numbers"
        if len(self.used) > MOST_USED or not all(math.isfinite(u.cores) for u in self.used):
            return "what its tenant used is not credible"
        return super().fault()


class Objection(msgspec.Struct, frozen=True):
    """Why an override does not apply to this host, or not as it stands."""

    kind: Literal["unknown", "refused", "range"]
    why: str
    remedy: str = ""


def objection(to: Override, inventory: Inventory) -> Objection | None:
    """What the host as it is has against an override; None if nothing."""
    if to.on_tenant:
        tenant = inventory.tenant(to.subject.tenant)
        if tenant is None:
            what = f"there is no tenant {to.subject.tenant!r} here"
            return Objection("unknown", what, "GET /v1/tenants lists them")
        return _of_tenant(to.value, tenant)
    gpu = inventory.gpu(to.subject.gpu)
    if gpu is None:
        what = f"there is no card {to.subject.gpu!r} here"
        return Objection("unknown", what, "GET /v1/gpus lists the cards by UUID")
    return _of_card(to.value, gpu)


def _of_tenant(share: float, tenant: Tenant) -> Objection | None:
    name = tenant.name
    if tenant.level is Level.L1:
        return Objection("refused", f"{name} is L1: its own knobs are never turned")
    if not tenant.enforce:
        return Objection(
            "refused",
            f"{name} is only observed, as configured",
            "a rule in [[tenants]] with hold_back = true lets the agent hold it back",
        )
    floor = tenant.limits.min_share_ratio
    if share < floor:
        return Objection(
            "range",
            f"{share:.0%} is below the floor of {name}, {floor:.0%}",
            "min_share in its rule is that floor",
        )
    return None


def _of_card(watts: float, gpu: Gpu) -> Objection | None:
    low, high = gpu.power_min_watts, gpu.power_max_watts
    if low is None:
        return Objection("refused", f"the power limit of GPU {gpu.index} cannot be set")
    if watts < low or (high is not None and watts > high):
        most = "" if high is None else f" and at most {high:g} W"
        return Objection(
            "range", f"GPU {gpu.index} takes a power limit of at least {low:g} W{most}"
        )
    return None


def overridden(leases: Sequence[Lease]) -> dict[str, str]:
    """The tenants whose share somebody has overridden, each with the rule that decides instead."""
    return {lease.subject.tenant: lease.rule for lease in leases if lease.on_tenant}


def utc(wall: float) -> str:
    """A time of the wall clock as people write it; its seconds where no calendar has it."""
    try:
        return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{wall:.0f} s of the epoch"
