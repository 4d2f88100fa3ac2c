/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dot products of weight rows with activation rows over the words of vec_*.h and fixed_*.h.
 *
 * One dot product is always summed in the same way, which is what makes every op batch invariant:
 *
 *     columns   | chunk 0 | chunk 1 | ... | last chunk, padded with zeros |
 *     chunk     floats, 8 vectors: t = (w0 x0 + w2 x2 + w4 x4 + w6 x6) + (w1 x1 + w3 x3 + w5 x5 + w7 x7)
 *               packed e2m1, 16 columns a lane: t = exact sum in integers * unit (fixed_body.h)
 *     row       acc += t * scale     (per lane; a lane never crosses a scale block)
 *     at last   sum of the lanes * factor
 *
 * Up to ROWS activation rows share OUTS decoded weight rows, which share the loads of the activations. These
 * lie in a panel on the stack: aligned, padded and in the order of the decoder of their format.
 */
#ifndef FT_DOT_BODY_H
#define FT_DOT_BODY_H

#define ROWS VF_ROWS
#define TILE 128 /* most output rows at a time */
#define GROUP 16 /* output rows whose sums stay in the nearest cache */
/* Longer rows are taken in parts of this many columns; a panel of a single row holds ROWS times as many. */
#define PANEL_COLUMNS 4096
/* Of a panel: what stays in the nearest cache while weights pass by, and for a single row, which does not come
 * back to its weights, what stays in the next one: rows of 10240 as a whole 49 GB/s instead of 40 in two pieces. */
#define PIECE_BYTES 32768
#define PIECE_BYTES_ALONE 65536
/* The rows of a panel do not begin at the same place of a 4 KiB page: they would fight for few lines. */
#define PANEL_BYTES (PANEL_COLUMNS * sizeof(float) + 576)
_Static_assert(PANEL_COLUMNS % VF_CHUNK == 0 && PANEL_COLUMNS % VFIX_CHUNK == 0 &&
                   sizeof(struct vfixed) <= VFIX_CHUNK * sizeof(float),
               "panels are whole chunks, and packed chunks are no larger than floats");
#define PAIRED (OUTS == 2 && 2 * ROWS == VF) /* pair_sums */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL VFIX_UNROLL

/* How the weights of a chunk come to vectors. */
enum kind { KIND_F32, KIND_BF16, KIND_FP8, KIND_FP8_ODD, KIND_NVFP4, KIND_MXFP4, KIND_COUNT };

/* `rows` activation rows over columns [begin, end), PANEL_BYTES apart. */
struct panel {
    uint32_t begin, end, first_row, rows;
    _Alignas(64) uint8_t data[ROWS * PANEL_BYTES];
};

