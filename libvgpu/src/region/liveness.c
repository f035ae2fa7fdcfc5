/* Reads from /proc whether the holder of a slot lives. */
#include "region/liveness.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "region/device_files.h"

/* Calls visit for every line of a file, without the newline and cut to 511 characters, until visit returns true. */
static bool any_line_of(int fd, bool (*visit)(const char *line, void *context), void *context) {
    char chunk[1024], line[512]; /* on a thread's stack, which may be small */
    size_t length = 0;
    bool found = false;
    for (;;) {
        ssize_t got = read(fd, chunk, sizeof chunk);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        for (ssize_t i = 0; i < got && !found; i++) {
            if (chunk[i] != '\n') {
                if (length < sizeof line - 1)
                    line[length++] = chunk[i];
                continue;
            }
            line[length] = 0;
            length = 0;
            found = visit(line, context);
        }
        if (found)
            break;
    }
    return found;
}

static bool any_line(const char *path, bool (*visit)(const char *line, void *context), void *context) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    const bool found = any_line_of(fd, visit, context);
    close(fd);
    return found;
}

/* "start-end perms offset major:minor inode path", see proc(5) */
struct map_line {
    uint64_t start, end;
    struct vgpu_mapped_file file;
};

static bool parse_map_line(const char *line, struct map_line *out) {
    char *end;
    out->start = strtoull(line, &end, 16);
    if (*end++ != '-')
        return false;
    out->end = strtoull(end, &end, 16);
    for (int field = 0; field < 2; field++) { /* permissions and offset */
        end += strspn(end, " ");
        end += strcspn(end, " ");
    }
    const uint64_t major = strtoull(end, &end, 16);
    if (*end++ != ':')
        return false;
    out->file.device = major << 32 | strtoull(end, &end, 16);
    out->file.inode = strtoull(end, &end, 10);
    return true;
}

struct map_search {
    uint64_t address;
    struct vgpu_mapped_file file;
};

static bool holds_address(const char *line, void *context) {
    struct map_search *search = context;
    struct map_line map;
    if (!parse_map_line(line, &map) || search->address < map.start || search->address >= map.end)
        return false;
    search->file = map.file;
    return true;
}

static bool names_file(const char *line, void *context) {
    const struct vgpu_mapped_file *file = context;
    struct map_line map;
    return parse_map_line(line, &map) && map.file.inode == file->inode && map.file.device == file->device;
}

struct vgpu_mapped_file vgpu_mapped_file_at(const void *address) {
    struct map_search search = {.address = (uintptr_t)address};
    any_line("/proc/self/maps", holds_address, &search);
    return search.file;
}

struct process_stat {
    char state;
    uint64_t threads;
    uint64_t start_time;
    uint64_t address_space; /* bytes; 0 once a dying process has returned its memory */
};

/* Fields 3, 20, 22 and 23 of /proc/PID/stat; the command in field 2 may contain blanks and parentheses. */
static bool read_stat_line(const char *line, void *context) {
    struct process_stat *out = context;
    const char *field = strrchr(line, ')');
    if (!field || field[1] != ' ')
        return false;
    field += 2;
    out->state = *field;
    for (int number = 3; number < 23; number++) {
        field = strchr(field, ' ');
        if (!field++)
            return false;
        if (number + 1 == 20)
            out->threads = strtoull(field, NULL, 10);
        if (number + 1 == 22)
            out->start_time = strtoull(field, NULL, 10);
        if (number + 1 == 23)
            out->address_space = strtoull(field, NULL, 10);
    }
    return true;
}

static bool process_stat(const char *pid, struct process_stat *out) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%s/stat", pid);
    return any_line(path, read_stat_line, out);
}

static uint64_t pid_namespace(const char *pid) {
    char path[64];
    struct stat status;
    snprintf(path, sizeof path, "/proc/%s/ns/pid", pid);
    return stat(path, &status) == 0 ? (uint64_t)status.st_ino : 0;
}

struct vgpu_identity vgpu_identity_self(void) {
    struct process_stat stat = {0};
    process_stat("self", &stat);
    return (struct vgpu_identity){
        .pid = getpid(), .pid_namespace = pid_namespace("self"), .start_time = stat.start_time};
}

/* "NSpid:\t1234\t12": the process itself sees the innermost number */
static bool innermost_pid(const char *line, void *context) {
    if (strncmp(line, "NSpid:", 6) != 0)
        return false;
    const char *last = strrchr(line, '\t');
    return last && atoi(last + 1) == *(const int32_t *)context;
}

static bool is_number(const char *name) {
    return *name && name[strspn(name, "0123456789")] == 0 && strlen(name) < 10;
}

/* Needs a /proc that shows other namespaces, and the right to read their entries: the agent has both, a container
 * neither. */
