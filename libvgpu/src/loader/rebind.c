/* Points libraries opened with RTLD_DEEPBIND to the hooks. */
#define _GNU_SOURCE
#include "loader/rebind.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "loader/driver.h"
#include "loader/loaded.h"
#include "loader/loader.h"

#if defined(__x86_64__)
#define IS_REFERENCE(type) ((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT)
#elif defined(__aarch64__)
#define IS_REFERENCE(type) ((type) == R_AARCH64_JUMP_SLOT || (type) == R_AARCH64_GLOB_DAT)
#endif

struct object {
    ElfW(Addr) base, start, end;       /* start, end: mapped range */
    ElfW(Addr) relro_start, relro_end; /* read-only after the relocation */
    const ElfW(Sym) * symbols;
    const char *strings;
};

/* The lookups of the global scope: this library's, or those of another preloaded library in front of it. */
static const char *const lookups[] = {"dlsym", "dlvsym", "dlopen"};
#define LOOKUPS (sizeof lookups / sizeof *lookups)

/* The right target of a reference to `name`; NULL: leave the reference alone. */
static void *right_for(const char *name, void *const found[LOOKUPS]) {
    for (unsigned i = 0; i < LOOKUPS; i++)
        if (strcmp(name, lookups[i]) == 0)
            return found[i];
    const int hook = vgpu_hook_number(name);
    return hook >= 0 ? vgpu_hook_function(hook) : NULL;
}

static void set(const struct object *object, _Atomic(void *) *slot, void *value) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), address = (uintptr_t)slot, start = address & ~(page - 1);
    const bool closed = address >= object->relro_start && address < object->relro_end;
    if (closed && mprotect((void *)start, page, PROT_READ | PROT_WRITE) != 0)
        return;
    atomic_store(slot, value);
    if (closed)
        mprotect((void *)start, page, PROT_READ);
}

static void rebind_table(const struct object *object, const ElfW(Rela) * table, size_t size,
                         void *const found[LOOKUPS]) {
    for (const ElfW(Rela) *entry = table; (const char *)entry < (const char *)table + size; entry++) {
        const ElfW(Sym) *symbol = &object->symbols[ELF64_R_SYM(entry->r_info)];
        if (!IS_REFERENCE(ELF64_R_TYPE(entry->r_info)) || symbol->st_shndx != SHN_UNDEF)
            continue;
        void *right = right_for(object->strings + symbol->st_name, found);
        if (!right)
            continue;
        _Atomic(void *) *slot = (_Atomic(void *) *)(object->base + entry->r_offset);
        void *now = atomic_load(slot);
        /* the object's own stub, which would look the name up later */
        const bool unbound = (uintptr_t)now >= object->start && (uintptr_t)now < object->end;
        if (now != right && (unbound || vgpu_loaded_in_libc(now) || vgpu_loaded_in_driver(now)))
            set(object, slot, right);
    }
}

static int visit(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    void *const *found = data;
    struct object object = {.base = info->dlpi_addr, .start = UINTPTR_MAX};
    const ElfW(Dyn) *dynamic = NULL;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &info->dlpi_phdr[i];
        const ElfW(Addr) start = info->dlpi_addr + segment->p_vaddr, end = start + segment->p_memsz;
        if (segment->p_type == PT_DYNAMIC)
            dynamic = (const ElfW(Dyn) *)start;
        if (segment->p_type == PT_GNU_RELRO)
            object.relro_start = start, object.relro_end = end;
        if (segment->p_type == PT_LOAD) {
            object.start = start < object.start ? start : object.start;
            object.end = end > object.end ? end : object.end;
        }
    }
    const ElfW(Addr) own = (ElfW(Addr))visit;
    if (!dynamic || (own >= object.start && own < object.end) || vgpu_loaded_in_libc(dynamic) ||
        vgpu_loaded_in_driver(dynamic))
        return 0;
    ElfW(Addr) calls = 0, others = 0;
    size_t calls_size = 0, others_size = 0;
    bool addends = true;
    for (const ElfW(Dyn) *entry = dynamic; entry->d_tag != DT_NULL; entry++) {
        switch (entry->d_tag) {
        case DT_SYMTAB: object.symbols = (const ElfW(Sym) *)entry->d_un.d_ptr; break;
        case DT_STRTAB: object.strings = (const char *)entry->d_un.d_ptr; break;
        case DT_JMPREL: calls = entry->d_un.d_ptr; break;
        case DT_PLTRELSZ: calls_size = entry->d_un.d_val; break;
        case DT_RELA: others = entry->d_un.d_ptr; break;
        case DT_RELASZ: others_size = entry->d_un.d_val; break;
        case DT_PLTREL: addends = entry->d_un.d_val == DT_RELA; break;
        default: break;
        }
    }
    if (!object.symbols || !object.strings || !addends || (ElfW(Addr))object.symbols < object.base)
        return 0; /* no symbols, or pointers that glibc has not relocated (vDSO) */
    if (calls)
        rebind_table(&object, (const ElfW(Rela) *)calls, calls_size, found);
    if (others)
        rebind_table(&object, (const ElfW(Rela) *)others, others_size, found);
    return 0;
}

void vgpu_rebind(void) {
    void *found[LOOKUPS];
    /* Before the walk, because the walk holds a lock of the dynamic linker. dlsym takes another lock first, and could
     * wait forever. */
    for (unsigned i = 0; i < LOOKUPS; i++)
        found[i] = vgpu_real_dlsym(RTLD_DEFAULT, lookups[i]);
    dl_iterate_phdr(visit, found);
}
