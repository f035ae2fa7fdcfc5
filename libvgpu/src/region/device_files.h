/* Device files of the driver that a process has open. As long as they are, the driver keeps what was allocated through
 * them, whatever program the process runs meanwhile. */
#ifndef VGPU_DEVICE_FILES_H
#define VGPU_DEVICE_FILES_H
#include <stdbool.h>

/* `process`: its name below /proc. True also when that cannot be seen. */
bool vgpu_device_files_open(const char *process);
/* To be called once, before this program opens any: those that are open now were inherited. The mark is the signal that
 * the open file would send, set to SIGIO, which it would send anyway. It stays with the open file when a descriptor is
 * moved or its number is used again, and costs no descriptor. */
void vgpu_device_files_mark(void);
/* One of those marked is still open in this process, under whatever number. */
bool vgpu_device_files_marked(void);
/* One is open in this process that another program would inherit. */
bool vgpu_device_files_pass(void);
/* The mark itself, for a descriptor of whatever file; false: it takes none. */
bool vgpu_inherited_mark(int fd);
bool vgpu_inherited_marked(int fd);
/* Calls visit for each descriptor of this process until it answers true; nothing here uses malloc. False: they cannot
 * be seen, or none did. */
bool vgpu_descriptors_any(bool (*visit)(int fd, void *context), void *context);
#endif
