/* Memory that the driver takes for a context because the program allows its kernels more: malloc heap, printf buffer,
 * stacks. The excess over a new context is charged when the program sets the limit, because any later launch may make
 * the driver take the memory. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/spin.h"
#include "hooks/context.h"
#include "ledger/charge.h"
#include "vgpu/region.h"

#define KIB UINT64_C(1024)

/* Only one call at a time sets the limits of a context, so that the charge fits the last limit. A change of stacks
 * waits for the card (cuda.h), which must not delay other contexts. */
struct turn {
    struct turn *next;
    CUcontext context;
    unsigned users;
    pthread_mutex_t lock;
    _Atomic uintptr_t owner; /* the thread that holds the turn: a driver may call the program back */
};

static struct turn *turns;
static vgpu_spin lock; /* of the list */

void vgpu_context_limits_forget(void) {
    turns = NULL;
    atomic_store(&lock, 0);
}

/* `nested`: this thread already has the turn. NULL: no memory. */
static struct turn *take_turn(CUcontext context, bool *nested) {
    const int kept = errno;
    struct turn *fresh = calloc(1, sizeof *fresh), *turn;
    errno = kept;
    vgpu_spin_lock(&lock);
    for (turn = turns; turn && turn->context != context;)
        turn = turn->next;
    if (!turn && fresh) {
        fresh->context = context;
        fresh->next = turns;
        pthread_mutex_init(&fresh->lock, NULL);
        turns = turn = fresh;
        fresh = NULL;
    }
    if (turn)
        turn->users++;
    vgpu_spin_unlock(&lock);
    free(fresh);
    if (!turn || (*nested = turn->owner == (uintptr_t)pthread_self()))
        return turn;
    pthread_mutex_lock(&turn->lock);
    turn->owner = (uintptr_t)pthread_self();
    return turn;
}

static void end_turn(struct turn *turn, bool nested) {
    if (!nested) {
        turn->owner = 0;
        pthread_mutex_unlock(&turn->lock);
    }
    vgpu_spin_lock(&lock);
    struct turn **at = &turns;
    while (*at && *at != turn)
        at = &(*at)->next;
    const bool last = *at && --turn->users == 0; /* a child that was forked meanwhile does not find it */
    if (last)
        *at = turn->next;
    vgpu_spin_unlock(&lock);
    if (last)
        free(turn);
}

/* The driver keeps stacks for all threads that the device can run at once. 0: unknown. */
static uint64_t threads_of(CUdevice device) {
    int processors = 0, threads = 0;
    __typeof__(&cuDeviceGetAttribute) ask = DRIVER(cuDeviceGetAttribute);
    if (!ask || ask(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device) != CUDA_SUCCESS ||
        ask(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, device) != CUDA_SUCCESS || processors <= 0 ||
        threads <= 0)
        return 0;
    return (uint64_t)processors * (uint64_t)threads;
}

/* Bytes by which a limit exceeds the initial value of each context (CUDA C++ Programming Guide: 1 KiB of stack, 1 MiB
 * for printf, 8 MiB for malloc). False: unknown, or an overflow. */
static bool excess(CUlimit limit, uint64_t value, CUdevice device, uint64_t *bytes) {
    const uint64_t usual = limit == CU_LIMIT_STACK_SIZE         ? KIB
                           : limit == CU_LIMIT_PRINTF_FIFO_SIZE ? KIB * KIB
                                                                : 8 * KIB * KIB;
    *bytes = 0;
    if (value <= usual)
        return true;
    const uint64_t times = limit == CU_LIMIT_STACK_SIZE ? threads_of(device) : 1;
    return times && !__builtin_mul_overflow(value - usual, times, bytes);
}

/* The charge for one limit of a context. Every lane releases its own charge. */
struct allowance {
    struct vgpu_holding parts[VGPU_LANES + 1];
    unsigned count;
    uint64_t bytes;
};

static void take_out(uint64_t key, struct allowance *allowance) {
    allowance->count = 0;
    allowance->bytes = 0;
    while (vgpu_sizes_any() && allowance->count < VGPU_LANES &&
           vgpu_sizes_take(VGPU_CONTEXT_LIMIT, key, &allowance->parts[allowance->count]))
        allowance->bytes += allowance->parts[allowance->count++].bytes;
}

