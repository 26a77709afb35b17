"""Text that strangers chose, as it can be sent: bytes that were not UTF-8 become escapes."""


def wire(text: str) -> str:
    r"""`text` with every lone surrogate (a byte that was no UTF-8) written as \udc80 and the like."""
    return text.encode("utf-8", "backslashreplace").decode()


def wired(value: object) -> object:
    """The same of a tree of plain values, keys included."""
    if isinstance(value, str):
        return wire(value)
    if isinstance(value, dict):
        return {wired(k): wired(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [wired(v) for v in value]
    return value
