/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tiles of matmul_body.h on the matrix unit of a core (AMX, bf16) for packed e2m1, bf16 and fp8 whose blocks
 * are whole chunks of columns; other formats take the dot products of dot_body.h.
 *
 *     C [16 weight rows, 3 rows of activations each] += A [16 weight rows, 32 columns] B [32 columns, 3 rows each]
 *
 * Weights are exact in bf16: e2m1 times e4m3 has 6 significant bits. An f32 activation is the sum of three
 * bf16 (8 bits each), which go through as three columns of B, so products are exact and sums are f32: as good
 * as f32. Rows of activations are brought to a common size first (a power of two), because the unit takes
 * subnormal numbers as zeros. So does it with bf16 weights: below 2^-126 they count as zero.
 *
 * e4m3 is exact in bf16 as well. The scales of its blocks are not: the sums of every block of columns are
 * multiplied by them, outside of the unit.
 *
 * Any number of rows goes the same way, and the unit sums every element of C in the same order: batch
 * invariant. The order of columns inside 32 is free as long as A and B agree. Packed: dword i holds one
 * column of the first 16 and one of the last 16, so that one broadcast brings both scales:
 *
 *     word 2i, 2i + 1:   columns 2i, 16 + 2i        for i < 8 (low nibbles)
 *                        columns 2i - 15, 1 + 2i    for i >= 8 (high nibbles)
 */
#ifndef FT_TILES_AMX_H
#define FT_TILES_AMX_H

#define TILE_ROWS 32     /* most activation rows of a tile */
#define AMX_STEP 32      /* columns of one multiply of tiles */
#define AMX_BLOCK 128    /* columns that are decoded together */
#define AMX_COLUMNS 3072 /* longer rows are taken in parts of this many */
#define AMX_OUTS 16      /* weight rows of A */
#define AMX_TILES 6      /* of B side by side, 16 columns each */
#define AMX_WIDTH (AMX_TILES * 16)
_Static_assert(3 * TILE_ROWS <= AMX_WIDTH && AMX_COLUMNS % AMX_BLOCK == 0 && AMX_BLOCK == 4 * AMX_STEP,
               "pieces of all rows fit side by side; parts are whole blocks");

struct amx_panel {
    uint32_t first_row, rows, begin, end;
    float up[TILE_ROWS];    /* what activations are multiplied with; */
    double down[TILE_ROWS]; /* and results; NaN: the row is not finite */
    _Alignas(64) uint8_t b[AMX_COLUMNS / AMX_STEP * AMX_TILES][16][64]; /* step by step */
};

struct tile_panel {
    struct panel dot;
    struct amx_panel amx;
};

static void tile_panel_init(struct tile_panel *panel)
{
    panel->dot.rows = panel->amx.rows = 0;
}

static bool amx_takes(enum kind kind)
{
    return is_packed(kind) || kind == KIND_BF16 || kind == KIND_FP8;
}

/* Activation rows of the next tile when `left` are. */
static uint32_t tile_rows(const struct ft_matrix *w, uint32_t left)
{
    return amx_takes(kind_of(w)) ? FT_MIN(left, TILE_ROWS) : panel_rows(w, left);
}

/* ---- activations ---- */

/* Decoded nvfp4 is 2^-112 of its value (amx_decode), so its activations are large. */
static int32_t amx_exponent(enum kind kind)
{
    return kind == KIND_NVFP4 ? 60 : 8;
}

/* The largest |x| of every row comes to 2^e .. 2^(e + 1), e = amx_exponent; tiny rows to less. */
static void amx_sizes(struct amx_panel *panel, enum kind kind, const struct ft_rows *x, uint32_t in)
{
    int32_t e = amx_exponent(kind);
    for (uint32_t r = 0; r < panel->rows; r++) {
        const float *row = ft_rows_get(x, panel->first_row + r);
        __m512i most = _mm512_setzero_si512(), magnitude = _mm512_set1_epi32(0x7fffffff);
        for (uint32_t i = 0; i < in; i += VF) {
            __m512i bits = _mm512_castps_si512(vf_load_part((const uint8_t *)(row + i), (in - i) * 4));
            most = _mm512_max_epi32(most, _mm512_and_si512(bits, magnitude));
        }
        int32_t largest = _mm512_reduce_max_epi32(most) >> 23, size = FT_MAX(largest, e + 24);
        uint32_t up = (uint32_t)(254 - size + e) << 23;
        uint64_t down = (uint64_t)(1023 - 127 + size - e) << 52;
        memcpy(&panel->up[r], &up, sizeof up);
        memcpy(&panel->down[r], &down, sizeof down);
        if (largest == 255)
            panel->down[r] = (double)__builtin_nanf("");
    }
}

