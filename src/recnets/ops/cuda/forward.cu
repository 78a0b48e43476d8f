// Training forward of a CRC layer (Eq. 3), all steps in one launch: z_i = x_i * W_x + h_{i-1} * W_h and
// h_i = ReLU(BN_i(z_i)) with the statistics of the batch. Without BATCH the statistics are known, mean and variance in
// `totals` (0 and 1 where a step has no BN, only a bias as its shift: Eq. 2); without RELU the recursion is linear (Eq. 4).
//
// A block keeps its share of both kernels in shared memory for all steps, and owns tiles of pixels and NB of the SO
// channels. A step of a tile: once all blocks' sums are there (the only wait), h_{i-1} = ReLU(BN(z_{i-1})) of the tile
// and its halo into shared memory and out, then the convolutions, z_i and its sums. While a block waits, it computes
// the part of x of its next tile.

constexpr int COLUMNS_X = W + 2 * HALO_X, COLUMNS_H = W + 2 * HALO_H;
constexpr int PITCH_X = pitch_of(SI), PITCH_H = pitch_of(SO), PAIRS = NB / 16;
constexpr int BYTES_WX = steps_of(SI, KX) * NB * 32, BYTES_WH = steps_of(SO, KH) * NB * 32;

// The same where z_i of the block's own tile and channels is in shared memory, `zs`; foreign chunks are fetched first.
struct SingleTile {
    static constexpr int COUNT = foreign_of(HALO_H), EACH = COUNT ? (COUNT + THREADS - 1) / THREADS : 1;
    uint4 v[EACH];
    int slot[EACH], channels[EACH];

