/* power.c: what a card draws, and the energy that adds up to.
 *
 * The card draws min(demand, limit in force). A new limit comes into force actuation_us after it
 * was set. The draw is kept as a ring of steps, each with the energy used before it, so that energy
 * at any moment is one step plus a product: exact, the same in every process, and free of writes
 * when read. A step may lie in the future, where a limit was set that does not bite yet; a newer
 * step that begins earlier overrides it.
 * power.py does the same when a test changes the demand.
 */
#include "fake.h"

#define AVERAGE_WINDOW_US 1000000u /* Ampere and later report a one-second average */

static uint32_t smaller(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

uint32_t power_limit_in_force(const struct fake_gpu *gpu, uint64_t now_us)
{
    uint32_t limit = now_us >= gpu->limit_from_us ? gpu->limit_mw : gpu->limit_before_mw;
    return gpu->board_cap_mw ? smaller(limit, gpu->board_cap_mw) : limit;
}

/* The step in force at a moment: the newest that begins before it, or the oldest remembered. */
static const struct fake_step *step_before(const struct fake_gpu *gpu, uint64_t at_us)
{
    uint64_t oldest = gpu->step_count > FAKE_STEPS ? gpu->step_count - FAKE_STEPS : 0;
    for (uint64_t number = gpu->step_count; number-- > oldest;) {
        const struct fake_step *step = &gpu->steps[number % FAKE_STEPS];
        if (step->at_us <= at_us || number == oldest)
            return step;
    }
    return &gpu->steps[0]; /* a card that never drew anything: an all-zero step */
}

static uint64_t since(const struct fake_step *step, uint64_t at_us)
{
    return at_us > step->at_us ? at_us - step->at_us : 0;
}

static uint64_t energy_nj(const struct fake_gpu *gpu, uint64_t at_us)
{
    const struct fake_step *step = step_before(gpu, at_us);
    return step->energy_nj + step->draw_mw * since(step, at_us);
}

static uint64_t capped_us(const struct fake_gpu *gpu, uint64_t at_us)
{
    const struct fake_step *step = step_before(gpu, at_us);
    return step->capped_us + step->capped * since(step, at_us);
}

static void push_step(struct fake_gpu *gpu, uint64_t at_us)
{
    uint32_t limit = power_limit_in_force(gpu, at_us);
    struct fake_step step = {
        .at_us = at_us,
        .energy_nj = energy_nj(gpu, at_us),
        .capped_us = capped_us(gpu, at_us),
        .draw_mw = smaller(gpu->demand_mw, limit),
        .capped = gpu->demand_mw > limit,
    };
    gpu->steps[gpu->step_count++ % FAKE_STEPS] = step;
}

/* Lay down what happens from now on; it overrides a step that was still to come. */
static void replan(struct fake_gpu *gpu, uint64_t now_us)
{
    push_step(gpu, now_us);
    if (gpu->limit_from_us > now_us)
        push_step(gpu, gpu->limit_from_us);
}

void power_set_limit(struct fake_gpu *gpu, uint64_t now_us, uint32_t mw)
{
    if (now_us >= gpu->limit_from_us)
        gpu->limit_before_mw = gpu->limit_mw;
    gpu->limit_mw = mw;
    gpu->limit_from_us = now_us + gpu->actuation_us;
    replan(gpu, now_us);
}

uint32_t power_instant_mw(const struct fake_gpu *gpu, uint64_t now_us)
{
    return step_before(gpu, now_us)->draw_mw;
}

uint32_t power_average_mw(const struct fake_gpu *gpu, uint64_t now_us)
{
    uint64_t oldest = gpu->step_count > FAKE_STEPS ? gpu->step_count - FAKE_STEPS : 0;
    uint64_t from_us = now_us > AVERAGE_WINDOW_US ? now_us - AVERAGE_WINDOW_US : 0;
    uint64_t known_us = gpu->steps[oldest % FAKE_STEPS].at_us;
    if (from_us < known_us)
        from_us = known_us;
    if (from_us >= now_us)
        return power_instant_mw(gpu, now_us);
    return (uint32_t)((energy_nj(gpu, now_us) - energy_nj(gpu, from_us)) / (now_us - from_us));
}

uint32_t power_usage_mw(const struct fake_gpu *gpu, uint64_t now_us)
{
    return gpu->architecture >= NVML_ARCH_AMPERE ? power_average_mw(gpu, now_us)
                                                 : power_instant_mw(gpu, now_us);
}

uint64_t power_energy_mj(const struct fake_gpu *gpu, uint64_t now_us)
{
    return gpu->energy_base_mj + energy_nj(gpu, now_us) / 1000000u;
}

uint64_t power_capped_ns(const struct fake_gpu *gpu, uint64_t now_us)
{
    return gpu->violation_ns[NVML_PERF_POLICY_POWER] + capped_us(gpu, now_us) * 1000u;
}
