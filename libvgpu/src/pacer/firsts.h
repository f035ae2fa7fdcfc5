/* Launches of which little is known yet. */
#ifndef VGPU_FIRSTS_H
#define VGPU_FIRSTS_H
#include "loader/driver.h"
#include "pacer/costs.h"

/* The second launch of an unknown or doubted key waits for the first one's measurement, so that a flood of long kernels
 * cannot start unpaid. Bounded, and once per key: a kernel may be waiting for something that this very thread will do
 * later. */
void vgpu_first_sample_await(struct vgpu_cost *cost);
/* Whether this launch is the one of its card of which nothing is known (owed.h). While another one is, it is waited
 * for, whatever it is of: no two need be alike, so that what is known of each would not help. Bounded, each time. */
bool vgpu_unknown_await(unsigned card);
/* The code of a function or kernel may be loaded by its first launch only (the default since CUDA 12.2), in the middle
 * of the measurement: it is loaded before. Not while a capture is open, which loading may break, nor for a context that
 * is not current. */
void vgpu_code_load(CUfunction function, CUcontext context);
#endif