    __device__ __forceinline__ void fetch(const u16* z, int i, int channel, const Tile& tile, int batch) {
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            int pixel;
            const int e = threadIdx.x + k * THREADS;
            if (e < COUNT && foreign<HALO_H>(e, channel, tile, pixel, slot[k], channels[k]))
                v[k] = load_fresh(z + step_at(i, tile, batch) + (long)pixel * SO + channels[k]);
            else slot[k] = -1;
        }
    }
    __device__ __forceinline__ void activate(u32 to, u32 zs, u16* h, const float* scale, const float* shift, int i,
                                             int channel, const Tile& tile) {
        const int c = channel + threadIdx.x % OWN_CHUNKS * 8;
        float s[8], t[8];
#pragma unroll
        for (int k = 0; k < 8; k++) s[k] = scale[c + k], t[k] = shift[c + k];
        u16* out = h + (size_t)tile.first * (D * SO) + i * SO + c;
        uint4 a[OWN_BATCH];
        for_own(tile.count, [&](int k, int q, int at) { a[k] = load_shared(zs + own_at(q, at)); },
                [&](int k, int q, int at) {
                    a[k] = sigma(a[k], s, t);
                    store_shared(to + chunk_at<SO, HALO_H>(slot_of<HALO_H>(q), c), a[k]);
                    *(uint4*)(out + (size_t)q * (D * SO)) = a[k];
                });
#pragma unroll
        for (int k = 0; k < EACH; k++)
            if (slot[k] >= 0)
                store_shared(to + chunk_at<SO, HALO_H>(slot[k], channels[k]), sigma(v[k], scale + channels[k], shift + channels[k]));
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
forward(const u16* x, const u16* packed_x, const u16* packed_h, const float* gamma, const float* beta, u16* z, u16* h,
        float* sums, u32* counters, float* totals, int batch, float eps) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 wx = shared_address(memory), wh = wx + BYTES_WX, xs = wh + BYTES_WH, hs = xs + BYTES_X, zs = hs + BYTES_H;
    float* scale = (float*)(memory + BYTES_WX + BYTES_WH + BYTES_X + BYTES_H + PIXELS * OWN_PITCH);
    float* shift = scale + SO;
    float* scratch = shift + SO;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, wm = warp / WN, wn = warp % WN;
    const int split = blockIdx.x % SPLITS, channel = split * NB;
    const int first_tile = blockIdx.x / SPLITS, tile_stride = gridDim.x / SPLITS, tiles = tiles_of(batch);
    const float pixels = (float)batch * (H * W);

    u32 corners_x[MT], corners_h[MT];
#pragma unroll
    for (int m = 0; m < MT; m++) {
        const int q = pixel_at(wm, m, lane % 16);
        corners_x[m] = xs + slot_of<HALO_X, KX>(q) * PITCH_X;
        corners_h[m] = hs + slot_of<HALO_H, KH>(q) * PITCH_H;
    }
    const u32 my_wx = wx + (wn * NT / 2) * 512 + lane * 16, my_wh = wh + (wn * NT / 2) * 512 + lane * 16;
    if (SI % 8 || SINGLE) clear_shared(xs, BYTES_X + BYTES_H);  // what only fills up, and the border of the map
    __syncthreads();
    copy_block(wx, packed_x + (size_t)split * (BYTES_WX / 2), BYTES_WX);
    copy_block(wh, packed_h + (size_t)split * (BYTES_WH / 2), BYTES_WH);
    Tile tile = tile_at(first_tile, batch);
    copy_tile<HALO_X, SI>(xs, x, X_STRIDE, tile, batch);
    copy_commit();
    SingleTile single;
    NextTile next;
    for (int i = 0; i < D; i++) {
        float sum[NT][2] = {}, squares[NT][2] = {};
        for (int t = first_tile; t < tiles; t += tile_stride) {
            const bool first = SINGLE || t == first_tile;
            float acc[MT][NT][4] = {};
            if (!SINGLE) tile = tile_at(t, batch);
            if (first) {  // the part of x before the wait
                copy_wait<0>();
                __syncthreads();
                convolve<SI, KX, COLUMNS_X, PITCH_X, PAIRS>(acc, corners_x, my_wx);
                if (i > 0) {
                    await(counters + i - 1);
                    if (SINGLE) single.fetch(z, i - 1, channel, tile, batch);
                    if (PREFETCH) next.fetch(z, i - 1, tile, batch);
                    affine(scale, shift, sums, totals, gamma, beta, i - 1, pixels, eps);
                }
            } else if (!PREFETCH) {
                copy_tile<HALO_X, SI>(xs, x + x_step(i, batch), X_STRIDE, tile, batch);
                copy_commit();
            }
            if (i > 0) {
                if (SINGLE) single.activate(hs, zs, h, scale, shift, i - 1, channel, tile);
                else if (PREFETCH) next.activate(hs, h, scale, shift, i - 1, channel, tile, batch);
                else activate<HALO_H, true>(hs, z, h, scale, shift, i - 1, channel, tile, batch);
            }
            copy_wait<0>();
            __syncthreads();
            if (!first) {
                convolve<SI, KX, COLUMNS_X, PITCH_X, PAIRS>(acc, corners_x, my_wx);
                if (PREFETCH) __syncthreads();
            }
            // What comes next arrives during the convolution: copies that are under way at the arrival would delay it.
            if (SINGLE && i + 1 < D) copy_tile<HALO_X, SI>(xs, x + x_step(i + 1, batch), X_STRIDE, tile, batch);
            if (PREFETCH) {
                const bool more = t + tile_stride < tiles;
                const Tile following = tile_at(more ? t + tile_stride : first_tile, batch);
                if (more || i + 1 < D)
                    copy_tile<HALO_X, SI>(xs, x + x_step(more ? i : i + 1, batch), X_STRIDE, following, batch);
                if (more && i > 0) next.fetch(z, i - 1, following, batch);
            }
            copy_commit();
            if (i > 0) convolve<SO, KH, COLUMNS_H, PITCH_H, PAIRS>(acc, corners_h, my_wh);
            u16* out = z + step_at(i, tile, batch) + channel;
            put(acc, sum, squares, zs, out, tile.count);
            if (!SINGLE) {  // before the next tile overwrites the shared ones
                __syncthreads();
                put_own(out, zs, SO, tile.count);
            }
        }
        if (!SINGLE && !PREFETCH && i + 1 < D) {
            tile = tile_at(first_tile, batch);
            copy_tile<HALO_X, SI>(xs, x + x_step(i + 1, batch), X_STRIDE, tile, batch);
            copy_commit();
        }
        if (BATCH) add_sums(sum, squares, scratch, sums, i, channel);
        arrive(counters + i);
        if (SINGLE) put_own(z + step_at(i, tile, batch) + channel, zs, SO, tile.count);
    }
    await(counters + D - 1);
    affine(scale, shift, sums, totals, gamma, beta, D - 1, pixels, eps);
    if (SINGLE) {  // only this block's part is left to do
        const int c = channel + threadIdx.x % OWN_CHUNKS * 8;
        u16* out = h + (size_t)tile.first * (D * SO) + (D - 1) * SO + channel;
        uint4 a[OWN_BATCH];
        for_own(tile.count, [&](int k, int q, int at) { a[k] = load_shared(zs + own_at(q, at)); },
                [&](int k, int q, int at) {
                    *(uint4*)((char*)(out + (size_t)q * (D * SO)) + at) = sigma(a[k], scale + c, shift + c);
                });
    } else
        for (int t = first_tile; t < tiles; t += tile_stride)
            activate<0, false>(hs, z, h, scale, shift, D - 1, channel, tile_at(t, batch), batch);
    if (BATCH) put_totals(totals, sums);
}
