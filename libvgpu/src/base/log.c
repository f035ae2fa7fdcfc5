/* Writes the library's log messages to stderr. */
#define _GNU_SOURCE
#include "base/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LINE_SIZE 512
#define NOTHING (-1)

static int wanted_level(void) {
    static atomic_int cached; /* level + 2; 0: not read yet */
    int level = atomic_load_explicit(&cached, memory_order_relaxed);
    if (level == 0) {
        const char *text = secure_getenv("LIBCUDA_LOG_LEVEL");
        const bool said = text && text[0] >= '0' && text[0] <= '4' && !text[1];
        level = (!said ? VGPU_LOG_ALERT : text[0] == '0' ? NOTHING : text[0] - '0') + 2;
        atomic_store_explicit(&cached, level, memory_order_relaxed);
    }
    return level - 2;
}

void vgpu_log(enum vgpu_log_level level, const char *format, ...) {
    if ((int)level > wanted_level())
        return;
    int kept = errno;
    char line[LINE_SIZE];
    int head = snprintf(line, sizeof line, "[vgpu %c %d] ", "EEWID"[level], (int)getpid());
    va_list arguments;
    va_start(arguments, format);
    int body = vsnprintf(line + head, sizeof line - (size_t)head - 1, format, arguments);
    va_end(arguments);
    size_t length = (size_t)head + (body > 0 ? (size_t)body : 0);
    if (length > sizeof line - 2)
        length = sizeof line - 2;
    line[length++] = '\n';
    /* plain write() is a cancellation point: a thread could be cancelled while it holds locks */
    if (syscall(SYS_write, STDERR_FILENO, line, length) < 0)
        errno = 0; /* a closed stderr must not disturb the program */
    errno = kept;
}
