/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Per-layer embeddings: the table's rows arrive from the host; their projections are gated by the residual
 * streams, convolved over time and added to the streams.
 *
 * K = rms(key) w_key, Q = rms(R) w_query per stream; u = <K, Q> / sqrt(H) needs three sums that one pass over
 * key and residual gives: u = s_key s_query sum(key w_key R w_query) / sqrt(H). U = gate V is H values times
 * a number, so its own rms follows from sum(V^2).
 *
 * Decode: one block a (stream, sequence) does everything, row after row: the channels of a stream are its
 * own, in the state too. Prefill: gates of all rows first (U to ple_u, its norm to ple_c), then the
 * convolution over rows, then the state's columns move on.
 */
#include "kernels_cuda/device.h"
#include "kernels_cuda/kernels_cuda.h"

namespace
{

constexpr unsigned THREADS = 256, ARRIVE_THREADS = 1024, POLLS_PER_ABORT = 16;

struct ple_args {
    const float *project; /* row r at + r * stride: key [streams, hidden], value [hidden] */
    uint64_t stride;
    float *residual, *u, *c;                               /* [rows, streams, hidden] */
    const float *norm_key, *norm_query, *norm_conv, *conv; /* [streams * hidden], conv [.., taps] */
    float *const *state;
    uint64_t state_offset;
    const uint32_t *first_row, *row_count, *row_sequence;
    uint32_t streams, hidden, taps, dilation, sequences;
    float eps;
};

/* Flags hold the epoch that raised them. */
__device__ __forceinline__ bool is_raised(const uint32_t *flag, uint32_t epoch)
{
    return (int32_t)(ft_load_acquire_system(flag) - epoch) >= 0;
}

/* One block when it waits: thread 0 polls, the barrier hands what the flag announces to the others. */
__global__ void __launch_bounds__(ARRIVE_THREADS)
    arrive(const float4 *from, float4 *to, uint32_t count, const uint32_t *flag, const uint32_t *abort,
           const uint32_t *epoch, uint64_t *stamp)
{
    ft_begin_next();
    ft_wait_previous();
    if (stamp && blockIdx.x + threadIdx.x == 0)
        *stamp = ft_global_timer();
    if (flag) {
        if (threadIdx.x == 0) {
            uint32_t wanted = *epoch;
            for (uint32_t polls = 1; !is_raised(flag, wanted); polls++)
                if (polls % POLLS_PER_ABORT == 0 && is_raised(abort, wanted))
                    break;
        }
        __syncthreads();
    }
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        to[i] = __ldcg(from + i);
}

/* What one pass over a row's stream gives; sums in every thread. */
struct gate_sums {
    float key, query, dot, value;
};

__device__ __forceinline__ float sum_of(const float (*sums)[4], unsigned which)
{
    float total = 0;
    for (unsigned w = 0; w < THREADS / 32; w++)
        total += sums[w][which];
    return total;
}

__device__ gate_sums gate_pass(const ple_args &args, const float *key, const float *value,
                               const float *residual, uint32_t stream)
{
    FT_SHARED(float, scratch, THREADS / 32 * 4);
    float(*sums)[4] = (float(*)[4])scratch;
    const float *wk = args.norm_key + (uint64_t)stream * args.hidden,
                *wq = args.norm_query + (uint64_t)stream * args.hidden;
    gate_sums s = {0, 0, 0, 0};
    for (uint32_t i = threadIdx.x; i < args.hidden; i += THREADS) {
        float k = key[i], q = residual[i], v = value[i];
        s.key = fmaf(k, k, s.key);
        s.query = fmaf(q, q, s.query);
        s.dot = fmaf(k * (1.0f + wk[i]), q * (1.0f + wq[i]), s.dot);
        s.value = fmaf(v, v, s.value);
    }
    s.key = ft_warp_sum(s.key);
    s.query = ft_warp_sum(s.query);
    s.dot = ft_warp_sum(s.dot);
    s.value = ft_warp_sum(s.value);
    __syncthreads(); /* of the row before */
    if ((threadIdx.x & 31) == 0) {
        float *mine = sums[threadIdx.x >> 5];
        mine[0] = s.key;
        mine[1] = s.query;
        mine[2] = s.dot;
        mine[3] = s.value;
    }
    __syncthreads();
    s.key = sum_of(sums, 0);
    s.query = sum_of(sums, 1);
    s.dot = sum_of(sums, 2);
    s.value = sum_of(sums, 3);
    return s;
}

/* gate = sigmoid(sign(u) sqrt(max(|u|, 1e-6))); 0.5 at 0. `norm`: factor of the norm of gate * V. */
__device__ __forceinline__ float gate_of(const ple_args &args, const gate_sums &s, float *norm)
{
    float h = (float)args.hidden;
    float u = s.dot / sqrtf(s.key / h + args.eps) / sqrtf(s.query / h + args.eps) / sqrtf(h);
    float root = u == 0 ? 0.0f : sqrtf(fabsf(u) < 1e-6f ? 1e-6f : fabsf(u));
    float gate = ft_sigmoid_device(u < 0 ? -root : root);
    *norm = 1.0f / sqrtf(gate * gate * s.value / h + args.eps);
    return gate;
}

/* Grid (streams, sequences): every row of the sequence. */
__global__ void __launch_bounds__(THREADS) inject_sequence(ple_args args)
{
    uint32_t stream = blockIdx.x, s = blockIdx.y, wide = args.streams * args.hidden,
             depth = (args.taps - 1) * args.dilation;
    uint32_t first = args.first_row[s], rows = args.row_count[s], from = stream * args.hidden;
    float *state = args.state[s] + args.state_offset + from;
    ft_begin_next();
    ft_wait_previous();
    for (uint32_t r = first; r < first + rows; r++) {
        const float *key = args.project + r * args.stride + from,
                    *value = args.project + r * args.stride + wide;
        float *residual = args.residual + (uint64_t)r * wide + from, norm;
        float gate = gate_of(args, gate_pass(args, key, value, residual, stream), &norm);
        for (uint32_t i = threadIdx.x; i < args.hidden; i += THREADS) {
            float u = gate * value[i], c = u * norm * (1.0f + args.norm_conv[from + i]);
            const float *w = args.conv + (uint64_t)(from + i) * args.taps;
            float sum = w[args.taps - 1] * c;
            for (uint32_t j = 0; j + 1 < args.taps; j++)
                sum = fmaf(w[j], state[(uint64_t)j * args.dilation * wide + i], sum);
            for (uint32_t j = 0; j + 1 < depth; j++)
                state[(uint64_t)j * wide + i] = state[(uint64_t)(j + 1) * wide + i];
            if (depth)
                state[(uint64_t)(depth - 1) * wide + i] = c;
            residual[i] += u + ft_silu_device(sum);
        }
    }
}

/* Grid (streams, rows). */
__global__ void __launch_bounds__(THREADS) gate_rows(ple_args args)
{
    uint32_t stream = blockIdx.x, r = blockIdx.y, wide = args.streams * args.hidden,
             from = stream * args.hidden;
    const float *key = args.project + r * args.stride + from, *value = args.project + r * args.stride + wide;
    float norm,
        gate = gate_of(args, gate_pass(args, key, value, args.residual + (uint64_t)r * wide + from, stream),
                       &norm);
    for (uint32_t i = threadIdx.x; i < args.hidden; i += THREADS) {
        float u = gate * value[i];
        args.u[(uint64_t)r * wide + from + i] = u;
        args.c[(uint64_t)r * wide + from + i] = u * norm * (1.0f + args.norm_conv[from + i]);
    }
}

/* Grid (channels / THREADS, rows). */
__global__ void __launch_bounds__(THREADS) convolve_rows(ple_args args)
{
    uint32_t wide = args.streams * args.hidden, i = blockIdx.x * THREADS + threadIdx.x, r = blockIdx.y;
    if (i >= wide)
        return;
    uint32_t s = args.row_sequence[r], first = args.first_row[s], depth = (args.taps - 1) * args.dilation;
    const float *state = args.state[s] + args.state_offset, *w = args.conv + (uint64_t)i * args.taps;
    float sum = w[args.taps - 1] * args.c[(uint64_t)r * wide + i];
    for (uint32_t j = 0; j + 1 < args.taps; j++) {
        uint32_t from = r - first + j * args.dilation; /* of state columns, then step rows */
        float value = from < depth ? state[(uint64_t)from * wide + i]
                                   : args.c[(uint64_t)(first + from - depth) * wide + i];
        sum = fmaf(w[j], value, sum);
    }
    args.residual[(uint64_t)r * wide + i] += args.u[(uint64_t)r * wide + i] + ft_silu_device(sum);
}

/* Grid (channels / THREADS, sequences): the columns move on by the sequence's rows; ascending order is safe
 * in place. */
__global__ void __launch_bounds__(THREADS) move_columns(ple_args args)
{
    uint32_t wide = args.streams * args.hidden, i = blockIdx.x * THREADS + threadIdx.x, s = blockIdx.y;
    if (i >= wide)
        return;
    uint32_t depth = (args.taps - 1) * args.dilation, first = args.first_row[s], rows = args.row_count[s];
    float *state = args.state[s] + args.state_offset + i;
    for (uint32_t j = 0; j < depth; j++) {
        uint32_t from = rows + j;
        state[(uint64_t)j * wide] =
            from < depth ? state[(uint64_t)from * wide] : args.c[(uint64_t)(first + from - depth) * wide + i];
    }
}

} // namespace

