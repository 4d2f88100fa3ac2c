/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What every .cu file builds on: launches, shared memory, conversions of 4- and 8-bit floats, warp and block sums,
 * asynchronous copies, the bf16 and f16 matrix units, loads and stores that the host sees in order.
 *
 * A kernel file is written against this page and plain CUDA C, nothing else. It is compiled twice: by nvcc for GPUs,
 * and by g++ against tests/cuda_emulator.h (FT_CUDA_EMULATED), where a block's threads are fibers of one thread, so
 * that every kernel is compared with its CPU reference on machines without a GPU. Hence three rules:
 *   - launch with FT_LAUNCH, declare shared memory with FT_SHARED / FT_SHARED_DYNAMIC;
 *   - PTX stands only here, behind a function with an emulated twin;
 *   - __syncthreads and warp operations are reached by all threads (of the mask) of the block.
 */
#ifndef FT_KERNELS_CUDA_DEVICE_H
#define FT_KERNELS_CUDA_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#ifndef FT_CUDA_EMULATED
#include <cuda_runtime.h>
#endif
#if defined(__CUDACC__) || defined(FT_CUDA_EMULATED) /* host code of tests may include kernel headers for sizes */
#ifndef FT_CUDA_EMULATED

/* Launches and returns the launch's error (0 = cudaSuccess); `shared` bytes of dynamic shared memory. More than 48 KB
 * of it are asked for once per kernel with FT_SHARED_LIMIT. */
#define FT_LAUNCH(kernel, grid, block, shared, stream, ...)                                                            \
    (kernel<<<(grid), (block), (shared), (cudaStream_t)(stream)>>>(__VA_ARGS__), (int)cudaPeekAtLastError())
/*
 * The same, but the kernel may begin while the one in front of it on the stream still runs (programmatic dependent launch,
 * compute capability 9.0 and newer; elsewhere a plain launch). Such a kernel calls ft_wait_previous in every thread before
 * it reads or writes anything that other kernels of the step write; weights may be asked for earlier: that is the point.
 * The kernel in front says ft_begin_next when the next one may take what its own blocks leave free.
 */
#define FT_LAUNCH_NEXT(kernel, grid, block, shared, stream, ...)                                                       \
    ft_launch_next((kernel), (grid), (block), (shared), (void *)(stream), __VA_ARGS__)
#define FT_SHARED_LIMIT(kernel, bytes)                                                                                 \
    ((int)cudaFuncSetAttribute((kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(bytes)))
/* Bytes of dynamic shared memory that one block of the current GPU may ask for. */
static inline uint32_t ft_shared_max(void)
{
    int device = 0, bytes = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess)
        return 48 * 1024;
    return (uint32_t)bytes;
}
#define FT_SHARED(type, name, count) __shared__ type name[count]
#define FT_SHARED_DYNAMIC(type, name)                                                                                  \
    extern __shared__ __align__(16) unsigned char ft_shared_dynamic[];                                                 \
    type *name = (type *)ft_shared_dynamic

