/* Plays inputs without libFuzzer: a corpus, mutations of it that did something new, or single files.
 *
 *   fuzz [-seconds N] [-runs N] [-seed N] [-out FOLDER] [-save FOLDER] [-hang N] [CORPUS FOLDER ...]    mutate
 *   fuzz -times N [-out FOLDER] [-hang N] FILE ...                                                      replay each
 * file N times
 *
 * -save: keep what did something new. Workers are processes of their own: one that dies or hangs (a program takes -hang
 * seconds, 120 unless told) leaves its input as FOLDER/crash-SEED-NUMBER, and after a hang
 * FOLDER/crash-SEED-NUMBER.stacks says what every thread of its family was doing. Exit: 0 nothing found, 1 found, 2
 * error.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "hang.h"
#include "world.h"

int LLVMFuzzerInitialize(int *count, char ***arguments);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define LARGEST (4 + 4 * MAX_OPERATIONS)
#define MAX_KEPT 4096
#define RUNS_OF_A_WORKER 20000 /* addresses of the simulator and of its arenas are not used twice */

struct input {
    uint32_t size;
    uint8_t data[LARGEST];
};
static struct shared {
    struct input current, kept[MAX_KEPT];
    uint32_t count;
    uint64_t runs, features, random;
    _Atomic uint64_t begun_ms; /* the program that is played now */
    uint8_t seen[WORLD_FEATURES], now[WORLD_FEATURES];
} *shared;

static uint64_t seconds = 60, most_runs = UINT64_MAX, seed, times, hang_s = 120;
static const char *out = ".", *save;

static double clock_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static uint32_t chance(uint32_t below) {
    shared->random ^= shared->random << 13;
    shared->random ^= shared->random >> 7;
    shared->random ^= shared->random << 17;
    return below ? (uint32_t)(shared->random >> 20) % below : 0;
}

static bool load(const char *path, struct input *input) {
    FILE *file = fopen(path, "rb");
    if (!file)
        return false;
    input->size = (uint32_t)fread(input->data, 1, LARGEST, file);
    fclose(file);
    return input->size >= 8;
}

static void store(const char *path, const struct input *input) {
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(input->data, 1, input->size, file) != input->size || fclose(file) != 0)
        fprintf(stderr, "fuzz: %s: %s\n", path, strerror(errno));
}

static void load_folder(const char *folder) {
    struct dirent **entries;
    int count = scandir(folder, &entries, NULL, alphasort);
    for (int i = 0; i < count; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", folder, entries[i]->d_name);
        if (entries[i]->d_name[0] != '.' && shared->count < MAX_KEPT && load(path, &shared->kept[shared->count]))
            shared->count++;
        free(entries[i]);
    }
    if (count < 0) {
        fprintf(stderr, "fuzz: %s: %s\n", folder, strerror(errno));
        exit(2);
    }
    free(entries);
}

/* A random operation: on the main lane most of the time, with small numbers that meet those of others. */
static void random_operation(uint8_t *bytes) {
    bytes[0] = (uint8_t)(chance(64) | (chance(3) ? 0 : chance(4) << 6));
    for (int i = 1; i < 4; i++)
        bytes[i] = (uint8_t)(chance(4) ? chance(i == 1 ? 8 : 256) : chance(3) ? 120 + chance(40) : 250 + chance(6));
}

static void mutate(struct input *input) {
    struct input *other = &shared->kept[chance(shared->count)];
    uint32_t operations = (input->size - 4) / 4;
    for (uint32_t left = 1 + chance(8); left; left--) {
        uint32_t at = 4 + 4 * chance(operations);
        switch (chance(9)) {
        case 0: input->data[chance(4)] = (uint8_t)chance(256); break;
        case 1: input->data[at + chance(4)] = (uint8_t)chance(256); break;
        case 2: input->data[at + chance(4)] ^= (uint8_t)(1u << chance(8)); break;
        case 3: random_operation(input->data + at); break;
        case 4: /* one operation less */
            if (operations > 2) {
                memmove(input->data + at, input->data + at + 4, input->size - at - 4);
                input->size -= 4;
                operations--;
            }
            break;
        case 5:
        case 6: /* one more */
            if (operations < MAX_OPERATIONS) {
                memmove(input->data + at + 4, input->data + at, input->size - at);
                random_operation(input->data + at);
                input->size += 4;
                operations++;
            }
            break;
        case 7: { /* a piece of another */
            uint32_t from = 4 + 4 * chance((other->size - 4) / 4), length = 4 * (1 + chance(16));
            length = length > other->size - from ? other->size - from : length;
            length = length > input->size - at ? input->size - at : length;
            memmove(input->data + at, other->data + from, length / 4 * 4);
            break;
        }
        default: /* lanes change */ input->data[at] = (uint8_t)((input->data[at] & 63) | chance(4) << 6);
        }
    }
}

static void keep_if_new(void) {
    uint64_t fresh = 0;
    for (uint32_t i = 0; i < WORLD_FEATURES; i += 8) {
        uint64_t now, seen;
        memcpy(&now, shared->now + i, 8);
        memcpy(&seen, shared->seen + i, 8);
        if (now & ~seen) {
            fresh += (uint64_t)__builtin_popcountll(now & ~seen);
            seen |= now;
            memcpy(shared->seen + i, &seen, 8);
        }
    }
    memset(shared->now, 0, sizeof shared->now);
    if (fresh && shared->runs > shared->count) {
        uint32_t place = shared->count < MAX_KEPT ? shared->count++ : chance(MAX_KEPT);
        shared->kept[place] = shared->current;
    }
    shared->features += fresh;
}

