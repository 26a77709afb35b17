/* getters.c: what a card says of itself, its load, memory, power, heat, clocks and modes. */
#include "shapes.h"

#include <stdio.h>

/* The window that the utilisation of the video engines is measured over, as drivers report it. */
#define VIDEO_SAMPLING_US 167000u

/* ---- what follows from load, heat and power ---- */

static uint32_t clamp(uint32_t value, uint32_t low, uint32_t high)
{
    return value < low ? low : value > high ? high : value;
}

uint32_t current_clock_mhz(const struct fake_gpu *gpu, unsigned int type)
{
    uint32_t mhz = gpu->clock_mhz[type];
    if (type == NVML_CLOCK_MEM && gpu->memory_lock_max_mhz)
        return clamp(mhz, gpu->memory_lock_min_mhz, gpu->memory_lock_max_mhz);
    if (type <= NVML_CLOCK_SM && gpu->graphics_lock_max_mhz)
        return clamp(mhz, gpu->graphics_lock_min_mhz, gpu->graphics_lock_max_mhz);
    return mhz;
}

uint64_t event_reasons(const struct fake_gpu *gpu, uint64_t now_us)
{
    uint64_t reasons = gpu->event_reasons;
    uint32_t slowdown = gpu->thresholds[NVML_THRESHOLD_SLOWDOWN];
    if (gpu->utilization == 0 && gpu->encoder_utilization == 0 && gpu->decoder_utilization == 0)
        reasons |= REASON_GPU_IDLE;
    if (gpu->demand_mw > power_limit_in_force(gpu, now_us))
        reasons |= REASON_SW_POWER_CAP;
    if (slowdown && gpu->temperature >= (int32_t)slowdown)
        reasons |= REASON_HW_SLOWDOWN | REASON_HW_THERMAL;
    return reasons;
}

static const char *full_name(const struct fake_gpu *gpu, const struct fake_mig *mig)
{
    static __thread char name[128];
    if (mig == NULL)
        return gpu->name;
    snprintf(name, sizeof name, "%s MIG %s", gpu->name, mig->profile);
    return name;
}

static unsigned int index_of(const struct call *call)
{
    unsigned int index = 0;
    if (call->mig)
        return (unsigned int)(call->mig - call->gpu->migs);
    index_of_slot(call->slot, &index);
    return index;
}

/* ---- identity ---- */

STRING(nvmlDeviceGetName, ANY_DEVICE, true, full_name(gpu, mig))
STRING(nvmlDeviceGetUUID, ANY_DEVICE, true, mig ? mig->uuid : gpu->uuid)
STRING(nvmlDeviceGetSerial, GPU_ONLY, *gpu->serial, gpu->serial)
STRING(nvmlDeviceGetVbiosVersion, GPU_ONLY, true, gpu->vbios)
STRING(nvmlDeviceGetBoardPartNumber, GPU_ONLY, *gpu->board_part, gpu->board_part)
VALUE(nvmlDeviceGetIndex, ANY_DEVICE, uint, true, index_of(&call))
VALUE(nvmlDeviceGetMinorNumber, GPU_ONLY, uint, true, gpu->minor)
VALUE(nvmlDeviceGetBrand, GPU_ONLY, uint, true, gpu->brand)
VALUE(nvmlDeviceGetArchitecture, ANY_DEVICE, uint, true, gpu->architecture)
VALUE(nvmlDeviceGetBoardId, GPU_ONLY, uint, true, gpu->board_id)
VALUE(nvmlDeviceGetMultiGpuBoard, GPU_ONLY, uint, true, 0)
VALUE(nvmlDeviceGetNumGpuCores, GPU_ONLY, uint, true, gpu->cores)
VALUE(nvmlDeviceGetMemoryBusWidth, GPU_ONLY, uint, true, gpu->memory_bus_bits)
VALUE(nvmlDeviceGetNumaNodeId, GPU_ONLY, uint, gpu->numa_node_id >= 0, gpu->numa_node_id)
VALUE(nvmlDeviceGetVirtualizationMode, GPU_ONLY, uint, true, gpu->virtualization)
PAIR(nvmlDeviceGetCudaComputeCapability, int, true, gpu->cuda_major, gpu->cuda_minor)

