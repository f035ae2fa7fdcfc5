/* A limited process under remote control: reads one command per line from standard input and answers each with one
 * line.
 *
 *   mode | note | managed            what vgpu_attach chose
 *   limit CARD | cores CARD | policy | flags | priority | host
 *   charge CARD BYTES | force CARD BYTES     "ok TICKET" or "refused"; BYTES as CUDA_DEVICE_MEMORY_LIMIT takes them
 *   host-charge CARD BYTES           the same on the account of host bytes
 *   allocate CARD BYTES              device bytes alone, wherever they are going to lie
 *   resident CARD BYTES SPARE        resident bytes alone
 *   beside TICKET BYTES SPARE        resident bytes beside an allocate
 *   accounts CARD                    what each account says: device, host, resident
 *   release TICKET BYTES | used CARD | reap MS | kind CARD KIND BYTES | time CARD NS LAUNCHES
 *   size TEXT                        what a size means, or "no"
 *   fork                             goes on in the child (raw clone: no atfork handlers), when that is killed in the
 * parent; "child PID" spawn                            a child that does nothing but live until killed: "child PID"
 *   exec                             runs this program again in the same process
 *   close-fds                        closes every descriptor above standard error, as a daemon does
 *   leave-main                       the main thread ends, another goes on with the commands
 *   publish DIR MEMORY               writes new limits as the agent would
 *   occupy dead | occupy living      makes every free slot look like one whose holder has died, or lives as long as
 * this process does points                           how many death points have been passed (-DVGPU_DEATH_POINTS) arm K
 * | halt K                   the K-th death point from now on kills or stops the process
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ledger/environment.h"
#include "ledger/ledger.h"
#include "region/slots.h"

#ifdef VGPU_DEATH_POINTS
static _Atomic long points, armed;
static _Atomic int signal_there = SIGKILL;

void vgpu_death_point(void) {
    atomic_fetch_add(&points, 1);
    if (atomic_load(&armed) > 0 && atomic_fetch_sub(&armed, 1) == 1)
        kill(getpid(), atomic_load(&signal_there));
}
#endif

static struct vgpu_ticket tickets[65536];
static unsigned ticket_count;

static void answer_charge(bool granted, struct vgpu_ticket ticket) {
    if (!granted) {
        puts("refused");
        return;
    }
    tickets[ticket_count] = ticket;
    printf("ok %u\n", ticket_count++);
}

static void charge(const char *command, unsigned card, const char *size) {
    struct vgpu_ticket ticket;
    uint64_t bytes;
    bool granted = true;
    if (!vgpu_parse_size(size, &bytes)) {
        puts("error: size");
        return;
    }
    if (strcmp(command, "force") == 0)
        vgpu_charge_always(card, VGPU_DEVICE_BYTES, bytes, &ticket);
    else
        granted =
            vgpu_charge(card, strcmp(command, "charge") == 0 ? VGPU_DEVICE_BYTES : VGPU_HOST_BYTES, bytes, &ticket);
    answer_charge(granted, ticket);
}

/* Of memory that is charged in two parts: what is allocated, and where it lies. */
static void charge_part(const char *command, unsigned number, uint64_t bytes, uint64_t spare) {
    struct vgpu_ticket ticket = tickets[number % 65536];
    const bool granted = strcmp(command, "allocate") == 0   ? vgpu_charge_allocated(number, bytes, &ticket)
                         : strcmp(command, "resident") == 0 ? vgpu_charge_resident(number, bytes, spare, &ticket)
                                                            : vgpu_charge_beside(&ticket, bytes, spare);
    answer_charge(granted, ticket);
}

static void limits_field(const char *command, unsigned card) {
    const struct vgpu_limits *limits = vgpu_limits_now();
    if (!limits)
        puts("none");
    else if (strcmp(command, "limit") == 0)
        printf("%" PRIu64 "\n", limits->cards[card].memory);
    else if (strcmp(command, "cores") == 0)
        printf("%u\n", limits->cards[card].cores);
    else if (strcmp(command, "policy") == 0)
        printf("%u\n", limits->core_policy);
    else if (strcmp(command, "priority") == 0)
        printf("%u\n", limits->priority);
    else if (strcmp(command, "host") == 0)
        printf("%" PRIu64 "\n", limits->host_memory);
    else
        printf("%u\n", limits->flags);
}

static void fork_child(bool follows_commands) {
    const pid_t child = (pid_t)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
    if (child == 0 && !follows_commands)
        for (;;)
            pause();
    if (child == 0 || !follows_commands) {
        printf("child %d\n", (int)(child ? child : getpid()));
        return;
    }
    int status;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR)
        ;
    if (WIFEXITED(status))
        _exit(WEXITSTATUS(status));
}

static void publish(const char *dir, const char *size) {
    struct vgpu_limits limits;
    vgpu_region *region;
    uint64_t memory;
    int result = vgpu_parse_size(size, &memory) ? vgpu_region_open(dir, 1, &region) : -EINVAL;
    if (result == 0) {
        vgpu_limits_read(region, &limits);
        for (unsigned card = 0; card < VGPU_MAX_CARDS; card++)
            limits.cards[card].memory = limits.cards[card].guarantee = memory;
        result = vgpu_limits_write(region, &limits);
        vgpu_region_close(region);
    }
    printf("%d\n", result);
}

