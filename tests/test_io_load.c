/* SPDX-License-Identifier: Apache-2.0 */
#include "io/bind.h"
#include "io/load.h"
#include "io/quantise.h"
#include "io_refusal.h"
#include "test.h"

static const char *const names_[] = {"ft-tiny",
                                     "fixtures/gpt_oss-mxfp4",
                                     "fixtures/qwen3_5_moe-bf16",
                                     "fixtures/qwen3_moe-bf16",
                                     "fixtures/qwen3_moe-bf16-sharded-tied",
                                     "fixtures/qwen3_moe-fp8_block",
                                     "fixtures/qwen3_moe-nvfp4-compressed_tensors",
                                     "fixtures/qwen4_exp-bf16",
                                     "fixtures/qwen4_exp-nvfp4-modelopt"};
#define NAMES (sizeof names_ / sizeof names_[0])

static struct ft_checkpoint *open_checkpoint(const char *dir)
{
    struct ft_checkpoint *checkpoint = NULL;
    struct ft_error err;
    CHECK_OK(ft_checkpoint_open(&checkpoint, dir, &err), &err);
    if (!checkpoint)
        abort();
    return checkpoint;
}

static struct ft_checkpoint *open_data(const char *name)
{
    char dir[512];
    snprintf(dir, sizeof dir, "%s/%s", FT_DATA_DIR, name);
    return open_checkpoint(dir);
}

/* ---- an independent loader: whole parts, one pread each, converted element by element ---- */

static float number_of(const unsigned char *at, uint8_t convert)
{
    float value;
    if (convert == FT_LOAD_F32_RECIPROCAL) {
        memcpy(&value, at, 4);
        return 1 / value;
    }
    uint16_t bits = (uint16_t)(at[0] | at[1] << 8);
    if (convert == FT_LOAD_F16_TO_F32) {
        int exponent = bits >> 10 & 31, mantissa = bits & 1023;
        double half = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
        return (float)copysign(half, bits & 0x8000 ? -1 : 1);
    }
    uint32_t wide = (uint32_t)bits << 16;
    memcpy(&value, &wide, 4);
    return convert == FT_LOAD_BF16_RECIPROCAL ? 1 / value : value;
}

static int part_differs(const struct ft_load_part *part, const unsigned char *source, const char *base)
{
    uint64_t row_bytes = part->row_bytes ? part->row_bytes : part->bytes;
    uint64_t in = part->convert == FT_LOAD_COPY ? 1 : part->convert == FT_LOAD_F32_RECIPROCAL ? 4 : 2;
    uint64_t out = part->convert == FT_LOAD_COPY ? 1 : 4;
    for (uint64_t row = 0; row * row_bytes < part->bytes; row++) {
        bool odd = part->row_bytes && row % 2;
        const char *to = base + (odd ? part->destination_odd : part->destination) +
                         (part->row_bytes ? row / 2 : 0) * (row_bytes / in * out);
        const unsigned char *from = source + row * row_bytes;
        if (part->convert == FT_LOAD_COPY) {
            if (memcmp(to, from, row_bytes) != 0)
                return 1;
            continue;
        }
        for (uint64_t i = 0; i < row_bytes / in; i++) {
            float wanted = number_of(from + i * in, part->convert);
            if (memcmp(to + i * out, &wanted, sizeof wanted) != 0)
                return 1;
        }
    }
    return 0;
}

