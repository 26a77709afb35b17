/* shapes.h: functions that hand out a value as it lies in the state, as rows of tables. */
#ifndef FAKE_NVML_SHAPES_H
#define FAKE_NVML_SHAPES_H

#include "fake.h"

typedef unsigned int uint;
typedef unsigned long long ulonglong;

/* Three shapes cover most of NVML: one value, one string, two values.
 * Each row: symbol, devices it accepts, [type,] when it is supported, and the value. */
#define VALUE(symbol, scope, type, supported, value) \
    EXPORT nvmlReturn_t symbol(nvmlDevice_t device, type *out) \
    { \
        ENTER(device, scope, READ); \
        const struct fake_gpu *gpu = call.gpu; \
        const struct fake_mig *mig = call.mig; \
        (void)gpu, (void)mig; \
        REQUIRE(out); \
        SUPPORTED(supported); \
        *out = (type)(value); \
        return NVML_SUCCESS; \
    }

#define STRING(symbol, scope, supported, value) \
    EXPORT nvmlReturn_t symbol(nvmlDevice_t device, char *out, unsigned int length) \
    { \
        ENTER(device, scope, READ); \
        const struct fake_gpu *gpu = call.gpu; \
        const struct fake_mig *mig = call.mig; \
        (void)gpu, (void)mig; \
        SUPPORTED(supported); \
        return copy_string(out, length, value); \
    }

#define PAIR(symbol, type, supported, first_value, second_value) \
    EXPORT nvmlReturn_t symbol(nvmlDevice_t device, type *first, type *second) \
    { \
        ENTER(device, GPU_ONLY, READ); \
        const struct fake_gpu *gpu = call.gpu; \
        (void)gpu; \
        REQUIRE(first && second); \
        SUPPORTED(supported); \
        *first = (type)(first_value); \
        *second = (type)(second_value); \
        return NVML_SUCCESS; \
    }

#endif
