/* The arbiter of one machine. Every few milliseconds it looks at all containers and tells each container how much of
 * its cards the container may use now.
 *
 * Containers trust the arbiter only by its heartbeat: when the arbiter dies or hangs, they go back to their fixed
 * limits. */
#define _GNU_SOURCE

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "arbiter/card.h"
#include "region/region_files.h"

#define IDLE_PERIOD_NS 50000000u
/* used while the same containers have work as before and no container has to give anything back */
#define STEADY_PERIOD_NS 20000000u
#define LIMITS_EVERY 5u    /* only every LIMITS_EVERYth look also reads the limits, which seldom change */
#define GLANCE_NS 2500000u /* how often the arbiter checks whether the owner of lent time is back */
#define MAX_CARDS 64u
/* time slice of NVIDIA's driver: it gives a compute context this long before it turns to another, unless set
 * otherwise */
#define TIME_SLICE_NS 2000000u

struct vgpu_arbiter {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool stopping;
    struct vgpu_container *containers;
    struct vgpu_arbiter_card *cards[MAX_CARDS];
    uint64_t last_look;
    bool lends, restless; /* on some card */
    struct vgpu_arbiter_state state;
};

static uint64_t clock_ns(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Seats: which containers are on which card. */

static struct vgpu_arbiter_card *card_of(struct vgpu_arbiter *arbiter, const struct vgpu_card_limit *limit,
                                         unsigned index) {
    unsigned place = 0;
    for (; place < MAX_CARDS && arbiter->cards[place]; place++) {
        struct vgpu_arbiter_card *card = arbiter->cards[place];
        if (strcmp(card->uuid, limit->uuid) == 0 && (limit->uuid[0] || card->index == index))
            return card;
    }
    if (place == MAX_CARDS)
        return NULL;
    struct vgpu_arbiter_card *card = calloc(1, sizeof *card);
    if (card) {
        memcpy(card->uuid, limit->uuid, sizeof card->uuid);
        card->index = index;
        card->busy.slice_ns = TIME_SLICE_NS;
    }
    return arbiter->cards[place] = card;
}

static void seat(struct vgpu_arbiter *arbiter, struct vgpu_container *container, unsigned index) {
    struct vgpu_arbiter_card *card = card_of(arbiter, &container->limits.cards[index], index);
    for (unsigned place = 0; card && place < VGPU_ARBITER_MEMBERS; place++) {
        if (card->members[place])
            continue;
        struct vgpu_arbiter_member *member = &card->seats[place];
        *member =
            (struct vgpu_arbiter_member){.container = container, .index = index, .history = &card->histories[place]};
        member->history->meter = (struct vgpu_meter){.count = 0};
        container->members[index] = card->members[place] = member;
        return;
    }
}

static void unseat(struct vgpu_arbiter *arbiter, struct vgpu_container *container) {
    for (unsigned i = 0; i < MAX_CARDS && arbiter->cards[i]; i++)
        for (unsigned place = 0; place < VGPU_ARBITER_MEMBERS; place++) {
            struct vgpu_arbiter_member *member = arbiter->cards[i]->members[place];
            if (!member || member->container != container)
                continue;
            atomic_store(&container->limits_file->arbiter[member->index].heartbeat_ns, 0);
            vgpu_busy_forget(&arbiter->cards[i]->busy, place);
            arbiter->cards[i]->members[place] = NULL;
        }
    memset(container->members, 0, sizeof container->members);
}

/* Follows a change of the limits; containers keep their seats as long as their cards stay. */
static void read_limits(struct vgpu_arbiter *arbiter, struct vgpu_container *container, bool first) {
    struct vgpu_limits limits;
    if (!first && atomic_load_explicit(&container->limits_file->selector, memory_order_acquire) == container->selector)
        return;
    container->selector = vgpu_limits_snapshot(container->limits_file, &limits);
    bool moved = first || limits.card_count != container->limits.card_count;
    for (unsigned i = 0; i < limits.card_count && !moved; i++)
        moved = strcmp(limits.cards[i].uuid, container->limits.cards[i].uuid) != 0;
    container->limits = limits;
    if (!moved)
        return;
    unseat(arbiter, container);
    for (unsigned i = 0; i < limits.card_count; i++)
        seat(arbiter, container, i);
}

/* With the lock held. */
static void look(vgpu_arbiter *arbiter, bool at_limits) {
    const uint64_t now = clock_ns(CLOCK_MONOTONIC);
    const uint64_t passed = arbiter->last_look ? now - arbiter->last_look : 0;
    for (struct vgpu_container *container = arbiter->containers; container && at_limits; container = container->next)
        read_limits(arbiter, container, false);
    vgpu_containers_look(arbiter->containers, now);
    arbiter->lends = arbiter->restless = false;
    for (unsigned i = 0; i < MAX_CARDS && arbiter->cards[i]; i++) {
        vgpu_card_decide(arbiter->cards[i], now, passed);
        arbiter->lends |= arbiter->cards[i]->lends;
        arbiter->restless |= arbiter->cards[i]->restless;
    }
    arbiter->state.containers = arbiter->state.active = 0;
    for (struct vgpu_container *container = arbiter->containers; container; container = container->next) {
        bool active = false;
        for (unsigned i = 0; i < container->limits.card_count; i++)
            active |= container->members[i] && container->members[i]->view.active;
        arbiter->state.active += active;
        arbiter->state.containers++;
    }
    arbiter->last_look = now;
    arbiter->state.passes++;
}

/* The outside view. */

vgpu_arbiter *vgpu_arbiter_new(void) {
    vgpu_arbiter *arbiter = calloc(1, sizeof *arbiter);
    if (!arbiter)
        return NULL;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&arbiter->lock, NULL);
    pthread_cond_init(&arbiter->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return arbiter;
}

/* Sleeps until `next`, or until the owner of lent time has work. The lock is held, but not while sleeping. */
static void rest(vgpu_arbiter *arbiter, uint64_t next) {
    for (uint64_t now = arbiter->last_look; !arbiter->stopping && now < next; now = clock_ns(CLOCK_MONOTONIC)) {
        if (arbiter->lends && now > arbiter->last_look && vgpu_containers_come(arbiter->containers, now))
            return;
        const uint64_t until = arbiter->lends && next - now > GLANCE_NS ? now + GLANCE_NS : next;
        const struct timespec at = {.tv_sec = (time_t)(until / 1000000000u), .tv_nsec = (long)(until % 1000000000u)};
        pthread_cond_timedwait(&arbiter->changed, &arbiter->lock, &at);
    }
}

static uint64_t period(const vgpu_arbiter *arbiter) {
    return !arbiter->state.active ? IDLE_PERIOD_NS : arbiter->restless ? VGPU_ARBITER_PERIOD_NS : STEADY_PERIOD_NS;
}

void vgpu_arbiter_run(vgpu_arbiter *arbiter) {
    const uint64_t cpu_before = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    pthread_mutex_lock(&arbiter->lock);
    while (!arbiter->stopping) {
        if (!arbiter->containers) {
            pthread_cond_wait(&arbiter->changed, &arbiter->lock);
            continue;
        }
        look(arbiter, arbiter->state.passes % LIMITS_EVERY == 0);
        rest(arbiter, arbiter->last_look + period(arbiter));
        arbiter->state.cpu_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu_before;
    }
    pthread_mutex_unlock(&arbiter->lock);
}

void vgpu_arbiter_look(vgpu_arbiter *arbiter) {
    pthread_mutex_lock(&arbiter->lock);
    look(arbiter, true);
    pthread_mutex_unlock(&arbiter->lock);
}

void vgpu_arbiter_stop(vgpu_arbiter *arbiter) {
    pthread_mutex_lock(&arbiter->lock);
    arbiter->stopping = true;
    pthread_cond_broadcast(&arbiter->changed);
    pthread_mutex_unlock(&arbiter->lock);
}

static void close_container(struct vgpu_container *container) {
    if (container->limits_file)
        munmap(container->limits_file, sizeof *container->limits_file);
    if (container->usage)
        munmap(container->usage, sizeof *container->usage);
    free(container->directory);
    free(container);
}

static int open_container(const char *dir, struct vgpu_container **out) {
    char path[4096];
    struct stat status;
    int fd = -1;
    struct vgpu_container *container = calloc(1, sizeof *container);
    if (!container)
        return -ENOMEM;
    container->directory = strdup(dir);
    int result = container->directory ? vgpu_path_join(path, sizeof path, dir, "limits") : -ENOMEM;
    if (result == 0)
        result = vgpu_limits_map(path, true, &container->limits_file, &fd);
    if (result == 0) {
        result = fstat(fd, &status) == 0 ? vgpu_path_join(path, sizeof path, dir, "usage") : -errno;
        close(fd);
    }
    if (result == 0)
        result = vgpu_usage_map(path, false, &container->usage, &fd);
    if (result < 0) {
        close_container(container);
        return result;
    }
    close(fd); /* the mapping stays; a later look notices whether the container has cut its file short */
    container->device = status.st_dev;
    container->inode = status.st_ino;
    *out = container;
    return 0;
}

static struct vgpu_container **find(vgpu_arbiter *arbiter, const char *dir) {
    struct vgpu_container **place = &arbiter->containers;
    while (*place && strcmp((*place)->directory, dir) != 0)
        place = &(*place)->next;
    return place;
}

static void remove_container(vgpu_arbiter *arbiter, struct vgpu_container **place) {
    struct vgpu_container *container = *place;
    unseat(arbiter, container);
    *place = container->next;
    close_container(container);
}

/* Whether the path still leads to the file that was attached. */
static bool same_file(const struct vgpu_container *container) {
    char path[4096];
    struct stat status;
    return vgpu_path_join(path, sizeof path, container->directory, "limits") == 0 && stat(path, &status) == 0 &&
           status.st_dev == container->device && status.st_ino == container->inode;
}

int vgpu_arbiter_attach(vgpu_arbiter *arbiter, const char *dir) {
    pthread_mutex_lock(&arbiter->lock);
    struct vgpu_container **place = find(arbiter, dir);
    int result = 0;
    if (*place && !same_file(*place))
        remove_container(arbiter, place);
    place = find(arbiter, dir);
    if (!*place && (result = open_container(dir, place)) == 0) {
        read_limits(arbiter, *place, true);
        pthread_cond_broadcast(&arbiter->changed);
    }
    pthread_mutex_unlock(&arbiter->lock);
    return result;
}

void vgpu_arbiter_detach(vgpu_arbiter *arbiter, const char *dir) {
    pthread_mutex_lock(&arbiter->lock);
    struct vgpu_container **place = find(arbiter, dir);
    if (*place)
        remove_container(arbiter, place);
    pthread_mutex_unlock(&arbiter->lock);
}

void vgpu_arbiter_state(vgpu_arbiter *arbiter, struct vgpu_arbiter_state *out) {
    pthread_mutex_lock(&arbiter->lock);
    *out = arbiter->state;
    pthread_mutex_unlock(&arbiter->lock);
}

void vgpu_arbiter_free(vgpu_arbiter *arbiter) {
    while (arbiter->containers)
        remove_container(arbiter, &arbiter->containers);
    for (unsigned i = 0; i < MAX_CARDS; i++)
        free(arbiter->cards[i]);
    pthread_cond_destroy(&arbiter->changed);
    pthread_mutex_destroy(&arbiter->lock);
    free(arbiter);
}
