// A kernel (CO, CI, K, K) as the fragments that the tensor cores take, in the order in which a warp reads them:
// [block of NB outputs][16 of (tap, channel)][16 outputs][lane][8 values]. TRANSPOSED is the gradient's convolution:
// channels and outputs change places and taps are mirrored.

struct Job {
    const float* w;
    u16* out;
    long stride_co, stride_ci, stride_tap;
    int total, channels, outputs, taps, nb, transposed;
};

__device__ __forceinline__ void pack_kernel(const Job& job, int e) {
    if (e >= job.total) return;
    const int padded = (job.channels + 7) / 8 * 8, steps = (job.taps * padded + 15) / 16;
    const int half = e & 1, r = e >> 1 & 3, lane = e >> 3 & 31;
    int rest = e >> 8;
    const int pair = rest % (job.nb / 16);
    rest /= job.nb / 16;
    const int k = rest % steps * 16 + (r & 1) * 8 + lane % 4 * 2 + half;
    const int n = rest / steps * job.nb + pair * 16 + (r >> 1) * 8 + lane / 4;
    const int tap = k / padded, c = k % padded;
    float v = 0.f;
    if (tap < job.taps && c < job.channels && n < job.outputs)
        v = job.transposed ? job.w[c * job.stride_co + n * job.stride_ci + (job.taps - 1 - tap) * job.stride_tap]
                           : job.w[n * job.stride_co + c * job.stride_ci + tap * job.stride_tap];
    job.out[e] = pack1(v);
}
