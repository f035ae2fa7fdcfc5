/* Processes beside the one that is tested: each plays a lane of the program, waits, and ends in one of several ways. */
#ifndef VGPU_FUZZ_HELPERS_H
#define VGPU_FUZZ_HELPERS_H
#include <stddef.h>
#include <stdint.h>

#include "play.h"

/* How a helper ends. */
enum ending { ENDING_CLEAN, ENDING_EXIT, ENDING_KILLED, ENDING_KILLED_AT_ONCE, ENDINGS };

/* Before the first CUDA call of this process: helpers are forks of a process that never makes one. */
void helpers_prepare(void);
/* Starts a helper; ENDING_KILLED_AT_ONCE: it dies at some moment of its program, by `moment` in units of 50 us;
 * `graphs`: as of play_begin. */
void helper_start(unsigned lane, enum ending ending, unsigned moment, bool graphs, const struct operation *operations,
                  size_t count);
/* Waits until all helpers have played, those that are killed at once apart. */
void helpers_wait(void);
/* Lets all helpers end, and waits until they have. */
void helpers_end(void);
#endif
