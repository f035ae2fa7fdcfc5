/* Arithmetic of the pacer without a card: prints nothing and ends with 0, or names the check that failed. */

#include "check.h"
#include "pacer/bounds.h"
#include "pacer/busy_intervals.h"
#include "pacer/costs.h"
#include "pacer/launch_sources.h"
#include "pacer/samples.h"
#include "region/gcra.h"

#define MS 1000000u

static void check_reservations(void) {
    _Atomic uint64_t tat = 0;
    uint64_t price = vgpu_gcra_price(3 * MS, 30);
    CHECK(price == 10 * MS);
    /* an idle program has earned the burst, no more */
    CHECK(vgpu_gcra_reserve(&tat, 1000 * MS, price, 20 * MS) == 980 * MS);
    CHECK(vgpu_gcra_reserve(&tat, 1000 * MS, price, 20 * MS) == 990 * MS);
    CHECK(vgpu_gcra_reserve(&tat, 1000 * MS, price, 20 * MS) == 1000 * MS);
    /* from here on everyone has a start of its own, one price behind the one before */
    CHECK(vgpu_gcra_reserve(&tat, 1000 * MS, price, 20 * MS) == 1010 * MS);
    /* a launch that comes late does not lose what it was entitled to */
    CHECK(vgpu_gcra_reserve(&tat, 1025 * MS, price, 20 * MS) == 1020 * MS);
    vgpu_gcra_settle(&tat, -(int64_t)(5 * MS));
    CHECK(vgpu_gcra_reserve(&tat, 1025 * MS, price, 20 * MS) == 1025 * MS);
    vgpu_gcra_settle(&tat, 100 * (int64_t)MS);
    CHECK(vgpu_gcra_reserve(&tat, 1025 * MS, price, 20 * MS) == 1135 * MS);
    vgpu_gcra_settle(&tat, -9000 * (int64_t)MS);
    CHECK(atomic_load(&tat) == 0);
}

static void check_keys(void) {
    static const int function = 0;
    CHECK(vgpu_cost_key(&function, 33, 64) == vgpu_cost_key(&function, 64, 64));
    CHECK(vgpu_cost_key(&function, 64, 64) != vgpu_cost_key(&function, 65, 64));
    CHECK(vgpu_cost_key(&function, 64, 64) != vgpu_cost_key(&function, 64, 128));
    CHECK(vgpu_cost_of(7) == vgpu_cost_of(7));
    CHECK(vgpu_cost_of(7) != vgpu_cost_of(8));
    for (uint64_t key = 1; key < 100000; key++) /* more keys than records: never NULL, never a loop without end */
        CHECK(vgpu_cost_of(key * 977) != NULL);
}

static void check_mean(void) {
    struct vgpu_cost *cost = vgpu_cost_of(1ull << 40);
    CHECK(!vgpu_cost_known(cost));
    vgpu_cost_learn(cost, 1000, VGPU_ALONE, false);
    CHECK(vgpu_cost_known(cost) && cost->mean_ns == 1000);
    for (int i = 0; i < 1000; i++)
        vgpu_cost_learn(cost, i % 2 ? 10 * 1000 : 10 * MS, VGPU_ALONE, false);
    CHECK(cost->mean_ns > 4500000 && cost->mean_ns < 5500000); /* the mean, not the smallest */
    for (int i = 0; i < 1000; i++)
        vgpu_cost_learn(cost, 1000, VGPU_ALONE, false);
    CHECK(cost->mean_ns < 2000); /* follows a program that changes */
}

static void check_neighbours(void) {
    struct vgpu_cost *cost = vgpu_cost_of(1ull << 41);
    for (int i = 0; i < 64; i++) /* three of five samples contain up to 2 ms of somebody else */
        vgpu_cost_learn(cost, i % 5 < 2 ? 2 * MS : 2 * MS + (uint64_t)(i * 37 % 64 + 4) * MS / 32, VGPU_SHARING, false);
    CHECK(cost->mean_ns >= 2 * MS && cost->mean_ns < 2100000);
    struct vgpu_cost *varied = vgpu_cost_of(1ull << 42);
    for (int i = 0; i < 64; i++) /* nobody else after all: an even spread of 80 to 120 is not cut down */
        vgpu_cost_learn(varied, 80000 + (uint64_t)(i * 29 % 32) * 1290, VGPU_SHARING, false);
    CHECK(varied->mean_ns > 97000 && varied->mean_ns < 103000);
    struct vgpu_cost *two = vgpu_cost_of(1ull << 43);
    /* long and short in turn by itself: a neighbour later on does not make the long ones suspect */
    for (int i = 0; i < 32; i++)
        vgpu_cost_learn(two, i % 2 ? 10 * MS : 10000, VGPU_ALONE, false);
    for (int i = 0; i < 64; i++)
        vgpu_cost_learn(two, i % 2 ? 10 * MS : 10000, VGPU_SHARING, false);
    CHECK(two->mean_ns > 4500000 && two->mean_ns < 5500000);
}

