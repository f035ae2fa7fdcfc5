#include "fork.h"

void vgpu_forget_parent(void) {
    vgpu_sizes_forget();
    vgpu_pools_forget();
    vgpu_primaries_forget();
    vgpu_blocks_forget();
    vgpu_samples_forget();
}
