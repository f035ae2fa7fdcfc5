/* The charge of a pool against a driver that is played here, step by step: prints nothing and ends with 0, or names the
 * check that failed. */

#include "check.h"
#include "reserves/capture.h"
#include "reserves/pools.h"

#define MIB (UINT64_C(1) << 20)
#define POOL ((CUmemoryPool)16)
#define MANAGED ((CUmemoryPool)48) /* which the program has not made: a device's own */

static uint64_t reserved, used; /* of the only pool */
static uint64_t charged, limit; /* of the only card */
static struct vgpu_pool *pool;
static bool destroyed; /* nobody may ask about it any more */

_Atomic(void *) vgpu_driver_entries[VGPU_ENTRY_COUNT];
atomic_int vgpu_open_captures;

void *vgpu_driver_entry_slowly(enum vgpu_entry entry) {
    (void)entry;
    return NULL;
}

static CUresult get_attribute(CUmemoryPool handle, CUmemPool_attribute which, void *value) {
    CHECK(handle != POOL || !destroyed);
    if (handle == MANAGED && which == CU_MEMPOOL_ATTR_ALLOCATION_TYPE) {
        *(cuuint64_t *)value = CU_MEM_ALLOCATION_TYPE_MANAGED;
        return CUDA_SUCCESS;
    }
    *(cuuint64_t *)value = handle != POOL ? 0 : which == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT ? reserved : used;
    return CUDA_SUCCESS;
}

static CUresult trim_to(CUmemoryPool handle, size_t keep) {
    uint64_t least = ((keep > used ? keep : used) + 32 * MIB - 1) / (32 * MIB) * (32 * MIB);
    CHECK(handle == POOL && !destroyed);
    reserved = least < reserved ? least : reserved;
    return CUDA_SUCCESS;
}

unsigned vgpu_card_of_device(CUdevice device) {
    return (unsigned)device;
}

bool vgpu_location_is_known(const CUmemLocation *location) {
    return location->type != CU_MEM_LOCATION_TYPE_INVALID;
}

CUdevice vgpu_device_of_location(const CUmemLocation *location) {
    return location->id;
}

bool vgpu_charge(unsigned card, enum vgpu_account_index account, uint64_t bytes, struct vgpu_ticket *ticket) {
    *ticket = (struct vgpu_ticket){.lane = 1, .card = (uint8_t)card, .account = (uint8_t)account};
    if (bytes > limit - charged)
        return false;
    charged += bytes;
    return true;
}

void vgpu_charge_always(unsigned card, enum vgpu_account_index account, uint64_t bytes, struct vgpu_ticket *ticket) {
    *ticket = (struct vgpu_ticket){.lane = 1, .card = (uint8_t)card, .account = (uint8_t)account};
    charged += bytes;
}

void vgpu_release(struct vgpu_ticket ticket, uint64_t bytes) {
    (void)ticket;
    CHECK(bytes <= charged);
    charged -= bytes;
}

uint64_t vgpu_used(unsigned card, enum vgpu_account_index account) {
    (void)card;
    (void)account;
    return charged;
}

void vgpu_count_kind(unsigned card, enum vgpu_kind kind, int64_t bytes) {
    (void)card;
    (void)kind;
    (void)bytes;
}

/* What cuMemAllocAsync does up to the driver's call; the growth that was charged. */
static uint64_t begin(uint64_t bytes) {
    struct vgpu_ticket ticket;
    uint64_t growth = vgpu_pool_growth(pool, bytes);
    if (growth) {
        CHECK(vgpu_charge(0, VGPU_DEVICE_BYTES, growth, &ticket));
        vgpu_pool_expect(pool, ticket, growth);
    }
    return growth;
}

/* The driver's call, and what comes after it. */
static bool end(uint64_t growth, uint64_t bytes) {
    used += bytes;
    if (used > reserved)
        reserved = (used + 32 * MIB - 1) / (32 * MIB) * (32 * MIB);
    CHECK(reserved <= charged); /* nobody else may have been given that meanwhile */
    return vgpu_pool_settle(pool, growth, bytes, true);
}

