/* Reads the dynamic linker's lists of loaded objects and their symbols. */
#define _GNU_SOURCE
#include "loader/loaded.h"

#include <elf.h>
#include <link.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define VERSION_HIDDEN 0x8000 /* bit of an Elf_Versym: not the default version (System V gABI, symbol versioning) */
#define DRIVER_OBJECTS 64
#define DEEPEST_NEED 4 /* levels of dependencies below the driver that still count as the driver */

struct object {
    ElfW(Addr) base;
    const ElfW(Sym) * symbols;
    const char *strings;
    const uint32_t *gnu_hash;
    const uint32_t *sysv_hash;
    const ElfW(Half) * versions;
    const char *soname; /* NULL: none */
    const ElfW(Dyn) * dynamic;
    bool searches; /* the object says where its libraries are: DT_RPATH or DT_RUNPATH */
};

/* glibc relocates the pointers of a dynamic section in place, except in read-only ones (vDSO). */
static const void *pointer_of(ElfW(Addr) base, ElfW(Addr) value) {
    return (const void *)(value < base ? base + value : value);
}

static struct object object_of(ElfW(Addr) base, const ElfW(Dyn) * dynamic) {
    struct object o = {.base = base, .dynamic = dynamic};
    ElfW(Xword) soname = 0;
    bool named = false;
    for (const ElfW(Dyn) *d = dynamic; d && d->d_tag != DT_NULL; d++) {
        switch (d->d_tag) {
        case DT_SYMTAB: o.symbols = pointer_of(base, d->d_un.d_ptr); break;
        case DT_STRTAB: o.strings = pointer_of(base, d->d_un.d_ptr); break;
        case DT_GNU_HASH: o.gnu_hash = pointer_of(base, d->d_un.d_ptr); break;
        case DT_HASH: o.sysv_hash = pointer_of(base, d->d_un.d_ptr); break;
        case DT_VERSYM: o.versions = pointer_of(base, d->d_un.d_ptr); break;
        case DT_SONAME:
            soname = d->d_un.d_val;
            named = true;
            break;
        case DT_RPATH:
        case DT_RUNPATH: o.searches = true; break;
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

bool vgpu_loaded_as(const char *soname) {
    for (const struct link_map *map = _r_debug.r_map; map; map = map->l_next) {
        const struct object o = object_of(map->l_addr, map->l_ld);
        if (o.soname && strcmp(o.soname, soname) == 0)
            return true;
    }
    return false;
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
    return strncmp(name, "libcuda.so", strlen("libcuda.so")) == 0 ||
           strncmp(name, "libnvidia-ml.so", strlen("libnvidia-ml.so")) == 0;
}

static const char *file_of(const char *path) {
    const char *slash = strrchr(path ? path : "", '/');
    return slash ? slash + 1 : path ? path : "";
}

struct range {
    uintptr_t start, end;
};

static struct range range_of(const struct dl_phdr_info *info) {
    struct range range = {UINTPTR_MAX, 0};
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &info->dlpi_phdr[i];
        if (segment->p_type != PT_LOAD)
            continue;
        const uintptr_t start = info->dlpi_addr + segment->p_vaddr, end = start + segment->p_memsz;
        range.start = start < range.start ? start : range.start;
        range.end = end > range.end ? end : range.end;
    }
    return range;
}

struct ranges {
    struct {
        _Atomic uintptr_t start, end;
    } of[DRIVER_OBJECTS];
};

/* Address ranges of driver libraries seen so far. A stale range (dlclose) does no harm: callers ask only about
 * addresses of a hooked name. */
static struct ranges seen;
/* Ranges of objects that the driver has opened: such objects are never unloaded. */
static struct ranges opened;

static bool in_ranges(const struct ranges *ranges, uintptr_t address) {
    for (int i = 0; i < DRIVER_OBJECTS; i++)
        if (address >= atomic_load_explicit(&ranges->of[i].start, memory_order_acquire) &&
            address < atomic_load_explicit(&ranges->of[i].end, memory_order_acquire))
            return true;
    return false;
}

static void add_range(struct ranges *ranges, struct range range) {
    for (int i = 0; i < DRIVER_OBJECTS; i++) {
        uintptr_t there = 0;
        if (atomic_compare_exchange_strong(&ranges->of[i].start, &there, range.start))
            atomic_store_explicit(&ranges->of[i].end, range.end, memory_order_release);
        if (there == 0 || there == range.start)
            return;
    }
}

/* The following runs with the dynamic linker's lock held, inside dl_iterate_phdr. */

static struct object object_of_map(const struct link_map *map) {
    return object_of(map->l_addr, map->l_ld);
}

/* A library of the compiler or the C library, which does not belong to the driver. */
static bool is_common(const char *soname) {
    static const char *const common[] = {"libc.so",  "libdl.so",    "libm.so",      "libpthread.so",
                                         "librt.so", "libgcc_s.so", "libstdc++.so", "ld-linux"};
    for (unsigned i = 0; i < sizeof common / sizeof *common; i++)
        if (strncmp(soname, common[i], strlen(common[i])) == 0)
            return true;
    return false;
}

static bool needs(const struct object *o, const char *name) {
    for (const ElfW(Dyn) *d = o->dynamic; d && o->strings && d->d_tag != DT_NULL; d++)
        if (d->d_tag == DT_NEEDED && strcmp(file_of(o->strings + d->d_un.d_val), name) == 0)
            return true;
    return false;
}

static bool is_drivers(const struct link_map *map, int depth) {
    const struct object o = object_of_map(map);
    const char *name = o.soname ? o.soname : file_of(map->l_name);
    if (is_driver_name(file_of(map->l_name)) || is_driver_name(name) || in_ranges(&opened, (uintptr_t)map->l_ld))
        return true;
    if (depth == DEEPEST_NEED || !*name || is_common(name))
        return false;
    for (const struct link_map *other = _r_debug.r_map; other; other = other->l_next) {
        const struct object its = object_of_map(other);
        if (other != map && needs(&its, name) && is_drivers(other, depth + 1))
            return true;
    }
    return false;
}

static bool is_behind(const struct link_map *map, const struct link_map *last) {
    for (; map; map = map->l_prev)
        if (map->l_prev == last)
            return true;
    return false;
}

static const struct link_map *map_of(const struct dl_phdr_info *info) {
    const struct object o = object_of_phdr(info);
    const struct link_map *map = _r_debug.r_map;
    while (map && map->l_ld != o.dynamic)
        map = map->l_next;
    return map;
}

/* Set while this thread opens a library for the driver: the last object before it; NULL: no such open. Everything that
 * the open loads comes after `last`. */
static __thread __attribute__((tls_model("initial-exec"))) const struct link_map *last;

struct driver_search {
    uintptr_t address;
    bool found;
    struct range range;
};

static int visit_driver(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    struct driver_search *search = data;
    if (!contains(info, (const void *)search->address))
        return 0;
    const struct link_map *map = map_of(info);
    search->range = range_of(info);
    search->found = map && is_drivers(map, 0);
    /* A constructor of the library that the driver is opening: it looks up functions before the open returns. */
    if (map && !search->found && last && is_behind(map, last)) {
        search->found = true;
        add_range(&opened, search->range);
    }
    return 1;
}

bool vgpu_loaded_is_driver(const void *caller) {
    struct driver_search search = {.address = (uintptr_t)caller};
    if (in_ranges(&opened, search.address))
        return true;
    dl_iterate_phdr(visit_driver, &search);
    return search.found;
}

bool vgpu_loaded_in_driver(const void *address) {
    struct driver_search search = {.address = (uintptr_t)address};
    if (!address)
        return false;
    if (in_ranges(&seen, search.address) || in_ranges(&opened, search.address))
        return true;
    dl_iterate_phdr(visit_driver, &search);
    if (search.found)
        add_range(&seen, search.range);
    return search.found;
}

static int visit_last(struct dl_phdr_info *info, size_t size, void *data) {
    (void)info, (void)size;
    const struct link_map *map = _r_debug.r_map;
    while (map && map->l_next)
        map = map->l_next;
    *(const struct link_map **)data = map;
    return 1;
}

const struct link_map *vgpu_loaded_driver_opens(void) {
    const struct link_map *before = last;
    if (!before)
        dl_iterate_phdr(visit_last, &last);
    return before;
}

struct opening {
    const struct link_map *opened;
    const struct link_map *behind;
};

/* Another thread may have loaded objects meanwhile. Only the opened object and its dependencies belong to the
 * driver. */
static bool belongs(const struct link_map *map, const struct link_map *to, int depth) {
    const struct object o = object_of_map(map), its = object_of_map(to);
    const char *name = o.soname ? o.soname : file_of(map->l_name);
    if (map == to || needs(&its, name))
        return true;
    for (const struct link_map *other = _r_debug.r_map; other && depth < DEEPEST_NEED; other = other->l_next) {
        const struct object between = object_of_map(other);
        if (other != map && other != to && needs(&between, name) && belongs(other, to, depth + 1))
            return true;
    }
    return false;
}

static int visit_opened(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    const struct opening *opening = data;
    const struct link_map *map = map_of(info);
    if (map && is_behind(map, opening->behind) && belongs(map, opening->opened, 0))
        add_range(&opened, range_of(info));
    return 0;
}

void vgpu_loaded_driver_opened(const struct link_map *before, void *handle) {
    struct opening opening = {.opened = handle, .behind = last};
    if (handle && last)
        dl_iterate_phdr(visit_opened, &opening);
    last = before;
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

struct caller_search {
    const void *caller;
    const struct link_map *map;
    bool searches;
};

static int visit_caller(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    struct caller_search *search = data;
    if (!contains(info, search->caller))
        return 0;
    search->map = map_of(info);
    search->searches = object_of_phdr(info).searches;
    return 1;
}

const struct link_map *vgpu_loaded_object(const void *address, bool *searches) {
    struct caller_search search = {.caller = address};
    dl_iterate_phdr(visit_caller, &search);
    *searches = search.searches;
    return search.map;
}

bool vgpu_loaded_is_before(const void *address, const void *other) {
    bool searches;
    const struct link_map *first = vgpu_loaded_object(address, &searches),
                          *second = vgpu_loaded_object(other, &searches);
    while (first && first != second)
        first = first->l_next;
    return first && second;
}
