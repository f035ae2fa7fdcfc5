/* Threads allocate and free while the program forks again and again; every child frees what is not its own and must
 * come to its end. With an argument it forks by the bare system call, of which no fork handler hears. */
#define _GNU_SOURCE
#include <cuda.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define FORKS 300
#define PATIENCE_S 10

static atomic_bool stop;
static CUcontext context;

static void *churn(void *argument) {
    (void)argument;
    cuCtxSetCurrent(context);
    while (!stop) {
        CUdeviceptr pointer = 0;
        if (cuMemAlloc(&pointer, 4096) == CUDA_SUCCESS)
            cuMemFree(pointer);
    }
    return NULL;
}

int main(int count, char **arguments) {
    (void)arguments;
    pthread_t threads[4];
    CUdeviceptr pointers[64];
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context))
        return 1;
    for (int i = 0; i < 64; i++)
        if (cuMemAlloc(&pointers[i], 4096))
            return 1;
    for (int i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, churn, NULL);
    int stuck = 0;
    for (int i = 0; i < FORKS && !stuck; i++) {
        pid_t child = count > 1 ? (pid_t)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL) : fork();
        if (child == 0) {
            alarm(PATIENCE_S); /* its default action ends a child that hangs */
            for (int k = 0; k < 64; k++)
                cuMemFree(pointers[k]);
            _exit(0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        stuck = !WIFEXITED(status);
    }
    stop = true;
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    puts(stuck ? "a child hung" : "done");
    return 0;
}
