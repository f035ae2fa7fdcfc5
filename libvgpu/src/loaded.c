#define _GNU_SOURCE
#include "loaded.h"

#include <elf.h>
#include <link.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define VERSION_HIDDEN 0x8000 /* bit of an Elf_Versym: not the default version (System V gABI, symbol versioning) */
#define DRIVER_OBJECTS 8

struct object {
    ElfW(Addr) base;
    const ElfW(Sym) *symbols;
    const char *strings;
    const uint32_t *gnu_hash;
    const uint32_t *sysv_hash;
    const ElfW(Half) *versions;
    const char *soname; /* NULL: none */
};

/* glibc relocates the pointers of a dynamic section in place, except in read-only ones (vDSO). */
static const void *pointer_of(ElfW(Addr) base, ElfW(Addr) value) {
    return (const void *)(value < base ? base + value : value);
}

static struct object object_of(ElfW(Addr) base, const ElfW(Dyn) *dynamic) {
    struct object o = {.base = base};
    ElfW(Xword) soname = 0;
    bool named = false;
    for (const ElfW(Dyn) *d = dynamic; d && d->d_tag != DT_NULL; d++) {
        switch (d->d_tag) {
        case DT_SYMTAB: o.symbols = pointer_of(base, d->d_un.d_ptr); break;
        case DT_STRTAB: o.strings = pointer_of(base, d->d_un.d_ptr); break;
        case DT_GNU_HASH: o.gnu_hash = pointer_of(base, d->d_un.d_ptr); break;
        case DT_HASH: o.sysv_hash = pointer_of(base, d->d_un.d_ptr); break;
        case DT_VERSYM: o.versions = pointer_of(base, d->d_un.d_ptr); break;
        case DT_SONAME: soname = d->d_un.d_val; named = true; break;
        default: break;
        }
    }
    if (named && o.strings)
        o.soname = o.strings + soname;
    return o;
}

static void *definition(const struct object *o, uint32_t index, const char *name) {
    const ElfW(Sym) *symbol = &o->symbols[index];
    if (symbol->st_shndx == SHN_UNDEF || symbol->st_value == 0 || strcmp(o->strings + symbol->st_name, name) != 0)
        return NULL;
    if (o->versions && (o->versions[index] & VERSION_HIDDEN))
        return NULL;
    unsigned type = ELF64_ST_TYPE(symbol->st_info);
    return type == STT_FUNC || type == STT_OBJECT || type == STT_NOTYPE ? (void *)(o->base + symbol->st_value) : NULL;
}

static void *find_gnu(const struct object *o, const char *name) {
    uint32_t hash = 5381;
    for (const unsigned char *c = (const unsigned char *)name; *c; c++)
        hash = hash * 33 + *c;
    uint32_t buckets = o->gnu_hash[0], first = o->gnu_hash[1], bloom_words = o->gnu_hash[2];
    const ElfW(Addr) *bloom = (const ElfW(Addr) *)(o->gnu_hash + 4);
    const uint32_t *bucket = (const uint32_t *)(bloom + bloom_words);
    const uint32_t *chain = bucket + buckets;
    if (buckets == 0)
        return NULL;
    for (uint32_t i = bucket[hash % buckets]; i >= first; i++) {
        uint32_t entry = chain[i - first];
        if ((entry | 1) == (hash | 1)) {
            void *found = definition(o, i, name);
            if (found)
                return found;
        }
        if (entry & 1)
            break;
    }
    return NULL;
}

static void *find_sysv(const struct object *o, const char *name) {
    uint32_t hash = 0;
    for (const unsigned char *c = (const unsigned char *)name; *c; c++) {
        hash = (hash << 4) + *c;
        uint32_t high = hash & 0xf0000000u;
        hash = (hash ^ (high >> 24)) & ~high;
    }
    uint32_t buckets = o->sysv_hash[0];
    const uint32_t *bucket = o->sysv_hash + 2, *chain = bucket + buckets;
    if (buckets == 0)
        return NULL;
    for (uint32_t i = bucket[hash % buckets]; i != STN_UNDEF; i = chain[i]) {
        void *found = definition(o, i, name);
        if (found)
            return found;
    }
    return NULL;
}

