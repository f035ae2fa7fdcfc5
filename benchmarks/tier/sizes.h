/* Zipf's law on any number of blocks of mixed sizes. */
#ifndef VGPU_BENCH_SIZES_H
#define VGPU_BENCH_SIZES_H
#include <stdint.h>

/* Units over the bus. */
struct bus_times {
    uint64_t policy, hindsight, never;
};

/* `count` blocks, each of 1, 2, 4, … up to `largest` units, twice as many as fit on the card; launches of eight
 * touches. Hindsight is given the blocks touched most often as far as they fit, and pays for the way there. */
struct bus_times play_sizes(uint32_t count, uint32_t largest, uint32_t launches, uint64_t seed);
#endif
