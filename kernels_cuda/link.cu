/* SPDX-License-Identifier: Apache-2.0 */
/* What a copy stream needs beside copies: a flag raised behind them, and a throttle that plays a slower link. */
#include "kernels_cuda/device.h"
#include "kernels_cuda/kernels_cuda.h"

static __global__ void raise_kernel(uint32_t *flag, uint32_t value)
{
    __threadfence_system();
    ft_store_release_system(flag, value);
}

static __global__ void throttle_begin_kernel(uint64_t *state)
{
    *state = ft_global_timer();
}

static __global__ void throttle_end_kernel(const uint64_t *state, uint64_t ns)
{
    uint64_t until = *state + ns;
    while (ft_global_timer() < until)
        __nanosleep(200);
}

extern "C" int ft_cuda_raise(uint32_t *flag, uint32_t value, void *stream)
{
    return FT_LAUNCH(raise_kernel, dim3(1), dim3(1), 0, stream, flag, value);
}

extern "C" int ft_cuda_throttle_begin(uint32_t *state, void *stream)
{
    return FT_LAUNCH(throttle_begin_kernel, dim3(1), dim3(1), 0, stream, (uint64_t *)state);
}

extern "C" int ft_cuda_throttle_end(uint32_t *state, uint64_t ns, void *stream)
{
    return FT_LAUNCH(throttle_end_kernel, dim3(1), dim3(1), 0, stream, (const uint64_t *)state, ns);
}
