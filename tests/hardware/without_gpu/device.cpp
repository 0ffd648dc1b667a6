// A CUDA device that isn't there, for torch's CUDA build on a machine without a GPU: what torch calls of the runtime, of cuBLAS and
// of the driver, preloaded in their place. Memory is the host's, kernels do nothing (kernels.py computes what they would).
//
//     UNREAL_GPU_LATE=SEED    what is queued happens only when somebody waits for it, or computes behind it in its stream; events
//                             come at other moments for each seed and rank
//     UNREAL_GPU_EMPTY=1      copies of more than 1 MiB aren't made, and take no memory: what a large model holds, not what it computes
//     UNREAL_GPU_GB=80        memory of a device
//     UNREAL_GPU_DEVICES=1    how many there are
//     UNREAL_GPU_NAME=...     what they are called: one whose peak is in no data sheet is timed, which takes minutes here
//
// Not imitated: graphs, IPC, peers, errors of kernels, time.

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <time.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

static const char *wish(const char *name, const char *otherwise) {
    const char *found = getenv(name);
    return found ? found : otherwise;
}

static const int num_devices = atoi(wish("UNREAL_GPU_DEVICES", "1"));
static const size_t total = size_t(atof(wish("UNREAL_GPU_GB", "80")) * 1e9);
static const bool late = getenv("UNREAL_GPU_LATE"), empty = getenv("UNREAL_GPU_EMPTY");
static thread_local int current = 0;

// ---------------------------------------------------------------- memory: pages that take none until they are written

static const size_t PAGE = 4096;
enum Kind { PAGEABLE, PINNED, DEVICE };
struct Piece {
    size_t size;
    Kind kind;
};
static std::mutex of_pieces;
static std::map<char *, Piece> pieces;
static size_t held = 0;

static size_t in_pages(size_t n) { return (n + PAGE - 1) / PAGE * PAGE; }

static cudaError_t take(void **p, size_t n, Kind kind) {
    std::lock_guard<std::mutex> guard(of_pieces);
    *p = nullptr;
    if (n == 0) return cudaSuccess;
    if (kind == DEVICE && held + n > total) return cudaErrorMemoryAllocation;
    void *found = mmap(nullptr, in_pages(n), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return cudaErrorMemoryAllocation;
    pieces[(char *)found] = {n, kind};
    if (kind == DEVICE) held += n;
    *p = found;
    return cudaSuccess;
}

static cudaError_t give_back(void *p) {
    if (!p) return cudaSuccess;
    std::lock_guard<std::mutex> guard(of_pieces);
    auto found = pieces.find((char *)p);
    if (found == pieces.end()) return cudaErrorInvalidValue;
    if (found->second.kind == DEVICE) held -= found->second.size;
    munmap(p, in_pages(found->second.size));
    pieces.erase(found);
    return cudaSuccess;
}

static Kind kind_of(const void *p) {
    std::lock_guard<std::mutex> guard(of_pieces);
    auto after = pieces.upper_bound((char *)p);
    if (after == pieces.begin()) return PAGEABLE;
    --after;
    return (char *)p < after->first + after->second.size ? after->second.kind : PAGEABLE;
}

static void fill(void *p, int value, size_t n) {
    char *begin = (char *)in_pages((size_t)p), *end = (char *)((size_t)p + n) - ((size_t)p + n) % PAGE;
    if (value || end <= begin) {
        memset(p, value, n);
        return;
    }
    memset(p, 0, begin - (char *)p);
    memset(end, 0, (char *)p + n - end);
    madvise(begin, end - begin, MADV_DONTNEED);  // zeros that take no memory
}

// ---------------------------------------------------------------- queues

struct Mark {  // a place in a queue
    bool over = false;
    void *stream = nullptr;
    double ms = 0;
};
struct Event {
    std::shared_ptr<Mark> mark;  // none before it is recorded: then it is over
};
static std::recursive_mutex of_queues;
static std::map<void *, std::deque<std::function<void()>>> queues;
static std::mt19937 dice(atoi(wish("UNREAL_GPU_LATE", "0")) + 7919 * atoi(wish("PMI_RANK", wish("OMPI_COMM_WORLD_RANK", "0"))));

static void run(void *stream, const Mark *until = nullptr) {
    std::lock_guard<std::recursive_mutex> guard(of_queues);
    auto &queue = queues[stream];
    while (!queue.empty() && !(until && until->over)) {
        auto next = std::move(queue.front());
        queue.pop_front();
        next();
    }
}

static void run_all() {
    std::lock_guard<std::recursive_mutex> guard(of_queues);
    for (auto &each : queues) run(each.first);
}

static cudaError_t enqueue(void *stream, std::function<void()> what) {
    std::lock_guard<std::recursive_mutex> guard(of_queues);
    queues[stream].push_back(std::move(what));
    if (!late) run(stream);
    return cudaSuccess;
}

API void unreal_gpu_run(void *stream) { run(stream); }

static double now_ms() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

// ---------------------------------------------------------------- runtime: devices

API cudaError_t cudaGetDeviceCount(int *n) { return (*n = num_devices) ? cudaSuccess : cudaErrorNoDevice; }
API cudaError_t cudaGetDevice(int *device) { return *device = current, cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= num_devices) return cudaErrorInvalidDevice;
    return current = device, cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int *version) { return *version = 13000, cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int *version) { return *version = 13000, cudaSuccess; }

API cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {  // of an H100
    static const std::map<int, int> known = {
        {cudaDevAttrComputeCapabilityMajor, 9}, {cudaDevAttrMultiProcessorCount, 132}, {cudaDevAttrWarpSize, 32},
        {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrMaxThreadsPerMultiProcessor, 2048}, {cudaDevAttrMaxGridDimX, 2147483647},
        {cudaDevAttrMaxGridDimY, 65535}, {cudaDevAttrMaxGridDimZ, 65535}, {cudaDevAttrMaxRegistersPerBlock, 65536},
        {cudaDevAttrMaxRegistersPerMultiprocessor, 65536}, {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448}, {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
        {cudaDevAttrL2CacheSize, 50 << 20}, {cudaDevAttrClockRate, 1980000}, {cudaDevAttrMemoryClockRate, 2619000},
        {cudaDevAttrGlobalMemoryBusWidth, 5120},
    };
    auto found = known.find(attribute);
    return *value = found == known.end() ? 0 : found->second, cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", wish("UNREAL_GPU_NAME", "NVIDIA H100 80GB HBM3 that isn't there"));
    for (int i = 0; i < 16; i++) p->uuid.bytes[i] = char(i + 1 + device);
    p->totalGlobalMem = total, p->major = 9, p->multiProcessorCount = 132, p->pciBusID = 1 + device, p->warpSize = 32;
    p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448, p->sharedMemPerMultiprocessor = 233472;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536, p->l2CacheSize = 50 << 20, p->textureAlignment = 512;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxThreadsPerMultiProcessor = 2048, p->maxBlocksPerMultiProcessor = 32;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->unifiedAddressing = p->concurrentKernels = 1;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int device) { return snprintf(s, n, "0000:%02d:00.0", 1 + device), cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int *value, int, int) { return *value = 0, cudaSuccess; }
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaErrorNotSupported; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) {
    if (least) *least = 0;
    if (most) *most = -5;
    return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() { return run_all(), cudaSuccess; }
API cudaError_t cudaGetLastError() { return cudaSuccess; }
API cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
API const char *cudaGetErrorName(cudaError_t error) {
    static thread_local char name[32];
    return snprintf(name, sizeof name, "cudaError%d", error), name;
}
API const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : cudaGetErrorName(error);
}
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

API cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult *result) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
    if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *function ? cudaSuccess : cudaErrorSymbolNotFound;
}
API cudaError_t cudaGetDriverEntryPoint(
    const char *name, void **function, unsigned long long flags, cudaDriverEntryPointQueryResult *result) {
    return cudaGetDriverEntryPointByVersion(name, function, 0, flags, result);
}

// ---------------------------------------------------------------- runtime: memory

