#define _GNU_SOURCE
#include "capture.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

#include "charge.h"
#include "fork.h"
#include "spin.h"

atomic_int vgpu_open_captures;

struct vgpu_capture {
    struct vgpu_capture *next;
    uintptr_t stream;
    CUcontext context; /* NULL: unknown */
};

static struct vgpu_capture *captures;
static vgpu_spin lock;
/* Held while a capture may end, which waits until no call is being recorded; a call begins with a look at it. No rwlock: before glibc 2.34 it would need
 * libpthread. */
static pthread_mutex_t ends = PTHREAD_MUTEX_INITIALIZER;
static atomic_uint recorders;
static __thread __attribute__((tls_model("initial-exec"))) unsigned recording; /* calls of this thread: a driver may call the program back in one */

void vgpu_captures_forget(void) {
    pthread_mutex_init(&ends, NULL);
    atomic_store(&recorders, 0);
    recording = 0;
    captures = NULL;
    atomic_store(&lock, 0);
    atomic_store(&vgpu_open_captures, 0);
}

/* Every thread has its own stream under this name; only it can end a capture there. */
static uintptr_t key_of(CUstream stream) {
    return stream == CU_STREAM_PER_THREAD ? (uintptr_t)pthread_self() : (uintptr_t)stream;
}

struct vgpu_capture *vgpu_capture_beginning(CUstream stream) {
    int kept = errno;
    vgpu_own_tables();
    struct vgpu_capture *capture = calloc(1, sizeof *capture);
    if (capture) {
        capture->stream = key_of(stream);
        if (!DRIVER(cuStreamGetCtx) || DRIVER(cuStreamGetCtx)(stream, &capture->context) != CUDA_SUCCESS)
            capture->context = NULL;
        atomic_fetch_add(&vgpu_open_captures, 1);
    }
    errno = kept;
    return capture;
}

void vgpu_captures_settle(struct vgpu_capture *taken, bool ended) {
    while (taken) {
        struct vgpu_capture *next = taken->next;
        if (ended) {
            atomic_fetch_sub(&vgpu_open_captures, 1);
            free(taken);
        } else {
            vgpu_spin_lock(&lock);
            taken->next = captures;
            captures = taken;
            vgpu_spin_unlock(&lock);
        }
        taken = next;
    }
}

static struct vgpu_capture *take(uintptr_t stream, CUcontext context) {
    struct vgpu_capture *taken = NULL;
    vgpu_own_tables();
    if (!vgpu_any_capture())
        return NULL;
    vgpu_spin_lock(&lock);
    for (struct vgpu_capture **at = &captures; *at;) {
        struct vgpu_capture *capture = *at;
        if (stream ? capture->stream != stream : capture->context != context) {
            at = &capture->next;
            continue;
        }
        *at = capture->next;
        capture->next = taken;
        taken = capture;
    }
    vgpu_spin_unlock(&lock);
    return taken;
}

struct vgpu_capture *vgpu_captures_take(CUstream stream) {
    return stream ? take(key_of(stream), NULL) : NULL;
}

void vgpu_captures_end(CUstream stream, CUcontext context) {
    vgpu_captures_settle(stream ? vgpu_captures_take(stream) : context ? take(0, context) : NULL, true);
}

bool vgpu_recording_slowly(CUstream stream) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    __typeof__(&cuStreamIsCapturing) ask = DRIVER(cuStreamIsCapturing);
    vgpu_own_tables();
    if (recording++ == 0) {
        pthread_mutex_lock(&ends);
        atomic_fetch_add(&recorders, 1);
        pthread_mutex_unlock(&ends);
    }
    if (ask && ask(stream, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE)
        return true;
    vgpu_recorded();
    return false;
}

void vgpu_recorded(void) {
    if (--recording == 0)
        atomic_fetch_sub(&recorders, 1);
}

void vgpu_captures_ending(void) {
    vgpu_own_tables();
    if (recording)
        return;
    pthread_mutex_lock(&ends);
    while (atomic_load(&recorders))
        sched_yield();
}

void vgpu_captures_ended(void) {
    if (!recording)
        pthread_mutex_unlock(&ends);
}
