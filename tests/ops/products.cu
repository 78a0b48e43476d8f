// Products of factors that are given as they are: does wgmma find them where wgmma.cuh says? Constants: K_MAJOR, WIDTH, TIMES.
//
// A warpgroup adds up TIMES products; their factors follow each other, and their addresses begin where `memory` does.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
products(const u16* memory, const u64* factors, float* out, int bytes) {
    extern __shared__ __align__(128) unsigned char copied[];
    const u32 base = shared_address(copied), group = uniform(threadIdx.x / 128);
    for (int at = threadIdx.x * 16; at < bytes; at += THREADS * 16)
        copy_async<16>(base + at, (const char*)memory + at, true);
    copy_commit();
    copy_wait<0>();
    publish_shared();
    __syncthreads();
    const int mine = blockIdx.x * (THREADS / 128) + group;
    float sums[1][WIDTH / 2] = {};
    u64 a[TIMES], b[TIMES];
#pragma unroll
    for (int j = 0; j < TIMES; j++) {
        const u64* pair = factors + (mine * TIMES + j) * 2;
        a[j] = pair[0] + base / 16, b[j] = pair[1] + base / 16;
    }
    wgmma_fence(sums);
#pragma unroll
    for (int j = 0; j < TIMES; j++) wgmma<WIDTH, K_MAJOR>(sums[0], a[j], b[j]);
    wgmma_commit();
    wgmma_wait(sums);
    const int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int e = 0; e < WIDTH / 2; e++)
        out[(mine * 64 + row + e / 2 % 2 * 8) * WIDTH + e / 4 * 8 + thread % 4 * 2 + e % 2] = sums[0][e];
}
