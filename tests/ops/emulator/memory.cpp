// Shared memory, copies and stores that arrive later, and what the blocks of a cluster wait for.

#include "device.h"

namespace emulator {

unsigned char* dynamic_shared() { return self->block->shared(); }
unsigned char* static_shared(int variable, int bytes) {
    std::vector<unsigned char>& memory = self->block->variables[variable];
    if (memory.empty()) memory.assign(bytes, POISON);
    return memory.data();
}
unsigned shared_address(const void* p) {
    const long at = (const unsigned char*)p - self->block->shared();
    if (at < 0 || at > (long)shape.shared) fail("%p is not in shared memory", p);
    return SHARED_BASE + (unsigned)at;
}
unsigned char* of_block(Block& block, unsigned address, int bytes) {
    const long at = (long)address - SHARED_BASE;
    if (at < 0 || at + bytes > (long)shape.shared)
        fail("%d bytes at %ld of shared memory, which has %u", bytes, at, shape.shared);
    if (address % bytes) fail("%d bytes at %ld of shared memory, which is not aligned", bytes, at);
    return block.shared() + at;
}
unsigned char* shared(unsigned address, int bytes) {
    pause();
    return of_block(*self->block, address, bytes);
}
const void* global(const void* p, int bytes) {
    pause();
    if ((size_t)p % bytes) fail("%d bytes at %p, which is not aligned", bytes, p);
    return p;
}

void land(const Copy& copy) {
    unsigned char* to = shared(copy.to, copy.bytes);
    if (copy.ok) memcpy(to, copy.from, copy.bytes);
    else memset(to, 0, copy.bytes);
    hide(copy.to);
}
void copy_async(unsigned to, const void* from, int bytes, bool ok) {
    if (ok) global(from, bytes);
    Copy copy = {to, self->groups, from, bytes, ok, chance(2) != 0};
    shared(to, bytes);
    if (copy.there) land(copy);
    self->copies.push_back(copy);
}
void copy_commit() { self->groups++; }
void copy_wait(int left) {
    std::vector<Copy> rest;
    for (const Copy& copy : self->copies)
        if (copy.group + left >= self->groups) {
            rest.push_back(copy);
        } else {
            if (!copy.there) land(copy);
            self->landed.push_back(copy.to);
        }
    self->copies.swap(rest);
}

// ---- clusters -----------------------------------------------------------------------------------------------------

// In shared memory, as on the device.
struct Transactions {
    unsigned short count, pending;  // arrivals
    int bytes : 31;                 // expected, less those that are there
    unsigned phase : 1;

    void check() {
        if (pending || bytes) return;
        pending = count;
        phase ^= 1;
    }
};
static_assert(sizeof(Transactions) == 8);

void deliver(Block& block, const Store& store) {
    if (!block.live) fail("a store into a block that has ended");
    *(uint4*)of_block(block, store.at, 16) = store.v;
    Transactions& barrier = *(Transactions*)of_block(block, store.barrier, 8);
    barrier.bytes -= 16;
    barrier.check();
}
unsigned cluster_rank() { return self->block->rank; }
void cluster_arrive() { self->cluster_generation = self->block->cluster->all.arrive(); }
void cluster_wait() {
    const Barrier& all = self->block->cluster->all;
    wait_until([&, mine = self->cluster_generation] { return all.generation != mine; }, "cluster_wait");
}
void barrier_init(unsigned at, int count) {
    *(Transactions*)shared(at, 8) = {(unsigned short)count, (unsigned short)count, 0, 0};
}
void barrier_arrive(unsigned at, int bytes) {
    Transactions& barrier = *(Transactions*)shared(at, 8);
    barrier.bytes += bytes;
    barrier.pending--;
    barrier.check();
}
void barrier_wait(unsigned at, int parity) {
    const Transactions& barrier = *(Transactions*)shared(at, 8);
    Block& block = *self->block;
    wait_until(
        [&] {
            if ((int)barrier.phase != parity) return true;
            std::vector<Store>& stores = block.stores;  // one of them arrives
            if (stores.empty()) return false;
            std::swap(stores[chance(stores.size())], stores.back());
            const Store store = stores.back();
            stores.pop_back();
            deliver(block, store);
            moved = true;
            return (int)barrier.phase != parity;
        },
        "barrier_wait");
}
void store_cluster(unsigned at, unsigned barrier, int rank, uint4 v) {
    if (rank < 0 || rank >= (int)shape.cluster) fail("a store into block %d of a cluster of %u", rank, shape.cluster);
    Block& block = self->block->cluster[rank];
    const Store store = {at, barrier, v};
    if (chance(2)) deliver(block, store);
    else block.stores.push_back(store);
}

}  // namespace emulator
