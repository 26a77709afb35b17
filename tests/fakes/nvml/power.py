"""What a card draws and the energy that adds up to: power.c, for changes that tests make.

The theory is told there. Both sides write the same ring, and a test compares them.
"""

from tests.fakes.nvml import layout


def limit_in_force_mw(gpu: layout.Gpu, at_us: int) -> int:
    limit: int = gpu.limit_mw if at_us >= gpu.limit_from_us else gpu.limit_before_mw
    return min(limit, gpu.board_cap_mw) if gpu.board_cap_mw else limit


def draw_mw(gpu: layout.Gpu, at_us: int) -> int:
    draw: int = _step_before(gpu, at_us).draw_mw
    return draw


def energy_nj(gpu: layout.Gpu, at_us: int) -> int:
    """Used since the state was made, without the counter's start value."""
    step = _step_before(gpu, at_us)
    used: int = step.energy_nj + step.draw_mw * max(0, at_us - step.at_us)
    return used


def replan(gpu: layout.Gpu, now_us: int) -> None:
    """Lay down the draw from now on, after anything that decides it has changed."""
    _push(gpu, now_us)
    if gpu.limit_from_us > now_us:
        _push(gpu, gpu.limit_from_us)


def set_limit_mw(gpu: layout.Gpu, now_us: int, limit_mw: int) -> None:
    if now_us >= gpu.limit_from_us:
        gpu.limit_before_mw = gpu.limit_mw
    gpu.limit_mw = limit_mw
    gpu.limit_from_us = now_us + gpu.actuation_us
    replan(gpu, now_us)


def restart_clock(gpu: layout.Gpu, before_us: int, now_us: int) -> None:
    """Keep the energy when the clock is exchanged for another one."""
    gpu.energy_base_mj += energy_nj(gpu, before_us) // 1_000_000
    gpu.violation_ns[0] += _capped_us(gpu, before_us) * 1_000
    gpu.limit_before_mw = gpu.limit_mw
    gpu.limit_from_us = 0
    gpu.step_count = 0
    gpu.steps[0] = layout.Step()
    replan(gpu, now_us)


def _step_before(gpu: layout.Gpu, at_us: int) -> layout.Step:
    oldest = max(0, gpu.step_count - layout.STEPS)
    for number in range(gpu.step_count - 1, oldest - 1, -1):
        step: layout.Step = gpu.steps[number % layout.STEPS]
        if step.at_us <= at_us or number == oldest:
            return step
    return layout.Step()


def _capped_us(gpu: layout.Gpu, at_us: int) -> int:
    step = _step_before(gpu, at_us)
    capped: int = step.capped_us + step.capped * max(0, at_us - step.at_us)
    return capped


def _push(gpu: layout.Gpu, at_us: int) -> None:
    limit = limit_in_force_mw(gpu, at_us)
    step = layout.Step(
        at_us=at_us,
        energy_nj=energy_nj(gpu, at_us),
        capped_us=_capped_us(gpu, at_us),
        draw_mw=min(gpu.demand_mw, limit),
        capped=gpu.demand_mw > limit,
    )
    gpu.steps[gpu.step_count % layout.STEPS] = step
    gpu.step_count += 1
