/* A fake of the CUDA runtime, enough for torch's CUDA build without a GPU.
 *
 * Device memory is host memory, every call is complete when it returns, and a kernel launch does
 * nothing (fakeops.py computes on the CPU instead). Copies and synchronizations are counted.
 * All other functions that torch's libraries need are stubs, written by make_stubs.py.
 */
#define _GNU_SOURCE
#include "fake.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The header may rename it; torch needs this name */
#undef cudaGetDeviceProperties

/* ---- Counters and trace ---- */

static const char *counter_names[COUNTERS] = {
    "streamSync", "eventSync",  "deviceSync", "memcpySync", "h2dPageable",
    "h2dPinned",  "d2hPageable", "d2hPinned", "d2d",        "launch",
    "nccl",       "streamWaitEvent", "cudaMalloc", "setDevice",
};

atomic_long counters[COUNTERS];

void trace(const char *text)
{
    static int on = -1;
    if (on < 0)
        on = getenv("FAKE_TRACE") ? 1 : 0;
    if (on)
        fprintf(stderr, "[fake %d] %s\n", getpid(), text);
}

/* The three functions that fakeops.py calls */

EXPORT long fake_count(int counter)
{
    return counter < COUNTERS ? counters[counter] : -1;
}

EXPORT const char *fake_name(int counter)
{
    return counter < COUNTERS ? counter_names[counter] : NULL;
}

/* A copy between the CPU and a device that fakeops.py makes, as torch's own copy would make it:
 * one that is not non_blocking ends with a synchronization of its stream */
EXPORT void fake_note(int to_host, int pinned, int sync)
{
    int counter = to_host ? D2H_PAGEABLE : H2D_PAGEABLE;
    counters[counter + (pinned ? 1 : 0)]++;
    if (sync) {
        counters[STREAM_SYNC]++;
        trace(to_host ? "d2h copy + streamSync" : "h2d copy + streamSync");
    } else {
        trace("async copy");
    }
}

/* ---- Devices ---- */

__thread int current;

static int device_count(void)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    const char *fake = getenv("FAKE_GPUS");
    int count = atoi(fake ? fake : "1");
    if (!visible)
        return count;
    if (!*visible || *visible == '-')
        return 0;
    int listed = 1;
    for (const char *p = visible; *p; p++)
        listed += *p == ',';
    return listed < count ? listed : count;
}

/* The number that CUDA_VISIBLE_DEVICES gives to a device, so that uuids differ between processes */
static int physical_device(int device)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible || !*visible)
        return device;
    for (int i = 0; i < device; i++) {
        visible = strchr(visible, ',');
        if (!visible)
            return device;
        visible++;
    }
    return atoi(visible);
}

EXPORT cudaError_t cudaGetDeviceCount(int *count)
{
    *count = device_count();
    return *count ? cudaSuccess : cudaErrorNoDevice;
}

EXPORT cudaError_t cudaGetDevice(int *device)
{
    *device = current;
    return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device >= device_count())
        return cudaErrorInvalidDevice;
    if (device != current)
        counters[SET_DEVICE]++;
    current = device;
    return cudaSuccess;
}

