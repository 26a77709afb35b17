/* core.c: initialising, handles, the lock, and what happens before any function does its work. */
#define _GNU_SOURCE
#include "fake.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define STATE_VARIABLE "GPUAGENT_FAKE_NVML"

/* A device handle is the address of one of these; column 0 is the GPU, the rest its MIG devices. */
struct handle {
    char unused;
};
static struct handle handles[FAKE_GPUS][1 + FAKE_MIGS];

/* This process's library. The mapping outlives a shutdown, since a call may still hang in it. */
static struct {
    pthread_mutex_t mutex;
    unsigned int references;
    struct fake_state *state;
    dev_t device;
    ino_t inode;
    int fd;
    pid_t pid; /* that opened fd: after a fork the child needs its own, or it shares our lock */
    unsigned int seen[FAKE_GPUS];
    unsigned int seen_count;
} library = {.mutex = PTHREAD_MUTEX_INITIALIZER, .fd = -1};

/* ---- time ---- */

static uint64_t clock_read_us(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

static uint64_t now_us(const struct fake_state *state)
{
    return state->clock_us ? state->clock_us : clock_read_us(CLOCK_MONOTONIC);
}

/* NVML stamps its samples with the time since the epoch. */
uint64_t stamp_us(const struct fake_state *state)
{
    return state->clock_us ? state->clock_us : clock_read_us(CLOCK_REALTIME);
}

static void sleep_us(uint64_t us)
{
    struct timespec left = {(time_t)(us / 1000000u), (long)(us % 1000000u) * 1000};
    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        continue;
}

/* ---- the state file ---- */

static struct fake_state *map_state(int fd, nvmlReturn_t *error)
{
    *error = NVML_ERROR_DRIVER_NOT_LOADED;
    struct stat file;
    if (fstat(fd, &file) != 0 || (size_t)file.st_size < sizeof(struct fake_state))
        return NULL;
    void *map = mmap(NULL, sizeof(struct fake_state), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED)
        return NULL;
    struct fake_state *state = map;
    if (state->magic == FAKE_MAGIC && state->size == sizeof(struct fake_state)) {
        library.device = file.st_dev;
        library.inode = file.st_ino;
        return state;
    }
    munmap(map, sizeof(struct fake_state));
    *error = NVML_ERROR_LIB_RM_VERSION_MISMATCH; /* written by another version of layout.py */
    return NULL;
}

static bool already_mapped(int fd)
{
    struct stat file;
    return library.state != NULL && fstat(fd, &file) == 0 && file.st_dev == library.device &&
           file.st_ino == library.inode;
}

static void close_state(void)
{
    if (library.fd >= 0)
        close(library.fd);
    library.fd = -1;
}

static nvmlReturn_t open_state(void)
{
    const char *path = getenv(STATE_VARIABLE);
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return NVML_ERROR_DRIVER_NOT_LOADED;
    nvmlReturn_t error = NVML_SUCCESS;
    if (!already_mapped(fd)) {
        struct fake_state *state = map_state(fd, &error);
        if (state == NULL) {
            close(fd);
            return error;
        }
        library.state = state;
    }
    close_state();
    library.fd = fd;
    library.pid = getpid();
    return NVML_SUCCESS;
}

/* ---- the lock ---- */

static void unlock(void)
{
    flock(library.fd, LOCK_UN);
    pthread_mutex_unlock(&library.mutex);
}

static void flock_state(enum access access)
{
    while (flock(library.fd, access == WRITE ? LOCK_EX : LOCK_SH) != 0 && errno == EINTR)
        continue;
}

static void adopt_fork(void);

static void lock(enum access access)
{
    pthread_mutex_lock(&library.mutex);
    if (library.pid != getpid())
        adopt_fork();
    flock_state(access);
}

/* ---- processes that hold the library ---- */

/* Field 22 of /proc/PID/stat, or 0 for a process that is gone or only waits to be reaped. */
static uint64_t process_start(uint32_t pid)
{
    char path[32], line[1024];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return 0;
    size_t length = fread(line, 1, sizeof line - 1, file);
    fclose(file);
    line[length] = '\0';
    const char *rest = strrchr(line, ')'); /* the name before it may hold anything */
    unsigned long long start = 0;
    char status = 'X';
    if (rest == NULL ||
        sscanf(rest + 1,
               " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu",
               &status, &start) != 2)
        return 0;
    return status == 'Z' || status == 'X' ? 0 : start;
}

static bool alive(const struct fake_holder *holder)
{
    return holder->pid != 0 && process_start(holder->pid) == holder->start_ticks;
}

static bool add_holder(struct fake_state *state)
{
    for (unsigned int i = 0; i < FAKE_HOLDERS; i++) {
        struct fake_holder *holder = &state->holders[i];
        if (alive(holder))
            continue;
        holder->pid = (uint32_t)getpid();
        holder->start_ticks = process_start(holder->pid);
        return true;
    }
    return false;
}

static void remove_holder(struct fake_state *state)
{
    for (unsigned int i = 0; i < FAKE_HOLDERS; i++)
        if (state->holders[i].pid == (uint32_t)getpid())
            state->holders[i] = (struct fake_holder){0};
}

unsigned int other_holders(const struct fake_state *state)
{
    unsigned int count = 0;
    for (unsigned int i = 0; i < FAKE_HOLDERS; i++)
        count += state->holders[i].pid != (uint32_t)getpid() && alive(&state->holders[i]);
    return count;
}

/* A forked child inherits an initialised library: it gets a lock of its own and is a holder. */
static void adopt_fork(void)
{
    if (open_state() != NVML_SUCCESS)
        return;
    flock_state(WRITE);
    add_holder(library.state);
    flock(library.fd, LOCK_UN);
}

/* ---- which GPUs this process has seen, and their handles ---- */

/* As the real library, the fake enumerates when it is initialised: a card that appears later is
 * not there before the next time (or nvmlDeviceDiscoverGpus). */
void look_for_gpus(void)
{
    library.seen_count = 0;
    for (unsigned int slot = 0; slot < FAKE_GPUS; slot++)
        if (library.state->gpus[slot].present)
            library.seen[library.seen_count++] = slot;
}

unsigned int gpus_seen(void)
{
    return library.seen_count;
}

unsigned int gpu_seen(unsigned int index)
{
    return library.seen[index];
}

bool index_of_slot(unsigned int slot, unsigned int *index)
{
    for (*index = 0; *index < library.seen_count; (*index)++)
        if (library.seen[*index] == slot)
            return true;
    return false;
}

nvmlDevice_t device_handle(unsigned int slot, int mig)
{
    return &handles[slot][1 + mig];
}

nvmlReturn_t resolve_handle(nvmlDevice_t device, unsigned int *slot, int *mig)
{
    uintptr_t first = (uintptr_t)&handles[0][0], at = (uintptr_t)device;
    if (at < first || at >= first + sizeof handles)
        return NVML_ERROR_INVALID_ARGUMENT;
    size_t number = (at - first) / sizeof(struct handle);
    *slot = (unsigned int)(number / (1 + FAKE_MIGS));
    *mig = (int)(number % (1 + FAKE_MIGS)) - 1;
    return NVML_SUCCESS;
}

bool privileged(const struct fake_state *state)
{
    return state->privileged && geteuid() == 0;
}

nvmlReturn_t copy_string(char *to, unsigned int length, const char *from)
{
    REQUIRE(to);
    ANSWER_UNLESS(strlen(from) < length, NVML_ERROR_INSUFFICIENT_SIZE);
    strcpy(to, from);
    return NVML_SUCCESS;
}

/* ---- what precedes every call ---- */

static struct fake_symbol *find_symbol(struct site *site, struct fake_state *state)
{
    if (site->of == state)
        return site->symbol;
    struct fake_symbol *found = NULL;
    for (unsigned int i = 0; i < FAKE_SYMBOLS && found == NULL; i++)
        if (strcmp(state->symbols[i].name, site->name) == 0)
            found = &state->symbols[i];
    if (found == NULL)
        abort(); /* FakeNvml.create lists every exported symbol: the build is broken */
    site->symbol = found;
    site->of = state;
    return found;
}

/* Stuck in the driver: nothing but SIGKILL, or the test, ends it. */
static void hang(const struct fake_symbol *symbol, unsigned int column)
{
    const volatile uint32_t *bits = &symbol->hang;
    if (!(*bits >> column & 1))
        return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    while (*bits >> column & 1)
        sleep_us(20000);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Count the call and let the tests' faults act. Without the lock: a stuck call must not stop
 * others. */
static nvmlReturn_t act_faults(struct site *site, struct fake_state *state, unsigned int column)
{
    struct fake_symbol *symbol = find_symbol(site, state);
    __atomic_fetch_add(&symbol->calls[column], 1, __ATOMIC_RELAXED);
    if (symbol->latency_us)
        sleep_us(symbol->latency_us);
    hang(symbol, column);
    if (!state->driver_loaded)
        return NVML_ERROR_DRIVER_NOT_LOADED;
    return symbol->fault[column];
}

static nvmlReturn_t check_device(struct call *call, int mig, enum scope scope)
{
    call->gpu = &call->state->gpus[call->slot];
    if (!call->gpu->present || call->gpu->health == LOST)
        return NVML_ERROR_GPU_IS_LOST;
    if (call->gpu->health == NEEDS_RESET)
        return NVML_ERROR_RESET_REQUIRED;
    if (mig < 0)
        return NVML_SUCCESS;
    call->mig = &call->gpu->migs[mig];
    if (!call->gpu->mig_current || !call->mig->present)
        return NVML_ERROR_INVALID_ARGUMENT; /* a handle from before MIG was reconfigured */
    return scope == GPU_ONLY ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

void resume_call(struct call *call, enum access access)
{
    lock(access);
    call->locked = true;
    call->now_us = now_us(call->state);
}

nvmlReturn_t enter(struct call *call, struct site *site, nvmlDevice_t device, enum scope scope,
                   enum access access)
{
    if (library.references == 0)
        return NVML_ERROR_UNINITIALIZED; /* before any look at the arguments [measured, 550] */
    int mig = -1;
    if (scope != NO_DEVICE && resolve_handle(device, &call->slot, &mig) != NVML_SUCCESS)
        return NVML_ERROR_INVALID_ARGUMENT;
    call->state = library.state;
    nvmlReturn_t fault =
        act_faults(site, call->state, scope == NO_DEVICE ? FAKE_NO_GPU : call->slot);
    if (fault != NVML_SUCCESS)
        return fault;
    resume_call(call, access);
    return scope == NO_DEVICE ? NVML_SUCCESS : check_device(call, mig, scope);
}

void leave(struct call *call)
{
    if (call->locked)
        unlock();
    call->locked = false;
}

/* ---- initialising ---- */

static nvmlReturn_t attach(struct site *site)
{
    nvmlReturn_t opened = open_state();
    if (opened != NVML_SUCCESS)
        return opened;
    nvmlReturn_t fault = act_faults(site, library.state, FAKE_NO_GPU);
    if (fault != NVML_SUCCESS) {
        close_state();
        return fault;
    }
    flock_state(WRITE);
    bool added = add_holder(library.state);
    look_for_gpus();
    flock(library.fd, LOCK_UN);
    return added ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_RESOURCES;
}

static nvmlReturn_t initialise(struct site *site)
{
    pthread_mutex_lock(&library.mutex);
    nvmlReturn_t answer =
        library.references > 0 ? act_faults(site, library.state, FAKE_NO_GPU) : attach(site);
    library.references += answer == NVML_SUCCESS;
    pthread_mutex_unlock(&library.mutex);
    return answer;
}

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    static struct site site = {.name = "nvmlInitWithFlags"};
    (void)
        flags; /* NO_GPUS and NO_ATTACH change when the driver wakes a card, not what it answers */
    return initialise(&site);
}

EXPORT nvmlReturn_t nvmlInit_v2(void)
{
    static struct site site = {.name = "nvmlInit_v2"};
    return initialise(&site);
}

EXPORT nvmlReturn_t nvmlInit(void)
{
    static struct site site = {.name = "nvmlInit"};
    return initialise(&site);
}

/* Answers success even when never initialised [measured, 550]. */
EXPORT nvmlReturn_t nvmlShutdown(void)
{
    static struct site site = {.name = "nvmlShutdown"};
    if (library.references == 0)
        return NVML_SUCCESS;
    nvmlReturn_t fault = act_faults(&site, library.state, FAKE_NO_GPU);
    if (fault != NVML_SUCCESS && fault != NVML_ERROR_DRIVER_NOT_LOADED)
        return fault;
    lock(WRITE);
    if (--library.references == 0)
        remove_holder(library.state);
    unlock();
    if (library.references == 0)
        close_state();
    return NVML_SUCCESS;
}

/* Texts of the real library [measured, 550], where 30 is still unknown. */
EXPORT const char *nvmlErrorString(nvmlReturn_t result)
{
    static const char *const texts[] = {
        "Success",
        "Uninitialized",
        "Invalid Argument",
        "Not Supported",
        "Insufficient Permissions",
        "Already Initialized",
        "Not Found",
        "Insufficient Size",
        "Insufficient External Power",
        "Driver Not Loaded",
        "Timeout",
        "Interrupt Request Issue",
        "NVML Shared Library Not Found",
        "Function Not Found",
        "Corrupted infoROM",
        "GPU is lost",
        "GPU requires reset",
        "GPU access blocked by the operating system",
        "Driver/library version mismatch",
        "In use by another client",
        "Insufficient Memory",
        "No data",
        "vGPU ECC not supported",
        "Insufficient Resources",
        "Invalid Frequency",
        "Argument version mismatch",
        "Requested functionality has been deprecated",
        "System is not in ready state",
        "No supported GPUs were found",
        "Resource not in correct state to perform requested operation",
    };
    return result < sizeof texts / sizeof *texts ? texts[result] : "Unknown Error";
}
