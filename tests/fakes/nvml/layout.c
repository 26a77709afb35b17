/* layout.c: tells a test where every field of the state lies, to compare with layout.py. */
#include "fake.h"

struct field {
    const char *owner, *name;
    size_t offset, size;
};

#define ROW(owner, field) \
    {#owner, #field, offsetof(struct owner, field), sizeof(((struct owner *)0)->field)},
#define STRUCT_ROW(owner, fields) {#owner, "", 0, sizeof(struct owner)},

/* The lists in state.h do not name their struct, so each has its own way to make a row. */
#define STEP_ROW(type, name, array) ROW(fake_step, name)
#define PROCESS_ROW(type, name, array) ROW(fake_process, name)
#define SAMPLE_ROW(type, name, array) ROW(fake_sample, name)
#define ACCOUNT_ROW(type, name, array) ROW(fake_account, name)
#define LINK_ROW(type, name, array) ROW(fake_link, name)
#define MIG_ROW(type, name, array) ROW(fake_mig, name)
#define GPU_ROW(type, name, array) ROW(fake_gpu, name)
#define EVENT_ROW(type, name, array) ROW(fake_event, name)
#define HOLDER_ROW(type, name, array) ROW(fake_holder, name)
#define SYMBOL_ROW(type, name, array) ROW(fake_symbol, name)
#define STATE_ROW(type, name, array) ROW(fake_state, name)

static const struct field fields[] = {
    FAKE_STRUCTS(STRUCT_ROW)
    FAKE_STEP_FIELDS(STEP_ROW)
    FAKE_PROCESS_FIELDS(PROCESS_ROW)
    FAKE_SAMPLE_FIELDS(SAMPLE_ROW)
    FAKE_ACCOUNT_FIELDS(ACCOUNT_ROW)
    FAKE_LINK_FIELDS(LINK_ROW)
    FAKE_MIG_FIELDS(MIG_ROW)
    FAKE_GPU_FIELDS(GPU_ROW)
    FAKE_EVENT_FIELDS(EVENT_ROW)
    FAKE_HOLDER_FIELDS(HOLDER_ROW)
    FAKE_SYMBOL_FIELDS(SYMBOL_ROW)
    FAKE_STATE_FIELDS(STATE_ROW)
};

/* Row `index` of the table, or NULL past its end. */
EXPORT const struct field *fakeNvmlLayout(unsigned int index);
EXPORT const struct field *fakeNvmlLayout(unsigned int index)
{
    return index < sizeof fields / sizeof *fields ? &fields[index] : NULL;
}
