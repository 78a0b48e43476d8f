// The parts of weight_grad.cu with XB, for 3 x 3 kernels, by products that read shared memory themselves (wgmma.cuh):
// dW[tap, ci, co] = sum over steps i and pixels p of a_{i-1}(p + tap)[ci] * dz_i(p)[co], and so of x_i for W_x.
//
// A block has CO_BLOCK outputs, and CI_BLOCK + XB channels of a and of x, which are one product a tap and 16 pixels. Its
// sums are complete: no warps exchange any. In shared memory a chunk of 8 channels of a row of the tile is 16 bytes a
// pixel, and a row's chunks lie behind each other: those of a and x with the tile's halo, so that a tap is an offset, and
// those of dz. The map is a multiple of 8 pixels wide: what wgmma takes for 8 k are 8 neighbours of a row, a run.
//
// A product has 64 rows. With 64 outputs these are dz's channels, and a warpgroup has a row of taps. With 32 they are
// two rows of dz, whose chunks follow each other anyway, times two rows of a and x: then
//
//     rows of the product        row of a and x: that below dz(p)    the second one below
//     dz(p)                      ky = 1                              ky = 2
//     dz of the row below        ky = 0                              ky = 1, once more
//
// and a warpgroup has a column of taps. Rows of zeros lie above and below dz, from which such products begin and end.

constexpr bool PAIRED = CO_BLOCK == 32;
constexpr int ALL = CI_BLOCK + XB, CHUNKS_A = ALL / 8, CHUNKS_G = CO_BLOCK / 8, RUNS = W / 8;
constexpr int LINES = ROWS + 2, LINES_G = ROWS + 2 * PAIRED;    // of an image in shared memory
constexpr int LINE = CHUNKS_A * (W + 3), LINE_G = CHUNKS_G * (W + 1);  // times 16 bytes; chunks begin in different banks
constexpr int BYTES_A = IMAGES * LINES * LINE * 16, STAGE = BYTES_A + IMAGES * LINES_G * LINE_G * 16;
constexpr int PRODUCTS = PAIRED ? 1 : KW, COLUMNS = PAIRED ? 2 * ALL : ALL;
static_assert((CO_BLOCK == 64 || PAIRED) && XB % 8 == 0 && W % 8 == 0 && KW == 3 && WN == 4 && LAG == 1);

// Where things lie in shared memory, in 16 bytes; rows and columns are the tile's.
__device__ __forceinline__ int at_a(int image, int row, int chunk, int column) {
    return (image * LINES + row + 1) * LINE + chunk * (W + 3) + column + 1;
}
__device__ __forceinline__ int at_g(int image, int row, int chunk, int column) {
    return (image * LINES_G + row + PAIRED) * LINE_G + chunk * (W + 1) + column;
}
// Run r of dz, and the pixels above and to the left of it.
constexpr int ROWS_OF_RUNS = ROWS + PAIRED;
static_assert(IMAGES * ROWS_OF_RUNS * RUNS % 2 == 0, "two runs a product");
__device__ __forceinline__ int run_g(int r) {
    return at_g(r / RUNS / ROWS_OF_RUNS, r / RUNS % ROWS_OF_RUNS - PAIRED, 0, r % RUNS * 8);
}
__device__ __forceinline__ int run_a(int r) {
    return at_a(r / RUNS / ROWS_OF_RUNS, r / RUNS % ROWS_OF_RUNS - 1, 0, r % RUNS * 8 - 1);
}

