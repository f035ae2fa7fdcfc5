/* Finds which container's work fell into which container's measurement: the pair of events around a launch also spans
 * the time slices of other containers. */
#include <string.h>

#include "arbiter/arbiter.h"

#define FEW_TURNS 4u
/* a launch this soon after the one before finds other containers still in the slice that they got then */
#define NEXT_NS 200000u
#define FORGETS 128u /* a longer launch lifts the assumed shortest length by 1/FORGETS */

static uint64_t smaller(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

void vgpu_meter_note(struct vgpu_meter *meter, uint64_t at, uint64_t total) {
    const uint32_t last = (meter->count - 1) % VGPU_METER_POINTS, before = (meter->count - 2) % VGPU_METER_POINTS;
    if (!meter->count || total + meter->lowered >= meter->points[last].total) {
        meter->reached = at;
    } else if (at - meter->reached > VGPU_METER_PATIENCE_NS) {
        meter->lowered = meter->points[last].total - total;
        meter->reached = at;
    }
    total += meter->lowered;
    if (meter->count && total < meter->points[last].total)
        total = meter->points[last].total;
    if (meter->count > 1 && total == meter->points[last].total && total == meter->points[before].total) {
        meter->points[last].at = at; /* still idle: a longer flat piece */
        return;
    }
    meter->points[meter->count % VGPU_METER_POINTS].at = at;
    meter->points[meter->count % VGPU_METER_POINTS].total = total;
    meter->count++;
}

static double total_at(const struct vgpu_meter *meter, uint64_t when) {
    const uint32_t kept = (uint32_t)smaller(meter->count, VGPU_METER_POINTS);
    const uint32_t newest = meter->count - 1;
    if (when >= meter->points[newest % VGPU_METER_POINTS].at)
        return (double)meter->points[newest % VGPU_METER_POINTS].total;
    for (uint32_t age = 1; age < kept; age++) {
        const uint32_t i = (newest - age) % VGPU_METER_POINTS, next = (newest - age + 1) % VGPU_METER_POINTS;
        if (when < meter->points[i].at)
            continue;
        const double part =
            (double)(when - meter->points[i].at) / (double)(meter->points[next].at - meter->points[i].at);
        return (double)meter->points[i].total + part * (double)(meter->points[next].total - meter->points[i].total);
    }
    return (double)meter->points[(meter->count - kept) % VGPU_METER_POINTS].total;
}

uint64_t vgpu_meter_between(const struct vgpu_meter *meter, uint64_t begin, uint64_t end) {
    return meter->count && begin < end ? (uint64_t)(total_at(meter, end) - total_at(meter, begin)) : 0;
}

static void insert(struct vgpu_busy *busy, uint32_t place, struct vgpu_busy_span span) {
    memmove(busy->spans + place + 1, busy->spans + place, (busy->count - place) * sizeof *busy->spans);
    busy->spans[place] = span;
    busy->count++;
}

/* Cuts the span at `place` in two at `when`, inside of it. */
static void cut(struct vgpu_busy *busy, uint32_t place, uint64_t when) {
    struct vgpu_busy_span second = busy->spans[place];
    second.begin = when;
    busy->spans[place].end = when;
    insert(busy, place + 1, second);
}

/* Drops old ends of launches of containers that were alone: they do not matter for long. */
static void forget_ends(struct vgpu_busy *busy) {
    const uint32_t old = busy->count - busy->count / 8;
    uint32_t kept = 0;
    for (uint32_t i = 1; i < busy->count; i++) {
        struct vgpu_busy_span *last = &busy->spans[kept];
        const struct vgpu_busy_span next = busy->spans[i];
        const bool alone = (next.members & (next.members - 1)) == 0;
        if (i < old && alone && last->end == next.begin && last->members == next.members) {
            const double length = (double)(last->end - last->begin), more = (double)(next.end - next.begin);
            last->each = (last->each * length + next.each * more) / (length + more);
            last->end = next.end;
            last->ended = 0;
        } else {
            busy->spans[++kept] = next;
        }
    }
    busy->count = kept + 1;
}

/* Drops the oldest spans. One interval at most doubles the number of spans: with so few there is room for that. */
static void make_room(struct vgpu_busy *busy) {
    const uint32_t most = VGPU_BUSY_SPANS / 2 - 2;
    if (busy->count <= most)
        return;
    forget_ends(busy);
    if (busy->count <= most)
        return;
    const uint32_t kept = most / 2;
    memmove(busy->spans, busy->spans + busy->count - kept, kept * sizeof *busy->spans);
    busy->count = kept;
}

/* Joins spans that touch and are equal otherwise, from one place to another. */
static void tidy(struct vgpu_busy *busy, uint32_t from, uint32_t to) {
    const uint32_t next = (uint32_t)smaller((uint64_t)to + 1, busy->count);
    uint32_t kept = from;
    for (uint32_t i = from + 1; i < next; i++) {
        struct vgpu_busy_span *last = &busy->spans[kept];
        if (last->end == busy->spans[i].begin && last->members == busy->spans[i].members &&
            last->ended == busy->spans[i].ended && last->last_ns == busy->spans[i].last_ns &&
            last->ender == busy->spans[i].ender && last->each == busy->spans[i].each)
            last->end = busy->spans[i].end;
        else
            busy->spans[++kept] = busy->spans[i];
    }
    if (kept + 1 < next) {
        memmove(busy->spans + kept + 1, busy->spans + next, (busy->count - next) * sizeof *busy->spans);
        busy->count -= next - kept - 1;
    }
}

struct addition {
    unsigned member;
    double *refunds;
    /* smallest part of the interval that was the launch's own: it cannot be shorter than the shortest similar launch */
    double least;
    uint64_t last_ns; /* time before its end for which the launch had the card; 0: unknown */
    unsigned shorts;  /* other members with charges for launches that are not measured, or not yet */
    struct {
        uint64_t bit;
        double rate; /* part of the time that the member took, by its charges */
    } taken[VGPU_ARBITER_MEMBERS];
    uint64_t members; /* the members for which `part` is known; 0: none */
    double part;
};

/* Spreads short launches evenly over the interval: the charges are known only every few milliseconds. */
static void find_shorts(struct addition *add, uint64_t begin, uint64_t end, const struct vgpu_meters *meters) {
    for (unsigned i = 0; i < meters->count; i++) {
        const uint64_t used =
            meters->of[i].member == add->member ? 0 : vgpu_meter_between(meters->of[i].meter, begin, end);
        if (used) {
            add->taken[add->shorts].bit = UINT64_C(1) << meters->of[i].member;
            add->taken[add->shorts++].rate = (double)used / (double)(end - begin);
        }
    }
}

/* The part of the time left for each busy member. A launch is charged early and may run later, so other members took no
 * more than their turn of the time slices. The busy members already have their own parts, for short and long work. */
static double part_of_each(struct addition *add, uint64_t members) {
    if (add->members == members)
        return add->part;
    const unsigned count = (unsigned)__builtin_popcountll(members);
    const double turn = 1.0 / (count + 1);
    double taken = 0;
    unsigned shorts = 0;
    for (unsigned i = 0; i < add->shorts; i++)
        if (!(add->taken[i].bit & members)) {
            taken += add->taken[i].rate < turn ? add->taken[i].rate : turn;
            shorts++;
        }
    const double each = (1 - taken) / count, least = 1.0 / (count + shorts);
    add->members = members;
    return add->part = each > least ? each : least;
}

/* What the member that ended had of the last `before` nanoseconds, which `count` members shared in turns. */
static double had_since(const struct vgpu_busy *busy, const struct vgpu_busy_span *span, unsigned count,
                        uint64_t before) {
    if (before <= span->last_ns)
        return (double)before;
    const uint64_t turn = count * busy->slice_ns, others = turn - busy->slice_ns;
    uint64_t rest = before - span->last_ns, had = span->last_ns;
    if (rest >= turn * FEW_TURNS) {
        had += rest / turn * busy->slice_ns;
        rest %= turn;
    }
    /* seldom runs more than once, and a division would take as long as all the rest */
    for (; rest >= turn; rest -= turn)
        had += busy->slice_ns;
    return (double)(had + (rest > others ? rest - others : 0));
}

/* What the members had of a span, in nanoseconds. */
struct parts {
    double ender, other;
};

static struct parts parts_of(const struct vgpu_busy *busy, const struct vgpu_busy_span *span) {
    const unsigned count = (unsigned)__builtin_popcountll(span->members);
    const double length = (double)(span->end - span->begin), each = span->each;
    if (count < 2 || !span->ended)
        return (struct parts){length * each, length * each};
    const double last =
        had_since(busy, span, count, span->ended - span->begin) - had_since(busy, span, count, span->ended - span->end);
    return (struct parts){last * each * count, (length - last) / (count - 1) * each * count};
}

/* The member becomes busy in the span, with a launch that ends at `end`. So every member of the span had more or less
 * of it than computed before. */
static void join(struct addition *add, const struct vgpu_busy *busy, struct vgpu_busy_span *span, uint64_t end) {
    const uint64_t bit = UINT64_C(1) << add->member;
    const bool ends_first = add->last_ns && (!span->ended || end < span->ended);
    if (span->members & bit && !ends_first)
        return;
    const struct vgpu_busy_span before = *span;
    span->members |= bit;
    span->each = part_of_each(add, span->members);
    if (ends_first) {
        span->ended = end;
        span->ender = add->member;
        span->last_ns = add->last_ns;
    }
    const struct parts had = parts_of(busy, &before), has = parts_of(busy, span);
    if (!(before.members & bit)) {
        const double length = (double)(span->end - span->begin),
                     part = add->member == span->ender ? has.ender : has.other;
        add->refunds[add->member] +=
            length - (!before.members && part < length * add->least ? length * add->least : part);
    }
    for (uint64_t known = before.members; known; known &= known - 1) {
        const unsigned member = (unsigned)__builtin_ctzll(known);
        add->refunds[member] +=
            (member == before.ender ? had.ender : had.other) - (member == span->ender ? has.ender : has.other);
    }
}

/* The launch's own time, if it waited for other containers' slices. `since`: time since the launch before it ended.
 * From then on the others and this launch had slices in turns, equally many. The launch took more if the others
 * returned part of theirs. 0: it has not waited. */
static uint64_t without_slices(const struct vgpu_busy *busy, uint64_t since, uint64_t length) {
    const uint64_t turn = 2 * busy->slice_ns, slack = busy->slice_ns / 32, whole = since + length;
    return busy->slice_ns && length > busy->slice_ns ? whole - (whole - slack + turn - 1) / turn * busy->slice_ns : 0;
}

/* Waiting only ever adds time, so the shortest launch shows the own time, until it is forgotten after some hundred
 * launches. Two equal launches in a row also show it, if each comes right after the one before and waits for others'
 * slices. */
static void note_length(struct vgpu_busy *busy, unsigned member, uint64_t begin, uint64_t end, bool others) {
    struct vgpu_busy_kernel *kernel = &busy->kernels[member];
    const uint64_t length = end - begin, known = kernel->shortest_ns, forgotten = known + known / FORGETS;
    const uint64_t since = begin > kernel->last_end ? begin - kernel->last_end : 0;
    const bool follows = since < NEXT_NS && begin + NEXT_NS > kernel->last_end;
    const uint64_t before = kernel->without_slices, now = others && follows ? without_slices(busy, since, length) : 0;
    kernel->shortest_ns = !known || length < forgotten ? length : forgotten;
    if (before && now && (now > before ? now - before : before - now) <= before / 64)
        kernel->shortest_ns = smaller(kernel->shortest_ns, now);
    kernel->without_slices = now;
    kernel->last_end = end;
}

uint64_t vgpu_busy_add(struct vgpu_busy *busy, unsigned member, uint64_t begin, uint64_t end,
                       const struct vgpu_meters *meters, double refunds[VGPU_ARBITER_MEMBERS]) {
    struct addition add;
    add.member = member;
    add.refunds = refunds;
    add.shorts = 0;
    add.members = 0;
    add.part = 0;
    const uint64_t bit = UINT64_C(1) << member;
    uint64_t fresh = 0;
    if (begin >= end)
        return 0;
    find_shorts(&add, begin, end, meters);
    note_length(busy, member, begin, end, add.shorts == 1);
    const uint64_t shortest = busy->kernels[member].shortest_ns, some = busy->slice_ns / 8;
    /* if the shortest is longer than a slice, all launches may have waited */
    add.least = shortest <= busy->slice_ns + some ? (double)shortest / (double)(end - begin) : 0;
    /* a launch of a slice or more may end anywhere in a slice */
    add.last_ns = shortest + some < busy->slice_ns ? shortest : 0;
    make_room(busy);
    uint32_t place = busy->count;
    while (place > 0 && busy->spans[place - 1].end > begin)
        place--;
    for (uint64_t at = begin; at < end; place++) {
        if (place == busy->count || busy->spans[place].begin > at) {
            const uint64_t until = place == busy->count ? end : smaller(end, busy->spans[place].begin);
            insert(busy, place, (struct vgpu_busy_span){.begin = at, .end = until});
        } else if (busy->spans[place].begin < at) {
            cut(busy, place++, at);
        }
        if (busy->spans[place].end > end)
            cut(busy, place, end);
        if (!(busy->spans[place].members & bit))
            fresh += busy->spans[place].end - at;
        join(&add, busy, &busy->spans[place], end);
        at = busy->spans[place].end;
    }
    uint32_t first = place;
    while (first > 0 && busy->spans[first - 1].end >= begin)
        first--;
    tidy(busy, first, place);
    return fresh;
}

void vgpu_busy_forget(struct vgpu_busy *busy, unsigned member) {
    uint32_t kept = 0;
    busy->kernels[member] = (struct vgpu_busy_kernel){0};
    for (uint32_t i = 0; i < busy->count; i++) {
        busy->spans[i].members &= ~(UINT64_C(1) << member);
        if (busy->spans[i].ender == member)
            busy->spans[i].ended = 0;
        if (busy->spans[i].members)
            busy->spans[kept++] = busy->spans[i];
    }
    busy->count = kept;
}
