/* Looks names up in every way and prints which object answered: "<how> <name> <file name or ->". Arguments: names, or
 * --nvml to open that library instead of libcuda. Checks that errno is kept and that a second look-up gives the same
 * answer. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

static void say(const char *how, const char *name, void *address, void *again) {
    Dl_info info;
    const char *object = "-";
    if (address && dladdr(address, &info))
        object = strrchr(info.dli_fname, '/') ? strrchr(info.dli_fname, '/') + 1 : info.dli_fname;
    printf("%s %s %s%s%s\n", how, name, object, address == again ? "" : " DIFFERS", errno == 4321 ? "" : " ERRNO");
}

int main(int count, char **names) {
    int first = count > 1 && strcmp(names[1], "--nvml") == 0 ? 2 : 1;
    void *driver = dlopen(first == 2 ? "libnvidia-ml.so.1" : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void *program = dlopen(NULL, RTLD_NOW);
    if (!driver) {
        puts("no driver");
        return 1;
    }
    for (int i = first; i < count; i++) {
        errno = 4321;
        say("handle", names[i], dlsym(driver, names[i]), dlsym(driver, names[i]));
        say("default", names[i], dlsym(RTLD_DEFAULT, names[i]), dlsym(RTLD_DEFAULT, names[i]));
        say("next", names[i], dlsym(RTLD_NEXT, names[i]), dlsym(RTLD_NEXT, names[i]));
        say("program", names[i], dlsym(program, names[i]), dlsym(program, names[i]));
        say("version", names[i], dlvsym(driver, names[i], "NO_SUCH_VERSION"),
            dlvsym(driver, names[i], "NO_SUCH_VERSION"));
    }
    return 0;
}
