/* Memory that is mapped into arrays. */
#ifndef VGPU_SPARSE_H
#define VGPU_SPARSE_H
#include <stdbool.h>

#include "loader/driver.h"

/* The program has made a sparse array (or mipmapped array) in the current context. */
void vgpu_sparse_made(const void *array);
/* Call before an array or a context is destroyed; pass the result to vgpu_sparse_gone. Until then no memory is mapped
 * into an array, because the next array may get the same handle. */
bool vgpu_sparse_going(void);
/* Call afterwards. `gone`: the driver has destroyed the array (or mipmapped array); if `array` is NULL, the context. */
void vgpu_sparse_gone(bool going, bool gone, const void *array, CUcontext context);
/* In a forked child: ledger/process.h. */
void vgpu_sparse_forget(void);
#endif
