/* The outside view of a region. Reads the container's file by pread, so that nothing the container does to the file can
 * harm the reader. */
#define _GNU_SOURCE
#include "vgpu/agent.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "region/account.h"
#include "region/gcra.h"
#include "region/region_files.h"
#include "region/sigbus_guard.h"
#include "region/slots.h"

#ifndef F_OFD_SETLKW
#define F_OFD_SETLK 37
#define F_OFD_SETLKW 38
#endif

struct vgpu_region {
    struct vgpu_limits_file *limits;
    struct vgpu_usage_file *usage;
    int limits_fd, usage_fd;
    int writable;
    struct vgpu_member member; /* its descriptor is usage_fd */
    bool staying;              /* the member keeps its slot, because it holds charges */
    pthread_mutex_t reaping;   /* the threads of a caller share the member */
    char usage_path[4096];
};

int vgpu_region_create(const char *dir, const struct vgpu_limits *limits) {
    return vgpu_region_files_make(dir, limits, true);
}

static int open_files(vgpu_region *region, const char *dir) {
    char path[4096];
    int result = vgpu_path_join(path, sizeof path, dir, "limits");
    if (result == 0)
        result = vgpu_path_join(region->usage_path, sizeof region->usage_path, dir, "usage");
    if (result == 0)
        result = vgpu_limits_map(path, region->writable, &region->limits, &region->limits_fd);
    if (result == 0)
        result = vgpu_usage_map(region->usage_path, region->writable, &region->usage, &region->usage_fd);
    return result;
}

int vgpu_region_open(const char *dir, int writable, vgpu_region **out) {
    vgpu_region *region = calloc(1, sizeof *region);
    if (!region)
        return -ENOMEM;
    *region = (vgpu_region){.limits_fd = -1, .usage_fd = -1, .writable = writable != 0};
    pthread_mutex_init(&region->reaping, NULL);
    const int result = open_files(region, dir);
    if (result < 0) {
        vgpu_region_close(region);
        return result;
    }
    *out = region;
    return 0;
}

void vgpu_region_close(vgpu_region *region) {
    if (region->limits)
        munmap(region->limits, sizeof *region->limits);
    if (region->usage)
        munmap(region->usage, sizeof *region->usage);
    if (region->limits_fd >= 0)
        close(region->limits_fd);
    if (region->usage_fd >= 0)
        close(region->usage_fd);
    vgpu_process_list_free(&region->member.list);
    pthread_mutex_destroy(&region->reaping);
    free(region);
}

int vgpu_limits_read(vgpu_region *region, struct vgpu_limits *out) {
    vgpu_limits_snapshot(region->limits, out);
    return 0;
}

int vgpu_limits_write(vgpu_region *region, const struct vgpu_limits *limits) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
    int result = vgpu_limits_check(limits);
    if (!region->writable)
        result = -EBADF;
    if (result < 0)
        return result;
    while (fcntl(region->limits_fd, F_OFD_SETLKW, &lock) != 0) /* the kernel drops a killed writer's lock */
        if (errno != EINTR)
            return -errno;
    vgpu_limits_publish(region->limits, limits);
    lock.l_type = F_UNLCK;
    fcntl(region->limits_fd, F_OFD_SETLK, &lock);
    return 0;
}

int vgpu_lent_write(vgpu_region *region, uint32_t card, uint64_t bytes) {
    if (!region->writable)
        return -EBADF;
    if (card >= VGPU_MAX_CARDS)
        return -EINVAL;
    atomic_store_explicit(&region->limits->arbiter[card].lent, bytes, memory_order_release);
    return 0;
}

