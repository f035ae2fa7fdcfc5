/* Guards work on a mapped file that another process may cut short. The container owns `usage`, and a truncated mapping
 * raises SIGBUS, which must not end the node agent. */
#ifndef VGPU_SIGBUS_GUARD_H
#define VGPU_SIGBUS_GUARD_H
#include <stddef.h>

/* Calls work(context) and returns its result. -EFAULT: work touched a part of [start, start + size) without a file
 * behind it, and was aborted there. */
int vgpu_guarded(const void *start, size_t size, int (*work)(void *context), void *context);
#endif
