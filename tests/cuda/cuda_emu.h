/* cuda_emu.h - emulates the part of CUDA and cuBLAS that moe-cuda.cu uses, for machines without a GPU.
 *
 * If included before moe-cuda.cu (`g++ -x c++ -include tests/cuda/cuda_emu.h -DMOE_CUDA_EMULATOR`), this file replaces
 * CUDA. In C, it only declares the functions and variables that control the emulator.
 *
 *   Kernels   Blocks of a launch run one after the other. Threads of a block run in fibres, which wait for each other
 *             at __syncthreads. A fibre runs threads until one waits, so a kernel without barriers is a plain loop. It
 *             is an error if a thread ends while others wait, or if a block's size is not a multiple of the warp size.
 *   Time      Asynchronous work is delayed until the program waits for the stream or an event. This reveals buffers
 *             that are reused or read too early. During a capture, work is added to a graph.
 *   Memory    Device memory is allocated by malloc, so that sanitizers detect overruns, and filled with a pattern.
 *             Copies must be inside existing blocks.
 *   Failures  emu_fail(n, code, ...) makes the n-th of the following calls fail, not counting calls that cannot fail.
 */
#ifndef CUDA_EMU_H
#define CUDA_EMU_H

#include <math.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif
enum { EMU_OUT_OF_MEMORY = 2, EMU_OLD_DRIVER = 35, EMU_NO_DEVICE = 100, EMU_LOST = 719, EMU_NO_IMAGE = 209 };

void emu_reset(int devices); /* clear failures; set the number of GPUs */
void emu_fail(size_t nth, int code,
              int stay);        /* make the nth call from now on fail with `code`; if `stay`, later calls too */
void emu_refuse_blas(int what); /* cuBLAS: 0 works, 1 does not start, 2 rejects products, 3 returns wrong sums */
size_t emu_calls(void);         /* number of calls that can fail, since emu_reset or emu_fail */
size_t emu_live(void);          /* number of unreleased blocks, streams, events, handles and graphs */
size_t emu_graph_launches(void);
size_t emu_gemms(void);                          /* number of products that cuBLAS computed */
extern size_t emu_memory;                        /* device memory in bytes */
extern size_t emu_few_rows, emu_pairs, emu_sums; /* the limits MOE_FEW_ROWS etc., which tests lower */
#ifdef __cplusplus
}
#endif

#if defined(__cplusplus)
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

/* ---- Types ---- */

typedef enum cudaError {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = EMU_OUT_OF_MEMORY,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInsufficientDriver = EMU_OLD_DRIVER,
    cudaErrorNoDevice = EMU_NO_DEVICE,
    cudaErrorInvalidDevice = 101,
    cudaErrorNoKernelImageForDevice = EMU_NO_IMAGE,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorLaunchFailure = EMU_LOST,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorUnknown = 999
} cudaError_t;
typedef enum { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 } cudaMemcpyKind;
typedef enum { cudaStreamCaptureModeThreadLocal = 1 } cudaStreamCaptureMode;
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2 };

typedef std::function<void()> emu_work;
struct emu_graph {
    std::vector<emu_work> work;
};
struct emu_stream {
    std::deque<emu_work> queue;
    emu_graph *capture;
};
struct emu_event {
    emu_stream *stream;
};
typedef emu_stream *cudaStream_t;
typedef emu_event *cudaEvent_t;
typedef emu_graph *cudaGraph_t, *cudaGraphExec_t;
struct cudaDeviceProp {
    char name[256];
    int major, minor;
};

typedef enum {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_ALLOC_FAILED = 3,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_EXECUTION_FAILED = 13,
    CUBLAS_STATUS_NOT_SUPPORTED = 15
} cublasStatus_t;
typedef enum { CUBLAS_OP_N, CUBLAS_OP_T } cublasOperation_t;
typedef enum { CUDA_R_8I = 3, CUDA_R_32I = 10 } cudaDataType_t;
typedef enum { CUBLAS_COMPUTE_32I = 70 } cublasComputeType_t;
typedef enum { CUBLAS_GEMM_DEFAULT = -1 } cublasGemmAlgo_t;
struct emu_blas {
    emu_stream *stream;
    void *workspace;
};
typedef emu_blas *cublasHandle_t;

