// Training backward of a CRC layer (Eq. 3), all steps in one launch, from the last to the first:
// g_i = dh_i + dz_{i+1} * W_h^T, m_i = g_i where h_i > 0, and, once the sums of m_i and m_i*zhat_i over the batch are
// known, dz_i = gamma_i/sigma_i * (m_i - mean(m_i) - zhat_i*mean(m_i*zhat_i)); and dx_i = dz_i * W_x^T.
// Blocks, tiles and waits, BATCH and RELU as in forward.cu; statistics that are known, in `sums`, have no part in the
// gradient: dz_i = gamma_i/sigma_i * m_i.
//
// dx shares its taps with the convolution of dz, so it comes along as DX_TILES more tiles of 8 outputs a warp (0 where
// kernel sizes differ or memory is short: input_grad.cu does it then). DX are the channels of dx that a block computes,
// padded to 16; with DX_SPLIT the blocks of a tile share them out, else the first of them computes all.

constexpr int HALO = KH / 2, COLUMNS = W + 2 * HALO, PITCH_H = pitch_of(SO), PAIRS = NB / 16;
constexpr int BYTES_WH = steps_of(SO, KH) * NB * 32, BYTES_WX = steps_of(SO, KX) * DX * 32;
constexpr int BYTES_H = slots_of(HALO) * PITCH_H;
constexpr int TX = DX_TILES ? DX_TILES : 1, DX_CHANNELS = DX_SPLIT ? SI / SPLITS : SI;

struct Statistics {
    float mean, rstd, scale, shift;
};
__device__ __forceinline__ Statistics statistics(const float* sums, const float* gamma, const float* beta, int i, int c,
                                                 float pixels, float eps) {
    Statistics s;
    s.mean = BATCH ? sums[i * SO + c] / pixels : sums[i * SO + c];
    s.rstd = rsqrtf(fmaxf(BATCH ? sums[(D + i) * SO + c] / pixels - s.mean * s.mean : sums[(D + i) * SO + c], 0.f) + eps);
    s.scale = gamma[i * SO + c] * s.rstd;
    s.shift = beta[i * SO + c] - s.mean * s.scale;
    return s;
}

// dz_i as m*a + z*b + k, for all channels; the coefficients a, b and k follow each other.
__device__ __forceinline__ void norm_grad(float* coefficients, const float* sums, const float* grad_sums,
                                          const float* gamma, const float* beta, int i, float pixels, float eps) {
    for (int c = threadIdx.x; c < SO; c += THREADS) {
        const float mean_m = total(grad_sums, 0, i, c) / pixels, mean_mz = total(grad_sums, 1, i, c) / pixels;
        const Statistics s = statistics(sums, gamma, beta, i, c, pixels, eps);
        coefficients[c] = s.scale;
        coefficients[SO + c] = BATCH ? -s.scale * mean_mz * s.rstd : 0.f;
        coefficients[2 * SO + c] = BATCH ? s.scale * (mean_mz * s.rstd * s.mean - mean_m) : 0.f;
    }
    __syncthreads();
}
__device__ __forceinline__ uint4 combine(uint4 m, uint4 z, const float* a, const float* b, const float* k) {
    u32 *word = &m.x, *zword = &z.x;
#pragma unroll
    for (int w = 0; w < 4; w++) {
        const float2 f = unpack2(word[w]), g = unpack2(zword[w]);
        word[w] = pack2(f.x * a[2 * w] + (g.x * b[2 * w] + k[2 * w]),
                        f.y * a[2 * w + 1] + (g.y * b[2 * w + 1] + k[2 * w + 1]));
    }
    return m;
}

// The same with the coefficients of 8 channels from c on, in registers.
struct Combination {
    float a[8], b[8], k[8];
    __device__ __forceinline__ Combination(const float* coefficients, int c) {
#pragma unroll
        for (int e = 0; e < 8; e++)
            a[e] = coefficients[c + e], b[e] = coefficients[SO + c + e], k[e] = coefficients[2 * SO + c + e];
    }
    __device__ __forceinline__ uint4 operator()(uint4 m, uint4 z) const { return combine(m, z, a, b, k); }
};

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
    const u16* from_z = z + (size_t)tile.first * (D * SO) + i * SO + c;
    u16* out = dz + (size_t)tile.first * (D * SO) + i * SO + c;
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
                y[e] = load_fresh(from_z + (long)pixel[e] * (D * SO));
            }
        }