/* 32 columns of a row as pairs of bf16, three pieces: x = piece[0] + piece[1] + piece[2]. */
static inline void amx_pieces(enum kind kind, const float *x, uint32_t count, float up, __m512i *piece,
                              uint32_t apart)
{
    const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i nibbles = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    vf a = vf_load_part((const uint8_t *)x, count * 4);
    vf b = count > VF ? vf_load_part((const uint8_t *)(x + VF), (count - VF) * 4) : vf_zero();
    vf first, second; /* the low and high words */
    if (is_packed(kind)) {
        first = _mm512_permutexvar_ps(nibbles, a);
        second = _mm512_permutexvar_ps(nibbles, b);
    } else {
        first = _mm512_permutex2var_ps(a, even, b);
        second = _mm512_permutex2var_ps(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b);
    }
    first = vf_mul(first, vf_set1(up));
    second = vf_mul(second, vf_set1(up));
    for (int p = 0; p < 3; p++) {
        __m512i f = _mm512_and_si512(_mm512_castps_si512(first), high);
        __m512i s = _mm512_and_si512(_mm512_castps_si512(second), high);
        piece[(size_t)p * apart] = _mm512_or_si512(_mm512_srli_epi32(f, 16), s);
        first = vf_sub(first, _mm512_castsi512_ps(f));
        second = vf_sub(second, _mm512_castsi512_ps(s));
    }
}

/* Four columns of B: dword k of each to row k. */
static inline void amx_store_four(const __m512i *column, uint8_t (*b)[64], uint32_t at)
{
    __m512i lo0 = _mm512_unpacklo_epi32(column[0], column[1]),
            lo1 = _mm512_unpacklo_epi32(column[2], column[3]);
    __m512i hi0 = _mm512_unpackhi_epi32(column[0], column[1]),
            hi1 = _mm512_unpackhi_epi32(column[2], column[3]);
    const __m512i row[4] = {_mm512_unpacklo_epi64(lo0, lo1), _mm512_unpackhi_epi64(lo0, lo1),
                            _mm512_unpacklo_epi64(hi0, hi1), _mm512_unpackhi_epi64(hi0, hi1)};
    for (uint32_t i = 0; i < 4; i++) {
        _mm_store_si128((__m128i *)(void *)(b[i] + at), _mm512_castsi512_si128(row[i]));
        _mm_store_si128((__m128i *)(void *)(b[4 + i] + at), _mm512_extracti32x4_epi32(row[i], 1));
        _mm_store_si128((__m128i *)(void *)(b[8 + i] + at), _mm512_extracti32x4_epi32(row[i], 2));
        _mm_store_si128((__m128i *)(void *)(b[12 + i] + at), _mm512_extracti32x4_epi32(row[i], 3));
    }
}

static uint32_t amx_tiles(uint32_t rows)
{
    return (3 * rows + 15) / 16;
}

/* Makes the panel hold rows [first, first + rows) over columns [begin, end); nothing to do when it already does. */
static void amx_fill(struct amx_panel *panel, enum kind kind, const struct ft_rows *x, uint32_t in,
                     uint32_t first, uint32_t rows, uint32_t begin, uint32_t end)
{
    if (panel->rows != rows || panel->first_row != first) {
        panel->rows = rows;
        panel->first_row = first;
        amx_sizes(panel, kind, x, in);
    } else if (panel->begin == begin && panel->end == end) {
        return;
    }
    panel->begin = begin;
    panel->end = end;
    uint32_t tiles = amx_tiles(rows), columns = tiles == 1 ? (3 * rows + 3) / 4 * 4 : tiles * 16;
    __m512i piece[AMX_WIDTH];
    for (uint32_t c = 3 * rows; c < columns; c++)
        piece[c] = _mm512_setzero_si512();
    uint8_t(*b)[16][64] = panel->b;
    for (uint32_t i = begin; i < end; i += AMX_STEP, b += tiles) {
        for (uint32_t r = 0; r < rows; r++)
            amx_pieces(kind, ft_rows_get(x, first + r) + i, FT_MIN(end - i, AMX_STEP), panel->up[r],
                       piece + r, rows);
        for (uint32_t c = 0; c < columns; c += 4)
            amx_store_four(piece + c, b[c / 16], c % 16 * 4);
    }
}

