/* errors.c: memory errors, remapped rows, and the PCIe link. */
#include "shapes.h"

#include <stdio.h>
#include <string.h>

/* ---- memory errors ---- */

PAIR(nvmlDeviceGetEccMode, uint, gpu->has_ecc, gpu->ecc_current, gpu->ecc_pending)
VALUE(nvmlDeviceGetDefaultEccMode, GPU_ONLY, uint, gpu->has_ecc, 1)

uint64_t total_ecc(const struct fake_gpu *gpu, unsigned int uncorrected, unsigned int aggregate)
{
    uint64_t total = 0;
    for (unsigned int location = 0; location < 8; location++)
        total += gpu->ecc[uncorrected][aggregate][location];
    return total;
}

static bool counts_ecc(const struct fake_gpu *gpu)
{
    return gpu->has_ecc && gpu->ecc_current;
}

EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, uint uncorrected,
                                                uint aggregate, ulonglong *out)
{
    ENTER(device, ANY_DEVICE, READ);
    REQUIRE(out && uncorrected < 2 && aggregate < 2);
    SUPPORTED(counts_ecc(call.gpu));
    *out = call.mig ? 0 : total_ecc(call.gpu, uncorrected, aggregate);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, uint uncorrected,
                                                    uint aggregate, uint location, ulonglong *out)
{
    ENTER(device, ANY_DEVICE, READ);
    REQUIRE(out && uncorrected < 2 && aggregate < 2 && location < 8);
    SUPPORTED(counts_ecc(call.gpu));
    *out = call.mig ? 0 : call.gpu->ecc[uncorrected][aggregate][location];
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetDetailedEccErrors(nvmlDevice_t device, uint uncorrected,
                                                   uint aggregate, nvmlEccErrorCounts_t *out)
{
    ENTER(device, GPU_ONLY, READ);
    REQUIRE(out && uncorrected < 2 && aggregate < 2);
    SUPPORTED(counts_ecc(call.gpu));
    const uint64_t *count = call.gpu->ecc[uncorrected][aggregate];
    *out = (nvmlEccErrorCounts_t){count[0], count[1], count[2], count[3]};
    return NVML_SUCCESS;
}

/* The capture of an H100 under MIG says N/A where the same card without MIG has values. */
static bool remaps(const struct fake_gpu *gpu)
{
    return gpu->has_remapping && !gpu->mig_current;
}

EXPORT nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, uint *corrected,
                                              uint *uncorrected, uint *pending, uint *failure)
{
    ENTER(device, GPU_ONLY, READ);
    REQUIRE(corrected && uncorrected && pending && failure);
    SUPPORTED(remaps(call.gpu));
    *corrected = call.gpu->remapped_corrected;
    *uncorrected = call.gpu->remapped_uncorrected;
    *pending = call.gpu->remapped_pending;
    *failure = call.gpu->remapped_failure;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device,
                                                      nvmlRowRemapperHistogramValues_t *out)
{
    ENTER(device, GPU_ONLY, READ);
    REQUIRE(out);
    SUPPORTED(remaps(call.gpu));
    const uint32_t *banks = call.gpu->remap_histogram;
    *out = (nvmlRowRemapperHistogramValues_t){banks[0], banks[1], banks[2], banks[3], banks[4]};
    return NVML_SUCCESS;
}

/* ---- PCIe ---- */

VALUE(nvmlDeviceGetCurrPcieLinkGeneration, GPU_ONLY, uint, true, gpu->pcie_gen)
VALUE(nvmlDeviceGetCurrPcieLinkWidth, GPU_ONLY, uint, true, gpu->pcie_width)
VALUE(nvmlDeviceGetMaxPcieLinkGeneration, GPU_ONLY, uint, true, gpu->pcie_gen_max)
VALUE(nvmlDeviceGetGpuMaxPcieLinkGeneration, GPU_ONLY, uint, true, gpu->pcie_gen_max)
VALUE(nvmlDeviceGetMaxPcieLinkWidth, GPU_ONLY, uint, true, gpu->pcie_width_max)
VALUE(nvmlDeviceGetPcieReplayCounter, GPU_ONLY, uint, true, gpu->pcie_replays)

EXPORT nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, uint counter, uint *out)
{
    ENTER(device, GPU_ONLY, READ);
    REQUIRE(out && counter < 2);
    *out = counter == 0 ? call.gpu->pcie_tx_kbps : call.gpu->pcie_rx_kbps;
    return NVML_SUCCESS;
}

static void write_bus_ids(const struct fake_gpu *gpu, nvmlPciInfo_t *out)
{
    snprintf(out->busId, sizeof out->busId, "%08X:%02X:%02X.0", gpu->pci_domain, gpu->pci_bus,
             gpu->pci_device);
    snprintf(out->busIdLegacy, sizeof out->busIdLegacy, "%04X:%02X:%02X.0",
             gpu->pci_domain & 0xffffu, gpu->pci_bus & 0xffu, gpu->pci_device & 0xffu);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *out)
{
    ENTER(device, ANY_DEVICE, READ);
    REQUIRE(out);
    const struct fake_gpu *gpu = call.gpu;
    *out = (nvmlPciInfo_t){
        .domain = gpu->pci_domain,
        .bus = gpu->pci_bus,
        .device = gpu->pci_device,
        .pciDeviceId = gpu->pci_device_id,
        .pciSubSystemId = gpu->pci_subsystem_id,
    };
    write_bus_ids(gpu, out);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_t *out)
{
    ENTER(device, ANY_DEVICE, READ);
    REQUIRE(out);
    REQUIRE_VERSION(out, nvmlPciInfoExt_t, 1);
    const struct fake_gpu *gpu = call.gpu;
    nvmlPciInfo_t ids;
    write_bus_ids(gpu, &ids);
    *out = (nvmlPciInfoExt_t){
        .version = out->version,
        .domain = gpu->pci_domain,
        .bus = gpu->pci_bus,
        .device = gpu->pci_device,
        .pciDeviceId = gpu->pci_device_id,
        .pciSubSystemId = gpu->pci_subsystem_id,
        .baseClass = 3,
        .subClass = gpu->pci_subclass,
    };
    memcpy(out->busId, ids.busId, sizeof out->busId);
    return NVML_SUCCESS;
}
