// SPDX-License-Identifier: Apache-2.0
// The fibers behind tests/cuda_emulator.h.
#include "tests/cuda_emulator.h"

#include <memory>
#include <sys/mman.h>
#include <vector>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

thread_local ft_emulated_thread *ft_emulated_self;
bool ft_emulated_reversed;

namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr size_t STACK_BYTES = 512 * 1024;
#else
constexpr size_t STACK_BYTES = 128 * 1024;
#endif

// Saves the callee-saved registers and swaps stacks (System V AMD64).
extern "C" void ft_emulated_switch(void **save_sp, void *load_sp);
asm(R"(
.text
.globl ft_emulated_switch
.type ft_emulated_switch,@function
ft_emulated_switch:
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
.size ft_emulated_switch,.-ft_emulated_switch
)");

enum class state { ready, barrier, warp, done };

struct fiber {
    ft_emulated_thread self;
    state now;
    void *sp;
    char *stack;
    unsigned wait_mask, parity;
    void *fake_stack; // AddressSanitizer's
};

struct warp {
    unsigned arrived; // lanes at the current operation
    alignas(16) unsigned char values[2][32][FT_EMULATED_EXCHANGE_MAX];
};

struct machine {
    std::vector<fiber> fibers;
    std::vector<warp> warps;
    std::vector<char *> stacks;
    std::vector<unsigned char> shared;
    const std::function<void()> *body = nullptr;
    void *scheduler_sp = nullptr;
    fiber *current = nullptr;
    unsigned count = 0, at_barrier = 0, done = 0;
    const void *scheduler_stack = nullptr; // for AddressSanitizer
    size_t scheduler_bytes = 0;
    void *scheduler_fake_stack = nullptr;

    ~machine()
    {
        for (char *stack : stacks)
            munmap(stack, STACK_BYTES);
    }
};

thread_local std::unique_ptr<machine> the_machine;

// A fiber arrives on its stack: at its begin, or behind its switch to the scheduler.
void arrive(machine *m, void *fake_stack)
{
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake_stack, &m->scheduler_stack, &m->scheduler_bytes);
#endif
    (void)m;
    (void)fake_stack;
}

void yield()
{
    machine *m = the_machine.get();
    fiber *f = m->current;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(f->now == state::done ? nullptr : &f->fake_stack, m->scheduler_stack,
                                   m->scheduler_bytes);
#endif
    ft_emulated_switch(&f->sp, m->scheduler_sp);
    arrive(m, f->fake_stack);
}

void resume(machine *m, unsigned i)
{
    fiber &f = m->fibers[i];
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&m->scheduler_fake_stack, f.stack, STACK_BYTES);
#endif
    ft_emulated_switch(&m->scheduler_sp, f.sp);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(m->scheduler_fake_stack, nullptr, nullptr);
#endif
}

void fiber_main()
{
    machine *m = the_machine.get();
    arrive(m, nullptr);
    (*m->body)();
    m->current->now = state::done;
    yield();
    abort();
}

void prepare(machine *m, unsigned i)
{
    fiber &f = m->fibers[i];
    if (m->stacks.size() <= i) {
        void *p = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) {
            fprintf(stderr, "cuda emulator: no memory for stacks\n");
            abort();
        }
        m->stacks.push_back((char *)p);
    }
    f.stack = m->stacks[i];
    // After the six registers are popped, `ret` must enter fiber_main with the stack as after a call.
    void **top = (void **)(f.stack + STACK_BYTES) - 2;
    top[0] = (void *)fiber_main;
    top[1] = nullptr;
    f.sp = top - 6;
    memset(f.sp, 0, 6 * sizeof(void *));
    f.now = state::ready;
    f.parity = 0;
}

void release_barrier(machine *m)
{
    if (m->at_barrier == 0 || m->at_barrier + m->done < m->count)
        return;
    for (unsigned i = 0; i < m->count; i++)
        if (m->fibers[i].now == state::barrier)
            m->fibers[i].now = state::ready;
    m->at_barrier = 0;
}

