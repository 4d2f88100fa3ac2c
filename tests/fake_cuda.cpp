// SPDX-License-Identifier: Apache-2.0
#include "tests/cuda_emulator.h"
#include "tests/fake_cuda.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <csignal>
#include <cstdio>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>

using operation = std::function<void()>;

struct fake_event {
    int device = 0;
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t recorded = 0, reached = 0;
};

struct fake_graph {
    int device = 0;
    std::vector<operation> nodes;
};

struct fake_graph_exec {
    int device = 0;
    std::vector<operation> nodes;
};

struct fake_stream {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<operation> queue;
    bool busy = false, stop = false;
    int device = 0;
    fake_graph *capture = nullptr;
    std::thread thread;
};

namespace {

// Device memory of one of several devices: `base` is what device pointers are, `alias` the same pages for copies.
struct pages {
    char *base = nullptr, *alias = nullptr;
    size_t bytes = 0;
};

struct device {
    std::atomic<cudaError_t> sticky{cudaSuccess};
    size_t used_bytes = 0;
    pages memory;
    bool peers[FAKE_GPUS_MAX] = {};
};

struct allocation {
    size_t bytes;
    int device;
};

struct world {
    std::mutex mutex;
    fake_cuda_options options;
    std::map<std::string, uint32_t> calls;
    std::string fail_name;
    uint32_t fail_nth = 0;
    cudaError_t fail_error = cudaSuccess;
    device devices[FAKE_GPUS_MAX];
    std::string stall_name;
    uint32_t stall_nth = 0;
    uint64_t stall_ns = 0;
    std::map<void *, allocation> memory;
    std::map<void *, size_t> pinned, registered;
    size_t pinned_bytes = 0, streams = 0, events = 0, graphs = 0;
    uint64_t random = 1;
};
world w;
thread_local cudaError_t last_error = cudaSuccess;
thread_local int current = 0;

cudaError_t note(cudaError_t error)
{
    if (error != cudaSuccess && error != cudaErrorNotReady)
        last_error = error;
    return error;
}

bool is_many()
{
    return w.options.device_count > 1;
}

std::string on_device(const std::string &name, int device)
{
    return name + "@" + std::to_string(device);
}

// Whether the call or operation was to fail, and its turn has come. Under the lock.
bool has_turn(const std::string &name, int device)
{
    return w.fail_nth && (w.fail_name == name || w.fail_name == on_device(name, device)) && --w.fail_nth == 0;
}

// Counts the call; the injected error when its turn has come, or the sticky one of the device.
cudaError_t enter(const char *name, int device)
{
    std::lock_guard<std::mutex> lock(w.mutex);
    w.calls[name]++;
    w.calls[on_device(name, device)]++;
    if (has_turn(name, device))
        return note(w.fail_error);
    return note(w.devices[device].sticky.load());
}

cudaError_t enter(const char *name)
{
    return enter(name, current);
}

int device_of(cudaStream_t stream)
{
    return stream ? stream->device : current;
}

// ---- memory of several devices ----

// The device that has all of [at, at + bytes); -1: none has any of it; -2: some of it only. Under the lock.
int owner(const void *at, size_t bytes)
{
    const char *begin = (const char *)at, *end = begin + bytes;
    auto it = w.memory.upper_bound((void *)(end - (bytes != 0)));
    if (it == w.memory.begin())
        return -1;
    --it;
    const char *first = (const char *)it->first, *last = first + it->second.bytes;
    if (last <= begin)
        return -1;
    return begin >= first && end <= last ? it->second.device : -2;
}

// What a copy writes or reads instead of a device's address.
char *alias_of(const void *at)
{
    for (device &d : w.devices)
        if (d.memory.base && (char *)at >= d.memory.base && (char *)at < d.memory.base + d.memory.bytes)
            return d.memory.alias + ((char *)at - d.memory.base);
    return (char *)at;
}

void say_fault(int, siginfo_t *info, void *)
{
    static const char text[] = "fake CUDA: memory of a device was touched by the host, or by another device's kernel\n";
    for (device &d : w.devices)
        if (d.memory.base && (char *)info->si_addr >= d.memory.base && (char *)info->si_addr < d.memory.base + d.memory.bytes &&
            write(2, text, sizeof text - 1) < 0)
            _exit(1);
    signal(SIGSEGV, SIG_DFL); // again, with nobody to catch it
}

// Under the lock.
bool make_pages(pages *p, size_t bytes)
{
    bytes = (bytes + 4095) / 4096 * 4096;
    if (p->base && p->bytes == bytes)
        return true;
    if (p->base) {
        munmap(p->base, p->bytes);
        munmap(p->alias, p->bytes);
    }
    p->base = p->alias = nullptr;
    int file = memfd_create("fake GPU", 0);
    if (file < 0 || ftruncate(file, (off_t)bytes))
        return false;
    void *base = mmap(nullptr, bytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    void *alias = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    if (base == MAP_FAILED || alias == MAP_FAILED)
        return false;
    *p = {(char *)base, (char *)alias, bytes};
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    struct sigaction action = {};
    action.sa_sigaction = say_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
#endif
    return true;
}

// The first gap that is large enough. Under the lock.
void *place(int device, size_t bytes)
{
    pages &p = w.devices[device].memory;
    if (!make_pages(&p, w.options.memory_of[device] ? w.options.memory_of[device] : w.options.memory_bytes))
        return nullptr;
    char *at = p.base;
    for (auto it = w.memory.lower_bound(p.base); it != w.memory.end() && (char *)it->first < p.base + p.bytes; ++it) {
        if ((char *)it->first >= at + bytes)
            break;
        at = (char *)it->first + (it->second.bytes + 255) / 256 * 256;
    }
    return at + bytes <= p.base + p.bytes ? at : nullptr;
}

// Kernels of one device at a time, which alone can reach its memory.
struct gate {
    std::mutex mutex;
    std::condition_variable changed;
    int running = 0, device = -1;
} gate;

void enter_gate(int device)
{
    std::unique_lock<std::mutex> lock(gate.mutex);
    gate.changed.wait(lock, [&] { return !gate.running || gate.device == device; });
    pages &p = w.devices[device].memory;
    if (!gate.running++ && p.base)
        mprotect(p.base, p.bytes, PROT_READ | PROT_WRITE);
    gate.device = device;
}

void leave_gate(int device)
{
    std::lock_guard<std::mutex> lock(gate.mutex);
    pages &p = w.devices[device].memory;
    if (--gate.running == 0 && p.base)
        mprotect(p.base, p.bytes, PROT_NONE);
    gate.changed.notify_all();
}

uint64_t random_below(uint64_t bound)
{
    std::lock_guard<std::mutex> lock(w.mutex);
    w.random ^= w.random << 13; // xorshift64
    w.random ^= w.random >> 7;
    w.random ^= w.random << 17;
    return bound ? w.random % bound : 0;
}

void nap(uint64_t ns_max)
{
    uint64_t ns = random_below(ns_max);
    struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    if (ns)
        nanosleep(&t, nullptr);
}

// Something of that kind begins on a stream: counts it, stalls, fails. False: it does not run.
bool begin_on_stream(const char *name, uint64_t delay_ns_max, int device)
{
    uint64_t stall = 0;
    {
        std::lock_guard<std::mutex> lock(w.mutex);
        w.calls[name]++;
        w.calls[on_device(name, device)]++;
        if (has_turn(name, device))
            w.devices[device].sticky = w.fail_error;
        if (has_turn(std::string("lost ") + name, device))
            return false;
        if (w.stall_nth && (w.stall_name == name || w.stall_name == on_device(name, device)) && --w.stall_nth == 0)
            stall = w.stall_ns;
        if (w.devices[device].sticky.load())
            return false; // nothing runs on a GPU that is lost
    }
    struct timespec t = {(time_t)(stall / 1000000000u), (long)(stall % 1000000000u)};
    if (stall == UINT64_MAX)
        for (;;)
            pause();
    if (stall)
        nanosleep(&t, nullptr);
    nap(delay_ns_max);
    return true;
}

void run_stream(fake_stream *s)
{
    std::unique_lock<std::mutex> lock(s->mutex);
    for (;;) {
        s->changed.wait(lock, [&] { return s->stop || !s->queue.empty(); });
        if (s->queue.empty())
            return;
        operation next = std::move(s->queue.front());
        s->queue.pop_front();
        s->busy = true;
        lock.unlock();
        next();
        lock.lock();
        s->busy = false;
        s->changed.notify_all();
    }
}

cudaError_t push(fake_stream *s, operation what)
{
    if (!s) { // the default stream: nothing here uses it asynchronously
        what();
        return cudaSuccess;
    }
    std::lock_guard<std::mutex> lock(s->mutex);
    if (s->capture) {
        s->capture->nodes.push_back(std::move(what));
        return cudaSuccess;
    }
    s->queue.push_back(std::move(what));
    s->changed.notify_all();
    return cudaSuccess;
}

void drain(fake_stream *s)
{
    std::unique_lock<std::mutex> lock(s->mutex);
    s->changed.wait(lock, [&] { return s->queue.empty() && !s->busy; });
}

extern "C" cudaError_t fake_write_value_32(cudaStream_t stream, uintptr_t address, uint32_t value, unsigned)
{
    cudaError_t error = enter("cuStreamWriteValue32");
    if (!error && device_of(stream) != current)
        error = cudaErrorInvalidResourceHandle;
    return error ? error : push(stream, [=] { ft_store_release_system((uint32_t *)address, value); });
}

} // namespace

// ---- what tests steer ----

void fake_cuda_init(const fake_cuda_options *options)
{
    std::lock_guard<std::mutex> lock(w.mutex);
    w.options = *options;
    w.calls.clear();
    w.fail_nth = w.stall_nth = 0;
    for (device &d : w.devices) {
        d.sticky = cudaSuccess;
        memset(d.peers, 0, sizeof d.peers);
    }
    current = 0;
    w.random = options->seed * 2 + 1;
    last_error = cudaSuccess;
}

void fake_cuda_fail(const char *name, uint32_t nth, int error)
{
    std::lock_guard<std::mutex> lock(w.mutex);
    w.fail_name = name ? name : "";
    w.fail_nth = name ? nth : 0;
    w.fail_error = (cudaError_t)error;
}

void fake_cuda_stall(const char *name, uint32_t nth, uint64_t ns)
{
    std::lock_guard<std::mutex> lock(w.mutex);
    w.stall_name = name ? name : "";
    w.stall_nth = name ? nth : 0;
    w.stall_ns = ns;
}

uint32_t fake_cuda_calls(const char *name)
{
    std::lock_guard<std::mutex> lock(w.mutex);
    return w.calls[name];
}

void fake_cuda_live(struct fake_cuda_live *live)
{
    std::lock_guard<std::mutex> lock(w.mutex);
    size_t device_bytes = 0;
    for (device &d : w.devices)
        device_bytes += d.used_bytes;
    *live = {device_bytes, w.pinned_bytes, w.registered.size(), w.streams, w.events, w.graphs};
}

// ---- kernels ----

int ft_emulated_launch(void *stream, dim3 grid, dim3 block, size_t shared_bytes, std::function<void()> body)
{
    cudaError_t error = enter("cudaLaunchKernel");
    int device = device_of((fake_stream *)stream);
    if (!error && device != current)
        error = note(cudaErrorInvalidResourceHandle);
    if (error)
        return error;
    return push((fake_stream *)stream, [=] {
        if (!begin_on_stream("kernel", w.options.kernel_delay_ns_max, device))
            return;
        if (is_many())
            enter_gate(device);
        ft_emulated_run(grid, block, shared_bytes, body);
        if (is_many())
            leave_gate(device);
    });
}

// ---- the runtime ----

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = w.options.driver_version;
    return enter("cudaDriverGetVersion");
}

