/* When measurements may contain somebody else's work, with an arbiter and NVML played here. Prints nothing and ends
 * with 0, or names the check that failed. */
#define _GNU_SOURCE
#include "base/clock.h"
#include "check.h"
#include "ledger/ledger.h"
#include "pacer/contention.h"
#include "pacer/core_share.h"
#include "pacer/crosscheck.h"

static struct vgpu_limits_file limits_file;
static struct vgpu_usage_file usage_file;
static const struct vgpu_mapping mapping = {.limits = &limits_file, .usage = &usage_file};
static bool arbitrated;

const struct vgpu_mapping *vgpu_mapping(void) {
    return &mapping;
}
bool vgpu_arbiter_lives(unsigned card, uint64_t now) {
    (void)card, (void)now;
    return arbitrated;
}
static struct vgpu_seen seen_by_nvml;
static bool own_is_seen;
bool vgpu_crosscheck(unsigned card, struct vgpu_seen *seen) {
    (void)card;
    *seen = seen_by_nvml;
    return own_is_seen;
}

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

/* A second of looks at a process that uses `used` percent and is charged `charged`: what it has to pay for besides, in
 * ms. */
static uint64_t missed_in_a_second(unsigned card, uint64_t *now, unsigned used, unsigned charged) {
    uint64_t missed = 0;
    own_is_seen = true;
    seen_by_nvml = (struct vgpu_seen){.ours = used, .mine = used};
    for (int i = 0; i < 4; i++) {
        vgpu_contention_own(card, 2500000 * (int64_t)charged);
        atomic_fetch_add(&usage_file.pacer[card].gpu_ns, 2500000 * (uint64_t)charged);
        vgpu_contention_update(card, *now += 250000001);
        const uint64_t found = vgpu_contention_missed(card);
        vgpu_contention_own(card, (int64_t)found); /* as who charges it */
        missed += found;
    }
    return missed / 1000000;
}

static void check_missed(void) {
    arbitrated = false;
    uint64_t now = vgpu_now_ns();
    missed_in_a_second(2, &now, 20, 20);
    CHECK(missed_in_a_second(2, &now, 20, 20) == 0);
    CHECK(missed_in_a_second(2, &now, 25, 20) == 0); /* NVML is coarse */
    uint64_t missed = 0;
    for (int i = 0; i < 10; i++)
        missed += missed_in_a_second(2, &now, 99, 20);
    CHECK(missed > 6500 && missed < 7600); /* 79 percent of ten seconds, less the tolerance and what is not yet sure */
    CHECK(missed_in_a_second(2, &now, 20, 20) <= 600);
    for (int i = 0; i < 10; i++)
        CHECK(missed_in_a_second(3, &now, 0, 20) == 0);
    CHECK(missed_in_a_second(3, &now, 99, 20) == 0); /* it was charged before it ran */
}

/* NVML knows our processes by other numbers: what is more than we were charged is taken for a neighbour's. */
static void check_other_pids(void) {
    uint64_t now = vgpu_now_ns();
    arbitrated = own_is_seen = false;
    seen_by_nvml = (struct vgpu_seen){.all = 3};
    for (int i = 0; i < 6; i++)
        vgpu_contention_update(4, now += 250000001);
    CHECK(vgpu_contention_company(4) == VGPU_UNSURE);
    seen_by_nvml.all = 60;
    vgpu_contention_update(4, now += 250000001);
    CHECK(vgpu_contention_company(4) == VGPU_SHARING && vgpu_contention_missed(4) == 0);
}

int main(void) {
    check_missed();
    check_other_pids();
    check_first_look();
    check_comer();
    return 0;
}
