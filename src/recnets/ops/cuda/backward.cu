// Training backward of a CRC layer (Eq. 3), all steps in one launch, from the last to the first:
// g_i = dh_i + dz_{i+1} * W_h^T, m_i = g_i where h_i > 0, and, once the sums of m_i and m_i*zhat_i over the batch are
// known, dz_i = gamma_i/sigma_i * (m_i - mean(m_i) - zhat_i*mean(m_i*zhat_i)); and dx_i = dz_i * W_x^T.
// Blocks, tiles and waits, BATCH and RELU as in forward.cu; statistics that are known, in `sums`, have no part in the
// gradient: dz_i = gamma_i/sigma_i * m_i.
//
// dx shares its taps with the convolution of dz, so it comes along as DX_TILES more tiles of 8 outputs a warp (0 where
// kernel sizes differ or memory is short: input_grad.cu does it then). DX are the channels of dx that a block computes,
// padded to 16; with DX_SPLIT the blocks of a tile share them out, else the first of them computes all.

constexpr int COLUMNS = W + 2 * HALO, PITCH_H = pitch_of(SO), PAIRS = NB / 16;
constexpr int BYTES_WH = steps_of(SO, KH) * NB * 32, BYTES_WX = steps_of(SO, KX) * DX * 32;

// dz_i of a tile, m_i from global memory: into shared memory with its halo, and this block's channels into dz.
__device__ __forceinline__ void make_dz(u32 to, const u16* m, const u16* z, u16* dz, const float* coefficients, int i,
                                        int channel, const Tile& tile, int batch) {
    constexpr int SLOTS = slots_of(HALO), LOADERS = THREADS / CHUNKS;
    constexpr int EACH = (SLOTS + LOADERS - 1) / LOADERS, AT_ONCE = EACH < 6 ? EACH : 6;
    const int c = threadIdx.x % CHUNKS * 8, loader = threadIdx.x / CHUNKS;
    if (loader >= LOADERS) return;
    const bool mine = c >= channel && c < channel + NB;
    const Combination combined(coefficients, c);
    const u16* from_m = m + (size_t)tile.first * SO + c;
    const u16* from_z = z + step_at(i, tile, batch) + c;
    u16* out = dz + step_at(i, tile, batch) + c;
    for (int slot0 = loader; slot0 < SLOTS; slot0 += LOADERS * AT_ONCE) {
        uint4 v[AT_ONCE], y[AT_ONCE];
        int pixel[AT_ONCE];
        bool ok[AT_ONCE], inside[AT_ONCE];
#pragma unroll
        for (int e = 0; e < AT_ONCE; e++) {
            const int slot = slot0 + e * LOADERS;
            ok[e] = slot < SLOTS && pixel_of<HALO>(slot, tile, batch, pixel[e], inside[e]);
            v[e] = y[e] = make_uint4(0, 0, 0, 0);
            if (ok[e]) {
                v[e] = load_fresh(from_m + (long)pixel[e] * SO);
                y[e] = load_fresh(from_z + (long)pixel[e] * SO);
            }
        }
#pragma unroll
        for (int e = 0; e < AT_ONCE; e++) {
            const int slot = slot0 + e * LOADERS;
            if (ok[e]) v[e] = combined(v[e], y[e]);
            if (ok[e] && mine && inside[e]) *(uint4*)(out + (long)pixel[e] * SO) = v[e];
            if (slot < SLOTS) store_shared(to + chunk_at<SO, HALO>(slot, c), v[e]);
        }
    }
}

// The same where m_i and z_i of the block's own tile and channels are in shared memory; foreign chunks of m_i and z_i
// are fetched first, those of z_i before the wait.
struct SingleTile {
    static constexpr int COUNT = foreign_of(HALO), EACH = COUNT ? (COUNT + THREADS - 1) / THREADS : 1;
    uint4 v[EACH], y[EACH];
    int pixel[EACH], slot[EACH], channels[EACH];

