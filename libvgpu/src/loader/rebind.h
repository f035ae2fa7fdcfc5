/* Libraries opened with RTLD_DEEPBIND look into their own dependencies before the global scope, and so pass by what is
 * preloaded. */
#ifndef VGPU_REBIND_H
#define VGPU_REBIND_H

/* Binds every loaded object's references to dlsym, dlvsym, dlopen and hooked functions that lead to libc or the driver,
 * or nowhere yet, to what the global scope has. To be called after such an open; does nothing when there is nothing to
 * do. */
void vgpu_rebind(void);
#endif
