/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Matrix products over the words of vec_*.h: matmul, expert_up, expert_down, mix_up, row_decode.
 *
 * One dot product of a weight row with an activation row is always summed in the same way, which is what
 * makes every op batch invariant:
 *
 *     columns   | chunk 0 (8 vectors) | chunk 1 | ... | last chunk, padded with zeros |
 *     chunk     t = (w0 x0 + w2 x2 + w4 x4 + w6 x6) + (w1 x1 + w3 x3 + w5 x5 + w7 x7)     lane by lane
 *     row       acc += t * scale     (per lane; a lane never crosses a scale block)
 *     at last   sum of the lanes * factor
 *
 * Up to ROWS activation rows share the decoded weights. Activations are read in place, or, for packed e2m1,
 * from a copy on the stack in the order of the decoder.
 */
#include "kernels_cpu/kernels_internal.h"
#include "kernels_cpu/vec_math.h"

#define ROWS 4
#define TILE 128           /* most output rows at a time */
#define PANEL_COLUMNS 4096 /* of the packed copy; longer rows are taken in parts of this many */
#define PIECE_COLUMNS 1024 /* of 4 rows: what stays in the nearest cache while weights pass by */
_Static_assert(PANEL_COLUMNS % PIECE_COLUMNS == 0 && PIECE_COLUMNS % VF_CHUNK == 0,
               "pieces are whole chunks");
#define INLINE static inline __attribute__((always_inline))

/* How the weights of a chunk come to vectors. */
enum kind { KIND_F32, KIND_BF16, KIND_FP8, KIND_FP8_ODD, KIND_NVFP4, KIND_MXFP4, KIND_COUNT };

/* ROWS activation rows over columns [begin, end). */
struct panel {
    const float *full[ROWS]; /* whole chunks, from column `begin` on */
    const float *last[ROWS]; /* the last chunk when it is partial, padded with zeros */
    uint32_t begin, end, first_row, rows;
    _Alignas(64) float tail[ROWS][VF_CHUNK];
    _Alignas(64) float packed[ROWS][PANEL_COLUMNS];
};

/* Scales that do not change inside a chunk come as `scale`; 1 where the format has none. */
struct chunk {
    vf w[8];
    struct vweights packed; /* instead of w, for packed e2m1 */
    vf scale;
};

static enum kind kind_of(const struct ft_matrix *w)
{
    switch (w->format) {
    case FT_FORMAT_F32:
        return KIND_F32;
    case FT_FORMAT_BF16:
        return KIND_BF16;
    case FT_FORMAT_FP8_BLOCK:
        return w->block_in % VF_CHUNK == 0 ? KIND_FP8 : KIND_FP8_ODD;
    case FT_FORMAT_NVFP4:
        return KIND_NVFP4;
    default:
        return KIND_MXFP4;
    }
}

static bool is_packed(enum kind kind)
{
    return kind == KIND_NVFP4 || kind == KIND_MXFP4;
}

/* e4m3 comes as 2^-8 of its value from vf_load_e4m3 and vf_scales_nvfp4*. */
static float factor_of(const struct ft_matrix *w, enum kind kind)
{
    if (kind == KIND_NVFP4)
        return w->global * 256.0f;
    return kind == KIND_FP8 ? 256.0f : 1.0f;
}

/* fp8 blocks that cut chunks: every value is scaled by itself. */
static void decode_fp8_odd(const struct ft_matrix *w, uint32_t o, uint32_t column, uint32_t count, float *out)
{
    const uint8_t *data = (const uint8_t *)w->data + (size_t)o * w->in + column;
    const float *scale = (const float *)w->scale + o / w->block_out * ft_div_up(w->in, w->block_in);
    for (uint32_t i = 0; i < VF_CHUNK; i++)
        out[i] = i < count ? ft_e4m3_values[data[i]] * scale[(column + i) / w->block_in] : 0.0f;
}

/* Where the next chunk of a weight row lies. */
struct cursor {
    const uint8_t *data, *scale;
    uint32_t column;
    uint32_t block_left; /* fp8: chunks before the next scale */
};

INLINE struct cursor cursor_at(enum kind kind, const struct ft_matrix *w, uint32_t o, uint32_t column)
{
    size_t at = (size_t)o * w->in + column;
    struct cursor c = {.data = w->data, .scale = w->scale, .column = column};
    switch (kind) {
    case KIND_F32:
        c.data += at * sizeof(float);
        break;
    case KIND_BF16:
        c.data += at * sizeof(uint16_t);
        break;
    case KIND_FP8:
        c.data += at;
        c.scale += (o / w->block_out * ft_div_up(w->in, w->block_in) + column / w->block_in) * sizeof(float);
        c.block_left = (w->block_in - column % w->block_in) / VF_CHUNK;
        break;
    case KIND_FP8_ODD:
        break;
    default:
        c.data += at / 2;
        c.scale += at / (kind == KIND_NVFP4 ? 16 : 32);
    }
    return c;
}

