/* The pacer of one thread, with everything around it played here: no card, no region, a share that each check sets.
 * Prints nothing and ends with 0, or names the check that failed. */
#include <string.h>

/* for what it keeps to itself */
#include "../src/pacer/pacer.c"
#include "check.h"
#include "ledger/attach.h"

#define MS 1000000u

static struct vgpu_limits_file limits_file;
static struct vgpu_usage_file usage_file;
static struct vgpu_limits limits = {.card_count = 1};
static struct vgpu_pace pace;
static struct vgpu_local local = {.enforced = VGPU_REGION + 1};

struct vgpu_mapping vgpu_mapped = {.limits = &limits_file, .usage = &usage_file};
_Atomic(struct vgpu_local *) vgpu_local_memory = &local;
_Atomic(void *) vgpu_driver_entries[VGPU_ENTRY_COUNT];
atomic_bool vgpu_gate_armed; /* nothing can move */
atomic_int vgpu_open_captures, vgpu_samples_outstanding;

void *vgpu_driver_entry_slowly(enum vgpu_entry entry) {
    (void)entry;
    return NULL;
}
struct vgpu_local *vgpu_local_slowly(void) {
    return &local;
}
enum vgpu_mode vgpu_enforcement_slowly(void) {
    return VGPU_REGION;
}
const struct vgpu_mapping *vgpu_mapping(void) {
    return &vgpu_mapped;
}
const struct vgpu_limits *vgpu_limits_now(void) {
    return &limits;
}
bool vgpu_place_now(struct vgpu_place *place) {
    *place = (struct vgpu_place){0};
    return true;
}
bool vgpu_place_of_stream(CUstream stream, struct vgpu_place *place) {
    (void)stream;
    return vgpu_place_now(place);
}
void vgpu_graph_cards_captured(CUstream stream, unsigned card) {
    (void)stream, (void)card;
}
int vgpu_reap(unsigned min_interval_ms) {
    (void)min_interval_ms;
    return 0;
}
uint64_t vgpu_contention_missed(unsigned card) {
    (void)card;
    return 0;
}
uint64_t vgpu_contention_spent(unsigned card) {
    (void)card;
    return 0;
}
bool vgpu_arbiter_lives(unsigned card, uint64_t now) {
    (void)card, (void)now;
    return false;
}
void vgpu_count_gpu_time(unsigned card, uint64_t gpu_ns, uint64_t launches) {
    (void)card, (void)gpu_ns, (void)launches;
}
void vgpu_count_throttled(unsigned card, uint64_t ns) {
    (void)card, (void)ns;
}
void vgpu_contention_own(unsigned card, int64_t gpu_ns) {
    (void)card, (void)gpu_ns;
}
void vgpu_contention_update(unsigned card, uint64_t now) {
    (void)card, (void)now;
}
uint64_t vgpu_contention_scaled(unsigned card, uint64_t gpu_ns) {
    (void)card;
    return gpu_ns;
}
enum vgpu_company vgpu_contention_company(unsigned card) {
    (void)card;
    return VGPU_ALONE;
}
static struct vgpu_sample measured;
struct vgpu_sample *vgpu_sample_begin(CUcontext context, CUstream stream, bool must) {
    (void)context, (void)stream, (void)must;
    return &measured;
}
void vgpu_sample_end(struct vgpu_sample *sample, bool launched) {
    (void)launched;
    vgpu_cost_landed(sample->cost, sample->recorded_ns);
}
bool vgpu_samples_collect(vgpu_sample_taker *each, bool must) {
    (void)each, (void)must;
    return false;
}
void vgpu_samples_stream_going(CUstream stream) {
    (void)stream;
}

struct vgpu_pace vgpu_pace_now(const struct vgpu_limits *now_limits, const struct vgpu_place *place, uint64_t now) {
    (void)now_limits, (void)place, (void)now;
    return pace;
}

/* A key whose launches are known to take so long. */
static uint64_t taking(uint64_t key, uint64_t gpu_ns) {
    for (unsigned i = 0; i < 2 * VGPU_COST_RECENT; i++)
        vgpu_cost_learn(vgpu_cost_of(key), gpu_ns, VGPU_ALONE, true);
    return key;
}

static struct vgpu_launch launch(uint64_t key) {
    struct vgpu_launch launched = {.function = NULL};
    CHECK(vgpu_pacer_before(&launched, key, NULL));
    CHECK(vgpu_pacer_after(&launched, CUDA_SUCCESS) == CUDA_SUCCESS);
    return launched;
}

static void begin(uint32_t percent) {
    vgpu_pacer_forget();
    memset(&usage_file, 0, sizeof usage_file);
    pace = (struct vgpu_pace){.percent = percent, .burst_ns = 50 * MS};
}

static void check_a_rate_that_falls(void) {
    begin(0);
    const uint64_t key = taking(1, 2000);
    uint64_t now = 1000 * (uint64_t)MS;
    vgpu_thread_look_up(0, key, NULL, now);
    vgpu_self.until_sample = 16383; /* drawn among launches of 2 us */
    for (int i = 0; i < 10; i++)
        vgpu_thread_look_up(0, key, NULL, now += 10 * MS);
    /* 10 ms apart: the next one or the one after it is measured */
    CHECK(vgpu_self.interval_ns > MS && vgpu_self.until_sample <= 1);
    for (int i = 0; i < 1000; i++)
        vgpu_thread_look_up(0, key, NULL, now += 2000);
    vgpu_self.until_sample = 16383;
    vgpu_thread_look_up(0, key, NULL, now += 2000);
    CHECK(vgpu_self.interval_ns < VGPU_FAST_NS && vgpu_self.until_sample == 16382);
}

