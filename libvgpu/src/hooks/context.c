/* Contexts. A context costs device memory; the amount comes from the limits (context_bytes). What is allocated in a
 * context is freed with it. */
#define _GNU_SOURCE
#include <string.h>

#include "base/lock.h"
#include "gate/streams.h"
#include "hooks/context.h"
#include "hooks/sparse.h"
#include "ledger/charge.h"
#include "pacer/pacer.h"
#include "pacer/samples.h"
#include "reserves/capture.h"
#include "tier/parameters.h"
#include "tier/tier.h"

#define MAX_DEVICES 64

static atomic_bool others_made; /* by cuCtxCreate: such contexts may be uncharged, and so unknown */

struct context_charge {
    enum vgpu_verdict verdict;
    struct vgpu_ticket ticket;
    uint64_t bytes;
};

/* Charges the known cost of a context on this device. If the cost is unknown (0), the agent's overhead charge covers
 * it. */
static struct context_charge charge_context(CUdevice device) {
    struct context_charge charge = {.verdict = VGPU_UNCHARGED};
    enum vgpu_mode mode = vgpu_enforcement();
    if (mode == VGPU_UNLIMITED)
        return charge;
    const struct vgpu_limits *limits = vgpu_limits_now();
    unsigned card = vgpu_card_of_device(device);
    if (mode == VGPU_BROKEN || card == VGPU_CARD_UNLISTED) {
        if (mode != VGPU_BROKEN && !vgpu_device_exists(device)) /* or the driver is not initialized: it reports that */
            return charge;
        charge.verdict = VGPU_REFUSED;
        return charge;
    }
    charge.bytes = limits && card < limits->card_count ? limits->cards[card].context_bytes : 0;
    if (charge.bytes)
        charge.verdict = vgpu_reserve(card, charge.bytes, &charge.ticket);
    return charge;
}

/* Books `made` before the program gets it. A context that cannot be remembered is not given to the program. */
static CUresult created(const struct context_charge *charge, CUresult result, CUcontext made, CUcontext *context,
                        bool primary, CUdevice device) {
    if (charge->verdict == VGPU_CHARGED) {
        struct vgpu_holding holding = {
            .bytes = charge->bytes, .owner = made, .ticket = charge->ticket, .kind = VGPU_KIND_CONTEXT};
        if (result != CUDA_SUCCESS) {
            vgpu_uncharge(charge->ticket, charge->bytes);
        } else if (!vgpu_hold(VGPU_CONTEXT, (uint64_t)(uintptr_t)made, &holding)) {
            if (primary && DRIVER(cuDevicePrimaryCtxRelease_v2))
                DRIVER(cuDevicePrimaryCtxRelease_v2)(device);
            else if (!primary && DRIVER(cuCtxDestroy_v2))
                DRIVER(cuCtxDestroy_v2)(made);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    if (result == CUDA_SUCCESS && !primary)
        atomic_store(&others_made, true);
    if (result == CUDA_SUCCESS) {
        *context = made;
        vgpu_charges_pass_on();
    }
    return result;
}

#define CREATE(device, ...)                                                                                            \
    struct context_charge charge = charge_context(device);                                                             \
    if (charge.verdict == VGPU_REFUSED)                                                                                \
        return CUDA_ERROR_OUT_OF_MEMORY;                                                                               \
    CUcontext made = NULL;                                                                                             \
    CUresult result = real(context ? &made : NULL, __VA_ARGS__);                                                       \
    return created(&charge, result, made, context, false, device)

CUresult cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice device) {
    CUDA_REAL(cuCtxCreate);
    CREATE(device, flags, device);
}

CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device) {
    CUDA_REAL(cuCtxCreate_v2);
    CREATE(device, flags, device);
}

CUresult cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *affinity, int count, unsigned int flags,
                        CUdevice device) {
    CUDA_REAL(cuCtxCreate_v3);
    CREATE(device, affinity, count, flags, device);
}

CUresult cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *parameters, unsigned int flags, CUdevice device) {
    CUDA_REAL(cuCtxCreate_v4);
    CREATE(device, parameters, flags, device);
}

