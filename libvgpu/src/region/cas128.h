/* Compare-and-swap of one account word (128 bits), sequentially consistent, without libatomic. Compilers call that
 * library for 16-byte atomics, and an intercept library must not load it into every process. */
#ifndef VGPU_CAS128_H
#define VGPU_CAS128_H
#include <stdbool.h>
#include <stdint.h>

#include "vgpu/region.h"

/* A plain copy of a word, with its halves as one reader saw them. */
struct vgpu_word_value {
    uint64_t used;
    uint64_t tag;
};

static inline struct vgpu_word_value vgpu_word_load(const struct vgpu_word *word) {
    struct vgpu_word_value value;
    value.tag = atomic_load_explicit(&word->tag, memory_order_acquire);
    value.used = atomic_load_explicit(&word->used, memory_order_acquire);
    return value;
}

/* True: the word was `expected` and is `desired` now. False: the word was different (on aarch64 perhaps a torn read);
 * read it again. */
static inline bool vgpu_word_cas(struct vgpu_word *word, struct vgpu_word_value expected,
                                 struct vgpu_word_value desired) {
#if defined(__x86_64__)
    bool swapped;
    __asm__ __volatile__("lock cmpxchg16b %1\n\tsete %0"
                         : "=q"(swapped), "+m"(*word), "+a"(expected.used), "+d"(expected.tag)
                         : "b"(desired.used), "c"(desired.tag)
                         : "memory", "cc");
    return swapped;
#elif defined(__aarch64__)
    uint64_t used, tag;
    uint32_t failed;
    do {
        __asm__ __volatile__("ldaxp %0, %1, %2" : "=&r"(used), "=&r"(tag) : "Q"(*word) : "memory");
        if (used != expected.used || tag != expected.tag) {
            __asm__ __volatile__("clrex" ::: "memory");
            return false;
        }
        __asm__ __volatile__("stlxp %w0, %2, %3, %1"
                             : "=&r"(failed), "=Q"(*word)
                             : "r"(desired.used), "r"(desired.tag)
                             : "memory");
    } while (failed);
    __asm__ __volatile__("dmb ish" ::: "memory");
    return true;
#else
#error "vgpu: no 128-bit compare-and-swap for this processor"
#endif
}
#endif
