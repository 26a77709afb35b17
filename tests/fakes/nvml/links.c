/* links.c: NVLink, and the field values that tell much of it. */
#include "fake.h"

#include <stdio.h>

typedef unsigned int uint;
typedef unsigned long long ulonglong;

/* ---- NVLink ---- */

static nvmlReturn_t find_link(const struct call *call, uint number, const struct fake_link **link)
{
    SUPPORTED(call->gpu->link_count);
    REQUIRE(number < call->gpu->link_count);
    *link = &call->gpu->links[number];
    return NVML_SUCCESS;
}

/* A getter of one value of one link. */
#define LINK_VALUE(symbol, type, value) \
    EXPORT nvmlReturn_t symbol(nvmlDevice_t device, uint number, type *out) \
    { \
        ENTER(device, GPU_ONLY, READ); \
        const struct fake_link *link = NULL; \
        REQUIRE(out); \
        nvmlReturn_t found = find_link(&call, number, &link); \
        ANSWER_UNLESS(found == NVML_SUCCESS, found); \
        *out = (type)(value); \
        return NVML_SUCCESS; \
    }

LINK_VALUE(nvmlDeviceGetNvLinkState, uint, link->active)
LINK_VALUE(nvmlDeviceGetNvLinkVersion, uint, link->version)
LINK_VALUE(nvmlDeviceGetNvLinkRemoteDeviceType, uint, link->remote_type)

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, uint number,
                                                        nvmlPciInfo_t *out)
{
    ENTER(device, GPU_ONLY, READ);
    const struct fake_link *link = NULL;
    REQUIRE(out);
    nvmlReturn_t found = find_link(&call, number, &link);
    ANSWER_UNLESS(found == NVML_SUCCESS, found);
    SUPPORTED(link->active);
    *out = (nvmlPciInfo_t){
        .domain = link->remote_domain,
        .bus = link->remote_bus,
        .device = link->remote_device,
        .pciDeviceId = link->remote_pci_device_id,
    };
    snprintf(out->busId, sizeof out->busId, "%08X:%02X:%02X.0", out->domain, out->bus, out->device);
    snprintf(out->busIdLegacy, sizeof out->busIdLegacy, "%04X:%02X:%02X.0", out->domain & 0xffffu,
             out->bus & 0xffu, out->device & 0xffu);
    return NVML_SUCCESS;
}

