"""Every signal we can read and every knob we can turn, one declaration each.

A declaration *is* the registration of its metric: the name (without the `gpuagent_` prefix) ends in
its base unit, `on` and `dims` give the labels, `kind` the metric type, `expires` the age at which a
reading stops being true. For a knob it also says which direction is the safer one, how small a
difference is none, and what becomes of the setting on a stop, after a crash and on stale input.
"""

from types import MappingProxyType

from gpuagent.model.declare import (
    BUDGET_FATES,
    BUDGET_RULE,
    CARD_FATES,
    OWN_DAEMON_FATES,
    OWN_DAEMON_RULE,
    TENANT_FATES,
    Knob,
    On,
    Signal,
)

_GPU = (On.GPU,)
_NODE = (On.NODE,)
_SLICE = (On.GPU, On.MIG)
_TENANT = (On.TENANT,)
_TENANT_GPU = (On.TENANT_GPU,)

# -- the node ---------------------------------------------------------------------------------------
NODE_CPU_COUNT = Signal("node_cpus", _NODE, "Logical CPUs online.", expires=60)
NODE_CPU_BUSY_RATIO = Signal(
    "node_cpu_busy_ratio", _NODE, "Share of all CPU time not idle since the last reading."
)
NODE_CPU_PRESSURE_RATIO = Signal(
    "node_cpu_pressure_ratio",
    _NODE,
    "Share of the last 10 s in which some task waited for a CPU or its quota (PSI some avg10).",
    history=True,
)
NODE_IO_PRESSURE_RATIO = Signal(
    "node_io_pressure_ratio",
    _NODE,
    "Share of the last 10 s in which some task waited for I/O (PSI).",
)
NODE_MEMORY_PRESSURE_RATIO = Signal(
    "node_memory_pressure_ratio",
    _NODE,
    "Share of the last 10 s in which some task waited for memory (PSI).",
)
NODE_MEMORY_TOTAL_BYTES = Signal("node_memory_total_bytes", _NODE, "Host memory.", expires=60)
NODE_MEMORY_AVAILABLE_BYTES = Signal(
    "node_memory_available_bytes", _NODE, "Host memory that can be had without swapping."
)
NODE_POWER_WATTS = Signal(
    "node_gpu_power_watts",
    _NODE,
    "Board power of all GPUs together; absent unless every card was read.",
    history=True,
)

