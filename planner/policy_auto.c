/* SPDX-License-Identifier: Apache-2.0 */
/*
 * auto: of all splits of a layer's misses (f of them fetched, the rest on the CPU) the one that ends first.
 *
 *   link   = queue + fixed + f * bytes / rate                    rate: alone, or with the CPU at work (0 < f < misses)
 *   fetch  = max(link, residents computed) + f * bytes / device rate + kernels
 *   cpu    = queue + fixed + sum of rows factors * bytes / rate + flag    rows factor: 1 up to 2 rows, then rows / 2
 *   end    = max(fetch, cpu)
 *   score  = end - f * (what a fetched expert saves later)
 *
 * queue of the link: copies made ahead that are still on their way (planner/ahead.h). kernels: what the device takes over
 * fetched experts besides reading them, measured. flag: from the CPU's last tile to the device.
 *
 * Which ones are fetched: those with most work for the CPU (rows above 2), then the most recently used.
 *
 * Later savings. p = share of uses whose use before lies within the residence time (age of the slots that are
 * evicted), q = the same for an expert unused for that long, within as long again. A use under LRU is
 * followed by p / (1 - p) hits; taking the victim's place forgoes q / (1 - p). A hit saves what a miss of
 * this layer costs on average. Source: renewal argument over LRU stacks, see planner/routing.h.
 *
 * Beliefs are corrected. A lane's time is a * fixed + b * work, with one pair (a, b) for the lane alone and
 * one for both lanes at work; each measured layer moves the pair along its own inputs (normalised least mean
 * squares: Nagumo and Noda, 1967), a measured time counts as at most 4 predicted ones. Layers differ: their
 * banks may lie in memory of other speed (a second socket, which a virtual machine does not show), so each has
 * a factor of its own beside the pair. What is never chosen is never measured: of three ways (all fetched, all
 * CPU, both) one that was not used for a while is probed when the loss it predicts is below PROBE_SHARE of the
 * time since, each time in another layer. Deterministic: neither of these.
 *
 * Between the end of a layer's copies and the next layer's first one the link idles while the device
 * computes. Into that time go experts that the CPU has computed just now, as many as fitted into the gap
 * behind this layer of late, so that their next use is a hit. Not when a copy has no time in the gap, and not
 * when what is used now is hardly more likely to be used again (p) than what it would push out (q): see
 * KEEP_MARGIN. And not when steps were longer with it (planner/trial.h): on an H200 whose host stood behind a
 * busy link they were, by 16%.
 *
 * Answers depend on `in` and on the state alone; what decide_layer notes becomes part of the decisions at
 * step_end.
 */
#include "planner/place.h"
#include "planner/policies.h"
#include "planner/trial.h"

#include <string.h>

/* Beliefs where nothing was measured: a desktop with 8 cores and PCIe 4.0 x16. They only have to be of the
 * right order, the corrections do the rest. */
#define LINK_RATE 22e9
#define LINK_BOTH_SHARE 0.9 /* of the rate alone; H200 host: 50.6 -> 44.5 .. 50.1 GB/s */
#define CPU_BOTH_SHARE 0.9  /* the same host: 100 -> 92.7 GB/s */
static const double cpu_rates[FT_FORMAT_COUNT] = {[FT_FORMAT_NVFP4] = 20e9,
                                                  [FT_FORMAT_MXFP4] = 20e9,
                                                  [FT_FORMAT_FP8_BLOCK] = 25e9,
                                                  [FT_FORMAT_BF16] = 30e9};
#define CPU_RATE 20e9 /* other formats */

/* Fixed costs, H200 with driver 580, minimum of 20 runs: issue of a copy 2.6 us, flag seen 6 us. */
#define COPY_ISSUE_NS 3000.0
#define FLAG_NS 6000.0
#define CPU_DISPATCH_NS 15000.0 /* wake, first tile, last tile, flag back */

#define KERNELS_NS 12000.0     /* up and down over fetched experts */
#define KERNELS_WEIGHT 0.03125 /* of a layer */

