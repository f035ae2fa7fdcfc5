/* Contexts that no hooked call has made, and the limits of contexts. */
#ifndef VGPU_HOOKS_CONTEXT_H
#define VGPU_HOOKS_CONTEXT_H
#include <stdbool.h>

#include "loader/driver.h"

/* A thread meets a current context for the first time. The context is charged if no hooked call made it: the CUDA
 * runtime can make one through the driver's private tables. False: this cannot be decided now. */
bool vgpu_context_seen(CUcontext context, CUdevice device, unsigned card);
/* In a forked child: ledger/process.h. */
void vgpu_primaries_forget(void);
void vgpu_context_limits_forget(void);
#endif