/* Scales that do not change inside a chunk come as `scale`; 1 where the format has none. */
struct chunk {
    vf w[8];
    struct vfixed_weights fixed; /* instead of w, for packed e2m1 */
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

INLINE bool is_packed(enum kind kind)
{
    return kind == KIND_NVFP4 || kind == KIND_MXFP4;
}

INLINE uint32_t chunk_columns(enum kind kind)
{
    return is_packed(kind) ? VFIX_CHUNK : VF_CHUNK;
}

/* What the activations of a chunk take in the panel. */
INLINE uint32_t chunk_stride(enum kind kind)
{
    return is_packed(kind) ? sizeof(struct vfixed) : VF_CHUNK * sizeof(float);
}

/* What the weights of a chunk take. */
INLINE uint32_t chunk_bytes(enum kind kind)
{
    uint32_t columns = chunk_columns(kind);
    return kind == KIND_F32    ? columns * 4
           : kind == KIND_BF16 ? columns * 2
           : is_packed(kind)   ? columns / 2
                               : columns;
}

/* Scales of nvfp4 come as 2^-8 of their value, and so does e4m3 from some versions of vf_load_e4m3. */
static float factor_of(const struct ft_matrix *w, enum kind kind)
{
    if (kind == KIND_NVFP4)
        return w->global * 256.0f;
    return kind == KIND_FP8 ? VF_E4M3_FACTOR : 1.0f;
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
    uint32_t row, column;
    uint32_t block_left; /* fp8: chunks before the next scale */
    vcodes seen;         /* fp8: largest codes, which tell NaN without a branch per chunk */
};

INLINE struct cursor cursor_at(enum kind kind, const struct ft_matrix *w, uint32_t o, uint32_t column)
{
    size_t at = (size_t)o * w->in + column;
    struct cursor c = {.data = w->data, .scale = w->scale, .row = o, .column = column};
    c.seen = vcodes_none();
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

/*
 * Weights are asked for this far ahead, across the ends of rows: the prefetchers of the core stop at pages.
 * Two rows at a time are still asked for in the order in which they lie in memory, as one stream, not as two:
 * that brought one core of Zen 5 from 29 to 31 GB/s of nvfp4, two beside other load from 38 to 45; distances
 * of 6 to 16 KiB then make no difference, nor does the level of cache that is named.
 */
#define AHEAD 8192
#define SCALES_AHEAD 1024
/* Bytes from what is read to what is asked for. */
struct ahead {
    size_t data, scales;
};

/* What is read once (by a single row of activations) need not push anything out of the outer caches, where
 * that helps (ft_read_once_hint). */
INLINE void prefetch(const uint8_t *data, uint32_t bytes, bool once)
{
    for (uint32_t i = 0; i < bytes; i += 64) {
        if (once && ft_read_once_hint)
            __builtin_prefetch(data + i, 0, 0);
        else
            __builtin_prefetch(data + i);
    }
}

/* Vector j of a chunk that holds `bytes` bytes, or all of it. */
INLINE vf load_vector(const uint8_t *data, uint32_t j, bool whole, uint32_t bytes)
{
    uint32_t at = j * VF * (uint32_t)sizeof(float);
    return whole ? vf_load((const float *)(const void *)(data + at))
                 : vf_load_part(data + at, bytes > at ? bytes - at : 0);
}

/* The next `count` scales of packed weights. */
INLINE __m128i load_codes(enum kind kind, const struct cursor *c, uint32_t count)
{
    return kind == KIND_NVFP4 ? vfixed_codes_nvfp4(c->scale, count) : vfixed_codes_mxfp4(c->scale, count);
}

/* Loads the next chunk, of which `count` columns exist. Those after them are zero. */
INLINE void load_chunk(enum kind kind, const struct ft_matrix *w, struct cursor *c, uint32_t count,
                       struct chunk *chunk)
{
    float copy[VF_CHUNK];
    const uint8_t *data = c->data;
    uint32_t columns = chunk_columns(kind), bytes = chunk_bytes(kind);
    uint32_t part = (uint32_t)((size_t)bytes * count / columns);
    bool whole = count == columns;
    switch (kind) {
    case KIND_F32:
        UNROLL for (uint32_t j = 0; j < 8; j++) chunk->w[j] = load_vector(data, j, whole, part);
        break;
    case KIND_BF16:
        UNROLL for (uint32_t j = 0; j < 4; j++)
            vf_bf16_pair(load_vector(data, j, whole, part), chunk->w + 2 * j);
        break;
    case KIND_FP8:
        if (!whole) {
            memset(copy, 0, sizeof copy);
            data = memcpy(copy, data, part);
        }
        vf_load_e4m3(data, chunk->w, &c->seen);
        chunk->scale = vf_set1(*(const float *)(const void *)c->scale);
        if (--c->block_left == 0) {
            c->block_left = w->block_in / VF_CHUNK;
            c->scale += sizeof(float);
        }
        break;
    case KIND_FP8_ODD:
        decode_fp8_odd(w, c->row, c->column, count, copy);
        UNROLL for (int j = 0; j < 8; j++) chunk->w[j] = vf_load(copy + j * VF);
        break;
    default: {
        uint32_t block = kind == KIND_NVFP4 ? 16 : 32;
        vfixed_decode(data, count, &chunk->fixed);
        __m128i codes = load_codes(kind, c, count / block);
        chunk->scale = kind == KIND_NVFP4 ? vfixed_scales_nvfp4(codes) : vfixed_scales_mxfp4(codes);
        c->scale += columns / block;
        break;
    }
    }
    c->data += bytes;
    c->column += columns;
}

/* t of one chunk for each of `outs` weight rows, which share the loads of x. */
INLINE void chunk_dot(int outs, const struct chunk *chunk, const uint8_t *panel, vf *t)
{
    const float *x = (const float *)(const void *)panel;
    vf even[2], odd[2], x0 = vf_load(x), x1 = vf_load(x + VF);
    if (outs > 1) {
        VF_KEEP(x0);
        VF_KEEP(x1);
    }
    UNROLL for (int i = 0; i < outs; i++)
    {
        even[i] = vf_mul(chunk[i].w[0], x0);
        odd[i] = vf_mul(chunk[i].w[1], x1);
    }
    UNROLL for (int j = 2; j < 8; j += 2)
    {
        x0 = vf_load(x + j * VF);
        x1 = vf_load(x + (j + 1) * VF);
        if (outs > 1) {
            VF_KEEP(x0);
            VF_KEEP(x1);
        }
        UNROLL for (int i = 0; i < outs; i++)
        {
            even[i] = vf_fma(chunk[i].w[j], x0, even[i]);
            odd[i] = vf_fma(chunk[i].w[j + 1], x1, odd[i]);
        }
    }
    UNROLL for (int i = 0; i < outs; i++) t[i] = vf_add(even[i], odd[i]);
}

/* The next chunk of `outs` weight rows, of which `count` columns exist. */
INLINE void step_chunk(enum kind kind, int outs, int rows, const struct ft_matrix *w, struct cursor *cursor,
                       uint32_t count, const uint8_t *x, vf (*sum)[ROWS])
{
    struct chunk chunk[2];
    load_chunk(kind, w, &cursor[0], count, &chunk[0]);
    if (outs == 2)
        load_chunk(kind, w, &cursor[1], count, &chunk[1]);
    if (is_packed(kind)) {
        const struct vfixed_weights *fixed[2] = {&chunk[0].fixed, &chunk[outs - 1].fixed};
        const int most =
            rows == ROWS ? FT_MIN(VFIX_ROWS, 2) : VFIX_ROWS; /* beside the sums of a full panel */
        UNROLL for (int r = 0; r < rows; r += most)
        {
            vf t[VFIX_ROWS][2];
            const int batch = FT_MIN(rows - r, most);
            vfixed_dot(outs, batch, fixed, x + (size_t)r * PANEL_BYTES, PANEL_BYTES, t);
            UNROLL for (int i = 0; i < batch; i++) UNROLL for (int j = 0; j < outs; j++) sum[j][r + i] =
                vf_fma(t[i][j], chunk[j].scale, sum[j][r + i]);
        }
        return;
    }
    UNROLL for (int r = 0; r < rows; r++)
    {
        vf t[2];
        chunk_dot(outs, chunk, x + (size_t)r * PANEL_BYTES, t);
        UNROLL for (int j = 0; j < outs; j++) sum[j][r] =
            kind == KIND_FP8 ? vf_fma(t[j], chunk[j].scale, sum[j][r]) : vf_add(sum[j][r], t[j]);
    }
}

#if VFIX_HALF
/* The last columns of 1 or 2 rows of packed weights, as one chunk. */
struct half {
    struct vfixed_weights weights;
    vf scale;
};

/* The last `count` <= VFIX_HALF columns of `outs` rows. */
INLINE void load_half(enum kind kind, int outs, const struct cursor *cursor, uint32_t count,
                      struct half *half)
{
    uint32_t codes = count / (kind == KIND_NVFP4 ? 16 : 32);
    __m128i first = load_codes(kind, &cursor[0], codes), second = first;
    if (outs == 2)
        second = load_codes(kind, &cursor[1], codes);
    vfixed_decode_halves(cursor[0].data, outs == 2 ? cursor[1].data : NULL, count, &half->weights);
    __m128i both = vfixed_codes_halves(first, second, kind == KIND_NVFP4);
    half->scale = kind == KIND_NVFP4 ? vfixed_scales_nvfp4(both) : vfixed_scales_mxfp4(both);
}

/* Adds them to the sums; the panel holds their activations twice. */
INLINE void step_half(enum kind kind, int outs, int rows, const struct cursor *cursor, uint32_t count,
                      const uint8_t *x, vf (*sum)[ROWS])
{
    struct half half;
    const struct vfixed_weights *fixed = &half.weights;
    load_half(kind, outs, cursor, count, &half);
    vf scale2 = vfixed_second(half.scale);
    UNROLL for (int r = 0; r < rows; r += VFIX_ROWS)
    {
        vf t[VFIX_ROWS][2];
        const int batch = rows - r < VFIX_ROWS ? rows - r : VFIX_ROWS;
        vfixed_dot(1, batch, &fixed, x + (size_t)r * PANEL_BYTES, PANEL_BYTES, t);
        UNROLL for (int i = 0; i < batch; i++)
        {
            sum[0][r + i] = vfixed_add_half(t[i][0], half.scale, sum[0][r + i]);
            if (outs == 2)
                sum[1][r + i] = vfixed_add_half(vfixed_second(t[i][0]), scale2, sum[1][r + i]);
        }
    }
}
#endif

/* Columns [begin, end) of a panel; begin is a whole number of chunks from the panel's. Sums start with the
 * first columns of a row: nobody clears them before. */
struct range {
    uint32_t begin, end;
    bool careful; /* look at each row's scales; else the caller has looked, or will */
    struct ahead ahead;
};

/* Do scales of `columns` columns from the beginning of the range in row o on need care (NaN, a sign, 2^-127)? */
INLINE bool has_odd_scales(enum kind kind, const struct ft_matrix *w, uint32_t o, const struct range *range,
                           uint32_t columns)
{
    uint32_t block = kind == KIND_NVFP4 ? 16 : 32, count = columns / block;
    const uint8_t *codes = (const uint8_t *)w->scale + ((size_t)o * w->in + range->begin) / block;
    return kind == KIND_NVFP4 ? vfixed_odd(codes, count, 0, 0x7e) : vfixed_odd(codes, count, 1, 253);
}

/* Scales of a chunk of packed e2m1 whatever their codes, for rows where some need care. */
static void careful_scales(enum kind kind, const uint8_t *codes, uint32_t count, float *scale)
{
    for (uint32_t b = 0; b < VF; b++) {
        uint32_t code = kind == KIND_NVFP4 ? b : b / 2;
        float value = 0;
        if (code < count)
            value = kind == KIND_NVFP4 ? ft_e4m3_values[codes[code]] / 256.0f : ft_e8m0_to_f32(codes[code]);
        scale[vfixed_lane(b)] = value;
    }
}

static __attribute__((noinline, cold)) void dot_packed_carefully(enum kind kind, uint32_t rows,
                                                                 const struct ft_matrix *w, uint32_t o,
                                                                 const struct panel *panel,
                                                                 const struct range *range, vf *acc)
{
    struct cursor cursor = cursor_at(kind, w, o, range->begin);
    struct vfixed_weights weights;
    const struct vfixed_weights *fixed = &weights;
    float scale[VF];
    vf t[1][2];
    uint32_t block = kind == KIND_NVFP4 ? 16 : 32;
    size_t at = (range->begin - panel->begin) / VFIX_CHUNK * sizeof(struct vfixed);
    for (uint32_t r = 0; r < rows && !range->begin; r++)
        acc[r] = vf_zero();
    for (uint32_t column = range->begin; column < range->end; column += VFIX_CHUNK) {
        uint32_t count = FT_MIN(range->end - column, VFIX_CHUNK);
        vfixed_decode(cursor.data, count, &weights);
        careful_scales(kind, cursor.scale, count / block, scale);
        for (uint32_t r = 0; r < rows; r++) {
            vfixed_dot(1, 1, &fixed, panel->data + r * PANEL_BYTES + at, 0, t);
            acc[r] = vf_fma(t[0][0], vf_load(scale), acc[r]);
        }
        cursor.data += VFIX_CHUNK / 2;
        cursor.scale += VFIX_CHUNK / block;
        at += sizeof(struct vfixed);
    }
}

/*
 * Two weight rows times a full panel are as many sums as a vector has lanes: their lanes are summed while they are in
 * registers, and one vector goes to memory instead of one for each (a store takes a multiply's place on Zen 5).
 * Lane 2 r + j of it belongs to row r of the panel and the second or first weight row.
 */
#if PAIRED
INLINE vf pair_sums(int outs, vf (*sum)[ROWS])
{
    vf all[2 * ROWS];
    UNROLL for (int r = 0; r < ROWS; r++)
    {
        all[2 * r] = sum[0][r];
        all[2 * r + 1] = outs == 2 ? sum[1][r] : vf_zero();
    }
    return vf_sums(all, 1);
}

/* The same with the last `count` <= VFIX_HALF columns still to come. Their products lie in the order of the first sums of
 * lanes: one multiply adds them to both rows. */
INLINE vf pair_sums_and_half(enum kind kind, const struct cursor *cursor, uint32_t count, const uint8_t *x,
                             vf (*sum)[ROWS])
{
    struct half half;
    const struct vfixed_weights *fixed = &half.weights;
    vf all[ROWS];
    load_half(kind, 2, cursor, count, &half);
    UNROLL for (int r = 0; r < ROWS; r += VFIX_ROWS)
    {
        vf t[VFIX_ROWS][2];
        vfixed_dot(1, VFIX_ROWS, &fixed, x + (size_t)r * PANEL_BYTES, PANEL_BYTES, t);
        UNROLL for (int i = 0; i < VFIX_ROWS; i++)
        {
            vf a = sum[0][r + i], b = sum[1][r + i];
            all[r + i] = vf_add(vf_fma(t[i][0], half.scale, vf_low_lanes(a, b)), vf_high_lanes(a, b));
        }
    }
    return vf_sums_end(all);
}
#endif

/* Adds `outs` weight rows from o on times the rows of the panel to acc, over a range of columns; puts them
 * there when the range begins a row. When it ends one and the panel is full, acc[0][0] is what pair_sums tells. */
INLINE void dot_rows(enum kind kind, int outs, int rows, const struct ft_matrix *w, uint32_t o,
                     const struct panel *panel, const struct range *range, vf (*acc)[ROWS])
{
    vf sum[2][ROWS];
    struct cursor cursor[2];
    uint32_t left = range->end - range->begin, columns = chunk_columns(kind), bytes = chunk_bytes(kind);
    const uint8_t *x = panel->data + (size_t)(range->begin - panel->begin) / columns * chunk_stride(kind);
    UNROLL for (int j = 0; j < outs; j++)
    {
        cursor[j] = cursor_at(kind, w, o + (uint32_t)j, range->begin);
        if (is_packed(kind))
            prefetch(cursor[j].scale + range->ahead.scales, left / (kind == KIND_NVFP4 ? 16 : 32), rows == 1);
        UNROLL for (int r = 0; r < rows; r++) sum[j][r] = range->begin ? acc[j][r] : vf_zero();
    }
    bool together = left == w->in; /* two whole rows are one stream */
    size_t apart = together ? bytes : (size_t)w->in * bytes / columns;
    size_t step = together ? (size_t)outs * bytes : bytes;
    const uint8_t *ahead = cursor[0].data + range->ahead.data;
    for (; left >= columns; left -= columns, x += chunk_stride(kind)) {
        if (kind != KIND_FP8_ODD) {
            prefetch(ahead, bytes, rows == 1);
            if (outs == 2)
                prefetch(ahead + apart, bytes, rows == 1);
            ahead += step;
        }
        step_chunk(kind, outs, rows, w, cursor, columns, x, sum);
    }
#if VFIX_HALF
    if (is_packed(kind) && left && left <= VFIX_HALF) {
        prefetch(ahead, left / 2 * (uint32_t)outs, rows == 1);
#if PAIRED
        if (rows == ROWS && outs == 2 && !range->careful) {
            acc[0][0] = pair_sums_and_half(kind, cursor, left, x, sum);
            return;
        }
#endif
        step_half(kind, outs, rows, cursor, left, x, sum);
        left = 0;
    }
#endif
    if (left)
        step_chunk(kind, outs, rows, w, cursor, left, x, sum);
    UNROLL for (int j = 0; j < outs; j++)
    {
        bool nan = kind == KIND_FP8 && vcodes_have_nan(cursor[j].seen);
        if (is_packed(kind) && range->careful &&
            has_odd_scales(kind, w, o + (uint32_t)j, range, range->end - range->begin)) {
            dot_packed_carefully(kind, (uint32_t)rows, w, o + (uint32_t)j, panel, range, acc[j]);
            UNROLL for (int r = 0; r < rows; r++) sum[j][r] = acc[j][r];
        }
        UNROLL for (int r = 0; r < rows; r++) sum[j][r] = nan ? vf_set1(__builtin_nanf("")) : sum[j][r];
    }
#if PAIRED
    if (rows == ROWS && range->end == w->in) {
        acc[0][0] = pair_sums(outs, sum);
        return;
    }
#endif
    UNROLL for (int j = 0; j < outs; j++) UNROLL for (int r = 0; r < rows; r++) acc[j][r] = sum[j][r];
}

typedef void dot_function(const struct ft_matrix *w, uint32_t o, uint32_t count, const struct panel *panel,
                          const struct range *range, vf (*acc)[ROWS]);
#define DOT(name, kind, rows)                                                                                \
    static void name(const struct ft_matrix *w, uint32_t o, uint32_t count, const struct panel *panel,       \
                     const struct range *range, vf(*acc)[ROWS])                                              \
    {                                                                                                        \
        uint32_t i = 0;                                                                                      \
        /* A single row of activations has nothing to share. */                                              \
        const uint32_t outs = rows > 1 || is_packed(kind) ? OUTS : 1;                                        \
        for (; i + outs <= count; i += outs)                                                                 \
            dot_rows(kind, (int)outs, rows, w, o + i, panel, range, acc + i);                                \
        for (; i < count; i++)                                                                               \
            dot_rows(kind, 1, rows, w, o + i, panel, range, acc + i);                                        \
    }
#define DOTS(name, kind)                                                                                     \
    DOT(name##_1, kind, 1) DOT(name##_2, kind, 2) DOT(name##_3, kind, 3) DOT(name##_4, kind, 4)
/* Formats that experts seldom have do without the largest number of rows. */
#define DOTS_MOST(name, kind) DOTS(name, kind) DOT(name##_most, kind, ROWS)
DOTS(dot_f32, KIND_F32)
DOTS_MOST(dot_bf16, KIND_BF16)
DOTS_MOST(dot_fp8, KIND_FP8)
DOTS(dot_fp8_odd, KIND_FP8_ODD)
DOTS_MOST(dot_nvfp4, KIND_NVFP4)
DOTS_MOST(dot_mxfp4, KIND_MXFP4)
#define DOT_ROW(name, most)                                                                                  \
    {                                                                                                        \
        name##_1, name##_2, name##_3, name##_4, most                                                         \
    }
static dot_function *const dots[KIND_COUNT][5] = {
    [KIND_F32] = DOT_ROW(dot_f32, NULL),
    [KIND_BF16] = DOT_ROW(dot_bf16, dot_bf16_most),
    [KIND_FP8] = DOT_ROW(dot_fp8, dot_fp8_most),
    [KIND_FP8_ODD] = DOT_ROW(dot_fp8_odd, NULL),
    [KIND_NVFP4] = DOT_ROW(dot_nvfp4, dot_nvfp4_most),
    [KIND_MXFP4] = DOT_ROW(dot_mxfp4, dot_mxfp4_most),
};

/* Chunks of floats into the panel. */
static void pack_floats(enum kind kind, const float *x, uint32_t count, float *out)
{
    if (kind == KIND_BF16) {
        for (uint32_t i = 0; i < count * VF_CHUNK; i += 2 * VF)
            vf_pack_pair(x + i, out + i);
    } else if (kind == KIND_FP8) {
        for (uint32_t i = 0; i < count * VF_CHUNK; i += VF_CHUNK)
            vf_pack_e4m3(x + i, out + i);
    } else {
        memcpy(out, x, count * VF_CHUNK * sizeof *x);
    }
}

/* The first `count` columns of a chunk, zeros after them, by whole vectors: loads of vectors that were
 * written by anything else would wait. */
static void pad_chunk(enum kind kind, const float *x, uint32_t count, float *to)
{
    /* The halves of two weight rows want the same activations. */
    uint32_t again = is_packed(kind) && count <= VFIX_HALF ? VFIX_HALF : chunk_columns(kind);
    for (uint32_t i = 0; i < chunk_columns(kind); i += VF) {
        uint32_t from = i < again ? i : i - again;
        uint32_t bytes = from < count ? (count - from) * (uint32_t)sizeof *x : 0;
        vf_store(to + i, vf_load_part((const uint8_t *)(x + from), bytes));
    }
}

/* All rows in fixed point, some chunks at a time whatever row they are of. */
static void fill_fixed(struct panel *panel, enum kind kind, const struct ft_rows *x)
{
    _Alignas(64) float padded[VFIX_AT_ONCE][VFIX_CHUNK];
    const float *from[VFIX_AT_ONCE];
    struct vfixed *to[VFIX_AT_ONCE];
    uint32_t count = 0;
    for (uint32_t r = 0; r < panel->rows; r++) {
        const float *row = ft_rows_get(x, panel->first_row + r);
        struct vfixed *out = (struct vfixed *)(void *)(panel->data + r * PANEL_BYTES);
        for (uint32_t i = panel->begin; i < panel->end; i += VFIX_CHUNK) {
            from[count] = row + i;
            to[count] = out++;
            if (panel->end - i < VFIX_CHUNK) {
                pad_chunk(kind, row + i, panel->end - i, padded[count]);
                from[count] = padded[count];
            }
            if (++count == VFIX_AT_ONCE) {
                vfixed_pack(from, count, to);
                count = 0;
            }
        }
    }
    vfixed_pack(from, count, to);
}

/* Makes the panel hold rows [first, first + rows) over columns [begin, end); nothing to do when it already does. */
static void panel_fill(struct panel *panel, enum kind kind, const struct ft_rows *x, uint32_t first,
                       uint32_t rows, uint32_t begin, uint32_t end)
{
    if (panel->rows == rows && panel->first_row == first && panel->begin == begin && panel->end == end)
        return;
    panel->rows = rows;
    panel->first_row = first;
    panel->begin = begin;
    panel->end = end;
    if (is_packed(kind)) {
        fill_fixed(panel, kind, x);
        return;
    }
    for (uint32_t r = 0; r < rows; r++) {
        const float *row = ft_rows_get(x, first + r) + begin;
        float *to = (float *)(void *)(panel->data + r * PANEL_BYTES);
        uint32_t whole = (end - begin) / VF_CHUNK, rest = (end - begin) % VF_CHUNK;
        pack_floats(kind, row, whole, to);
        if (rest) {
            _Alignas(64) float padded[VF_CHUNK];
            pad_chunk(kind, row + whole * VF_CHUNK, rest, padded);
            pack_floats(kind, padded, 1, to + whole * VF_CHUNK);
        }
    }
}

/* Activation rows of the next call when `left` are: those that there is a function for. */
static uint32_t panel_rows(const struct ft_matrix *w, uint32_t left)
{
    return left >= ROWS && dots[kind_of(w)][4] ? ROWS : FT_MIN(left, 4u);
}

struct tile_span {
    uint32_t begin, end; /* output rows of a call */
};

/*
 * What the two batches of a tile that two panels pass by ask for: the tile after it. With a stream of its own the first
 * batch waits for memory, and the second one leaves it idle. Both ask for all of it: a core of Zen 5 drops prefetches
 * beyond some 36 in flight.
 */
struct follow {
    bool two;      /* panels pass by */
    bool cold;     /* nobody has asked for this tile: so does its first batch, two rows ahead */
    uint32_t next; /* rows from here to the next tile; 0: there is none */
};

/*
 * Several rows of activations compute so long that only prefetches read ahead, and each that needs a new page stops the
 * core until the page is found (300 cycles on a virtual machine whose host has small pages, and then for every 4 KiB).
 * Many looked for at once take little longer than one. So when a tile begins, a line is asked for of each page of
 * the blocks that the next tile enters.
 */
#define PAGE_BYTES 4096
#define BLOCK_BYTES (32 * PAGE_BYTES)
static void prefetch_pages(const void *data, size_t row_bytes, uint32_t o, uint32_t count, bool cold)
{
    uintptr_t tile = (uintptr_t)data + o * row_bytes, next = tile + count * row_bytes;
    uintptr_t page = cold ? tile : ft_round_up(next, BLOCK_BYTES);
    uintptr_t end = ft_round_up(next + count * row_bytes, BLOCK_BYTES);
    for (; page < end; page += PAGE_BYTES)
        __builtin_prefetch((const void *)page);
}

static struct ahead ahead_of(const struct ft_matrix *w, size_t row_bytes, bool whole_rows, bool first_batch,
                             const struct follow *follow)
{
    enum kind kind = kind_of(w);
    size_t scale_bytes = is_packed(kind) ? w->in / (kind == KIND_NVFP4 ? 16u : 32u) : 0;
    uint32_t rows = follow->cold && first_batch ? 2 : follow->next;
    if (follow->two)
        return (struct ahead){rows * row_bytes, rows * scale_bytes};
    /* Whole rows lie one after the other. Parts of rows are taken from all rows of a group before the next
     * parts: the next group is asked for instead. */
    return (struct ahead){whole_rows ? AHEAD : GROUP * row_bytes, SCALES_AHEAD};
}

/* One call of `dots`. Scales of whole rows that lie one after the other are looked at together and afterwards, when they
 * are in a cache; a group with odd ones is done again. */
static void group_dots(enum kind kind, const struct ft_matrix *w, uint32_t o, uint32_t count,
                       const struct panel *panel, struct range *range, vf (*acc)[ROWS])
{
    dot_function *dot = dots[kind][panel->rows > 4 ? 4 : panel->rows - 1];
    bool whole = range->begin == 0 && range->end == w->in;
    range->careful = !whole;
    dot(w, o, count, panel, range, acc);
    if (is_packed(kind) && whole && has_odd_scales(kind, w, o, range, count * w->in)) {
        range->careful = true;
        dot(w, o, count, panel, range, acc);
    }
}

/* out[r * TILE + i] = W[o + i] . x[first + r] for i < count, r < rows <= ROWS; count <= TILE unless rows is 1. */
static void panel_dots(const struct ft_matrix *w, uint32_t o, uint32_t count, const struct ft_rows *x,
                       uint32_t first, uint32_t rows, const struct follow *follow, struct panel *panel,
                       float *out)
{
    enum kind kind = kind_of(w);
    uint32_t part = rows == 1 ? ROWS * PANEL_COLUMNS : PANEL_COLUMNS;
    uint32_t piece =
        (rows == 1 ? PIECE_BYTES_ALONE : PIECE_BYTES) / (rows * chunk_stride(kind)) * chunk_columns(kind);
    float factor = factor_of(w, kind);
    vf acc[GROUP][ROWS];
    bool whole = w->in <= part; /* the panel serves all groups */
    size_t row_bytes = (size_t)w->in * chunk_bytes(kind) / chunk_columns(kind);
    struct range range = {.ahead = ahead_of(w, row_bytes, whole && w->in <= piece, first == 0, follow)};
    if (first == 0 && rows > 4) {
        prefetch_pages(w->data, row_bytes, o, count, follow->cold);
        if (is_packed(kind))
            prefetch_pages(w->scale, w->in / (kind == KIND_NVFP4 ? 16 : 32), o, count, follow->cold);
    }
    if (whole)
        panel_fill(panel, kind, x, first, rows, 0, w->in);
    for (uint32_t i = 0; i < count; i += GROUP) {
        uint32_t group = FT_MIN(count - i, GROUP);
        for (uint32_t begin = 0; begin < w->in; begin += part) {
            if (!whole)
                panel_fill(panel, kind, x, first, rows, begin, FT_MIN(w->in, begin + part));
            for (uint32_t at = begin; at < panel->end; at += piece) {
                range.begin = at;
                range.end = FT_MIN(panel->end, at + piece);
                group_dots(kind, w, o + i, group, panel, &range, acc);
            }
        }
        for (uint32_t j = group; j < GROUP; j++)
            for (uint32_t r = 0; r < rows; r++)
                acc[j][r] = vf_zero();
#if PAIRED
        if (rows == ROWS) {
            vf_pairs_apart(&acc[0][0], 2 * ROWS, vf_set1(factor), out + i, TILE);
            continue;
        }
#endif
        for (uint32_t r = 0; r < rows; r++)
            for (uint32_t j = 0; j < GROUP; j += VF)
                vf_store(out + r * TILE + i + j, vf_mul(vf_sums(&acc[j][r], ROWS), vf_set1(factor)));
    }
}

#endif