#define ROWS_FREE 2u     /* rows that cost the CPU no more than one: it waits for the bytes */
#define HITS_MAX 16.0    /* of one fetch: beyond it the estimate is noise */
#define VALUE_WEIGHT 0.5 /* of later savings: they are a guess, the end of the layer is not */
#define CLAMP_SLOW 4.0   /* one slow layer may be an accident */
#define CLAMP_FAST 64.0  /* nothing makes a lane too fast by accident */
#define WEIGHT_MIN 0.1   /* of a measured layer, once the lane is known */
#define WEIGHT_DECAY 0.7
#define WEIGHT_DECAY_FAR 0.9
#define WEIGHT_IDLE 0.5 /* of a layer measured after IDLE_LAYERS that were not */
#define IDLE_LAYERS 64u
#define LAYER_WEIGHT 0.125 /* of a measured layer in its own factor */
#define PROBE_STRIDE 0.618 /* of the layers, from one probe to the next: the golden section meets all alike */
#define PROBE_SHARE_NEW 0.02  /* while the way was never tried */
#define PROBE_SHARE 0.003     /* of the time: three ways stay below 1% together */
#define UPPER_BOUND_NS 4000.0 /* a wait for the link that short: the copies were there before */
#define REUSE_WEIGHT 0.0625   /* of a step in the reuse estimate */
#define FACTOR_MIN 0.01
#define AHEAD_SKIP 4u     /* first steps, which make what later ones find */
#define KEEP_MARGIN 0.05  /* p - q from which on idle link time is used */
#define KEEP_HITS_MIN 0.1 /* p: fewer than one of ten copies would be used */

enum lane { LINK, CPU, LANES };
enum way { ALL_CPU, ALL_FETCH, BOTH, WAYS };

/* How far the truth is from the belief: time = fixed * base.fixed + work * base.work. */
struct belief {
    double fixed, work, weight;
    uint32_t idle; /* layers with misses since it was measured */
    bool known;
};

struct cost {
    double fixed, work; /* ns, as believed before corrections */
};

/* A layer of the running step. */
struct seen {
    bool decided, both;
    struct cost cost[LANES];
    double busy_ns;               /* the link's queue when it decided */
    double begin, end[LANES];     /* begin 0: not heard of */
    double group_begin, group_ns; /* the device's last group of experts */
    bool fetched_in_time;         /* end[LINK] is an upper bound */
};

struct reuse {
    bool known, evicting;
    double near, middle; /* shares, see p and q above */
    double residence;    /* steps */
};

struct auto_state {
    struct ft_place_state place;
    double rate[LANES][2][FT_FORMAT_COUNT]; /* bytes per s: [alone, both] */
    double fixed[LANES];
    double device_ns_per_byte;
    double kernels_ns, flag_ns;
    struct belief belief[LANES][2];
    double since_ns[WAYS]; /* predicted time of layers since the way was last chosen */
    uint32_t since_layers[WAYS];
    bool tried[WAYS];
    uint32_t probe_layer; /* no probe in front of this one */
    struct reuse reuse;
    double link_busy_ns; /* of the layer at hand */
    /* of the running step */
    bool chosen[WAYS];
    double layers_ns;
    uint32_t miss_layers;
    bool probed;
    double uses, near, middle, ages, evictions;
    double device_bytes, device_ns;
    uint32_t layer_count;
    struct seen *layers;   /* [layer_count] */
    double *factor[LANES]; /* [layer_count]: time of this layer over that of all of them; mean 1 */
    struct ft_trial keeps; /* copies into idle time of the link, of what the CPU has computed */
    struct ft_ahead ahead; /* router look-ahead; also knows the link's idle time */
};

/* ---- begin ---- */

static uint64_t state_bytes(const struct ft_policy_params *params)
{
    return sizeof(struct auto_state) +
           ft_ahead_layers(params) *
               (sizeof(struct seen) + sizeof(struct ft_ahead_layer) + LANES * sizeof(double)) +
           ft_place_state_bytes(params);
}

