/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/summary.h"

#include <string.h>

#define SHARE_MIN 0.005 /* of all thread time: below it a line says nothing */

void ft_summary_add(struct ft_summary *summary, const struct ft_sequence_info *info)
{
    summary->sequence_count++;
    summary->prompt_tokens += info->prompt_count;
    summary->reused_tokens += info->reused_count;
    summary->new_tokens += info->token_count - info->prompt_count;
    if (info->first_token_ns) {
        double ns = (double)(info->first_token_ns - info->submit_ns);
        summary->first_token_ns = FT_MAX(summary->first_token_ns, ns);
    }
}

static double per_second(double count, double ns)
{
    return ns > 0 ? count / ns * 1e9 : 0;
}

/* "12.3 ms" and the like. */
static const char *format_ns(double ns, char *text, size_t cap)
{
    if (ns < 1e6)
        snprintf(text, cap, "%.1f us", ns / 1e3);
    else if (ns < 1e9)
        snprintf(text, cap, "%.1f ms", ns / 1e6);
    else
        snprintf(text, cap, "%.2f s", ns / 1e9);
    return text;
}

static double decode_per_second(const struct ft_session_stats *stats)
{
    return per_second((double)(stats->decode_rows - stats->mixed_rows), stats->decode_ns);
}

static double wait_total(const struct ft_session_stats *stats)
{
    double ns = 0;
    for (uint32_t lane = 0; lane < FT_LANE_COUNT; lane++)
        for (uint32_t wait = 0; wait < FT_WAIT_COUNT; wait++)
            ns += stats->wait_ns[lane][wait];
    return ns;
}

static double class_total(const struct ft_session_stats *stats)
{
    double ns = 0;
    for (uint32_t c = 0; c < FT_CLASS_COUNT; c++)
        ns += stats->class_ns[c];
    return ns;
}

static void print_speed(const struct ft_summary *summary, const struct ft_engine *engine,
                        const struct ft_session_stats *stats, FILE *out)
{
    char a[32], b[32], c[32];
    fprintf(out, "load    %s in %s (%.2f GB/s%s)\n", ft_options_format_bytes(engine->load.bytes, a, sizeof a),
            format_ns((double)engine->load.ns, b, sizeof b),
            (double)engine->load.bytes / FT_MAX(1.0, (double)engine->load.ns),
            engine->load.direct ? ", direct" : "");
    fprintf(out, "prompt  %u tokens", summary->prompt_tokens);
    if (summary->reused_tokens)
        fprintf(out, ", %u of them from a snapshot", summary->reused_tokens);
    fprintf(out, ", %.1f tok/s", per_second((double)stats->prefill_rows, stats->prefill_ns));
    if (summary->first_token_ns > 0)
        fprintf(out, ", first token after %s", format_ns(summary->first_token_ns, c, sizeof c));
    enum ft_isa isa = ft_session_isa(engine->session);
    bool exact = ft_isa_rounds(isa) && !ft_activation_takes_int8(engine->model->activation);
    fprintf(out, "\ndecode  %u tokens, %.1f tok/s (%s, %s%s, %u workers%s)\n", summary->new_tokens,
            decode_per_second(stats), ft_strategy_name(engine->plan.strategy), ft_isa_name(isa),
            exact ? " but f32 for the gates of this model" : "", engine->plan.workers,
            engine->plan.device == FT_DEVICE_HOST ? ", host device" : "");
}

static void print_classes(const struct ft_session_stats *stats, double all, FILE *out)
{
    fprintf(out, "time   ");
    for (uint32_t c = 0; c < FT_CLASS_COUNT; c++) {
        if (stats->class_ns[c] < SHARE_MIN * all)
            continue;
        if (c != FT_CLASS_EXPERT) {
            fprintf(out, " %s %.0f%%", ft_class_name((enum ft_class)c), 100 * stats->class_ns[c] / all);
            continue;
        }
        for (uint32_t lane = 0; lane < FT_LANE_COUNT; lane++)
            if (stats->expert_ns[lane] >= SHARE_MIN * all)
                fprintf(out, " experts-on-%s %.0f%%", ft_lane_name((enum ft_lane)lane),
                        100 * stats->expert_ns[lane] / all);
    }
    fprintf(out, " waiting %.0f%%\n", 100 * wait_total(stats) / all);
}

