/* state.h: the driver's whole state, one fixed layout in a file that tests and libraries map.
 *
 * layout.py mirrors it field by field; fakeNvmlLayout() prints the offsets so that a test can
 * compare the two. Units are NVML's own (mW, MHz, KB/s, per cent): the library hands them out
 * as they lie, and the Python side translates to base units.
 *
 * Every struct is a list F(type, name, array-suffix), so that the declaration and the layout
 * table come from one place. There are no holes: what would be one is a `reserved` field.
 */
#ifndef FAKE_NVML_STATE_H
#define FAKE_NVML_STATE_H

#include <stdint.h>

enum {
    FAKE_GPUS = 16,
    FAKE_PROCESSES = 64,
    FAKE_MIGS = 8,
    FAKE_LINKS = 18,
    FAKE_SAMPLES = 256, /* process utilisation, per GPU */
    FAKE_STEPS = 64,    /* changes of power draw remembered, per GPU */
    FAKE_ACCOUNTED = 64,
    FAKE_EVENTS = 256,
    FAKE_HOLDERS = 64,
    FAKE_SYMBOLS = 448,
    FAKE_NO_GPU = FAKE_GPUS, /* column of per-GPU tables for calls that name no GPU */
    FAKE_COLUMNS = FAKE_GPUS + 1,
};

#define FAKE_MAGIC 0x314c4d564e454b46ull /* "FKENVML1" */
#define FAKE_NO_INSTANCE 0xffffffffu

enum process_kind { KIND_COMPUTE = 1, KIND_GRAPHICS = 2, KIND_MPS = 4 };
enum health { HEALTHY = 0, LOST = 1, NEEDS_RESET = 2 };

/* From at_us on the card draws draw_mw; energy and time under the cap up to then. */
#define FAKE_STEP_FIELDS(F) \
    F(uint64_t, at_us, ) \
    F(uint64_t, energy_nj, ) \
    F(uint64_t, capped_us, ) \
    F(uint32_t, draw_mw, ) \
    F(uint32_t, capped, )

#define FAKE_PROCESS_FIELDS(F) \
    F(uint64_t, memory_bytes, ) /* ~0 is NVML's "not available" */ \
    F(uint32_t, pid, ) \
    F(uint32_t, kinds, ) \
    F(uint32_t, gpu_instance, ) \
    F(uint32_t, compute_instance, )

#define FAKE_SAMPLE_FIELDS(F) \
    F(uint64_t, at_us, ) \
    F(uint32_t, pid, ) \
    F(uint32_t, sm, ) \
    F(uint32_t, memory, ) \
    F(uint32_t, encoder, ) \
    F(uint32_t, decoder, ) \
    F(uint32_t, reserved, )

#define FAKE_ACCOUNT_FIELDS(F) \
    F(uint64_t, memory_bytes, ) \
    F(uint64_t, time_ms, ) \
    F(uint64_t, start_us, ) \
    F(uint32_t, pid, ) \
    F(uint32_t, utilization, ) \
    F(uint32_t, memory_utilization, ) \
    F(uint32_t, running, )

#define FAKE_LINK_FIELDS(F) \
    F(uint64_t, data_tx_kib, ) \
    F(uint64_t, data_rx_kib, ) \
    F(uint64_t, raw_tx_kib, ) \
    F(uint64_t, raw_rx_kib, ) \
    F(uint64_t, errors, [5]) /* by nvmlNvLinkErrorCounter_t: replay, recovery, CRC flit and data, ECC */ \
    F(uint32_t, active, ) \
    F(uint32_t, version, ) \
    F(uint32_t, speed_mbps, ) \
    F(uint32_t, remote_type, ) \
    F(uint32_t, remote_domain, ) \
    F(uint32_t, remote_bus, ) \
    F(uint32_t, remote_device, ) \
    F(uint32_t, remote_pci_device_id, )

#define FAKE_MIG_FIELDS(F) \
    F(char, uuid, [48]) \
    F(char, profile, [16]) /* "3g.40gb" */ \
    F(uint64_t, memory_total_bytes, ) \
    F(uint64_t, memory_used_bytes, ) \
    F(uint64_t, bar1_total_bytes, ) \
    F(uint32_t, present, ) \
    F(uint32_t, gpu_instance, ) \
    F(uint32_t, compute_instance, ) \
    F(uint32_t, multiprocessors, ) \
    F(uint32_t, copy_engines, ) \
    F(uint32_t, decoders, ) \
    F(uint32_t, encoders, ) \
    F(uint32_t, jpegs, ) \
    F(uint32_t, ofas, ) \
    F(uint32_t, gpu_slices, ) \
    F(uint32_t, compute_slices, ) \
    F(uint32_t, reserved, )

