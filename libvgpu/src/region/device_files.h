/* Device files of the driver that a process has open. While they are open, the driver keeps the memory allocated
 * through them, also after exec. */
#ifndef VGPU_DEVICE_FILES_H
#define VGPU_DEVICE_FILES_H
#include <stdbool.h>

/* `process`: its name below /proc. True also if its descriptors cannot be seen. */
bool vgpu_device_files_open(const char *process);
/* Marks the open device files: call once, before this program opens any, so that all open ones are inherited. The mark
 * is the signal that the open file would send, set to SIGIO, which it would send anyway. The mark stays with the open
 * file when a descriptor is moved or its number is reused, and needs no descriptor. */
void vgpu_device_files_mark(void);
/* A marked file is still open in this process, under any number. */
bool vgpu_device_files_marked(void);
/* A device file is open in this process that a new program would inherit (exec). */
bool vgpu_device_files_pass(void);
/* Sets or reads the mark of any descriptor. False: the file takes no mark. */
bool vgpu_inherited_mark(int fd);
bool vgpu_inherited_marked(int fd);
/* Calls visit for each descriptor of this process until visit returns true; does not use malloc. False: no visit
 * returned true, or the descriptors cannot be seen. */
bool vgpu_descriptors_any(bool (*visit)(int fd, void *context), void *context);
#endif
