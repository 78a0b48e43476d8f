// The training forward of forward.cu with convolutions by warpgroups (planes.cuh), for 3 x 3 kernels and tile after tile:
// products read shared memory themselves, and meanwhile the threads prepare the tile that follows. With BUFFERS = 1, where
// there is no room for two tiles, they do so afterwards.

constexpr int BYTES_WX = products_of(SI) * NB * 32, BYTES_WH = products_of(SO) * NB * 32;
static_assert(KX == 3 && KH == 3 && !SINGLE);

template <bool V>
struct Constant {
    static constexpr bool value = V;
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
forward_wide(const u16* x, const u16* packed_x, const u16* packed_h, const float* gamma, const float* beta, u16* z, u16* h,
             float* sums, u32* counters, float* totals, int batch, float eps) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 wx = shared_address(memory), wh = wx + BYTES_WX, xs = wh + BYTES_WH, hs = xs + BUFFERS * BYTES_X,
              zs = hs + BUFFERS * BYTES_H;
    float* scale = (float*)(memory + BYTES_WX + BYTES_WH + BUFFERS * (BYTES_X + BYTES_H) + PIXELS * OWN_PITCH);
    float* shift = scale + SO;
    float* scratch = shift + SO;
    const int split = blockIdx.x % SPLITS, channel = split * NB;
    const int tiles = tiles_of(batch);
    const float pixels = (float)batch * (H * W);

    int corners[MT];
#pragma unroll
    for (int m = 0; m < MT; m++) corners[m] = slot_of<1, 3>(pixel_at(uniform(threadIdx.x / 128) * 4, m, 0));
    clear_shared(xs, BUFFERS * (BYTES_X + BYTES_H));  // what only fills up, and the border of the map
    __syncthreads();
    copy_block(wx, packed_x + (size_t)split * (BYTES_WX / 2), BYTES_WX);
    copy_block(wh, packed_h + (size_t)split * (BYTES_WH / 2), BYTES_WH);
    copy_tile<1, SI>(xs, x, X_STRIDE, tile_at(Walk(0, tiles).first, batch), batch);
    copy_commit();
    NextTile next;
    int buffer = 0;
    // A branch between products would make each wait for the one before, so the first step is a copy without h.
    const auto step = [&](auto has_h, int i) {
        constexpr bool HAS_H = decltype(has_h)::value;
        const Walk walk(i, tiles);
        float sum[NT][2] = {}, squares[NT][2] = {};
        // h_{i-1} of tile t, the block's k-th, and z of the one after it on its way.
        const auto activate_tile = [&](int k, int t, int to) {
            next.activate(hs + to * BYTES_H, h, scale, shift, i - 1, channel, tile_at(t, batch), batch);
            if (k + 1 < walk.count) next.fetch(z, i - 1, tile_at(t + walk.by, batch), batch);
        };
        if (HAS_H) {
            await(counters + i - 1);
            next.fetch(z, i - 1, tile_at(walk.first, batch), batch);
            affine(scale, shift, sums, totals, gamma, beta, i - 1, pixels, eps);
            activate_tile(0, walk.first, buffer);
        }
        for (int k = 0, t = walk.first; k < walk.count; k++, t += walk.by) {
            const Tile tile = tile_at(t, batch);
            const int following = BUFFERS == 2 ? buffer ^ 1 : 0;
            const auto prepare = [&] {  // the tile that follows, or the same in the next step
                const bool more = k + 1 < walk.count;
                if (more || i + 1 < D)
                    copy_tile<1, SI>(xs + following * BYTES_X, x + x_step(more ? i : i + 1, batch), X_STRIDE,
                                     tile_at(more ? t + walk.by : t, batch), batch);
                copy_commit();
                if (HAS_H && more) activate_tile(k + 1, t + walk.by, following);
            };
            copy_wait<0>();
            publish_shared();
            __syncthreads();  // also: what was stored of the tile before has been read
            float acc[MT][NT][4] = {};
            wgmma_fence(acc);
            convolve_planes<SI>(acc, xs + buffer * BYTES_X, corners, wx);
            if (HAS_H) convolve_planes<SO>(acc, hs + buffer * BYTES_H, corners, wh);
            wgmma_commit();
            if (BUFFERS == 2) prepare();
            wgmma_wait(acc);
            u16* out = z + step_at(i, tile, batch) + channel;
            put(acc, sum, squares, zs, out, tile.count);
            __syncthreads();
            if (BUFFERS == 1) prepare();
            put_own(out, zs, SO, tile.count);
            buffer = following;
        }
        if (BATCH) add_sums(sum, squares, scratch, sums, i, channel);
        arrive(counters + i);
    };
    step(Constant<false>(), 0);
    for (int i = 1; i < D; i++) step(Constant<true>(), i);
    await(counters + D - 1);
    affine(scale, shift, sums, totals, gamma, beta, D - 1, pixels, eps);
    const Walk walk(D, tiles);
    for (int k = 0, t = walk.first; k < walk.count; k++, t += walk.by)
        activate<0, false>(hs, z, h, scale, shift, D - 1, channel, tile_at(t, batch), batch);
    if (BATCH) put_totals(totals, sums);
}