/* P2P, system memory and atomics are there on a link that is up; the rest are not. */
EXPORT nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, uint number, uint capability,
                                                  uint *out)
{
    ENTER(device, GPU_ONLY, READ);
    const struct fake_link *link = NULL;
    REQUIRE(out && capability < 6);
    nvmlReturn_t found = find_link(&call, number, &link);
    ANSWER_UNLESS(found == NVML_SUCCESS, found);
    *out = link->active && capability <= 3;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, uint number, uint counter,
                                                    ulonglong *out)
{
    ENTER(device, GPU_ONLY, READ);
    const struct fake_link *link = NULL;
    REQUIRE(out && counter < 5);
    nvmlReturn_t found = find_link(&call, number, &link);
    ANSWER_UNLESS(found == NVML_SUCCESS, found);
    *out = link->errors[counter];
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceResetNvLinkErrorCounters(nvmlDevice_t device, uint number)
{
    ENTER(device, GPU_ONLY, WRITE);
    SUPPORTED(call.gpu->link_count);
    REQUIRE(number < call.gpu->link_count);
    ANSWER_UNLESS(privileged(call.state), NVML_ERROR_NO_PERMISSION);
    for (uint counter = 0; counter < 5; counter++)
        call.gpu->links[number].errors[counter] = 0;
    return NVML_SUCCESS;
}

/* ---- field values ---- */

#define ALL_LINKS 0xffffffffu /* scope that asks for the sum over the links */

enum link_counter { DATA_TX, DATA_RX, RAW_TX, RAW_RX, FIRST_ERROR };

static uint64_t link_counter(const struct fake_link *link, uint counter)
{
    switch (counter) {
    case DATA_TX: return link->data_tx_kib;
    case DATA_RX: return link->data_rx_kib;
    case RAW_TX: return link->raw_tx_kib;
    case RAW_RX: return link->raw_rx_kib;
    default: return link->errors[counter - FIRST_ERROR];
    }
}

static uint64_t link_sum(const struct fake_gpu *gpu, uint number, uint counter)
{
    if (number != ALL_LINKS)
        return link_counter(&gpu->links[number], counter);
    uint64_t sum = 0;
    for (uint i = 0; i < gpu->link_count; i++)
        sum += link_counter(&gpu->links[i], counter);
    return sum;
}

static nvmlReturn_t give_uint(nvmlFieldValue_t *field, bool supported, uint value)
{
    SUPPORTED(supported);
    field->valueType = VALUE_UINT;
    field->value.ui = value;
    return NVML_SUCCESS;
}

static nvmlReturn_t give_int(nvmlFieldValue_t *field, bool supported, int value)
{
    SUPPORTED(supported);
    field->valueType = VALUE_INT;
    field->value.si = value;
    return NVML_SUCCESS;
}

static nvmlReturn_t give_ulonglong(nvmlFieldValue_t *field, bool supported, uint64_t value)
{
    SUPPORTED(supported);
    field->valueType = VALUE_ULONGLONG;
    field->value.ull = value;
    return NVML_SUCCESS;
}

static nvmlReturn_t give_link(nvmlFieldValue_t *field, const struct fake_gpu *gpu, uint counter)
{
    SUPPORTED(gpu->link_count);
    REQUIRE(field->scopeId == ALL_LINKS || field->scopeId < gpu->link_count);
    return give_ulonglong(field, true, link_sum(gpu, field->scopeId, counter));
}

static nvmlReturn_t give_threshold(nvmlFieldValue_t *field, const struct fake_gpu *gpu,
                                   uint threshold)
{
    int limit = (int)gpu->thresholds[NVML_THRESHOLD_GPU_MAX];
    return give_int(field, gpu->uses_tlimit && gpu->thresholds[threshold],
                    limit - (int)gpu->thresholds[threshold]);
}

static bool in_range(const nvmlFieldValue_t *field, uint first, uint count)
{
    return field->fieldId >= first && field->fieldId < first + count;
}

/* Fields 7 to 28 count ECC errors by place: single bit volatile, then aggregate. */
struct ecc_field {
    uint id, uncorrected, aggregate, location;
};
static const struct ecc_field ecc_fields[] = {
    {7, 0, 0, 0},  {8, 1, 0, 0},  {9, 0, 0, 1},  {10, 1, 0, 1}, {11, 0, 0, 2}, {12, 1, 0, 2},
    {13, 0, 0, 3}, {14, 1, 0, 3}, {15, 0, 0, 4}, {16, 1, 0, 4}, {17, 1, 0, 6}, {18, 0, 1, 0},
    {19, 1, 1, 0}, {20, 0, 1, 1}, {21, 1, 1, 1}, {22, 0, 1, 2}, {23, 1, 1, 2}, {24, 0, 1, 3},
    {25, 1, 1, 3}, {26, 0, 1, 4}, {27, 1, 1, 4}, {28, 1, 1, 6},
};

static nvmlReturn_t ecc_field(const struct fake_gpu *gpu, nvmlFieldValue_t *field)
{
    const struct ecc_field *row = &ecc_fields[field->fieldId - 7];
    bool supported = gpu->has_ecc && gpu->ecc_current;
    return give_ulonglong(field, supported,
                          gpu->ecc[row->uncorrected][row->aggregate][row->location]);
}

/* Numbers are NVML_FI_DEV_*; what is not in this list is answered NOT_SUPPORTED, as by a card. */
static nvmlReturn_t read_field(const struct call *call, nvmlFieldValue_t *field)
{
    const struct fake_gpu *gpu = call->gpu;
    const uint64_t now_us = call->now_us;
    const bool ecc = gpu->has_ecc && gpu->ecc_current, power = gpu->power_management;
    const bool remaps = gpu->has_remapping && !gpu->mig_current;

    if (in_range(field, 7, 22))
        return ecc_field(gpu, field);
    switch (field->fieldId) {
    case 1: return give_uint(field, gpu->has_ecc, gpu->ecc_current);
    case 2: return give_uint(field, gpu->has_ecc, gpu->ecc_pending);
    case 3: return give_ulonglong(field, ecc, total_ecc(gpu, 0, 0));
    case 4: return give_ulonglong(field, ecc, total_ecc(gpu, 1, 0));
    case 5: return give_ulonglong(field, ecc, total_ecc(gpu, 0, 1));
    case 6: return give_ulonglong(field, ecc, total_ecc(gpu, 1, 1));
    case 74: return give_ulonglong(field, true, power_capped_ns(gpu, now_us));
    case 75:
    case 76:
    case 77:
    case 78:
    case 79: return give_ulonglong(field, true, gpu->violation_ns[field->fieldId - 74]);
    case 82: return give_uint(field, gpu->has_memory_temperature, (uint)gpu->memory_temperature);
    case 83: return give_ulonglong(field, true, power_energy_mj(gpu, now_us));
    case 90: return give_uint(field, gpu->link_count, gpu->links[0].speed_mbps);
    case 91: return give_uint(field, true, gpu->link_count);
    case 94: return give_uint(field, true, gpu->pcie_replays);
    case 138:
    case 139:
    case 140:
    case 141: return give_link(field, gpu, DATA_TX + (field->fieldId - 138));
    case 142: return give_uint(field, remaps, gpu->remapped_corrected);
    case 143: return give_uint(field, remaps, gpu->remapped_uncorrected);
    case 144: return give_uint(field, remaps, gpu->remapped_pending);
    case 145: return give_uint(field, remaps, gpu->remapped_failure);
    case 161: return give_link(field, gpu, FIRST_ERROR);
    case 162: return give_link(field, gpu, FIRST_ERROR + 1);
    case 163: return give_link(field, gpu, FIRST_ERROR + 2);
    case 185: return give_uint(field, true, power_average_mw(gpu, now_us));
    case 186: return give_uint(field, true, power_instant_mw(gpu, now_us));
    case 187: return give_uint(field, power, gpu->power_min_mw);
    case 188: return give_uint(field, power, gpu->power_max_mw);
    case 189: return give_uint(field, power, gpu->power_default_mw);
    case 190: return give_uint(field, power, power_limit_in_force(gpu, now_us));
    case 191: return give_ulonglong(field, true, power_energy_mj(gpu, now_us));
    case 192: return give_uint(field, power, gpu->limit_mw);
    case 193: return give_threshold(field, gpu, NVML_THRESHOLD_SHUTDOWN);
    case 194: return give_threshold(field, gpu, NVML_THRESHOLD_SLOWDOWN);
    case 195: return give_int(field, gpu->uses_tlimit && gpu->has_memory_temperature, 0);
    case 196: return give_threshold(field, gpu, NVML_THRESHOLD_GPU_MAX);
    case 197: return give_ulonglong(field, true, gpu->pcie_tx_bytes);
    case 198: return give_ulonglong(field, true, gpu->pcie_rx_bytes);
    default: return NVML_ERROR_NOT_SUPPORTED;
    }
}

/* Succeeds as a whole even where single fields do not: each carries its own result. */
EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count,
                                             nvmlFieldValue_t *fields)
{
    ENTER(device, GPU_ONLY, READ);
    REQUIRE(fields && count > 0);
    for (int i = 0; i < count; i++) {
        fields[i].timestamp = (long long)stamp_us(call.state);
        fields[i].latencyUsec = 0;
        fields[i].nvmlReturn = read_field(&call, &fields[i]);
    }
    return NVML_SUCCESS;
}