static void check_unions(void) {
    struct vgpu_spans spans = {0};
    CHECK(vgpu_spans_add(&spans, 100, 100) == 0 && vgpu_spans_add(&spans, 100, 90) == 0);
    CHECK(vgpu_spans_add(&spans, 100, 200) == 100);
    CHECK(vgpu_spans_add(&spans, 150, 250) == 50);
    CHECK(vgpu_spans_add(&spans, 300, 400) == 100);
    CHECK(vgpu_spans_add(&spans, 310, 320) == 0);
    CHECK(vgpu_spans_add(&spans, 240, 310) == 50 && spans.count == 1); /* fills the hole */
    CHECK(vgpu_spans_add(&spans, 50, 500) == 150 && spans.count == 1 && spans.at[0].begin == 50 &&
          spans.at[0].end == 500);
    for (uint64_t i = 0; i < 100; i++) /* more than there is room for: the newest stay */
        CHECK(vgpu_spans_add(&spans, 1000 + 20 * i, 1010 + 20 * i) == 10);
    CHECK(spans.count == VGPU_SPANS && spans.at[VGPU_SPANS - 1].end == 1010 + 20 * 99);
    CHECK(vgpu_spans_add(&spans, 1000 + 20 * 99, 1010 + 20 * 99) == 0);
    CHECK(vgpu_spans_add(&spans, 0, 10) == 10 && spans.at[0].begin > 10); /* too old to be remembered */
}

static void check_runs(void) {
    static struct vgpu_pacer_card pacer;
    CHECK(vgpu_busy_publish(&pacer, 1000, 2000) == 1000);
    CHECK(vgpu_busy_publish(&pacer, 1500, 2500) == 500); /* by whichever process: the container's card was busy once */
    CHECK(vgpu_busy_publish(&pacer, 1200, 1300) == 0);
    CHECK(pacer.run_count == 3 && pacer.runs[1].begin_ns == 1500 && pacer.runs[1].end_ns == 2500);
    atomic_store(&pacer.runs[1].end_ns, 0); /* as a killed writer leaves it */
    CHECK(vgpu_busy_publish(&pacer, 2000, 2600) == 600);
    for (uint64_t i = 0; i < 2 * VGPU_RUNS; i++)
        CHECK(vgpu_busy_publish(&pacer, 10000 + 10 * i, 10010 + 10 * i) == 10);
}

static void check_crowds(void) {
    int one, other;
    vgpu_sources_note(vgpu_sources_member(&one, &one), 1, 100 * MS);
    vgpu_sources_note(vgpu_sources_member(&one, &one), 1, 101 * MS);
    CHECK(!vgpu_sources_several());
    uint64_t second = vgpu_sources_member(&other, &one);
    for (uintptr_t i = 2; second == vgpu_sources_member(&one, &one); i++) /* members are bits, and two may share one */
        second = vgpu_sources_member((const void *)i, &one);
    vgpu_sources_note(second, 1, 102 * MS);
    CHECK(vgpu_sources_several());
    vgpu_sources_note(second, 1, 125 * MS);
    CHECK(vgpu_sources_several() && vgpu_measure_all &&
          vgpu_sources_watches()); /* few launches: all of them are measured */
    for (uint64_t i = 0; i < 1000; i++)
        vgpu_sources_note(second, 1, 125 * MS + i * MS / 20);
    CHECK(!vgpu_sources_several() && !vgpu_measure_all); /* the first has long been silent */
    CHECK(!vgpu_sources_watches());
    vgpu_series_begin();
    CHECK(vgpu_sources_watches());
}

static void check_doubts(void) {
    struct vgpu_cost *cost = vgpu_cost_of(1ull << 44);
    for (int i = 0; i < 40; i++)
        vgpu_cost_learn(cost, 10000, VGPU_ALONE, true);
    CHECK(cost->samples == 40);
    vgpu_cost_doubt(1ull << 44);
    CHECK(cost->samples == 1 && cost->mean_ns == 10000);
    vgpu_cost_learn(cost, 10 * MS, VGPU_ALONE, true);
    CHECK(cost->mean_ns > 5 * MS); /* the first sample weighs as much as all before */
    struct vgpu_cost *another = vgpu_cost_of(1ull << 45);
    for (int i = 0; i < 40; i++)
        vgpu_cost_learn(another, 10000, VGPU_ALONE, true);
    vgpu_cost_doubt(0);
    CHECK(vgpu_cost_of(1ull << 45)->samples == 1);
}

