/* Arithmetic of the pacer without a card: prints nothing and ends with 0, or names the check that failed. */
#include <stdio.h>
#include <stdlib.h>

#include "costs.h"
#include "gcra.h"

#define CHECK(condition)                                                                                                                           \
    do {                                                                                                                                           \
        if (!(condition)) {                                                                                                                        \
            printf("line %d: %s\n", __LINE__, #condition);                                                                                         \
            exit(1);                                                                                                                               \
        }                                                                                                                                          \
    } while (0)

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
    for (int i = 0; i < 32; i++) /* long and short in turn by itself: a neighbour later on does not make the long ones suspect */
        vgpu_cost_learn(two, i % 2 ? 10 * MS : 10000, VGPU_ALONE, false);
    for (int i = 0; i < 64; i++)
        vgpu_cost_learn(two, i % 2 ? 10 * MS : 10000, VGPU_SHARING, false);
    CHECK(two->mean_ns > 4500000 && two->mean_ns < 5500000);
}

static void check_chance(void) {
    uint64_t random = 42;
    int chosen = 0;
    for (int i = 0; i < 100000; i++)
        chosen += vgpu_random(&random) % 10 == 0;
    CHECK(chosen > 9000 && chosen < 11000);
}

int main(void) {
    check_reservations();
    check_mean();
    check_neighbours();
    check_keys();
    check_chance();
    return 0;
}
