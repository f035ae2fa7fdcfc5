/* Charges and releases at random against card 0 of the region until told to stop, or for a number of rounds.
 *
 *   hammer SEED THREADS ROUNDS MAX_BYTES    ROUNDS 0: until killed
 *
 * Where the region has VGPU_OVERSUBSCRIBE, each charge lies on the card, or in host memory, and a part of them changes
 * its place. Prints "held BYTES resident BYTES host BYTES granted N refused N" at the end. Every thread keeps at most
 * 64 charges. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "ledger/ledger.h"

#define KEPT 64

struct worker {
    pthread_t thread;
    uint64_t random, rounds, max_bytes, held, resident, host, granted, refused;
};

/* A charge: on the card it has one ticket, or, as the tier's blocks do, one for what is allocated and one for where it
 * lies. */
struct kept {
    struct vgpu_ticket ticket, where;
    uint64_t bytes;
    enum { ON_CARD, RESIDENT, HOST } place;
};

static uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13; /* xorshift64 (Marsaglia 2003) */
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static bool charge_in_two(struct worker *worker, struct kept *kept) {
    if (!vgpu_charge_allocated(0, kept->bytes, &kept->ticket))
        return false;
    if (next_random(&worker->random) % 4 == 0 && vgpu_charge_beside(&kept->ticket, kept->bytes, 100)) {
        kept->place = ON_CARD;
        return true;
    }
    kept->place = next_random(&worker->random) % 2 ? RESIDENT : HOST;
    if (kept->place == RESIDENT ? vgpu_charge_resident(0, kept->bytes, 100, &kept->where)
                                : vgpu_charge(0, VGPU_HOST_BYTES, kept->bytes, &kept->where))
        return true;
    vgpu_release(kept->ticket, kept->bytes);
    return false;
}

static bool charge(struct worker *worker, struct kept *kept) {
    const struct vgpu_limits *limits = vgpu_limits_now();
    if (limits && limits->flags & VGPU_OVERSUBSCRIBE && next_random(&worker->random) % 2)
        return charge_in_two(worker, kept);
    kept->place = ON_CARD;
    return vgpu_charge(0, VGPU_DEVICE_BYTES, kept->bytes, &kept->ticket);
}

/* Of where it lies. */
static void count(struct worker *worker, const struct kept *kept, uint64_t bytes) {
    if (kept->place == HOST)
        worker->host += bytes;
    else
        worker->resident += bytes;
}

static void release(struct worker *worker, struct kept *kept, uint64_t bytes) {
    vgpu_release(kept->ticket, bytes);
    if (kept->place != ON_CARD)
        vgpu_release(kept->where, bytes);
    count(worker, kept, -bytes);
    worker->held -= bytes;
    kept->bytes -= bytes;
}

/* As a move does: the new place is charged before the old one is given back. */
static void move(struct worker *worker, struct kept *kept) {
    struct vgpu_ticket target;
    const bool up = kept->place == HOST;
    if (!(up ? vgpu_charge_resident(0, kept->bytes, 100, &target)
             : vgpu_charge(0, VGPU_HOST_BYTES, kept->bytes, &target)))
        return;
    vgpu_release(kept->where, kept->bytes);
    count(worker, kept, -kept->bytes);
    kept->where = target;
    kept->place = up ? RESIDENT : HOST;
    count(worker, kept, kept->bytes);
}

static void *work(void *context) {
    struct worker *worker = context;
    struct kept charges[KEPT] = {{.bytes = 0}};
    for (uint64_t round = 0; worker->rounds == 0 || round < worker->rounds; round++) {
        struct kept *kept = &charges[next_random(&worker->random) % KEPT];
        if (kept->bytes && kept->place != ON_CARD && next_random(&worker->random) % 2) {
            move(worker, kept);
            continue;
        }
        if (kept->bytes) {
            /* now and then in two parts */
            release(worker, kept, next_random(&worker->random) % 4 ? kept->bytes : (kept->bytes + 1) / 2);
            continue;
        }
        kept->bytes = next_random(&worker->random) % worker->max_bytes + 1;
        if (!charge(worker, kept)) {
            kept->bytes = 0;
            worker->refused++;
            continue;
        }
        count(worker, kept, kept->bytes);
        worker->held += kept->bytes;
        worker->granted++;
    }
    return NULL;
}

int main(int count, char **arguments) {
    if (count != 5)
        return 2;
    const unsigned threads = (unsigned)atoi(arguments[2]);
    struct worker *workers = calloc(threads, sizeof *workers);
    for (unsigned i = 0; i < threads; i++) {
        workers[i].random = strtoull(arguments[1], NULL, 10) * 7919 + i + 1;
        workers[i].rounds = strtoull(arguments[3], NULL, 10);
        workers[i].max_bytes = strtoull(arguments[4], NULL, 10);
        pthread_create(&workers[i].thread, NULL, work, &workers[i]);
    }
    uint64_t held = 0, resident = 0, host = 0, granted = 0, refused = 0;
    for (unsigned i = 0; i < threads; i++) {
        pthread_join(workers[i].thread, NULL);
        held += workers[i].held;
        resident += workers[i].resident;
        host += workers[i].host;
        granted += workers[i].granted;
        refused += workers[i].refused;
    }
    printf("held %" PRIu64 " resident %" PRIu64 " host %" PRIu64 " granted %" PRIu64 " refused %" PRIu64 "\n", held,
           resident, host, granted, refused);
    fflush(stdout);
    getchar(); /* what is held stays held until the test has looked */
    free(workers);
    return 0;
}
