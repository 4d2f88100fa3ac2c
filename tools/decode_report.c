/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/decode_report.h"

#include "tools/json_out.h"
#include "tools/options.h"

#include <dirent.h>
#include <string.h>
#include <time.h>

/* ---- where and when ---- */

/* What follows `key` in the first line of `path` that begins with it. */
static void find_line(const char *path, const char *key, char *value, size_t cap)
{
    char line[512];
    FILE *file = fopen(path, "re");
    value[0] = '\0';
    while (file && !value[0] && fgets(line, sizeof line, file)) {
        if (strncmp(line, key, strlen(key)))
            continue;
        const char *at = line + strlen(key);
        at += strspn(at, ": \t");
        snprintf(value, cap, "%.*s", (int)strcspn(at, "\n"), at);
    }
    if (file)
        fclose(file);
}

/* The kernel driver says both without any library. */
static void find_gpu(struct ft_decode_report *report)
{
    static const char folder[] = "/proc/driver/nvidia/gpus";
    DIR *gpus = opendir(folder);
    for (const struct dirent *entry; gpus && !report->gpu[0] && (entry = readdir(gpus));) {
        char path[512];
        snprintf(path, sizeof path, "%s/%s/information", folder, entry->d_name);
        if (entry->d_name[0] != '.')
            find_line(path, "Model:", report->gpu, sizeof report->gpu);
    }
    if (gpus)
        closedir(gpus);
    find_line("/proc/driver/nvidia/version", "NVRM version", report->driver, sizeof report->driver);
}

