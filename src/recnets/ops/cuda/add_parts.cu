// Sums of parts in a fixed order: the gradients of two kernels in one launch. Parts are (count, taps, channels, outputs),
// the gradient has the strides of its kernel. A block has 32 entries and 8 shares of the parts.

struct Job {
    const float* parts;
    float* out;
    long stride_co, stride_ci, stride_tap;
    int count, taps, channels, outputs;
};

extern "C" __global__ void add_parts(Job first, Job second) {
    const Job job = blockIdx.y ? second : first;
    const int size = job.taps * job.channels * job.outputs, e = blockIdx.x * 32 + threadIdx.x % 32, share = threadIdx.x / 32;
    __shared__ float sums[8][32];
    float v = 0.f;
    if (e < size)
#pragma unroll 8
        for (int p = share; p < job.count; p += 8) v += job.parts[(long)p * size + e];
    sums[share][threadIdx.x % 32] = v;
    __syncthreads();
    if (share || e >= size) return;
#pragma unroll
    for (int k = 1; k < 8; k++) v += sums[k][threadIdx.x];
    const int co = e % job.outputs, ci = e / job.outputs % job.channels, tap = e / (job.outputs * job.channels);
    job.out[co * job.stride_co + ci * job.stride_ci + tap * job.stride_tap] = v;
}
