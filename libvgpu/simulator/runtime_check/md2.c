/* HMAC (RFC 2104) with the hash MD2 (RFC 1319), which the CUDA runtime requires from its driver. */
#include <string.h>

#include "runtime_check/md2.h"

/* RFC 1319, 3.2: "a 256-byte random permutation constructed from the digits of pi" */
static const uint8_t substitution[256] = {
    41,  46,  67,  201, 162, 216, 124, 1,   61,  54,  84,  161, 236, 240, 6,   19,  98,  167, 5,   243, 192, 199,
    115, 140, 152, 147, 43,  217, 188, 76,  130, 202, 30,  155, 87,  60,  253, 212, 224, 22,  103, 66,  111, 24,
    138, 23,  229, 18,  190, 78,  196, 214, 218, 158, 222, 73,  160, 251, 245, 142, 187, 47,  238, 122, 169, 104,
    121, 145, 21,  178, 7,   63,  148, 194, 16,  137, 11,  34,  95,  33,  128, 127, 93,  154, 90,  144, 50,  39,
    53,  62,  204, 231, 191, 247, 151, 3,   255, 25,  48,  179, 72,  165, 181, 209, 215, 94,  146, 42,  172, 86,
    170, 198, 79,  184, 56,  210, 150, 164, 125, 182, 118, 252, 107, 226, 156, 116, 4,   241, 69,  157, 112, 89,
    100, 113, 135, 32,  134, 91,  207, 101, 230, 45,  168, 2,   27,  96,  37,  173, 174, 176, 185, 246, 28,  70,
    97,  105, 52,  64,  126, 15,  85,  71,  163, 35,  221, 81,  175, 58,  195, 92,  249, 206, 186, 197, 234, 38,
    44,  83,  13,  110, 133, 40,  132, 9,   211, 223, 205, 244, 65,  129, 77,  82,  106, 220, 55,  200, 108, 193,
    171, 250, 36,  225, 123, 8,   12,  189, 177, 74,  120, 136, 149, 139, 227, 99,  232, 109, 233, 203, 213, 254,
    59,  0,   29,  57,  242, 239, 183, 14,  102, 88,  208, 228, 166, 119, 114, 248, 235, 117, 75,  10,  49,  68,
    80,  180, 143, 237, 31,  26,  219, 153, 141, 51,  159, 17,  131, 20,
};

static void take_block(struct md2 *md2) {
    uint8_t last = md2->checksum[MD2_BYTES - 1], carried = 0;
    for (int i = 0; i < MD2_BYTES; i++) {
        md2->state[MD2_BYTES + i] = md2->block[i];
        md2->state[2 * MD2_BYTES + i] = md2->block[i] ^ md2->state[i];
        last = md2->checksum[i] ^= substitution[md2->block[i] ^ last];
    }
    for (uint8_t round = 0; round < 18; round++) {
        for (size_t i = 0; i < sizeof md2->state; i++)
            carried = md2->state[i] ^= substitution[carried];
        carried = (uint8_t)(carried + round);
    }
    md2->filled = 0;
}

static void md2_add(struct md2 *md2, const void *bytes, size_t size) {
    for (size_t i = 0; i < size; i++) {
        md2->block[md2->filled++] = ((const uint8_t *)bytes)[i];
        if (md2->filled == MD2_BYTES)
            take_block(md2);
    }
}

static void md2_end(struct md2 *md2, uint8_t digest[MD2_BYTES]) {
    uint8_t padding = (uint8_t)(MD2_BYTES - md2->filled), checksum[MD2_BYTES];
    for (int i = 0; i < padding; i++)
        md2_add(md2, &padding, 1);
    memcpy(checksum, md2->checksum, sizeof checksum); /* adding it as a block changes the checksum */
    md2_add(md2, checksum, sizeof checksum);
    memcpy(digest, md2->state, MD2_BYTES);
}

static void begin(struct md2 *md2, const uint8_t *key, uint8_t pad) {
    uint8_t block[MD2_BYTES];
    memset(md2, 0, sizeof *md2);
    for (int i = 0; i < MD2_BYTES; i++)
        block[i] = key[i] ^ pad;
    md2_add(md2, block, sizeof block);
}

void hmac_md2_begin(struct hmac_md2 *hmac, const uint8_t *key) {
    hmac->key = key;
    begin(&hmac->inner, key, 0x36);
}

void hmac_md2_add(struct hmac_md2 *hmac, const void *bytes, size_t size) {
    md2_add(&hmac->inner, bytes, size);
}

void hmac_md2_end(struct hmac_md2 *hmac, uint8_t digest[MD2_BYTES]) {
    struct md2 outer;
    uint8_t inner[MD2_BYTES];
    md2_end(&hmac->inner, inner);
    begin(&outer, hmac->key, 0x5c);
    md2_add(&outer, inner, sizeof inner);
    md2_end(&outer, digest);
}
