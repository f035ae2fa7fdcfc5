/* Stream capture: a graph under construction, and the streams that belong to it. These are the stream on which the
 * capture began, and streams that waited for an event of the capture. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cuda/graph.h"

#define MEMBERS 32 /* most streams of one capture */

struct capture {
    CUgraph graph;
    bool given; /* the program has passed the graph and keeps it */
    CUstream origin;
    CUstreamCaptureMode mode;
    uint64_t id;
    long thread;
    bool invalid;
    /* The capture's streams, the first one at index 0. `made`: number of nodes of each stream. `reached`: how many
     * nodes of each other stream come before every next node of a stream. */
    unsigned members;
    uint32_t made[MEMBERS], reached[MEMBERS][MEMBERS];
    uint32_t (*recorded)[MEMBERS]; /* `reached` at each recorded event */
    size_t records, room;
};

/* captures in modes other than relaxed, over all threads; and those in global mode */
static _Atomic int open_captures, global_captures;
static _Atomic int blocking_captures; /* capturing streams for which the legacy stream would wait */

static void join(CUstream stream, struct capture *capture) {
    stream->member = capture->members++;
    stream->capture = capture;
    if (!(stream->flags & CU_STREAM_NON_BLOCKING))
        blocking_captures++;
}

struct search {
    CUcontext context;
    bool found;
};

static void find_blocking(void *handle, void *argument) {
    CUstream stream = handle;
    struct search *search = argument;
    search->found |= stream->capture && stream->context == search->context && !(stream->flags & CU_STREAM_NON_BLOCKING);
}

static void break_blocking(void *handle, void *context) {
    CUstream stream = handle;
    if (stream->capture && stream->context == context && !(stream->flags & CU_STREAM_NON_BLOCKING))
        stream->capture->invalid = true;
}

/* Work of the legacy stream waits for all blocking streams, but a capturing stream has no work to wait for. */
CUresult capture_implicit(CUstream stream) {
    if (!atomic_load_explicit(&blocking_captures, memory_order_relaxed) || stream != stream->context->legacy)
        return CUDA_SUCCESS;
    struct search search = {.context = stream->context};
    object_each(OBJECT_STREAM, find_blocking, &search);
    if (!search.found)
        return CUDA_SUCCESS;
    object_each(OBJECT_STREAM, break_blocking, stream->context);
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
}

/* The result without capture: CUDA_ERROR_NOT_READY, or the error of an implicit wait. */
static CUresult elsewhere(CUstream stream) {
    CUresult result = capture_implicit(stream);
    return result ? result : CUDA_ERROR_NOT_READY;
}

