/* Stream capture: work that is recorded, not run. It is not charged, and no call of the library may disturb it. */
#ifndef VGPU_CAPTURE_H
#define VGPU_CAPTURE_H
#include <stdatomic.h>
#include <stdbool.h>

#include "loader/driver.h"

extern atomic_int vgpu_open_captures; /* of all threads; capture.c counts */

/* A capture is open until its end, or until its first stream or that stream's context is destroyed. */
struct vgpu_capture;
/* Call before the driver begins a capture; from now on it counts as open. NULL: no memory to remember it, so it must
 * not begin. */
struct vgpu_capture *vgpu_capture_beginning(CUstream stream);
/* Ends the captures that began on a stream, or (stream NULL) on any stream of a context. */
void vgpu_captures_end(CUstream stream, CUcontext context);
/* Takes the captures that began on a stream out of the list; they stay open. */
struct vgpu_capture *vgpu_captures_take(CUstream stream);
/* Ends captures that were taken out or have not begun, or puts them (back) into the list. */
void vgpu_captures_settle(struct vgpu_capture *taken, bool ended);

/* True while any thread of this process captures. Then the library's own events and queries need vgpu_relax: a capture
 * in global mode forbids them to every thread with the default mode. */
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

/* True if work on this stream may be captured, also if the driver does not say: then the library must not use the
 * stream. */
static inline bool vgpu_capture_unclear(CUstream stream) {
    if (__builtin_expect(!vgpu_any_capture(), 1))
        return false;
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    __typeof__(&cuStreamIsCapturing) ask = DRIVER(cuStreamIsCapturing);
    return !ask || ask(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

bool vgpu_recording_slowly(CUstream stream);
/* True: the stream is being captured and stays so until vgpu_recorded. So a driver call is recorded, not executed, and
 * takes no memory. False also if the driver does not say. */
static inline bool vgpu_recording(CUstream stream) {
    return __builtin_expect(vgpu_any_capture(), 0) && vgpu_recording_slowly(stream);
}
void vgpu_recorded(void);
/* Around the driver's call that ends a capture. */
void vgpu_captures_ending(void);
void vgpu_captures_ended(void);
/* Around the driver's call that destroys a stream or a context, whose handle may be reused. Until it is over, no call
 * counts as recorded there. */
struct vgpu_departure {
    struct vgpu_departure *next;
    CUstream stream;
    CUcontext context; /* NULL: only the stream */
};
void vgpu_capture_departs(struct vgpu_departure *departure);
void vgpu_capture_departed(const struct vgpu_departure *departure);

/* Around the library's own driver calls: no open or new capture of another thread refuses them or breaks because of
 * them. */
static inline CUstreamCaptureMode vgpu_relax(void) {
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (DRIVER(cuThreadExchangeStreamCaptureMode))
        DRIVER(cuThreadExchangeStreamCaptureMode)(&mode);
    return mode;
}

/* `mode`: the result of vgpu_relax. */
static inline void vgpu_restore(CUstreamCaptureMode mode) {
    if (DRIVER(cuThreadExchangeStreamCaptureMode))
        DRIVER(cuThreadExchangeStreamCaptureMode)(&mode);
}
/* In a forked child: process.h. */
void vgpu_captures_forget(void);
#endif
