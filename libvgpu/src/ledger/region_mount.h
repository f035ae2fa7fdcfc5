/* Whether the agent has given this process's container a region, also where it cannot be found any more. */
#ifndef VGPU_REGION_MOUNT_H
#define VGPU_REGION_MOUNT_H
#include <stdbool.h>

/* A container's region, as the agent mounts it. */
#ifndef VGPU_MANAGED_DIR
#define VGPU_MANAGED_DIR "/run/vgpu"
#endif

/* To be asked when there is nothing at VGPU_MANAGED_DIR: true if there was when this library was loaded (the root
 * directory has changed since), or if the files are still mounted (somebody has moved the folder, or hidden it under
 * another mount). *unsure: that cannot be told now, for want of descriptors or memory, and is to be asked again; until
 * then it is true. */
bool vgpu_region_elsewhere(bool *unsure);
#endif
