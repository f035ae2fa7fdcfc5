/* Managed memory that comes and goes, as when it oversubscribes a card (VGPU_SIM_TIME=managed=migrate).
 *
 * Memory comes to the card in groups of 2 MiB, the largest that the driver moves at once, when a launch touches them.
 * The group touched longest ago leaves first, in any process. Both directions cost bus time for the bytes; a fault
 * costs its own time in addition. The contents are always pages of the program. */
#include <stdlib.h>

#include "cuda/driver.h"

#define GROUP (2 * MIB)

struct group {
    struct group *newer, *older;
    struct managed *of;
    uint64_t touched;
    bool here; /* on the card, and in the card's list; other processes may have taken the oldest groups */
};

struct managed {
    int card;
    uint64_t size, count;
    struct group groups[];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* taken after driver.lock */
static struct {
    struct group *newest, *oldest;
    /* for groups that left for other reasons than a launch: the next launch that touches a group pays */
    uint64_t debt_ns;
} cards[SIM_CARDS];

static uint64_t bytes_of(const struct group *group) {
    uint64_t base = (uint64_t)(group - group->of->groups) * GROUP;
    return group->of->size - base < GROUP ? group->of->size - base : GROUP;
}

static uint64_t bus_ns(uint64_t bytes) {
    return driver.sim.timing.bus ? bytes * 1000 / driver.sim.timing.bus : 0;
}

/* With the lock held, like all functions below. */
static void take_out(struct group *group) {
    int card = group->of->card;
    *(group->newer ? &group->newer->older : &cards[card].newest) = group->older;
    *(group->older ? &group->older->newer : &cards[card].oldest) = group->newer;
}

static void put_first(struct group *group) {
    int card = group->of->card;
    group->newer = NULL;
    group->touched = sim_now();
    group->older = cards[card].newest;
    *(group->older ? &group->older->newer : &cards[card].oldest) = group;
    cards[card].newest = group;
}

static uint64_t go(struct group *group, bool lost) {
    take_out(group);
    group->here = false;
    sim_managed_go(&driver.sim, group->of->card, bytes_of(group), lost);
    return bus_ns(bytes_of(group));
}

/* Removes the groups that other processes have taken. */
static void settle(int card) {
    while (cards[card].oldest && driver.sim.self && atomic_load(&driver.sim.self->cards[card].taken))
        go(cards[card].oldest, true);
}

static uint64_t oldest_ns(int card) {
    return cards[card].oldest ? cards[card].oldest->touched : SIM_NEVER;
}

/* Makes room by removing the oldest group, here or in another process. Returns nanoseconds; 0: there is no group. */
static uint64_t make_room(int card, uint64_t bytes) {
    uint64_t taken = sim_managed_take(&driver.sim, card, bytes, oldest_ns(card));
    if (taken)
        return bus_ns(taken) + 1;
    return cards[card].oldest ? go(cards[card].oldest, false) + 1 : 0;
}

static void tell(int card) {
    if (driver.sim.self)
        atomic_store(&driver.sim.self->cards[card].oldest_ns, oldest_ns(card));
}

/* A group that finds no room on the card is used over the bus. */
static uint64_t come(struct group *group, bool fault) {
    uint64_t bytes = bytes_of(group), ns = bus_ns(bytes) + (fault ? driver.sim.timing.fault_ns : 0);
    int card = group->of->card;
    while (sim_charge(&driver.sim, card, bytes) != 0) {
        uint64_t took = make_room(card, bytes);
        if (!took)
            return bus_ns(bytes);
        ns += took - 1;
    }
    sim_managed_came(&driver.sim, card, bytes);
    group->here = true;
    put_first(group);
    return ns;
}

struct managed *managed_new(int card, uint64_t size) {
    uint64_t count = (size + GROUP - 1) / GROUP;
    struct managed *managed = calloc(1, sizeof *managed + count * sizeof managed->groups[0]);
    if (!managed)
        return NULL;
    managed->card = card;
    managed->size = size;
    managed->count = count;
    for (uint64_t i = 0; i < count; i++)
        managed->groups[i].of = managed;
    sim_host_add(&driver.sim, card, size);
    return managed;
}

void managed_free(struct managed *managed) {
    pthread_mutex_lock(&lock);
    settle(managed->card);
    for (uint64_t i = 0; i < managed->count; i++)
        if (managed->groups[i].here)
            go(&managed->groups[i], false);
    tell(managed->card);
    pthread_mutex_unlock(&lock);
    sim_host_sub(&driver.sim, managed->card, managed->size);
    free(managed);
}

/* Touches `bytes` from the address on, then from the range's beginning. */
uint64_t managed_touch(const struct range *range, uint64_t address, uint64_t bytes, bool fault) {
    struct managed *managed = range->managed;
    uint64_t first = (address - range->base) / GROUP, count = (bytes + GROUP - 1) / GROUP;
    pthread_mutex_lock(&lock);
    uint64_t ns = cards[managed->card].debt_ns;
    cards[managed->card].debt_ns = 0;
    settle(managed->card);
    for (uint64_t i = 0; i < count && i < managed->count; i++) {
        struct group *group = &managed->groups[(first + i) % managed->count];
        if (group->here) {
            take_out(group);
            put_first(group);
        } else {
            ns += come(group, fault);
        }
    }
    tell(managed->card);
    pthread_mutex_unlock(&lock);
    return ns;
}

uint64_t managed_leave(const struct range *range, uint64_t address, uint64_t bytes) {
    struct managed *managed = range->managed;
    uint64_t ns = 0, first = (address - range->base) / GROUP, end = (address - range->base + bytes + GROUP - 1) / GROUP;
    pthread_mutex_lock(&lock);
    settle(managed->card);
    for (uint64_t i = first; i < end && i < managed->count; i++)
        if (managed->groups[i].here)
            ns += go(&managed->groups[i], false);
    tell(managed->card);
    pthread_mutex_unlock(&lock);
    return ns;
}

bool managed_give_way(int card, uint64_t bytes) {
    pthread_mutex_lock(&lock);
    settle(card);
    uint64_t took = make_room(card, bytes < GROUP ? bytes : GROUP);
    cards[card].debt_ns += took ? took - 1 : 0;
    tell(card);
    pthread_mutex_unlock(&lock);
    return took;
}
