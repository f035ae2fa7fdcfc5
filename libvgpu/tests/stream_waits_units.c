/* Waits for events that are put in streams, and green contexts that go, against a driver that is played here: prints
 * nothing and ends with 0, or names the check that failed. */
#define _GNU_SOURCE
#include "check.h"
#include "pacer/inspect.h"
#include "pacer/samples.h"
#include "streams_driver.h"
#include "tier/move.h"
#include "tier/tier.h"

#define GREEN ((CUgreenCtx)(uintptr_t)0x77)
#define EVENT ((CUevent)(uintptr_t)0x88)

static unsigned inside, outside;

CUresult vgpu_no_cuda(void) {
    return CUDA_ERROR_NOT_FOUND;
}

void vgpu_safe_point_slowly(void) {
    CHECK(!vgpu_gate_inside());
}

void vgpu_safe_point_idle(void) {
}

/* Measurements that a green context takes along. */
static unsigned detaching;
atomic_int vgpu_samples_outstanding;

void vgpu_pacer_look(void) {
}

void vgpu_pacer_waits(struct vgpu_wait *wait) {
    wait->begun_ns = 0;
}

void vgpu_pacer_waited_for(const struct vgpu_wait *wait) {
    (void)wait;
}

void vgpu_samples_going(CUcontext context) {
    CHECK(context == CONTEXT(2) || !context);
    detaching++;
}

void vgpu_samples_detached(CUcontext context, bool gone) {
    (void)context, (void)gone;
    CHECK(detaching-- == 1);
}

void vgpu_places_forget(void) {
}

static CUresult count(void) {
    inside += vgpu_gate_inside();
    outside += !vgpu_gate_inside();
    return CUDA_SUCCESS;
}

static CUresult of_green(CUcontext *context, CUgreenCtx green) {
    *context = CONTEXT(2);
    return green == GREEN ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

/* What the tier is told of a green context, in this order. */
static unsigned going, destroyed, went_to_primary, went_for_good, stayed;
static bool primary_stays;

bool vgpu_primary_is_active(CUdevice device) {
    return device == 5 && (primary_stays || !destroyed);
}

bool vgpu_tier_enter_context(CUcontext context, bool *pushed) {
    return *pushed = push(context) == CUDA_SUCCESS;
}

void vgpu_tier_leave_context(bool pushed) {
    CUcontext popped;
    if (pushed)
        pop(&popped);
}

uint64_t vgpu_tier_moment(void) {
    return going;
}

bool vgpu_tier_green_going(CUcontext context) {
    CHECK(context == CONTEXT(2) && !vgpu_gate_inside() && !destroyed);
    going++;
    return true;
}

void vgpu_tier_green_went(CUcontext context, bool gone, CUcontext heir, bool finished, uint64_t moment) {
    CHECK(finished && context == CONTEXT(2) && moment == 1 && !vgpu_gate_inside());
    went_to_primary += gone && heir == CONTEXT(1);
    stayed += !gone;
}

void vgpu_tier_context_went(CUcontext context, bool gone, uint64_t moment) {
    CHECK(context == CONTEXT(2) && gone && moment == 1 && !vgpu_gate_inside());
    went_for_good++;
}

static CUresult get_device(CUdevice *device) {
    CHECK(depth && stack[depth - 1] == CONTEXT(2));
    *device = 5;
    return CUDA_SUCCESS;
}

static int retained;

static CUresult retain(CUcontext *context, CUdevice device) {
    retained++;
    *context = CONTEXT(1);
    return device == 5 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

static CUresult release(CUdevice device) {
    retained--;
    return device == 5 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

static CUresult destroy_green(CUgreenCtx green) {
    CHECK(vgpu_gate_inside() && going == 1);
    destroyed += green == GREEN && !busy[0];
    return busy[0] ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

/* Its memory goes to the primary context, or with it. */
static void check_green_contexts_leave_their_memory(void) {
    for (int kind = 0; kind < 3; kind++) {
        begin();
        going = destroyed = went_to_primary = went_for_good = stayed = 0;
        primary_stays = kind != 1;
        busy[0] = kind == 2; /* the driver refuses */
        CHECK(cuGreenCtxDestroy(GREEN) == (kind == 2 ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS) && going == 1 &&
              retained == 0);
        CHECK(went_to_primary == (kind == 0) && went_for_good == (kind == 1) && stayed == (kind == 2));
    }
}

static CUresult call(int which) {
    switch (which) {
    case 0: return cuStreamWaitEvent(NULL, EVENT, 0);
    case 1: return cuStreamWaitEvent_ptsz(NULL, EVENT, 0);
    case 2: return cuCtxWaitEvent(CONTEXT(1), EVENT);
    default: return cuGreenCtxWaitEvent(GREEN, EVENT);
    }
}

/* Nobody closes the gate meanwhile, and whoever closes it later knows of it. */
static void check_waits_are_handed_in(void) {
    for (int which = 0; which < 4; which++) {
        inside = outside = 0;
        begin();
        CHECK(call(which) == CUDA_SUCCESS && inside == 1 && !outside && !vgpu_gate_inside());
        CHECK(vgpu_streams_idle());
        legacy_busy[1] = which == 0 || which == 2;
        own_busy[1] = which == 1;
        legacy_busy[2] = which == 3;
        CHECK(vgpu_streams_idle() == (which == 1)); /* a thread's own had nothing to do when it was asked before */
        if (which == 1)
            CHECK(call(which) == CUDA_SUCCESS && !vgpu_streams_idle());
    }
}

int main(void) {
    play();
    vgpu_driver_entries[ENTRY_cuStreamWaitEvent] = (void *)count;
    vgpu_driver_entries[ENTRY_cuStreamWaitEvent_ptsz] = (void *)count;
    vgpu_driver_entries[ENTRY_cuCtxWaitEvent] = (void *)count;
    vgpu_driver_entries[ENTRY_cuGreenCtxWaitEvent] = (void *)count;
    vgpu_driver_entries[ENTRY_cuCtxFromGreenCtx] = (void *)of_green;
    for (int which = 0; which < 4; which++)
        CHECK(call(which) == CUDA_SUCCESS);
    CHECK(outside == 4 && !inside); /* where nothing can move */
    vgpu_gate_arm();
    check_waits_are_handed_in();
    vgpu_driver_entries[ENTRY_cuGreenCtxDestroy] = (void *)destroy_green;
    vgpu_driver_entries[ENTRY_cuCtxGetDevice] = (void *)get_device;
    vgpu_driver_entries[ENTRY_cuDevicePrimaryCtxRetain] = (void *)retain;
    vgpu_driver_entries[ENTRY_cuDevicePrimaryCtxRelease_v2] = (void *)release;
    check_green_contexts_leave_their_memory();
    return 0;
}