/* Weights are asked for this far ahead, across the ends of rows: the prefetchers of the core stop at pages.
 */
#define AHEAD 4096
INLINE void prefetch(const uint8_t *data, uint32_t bytes)
{
    for (uint32_t i = 0; i < bytes; i += 64)
        __builtin_prefetch(data + AHEAD + i);
}

/* Loads the next VF_CHUNK columns, of which `count` exist. Partial chunks go through a zeroed copy. */
INLINE void load_chunk(enum kind kind, bool plain, const struct ft_matrix *w, uint32_t o, struct cursor *c,
                       uint32_t count, struct chunk *chunk, vcodes *seen)
{
    float copy[VF_CHUNK];
    uint8_t scale_copy[VF_CHUNK / 16] = {0};
    const uint8_t *data = c->data, *scale = c->scale;
    uint32_t bytes = kind == KIND_F32 ? VF_CHUNK * 4 : kind == KIND_BF16 ? VF_CHUNK * 2 : VF_CHUNK;
    bool partial = count < VF_CHUNK;
    if (is_packed(kind))
        bytes = VF_CHUNK / 2;
    if (kind != KIND_FP8_ODD) {
        if (partial) {
            memset(copy, 0, sizeof copy);
            data = memcpy(copy, data, count * (size_t)bytes / VF_CHUNK);
        } else {
            prefetch(data, bytes);
        }
    }
    switch (kind) {
    case KIND_F32:
        for (int j = 0; j < 8; j++)
            chunk->w[j] = vf_load((const float *)(const void *)data + j * VF);
        break;
    case KIND_BF16:
        for (int j = 0; j < 8; j++)
            chunk->w[j] = vf_load_bf16((const uint16_t *)(const void *)data + j * VF);
        break;
    case KIND_FP8:
        vf_load_e4m3(data, chunk->w, seen);
        chunk->scale = vf_set1(*(const float *)(const void *)scale);
        if (--c->block_left == 0) {
            c->block_left = w->block_in / VF_CHUNK;
            c->scale += sizeof(float);
        }
        break;
    case KIND_FP8_ODD:
        decode_fp8_odd(w, o, c->column, count, copy);
        for (int j = 0; j < 8; j++)
            chunk->w[j] = vf_load(copy + j * VF);
        break;
    default: {
        uint32_t block = kind == KIND_NVFP4 ? 16 : 32;
        if (partial)
            scale = memcpy(scale_copy, scale, count / block);
        else
            __builtin_prefetch(scale + AHEAD / 4);
        vf_decode_e2m1(data, &chunk->packed);
        if (plain)
            chunk->scale = kind == KIND_NVFP4 ? vf_scales_nvfp4_plain(scale) : vf_scales_mxfp4_plain(scale);
        else
            chunk->scale = kind == KIND_NVFP4 ? vf_scales_nvfp4(scale, seen) : vf_scales_mxfp4(scale);
        c->scale += VF_CHUNK / block;
        break;
    }
    }
    c->data += bytes;
    c->column += VF_CHUNK;
}

INLINE vf chunk_dot(const struct chunk *chunk, const float *x)
{
    vf even = vf_mul(chunk->w[0], vf_load(x)), odd = vf_mul(chunk->w[1], vf_load(x + VF));
    for (int j = 2; j < 8; j += 2) {
        even = vf_fma(chunk->w[j], vf_load(x + j * VF), even);
        odd = vf_fma(chunk->w[j + 1], vf_load(x + (j + 1) * VF), odd);
    }
    return vf_add(even, odd);
}

INLINE void add_chunk(enum kind kind, const struct chunk *chunk, const float *const *x, uint32_t offset,
                      int rows, vf *acc)
{
    for (int r = 0; r < rows; r++) {
        vf t =
            is_packed(kind) ? vf_packed_dot(&chunk->packed, x[r] + offset) : chunk_dot(chunk, x[r] + offset);
        bool scaled = kind == KIND_FP8 || is_packed(kind);
        acc[r] = scaled ? vf_fma(t, chunk->scale, acc[r]) : vf_add(acc[r], t);
    }
}

