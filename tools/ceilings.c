/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/ceilings.h"

#include "jobs/topology.h"
#include "kernels_cpu/kernels_cpu.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ROUNDS 2u
#define COPY_EXPERTS 64u /* the copy's destination: experts until it comes round */

enum role { ROLE_READ, ROLE_READ_AHEAD, ROLE_EXPERT, ROLE_COPY };

struct crew;

/* One measuring thread; a line of its own. */
struct member {
    _Alignas(64) struct crew *crew;
    enum role role;
    uint32_t number;
    uint64_t bytes; /* done */
    double begin_s, end_s;
    uint64_t random, sink;
    float *scratch; /* EXPERT: x [hidden], h [width], y [hidden] */
    pthread_t thread;
};

struct crew {
    const struct ft_ceilings_options *options;
    const struct ft_kernels *kernels;
    const struct ft_mover *mover;
    struct member *members; /* [workers + 1] */
    uint32_t moe_layers[FT_LAYERS_MAX], moe_layer_count;
    double seconds;
    _Atomic int gate; /* 0 wait, 1 go, 2 forget it: release by the starter, acquire by the members */
};

struct host_copy {
    char *to; /* [COPY_EXPERTS] blobs */
    uint64_t stride;
    uint32_t next;
};

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void sleep_until(double until_s)
{
    struct timespec t = {.tv_sec = (time_t)until_s, .tv_nsec = (long)((until_s - floor(until_s)) * 1e9)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
        ;
}

/* ---- what a member does with one expert ---- */

typedef uint64_t lanes __attribute__((vector_size(32)));

static inline __attribute__((always_inline)) uint64_t sum(const char *from, uint64_t bytes, bool ahead)
{
    lanes a = {0}, b = {0}, c = {0}, d = {0};
    for (uint64_t i = 0; i + 128 <= bytes; i += 128) {
        const lanes *p = (const lanes *)(const void *)(from + i);
        if (ahead) {
            __builtin_prefetch(from + i + 2048, 0, 0);
            __builtin_prefetch(from + i + 2112, 0, 0);
        }
        a += p[0];
        b += p[1];
        c += p[2];
        d += p[3];
    }
    a += b + c + d;
    return a[0] + a[1] + a[2] + a[3];
}

static void compute(const struct member *m, const struct ft_expert_layout *layout, const char *blob)
{
    const struct ft_kernels *kernels = m->crew->kernels;
    struct ft_expert expert;
    float *x = m->scratch, *h = x + layout->hidden, *y = h + layout->width;
    ft_expert_view(layout, blob, &expert);
    struct ft_rows in = {.x = x, .stride = layout->hidden, .count = 1};
    struct ft_rows middle = {.x = h, .stride = layout->width, .count = 1};
    kernels->expert_up(&expert, 0, layout->width, in, h, layout->width);
    kernels->expert_down(&expert, 0, layout->hidden, middle, NULL, y, layout->hidden);
}

static void copy_to_ram(void *context, const void *from, uint64_t bytes)
{
    struct host_copy *copy = context;
    memcpy(copy->to + copy->stride * (copy->next++ % COPY_EXPERTS), from, bytes);
}

static uint64_t random_next(uint64_t *state)
{
    /* splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014 */
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static void work_once(struct member *m)
{
    const struct crew *crew = m->crew;
    uint64_t random = random_next(&m->random);
    uint32_t layer = crew->moe_layers[(random >> 32) % crew->moe_layer_count];
    const struct ft_layer_weights *w = &crew->options->weights->layers[layer];
    const struct ft_expert_layout *layout = &w->expert_layout;
    const char *blob =
        w->experts + (uint64_t)((uint32_t)random % crew->options->model->expert_count) * layout->stride;
    switch (m->role) {
    case ROLE_READ:
        m->sink += sum(blob, layout->bytes, false);
        break;
    case ROLE_READ_AHEAD:
        m->sink += sum(blob, layout->bytes, true);
        break;
    case ROLE_EXPERT:
        compute(m, layout, blob);
        break;
    case ROLE_COPY:
        crew->mover->copy(crew->mover->context, blob, layout->bytes);
        break;
    }
    m->bytes += layout->bytes;
    if (m->role == ROLE_COPY && crew->options->link_bytes_per_s > 0) {
        /* The pace, not each copy, is held: an oversleep is made up by the next. */
        double due = m->begin_s + (double)m->bytes / crew->options->link_bytes_per_s;
        if (due > now_s())
            sleep_until(due);
    }
}

static void *member_main(void *argument)
{
    struct member *m = argument;
    struct crew *crew = m->crew;
    struct timespec pause = {.tv_nsec = 20000};
    int gate;
    if (crew->options->pin && m->role != ROLE_COPY)
        (void)ft_topology_bind(crew->options->topology, m->number % crew->options->topology->core_count);
    while ((gate = atomic_load_explicit(&crew->gate, memory_order_acquire)) == 0)
        nanosleep(&pause, NULL);
    if (gate == 2)
        return NULL;
    m->begin_s = m->end_s = now_s();
    while (m->end_s - m->begin_s < crew->seconds) {
        work_once(m);
        m->end_s = now_s();
    }
    if (m->role == ROLE_COPY && crew->mover->drain) {
        crew->mover->drain(crew->mover->context);
        m->end_s = now_s();
    }
    return NULL;
}

/* ---- rounds ---- */

/* `workers` members of the role, and a copier; the sums of their own rates. */
static int run_round(struct crew *crew, enum role role, uint32_t workers, bool copies, double *worker_rate,
                     double *copy_rate, struct ft_error *err)
{
    uint32_t count = workers + copies, started = 0;
    atomic_store_explicit(&crew->gate, 0, memory_order_relaxed);
    for (; started < count; started++) {
        struct member *m = &crew->members[started];
        m->crew = crew;
        m->role = started < workers ? role : ROLE_COPY;
        m->number = started;
        m->bytes = 0;
        m->random = started * 0x12345u + (uint64_t)role;
        if (pthread_create(&m->thread, NULL, member_main, m))
            break;
    }
    /* release: pairs with the acquire in member_main */
    atomic_store_explicit(&crew->gate, started == count ? 1 : 2, memory_order_release);
    *worker_rate = *copy_rate = 0;
    for (uint32_t i = 0; i < started; i++) {
        const struct member *m = &crew->members[i];
        pthread_join(m->thread, NULL);
        if (started == count)
            *(m->role == ROLE_COPY ? copy_rate : worker_rate) += (double)m->bytes / (m->end_s - m->begin_s);
    }
    return started == count ? FT_OK
                            : ft_error_set(err, FT_SYSTEM, "thread %u of %u for measuring cannot be started",
                                           started + 1, count);
}

/* The round with the larger sum. */
static int run_best(struct crew *crew, enum role role, uint32_t workers, bool copies, double *worker_rate,
                    double *copy_rate, struct ft_error *err)
{
    int status = FT_OK;
    *worker_rate = *copy_rate = 0;
    for (uint32_t i = 0; status == FT_OK && i < ROUNDS; i++) {
        double work, copy;
        status = run_round(crew, role, workers, copies, &work, &copy, err);
        if (work + copy > *worker_rate + *copy_rate) {
            *worker_rate = work;
            *copy_rate = copy;
        }
    }
    return status;
}

static int measure_reads(struct crew *crew, struct ft_ceilings *c, struct ft_error *err)
{
    uint32_t cores = crew->options->topology->core_count;
    int status = FT_OK;
    for (uint32_t n = 1; status == FT_OK; n = FT_MIN(2 * n, cores)) {
        for (enum role role = ROLE_READ; status == FT_OK && role <= ROLE_READ_AHEAD; role++) {
            double rate, none;
            status = run_best(crew, role, n, false, &rate, &none, err);
            if (n == 1 && crew->options->device == FT_DEVICE_HOST)
                c->device_read_bytes_per_s = FT_MAX(c->device_read_bytes_per_s, rate);
            if (rate > c->cpu_read_bytes_per_s) {
                c->cpu_read_bytes_per_s = rate;
                c->cpu_read_threads = n;
            }
        }
        if (n == cores)
            break;
    }
    return status;
}

static int measure_all(struct crew *crew, struct ft_ceilings *c, struct ft_error *err)
{
    const struct ft_ceilings_options *o = crew->options;
    double none;
    c->device_read_bytes_per_s = o->device == FT_DEVICE_CUDA ? o->device_read_bytes_per_s : 0;
    int status = o->experts_only ? FT_OK : measure_reads(crew, c, err);
    if (status == FT_OK)
        status = run_best(crew, ROLE_EXPERT, o->workers, false, &c->cpu_expert_bytes_per_s, &none, err);
    if (status == FT_OK && crew->mover)
        status = run_best(crew, ROLE_COPY, 0, true, &none, &c->link_bytes_per_s, err);
    crew->seconds *= 2;
    if (status == FT_OK && crew->mover)
        status = run_best(crew, ROLE_EXPERT, o->workers, true, &c->both_cpu_bytes_per_s,
                          &c->both_link_bytes_per_s, err);
    return status;
}

/* ---- begin and end ---- */

static void fini(struct crew *crew, struct host_copy *copy, uint32_t members)
{
    for (uint32_t i = 0; crew->members && i < members; i++)
        free(crew->members[i].scratch);
    free(crew->members);
    free(copy->to);
}

static int init(struct crew *crew, struct host_copy *copy, uint32_t members, struct ft_error *err)
{
    const struct ft_model *model = crew->options->model;
    uint64_t floats = 2ull * model->hidden + model->expert_width + 64;
    bool ram = crew->options->device == FT_DEVICE_HOST && !crew->options->mover;
    for (uint32_t i = 0; i < model->layer_count; i++)
        if (!model->layers[i].dense) {
            crew->moe_layers[crew->moe_layer_count++] = i;
            copy->stride = FT_MAX(copy->stride, crew->options->weights->layers[i].expert_layout.stride);
        }
    if (!crew->moe_layer_count)
        return ft_error_set(err, FT_UNSUPPORTED, "the model has no experts to measure with");
    crew->members = aligned_alloc(64, members * sizeof *crew->members);
    if (crew->members)
        memset(crew->members, 0, members * sizeof *crew->members);
    copy->to = ram ? aligned_alloc(64, copy->stride * COPY_EXPERTS) : NULL;
    bool enough = crew->members && (!ram || copy->to);
    for (uint32_t i = 0; enough && i < members; i++) {
        float *scratch = crew->members[i].scratch =
            aligned_alloc(64, ft_round_up(floats * sizeof(float), 64));
        enough = scratch != NULL;
        for (uint64_t j = 0; enough && j < floats; j++)
            scratch[j] = (float)(j % 17) / 8 - 1;
    }
    if (enough && ram)
        memset(copy->to, 1, copy->stride * COPY_EXPERTS); /* pages exist before the clock runs */
    return enough ? FT_OK : ft_error_set(err, FT_MEMORY, "no memory to measure with");
}

int ft_ceilings_measure(const struct ft_ceilings_options *options, struct ft_ceilings *ceilings,
                        struct ft_error *err)
{
    struct ft_kernels kernels;
    struct host_copy copy = {0};
    const struct ft_mover ram = {.context = &copy, .copy = copy_to_ram};
    struct crew crew = {.options = options, .kernels = &kernels, .mover = options->mover};
    uint32_t members = FT_MAX(options->workers, options->topology->core_count) + 1;
    *ceilings = (struct ft_ceilings){0};
    crew.seconds = options->seconds;
    if (options->device == FT_DEVICE_HOST && !crew.mover)
        crew.mover = &ram;
    int status = ft_kernels_init(&kernels, options->isa, err);
    if (status == FT_OK)
        status = init(&crew, &copy, members, err);
    if (status == FT_OK)
        status = measure_all(&crew, ceilings, err);
    fini(&crew, &copy, members);
    return status;
}