static inline bool ft_can_launch_next(void)
{
    static signed char majors[64]; /* of each GPU, once asked; every thread finds the same */
    int device = 0, found = 0;
    if (cudaGetDevice(&device) != cudaSuccess || device >= 64)
        return false;
    if (!majors[device] &&
        cudaDeviceGetAttribute(&found, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess)
        majors[device] = (signed char)found;
    return majors[device] >= 9;
}
/*
 * Every kernel that may begin early also asks for the same split of a multiprocessor's memory, in percent of what can be
 * shared memory. The split changes only while a multiprocessor is idle, which it never is when kernels overlap: behind a
 * kernel that was content with little, one block stood where two should, and reads took 1.5 times as long. And not all of
 * it: loads on their way take room in what is left for L1. Measured on an H200, weights of 84 MB (floor 18.7 us) and the
 * head's 1.27 GB (283 us): at 30 and 44% 21.4 and 290 us, 58% 22.5 and 289, 72% 22.1 and 289, 86% 24.1 and 357, 100% 24.5
 * and 364. Batches of 4 and 8 are fastest at 58 and 72%: their activations need the room.
 */
#define FT_SHARED_SPLIT 72u
template <class... P, class... A>
static inline int ft_launch_next(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, void *stream, A... args)
{
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    attributes[0].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attributes[0].val.sharedMemCarveout = FT_SHARED_SPLIT;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = (cudaStream_t)stream;
    config.attrs = attributes;
    config.numAttrs = ft_can_launch_next() ? 2 : 1;
    return (int)cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...);
}
/* Returns when the kernel in front has ended and what it wrote can be read. */
static __device__ __forceinline__ void ft_wait_previous(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
static __device__ __forceinline__ void ft_begin_next(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/* Asks for the 128-byte line at `address` of device memory to come into L2. */
static __device__ __forceinline__ void ft_prefetch_l2(const void *address)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

/* Flags between host and device: one 4-byte word a line, written behind everything it announces. */
static __device__ __forceinline__ uint32_t ft_load_acquire_system(const uint32_t *flag)
{
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}
static __device__ __forceinline__ void ft_store_release_system(uint32_t *flag, uint32_t value)
{
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
/* Adds one and returns what stood there: what the thread has seen before (a barrier brings the block's stores) is there
 * for the thread that counts after it. Counters of "last block" endings; a fence would cost as much again, twice. */
static __device__ __forceinline__ uint32_t ft_count_arrival(uint32_t *counter)
{
    uint32_t before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}
/* Nanoseconds of the GPU's own clock (its tick may be 32 ns or 1 us). */
static __device__ __forceinline__ uint64_t ft_global_timer(void)
{
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}
/* 16 bytes that nobody asks for again. Loads and copies by these functions are issued in the order of the program. */
static __device__ __forceinline__ uint4 ft_load_stream16(const void *from)
{
    uint4 v;
    asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}
/* Copies 16 bytes from global to shared memory (both 16-byte aligned) behind the thread's back. sm_75 copies at once. */
static __device__ __forceinline__ void ft_copy_async16(void *shared, const void *global)
{
#if __CUDA_ARCH__ >= 800
    unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
#else
    *(uint4 *)shared = *(const uint4 *)global;
#endif
}
static __device__ __forceinline__ void ft_copy_async_commit(void)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
/* Waits until at most `pending` committed groups are under way. */
template <int pending> static __device__ __forceinline__ void ft_copy_async_wait(void)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}
#if __CUDA_ARCH__ < 800
/* ft_mma_bf16 without a matrix unit. A call, because kernels unroll dozens of them. */
static __device__ __noinline__ float4 ft_mma_bf16_shuffled(float4 sum, uint4 left, uint2 right)
{
    uint32_t a[4] = {left.x, left.y, left.z, left.w}, b[2] = {right.x, right.y};
    float d[4] = {sum.x, sum.y, sum.z, sum.w};
    unsigned lane = threadIdx.x & 31, t = lane & 3, g = lane >> 2;
    for (unsigned k = 0; k < 4; k++) /* the thread of the quad that holds columns 2k, 2k+1 and 2k+8, 2k+9 */
        for (unsigned half = 0; half < 2; half++) {
            uint32_t top = __shfl_sync(~0u, a[half * 2], (int)(g * 4 + k));
            uint32_t low = __shfl_sync(~0u, a[half * 2 + 1], (int)(g * 4 + k));
            for (unsigned c = 0; c < 2; c++) { /* columns 2t and 2t+1 of B live in lanes of groups 2t, 2t+1 */
                uint32_t w = __shfl_sync(~0u, b[half], (int)((2 * t + c) * 4 + k));
                for (unsigned e = 0; e < 2; e++) {
                    float v = __uint_as_float(e ? w & 0xffff0000u : w << 16);
                    d[c] += __uint_as_float(e ? top & 0xffff0000u : top << 16) * v;
                    d[c + 2] += __uint_as_float(e ? low & 0xffff0000u : low << 16) * v;
                }
            }
        }
    return make_float4(d[0], d[1], d[2], d[3]);
}
#endif
/*
 * One warp: D[16, 8] += A[16, 16] B[16, 8], bf16 in, f32 out. Fragments as in the PTX manual (mma.m16n8k16):
 * lane = 4 g + t: a[0] = A[g][2t, 2t+1], a[1] = A[g+8][2t..], a[2] = A[g][2t+8..], a[3] = A[g+8][2t+8..];
 * b[0] = B[2t, 2t+1][g], b[1] = B[2t+8, 2t+9][g]; d[0,1] = D[g][2t, 2t+1], d[2,3] = D[g+8][2t, 2t+1].
 * The lower half word holds the lower index. sm_75 has no bf16 matrix unit: multiplied from registers by shuffles.
 */
static __device__ __forceinline__ void ft_mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    float4 sum = ft_mma_bf16_shuffled(make_float4(d[0], d[1], d[2], d[3]), make_uint4(a[0], a[1], a[2], a[3]),
                                      make_uint2(b[0], b[1]));
    d[0] = sum.x, d[1] = sum.y, d[2] = sum.z, d[3] = sum.w;
#endif
}
/* Products of two bf16 pairs, rounded to nearest even, subnormals kept. */
static __device__ __forceinline__ uint32_t ft_mul_bf16_pair(uint32_t a, uint32_t b)
{
#if __CUDA_ARCH__ >= 800
    uint32_t product;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u)); /* + -0 */
    return product;
