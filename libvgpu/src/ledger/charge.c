/* Charges allocations before the driver's call, and gives charges back. */
#define _GNU_SOURCE
#include "ledger/charge.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "ledger/environment.h"
#include "ledger/process.h"

#define MOVES_AGAIN_NS 10000000u

atomic_bool vgpu_never_limited;

/* Whether CUDA_DISABLE_CONTROL=true asks for no limits; the limits decide whether that has an effect. */
static bool disabled_by_environment(void) {
    const char *text = secure_getenv("CUDA_DISABLE_CONTROL");
    return text && (strcmp(text, "true") == 0 || strcmp(text, "1") == 0);
}

/* Reports once per process and its children why the region was not used. */
static void tell_once(enum vgpu_mode mode) {
    static atomic_bool told;
    if (atomic_load_explicit(&told, memory_order_relaxed) || atomic_exchange(&told, true))
        return;
    const char *note = vgpu_attach_note();
    const struct vgpu_limits *limits = vgpu_limits_now();
    for (unsigned card = 0; limits && card < limits->card_count && card < VGPU_MAX_CARDS; card++) {
        if (limits->cards[card].memory == 0) {
            vgpu_log(VGPU_LOG_ALERT,
                     "no GPU memory can be had on card %u: its limit is 0 bytes (0 does not mean unlimited: for that, "
                     "set no limit)",
                     card);
            break;
        }
    }
    /* An empty VGPU_DIR says that private limits are intended. */
    if (mode == VGPU_PRIVATE && !secure_getenv("VGPU_DIR"))
        vgpu_log(
            VGPU_LOG_ALERT,
            "VGPU_DIR is not set: every process has the whole limit for itself; set it to one folder for all of them");
    if (!note || !note[0])
        return;
    if (mode == VGPU_BROKEN)
        vgpu_log(VGPU_LOG_ALERT, "no GPU memory can be had: %s", note);
    else
        vgpu_log(VGPU_LOG_WARNING, "%s", note);
}

/* In a forked child (also by _Fork or a raw clone), struct vgpu_local is empty, but the parent's tables are still
 * there. */
static void begin(struct vgpu_local *local) {
    static bool inherited;
    vgpu_lock_take(&local->setting_up);
    if (!local->begun && inherited)
        for (void (*const *forget)(void) = vgpu_forgetters; *forget; forget++)
            (*forget)();
    local->begun = inherited = true;
    vgpu_lock_release(&local->setting_up);
}

enum vgpu_mode vgpu_enforcement_slowly(void) {
    int kept = errno;
    enum vgpu_mode mode = vgpu_attach();
    struct vgpu_local *local = vgpu_local();
    errno = kept;
    if (local)
        begin(local);
    tell_once(mode);
    if (mode == VGPU_UNLIMITED) /* forked children inherit this decision */
        atomic_store_explicit(&vgpu_never_limited, true, memory_order_relaxed);
    /* else the next call asks again */
    bool lasting = local && atomic_load_explicit(&local->attached, memory_order_acquire) != 0;
    if (disabled_by_environment()) {
        const struct vgpu_limits *limits = vgpu_limits_now();
        lasting = lasting && mode != VGPU_REGION; /* the limits of a region may allow or forbid it at any time */
        if (limits && (limits->flags & VGPU_ALLOW_DISABLE_CONTROL))
            mode = VGPU_UNLIMITED;
    }
    if (lasting)
        atomic_store_explicit(&local->enforced, (uint32_t)mode + 1, memory_order_release);
    return mode;
}

/* The environment may ask for this with any region: the process harms only itself. */
static void end_if_asked_to(const struct vgpu_limits *limits) {
    char note[256];
    const int kills = limits->flags & VGPU_KILL_ON_OOM ? 1 : vgpu_environment_kills(note, sizeof note);
    if (kills < 0)
        vgpu_log(VGPU_LOG_WARNING, "%s", note);
    if (kills <= 0)
        return;
    vgpu_log(VGPU_LOG_ERROR, "ending process %d: ACTIVE_OOM_KILLER asked for it", (int)getpid());
    kill(getpid(), SIGKILL);
}