/* A worker and all its children are one group of processes, which ends with whoever started it. */
static pid_t start_worker(void) {
    shared->begun_ms = (uint64_t)(clock_s() * 1e3);
    pid_t parent = getpid(), worker = fork();
    if (worker < 0) {
        perror("fuzz: no worker");
        exit(2);
    }
    setpgid(worker, 0); /* in both, for the one that comes first */
    if (worker == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(2);
        world_features = times ? NULL : shared->now; /* of helpers, too, which are made now */
        LLVMFuzzerInitialize(NULL, NULL);
    }
    return worker;
}

static void play_current(void) {
    shared->begun_ms = (uint64_t)(clock_s() * 1e3);
    LLVMFuzzerTestOneInput(shared->current.data, shared->current.size);
}

static void work(double end) {
    static uint64_t own;
    uint32_t corpus = shared->count;
    for (own = 0; own < RUNS_OF_A_WORKER && clock_s() < end && shared->runs < most_runs; own++) {
        if (shared->runs < corpus) {
            shared->current = shared->kept[shared->runs];
        } else {
            shared->current = shared->kept[chance(shared->count)];
            mutate(&shared->current);
        }
        play_current();
        shared->runs++;
        keep_if_new();
    }
    exit(0);
}

static bool hangs(void) {
    return clock_s() * 1e3 > (double)(shared->begun_ms + hang_s * 1000);
}

/* True when the worker found nothing; otherwise `name` says what to call it, which depends on how far it came. */
static bool waited(pid_t worker, void (*name)(char *path, size_t room)) {
    char path[4096], stacks[4096 + 8];
    int status = 0;
    siginfo_t ended = {0};
    while (waitid(P_PID, (id_t)worker, &ended, WEXITED | WNOHANG | WNOWAIT) == 0 && !ended.si_pid && !hangs())
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    bool hung = !ended.si_pid;
    if (hung) {
        name(path, sizeof path);
        snprintf(stacks, sizeof stacks, "%s.stacks", path);
        hang_report(stacks, worker);
    }
    kill(-worker, SIGKILL); /* its number cannot be another's yet */
    waitpid(worker, &status, 0);
    if (!hung && WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return true;
    if (!hung && WIFEXITED(status))
        exit(2);
    name(path, sizeof path);
    fprintf(stderr, "FOUND (%s): %s\n", hung ? "hangs" : strsignal(WTERMSIG(status)), path);
    return false;
}

static void name_finding(char *path, size_t room) {
    snprintf(path, room, "%s/crash-%llu-%llu", out, (unsigned long long)seed, (unsigned long long)shared->runs);
}

static const char *replayed;

static void name_replayed(char *path, size_t room) {
    const char *base = strrchr(replayed, '/');
    snprintf(path, room, "%s/%s", out, base ? base + 1 : replayed);
}

static int replay(char **files, int count) {
    int found = 0;
    for (int i = 0; i < count; i++) {
        if (!load(files[i], &shared->current)) {
            fprintf(stderr, "fuzz: %s: no input\n", files[i]);
            return 2;
        }
        pid_t worker = start_worker();
        if (worker == 0) {
            for (uint64_t run = 0; run < times; run++)
                play_current();
            exit(0);
        }
        replayed = files[i];
        found |= !waited(worker, name_replayed);
    }
    return found;
}

static int fuzz(void) {
    double begin = clock_s(), end = begin + (double)seconds, told = begin;
    int found = 0;
    if (!shared->count)
        shared->kept[shared->count++] =
            (struct input){.size = 16, .data = {0, 0, 0, 0, 56, 0, 0, 1, 0, 0, 9, 0, 10, 0, 0, 0}};
    printf("seed %llu, %u inputs\n", (unsigned long long)seed, shared->count);
    while (clock_s() < end && shared->runs < most_runs && found < 500) {
        fflush(NULL);
        pid_t worker = start_worker();
        if (worker == 0)
            work(end);
        if (!waited(worker, name_finding)) {
            char path[4096];
            name_finding(path, sizeof path);
            store(path, &shared->current);
            shared->runs++;
            found++;
        }
        if (clock_s() - told > 60) {
            told = clock_s();
            printf("%.0f s: %llu runs, %u inputs, %llu features, %d found\n", told - begin,
                   (unsigned long long)shared->runs, shared->count, (unsigned long long)shared->features, found);
        }
    }
    for (uint32_t i = 0; save && i < shared->count; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%llu-%u", save, (unsigned long long)seed, i);
        store(path, &shared->kept[i]);
    }
    printf("%llu runs in %.0f s, %u inputs, %llu features, %d found\n", (unsigned long long)shared->runs,
           clock_s() - begin, shared->count, (unsigned long long)shared->features, found);
    return found ? 1 : 0;
}

int main(int count, char **arguments) {
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return 2;
    seed = (uint64_t)time(NULL);
    int at = 1;
    for (; at + 1 < count && arguments[at][0] == '-'; at += 2) {
        uint64_t number = strtoull(arguments[at + 1], NULL, 10);
        if (strcmp(arguments[at], "-seconds") == 0)
            seconds = number;
        else if (strcmp(arguments[at], "-runs") == 0)
            most_runs = number;
        else if (strcmp(arguments[at], "-seed") == 0)
            seed = number;
        else if (strcmp(arguments[at], "-times") == 0)
            times = number;
        else if (strcmp(arguments[at], "-hang") == 0)
            hang_s = number;
        else if (strcmp(arguments[at], "-out") == 0)
            out = arguments[at + 1];
        else if (strcmp(arguments[at], "-save") == 0)
            save = arguments[at + 1];
        else
            break;
    }
    shared->random = seed * 0x9e3779b97f4a7c15ull + 1;
    if (times)
        return replay(arguments + at, count - at);
    for (int i = at; i < count; i++)
        load_folder(arguments[i]);
    return fuzz();
}
