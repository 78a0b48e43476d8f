// Two kernels of a layer in the order of pack.cuh, in one launch.

extern "C" __global__ void pack(Job first, Job second) {
    const Job job = blockIdx.y ? second : first;
    pack_kernel(job, blockIdx.x * blockDim.x + threadIdx.x);
}