/* ---- weights ---- */

/* Rows of A of up to four steps: [step][weight row] */
typedef __m512i amx_block[AMX_BLOCK / AMX_STEP][AMX_OUTS];

/* Byte 0 and 1 of dword i of a step are byte i % 8 of its first 8, byte 2 and 3 of its last 8. */
static inline __m512i amx_bytes(uint32_t step)
{
    const __m512i dword = _mm512_setr_epi32(
        0x08080000, 0x09090101, 0x0a0a0202, 0x0b0b0303, 0x0c0c0404, 0x0d0d0505, 0x0e0e0606, 0x0f0f0707,
        0x08080000, 0x09090101, 0x0a0a0202, 0x0b0b0303, 0x0c0c0404, 0x0d0d0505, 0x0e0e0606, 0x0f0f0707);
    return _mm512_add_epi8(dword, _mm512_set1_epi8((char)(16 * step)));
}

/* 32 codes of e2m1 -> bf16 of 2^-112 of their value times a scale in f16 (low words: the first of the pair).
 * All products but zero are normal in f16; their bits three places lower are those of a bf16 whose exponent
 * has another bias. */
static inline __m512i amx_nvfp4(__m512i bytes, uint32_t scales)
{
    const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(
        0, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, (char)0x80, (char)0xb8, (char)0xbc, (char)0xbe,
        (char)0xc0, (char)0xc2, (char)0xc4, (char)0xc6)); /* high bytes in f16; low ones are 0 */
    __m512i value = _mm512_maskz_permutexvar_epi8(0xaaaaaaaaaaaaaaaau, bytes, table);
    value = amx_mul_f16(value, _mm512_set1_epi32((int)scales));
    return _mm512_and_si512(_mm512_srai_epi16(value, 3), _mm512_set1_epi16((short)0x8fff));
}

/* The same for scales that are powers of two, added to the exponent: codes of e8m0 less 127, times 128. */
static inline __m512i amx_mxfp4(__m512i bytes, int16_t scale)
{
    /* Low bytes of bf16, high bytes, and both again: the look-up reads 6 bits. */
    const __m128i low = _mm_setr_epi8(0, 0, (char)0x80, (char)0xc0, 0, 0x40, (char)0x80, (char)0xc0, 0, 0,
                                      (char)0x80, (char)0xc0, 0, 0x40, (char)0x80, (char)0xc0);
    const __m128i high =
        _mm_setr_epi8(0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, (char)0x80, (char)0xbf, (char)0xbf,
                      (char)0xbf, (char)0xc0, (char)0xc0, (char)0xc0, (char)0xc0);
    const __m512i table = _mm512_broadcast_i64x4(_mm256_set_m128i(high, low));
    bytes = _mm512_ternarylogic_epi32(bytes, _mm512_set1_epi16(0x0f0f), _mm512_set1_epi16(0x1000), 0xea);
    __m512i value = _mm512_permutexvar_epi8(bytes, table);
    __mmask32 nonzero = _mm512_test_epi16_mask(value, _mm512_set1_epi16(0x7fff));
    return _mm512_mask_add_epi16(value, nonzero, value, _mm512_set1_epi16(scale));
}

/* Codes of scales that the two above take: no sign, no NaN; powers of two whose products stay far from the ends. */
static bool amx_scales_are_plain(enum kind kind, const uint8_t *scale, uint32_t count)
{
    uint8_t least = 255, most = 0;
    for (uint32_t i = 0; i < count; i++) {
        least = FT_MIN(least, scale[i]);
        most = FT_MAX(most, scale[i]);
    }
    return kind == KIND_NVFP4 ? most < 0x7f : least >= 64 && most <= 190;
}

