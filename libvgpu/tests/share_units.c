/* What share of a card a container may use at this moment, with an arbiter and a driver played here. Prints nothing and
 * ends with 0, or names the check that failed. */
#include "check.h"
#include "ledger/attach.h"
#include "loader/driver.h"
#include "pacer/core_share.h"

#define NOW 5000000000u

static struct vgpu_limits_file limits_file;
struct vgpu_mapping vgpu_mapped = {.limits = &limits_file};
_Atomic(void *) vgpu_driver_entries[VGPU_ENTRY_COUNT];
void *vgpu_driver_entry_slowly(enum vgpu_entry entry) {
    (void)entry;
    return NULL;
}

static struct vgpu_pace elastic(uint32_t cores, uint32_t ceiling, uint32_t share, uint32_t neighbours) {
    const struct vgpu_limits limits = {
        .card_count = 1, .core_policy = VGPU_CORES_ELASTIC, .cards = {{.cores = cores, .cores_ceiling = ceiling}}};
    const struct vgpu_place place = {.context = (CUcontext)&limits_file};
    limits_file.arbiter[0].share = share;
    limits_file.arbiter[0].neighbours = neighbours;
    limits_file.arbiter[0].heartbeat_ns = NOW;
    return vgpu_pace_now(&limits, &place, NOW);
}

/* Together borrowers take no more than the card can give while it changes between them. */
static void check_borrowers(void) {
    CHECK(elastic(20, 100, 40, 1).percent == 39 && elastic(30, 100, 60, 1).percent == 59);
    CHECK(elastic(30, 50, 60, 1).percent == 49);
    CHECK(elastic(30, 100, 30, 2).percent == 30); /* what is its own it has */
    CHECK(elastic(30, 100, 31, 2).percent == 30);
    CHECK(elastic(0, 100, 1, 2).percent == 1 && elastic(0, 1, 60, 2).percent == 1); /* 0 would be no limit */
    CHECK(elastic(30, 100, 100, 0).percent == 100);                                 /* nobody to change to */
    CHECK(elastic(30, 100, 60, 1).burst_ns < elastic(30, 100, 30, 1).burst_ns);
}

int main(void) {
    check_borrowers();
    return 0;
}
