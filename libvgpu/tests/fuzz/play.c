/* Plays one random program. */
#define _GNU_SOURCE
#include "handles.h"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

atomic_bool pools_used;
pthread_rwlock_t rules = PTHREAD_RWLOCK_INITIALIZER;

static CUresult step(struct operation op);
static bool in_child, of_graphs;

/* A child that plays on and dies; what it inherited is its parent's. */
static CUresult forked(struct operation op, unsigned which) {
    if (in_child)
        return CUDA_SUCCESS;
    /* beside other threads, a child of _Fork may find malloc locked for ever: no fault of a library */
    pid_t parent = getpid(), child = which && !concurrent ? _Fork() : fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(0);
        concurrent = false;
        in_child = true;
        for (unsigned i = 0; i < op.a % 8u; i++)
            step((struct operation){
                .code = (uint8_t)(op.b + 7 * i), .a = (uint8_t)(op.c + i), .b = (uint8_t)(op.a * 5 + i), .c = op.c});
        if (op.c & 1)
            kill(getpid(), SIGKILL);
        _exit(0);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child)
        return CUDA_ERROR_OPERATING_SYSTEM;
    if (WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL)
        world_violation("a forked child ended by signal %d", WTERMSIG(status));
    return CUDA_SUCCESS;
}

enum family {
    ALLOCATE,
    OTHER,
    ORDERED,
    FREE,
    VIRTUAL,
    ARRAYS,
    POOLS,
    STREAMS,
    CAPTURES,
    CONTEXTS,
    HOSTS,
    FORKS,
    EXTERNALS,
    IPCS,
    SHAREABLES,
    MULTICASTS,
    LAUNCHES,
    GRAPHS
};

/* What the low 6 bits of a code mean, and from 64 on what some of them mean in a program of graphs; `alone`: no other
 * thread plays meanwhile. */
static const struct {
    uint8_t family, which;
    bool alone;
} meanings[] = {
    {ALLOCATE, 0, 0}, {EXTERNALS, 0, 0}, {ALLOCATE, 1, 0}, {OTHER, 0, 0},      {OTHER, 1, 0},    {OTHER, 2, 0},
    {ORDERED, 0, 0},  {ORDERED, 1, 0},   {ORDERED, 2, 0},  {ORDERED, 3, 0},    {FREE, 0, 0},     {IPCS, 0, 0},
    {FREE, 1, 0},     {FREE, 2, 0},      {FREE, 3, 0},     {FREE, 4, 0},       {VIRTUAL, 0, 0},  {SHAREABLES, 0, 0},
    {VIRTUAL, 1, 0},  {VIRTUAL, 2, 0},   {VIRTUAL, 3, 0},  {MULTICASTS, 0, 0}, {VIRTUAL, 4, 0},  {VIRTUAL, 5, 0},
    {VIRTUAL, 6, 0},  {VIRTUAL, 7, 0},   {ARRAYS, 0, 0},   {ARRAYS, 1, 0},     {ARRAYS, 2, 0},   {ARRAYS, 3, 0},
    {ARRAYS, 4, 0},   {ARRAYS, 5, 1},    {ARRAYS, 6, 1},   {POOLS, 0, 0},      {POOLS, 1, 1},    {POOLS, 2, 0},
    {POOLS, 3, 0},    {POOLS, 4, 1},     {POOLS, 5, 0},    {STREAMS, 0, 0},    {STREAMS, 1, 1},  {STREAMS, 2, 0},
    {LAUNCHES, 0, 0}, {CAPTURES, 0, 1},  {CAPTURES, 1, 1}, {CAPTURES, 2, 0},   {CAPTURES, 3, 1}, {CAPTURES, 4, 1},
    {CAPTURES, 5, 1}, {CAPTURES, 6, 1},  {CONTEXTS, 0, 0}, {CONTEXTS, 1, 0},   {CONTEXTS, 2, 1}, {CONTEXTS, 3, 0},
    {CONTEXTS, 4, 0}, {CONTEXTS, 5, 0},  {CONTEXTS, 6, 0}, {CONTEXTS, 7, 1},   {CONTEXTS, 8, 1}, {CONTEXTS, 10, 1},
    {HOSTS, 0, 0},    {HOSTS, 2, 0},     {HOSTS, 5, 1},    {FORKS, 0, 0},      {GRAPHS, 0, 1},   {GRAPHS, 1, 1},
    {GRAPHS, 2, 1},   {GRAPHS, 3, 1},    {GRAPHS, 4, 1},   {GRAPHS, 5, 0},     {GRAPHS, 6, 0},   {GRAPHS, 7, 0},
    {GRAPHS, 8, 1},   {GRAPHS, 9, 1},
};

/* In the place of what comes from elsewhere and of arrays. */
static const uint8_t meanings_of_graphs[64] = {[1] = 64,  [11] = 65, [17] = 66, [21] = 67, [26] = 68, [27] = 69,
                                               [28] = 70, [29] = 71, [30] = 72, [31] = 73, [32] = 65, [47] = 69};

static unsigned meaning_of(struct operation op) {
    unsigned code = op.code & 63;
    return of_graphs && meanings_of_graphs[code] ? meanings_of_graphs[code] : code;
}

static CUresult step(struct operation op) {
    unsigned which = meanings[meaning_of(op)].which;
    switch (meanings[meaning_of(op)].family) {
    case ALLOCATE: return allocate(op, which);
    case OTHER: return allocate_other(op, which);
    case ORDERED: return allocate_ordered(op, which);
    case FREE: return free_pointer(op, which);
    case VIRTUAL: return virtual(op, which);
    case ARRAYS: return array(op, which);
    case POOLS: return pool(op, which);
    case STREAMS: return stream(op, which);
    case CAPTURES: return capture(op, which);
    case CONTEXTS: return context(op, which == 0 && op.c >= 240 ? 9 : which);
    case HOSTS: return host(op, op.c >= 200 ? which + 1 : which);
    case EXTERNALS: return external(op);
    case IPCS: return ipc(op);
    case SHAREABLES: return shareable(op);
    case MULTICASTS: return multicast(op);
    case LAUNCHES: return launch(op);
    case GRAPHS: return graph(op, which);
    default: return forked(op, op.b >> 7);
    }
}

void play_begin(bool several, bool graphs) {
    handles_forget();
    atomic_store(&pools_used, false);
    graphs_begin();
    concurrent = several;
    of_graphs = graphs;
}

void play(const struct operation *operations, size_t count, unsigned lane) {
    for (size_t i = 0; i < count; i++) {
        struct operation op = operations[i];
        if (op.code >> 6 != lane)
            continue;
        if (concurrent && meanings[meaning_of(op)].alone)
            pthread_rwlock_wrlock(&rules);
        else if (concurrent)
            pthread_rwlock_rdlock(&rules);
        world_feature(&op, meaning_of(op), step(op));
        if (concurrent)
            pthread_rwlock_unlock(&rules);
    }
}

bool play_used_pools(void) {
    return atomic_load(&pools_used);
}
