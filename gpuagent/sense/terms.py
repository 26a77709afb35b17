"""What a tenant is promised and has to bear: from its rule, its level, and the host's own terms."""

import msgspec

from gpuagent.config import Config, Enforce, Found, LevelRule, Levels, TenantRule
from gpuagent.model.inventory import LEVERS, Level, Limits, Notice


class Terms(msgspec.Struct, frozen=True):
    """What the configuration says of tenants beside their rules."""

    found: Found = Found()
    levels: Levels = Levels()
    enforce: Enforce = Enforce()

    @classmethod
    def of(cls, config: Config) -> "Terms":
        return cls(config.found, config.levels, config.enforce)

    def bind(self, rule: TenantRule | None) -> "Bond":
        """What holds for a tenant of this rule, or for one that was found."""
        level = self.found.sla if rule is None else rule.sla
        common = self.levels.of(level)
        if rule is None:
            limits = Limits(
                memory_reserved_bytes=common.memory_reserved,
                off_hours_share_ratio=common.off_hours_share,
            )
            levers, notice, hours = LEVERS, Notice(), common.hours
            mine, hold_back = True, self.found.hold_back
        else:
            limits = _limits(rule, common)
            levers, mine, hold_back = rule.levers, not rule.observe, rule.hold_back
            notice = Notice(rule.notice_signal, rule.notice_command)
            hours = common.hours if rule.hours is None else rule.hours
        families = self.enforce.families
        declared = () if limits.power_cap_watts is None else ("power_limit",)
        only = [
            x
            for x in (*levers, *declared)
            if not mine or (families is not None and x not in families)
        ]
        return Bond(
            level=level,
            holds=hold_back and level is not Level.L1,
            limits=limits,
            levers=levers,
            observed=tuple(only),
            hours=hours,
            notice=notice,
        )


class Bond(msgspec.Struct, frozen=True, kw_only=True):
    """See `inventory.Tenant`, whose fields these become."""

    level: Level
    holds: bool
    limits: Limits
    levers: tuple[str, ...]
    observed: tuple[str, ...]
    hours: tuple[str, ...]
    notice: Notice


def _limits(rule: TenantRule, level: LevelRule) -> Limits:
    off_hours = rule.off_hours_share
    return Limits(
        memory_limit_bytes=rule.memory_limit,
        memory_reserved_bytes=rule.memory_reserved or level.memory_reserved,
        compute_share_ratio=rule.compute_share,
        mps_contexts=rule.mps_contexts,
        power_cap_watts=rule.power_cap,
        host_memory_high_bytes=rule.host_memory_high,
        host_memory_max_bytes=rule.host_memory_max,
        off_hours_share_ratio=level.off_hours_share if off_hours is None else off_hours,
        min_share_ratio=rule.min_share,
        latency_slo_seconds=rule.latency_slo,
        latency_quantile=rule.latency_quantile,
    )
