// SPDX-License-Identifier: Apache-2.0
//
// Runs CUDA kernels on the CPU, for tests. A .cu file is compiled by g++ with this header included first
// (-x c++ -include tests/cuda_emulator.h -DFT_CUDA_EMULATED). The threads of a block are fibers of the calling thread:
// they run until a barrier or a warp operation and are then switched, so the result does not depend on a scheduler.
// Blocks run one after another. Launches go through ft_emulated_launch (tests/cuda_emulator.cpp or a fake runtime).
// Covers what kernels_cuda/device.h allows; a block that waits for itself aborts with a message.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <sched.h>
#include <time.h>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))
#define __constant__ static const
#define __grid_constant__

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct uint3_emulated {
    unsigned x, y, z;
};
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(4) uchar4 { unsigned char x, y, z, w; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- the running block (one per OS thread) ----
struct ft_emulated_thread {
    uint3_emulated thread, block, block_dim, grid_dim;
    unsigned index; // linear in the block
};
extern thread_local ft_emulated_thread *ft_emulated_self;
#define threadIdx (ft_emulated_self->thread)
#define blockIdx (ft_emulated_self->block)
#define blockDim (ft_emulated_self->block_dim)
#define gridDim (ft_emulated_self->grid_dim)
constexpr int warpSize = 32;

void *ft_emulated_shared_dynamic();
void ft_emulated_barrier();
// All lanes of `mask` bring `bytes` (<= 32) at `value`; returns the 32 values, bytes_max apart, valid until the lane's
// second next operation.
constexpr unsigned FT_EMULATED_EXCHANGE_MAX = 32;
const unsigned char *ft_emulated_exchange(unsigned mask, const void *value, unsigned bytes);
// Runs (or queues on `stream`) a kernel over a grid; returns 0 or an error code.
int ft_emulated_launch(void *stream, dim3 grid, dim3 block, size_t shared_bytes, std::function<void()> body);
// Runs the grid now, in the calling thread.
void ft_emulated_run(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()> &body);
// Blocks of a grid run from the last to the first: a kernel must not rely on their order.
extern bool ft_emulated_reversed;

template <class... P, class... A>
int ft_emulated_launch_kernel(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, void *stream, A... args)
{
    return ft_emulated_launch(stream, grid, block, shared, [=]() { kernel(static_cast<P>(args)...); });
}
#define FT_LAUNCH(kernel, grid, block, shared, stream, ...)                                                            \
    ft_emulated_launch_kernel((kernel), (grid), (block), (shared), (void *)(stream), __VA_ARGS__)
#define FT_LAUNCH_NEXT FT_LAUNCH
#define FT_SHARED_LIMIT(kernel, bytes) ((void)(kernel), 0)
static inline uint32_t ft_shared_max() { return 99 * 1024; }
#define FT_SHARED(type, name, count) static thread_local type name[count]
#define FT_SHARED_DYNAMIC(type, name) type *name = (type *)ft_emulated_shared_dynamic()

// ---- barriers and warp operations ----
#define __syncthreads() ft_emulated_barrier()
static inline void __syncwarp(unsigned mask = 0xffffffffu)
{
    char none = 0;
    ft_emulated_exchange(mask, &none, 1);
}
template <class T> static inline T ft_emulated_lane(const unsigned char *all, unsigned lane)
{
    T value;
    memcpy(&value, all + lane * FT_EMULATED_EXCHANGE_MAX, sizeof value);
    return value;
}
template <class T> static inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32)
{
    unsigned self = ft_emulated_self->index & 31, base = self & ~(unsigned)(width - 1);
    return ft_emulated_lane<T>(ft_emulated_exchange(mask, &value, sizeof value), base + ((unsigned)lane & (unsigned)(width - 1)));
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32)
{
    (void)width;
    unsigned self = ft_emulated_self->index & 31;
    return ft_emulated_lane<T>(ft_emulated_exchange(mask, &value, sizeof value), self ^ (unsigned)with);
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32)
{
    unsigned self = ft_emulated_self->index & 31, to = self + by;
    const unsigned char *all = ft_emulated_exchange(mask, &value, sizeof value);
    return (self & (unsigned)(width - 1)) + by < (unsigned)width ? ft_emulated_lane<T>(all, to) : value;
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32)
{
    unsigned self = ft_emulated_self->index & 31;
    const unsigned char *all = ft_emulated_exchange(mask, &value, sizeof value);
    return (self & (unsigned)(width - 1)) >= by ? ft_emulated_lane<T>(all, self - by) : value;
}
static inline unsigned __ballot_sync(unsigned mask, int predicate)
{
    unsigned char mine = predicate != 0;
    const unsigned char *all = ft_emulated_exchange(mask, &mine, 1);
    unsigned votes = 0;
    for (unsigned i = 0; i < 32; i++)
        if (mask >> i & 1 && all[i * FT_EMULATED_EXCHANGE_MAX])
            votes |= 1u << i;
    return votes;
}
static inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
static inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
static inline unsigned __activemask() { return 0xffffffffu; }