struct alignas(16) int4 {
    int x, y, z, w;
};
struct emu_index {
    unsigned x, y, z;
};

#define MOE_STAGE_BYTES ((size_t)4096)
#define MOE_WORKSPACE ((size_t)1024)
#define MOE_FEW_ROWS emu_few_rows
#define MOE_PAIRS emu_pairs
#define MOE_SUMS emu_sums
#define MOE_HEAD ((size_t)64)
#define MOE_MARGIN ((size_t)1 << 16)

#define __global__ static
#define __host__
#define __device__
#define __shared__ static /* one block runs at a time */

static emu_index threadIdx, blockIdx, blockDim, gridDim;

/* ---- State ---- */

namespace emu {

static std::recursive_mutex mutex; /* sessions in several threads share the emulated device */
static int devices = 1;
static size_t calls, fail_at, graph_launches, gemms;
static int fail_code, fail_stay, blas_refuses;
static cudaError_t last;
static std::map<char *, size_t> device_blocks, host_blocks;
static size_t objects; /* number of streams, events, handles and graphs */

template <typename T> static T *make(T *object) {
    objects++;
    return object;
}
template <typename T> static void drop(T *object) {
    delete object;
    objects--;
}

[[noreturn]] static void stop(const char *what) {
    fprintf(stderr, "cuda_emu: %s\n", what);
    abort();
}

/* Count a call that can fail. Return the failure that emu_fail requested, or cudaSuccess. */
static cudaError_t due() {
    calls++;
    if (fail_at && (calls == fail_at || (fail_stay && calls > fail_at))) return last = (cudaError_t)fail_code;
    return cudaSuccess;
}

static bool inside(const std::map<char *, size_t> &blocks, const void *p, size_t bytes) {
    char *at = (char *)const_cast<void *>(p);
    auto found = blocks.upper_bound(at);
    if (found == blocks.begin()) return false;
    --found;
    return at + bytes <= found->first + found->second;
}

static size_t taken() {
    size_t bytes = 0;
    for (const auto &block : device_blocks) bytes += block.second;
    return bytes;
}

static void put(emu_stream *s, emu_work work) {
    if (s->capture) s->capture->work.push_back(work);
    else s->queue.push_back(work);
}

static void drain(emu_stream *s) {
    while (!s->queue.empty()) {
        emu_work work = s->queue.front();
        s->queue.pop_front();
        work();
    }
}

/* ---- Fibres ---- */

/* Push the callee-saved registers, store the stack pointer in *from, and resume another stack. swapcontext would query
 * the signal mask, which would take most of a test's time. */
#if defined(__x86_64__)
__asm__(".text\nemu_switch:\n"
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
        "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
        "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
enum { FRAME = 7, RETURN = 6, ABOVE = 33 }; /* words of a frame; index of the return address; words above the frame */
#elif defined(__aarch64__)
__asm__(".text\nemu_switch:\n"
        "sub sp, sp, #160\n"
        "stp x19, x20, [sp, #0]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\nstp x25, x26, [sp, #48]\n"
        "stp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\n"
        "stp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\nstp d12, d13, [sp, #128]\nstp d14, d15, [sp, #144]\n"
        "mov x9, sp\nstr x9, [x0]\nmov sp, x1\n"
        "ldp x19, x20, [sp, #0]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\nldp x25, x26, [sp, #48]\n"
        "ldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\n"
        "ldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\nldp d12, d13, [sp, #128]\nldp d14, d15, [sp, #144]\n"
        "add sp, sp, #160\nret\n");
enum { FRAME = 20, RETURN = 11, ABOVE = 32 };
#else
#error "cuda_emu.h can switch stacks on x86-64 and AArch64"
#endif
extern "C" void emu_switch(void **from, void *to) __asm__("emu_switch");

struct fibre {
    void *at; /* saved stack pointer */
    char *stack;
    unsigned thread;
    void *fake; /* fake stack of the address sanitizer */
};

enum { STACK = 256 << 10, MOST = 1024 };

struct scheduler {
    void *main;
    void *main_fake;
    const void *main_stack;
    size_t main_size;
    std::vector<fibre *> idle, waiting;
    fibre *current;
    unsigned next;
    const std::function<void()> *body;
    ~scheduler() {
        for (fibre *f : idle) {
            munmap(f->stack, STACK);
            delete f;
        }
    }
};
static scheduler sched;

static void to_fibre(fibre *f) {
    sched.current = f;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&sched.main_fake, f->stack, STACK);
#endif
    emu_switch(&sched.main, f->at);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(sched.main_fake, NULL, NULL);
#endif
}

static void to_main(fibre *f) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&f->fake, sched.main_stack, sched.main_size);
#endif
    emu_switch(&f->at, sched.main);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(f->fake, &sched.main_stack, &sched.main_size);
