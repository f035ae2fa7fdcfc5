/* Logical endpoints. */
#ifndef VGPU_HOOKS_ENDPOINTS_H
#define VGPU_HOOKS_ENDPOINTS_H

/* In a forked child: ledger/process.h. */
void vgpu_endpoints_forget(void);
#endif
