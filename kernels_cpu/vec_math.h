/* SPDX-License-Identifier: Apache-2.0 */
/* Functions over the words of vec_avx2.h or vec_avx512.h, one of which is included before. */
#ifndef FT_VEC_MATH_H
#define FT_VEC_MATH_H

/*
 * e^x, relative error below 2e-7 where the result is normal; 0 below -104, infinity above 89, NaN stays NaN.
 * x = n ln 2 + r with |r| <= ln 2 / 2; the Taylor series of degree 7 leaves 5e-9 (ln 2 in two parts after
 * Cody and Waite).
 */
static inline vf vf_exp(vf x)
{
    x = vf_max(vf_set1(-104.0f), vf_min(vf_set1(89.0f), x));
    vf n = vf_round(vf_mul(x, vf_set1(1.44269504f)));
    vf r = vf_fnma(n, vf_set1(0.693359375f), x);
    r = vf_fnma(n, vf_set1(-2.12194440e-4f), r);
    vf p = vf_set1(1.0f / 5040);
    p = vf_fma(p, r, vf_set1(1.0f / 720));
    p = vf_fma(p, r, vf_set1(1.0f / 120));
    p = vf_fma(p, r, vf_set1(1.0f / 24));
    p = vf_fma(p, r, vf_set1(1.0f / 6));
    p = vf_fma(p, r, vf_set1(0.5f));
    p = vf_fma(p, r, vf_set1(1.0f));
    p = vf_fma(p, r, vf_set1(1.0f));
    return vf_scale_pow2(p, n);
}

static inline vf vf_sigmoid(vf x)
{
    vf one = vf_set1(1.0f);
    return vf_div(one, vf_add(one, vf_exp(vf_sub(vf_zero(), x))));
}

/* sum a[i] b[i] in a fixed order. */
static inline float vf_dot(const float *a, const float *b, uint32_t n)
{
    vf s0 = vf_zero(), s1 = vf_zero(), s2 = vf_zero(), s3 = vf_zero();
    uint32_t i = 0;
    for (; i + 4 * VF <= n; i += 4 * VF) {
        s0 = vf_fma(vf_load(a + i), vf_load(b + i), s0);
        s1 = vf_fma(vf_load(a + i + VF), vf_load(b + i + VF), s1);
        s2 = vf_fma(vf_load(a + i + 2 * VF), vf_load(b + i + 2 * VF), s2);
        s3 = vf_fma(vf_load(a + i + 3 * VF), vf_load(b + i + 3 * VF), s3);
    }
    for (; i + VF <= n; i += VF)
        s0 = vf_fma(vf_load(a + i), vf_load(b + i), s0);
    float sum = vf_sum(vf_add(vf_add(s0, s1), vf_add(s2, s3)));
    for (; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

#endif