cudaError_t cudaGetDeviceCount(int *count)
{
    cudaError_t error = enter("cudaGetDeviceCount");
    *count = w.options.device_count;
    if (error)
        return error;
    return w.options.device_count ? cudaSuccess : note(cudaErrorNoDevice);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device)
{
    cudaError_t error = enter("cudaGetDeviceProperties");
    if (error)
        return error;
    if (device >= w.options.device_count)
        return note(cudaErrorInvalidDevice);
    *properties = {};
    snprintf(properties->name, sizeof properties->name, "fake GPU");
    properties->totalGlobalMem = w.options.memory_of[device] ? w.options.memory_of[device] : w.options.memory_bytes;
    properties->major = w.options.major_of[device] ? w.options.major_of[device] : w.options.major;
    properties->minor = w.options.minor;
    properties->multiProcessorCount = 4;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device >= w.options.device_count)
        return note(cudaErrorInvalidDevice);
    cudaError_t error = enter("cudaSetDevice", device);
    if (!error)
        current = device;
    return error;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    cudaError_t error = enter("cudaDeviceCanAccessPeer");
    *can = device != peer && !w.options.no_peers;
    return error;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned)
{
    cudaError_t error = enter("cudaDeviceEnablePeerAccess");
    if (error)
        return error;
    std::lock_guard<std::mutex> lock(w.mutex);
    if (w.options.no_peers || peer == current)
        return note(cudaErrorPeerAccessUnsupported);
    bool *enabled = &w.devices[current].peers[peer];
    if (*enabled)
        return note(cudaErrorPeerAccessAlreadyEnabled);
    *enabled = true;
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    return enter("cudaDeviceSynchronize");
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    cudaError_t error = enter("cudaMemGetInfo");
    std::lock_guard<std::mutex> lock(w.mutex);
    *total_bytes = w.options.memory_of[current] ? w.options.memory_of[current] : w.options.memory_bytes;
    *free_bytes = *total_bytes - w.devices[current].used_bytes;
    return error;
}

