/* Reports the stacks of a family of processes. */
#define _GNU_SOURCE
#include "hang.h"

#include <dirent.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAPS 256
#define STACK_WORDS 1024
#define STOP_TRIES 200 /* of 5 ms: a thread in the kernel may not stop */

static struct {
    uint64_t begin, end, offset;
    char path[256];
} code[MAPS]; /* executable mappings of one process */
static unsigned code_count;

static void copy(FILE *out, const char *folder, const char *name) {
    char path[512], text[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = file < 0 ? -1 : read(file, text, sizeof text - 1);
    if (got >= 0)
        fprintf(out, "  %s: %.*s%s", name, (int)got, text, got && text[got - 1] == '\n' ? "" : "\n");
    else
        fprintf(out, "  %s: %s\n", name, strerror(errno));
    if (file >= 0)
        close(file);
}

static void read_maps(pid_t process) {
    char path[64], line[1024];
    snprintf(path, sizeof path, "/proc/%d/maps", (int)process);
    FILE *maps = fopen(path, "re");
    code_count = 0;
    while (maps && code_count < MAPS && fgets(line, sizeof line, maps)) {
        char rights[8];
        code[code_count].path[0] = 0;
        int read = sscanf(line, "%" SCNx64 "-%" SCNx64 " %7s %" SCNx64 " %*s %*s %255s", &code[code_count].begin,
                          &code[code_count].end, rights, &code[code_count].offset, code[code_count].path);
        code_count += read >= 4 && strchr(rights, 'x') != NULL;
    }
    if (maps)
        fclose(maps);
}

static void name_address(FILE *out, const char *what, uint64_t address) {
    for (unsigned i = 0; i < code_count; i++)
        if (address >= code[i].begin && address < code[i].end)
            fprintf(out, "  %s %s+0x%" PRIx64 "\n", what, code[i].path[0] ? code[i].path : "?",
                    address - code[i].begin + code[i].offset);
}

static bool stopped(pid_t thread) {
    if (ptrace(PTRACE_SEIZE, thread, NULL, NULL) != 0 || ptrace(PTRACE_INTERRUPT, thread, NULL, NULL) != 0)
        return false;
    for (int i = 0; i < STOP_TRIES; i++) {
        if (waitpid(thread, NULL, __WALL | WNOHANG) == thread)
            return true;
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    }
    return false;
}

static void frames(FILE *out, pid_t process, pid_t thread) {
    struct user_regs_struct registers;
    struct iovec vector = {&registers, sizeof registers};
    if (!stopped(thread) || ptrace(PTRACE_GETREGSET, thread, (void *)(uintptr_t)NT_PRSTATUS, &vector) != 0) {
        fprintf(out, "  registers: %s\n", strerror(errno));
        return;
    }
#if defined(__x86_64__)
    uint64_t place = registers.rip, stack = registers.rsp;
#elif defined(__aarch64__)
    uint64_t place = registers.pc, stack = registers.sp;
#endif
    static uint64_t words[STACK_WORDS];
    struct iovec here = {words, sizeof words},
                 there = {(void *)(uintptr_t)stack, sizeof words}; // NOLINT: an address of the other process
    name_address(out, "at", place);
    for (ssize_t bytes = sizeof words; bytes > 0; bytes -= 4096) { /* the stack may end on any page */
        there.iov_len = here.iov_len = (size_t)bytes;
        ssize_t got = process_vm_readv(process, &here, 1, &there, 1, 0);
        for (ssize_t i = 0; i < got / (ssize_t)sizeof *words; i++)
            name_address(out, "stack", words[i]);
        if (got > 0)
            break;
    }
    ptrace(PTRACE_DETACH, thread, NULL, NULL);
}

static void report_process(FILE *out, pid_t process) {
    char path[300];
    snprintf(path, sizeof path, "/proc/%d/task", (int)process);
    DIR *tasks = opendir(path);
    read_maps(process);
    for (struct dirent *entry; tasks && (entry = readdir(tasks));) {
        if (entry->d_name[0] == '.')
            continue;
        fprintf(out, "process %d thread %s\n", (int)process, entry->d_name);
        snprintf(path, sizeof path, "/proc/%d/task/%s", (int)process, entry->d_name);
        static const char *const names[] = {"comm", "stat", "wchan", "syscall", "stack"};
        for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
            copy(out, path, names[i]);
        frames(out, process, atoi(entry->d_name));
    }
    if (tasks)
        closedir(tasks);
}

static bool in_group(pid_t process, pid_t group) {
    return getpgid(process) == group;
}

void hang_report(const char *path, pid_t group) {
    FILE *out = fopen(path, "we");
    DIR *processes = opendir("/proc");
    for (struct dirent *entry; out && processes && (entry = readdir(processes));)
        if (atoi(entry->d_name) > 0 && in_group(atoi(entry->d_name), group))
            report_process(out, atoi(entry->d_name));
    if (processes)
        closedir(processes);
    if (!out || fclose(out) != 0)
        fprintf(stderr, "fuzz: %s: %s\n", path, strerror(errno));
}
