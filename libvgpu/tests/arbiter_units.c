/* Whose time was inside of whose measurement: known cases, and random ones against a count in small steps. Prints
 * nothing and ends with 0, or names the check that failed. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "arbiter/arbiter.h"
#include "check.h"

#define NEAR(value, expected) (fabs((value) - (expected)) < 1e-6)
#define STEPS 400u /* of time, in the random cases */

static struct vgpu_busy busy;
static struct vgpu_meter meter;
static struct vgpu_meters meters;
static double refunds[VGPU_ARBITER_MEMBERS];

static void start(void) {
    memset(&busy, 0, sizeof busy);
    memset(&meter, 0, sizeof meter);
    memset(&meters, 0, sizeof meters);
    memset(refunds, 0, sizeof refunds);
}

static void add(unsigned member, uint64_t begin, uint64_t end) {
    vgpu_busy_add(&busy, member, begin, end, &meters, refunds);
}

static void check_known(void) {
    start();
    add(0, 100, 200);
    CHECK(NEAR(refunds[0], 0));
    add(1, 300, 400); /* beside each other: nobody was in the other's way */
    CHECK(NEAR(refunds[0], 0) && NEAR(refunds[1], 0));
    add(1, 150, 250); /* 50 of both: each had half */
    CHECK(NEAR(refunds[0], 25) && NEAR(refunds[1], 25));
    add(1, 160, 240); /* known already */
    CHECK(NEAR(refunds[0], 25) && NEAR(refunds[1], 25));
    start();
    add(0, 0, 90);
    add(1, 0, 90);
    add(2, 0, 90); /* each had a third */
    CHECK(NEAR(refunds[0], 60) && NEAR(refunds[1], 60) && NEAR(refunds[2], 60));
    CHECK(busy.count == 1);
    vgpu_busy_forget(&busy, 1);
    add(3, 30, 60); /* 0 and 2 were left with a third already */
    CHECK(NEAR(refunds[0], 60) && NEAR(refunds[1], 60) && NEAR(refunds[3], 20));
}

static void check_meters(void) {
    start();
    CHECK(vgpu_meter_between(&meter, 0, 100) == 0);
    vgpu_meter_note(&meter, 100, 1000);
    vgpu_meter_note(&meter, 200, 1050);
    vgpu_meter_note(&meter, 300, 1040); /* a correction: counts when it is passed */
    vgpu_meter_note(&meter, 400, 1050);
    vgpu_meter_note(&meter, 500, 1150);
    CHECK(vgpu_meter_between(&meter, 0, 100) == 0);
    CHECK(vgpu_meter_between(&meter, 100, 200) == 50);
    CHECK(vgpu_meter_between(&meter, 150, 400) == 25);
    CHECK(vgpu_meter_between(&meter, 400, 450) == 50);
    CHECK(vgpu_meter_between(&meter, 450, 9000) == 50);
    for (uint64_t i = 0; i < 10 * VGPU_METER_POINTS; i++)
        vgpu_meter_note(&meter, 1000 + i, 2000 + 3 * i);
    CHECK(vgpu_meter_between(&meter, 1000 + 9 * VGPU_METER_POINTS + 10, 1000 + 9 * VGPU_METER_POINTS + 20) == 30);

    start(); /* a container of short launches took a quarter of the time inside of a long launch */
    vgpu_meter_note(&meter, 0, 0);
    vgpu_meter_note(&meter, 1000, 250);
    meters.of[meters.count].member = 7;
    meters.of[meters.count++].meter = &meter;
    add(0, 200, 600);
    CHECK(NEAR(refunds[0], 100));
    add(1, 200, 600); /* and what it left was shared by two */
    CHECK(NEAR(refunds[0], 250) && NEAR(refunds[1], 250));
    add(7, 200, 600); /* its own time is not taken from itself */
    CHECK(NEAR(refunds[7], 800.0 / 3));

    start(); /* but the launch takes no less than another one of its kind has taken */
    busy.slice_ns = 200;
    vgpu_meter_note(&meter, 0, 0);
    vgpu_meter_note(&meter, 2000, 1000);
    meters.of[meters.count].member = 7;
    meters.of[meters.count++].meter = &meter;
    add(0, 2200, 2360);
    CHECK(NEAR(refunds[0], 0));
    add(0, 1000, 1200);
    CHECK(NEAR(refunds[0], 39)); /* of 200 it had 160, and a 128th */

    start(); /* launched faster than it can have run: it had every second turn at most */
    vgpu_meter_note(&meter, 0, 0);
    vgpu_meter_note(&meter, 1000, 900);
    meters.of[meters.count].member = 7;
    meters.of[meters.count++].meter = &meter;
    add(0, 200, 600);
    CHECK(NEAR(refunds[0], 200));
    add(1, 200, 600);
    CHECK(NEAR(refunds[0], 800.0 / 3) && NEAR(refunds[1], 800.0 / 3));
}

