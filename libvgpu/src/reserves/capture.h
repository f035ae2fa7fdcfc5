/* Stream capture: work that is recorded, not run. Nothing of it is charged, and no call of ours may disturb it. */
#ifndef VGPU_CAPTURE_H
#define VGPU_CAPTURE_H
#include <stdatomic.h>
#include <stdbool.h>

#include "loader/driver.h"

extern atomic_int vgpu_open_captures; /* of all threads; maintained by capture.c */

/* A capture is open on the stream that it began on until its end, or that of the stream or its context. */
struct vgpu_capture;
/* Before the driver begins one: it counts as open. NULL: no memory to remember it, so it must not begin. */
struct vgpu_capture *vgpu_capture_beginning(CUstream stream);
/* Ends those that began on a stream, or (stream NULL) on streams of a context. */
void vgpu_captures_end(CUstream stream, CUcontext context);
/* Takes those that began on a stream out of the list; they stay open. */
struct vgpu_capture *vgpu_captures_take(CUstream stream);
/* Ends what was taken out or has not begun, or puts it (back) into the list. */
void vgpu_captures_settle(struct vgpu_capture *taken, bool ended);

/* True while any thread of this process captures: then our own events and queries need vgpu_relax, since a capture in
 * global mode forbids them to every thread that does not say otherwise. */
static inline bool vgpu_any_capture(void) {
    return atomic_load_explicit(&vgpu_open_captures, memory_order_relaxed) > 0;
}

/* True if work on this stream is being captured. */
static inline bool vgpu_capturing(CUstream stream) {
    if (__builtin_expect(!vgpu_any_capture(), 1))
        return false;
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    __typeof__(&cuStreamIsCapturing) ask = DRIVER(cuStreamIsCapturing);
    return ask && ask(stream, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* True if it may be, so that nothing of ours may be done there: also where the driver does not say. */
static inline bool vgpu_capture_unclear(CUstream stream) {
    if (__builtin_expect(!vgpu_any_capture(), 1))
        return false;
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    __typeof__(&cuStreamIsCapturing) ask = DRIVER(cuStreamIsCapturing);
    return !ask || ask(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

bool vgpu_recording_slowly(CUstream stream);
/* True: the stream is being captured and stays so until vgpu_recorded, so that a call to the driver is recorded, not
 * done, and takes no memory. What the driver will not say is not true. */
static inline bool vgpu_recording(CUstream stream) {
    return __builtin_expect(vgpu_any_capture(), 0) && vgpu_recording_slowly(stream);
}
void vgpu_recorded(void);
/* Around the driver's call that ends a capture. */
void vgpu_captures_ending(void);
void vgpu_captures_ended(void);
/* Around the one that destroys a stream or a context, whose handle another one may get: until it is over, nothing
 * counts as recorded there. */
struct vgpu_departure {
    struct vgpu_departure *next;
    CUstream stream;
    CUcontext context; /* NULL: the stream alone */
};
void vgpu_capture_departs(struct vgpu_departure *departure);
void vgpu_capture_departed(const struct vgpu_departure *departure);

/* Around calls of our own: no capture that another thread has open, or begins meanwhile, refuses them or breaks by
 * them. */
static inline CUstreamCaptureMode vgpu_relax(void) {
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (DRIVER(cuThreadExchangeStreamCaptureMode))
        DRIVER(cuThreadExchangeStreamCaptureMode)(&mode);
    return mode;
}

/* `mode`: what vgpu_relax answered. */
static inline void vgpu_restore(CUstreamCaptureMode mode) {
    if (DRIVER(cuThreadExchangeStreamCaptureMode))
        DRIVER(cuThreadExchangeStreamCaptureMode)(&mode);
}
/* In a forked child: process.h. */
void vgpu_captures_forget(void);
#endif