// ---- memory ----
static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
template <class T> static inline T __ldg(const T *p) { return *p; }
template <class T> static inline T __ldcs(const T *p) { return *p; }
template <class T> static inline T __ldcg(const T *p) { return *p; }
template <class T> static inline T __ldca(const T *p) { return *p; }
template <class T> static inline T __ldcv(const T *p) { asm volatile("" ::: "memory"); return *p; }
template <class T> static inline void __stcs(T *p, T v) { *p = v; }
template <class T> static inline void __stcg(T *p, T v) { *p = v; }
template <class T> static inline T atomicAdd(T *p, T v)
{
    T old;
    __atomic_load(p, &old, __ATOMIC_SEQ_CST);
    for (T next = old + v; !__atomic_compare_exchange(p, &old, &next, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);)
        next = old + v;
    return old;
}
template <class T> static inline T atomicExch(T *p, T v) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); }
template <class T> static inline T atomicCAS(T *p, T expected, T v)
{
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected;
}
template <class T> static inline T atomicMax(T *p, T v)
{
    T old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
    while (old < v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
    return old;
}
template <class T> static inline T atomicMin(T *p, T v)
{
    T old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
    while (old > v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
    return old;
}
template <class T> static inline T atomicOr(T *p, T v) { return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST); }

// ---- bits and arithmetic ----
static inline float __uint_as_float(uint32_t v) { float f; memcpy(&f, &v, 4); return f; }
static inline uint32_t __float_as_uint(float f) { uint32_t v; memcpy(&v, &f, 4); return v; }
static inline float __int_as_float(int v) { float f; memcpy(&f, &v, 4); return f; }
static inline int __float_as_int(float f) { int v; memcpy(&v, &f, 4); return v; }
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
static inline unsigned __brev(unsigned v)
{
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (v >> i & 1u) << (31 - i);
    return r;
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s)
{
    uint64_t both = (uint64_t)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        unsigned n = s >> (4 * i) & 0xf, byte = (unsigned)(both >> (8 * (n & 7))) & 0xff;
        if (n & 8) byte = byte & 0x80 ? 0xff : 0;
        r |= byte << (8 * i);
    }
    return r;
}
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((uint64_t)a * b) >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned long long)(((unsigned __int128)a * b) >> 64); }
#define __expf expf
#define __logf logf
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __saturatef(float a) { return a < 0 ? 0 : a > 1 ? 1 : a; }
template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
template <class T> static inline T max(T a, T b) { return a < b ? b : a; }
static inline void __nanosleep(unsigned ns) { struct timespec t = {0, (long)ns}; nanosleep(&t, nullptr); }
[[noreturn]] static inline void __trap() { fprintf(stderr, "cuda emulator: __trap\n"); abort(); }