void ft_decode_report_init(struct ft_decode_report *report, int argc, char **argv)
{
    time_t now = time(NULL);
    struct tm utc;
    size_t at = (size_t)snprintf(report->command, sizeof report->command, "ft bench decode");
    strftime(report->date, sizeof report->date, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    for (int i = 0; i < argc && at < sizeof report->command; i++)
        at += (size_t)snprintf(report->command + at, sizeof report->command - at, " %s", argv[i]);
    find_gpu(report);
}

void ft_decode_stats_subtract(struct ft_session_stats *b, const struct ft_session_stats *a)
{
    b->steps -= a->steps;
    b->prefill_steps -= a->prefill_steps;
    b->prefill_chunks -= a->prefill_chunks;
    b->prefill_rows -= a->prefill_rows;
    b->decode_rows -= a->decode_rows;
    b->prefill_ns -= a->prefill_ns;
    b->decode_ns -= a->decode_ns;
    for (uint32_t c = 0; c < FT_CLASS_COUNT; c++)
        b->class_ns[c] -= a->class_ns[c];
    for (uint32_t lane = 0; lane < FT_LANE_COUNT; lane++) {
        b->expert_ns[lane] -= a->expert_ns[lane];
        for (uint32_t wait = 0; wait < FT_WAIT_COUNT; wait++)
            b->wait_ns[lane][wait] -= a->wait_ns[lane][wait];
    }
    b->hits -= a->hits;
    b->misses -= a->misses;
    b->fetches -= a->fetches;
    b->fetch_bytes -= a->fetch_bytes;
    b->cpu_experts -= a->cpu_experts;
    b->prefetches -= a->prefetches;
    b->prefetches_used -= a->prefetches_used;
    b->prefetches_waited -= a->prefetches_waited;
    b->prefetches_wasted -= a->prefetches_wasted;
    b->foreseen -= a->foreseen;
    b->foreseen_right -= a->foreseen_right;
    b->copied_ahead -= a->copied_ahead;
    b->copied_ahead_used -= a->copied_ahead_used;
    b->warmed_bytes -= a->warmed_bytes;
    b->policy_repairs -= a->policy_repairs;
    b->jobs -= a->jobs;
    b->stolen -= a->stolen;
    b->trace_dropped -= a->trace_dropped;
    b->snapshots_taken -= a->snapshots_taken;
    b->snapshots_used -= a->snapshots_used;
    b->failed_steps -= a->failed_steps;
    b->ple.batches -= a->ple.batches;
    b->ple.rows_wanted -= a->ple.rows_wanted;
    b->ple.rows_distinct -= a->ple.rows_distinct;
    b->ple.reads -= a->ple.reads;
    b->ple.read_bytes -= a->ple.read_bytes;
}

void ft_decode_row_experts(const struct ft_decode_row *row, uint64_t *active, uint64_t *misses)
{
    bool device = row->plan.device != FT_DEVICE_NONE;
    *active = device ? row->stats.hits + row->stats.misses : row->stats.cpu_experts;
    *misses = device ? row->stats.misses : row->stats.cpu_experts;
}

/* ---- text ---- */

static double share(double part, double all)
{
    return all > 0 ? part / all : 0;
}

/* Tokens per s of a step time; 0 when that is not known. */
static double speed(const struct ft_decode_row *row, double step_s)
{
    return step_s > 0 ? row->batch / step_s : 0;
}

static void print_bound(const struct ft_decode_row *row, const char *name,
                        const struct ft_decode_bound *bound, uint64_t misses, FILE *out)
{
    if (!(bound->serial_s > 0)) {
        fprintf(out, "    %-22s no bound: a bandwidth that it needs was not measured\n", name);
        return;
    }
    double tok_s = speed(row, row->mean_step_s);
    fprintf(out, "    %-22s serial %.2f tok/s (reached %.0f%%), overlapped %.2f (%.0f%%)", name,
            speed(row, bound->serial_s), 100 * share(tok_s, speed(row, bound->serial_s)),
            speed(row, bound->overlap_s), 100 * share(tok_s, speed(row, bound->overlap_s)));
    fprintf(out, ", %.1f misses a step\n", (double)misses / row->steps);
}

/* From the end of a step to the begin of the next. */
static double gap_us(const struct ft_decode_row *row)
{
    return row->mean_step_s * 1e6 - row->stats.decode_ns / row->steps / 1e3;
}

/* All experts that no slot holds, once a chunk, over the link; 0: none moves, strategy cpu computes them where they lie. */
static double prefill_link_s(const struct ft_decode_report *report, const struct ft_decode_row *row)
{
    double experts = (double)report->layer_count * report->expert_count,
           link = report->ceilings.link_bytes_per_s;
    double missing = FT_MAX(experts - row->plan.slot_count, 0.0) * report->expert_bytes;
    bool moves = row->plan.device != FT_DEVICE_NONE && row->plan.strategy != FT_STRATEGY_CPU && link > 0;
    return moves ? missing / link * (double)row->prefill.chunks : 0;
}

static double hit_rate(uint64_t hits, uint64_t misses)
{
    return share((double)hits, (double)(hits + misses));
}

static void print_prefill(const struct ft_decode_report *report, const struct ft_decode_row *row, FILE *out)
{
    const struct ft_bench_prefill *p = &row->prefill;
    double before = speed(row, row->mean_step_s), beside = share((double)p->tokens, p->beside_s);
    double hits = hit_rate(row->stats.hits, row->stats.misses),
           hits_after = hit_rate(p->after_hits, p->after_misses), link_s = prefill_link_s(report, row);
    fprintf(out, "    prefill alone: %u rows in %llu chunks, %.0f rows/s", p->prompt_tokens,
            (unsigned long long)p->chunks, share(p->prompt_tokens, p->alone_s));
    if (link_s > 0)
        fprintf(out, "; %.0f%% of the link's bound", 100 * share(link_s, p->alone_s));
    fprintf(out,
            "\n    beside it: %.2f tok/s, %.0f%% of those before (longest gap %.1f ms); the prompt in %llu "
            "slices",
            beside, 100 * share(beside, before), p->gap_s_max * 1e3, (unsigned long long)p->slices);
    if (p->whole)
        fprintf(out, ", %.0f rows/s", share(p->rows, p->beside_s));
    else
        fprintf(out, ", not read to its end: raise --beside");
    fprintf(out, "\n    after it: %.2f tok/s", share(row->batch * (double)row->steps, p->after_s));
    if (row->plan.slot_count)
        fprintf(out, ", hits %.1f%%, before %.1f%% (x %.2f)", 100 * hits_after, 100 * hits,
                share(hits_after, hits));
    fprintf(out, "\n");
}

void ft_decode_report_print_row(const struct ft_decode_report *report, const struct ft_decode_row *row,
                                FILE *out)
{
    const struct ft_session_stats *s = &row->stats;
    double steps = row->steps;
    uint64_t active, misses;
    ft_decode_row_experts(row, &active, &misses);
    fprintf(out, "%s%s%s on %s, %u workers, %u slots (%.1f%%), batch %u, context %u\n",
            ft_strategy_name(row->wanted), row->wanted != row->plan.strategy ? " -> " : "",
            row->wanted != row->plan.strategy ? ft_strategy_name(row->plan.strategy) : "",
            ft_device_name(row->plan.device), row->plan.workers, row->plan.slot_count,
            100.0 * row->plan.slot_count / ((double)report->layer_count * report->expert_count), row->batch,
            row->context);
    fprintf(out, "    %.2f tok/s; a step: mean %.2f ms, median %.2f, best %.2f (%u steps after %u)\n",
            speed(row, row->mean_step_s), row->mean_step_s * 1e3, row->median_step_s * 1e3,
            row->min_step_s * 1e3, row->steps, row->warmup);
    fprintf(out, "    between steps %.1f us\n", gap_us(row));
    if (row->prefill.prompt_tokens)
        print_prefill(report, row, out);
    fprintf(out, "    hits %.1f%% of %.1f distinct experts a step; %.1f fetched (%.1f MB; %.1f of them had come ahead), %.1f on the CPU\n",
            100 * share((double)(active - misses), (double)active), (double)active / steps,
            (double)s->fetches / steps, (double)s->fetch_bytes / steps / 1e6,
            (double)s->copied_ahead_used / steps, (double)s->cpu_experts / steps);
    if (s->prefetches)
        fprintf(out, "    copied ahead %.1f a step (%.1f MB): %.1f used, %.1f evicted unused (%.1f MB)\n",
                (double)s->prefetches / steps, (double)s->prefetches / steps * report->expert_bytes / 1e6,
                (double)s->prefetches_used / steps, (double)s->prefetches_wasted / steps,
                (double)s->prefetches_wasted / steps * report->expert_bytes / 1e6);
    if (s->foreseen)
        fprintf(out,
                "    look-ahead: %.1f%% of the foreseen experts came; copied %.1f a step (%.1f MB), %.1f "
                "used; %.1f MB warmed\n",
                100 * share((double)s->foreseen_right, (double)s->foreseen), (double)s->copied_ahead / steps,
                (double)s->copied_ahead / steps * report->expert_bytes / 1e6,
                (double)s->copied_ahead_used / steps, (double)s->warmed_bytes / steps / 1e6);
    fprintf(out, "    thread ms a step:");
    for (uint32_t c = 0; c < FT_CLASS_COUNT; c++)
        if (s->class_ns[c] > 0)
            fprintf(out, " %s %.2f", ft_class_name((enum ft_class)c), s->class_ns[c] / steps / 1e6);
    fprintf(out, "\n    waiting:");
    for (uint32_t lane = 0; lane < FT_LANE_COUNT; lane++)
        for (uint32_t wait = 0; wait < FT_WAIT_COUNT; wait++)
            if (s->wait_ns[lane][wait] > 0)
                fprintf(out, " %s for %s %.2f", ft_lane_name((enum ft_lane)lane),
                        ft_wait_name((enum ft_wait)wait), s->wait_ns[lane][wait] / steps / 1e6);
    fprintf(out, "\n    MB a step: dense %.1f, state %.1f, KV %.1f, resident experts %.1f, missing %.1f\n",
            row->traffic.dense / 1e6, row->traffic.state / 1e6, row->traffic.kv / 1e6,
            row->traffic.resident / 1e6, row->traffic.missing / 1e6);
    print_bound(row, "bound, these misses", &row->bound, misses, out);
    if (row->plan.device != FT_DEVICE_NONE) {
        print_bound(row, "bound, LRU's misses", &row->lru_bound, row->lru_misses, out);
        print_bound(row, "bound, Belady's misses", &row->belady_bound, row->belady_misses, out);
    }
}

void ft_decode_report_print_head(const struct ft_decode_report *r, FILE *out)
{
    char size[32];
    const struct ft_ceilings *c = &r->ceilings;
    fprintf(out, "%s, %s experts, SYNTHETIC WEIGHTS (seed %llu): %s made in %.1f s, %.1f GB/s, %u threads\n",
            r->shape, ft_format_name(r->format), (unsigned long long)r->seed,
            ft_options_format_bytes(r->made.bytes, size, sizeof size), r->made.seconds,
            (double)r->made.bytes / r->made.seconds / 1e9, r->made.threads);
    fprintf(out, "routing %s; PLE %s; kernels %s\n", r->routing, r->ple, r->isa);
    if (r->gpu[0])
        fprintf(out, "GPU %s\n", r->gpu);
    fprintf(out,
            "ceilings, GB/s: CPU read %.1f (%u threads), device read %.1f, link %.1f (linear %.1f), CPU "
            "experts %.1f, together "
            "%.1f + %.1f\n",
            c->cpu_read_bytes_per_s / 1e9, c->cpu_read_threads, c->device_read_bytes_per_s / 1e9,
            c->link_bytes_per_s / 1e9, c->link_linear_bytes_per_s / 1e9, c->cpu_expert_bytes_per_s / 1e9,
            c->both_cpu_bytes_per_s / 1e9, c->both_link_bytes_per_s / 1e9);
}

/* ---- JSON ---- */

static void write_times(struct ft_json *json, const struct ft_decode_row *row)
{
    const struct ft_session_stats *s = &row->stats;
    ft_json_open(json, '{', "ms_by_class");
    for (uint32_t c = 0; c < FT_CLASS_COUNT; c++)
        ft_json_f64(json, ft_class_name((enum ft_class)c), s->class_ns[c] / row->steps / 1e6);
    ft_json_close(json, '}');
    ft_json_open(json, '{', "wait_ms");
    for (uint32_t lane = 0; lane < FT_LANE_COUNT; lane++) {
        ft_json_open(json, '{', ft_lane_name((enum ft_lane)lane));
        for (uint32_t wait = 0; wait < FT_WAIT_COUNT; wait++)
            if (s->wait_ns[lane][wait] > 0)
                ft_json_f64(json, ft_wait_name((enum ft_wait)wait),
                            s->wait_ns[lane][wait] / row->steps / 1e6);
        ft_json_close(json, '}');
    }
    ft_json_close(json, '}');
}

static void write_bound(struct ft_json *json, const struct ft_decode_row *row, const char *key,
                        const struct ft_decode_bound *bound)
{
    char name[64];
    snprintf(name, sizeof name, "%sserial_tok_s", key);
    ft_json_f64(json, name, speed(row, bound->serial_s));
    snprintf(name, sizeof name, "%sbound_tok_s", key);
    ft_json_f64(json, name, speed(row, bound->overlap_s));
}

static void write_traffic(struct ft_json *json, const struct ft_decode_traffic *t)
{
    ft_json_open(json, '{', "bytes_per_step");
    ft_json_f64(json, "dense", t->dense);
    ft_json_f64(json, "state", t->state);
    ft_json_f64(json, "kv", t->kv);
    ft_json_f64(json, "resident_experts", t->resident);
    ft_json_f64(json, "missing_experts", t->missing);
    ft_json_close(json, '}');
}

static void write_prefill(struct ft_json *json, const struct ft_decode_report *r,
                          const struct ft_decode_row *row)
{
    const struct ft_bench_prefill *p = &row->prefill;
    double before = speed(row, row->mean_step_s), beside = share((double)p->tokens, p->beside_s),
           hits = hit_rate(row->stats.hits, row->stats.misses),
           hits_after = hit_rate(p->after_hits, p->after_misses), link_s = prefill_link_s(r, row);
    ft_json_open(json, '{', "prefill");
    ft_json_u64(json, "rows", p->prompt_tokens);
    ft_json_u64(json, "chunks", p->chunks);
    ft_json_f64(json, "alone_s", p->alone_s);
    ft_json_f64(json, "alone_rows_s", share(p->prompt_tokens, p->alone_s));
    if (link_s > 0) {
        ft_json_f64(json, "link_bound_s", link_s);
        ft_json_f64(json, "of_link_bound", share(link_s, p->alone_s));
    } else {
        ft_json_null(json, "link_bound_s");
        ft_json_null(json, "of_link_bound");
    }
    ft_json_f64(json, "beside_s", p->beside_s);
    ft_json_u64(json, "beside_rows", p->rows);
    ft_json_bool(json, "beside_whole", p->whole);
    ft_json_u64(json, "slices", p->slices);
    ft_json_u64(json, "beside_tokens", p->tokens);
    ft_json_f64(json, "beside_tok_s", beside);
    ft_json_f64(json, "rate_kept", share(beside, before));
    ft_json_f64(json, "gap_ms_max", p->gap_s_max * 1e3);
    ft_json_f64(json, "after_tok_s", share(row->batch * (double)row->steps, p->after_s));
    ft_json_f64(json, "hit_rate_after", hits_after);
    ft_json_f64(json, "hit_rate_kept", share(hits_after, hits));
    ft_json_close(json, '}');
}

static void write_row(struct ft_json *json, const struct ft_decode_report *r, const struct ft_decode_row *row)
{
    uint64_t active, misses;
    double steps = row->steps, tok_s = speed(row, row->mean_step_s);
    ft_decode_row_experts(row, &active, &misses);
    ft_json_open(json, '{', NULL);
    ft_json_text(json, "shape", r->shape);
    ft_json_text(json, "format", ft_format_name(r->format));
    ft_json_text(json, "weights", "synthetic weights");
    ft_json_text(json, "strategy", ft_strategy_name(row->wanted));
    ft_json_text(json, "resolved", ft_strategy_name(row->plan.strategy));
    ft_json_text(json, "device", ft_device_name(row->plan.device));
    ft_json_u64(json, "workers", row->plan.workers);
    ft_json_u64(json, "batch", row->batch);
    ft_json_u64(json, "context", row->context);
    ft_json_u64(json, "slots", row->plan.slot_count);
    ft_json_u64(json, "warm_slots", row->warm_slots);
    ft_json_f64(json, "cache_rate", row->plan.slot_count / ((double)r->layer_count * r->expert_count));
    ft_json_f64(json, "fetch_share", row->plan.fetch_share);
    ft_json_f64(json, "link_gbs", row->link_gbs);
    ft_json_u64(json, "steps", row->steps);
    ft_json_u64(json, "warmup", row->warmup);
    ft_json_f64(json, "tok_s", tok_s);
    ft_json_f64(json, "tok_s_median", speed(row, row->median_step_s));
    ft_json_f64(json, "step_ms_mean", row->mean_step_s * 1e3);
    ft_json_f64(json, "step_ms_median", row->median_step_s * 1e3);
    ft_json_f64(json, "step_ms_min", row->min_step_s * 1e3);
    ft_json_f64(json, "gap_us", gap_us(row));
    if (row->prefill.prompt_tokens)
        write_prefill(json, r, row);
    else
        ft_json_null(json, "prefill");
    write_bound(json, row, "", &row->bound);
    write_bound(json, row, "lru_", &row->lru_bound);
    write_bound(json, row, "belady_", &row->belady_bound);
    ft_json_f64(json, "reached", share(tok_s, speed(row, row->bound.overlap_s)));
    ft_json_f64(json, "reached_serial", share(tok_s, speed(row, row->bound.serial_s)));
    ft_json_f64(json, "hit_rate", share((double)(active - misses), (double)active));
    ft_json_f64(json, "distinct_experts_per_step", (double)active / steps);
    ft_json_f64(json, "misses_per_step", (double)misses / steps);
    ft_json_f64(json, "lru_misses_per_step", (double)row->lru_misses / steps);
    ft_json_f64(json, "belady_misses_per_step", (double)row->belady_misses / steps);
    ft_json_f64(json, "fetches_per_step", (double)row->stats.fetches / steps);
    ft_json_f64(json, "fetch_bytes_per_step", (double)row->stats.fetch_bytes / steps);
    ft_json_f64(json, "cpu_experts_per_step", (double)row->stats.cpu_experts / steps);
    ft_json_u64(json, "landing_buffers", row->plan.slot_count - row->slots);
    ft_json_f64(json, "foreseen_per_step", (double)row->stats.foreseen / steps);
    ft_json_f64(json, "foreseen_right_per_step", (double)row->stats.foreseen_right / steps);
    ft_json_f64(json, "copied_ahead_per_step", (double)row->stats.copied_ahead / steps);
    ft_json_f64(json, "copied_ahead_used_per_step", (double)row->stats.copied_ahead_used / steps);
    ft_json_f64(json, "warmed_bytes_per_step", (double)row->stats.warmed_bytes / steps);
    ft_json_f64(json, "prefetches_per_step", (double)row->stats.prefetches / steps);
    ft_json_f64(json, "prefetches_used_per_step", (double)row->stats.prefetches_used / steps);
    ft_json_f64(json, "prefetches_wasted_per_step", (double)row->stats.prefetches_wasted / steps);
    ft_json_u64(json, "policy_repairs", row->stats.policy_repairs);
    write_traffic(json, &row->traffic);
    write_times(json, row);
    ft_json_close(json, '}');
}

static void write_ceilings(struct ft_json *json, const struct ft_ceilings *c)
{
    ft_json_open(json, '{', "ceilings_gbs");
    ft_json_f64(json, "cpu_read", c->cpu_read_bytes_per_s / 1e9);
    ft_json_u64(json, "cpu_read_threads", c->cpu_read_threads);
    ft_json_f64(json, "device_read", c->device_read_bytes_per_s / 1e9);
    ft_json_f64(json, "link", c->link_bytes_per_s / 1e9);
    ft_json_f64(json, "cpu_experts", c->cpu_expert_bytes_per_s / 1e9);
    ft_json_f64(json, "link_linear", c->link_linear_bytes_per_s / 1e9);
    ft_json_f64(json, "both_cpu", c->both_cpu_bytes_per_s / 1e9);
    ft_json_f64(json, "both_link", c->both_link_bytes_per_s / 1e9);
    ft_json_close(json, '}');
}

void ft_decode_report_write_json(const struct ft_decode_report *r, FILE *out)
{
    struct ft_json json;
    ft_json_begin(&json, out);
    ft_json_open(&json, '{', NULL);
    ft_json_text(&json, "date", r->date);
    if (r->gpu[0])
        ft_json_text(&json, "gpu", r->gpu);
    else
        ft_json_null(&json, "gpu");
    if (r->driver[0])
        ft_json_text(&json, "driver", r->driver);
    else
        ft_json_null(&json, "driver");
    ft_json_text(&json, "command", r->command);
    ft_json_text(&json, "weights", "synthetic weights");
    ft_json_u64(&json, "seed", r->seed);
    ft_json_text(&json, "routing", r->routing);
    ft_json_text(&json, "ple", r->ple);
    ft_json_text(&json, "isa", r->isa);
    ft_json_u64(&json, "layers", r->layer_count);
    ft_json_u64(&json, "experts", r->expert_count);
    ft_json_u64(&json, "topk", r->topk);
    ft_json_f64(&json, "expert_bytes", r->expert_bytes);
    ft_json_u64(&json, "weight_bytes", r->made.bytes);
    ft_json_f64(&json, "fill_gbs", (double)r->made.bytes / r->made.seconds / 1e9);
    write_ceilings(&json, &r->ceilings);
    ft_json_open(&json, '[', "rows");
    for (uint32_t i = 0; i < r->row_count; i++)
        write_row(&json, r, &r->rows[i]);
    ft_json_close(&json, ']');
    ft_json_close(&json, '}');
    ft_json_end(&json);
}