static double known_or(double measured, double standard)
{
    return measured > 0 ? measured : standard;
}

static void init_rates(struct auto_state *s, const struct ft_machine *m)
{
    double link = known_or(m->link_bytes_per_s, known_or(m->link_overlap_bytes_per_s, LINK_RATE));
    for (uint32_t f = 0; f < FT_FORMAT_COUNT; f++) {
        double cpu = known_or(m->cpu_expert_bytes_per_s[f], known_or(cpu_rates[f], CPU_RATE));
        bool measured = m->cpu_expert_bytes_per_s[f] > 0 && m->cpu_overlap_bytes_per_s > 0;
        s->rate[LINK][0][f] = link;
        s->rate[LINK][1][f] = FT_MIN(link, known_or(m->link_overlap_bytes_per_s, LINK_BOTH_SHARE * link));
        s->rate[CPU][0][f] = cpu;
        s->rate[CPU][1][f] = measured ? FT_MIN(cpu, m->cpu_overlap_bytes_per_s) : CPU_BOTH_SHARE * cpu;
    }
    s->flag_ns = known_or(m->rendezvous_ns, FLAG_NS);
    s->kernels_ns = KERNELS_NS;
    s->fixed[LINK] = COPY_ISSUE_NS + s->flag_ns;
    s->fixed[CPU] = m->wake_ns > 0 || m->rendezvous_ns > 0 ? m->wake_ns + 2 * m->job_ns + m->rendezvous_ns
                                                           : CPU_DISPATCH_NS;
    s->device_ns_per_byte = m->device_read_bytes_per_s > 0 ? 1e9 / m->device_read_bytes_per_s : 0;
}

static int init(void *state, const struct ft_policy_params *params, struct ft_error *err)
{
    static const struct ft_machine unknown;
    struct auto_state *s = state;
    int status = ft_place_init(&s->place, params, err);
    s->layer_count = ft_ahead_layers(params);
    s->layers = (struct seen *)(s + 1);
    struct ft_ahead_layer *ahead = (struct ft_ahead_layer *)(s->layers + s->layer_count);
    ft_ahead_init(&s->ahead, params, ahead);
    double *end = (double *)(ahead + s->layer_count);
    for (uint32_t lane = 0; lane < LANES; lane++, end += s->layer_count) {
        s->factor[lane] = end;
        for (uint32_t i = 0; i < s->layer_count; i++)
            end[i] = 1;
    }
    s->place.misses.keys = (uint64_t *)end; /* not behind place: it is embedded */
    s->place.victims.keys = s->place.misses.keys + s->place.capacity;
    init_rates(s, params->machine ? params->machine : &unknown);
    ft_trial_init(&s->keeps, AHEAD_SKIP);
    for (uint32_t lane = 0; lane < LANES; lane++)
        for (uint32_t both = 0; both < 2; both++)
            s->belief[lane][both] = (struct belief){.fixed = 1, .work = 1, .weight = 1};
    return status;
}

/* ---- the cost of a split ---- */

static double rows_factor(uint32_t rows)
{
    return rows <= ROWS_FREE ? 1 : (double)rows / ROWS_FREE;
}

/* What was never measured follows the lane's other pair. */
static const struct belief *belief_of(const struct auto_state *s, enum lane lane, bool both)
{
    const struct belief *own = &s->belief[lane][both], *other = &s->belief[lane][!both];
    return own->known || !other->known ? own : other;
}

static double factor_of(const struct auto_state *s, enum lane lane, uint32_t layer)
{
    return layer < s->layer_count ? s->factor[lane][layer] : 1;
}

static double time_of(const struct auto_state *s, enum lane lane, bool both, uint32_t layer,
                      const struct cost *cost)
{
    const struct belief *b = belief_of(s, lane, both);
    return factor_of(s, lane, layer) * (b->fixed * cost->fixed + b->work * cost->work);
}

