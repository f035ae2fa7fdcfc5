/* Counts the streams and threads that launch. */
#include "pacer/launch_sources.h"

#define TURN_NS 20000000u     /* a source that has not launched for one to two turns is forgotten */
#define MEASURE_ALL_NS 80000u /* if launches are further apart on average, two events for each cost little */

_Atomic int32_t vgpu_series_left;
atomic_bool vgpu_measure_all;

static _Atomic uint64_t members_now, members_before, turned_at, launched;

void vgpu_sources_note(uint64_t members, uint32_t launches, uint64_t now) {
    uint64_t there = atomic_load_explicit(&members_now, memory_order_relaxed);
    if (members & ~there)
        atomic_fetch_or_explicit(&members_now, members, memory_order_relaxed);
    uint64_t count = atomic_fetch_add_explicit(&launched, launches, memory_order_relaxed) + launches;
    uint64_t turned = atomic_load_explicit(&turned_at, memory_order_relaxed);
    if (now - turned < TURN_NS || !atomic_compare_exchange_strong(&turned_at, &turned, now))
        return;
    atomic_store(&members_before, atomic_exchange(&members_now, 0));
    atomic_fetch_sub(&launched, count);
    atomic_store(&vgpu_measure_all, vgpu_sources_several() && (now - turned) / MEASURE_ALL_NS >= count);
}

bool vgpu_sources_several(void) {
    uint64_t all = atomic_load_explicit(&members_before, memory_order_relaxed) |
                   atomic_load_explicit(&members_now, memory_order_relaxed);
    return (all & (all - 1)) != 0;
}

void vgpu_series_begin(void) {
    int32_t left = atomic_load(&vgpu_series_left);
    if (left <= 0)
        atomic_compare_exchange_strong(&vgpu_series_left, &left, (int32_t)VGPU_SERIES);
}

void vgpu_sources_forget(void) {
    atomic_store(&vgpu_series_left, 0);
    atomic_store(&vgpu_measure_all, false);
    atomic_store(&members_before, 0);
    atomic_store(&members_now, 0);
}