#define FAKE_GPU_FIELDS(F) \
    /* identity */ \
    F(char, name, [96]) \
    F(char, uuid, [48]) \
    F(char, serial, [32]) \
    F(char, vbios, [32]) \
    F(char, board_part, [32]) \
    F(uint32_t, present, ) \
    F(uint32_t, health, ) \
    F(uint32_t, minor, ) \
    F(uint32_t, brand, ) \
    F(uint32_t, architecture, ) \
    F(uint32_t, cuda_major, ) \
    F(uint32_t, cuda_minor, ) \
    F(uint32_t, cores, ) \
    F(uint32_t, memory_bus_bits, ) \
    F(uint32_t, board_id, ) \
    F(uint32_t, pci_domain, ) \
    F(uint32_t, pci_bus, ) \
    F(uint32_t, pci_device, ) \
    F(uint32_t, pci_device_id, ) \
    F(uint32_t, pci_subsystem_id, ) \
    F(uint32_t, pci_subclass, ) \
    F(uint32_t, virtualization, ) \
    F(int32_t, numa_node_id, ) /* of the GPU's own memory; -1 unless coherent */ \
    F(uint64_t, cpu_affinity, [16]) /* 1,024 CPUs */ \
    F(uint64_t, memory_affinity, ) /* bit set of NUMA nodes */ \
    /* memory */ \
    F(uint64_t, memory_total_bytes, ) \
    F(uint64_t, memory_reserved_bytes, ) \
    F(uint64_t, memory_used_bytes, ) \
    F(uint64_t, bar1_total_bytes, ) \
    F(uint64_t, bar1_used_bytes, ) \
    /* utilisation, per cent */ \
    F(uint32_t, utilization, ) \
    F(uint32_t, memory_utilization, ) \
    F(uint32_t, encoder_utilization, ) \
    F(uint32_t, decoder_utilization, ) \
    F(uint32_t, jpeg_utilization, ) \
    F(uint32_t, ofa_utilization, ) \
    F(uint32_t, encoder_sessions, ) \
    F(uint32_t, encoder_fps, ) \
    F(uint32_t, encoder_latency_us, ) \
    F(uint32_t, performance_state, ) \
    /* power */ \
    F(uint32_t, power_management, ) /* can the limit be changed at all */ \
    F(uint32_t, power_min_mw, ) \
    F(uint32_t, power_max_mw, ) \
    F(uint32_t, power_default_mw, ) \
    F(uint32_t, demand_mw, ) /* what the work would draw unlimited */ \
    F(uint32_t, limit_mw, ) /* as last requested */ \
    F(uint32_t, limit_before_mw, ) /* in force until limit_from_us */ \
    F(uint32_t, board_cap_mw, ) /* a limiter outside NVML (BMC, power brake); 0 for none */ \
    F(uint64_t, limit_from_us, ) \
    F(uint64_t, actuation_us, ) /* from a change of the limit to its effect */ \
    F(uint64_t, energy_base_mj, ) \
    F(uint64_t, step_count, ) /* steps ever made: the last is at (step_count - 1) % FAKE_STEPS */ \
    F(struct fake_step, steps, [FAKE_STEPS]) \
    F(uint64_t, violation_ns, [12]) /* by nvmlPerfPolicyType_t, before what the steps tell */ \
    /* heat */ \
    F(int32_t, temperature, ) \
    F(int32_t, memory_temperature, ) \
    F(uint32_t, has_memory_temperature, ) \
    F(uint32_t, uses_tlimit, ) /* thresholds are told as a margin to the limit */ \
    F(uint32_t, thresholds, [8]) /* by nvmlTemperatureThresholds_t, in C; 0 is unsupported */ \
    F(uint32_t, fans, ) \
    F(uint32_t, fan_percent, ) \
    /* clocks, by nvmlClockType_t: graphics, SM, memory, video */ \
    F(uint32_t, clock_mhz, [4]) \
    F(uint32_t, clock_max_mhz, [4]) \
    F(uint32_t, can_lock_clocks, ) \
    F(uint32_t, graphics_lock_min_mhz, ) /* 0 and 0: not locked */ \
    F(uint32_t, graphics_lock_max_mhz, ) \
    F(uint32_t, memory_lock_min_mhz, ) \
    F(uint32_t, memory_lock_max_mhz, ) \
    F(uint32_t, event_reasons, ) /* beside those that follow from power, heat and load */ \
    /* modes */ \
    F(uint32_t, persistence, ) \
    F(uint32_t, compute_mode, ) \
    F(uint32_t, accounting, ) \
    F(uint32_t, accounting_buffer, ) \
    F(uint32_t, display_attached, ) \
    F(uint32_t, display_active, ) \
    F(uint32_t, has_ecc, ) \
    F(uint32_t, ecc_current, ) \
    F(uint32_t, ecc_pending, ) \
    F(uint32_t, mig_capable, ) \
    F(uint32_t, mig_current, ) \
    F(uint32_t, mig_pending, ) \
    F(uint32_t, mig_max, ) \
    /* errors */ \
    F(uint32_t, has_remapping, ) \
    F(uint32_t, remapped_corrected, ) \
    F(uint32_t, remapped_uncorrected, ) \
    F(uint32_t, remapped_pending, ) \
    F(uint32_t, remapped_failure, ) \
    F(uint32_t, remap_histogram, [5]) \
    F(uint32_t, reserved, ) \
    F(uint64_t, ecc, [2][2][8]) /* corrected or not, volatile or aggregate, nvmlMemoryLocation_t */ \
    F(uint64_t, event_types, ) \
    /* links */ \
    F(uint32_t, pcie_gen, ) \
    F(uint32_t, pcie_gen_max, ) \
    F(uint32_t, pcie_width, ) \
    F(uint32_t, pcie_width_max, ) \
    F(uint32_t, pcie_tx_kbps, ) \
    F(uint32_t, pcie_rx_kbps, ) \
    F(uint32_t, pcie_replays, ) \
    F(uint32_t, link_count, ) \
    F(uint64_t, pcie_tx_bytes, ) \
    F(uint64_t, pcie_rx_bytes, ) \
    F(struct fake_link, links, [FAKE_LINKS]) \
    /* tenants */ \
    F(struct fake_mig, migs, [FAKE_MIGS]) \
    F(uint64_t, process_count, ) \
    F(struct fake_process, processes, [FAKE_PROCESSES]) \
    F(uint64_t, sample_count, ) /* samples ever taken */ \
    F(struct fake_sample, samples, [FAKE_SAMPLES]) \
    F(uint64_t, account_count, ) \
    F(struct fake_account, accounts, [FAKE_ACCOUNTED])