# -- a card -----------------------------------------------------------------------------------------
GPU_UTILIZATION_RATIO = Signal(
    "gpu_utilization_ratio",
    _GPU,
    "Share of the driver's sampling window in which some kernel ran (not how full the SMs were).",
    history=True,
)
GPU_MEMORY_BUSY_RATIO = Signal(
    "gpu_memory_busy_ratio",
    _GPU,
    "Share of the sampling window in which memory was read or written.",
)
GPU_MEMORY_TOTAL_BYTES = Signal(
    "gpu_memory_total_bytes", _SLICE, "Device memory, reserved memory included.", expires=60
)
GPU_MEMORY_USED_BYTES = Signal(
    "gpu_memory_used_bytes", _SLICE, "Device memory allocated.", history=True
)
GPU_MEMORY_FREE_BYTES = Signal("gpu_memory_free_bytes", _SLICE, "Device memory not allocated.")
GPU_MEMORY_RESERVED_BYTES = Signal(
    "gpu_memory_reserved_bytes", _SLICE, "Device memory the driver keeps for itself."
)
GPU_POWER_WATTS = Signal(
    "gpu_power_watts",
    _GPU,
    "Board power, averaged over one second where the card does.",
    history=True,
)
GPU_POWER_INSTANT_WATTS = Signal("gpu_power_instant_watts", _GPU, "Board power, momentary.")
GPU_POWER_LIMIT_WATTS = Signal(
    "gpu_power_limit_watts", _GPU, "Power limit as set on the card.", expires=15
)
GPU_POWER_LIMIT_ENFORCED_WATTS = Signal(
    "gpu_power_limit_enforced_watts",
    _GPU,
    "Power limit in force, the lowest of all limiters.",
    expires=15,
)
GPU_TEMPERATURE_CELSIUS = Signal(
    "gpu_temperature_celsius", _GPU, "Temperature of the GPU die.", history=True
)
GPU_MEMORY_TEMPERATURE_CELSIUS = Signal(
    "gpu_memory_temperature_celsius", _GPU, "Temperature of the device memory."
)
GPU_CLOCK_HERTZ = Signal(
    "gpu_clock_hertz", _GPU, "Current clock of a domain.", dims=("domain",), expires=15
)
GPU_THROTTLED = Signal(
    "gpu_throttled",
    _GPU,
    "1 while the driver holds clocks down for this reason, else 0.",
    dims=("reason",),
)
GPU_ENERGY_JOULES = Signal(
    "gpu_energy_joules_total", _GPU, "Energy used since the driver was loaded.", kind="counter"
)
GPU_ECC_ERRORS = Signal(
    "gpu_ecc_errors_total",
    _GPU,
    "ECC errors since the driver was loaded.",
    kind="counter",
    dims=("type",),
    expires=60,
)
GPU_REMAPPED_ROWS = Signal(
    "gpu_remapped_rows", _GPU, "Memory rows remapped, by cause.", dims=("cause",), expires=60
)
GPU_ROW_REMAP_PENDING = Signal(
    "gpu_row_remap_pending", _GPU, "1 if a remapping waits for a reset.", expires=60
)
GPU_ROW_REMAP_FAILED = Signal(
    "gpu_row_remap_failed", _GPU, "1 if a remapping has failed.", expires=60
)
GPU_PCIE_BYTES_PER_SECOND = Signal(
    "gpu_pcie_bytes_per_second",
    _GPU,
    "PCIe throughput over the driver's 20 ms window.",
    dims=("direction",),
    expires=15,
)
GPU_PCIE_REPLAYS = Signal(
    "gpu_pcie_replays_total", _GPU, "PCIe replays.", kind="counter", expires=60
)
GPU_NVLINK_BYTES = Signal(
    "gpu_nvlink_bytes_total",
    _GPU,
    "NVLink data moved over all links.",
    kind="counter",
    dims=("direction",),
    expires=15,
)
GPU_XID_ERRORS = Signal(
    "gpu_xid_errors_total",
    _GPU,
    "XID errors seen since the agent started, each once, from NVML and the kernel log.",
    kind="counter",
    dims=("xid",),
    expires=float("inf"),
)
GPU_XID_LAST_SECONDS = Signal(
    "gpu_xid_last_timestamp_seconds",
    _GPU,
    "Wall-clock time of the last XID of this code.",
    dims=("xid",),
    expires=float("inf"),
)

# -- a tenant on a card -----------------------------------------------------------------------------
TENANT_GPU_MEMORY_BYTES = Signal(
    "tenant_gpu_memory_bytes",
    _TENANT_GPU,
    "Device memory of the tenant's processes on this card.",
    expires=15,
    history=True,
)
TENANT_GPU_UTILIZATION_RATIO = Signal(
    "tenant_gpu_utilization_ratio",
    _TENANT_GPU,
    "Share of time in which kernels of the tenant ran, as the driver attributes it to processes.",
    expires=15,
    history=True,
)
TENANT_GPU_PROCESSES = Signal(
    "tenant_gpu_processes", _TENANT_GPU, "Processes of the tenant on this card.", expires=15
)

# -- a tenant on the host ---------------------------------------------------------------------------
TENANT_PROCESSES = Signal("tenant_processes", _TENANT, "Processes of the tenant.", expires=150)
TENANT_CPU_CORES = Signal(
    "tenant_cpu_cores", _TENANT, "CPU time used per second, in cores.", history=True
)
TENANT_CPU_THROTTLED_RATIO = Signal(
    "tenant_cpu_throttled_ratio", _TENANT, "Share of time in which cpu.max held the tenant back."
)
TENANT_CPU_PRESSURE_RATIO = Signal(
    "tenant_cpu_pressure_ratio",
    _TENANT,
    "PSI some avg10 of the tenant's cgroups, the worst of them.",
)
TENANT_HOST_MEMORY_BYTES = Signal(
    "tenant_host_memory_bytes", _TENANT, "Host memory charged to the tenant's cgroups."
)
TENANT_LATENCY_SECONDS = Signal(
    "tenant_latency_seconds",
    _TENANT,
    "Latency that the tenant says its requests had lately, at a quantile.",
    dims=("quantile",),
    expires=15,
)
TENANT_LATENCY_SOURCE_UP = Signal(
    "tenant_latency_source_up",
    _TENANT,
    "1 if the tenant's latency could be read from its own metrics at the last attempt, else 0.",
)
TENANT_FREEZES = Signal(
    "tenant_freezes_total",
    _TENANT,
    "How often the agent has frozen a control group of the tenant.",
    kind="counter",
    expires=60,
)
TENANT_FROZEN_SECONDS = Signal(
    "tenant_frozen_seconds_total",
    _TENANT,
    "Time for which it was frozen then, summed over its control groups.",
    kind="counter",
    expires=60,
)

