// The threads of a block: fibers on one OS thread.
//
// A fiber has a stack of its own and runs the kernel for one CUDA thread after another as long as none of them waits: a kernel
// without barriers is a plain loop on one fiber. When a thread waits, at __syncthreads or for the lanes of its warp, its fiber
// stops there and another continues: with a thread that is ready, otherwise with one that has not begun. If there is none and
// threads still wait, they wait for ever: some have left the kernel, or wait elsewhere. That is undefined on a GPU and is an error
// here.
//
// EMULATOR_SEED=n shuffles blocks, the order in which threads begin, and the choice among ready threads, so that code which is
// right in one order only gives other numbers. EMULATOR_THREADS=n runs blocks on n OS threads.
//
// The thread sanitizer does not know about switches: with a clock for every fiber, a step of training would take minutes. It finds
// races between streams and (EMULATOR_THREADS) between blocks, not between the threads of one block, which are one thread to it. In
// the call stacks of its reports the upper end is true, the rest may be another fiber's.
#include "emulator.h"
#include <algorithm>
#include <memory>
#include <sys/mman.h>
#include <thread>
#include <vector>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#define EMULATOR_UCONTEXT
#include <ucontext.h>
#endif

__thread uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
namespace {

// ------------------------------------------------------------------------------------------------ the switch

struct Context {
#ifdef EMULATOR_UCONTEXT
    ucontext_t registers;
#else
    void *stack_pointer;
#endif
    char *stack = nullptr; // lowest address; nullptr: the OS thread's own
    size_t bytes = 0;
    void *sanitizer = nullptr;
};

#ifndef EMULATOR_UCONTEXT
extern "C" void emulator_switch(void **save, void *load);
asm(R"(.text
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch, .-emulator_switch
)");
#endif

void context_switch(Context &from, Context &to) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&from.sanitizer, to.stack, to.bytes);
#endif
#ifdef EMULATOR_UCONTEXT
    swapcontext(&from.registers, &to.registers);
#else
    emulator_switch(&from.stack_pointer, to.stack_pointer);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(from.sanitizer, nullptr, nullptr);
#endif
}

enum { STACK_BYTES = 256 << 10, PAGE = 4096 };

// index: stacks begin at different lines of a page, so that they do not all compete for the same lines of the cache.
void context_create(Context &context, void (*entry)(), int index) {
    context.bytes = STACK_BYTES;
    void *memory = mmap(nullptr, STACK_BYTES + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fail("no memory for the stack of a fiber");
    mprotect(memory, PAGE, PROT_NONE);
    context.stack = (char *)memory + PAGE;
    size_t used = (size_t)(index * 7 % 64) * 64;
#ifdef EMULATOR_UCONTEXT
    getcontext(&context.registers);
    context.registers.uc_stack.ss_sp = context.stack;
    context.registers.uc_stack.ss_size = context.bytes - used;
    makecontext(&context.registers, entry, 0);
#else
    void **top = (void **)(context.stack + context.bytes - used) - 2; // as if entry had been called
    *top = (void *)entry;
    context.stack_pointer = top - 6;
    std::fill(top - 6, top, nullptr);
#endif
}

// ------------------------------------------------------------------------------------------------- the block

enum State : uint8_t { UNBORN, RUNNING, READY, AT_BARRIER, AT_MEETING, EXITED };

struct Fiber {
    Context context;
    int thread = -1; // the CUDA thread it runs
};

struct CudaThread {
    State state = UNBORN;
    Fiber *fiber = nullptr;
    uint3 index = {};
    emulator_place place = {};
};

struct Meeting { // of the lanes of one warp named by a mask
    unsigned mask = 0, present = 0;
    bool odd = false; // slots alternate: a lane that continues must not overwrite values that others still read
    uint64_t slot[2][32];
    emulator_place place = {};
};

// What one OS thread needs to run blocks.
struct Machine {
    Context main;
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Fiber *> idle;
    Fiber *current = nullptr;

    const std::function<void()> *kernel = nullptr;
    std::vector<CudaThread> threads;
    std::vector<int> order, ready; // order in which threads begin; threads that may continue
    size_t ready_from = 0;
    int count = 0, begun = 0, exited = 0, at_barrier = 0;
    emulator_place barrier = {};
    std::vector<std::vector<Meeting>> warps;
    Random random{1};
    bool shuffled = false;

    void run_block(uint3 index);
    void body();
    void wait(State state, emulator_place place);
    void leave();
    void resume(Fiber *fiber);
    void release(int thread) {
        threads[(size_t)thread].state = READY;
        ready.push_back(thread);
    }
    [[noreturn]] void stuck();
};

__thread Machine *machine; // of this OS thread, while it runs a grid

void fiber_entry() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
    machine->body();
}

