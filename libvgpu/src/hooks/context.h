/* Contexts that no hooked call has made, and their limits. */
#ifndef VGPU_HOOKS_CONTEXT_H
#define VGPU_HOOKS_CONTEXT_H
#include <stdbool.h>

#include "loader/driver.h"

/* A context is current that this thread has not met: it is charged if no hooked call has made it; the CUDA runtime can
 * make one through the driver's private tables. False: that could not be found out just now. */
bool vgpu_context_seen(CUcontext context, CUdevice device, unsigned card);
/* In a forked child: ledger/process.h. */
void vgpu_primaries_forget(void);
void vgpu_context_limits_forget(void);
#endif
