/* system.c: the host, finding devices, MIG, and how the cards are connected. */
#define _GNU_SOURCE
#include "fake.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

typedef unsigned int uint;

/* ---- the host ---- */

/* Needs no initialised library, as the real one [measured, 550]; then it tells its own version. */
EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *out, uint length)
{
    static struct site site = {.name = "nvmlSystemGetNVMLVersion"};
    __attribute__((cleanup(leave))) struct call call = {0};
    nvmlReturn_t entered = enter(&call, &site, NULL, NO_DEVICE, READ);
    if (entered == NVML_ERROR_UNINITIALIZED)
        return copy_string(out, length, FAKE_NVML_DRIVER >= 590 ? "13.590.48.01" : "12.550.163.01");
    return entered == NVML_SUCCESS ? copy_string(out, length, call.state->nvml_version) : entered;
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *out, uint length)
{
    ENTER(NULL, NO_DEVICE, READ);
    return copy_string(out, length, call.state->driver_version);
}

static nvmlReturn_t cuda_version(const struct call *call, int *out)
{
    REQUIRE(out);
    *out = call->state->cuda_version;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *out)
{
    ENTER(NULL, NO_DEVICE, READ);
    return cuda_version(&call, out);
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *out)
{
    ENTER(NULL, NO_DEVICE, READ);
    return cuda_version(&call, out);
}

EXPORT nvmlReturn_t nvmlSystemGetProcessName(uint pid, char *out, uint length)
{
    ENTER(NULL, NO_DEVICE, READ);
    REQUIRE(out && length);
    char path[32];
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *file = fopen(path, "re");
    ANSWER_UNLESS(file, NVML_ERROR_NOT_FOUND);
    size_t got = fread(out, 1, length - 1, file); /* the first argument ends with a zero */
    fclose(file);
    out[got] = '\0';
    return NVML_SUCCESS;
}

/* ---- finding devices ---- */

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(uint *out)
{
    ENTER(NULL, NO_DEVICE, READ);
    REQUIRE(out);
    *out = gpus_seen();
    return NVML_SUCCESS;
}

