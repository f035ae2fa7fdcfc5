/* Keeps what one thread remembers of its launches. */
#include "pacer/launch_thread.h"

#include <pthread.h>

#include "gate/gate.h"
#include "ledger/attach.h"
#include "ledger/ledger.h"
#include "pacer/launch_sources.h"
#include "pacer/prepaid.h"
#include "pacer/samples.h"
#include "pacer/settle.h"

#define SAMPLE_EVERY_NS 2000000u /* mean time between two measurements of a thread */
#define FEWEST_SAMPLES 8192u     /* but at least one in this many launches */
#define FIRST_DISTANCE 16u       /* a new thread's first measurement comes within this many launches */
#define BATCH_LAUNCHES 64u       /* after this many launches a thread looks up again */
#define LOOK_EVERY_NS 100000u    /* a thread that launches fast looks up after this time */
#define MOST_LAUNCHES 512u
#define BATCH_IDLE_NS 10000000u /* a thread with longer pauses pays for each launch alone */

/* What a thread has paid in advance; the rest is lost when the thread ends. The rest is at most BATCH_NS of pacer.c,
 * and at most about what the thread spent in its last BATCH_IDLE_NS. Without a limit nothing is paid: `left_ns` is then
 * the GPU time that the thread may keep uncounted. It is no credit when a limit comes. A forked child starts with
 * nothing (epoch). */
__thread __attribute__((tls_model("initial-exec"))) struct vgpu_prepaid vgpu_prepaid;
__thread __attribute__((tls_model("initial-exec"))) struct vgpu_launch_thread vgpu_self;

_Atomic uint32_t vgpu_prepaid_epoch = 1;
_Atomic uint8_t vgpu_one_card;

static void ask_for_cards(void) {
    int count = 0;
    if (DRIVER(cuDeviceGetCount) && DRIVER(cuDeviceGetCount)(&count) == CUDA_SUCCESS)
        atomic_store(&vgpu_one_card, count != 1             ? VGPU_SEVERAL_CARDS
                                     : vgpu_gate_is_armed() ? VGPU_ONE_CARD_GATED
                                                            : VGPU_ONE_CARD);
}

static uint64_t limits_selector(void) {
    return atomic_load_explicit(&vgpu_mapped.limits->selector, memory_order_relaxed);
}

/* Counts what the thread has launched since its last count, so that other processes see it. Returns the number of
 * launches. */
static uint32_t count_prepaid(void) {
    const uint32_t launches = vgpu_self.filled - vgpu_prepaid.left;
    if (!launches)
        return 0;
    const uint64_t gpu_ns = vgpu_self.filled_ns - vgpu_prepaid.left_ns;
    vgpu_settle_account(vgpu_self.card, (int64_t)gpu_ns, launches);
    vgpu_self.filled = vgpu_prepaid.left;
    vgpu_self.filled_ns = vgpu_prepaid.left_ns;
    return launches;
}

/* The last count of an ending thread. A forked child that has never read its limits only has its parent's numbers,
 * which do not count. */
static void end_thread(void *unused) {
    (void)unused;
    struct vgpu_local *local = vgpu_local();
    if (local && atomic_load_explicit(&local->enforced, memory_order_acquire) &&
        vgpu_prepaid.epoch == atomic_load(&vgpu_prepaid_epoch))
        count_prepaid();
}

static void end_one_thread(void *unused) {
    end_thread(unused);
    vgpu_samples_stream_going(CU_STREAM_PER_THREAD);
}

/* Weak: before glibc 2.34 these functions are in libpthread, and this library must not load libpthread into programs
 * without threads. */
#pragma weak pthread_key_create
#pragma weak pthread_setspecific
static pthread_key_t ending;

/* Lets pthreads call end_one_thread when the calling thread ends. The first thread makes the key; a thread that comes
 * before the key exists gets no call. */
static void announce_end(void) {
    static atomic_int state; /* 0: no key yet, 1: a thread is making it, or making it failed, 2: the key exists */
    int none = 0;
    if (pthread_key_create && pthread_setspecific && atomic_compare_exchange_strong(&state, &none, 1) &&
        pthread_key_create(&ending, end_one_thread) == 0)
        atomic_store(&state, 2);
    if (atomic_load(&state) == 2)
        pthread_setspecific(ending, &vgpu_self);
}

