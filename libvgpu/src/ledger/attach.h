/* Finds the region of this process: the part of ledger.h that opens files and reads the environment. */
#ifndef VGPU_ATTACH_H
#define VGPU_ATTACH_H
#include "ledger/ledger.h"
#include "ledger/local.h"

/* The answer of vgpu_mapping(), for callers that have attached. */
extern struct vgpu_mapping vgpu_mapped;

enum vgpu_mode vgpu_attach_slowly(struct vgpu_local *local);

/* The calling process, attached, and its mode; NULL: broken because there is no memory. */
static inline struct vgpu_local *vgpu_attached(enum vgpu_mode *mode) {
    struct vgpu_local *local = vgpu_local();
    const uint32_t attached = local ? atomic_load_explicit(&local->attached, memory_order_acquire) : 0;
    *mode = __builtin_expect(attached != 0, 1) ? (enum vgpu_mode)(attached - 1) : vgpu_attach_slowly(local);
    return local;
}
#endif