#endif
    threadIdx.x = f->thread;
}

/* Run a fibre: execute threads of the block as long as threads remain. */
static void live() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(NULL, &sched.main_stack, &sched.main_size);
#endif
    for (;;) {
        while (sched.next < blockDim.x) {
            threadIdx.x = sched.current->thread = sched.next++;
            (*sched.body)();
        }
        sched.idle.push_back(sched.current);
        to_main(sched.current);
    }
}

static fibre *make() {
    fibre *f = new fibre();
    f->stack = (char *)mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (f->stack == (char *)MAP_FAILED) stop("out of memory for a fibre");
    void **words = (void **)(void *)(f->stack + STACK) - ABOVE - FRAME; /* as if `live` had been called */
    words[RETURN] = (void *)live;
    f->at = words;
    return f;
}

static fibre *take() {
    if (sched.idle.empty()) return make();
    fibre *f = sched.idle.back();
    sched.idle.pop_back();
    return f;
}

static void run_block(const std::function<void()> &body, const char *name) {
    sched.body = &body;
    sched.next = 0;
    while (sched.next < blockDim.x) to_fibre(take());
    while (!sched.waiting.empty()) {
        std::vector<fibre *> phase;
        phase.swap(sched.waiting);
        if (phase.size() != blockDim.x) {
            fprintf(stderr, "cuda_emu: %s: %zu of %u threads wait at a barrier, but the others have ended\n", name,
                    phase.size(), blockDim.x);
            abort();
        }
        for (fibre *f : phase) to_fibre(f);
    }
}

} // namespace emu

static inline void __syncthreads() {
    emu::fibre *f = emu::sched.current;
    emu::sched.waiting.push_back(f);
    emu::to_main(f);
}

/* ---- Intrinsics ---- */