/* A lost card keeps its place, and is told when one asks for its handle. */
static nvmlReturn_t hand_out(const struct call *call, unsigned int slot, nvmlDevice_t *out)
{
    const struct fake_gpu *gpu = &call->state->gpus[slot];
    ANSWER_UNLESS(gpu->present && gpu->health != LOST, NVML_ERROR_GPU_IS_LOST);
    *out = device_handle(slot, -1);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(uint index, nvmlDevice_t *out)
{
    ENTER(NULL, NO_DEVICE, READ);
    REQUIRE(out && index < gpus_seen());
    return hand_out(&call, gpu_seen(index), out);
}

static nvmlReturn_t find_uuid(const struct call *call, const char *uuid, nvmlDevice_t *out)
{
    for (unsigned int index = 0; index < gpus_seen(); index++) {
        unsigned int slot = gpu_seen(index);
        const struct fake_gpu *gpu = &call->state->gpus[slot];
        if (strcasecmp(gpu->uuid, uuid) == 0)
            return hand_out(call, slot, out);
        for (int mig = 0; gpu->mig_current && mig < FAKE_MIGS; mig++)
            if (gpu->migs[mig].present && strcasecmp(gpu->migs[mig].uuid, uuid) == 0) {
                *out = device_handle(slot, mig);
                return NVML_SUCCESS;
            }
    }
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *out)
{
    ENTER(NULL, NO_DEVICE, READ);
    REQUIRE(uuid && out);
    return find_uuid(&call, uuid, out);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *out)
{
    ENTER(NULL, NO_DEVICE, READ);
    REQUIRE(serial && out);
    for (unsigned int index = 0; index < gpus_seen(); index++)
        if (strcmp(call.state->gpus[gpu_seen(index)].serial, serial) == 0)
            return hand_out(&call, gpu_seen(index), out);
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *out)
{
    ENTER(NULL, NO_DEVICE, READ);
    REQUIRE(bus_id && out);
    uint domain = 0, bus = 0, device = 0;
    if (sscanf(bus_id, "%x:%x:%x", &domain, &bus, &device) != 3) {
        domain = 0; /* the domain may be left out */
        REQUIRE(sscanf(bus_id, "%x:%x", &bus, &device) == 2);
    }
    for (unsigned int index = 0; index < gpus_seen(); index++) {
        const struct fake_gpu *gpu = &call.state->gpus[gpu_seen(index)];
        if (gpu->pci_domain == domain && gpu->pci_bus == bus && gpu->pci_device == device)
            return hand_out(&call, gpu_seen(index), out);
    }
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceDiscoverGpus(nvmlPciInfo_t *where)
{
    ENTER(NULL, NO_DEVICE, WRITE);
    REQUIRE(where);
    ANSWER_UNLESS(privileged(call.state), NVML_ERROR_NO_PERMISSION);
    look_for_gpus();
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceValidateInforom(nvmlDevice_t device)
{
    ENTER(device, GPU_ONLY, READ);
    return NVML_SUCCESS;
}

/* The unversioned names have the same interface. */
#define SAME(old, now, ...) EXPORT nvmlReturn_t old(__VA_ARGS__) __attribute__((alias(#now)))
SAME(nvmlDeviceGetCount, nvmlDeviceGetCount_v2, uint *);
SAME(nvmlDeviceGetHandleByIndex, nvmlDeviceGetHandleByIndex_v2, uint, nvmlDevice_t *);
SAME(nvmlDeviceGetHandleByPciBusId, nvmlDeviceGetHandleByPciBusId_v2, const char *, nvmlDevice_t *);

/* ---- MIG ---- */

EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, uint *out)
{
    ENTER(device, ANY_DEVICE, READ);
    REQUIRE(out);
    *out = call.mig != NULL;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, uint index,
                                                        nvmlDevice_t *out)
{
    ENTER(device, GPU_ONLY, READ);
    SUPPORTED(call.gpu->mig_capable);
    REQUIRE(out && index < call.gpu->mig_max);
    /* Asking for a MIG device that was not made is how one finds that out. */
    ANSWER_UNLESS(call.gpu->mig_current && index < FAKE_MIGS && call.gpu->migs[index].present,
                  NVML_ERROR_NOT_FOUND);
    *out = device_handle(call.slot, (int)index);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t device,
                                                                 nvmlDevice_t *out)
{
    ENTER(device, ANY_DEVICE, READ);
    REQUIRE(out && call.mig);
    *out = device_handle(call.slot, -1);
    return NVML_SUCCESS;
}

static nvmlReturn_t instance_id(const struct call *call, uint id, uint *out)
{
    REQUIRE(out);
    SUPPORTED(call->mig);
    *out = id;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, uint *out)
{
    ENTER(device, ANY_DEVICE, READ);
    return instance_id(&call, call.mig ? call.mig->gpu_instance : 0, out);
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, uint *out)
{
    ENTER(device, ANY_DEVICE, READ);
    return instance_id(&call, call.mig ? call.mig->compute_instance : 0, out);
}

EXPORT nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *out)
{
    ENTER(device, ANY_DEVICE, READ);
    REQUIRE(out);
    SUPPORTED(call.mig);
    const struct fake_mig *mig = call.mig;
    *out = (nvmlDeviceAttributes_t){
        .multiprocessorCount = mig->multiprocessors,
        .sharedCopyEngineCount = mig->copy_engines,
        .sharedDecoderCount = mig->decoders,
        .sharedEncoderCount = mig->encoders,
        .sharedJpegCount = mig->jpegs,
        .sharedOfaCount = mig->ofas,
        .gpuInstanceSliceCount = mig->gpu_slices,
        .computeInstanceSliceCount = mig->compute_slices,
        .memorySizeMB = mig->memory_total_bytes >> 20,
    };
    return NVML_SUCCESS;
}

SAME(nvmlDeviceGetAttributes, nvmlDeviceGetAttributes_v2, nvmlDevice_t, nvmlDeviceAttributes_t *);

/* ---- topology ---- */

/* The second device of a pair; the first one is checked by ENTER. */
static nvmlReturn_t other_slot(nvmlDevice_t device, unsigned int *slot)
{
    int mig = -1;
    nvmlReturn_t resolved = resolve_handle(device, slot, &mig);
    return resolved == NVML_SUCCESS && mig >= 0 ? NVML_ERROR_INVALID_ARGUMENT : resolved;
}

EXPORT nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t one, nvmlDevice_t two,
                                                        uint *level)
{
    ENTER(one, GPU_ONLY, READ);
    unsigned int other = 0;
    REQUIRE(level && other_slot(two, &other) == NVML_SUCCESS);
    *level = call.state->topology[call.slot][other];
    return NVML_SUCCESS;
}

