// Products of warpgroups (4 warps) that read both factors from shared memory themselves: on compute capability 9 only.
//
// d (64 x N) += a (64 x 16) * b (16 x N) in fp32, both factors not swizzled, in units of 16 bytes. BY_K: a unit is 8
// neighbouring k of a row of a, or column of b, and the units of 8 neighbouring rows or columns follow each other. Else a
// unit is 8 neighbouring rows of a, or columns of b, and the units of 8 neighbouring k follow each other. The units of the
// next 8 k are next_k bytes further on (the leading dimension's offset of the PTX manual), those of the next 8 rows or
// columns next_mn (the stride dimension's offset). All three are counted in 16 bytes. Thread t has rows t / 32 * 16 + t % 32 / 4
// and 8 below of d, columns t % 4 * 2 and the next of every 8: sums[column / 8 * 4 + (8 below) * 2 + column % 2].
//
// Until wgmma_wait nothing may touch the sums or write to the factors. What copies and stores left in shared memory,
// products see after a publish_shared of the threads that copied and stored, and a barrier.

typedef unsigned long long u64;

// A factor's descriptor.
__device__ __forceinline__ u64 matrix_at(u32 at, int next_k, int next_mn) {
    return (u64)next_mn << 32 | (u32)(at + (next_k << 16));
}
// A value that is the same in all lanes, so that it may be in a register of the warp.
__device__ __forceinline__ u32 uniform(u32 v) { return __shfl_sync(~0u, v, 0); }

#if FP16
#define HALF "f16"
#else
#define HALF "bf16"
#endif
// The sums of 16 to 88 columns as PTX and as operands of the compiler's.
#define LIST_16 "%0,%1,%2,%3,%4,%5,%6,%7"
#define LIST_24 LIST_16 ",%8,%9,%10,%11"
#define LIST_32 LIST_24 ",%12,%13,%14,%15"
#define LIST_40 LIST_32 ",%16,%17,%18,%19"
#define LIST_48 LIST_40 ",%20,%21,%22,%23"
#define LIST_56 LIST_48 ",%24,%25,%26,%27"
#define LIST_64 LIST_56 ",%28,%29,%30,%31"
#define LIST_72 LIST_64 ",%32,%33,%34,%35"
#define LIST_80 LIST_72 ",%36,%37,%38,%39"
#define LIST_88 LIST_80 ",%40,%41,%42,%43"
#define SUMS_8(d) "+f"((d)[0]), "+f"((d)[1]), "+f"((d)[2]), "+f"((d)[3])
#define SUMS_16(d) SUMS_8(d), SUMS_8(d + 4)
#define SUMS_24(d) SUMS_16(d), SUMS_8(d + 8)
#define SUMS_32(d) SUMS_16(d), SUMS_16(d + 8)
#define SUMS_40(d) SUMS_32(d), SUMS_8(d + 16)
#define SUMS_48(d) SUMS_32(d), SUMS_16(d + 16)
#define SUMS_56(d) SUMS_48(d), SUMS_8(d + 24)
#define SUMS_64(d) SUMS_32(d), SUMS_32(d + 16)
#define SUMS_72(d) SUMS_64(d), SUMS_8(d + 32)
#define SUMS_80(d) SUMS_64(d), SUMS_16(d + 32)
#define SUMS_88(d) SUMS_80(d), SUMS_8(d + 40)
#define WGMMA(COLUMNS, A, B, T)                                                                                        \
    if (N == COLUMNS)                                                                                                  \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." HALF "." HALF " {" LIST_##COLUMNS             \
                 "}, %" #A ", %" #B ", 1, 1, 1, %" #T ", %" #T ";" : SUMS_##COLUMNS(sums) : "l"(a), "l"(b), "n"(!BY_K))

// sums += a * b, some time before wgmma_wait. The 128 threads of a warpgroup give the same factors.
template <int N, bool BY_K>
__device__ __forceinline__ void wgmma(float* sums, u64 a, u64 b) {
    static_assert(N % 8 == 0 && N >= 16 && N <= 88, "one of those below");
    WGMMA(16, 8, 9, 10);
    WGMMA(24, 12, 13, 14);
    WGMMA(32, 16, 17, 18);
    WGMMA(40, 20, 21, 22);
    WGMMA(48, 24, 25, 26);
    WGMMA(56, 28, 29, 30);
    WGMMA(64, 32, 33, 34);
    WGMMA(72, 36, 37, 38);
    WGMMA(80, 40, 41, 42);
    WGMMA(88, 44, 45, 46);
}

// The compiler may not move what it does with the sums to the other side of this.
template <int T, int COUNT>
__device__ __forceinline__ void hold(float (&sums)[T][COUNT]) {
#pragma unroll
    for (int t = 0; t < T; t++)
#pragma unroll
        for (int e = 0; e < COUNT; e++) asm volatile("" : "+f"(sums[t][e])::"memory");
}
template <int T, int COUNT>
__device__ __forceinline__ void hold(float (&sums)[T][COUNT][4]) {
#pragma unroll
    for (int t = 0; t < T; t++) hold(sums[t]);
}
// Before products: what the threads did with the sums comes first.
template <class S>
__device__ __forceinline__ void wgmma_fence(S& sums) {
    hold(sums);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// After products: they are what the next wait waits for.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <class S>
__device__ __forceinline__ void wgmma_wait(S& sums) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    hold(sums);
}
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
