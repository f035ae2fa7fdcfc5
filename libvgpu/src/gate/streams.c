/* Keeps the list of streams and asks whether their work has finished. */
#define _GNU_SOURCE
#include "gate/streams.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/spin.h"
#include "gate/stream_marks.h"
#include "ledger/charge.h"
#include "reserves/capture.h"

enum kind {
    STREAM,
    DEFAULT,  /* the legacy stream of a context */
    LEFTOVER, /* an event behind the unfinished work of a destroyed stream */
    /* unfinished work of a thread's own stream of a context that was being destroyed when the thread turned to another
     * context */
    LEFT,
};

#define MANY 16u /* with this many leftovers, finished leftovers are removed */

_Atomic uint64_t vgpu_streams_epoch = 1;
static atomic_bool unknown; /* some stream is unknown: the process never counts as idle */

static struct entry {
    enum kind kind;
    union {
        CUstream stream;
        CUevent event;
    };
    CUcontext context;
    bool going; /* together with its context, which is being destroyed */
} *entries;
static size_t entry_count, entry_room, leftovers;
/* Held while the driver is asked about streams, so that no stream is destroyed meanwhile. */
static vgpu_spin lock;
/* This thread holds the lock: the driver may call the program back meanwhile. */
static __thread __attribute__((tls_model("initial-exec"))) bool locked;
void vgpu_streams_forget(void) {
    entry_count = leftovers = 0;
    vgpu_marks_forget();
    locked = false;
    atomic_store(&lock, 0);
    atomic_store(&unknown, false);
    atomic_fetch_add(&vgpu_streams_epoch, 1);
}

bool vgpu_streams_lock(void) {
    if (locked)
        return false;
    vgpu_spin_lock(&lock);
    return locked = true;
}

void vgpu_streams_unlock(void) {
    locked = false;
    vgpu_spin_unlock(&lock);
}

static void give_up(const char *why) {
    if (!atomic_exchange(&unknown, true))
        vgpu_log(VGPU_LOG_WARNING, "no memory moves between card and host any more: %s", why);
}

/* Prefers an entry whose context stays: a new context may already have the same handle as one that is being
 * destroyed. */
static struct entry *find(enum kind kind, CUstream stream, CUcontext context) {
    struct entry *going = NULL;
    for (size_t i = 0; i < entry_count; i++) {
        if (entries[i].kind != kind || (kind == DEFAULT ? entries[i].context != context : entries[i].stream != stream))
            continue;
        if (!entries[i].going)
            return &entries[i];
        going = &entries[i];
    }
    return going;
}

static void add(struct entry entry) {
    if (entry_count == entry_room) {
        const size_t room = entry_room ? entry_room * 2 : 64;
        struct entry *larger = realloc(entries, room * sizeof *larger);
        if (!larger) {
            give_up("there is none left to remember a stream");
            return;
        }
        entries = larger;
        entry_room = room;
    }
    entries[entry_count++] = entry;
}

static CUcontext current(void) {
    CUcontext context = NULL;
    return DRIVER(cuCtxGetCurrent) && DRIVER(cuCtxGetCurrent)(&context) == CUDA_SUCCESS ? context : NULL;
}

/* Ignores a handle that is no stream: the driver will refuse it. */
static void note_unknown(CUstream stream) {
    CUcontext context;
    if (DRIVER(cuStreamGetCtx) && DRIVER(cuStreamGetCtx)(stream, &context) == CUDA_SUCCESS)
        give_up("a stream is used that was created in a way which is not known");
}

static void own_finished(struct vgpu_passage *mine) {
    atomic_store_explicit(&mine->finished, atomic_load_explicit(&mine->handed_in, memory_order_relaxed),
                          memory_order_release);
}

/* A thread can use its own stream in two contexts. Its passage counts one context: the work in the first must have
 * finished, or the first context is being destroyed and is not asked again. */
static void note_own(struct vgpu_passage *mine, CUcontext context) {
    if (!mine) {
        give_up("a thread that there was no memory for uses a stream of its own");
        return;
    }
    const bool entered = vgpu_streams_lock(); /* so that no destruction of a context begins meanwhile */
    const CUcontext before = atomic_load(&mine->own);
    const uint64_t handed_in = atomic_load(&mine->handed_in);
    if (before != context && handed_in != atomic_load(&mine->finished)) {
        if (handed_in == atomic_load(&mine->going)) {
            add((struct entry){LEFT, {NULL}, before, true});
            own_finished(mine);
        } else if (!mine->shared && vgpu_own_stream_idle(before)) {
            own_finished(mine);
        } else {
            give_up("a thread uses streams of its own in several contexts at once");
        }
    }
    atomic_store(&mine->own, context);
    if (entered)
        vgpu_streams_unlock();
}

