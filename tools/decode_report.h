/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What `ft bench decode` found, as text or as JSON: {date, gpu, driver, command, weights, ceilings, rows}, a
 * row per strategy. Threads: one at a time.
 */
#ifndef FT_TOOLS_DECODE_REPORT_H
#define FT_TOOLS_DECODE_REPORT_H

#include "jobs/session.h"
#include "tools/bench_prefill.h"
#include "tools/ceilings.h"
#include "tools/decode_bounds.h"
#include "tools/synthetic.h"

#include <stdio.h>

struct ft_decode_row {
    enum ft_strategy wanted; /* as asked for; auto says what became of it */
    struct ft_plan plan;
    uint32_t batch, context, steps, warmup;
    double link_gbs; /* throttle; 0 = none */
    double mean_step_s, median_step_s, min_step_s;
    struct ft_bench_prefill prefill;            /* --prefill */
    struct ft_session_stats stats;              /* of the timed steps alone */
    uint32_t slots; /* of the cache: the plan's less landing buffers */
    uint64_t active, lru_misses, belady_misses; /* of the timed steps, by replay of the routing */
    uint32_t warm_slots;
    struct ft_decode_traffic traffic;
    struct ft_decode_bound bound, lru_bound, belady_bound;
};

struct ft_decode_report {
    char shape[512], date[32], command[1024], gpu[128], driver[64], routing[256], ple[256];
    enum ft_format format;
    const char *isa;
    double expert_bytes;
    uint32_t layer_count, expert_count, topk;
    uint64_t seed;
    struct ft_synthetic_stats made;
    struct ft_ceilings ceilings;
    struct ft_decode_row *rows; /* [row_count] */
    uint32_t row_count;
};

/* Date, and GPU and driver as the kernel names them; "" when there is none. Command: the arguments, joined. */
void ft_decode_report_init(struct ft_decode_report *report, int argc, char **argv);
/* b - a of every field. */
void ft_decode_stats_subtract(struct ft_session_stats *b, const struct ft_session_stats *a);
/* Distinct experts and misses of a row's timed steps, as the engine counted them (without slots: all miss). */
void ft_decode_row_experts(const struct ft_decode_row *row, uint64_t *active, uint64_t *misses);

/* As text: what all rows share, and a row. The head wants everything but `rows`. */
void ft_decode_report_print_head(const struct ft_decode_report *report, FILE *out);
void ft_decode_report_print_row(const struct ft_decode_report *report, const struct ft_decode_row *row,
                                FILE *out);
void ft_decode_report_write_json(const struct ft_decode_report *report, FILE *out);

#endif
