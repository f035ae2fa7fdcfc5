/* Working on a mapped file that somebody else may cut short: the container owns `usage`, and a truncated mapping raises
 * SIGBUS, which must not end the node agent. */
#ifndef VGPU_SIGBUS_GUARD_H
#define VGPU_SIGBUS_GUARD_H
#include <stddef.h>

/* Calls work(context) and returns its result; -EFAULT when it touched a part of [start, start + size) whose file is
 * gone, and was left there. */
int vgpu_guarded(const void *start, size_t size, int (*work)(void *context), void *context);
#endif
