/* Where in the parameters of a kernel there may be addresses: every aligned word of eight bytes. Asked of the driver
 * once per function (CUDA 12.4), kept until any function goes: handles come back, and then mean another one. */
#ifndef VGPU_PARAMETERS_H
#define VGPU_PARAMETERS_H
#include <stdint.h>

#include "loader/driver.h"

#define VGPU_PARAMETER_WORDS 60u /* of one kernel, at most; further ones are not looked at */

struct vgpu_parameters {
    uint32_t count;
    struct vgpu_parameter_word {
        uint16_t parameter; /* its number */
        uint16_t offset;    /* in it, in bytes */
    } words[VGPU_PARAMETER_WORDS];
};

/* None where the driver does not say. */
void vgpu_parameters_of(CUfunction function, struct vgpu_parameters *out);
/* Functions have gone, or are about to. */
void vgpu_parameters_stale(void);
/* In a forked child: process.h. */
void vgpu_parameters_forget(void);
#endif