// ---- device.h's own functions ----
#ifdef FT_TELL_TSAN
extern "C" void __tsan_acquire(void *address), __tsan_release(void *address);
#else
static inline void __tsan_acquire(void *) {}
static inline void __tsan_release(void *) {}
#endif
// A kernel that polls must let the thread that will raise the flag run, also on one core.
static inline uint32_t ft_load_acquire_system(const uint32_t *flag)
{
    static thread_local unsigned polls;
    if (++polls % 64 == 0)
        sched_yield();
    uint32_t value = __atomic_load_n(flag, __ATOMIC_ACQUIRE);
    __tsan_acquire((void *)flag);
    return value;
}
static inline void ft_store_release_system(uint32_t *flag, uint32_t value)
{
    __tsan_release(flag);
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
}
static inline uint32_t ft_count_arrival(uint32_t *counter) { return __atomic_fetch_add(counter, 1u, __ATOMIC_ACQ_REL); }
static inline uint64_t ft_global_timer(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
static inline void ft_wait_previous(void) {}
static inline void ft_begin_next(void) {}
static inline void ft_prefetch_l2(const void *) {}
static inline bool ft_can_launch_next(void) { return true; }
static inline uint4 ft_load_stream16(const void *from) { return *(const uint4 *)from; }
static inline void ft_copy_async16(void *shared, const void *global) { memcpy(shared, global, 16); }
static inline void ft_copy_async_commit(void) {}
template <int pending> static inline void ft_copy_async_wait(void) {}
static inline float ft_emulated_half(uint32_t pair, unsigned high) { return __uint_as_float(high ? pair & 0xffff0000u : pair << 16); }
static inline float ft_f16_low(uint32_t pair)
{
    uint32_t bits = pair & 0x7fffu, sign = (pair & 0x8000u) << 16;
    float value = bits >= 0x7c00u ? __uint_as_float(0x7f800000u | (bits & 0x3ffu) << 13) : __uint_as_float(bits << 13) * 0x1p112f;
    return __uint_as_float(__float_as_uint(value) | sign);
}
static inline float ft_f16_high(uint32_t pair) { return ft_f16_low(pair >> 16); }
static inline uint32_t ft_emulated_to_f16(float value)
{
    uint32_t bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return 0x7fffu;
    if (magnitude >= 0x477ff000u) // rounds beyond 65504
        return sign | 0x7c00u;
    if (magnitude < 0x38800000u) // subnormal: the f32 adder rounds at bit 2^-24
        return sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u);
    return sign | ((magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13);
}
static inline uint32_t ft_to_f16_pair(float low, float high) { return ft_emulated_to_f16(low) | ft_emulated_to_f16(high) << 16; }
static inline uint32_t ft_mul_f16_pair(uint32_t a, uint32_t b)
{
    return ft_to_f16_pair(ft_f16_low(a) * ft_f16_low(b), ft_f16_high(a) * ft_f16_high(b)); // products of f16 are exact in f32
}
static inline uint32_t ft_e4m3_to_f16_pair(uint32_t bytes)
{
    float value[2];
    for (unsigned i = 0; i < 2; i++) {
        uint32_t byte = bytes >> 8 * i & 0xffu, magnitude = byte & 0x7fu;
        value[i] = magnitude == 0x7fu ? __uint_as_float(0x7fffffffu) : __uint_as_float(magnitude << 20) * 0x1p120f;
        value[i] = byte & 0x80u ? -value[i] : value[i];
    }
    return ft_to_f16_pair(value[0], value[1]);
}
// One product of matrix units; half: the element of a pair as f32.
template <class Half>
static inline void ft_emulated_mma(float d[4], const uint32_t a[4], const uint32_t b[2], Half half)
{
    uint32_t mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    const unsigned char *all = ft_emulated_exchange(0xffffffffu, mine, sizeof mine);
    unsigned lane = ft_emulated_self->index & 31, g = lane >> 2, t = lane & 3;
    auto word = [&](unsigned of, unsigned i) { return ft_emulated_lane<uint32_t>(all + 4 * i, of); };
    for (unsigned row = 0; row < 2; row++)
        for (unsigned col = 0; col < 2; col++) {
            double sum = d[row * 2 + col]; // products are exact, the unit adds with more bits than f32
            for (unsigned k = 0; k < 16; k++) {
                unsigned part = k >> 3, in = k & 7, owner = in >> 1, high = in & 1;
                float x = half(word(g * 4 + owner, part * 2 + row), high);
                float y = half(word((2 * t + col) * 4 + owner, 4 + part), high);
                sum += (double)x * (double)y;
            }
            d[row * 2 + col] = (float)sum;
        }
}
static inline void ft_mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
    ft_emulated_mma(d, a, b, ft_emulated_half);
}
static inline void ft_mma_f16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
    ft_emulated_mma(d, a, b, [](uint32_t pair, unsigned high) { return high ? ft_f16_high(pair) : ft_f16_low(pair); });
}
static inline uint32_t ft_mul_bf16_pair(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (unsigned i = 0; i < 2; i++) {
        uint32_t bits = __float_as_uint(ft_emulated_half(a, i) * ft_emulated_half(b, i));
        bits = (bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
        product |= bits << (16 * i);
    }
    return product;
}
