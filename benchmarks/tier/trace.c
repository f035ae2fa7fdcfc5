#include "trace.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define PHASE_LENGTH 20u /* times what moving the whole set out and another one in takes */

const char *const trace_names[] = {
    "zipf",        "drift",   "random",   "cyclic",          "phases-64",           "phases-100",      "phases-120",
    "overlap-100", "flicker", "training", "training-random", "training-validation", "training-bursts", "inference",
    "tenants",     NULL,
};

static uint64_t next(uint64_t *random) { /* xorshift64 */
    *random ^= *random << 13;
    *random ^= *random >> 7;
    return *random ^= *random << 17;
}

double uniform(uint64_t *random) {
    return (double)(next(random) >> 11) * 0x1p-53;
}

uint32_t below(uint64_t *random, uint32_t bound) {
    return (uint32_t)(uniform(random) * bound);
}

static void put(struct trace *trace, enum kind kind, uint32_t tenant, uint32_t count) {
    trace->ops[trace->count++] = (struct op){.kind = kind, .tenant = tenant, .count = count, .first = trace->touches};
}

/* The launch that was begun last comes `times` more times. */
static void repeat(struct trace *trace, uint32_t times) {
    const struct op op = trace->ops[trace->count - 1];
    for (uint32_t i = 0; i < times; i++) {
        trace->ops[trace->count++] = op;
        trace->launches++;
    }
}

static void begin_launch(struct trace *trace, uint32_t tenant) {
    put(trace, LAUNCH, tenant, 0);
    trace->launches++;
}

/* The launch that was begun last touches this block, too; once. */
static bool touch(struct trace *trace, uint32_t block) {
    struct op *op = &trace->ops[trace->count - 1];
    for (uint32_t i = 0; i < op->count; i++)
        if (trace->touched[op->first + i] == block)
            return false;
    trace->touched[trace->touches++] = (uint16_t)block;
    op->count++;
    return true;
}

static void touch_all(struct trace *trace, uint32_t first, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        touch(trace, first + i);
}

void shuffle(uint64_t *random, uint32_t *order, uint32_t count) {
    for (uint32_t i = count - 1; i > 0; i--) {
        const uint32_t other = below(random, i + 1), kept = order[i];
        order[i] = order[other];
        order[other] = kept;
    }
}

/* The tenant's blocks `from` up to `to` come into being; in any order, or in their own. */
static void add_blocks(struct trace *trace, uint32_t tenant, uint32_t from, uint32_t to, bool in_order) {
    uint32_t order[BLOCKS];
    for (uint32_t i = from; i < to; i++)
        order[i - from] = i;
    if (!in_order)
        shuffle(&trace->random, order, to - from);
    for (uint32_t i = 0; i < to - from; i++)
        put(trace, ADD, tenant, order[i]);
    put(trace, PHASE, tenant, 0);
}

/* A launch whose blocks are drawn by Zipf's law with exponent 1: ranked[i] is touched in proportion to 1 / (i + 1). */
static void zipf_launch(struct trace *trace, uint32_t tenant, const uint32_t *ranked, uint32_t count) {
    double sum = 0;
    for (uint32_t i = 0; i < count; i++)
        sum += 1.0 / (i + 1);
    begin_launch(trace, tenant);
    for (uint32_t drawn = 0; drawn < TOUCHED;) {
        double left = uniform(&trace->random) * sum;
        uint32_t rank = 0;
        while (rank + 1 < count && (left -= 1.0 / (rank + 1)) > 0)
            rank++;
        drawn += touch(trace, ranked[rank]);
    }
}

static void set_launch(struct trace *trace, uint32_t tenant, const uint32_t *set, uint32_t count) {
    begin_launch(trace, tenant);
    for (uint32_t drawn = 0; drawn < TOUCHED;)
        drawn += touch(trace, set[below(&trace->random, count)]);
}

/* Zipf's law; each `drift` launches (0: never) two blocks change their ranks. */
static void zipf(struct trace *trace, uint32_t drift, uint32_t launches) {
    uint32_t ranked[BLOCKS];
    for (uint32_t i = 0; i < BLOCKS; i++)
        ranked[i] = i;
    add_blocks(trace, 0, 0, BLOCKS, false);
    for (uint32_t i = 1; i <= launches; i++) {
        zipf_launch(trace, 0, ranked, BLOCKS);
        if (drift == 0 || i % drift)
            continue;
        const uint32_t one = below(&trace->random, BLOCKS), other = below(&trace->random, BLOCKS), kept = ranked[one];
        ranked[one] = ranked[other];
        ranked[other] = kept;
        if (i % 2000 == 0)
            put(trace, PHASE, 0, 0);
    }
}

