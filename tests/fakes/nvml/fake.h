/* fake.h: what the library's files share.
 *
 * Theory of operation. nvmlInit maps the state file. Every exported function starts with ENTER,
 * which checks that the library is initialised and the handle is ours, counts the call, lets the
 * tests' faults act (latency, hang, error), takes the lock and refuses when the card is lost; the
 * lock is let go when the function returns, whichever way. What remains of a function is its own
 * meaning, mostly one expression.
 *
 * The lock is flock() on the state file: shared for readers, exclusive for writers, and released
 * by the kernel when a holder is killed, which a mutex in shared memory is not.
 */
#ifndef FAKE_NVML_FAKE_H
#define FAKE_NVML_FAKE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nvml_abi.h"
#include "state.h"

/* Which library this is: the symbols of a 590 or of a 550 driver. */
#ifndef FAKE_NVML_DRIVER
#define FAKE_NVML_DRIVER 590
#endif

#define EXPORT __attribute__((visibility("default")))

enum access { READ, WRITE };

/* What a function accepts as its device. */
enum scope {
    NO_DEVICE,
    GPU_ONLY,   /* a MIG handle is answered NOT_SUPPORTED */
    ANY_DEVICE, /* GPU or MIG device */
};

/* The place an exported function keeps its row in the state's symbol table. */
struct site {
    const char *name;
    struct fake_symbol *symbol;
    const struct fake_state *of;
};

/* One call in progress. */
struct call {
    struct fake_state *state;
    struct fake_gpu *gpu; /* NULL for NO_DEVICE */
    struct fake_mig *mig; /* NULL unless the handle is a MIG device's */
    unsigned int slot;
    uint64_t now_us; /* monotonic, or the tests' clock */
    bool locked;
};

nvmlReturn_t enter(struct call *call, struct site *site, nvmlDevice_t device, enum scope scope,
                   enum access access);
void leave(struct call *call);
/* A call that waits leaves in its midst and takes the lock again. */
void resume_call(struct call *call, enum access access);

#define ENTER(device, scope, access) \
    static struct site site_ = {.name = __func__}; \
    __attribute__((cleanup(leave))) struct call call = {0}; \
    do { \
        nvmlReturn_t entered_ = enter(&call, &site_, device, scope, access); \
        if (entered_ != NVML_SUCCESS) \
            return entered_; \
    } while (0)

#define REQUIRE(condition) ANSWER_UNLESS(condition, NVML_ERROR_INVALID_ARGUMENT)
#define SUPPORTED(condition) ANSWER_UNLESS(condition, NVML_ERROR_NOT_SUPPORTED)
#define REQUIRE_VERSION(out, type, number) \
    ANSWER_UNLESS((out)->version == STRUCT_VERSION(type, number), \
                  NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
#define ANSWER_UNLESS(condition, error) \
    do { \
        if (!(condition)) \
            return error; \
    } while (0)

/* core.c */
nvmlDevice_t device_handle(unsigned int slot, int mig);
nvmlReturn_t resolve_handle(nvmlDevice_t device, unsigned int *slot, int *mig);
unsigned int gpus_seen(void);
unsigned int gpu_seen(unsigned int index);
bool index_of_slot(unsigned int slot, unsigned int *index);
void look_for_gpus(void);
bool privileged(const struct fake_state *state);
unsigned int other_holders(const struct fake_state *state);
uint64_t stamp_us(const struct fake_state *state);
nvmlReturn_t copy_string(char *to, unsigned int length, const char *from);

/* power.c */
uint32_t power_limit_in_force(const struct fake_gpu *gpu, uint64_t now_us);
uint32_t power_instant_mw(const struct fake_gpu *gpu, uint64_t now_us);
uint32_t power_average_mw(const struct fake_gpu *gpu, uint64_t now_us);
uint32_t power_usage_mw(const struct fake_gpu *gpu, uint64_t now_us);
uint64_t power_energy_mj(const struct fake_gpu *gpu, uint64_t now_us);
uint64_t power_capped_ns(const struct fake_gpu *gpu, uint64_t now_us);
void power_set_limit(struct fake_gpu *gpu, uint64_t now_us, uint32_t mw);

/* getters.c, errors.c */
uint32_t current_clock_mhz(const struct fake_gpu *gpu, unsigned int type);
uint64_t event_reasons(const struct fake_gpu *gpu, uint64_t now_us);
uint64_t total_ecc(const struct fake_gpu *gpu, unsigned int uncorrected, unsigned int aggregate);

#endif