/* The whole chunks of a row; left columns remain. All of kind, plain and rows are constants at every call. */
INLINE uint32_t add_chunks(enum kind kind, bool plain, int rows, const struct ft_matrix *w, uint32_t o,
                           const struct panel *panel, uint32_t left, struct cursor *cursor, vcodes *seen,
                           vf *sum)
{
    struct chunk chunk;
    uint32_t offset = cursor->column - panel->begin;
    for (; left >= VF_CHUNK; left -= VF_CHUNK, offset += VF_CHUNK) {
        load_chunk(kind, plain, w, o, cursor, VF_CHUNK, &chunk, seen);
        add_chunk(kind, &chunk, panel->full, offset, rows, sum);
    }
    return left;
}

/* Scale codes that need no care: for e4m3 positive numbers, for e8m0 neither NaN nor the subnormal. */
INLINE bool scales_are_plain(enum kind kind, const uint8_t *scale, uint32_t columns)
{
    return kind == KIND_NVFP4 ? vcodes_are_within(scale, columns / 16, 0, 0x7e)
                              : vcodes_are_within(scale, columns / 32, 1, 254);
}

/* Columns [begin, end) of a panel; begin is a whole number of chunks from the panel's. */
struct range {
    uint32_t begin, end;
};

/* Adds weight row o times the rows of the panel to acc, over a range of columns. */
INLINE void dot_rows(enum kind kind, int rows, const struct ft_matrix *w, uint32_t o,
                     const struct panel *panel, struct range range, vf *acc)
{
    vf sum[ROWS];
    struct chunk chunk;
    struct cursor cursor = cursor_at(kind, w, o, range.begin);
    vcodes seen = vcodes_none();
    uint32_t left = range.end - range.begin;
    for (int r = 0; r < rows; r++)
        sum[r] = acc[r];
    if (is_packed(kind) && scales_are_plain(kind, cursor.scale, left))
        left = add_chunks(kind, true, rows, w, o, panel, left, &cursor, &seen, sum);
    else
        left = add_chunks(kind, false, rows, w, o, panel, left, &cursor, &seen, sum);
    if (left) {
        load_chunk(kind, false, w, o, &cursor, left, &chunk, &seen);
        add_chunk(kind, &chunk, panel->last, 0, rows, sum);
    }
    bool nan = vcodes_have_nan(seen);
    for (int r = 0; r < rows; r++)
        acc[r] = nan ? vf_set1(__builtin_nanf("")) : sum[r];
}

typedef void dot_function(const struct ft_matrix *w, uint32_t o, uint32_t count, const struct panel *panel,
                          struct range range, vf (*acc)[ROWS]);
#define DOT(name, kind, rows)                                                                                \
    static void name(const struct ft_matrix *w, uint32_t o, uint32_t count, const struct panel *panel,       \
                     struct range range, vf(*acc)[ROWS])                                                     \
    {                                                                                                        \
        for (uint32_t i = 0; i < count; i++)                                                                 \
            dot_rows(kind, rows, w, o + i, panel, range, acc[i]);                                            \
    }
