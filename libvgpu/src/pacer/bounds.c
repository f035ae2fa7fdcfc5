/* Turns the times of one measurement into bounds of the launch's GPU time. */
#include "pacer/bounds.h"

#define SPOILT_NS 5000.0 /* a host that was away for longer was not just calling the driver */

static double at_least(double value, double least) {
    return value > least ? value : least;
}

void vgpu_measure_bounds(const struct vgpu_sample *sample, double fired, double whole, struct vgpu_measure *out) {
    const double launched = (double)sample->launched_ns, returned = (double)sample->returned_ns;
    /* the first event may have happened long before the launch */
    double begin = at_least(fired, launched), end = at_least(fired + whole, begin);
    const double latest = at_least(fired, returned); /* beginning */
    out->queued = fired > launched;
    /* the call was back when the kernel had ended: it ran all the while, or nearly */
    if (sample->blocks && end <= returned + SPOILT_NS) {
        /* else the driver may not block: who set it too late pays for all of it */
        if (end > returned && end - returned <= (end - begin) / 8)
            end = returned;
        out->spoilt = false;
        out->least_ns = 0;
        out->most_ns = (uint64_t)(end - begin);
        out->begin_ns = (uint64_t)begin;
        out->end_ns = (uint64_t)end;
        return;
    }
    out->spoilt = latest - begin > at_least(SPOILT_NS, (end - begin) / 8);
    out->least_ns = (uint64_t)at_least(end - latest, 0);
    out->most_ns = (uint64_t)(end - begin);
    /* Over before the second event was recorded, on a stream that had ended before. Of a short one half of the time, or
     * of that between launches, since longer kernels would have queued up, is the best guess. Of a long one, all of it
     * is the only bound. */
    if (end <= returned + VGPU_RESOLUTION_NS) {
        out->spoilt |= end - begin > SPOILT_NS;
        const double apart = (double)sample->apart_ns;
        if (out->most_ns < VGPU_LONG_RUN_NS)
            end = begin + (out->queued || end - begin < apart ? end - begin : apart) / 2;
    }
    /* It did not take what was paid for it. How long it took is not known, so it pays what it can have taken. */
    if (out->spoilt && vgpu_measure_refutes(out, sample))
        end = begin + (double)out->most_ns;
    out->begin_ns = (uint64_t)begin;
    out->end_ns = (uint64_t)end;
}
