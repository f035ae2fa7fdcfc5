/* Starts and ends the helper processes of the fuzz target. */
#define _GNU_SOURCE
#include "helpers.h"

#include <cuda.h>
#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MOMENT_NS 50000

struct order {
    unsigned lane, ending, moment;
    bool graphs;
    size_t count;
    struct operation operations[MAX_OPERATIONS];
};

static int factory = -1; /* socket to the process that makes helpers */
static struct {
    int socket;
    unsigned ending;
} helpers[LANES];
static unsigned count_of_helpers;

static void fail(const char *what) {
    fprintf(stderr, "fuzz: %s: %s\n", what, strerror(errno));
    _exit(2);
}

static bool hear(int socket, char *word) {
    ssize_t got;
    do
        got = read(socket, word, 1);
    while (got < 0 && errno == EINTR);
    return got == 1;
}

static void live(int socket, const struct order *order) {
    char word = 'd';
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (cuInit(0) != CUDA_SUCCESS)
        fail("cuInit of a helper");
    play_begin(false, order->graphs);
    play(order->operations, order->count, order->lane);
    play_settle();
    play_trim_graphs();
    if (write(socket, &word, 1) != 1 || !hear(socket, &word))
        _exit(0);
    if (order->ending == ENDING_CLEAN)
        play_clean();
    if (order->ending == ENDING_CLEAN || order->ending == ENDING_EXIT)
        exit(0);
    kill(getpid(), SIGKILL);
}

/* One child for each helper, which waits for it: its end of the helper's socket closes when the helper is gone for
 * certain. */
static void watch(int socket, const struct order *order) {
    /* children that a killed helper leaves hold what it held, until they have ended too */
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    pid_t helper = fork();
    if (helper == 0) {
        live(socket, order);
        _exit(0);
    }
    if (order->ending == ENDING_KILLED_AT_ONCE) {
        struct timespec moment = {.tv_nsec = (long)order->moment * MOMENT_NS};
        nanosleep(&moment, NULL);
        kill(helper, SIGKILL);
    }
    int status = 0;
    waitpid(helper, &status, 0);
    while (waitpid(-1, NULL, 0) > 0) {
    }
    char word = WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL ? 'x' : 'e';
    (void)!write(socket, &word, 1);
    _exit(0);
}

static void make_helpers(int orders) {
    signal(SIGCHLD, SIG_IGN);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    static struct order order;
    for (;;) {
        int passed = -1;
        char control[CMSG_SPACE(sizeof passed)];
        struct iovec data = {&order, sizeof order};
        struct msghdr message = {
            .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
        if (recvmsg(orders, &message, MSG_WAITALL) != (ssize_t)sizeof order || !CMSG_FIRSTHDR(&message))
            _exit(0);
        memcpy(&passed, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof passed);
        if (fork() == 0) {
            close(orders);
            signal(SIGCHLD, SIG_DFL);
            watch(passed, &order);
        }
        close(passed);
    }
}

void helpers_prepare(void) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
        fail("no socket for helpers");
    fflush(NULL);
    pid_t maker = fork();
    if (maker < 0)
        fail("no process for helpers");
    if (maker == 0) {
        close(pair[0]);
        make_helpers(pair[1]);
    }
    close(pair[1]);
    factory = pair[0];
}

void helper_start(unsigned lane, enum ending ending, unsigned moment, bool graphs, const struct operation *operations,
                  size_t count) {
    static struct order order;
    int pair[2];
    if (count_of_helpers == LANES)
        return;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0)
        fail("no socket for a helper");
    order = (struct order){.lane = lane, .ending = ending, .moment = moment, .graphs = graphs, .count = count};
    memcpy(order.operations, operations, count * sizeof *operations);
    char control[CMSG_SPACE(sizeof *pair)] = {0};
    struct iovec data = {&order, sizeof order};
    struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof *pair);
    memcpy(CMSG_DATA(header), &pair[1], sizeof *pair);
    if (sendmsg(factory, &message, MSG_NOSIGNAL) != (ssize_t)sizeof order)
        fail("the maker of helpers is gone");
    close(pair[1]);
    helpers[count_of_helpers].ending = ending;
    helpers[count_of_helpers++].socket = pair[0];
}

static char heard(int socket) {
    char word = 0;
    return hear(socket, &word) ? word : 0;
}

static void ended(char word) {
    if (word == 'x')
        world_violation("a process beside this one crashed");
}

void helpers_wait(void) {
    for (unsigned i = 0; i < count_of_helpers; i++) {
        char word = helpers[i].ending == ENDING_KILLED_AT_ONCE ? 'd' : heard(helpers[i].socket);
        if (word != 'd')
            world_violation("a process beside this one ended too early ('%c')", word);
    }
}

void helpers_end(void) {
    for (unsigned i = 0; i < count_of_helpers; i++) {
        (void)!send(helpers[i].socket, "g", 1, MSG_NOSIGNAL);
        char word;
        while ((word = heard(helpers[i].socket)) == 'd') {
        }
        ended(word);
        close(helpers[i].socket);
    }
    count_of_helpers = 0;
}