/* Every part of the loaded arena against the files; returns how many differ. */
static int count_different(const struct ft_checkpoint *checkpoint, const struct ft_loaded *loaded)
{
    struct ft_error err;
    struct ft_bind *bind;
    int different = 0;
    if (ft_bind_open(&bind, checkpoint, 0, &err))
        return -1;
    const struct ft_load_part *parts = ft_bind_parts(bind);
    for (uint32_t p = 0; p < ft_bind_part_count(bind); p++) {
        unsigned char *source = malloc(parts[p].bytes + 1);
        int fd = open(ft_checkpoint_file_path(checkpoint, parts[p].file), O_RDONLY);
        if (pread(fd, source, parts[p].bytes, (off_t)parts[p].offset) != (ssize_t)parts[p].bytes)
            different += 1000000;
        else
            different += part_differs(&parts[p], source, loaded->arena.base);
        close(fd);
        free(source);
    }
    if (ft_bind_part_count(bind) == 0 || loaded->arena.used != ft_bind_arena_bytes(bind))
        different += 1000000;
    ft_bind_close(bind);
    return different;
}

static void check_load(const char *name, const struct ft_load_options *options)
{
    struct ft_error err;
    struct ft_loaded loaded;
    struct ft_load_stats stats;
    struct ft_checkpoint *checkpoint = open_data(name);
    CHECK_OK(ft_load(checkpoint, options, &loaded, &stats, &err), &err);
    CHECK_EQ(count_different(checkpoint, &loaded), 0);
    CHECK(stats.bytes > 0 && stats.ns > 0);
    if (options && options->backend != FT_IO_AUTO)
        CHECK_EQ(stats.backend, options->backend);
    /* one matrix by its name, without the part list */
    const struct ft_tensor *embed = ft_checkpoint_find(checkpoint, "embed_tokens.weight");
    REQUIRE(embed && embed->dtype == FT_DTYPE_BF16);
    CHECK_EQ(loaded.weights.embed.format, FT_FORMAT_BF16);
    char *bytes = malloc(embed->bytes);
    int fd = open(ft_checkpoint_file_path(checkpoint, embed->file), O_RDONLY);
    CHECK_EQ(pread(fd, bytes, embed->bytes, (off_t)embed->offset), embed->bytes);
    CHECK(memcmp(bytes, loaded.weights.embed.data, embed->bytes) == 0);
    close(fd);
    free(bytes);
    struct ft_weight_sizes sizes;
    CHECK_OK(ft_load_sizes(checkpoint, 0, &sizes, &err), &err);
    CHECK(memcmp(&sizes, &loaded.sizes, sizeof sizes) == 0);
    ft_loaded_fini(&loaded);
    CHECK(loaded.arena.base == NULL);
    ft_checkpoint_close(checkpoint);
}

TEST(every_checkpoint_is_loaded_byte_for_byte)
{
    for (size_t i = 0; i < NAMES; i++)
        check_load(names_[i], NULL);
}

TEST(depths_and_backends_give_the_same_bytes)
{
    static const uint32_t depths[] = {1, 2, 64};
    for (int backend = FT_IO_AUTO; backend < FT_IO_BACKEND_COUNT; backend += 2)
        for (int d = 0; d < 3; d++) {
            struct ft_load_options options = {.backend = (enum ft_io_backend)backend, .depth = depths[d]};
            check_load("ft-tiny", &options);
            check_load("fixtures/gpt_oss-mxfp4", &options);
        }
}

static int child_loads(void)
{
    struct ft_error err;
    struct ft_loaded loaded;
    struct ft_load_stats stats;
    struct ft_checkpoint *checkpoint = open_data("ft-tiny");
    CHECK_OK(ft_load(checkpoint, NULL, &loaded, &stats, &err), &err);
    CHECK_EQ(count_different(checkpoint, &loaded), 0);
    CHECK(strstr(stats.note, "io_uring refused") || (!stats.direct && strstr(stats.note, "O_DIRECT")));
    ft_loaded_fini(&loaded);
    ft_checkpoint_close(checkpoint);
    return test_failures_ != 0;
}

TEST(refused_rings_and_refused_direct_reads_cost_nothing_but_speed)
{
    int code = run_in_child(refuse_io_uring, EPERM, child_loads);
    CHECK(code == 0 || code == 77);
    code = run_in_child(refuse_direct, EINVAL, child_loads);
    CHECK(code == 0 || code == 77);
}

