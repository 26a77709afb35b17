/* lists.c: processes, their utilisation and accounting, samples, and lists of clocks.
 *
 * A list function called with too small a buffer answers INSUFFICIENT_SIZE and the count it wants.
 */
#include "fake.h"

typedef unsigned int uint;
typedef unsigned long long ulonglong;

/* ---- running processes ---- */

static bool listed(const struct call *call, const struct fake_process *process,
                   enum process_kind kind)
{
    return (process->kinds & kind) &&
           (!call->mig || (process->gpu_instance == call->mig->gpu_instance &&
                           process->compute_instance == call->mig->compute_instance));
}

static nvmlReturn_t list_processes(const struct call *call, enum process_kind kind, uint *count,
                                   nvmlProcessInfo_t *out)
{
    REQUIRE(count && (out || *count == 0));
    uint found = 0, room = *count;
    for (uint i = 0; i < call->gpu->process_count; i++) {
        const struct fake_process *process = &call->gpu->processes[i];
        if (!listed(call, process, kind))
            continue;
        if (found < room)
            out[found] = (nvmlProcessInfo_t){process->pid, process->memory_bytes,
                                             process->gpu_instance, process->compute_instance};
        found++;
    }
    *count = found;
    return found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

#define PROCESS_LIST(symbol, kind) \
    EXPORT nvmlReturn_t symbol(nvmlDevice_t device, uint *count, nvmlProcessInfo_t *out) \
    { \
        ENTER(device, ANY_DEVICE, READ); \
        return list_processes(&call, kind, count, out); \
    }

PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, KIND_COMPUTE)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, KIND_COMPUTE)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, KIND_GRAPHICS)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, KIND_GRAPHICS)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, KIND_MPS)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, KIND_MPS)

/* ---- utilisation of processes ---- */

/* The number of the oldest sample still in the ring. */
static uint64_t oldest_sample(const struct fake_gpu *gpu)
{
    return gpu->sample_count > FAKE_SAMPLES ? gpu->sample_count - FAKE_SAMPLES : 0;
}

/* Is this the last sample of its process? NVML gives one a process. */
static bool is_last(const struct fake_gpu *gpu, uint64_t number)
{
    uint32_t pid = gpu->samples[number % FAKE_SAMPLES].pid;
    while (++number < gpu->sample_count)
        if (gpu->samples[number % FAKE_SAMPLES].pid == pid)
            return false;
    return true;
}

/* Up to FAKE_SAMPLES samples newer than last_seen_us; answers how many there are. */
static uint newer_samples(const struct fake_gpu *gpu, uint64_t last_seen_us,
                          const struct fake_sample **out)
{
    uint found = 0;
    for (uint64_t number = oldest_sample(gpu); number < gpu->sample_count; number++) {
        const struct fake_sample *sample = &gpu->samples[number % FAKE_SAMPLES];
        if (sample->at_us > last_seen_us && is_last(gpu, number))
            out[found++] = sample;
    }
    return found;
}

/* Tells the caller how much room is needed, or that there is nothing new. */
static nvmlReturn_t check_room(uint found, bool buffer, uint *count)
{
    ANSWER_UNLESS(found, NVML_ERROR_NOT_FOUND);
    bool fits = buffer && *count >= found;
    *count = found;
    return fits ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device,
                                                    nvmlProcessUtilizationSample_t *out,
                                                    uint *count, ulonglong last_seen_us)
{
    ENTER(device, GPU_ONLY, READ);
    REQUIRE(count);
    SUPPORTED(!call.gpu->mig_current);
    const struct fake_sample *samples[FAKE_SAMPLES];
    uint found = newer_samples(call.gpu, last_seen_us, samples);
    nvmlReturn_t room = check_room(found, out, count);
    for (uint i = 0; room == NVML_SUCCESS && i < found; i++)
        out[i] = (nvmlProcessUtilizationSample_t){samples[i]->pid,     samples[i]->at_us,
                                                  samples[i]->sm,      samples[i]->memory,
                                                  samples[i]->encoder, samples[i]->decoder};
    return room;
}

EXPORT nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device,
                                                          nvmlProcessesUtilizationInfo_t *info)
{
    ENTER(device, GPU_ONLY, READ);
    REQUIRE(info);
    REQUIRE_VERSION(info, nvmlProcessesUtilizationInfo_t, 1);
    SUPPORTED(!call.gpu->mig_current);
    const struct fake_sample *samples[FAKE_SAMPLES];
    uint found = newer_samples(call.gpu, info->lastSeenTimeStamp, samples);
    nvmlReturn_t room = check_room(found, info->procUtilArray, &info->processSamplesCount);
    for (uint i = 0; room == NVML_SUCCESS && i < found; i++)
        info->procUtilArray[i] = (nvmlProcessUtilizationInfo_t){samples[i]->at_us,
                                                                samples[i]->pid,
                                                                samples[i]->sm,
                                                                samples[i]->memory,
                                                                samples[i]->encoder,
                                                                samples[i]->decoder,
                                                                0,
                                                                0};
    return room;
}

/* ---- accounting ---- */

