/* Computes from events when a launch ran, on CLOCK_MONOTONIC. */
#include <stdatomic.h>

#include "pacer/bounds.h"
#include "pacer/sampler.h"

#define REBASE_MS 4000.0f /* a float of milliseconds resolves 0.5 us up to here */
#define ORIGIN_NS 1e9     /* the first measurements lie before the first base */
#define DRIFT 1e-4        /* most that two clocks drift apart: 100 ppm is a bad clock */
#define CALIBRATIONS 64u
#define MOST_EVENT_MS 0.05f /* a longer time cannot be the cost of an event */
#define UNLIKE_NS 1100.0    /* two equal times differ by less, at a resolution of half a microsecond */

/* Makes the end of this sample, at `where_ns`, the new base. */
static void rebase(struct sampler *sampler, struct vgpu_sample *sample, double where_ns) {
    CUevent old = sampler->base;
    if (!old && DRIVER(cuEventCreate)(&old, CU_EVENT_DEFAULT) != CUDA_SUCCESS)
        return;
    sampler->base = sample->after;
    sampler->base_ns = where_ns;
    sample->after = old;
}

/* CLOCK_MONOTONIC minus the time line. On an idle stream, an event happens a constant time after it was recorded. A
 * kernel begins equally late after its launch, so the constant does not matter. On a busy stream an event happens
 * later. So the largest difference is right, even if the stream has been busy for long. */
static double lag_of(struct sampler *sampler, const struct vgpu_sample *sample, double begin) {
    const double lag = (double)sample->recorded_ns - begin;
    const double known = sampler->lag - DRIFT * ((double)sample->recorded_ns - (double)sampler->lag_ns);
    if (!sampler->lag_ns || lag > known) {
        sampler->lag = lag;
        sampler->lag_ns = sample->recorded_ns;
        return lag - VGPU_RESOLUTION_NS / 2; /* event times are rounded down */
    }
    return known - VGPU_RESOLUTION_NS / 2;
}

static uint64_t on_line(uint64_t clock_ns, double lag) {
    const double line = (double)clock_ns - lag + ORIGIN_NS;
    return line > 0 ? (uint64_t)line : 0;
}

/* What an event itself takes on the card; a pair around a kernel is longer than the kernel by that. It is measured
 * between two events recorded behind each other while the card is still busy with earlier work. Times are rounded down
 * to half a microsecond, so vgpu averages several. */
static struct {
    _Atomic uint32_t count;
    _Atomic uint32_t mean_ns;
    double sum, least;
} costs[VGPU_MAX_CARDS]; /* written by the holder of the samplers' lock */

bool vgpu_events_uncalibrated(unsigned card) {
    return atomic_load_explicit(&costs[card].count, memory_order_relaxed) < CALIBRATIONS;
}

static double event_ns(unsigned card) {
    return atomic_load_explicit(&costs[card].mean_ns, memory_order_relaxed);
}

/* `ended`: when the sample's second event happened, CLOCK_MONOTONIC ns. */
static void calibrate(struct sampler *sampler, const struct vgpu_sample *sample, double ended) {
    float apart_ms = 0;
    const unsigned card = sample->card;
    if (sampler->probing != sample || !sample->probed_ns || ended < (double)sample->probed_ns ||
        DRIVER(cuEventElapsedTime)(&apart_ms, sample->after, sampler->probe) != CUDA_SUCCESS || !(apart_ms >= 0) ||
        apart_ms > MOST_EVENT_MS)
        return;
    const double apart = (double)apart_ms * 1e6;
    const uint32_t count = atomic_load_explicit(&costs[card].count, memory_order_relaxed);
    if (!count || apart < costs[card].least)
        costs[card].least = apart;
    if (apart > costs[card].least + UNLIKE_NS) /* other work had the card in between */
        return;
    costs[card].sum += apart;
    atomic_store_explicit(&costs[card].mean_ns, (uint32_t)(costs[card].sum / (count + 1)), memory_order_relaxed);
    atomic_store_explicit(&costs[card].count, count + 1, memory_order_relaxed);
}

bool vgpu_sample_measure(struct sampler *sampler, struct vgpu_sample *sample, struct vgpu_measure *out) {
    __typeof__(&cuEventElapsedTime) elapsed = DRIVER(cuEventElapsedTime);
    float whole_ms = 0, start_ms = 0;
    if (!elapsed || elapsed(&whole_ms, sample->before, sample->after) != CUDA_SUCCESS || !(whole_ms >= 0))
        return false;
    const double all = (double)whole_ms * 1e6, cost = event_ns(sample->card), whole = all > cost ? all - cost : 0;
    double line = -all;
    if (sampler->base) {
        if (elapsed(&start_ms, sampler->base, sample->before) != CUDA_SUCCESS)
            return false;
        line = sampler->base_ns + (double)start_ms * 1e6;
    }
    const double lag = lag_of(sampler, sample, line);
    vgpu_measure_bounds(sample, line + lag, whole, out);
    calibrate(sampler, sample, line + lag + all);
    if (!sampler->base || start_ms + whole_ms > REBASE_MS)
        rebase(sampler, sample, line + all);
    /* `lag` may change from one sample to the next */
    const uint64_t from = on_line(out->begin_ns, lag), to = on_line(out->end_ns, lag);
    out->fresh_ns = vgpu_spans_add(&sampler->covered, from, to);
    out->took_ns = vgpu_spans_add(&sampler->measured, from, to);
    return true;
}

void vgpu_sample_bound(struct sampler *sampler, const struct vgpu_sample *sample, uint64_t end,
                       struct vgpu_measure *out) {
    const uint64_t begin = sample->launched_ns;
    const double lag = sampler->lag_ns ? sampler->lag : 0;
    end = end > begin ? end : begin;
    *out = (struct vgpu_measure){
        .begin_ns = begin, .end_ns = end, .spoilt = true, .bounded = true, .most_ns = end - begin};
    out->fresh_ns = vgpu_spans_add(&sampler->covered, on_line(begin, lag), on_line(end, lag));
}
