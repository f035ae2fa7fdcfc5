/* Libraries opened with RTLD_DEEPBIND search their own dependencies before the global scope, and so bypass preloaded
 * libraries. */
#ifndef VGPU_REBIND_H
#define VGPU_REBIND_H

/* Fixes references to dlsym, dlvsym, dlopen and hooked functions, in every loaded object. References to libc, to the
 * driver, or still unbound ones now lead to the definition of the global scope. Call after an open with RTLD_DEEPBIND;
 * does nothing if there is nothing to fix. */
void vgpu_rebind(void);
#endif