/* 16 weight rows, and where their columns of the panel begin. */
struct amx_rows {
    const uint8_t *data, *scale;
    size_t data_stride, scale_stride;
    uint32_t outs; /* that exist; rows of A after them stay as they are */
};

/* `count` <= AMX_BLOCK columns of packed weights from column `at` on. */
INLINE void amx_decode(enum kind kind, const struct amx_rows *rows, uint32_t at, uint32_t count, amx_block to)
{
    const uint32_t block = kind == KIND_NVFP4 ? 16 : 32;
    for (uint32_t r = 0; r < rows->outs; r++) {
        uint32_t scales[4];
        const uint8_t *data = rows->data + r * rows->data_stride + at / 2;
        __m512i raw = count == AMX_BLOCK ? vi_load(data) : _mm512_maskz_loadu_epi8(vi_first(count / 2), data);
        __m128i codes = _mm_maskz_loadu_epi8((__mmask16)vi_first(count / block),
                                             rows->scale + r * rows->scale_stride + at / block);
        if (kind == KIND_NVFP4) { /* e4m3 seven bits up is f16 of 2^-8 of the value */
            __m256 f = _mm256_mul_ps(_mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(codes), 7)),
                                     _mm256_set1_ps(256));
            _mm_storeu_si128((__m128i *)(void *)scales, _mm256_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT));
        } else {
            __m128i exponent = _mm_sub_epi32(_mm_cvtepu8_epi32(codes), _mm_set1_epi32(127));
            _mm_storeu_si128((__m128i *)(void *)scales, _mm_slli_epi32(exponent, 7));
        }
        UNROLL for (uint32_t s = 0; s < AMX_BLOCK / AMX_STEP; s++)
        {
            if (s * AMX_STEP >= count)
                break;
            __m512i bytes = _mm512_permutexvar_epi8(amx_bytes(s), raw);
            bytes = _mm512_mask_srli_epi16(bytes, 0xffff0000u, bytes, 4);
            to[s][r] =
                kind == KIND_NVFP4 ? amx_nvfp4(bytes, scales[s]) : amx_mxfp4(bytes, (int16_t)scales[s]);
        }
    }
}

/* 16 rows of bf16, of which a part exists, or columns. */
static void amx_copy(const struct amx_rows *rows, uint32_t at, uint32_t count, __m512i *to)
{
    for (uint32_t r = 0; r < rows->outs; r++)
        to[r] =
            _mm512_castps_si512(vf_load_part(rows->data + r * rows->data_stride + 2 * (size_t)at, count * 2));
}

/* `count` <= AMX_BLOCK columns of e4m3 from column `at` on, as bf16. */
static void amx_e4m3(const struct amx_rows *rows, uint32_t at, uint32_t count, amx_block to)
{
    /* Eights of 32 columns beside those of the next 32: interleaving takes them apart again. */
    const __m512i eights = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    __m512i low, high;
    for (uint32_t r = 0; r < rows->outs; r++)
        for (uint32_t i = 0; i < count; i += 64) {
            const uint8_t *from = rows->data + r * rows->data_stride + at + i;
            __m512i codes = _mm512_maskz_loadu_epi8(vi_first(FT_MIN(count - i, 64u)), from);
            codes = _mm512_permutexvar_epi64(eights, codes);
            vf_e4m3_to_bf16(codes, &low, &high);
            to[i / AMX_STEP][r] = _mm512_unpacklo_epi8(low, high);
            to[i / AMX_STEP + 1][r] = _mm512_unpackhi_epi8(low, high);
        }
}

/* ---- products ---- */

#define AMX_ONE(c, t, b)                                                                                     \
    AMX_LOAD(t, (b)[c], 64);                                                                                 \
    AMX_DP(c, 6, t)
