/* SPDX-License-Identifier: Apache-2.0 */
/* For tests of the GPU lane on a real GPU: without one they are skipped, or fail where FT_REQUIRE_GPU is set. */
#ifndef FT_TESTS_GPU_NEEDED_H
#define FT_TESTS_GPU_NEEDED_H

#include <stdio.h>
#include <stdlib.h>

#include "jobs/lane_cuda.h"

/* Returns when GPU 0 can be used, else ends the program. With the CUDA double: always. */
static inline void need_gpu(void)
{
#ifndef FT_FAKE_CUDA
    struct ft_gpu_info info;
    struct ft_error err;
    if (ft_lane_cuda_find(0, &info, &err) != FT_OK) {
        fprintf(stderr, "skipped: %s\n", err.message);
        exit(getenv("FT_REQUIRE_GPU") ? 1 : 77);
    }
#endif
}

#endif