/* The thread that ends the process gets no call for its key. */
__attribute__((destructor)) static void end_process(void) {
    end_thread(NULL);
}

void vgpu_thread_look_up(unsigned card, uint64_t key, CUstream stream, uint64_t now) {
    uint32_t current = atomic_load_explicit(&vgpu_prepaid_epoch, memory_order_relaxed);
    if (vgpu_prepaid.epoch == current) {
        const uint32_t launches = count_prepaid();
        vgpu_self.recent_ns += now - vgpu_self.looked_ns - vgpu_self.recent_ns / 16;
        vgpu_self.recent_launches += 16 * (launches + 1) - vgpu_self.recent_launches / 16;
        vgpu_self.interval_ns = vgpu_self.recent_ns * 16 / vgpu_self.recent_launches;
        vgpu_self.until_sample -= launches + 1;
        if (vgpu_self.interval_ns >= VGPU_FAST_NS) { /* a number drawn when launches were faster would take too long */
            const int64_t longest = 2 * SAMPLE_EVERY_NS > vgpu_self.interval_ns
                                        ? (int64_t)(2 * SAMPLE_EVERY_NS / vgpu_self.interval_ns)
                                        : 1;
            vgpu_self.until_sample = vgpu_self.until_sample < longest ? vgpu_self.until_sample : longest;
        }
        vgpu_sources_note(vgpu_prepaid.sources | vgpu_sources_member(stream, &vgpu_prepaid), launches + 1, now);
    } else {
        uint64_t random = vgpu_self.random;
        __builtin_memset(&vgpu_self, 0, sizeof vgpu_self);
        __builtin_memset(&vgpu_prepaid, 0, sizeof vgpu_prepaid);
        vgpu_self.random = random ? random : (uint64_t)(uintptr_t)&vgpu_self ^ now ^ key;
        vgpu_prepaid.epoch = current;
        vgpu_self.card = card;
        vgpu_self.interval_ns = SAMPLE_EVERY_NS;
        vgpu_self.until_sample = (int64_t)(vgpu_random(&vgpu_self.random) % FIRST_DISTANCE);
        announce_end();
        if (!atomic_load_explicit(&vgpu_one_card, memory_order_relaxed))
            ask_for_cards();
        vgpu_sources_note(vgpu_sources_member(stream, &vgpu_prepaid), 1, now);
    }
    if (vgpu_self.card != card || now - vgpu_self.looked_ns > BATCH_IDLE_NS)
        vgpu_self.batch_ns = 0;
    if (vgpu_self.card != card)
        vgpu_prepaid.left_ns = 0;
    vgpu_self.card = card;
    vgpu_prepaid.selector = limits_selector();
    vgpu_prepaid.sources = 0;
    vgpu_self.looked_ns = now;
}

void vgpu_thread_draw(bool settled) {
    uint64_t mean = vgpu_self.interval_ns ? SAMPLE_EVERY_NS / vgpu_self.interval_ns : FEWEST_SAMPLES;
    mean = mean < FEWEST_SAMPLES && !(settled && vgpu_self.interval_ns < VGPU_FAST_NS) ? mean : FEWEST_SAMPLES;
    vgpu_self.until_sample = mean <= 1 ? 0 : (int64_t)(vgpu_random(&vgpu_self.random) % (2 * mean - 1));
}

uint32_t vgpu_thread_ahead(void) {
    const uint64_t fast = LOOK_EVERY_NS / (vgpu_self.interval_ns + 1);
    const int64_t most = fast <= BATCH_LAUNCHES ? BATCH_LAUNCHES : fast < MOST_LAUNCHES ? (int64_t)fast : MOST_LAUNCHES;
    return vgpu_self.until_sample > most ? (uint32_t)most
           : vgpu_self.until_sample > 0  ? (uint32_t)vgpu_self.until_sample
                                         : 0;
}
