/* SPDX-License-Identifier: Apache-2.0 */
/* What happens to bytes that were read: checked, converted, put in place. */
#include "io/bind_internal.h"

#include <math.h>
#include <string.h>

/* Source and destination may be unaligned (headers have any length): memcpy is what reads and writes them. */
static uint16_t get_u16(const char *source, uint64_t index)
{
    uint16_t value;
    memcpy(&value, source + 2 * index, sizeof value);
    return value;
}

static uint32_t get_u32(const char *source, uint64_t index)
{
    uint32_t value;
    memcpy(&value, source + 4 * index, sizeof value);
    return value;
}

static uint32_t check_bytes(enum ft_load_check check)
{
    static const uint8_t bytes[FT_LOAD_CHECK_COUNT] = {1, 4, 2, 2, 1, 1};
    return bytes[check];
}

static bool is_bad(enum ft_load_check check, const char *source, uint64_t i)
{
    switch (check) {
    case FT_LOAD_CHECK_F32:
        return (get_u32(source, i) & 0x7f800000u) == 0x7f800000u;
    case FT_LOAD_CHECK_BF16:
        return (get_u16(source, i) & 0x7f80u) == 0x7f80u;
    case FT_LOAD_CHECK_F16:
        return (get_u16(source, i) & 0x7c00u) == 0x7c00u;
    case FT_LOAD_CHECK_E4M3:
        return (source[i] & 0x7f) == 0x7f;
    case FT_LOAD_CHECK_E8M0:
        return (uint8_t)source[i] == 0xff;
    default:
        return false;
    }
}

/* Is any of `count` elements bad? One branch-free loop per type, which compilers turn into vector code. */
static bool any_bad(enum ft_load_check check, const char *source, uint64_t count)
{
    uint32_t bad = 0;
    switch (check) {
    case FT_LOAD_CHECK_F32:
        for (uint64_t i = 0; i < count; i++)
            bad |= (get_u32(source, i) & 0x7f800000u) == 0x7f800000u;
        break;
    case FT_LOAD_CHECK_BF16:
        for (uint64_t i = 0; i < count; i++)
            bad |= (get_u16(source, i) & 0x7f80u) == 0x7f80u;
        break;
    case FT_LOAD_CHECK_F16:
        for (uint64_t i = 0; i < count; i++)
            bad |= (get_u16(source, i) & 0x7c00u) == 0x7c00u;
        break;
    case FT_LOAD_CHECK_E4M3:
        for (uint64_t i = 0; i < count; i++)
            bad |= (source[i] & 0x7f) == 0x7f;
        break;
    case FT_LOAD_CHECK_E8M0:
        for (uint64_t i = 0; i < count; i++)
            bad |= (uint8_t)source[i] == 0xff;
        break;
    default:
        break;
    }
    return bad != 0;
}

static int report_bad(const struct ft_bind *bind, const struct ft_load_part *part, uint64_t at,
                      const char *what, struct ft_error *err)
{
    const struct ft_tensor *tensor = ft_checkpoint_tensor(bind->checkpoint, part->tensor);
    return ft_error_set(err, FT_NUMERIC, "%s: tensor %s: element %llu is %s: the checkpoint is damaged",
                        ft_checkpoint_file_path(bind->checkpoint, part->file), tensor->name,
                        (unsigned long long)((part->offset - tensor->offset + at) /
                                             check_bytes((enum ft_load_check)part->check)),
                        what);
}

static int check_piece(const struct ft_bind *bind, const struct ft_load_part *part, const char *source,
                       uint64_t from, uint64_t bytes, struct ft_error *err)
{
    enum ft_load_check check = (enum ft_load_check)part->check;
    uint32_t size = check_bytes(check);
    if (!any_bad(check, source, bytes / size))
        return FT_OK;
    for (uint64_t i = 0; i < bytes / size; i++)
        if (is_bad(check, source, i))
            return report_bad(bind, part, from + i * size, "not a finite number", err);
    return FT_OK;
}