const char *cudaGetErrorName(cudaError_t error)
{
    return error == cudaSuccess ? "cudaSuccess" : error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorFake";
}

const char *cudaGetErrorString(cudaError_t error)
{
    static thread_local char text[32];
    snprintf(text, sizeof text, "error %d", (int)error);
    return text;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    std::lock_guard<std::mutex> lock(w.mutex);
    cudaError_t sticky = w.devices[current].sticky.load();
    return sticky ? sticky : error;
}

cudaError_t cudaPeekAtLastError(void)
{
    std::lock_guard<std::mutex> lock(w.mutex);
    cudaError_t sticky = w.devices[current].sticky.load();
    return sticky ? sticky : last_error;
}

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    cudaError_t error = enter("cudaMalloc");
    *out = nullptr;
    if (error)
        return error;
    std::lock_guard<std::mutex> lock(w.mutex);
    size_t limit = w.options.memory_of[current] ? w.options.memory_of[current] : w.options.memory_bytes;
    if (w.devices[current].used_bytes + bytes > limit)
        return note(cudaErrorMemoryAllocation);
    if (is_many())
        *out = place(current, bytes);
    else if (posix_memalign(out, 256, bytes ? bytes : 1))
        *out = nullptr;
    if (!*out)
        return note(cudaErrorMemoryAllocation);
    memset(alias_of(*out), 0xff, bytes); // NaN: nobody may read what nobody wrote
    w.memory[*out] = {bytes, current};
    w.devices[current].used_bytes += bytes;
    return cudaSuccess;
}

