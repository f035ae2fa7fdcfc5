/* Memory that is mapped into arrays. */
#ifndef VGPU_SPARSE_H
#define VGPU_SPARSE_H
#include <stdbool.h>

#include "loader/driver.h"

/* A sparse array (or mipmapped array) was made, in the current context. */
void vgpu_sparse_made(const void *array);
/* Before an array or a context is destroyed. What it answers goes to vgpu_sparse_gone; until then nothing is mapped
 * into an array: the next one may get the same handle. */
bool vgpu_sparse_going(void);
/* After it; `gone`: the driver has destroyed the array (or mipmapped array), or, where that is NULL, the context. */
void vgpu_sparse_gone(bool going, bool gone, const void *array, CUcontext context);
/* In a forked child: ledger/process.h. */
void vgpu_sparse_forget(void);
#endif
