/* How blocks end beside contexts that other threads destroy, against a driver that is played here: prints nothing and
 * ends with 0, or names the check that failed. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "check.h"
#include "ledger/local.h"
#include "reserves/capture.h"
#include "tier/blocks.h"
#include "tier/tier.h"

#define MIB (UINT64_C(1) << 20)
#define CONTEXT(i) ((CUcontext)(uintptr_t)(0x1000 * (i)))
#define STREAM(i) ((CUstream)(uintptr_t)(0x100000 * (i))) /* of that context */
#define TURNS 20000

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

struct vgpu_local *vgpu_local_slowly(void) {
    return NULL;
}

void vgpu_charge_fixed(struct vgpu_ticket *resident, uint64_t bytes) {
    (void)resident, (void)bytes;
}

static uint64_t given_back;

void vgpu_uncharge(struct vgpu_ticket ticket, uint64_t bytes) {
    (void)ticket;
    given_back += bytes;
}

void vgpu_log(enum vgpu_log_level level, const char *format, ...) {
    (void)level, (void)format;
}

bool vgpu_place_of_stream(CUstream stream, struct vgpu_place *place) {
    *place = (struct vgpu_place){.context = CONTEXT((uintptr_t)stream / 0x100000)};
    return true;
}

static __thread CUcontext stack[4];
static __thread int depth;
static CUcontext dying;                    /* the driver destroys it: nobody may enter it */
static atomic_bool event_busy, third_busy; /* those of context 3 */
static atomic_int queries;
static unsigned long long newer; /* streams: handles have been given again */
static int events;
static unsigned unmapped, freed;
static atomic_int waiting; /* 1: a thread waits in a context, 2: another one is about to destroy it */

static CUresult get_current(CUcontext *context) {
    *context = depth ? stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}

