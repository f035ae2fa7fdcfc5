/* Turns a SIGBUS in a mapped file into an error. */
#include "region/sigbus_guard.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>

static _Thread_local struct {
    sigjmp_buf back;
    uintptr_t start, end; /* end 0: not at work */
} guarded;
static struct sigaction previous;

static void on_bus_error(int number, siginfo_t *info, void *context) {
    const uintptr_t address = (uintptr_t)info->si_addr;
    if (guarded.end && address >= guarded.start && address < guarded.end)
        siglongjmp(guarded.back, 1);
    if (previous.sa_flags & SA_SIGINFO)
        previous.sa_sigaction(number, info, context);
    else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN)
        previous.sa_handler(number);
    else
        sigaction(number, &previous,
                  NULL); /* returning repeats the access, which now ends the process as without this handler */
}

static void install(void) {
    struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &previous);
}

int vgpu_guarded(const void *start, size_t size, int (*work)(void *context), void *context) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, install);
    if (sigsetjmp(guarded.back, 1) != 0) {
        guarded.end = 0;
        return -EFAULT;
    }
    guarded.start = (uintptr_t)start;
    guarded.end = guarded.start + size;
    const int result = work(context);
    guarded.end = 0;
    return result;
}