static void check_queued(void) {
    struct vgpu_cost *cost = vgpu_cost_of(1ull << 46);
    for (int i = 0; i < 200; i++) /* every sample but those behind our own work contains a change of 10 us */
        vgpu_cost_learn(cost, i % 8 ? 110000 : 100000, VGPU_SHARING, i % 8 == 0);
    CHECK(cost->mean_ns < 101000);
    struct vgpu_cost *never = vgpu_cost_of(1ull << 47);
    for (int i = 0; i < 200; i++) /* a program that waits for each launch has no others */
        vgpu_cost_learn(never, 110000, VGPU_SHARING, false);
    CHECK(never->mean_ns == 110000);
}

/* More kinds of launches than there is room for: of each of those nothing is known, whatever the others took. */
static void check_kinds_without_room(void) {
    uint64_t key = 1;
    struct vgpu_cost *shared = NULL;
    while (!shared) { /* two keys with one record */
        struct vgpu_cost *cost = vgpu_cost_of(key * 977 + 3);
        if (cost == vgpu_cost_of((key + 1) * 977 + 3))
            shared = cost;
        key++;
        CHECK(key < 1000000);
    }
    for (int i = 0; i < 100; i++)
        vgpu_cost_learn(shared, 1000, VGPU_ALONE, true);
    CHECK(!vgpu_cost_known(shared) && shared->bound_ns > 0);
}

static void check_chance(void) {
    uint64_t random = 42;
    int chosen = 0;
    for (int i = 0; i < 100000; i++)
        chosen += vgpu_random(&random) % 10 == 0;
    CHECK(chosen > 9000 && chosen < 11000);
}

/* The host was away while a launch was measured: it took between `least` and `most`. Has it to pay something else than
 * what it has paid? */
static bool refuted(enum vgpu_sample_kind kind, uint64_t paid, uint64_t least, uint64_t most) {
    const struct vgpu_sample sample = {.kind = kind, .reserved_ns = paid};
    const struct vgpu_measure measure = {
        .begin_ns = MS, .end_ns = MS + most, .least_ns = least, .most_ns = most, .spoilt = true};
    return vgpu_measure_refutes(&measure, &sample);
}

static void check_spoilt(void) {
    /* 10 us that were paid as the mean of themselves and of 10 ms */
    CHECK(refuted(VGPU_SAMPLE_SETTLES, 5 * MS, 0, 20000));
    CHECK(refuted(VGPU_SAMPLE_SETTLES, 5 * MS, 8 * MS, 10 * MS));
    CHECK(refuted(VGPU_SAMPLE_SETTLES, 50000, 8 * MS, 10 * MS)); /* long ones of which nothing is known */
    CHECK(!refuted(VGPU_SAMPLE_SETTLES, 9 * MS, 8 * MS, 10 * MS));
    CHECK(!refuted(VGPU_SAMPLE_SETTLES, 50000, 10000, 40000));
    CHECK(!refuted(VGPU_SAMPLE_LEARNS, 5 * MS, 0, 20000));
}

/* A launch whose call was back after `away`; its events happened at `fired` and `whole` later, in ns since the launch.
 */
static struct vgpu_measure bounds(uint64_t paid, uint64_t apart, uint64_t away, int64_t fired, uint64_t whole) {
    const uint64_t launched = 1000 * MS;
    const struct vgpu_sample sample = {.kind = VGPU_SAMPLE_SETTLES,
                                       .reserved_ns = paid,
                                       .apart_ns = apart,
                                       .launched_ns = launched,
                                       .returned_ns = launched + away};
    struct vgpu_measure measure = {0};
    vgpu_measure_bounds(&sample, (double)launched + (double)fired, (double)whole, &measure);
    CHECK(measure.begin_ns >= launched && measure.end_ns >= measure.begin_ns);
    return measure;
}

static bool pays_otherwise(const struct vgpu_measure *measure, uint64_t paid) {
    const struct vgpu_sample sample = {.kind = VGPU_SAMPLE_SETTLES, .reserved_ns = paid};
    return vgpu_measure_refutes(measure, &sample);
}