static void print_waits(const struct ft_session_stats *stats, double all, FILE *out)
{
    char text[32];
    const char *lead = "waiting ";
    for (uint32_t lane = 0; lane < FT_LANE_COUNT; lane++)
        for (uint32_t wait = 0; wait < FT_WAIT_COUNT; wait++) {
            double ns = stats->wait_ns[lane][wait];
            if (ns < SHARE_MIN * all)
                continue;
            fprintf(out, "%s%s for %s %s", lead, ft_lane_name((enum ft_lane)lane),
                    ft_wait_name((enum ft_wait)wait), format_ns(ns, text, sizeof text));
            lead = ", ";
        }
    if (lead[0] == ',')
        fputc('\n', out);
}

static void print_experts(const struct ft_session_stats *stats, FILE *out)
{
    char text[32];
    /* Every use ends in one of three places; what prefill stages counts as fetched. */
    uint64_t uses = stats->hits + stats->fetches + stats->cpu_experts;
    if (!uses)
        return;
    fprintf(out, "experts %llu used: %llu resident (%.1f%%), %llu fetched (%s%s), %llu on the CPU\n",
            (unsigned long long)uses, (unsigned long long)stats->hits,
            100.0 * (double)stats->hits / (double)uses, (unsigned long long)stats->fetches,
            ft_options_format_bytes(stats->fetch_bytes, text, sizeof text),
            stats->copied_ahead_used ? ", without those that had come ahead" : "",
            (unsigned long long)stats->cpu_experts);
}

static void print_extras(const struct ft_session_stats *stats, const struct ft_policy *policy, FILE *out)
{
    char text[32];
    if (policy->departures && stats->departures)
        fprintf(out,
                "replay  %llu choices were not as recorded: this is another run (other prompt, model, "
                "strategy or sizes)\n",
                (unsigned long long)stats->departures);
    else if (policy->departures)
        fprintf(out, "replay  every choice as recorded\n");
    if (stats->ple.rows_wanted)
        fprintf(out, "ple     %llu rows wanted, %llu distinct, %llu reads, %s\n",
                (unsigned long long)stats->ple.rows_wanted, (unsigned long long)stats->ple.rows_distinct,
                (unsigned long long)stats->ple.reads,
                ft_options_format_bytes(stats->ple.read_bytes, text, sizeof text));
    if (stats->prefetches)
        fprintf(out, "ahead   %llu experts copied ahead: %llu used (%llu waited for), %llu evicted unused\n",
                (unsigned long long)stats->prefetches, (unsigned long long)stats->prefetches_used,
                (unsigned long long)stats->prefetches_waited, (unsigned long long)stats->prefetches_wasted);
    if (stats->foreseen)
        fprintf(out,
                "ahead   %.1f%% of the experts foreseen for a next layer came; %llu copied ahead, %llu of "
                "them used\n",
                100.0 * (double)stats->foreseen_right / (double)stats->foreseen,
                (unsigned long long)stats->copied_ahead, (unsigned long long)stats->copied_ahead_used);
    if (stats->trace_dropped)
        fprintf(out, "trace   %llu records were dropped: rings full\n",
                (unsigned long long)stats->trace_dropped);
    if (stats->failed_steps)
        fprintf(out, "failed  %llu steps\n", (unsigned long long)stats->failed_steps);
}

void ft_summary_print(const struct ft_summary *summary, const struct ft_engine *engine, FILE *out)
{
    struct ft_session_stats stats;
    ft_session_stats(engine->session, &stats);
    double all = FT_MAX(1.0, class_total(&stats) + wait_total(&stats));
    print_speed(summary, engine, &stats, out);
    print_classes(&stats, all, out);
    print_waits(&stats, all, out);
    print_experts(&stats, out);
    print_extras(&stats, engine->policy, out);
}

/* ---- JSON ---- */

static void write_times(const struct ft_session_stats *stats, struct ft_json *json)
{
    ft_json_open(json, '{', "class_ns");
    for (uint32_t c = 0; c < FT_CLASS_COUNT; c++)
        ft_json_f64(json, ft_class_name((enum ft_class)c), stats->class_ns[c]);
    ft_json_close(json, '}');
    ft_json_open(json, '{', "expert_ns");
    for (uint32_t lane = 0; lane < FT_LANE_COUNT; lane++)
        if (stats->expert_ns[lane] > 0)
            ft_json_f64(json, ft_lane_name((enum ft_lane)lane), stats->expert_ns[lane]);
    ft_json_close(json, '}');
    ft_json_open(json, '{', "wait_ns");
    for (uint32_t lane = 0; lane < FT_LANE_COUNT; lane++) {
        ft_json_open(json, '{', ft_lane_name((enum ft_lane)lane));
        for (uint32_t wait = 0; wait < FT_WAIT_COUNT; wait++)
            if (stats->wait_ns[lane][wait] > 0)
                ft_json_f64(json, ft_wait_name((enum ft_wait)wait), stats->wait_ns[lane][wait]);
        ft_json_close(json, '}');
    }
    ft_json_close(json, '}');
}