static CUresult push(CUcontext context) {
    CHECK(context && context != dying);
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

static CUresult pop(CUcontext *context) {
    CHECK(depth);
    *context = stack[--depth];
    return CUDA_SUCCESS;
}

static CUresult event_create(CUevent *event, unsigned flags) {
    (void)flags;
    *event = (CUevent)(uintptr_t)(0x900000 + (uintptr_t)stack[depth - 1] + (uintptr_t)++events);
    return CUDA_SUCCESS;
}

static CUcontext of_event(CUevent event) {
    return CONTEXT(((uintptr_t)event - 0x900000) / 0x1000);
}

static CUresult event_destroy(CUevent event) {
    CHECK(event && of_event(event) != dying);
    events--;
    return CUDA_SUCCESS;
}

static CUresult record(CUevent event, CUstream stream) {
    return event && stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult event_query(CUevent event) {
    CHECK(event && depth && stack[depth - 1] == of_event(event) && of_event(event) != dying);
    atomic_fetch_add(&queries, 1);
    return (of_event(event) == CONTEXT(3) ? third_busy : event_busy) ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

static CUresult stream_id(CUstream stream, unsigned long long *id) {
    *id = (uintptr_t)stream + newer;
    return CUDA_SUCCESS;
}

static CUresult context_synchronize(void) {
    CHECK(depth && stack[depth - 1] != dying);
    if (depth == 1)
        return CUDA_SUCCESS;
    atomic_store(&waiting, 1);
    while (atomic_load(&waiting) == 1)
        sched_yield();
    for (int i = 0; i < TURNS; i++) { /* the other one has every chance to go on, and must not */
        CHECK(atomic_load(&waiting) == 2);
        sched_yield();
    }
    return CUDA_SUCCESS;
}

static CUresult unmap(CUdeviceptr at, size_t bytes) {
    CHECK(at && bytes);
    unmapped++;
    return CUDA_SUCCESS;
}

static CUresult release(CUmemGenericAllocationHandle handle) {
    return handle ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult free_host(void *memory) {
    CHECK(memory && depth);
    freed++;
    return CUDA_SUCCESS;
}

static CUresult reserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wish,
                        unsigned long long flags) {
    static CUdeviceptr next = 0x7f0012200000;
    (void)alignment, (void)wish, (void)flags;
    *address = next;
    next += bytes;
    return CUDA_SUCCESS;
}

static CUresult unreserve(CUdeviceptr address, size_t bytes) {
    (void)address, (void)bytes;
    return CUDA_SUCCESS;
}

static void play(void) {
    vgpu_driver_entries[ENTRY_cuCtxGetCurrent] = (void *)get_current;
    vgpu_driver_entries[ENTRY_cuCtxPushCurrent_v2] = (void *)push;
    vgpu_driver_entries[ENTRY_cuCtxPopCurrent_v2] = (void *)pop;
    vgpu_driver_entries[ENTRY_cuCtxSynchronize] = (void *)context_synchronize;
    vgpu_driver_entries[ENTRY_cuEventCreate] = (void *)event_create;
    vgpu_driver_entries[ENTRY_cuEventDestroy_v2] = (void *)event_destroy;
    vgpu_driver_entries[ENTRY_cuEventRecord] = (void *)record;
    vgpu_driver_entries[ENTRY_cuEventQuery] = (void *)event_query;
    vgpu_driver_entries[ENTRY_cuStreamGetId] = (void *)stream_id;
    vgpu_driver_entries[ENTRY_cuMemUnmap] = (void *)unmap;
    vgpu_driver_entries[ENTRY_cuMemRelease] = (void *)release;
    vgpu_driver_entries[ENTRY_cuMemFreeHost] = (void *)free_host;
    vgpu_driver_entries[ENTRY_cuMemAddressReserve] = (void *)reserve;
    vgpu_driver_entries[ENTRY_cuMemAddressFree] = (void *)unreserve;
}

/* In context 2, with nothing there. */
static void begin(void) {
    vgpu_tier_blocks_forget();
    vgpu_tier_free_forget();
    given_back = unmapped = freed = 0;
    events = depth = 0;
    event_busy = true;
    dying = NULL;
    newer = 0;
    push(CONTEXT(2));
}

static CUdeviceptr make(int context, bool pinned) {
    struct vgpu_tier_record record = {
        .asked = 2 * MIB, .bytes = 2 * MIB, .context = CONTEXT(context), .handle = 7, .pinned = pinned};
    vgpu_tier_lock();
    record.base = vgpu_tier_reserve(record.bytes);
    if (pinned) {
        record.handle = 0;
        record.memory = &record;
    }
    CHECK(vgpu_tier_enter(&record) != VGPU_TIER_NONE);
    vgpu_tier_unlock();
    return record.base;
}

static void free_in_order(CUdeviceptr block, int context) {
    CUresult result;
    CHECK(vgpu_tier_free_in_order(block, STREAM(context), &result) && result == CUDA_SUCCESS);
}

static uint64_t begins_to_go(int i) {
    vgpu_tier_context_going(CONTEXT(i));
    dying = CONTEXT(i);
    return vgpu_tier_moment();
}

static void went(int i, bool gone, uint64_t moment) {
    dying = NULL;
    if (gone)
        dying = CONTEXT(i); /* for good */
    vgpu_tier_context_went(CONTEXT(i), gone, moment);
}

/* Whichever of the two contexts goes, the block's or its event's. */
static void check_a_block_that_leaves_is_not_asked_for_where_a_context_goes(void) {
    for (int kind = 0; kind < 8; kind++) {
        const int of_block = kind & 1 ? 1 : 3, of_stream = kind & 1 ? 3 : 1;
        const bool pinned = kind & 2, gone = kind & 4;
        begin();
        free_in_order(make(of_block, pinned), of_stream);
        event_busy = false;
        const uint64_t moment = begins_to_go(1);
        CHECK(!vgpu_tier_collect());
        vgpu_tier_finish();
        CHECK(!given_back);
        went(1, gone, moment);
        CHECK(given_back == (gone ? 4 * MIB : 0) && vgpu_tier_collect() == !gone && given_back == 4 * MIB);
        CHECK(pinned ? freed == !(gone && of_block == 1) : unmapped == 1); /* pinned memory went with its context */
        CHECK(events == (gone && of_stream == 1));                         /* so did the event */
        CHECK(!vgpu_tier_collect());
    }
}

/* A context that two calls may destroy, such as releases of it. */
static void check_a_context_that_two_may_destroy(void) {
    begin();
    free_in_order(make(1, false), 1);
    event_busy = false;
    const uint64_t first = begins_to_go(1), second = begins_to_go(1);
    went(1, false, first);
    dying = CONTEXT(1);
    CHECK(!vgpu_tier_collect());
    went(1, true, second);
    CHECK(given_back == 4 * MIB && !vgpu_tier_collect());
}

/* Another context has its handle before the driver has answered. */
static void check_what_is_of_the_next_one_with_the_handle_stays(void) {
    begin();
    const CUdeviceptr old = make(3, false);
    make(1, false);
    const uint64_t moment = begins_to_go(1);
    dying = NULL; /* the driver has given its handle to another one */
    make(1, false);
    free_in_order(old, 1);
    vgpu_tier_context_went(CONTEXT(1), true, moment);
    CHECK(unmapped == 1 && events == 1 && !vgpu_tier_collect()); /* what was made in the first one */
    event_busy = false;
    CHECK(vgpu_tier_collect() && unmapped == 2 && events == 0);
}

static void *finish(void *unused) {
    push(CONTEXT(2));
    vgpu_tier_finish();
    return unused;
}

static void check_a_context_that_goes_is_not_waited_for(void) {
    CUresult result;
    begin();
    vgpu_open_captures = 1;
    CHECK(vgpu_tier_free(make(1, false), &result) && result == CUDA_SUCCESS);
    vgpu_open_captures = 0;
    const uint64_t moment = begins_to_go(1);
    vgpu_tier_finish();
    CHECK(!given_back);
    went(1, true, moment);
    CHECK(given_back == 4 * MIB);
}

/* A block that was freed beside a capture is waited for in its context, which must not go meanwhile. */
static void check_a_context_that_is_waited_for_does_not_go(void) {
    pthread_t thread;
    CUresult result;
    CUcontext popped;
    begin();
    pop(&popped);
    push(CONTEXT(1));
    const CUdeviceptr block = make(1, true);
    vgpu_open_captures = 1;
    CHECK(vgpu_tier_free(block, &result) && result == CUDA_SUCCESS && !given_back);
    vgpu_open_captures = 0;
    CHECK(pthread_create(&thread, NULL, finish, NULL) == 0);
    while (atomic_load(&waiting) != 1)
        sched_yield();
    atomic_store(&waiting, 2);
    const uint64_t moment = begins_to_go(1);
    atomic_store(&waiting, 3);
    CHECK(given_back == 4 * MIB && freed == 1);
    went(1, true, moment);
    pthread_join(thread, NULL);
    CHECK(given_back == 4 * MIB && freed == 1);
}

/* Memory that was made in a green context is the primary context's (3 here), and what leaves in the order of its
 * streams leaves before it goes. */
static void check_memory_outlives_a_green_context(void) {
    for (int kind = 0; kind < 3; kind++) {
        const bool gone = kind > 0, finished = kind < 2; /* else it is waited for in the heir */
        CUresult result;
        CUcontext popped;
        begin();
        pop(&popped);
        const CUdeviceptr kept = make(1, false), other = make(3, false);
        free_in_order(make(1, false), 1);
        free_in_order(other, 1);
        CHECK(!vgpu_tier_collect() && !given_back);
        CHECK(vgpu_tier_green_going(CONTEXT(1)));
        dying = CONTEXT(1);
        const uint64_t moment = vgpu_tier_moment();
        CHECK(!vgpu_tier_collect());
        dying = gone ? CONTEXT(1) : NULL;
        vgpu_tier_green_went(CONTEXT(1), gone, CONTEXT(3), finished, moment);
        CHECK(given_back == (gone && finished ? 8 * MIB : 0) && !vgpu_tier_collect());
        if (!finished)
            vgpu_tier_finish();
        event_busy = false;
        CHECK(vgpu_tier_collect() == !gone && given_back == 8 * MIB);
        CHECK(vgpu_tier_free(kept, &result) && result == CUDA_SUCCESS && given_back == 12 * MIB);
    }
}

static void *pass(void *busy) {
    const int before = atomic_load(&queries);
    while (atomic_load(&queries) < before + 2)
        sched_yield();
    push(CONTEXT(2));
    if (busy == &third_busy)
        free_in_order(make(1, false), 1); /* after it was asked for memory */
    *(atomic_bool *)busy = false;
    return NULL;
}

/* Another thread lets it pass while it is waited for. */
static bool awaits(struct vgpu_tier_patience *patience, atomic_bool *busy) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, pass, busy) == 0);
    const bool ended = vgpu_tier_await(patience);
    pthread_join(thread, NULL);
    return ended;
}

