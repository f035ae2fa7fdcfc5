/* Turns the times of one measurement into bounds of the launch's GPU time. */
#include "pacer/bounds.h"

#define SPOILT_NS 5000.0 /* a host that was away for longer did more than call the driver */

static double at_least(double value, double least) {
    return value > least ? value : least;
}

void vgpu_measure_bounds(const struct vgpu_sample *sample, double fired, double whole, struct vgpu_measure *out) {
    const double launched = (double)sample->launched_ns, returned = (double)sample->returned_ns;
    /* the first event may have happened long before the launch */
    double begin = at_least(fired, launched), end = at_least(fired + whole, begin);
    const double latest = at_least(fired, returned); /* latest possible beginning */
    out->queued = fired > launched;
    /* CUDA_LAUNCH_BLOCKING: the call returned when the kernel had ended, so the kernel ran nearly the whole time */
    if (sample->blocks && end <= returned + SPOILT_NS) {
        /* Else the driver may not block: a program that set the variable too late pays for the whole time. */
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
    /* The kernel ended before the second event was recorded, on a stream that was idle before. For a short kernel the
     * best guess is half the time. If the time between launches is shorter, the guess is half of that, because longer
     * kernels would have queued up. For a long kernel, the whole time is the only bound. */
    if (end <= returned + VGPU_RESOLUTION_NS) {
        out->spoilt |= end - begin > SPOILT_NS;
        const double apart = (double)sample->apart_ns;
        if (out->most_ns < VGPU_LONG_RUN_NS)
            end = begin + (out->queued || end - begin < apart ? end - begin : apart) / 2;
    }
    /* The payment is proven wrong, and the real time is unknown. So the launch pays the most that it can have taken. */
    if (out->spoilt && vgpu_measure_refutes(out, sample))
        end = begin + (double)out->most_ns;
    out->begin_ns = (uint64_t)begin;
    out->end_ns = (uint64_t)end;
}
