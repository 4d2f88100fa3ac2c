/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels_cpu/bench_internal.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static const uint32_t row_counts[] = {1, 2, 4, 8, 16, 32, 64};
#define COUNT(array) (sizeof(array) / sizeof(array)[0])

#define PAIRED_ROWS_MAX                                                                                      \
    2u /* up to here memory is the limit, and every round has reads of its own around it */

static uint32_t rounds_of(const struct ft_bench_kernels_options *options)
{
    return options->rounds ? options->rounds : 5;
}

/* Bank, activations and scratch of one call. */
struct bench {
    const struct ft_bench_kernels_options *options;
    const struct ft_bench_roof *roof;
    struct ft_bench_bank bank;
    struct ft_bench_crew *crew;
    float *x, *scratch;
    uint64_t scratch_stride;
};

static void bench_fini(struct bench *b)
{
    if (b->bank.mapped)
        ft_bench_bank_close(&b->bank);
    ft_bench_crew_close(b->crew);
    free(b->x);
    free(b->scratch);
}

static int bench_init(struct bench *b, const struct ft_bench_kernels_options *options,
                      enum ft_bench_pages pages, struct ft_error *err)
{
    uint64_t x_bytes = ft_bench_case_x_count(options) * sizeof(float);
    *b = (struct bench){.options = options, .scratch_stride = ft_bench_case_scratch_count(options)};
    int status = ft_bench_crew_open(&b->crew, options, err);
    b->x = aligned_alloc(64, ft_round_up(x_bytes, 64));
    b->scratch = aligned_alloc(64, options->threads * b->scratch_stride * sizeof(float));
    if (status == FT_OK && (!b->x || !b->scratch))
        status = ft_error_set(err, FT_MEMORY, "no memory for %llu bytes of activations",
                              (unsigned long long)x_bytes);
    if (status == FT_OK) {
        status = ft_bench_bank_open(&b->bank, options->bank_bytes, pages, err);
        if (status != FT_OK)
            b->bank.mapped = NULL;
    }
    if (status != FT_OK) {
        bench_fini(b);
        return status;
    }
    ft_bench_fill(b->x, x_bytes, 0x83ffffff83ffffffu, 0x3c0000003c000000u, 7);
    memset(b->scratch, 0, options->threads * b->scratch_stride * sizeof(float));
    return FT_OK;
}

static struct ft_bench_case case_of(const struct bench *b, enum ft_bench_op op, enum ft_format format)
{
    return (struct ft_bench_case){.op = op,
                                  .format = format,
                                  .bank = &b->bank,
                                  .hidden = b->options->hidden,
                                  .width = b->options->width,
                                  .rows = 1,
                                  .threads = b->options->threads,
                                  .x = b->x,
                                  .scratch = b->scratch,
                                  .scratch_stride = b->scratch_stride};
}

