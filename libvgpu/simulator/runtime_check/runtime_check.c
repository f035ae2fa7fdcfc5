/* The check by which the CUDA runtime recognises its driver. Only for tests of interoperability: only `make build` of a
 * developer's tree compiles this folder (SIM_RUNTIME_CHECK=1, see libvgpu/build.py). No wheel and no image contains it,
 * so there the runtime returns cudaErrorSymbolNotFound on the simulator.
 *
 * Sources: ZLUDA (dark_api/src/lib.rs and zluda/src/impl/driver.rs) for the id, the two constants, and what is hashed
 * in which order. The hash is HMAC of MD2: its steps are those of RFC 1319 and RFC 2104, and the runtimes 11.8 to 13.5
 * accept it. */
#include <string.h>
#include <unistd.h>

#include "cuda/driver.h"
#include "cuda/export_tables.h"
#include "runtime_check/md2.h"

static const uint8_t key[MD2_BYTES] = {0x14, 0x6a, 0xdd, 0xae, 0x53, 0xa9, 0xa7, 0x52,
                                       0xaa, 0x08, 0x41, 0x36, 0x0b, 0xf5, 0x5a, 0x9f};
static const uint64_t constants[2][2] = {{0x3341181c03cb675c, 0x8ed383aa1f4cd1e8},
                                         {0x1841181c03cb675c, 0x8ed383aa1f4cd1e8}};

static void add_cards(struct hmac_md2 *hmac) {
    for (CUdevice device = 0; device < driver.count; device++) {
        struct {
            CUuuid uuid;
            int domain, bus, slot;
        } card;
        cuDeviceGetUuid_v2(&card.uuid, device);
        cuDeviceGetAttribute(&card.domain, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, device);
        cuDeviceGetAttribute(&card.bus, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, device);
        cuDeviceGetAttribute(&card.slot, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, device);
        hmac_md2_add(hmac, &card, sizeof card);
    }
}

/* The runtime asks three times at its start: with its own version, and with that plus 1 and plus 2. */
static CUresult check(unsigned version, uint64_t seconds, uint8_t answer[MD2_BYTES]) {
    if (!answer)
        return CUDA_ERROR_INVALID_VALUE;
    if (version % 10 < 2) {
        memcpy(answer, constants[version % 10], MD2_BYTES);
        return CUDA_SUCCESS;
    }
    const struct {
        uint32_t driver, version, process, thread;
        const void *runtime, *own, *function;
        uint64_t seconds;
    } asked = {(uint32_t)sim_driver()->cuda, version,
               (uint32_t)getpid(),           (uint32_t)pthread_self(),
               (const void *)runtime_table,  (const void *)runtime_check_table,
               runtime_check_table[1],       seconds};
    struct hmac_md2 hmac;
    hmac_md2_begin(&hmac, key);
    hmac_md2_add(&hmac, &asked, sizeof asked);
    add_cards(&hmac);
    hmac_md2_end(&hmac, answer);
    return CUDA_SUCCESS;
}

const void *const runtime_check_table[3] = {
    [0] = (void *)sizeof runtime_check_table,
    [1] = (void *)check, /* seen three times at the start of every runtime */
    [2] = NULL,          /* never called; driver 580 has a function here */
};