/* ---- quantised while it is loaded ---- */

/* The fp8_block matrix is what the stored one gives at one go. */
static void check_quantised(const struct ft_matrix *got, const struct ft_matrix *stored)
{
    if (!stored->data || (stored->format != FT_FORMAT_BF16 && stored->format != FT_FORMAT_F32)) {
        CHECK_EQ(got->format, stored->format);
        return;
    }
    uint64_t count = (uint64_t)stored->out * stored->in;
    uint64_t scales = ft_div_up(stored->out, FT_QUANTISE_BLOCK) * ft_div_up(stored->in, FT_QUANTISE_BLOCK);
    uint8_t *data = malloc(count);
    float *scale = malloc(scales * sizeof *scale);
    CHECK(ft_quantise_fp8(stored->data, stored->format, stored->out, stored->in, data, scale));
    CHECK_EQ(got->format, FT_FORMAT_FP8_BLOCK);
    CHECK(got->out == stored->out && got->in == stored->in);
    CHECK(got->block_out == FT_QUANTISE_BLOCK && got->block_in == FT_QUANTISE_BLOCK);
    CHECK(memcmp(got->data, data, count) == 0);
    CHECK(memcmp(got->scale, scale, scales * sizeof *scale) == 0);
    free(data);
    free(scale);
}

static void check_layer(const struct ft_layer_weights *got, const struct ft_layer_weights *stored)
{
    check_quantised(&got->attention_mix.down, &stored->attention_mix.down);
    check_quantised(&got->mlp_mix.up, &stored->mlp_mix.up);
    check_quantised(&got->attention.q, &stored->attention.q);
    check_quantised(&got->attention.o, &stored->attention.o);
    check_quantised(&got->linear.qkv, &stored->linear.qkv);
    check_quantised(&got->linear.out, &stored->linear.out);
    check_quantised(&got->ple.key, &stored->ple.key);
    check_quantised(&got->shared.down, &stored->shared.down);
    check_quantised(&got->dense.gate, &stored->dense.gate);
    CHECK_EQ(got->router.format, stored->router.format);
    CHECK_EQ(got->attention.index_qk.format, stored->attention.index_qk.format);
    CHECK_EQ(got->linear.a.format, stored->linear.a.format);
    CHECK_EQ(got->attention_mix.inject.format, stored->attention_mix.inject.format);
    CHECK_EQ(got->shared_gate.format, stored->shared_gate.format);
}

static void check_fp8_load(const char *name, uint32_t depth)
{
    struct ft_error err;
    struct ft_loaded stored, fp8;
    struct ft_weight_sizes sizes;
    struct ft_checkpoint *checkpoint = open_data(name);
    const struct ft_model *model = ft_checkpoint_model(checkpoint);
    const struct ft_load_options options = {.depth = depth, .fp8_uses = FT_FP8_USES};
    CHECK_OK(ft_load(checkpoint, NULL, &stored, NULL, &err), &err);
    CHECK_OK(ft_load(checkpoint, &options, &fp8, NULL, &err), &err);
    REQUIRE(stored.arena.base && fp8.arena.base);
    if (!model->tied)
        check_quantised(&fp8.weights.head, &stored.weights.head);
    CHECK_EQ(fp8.weights.embed.format, FT_FORMAT_BF16);
    for (uint32_t i = 0; i < model->layer_count; i++) {
        check_layer(&fp8.weights.layers[i], &stored.weights.layers[i]);
        if (!model->layers[i].dense) /* experts are no concern of it */
            CHECK(memcmp(fp8.weights.layers[i].experts, stored.weights.layers[i].experts,
                         (uint64_t)model->expert_count * stored.weights.layers[i].expert_layout.stride) == 0);
    }
    CHECK_OK(ft_load_sizes(checkpoint, FT_FP8_USES, &sizes, &err), &err);
    CHECK(memcmp(&sizes, &fp8.sizes, sizeof sizes) == 0);
    CHECK_EQ(sizes.dense, FT_DENSE_TO_FP8);
    CHECK(sizes.dense_bytes + sizes.head_bytes <= stored.sizes.dense_bytes + stored.sizes.head_bytes);
    CHECK_EQ(sizes.embed_bytes, stored.sizes.embed_bytes);
    ft_loaded_fini(&stored);
    ft_loaded_fini(&fp8);
    ft_checkpoint_close(checkpoint);
}