cudaError_t cudaFree(void *memory)
{
    std::lock_guard<std::mutex> lock(w.mutex);
    if (!memory)
        return cudaSuccess;
    auto it = w.memory.find(memory);
    if (it == w.memory.end())
        return note(cudaErrorInvalidValue);
    w.devices[it->second.device].used_bytes -= it->second.bytes;
    char *alias = alias_of(memory);
    size_t bytes = it->second.bytes;
    w.memory.erase(it);
    if (alias == memory)
        free(memory);
    else
        memset(alias, 0xff, bytes);
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags)
{
    cudaError_t error = enter("cudaHostAlloc");
    *out = nullptr;
    if (!error && is_many() && !(flags & cudaHostAllocPortable))
        error = note(cudaErrorInvalidValue); // of one device only
    if (error)
        return error;
    std::lock_guard<std::mutex> lock(w.mutex);
    if (w.pinned_bytes + bytes > w.options.pinned_bytes || posix_memalign(out, 4096, bytes ? bytes : 1))
        return note(cudaErrorMemoryAllocation);
    memset(*out, 0xff, bytes);
    w.pinned[*out] = bytes;
    w.pinned_bytes += bytes;
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *memory)
{
    std::lock_guard<std::mutex> lock(w.mutex);
    if (!memory)
        return cudaSuccess;
    auto it = w.pinned.find(memory);
    if (it == w.pinned.end())
        return note(cudaErrorInvalidValue);
    w.pinned_bytes -= it->second;
    w.pinned.erase(it);
    free(memory);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *memory, size_t bytes, unsigned flags)
{
    cudaError_t error = enter("cudaHostRegister");
    if (!error && is_many() && !(flags & cudaHostRegisterPortable))
        error = note(cudaErrorInvalidValue);
    if (error)
        return error;
    std::lock_guard<std::mutex> lock(w.mutex);
    if (w.pinned_bytes + bytes > w.options.pinned_bytes)
        return note(cudaErrorMemoryAllocation);
    for (auto &r : w.registered)
        if ((char *)memory < (char *)r.first + r.second && (char *)r.first < (char *)memory + bytes)
            return note(cudaErrorHostMemoryAlreadyRegistered);
    w.registered[memory] = bytes;
    w.pinned_bytes += bytes;
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *memory)
{
    std::lock_guard<std::mutex> lock(w.mutex);
    auto it = w.registered.find(memory);
    if (it == w.registered.end())
        return note(cudaErrorInvalidValue);
    w.pinned_bytes -= it->second;
    w.registered.erase(it);
    return cudaSuccess;
}

