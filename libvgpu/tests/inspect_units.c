/* When a process is inspected, and what becomes of it, with the driver and the clock played here. Ends with 0, or names
 * the check that failed. */
#include "pacer/inspect.h"

#include "check.h"
#include "pacer/contention.h"
#include "pacer/costs.h"

#define MS 1000000ull
#define S (1000 * MS)

static uint64_t spent;
static enum vgpu_company company = VGPU_ALONE;
static unsigned doubted;

uint64_t vgpu_contention_spent(unsigned card) {
    (void)card;
    return spent;
}
enum vgpu_company vgpu_contention_company(unsigned card) {
    (void)card;
    return company;
}
void vgpu_cost_doubt(uint64_t key) {
    (void)key;
    doubted++;
}
void vgpu_inspect_forget(void);

static uint64_t waited(uint64_t begun, uint64_t wall) {
    struct vgpu_wait wait;
    vgpu_inspect_wait(&wait, 0, begun);
    return vgpu_inspect_waited(&wait, 0, begun + wall);
}

static void start_at(uint64_t now) {
    vgpu_inspect_forget();
    spent = doubted = 0;
    company = VGPU_ALONE;
    CHECK(!vgpu_inspect_turn(0, now));
    CHECK(!waited(now, 100 * MS)); /* nothing is unmeasured: the host was late */
    vgpu_inspect_unmeasured(0);
}

static void inspect(unsigned launches, uint64_t gpu_ns, uint64_t mean_ns) {
    for (unsigned i = 0; i < launches; i++) {
        vgpu_inspect_found(0, gpu_ns, mean_ns);
        spent += gpu_ns;
    }
}

static void check_waits(void) {
    start_at(S);
    vgpu_inspect_paid(0, 50 * MS, S);
    CHECK(!waited(S, 50 * MS) && !vgpu_inspecting(0)); /* explained by what was paid */
    CHECK(!waited(2 * S, MS / 4) && !vgpu_inspecting(0));
    company = VGPU_SHARING;
    CHECK(!waited(2 * S, 100 * MS) && !vgpu_inspecting(0));
    company = VGPU_ALONE;
    CHECK(waited(2 * S, 100 * MS) == 100 * MS && vgpu_inspecting(0));
    CHECK(!waited(2 * S + 200 * MS, 100 * MS)); /* its launches are measured */
}

static void check_nothing_found(void) {
    start_at(S);
    const uint64_t deposit = waited(2 * S, 10 * MS);
    spent += deposit;
    CHECK(deposit == 10 * MS);
    CHECK(!vgpu_inspect_turn(0, 20 * S) && vgpu_inspecting(0)); /* no launch was seen yet */
    inspect(20, 10000, 10000);
    CHECK(vgpu_inspect_turn(0, 20 * S) == -(int64_t)deposit && !vgpu_inspecting(0) && !doubted);
    CHECK(!waited(21 * S, 30 * MS));     /* such waits mean nothing for a while, */
    CHECK(waited(21 * S, 100 * MS) > 0); /* much longer ones do */
}

static void check_find(void) {
    start_at(S);
    spent = 100 * MS;
    CHECK(vgpu_inspect_sample(0, 5 * MS, 10000, 2 * S) && vgpu_inspecting(0));
    inspect(99, 10000, 10000);
    inspect(1, 5 * MS, 10000); /* five times as much as means say */
    const int64_t owed = vgpu_inspect_turn(0, 4 * S);
    CHECK(owed > 480 * (int64_t)MS && owed < 520 * (int64_t)MS && doubted == 1 && !vgpu_inspecting(0));
    CHECK(waited(5 * S, 10 * MS) == 10 * MS); /* the next inspection is longer */
    inspect(20, 10000, 10000);
    CHECK(!vgpu_inspect_turn(0, 8 * S) && vgpu_inspect_turn(0, 10 * S) < 0);
}

static void check_no_more_than_time(void) {
    start_at(S);
    spent = 900 * MS;
    CHECK(vgpu_inspect_sample(0, 5 * MS, 10000, 2 * S));
    inspect(100, 5 * MS, 10000);
    CHECK(vgpu_inspect_turn(0, 4 * S) == 100 * (int64_t)MS);
}

static void check_usual(void) {
    start_at(S);
    CHECK(!vgpu_inspect_sample(0, 90000, 10000, 2 * S) && !vgpu_inspect_sample(0, 5 * MS, 2 * MS, 2 * S));
    CHECK(vgpu_inspect_sample(0, MS, 100000, 2 * S));
    inspect(100, 90000, 100000);
    inspect(1, MS, 100000);
    CHECK(!vgpu_inspect_turn(0, 4 * S) && !vgpu_inspecting(0));
    CHECK(!vgpu_inspect_sample(0, MS, 100000, 5 * S));
    CHECK(vgpu_inspect_sample(0, MS, 100000, 20 * S));
}

int main(void) {
    check_waits();
    check_nothing_found();
    check_find();
    check_no_more_than_time();
    check_usual();
    return 0;
}