#pragma unroll
        for (int e = 0; e < AT_ONCE; e++) {
            const int slot = slot0 + e * LOADERS;
            if (ok[e]) v[e] = combined(v[e], y[e]);
            if (ok[e] && mine && inside[e]) *(uint4*)(out + (long)pixel[e] * (D * SO)) = v[e];
            if (slot < SLOTS) store_shared(to + slot * PITCH_H + c * 2, v[e]);
        }
    }
}

// With PREFETCH m_i and z_i are fetched into registers while the tile before is convolved.
struct NextTile {
    static constexpr int SLOTS = slots_of(HALO), LOADERS = THREADS / CHUNKS, EACH = (SLOTS + LOADERS - 1) / LOADERS;
    uint4 v[EACH], y[EACH];

    __device__ __forceinline__ void fetch(const u16* m, const u16* z, int i, const Tile& tile, int batch) {
        const int thread = thread_number(), c = thread % CHUNKS * 8, loader = thread / CHUNKS;
        const u16* from_m = m + (size_t)tile.first * SO + c;
        const u16* from_z = z + (size_t)tile.first * (D * SO) + i * SO + c;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int slot = loader + e * LOADERS;
            int pixel;
            bool inside;
            v[e] = y[e] = make_uint4(0, 0, 0, 0);
            if (loader < LOADERS && slot < SLOTS && pixel_of<HALO>(slot, tile, batch, pixel, inside)) {
                v[e] = load_fresh(from_m + (long)pixel * SO);
                y[e] = load_fresh(from_z + (long)pixel * (D * SO));
            }
        }
    }
    __device__ __forceinline__ void make_dz(u32 to, u16* dz, const float* coefficients, int i, int channel,
                                            const Tile& tile, int batch) {
        const int thread = thread_number(), c = thread % CHUNKS * 8, loader = thread / CHUNKS;
        if (loader >= LOADERS) return;
        const bool mine = c >= channel && c < channel + NB;
        const Combination combined(coefficients, c);
        u16* out = dz + (size_t)tile.first * (D * SO) + i * SO + c;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int slot = loader + e * LOADERS;
            int pixel;
            bool inside;
            if (slot >= SLOTS) continue;
            if (pixel_of<HALO>(slot, tile, batch, pixel, inside)) {
                v[e] = combined(v[e], y[e]);
                if (mine && inside) *(uint4*)(out + (long)pixel * (D * SO)) = v[e];
            }
            store_shared(to + slot * PITCH_H + c * 2, v[e]);
        }
    }
};

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
    __device__ __forceinline__ void fetch_z(const u16* z, int i, const Tile& tile) {
#pragma unroll
        for (int k = 0; k < EACH; k++)
            if (slot[k] >= 0)
                y[k] = *(const uint4*)(z + (size_t)tile.first * (D * SO) + (long)pixel[k] * (D * SO) + i * SO + channels[k]);
    }
    __device__ __forceinline__ void fetch_m(const u16* m, const Tile& tile) {
#pragma unroll
        for (int k = 0; k < EACH; k++)
            if (slot[k] >= 0) v[k] = load_fresh(m + (size_t)tile.first * SO + (long)pixel[k] * SO + channels[k]);
    }
    __device__ __forceinline__ void make_dz(u32 to, u32 ms, u32 zs, u16* dz, const float* coefficients, int i,
                                            int channel, const Tile& tile) {
        const int c = channel + threadIdx.x % OWN_CHUNKS * 8;
        const Combination combined(coefficients, c);
        u16* out = dz + (size_t)tile.first * (D * SO) + i * SO + c;
        uint4 r[OWN_BATCH], p[OWN_BATCH];
        for_own(tile.count,
                [&](int k, int q, int at) {
                    r[k] = load_shared(ms + own_at(q, at));
                    p[k] = load_shared(zs + own_at(q, at));
                },
                [&](int k, int q, int at) {
                    r[k] = combined(r[k], p[k]);
                    store_shared(to + slot_of<HALO>(q) * PITCH_H + c * 2, r[k]);
                    *(uint4*)(out + (size_t)q * (D * SO)) = r[k];
                });
#pragma unroll
        for (int k = 0; k < EACH; k++)
            if (slot[k] >= 0) {
                const float* at = coefficients + channels[k];
                store_shared(to + slot[k] * PITCH_H + channels[k] * 2, combine(v[k], y[k], at, at + SO, at + 2 * SO));
            }
    }
};