/* Memory that had been freed when it was asked for is worth waiting for; what others free and allocate meanwhile is
 * not. */
static void check_who_needs_memory_waits_for_what_was_freed(void) {
    begin();
    struct vgpu_tier_patience patience = vgpu_tier_patience();
    CHECK(!vgpu_tier_await(&patience)); /* nothing */
    free_in_order(make(1, false), 1);
    free_in_order(make(1, false), 3);
    CHECK(!vgpu_tier_await(&patience)); /* it had failed before */
    patience = vgpu_tier_patience();
    third_busy = true;
    CHECK(awaits(&patience, &event_busy) && given_back == 4 * MIB);
    event_busy = true;
    CHECK(awaits(&patience, &third_busy) && given_back == 8 * MIB);
    atomic_store(&queries, 0);
    CHECK(!vgpu_tier_await(&patience) && queries == 0 && given_back == 8 * MIB);

    patience = vgpu_tier_patience(); /* others have seen to it since */
    event_busy = false;
    CHECK(vgpu_tier_collect() && vgpu_tier_await(&patience) && !vgpu_tier_await(&patience));
    event_busy = true;
    patience = vgpu_tier_patience();
    free_in_order(make(1, false), 1);
    vgpu_open_captures = 1;
    CHECK(!vgpu_tier_await(&patience) && vgpu_now_ns() < patience.until_ns);
    vgpu_open_captures = 0;
}