    __device__ __forceinline__ void place(int channel, const Tile& tile) {
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const int e = threadIdx.x + k * THREADS;
            if (!(e < COUNT && foreign<HALO>(e, channel, tile, pixel[k], slot[k], channels[k]))) slot[k] = -1;
        }
    }
    __device__ __forceinline__ void fetch_z(const u16* z, int i, const Tile& tile, int batch) {
#pragma unroll
        for (int k = 0; k < EACH; k++)
            if (slot[k] >= 0)
                y[k] = *(const uint4*)(z + step_at(i, tile, batch) + (long)pixel[k] * SO + channels[k]);
    }
    __device__ __forceinline__ void fetch_m(const u16* m, const Tile& tile) {
#pragma unroll
        for (int k = 0; k < EACH; k++)
            if (slot[k] >= 0) v[k] = load_fresh(m + (size_t)tile.first * SO + (long)pixel[k] * SO + channels[k]);
    }
    __device__ __forceinline__ void make_dz(u32 to, u32 ms, u32 zs, u16* dz, const float* coefficients, int i,
                                            int channel, const Tile& tile, int batch) {
        const int c = channel + threadIdx.x % OWN_CHUNKS * 8;
        const Combination combined(coefficients, c);
        u16* out = dz + step_at(i, tile, batch) + c;
        uint4 r[OWN_BATCH], p[OWN_BATCH];
        for_own(tile.count,
                [&](int k, int q, int at) {
                    r[k] = load_shared(ms + own_at(q, at));
                    p[k] = load_shared(zs + own_at(q, at));
                },
                [&](int k, int q, int at) {
                    r[k] = combined(r[k], p[k]);
                    store_shared(to + chunk_at<SO, HALO>(slot_of<HALO>(q), c), r[k]);
                    *(uint4*)(out + (size_t)q * SO) = r[k];
                });
#pragma unroll
        for (int k = 0; k < EACH; k++)
            if (slot[k] >= 0) {
                const float* at = coefficients + channels[k];
                store_shared(to + chunk_at<SO, HALO>(slot[k], channels[k]), combine(v[k], y[k], at, at + SO, at + 2 * SO));
            }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
backward(const u16* dh, const u16* packed_h, const u16* packed_x, const float* gamma, const float* beta, const u16* z,
         const float* sums, u16* masked, u16* dz, u16* dx, float* grad_sums, u32* counters, float* totals, int batch,
         float eps) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 wh = shared_address(memory), wx = wh + BYTES_WH, hs = wx + BYTES_WX, ms = hs + BYTES_H,
              zs = ms + PIXELS * OWN_PITCH;
    float* coefficients = (float*)(memory + BYTES_WH + BYTES_WX + BYTES_H + 2 * PIXELS * OWN_PITCH);
    float* scratch = coefficients;  // the sums are added up after the last use of the coefficients
    float* norm = coefficients + (3 * SO > WM * 2 * NB ? 3 * SO : WM * 2 * NB);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, wm = warp / WN, wn = warp % WN;
    const int split = blockIdx.x % SPLITS, channel = split * NB;
    const int first_tile = blockIdx.x / SPLITS, tile_stride = gridDim.x / SPLITS, tiles = tiles_of(batch);
    const float pixels = (float)batch * (H * W);
    const size_t plane = (size_t)batch * (H * W) * SO;  // of `masked`, which steps use by turns

    u32 corners[MT];
#pragma unroll
    for (int m = 0; m < MT; m++) corners[m] = hs + slot_of<HALO, KH>(pixel_at(wm, m, lane % 16)) * PITCH_H;
    const u32 my_wh = wh + (wn * NT / 2) * 512 + lane * 16, my_wx = wx + lane * 16;
    if (SINGLE) clear_shared(hs, BYTES_H);  // the border of the map
    copy_block(wh, packed_h + (size_t)split * (BYTES_WH / 2), BYTES_WH);
    if (DX) copy_block(wx, packed_x + (DX_SPLIT ? (size_t)split * (BYTES_WX / 2) : 0), BYTES_WX);
    Tile tile = tile_at(first_tile, batch);
    SingleTile single;
    NextTile next;
    if (SINGLE) single.place(channel, tile);
    for (int i = D - 1; i >= -1; i--) {  // step -1 only makes dz_0 and dx_0
        float sum[NT][2] = {}, products[NT][2] = {};
        if (i >= 0) put_norm(norm, sums, gamma, beta, i, channel, pixels, eps);
        float extra[MT][TX][4];
        for (int t = first_tile; t < tiles; t += tile_stride) {
            if (!SINGLE) tile = tile_at(t, batch);
            if (i < D - 1) {
                if (SINGLE || t == first_tile) {
                    await(counters + i + 1);
                    if (SINGLE) single.fetch_m(masked + ((i + 1) & 1) * plane, tile);
                    if (PREFETCH) next.fetch(masked + ((i + 1) & 1) * plane, z, i + 1, tile, batch);
                    norm_grad(coefficients, sums, grad_sums, gamma, beta, i + 1, pixels, eps);
                }
                if (SINGLE) single.make_dz(hs, ms, zs, dz, coefficients, i + 1, channel, tile, batch);
                else if (PREFETCH) next.make_dz(hs, dz, coefficients, i + 1, channel, tile, batch);
                else make_dz(hs, masked + ((i + 1) & 1) * plane, z, dz, coefficients, i + 1, channel, tile, batch);
            }
            __syncthreads();
            if (i >= 0) {  // these arrive during the convolution
                fetch_own(ms, dh + (size_t)tile.first * (D * SO) + i * SO + channel, D * SO, tile.count);
                fetch_own(zs, z + step_at(i, tile, batch) + channel, SO, tile.count);
            }
            copy_commit();
            if (PREFETCH && i < D - 1 && t + tile_stride < tiles)
                next.fetch(masked + ((i + 1) & 1) * plane, z, i + 1, tile_at(t + tile_stride, batch), batch);
            float acc[MT][NT][4] = {};
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int n = 0; n < TX; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) extra[m][n][e] = 0.f;
            if (i < D - 1 && i >= 0)
                convolve<SO, KH, COLUMNS, PITCH_H, PAIRS, DX / 16, true>(acc, extra, corners, my_wh, my_wx, wn * TX);
            if (i == -1 && DX_TILES)
                convolve<SO, KH, COLUMNS, PITCH_H, PAIRS, DX / 16, false>(acc, extra, corners, my_wh, my_wx, wn * TX);
            u16* out = masked + (i & 1) * plane + (size_t)tile.first * SO + channel;
            copy_wait<0>();
            __syncthreads();
            if (i >= 0) put(acc, sum, products, norm, ms, zs, out, tile.count);
            if (!SINGLE) {  // before the next tile overwrites the shared ones
                if (i < D - 1) put_dx(extra, 0, dx, i + 1, split, tile, batch);
                __syncthreads();
                if (i >= 0) put_own(out, ms, SO, tile.count);
            }
        }
        if (i >= 0) {
            add_sums(sum, products, scratch, grad_sums, i, channel);
            arrive(counters + i);
        }
        if (SINGLE) {
            if (i < D - 1) put_dx(extra, 0, dx, i + 1, split, tile, batch);
            if (i >= 0) single.fetch_z(z, i, tile, batch);
        }
    }
    put_totals(totals, grad_sums);
}
