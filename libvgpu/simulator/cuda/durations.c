/* How long a kernel occupies its card. The kernel computes nothing; words anywhere in its name say the time:
 * - ..._2ms, ..._100us, ..._500ns: one launch takes that long
 * - ..._10us_10ms: several times, which the launches use in turn
 * - ..._perblock_200ns: times the number of blocks
 * - ..._100us_sigma20: log-normal with that mean and a sigma of 20 %
 * - ..._arg_us: as many microseconds (ns, ms) as the first parameter, an integer, says
 * - ..._meet2_1ms: spins until the launch of the same number and name has started on 2 cards, then runs for 1 ms
 * - any other name: 10 us
 *
 * Random values come from VGPU_SIM_SEED, the name, and the number of the launch in this process, so that runs
 * repeat. */
#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/driver.h"

#define DEFAULT_NS 10000u
#define QUANTILES 1024u
#define FACTOR_ONE (1u << 20)
#define MAX_SIGMA_PERCENT 100u

static uint64_t unit_of(const char *text, bool mangled) {
    static const struct {
        const char *name;
        uint64_t ns;
    } units[] = {{"ns", 1}, {"us", 1000}, {"ms", 1000000}};
    for (int i = 0; i < 3; i++)
        if (strncmp(text, units[i].name, 2) == 0 && (mangled || !isalnum((unsigned char)text[2])))
            return units[i].ns;
    return 0;
}

static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

static uint64_t key_of(const char *name) {
    const char *seed = getenv("VGPU_SIM_SEED");
    uint64_t key = seed ? mix(strtoull(seed, NULL, 10) + 1) : 0;
    for (; *name; name++)
        key = (key ^ (unsigned char)*name) * 0x100000001b3ull;
    return key;
}

/* Factors of a log-normal distribution with mean 1, at equal steps of probability. The normal distribution is summed
 * from its density. */
static uint32_t *factors_of(double sigma) {
    uint32_t *factors = malloc(QUANTILES * sizeof *factors);
    double values[QUANTILES], sum = 0, area = 0, z = -5;
    const double step = 1e-3, density = step / sqrt(2 * M_PI);
    for (unsigned i = 0; i < QUANTILES && factors; i++) {
        for (; area < (i + 0.5) / QUANTILES; z += step)
            area += density * exp(-z * z / 2);
        values[i] = exp(sigma * z);
        sum += values[i];
    }
    for (unsigned i = 0; i < QUANTILES && factors; i++)
        factors[i] = (uint32_t)(values[i] * QUANTILES / sum * FACTOR_ONE);
    return factors;
}

void duration_read(struct duration *duration, const char *name) {
    bool mangled = strncmp(name, "_Z", 2) == 0; /* in a mangled name the argument types follow directly */
    memset(duration, 0, sizeof *duration);
    for (const char *at = strchr(name, '_'); at; at = strchr(at + 1, '_')) {
        char *end;
        if (strncmp(at, "_sigma", 6) == 0 && isdigit((unsigned char)at[6]) && !duration->factors) {
            unsigned long percent = strtoul(at + 6, NULL, 10);
            duration->factors = percent && percent <= MAX_SIGMA_PERCENT ? factors_of((double)percent / 100) : NULL;
        }
        if (strncmp(at, "_meet", 5) == 0 && isdigit((unsigned char)at[5]) && !duration->meets) {
            unsigned long cards = strtoul(at + 5, NULL, 10);
            duration->meets = cards > 1 && cards <= SIM_CARDS ? (uint32_t)cards : 0;
            for (const char *letter = name; *letter; letter++)
                duration->name = (duration->name ^ (unsigned char)*letter) * 0x100000001b3ull + 1;
        }
        if (strncmp(at, "_arg_", 5) == 0)
            duration->argument_unit = unit_of(at + 5, mangled);
        if (!isdigit((unsigned char)at[1]) || duration->count == DURATIONS)
            continue;
        uint64_t number = strtoull(at + 1, &end, 10), unit = unit_of(end, mangled);
        if (unit && number) {
            duration->per_block |= at - name >= 8 && strncmp(at - 8, "perblock", 8) == 0;
            duration->ns[duration->count++] = number * unit;
        }
    }
    if (!duration->count)
        duration->ns[duration->count++] = DEFAULT_NS;
    duration->key = duration->factors ? key_of(name) : 0;
}

void duration_free(struct duration *duration) {
    free(duration->factors);
    duration->factors = NULL;
}

uint64_t duration_next(struct duration *duration, uint64_t blocks, uint64_t argument) {
    uint64_t ns = duration->ns[0];
    if (duration->count > 1 || duration->factors) {
        uint64_t call = atomic_fetch_add_explicit(&duration->calls, 1, memory_order_relaxed);
        ns = duration->ns[call % duration->count];
        if (duration->factors)
            ns = (uint64_t)((__uint128_t)ns *
                            duration->factors[mix(duration->key + call * 0x9e3779b97f4a7c15ull) % QUANTILES] /
                            FACTOR_ONE);
    }
    if (duration->argument_unit && argument)
        ns = argument * duration->argument_unit;
    return duration->per_block ? ns * blocks : ns;
}

uint64_t function_argument(CUfunction function, void **params, void **extra) {
    const void *first = NULL;
    if (!function->duration.argument_unit)
        return 0;
    if (params)
        first = params[0];
    for (; extra && *extra != CU_LAUNCH_PARAM_END; extra += 2)
        if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER)
            first = extra[1];
    uint64_t wide = 0;
    if (first) /* if the image does not tell the size: four bytes, which are right for small numbers of either size */
        memcpy(&wide, first, function->parameters > 0 && function->parameter_sizes[0] >= 8 ? 8 : 4);
    return wide;
}
