// The training backward of backward.cu with convolutions by warpgroups, as forward_wide.cu is to forward.cu. dx is DX_TILES
// * 8 more columns of the same products.

constexpr int ALL = NT + DX_TILES, BYTES_W = products_of(SO) * ALL * 256;
static_assert(KX == 3 && KH == 3 && !SINGLE);

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
backward_wide(const u16* dh, const u16* packed, const u16*, const float* gamma, const float* beta, const u16* z,
              const float* sums, u16* masked, u16* dz, u16* dx, float* grad_sums, u32* counters, float* totals, int batch,
              float eps) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 weights = shared_address(memory), hs = weights + BYTES_W, ms = hs + BUFFERS * BYTES_H,
              zs = ms + PIXELS * OWN_PITCH;
    float* coefficients = (float*)(memory + BYTES_W + BUFFERS * BYTES_H + 2 * PIXELS * OWN_PITCH);
    float* scratch = coefficients;  // the sums are added up after the last use of the coefficients
    float* norm = coefficients + (3 * SO > WM * 2 * NB ? 3 * SO : WM * 2 * NB);
    const int split = blockIdx.x % SPLITS, channel = split * NB;
    const int tiles = tiles_of(batch);
    const float pixels = (float)batch * (H * W);
    const size_t plane = (size_t)batch * (H * W) * SO;  // of `masked`, which steps use by turns

    int corners[MT];
#pragma unroll
    for (int m = 0; m < MT; m++) corners[m] = slot_of<1, 3>(pixel_at(uniform(threadIdx.x / 128) * 4, m, 0));
    clear_shared(hs, BUFFERS * BYTES_H);  // the border of the map
    copy_block(weights, packed + (size_t)split * (BYTES_W / 2), BYTES_W);
    copy_commit();
    NextTile next;
    int buffer = 0;
    for (int i = D - 1; i >= -1; i--) {  // step -1 only makes dz_0 and dx_0
        float sum[NT][2] = {}, products[NT][2] = {};
        if (i >= 0) put_norm(norm, sums, gamma, beta, i, channel, pixels, eps);
        const u16* from = masked + ((i + 1) & 1) * plane;
        const Walk walk(i, tiles);
        // dz_{i+1} of tile t, the block's k-th, and m and z of the one after it on their way.
        const auto make_tile = [&](int k, int t, int to) {
            next.make_dz(hs + to * BYTES_H, dz, coefficients, i + 1, channel, tile_at(t, batch), batch);
            if (k + 1 < walk.count) next.fetch(from, z, i + 1, tile_at(t + walk.by, batch), batch);
        };
        if (i < D - 1) {
            await(counters + i + 1);
            next.fetch(from, z, i + 1, tile_at(walk.first, batch), batch);
            norm_grad(coefficients, sums, grad_sums, gamma, beta, i + 1, pixels, eps);
            make_tile(0, walk.first, buffer);
        }
        for (int k = 0, t = walk.first; k < walk.count; k++, t += walk.by) {
            const Tile tile = tile_at(t, batch);
            const int following = BUFFERS == 2 ? buffer ^ 1 : 0;
            const auto prepare = [&] {
                if (i < D - 1 && k + 1 < walk.count) make_tile(k + 1, t + walk.by, following);
            };
            copy_wait<0>();
            publish_shared();
            __syncthreads();  // also: what was stored of the tile before has been read
            if (i >= 0) {  // these arrive during the products
                fetch_own(ms, dh + (size_t)tile.first * (D * SO) + i * SO + channel, D * SO, tile.count);
                fetch_own(zs, z + step_at(i, tile, batch) + channel, SO, tile.count);
            }
            copy_commit();
            float acc[MT][ALL][4] = {};
            if (i < D - 1) {
                wgmma_fence(acc);
                convolve_planes<SO>(acc, hs + buffer * BYTES_H, corners, weights);
                wgmma_commit();  // here: elsewhere the compiler adds a product to commit where there is none
            }
            if (BUFFERS == 2) prepare();
            wgmma_wait(acc);
            copy_wait<0>();
            __syncthreads();
            u16* out = masked + (i & 1) * plane + (size_t)tile.first * SO + channel;
            if (i >= 0) put(acc, sum, products, norm, ms, zs, out, tile.count);
            if (i < D - 1) put_dx(acc, NT, dx, i + 1, split, tile, batch);
            __syncthreads();
            if (BUFFERS == 1) prepare();
            if (i >= 0) put_own(out, ms, SO, tile.count);
            buffer = following;
        }
        if (i >= 0) {
            add_sums(sum, products, scratch, grad_sums, i, channel);
            arrive(counters + i);
        }
    }
    put_totals(totals, grad_sums);
}
