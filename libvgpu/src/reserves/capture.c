/* Keeps the list of open stream captures. */
#define _GNU_SOURCE
#include "reserves/capture.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

#include "base/spin.h"
#include "ledger/charge.h"

atomic_int vgpu_open_captures;

struct vgpu_capture {
    struct vgpu_capture *next;
    uintptr_t stream;
    CUcontext context; /* NULL: unknown */
};

static struct vgpu_capture *captures;
static vgpu_spin lock;
/* Held while a capture may end; the end waits until no call is being recorded. A recorder checks it first. Not a
 * rwlock: before glibc 2.34 that would need libpthread. */
static pthread_mutex_t ends = PTHREAD_MUTEX_INITIALIZER;
static atomic_uint recorders;
/* Calls of this thread: a driver may call the program back in one of them. */
static __thread __attribute__((tls_model("initial-exec"))) unsigned recording, ending;
static struct vgpu_departure *departures;
static atomic_uint departure_count;

void vgpu_captures_forget(void) {
    pthread_mutex_init(&ends, NULL);
    atomic_store(&recorders, 0);
    recording = ending = 0;
    departures = NULL;
    atomic_store(&departure_count, 0);
    captures = NULL;
    atomic_store(&lock, 0);
    atomic_store(&vgpu_open_captures, 0);
}

/* Every thread has its own stream under this name; only that thread can end a capture there. */
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

/* Whether a stream, or its whole context, is about to be destroyed: then another stream may get the handle before the
 * call arrives. A recorder must ask this before it asks for the stream's state. */
static bool departs(CUstream stream) {
    CUcontext context = NULL;
    if (!atomic_load(&departure_count))
        return false;
    if (!DRIVER(cuStreamGetCtx) || DRIVER(cuStreamGetCtx)(stream, &context) != CUDA_SUCCESS)
        return true;
    vgpu_spin_lock(&lock);
    const struct vgpu_departure *departure = departures;
    while (departure && (departure->context ? departure->context != context : departure->stream != stream))
        departure = departure->next;
    vgpu_spin_unlock(&lock);
    return departure != NULL;
}

bool vgpu_recording_slowly(CUstream stream) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    __typeof__(&cuStreamIsCapturing) ask = DRIVER(cuStreamIsCapturing);
    vgpu_own_tables();
    if (recording++ == 0) {
        if (!ending)
            pthread_mutex_lock(&ends);
        atomic_fetch_add(&recorders, 1);
        if (!ending)
            pthread_mutex_unlock(&ends);
    }
    if (!departs(stream) && ask && ask(stream, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE)
        return true;
    vgpu_recorded();
    return false;
}

void vgpu_recorded(void) {
    if (recording && --recording == 0)
        atomic_fetch_sub(&recorders, 1);
}

static void stop_recorders(void) {
    pthread_mutex_lock(&ends);
    for (unsigned looks = 0; atomic_load(&recorders);)
        vgpu_yield(&looks);
}

void vgpu_captures_ending(void) {
    vgpu_own_tables();
    if (ending++ == 0 && !recording)
        stop_recorders();
}

void vgpu_captures_ended(void) {
    if (ending && --ending == 0 && !recording) /* a child that was forked in between has released the lock */
        pthread_mutex_unlock(&ends);
}

/* Holds no lock during the driver's destruction: that may wait for the card, and so for other threads of the program,
 * and it may call tools back. It waits for current recorders; later recorders find the departure. */
void vgpu_capture_departs(struct vgpu_departure *departure) {
    vgpu_own_tables();
    vgpu_spin_lock(&lock);
    departure->next = departures;
    departures = departure;
    vgpu_spin_unlock(&lock);
    atomic_fetch_add(&departure_count, 1);
    if (atomic_load(&recorders) && !recording && !ending) {
        stop_recorders();
        pthread_mutex_unlock(&ends);
    }
}

void vgpu_capture_departed(const struct vgpu_departure *departure) {
    vgpu_spin_lock(&lock);
    struct vgpu_departure **at = &departures;
    while (*at && *at != departure)
        at = &(*at)->next;
    const bool found = *at != NULL; /* false in a child that was forked meanwhile */
    if (found)
        *at = departure->next;
    vgpu_spin_unlock(&lock);
    if (found)
        atomic_fetch_sub(&departure_count, 1);
}
