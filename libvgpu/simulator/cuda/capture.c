/* Stream capture: a graph under construction and the streams that belong to it, the one it began on and those that waited for an event of it. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cuda/graph.h"

struct capture {
    CUgraph graph;
    CUstream origin;
    CUstreamCaptureMode mode;
    uint64_t id;
    long thread;
    bool invalid;
    unsigned streams;
};

static _Atomic int open_captures, global_captures; /* not relaxed ones of all threads; those in global mode */

/* The node that a call on a capturing stream becomes; CUDA_ERROR_NOT_READY when the stream does not capture. */
static CUresult captured(CUstream stream, enum node_kind kind, CUgraphNode *node)
{
    struct capture *capture = stream->capture;
    if (!capture)
        return CUDA_ERROR_NOT_READY;
    if (capture->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    *node = graph_add(capture->graph, kind);
    return *node ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult capture_kernel(CUstream stream, const struct launch_shape *shape)
{
    CUgraphNode node;
    CUresult result = captured(stream, NODE_KERNEL, &node);
    if (!result)
        node->kernel = *shape;
    return result;
}

CUresult capture_copy(CUstream stream, CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    CUgraphNode node;
    CUresult result = captured(stream, NODE_COPY, &node);
    if (!result) {
        node->copy.to = to;
        node->copy.from = from;
        node->copy.bytes = bytes;
    }
    return result;
}

CUresult capture_set(CUstream stream, CUdeviceptr to, size_t pitch, unsigned value, unsigned element, size_t width, size_t height)
{
    CUgraphNode node;
    CUresult result = captured(stream, NODE_SET, &node);
    if (!result) {
        node->set.to = to;
        node->set.pitch = pitch;
        node->set.value = value;
        node->set.element = element;
        node->set.width = width;
        node->set.height = height;
    }
    return result;
}

CUresult capture_host(CUstream stream, CUhostFn function, void *data)
{
    CUgraphNode node;
    CUresult result = captured(stream, NODE_HOST, &node);
    if (!result) {
        node->host.function = function;
        node->host.data = data;
    }
    return result;
}

/* A captured allocation has its address at once and its memory from the launch of the graph to a free node or cuMemFree. */
CUresult capture_alloc(CUstream stream, CUdeviceptr *out, size_t bytes)
{
    CUgraphNode node;
    CUresult result = captured(stream, NODE_ALLOC, &node);
    if (result)
        return result;
    node->address = block_new(bytes, stream->context, BLOCK_GRAPH, NULL);
    if (!node->address) {
        stream->capture->invalid = true;
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = node->address;
    return CUDA_SUCCESS;
}

CUresult capture_free(CUstream stream, CUdeviceptr address)
{
    CUgraphNode node;
    CUresult result = captured(stream, NODE_FREE, &node);
    if (!result)
        node->address = address;
    return result;
}

CUresult capture_record(CUstream stream, CUevent event)
{
    if (!stream->capture)
        return CUDA_ERROR_NOT_READY;
    event->capture = stream->capture;
    return stream->capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

CUresult capture_wait(CUstream stream, CUevent event)
{
    if (!event->capture)
        return stream->capture ? CUDA_ERROR_STREAM_CAPTURE_ISOLATION : CUDA_ERROR_NOT_READY;
    if (stream->capture && stream->capture != event->capture)
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    if (!stream->capture) {
        stream->capture = event->capture;
        stream->capture->streams++;
    }
    return CUDA_SUCCESS;
}

struct offender {
    bool own_thread;
    long thread;
};

static void invalidate(void *handle, void *argument)
{
    struct capture *capture = ((CUstream)handle)->capture;
    struct offender *offender = argument;
    if (capture && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
        (capture->thread == offender->thread || (!offender->own_thread && capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL)))
        capture->invalid = true;
}

/* The rules of cuThreadExchangeStreamCaptureMode: which captures make an unsafe call fail, and break by it. */
CUresult capture_forbids(CUstream stream)
{
    if (stream && stream->capture) {
        stream->capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (!atomic_load_explicit(&open_captures, memory_order_relaxed))
        return CUDA_SUCCESS;
    struct thread_state *thread = thread_state();
    if (thread->capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_SUCCESS;
    bool own_only = thread->capture_mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    if (!thread->captures && (own_only || !atomic_load(&global_captures)))
        return CUDA_SUCCESS;
    object_each(OBJECT_STREAM, invalidate, &(struct offender){.own_thread = own_only, .thread = syscall(SYS_gettid)});
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

static void count_capture(CUstreamCaptureMode mode, int by)
{
    if (mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return;
    atomic_fetch_add(&open_captures, by);
    thread_state()->captures += by;
    if (mode == CU_STREAM_CAPTURE_MODE_GLOBAL)
        atomic_fetch_add(&global_captures, by);
}

CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode)
{
    INJECT();
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result)
        return result;
    if ((unsigned)mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream == stream->context->legacy)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture)
        return CUDA_ERROR_ILLEGAL_STATE;
    struct capture *capture = calloc(1, sizeof *capture);
    CUgraph graph = capture ? object_new(OBJECT_GRAPH) : NULL;
    if (!graph) {
        free(capture);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *capture = (struct capture){.graph = graph, .origin = stream, .mode = mode, .id = driver_id(), .streams = 1, .thread = syscall(SYS_gettid)};
    stream->capture = capture;
    count_capture(mode, 1);
    return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture(CUstream stream) { INJECT(); return cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL); }

static void leave(void *handle, void *capture)
{
    struct object *object = handle;
    if (object->type == OBJECT_STREAM && ((CUstream)handle)->capture == capture)
        ((CUstream)handle)->capture = NULL;
    if (object->type == OBJECT_EVENT && ((CUevent)handle)->capture == capture)
        ((CUevent)handle)->capture = NULL;
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph *out)
{
    INJECT();
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result)
        return result;
    struct capture *capture = stream->capture;
    if (!capture || !out)
        return !out ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != stream)
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != syscall(SYS_gettid))
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    object_each(OBJECT_STREAM, leave, capture);
    object_each(OBJECT_EVENT, leave, capture);
    count_capture(capture->mode, -1);
    if (capture->invalid) {
        graph_free(capture->graph);
        *out = NULL;
        result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    } else {
        *out = capture->graph;
    }
    free(capture);
    return result;
}

static CUstreamCaptureStatus status_of(CUstream stream)
{
    return !stream->capture           ? CU_STREAM_CAPTURE_STATUS_NONE
           : stream->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                      : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status)
{
    INJECT();
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result || !status)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    *status = status_of(stream);
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                   const CUgraphNode **dependencies, const CUgraphEdgeData **edges, size_t *count)
{
    INJECT();
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result || !status)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    *status = status_of(stream);
    bool active = *status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
    CUgraph captured_graph = active ? stream->capture->graph : NULL;
    bool any = active && captured_graph->count;
    if (id && active)
        *id = stream->capture->id;
    if (graph)
        *graph = captured_graph;
    if (dependencies)
        *dependencies = any ? &captured_graph->nodes[captured_graph->count - 1] : NULL;
    if (edges)
        *edges = NULL;
    if (count)
        *count = any;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                   const CUgraphNode **dependencies, size_t *count)
{
    INJECT();
    return cuStreamGetCaptureInfo_v3(stream, status, id, graph, dependencies, NULL, count);
}

CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id)
{
    INJECT();
    return cuStreamGetCaptureInfo_v3(stream, status, id, NULL, NULL, NULL, NULL);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    ENTER();
    if (!mode || (unsigned)*mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    CUstreamCaptureMode old = thread_state()->capture_mode;
    thread_state()->capture_mode = *mode;
    *mode = old;
    return CUDA_SUCCESS;
}
