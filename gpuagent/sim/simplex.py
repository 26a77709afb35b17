"""The lowest point of a function of a few numbers: Nelder and Mead's simplex (1965), deterministic."""

from collections.abc import Callable, Sequence

import msgspec


class Found(msgspec.Struct, frozen=True):
    value: float
    at: tuple[float, ...]


def lowest(
    function: Callable[[Sequence[float]], float],
    start: Sequence[float],
    steps: Sequence[float],
    *,
    rounds: int,
) -> Found:
    """The best point after so many rounds from a simplex of `start` and one step along each axis."""

    def seen(at: Sequence[float]) -> Found:
        return Found(function(at), tuple(at))

    def between(one: Sequence[float], other: Sequence[float], share: float) -> tuple[float, ...]:
        return tuple(a + share * (b - a) for a, b in zip(one, other, strict=True))

    corners = [seen(start)]
    for axis, step in enumerate(steps):
        corners.append(seen([x + step * (i == axis) for i, x in enumerate(start)]))
    for _ in range(rounds):
        corners.sort(key=lambda corner: corner.value)
        best, worst = corners[0], corners[-1]
        others = [corner.at for corner in corners[:-1]]
        middle = [sum(axis) / len(others) for axis in zip(*others, strict=True)]
        moved = seen(between(middle, worst.at, -1.0))
        if moved.value < best.value:
            further = seen(between(middle, worst.at, -2.0))
            moved = min(moved, further, key=lambda corner: corner.value)
        elif moved.value >= corners[-2].value:
            moved = seen(between(middle, worst.at, 0.5))
            if moved.value >= worst.value:
                corners = [best, *(seen(between(c.at, best.at, 0.5)) for c in corners[1:])]
                continue
        corners[-1] = moved
    return min(corners, key=lambda corner: corner.value)
