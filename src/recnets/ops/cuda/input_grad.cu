// dx_i = dz_i * W_x^T for all steps at once, where backward.cu has no room for it: a block keeps the kernel and takes tile after tile of all steps.
// NB is SI padded to 16; MT x NT as in the step kernels, with one warp for all channels (WN = 1).

constexpr int HALO = KX / 2, PITCH = pitch_of(SO), PAIRS = NB / 16;
constexpr int BYTES_W = steps_of(SO, KX) * NB * 32;

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
input_grad(const u16* dz, const u16* packed, u16* dx, int batch) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 weights = shared_address(memory), tile_memory = weights + BYTES_W;
    const int lane = threadIdx.x % 32, wm = threadIdx.x / 32, tiles = tiles_of(batch);
    u32 corners[MT];
#pragma unroll
    for (int m = 0; m < MT; m++) corners[m] = tile_memory + slot_of<HALO, KX>((wm * MT + m) * 16 + lane % 16) * PITCH;
    copy_block(weights, packed, BYTES_W);
    for (int work = blockIdx.x; work < tiles * D; work += gridDim.x) {
        // Steps of the same tile follow each other: their segments of dx share lines of memory, unless they lie APART.
        const int i = work % D;
        const Tile tile = tile_at(work / D, batch);
        copy_tile<HALO, SO>(tile_memory, dz + (size_t)i * batch * (H * W) * SO, SO, tile, batch);
        copy_commit();
        copy_wait<0>();
        __syncthreads();
        float acc[MT][NT][4] = {};
        convolve<SO, KX, W + 2 * HALO, PITCH, PAIRS>(acc, corners, weights + lane * 16);
        u16* out = dx + (size_t)tile.first * X_STRIDE + x_step(i, batch);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int q = (wm * MT + m) * 16 + half * 8 + lane / 4;
                if (q >= tile.count) continue;
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const int c = n * 8 + lane % 4 * 2;
                    if (c < SI)
                        *(u32*)(out + (size_t)q * X_STRIDE + c) = pack2(acc[m][n][half * 2], acc[m][n][half * 2 + 1]);
                }
            }
        __syncthreads();
    }
}