static struct cost cost_of(const struct auto_state *s, enum lane lane, bool both,
                           const struct ft_layer_in *in, double experts)
{
    if (!(experts > 0))
        return (struct cost){0};
    double each = in->expert_bytes * 1e9 / s->rate[lane][both][in->format];
    if (lane == LINK)
        each = FT_MAX(each, COPY_ISSUE_NS);
    return (struct cost){.fixed = s->fixed[lane], .work = experts * each};
}

struct split {
    uint32_t fetched;
    bool both;
    struct cost cost[LANES];
    double fetch_ns, cpu_ns, end_ns, score;
};

/* Of a layer's own copies, none of them too: the queue of the look-ahead knows better where it has been watched. */
static double link_ns_of(const struct auto_state *s, const struct ft_layer_in *in, const struct split *x)
{
    double queue_ns = in->prefill ? 0 : ft_ahead_link_ns(&s->ahead, in, x->fetched);
    if (queue_ns > 0)
        return queue_ns;
    return x->fetched ? time_of(s, LINK, x->both, in->layer, &x->cost[LINK]) : s->flag_ns;
}

/* cpu_experts: sum of the rows factors of those left. resident_ns: until the device has computed what it holds. */
static struct split split_of(const struct auto_state *s, const struct ft_layer_in *in, uint32_t fetched,
                             double cpu_experts, double resident_ns)
{
    struct split x = {.fetched = fetched, .both = fetched && cpu_experts > 0};
    x.cost[LINK] = cost_of(s, LINK, x.both, in, fetched);
    x.cost[CPU] = cost_of(s, CPU, x.both, in, cpu_experts);
    double link_ns = s->link_busy_ns + link_ns_of(s, in, &x);
    if (fetched || s->place.ahead_count)
        x.fetch_ns = FT_MAX(link_ns, resident_ns) + s->kernels_ns +
                     (fetched + s->place.ahead_count) * (double)in->expert_bytes * s->device_ns_per_byte;
    if (cpu_experts > 0)
        x.cpu_ns = in->cpu_busy_ns + time_of(s, CPU, x.both, in->layer, &x.cost[CPU]) + s->flag_ns;
    x.end_ns = FT_MAX(FT_MAX(x.fetch_ns, x.cpu_ns), resident_ns);
    return x;
}

/* Further hits that a fetch brings, less those that the victim would have had. */
static double net_hits(const struct auto_state *s, const struct ft_layer_in *in)
{
    const struct reuse *r = &s->reuse;
    if (!r->known || in->prefill)
        return 0;
    double p = FT_MIN(r->near, 0.97), q = r->evicting ? r->middle : 0;
    return FT_MAX(0.0, FT_MIN((p - q) / (1 - p), HITS_MAX));
}

static enum way way_of(const struct split *x)
{
    return x->both ? BOTH : x->fetched ? ALL_FETCH : ALL_CPU;
}

/* ---- the choice ---- */

/* Sorts the misses anew: what was copied ahead, then most work for the CPU first, then the most recently used. Returns
 * the sum of rows factors of those that were not copied. */
static double sort_misses(struct auto_state *s, const struct ft_layer_in *in)
{
    struct ft_pick *misses = &s->place.misses;
    double sum = 0;
    misses->count = 0;
    for (uint32_t i = 0; i < in->active_count; i++) {
        if (in->slot[i] != FT_NONE)
            continue;
        uint32_t rows = FT_MIN(FT_MAX(in->rows[i], ROWS_FREE), 0xffffu);
        uint32_t age = in->last_used[i] ? FT_MIN(in->step - in->last_used[i], 0xfffeu) : 0xffffu;
        bool ahead = ft_layer_is_ahead(in, i);
        ft_pick_push(misses, ahead ? 0 : (0xffffu - rows) << 16 | age, i);
        sum += ahead ? 0 : rows_factor(in->rows[i]);
    }
    ft_pick_sort(misses);
    return sum;
}

