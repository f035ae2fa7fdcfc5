/* player TRACE PERCENT LAUNCHES SEED EVERY BUDGET: plays one trace with every way of placing blocks, where the blocks
 * are PERCENT of what fits on the card, and prints a JSON object. player sizes BLOCKS LARGEST LAUNCHES SEED: the same
 * for blocks of mixed sizes, in fewer ways. player cost BLOCKS: what the policy takes, in nanoseconds. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sizes.h"
#include "ways.h"

static const char *const way_names[WAYS] = {"never", "managed", "hindsight", "policy"};

static void print(const struct trace *trace, struct rules rules) {
    struct result result;
    printf("{\"launches\": %u, \"touches\": %u, \"ways\": {", trace->launches, trace->touches);
    for (unsigned way = 0; way < WAYS; way++) {
        play(trace, (enum way)way, rules, &result);
        printf("%s\"%s\": {\"bus\": %llu, \"moves\": %llu, \"points\": [", way ? ", " : "", way_names[way],
               (unsigned long long)result.bus, (unsigned long long)result.moves);
        for (unsigned i = 0; i < POINTS; i++)
            printf("%s%llu", i ? ", " : "", (unsigned long long)result.points[i]);
        printf("]}");
    }
    printf("}}\n");
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Best of some rounds, with two thirds of the blocks on the device and eight random ones per launch. A plan is measured
 * that looks at the blocks. */
static void cost(uint32_t count) {
    enum { ROUNDS = 20, LAUNCHES = 500 };
    struct vgpu_tier_block *blocks = calloc(count, sizeof *blocks);
    static uint32_t touched[LAUNCHES][TOUCHED];
    struct vgpu_tier tier;
    struct vgpu_tier_plan plan;
    double best[2] = {1, 1};
    if (!blocks)
        abort();
    vgpu_tier_begin(&tier, blocks, count);
    for (uint32_t i = 0; i < count; i++)
        vgpu_tier_add(&tier, 1, i < count / 3 * 2, false);
    srand(1);
    for (unsigned round = 0; round < ROUNDS; round++) {
        for (unsigned i = 0; i < LAUNCHES; i++)
            for (unsigned k = 0; k < TOUCHED; k++)
                touched[i][k] = (uint32_t)rand() % count;
        double begun = seconds();
        for (unsigned i = 0; i < LAUNCHES; i++)
            vgpu_tier_launch(&tier, touched[i], TOUCHED);
        double took = (seconds() - begun) / LAUNCHES;
        best[0] = took < best[0] ? took : best[0];
        begun = seconds();
        for (unsigned i = 0; i < LAUNCHES; i++) {
            tier.look_again = 0;
            vgpu_tier_plan(&tier, 0, UINT64_MAX, &plan);
        }
        took = (seconds() - begun) / LAUNCHES;
        best[1] = took < best[1] ? took : best[1];
    }
    printf("{\"blocks\": %u, \"launch_ns\": %.1f, \"plan_ns\": %.1f}\n", count, best[0] * 1e9, best[1] * 1e9);
    free(blocks);
}

static uint32_t number(const char *text, const char *what, uint32_t least, uint32_t most) {
    char *end;
    const unsigned long value = strtoul(text, &end, 10);
    if (*end || end == text || value < least || value > most) {
        fprintf(stderr, "player: %s is %s; allowed is a number from %u to %u\n", what, text, least, most);
        exit(2);
    }
    return (uint32_t)value;
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "cost")) {
        cost(number(argv[2], "BLOCKS", TOUCHED, 1u << 20));
        return 0;
    }
    if (argc == 6 && !strcmp(argv[1], "sizes")) {
        const uint32_t count = number(argv[2], "BLOCKS", 16, 1u << 20),
                       largest = number(argv[3], "LARGEST", 1, 1u << 20);
        const struct bus_times times = play_sizes(count, largest, number(argv[4], "LAUNCHES", 100, 10000000),
                                                  number(argv[5], "SEED", 1, UINT32_MAX));
        printf("{\"policy\": %llu, \"hindsight\": %llu, \"never\": %llu}\n", (unsigned long long)times.policy,
               (unsigned long long)times.hindsight, (unsigned long long)times.never);
        return 0;
    }
    if (argc != 7) {
        fprintf(stderr, "usage: player TRACE PERCENT LAUNCHES SEED EVERY BUDGET | player sizes BLOCKS LARGEST LAUNCHES "
                        "SEED | player cost BLOCKS\n");
        fprintf(stderr, "traces:");
        for (unsigned i = 0; trace_names[i]; i++)
            fprintf(stderr, " %s", trace_names[i]);
        fprintf(stderr, "\n");
        return 2;
    }
    struct trace trace;
    const uint32_t percent = number(argv[2], "PERCENT", 100, 1000);
    const uint32_t launches = number(argv[3], "LAUNCHES", 100, 10000000);
    const struct rules rules = {number(argv[5], "EVERY", 1, UINT32_MAX), number(argv[6], "BUDGET", 2, UINT32_MAX)};
    if (make_trace(&trace, argv[1], launches, BLOCKS * 100 / percent, number(argv[4], "SEED", 1, UINT32_MAX))) {
        fprintf(stderr, "player: no trace %s\n", argv[1]);
        return 2;
    }
    print(&trace, rules);
    free(trace.ops);
    free(trace.touched);
    return 0;
}
