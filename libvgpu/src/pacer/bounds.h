/* What the times of a measurement say about the launch, without a driver: how long it took, or at least and at most. */
#ifndef VGPU_BOUNDS_H
#define VGPU_BOUNDS_H
#include "pacer/samples.h"

#define VGPU_RESOLUTION_NS 500.0 /* of an event's time: cuda.h says about 0.5 us */

/* fired: when the first event happened, CLOCK_MONOTONIC ns; whole: ns from then until the second one. Fills all but
 * fresh_ns. */
void vgpu_measure_bounds(const struct vgpu_sample *sample, double fired, double whole, struct vgpu_measure *out);
#endif
