"""Text as it can be sent: what strangers chose, with escapes; numbers that name things."""


def wire(text: str) -> str:
    r"""`text` with every lone surrogate (a byte that was no UTF-8) written as \udc80 and the like."""
    return text.encode("utf-8", "backslashreplace").decode()


def quantile_text(quantile: float) -> str:
    """A quantile as the value of a label, as Prometheus writes it: 0.99 is "0.99"."""
    return repr(float(quantile))


def wired(value: object) -> object:
    """The same of a tree of plain values, keys included."""
    if isinstance(value, str):
        return wire(value)
    if isinstance(value, dict):
        return {wired(k): wired(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [wired(v) for v in value]
    return value
