/* What programs do with their blocks, launch by launch. All blocks are of one size, the unit of bytes; a unit of time
 * moves one of them. */
#ifndef VGPU_BENCH_TRACE_H
#define VGPU_BENCH_TRACE_H
#include <stddef.h>
#include <stdint.h>

#define BLOCKS 256u /* alive at a time, of all tenants */
#define TENANTS 2u
#define TOUCHED 8u /* blocks per launch of the plain patterns */
#define MOST_TOUCHED 32u

enum kind {
    LAUNCH,   /* touches `count` blocks from `touched[first]` */
    ADD,      /* block `count` is there: on the device where there is room, else in host memory */
    REMOVE,   /* block `count` is gone */
    CAPACITY, /* the tenant's room on the device is `count` blocks from now on */
    PHASE,    /* until the tenant's next one it does the same all the time: where hindsight decides */
};

struct op {
    uint32_t kind, tenant, count, first;
};

struct trace {
    struct op *ops;
    uint16_t *touched;
    uint32_t count, launches, touches;
    uint64_t random; /* state of the generator */
};

extern const char *const trace_names[]; /* ends with NULL */

/* `launches` launches of the program `name` where `capacity` blocks fit on the card. Returns 0, -1: no such name. */
int make_trace(struct trace *trace, const char *name, uint32_t launches, uint32_t capacity, uint64_t seed);

/* Random numbers, from a state that is not 0: in [0, 1), and below `bound`. */
double uniform(uint64_t *random);
uint32_t below(uint64_t *random, uint32_t bound);

void shuffle(uint64_t *random, uint32_t *order, uint32_t count);
#endif