void vgpu_stream_used_slowly(struct vgpu_passage *mine, CUstream stream, CUcontext context) {
    const int kept = errno;
    vgpu_own_tables();
    if (!mine)
        mine = vgpu_passage_take();
    const bool own = stream == CU_STREAM_PER_THREAD;
    const uintptr_t key = context ? (uintptr_t)context + 1 + own : (uintptr_t)stream;
    const uint64_t epoch = atomic_load(&vgpu_streams_epoch);
    bool known = true;
    if (own) {
        note_own(mine, context);
    } else if (vgpu_streams_lock()) {
        const struct entry *found = find(context ? DEFAULT : STREAM, stream, context);
        known = found || context;
        if (context && (!found || found->going))
            add((struct entry){DEFAULT, {CU_STREAM_LEGACY}, context, false});
        vgpu_streams_unlock();
        if (!known)
            note_unknown(stream);
    } else {
        known = false;
    }
    if (mine && known) {
        if (mine->epoch != epoch)
            memset(mine->streams, 0, sizeof mine->streams);
        mine->epoch = epoch;
        mine->streams[vgpu_stream_place(key)] = key;
    }
    errno = kept;
}

void vgpu_stream_made(CUstream stream, CUcontext context) {
    const int kept = errno;
    vgpu_own_tables();
    if (!context && (!DRIVER(cuStreamGetCtx) || DRIVER(cuStreamGetCtx)(stream, &context) != CUDA_SUCCESS || !context))
        context = current();
    if (!context)
        give_up("a stream was created in a context that cannot be asked for");
    else if (vgpu_streams_lock()) {
        add((struct entry){STREAM, {stream}, context, false});
        vgpu_streams_unlock();
    }
    errno = kept;
}

bool vgpu_streams_enter(CUcontext context) {
    return DRIVER(cuCtxPushCurrent_v2) && DRIVER(cuCtxPopCurrent_v2) &&
           DRIVER(cuCtxPushCurrent_v2)(context) == CUDA_SUCCESS;
}

void vgpu_streams_leave(void) {
    CUcontext popped;
    DRIVER(cuCtxPopCurrent_v2)(&popped);
}

/* Of an event that has passed. The context must be current. */
static void drop(size_t i) {
    DRIVER(cuEventDestroy_v2)(entries[i].event);
    entries[i] = entries[--entry_count];
    leftovers--;
}

/* The context must be current. */
static bool finished(const struct entry *entry) {
    if (entry->kind == LEFTOVER)
        return DRIVER(cuEventQuery) && DRIVER(cuEventQuery)(entry->event) == CUDA_SUCCESS;
    return entry->kind != LEFT && DRIVER(cuStreamQuery) && DRIVER(cuStreamQuery)(entry->stream) == CUDA_SUCCESS;
}

/* Drops leftovers of destroyed streams that have finished, before there are too many. */
static void sweep(void) {
    if (leftovers < MANY)
        return;
    for (size_t i = 0; i < entry_count;) {
        bool gone = false;
        if (entries[i].kind == LEFTOVER && !entries[i].going && vgpu_streams_enter(entries[i].context)) {
            gone = finished(&entries[i]);
            if (gone)
                drop(i);
            vgpu_streams_leave();
        }
        i += !gone;
    }
}

static bool take_out(CUstream stream, struct entry *entry) {
    if (!vgpu_streams_lock())
        return false;
    struct entry *at = find(STREAM, stream, NULL);
    if (at) {
        *entry = *at;
        *at = entries[--entry_count];
        atomic_fetch_add(&vgpu_streams_epoch, 1);
    }
    vgpu_streams_unlock();
    return at;
}

/* Makes an event behind the unfinished work of a stream. NULL: the stream has no work. False: the driver gives neither
 * answer. Without the lock: a driver whose queue is full waits for room. The context must be current. */