/* A small GPU with the limits of an A100 (compute capability 8.0) */
EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
    if (device >= device_count())
        return cudaErrorInvalidDevice;
    int physical = physical_device(device);
    memset(p, 0, sizeof *p);
    strcpy(p->name, "FakeGPU");
    p->major = 8;
    p->minor = 0;
    p->totalGlobalMem = 16ull << 30;
    p->l2CacheSize = 40 << 20;
    p->memoryBusWidth = 5120;
    p->multiProcessorCount = 8;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxThreadsDim[0] = 1024;
    p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = 65535;
    p->maxGridSize[2] = 65535;
    p->sharedMemPerBlock = 49152;
    p->sharedMemPerBlockOptin = 166912;
    p->sharedMemPerMultiprocessor = 167936;
    p->regsPerBlock = 65536;
    p->regsPerMultiprocessor = 65536;
    p->textureAlignment = 512;
    p->unifiedAddressing = 1;
    p->pciBusID = physical + 1;
    p->pciDeviceID = 0;
    p->uuid.bytes[0] = 1;
    p->uuid.bytes[15] = physical + 1;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
        *value = 8;
        break;
    case cudaDevAttrMultiProcessorCount:
        *value = 8;
        break;
    case cudaDevAttrMaxThreadsPerBlock:
        *value = 1024;
        break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
        *value = 2048;
        break;
    case cudaDevAttrWarpSize:
        *value = 32;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = 166912;
        break;
    case cudaDevAttrMaxGridDimX:
        *value = 2147483647;
        break;
    case cudaDevAttrUnifiedAddressing:
        *value = 1;
        break;
    case cudaDevAttrClockRate:
        *value = 1000000;
        break;
    case cudaDevAttrPciBusId:
        *value = physical_device(device) + 1;
        break;
    default:
        *value = 0;
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device)
{
    snprintf(text, size, "0000:%02x:00.0", physical_device(device) + 1);
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    *can = 1;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize(void)
{
    counters[DEVICE_SYNC]++;
    trace("deviceSync");
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int *version)
{
    *version = 13000;
    return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = 13000;
    return cudaSuccess;
}

/* No driver function can be looked up: torch then does without */
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function,
                                                    unsigned version, unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *result)
{
    *function = NULL;
    if (result)
        *result = cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

/* ---- Errors: none is ever pending ---- */

EXPORT const char *cudaGetErrorString(cudaError_t error)
{
    switch (error) {
    case cudaSuccess:
        return "no error";
    case cudaErrorNoDevice:
        return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice:
        return "invalid device ordinal";
    default:
        return "fake cuda error";
    }
}

EXPORT const char *cudaGetErrorName(cudaError_t error)
{
    return "fakeError";
}

EXPORT cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

EXPORT cudaError_t cudaPeekAtLastError(void)
{
    return cudaSuccess;
}

/* ---- Memory: a table of what was allocated, so that an address tells its kind and its device ---- */

static struct region regions[1 << 16];
static int region_count;
static pthread_mutex_t region_lock = PTHREAD_MUTEX_INITIALIZER;

static void add_region(void *start, size_t size, int kind)
{
    pthread_mutex_lock(&region_lock);
    int i = 0;
    while (i < region_count && regions[i].start)
        i++;
    if (i == region_count)
        region_count++;
    regions[i] = (struct region){start, size, current, kind};
    pthread_mutex_unlock(&region_lock);
}

struct region find_region(const void *address)
{
    struct region found = {0};
    const char *p = address;
    pthread_mutex_lock(&region_lock);
    for (int i = 0; i < region_count; i++) {
        struct region *r = &regions[i];
        if (r->start && p >= r->start && p < r->start + r->size) {
            found = *r;
            break;
        }
    }
    pthread_mutex_unlock(&region_lock);
    return found;
}

static void remove_region(void *start)
{
    pthread_mutex_lock(&region_lock);
    for (int i = 0; i < region_count; i++) {
        if (regions[i].start == start) {
            regions[i].start = NULL;
            break;
        }
    }
    pthread_mutex_unlock(&region_lock);
}

EXPORT cudaError_t cudaMalloc(void **address, size_t size)
{
    counters[CUDA_MALLOC]++;
    *address = aligned_alloc(512, round_up(size, 512));
    /* 3.4e38 as float32, so that a result that was never computed is obvious */
    memset(*address, 0x7f, size);
    add_region(*address, size ? size : 1, DEVICE);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMallocAsync(void **address, size_t size, cudaStream_t stream)
{
    return cudaMalloc(address, size);
}

EXPORT cudaError_t cudaFree(void *address)
{
    if (address) {
        remove_region(address);
        free(address);
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaFreeAsync(void *address, cudaStream_t stream)
{
    return cudaFree(address);
}

EXPORT cudaError_t cudaHostAlloc(void **address, size_t size, unsigned flags)
{
    *address = aligned_alloc(4096, round_up(size, 4096));
    add_region(*address, size, PINNED);
    return cudaSuccess;
}

EXPORT cudaError_t cudaFreeHost(void *address)
{
    remove_region(address);
    free(address);
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostRegister(void *address, size_t size, unsigned flags)
{
    add_region(address, size, PINNED);
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void *address)
{
    remove_region(address);
    return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes,
                                            const void *address)
{
    struct region r = find_region(address);
    memset(attributes, 0, sizeof *attributes);
    if (!r.start)
        attributes->type = cudaMemoryTypeUnregistered;
    else
        attributes->type = r.kind == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    attributes->device = r.device;
    attributes->devicePointer = (void *)address;
    attributes->hostPointer = (void *)address;
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemGetInfo(size_t *available, size_t *total)
{
    *available = 8ull << 30;
    *total = 16ull << 30;
    return cudaSuccess;
}

static void copy(void *to, const void *from, size_t size)
{
    struct region target = find_region(to);
    struct region source = find_region(from);
    if (target.kind == DEVICE && source.kind == DEVICE)
        counters[D2D]++;
    else if (target.kind == DEVICE)
        counters[source.kind == PINNED ? H2D_PINNED : H2D_PAGEABLE]++;
    else if (source.kind == DEVICE)
        counters[target.kind == PINNED ? D2H_PINNED : D2H_PAGEABLE]++;
    memmove(to, from, size);
}

EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind)
{
    counters[MEMCPY_SYNC]++;
    copy(to, from, size);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size,
                                   enum cudaMemcpyKind kind, cudaStream_t stream)
{
    copy(to, from, size);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                                       size_t size, cudaStream_t stream)
{
    copy(to, from, size);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemset(void *address, int value, size_t size)
{
    memset(address, value, size);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemsetAsync(void *address, int value, size_t size, cudaStream_t stream)
{
    memset(address, value, size);
    return cudaSuccess;
}

/* ---- Streams and events: handles only, since every call has finished when it returns ---- */

static cudaError_t new_stream(cudaStream_t *stream)
{
    static atomic_long last = 16;
    *stream = (cudaStream_t)(last += 16);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    return new_stream(stream);
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    return new_stream(stream);
}

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
    return new_stream(stream);
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority)
{
    *priority = 0;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    counters[STREAM_SYNC]++;
    trace("streamSync");
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    counters[STREAM_WAIT_EVENT]++;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    *event = malloc(16);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    return cudaEventCreate(event);
}

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    free(event);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    counters[EVENT_SYNC]++;
    trace("eventSync");
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end)
{
    *milliseconds = 1;
    return cudaSuccess;
}

/* ---- Kernels: registered for their names, counted when launched, never run ---- */

struct kernel {
    const void *function;
    const char *name;
};

static struct kernel *kernels;
static int kernel_count;
static int kernel_room;

/* The launch configuration of <<<...>>>, kept between push and pop */
static __thread struct {
    dim3 grid;
    dim3 block;
    size_t shared;
    cudaStream_t stream;
} configuration;

static cudaError_t launch(const void *function)
{
    counters[LAUNCH]++;
    if (!getenv("FAKE_KERNELS"))
        return cudaSuccess;
    for (int i = 0; i < kernel_count; i++) {
        if (kernels[i].function == function) {
            fprintf(stderr, "[kernel] %.160s\n", kernels[i].name);
            break;
        }
    }
    return cudaSuccess;
}

EXPORT void **__cudaRegisterFatBinary(void *binary)
{
    static void *module = (void *)1;
    return &module;
}

EXPORT void __cudaRegisterFatBinaryEnd(void **module)
{
}

EXPORT void __cudaUnregisterFatBinary(void **module)
{
}

EXPORT char __cudaInitModule(void **module)
{
    return 1;
}

EXPORT void __cudaRegisterFunction(void **module, const char *function, char *device_function,
                                   const char *name, int thread_limit, void *thread, void *block,
                                   void *block_size, void *grid_size, int *warp_size)
{
    if (kernel_count == kernel_room) {
        kernel_room = kernel_room ? 2 * kernel_room : 65536;
        kernels = realloc(kernels, kernel_room * sizeof *kernels);
    }
    kernels[kernel_count++] = (struct kernel){function, name};
}

EXPORT void __cudaRegisterVar(void **module, char *variable, char *address, const char *name,
                              int external, size_t size, int constant, int global)
{
}

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                            struct CUstream_st *stream)
{
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared = shared;
    configuration.stream = stream;
    return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *(cudaStream_t *)stream = configuration.stream;
    return cudaSuccess;
}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function)
{
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
                                      size_t shared, cudaStream_t stream)
{
    return launch(kernel);
}

EXPORT cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                                    size_t shared, cudaStream_t stream)
{
    return launch(function);
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function,
                                       void **arguments)
{
    return launch(function);
}

EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes,
                                         const void *function)
{
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->ptxVersion = 80;
    attributes->binaryVersion = 80;
    attributes->numRegs = 32;
    return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function,
                                                                 int block_size, size_t shared)
{
    *blocks = 2;
    return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks,
                                                                          const void *function,
                                                                          int block_size,
                                                                          size_t shared,
                                                                          unsigned flags)
{
    *blocks = 2;
    return cudaSuccess;
}

/* ---- What torch asks of the other libraries when it starts ---- */

EXPORT int cublasCreate_v2(void **handle)
{
    *handle = malloc(64);
    return 0;
}

EXPORT int cublasLtCreate(void **handle)
{
    *handle = malloc(64);
    return 0;
}

EXPORT size_t cublasLtGetVersion(void)
{
    return 130000;
}

EXPORT size_t cudnnGetVersion(void)
{
    return 92000;
}

EXPORT size_t cudnnGetCudartVersion(void)
{
    return 13000;
}