static void *find(const struct object *o, const char *name) {
    if (!o->symbols || !o->strings)
        return NULL;
    return o->gnu_hash ? find_gnu(o, name) : o->sysv_hash ? find_sysv(o, name) : NULL;
}

void *vgpu_loaded_symbol(const char *soname, const char *name) {
    for (const struct link_map *map = _r_debug.r_map; map; map = map->l_next) {
        struct object o = object_of(map->l_addr, map->l_ld);
        if (o.soname && strcmp(o.soname, soname) == 0)
            return find(&o, name);
    }
    return NULL;
}

static bool contains(const struct dl_phdr_info *info, const void *address) {
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &info->dlpi_phdr[i];
        ElfW(Addr) start = info->dlpi_addr + segment->p_vaddr;
        if (segment->p_type == PT_LOAD && (ElfW(Addr))address - start < segment->p_memsz)
            return true;
    }
    return false;
}

static struct object object_of_phdr(const struct dl_phdr_info *info) {
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
            return object_of(info->dlpi_addr, (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr));
    return (struct object){0};
}

struct next_search {
    const void *caller;
    const char *name;
    bool passed;
    void *found;
};

static int visit_next(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    struct next_search *search = data;
    if (!search->passed) {
        search->passed = contains(info, search->caller);
        return 0;
    }
    struct object o = object_of_phdr(info);
    search->found = find(&o, search->name);
    return search->found != NULL;
}

void *vgpu_loaded_next(const void *caller, const char *name) {
    struct next_search search = {.caller = caller, .name = name};
    dl_iterate_phdr(visit_next, &search);
    return search.found;
}

static bool is_driver_name(const char *name) {
    return strncmp(name, "libcuda.so", strlen("libcuda.so")) == 0 || strncmp(name, "libnvidia-ml.so", strlen("libnvidia-ml.so")) == 0;
}

/* Ranges of driver libraries seen so far. A stale one (dlclose) does no harm: callers ask only about results of a hooked name. */
static struct {
    _Atomic uintptr_t start, end;
} driver_ranges[DRIVER_OBJECTS];

struct driver_search {
    uintptr_t address, start, end;
};

static int visit_driver(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    struct driver_search *search = data;
    if (!contains(info, (const void *)search->address))
        return 0;
    struct object o = object_of_phdr(info);
    const char *slash = strrchr(info->dlpi_name ? info->dlpi_name : "", '/');
    const char *file = slash ? slash + 1 : info->dlpi_name ? info->dlpi_name : "";
    if (!is_driver_name(file) && !(o.soname && is_driver_name(o.soname)))
        return 1;
    search->start = UINTPTR_MAX;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &info->dlpi_phdr[i];
        if (segment->p_type != PT_LOAD)
            continue;
        uintptr_t start = info->dlpi_addr + segment->p_vaddr, end = start + segment->p_memsz;
        search->start = start < search->start ? start : search->start;
        search->end = end > search->end ? end : search->end;
    }
    return 1;
}

static int visit_libc(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    if (!contains(info, *(const void **)data))
        return 0;
    struct object o = object_of_phdr(info);
    return o.soname && (strcmp(o.soname, "libc.so.6") == 0 || strcmp(o.soname, "libdl.so.2") == 0) ? 1 : -1;
}

bool vgpu_loaded_in_libc(const void *address) {
    return address && dl_iterate_phdr(visit_libc, &address) == 1;
}

bool vgpu_loaded_in_driver(const void *address) {
    uintptr_t a = (uintptr_t)address;
    if (a == 0)
        return false;
    for (int i = 0; i < DRIVER_OBJECTS; i++)
        if (a >= atomic_load_explicit(&driver_ranges[i].start, memory_order_acquire) &&
            a < atomic_load_explicit(&driver_ranges[i].end, memory_order_acquire))
            return true;
    struct driver_search search = {.address = a};
    dl_iterate_phdr(visit_driver, &search);
    if (search.end == 0)
        return false;
    for (int i = 0; i < DRIVER_OBJECTS; i++) {
        uintptr_t empty = 0;
        if (atomic_compare_exchange_strong(&driver_ranges[i].start, &empty, search.start)) {
            atomic_store_explicit(&driver_ranges[i].end, search.end, memory_order_release);
            break;
        }
    }
    return true;
}