static bool leave_over(const struct entry *entry, CUevent *event) {
    if (finished(entry))
        return true;
    if (!DRIVER(cuEventCreate) || !DRIVER(cuEventRecord) ||
        DRIVER(cuEventCreate)(event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
        return false;
    if (DRIVER(cuEventRecord)(*event, entry->stream) == CUDA_SUCCESS)
        return true;
    DRIVER(cuEventDestroy_v2)(*event);
    *event = NULL;
    return false;
}

/* For a stream that is destroyed with unfinished work and cannot be asked, such as a stream that is being captured.
 * Only its whole context can be asked later. So the work counts like a call of a thread to its own stream, in a passage
 * that has no thread. */
static bool leave_to_context(CUcontext context) {
    struct vgpu_passage *nobodys = NULL;
    if (!vgpu_streams_lock())
        return false;
    for (struct vgpu_passage *passage = atomic_load(&vgpu_passages); passage && !nobodys; passage = passage->next)
        if (atomic_load(&passage->taken) == VGPU_PASSAGE_OF_NOBODY &&
            (atomic_load(&passage->own) == context ||
             atomic_load(&passage->handed_in) == atomic_load(&passage->finished)))
            nobodys = passage;
    nobodys = nobodys ? nobodys : vgpu_passage_of_nobody();
    if (nobodys) {
        atomic_store(&nobodys->own, context);
        atomic_fetch_add(&nobodys->handed_in, 1);
    }
    vgpu_streams_unlock();
    return nobodys;
}

void vgpu_stream_going(CUstream stream) {
    const int kept = errno;
    struct entry entry;
    vgpu_own_tables();
    vgpu_gate_enter(); /* so that no thread asks for finished work while the stream is in no list */
    if (take_out(stream, &entry)) {
        CUevent event = NULL;
        bool kept_in_mind = false;
        const CUstreamCaptureMode mode = vgpu_relax();
        if (!vgpu_capturing(stream) && vgpu_streams_enter(entry.context)) {
            kept_in_mind = leave_over(&entry, &event);
            vgpu_streams_leave();
        }
        if (event && vgpu_streams_lock()) {
            leftovers++;
            add((struct entry){LEFTOVER, {(CUstream)event}, entry.context, entry.going});
            sweep();
            vgpu_streams_unlock();
        }
        vgpu_restore(mode);
        if (!kept_in_mind && !leave_to_context(entry.context))
            give_up("a stream was destroyed, and what it still has to do cannot be asked");
    }
    vgpu_gate_leave();
    errno = kept;
}

void vgpu_streams_context_going(CUcontext context) {
    vgpu_own_tables();
    if (!vgpu_streams_lock())
        return;
    vgpu_mark_going(context);
    for (size_t i = 0; i < entry_count; i++)
        entries[i].going |= entries[i].context == context;
    for (struct vgpu_passage *passage = atomic_load(&vgpu_passages); passage; passage = passage->next)
        if (atomic_load(&passage->own) == context)
            atomic_store(&passage->going, atomic_load(&passage->handed_in));
    atomic_fetch_add(&vgpu_streams_epoch, 1); /* streams used from here on are noted again */
    vgpu_streams_unlock();
}

bool vgpu_streams_context_idle(CUcontext context) {
    bool idle = false;
    if (!vgpu_streams_lock())
        return false;
    const CUstreamCaptureMode mode = vgpu_relax();
    if (vgpu_streams_enter(context)) {
        idle = true;
        for (size_t i = 0; i < entry_count && idle; i++)
            idle = entries[i].context != context || finished(&entries[i]);
        vgpu_streams_leave();
    }
    vgpu_restore(mode);
    for (struct vgpu_passage *passage = atomic_load(&vgpu_passages); idle && passage; passage = passage->next)
        idle = atomic_load(&passage->own) != context ||
               atomic_load(&passage->handed_in) == atomic_load(&passage->finished);
    vgpu_streams_unlock();
    return idle;
}

void vgpu_streams_lost(const char *why) {
    give_up(why);
}

static void raise_to(_Atomic uint64_t *value, uint64_t least) {
    uint64_t now = atomic_load(value);
    while (now < least && !atomic_compare_exchange_weak(value, &now, least))
        ;
}

void vgpu_streams_context_went(CUcontext context, bool gone) {
    if (!vgpu_streams_lock())
        return;
    size_t left = 0;
    leftovers = 0;
    for (size_t i = 0; i < entry_count; i++) {
        const bool its = entries[i].going && entries[i].context == context;
        if (its && !gone && entries[i].kind == LEFT)
            give_up("a thread has left work in a context that was about to go and stays");
        if (its &&
            (gone || entries[i].kind == LEFT || (entries[i].kind == DEFAULT && !find(DEFAULT, NULL, context)->going)))
            continue;
        entries[i].going &= !its;
        leftovers += entries[i].kind == LEFTOVER;
        entries[left++] = entries[i];
    }
    entry_count = left;
    vgpu_mark_went(context, gone); /* no thread makes a new mark while another thread is inside the gate */
    for (struct vgpu_passage *passage = atomic_load(&vgpu_passages); passage; passage = passage->next) {
        if (atomic_load(&passage->own) != context)
            continue;
        if (gone)
            raise_to(&passage->finished, atomic_load(&passage->going));
        atomic_store(&passage->going, 0);
    }
    atomic_fetch_add(&vgpu_streams_epoch, 1);
    vgpu_streams_unlock();
}

void vgpu_own_stream_finished(void) {
    struct vgpu_passage *mine = vgpu_passage;
    /* else the thread has waited for another stream */
    if (mine && !mine->shared && atomic_load(&mine->own) == current())
        own_finished(mine);
}

void vgpu_context_waiting(struct vgpu_stream_wait *wait, CUcontext context) {
    wait->count = 0;
    if (!context)
        context = current();
    for (struct vgpu_passage *passage = atomic_load(&vgpu_passages); passage && wait->count < VGPU_WAITED_FOR;
         passage = passage->next) {
        const uint64_t handed_in = atomic_load_explicit(&passage->handed_in, memory_order_acquire);
        /* a thread inside the gate has counted a call that the driver may not have seen yet */
        if (atomic_load(&passage->own) != context || handed_in == atomic_load(&passage->finished) ||
            atomic_load(&passage->inside))
            continue;
        wait->own[wait->count].passage = passage;
        wait->own[wait->count++].handed_in = handed_in;
    }
}

void vgpu_context_finished(const struct vgpu_stream_wait *wait) {
    for (unsigned i = 0; i < wait->count; i++)
        raise_to(&wait->own[i].passage->finished, wait->own[i].handed_in);
}

/* The calling thread's own stream of a context. A stream that is being captured must not be asked. */
bool vgpu_own_stream_idle(CUcontext context) {
    const CUstreamCaptureMode mode = vgpu_relax();
    const bool entered = vgpu_streams_enter(context);
    const bool idle = entered && !vgpu_capturing(CU_STREAM_PER_THREAD) && DRIVER(cuStreamQuery) &&
                      DRIVER(cuStreamQuery)(CU_STREAM_PER_THREAD) == CUDA_SUCCESS;
    if (entered)
        vgpu_streams_leave();
    vgpu_restore(mode);
    return idle;
}

static bool own_streams_idle(void) {
    for (struct vgpu_passage *passage = atomic_load(&vgpu_passages); passage; passage = passage->next) {
        const uint64_t finished = atomic_load_explicit(&passage->finished, memory_order_acquire);
        if (atomic_load_explicit(&passage->handed_in, memory_order_acquire) == finished)
            continue;
        const CUcontext context = atomic_load(&passage->own);
        if (passage == vgpu_passage && !passage->shared) {
            if (!vgpu_own_stream_idle(context))
                return false;
            own_finished(passage);
        } else if (!vgpu_mark_idle(context) || atomic_load(&passage->handed_in) != atomic_load(&passage->finished)) {
            return false;
        }
    }
    return true;
}

static bool entries_idle(void) {
    for (size_t i = 0; i < entry_count;) {
        if (!vgpu_streams_enter(entries[i].context))
            return false;
        const CUcontext context = entries[i].context;
        bool idle = true;
        while (idle && i < entry_count && entries[i].context == context) {
            idle = finished(&entries[i]);
            if (idle && entries[i].kind == LEFTOVER)
                drop(i);
            else
                i++;
        }
        vgpu_streams_leave();
        if (!idle)
            return false;
    }
    return true;
}

bool vgpu_streams_idle(void) {
    if (atomic_load_explicit(&unknown, memory_order_relaxed) || vgpu_any_capture() || !vgpu_streams_lock())
        return false;
    const CUstreamCaptureMode mode = vgpu_relax();
    const bool idle = entries_idle() && own_streams_idle() && !vgpu_any_capture();
    vgpu_restore(mode);
    vgpu_streams_unlock();
    return idle && !atomic_load(&unknown);
}
