/* HMAC (RFC 2104) with the hash MD2 (RFC 1319). */
#ifndef VGPU_SIMULATOR_MD2_H
#define VGPU_SIMULATOR_MD2_H
#include <stddef.h>
#include <stdint.h>

#define MD2_BYTES 16 /* size of a digest and of a block */

struct md2 {
    uint8_t state[3 * MD2_BYTES], checksum[MD2_BYTES], block[MD2_BYTES];
    unsigned filled;
};

struct hmac_md2 {
    struct md2 inner;
    const uint8_t *key; /* MD2_BYTES long */
};
void hmac_md2_begin(struct hmac_md2 *hmac, const uint8_t *key);
void hmac_md2_add(struct hmac_md2 *hmac, const void *bytes, size_t size);
void hmac_md2_end(struct hmac_md2 *hmac, uint8_t digest[MD2_BYTES]);

#endif
