/* Memory of another process, which came by a shareable handle. */
#ifndef VGPU_IMPORTED_H
#define VGPU_IMPORTED_H
#include <stdbool.h>
#include <stdint.h>

#include "driver.h"

struct vgpu_imported {
    CUdevice device;
    uint64_t bytes; /* of the card's memory; 0: it is the host's */
};

/* False: the driver does not tell. The caller holds the lock of blocks: nobody else maps the handle meanwhile. */
bool vgpu_imported(CUmemGenericAllocationHandle handle, struct vgpu_imported *memory);
#endif
