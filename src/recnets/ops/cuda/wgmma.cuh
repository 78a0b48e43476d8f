// Products of warpgroups (4 warps) that read both factors from shared memory themselves: on compute capability 9 only.
//
// d (64 x N) += a (64 x 16) * b (16 x N) in fp32. Both factors are M- or N-major, not swizzled: a unit of 16 bytes is
// 8 neighbouring rows of a, or columns of b. The units of 8 neighbouring k follow each other; those of the next 8 k are
// next_k bytes further on (the leading dimension's offset of the PTX manual), those of the next 8 rows or columns
// next_mn (the stride dimension's offset). All are multiples of 16. Thread t has rows t / 32 * 16 + t % 32 / 4 and 8
// below of d, columns t % 4 * 2 and the next of every 8: sums[column / 8 * 4 + (8 below) * 2 + column % 2].
//
// Until wgmma_wait nothing may touch the sums or write to the factors. What copies and stores left in shared memory,
// products see after a publish_shared of the threads that copied and stored, and a barrier.

typedef unsigned long long u64;

// A factor's descriptor. One that begins 16 bytes further on is greater by 1.
__device__ __forceinline__ u64 matrix_at(u32 at, int next_k, int next_mn) {
    return (u64)(at >> 4) | (u64)(next_k >> 4) << 16 | (u64)(next_mn >> 4) << 32;
}

#if FP16
#define HALF "f16"
#else
#define HALF "bf16"
#endif
// The sums of 72 to 88 columns as PTX and as operands of the compiler's.
#define LIST_64 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
                "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define LIST_72 LIST_64 ",%32,%33,%34,%35"
#define LIST_80 LIST_72 ",%36,%37,%38,%39"
#define LIST_88 LIST_80 ",%40,%41,%42,%43"
#define SUMS_8(d) "+f"((d)[0]), "+f"((d)[1]), "+f"((d)[2]), "+f"((d)[3])
#define SUMS_32(d) SUMS_8(d), SUMS_8(d + 4), SUMS_8(d + 8), SUMS_8(d + 12)
#define SUMS_64(d) SUMS_32(d), SUMS_32(d + 16)
#define SUMS_72(d) SUMS_64(d), SUMS_8(d + 32)
#define SUMS_80(d) SUMS_72(d), SUMS_8(d + 36)
#define SUMS_88(d) SUMS_80(d), SUMS_8(d + 40)
#define WGMMA(COLUMNS, A, B)                                                                                           \
    if (N == COLUMNS)                                                                                                  \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." HALF "." HALF " {" LIST_##COLUMNS             \
                 "}, %" #A ", %" #B ", 1, 1, 1, 1, 1;" : SUMS_##COLUMNS(sums) : "l"(a), "l"(b))

// sums += a * b, some time before wgmma_wait. The 128 threads of a warpgroup give the same factors.
template <int N>
__device__ __forceinline__ void wgmma(float* sums, u64 a, u64 b) {
    static_assert(N == 72 || N == 80 || N == 88, "one of those below");
    WGMMA(72, 36, 37);
    WGMMA(80, 40, 41);
    WGMMA(88, 44, 45);
}

// The compiler may not move what it does with the sums to the other side of this.
template <int T, int COUNT>
__device__ __forceinline__ void hold(float (&sums)[T][COUNT]) {
#pragma unroll
    for (int t = 0; t < T; t++)
#pragma unroll
        for (int e = 0; e < COUNT; e++) asm volatile("" : "+f"(sums[t][e])::"memory");
}
// Before products: what the threads did with the sums comes first.
template <int T, int COUNT>
__device__ __forceinline__ void wgmma_fence(float (&sums)[T][COUNT]) {
    hold(sums);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// After products: they are what the next wait waits for.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int T, int COUNT>
__device__ __forceinline__ void wgmma_wait(float (&sums)[T][COUNT]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    hold(sums);
}
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