/* Who had the card is known from who ended: only what runs can end. */
static void check_slices(void) {
    start();
    busy.slice_ns = 100;
    add(1, 0, 80);
    add(0, 50, 200); /* it waited until the other one had ended */
    CHECK(NEAR(refunds[0], 30) && NEAR(refunds[1], 0));
    start();
    busy.slice_ns = 100;
    add(0, 0, 40);    /* it takes no longer than that */
    add(0, 300, 400); /* so this one waited for 60 */
    add(1, 250, 460);
    CHECK(NEAR(refunds[0], 60) && NEAR(refunds[1], 40));
    start();
    busy.slice_ns = 100;
    add(0, 5000, 5040); /* what its launches take is known, so it had the last 40 of a longer one */
    add(1, 0, 600);     /* they take turns: 0 from 460, 1 from 360, 0 from 260, 1 from 160, 0 from 60 */
    add(0, 0, 500);
    CHECK(NEAR(refunds[0], 260) && NEAR(refunds[1], 240));
    add(2, 6000, 6040);
    add(2, 0, 450); /* of three the third was first: 2 from 410, the others from 210, 2 from 110, the others before */
    CHECK(NEAR(refunds[2], 310));
    CHECK(NEAR(refunds[0], 305) && NEAR(refunds[1], 335));
    start();
    busy.slice_ns = 100;
    add(0, 0, 500);
    add(1, 5000, 5040);
    add(1, 100, 300);
    CHECK(NEAR(refunds[0], 100) && NEAR(refunds[1], 100));
    vgpu_busy_forget(&busy, 1);
    add(2, 0, 500); /* nothing is known any more of who ended */
    CHECK(NEAR(refunds[2], 250) && NEAR(refunds[0], 250));
}

/* Two that always have kernels as long as a slice: each waits for a slice of the other, and may end anywhere in its
 * own. As measured on simulated cards: one has work now and then, and ends right after the other. */
static void check_as_long_as_a_slice(void) {
    const uint64_t us = 1000;
    start();
    busy.slice_ns = 2000 * us;
    uint64_t at = 0, mine = 0;
    for (unsigned burst = 0; burst < 50; burst++) {
        for (unsigned alone = 0; alone < 4; alone++, at += 2000 * us)
            add(1, at, at + 2000 * us);
        for (unsigned i = 0; i < 3; i++, at += 4020 * us) {
            add(0, at + 2060 * us, at + 6080 * us);
            add(1, at, at + 4020 * us);
            mine += 2010 * us;
        }
        add(1, at, at + 2030 * us);
        at += 2030 * us;
    }
    const double charged = 50 * 3 * 4020e3;
    CHECK(fabs(charged - refunds[0] - (double)mine) < 0.01 * (double)mine);
}

/* A container whose launches are charged long before they run, and which are then measured: its time is taken from the
 * others' once. */
static void check_charged_before(void) {
    const uint64_t us = 1000;
    start();
    busy.slice_ns = 2000 * us;
    vgpu_meter_note(&meter, 0, 0);
    meters.of[meters.count].member = 1;
    meters.of[meters.count++].meter = &meter;
    for (uint64_t i = 0; i < 100; i++) { /* each look finds 4 ms more of it charged, and then what was measured */
        vgpu_meter_note(&meter, (i + 1) * 4000 * us, (i + 1) * 4000 * us);
        add(0, i * 4000 * us, (i + 1) * 4000 * us - 1);
        add(1, i * 4000 * us + us, (i + 1) * 4000 * us + us - 1);
    }
    CHECK(fabs(refunds[0] - 200e6) < 2e6 && fabs(refunds[1] - 200e6) < 2e6);
}

/* Beside one that always has short work, kernels as long as a slice wait for one of its slices each; one that comes
 * later for the rest of one. */
static void check_waiting(void) {
    const uint64_t us = 1000;
    start();
    busy.slice_ns = 2000 * us;
    vgpu_meter_note(&meter, 0, 0);
    vgpu_meter_note(&meter, 40000 * us, 20000 * us);
    meters.of[meters.count].member = 7;
    meters.of[meters.count++].meter = &meter;
    add(0, 10000 * us, 13990 * us);
    add(0, 14000 * us, 17990 * us); /* since the one before ended, the other has had one slice */
    add(0, 18000 * us, 21990 * us);
    refunds[0] = 0;
    add(0, 29000 * us, 32000 * us);
    CHECK(fabs(refunds[0] - (1000e3 - 2000e3 / 128)) < 1); /* forgotten by a 128th */
    refunds[0] = 0;
    add(0, 32000 * us, 39000 * us); /* it has become longer */
    CHECK(fabs(refunds[0] - 3500e3) < 1);
}