TEST(dense_matrices_are_quantised_as_if_at_one_go)
{
    static const uint32_t depths[] = {1, 2, 64};
    for (size_t i = 0; i < NAMES; i++)
        check_fp8_load(names_[i], 0);
    for (int d = 0; d < 3; d++)
        check_fp8_load("ft-tiny", depths[d]);
}

/* ---- progress, cancelling, damage ---- */

struct watch {
    uint32_t calls, calls_at_end, stop_at; /* stop_at: cancel at this call; 0 = never */
    uint64_t last, total;
    bool went_back;
    const char *cut; /* file to cut at the first call */
};

static bool watch_progress(void *context, uint64_t done_bytes, uint64_t total_bytes)
{
    struct watch *watch = context;
    watch->calls++;
    watch->went_back = watch->went_back || done_bytes < watch->last || done_bytes > total_bytes;
    watch->calls_at_end += done_bytes == total_bytes;
    watch->last = done_bytes;
    watch->total = total_bytes;
    if (watch->cut && watch->calls == 1 && truncate(watch->cut, 4096 * 100) != 0)
        abort();
    return watch->calls != watch->stop_at;
}

TEST(progress_rises_and_ends_once_at_the_total)
{
    struct ft_error err;
    struct ft_loaded loaded;
    struct ft_checkpoint *checkpoint = open_data("ft-tiny");
    for (int i = 0; i < 5; i++) {
        struct watch watch = {0};
        struct ft_load_options options = {.progress = watch_progress, .progress_context = &watch};
        CHECK_OK(ft_load(checkpoint, &options, &loaded, NULL, &err), &err);
        CHECK(watch.calls >= 1 && watch.calls_at_end == 1 && !watch.went_back && watch.last == watch.total);
        ft_loaded_fini(&loaded);
    }
    ft_checkpoint_close(checkpoint);
}

TEST(cancelling_leaves_nothing)
{
    struct ft_error err;
    struct ft_loaded loaded;
    struct ft_checkpoint *checkpoint = open_data("ft-tiny");
    for (int backend = FT_IO_AUTO; backend < FT_IO_BACKEND_COUNT; backend += 2) {
        struct watch watch = {.stop_at = 1};
        struct ft_load_options options = {
            .backend = (enum ft_io_backend)backend, .progress = watch_progress, .progress_context = &watch};
        CHECK_FAILS(ft_load(checkpoint, &options, &loaded, NULL, &err), FT_CANCELLED, "cancelled", &err);
        CHECK(watch.calls == 1 && loaded.arena.base == NULL && loaded.weights.layers == NULL);
    }
    ft_checkpoint_close(checkpoint);
}

static void copy_tiny(char *dir, size_t size)
{
    char command[1024];
    snprintf(dir, size, "test_io_load.%ld", (long)getpid());
    snprintf(command, sizeof command, "rm -rf %s && cp -rL '%s/ft-tiny' %s && chmod -R u+w %s", dir,
             FT_DATA_DIR, dir, dir);
    if (system(command) != 0)
        abort();
}

static void remove_tiny(const char *dir)
{
    char command[256];
    snprintf(command, sizeof command, "rm -rf %s", dir);
    if (system(command) != 0)
        abort();
}

