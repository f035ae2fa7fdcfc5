/* Memory that launches touch. A launch names it in its parameters: every aligned 8-byte word that points into memory
 * known to the driver. Memory behind the bus costs time. Memory that is unmapped before the launch has ended is an
 * error, as for a real kernel.
 *
 * Kernels whose name begins with one of these words do real work on words of 8 bytes (parameters of 4 or 8 bytes,
 * declared in PTX):
 * - touch_fill(to, words, value)
 * - touch_add(to, words, value)
 * - touch_copy(to, from, words)
 * - touch_sum(to, from, words)
 *
 * The work is done at the launch. Copies are also made at once, so each call sees what was issued before it. */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/driver.h"

#define MOST_WORDS (1ull << 40)
#define WORDS_OF_HOST 65536u /* no memory begins below this address */

void touch_name(CUfunction function) {
    static const char *const words[] = {
        [TOUCH_FILL] = "touch_fill", [TOUCH_ADD] = "touch_add", [TOUCH_COPY] = "touch_copy", [TOUCH_SUM] = "touch_sum"};
    for (unsigned i = TOUCH_FILL; i <= TOUCH_SUM; i++) {
        size_t length = strlen(words[i]);
        if (strncmp(function->name, words[i], length) == 0 && !isalnum((unsigned char)function->name[length]))
            function->touch = (enum touch)i;
    }
    function->part = 100;
    const char *part = strstr(function->name, "part_");
    if (part && (part == function->name || part[-1] == '_') && isdigit((unsigned char)part[5])) {
        unsigned long percent = strtoul(part + 5, NULL, 10);
        function->part = percent < 100 ? (unsigned)percent : 100;
    }
}

static bool of_device(uint64_t word) {
    return word >= DEVICE_WINDOW && word < WINDOW_END;
}

/* Numbers may look like host addresses, so a host address must be known to the driver. */
static bool names_memory(uint64_t word) {
    if (of_device(word))
        return true;
    if (word < WORDS_OF_HOST || word >= DEVICE_WINDOW)
        return false;
    pthread_mutex_lock(&driver.lock);
    bool known = range_find(word, false) != NULL;
    pthread_mutex_unlock(&driver.lock);
    return known;
}

static void keep_pointers(struct launch_shape *shape, const char *bytes, size_t size) {
    for (size_t at = 0; at + 8 <= size && shape->pointers < MAX_POINTERS; at += 8) {
        uint64_t word;
        memcpy(&word, bytes + at, 8);
        if (names_memory(word))
            shape->pointer[shape->pointers++] = word;
    }
}

/* The parameters in one buffer, if the launch passes them so. */
static const char *buffer_of(void **extra, size_t *size) {
    const char *buffer = NULL;
    *size = 0;
    for (; extra && *extra != CU_LAUNCH_PARAM_END; extra += 2) {
        if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER)
            buffer = extra[1];
        if (*extra == CU_LAUNCH_PARAM_BUFFER_SIZE)
            *size = *(const size_t *)extra[1];
    }
    return buffer;
}

void touch_read(struct launch_shape *shape, void **params, void **extra) {
    CUfunction function = shape->function;
    memset(shape->operand, 0, sizeof shape->operand);
    size_t room, at = 0;
    const char *buffer = buffer_of(extra, &room);
    if (buffer)
        keep_pointers(shape, buffer, room);
    /* for other images, the number of parameters is unknown */
    for (int i = 0; i < function->parameters && (params || buffer); i++) {
        size_t size = function->parameter_sizes[i], alignment = size < 8 && size ? size : 8;
        at = (at + alignment - 1) / alignment * alignment;
        const char *bytes = params ? params[i] : at + size <= room ? buffer + at : NULL;
        at += size;
        if (params)
            keep_pointers(shape, bytes, size);
        if (bytes && i < 3 && (size == 4 || size == 8))
            memcpy(&shape->operand[i], bytes, size); /* little-endian */
    }
}

void context_fail(CUcontext context) {
    context->failed = CUDA_ERROR_ILLEGAL_ADDRESS;
    if (sim_self_valid(&driver.sim))
        atomic_fetch_add(&driver.sim.self->cards[context->card].faults, 1);
}

