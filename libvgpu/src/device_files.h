/* Device files of the driver that a process has open. As long as they are, the driver keeps what was allocated through them, whatever program the process
 * runs meanwhile. */
#ifndef VGPU_DEVICE_FILES_H
#define VGPU_DEVICE_FILES_H
#include <stdbool.h>

/* `process`: its name below /proc. True also when that cannot be seen. */
bool vgpu_device_files_open(const char *process);
/* To be called once, before this program opens any: those that are open now were inherited. */
void vgpu_device_files_mark(void);
/* One of those marked is still open in this process, under whatever number. */
bool vgpu_device_files_marked(void);
#endif
