/* Memory of another process, which came by a shareable handle. */
#ifndef VGPU_IMPORTED_H
#define VGPU_IMPORTED_H
#include <stdbool.h>
#include <stdint.h>

#include "loader/driver.h"

enum vgpu_import {
    VGPU_IMPORT_UNREADABLE, /* the driver does not tell what it is */
    VGPU_IMPORT_HOST,       /* memory of the host */
    VGPU_IMPORT_SIZED,      /* of a card, `bytes` large */
    VGPU_IMPORT_UNSIZED,    /* of a card; no part of it can be mapped by itself */
};

struct vgpu_imported {
    CUdevice device;
    uint64_t bytes;
};

/* The caller holds the lock of blocks: nobody else maps the handle meanwhile. */
enum vgpu_import vgpu_imported(CUmemGenericAllocationHandle handle, struct vgpu_imported *memory);
#endif
