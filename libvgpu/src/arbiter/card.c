/* The arbiter's decisions for one card. The arbiter believes what a container writes only where a lie harms no other
 * container. */
#include "arbiter/card.h"

#include <string.h>

#include "region/sigbus_guard.h"

/* a launch that waits longer than this counts again when its turn comes; also bounds what a killed launch leaves */
#define FARTHEST_NS 2000000000u
#define SMOOTH_NS 50000000.0 /* time over which use of a card is averaged */
/* for so long, a container that was held back or has just come is assumed to want all that it may have */
#define EAGER_NS 50000000u
/* on a card this full, use tells nothing of what the containers would want alone */
#define BUSY_CARD 0.97
#define CAREFUL_NS 100000000u /* after a full card, unused time of working containers is not lent for so long */
#define HEADROOM_PERCENT 6    /* each such container keeps this much above its present use plus a tenth */
/* how often a heartbeat is written without other changes; libraries count the arbiter as dead after ten times as
 * long */
#define BEAT_NS 100000000u
#define METER_NS 10000000000u /* for so long after the last long launch on a card, short launches still matter */
/* a measurement is seen before the charge that it corrects: the difference must not go below 0 */
#define METER_BASE_NS (UINT64_C(1) << 62)
#define LONGEST_RUN_NS 60000000000u
/* measured launches found by one look: with twice as many, half the time of the ring has passed */
#define MANY_RUNS (VGPU_RUNS / 4)

static bool ahead(uint64_t when, uint64_t now) {
    return when > now && when - now < FARTHEST_NS;
}

static bool has_work(uint64_t wanted_until, uint64_t now) {
    return wanted_until + VGPU_ACTIVE_NS > now && wanted_until < now + FARTHEST_NS;
}

static bool plausible(uint64_t begin, uint64_t end, uint64_t now) {
    return begin < end && end < now + VGPU_ARBITER_PERIOD_NS && end - begin < LONGEST_RUN_NS;
}

static void look_at_runs(struct vgpu_arbiter_member *member, struct vgpu_pacer_card *pacer, uint64_t now) {
    const uint64_t count = atomic_load_explicit(&pacer->run_count, memory_order_acquire);
    member->fresh = 0;
    if (!member->known || count < member->run_count)
        member->run_count = count;
    if (count - member->run_count > VGPU_RUNS)
        member->run_count = count - VGPU_RUNS;
    for (; member->run_count < count; member->run_count++) {
        struct vgpu_run *run = &pacer->runs[member->run_count % VGPU_RUNS];
        const uint64_t end = atomic_load_explicit(&run->end_ns, memory_order_acquire);
        const uint64_t begin = atomic_load_explicit(&run->begin_ns, memory_order_acquire);
        if (end == 0 && member->stuck != member->run_count + 1) {
            /* the entry is being written: try again at the next look, then skip it, as its writer was killed */
            member->stuck = member->run_count + 1;
            return;
        }
        if (atomic_load_explicit(&run->end_ns, memory_order_relaxed) == end && plausible(begin, end, now)) {
            member->history->runs[member->fresh].begin = begin;
            member->history->runs[member->fresh++].end = end;
        }
    }
}

static void look_at(struct vgpu_container *container, uint64_t now) {
    for (unsigned i = 0; i < container->limits.card_count; i++) {
        struct vgpu_arbiter_member *member = container->members[i];
        struct vgpu_pacer_card *pacer = &container->usage->pacer[i];
        if (!member)
            continue;
        member->before = member->now;
        member->now.used_ns = atomic_load_explicit(&pacer->gpu_ns, memory_order_relaxed) +
                              atomic_load_explicit(&pacer->refund_taken, memory_order_relaxed);
        member->now.throttled_ns = atomic_load_explicit(&pacer->throttled_ns, memory_order_relaxed);
        member->now.wanted_until = atomic_load_explicit(&pacer->wanted_until, memory_order_relaxed);
        member->now.tat = atomic_load_explicit(&pacer->tat, memory_order_relaxed);
        look_at_runs(member, pacer, now);
        if (!member->known)
            member->before = member->now;
        member->known = true;
    }
}

struct looking {
    struct vgpu_container *at;
    uint64_t now;
    bool found;
};

static int look_at_all(void *context) {
    struct looking *looking = context;
    for (; looking->at; looking->at = looking->at->next)
        if (!looking->at->broken)
            look_at(looking->at, looking->now);
    return 0;
}