# -- CUDA MPS ---------------------------------------------------------------------------------------
MPS_UP = Signal("mps_up", (On.MPS,), "1 while the MPS control daemon answers, else 0.", expires=75)
MPS_SERVERS = Signal("mps_servers", (On.MPS,), "Servers of the MPS control daemon.", expires=75)
MPS_FAULTED_SERVERS = Signal(
    "mps_faulted_servers",
    (On.MPS,),
    "Of these, those in state FAULT, which take no new clients; absent before driver 550.",
    expires=75,
)
MPS_CLIENTS = Signal(
    "mps_clients",
    (On.MPS,),
    "Processes connected to a server of the MPS control daemon.",
    expires=75,
)
TENANT_MPS_CLIENTS = Signal(
    "tenant_mps_clients", _TENANT, "Processes of the tenant that are MPS clients.", expires=75
)

# -- a control group of a tenant: what its files say now, ours or not ---------------------------------
CGROUP_CPU_CORES = Signal(
    "cgroup_cpu_cores", (On.CGROUP,), "CPU time used per second, in cores.", history=True
)
CGROUP_CPU_WEIGHT = Signal(
    "cgroup_cpu_weight", (On.CGROUP,), "cpu.weight as read (1 to 10000, default 100)."
)
CGROUP_CPU_MAX_CORES = Signal(
    "cgroup_cpu_max_cores", (On.CGROUP,), "cpu.max as read, in cores; +Inf when unlimited."
)

SIGNALS: tuple[Signal, ...] = tuple(v for v in list(globals().values()) if isinstance(v, Signal))

# -- knobs --------------------------------------------------------------------------------------------
_MPS_VERIFY_SECONDS = 15.0
"""An MPS control daemon writes a line into its log for each word it is asked, and never trims it."""

_SMI_VERIFY_SECONDS = 60.0
"""nvidia-smi opens every card to answer about one."""

