/* Where a kernel's parameters may hold addresses: every aligned word of eight bytes. Asks the driver once per function
 * (CUDA 12.4). Keeps the answers until a function is unloaded: its handle may come back for another function. */
#ifndef VGPU_PARAMETERS_H
#define VGPU_PARAMETERS_H
#include <stdint.h>

#include "loader/driver.h"

#define VGPU_PARAMETER_WORDS 60u /* most words of one kernel; further words are ignored */

struct vgpu_parameters {
    uint32_t count;
    struct vgpu_parameter_word {
        uint16_t parameter; /* number of the parameter */
        uint16_t offset;    /* offset in the parameter, in bytes */
    } words[VGPU_PARAMETER_WORDS];
};

/* Empty if the driver does not say. */
void vgpu_parameters_of(CUfunction function, struct vgpu_parameters *out);
/* Functions have been unloaded, or are about to be. */
void vgpu_parameters_stale(void);
/* In a forked child: process.h. */
void vgpu_parameters_forget(void);
#endif