#define DOTS(name, kind)                                                                                     \
    DOT(name##_1, kind, 1) DOT(name##_2, kind, 2) DOT(name##_3, kind, 3) DOT(name##_4, kind, 4)
DOTS(dot_f32, KIND_F32)
DOTS(dot_bf16, KIND_BF16)
DOTS(dot_fp8, KIND_FP8)
DOTS(dot_fp8_odd, KIND_FP8_ODD)
DOTS(dot_nvfp4, KIND_NVFP4)
DOTS(dot_mxfp4, KIND_MXFP4)
#define DOT_ROW(name)                                                                                        \
    {                                                                                                        \
        name##_1, name##_2, name##_3, name##_4                                                               \
    }
static dot_function *const dots[KIND_COUNT][ROWS] = {
    [KIND_F32] = DOT_ROW(dot_f32),     [KIND_BF16] = DOT_ROW(dot_bf16),
    [KIND_FP8] = DOT_ROW(dot_fp8),     [KIND_FP8_ODD] = DOT_ROW(dot_fp8_odd),
    [KIND_NVFP4] = DOT_ROW(dot_nvfp4), [KIND_MXFP4] = DOT_ROW(dot_mxfp4)};

/* Makes the panel hold rows [first, first + rows) over columns [begin, end); nothing to do when it already
 * does. */
static void panel_fill(struct panel *panel, enum kind kind, const struct ft_rows *x, uint32_t first,
                       uint32_t rows, uint32_t begin, uint32_t end)
{
    if (panel->rows == rows && panel->first_row == first && panel->begin == begin && panel->end == end)
        return;
    panel->rows = rows;
    panel->first_row = first;
    panel->begin = begin;
    panel->end = end;
    uint32_t whole = (end - begin) / VF_CHUNK * VF_CHUNK, rest = end - begin - whole;
    for (uint32_t r = 0; r < rows; r++) {
        const float *row = ft_rows_get(x, first + r) + begin;
        panel->full[r] = row;
        panel->last[r] = panel->tail[r];
        memcpy(panel->tail[r], row + whole, rest * sizeof(float));
        memset(panel->tail[r] + rest, 0, (VF_CHUNK - rest) * sizeof(float));
        if (!is_packed(kind))
            continue;
        for (uint32_t i = 0; i < whole; i += VF_CHUNK)
            vf_pack_e2m1(row + i, panel->packed[r] + i);
        if (rest)
            vf_pack_e2m1(panel->tail[r], panel->packed[r] + whole);
        panel->full[r] = panel->packed[r];
        panel->last[r] = panel->packed[r] + whole;
    }
}

/* Output rows per tile: their weights stay in the second cache while batches of activation rows pass by. */
static uint32_t tile_step(const struct ft_matrix *w)
{
    return is_packed(kind_of(w)) ? TILE : TILE / 4;
}

/* out[r][i] = W[o + i] . x[first + r] for i < count <= TILE, r < rows <= ROWS. */
static void tile_dots(const struct ft_matrix *w, uint32_t o, uint32_t count, const struct ft_rows *x,
                      uint32_t first, uint32_t rows, struct panel *panel, float (*out)[TILE])
{
    enum kind kind = kind_of(w);
    uint32_t part = is_packed(kind) ? PANEL_COLUMNS : w->in;
    uint32_t piece = rows == 1 ? part : rows == 2 ? 2 * PIECE_COLUMNS : PIECE_COLUMNS;
    float factor = factor_of(w, kind);
    vf acc[TILE][ROWS];
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t r = 0; r < rows; r++)
            acc[i][r] = vf_zero();
    for (uint32_t begin = 0; begin < w->in; begin += part) {
        panel_fill(panel, kind, x, first, rows, begin, FT_MIN(w->in, begin + part));
        for (uint32_t at = begin; at < panel->end; at += piece) {
            struct range range = {at, FT_MIN(panel->end, at + piece)};
            dots[kind][rows - 1](w, o, count, panel, range, acc);
        }
    }
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t r = 0; r < rows; r++)
            out[r][i] = vf_sum(acc[i][r]) * factor;
}

static void store_row(float *y, const float *values, const float *bias, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        y[i] = bias ? values[i] + bias[i] : values[i];
}

static void matmul_to(const struct ft_matrix *w, uint32_t begin, uint32_t end, const struct ft_rows *x,
                      const float *bias, const uint32_t *out_index, float *y, size_t y_stride)
{
    struct panel panel;
    float out[ROWS][TILE];
    panel.rows = 0;
    uint32_t step = tile_step(w);
    for (uint32_t o = begin; o < end; o += step) {
        uint32_t count = FT_MIN(end - o, step);
        for (uint32_t first = 0; first < x->count; first += ROWS) {
            uint32_t rows = FT_MIN(x->count - first, ROWS);
            tile_dots(w, o, count, x, first, rows, &panel, out);
            for (uint32_t r = 0; r < rows; r++)
                store_row(y + (out_index ? out_index[first + r] : first + r) * y_stride + o, out[r],
                          bias ? bias + o : NULL, count);
        }
    }
}

static void matmul(const struct ft_matrix *w, uint32_t begin, uint32_t end, struct ft_rows x,
                   const float *bias, float *y, size_t y_stride)
{
    matmul_to(w, begin, end, &x, bias, NULL, y, y_stride);
}

static void expert_down(const struct ft_expert *expert, uint32_t begin, uint32_t end, struct ft_rows h,
                        const uint32_t *out_index, float *y, size_t y_stride)
{
    matmul_to(&expert->down, begin, end, &h, expert->down_bias, out_index, y, y_stride);
}

/* gate[] = act(gate, up) for one row of a tile; lanes beyond count hold anything finite or not, nobody reads
 * them. */
