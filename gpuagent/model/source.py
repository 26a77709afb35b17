"""Where a tenant's latency is read from, and how that fares."""

import msgspec


class SourceHealth(msgspec.Struct, frozen=True):
    """A tenant's own metrics, of which one is its latency."""

    tenant: str
    url: str
    metric: str
    up: bool | None = None
    """Whether the last scrape was one; None while none has been tried since the tenant is there."""
    why: str = ""
    """Why it is not, or why no latency follows from it although it is."""
    last_success: float | None = None
    """Monotonic seconds."""
