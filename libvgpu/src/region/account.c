/* Charges and releases bytes in a shared account. After a crash at any step, another process can finish or drop the
 * operation. */
#include "region/account.h"

void vgpu_account_settle(struct vgpu_usage_file *usage, unsigned card, enum vgpu_account_index account,
                         uint32_t number) {
    struct vgpu_lane *lane = vgpu_account_lane_of(usage, card, account, number);
    const uint64_t intent = vgpu_account_load(&lane->intent);
    if (intent & 1) {
        const uint64_t seq = intent >> 1;
        const uint64_t tag = vgpu_account_load(&usage->accounts[card][account].word.tag);
        if (tag == VGPU_TAG(number, seq) || vgpu_account_load(&lane->done) >= seq)
            vgpu_account_book(lane, vgpu_account_load(&lane->after), seq);
        else
            vgpu_account_store(&lane->intent, VGPU_INTENT(seq, 0));
        DEATH_POINT();
    }
    const uint64_t held = vgpu_account_load(&lane->bytes);
    if (held > 0)
        vgpu_account_operate(usage, card, account, number, 0, VGPU_NO_LIMIT);
}
