// The parts of weight_grad.cu with XB, for 3 x 3 kernels, by products that read shared memory themselves (wgmma.cuh):
// dW[tap, ci, co] = sum over steps i and pixels p of a_{i-1}(p + tap)[ci] * dz_i(p)[co], and so of x_i for W_x.
//
// A block has 3 warpgroups, one for each row of taps, CO_BLOCK outputs, and CI_BLOCK + XB channels of a and of x, which
// are one product a tap and 16 pixels. Its sums are complete: no warps exchange any. In shared memory a chunk of 8
// channels is a plane, 16 bytes a pixel: those of a and x have the tile with its halo, so a tap is an offset, those
// of dz its pixels. The map is a multiple of 8 pixels wide: what wgmma takes for 8 k are 8 neighbours of a row.

constexpr int COLUMNS = W + 2, LINES = ROWS + 2, ALL = CI_BLOCK + XB;
// Bytes, an odd number of 16s, so that the chunks of a pixel lie in different banks.
constexpr int PLANE = (slots_of(1) | 1) * 16, PLANE_G = (PIXELS | 1) * 16;
constexpr int BYTES_A = CI_BLOCK / 8 * PLANE, BYTES_AX = ALL / 8 * PLANE, STAGE = BYTES_AX + CO_BLOCK / 8 * PLANE_G;
static_assert(CO_BLOCK == 64 && XB % 8 == 0 && W % 8 == 0 && PIXELS % 16 == 0 && KW == 3 && WN == 4 && LAG == 1);

// A segment of CHANNELS of a tile, with the rows above and below it where these are another tile's; zeros where !there.
// What lies beside the map is never written.
template <int CHANNELS>
__device__ __forceinline__ void copy_planes(u32 to, const u16* from, int stride, const Tile& tile, bool there) {
    constexpr int HERE = CHANNELS / 8, HALO = TILES_A_MAP > 1, TALL = ROWS + 2 * HALO;
    from += (long)tile.first * stride;
#pragma unroll 1
    for (int e = threadIdx.x; e < IMAGES * TALL * W * HERE; e += THREADS) {
        const int chunk = e % HERE, column = e / HERE % W, line = e / (HERE * W);
        const int row = line % TALL - HALO, image = line / TALL, pixel = (image * ROWS + row) * W + column;
        const bool ok = there && (HALO ? (unsigned)(tile.row + row) < H : pixel < tile.count);
        const int slot = (image * LINES + row + 1) * COLUMNS + column + 1;
        copy_async<16>(to + chunk * PLANE + slot * 16, ok ? from + pixel * stride + chunk * 8 : from, ok);
    }
}

__device__ __forceinline__ void copy_pixels(u32 to, const u16* from, int stride, const Tile& tile) {
    constexpr int HERE = CO_BLOCK / 8;
    from += (long)tile.first * stride;
#pragma unroll 1
    for (int e = threadIdx.x; e < PIXELS * HERE; e += THREADS) {
        const int q = e / HERE, chunk = e % HERE;
        const bool ok = q < tile.count;
        copy_async<16>(to + chunk * PLANE_G + q * 16, ok ? from + q * stride + chunk * 8 : from, ok);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
weight_grad_wide(const u16* a, const u16* x, const u16* dz, float* parts, float* parts_x, int batch) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 base = shared_address(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, ky = warp / WN;
    const int ci0 = blockIdx.y * CI_BLOCK, x0 = blockIdx.y * XB, co0 = blockIdx.z * CO_BLOCK;
    const int all = tiles_of(batch) * D;
    float sums[KW][ALL / 2] = {};
    clear_shared(base, STAGES * STAGE);
    __syncthreads();
    auto fetch = [&](int work, int stage) {
        if (work < all) {
            const int i = work % D;
            const Tile tile = tile_at(work / D, batch);
            const u32 to = base + stage * STAGE;
            // The first step has zeros for a: products of x alone besides, and the compiler would let none overlap.
            copy_planes<CI_BLOCK>(to, a + max(i - LAG, 0) * CA + ci0, D * CA, tile, i >= LAG);
            copy_planes<XB>(to + BYTES_A, x + i * SI + x0, D * SI, tile, true);
            copy_pixels(to + BYTES_AX, dz + i * SO + co0, D * SO, tile);
        }
        copy_commit();
    };
    for (int s = 0; s < STAGES - 1; s++) fetch(blockIdx.x + s * gridDim.x, s);
    int stage = 0;
    for (int work = blockIdx.x; work < all; work += gridDim.x) {
        copy_wait<STAGES - 2>();
        publish_shared();
        __syncthreads();  // also: the products of the tile before have ended, so that its place is free
        const u32 planes = uniform((base + stage * STAGE) / 16), taps = planes + uniform(ky) * COLUMNS;
        wgmma_fence(sums);
#pragma unroll
        for (int q = 0; q < PIXELS; q += 16) {
            const int slot = slot_of<1, KW>(q), next = slot_of<1, KW>(q + 8);  // perhaps of the next row
#pragma unroll
            for (int kx = 0; kx < KW; kx++)
                wgmma<ALL, false>(sums[kx], matrix_at(planes + BYTES_AX / 16 + q, 8, PLANE_G / 16),
                                  matrix_at(taps + slot + kx, next - slot, PLANE / 16));
        }
        wgmma_commit();
        fetch(work + (STAGES - 1) * gridDim.x, (stage + STAGES - 1) % STAGES);
        wgmma_wait(sums);
        stage = (stage + 1) % STAGES;
    }
    copy_wait<0>();
    parts += (size_t)blockIdx.x * (KW * KW * CA * SO), parts_x += (size_t)blockIdx.x * (KW * KW * SI * SO);
#pragma unroll
    for (int kx = 0; kx < KW; kx++)
#pragma unroll
        for (int n = 0; n < ALL / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int tap = ky * KW + kx, c = n * 8 + lane % 4 * 2 + e % 2;
                const int co = co0 + warp % WN * 16 + lane / 4 + e / 2 * 8;
                float* of_h = parts + (tap * CA + ci0 + c) * SO;
                float* of_x = parts_x + (tap * SI + x0 + c - CI_BLOCK) * SO;
                (n * 8 < CI_BLOCK ? of_h : of_x)[co] = sums[kx][n * 4 + e];
            }
}
