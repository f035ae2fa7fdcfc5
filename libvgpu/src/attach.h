/* Finding the region of this process: the part of ledger.h that opens files and reads the environment. */
#ifndef VGPU_ATTACH_H
#define VGPU_ATTACH_H
#include "ledger.h"
#include "local.h"

/* What vgpu_mapping() answers, for callers who have attached. */
extern struct vgpu_mapping vgpu_mapped;

/* The calling process, attached, in the mode it works in; NULL when it is broken for want of memory. */
struct vgpu_local *vgpu_attached(enum vgpu_mode *mode);
#endif