static int look_for_comers(void *context) {
    struct looking *looking = context;
    for (; looking->at; looking->at = looking->at->next)
        for (unsigned i = 0; i < looking->at->limits.card_count && !looking->at->broken; i++) {
            const struct vgpu_arbiter_member *member = looking->at->members[i];
            if (member && !member->view.active)
                looking->found |=
                    has_work(atomic_load_explicit(&looking->at->usage->pacer[i].wanted_until, memory_order_relaxed),
                             looking->now);
        }
    return 0;
}

/* One guard for all containers, because setting it up takes a system call. Meanwhile this thread touches no other file
 * mapping that could be cut short. */
static void guarded(struct looking *looking, int (*work)(void *context)) {
    while (vgpu_guarded(NULL, SIZE_MAX, work, looking) < 0) {
        struct vgpu_container *broken = looking->at;
        broken->broken = true;
        for (unsigned i = 0; i < VGPU_MAX_CARDS; i++)
            if (broken->members[i]) {
                broken->members[i]->fresh = 0;
                broken->members[i]->view.active = 0;
            }
        looking->at = broken->next;
    }
}

void vgpu_containers_look(struct vgpu_container *first, uint64_t now) {
    struct looking looking = {.at = first, .now = now};
    guarded(&looking, look_at_all);
}

bool vgpu_containers_come(struct vgpu_container *first, uint64_t now) {
    struct looking looking = {.at = first, .now = now};
    guarded(&looking, look_for_comers);
    return looking.found;
}

/* What the last `passed` nanoseconds tell of a container that had `part` of the card, if the work of others is
 * counted. */
static void weigh(struct vgpu_arbiter_member *member, uint64_t now, double passed, double part) {
    member->pending_ns += (double)(int64_t)(member->now.used_ns - member->before.used_ns);
    member->pending_ns = member->pending_ns < 0             ? 0
                         : member->pending_ns > FARTHEST_NS ? FARTHEST_NS
                                                            : member->pending_ns;
    const double done = member->pending_ns < passed * part ? member->pending_ns : passed * part;
    member->pending_ns -= done;
    if (passed > 0)
        member->rate += (done / passed - member->rate) * passed / (passed + SMOOTH_NS);
    const uint64_t wanted = member->now.wanted_until;
    const bool active = has_work(wanted, now) || member->pending_ns > 0;
    const bool held_back =
        member->now.throttled_ns != member->before.throttled_ns || ahead(member->now.tat, now) || ahead(wanted, now);
    if (held_back || (active && !member->view.active))
        member->eager_until = now + EAGER_NS;
    member->view.active = active;
}

/* Containers lend the part of their guarantee that they leave unused, as long as the card has time left over. Only then
 * does their use show what they want. In percent, in steps, so that small changes have no effect. */
static uint32_t demand_of(const struct vgpu_arbiter_member *member, const struct vgpu_arbiter_card *card,
                          uint64_t now) {
    if (now < card->careful_until || now < member->eager_until)
        return 100;
    const uint32_t demand = (uint32_t)(member->rate * 110) + HEADROOM_PERCENT;
    return demand < 100 ? (demand + 3) / 4 * 4 : 100;
}

static void meter(struct vgpu_arbiter_member *member, uint64_t now) {
    uint64_t measured = member->measured_ns;
    for (unsigned run = 0; run < member->fresh; run++)
        measured += member->history->runs[run].end - member->history->runs[run].begin;
    vgpu_meter_note(&member->history->meter, now, METER_BASE_NS + member->now.used_ns - measured);
}

static void take_in_runs(struct vgpu_arbiter_card *card, uint64_t now) {
    struct vgpu_meters meters = {.count = 0};
    bool any = false;
    double refunds[VGPU_ARBITER_MEMBERS] = {0};
    for (unsigned i = 0; i < VGPU_ARBITER_MEMBERS; i++) {
        const struct vgpu_arbiter_member *member = card->members[i];
        any |= member && member->fresh;
    }
    if (any)
        card->metered_until = now + METER_NS;
    for (unsigned i = 0; i < VGPU_ARBITER_MEMBERS; i++) {
        struct vgpu_arbiter_member *member = card->members[i];
        if (!member || (now >= card->metered_until && member->metered))
            continue; /* no long launch lately: for the next one, the average since the last note is good enough */
        meter(member, now);
        member->metered = true;
        meters.of[meters.count].member = i;
        meters.of[meters.count++].meter = &member->history->meter;
    }
    if (!any)
        return;
    for (unsigned i = 0; i < VGPU_ARBITER_MEMBERS; i++)
        for (unsigned run = 0; card->members[i] && run < card->members[i]->fresh; run++) {
            const uint64_t begin = card->members[i]->history->runs[run].begin,
                           end = card->members[i]->history->runs[run].end;
            card->members[i]->measured_ns += vgpu_busy_add(&card->busy, i, begin, end, &meters, refunds);
        }
    for (unsigned i = 0; i < VGPU_ARBITER_MEMBERS; i++)
        if (card->members[i])
            card->members[i]->refund_ns += refunds[i];
}

