/* Whether the agent has given this process's container a region, even if the process cannot find the region any
 * more. */
#ifndef VGPU_REGION_MOUNT_H
#define VGPU_REGION_MOUNT_H
#include <stdbool.h>

/* A container's region, as the agent mounts it. */
#ifndef VGPU_MANAGED_DIR
#define VGPU_MANAGED_DIR "/run/vgpu"
#endif

/* Call if VGPU_MANAGED_DIR is empty or missing. True: it existed when this library was loaded (the root directory has
 * changed since), or the files are still mounted (a process has moved the folder, or hidden it under another mount).
 * *unsure: unknown now, because there are no descriptors or no memory; ask again, and treat it as true until then. */
bool vgpu_region_elsewhere(bool *unsure);
#endif
