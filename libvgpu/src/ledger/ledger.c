/* This process's charges. A charge uses any free lane of the slot; its release must use the same lane. */
#include "ledger/ledger.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <time.h>

#include "base/log.h"
#include "ledger/attach.h"
#include "region/account.h"
#include "region/region_files.h"

#define LANE_BITS 4
#define TAKING_MASK 0xfffu
#define REFUSAL_PATIENCE_NS 100000000 /* how long a refusal waits for another process that is reaping */

_Static_assert(VGPU_LANES == 1u << LANE_BITS, "a ticket holds the lane in its low bits");

/* Counts how often this process and its ancestors have taken a slot. In static memory, so that a child's tickets differ
 * from its parent's. */
static _Atomic uint32_t takings;

static uint64_t now_ns(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Copies of the limits, one per change; a caller may read one while the next few changes come. */
struct snapshot {
    uint64_t selector;
    struct vgpu_limits limits;
};

static struct snapshot snapshots[8];
static _Atomic(const struct snapshot *) newest;

static __attribute__((noinline)) const struct vgpu_limits *take_snapshot(struct vgpu_local *local,
                                                                         const struct vgpu_limits_file *file) {
    vgpu_lock_take(&local->setting_up);
    const struct snapshot *last = atomic_load_explicit(&newest, memory_order_relaxed);
    struct snapshot *next =
        &snapshots[last ? (size_t)(last - snapshots + 1) % (sizeof snapshots / sizeof *snapshots) : 0];
    next->selector = vgpu_limits_snapshot(file, &next->limits);
    if (next->limits.card_count > VGPU_MAX_CARDS)
        next->limits.card_count = 0;
    atomic_store_explicit(&newest, next, memory_order_release);
    vgpu_lock_release(&local->setting_up);
    return &next->limits;
}

static inline __attribute__((always_inline)) const struct vgpu_limits *limits_now(struct vgpu_local *local) {
    const struct vgpu_limits_file *file = vgpu_mapped.limits;
    const struct snapshot *last = atomic_load_explicit(&newest, memory_order_acquire);
    if (__builtin_expect(last && last->selector == atomic_load_explicit(&file->selector, memory_order_acquire), 1))
        return &last->limits;
    return take_snapshot(local, file);
}

const struct vgpu_limits *vgpu_limits_now(void) {
    enum vgpu_mode mode;
    struct vgpu_local *local = vgpu_attached(&mode);
    return mode == VGPU_REGION || mode == VGPU_PRIVATE ? limits_now(local) : NULL;
}

static __attribute__((noinline)) bool take_slot(struct vgpu_local *local) {
    const int saved = errno;
    vgpu_lock_take(&local->setting_up);
    bool taken = atomic_load_explicit(&local->has_slot, memory_order_acquire) != 0;
    const int result = taken ? 0 : vgpu_slot_take(&local->member, 0);
    if (result < 0) {
        static atomic_bool told;
        if (!atomic_exchange(&told, true))
            vgpu_log(VGPU_LOG_ERROR, "no slot in the region: %s; nothing can be allocated",
                     result == -ENOSPC ? "all are taken by living processes, or the file system is full"
                                       : strerror(-result));
    }
    if (!taken && result == 0) {
        uint32_t number = atomic_fetch_add(&takings, 1) + 1;
        if ((number & TAKING_MASK) == 0) /* 0 marks an empty ticket */
            atomic_fetch_add(&takings, 1);
        atomic_store_explicit(&local->has_slot, 1, memory_order_release);
        taken = true;
    }
    vgpu_lock_release(&local->setting_up);
    errno = saved;
    return taken;
}

/* Makes sure that this process has a slot. */
static inline bool have_slot(struct vgpu_local *local) {
    return __builtin_expect(atomic_load_explicit(&local->has_slot, memory_order_acquire) != 0, 1) || take_slot(local);
}

/* Locks one of the slot's lanes: each thread starts with a lane of its own, so that threads rarely meet. */
static inline __attribute__((always_inline)) unsigned lock_some_lane(struct vgpu_local *local) {
    static _Atomic unsigned threads;
    static _Thread_local unsigned mine __attribute__((tls_model("initial-exec")));
    if (__builtin_expect(mine == 0, 0))
        mine = atomic_fetch_add(&threads, 1) % VGPU_LANES + 1;
    for (unsigned lane = mine - 1, tries = 1, looks = 0;; lane = (lane + 1) % VGPU_LANES, tries++) {
        if (vgpu_spin_try(&local->lanes[lane].busy))
            return lane;
        if (tries % VGPU_LANES == 0)
            vgpu_yield(&looks);
    }
}

static inline __attribute__((always_inline)) struct vgpu_ticket ticket_of(unsigned card, unsigned account,
                                                                          unsigned lane) {
    return (struct vgpu_ticket){
        .lane = (uint16_t)((atomic_load_explicit(&takings, memory_order_relaxed) & TAKING_MASK) << LANE_BITS | lane),
        .card = (uint8_t)card,
        .account = (uint8_t)account};
}

/* Checked after a charge: a charge on emptied accounts must not count, no matter when they were emptied. */
static inline __attribute__((always_inline)) bool intact(const struct vgpu_local *local) {
    return !local->member.path || vgpu_usage_intact(local->member.usage);
}

static inline __attribute__((always_inline)) bool charge(struct vgpu_local *local, unsigned card,
                                                         enum vgpu_account_index account, uint64_t bytes,
                                                         uint64_t limit, struct vgpu_ticket *ticket) {
    const unsigned lane = lock_some_lane(local);
    bool granted = vgpu_account_charge(local->member.usage, card, account, VGPU_LANE_NUMBER(local->member.slot, lane),
                                       bytes, limit);
    vgpu_spin_unlock(&local->lanes[lane].busy);
    if (__builtin_expect(granted && !intact(local), 0))
        granted = false;
    if (granted)
        *ticket = ticket_of(card, account, lane);
    return granted;
}

/* A request: the same bytes of several accounts, each with its limit, and the account that the ticket will name. */
struct request {
    unsigned card;
    uint64_t bytes;
    unsigned account, count;
    struct {
        enum vgpu_account_index account;
        uint64_t limit;
    } parts[3];
};

/* Charges all parts or none, in a lane that the caller holds. */
static bool charge_parts(struct vgpu_local *local, const struct request *request, uint32_t number) {
    struct vgpu_usage_file *usage = local->member.usage;
    unsigned done = 0;
    while (done < request->count && vgpu_account_charge(usage, request->card, request->parts[done].account, number,
                                                        request->bytes, request->parts[done].limit))
        done++;
    const bool granted = done == request->count;
    while (!granted && done > 0)
        vgpu_account_release(usage, request->card, request->parts[--done].account, number, request->bytes);
    return granted;
}

static bool try_request(struct vgpu_local *local, const struct request *request, struct vgpu_ticket *ticket) {
    const unsigned lane = lock_some_lane(local);
    bool granted = charge_parts(local, request, VGPU_LANE_NUMBER(local->member.slot, lane));
    vgpu_spin_unlock(&local->lanes[lane].busy);
    if (granted && !intact(local))
        granted = false;
    if (granted)
        *ticket = ticket_of(request->card, request->account, lane);
    return granted;
}

static int reap(struct vgpu_local *local, unsigned *busy) {
    const int saved = errno;
    vgpu_lock_take(&local->reaping);
    const int freed = vgpu_slots_reap(&local->member, busy);
    atomic_store_explicit(&local->last_reap_ns, now_ns(CLOCK_MONOTONIC_COARSE), memory_order_relaxed);
    vgpu_lock_release(&local->reaping);
    errno = saved;
    return freed;
}

/* Before a refusal: reaps dead processes, whose charges may be enough. */
__attribute__((noinline)) static bool charge_after_reaping(struct vgpu_local *local, const struct request *request,
                                                           struct vgpu_ticket *ticket) {
    const uint64_t deadline = now_ns(CLOCK_MONOTONIC) + REFUSAL_PATIENCE_NS;
    for (unsigned i = 0; i < request->count; i++)
        if (request->bytes > request->parts[i].limit)
            return false;
    for (unsigned looks = 0;;) {
        unsigned busy;
        const int freed = reap(local, &busy);
        if ((freed > 0 || busy > 0) && try_request(local, request, ticket))
            return true;
        if (busy == 0 || now_ns(CLOCK_MONOTONIC) > deadline)
            return false;
        vgpu_yield(&looks);
    }
}

static uint64_t guarantee(const struct vgpu_limits *limits, unsigned card) {
    return card < limits->card_count ? limits->cards[card].guarantee : 0;
}

static uint64_t resident_limit(const struct vgpu_limits *limits, unsigned card) {
    const uint64_t lent = atomic_load_explicit(&vgpu_mapped.limits->arbiter[card].lent, memory_order_acquire);
    return guarantee(limits, card) > UINT64_MAX - lent ? VGPU_NO_LIMIT : guarantee(limits, card) + lent;
}

static uint64_t memory_limit(const struct vgpu_limits *limits, unsigned card) {
    return card < limits->card_count ? limits->cards[card].memory : 0;
}

static void ask(struct request *request, enum vgpu_account_index account, uint64_t limit) {
    request->parts[request->count].account = account;
    request->parts[request->count++].limit = limit;
}

/* Asks for memory on the card. Lent room is only for memory that can move down again. */
static void ask_place(struct request *request, const struct vgpu_limits *limits, uint64_t spare, bool fixed) {
    const uint64_t most = resident_limit(limits, request->card);
    ask(request, VGPU_RESIDENT_BYTES, most == VGPU_NO_LIMIT ? most : most > spare ? most - spare : 0);
    if (fixed)
        ask(request, VGPU_FIXED_BYTES, guarantee(limits, request->card));
}

static __attribute__((noinline)) bool charge_with_tier(struct vgpu_local *local, const struct vgpu_limits *limits,
                                                       unsigned card, enum vgpu_account_index account, uint64_t bytes,
                                                       struct vgpu_ticket *ticket) {
    const bool on_card = account == VGPU_DEVICE_BYTES;
    struct request request = {.card = card, .bytes = bytes, .account = on_card ? VGPU_ON_CARD : (unsigned)account};
    ask(&request, account, on_card ? memory_limit(limits, card) : limits->host_memory);
    if (on_card)
        ask_place(&request, limits, 0, true);
    return try_request(local, &request, ticket) || charge_after_reaping(local, &request, ticket);
}

static void count_refusal(struct vgpu_local *local, unsigned card) {
    atomic_fetch_add_explicit(&local->member.usage->pacer[card].refused, 1, memory_order_relaxed);
}

bool vgpu_charge(unsigned card, enum vgpu_account_index account, uint64_t bytes, struct vgpu_ticket *ticket) {
    enum vgpu_mode mode;
    struct vgpu_local *local = vgpu_attached(&mode);
    *ticket = (struct vgpu_ticket){0};
    if (mode == VGPU_UNLIMITED)
        return true;
    if (mode == VGPU_BROKEN || card >= VGPU_MAX_CARDS || !have_slot(local))
        return false;
    const struct vgpu_limits *limits = limits_now(local);
    if (__builtin_expect(limits->flags & VGPU_OVERSUBSCRIBE, 0))
        return charge_with_tier(local, limits, card, account, bytes, ticket);
    const uint64_t limit = account == VGPU_DEVICE_BYTES ? memory_limit(limits, card) : limits->host_memory;
    if (__builtin_expect(charge(local, card, account, bytes, limit, ticket), 1))
        return true;
    const struct request request = {
        .card = card, .bytes = bytes, .account = account, .count = 1, .parts = {{account, limit}}};
    if (charge_after_reaping(local, &request, ticket))
        return true;
    count_refusal(local, card);
    return false;
}

void vgpu_charges_pass_on(void) {
    enum vgpu_mode mode;
    struct vgpu_local *local = vgpu_attached(&mode);
    if (mode != VGPU_REGION)
        return;
    const int saved = errno;
    vgpu_lock_take(&local->setting_up);
    vgpu_member_pass_on(&local->member);
    vgpu_lock_release(&local->setting_up);
    errno = saved;
}

void vgpu_charge_always(unsigned card, enum vgpu_account_index account, uint64_t bytes, struct vgpu_ticket *ticket) {
    enum vgpu_mode mode;
    struct vgpu_local *local = vgpu_attached(&mode);
    *ticket = (struct vgpu_ticket){0};
    if ((mode != VGPU_REGION && mode != VGPU_PRIVATE) || card >= VGPU_MAX_CARDS || !have_slot(local))
        return;
    const bool on_card = account == VGPU_DEVICE_BYTES && limits_now(local)->flags & VGPU_OVERSUBSCRIBE;
    struct request request = {.card = card, .bytes = bytes, .account = on_card ? VGPU_ON_CARD : (unsigned)account};
    ask(&request, account, VGPU_NO_LIMIT);
    if (on_card) {
        ask(&request, VGPU_RESIDENT_BYTES, VGPU_NO_LIMIT);
        ask(&request, VGPU_FIXED_BYTES, VGPU_NO_LIMIT);
    }
    try_request(local, &request, ticket);
}

static void release(struct vgpu_local *local, struct vgpu_ticket ticket, enum vgpu_account_index account,
                    uint64_t bytes) {
    vgpu_account_release(local->member.usage, ticket.card, account,
                         VGPU_LANE_NUMBER(local->member.slot, ticket.lane & (VGPU_LANES - 1)), bytes);
}

static __attribute__((noinline)) void release_fixed(struct vgpu_local *local, struct vgpu_ticket ticket,
                                                    uint64_t bytes) {
    release(local, ticket, VGPU_FIXED_BYTES, bytes);
    release(local, ticket, VGPU_RESIDENT_BYTES, bytes);
    if (ticket.account == VGPU_ON_CARD)
        release(local, ticket, VGPU_DEVICE_BYTES, bytes);
}

/* Whether the calling process itself made the charge (not its parent before a fork), and still has accounts. */
static inline __attribute__((always_inline)) bool is_own(struct vgpu_ticket ticket, struct vgpu_local **local) {
    enum vgpu_mode mode;
    *local = vgpu_attached(&mode);
    const uint32_t taking = atomic_load_explicit(&takings, memory_order_relaxed) & TAKING_MASK;
    if (ticket.lane == 0 || (mode != VGPU_REGION && mode != VGPU_PRIVATE) || ticket.card >= VGPU_MAX_CARDS ||
        ticket.account > VGPU_FIXED_PLACE)
        return false;
    return (uint32_t)(ticket.lane >> LANE_BITS) == taking &&
           atomic_load_explicit(&(*local)->has_slot, memory_order_acquire);
}

void vgpu_release(struct vgpu_ticket ticket, uint64_t bytes) {
    struct vgpu_local *local;
    if (!is_own(ticket, &local))
        return;
    const unsigned lane = ticket.lane & (VGPU_LANES - 1);
    vgpu_spin_lock(&local->lanes[lane].busy);
    if (__builtin_expect(ticket.account >= VGPU_ON_CARD, 0))
        release_fixed(local, ticket, bytes);
    else
        vgpu_account_release(local->member.usage, ticket.card, ticket.account,
                             VGPU_LANE_NUMBER(local->member.slot, lane), bytes);
    vgpu_spin_unlock(&local->lanes[lane].busy);
}

uint64_t vgpu_used(unsigned card, enum vgpu_account_index account) {
    enum vgpu_mode mode;
    const struct vgpu_local *local = vgpu_attached(&mode);
    if ((mode != VGPU_REGION && mode != VGPU_PRIVATE) || card >= VGPU_MAX_CARDS)
        return 0;
    return vgpu_account_used(local->member.usage, card, account);
}

/* Whether a slot holder in this process's pid namespace has ended: a caller that has waited for a process expects its
 * memory back. A zombie still counts as present (kill(2)). */
static bool anybody_gone(const struct vgpu_local *local, uint32_t high) {
    const struct vgpu_usage_file *usage = local->member.usage;
    const uint32_t own = local->member.slot;
    const int saved = errno;
    bool gone = false;
    for (uint32_t slot = 0; own < VGPU_SLOTS && slot < high && slot < VGPU_SLOTS && !gone; slot++) {
        const struct vgpu_slot_head *head = &usage->heads[slot];
        const int32_t pid = atomic_load_explicit(&head->pid, memory_order_relaxed);
        if (slot != own && pid > 0 &&
            vgpu_slot_state(atomic_load_explicit(&head->owner, memory_order_relaxed)) == VGPU_SLOT_LIVE &&
            atomic_load_explicit(&head->pid_namespace, memory_order_relaxed) ==
                atomic_load_explicit(&usage->heads[own].pid_namespace, memory_order_relaxed))
            gone = kill(pid, 0) != 0 && errno == ESRCH;
    }
    errno = saved;
    return gone;
}

int vgpu_reap(unsigned min_interval_ms) {
    enum vgpu_mode mode;
    struct vgpu_local *local = vgpu_attached(&mode);
    if (mode != VGPU_REGION)
        return 0;
    const uint32_t ever_taken = atomic_load_explicit(&local->member.usage->slots_high, memory_order_acquire);
    if (ever_taken <= 1 && atomic_load_explicit(&local->has_slot, memory_order_acquire))
        return 0; /* this process has been alone since the region was made */
    const uint64_t last = atomic_load_explicit(&local->last_reap_ns, memory_order_relaxed);
    if (min_interval_ms && last && now_ns(CLOCK_MONOTONIC_COARSE) - last < (uint64_t)min_interval_ms * 1000000u &&
        !(atomic_load_explicit(&local->has_slot, memory_order_acquire) && anybody_gone(local, ever_taken)))
        return 0;
    unsigned busy;
    return have_slot(local) ? reap(local, &busy) : 0;
}

void vgpu_count_kind(unsigned card, enum vgpu_kind kind, int64_t bytes) {
    enum vgpu_mode mode;
    struct vgpu_local *local = vgpu_attached(&mode);
    if (kind == VGPU_KIND_BUFFER || (mode != VGPU_REGION && mode != VGPU_PRIVATE) || card >= VGPU_MAX_CARDS ||
        (unsigned)kind >= VGPU_KINDS || !have_slot(local))
        return;
    atomic_fetch_add_explicit(&local->member.usage->slots[local->member.slot].by_kind[card][kind], (uint64_t)bytes,
                              memory_order_relaxed);
}

void vgpu_count_gpu_time(unsigned card, uint64_t gpu_ns, uint64_t launches) {
    enum vgpu_mode mode;
    struct vgpu_local *local = vgpu_attached(&mode);
    if ((mode != VGPU_REGION && mode != VGPU_PRIVATE) || card >= VGPU_MAX_CARDS || !have_slot(local))
        return;
    struct vgpu_usage_file *usage = local->member.usage;
    struct vgpu_slot *own = &usage->slots[local->member.slot];
    atomic_fetch_add_explicit(&own->gpu_ns[card], gpu_ns, memory_order_relaxed);
    atomic_fetch_add_explicit(&own->launches[card], launches, memory_order_relaxed);
    atomic_fetch_add_explicit(&usage->pacer[card].gpu_ns, gpu_ns, memory_order_relaxed);
    atomic_fetch_add_explicit(&usage->pacer[card].launches, launches, memory_order_relaxed);
}

void vgpu_count_throttled(unsigned card, uint64_t ns) {
    enum vgpu_mode mode;
    struct vgpu_local *local = vgpu_attached(&mode);
    if ((mode != VGPU_REGION && mode != VGPU_PRIVATE) || card >= VGPU_MAX_CARDS || !have_slot(local))
        return;
    struct vgpu_usage_file *usage = local->member.usage;
    atomic_fetch_add_explicit(&usage->slots[local->member.slot].throttled_ns[card], ns, memory_order_relaxed);
    atomic_fetch_add_explicit(&usage->pacer[card].throttled_ns, ns, memory_order_relaxed);
}

/* With VGPU_OVERSUBSCRIBE: memory whose place is charged separately. */

/* False: `answer` holds the answer. */
static bool may_ask(struct vgpu_local **local, unsigned card, struct vgpu_ticket *ticket, bool *answer) {
    enum vgpu_mode mode;
    *local = vgpu_attached(&mode);
    *ticket = (struct vgpu_ticket){0};
    *answer = mode == VGPU_UNLIMITED;
    return (mode == VGPU_REGION || mode == VGPU_PRIVATE) && card < VGPU_MAX_CARDS && have_slot(*local);
}

bool vgpu_charge_allocated(unsigned card, uint64_t bytes, struct vgpu_ticket *ticket) {
    struct vgpu_local *local;
    bool answer;
    if (!may_ask(&local, card, ticket, &answer))
        return answer;
    struct request request = {.card = card, .bytes = bytes, .account = VGPU_DEVICE_BYTES};
    ask(&request, VGPU_DEVICE_BYTES, memory_limit(limits_now(local), card));
    return try_request(local, &request, ticket) || charge_after_reaping(local, &request, ticket);
}

bool vgpu_charge_resident(unsigned card, uint64_t bytes, uint64_t spare, struct vgpu_ticket *ticket) {
    struct vgpu_local *local;
    bool answer;
    if (!may_ask(&local, card, ticket, &answer))
        return answer;
    struct request request = {.card = card, .bytes = bytes, .account = VGPU_RESIDENT_BYTES};
    ask_place(&request, limits_now(local), spare, false);
    return try_request(local, &request, ticket) || charge_after_reaping(local, &request, ticket);
}

/* Charges in the lane of another charge. */
static bool charge_beside(struct vgpu_local *local, struct vgpu_ticket other, const struct request *request) {
    const unsigned lane = other.lane & (VGPU_LANES - 1);
    vgpu_spin_lock(&local->lanes[lane].busy);
    const bool granted = charge_parts(local, request, VGPU_LANE_NUMBER(local->member.slot, lane));
    vgpu_spin_unlock(&local->lanes[lane].busy);
    return granted;
}

bool vgpu_charge_beside(struct vgpu_ticket *allocated, uint64_t bytes, uint64_t spare) {
    struct vgpu_local *local;
    struct vgpu_ticket elsewhere;
    if (!is_own(*allocated, &local))
        return false;
    struct request request = {.card = allocated->card, .bytes = bytes, .account = VGPU_FIXED_PLACE};
    ask_place(&request, limits_now(local), spare, true);
    bool granted = charge_beside(local, *allocated, &request);
    /* after reaping dead processes there is room: charge again, now in the right lane */
    if (!granted && charge_after_reaping(local, &request, &elsewhere)) {
        vgpu_release(elsewhere, bytes);
        granted = charge_beside(local, *allocated, &request);
    }
    if (granted)
        allocated->account = VGPU_ON_CARD;
    return granted;
}

void vgpu_release_beside(struct vgpu_ticket *on_card, uint64_t bytes) {
    struct vgpu_ticket place = *on_card;
    place.account = VGPU_FIXED_PLACE;
    vgpu_release(place, bytes);
    on_card->account = VGPU_DEVICE_BYTES;
}

void vgpu_charge_fixed(struct vgpu_ticket *resident, uint64_t bytes) {
    struct vgpu_local *local;
    struct request request = {.card = resident->card, .bytes = bytes};
    ask(&request, VGPU_FIXED_BYTES, VGPU_NO_LIMIT);
    if (resident->account == VGPU_RESIDENT_BYTES && is_own(*resident, &local) &&
        charge_beside(local, *resident, &request))
        resident->account = VGPU_FIXED_PLACE;
}

uint64_t vgpu_resident_limit(unsigned card) {
    const struct vgpu_limits *limits = vgpu_limits_now();
    return limits && card < VGPU_MAX_CARDS ? resident_limit(limits, card) : 0;
}

void vgpu_count_refused(unsigned card) {
    enum vgpu_mode mode;
    struct vgpu_local *local = vgpu_attached(&mode);
    if ((mode == VGPU_REGION || mode == VGPU_PRIVATE) && card < VGPU_MAX_CARDS)
        count_refusal(local, card);
}