/* ---- load ---- */

PAIR(nvmlDeviceGetEncoderUtilization, uint, !gpu->mig_current, gpu->encoder_utilization,
     VIDEO_SAMPLING_US)
PAIR(nvmlDeviceGetDecoderUtilization, uint, !gpu->mig_current, gpu->decoder_utilization,
     VIDEO_SAMPLING_US)
PAIR(nvmlDeviceGetJpgUtilization, uint, !gpu->mig_current, gpu->jpeg_utilization, VIDEO_SAMPLING_US)
PAIR(nvmlDeviceGetOfaUtilization, uint, !gpu->mig_current, gpu->ofa_utilization, VIDEO_SAMPLING_US)
VALUE(nvmlDeviceGetPerformanceState, GPU_ONLY, uint, true, gpu->performance_state)
VALUE(nvmlDeviceGetPowerState, GPU_ONLY, uint, true, gpu->performance_state)

EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *out)
{
    ENTER(device, GPU_ONLY, READ);
    REQUIRE(out);
    SUPPORTED(!call.gpu->mig_current);
    *out = (nvmlUtilization_t){call.gpu->utilization, call.gpu->memory_utilization};
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetEncoderStats(nvmlDevice_t device, uint *sessions, uint *fps,
                                              uint *latency_us)
{
    ENTER(device, GPU_ONLY, READ);
    REQUIRE(sessions && fps && latency_us);
    *sessions = call.gpu->encoder_sessions;
    *fps = call.gpu->encoder_fps;
    *latency_us = call.gpu->encoder_latency_us;
    return NVML_SUCCESS;
}

/* ---- memory ---- */

struct memory {
    uint64_t total, reserved, used, free;
};

static struct memory memory_of(const struct call *call)
{
    const struct fake_gpu *gpu = call->gpu;
    struct memory memory = {gpu->memory_total_bytes, gpu->memory_reserved_bytes,
                            gpu->memory_used_bytes, 0};
    if (call->mig)
        memory = (struct memory){call->mig->memory_total_bytes, 0, call->mig->memory_used_bytes, 0};
    uint64_t taken = memory.reserved + memory.used;
    memory.free = taken < memory.total ? memory.total - taken : 0;
    return memory;
}

/* The first version has no field for what the driver reserves and counts it as used. */
EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *out)
{
    ENTER(device, ANY_DEVICE, READ);
    REQUIRE(out);
    struct memory memory = memory_of(&call);
    *out = (nvmlMemory_t){memory.total, memory.free, memory.used + memory.reserved};
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *out)
{
    ENTER(device, ANY_DEVICE, READ);
    REQUIRE(out);
    REQUIRE_VERSION(out, nvmlMemory_v2_t, 2);
    struct memory memory = memory_of(&call);
    *out = (nvmlMemory_v2_t){out->version, memory.total, memory.reserved, memory.free, memory.used};
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *out)
{
    ENTER(device, ANY_DEVICE, READ);
    REQUIRE(out);
    uint64_t total = call.mig ? call.mig->bar1_total_bytes : call.gpu->bar1_total_bytes;
    uint64_t used = call.mig ? 0 : call.gpu->bar1_used_bytes;
    *out = (nvmlBAR1Memory_t){total, total - used, used};
    return NVML_SUCCESS;
}

/* ---- power and energy ---- */

VALUE(nvmlDeviceGetPowerManagementMode, GPU_ONLY, uint, true, gpu->power_management)
VALUE(nvmlDeviceGetPowerManagementLimit, GPU_ONLY, uint, gpu->power_management, gpu->limit_mw)
VALUE(nvmlDeviceGetPowerManagementDefaultLimit, GPU_ONLY, uint, gpu->power_management,
      gpu->power_default_mw)
