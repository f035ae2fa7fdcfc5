/* Moves blocks between a card and host memory. */
#define _GNU_SOURCE
#include "tier/move.h"

#include <errno.h>

#include "base/clock.h"
#include "base/log.h"
#include "gate/streams.h"
#include "ledger/charge.h"
#include "reserves/capture.h"
#include "tier/memory.h"
#include "tier/tier.h"
#include "tier/touched.h"
#include "tier/watch.h"

#define LOOK_EVERY_NS 200000u  /* minimum time between two checks whether a block should move, over all threads */
#define BUSY_AGAIN_NS 1000000u /* pause after a check that found the card busy */
#define PATIENCE_NS 50000u     /* how long to wait for calls that are handing work in */
/* Under pressure, vgpu waits with the gate closed until running work ends. After each wait without success the next
 * wait is longer, */
#define DRAIN_NS 10000000u
#define DRAIN_GROWTH 100u         /* by this factor, */
#define MOST_DRAIN_NS 2000000000u /* up to this: a full queue has 1,024 launches */
#define DRAIN_PAUSE 1u            /* pause until the next try, in multiples of the wait, */
#define PAUSE_GROWTH 4u           /* growing by this factor, */
#define MOST_DRAIN_PAUSE 64u      /* up to this */
/* after a wait without success, pause until the next wait for an allocation's room */
#define ROOM_PAUSE_NS 100000000u
/* how long an allocation tries to get room while other threads hold the tier or take the room */
#define ROOM_NS 100000000u
#define BUDGET (64ull << 20)     /* bytes that move at one safe point; */
#define MOST_BUDGET (4ull << 30) /* the budget grows to this while no block moves for a long time; */
#define LARGEST (1ull << 40)     /* a single larger block may move once enough time has passed for its bytes */
#define EARNED_PER_US 5000u      /* bytes; a fifth to a half of what a bus carries in that time */
#define LONGEST_NS 250000000u    /* longest series of moves under pressure */
#define LOOKED_AT 256u           /* blocks checked per look for coming up */
#define FULL_FOR_NS 100000000u   /* a card without memory is not asked again for so long */
#define STUCK_FOR_NS 1000000000u /* the same for new tries to make room on the card */
#define IDLE_FOR_NS 100000000u   /* programs that free and allocate all the time do so more often */
#define FAST_NS 60000u           /* time between launches; below it only some launches are noted */
#define MOST_NOTED_OF 16u

static _Atomic uint64_t next_look;
static _Atomic uint64_t wanted_room[VGPU_MAX_CARDS]; /* bytes for which calls of vgpu_with_room are waiting */
/* The lock of the tier protects the following. */
static uint64_t last_move, drain_ns, drain_pause, next_drain, next_room_drain;
static uint64_t full_until[VGPU_MAX_CARDS]; /* until then the card counts as full */
/* until then its blocks cannot move down: the host has no room, or the driver cannot map host memory */
static uint64_t stuck_until[VGPU_MAX_CARDS];
static uint64_t idle_since[VGPU_MAX_CARDS]; /* since when guaranteed room is free that no allocation takes */
static uint32_t next_block;                 /* next block to check for coming up */

void vgpu_moves_forget(void) {
    atomic_store(&next_look, 0);
    for (unsigned card = 0; card < VGPU_MAX_CARDS; card++)
        atomic_store(&wanted_room[card], 0);
    last_move = drain_ns = drain_pause = next_drain = next_room_drain = next_block = 0;
    for (unsigned card = 0; card < VGPU_MAX_CARDS; card++)
        full_until[card] = stuck_until[card] = idle_since[card] = 0;
}

/* Copies in the block's context, which has no other work. */
static CUresult copy(const struct vgpu_tier_record *block, CUdeviceptr to) {
    CUcontext popped;
    CUresult result = DRIVER(cuCtxPushCurrent_v2)(block->context);
    if (result != CUDA_SUCCESS)
        return result;
    result = DRIVER(cuMemcpyDtoD_v2)(to, block->base, block->bytes);
    if (result == CUDA_SUCCESS)
        result = DRIVER(cuStreamSynchronize)(CU_STREAM_LEGACY);
    DRIVER(cuCtxPopCurrent_v2)(&popped);
    return result;
}

/* Copies the contents into other memory that is not mapped yet. `lost`: that memory stays mapped, and its addresses
 * stay taken. */
