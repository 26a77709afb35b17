"""How a tenant's latency looks on a terminal: against its objective, and with a mark when it is over."""

from gpuagent.cli.client import Document
from gpuagent.cli.show import UNKNOWN

OVER = "!"
"""Stands after a latency that is over its objective: where there is no colour it has to do."""

ESTIMATED = "~"


def known(row: Document) -> bool:
    """Whether the tenant has a latency or an objective for one."""
    return row["latency_seconds"] is not None or row["latency_objective_seconds"] is not None


def against(row: Document) -> float | None:
    """The latency as a share of its objective; None unless both are known."""
    found, wanted = _number(row["latency_seconds"]), row["latency_objective_seconds"]
    return found / wanted if found is not None and wanted else None


def over(row: Document) -> bool:
    """Whether it is over its objective."""
    share = against(row)
    return share is not None and share > 1


def latency(row: Document) -> str:
    """Such as "93/100 ms"; "-/100 ms" while it is not reported; "93 ms" where none is declared.

    One that is only estimated, such as from the buckets of a histogram, has "~" before it.
    """
    found, wanted = _number(row["latency_seconds"]), row["latency_objective_seconds"]
    values = [x for x in (found, wanted) if x is not None]
    if not values:
        return UNKNOWN
    factor, unit = (1000, "ms") if max(values) < 0.9995 else (1, "s")
    parts = [found] if wanted is None else [found, wanted]
    text = "/".join(UNKNOWN if x is None else _short(x * factor) for x in parts)
    about = ESTIMATED if found is not None and row["latency_estimated"] else ""
    return f"{about}{text} {unit}" + (OVER if over(row) else "")


def at(row: Document) -> str:
    """The quantile as people call it, such as "p99"."""
    quantile = row["latency_quantile"]
    return UNKNOWN if quantile is None else f"p{100 * quantile:g}"


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) else None


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.2g}"