// A segment of CHANNELS of a tile, with HALO the rows above and below it where these are another tile's; zeros where
// !there. What lies beside the map is never written.
template <int CHANNELS, bool HALO, int (*AT)(int, int, int, int)>
__device__ __forceinline__ void copy_lines(u32 to, const u16* from, int stride, const Tile& tile, bool there) {
    constexpr int HERE = CHANNELS / 8, TALL = ROWS + 2 * HALO;
    from += (long)tile.first * stride;
#pragma unroll 1
    for (int e = threadIdx.x; e < IMAGES * TALL * W * HERE; e += THREADS) {
        const int chunk = e % HERE, column = e / HERE % W, line = e / (HERE * W);
        const int row = line % TALL - HALO, image = line / TALL, pixel = (image * ROWS + row) * W + column;
        const bool ok = there && (HALO ? (unsigned)(tile.row + row) < H : pixel < tile.count);
        copy_async<16>(to + AT(image, row, chunk, column) * 16, ok ? from + pixel * stride + chunk * 8 : from, ok);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
weight_grad_wide(const u16* a, const u16* x, const u16* dz, float* parts, float* parts_x, int batch) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 base = shared_address(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / 4;
    const int ci0 = blockIdx.y * CI_BLOCK, x0 = blockIdx.y * XB, co0 = blockIdx.z * CO_BLOCK;
    const int all = tiles_of(batch) * D;
    float sums[PRODUCTS][COLUMNS / 2] = {};
    clear_shared(base, STAGES * STAGE);
    __syncthreads();
    auto fetch = [&](int work, int stage) {
        if (work < all) {
            const int i = work % D;
            const Tile tile = tile_at(work / D, batch);
            const u32 to = base + stage * STAGE;
            // The first step has zeros for a: products of x alone besides, and the compiler would let none overlap.
            copy_lines<CI_BLOCK, TALLER, at_a>(to, a + max(i - LAG, 0) * CA + ci0, D * CA, tile, i >= LAG);
            copy_lines<XB, TALLER, at_a>(to + CI_BLOCK * 2 * (W + 3), x + x_step(i, batch) + x0, X_STRIDE, tile, true);
            copy_lines<CO_BLOCK, false, at_g>(to + BYTES_A, dz + (size_t)i * batch * (H * W) * SO + co0, SO, tile, true);
        }
        copy_commit();
    };
    for (int s = 0; s < STAGES - 1; s++) fetch(blockIdx.x + s * gridDim.x, s);
    int stage = 0;
    for (int work = blockIdx.x; work < all; work += gridDim.x) {
        copy_wait<STAGES - 2>();
        publish_shared();
        __syncthreads();  // also: the products of the tile before have ended, so that its place is free
        const u32 here = uniform((base + stage * STAGE) / 16), taps = here + uniform(group) * (PAIRED ? 1 : LINE);
        wgmma_fence(sums);
#pragma unroll
        for (int r = 0; r < IMAGES * ROWS_OF_RUNS * RUNS; r += 2)
#pragma unroll
            for (int kx = 0; kx < PRODUCTS; kx++)
                wgmma<COLUMNS, false>(sums[kx], matrix_at(here + BYTES_A / 16 + run_g(r), run_g(r + 1) - run_g(r), W + 1),
                                      matrix_at(taps + run_a(r) + kx, run_a(r + 1) - run_a(r), W + 3));
        wgmma_commit();
        fetch(work + (STAGES - 1) * gridDim.x, (stage + STAGES - 1) % STAGES);
        wgmma_wait(sums);
        stage = (stage + 1) % STAGES;
    }
    copy_wait<0>();
    parts += (size_t)blockIdx.x * (KW * KW * CA * SO), parts_x += (size_t)blockIdx.x * (KW * KW * SI * SO);
    const int first = warp % 4 * 16, below = first / CO_BLOCK;  // of these rows; are they dz of the row below?
#pragma unroll
    for (int kx = 0; kx < PRODUCTS; kx++)
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int second = n * 8 / ALL, c = n * 8 % ALL + lane % 4 * 2 + e % 2;
                const int tap = PAIRED ? (1 + second - below) * KW + group : group * KW + kx;
                const int co = co0 + first % CO_BLOCK + lane / 4 + e / 2 * 8;
                float* of_h = parts + (tap * CA + ci0 + c) * SO;
                float* of_x = parts_x + (tap * SI + x0 + c - CI_BLOCK) * SO;
                if (!second || !below) (n * 8 % ALL < CI_BLOCK ? of_h : of_x)[co] = sums[kx][n * 4 + e];
            }
}