/* The contiguous memory at an address; false: a kernel on that card has no memory there. */
static bool piece(int device, uint64_t address, uint64_t words, bool writes, uint64_t **out, uint64_t *length) {
    char *host;
    size_t bytes;
    if (address % 8 || words > MOST_WORDS || !names_memory(address))
        return false;
    if (address < DEVICE_WINDOW) {
        pthread_mutex_lock(&driver.lock);
        struct range *range = range_find(address, false);
        bool inside = range && words * 8 <= range->base + range->size - address;
        pthread_mutex_unlock(&driver.lock);
        if (!inside)
            return false;
    }
    if (view(device, address, words * 8, writes, &host, &bytes) != CUDA_SUCCESS)
        return false;
    *out = (uint64_t *)(void *)host;
    *length = bytes / 8;
    return *length > 0;
}

static bool change(int device, uint64_t to, uint64_t words, uint64_t value, bool add) {
    for (uint64_t *at, length; words; words -= length, to += length * 8) {
        if (!piece(device, to, words, true, &at, &length))
            return false;
        for (uint64_t i = 0; i < length; i++)
            at[i] = add ? at[i] + value : value;
    }
    return true;
}

static bool carry(int device, uint64_t to, uint64_t from, uint64_t words, bool sum) {
    uint64_t total = 0;
    for (uint64_t *at, *target, length, room; words; words -= length, from += length * 8) {
        if (!piece(device, from, words, false, &at, &length))
            return false;
        for (uint64_t i = 0; sum && i < length; i++)
            total += at[i];
        if (sum)
            continue;
        if (!piece(device, to, length, true, &target, &room))
            return false;
        length = length < room ? length : room;
        memmove(target, at, length * 8);
        to += length * 8;
    }
    return !sum || change(device, to, 1, total, false);
}

static bool act(int device, const struct launch_shape *shape) {
    const uint64_t *operand = shape->operand;
    switch (shape->function->touch) {
    case TOUCH_FILL:
    case TOUCH_ADD: return change(device, operand[0], operand[1], operand[2], shape->function->touch == TOUCH_ADD);
    case TOUCH_COPY:
    case TOUCH_SUM: return carry(device, operand[0], operand[1], operand[2], shape->function->touch == TOUCH_SUM);
    default: return true;
    }
}

/* With driver.lock held. Returns the bytes of a range behind the bus, or adds to *ns the time that it takes to bring
 * managed memory to the card. */
static uint64_t cost_of(struct range *range, uint64_t address, unsigned part, uint64_t *ns) {
    uint64_t bytes = part < 100 ? range->size / 100 * part + range->size % 100 * part / 100 : range->size;
    if (range->kind == RANGE_MANAGED) {
        if (range->managed)
            *ns += managed_touch(range, address, bytes, true);
        return 0;
    }
    bool host = range->kind == RANGE_MAPPED ? range->physical->card < 0 && !range->physical->multicast : true;
    return host ? bytes : 0;
}

uint64_t touch_launch(CUcontext context, const struct launch_shape *shape) {
    const struct sim_timing *timing = &driver.sim.timing;
    uint64_t bytes = 0, ns = 0;
    if (shape->function->touch && !act(context->device, shape))
        context_fail(context);
    if (!timing->copies && !timing->migrate)
        return 0;
    const struct range *seen[MAX_POINTERS];
    unsigned ranges = 0;
    pthread_mutex_lock(&driver.lock);
    for (unsigned i = 0; i < shape->pointers; i++) {
        struct range *range = range_find(shape->pointer[i], false);
        bool known = !range;
        for (unsigned j = 0; j < ranges; j++)
            known = known || seen[j] == range;
        if (known)
            continue;
        seen[ranges++] = range;
        bytes += cost_of(range, shape->pointer[i], shape->function->part, &ns);
    }
    pthread_mutex_unlock(&driver.lock);
    return ns + (timing->copies && timing->bus ? bytes * 1000 / timing->bus : 0);
}

void touch_note(CUcontext context, const struct launch_shape *shape, uint64_t sequence) {
    pthread_mutex_lock(&driver.lock);
    for (unsigned i = 0; i < shape->pointers; i++) {
        struct range *range = shape->pointer[i] >= RESERVATION_WINDOW ? range_find(shape->pointer[i], false) : NULL;
        if (range && range->kind == RANGE_MAPPED && (range->use.context != context || range->use.launch < sequence)) {
            range->use.context = context;
            range->use.launch = sequence;
        }
    }
    pthread_mutex_unlock(&driver.lock);
}

void touch_unmap(const struct range *range) {
    CUcontext context = range->use.context;
    if (!context || !object_is(context, OBJECT_CONTEXT))
        return;
    if (!sim_reached(&driver.sim, context->card, (struct sim_mark){.launch = range->use.launch}) ||
        range->use.copied > sim_now())
        context_fail(context);
}