static void activate(const struct ft_expert *expert, uint32_t i, uint32_t count, float *gate, float *up)
{
    bool oss = expert->activation == FT_ACTIVATION_SWIGLU_OSS;
    if (expert->gate_bias)
        store_row(gate, gate, expert->gate_bias + i, count);
    if (expert->up_bias)
        store_row(up, up, expert->up_bias + i, count);
    for (uint32_t j = 0; j < count; j += VF) {
        vf g = vf_load(gate + j), u = vf_load(up + j);
        if (oss && expert->limit > 0) {
            vf limit = vf_set1(expert->limit);
            g = vf_min(limit, g); /* NaN in the second operand passes */
            u = vf_max(vf_sub(vf_zero(), limit), vf_min(limit, u));
        }
        vf s = vf_sigmoid(oss ? vf_mul(g, vf_set1(1.702f)) : g);
        if (oss)
            u = vf_add(u, vf_set1(1.0f));
        if (expert->activation != FT_ACTIVATION_SIGMOID)
            s = vf_mul(s, g);
        vf_store(gate + j, vf_mul(s, u));
    }
}

static void expert_up(const struct ft_expert *expert, uint32_t begin, uint32_t end, struct ft_rows x,
                      float *h, size_t h_stride)
{
    struct panel panel;
    float gate[ROWS][TILE] = {{0}}, up[ROWS][TILE] = {{0}};
    panel.rows = 0;
    uint32_t step = tile_step(&expert->gate);
    for (uint32_t i = begin; i < end; i += step) {
        uint32_t count = FT_MIN(end - i, step);
        for (uint32_t first = 0; first < x.count; first += ROWS) {
            uint32_t rows = FT_MIN(x.count - first, ROWS);
            tile_dots(&expert->gate, i, count, &x, first, rows, &panel, gate);
            tile_dots(&expert->up, i, count, &x, first, rows, &panel, up);
            for (uint32_t r = 0; r < rows; r++) {
                activate(expert, i, count, gate[r], up[r]);
                memcpy(h + (first + r) * h_stride + i, gate[r], count * sizeof(float));
            }
        }
    }
}

/* sum[j] += sigmoid(m[j]) u[j] for a tile; u is read only where it exists. */
static void mix_add(float *sum, const float *m, const float *u, uint32_t count)
{
    float copy[TILE] = {0};
    memcpy(copy, u, count * sizeof(float));
    for (uint32_t j = 0; j < count; j += VF)
        vf_store(sum + j, vf_fma(vf_sigmoid(vf_load(m + j)), vf_load(copy + j), vf_load(sum + j)));
}

static void mix_up(const struct ft_matrix *up, uint32_t hc_count, uint32_t hidden, uint32_t begin,
                   uint32_t end, const float *t, size_t t_stride, const float *u, size_t u_stride,
                   uint32_t rows, float *x, size_t x_stride)
{
    struct panel panel;
    struct ft_rows in = {.x = t, .stride = t_stride, .count = rows};
    float m[ROWS][TILE] = {{0}}, share = 1.0f / (float)hc_count;
    panel.rows = 0;
    uint32_t step = tile_step(up);
    for (uint32_t h = begin; h < end; h += step) {
        uint32_t count = FT_MIN(end - h, step);
        for (uint32_t first = 0; first < rows; first += ROWS) {
            uint32_t batch = FT_MIN(rows - first, ROWS);
            float sum[ROWS][TILE] = {{0}};
            for (uint32_t i = 0; i < hc_count; i++) {
                tile_dots(up, i * hidden + h, count, &in, first, batch, &panel, m);
                for (uint32_t r = 0; r < batch; r++)
                    mix_add(sum[r], m[r], u + (first + r) * u_stride + (size_t)i * hidden + h, count);
            }
            for (uint32_t r = 0; r < batch; r++)
                for (uint32_t j = 0; j < count; j++)
                    x[(first + r) * x_stride + h + j] = sum[r][j] * share;
        }
    }
}

static void row_decode(const struct ft_matrix *w, uint32_t row, float *y)
{
    if (w->format != FT_FORMAT_BF16) {
        ft_row_decode_ref(w, row, y);
        return;
    }
    const uint16_t *data = (const uint16_t *)w->data + (size_t)row * w->in;
    uint32_t i = 0;
    for (; i + VF <= w->in; i += VF)
        vf_store(y + i, vf_load_bf16(data + i));
    for (; i < w->in; i++)
        y[i] = ft_bf16_to_f32(data[i]);
}

void VEC(ft_matmul_fill)(struct ft_kernels *kernels)
{
    kernels->matmul = matmul;
    kernels->expert_up = expert_up;
    kernels->expert_down = expert_down;
    kernels->mix_up = mix_up;
    kernels->row_decode = row_decode;
}