#else
    float low = __uint_as_float(a << 16) * __uint_as_float(b << 16);
    float high = __uint_as_float(a & 0xffff0000u) * __uint_as_float(b & 0xffff0000u);
    uint32_t bits[2] = {__float_as_uint(low), __float_as_uint(high)};
    for (int i = 0; i < 2; i++)
        bits[i] = (bits[i] & 0x7fffffffu) > 0x7f800000u ? bits[i] | 0x400000u : bits[i] + 0x7fffu + (bits[i] >> 16 & 1u);
    return bits[0] >> 16 | (bits[1] & 0xffff0000u);
#endif
}
/*
 * The same of f16: D[16, 8] += A[16, 16] B[16, 8], fragments as ft_mma_bf16. Subnormals count in full. sm_75 takes the
 * product in two halves.
 */
static __device__ __forceinline__ void ft_mma_f16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    for (int i = 0; i < 2; i++)
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[2 * i]), "r"(a[2 * i + 1]), "r"(b[i]));
#endif
}
/* Products of two f16 pairs, rounded to nearest even, subnormals kept. */
static __device__ __forceinline__ uint32_t ft_mul_f16_pair(uint32_t a, uint32_t b)
{
    uint32_t product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
/* Two f32 as a pair of f16, rounded to nearest even; and back. */
static __device__ __forceinline__ uint32_t ft_to_f16_pair(float low, float high)
{
    uint32_t pair;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("{.reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}"
        : "=r"(pair)
        : "f"(low), "f"(high));
#endif
    return pair;
}
static __device__ __forceinline__ float ft_f16_low(uint32_t pair)
{
    float value;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(value) : "r"(pair));
    return value;
}
static __device__ __forceinline__ float ft_f16_high(uint32_t pair)
{
    float value;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(value) : "r"(pair));
    return value;
}
/* Two bytes of e4m3, the lower half of `bytes`, as a pair of f16: exact, NaN stays NaN. sm_89 has an instruction. */
static __device__ __forceinline__ uint32_t ft_e4m3_to_f16_pair(uint32_t bytes)
{
#if __CUDA_ARCH__ >= 890
    uint32_t pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((uint16_t)bytes));
    return pair;
#else
    uint32_t apart = __byte_perm(bytes, 0, 0x1404), magnitude = apart & 0x7f007f00u;
    uint32_t nan = (magnitude + 0x01000100u) & 0x80008000u;
    return ft_mul_f16_pair(magnitude >> 1 | (apart & 0x80008000u), 0x5c005c00u) | (nan >> 15) * 0x7fffu; /* 2^8 */