static bool take_back(CUdeviceptr *block, uint64_t bytes, int context) {
    const struct vgpu_place place = {.context = CONTEXT(context)};
    return vgpu_tier_take_back(block, bytes, STREAM(context), &place);
}

static void check_a_stream_has_its_own_memory_again(void) {
    CUdeviceptr block, again = 0;
    begin();
    free_in_order(block = make(1, false), 1);
    const uint64_t before = vgpu_tier_record(vgpu_tier_find(block))->buffer_id;
    CHECK(!take_back(&again, 2 * MIB - 1, 1) && !take_back(&again, 2 * MIB, 2));
    newer = 1;
    CHECK(!take_back(&again, 2 * MIB, 1)); /* another stream under its handle */
    newer = 0;
    CHECK(take_back(&again, 2 * MIB, 1) && again == block && events == 0 && !given_back);
    CHECK(vgpu_tier_record(vgpu_tier_find(block))->buffer_id > before &&
          !vgpu_tier_record(vgpu_tier_find(block))->leaving);
    CHECK(!take_back(&again, 2 * MIB, 1));
    free_in_order(block, 1);
    vgpu_tier_hold(block); /* others see it */
    CHECK(!take_back(&again, 2 * MIB, 1));
    event_busy = false;
    CHECK(vgpu_tier_collect() && given_back == 4 * MIB && events == 0);
    free_in_order(make(1, false), 2); /* in the order of another context's */
    CHECK(!take_back(&again, 2 * MIB, 1) && !take_back(&again, 2 * MIB, 2));
}

int main(void) {
    alarm(60);
    play();
    check_a_block_that_leaves_is_not_asked_for_where_a_context_goes();
    check_a_context_that_two_may_destroy();
    check_what_is_of_the_next_one_with_the_handle_stays();
    check_a_context_that_goes_is_not_waited_for();
    check_memory_outlives_a_green_context();
    check_a_context_that_is_waited_for_does_not_go();
    check_who_needs_memory_waits_for_what_was_freed();
    check_a_stream_has_its_own_memory_again();
    return 0;
}