static void check_bounds(void) {
    struct vgpu_measure seen = bounds(2 * MS, MS, 3000, 1000, 2 * MS);
    CHECK(!seen.spoilt && seen.end_ns - seen.begin_ns == 2 * MS && seen.least_ns == 2 * MS - 2000 &&
          seen.most_ns == 2 * MS);
    seen = bounds(10000, 10000, 3000, -1000, 4000); /* over before the second event: half of it */
    CHECK(!seen.spoilt && seen.end_ns - seen.begin_ns == 1500 && seen.most_ns == 3000);
    seen = bounds(10000, 1000, 3000, -1000, 4000);
    CHECK(seen.end_ns - seen.begin_ns == 500 && seen.most_ns == 3000);
    /* the host was away for 5 ms: a kernel of 4 ms may have run in them, whatever the time between launches was */
    seen = bounds(4 * MS, 100 * MS, 5 * MS, 0, 5 * MS);
    CHECK(seen.spoilt && seen.most_ns == 5 * MS && !pays_otherwise(&seen, 4 * MS));
    seen = bounds(4 * MS, 10000, 5 * MS, 0, 5 * MS);
    CHECK(seen.spoilt && seen.most_ns == 5 * MS && !pays_otherwise(&seen, 4 * MS));
    CHECK(seen.end_ns - seen.begin_ns == 5 * MS);    /* of which nothing is known pays all of it */
    seen = bounds(6 * MS, 10000, 5 * MS, 0, 5 * MS); /* paid too much, and gets no more back than is sure */
    CHECK(pays_otherwise(&seen, 6 * MS) && seen.end_ns - seen.begin_ns == 5 * MS);
    /* on the card for 10 ms at most, and for the last 8 ms surely: whoever paid 5 pays what is possible, whoever paid 9
     * has paid enough */
    seen = bounds(5 * MS, 100 * MS, 2 * MS, 0, 10 * MS);
    CHECK(seen.spoilt && seen.least_ns == 8 * MS && seen.most_ns == 10 * MS && pays_otherwise(&seen, 5 * MS));
    CHECK(seen.end_ns == 1010 * MS && seen.end_ns - seen.begin_ns == 10 * MS);
    seen = bounds(9 * MS, 100 * MS, 2 * MS, 0, 10 * MS);
    CHECK(seen.spoilt && !pays_otherwise(&seen, 9 * MS));
    seen = bounds(5 * MS, 100 * MS, 20000, 0, 20000);
    CHECK(pays_otherwise(&seen, 5 * MS) && seen.end_ns - seen.begin_ns == 20000);
    /* an estimate does not learn of bounds: the host may have loaded the kernel's code meanwhile */
    CHECK(seen.spoilt && !vgpu_measure_teaches(&seen));
    seen = bounds(2 * MS, MS, 3000, 1000, 2 * MS);
    CHECK(vgpu_measure_teaches(&seen));
}

/* CUDA_LAUNCH_BLOCKING=1: each launch is measured by its call, so that one that grows longer is noticed. */
static void check_blocking(void) {
    const uint64_t launched = 1000 * MS;
    struct vgpu_sample sample = {.kind = VGPU_SAMPLE_SETTLES,
                                 .reserved_ns = 10000,
                                 .apart_ns = MS,
                                 .launched_ns = launched,
                                 .returned_ns = launched + 10 * MS,
                                 .blocks = true};
    struct vgpu_measure measure = {0};
    /* the second event comes right behind the call */
    vgpu_measure_bounds(&sample, (double)launched - 1000, 10 * MS + 2500, &measure);
    CHECK(!measure.spoilt && measure.end_ns - measure.begin_ns == 10 * MS && vgpu_measure_teaches(&measure));
    /* the host was away in between: bounds are all there is */
    vgpu_measure_bounds(&sample, (double)launched - 1000, 15 * MS, &measure);
    CHECK(measure.spoilt && !vgpu_measure_teaches(&measure));
    sample.returned_ns = launched + 3000; /* it did not block after all */
    vgpu_measure_bounds(&sample, (double)launched + 1000, 10 * MS, &measure);
    CHECK(!measure.spoilt && measure.end_ns - measure.begin_ns == 10 * MS && measure.least_ns == 10 * MS - 2000);
    /* nor of a short one does the call say more than the events do: it may have been set too late */
    sample.returned_ns = launched + 5000;
    vgpu_measure_bounds(&sample, (double)launched + 1000, 7000, &measure);
    CHECK(!measure.spoilt && measure.end_ns - measure.begin_ns == 7000);
    sample.blocks = false;
    sample.returned_ns = launched + 10 * MS;
    vgpu_measure_bounds(&sample, (double)launched - 1000, 10 * MS + 2500, &measure);
    CHECK(measure.spoilt);
}

int main(void) {
    check_blocking();
    check_bounds();
    check_spoilt();
    check_reservations();
    check_mean();
    check_neighbours();
    check_unions();
    check_runs();
    check_crowds();
    check_doubts();
    check_queued();
    check_keys();
    check_kinds_without_room();
    check_chance();
    return 0;
}