static CUresult copy_into(const struct vgpu_tier_record *block, CUmemGenericAllocationHandle handle, bool *lost) {
    const CUdeviceptr window = vgpu_tier_reserve(block->bytes);
    if (!window)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = vgpu_tier_map(block->device, !block->on_device, window, block->bytes, handle, lost);
    if (result == CUDA_SUCCESS) {
        result = copy(block, window);
        *lost = DRIVER(cuMemUnmap)(window, block->bytes) != CUDA_SUCCESS;
    }
    if (*lost)
        return CUDA_ERROR_UNKNOWN;
    vgpu_tier_unreserve(window, block->bytes);
    return result;
}

/* Puts other memory behind the block's address. If that fails, the old memory can be mapped again without new
 * resources. `lost`: the other memory nevertheless stays mapped there. */
static CUresult exchange(const struct vgpu_tier_record *block, CUmemGenericAllocationHandle handle, bool *lost) {
    bool neither;
    CUresult result = DRIVER(cuMemUnmap)(block->base, block->bytes);
    if (result != CUDA_SUCCESS)
        return result;
    result = vgpu_tier_map(block->device, !block->on_device, block->base, block->bytes, handle, lost);
    if (result != CUDA_SUCCESS && vgpu_tier_map(block->device, block->on_device, block->base, block->bytes,
                                                block->handle, &neither) != CUDA_SUCCESS) {
        vgpu_log(VGPU_LOG_ALERT, "a block of %llu bytes is lost: the driver unmapped it and does not map it again (%d)",
                 (unsigned long long)block->bytes, (int)result);
        result = CUDA_ERROR_UNKNOWN; /* any error but out of memory, so that the move is not tried again */
    }
    return result;
}

/* Call with the gate closed, all work finished, and the tier's lock held. After an error the block and its charges are
 * unchanged. */
static CUresult move(struct vgpu_tier_record *block) {
    const bool up = !block->on_device;
    struct vgpu_ticket ticket;
    CUmemGenericAllocationHandle handle;
    bool lost = false;
    if (up ? !vgpu_charge_resident(block->card, block->bytes, vgpu_tier_headroom(block->card), &ticket)
           : !vgpu_host_spares(block->bytes) || !vgpu_charge(block->card, VGPU_HOST_BYTES, block->bytes, &ticket))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = vgpu_tier_create(block->device, up, block->bytes, &handle);
    if (result == CUDA_SUCCESS) {
        result = copy_into(block, handle, &lost);
        if (result == CUDA_SUCCESS)
            result = exchange(block, handle, &lost);
        DRIVER(cuMemRelease)(result == CUDA_SUCCESS ? block->handle : handle);
    }
    if (result != CUDA_SUCCESS) {
        if (!lost)
            vgpu_release(ticket, block->bytes);
        return result;
    }
    vgpu_release(block->where, block->bytes);
    block->handle = handle;
    block->where = ticket;
    block->on_device = up;
    struct vgpu_tier_card *tier = vgpu_tier_card(block->card);
    if (tier && block->entry != VGPU_TIER_NONE) {
        vgpu_spin_lock(&tier->lock);
        vgpu_tier_moved(&tier->policy, block->entry, up);
        vgpu_spin_unlock(&tier->lock);
    }
    vgpu_log(VGPU_LOG_DEBUG, "moved %llu bytes at 0x%llx %s card %u", (unsigned long long)block->bytes,
             (unsigned long long)block->base, up ? "to" : "from", block->card);
    return CUDA_SUCCESS;
}

static bool can_move(const struct vgpu_tier_record *block) {
    return block->bytes && block->handle && !block->shared && !block->pinned && !block->leaving && !block->going;
}

/* False: there was no room for the block. If the move fails for another reason, the block stays where it is from now on
 * and no longer stops other moves. */
static bool moved(uint32_t number) {
    struct vgpu_tier_record *block = vgpu_tier_record(number);
    const bool up = !block->on_device;
    const CUresult result = move(block);
    if (result == CUDA_SUCCESS)
        return true;
    if (result != CUDA_ERROR_OUT_OF_MEMORY) {
        vgpu_tier_pin_block(number);
        vgpu_log(VGPU_LOG_WARNING, "a block of %llu bytes at 0x%llx stays %s: the driver does not move it (%d)",
                 (unsigned long long)block->bytes, (unsigned long long)block->base,
                 up ? "in host memory" : "on the card", (int)result);
        return true;
    }
    if (up)
        full_until[block->card] = vgpu_now_ns() + FULL_FOR_NS;
    else
        stuck_until[block->card] = vgpu_now_ns() + STUCK_FOR_NS;
    return false;
}

