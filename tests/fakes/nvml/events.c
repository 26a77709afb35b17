/* events.c: event sets. The state numbers every event; a set remembers up to where it has looked,
 * so that each set, in each process, gets each event once. */
#define _GNU_SOURCE
#include "fake.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { EVENT_SETS = 64 };

struct event_set {
    bool used;
    uint64_t next;             /* number of the first event not yet looked at */
    uint64_t types[FAKE_GPUS]; /* registered for */
    uint64_t since[FAKE_GPUS]; /* number of the first event after registering */
};
static struct event_set sets[EVENT_SETS]; /* under the lock, as everything */

static bool is_set(const struct event_set *set)
{
    return set >= sets && set < sets + EVENT_SETS && set->used;
}

EXPORT nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *out)
{
    ENTER(NULL, NO_DEVICE, WRITE);
    REQUIRE(out);
    for (struct event_set *set = sets; set < sets + EVENT_SETS; set++)
        if (!set->used) {
            *set = (struct event_set){.used = true, .next = call.state->event_count};
            *out = set;
            return NVML_SUCCESS;
        }
    return NVML_ERROR_INSUFFICIENT_RESOURCES;
}

EXPORT nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    ENTER(NULL, NO_DEVICE, WRITE);
    REQUIRE(is_set(set));
    set->used = false;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *out)
{
    ENTER(device, ANY_DEVICE, READ);
    REQUIRE(out);
    *out = call.gpu->event_types;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types,
                                             nvmlEventSet_t set)
{
    ENTER(device, ANY_DEVICE, WRITE);
    REQUIRE(is_set(set));
    SUPPORTED((types & ~call.gpu->event_types) == 0);
    if (set->types[call.slot] == 0)
        set->since[call.slot] = call.state->event_count;
    set->types[call.slot] |= types;
    return NVML_SUCCESS;
}

static bool wanted(const struct event_set *set, const struct fake_event *event, uint64_t number)
{
    return (set->types[event->gpu] & event->type) && number >= set->since[event->gpu];
}

static bool take_event(struct event_set *set, const struct fake_state *state, nvmlEventData_t *out)
{
    if (state->event_count > FAKE_EVENTS && set->next < state->event_count - FAKE_EVENTS)
        set->next =
            state->event_count - FAKE_EVENTS; /* fell out of the ring: lost, as in the driver */
    while (set->next < state->event_count) {
        uint64_t number = set->next++;
        const struct fake_event *event = &state->events[number % FAKE_EVENTS];
        if (!wanted(set, event, number))
            continue;
        *out = (nvmlEventData_t){device_handle(event->gpu, -1), event->type, event->data,
                                 event->gpu_instance, event->compute_instance};
        return true;
    }
    return false;
}

static bool waits_for_lost_gpu(const struct event_set *set, const struct fake_state *state)
{
    for (unsigned int slot = 0; slot < FAKE_GPUS; slot++)
        if (set->types[slot] && (!state->gpus[slot].present || state->gpus[slot].health == LOST))
            return true;
    return false;
}

/* An event that is there, or why there is none; TIMEOUT means that waiting may help. */
static nvmlReturn_t look(const struct call *call, struct event_set *set, nvmlEventData_t *out)
{
    REQUIRE(is_set(set) && out);
    if (take_event(set, call->state, out))
        return NVML_SUCCESS;
    if (waits_for_lost_gpu(set, call->state))
        return NVML_ERROR_GPU_IS_LOST;
    return call->state->driver_loaded ? NVML_ERROR_TIMEOUT : NVML_ERROR_UNKNOWN;
}

static struct timespec deadline_after(unsigned int timeout_ms)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    at.tv_sec += timeout_ms / 1000u;
    at.tv_nsec += (long)(timeout_ms % 1000u) * 1000000L;
    if (at.tv_nsec >= 1000000000L) {
        at.tv_sec++;
        at.tv_nsec -= 1000000000L;
    }
    return at;
}

/* Sleeps until the word changes or the time is up; says whether looking again is worth it. */
static bool wait_for_change(uint32_t *word, uint32_t seen, const struct timespec *deadline)
{
    long result =
        syscall(SYS_futex, word, FUTEX_WAIT_BITSET, seen, deadline, NULL, FUTEX_BITSET_MATCH_ANY);
    return result == 0 || errno != ETIMEDOUT;
}

/* Waits by the machine's clock even where the tests own the other: a real wait takes real time. */
EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *out,
                                        unsigned int timeout_ms)
{
    const struct timespec deadline = deadline_after(timeout_ms);
    ENTER(NULL, NO_DEVICE, WRITE);
    for (;;) {
        uint32_t seen =
            call.state->wake; /* read before looking, so that no event is slept through */
        nvmlReturn_t answer = look(&call, set, out);
        if (answer != NVML_ERROR_TIMEOUT)
            return answer;
        leave(&call);
        if (!wait_for_change(&call.state->wake, seen, &deadline))
            return NVML_ERROR_TIMEOUT;
        resume_call(&call, WRITE);
    }
}