API cudaError_t cudaMalloc(void **p, size_t n) { return take(p, n, DEVICE); }
API cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t) { return take(p, n, DEVICE); }
API cudaError_t cudaHostAlloc(void **p, size_t n, unsigned) { return take(p, n, PINNED); }
API cudaError_t cudaFree(void *p) { return run_all(), give_back(p); }
API cudaError_t cudaFreeAsync(void *p, cudaStream_t) { return run_all(), give_back(p); }
API cudaError_t cudaFreeHost(void *p) { return run_all(), give_back(p); }
API cudaError_t cudaHostRegister(void *, size_t, unsigned) { return cudaErrorNotSupported; }
API cudaError_t cudaHostUnregister(void *) { return cudaErrorNotSupported; }
API cudaError_t cudaMemGetInfo(size_t *free, size_t *of) {
    std::lock_guard<std::mutex> guard(of_pieces);
    return *of = total, *free = total - held, cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *found, const void *p) {
    memset(found, 0, sizeof *found);
    Kind kind = kind_of(p);
    found->type = kind == DEVICE ? cudaMemoryTypeDevice : kind == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    found->devicePointer = kind == PAGEABLE ? nullptr : (void *)p;
    found->hostPointer = kind == PINNED ? (void *)p : nullptr;
    return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, cudaMemcpyKind, cudaStream_t stream) {
    if (empty && n > 1 << 20) return cudaSuccess;
    if (kind_of(from) == PAGEABLE) {  // read before the call returns
        auto read = std::make_shared<std::string>((const char *)from, n);
        return enqueue(stream, [=] { memcpy(to, read->data(), n); });
    }
    enqueue(stream, [=] { memmove(to, from, n); });
    if (kind_of(to) == PAGEABLE) run(stream);  // written before it returns
    return cudaSuccess;
}
API cudaError_t cudaMemcpy(void *to, const void *from, size_t n, cudaMemcpyKind kind) {
    cudaMemcpyAsync(to, from, n, kind, nullptr);
    return run(nullptr), cudaSuccess;
}
API cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t n, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, n, cudaMemcpyDefault, stream);
}
API cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t stream) {
    return enqueue(stream, [=] { fill(p, value, n); });
}
API cudaError_t cudaMemset(void *p, int value, size_t n) {
    cudaMemsetAsync(p, value, n, nullptr);
    return run(nullptr), cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
API cudaError_t cudaGetSymbolAddress(void **p, const void *) { return take(p, 1 << 16, DEVICE); }

API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int) { return *pool = (cudaMemPool_t)1, cudaSuccess; }
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *value) { return *(uint64_t *)value = 0, cudaSuccess; }
API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *) { return cudaSuccess; }
API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc *, size_t) { return cudaSuccess; }
API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

// ---------------------------------------------------------------- runtime: streams and events

API cudaError_t cudaStreamCreate(cudaStream_t *stream) { return *stream = (cudaStream_t) new char, cudaSuccess; }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) { return cudaStreamCreate(stream); }
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) { return cudaStreamCreate(stream); }
API cudaError_t cudaStreamDestroy(cudaStream_t stream) { return run(stream), cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int *priority) { return *priority = 0, cudaSuccess; }
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return run(stream), cudaSuccess; }
API cudaError_t cudaStreamQuery(cudaStream_t stream) { return run(stream), cudaSuccess; }
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    auto mark = ((Event *)event)->mark;
    return mark ? enqueue(stream, [=] { run(mark->stream, mark.get()); }) : cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t, cudaStreamCaptureStatus *status, unsigned long long *, cudaGraph_t *, const cudaGraphNode_t **,
    const cudaGraphEdgeData **, size_t *) {
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) { return cudaSuccess; }
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned) {
    return enqueue(stream, [=] { call(stream, cudaSuccess, data); });
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) {
    return enqueue(stream, [=] { call(data); });
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) { return *event = (cudaEvent_t) new Event, cudaSuccess; }
API cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete (Event *)event, cudaSuccess; }
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    auto mark = ((Event *)event)->mark = std::make_shared<Mark>();
    mark->stream = stream;
    return enqueue(stream, [=] { mark->over = true, mark->ms = now_ms(); });
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }
API cudaError_t cudaEventQuery(cudaEvent_t event) {
    std::lock_guard<std::recursive_mutex> guard(of_queues);
    auto mark = ((Event *)event)->mark;
    if (mark && !mark->over && dice() % 3 == 0) run(mark->stream, mark.get());
    return !mark || mark->over ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (auto mark = ((Event *)event)->mark) run(mark->stream, mark.get());
    return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end) {
    return *ms = float(((Event *)end)->mark->ms - ((Event *)begin)->mark->ms), cudaSuccess;
}

// ---------------------------------------------------------------- runtime: kernels

struct Call {
    dim3 grid, block;
    size_t shared;
    void *stream;
};
static thread_local std::vector<Call> calls;

API void **__cudaRegisterFatBinary(void *) {
    static void *handle[1];
    return handle;
}
API void __cudaRegisterFatBinaryEnd(void **) {}
API void __cudaUnregisterFatBinary(void **) {}
API void __cudaRegisterFunction(void **, const char *, char *, const char *, int, uint3 *, uint3 *, dim3 *, dim3 *, int *) {}
API void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    return calls.push_back({grid, block, shared, stream}), 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    Call call = calls.back();
    calls.pop_back();
    return *grid = call.grid, *block = call.block, *shared = call.shared, *(void **)stream = call.stream, cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) { return *kernel = (cudaKernel_t)function, cudaSuccess; }