/* Of the last `before` steps, in which `count` took turns, whether the ender had the first. */
static bool was_his(unsigned before, unsigned last, unsigned slice, unsigned count) {
    return before <= last || (before - last - 1) % (count * slice) >= (count - 1) * slice;
}

static void check_random(void) {
    for (unsigned seed = 1; seed <= 300; seed++) {
        bool ran[5][STEPS] = {{false}};
        unsigned ends[STEPS] = {0}, enders[STEPS] = {0}, lasts[STEPS] = {0};
        srand(seed);
        start();
        busy.slice_ns = seed % 3 ? (unsigned)rand() % 6 : 0;
        const unsigned intervals = 1 + (unsigned)rand() % 60;
        for (unsigned i = 0; i < intervals; i++) {
            const unsigned member = (unsigned)rand() % 5, begin = (unsigned)rand() % (STEPS - 1);
            const unsigned end = begin + 1 + (unsigned)rand() % (i % 3 ? 8 : STEPS - begin - 1 ? STEPS - begin - 1 : 1);
            add(member, begin, end < STEPS ? end : STEPS);
            const unsigned shortest = (unsigned)busy.kernels[member].shortest_ns, slice = (unsigned)busy.slice_ns;
            const unsigned last = shortest < slice ? shortest : 0;
            for (unsigned step = begin; step < end && step < STEPS; step++) {
                ran[member][step] = true;
                if (last && (!ends[step] || end < ends[step])) {
                    ends[step] = end < STEPS ? end : STEPS;
                    enders[step] = member;
                    lasts[step] = last;
                }
            }
        }
        double expected[5] = {0};
        for (unsigned step = 0; step < STEPS; step++) {
            const int count = ran[0][step] + ran[1][step] + ran[2][step] + ran[3][step] + ran[4][step];
            const bool told = count > 1 && ends[step];
            const bool his = told && was_his(ends[step] - step, lasts[step], (unsigned)busy.slice_ns, (unsigned)count);
            for (unsigned member = 0; member < 5; member++) {
                const double part = !told ? 1.0 / count : member == enders[step] ? his : his ? 0 : 1.0 / (count - 1);
                expected[member] += ran[member][step] ? 1 - part : 0;
            }
        }
        for (unsigned member = 0; member < 5; member++)
            CHECK(NEAR(refunds[member], expected[member]));
        for (unsigned i = 0; i + 1 < busy.count; i++) {
            CHECK(busy.spans[i].begin < busy.spans[i].end && busy.spans[i].end <= busy.spans[i + 1].begin);
            CHECK(busy.spans[i].end < busy.spans[i + 1].begin || busy.spans[i].members != busy.spans[i + 1].members ||
                  busy.spans[i].ended != busy.spans[i + 1].ended ||
                  busy.spans[i].last_ns != busy.spans[i + 1].last_ns || busy.spans[i].ender != busy.spans[i + 1].ender);
        }
    }
}

/* A long time: what is old is forgotten, and what is new stays right. */
static void check_forgetting(void) {
    start();
    for (uint64_t i = 0; i < 20 * VGPU_BUSY_SPANS; i++) {
        add(0, 10 * i, 10 * i + 4);
        CHECK(busy.count <= VGPU_BUSY_SPANS);
    }
    CHECK(NEAR(refunds[0], 0));
    const uint64_t now = 200 * VGPU_BUSY_SPANS;
    add(1, now - 1000, now); /* over a hundred of them */
    CHECK(NEAR(refunds[0], 200) && NEAR(refunds[1], 200));
    start(); /* launches end to end are one interval when they are old */
    busy.slice_ns = 4;
    for (uint64_t i = 0; i < 20 * VGPU_BUSY_SPANS; i++) {
        add(0, 4 * i, 4 * i + 4);
        CHECK(busy.count <= VGPU_BUSY_SPANS);
    }
    CHECK(busy.spans[0].begin == 0 && NEAR(refunds[0], 0));
    add(1, 0, 80 * VGPU_BUSY_SPANS);
    CHECK(NEAR(refunds[0] + refunds[1], 80 * VGPU_BUSY_SPANS));
    start();
    for (uint64_t i = 0; i < 20 * VGPU_BUSY_SPANS; i++)
        add(0, 10 * i, 10 * i + 4);
    add(2, 0, now); /* over all, the forgotten ones included */
    CHECK(busy.count <= VGPU_BUSY_SPANS);
    CHECK(busy.spans[0].begin == 0 && busy.spans[busy.count - 1].end == now);
}

int main(void) {
    check_known();
    check_meters();
    check_slices();
    check_as_long_as_a_slice();
    check_charged_before();
    check_waiting();
    check_random();
    check_forgetting();
    return 0;
}
