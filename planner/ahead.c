/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/ahead.h"

#define LINK_RATE 12e9   /* bytes per s, where nothing was measured */
#define COPIES_MIN 3u    /* of a layer that tells how long one takes: a single one is half waiting */
#define WAITED_NS 4000.0 /* of the device, from which on the end of a wait is the end of the copies */
#define GAP_WEIGHT 0.125 /* of a step in the gap and the rest behind a layer */
#define LATE_NS 25000.0  /* issue of the copies, flag behind them, on an H200 */
/* What a layer teaches about the queue is a step towards the median, however far off it was. */
#define LATE_STEP_NS 100.0
#define LATE_MAX_NS 100000.0
#define OWN_STEP 0.001
#define OWN_MOST 4.0        /* own copies that teach most about one */
#define STRETCH_MORE 0.006  /* copies ahead were late */
#define STRETCH_LESS 0.0005 /* they were there: one layer of twelve may be late */
#define STRETCH_MAX 2.0
#define TELLING 2u /* own copies, behind more of which lateness of those in front is lost in the noise */
#define FACTOR_MIN 0.5
#define FACTOR_MAX 3.0
#define QUEUE_KNOWN 64u     /* layers */
#define EACH_WEIGHT 0.03125 /* of a layer */
#define HITS_WEIGHT 0.03125 /* of a layer */
#define HITS_FIRST 0.5
#define TRIAL_SKIP 6u /* first steps: gaps are learned, caches filled */

uint32_t ft_ahead_layers(const struct ft_policy_params *params)
{
    return params->model && params->model->layer_count ? params->model->layer_count : FT_LAYERS_MAX;
}

void ft_ahead_init(struct ft_ahead *ahead, const struct ft_policy_params *params,
                   struct ft_ahead_layer *layers)
{
    double link = params->machine ? params->machine->link_bytes_per_s : 0;
    double both = params->machine ? params->machine->link_overlap_bytes_per_s : 0;
    *ahead = (struct ft_ahead){.never = params->no_look_ahead,
                               .always = params->always_looks,
                               .frozen = params->deterministic,
                               .measured = link > 0,
                               .ns_per_byte = 1e9 / (both > 0   ? FT_MIN(both, link)
                                                     : link > 0 ? link
                                                                : LINK_RATE),
                               .hits = HITS_FIRST,
                               .own = 1,
                               .stretch = 1,
                               .late_ns = LATE_NS,
                               .layer_count = ft_ahead_layers(params),
                               .layers = layers};
    ft_trial_init(&ahead->trial, TRIAL_SKIP);
}

/* How much pays is measured, and what has been copied decides what is fetched: not where nothing may depend on time. */
bool ft_ahead_looks(const struct ft_ahead *ahead)
{
    return !ahead->never && !ahead->frozen && (ahead->always || ahead->trial.on);
}

double ft_ahead_link_busy(const struct ft_ahead *ahead, const struct ft_layer_in *in)
{
    /* The device has waited for everything but what was ordered behind the last layer's own copies. */
    double busy = in->now_ns > 0 ? FT_MIN(ahead->free_ns - in->now_ns, ahead->behind_ns) : 0;
    return FT_MAX(busy, 0.0);
}

double ft_ahead_link_ns(const struct ft_ahead *ahead, const struct ft_layer_in *in, uint32_t fetched)
{
    if (!(in->now_ns > 0) || ahead->queue_known < QUEUE_KNOWN)
        return 0;
    return ahead->late_ns + (double)fetched * in->expert_bytes * ahead->ns_per_byte * ahead->own;
}