static void publish(struct vgpu_arbiter_member *member, const struct vgpu_arbiter_view *answer, uint64_t now) {
    struct vgpu_limits_file *file = member->container->limits_file;
    /* a refund that was too large is subtracted from later refunds */
    const uint64_t refund = member->refund_ns > 0 ? (uint64_t)member->refund_ns : 0;
    const bool told = member->view.share == answer->share && member->view.yield == answer->yield &&
                      member->view.neighbours == answer->neighbours;
    if (told && !refund && now - member->beaten < BEAT_NS)
        return;
    member->view.share = answer->share;
    member->view.yield = answer->yield;
    member->view.neighbours = answer->neighbours;
    member->beaten = now;
    atomic_store_explicit(&file->arbiter[member->index].share, answer->share, memory_order_relaxed);
    atomic_store_explicit(&file->arbiter[member->index].yield, answer->yield, memory_order_relaxed);
    atomic_store_explicit(&file->arbiter[member->index].neighbours, answer->neighbours, memory_order_relaxed);
    if (refund)
        atomic_fetch_add_explicit(&file->arbiter[member->index].refund_ns, refund, memory_order_relaxed);
    member->refund_ns -= (double)refund;
    atomic_store_explicit(&file->arbiter[member->index].heartbeat_ns, now, memory_order_release);
}

/* Whether a container uses time of another container that has no work now, and that should not have to wait when it has
 * work. */
static bool lends(const struct vgpu_arbiter_view *views, unsigned count) {
    bool lent = false, resting = false;
    for (unsigned i = 0; i < count; i++) {
        lent |= views[i].active &&
                (views[i].priority > 0 || (views[i].policy == VGPU_CORES_ELASTIC && views[i].share > views[i].cores));
        resting |= !views[i].active;
    }
    return lent && resting;
}

void vgpu_card_decide(struct vgpu_arbiter_card *card, uint64_t now, uint64_t passed) {
    struct vgpu_arbiter_member *present[VGPU_ARBITER_MEMBERS];
    struct vgpu_arbiter_view asked[VGPU_ARBITER_MEMBERS];
    unsigned count = 0;
    double busy = 0;
    for (unsigned i = 0; i < VGPU_ARBITER_MEMBERS; i++)
        if (card->members[i] && !card->members[i]->container->broken) {
            weigh(card->members[i], now, (double)passed, card->active ? 1.0 / card->active : 1);
            busy += card->members[i]->rate;
            present[count++] = card->members[i];
        }
    if (busy > BUSY_CARD)
        card->careful_until = now + CAREFUL_NS;
    card->active = 0;
    for (unsigned i = 0; i < count; i++) {
        const struct vgpu_limits *limits = &present[i]->container->limits;
        const struct vgpu_card_limit *limit = &limits->cards[present[i]->index];
        asked[i] = (struct vgpu_arbiter_view){.active = present[i]->view.active,
                                              .demand = demand_of(present[i], card, now),
                                              .cores = limit->cores,
                                              .ceiling = limit->cores_ceiling,
                                              .policy = limits->core_policy,
                                              .priority = limits->priority};
        card->active += asked[i].active;
    }
    const bool changed = count != card->asked_count || memcmp(asked, card->asked, count * sizeof *asked) != 0;
    if (changed) {
        card->asked_count = count;
        memcpy(card->asked, asked, count * sizeof *asked);
        memcpy(card->answered, asked, count * sizeof *asked);
        vgpu_arbiter_shares(card->answered, count);
    }
    card->lends = lends(card->answered, count);
    card->restless = changed || card->lends;
    for (unsigned i = 0; i < count; i++)
        card->restless |= present[i]->fresh > MANY_RUNS;
    take_in_runs(card, now);
    for (unsigned i = 0; i < count; i++)
        publish(present[i], &card->answered[i], now);
}
