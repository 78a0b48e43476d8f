// A kernel (CO, CI, K, K) in one of two orders. TRANSPOSED is the gradient's convolution: channels and outputs change
// places and taps are mirrored.
//
// As the fragments that the tensor cores take, in the order in which a warp reads them:
// [block of NB outputs][16 of (tap, channel)][16 outputs][lane][8 values].
//
// With `columns`, as factors in shared memory (planes.cuh): [block][16 of (8 channels, tap, channel)][8 of these]
// [columns][8 values], of which this kernel has NB from column `first` on. The blocks' outputs are `apart`: NB, or 0 where
// all have the same.

struct Job {
    const float* w;
    u16* out;
    long stride_co, stride_ci, stride_tap;
    int total, channels, outputs, taps, nb, transposed, columns, first, apart;
};

__device__ __forceinline__ u16 packed(const Job& job, int tap, int c, int n) {
    if (tap >= job.taps || c >= job.channels || n >= job.outputs) return 0;
    return pack1(job.transposed ? job.w[c * job.stride_co + n * job.stride_ci + (job.taps - 1 - tap) * job.stride_tap]
                                : job.w[n * job.stride_co + c * job.stride_ci + tap * job.stride_tap]);
}

__device__ __forceinline__ void pack_kernel(const Job& job, int e) {
    if (e >= job.total) return;
    const int padded = (job.channels + 7) / 8 * 8;
    if (job.columns) {
        const int pieces = padded / 8 * job.taps, steps = (pieces + 1) / 2;
        int rest = e / 8;
        const int n = rest % job.nb;
        rest /= job.nb;
        const int half = rest % 2, step = rest / 2 % steps, block = rest / 2 / steps;
        // The last of an odd number comes second, after zeros.
        const bool odd = 2 * step + 1 == pieces;
        const int piece = 2 * step + (odd ? 0 : half), tap = odd && !half ? job.taps : piece % job.taps;
        const int to = ((block * steps + step) * 2 + half) * job.columns + job.first + n;
        job.out[to * 8 + e % 8] = packed(job, tap, piece / job.taps * 8 + e % 8, block * job.apart + n);
        return;
    }
    const int steps = (job.taps * padded + 15) / 16;
    const int half = e & 1, r = e >> 1 & 3, lane = e >> 3 & 31;
    int rest = e >> 8;
    const int pair = rest % (job.nb / 16);
    rest /= job.nb / 16;
    const int k = rest % steps * 16 + (r & 1) * 8 + lane % 4 * 2 + half;
    const int n = rest / steps * job.nb + pair * 16 + (r >> 1) * 8 + lane / 4;
    job.out[e] = packed(job, k / padded, k % padded, n);
}