static double resident_ns(const struct auto_state *s, const struct ft_layer_in *in, uint32_t misses)
{
    return in->device_busy_ns +
           (in->active_count - misses) * (double)in->expert_bytes * s->device_ns_per_byte;
}

/* The best split of each way, when every fetched expert saves `value` later; returns the soonest end of all. */
static double walk_splits(const struct auto_state *s, const struct ft_layer_in *in, uint32_t misses,
                          double cpu_experts, double value, struct split best[WAYS], bool exists[WAYS])
{
    double resident = resident_ns(s, in, misses), left = cpu_experts, soonest = 0;
    uint32_t most = in->prefill ? misses : FT_MIN(misses, in->slots.end - in->slots.begin);
    uint32_t ahead = s->place.ahead_count; /* these are fetched besides */
    memset(exists, 0, WAYS * sizeof *exists);
    for (uint32_t f = 0; f <= most; f++) {
        if (f)
            left -= rows_factor(in->rows[ft_pick_index(&s->place.misses, ahead + f - 1)]);
        struct split x = split_of(s, in, f, f == misses ? 0 : FT_MAX(left, 1.0), resident);
        enum way way = way_of(&x);
        x.score = x.end_ns - f * value;
        if (!exists[way] || x.score <= best[way].score) /* a tie: the fetched one may be hit again */
            best[way] = x;
        exists[way] = true;
        soonest = f == 0 ? x.end_ns : FT_MIN(soonest, x.end_ns);
    }
    return soonest;
}

/* A way that was not used for long, when trying it is cheap beside the time since. */
static bool wants_probe(const struct auto_state *s, enum way way, uint32_t layer, double loss_ns)
{
    if (layer < s->probe_layer)
        return false;
    double share = s->tried[way] ? PROBE_SHARE : PROBE_SHARE_NEW;
    return s->since_layers[way] >= IDLE_LAYERS && !s->chosen[way] && loss_ns <= share * s->since_ns[way];
}

static struct split choose(const struct auto_state *s, const struct ft_layer_in *in, uint32_t misses,
                           double cpu_experts, enum ft_reason *reason)
{
    struct split best[WAYS] = {0};
    bool exists[WAYS];
    uint32_t chosen = ALL_CPU;
    double soonest = walk_splits(s, in, misses, cpu_experts, 0, best, exists), hits = net_hits(s, in);
    if (hits > 0)
        walk_splits(s, in, misses, cpu_experts, VALUE_WEIGHT * hits * soonest / misses, best, exists);
    for (uint32_t way = 1; way < WAYS; way++)
        if (exists[way] &&
            (best[way].score < best[chosen].score ||
             (best[way].score <= best[chosen].score && best[way].fetched > best[chosen].fetched)))
            chosen = way;
    *reason = FT_REASON_EARLIEST;
    for (uint32_t way = 0; way < WAYS && !in->prefill && !s->place.params.deterministic; way++)
        if (way != chosen && exists[way] &&
            wants_probe(s, way, in->layer, best[way].end_ns - best[chosen].end_ns)) {
            *reason = FT_REASON_PROBE;
            return best[way];
        }
    return best[chosen];
}

/* How many experts of the CPU go into the link's idle time behind this layer. */
static uint32_t count_kept(const struct auto_state *s, const struct ft_layer_in *in)
{
    const struct reuse *r = &s->reuse;
    double q = r->evicting ? r->middle : 0;
    if (!r->known || r->near < KEEP_HITS_MIN || r->near - q < KEEP_MARGIN || in->layer >= s->layer_count)
        return 0;
    /* The CPU may still be at work in the gap. */
    double each = in->expert_bytes * 1e9 / s->rate[LINK][1][in->format] * belief_of(s, LINK, true)->work;
    return (uint32_t)FT_MIN(s->ahead.layers[in->layer].gap / FT_MAX(each, COPY_ISSUE_NS), 1e6);
}

/* ---- what the step notes ---- */