static void free_bytes(uint64_t bytes) {
    used -= bytes;
    vgpu_pool_forget(pool, bytes);
}

static void check_plain(void) {
    uint64_t growth = begin(40 * MIB);
    CHECK(growth == 64 * MIB && charged == 64 * MIB && end(growth, 40 * MIB) && charged == 64 * MIB);
    CHECK(begin(24 * MIB) == 0 && end(0, 24 * MIB) && charged == 64 * MIB);
    free_bytes(64 * MIB); /* the pool keeps it */
    CHECK(charged == 64 * MIB);
    trim_to(POOL, 0);
    vgpu_pool_trimmed(POOL);
    CHECK(charged == 0);
}

/* An allocation counts on the unused reserve, and before it reaches the driver another thread has that given back. */
static void check_a_promise_outlives_a_trim(void) {
    uint64_t growth = begin(64 * MIB);
    CHECK(end(growth, 64 * MIB));
    free_bytes(64 * MIB);
    CHECK(begin(40 * MIB) == 0);
    trim_to(POOL, 0);
    vgpu_pool_trimmed(POOL);
    CHECK(reserved == 0 && charged == 64 * MIB);
    CHECK(end(0, 40 * MIB) && charged == 64 * MIB);
    free_bytes(40 * MIB);
    CHECK(vgpu_pools_give_back(0) && charged == 0);
}

/* Two count on it: the second is not promised what the first was. */
static void check_a_promise_is_made_once(void) {
    uint64_t growth = begin(64 * MIB), second;
    CHECK(end(growth, 64 * MIB));
    free_bytes(64 * MIB);
    CHECK(begin(40 * MIB) == 0);
    second = begin(40 * MIB);
    CHECK(second == 32 * MIB && charged == 96 * MIB);
    CHECK(end(0, 40 * MIB) && end(second, 40 * MIB) && charged == reserved);
    free_bytes(80 * MIB);
    CHECK(vgpu_pools_give_back(0) && charged == 0);
}

/* What was promised and not tried, or refused by the driver, is nobody's any more. */
static void check_a_promise_that_is_taken_back(void) {
    uint64_t growth = begin(64 * MIB);
    CHECK(end(growth, 64 * MIB));
    free_bytes(64 * MIB);
    CHECK(begin(40 * MIB) == 0);
    vgpu_pool_refused(pool, 40 * MIB);
    CHECK(begin(50 * MIB) == 0 && vgpu_pool_settle(pool, 0, 50 * MIB, false));
    CHECK(vgpu_pools_give_back(0) && charged == 0 && reserved == 0);
}

/* Giving back for another's sake leaves what is promised. */
static void check_giving_back_leaves_what_is_promised(void) {
    uint64_t growth = begin(128 * MIB);
    CHECK(end(growth, 128 * MIB));
    free_bytes(128 * MIB);
    CHECK(begin(40 * MIB) == 0);
    CHECK(vgpu_pools_give_back(0) && reserved == 64 * MIB && charged == 64 * MIB);
    CHECK(end(0, 40 * MIB) && charged == 64 * MIB);
    free_bytes(40 * MIB);
    CHECK(vgpu_pools_give_back(0) && charged == 0);
}

/* Records of pools that are gone are used again, but not while somebody is about to say that the old pool is gone. */
static void check_records_are_used_again(void) {
    const CUmemoryPool other = (CUmemoryPool)32;
    vgpu_pool_made(other, 0, false);
    struct vgpu_pool *first = vgpu_pool_going(other);
    vgpu_pool_made(other, 1, false); /* the driver has destroyed it, and given its handle to another */
    struct vgpu_pool *second = vgpu_pool_going(other);
    CHECK(first && second && first != second && vgpu_pool_card(second) == 1);
    vgpu_pool_went(first, true);
    CHECK(vgpu_pool_of(other, NULL, &pool) && pool == second);
    vgpu_pool_went(second, false);
    CHECK(vgpu_pool_of(other, NULL, &pool) && pool == second);
    vgpu_pool_went(vgpu_pool_going(other), true);
    vgpu_pool_made(other, 2, false);
    CHECK(vgpu_pool_of(other, NULL, &pool) && (pool == first || pool == second) && vgpu_pool_card(pool) == 2);
    vgpu_pool_went(vgpu_pool_going(other), true);
}

