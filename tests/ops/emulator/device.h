// What emulator.cpp and memory.cpp know of the threads that are there.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <map>
#include <vector>

#include "emulator.h"

namespace emulator {

constexpr size_t GUARD = 4096;           // bytes before and after a block's shared memory
constexpr unsigned char POISON = 0xff;  // what it begins with: not a number in every precision

// Of a warp, a block or a cluster: threads that have ended are not waited for.
struct Barrier {
    unsigned live = 0, arrived = 0, generation = 0;

    unsigned arrive() {
        const unsigned mine = generation;
        arrived++;
        check();
        return mine;
    }
    void leave() {
        live--;
        check();
    }
    void check() {
        if (arrived && arrived == live) arrived = 0, generation++;
    }
};
struct Factors {  // of a warpgroup's product
    unsigned long long a, b;
    long n, by_k;
};
struct Product {  // of a warp, under way
    unsigned long long a, b;
    int n;
    bool fp16, by_k;
    unsigned sums;  // their number
};
struct WarpSums {
    int count;  // a thread
    float* at[32];
    std::vector<float> values[32];
};
struct Warp : Barrier {
    struct Thread* lanes;
    const char* what;  // they do together
    const void* in[32];
    void* out[32];
    std::vector<Product> products;
    std::vector<WarpSums> sums;
    size_t performed, committed, count;  // products: of those under way, and all
    std::vector<Factors> started;        // of the first of a warpgroup: its products
    bool fenced;
};
struct Store {  // by another block, under way
    unsigned at, barrier;
    uint4 v;
};
struct Block : Barrier {
    uint3 index;
    unsigned rank;
    Block* cluster;  // its first
    Barrier all;     // of the first: the cluster's
    std::vector<unsigned char> memory;
    std::map<int, std::vector<unsigned char>> variables;
    std::vector<Store> stores;
    std::vector<unsigned short> hidden;  // from products: of 16 bytes, 1 + the thread that left them there, or 0

    unsigned char* shared() { return (unsigned char*)(((size_t)memory.data() + GUARD + 127) / 128 * 128); }
};
struct Copy {
    unsigned to, group;
    const void* from;
    int bytes;
    bool ok, there;
};
struct Thread {
    unsigned index;
    bool started = false, gone;
    Block* block;
    Warp* warp;
    bool (*ready)(void*);  // what it waits for, if anything
    void* context;
    const char* what;
    std::vector<Copy> copies;
    std::vector<unsigned> landed;  // copies waited for, and stores, but not published
    unsigned groups, cluster_generation;
    jmp_buf place;
    ucontext_t start;
};

extern Launch shape;  // of the launch
extern Thread* self;  // the thread that runs, or is asked whether it can
extern bool moved;    // has anything happened since the scheduler's last look?

unsigned char* of_block(Block& block, unsigned address, int bytes);
void hide(unsigned address);  // from products, 16 bytes that this thread left there
void check_warpgroups(const std::vector<Warp>& warps);

}  // namespace emulator