/* Adds the node for a call on a capturing stream; CUDA_ERROR_NOT_READY: the stream is not capturing. */
static CUresult captured(CUstream stream, enum node_kind kind, CUgraphNode *node) {
    struct capture *capture = stream->capture;
    if (!capture)
        return elsewhere(stream);
    if (capture->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    *node = graph_add(capture->graph, kind);
    capture->reached[stream->member][stream->member] = ++capture->made[stream->member];
    return *node ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult capture_kernel(CUstream stream, const struct launch_shape *shape) {
    CUgraphNode node;
    CUresult result = captured(stream, NODE_KERNEL, &node);
    if (!result)
        node->kernel = *shape;
    return result;
}

CUresult capture_copy(CUstream stream, struct sides sides, CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    CUgraphNode node;
    CUresult result = captured(stream, NODE_COPY, &node);
    if (!result) {
        node->copy.sides = sides;
        node->copy.to = to;
        node->copy.from = from;
        node->copy.bytes = bytes;
    }
    return result;
}

CUresult capture_set(CUstream stream, CUdeviceptr to, size_t pitch, unsigned value, unsigned element, size_t width,
                     size_t height) {
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

CUresult capture_host(CUstream stream, CUhostFn function, void *data) {
    CUgraphNode node;
    CUresult result = captured(stream, NODE_HOST, &node);
    if (!result) {
        node->host.function = function;
        node->host.data = data;
    }
    return result;
}

/* A captured allocation has its address at once. It has memory from the graph's launch until a free node or
 * cuMemFree. */
CUresult capture_alloc(CUstream stream, CUdeviceptr *out, size_t bytes) {
    CUgraphNode node;
    CUresult result = captured(stream, NODE_ALLOC, &node);
    if (result)
        return result;
    node->address = graph_address(stream->capture->graph, stream->context, bytes);
    if (!node->address) {
        stream->capture->invalid = true;
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = node->address;
    return CUDA_SUCCESS;
}

CUresult capture_free(CUstream stream, CUdeviceptr address) {
    CUgraphNode node;
    struct capture *capture = stream->capture;
    CUresult result = capture && !capture->invalid ? graph_address_check(capture->graph, address) : CUDA_SUCCESS;
    if (result)
        capture->invalid = true;
    else
        result = captured(stream, NODE_FREE, &node);
    if (!result)
        node->address = address;
    return result;
}

/* A graph launched into a capture becomes part of it. Exception: a graph with memory nodes, because a child graph may
 * have none. */
CUresult capture_exec(CUstream stream, CUgraphExec exec) {
    if (!stream->capture)
        return elsewhere(stream);
    if (exec->memory) {
        stream->capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    for (size_t i = 0; i < exec->count; i++) {
        CUgraphNode node;
        CUresult result = captured(stream, exec->nodes[i].kind, &node);
        if (result)
            return result;
        node_copy(node, &exec->nodes[i]);
    }
    return stream->capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

CUresult capture_record(CUstream stream, CUevent event) {
    struct capture *capture = stream->capture;
    if (!capture)
        return elsewhere(stream);
    if (capture->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (capture->records == capture->room) {
        size_t room = capture->room ? capture->room * 2 : 16;
        void *records = realloc(capture->recorded, room * sizeof *capture->recorded);
        if (!records)
            return CUDA_ERROR_OUT_OF_MEMORY;
        capture->recorded = records;
        capture->room = room;
    }
    memcpy(capture->recorded[capture->records], capture->reached[stream->member], sizeof *capture->recorded);
    event->record = capture->records++;
    event->capture = capture;
    return CUDA_SUCCESS;
}

CUresult capture_wait(CUstream stream, CUevent event) {
    struct capture *capture = event->capture;
    if (!capture && stream->capture) {
        stream->capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (!capture)
        return elsewhere(stream);
    if (stream == stream->context->legacy) {
        capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    if (stream->capture && stream->capture != capture) {
        stream->capture->invalid = capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    if (capture->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!stream->capture) {
        if (capture->members == MEMBERS)
            return CUDA_ERROR_OUT_OF_MEMORY;
        join(stream, capture);
    }
    for (unsigned i = 0; i < MEMBERS; i++)
        if (capture->recorded[event->record][i] > capture->reached[stream->member][i])
            capture->reached[stream->member][i] = capture->recorded[event->record][i];
    return CUDA_SUCCESS;
}

static bool unjoined(const struct capture *capture) {
    for (unsigned i = 0; i < capture->members; i++)
        if (capture->made[i] > capture->reached[0][i])
            return true;
    return false;
}

struct offender {
    bool own_thread, found;
    long thread;
};

static void invalidate(void *handle, void *argument) {
    struct capture *capture = ((CUstream)handle)->capture;
    struct offender *offender = argument;
    if (capture && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
        (capture->thread == offender->thread ||
         (!offender->own_thread && capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL)))
        capture->invalid = offender->found = true;
}

/* The rules of cuThreadExchangeStreamCaptureMode: which captures make an unsafe call fail, and are invalidated by
 * it. */
CUresult capture_forbids(CUstream stream) {
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
    struct offender offender = {.own_thread = own_only, .thread = syscall(SYS_gettid)};
    object_each(OBJECT_STREAM, invalidate, &offender);
    return offender.found ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

static void count_capture(CUstreamCaptureMode mode, int by) {
    if (mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return;
    atomic_fetch_add(&open_captures, by);
    thread_state()->captures += by;
    if (mode == CU_STREAM_CAPTURE_MODE_GLOBAL)
        atomic_fetch_add(&global_captures, by);
}

/* Begins a capture into a graph of the program, or into a new graph. */
static CUresult begin(CUstream handle, CUstreamCaptureMode mode, CUgraph given) {
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
    CUgraph graph = !capture ? NULL : given ? given : object_new(OBJECT_GRAPH);
    if (!graph) {
        free(capture);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *capture = (struct capture){.graph = graph,
                                .given = given,
                                .origin = stream,
                                .mode = mode,
                                .id = driver_id(),
                                .thread = syscall(SYS_gettid)};
    graph->capturing = true;
    join(stream, capture);
    count_capture(mode, 1);
    return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
    INJECT();
    return begin(handle, mode, NULL);
}

CUresult cuStreamBeginCaptureToGraph(CUstream handle, CUgraph graph, const CUgraphNode *dependencies,
                                     const CUgraphEdgeData *edges, size_t count, CUstreamCaptureMode mode) {
    INJECT();
    (void)edges;
    if (!object_is(graph, OBJECT_GRAPH) || (count && !dependencies))
        return CUDA_ERROR_INVALID_VALUE;
    if (graph->capturing)
        return CUDA_ERROR_ILLEGAL_STATE;
    for (size_t i = 0; i < count; i++)
        if (!object_is(dependencies[i], OBJECT_NODE) || dependencies[i]->graph != graph)
            return CUDA_ERROR_INVALID_VALUE;
    return begin(handle, mode, graph);
}

CUresult cuStreamBeginCapture(CUstream stream) {
    INJECT();
    return cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

static void leave(void *handle, void *capture) {
    struct object *object = handle;
    if (object->type == OBJECT_STREAM && ((CUstream)handle)->capture == capture) {
        ((CUstream)handle)->capture = NULL;
        if (!(((CUstream)handle)->flags & CU_STREAM_NON_BLOCKING))
            blocking_captures--;
    }
    if (object->type == OBJECT_EVENT && ((CUevent)handle)->capture == capture)
        ((CUevent)handle)->capture = NULL;
}

/* Ends a capture: its streams and events become ordinary again. */
static void end(struct capture *capture, bool keep) {
    object_each(OBJECT_STREAM, leave, capture);
    object_each(OBJECT_EVENT, leave, capture);
    count_capture(capture->mode, -1);
    capture->graph->capturing = false;
    if (!keep && !capture->given)
        graph_free(capture->graph);
    free(capture->recorded);
    free(capture);
}

void capture_break(CUstream stream) {
    if (stream->capture)
        stream->capture->invalid = true;
}

void capture_abandon(CUstream stream) {
    struct capture *capture = stream->capture;
    if (!capture)
        return;
    if (capture->origin == stream) {
        end(capture, false);
        return;
    }
    capture->invalid = true;
    stream->capture = NULL;
    if (!(stream->flags & CU_STREAM_NON_BLOCKING))
        blocking_captures--;
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph *out) {
    INJECT();
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result)
        return result;
    struct capture *capture = stream->capture;
    if (!capture || !out)
        return !out ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != stream) {
        capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    }
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != syscall(SYS_gettid))
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    result = capture->invalid    ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
             : unjoined(capture) ? CUDA_ERROR_STREAM_CAPTURE_UNJOINED
                                 : CUDA_SUCCESS;
    *out = result ? NULL : capture->graph;
    end(capture, !result);
    return result;
}

static CUstreamCaptureStatus status_of(CUstream stream) {
    return !stream->capture           ? CU_STREAM_CAPTURE_STATUS_NONE
           : stream->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                      : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
    INJECT();
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result || !status)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    *status = status_of(stream);
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                   const CUgraphNode **dependencies, const CUgraphEdgeData **edges, size_t *count) {
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
                                   const CUgraphNode **dependencies, size_t *count) {
    INJECT();
    return cuStreamGetCaptureInfo_v3(stream, status, id, graph, dependencies, NULL, count);
}

CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id) {
    INJECT();
    return cuStreamGetCaptureInfo_v3(stream, status, id, NULL, NULL, NULL, NULL);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    ENTER();
    if (!mode || (unsigned)*mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    CUstreamCaptureMode old = thread_state()->capture_mode;
    thread_state()->capture_mode = *mode;
    *mode = old;
    return CUDA_SUCCESS;
}