static void write_counts(const struct ft_session_stats *stats, struct ft_json *json)
{
    ft_json_u64(json, "steps", stats->steps);
    ft_json_u64(json, "prefill_rows", stats->prefill_rows);
    ft_json_u64(json, "decode_rows", stats->decode_rows);
    ft_json_u64(json, "mixed_rows", stats->mixed_rows);
    ft_json_u64(json, "hits", stats->hits);
    ft_json_u64(json, "misses", stats->misses);
    ft_json_u64(json, "fetches", stats->fetches);
    ft_json_u64(json, "fetch_bytes", stats->fetch_bytes);
    ft_json_u64(json, "cpu_experts", stats->cpu_experts);
    ft_json_u64(json, "policy_repairs", stats->policy_repairs);
    ft_json_u64(json, "prefetches", stats->prefetches);
    ft_json_u64(json, "prefetches_used", stats->prefetches_used);
    ft_json_u64(json, "prefetches_waited", stats->prefetches_waited);
    ft_json_u64(json, "prefetches_wasted", stats->prefetches_wasted);
    ft_json_u64(json, "foreseen", stats->foreseen);
    ft_json_u64(json, "foreseen_right", stats->foreseen_right);
    ft_json_u64(json, "copied_ahead", stats->copied_ahead);
    ft_json_u64(json, "copied_ahead_used", stats->copied_ahead_used);
    ft_json_u64(json, "replay_departures", stats->departures);
    ft_json_u64(json, "jobs", stats->jobs);
    ft_json_u64(json, "stolen", stats->stolen);
    ft_json_u64(json, "trace_dropped", stats->trace_dropped);
    ft_json_u64(json, "snapshots_taken", stats->snapshots_taken);
    ft_json_u64(json, "snapshots_used", stats->snapshots_used);
    ft_json_u64(json, "failed_steps", stats->failed_steps);
    ft_json_u64(json, "ple_rows", stats->ple.rows_wanted);
    ft_json_u64(json, "ple_reads", stats->ple.reads);
    ft_json_u64(json, "ple_read_bytes", stats->ple.read_bytes);
}

/* Hits and misses of the slots, layer by layer. */
static void write_layers(const struct ft_engine *engine, struct ft_json *json)
{
    ft_json_open(json, '[', "layers");
    for (uint32_t i = 0; i < engine->model->layer_count; i++) {
        uint64_t hits, misses;
        ft_session_layer_stats(engine->session, i, &hits, &misses);
        ft_json_open(json, '{', NULL);
        ft_json_u64(json, "hits", hits);
        ft_json_u64(json, "misses", misses);
        ft_json_close(json, '}');
    }
    ft_json_close(json, ']');
}

void ft_summary_write_json(const struct ft_summary *summary, const struct ft_engine *engine,
                           struct ft_json *json, const char *key)
{
    struct ft_session_stats stats;
    ft_session_stats(engine->session, &stats);
    ft_json_open(json, '{', key);
    ft_json_text(json, "strategy", ft_strategy_name(engine->plan.strategy));
    ft_json_text(json, "device", ft_device_name(engine->plan.device));
    ft_json_text(json, "isa", ft_isa_name(ft_session_isa(engine->session)));
    ft_json_u64(json, "workers", engine->plan.workers);
    ft_json_u64(json, "slots", engine->plan.slot_count);
    ft_json_u64(json, "load_bytes", engine->load.bytes);
    ft_json_f64(json, "load_ms", (double)engine->load.ns / 1e6);
    ft_json_u64(json, "prompt_tokens", summary->prompt_tokens);
    ft_json_u64(json, "reused_tokens", summary->reused_tokens);
    ft_json_u64(json, "new_tokens", summary->new_tokens);
    ft_json_f64(json, "ttft_ms", summary->first_token_ns / 1e6);
    ft_json_f64(json, "prompt_tok_s", per_second((double)stats.prefill_rows, stats.prefill_ns));
    ft_json_f64(json, "decode_tok_s", decode_per_second(&stats));
    write_times(&stats, json);
    write_counts(&stats, json);
    if (engine->plan.device != FT_DEVICE_NONE)
        write_layers(engine, json);
    ft_json_close(json, '}');
}