/* Adds to *count the blocks that were moved or can never move. False: the driver, an account or the machine had no
 * room. */
static bool move_all(struct vgpu_tier_card *tier, const uint32_t *entries, uint32_t entry_count, unsigned *count) {
    for (uint32_t i = 0; i < entry_count; i++) {
        const uint32_t number = tier->record_of[entries[i]];
        if (!can_move(vgpu_tier_record(number)))
            continue;
        if (!moved(number))
            return false;
        ++*count;
    }
    return true;
}

/* Bytes that the card has left for the container's large blocks; below 0: the container must give way. */
static int64_t room_of(unsigned card, uint64_t now) {
    const uint64_t most = vgpu_resident_limit(card), used = vgpu_used(card, VGPU_RESIDENT_BYTES),
                   spare = vgpu_tier_headroom(card);
    const uint64_t wanted = atomic_load_explicit(&wanted_room[card], memory_order_relaxed),
                   limit = most > wanted ? most - wanted : 0;
    if (most == VGPU_NO_LIMIT)
        return now < full_until[card] ? 0 : INT64_MAX;
    if (used > limit)
        return now < stuck_until[card] ? 0 : -(int64_t)(used - limit);
    return now < full_until[card] || used + spare > limit ? 0 : (int64_t)(limit - spare - used);
}

/* Whether the container holds more of a card than its guarantee; `pressed`: and more than it may hold now. */
static bool on_loan(bool *pressed) {
    const struct vgpu_limits *limits = vgpu_limits_now();
    bool any = false;
    *pressed = false;
    for (unsigned card = 0; limits && limits->flags & VGPU_MOVABLE && card < limits->card_count; card++) {
        if (!vgpu_tier_card(card) || limits->cards[card].guarantee == VGPU_NO_LIMIT)
            continue;
        const uint64_t used = vgpu_used(card, VGPU_RESIDENT_BYTES);
        if (used <= limits->cards[card].guarantee)
            continue;
        any = true;
        *pressed |= used > vgpu_resident_limit(card);
    }
    return any;
}

/* The least budget times a power of two, so that the policy seldom sees a new budget. */
static uint64_t budget_now(uint64_t now, uint64_t most) {
    const uint64_t earned = (now - last_move) / 1000 * EARNED_PER_US;
    uint64_t budget = BUDGET;
    while (budget < most && budget * 2 <= earned)
        budget *= 2;
    return budget;
}

static bool plan(struct vgpu_tier_card *tier, int64_t room, uint64_t budget, struct vgpu_tier_plan *out) {
    vgpu_spin_lock(&tier->lock);
    const bool found = vgpu_tier_plan(&tier->policy, room, budget, out);
    vgpu_spin_unlock(&tier->lock);
    return found;
}

static void forget_drains(void) {
    drain_ns = drain_pause = next_drain = 0;
}

/* Running work did not end during a wait from `begin` to `end`. */
static void drained_in_vain(uint64_t begin, uint64_t end) {
    next_drain = end + drain_pause * (end - begin);
    drain_pause = drain_pause < MOST_DRAIN_PAUSE ? PAUSE_GROWTH * drain_pause : MOST_DRAIN_PAUSE;
    drain_ns = drain_ns < MOST_DRAIN_NS / DRAIN_GROWTH ? DRAIN_GROWTH * drain_ns : MOST_DRAIN_NS;
}

/* Why blocks must move; decides how long to wait for running work with the gate closed. */
enum reason { IT_PAYS, ROOM_IS_WANTED, A_LOAN_WAS_TAKEN_BACK };

static uint64_t patience(enum reason why, uint64_t now) {
    if (why == ROOM_IS_WANTED)
        return now < next_room_drain ? 0 : DRAIN_NS;
    if (why == IT_PAYS || now < next_drain)
        return 0;
    drain_ns = drain_ns > DRAIN_NS ? drain_ns : DRAIN_NS;
    drain_pause = drain_pause ? drain_pause : DRAIN_PAUSE;
    return drain_ns;
}

/* Closes the gate. True: the gate is closed and all work has finished. May wait for running work and for calls under
 * way, but not for long: that work may wait for another thread's next call. */
