// WIDE: a 3 x 3 convolution of a shared tile in planes (common.cuh) by products of warpgroups (wgmma.cuh).
//
// The 64 rows of such a product are a patch of 8 x 8 pixels: 8 neighbours follow each other in a plane, and the next row is
// COLUMNS slots further on. Its 16 k are two taps of 8 channels, or the same of two planes: k runs over (plane, tap,
// channel), so that the second tap always lies behind the first. Where their number is odd, the last product takes the
// tap before once more, with zeros. A warpgroup has all the block's channels of MT patches.

static_assert(WIDE && WN == 1 && WM % 4 == 0, "whole warpgroups");
static_assert(W % 8 == 0 && ROWS % 8 == 0 && WM * MT * 16 == PIXELS, "whole patches");

// A block's tiles, forwards in even steps and backwards in odd ones: what a step wrote last is still in L2 when the next
// one begins with it.
struct Walk {
    int first, by, count;
    __device__ __forceinline__ Walk(int i, int tiles) {
        const int own = blockIdx.x / SPLITS, stride = gridDim.x / SPLITS;
        count = (tiles - own + stride - 1) / stride;
        first = i & 1 ? own + (count - 1) * stride : own;
        by = i & 1 ? -stride : stride;
    }
};

// Products of 16 k of a kernel of so many channels.
__host__ __device__ constexpr int products_of(int channels) { return (round_up(channels, 8) / 8 * 9 + 1) / 2; }

// sums += the convolution, before wgmma_wait. corners: the slot of tap (0, 0) of the warpgroup's patches; weights: those of
// all products in the order of pack.cuh, for 8 * T outputs.
template <int CHANNELS, int T>
__device__ __forceinline__ void convolve_planes(float (&sums)[MT][T][4], u32 planes, const int (&corners)[MT], u32 weights) {
    constexpr int TAPS = round_up(CHANNELS, 8) / 8 * 9, PLANE = plane_of(CHANNELS, slots_of(1)) / 16, COLUMNS = W + 2;
    // The same in a warp, which the compiler has to be told: factors are given in registers of the warp.
    const u32 a = uniform(afresh(planes >> 4)), b = uniform(afresh(weights >> 4));
#pragma unroll
    for (int j = 0; j < products_of(CHANNELS); j++) {
        const int first = 2 * j + 1 < TAPS ? 2 * j : TAPS - 2, second = first + 1;
        const int o0 = first / 9 * PLANE + first % 9 / 3 * COLUMNS + first % 3;
        const int o1 = second / 9 * PLANE + second % 9 / 3 * COLUMNS + second % 3;
#pragma unroll
        for (int m = 0; m < MT; m++)
            wgmma<8 * T, true>(&sums[m][0][0], matrix_at(a + corners[m] + o0, o1 - o0, COLUMNS), matrix_at(b + j * T * 16, T * 8, 8));
    }
}