#endif
}
#endif /* !FT_CUDA_EMULATED */

/* ---- numbers ---- */

static __device__ __forceinline__ float ft_bf16(uint16_t bits)
{
    return __uint_as_float((uint32_t)bits << 16);
}
/* The two halves of a word of bf16 pairs: lower index first. */
static __device__ __forceinline__ float ft_bf16_low(uint32_t pair)
{
    return __uint_as_float(pair << 16);
}
static __device__ __forceinline__ float ft_bf16_high(uint32_t pair)
{
    return __uint_as_float(pair & 0xffff0000u);
}
/* Round to nearest even; NaN stays NaN. */
static __device__ __forceinline__ uint32_t ft_to_bf16(float value)
{
    uint32_t bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (bits >> 16) | 0x40u;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}
static __device__ __forceinline__ uint32_t ft_to_bf16_pair(float low, float high)
{
    return ft_to_bf16(low) | ft_to_bf16(high) << 16;
}
/* e4m3 (no infinity, 0x7f is NaN), by moving its bits into an f32 and scaling the exponent: exact, subnormals too. */
static __device__ __forceinline__ float ft_e4m3(uint32_t bits)
{
    float magnitude = __uint_as_float((bits & 0x7fu) << 20) * 0x1p120f;
    if ((bits & 0x7fu) == 0x7fu)
        magnitude = __uint_as_float(0x7fffffffu);
    return bits & 0x80u ? -magnitude : magnitude;
}
/* 2^(bits - 127), 255 is NaN, 0 is the subnormal 2^-127. */
static __device__ __forceinline__ float ft_e8m0(uint32_t bits)
{
    if (bits == 255)
        return __uint_as_float(0x7fffffffu);
    return __uint_as_float(bits ? bits << 23 : 0x00400000u);
}
/* e2m1: 0, .5, 1, 1.5, 2, 3, 4, 6 and a sign, by the same trick (exponent bias 1, so 2^126). */
static __device__ __forceinline__ float ft_e2m1(uint32_t nibble)
{
    float magnitude = __uint_as_float((nibble & 7u) << 22) * 0x1p126f;
    return nibble & 8u ? -magnitude : magnitude;
}
static __device__ __forceinline__ float ft_sigmoid_device(float x)
{
    return 1.0f / (1.0f + expf(-x));
}
static __device__ __forceinline__ float ft_silu_device(float x)
{
    return x / (1.0f + expf(-x));
}

/* ---- sums ---- */

/* The sum over the 32 lanes, in every lane; the order is fixed. */
static __device__ __forceinline__ float ft_warp_sum(float value)
{
    for (int step = 16; step > 0; step >>= 1)
        value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}
static __device__ __forceinline__ float ft_warp_max(float value)
{
    for (int step = 16; step > 0; step >>= 1)
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
    return value;
}
/* The largest and the smallest over the 32 lanes, in every lane. */
static __device__ __forceinline__ uint32_t ft_warp_max_u32(uint32_t value)
{
#if !defined(FT_CUDA_EMULATED) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xffffffffu, value);
#else
    for (int step = 16; step > 0; step >>= 1)
        value = max(value, __shfl_xor_sync(0xffffffffu, value, step));
    return value;
#endif
}
static __device__ __forceinline__ uint32_t ft_warp_min_u32(uint32_t value)
{
    return ~ft_warp_max_u32(~value);
}
/* The sum over a block whose size is a multiple of 32, in every thread; `scratch` [33] in shared memory; all threads
 * call it. */
static __device__ __forceinline__ float ft_block_sum(float value, float *scratch)
{
    unsigned warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    value = ft_warp_sum(value);
    __syncthreads();
    if (lane == 0)
        scratch[warp] = value;
    __syncthreads();
    if (warp == 0) {
        float sum = ft_warp_sum(lane < warps ? scratch[lane] : 0.0f);
        if (lane == 0)
            scratch[32] = sum;
    }
    __syncthreads();
    return scratch[32];
}

#endif /* device code */

#endif
