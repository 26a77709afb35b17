"""The driver's state as ctypes sees it: state.h, field by field.

``test_nvml_fake.py`` compares every offset and size with what the library says.
"""

import ctypes
from ctypes import c_char, c_int32, c_uint16, c_uint32, c_uint64

GPUS = 16
PROCESSES = 64
MIGS = 8
LINKS = 18
SAMPLES = 256
STEPS = 64
ACCOUNTED = 64
EVENTS = 256
HOLDERS = 64
SYMBOLS = 448
NO_GPU = GPUS
COLUMNS = GPUS + 1

MAGIC = 0x314C4D564E454B46
NO_INSTANCE = 0xFFFFFFFF
NOT_AVAILABLE = 0xFFFFFFFFFFFFFFFF


class Step(ctypes.Structure):
    _fields_ = [
        ("at_us", c_uint64),
        ("energy_nj", c_uint64),
        ("capped_us", c_uint64),
        ("draw_mw", c_uint32),
        ("capped", c_uint32),
    ]


class Process(ctypes.Structure):
    _fields_ = [
        ("memory_bytes", c_uint64),
        ("pid", c_uint32),
        ("kinds", c_uint32),
        ("gpu_instance", c_uint32),
        ("compute_instance", c_uint32),
    ]


class Sample(ctypes.Structure):
    _fields_ = [
        ("at_us", c_uint64),
        ("pid", c_uint32),
        ("sm", c_uint32),
        ("memory", c_uint32),
        ("encoder", c_uint32),
        ("decoder", c_uint32),
        ("reserved", c_uint32),
    ]


class Account(ctypes.Structure):
    _fields_ = [
        ("memory_bytes", c_uint64),
        ("time_ms", c_uint64),
        ("start_us", c_uint64),
        ("pid", c_uint32),
        ("utilization", c_uint32),
        ("memory_utilization", c_uint32),
        ("running", c_uint32),
    ]


class Link(ctypes.Structure):
    _fields_ = [
        ("data_tx_kib", c_uint64),
        ("data_rx_kib", c_uint64),
        ("raw_tx_kib", c_uint64),
        ("raw_rx_kib", c_uint64),
        ("errors", c_uint64 * 5),
        ("active", c_uint32),
        ("version", c_uint32),
        ("speed_mbps", c_uint32),
        ("remote_type", c_uint32),
        ("remote_domain", c_uint32),
        ("remote_bus", c_uint32),
        ("remote_device", c_uint32),
        ("remote_pci_device_id", c_uint32),
    ]


class Mig(ctypes.Structure):
    _fields_ = [
        ("uuid", c_char * 48),
        ("profile", c_char * 16),
        ("memory_total_bytes", c_uint64),
        ("memory_used_bytes", c_uint64),
        ("bar1_total_bytes", c_uint64),
        ("present", c_uint32),
        ("gpu_instance", c_uint32),
        ("compute_instance", c_uint32),
        ("multiprocessors", c_uint32),
        ("copy_engines", c_uint32),
        ("decoders", c_uint32),
        ("encoders", c_uint32),
        ("jpegs", c_uint32),
        ("ofas", c_uint32),
        ("gpu_slices", c_uint32),
        ("compute_slices", c_uint32),
        ("reserved", c_uint32),
    ]