static bool quiet(enum reason why, bool *closed) {
    const uint64_t begin = vgpu_now_ns(), most = patience(why, begin);
    *closed = vgpu_gate_close(most ? most : PATIENCE_NS);
    bool idle = *closed && vgpu_streams_idle();
    uint64_t now = vgpu_now_ns();
    while (*closed && !idle && now - begin < most) {
        vgpu_sleep_until(now + 100000u);
        idle = vgpu_streams_idle();
        now = vgpu_now_ns();
    }
    if (why == A_LOAN_WAS_TAKEN_BACK && idle)
        forget_drains();
    else if (why == A_LOAN_WAS_TAKEN_BACK && most)
        drained_in_vain(begin, now);
    else if (why == ROOM_IS_WANTED && most && !idle)
        next_room_drain = now + ROOM_PAUSE_NS;
    return idle;
}

/* Makes the moves that the policy wants on one card. `closed`: the gate is closed and all work has finished. False: no
 * block can move now. */
static bool balance(struct vgpu_tier_card *tier, unsigned card, enum reason why, bool *closed) {
    struct vgpu_tier_plan wanted;
    const uint64_t asked = vgpu_now_ns();
    uint64_t begin = 0, left = budget_now(asked, MOST_BUDGET), large = budget_now(asked, LARGEST);
    for (int64_t room; (room = room_of(card, vgpu_now_ns())) < 0 || left != 0;) {
        if (!plan(tier, room, room < 0 ? BUDGET : left, &wanted) &&
            (room < 0 || large <= left || !plan(tier, room, large, &wanted)))
            return true;
        if (!*closed && !quiet(room < 0 ? why : IT_PAYS, closed))
            return false;
        begin = begin ? begin : vgpu_now_ns(); /* the wait is over: measure the moves alone */
        unsigned count = 0;
        const bool all =
            move_all(tier, wanted.down, wanted.downs, &count) && move_all(tier, wanted.up, wanted.ups, &count);
        if (!all || !count)
            return true;
        last_move = vgpu_now_ns();
        left -= wanted.bytes < left ? wanted.bytes : left;
        large = 0;
        if (room < 0 && last_move - begin >= LONGEST_NS)
            return true;
    }
    return true;
}

/* Bytes of the card that any block in host memory may take. In movable mode: guaranteed room that no allocation has
 * taken for a while. Lent room goes only to blocks that are known to be used. */
static int64_t idle_room(unsigned card, uint64_t now) {
    const struct vgpu_limits *limits = vgpu_limits_now();
    const uint64_t most = vgpu_resident_limit(card);
    const int64_t room = room_of(card, now);
    if (!limits || !(limits->flags & VGPU_MOVABLE) || now < full_until[card])
        return room;
    const uint64_t guarantee = card < limits->card_count ? limits->cards[card].guarantee : 0;
    const int64_t lent = most != VGPU_NO_LIMIT && most > guarantee ? (int64_t)(most - guarantee) : 0;
    if (room - lent < (int64_t)VGPU_TIER_GRANULE) {
        idle_since[card] = 0;
        return 0;
    }
    if (!idle_since[card])
        idle_since[card] = now;
    return now - idle_since[card] < IDLE_FOR_NS ? 0 : room - lent;
}

/* Moves blocks up from host memory while there is room; checks some blocks each time. False: no block can move now. */
static bool promote(bool *closed) {
    const uint64_t begin = vgpu_now_ns(), budget = budget_now(begin, MOST_BUDGET);
    uint64_t bytes = 0;
    for (unsigned i = 0; i < LOOKED_AT && bytes < budget; i++) {
        next_block = vgpu_tier_next(next_block);
        if (next_block == VGPU_TIER_NONE) {
            next_block = 0;
            return true;
        }
        const uint32_t number = next_block++;
        const struct vgpu_tier_record *block = vgpu_tier_record(number);
        if (block->on_device || !can_move(block) || idle_room(block->card, begin) < (int64_t)block->bytes)
            continue;
        if (!*closed && !quiet(IT_PAYS, closed))
            return false;
        if (!moved(number))
            return true;
        bytes += block->bytes;
        last_move = vgpu_now_ns();
    }
    return true;
}