CPU_WEIGHT = Knob(
    "cgroup_cpu_weight",
    on=On.CGROUP,
    unit="",
    help="cpu.weight: matters only while CPUs are contended, and only among siblings.",
    safer="min",
    deadband=1,
    family="cpu_weight",
    takes_effect="at once",
    fates=TENANT_FATES,
)
CPU_MAX = Knob(
    "cgroup_cpu_max",
    on=On.CGROUP,
    unit="cores",
    help="cpu.max: slows the threads that submit kernels; does little to a tenant of big graphs.",
    safer="min",
    deadband=0.01,
    family="cpu_max",
    takes_effect="at once",
    fates=TENANT_FATES,
)
IO_WEIGHT = Knob(
    "cgroup_io_weight",
    on=On.CGROUP,
    unit="",
    help="io.weight: matters only while disks are contended, and only among siblings.",
    safer="min",
    deadband=1,
    family="io_weight",
    takes_effect="at once",
    fates=TENANT_FATES,
)
MEMORY_HIGH = Knob(
    "cgroup_memory_high",
    on=On.CGROUP,
    unit="bytes",
    help="memory.high: host memory above which the tenant is slowed and reclaimed from.",
    safer="min",
    deadband=65536,
    family="host_memory",
    takes_effect="at once",
    fates=TENANT_FATES,
)
MEMORY_MAX = Knob(
    "cgroup_memory_max",
    on=On.CGROUP,
    unit="bytes",
    help="memory.max: host memory beyond which the kernel ends a process of the tenant.",
    safer="min",
    deadband=65536,
    family="host_memory",
    takes_effect="at once",
    fates=TENANT_FATES,
)
RUNNING = Knob(
    "cgroup_running",
    on=On.CGROUP,
    unit="ratio",
    help="Share of time in which the tenant is not frozen: stops submission, frees no memory.",
    safer="min",
    deadband=0.01,
    family="freeze",
    takes_effect="at once",
    fates=TENANT_FATES,
    leftover="frozen",
)
MPS_THREADS = Knob(
    "tenant_mps_threads",
    on=On.TENANT,
    unit="ratio",
    help="Ceiling on the multiprocessors of the tenant's next MPS client; no running one changes.",
    safer="min",
    deadband=0.005,
    family="mps",
    takes_effect="at the next launch",
    fates=TENANT_FATES,
    launch=True,
)
MPS_DEFAULT_THREADS = Knob(
    "mps_default_threads",
    on=On.MPS,
    unit="ratio",
    help="Ceiling on the multiprocessors of every client of the MPS daemon's next server.",
    safer="min",
    deadband=0.005,
    family="mps",
    takes_effect="when the daemon starts its next server",
    fates=CARD_FATES,
    launch=True,
    verify_seconds=_MPS_VERIFY_SECONDS,
)
MPS_DAEMON = Knob(
    "mps_daemon",
    on=On.MPS,
    unit="",
    help="1: an MPS control daemon of the agent's own runs; never ended while it has clients.",
    safer="max",
    deadband=0.5,
    family="mps",
    takes_effect="at the next launch",
    fates=CARD_FATES,
    fates_by_rule=MappingProxyType({OWN_DAEMON_RULE: OWN_DAEMON_FATES}),
    verify_seconds=_MPS_VERIFY_SECONDS,
)
SUSPENDED = Knob(
    "process_suspended",
    on=On.PROCESS,
    unit="",
    help="1: the process is suspended by cuda-checkpoint, its device memory freed.",
    safer="max",
    deadband=0.5,
    family="suspend",
    takes_effect="within seconds",
    fates=TENANT_FATES,
    leftover="locked",
    verify_seconds=30,
    put_back_seconds=600,
)
TERMINATED = Knob(
    "process_terminated",
    on=On.PROCESS,
    unit="",
    help="1: the process is ended, as an MPS client first, then by SIGTERM, grace and SIGKILL.",
    safer="max",
    deadband=0.5,
    family="terminate",
    takes_effect="after its grace",
    fates=TENANT_FATES,
    final=True,
    put_back_seconds=600,
)
NOTICED = Knob(
    "tenant_noticed",
    on=On.TENANT,
    unit="",
    help="1: the tenant has been told, by signal or command, that it is held back.",
    safer="max",
    deadband=0.5,
    family="notice",
    takes_effect="as the tenant pleases",
    fates=TENANT_FATES,
    final=True,
)
POWER_LIMIT = Knob(
    "gpu_power_limit",
    on=On.GPU,
    unit="watts",
    help="Board power limit: slows the whole card, every tenant on it.",
    safer="min",
    deadband=5,
    family="power_limit",
    takes_effect="within 10 to 500 ms",
    fates=CARD_FATES,
    fates_by_rule=MappingProxyType({BUDGET_RULE: BUDGET_FATES}),
    budgeted=True,
)
CLOCK_LIMIT = Knob(
    "gpu_clock_limit",
    on=On.GPU,
    unit="hertz",
    help="Highest clock the card may take: write-only, so what it reads as is what we last wrote.",
    safer="min",
    deadband=1e6,
    family="clock_limit",
    takes_effect="within 10 to 500 ms",
    fates=CARD_FATES,
    leftover="unknown",
)
COMPUTE_MODE = Knob(
    "gpu_compute_mode",
    on=On.GPU,
    unit="",
    help="Who may have a context: 0 everybody, 2 nobody, 3 one process at a time.",
    safer="max",
    deadband=0.5,
    family="card_mode",
    takes_effect="at the next launch",
    fates=CARD_FATES,
    verify_seconds=2,
)
PERSISTENCE_MODE = Knob(
    "gpu_persistence_mode",
    on=On.GPU,
    unit="",
    help="1: the driver keeps the card initialised while nobody uses it.",
    safer="max",
    deadband=0.5,
    family="card_mode",
    takes_effect="at once",
    fates=CARD_FATES,
    verify_seconds=2,
)
TIME_SLICE = Knob(
    "gpu_time_slice",
    on=On.GPU,
    unit="",
    help="How long a process has the card before the next: 0 default, 1 short, 2 medium, 3 long.",
    safer="min",
    deadband=0.5,
    family="card_mode",
    takes_effect="at once",
    fates=CARD_FATES,
    verify_seconds=_SMI_VERIFY_SECONDS,
)

KNOBS: tuple[Knob, ...] = tuple(v for v in list(globals().values()) if isinstance(v, Knob))

SIGNAL: dict[str, Signal] = {s.name: s for s in SIGNALS}
KNOB: dict[str, Knob] = {k.name: k for k in KNOBS}