static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline uint32_t __float_as_uint(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
static inline float __uint_as_float(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline int __dp4a(int a, int b, int c) {
    int8_t x[4], y[4];
    memcpy(x, &a, 4);
    memcpy(y, &b, 4);
    for (int i = 0; i < 4; i++) c = (int)((uint32_t)c + (uint32_t)(x[i] * y[i]));
    return c;
}
template <class T> static inline T atomicAdd(T *at, T by) {
    const T old = *at;
    *at += by;
    return old;
}

/* ---- Launches ---- */

template <class... P, class... A>
static cudaError_t emu_launch(emu_stream *stream, size_t grid, size_t block, const char *name, void (*kernel)(P...),
                              A... arguments) {
    std::lock_guard<std::recursive_mutex> lock(emu::mutex);
    const cudaError_t code = emu::due();
    if (code != cudaSuccess) return code;
    if (grid == 0 || grid > 0x7fffffffu || block == 0 || block > emu::MOST || block % 32) {
        fprintf(stderr, "cuda_emu: %s: grid %zu, block %zu\n", name, grid, block);
        return emu::last = cudaErrorInvalidConfiguration;
    }
    std::tuple<P...> values(static_cast<P>(arguments)...);
    emu::put(stream, [=]() {
        const std::function<void()> body = [&]() { std::apply(kernel, values); };
        blockDim = { (unsigned)block, 1, 1 };
        gridDim = { (unsigned)grid, 1, 1 };
        threadIdx = { 0, 0, 0 };
        for (size_t b = 0; b < grid; b++) {
            blockIdx = { (unsigned)b, 0, 0 };
            emu::run_block(body, name);
        }
    });
    return cudaSuccess;
}

#define MOE_UNROLL
#define MOE_LAUNCH(d, kernel, grid, block, ...)                                                                  \
    do {                                                                                                         \
        if ((d)->status == MOE_OK)                                                                               \
            moe_check(d, emu_launch((d)->stream, (size_t)(grid), (size_t)(block), #kernel, kernel, __VA_ARGS__), \
                      #kernel);                                                                                  \
    } while (0)

/* ---- The runtime ---- */

#define EMU_CALL()                                              \
    std::lock_guard<std::recursive_mutex> emu_lock(emu::mutex); \
    const cudaError_t emu_due = emu::due();                     \
    if (emu_due != cudaSuccess) return emu_due

static inline const char *cudaGetErrorString(cudaError_t code) {
    switch (code) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorNoKernelImageForDevice: return "no kernel image is available for execution on the device";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorInvalidValue: return "invalid argument";
    default: return "another error";
    }
}
static inline cudaError_t cudaGetLastError() {
    const cudaError_t code = emu::last;
    emu::last = cudaSuccess;
    return code;
}
static inline cudaError_t cudaGetDeviceCount(int *n) {
    EMU_CALL();
    *n = emu::devices;
    return emu::devices ? cudaSuccess : cudaErrorNoDevice;
}
static inline cudaError_t cudaSetDevice(int index) {
    EMU_CALL();
    return index < emu::devices ? cudaSuccess : cudaErrorInvalidDevice;
}
static inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) {
    EMU_CALL();
    snprintf(p->name, sizeof p->name, "emulated");
    p->major = 9;
    p->minor = 0;
    return cudaSuccess;
}
static inline cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    EMU_CALL();
    *available = emu_memory - emu::taken();
    *total = emu_memory;
    return cudaSuccess;
}
static inline cudaError_t emu_allocate(std::map<char *, size_t> *blocks, void **out, size_t bytes) {
    if (posix_memalign(out, 256, bytes)) return cudaErrorMemoryAllocation;
    memset(*out, 0xa5, bytes);
    (*blocks)[(char *)*out] = bytes;
    return cudaSuccess;
}
static inline cudaError_t emu_free(std::map<char *, size_t> *blocks, void *p) {
    std::lock_guard<std::recursive_mutex> lock(emu::mutex);
    if (!blocks->erase((char *)p)) emu::stop("freeing a block that does not exist");
    free(p);
    return cudaSuccess;
}
static inline cudaError_t cudaMalloc(void **out, size_t bytes) {
    EMU_CALL();
    if (bytes > emu_memory - emu::taken()) return emu::last = cudaErrorMemoryAllocation;
    return emu_allocate(&emu::device_blocks, out, bytes);
}
static inline cudaError_t cudaMallocHost(void **out, size_t bytes) {
    EMU_CALL();
    return emu_allocate(&emu::host_blocks, out, bytes);
}
static inline cudaError_t cudaFree(void *p) { return emu_free(&emu::device_blocks, p); }
static inline cudaError_t cudaFreeHost(void *p) { return emu_free(&emu::host_blocks, p); }
static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, int) {
    EMU_CALL();
    *out = emu::make(new emu_stream{ {}, NULL });
    return cudaSuccess;
}
static inline cudaError_t cudaStreamDestroy(cudaStream_t s) {
    emu::drop(s);
    return cudaSuccess;
}
static inline cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    EMU_CALL();
    if (s->capture) return emu::last = cudaErrorStreamCaptureUnsupported;
    emu::drain(s);
    return cudaSuccess;
}
static inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, int) {
    EMU_CALL();
    *out = emu::make(new emu_event{ NULL });
    return cudaSuccess;
}
static inline cudaError_t cudaEventDestroy(cudaEvent_t e) {
    emu::drop(e);
    return cudaSuccess;
}
static inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    EMU_CALL();
    e->stream = s;
    return cudaSuccess;
}
static inline cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    EMU_CALL();
    if (e->stream) emu::drain(e->stream);
    return cudaSuccess;
}
static inline cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t s) {
    EMU_CALL();
    if (!emu::inside(emu::device_blocks, p, bytes)) return emu::last = cudaErrorInvalidValue;
    emu::put(s, [=]() { memset(p, value, bytes); });
    return cudaSuccess;
}
static inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                                          cudaStream_t s) {
    EMU_CALL();
    if (!emu::inside(emu::device_blocks, kind == cudaMemcpyHostToDevice ? to : from, bytes) ||
        !emu::inside(emu::host_blocks, kind == cudaMemcpyHostToDevice ? from : to,
                     bytes)) /* moe-cuda.cu uses only pinned host memory */
        return emu::last = cudaErrorInvalidValue;
    emu::put(s, [=]() { memcpy(to, from, bytes); });
    return cudaSuccess;
}
static inline cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                                            size_t width, size_t height, cudaMemcpyKind, cudaStream_t s) {
    EMU_CALL();
    if (width > to_pitch || width > from_pitch ||
        (height && !emu::inside(emu::device_blocks, from, (height - 1) * from_pitch + width)))
        return emu::last = cudaErrorInvalidValue;
    emu::put(s, [=]() {
        for (size_t i = 0; i < height; i++)
            memcpy((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width);
    });
    return cudaSuccess;
}
static inline cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
    EMU_CALL();
    s->capture = emu::make(new emu_graph());
    return cudaSuccess;
}
static inline cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *out) {
    *out = s->capture;
    s->capture = NULL;
    EMU_CALL();
    return cudaSuccess;
}
static inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long) {
    EMU_CALL();
    *out = emu::make(new emu_graph(*graph));
    return cudaSuccess;
}
static inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    emu::drop(graph);
    return cudaSuccess;
}
static inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return cudaGraphDestroy(graph); }
static inline cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t s) {
    EMU_CALL();
    emu::graph_launches++;
    for (const emu_work &work : graph->work) emu::put(s, work);
    return cudaSuccess;
}