static void note_ages(struct auto_state *s, const struct ft_layer_in *in)
{
    double residence = s->reuse.evicting ? s->reuse.residence : UINT32_MAX;
    for (uint32_t i = 0; i < in->active_count; i++) {
        double age = in->last_used[i] ? (double)in->step - in->last_used[i] : -1;
        s->uses++;
        s->near += age >= 0 && age <= residence;
        s->middle += age > residence && age <= 2 * residence;
    }
}

static void note_victims(struct auto_state *s, const struct ft_layer_in *in, const struct ft_layer_out *out)
{
    for (uint32_t i = 0; i < in->active_count; i++) {
        uint32_t slot = out->place[i] == FT_PLACE_FETCH ? out->victim[i] : FT_NONE;
        if (slot == FT_NONE || in->slots.expert[slot] == FT_NONE)
            continue;
        s->ages += FT_MAX(in->step - in->slots.last_used[slot], 1u);
        s->evictions++;
    }
}

/* What came of it (slots may have been too few) and what is believed about it. */
static void note_layer(struct auto_state *s, const struct ft_layer_in *in, struct ft_layer_out *out,
                       double resident)
{
    uint32_t fetched = 0;
    double cpu_experts = 0;
    for (uint32_t i = 0; i < in->active_count; i++) {
        fetched += out->place[i] == FT_PLACE_FETCH && !ft_layer_is_ahead(in, i);
        cpu_experts += out->place[i] == FT_PLACE_CPU ? rows_factor(in->rows[i]) : 0;
    }
    struct split x = split_of(s, in, fetched, cpu_experts, resident);
    for (uint32_t i = 0; i < in->active_count; i++)
        out->predicted_ns[i] = (float)(out->place[i] == FT_PLACE_FETCH ? x.fetch_ns
                                       : out->place[i] == FT_PLACE_CPU ? x.cpu_ns
                                                                       : resident);
    if (!fetched && !(cpu_experts > 0))
        return;
    s->chosen[way_of(&x)] = true;
    s->layers_ns += x.end_ns;
    s->miss_layers++;
    if (in->layer < s->layer_count)
        s->layers[in->layer] = (struct seen){.decided = true,
                                             .both = x.both,
                                             .busy_ns = s->link_busy_ns,
                                             .cost = {[LINK] = x.cost[LINK], [CPU] = x.cost[CPU]}};
}

static void decide_layer(void *state, const struct ft_layer_in *in, struct ft_layer_out *out)
{
    struct auto_state *s = state;
    enum ft_reason reason = FT_REASON_EARLIEST;
    uint32_t misses = ft_place_begin(&s->place, in, out, reason);
    if (!in->has_device)
        return;
    uint32_t ahead = s->place.ahead_count, rest = misses - ahead;
    s->link_busy_ns = in->link_busy_ns + ft_ahead_link_busy(&s->ahead, in);
    if (misses) {
        double cpu_experts = sort_misses(s, in);
        struct split x = {0};
        if (rest)
            x = choose(s, in, rest, cpu_experts, &reason);
        for (uint32_t i = 0; reason == FT_REASON_PROBE && i < in->active_count; i++)
            if (out->place[i] == FT_PLACE_CPU)
                out->reason[i] = (uint8_t)reason;
        s->probed |= reason == FT_REASON_PROBE;
        ft_place_fetch(&s->place, in, out, ahead + x.fetched, reason, false);
        if (!s->place.params.no_prefetch && s->keeps.on)
            ft_place_keep(&s->place, in, out, ahead + x.fetched, count_kept(s, in));
    }
    if (!in->prefill) {
        note_ages(s, in);
        note_victims(s, in, out);
    }
    note_layer(s, in, out, resident_ns(s, in, rest));
    ft_ahead_decided(&s->ahead, in, out);
}

/* ---- what happened ---- */

