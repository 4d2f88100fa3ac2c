/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gated delta rule: causal convolution, SiLU, norms of q and k, the recurrence over the rows of every
 * sequence.
 *
 * S [key_dim, value_dim] of a value head is cut into columns: a warp holds 16 columns of all key rows in
 * registers for the whole call, so S is read once and written once. Lane = 4 group + quad: rows 32 j + 4
 * group + e, columns 4 quad .. + 3. With S' = g S: prediction = S'^T k, d = beta (v - prediction), S = S' + k
 * d^T and o = S^T q = S'^T q + (q . k) d, so one pass over S gives both sums of a row.
 *
 * Decode: one kernel, a block a value head: S comes to shared memory while the projection in front still runs
 * (in registers it would leave a block no room beside that kernel's), the convolution of the head's q, k and
 * v is two barriers away from the norm and gate of its outputs. Prefill: the convolution of all rows goes to
 * space.conv first (q, k normed), beta and the decay replace b and a in `project`; then the recurrence runs
 * over the rows, the next row's operands on the way while one is computed; norm and gate last.
 */
#include "kernels_cuda/linear.cuh"

namespace
{

constexpr unsigned WARPS = 2, COLUMNS = 16, BLOCK_COLUMNS = WARPS * COLUMNS, THREADS = WARPS * 32;
constexpr unsigned DECODE_WARPS = 8, DECODE_BLOCKS = 4, DECODE_COLUMNS = DECODE_WARPS * COLUMNS,
                   DECODE_THREADS = DECODE_WARPS * 32;
constexpr unsigned CONV_THREADS = 128, KEY_DIM_MAX = 256, NOT_SUPPORTED = 801; /* cudaErrorNotSupported */
constexpr unsigned GATE_WARPS = 8;

struct linear_args {
    float *project; /* row r at + r * stride: q|k|v|z|b|a */
    uint64_t stride;
    const float *conv_weight, *a_log, *dt_bias;
    float *const *state;
    uint64_t delta_offset, tail_offset;
    const uint32_t *first_row, *row_count, *row_sequence;
    float *conv; /* [rows, channels], prefill */
    float *out;  /* row r at + r * out_stride: [value_heads, value_dim] */
    uint64_t out_stride;
    uint32_t key_heads, value_heads, key_dim, value_dim, taps, channels;
    const float *norm; /* [value_dim]; NULL: o is stored as it is */
    float eps;
    bool silu;        /* act(z); else sigmoid */
    uint32_t columns; /* of S in a block of the decode form: 128, or fewer where shared memory is small */
    uint64_t *stamp;
};

/* The convolution at channel `channel` of row `row` of a sequence whose first row is x, without the row's own input. */
__device__ __forceinline__ float convolve_older(const linear_args &args, const float *x, const float *tail,
                                                uint32_t row, uint32_t channel)
{
    uint32_t depth = args.taps - 1;
    const float *w = args.conv_weight + (uint64_t)channel * args.taps;
    float sum = 0;
#pragma unroll 4
    for (uint32_t j = 0; j < depth; j++) {
        uint32_t from = row + j; /* of tail rows, then step rows */
        float value = from < depth ? tail[(uint64_t)from * args.channels + channel]
                                   : x[(from - depth) * args.stride + channel];
        sum = fmaf(w[j], value, sum);
    }
    return sum;
}

/* All of it; SiLU applied. */
__device__ __forceinline__ float convolve(const linear_args &args, const float *x, const float *tail,
                                          uint32_t row, uint32_t channel)
{
    float newest = args.conv_weight[(uint64_t)channel * args.taps + args.taps - 1];
    return ft_silu_device(
        fmaf(newest, x[row * args.stride + channel], convolve_older(args, x, tail, row, channel)));
}

__device__ __forceinline__ float beta_of(const linear_args &args, const float *project, uint32_t head)
{
    uint32_t values = args.value_heads * args.value_dim;
    return ft_sigmoid_device(project[args.channels + values + head]);
}

/* rate = exp(a_log), bias = dt_bias of the head. */
__device__ __forceinline__ float decay_of(const linear_args &args, const float *project, uint32_t head,
                                          float rate, float bias)
{
    uint32_t values = args.value_heads * args.value_dim;
    float a = project[args.channels + values + args.value_heads + head] + bias;
    return expf(-rate * (a > 30.0f ? a : log1pf(expf(a))));
}

__device__ __forceinline__ float act_of_z(const linear_args &args, float z)
{
    return args.silu ? ft_silu_device(z) : ft_sigmoid_device(z);
}

/* The sums of eight values over the lanes 4, 8 and 16 apart: lane bits 4, 3, 2 tell which of the eight is returned. */
__device__ __forceinline__ float fold(const float sum[8], unsigned lane)
{
    bool upper = lane & 16, second = lane & 8, odd = lane & 4;
    float half[4], pair[2];
    for (unsigned i = 0; i < 4; i++)
        half[i] =
            (upper ? sum[4 + i] : sum[i]) + __shfl_xor_sync(0xffffffffu, upper ? sum[i] : sum[4 + i], 16);
    for (unsigned i = 0; i < 2; i++)
        pair[i] = (second ? half[2 + i] : half[i]) +
                  __shfl_xor_sync(0xffffffffu, second ? half[i] : half[2 + i], 8);
    return (odd ? pair[1] : pair[0]) + __shfl_xor_sync(0xffffffffu, odd ? pair[0] : pair[1], 4);
}

/* One row on the warp's columns. v and the result: of the lane's own column (bits 3 and 2); lanes >= 16 have it. */
template <int QUADS>
__device__ __forceinline__ float delta_row(float4 (&s)[4 * QUADS], const float4 (&k)[QUADS],
                                           const float4 (&q)[QUADS], float v, float beta, float decay,
                                           unsigned lane)
{
    float sum[8] = {}, product = 0;
    for (int j = 0; j < QUADS; j++) {
        const float kj[4] = {k[j].x, k[j].y, k[j].z, k[j].w}, qj[4] = {q[j].x, q[j].y, q[j].z, q[j].w};
        for (int e = 0; e < 4; e++) {
            const float4 &row = s[4 * j + e];
            sum[0] = fmaf(kj[e], row.x, sum[0]);
            sum[1] = fmaf(kj[e], row.y, sum[1]);
            sum[2] = fmaf(kj[e], row.z, sum[2]);
            sum[3] = fmaf(kj[e], row.w, sum[3]);
            sum[4] = fmaf(qj[e], row.x, sum[4]);
            sum[5] = fmaf(qj[e], row.y, sum[5]);
            sum[6] = fmaf(qj[e], row.z, sum[6]);
            sum[7] = fmaf(qj[e], row.w, sum[7]);
            product = fmaf(kj[e], qj[e], product);
        }
    }
    for (int step = 4; step < 32; step <<= 1)
        product += __shfl_xor_sync(0xffffffffu, product, step);
    float mine = decay * fold(sum, lane), d = beta * (v - mine); /* lanes < 16: d of their column */
    float other = __shfl_xor_sync(0xffffffffu, d, 16);
    float result = fmaf(product, other, mine);
    unsigned quad = lane & 3;
    float d0 = __shfl_sync(0xffffffffu, d, (int)quad), d1 = __shfl_sync(0xffffffffu, d, (int)(quad + 4));
    float d2 = __shfl_sync(0xffffffffu, d, (int)(quad + 8)),
          d3 = __shfl_sync(0xffffffffu, d, (int)(quad + 12));
    for (int j = 0; j < QUADS; j++) {
        const float kj[4] = {k[j].x, k[j].y, k[j].z, k[j].w};
        for (int e = 0; e < 4; e++) {
            float4 &row = s[4 * j + e];
            row.x = fmaf(kj[e], d0, decay * row.x);
            row.y = fmaf(kj[e], d1, decay * row.y);
            row.z = fmaf(kj[e], d2, decay * row.z);
            row.w = fmaf(kj[e], d3, decay * row.w);
        }
    }
    return result;
}

/* Where a lane of a warp stands in its head's S. */
struct place {
    unsigned lane, group, quad;
    uint32_t head, sequence, column,
        own; /* first column of the quad, and the column that the lane finishes */
    bool inside, own_inside;
};

__device__ __forceinline__ place place_of(const linear_args &args, uint32_t block_columns)
{
    place p;
    p.lane = threadIdx.x & 31;
    p.group = p.lane >> 2;
    p.quad = p.lane & 3;
    p.head = blockIdx.y;
    p.sequence = blockIdx.z;
    p.column = blockIdx.x * block_columns + (threadIdx.x >> 5) * COLUMNS + 4 * p.quad;
    p.own = p.column + (p.lane >> 2 & 1) + 2 * (p.lane >> 3 & 1);
    p.inside = p.column < args.value_dim; /* value_dim is a multiple of 4 */
    p.own_inside = p.inside;
    return p;
}

template <int QUADS>
__device__ __forceinline__ void load_state(const linear_args &args, const place &p, float4 (&s)[4 * QUADS])
{
    const float *state =
        args.state[p.sequence] + args.delta_offset + (uint64_t)p.head * args.key_dim * args.value_dim;
    for (int j = 0; j < QUADS; j++)
        for (uint32_t e = 0; e < 4; e++) {
            uint32_t row = 32u * (uint32_t)j + 4 * p.group + e;
            s[4 * j + (int)e] = p.inside && row < args.key_dim
                                    ? *(const float4 *)(state + (uint64_t)row * args.value_dim + p.column)
                                    : make_float4(0, 0, 0, 0);
        }
}

template <int QUADS>
__device__ __forceinline__ void store_state(const linear_args &args, const place &p,
                                            const float4 (&s)[4 * QUADS])
{
    float *state =
        args.state[p.sequence] + args.delta_offset + (uint64_t)p.head * args.key_dim * args.value_dim;
    for (int j = 0; j < QUADS; j++)
        for (uint32_t e = 0; e < 4; e++) {
            uint32_t row = 32u * (uint32_t)j + 4 * p.group + e;
            if (p.inside && row < args.key_dim)
                *(float4 *)(state + (uint64_t)row * args.value_dim + p.column) = s[4 * j + (int)e];
        }
}

/* [key_dim] at `from` (16-byte aligned) -> the lane's rows. */
template <int QUADS>
__device__ __forceinline__ void load_rows(const float *from, uint32_t key_dim, unsigned group,
                                          float4 (&to)[QUADS])
{
    for (int j = 0; j < QUADS; j++) {
        uint32_t row = 32u * (uint32_t)j + 4 * group;
        to[j] = row < key_dim ? *(const float4 *)(from + row) : make_float4(0, 0, 0, 0);
    }
}

/* Which channel of the convolution place `i` of a block's q | k | v takes; FT_NONE beyond its end. */
__device__ __forceinline__ uint32_t channel_of(const linear_args &args, uint32_t head, uint32_t i)
{
    uint32_t dk = args.key_dim, key_head = head / (args.value_heads / args.key_heads);
    if (i < 2 * dk)
        return (i < dk ? key_head * dk : (args.key_heads + key_head - 1) * dk) + i;
    uint32_t column = blockIdx.x * args.columns + i - 2 * dk;
    return i < 2 * dk + args.columns && column < args.value_dim
               ? 2 * args.key_heads * dk + head * args.value_dim + column
               : FT_NONE;
}

__device__ __forceinline__ float total_of(const float *sums)
{
    float total = 0;
    for (unsigned w = 0; w < DECODE_WARPS; w++)
        total += sums[w];
    return total;
}

/* Where S[row][4 quad ..] of a warp's 16 columns lies in shared memory: rows of `columns` floats; the 64
 * bytes of odd groups of rows change places with their neighbours', so that the lanes of a load meet no bank
 * twice. */
__device__ __forceinline__ uint32_t held_at(uint32_t columns, uint32_t row, unsigned warp, unsigned quad)
{
    return row * columns + (warp ^ (row >> 2 & 1)) * COLUMNS + 4 * quad;
}

/* A lane's part of S -> shared memory; only the lane itself reads it there. */
template <int QUADS>
__device__ __forceinline__ void fetch_state(const linear_args &args, const place &p, unsigned warp,
                                            float *held)
{
    const float *state =
        args.state[p.sequence] + args.delta_offset + (uint64_t)p.head * args.key_dim * args.value_dim;
#pragma unroll
    for (uint32_t i = 0; i < 4 * QUADS; i++) {
        uint32_t row = 32 * (i / 4) + 4 * p.group + i % 4;
        float *to = held + held_at(args.columns, row, warp, p.quad);
        if (p.inside && row < args.key_dim)
            ft_copy_async16(to, state + (uint64_t)row * args.value_dim + p.column);
        else
            *(float4 *)to = make_float4(0, 0, 0, 0);
    }
    ft_copy_async_commit();
}

/* delta_row on a warp's columns in shared memory; q, k without their scales. The new S goes to `state` where
 * that is not NULL, else back. */
template <int QUADS>
__device__ __forceinline__ float held_row(const linear_args &args, const place &p, unsigned warp, float *held,
                                          const float *q, const float *k, float q_scale, float k_scale,
                                          float v, float beta, float decay, float *state)
{
    float sum[8] = {}, product = 0;
#pragma unroll
    for (uint32_t j = 0; j < QUADS; j++) {
        uint32_t first = 32 * j + 4 * p.group;
        float4 k4 = first < args.key_dim ? *(const float4 *)(k + first) : make_float4(0, 0, 0, 0);
        float4 q4 = first < args.key_dim ? *(const float4 *)(q + first) : make_float4(0, 0, 0, 0);
        const float kj[4] = {k4.x, k4.y, k4.z, k4.w}, qj[4] = {q4.x, q4.y, q4.z, q4.w};
#pragma unroll
        for (uint32_t e = 0; e < 4; e++) {
            float4 row = *(const float4 *)(held + held_at(args.columns, first + e, warp, p.quad));
            sum[0] = fmaf(kj[e], row.x, sum[0]);
            sum[1] = fmaf(kj[e], row.y, sum[1]);
            sum[2] = fmaf(kj[e], row.z, sum[2]);
            sum[3] = fmaf(kj[e], row.w, sum[3]);
            sum[4] = fmaf(qj[e], row.x, sum[4]);
            sum[5] = fmaf(qj[e], row.y, sum[5]);
            sum[6] = fmaf(qj[e], row.z, sum[6]);
            sum[7] = fmaf(qj[e], row.w, sum[7]);
            product = fmaf(kj[e], qj[e], product);
        }
    }
    for (int step = 4; step < 32; step <<= 1)
        product += __shfl_xor_sync(0xffffffffu, product, step);
    float mine = fold(sum, p.lane) * decay * (p.lane < 16 ? k_scale : q_scale);
    float d = beta * (v - mine), other = __shfl_xor_sync(0xffffffffu, d, 16); /* d: lanes < 16 */
    float result = fmaf(product * k_scale * q_scale, other, mine);
    d *= k_scale;
    float d0 = __shfl_sync(0xffffffffu, d, (int)p.quad), d1 = __shfl_sync(0xffffffffu, d, (int)(p.quad + 4));
    float d2 = __shfl_sync(0xffffffffu, d, (int)(p.quad + 8)),
          d3 = __shfl_sync(0xffffffffu, d, (int)(p.quad + 12));
#pragma unroll
    for (uint32_t j = 0; j < QUADS; j++) {
        uint32_t first = 32 * j + 4 * p.group;
        if (!p.inside || first >= args.key_dim)
            continue;
        float4 k4 = *(const float4 *)(k + first);
        const float kj[4] = {k4.x, k4.y, k4.z, k4.w};
#pragma unroll
        for (uint32_t e = 0; e < 4; e++) {
            float4 *at = (float4 *)(held + held_at(args.columns, first + e, warp, p.quad)), row = *at;
            row.x = fmaf(kj[e], d0, decay * row.x);
            row.y = fmaf(kj[e], d1, decay * row.y);
            row.z = fmaf(kj[e], d2, decay * row.z);
            row.w = fmaf(kj[e], d3, decay * row.w);
            *(state ? (float4 *)(state + (uint64_t)(first + e) * args.value_dim + p.column) : at) = row;
        }
    }
    return result;
}

/*
 * Grid (slices of args.columns columns, value heads, sequences); dynamic shared memory: S [32 QUADS,
 * columns]. S and the tail of the convolution belong to the layer: the step before wrote them, long ago, and
 * nothing else in this step does before this very kernel. So they are read, as weights are, while the kernel
 * in front still runs.
 */
template <int QUADS>
__global__ void __launch_bounds__(DECODE_THREADS, QUADS > 4 ? 2 : DECODE_BLOCKS)
    delta_decode(linear_args args)
{
    constexpr unsigned SLOTS = (64 * QUADS + DECODE_COLUMNS + DECODE_THREADS - 1) / DECODE_THREADS;
    FT_SHARED_DYNAMIC(float, held);
    FT_SHARED(float4, mixed4, (2 * KEY_DIM_MAX + DECODE_COLUMNS) / 4); /* q | k | v */
    FT_SHARED(float, q_sums, DECODE_WARPS);
    FT_SHARED(float, k_sums, DECODE_WARPS);
    FT_SHARED(float, o_sums, DECODE_WARPS);
    float *mixed = (float *)mixed4;
    ft_begin_next();
    place p = place_of(args, args.columns);
    unsigned warp = threadIdx.x >> 5;
    bool has_columns = warp * COLUMNS < args.columns; /* other warps help with the convolution */
    p.inside = p.own_inside = p.inside && has_columns;
    if (has_columns)
        fetch_state<QUADS>(args, p, warp, held);
    uint32_t dk = args.key_dim, first = args.first_row[p.sequence], rows = args.row_count[p.sequence];
    const float *x = args.project + first * args.stride, *tail = args.state[p.sequence] + args.tail_offset;
    float older[SLOTS], newest[SLOTS];
#pragma unroll
    for (unsigned i = 0; i < SLOTS; i++) {
        uint32_t channel = channel_of(args, p.head, threadIdx.x + i * DECODE_THREADS);
        bool taken = channel != FT_NONE;
        older[i] = taken ? convolve_older(args, NULL, tail, 0, channel) : 0.0f;
        newest[i] = taken ? args.conv_weight[(uint64_t)channel * args.taps + args.taps - 1] : 0.0f;
    }
    float rate = expf(args.a_log[p.head]), bias = args.dt_bias[p.head];
    float norm = args.norm && p.own_inside ? args.norm[p.own] : 0.0f;
    ft_copy_async_wait<0>();
    ft_wait_previous();
    if (args.stamp && blockIdx.x + blockIdx.y + blockIdx.z + threadIdx.x == 0)
        *args.stamp = ft_global_timer();
    for (uint32_t row = 0; row < rows; row++) {
        const float *project = x + row * args.stride;
        float z = args.norm && p.own_inside ? project[args.channels + p.head * args.value_dim + p.own] : 0.0f;
        float beta = beta_of(args, project, p.head), decay = decay_of(args, project, p.head, rate, bias);
        float q_sum = 0, k_sum = 0;
#pragma unroll
        for (unsigned i = 0; i < SLOTS; i++) {
            uint32_t at = threadIdx.x + i * DECODE_THREADS, channel = channel_of(args, p.head, at);
            if (channel == FT_NONE)
                continue;
            float before = row ? convolve_older(args, x, tail, row, channel) : older[i];
            float value = ft_silu_device(fmaf(newest[i], project[channel], before));
            mixed[at] = value;
            q_sum = at < dk ? fmaf(value, value, q_sum) : q_sum;
            k_sum = at >= dk && at < 2 * dk ? fmaf(value, value, k_sum) : k_sum;
        }
        q_sum = ft_warp_sum(q_sum);
        k_sum = ft_warp_sum(k_sum);
        if (p.lane == 0) {
            q_sums[warp] = q_sum;
            k_sums[warp] = k_sum;
        }
        __syncthreads();
        float q_scale = rsqrtf(total_of(q_sums) + 1e-6f) * rsqrtf((float)dk);
        float k_scale = rsqrtf(total_of(k_sums) + 1e-6f);
        float v = p.own_inside ? mixed[2 * dk + p.own - blockIdx.x * args.columns] : 0.0f;
        bool mine = p.lane >= 16 && p.own_inside;
        float *state = row + 1 < rows ? NULL
                                      : args.state[p.sequence] + args.delta_offset +
                                            (uint64_t)p.head * args.key_dim * args.value_dim;
        float o = 0;
        if (has_columns)
            o = held_row<QUADS>(args, p, warp, held, mixed, mixed + dk, q_scale, k_scale, v, beta, decay,
                                state);
        float square = ft_warp_sum(mine ? o * o : 0.0f);
        if (p.lane == 0)
            o_sums[warp] = square;
        __syncthreads(); /* and q, k, v may be overwritten */
        if (args.norm)
            o *= 1.0f / sqrtf(total_of(o_sums) / (float)args.value_dim + args.eps) * norm * act_of_z(args, z);
        if (mine)
            args.out[(first + row) * args.out_stride + (uint64_t)p.head * args.value_dim + p.own] = o;
    }
}

/* Grid (groups of GATE_WARPS value heads, rows): o / rms(o) norm act(z) in place, where delta_decode leaves
 * it to others. */
__global__ void __launch_bounds__(GATE_WARPS * 32) gate_rows(linear_args args)
{
    ft_begin_next();
    ft_wait_previous();
    uint32_t head = blockIdx.x * GATE_WARPS + (threadIdx.x >> 5), row = blockIdx.y, lane = threadIdx.x & 31;
    if (head >= args.value_heads)
        return;
    float *o = args.out + row * args.out_stride + (uint64_t)head * args.value_dim, sum = 0;
    const float *z = args.project + row * args.stride + args.channels + (uint64_t)head * args.value_dim;
    for (uint32_t i = 4 * lane; i < args.value_dim; i += 128) {
        float4 v = *(const float4 *)(o + i);
        sum = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, sum))));
    }
    float inverse = 1.0f / sqrtf(ft_warp_sum(sum) / (float)args.value_dim + args.eps);
    for (uint32_t i = 4 * lane; i < args.value_dim; i += 128) {
        float4 v = *(const float4 *)(o + i);
        v.x *= inverse * args.norm[i] * act_of_z(args, z[i]);
        v.y *= inverse * args.norm[i + 1] * act_of_z(args, z[i + 1]);
        v.z *= inverse * args.norm[i + 2] * act_of_z(args, z[i + 2]);
        v.w *= inverse * args.norm[i + 3] * act_of_z(args, z[i + 3]);
        *(float4 *)(o + i) = v;
    }
}