class Gpu(ctypes.Structure):
    _fields_ = [
        # identity
        ("name", c_char * 96),
        ("uuid", c_char * 48),
        ("serial", c_char * 32),
        ("vbios", c_char * 32),
        ("board_part", c_char * 32),
        ("present", c_uint32),
        ("health", c_uint32),
        ("minor", c_uint32),
        ("brand", c_uint32),
        ("architecture", c_uint32),
        ("cuda_major", c_uint32),
        ("cuda_minor", c_uint32),
        ("cores", c_uint32),
        ("memory_bus_bits", c_uint32),
        ("board_id", c_uint32),
        ("pci_domain", c_uint32),
        ("pci_bus", c_uint32),
        ("pci_device", c_uint32),
        ("pci_device_id", c_uint32),
        ("pci_subsystem_id", c_uint32),
        ("pci_subclass", c_uint32),
        ("virtualization", c_uint32),
        ("numa_node_id", c_int32),
        ("cpu_affinity", c_uint64 * 16),
        ("memory_affinity", c_uint64),
        # memory
        ("memory_total_bytes", c_uint64),
        ("memory_reserved_bytes", c_uint64),
        ("memory_used_bytes", c_uint64),
        ("bar1_total_bytes", c_uint64),
        ("bar1_used_bytes", c_uint64),
        # utilisation, per cent
        ("utilization", c_uint32),
        ("memory_utilization", c_uint32),
        ("encoder_utilization", c_uint32),
        ("decoder_utilization", c_uint32),
        ("jpeg_utilization", c_uint32),
        ("ofa_utilization", c_uint32),
        ("encoder_sessions", c_uint32),
        ("encoder_fps", c_uint32),
        ("encoder_latency_us", c_uint32),
        ("performance_state", c_uint32),
        # power
        ("power_management", c_uint32),
        ("power_min_mw", c_uint32),
        ("power_max_mw", c_uint32),
        ("power_default_mw", c_uint32),
        ("demand_mw", c_uint32),
        ("limit_mw", c_uint32),
        ("limit_before_mw", c_uint32),
        ("board_cap_mw", c_uint32),
        ("limit_from_us", c_uint64),
        ("actuation_us", c_uint64),
        ("energy_base_mj", c_uint64),
        ("step_count", c_uint64),
        ("steps", Step * STEPS),
        ("violation_ns", c_uint64 * 12),
        # heat
        ("temperature", c_int32),
        ("memory_temperature", c_int32),
        ("has_memory_temperature", c_uint32),
        ("uses_tlimit", c_uint32),
        ("thresholds", c_uint32 * 8),
        ("fans", c_uint32),
        ("fan_percent", c_uint32),
        # clocks: graphics, SM, memory, video
        ("clock_mhz", c_uint32 * 4),
        ("clock_max_mhz", c_uint32 * 4),
        ("can_lock_clocks", c_uint32),
        ("graphics_lock_min_mhz", c_uint32),
        ("graphics_lock_max_mhz", c_uint32),
        ("memory_lock_min_mhz", c_uint32),
        ("memory_lock_max_mhz", c_uint32),
        ("event_reasons", c_uint32),
        # modes
        ("persistence", c_uint32),
        ("compute_mode", c_uint32),
        ("accounting", c_uint32),
        ("accounting_buffer", c_uint32),
        ("display_attached", c_uint32),
        ("display_active", c_uint32),
        ("has_ecc", c_uint32),
        ("ecc_current", c_uint32),
        ("ecc_pending", c_uint32),
        ("mig_capable", c_uint32),
        ("mig_current", c_uint32),
        ("mig_pending", c_uint32),
        ("mig_max", c_uint32),
        # errors
        ("has_remapping", c_uint32),
        ("remapped_corrected", c_uint32),
        ("remapped_uncorrected", c_uint32),
        ("remapped_pending", c_uint32),
        ("remapped_failure", c_uint32),
        ("remap_histogram", c_uint32 * 5),
        ("reserved", c_uint32),
        ("ecc", c_uint64 * 8 * 2 * 2),
        ("event_types", c_uint64),
        # links
        ("pcie_gen", c_uint32),
        ("pcie_gen_max", c_uint32),
        ("pcie_width", c_uint32),
        ("pcie_width_max", c_uint32),
        ("pcie_tx_kbps", c_uint32),
        ("pcie_rx_kbps", c_uint32),
        ("pcie_replays", c_uint32),
        ("link_count", c_uint32),
        ("pcie_tx_bytes", c_uint64),
        ("pcie_rx_bytes", c_uint64),
        ("links", Link * LINKS),
        # tenants
        ("migs", Mig * MIGS),
        ("process_count", c_uint64),
        ("processes", Process * PROCESSES),
        ("sample_count", c_uint64),
        ("samples", Sample * SAMPLES),
        ("account_count", c_uint64),
        ("accounts", Account * ACCOUNTED),
    ]


class Event(ctypes.Structure):
    _fields_ = [
        ("type", c_uint64),
        ("data", c_uint64),
        ("gpu", c_uint32),
        ("gpu_instance", c_uint32),
        ("compute_instance", c_uint32),
        ("reserved", c_uint32),
    ]


class Holder(ctypes.Structure):
    _fields_ = [("start_ticks", c_uint64), ("pid", c_uint32), ("reserved", c_uint32)]


class Symbol(ctypes.Structure):
    _fields_ = [
        ("name", c_char * 72),
        ("calls", c_uint64 * COLUMNS),
        ("latency_us", c_uint64),
        ("hang", c_uint32),
        ("fault", c_uint16 * COLUMNS),
        ("reserved", c_uint16),
    ]


class State(ctypes.Structure):
    _fields_ = [
        ("magic", c_uint64),
        ("size", c_uint64),
        ("clock_us", c_uint64),
        ("driver_loaded", c_uint32),
        ("privileged", c_uint32),
        ("wake", c_uint32),
        ("cuda_version", c_int32),
        ("driver_version", c_char * 80),
        ("nvml_version", c_char * 80),
        ("topology", c_uint32 * GPUS * GPUS),
        ("p2p", c_uint32 * GPUS * GPUS),
        ("event_count", c_uint64),
        ("events", Event * EVENTS),
        ("holders", Holder * HOLDERS),
        ("symbols", Symbol * SYMBOLS),
        ("gpus", Gpu * GPUS),
    ]


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "fake_step": Step,
    "fake_process": Process,
    "fake_sample": Sample,
    "fake_account": Account,
    "fake_link": Link,
    "fake_mig": Mig,
    "fake_gpu": Gpu,
    "fake_event": Event,
    "fake_holder": Holder,
    "fake_symbol": Symbol,
    "fake_state": State,
}
"""By their names in state.h."""