static void observe(void *state, const struct ft_observation *o)
{
    struct auto_state *s = state;
    double end = o->start_ns + o->duration_ns;
    ft_ahead_observe(&s->ahead, o);
    if (o->layer >= s->layer_count)
        return;
    struct seen *seen = &s->layers[o->layer];
    if (o->op == FT_OP_POLICY) {
        seen->begin = end;
    } else if (o->wait == FT_WAIT_LINK) { /* copies of a GPU show their end only here */
        seen->fetched_in_time = o->duration_ns < UPPER_BOUND_NS;
        seen->end[LINK] = FT_MAX(seen->end[LINK], end);
    } else if (o->op == FT_OP_FETCH) {
        seen->end[LINK] = FT_MAX(seen->end[LINK], end);
    } else if (o->lane == FT_LANE_CPU && (o->op == FT_OP_EXPERT_UP || o->op == FT_OP_EXPERT_DOWN)) {
        seen->end[CPU] = FT_MAX(seen->end[CPU], end);
    } else if (o->op == FT_OP_EXPERT_DEVICE && o->bytes && o->duration_ns > 0) {
        s->device_bytes += (double)o->bytes;
        s->device_ns += o->duration_ns;
    } else if (o->op == FT_OP_EXPERT_DEVICE && o->start_ns > seen->group_begin) {
        seen->group_begin = o->start_ns;
        seen->group_ns = o->duration_ns;
    }
}

/* One measured layer of a lane: the pair moves so that its prediction comes `weight` of the way, and so does
 * the layer's factor, slowly. */
static void learn(struct auto_state *s, enum lane lane, bool both, uint32_t layer, const struct cost *cost,
                  double measured, bool at_most)
{
    struct belief *b = &s->belief[lane][both];
    double *factor = &s->factor[lane][layer], predicted = time_of(s, lane, both, layer, cost) / *factor,
           norm = cost->fixed * cost->fixed + cost->work * cost->work;
    if (!(measured > 0) || !(norm > 0) || (at_most && measured >= predicted * *factor))
        return;
    double alone = measured / predicted; /* what the factor would be if the pair were right */
    measured /= *factor;
    *factor += LAYER_WEIGHT * (FT_MIN(FT_MAX(alone, 1 / CLAMP_SLOW), CLAMP_SLOW) - *factor);
    if (!b->known) {
        const struct belief *from = belief_of(s, lane, both);
        b->fixed = from->fixed;
        b->work = from->work;
    }
    b->weight = b->idle >= IDLE_LAYERS ? FT_MAX(b->weight, WEIGHT_IDLE) : b->weight;
    double clamped = FT_MIN(FT_MAX(measured, predicted / CLAMP_FAST), predicted * CLAMP_SLOW);
    double move = b->weight * (clamped - predicted) / norm;
    b->fixed = FT_MAX(b->fixed + move * cost->fixed, FACTOR_MIN);
    b->work = FT_MAX(b->work + move * cost->work, FACTOR_MIN);
    bool agrees =
        measured > predicted / CLAMP_SLOW && measured < predicted * CLAMP_SLOW; /* else: still on its way */
    b->weight = FT_MAX(WEIGHT_MIN, (agrees ? WEIGHT_DECAY : WEIGHT_DECAY_FAR) * b->weight);
    b->known = true;
    b->idle = 0;
}

/* What all layers have in common belongs to the pairs. */
static void keep_mean(struct auto_state *s, enum lane lane)
{
    double sum = 0;
    for (uint32_t i = 0; i < s->layer_count; i++)
        sum += s->factor[lane][i];
    double mean = sum / s->layer_count;
    for (uint32_t i = 0; i < s->layer_count; i++)
        s->factor[lane][i] /= mean;
    for (uint32_t both = 0; both < 2; both++) {
        s->belief[lane][both].fixed *= mean;
        s->belief[lane][both].work *= mean;
    }
}

/* Copies in front of a layer's own blur what these took; a look through the blur is better than none for long. */
static bool tells_of_link(const struct auto_state *s, const struct seen *seen)
{
    const struct belief *b = &s->belief[LINK][seen->both];
    return !(seen->busy_ns > 0) || !b->known || b->idle >= IDLE_LAYERS;
}

