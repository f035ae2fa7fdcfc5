/* Work of which nothing is known: how long it takes, nor how long work like it took. One launch of that kind at a time is under way on a card, as far as
 * waiting for it can do, so that a flood of long kernels cannot start unpaid; and what a process leaves unpaid when it ends is in the region, for who
 * reaps it. */
#ifndef VGPU_OWED_H
#define VGPU_OWED_H
#include <stdbool.h>
#include <stdint.h>

/* The calling thread's launch is the one; false: another is under way. now: CLOCK_MONOTONIC ns, not 0. */
bool vgpu_unknown_begin(unsigned card, uint64_t now);
/* It has been measured, or was none. */
void vgpu_unknown_end(unsigned card);
/* For how long the one of that card has been under way; 0: there is none. */
uint64_t vgpu_unknown_age(unsigned card, uint64_t now);

/* A launch that is not paid begins (at `now`) and ends: kept in the process's slot of the region meanwhile. */
void vgpu_owed_begin(unsigned card, uint64_t now);
void vgpu_owed_end(unsigned card);
/* The process has paid while something is owed. */
void vgpu_owed_paid(unsigned card, int64_t gpu_ns);
#endif
