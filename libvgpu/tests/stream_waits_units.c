/* Waits for events that are put in streams, against a driver that is played here: prints nothing and ends with 0, or names the check that failed. */
#define _GNU_SOURCE
#include "check.h"
#include "streams_driver.h"
#include "tier_move.h"

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

static CUresult count(void) {
    inside += vgpu_gate_inside();
    outside += !vgpu_gate_inside();
    return CUDA_SUCCESS;
}

static CUresult of_green(CUcontext *context, CUgreenCtx green) {
    *context = CONTEXT(2);
    return green == GREEN ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult call(int which) {
    switch (which) {
    case 0:
        return cuStreamWaitEvent(NULL, EVENT, 0);
    case 1:
        return cuStreamWaitEvent_ptsz(NULL, EVENT, 0);
    case 2:
        return cuCtxWaitEvent(CONTEXT(1), EVENT);
    default:
        return cuGreenCtxWaitEvent(GREEN, EVENT);
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
    return 0;
}