static void check_a_share_that_ends(void) {
    begin(2);
    pace.burst_ns = 0;
    const struct vgpu_place place = {0};
    uint64_t now = vgpu_now_ns();
    const struct vgpu_turn turn = vgpu_turn_reserve(0, 100 * MS, &pace, now);
    CHECK(usage_file.pacer[0].tat >= now + 5000 * (uint64_t)MS);
    pace = (struct vgpu_pace){.moves = true};
    vgpu_turn_await(turn, &place);
    /* at all of the card it is as far ahead as what it will use */
    CHECK(usage_file.pacer[0].tat <= vgpu_now_ns() + 100 * MS);
    pace = (struct vgpu_pace){.percent = 2};
    now = vgpu_now_ns();
    /* and nothing has added up when it gives way again */
    CHECK(vgpu_turn_reserve(0, 0, &pace, now).start <= now + 5000 * (uint64_t)MS);
}

static void check_pacing_begins(void) {
    begin(0);
    const uint64_t key = taking(2, 10000);
    CHECK(launch(key).limit == 0 && vgpu_prepaid.left_ns > BATCH_NS);
    pace.percent = 30;
    vgpu_prepaid.left = 0; /* time to look up */
    CHECK(launch(key).limit == 30);
    /* what was only counted is not spent as if it were paid */
    CHECK(usage_file.pacer[0].tat > 0 && vgpu_prepaid.left_ns <= BATCH_NS);
    begin(0);
    CHECK(launch(key).limit == 0 && vgpu_prepaid.left_ns > BATCH_NS);
    pace.percent = 30;
    vgpu_prepaid.left = 0; /* time to look up */
    const uint64_t tats = usage_file.pacer[0].tat;
    CHECK(launch(taking(3, 400000)).limit == 30 && usage_file.pacer[0].tat > tats && vgpu_prepaid.left_ns == 0);
}

static void check_a_key_that_grows(void) {
    begin(0);
    const uint64_t key = taking(4, 10000);
    launch(key);
    CHECK(vgpu_prepaid.known[vgpu_prepaid_place(key)].key == key);
    launch(taking(key + 8, 400000)); /* a long one of the same place is none of its business */
    CHECK(vgpu_prepaid.known[vgpu_prepaid_place(key)].key == key);
    taking(key, 400000);
    vgpu_prepaid.left = 0; /* time to look up */
    launch(key);
    CHECK(vgpu_prepaid.known[vgpu_prepaid_place(key)].key == 0 && !vgpu_pacer_prepaid(key, NULL));
}

/* Where the arbiter alone may begin to pace, little goes uncounted. */
static void check_pacing_may_begin(void) {
    begin(0);
    pace.moves = true;
    CHECK(launch(taking(5, 10000)).limit == 0 && vgpu_prepaid.left_ns <= BATCH_NS);
}

static void check_what_is_spent(void) {
    int other;
    begin(30);
    const uint64_t key = taking(6, 1000);
    for (int i = 0; i < 16; i++) { /* pays for more each time */
        vgpu_self.until_sample = 100;
        launch(key);
    }
    vgpu_prepaid.left = 50;
    CHECK(!vgpu_pacer_prepaid(key, NULL)); /* how many cards there are is not known: each launch is looked at */
    vgpu_one_card = true;
    const uint64_t left_ns = vgpu_prepaid.left_ns, left = vgpu_prepaid.left;
    CHECK(vgpu_pacer_prepaid(key, NULL) && vgpu_pacer_prepaid(key, (CUstream)&other));
    CHECK(vgpu_prepaid.left_ns == left_ns - 2000 && vgpu_prepaid.left == left - 2);
    CHECK(vgpu_prepaid.sources ==
          (vgpu_sources_member(NULL, &vgpu_prepaid) | vgpu_sources_member(&other, &vgpu_prepaid)));
    CHECK(!vgpu_pacer_prepaid(key + 8, NULL));
    vgpu_open_captures = 1;
    CHECK(!vgpu_pacer_prepaid(key, NULL));
    vgpu_open_captures = 0;
    CHECK(vgpu_pacer_prepaid(key, NULL));
    local.enforced = 0; /* as a forked child finds it */
    CHECK(!vgpu_pacer_prepaid(key, NULL));
    local.enforced = VGPU_REGION + 1;
    limits_file.selector++;
    CHECK(!vgpu_pacer_prepaid(key, NULL));
    limits_file.selector--;
    vgpu_prepaid.left_ns = 999;
    CHECK(!vgpu_pacer_prepaid(key, NULL));
    vgpu_prepaid.left_ns = 1000;
    CHECK(vgpu_pacer_prepaid(key, NULL) && vgpu_prepaid.left_ns == 0);
    vgpu_one_card = false;
}

int main(void) {
    check_a_rate_that_falls();
    check_a_share_that_ends();
    check_pacing_begins();
    check_a_key_that_grows();
    check_pacing_may_begin();
    check_what_is_spent();
    return 0;
}
