/* The table of what a process holds, call by call: prints nothing and ends with 0, or names the check that failed. */

#include "check.h"
#include "ledger/sizes.h"

#define P 0x7f0000000000u
#define MANY 5000u

static struct vgpu_holding out;
static const char owner;

static bool put(uint64_t pointer, uint64_t bytes) {
    return vgpu_sizes_put(VGPU_POINTER, pointer, &(struct vgpu_holding){.bytes = bytes, .owner = &owner});
}

static bool begin(struct vgpu_freeing *freeing) {
    return vgpu_sizes_free_begin(VGPU_POINTER, P, freeing);
}

/* Bytes that this free gives back; 0: none. */
static uint64_t end(const struct vgpu_freeing *freeing, bool freed) {
    return freed && vgpu_sizes_free_end(VGPU_POINTER, P, freeing, &out) ? out.bytes : 0;
}

static uint64_t left(void) {
    return vgpu_sizes_take(VGPU_POINTER, P, &out) ? out.bytes : 0;
}

static void check_one_free(void) {
    struct vgpu_freeing first;
    CHECK(!begin(&first) && put(P, 10));
    CHECK(begin(&first) && end(&first, false) == 0); /* refused by the driver: still held */
    CHECK(begin(&first) && end(&first, true) == 10 && left() == 0);
}

/* Two frees of one block: the driver grants one of them, in whatever order the answers come. */
static void check_two_frees(void) {
    struct vgpu_freeing first, second;
    CHECK(put(P, 10) && begin(&first) && begin(&second));
    CHECK(end(&first, false) == 0 && end(&second, true) == 10 && left() == 0);
    CHECK(put(P, 10) && begin(&first) && begin(&second));
    CHECK(end(&second, true) == 10 && end(&first, false) == 0 && left() == 0);
    CHECK(put(P, 10) && begin(&first) && begin(&second)); /* the second hit a block that is not in the table yet */
    CHECK(end(&second, true) == 10 && end(&first, true) == 0 && left() == 0);
}

/* The driver gives the address away again before the free has been booked. */
static void check_an_address_that_comes_back(void) {
    struct vgpu_freeing first, second, third;
    CHECK(put(P, 10) && begin(&first) && begin(&second) && put(P, 20));
    CHECK(begin(&third));
    CHECK(end(&second, false) == 0 && end(&first, true) == 10);
    CHECK(end(&third, true) == 20 && left() == 0);
    CHECK(put(P, 10) && begin(&first) && put(P, 20) && end(&first, true) == 10 && left() == 20);
}

static void add(const struct vgpu_holding *holding, void *sum) {
    *(uint64_t *)sum += holding->bytes;
}

/* The context goes while a free is under way, which then fails or not. */
static void check_a_context_that_goes(void) {
    struct vgpu_freeing first;
    struct vgpu_moment before;
    uint64_t sum = 0;
    CHECK(put(P, 10) && begin(&first) && put(P, 20) && put(P + 4096, 30));
    vgpu_sizes_moment(&before);
    CHECK(put(P + 8192, 40)); /* of another context, to which the driver has given the same handle */
    vgpu_sizes_take_owned(&owner, &before, add, &sum);
    CHECK(vgpu_sizes_take(VGPU_POINTER, P + 8192, &out) && out.bytes == 40);
    CHECK(sum == 60 && end(&first, false) == 0 && left() == 0);
}

static void check_many(void) {
    struct vgpu_freeing first;
    CHECK(put(P, 10) && begin(&first) && put(P, 20));
    for (uint64_t i = 1; i <= MANY; i++)
        CHECK(put(P + i * 512, i));
    for (uint64_t i = 1; i <= MANY; i++)
        CHECK(vgpu_sizes_take(VGPU_POINTER, P + i * 512, &out) && out.bytes == i);
    CHECK(end(&first, true) == 10 && left() == 20);
}

int main(void) {
    check_one_free();
    check_two_frees();
    check_an_address_that_comes_back();
    check_a_context_that_goes();
    check_many();
    return 0;
}
