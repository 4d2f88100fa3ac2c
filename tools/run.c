/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/run.h"

#include <errno.h>
#include <string.h>

int ft_run_begin(struct ft_run *run, const struct ft_run_options *options, bool chat, struct ft_error *err)
{
    char path[4200];
    memset(run, 0, sizeof *run);
    run->options = options;
    int status = ft_engine_find_dir(&options->open, run->dir, sizeof run->dir, err);
    if (status != FT_OK)
        return status;
    snprintf(path, sizeof path, "%s/tokenizer.json", run->dir);
    status = ft_tokenizer_open(&run->tokenizer, path, err);
    if (status == FT_OK && chat) {
        status = ft_chat_open(&run->chat, run->dir, run->tokenizer, err);
        if (status != FT_OK)
            ft_error_prepend(err, "--chat");
    }
    if (status == FT_OK)
        status = ft_generation_config_read(&run->config, run->dir, err);
    if (status == FT_OK) {
        ft_generate_resolve(&options->generate, &run->config, &run->sampling);
        if (options->open.plan.deterministic && !options->generate.seed_given)
            run->sampling.seed = 0; /* a drawn seed would not be the same twice */
    } else {
        ft_tokenizer_close(run->tokenizer);
        run->tokenizer = NULL;
    }
    return status;
}

/* No pool holds so many: said with the numbers that were given, before anything is clamped. */
static int check_tokens(const struct ft_run *run, uint64_t tokens_each, uint32_t sequences,
                        struct ft_error *err)
{
    const struct ft_generate_options *generate = &run->options->generate;
    uint64_t each = FT_MAX(tokens_each, (uint64_t)generate->max_tokens),
             all = run->options->open.plan.kv_tokens ? each : each * sequences;
    if (!generate->max_tokens_given || all <= FT_KV_TOKENS_MAX)
        return FT_OK;
    return ft_error_set(
        err, FT_LIMIT,
        "--max-tokens %u: %u %s of %llu tokens each, prompt and reply, want a KV pool of %llu "
        "tokens, and none has more than %u: lower it",
        generate->max_tokens, sequences, sequences == 1 ? "sequence" : "sequences", (unsigned long long)each,
        (unsigned long long)all, FT_KV_TOKENS_MAX);
}

int ft_run_open_engine(struct ft_run *run, uint64_t tokens_each, uint32_t sequences, struct ft_error *err)
{
    struct ft_open_options open = run->options->open;
    open.model = run->dir; /* found, and announced, before */
    int status = check_tokens(run, tokens_each, sequences, err);
    if (status != FT_OK)
        return status;
    ft_open_options_want_kv(&open, tokens_each, sequences);
    status = ft_engine_open(&run->engine, &open, err);
    /* The plan's advice speaks of --kv-tokens, which nobody gave. */
    if (status == FT_MEMORY && open.plan.kv_tokens != run->options->open.plan.kv_tokens)
        ft_error_prepend(err, "%s a KV pool of %u tokens",
                         run->options->generate.max_tokens_given ? "the prompt and --max-tokens want"
                                                                 : "the prompt wants",
                         open.plan.kv_tokens);
    return status;
}

uint32_t ft_run_max_tokens(const struct ft_run *run, uint32_t prompt_count, uint32_t sequences)
{
    const struct ft_plan *plan = &run->engine.plan;
    if (run->options->generate.max_tokens_given)
        return run->options->generate.max_tokens;
    uint32_t limit = plan->page_count / FT_MAX(sequences, 1u) * plan->page_tokens;
    if (run->engine.model->position_max)
        limit = FT_MIN(limit, run->engine.model->position_max);
    /* A prompt beyond the pool asks for one token, so that the session says what is wrong. */
    return limit > prompt_count ? FT_MIN(limit - prompt_count, FT_REPLY_TOKENS_DEFAULT) : 1;
}

int ft_run_end(struct ft_run *run, struct ft_error *err)
{
    int status = ft_engine_close(&run->engine, err);
    ft_tokenizer_close(run->tokenizer);
    run->tokenizer = NULL;
    return status;
}

bool ft_run_write_stdout(void *context, const char *text, size_t bytes)
{
    int *failure = context;
    errno = 0;
    if (fwrite(text, 1, bytes, stdout) == bytes && fflush(stdout) == 0)
        return true;
    *failure = errno ? errno : EIO;
    return false;
}
