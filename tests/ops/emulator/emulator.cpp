// Runs a kernel's threads as fibers: each until it waits, in an order that the seed decides. See emulator.h.

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/time.h>

#include <string>

#include "device.h"

uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

Launch shape;
Thread* self;
bool moved;

namespace {

constexpr size_t STACK = 256 * 1024;
constexpr int SECONDS = 100;  // of the CPU, for a launch

const char* name;
void (*body)(void*);
void* arguments;
std::vector<Block> blocks;  // those that are there at once
std::vector<Warp> warps;
std::vector<Thread> threads;
unsigned long long state;  // of `chance`
std::string message;
jmp_buf scheduler, top;

void resume(Thread& thread) {
    self = &thread;
    threadIdx = {thread.index, 0, 0};
    blockIdx = thread.block->index;
    if (_setjmp(scheduler) == 0) {
        if (thread.started) _longjmp(thread.place, 1);
        thread.started = true;
        setcontext(&thread.start);
    }
}
void yield() {
    if (_setjmp(self->place) == 0) _longjmp(scheduler, 1);
}

// A fiber runs thread after thread: the same of every block.
void fiber() {
    for (;;) {
        body(arguments);
        self->gone = true;
        if (self->warp->arrived) fail("ends while its warp waits at %s", self->warp->what);
        self->warp->leave();
        self->block->leave();
        self->block->cluster->all.leave();
        yield();
    }
}

void start(unsigned first) {
    for (unsigned b = 0; b < blocks.size(); b++) {
        Block& block = blocks[b];
        const unsigned number = first + b, rank = b % shape.cluster;
        block = {};
        block.index = {number % gridDim.x, number / gridDim.x % gridDim.y, number / gridDim.x / gridDim.y};
        block.rank = rank;
        block.cluster = &block - rank;
        block.live = shape.threads;
        block.all.live = shape.threads * shape.cluster;
        block.memory.assign(shape.shared + 2 * GUARD + 128, POISON);
        block.hidden.assign(shape.shared / 16 + 1, 0);
    }
    for (unsigned w = 0; w < warps.size(); w++) {
        warps[w] = {};
        warps[w].live = 32;
        warps[w].lanes = &threads[w * 32];
    }
    for (unsigned t = 0; t < threads.size(); t++) {
        Thread& thread = threads[t];
        thread.index = t % shape.threads;
        thread.gone = false;
        thread.block = &blocks[t / shape.threads];
        thread.warp = &warps[t / 32];
        thread.ready = nullptr;
        thread.copies.clear();
        thread.landed.clear();
        thread.groups = 0;
    }
}

// Every lane of a warp that can go on, once.
bool step(Warp& warp) {
    bool any = false;
    const unsigned mask = chance(32);
    for (unsigned k = 0; k < 32; k++) {
        Thread& thread = warp.lanes[k ^ mask];
        self = &thread;
        if (thread.gone || (thread.ready && !thread.ready(thread.context))) continue;
        thread.ready = nullptr;
        resume(thread);
        any = true;
    }
    return any;
}

std::string waiting() {
    std::map<std::string, std::pair<int, const Thread*>> places;
    for (const Thread& thread : threads)
        if (!thread.gone) places[thread.what].first++, places[thread.what].second = &thread;
    std::string text;
    for (const auto& [what, found] : places)
        text += "; " + std::to_string(found.first) + " threads wait at " + what + ", one of them " +
                std::to_string(found.second->index) + " of block " + std::to_string(found.second->block->index.x);
    return text;
}

void run_all() {
    std::vector<Warp*> order;
    for (Warp& warp : warps) order.push_back(&warp);
    for (bool left = true; left;) {
        for (size_t k = order.size(); k > 1; k--) std::swap(order[k - 1], order[chance(k)]);
        moved = left = false;
        // Either warps keep pace, or each goes as far ahead of the others as it can.
        const bool ahead = chance(2);
        for (Warp* warp : order) {
            while (warp->live && step(*warp)) {
                moved = true;
                if (!ahead || chance(64) == 0) break;
            }
            left |= warp->live > 0;
        }
        self = nullptr;
        if (left && !moved) fail("deadlock%s", waiting().c_str());
    }
    check_warpgroups(warps);
    for (Block& block : blocks) {
        if (!block.stores.empty()) fail("block %u ended before all stores into it had arrived", block.index.x);
        const unsigned char *begin = block.shared(), *end = begin + shape.shared;
        for (const unsigned char& byte : block.memory)
            if ((&byte < begin || &byte >= end) && byte != POISON)
                fail("block %u wrote to byte %ld of shared memory, which has %u", block.index.x, (long)(&byte - begin),
                     shape.shared);
    }
}

void caught(int signal, siginfo_t* info, void*) {
    if (signal == SIGVTALRM) fail("no end after %d seconds", SECONDS);
    if (signal == SIGILL) fail("undefined behaviour: an index outside its array, a misaligned address or the like");
    fail("%s at %p", signal == SIGFPE ? "division by zero" : "no such memory", info->si_addr);
}
void limit(int seconds) {
    const itimerval timer = {{0, 0}, {seconds, 0}};
    setitimer(ITIMER_VIRTUAL, &timer, nullptr);
}

void run_blocks(char* stacks, unsigned together) {
    const unsigned all = gridDim.x * gridDim.y * gridDim.z;
    if (stacks == MAP_FAILED) fail("no memory for %u blocks at once", together);
    if (shape.threads % 32 || gridDim.x % shape.cluster) fail("warps or clusters are not full");
    blocks.assign(together, {});
    warps.assign(together * shape.threads / 32, {});
    threads.assign(together * shape.threads, {});
    for (size_t t = 0; t < threads.size(); t++) {
        ucontext_t& start = threads[t].start;
        getcontext(&start);
        start.uc_stack.ss_sp = stacks + t * STACK;
        start.uc_stack.ss_size = STACK;
        makecontext(&start, fiber, 0);
    }
    for (unsigned first = 0; first < all; first += together) {
        start(first);
        run_all();
    }
}

}  // namespace