void vgpu_tell_refused(unsigned card, uint64_t bytes) {
    const struct vgpu_limits *limits = vgpu_limits_now();
    if (card == VGPU_CARD_UNLISTED || !limits) {
        vgpu_log(VGPU_LOG_ERROR, "refused %llu bytes: %s", (unsigned long long)bytes,
                 limits ? "the limits do not list this card" : "the region of this container is unusable");
        return;
    }
    vgpu_log(VGPU_LOG_ERROR, "refused %llu bytes on card %u: %llu used of %llu", (unsigned long long)bytes, card,
             (unsigned long long)vgpu_used(card, VGPU_DEVICE_BYTES), (unsigned long long)limits->cards[card].memory);
    if (limits->flags & VGPU_OVERSUBSCRIBE) {
        vgpu_count_refused(card);
        vgpu_log(VGPU_LOG_ERROR,
                 "of them %llu on the card, where it may hold %llu, and %llu in host memory, where it may hold %llu",
                 (unsigned long long)vgpu_used(card, VGPU_RESIDENT_BYTES),
                 (unsigned long long)vgpu_resident_limit(card), (unsigned long long)vgpu_used(card, VGPU_HOST_BYTES),
                 (unsigned long long)limits->host_memory);
    }
    end_if_asked_to(limits);
}

bool vgpu_give_back(unsigned card) {
    bool any = false;
    for (bool (*const *reclaim)(unsigned) = vgpu_reclaimers; *reclaim; reclaim++)
        any |= (*reclaim)(card); /* call every reclaimer, also after one has found memory */
    return any;
}

/* Before a refusal: the memory that the library itself keeps may be enough. */
static __attribute__((noinline)) bool reserve_after_giving_back(unsigned card, uint64_t bytes,
                                                                struct vgpu_ticket *ticket) {
    const int kept = errno;
    const bool granted =
        card != VGPU_CARD_UNLISTED && vgpu_give_back(card) && vgpu_charge(card, VGPU_DEVICE_BYTES, bytes, ticket);
    errno = kept;
    return granted;
}

static enum vgpu_verdict reserve_as_it_is(unsigned card, uint64_t bytes, struct vgpu_ticket *ticket) {
    if (vgpu_enforcement() == VGPU_UNLIMITED)
        return VGPU_UNCHARGED;
    if (__builtin_expect(vgpu_charge(card, VGPU_DEVICE_BYTES, bytes, ticket), 1))
        return VGPU_CHARGED;
    return reserve_after_giving_back(card, bytes, ticket) ? VGPU_CHARGED : VGPU_REFUSED;
}

struct request {
    unsigned card;
    uint64_t bytes;
    struct vgpu_ticket *ticket;
};

static bool charge_request(void *argument) {
    const struct request *request = argument;
    return vgpu_charge(request->card, VGPU_DEVICE_BYTES, request->bytes, request->ticket);
}

/* The limit has room but the card has not: charges after blocks of the tier have moved away. */
static bool charge_after_moves(unsigned card, uint64_t bytes, struct vgpu_ticket *ticket) {
    struct request request = {card, bytes, ticket};
    const struct vgpu_limits *limits = vgpu_limits_now();
    if (!limits || !(limits->flags & VGPU_MOVABLE) || card >= limits->card_count)
        return false;
    const uint64_t used = vgpu_used(card, VGPU_DEVICE_BYTES), limit = limits->cards[card].memory;
    const uint64_t fixed = vgpu_used(card, VGPU_FIXED_BYTES), most = limits->cards[card].guarantee;
    return used <= limit && bytes <= limit - used && fixed <= most && bytes <= most - fixed &&
           vgpu_above.with_room(card, bytes, charge_request, &request);
}

enum vgpu_verdict vgpu_reserve_quietly(unsigned card, uint64_t bytes, struct vgpu_ticket *ticket) {
    /* time of the next try to move blocks: there may be many small blocks, or the card may be busy */
    static _Atomic uint64_t again[VGPU_MAX_CARDS];
    const enum vgpu_verdict verdict = reserve_as_it_is(card, bytes, ticket);
    if (__builtin_expect(verdict != VGPU_REFUSED, 1) || card >= VGPU_MAX_CARDS || vgpu_above.any_capture() ||
        vgpu_now_ns() < again[card])
        return verdict;
    if (charge_after_moves(card, bytes, ticket))
        return VGPU_CHARGED;
    again[card] = vgpu_now_ns() + MOVES_AGAIN_NS;
    return VGPU_REFUSED;
}

