// SPDX-License-Identifier: Apache-2.0
#include "tests/cuda_emulator.h"
#include "tests/fake_cuda.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

using operation = std::function<void()>;

struct fake_event {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t recorded = 0, reached = 0;
};

struct fake_graph {
    std::vector<operation> nodes;
};

struct fake_graph_exec {
    std::vector<operation> nodes;
};

struct fake_stream {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<operation> queue;
    bool busy = false, stop = false;
    fake_graph *capture = nullptr;
    std::thread thread;
};

namespace {

struct world {
    std::mutex mutex;
    fake_cuda_options options;
    std::map<std::string, uint32_t> calls;
    std::string fail_name;
    uint32_t fail_nth = 0;
    cudaError_t fail_error = cudaSuccess;
    std::atomic<cudaError_t> sticky{cudaSuccess};
    std::string stall_name;
    uint32_t stall_nth = 0;
    uint64_t stall_ns = 0;
    std::map<void *, size_t> device, pinned, registered;
    size_t device_bytes = 0, pinned_bytes = 0, streams = 0, events = 0, graphs = 0;
    uint64_t random = 1;
};
world w;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t note(cudaError_t error)
{
    if (error != cudaSuccess && error != cudaErrorNotReady)
        last_error = error;
    return error;
}

// Counts the call; the injected error when its turn has come, or the sticky one.
cudaError_t enter(const char *name)
{
    std::lock_guard<std::mutex> lock(w.mutex);
    w.calls[name]++;
    if (w.fail_nth && w.fail_name == name && --w.fail_nth == 0)
        return note(w.fail_error);
    return note(w.sticky.load());
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
bool begin_on_stream(const char *name, uint64_t delay_ns_max)
{
    uint64_t stall = 0;
    {
        std::lock_guard<std::mutex> lock(w.mutex);
        w.calls[name]++;
        if (w.fail_nth && w.fail_name == name && --w.fail_nth == 0)
            w.sticky = w.fail_error;
        if (w.fail_nth && w.fail_name == std::string("lost ") + name && --w.fail_nth == 0)
            return false;
        if (w.stall_nth && w.stall_name == name && --w.stall_nth == 0)
            stall = w.stall_ns;
        if (w.sticky.load())
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
    w.sticky = cudaSuccess;
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
    *live = {w.device_bytes, w.pinned_bytes, w.registered.size(), w.streams, w.events, w.graphs};
}

// ---- kernels ----

int ft_emulated_launch(void *stream, dim3 grid, dim3 block, size_t shared_bytes, std::function<void()> body)
{
    cudaError_t error = enter("cudaLaunchKernel");
    if (error)
        return error;
    return push((fake_stream *)stream, [=] {
        if (begin_on_stream("kernel", w.options.kernel_delay_ns_max))
            ft_emulated_run(grid, block, shared_bytes, body);
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
    properties->totalGlobalMem = w.options.memory_bytes;
    properties->major = w.options.major;
    properties->minor = w.options.minor;
    properties->multiProcessorCount = 4;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    cudaError_t error = enter("cudaSetDevice");
    return error ? error : device < w.options.device_count ? cudaSuccess : note(cudaErrorInvalidDevice);
}

cudaError_t cudaDeviceSynchronize(void)
{
    return enter("cudaDeviceSynchronize");
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    cudaError_t error = enter("cudaMemGetInfo");
    std::lock_guard<std::mutex> lock(w.mutex);
    *total_bytes = w.options.memory_bytes;
    *free_bytes = w.options.memory_bytes - w.device_bytes;
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
    return w.sticky.load() ? w.sticky.load() : error;
}

cudaError_t cudaPeekAtLastError(void)
{
    std::lock_guard<std::mutex> lock(w.mutex);
    return w.sticky.load() ? w.sticky.load() : last_error;
}

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    cudaError_t error = enter("cudaMalloc");
    *out = nullptr;
    if (error)
        return error;
    std::lock_guard<std::mutex> lock(w.mutex);
    if (w.device_bytes + bytes > w.options.memory_bytes || posix_memalign(out, 256, bytes ? bytes : 1))
        return note(cudaErrorMemoryAllocation);
    memset(*out, 0xff, bytes); // NaN: nobody may read what nobody wrote
    w.device[*out] = bytes;
    w.device_bytes += bytes;
    return cudaSuccess;
}

cudaError_t cudaFree(void *memory)
{
    std::lock_guard<std::mutex> lock(w.mutex);
    if (!memory)
        return cudaSuccess;
    auto it = w.device.find(memory);
    if (it == w.device.end())
        return note(cudaErrorInvalidValue);
    w.device_bytes -= it->second;
    w.device.erase(it);
    free(memory);
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned)
{
    cudaError_t error = enter("cudaHostAlloc");
    *out = nullptr;
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

cudaError_t cudaHostRegister(void *memory, size_t bytes, unsigned)
{
    cudaError_t error = enter("cudaHostRegister");
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

cudaError_t cudaMemset(void *memory, int value, size_t bytes)
{
    cudaError_t error = enter("cudaMemset");
    if (!error)
        memset(memory, value, bytes);
    return error;
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream)
{
    cudaError_t error = enter("cudaMemsetAsync");
    return error ? error : push(stream, [=] {
        if (!w.sticky.load())
            memset(memory, value, bytes);
    });
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind)
{
    cudaError_t error = enter("cudaMemcpy");
    if (!error)
        memcpy(to, from, bytes);
    return error;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t stream)
{
    cudaError_t error = enter("cudaMemcpyAsync");
    if (error)
        return error;
    bool pageable = true, captured = false;
    {
        std::lock_guard<std::mutex> lock(w.mutex);
        for (auto *regions : {&w.device, &w.pinned, &w.registered}) {
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
            if (begin_on_stream("copy", w.options.copy_delay_ns_max))
                memcpy(to, copy.data(), bytes);
        });
    }
    return push(stream, [=] {
        if (begin_on_stream("copy", w.options.copy_delay_ns_max))
            memcpy(to, from, bytes);
    });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned)
{
    cudaError_t error = enter("cudaStreamCreateWithFlags");
    *out = nullptr;
    if (error)
        return error;
    fake_stream *s = new fake_stream;
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
    return enter("cudaStreamSynchronize");
}

cudaError_t cudaStreamQuery(cudaStream_t s)
{
    cudaError_t error = enter("cudaStreamQuery");
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
    cudaError_t error = enter("cudaEventRecord");
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
    cudaError_t error = enter("cudaStreamWaitEvent");
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
    cudaError_t error = enter("cudaStreamBeginCapture");
    if (error)
        return error;
    std::lock_guard<std::mutex> lock(s->mutex);
    s->capture = new fake_graph;
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
    *out = new fake_graph_exec{graph->nodes};
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
    cudaError_t error = enter("cudaGraphLaunch");
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
