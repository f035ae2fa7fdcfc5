/* Contexts: they cost device memory that only a table knows (limits: context_bytes), and what is allocated in them goes with them. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>

#include "capture.h"
#include "charge.h"
#include "fork.h"
#include "pacer.h"

#define MAX_DEVICES 64

struct context_charge {
    enum vgpu_verdict verdict;
    struct vgpu_ticket ticket;
    uint64_t bytes;
};

/* Charges what a context on this device is known to cost; an unknown cost (0) is left to the agent's overhead charge. */
static struct context_charge charge_context(CUdevice device) {
    struct context_charge charge = {.verdict = VGPU_UNCHARGED};
    enum vgpu_mode mode = vgpu_enforcement();
    if (mode == VGPU_UNLIMITED)
        return charge;
    const struct vgpu_limits *limits = vgpu_limits_now();
    unsigned card = vgpu_card_of_device(device);
    if (mode == VGPU_BROKEN || card == VGPU_CARD_UNLISTED) {
        charge.verdict = VGPU_REFUSED;
        return charge;
    }
    charge.bytes = limits && card < limits->card_count ? limits->cards[card].context_bytes : 0;
    if (charge.bytes)
        charge.verdict = vgpu_reserve(card, charge.bytes, &charge.ticket);
    return charge;
}

static CUresult created(const struct context_charge *charge, CUresult result, const CUcontext *context) {
    if (charge->verdict != VGPU_CHARGED)
        return result;
    if (result != CUDA_SUCCESS) {
        vgpu_uncharge(charge->ticket, charge->bytes);
        return result;
    }
    struct vgpu_holding holding = {.bytes = charge->bytes, .owner = *context, .ticket = charge->ticket, .kind = VGPU_KIND_CONTEXT};
    vgpu_hold(VGPU_CONTEXT, (uint64_t)(uintptr_t)*context, &holding);
    return result;
}

#define CREATE(device, ...)                                                                                                                        \
    struct context_charge charge = charge_context(device);                                                                                         \
    if (charge.verdict == VGPU_REFUSED)                                                                                                            \
        return CUDA_ERROR_OUT_OF_MEMORY;                                                                                                           \
    return created(&charge, real(__VA_ARGS__), context)

CUresult cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice device) {
    CUDA_REAL(cuCtxCreate);
    CREATE(device, context, flags, device);
}

CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device) {
    CUDA_REAL(cuCtxCreate_v2);
    CREATE(device, context, flags, device);
}

CUresult cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *affinity, int count, unsigned int flags, CUdevice device) {
    CUDA_REAL(cuCtxCreate_v3);
    CREATE(device, context, affinity, count, flags, device);
}

CUresult cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *parameters, unsigned int flags, CUdevice device) {
    CUDA_REAL(cuCtxCreate_v4);
    CREATE(device, context, parameters, flags, device);
}

static void gone(CUcontext context) {
    vgpu_context_gone(context);
    vgpu_captures_end(NULL, context);
}

static CUresult destroyed(CUresult result, CUcontext context) {
    if (result == CUDA_SUCCESS && context)
        gone(context);
    return result;
}

CUresult cuCtxDestroy_v2(CUcontext context) {
    CUDA_REAL(cuCtxDestroy_v2);
    vgpu_pacer_context_going(context);
    return destroyed(real(context), context);
}

CUresult cuCtxDestroy(CUcontext context) {
    CUDA_REAL(cuCtxDestroy);
    vgpu_pacer_context_going(context);
    return destroyed(real(context), context);
}

/* Destroys the context when it was attached only once; then asking it for its version fails. */
CUresult cuCtxDetach(CUcontext context) {
    CUDA_REAL(cuCtxDetach);
    vgpu_pacer_context_going(context);
    CUresult result = real(context);
    unsigned version;
    if (result == CUDA_SUCCESS && DRIVER(cuCtxGetApiVersion) && DRIVER(cuCtxGetApiVersion)(context, &version) != CUDA_SUCCESS)
        gone(context);
    return result;
}

/* The primary context of each device: retained many times, there once. */
enum primary_state { PRIMARY_NONE, PRIMARY_HELD, PRIMARY_COMING }; /* coming: one thread charges and asks the driver, the others wait for it */
static struct primary {
    atomic_int state; /* PRIMARY_HELD: `context` and the charge are set */
    CUcontext context;
} primaries[MAX_DEVICES];

void vgpu_primaries_forget(void) {
    for (unsigned i = 0; i < MAX_DEVICES; i++)
        atomic_store(&primaries[i].state, PRIMARY_NONE);
}

/* True: this thread is the one that charges; it says how that ended in `state`. A context that others made meanwhile is charged. */
static bool is_first(struct primary *primary) {
    for (;;) {
        int state = PRIMARY_NONE;
        if (atomic_compare_exchange_strong(&primary->state, &state, PRIMARY_COMING))
            return true;
        if (state == PRIMARY_HELD)
            return false;
        sched_yield();
    }
}

static bool is_active(CUdevice device) {
    unsigned flags;
    int active = 0;
    __typeof__(&cuDevicePrimaryCtxGetState) state = DRIVER(cuDevicePrimaryCtxGetState);
    return state && state(device, &flags, &active) == CUDA_SUCCESS && active;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CUDA_REAL(cuDevicePrimaryCtxRetain);
    if (device < 0 || device >= MAX_DEVICES || vgpu_enforcement() == VGPU_UNLIMITED)
        return real(context, device);
    vgpu_own_tables();
    struct primary *primary = &primaries[device];
    if (!is_first(primary))
        return real(context, device);
    struct context_charge charge = charge_context(device);
    CUresult result = charge.verdict == VGPU_REFUSED ? CUDA_ERROR_OUT_OF_MEMORY : created(&charge, real(context, device), context);
    if (result == CUDA_SUCCESS)
        primary->context = *context;
    atomic_store(&primary->state, result == CUDA_SUCCESS ? PRIMARY_HELD : PRIMARY_NONE);
    return result;
}

/* After a release or reset: when the context is no longer active, its memory is back on the card. */
static CUresult primary_released(CUresult result, CUdevice device) {
    if (result != CUDA_SUCCESS || device < 0 || device >= MAX_DEVICES || is_active(device))
        return result;
    struct primary *primary = &primaries[device];
    CUcontext context = primary->context;
    int held = PRIMARY_HELD;
    if (atomic_compare_exchange_strong(&primary->state, &held, PRIMARY_NONE) && context)
        gone(context);
    return result;
}

static void primary_going(CUdevice device) {
    if (device >= 0 && device < MAX_DEVICES && atomic_load(&primaries[device].state) == PRIMARY_HELD && primaries[device].context)
        vgpu_pacer_context_going(primaries[device].context);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    CUDA_REAL(cuDevicePrimaryCtxRelease_v2);
    primary_going(device);
    return primary_released(real(device), device);
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    CUDA_REAL(cuDevicePrimaryCtxRelease);
    primary_going(device);
    return primary_released(real(device), device);
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    CUDA_REAL(cuDevicePrimaryCtxReset_v2);
    primary_going(device);
    return primary_released(real(device), device);
}

CUresult cuDevicePrimaryCtxReset(CUdevice device) {
    CUDA_REAL(cuDevicePrimaryCtxReset);
    primary_going(device);
    return primary_released(real(device), device);
}
