/* Computes from the times of a measurement how long the launch took, or at least and at most. Needs no driver. */
#ifndef VGPU_BOUNDS_H
#define VGPU_BOUNDS_H
#include "pacer/samples.h"

#define VGPU_RESOLUTION_NS 500.0 /* resolution of event times: cuda.h says about 0.5 us */

/* fired: when the first event happened, CLOCK_MONOTONIC ns; whole: ns from the first event to the second. Fills all
 * fields but fresh_ns. */
void vgpu_measure_bounds(const struct vgpu_sample *sample, double fired, double whole, struct vgpu_measure *out);
#endif