static float from_bf16(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static float from_f16(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, mantissa = bits & 0x3ffu;
    uint32_t wide = sign | (exponent + 112) << 23 | mantissa << 13;
    float value;
    if (exponent == 0) /* zero and subnormals: mantissa * 2^-24 */
        return copysignf((float)mantissa * 0x1p-24f, sign ? -1.0f : 1.0f);
    if (exponent == 31) /* never met: the check comes first */
        wide = sign | 0x7f800000u | mantissa << 13;
    memcpy(&value, &wide, sizeof value);
    return value;
}

void ft_bind_convert(enum ft_load_convert kind, const char *source, uint64_t bytes, char *to)
{
    float value;
    switch (kind) {
    case FT_LOAD_BF16_TO_F32:
        for (uint64_t i = 0; i < bytes / 2; i++) {
            value = from_bf16(get_u16(source, i));
            memcpy(to + 4 * i, &value, sizeof value);
        }
        break;
    case FT_LOAD_F16_TO_F32:
        for (uint64_t i = 0; i < bytes / 2; i++) {
            value = from_f16(get_u16(source, i));
            memcpy(to + 4 * i, &value, sizeof value);
        }
        break;
    case FT_LOAD_F32_RECIPROCAL:
        for (uint64_t i = 0; i < bytes / 4; i++) {
            memcpy(&value, source + 4 * i, sizeof value);
            value = 1 / value;
            memcpy(to + 4 * i, &value, sizeof value);
        }
        break;
    case FT_LOAD_BF16_RECIPROCAL:
        for (uint64_t i = 0; i < bytes / 2; i++) {
            value = 1 / from_bf16(get_u16(source, i));
            memcpy(to + 4 * i, &value, sizeof value);
        }
        break;
    default:
        memcpy(to, source, bytes);
        break;
    }
}

/* Rows 0, 2, 4 ... go to one place, rows 1, 3, 5 ... to the other; `grow` is destination bytes per source byte. */
static void deal_rows(const struct ft_load_part *part, const char *source, uint64_t from, uint64_t bytes,
                      uint64_t grow, char *base)
{
    for (uint64_t done = 0; done < bytes;) {
        uint64_t row = (from + done) / part->row_bytes, inside = (from + done) % part->row_bytes;
        uint64_t piece = FT_MIN(part->row_bytes - inside, bytes - done);
        char *to = base + (row % 2 ? part->destination_odd : part->destination);
        ft_bind_convert((enum ft_load_convert)part->convert, source + done, piece,
                        to + (row / 2 * part->row_bytes + inside) * grow);
        done += piece;
    }
}

int ft_bind_apply(const struct ft_bind *bind, const struct ft_load_part *part, const void *source,
                  uint64_t from, uint64_t bytes, char *base, struct ft_error *err)
{
    bool bf16_or_f16 = part->unit_bytes == 2;
    uint64_t grow = bf16_or_f16 && part->convert != FT_LOAD_COPY ? 2 : 1;
    FT_ASSERT_LE(from, part->bytes);
    FT_ASSERT_LE(bytes, part->bytes - from);
    FT_ASSERT_EQ(from % part->unit_bytes + bytes % part->unit_bytes, 0);
    int status = check_piece(bind, part, source, from, bytes, err);
    if (status)
        return status;
    if (part->quantised)
        return ft_quantiser_apply(bind, part, source, from, bytes, base, err);
    if (part->row_bytes) {
        deal_rows(part, source, from, bytes, grow, base);
        return FT_OK;
    }
    char *to = base + part->destination + from * grow;
    ft_bind_convert((enum ft_load_convert)part->convert, source, bytes, to);
    if (part->convert == FT_LOAD_F32_RECIPROCAL || part->convert == FT_LOAD_BF16_RECIPROCAL)
        if (any_bad(FT_LOAD_CHECK_F32, to, bytes * grow / 4))
            return report_bad(bind, part, from, "zero or next to it, and its reciprocal is wanted", err);
    return FT_OK;
}
