/* Libraries opened with RTLD_DEEPBIND search their own dependencies before the global scope, and so bypass preloaded
 * libraries. */
#ifndef VGPU_REBIND_H
#define VGPU_REBIND_H

/* In every loaded object, points references to dlsym, dlvsym, dlopen and hooked functions to the global definitions. A
 * reference changes only if it is unbound or leads to libc or the driver. Skips libc, the driver and this library. Call
 * after an open with RTLD_DEEPBIND; does nothing if no reference has to change. */
void vgpu_rebind(void);
#endif