/* False: another thread holds the tier, or a capture is open. */
static bool look(struct vgpu_passage *mine, bool for_room) {
    bool closed = false, possible = true, pressed;
    vgpu_touched_tell(mine);
    if (vgpu_any_capture() || !vgpu_tier_try())
        return false;
    const CUstreamCaptureMode mode = vgpu_relax();
    vgpu_tier_collect(); /* blocks that were freed meanwhile need not move */
    if (on_loan(&pressed))
        vgpu_watch_loans();
    if (!pressed)
        forget_drains();
    for (unsigned card = 0; card < VGPU_MAX_CARDS && possible; card++) {
        struct vgpu_tier_card *tier = vgpu_tier_card(card);
        if (tier && tier->policy.movable)
            possible = balance(tier, card,
                               for_room  ? ROOM_IS_WANTED
                               : pressed ? A_LOAN_WAS_TAKEN_BACK
                                         : IT_PAYS,
                               &closed);
    }
    if (possible)
        possible = promote(&closed);
    if (closed)
        vgpu_gate_open();
    vgpu_restore(mode);
    vgpu_tier_unlock();
    if (!possible)
        atomic_store(&next_look, vgpu_now_ns() + BUSY_AGAIN_NS);
    return true;
}

uint64_t vgpu_room_wanted(unsigned card) {
    return card < VGPU_MAX_CARDS ? atomic_load_explicit(&wanted_room[card], memory_order_relaxed) : 0;
}

static bool has_room(unsigned card, uint64_t bytes) {
    const uint64_t used = vgpu_used(card, VGPU_RESIDENT_BYTES), limit = vgpu_resident_limit(card);
    return used <= limit && bytes <= limit - used;
}

bool vgpu_with_room(unsigned card, uint64_t bytes, bool (*take)(void *), void *argument) {
    struct vgpu_passage *mine = vgpu_passage_take();
    if (!vgpu_tier_card(card) || !mine || vgpu_gate_inside() || bytes > vgpu_resident_limit(card))
        return false;
    const int kept = errno;
    bool taken = false;
    atomic_fetch_add(&wanted_room[card], bytes);
    for (uint64_t now = vgpu_now_ns(), until = now + ROOM_NS; !taken && now < until; now = vgpu_now_ns()) {
        const bool looked = look(mine, true), room = has_room(card, bytes);
        taken = room && take(argument);
        if (!taken && !room && looked)
            break;
        if (!taken)
            vgpu_sleep_until(now + 1000000u);
    }
    atomic_fetch_sub(&wanted_room[card], bytes);
    errno = kept;
    return taken;
}

/* One thread at a time looks. A thread that the driver has called back inside a call does not look. */
static void look_if_due(struct vgpu_passage *mine, uint64_t now) {
    uint64_t due = atomic_load_explicit(&next_look, memory_order_relaxed);
    if (now < due || vgpu_gate_inside() || !atomic_compare_exchange_strong(&next_look, &due, now + LOOK_EVERY_NS))
        return;
    look(mine, false);
}

void vgpu_look_after_loans(void) {
    bool pressed;
    if (!vgpu_watching_loans() && on_loan(&pressed))
        vgpu_watch_loans();
}

bool vgpu_give_way(void) {
    bool pressed;
    struct vgpu_passage *mine = vgpu_passage_take();
    const bool any = on_loan(&pressed);
    if (mine && pressed)
        look_if_due(mine, vgpu_now_ns());
    return any;
}

void vgpu_safe_point_slowly(void) {
    const int kept = errno;
    vgpu_own_tables();
    struct vgpu_passage *mine = vgpu_passage_take();
    if (mine && vgpu_tier_any()) {
        const uint64_t now = vgpu_now_ns(), apart = (now - mine->looked_ns) / VGPU_CALLS_PER_LOOK;
        mine->noted_of = apart >= FAST_NS                  ? 1
                         : apart * MOST_NOTED_OF > FAST_NS ? (uint32_t)(FAST_NS / apart)
                                                           : MOST_NOTED_OF;
        mine->looked_ns = now;
        look_if_due(mine, now);
    }
    if (mine)
        mine->until_look = VGPU_CALLS_PER_LOOK - 1;
    errno = kept;
}

void vgpu_safe_point_idle(void) {
    const int kept = errno;
    vgpu_own_tables();
    struct vgpu_passage *mine = vgpu_passage_take();
    if (mine && vgpu_tier_any())
        look_if_due(mine, vgpu_now_ns());
    errno = kept;
}
