/* The table of blocks against a driver that is played here, and what the machine can spare: prints nothing and ends
 * with 0, or names the check that failed. */
#include <pthread.h>
#include <string.h>

#include "check.h"
#include "ledger/attach.h"
#include "ledger/local.h"
#include "reserves/capture.h"
#include "tier/blocks.h"
#include "tier/memory.h"

#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)

static CUdeviceptr next_range = 0x7f0012200000; /* no multiple of anything large */
static uint64_t most = UINT64_MAX;              /* that the driver reserves at once */
static unsigned reservations;

_Atomic(void *) vgpu_driver_entries[VGPU_ENTRY_COUNT];
atomic_int vgpu_open_captures;
_Atomic(struct vgpu_local *) vgpu_local_memory;

void *vgpu_driver_entry_slowly(enum vgpu_entry entry) {
    (void)entry;
    return NULL;
}

enum vgpu_mode vgpu_enforcement_slowly(void) {
    return VGPU_REGION;
}

static unsigned fixed;

void vgpu_charge_fixed(struct vgpu_ticket *resident, uint64_t bytes) {
    (void)resident;
    fixed += bytes > 0;
}

struct vgpu_local *vgpu_local_slowly(void) {
    return NULL;
}

/* No region: nobody is limited, and host memory is not tried. */
const struct vgpu_mapping *vgpu_mapping(void) {
    static const struct vgpu_mapping none;
    return &none;
}

enum vgpu_mode vgpu_attach_slowly(struct vgpu_local *local) {
    (void)local;
    return VGPU_UNLIMITED;
}

void vgpu_count_kind(unsigned card, enum vgpu_kind kind, int64_t bytes) {
    (void)card, (void)kind, (void)bytes;
}

static CUresult address_reserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wish,
                                unsigned long long flags) {
    CHECK(alignment == 2 * MIB && !wish && !flags && bytes % (2 * MIB) == 0);
    if (bytes > most)
        return CUDA_ERROR_OUT_OF_MEMORY;
    reservations++;
    *address = next_range;
    next_range += bytes;
    return CUDA_SUCCESS;
}

static CUresult address_free(CUdeviceptr address, size_t bytes) {
    (void)address, (void)bytes;
    return CUDA_SUCCESS;
}

static struct vgpu_tier_record block_of(CUdeviceptr base, uint64_t bytes, bool movable) {
    return (struct vgpu_tier_record){
        .base = base, .asked = bytes - 100, .bytes = bytes, .card = 3, .handle = 1, .movable = movable};
}

static void test_names(void) {
    CHECK(!vgpu_tier_any());
    vgpu_tier_lock();
    vgpu_tier_lock(); /* by the same thread */
    const CUdeviceptr one = vgpu_tier_reserve(4 * MIB), two = vgpu_tier_reserve(2 * MIB);
    CHECK(one && two == one + 4 * MIB && reservations == 1);
    CHECK(vgpu_tier_find(one) == VGPU_TIER_NONE);
    struct vgpu_tier_record first = block_of(one, 4 * MIB, true), second = block_of(two, 2 * MIB, false);
    const uint64_t before = vgpu_tier_moment();
    const uint32_t a = vgpu_tier_enter(&first), b = vgpu_tier_enter(&second);
    CHECK(a != b && vgpu_tier_any());
    CHECK(vgpu_tier_record(a)->buffer_id >= before && vgpu_tier_record(a)->buffer_id < vgpu_tier_record(b)->buffer_id);
    CHECK(vgpu_tier_moment() > vgpu_tier_record(b)->buffer_id);
    CHECK(vgpu_tier_find(one) == a && vgpu_tier_find(one + 4 * MIB - 1) == a && vgpu_tier_find(two) == b);
    CHECK(vgpu_tier_find(one - 1) == VGPU_TIER_NONE && vgpu_tier_find(two + 2 * MIB) == VGPU_TIER_NONE);
    CHECK(vgpu_tier_find(0) == VGPU_TIER_NONE && vgpu_tier_find(UINT64_MAX) == VGPU_TIER_NONE &&
          vgpu_tier_find(UINT64_C(1) << 49) == VGPU_TIER_NONE);
    CHECK(vgpu_tier_around(two + 5) == b && vgpu_tier_next(0) == a && vgpu_tier_next(a + 1) == b &&
          vgpu_tier_next(b + 1) == VGPU_TIER_NONE);

    struct vgpu_tier_card *card = vgpu_tier_card(3);
    CHECK(card && !vgpu_tier_card(0) && !vgpu_tier_card(VGPU_MAX_CARDS) && card->policy.movable == 1);
    CHECK(vgpu_tier_record(a)->movable && card->record_of[vgpu_tier_record(a)->entry] == a);
    CHECK(!vgpu_tier_record(b)->movable && vgpu_tier_record(b)->entry == VGPU_TIER_NONE);
    vgpu_tier_pin_block(a);
    CHECK(!vgpu_tier_record(a)->movable && vgpu_tier_record(a)->shared && card->policy.movable == 0 && fixed == 1);

    vgpu_tier_leave(a);
    vgpu_tier_unreserve(one, 4 * MIB);
    CHECK(vgpu_tier_find(one) == VGPU_TIER_NONE && vgpu_tier_next(0) == b);
    CHECK(vgpu_tier_reserve(2 * MIB) == one); /* the first gap */
    CHECK(vgpu_tier_reserve(4 * MIB) == two + 2 * MIB && vgpu_tier_reserve(2 * MIB) == one + 2 * MIB);
    CHECK(vgpu_tier_enter(&first) == a); /* numbers are used again, with another buffer */
    CHECK(vgpu_tier_record(a)->buffer_id > vgpu_tier_record(b)->buffer_id);
    vgpu_tier_unlock();
    vgpu_tier_unlock();
}