/* Units of one pass: the whole bank, less from 8 rows on, where arithmetic and not memory sets the time. */
static uint32_t pass_units(const struct ft_bench_case *c, uint32_t threads)
{
    uint64_t units = (uint64_t)c->unit_count * 8 / FT_MAX(c->rows, 8u);
    units = FT_MAX(units, ft_div_up(c->unit_count, 4));
    return (uint32_t)FT_MIN(FT_MAX(units, threads), c->unit_count);
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double ft_bench_ceiling_fraction(double *gbs, const double *reads, uint32_t rounds, bool paired)
{
    for (uint32_t i = 0; i < rounds; i++) {
        double before = reads[paired ? i : 0], after = reads[paired ? i + 1 : rounds];
        gbs[i] /= (before + after) / 2;
    }
    qsort(gbs, rounds, sizeof *gbs, compare_doubles);
    return (gbs[(rounds - 1) / 2] + gbs[rounds / 2]) / 2;
}

/* Rounds of a case, gbs [rounds], and plain reads of what a pass reads around them, reads [rounds + 1]. */
static int run_rounds(const struct bench *b, struct ft_bench_case *c, uint32_t threads, bool paired,
                      double *gbs, double *reads, struct ft_error *err)
{
    uint32_t rounds = rounds_of(b->options);
    int status = FT_OK;
    for (uint32_t i = 0; i <= rounds && status == FT_OK; i++) {
        double seconds;
        if (paired || i == 0 || i == rounds)
            status = ft_bench_read(b->crew, b->roof, c->regions, c->pass_units, &reads[i], err);
        if (status == FT_OK && i < rounds) {
            status = ft_bench_crew_run(b->crew, threads, 1, ft_bench_case_pass, c, &seconds, err);
            gbs[i] = (double)c->unit_bytes * c->pass_units / seconds / 1e9;
        }
    }
    return status;
}

/* Fills gbs, ceiling_gbs and ceiling_fraction. */
static int measure_rounds(const struct bench *b, struct ft_bench_case *c,
                          struct ft_bench_kernels_result *result, struct ft_error *err)
{
    uint32_t rounds = rounds_of(b->options);
    bool paired = c->rows <= PAIRED_ROWS_MAX;
    double *gbs = calloc(rounds, sizeof *gbs), *reads = calloc(rounds + 1ull, sizeof *reads);
    int status = gbs && reads ? run_rounds(b, c, result->threads, paired, gbs, reads, err)
                              : ft_error_set(err, FT_MEMORY, "no memory for %u rounds", rounds);
    if (status == FT_OK) {
        for (uint32_t i = 0; i < rounds; i++)
            result->gbs = fmax(result->gbs, gbs[i]);
        for (uint32_t i = 0; i <= rounds; i++)
            result->ceiling_gbs = fmax(result->ceiling_gbs, reads[i]);
        result->ceiling_fraction = ft_bench_ceiling_fraction(gbs, reads, rounds, paired);
    }
    free(gbs);
    free(reads);
    return status;
}

static int measure(const struct bench *b, struct ft_bench_case *c, double *unit_s,
                   struct ft_bench_kernels_result *result, struct ft_error *err)
{
    double peak = b->roof->peak_gflops[c->kernels->isa];
    *result = (struct ft_bench_kernels_result){.op = c->op,
                                               .format = c->format,
                                               .isa = c->kernels->isa,
                                               .rows = c->rows,
                                               .threads = FT_MIN(b->options->threads, FT_WORKERS_MAX)};
    c->pass_units = pass_units(c, result->threads);
    int status = measure_rounds(b, c, result, err);
    if (status == FT_OK)
        status = ft_bench_case_error(c, &result->max_error, err);
    if (status != FT_OK)
        return status;
    *unit_s = (double)c->unit_bytes / result->gbs / 1e9;
    result->gflops = 2 * c->unit_macs * c->rows / *unit_s / 1e9;
    result->peak_fraction = peak > 0 ? result->gflops / peak : 0;
    return FT_OK;
}

/* ---- filters: names with commas between them ---- */

static const char *isa_name(uint32_t i)
{
    return i < FT_ISA_COUNT ? ft_isa_name((enum ft_isa)i) : NULL;
}
static const char *op_name(uint32_t i)
{
    return i < FT_BENCH_OP_COUNT ? ft_bench_op_name((enum ft_bench_op)i) : NULL;
}
static const char *format_name(uint32_t i)
{
    return i < FT_FORMAT_COUNT ? ft_format_name((enum ft_format)i) : NULL;
}

/* Every name of the filter is one of name(0), name(1) .. up to NULL. */
static int check_filter(const char *filter, const char *what, const char *(*name)(uint32_t),
                        struct ft_error *err)
{
    for (const char *at = filter; at; at = strchr(at, ','), at = at ? at + 1 : NULL) {
        size_t length = strcspn(at, ",");
        char list[256] = "";
        bool known = false;
        for (uint32_t i = 0; name(i); i++) {
            known |= strlen(name(i)) == length && memcmp(at, name(i), length) == 0;
            size_t used = strlen(list);
            snprintf(list + used, sizeof list - used, "%s%s", i ? ", " : "", name(i));
        }
        if (!known)
            return ft_error_set(err, FT_USAGE, "no %s is called \"%.*s\": %ss are %s", what, (int)length, at,
                                what, list);
    }
    return FT_OK;
}

static bool is_wanted(const char *filter, const char *name)
{
    size_t length = strlen(name);
    for (const char *at = filter; at; at = strchr(at, ','), at = at ? at + 1 : NULL)
        if (strncmp(at, name, length) == 0 && (at[length] == ',' || !at[length]))
            return true;
    return !filter;
}

struct results {
    struct ft_bench_kernels_result *items; /* [capacity] */
    uint32_t capacity, *count;
};

static int cannot_tell(struct ft_error *err)
{
    return ft_error_set(err, FT_SYSTEM, "bench kernels: the results cannot be written: %s", strerror(errno));
}

/* All row counts of one (op, format, ISA). */
static int measure_rows(const struct bench *b, struct ft_bench_case *c, const struct results *out,
                        struct ft_error *err)
{
    double one = 0, unit_s;
    for (size_t i = 0; i < COUNT(row_counts) && (i == 0 || ft_bench_op_has_rows(c->op)); i++) {
        if (*out->count == out->capacity)
            return ft_error_set(err, FT_LIMIT, "%u results are all that fit; there are more", out->capacity);
        struct ft_bench_kernels_result *result = &out->items[*out->count];
        c->rows = row_counts[i];
        if (b->options->rows && c->rows != 1 && c->rows != b->options->rows)
            continue;
        int status = measure(b, c, &unit_s, result, err);
        if (status != FT_OK)
            return status;
        one = i == 0 ? unit_s : one;
        result->times_one_row = unit_s / one;
        ++*out->count;
        if (b->options->tell && !b->options->tell(b->options->tell_context, result))
            return cannot_tell(err);
    }
    return FT_OK;
}

static bool is_measured(const struct ft_bench_kernels_options *options, enum ft_isa isa)
{
    bool reference = options->reference || (options->isa && is_wanted(options->isa, "ref"));
    return ft_isa_is_available(isa) && (isa != FT_ISA_REF || reference) &&
           is_wanted(options->isa, ft_isa_name(isa));
}

static int measure_case(const struct bench *b, uint32_t index, const struct results *out,
                        struct ft_error *err)
{
    enum ft_bench_op op;
    enum ft_format format;
    const struct ft_bench_kernels_options *options = b->options;
    ft_bench_case_get(index, &op, &format);
    if (!is_wanted(options->op, ft_bench_op_name(op)) || !is_wanted(options->format, ft_format_name(format)))
        return FT_OK;
    struct ft_bench_case c = case_of(b, op, format);
    int status = ft_bench_case_prepare(&c, 1000 * (index + 1ull), err);
    for (enum ft_isa isa = 0; isa < FT_ISA_COUNT && status == FT_OK; isa++) {
        struct ft_kernels kernels;
        if (!is_measured(options, isa))
            continue;
        status = ft_kernels_init(&kernels, ft_isa_name(isa), err);
        c.kernels = &kernels;
        if (status == FT_OK)
            status = measure_rows(b, &c, out, err);
    }
    ft_bench_case_fini(&c);
    return status;
}

/* At least one version of one case is wanted and there. */
static bool wants_any(const struct ft_bench_kernels_options *options)
{
    for (uint32_t i = 0; i < ft_bench_case_count(); i++) {
        enum ft_bench_op op;
        enum ft_format format;
        ft_bench_case_get(i, &op, &format);
        for (enum ft_isa isa = 0; isa < FT_ISA_COUNT; isa++)
            if (is_measured(options, isa) && is_wanted(options->op, ft_bench_op_name(op)) &&
                is_wanted(options->format, ft_format_name(format)))
                return true;
    }
    return false;
}

/* ISAs that are asked for by name are there. */
static int check_isas(const struct ft_bench_kernels_options *options, struct ft_error *err)
{
    for (enum ft_isa isa = 0; isa < FT_ISA_COUNT; isa++)
        if (options->isa && is_wanted(options->isa, ft_isa_name(isa)) && !ft_isa_is_available(isa))
            return ft_error_set(err, FT_UNSUPPORTED, "this core has no %s: leave it out", ft_isa_name(isa));
    return FT_OK;
}

static int check_sizes(const struct ft_bench_kernels_options *options, struct ft_error *err)
{
    int status = FT_OK;
    for (uint32_t i = 0; i < ft_bench_case_count() && status == FT_OK; i++) {
        enum ft_bench_op op;
        enum ft_format format;
        struct bench b = {.options = options};
        ft_bench_case_get(i, &op, &format);
        struct ft_bench_case c = case_of(&b, op, format);
        if (is_wanted(options->op, ft_bench_op_name(op)) &&
            is_wanted(options->format, ft_format_name(format)))
            status = ft_bench_case_size(&c, err);
    }
    return status;
}

int ft_bench_kernels_check(const struct ft_bench_kernels_options *options, struct ft_error *err)
{
    int status = check_filter(options->op, "op", op_name, err);
    if (status == FT_OK)
        status = check_filter(options->format, "format", format_name, err);
    if (status == FT_OK)
        status = check_filter(options->isa, "ISA", isa_name, err);
    if (status == FT_OK)
        status = check_isas(options, err);
    if (status == FT_OK && !wants_any(options))
        return ft_error_set(err, FT_USAGE, "this core has no kernel of op %s, format %s, ISA %s",
                            options->op ? options->op : "any", options->format ? options->format : "any",
                            options->isa ? options->isa : "any");
    return status == FT_OK ? check_sizes(options, err) : status;
}

int ft_bench_kernels_run(const struct ft_bench_kernels_options *options, struct ft_bench_roof *roof,
                         struct ft_bench_kernels_result *results, uint32_t capacity, uint32_t *count,
                         struct ft_error *err)
{
    struct bench b;
    struct results out = {results, capacity, count};
    *count = 0;
    int status = ft_bench_kernels_check(options, err);
    if (status == FT_OK)
        status = bench_init(&b, options, FT_BENCH_PAGES_HUGE, err);
    if (status != FT_OK)
        return status;
    status = ft_bench_roof(b.crew, options, &b.bank, roof, err);
    b.roof = roof;
    if (status == FT_OK && options->tell_roof && !options->tell_roof(options->tell_context, roof))
        status = cannot_tell(err);
    for (uint32_t i = 0; i < ft_bench_case_count() && status == FT_OK; i++)
        status = measure_case(&b, i, &out, err);
    bench_fini(&b);
    return status;
}

/* ---- page sizes ---- */

/* Whether the pool of reserved huge pages has one for us. */
static bool has_hugetlb(void)
{
    void *page =
        mmap(NULL, 2u << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
    if (page == MAP_FAILED)
        return false;
    munmap(page, 2u << 20);
    return true;
}

int ft_bench_kernels_pages(const struct ft_bench_kernels_options *options,
                           struct ft_bench_pages_result *result, struct ft_error *err)
{
    struct bench b[2]; /* small, huge */
    struct ft_bench_case c[2];
    struct ft_kernels kernels;
    double best[2] = {INFINITY, INFINITY}, seconds;
    *result = (struct ft_bench_pages_result){.hugetlb = has_hugetlb()};
    bool several = options->isa && strchr(options->isa, ',');
    int status = ft_kernels_init(&kernels, several ? NULL : options->isa, err);
    if (status == FT_OK)
        status = bench_init(&b[0], options, FT_BENCH_PAGES_SMALL, err);
    if (status != FT_OK)
        return status;
    status = bench_init(&b[1], options, FT_BENCH_PAGES_HUGE, err);
    if (status != FT_OK) {
        bench_fini(&b[0]);
        return status;
    }
    for (uint32_t i = 0; i < 2; i++) {
        c[i] = case_of(&b[i], FT_BENCH_EXPERT, FT_FORMAT_NVFP4);
        c[i].kernels = &kernels;
        if (status == FT_OK)
            status = ft_bench_case_prepare(&c[i], 1, err);
        c[i].pass_units = c[i].unit_count;
    }
    /* One thread, whose time on the core counts (other programs take the core, not its time), in turn. */
    for (uint32_t round = 0; round < 4 * rounds_of(options) && status == FT_OK; round++) {
        uint32_t i = round % 2;
        status = ft_bench_crew_run(b[i].crew, 1, 1, ft_bench_case_pass, &c[i], &seconds, err);
        best[i] = fmin(best[i], ft_bench_crew_cpu_s(b[i].crew));
    }
    if (status == FT_OK) {
        double bytes = (double)c[0].unit_bytes * c[0].unit_count;
        *result = (struct ft_bench_pages_result){.isa = kernels.isa,
                                                 .small_gbs = bytes / best[0] / 1e9,
                                                 .huge_gbs = bytes / best[1] / 1e9,
                                                 .small_share = ft_bench_bank_huge_share(&b[0].bank),
                                                 .huge_share = ft_bench_bank_huge_share(&b[1].bank),
                                                 .hugetlb = result->hugetlb};
    }
    for (uint32_t i = 0; i < 2; i++) {
        ft_bench_case_fini(&c[i]);
        bench_fini(&b[i]);
    }
    return status;
}