/* Grid (rows, 2 key heads + value heads + 1): one head's convolution, q and k normed; the last unit: beta, decay. */
__global__ void __launch_bounds__(CONV_THREADS) convolve_rows(linear_args args)
{
    FT_SHARED(float, sums, 33);
    uint32_t r = blockIdx.x, unit = blockIdx.y, s = args.row_sequence[r], first = args.first_row[s];
    if (args.stamp && blockIdx.x + blockIdx.y + threadIdx.x == 0)
        *args.stamp = ft_global_timer();
    uint32_t normed = 2 * args.key_heads;
    if (unit == normed + args.value_heads) {
        float *project = args.project + r * args.stride,
              *gates = project + args.channels + args.value_heads * args.value_dim;
        for (uint32_t head = threadIdx.x; head < args.value_heads; head += CONV_THREADS) {
            float beta = beta_of(args, project, head),
                  decay = decay_of(args, project, head, expf(args.a_log[head]), args.dt_bias[head]);
            gates[head] = beta;
            gates[args.value_heads + head] = decay;
        }
        return;
    }
    bool is_value = unit >= normed;
    uint32_t dim = is_value ? args.value_dim : args.key_dim;
    uint32_t channel = is_value ? normed * args.key_dim + (unit - normed) * dim : unit * dim;
    const float *x = args.project + first * args.stride, *tail = args.state[s] + args.tail_offset;
    float *y = args.conv + (uint64_t)r * args.channels + channel, sum = 0;
    for (uint32_t i = threadIdx.x; i < dim; i += CONV_THREADS) {
        float value = convolve(args, x, tail, r - first, channel + i);
        y[i] = value;
        sum = fmaf(value, value, sum);
    }
    if (is_value)
        return;
    float scale = rsqrtf(ft_block_sum(sum, sums) + 1e-6f);
    if (unit < args.key_heads)
        scale *= rsqrtf((float)dim);
    for (uint32_t i = threadIdx.x; i < dim; i += CONV_THREADS)
        y[i] *= scale;
}