/* A context that the next driver call may destroy. */
struct leaving {
    CUcontext context;
    struct vgpu_moment before;
    uint64_t blocks_before;
    struct vgpu_departure departure;
    bool sparse, gated;
};

static void going(struct leaving *leaving, CUcontext context) {
    *leaving = (struct leaving){.context = context, .departure.context = context};
    vgpu_own_tables();
    vgpu_tier_context_going(context); /* outside the gate: a thread that moves blocks waits for all threads inside */
    leaving->gated = vgpu_gate_is_armed();
    if (leaving->gated) {
        vgpu_gate_enter(); /* so that no thread asks about its streams meanwhile */
        vgpu_streams_context_going(context);
        /* its functions are unloaded with it: their handles may come back before the driver returns */
        vgpu_parameters_stale();
    }
    vgpu_samples_going(context);
    vgpu_sizes_moment(&leaving->before);
    leaving->blocks_before = vgpu_tier_moment();
    vgpu_capture_departs(&leaving->departure);
    leaving->sparse = vgpu_sparse_going();
}

static void went(const struct leaving *leaving, bool gone) {
    vgpu_sparse_gone(leaving->sparse, gone, NULL, leaving->context);
    vgpu_capture_departed(&leaving->departure);
    vgpu_samples_went(leaving->context, gone);
    vgpu_pacer_waited();
    if (gone) {
        vgpu_context_gone(leaving->context, &leaving->before);
        vgpu_captures_end(NULL, leaving->context);
    }
    if (leaving->gated) {
        vgpu_streams_context_went(leaving->context, gone);
        if (gone)
            vgpu_parameters_stale(); /* for what threads have asked about them meanwhile */
        vgpu_gate_leave();
    }
    vgpu_tier_context_went(leaving->context, gone, leaving->blocks_before);
}

CUresult cuCtxDestroy_v2(CUcontext context) {
    CUDA_REAL(cuCtxDestroy_v2);
    struct leaving leaving;
    going(&leaving, context);
    CUresult result = real(context);
    went(&leaving, result == CUDA_SUCCESS && context);
    return result;
}

CUresult cuCtxDestroy(CUcontext context) {
    CUDA_REAL(cuCtxDestroy);
    struct leaving leaving;
    going(&leaving, context);
    CUresult result = real(context);
    went(&leaving, result == CUDA_SUCCESS && context);
    return result;
}

/* Destroys the context if it was attached only once; then asking for its version fails. */
CUresult cuCtxDetach(CUcontext context) {
    CUDA_REAL(cuCtxDetach);
    struct leaving leaving;
    going(&leaving, context);
    CUresult result = real(context);
    unsigned version;
    went(&leaving, result == CUDA_SUCCESS && DRIVER(cuCtxGetApiVersion) &&
                       DRIVER(cuCtxGetApiVersion)(context, &version) != CUDA_SUCCESS);
    return result;
}

/* The primary context of each device: retained many times, but only one context. */
static struct primary {
    vgpu_lock asking;  /* held during the driver call, whose answer says whether the context was made or destroyed */
    bool held;         /* `context` exists and is charged */
    CUcontext context; /* the last context, if `held` is false */
} primaries[MAX_DEVICES];
/* The primary context about which this thread asks: the driver may call the program back meanwhile. */
static __thread __attribute__((tls_model("initial-exec"))) const struct primary *asked;

void vgpu_primaries_forget(void) {
    asked = NULL;
    memset(primaries, 0, sizeof primaries);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CUDA_REAL(cuDevicePrimaryCtxRetain);
    if (device < 0 || device >= MAX_DEVICES || vgpu_enforcement() == VGPU_UNLIMITED)
        return real(context, device);
    struct primary *primary = &primaries[device];
    if (primary == asked)
        return real(context, device);
    vgpu_lock_take(&primary->asking);
    asked = primary;
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (primary->held) {
        result = real(context, device);
    } else {
        struct context_charge charge = charge_context(device);
        CUcontext made = NULL;
        if (charge.verdict != VGPU_REFUSED) {
            result = real(context ? &made : NULL, device);
            result = created(&charge, result, made, context, true, device);
        }
        primary->held = result == CUDA_SUCCESS;
        if (primary->held)
            primary->context = made;
    }
    asked = NULL;
    vgpu_lock_release(&primary->asking);
    return result;
}

