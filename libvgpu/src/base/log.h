/* Messages of the library: silent unless LIBCUDA_LOG_LEVEL asks, because a preloaded library has no business on a
 * program's stderr. The one exception is VGPU_LOG_ALERT: without it nobody could find out. */
#ifndef VGPU_LOG_H
#define VGPU_LOG_H

/* LIBCUDA_LOG_LEVEL: 0 nothing, unset alerts, 1 errors, 2 warnings, 3 information, 4 everything. */
enum vgpu_log_level { VGPU_LOG_ALERT, VGPU_LOG_ERROR, VGPU_LOG_WARNING, VGPU_LOG_INFO, VGPU_LOG_DEBUG };

/* One line to stderr in one write, errno kept; nothing when the level is not asked for. */
void vgpu_log(enum vgpu_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
#endif