static void learn_layers(struct auto_state *s)
{
    for (uint32_t i = 0; i < s->layer_count; i++) {
        struct seen *seen = &s->layers[i];
        for (uint32_t lane = 0; lane < LANES && seen->decided && seen->begin > 0; lane++)
            if (seen->end[lane] > seen->begin && (lane == CPU || tells_of_link(s, seen)))
                learn(s, (enum lane)lane, seen->both, i, &seen->cost[lane],
                      seen->end[lane] - seen->begin - (lane == LINK ? seen->busy_ns : 0),
                      lane == LINK && seen->fetched_in_time);
        if (seen->end[LINK] > 0 && seen->group_begin >= seen->end[LINK])
            s->kernels_ns += KERNELS_WEIGHT * (seen->group_ns - s->kernels_ns);
    }
    for (uint32_t lane = 0; lane < LANES; lane++)
        keep_mean(s, (enum lane)lane);
    if (s->device_bytes > 0)
        s->device_ns_per_byte = s->device_ns / s->device_bytes;
}

static void ewma(double *value, double now, bool known)
{
    *value += (known ? REUSE_WEIGHT : 1) * (now - *value);
}

static void learn_reuse(struct auto_state *s)
{
    struct reuse *r = &s->reuse;
    if (!(s->uses > 0))
        return;
    ewma(&r->near, s->near / s->uses, r->known);
    if (s->uses > s->near)
        ewma(&r->middle, s->middle / (s->uses - s->near), r->known);
    r->known = true;
    if (s->evictions > 0) {
        ewma(&r->residence, s->ages / s->evictions, r->evicting);
        r->evicting = true;
    }
}

static void step_end(void *state, const struct ft_step_summary *summary)
{
    struct auto_state *s = state;
    bool learns = !s->place.params.deterministic && !summary->prefill;
    if (!summary->prefill)
        learn_reuse(s);
    if (learns) {
        learn_layers(s);
        ft_trial_step(&s->keeps, summary->rows, summary->duration_ns);
    }
    ft_ahead_step_end(&s->ahead, summary);
    for (uint32_t lane = 0; lane < LANES && learns; lane++)
        for (uint32_t both = 0; both < 2; both++)
            s->belief[lane][both].idle += s->miss_layers;
    for (uint32_t way = 0; way < WAYS && learns; way++) {
        s->tried[way] |= s->chosen[way];
        s->since_ns[way] = s->chosen[way] ? 0 : s->since_ns[way] + s->layers_ns;
        s->since_layers[way] = s->chosen[way] ? 0 : s->since_layers[way] + s->miss_layers;
    }
    /* A probe that waited for a layer behind the last one that misses something does not wait another step. */
    uint32_t stride = FT_MAX(1u, (uint32_t)(PROBE_STRIDE * s->layer_count));
    s->probe_layer = s->probed ? (s->probe_layer + stride) % s->layer_count : s->probe_layer;
    s->probed = false;
    memset(s->chosen, 0, sizeof s->chosen);
    memset(s->layers, 0, s->layer_count * sizeof *s->layers);
    s->layers_ns = s->uses = s->near = s->middle = s->ages = s->evictions = s->device_bytes = s->device_ns =
        0;
    s->miss_layers = 0;
}

static bool looks_ahead(const void *state)
{
    return ft_ahead_looks(&((const struct auto_state *)state)->ahead);
}

static uint32_t look_ahead(void *state, const struct ft_foreseen *foreseen, uint32_t *chosen)
{
    return ft_ahead_choose(&((struct auto_state *)state)->ahead, foreseen, chosen);
}

const struct ft_policy ft_policy_auto = {.abi = FT_POLICY_ABI,
                                         .name = "auto",
                                         .state_bytes = state_bytes,
                                         .init = init,
                                         .decide_layer = decide_layer,
                                         .observe = observe,
                                         .step_end = step_end,
                                         .prepare = ft_place_prepare,
                                         .looks_ahead = looks_ahead,
                                         .look_ahead = look_ahead};