/* The context exists, so it cannot be refused. If it exceeds the limit, further allocations fail until there is room.
 * False: no memory to remember it. */
static bool charge_found(CUcontext context, unsigned card, uint64_t bytes) {
    struct vgpu_holding holding = {.bytes = bytes, .owner = context, .kind = VGPU_KIND_CONTEXT};
    vgpu_charges_pass_on();
    vgpu_charge_always(card, VGPU_DEVICE_BYTES, bytes, &holding.ticket);
    return vgpu_hold(VGPU_CONTEXT, (uint64_t)(uintptr_t)context, &holding);
}

static bool answers(CUcontext context) {
    unsigned version;
    return !DRIVER(cuCtxGetApiVersion) || DRIVER(cuCtxGetApiVersion)(context, &version) == CUDA_SUCCESS;
}

bool vgpu_context_seen(CUcontext context, CUdevice device, unsigned card) {
    const struct vgpu_limits *limits = vgpu_limits_now();
    const enum vgpu_mode mode = vgpu_enforcement();
    if ((mode != VGPU_REGION && mode != VGPU_PRIVATE) || !limits || card >= limits->card_count || device < 0 ||
        device >= MAX_DEVICES)
        return true;
    struct primary *primary = &primaries[device];
    vgpu_own_tables();
    if (vgpu_sizes_has(VGPU_CONTEXT, (uint64_t)(uintptr_t)context))
        return true;
    /* this or another thread may be entering the context into its record */
    if (asked || !vgpu_lock_try(&primary->asking))
        return false;
    const uint64_t bytes = limits->cards[card].context_bytes;
    bool seen = true;
    if (!(primary->held && primary->context == context) &&
        !vgpu_sizes_has(VGPU_CONTEXT, (uint64_t)(uintptr_t)context)) {
        /* A current context that no hook has made, while the device's primary context is active, is that primary
         * context or one of its green contexts. */
        const bool active = vgpu_primary_is_active(device),
                   is_primary = !primary->held && active && (bytes || !atomic_load(&others_made));
        /* The handle of a primary context outlives it, and may be current before the context exists. */
        if (!active && (context == primary->context || !answers(context)))
            seen = false;
        else if (bytes && (is_primary || !active))
            seen = charge_found(context, card, bytes);
        if (is_primary && seen) {
            primary->held = true;
            primary->context = context;
        }
    }
    vgpu_lock_release(&primary->asking);
    return seen;
}

/* A release or a reset: if the context is no longer active, its memory is back on the card. */
static CUresult let_primary_go(CUresult (*real)(CUdevice), CUdevice device) {
    vgpu_own_tables();
    if (device < 0 || device >= MAX_DEVICES)
        return real(device);
    struct primary *primary = &primaries[device];
    if (primary == asked)
        return real(device);
    vgpu_lock_take(&primary->asking);
    asked = primary;
    CUcontext context = primary->held ? primary->context : NULL;
    struct leaving leaving;
    if (context)
        going(&leaving, context);
    CUresult result = real(device);
    if (context) {
        bool gone = result == CUDA_SUCCESS && !vgpu_primary_is_active(device);
        primary->held = !gone;
        went(&leaving, gone);
    }
    asked = NULL;
    vgpu_lock_release(&primary->asking);
    return result;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    CUDA_REAL(cuDevicePrimaryCtxRelease_v2);
    return let_primary_go(real, device);
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    CUDA_REAL(cuDevicePrimaryCtxRelease);
    return let_primary_go(real, device);
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    CUDA_REAL(cuDevicePrimaryCtxReset_v2);
    return let_primary_go(real, device);
}

CUresult cuDevicePrimaryCtxReset(CUdevice device) {
    CUDA_REAL(cuDevicePrimaryCtxReset);
    return let_primary_go(real, device);
}