static void list_processes(struct vgpu_process_list *list) {
    const uint64_t own = pid_namespace("self");
    uint32_t room = 0;
    struct dirent *entry;
    list->listed = true;
    DIR *proc = opendir("/proc");
    while (proc && (entry = readdir(proc))) {
        const uint64_t found = is_number(entry->d_name) ? pid_namespace(entry->d_name) : 0;
        if (found == 0 || found == own)
            continue;
        if (list->count == room) {
            room = room ? 2 * room : 256;
            struct vgpu_listed_process *grown = realloc(list->processes, room * sizeof *grown);
            if (!grown)
                break;
            list->processes = grown;
        }
        list->processes[list->count++] =
            (struct vgpu_listed_process){.pid_namespace = found, .pid = atoi(entry->d_name)};
    }
    if (proc)
        closedir(proc);
}

void vgpu_process_list_free(struct vgpu_process_list *list) {
    free(list->processes);
    *list = (struct vgpu_process_list){0};
}

/* Finds the /proc name of a process in another pid namespace. */
static bool find_in_namespaces(const struct vgpu_identity *process, struct vgpu_process_list *list,
                               char name[static 16]) {
    if (!list->listed)
        list_processes(list);
    for (uint32_t i = 0; i < list->count; i++) {
        char path[64];
        int32_t pid = process->pid;
        if (list->processes[i].pid_namespace != process->pid_namespace)
            continue;
        snprintf(name, 16, "%d", list->processes[i].pid);
        snprintf(path, sizeof path, "/proc/%s/status", name);
        if (any_line(path, innermost_pid, &pid))
            return true;
    }
    return false;
}

enum presence { UNKNOWN, ENDED, HIDDEN, PRESENT };

/* Finds the process and its name below /proc. ENDED: its pid is free, or belongs to another process now. HIDDEN: a
 * process with this pid runs, but /proc hides it (mounted with hidepid). */
static enum presence find(const struct vgpu_identity *process, struct vgpu_process_list *list, char name[static 16],
                          struct process_stat *stat) {
    if (process->pid <= 0 || process->start_time == 0 || process->pid_namespace == 0)
        return UNKNOWN;
    if (process->pid_namespace == pid_namespace("self"))
        snprintf(name, 16, "%d", process->pid);
    else if (!find_in_namespaces(process, list, name))
        return UNKNOWN;
    if (!process_stat(name, stat))
        return kill(atoi(name), 0) == 0 || errno == EPERM ? HIDDEN : ENDED;
    return stat->start_time == process->start_time ? PRESENT : ENDED;
}

/* A zombie whose other threads still run (the main thread left by pthread_exit) has not ended. */
static bool has_ended(const struct process_stat *stat) {
    return (stat->state == 'Z' || stat->state == 'X') && stat->threads <= 1;
}

/* The process is exiting: the kernel frees its memory first, then its descriptors, starting with the last one
 * opened. */
static bool is_ending(const struct process_stat *stat) {
    return stat->address_space == 0 && !has_ended(stat);
}

bool vgpu_process_holds(const struct vgpu_identity *process, const struct vgpu_mapped_file *file,
                        struct vgpu_process_list *list) {
    char name[16], path[64];
    struct process_stat stat;
    struct vgpu_mapped_file wanted = *file;
    const enum presence presence = wanted.inode ? find(process, list, name, &stat) : UNKNOWN;
    if (presence != PRESENT)
        return presence == HIDDEN;
    if (stat.address_space == 0)
        return is_ending(&stat);
    snprintf(path, sizeof path, "/proc/%s/maps", name);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) /* another user's process, or a protected one; an ended process has no maps to open */
        return errno == EACCES || errno == EPERM;
    const bool found = any_line_of(fd, names_file, &wanted);
    close(fd);
    return found || vgpu_device_files_open(name) ||
           /* the process may have begun to exit meanwhile */
           (find(process, list, name, &stat) == PRESENT && is_ending(&stat));
}

bool vgpu_process_keeps(const struct vgpu_identity *process, struct vgpu_process_list *list) {
    char name[16];
    struct process_stat stat;
    const struct vgpu_identity self = vgpu_identity_self();
    if (process->pid == self.pid && process->pid_namespace == self.pid_namespace &&
        process->start_time == self.start_time)
        return vgpu_device_files_marked();
    const enum presence presence = find(process, list, name, &stat);
    if (presence != PRESENT)
        return presence == HIDDEN;
    return !has_ended(&stat) && (is_ending(&stat) || vgpu_device_files_open(name) ||
                                 (find(process, list, name, &stat) == PRESENT && is_ending(&stat)));
}

bool vgpu_process_ended(const struct vgpu_identity *process, struct vgpu_process_list *list) {
    char name[16];
    struct process_stat stat;
    const enum presence presence = find(process, list, name, &stat);
    return presence == ENDED || (presence == PRESENT && has_ended(&stat));
}