// m_i = g_i where h_i > 0, g_i = dh_i + acc; dh_i is in `ms` and gives way to m_i, z_i in `zs`. What other blocks will
// read goes also to global memory. norm: scale, shift, 1/sigma and -mean/sigma of this block's channels.
__device__ __forceinline__ void put(const float (&acc)[MT][NT][4], float (&sum)[NT][2], float (&products)[NT][2],
                                    const float* norm, u32 ms, u32 zs, u16* out, int count) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, wm = warp / WN, wn = warp % WN;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const int c = (wn * NT + n) * 8 + lane % 4 * 2;
        const float2 scale = *(float2*)(norm + c), shift = *(float2*)(norm + NB + c);
        const float2 rstd = *(float2*)(norm + 2 * NB + c), centre = *(float2*)(norm + 3 * NB + c);
        u32 pres[MT][2], dhs[MT][2];  // all loads before the first store
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int q = pixel_at(wm, m, half * 8 + lane / 4);
                if (q >= count) continue;
                pres[m][half] = load_shared1(zs + own_at(q, c * 2));
                dhs[m][half] = load_shared1(ms + own_at(q, c * 2));
            }
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int q = pixel_at(wm, m, half * 8 + lane / 4);
                if (q >= count) continue;
                const float2 pre = unpack2(pres[m][half]), dh = unpack2(dhs[m][half]);
                const float a = !RELU || pre.x * scale.x + shift.x > 0 ? acc[m][n][half * 2] + dh.x : 0.f;
                const float b = !RELU || pre.y * scale.y + shift.y > 0 ? acc[m][n][half * 2 + 1] + dh.y : 0.f;
                const u32 v = pack2(a, b);
                store_shared(ms + own_at(q, c * 2), v);
                if (SINGLE && shared_with_others(q, HALO)) *(u32*)(out + (size_t)q * SO + c) = v;
                sum[n][0] += a, sum[n][1] += b;
                products[n][0] += a * (pre.x * rstd.x + centre.x);
                products[n][1] += b * (pre.y * rstd.y + centre.y);
            }
    }
}

// dx of a warp's tiles.
__device__ __forceinline__ void put_dx(const float (&extra)[MT][TX][4], u16* dx, int i, int split, const Tile& tile) {
    if (!DX_TILES || (!DX_SPLIT && split)) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, wm = warp / WN, wn = warp % WN;
    u16* out = dx + (size_t)tile.first * (D * SI) + i * SI + (DX_SPLIT ? split * DX_CHANNELS : 0);
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int q = pixel_at(wm, m, half * 8 + lane / 4);
            if (q >= tile.count) continue;
#pragma unroll
            for (int n = 0; n < TX; n++) {
                const int c = (wn * TX + n) * 8 + lane % 4 * 2;
                if (c < DX_CHANNELS)
                    *(u32*)(out + (size_t)q * (D * SI) + c) = pack2(extra[m][n][half * 2], extra[m][n][half * 2 + 1]);
            }
        }
}

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
        if (i >= 0)
            for (int c = threadIdx.x; c < NB; c += THREADS) {
                const Statistics s = statistics(sums, gamma, beta, i, channel + c, pixels, eps);
                norm[c] = s.scale, norm[NB + c] = s.shift, norm[2 * NB + c] = s.rstd, norm[3 * NB + c] = -s.mean * s.rstd;
            }
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
                if (SINGLE) single.make_dz(hs, ms, zs, dz, coefficients, i + 1, channel, tile);
                else if (PREFETCH) next.make_dz(hs, dz, coefficients, i + 1, channel, tile, batch);
                else make_dz(hs, masked + ((i + 1) & 1) * plane, z, dz, coefficients, i + 1, channel, tile, batch);
            }
            __syncthreads();
            if (i >= 0) {  // these arrive during the convolution
                const size_t at = (size_t)tile.first * (D * SO) + i * SO + channel;
                fetch_own(ms, dh + at, D * SO, tile.count);
                fetch_own(zs, z + at, D * SO, tile.count);
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
                if (i < D - 1) put_dx(extra, dx, i + 1, split, tile);
                __syncthreads();
                if (i >= 0) put_own(out, ms, SO, tile.count);
            }
        }
        if (i >= 0) {
            add_sums(sum, products, scratch, grad_sums, i, channel);
            arrive(counters + i);
        }
        if (SINGLE) {
            if (i < D - 1) put_dx(extra, dx, i + 1, split, tile);
            if (i >= 0) single.fetch_z(z, i, tile);
        }
    }
    for (int e = blockIdx.x * THREADS + threadIdx.x; e < 2 * D * SO; e += gridDim.x * THREADS)
        totals[e] = total(grad_sums, e / (D * SO), e / SO % D, e % SO);
}