/* The layer's own copies join the queue, and behind them those that it keeps for later. */
static void queue_own(struct ft_ahead *ahead, struct ft_ahead_layer *layer, const struct ft_layer_in *in,
                      const struct ft_layer_out *out, uint32_t used)
{
    double each = in->expert_bytes * ahead->ns_per_byte,
           cpu_end = in->now_ns + layer->computed * ahead->cpu_ns;
    layer->busy = ft_ahead_link_busy(ahead, in);
    layer->each = each;
    ahead->free_ns = in->now_ns + layer->busy + layer->fetched * each * ahead->own;
    layer->link_end = used || layer->fetched ? ahead->free_ns : 0;
    ahead->layer_end_ns = FT_MAX(cpu_end, layer->link_end > 0 ? layer->link_end + ahead->late_ns : 0);
    ahead->behind_ns = out->prefetch_count * each * ahead->own;
    ahead->free_ns += ahead->behind_ns;
}

void ft_ahead_decided(struct ft_ahead *ahead, const struct ft_layer_in *in, const struct ft_layer_out *out)
{
    uint32_t used = 0, fetched = 0, computed = 0;
    if (in->layer >= ahead->layer_count || in->prefill)
        return;
    struct ft_ahead_layer *layer = &ahead->layers[in->layer];
    for (uint32_t i = 0; i < in->active_count; i++) {
        used += ft_layer_is_ahead(in, i);
        fetched += out->place[i] == FT_PLACE_FETCH && !ft_layer_is_ahead(in, i);
        computed += out->place[i] == FT_PLACE_CPU;
    }
    layer->fetched = fetched;
    layer->computed = computed;
    layer->bytes = (double)fetched * in->expert_bytes;
    if (layer->ordered) {
        ahead->hits += HITS_WEIGHT * ((double)used / layer->ordered - ahead->hits);
        if (ahead->hits < FT_AHEAD_HITS_MIN && !ahead->always && !ahead->frozen) {
            ft_trial_reject(&ahead->trial);
            ahead->hits = HITS_FIRST; /* of the next attempt */
        }
    }
    layer->front = layer->ordered;
    layer->ordered = 0;
    ahead->layer_end_ns = 0;
    if (in->now_ns > 0)
        queue_own(ahead, layer, in, out, used);
}

/* Copies that end before the next layer with experts decides. */
static double copies_that_fit(const struct ft_ahead *ahead, const struct ft_foreseen *foreseen, double each)
{
    const struct ft_ahead_layer *from = &ahead->layers[foreseen->from];
    double gap = from->gap;
    if (foreseen->now_ns > 0 && ahead->layer_end_ns > 0 && from->rest > 0)
        gap = ahead->layer_end_ns + from->rest - FT_MAX(ahead->free_ns, foreseen->now_ns);
    return gap > 0 && each > 0 ? gap / (each * ahead->stretch) : 0;
}

uint32_t ft_ahead_choose(struct ft_ahead *ahead, const struct ft_foreseen *foreseen, uint32_t *chosen)
{
    uint32_t count = 0;
    if (!ft_ahead_looks(ahead) || foreseen->from >= ahead->layer_count ||
        foreseen->layer >= ahead->layer_count)
        return 0;
    double each = foreseen->expert_bytes * ahead->ns_per_byte * ahead->own;
    uint32_t most = (uint32_t)FT_MIN(copies_that_fit(ahead, foreseen, each), (double)foreseen->room);
    if (ahead->always)
        most = FT_MIN(FT_MAX(most, 1u), foreseen->room);
    for (uint32_t i = 0; i < foreseen->count && count < most; i++)
        if (foreseen->slot[i] == FT_NONE)
            chosen[count++] = i;
    ahead->layers[foreseen->layer].ordered = count;
    if (count && foreseen->now_ns > 0) {
        ahead->free_ns = FT_MAX(ahead->free_ns, foreseen->now_ns) + count * each;
        ahead->behind_ns += count * each;
    }
    return count;
}

void ft_ahead_observe(struct ft_ahead *ahead, const struct ft_observation *o)
{
    double end = o->start_ns + o->duration_ns;
    if (o->layer >= ahead->layer_count)
        return;
    struct ft_ahead_layer *layer = &ahead->layers[o->layer];
    if (o->op == FT_OP_POLICY) {
        layer->asked = o->start_ns;
        layer->begin = end;
    } else if (o->wait == FT_WAIT_LINK) { /* copies of a GPU show their end only here */
        layer->end = FT_MAX(layer->end, end);
        layer->waited |= o->duration_ns >= WAITED_NS;
    } else if (o->op == FT_OP_FETCH && o->bytes) {
        layer->end = FT_MAX(layer->end, end);
    } else if (o->lane == FT_LANE_CPU && o->op == FT_OP_EXPERT_DOWN) {
        layer->computed_end = FT_MAX(layer->computed_end, end);
    }
}