void Machine::body() {
    for (;;) {
        Fiber *self = current;
        while (begun < count) {
            int t = order[(size_t)begun++];
            CudaThread &thread = threads[(size_t)t];
            self->thread = t;
            thread.fiber = self;
            thread.state = RUNNING;
            threadIdx = thread.index;
            (*kernel)();
            thread.state = EXITED;
            exited++;
        }
        self->thread = -1;
        idle.push_back(self);
        leave();
    }
}

void Machine::resume(Fiber *fiber) {
    Fiber *previous = current;
    if (fiber == previous) return;
    current = fiber;
    context_switch(previous ? previous->context : main, fiber ? fiber->context : main);
}

// The current fiber cannot continue: switch to one that can.
void Machine::leave() {
    if (ready_from < ready.size()) {
        if (shuffled) std::swap(ready[ready_from], ready[ready_from + (size_t)random.below((int64_t)(ready.size() - ready_from))]);
        CudaThread &thread = threads[(size_t)ready[ready_from++]];
        if (ready_from == ready.size()) ready.clear(), ready_from = 0;
        thread.state = RUNNING;
        threadIdx = thread.index;
        resume(thread.fiber);
    } else if (begun < count) {
        if (idle.empty()) {
            fibers.push_back(std::make_unique<Fiber>());
            context_create(fibers.back()->context, fiber_entry, (int)fibers.size());
            idle.push_back(fibers.back().get());
        }
        Fiber *next = idle.back();
        idle.pop_back();
        resume(next);
    } else if (exited == count)
        resume(nullptr);
    else
        stuck();
}

void Machine::wait(State state, emulator_place place) {
    int t = current->thread;
    threads[(size_t)t].state = state;
    threads[(size_t)t].place = place;
    leave(); // threadIdx is right again when it returns
}

void Machine::stuck() {
    fprintf(stderr, "emulator: threads of a block wait for each other for ever. Block (%u, %u, %u) of (%u, %u, %u):\n", blockIdx.x,
            blockIdx.y, blockIdx.z, gridDim.x, gridDim.y, gridDim.z);
    if (exited > 0) fprintf(stderr, "  %d of %d threads have left the kernel\n", exited, count);
    std::vector<bool> printed((size_t)count);
    for (size_t t = 0; t < threads.size(); t++) {
        const CudaThread &first = threads[t];
        if (first.state == EXITED || printed[t]) continue;
        int alike = 0;
        for (size_t u = t; u < threads.size(); u++)
            if (threads[u].state == first.state && threads[u].place.line == first.place.line) printed[u] = true, alike++;
        fprintf(stderr, "  %d wait at %s:%d in %s for %s, the first of them thread %zu\n", alike, first.place.file,
                first.place.line, first.place.function, first.state == AT_BARRIER ? "the block" : "their warp", t);
    }
    fail("a barrier that not all threads reach");
}

void Machine::run_block(uint3 index) {
    blockIdx = index;
    begun = exited = at_barrier = 0;
    for (CudaThread &thread : threads) thread.state = UNBORN, thread.fiber = nullptr;
    if (shuffled)
        for (int i = count - 1; i > 0; i--) std::swap(order[(size_t)i], order[(size_t)random.below(i + 1)]);
    leave();
}

bool same(emulator_place a, emulator_place b) {
    return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0);
}

} // namespace

// ---------------------------------------------------------------------------------------------------- the grid

// One worker of a grid: blocks first, first + stride, …
static void run_blocks(Machine &m, uint3 grid, uint3 block, const std::function<void()> &kernel, const std::vector<int64_t> &blocks,
                       int64_t first, int64_t stride) {
    machine = &m;
    gridDim = grid, blockDim = block;
    m.kernel = &kernel;
    m.count = (int)(block.x * block.y * block.z);
    m.threads.resize((size_t)m.count);
    m.order.resize((size_t)m.count);
    m.warps.assign((size_t)(m.count + 31) / 32, {});
    for (int t = 0; t < m.count; t++) {
        unsigned u = (unsigned)t;
        m.threads[u].index = {u % block.x, u / block.x % block.y, u / block.x / block.y};
        m.order[u] = t;
    }
#if defined(__SANITIZE_ADDRESS__)
    pthread_attr_t attributes;
    void *stack;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &stack, &m.main.bytes);
    pthread_attr_destroy(&attributes);
    m.main.stack = (char *)stack;