/* One step of columns: C tiles are 0 to tiles - 1; those of B take what is left. */
INLINE void amx_step(uint32_t tiles, const void *a, size_t stride, uint8_t (*b)[16][64])
{
    AMX_LOAD(6, a, stride);
    switch (tiles) {
    case 6:
        AMX_ONE(5, 7, b);
        __attribute__((fallthrough));
    case 5:
        AMX_ONE(4, 7, b);
        __attribute__((fallthrough));
    case 4:
        AMX_ONE(3, 7, b);
        AMX_ONE(2, 7, b);
        AMX_ONE(1, 7, b);
        AMX_ONE(0, 7, b);
        break;
    case 3:
        AMX_ONE(2, 5, b);
        __attribute__((fallthrough));
    case 2:
        AMX_ONE(1, 4, b);
        __attribute__((fallthrough));
    default:
        AMX_ONE(0, 3, b);
    }
}

#define AMX_FOR_TILES(tiles, one)                                                                            \
    switch (tiles) {                                                                                         \
    case 6:                                                                                                  \
        one(5);                                                                                              \
        __attribute__((fallthrough));                                                                        \
    case 5:                                                                                                  \
        one(4);                                                                                              \
        __attribute__((fallthrough));                                                                        \
    case 4:                                                                                                  \
        one(3);                                                                                              \
        __attribute__((fallthrough));                                                                        \
    case 3:                                                                                                  \
        one(2);                                                                                              \
        __attribute__((fallthrough));                                                                        \
    case 2:                                                                                                  \
        one(1);                                                                                              \
        __attribute__((fallthrough));                                                                        \
    default:                                                                                                 \
        one(0);                                                                                              \
    }

/* What is asked for while 16 weight rows are multiplied: the next 16, in the order in which they lie in memory. */
struct amx_ahead {
    const uint8_t *data, *scale;
    uint32_t data_step, scale_step; /* bytes per block of columns */
};

INLINE void amx_ask(struct amx_ahead *ahead)
{
    for (uint32_t i = 0; i < ahead->data_step; i += 64)
        __builtin_prefetch(ahead->data + i, 0, 2);
    for (uint32_t i = 0; i < ahead->scale_step; i += 64)
        __builtin_prefetch(ahead->scale + i, 0, 2);
    ahead->data += ahead->data_step;
    ahead->scale += ahead->scale_step;
}

/* Columns of the panel of 16 weight rows: packed ones are decoded a block ahead of the multiplies. */
INLINE void amx_packed(enum kind kind, const struct amx_rows *rows, const struct amx_panel *panel,
                       uint32_t tiles, struct amx_ahead *ahead)
{
    amx_block block[2];
    uint32_t columns = panel->end - panel->begin;
    uint8_t(*b)[16][64] = (uint8_t(*)[16][64])(uintptr_t)panel->b;
    if (rows->outs < AMX_OUTS)
        memset(block, 0, sizeof block);
    amx_decode(kind, rows, panel->begin, FT_MIN(columns, AMX_BLOCK), block[0]);
    for (uint32_t i = 0; i < columns; i += AMX_BLOCK) {
        uint32_t next = i + AMX_BLOCK;
        amx_ask(ahead);
        if (next < columns)
            amx_decode(kind, rows, panel->begin + next, FT_MIN(columns - next, AMX_BLOCK),
                       block[next / AMX_BLOCK % 2]);
        for (uint32_t s = 0; s < AMX_BLOCK / AMX_STEP && i + s * AMX_STEP < columns; s++, b += tiles)
            amx_step(tiles, block[i / AMX_BLOCK % 2][s], 64, b);
    }
}

static void amx_plain(const struct amx_rows *rows, const struct amx_panel *panel, uint32_t tiles,
                      struct amx_ahead *ahead)
{
    __m512i copy[AMX_OUTS];
    uint8_t(*b)[16][64] = (uint8_t(*)[16][64])(uintptr_t)panel->b;
    if (rows->outs < AMX_OUTS)
        memset(copy, 0, sizeof copy);
    for (uint32_t at = panel->begin; at < panel->end; at += AMX_STEP, b += tiles) {
        if (at % AMX_BLOCK == 0)
            amx_ask(ahead);
        if (rows->outs == AMX_OUTS && panel->end - at >= AMX_STEP) {
            amx_step(tiles, rows->data + 2 * (size_t)at, rows->data_stride, b);
        } else {
            amx_copy(rows, at, FT_MIN(panel->end - at, AMX_STEP), copy);
            amx_step(tiles, copy, 64, b);
        }
    }
}

