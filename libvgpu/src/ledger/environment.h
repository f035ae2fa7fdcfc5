/* Limits from the environment, for programs that run without an agent. */
#ifndef VGPU_ENVIRONMENT_H
#define VGPU_ENVIRONMENT_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vgpu/agent.h"

/* "1g", "1024m", "1048576k" (powers of 1024, either case) or bytes. False: any other text, or more than 64 bits. */
bool vgpu_parse_size(const char *text, uint64_t *bytes);

/* Reads CUDA_DEVICE_MEMORY_LIMIT[_<card>], CUDA_DEVICE_SM_LIMIT[_<card>], CUDA_TASK_PRIORITY,
 * GPU_CORE_UTILIZATION_POLICY, CUDA_OVERSUBSCRIBE and ACTIVE_OOM_KILLER by secure_getenv. Returns 1 if they limit
 * anything, 0 if not, -EINVAL if one is invalid: then `note` names the variable, its value and the allowed values.
 * Cards are numbered as in NVML; every one of the 16 entries is filled. */
int vgpu_environment_limits(struct vgpu_limits *out, char *note, size_t note_size);

/* Whether ACTIVE_OOM_KILLER asks to end a process whose allocation is refused: 1, 0, or -EINVAL with a note. */
int vgpu_environment_kills(char *note, size_t note_size);
#endif