int ft_cuda_ple_arrive(const struct ft_cuda *c, uint32_t table, bool wait, void *stream)
{
    const struct ft_model *m = c->model;
    const struct ft_cuda_exchange *x = &c->exchange;
    uint32_t count = c->step.rows * m->ple_embed_dim / 4;
    const float4 *from = (const float4 *)(x->host_ple + (uint64_t)table * x->rows_max * m->ple_embed_dim);
    float4 *to = (float4 *)(c->base + c->space.ple_e + (uint64_t)table * c->space.rows * m->ple_embed_dim);
    if (m->ple_embed_dim % 4)
        return 801; /* cudaErrorNotSupported */
    uint32_t blocks = wait ? 1 : FT_MIN((uint32_t)ft_div_up(count, ARRIVE_THREADS), 64u);
    const uint32_t *flag = wait ? x->ple + (uint64_t)table * FT_CUDA_FLAG_STRIDE : NULL;
    return FT_LAUNCH_NEXT(arrive, dim3(blocks), dim3(ARRIVE_THREADS), 0, stream, from, to, count, flag,
                          x->abort, c->step.epoch,
                          ft_cuda_stamp_of(c, m->ple[table].layer, FT_CUDA_STAMP_PLE));
}

int ft_cuda_ple_inject(const struct ft_cuda *c, uint32_t layer, void *stream)
{
    const struct ft_model *m = c->model;
    const struct ft_ple_weights *w = &c->weights->layers[layer].ple;
    uint32_t table = m->layers[layer].ple, rows = c->step.rows, width = (m->hc_count + 1) * m->hidden;
    float *project = c->base + c->space.ple_project + (uint64_t)table * c->space.rows * width;
    struct ft_cuda_segment segments[2] = {{&w->key, NULL}, {&w->value, NULL}};
    const float *e = c->base + c->space.ple_e + (uint64_t)table * c->space.rows * m->ple_embed_dim;
    int status = ft_cuda_project(c, segments, 2, e, m->ple_embed_dim, rows, project, width, NULL, stream);
    if (status)
        return status;
    ple_args args = {};
    args.project = project;
    args.stride = width;
    args.residual = c->base + c->space.residual;
    args.u = c->base + c->space.ple_u;
    args.c = c->base + c->space.ple_c;
    args.norm_key = w->norm_key;
    args.norm_query = w->norm_query;
    args.norm_conv = w->norm_conv;
    args.conv = w->conv;
    args.state = c->step.state;
    args.state_offset = c->state.ple_offset[table];
    args.first_row = c->step.first_row;
    args.row_count = c->step.row_count;
    args.row_sequence = c->step.row_sequence;
    args.streams = m->hc_count;
    args.hidden = m->hidden;
    args.taps = m->ple_taps;
    args.dilation = m->ngram_size;
    args.sequences = c->step.sequences;
    args.eps = m->rms_eps;
    if (rows <= FT_CUDA_DECODE_ROWS)
        return FT_LAUNCH_NEXT(inject_sequence, dim3(m->hc_count, args.sequences), dim3(THREADS), 0, stream,
                              args);
    dim3 channels((m->hc_count * m->hidden + THREADS - 1) / THREADS, rows);
    status = FT_LAUNCH(gate_rows, dim3(m->hc_count, rows), dim3(THREADS), 0, stream, args);
    if (status == 0)
        status = FT_LAUNCH(convolve_rows, channels, dim3(THREADS), 0, stream, args);
    channels.y = args.sequences;
    return status ? status : FT_LAUNCH(move_columns, channels, dim3(THREADS), 0, stream, args);
}