// Memory that an operation of `device` may not touch: another device's, or only part of an allocation.
bool is_foreign(const void *memory, size_t bytes, int device)
{
    std::lock_guard<std::mutex> lock(w.mutex);
    int found = bytes ? owner(memory, bytes) : -1;
    return found == -2 || (found >= 0 && found != device);
}

cudaError_t cudaMemset(void *memory, int value, size_t bytes)
{
    cudaError_t error = enter("cudaMemset");
    if (!error && is_foreign(memory, bytes, current))
        error = note(cudaErrorInvalidValue);
    if (!error)
        memset(alias_of(memory), value, bytes);
    return error;
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream)
{
    int device = device_of(stream);
    cudaError_t error = enter("cudaMemsetAsync", device);
    if (!error && is_foreign(memory, bytes, device))
        error = note(cudaErrorInvalidValue);
    return error ? error : push(stream, [=] {
        if (!w.devices[device].sticky.load())
            memset(alias_of(memory), value, bytes);
    });
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind)
{
    cudaError_t error = enter("cudaMemcpy");
    if (!error && (is_foreign(to, bytes, current) || is_foreign(from, bytes, current)))
        error = note(cudaErrorInvalidValue);
    if (!error)
        memcpy(alias_of(to), alias_of(from), bytes);
    return error;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream)
{
    int device = device_of(stream);
    cudaError_t error = enter("cudaMemcpyAsync", device);
    if (!error && (is_foreign(to, bytes, device) || is_foreign(from, bytes, device)))
        error = note(cudaErrorInvalidValue);
    if (error)
        return error;
    bool pageable = true, captured = false;
    {
        std::lock_guard<std::mutex> lock(w.mutex);
        int into = owner(to, bytes), out_of = owner(from, bytes);
        if ((kind == cudaMemcpyHostToDevice && (into < 0 || out_of >= 0)) ||
            (kind == cudaMemcpyDeviceToHost && (into >= 0 || out_of < 0)))
            return note(cudaErrorInvalidValue);
        pageable = out_of < 0;
        for (auto *regions : {&w.pinned, &w.registered}) {
            auto it = regions->upper_bound((void *)((const char *)from + bytes - 1));
            if (it == regions->begin())
                continue;
            --it;
            const char *begin = (const char *)from, *end = begin + bytes, *last = (const char *)it->first + it->second;
            if (last > (const char *)from && (begin < (const char *)it->first || end > last))
                return note(cudaErrorInvalidValue); // registered in part: refused
            pageable &= last <= begin;
        }
    }
    if (stream) {
        std::lock_guard<std::mutex> lock(stream->mutex);
        captured = stream->capture != nullptr;
    }
    if (pageable && stream && !captured) { // staged before the call returns, as the runtime does
        std::vector<char> copy((const char *)from, (const char *)from + bytes);
        return push(stream, [=] {
            if (begin_on_stream("copy", w.options.copy_delay_ns_max, device))
                memcpy(alias_of(to), copy.data(), bytes);
        });
    }
    return push(stream, [=] {
        if (begin_on_stream("copy", w.options.copy_delay_ns_max, device))
            memcpy(alias_of(to), alias_of(from), bytes);
    });
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes, cudaStream_t stream)
{
    int device = device_of(stream);
    cudaError_t error = enter("cudaMemcpyPeerAsync", device);
    if (!error && ((device != to_device && device != from_device) || is_foreign(to, bytes, to_device) ||
                   is_foreign(from, bytes, from_device)))
        error = note(cudaErrorInvalidValue);
    return error ? error : push(stream, [=] {
        if (begin_on_stream("peer copy", w.options.copy_delay_ns_max, device))
            memcpy(alias_of(to), alias_of(from), bytes);
    });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned)
{
    cudaError_t error = enter("cudaStreamCreateWithFlags");
    *out = nullptr;
    if (error)
        return error;
    fake_stream *s = new fake_stream;
    s->device = current;
    s->thread = std::thread(run_stream, s);
    std::lock_guard<std::mutex> lock(w.mutex);
    w.streams++;
    *out = s;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int)
{
    return cudaStreamCreateWithFlags(out, flags);
}

cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    {
        std::lock_guard<std::mutex> lock(s->mutex);
        s->stop = true;
        s->changed.notify_all();
    }
    s->thread.join();
    delete s;
    std::lock_guard<std::mutex> lock(w.mutex);
    w.streams--;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    drain(stream);
    return enter("cudaStreamSynchronize", device_of(stream));
}

cudaError_t cudaStreamQuery(cudaStream_t s)
{
    cudaError_t error = enter("cudaStreamQuery", device_of(s));
    if (error)
        return error;
    std::lock_guard<std::mutex> lock(s->mutex);
    return s->queue.empty() && !s->busy ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned)
{
    cudaError_t error = enter("cudaEventCreateWithFlags");
    *out = nullptr;
    if (error)
        return error;
    *out = new fake_event;
    (*out)->device = current;
    std::lock_guard<std::mutex> lock(w.mutex);
    w.events++;
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    delete event;
    std::lock_guard<std::mutex> lock(w.mutex);
    w.events--;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    cudaError_t error = enter("cudaEventRecord", device_of(stream));
    if (!error && event->device != device_of(stream))
        error = note(cudaErrorInvalidResourceHandle);
    if (error)
        return error;
    uint64_t mine;
    {
        std::lock_guard<std::mutex> lock(event->mutex);
        mine = ++event->recorded;
    }
    return push(stream, [=] {
        std::lock_guard<std::mutex> lock(event->mutex);
        event->reached = mine;
        event->changed.notify_all();
    });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned)
{
    cudaError_t error = enter("cudaStreamWaitEvent", device_of(stream));
    if (error)
        return error;
    uint64_t until;
    {
        std::lock_guard<std::mutex> lock(event->mutex);
        until = event->recorded; // as of now: a later record does not count
    }
    return push(stream, [=] {
        std::unique_lock<std::mutex> lock(event->mutex);
        event->changed.wait(lock, [&] { return event->reached >= until; });
    });
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    cudaError_t error = enter("cudaEventQuery");
    if (error)
        return error;
    std::lock_guard<std::mutex> lock(event->mutex);
    return event->reached >= event->recorded ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    std::unique_lock<std::mutex> lock(event->mutex);
    event->changed.wait(lock, [&] { return event->reached >= event->recorded; });
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode)
{
    cudaError_t error = enter("cudaStreamBeginCapture", device_of(s));
    if (error)
        return error;
    std::lock_guard<std::mutex> lock(s->mutex);
    s->capture = new fake_graph;
    s->capture->device = s->device;
    std::lock_guard<std::mutex> world_lock(w.mutex);
    w.graphs++;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *out)
{
    cudaError_t error = enter("cudaStreamEndCapture");
    std::lock_guard<std::mutex> lock(s->mutex);
    *out = s->capture;
    s->capture = nullptr;
    return error;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *, size_t *count)
{
    cudaError_t error = enter("cudaGraphGetNodes");
    *count = graph->nodes.size();
    return error;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long)
{
    cudaError_t error = enter("cudaGraphInstantiate");
    *out = nullptr;
    if (error)
        return error;
    *out = new fake_graph_exec{graph->device, graph->nodes};
    std::lock_guard<std::mutex> lock(w.mutex);
    w.graphs++;
    return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t)
{
    return enter("cudaGraphUpload");
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    cudaError_t error = enter("cudaGraphLaunch", device_of(stream));
    if (!error && exec->device != device_of(stream))
        error = note(cudaErrorInvalidResourceHandle);
    if (error)
        return error;
    for (const operation &node : exec->nodes)
        push(stream, node);
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    delete graph;
    std::lock_guard<std::mutex> lock(w.mutex);
    w.graphs--;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    delete exec;
    std::lock_guard<std::mutex> lock(w.mutex);
    w.graphs--;
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *result)
{
    cudaError_t error = enter("cudaGetDriverEntryPointByVersion");
    bool known = !strcmp(symbol, "cuStreamWriteValue32") && !w.options.no_memops;
    *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    *function = known ? (void *)fake_write_value_32 : nullptr;
    return error;
}
