/* Host, managed, reserved and mapped ranges, in two arrays ordered by address: one for reservations, one for everything
 * with contents. */
#include <stdlib.h>
#include <string.h>

#include "cuda/driver.h"

static struct list {
    struct range **items;
    size_t count, room;
} lists[2];

static struct list *list_of(enum range_kind kind) {
    return &lists[kind == RANGE_RESERVED];
}

/* The first item that ends above the address. */
static size_t position(const struct list *list, uint64_t address) {
    size_t low = 0, high = list->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (list->items[middle]->base + list->items[middle]->size <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct range *range_find(uint64_t address, bool reserved) {
    struct list *list = &lists[reserved];
    size_t at = position(list, address);
    return at < list->count && list->items[at]->base <= address ? list->items[at] : NULL;
}

struct range *range_overlap(uint64_t base, uint64_t size, bool reserved) {
    struct list *list = &lists[reserved];
    size_t at = position(list, base);
    return at < list->count && list->items[at]->base < base + size ? list->items[at] : NULL;
}

struct range *range_add(const struct range *range) {
    struct list *list = list_of(range->kind);
    if (list->count == list->room) {
        size_t room = list->room ? list->room * 2 : 64;
        struct range **items = realloc(list->items, room * sizeof *items);
        if (!items)
            return NULL;
        list->items = items;
        list->room = room;
    }
    struct range *copy = malloc(sizeof *copy);
    if (!copy)
        return NULL;
    *copy = *range;
    copy->id = driver_id();
    size_t at = position(list, range->base);
    memmove(&list->items[at + 1], &list->items[at], (list->count - at) * sizeof *list->items);
    list->items[at] = copy;
    list->count++;
    driver.mapped += range->kind == RANGE_MAPPED;
    return copy;
}

void range_remove(struct range *range) {
    struct list *list = list_of(range->kind);
    size_t at = position(list, range->base);
    memmove(&list->items[at], &list->items[at + 1], (list->count - at - 1) * sizeof *list->items);
    list->count--;
    driver.mapped -= range->kind == RANGE_MAPPED;
    free(range);
}

void range_each(bool (*match)(const struct range *, void *), void (*drop)(const struct range *, void *),
                void *argument) {
    struct list *list = &lists[0];
    for (size_t i = 0; i < list->count;)
        if (match(list->items[i], argument)) {
            struct range *range = list->items[i], copy = *range;
            range_remove(range);
            drop(&copy, argument);
        } else {
            i++;
        }
}