PAIR(nvmlDeviceGetPowerManagementLimitConstraints, uint, gpu->power_management, gpu->power_min_mw,
     gpu->power_max_mw)
VALUE(nvmlDeviceGetEnforcedPowerLimit, GPU_ONLY, uint, gpu->power_management,
      power_limit_in_force(gpu, call.now_us))
VALUE(nvmlDeviceGetPowerUsage, GPU_ONLY, uint, true, power_usage_mw(gpu, call.now_us))
VALUE(nvmlDeviceGetTotalEnergyConsumption, GPU_ONLY, ulonglong, true,
      power_energy_mj(gpu, call.now_us))
VALUE(nvmlDeviceGetPowerSource, GPU_ONLY, uint, true, 0)

EXPORT nvmlReturn_t nvmlDeviceGetViolationStatus(nvmlDevice_t device, uint policy,
                                                 nvmlViolationTime_t *out)
{
    ENTER(device, GPU_ONLY, READ);
    REQUIRE(out && policy < NVML_PERF_POLICY_COUNT);
    uint64_t ns = policy == NVML_PERF_POLICY_POWER ? power_capped_ns(call.gpu, call.now_us)
                                                   : call.gpu->violation_ns[policy];
    *out = (nvmlViolationTime_t){call.now_us * 1000u, ns};
    return NVML_SUCCESS;
}

/* ---- heat ---- */

EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, uint sensor, uint *out)
{
    ENTER(device, GPU_ONLY, READ);
    REQUIRE(out && sensor == 0);
    *out = (uint)call.gpu->temperature;
    return NVML_SUCCESS;
}

#if FAKE_NVML_DRIVER >= 570
EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *out)
{
    ENTER(device, GPU_ONLY, READ);
    REQUIRE(out && out->sensorType == 0);
    REQUIRE_VERSION(out, nvmlTemperature_t, 1);
    out->temperature = call.gpu->temperature;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t device,
                                                   nvmlMarginTemperature_t *out)
{
    ENTER(device, GPU_ONLY, READ);
    REQUIRE(out);
    REQUIRE_VERSION(out, nvmlMarginTemperature_t, 1);
    SUPPORTED(call.gpu->uses_tlimit);
    out->marginTemperature =
        (int)call.gpu->thresholds[NVML_THRESHOLD_GPU_MAX] - call.gpu->temperature;
    return NVML_SUCCESS;
}
#endif

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, uint type, uint *out)
{
    ENTER(device, GPU_ONLY, READ);
    REQUIRE(out && type < sizeof call.gpu->thresholds / sizeof *call.gpu->thresholds);
    SUPPORTED(call.gpu->thresholds[type]);
    *out = call.gpu->thresholds[type];
    return NVML_SUCCESS;
}

VALUE(nvmlDeviceGetNumFans, GPU_ONLY, uint, true, gpu->fans)
VALUE(nvmlDeviceGetFanSpeed, GPU_ONLY, uint, gpu->fans, gpu->fan_percent)

static nvmlReturn_t fan_speed(const struct fake_gpu *gpu, uint fan, uint *out)
{
    SUPPORTED(gpu->fans);
    REQUIRE(out && fan < gpu->fans);
    *out = gpu->fan_percent;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetFanSpeed_v2(nvmlDevice_t device, uint fan, uint *out)
{
    ENTER(device, GPU_ONLY, READ);
    return fan_speed(call.gpu, fan, out);
}

EXPORT nvmlReturn_t nvmlDeviceGetTargetFanSpeed(nvmlDevice_t device, uint fan, uint *out)
{
    ENTER(device, GPU_ONLY, READ);
    return fan_speed(call.gpu, fan, out);
}

/* ---- clocks ---- */

EXPORT nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, uint type, uint *out)
{
    ENTER(device, GPU_ONLY, READ);
    REQUIRE(out && type < NVML_CLOCK_COUNT);
    *out = current_clock_mhz(call.gpu, type);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, uint type, uint *out)
{
    ENTER(device, GPU_ONLY, READ);
    REQUIRE(out && type < NVML_CLOCK_COUNT);
    *out = call.gpu->clock_max_mhz[type];
    return NVML_SUCCESS;
}