#define FAKE_EVENT_FIELDS(F) \
    F(uint64_t, type, ) \
    F(uint64_t, data, ) \
    F(uint32_t, gpu, ) \
    F(uint32_t, gpu_instance, ) \
    F(uint32_t, compute_instance, ) \
    F(uint32_t, reserved, )

/* A process with the library initialised. The start time tells a reused pid apart. */
#define FAKE_HOLDER_FIELDS(F) \
    F(uint64_t, start_ticks, ) \
    F(uint32_t, pid, ) \
    F(uint32_t, reserved, )

/* One exported function: how often it was called, and what tests have done to it. */
#define FAKE_SYMBOL_FIELDS(F) \
    F(char, name, [72]) \
    F(uint64_t, calls, [FAKE_COLUMNS]) \
    F(uint64_t, latency_us, ) \
    F(uint32_t, hang, ) /* one bit a column */ \
    F(uint16_t, fault, [FAKE_COLUMNS]) /* nvmlReturn_t to answer; 0 for none */ \
    F(uint16_t, reserved, )

#define FAKE_STATE_FIELDS(F) \
    F(uint64_t, magic, ) \
    F(uint64_t, size, ) \
    F(uint64_t, clock_us, ) /* the tests' clock; 0: the machine's */ \
    F(uint32_t, driver_loaded, ) \
    F(uint32_t, privileged, ) \
    F(uint32_t, wake, ) /* futex word: counts events and changes that end a wait */ \
    F(int32_t, cuda_version, ) \
    F(char, driver_version, [80]) \
    F(char, nvml_version, [80]) \
    F(uint32_t, topology, [FAKE_GPUS][FAKE_GPUS]) /* nvmlGpuTopologyLevel_t */ \
    F(uint32_t, p2p, [FAKE_GPUS][FAKE_GPUS]) /* nvmlGpuP2PStatus_t */ \
    F(uint64_t, event_count, ) /* events ever raised */ \
    F(struct fake_event, events, [FAKE_EVENTS]) \
    F(struct fake_holder, holders, [FAKE_HOLDERS]) \
    F(struct fake_symbol, symbols, [FAKE_SYMBOLS]) \
    F(struct fake_gpu, gpus, [FAKE_GPUS])

#define FAKE_STRUCTS(S) \
    S(fake_step, FAKE_STEP_FIELDS) \
    S(fake_process, FAKE_PROCESS_FIELDS) \
    S(fake_sample, FAKE_SAMPLE_FIELDS) \
    S(fake_account, FAKE_ACCOUNT_FIELDS) \
    S(fake_link, FAKE_LINK_FIELDS) \
    S(fake_mig, FAKE_MIG_FIELDS) \
    S(fake_gpu, FAKE_GPU_FIELDS) \
    S(fake_event, FAKE_EVENT_FIELDS) \
    S(fake_holder, FAKE_HOLDER_FIELDS) \
    S(fake_symbol, FAKE_SYMBOL_FIELDS) \
    S(fake_state, FAKE_STATE_FIELDS)

#define FAKE_FIELD(type, name, array) type name array;
#define FAKE_STRUCT(name, fields) struct name { fields(FAKE_FIELD) };
FAKE_STRUCTS(FAKE_STRUCT)

#endif