const char* run(const char* kernel, const Launch& launch, void (*function)(void*), void* context) {
    name = kernel, shape = launch, body = function, arguments = context;
    blockDim = {launch.threads, 1, 1};
    gridDim = {launch.grid[0], launch.grid[1], launch.grid[2]};
    state = launch.seed * 2654435761ull + 88172645463325252ull;
    message.clear();
    self = nullptr;
    constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGVTALRM}, COUNT = 5;
    struct sigaction before[COUNT], during = {};
    during.sa_sigaction = caught;
    during.sa_flags = SA_SIGINFO | SA_NODEFER;  // it does not return
    for (int k = 0; k < COUNT; k++) sigaction(SIGNALS[k], &during, &before[k]);
    limit(SECONDS);
    const unsigned together = launch.cooperative ? gridDim.x * gridDim.y * gridDim.z : launch.cluster;
    const size_t bytes = together * launch.threads * STACK;
    constexpr int LAZY = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char* const stacks = (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, LAZY, -1, 0);
    if (_setjmp(top) == 0) run_blocks(stacks, together);
    munmap(stacks, bytes);
    limit(0);
    for (int k = 0; k < COUNT; k++) sigaction(SIGNALS[k], &before[k], nullptr);
    return message.empty() ? nullptr : message.c_str();
}

void fail(const char* format, ...) {
    char text[1024];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    message = name;
    if (self) {
        const uint3 at = self->block->index;
        message += ", block (" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) +
                   "), thread " + std::to_string(self->index);
    }
    message += std::string(": ") + text;
    _longjmp(top, 1);
}

unsigned chance(unsigned below) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (unsigned)(state >> 32) % below;
}

void wait(bool (*ready)(void*), void* context, const char* what) {
    if (ready(context)) return;
    self->ready = ready, self->context = context, self->what = what;
    yield();
}
void pause() {
    if (chance(32)) return;
    self->what = "nothing";
    yield();
}
void arrive_and_wait(Barrier& barrier, const char* what) {
    const unsigned mine = barrier.arrive();
    wait_until([&] { return barrier.generation != mine; }, what);
}

void together(const char* what, const void* in, void* out, void (*all)(const void* const*, void* const*)) {
    Warp& warp = *self->warp;
    const unsigned lane = self->index % 32;
    if (warp.live != 32) fail("%s, where lanes of the warp have ended", what);
    if (warp.arrived && strcmp(warp.what, what)) fail("%s, where lanes of the warp wait at %s", what, warp.what);
    warp.what = what, warp.in[lane] = in, warp.out[lane] = out;
    if (warp.arrived == 31) all(warp.in, warp.out);
    arrive_and_wait(warp, what);
}

}  // namespace emulator

void __syncthreads() { emulator::arrive_and_wait(*emulator::self->block, "__syncthreads"); }
