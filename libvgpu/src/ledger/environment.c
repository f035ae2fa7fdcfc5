/* Reads limits from environment variables. */
#define _GNU_SOURCE
#include "ledger/environment.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* An empty value counts as not set, as in a shell. */
static const char *variable(const char *name) {
    const char *value = secure_getenv(name);
    return value && *value ? value : NULL;
}

/* Accepts only digits: strtoull would also accept blanks, signs and 0x. Returns the rest of the text; NULL: no digits,
 * or too many. */
static const char *parse_number(const char *text, uint64_t *value) {
    const char *digit = text;
    for (*value = 0; *digit >= '0' && *digit <= '9'; digit++)
        if (__builtin_mul_overflow(*value, UINT64_C(10), value) ||
            __builtin_add_overflow(*value, (uint64_t)(*digit - '0'), value))
            return NULL;
    return digit == text ? NULL : digit;
}

bool vgpu_parse_size(const char *text, uint64_t *bytes) {
    const char *unit = parse_number(text, bytes);
    if (!unit || (*unit && unit[1]))
        return false;
    unsigned shift;
    switch (*unit) {
    case 0: shift = 0; break;
    case 'k':
    case 'K': shift = 10; break;
    case 'm':
    case 'M': shift = 20; break;
    case 'g':
    case 'G': shift = 30; break;
    default: return false;
    }
    if (*bytes > UINT64_MAX >> shift)
        return false;
    *bytes <<= shift;
    return true;
}

static bool parse_share(const char *text, uint64_t *percent) {
    const char *end = parse_number(text, percent);
    return end && *end == 0 && *percent <= 100;
}

struct quantity {
    const char *name;
    const char *allowed;
    bool (*parse)(const char *text, uint64_t *value);
};

static const struct quantity MEMORY = {"CUDA_DEVICE_MEMORY_LIMIT",
                                       "bytes or a whole number with k, m or g, such as 3000m", vgpu_parse_size};
static const struct quantity CORES = {"CUDA_DEVICE_SM_LIMIT", "a whole percentage from 0 (no limit) to 100",
                                      parse_share};

/* The value for one card: NAME_<card>, else NAME. 1: found, 0: not set, -EINVAL with a note. */
static int quantity_for(const struct quantity *quantity, unsigned card, uint64_t *value, char *note, size_t note_size) {
    char name[64];
    snprintf(name, sizeof name, "%s_%u", quantity->name, card);
    const char *text = variable(name);
    if (!text) {
        snprintf(name, sizeof name, "%s", quantity->name);
        text = variable(name);
    }
    if (!text)
        return 0;
    if (quantity->parse(text, value))
        return 1;
    snprintf(note, note_size, "%s=%.64s: not a limit; allowed: %s", name, text, quantity->allowed);
    return -EINVAL;
}

/* 1: on, 0: off or not set, -EINVAL with a note. */
static int truth(const char *name, char *note, size_t note_size) {
    const char *value = variable(name);
    if (!value || strcasecmp(value, "false") == 0 || strcmp(value, "0") == 0)
        return 0;
    if (strcasecmp(value, "true") == 0 || strcmp(value, "1") == 0)
        return 1;
    snprintf(note, note_size, "%s=%.64s: neither on nor off; allowed: true or 1, false or 0", name, value);
    return -EINVAL;
}

int vgpu_environment_kills(char *note, size_t note_size) {
    return truth("ACTIVE_OOM_KILLER", note, note_size);
}

int vgpu_environment_limits(struct vgpu_limits *out, char *note, size_t note_size) {
    bool limited = false;
    memset(out, 0, sizeof *out);
    out->card_count = VGPU_MAX_CARDS;
    for (unsigned card = 0; card < VGPU_MAX_CARDS; card++) {
        uint64_t memory = VGPU_NO_LIMIT, cores = 0;
        const int has_memory = quantity_for(&MEMORY, card, &memory, note, note_size);
        const int has_cores = has_memory < 0 ? 0 : quantity_for(&CORES, card, &cores, note, note_size);
        if (has_memory < 0 || has_cores < 0)
            return -EINVAL;
        /* a whole card gives 100 without a limit */
        out->cards[card] = (struct vgpu_card_limit){.memory = memory,
                                                    .guarantee = memory,
                                                    .cores = (uint32_t)(cores % 100),
                                                    .cores_ceiling = (uint32_t)(cores % 100)};
        limited |= memory != VGPU_NO_LIMIT || cores % 100 != 0;
    }
    const char *policy = variable("GPU_CORE_UTILIZATION_POLICY");
    const char *priority = variable("CUDA_TASK_PRIORITY");
    out->core_policy = policy && strcasecmp(policy, "disable") == 0 ? VGPU_CORES_NONE : VGPU_CORES_FIXED;
    out->priority = priority && strcmp(priority, "1") == 0;
    const int spills = limited ? truth("CUDA_OVERSUBSCRIBE", note, note_size) : 0;
    const int kills = limited && spills >= 0 ? vgpu_environment_kills(note, note_size) : 0;
    if (spills < 0 || kills < 0)
        return -EINVAL;
    /* Only the user has set these limits, so the user may also switch them off. */
    out->flags = VGPU_ALLOW_DISABLE_CONTROL | (spills ? VGPU_OVERSUBSCRIBE : 0) | (kills ? VGPU_KILL_ON_OOM : 0);
    out->host_memory = out->flags & VGPU_OVERSUBSCRIBE ? VGPU_NO_LIMIT : 0;
    return limited;
}