void run_block(machine *m)
{
    m->at_barrier = m->done = 0;
    for (warp &w : m->warps)
        w.arrived = 0;
    while (m->done < m->count) {
        bool progress = false;
        for (unsigned i = 0; i < m->count; i++) {
            fiber &f = m->fibers[i];
            if (f.now != state::ready)
                continue;
            progress = true;
            m->current = &f;
            ft_emulated_self = &f.self;
            resume(m, i);
            if (f.now == state::done)
                m->done++;
            release_barrier(m);
        }
        if (!progress && m->done < m->count) {
            fprintf(stderr, "cuda emulator: block (%u, %u, %u) waits for itself: %u of %u threads ended, %u at a barrier\n",
                    m->fibers[0].self.block.x, m->fibers[0].self.block.y, m->fibers[0].self.block.z, m->done, m->count,
                    m->at_barrier);
            abort();
        }
    }
}

} // namespace

void *ft_emulated_shared_dynamic()
{
    return the_machine->shared.data();
}

void ft_emulated_barrier()
{
    machine *m = the_machine.get();
    m->current->now = state::barrier;
    m->at_barrier++;
    yield();
}

const unsigned char *ft_emulated_exchange(unsigned mask, const void *value, unsigned bytes)
{
    machine *m = the_machine.get();
    fiber *f = m->current;
    unsigned lane = f->self.index & 31;
    unsigned first = f->self.index & ~31u, lanes = m->count - first < 32 ? m->count - first : 32;
    unsigned all = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
    warp &w = m->warps[f->self.index >> 5];
    unsigned parity = f->parity++ & 1;
    mask &= all;
    if (!(mask >> lane & 1) || bytes > FT_EMULATED_EXCHANGE_MAX) {
        fprintf(stderr, "cuda emulator: lane %u in a warp operation of mask %08x\n", lane, mask);
        abort();
    }
    memcpy(w.values[parity][lane], value, bytes);
    w.arrived |= 1u << lane;
    if ((w.arrived & mask) == mask) { // the last one: everybody goes on
        w.arrived &= ~mask;
        for (unsigned i = 0; i < lanes; i++)
            if (mask >> i & 1 && i != lane) {
                m->fibers[first + i].now = state::ready;
            }
    } else {
        f->now = state::warp;
        yield();
    }
    return &w.values[parity][0][0];
}

void ft_emulated_run(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()> &body)
{
    if (!the_machine)
        the_machine.reset(new machine);
    machine *m = the_machine.get();
    m->count = block.x * block.y * block.z;
    if (m->count == 0 || m->count > 1024 || shared_bytes > 228 * 1024) {
        fprintf(stderr, "cuda emulator: block of %u threads, %zu bytes of shared memory\n", m->count, shared_bytes);
        abort();
    }
    m->fibers.resize(m->count > m->fibers.size() ? m->count : m->fibers.size());
    m->warps.resize((m->count + 31) / 32);
    m->shared.assign(shared_bytes + 64, 0xff); // NaN: nobody may read what nobody wrote
    m->body = &body;
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                for (unsigned i = 0; i < m->count; i++) {
                    prepare(m, i);
                    m->fibers[i].self = {{i % block.x, i / block.x % block.y, i / block.x / block.y},
                                         ft_emulated_reversed
                                             ? uint3_emulated{grid.x - 1 - x, grid.y - 1 - y, grid.z - 1 - z}
                                             : uint3_emulated{x, y, z},
                                         {block.x, block.y, block.z},
                                         {grid.x, grid.y, grid.z},
                                         i};
                }
                run_block(m);
            }
}

// Without a fake runtime a launch runs at once.
__attribute__((weak)) int ft_emulated_launch(void *, dim3 grid, dim3 block, size_t shared_bytes, std::function<void()> body)
{
    ft_emulated_run(grid, block, shared_bytes, body);
    return 0;
}
