"""How long and how often is measured."""

import msgspec


class Pace(msgspec.Struct, frozen=True):
    """Full, or quick: enough to see that everything works, too little for the figures to mean much."""

    quick: bool = False

    def seconds(self, full: float) -> float:
        return max(full / 6, 2.0) if self.quick else full

    def runs(self, full: int) -> int:
        return 1 if self.quick else full