/* Phases with a working set of `size` blocks; the next one has `others` blocks that this one has not. */
static void phases(struct trace *trace, uint32_t size, uint32_t others, uint32_t launches) {
    uint32_t order[BLOCKS];
    for (uint32_t i = 0; i < BLOCKS; i++)
        order[i] = i;
    add_blocks(trace, 0, 0, BLOCKS, false);
    shuffle(&trace->random, order, BLOCKS);
    for (uint32_t i = 0; i < launches; i++) {
        if (i && i % (PHASE_LENGTH * 2 * size) == 0) {
            put(trace, PHASE, 0, 0);
            if (others < size) {
                shuffle(&trace->random, order, size);
                shuffle(&trace->random, order + size, BLOCKS - size);
                for (uint32_t k = 0; k < others; k++) {
                    const uint32_t kept = order[k];
                    order[k] = order[size + k];
                    order[size + k] = kept;
                }
            } else {
                shuffle(&trace->random, order, BLOCKS);
            }
        }
        set_launch(trace, 0, order, size);
    }
}

/* Sets of 100 blocks that stay for 10 to 60 launches: hardly time for a move to pay. */
static void flicker(struct trace *trace, uint32_t launches) {
    uint32_t order[BLOCKS];
    for (uint32_t i = 0; i < BLOCKS; i++)
        order[i] = i;
    add_blocks(trace, 0, 0, BLOCKS, false);
    while (trace->launches < launches) {
        shuffle(&trace->random, order, BLOCKS);
        for (uint32_t left = 10 + below(&trace->random, 50); left && trace->launches < launches; left--)
            set_launch(trace, 0, order, 100);
    }
}

/* 24 layers with two blocks each of parameters, activations and gradients, four of optimizer state; 16 for the
 * embedding and its state. */
enum {
    LAYERS = 24,
    PARAMETERS = 0,
    ACTIVATIONS = 48,
    GRADIENTS = 96,
    EMBEDDING = 144,
    STATE = 152,
    EMBEDDING_STATE = 248
};

static void forward(struct trace *trace, uint32_t kernels) {
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        begin_launch(trace, 0);
        touch_all(trace, PARAMETERS + 2 * layer, 2);
        touch_all(trace, ACTIVATIONS + 2 * layer, 2);
        touch_all(trace, layer ? ACTIVATIONS + 2 * (layer - 1) : EMBEDDING, 2);
        repeat(trace, kernels - 1);
    }
}

/* Each layer launches `kernels` kernels each way. */
static void training(struct trace *trace, bool in_order, bool validation, uint32_t kernels, uint32_t launches) {
    add_blocks(trace, 0, 0, BLOCKS, in_order);
    for (uint32_t step = 1; trace->launches < launches; step++) {
        forward(trace, kernels);
        for (uint32_t layer = LAYERS; layer-- > 0;) {
            begin_launch(trace, 0);
            touch_all(trace, PARAMETERS + 2 * layer, 2);
            touch_all(trace, ACTIVATIONS + 2 * layer, 2);
            touch_all(trace, GRADIENTS + 2 * layer, 2);
            touch_all(trace, layer ? ACTIVATIONS + 2 * (layer - 1) : EMBEDDING, 2);
            repeat(trace, kernels - 1);
        }
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            begin_launch(trace, 0);
            touch_all(trace, PARAMETERS + 2 * layer, 2);
            touch_all(trace, GRADIENTS + 2 * layer, 2);
            touch_all(trace, STATE + 4 * layer, 4);
        }
        begin_launch(trace, 0);
        touch_all(trace, EMBEDDING, 8);
        begin_launch(trace, 0);
        touch_all(trace, EMBEDDING_STATE, 8);
        for (uint32_t pass = 0; validation && step % 25 == 0 && pass < 10; pass++)
            forward(trace, kernels);
    }
}

/* 16 layers with six blocks of weights each; the rest is KV cache of up to 12 sessions, which answer, rest, and end. */
enum { STAGES = 16, WEIGHTS = 96, SESSIONS = 12, LARGEST = 24 };

struct session {
    uint32_t blocks[LARGEST], count;
    bool resting;
};

static void session_step(struct trace *trace, struct session *session, uint32_t *unused, uint32_t *left) {
    if (session->resting) {
        if (below(&trace->random, 400) == 0) {
            while (session->count) {
                const uint32_t block = session->blocks[--session->count];
                put(trace, REMOVE, 0, block);
                unused[(*left)++] = block;
            }
            session->resting = false;
        } else if (below(&trace->random, 200) == 0) {
            session->resting = false;
        }
        return;
    }
    if (*left && session->count < LARGEST && (session->count == 0 || below(&trace->random, 16) == 0)) {
        const uint32_t block = unused[--*left];
        put(trace, ADD, 0, block);
        session->blocks[session->count++] = block;
    }
    session->resting = below(&trace->random, 100) == 0;
}