/* One row's operands, as a lane needs them. */
template <int QUADS> struct operands {
    float4 k[QUADS], q[QUADS];
    float v, beta, decay;
};

template <int QUADS>
__device__ __forceinline__ void load_operands(const linear_args &args, const place &p, uint32_t row,
                                              uint32_t key_head, operands<QUADS> &to)
{
    const float *conv = args.conv + (uint64_t)row * args.channels,
                *project = args.project + row * args.stride;
    const float *gates = project + args.channels + args.value_heads * args.value_dim;
    load_rows<QUADS>(conv + key_head * args.key_dim, args.key_dim, p.group, to.q);
    load_rows<QUADS>(conv + (args.key_heads + key_head) * args.key_dim, args.key_dim, p.group, to.k);
    to.v = p.own_inside ? conv[2 * args.key_heads * args.key_dim + p.head * args.value_dim + p.own] : 0.0f;
    to.beta = gates[p.head];
    to.decay = gates[args.value_heads + p.head];
}

/* Grid (slices of 32 columns, value heads, sequences). Warps are on their own: no barrier. */
template <int QUADS> __global__ void __launch_bounds__(THREADS) delta_prefill(linear_args args)
{
    place p = place_of(args, BLOCK_COLUMNS);
    uint32_t first = args.first_row[p.sequence], rows = args.row_count[p.sequence];
    uint32_t key_head = p.head / (args.value_heads / args.key_heads);
    if (rows == 0)
        return;
    float4 s[4 * QUADS];
    operands<QUADS> now, next;
    load_state<QUADS>(args, p, s);
    load_operands<QUADS>(args, p, first, key_head, now);
    float *out = args.out + first * args.out_stride + (uint64_t)p.head * args.value_dim + p.own;
    for (uint32_t row = 0; row < rows; row++, out += args.out_stride) {
        load_operands<QUADS>(args, p, first + min(row + 1, rows - 1), key_head, next);
        float o = delta_row<QUADS>(s, now.k, now.q, now.v, now.beta, now.decay, p.lane);
        if (p.lane >= 16 && p.own_inside)
            *out = o;
        now = next;
    }
    store_state<QUADS>(args, p, s);
}

