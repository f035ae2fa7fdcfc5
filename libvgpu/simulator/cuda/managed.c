/* Managed memory that comes and goes, as where it oversubscribes a card (VGPU_SIM_TIME=managed=migrate).
 *
 * It comes by groups of 2 MiB, the largest that the driver moves at once, when a launch touches them, and goes in the order in which groups were
 * touched last. Both cost their bytes over the bus, coming by a fault its time besides. Only groups of the same process make room. Contents are pages
 * of the program, wherever the group is said to be. */
#include <stdlib.h>

#include "cuda/driver.h"

#define GROUP (2 * MIB)

struct group {
    struct group *newer, *older;
    struct managed *of;
    bool here; /* on the card, and in its list */
};

struct managed {
    int card;
    uint64_t size, count;
    struct group groups[];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* taken after driver.lock */
static struct {
    struct group *newest, *oldest;
    uint64_t debt_ns; /* of groups that went for something else than a launch: the next launch that touches any pays */
} cards[SIM_CARDS];

static uint64_t bytes_of(const struct group *group)
{
    uint64_t base = (uint64_t)(group - group->of->groups) * GROUP;
    return group->of->size - base < GROUP ? group->of->size - base : GROUP;
}

static uint64_t bus_ns(uint64_t bytes)
{
    return driver.sim.timing.bus ? bytes * 1000 / driver.sim.timing.bus : 0;
}

/* Under the lock, as all below. */
static void take_out(struct group *group)
{
    int card = group->of->card;
    *(group->newer ? &group->newer->older : &cards[card].newest) = group->older;
    *(group->older ? &group->older->newer : &cards[card].oldest) = group->newer;
}

static void put_first(struct group *group)
{
    int card = group->of->card;
    group->newer = NULL;
    group->older = cards[card].newest;
    *(group->older ? &group->older->newer : &cards[card].oldest) = group;
    cards[card].newest = group;
}

static uint64_t go(struct group *group)
{
    take_out(group);
    group->here = false;
    sim_uncharge(&driver.sim, group->of->card, bytes_of(group));
    sim_host_add(&driver.sim, group->of->card, bytes_of(group));
    return bus_ns(bytes_of(group));
}

/* What is not on the card and finds no room is used over the bus. */
static uint64_t come(struct group *group, bool fault)
{
    uint64_t bytes = bytes_of(group), ns = bus_ns(bytes) + (fault ? driver.sim.timing.fault_ns : 0);
    int card = group->of->card;
    while (sim_charge(&driver.sim, card, bytes) != 0) {
        if (!cards[card].oldest)
            return bus_ns(bytes);
        ns += go(cards[card].oldest);
    }
    sim_host_sub(&driver.sim, card, bytes);
    group->here = true;
    put_first(group);
    return ns;
}

struct managed *managed_new(int card, uint64_t size)
{
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

void managed_free(struct managed *managed)
{
    pthread_mutex_lock(&lock);
    for (uint64_t i = 0; i < managed->count; i++)
        if (managed->groups[i].here)
            go(&managed->groups[i]);
    pthread_mutex_unlock(&lock);
    sim_host_sub(&driver.sim, managed->card, managed->size);
    free(managed);
}

/* From the address on, and then from the beginning. */
uint64_t managed_touch(const struct range *range, uint64_t address, uint64_t bytes, bool fault)
{
    struct managed *managed = range->managed;
    uint64_t first = (address - range->base) / GROUP, count = (bytes + GROUP - 1) / GROUP;
    pthread_mutex_lock(&lock);
    uint64_t ns = cards[managed->card].debt_ns;
    cards[managed->card].debt_ns = 0;
    for (uint64_t i = 0; i < count && i < managed->count; i++) {
        struct group *group = &managed->groups[(first + i) % managed->count];
        if (group->here) {
            take_out(group);
            put_first(group);
        } else {
            ns += come(group, fault);
        }
    }
    pthread_mutex_unlock(&lock);
    return ns;
}

uint64_t managed_leave(const struct range *range, uint64_t address, uint64_t bytes)
{
    struct managed *managed = range->managed;
    uint64_t ns = 0, first = (address - range->base) / GROUP, end = (address - range->base + bytes + GROUP - 1) / GROUP;
    pthread_mutex_lock(&lock);
    for (uint64_t i = first; i < end && i < managed->count; i++)
        if (managed->groups[i].here)
            ns += go(&managed->groups[i]);
    pthread_mutex_unlock(&lock);
    return ns;
}

bool managed_give_way(int card)
{
    pthread_mutex_lock(&lock);
    bool some = cards[card].oldest != NULL;
    if (some)
        cards[card].debt_ns += go(cards[card].oldest);
    pthread_mutex_unlock(&lock);
    return some;
}
