/* Host functions of streams. One thread calls them in the order of submission, each when the work before it has
 * ended. */
#include <stdlib.h>

#include "cuda/driver.h"

struct job {
    struct job *next;
    CUstream stream; /* argument of a function of cuStreamAddCallback */
    int card;
    uint64_t sequence, ticket, not_before;
    CUhostFn function;
    CUstreamCallback callback;
    void *data;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct job *first, *last;
static uint64_t issued;
static _Atomic uint64_t done;
static bool running;

static void *work(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!first)
            pthread_cond_wait(&changed, &lock);
        struct job *job = first;
        first = job->next;
        if (!first)
            last = NULL;
        pthread_mutex_unlock(&lock);
        sim_wait(&driver.sim, job->card, job->sequence);
        for (uint64_t now = sim_now(); job->not_before > now; now = sim_now())
            sim_sleep_until(job->not_before);
        if (job->callback)
            job->callback(job->stream, CUDA_SUCCESS, job->data);
        else
            job->function(job->data);
        pthread_mutex_lock(&lock);
        done = job->ticket;
        pthread_cond_broadcast(&changed);
        free(job);
    }
    return NULL;
}

bool host_done(uint64_t ticket) {
    return done >= ticket;
}

void host_wait(uint64_t ticket) {
    if (host_done(ticket))
        return;
    pthread_mutex_lock(&lock);
    while (!host_done(ticket))
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

static CUresult put(CUstream handle, CUstream stream, CUhostFn function, CUstreamCallback callback, void *data) {
    struct job *job = malloc(sizeof *job);
    if (!job)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *job = (struct job){.stream = handle,
                        .card = stream->context->card,
                        .sequence = stream_last(stream),
                        .not_before = stream_not_before(stream),
                        .function = function,
                        .callback = callback,
                        .data = data};
    pthread_mutex_lock(&lock);
    pthread_t thread;
    if (!running && pthread_create(&thread, NULL, work, NULL) != 0) {
        pthread_mutex_unlock(&lock);
        free(job);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    if (!running)
        pthread_detach(thread);
    running = true;
    job->ticket = ++issued;
    stream->host = stream->context->host = job->ticket;
    if (last)
        last->next = job;
    else
        first = job;
    last = job;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult host_launch(CUstream stream, CUhostFn function, void *data) {
    return put(stream, stream, function, NULL, data);
}

CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void *data) {
    INJECT();
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result || !function)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    result = capture_host(stream, function, data);
    return result == CUDA_ERROR_NOT_READY ? host_launch(stream, function, data) : result;
}

CUresult cuStreamAddCallback(CUstream handle, CUstreamCallback callback, void *data, unsigned int flags) {
    INJECT();
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result || !callback || flags)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    return stream->capture ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : put(handle, stream, NULL, callback, data);
}