__global__ void move_tail(ft_tail_args args)
{
    ft_tail_move(args, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
}

linear_args args_of(const struct ft_cuda *c, uint32_t layer)
{
    const struct ft_model *m = c->model;
    const struct ft_linear_weights *w = &c->weights->layers[layer].linear;
    linear_args args = {};
    args.project = c->base + c->space.project;
    args.stride = c->space.project_width;
    args.conv_weight = w->conv;
    args.a_log = w->a_log;
    args.dt_bias = w->dt_bias;
    args.state = c->step.state;
    args.delta_offset = c->state.delta_offset[layer];
    args.tail_offset = c->state.conv_offset[layer];
    args.first_row = c->step.first_row;
    args.row_count = c->step.row_count;
    args.row_sequence = c->step.row_sequence;
    args.conv = c->base + c->space.conv;
    args.out = c->base + c->space.attention;
    args.out_stride = c->space.attention_width;
    args.key_heads = m->key_head_count;
    args.value_heads = m->value_head_count;
    args.key_dim = m->key_dim;
    args.value_dim = m->value_dim;
    args.taps = m->conv_taps;
    args.channels = ft_model_conv_channels(m);
    args.norm = w->norm;
    args.eps = m->rms_eps;
    args.silu = m->output_gate == FT_ACTIVATION_SILU;
    args.stamp = ft_cuda_stamp_of(c, layer, FT_CUDA_STAMP_ATTEND);
    return args;
}

int launch_gate(const struct ft_cuda *c, const linear_args &args, void *stream)
{
    dim3 grid((args.value_heads + GATE_WARPS - 1) / GATE_WARPS, c->step.rows);
    return FT_LAUNCH_NEXT(gate_rows, grid, dim3(GATE_WARPS * 32), 0, stream, args);
}

template <int QUADS> int launch(const struct ft_cuda *c, const linear_args &args, void *stream)
{
    if (c->step.rows <= FT_CUDA_DECODE_ROWS) {
        linear_args own = args;
        own.columns = DECODE_COLUMNS; /* fewer where shared memory is small */
        while (own.columns > 2 * COLUMNS && 32 * QUADS * own.columns * sizeof(float) > ft_shared_max() - 4096)
            own.columns /= 2;
        uint32_t slices = (args.value_dim + own.columns - 1) / own.columns;
        size_t shared = 32 * QUADS * own.columns * sizeof(float);
        if (slices > 1) /* no block has a whole head: norm and gate afterwards */
            own.norm = NULL;
        int error = shared > 40 * 1024 ? FT_SHARED_LIMIT(delta_decode<QUADS>, shared) : 0;
        if (error == 0)
            error = FT_LAUNCH_NEXT(delta_decode<QUADS>, dim3(slices, args.value_heads, c->step.sequences),
                                   dim3(DECODE_THREADS), shared, stream, own);
        return error || slices == 1 ? error : launch_gate(c, args, stream);
    }
    dim3 grid((args.value_dim + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS, args.value_heads, c->step.sequences);
    dim3 units(c->step.rows, 2 * args.key_heads + args.value_heads + 1);
    int status = FT_LAUNCH(convolve_rows, units, dim3(CONV_THREADS), 0, stream, args);
    if (status == 0)
        status = FT_LAUNCH(delta_prefill<QUADS>, grid, dim3(THREADS), 0, stream, args);
    return status ? status : launch_gate(c, args, stream);
}

} // namespace

int ft_cuda_linear_attention(const struct ft_cuda *c, uint32_t layer, void *stream)
{
    linear_args args = args_of(c, layer);
    if (args.key_dim % 4 || args.value_dim % 4 || args.key_dim > KEY_DIM_MAX)
        return NOT_SUPPORTED;
    if (args.key_dim <= 32)
        return launch<1>(c, args, stream);
    if (args.key_dim <= 64)
        return launch<2>(c, args, stream);
    if (args.key_dim <= 128)
        return launch<4>(c, args, stream);
    return launch<8>(c, args, stream);
}

int ft_cuda_linear_tail(const struct ft_cuda *c, uint32_t layer, void *stream)
{
    ft_tail_args args = ft_tail_args_of(c, layer);
    uint32_t blocks = (args.sequences * args.channels + 255) / 256;
    return FT_LAUNCH(move_tail, dim3(blocks), dim3(256), 0, stream, args);
}
