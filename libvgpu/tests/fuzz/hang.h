/* What a family of processes was doing when a program did not end. */
#ifndef VGPU_FUZZ_HANG_H
#define VGPU_FUZZ_HANG_H
#include <sys/types.h>

/* Writes to a file, for every thread of every process of the group: its name, state, place in the kernel, system call,
 * registers' place in the program and what on its stack may be return addresses, as FILE+OFFSET for addr2line. Root
 * sees more of the kernel's side. */
void hang_report(const char *path, pid_t group);
#endif
