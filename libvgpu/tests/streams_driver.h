/* The driver of the unit tests of streams, which is played, and what the gate and the streams need besides: contexts,
 * streams and events, of which the checks say what has not finished. */
#ifndef VGPU_TESTS_STREAMS_DRIVER_H
#define VGPU_TESTS_STREAMS_DRIVER_H
#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "check.h"
#include "gate/gate.h"
#include "gate/streams.h"
#include "ledger/charge.h"
#include "reserves/capture.h"

#define CONTEXT(i) ((CUcontext)(uintptr_t)(0x1000 * (i)))
#define STREAM(i) ((CUstream)(uintptr_t)(0x100000 + 0x100 * (i)))
#define STREAMS 8

_Atomic(struct vgpu_local *) vgpu_local_memory;
_Atomic(void *) vgpu_driver_entries[VGPU_ENTRY_COUNT];
atomic_int vgpu_open_captures;

struct vgpu_local *vgpu_local_slowly(void) {
    return NULL;
}

/* A child forgets its parent when it first asks. */
static int process;

enum vgpu_mode vgpu_enforcement_slowly(void) {
    if (process && process != (int)getpid()) {
        process = (int)getpid();
        vgpu_streams_forget();
        vgpu_gate_forget();
    }
    return VGPU_REGION;
}

static int warnings;

void vgpu_log(enum vgpu_log_level level, const char *format, ...) {
    (void)level, (void)format;
    warnings++;
}

void *vgpu_driver_entry_slowly(enum vgpu_entry entry) {
    (void)entry;
    return NULL;
}

/* The driver: what has not finished. */
static __thread CUcontext stack[4];
static __thread int depth;
static bool busy[STREAMS], legacy_busy[4], event_busy, others_busy;
static bool takes_time; /* to pass an event, even with nothing before it */
static __thread bool own_busy[4];
static bool exists[STREAMS];
static int events;
static CUcontext dying; /* the driver destroys it: nobody may enter it */
static CUstream captured;
static __thread CUstreamCaptureMode strictness;
static void (*meanwhile)(void); /* an event is being recorded */
static int records;             /* for a whole context */

static CUresult get_current(CUcontext *context) {
    *context = depth ? stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}

static CUresult push(CUcontext context) {
    CHECK((context == CONTEXT(1) || context == CONTEXT(2)) && context != dying);
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

static CUresult pop(CUcontext *context) {
    CHECK(depth);
    *context = stack[--depth];
    return CUDA_SUCCESS;
}

static size_t number_of(CUstream stream) {
    return ((uintptr_t)stream - 0x100000) / 0x100;
}

static CUresult get_context(CUstream stream, CUcontext *context) {
    *context = CONTEXT(1);
    return number_of(stream) < STREAMS && exists[number_of(stream)] ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult answer(bool is_busy) {
    return is_busy ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

static pthread_barrier_t steps;
static __thread bool stays; /* in the next query */

static CUresult exchange_mode(CUstreamCaptureMode *mode) {
    const CUstreamCaptureMode before = strictness;
    strictness = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

static CUresult is_capturing(CUstream stream, CUstreamCaptureStatus *status) {
    *status = stream == captured ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

static CUresult query(CUstream stream) {
    /* else one breaks */
    CHECK(depth && (!vgpu_open_captures || (strictness == CU_STREAM_CAPTURE_MODE_RELAXED && stream != captured)));
    if (stays) {
        pthread_barrier_wait(&steps);
        pthread_barrier_wait(&steps);
        stays = false;
    }
    if (stream == CU_STREAM_LEGACY)
        return answer(legacy_busy[(uintptr_t)stack[depth - 1] / 0x1000]);
    if (stream == CU_STREAM_PER_THREAD)
        return answer(own_busy[(uintptr_t)stack[depth - 1] / 0x1000]);
    CHECK(exists[number_of(stream)]);
    return answer(busy[number_of(stream)]);
}

static CUresult event_create(CUevent *event, unsigned flags) {
    CHECK(flags == CU_EVENT_DISABLE_TIMING);
    *event = (CUevent)(uintptr_t)(0x900000 + events++);
    return CUDA_SUCCESS;
}

static CUresult event_destroy(CUevent event) {
    CHECK(event);
    events--;
    return CUDA_SUCCESS;
}

static CUresult record(CUevent event, CUstream stream) {
    CHECK(event && exists[number_of(stream)]);
    if (meanwhile)
        meanwhile();
    return CUDA_SUCCESS;
}

static CUresult event_query(CUevent event) {
    CHECK(event);
    return answer(event_busy);
}

static __attribute__((unused)) CUresult record_context(CUcontext context, CUevent event) {
    CHECK(context == CONTEXT(1) && context != dying && event && !vgpu_open_captures);
    records++;
    if (meanwhile)
        meanwhile();
    event_busy = others_busy || takes_time;
    return CUDA_SUCCESS;
}

static void play(void) {
    vgpu_driver_entries[ENTRY_cuCtxGetCurrent] = (void *)get_current;
    vgpu_driver_entries[ENTRY_cuCtxPushCurrent_v2] = (void *)push;
    vgpu_driver_entries[ENTRY_cuCtxPopCurrent_v2] = (void *)pop;
    vgpu_driver_entries[ENTRY_cuStreamGetCtx] = (void *)get_context;
    vgpu_driver_entries[ENTRY_cuStreamIsCapturing] = (void *)is_capturing;
    vgpu_driver_entries[ENTRY_cuThreadExchangeStreamCaptureMode] = (void *)exchange_mode;
    vgpu_driver_entries[ENTRY_cuStreamQuery] = (void *)query;
    vgpu_driver_entries[ENTRY_cuEventCreate] = (void *)event_create;
    vgpu_driver_entries[ENTRY_cuEventDestroy_v2] = (void *)event_destroy;
    vgpu_driver_entries[ENTRY_cuEventRecord] = (void *)record;
    vgpu_driver_entries[ENTRY_cuEventQuery] = (void *)event_query;
}

static __attribute__((unused)) CUstream make(int i) {
    exists[i] = true;
    vgpu_stream_made(STREAM(i), NULL);
    return STREAM(i);
}

static __attribute__((unused)) void use(CUstream stream) {
    vgpu_handing_in(stream);
    vgpu_handed_in();
}

static __attribute__((unused)) void destroy(int i) {
    vgpu_stream_going(STREAM(i));
    exists[i] = false;
}

/* As a forked child would. */
static void begin(void) {
    vgpu_streams_forget();
    vgpu_gate_forget();
    memset(busy, 0, sizeof busy);
    memset(legacy_busy, 0, sizeof legacy_busy);
    memset(own_busy, 0, sizeof own_busy);
    others_busy = event_busy = false;
    dying = NULL;
    warnings = events = 0;
    vgpu_driver_entries[ENTRY_cuCtxRecordEvent] = NULL;
    depth = 0;
    push(CONTEXT(1));
    CHECK(vgpu_streams_idle());
}
#endif
