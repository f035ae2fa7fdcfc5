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
    enum { DEVICE_CARD, DEVICE_BOARD, DEVICE_INSTANCE } kind; /* a board of MIG instances; the instances follow it */
};

extern struct library {
    struct sim sim;
    int count, handles; /* devices that are counted; those and the MIG instances */
    int users;          /* of nvmlInit */
    struct nvmlDevice_st devices[SIM_CARDS + 1];
} library;

/* Errors that every call shares: not initialised, no such device. */
nvmlReturn_t library_ready(void);
nvmlReturn_t device_check(nvmlDevice_t device);
/* The place of errors on demand. */
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
/* Copies a list into a caller's array the way NVML does: the count says how many there are, too small an array is an
 * error. */
nvmlReturn_t put_list(void *out, unsigned *count, const void *items, unsigned have, size_t size);
/* The GPU instance that a card is; those of the smallest shape are numbered from 7. */
static inline unsigned instance_of(int card) {
    return library.sim.profile->mig ? 7u + (unsigned)card : 0xffffffffu;
}
/* The pid of a slot's process in the caller's pid namespace; 0: the caller cannot see it. */
unsigned pid_for_caller(uint32_t slot, const struct sim_process *process);
/* What the device is made of: of a board of MIG instances the board, else the cards. */
const struct sim_profile *profile_of(nvmlDevice_t device);
/* Share of the last second in which the card was busy, in parts per million. */
uint32_t device_share(nvmlDevice_t device);
/* Whether the argument's version word, which names the size too, is the expected one. */
#define CHECK_VERSION(argument, expected)                                                                              \
    do {                                                                                                               \
        if ((argument)->version != (expected))                                                                         \
            return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;                                                               \
    } while (0)
#endif
