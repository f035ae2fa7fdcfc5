/* Memory of another process, received by a shareable handle. */
#ifndef VGPU_IMPORTED_H
#define VGPU_IMPORTED_H
#include <stdbool.h>
#include <stdint.h>

#include "loader/driver.h"

enum vgpu_import {
    VGPU_IMPORT_UNREADABLE, /* the driver does not say */
    VGPU_IMPORT_HOST,       /* host memory */
    VGPU_IMPORT_SIZED,      /* memory of a card, of `bytes` bytes */
    VGPU_IMPORT_UNSIZED,    /* memory of a card; no part of it can be mapped alone */
};

struct vgpu_imported {
    CUdevice device;
    uint64_t bytes;
};

/* The caller holds the lock of blocks, so no other thread maps the handle meanwhile. */
enum vgpu_import vgpu_imported(CUmemGenericAllocationHandle handle, struct vgpu_imported *memory);
#endif
