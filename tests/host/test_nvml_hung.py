"""host.nvml_hung: when a card that hung is tried again."""

from gpuagent.host.nvml_hung import HEALED_SECONDS, HungCard


def test_a_card_s_pauses_grow_over_its_relapses_until_it_has_healed() -> None:
    card = HungCard()

    def pause(at: float) -> float:
        """Seconds until it is tried, a card that hangs at this moment."""
        card.hangs(None, at)
        waited = next(s for s in range(1000) if card.due(at + s))
        card.tried(at + waited, 8.0)
        card.back(at + waited)
        return waited

    at, pauses = 100.0, []
    for _ in range(5):
        pauses.append(pause(at))
        at += pauses[-1] + 1
    assert pauses == [1, 2, 4, 8, 8]
    assert pause(at + HEALED_SECONDS + 1) == 1