/* While the program destroys a pool, the driver is asked nothing about it; when it has refused that, all is as before.
 */
static void check_who_destroys_a_pool_is_the_only_one_to_ask_about_it(void) {
    for (unsigned refused = 2; refused-- > 0;) {
        uint64_t growth = begin(64 * MIB);
        CHECK(end(growth, 64 * MIB));
        struct vgpu_pool *going = vgpu_pool_going(POOL);
        destroyed = true;
        CHECK(going == pool && !vgpu_pools_give_back(0) && charged == 64 * MIB);
        vgpu_pool_trimmed(POOL);
        growth = begin(32 * MIB); /* of nothing that is known to be there */
        CHECK(growth == 32 * MIB && !vgpu_pools_give_back(0) && vgpu_pool_settle(pool, growth, 32 * MIB, false));
        vgpu_pool_forget(pool, 64 * MIB);
        used = 0;
        destroyed = !refused;
        vgpu_pool_went(going, !refused);
        CHECK(charged == (refused ? 64 * MIB : 0));
        CHECK(!refused || (vgpu_pools_give_back(0) && charged == 0));
    }
    destroyed = false;
}

/* The driver gives its handle to another pool before anybody has said that it is gone: what it held unused is on the
 * card no more. */
static void check_a_handle_that_comes_back(void) {
    vgpu_pool_made(POOL, 0, false);
    CHECK(vgpu_pool_of(POOL, NULL, &pool));
    uint64_t growth = begin(64 * MIB);
    CHECK(end(growth, 64 * MIB));
    free_bytes(64 * MIB);
    CHECK(charged == 64 * MIB);
    reserved = 0;
    vgpu_pool_made(POOL, 0, false);
    CHECK(charged == 0);
}

/* What the program has made so, or what the driver says of one that it has not made. */
static void check_what_nothing_can_stand_for(void) {
    const CUmemoryPool other = (CUmemoryPool)32;
    const struct vgpu_place place = {.device = 0};
    for (unsigned special = 2; special-- > 0;) { /* the record is used again */
        vgpu_pool_made(other, 0, special);
        CHECK(vgpu_pool_of(other, &place, &pool) && vgpu_pool_is_special(pool) == special);
        vgpu_pool_went(vgpu_pool_going(other), true);
    }
    CHECK(vgpu_pool_of(other, &place, &pool) && !vgpu_pool_is_special(pool));
    CHECK(vgpu_pool_of(MANAGED, &place, &pool) && vgpu_pool_is_special(pool));
}

int main(void) {
    atomic_store(&vgpu_driver_entries[ENTRY_cuMemPoolGetAttribute], (void *)get_attribute);
    atomic_store(&vgpu_driver_entries[ENTRY_cuMemPoolTrimTo], (void *)trim_to);
    limit = 1024 * MIB;
    vgpu_pool_made(POOL, 0, false);
    CHECK(vgpu_pool_of(POOL, &(struct vgpu_place){.device = 0}, &pool) && pool);
    CHECK(pool);
    check_plain();
    check_a_promise_outlives_a_trim();
    check_a_promise_is_made_once();
    check_a_promise_that_is_taken_back();
    check_giving_back_leaves_what_is_promised();
    check_records_are_used_again();
    CHECK(vgpu_pool_of(POOL, NULL, &pool));
    check_who_destroys_a_pool_is_the_only_one_to_ask_about_it();
    check_a_handle_that_comes_back();
    check_what_nothing_can_stand_for();
    return 0;
}
