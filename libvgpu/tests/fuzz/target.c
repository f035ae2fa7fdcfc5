/* One input: a header of four bytes and a program of four-byte operations (play.h). It is played on threads and
 * processes; whenever nothing moves, what the ledger says must be what the simulated cards hold, and no limit may ever
 * have been passed.
 *
 * header[0]  two bits for each lane but the first: on the main thread, on a thread of its own, in another process (two
 * values) header[1]  limits header[2]  two bits for each lane but the first: how its process ends; 3 for the first
 * lane: a program of graphs (play.h) header[3]  when a process that is killed at once is killed
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "helpers.h"
#include "world.h"

int LLVMFuzzerInitialize(int *count, char ***arguments);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum place { MAIN_THREAD, OWN_THREAD, OTHER_PROCESS };
struct lane {
    const struct operation *operations;
    size_t count;
    unsigned number;
};

int LLVMFuzzerInitialize(int *count, char ***arguments) {
    (void)count, (void)arguments;
    world_make();
    atexit(world_remove);
    shared_prepare();
    helpers_prepare();
    if (cuInit(0) != CUDA_SUCCESS)
        world_violation("cuInit failed");
    return 0;
}

static void *play_lane(void *argument) {
    const struct lane *lane = argument;
    play(lane->operations, lane->count, lane->number);
    play_leave();
    return NULL;
}

static enum place place_of(uint8_t header, unsigned lane) {
    unsigned bits = lane ? header >> 2 * (lane - 1) & 3u : 0;
    return bits >= 2 ? OTHER_PROCESS : (enum place)bits;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static struct operation operations[MAX_OPERATIONS];
    pthread_t threads[LANES];
    unsigned started = 0;
    if (size < 8)
        return 0;
    size_t count = (size - 4) / sizeof *operations;
    count = count < MAX_OPERATIONS ? count : MAX_OPERATIONS;
    memcpy(operations, data + 4, count * sizeof *operations);
    struct lane lanes[LANES];
    bool busy[LANES] = {false};
    for (size_t i = 0; i < count; i++)
        busy[operations[i].code >> 6] = true;

    world_begin(data[1]);
    shared_begin();
    bool concurrent = false;
    for (unsigned i = 1; i < LANES; i++)
        concurrent |= busy[i] && place_of(data[0], i) == OWN_THREAD;
    bool graphs = (data[2] & 3) == 3;
    play_begin(concurrent, graphs);
    for (unsigned i = 1; i < LANES; i++)
        if (busy[i] && place_of(data[0], i) == OTHER_PROCESS)
            helper_start(i, (enum ending)(data[2] >> 2 * i & 3u), data[3], graphs, operations, count);
    for (unsigned i = 1; i < LANES; i++) {
        lanes[i] = (struct lane){operations, count, i};
        if (busy[i] && place_of(data[0], i) == OWN_THREAD &&
            pthread_create(&threads[started], NULL, play_lane, &lanes[i]) == 0)
            started++;
    }
    play(operations, count, 0);
    for (unsigned i = 1; i < LANES; i++)
        if (place_of(data[0], i) == MAIN_THREAD)
            play(operations, count, i);
    for (unsigned i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    helpers_wait();
    play_settle();
    const uint64_t slack = LANES * 32 * MIB; /* what a driver's pools may take at once before the library can say no */
    for (unsigned i = 1; i < LANES; i++)     /* who dies now may be anywhere */
        if (busy[i] && place_of(data[0], i) == OTHER_PROCESS && (data[2] >> 2 * i & 3u) == ENDING_KILLED_AT_ONCE)
            goto over;
    uint64_t beyond[LIMITED];
    for (unsigned card = 0; card < LIMITED; card++)
        beyond[card] = play_graphs_beyond(card);
    world_compare("at rest", slack, beyond);
    play_trim_graphs();
    world_compare("after the memory of graphs was trimmed", slack, NULL);
    play_clean();
    world_compare("after this process has cleaned up", slack, NULL);
over:
    helpers_end();
    play_clean();
    play_clean(); /* what an open capture refused: it has gone with its context */
    world_compare_empty("at the end", slack);
    return 0;
}