/* ---- cuBLAS ---- */

#define EMU_BLAS_CALL()                                                                                       \
    std::lock_guard<std::recursive_mutex> emu_lock(emu::mutex);                                               \
    const cudaError_t emu_due = emu::due();                                                                   \
    if (emu_due != cudaSuccess)                                                                               \
    return emu_due == cudaErrorMemoryAllocation ? CUBLAS_STATUS_ALLOC_FAILED : CUBLAS_STATUS_EXECUTION_FAILED

static inline const char *cublasGetStatusString(cublasStatus_t code) {
    return code == CUBLAS_STATUS_ALLOC_FAILED      ? "CUBLAS_STATUS_ALLOC_FAILED"
           : code == CUBLAS_STATUS_INVALID_VALUE   ? "CUBLAS_STATUS_INVALID_VALUE"
           : code == CUBLAS_STATUS_NOT_SUPPORTED   ? "CUBLAS_STATUS_NOT_SUPPORTED"
           : code == CUBLAS_STATUS_NOT_INITIALIZED ? "CUBLAS_STATUS_NOT_INITIALIZED"
                                                   : "CUBLAS_STATUS_EXECUTION_FAILED";
}
static inline cublasStatus_t cublasCreate(cublasHandle_t *out) {
    EMU_BLAS_CALL();
    if (emu::blas_refuses == 1) return CUBLAS_STATUS_NOT_INITIALIZED;
    *out = emu::make(new emu_blas{ NULL, NULL });
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasDestroy(cublasHandle_t h) {
    emu::drop(h);
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasSetStream(cublasHandle_t h, cudaStream_t s) {
    EMU_BLAS_CALL();
    h->stream = s;
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasSetWorkspace(cublasHandle_t h, void *p, size_t bytes) {
    EMU_BLAS_CALL();
    if ((uintptr_t)p % 256 || !emu::inside(emu::device_blocks, p, bytes)) return CUBLAS_STATUS_INVALID_VALUE;
    h->workspace = p;
    return CUBLAS_STATUS_SUCCESS;
}

/* Multiply int8 matrices with the restrictions of the real function: layout T x N, m and k multiples of 4, sufficient
 * leading dimensions that are multiples of 4, pointers aligned to 4 bytes. */
static inline cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n,
                                          int k, const void *alpha, const void *a, cudaDataType_t ta_type, int lda,
                                          const void *b, cudaDataType_t tb_type, int ldb, const void *beta, void *c,
                                          cudaDataType_t tc_type, int ldc, cublasComputeType_t compute,
                                          cublasGemmAlgo_t) {
    EMU_BLAS_CALL();
    int32_t one, zero;
    memcpy(&one, alpha, 4);
    memcpy(&zero, beta, 4);
    if (m <= 0 || n <= 0 || k <= 0 || lda < k || ldb < k || ldc < m) return CUBLAS_STATUS_INVALID_VALUE;
    if (ta != CUBLAS_OP_T || tb != CUBLAS_OP_N || ta_type != CUDA_R_8I || tb_type != CUDA_R_8I ||
        tc_type != CUDA_R_32I || compute != CUBLAS_COMPUTE_32I || m % 4 || k % 4 || lda % 4 || ldb % 4 || ldc % 4 ||
        (uintptr_t)a % 4 || (uintptr_t)b % 4 || (uintptr_t)c % 4 || one != 1 || zero != 0)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (!emu::inside(emu::device_blocks, a, (size_t)(m - 1) * (size_t)lda + (size_t)k) ||
        !emu::inside(emu::device_blocks, b, (size_t)(n - 1) * (size_t)ldb + (size_t)k) ||
        !emu::inside(emu::device_blocks, c, ((size_t)(n - 1) * (size_t)ldc + (size_t)m) * 4))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (emu::blas_refuses == 2) return CUBLAS_STATUS_NOT_SUPPORTED;
    emu::gemms++;
    const int wrong = emu::blas_refuses == 3;
    emu::put(h->stream, [=]() {
        for (int j = 0; j < n; j++)
            for (int i = 0; i < m; i++) {
                const int8_t *x = (const int8_t *)a + (size_t)i * (size_t)lda,
                             *y = (const int8_t *)b + (size_t)j * (size_t)ldb;
                int32_t sum = wrong;
                for (int l = 0; l < k; l++) sum += x[l] * y[l];
                ((int32_t *)c)[(size_t)j * (size_t)ldc + (size_t)i] = sum;
            }
    });
    return CUBLAS_STATUS_SUCCESS;
}

/* ---- Controls ---- */

extern "C" {
size_t emu_few_rows = 32, emu_pairs = 1 << 14, emu_sums = 1 << 24, emu_memory = (size_t)1 << 30;
void emu_reset(int devices) {
    emu::devices = devices;
    emu::calls = emu::fail_at = emu::graph_launches = emu::gemms = 0;
    emu::blas_refuses = 0;
    emu::last = cudaSuccess;
}
void emu_fail(size_t nth, int code, int stay) {
    emu::calls = 0;
    emu::fail_at = nth;
    emu::fail_code = code;
    emu::fail_stay = stay;
}
void emu_refuse_blas(int what) { emu::blas_refuses = what; }
size_t emu_calls(void) { return emu::calls; }
size_t emu_live(void) { return emu::device_blocks.size() + emu::host_blocks.size() + emu::objects; }
size_t emu_graph_launches(void) { return emu::graph_launches; }
size_t emu_gemms(void) { return emu::gemms; }
}
#endif /* __cplusplus */
#endif /* CUDA_EMU_H */
