/* The times of everything but kernels: VGPU_SIM_TIME, and VGPU_SIM_LAUNCH_QUEUE_MS. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/state.h"

#define MAX_NS 10000000000ull
#define MAX_KERNELS 32u
#define MAX_MB 10000000ull

/* Parses "2ms" and the like; false: invalid, or above MAX_NS. */
static bool time_of(const char *text, uint64_t *ns) {
    static const struct {
        const char *name;
        uint64_t ns;
    } units[] = {{"ns", 1}, {"us", 1000}, {"ms", 1000000}, {"s", 1000000000}};
    char *end;
    uint64_t number = *text >= '0' && *text <= '9' ? strtoull(text, &end, 10) : SIM_NEVER;
    for (unsigned i = 0; i < sizeof units / sizeof *units && number <= MAX_NS; i++)
        if (strcmp(end, units[i].name) == 0 && number * units[i].ns <= MAX_NS) {
            *ns = number * units[i].ns;
            return true;
        }
    return false;
}

/* Parses "25GB/s" or "12500MB/s" into bytes per microsecond. */
static bool speed_of(const char *text, uint64_t *speed) {
    char *end;
    uint64_t number = *text >= '1' && *text <= '9' ? strtoull(text, &end, 10) : SIM_NEVER;
    if (number > MAX_MB)
        return false;
    *speed = strcmp(end, "GB/s") == 0 ? number * 1000 : number;
    return strcmp(end, "GB/s") == 0 || strcmp(end, "MB/s") == 0;
}

/* Reads which unit does the fills, or the copies within a card: "engine" or "sms". "profile" leaves *timed and *sms
 * unchanged. */
static bool runs_on(const char *value, bool *timed, bool *sms) {
    bool engine = strcmp(value, "engine") == 0, multiprocessors = strcmp(value, "sms") == 0;
    *timed |= engine || multiprocessors;
    *sms = multiprocessors || (*sms && !engine);
    return engine || multiprocessors || strcmp(value, "profile") == 0;
}

/* Takes one KEY=VALUE; the cards' own times are stored together, after everything has been checked. */
static bool take(char *word, struct sim_timing *timing, uint64_t *slice, uint64_t *change) {
    char *value = strchr(word, '='), *end;
    if (!value)
        return false;
    *value++ = 0;
    if (strcmp(word, "kernels") == 0) {
        unsigned long kernels = strtoul(value, &end, 10);
        timing->kernels = (uint32_t)kernels;
        return *value >= '1' && *value <= '9' && !*end && kernels <= MAX_KERNELS;
    }
    if (strcmp(word, "bus") == 0) {
        timing->copies = strcmp(value, "off") != 0;
        return !timing->copies || strcmp(value, "profile") == 0 || speed_of(value, &timing->bus);
    }
    if (strcmp(word, "managed") == 0) {
        timing->migrate = strcmp(value, "migrate") == 0;
        return timing->migrate || strcmp(value, "resident") == 0;
    }
    if (strcmp(word, "memory") == 0)
        return speed_of(value, &timing->memory);
    if (strcmp(word, "fills") == 0)
        return runs_on(value, &timing->fills, &timing->fills_take_sms);
    if (strcmp(word, "within") == 0)
        return runs_on(value, &timing->within, &timing->copies_take_sms);
    if (strcmp(word, "event") == 0 && strcmp(value, "profile") == 0)
        return true;
    if (strcmp(word, "loads") == 0) {
        timing->load_on_get = strcmp(value, "get") == 0;
        return timing->load_on_get || strcmp(value, "use") == 0;
    }
    const struct {
        const char *name;
        uint64_t *ns;
    } times[] = {{"load", &timing->load_ns},
                 {"event", &timing->event_ns},
                 {"remap", &timing->remap_ns},
                 {"fault", &timing->fault_ns},
                 {"slice", slice},
                 {"switch", change},
                 {"launch", &timing->launch_ns},
                 {"record", &timing->record_ns},
                 {"query", &timing->query_ns}};
    for (unsigned i = 0; i < sizeof times / sizeof *times; i++)
        if (strcmp(word, times[i].name) == 0)
            return time_of(value, times[i].ns) && (times[i].ns != slice || *slice >= 1000);
    return false;
}

/* 0 or -EINVAL. */
static int read_queue(struct sim_timing *timing) {
    const char *given = secure_getenv("VGPU_SIM_LAUNCH_QUEUE_MS");
    char *end;
    timing->queued_ns = SIM_NEVER;
    if (!given || !*given)
        return 0;
    uint64_t number = *given >= '0' && *given <= '9' ? strtoull(given, &end, 10) : SIM_NEVER;
    if (number > MAX_NS / 1000000 || *end) {
        fprintf(stderr,
                "vgpu simulator: VGPU_SIM_LAUNCH_QUEUE_MS=%s: not a whole number of milliseconds from 0 to %llu\n",
                given, MAX_NS / 1000000);
        return -EINVAL;
    }
    timing->queued_ns = number * 1000000;
    return 0;
}

int sim_timing_read(struct sim *sim) {
    const char *given = secure_getenv("VGPU_SIM_TIME");
    char text[256], *rest = text, *word;
    uint64_t slice = atomic_load(&sim->state->slice_ns), change = atomic_load(&sim->state->switch_ns);
    sim->timing = (struct sim_timing){.launch_ns = 3000,
                                      .record_ns = 1000,
                                      .query_ns = 500,
                                      .fault_ns = 30000,
                                      .load_ns = 100000,
                                      .event_ns = sim->profile->event_ns,
                                      .memory = sim->profile->memory_speed,
                                      .fills_take_sms = sim->profile->fills_take_sms,
                                      .copies_take_sms = sim->profile->copies_take_sms,
                                      .bus = sim->profile->bus_speed,
                                      .kernels = 1};
    if (read_queue(&sim->timing))
        return -EINVAL;
    if (!given || !*given)
        return 0;
    bool right = snprintf(text, sizeof text, "%s", given) < (int)sizeof text;
    while (right && (word = strsep(&rest, ",")) != NULL)
        right = take(word, &sim->timing, &slice, &change);
    if (!right) {
        fprintf(stderr,
                "vgpu simulator: VGPU_SIM_TIME=%s: not a list of slice=2ms (1us or more), switch=10us, launch=3us, "
                "record=1us, query=500ns, "
                "kernels=1 (to %u), remap=0ns, fault=30us, event=profile (2500ns), load=100us, loads=use (get), "
                "fills=profile (sms, engine), "
                "within=profile (sms, engine), memory=320GB/s, bus=off (profile, 25GB/s, 12500MB/s), managed=resident "
                "(migrate), "
                "with ns, us, ms or s up to 10s\n",
                given, MAX_KERNELS);
        return -EINVAL;
    }
    sim->timing.fills |= sim->timing.copies;
    sim->timing.within |= sim->timing.copies;
    atomic_store(&sim->state->slice_ns, slice);
    atomic_store(&sim->state->switch_ns, change);
    return 0;
}