#endif
    for (int64_t i = first; i < (int64_t)blocks.size(); i += stride) {
        int64_t b = blocks[(size_t)i];
        m.run_block({(unsigned)(b % grid.x), (unsigned)(b / grid.x % grid.y), (unsigned)(b / grid.x / grid.y)});
    }
    machine = nullptr;
}

void run_grid(uint3 grid, uint3 block, const std::function<void()> &kernel) {
    static const int64_t seed = setting("EMULATOR_SEED", 0), workers_max = setting("EMULATOR_THREADS", 1);
    static thread_local std::vector<std::unique_ptr<Machine>> crew; // for all grids of a stream, so stacks are made once
    static thread_local Random random((uint64_t)seed);
    std::vector<int64_t> blocks((size_t)grid.x * grid.y * grid.z);
    for (size_t i = 0; i < blocks.size(); i++) blocks[i] = (int64_t)i;
    if (seed)
        for (size_t i = blocks.size() - 1; i > 0; i--) std::swap(blocks[i], blocks[(size_t)random.below((int64_t)i + 1)]);
    int64_t workers = std::max<int64_t>(1, std::min<int64_t>(workers_max, (int64_t)blocks.size()));
    while ((int64_t)crew.size() < workers) {
        crew.push_back(std::make_unique<Machine>());
        crew.back()->random = Random((uint64_t)seed + crew.size());
        crew.back()->shuffled = seed != 0;
    }
    std::vector<std::thread> others;
    for (int64_t w = 1; w < workers; w++)
        others.emplace_back([&, m = crew[(size_t)w].get(), w] { run_blocks(*m, grid, block, kernel, blocks, w, workers); });
    run_blocks(*crew[0], grid, block, kernel, blocks, 0, workers);
    for (std::thread &other : others) other.join();
}

} // namespace emulator

// ----------------------------------------------------------------------------------------------- barriers and warps

using emulator::machine;

static int current_thread() {
    if (!machine) emulator::fail("a barrier or shuffle outside of a kernel");
    return machine->current->thread;
}

int emulator_lane() {
    return current_thread() & 31;
}

void emulator_block_barrier(emulator_place place) {
    current_thread();
    emulator::Machine &m = *machine;
    if (m.at_barrier == 0) m.barrier = place;
    if (!emulator::same(m.barrier, place))
        emulator::fail("__syncthreads: some threads of a block are at %s:%d, others at %s:%d", m.barrier.file, m.barrier.line,
                       place.file, place.line);
    if (++m.at_barrier < m.count) return m.wait(emulator::AT_BARRIER, place);
    m.at_barrier = 0;
    for (int t = 0; t < m.count; t++)
        if (m.threads[(size_t)t].state == emulator::AT_BARRIER) m.release(t);
}

const uint64_t *emulator_warp_meeting(unsigned mask, uint64_t mine, emulator_place place) {
    int thread = current_thread(), lane = thread & 31, warp = thread / 32;
    emulator::Machine &m = *machine;
    if (!(mask >> lane & 1)) emulator::fail("%s:%d: lane %d is not in its own mask %08x", place.file, place.line, lane, mask);
    int lanes = std::min(32, m.count - warp * 32); // the last warp may be incomplete
    unsigned there = mask & (lanes == 32 ? 0xffffffffu : (1u << lanes) - 1);
    std::vector<emulator::Meeting> &meetings = m.warps[(size_t)warp];
    size_t i = 0;
    while (i < meetings.size() && meetings[i].mask != mask) i++;
    if (i == meetings.size()) {
        if (meetings.empty()) meetings.reserve(32); // so references stay valid
        if (i == 32) emulator::fail("%s:%d: more than 32 masks in one warp", place.file, place.line);
        meetings.emplace_back();
        meetings[i].mask = mask;
    }
    emulator::Meeting &meeting = meetings[i];
    if (meeting.present == 0) meeting.place = place;
    if (!emulator::same(meeting.place, place))
        emulator::fail("lanes of a warp meet at %s:%d and at %s:%d", meeting.place.file, meeting.place.line, place.file,
                       place.line);
    uint64_t *slot = meeting.slot[meeting.odd];
    slot[lane] = mine;
    meeting.present |= 1u << lane;
    if (meeting.present != there) {
        m.wait(emulator::AT_MEETING, place);
        return slot;
    }
    meeting.present = 0;
    meeting.odd = !meeting.odd;
    for (int l = 0; l < lanes; l++)
        if (l != lane && (there >> l & 1)) m.release(warp * 32 + l);
    return slot;
}

void emulator_bad_source(unsigned mask, int source, emulator_place place) {
    emulator::fail("%s:%d: a shuffle reads lane %d, which is not in mask %08x", place.file, place.line, source, mask);
}
