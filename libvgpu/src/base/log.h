/* The library's messages. Silent unless LIBCUDA_LOG_LEVEL is set, because a preloaded library should not write to a
 * program's stderr. VGPU_LOG_ALERT is the exception: without it no user would learn of the problem. */
#ifndef VGPU_LOG_H
#define VGPU_LOG_H

/* LIBCUDA_LOG_LEVEL: 0 nothing, unset alerts, 1 errors, 2 warnings, 3 information, 4 everything. */
enum vgpu_log_level { VGPU_LOG_ALERT, VGPU_LOG_ERROR, VGPU_LOG_WARNING, VGPU_LOG_INFO, VGPU_LOG_DEBUG };

/* Writes one line to stderr in one write and keeps errno; writes nothing if the level is off. */
void vgpu_log(enum vgpu_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
#endif
