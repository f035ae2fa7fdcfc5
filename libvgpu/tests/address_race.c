/* Another thread looks an address up between any two stores of the one that puts it: it must find the hook after it has
 * put the same itself. */
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>

static void between(void);
#undef atomic_store
#define atomic_store(object, value) (between(), atomic_store_explicit(object, value, memory_order_seq_cst))
#include "base/address_table.c"
#undef atomic_store

#define HOOK 7
static uintptr_t wanted;
static unsigned looks, wrong;

static void between(void) {
    static int inside;
    if (inside++ == 0) {
        const int seen = vgpu_addresses_find(wanted);
        vgpu_addresses_put(HOOK, wanted);
        wrong += (seen != -1 && seen != HOOK) || vgpu_addresses_find(wanted) != HOOK;
        looks++;
    }
    inside--;
}

int main(void) {
    for (wanted = 4096; wanted < 4096 * 500; wanted += 4096)
        vgpu_addresses_put(HOOK, wanted);
    printf("%s, %u wrong\n", looks ? "looked" : "never looked", wrong);
    return wrong != 0;
}