#define AMX_FIRST(t) AMX_ZERO(t)
#define AMX_AGAIN(t) AMX_LOAD(t, sums[0] + 16 * (t), sizeof sums[0])
#define AMX_LAST(t) AMX_STORE(t, sums[0] + 16 * (t), sizeof sums[0])

/* to[i][c] += scale of row i * sums[i][c], for the columns of all tiles. */
static void amx_scale(const struct ft_matrix *w, uint32_t o, uint32_t outs, uint32_t column, uint32_t tiles,
                      float (*sums)[AMX_WIDTH], float (*to)[AMX_WIDTH])
{
    uint32_t blocks = (uint32_t)ft_div_up(w->in, w->block_in);
    for (uint32_t i = 0; i < outs; i++) {
        vf scale = vf_set1(
            ((const float *)w->scale)[(size_t)((o + i) / w->block_out) * blocks + column / w->block_in]);
        for (uint32_t c = 0; c < tiles * 16; c += VF)
            vf_store(to[i] + c, vf_fma(vf_load(sums[i] + c), scale, vf_load(to[i] + c)));
    }
}

/* The same as amx_packed for fp8: tiles hold the sums of one block of columns at a time. */
static void amx_blocks(const struct ft_matrix *w, uint32_t o, const struct amx_rows *rows,
                       const struct amx_panel *panel, uint32_t tiles, struct amx_ahead *ahead,
                       float (*to)[AMX_WIDTH])
{
    amx_block block;
    _Alignas(64) float sums[AMX_OUTS][AMX_WIDTH];
    uint8_t(*b)[16][64] = (uint8_t(*)[16][64])(uintptr_t)panel->b;
    if (rows->outs < AMX_OUTS)
        memset(block, 0, sizeof block);
    if (!panel->begin)
        memset(to, 0, AMX_OUTS * sizeof *to);
    for (uint32_t at = panel->begin, end; at < panel->end; at = end) {
        uint32_t begin = at;
        end = FT_MIN((at / w->block_in + 1) * w->block_in, panel->end);
        AMX_FOR_TILES(tiles, AMX_FIRST)
        for (; at < end; at += AMX_BLOCK) {
            uint32_t count = FT_MIN(end - at, AMX_BLOCK);
            amx_ask(ahead);
            amx_e4m3(rows, at, count, block);
            for (uint32_t s = 0; s * AMX_STEP < count; s++, b += tiles)
                amx_step(tiles, block[s], 64, b);
        }
        AMX_FOR_TILES(tiles, AMX_LAST)
        amx_scale(w, o, rows->outs, begin, tiles, sums, to);
    }
}

/* sums[i][c] (+)= row o + i of W . column c of the panel, for 16 weight rows, of which `outs` exist. */
static void amx_group(enum kind kind, const struct ft_matrix *w, uint32_t o, uint32_t outs,
                      const struct amx_panel *panel, float (*sums)[AMX_WIDTH])
{
    uint32_t tiles = amx_tiles(panel->rows);
    struct cursor c = cursor_at(kind, w, o, 0);
    struct amx_rows rows = {.data = c.data, .scale = c.scale, .outs = outs};
    const uint32_t halves = kind == KIND_BF16 ? 4 : kind == KIND_FP8 ? 2 : 1; /* of a byte per weight */
    rows.data_stride = (size_t)w->in * halves / 2;
    rows.scale_stride = kind == KIND_NVFP4 ? w->in / 16 : kind == KIND_MXFP4 ? w->in / 32 : 0;
    struct amx_ahead ahead = {.data =
                                  c.data + AMX_OUTS * rows.data_stride + AMX_OUTS * panel->begin * halves / 2,
                              .scale = c.scale + AMX_OUTS * rows.scale_stride,
                              .data_step = AMX_OUTS * AMX_BLOCK * halves / 2,
                              .scale_step = is_packed(kind) ? AMX_OUTS * AMX_BLOCK / 16 : 0};
    if (kind == KIND_FP8) {
        amx_blocks(w, o, &rows, panel, tiles, &ahead, sums);
        return;
    }
    if (panel->begin) {
        AMX_FOR_TILES(tiles, AMX_AGAIN)
    } else {
        AMX_FOR_TILES(tiles, AMX_FIRST)
    }
    if (kind == KIND_NVFP4)
        amx_packed(KIND_NVFP4, &rows, panel, tiles, &ahead);
    else if (kind == KIND_MXFP4)
        amx_packed(KIND_MXFP4, &rows, panel, tiles, &ahead);
    else
        amx_plain(&rows, panel, tiles, &ahead);
    AMX_FOR_TILES(tiles, AMX_LAST)
}

