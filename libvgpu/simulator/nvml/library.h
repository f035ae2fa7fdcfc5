/* What the sources of the simulated libnvidia-ml share. */
#ifndef VGPU_SIMULATOR_LIBRARY_H
#define VGPU_SIMULATOR_LIBRARY_H
#define NVML_NO_UNVERSIONED_FUNC_DEFS /* declares every version of every function under its own symbol */
#pragma GCC visibility push(default)
#include <nvml.h>
#pragma GCC visibility pop
#include <stdbool.h>
#include <stddef.h>

#include "common/state.h"

struct nvmlDevice_st {
    int card;
    enum { DEVICE_CARD, DEVICE_BOARD, DEVICE_INSTANCE } kind; /* BOARD: a board of MIG instances, which follow it */
};

extern struct library {
    struct sim sim;
    int count, handles; /* counted devices; counted devices plus MIG instances */
    int users;          /* number of open nvmlInit calls */
    struct nvmlDevice_st devices[SIM_CARDS + 1];
} library;

/* Errors that every call can return: not initialised, no such device. */
nvmlReturn_t library_ready(void);
nvmlReturn_t device_check(nvmlDevice_t device);
/* Injects errors on demand. */
#define INJECT()                                                                                                       \
    do {                                                                                                               \
        if (sim_faults_armed(&library.sim)) {                                                                          \
            int injected = sim_fault(&library.sim, __func__);                                                          \
            if (injected)                                                                                              \
                return (nvmlReturn_t)injected;                                                                         \
        }                                                                                                              \
    } while (0)
#define ENTER()                                                                                                        \
    do {                                                                                                               \
        nvmlReturn_t entered = library_ready();                                                                        \
        if (entered)                                                                                                   \
            return entered;                                                                                            \
        INJECT();                                                                                                      \
    } while (0)
#define ENTER_DEVICE(device, argument)                                                                                 \
    do {                                                                                                               \
        INJECT();                                                                                                      \
        nvmlReturn_t entered = device_check(device);                                                                   \
        if (entered)                                                                                                   \
            return entered;                                                                                            \
        if (!(argument))                                                                                               \
            return NVML_ERROR_INVALID_ARGUMENT;                                                                        \
    } while (0)

nvmlReturn_t put_text(char *out, unsigned length, const char *text);
/* Copies a list into a caller's array as NVML does: `count` returns the number of items; an array that is too small is
 * an error. */
nvmlReturn_t put_list(void *out, unsigned *count, const void *items, unsigned have, size_t size);
/* The GPU instance of a card; instances of the smallest shape are numbered from 7. */
static inline unsigned instance_of(int card) {
    return library.sim.profile->mig ? 7u + (unsigned)card : 0xffffffffu;
}
/* The pid of a slot's process in the caller's pid namespace; 0: the caller cannot see it. */
unsigned pid_for_caller(uint32_t slot, const struct sim_process *process);
/* The profile of the device's hardware: of the board for MIG instances, else of the cards. */
const struct sim_profile *profile_of(nvmlDevice_t device);
/* Share of the last second in which the card was busy, in parts per million. */
uint32_t device_share(nvmlDevice_t device);
/* Checks the argument's version word, which also contains the size. */
#define CHECK_VERSION(argument, expected)                                                                              \
    do {                                                                                                               \
        if ((argument)->version != (expected))                                                                         \
            return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;                                                               \
    } while (0)
#endif
