/* Images that programs load: PTX, cubins, and fatbins of both. The layout of a fatbin's parts is from ZLUDA
 * (github.com/vosen/ZLUDA, cuda_types/src/dark_api.rs, "Fatbin..."). */
#define _GNU_SOURCE
#include <ctype.h>
#include <elf.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/driver.h"

#define FATBIN_WRAPPER 0x466243b1u
#define FATBIN_MAGIC 0xba55ed50u

struct fatbin {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes; /* after the header */
};

enum { PART_PTX = 1, PART_CUBIN = 2 };
enum { PART_LZ4 = 0x2000, PART_ZSTD = 0x8000 };
struct part {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t bytes;
    uint32_t compressed_bytes, unknown[5];
    uint64_t flags;
};

/* The part that begins at an offset of a fatbin; false: there is none. */
static bool part_at(const struct image *image, size_t offset, struct part *part) {
    if (offset + sizeof *part > image->size)
        return false;
    memcpy(part, image->bytes + offset, sizeof *part);
    size_t left = image->size - offset;
    return part->header_bytes >= sizeof *part && part->header_bytes <= left && part->bytes <= left - part->header_bytes;
}

static size_t first_part(const struct image *image) {
    struct fatbin header;
    memcpy(&header, image->bytes, sizeof header);
    return header.magic == FATBIN_MAGIC ? header.header_bytes : image->size;
}

bool image_read(const void *given, struct image *image) {
    struct {
        uint32_t magic, version;
        const char *data;
    } wrapper; /* as nvcc embeds it */
    uint32_t magic;
    memcpy(&magic, given, sizeof magic);
    *image = (struct image){given, 0, true, false};
    if (magic == FATBIN_WRAPPER) {
        memcpy(&wrapper, given, sizeof wrapper);
        image->bytes = wrapper.data;
        memcpy(&magic, image->bytes, sizeof magic);
    }
    if (magic == FATBIN_MAGIC) {
        struct fatbin header;
        struct part part;
        memcpy(&header, image->bytes, sizeof header);
        image->size = header.header_bytes + header.bytes;
        for (size_t at = header.header_bytes; part_at(image, at, &part); at += part.header_bytes + part.bytes)
            image->compressed |= part.flags & (PART_LZ4 | PART_ZSTD);
    } else if (memcmp(image->bytes, ELFMAG, SELFMAG) == 0) {
        Elf64_Ehdr header;
        memcpy(&header, image->bytes, sizeof header);
        image->size = header.e_shoff + (size_t)header.e_shnum * header.e_shentsize;
    } else {
        image->binary = false;
        image->size = strstr(image->bytes, ".version") || strstr(image->bytes, ".entry") ? strlen(image->bytes) : 0;
    }
    return image->size;
}

typedef void visitor(CUmodule module, const char *name, size_t length, uint64_t size);

/* Finds declarations such as `.visible .global .align 4 .b8 NAME[128];`. In an instruction, no blank follows
 * `.global`. */
static void variables_of_ptx(const char *text, size_t size, visitor *visit, CUmodule module) {
    static const char *const spaces[] = {".global ", ".const "};
    const char *end = text + size;
    for (size_t i = 0; i < sizeof spaces / sizeof *spaces; i++)
        for (const char *at = text; (at = memmem(at, (size_t)(end - at), spaces[i], strlen(spaces[i])));) {
            unsigned bits = 0, elements = 1;
            for (at += strlen(spaces[i]); at < end && !isalpha((unsigned char)*at) && !strchr("_$%;={}", *at);) {
                if (end - at > 2 && *at == '.' && strchr("bufs", at[1]) && isdigit((unsigned char)at[2]))
                    bits = (unsigned)atoi(at + 2);
                while (at < end && !isspace((unsigned char)*at) && *at != ';') /* a type, or a number of `.align` */
                    at++;
                while (at < end && isspace((unsigned char)*at))
                    at++;
            }
            const char *name = at;
            while (at < end && *at && (isalnum((unsigned char)*at) || strchr("_$%", *at)))
                at++;
            size_t length = (size_t)(at - name);
            if (at < end && *at == '[')
                elements = (unsigned)atoi(at + 1);
            if (length && bits && elements)
                visit(module, name, length, (uint64_t)bits / 8 * elements);
        }
}

static bool section_at(const char *elf, size_t size, const Elf64_Ehdr *header, unsigned index, Elf64_Shdr *section) {
    uint64_t at = header->e_shoff + (uint64_t)index * sizeof *section;
    if (index >= header->e_shnum || header->e_shentsize != sizeof *section || at > size || size - at < sizeof *section)
        return false;
    memcpy(section, elf + at, sizeof *section);
    return section->sh_type == SHT_NOBITS ||
           (section->sh_offset <= size && section->sh_size <= size - section->sh_offset);
}

static void variables_of_cubin(const char *elf, size_t size, visitor *visit, CUmodule module) {
    Elf64_Ehdr header;
    Elf64_Shdr symbols, strings;
    if (size < sizeof header)
        return;
    memcpy(&header, elf, sizeof header);
    for (unsigned i = 0; section_at(elf, size, &header, i, &symbols); i++) {
        if (symbols.sh_type != SHT_SYMTAB || !section_at(elf, size, &header, symbols.sh_link, &strings))
            continue;
        for (uint64_t at = 0; at + sizeof(Elf64_Sym) <= symbols.sh_size; at += sizeof(Elf64_Sym)) {
            Elf64_Sym symbol;
            memcpy(&symbol, elf + symbols.sh_offset + at, sizeof symbol);
            if (ELF64_ST_TYPE(symbol.st_info) != STT_OBJECT || !symbol.st_size || symbol.st_name >= strings.sh_size)
                continue;
            const char *name = elf + strings.sh_offset + symbol.st_name;
            visit(module, name, strnlen(name, strings.sh_size - symbol.st_name), symbol.st_size);
        }
    }
}

void image_variables(const struct image *image, visitor *visit, CUmodule module) {
    struct part part;
    if (!image->binary)
        variables_of_ptx(image->bytes, image->size, visit, module);
    else if (memcmp(image->bytes, ELFMAG, SELFMAG) == 0)
        variables_of_cubin(image->bytes, image->size, visit, module);
    else
        for (size_t at = first_part(image); part_at(image, at, &part); at += part.header_bytes + part.bytes) {
            const char *contents = image->bytes + at + part.header_bytes;
            if (part.flags & (PART_LZ4 | PART_ZSTD))
                continue;
            if (part.kind == PART_CUBIN)
                variables_of_cubin(contents, part.bytes, visit, module);
            else if (part.kind == PART_PTX)
                variables_of_ptx(contents, part.bytes, visit, module);
        }
}