static void test_pinned_blocks(void) {
    struct vgpu_tier_record small = {.base = 0x5500001234, .asked = 5000, .bytes = 5000, .pinned = true};
    struct vgpu_tier_record neighbour = small;
    neighbour.base += 5000;
    vgpu_tier_lock();
    const uint32_t a = vgpu_tier_enter(&small), b = vgpu_tier_enter(&neighbour);
    CHECK(vgpu_tier_find(small.base) == VGPU_TIER_NONE);
    CHECK(vgpu_tier_around(small.base + 4999) == a && vgpu_tier_around(small.base + 5000) == b);
    CHECK(vgpu_tier_around(small.base - 1) == VGPU_TIER_NONE && vgpu_tier_around(small.base + 10000) == VGPU_TIER_NONE);
    CHECK(vgpu_tier_maybe(small.base) && vgpu_tier_maybe(1)); /* whoever asks has to look */
    vgpu_tier_leave(a);
    CHECK(vgpu_tier_around(small.base) == VGPU_TIER_NONE && vgpu_tier_around(neighbour.base) == b);
    static uint32_t numbers[500];
    for (unsigned i = 0; i < 500; i++) { /* in no order of addresses, with gaps of 16 bytes */
        struct vgpu_tier_record one = {
            .base = 0x6600000000 + (i * 7919 % 500) * 4096, .asked = 4080, .bytes = 4080, .pinned = true};
        numbers[i] = vgpu_tier_enter(&one);
    }
    for (unsigned i = 0; i < 500; i += 2)
        vgpu_tier_leave(numbers[i]);
    for (unsigned i = 0; i < 500; i++) {
        const CUdeviceptr base = 0x6600000000 + (i * 7919 % 500) * 4096;
        const uint32_t wanted = i % 2 ? numbers[i] : VGPU_TIER_NONE;
        CHECK(vgpu_tier_around(base) == wanted && vgpu_tier_around(base + 4079) == wanted &&
              vgpu_tier_around(base + 4080) == VGPU_TIER_NONE);
    }
    for (unsigned i = 1; i < 500; i += 2)
        vgpu_tier_leave(numbers[i]);
    vgpu_tier_leave(b);
    CHECK(!vgpu_tier_maybe(small.base));
    vgpu_tier_unlock();
}

