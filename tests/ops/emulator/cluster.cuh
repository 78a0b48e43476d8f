// Twin of cluster.cuh.

__device__ __forceinline__ u32 cluster_rank() { return emulator::cluster_rank(); }
__device__ __forceinline__ void cluster_arrive() { emulator::cluster_arrive(); }
__device__ __forceinline__ void cluster_wait() { emulator::cluster_wait(); }
__device__ __forceinline__ void cluster_arrive_relaxed() { emulator::cluster_arrive(); }

__device__ __forceinline__ void barrier_init(u32 at, int count) { emulator::barrier_init(at, count); }
__device__ __forceinline__ void barrier_publish() {}
__device__ __forceinline__ void barrier_arrive(u32 at) { emulator::barrier_arrive(at, 0); }
__device__ __forceinline__ void barrier_arrive_expect(u32 at, int bytes) { emulator::barrier_arrive(at, bytes); }
__device__ __forceinline__ void barrier_wait(u32 at, int parity) { emulator::barrier_wait(at, parity); }

__device__ __forceinline__ void store_cluster(u32 at, u32 barrier, int rank, uint4 v) {
    emulator::store_cluster(at, barrier, rank, v);
}
