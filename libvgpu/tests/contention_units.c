/* When measurements may contain somebody else's work, with an arbiter and NVML played here. Prints nothing and ends with 0, or names the check that
 * failed. */
#define _GNU_SOURCE
#include "check.h"
#include "clock.h"
#include "contention.h"
#include "crosscheck.h"
#include "ledger.h"
#include "share.h"

static struct vgpu_limits_file limits_file;
static struct vgpu_usage_file usage_file;
static const struct vgpu_mapping mapping = {.limits = &limits_file, .usage = &usage_file};
static bool arbitrated;

const struct vgpu_mapping *vgpu_mapping(void) { return &mapping; }
bool vgpu_arbiter_lives(unsigned card, uint64_t now) { (void)card, (void)now; return arbitrated; }
bool vgpu_crosscheck(unsigned card, unsigned *ours, unsigned *others) { (void)card, (void)ours, (void)others; return false; }

/* The first launches of a program among others are no measure of it either. */
static void check_first_look(void) {
    arbitrated = true;
    limits_file.arbiter[0].neighbours = 2;
    vgpu_contention_update(0, vgpu_now_ns());
    CHECK(vgpu_contention_company(0) == VGPU_SHARING);
}

static void check_comer(void) {
    const uint64_t now = vgpu_now_ns();
    vgpu_contention_update(1, now);
    CHECK(vgpu_contention_company(1) == VGPU_UNSURE);
    limits_file.arbiter[1].neighbours = 1;
    CHECK(vgpu_contention_company(1) == VGPU_SHARING); /* before the next look, which is not yet due */
    limits_file.arbiter[1].neighbours = 0;
    vgpu_contention_update(1, now + 300000000);
    CHECK(vgpu_contention_company(1) == VGPU_SHARING); /* the samples remember */
    vgpu_contention_update(1, now + 10000000000);
    CHECK(vgpu_contention_company(1) == VGPU_UNSURE);
    arbitrated = false; /* what a dead one last said is no news */
    limits_file.arbiter[1].neighbours = 1;
    CHECK(vgpu_contention_company(1) == VGPU_UNSURE);
}

int main(void) {
    check_first_look();
    check_comer();
    return 0;
}