/* Weight rows whose scales are not plain: rare, so plainly. */
static float amx_dot_carefully(const struct ft_matrix *w, uint32_t o, const float *x)
{
    double sum = 0;
    for (uint32_t i = 0; i < w->in; i++)
        sum += ft_matrix_element(w, o, i) * (double)x[i];
    return (float)sum;
}

/* Pieces together, activations to their size again. */
static void amx_finish(enum kind kind, const struct ft_matrix *w, uint32_t o, uint32_t outs,
                       const struct amx_panel *panel, const struct ft_rows *x, float (*sums)[AMX_WIDTH],
                       uint32_t at, float *out)
{
    uint32_t rows = panel->rows, blocks = w->in / (kind == KIND_NVFP4 ? 16 : 32);
    double factor = kind == KIND_NVFP4 ? 0x1p112 * (double)w->global : 1.0, down[TILE_ROWS];
    for (uint32_t r = 0; r < rows; r++)
        down[r] = panel->down[r] * factor;
    for (uint32_t i = 0; i < outs; i++) {
        float y[TILE_ROWS];
        const float *s = sums[i];
        bool plain = !is_packed(kind) ||
                     amx_scales_are_plain(kind, (const uint8_t *)w->scale + (size_t)(o + i) * blocks, blocks);
        for (uint32_t r = 0; r < rows; r++)
            y[r] = (float)(((double)s[r] + (double)s[rows + r] + (double)s[2 * rows + r]) * down[r]);
        for (uint32_t r = 0; r < rows; r++)
            out[r * TILE + at + i] =
                plain ? y[r] : amx_dot_carefully(w, o + i, ft_rows_get(x, panel->first_row + r));
    }
}

/* Output rows per tile: their weights stay in the second cache while batches of activation rows pass by. */
static uint32_t tile_step(const struct ft_matrix *w, uint32_t x_count)
{
    (void)x_count;
    return is_packed(kind_of(w)) ? TILE : TILE / 2;
}

/* out[r * TILE + i] = W[o + i] . x[first + r] for i < count <= TILE, r < rows <= TILE_ROWS. */
static void tile_dots(const struct ft_matrix *w, uint32_t o, uint32_t count, struct tile_span span,
                      const struct ft_rows *x, uint32_t first, uint32_t rows, struct tile_panel *panel,
                      float *out)
{
    enum kind kind = kind_of(w);
    struct follow alone = {0};
    (void)span;
    _Alignas(64) float sums[TILE / AMX_OUTS][AMX_OUTS][AMX_WIDTH];
    if (!amx_takes(kind)) {
        panel_dots(w, o, count, x, first, rows, &alone, &panel->dot, out);
        return;
    }
    amx_begin(amx_tiles(rows) == 1 ? 12 * rows : 64);
    for (uint32_t begin = 0; begin < w->in; begin += AMX_COLUMNS) {
        amx_fill(&panel->amx, kind, x, w->in, first, rows, begin, FT_MIN(w->in, begin + AMX_COLUMNS));
        for (uint32_t i = 0; i < count; i += AMX_OUTS)
            amx_group(kind, w, o + i, FT_MIN(count - i, AMX_OUTS), &panel->amx, sums[i / AMX_OUTS]);
    }
    amx_end();
    for (uint32_t i = 0; i < count; i += AMX_OUTS)
        amx_finish(kind, w, o + i, FT_MIN(count - i, AMX_OUTS), &panel->amx, x, sums[i / AMX_OUTS], i, out);
}

#endif