static void test_large_ranges(void) {
    vgpu_tier_lock();
    const CUdeviceptr huge = vgpu_tier_reserve(200 * GIB); /* larger than what is reserved as a rule */
    struct vgpu_tier_record block = block_of(huge, 200 * GIB, false);
    const uint32_t number = vgpu_tier_enter(&block);
    CHECK(huge && reservations == 2);
    for (uint64_t at = 0; at < 200 * GIB; at += 4096 * MIB - 8)
        CHECK(vgpu_tier_find(huge + at) == number);
    CHECK(vgpu_tier_find(huge + 200 * GIB) == VGPU_TIER_NONE && vgpu_tier_find(huge - 1) == VGPU_TIER_NONE);

    most = 3 * GIB; /* as with a limit on addresses: smaller ranges, but never smaller than the block */
    const CUdeviceptr first = vgpu_tier_reserve(60 * GIB - 2 * MIB);
    CHECK(first); /* of the first range */
    CHECK(vgpu_tier_reserve(60 * GIB) == 0);
    CHECK(vgpu_tier_reserve(2 * GIB) && vgpu_tier_reserve(2 * GIB) && vgpu_tier_reserve(2 * GIB));
    CHECK(vgpu_tier_reserve(UINT64_MAX & ~(2 * MIB - 1)) == 0);
    most = UINT64_MAX;
    next_range = (UINT64_C(1) << 49) - 32 * GIB; /* the table does not reach so far */
    CHECK(vgpu_tier_reserve(57 * GIB) == 0);
    vgpu_tier_unlock();
}

/* The first place that is free is found, whatever was taken and given back. */
static void test_gaps(void) {
    enum { BLOCKS = 300 };
    static CUdeviceptr bases[BLOCKS];
    static uint64_t sizes[BLOCKS];
    uint64_t random = 12345;
    vgpu_tier_lock();
    for (unsigned round = 0; round < 4000; round++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        const unsigned i = random >> 33 & 0x7fffffff;
        const unsigned at = i % BLOCKS;
        if (bases[at]) {
            vgpu_tier_unreserve(bases[at], sizes[at]);
            bases[at] = 0;
            continue;
        }
        sizes[at] = (1 + i / BLOCKS % 90) * 2 * MIB;
        bases[at] = vgpu_tier_reserve(sizes[at]);
        CHECK(bases[at]);
        for (unsigned other = 0; other < BLOCKS && round % 16 == 0; other++)
            CHECK(other == at || !bases[other] || bases[other] + sizes[other] <= bases[at] ||
                  bases[at] + sizes[at] <= bases[other]);
    }
    vgpu_tier_unlock();
}

static void *another_thread(void *held) {
    CHECK(vgpu_tier_try() == !*(bool *)held);
    if (!*(bool *)held)
        vgpu_tier_unlock();
    return NULL;
}

static void test_lock(void) {
    pthread_t thread;
    bool held = true;
    vgpu_tier_lock();
    CHECK(vgpu_tier_try());
    vgpu_tier_unlock();
    pthread_create(&thread, NULL, another_thread, &held);
    pthread_join(thread, NULL);
    vgpu_tier_unlock();
    held = false;
    pthread_create(&thread, NULL, another_thread, &held);
    pthread_join(thread, NULL);
}

static pthread_barrier_t cancelled;

static void *is_cancelled(void *got_through) {
    vgpu_tier_lock();
    vgpu_tier_lock();
    pthread_barrier_wait(&cancelled);
    pthread_barrier_wait(&cancelled);
    pthread_testcancel();
    vgpu_tier_unlock();
    pthread_testcancel();
    *(bool *)got_through = true;
    vgpu_tier_unlock();
    pthread_testcancel();
    *(bool *)got_through = false;
    return got_through;
}

/* Whoever holds the lock, and with it the gate, is not cancelled before it lets go. */
static void test_cancelled_threads_let_go(void) {
    pthread_t thread;
    void *answer;
    bool got_through = false;
    pthread_barrier_init(&cancelled, NULL, 2);
    pthread_create(&thread, NULL, is_cancelled, &got_through);
    pthread_barrier_wait(&cancelled);
    pthread_cancel(thread);
    pthread_barrier_wait(&cancelled);
    pthread_join(thread, &answer);
    CHECK(got_through && answer == PTHREAD_CANCELED && vgpu_tier_try());
    vgpu_tier_unlock();
}

static void test_a_child_begins_with_nothing(void) {
    vgpu_tier_blocks_forget();
    CHECK(!vgpu_tier_any() && vgpu_tier_next(0) == VGPU_TIER_NONE && !vgpu_tier_card(3));
    next_range = 0x7f0012200000;
    vgpu_tier_lock();
    const CUdeviceptr base = vgpu_tier_reserve(2 * MIB);
    CHECK(base == 0x7f0012200000 && vgpu_tier_find(base) == VGPU_TIER_NONE);
    vgpu_tier_unlock();
}