/* "Requested functionality has been deprecated" in every capture (590 and 595). */
static nvmlReturn_t application_clock(const struct fake_gpu *gpu, uint type, uint *out)
{
    REQUIRE(out && type < NVML_CLOCK_COUNT);
    ANSWER_UNLESS(FAKE_NVML_DRIVER < 590, NVML_ERROR_DEPRECATED);
    *out = gpu->clock_max_mhz[type];
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, uint type, uint id, uint *out)
{
    ENTER(device, GPU_ONLY, READ);
    REQUIRE(out && type < NVML_CLOCK_COUNT && id <= NVML_CLOCK_ID_BOOST);
    if (id == NVML_CLOCK_ID_APP || id == NVML_CLOCK_ID_APP_DEFAULT)
        return application_clock(call.gpu, type, out);
    *out = id == NVML_CLOCK_ID_CURRENT ? current_clock_mhz(call.gpu, type)
                                       : call.gpu->clock_max_mhz[type];
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetApplicationsClock(nvmlDevice_t device, uint type, uint *out)
{
    ENTER(device, GPU_ONLY, READ);
    return application_clock(call.gpu, type, out);
}

EXPORT nvmlReturn_t nvmlDeviceGetDefaultApplicationsClock(nvmlDevice_t device, uint type, uint *out)
{
    ENTER(device, GPU_ONLY, READ);
    return application_clock(call.gpu, type, out);
}

VALUE(nvmlDeviceGetCurrentClocksThrottleReasons, GPU_ONLY, ulonglong, true,
      event_reasons(gpu, call.now_us))
VALUE(nvmlDeviceGetCurrentClocksEventReasons, GPU_ONLY, ulonglong, true,
      event_reasons(gpu, call.now_us))
VALUE(nvmlDeviceGetSupportedClocksThrottleReasons, GPU_ONLY, ulonglong, true, REASONS_SUPPORTED)
VALUE(nvmlDeviceGetSupportedClocksEventReasons, GPU_ONLY, ulonglong, true, REASONS_SUPPORTED)

/* ---- modes ---- */

VALUE(nvmlDeviceGetPersistenceMode, GPU_ONLY, uint, true, gpu->persistence)
VALUE(nvmlDeviceGetComputeMode, GPU_ONLY, uint, true, gpu->compute_mode)
VALUE(nvmlDeviceGetAccountingMode, GPU_ONLY, uint, true, gpu->accounting)
VALUE(nvmlDeviceGetAccountingBufferSize, GPU_ONLY, uint, true, gpu->accounting_buffer)
VALUE(nvmlDeviceGetDisplayActive, GPU_ONLY, uint, true, gpu->display_active)
PAIR(nvmlDeviceGetMigMode, uint, gpu->mig_capable, gpu->mig_current, gpu->mig_pending)
VALUE(nvmlDeviceGetMaxMigDeviceCount, GPU_ONLY, uint, true, gpu->mig_capable ? gpu->mig_max : 0)
PAIR(nvmlDeviceGetDriverModel, uint, false, 0, 0) /* a notion of Windows */
#if FAKE_NVML_DRIVER >= 570
PAIR(nvmlDeviceGetDriverModel_v2, uint, false, 0, 0)
#endif

EXPORT nvmlReturn_t nvmlDeviceGetDisplayMode(nvmlDevice_t device, uint *out)
{
    ENTER(device, GPU_ONLY, READ);
    REQUIRE(out);
    ANSWER_UNLESS(FAKE_NVML_DRIVER < 590, NVML_ERROR_DEPRECATED); /* so all captures say */
    *out = call.gpu->display_attached;
    return NVML_SUCCESS;
}
