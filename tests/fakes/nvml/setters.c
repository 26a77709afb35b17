/* setters.c: what root can change on a card. */
#include "fake.h"

#include <string.h>

typedef unsigned int uint;

/* A refusal for want of support comes before one for want of rights. */
#define ALLOWED(supported) \
    do { \
        SUPPORTED(supported); \
        ANSWER_UNLESS(privileged(call.state), NVML_ERROR_NO_PERMISSION); \
    } while (0)

/* Setters of one mode: symbol, when supported, values allowed, field. */
#define MODE(symbol, supported, valid, field) \
    EXPORT nvmlReturn_t symbol(nvmlDevice_t device, uint mode) \
    { \
        ENTER(device, GPU_ONLY, WRITE); \
        ALLOWED(supported); \
        REQUIRE(valid); \
        call.gpu->field = mode; \
        return NVML_SUCCESS; \
    }

/* EXCLUSIVE_THREAD (1) is long gone. */
static bool is_compute_mode(uint mode)
{
    return mode == NVML_COMPUTEMODE_DEFAULT || mode == NVML_COMPUTEMODE_PROHIBITED ||
           mode == NVML_COMPUTEMODE_EXCLUSIVE;
}

MODE(nvmlDeviceSetPersistenceMode, true, mode < 2, persistence)
MODE(nvmlDeviceSetComputeMode, true, is_compute_mode(mode), compute_mode)
MODE(nvmlDeviceSetAccountingMode, true, mode < 2, accounting)
MODE(nvmlDeviceSetEccMode, call.gpu->has_ecc, mode < 2, ecc_pending)

static nvmlReturn_t set_limit(struct call *call, uint mw)
{
    REQUIRE(mw >= call->gpu->power_min_mw && mw <= call->gpu->power_max_mw);
    power_set_limit(call->gpu, call->now_us, mw);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceSetPowerManagementLimit(nvmlDevice_t device, uint mw)
{
    ENTER(device, GPU_ONLY, WRITE);
    ALLOWED(call.gpu->power_management);
    return set_limit(&call, mw);
}

EXPORT nvmlReturn_t nvmlDeviceSetPowerManagementLimit_v2(nvmlDevice_t device,
                                                         nvmlPowerValue_v2_t *value)
{
    ENTER(device, GPU_ONLY, WRITE);
    REQUIRE(value);
    REQUIRE_VERSION(value, nvmlPowerValue_v2_t, 2);
    ALLOWED(call.gpu->power_management && value->powerScope == 0);
    return set_limit(&call, value->powerValueMw);
}

static nvmlReturn_t lock_clocks(uint32_t *min, uint32_t *max, uint from_mhz, uint to_mhz,
                                uint highest_mhz)
{
    REQUIRE(from_mhz <= to_mhz && from_mhz <= highest_mhz && to_mhz > 0);
    *min = from_mhz;
    *max = to_mhz < highest_mhz ? to_mhz : highest_mhz;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceSetGpuLockedClocks(nvmlDevice_t device, uint from_mhz, uint to_mhz)
{
    ENTER(device, GPU_ONLY, WRITE);
    ALLOWED(call.gpu->can_lock_clocks);
    return lock_clocks(&call.gpu->graphics_lock_min_mhz, &call.gpu->graphics_lock_max_mhz, from_mhz,
                       to_mhz, call.gpu->clock_max_mhz[NVML_CLOCK_GRAPHICS]);
}

EXPORT nvmlReturn_t nvmlDeviceSetMemoryLockedClocks(nvmlDevice_t device, uint from_mhz, uint to_mhz)
{
    ENTER(device, GPU_ONLY, WRITE);
    ALLOWED(call.gpu->can_lock_clocks);
    return lock_clocks(&call.gpu->memory_lock_min_mhz, &call.gpu->memory_lock_max_mhz, from_mhz,
                       to_mhz, call.gpu->clock_max_mhz[NVML_CLOCK_MEM]);
}

EXPORT nvmlReturn_t nvmlDeviceResetGpuLockedClocks(nvmlDevice_t device)
{
    ENTER(device, GPU_ONLY, WRITE);
    ALLOWED(call.gpu->can_lock_clocks);
    call.gpu->graphics_lock_min_mhz = call.gpu->graphics_lock_max_mhz = 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceResetMemoryLockedClocks(nvmlDevice_t device)
{
    ENTER(device, GPU_ONLY, WRITE);
    ALLOWED(call.gpu->can_lock_clocks);
    call.gpu->memory_lock_min_mhz = call.gpu->memory_lock_max_mhz = 0;
    return NVML_SUCCESS;
}

/* The mode changes at once only when nobody else holds the driver and nothing runs on the card. */
EXPORT nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t device, uint mode, nvmlReturn_t *activation)
{
    ENTER(device, GPU_ONLY, WRITE);
    ALLOWED(call.gpu->mig_capable);
    REQUIRE(activation && mode < 2);
    call.gpu->mig_pending = mode;
    bool busy = call.gpu->process_count > 0 || other_holders(call.state) > 0;
    *activation = busy && mode != call.gpu->mig_current ? NVML_ERROR_IN_USE : NVML_SUCCESS;
    if (*activation == NVML_SUCCESS)
        call.gpu->mig_current = mode;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceClearAccountingPids(nvmlDevice_t device)
{
    ENTER(device, GPU_ONLY, WRITE);
    ALLOWED(true);
    call.gpu->account_count = 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceClearEccErrorCounts(nvmlDevice_t device, uint aggregate)
{
    ENTER(device, GPU_ONLY, WRITE);
    REQUIRE(aggregate < 2);
    ALLOWED(call.gpu->has_ecc);
    for (uint uncorrected = 0; uncorrected < 2; uncorrected++)
        memset(call.gpu->ecc[uncorrected][aggregate], 0,
               sizeof call.gpu->ecc[uncorrected][aggregate]);
    return NVML_SUCCESS;
}
