/* Launches of kernels and graphs of which little is known yet. */
#ifndef VGPU_FIRSTS_H
#define VGPU_FIRSTS_H
#include "loader/driver.h"
#include "pacer/costs.h"

/* The second launch of an unknown or doubted key waits for the measurement of the first, so that many long kernels
 * cannot start unpaid. The wait is bounded and happens once per key: a kernel may wait for something that this thread
 * will do later. */
void vgpu_first_sample_await(struct vgpu_cost *cost);
/* Whether this launch becomes the card's one unknown launch (owed.h). While another unknown launch is under way, this
 * call waits for it, whatever its key: two unknown kernels may differ, so one measurement says nothing of the other.
 * Every wait is bounded. */
bool vgpu_unknown_await(unsigned card);
/* Loads the code of a function or kernel before the measurement. Otherwise the first launch may load it in the middle
 * of the measurement (the default since CUDA 12.2). Does nothing while a capture is open, which loading may break, or
 * if the context is not current. */
void vgpu_code_load(CUfunction function, CUcontext context);
#endif