static int read_exactly(int fd, void *out, size_t size, size_t offset) {
    for (size_t done = 0; done < size;) {
        const ssize_t got = pread(fd, (char *)out + done, size - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return got < 0 ? -errno : -EPROTO; /* the container has cut the file short */
        done += (size_t)got;
    }
    return 0;
}

static void add_process(struct vgpu_usage *out, const struct vgpu_slot_head *head, uint32_t number,
                        const struct vgpu_slot *slot) {
    struct vgpu_process_usage *process = &out->processes[out->process_count++];
    process->pid = head->pid;
    process->slot = number;
    process->pid_namespace = head->pid_namespace;
    process->start_time = head->start_time;
    for (unsigned card = 0; card < VGPU_MAX_CARDS; card++) {
        for (unsigned lane = 0; lane < VGPU_LANES; lane++) {
            process->used[card] += slot->lanes[lane][card][VGPU_DEVICE_BYTES].bytes;
            process->host[card] += slot->lanes[lane][card][VGPU_HOST_BYTES].bytes;
            process->resident[card] += slot->lanes[lane][card][VGPU_RESIDENT_BYTES].bytes;
        }
        uint64_t others = 0;
        for (unsigned kind = 0; kind < VGPU_KINDS; kind++) {
            process->by_kind[card][kind] = kind == VGPU_KIND_BUFFER ? 0 : slot->by_kind[card][kind];
            others += process->by_kind[card][kind];
        }
        if (process->used[card] > others)
            process->by_kind[card][VGPU_KIND_BUFFER] = process->used[card] - others;
        for (unsigned kind = 0; kind < VGPU_KINDS; kind++)
            out->cards[card].by_kind[kind] += process->by_kind[card][kind];
        process->gpu_ns[card] = slot->gpu_ns[card];
        process->throttled_ns[card] = slot->throttled_ns[card];
        process->launches[card] = slot->launches[card];
        out->cards[card].processes += process->used[card] > 0;
    }
}

/* Adds the agents' charges. A reaping agent has a slot too, but holds nothing in it. */
static void add_overhead(struct vgpu_usage *out, const struct vgpu_slot *slot) {
    for (unsigned card = 0; card < VGPU_MAX_CARDS; card++)
        out->cards[card].by_kind[VGPU_KIND_OVERHEAD] += slot->lanes[0][card][VGPU_DEVICE_BYTES].bytes;
}

static int read_usage(int fd, struct vgpu_usage_file *file, struct vgpu_usage *out) {
    int result = read_exactly(fd, file, offsetof(struct vgpu_usage_file, slots), 0);
    if (result < 0)
        return result;
    out->unhooked = file->unhooked;
    out->saturated = file->saturated;
    for (unsigned card = 0; card < VGPU_MAX_CARDS; card++) {
        out->cards[card].used = file->accounts[card][VGPU_DEVICE_BYTES].word.used;
        out->cards[card].host_used = file->accounts[card][VGPU_HOST_BYTES].word.used;
        out->cards[card].resident = file->accounts[card][VGPU_RESIDENT_BYTES].word.used;
        out->cards[card].gpu_ns = file->pacer[card].gpu_ns;
        out->cards[card].throttled_ns = file->pacer[card].throttled_ns;
        out->cards[card].launches = file->pacer[card].launches;
        out->cards[card].refused = file->pacer[card].refused;
    }
    const uint32_t high = file->slots_high < VGPU_SLOTS ? file->slots_high : VGPU_SLOTS;
    for (uint32_t slot = 0; slot < high && result == 0; slot++) {
        const struct vgpu_slot_head *head = &file->heads[slot];
        if (vgpu_slot_state(head->owner) != VGPU_SLOT_LIVE)
            continue;
        struct vgpu_slot *body = &file->slots[0];
        result = read_exactly(fd, body, sizeof *body, offsetof(struct vgpu_usage_file, slots) + slot * sizeof *body);
        if (result == 0 && head->flags & VGPU_SLOT_AGENT)
            add_overhead(out, body);
        else if (result == 0)
            add_process(out, head, slot, body);
    }
    return result;
}

int vgpu_usage_read(vgpu_region *region, struct vgpu_usage *out) {
    memset(out, 0, sizeof *out);
    /* only pages that the read touches will exist */
    struct vgpu_usage_file *file = aligned_alloc(_Alignof(struct vgpu_usage_file), sizeof *file);
    if (!file)
        return -ENOMEM;
    const int result = read_usage(region->usage_fd, file, out);
    free(file);
    for (unsigned card = 0; card < VGPU_MAX_CARDS; card++)
        out->cards[card].lent = atomic_load_explicit(&region->limits->arbiter[card].lent, memory_order_relaxed);
    return result;
}

static int enter(vgpu_region *region, bool to_charge) {
    vgpu_process_list_free(&region->member.list); /* left over from an interrupted pass */
    if (region->staying)
        return 0;
    const int result = vgpu_member_join(&region->member, region->usage, region->usage_path, region->usage_fd);
    if (result < 0)
        return result;
    return to_charge ? vgpu_slot_take_to_charge(&region->member) : vgpu_slot_take(&region->member, VGPU_SLOT_AGENT);
}

static int reap(void *context) {
    vgpu_region *region = context;
    unsigned busy;
    int result = enter(region, false);
    if (result < 0)
        return result;
    result = vgpu_slots_reap(&region->member, &busy);
    if (!region->staying)
        vgpu_slot_give_back(&region->member);
    return result;
}

int vgpu_region_reap(vgpu_region *region) {
    if (!region->writable)
        return -EBADF;
    pthread_mutex_lock(&region->reaping);
    int result = vgpu_guarded(region->usage, sizeof *region->usage, reap, region);
    pthread_mutex_unlock(&region->reaping);
    return result;
}

/* Most wall time that a debit can add: the rest is forgiven, so that paying launches wait no longer. */
#define MOST_AHEAD_NS 10000000000u

struct debit {
    struct vgpu_pacer_card *pacer;
    uint64_t gpu_ns;
};

static int debit_pacer(void *context) {
    const struct debit *debit = context;
    const uint32_t percent = atomic_load(&debit->pacer->percent);
    const uint64_t now = vgpu_now_ns(), latest = now + MOST_AHEAD_NS;
    atomic_fetch_add(&debit->pacer->gpu_ns, debit->gpu_ns);
    const uint64_t tat = atomic_load(&debit->pacer->tat);
    if (!percent || tat >= latest)
        return 0;
    const uint64_t most =
        debit->gpu_ns < MOST_AHEAD_NS ? debit->gpu_ns : MOST_AHEAD_NS; /* so that its price fits into 64 bits */
    const uint64_t price = vgpu_gcra_price(most, percent), room = latest - (tat > now ? tat : now);
    vgpu_gcra_settle(&debit->pacer->tat, (int64_t)(price < room ? price : room));
    return 0;
}

int vgpu_region_debit(vgpu_region *region, uint32_t card, uint64_t gpu_ns) {
    if (!region->writable)
        return -EBADF;
    if (card >= VGPU_MAX_CARDS)
        return -EINVAL;
    struct debit debit = {.pacer = &region->usage->pacer[card], .gpu_ns = gpu_ns};
    return vgpu_guarded(region->usage, sizeof *region->usage, debit_pacer, &debit);
}

struct overhead {
    vgpu_region *region;
    unsigned card;
    uint64_t bytes;
};

/* Sets what the region's own slot holds in an account to `bytes`. */
static void hold(vgpu_region *region, unsigned card, enum vgpu_account_index account, uint64_t bytes) {
    const uint32_t lane = VGPU_LANE_NUMBER(region->member.slot, 0);
    const uint64_t held = vgpu_account_lane_of(region->usage, card, account, lane)->bytes;
    if (bytes > held)
        vgpu_account_charge(region->usage, card, account, lane, bytes - held, VGPU_NO_LIMIT);
    else
        vgpu_account_release(region->usage, card, account, lane, held - bytes);
}

static int charge_overhead(void *context) {
    const struct overhead *overhead = context;
    vgpu_region *region = overhead->region;
    if (!region->staying && overhead->bytes == 0)
        return 0;
    const int result = enter(region, true);
    if (result < 0)
        return result;
    region->staying = true;
    struct vgpu_limits limits;
    vgpu_limits_snapshot(region->limits, &limits);
    hold(region, overhead->card, VGPU_DEVICE_BYTES, overhead->bytes);
    if (limits.flags & VGPU_OVERSUBSCRIBE) {
        hold(region, overhead->card, VGPU_RESIDENT_BYTES, overhead->bytes);
        hold(region, overhead->card, VGPU_FIXED_BYTES, overhead->bytes);
    }
    return 0;
}

int vgpu_region_charge_overhead(vgpu_region *region, uint32_t card, uint64_t bytes) {
    struct overhead overhead = {.region = region, .card = card, .bytes = bytes};
    if (!region->writable)
        return -EBADF;
    if (card >= VGPU_MAX_CARDS)
        return -EINVAL;
    pthread_mutex_lock(&region->reaping);
    const int result = vgpu_guarded(region->usage, sizeof *region->usage, charge_overhead, &overhead);
    pthread_mutex_unlock(&region->reaping);
    return result;
}