static void note(double *value, double now, double weight)
{
    *value += (*value > 0 ? weight : 1) * (now - *value);
}

static double within(double value, double least, double most)
{
    return FT_MIN(FT_MAX(value, least), most);
}

/* Own copies tell of `own` the more the more they are; what they move does not grow with them, lest it swings. */
static double share_of_own(double fetched)
{
    return fetched * OWN_MOST * OWN_MOST / (OWN_MOST * OWN_MOST + fetched * fetched);
}

/* Where the queue said that the layer's copies would end, and where they did. Half a copy behind its own means that some in
 * front were still on their way; else it tells of the layer's own. */
static void learn_queue(struct ft_ahead *ahead, const struct ft_ahead_layer *layer)
{
    if (!(layer->link_end > 0))
        return;
    double beyond = layer->end - ahead->late_ns - layer->link_end, way = (beyond > 0) - (beyond < 0);
    bool late = layer->front && layer->waited && beyond + layer->busy > layer->each / 2;
    if (layer->front && layer->fetched <= TELLING)
        ahead->stretch = within(ahead->stretch + (late ? STRETCH_MORE : -STRETCH_LESS), 1, STRETCH_MAX);
    if (!late && layer->waited && !(layer->busy > 0)) {
        ahead->late_ns = within(ahead->late_ns + LATE_STEP_NS * way, 0, LATE_MAX_NS);
        ahead->own =
            within(ahead->own + OWN_STEP * share_of_own(layer->fetched) * way, FACTOR_MIN, FACTOR_MAX);
        ahead->queue_known += layer->fetched > 0;
    }
}

static void learn_layer(struct ft_ahead *ahead, uint32_t index)
{
    struct ft_ahead_layer *layer = &ahead->layers[index];
    if (!(layer->begin > 0))
        return;
    if (ahead->open_end > 0)
        note(&ahead->layers[ahead->open_layer].gap, FT_MAX(layer->begin - ahead->open_end, 1.0), GAP_WEIGHT);
    if (ahead->open_last > 0)
        note(&ahead->layers[ahead->open_layer].rest, FT_MAX(layer->asked - ahead->open_last, 1.0),
             GAP_WEIGHT);
    bool copied = layer->fetched && layer->end > layer->begin;
    if (layer->computed && layer->computed_end > layer->begin)
        note(&ahead->cpu_ns, (layer->computed_end - layer->asked) / layer->computed, EACH_WEIGHT);
    learn_queue(ahead, layer);
    if (copied && layer->waited && layer->fetched >= COPIES_MIN && !ahead->measured)
        note(&ahead->ns_per_byte, (layer->end - layer->begin) / layer->bytes, EACH_WEIGHT);
    ahead->open_layer = index;
    ahead->open_end = copied ? layer->end : layer->fetched ? 0 : layer->begin;
    ahead->open_last = FT_MAX(FT_MAX(layer->waited ? layer->end : 0, layer->computed_end), layer->begin);
}

void ft_ahead_step_end(struct ft_ahead *ahead, const struct ft_step_summary *summary)
{
    bool learns = !ahead->frozen && !summary->prefill;
    if (!learns)
        ahead->open_end = ahead->open_last = 0;
    for (uint32_t i = 0; i < ahead->layer_count; i++) {
        struct ft_ahead_layer *layer = &ahead->layers[i];
        if (learns)
            learn_layer(ahead, i);
        *layer = (struct ft_ahead_layer){.gap = layer->gap, .rest = layer->rest};
    }
    if (learns)
        ft_trial_step(&ahead->trial, summary->rows, summary->duration_ns);
}