static void inference(struct trace *trace, uint32_t launches) {
    struct session sessions[SESSIONS] = {0};
    uint32_t unused[BLOCKS], left = 0;
    add_blocks(trace, 0, 0, WEIGHTS, true);
    for (uint32_t block = BLOCKS; block-- > WEIGHTS;)
        unused[left++] = block;
    for (uint32_t token = 0; trace->launches < launches; token++) {
        for (uint32_t s = 0; s < SESSIONS; s++)
            session_step(trace, &sessions[s], unused, &left);
        if (token % 64 == 0)
            put(trace, PHASE, 0, 0);
        for (uint32_t stage = 0; stage < STAGES; stage++) {
            begin_launch(trace, 0);
            touch_all(trace, stage * (WEIGHTS / STAGES), WEIGHTS / STAGES);
            for (uint32_t s = 0, at = 0; s < SESSIONS; s++)
                for (uint32_t k = 0; !sessions[s].resting && k < sessions[s].count; k++, at++)
                    if (at % STAGES == stage)
                        touch(trace, sessions[s].blocks[k]);
        }
    }
}

/* One tenant (Zipf) has the card to itself until another one (phases with a set of 48) comes, from when each has its
 * half; the other one goes. */
static void tenants(struct trace *trace, uint32_t launches, uint32_t capacity) {
    enum { EACH = BLOCKS / 2, SET = 48 };
    uint32_t ranked[EACH], order[EACH];
    for (uint32_t i = 0; i < EACH; i++) {
        ranked[i] = i;
        order[i] = EACH + i;
    }
    put(trace, CAPACITY, 1, 0);
    add_blocks(trace, 0, 0, EACH, false);
    for (uint32_t i = 0, second = 0; trace->launches < launches; i++) {
        if (i == launches / 5) {
            put(trace, CAPACITY, 0, capacity / 2);
            put(trace, CAPACITY, 1, capacity / 2);
            put(trace, PHASE, 0, 0);
            add_blocks(trace, 1, EACH, BLOCKS, false);
        }
        zipf_launch(trace, 0, ranked, EACH);
        if (i < launches / 5)
            continue;
        if (trace->launches * 5 / 4 < launches) {
            if (second++ % (PHASE_LENGTH * 2 * SET) == 0) {
                shuffle(&trace->random, order, EACH);
                put(trace, PHASE, 1, 0);
            }
            set_launch(trace, 1, order, SET);
        } else if (second) {
            for (uint32_t block = EACH; block < BLOCKS; block++)
                put(trace, REMOVE, 1, block);
            put(trace, CAPACITY, 0, capacity);
            put(trace, PHASE, 0, 0);
            second = 0;
        }
    }
}

int make_trace(struct trace *trace, const char *name, uint32_t launches, uint32_t capacity, uint64_t seed) {
    const uint32_t most = launches + 4096; /* programs end with a whole step */
    *trace = (struct trace){.random = seed * 0x9e3779b97f4a7c15u + 1};
    trace->ops = malloc((size_t)most * 4 * sizeof *trace->ops);
    trace->touched = malloc((size_t)most * MOST_TOUCHED * sizeof *trace->touched);
    if (!trace->ops || !trace->touched)
        abort();
    for (uint32_t i = 0; i < 16; i++)
        next(&trace->random);
    put(trace, CAPACITY, 0, capacity);
    if (!strcmp(name, "zipf")) {
        zipf(trace, 0, launches);
    } else if (!strcmp(name, "drift")) {
        zipf(trace, 100, launches);
    } else if (!strcmp(name, "random")) {
        uint32_t all[BLOCKS];
        for (uint32_t i = 0; i < BLOCKS; i++)
            all[i] = i;
        add_blocks(trace, 0, 0, BLOCKS, false);
        while (trace->launches < launches)
            set_launch(trace, 0, all, BLOCKS);
    } else if (!strcmp(name, "cyclic")) {
        add_blocks(trace, 0, 0, BLOCKS, false);
        while (trace->launches < launches) {
            begin_launch(trace, 0);
            touch_all(trace, (trace->launches - 1) * TOUCHED % BLOCKS, TOUCHED);
        }
    } else if (!strncmp(name, "phases-", 7)) {
        phases(trace, (uint32_t)atoi(name + 7), BLOCKS, launches);
    } else if (!strncmp(name, "overlap-", 8)) {
        phases(trace, (uint32_t)atoi(name + 8), (uint32_t)atoi(name + 8) / 2, launches);
    } else if (!strcmp(name, "flicker")) {
        flicker(trace, launches);
    } else if (!strncmp(name, "training", 8)) {
        const bool in_order = strcmp(name, "training-random") != 0, validation = !strcmp(name, "training-validation");
        training(trace, in_order, validation, strcmp(name, "training-bursts") ? 1 : 20, launches);
    } else if (!strcmp(name, "inference")) {
        inference(trace, launches);
    } else if (!strcmp(name, "tenants")) {
        tenants(trace, launches, capacity);
    } else {
        return -1;
    }
    return 0;
}