API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void **, size_t, cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *, void **) { return cudaSuccess; }
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *found, const void *) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024, found->numRegs = 32, found->ptxVersion = found->binaryVersion = 90;
    return found->maxDynamicSharedSizeBytes = 49152, cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *, int, size_t) { return *n = 2, cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *, int, size_t, unsigned) {
    return *n = 2, cudaSuccess;
}

// ---------------------------------------------------------------- cuBLAS: products do nothing either

#define NOTHING(name) \
    API int name() { return 0; }
NOTHING(cublasSgemm_v2) NOTHING(cublasDgemm_v2) NOTHING(cublasGemmEx) NOTHING(cublasSgemmEx) NOTHING(cublasSgemmStridedBatched)
NOTHING(cublasDgemmStridedBatched) NOTHING(cublasGemmStridedBatchedEx) NOTHING(cublasSgemv_v2) NOTHING(cublasDgemv_v2)
NOTHING(cublasSdot_v2) NOTHING(cublasDdot_v2) NOTHING(cublasDotEx) NOTHING(cublasSetStream_v2) NOTHING(cublasSetWorkspace_v2)
NOTHING(cublasSetMathMode) NOTHING(cublasSetPointerMode_v2) NOTHING(cublasLtMatmul)
API int cublasCreate_v2(void **handle) { return *handle = new char, 0; }
API int cublasDestroy_v2(void *handle) { return delete (char *)handle, 0; }
API int cublasGetMathMode(void *, int *mode) { return *mode = 0; }
API int cublasGetPointerMode_v2(void *, int *mode) { return *mode = 0; }
API int cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *, int, void *found, int *n) {
    memset(found, 0, 96);  // a cublasLtMatmulHeuristicResult_t
    return *n = 1, 0;
}

// ---------------------------------------------------------------- driver: what torch and Triton ask it

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }
API CUresult cuDeviceGetCount(int *n) { return *n = num_devices, CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice *device, int index) { return *device = index, CUDA_SUCCESS; }
API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    return (CUresult)cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, device);
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags, int *active) { return *flags = 0, *active = 1, CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice) { return *context = (CUcontext)1, CUDA_SUCCESS; }
API CUresult cuCtxGetCurrent(CUcontext *context) { return *context = (CUcontext)1, CUDA_SUCCESS; }
API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuCtxPushCurrent_v2(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuCtxPopCurrent_v2(CUcontext *context) { return *context = (CUcontext)1, CUDA_SUCCESS; }
API CUresult cuCtxGetDevice(CUdevice *device) { return *device = current, CUDA_SUCCESS; }
API CUresult cuCtxGetLimit(size_t *value, CUlimit) { return *value = 1024, CUDA_SUCCESS; }
API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
API CUresult cuGetErrorString(CUresult, const char **text) { return *text = "an error", CUDA_SUCCESS; }
API CUresult cuModuleLoad(CUmodule *module, const char *) { return *module = (CUmodule)1, CUDA_SUCCESS; }
API CUresult cuModuleLoadData(CUmodule *module, const void *) { return *module = (CUmodule)1, CUDA_SUCCESS; }
API CUresult cuModuleLoadDataEx(CUmodule *module, const void *, unsigned, CUjit_option *, void **) {
    return *module = (CUmodule)1, CUDA_SUCCESS;
}
API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
API CUresult cuModuleGetFunction(CUfunction *function, CUmodule, const char *) { return *function = (CUfunction)1, CUDA_SUCCESS; }
API CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction) {
    *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
API CUresult cuLaunchKernel(
    CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **) {
    return CUDA_SUCCESS;
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig *, CUfunction, void **, void **) { return CUDA_SUCCESS; }
API CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr p) {
    Kind kind = kind_of((void *)p);
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return *(CUdeviceptr *)value = p, CUDA_SUCCESS;
    if (kind == PAGEABLE || attribute != CU_POINTER_ATTRIBUTE_MEMORY_TYPE) return CUDA_ERROR_INVALID_VALUE;
    return *(unsigned *)value = kind == DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST, CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction, const CUlaunchConfig *) { return *n = 1, CUDA_SUCCESS; }
API CUresult cuStreamSynchronize(CUstream stream) { return run(stream), CUDA_SUCCESS; }