static bool linked(const struct fake_gpu *gpu, const struct fake_gpu *other)
{
    for (unsigned int i = 0; i < gpu->link_count; i++) {
        const struct fake_link *link = &gpu->links[i];
        if (link->active && link->remote_domain == other->pci_domain &&
            link->remote_bus == other->pci_bus && link->remote_device == other->pci_device)
            return true;
    }
    return false;
}

EXPORT nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t one, nvmlDevice_t two, uint capability,
                                           uint *status)
{
    ENTER(one, GPU_ONLY, READ);
    unsigned int other = 0;
    REQUIRE(status && capability < NVML_P2P_CAPS_UNKNOWN &&
            other_slot(two, &other) == NVML_SUCCESS);
    if (capability == NVML_P2P_CAPS_NVLINK)
        *status = linked(call.gpu, &call.state->gpus[other]) ? NVML_P2P_STATUS_OK
                                                             : NVML_P2P_STATUS_NOT_SUPPORTED;
    else
        *status = call.state->p2p[call.slot][other];
    return NVML_SUCCESS;
}

/* The GPUs whose closest common ancestor with this one is exactly at `level`. */
EXPORT nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t device, uint level, uint *count,
                                                     nvmlDevice_t *out)
{
    ENTER(device, GPU_ONLY, READ);
    REQUIRE(count);
    uint found = 0;
    for (unsigned int index = 0; index < gpus_seen(); index++) {
        unsigned int slot = gpu_seen(index);
        if (slot == call.slot || call.state->topology[call.slot][slot] != level)
            continue;
        if (out && found < *count)
            out[found] = device_handle(slot, -1);
        found++;
    }
    *count = out && found > *count ? *count : found;
    return NVML_SUCCESS;
}

static nvmlReturn_t copy_set(uint size, unsigned long *out, const uint64_t *from, uint words)
{
    REQUIRE(out && size);
    for (uint word = 0; word < size; word++)
        out[word] = word < words ? from[word] : 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, uint size, unsigned long *out)
{
    ENTER(device, GPU_ONLY, READ);
    return copy_set(size, out, call.gpu->cpu_affinity, 16);
}

EXPORT nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(nvmlDevice_t device, uint size,
                                                        unsigned long *out, uint scope)
{
    ENTER(device, GPU_ONLY, READ);
    REQUIRE(scope < 2);
    return copy_set(size, out, call.gpu->cpu_affinity, 16);
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, uint size, unsigned long *out,
                                                uint scope)
{
    ENTER(device, GPU_ONLY, READ);
    REQUIRE(scope < 2);
    return copy_set(size, out, &call.gpu->memory_affinity, 1);
}

EXPORT nvmlReturn_t nvmlDeviceOnSameBoard(nvmlDevice_t one, nvmlDevice_t two, int *out)
{
    ENTER(one, GPU_ONLY, READ);
    unsigned int other = 0;
    REQUIRE(out && other_slot(two, &other) == NVML_SUCCESS);
    *out = call.slot == other;
    return NVML_SUCCESS;
}
