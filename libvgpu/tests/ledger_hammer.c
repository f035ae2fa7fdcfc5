/* Charges and releases at random against card 0 of the region until told to stop, or for a number of rounds.
 *
 *   hammer SEED THREADS ROUNDS MAX_BYTES    ROUNDS 0: until killed
 *
 * Prints "held BYTES granted N refused N" at the end. Every thread keeps at most 64 charges. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "ledger.h"

#define KEPT 64

struct worker {
    pthread_t thread;
    uint64_t random, rounds, max_bytes, held, granted, refused;
};

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13; /* xorshift64 (Marsaglia 2003) */
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static void *work(void *context)
{
    struct worker *worker = context;
    struct vgpu_ticket tickets[KEPT];
    uint64_t sizes[KEPT] = {0};
    for (uint64_t round = 0; worker->rounds == 0 || round < worker->rounds; round++) {
        const unsigned entry = (unsigned)(next_random(&worker->random) % KEPT);
        if (sizes[entry]) {
            /* now and then in two parts */
            const uint64_t part = next_random(&worker->random) % 4 ? sizes[entry] : (sizes[entry] + 1) / 2;
            vgpu_release(tickets[entry], part);
            sizes[entry] -= part;
            worker->held -= part;
            continue;
        }
        const uint64_t bytes = next_random(&worker->random) % worker->max_bytes + 1;
        if (!vgpu_charge(0, VGPU_DEVICE_BYTES, bytes, &tickets[entry])) {
            worker->refused++;
            continue;
        }
        sizes[entry] = bytes;
        worker->held += bytes;
        worker->granted++;
    }
    return NULL;
}

int main(int count, char **arguments)
{
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
    uint64_t held = 0, granted = 0, refused = 0;
    for (unsigned i = 0; i < threads; i++) {
        pthread_join(workers[i].thread, NULL);
        held += workers[i].held;
        granted += workers[i].granted;
        refused += workers[i].refused;
    }
    printf("held %" PRIu64 " granted %" PRIu64 " refused %" PRIu64 "\n", held, granted, refused);
    fflush(stdout);
    getchar(); /* what is held stays held until the test has looked */
    free(workers);
    return 0;
}