/* False: some parts could not be remembered, and their charge was released. */
static bool put_back(uint64_t key, const struct allowance *allowance) {
    bool all = true;
    for (unsigned i = 0; i < allowance->count; i++) {
        if (!allowance->parts[i].bytes || vgpu_sizes_put(VGPU_CONTEXT_LIMIT, key, &allowance->parts[i]))
            continue;
        vgpu_let_go(&allowance->parts[i]);
        all = false;
    }
    return all;
}

static void add_part(struct allowance *allowance, CUcontext context, struct vgpu_ticket ticket, uint64_t bytes) {
    unsigned i = 0;
    while (i < allowance->count && memcmp(&allowance->parts[i].ticket, &ticket, sizeof ticket) != 0)
        i++;
    if (i == allowance->count)
        allowance->parts[allowance->count++] =
            (struct vgpu_holding){.owner = context, .ticket = ticket, .kind = VGPU_KIND_CONTEXT};
    allowance->parts[i].bytes += bytes;
    allowance->bytes += bytes;
    vgpu_count_kind(ticket.card, VGPU_KIND_CONTEXT, (int64_t)bytes);
}

static void shrink(struct allowance *allowance, uint64_t bytes) {
    for (unsigned i = 0; i < allowance->count && allowance->bytes > bytes; i++) {
        struct vgpu_holding less = allowance->parts[i];
        if (less.bytes > allowance->bytes - bytes)
            less.bytes = allowance->bytes - bytes;
        allowance->parts[i].bytes -= less.bytes;
        allowance->bytes -= less.bytes;
        vgpu_let_go(&less);
    }
}

/* Charges up to `bytes` in total; false: refused. */
static bool grow(struct allowance *allowance, const struct vgpu_place *place, uint64_t bytes) {
    struct vgpu_ticket ticket;
    if (allowance->bytes >= bytes)
        return true;
    const uint64_t more = bytes - allowance->bytes;
    const enum vgpu_verdict verdict = vgpu_reserve(place->card, more, &ticket);
    if (verdict == VGPU_CHARGED)
        add_part(allowance, place->context, ticket, more);
    return verdict != VGPU_REFUSED;
}

/* During the driver's call, the larger of the old and the new limit is charged. Afterwards, the limit that the driver
 * reports is charged: it may have rounded. */
static CUresult set(__typeof__(&cuCtxSetLimit) real, CUlimit limit, size_t value, const struct vgpu_place *place) {
    /* contexts are further apart than the limits' numbers */
    const uint64_t key = (uint64_t)(uintptr_t)place->context + (uint64_t)limit;
    struct allowance allowance;
    uint64_t wanted, allowed = 0;
    size_t before = 0, after = 0;
    __typeof__(&cuCtxGetLimit) ask = DRIVER(cuCtxGetLimit);
    CUresult result = ask ? ask(&before, limit) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result != CUDA_SUCCESS)
        return result;
    if (!excess(limit, value, place->device, &wanted))
        return CUDA_ERROR_OUT_OF_MEMORY;
    take_out(key, &allowance);
    const uint64_t old = allowance.bytes;
    const bool may = grow(&allowance, place, wanted);
    if (!put_back(key, &allowance) || !may)
        return CUDA_ERROR_OUT_OF_MEMORY;
    result = real(limit, value);
    const bool told = ask(&after, limit) == CUDA_SUCCESS;
    take_out(key, &allowance);
    if (result == CUDA_SUCCESS && told &&
        (!excess(limit, after, place->device, &allowed) || !grow(&allowance, place, allowed))) {
        real(limit, before);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    shrink(&allowance, result != CUDA_SUCCESS ? old : told ? allowed : wanted);
    if (!put_back(key, &allowance) && result == CUDA_SUCCESS) {
        real(limit, before);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    return result;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    CUDA_REAL(cuCtxSetLimit);
    struct vgpu_place place;
    bool nested = false;
    if ((limit != CU_LIMIT_STACK_SIZE && limit != CU_LIMIT_PRINTF_FIFO_SIZE && limit != CU_LIMIT_MALLOC_HEAP_SIZE) ||
        vgpu_enforcement() == VGPU_UNLIMITED || !vgpu_place_now(&place))
        return real(limit, value);
    struct turn *turn = take_turn(place.context, &nested);
    if (!turn)
        return CUDA_ERROR_OUT_OF_MEMORY;
    const CUresult result = set(real, limit, value, &place);
    end_turn(turn, nested);
    return result;
}
