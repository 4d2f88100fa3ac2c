// SPDX-License-Identifier: Apache-2.0
//
// Device memory for tests of the CUDA kernels: malloc when kernels are emulated, the CUDA runtime otherwise.
// Everything that a test allocates lives until cuda_memory_free_all. A failing call ends the test program
// with a message.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#ifndef FT_CUDA_EMULATED
#include <cuda_runtime.h>
#endif

static std::vector<void *> cuda_memory_blocks, cuda_memory_mapped_blocks;

static inline void cuda_memory_check(int status, const char *what)
{
    if (status) {
        fprintf(stderr, "%s: CUDA error %d\n", what, status);
        exit(1);
    }
}

#ifdef FT_CUDA_EMULATED
static inline bool cuda_memory_available()
{
    return true;
}
static inline void *cuda_memory_alloc_bytes(size_t bytes)
{
    void *p = aligned_alloc(256, (bytes + 256) / 256 * 256);
    if (!p)
        cuda_memory_check(2, "aligned_alloc");
    cuda_memory_blocks.push_back(p);
    return p;
}
static inline void *cuda_memory_mapped_bytes(size_t bytes)
{
    return cuda_memory_alloc_bytes(bytes);
}
static inline void cuda_memory_to_device(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
}
static inline void cuda_memory_to_host(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
}
static inline void cuda_memory_sync(const char *)
{
}
static inline void cuda_memory_free_all()
{
    for (void *p : cuda_memory_blocks)
        free(p);
    cuda_memory_blocks.clear();
}
#else
static inline bool cuda_memory_available()
{
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}
static inline void *cuda_memory_alloc_bytes(size_t bytes)
{
    void *p = nullptr;
    cuda_memory_check((int)cudaMalloc(&p, bytes + 256), "cudaMalloc");
    cuda_memory_blocks.push_back(p);
    return p;
}
// Pinned memory of the host, at one address on both sides.
static inline void *cuda_memory_mapped_bytes(size_t bytes)
{
    void *p = nullptr;
    cuda_memory_check((int)cudaHostAlloc(&p, bytes + 256, cudaHostAllocMapped), "cudaHostAlloc");
    cuda_memory_mapped_blocks.push_back(p);
    return p;
}
static inline void cuda_memory_to_device(void *to, const void *from, size_t bytes)
{
    cuda_memory_check((int)cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy to the device");
}
static inline void cuda_memory_to_host(void *to, const void *from, size_t bytes)
{
    cuda_memory_check((int)cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy to the host");
}
static inline void cuda_memory_sync(const char *what)
{
    cuda_memory_check((int)cudaDeviceSynchronize(), what);
}
static inline void cuda_memory_free_all()
{
    for (void *p : cuda_memory_blocks)
        cudaFree(p);
    for (void *p : cuda_memory_mapped_blocks)
        cudaFreeHost(p);
    cuda_memory_blocks.clear();
    cuda_memory_mapped_blocks.clear();
}
#endif

template <class T> static inline T *cuda_memory_alloc(size_t count)
{
    return (T *)cuda_memory_alloc_bytes(count * sizeof(T));
}
// A copy on the device of `count` elements.
template <class T> static inline T *cuda_memory_copy(const T *from, size_t count)
{
    T *p = cuda_memory_alloc<T>(count);
    cuda_memory_to_device((void *)p, (const void *)from, count * sizeof(T));
    return p;
}
template <class T> static inline std::vector<T> cuda_memory_read(const T *from, size_t count)
{
    std::vector<T> to(count);
    cuda_memory_to_host(to.data(), from, count * sizeof(T));
    return to;
}