enum vgpu_verdict vgpu_reserve(unsigned card, uint64_t bytes, struct vgpu_ticket *ticket) {
    const enum vgpu_verdict verdict = reserve_as_it_is(card, bytes, ticket);
    if (__builtin_expect(verdict != VGPU_REFUSED, 1))
        return verdict;
    const int kept = errno;
    const bool granted = charge_after_moves(card, bytes, ticket);
    if (!granted)
        vgpu_tell_refused(card, bytes);
    errno = kept;
    return granted ? VGPU_CHARGED : VGPU_REFUSED;
}

void vgpu_uncharge(struct vgpu_ticket ticket, uint64_t bytes) {
    vgpu_release(ticket, bytes);
}

static void leave(struct vgpu_share *share) {
    if (atomic_fetch_sub(&share->handles, 1) != 1)
        return;
    vgpu_uncharge(share->ticket, share->bytes);
    free(share);
}

bool vgpu_hold(enum vgpu_space space, uint64_t handle, const struct vgpu_holding *holding) {
    if (!vgpu_sizes_put(space, handle, holding)) {
        if (holding->payer == VGPU_PAID_BY_SHARE)
            leave(holding->share);
        else if (holding->payer == VGPU_PAID_ITSELF)
            vgpu_uncharge(holding->ticket, holding->bytes);
        return false;
    }
    if (holding->payer == VGPU_PAID_ITSELF && holding->kind != VGPU_KIND_BUFFER)
        vgpu_count_kind(holding->ticket.card, holding->kind, (int64_t)holding->bytes);
    return true;
}

void vgpu_let_go(const struct vgpu_holding *holding) {
    if (holding->payer == VGPU_PAID_BY_SHARE) {
        leave(holding->share);
        return;
    }
    if (holding->payer == VGPU_PAID_BY_POOL) {
        vgpu_above.pool_forget((void *)holding->owner, holding->bytes);
        return;
    }
    vgpu_uncharge(holding->ticket, holding->bytes);
    if (holding->kind != VGPU_KIND_BUFFER)
        vgpu_count_kind(holding->ticket.card, holding->kind, -(int64_t)holding->bytes);
}

bool vgpu_attempt_booked(struct vgpu_attempt *attempt, CUresult result, enum vgpu_space space, uint64_t handle,
                         uint64_t chosen, enum vgpu_kind kind) {
    if (attempt->verdict != VGPU_CHARGED)
        return true;
    if (result != CUDA_SUCCESS) {
        vgpu_uncharge(attempt->ticket, attempt->bytes);
        return true;
    }
    if (chosen > attempt->bytes) {
        struct vgpu_ticket larger;
        enum vgpu_verdict verdict = vgpu_reserve(attempt->place.card, chosen, &larger);
        vgpu_uncharge(attempt->ticket, attempt->bytes);
        if (verdict != VGPU_CHARGED)
            return false;
        attempt->ticket = larger;
    } else if (chosen < attempt->bytes) {
        vgpu_uncharge(attempt->ticket, attempt->bytes - chosen);
    }
    struct vgpu_holding holding = {
        .bytes = chosen, .owner = attempt->place.context, .ticket = attempt->ticket, .kind = (uint8_t)kind};
    return vgpu_hold(space, handle, &holding);
}

CUresult vgpu_freed(CUresult result, enum vgpu_space space, uint64_t handle, bool known,
                    const struct vgpu_freeing *freeing) {
    struct vgpu_holding holding;
    if (known && result == CUDA_SUCCESS && vgpu_sizes_free_end(space, handle, freeing, &holding))
        vgpu_let_go(&holding);
    return result;
}

static void let_go_each(const struct vgpu_holding *holding, void *argument) {
    (void)argument;
    vgpu_let_go(holding);
}

void vgpu_context_gone(CUcontext context, const struct vgpu_moment *before) {
    vgpu_places_forget();
    vgpu_own_tables();
    vgpu_sizes_take_owned(context, before, let_go_each, NULL);
}
