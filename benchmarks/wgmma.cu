// ROUNDS times PRODUCTS products of a warpgroup, timed by the multiprocessor's clock; see wgmma.py.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
timed_products(const u16* factors, long long* cycles, int step, int a_k, int a_mn, int b_k, int b_mn, int bytes) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 start = shared_address(memory);
    for (int at = threadIdx.x * 16; at < bytes; at += THREADS * 16)
        copy_async<16>(start + at, (const char*)factors + at, true);
    copy_commit();
    copy_wait<0>();
    publish_shared();
    __syncthreads();
    const u32 a = uniform(start / 16), b = a + bytes / 32, group = uniform(threadIdx.x / 128);
    float sums[1][WIDTH / 2] = {};
    const long long began = clock64();
    for (int round = 0; round < ROUNDS; round++) {
        wgmma_fence(sums);
#pragma unroll
        for (int j = 0; j < PRODUCTS; j++)
            wgmma<WIDTH, K_MAJOR>(sums[0], matrix_at(a + step * (j % 9 + group), a_k, a_mn), matrix_at(b, b_k, b_mn));
        wgmma_commit();
        wgmma_wait(sums);
    }
    const long long ended = clock64();
    if (threadIdx.x == 0) cycles[blockIdx.x] = ended - began + (sums[0][0] == 1.5f);  // the sums are needed
}
