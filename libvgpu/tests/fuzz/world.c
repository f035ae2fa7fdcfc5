/* Makes the region and the simulated cards of the fuzz target, and compares them. */
#define _GNU_SOURCE
#include "world.h"

#include <ftw.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/state.h"
#include "vgpu/agent.h"

#define CARDS "H100x3"

uint8_t *world_features;
static char folder[100], region_folder[120], cards_folder[120];
static pid_t owner;
/* FUZZ_TIER=static, movable: half of each limit is the guarantee, the rest lies in host memory */
static enum { ALL_ON_CARD, STATIC, MOVABLE } tier;
static bool tracing; /* FUZZ_TRACE: every operation, and what the cards hold after it */
static vgpu_region *region;
static struct sim sim; /* only to set back peaks */
static struct vgpu_limits limits;
static struct vgpu_usage usage;
static uint64_t ceiling[LIMITED]; /* the largest limit that was in force since world_begin */

void world_violation(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("VIOLATION: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    abort();
}

void world_feature(const struct operation *op, unsigned meaning, unsigned result) {
    static __thread unsigned last __attribute__((tls_model("initial-exec")));
    unsigned now = meaning << 4 | (result * 2654435761u >> 28);
    if (tracing) {
        struct vgpu_sim_card truth[DEVICES];
        vgpu_sim_cards(cards_folder, truth, DEVICES);
        vgpu_usage_read(region, &usage);
        fprintf(stderr, "%d lane %d: %02u %02x %02x %02x -> %3u ", (int)getpid(), op->code >> 6, meaning, op->a, op->b,
                op->c, result);
        for (unsigned card = 0; card < LIMITED; card++)
            fprintf(stderr, " | ledger %" PRIu64 " truth %" PRIu64, usage.cards[card].used, truth[card].used);
        fputc('\n', stderr);
    }
    if (world_features)
        __atomic_store_n(&world_features[(last * 1031u + now) % WORLD_FEATURES], 1, __ATOMIC_RELAXED);
    last = now;
}

static void must(int error, const char *what) {
    if (error < 0) {
        fprintf(stderr, "fuzz: %s: %s\n", what, strerror(-error));
        _exit(2);
    }
}

/* What a card may hold of a limit. */
static uint64_t guarantee_of(uint64_t memory) {
    return tier == ALL_ON_CARD ? memory : memory / 2;
}

static void choose_tier(void) {
    const char *wanted = getenv("FUZZ_TIER");
    tier = !wanted || !*wanted ? ALL_ON_CARD : strcmp(wanted, "movable") == 0 ? MOVABLE : STATIC;
    if (tier == ALL_ON_CARD)
        return;
    limits.flags = VGPU_OVERSUBSCRIBE | (tier == MOVABLE ? VGPU_MOVABLE : 0);
    limits.host_memory = VGPU_NO_LIMIT;
}

void world_make(void) {
    struct vgpu_sim_card cards[DEVICES];
    const char *base = getenv("TMPDIR");
    owner = getpid();
    tracing = getenv("FUZZ_TRACE") != NULL;
    snprintf(folder, sizeof folder, "%s/vgpu-fuzz-XXXXXX", base ? base : "/tmp");
    must(mkdtemp(folder) ? 0 : -1, "no folder");
    snprintf(region_folder, sizeof region_folder, "%s/region", folder);
    snprintf(cards_folder, sizeof cards_folder, "%s/cards", folder);
    must(vgpu_sim_create(cards_folder, CARDS), "cards");
    must(vgpu_sim_cards(cards_folder, cards, DEVICES), "cards");
    must(sim_open(&sim, cards_folder), "cards");
    limits.card_count = LIMITED;
    choose_tier();
    for (unsigned i = 0; i < LIMITED; i++) {
        memcpy(limits.cards[i].uuid, cards[i].uuid, sizeof limits.cards[i].uuid);
        limits.cards[i].context_bytes = cards[i].context_bytes;
        limits.cards[i].memory = UINT64_C(1) << 30;
        limits.cards[i].guarantee = guarantee_of(limits.cards[i].memory);
    }
    must(mkdir(region_folder, 0700) ? -1 : 0, "folder of the region");
    must(vgpu_region_create(region_folder, &limits), "region");
    must(vgpu_region_open(region_folder, 1, &region), "region");
    setenv("VGPU_DIR", region_folder, 1);
    setenv("VGPU_SIM_DIR", cards_folder, 1);
    setenv("VGPU_SIMULATE", CARDS, 1);
}

static int remove_entry(const char *path, const struct stat *status, int type, struct FTW *at) {
    (void)status, (void)type, (void)at;
    return remove(path);
}

void world_remove(void) {
    if (folder[0] && getpid() == owner) /* not a fork that leaves by exit */
        nftw(folder, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
}

uint64_t world_limit(unsigned card) {
    return limits.cards[card].memory;
}

uint64_t world_left(unsigned card) {
    struct vgpu_sim_card cards[DEVICES];
    must(vgpu_sim_cards(cards_folder, cards, DEVICES), "cards");
    return cards[card].used < limits.cards[card].memory ? limits.cards[card].memory - cards[card].used : 0;
}

void world_set_limit(unsigned card, uint64_t bytes) {
    if (getpid() != owner)
        return; /* one writer, as in life */
    limits.cards[card].memory = bytes;
    limits.cards[card].guarantee = guarantee_of(bytes);
    if (bytes > ceiling[card])
        ceiling[card] = bytes;
    must(vgpu_limits_write(region, &limits), "new limits");
}

void world_begin(unsigned choice) {
    static const uint64_t sizes[] = {1024 * MIB, 512 * MIB,  700 * MIB + 1, 300 * MIB,
                                     0,          4096 * MIB, 20000 * MIB,   64 * MIB};
    for (unsigned i = 0; i < LIMITED; i++) {
        ceiling[i] = 0;
        limits.cards[i].cores = choice & 128 ? 50 : 0;
        limits.cards[i].cores_ceiling = limits.cards[i].cores;
        limits.cards[i].memory = sizes[(choice >> 4 * i) % (sizeof sizes / sizeof *sizes)];
        limits.cards[i].guarantee = guarantee_of(limits.cards[i].memory);
        ceiling[i] = limits.cards[i].memory;
        atomic_store(&sim.state->cards[i].peak, 0);
    }
    must(vgpu_limits_write(region, &limits), "new limits");
}

/* What is charged for what is held: more where another process imported it, and by the reserve of graphs. */
static bool agrees(uint64_t charged, uint64_t held, uint64_t beyond) {
    return charged >= held && (imports_crossed() || charged - held <= beyond);
}

static void compare_card(const char *moment, const struct vgpu_sim_card *truth, unsigned card, uint64_t slack,
                         uint64_t beyond) {
    const struct vgpu_card_usage *ledger = &usage.cards[card];
    const uint64_t on_card = tier == ALL_ON_CARD ? ledger->used : ledger->resident;
    uint64_t kinds = 0, processes = 0;
    for (unsigned kind = 0; kind < VGPU_KINDS; kind++)
        kinds += ledger->by_kind[kind];
    for (unsigned i = 0; i < usage.process_count; i++)
        processes += usage.processes[i].used[card];
    if (!agrees(on_card, truth->used, beyond))
        world_violation("%s: card %u: the ledger says %" PRIu64 ", the card holds %" PRIu64 " (difference %" PRId64
                        ", of graphs %" PRIu64 ")",
                        moment, card, on_card, truth->used, (int64_t)(on_card - truth->used), beyond);
    if (on_card > guarantee_of(ceiling[card]))
        world_violation("%s: card %u: %" PRIu64 " on it, the guarantee never was above %" PRIu64, moment, card, on_card,
                        guarantee_of(ceiling[card]));
    if (ledger->used != processes)
        world_violation("%s: card %u: %" PRIu64 " used, the processes hold %" PRIu64, moment, card, ledger->used,
                        processes);
    if (ledger->used != kinds)
        world_violation("%s: card %u: %" PRIu64 " used, all kinds together %" PRIu64, moment, card, ledger->used,
                        kinds);
    if (ledger->used > ceiling[card])
        world_violation("%s: card %u: %" PRIu64 " used, the limit never was above %" PRIu64, moment, card, ledger->used,
                        ceiling[card]);
    if (truth->peak > guarantee_of(ceiling[card]) + slack)
        world_violation("%s: card %u: held %" PRIu64 " at one moment, the limit never was above %" PRIu64, moment, card,
                        truth->peak, guarantee_of(ceiling[card]));
}

static void compare_processes(const char *moment, const uint64_t *beyond) {
    static struct vgpu_sim_process truth[1024];
    int count = vgpu_sim_processes(cards_folder, truth, 1024);
    must(count, "processes");
    for (int i = 0; i < count; i++) {
        if (!truth[i].alive)
            continue;
        for (unsigned card = 0; card < LIMITED; card++) {
            uint64_t charged = 0;
            for (unsigned k = 0; k < usage.process_count; k++)
                charged += usage.processes[k].pid != truth[i].pid ? 0
                           : tier == ALL_ON_CARD                  ? usage.processes[k].used[card]
                                                                  : usage.processes[k].resident[card];
            if (!agrees(charged, truth[i].used[card], truth[i].pid == owner ? beyond[card] : 0))
                world_violation("%s: card %u: process %d is charged %" PRIu64 " and holds %" PRIu64, moment, card,
                                truth[i].pid, charged, truth[i].used[card]);
        }
    }
}

void world_compare(const char *moment, uint64_t slack, const uint64_t *graphs) {
    static const uint64_t none[LIMITED];
    const uint64_t *beyond = graphs ? graphs : none;
    struct vgpu_sim_card truth[DEVICES];
    must(vgpu_sim_cards(cards_folder, truth, DEVICES), "cards");
    must(vgpu_usage_read(region, &usage), "usage");
    for (unsigned card = 0; card < LIMITED; card++)
        compare_card(moment, &truth[card], card, slack, beyond[card]);
    if (truth[LIMITED].used)
        world_violation("%s: %" PRIu64 " bytes on a card that the limits do not list", moment, truth[LIMITED].used);
    if (usage.saturated)
        world_violation("%s: %u releases of more than was charged", moment, usage.saturated);
    compare_processes(moment, beyond);
}

void world_compare_empty(const char *moment, uint64_t slack) {
    must(vgpu_region_reap(region), "reaping");
    world_compare(moment, slack, NULL);
    for (unsigned card = 0; card < LIMITED; card++)
        if (usage.cards[card].used || usage.cards[card].resident || usage.cards[card].host_used)
            world_violation(
                "%s: card %u: %" PRIu64 " bytes are left, %" PRIu64 " on the card, %" PRIu64 " in host memory", moment,
                card, usage.cards[card].used, usage.cards[card].resident, usage.cards[card].host_used);
}