static void occupy(bool living) {
    struct flock all = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = VGPU_SLOTS};
    struct vgpu_usage_file *usage = vgpu_mapping()->usage;
    if (living && fcntl(vgpu_mapping()->lock_fd, F_OFD_SETLK, &all) != 0)
        puts("error: locked already");
    for (uint32_t slot = 0; slot < (living ? VGPU_SLOTS : VGPU_SLOTS - VGPU_RESERVED_SLOTS); slot++)
        if (vgpu_slot_state(vgpu_slot_owner(usage, slot)) == VGPU_SLOT_FREE)
            atomic_store(&usage->heads[slot].owner, UINT64_C(1) << 2 | VGPU_SLOT_LIVE);
    atomic_store(&usage->slots_high, VGPU_SLOTS);
    puts("ok");
}

static void *serve(void *context);

static void leave_main(void) {
    pthread_t thread;
    pthread_create(&thread, NULL, serve, NULL);
    pthread_exit(NULL);
}

static void obey(const char *command, const char *first, const char *second, const char *third) {
    const unsigned number = (unsigned)strtoul(first, NULL, 10);
    static const char *const modes[] = {"unlimited", "region", "private", "broken"};
    if (strcmp(command, "mode") == 0)
        puts(modes[vgpu_attach()]);
    else if (strcmp(command, "note") == 0)
        puts(vgpu_attach_note());
    else if (strcmp(command, "managed") == 0)
        puts(vgpu_mapping()->managed ? "yes" : "no");
    else if (strcmp(command, "charge") == 0 || strcmp(command, "force") == 0 || strcmp(command, "host-charge") == 0)
        charge(command, number, second);
    else if (strcmp(command, "allocate") == 0 || strcmp(command, "resident") == 0 || strcmp(command, "beside") == 0)
        charge_part(command, number, strtoull(second, NULL, 10), strtoull(third, NULL, 10));
    else if (strcmp(command, "accounts") == 0)
        printf("%" PRIu64 " %" PRIu64 " %" PRIu64 "\n", vgpu_used(number, VGPU_DEVICE_BYTES),
               vgpu_used(number, VGPU_HOST_BYTES), vgpu_used(number, VGPU_RESIDENT_BYTES));
    else if (strcmp(command, "fixed") == 0)
        printf("%" PRIu64 "\n", vgpu_used(number, VGPU_FIXED_BYTES));
    else if (strcmp(command, "stays") == 0) {
        vgpu_charge_fixed(&tickets[number], strtoull(second, NULL, 10));
        puts("ok");
    } else if (strcmp(command, "release") == 0) {
        vgpu_release(tickets[number], strtoull(second, NULL, 10));
        puts("ok");
    } else if (strcmp(command, "used") == 0)
        printf("%" PRIu64 "\n", vgpu_used(number, VGPU_DEVICE_BYTES));
    else if (strcmp(command, "reap") == 0)
        printf("%d\n", vgpu_reap(number));
    else if (strcmp(command, "kind") == 0) {
        vgpu_count_kind(number, (enum vgpu_kind)strtoul(second, NULL, 10), strtoll(third, NULL, 10));
        puts("ok");
    } else if (strcmp(command, "time") == 0) {
        vgpu_count_gpu_time(number, strtoull(second, NULL, 10), strtoull(third, NULL, 10));
        puts("ok");
    } else if (strcmp(command, "throttled") == 0) {
        vgpu_count_throttled(number, strtoull(second, NULL, 10));
        puts("ok");
    } else if (strcmp(command, "size") == 0) {
        uint64_t bytes;
        if (vgpu_parse_size(first, &bytes))
            printf("%" PRIu64 "\n", bytes);
        else
            puts("no");
    } else if (strcmp(command, "fork") == 0 || strcmp(command, "spawn") == 0)
        fork_child(strcmp(command, "fork") == 0);
    else if (strcmp(command, "exec") == 0) {
        puts("ok");
        fflush(stdout);
        execl("/proc/self/exe", "ledger_client", (char *)NULL);
        _exit(127);
    } else if (strcmp(command, "close-fds") == 0) {
        for (int fd = 3; fd < 1024; fd++)
            close(fd);
        puts("ok");
    } else if (strcmp(command, "leave-main") == 0) {
        puts("ok");
        fflush(stdout);
        leave_main();
    } else if (strcmp(command, "publish") == 0)
        publish(first, second);
    else if (strcmp(command, "occupy") == 0)
        occupy(strcmp(first, "living") == 0);
#ifdef VGPU_DEATH_POINTS
    else if (strcmp(command, "points") == 0)
        printf("%ld\n", atomic_load(&points));
    else if (strcmp(command, "arm") == 0 || strcmp(command, "halt") == 0) {
        atomic_store(&signal_there, strcmp(command, "arm") == 0 ? SIGKILL : SIGSTOP);
        atomic_store(&armed, (long)number);
        puts("ok");
    }
#endif
    else
        limits_field(command, number % VGPU_MAX_CARDS);
    fflush(stdout);
}

static void *serve(void *context) {
    char line[4608], command[32], first[4200], second[64], third[64];
    while (fgets(line, sizeof line, stdin)) {
        command[0] = first[0] = second[0] = third[0] = 0;
        if (sscanf(line, "%31s %4199s %63s %63s", command, first, second, third) >= 1)
            obey(command, first, second, third);
    }
    exit(0);
    return context;
}

int main(void) {
    /* commands are consumed unbuffered: what follows an exec or a fork belongs to whoever goes on */
    setvbuf(stdin, NULL, _IONBF, 0);
    serve(NULL);
}
