/* Unites busy intervals, so that overlapping work counts once. */
#include "pacer/busy_intervals.h"

#include <string.h>

_Static_assert((VGPU_RUNS & (VGPU_RUNS - 1)) == 0, "runs are numbered modulo a power of two");

uint64_t vgpu_spans_add(struct vgpu_spans *spans, uint64_t begin, uint64_t end) {
    uint64_t fresh = end > begin ? end - begin : 0;
    if (!fresh)
        return 0;
    /* [first, last): the intervals that the new one overlaps or touches; they are merged */
    unsigned first = spans->count;
    while (first > 0 && spans->at[first - 1].end >= begin)
        first--;
    unsigned last = first;
    struct vgpu_span merged = {begin, end};
    for (; last < spans->count && spans->at[last].begin <= end; last++) {
        const struct vgpu_span there = spans->at[last];
        const uint64_t from = there.begin > begin ? there.begin : begin, to = there.end < end ? there.end : end;
        fresh -= to > from ? to - from : 0;
        merged.begin = there.begin < merged.begin ? there.begin : merged.begin;
        merged.end = there.end > merged.end ? there.end : merged.end;
    }
    if (first == last && spans->count == VGPU_SPANS) {
        if (first == 0)
            return fresh; /* older than all intervals that there is room for */
        memmove(&spans->at[0], &spans->at[1], (VGPU_SPANS - 1) * sizeof spans->at[0]);
        spans->count--;
        first = --last;
    }
    memmove(&spans->at[first + 1], &spans->at[last], (spans->count - last) * sizeof spans->at[0]);
    spans->count += 1 - (last - first);
    spans->at[first] = merged;
    return fresh;
}

/* Later writers see the numbers of earlier ones: if two intervals overlap, only one writer pays for the common part. */
uint64_t vgpu_busy_publish(struct vgpu_pacer_card *pacer, uint64_t begin, uint64_t end) {
    const uint64_t mine = atomic_fetch_add(&pacer->run_count, 1);
    struct vgpu_run *run = &pacer->runs[mine % VGPU_RUNS];
    atomic_store_explicit(&run->end_ns, 0, memory_order_release);
    atomic_store_explicit(&run->begin_ns, begin, memory_order_relaxed);
    atomic_store_explicit(&run->end_ns, end, memory_order_release);

    struct vgpu_spans earlier = {0};
    for (uint64_t number = mine < VGPU_RUNS ? 0 : mine - VGPU_RUNS + 1; number < mine; number++) {
        const struct vgpu_run *other = &pacer->runs[number % VGPU_RUNS];
        const uint64_t other_end = atomic_load_explicit(&other->end_ns, memory_order_acquire);
        const uint64_t other_begin = atomic_load_explicit(&other->begin_ns, memory_order_relaxed);
        if (other_end > begin && other_begin < end && other_begin < other_end)
            vgpu_spans_add(&earlier, other_begin > begin ? other_begin : begin, other_end < end ? other_end : end);
    }
    return vgpu_spans_add(&earlier, begin, end);
}