static unsigned given, refusing; /* devices that got access, or get none, by their bits */

static CUresult set_access(CUdeviceptr base, size_t bytes, const CUmemAccessDesc *access, size_t count) {
    CHECK(base == 4096 && bytes == 2 * MIB && count == 1 && access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    if (refusing >> access->location.id & 1)
        return CUDA_ERROR_UNKNOWN;
    given |= 1u << access->location.id;
    return CUDA_SUCCESS;
}

static CUresult device_count(int *count) {
    *count = 4;
    return CUDA_SUCCESS;
}

static unsigned given_by(CUdevice device, bool on_device) {
    given = 0;
    CHECK(vgpu_tier_give_access(device, on_device, 4096, 2 * MIB) == CUDA_SUCCESS);
    return given;
}

/* Host memory is every card's; a card's is its own, and that of whom the program let in. */
static void test_who_may_reach_it(void) {
    vgpu_driver_entries[ENTRY_cuMemSetAccess] = set_access;
    vgpu_driver_entries[ENTRY_cuDeviceGetCount] = device_count;
    CHECK(given_by(1, true) == 1 << 1 && given_by(1, false) == 15);
    vgpu_tier_add_peer(1, 3);
    vgpu_tier_add_peer(1, 64);
    CHECK(given_by(1, true) == (1 << 1 | 1 << 3) && given_by(3, true) == 1 << 3 && given_by(3, false) == 15);
    refusing = 1 << 3; /* a peer that gets none is a failure */
    CHECK(vgpu_tier_give_access(1, true, 4096, 2 * MIB) == CUDA_ERROR_UNKNOWN);
    CHECK(vgpu_tier_give_access(1, false, 4096, 2 * MIB) == CUDA_ERROR_UNKNOWN);
    vgpu_tier_peers_forget();
    CHECK(given_by(1, true) == 1 << 1 && given_by(1, false) == 7);
}

static void test_what_the_machine_spares(void) {
    const char *large = "MemTotal:       65536000 kB\nMemFree:         1000000 kB\nMemAvailable:   10000000 kB\n";
    const uint64_t reserve = UINT64_C(65536000) / 20 << 10;
    CHECK(vgpu_meminfo_spares(large, (UINT64_C(10000000) << 10) - reserve));
    CHECK(!vgpu_meminfo_spares(large, (UINT64_C(10000000) << 10) - reserve + 1));
    CHECK(!vgpu_meminfo_spares(large, UINT64_MAX));
    const char *small = "MemTotal:        1048576 kB\nMemAvailable:     524288 kB\n"; /* at least 256 MiB */
    CHECK(vgpu_meminfo_spares(small, 256 * MIB) && !vgpu_meminfo_spares(small, 256 * MIB + 1));
    const char *huge = "MemTotal:     1073741824 kB\nMemAvailable:    8388608 kB\n"; /* at most 4 GiB */
    CHECK(vgpu_meminfo_spares(huge, 4 * GIB) && !vgpu_meminfo_spares(huge, 4 * GIB + 1));
    CHECK(!vgpu_meminfo_spares("MemTotal: 1048576 kB\nMemAvailable: 1000 kB\n", 1));
    /* nobody knows */
    CHECK(vgpu_meminfo_spares("", UINT64_MAX) && vgpu_meminfo_spares("MemTotal: 1 kB\n", UINT64_MAX));
    CHECK(vgpu_tier_rounded(1) == 2 * MIB && vgpu_tier_rounded(2 * MIB) == 2 * MIB &&
          vgpu_tier_rounded(UINT64_MAX) == 0);
}

int main(void) {
    vgpu_driver_entries[ENTRY_cuMemAddressReserve] = address_reserve;
    vgpu_driver_entries[ENTRY_cuMemAddressFree] = address_free;
    test_names();
    test_pinned_blocks();
    test_large_ranges();
    test_gaps();
    test_lock();
    test_cancelled_threads_let_go();
    test_a_child_begins_with_nothing();
    test_who_may_reach_it();
    test_what_the_machine_spares();
    return 0;
}
