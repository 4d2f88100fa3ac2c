/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuBLASLt for prefill products, when the machine has it: the library is opened at run time, so a build or a
 * machine without it works with the own kernel of gemm.cu alone. Only its header is needed to build this
 * file's better half.
 */
#include "kernels_cuda/gemm.cuh"

#if !defined(FT_CUDA_EMULATED) && defined(__has_include)
#if __has_include(<cublasLt.h>)
#define HAS_BLAS 1
#endif
#endif

#ifdef HAS_BLAS
#include <cublasLt.h>
#include <dlfcn.h>
#include <stdlib.h>

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#define LIBRARY "libcublasLt.so." TEXT(CUBLAS_VER_MAJOR)

/* Functions by their own names and types: what the header declares is what is called. */
#define BLAS_FUNCTIONS(X)                                                                                    \
    X(cublasLtCreate)                                                                                        \
    X(cublasLtDestroy)                                                                                       \
    X(cublasLtMatmul)                                                                                        \
    X(cublasLtMatmulAlgoGetHeuristic)                                                                        \
    X(cublasLtMatmulDescCreate)                                                                              \
    X(cublasLtMatmulDescDestroy)                                                                             \
    X(cublasLtMatmulDescSetAttribute)                                                                        \
    X(cublasLtMatrixLayoutCreate)                                                                            \
    X(cublasLtMatrixLayoutDestroy)                                                                           \
    X(cublasLtMatmulPreferenceCreate)                                                                        \
    X(cublasLtMatmulPreferenceDestroy)

struct blas {
    void *library;
    cublasLtHandle_t handle;
#define BLAS_MEMBER(name) decltype(&name) name##_;
    BLAS_FUNCTIONS(BLAS_MEMBER)
};

int ft_cuda_blas_open(struct ft_cuda *c)
{
    c->blas = NULL;
    struct blas *b = (struct blas *)calloc(1, sizeof *b);
    if (!b)
        return (int)cudaErrorMemoryAllocation;
    b->library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    bool found = b->library != NULL;
#define BLAS_FIND(name) found = found && (b->name##_ = (decltype(&name))dlsym(b->library, #name)) != NULL;
    BLAS_FUNCTIONS(BLAS_FIND)
    if (found && b->cublasLtCreate_(&b->handle) == CUBLAS_STATUS_SUCCESS) {
        c->blas = b;
        return 0;
    }
    if (b->library)
        dlclose(b->library);
    free(b);
    return (int)cudaErrorNotSupported;
}

void ft_cuda_blas_close(struct ft_cuda *c)
{
    struct blas *b = (struct blas *)c->blas;
    c->blas = NULL;
    if (!b)
        return;
    b->cublasLtDestroy_(b->handle);
    dlclose(b->library);
    free(b);
}

/* Column-major, as the library counts: D [out, rows] = alpha W^T [out, columns] X [columns, rows]. */
bool ft_gemm_blas(const struct ft_cuda *c, const struct ft_gemm_product *p, void *stream)
{
    uint32_t rows = p->rows, out = p->out, columns = p->columns;
    struct blas *b = (struct blas *)c->blas;
    cublasLtMatmulDesc_t product = NULL;
    cublasLtMatrixLayout_t of_w = NULL, of_x = NULL, of_y = NULL;
    cublasLtMatmulPreference_t preference = NULL;
    cublasLtMatmulHeuristicResult_t best;
    cublasOperation_t transpose = CUBLAS_OP_T;
    int found = 0;
    cublasLtPointerMode_t on_device = CUBLASLT_POINTER_MODE_DEVICE; /* alpha and beta */
    bool ok =
        b->cublasLtMatmulDescCreate_(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS &&
        b->cublasLtMatmulDescSetAttribute_(product, CUBLASLT_MATMUL_DESC_TRANSA, &transpose,
                                           sizeof transpose) == CUBLAS_STATUS_SUCCESS &&
        b->cublasLtMatmulDescSetAttribute_(product, CUBLASLT_MATMUL_DESC_POINTER_MODE, &on_device,
                                           sizeof on_device) == CUBLAS_STATUS_SUCCESS &&
        b->cublasLtMatrixLayoutCreate_(&of_w, CUDA_R_16F, columns, out, columns) == CUBLAS_STATUS_SUCCESS &&
        b->cublasLtMatrixLayoutCreate_(&of_x, CUDA_R_16F, columns, rows, columns) == CUBLAS_STATUS_SUCCESS &&
        b->cublasLtMatrixLayoutCreate_(&of_y, CUDA_R_32F, out, rows, (int64_t)p->y_stride) ==
            CUBLAS_STATUS_SUCCESS &&
        b->cublasLtMatmulPreferenceCreate_(&preference) == CUBLAS_STATUS_SUCCESS &&
        b->cublasLtMatmulAlgoGetHeuristic_(b->handle, product, of_w, of_x, of_y, of_y, preference, 1, &best,
                                           &found) == CUBLAS_STATUS_SUCCESS &&
        found > 0 &&
        b->cublasLtMatmul_(b->handle, product, &p->scale->alpha, p->w, of_w, p->x, of_x, &p->scale->zero,
                           p->y, of_y, p->y, of_y, &best.algo, NULL, 0,
                           (cudaStream_t)stream) == CUBLAS_STATUS_SUCCESS;
    if (preference)
        b->cublasLtMatmulPreferenceDestroy_(preference);
    if (of_y)
        b->cublasLtMatrixLayoutDestroy_(of_y);
    if (of_x)
        b->cublasLtMatrixLayoutDestroy_(of_x);
    if (of_w)
        b->cublasLtMatrixLayoutDestroy_(of_w);
    if (product)
        b->cublasLtMatmulDescDestroy_(product);
    return ok;
}

#else

int ft_cuda_blas_open(struct ft_cuda *c)
{
    c->blas = NULL;
    return 801; /* cudaErrorNotSupported */
}

void ft_cuda_blas_close(struct ft_cuda *c)
{
    c->blas = NULL;
}

bool ft_gemm_blas(const struct ft_cuda *, const struct ft_gemm_product *, void *)
{
    return false;
}
#endif