TEST(files_cut_before_or_while_they_are_loaded_are_named)
{
    struct ft_error err;
    struct ft_loaded loaded;
    char dir[64], path[160];
    for (int backend = FT_IO_AUTO; backend < FT_IO_BACKEND_COUNT; backend += 2) {
        copy_tiny(dir, sizeof dir);
        snprintf(path, sizeof path, "%s/model-00002-of-00002.safetensors", dir);
        struct ft_checkpoint *checkpoint = open_checkpoint(dir);
        struct watch watch = {.cut = path};
        struct ft_load_options options = {.backend = (enum ft_io_backend)backend,
                                          .depth = 1,
                                          .progress = watch_progress,
                                          .progress_context = &watch};
        CHECK_FAILS(ft_load(checkpoint, &options, &loaded, NULL, &err), FT_IO, "ends at byte", &err);
        CHECK(strstr(err.message, path) && strstr(err.message, "tensor ") && strstr(err.message, "8926452"));
        CHECK(loaded.arena.base == NULL);
        watch.cut = NULL;
        CHECK_FAILS(ft_load(checkpoint, &options, &loaded, NULL, &err), FT_IO, "8926452", &err);
        ft_checkpoint_close(checkpoint);
        remove_tiny(dir);
    }
}

TEST(a_damaged_number_is_found_and_named)
{
    struct ft_error err;
    struct ft_loaded loaded;
    char dir[64];
    copy_tiny(dir, sizeof dir);
    struct ft_checkpoint *checkpoint = open_checkpoint(dir);
    const struct ft_tensor *tensor = ft_checkpoint_find(checkpoint, "embed_tokens.weight");
    REQUIRE(tensor && tensor->dtype == FT_DTYPE_BF16);
    static const unsigned char nan[2] = {0xc0, 0x7f};
    int fd = open(ft_checkpoint_file_path(checkpoint, tensor->file), O_WRONLY);
    CHECK_EQ(pwrite(fd, nan, 2, (off_t)(tensor->offset + tensor->bytes - 2)), 2);
    close(fd);
    CHECK_FAILS(ft_load(checkpoint, NULL, &loaded, NULL, &err), FT_NUMERIC, "embed_tokens.weight", &err);
    CHECK(loaded.arena.base == NULL);
    ft_checkpoint_close(checkpoint);
    remove_tiny(dir);
}

TEST(damage_in_a_matrix_that_is_quantised_is_named)
{
    struct ft_error err;
    struct ft_loaded loaded;
    char dir[64];
    copy_tiny(dir, sizeof dir);
    struct ft_checkpoint *checkpoint = open_checkpoint(dir);
    const struct ft_load_options options = {.fp8_uses = FT_FP8_USES};
    const struct ft_tensor *tensor = ft_checkpoint_find(checkpoint, "lm_head.weight");
    REQUIRE(tensor && tensor->dtype == FT_DTYPE_BF16);
    static const unsigned char infinity[2] = {0x80, 0x7f};
    int fd = open(ft_checkpoint_file_path(checkpoint, tensor->file), O_WRONLY);
    CHECK_EQ(pwrite(fd, infinity, 2, (off_t)(tensor->offset + 246)), 2);
    close(fd);
    CHECK_FAILS(ft_load(checkpoint, &options, &loaded, NULL, &err), FT_NUMERIC,
                "lm_head.weight: element 123 ", &err);
    CHECK(loaded.arena.base == NULL);
    ft_checkpoint_close(checkpoint);
    remove_tiny(dir);
}

TEST_MAIN(RUN(every_checkpoint_is_loaded_byte_for_byte) RUN(dense_matrices_are_quantised_as_if_at_one_go)
              RUN(damage_in_a_matrix_that_is_quantised_is_named) RUN(depths_and_backends_give_the_same_bytes)
                  RUN(refused_rings_and_refused_direct_reads_cost_nothing_but_speed)
                      RUN(progress_rises_and_ends_once_at_the_total) RUN(cancelling_leaves_nothing)
                          RUN(files_cut_before_or_while_they_are_loaded_are_named)
                              RUN(a_damaged_number_is_found_and_named))