EXPORT nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t device, uint *count, uint *out)
{
    ENTER(device, GPU_ONLY, READ);
    REQUIRE(count && (out || *count == 0));
    SUPPORTED(call.gpu->accounting);
    uint found = (uint)call.gpu->account_count, room = *count;
    for (uint i = 0; i < found && i < room; i++)
        out[i] = call.gpu->accounts[i].pid;
    *count = found;
    return found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetAccountingStats(nvmlDevice_t device, uint pid,
                                                 nvmlAccountingStats_t *out)
{
    ENTER(device, GPU_ONLY, READ);
    REQUIRE(out);
    SUPPORTED(call.gpu->accounting);
    for (uint i = 0; i < call.gpu->account_count; i++) {
        const struct fake_account *account = &call.gpu->accounts[i];
        if (account->pid != pid)
            continue;
        *out = (nvmlAccountingStats_t){account->utilization,
                                       account->memory_utilization,
                                       account->memory_bytes,
                                       account->time_ms,
                                       account->start_us,
                                       account->running,
                                       {0}};
        return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

/* ---- samples of the card ---- */

enum sampling {
    SAMPLES_POWER,
    SAMPLES_GPU,
    SAMPLES_MEMORY,
    SAMPLES_ENCODER,
    SAMPLES_DECODER,
    SAMPLES_CLOCK,
    SAMPLES_MEMORY_CLOCK,
    SAMPLES_COUNT,
};
#define SAMPLE_PERIOD_US 100000u /* the driver's varies by product; its buffer, too */
#define SAMPLE_BUFFER 120u

static uint sample_value(const struct fake_gpu *gpu, uint type, uint64_t at_us)
{
    switch (type) {
    case SAMPLES_POWER: return power_instant_mw(gpu, at_us);
    case SAMPLES_GPU: return gpu->utilization;
    case SAMPLES_MEMORY: return gpu->memory_utilization;
    case SAMPLES_ENCODER: return gpu->encoder_utilization;
    case SAMPLES_DECODER: return gpu->decoder_utilization;
    case SAMPLES_CLOCK: return current_clock_mhz(gpu, NVML_CLOCK_SM);
    default: return current_clock_mhz(gpu, NVML_CLOCK_MEM);
    }
}

/* One sample a period since last_seen_us. Only power has a history; the rest are as they are now.
 */
EXPORT nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, uint type, ulonglong last_seen_us,
                                         uint *value_type, uint *count, nvmlSample_t *out)
{
    ENTER(device, GPU_ONLY, READ);
    REQUIRE(value_type && count);
    SUPPORTED(type < SAMPLES_COUNT && (!call.gpu->mig_current || type == SAMPLES_POWER));
    uint64_t now_us = stamp_us(call.state), newest = now_us / SAMPLE_PERIOD_US;
    uint64_t number = newest >= SAMPLE_BUFFER ? newest - SAMPLE_BUFFER + 1 : 0;
    if (number <= last_seen_us / SAMPLE_PERIOD_US)
        number = last_seen_us / SAMPLE_PERIOD_US + 1;
    uint found = number <= newest ? (uint)(newest - number + 1) : 0;
    ANSWER_UNLESS(found, NVML_ERROR_NOT_FOUND);
    *value_type = VALUE_UINT;
    for (uint i = 0; out && i < found && i < *count; i++) {
        uint64_t at_us = (number + i) * SAMPLE_PERIOD_US;
        out[i].timeStamp = at_us;
        out[i].sampleValue.ui = sample_value(call.gpu, type, call.now_us - (now_us - at_us));
    }
    *count = out && *count < found ? *count : found;
    return NVML_SUCCESS;
}

/* ---- clocks that can be asked for ---- */

#define CLOCK_STEP_MHZ 15u
#define CLOCK_MIN_MHZ 210u

/* `count` values downwards from `first` in steps; the shape of both lists. */
static nvmlReturn_t list_clocks(uint first, uint number, uint *count, uint *out)
{
    REQUIRE(count && (out || *count == 0));
    uint room = *count;
    for (uint i = 0; i < number && i < room; i++)
        out[i] = first - i * CLOCK_STEP_MHZ;
    *count = number;
    return number > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

/* The captures do not tell which memory clocks a card has beside its highest: one is offered. */
EXPORT nvmlReturn_t nvmlDeviceGetSupportedMemoryClocks(nvmlDevice_t device, uint *count, uint *out)
{
    ENTER(device, GPU_ONLY, READ);
    return list_clocks(call.gpu->clock_max_mhz[NVML_CLOCK_MEM], 1, count, out);
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedGraphicsClocks(nvmlDevice_t device, uint memory_mhz,
                                                         uint *count, uint *out)
{
    ENTER(device, GPU_ONLY, READ);
    ANSWER_UNLESS(memory_mhz == call.gpu->clock_max_mhz[NVML_CLOCK_MEM], NVML_ERROR_NOT_FOUND);
    uint highest = call.gpu->clock_max_mhz[NVML_CLOCK_GRAPHICS];
    return list_clocks(highest, (highest - CLOCK_MIN_MHZ) / CLOCK_STEP_MHZ + 1, count, out);
}
