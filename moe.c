/* moe.c - inference for Mixture-of-Experts translation models. moe.h documents the interface.
 *
 * Each section uses only the sections above it.
 *
 *    1. Compiler               headers, features of the compiler and the processor
 *    2. Errors                 status codes, messages, checked arithmetic
 *    3. Memory                 allocator hooks, the layout that measures a session before it is allocated
 *    4. Platform               all calls to the operating system: files, mapped memory, processors, limits
 *    5. Graph data             the structs of a graph: nodes, ops, matrices
 *    6. Frames                 the arguments of a run
 *    7. Devices                the device interface
 *    8. Elementary functions   exp, log, tanh, sigmoid, gelu, softplus with equal results on every machine
 *    9. Number formats         byte layouts of F32, F16, BF16, Q8, Q8B, Q4, Q4M, Q3 and Q2 matrices
 *   10. Kernels: portable      reference kernels; the results of all others must match bit for bit
 *   11. Kernels: shared        float loops and quantised x86 tiles, compiled once per instruction set
 *   12. Kernels: AVX2          AVX2, AVX2 with VNNI
 *   13. Kernels: AVX-512       AVX-512 with VNNI
 *   14. Kernels: AMX           int8 tiles; the other kernels are from Kernels: AVX-512
 *   15. Kernels: NEON          NEON, NEON with dot products, NEON with i8mm
 *   16. Kernels: WebAssembly   128-bit SIMD
 *   17. Dispatch               choosing an instruction set at run time
 *   18. Threads                a thread pool, which splits work by output and never splits a sum
 *   19. Model file: reader     mapped bytes, bounded cursor, metadata, directory
 *   20. Model file: writer     atomic creation of files, writing of metadata and tensors
 *   21. Expert cache           choice of the experts to keep if memory cannot hold all
 *   22. Expert bank            memory slots for the experts of a streamed file, and threads that fill them
 *   23. Graph                  code shared by all ops
 *   24. Ops: rows              ops that compute a row from the same row of other nodes
 *   25. Ops: carried rows      rows that are kept between runs
 *   26. Ops: recurrences       LSTM cells and layers
 *   27. Ops: attention         context vectors
 *   28. Ops: gates             selection of the experts of each row
 *   29. Ops: experts           computation of experts, wherever they are stored
 *   30. Ops: output            logits, the best tokens
 *   31. Plan and run           table of ops, memory planning, execution of a graph
 *   32. Layers                 code shared by all layers: settings, weights, nodes
 *   33. Kinds of layers        LSTM, mixture, attention and the other kinds
 *   34. Models                 opening, saving and querying models; their encoders and decoders
 *   35. Beam search            hypotheses, penalties, pruning
 *   36. Session parameters     table of limits, defaults, presets and help texts
 *   37. Sessions: making       planning, allocating and binding a session
 *   38. Sessions: running      running a graph, alone or with other ranks
 *   39. Drafts                 how many guessed tokens to compute together
 *   40. Reranking              choosing among translations by the score of their source
 *   41. Sessions: places       segments and pages of rows that sentences carry
 *   42. Sessions: translating  request queue, continuous batching, public functions
 *   43. Sessions: classifying  classifying rows of numbers in batches
 *   44. Sessions: prompts      saving and loading the prompts that a session has computed
 *
 * Read these sections first (4,950 lines). They contain nearly all of the 204 functions (2,100 lines) that translate
 * one sentence, roughly in the order of the calls:
 *   Sessions: translating  moe_translate_ids, moe_refill, moe_admit; moe_encode; moe_step up to moe_deliver
 *   Sessions: places       moe_activate, moe_deactivate; moe_share_pages
 *   Reranking              moe_pull and moe_hand_over for every sentence; the rest only if `rerank` is not 0
 *   Sessions: running      moe_session_run: the encoder's or the decoder's graph (moe_build_encoder, moe_build_decoder)
 *   Graph data, Frames     moe_node, moe_graph, moe_frame
 *   Plan and run           moe_graph_run
 *   Graph, Threads         moe_for_rows, moe_pool_run
 *   Ops: rows, carried     moe_compute_embed_row, moe_compute_linear, moe_compute_gather_row
 *   Number formats         moe_quantise_row_q8, moe_matrix_code
 *   Kernels: portable      moe_linear_portable
 *   Ops: recurrences       moe_compute_lstm_layer in the encoder, moe_compute_lstm_step in the decoder
 *   Ops: gates, experts    moe_compute_gate, moe_compute_experts
 *   Ops: attention         moe_compute_attention_row
 *   Ops: output            moe_compute_output
 *   Beam search            moe_slot_begin, moe_slot_steps, moe_slot_results
 *
 * To add                start at
 *   an activation       moe_unary in Graph data, moe_unaryf in Elementary functions, moe_ffn_activations in Kinds of
 *                       layers; its name in tools/convert: moefile.py, reference.py, ACTIVATIONS of hf.py. Vector code
 *                       in Kernels: shared is optional. Experts of a mixture support only relu and gated swish
 *   an op               MOE_OPS in Graph data, functions in a section "Ops"; a kernel and a launcher in moe-cuda.cu
 *   a kind of layer     Layers; its banner lists the places
 *   a number format     moe_type in moe.h, moe_formats in Number formats (its comment lists the rest), TYPES in
 *                       moefile.py
 *   an instruction set  MOE_ISAS above Dispatch, and a section like Kernels: AVX2
 *   search rules        moe_rules in moe.h, moe_rule_sets in Beam search; a preset in Session parameters
 *   a decoding option   Session parameters; its banner lists the places
 *   storage of experts  Ops: experts; its banner says how the bytes of an expert are located
 *
 * To list the sections: grep -n '^/\* ====' moe.c. Comments cite them by title.
 *
 * Notation: T packed source tokens, R live hypotheses (rows), D model width, H LSTM hidden, P LSTM output (projection),
 * E experts, K experts selected per token, A attention size, V vocabulary.
 *
 * Results are bit-identical on every machine. All kernels below follow three rules to guarantee this:
 *   - a float sum is computed in 16 lanes (lane l adds elements l, l+16, ... in ascending order), which are added
 *     by a fixed tree; products and sums are rounded separately (no fused multiply-add);
 *   - products of quantised numbers are integers, so the order of their sum does not matter; one float expression
 *     scales the sum. If the file sets activation.block, activations have a scale for every 64 columns: integer sums
 *     within each block are scaled, then added as floats in ascending order of blocks;
 *   - an output element is computed by one thread from its own row only.
 *
 * Pitfalls (each has caused bugs): LSTM gate order is i f g o here, but i j f o in TensorFlow; thresholds apply to the
 * softmax over ALL experts, while weights are renormalised over the selected ones; empty masks are common; a token may
 * select far more than K experts; Q8 matrices are padded with zeros to multiples of 64 columns and 16 rows.
 */

/* moe-cuda.cu includes this file to use Graph data, Frames, Devices, Elementary functions, Expert cache, Beam search
 * and the parts of Platform and Errors outside MOE_HOST. It first includes moe.h and the system headers and defines
 * MOE_SHARED, the qualifier of every shared function. moe.c also includes itself, see Kernels: shared. */
#ifndef MOE_ISA
#ifdef MOE_SHARED
#define MOE_HOST 0
#else
#define MOE_HOST 1
#define MOE_SHARED static inline MOE_UNUSED /* devices use only some of these functions */
#endif

/* ==== 1. Compiler =============================================================================================
 * Headers and the features of the compiler and the processor. */

#if defined(__GNUC__) || defined(__clang__)
#define MOE_INLINE static inline __attribute__((always_inline, unused))
#define MOE_UNUSED __attribute__((unused))
#if defined(_WIN32) && !defined(__clang__)
#define MOE_PRINTF(fmt, args) __attribute__((format(gnu_printf, fmt, args))) /* see __USE_MINGW_ANSI_STDIO */
#else
#define MOE_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#endif
#else
#define MOE_INLINE static inline
#define MOE_UNUSED
#define MOE_PRINTF(fmt, args)
#endif

#if MOE_HOST

/* The operating system: Windows, WebAssembly (WASI), else POSIX. */
#if defined(_WIN32)
#define MOE_WINDOWS 1
#define __USE_MINGW_ANSI_STDIO 1 /* %zu */
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#else
#define MOE_WINDOWS 0
#if !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L
#endif
#if !defined(_FILE_OFFSET_BITS)
#define _FILE_OFFSET_BITS 64 /* 32-bit systems */
#endif
#endif
#if defined(__wasm__)
#define MOE_WASM 1
#else
#define MOE_WASM 0
#endif
#define MOE_SIGNALS (!MOE_WINDOWS && !MOE_WASM)
#if defined(__linux__) && !defined(_DEFAULT_SOURCE)
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS, madvise */
#endif
#if defined(__APPLE__) && !defined(_DARWIN_C_SOURCE)
#define _DARWIN_C_SOURCE
#endif

#include "moe.h"

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if MOE_WINDOWS
#include <io.h>
#include <windows.h>
#undef far
#else
#include <sys/stat.h>
#include <unistd.h>
#endif
#if MOE_SIGNALS
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#endif

#if MOE_WASM && !defined(_REENTRANT) /* one thread: locks do nothing, and no thread can be created */
#define pthread_create(thread, attributes, fn, arg) ((void)(fn), (void)(arg), ENOTSUP)
#define pthread_join(thread, result) ((void)(thread))
#define pthread_mutex_init(mutex, attributes) ((void)(mutex), 0)
#define pthread_mutex_destroy(mutex) ((void)(mutex))
#define pthread_mutex_lock(mutex) ((void)(mutex))
#define pthread_mutex_unlock(mutex) ((void)(mutex))
#define pthread_cond_init(condition, attributes) ((void)(condition), 0)
#define pthread_cond_destroy(condition) ((void)(condition))
#define pthread_cond_wait(condition, mutex) ((void)(condition), (void)(mutex))
#define pthread_cond_broadcast(condition) ((void)(condition))
#endif

#if defined(__FAST_MATH__)
#error "moe.c keeps bit-exact results: build it without -ffast-math"
#endif
#if defined(FLT_EVAL_METHOD) && FLT_EVAL_METHOD != 0
#error "moe.c needs float arithmetic in float (on 32-bit x86 build with -msse2 -mfpmath=sse)"
#endif
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "moe.c maps little-endian files: big-endian machines are not supported"
#endif

/* Disable fused multiply-add, because a * b + c must round twice. gcc ignores the standard pragma but has an option. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("-ffp-contract=off")
#endif

/* MOE_PORTABLE builds only the portable kernels, which makes compilation five times as fast. MOE_ONLY_ISA=avx2 (or
 * another instruction set that moe_isa_names lists) builds these and the kernels of one instruction set. WebAssembly's
 * kernels need the compiler's option -msimd128, because a module cannot ask its engine for SIMD. */
#if (defined(__GNUC__) || defined(__clang__)) && defined(__x86_64__) && !defined(MOE_PORTABLE)
#define MOE_X86 1
#include <cpuid.h>
#include <immintrin.h>
#else
#define MOE_X86 0
#endif

/* The i8mm intrinsics require gcc 10. */
#if defined(__aarch64__) && (defined(__linux__) || defined(__APPLE__)) && !defined(MOE_PORTABLE) && \
    (defined(__clang__) || (defined(__GNUC__) && __GNUC__ >= 10))
#define MOE_ARM 1
#include <arm_neon.h>
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#else
#include <sys/sysctl.h>
#endif
#else
#define MOE_ARM 0
#endif

#if defined(__wasm_simd128__) && !defined(MOE_PORTABLE)
#define MOE_SIMD128 1
#include <wasm_simd128.h>
#else
#define MOE_SIMD128 0
#endif

/* Flag for reads that bypass the page cache, or 0. Without _GNU_SOURCE, glibc defines only the name __O_DIRECT. */
#if defined(O_DIRECT)
#define MOE_O_DIRECT O_DIRECT
#elif defined(__O_DIRECT)
#define MOE_O_DIRECT __O_DIRECT
#else
#define MOE_O_DIRECT 0
#endif

#define MOE_COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* Hint to the processor that this thread is spinning. */
MOE_INLINE void moe_pause(void) {
#if MOE_X86
    _mm_pause();
#elif defined(__aarch64__) && (defined(__GNUC__) || defined(__clang__))
    __asm__ volatile("yield");
#endif
}

#endif /* MOE_HOST */

MOE_SHARED size_t moe_min(size_t a, size_t b) { return a < b ? a : b; }
MOE_SHARED size_t moe_max(size_t a, size_t b) { return a > b ? a : b; }
MOE_SHARED size_t moe_round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
MOE_SHARED size_t moe_divide_up(size_t n, size_t by) { return (n + by - 1) / by; }

/* ==== 2. Errors ===============================================================================================
 * Error reporting. Invariants: a function that does not return MOE_OK has filled in the error, with a message that
 * names the cause; only the first error of a call is reported. */

MOE_PRINTF(4, 5)
static moe_status moe_fail(moe_error *error, moe_status code, const char *where, const char *format, ...) {
    if (error) {
        va_list args;
        error->code = code;
        snprintf(error->where, sizeof error->where, "%s", where);
        va_start(args, format);
        vsnprintf(error->message, sizeof error->message, format, args);
        va_end(args);
    }
    return code;
}

#if MOE_HOST

const char *moe_version(void) { return MOE_VERSION; }
int moe_version_number(void) { return MOE_VERSION_NUMBER; }

const char *moe_status_name(moe_status status) {
    static const char *const names[] = { "ok",          "argument", "memory",  "io",        "format",
                                         "unsupported", "limit",    "numeric", "cancelled", "device" };
    return (unsigned)status < MOE_COUNT(names) ? names[status] : "unknown";
}

/* Return from the function with MOE_ERROR_code and a message. */
#define MOE_FAIL(code, where, ...) return moe_fail(error, MOE_ERROR_##code, where, __VA_ARGS__)

#define MOE_TRY(call)                                        \
    do {                                                     \
        moe_status moe_try_status = (call);                  \
        if (moe_try_status != MOE_OK) return moe_try_status; \
    } while (0)

/* Multiply sizes from a file. Returns 0 and leaves *out unchanged on overflow. */
static int moe_multiply(uint64_t a, uint64_t b, uint64_t *out) {
    if (b && a > UINT64_MAX / b) return 0;
    *out = a * b;
    return 1;
}

/* ==== 3. Memory ===============================================================================================
 * Memory allocation. Invariants: memory is released with its exact size; sessions allocate only in moe_session_new. */

static void *moe_default_allocate(void *user, size_t bytes) {
    (void)user;
    return malloc(bytes);
}
static void moe_default_release(void *user, void *old, size_t old_bytes) {
    (void)user, (void)old_bytes;
    free(old);
}

static moe_allocator moe_allocator_or_default(const moe_allocator *a) {
    if (a && a->allocate && a->reallocate && a->release) return *a;
    return (moe_allocator){ moe_default_allocate, NULL, moe_default_release, NULL };
}

static void *moe_allocate_zeroed(const moe_allocator *a, size_t bytes) {
    void *memory = a->allocate(a->user, bytes ? bytes : 1);
    if (memory) memset(memory, 0, bytes);
    return memory;
}

static void moe_release(const moe_allocator *a, void *memory, size_t bytes) {
    if (memory) a->release(a->user, memory, bytes ? bytes : 1);
}

/* Copy the caller's struct, of size `size` in the caller's version of moe.h, to this version's struct. Missing members
 * become 0; members unknown to this version must be 0. */
enum { MOE_LARGEST_STRUCT = 4096 };
static moe_status moe_take_struct(void *own, size_t own_size, const void *given, size_t size, const char *name,
                                  moe_error *error) {
    int known = !given || size <= MOE_LARGEST_STRUCT;
    memset(own, 0, own_size);
    if (given && known) memcpy(own, given, moe_min(size, own_size));
    for (size_t i = own_size; given && known && i < size; i++) known = !((const char *)given)[i];
    if (known) return MOE_OK;
    MOE_FAIL(ARGUMENT, name,
             "%s has %zu bytes, including members that are unknown to this version of the library, " MOE_VERSION
             ": the program was compiled with another moe.h",
             name, size);
}

static void moe_give_struct(void *out, size_t size, const void *own, size_t own_size) {
    if (size > own_size) memset((char *)out + own_size, 0, size - own_size);
    memcpy(out, own, moe_min(size, own_size));
}

/* A bump allocator of 64-byte aligned pieces of one block. If base is NULL, it only measures the block. */
typedef struct moe_layout {
    char *base;
    size_t used;
    int overflow;
} moe_layout;

static void *moe_carve(moe_layout *layout, size_t count, size_t size) {
    uint64_t bytes;
    void *piece = layout->base ? layout->base + layout->used : NULL;
    if (!moe_multiply(count, size, &bytes) || bytes > (SIZE_MAX >> 1) - 64 - layout->used) {
        layout->overflow = 1;
        return NULL;
    }
    layout->used += moe_round_up((size_t)bytes, 64);
    return piece;
}

/* ==== 4. Platform =============================================================================================
 * All calls to the operating system except those of C and of POSIX threads. There are variants for POSIX, Windows and
 * WebAssembly (WASI); comments for all variants precede the first. Paths are UTF-8. Invariant: later sections contain
 * no code for a single system. */

static uint64_t moe_nanoseconds(void) {
    struct timespec now = { 0, 0 };
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Return a - b, or 0 if b is larger. */
static uint64_t moe_less(uint64_t a, uint64_t b) { return a - (a < b ? a : b); }

/* ---- Files for reading ---- */

/* The properties of an open file that change if another process writes to the file. */
typedef struct moe_file_status {
    uint64_t bytes;
    int64_t modified[2]; /* time of the last change: seconds and nanoseconds */
} moe_file_status;

#if MOE_WINDOWS

/* Set errno to the nearest equivalent of the thread's last error. Returns -1. */
static int moe_windows_error(void) {
    static const struct {
        DWORD system;
        int number;
    } known[] = {
        { ERROR_FILE_NOT_FOUND, ENOENT },   { ERROR_PATH_NOT_FOUND, ENOENT },    { ERROR_INVALID_NAME, ENOENT },
        { ERROR_ACCESS_DENIED, EACCES },    { ERROR_SHARING_VIOLATION, EACCES }, { ERROR_LOCK_VIOLATION, EACCES },
        { ERROR_USER_MAPPED_FILE, EACCES }, { ERROR_FILE_EXISTS, EEXIST },       { ERROR_ALREADY_EXISTS, EEXIST },
        { ERROR_DISK_FULL, ENOSPC },        { ERROR_HANDLE_DISK_FULL, ENOSPC },  { ERROR_NOT_ENOUGH_MEMORY, ENOMEM },
        { ERROR_OUTOFMEMORY, ENOMEM },      { ERROR_COMMITMENT_LIMIT, ENOMEM },
    };
    const DWORD error = GetLastError();
    errno = EIO;
    for (size_t i = 0; i < MOE_COUNT(known); i++)
        if (known[i].system == error) errno = known[i].number;
    return -1;
}

enum { MOE_WIDE_PATH = 4096 };
typedef wchar_t moe_wide_path[MOE_WIDE_PATH];

/* Convert a path to UTF-16. Returns 0 and sets errno if it is not UTF-8 or is too long. */
static int moe_widen(const char *path, moe_wide_path wide) {
    const int n = MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, wide, MOE_WIDE_PATH);
    if (!n) errno = GetLastError() == ERROR_INSUFFICIENT_BUFFER ? ENAMETOOLONG : EILSEQ;
    return n > 0;
}

static HANDLE moe_handle(int fd) { return (HANDLE)_get_osfhandle(fd); }

/* Return a descriptor for a handle, which it takes over; -1 on failure. */
static int moe_descriptor_of(HANDLE handle, int flags) {
    const int fd = handle == INVALID_HANDLE_VALUE ? moe_windows_error() : _open_osfhandle((intptr_t)handle, flags);
    if (fd < 0 && handle != INVALID_HANDLE_VALUE) CloseHandle(handle);
    return fd;
}

/* Open a file for reading. Returns its descriptor; -1 and errno on failure. */
static int moe_open_path(const char *path) {
    moe_wide_path wide;
    if (!moe_widen(path, wide)) return -1;
    return moe_descriptor_of(CreateFileW(wide, GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE,
                                         NULL, OPEN_EXISTING, FILE_FLAG_BACKUP_SEMANTICS, NULL), /* also folders */
                             _O_RDONLY | _O_BINARY | _O_NOINHERIT);
}

static int moe_share_descriptor(int fd) { return _dup(fd); }
static void moe_close_descriptor(int fd) { _close(fd); }

/* Get the status of a file. Returns 0 if it is not a regular file. */
static int moe_file_state(int fd, moe_file_status *out) {
    BY_HANDLE_FILE_INFORMATION info;
    if (GetFileType(moe_handle(fd)) != FILE_TYPE_DISK || !GetFileInformationByHandle(moe_handle(fd), &info) ||
        info.dwFileAttributes & FILE_ATTRIBUTE_DIRECTORY)
        return 0;
    *out = (moe_file_status){ (uint64_t)info.nFileSizeHigh << 32 | info.nFileSizeLow,
                              { info.ftLastWriteTime.dwHighDateTime, info.ftLastWriteTime.dwLowDateTime } };
    return 1;
}

/* Read at most 1 GB at an offset. Returns the number of bytes, 0 at the end of the file; -1 and errno on failure. */
static int64_t moe_read_some(int fd, char *data, size_t bytes, uint64_t from) {
    OVERLAPPED at = { .Offset = (DWORD)from, .OffsetHigh = (DWORD)(from >> 32) };
    DWORD got = 0;
    if (ReadFile(moe_handle(fd), data, (DWORD)moe_min(bytes, (size_t)1 << 30), &got, &at)) return got;
    return GetLastError() == ERROR_HANDLE_EOF ? 0 : moe_windows_error();
}

/* Let reads bypass the page cache or not. Returns 1 on success. */
static int moe_bypass_cache(int fd, int on) { return (void)fd, (void)on, 0; }
static void moe_forget_pages(int fd, uint64_t from, size_t bytes) { (void)fd, (void)from, (void)bytes; }

#else

static int moe_open_path(const char *path) {
    return open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* O_NONBLOCK: do not wait for a FIFO's writer */
}

static int moe_share_descriptor(int fd) {
#if defined(F_DUPFD_CLOEXEC)
    return fcntl(fd, F_DUPFD_CLOEXEC, 0);
#else
    errno = ENOTSUP;
    return (void)fd, -1;
#endif
}
static void moe_close_descriptor(int fd) { close(fd); }

static int moe_file_state(int fd, moe_file_status *out) {
    struct stat s;
    if (fstat(fd, &s) != 0 || !S_ISREG(s.st_mode) || s.st_size < 0) return 0;
#if defined(__APPLE__)
    const struct timespec time = s.st_mtimespec;
#else
    const struct timespec time = s.st_mtim;
#endif
    *out = (moe_file_status){ (uint64_t)s.st_size, { time.tv_sec, time.tv_nsec } };
    return 1;
}

static int64_t moe_read_some(int fd, char *data, size_t bytes, uint64_t from) {
    return pread(fd, data, moe_min(bytes, (size_t)1 << 30), (off_t)from);
}

static int moe_bypass_cache(int fd, int on) {
#if defined(F_NOCACHE)
    return fcntl(fd, F_NOCACHE, on) != -1;
#elif MOE_O_DIRECT
    const int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && fcntl(fd, F_SETFL, on ? flags | MOE_O_DIRECT : flags & ~MOE_O_DIRECT) >= 0;
#else
    return (void)fd, (void)on, 0;
#endif
}

/* Tell the system that these pages of a file will not be read again. */
static void moe_forget_pages(int fd, uint64_t from, size_t bytes) {
#if defined(POSIX_FADV_DONTNEED)
    posix_fadvise(fd, (off_t)from, (off_t)bytes, POSIX_FADV_DONTNEED); /* best effort */
#else
    (void)fd, (void)from, (void)bytes;
#endif
}

#endif

/* Read up to `bytes` bytes at offset `from`; *got is smaller only at the end of the file. Returns 0 or errno. */
static int moe_read_at(int fd, char *data, size_t bytes, uint64_t from, size_t *got) {
    for (*got = 0; *got < bytes;) {
        const int64_t n = moe_read_some(fd, data + *got, bytes - *got, from + *got);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return errno;
        if (!n) break;
        *got += (size_t)n;
    }
    return 0;
}

/* ---- Mapped memory ---- */

/* Request huge pages for memory not yet touched. They make direct I/O 1.5 times as fast, since it pins fewer pages. */
static void moe_advise_huge_pages(char *memory, size_t bytes) {
#if defined(MADV_HUGEPAGE)
    enum { HUGE_PAGE = 1 << 21 };
    const size_t skip = (HUGE_PAGE - (uintptr_t)memory % HUGE_PAGE) % HUGE_PAGE;
    if (bytes > skip) madvise(memory + skip, bytes - skip, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

#if MOE_WINDOWS

/* Return the alignment of the offsets of moe_map_file. */
static size_t moe_map_alignment(void) {
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return info.dwAllocationGranularity;
}

/* Map `bytes` of zeroed memory. Returns NULL and sets errno on failure. */
static void *moe_map_memory(size_t bytes) {
    void *data = VirtualAlloc(NULL, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
    if (!data) moe_windows_error();
    return data;
}

/* Map `bytes` bytes of a file at an aligned offset for reading. Returns NULL and sets errno on failure. */
static void *moe_map_file(int fd, uint64_t from, size_t bytes) {
    HANDLE mapping = CreateFileMappingW(moe_handle(fd), NULL, PAGE_READONLY, 0, 0, NULL);
    void *data = mapping ? MapViewOfFile(mapping, FILE_MAP_READ, (DWORD)(from >> 32), (DWORD)from, bytes) : NULL;
    if (!data) moe_windows_error();
    if (mapping) CloseHandle(mapping);
    return data;
}

/* Make mapped memory read-only, so that a wrong pointer cannot change a model. */
static void moe_protect(void *data, size_t bytes) {
    DWORD old;
    VirtualProtect(data, bytes, PAGE_READONLY, &old);
}

static void moe_unmap(void *data, size_t bytes) {
    MEMORY_BASIC_INFORMATION info;
    (void)bytes;
    if (VirtualQuery(data, &info, sizeof info) && info.Type == MEM_MAPPED) UnmapViewOfFile(data);
    else VirtualFree(data, 0, MEM_RELEASE);
}

#elif MOE_WASM /* the systems cannot map files */

static size_t moe_map_alignment(void) { return 1; }

static void *moe_map_memory(size_t bytes) { return aligned_alloc(64, moe_round_up(bytes, 64)); }

static void *moe_map_file(int fd, uint64_t from, size_t bytes) {
    char *data = moe_map_memory(bytes);
    size_t got = 0;
    const int code = data ? moe_read_at(fd, data, bytes, from, &got) : ENOMEM;
    if (!code && got == bytes) return data;
    free(data);
    errno = code ? code : EIO;
    return NULL;
}

static void moe_protect(void *data, size_t bytes) { (void)data, (void)bytes; }
static void moe_unmap(void *data, size_t bytes) { (void)bytes, free(data); }

#else

static size_t moe_map_alignment(void) { return (size_t)sysconf(_SC_PAGESIZE); }

static void *moe_map_memory(size_t bytes) {
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return NULL;
    moe_advise_huge_pages(data, bytes);
    return data;
}

static void *moe_map_file(int fd, uint64_t from, size_t bytes) {
    void *data = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, fd, (off_t)from);
    return data == MAP_FAILED ? NULL : data;
}

static void moe_protect(void *data, size_t bytes) { mprotect(data, bytes, PROT_READ); }
static void moe_unmap(void *data, size_t bytes) { munmap(data, bytes); }

#endif

/* ---- Processors and limits ---- */

#if MOE_WINDOWS || MOE_WASM

/* Return the size of the first-level data cache in bytes; 0 if unknown. */
static size_t moe_l1_bytes(void) { return 0; }

/* Return the number of processors that this process may use. */
static int moe_processors(void) {
#if MOE_WINDOWS
    DWORD_PTR allowed = 0, all = 0;
    int n = 0;
    GetProcessAffinityMask(GetCurrentProcess(), &allowed, &all);
    for (; allowed && allowed != all; allowed &= allowed - 1) n++;
    if (!n) n = (int)GetActiveProcessorCount(ALL_PROCESSOR_GROUPS);
    return n < 1 ? 1 : n > MOE_MAX_THREADS ? MOE_MAX_THREADS : n;
#else
    return 1;
#endif
}

/* Return the number of bytes that the system can provide without swapping. `held` bytes of a model are in memory. */
static uint64_t moe_available_memory(uint64_t held) {
    (void)held;
#if MOE_WINDOWS
    MEMORYSTATUSEX memory = { .dwLength = sizeof memory };
    if (GlobalMemoryStatusEx(&memory)) return memory.ullAvailPhys;
#endif
    return 0;
}

#else

static size_t moe_l1_bytes(void) {
#if defined(_SC_LEVEL1_DCACHE_SIZE)
    const long bytes = sysconf(_SC_LEVEL1_DCACHE_SIZE);
    return bytes > 0 ? (size_t)bytes : 0;
#else
    return 0;
#endif
}

#ifndef MOE_SYSTEM
#define MOE_SYSTEM "" /* prefix of the paths of system files, for tests */
#endif

/* Read a system file, such as one in /proc, to text[size]. Returns text, which is "" if the file cannot be read. */
static const char *moe_system_text(const char *path, char *text, size_t size) {
    const int fd = moe_open_path(path);
    size_t got = 0;
    if (fd >= 0 && moe_read_at(fd, text, size - 1, 0, &got)) got = 0;
    if (fd >= 0) moe_close_descriptor(fd);
    text[got] = 0;
    return text;
}

/* The files that contain a limit of a control group: version 2; version 1; version 1's divisor or NULL. */
typedef struct moe_group_key {
    const char *controller; /* name in version 1, which has a folder for each controller */
    const char *files[3];
} moe_group_key;
static const moe_group_key moe_group_memory = { "memory", { "memory.max", "memory.limit_in_bytes", NULL } },
                           moe_group_processors = { "cpu", { "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us" } };

/* Read a limit of the control group with the path group[length]: a number, divided by the one after it or in a separate
 * file and rounded up. Return UINT64_MAX if there is no limit. */
static uint64_t moe_group_number(const moe_group_key *key, int old, const char *group, int length) {
    char path[4096 + 64], text[64], *end = text;
    const char *controller = old ? key->controller : "";
    snprintf(path, sizeof path, MOE_SYSTEM "/sys/fs/cgroup/%s%.*s/%s", controller, length, group, key->files[old]);
    const int is_number = *moe_system_text(path, text, sizeof text) >= '0' && *text <= '9';
    const uint64_t number = is_number ? strtoull(text, &end, 10) : UINT64_MAX;
    uint64_t by = strtoull(end, NULL, 10);
    if (old && key->files[2]) {
        snprintf(path, sizeof path, MOE_SYSTEM "/sys/fs/cgroup/%s%.*s/%s", controller, length, group, key->files[2]);
        by = strtoull(moe_system_text(path, text, sizeof text), NULL, 10);
    }
    return is_number && by ? number / by + (number % by != 0) : number;
}

/* Return 1 if the comma-separated list [list, end) contains a controller. */
static int moe_group_has(const char *list, const char *end, const char *controller) {
    const size_t n = strlen(controller);
    for (; list < end; list += strcspn(list, ",:") + 1)
        if (strcspn(list, ",:") == n && memcmp(list, controller, n) == 0) return 1;
    return 0;
}

/* Return the lowest limit of the process's control groups (version 2 or 1), or UINT64_MAX. */
static uint64_t moe_group_limit(const moe_group_key *key) {
    char groups[4096];
    uint64_t least = UINT64_MAX;
    const char *line = moe_system_text(MOE_SYSTEM "/proc/self/cgroup", groups, sizeof groups), *list, *begin;
    for (; (list = strchr(line, ':')) && (begin = strchr(++list, ':')); line = begin + strcspn(begin, "\n")) {
        const int old = list < begin++;
        if (old && !moe_group_has(list, begin, key->controller)) continue;
        for (int length = (int)strcspn(begin, "\n"); length >= 0; length--) { /* the group and its parents */
            if (length && begin[length] != '/' && begin[length] != '\n') continue;
            const uint64_t limit = moe_group_number(key, old, begin, length);
            if (limit < least) least = limit;
        }
    }
    return least;
}

/* Return the number of processors available to this thread: those online and in its affinity mask, limited by the quota
 * of its control groups, rounded up. */
static int moe_processors(void) {
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    uint64_t n = online < 1 ? 1 : (uint64_t)online, allowed = 0;
#if defined(__linux__)
    uint64_t mask[1024]; /* enough for any kernel; the function sched_getaffinity requires _GNU_SOURCE */
    const long bytes = syscall(SYS_sched_getaffinity, 0, sizeof mask, mask);
    for (long i = 0; i < bytes / 8; i++)
        for (; mask[i]; mask[i] &= mask[i] - 1) allowed++;
    const uint64_t quota = moe_group_limit(&moe_group_processors);
    n = allowed && allowed < n ? allowed : n;
    n = quota < n ? quota : n;
#endif
    return n < 1 ? 1 : n > MOE_MAX_THREADS ? MOE_MAX_THREADS : (int)n;
}

/* Return the number of bytes that the system can provide without swapping, within the limits of this process, of which
 * `held` bytes hold an open model. */
static uint64_t moe_available_memory(uint64_t held) {
    char text[4096];
    const char *line = strstr(moe_system_text("/proc/meminfo", text, sizeof text), "MemAvailable:");
    const uint64_t group = moe_group_limit(&moe_group_memory);
    struct rlimit limit = { RLIM_INFINITY, RLIM_INFINITY };
    uint64_t all = line ? strtoull(line + 13, NULL, 10) << 10 : 0;
#if defined(_SC_PHYS_PAGES)
    if (!line) all = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE) - held;
#endif
    getrlimit(RLIMIT_AS, &limit);
    if (group < UINT64_MAX && moe_less(group, held) < all) all = moe_less(group, held);
    if (limit.rlim_cur != RLIM_INFINITY && moe_less(limit.rlim_cur, held) < all) all = moe_less(limit.rlim_cur, held);
    return all;
}

#endif

/* Return the number of bytes available for experts, given an open model that holds `held` bytes and a session that
 * needs `rest` bytes: the memory that the system can provide without swapping, less 1 GB. */
static size_t moe_spare_memory(uint64_t held, size_t rest) {
    const uint64_t spare = moe_less(moe_available_memory(held), rest + ((uint64_t)1 << 30));
    return spare < SIZE_MAX ? (size_t)spare : SIZE_MAX;
}

#if !defined(MOE_NO_WRITER)

/* ---- Files for writing ----
 * A file is written under a temporary name in the target's folder and renamed when it is complete. With `partial`, the
 * name is the target's with .partial, and the file may exist. */

enum { MOE_PATH_BYTES = 4096 };

typedef struct moe_output {
    const char *path; /* as given by the caller */
    int partial;
    int fd;      /* -1 if not open */
    uint64_t at; /* offset of the next write */
#if MOE_SIGNALS
    sigset_t held; /* signals blocked until the file is complete */
#endif
    char target[MOE_PATH_BYTES], temporary[MOE_PATH_BYTES]; /* `path` with links resolved; "" if not created */
} moe_output;

/* Set o->temporary to a new name in the folder of o->target, or to the name of the partial file. Returns 0 and sets
 * errno if it is too long. */
static int moe_name_temporary(moe_output *o, long process) {
    const char *slash = strrchr(o->target, '/');
#if MOE_WINDOWS
    for (const char *c = o->target; *c; c++)
        if (*c == '\\' || *c == ':') slash = slash > c ? slash : c;
#endif
    const int folder = slash ? (int)(slash + 1 - o->target) : 0;
    errno = ENAMETOOLONG;
    if (o->partial)
        return snprintf(o->temporary, sizeof o->temporary, "%s.partial", o->target) < (int)sizeof o->temporary;
    return snprintf(o->temporary, sizeof o->temporary, "%.*s.moe-%ld-%09ld", folder, o->target, process,
                    (long)(moe_nanoseconds() % 1000000000u)) < (int)sizeof o->temporary;
}

#if MOE_SIGNALS

static const int moe_ending_signals[] = { SIGHUP, SIGINT, SIGTERM };

/* Block signals in this thread that would end the process and leave a temporary file. Signals that the program handles,
 * ignores or blocks are unchanged. */
static void moe_hold_signals(moe_output *o) {
    struct sigaction action;
    sigset_t blocked;
    sigemptyset(&o->held);
    if (pthread_sigmask(SIG_SETMASK, NULL, &blocked) != 0) return;
    for (size_t i = 0; i < MOE_COUNT(moe_ending_signals); i++)
        if (!sigismember(&blocked, moe_ending_signals[i]) && sigaction(moe_ending_signals[i], NULL, &action) == 0 &&
            action.sa_handler == SIG_DFL)
            sigaddset(&o->held, moe_ending_signals[i]);
    pthread_sigmask(SIG_BLOCK, &o->held, NULL);
}

static void moe_release_signals(const moe_output *o) { pthread_sigmask(SIG_UNBLOCK, &o->held, NULL); }

static int moe_signal_waits(const moe_output *o) {
    sigset_t waiting;
    sigemptyset(&waiting);
    sigpending(&waiting);
    for (size_t i = 0; i < MOE_COUNT(moe_ending_signals); i++)
        if (sigismember(&o->held, moe_ending_signals[i]) && sigismember(&waiting, moe_ending_signals[i])) return 1;
    return 0;
}

#else /* Windows deletes the temporary file of a process that ends */

static void moe_hold_signals(const moe_output *o) { (void)o; }
static void moe_release_signals(const moe_output *o) { (void)o; }
static int moe_signal_waits(const moe_output *o) { return (void)o, 0; }

#endif

#if MOE_WINDOWS

/* Find the target of a path, and check that a file of `bytes` bytes may replace it. Returns 0, errno, or -1 if the
 * target is not a regular file. */
static int moe_find_target(moe_output *o, uint64_t bytes) {
    moe_wide_path wide;
    (void)bytes;
    if (!*o->path) return ENOENT;
    if (snprintf(o->target, sizeof o->target, "%s", o->path) >= (int)sizeof o->target) return ENAMETOOLONG;
    if (!moe_widen(o->path, wide)) return errno;
    const DWORD old = GetFileAttributesW(wide);
    if (old == INVALID_FILE_ATTRIBUTES) return 0;
    return old & (FILE_ATTRIBUTE_DIRECTORY | FILE_ATTRIBUTE_DEVICE) ? -1 : old & FILE_ATTRIBUTE_READONLY ? EACCES : 0;
}

/* Delete the temporary file when its last handle is closed, or keep it. */
static int moe_delete_at_end(const moe_output *o, int wanted) {
    FILE_DISPOSITION_INFO info = { .DeleteFile = (BOOLEAN)wanted };
    return SetFileInformationByHandle(moe_handle(o->fd), FileDispositionInfo, &info, sizeof info) != 0;
}

/* Create the temporary file. Returns 0 or errno. */
static int moe_create_temporary(moe_output *o) {
    moe_wide_path wide;
    errno = EEXIST;
    for (int tries = 0; tries < 1000 && o->fd < 0 && errno == EEXIST; tries++)
        if (moe_name_temporary(o, (long)GetCurrentProcessId()) && moe_widen(o->temporary, wide))
            o->fd =
                moe_descriptor_of(CreateFileW(wide, GENERIC_READ | GENERIC_WRITE | DELETE,
                                              FILE_SHARE_READ | FILE_SHARE_DELETE |
                                                  (o->partial ? FILE_SHARE_WRITE : 0), /* the caller may lock it */
                                              NULL, o->partial ? OPEN_ALWAYS : CREATE_NEW, FILE_ATTRIBUTE_NORMAL, NULL),
                                  _O_RDWR | _O_BINARY | _O_NOINHERIT);
    if (o->fd < 0) return errno;
    if (!o->partial) moe_delete_at_end(o, 1);
    return 0;
}

/* Write some bytes at o->at. Returns their number; -1 and errno on failure. */
static int64_t moe_write_some(const moe_output *o, const void *data, size_t bytes) {
    OVERLAPPED at = { .Offset = (DWORD)o->at, .OffsetHigh = (DWORD)(o->at >> 32) };
    DWORD got = 0;
    return WriteFile(moe_handle(o->fd), data, (DWORD)bytes, &got, &at) ? (int64_t)got : moe_windows_error();
}

/* Return 1, or 0 and set errno. */
static int moe_windows_done(BOOL done) { return done ? 1 : (moe_windows_error(), 0); }

static int moe_sync(int fd) { return moe_windows_done(FlushFileBuffers(moe_handle(fd))); }

static int moe_empty_temporary(const moe_output *o) {
    FILE_END_OF_FILE_INFO end = { .EndOfFile.QuadPart = 0 };
    return moe_windows_done(SetFileInformationByHandle(moe_handle(o->fd), FileEndOfFileInfo, &end, sizeof end));
}

/* Give the temporary file its final name. Returns 0 or errno. */
static int moe_keep_temporary(moe_output *o) {
    moe_wide_path from, to;
    int code = moe_sync(o->fd) && moe_windows_done(moe_delete_at_end(o, 0)) ? 0 : errno;
    _close(o->fd);
    if (code || !moe_widen(o->temporary, from) || !moe_widen(o->target, to)) return errno;
    if (MoveFileExW(from, to, MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH)) return 0;
    code = (moe_windows_error(), errno);
    DeleteFileW(from);
    return code;
}

/* Close the temporary file, and delete it unless `keep` is 1. */
static void moe_drop_temporary(moe_output *o, int keep) {
    if (o->fd < 0) return;
    if (o->partial) moe_delete_at_end(o, !keep);
    _close(o->fd);
}

#else

/* Set o->target to o->path or, if its last component is a symbolic link, to the target of the link, which need not
 * exist. The system follows links in the other components. Returns 0 and sets errno on failure. */
static int moe_follow_links(moe_output *o) {
    char link[MOE_PATH_BYTES];
    ssize_t length;
    snprintf(o->target, sizeof o->target, "%s", o->path);
    for (int links = 0; (length = readlink(o->target, link, sizeof link)) >= 0; links++) {
        const char *slash = length && link[0] == '/' ? NULL : strrchr(o->target, '/');
        const size_t folder = slash ? (size_t)(slash + 1 - o->target) : 0;
        errno = links < 40 ? ENAMETOOLONG : ELOOP;
        if (links == 40 || folder + (size_t)length >= sizeof o->target) return 0;
        memcpy(o->target + folder, link, (size_t)length);
        o->target[folder + (size_t)length] = 0;
    }
    return errno == EINVAL || errno == ENOENT; /* not a link, or does not exist */
}

static int moe_find_target(moe_output *o, uint64_t bytes) {
    struct stat old;
    const int exists = stat(o->path, &old) == 0;
    if (!exists && (errno != ENOENT || !o->path[0])) return errno;
    if (exists && !S_ISREG(old.st_mode)) return -1;
#if MOE_WASM
    return (void)bytes, moe_follow_links(o) ? 0 : errno;
#else
    /* Exceeding the file size limit would raise SIGXFSZ, which ends the process. */
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && bytes > limit.rlim_cur) return EFBIG;
    if (!moe_follow_links(o) || (exists && faccessat(AT_FDCWD, o->target, W_OK, AT_EACCESS) != 0)) return errno;
    return 0;
#endif
}

/* Create the temporary file, with the permissions of an existing target. Returns 0 or errno. */
static int moe_create_temporary(moe_output *o) {
    struct stat old;
    const int exists = stat(o->target, &old) == 0, how = o->partial ? O_NOFOLLOW | O_NONBLOCK : O_EXCL;
    long process = 1;
#if !MOE_WASM
    process = (long)getpid();
#endif
    errno = EEXIST;
    for (int tries = 0; tries < 1000 && o->fd < 0 && errno == EEXIST; tries++)
        if (moe_name_temporary(o, process))
            o->fd = open(o->temporary, O_RDWR | O_CREAT | O_CLOEXEC | how, exists ? 0600 : 0666);
    if (o->fd < 0) return errno;
#if !MOE_WASM
    /* If the owner cannot be changed, drop the set-user-ID and set-group-ID bits. */
    if (exists && fchmod(o->fd, old.st_mode & (fchown(o->fd, old.st_uid, old.st_gid) == 0 ? 07777 : 0777)) != 0)
        return errno;
#endif
    return 0;
}

static int64_t moe_write_some(const moe_output *o, const void *data, size_t bytes) {
    return pwrite(o->fd, data, bytes, (off_t)o->at);
}

/* Sync a file. Retry if a signal interrupts fsync; ignore errors of file systems without fsync. */
static int moe_sync(int fd) {
    int result;
    do result = fsync(fd);
    while (result != 0 && errno == EINTR);
    return result == 0 || errno == EINVAL || errno == ENOTSUP;
}

static int moe_empty_temporary(const moe_output *o) { return ftruncate(o->fd, 0) == 0; }

/* Sync the folder of a file to make its new name durable. Failures are ignored, because the file is complete. */
static void moe_sync_folder(char *path) {
    char *slash = strrchr(path, '/');
    if (slash) slash[slash == path] = 0; /* keep "/" */
    int fd = open(slash ? path : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return;
    moe_sync(fd);
    close(fd);
}

static int moe_keep_temporary(moe_output *o) {
    int code = moe_sync(o->fd) ? 0 : errno;
    if (close(o->fd) != 0 && errno != EINTR && !code) code = errno;
    o->fd = -1;
    if (!code && rename(o->temporary, o->target) != 0) code = errno;
    if (code) unlink(o->temporary);
    else moe_sync_folder(o->temporary);
    return code;
}

static void moe_drop_temporary(moe_output *o, int keep) {
    if (o->fd < 0) return;
    close(o->fd);
    if (!keep) unlink(o->temporary);
}

#endif

#endif /* MOE_NO_WRITER */

#endif /* MOE_HOST */

/* ==== 5. Graph data ===========================================================================================
 * The nodes of a graph, which the CPU and devices run. Nodes refer to matrices and addresses, not to layers or models.
 * Invariant: a row of a node depends only on the same row of its sources, so any rows can share a run. */

/* All ops, each with a name, how it runs (see "Plan and run") and, for ops that run row by row, the estimated cost per
 * column in multiplications. The enum, the op table and the device launchers are generated from this list. */
#define MOE_OPS(X)                                                                                           \
    X(INPUT, input, ROWS, 1)         /* rows of the frame's inputs */                                        \
    X(EMBED, embed, ROWS, 1)         /* ids -> rows of an embedding, times scale */                          \
    X(QUANTISE, quantise, ROWS, 1)   /* rows -> int8 codes and a scale per row or 64 columns */              \
    X(LINEAR, linear, WHOLE, 0)      /* x -> w x + bias */                                                   \
    X(POINTWISE, pointwise, ROWS, 1) /* elementwise a + b or a b; b may be one number per row */             \
    X(CONCAT, concat, ROWS, 1)                                                                               \
    X(UNARY, unary, ROWS, 16)                 /* an activation */                                            \
    X(NORM, norm, ROWS, 4)                    /* layer norm, RMS norm */                                     \
    X(ROTARY, rotary, ROWS, 8)                /* queries and keys -> normalised, with rotary positions */    \
    X(VIEW, view, NOTHING, 0)                 /* a range of another node's columns */                        \
    X(GATHER, gather, ROWS, 1)                /* carried rows of the parents; 0 for a new sentence */        \
    X(STORE, store, ROWS, 1)                  /* rows -> carried rows */                                     \
    X(LSTM_STEP, lstm_step, SCRATCH, 0)       /* x, r, c -> [h | c], with both matrix products */            \
    X(LSTM_LAYER, lstm_layer, SCRATCH, 0)     /* input products of packed sentences -> outputs */            \
    X(SSRU, ssru, ROWS, 4)                    /* inputs, forget gates, c -> [y | c] */                       \
    X(AVERAGE, average, ROWS, 4)              /* inputs, previous sum -> [mean | sum] */                     \
    X(DELTA, delta, SCRATCH, 0)               /* q, k, v, gates, state -> Gated DeltaNet's outputs */        \
    X(ATTENTION, attention, SCRATCHED, 16384) /* projected query -> context (GNMT) */                        \
    X(HEADS, heads, SCRATCH, 0)               /* queries, keys and values -> contexts of all heads */        \
    X(GATE, gate, SCRATCH, 0)                 /* logits, or features and a gate over groups -> selections */ \
    X(EXPERTS, experts, SCRATCH, 0)           /* x, selections -> sum of weighted expert outputs */          \
    X(MIX, mix, ROWS, 16)                     /* outputs of all experts -> their weighted sum */             \
    X(OUTPUT, output, SCRATCH, 0)             /* logits, best tokens and their log-probabilities */

#define MOE_OP_VALUE(NAME, name, how, cost) MOE_OP_##NAME,
typedef enum moe_op { MOE_OPS(MOE_OP_VALUE) MOE_OP_COUNT } moe_op;

/* Files can select activations RELU to GELU_TANH by their names in moe_ffn_activations. Activations SWISH to SIGMOID
 * have vector code. Insert a new activation for files before SWISH or, if it has vector code, directly after SWISH. */
typedef enum moe_unary {
    MOE_UNARY_RELU,
    MOE_UNARY_GELU,
    MOE_UNARY_SWISH,
    MOE_UNARY_GELU_TANH,
    MOE_UNARY_TANH,
    MOE_UNARY_SIGMOID
} moe_unary;

/* A weight matrix [rows, cols] = [out, in] in host memory; see "Number formats" for its bytes. */
typedef struct moe_matrix {
    moe_type type;
    size_t rows, cols;
    size_t cols_padded;  /* cols, rounded up to a multiple of 64 in quantised formats */
    const void *data;    /* numbers, or codes in quantised formats */
    const int8_t *subs;  /* bytes after the codes, which start with the subs except in Q8B; or NULL */
    const int8_t *parts; /* parts of Q4M and Q8B, see moe_part; else NULL */
    const float *scales; /* [rows padded to 16] in quantised formats; else NULL */
    size_t bits, sides;  /* bits per number or code; bytes of subs and parts for 64 columns of a row */
} moe_matrix;

/* Return a copy of a matrix whose data starts `bytes` later, e.g. the matrix of another expert. */
MOE_SHARED moe_matrix moe_matrix_moved(const moe_matrix *m, size_t bytes) {
    moe_matrix moved = *m;
    moved.data = (const char *)m->data + bytes;
    if (m->subs) moved.subs = m->subs + bytes;
    if (m->parts) moved.parts = m->parts + bytes;
    if (m->scales) moved.scales = (const float *)(const void *)((const char *)(const void *)m->scales + bytes);
    return moved;
}

/* Return the line of 64 bytes that contains a unit of 4 of 32 columns in a quantised format; the unit's lowest bit. */
MOE_SHARED size_t moe_unit_line(size_t bits, size_t unit) {
    return bits != 3 ? bits * unit / 8 : unit < 6 ? unit / 2 : unit - 6;
}
MOE_SHARED size_t moe_unit_shift(size_t bits, size_t unit) {
    return bits != 3 ? bits * unit % 8 : unit < 6 ? unit % 2 * 3 : 6;
}

/* Return the level of a column of a unit, given the address of its byte in line 0. */
MOE_SHARED int moe_level(const uint8_t *at, size_t bits, size_t unit) {
    const int code = at[moe_unit_line(bits, unit) * 64] >> moe_unit_shift(bits, unit);
    if (bits == 4) return (code & 15) - 8;
    if (bits == 2) return (code & 3) * 5 - (code >> 1 & 1) - 8;
    return (unit < 6 ? code & 7 : code | (at[128] >> (unit - 2) & 4)) - 4;
}

/* The tokens that a sentence may use (its shortlist) and their rows of the output layer. */
typedef struct moe_list {
    size_t n;     /* 0 if all tokens are allowed */
    int32_t *ids; /* [n] in ascending order */
    moe_matrix w; /* [n, D]; 0 rows if not gathered */
    float *bias;  /* [n] or NULL */
    size_t capacity;
} moe_list;

/* Return the index of a token's logit in a row with shortlist `list` (or NULL); SIZE_MAX if the token is not listed. */
MOE_SHARED size_t moe_list_place(const moe_list *list, int32_t id) {
    size_t low = 0, high = list ? list->n : 0;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (list->ids[middle] < id) low = middle + 1;
        else high = middle;
    }
    return !list ? (size_t)id : low < list->n && list->ids[low] == id ? low : SIZE_MAX;
}

/* An LSTM cell: z = w_x x + w_r r + bias, [4H] in gate order i f g o; r = w_proj h, or h without projection. */
typedef struct moe_cell {
    moe_matrix w_x, w_r, w_proj; /* [4H, in], [4H, P], [P, H]; w_proj has 0 rows without projection */
    const float *bias;           /* [4H] */
    size_t hidden, state;        /* H and P; P equals H without projection */
    float forget_bias;
} moe_cell;

/* How a top-k gate weights the experts that it selects. */
typedef enum moe_gate_weights {
    MOE_WEIGHTS_CHOSEN, /* softmax over the logits of the selected experts */
    MOE_WEIGHTS_ALL,    /* softmax over the logits of all experts */
    MOE_WEIGHTS_SIGMOID /* sigmoids, normalised over the selected experts */
} moe_gate_weights;

/* One level of gates, which selects among `level` experts or groups. Row i of `weight` belongs to expert or group i. */
typedef struct moe_gating {
    moe_gate kind;
    size_t level, k;
    int empty_zero;           /* 1 if an empty mask selects no expert, 0 if it selects the best expert */
    int relu;                 /* 1 to apply relu to the logits (Eigen et al.) */
    moe_matrix weight, noise; /* [n, F] F32; 0 rows without noise */
    const float *bias;        /* [n] or NULL */
    const float *threshold;   /* [n] thresholds of threshold gates */
    moe_gate_weights weights; /* how top-k gates weight experts */
    const float *choice;      /* [n] added to sigmoids for selection only, or NULL */
} moe_gating;

MOE_SHARED int moe_gate_is_dense(moe_gate kind) { return kind == MOE_GATE_SOFTMAX || kind == MOE_GATE_SIGMOID; }

/* Experts, stored as consecutive slabs: w_down relu(w_up x [+ bias]) [+ bias] or w_down (swish(w_gate x) * w_up x). */
typedef struct moe_experts {
    size_t count, hidden;
    int gated;           /* `up` is [2 hidden, width], gate rows first */
    float scale;         /* factor of the weighted sum */
    moe_matrix up, down; /* [hidden, width], [width, hidden] of expert 0; expert i is stored i * stride bytes later */
    size_t stride;
    const float *up_bias, *down_bias; /* [count, hidden], [count, width], or NULL */
    const float *load;                /* [count] relative frequency of each expert's selection, at least 0; or NULL */
    const struct moe_file *file;      /* file and tensor that contain the experts; NULL if none */
    size_t tensor;
} moe_experts;

/* Output of MOE_OP_GATE. A row has `stride` 32-bit words: the number of experts, 1 if the mask was empty (else 0),
 * uint32 experts [capacity] ascending, float weights [capacity]. */
typedef struct moe_selections {
    uint32_t *words; /* [rows, stride] */
    size_t stride, capacity;
} moe_selections;

typedef struct moe_selection {
    uint32_t *count, *empty, *experts;
    float *weights;
} moe_selection;

MOE_SHARED moe_selection moe_selection_at(const moe_selections *all, size_t row) {
    uint32_t *words = all->words + row * all->stride;
    moe_selection s;
    s.count = words;
    s.empty = words + 1;
    s.experts = words + 2;
    s.weights = (float *)(void *)(words + 2 + all->capacity);
    return s;
}

enum { MOE_MAX_ENDS = 8 };   /* maximum number of end tokens of a model */
enum { MOE_ROW_ABOVE = -2 }; /* value of moe_beam.parents if the parent is the preceding row of the same run */
enum { MOE_GUESSES = 32 };   /* maximum rows of a run whose inputs are guesses */
enum { MOE_NO_LOGITS = -2 }; /* value of moe_beam.want for rows without logits */

/* Kinds of carried rows, which are kept between runs of their graph. The kind tells how a later run finds a row. */
typedef enum moe_carry {
    MOE_BY_PARENT, /* one row per row of the previous step, read by its children */
    MOE_BY_SOURCE, /* one row per source token, read by all rows of its sentence */
    MOE_BY_TOKEN,  /* one row per generated token, read by its descendants; not copied when beams change */
    MOE_BY_STATE,  /* one row per hypothesis, updated in place; only further children of a parent copy it */
    MOE_BY_GUESS,  /* one row per guess of the previous run, to repeat its change of the state */
    MOE_CARRY_COUNT
} moe_carry;

enum { MOE_PAGE = 16 }; /* rows per page; rows carried by token are allocated to sentences in pages */

enum { MOE_OUTPUT_CHUNK = 1024 }; /* tokens per chunk; the softmax over the vocabulary is computed by chunks */

/* Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464). src[0] holds q, k and v of all heads, heads * head_size numbers
 * that the op skips, then b and a of every value head. q, k and v pass a causal convolution and swish. A state is
 * [kernel - 1, conv_cols] inputs of the convolution, oldest first, then S of each head in blocks of 16 columns,
 * [blocks][key_size][16]. Adjacent value heads share a key head or, if `tiled`, those equal modulo `key_heads`. */
typedef struct moe_delta_op {
    size_t key_heads, heads, key_size, head_size, kernel;
    int tiled;
    size_t conv_cols, values, state_cols; /* 2 key_heads key_size + values; heads head_size */
    const float *conv;                    /* [kernel, conv_cols], oldest input first */
    const float *rate, *shift;            /* [heads] decay = exp(rate softplus(a + shift)) */
    float *states;
    size_t guess_cols; /* columns of `guesses`: inputs of the convolution, then a row of the op (y is unused) */
    float *guesses;
} moe_delta_op;

typedef struct moe_embed_op {
    const moe_matrix *table;
    const moe_matrix *positions; /* F32 embeddings of positions to add, or NULL */
    float scale;                 /* factor of the table's rows */
} moe_embed_op;

typedef struct moe_linear_op {
    const moe_matrix *w;
    const float *bias; /* [w->rows] or NULL */
    int relu;
} moe_linear_op;

typedef struct moe_norm_op {
    const float *weight, *bias; /* [cols]; bias may be NULL */
    float epsilon;
    int rms; /* 1 for RMS norm, which subtracts no mean (Zhang, Sennrich 2019, arXiv 1910.07467) */
} moe_norm_op;

/* Rotary positions (Su et al. 2021, arXiv 2104.09864) by halves: columns x_i, x_{i + width / 2} of a head at position p
 * become x_i cos a_pi - x_{i + width / 2} sin a_pi and x_{i + width / 2} cos a_pi + x_i sin a_pi. A narrower table
 * rotates only the first columns. src[0] holds queries, keys and values; values are unchanged. An RMS norm of each head
 * may precede or follow the rotation. */
typedef struct moe_rotary_op {
    size_t queries, keys, width;        /* query heads; key heads; columns per head */
    const moe_matrix *table;            /* [positions, at most width] F32 cosines, then sines; NULL without rotation */
    const float *query_norm, *key_norm; /* [width], or NULL without a norm */
    float epsilon;
    int norm_last;
} moe_rotary_op;

/* Number format of carried rows: F32, F16, or Q8 with a scale per `group` numbers. */
typedef struct moe_keep {
    moe_type type;
    size_t cols, group; /* numbers per row, numbers per group */
} moe_keep;

typedef struct moe_carried_op {
    moe_carry by;
    moe_keep keep; /* F32 except for rows carried by token */
    float *rows;   /* contiguous rows in the format `keep` */
} moe_carried_op;

typedef struct moe_lstm_op {
    const moe_cell *cell;
    /* for lstm_layer: */
    int backward;
    float *last_r, *last_c; /* [slots, P], [slots, H] final states of the sentences, or NULL */
} moe_lstm_op;

typedef struct moe_attention_op {
    int product, start_zero;    /* 1 for product instead of additive attention; 1 if the first context is zero */
    const float *v;             /* [src[0]->cols] */
    const float *keys, *values; /* [tokens, src[0]->cols], [tokens, cols] */
} moe_attention_op;

/* Terms of self-attention that depend on the distance of a key from the query, clipped to [-reach, reach], in order:
 * added to scores (Raffel et al. 2020, arXiv 1910.10683), or to keys and values (Shaw et al. 2018, 1803.02155). */
typedef struct moe_distances {
    size_t reach;               /* 0 if there are none */
    const float *bias;          /* [2 reach + 1, heads] or NULL */
    const float *keys, *values; /* [2 reach + 1, head width] or NULL */
} moe_distances;

/* Return the row for the key at `at` and the query at `from`. */
MOE_SHARED size_t moe_distance_row(size_t reach, size_t at, size_t from) {
    return at + reach < from ? 0 : at > from + reach ? 2 * reach : at + reach - from;
}

/* Attention: softmax(scale q k) v for every head (Vaswani et al. 2017, arXiv 1706.03762). Heads are
 * adjacent columns. `share` adjacent heads share one key and value (Ainslie et al. 2023, arXiv 2305.13245). src[0]
 * starts with the queries. The keys and values of a row, 2 cols / share numbers, are carried by source or token; in the
 * encoder they follow the queries in src[0]. */
typedef struct moe_heads_op {
    size_t heads, share;
    int within;        /* 1 for self-attention, which is causal in the decoder */
    size_t window;     /* in the decoder: number of last tokens that a row attends to; 0 for all */
    moe_keep keep;     /* format of the carried rows */
    const float *rows; /* NULL if src[0] holds keys and values */
    uint64_t shown;    /* bit mask of the heads to be averaged as the frame's attention; 0 if none */
    float scale;
    moe_distances distances;
} moe_heads_op;

typedef struct moe_gate_op {
    const moe_gating *gating;
    moe_gate kind;     /* set by the session; may differ from the kind in the file */
    int grouped;       /* 1 if src holds features and selections of groups instead of logits and noise logits */
    size_t capacity;   /* maximum experts per row */
    const char *layer; /* name of the layer of the selected experts; NULL if groups are selected */
} moe_gate_op;

typedef struct moe_output_op {
    const moe_matrix *w;
    const float *bias;    /* [vocabulary] or NULL */
    const int32_t *never; /* [n_never] tokens never generated; the softmax still includes the first n_suppressed */
    size_t n_never;
    size_t n_suppressed;
    int32_t eos;
} moe_output_op;

/* Scratch memory of the ops on the CPU, except per-thread scratch. */

typedef struct moe_lstm_work {
    float *c, *h, *r; /* [sentences, H], [sentences, H], [sentences, P] */
    int8_t *r_codes, *h_codes;
    float *r_scales, *h_scales;
} moe_lstm_work;

/* Scratch of each thread: the rows that each row of a task attends to, and their scores. */
typedef struct moe_heads_work {
    const float **seen; /* [threads, MOE_HEADS_ROWS, longest] */
    float *scores;      /* [threads, MOE_HEADS_ROWS, heads, longest] */
    float *unpacked; /* [threads, MOE_HEADS_ROWS, MOE_HEADS_BLOCK, unpacked_stride] keys or values converted to F32 */
    size_t longest, unpacked_stride;
} moe_heads_work;

/* Dense matrices [rows, experts] for batchwise gates and traces; NULL if not needed. */
typedef struct moe_gate_work {
    float *probabilities, *dense;
    char *mask; /* for batchwise gates */
} moe_gate_work;

typedef struct moe_expert_work {
    size_t *first;      /* [E + 2] first pair of each expert */
    uint32_t *pair_row; /* [pairs] row of each pair, pairs sorted by expert */
    uint32_t *row_pair; /* [pairs] pairs of each row in expert order */
    size_t *row_first;  /* [rows] first entry of a row in row_pair */
    int32_t *visit;     /* [visits] experts with pairs, in processing order */
    uint32_t *task;     /* [tasks, 3] visit, first pair, number of pairs */
    float *out;         /* [pairs, stride] */
    size_t stride;      /* at least D */
    float *sizes;       /* [rows, E] norms of `out` for traces; else NULL */
    /* If ranks share the experts, pairs are sent to the rank of their expert, which sends the outputs back. The
     * experts of a rank have consecutive places, which index `first` and `visit`. */
    uint32_t *place, *expert; /* [E] place of each expert, expert at each place; NULL if each place is its expert */
    size_t each, input_bytes; /* maximum experts per rank, plus 1; bytes of an input row including its scale */
    uint32_t *to, *from;      /* [ranks, each] pairs per expert; the last entry is 1 if another chunk follows */
    size_t *to_bytes, *from_bytes; /* [ranks] */
    char *sent, *taken;            /* [pairs, input_bytes], [ranks * pairs, input_bytes] */
    float *back;                   /* [ranks * pairs, D] outputs in the order of `taken` */
    size_t *taken_first;           /* [E + 2] first entry of each expert in `taken_row` */
    uint32_t *taken_row;           /* [ranks * pairs] indices in `taken`, sorted by expert */
    int takes;                     /* 1 while inputs are read from `taken` and outputs written to `back` */
} moe_expert_work;

/* Results per row and vocabulary chunk. Chunks are combined in index order. */
typedef struct moe_output_work {
    size_t chunks;
    size_t *first;    /* [groups, 2] first and end row of a group: up to MOE_OUTPUT_ROWS rows with the same list */
    float *max, *sum; /* [rows, chunks] largest logit; sum of exp(logit - max) */
    float *logits;    /* [rows, chunks, kinds, top] largest logits of the chunk, descending; -infinity if missing */
    int32_t *ids;     /* [rows, chunks, kinds, top] columns of `logits` */
    float *seen;      /* [threads, rows, top] largest logits computed by each thread */
    /* for rows that sample a token: */
    size_t *sampled;   /* [rows] index of the row among the sampled rows */
    float *plain;      /* [sentences, vocabulary] logits */
    uint32_t *weights; /* [sentences, vocabulary] bits of the penalised logits, later replaced by weights */
} moe_output_work;

/* A node and the rows that it computes. Weights are in host memory. The session allocates data, scales and carried
 * rows, in device memory if a device runs the graph. */
typedef struct moe_node moe_node;
struct moe_node {
    moe_op op;
    char name[48];
    moe_node *src[3];
    size_t cols;   /* numbers per row */
    size_t stride; /* distance between rows in numbers, or in bytes for codes; 0 if rows need not be stored */
    void *data;    /* [rows, stride] */
    float *scales; /* [rows] for quantise; NULL if the rows contain the scales, after the codes and their sums */
    union {        /* parameters of the op */
        moe_embed_op embed;
        moe_linear_op linear;
        moe_unary unary;
        int product;   /* 1 if pointwise computes a b instead of a + b */
        size_t column; /* first column of a view */
        moe_norm_op norm;
        moe_rotary_op rotary;
        moe_carried_op carried; /* for gather and store */
        moe_delta_op delta;
        moe_lstm_op lstm;
        moe_attention_op attention;
        moe_heads_op heads;
        moe_gate_op gate;
        const moe_experts *experts;
        float scale; /* factor of the op mix */
        moe_output_op output;
    };
    /* set by the planner: */
    moe_node *codes;   /* node with the quantised rows of this node, or NULL */
    size_t work_bytes; /* size of the scratch that this node needs while it runs */
    union {
        moe_lstm_work lstm;
        size_t *starts; /* [rows] for delta: first row of each hypothesis */
        moe_heads_work heads;
        moe_gate_work gate;
        moe_expert_work experts;
        moe_output_work output;
    } work;
    float *thread; /* [threads, thread_floats] */
    size_t thread_floats;
    size_t last; /* index of the last node that reads this node */
    size_t offset, work_offset;
    moe_node *above; /* next higher node in the arena during planning */
};

typedef struct moe_graph {
    moe_node *nodes;                                        /* in execution order */
    size_t count, capacity;                                 /* nodes */
    size_t rows;                                            /* capacity in rows */
    size_t threads, sentences, max_source, max_target, top; /* limits that determine the size of scratch */
    size_t penalised; /* 1 if tokens that a hypothesis already contains are penalised */
    int samples;      /* 1 if tokens may be sampled */
    int traced;       /* 1 if a trace function reads every node */
    int changed;      /* 1 if a callback changes logits */
    int routed;       /* 1 if a routing function reads every selection */
    int mixes;        /* 1 if a row's selection depends on the other rows of its run */
    int gating;       /* 1 + kind of all gates; 0 to use the kinds in the file */
    int noise;        /* 1 to add noise, seeded by noise_seed and the row's key, to the logits of gates */
    uint64_t noise_seed;
    int blocks;       /* 1 if activations have a scale per 64 columns */
    int on_device;    /* 1 if a device, which has its own scratch, runs the graph */
    moe_stats *stats; /* expert counters, or NULL */
    /* called before and after each node on the CPU; or NULL */
    void (*watch)(void *watcher, const moe_node *t, int after);
    void *watcher;
    struct moe_damage *damage; /* record of the first damaged slab of a run, or NULL */
    struct moe_bank *bank;     /* experts of a streamed file, or NULL */
    struct moe_ranks *ranks;   /* ranks that share the experts, or NULL */
    size_t bytes;              /* size of the planned arena */
    int overflow;
} moe_graph;

/* ==== 6. Frames ===============================================================================================
 * The arguments of one run of a graph. Invariant: all arguments are in host memory. */

enum { MOE_ENCODER, MOE_DECODER, MOE_PREDICTOR, MOE_GRAPHS }; /* the graph of a classifier counts as a decoder */

/* Rows of the encoder: sentences sorted by descending length, packed by time step. */
typedef struct moe_packed {
    size_t steps;        /* length of the longest sentence */
    size_t *live;        /* [steps] number of sentences that reach step t */
    size_t *first;       /* [steps] first row of step t */
    size_t *destination; /* [rows] index among the rows carried by source */
    size_t *sentence;    /* [live[0]] slot of each sentence */
} moe_packed;

/* Rows of the decoder: hypotheses. Classifiers use only want, top_ids and top_logprobs. */
typedef struct moe_beam {
    int32_t *parents; /* row in the previous step, or MOE_ROW_ABOVE; -1 or >= the graph's rows starts a sentence */
    size_t *segment, *length; /* first index and number of the sentence's rows carried by source */
    const moe_list **lists;   /* shortlist of each row; NULL if no row has a shortlist */

    /* [rows, max_target] indices of a row's tokens among the rows carried by token; NULL if the model carries no rows
     * by token. A row at position t has t + 1 indices, the last of which is its own. */
    int32_t *chain;

    /* [rows] indices of a row's hypothesis and of the one that it continues, or -1, among the rows carried by state;
     * NULL if there are none. Rows with parent MOE_ROW_ABOVE have none. */
    int32_t *states, *origins;

    /* [rows] with rows carried by state. guesses: index of a guess among the rows carried by guess, else -1. right: in
     * the first row of a hypothesis, how many guesses of the previous run it contains; `guesses` has the first one. */
    int32_t *guesses, *right;

    float *attention;        /* [rows, max_source] weights, or NULL if not needed; devices use their own memory */
    float *coverage;         /* [rows or slots * beam, max_source] sums of `attention`; may be NULL */
    size_t attention_stride; /* stride of `attention` and `coverage` */
    int32_t *want;           /* token to score, -1 to find the best tokens, or MOE_NO_LOGITS */
    float *want_logprob;
    char *hold;     /* 1 if the translation is too short to end here; NULL if no translation is too short */
    uint32_t *used; /* [rows, moe_bit_words] bit set of the tokens of the hypothesis; NULL without penalties */
    float *penalty; /* [rows] repetition penalty of the tokens in `used` */
    struct moe_row_sampling *samplings; /* [rows] how to sample the row's token; NULL if no token is sampled */
    size_t n_starts, most_starts;       /* stride of `starts`; maximum tokens that a row of this run uses */
    int32_t *starts;                    /* [rows, n_starts] further tokens to score, or -1 */
    float *start_logprobs;
    size_t top;
    int32_t *top_ids;    /* [rows, top], best first, ties by lower id; preceded by the sampled token, if any */
    float *top_logprobs; /* [rows, top]; NaN if the row is not finite */
    float *top_weighed;  /* [rows, top] penalised values for the search; NULL if it uses top_logprobs */
} moe_beam;

typedef struct moe_frame {
    size_t rows;
    int32_t *ids;        /* [rows] */
    int32_t *positions;  /* [rows] position of each token in its sentence */
    const float *inputs; /* [rows, input columns] */
    uint64_t *keys;      /* [rows] seed of each row's noise; NULL without noise */
    moe_packed packed;   /* for the encoder */
    moe_beam beam;       /* for the decoder; arrays have [rows] elements */
    /* changes the logits before their use; may be NULL. Not on a device */
    void (*change)(void *user, float *logits, size_t stride);
    void *change_user;
} moe_frame;

/* ==== 7. Devices ==============================================================================================
 * The interface between a session and a device. The session plans the memory. The device owns the weights, its scratch
 * and two blocks, one for carried rows and one for activations. Order of calls: count, open, allocate (carried rows,
 * activations), bind, run..., close. For translations and scores the device also runs the beam search: after run has
 * computed the encoder, call begin... and step. Invariant: only ids go up and only finished sentences come back. */

typedef struct moe_device moe_device;
typedef struct moe_search moe_search; /* see "Beam search" */
typedef struct moe_slot moe_slot;

typedef struct moe_device_results {
    size_t rows;            /* number of rows in the step */
    size_t done;            /* number of finished sentences, which are ordered by slot */
    const int32_t *results; /* written by moe_write_result; valid until the next step */
} moe_device_results;

typedef struct moe_device_params {
    moe_allocator allocator; /* for host memory */
    int index;               /* device number */
    size_t memory;           /* limit in bytes; 0 for all free memory. Experts that do not fit are fetched on demand */
    moe_log_fn log;          /* may be NULL */
    void *log_user;
} moe_device_params;

typedef struct moe_device_api {
    const char *name; /* "cuda" */
    /* Return the number of devices; if the number is 0, `error` gives the reason. */
    int (*count)(moe_error *error);
    moe_status (*open)(const moe_device_params *params, moe_device **out, moe_error *error);
    /* Allocate zeroed memory, which close releases. If params->memory is too small, set *out to NULL and return MOE_OK:
     * bind then fails and reports how much memory is needed. */
    moe_status (*allocate)(moe_device *device, size_t bytes, const char *what, void **out, moe_error *error);
    /* Upload the weights of the graphs and allocate everything else. Graphs and weights must not move. If `search`
     * (copied) is not NULL, the device runs the beam search, with one slot per sentence of the decoder; else the
     * session passes decoder frames to run. */
    moe_status (*bind)(moe_device *device, const moe_graph graphs[MOE_GRAPHS], const moe_search *search,
                       moe_error *error);
    /* Run graph `which` and fill the frame's outputs. A trace function receives every node, which is slow. */
    moe_status (*run)(moe_device *device, int which, const moe_frame *frame, moe_trace_fn trace, void *trace_user,
                      moe_error *error);
    /* Start a sentence in the free slot `at`: copy `slot` and upload it with the next step. */
    void (*begin)(moe_device *device, size_t at, const moe_slot *slot);
    void (*forget)(moe_device *device); /* abandon all sentences */
    /* Run one decoder step for all active sentences, at least one. */
    moe_status (*step)(moe_device *device, moe_trace_fn trace, void *trace_user, moe_device_results *out,
                       moe_error *error);
    /* Return a name such as "cuda:0 NVIDIA H200" and set *bytes to the memory in use. */
    const char *(*describe)(const moe_device *device, uint64_t *bytes);
    /* Fill the members of moe_stats that start with "expert". After a failure the device's counters are 0. */
    void (*stats)(moe_device *device, moe_stats *stats);
    void (*close)(moe_device *device); /* `device` may be NULL */
} moe_device_api;

const moe_device_api *moe_cuda(void); /* in moe-cuda.cu */

/* ==== 8. Elementary functions =================================================================================
 * The only definitions of exp, log, tanh, sigmoid, gelu, softplus and noise. Invariant: the vector versions of exp,
 * tanh and sigmoid in "Kernels: shared" use the same operations; the other functions have no vector versions. Errors
 * are below 2e-7 absolute for tanh and sigmoid, 3e-7 relative for exp and log (tests/engine/test_kernels.c). */

MOE_SHARED float moe_from_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}
MOE_SHARED uint32_t moe_to_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

MOE_SHARED float moe_bf16_to_f32(uint16_t h) { return moe_from_bits((uint32_t)h << 16); }

/* Convert F16 to F32. Multiplying by 2^112 corrects the exponent bias and normalises subnormals exactly. */
MOE_SHARED float moe_f16_to_f32(uint16_t h) {
    uint32_t magnitude = (uint32_t)(h & 0x7fffu) << 13, sign = (uint32_t)(h & 0x8000u) << 16;
    float f = moe_from_bits(magnitude) * 0x1p112f;
    uint32_t bits = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : moe_to_bits(f); /* infinity or NaN */
    return moe_from_bits(bits | sign);
}

MOE_SHARED uint16_t moe_f32_to_f16(float f) {
    uint32_t bits = moe_to_bits(f), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* would round to more than 65504 */
    if (magnitude < 0x38800000u) { /* subnormal: one addition rounds to multiples of 2^-24 */
        float rounded = moe_from_bits(magnitude) + 0.5f;
        return (uint16_t)(sign | (moe_to_bits(rounded) - 0x3f000000u));
    }
    magnitude += 0xc8000fffu + ((magnitude >> 13) & 1u);
    return (uint16_t)(sign | (magnitude >> 13));
}

/* Round to nearest, ties to even, for |x| < 2^22. Adding 1.5 * 2^23 leaves the integer in the low mantissa bits. */
#define MOE_ROUND_MAGIC 12582912.0f
MOE_SHARED int32_t moe_round(float x) { return (int32_t)(moe_to_bits(x + MOE_ROUND_MAGIC) - 0x4b400000u); }

#define MOE_EXP_LOW (-87.0f) /* exp returns 0 for smaller x, so its results are never subnormal */
#define MOE_EXP_HIGH 87.0f
#define MOE_LOG2E 1.44269502f
#define MOE_LN2_HIGH 0.693359375f /* 355/512, so products with small integers are exact */
#define MOE_LN2_LOW (-2.12194442e-4f)
#define MOE_EXP_2 0.5f /* exp(r) = 1 + r + r^2 (EXP_2 + r EXP_3 + ...), |r| <= ln 2 / 2, fitted at Chebyshev nodes */
#define MOE_EXP_3 0.166665763f
#define MOE_EXP_4 0.041666463f
#define MOE_EXP_5 8.36323574e-3f
#define MOE_EXP_6 1.39337336e-3f

/* Return e^x. The order of the comparisons propagates NaN: (limit > x ? limit : x) equals maxps(limit, x). */
MOE_SHARED float moe_expf(float x) {
    float clamped = MOE_EXP_LOW > x ? MOE_EXP_LOW : x, t, n, r, y;
    clamped = MOE_EXP_HIGH < clamped ? MOE_EXP_HIGH : clamped;
    t = clamped * MOE_LOG2E + MOE_ROUND_MAGIC;
    n = t - MOE_ROUND_MAGIC;
    r = clamped - n * MOE_LN2_HIGH;
    r = r - n * MOE_LN2_LOW;
    y = MOE_EXP_6 * r + MOE_EXP_5;
    y = y * r + MOE_EXP_4;
    y = y * r + MOE_EXP_3;
    y = y * r + MOE_EXP_2;
    y = y * (r * r) + r;
    y = y + 1.0f;
    y = y * moe_from_bits((moe_to_bits(t) << 23) + 0x3f800000u); /* multiply by 2^n; NaN remains NaN */
    return x < MOE_EXP_LOW ? 0.0f : y;
}

MOE_SHARED float moe_sigmoidf(float x) { return 1.0f / (1.0f + moe_expf(-x)); }

MOE_SHARED float moe_tanhf(float x) {
    uint32_t sign = moe_to_bits(x) & 0x80000000u;
    float t = moe_expf(moe_from_bits(moe_to_bits(x) & 0x7fffffffu) * -2.0f);
    return moe_from_bits(moe_to_bits((1.0f - t) / (1.0f + t)) | sign);
}

/* Return the natural logarithm of a positive normal number; -infinity for 0. */
MOE_SHARED float moe_logf(float x) {
    uint32_t bits = moe_to_bits(x);
    float s, z, m;
    if (!(x > 0.0f)) return x == 0.0f ? moe_from_bits(0xff800000u) : moe_from_bits(0x7fc00000u);
    if (bits >= 0x7f800000u) return x;
    int32_t exponent = (int32_t)((bits - 0x3f3504f3u) >> 23) - (bits < 0x3f3504f3u ? 512 : 0);
    m = moe_from_bits(bits - ((uint32_t)exponent << 23)); /* in [sqrt 1/2, sqrt 2) */
    s = (m - 1.0f) / (m + 1.0f);                          /* log m = 2 artanh s */
    z = s * s;
    z = ((0.295830756f * z + 0.399887025f) * z + 0.666666865f) * z * s + 2.0f * s;
    return (float)exponent * MOE_LN2_HIGH + ((float)exponent * MOE_LN2_LOW + z);
}

/* Return max(0, x); propagates NaN, as maxps(0, x) does. */
MOE_SHARED float moe_reluf(float x) { return 0.0f > x ? 0.0f : x; }

enum { MOE_LANES = 16 };

/* Return the sum of 16 lanes, added in the order of a fixed tree. */
MOE_SHARED float moe_join_lanes(const float lane[MOE_LANES]) {
    float t[8];
    for (int i = 0; i < 8; i++) t[i] = lane[i] + lane[i + 8];
    for (int i = 0; i < 4; i++) t[i] = t[i] + t[i + 4];
    for (int i = 0; i < 2; i++) t[i] = t[i] + t[i + 2];
    return t[0] + t[1];
}

/* Return x times the normal distribution function of x; erf by Abramowitz and Stegun 7.1.26 (error below 1.5e-7). */
MOE_SHARED float moe_geluf(float x) {
    const float z = moe_from_bits(moe_to_bits(x * 0.707106781f) & 0x7fffffffu), t = 1.0f / (1.0f + 0.3275911f * z);
    const float tail =
        ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t *
        moe_expf(-(z * z)) * 0.5f;
    return x < 0.0f ? x * tail : x * (1.0f - tail);
}

/* GELU's approximation x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks, Gimpel 2016, arXiv 1606.08415), with
 * sigmoid(2y) for (1 + tanh y) / 2. */
#define MOE_GELU_1 1.59576912f /* 2 sqrt(2/pi) */
#define MOE_GELU_3 0.0713548163f
MOE_SHARED float moe_gelu_tanhf(float x) { return x * moe_sigmoidf(x * (MOE_GELU_1 + MOE_GELU_3 * (x * x))); }

MOE_SHARED float moe_unaryf(moe_unary what, float x) {
    switch (what) {
    case MOE_UNARY_RELU: return moe_reluf(x);
    case MOE_UNARY_GELU: return moe_geluf(x);
    case MOE_UNARY_SWISH: return x * moe_sigmoidf(x);
    case MOE_UNARY_GELU_TANH: return moe_gelu_tanhf(x);
    case MOE_UNARY_TANH: return moe_tanhf(x);
    case MOE_UNARY_SIGMOID: break;
    }
    return moe_sigmoidf(x);
}

/* Insert v and its id into a descending list of `top` entries, after entries with equal values. */
MOE_SHARED void moe_keep_best(float *best, int32_t *ids, size_t top, float v, int32_t id) {
    size_t at = top - 1;
    if (!(v > best[at])) return;
    for (; at > 0 && !(best[at - 1] >= v); at--) {
        best[at] = best[at - 1];
        ids[at] = ids[at - 1];
    }
    best[at] = v;
    ids[at] = id;
}

MOE_SHARED size_t moe_bit_words(size_t n) { return n / 32 + 1; }
MOE_SHARED int moe_bit(const uint32_t *set, int32_t i) { return set[i / 32] >> i % 32 & 1; }

typedef struct moe_weighing {
    size_t kinds;    /* 2 if tokens that the hypothesis already contains have their own lists, else 1 */
    float penalty;   /* repetition penalty of these tokens */
    int by_logprobs; /* 1 if the penalty applies to log-probabilities, 0 if it applies to logits */
} moe_weighing;

/* Apply the repetition penalty as Hugging Face Transformers does. */
MOE_SHARED float moe_penalised(float v, float penalty) { return v > 0.0f ? v / penalty : v * penalty; }

/* Find the best tokens of a row, given the best tokens of its chunks [chunks, kinds, top]. Writes log-probabilities,
 * penalised values (unless `weighed` is NULL) and columns, which are -1 if the row has fewer tokens. */
MOE_SHARED void moe_join_best(const moe_weighing *by, const float *logits, const int32_t *columns, size_t chunks,
                              size_t top, float max, float log_sum, float *logprobs, float *weighed, int32_t *best) {
    float values[MOE_MAX_BEAM + MOE_MAX_ENDS];
    int32_t places[MOE_MAX_BEAM + MOE_MAX_ENDS];
    for (size_t i = 0; i < top; i++) values[i] = moe_from_bits(0xff800000u), places[i] = -1;
    for (size_t list = 0; list < chunks * by->kinds; list += (size_t)1 + (by->kinds > 1 && by->penalty == 1.0f))
        for (size_t i = list * top; i < (list + 1) * top; i++) {
            float v = by->by_logprobs ? (logits[i] - max) - log_sum : logits[i];
            if (list % by->kinds) v = moe_penalised(v, by->penalty);
            if (!(v > values[top - 1])) break;
            moe_keep_best(values, places, top, v, (int32_t)i);
        }
    for (size_t i = 0; i < top; i++) {
        const int32_t place = places[i];
        logprobs[i] = ((place < 0 ? values[i] : logits[place]) - max) - log_sum;
        if (weighed) weighed[i] = values[i];
        best[i] = place < 0 ? -1 : columns[place];
    }
}

/* Return a 64-bit hash of z: the mixing function of splitmix64. */
MOE_SHARED uint64_t moe_hash(uint64_t z) {
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* How to sample a token. Penalised logits are divided by the temperature. Three filters then keep the most probable
 * tokens, ties by lower id: the top_k best (0 keeps all), the smallest set whose total reaches top_p of the remaining
 * probability, and those with at least min_p times the probability of the best. Probabilities are integers (weights),
 * so all sums are exact. */
typedef struct moe_sampling {
    float temperature; /* 0 disables sampling */
    size_t top_k;
    float top_p, min_p;
    uint64_t seed;
} moe_sampling;

typedef struct moe_row_sampling {
    const moe_sampling *how; /* NULL to take the best token */
    uint64_t number;
} moe_row_sampling;

#define MOE_WEIGHT_MOST 0x1p30f /* weight of the best token */

MOE_SHARED uint32_t moe_weight_of(const moe_sampling *d, float logit, float best) {
    const float p = moe_expf((logit - best) / d->temperature);
    return p > 0.0f ? (uint32_t)(p * MOE_WEIGHT_MOST) : 0;
}

/* State of a walk over the weights in descending order, which stops where their count or sum exceeds a target. */
typedef struct moe_stop {
    uint32_t weight;
    uint64_t count, sum; /* number and sum of the larger weights */
} moe_stop;

enum { MOE_DIGITS = 256 }; /* base of the digits by which the walk finds its weight */

/* Find the next digit of the weight at which the count or sum exceeds `target`. counts[d] and sums[d] describe the
 * weights that continue the digits found so far with digit d. */
MOE_SHARED void moe_walk_on(moe_stop *at, const unsigned long long *counts, const unsigned long long *sums,
                            int counts_them, uint64_t target) {
    uint32_t digit = MOE_DIGITS - 1;
    for (; digit > 0 && (counts_them ? at->count + counts[digit] : at->sum + sums[digit]) <= target; digit--)
        at->count += counts[digit], at->sum += sums[digit];
    at->weight = at->weight * MOE_DIGITS + digit;
}

/* Return the sum of the n largest weights, given a walk that stopped at the n-th. */
MOE_SHARED uint64_t moe_sum_of_first(const moe_stop *at, size_t n) { return at->sum + (n - at->count) * at->weight; }

/* Return the target for a walk that stops at the last weight needed for top_p of `sum`. */
MOE_SHARED uint64_t moe_sum_short_of(const moe_sampling *d, uint64_t sum) {
    const double least = (double)d->top_p * (double)sum;
    const uint64_t whole = (uint64_t)least;
    return whole - (whole > 0 && (double)whole >= least);
}
/* Return the smallest sum of the largest weights that exceeds `target`. */
MOE_SHARED uint64_t moe_sum_up_to(const moe_stop *at, uint64_t target) {
    return at->sum + ((target - at->sum) / at->weight + 1) * at->weight;
}

/* Map random bits proportionally to an integer less than `sum`, so a small change of the sum has little effect. */
MOE_SHARED uint64_t moe_share_of(uint64_t bits, uint64_t sum) {
    return (uint64_t)((double)(bits >> 11) * 0x1p-53 * (double)sum);
}

/* Move a sampled token to the front of the row's best tokens, or insert it there. */
MOE_SHARED void moe_put_first(int32_t id, float logprob, size_t top, int32_t *ids, float *logprobs) {
    size_t at = 0;
    while (at + 1 < top && ids[at] != id) at++;
    for (; at > 0; at--) ids[at] = ids[at - 1], logprobs[at] = logprobs[at - 1];
    ids[0] = id;
    logprobs[0] = logprob;
}

/* Return a standard normal number, the noise of an expert's logit. `key` combines the row's key and the gate's name.
 * Quantiles by Wichura's PPND7 (AS 241, Applied Statistics 37, 1988) without far tails, which 23 bits never reach. */
MOE_SHARED float moe_normal(uint64_t key, size_t expert) {
    const uint32_t bits = (uint32_t)(moe_hash(key + expert) >> 41);
    const double u = ((double)bits + 0.5) / 8388608.0, q = u - 0.5;
    double r = 0.180625 - q * q;
    if (r >= 0)
        return (float)(q * (((59.109374720 * r + 159.29113202) * r + 50.434271938) * r + 3.3871327179) /
                       (((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1.0));
    r = sqrt(-(double)moe_logf((float)(q < 0 ? u : 1.0 - u))) - 1.6;
    r = (((0.17023821103 * r + 1.3067284816) * r + 2.7568153900) * r + 1.4234372777) /
        ((0.12021132975 * r + 0.73700164250) * r + 1.0);
    return (float)(q < 0 ? -r : r);
}

/* Return the largest magnitude in a row; NaN if a number is not finite. */
MOE_SHARED float moe_largest(const float *x, size_t n) {
    uint32_t most = 0; /* magnitudes are compared as integers, so infinities and NaNs exceed numbers */
    for (size_t i = 0; i < n; i++) {
        const uint32_t magnitude = moe_to_bits(x[i]) & 0x7fffffffu;
        if (magnitude > most) most = magnitude;
    }
    return moe_from_bits(most < 0x7f800000u ? most : 0x7fc00000u);
}

/* Quantise numbers to codes and return their scale. If a number is not finite, the scale is NaN to propagate it. */
MOE_SHARED float moe_quantise_numbers(const float *x, size_t n, int8_t *q) {
    const float amax = moe_largest(x, n);
    if (!(amax >= FLT_MIN)) {
        for (size_t c = 0; c < n; c++) q[c] = 0;
        return amax < FLT_MIN ? 0.0f : amax;
    }
    float inverse = 127.0f / amax;
    if (!(inverse <= FLT_MAX)) inverse = FLT_MAX;
    for (size_t c = 0; c < n; c++) {
        const int32_t v = moe_round(x[c] * inverse);
        q[c] = (int8_t)(v > 127 ? 127 : v < -127 ? -127 : v);
    }
    return amax / 127.0f;
}

/* Return the first position that a row at `position` attends to. */
MOE_SHARED size_t moe_window_start(size_t window, size_t position) {
    return window && position >= window ? position + 1 - window : 0;
}

/* Access to carried rows, which are F32, F16 or Q8. Q8 rows start with the scales of their groups. */

MOE_SHARED size_t moe_keep_scales(const moe_keep *k) { return k->type == MOE_TYPE_Q8 ? k->cols / k->group : 0; }

MOE_SHARED size_t moe_keep_bytes(const moe_keep *k) {
    const size_t one = k->type == MOE_TYPE_F32 ? sizeof(float) : k->type == MOE_TYPE_F16 ? sizeof(uint16_t) : 1;
    return moe_round_up(moe_keep_scales(k) * sizeof(float) + k->cols * one, sizeof(float));
}

MOE_SHARED void moe_keep_group(const moe_keep *k, const float *x, size_t group, void *row) {
    const size_t at = group * k->group;
    float *floats = (float *)row;
    if (k->type == MOE_TYPE_Q8)
        floats[group] = moe_quantise_numbers(x, k->group, (int8_t *)(floats + moe_keep_scales(k)) + at);
    for (size_t c = 0; c < k->group && k->type == MOE_TYPE_F16; c++) ((uint16_t *)row)[at + c] = moe_f32_to_f16(x[c]);
    if (k->type == MOE_TYPE_F32) memcpy(floats + at, x, k->group * sizeof *x);
}

MOE_SHARED float moe_kept(const moe_keep *k, const void *row, size_t col) {
    const float *floats = (const float *)row;
    if (k->type == MOE_TYPE_F32) return floats[col];
    if (k->type == MOE_TYPE_F16) return moe_f16_to_f32(((const uint16_t *)row)[col]);
    return (float)((const int8_t *)(floats + moe_keep_scales(k)))[col] * floats[col / k->group];
}

MOE_SHARED float moe_softplus(float x) { return (x > 0.0f ? x : 0.0f) + moe_logf(1.0f + moe_expf(x > 0.0f ? -x : x)); }

#if MOE_HOST

/* ==== 9. Number formats =======================================================================================
 * How weights are stored. Invariant: moe_matrix_row and moe_pack_row are exact inverses, on every machine, for all
 * numbers that a format can represent.
 *
 * Q8, matrix [n, k]: int8 codes in [-127, 127], laid out [n/16][k/4][16][4] with n padded to 16 and k to 64. 16 outputs
 * times 4 inputs fill one AMX tile row, one AVX-512 register, two AVX2 or four NEON registers, loaded from the mapped
 * file. The codes are followed by float scale[n] and int32 sum of codes[n] (for kernels with unsigned activations).
 *
 * Q4: a number is code * sub * scale[row], with a 4-bit code in [-8, 7] and an integer sub in [-15, 15] for every 32
 * columns of a row, so code * sub is an int8, multiplied as in Q8. Codes are stored as [n/16][k/8][16][4], two per
 * byte: the low nibble is code + 8 of column 8g + i, the high nibble that of column 8g + 4 + i, so a mask and a shift
 * give two units of the Q8 layout. The codes are followed by int8 sub [n/16][k/32][16], then scales and sums as in Q8.
 *
 * Q4M, Q4 with a minimum: a number is (code * sub + mid) * part * scale[row], with a sub in [1, 16] and a mid per 32
 * columns such that code * sub + mid is an int8 in [-127, 127], and an F16 part per 64 columns. Q4M represents GGUF's
 * Q4_1 and Q4_K, which have a scale and a minimum per 32 columns, with their original codes. Codes are laid out as in
 * Q4. They are followed, for every 64 columns of 16 rows, by 16 bytes each of: first sub, second sub, first mid, second
 * mid, low byte and high byte of the part. Sums over 64 columns are converted to floats and multiplied by the part and
 * the scale of the activations, per row or per block.
 *
 * Q3 and Q2: a number is level * sub * scale[row], with a sub per 32 columns, stored as in Q4. Q3 has the levels -4 to
 * 3 and subs in [-30, 30]; Q2 has the levels -8, -3, 1 and 6, better than equal steps by .5 dB, and subs in [-15, 15].
 * Codes number the levels. Every 32 columns of 16 rows, 8 units u of 4 columns, are stored as [bits][16][4] bytes. In
 * Q2 line l has units 4l to 4l + 3, from the lowest bits up. In Q3 line l has units 2l and 2l + 1; the highest two bits
 * of lines 0 and 1 are the low bits of units 6 and 7, and those of line 2 their third bits.
 *
 * Q8B, Q8 by blocks: a number is code * part * scale[row], with an F16 part per 64 columns. Codes are laid out as in
 * Q8 and followed, for every 64 columns of 16 rows, by 16 low and 16 high bytes of the part. Kernels multiply the codes
 * as in Q8 and apply the parts as in Q4M. */

enum { MOE_Q8_ROWS = 16, MOE_Q8_COLS = 64, MOE_Q4_GROUP = 32, MOE_CODE_GROUP = 32 };
enum { MOE_Q8_WIDEST = 131072 }; /* 127 * 127 * 131072 < 2^31 */

/* Return the index of a word in a NULL-terminated list; -1 if the list does not contain the word. */
static int moe_find_word(const char *const *words, const char *word) {
    int i = 0;
    while (words[i] && strcmp(words[i], word) != 0) i++;
    return words[i] ? i : -1;
}

/* A number format. Float formats precede Q8 and are converted in the kernels. Quantised formats without products of
 * their own are expanded to Q8 on the CPU. On a GPU a quantised format needs an unpack kernel; the assertion on
 * MOE_TYPE_COUNT in moe-cuda.cu lists the code to extend. */
typedef struct moe_format {
    const char *name;
    size_t bits, sides;                                       /* as in moe_matrix */
    int parts;                                                /* 1 if the last two bytes of sides contain a part */
    float largest;                                            /* largest magnitude that does not round to infinity */
    void (*row)(const moe_matrix *m, size_t row, float *out); /* out[cols] */
    void (*put)(void *data, size_t at, float x);              /* for float formats */
    /* The following members are for quantised formats, in which a weight is code * scale[row]. */
    /* Quantise a row to codes[cols_padded] and sides[cols_padded / 64 * sides], which are zeroed; return its scale. */
    float (*quantise)(const float *x, size_t cols, int8_t *codes, int8_t *sides);
} moe_format;

static const moe_format moe_formats[MOE_TYPE_COUNT];

static int moe_type_known(uint32_t type) { return type < MOE_TYPE_COUNT; }

const char *moe_type_name(moe_type type) { return moe_type_known((uint32_t)type) ? moe_formats[type].name : "?"; }

int moe_type_parse(const char *name, moe_type *out) {
    for (int type = 0; type < MOE_TYPE_COUNT; type++)
        if (strcmp(moe_formats[type].name, name) == 0) {
            *out = (moe_type)type;
            return 1;
        }
    return 0;
}

static int moe_type_quantised(moe_type type) { return moe_formats[type].quantise != NULL; }

static uint16_t moe_f32_to_bf16(float f) {
    uint32_t bits = moe_to_bits(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 64u); /* quiet the NaN */
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static uint64_t moe_matrix_bytes(moe_type type, uint64_t rows, uint64_t cols) {
    const size_t bits = moe_formats[type].bits, sides = moe_formats[type].sides;
    uint64_t bytes;
    if (moe_type_quantised(type)) {
        if (rows > UINT64_MAX / 2 || cols > UINT64_MAX / 2) return 0;
        rows = (rows + MOE_Q8_ROWS - 1) / MOE_Q8_ROWS * MOE_Q8_ROWS;
        cols = (cols + MOE_Q8_COLS - 1) / MOE_Q8_COLS * MOE_Q8_COLS;
        return moe_multiply(rows, cols / 8 * bits + cols / 64 * sides + 8, &bytes) ? bytes : 0;
    }
    return moe_multiply(rows, cols, &bytes) && moe_multiply(bytes, bits / 8, &bytes) ? bytes : 0;
}

/* Return the matrix stored in a blob; the caller has checked that the blob has moe_matrix_bytes bytes. */
static moe_matrix moe_matrix_view(moe_type type, size_t rows, size_t cols, const void *blob) {
    const size_t bits = moe_formats[type].bits, sides = moe_formats[type].sides;
    moe_matrix m = { type, rows, cols, cols, blob, NULL, NULL, NULL, bits, sides };
    if (moe_type_quantised(type)) {
        const size_t padded = moe_round_up(cols, MOE_Q8_COLS), padded_rows = moe_round_up(rows, MOE_Q8_ROWS);
        const char *behind = (const char *)blob + padded_rows * (padded / 8 * bits);
        m.cols_padded = padded;
        if (sides) m.subs = (const int8_t *)behind;
        if (moe_formats[type].parts) m.parts = m.subs + (sides - 2) * 16;
        behind += padded_rows * (padded / 64 * sides);
        m.scales = (const float *)(const void *)behind;
    }
    return m;
}

/* Return a matrix of rows [first, first + count), or fewer at the end; `first` is a multiple of 16. */
static moe_matrix moe_matrix_part(const moe_matrix *m, size_t first, size_t count) {
    moe_matrix part = *m;
    part.rows = moe_min(count, m->rows - first);
    part.data = (const char *)m->data + first * m->cols_padded * m->bits / 8;
    if (m->subs) part.subs = m->subs + first * (m->cols_padded / 64 * m->sides);
    if (m->parts) part.parts = m->parts + first * (m->cols_padded / 64 * m->sides);
    if (m->scales) part.scales = m->scales + first;
    return part;
}

/* Copy a row of a matrix to row `at` of a matrix with the same format and number of columns. */
static void moe_copy_row(const moe_matrix *from, size_t row, const moe_matrix *to, size_t at) {
    const size_t bytes = from->cols * from->bits / 8, pieces = from->cols_padded * from->bits / 32,
                 subs = from->subs ? from->cols_padded / 64 * from->sides : 0;
    char *data = (char *)(uintptr_t)to->data;
    if (!from->scales) {
        memcpy(data + at * bytes, (const char *)from->data + row * bytes, bytes);
        return;
    }
    for (size_t i = 0; i < pieces; i++) /* 16 rows are interleaved */
        memcpy(data + (at / 16 * pieces + i) * 64 + at % 16 * 4,
               (const char *)from->data + (row / 16 * pieces + i) * 64 + row % 16 * 4, 4);
    for (size_t i = 0; i < subs; i++)
        ((int8_t *)(uintptr_t)to->subs)[(at / 16 * subs + i) * 16 + at % 16] =
            from->subs[(row / 16 * subs + i) * 16 + row % 16];
    ((float *)(uintptr_t)to->scales)[at] = from->scales[row];
}

MOE_INLINE size_t moe_q8_index(size_t cols_padded, size_t row, size_t col) {
    return (row / 16 * (cols_padded / 4) + col / 4) * 64 + row % 16 * 4 + col % 4;
}

/* Return the index of the first of the `sides` bytes for 64 columns of a row; the others follow at intervals of 16. */
MOE_INLINE size_t moe_side_index(size_t cols_padded, size_t sides, size_t row, size_t col) {
    return (row / 16 * (cols_padded / 64) + col / 64) * sides * 16 + row % 16;
}
/* Return the F16 part (scale) of a block of 64 columns in a row, given the address of its low byte. */
MOE_INLINE float moe_part(const int8_t *low) {
    return moe_f16_to_f32((uint16_t)((uint8_t)low[0] | (uint8_t)low[16] << 8));
}

/* Return the address of the byte of line 0 for a column; see moe_unit_line. */
MOE_INLINE uint8_t *moe_unit_at(const moe_matrix *m, size_t row, size_t col) {
    return (uint8_t *)(uintptr_t)m->data + (row / 16 * m->cols_padded + col / 32 * 32) * 2 * m->bits + row % 16 * 4 +
           col % 4;
}

/* Return a code, the integer that a row's scale (and part) multiplies; it is in the range of int8. */
MOE_INLINE int32_t moe_matrix_code(const moe_matrix *m, size_t row, size_t col) {
    if (m->bits == 8) return ((const int8_t *)m->data)[moe_q8_index(m->cols_padded, row, col)];
    const int8_t *side = m->subs + moe_side_index(m->cols_padded, m->sides, row, col) + col / 32 % 2 * 16;
    return moe_level(moe_unit_at(m, row, col), m->bits, col / 4 % 8) * side[0] + (m->parts ? side[32] : 0);
}

static void moe_matrix_row(const moe_matrix *m, size_t row, float *out) { moe_formats[m->type].row(m, row, out); }

static float moe_quantise_row_q8(const float *x, size_t cols, int8_t *codes, int8_t *sides) {
    return (void)sides, moe_quantise_numbers(x, cols, codes);
}

/* Return the size in bytes of a quantised row of activations, padded to a cache line. The row consists of int8 codes
 * [cols padded to 64], an int16 sum of every 32 codes for kernels with an unsigned operand and, unless the whole row
 * has one scale, a float scale for every 64 codes. */
MOE_INLINE size_t moe_code_bytes(size_t cols) {
    const size_t padded = moe_round_up(cols, MOE_Q8_COLS);
    return padded + moe_round_up(padded / MOE_CODE_GROUP * sizeof(int16_t) + padded / MOE_Q8_COLS * sizeof(float), 64);
}
MOE_INLINE int16_t *moe_code_sums(int8_t *codes, size_t cols_padded) {
    return (int16_t *)(void *)(codes + cols_padded);
}

/* Quantise a row of activations to q[moe_code_bytes(cols)] and return its scale. */
static float moe_quantise_portable(const float *x, size_t cols, int8_t *q) {
    const size_t padded = moe_round_up(cols, MOE_Q8_COLS), bytes = moe_code_bytes(cols);
    const float scale = moe_quantise_numbers(x, cols, q);
    int16_t *sums = moe_code_sums(q, padded);
    memset(q + cols, 0, bytes - cols);
    for (size_t c = 0; c < padded; c++) sums[c / MOE_CODE_GROUP] = (int16_t)(sums[c / MOE_CODE_GROUP] + q[c]);
    return scale;
}

/* Quantise a row with a scale for every 64 columns, using an instruction set's `quantise`. */
static void moe_quantise_blocks(float (*quantise)(const float *, size_t, int8_t *), const float *x, size_t cols,
                                int8_t *q) {
    const size_t padded = moe_round_up(cols, MOE_Q8_COLS);
    int8_t *sums = q + padded, *scales = sums + padded / MOE_CODE_GROUP * sizeof(int16_t);
    for (size_t c = 0; c < cols; c += MOE_Q8_COLS, q += MOE_Q8_COLS, sums += 4, scales += 4) {
        int8_t block[2 * MOE_Q8_COLS] __attribute__((aligned(4)));
        const float scale = quantise(x + c, moe_min(MOE_Q8_COLS, cols - c), block);
        memcpy(q, block, MOE_Q8_COLS);
        memcpy(sums, block + MOE_Q8_COLS, 4);
        memcpy(scales, &scale, 4);
    }
}

/* Quantise a group u[32], in units of the row's scale, to one of n levels each (n is 16 in Q4). Returns the sub with
 * the smallest squared error, the first on ties: in Q4 among those near the one that maps the largest magnitude to -8.
 * With fewer levels it often pays to clip large magnitudes, so all subs are tried, and zeros have the sub 0. */
MOE_INLINE int moe_quantise_group(const float *u, int8_t *codes, const int8_t *levels, int n, int most) {
    float extreme = 0.0f, best_error = 0.0f;
    int best = 0;
    memset(codes, 0, MOE_Q4_GROUP);
    for (size_t c = 0; c < MOE_Q4_GROUP; c++) {
        if (u[c] * u[c] > extreme * extreme) extreme = u[c];
        best_error = best_error + u[c] * u[c];
    }
    const int around = moe_round(extreme * -0.125f);
    if (n == 16) best_error = FLT_MAX;
    for (int sub = n == 16 ? around - 2 : 1; sub <= (n == 16 ? around + 2 : most); sub++)
        for (int side = 0; side < 2; side++) {
            const int s = side ? -sub : sub;
            float error = 0.0f;
            int8_t tried[MOE_Q4_GROUP];
            if (s == 0 || s < -most || s > most) continue;
            for (size_t c = 0; c < MOE_Q4_GROUP && error < best_error; c++) {
                int code = n == 16 ? moe_round(u[c] / (float)s) : 0;
                for (int i = 1; i < n && n < 16; i++)
                    code += u[c] / (float)s >= 0.5f * (float)(levels[i - 1] + levels[i]);
                if (n == 16) code = code > 7 ? 7 : code < -8 ? -8 : code;
                const float difference = u[c] - (float)((n == 16 ? code : levels[code]) * s);
                error = error + difference * difference;
                tried[c] = (int8_t)code;
            }
            if (error < best_error) {
                best_error = error;
                best = s;
                memcpy(codes, tried, sizeof tried);
            }
        }
    return best;
}

/* Quantise a row to codes[cols_padded] and subs[cols_padded / 32]; return its scale, which is NaN if a number is not
 * finite. The largest magnitude maps to 120. Padding of a group counts as zeros. */
MOE_INLINE float moe_quantise_groups(const float *x, size_t cols, int8_t *codes, int8_t *subs, const int8_t *levels,
                                     int n, int most) {
    const float scale = moe_largest(x, cols) / 120.0f;
    if (!(scale >= FLT_MIN)) return scale < FLT_MIN ? 0.0f : scale;
    for (size_t c = 0; c < cols; c += MOE_Q4_GROUP) {
        float u[MOE_Q4_GROUP] = { 0 };
        for (size_t i = 0; i < moe_min(MOE_Q4_GROUP, cols - c); i++) u[i] = x[c + i] / scale;
        subs[c / MOE_Q4_GROUP] = (int8_t)moe_quantise_group(u, codes + c, levels, n, most);
    }
    return scale;
}
#define MOE_QUANTISE_ROW(name, n, most, ...)                                                         \
    static float moe_quantise_row_##name(const float *x, size_t cols, int8_t *codes, int8_t *subs) { \
        return moe_quantise_groups(x, cols, codes, subs, (const int8_t[]){ __VA_ARGS__ }, n, most);  \
    }
MOE_QUANTISE_ROW(q4, 16, 15, -8)
MOE_QUANTISE_ROW(q3, 8, 30, -4, -3, -2, -1, 0, 1, 2, 3)
MOE_QUANTISE_ROW(q2, 4, 15, -8, -3, 1, 6)

/* Return the step between the levels of a group u[32]; set *low to its minimum. If at most 16 equidistant levels fit
 * all numbers, as for weights converted from another four-bit format, the step is the distance between these levels;
 * otherwise 16 levels span the range. */
static float moe_group_step(const float *u, float *low) {
    float sorted[MOE_Q4_GROUP], range, gap, levels;
    for (size_t i = 0, at; i < MOE_Q4_GROUP; i++) {
        for (at = i; at > 0 && sorted[at - 1] > u[i]; at--) sorted[at] = sorted[at - 1];
        sorted[at] = u[i];
    }
    *low = sorted[0];
    range = gap = sorted[MOE_Q4_GROUP - 1] - *low;
    if (range == 0.0f) return 0.0f;
    for (size_t i = 1; i < MOE_Q4_GROUP; i++) {
        const float between = sorted[i] - sorted[i - 1];
        if (between > range * 0.03125f && between < gap) gap = between; /* smaller gaps are rounding errors */
    }
    levels = (float)moe_round(range / gap);
    int on_grid = levels <= 15.0f;
    for (size_t i = 0; i < MOE_Q4_GROUP && on_grid; i++) {
        const float level = (sorted[i] - *low) / (range / levels);
        on_grid = fabsf(level - (float)moe_round(level)) < 0.03125f;
    }
    return range / (on_grid ? levels : 15.0f);
}

/* Quantise 64 numbers u, in units of the row's scale, to codes[64], two subs and two mids; return the squared error. */
static float moe_quantise_pair(const float *u, const float step[2], const float low[2], float part, int8_t *codes,
                               int8_t *sides) {
    float error = 0.0f;
    for (int half = 0; half < 2; half++, codes += MOE_Q4_GROUP, u += MOE_Q4_GROUP) {
        const int wanted_sub = moe_round(step[half] / part), wanted = moe_round((low[half] + 8.0f * step[half]) / part);
        const int sub = wanted_sub < 1 ? 1 : wanted_sub > 16 ? 16 : wanted_sub;
        const int mid = wanted < -127 ? -127 : wanted > 127 ? 127 : wanted;
        const int down = (127 + mid) / sub, up = (127 - mid) / sub;
        const int first = down < 8 ? -down : -8, last = up < 7 ? up : 7;
        for (size_t i = 0; i < MOE_Q4_GROUP; i++) {
            int code = moe_round((u[i] / part - (float)mid) / (float)sub);
            float difference;
            code = code < first ? first : code > last ? last : code;
            difference = u[i] - (float)(code * sub + mid) * part;
            error = error + difference * difference;
            codes[i] = (int8_t)code;
        }
        sides[half] = (int8_t)sub, sides[2 + half] = (int8_t)mid;
    }
    return error;
}

/* Quantise a row to codes[cols_padded] and sides[cols_padded / 64 * 6]; return its scale, which is NaN if a number is
 * not finite. For each part, try the values that make the larger sub 16 down to 8, and keep the first with the smallest
 * error. Padding counts as zeros. */
static float moe_quantise_row_q4m(const float *x, size_t cols, int8_t *codes, int8_t *sides) {
    const float scale = moe_largest(x, cols) / 16.0f;
    if (!(scale >= FLT_MIN)) return scale < FLT_MIN ? 0.0f : scale;
    for (size_t c = 0; c < cols; c += 64, sides += 6) {
        float u[64] = { 0 }, step[2], low[2], largest = 0.0f, best = FLT_MAX;
        for (size_t i = 0; i < moe_min(64, cols - c); i++) {
            u[i] = x[c + i] / scale;
            if (fabsf(u[i]) > largest) largest = fabsf(u[i]);
        }
        for (int half = 0; half < 2; half++) step[half] = moe_group_step(u + 32 * half, &low[half]);
        for (int sub = 16; sub >= 8 && largest > 0.0f; sub--) {
            const float wide = (step[0] > step[1] ? step[0] : step[1]) / (float)sub, least = largest / 127.0f;
            const uint16_t half = moe_f32_to_f16(wide > least ? wide : least);
            const float part = moe_f16_to_f32(half);
            int8_t tried[64], with[4];
            float error;
            if (part == 0.0f || (error = moe_quantise_pair(u, step, low, part, tried, with)) >= best) continue;
            best = error;
            memcpy(codes + c, tried, 64);
            memcpy(sides, with, 4);
            sides[4] = (int8_t)(half & 0xff), sides[5] = (int8_t)(half >> 8);
        }
    }
    return scale;
}

/* Quantise a row to codes[cols_padded] and a part for every 64 columns; return its scale, which is NaN if a number is
 * not finite. The scale is a power of two, so F16 block scales of other formats, such as GGUF's Q8_0, remain exact. */
static float moe_quantise_row_q8b(const float *x, size_t cols, int8_t *codes, int8_t *parts) {
    const float largest = moe_largest(x, cols) / 127.0f, scale = moe_from_bits(moe_to_bits(largest) & 0x7f800000u);
    if (!(largest >= FLT_MIN)) return largest < FLT_MIN ? 0.0f : largest;
    for (size_t c = 0; c < cols; c += 64, parts += 2) {
        const size_t n = moe_min(64, cols - c);
        const uint16_t half = moe_f32_to_f16(moe_largest(x + c, n) / 127.0f / scale);
        const float step = scale * moe_f16_to_f32(half);
        for (size_t i = 0; i < n && step > 0.0f; i++) {
            const int32_t code = moe_round(x[c + i] / step);
            codes[c + i] = (int8_t)(code > 127 ? 127 : code < -127 ? -127 : code);
        }
        parts[0] = (int8_t)(half & 0xff), parts[1] = (int8_t)(half >> 8);
    }
    return scale;
}

/* Return 1 if all numbers of a row are in the type's range. Quantised types accept all finite numbers. */
MOE_UNUSED static int moe_row_fits(moe_type type, size_t cols, const float *x) {
    const float largest = moe_formats[type].largest;
    for (size_t c = 0; c < cols; c++)
        if (!(x[c] >= -largest && x[c] <= largest)) return 0;
    return 1;
}

/* Write a code of Q8, or the level of Q4 or the number of the level of Q3 or Q2, to zeroed bytes. */
static void moe_put_code(const moe_matrix *m, size_t row, size_t col, int code) {
    const size_t bits = m->bits, unit = col / 4 % 8;
    uint8_t *at = moe_unit_at(m, row, col), *first = at + moe_unit_line(bits, unit) * 64;
    *first = (uint8_t)(*first | (unsigned)(code + (bits == 4 ? 8 : 0)) << moe_unit_shift(bits, unit));
    if (bits == 3 && unit > 5) at[128] = (uint8_t)(at[128] | code >> 2 << unit);
}

/* Write x[cols] to row `row` of a matrix blob of `type`; quantised types need scratch [2 * cols padded to 64]. If `x`
 * is NULL, `scratch` contains the padded codes of a Q8 row, and *given is its scale. */
static void moe_pack_codes(moe_type type, size_t rows, size_t cols, size_t row, const float *x, void *blob,
                           int8_t *scratch, const float *given) {
    const moe_format *format = &moe_formats[type];
    const moe_matrix m = moe_matrix_view(type, rows, cols, blob);
    int8_t *sides = scratch + m.cols_padded, *sides_at;
    int32_t sum = 0;
    if (!moe_type_quantised(type)) {
        for (size_t c = 0; c < cols; c++) format->put(blob, row * cols + c, x[c]);
        return;
    }
    if (x) memset(scratch, 0, m.cols_padded + m.cols_padded / 64 * m.sides);
    const float scale = x ? format->quantise(x, cols, scratch, sides) : *given;
    char *scales = (char *)blob + ((const char *)m.scales - (const char *)blob);
    sides_at = (int8_t *)scales - moe_round_up(rows, MOE_Q8_ROWS) * (m.cols_padded / 64 * m.sides);
    sides_at += moe_side_index(m.cols_padded, m.sides, row, 0);
    for (size_t i = 0; i < m.cols_padded / 64 * m.sides; i++) sides_at[i * 16] = sides[i];
    for (size_t c = 0; c < m.cols_padded; c++) {
        moe_put_code(&m, row, c, scratch[c]);
        sum += moe_matrix_code(&m, row, c);
    }
    memcpy(scales + row * 4, &scale, 4);
    memcpy(scales + (moe_round_up(rows, MOE_Q8_ROWS) + row) * 4, &sum, 4);
}
MOE_UNUSED static void moe_pack_row(moe_type type, size_t rows, size_t cols, size_t row, const float *x, void *blob,
                                    int8_t *scratch) {
    moe_pack_codes(type, rows, cols, row, x, blob, scratch, NULL);
}

/* ---- The formats ---- */

static void moe_row_f32(const moe_matrix *m, size_t row, float *out) {
    memcpy(out, (const float *)m->data + row * m->cols, m->cols * sizeof *out);
}
static void moe_row_f16(const moe_matrix *m, size_t row, float *out) {
    for (size_t c = 0; c < m->cols; c++) out[c] = moe_f16_to_f32(((const uint16_t *)m->data)[row * m->cols + c]);
}
static void moe_row_bf16(const moe_matrix *m, size_t row, float *out) {
    for (size_t c = 0; c < m->cols; c++) out[c] = moe_bf16_to_f32(((const uint16_t *)m->data)[row * m->cols + c]);
}
static void moe_put_f32(void *data, size_t at, float x) { ((float *)data)[at] = x; }
static void moe_put_f16(void *data, size_t at, float x) { ((uint16_t *)data)[at] = moe_f32_to_f16(x); }
static void moe_put_bf16(void *data, size_t at, float x) { ((uint16_t *)data)[at] = moe_f32_to_bf16(x); }

/* Compilers vectorise the inner loop for each number of bits. */
MOE_INLINE void moe_expand_bits(const moe_matrix *m, size_t block, size_t k0, size_t k1, int8_t *out, size_t bits) {
    for (size_t k = k0; k < k1; k += 32) {
        const uint8_t *at = moe_unit_at(m, block * 16, k);
        const int8_t *side = m->subs + moe_side_index(m->cols_padded, m->sides, block * 16, k) + k / 32 % 2 * 16;
        int8_t subs[64], mids[64];
        for (size_t i = 0; i < 64; i++) subs[i] = side[i / 4], mids[i] = m->parts ? side[32 + i / 4] : 0;
        for (size_t unit = 0; unit < 8; unit++, out += 64)
            for (size_t i = 0; i < 64; i++) out[i] = (int8_t)(moe_level(at + i, bits, unit) * subs[i] + mids[i]);
    }
}
/* Expand columns [k0, k1) of a block of 16 rows to the Q8 layout, out[k / 4][16][4]. 32 divides k0 and k1. */
static void moe_expand(const moe_matrix *m, size_t block, size_t k0, size_t k1, int8_t *out) {
    if (m->bits == 4) moe_expand_bits(m, block, k0, k1, out, 4);
    else if (m->bits == 3) moe_expand_bits(m, block, k0, k1, out, 3);
    else moe_expand_bits(m, block, k0, k1, out, 2);
}

static void moe_row_coded(const moe_matrix *m, size_t row, float *out) {
    const int8_t *part = m->parts ? m->parts + moe_side_index(m->cols_padded, m->sides, row, 0) : NULL;
    float scale = m->scales[row];
    for (size_t c = 0; c < m->cols; c++) {
        if (part && c % 64 == 0) scale = m->scales[row] * moe_part(part + c / 64 * m->sides * 16);
        out[c] = (float)moe_matrix_code(m, row, c) * scale;
    }
}

#define MOE_QUANTISED(name) .largest = FLT_MAX, .row = moe_row_coded, .quantise = moe_quantise_row_##name
_Static_assert(MOE_TYPE_COUNT == 9, "add conversions of a new float format to the kernels of each instruction set");
static const moe_format moe_formats[MOE_TYPE_COUNT] = {
    [MOE_TYPE_F32] = { "f32", 32, .largest = FLT_MAX, .row = moe_row_f32, .put = moe_put_f32 },
    [MOE_TYPE_F16] = { "f16", 16, .largest = 65519.996f, .row = moe_row_f16, .put = moe_put_f16 },
    [MOE_TYPE_BF16] = { "bf16", 16, .largest = 0x1.fefffep127f, .row = moe_row_bf16, .put = moe_put_bf16 },
    [MOE_TYPE_Q8] = { "q8", 8, MOE_QUANTISED(q8) },
    [MOE_TYPE_Q4] = { "q4", 4, 2, MOE_QUANTISED(q4) },
    [MOE_TYPE_Q4M] = { "q4m", 4, 6, 1, MOE_QUANTISED(q4m) },
    [MOE_TYPE_Q8B] = { "q8b", 8, 2, 1, MOE_QUANTISED(q8b) },
    [MOE_TYPE_Q3] = { "q3", 3, 2, MOE_QUANTISED(q3) },
    [MOE_TYPE_Q2] = { "q2", 2, 2, MOE_QUANTISED(q2) },
};

/* ==== 10. Kernels: portable ===================================================================================
 * The reference versions of all kernels. Invariant: the kernels of all instruction sets return the same bits. */

/* A linear: y[r][j] = [relu](dot(x[r], w[j]) + addend), where the addend is bias[j] or add[r][j] (at most one is set).
 * Outputs are computed in blocks of 16. Quantised matrices are multiplied by `codes`, float matrices by `x`. */
typedef struct moe_linear {
    const moe_matrix *w;
    const float *x; /* [rows, x_stride] */
    size_t x_stride;
    const int8_t *codes; /* [rows, moe_code_bytes(w->cols)] */
    const float *scales; /* [rows]; NULL if every 64 codes have a scale, stored after the sums of codes */
    const float *bias;   /* [w->rows] or NULL */
    const float *add;    /* [rows, add_stride] or NULL */
    size_t add_stride;
    int relu;
    float *y; /* [rows, y_stride] */
    size_t y_stride;
    const void *next; /* weights needed next, to be prefetched; or NULL */
    /* used if the columns of a block of 16 outputs are multiplied in several ranges: */
    int32_t *carry;            /* [rows][16] integer sums so far; NULL if w is whole or `floats` is used */
    float *floats;             /* [rows][16] float sums so far if codes have scales per block; else NULL */
    size_t sums_at, scales_at; /* offsets from `codes` to the sums and scales of the range; 0 if w is whole */
    int more;                  /* 1 if further columns follow */
} moe_linear;

/* Attention of one query row. For every head, scores = softmax(query . key * scale), y = sum of scores[i] value[i], in
 * row order. `parts` selects the steps; a call for rows [first, n) continues the call for rows [0, first). */
enum { MOE_HEADS_SCORES = 1, MOE_HEADS_SOFTMAX = 2, MOE_HEADS_BLEND = 4, MOE_HEADS_ALL = 7 };
typedef struct moe_heads {
    const float *query;       /* [heads, width] */
    const float *const *rows; /* [n] rows that contain keys and values, [heads / share, width] each */
    size_t values;            /* offset of the values in a row */
    size_t n, heads, share, width;
    float scale;
    float *scores; /* [heads, stride]; stride is a multiple of 16 */
    size_t stride;
    float *y; /* [heads, width] */
    size_t first;
    int parts;
} moe_heads;

/* The delta rule of one value head for consecutive tokens, each a row of q, k, v, y and two gates at the given offsets:
 * S' = decay S; S = S' + k ((v - k S') beta); y = q S. Columns of S are independent; a sum over its rows ascends. */
typedef struct moe_delta {
    float *row;
    size_t stride, tokens, query, key, value, decay, beta, y;
    size_t keys, values; /* rows and columns of S */
    float *state;
} moe_delta;

typedef struct moe_kernels moe_kernels;
struct moe_kernels {
    const char *name;
    int (*available)(void);   /* 1 if the processor and the operating system support the instruction set */
    const moe_kernels *small; /* replacement for cores with a small first-level cache, or NULL */
    /* Compute rows [row0, row1) and 16-output blocks [block0, block1) of a linear. */
    void (*linear)(const moe_linear *l, size_t row0, size_t row1, size_t block0, size_t block1);
    float (*quantise)(const float *x, size_t cols, int8_t *q); /* see moe_quantise_portable */
    /* Compute an LSTM cell for one row: z[4H] in gate order i f g o, c_in[H] -> h[H], c_out[H] (may be c_in). */
    void (*lstm_cell)(const float *z, const float *c_in, size_t hidden, float forget_bias, float *h, float *c_out);
    void (*unary)(moe_unary what, const float *x, size_t n, float *y); /* y may be x */
    /* Return the additive attention score (GNMT), sum_d v[d] tanh(key[d] + query[d]). */
    float (*score_additive)(const float *key, const float *query, const float *v, size_t n);
    float (*dot)(const float *a, const float *b, size_t n);
    void (*axpy)(float a, const float *x, size_t n, float *y); /* y += a x */
    /* Compute y = (x - mean) / sqrt(variance + epsilon) * weight + bias. */
    void (*norm)(const moe_norm_op *norm, const float *x, size_t n, float *y);
    void (*heads)(const moe_heads *h, size_t rows); /* h[rows]: a few query rows, which often share keys */
    void (*delta)(const moe_delta *d);
    /* Convert numbers [at, at + n) of a row stored as F16 or Q8 to F32. The range consists of whole groups. */
    void (*unpack)(const moe_keep *keep, const void *row, size_t at, size_t n, float *y);
    float (*max)(const float *x, size_t n); /* returns -infinity if n is 0 */
    /* Compute y[i] = exp(x[i] - shift) and return the sum in lane order. y may be x or NULL. */
    float (*exp_sum)(const float *x, size_t n, float shift, float *y);
};

enum { MOE_SMALL_L1 = 32 << 10 }; /* largest first-level cache, in bytes, that counts as small */

static float moe_dot_portable(const float *a, const float *b, size_t n) {
    float lane[MOE_LANES] = { 0 };
    for (size_t k = 0; k < n; k++) lane[k % MOE_LANES] += a[k] * b[k];
    return moe_join_lanes(lane);
}

MOE_INLINE float moe_linear_addend(const moe_linear *l, size_t row, size_t j) {
    return l->bias ? l->bias[j] : l->add ? l->add[row * l->add_stride + j] : 0.0f;
}

MOE_INLINE void moe_linear_put(const moe_linear *l, size_t row, size_t j, float product) {
    const float y = product + moe_linear_addend(l, row, j);
    l->y[row * l->y_stride + j] = l->relu ? moe_reluf(y) : y;
}

/* Add the sums of a tile, [rows][16], to the previous sums. Returns the totals, or NULL if further columns follow. */
static const int32_t *moe_sums_so_far(const moe_linear *l, size_t row, size_t rows, const int32_t *sums) {
    int32_t *carry = l->carry + row * 16;
    for (size_t i = 0; i < rows * 16; i++) carry[i] = (int32_t)((uint32_t)carry[i] + (uint32_t)sums[i]);
    return l->more ? NULL : carry;
}

MOE_INLINE size_t moe_sums_at(const moe_linear *l) { return l->sums_at ? l->sums_at : l->w->cols_padded; }
MOE_INLINE size_t moe_scales_at(const moe_linear *l) {
    return l->scales_at ? l->scales_at : l->w->cols_padded + l->w->cols_padded / MOE_CODE_GROUP * sizeof(int16_t);
}

MOE_INLINE float moe_block_scale(const int8_t *at) {
    float scale;
    memcpy(&scale, at, sizeof scale);
    return scale;
}

/* Return 1 if blocks of 64 columns are summed separately, for scales per block of activations or parts of weights. */
MOE_INLINE int moe_by_block(const moe_linear *l) { return !l->scales || l->w->parts; }

/* Convert the sums of a tile, [rows][16], over 64 columns to floats and add these to the sums of preceding columns. */
static void moe_add_block(const moe_linear *l, size_t row, size_t rows, const int32_t *sums) {
    const size_t stride = moe_code_bytes(l->w->cols);
    const int8_t *scales = l->codes + row * stride + moe_scales_at(l), *parts = l->w->parts;
    float *to = l->floats + row * 16, part[16] = { 0 };
    for (size_t j = 0; parts && j < 16; j++) part[j] = moe_part(parts + j);
    for (size_t r = 0; r < rows; r++, to += 16, sums += 16) {
        const float scale = l->scales ? l->scales[row + r] : moe_block_scale(scales + r * stride);
        for (size_t j = 0; j < 16; j++) to[j] = to[j] + (float)sums[j] * (parts ? scale * part[j] : scale);
    }
}

/* Convert the sums of a tile, [rows][blocks][16], to outputs. Sums are floats if moe_by_block, else integers. */
static void moe_finish_portable(const moe_linear *l, size_t row, size_t block, size_t rows, size_t blocks,
                                const void *sums) {
    const float *floats = sums;
    if (l->carry && !(sums = moe_sums_so_far(l, row, rows, sums))) return;
    const int32_t *integers = sums;
    for (size_t r = row; r < row + rows; r++, integers += blocks * 16, floats += blocks * 16)
        for (size_t j = block * 16, i = 0; j < moe_min((block + blocks) * 16, l->w->rows); j++, i++)
            moe_linear_put(l, r, j,
                           moe_by_block(l) ? floats[i] * l->w->scales[j]
                                           : (float)integers[i] * (l->scales[r] * l->w->scales[j]));
}

/* Pass the sums of a tile, [rows][16], to `finish`; if moe_by_block, pass float sums after the last columns. */
MOE_INLINE void moe_finish_sums(const moe_linear *l, size_t row, size_t block, size_t rows, const int32_t *sums,
                                void (*finish)(const moe_linear *, size_t, size_t, size_t, size_t, const void *)) {
    const int by_block = moe_by_block(l);
    if (by_block) moe_add_block(l, row, rows, sums);
    if (!by_block) finish(l, row, block, rows, 1, sums);
    else if (!l->more) finish(l, row, block, rows, 1, l->floats + row * 16);
}

/* Return 128 times the sum of a row's codes, to be subtracted from products with weights to which 128 was added. */
MOE_INLINE int32_t moe_taken(const moe_linear *l, size_t row) {
    const int8_t *codes = l->codes + row * moe_code_bytes(l->w->cols);
    const int16_t *sums = (const int16_t *)(const void *)(codes + moe_sums_at(l));
    int32_t sum = 0;
    for (size_t g = 0; g < l->w->cols_padded / MOE_CODE_GROUP; g++) sum += sums[g];
    return 128 * sum;
}

typedef void (*moe_linear_fn)(const moe_linear *l, size_t row0, size_t row1, size_t block0, size_t block1);

/* Return the part of a linear from `row` on for outputs [first, first + count), whose weights are stored in *w. */
static moe_linear moe_linear_cut(const moe_linear *l, size_t row, size_t first, size_t count, moe_matrix *w) {
    moe_linear part = *l;
    *w = moe_matrix_part(l->w, first, count);
    part.w = w;
    if (l->x) part.x += row * l->x_stride;
    if (l->codes) part.codes += row * moe_code_bytes(l->w->cols);
    if (l->scales) part.scales += row;
    if (l->y) part.y += row * l->y_stride + first;
    if (l->bias) part.bias += first;
    if (l->add) part.add += row * l->add_stride + first;
    if (l->floats) part.floats += row * 16;
    return part;
}

/* Compute a linear of a quantised format. Call `products` for up to ROWS rows, one block of outputs and a range of
 * columns at a time: 1024 columns expanded to Q8 or, without `expand`, 64 columns, which need sums of their own. */
static void moe_linear_ranges(const moe_linear *l, size_t row0, size_t row1, size_t block0, size_t block1,
                              moe_linear_fn products, int expand) {
    enum { ROWS = 64, COLS = 1024 };
    const size_t padded = l->w->cols_padded, range = expand ? COLS : MOE_Q8_COLS;
    int8_t panel[COLS * 16];
    int32_t sums[ROWS * 16];
    float floats[ROWS * 16];
    for (size_t block = block0; block < block1; block++)
        for (size_t row = row0; row < row1; row += ROWS) {
            const size_t rows = moe_min(ROWS, row1 - row);
            moe_matrix w;
            moe_linear part = moe_linear_cut(l, row, block * 16, 16, &w);
            const moe_matrix stored = w;
            if (expand) w.type = MOE_TYPE_Q8, w.bits = 8, w.data = panel, w.subs = NULL;
            if (!moe_by_block(l)) part.carry = memset(sums, 0, rows * 16 * sizeof *sums);
            else if (!l->floats) part.floats = memset(floats, 0, rows * 16 * sizeof *floats);
            for (size_t k = 0; k < padded; k += range, part.codes += range) {
                w.cols_padded = moe_min(range, padded - k);
                if (expand) moe_expand(l->w, block, k, k + w.cols_padded, panel);
                else w.data = (const char *)stored.data + k * 2 * w.bits;
                if (w.subs) w.subs = stored.subs + k / 64 * w.sides * 16;
                if (w.parts) w.parts = stored.parts + k / 64 * w.sides * 16;
                part.sums_at = moe_sums_at(l) - k + k / MOE_CODE_GROUP * sizeof(int16_t);
                part.scales_at = moe_scales_at(l) - k + k / MOE_Q8_COLS * sizeof(float);
                part.more = l->more || k + range < padded;
                products(&part, 0, rows, 0, 1);
            }
        }
}

/* Compute a linear with `products`, by ranges of columns if these need their own sums. */
static void moe_linear_blocks(const moe_linear *l, size_t row0, size_t row1, size_t block0, size_t block1,
                              moe_linear_fn products) {
    if (moe_by_block(l)) moe_linear_ranges(l, row0, row1, block0, block1, products, 0);
    else products(l, row0, row1, block0, block1);
}

/* Define an instruction set's linear, which uses `products` for 8-bit codes and formats up to `last`, expands other
 * quantised formats and multiplies float formats with the kernel of `rest`. */
#define MOE_LINEAR_OF(name, rest, last, products)                                                                  \
    static void moe_linear_##name(const moe_linear *l, size_t row0, size_t row1, size_t block0, size_t block1) {   \
        const moe_type type = l->w->type;                                                                          \
        if (l->w->bits == 8 || (type >= MOE_TYPE_Q8 && type <= MOE_TYPE_##last)) (products);                       \
        else if (moe_type_quantised(type)) moe_linear_ranges(l, row0, row1, block0, block1, moe_linear_##name, 1); \
        else moe_linear_float_##rest(l, row0, row1, block0, block1);                                               \
    }

static void moe_linear_float_portable(const moe_linear *l, size_t row0, size_t row1, size_t block0, size_t block1) {
    const moe_matrix *w = l->w;
    for (size_t j = block0 * 16; j < moe_min(block1 * 16, w->rows); j++)
        for (size_t r = row0; r < row1; r++) {
            const uint16_t *halves = (const uint16_t *)w->data + j * w->cols;
            const float *x = l->x + r * l->x_stride;
            float lane[MOE_LANES] = { 0 };
            if (w->type == MOE_TYPE_F32) {
                moe_linear_put(l, r, j, moe_dot_portable(x, (const float *)w->data + j * w->cols, w->cols));
                continue;
            }
            for (size_t k = 0; k < w->cols; k++)
                lane[k % MOE_LANES] +=
                    x[k] * (w->type == MOE_TYPE_F16 ? moe_f16_to_f32(halves[k]) : moe_bf16_to_f32(halves[k]));
            moe_linear_put(l, r, j, moe_join_lanes(lane));
        }
}

static void moe_q8_portable(const moe_linear *l, size_t row0, size_t row1, size_t block0, size_t block1) {
    const size_t code_bytes = moe_code_bytes(l->w->cols), cols = l->w->cols_padded;
    for (size_t block = block0; block < block1; block++)
        for (size_t r = row0; r < row1; r++) {
            const int8_t *w = (const int8_t *)l->w->data + block * 16 * cols, *x = l->codes + r * code_bytes;
            int32_t sums[16] = { 0 };
            for (size_t k = 0; k < cols; k += 4)
                for (size_t i = 0; i < 16; i++, w += 4)
                    sums[i] += w[0] * x[k] + w[1] * x[k + 1] + w[2] * x[k + 2] + w[3] * x[k + 3];
            moe_finish_sums(l, r, block, 1, sums, moe_finish_portable);
        }
}
MOE_LINEAR_OF(portable, portable, Q8, moe_linear_blocks(l, row0, row1, block0, block1, moe_q8_portable))

static void moe_lstm_cell_portable(const float *z, const float *c_in, size_t hidden, float forget_bias, float *h,
                                   float *c_out) {
    for (size_t j = 0; j < hidden; j++) {
        float i = moe_sigmoidf(z[j]), f = moe_sigmoidf(z[hidden + j] + forget_bias);
        float g = moe_tanhf(z[2 * hidden + j]), o = moe_sigmoidf(z[3 * hidden + j]);
        float kept = f * c_in[j], added = i * g;
        c_out[j] = kept + added;
        h[j] = o * moe_tanhf(c_out[j]);
    }
}

static void moe_unary_portable(moe_unary what, const float *x, size_t n, float *y) {
    for (size_t i = 0; i < n; i++) y[i] = moe_unaryf(what, x[i]);
}

static float moe_score_additive_portable(const float *key, const float *query, const float *v, size_t n) {
    float lane[MOE_LANES] = { 0 };
    for (size_t k = 0; k < n; k++) lane[k % MOE_LANES] += v[k] * moe_tanhf(key[k] + query[k]);
    return moe_join_lanes(lane);
}

static void moe_axpy_portable(float a, const float *x, size_t n, float *y) {
    for (size_t i = 0; i < n; i++) y[i] = y[i] + a * x[i];
}

/* Return the sum of x[i] - shift, or of its square, in lane order. Compilers vectorise this function and moe_norm_row
 * well, so the sections below compile both for their instruction sets. */
MOE_INLINE float moe_centred_sum(const float *x, size_t n, float shift, int squared) {
    float lane[MOE_LANES] = { 0 };
    const size_t whole = n / MOE_LANES * MOE_LANES;
    for (size_t i = 0; i < whole; i += MOE_LANES)
        for (size_t l = 0; l < MOE_LANES; l++) {
            const float d = x[i + l] - shift;
            lane[l] = lane[l] + (squared ? d * d : d);
        }
    for (size_t l = 0; l < n - whole; l++) {
        const float d = x[whole + l] - shift;
        lane[l] = lane[l] + (squared ? d * d : d);
    }
    return moe_join_lanes(lane);
}

MOE_INLINE void moe_norm_row(const moe_norm_op *norm, const float *x, size_t n, float *y) {
    const float mean = norm->rms ? 0.0f : moe_centred_sum(x, n, 0.0f, 0) / (float)n;
    const float scale = 1.0f / sqrtf(moe_centred_sum(x, n, mean, 1) / (float)n + norm->epsilon);
    if (!norm->bias)
        for (size_t c = 0; c < n; c++) y[c] = (x[c] - mean) * scale * norm->weight[c];
    else
        for (size_t c = 0; c < n; c++) y[c] = (x[c] - mean) * scale * norm->weight[c] + norm->bias[c];
}

#define moe_norm_portable moe_norm_row

/* Add weights[i] times columns [at, at + width) of rows[i] to y, in row order. */
static void moe_blend_portable(const float *weights, const float *const *rows, size_t at, size_t n, size_t width,
                               float *y) {
    for (size_t i = 0; i < n; i++) moe_axpy_portable(weights[i], rows[i] + at, width, y);
}

/* Return the largest number. NaNs are ignored; moe_select_topk detects them in the sum of exponentials. */
static float moe_max_portable(const float *x, size_t n) {
    float best = moe_from_bits(0xff800000u);
    for (size_t i = 0; i < n; i++) best = x[i] > best ? x[i] : best;
    return best + 0.0f; /* turns -0 into +0 */
}

static float moe_exp_sum_portable(const float *x, size_t n, float shift, float *y) {
    float lane[MOE_LANES] = { 0 };
    for (size_t k = 0; k < n; k++) {
        float e = moe_expf(x[k] - shift);
        if (y) y[k] = e;
        lane[k % MOE_LANES] += e;
    }
    return moe_join_lanes(lane);
}

/* Compute heads with the other kernels of an instruction set. */
MOE_INLINE void moe_heads_by(const moe_heads *h, size_t rows, float (*dot)(const float *, const float *, size_t),
                             float (*max)(const float *, size_t),
                             float (*exp_sum)(const float *, size_t, float, float *),
                             void (*blend)(const float *, const float *const *, size_t, size_t, size_t, float *)) {
    for (const moe_heads *end = h + rows; h < end; h++)
        for (size_t head = 0; head < h->heads; head++) {
            const size_t at = head * h->width, key = head / h->share * h->width;
            const size_t first = h->first, last = h->parts & MOE_HEADS_SCORES ? h->n : 0;
            float *p = h->scores + head * h->stride;
            for (size_t i = first; i < last; i++) p[i] = dot(h->query + at, h->rows[i] + key, h->width) * h->scale;
            const float sum = h->parts & MOE_HEADS_SOFTMAX ? exp_sum(p, h->n, max(p, h->n), p) : 0.0f;
            for (size_t i = 0; i < h->n && h->parts & MOE_HEADS_SOFTMAX; i++) p[i] = p[i] / sum;
            if (!(h->parts & MOE_HEADS_BLEND)) continue;
            if (!first) memset(h->y + at, 0, h->width * sizeof(float));
            blend(p + first, h->rows + first, h->values + key, h->n - first, h->width, h->y + at);
        }
}

static void moe_heads_portable(const moe_heads *h, size_t rows) {
    moe_heads_by(h, rows, moe_dot_portable, moe_max_portable, moe_exp_sum_portable, moe_blend_portable);
}

static void moe_delta_portable(const moe_delta *d) {
    float *row = d->row;
    for (size_t t = 0; t < d->tokens; t++, row += d->stride)
        for (size_t c = 0; c < d->values; c++) {
            float *state = d->state + c / MOE_LANES * MOE_LANES * d->keys + c % MOE_LANES, sum = 0.0f, y = 0.0f;
            const float decay = row[d->decay], *key = row + d->key, *query = row + d->query;
            for (size_t i = 0; i < d->keys; i++) sum = sum + state[i * MOE_LANES] * decay * key[i];
            const float change = (row[d->value + c] - sum) * row[d->beta];
            for (size_t i = 0; i < d->keys; i++) {
                state[i * MOE_LANES] = state[i * MOE_LANES] * decay + key[i] * change;
                y = y + state[i * MOE_LANES] * query[i];
            }
            row[d->y + c] = y;
        }
}

/* Unpack groups of Q8 to F32. The sections below compile this function for their instruction sets. */
MOE_INLINE void moe_unpack_codes(const moe_keep *keep, const void *row, size_t at, size_t n, float *y) {
    const float *scales = row;
    const int8_t *codes = (const int8_t *)(scales + moe_keep_scales(keep));
    for (; n; at += keep->group, y += keep->group, n -= keep->group)
        for (size_t c = 0; c < keep->group; c++) y[c] = (float)codes[at + c] * scales[at / keep->group];
}

static void moe_unpack_portable(const moe_keep *keep, const void *row, size_t at, size_t n, float *y) {
    for (size_t c = 0; c < n; c++) y[c] = moe_kept(keep, row, at + c);
}

static int moe_portable_available(void) { return 1; }

/* Initialise a moe_kernels for the table in "Dispatch"; `rest` is the suffix of all kernels except the linear. */
#define MOE_PASTE(a, b) a##b
#define MOE_NAME(name, isa) MOE_PASTE(name, isa)
#define MOE_KERNELS_OF(isa, products, rest)                                                                            \
    .name = #isa, .available = moe_##isa##_available, .linear = (products), .quantise = MOE_NAME(moe_quantise_, rest), \
    .lstm_cell = MOE_NAME(moe_lstm_cell_, rest), .unary = MOE_NAME(moe_unary_, rest),                                  \
    .score_additive = MOE_NAME(moe_score_additive_, rest), .dot = MOE_NAME(moe_dot_, rest),                            \
    .axpy = MOE_NAME(moe_axpy_, rest), .heads = MOE_NAME(moe_heads_, rest), .norm = MOE_NAME(moe_norm_, rest),         \
    .max = MOE_NAME(moe_max_, rest), .exp_sum = MOE_NAME(moe_exp_sum_, rest), .unpack = MOE_NAME(moe_unpack_, rest),   \
    .delta = MOE_NAME(moe_delta_, rest)

static const moe_kernels moe_kernels_portable = { MOE_KERNELS_OF(portable, moe_linear_portable, portable) };

/* Load four codes, to be broadcast to every lane. */
MOE_INLINE int32_t moe_four(const int8_t *codes) {
    int32_t four;
    memcpy(&four, codes, 4);
    return four;
}

/* Load the sum of a group of codes, written by moe_quantise_portable or its vector versions. */
MOE_INLINE int32_t moe_code_sum(const int8_t *at) {
    int16_t sum;
    memcpy(&sum, at, 2);
    return sum;
}

/* Return the offset of output `at`, given the bytes per block of 16 outputs and per output. */
MOE_INLINE size_t moe_register_at(int at, size_t block_bytes, size_t unit) {
    return (size_t)at / 16 * block_bytes + (size_t)at % 16 * unit;
}

/* Addresses of the current columns of a tile: codes, sums and scales of the input rows; sides and codes of weights. */
typedef struct moe_columns {
    const int8_t *x, *x_sums, *x_scales, *sub, *part;
    const char *w;
} moe_columns;
typedef void (*moe_columns_fn)(const moe_linear *l, size_t row, const moe_columns *c, float *floats);

/* Compute a tile of a quantised matrix; see K(tile) in "Kernels: shared". */
typedef void (*moe_tile_fn)(const moe_linear *l, const int32_t *start, size_t row, size_t block, size_t block1,
                            const char *next, int ask);

/* Unroll a loop; otherwise gcc keeps the sums of a tile in memory. MOE_UNROLL_IF_KNOWN_FOR is for loops with a length
 * that is constant only in some inlined copies. clang unrolls such loops by itself; a pragma would cause warnings. */
#if defined(__clang__)
#define MOE_UNROLL_FOR _Pragma("clang loop unroll(full)") for
#define MOE_UNROLL_IF_KNOWN_FOR for
#else
#define MOE_UNROLL_FOR _Pragma("GCC unroll 16") for
#define MOE_UNROLL_IF_KNOWN_FOR MOE_UNROLL_FOR
#endif

#endif /* MOE_HOST */
#endif /* MOE_ISA */

/* ==== 11. Kernels: shared =====================================================================================
 * Kernels compiled for several instruction sets. "Kernels: AVX2", "Kernels: AVX-512", "Kernels: NEON" and "Kernels:
 * WebAssembly" define MOE_ISA, the suffix of every name here, MOE_ISA_TARGET, the attribute of its functions, and
 * register types with their operations. They then include this file, which compiles only this section; macros that are
 * the same in every copy remain defined. Invariant: floats are summed and rounded in the order of "Kernels: portable".
 *
 * Floats: moe_lanes_ISA contains 16 floats in registers, with operations moe_lanes_OPERATION_ISA:
 *
 *   of(x)              16 copies of x                   load(x, n)      the first n of 16 floats, then zeros
 *   add sub mul div    lane by lane                     store(y, v, n)  the first n lanes
 *   and or xor         bitwise                          max_bits        max of the bits as integers
 *   max min            a > b ? a : b, a < b ? a : b     of_ints(x)      16 integers
 *   halves(type, x)    16 numbers of F16 or BF16
 *   scaled(x, y, t, n) y times 2^n, 0 where x < MOE_EXP_LOW; t is n + MOE_ROUND_MAGIC
 *   join(v)            the sum by the fixed tree        codes(v, q)     store 16 int8, rounded to nearest even
 *   largest(v), largest_bits(v)  the largest lane       code_sums(q, to)  store two sums of 32 codes
 *   max_few(x, n)      max of n < 16 floats             put(l, row, j, v, n)  join and store v[n], as moe_linear_put
 *
 * and MOE_ISA_OUTPUTS, the number of outputs in a tile of a float matrix and the maximum n of put. If the lanes are in
 * several registers, MOE_ISA_REGISTERS is their number instead. This section then defines all of these but code_sums
 * with the same operations on a register, moe_register_OPERATION_ISA, without n; `codes` receives all registers, and
 * moe_register_math_ISA(op) is add, sub, mul or div.
 * MOE_ISA_FETCH(type, w) prefetches weights.
 *
 * Quantised tiles of x86: moe_ints_BITS is a register of MOE_ISA_BITS bits with the sums of 8 or 16 outputs. Operations
 * moe_ints_OPERATION_BITS: op(name) (the intrinsic _mmBITS_name), load(x), store(x, v), field(v, shift, mask) of each
 * byte, look(table, v), factor(subs) (the outputs' subs in the low half of each lane), middles(mids) (mids in the high
 * half), part(low) (the outputs' parts). Operations moe_OPERATION_ISA:
 *
 *   line_of(w)              load Q8 weights to a moe_line_ISA, the operand of `product`
 *   product(sum, line, x)   add the products of four columns; every lane of x contains the same four codes
 *   start(start, r, v)      initial sums of row r, register v, if `started`
 *   part_of(taken)          initial sums of a group; part_of or times_sub subtract taken, 8 or 4 times x_sum
 *   product_q4(part, n, x)  like product, for nibbles
 *   times_sub(sum, part, taken, factor, mids)  add part times sub and, for Q4M, x_sum times mid
 *
 * and MOE_ISA_TILES(X), a list of X(format, rows, blocks); MOE_ISA_ROWS, the maximum rows of a Q8 tile (default 4);
 * MOE_ISA_LINES(rows), the lines of weights per step of a tile with few rows; MOE_ISA_VNNI, 1 if products multiply
 * unsigned by signed bytes: 128 is then added to each weight and start[r], 128 * sum(codes of row r), subtracted from
 * the sums. Otherwise start[16] is the result of moe_negative_avx2 for a block, or NULL. */

#ifdef MOE_ISA
#define K(name) MOE_NAME(moe_##name##_, MOE_ISA)
#define L(name) MOE_NAME(moe_lanes_##name##_, MOE_ISA)
#define V MOE_NAME(moe_lanes_, MOE_ISA)
#define MOE_ISA_STATIC MOE_ISA_TARGET static
#define MOE_ISA_INLINE MOE_ISA_TARGET MOE_INLINE

#ifdef MOE_ISA_REGISTERS
#define MOE_ISA_OUTPUTS 1
#define MOE_WIDTH (MOE_LANES / MOE_ISA_REGISTERS)
#define R(name) MOE_NAME(moe_register_##name##_, MOE_ISA)
typedef struct V {
    MOE_NAME(moe_register_, MOE_ISA) at[MOE_ISA_REGISTERS];
} V;

/* Define an operation that computes `value` for every register i. */
#define MOE_EACH(name, parameters, value)                                          \
    MOE_ISA_INLINE V L(name) parameters {                                          \
        V v;                                                                       \
        MOE_UNROLL_FOR (size_t i = 0; i < MOE_ISA_REGISTERS; i++) v.at[i] = value; \
        return v;                                                                  \
    }
MOE_EACH(add, (V a, V b), R(math)(add)(a.at[i], b.at[i]))
MOE_EACH(sub, (V a, V b), R(math)(sub)(a.at[i], b.at[i]))
MOE_EACH(mul, (V a, V b), R(math)(mul)(a.at[i], b.at[i]))
MOE_EACH(div, (V a, V b), R(math)(div)(a.at[i], b.at[i]))
MOE_EACH(and, (V a, V b), R(and)(a.at[i], b.at[i]))
MOE_EACH(or, (V a, V b), R(or)(a.at[i], b.at[i]))
MOE_EACH(xor, (V a, V b), R(xor)(a.at[i], b.at[i]))
MOE_EACH(max, (V a, V b), R(max)(a.at[i], b.at[i]))
MOE_EACH(min, (V a, V b), R(min)(a.at[i], b.at[i]))
MOE_EACH(max_bits, (V a, V b), R(max_bits)(a.at[i], b.at[i]))
MOE_EACH(of, (float x), R(of)(x))
MOE_EACH(of_ints, (const int32_t *x), R(of_ints)(x + MOE_WIDTH * i))
MOE_EACH(halves, (moe_type type, const uint16_t *x), R(halves)(type, x + MOE_WIDTH * i))
MOE_EACH(scaled, (V x, V y, V t, V n), ((void)n, R(scaled)(x.at[i], y.at[i], t.at[i])))
MOE_EACH(load_whole, (const float *x), R(load)(x + MOE_WIDTH * i))

/* Tails are copied to a zeroed buffer: adding a product of zeros leaves a lane unchanged. */
MOE_ISA_INLINE V L(load)(const float *x, size_t n) {
    float tail[MOE_LANES] = { 0 };
    return L(load_whole)(n < MOE_LANES ? memcpy(tail, x, n * sizeof *x) : x);
}
MOE_ISA_INLINE void L(store)(float *y, V v, size_t n) {
    float tail[MOE_LANES], *to = n < MOE_LANES ? tail : y;
    MOE_UNROLL_FOR (size_t i = 0; i < MOE_ISA_REGISTERS; i++) R(store)(to + MOE_WIDTH * i, v.at[i]);
    if (n < MOE_LANES) memcpy(y, tail, n * sizeof *y);
}

/* Combine the registers of v in the order of the fixed tree. */
#if MOE_ISA_REGISTERS == 2
#define MOE_FOLD(op, v) op((v).at[0], (v).at[1])
#else
#define MOE_FOLD(op, v) op(op((v).at[0], (v).at[2]), op((v).at[1], (v).at[3]))
#endif
MOE_ISA_INLINE float L(join)(V v) { return R(join)(MOE_FOLD(R(math)(add), v)); }
MOE_ISA_INLINE float L(largest_bits)(V v) { return R(largest_bits)(MOE_FOLD(R(max_bits), v)); }
MOE_ISA_INLINE float L(largest)(V v) {
    float lane[MOE_WIDTH];
    R(store)(lane, MOE_FOLD(R(max), v));
    return moe_max_portable(lane, MOE_WIDTH);
}
MOE_ISA_INLINE float L(max_few)(const float *x, size_t n) { return moe_max_portable(x, n); }
MOE_ISA_INLINE void L(codes)(V v, int8_t *q) { R(codes)(v.at, q); }
MOE_ISA_INLINE void L(put)(const moe_linear *l, size_t row, size_t j, const V *v, int n) {
    (void)n;
    moe_linear_put(l, row, j, L(join)(*v));
}
#undef MOE_FOLD
#undef MOE_WIDTH
#undef R
#undef MOE_ISA_REGISTERS
#endif

#ifdef MOE_ISA_OUTPUTS
/* Return moe_expf of lanes <= MOE_EXP_HIGH or NaN. `scaled` needs no lower clamp: it returns 0 below MOE_EXP_LOW. */
MOE_ISA_INLINE V K(exp_below)(V x) {
    const V magic = L(of)(MOE_ROUND_MAGIC), t = L(add)(L(mul)(x, L(of)(MOE_LOG2E)), magic), n = L(sub)(t, magic);
    V r = L(sub)(x, L(mul)(n, L(of)(MOE_LN2_HIGH))), y;
    r = L(sub)(r, L(mul)(n, L(of)(MOE_LN2_LOW)));
    y = L(add)(L(mul)(L(of)(MOE_EXP_6), r), L(of)(MOE_EXP_5));
    y = L(add)(L(mul)(y, r), L(of)(MOE_EXP_4));
    y = L(add)(L(mul)(y, r), L(of)(MOE_EXP_3));
    y = L(add)(L(mul)(y, r), L(of)(MOE_EXP_2));
    y = L(add)(L(mul)(y, L(mul)(r, r)), r);
    return L(scaled)(x, L(add)(y, L(of)(1.0f)), t, n);
}

MOE_ISA_INLINE V K(exp)(V x) { return K(exp_below)(L(min)(L(of)(MOE_EXP_HIGH), x)); }

MOE_ISA_INLINE V K(sigmoid)(V x) {
    const V one = L(of)(1.0f);
    return L(div)(one, L(add)(one, K(exp)(L(xor)(x, L(of)(-0.0f)))));
}

MOE_ISA_INLINE V K(tanh)(V x) {
    const V one = L(of)(1.0f), sign = L(of)(-0.0f), negative = L(or)(sign, x);
    const V t = K(exp_below)(L(add)(negative, negative));
    return L(or)(L(div)(L(sub)(one, t), L(add)(one, t)), L(and)(sign, x));
}

MOE_ISA_INLINE void K(cell_of)(const float *z, const float *c_in, size_t hidden, size_t n, V forget, float *h,
                               float *c_out) {
    const V i = K(sigmoid)(L(load)(z, n)), f = K(sigmoid)(L(add)(L(load)(z + hidden, n), forget));
    const V g = K(tanh)(L(load)(z + 2 * hidden, n)), o = K(sigmoid)(L(load)(z + 3 * hidden, n));
    const V c = L(add)(L(mul)(f, L(load)(c_in, n)), L(mul)(i, g));
    L(store)(c_out, c, n);
    L(store)(h, L(mul)(o, K(tanh)(c)), n);
}

MOE_ISA_STATIC void K(lstm_cell)(const float *z, const float *c_in, size_t hidden, float forget_bias, float *h,
                                 float *c_out) {
    const V forget = L(of)(forget_bias);
    size_t j = 0;
    for (; j + 16 <= hidden; j += 16) K(cell_of)(z + j, c_in + j, hidden, 16, forget, h + j, c_out + j);
    if (j < hidden) K(cell_of)(z + j, c_in + j, hidden, hidden - j, forget, h + j, c_out + j);
}

MOE_ISA_INLINE V K(unary_of)(moe_unary what, V v) {
    if (what == MOE_UNARY_TANH) return K(tanh)(v);
    if (what == MOE_UNARY_SWISH) return L(mul)(v, K(sigmoid)(v));
    if (what == MOE_UNARY_SIGMOID) return K(sigmoid)(v);
    const V slope = L(add)(L(of)(MOE_GELU_1), L(mul)(L(of)(MOE_GELU_3), L(mul)(v, v)));
    return L(mul)(v, K(sigmoid)(L(mul)(v, slope)));
}

MOE_ISA_STATIC void K(unary)(moe_unary what, const float *x, size_t n, float *y) {
    size_t i = what < MOE_UNARY_SWISH || what > MOE_UNARY_SIGMOID ? n : 0;
    if (i) moe_unary_portable(what, x, n, y);
    for (; i + 16 <= n; i += 16) L(store)(y + i, K(unary_of)(what, L(load)(x + i, 16)), 16);
    if (i < n) L(store)(y + i, K(unary_of)(what, L(load)(x + i, n - i)), n - i);
}

MOE_ISA_INLINE V K(score_of)(const float *key, const float *query, const float *v, size_t n) {
    return L(mul)(L(load)(v, n), K(tanh)(L(add)(L(load)(key, n), L(load)(query, n))));
}

MOE_ISA_STATIC float K(score_additive)(const float *key, const float *query, const float *v, size_t n) {
    V sum = L(of)(0.0f);
    size_t k = 0;
    for (; k + 16 <= n; k += 16) sum = L(add)(sum, K(score_of)(key + k, query + k, v + k, 16));
    if (k < n) sum = L(add)(sum, K(score_of)(key + k, query + k, v + k, n - k));
    return L(join)(sum);
}

MOE_ISA_STATIC float K(dot)(const float *a, const float *b, size_t n) {
    V sum = L(of)(0.0f);
    size_t k = 0;
    for (; k + 16 <= n; k += 16) sum = L(add)(sum, L(mul)(L(load)(a + k, 16), L(load)(b + k, 16)));
    if (k < n) sum = L(add)(sum, L(mul)(L(load)(a + k, n - k), L(load)(b + k, n - k)));
    return L(join)(sum);
}

MOE_ISA_STATIC void K(axpy)(float a, const float *x, size_t n, float *y) {
    const V factor = L(of)(a);
    size_t i = 0;
    for (; i + 16 <= n; i += 16) L(store)(y + i, L(add)(L(load)(y + i, 16), L(mul)(factor, L(load)(x + i, 16))), 16);
    if (i < n) L(store)(y + i, L(add)(L(load)(y + i, n - i), L(mul)(factor, L(load)(x + i, n - i))), n - i);
}

/* Compute `blocks` blocks of 16 columns of S from `column` on; the last has n columns. Lanes after these remain 0. */
MOE_ISA_INLINE void K(delta_blocks)(const moe_delta *d, size_t column, const size_t blocks, const size_t n) {
    float *state = d->state + column * d->keys, *row = d->row;
    for (size_t t = 0; t < d->tokens; t++, row += d->stride) {
        const float *key = row + d->key, *query = row + d->query;
        const V decay = L(of)(row[d->decay]), beta = L(of)(row[d->beta]), zero = L(of)(0.0f);
        V sum[2] = { zero, zero }, y[2] = { zero, zero };
        for (size_t i = 0; i < d->keys; i++) {
            const V k = L(of)(key[i]);
            MOE_UNROLL_FOR (size_t b = 0; b < blocks; b++)
                sum[b] = L(add)(sum[b], L(mul)(L(mul)(L(load)(state + (b * d->keys + i) * 16, 16), decay), k));
        }
        MOE_UNROLL_FOR (size_t b = 0; b < blocks; b++)
            sum[b] = L(mul)(L(sub)(L(load)(row + d->value + column + 16 * b, n), sum[b]), beta);
        for (size_t i = 0; i < d->keys; i++) {
            const V k = L(of)(key[i]), q = L(of)(query[i]);
            MOE_UNROLL_FOR (size_t b = 0; b < blocks; b++) {
                float *at = state + (b * d->keys + i) * 16;
                const V s = L(add)(L(mul)(L(load)(at, 16), decay), L(mul)(k, sum[b]));
                L(store)(at, s, 16);
                y[b] = L(add)(y[b], L(mul)(s, q));
            }
        }
        MOE_UNROLL_FOR (size_t b = 0; b < blocks; b++) L(store)(row + d->y + column + 16 * b, y[b], n);
    }
}

MOE_ISA_STATIC void K(delta)(const moe_delta *d) {
    size_t c = 0;
    for (; c + 32 <= d->values; c += 32) K(delta_blocks)(d, c, 2, 16);
    for (; c + 16 <= d->values; c += 16) K(delta_blocks)(d, c, 1, 16);
    if (c < d->values) K(delta_blocks)(d, c, 1, d->values - c);
}

MOE_ISA_STATIC float K(exp_sum)(const float *x, size_t n, float shift, float *y) {
    static const float ones[MOE_LANES] = { 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 };
    const V by = L(of)(shift);
    V sum = L(of)(0.0f), e;
    size_t k = 0;
    for (; k + 16 <= n; k += 16) {
        e = K(exp)(L(sub)(L(load)(x + k, 16), by));
        if (y) L(store)(y + k, e, 16);
        sum = L(add)(sum, e);
    }
    if (k < n) { /* lanes after the end contain exp(-shift), a finite number, and are multiplied by 0 */
        e = K(exp)(L(sub)(L(load)(x + k, n - k), by));
        if (y) L(store)(y + k, e, n - k);
        sum = L(add)(sum, L(mul)(e, L(load)(ones, n - k)));
    }
    return L(join)(sum);
}

/* Return the largest number, in any order: four registers hide the latency, and the last load may overlap. */
MOE_ISA_STATIC float K(max)(const float *x, size_t n) {
    const V lowest = L(of)(moe_from_bits(0xff800000u));
    V best[4] = { lowest, lowest, lowest, lowest };
    size_t i = 0;
    if (n < 16) return L(max_few)(x, n);
    if (n >= 64) {
        for (; i + 64 <= n; i += 64)
            MOE_UNROLL_FOR (size_t b = 0; b < 4; b++) best[b] = L(max)(L(load)(x + i + 16 * b, 16), best[b]);
        best[0] = L(max)(L(max)(best[0], best[1]), L(max)(best[2], best[3]));
    }
    for (; i < n; i += 16) best[0] = L(max)(L(load)(x + moe_min(i, n - 16), 16), best[0]);
    return L(largest)(best[0]) + 0.0f;
}

MOE_ISA_STATIC void K(norm)(const moe_norm_op *norm, const float *x, size_t n, float *y) {
    moe_norm_row(norm, x, n, y);
}

/* Quantise like moe_quantise_portable. Magnitudes are compared as integers, so infinities and NaNs exceed numbers. */
MOE_ISA_STATIC float K(quantise)(const float *x, size_t cols, int8_t *q) {
    const size_t padded = moe_round_up(cols, MOE_Q8_COLS), whole = cols / 16 * 16;
    const V magnitude = L(of)(moe_from_bits(0x7fffffffu));
    int16_t *sums = moe_code_sums(q, padded);
    V max = L(of)(0.0f), factor;
    float amax, inverse;
    for (size_t c = 0; c < whole; c += 16) max = L(max_bits)(max, L(and)(L(load)(x + c, 16), magnitude));
    if (whole < cols) max = L(max_bits)(max, L(and)(L(load)(x + whole, cols - whole), magnitude));
    amax = L(largest_bits)(max);
    if (!(amax >= FLT_MIN && amax <= FLT_MAX)) return moe_quantise_portable(x, cols, q);
    inverse = 127.0f / amax;
    if (!(inverse <= FLT_MAX)) inverse = FLT_MAX;
    factor = L(of)(inverse);
    memset(q + whole, 0, moe_code_bytes(cols) - whole);
    for (size_t c = 0; c < whole; c += 16) /* at most 127, because |x| <= amax */
        L(codes)(L(mul)(L(load)(x + c, 16), factor), q + c);
    if (whole < cols) L(codes)(L(mul)(L(load)(x + whole, cols - whole), factor), q + whole);
    for (size_t c = 0; c < padded; c += 64) L(code_sums)(q + c, sums + c / MOE_CODE_GROUP);
    return amax / 127.0f;
}

/* Convert n of the 16 sums of a block to outputs. `sum` contains floats if moe_by_block, else integers. */
MOE_ISA_INLINE void K(finish_block)(const moe_linear *l, size_t row, size_t rows, size_t j, const size_t n,
                                    const void *sum, size_t stride) {
    const V zero = L(of)(0.0f), scales = L(load)(l->w->scales + j, 16), bias = l->bias ? L(load)(l->bias + j, n) : zero;
    const float *scale = moe_by_block(l) ? NULL : l->scales + row,
                *add = l->add ? l->add + row * l->add_stride + j : NULL;
    const size_t add_stride = l->add_stride, y_stride = l->y_stride;
    const int relu = l->relu;
    float *y = l->y + row * l->y_stride + j;
    for (size_t r = 0; r < rows; r++, sum = (const char *)sum + 4 * stride, y += y_stride) {
        V v = scale ? L(mul)(L(of_ints)(sum), L(mul)(L(of)(scale[r]), scales)) : L(mul)(L(load)(sum, 16), scales);
        v = L(add)(v, add ? L(load)(add + r * add_stride, n) : bias);
        L(store)(y, relu ? L(max)(zero, v) : v, n);
    }
}

/* Convert the sums of a tile, [rows][blocks][16], to outputs. Inlining would make gcc keep the sums in memory. */
__attribute__((noinline)) MOE_ISA_STATIC void K(finish)(const moe_linear *l, size_t row, size_t block, size_t rows,
                                                        size_t blocks, const void *sums) {
    if (l->carry && !(sums = moe_sums_so_far(l, row, rows, sums))) return;
    for (size_t b = 0; b < blocks; b++) {
        const size_t j = (block + b) * 16, n = l->w->rows - j;
        const void *of = (const char *)sums + b * 64;
        if (n >= 16) K(finish_block)(l, row, rows, j, 16, of, blocks * 16);
        else K(finish_block)(l, row, rows, j, n, of, blocks * 16);
    }
}

MOE_ISA_INLINE V K(weights)(moe_type type, const char *w, size_t n) {
    uint16_t tail[MOE_LANES] = { 0 };
    if (type == MOE_TYPE_F32) return L(load)((const float *)(const void *)w, n);
    return L(halves)(type, n < MOE_LANES ? memcpy(tail, w, n * sizeof *tail) : (const void *)w);
}

/* Add the products of columns [k, k + n) to the sums of a tile of a float matrix. */
MOE_ISA_INLINE void K(float_step)(const moe_linear *l, const float *x, const char *w, size_t k, size_t n,
                                  V sum[4][MOE_ISA_OUTPUTS], const moe_type type, const int rows, const int outputs,
                                  const int fetch) {
    const size_t size = type == MOE_TYPE_F32 ? 4 : 2, row_bytes = l->w->cols * size;
    V numbers[MOE_ISA_OUTPUTS];
    MOE_UNROLL_FOR (int o = 0; o < outputs; o++) {
        numbers[o] = K(weights)(type, w + (size_t)o * row_bytes + k * size, n);
        if (fetch) MOE_ISA_FETCH(type, w + (size_t)(o + outputs) * row_bytes + k * size);
    }
    MOE_UNROLL_FOR (int r = 0; r < rows; r++) {
        const V v = L(load)(x + (size_t)r * l->x_stride + k, n);
        MOE_UNROLL_FOR (int o = 0; o < outputs; o++) sum[r][o] = L(add)(sum[r][o], L(mul)(v, numbers[o]));
    }
}

/* Compute `outputs` outputs of a float matrix for up to 4 rows. If `fetch` is 1, prefetch the next tile's weights. */
MOE_ISA_INLINE void K(float_tile)(const moe_linear *l, size_t row, size_t j, const moe_type type, const int rows,
                                  const int outputs, const int fetch) {
    const size_t cols = l->w->cols, whole = cols / 16 * 16;
    const char *w = (const char *)l->w->data + j * cols * (type == MOE_TYPE_F32 ? 4 : 2);
    const float *x = l->x + row * l->x_stride;
    V sum[4][MOE_ISA_OUTPUTS];
    MOE_UNROLL_FOR (int r = 0; r < rows; r++)
        MOE_UNROLL_FOR (int o = 0; o < MOE_ISA_OUTPUTS; o++) sum[r][o] = L(of)(0.0f);
    for (size_t k = 0; k < whole; k += 16) K(float_step)(l, x, w, k, 16, sum, type, rows, outputs, fetch);
    if (whole < cols) K(float_step)(l, x, w, whole, cols - whole, sum, type, rows, outputs, 0);
    MOE_UNROLL_FOR (int r = 0; r < rows; r++) L(put)(l, row + (size_t)r, j, sum[r], outputs);
}

MOE_ISA_INLINE void K(float_rows)(const moe_linear *l, size_t row0, size_t row1, size_t j, const moe_type type,
                                  const int outputs) {
    size_t r = row0;
    if (r + 4 <= row1) K(float_tile)(l, r, j, type, 4, outputs, 1), r += 4;
    for (; r + 4 <= row1; r += 4) K(float_tile)(l, r, j, type, 4, outputs, 0);
    for (; r + 2 <= row1; r += 2) K(float_tile)(l, r, j, type, 2, outputs, 1);
    for (; r < row1; r++) K(float_tile)(l, r, j, type, 1, outputs, 1);
}

MOE_ISA_INLINE void K(float)(const moe_linear *l, size_t row0, size_t row1, size_t j, size_t j1, const moe_type type) {
    for (; j + MOE_ISA_OUTPUTS <= j1; j += MOE_ISA_OUTPUTS) K(float_rows)(l, row0, row1, j, type, MOE_ISA_OUTPUTS);
    for (; j < j1; j++)
        for (size_t r = row0; r < row1; r++) K(float_tile)(l, r, j, type, 1, 1, 0);
}

MOE_ISA_STATIC void K(linear_float)(const moe_linear *l, size_t row0, size_t row1, size_t block0, size_t block1) {
    const size_t j0 = block0 * 16, j1 = moe_min(block1 * 16, l->w->rows);
    if (l->w->type == MOE_TYPE_F32) K(float)(l, row0, row1, j0, j1, MOE_TYPE_F32);
    else if (l->w->type == MOE_TYPE_F16) K(float)(l, row0, row1, j0, j1, MOE_TYPE_F16);
    else K(float)(l, row0, row1, j0, j1, MOE_TYPE_BF16);
}

MOE_ISA_STATIC void K(unpack)(const moe_keep *keep, const void *row, size_t at, size_t n, float *y) {
    const char *x = (const char *)row + at * sizeof(uint16_t);
    size_t c = 0;
    if (keep->type == MOE_TYPE_Q8) {
        moe_unpack_codes(keep, row, at, n, y);
        return;
    }
    for (; c + 16 <= n; c += 16) L(store)(y + c, K(weights)(MOE_TYPE_F16, x + c * sizeof(uint16_t), 16), 16);
    if (c < n) L(store)(y + c, K(weights)(MOE_TYPE_F16, x + c * sizeof(uint16_t), n - c), n - c);
}

/* "Kernels: AVX-512" defines MOE_ISA_HEADS and its own kernel for heads. */
#ifndef MOE_ISA_HEADS
MOE_ISA_STATIC void K(blend)(const float *weights, const float *const *rows, size_t at, size_t n, size_t width,
                             float *y) {
    size_t c = 0;
    for (; c + 32 <= width; c += 32) { /* two registers hold the sums of 32 columns */
        V low = L(load)(y + c, 16), high = L(load)(y + c + 16, 16);
        for (size_t i = 0; i < n; i++) {
            const V weight = L(of)(weights[i]);
            low = L(add)(low, L(mul)(weight, L(load)(rows[i] + at + c, 16)));
            high = L(add)(high, L(mul)(weight, L(load)(rows[i] + at + c + 16, 16)));
        }
        L(store)(y + c, low, 16), L(store)(y + c + 16, high, 16);
    }
    for (size_t i = 0; i < n && c < width; i++) K(axpy)(weights[i], rows[i] + at + c, width - c, y + c);
}

MOE_ISA_STATIC void K(heads)(const moe_heads *h, size_t rows) {
    moe_heads_by(h, rows, K(dot), K(max), K(exp_sum), K(blend));
}
#endif
#undef MOE_ISA_OUTPUTS
#undef MOE_ISA_FETCH
#endif

#ifdef MOE_ISA_TILES
#define I(name) MOE_NAME(moe_ints_##name##_, MOE_ISA_BITS)
#define Q MOE_NAME(moe_ints_, MOE_ISA_BITS)
#define F MOE_NAME(moe_floats_, MOE_ISA_BITS)
#define MOE_WIDTH (MOE_ISA_BITS / 32)
/* Keep a sum in a register; otherwise gcc 12 stores it at every step of a nested loop. */
#define MOE_HOLD(sum) __asm__("" : "+v"(sum))
/* Return 1 if a tile has so few rows that memory limits its speed. Such tiles read the weights in order, the fastest
 * way: block by block, prefetching each line far ahead into the second-level cache, then into the first. 256-bit tiles
 * always read in order. */
#define MOE_FEW(type, rows) (MOE_WIDTH == 8 || (rows) <= ((type) == MOE_TYPE_Q8 ? 4 : 2))

/* Prefetch the weights of step i: `ask` lines into the first-level cache or, if `ask` < 0, -ask into the second; also
 * `ask` lines that are `far` bytes farther on into the second, if far > 0. */
MOE_ISA_INLINE void K(ask)(const char *next, size_t i, const int ask, const size_t far) {
    MOE_UNROLL_FOR (int n = 0; n < ask; n++) __builtin_prefetch(next + (i * (size_t)ask + (size_t)n) * 64);
    MOE_UNROLL_FOR (int n = 0; far && n < ask; n++)
        __builtin_prefetch(next + far + (i * (size_t)ask + (size_t)n) * 64, 0, 2);
    MOE_UNROLL_FOR (int n = 0; n < -ask; n++) __builtin_prefetch(next + (i * (size_t)-ask + (size_t)n) * 64, 0, 2);
}

/* Prefetch the cache lines of all steps of 64 columns. Returns the address for the next 64 columns. */
MOE_ISA_INLINE const char *K(ask_block)(const char *next, size_t steps, int ask) {
    const size_t lines = steps * (size_t)abs(ask);
    for (size_t i = 0; i < lines && ask > 0; i++) __builtin_prefetch(next + i * 64);
    for (size_t i = 0; i < lines && ask < 0; i++) __builtin_prefetch(next + i * 64, 0, 2);
    return next + lines * 64;
}

/* Add the products of a line of 16 outputs x 4 columns to sum[][at] and the following registers. The caller repeats the
 * call instead of using a loop, in which clang would keep the sums in memory. */
MOE_ISA_INLINE void K(q8_line)(const moe_matrix *m, const int8_t *x, const char *w, Q sum[8][8], const int at,
                               const int rows, const int wide, const int started) {
    const size_t code_bytes = moe_code_bytes(m->cols);
    MOE_NAME(moe_line_, MOE_ISA) line[3];
    (void)started;
    MOE_UNROLL_FOR (int v = 0; v < wide; v++)
        line[v] = K(line_of)(w + moe_register_at(v * MOE_WIDTH, m->cols_padded * 16, 4), started);
    MOE_UNROLL_FOR (int r = 0; r < rows; r++) {
        const Q four = I(op)(set1_epi32)(moe_four(x + (size_t)r * code_bytes));
        MOE_UNROLL_FOR (int v = 0; v < wide; v++) {
            sum[r][at + v] = K(product)(sum[r][at + v], line[v], four, started);
            MOE_HOLD(sum[r][at + v]);
        }
    }
}

/* Sum a tile of a Q8 matrix, `rows` rows of codes at x by `wide` registers of outputs, with all sums in registers. Few
 * rows have too few sums to hide the latency, so `lines` lines of 16 outputs x 4 columns are summed separately. */
MOE_ISA_INLINE void K(q8_sums)(const moe_matrix *m, const int8_t *x, const char *w, size_t cols, Q sum[8][8],
                               const int rows, const int wide, const int lines, const int started, const char *next,
                               const int ask, const size_t far) {
    const size_t steps = cols / 4 / (size_t)lines;
    for (size_t step = 0; step < steps; step++, w += 64 * lines, x += 4 * lines) {
        K(ask)(next, step, ask, far);
        K(q8_line)(m, x, w, sum, 0, rows, wide, started);
        if (lines > 1) K(q8_line)(m, x + 4, w + 64, sum, wide, rows, wide, started);
        if (lines > 2) K(q8_line)(m, x + 8, w + 128, sum, 2 * wide, rows, wide, started);
        if (lines > 3) K(q8_line)(m, x + 12, w + 192, sum, 3 * wide, rows, wide, started);
    }
}

/* Load units 2u and 2u + 1, of 4 columns each, of a group of 32 columns at `w` as unsigned numbers. */
MOE_ISA_INLINE void K(two_units)(const char *w, const size_t u, const size_t bits, Q *low, Q *high) {
    const Q line = I(load)(w + (bits == 4 ? u : bits == 3 ? u % 3 : u / 2) * 64);
    if (bits == 2) {
        const Q four = I(field)(line, u % 2 * 4, 15);
        *low = I(look)(moe_pairs[0], four);
        *high = I(look)(moe_pairs[1], four);
    } else if (bits == 4 || u < 3) {
        *low = I(field)(line, 0, bits == 3 ? 7 : 15);
        *high = I(field)(line, bits, bits == 3 ? 7 : 15);
    } else {
        const Q third = I(load)(w + 128);
        *low = I(op)(add_epi32)(I(field)(line, 6, 3), I(field)(third, 4, 4));
        *high = I(op)(add_epi32)(I(field)(I(load)(w + 64), 6, 3), I(field)(third, 5, 4));
    }
}

/* Sum a tile of a matrix with fewer than 8 bits group by group. Numbers are unsigned: level + 8, or level + 4 in Q3.
 * Subtracting 8 * sum(x) from a group's part leaves sum(level * x), which fits 16 bits (8 * 127 * 32 = 32512) before it
 * is multiplied by the sub. If `apart` is 1, low and high units are summed separately, so fewer products wait for the
 * previous one. */
MOE_ISA_INLINE void K(q4_sums)(const moe_matrix *m, const int8_t *x, const int8_t *x_sums, const char *w,
                               const int8_t *sub, size_t cols, Q sum[8][8], const size_t bits, const int rows,
                               const int wide, const int apart, const int mids, const char *next, const int ask,
                               const size_t far) {
    const size_t groups = m->cols_padded / MOE_Q4_GROUP, code_bytes = moe_code_bytes(m->cols);
    const size_t side_bytes = groups / 2 * (mids ? 6 : 2) * 16;
    for (size_t g = 0; g < cols / MOE_Q4_GROUP; g++, w += 64 * bits, sub += 16, x_sums += 2) {
        Q part[8][4];
        int32_t taken[8];
        MOE_UNROLL_FOR (int r = 0; r < rows; r++) {
            taken[r] = (bits == 3 ? 4 : 8) * moe_code_sum(x_sums + (size_t)r * code_bytes);
            MOE_UNROLL_FOR (int v = 0; v < wide; v++) {
                part[r][v] = K(part_of)(taken[r]);
                if (apart) part[r][wide + v] = I(op)(set1_epi32)(0);
            }
        }
        MOE_UNROLL_FOR (size_t u = 0; u < 4; u++, x += 8) { /* 16 outputs x 8 columns */
            Q low[3], high[3];
            if (u < bits) K(ask)(next, g * bits + u, ask, far);
            MOE_UNROLL_FOR (int v = 0; v < wide; v++)
                K(two_units)(w + moe_register_at(v * MOE_WIDTH, groups * 64 * bits, 4), u, bits, &low[v], &high[v]);
            MOE_UNROLL_FOR (int r = 0; r < rows; r++) {
                const int8_t *eight = x + (size_t)r * code_bytes;
                const Q x0 = I(op)(set1_epi32)(moe_four(eight)), x1 = I(op)(set1_epi32)(moe_four(eight + 4));
                MOE_UNROLL_FOR (int v = 0; v < wide; v++) part[r][v] = K(product_q4)(part[r][v], low[v], x0);
                MOE_UNROLL_FOR (int v = 0; v < wide; v++) {
                    Q *to = &part[r][apart ? wide + v : v];
                    *to = K(product_q4)(*to, high[v], x1);
                }
            }
        }
        MOE_UNROLL_FOR (int v = 0; v < wide; v++) {
            const int8_t *side = sub + moe_register_at(v * MOE_WIDTH, side_bytes, 1);
            const Q factor = mids ? I(op)(add_epi32)(I(factor)(side), I(middles)(side + 32)) : I(factor)(side);
            MOE_UNROLL_FOR (int r = 0; r < rows; r++) {
                const Q whole = apart ? I(op)(add_epi32)(part[r][v], part[r][wide + v]) : part[r][v];
                sum[r][v] = K(times_sub)(sum[r][v], whole, taken[r], factor, mids);
                MOE_HOLD(sum[r][v]);
            }
        }
    }
}

/* Prefetch the cache lines of a tile's outputs and addends, which are used when its sums are complete. */
MOE_ISA_INLINE void K(expect)(const moe_linear *l, size_t row, size_t block, const int rows, const int blocks) {
    MOE_UNROLL_FOR (int r = 0; r < rows; r++)
        MOE_UNROLL_FOR (int b = 0; b < blocks; b++) {
            const size_t at = row + (size_t)r, j = (block + (size_t)b) * 16;
            __builtin_prefetch(l->y + at * l->y_stride + j, 1);
            __builtin_prefetch(l->add + at * l->add_stride + j);
        }
}

MOE_ISA_INLINE const int32_t *K(taken)(const int8_t *sums, size_t code_bytes, const int rows, int32_t taken[8]) {
    MOE_UNROLL_FOR (int r = 0; r < rows; r++) {
        const int8_t *two = sums + (size_t)r * code_bytes;
        taken[r] = 128 * (moe_code_sum(two) + moe_code_sum(two + 2));
    }
    return taken;
}

/* Store a tile's sums, from register `first` on, as integers [rows][blocks][16] or, if `blocked`, as floats. */
MOE_ISA_INLINE void K(put_sums)(const moe_linear *l, size_t row, const moe_columns *c, size_t side_bytes, Q sum[8][8],
                                int32_t *sums, float *floats, int first, const int rows, const int blocks,
                                const int wide, const int lines, const int blocked, const int parts) {
    const size_t code_bytes = moe_code_bytes(l->w->cols);
    F part[3];
    if (parts)
        MOE_UNROLL_FOR (int v = 0; v < wide; v++)
            part[v] = I(part)(c->part + moe_register_at(v * MOE_WIDTH, side_bytes, 1));
    MOE_UNROLL_FOR (int r = 0; r < rows; r++) {
        const float scale = !blocked    ? 0.0f
                            : l->scales ? l->scales[row + (size_t)r]
                                        : moe_block_scale(c->x_scales + (size_t)r * code_bytes);
        MOE_UNROLL_FOR (int v = 0; v < wide; v++) {
            const int at = r * blocks * 16 + (first + v) * MOE_WIDTH;
            MOE_UNROLL_FOR (int i = 1; i < lines; i++) sum[r][v] = I(op)(add_epi32)(sum[r][v], sum[r][i * wide + v]);
            if (blocked) {
                const F all = I(op)(set1_ps)(scale), by = parts ? I(op)(mul_ps)(all, part[v]) : all;
                const F more = I(op)(mul_ps)(I(op)(cvtepi32_ps)(sum[r][v]), by);
                I(op)(storeu_ps)(floats + at, I(op)(add_ps)(I(op)(loadu_ps)(floats + at), more));
            } else {
                I(store)(sums + at, sum[r][v]);
            }
        }
    }
}

/* Compile the loops for n prefetches per step; cases that cannot occur are empty. */
#define MOE_ASK(n)                                                                                                 \
    case n:                                                                                                        \
        if (few || blocked ? (n) != 0 && (n) != lines : abs(n) > blocks) break;                                    \
        if (type == MOE_TYPE_Q8) K(q8_sums)(m, c->x, c->w, span, sum, rows, wide, lines, started, next, n, far);   \
        else K(q4_sums)(m, c->x, c->x_sums, c->w, c->sub, span, sum, bits, rows, wide, apart, mids, next, n, far); \
        break;

/* Bits per code. Bytes of sides for 64 columns of a block; with 8-bit codes this depends on the format before
 * expansion. */
#define MOE_BITS(type) ((type) == MOE_TYPE_Q8 ? 8 : (type) == MOE_TYPE_Q3 ? 3 : (type) == MOE_TYPE_Q2 ? 2 : 4)
#define MOE_SIDES(type) ((type) == MOE_TYPE_Q8 ? m->sides * 16 : (type) == MOE_TYPE_Q4M ? 96 : 32)

/* Number of output registers summed at a time. Sums and parts of several rows of Q4 need more than AVX2's 16 registers
 * unless outputs are summed one register at a time. */
#define MOE_TOGETHER(type, rows, registers) ((type) == MOE_TYPE_Q8 || MOE_WIDTH == 16 || (rows) == 1 ? (registers) : 1)

/* 1 if sums over 64 columns are computed in a separate function. In a nested loop gcc 12 stores the sums of several Q8
 * rows at every step, which doubles the time. Q4 is faster inline. */
#define MOE_APART(type, rows) ((type) == MOE_TYPE_Q8 && (rows) > (MOE_WIDTH == 8 ? 1 : 3))

/* Compute a tile's sums over all columns or, if `blocked`, over the next 64. `blocked` is a constant: with a variable
 * number of columns, tiles with few rows were 3% slower. */
MOE_ISA_INLINE void K(columns)(const moe_linear *l, const int32_t *start, size_t row, const moe_columns *c,
                               const char *next, int ask, int32_t *sums, float *floats, int first, const moe_type type,
                               const int rows, const int blocks, const int started, const int blocked) {
    const moe_matrix *m = l->w;
    const int few = MOE_FEW(type, rows) && blocks == 1, wide = MOE_TOGETHER(type, rows, blocks * 16 / MOE_WIDTH);
    const int lines = few && type == MOE_TYPE_Q8 ? MOE_ISA_LINES(rows) : 1;
    const size_t far = few ? MOE_FAR_AHEAD - MOE_AHEAD : 0, bits = MOE_BITS(type);
    const int apart = MOE_ISA_VNNI && (few || bits < 4);
    const int mids = type == MOE_TYPE_Q4M, parts = mids || (type == MOE_TYPE_Q8 && blocked && m->parts);
    size_t span = blocked ? MOE_Q8_COLS : m->cols_padded;
    int32_t taken[8];
    Q sum[8][8];
    if (started && blocked) start = K(taken)(c->x_sums, moe_code_bytes(m->cols), rows, taken);
    MOE_UNROLL_FOR (int r = 0; r < rows; r++)
        MOE_UNROLL_FOR (int v = 0; v < wide * lines; v++)
            sum[r][v] = started && v < wide ? K(start)(start, r, v) : I(op)(set1_epi32)(0);
    if (MOE_APART(type, rows)) __asm__("" : "+r"(span)); /* hide the length from gcc 12, which would store all sums */
    if (few) next = c->w + MOE_AHEAD, ask = first ? 0 : lines;
    switch (few || !blocked ? ask : 0) {
        MOE_ASK(0)
        MOE_ASK(1)
        MOE_ASK(2)
        MOE_ASK(3)
        MOE_ASK(4)
        MOE_ASK(-1)
        MOE_ASK(-2)
        MOE_ASK(-3)
    }
    K(put_sums)(l, row, c, m->cols_padded / 64 * MOE_SIDES(type), sum, sums, floats, first, rows, blocks, wide, lines,
                blocked, parts);
}

/* Compute a tile of `blocks` blocks or, with few rows, all tiles up to block1. `next` and `ask` select the lines to
 * prefetch, except for few rows, which always read ahead. `apart` computes 64 columns, see MOE_APART. */
MOE_ISA_INLINE void K(tile)(const moe_linear *l, const int32_t *start, size_t row, size_t block, size_t block1,
                            const char *next, int ask, const moe_type type, const int rows, const int blocks,
                            const int started, const int blocked, moe_columns_fn apart) {
    const moe_matrix *m = l->w;
    const int few = MOE_FEW(type, rows) && blocks == 1, registers = blocks * 16 / MOE_WIDTH;
    const size_t bytes = 2 * MOE_BITS(type), side_bytes = m->cols_padded / 64 * MOE_SIDES(type);
    const size_t span = blocked ? MOE_Q8_COLS : m->cols_padded;
    const int8_t *codes = l->codes + row * moe_code_bytes(m->cols);
    do {
        int32_t sums[8 * 3 * 16];
        float sum_floats[8 * 3 * 16], *floats = l->floats ? l->floats + row * 16 : sum_floats;
        if (l->add) K(expect)(l, row, block, rows, blocks);
        if (blocked && !l->floats) memset(floats, 0, (size_t)(rows * blocks) * 16 * sizeof *floats);
        for (int first = 0; first < registers; first += MOE_TOGETHER(type, rows, registers)) {
            const size_t side = block * side_bytes + (size_t)first * MOE_WIDTH;
            moe_columns c = { codes,
                              codes + (blocked ? moe_sums_at(l) : m->cols_padded),
                              codes + moe_scales_at(l),
                              m->subs ? m->subs + side : NULL,
                              m->parts ? m->parts + side : NULL,
                              (const char *)m->data + block * m->cols_padded * bytes + first * MOE_WIDTH * 4 };
            for (size_t k = 0; k < (blocked ? m->cols_padded : 1); k += span) {
                if (blocked && !few && ask) next = K(ask_block)(next, span * bytes / 64, ask);
                if (blocked && MOE_APART(type, rows)) apart(l, row, &c, floats);
                else
                    K(columns)(l, start, row, &c, next, ask, sums, floats, first, type, rows, blocks, started, blocked);
                c.x += span, c.x_sums += span / MOE_CODE_GROUP * 2, c.x_scales += sizeof(float), c.w += span * bytes;
                if (m->subs) c.sub += span / 64 * MOE_SIDES(type);
                if (m->parts) c.part += span / 64 * MOE_SIDES(type);
            }
        }
        if (!blocked) K(finish)(l, row, block, (size_t)rows, (size_t)blocks, sums);
        else if (!l->more) K(finish)(l, row, block, (size_t)rows, (size_t)blocks, floats);
    } while (few && ++block < block1);
}

#define MOE_TILE(type, rows, blocks)                                                                                 \
    __attribute__((noinline)) MOE_UNUSED MOE_ISA_STATIC void K(columns_##type##_##rows##x##blocks)(                  \
        const moe_linear *l, size_t row, const moe_columns *c, float *floats) {                                      \
        K(columns)(l, NULL, row, c, NULL, 0, NULL, floats, 0, MOE_TYPE_##type, rows, blocks, MOE_ISA_VNNI, 1);       \
    }                                                                                                                \
    MOE_ISA_STATIC void K(tile_##type##_##rows##x##blocks)(const moe_linear *l, const int32_t *start, size_t row,    \
                                                           size_t block, size_t block1, const char *next, int ask) { \
        const int q8 = MOE_TYPE_##type == MOE_TYPE_Q8;                                                               \
        if (MOE_TYPE_##type == MOE_TYPE_Q4M || moe_by_block(l))                                                      \
            K(tile)(l, start, row, block, block1, next, ask, MOE_TYPE_##type, rows, blocks, q8 && MOE_ISA_VNNI, 1,   \
                    K(columns_##type##_##rows##x##blocks));                                                          \
        else if (q8 && (start || MOE_ISA_VNNI))                                                                      \
            K(tile)(l, start, row, block, block1, next, ask, MOE_TYPE_##type, rows, blocks, 1, 0, NULL);             \
        else K(tile)(l, start, row, block, block1, next, ask, MOE_TYPE_##type, rows, blocks, 0, 0, NULL);            \
    }
#define MOE_TILE_AT(type, rows, blocks)                                                             \
    [MOE_TYPE_##type - MOE_TYPE_Q8][(rows) - 1][(blocks) - 1] = K(tile_##type##_##rows##x##blocks),
MOE_ISA_TILES(MOE_TILE)
static const moe_tile_fn K(tiles)[6][8][3] = { MOE_ISA_TILES(MOE_TILE_AT) };

/* Compute a quantised linear. Blocks are the outer loop and rows the inner loop, so a tile's weights are loaded from
 * memory once and remain in L1 or L2 for all rows. Rows are divided evenly into cuts, so no tile has a single row. Each
 * cut prefetches its share of the next tile: if the first cut prefetched all of it, the cut would wait for memory,
 * which would be idle during the other cuts. With a single cut, two tiles fit the first-level cache. Four rows count as
 * few if the matrix exceeds the second-level cache. If `small` is 1 and the first-level cache cannot hold two tiles,
 * the next tile is prefetched into the second. Blocks from block1 on may belong to another thread, so at the end only
 * the caller's hint `next` is prefetched. */
MOE_ISA_STATIC void K(quantised)(const moe_linear *l, size_t row0, size_t row1, size_t block0, size_t block1,
                                 int small) {
    enum { ROWS = 64, TILE = 20 << 10, LARGE = 8 << 20 }; /* bytes */
    const int q8 = l->w->bits == 8, start_rows = q8 && !moe_by_block(l);
    const moe_type type = q8 ? MOE_TYPE_Q8 : l->w->type;
    const size_t block_bytes = l->w->cols_padded * 2 * l->w->bits, most = q8 ? MOE_ISA_ROWS : 4,
                 most_blocks = MOE_WIDTH == 16 && l->w->bits >= 4 ? 3 : 1;
    const size_t few_rows = MOE_WIDTH == 16 && q8 && l->w->rows * l->w->cols_padded <= LARGE ? 3 : most;
    const moe_tile_fn(*tiles)[3] = K(tiles)[type - MOE_TYPE_Q8];
    int32_t start[ROWS] = { 0 };
    for (; row0 < row1; row0 += ROWS) {
        const size_t rows = moe_min(ROWS, row1 - row0), cuts = moe_divide_up(rows, most);
        const size_t fitting = q8 && cuts == 1 ? moe_max(rows > 4 ? 2 : 1, TILE / block_bytes) : most_blocks;
        const size_t widest = moe_min(most_blocks, fitting);
        const int negative = !MOE_ISA_VNNI && start_rows && cuts > 2; /* not worthwhile for 2 cuts */
        for (size_t r = 0; MOE_ISA_VNNI && start_rows && r < rows; r++) start[r] = moe_taken(l, row0 + r);
        if (rows <= few_rows && MOE_FEW(type, rows)) {
            tiles[rows - 1][0](l, !MOE_ISA_VNNI ? NULL : start, row0, block0, block1, NULL, 0);
            continue;
        }
        for (size_t block = block0, blocks, each; block < block1; block += blocks) {
            const char *next = l->next;
            int far;
            blocks = moe_min(widest, block1 - block);
            if (block1 - block == 4) blocks = moe_min(widest, 2); /* avoid a single block at the end */
            if (block + blocks < block1) next = (const char *)l->w->data + (block + blocks) * block_bytes;
            each = next ? moe_divide_up(blocks, cuts) : 0; /* blocks prefetched by each cut */
            far = small && 2 * blocks * block_bytes > MOE_SMALL_L1;
            if (negative) moe_negative_avx2(l->w, block, start);
            for (size_t cut = 0; cut < cuts; cut++) {
                const size_t first = rows * cut / cuts, count = rows * (cut + 1) / cuts - first;
                const size_t asked = moe_min(blocks, cut * each);
                const int ask = (int)moe_min(each, blocks - asked);
                const int32_t *from = MOE_ISA_VNNI ? start + first : negative ? start : NULL;
                tiles[count - 1][blocks - 1](l, from, row0 + first, block, block + blocks,
                                             ask ? next + asked * block_bytes : NULL, far ? -ask : ask);
            }
        }
    }
}

#undef MOE_WIDTH
#undef Q
#undef F
#undef I
#undef MOE_ISA_TILES
#undef MOE_ISA_BITS
#undef MOE_ISA_ROWS
#undef MOE_ISA_LINES
#undef MOE_ISA_VNNI
#endif

#undef V
#undef L
#undef K
#undef MOE_ISA_TARGET
#undef MOE_ISA
#else
#if MOE_HOST

/* ==== 12. Kernels: AVX2 =======================================================================================
 * 256-bit x86: two instruction sets with different quantised linears. Invariant: two registers hold the 16 lanes,
 * [0..7] and [8..15]. Tails are copied to a zeroed buffer first: adding a product of zeros leaves a lane unchanged. */

#if MOE_X86
#define MOE_AVX2_TARGET "avx2,f16c"
#define MOE_AVX2 __attribute__((target(MOE_AVX2_TARGET)))

/* ---- The 16 lanes: two registers ---- */

typedef __m256 moe_register_avx2;

#define moe_register_of_avx2 _mm256_set1_ps
#define moe_register_load_avx2 _mm256_loadu_ps
#define moe_register_store_avx2 _mm256_storeu_ps
#define moe_register_math_avx2(op) _mm256_##op##_ps
#define moe_register_and_avx2 _mm256_and_ps
#define moe_register_or_avx2 _mm256_or_ps
#define moe_register_xor_avx2 _mm256_xor_ps
#define moe_register_max_avx2 _mm256_max_ps
#define moe_register_min_avx2 _mm256_min_ps
#define moe_register_max_bits_avx2(a, b)                                                  \
    _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)))
#define moe_register_of_ints_avx2(x) _mm256_cvtepi32_ps(_mm256_loadu_si256((const void *)(x)))
/* The hardware's F16 conversion is exact, including subnormals. */
MOE_AVX2 MOE_INLINE __m256 moe_register_halves_avx2(moe_type type, const uint16_t *x) {
    const __m128i bits = _mm_loadu_si128((const void *)x);
    if (type == MOE_TYPE_F16) return _mm256_cvtph_ps(bits);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
MOE_AVX2 MOE_INLINE __m256 moe_register_scaled_avx2(__m256 x, __m256 y, __m256 t) {
    const __m256i power = _mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(t), 23), _mm256_set1_epi32(127 << 23));
    return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(MOE_EXP_LOW), _CMP_LT_OQ),
                            _mm256_mul_ps(y, _mm256_castsi256_ps(power)));
}
MOE_AVX2 MOE_INLINE float moe_register_join_avx2(__m256 v) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
MOE_AVX2 MOE_INLINE float moe_register_largest_bits_avx2(__m256 v) {
    const __m256i eight = _mm256_castps_si256(v);
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return moe_from_bits((uint32_t)_mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1))));
}
MOE_AVX2 MOE_INLINE void moe_register_codes_avx2(const __m256 v[2], int8_t *q) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(v[0]), _mm256_cvtps_epi32(v[1]));
    const __m256i bytes = _mm256_packs_epi16(words, words); /* lanes 0-3 and 8-11 twice, then 4-7 and 12-15 twice */
    _mm_storeu_si128((void *)q, _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
}
MOE_AVX2 MOE_INLINE void moe_lanes_code_sums_avx2(const int8_t *q, int16_t sums[2]) {
    for (size_t i = 0; i < 2; i++) {
        const __m256i codes = _mm256_xor_si256(_mm256_loadu_si256((const void *)(q + 32 * i)), _mm256_set1_epi8(-128));
        const __m256i eights = _mm256_sad_epu8(codes, _mm256_setzero_si256()); /* sums of code + 128 */
        const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(eights), _mm256_extracti128_si256(eights, 1));
        sums[i] = (int16_t)(_mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0x4e))) - 32 * 128);
    }
}

/* Prefetch distances in bytes into the first-level and second-level cache, tuned on Sapphire Rapids: from DRAM, a row
 * of Q4 is 10 to 20% faster than with one distance. Prefetching past the end is harmless. */
enum { MOE_AHEAD = 4096, MOE_FAR_AHEAD = 12288 };

/* ---- Quantised tiles ---- */

/* Level + 8 of the low two bits and of the high two bits of a nibble in Q2. */
static const uint8_t moe_pairs[2][16] = { { 0, 5, 9, 14, 0, 5, 9, 14, 0, 5, 9, 14, 0, 5, 9, 14 },
                                          { 0, 0, 0, 0, 5, 5, 5, 5, 9, 9, 9, 9, 14, 14, 14, 14 } };

typedef __m256i moe_ints_256;
typedef __m256 moe_floats_256;
typedef struct moe_line_avx2 {
    __m256i size, sign;
} moe_line_avx2;

#define moe_ints_op_256(op) _mm256_##op
#define moe_ints_load_256(x) _mm256_loadu_si256((const void *)(x))
#define moe_ints_store_256(x, v) _mm256_storeu_si256((void *)(x), v)
MOE_AVX2 MOE_INLINE __m256 moe_ints_part_256(const int8_t *low) {
    return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_loadl_epi64((const void *)low),
                                             _mm_loadl_epi64((const void *)(low + 16))));
}
#define moe_ints_middles_256(mids) _mm256_slli_epi32(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)(mids))), 16)
#define moe_ints_field_256(v, shift, mask)                                           \
    _mm256_and_si256(_mm256_srli_epi16(v, (uint8_t)(shift)), _mm256_set1_epi8(mask))
#define moe_ints_look_256(table, v)                                                             \
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)(table))), v)
#define moe_ints_factor_256(subs)                                                                            \
    _mm256_and_si256(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)(subs))), _mm256_set1_epi32(0xffff))

/* maddubs multiplies |w| (unsigned) by x with the sign of w. For x in [-128, 127] its 16-bit sums cannot saturate (2 *
 * 127 * 128 = 32512), so all results are exact.
 *
 * vpsignb applies the sign to x but seems to occupy a multiplier port (Zen 4 is 20% faster without it). If sums are
 * `started`, x is only inverted where w is negative, which gives -x - 1. The sums then lack sum |w| over the negative
 * w, and start with this value instead of 0. */
MOE_AVX2 MOE_INLINE moe_line_avx2 moe_line_of_avx2(const char *w, const int started) {
    const __m256i v = moe_ints_load_256(w);
    return (moe_line_avx2){ _mm256_abs_epi8(v), started ? _mm256_cmpgt_epi8(_mm256_setzero_si256(), v) : v };
}
MOE_AVX2 MOE_INLINE __m256i moe_product_avx2(__m256i sum, moe_line_avx2 w, __m256i four, const int started) {
    const __m256i x = started ? _mm256_xor_si256(four, w.sign) : _mm256_sign_epi8(four, w.sign);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w.size, x), _mm256_set1_epi16(1)));
}
#define moe_start_avx2(start, r, v) moe_ints_load_256((start) + 8 * (v))

/* Compute the starting values of the 16 sums of a block: sum |w| over the negative w. */
MOE_AVX2 static void moe_negative_avx2(const moe_matrix *m, size_t block, int32_t start[16]) {
    const char *w = (const char *)m->data + block * (m->cols_padded / 4) * 64;
    const __m256i zero = _mm256_setzero_si256(), ones = _mm256_set1_epi16(1);
    __m256i sum[2] = { zero, zero };
    for (size_t i = 0; i < m->cols_padded / 4; i++, w += 64)
        MOE_UNROLL_FOR (int h = 0; h < 2; h++) {
            const __m256i v = _mm256_min_epi8(zero, _mm256_loadu_si256((const void *)(w + h * 32)));
            sum[h] = _mm256_sub_epi32(sum[h], _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), v), ones));
        }
    _mm256_storeu_si256((void *)start, sum[0]);
    _mm256_storeu_si256((void *)(start + 8), sum[1]);
}

/* Add products of nibbles. Nibbles are unsigned, and a group's sums fit 16 bits (8 * 2 * 15 * 127 = 30480). */
#define moe_part_of_avx2(taken) _mm256_setzero_si256()
MOE_AVX2 MOE_INLINE __m256i moe_product_q4_avx2(__m256i part, __m256i nibbles, __m256i four) {
    part = _mm256_add_epi16(part, _mm256_maddubs_epi16(nibbles, four));
    __asm__("" : "+x"(part)); /* prevents gcc from adding all products of a group at the end and spilling them */
    return part;
}
MOE_AVX2 MOE_INLINE __m256i moe_times_sub_avx2(__m256i sum, __m256i part, int32_t taken, __m256i sub, const int mids) {
    part = _mm256_madd_epi16(part, _mm256_set1_epi16(1));
    part = _mm256_sub_epi32(part, _mm256_set1_epi32(taken));
    if (mids) part = _mm256_blend_epi16(part, _mm256_set1_epi16((int16_t)(taken / 8)), 0xaa);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(part, sub));
}

#define MOE_ISA avx2
#define MOE_ISA_TARGET MOE_AVX2
#define MOE_ISA_REGISTERS 2
#define MOE_ISA_FETCH(type, w)                                                                                \
    if ((type) == MOE_TYPE_F32) _mm_prefetch(w, _MM_HINT_T0) /* conversion limits the speed of other types */
#define MOE_ISA_BITS 256
#define MOE_ISA_VNNI 0
#define MOE_ISA_LINES(rows) 1
#define MOE_ISA_ROWS 4
#define MOE_FOUR_TILES(X, type) X(type, 1, 1) X(type, 2, 1) X(type, 3, 1) X(type, 4, 1)
#define MOE_ALL_TILES(X)                                                                                           \
    MOE_FOUR_TILES(X, Q8) MOE_FOUR_TILES(X, Q4) MOE_FOUR_TILES(X, Q4M) MOE_FOUR_TILES(X, Q3) MOE_FOUR_TILES(X, Q2)
#define MOE_ISA_TILES(X) MOE_ALL_TILES(X)
#include "moe.c"

static int moe_avx2_available(void) {
    unsigned eax, ebx, ecx, edx;
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2")                                /* also checks the operating system (xgetbv) */
           && __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx >> 29 & 1); /* F16C, which older compilers cannot query */
}

MOE_LINEAR_OF(avx2, avx2, Q2, moe_quantised_avx2(l, row0, row1, block0, block1, 0))
MOE_UNUSED static const moe_kernels moe_kernels_avx2 = { MOE_KERNELS_OF(avx2, moe_linear_avx2, avx2) };

/* ---- AVX-VNNI: 256 bits for processors without AVX-512 ----
 * vpdpbusd is used as in "Kernels: AVX-512": weights plus 128 are the unsigned operand, codes the signed one.
 * tests/engine/isa_emu.h compiles these kernels with an emulation of the instruction in AVX2. */

#ifndef MOE_DPBUSD
#define MOE_AVXVNNI_TARGET MOE_AVX2_TARGET ",avxvnni"
#define MOE_DPBUSD(sum, u, s) _mm256_dpbusd_avx_epi32(sum, u, s)

static int moe_avxvnni_available(void) {
    unsigned eax, ebx, ecx, edx;
    return moe_avx2_available() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
}
#endif
#define MOE_AVXVNNI __attribute__((target(MOE_AVXVNNI_TARGET)))

typedef __m256i moe_line_avxvnni;
#define moe_line_of_avxvnni(w, started) _mm256_xor_si256(moe_ints_load_256(w), _mm256_set1_epi8(-128))
MOE_AVXVNNI MOE_INLINE __m256i moe_product_avxvnni(__m256i sum, __m256i line, __m256i four, const int started) {
    (void)started;
    sum = MOE_DPBUSD(sum, line, four);
    __asm__("" : "+x"(sum)); /* prevents gcc from copying sums and spilling a line */
    return sum;
}
#define moe_start_avxvnni(start, r, v) _mm256_set1_epi32(-(start)[r])
#define moe_part_of_avxvnni(taken) _mm256_set1_epi32(-(taken))
#define moe_product_q4_avxvnni(part, nibbles, four) moe_product_avxvnni(part, nibbles, four, 0)
MOE_AVXVNNI MOE_INLINE __m256i moe_times_sub_avxvnni(__m256i sum, __m256i part, int32_t taken, __m256i sub,
                                                     const int mids) {
    if (mids) part = _mm256_blend_epi16(part, _mm256_set1_epi16((int16_t)(taken / 8)), 0xaa);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(part, sub));
}
#define moe_finish_avxvnni moe_finish_avx2

#define MOE_ISA avxvnni
#define MOE_ISA_TARGET MOE_AVXVNNI
#define MOE_ISA_BITS 256
#define MOE_ISA_VNNI 1
#define MOE_ISA_LINES(rows) ((rows) == 1 ? 4 : (rows) == 2 ? 2 : 1)
#define MOE_ISA_ROWS 6
#define MOE_ISA_TILES(X) MOE_ALL_TILES(X) X(Q8, 5, 1) X(Q8, 6, 1)
#include "moe.c"

MOE_LINEAR_OF(avxvnni, avx2, Q2, moe_quantised_avxvnni(l, row0, row1, block0, block1, 0))
MOE_UNUSED static const moe_kernels moe_kernels_avxvnni = { MOE_KERNELS_OF(avxvnni, moe_linear_avxvnni, avx2) };
#endif /* MOE_X86 */

/* ==== 13. Kernels: AVX-512 ====================================================================================
 * 512-bit x86 with VNNI. Invariant: one register holds the 16 lanes. Tails are loaded and stored with a mask, which
 * accesses no other memory; other lanes are 0, and adding a product of zeros leaves a lane unchanged.
 *
 * vpdpbusd multiplies unsigned by signed bytes and adds four products to an int32, modulo 2^32, without saturation. The
 * codes of a row are the signed operand, four of them in every lane. 128 is added to each weight of a line (16 outputs
 * x 4 columns) to make it unsigned, so 128 * sum(codes of the row) is subtracted at the end. */

#if MOE_X86
#define MOE_AVX512_TARGET MOE_AVX2_TARGET ",avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,prfchw"
#define MOE_AVX512 __attribute__((target(MOE_AVX512_TARGET)))

MOE_AVX512 MOE_INLINE __mmask16 moe_mask_avx512(size_t n) { return (__mmask16)(n >= 16 ? 0xffffu : (1u << n) - 1u); }

/* ---- The 16 lanes: one register ---- */

typedef __m512 moe_lanes_avx512;

#define moe_lanes_of_avx512 _mm512_set1_ps
#define moe_lanes_add_avx512 _mm512_add_ps
#define moe_lanes_sub_avx512 _mm512_sub_ps
#define moe_lanes_mul_avx512 _mm512_mul_ps
#define moe_lanes_div_avx512 _mm512_div_ps
#define moe_lanes_and_avx512 _mm512_and_ps
#define moe_lanes_or_avx512 _mm512_or_ps
#define moe_lanes_xor_avx512 _mm512_xor_ps
#define moe_lanes_max_avx512 _mm512_max_ps
#define moe_lanes_min_avx512 _mm512_min_ps
#define moe_lanes_max_bits_avx512(a, b)                                                   \
    _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)))
#define moe_lanes_of_ints_avx512(x) _mm512_cvtepi32_ps(_mm512_loadu_si512(x))
#define moe_lanes_largest_avx512 _mm512_reduce_max_ps
#define moe_lanes_largest_bits_avx512(v) moe_from_bits((uint32_t)_mm512_reduce_max_epi32(_mm512_castps_si512(v)))
#define moe_lanes_codes_avx512(v, q) _mm_storeu_si128((void *)(q), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)))
#define moe_lanes_max_few_avx512(x, n) /* a NaN becomes -infinity */                                            \
    (_mm512_mask_reduce_max_ps(moe_mask_avx512(n), _mm512_max_ps(_mm512_maskz_loadu_ps(moe_mask_avx512(n), x),  \
                                                                 _mm512_set1_ps(moe_from_bits(0xff800000u)))) + \
     0.0f)
#define moe_lanes_scaled_avx512(x, y, t, n)                                                       \
    _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(MOE_EXP_LOW), _CMP_NLT_UQ), y, n)
MOE_AVX512 MOE_INLINE __m512 moe_lanes_load_avx512(const float *x, size_t n) {
    return n >= MOE_LANES ? _mm512_loadu_ps(x) : _mm512_maskz_loadu_ps(moe_mask_avx512(n), x);
}
MOE_AVX512 MOE_INLINE void moe_lanes_store_avx512(float *y, __m512 v, size_t n) {
    if (n >= MOE_LANES) _mm512_storeu_ps(y, v);
    else _mm512_mask_storeu_ps(y, moe_mask_avx512(n), v);
}
MOE_AVX512 MOE_INLINE __m512 moe_lanes_halves_avx512(moe_type type, const void *x) {
    const __m256i bits = _mm256_loadu_si256(x);
    if (type == MOE_TYPE_F16) return _mm512_cvtph_ps(bits);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
MOE_AVX512 MOE_INLINE void moe_lanes_code_sums_avx512(const int8_t *q, int16_t sums[2]) {
    const __m512i codes = _mm512_xor_si512(_mm512_loadu_si512(q), _mm512_set1_epi8(-128)); /* code + 128 */
    __m512i eights = _mm512_sad_epu8(codes, _mm512_setzero_si512());
    eights = _mm512_add_epi64(eights, _mm512_permutex_epi64(eights, 0x4e));
    eights = _mm512_add_epi64(eights, _mm512_permutex_epi64(eights, 0xb1));
    sums[0] = (int16_t)(_mm_cvtsi128_si32(_mm512_castsi512_si128(eights)) - 32 * 128);
    sums[1] = (int16_t)(_mm_cvtsi128_si32(_mm512_extracti32x4_epi32(eights, 2)) - 32 * 128);
}
MOE_AVX512 MOE_INLINE float moe_lanes_join_avx512(__m512 v) {
    return moe_register_join_avx2(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)));
}

/* Return the sums of the lanes of four registers, each added by the fixed tree. */
MOE_AVX512 MOE_INLINE __m128 moe_join_four_avx512(const __m512 v[4]) {
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x44), _mm512_shuffle_f32x4(v[0], v[1], 0xee));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(v[2], v[3], 0x44), _mm512_shuffle_f32x4(v[2], v[3], 0xee));
    __m512 t = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    t = _mm512_add_ps(t, _mm512_shuffle_ps(t, t, 0x4e));
    t = _mm512_add_ps(t, _mm512_shuffle_ps(t, t, 0xb1));
    return _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, t));
}
MOE_AVX512 MOE_INLINE void moe_lanes_put_avx512(const moe_linear *l, size_t row, size_t j, const __m512 v[4], int n) {
    const __mmask8 mask = (__mmask8)moe_mask_avx512((size_t)n);
    const float *addend = l->bias ? l->bias + j : l->add ? l->add + row * l->add_stride + j : NULL;
    __m128 y = _mm_add_ps(moe_join_four_avx512(v), addend ? _mm_maskz_loadu_ps(mask, addend) : _mm_setzero_ps());
    if (l->relu) y = _mm_max_ps(_mm_setzero_ps(), y);
    _mm_mask_storeu_ps(l->y + row * l->y_stride + j, mask, y);
}

/* ---- Quantised tiles ---- */

typedef __m512i moe_ints_512, moe_line_avx512;
typedef __m512 moe_floats_512;

#define moe_ints_op_512(op) _mm512_##op
#define moe_ints_load_512 _mm512_loadu_si512
#define moe_ints_store_512 _mm512_storeu_si512
MOE_AVX512 MOE_INLINE __m512 moe_ints_part_512(const int8_t *low) {
    const __m256i lows = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)low));
    const __m256i highs = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)(low + 16)));
    return _mm512_cvtph_ps(_mm256_or_si256(lows, _mm256_slli_epi16(highs, 8)));
}
#define moe_ints_middles_512(mids) _mm512_slli_epi32(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(mids))), 16)
#define moe_ints_field_512(v, shift, mask)                                           \
    _mm512_and_si512(_mm512_srli_epi16(v, (uint8_t)(shift)), _mm512_set1_epi8(mask))
#define moe_ints_look_512(table, v)                                                        \
    _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const void *)(table))), v)
#define moe_ints_factor_512(subs)                                                                            \
    _mm512_and_si512(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(subs))), _mm512_set1_epi32(0xffff))
#define moe_line_of_avx512(w, started) _mm512_xor_si512(_mm512_loadu_si512(w), _mm512_set1_epi8(-128))
#define moe_product_avx512(sum, w, four, started) _mm512_dpbusd_epi32(sum, w, four)
#define moe_start_avx512(start, r, v) _mm512_set1_epi32(-(start)[r])
#define moe_part_of_avx512(taken) _mm512_set1_epi32(-(taken))
#define moe_product_q4_avx512 _mm512_dpbusd_epi32
MOE_AVX512 MOE_INLINE __m512i moe_times_sub_avx512(__m512i sum, __m512i part, int32_t taken, __m512i sub,
                                                   const int mids) {
    if (mids) part = _mm512_mask_blend_epi16(0xaaaaaaaau, part, _mm512_set1_epi16((int16_t)(taken / 8)));
    return _mm512_dpwssd_epi32(sum, part, sub);
}

#define MOE_ISA avx512
#define MOE_ISA_TARGET MOE_AVX512
#define MOE_ISA_OUTPUTS 4
#define MOE_ISA_FETCH(type, w) _mm_prefetch(w, _MM_HINT_T0)
#define MOE_ISA_HEADS
#define MOE_ISA_BITS 512
#define MOE_ISA_VNNI 1
#define MOE_ISA_LINES(rows) ((rows) <= 4 ? 4 : 1)
#define MOE_ISA_ROWS 8
/* Up to 24 sums leave enough registers for the weights of a step and a row's codes; Q4 needs two sums per output. */
#define MOE_WIDE(X, type, rows) X(type, rows, 1) X(type, rows, 2) X(type, rows, 3)
#define MOE_WIDE_Q8(X) MOE_WIDE(X, Q8, 4) MOE_WIDE(X, Q8, 5) MOE_WIDE(X, Q8, 6) MOE_WIDE(X, Q8, 7) MOE_WIDE(X, Q8, 8)
#define MOE_WIDE_Q4(X, type) X(type, 1, 1) MOE_WIDE(X, type, 2) MOE_WIDE(X, type, 3) MOE_WIDE(X, type, 4)
#define MOE_WIDE_ALL(X) MOE_WIDE_Q8(X) MOE_WIDE_Q4(X, Q4) MOE_WIDE_Q4(X, Q4M)
#define MOE_ISA_TILES(X) X(Q8, 1, 1) X(Q8, 2, 1) X(Q8, 3, 1) MOE_WIDE_ALL(X) MOE_FOUR_TILES(X, Q3) MOE_FOUR_TILES(X, Q2)
#include "moe.c"
#undef MOE_ISA_HEADS

MOE_LINEAR_OF(avx512, avx512, Q2, moe_quantised_avx512(l, row0, row1, block0, block1, 0))
MOE_LINEAR_OF(small_avx512, avx512, Q2, moe_quantised_avx512(l, row0, row1, block0, block1, 1))

/* Compute the scores of four keys, rows i to i + 3, for all heads. */
MOE_AVX512 MOE_INLINE void moe_scores_avx512(const moe_heads *h, size_t i, const size_t width) {
    const __mmask8 mask = (__mmask8)moe_mask_avx512(moe_min(4, h->n - i));
    const size_t heads = h->heads, stride = h->stride, share = h->share;
    const __m128 scale = _mm_set1_ps(h->scale);
    const float *query = h->query, *row[4];
    float *scores = h->scores + i;
    size_t left = share; /* further heads that share the current key */
    MOE_UNROLL_FOR (size_t u = 0; u < 4; u++) row[u] = h->rows[moe_min(i + u, h->n - 1)];
    for (size_t head = 0; head < heads; head++, scores += stride) {
        __m512 lanes[4] = { _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps() };
        MOE_UNROLL_IF_KNOWN_FOR (size_t c = 0; c < width; c += 16) {
            const __m512 q = moe_lanes_load_avx512(query + c, width - c);
            MOE_UNROLL_FOR (size_t u = 0; u < 4; u++)
                lanes[u] = _mm512_add_ps(lanes[u], _mm512_mul_ps(q, moe_lanes_load_avx512(row[u] + c, width - c)));
        }
        _mm_mask_storeu_ps(scores, mask, _mm_mul_ps(moe_join_four_avx512(lanes), scale));
        query += width;
        if (--left) continue;
        left = share;
        MOE_UNROLL_FOR (size_t u = 0; u < 4; u++) row[u] += width;
    }
}

/* Add the weighted values of rows [i, end) to columns from `at` on: `pieces` times `cols` columns, or the `left` of a
 * head. */
MOE_AVX512 MOE_INLINE void moe_blend_avx512(const moe_heads *h, size_t i, size_t end, size_t at, size_t left,
                                            const size_t pieces, const size_t cols) {
    const size_t width = h->width, first = h->values + at / width / h->share * width + at % width;
    const float *const *rows = h->rows, *p[8];
    float *y = h->y + at;
    __m512 sum[8][4];
    MOE_UNROLL_FOR (size_t u = 0; u < pieces; u++) {
        p[u] = h->scores + (at + cols * u) / width * h->stride;
        MOE_UNROLL_FOR (size_t b = 0; b < cols / 16; b++) {
            sum[u][b] = _mm512_setzero_ps();
            if (i && 16 * b < left) sum[u][b] = moe_lanes_load_avx512(y + cols * u + 16 * b, left - 16 * b);
        }
    }
    for (; i < end; i++) {
        const float *value = rows[i] + first;
        __asm__("" : "+r"(value)); /* makes gcc keep one address, not one per load */
        MOE_UNROLL_FOR (size_t u = 0; u < pieces; u++) {
            const __m512 weight = _mm512_set1_ps(p[u][i]);
            MOE_UNROLL_FOR (size_t b = 0; b < cols / 16; b++)
                if (16 * b < left)
                    sum[u][b] =
                        _mm512_add_ps(sum[u][b], _mm512_mul_ps(weight, moe_lanes_load_avx512(value + cols * u + 16 * b,
                                                                                             left - 16 * b)));
        }
    }
    MOE_UNROLL_FOR (size_t u = 0; u < pieces; u++)
        MOE_UNROLL_FOR (size_t b = 0; b < cols / 16; b++)
            if (16 * b < left) _mm512_mask_storeu_ps(y + cols * u + 16 * b, moe_mask_avx512(left - 16 * b), sum[u][b]);
}

MOE_AVX512 static void moe_softmax_avx512(float *p, size_t n) {
    const __m512 sum = _mm512_set1_ps(moe_exp_sum_avx512(p, n, moe_max_avx512(p, n), p));
    for (size_t i = 0; i < n; i += 16) _mm512_storeu_ps(p + i, _mm512_div_ps(_mm512_loadu_ps(p + i), sum));
}

/* Compute heads for a few query rows. Each block of keys or values is used for all rows while it is in L1. */
MOE_AVX512 static void moe_heads_avx512(const moe_heads *h, size_t rows) {
    enum { BLOCK = 8 };
    const size_t width = h->width, cols = h->heads * width, first = h->first;
    size_t longest = 0;
    for (size_t r = 0; r < rows; r++) longest = moe_max(longest, h[r].n);
    for (size_t i = first; i < longest && h->parts & MOE_HEADS_SCORES; i += 4)
        for (size_t r = 0; r < rows; r++)
            if (i < h[r].n && width == 64) moe_scores_avx512(&h[r], i, 64);
            else if (i < h[r].n && width == 32) moe_scores_avx512(&h[r], i, 32);
            else if (i < h[r].n) moe_scores_avx512(&h[r], i, width);
    for (size_t r = 0; r < rows && h->parts & MOE_HEADS_SOFTMAX; r++)
        for (size_t head = 0; head < h->heads; head++) moe_softmax_avx512(h[r].scores + head * h[r].stride, h[r].n);
    for (size_t i = first; i < longest && h->parts & MOE_HEADS_BLEND; i += BLOCK)
        for (size_t at = 0, n; at < cols; at += n) {
            const int whole = h->share == 1 && (width == 32 || width % 64 == 0) && at + 256 <= cols;
            n = whole ? 256 : moe_min(64, width - at % width);
            for (size_t r = 0; r < rows; r++)
                if (i >= h[r].n) continue;
                else if (!whole) moe_blend_avx512(&h[r], i, moe_min(h[r].n, i + BLOCK), at, n, 1, 64);
                else if (width == 32) moe_blend_avx512(&h[r], i, moe_min(h[r].n, i + BLOCK), at, 32, 8, 32);
                else moe_blend_avx512(&h[r], i, moe_min(h[r].n, i + BLOCK), at, 64, 4, 64);
        }
}

static int moe_avx512vnni_available(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}

MOE_UNUSED static const moe_kernels moe_kernels_small_avx512 = { MOE_KERNELS_OF(avx512vnni, moe_linear_small_avx512,
                                                                                avx512) };
MOE_UNUSED static const moe_kernels moe_kernels_avx512vnni = { MOE_KERNELS_OF(avx512vnni, moe_linear_avx512, avx512),
                                                               .small = &moe_kernels_small_avx512 };
#endif /* MOE_X86 */

/* ==== 14. Kernels: AMX ========================================================================================
 * Linears with int8 tiles; the other kernels are from AVX-512. Invariant: tiles are configured only during a linear.
 *
 * A tile is 16 rows of 64 bytes. A holds 64 columns of up to 16 code rows; B holds 64 columns of a block of 16 outputs,
 * which is the layout of Q8 in the file (1024 contiguous bytes); C holds the 16 x 16 sums. According to the manual a
 * product takes 16 cycles with a latency of 52, and a tile load from L1 takes 8. Four C tiles hide the latency: 2 A x 2
 * B or, for up to 16 rows, 1 A x 4 B. 64 columns take 4 x 16 cycles of products and, in parallel, 4 x 8 or 5 x 8 cycles
 * of loads: 1024 multiplications per cycle, compared with 128 with VNNI. In cache, a linear of 512 x 2048 is 1.5 times
 * as fast as with AVX-512 for 5 rows and 2.8 times for 32 rows; for Q4 with scales by block, 768 x 2048, the factors
 * are 1.1 for 12 and 1.7 for 32 rows. Prefetching as in AVX-512 had no effect.
 *
 * Compiler vectors are used instead of intrinsics, so tests/engine/isa_emu.h can compile this section with tiles
 * emulated in C (_tile_*) for machines without AMX or even AVX-512. */

#if MOE_X86 &&                                                                                                       \
    (defined(MOE_AMX_REST) || (defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)))
#define MOE_AMX 1

#ifndef MOE_AMX_REST
#define MOE_AMX_TARGET __attribute__((target("amx-tile,amx-int8," MOE_AVX512_TARGET)))
#define MOE_AMX_REST avx512
/* Convert 16 int8 to int32; gcc 12 compiles __builtin_convertvector to scalar code. */
#define MOE_AMX_WIDEN(to, from) ((to) = (moe_i32x16)_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(from))))
#define MOE_AMX_PARTS(to, low) ((to) = (moe_f32x16)moe_ints_part_512(low))

/* Return 1 if the processor has tiles, the system saves their state (XCR0) and this process may use them. Linux grants
 * them on request, because 8 KB of state may not fit a program's signal stack. Repeating the request is harmless. */
static int moe_amx_available(void) {
    unsigned eax, ebx, ecx, edx, low, high;
    long answer = 158; /* arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA); libc does not declare it under POSIX */
    if (!moe_avx512vnni_available() || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return 0;
    if (!(edx >> 24 & 1) || !(edx >> 25 & 1)) return 0; /* AMX-TILE, AMX-INT8 */
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low >> 17 & 3) != 3) return 0; /* state of tile configuration and tile data */
    __asm__ volatile("syscall" : "+a"(answer) : "D"(0x1023L), "S"(18L) : "rcx", "r11", "memory");
    return answer == 0;
}
#endif

typedef uint8_t moe_u8x64 __attribute__((vector_size(64), may_alias)); /* avoids memcpy, which _FORTIFY_SOURCE=3 */
                                                                       /* does not inline */
typedef uint16_t moe_u16x32 __attribute__((vector_size(64)));
typedef uint32_t moe_u32x16 __attribute__((vector_size(64)));
typedef int32_t moe_i32x16 __attribute__((vector_size(64)));
typedef float moe_f32x16 __attribute__((vector_size(64), may_alias));

enum {
    MOE_AMX_ROWS = 5,       /* minimum rows for Q8; fewer are faster without tiles */
    MOE_AMX_ROWS_Q4 = 9,    /* minimum rows for formats that must be expanded first */
    MOE_AMX_BUFFER = 65536, /* bytes of expanded Q4 on the stack: two blocks of 2048 columns, in L1 or L2 */
};

typedef struct moe_tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t colsb[16];
    uint8_t rows[16];
} moe_tile_config;

/* Configure the tiles: 0 to 3 are C, 4 is A, 6 and 7 are B. 5 is a second A if `pair` is 1, otherwise B. This takes
 * several hundred cycles. While tiles are configured, every task switch saves 8 KB and the core cannot enter deep
 * sleep. Tiles are therefore configured for a linear, because its tasks are large, not for the life of a thread. */
MOE_AMX_TARGET MOE_INLINE void moe_amx_configure(size_t height, int pair) {
    moe_tile_config config = { .palette = 1 };
    for (int t = 0; t < 8; t++) {
        config.colsb[t] = 64;
        config.rows[t] = (uint8_t)(t < 5 || (t == 5 && pair) ? height : 16);
    }
    __asm__ volatile("" : : "r"(&config) : "memory"); /* gcc 12 assumes that only 8 bytes of config are read */
    _tile_loadconfig(&config);
}

/* Expand columns [k0, k1) of a block of a matrix of fewer than 8 bits to Q8 in `out`, aligned to 64. x86 cannot
 * multiply bytes, but a nibble n times |sub| is below 256, so a 16-bit product computes two: (n - 8) s is n s - 8 s or,
 * for negative s, (15 - n) |s| - 7 |s|. In Q3 n is the code, and 8 and 15 become 4 and 7. The mid is included in the
 * subtrahend. */
MOE_AMX_TARGET MOE_INLINE void moe_amx_expand(const moe_matrix *m, size_t block, size_t k0, size_t k1, int8_t *out,
                                              const size_t bits) {
    const uint8_t *codes = (const uint8_t *)m->data + (block * m->cols_padded + k0) * 2 * bits;
    const int8_t *side = m->subs + (block * m->cols_padded + k0) / 64 * m->sides * 16;
    for (size_t k = k0; k < k1; k += MOE_Q4_GROUP, side += k % 64 ? 16 : m->sides * 16 - 16) {
        moe_i32x16 s, mid = { 0 };
        moe_u32x16 negative, magnitude;
        moe_u16x32 factor, flip;
        moe_u8x64 offset;
        MOE_AMX_WIDEN(s, side);
        if (m->parts) MOE_AMX_WIDEN(mid, side + 32);
        negative = (moe_u32x16)(s >> 31);
        magnitude = ((moe_u32x16)s ^ negative) - negative;
        factor = (moe_u16x32)(magnitude * 0x00010001u);
        flip = (moe_u16x32)(negative & (bits == 3 ? 0x07070707u : 0x0f0f0f0fu));
        magnitude = (magnitude << (bits == 3 ? 2 : 3)) - (magnitude & negative) - (moe_u32x16)mid;
        offset = (moe_u8x64)((magnitude & 0xff) * 0x01010101u);
        for (size_t unit = 0; unit < 8; unit++, out += 64) {
            moe_u16x32 n, third;
            memcpy(&n, codes + moe_unit_line(bits, unit) * 64, sizeof n);
            n = n >> moe_unit_shift(bits, unit) & (uint16_t)(((1 << bits) - 1) * 0x0101);
            if (bits == 2) n = n * 5 - (n >> 1 & 0x0101);
            if (bits == 3 && unit > 5) {
                memcpy(&third, codes + 128, sizeof third);
                n = (n & 0x0303) | (third >> (unit - 2) & 0x0404);
            }
            *(moe_u8x64 *)out = (moe_u8x64)((n ^ flip) * factor) - offset;
        }
        codes += 64 * bits;
    }
}

/* Add the products of k columns to C, for one row tile and up to four blocks. */
MOE_AMX_TARGET MOE_INLINE void moe_amx_one(const int8_t *a, size_t a_stride, const int8_t *b, size_t b_next,
                                           size_t blocks, size_t k) {
    for (; k; k -= 64, a += 64, b += 1024) {
        _tile_loadd(4, a, a_stride);
        _tile_loadd(5, b, 64);
        _tile_dpbssd(0, 4, 5);
        if (blocks > 1) {
            _tile_loadd(6, b + b_next, 64);
            _tile_dpbssd(1, 4, 6);
        }
        if (blocks > 2) {
            _tile_loadd(7, b + 2 * b_next, 64);
            _tile_dpbssd(2, 4, 7);
        }
        if (blocks > 3) {
            _tile_loadd(5, b + 3 * b_next, 64);
            _tile_dpbssd(3, 4, 5);
        }
    }
}

/* Add the products of k columns to C, for two row tiles and up to two blocks. */
MOE_AMX_TARGET MOE_INLINE void moe_amx_two(const int8_t *a, const int8_t *a1, size_t a_stride, const int8_t *b,
                                           size_t b_next, size_t blocks, size_t k) {
    for (; k; k -= 64, a += 64, a1 += 64, b += 1024) {
        _tile_loadd(4, a, a_stride);
        _tile_loadd(6, b, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(5, a1, a_stride);
        _tile_dpbssd(1, 5, 6);
        if (blocks > 1) {
            _tile_loadd(7, b + b_next, 64);
            _tile_dpbssd(2, 4, 7);
            _tile_dpbssd(3, 5, 7);
        }
    }
}

/* Scale the sums of C over columns [k, k + 64), add them to `floats` and clear C. `high` row tiles have `height` rows
 * each, from rows[0] and rows[1] on. */
MOE_AMX_TARGET MOE_INLINE void moe_amx_add_block(const moe_linear *l, const size_t rows[2], size_t block, size_t k,
                                                 size_t height, size_t high, size_t tiles, float floats[4][16 * 16]) {
    const moe_matrix *w = l->w;
    const size_t code_bytes = moe_code_bytes(w->cols), side_bytes = w->sides * 16,
                 stride = l->scales ? sizeof(float) : code_bytes;
    const int8_t *scales = l->codes + moe_scales_at(l) + k / 64 * sizeof(float);
    int32_t sums[4][16 * 16] __attribute__((aligned(64)));
    _tile_stored(0, sums[0], 64);
    _tile_zero(0);
    if (tiles > 1) _tile_stored(1, sums[1], 64);
    _tile_zero(1);
    if (tiles > 2) _tile_stored(2, sums[2], 64);
    _tile_zero(2);
    if (tiles > 3) _tile_stored(3, sums[3], 64);
    _tile_zero(3);
    __asm__ volatile("" : : "r"(sums) : "memory");
    for (size_t i = 0; i < tiles; i++) {
        const size_t row = rows[high > 1 && i % 2], part_block = block + (i >> (high - 1));
        const int8_t *at = l->scales ? (const int8_t *)(l->scales + row) : scales + row * code_bytes;
        moe_f32x16 part = { 0 };
        if (w->parts) MOE_AMX_PARTS(part, w->parts + (part_block * (w->cols_padded / 64) + k / 64) * side_bytes);
        for (size_t r = 0; r < height; r++, at += stride) {
            const moe_i32x16 *sum = (const void *)(sums[i] + r * 16);
            moe_f32x16 *to = (void *)(floats[i] + r * 16);
            const float scale = moe_block_scale(at);
            if (w->parts) *to = *to + __builtin_convertvector(*sum, moe_f32x16) * (part * scale);
            else *to = *to + __builtin_convertvector(*sum, moe_f32x16) * scale;
        }
    }
}

/* Compute a quantised linear. All row tiles have the same height, so one configuration suffices; the last tiles may
 * overlap the previous rows. More than 16 rows are divided into an even number of shorter tiles, since a product takes
 * one cycle per row of A. A panel of blocks remains in L1 or L2 for all row tiles; Q4 that fits is expanded once. */
MOE_AMX_TARGET static void moe_amx_panels(const moe_linear *l, size_t row0, size_t rows, size_t block0, size_t block1) {
    const moe_matrix *w = l->w;
    const size_t k = w->cols_padded, stride = moe_code_bytes(w->cols);
    const size_t tiles = rows <= 16 ? 1 : moe_round_up(moe_divide_up(rows, 16), 2), height = moe_divide_up(rows, tiles);
    const size_t high = tiles == 1 ? 1 : 2, wide = 4 / high;
    const size_t span = w->bits == 8 ? k : moe_min(k, MOE_AMX_BUFFER / 16 / wide);
    const int by_block = moe_by_block(l);
    int32_t sums[4][16 * 16] __attribute__((aligned(64)));
    float floats[4][16 * 16] __attribute__((aligned(64)));
    int8_t expanded[MOE_AMX_BUFFER] __attribute__((aligned(64)));
    moe_amx_configure(height, high == 2);
    for (size_t block = block0; block < block1; block += wide) {
        const size_t blocks = moe_min(wide, block1 - block);
        for (size_t tile = 0; tile < tiles; tile += high) {
            const size_t begin[2] = { row0 + moe_min(tile * height, rows - height),
                                      row0 + moe_min((tile + 1) * height, rows - height) };
            const int8_t *a = l->codes + begin[0] * stride, *a1 = l->codes + begin[1] * stride;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            if (by_block) memset(floats, 0, sizeof floats);
            for (size_t k0 = 0; k0 < k; k0 += span) {
                const size_t n = moe_min(span, k - k0);
                const int8_t *b = w->bits == 8 ? (const int8_t *)w->data + (block * k + k0) * 16 : expanded;
                for (size_t i = 0; i < blocks && b == expanded && (tile == 0 || span < k); i++) {
                    int8_t *to = expanded + i * span * 16;
                    if (w->bits == 4) moe_amx_expand(w, block + i, k0, k0 + n, to, 4);
                    else if (w->bits == 3) moe_amx_expand(w, block + i, k0, k0 + n, to, 3);
                    else moe_amx_expand(w, block + i, k0, k0 + n, to, 2);
                }
                __asm__ volatile("" : : "r"(b) : "memory"); /* gcc 12 does not know that tile loads read b */
                for (size_t at = 0, some = by_block ? MOE_Q8_COLS : n; at < n; at += some) {
                    if (high == 1) moe_amx_one(a + k0 + at, stride, b + at * 16, span * 16, blocks, some);
                    else moe_amx_two(a + k0 + at, a1 + k0 + at, stride, b + at * 16, span * 16, blocks, some);
                    if (by_block) moe_amx_add_block(l, begin, block, k0 + at, height, high, high * blocks, floats);
                }
                __asm__ volatile("" : : "r"(b) : "memory"); /* the tile loads must precede new stores to b */
            }
            _tile_stored(0, sums[0], 64);
            _tile_stored(1, sums[1], 64);
            _tile_stored(2, sums[2], 64);
            _tile_stored(3, sums[3], 64);
            for (size_t i = 0; i < high * blocks; i++) {
                const size_t first = (tile + (i & (high - 1))) * height, skip = first - moe_min(first, rows - height);
                if (first >= rows) continue;
                MOE_NAME(moe_finish_, MOE_AMX_REST)(l, row0 + first, block + (i >> (high - 1)),
                                                    moe_min(height, rows - first), 1,
                                                    by_block ? (const void *)(floats[i] + skip * 16)
                                                             : (const void *)(sums[i] + skip * 16));
            }
        }
    }
    _tile_release();
}

static void moe_linear_amx(const moe_linear *l, size_t row0, size_t row1, size_t block0, size_t block1) {
    const size_t least = l->w->bits == 8 ? MOE_AMX_ROWS : MOE_AMX_ROWS_Q4;
    if (moe_type_quantised(l->w->type) && row1 - row0 >= least && !l->floats)
        moe_amx_panels(l, row0, row1 - row0, block0, block1);
    else MOE_NAME(moe_linear_, MOE_AMX_REST)(l, row0, row1, block0, block1);
}

MOE_UNUSED static const moe_kernels moe_kernels_amx = { MOE_KERNELS_OF(amx, moe_linear_amx, MOE_AMX_REST) };
#else
#define MOE_AMX 0
#endif

/* ==== 15. Kernels: NEON =======================================================================================
 * AArch64. Invariant: four registers hold the 16 lanes; tails are copied to a zeroed buffer first, since adding a
 * product of zeros leaves a lane unchanged. Three instruction sets differ only in the quantised linears: "neon" runs on
 * every AArch64 machine, "dotprod" uses sdot (4 products per 32-bit sum), "i8mm" uses smmla (8 products per sum). */

#if MOE_ARM
/* The intrinsics of sdot and smmla need an architecture in gcc and features in clang 16 or later. */
#if defined(__clang__)
#define MOE_DOTPROD __attribute__((target("dotprod")))
#define MOE_I8MM __attribute__((target("dotprod,i8mm")))
#else
#define MOE_DOTPROD __attribute__((target("arch=armv8.2-a+dotprod")))
#define MOE_I8MM __attribute__((target("arch=armv8.2-a+dotprod+i8mm")))
#endif
#if defined(__clang__) && __clang_major__ < 16
#define MOE_SDOT(sum, w, x, lane) __asm__("sdot %0.4s, %1.16b, %2.4b[" #lane "]" : "+w"(sum) : "w"(w), "w"(x))
#define MOE_SMMLA(sum, x, w) __asm__("smmla %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(x), "w"(w))
#else
#define MOE_SDOT(sum, w, x, lane) ((sum) = vdotq_laneq_s32(sum, w, x, lane))
#define MOE_SMMLA(sum, x, w) ((sum) = vmmlaq_s32(sum, x, w))
#endif

/* ---- The 16 lanes: four registers ---- */

typedef float32x4_t moe_register_neon;

#define MOE_BITS_NEON(op, a, b) vreinterpretq_f32_u32(op(vreinterpretq_u32_f32(a), vreinterpretq_u32_f32(b)))
#define moe_register_of_neon vdupq_n_f32
#define moe_register_load_neon vld1q_f32
#define moe_register_store_neon vst1q_f32
#define moe_register_math_neon(op) v##op##q_f32
#define moe_register_and_neon(a, b) MOE_BITS_NEON(vandq_u32, a, b)
#define moe_register_or_neon(a, b) MOE_BITS_NEON(vorrq_u32, a, b)
#define moe_register_xor_neon(a, b) MOE_BITS_NEON(veorq_u32, a, b)
#define moe_register_max_bits_neon(a, b) MOE_BITS_NEON(vmaxq_u32, a, b)
/* The comparisons give the same results as maxps and minps; fmax and fmin would propagate NaN and order 0 above -0. */
#define moe_register_max_neon(a, b) vbslq_f32(vcgtq_f32(a, b), a, b)
#define moe_register_min_neon(a, b) vbslq_f32(vcltq_f32(a, b), a, b)
#define moe_register_of_ints_neon(x) vcvtq_f32_s32(vld1q_s32(x))
MOE_INLINE float32x4_t moe_register_halves_neon(moe_type type, const uint16_t *x) {
    const uint16x4_t four = vld1_u16(x);
    return type == MOE_TYPE_BF16 ? vreinterpretq_f32_u32(vshll_n_u16(four, 16))
                                 : vcvt_f32_f16(vreinterpret_f16_u16(four));
}
MOE_INLINE float32x4_t moe_register_scaled_neon(float32x4_t x, float32x4_t y, float32x4_t t) {
    const uint32x4_t power = vaddq_u32(vshlq_n_u32(vreinterpretq_u32_f32(t), 23), vdupq_n_u32(127u << 23));
    const uint32x4_t scaled = vreinterpretq_u32_f32(vmulq_f32(y, vreinterpretq_f32_u32(power)));
    return vreinterpretq_f32_u32(vbicq_u32(scaled, vcltq_f32(x, vdupq_n_f32(MOE_EXP_LOW))));
}
MOE_INLINE float moe_register_join_neon(float32x4_t v) {
    const float32x2_t two = vadd_f32(vget_low_f32(v), vget_high_f32(v));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
#define moe_register_largest_bits_neon(v) moe_from_bits(vmaxvq_u32(vreinterpretq_u32_f32(v)))
/* For |x| < 2^22 the conversion rounds like moe_round. */
MOE_INLINE void moe_register_codes_neon(const float32x4_t v[4], int8_t *q) {
    int16x8_t low = vqmovn_high_s32(vqmovn_s32(vcvtnq_s32_f32(v[0])), vcvtnq_s32_f32(v[1]));
    int16x8_t high = vqmovn_high_s32(vqmovn_s32(vcvtnq_s32_f32(v[2])), vcvtnq_s32_f32(v[3]));
    vst1q_s8(q, vqmovn_high_s16(vqmovn_s16(low), high));
}
MOE_INLINE void moe_lanes_code_sums_neon(const int8_t *q, int16_t sums[2]) {
    for (size_t i = 0; i < 2; i++, q += 32) sums[i] = vaddvq_s16(vpadalq_s8(vpaddlq_s8(vld1q_s8(q)), vld1q_s8(q + 16)));
}

#define MOE_ISA neon
#define MOE_ISA_TARGET
#define MOE_ISA_REGISTERS 4
#define MOE_ISA_FETCH(type, w) (void)(w) /* no prefetch, because its effect has not been measured */
#include "moe.c"

/* Broadcast the codes of 4 columns to four lanes. */
#define moe_four_neon(codes) vreinterpretq_s8_s32(vdupq_n_s32(moe_four(codes)))

/* Compute a block of 16 outputs of a Q8 matrix for up to 2 input rows. The sum of two products fits 16 bits (2 * 127 *
 * 127 = 32258), so the products of two lines are added in 16 bits, and pairs of these sums are added to 32-bit sums. */
MOE_INLINE void moe_q8_rows_neon(const moe_linear *l, size_t row, size_t block, const size_t rows) {
    const moe_matrix *m = l->w;
    const size_t groups = m->cols_padded / 4, code_bytes = moe_code_bytes(m->cols);
    const int8_t *w = (const int8_t *)m->data + block * groups * 64;
    int32x4_t sum[2][8];
    int32_t sums[2 * 16];
    for (size_t i = 0; i < 8 * rows; i++) sum[i / 8][i % 8] = vdupq_n_s32(0);
    for (size_t g = 0; g < groups; g += 2) {
        int8x16_t x0[2], x1[2];
        for (size_t r = 0; r < rows; r++) {
            x0[r] = moe_four_neon(l->codes + (row + r) * code_bytes + g * 4);
            x1[r] = moe_four_neon(l->codes + (row + r) * code_bytes + g * 4 + 4);
        }
#pragma GCC unroll 4 /* otherwise clang keeps the sums in memory */
        for (size_t q = 0; q < 4; q++) {
            const int8x16_t w0 = vld1q_s8(w + g * 64 + 16 * q), w1 = vld1q_s8(w + g * 64 + 64 + 16 * q);
#pragma GCC unroll 2
            for (size_t r = 0; r < rows; r++) {
                int16x8_t low = vmull_s8(vget_low_s8(w0), vget_low_s8(x0[r])), high = vmull_high_s8(w0, x0[r]);
                low = vmlal_s8(low, vget_low_s8(w1), vget_low_s8(x1[r]));
                high = vmlal_high_s8(high, w1, x1[r]);
                sum[r][2 * q] = vpadalq_s16(sum[r][2 * q], low);
                sum[r][2 * q + 1] = vpadalq_s16(sum[r][2 * q + 1], high);
            }
        }
    }
    for (size_t i = 0; i < 4 * rows; i++)
        vst1q_s32(sums + 4 * i, vpaddq_s32(sum[i / 4][i % 4 * 2], sum[i / 4][i % 4 * 2 + 1]));
    moe_finish_sums(l, row, block, rows, sums, moe_finish_neon);
}

/* Compute a block of 16 outputs of a Q4 matrix. Nibbles are code + 8, so 8 * sum(x) is subtracted. A group's sum of x
 * times code is at most 32 * 8 * 127 = 32512 and fits 16 bits; intermediate sums may wrap. Sums over groups are
 * unsigned because they may overflow if a file has extreme subs. */
MOE_INLINE void moe_q4_rows_neon(const moe_linear *l, size_t row, size_t block, const size_t rows) {
    const moe_matrix *m = l->w;
    const size_t groups = m->cols_padded / MOE_Q4_GROUP, code_bytes = moe_code_bytes(m->cols);
    const uint8_t *w = (const uint8_t *)m->data + block * groups * 256;
    const int8_t *subs = m->subs + block * groups * 16;
    uint32x4_t sum[2][4];
    int32_t sums[2 * 16];
    for (size_t i = 0; i < 4 * rows; i++) sum[i / 4][i % 4] = vdupq_n_u32(0);
    for (size_t g = 0; g < groups; g++) {
        int16x8_t part[2][8];
        for (size_t i = 0; i < 8 * rows; i++) part[i / 8][i % 8] = vdupq_n_s16(0);
        for (size_t u = 0; u < 4; u++) { /* a unit is 16 rows x 8 columns */
            int8x16_t x0[2], x1[2];
            for (size_t r = 0; r < rows; r++) {
                x0[r] = moe_four_neon(l->codes + (row + r) * code_bytes + g * MOE_Q4_GROUP + u * 8);
                x1[r] = moe_four_neon(l->codes + (row + r) * code_bytes + g * MOE_Q4_GROUP + u * 8 + 4);
            }
#pragma GCC unroll 4
            for (size_t q = 0; q < 4; q++) {
                const uint8x16_t bytes = vld1q_u8(w + (g * 4 + u) * 64 + 16 * q);
                const int8x16_t w0 = vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15)));
                const int8x16_t w1 = vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4));
#pragma GCC unroll 2
                for (size_t r = 0; r < rows; r++) {
                    int16x8_t *p = &part[r][2 * q];
                    p[0] = vmlal_s8(vmlal_s8(p[0], vget_low_s8(w0), vget_low_s8(x0[r])), vget_low_s8(w1),
                                    vget_low_s8(x1[r]));
                    p[1] = vmlal_high_s8(vmlal_high_s8(p[1], w0, x0[r]), w1, x1[r]);
                }
            }
        }
        for (size_t r = 0; r < rows; r++) {
            const int32_t codes = moe_code_sum(l->codes + (row + r) * code_bytes + moe_sums_at(l) + 2 * g);
            for (size_t h = 0; h < 2; h++) { /* eight outputs */
                uint16x8_t p[4], eight;
                const int16x8_t sub = vmovl_s8(vld1_s8(subs + g * 16 + 8 * h));
                int16x8_t product;
                uint32x4_t *s = &sum[r][2 * h];
                for (size_t i = 0; i < 4; i++) p[i] = vreinterpretq_u16_s16(part[r][4 * h + i]);
                eight = vpaddq_u16(vpaddq_u16(p[0], p[1]), vpaddq_u16(p[2], p[3]));
                product = vreinterpretq_s16_u16(vsubq_u16(eight, vdupq_n_u16((uint16_t)(8 * codes))));
                s[0] = vaddq_u32(s[0], vreinterpretq_u32_s32(vmull_s16(vget_low_s16(product), vget_low_s16(sub))));
                s[1] = vaddq_u32(s[1], vreinterpretq_u32_s32(vmull_high_s16(product, sub)));
            }
        }
    }
    for (size_t i = 0; i < 4 * rows; i++) vst1q_s32(sums + 4 * i, vreinterpretq_s32_u32(sum[i / 4][i % 4]));
    moe_finish_sums(l, row, block, rows, sums, moe_finish_neon);
}

#define MOE_ROWS_NEON(isa, n)                                   \
    for (; r + (n) <= row1; r += (n))                           \
        if (l->w->bits == 8) moe_q8_rows_##isa(l, r, block, n); \
        else moe_q4_rows_##isa(l, r, block, n);

/* Compute a quantised linear. Rows are the inner loop, so a block of weights is read once and remains in L1. */
static void moe_quantised_neon(const moe_linear *l, size_t row0, size_t row1, size_t block0, size_t block1) {
    for (size_t block = block0; block < block1; block++) {
        size_t r = row0;
        MOE_ROWS_NEON(neon, 2)
        MOE_ROWS_NEON(neon, 1)
    }
}
MOE_LINEAR_OF(neon, neon, Q4, moe_linear_blocks(l, row0, row1, block0, block1, moe_quantised_neon))

/* Compute a block of 16 outputs of a Q8 matrix for up to 4 input rows with sdot, 16 columns at a time. Fewer than 4
 * rows use several independent sums per output to hide the latency. */
MOE_DOTPROD MOE_INLINE void moe_q8_rows_dotprod(const moe_linear *l, size_t row, size_t block, const size_t rows) {
    const moe_matrix *m = l->w;
    const size_t groups = m->cols_padded / 4, code_bytes = moe_code_bytes(m->cols), chains = 4 / rows;
    const int8_t *w = (const int8_t *)m->data + block * groups * 64;
    int32x4_t sum[4][4];
    int32_t sums[4 * 16];
    for (size_t i = 0; i < 4 * rows * chains; i++) sum[i / 4][i % 4] = vdupq_n_s32(0);
#define MOE_LINE(i)                                                                                  \
    for (size_t q = 0; q < 4; q++) {                                                                 \
        const int8x16_t weights = vld1q_s8(w + (g + i) * 64 + 16 * q);                               \
        for (size_t r = 0; r < rows; r++) MOE_SDOT(sum[r + i % chains * rows][q], weights, x[r], i); \
    }
    for (size_t g = 0; g < groups; g += 4) {
        int8x16_t x[4];
        for (size_t r = 0; r < rows; r++) x[r] = vld1q_s8(l->codes + (row + r) * code_bytes + g * 4);
        MOE_LINE(0)
        MOE_LINE(1)
        MOE_LINE(2)
        MOE_LINE(3)
    }
#undef MOE_LINE
    for (size_t i = rows; i < rows * chains; i++)
        for (size_t q = 0; q < 4; q++) sum[i % rows][q] = vaddq_s32(sum[i % rows][q], sum[i][q]);
    for (size_t i = 0; i < 4 * rows; i++) vst1q_s32(sums + 4 * i, sum[i / 4][i % 4]);
    moe_finish_sums(l, row, block, rows, sums, moe_finish_neon);
}

/* Sum a Q4 matrix with sdot for outputs from 4 * quad on. A single row has separate sums for high nibbles. */
MOE_DOTPROD MOE_INLINE void moe_q4_sums_dotprod(const moe_linear *l, size_t row, size_t block, size_t quad,
                                                const size_t rows, const size_t quads, int32_t *sums) {
    const moe_matrix *m = l->w;
    const size_t groups = m->cols_padded / MOE_Q4_GROUP, code_bytes = moe_code_bytes(m->cols), apart = rows == 1;
    const uint8_t *w = (const uint8_t *)m->data + block * groups * 256 + 16 * quad;
    const int8_t *subs = m->subs + block * groups * 16 + 4 * quad;
    uint32x4_t sum[4][4];
    for (size_t i = 0; i < quads * rows; i++) sum[i / quads][i % quads] = vdupq_n_u32(0);
#define MOE_UNIT(u, half, lane0, lane1)                                            \
    for (size_t q = 0; q < quads; q++) {                                           \
        const uint8x16_t bytes = vld1q_u8(w + (g * 4 + u) * 64 + 16 * q);          \
        const int8x16_t w0 = vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15))); \
        const int8x16_t w1 = vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4));            \
        for (size_t r = 0; r < rows; r++) {                                        \
            MOE_SDOT(part[r][q], w0, x[r][half], lane0);                           \
            MOE_SDOT(part[r + apart][q], w1, x[r][half], lane1);                   \
        }                                                                          \
    }
    for (size_t g = 0; g < groups; g++) {
        int8x16_t x[4][2];
        int32x4_t part[4][4];
        for (size_t r = 0; r < rows; r++) {
            const int8_t *codes = l->codes + (row + r) * code_bytes;
            const int32x4_t first = vdupq_n_s32(-8 * moe_code_sum(codes + moe_sums_at(l) + 2 * g));
            for (size_t q = 0; q < quads; q++) part[r][q] = first;
            x[r][0] = vld1q_s8(codes + g * MOE_Q4_GROUP);
            x[r][1] = vld1q_s8(codes + g * MOE_Q4_GROUP + 16);
        }
        for (size_t q = 0; apart && q < quads; q++) part[1][q] = vdupq_n_s32(0);
        MOE_UNIT(0, 0, 0, 1)
        MOE_UNIT(1, 0, 2, 3)
        MOE_UNIT(2, 1, 0, 1)
        MOE_UNIT(3, 1, 2, 3)
        for (size_t q = 0; q < quads; q++) {
            const int16x8_t eight = vmovl_s8(vld1_s8(subs + g * 16 + q / 2 * 8));
            const int32x4_t sub = q % 2 ? vmovl_high_s16(eight) : vmovl_s16(vget_low_s16(eight));
            if (apart) part[0][q] = vaddq_s32(part[0][q], part[1][q]);
            for (size_t r = 0; r < rows; r++)
                sum[r][q] = vmlaq_u32(sum[r][q], vreinterpretq_u32_s32(part[r][q]), vreinterpretq_u32_s32(sub));
        }
    }
#undef MOE_UNIT
    for (size_t r = 0; r < rows; r++)
        for (size_t q = 0; q < quads; q++) vst1q_s32(sums + 16 * r + 4 * (quad + q), vreinterpretq_s32_u32(sum[r][q]));
}

/* Compute a block of 16 outputs of a Q4 matrix. Four rows are computed in halves so that the sums fit the registers. */
MOE_DOTPROD MOE_INLINE void moe_q4_rows_dotprod(const moe_linear *l, size_t row, size_t block, const size_t rows) {
    int32_t sums[4 * 16];
    MOE_UNROLL_FOR (size_t quad = 0; quad < 4; quad += rows == 4 ? 2 : 4)
        moe_q4_sums_dotprod(l, row, block, quad, rows, rows == 4 ? 2 : 4, sums);
    moe_finish_sums(l, row, block, rows, sums, moe_finish_neon);
}

MOE_DOTPROD static void moe_quantised_dotprod(const moe_linear *l, size_t row0, size_t row1, size_t block0,
                                              size_t block1) {
    for (size_t block = block0; block < block1; block++) {
        size_t r = row0;
        MOE_ROWS_NEON(dotprod, 4)
        MOE_ROWS_NEON(dotprod, 2)
        MOE_ROWS_NEON(dotprod, 1)
    }
}
MOE_LINEAR_OF(dotprod, neon, Q4, moe_linear_blocks(l, row0, row1, block0, block1, moe_quantised_dotprod))

/* smmla multiplies 8 columns of two rows by 8 columns of two outputs. MOE_PANEL_COLS columns of a block of weights are
 * arranged for smmla (adjacent lines zipped, Q4 expanded to int8) as a panel of 8 KiB for MOE_PANEL_ROWS rows. */
enum { MOE_PANEL_COLS = 512, MOE_PANEL_ROWS = 64 };

/* Arrange columns [col, col + cols) of a block as panel[cols / 8][16][8]. */
MOE_INLINE void moe_panel_q8(const moe_matrix *m, size_t block, size_t col, size_t cols, int8_t *panel) {
    const int8_t *w = (const int8_t *)m->data + moe_q8_index(m->cols_padded, block * 16, col);
    for (; cols; cols -= 8, w += 128, panel += 128)
        for (size_t q = 0; q < 4; q++) {
            const int32x4_t w0 = vreinterpretq_s32_s8(vld1q_s8(w + 16 * q));
            const int32x4_t w1 = vreinterpretq_s32_s8(vld1q_s8(w + 64 + 16 * q));
            vst1q_s8(panel + 32 * q, vreinterpretq_s8_s32(vzip1q_s32(w0, w1)));
            vst1q_s8(panel + 32 * q + 16, vreinterpretq_s8_s32(vzip2q_s32(w0, w1)));
        }
}

MOE_INLINE void moe_panel_q4(const moe_matrix *m, size_t block, size_t col, size_t cols, int8_t *panel) {
    const uint8_t *w = moe_unit_at(m, block * 16, col);
    const int8_t *subs = m->subs + moe_side_index(m->cols_padded, m->sides, block * 16, col);
    for (; cols; cols -= MOE_Q4_GROUP, w += 256, subs += 16, panel += 512)
        for (size_t q = 0; q < 4; q++) {
            uint8_t four[16]; /* the subs of 4 outputs, each for 4 columns */
            uint8x16_t sub;
            for (size_t i = 0; i < 16; i++) four[i] = (uint8_t)subs[4 * q + i / 4];
            sub = vld1q_u8(four);
            for (size_t u = 0; u < 4; u++) {
                const uint8x16_t bytes = vld1q_u8(w + 64 * u + 16 * q), eight = vdupq_n_u8(8);
                const uint32x4_t w0 =
                    vreinterpretq_u32_u8(vmulq_u8(vsubq_u8(vandq_u8(bytes, vdupq_n_u8(15)), eight), sub));
                const uint32x4_t w1 = vreinterpretq_u32_u8(vmulq_u8(vsubq_u8(vshrq_n_u8(bytes, 4), eight), sub));
                vst1q_s8(panel + 128 * u + 32 * q, vreinterpretq_s8_u32(vzip1q_u32(w0, w1)));
                vst1q_s8(panel + 128 * u + 32 * q + 16, vreinterpretq_s8_u32(vzip2q_u32(w0, w1)));
            }
        }
}

/* Add the products of 8 rows and 8 outputs, half a panel, to sum[8][16]. */
MOE_I8MM MOE_INLINE void moe_tile_i8mm(const int8_t *codes, size_t code_bytes, const int8_t *panel, size_t cols,
                                       int32_t *sum) {
    int32x4_t tile[4][4];
    for (size_t i = 0; i < 16; i++) tile[i / 4][i % 4] = vdupq_n_s32(0);
    for (size_t c = 0; c < cols; c += 16) {
        int8x16_t x[2][4];
        for (size_t p = 0; p < 4; p++) {
            const int64x2_t x0 = vreinterpretq_s64_s8(vld1q_s8(codes + 2 * p * code_bytes + c));
            const int64x2_t x1 = vreinterpretq_s64_s8(vld1q_s8(codes + (2 * p + 1) * code_bytes + c));
            x[0][p] = vreinterpretq_s8_s64(vzip1q_s64(x0, x1));
            x[1][p] = vreinterpretq_s8_s64(vzip2q_s64(x0, x1));
        }
        for (size_t h = 0; h < 2; h++)
            for (size_t i = 0; i < 4; i++) {
                const int8x16_t weights = vld1q_s8(panel + c * 16 + 128 * h + 16 * i);
                for (size_t p = 0; p < 4; p++) MOE_SMMLA(tile[p][i], x[h][p], weights);
            }
    }
    for (size_t p = 0; p < 4; p++)
        for (size_t i = 0; i < 4; i += 2) { /* a register is two rows x two outputs */
            const int64x2_t a = vreinterpretq_s64_s32(tile[p][i]), b = vreinterpretq_s64_s32(tile[p][i + 1]);
            int32_t *s0 = sum + 32 * p + 2 * i, *s1 = s0 + 16;
            vst1q_s32(s0, vaddq_s32(vld1q_s32(s0), vreinterpretq_s32_s64(vzip1q_s64(a, b))));
            vst1q_s32(s1, vaddq_s32(vld1q_s32(s1), vreinterpretq_s32_s64(vzip2q_s64(a, b))));
        }
}

/* Multiply a block by `rows` input rows, a multiple of 8 up to MOE_PANEL_ROWS. */
MOE_I8MM static void moe_block_i8mm(const moe_linear *l, size_t row, size_t rows, size_t block) {
    const moe_matrix *m = l->w;
    const size_t code_bytes = moe_code_bytes(m->cols);
    int8_t panel[MOE_PANEL_COLS * 16];
    int32_t sum[MOE_PANEL_ROWS * 16];
    memset(sum, 0, rows * 16 * sizeof *sum);
    for (size_t col = 0; col < m->cols_padded; col += MOE_PANEL_COLS) {
        const size_t cols = moe_min(MOE_PANEL_COLS, m->cols_padded - col);
        if (m->bits == 8) moe_panel_q8(m, block, col, cols, panel);
        else moe_panel_q4(m, block, col, cols, panel);
        for (size_t r = 0; r < rows; r += 8) {
            const int8_t *codes = l->codes + (row + r) * code_bytes + col;
            moe_tile_i8mm(codes, code_bytes, panel, cols, sum + 16 * r);
            moe_tile_i8mm(codes, code_bytes, panel + 64, cols, sum + 16 * r + 8);
        }
    }
    moe_finish_sums(l, row, block, rows, sum, moe_finish_neon);
}

/* Compute a quantised linear: groups of 8 rows with smmla, up to 7 remaining rows with sdot. */
static void moe_quantised_i8mm(const moe_linear *l, size_t row0, size_t row1, size_t block0, size_t block1) {
    const size_t rest = row1 - (row1 - row0) % 8;
    for (size_t block = block0; block < block1; block++)
        for (size_t r = row0; r < rest; r += MOE_PANEL_ROWS)
            moe_block_i8mm(l, r, moe_min(MOE_PANEL_ROWS, rest - r), block);
    if (rest < row1) moe_quantised_dotprod(l, rest, row1, block0, block1);
}
MOE_LINEAR_OF(i8mm, neon, Q4, moe_linear_blocks(l, row0, row1, block0, block1, moe_quantised_i8mm))

static int moe_neon_available(void) { return 1; }

#if defined(__APPLE__)
static int moe_sysctl_flag(const char *name) {
    int flag = 0;
    size_t size = sizeof flag;
    return sysctlbyname(name, &flag, &size, NULL, 0) == 0 && flag;
}
#define MOE_HAS(word, bit, name) moe_sysctl_flag("hw.optional.arm." name)
#else
#define MOE_HAS(word, bit, name) ((getauxval(word) & (bit)) != 0)
#endif
static int moe_dotprod_available(void) { return MOE_HAS(AT_HWCAP, HWCAP_ASIMDDP, "FEAT_DotProd"); }
static int moe_i8mm_available(void) { return moe_dotprod_available() && MOE_HAS(AT_HWCAP2, HWCAP2_I8MM, "FEAT_I8MM"); }

MOE_UNUSED static const moe_kernels moe_kernels_neon = { MOE_KERNELS_OF(neon, moe_linear_neon, neon) };
MOE_UNUSED static const moe_kernels moe_kernels_dotprod = { MOE_KERNELS_OF(dotprod, moe_linear_dotprod, neon) };
MOE_UNUSED static const moe_kernels moe_kernels_i8mm = { MOE_KERNELS_OF(i8mm, moe_linear_i8mm, neon) };
#endif /* MOE_ARM */

/* ==== 16. Kernels: WebAssembly ================================================================================
 * 128-bit SIMD of WebAssembly, if the compiler has -msimd128. Invariant: four registers hold the 16 lanes; tails
 * are copied to a zeroed buffer first. */

#if MOE_SIMD128

/* ---- The 16 lanes: four registers ---- */

typedef v128_t moe_register_simd128;

#define moe_register_of_simd128 wasm_f32x4_splat
#define moe_register_load_simd128 wasm_v128_load
#define moe_register_store_simd128 wasm_v128_store
#define moe_register_math_simd128(op) wasm_f32x4_##op
#define moe_register_and_simd128 wasm_v128_and
#define moe_register_or_simd128 wasm_v128_or
#define moe_register_xor_simd128 wasm_v128_xor
#define moe_register_max_bits_simd128 wasm_i32x4_max
#define moe_register_max_simd128(a, b) wasm_f32x4_pmax(b, a) /* a > b ? a : b */
#define moe_register_min_simd128(a, b) wasm_f32x4_pmin(b, a)
#define moe_register_of_ints_simd128(x) wasm_f32x4_convert_i32x4(wasm_v128_load(x))
/* Like moe_f16_to_f32. */
MOE_INLINE v128_t moe_register_halves_simd128(moe_type type, const uint16_t *x) {
    const v128_t bits = wasm_i32x4_shl(wasm_u32x4_load16x4(x), 16);
    const v128_t magnitude = wasm_u32x4_shr(wasm_v128_and(bits, wasm_i32x4_splat(0x7fff0000)), 3);
    const v128_t number = wasm_f32x4_mul(magnitude, wasm_f32x4_splat(0x1p112f));
    const v128_t broken = wasm_v128_and(wasm_i32x4_ge(magnitude, wasm_i32x4_splat(0x0f800000)),
                                        wasm_v128_or(magnitude, wasm_i32x4_splat(0x7f800000)));
    if (type == MOE_TYPE_BF16) return bits;
    return wasm_v128_or(wasm_v128_or(number, broken), wasm_v128_and(bits, wasm_f32x4_splat(-0.0f)));
}
MOE_INLINE v128_t moe_register_scaled_simd128(v128_t x, v128_t y, v128_t t) {
    const v128_t power = wasm_i32x4_add(wasm_i32x4_shl(t, 23), wasm_i32x4_splat(127 << 23));
    return wasm_v128_andnot(wasm_f32x4_mul(y, power), wasm_f32x4_lt(x, wasm_f32x4_splat(MOE_EXP_LOW)));
}
MOE_INLINE float moe_register_join_simd128(v128_t v) {
    const v128_t two = wasm_f32x4_add(v, wasm_i32x4_shuffle(v, v, 2, 3, 0, 1));
    return wasm_f32x4_extract_lane(two, 0) + wasm_f32x4_extract_lane(two, 1);
}
MOE_INLINE float moe_register_largest_bits_simd128(v128_t v) {
    const v128_t two = wasm_i32x4_max(v, wasm_i32x4_shuffle(v, v, 2, 3, 0, 1));
    return wasm_f32x4_extract_lane(wasm_i32x4_max(two, wasm_i32x4_shuffle(two, two, 1, 0, 3, 2)), 0);
}
/* Rounds like moe_round: truncation takes eight instructions on x86. */
MOE_INLINE void moe_register_codes_simd128(const v128_t v[4], int8_t *q) {
    const v128_t magic = wasm_f32x4_splat(MOE_ROUND_MAGIC);
    v128_t codes[4];
    MOE_UNROLL_FOR (size_t i = 0; i < 4; i++) codes[i] = wasm_i32x4_sub(wasm_f32x4_add(v[i], magic), magic);
    wasm_v128_store(q, wasm_i8x16_narrow_i16x8(wasm_i16x8_narrow_i32x4(codes[0], codes[1]),
                                               wasm_i16x8_narrow_i32x4(codes[2], codes[3])));
}
MOE_INLINE void moe_lanes_code_sums_simd128(const int8_t *q, int16_t sums[2]) {
    for (size_t i = 0; i < 2; i++, q += 32) {
        const v128_t pairs = wasm_i16x8_add(wasm_i16x8_extadd_pairwise_i8x16(wasm_v128_load(q)),
                                            wasm_i16x8_extadd_pairwise_i8x16(wasm_v128_load(q + 16)));
        v128_t four = wasm_i32x4_extadd_pairwise_i16x8(pairs);
        four = wasm_i32x4_add(four, wasm_i32x4_shuffle(four, four, 2, 3, 0, 1));
        sums[i] = (int16_t)(wasm_i32x4_extract_lane(four, 0) + wasm_i32x4_extract_lane(four, 1));
    }
}

#define MOE_ISA simd128
#define MOE_ISA_TARGET
#define MOE_ISA_REGISTERS 4
#define MOE_ISA_FETCH(type, w) (void)(w) /* there is no prefetch */
#include "moe.c"

/* ---- Quantised linears ---- */

/* Add the products of 4 columns of `rows` input rows and the outputs of `registers` registers of 16-bit weights. */
MOE_INLINE void moe_step_simd128(v128_t sum[4][8], const v128_t *w, const int8_t *x, size_t code_bytes,
                                 const size_t rows, const size_t registers) {
    MOE_UNROLL_FOR (size_t r = 0; r < rows; r++) {
        const v128_t four = wasm_i16x8_extend_low_i8x16(wasm_v128_load32_splat(x + r * code_bytes));
        MOE_UNROLL_FOR (size_t i = 0; i < registers; i++)
            sum[r][i] = wasm_i32x4_add(sum[r][i], wasm_i32x4_dot_i16x8(w[i], four));
    }
}

/* Sum a Q8 matrix for `rows` rows and 4 * quads outputs from 4 * quad on. A register holds two sums for each of two
 * outputs. V8 has 15 registers on x86, so rows * quads is at most 4. */
MOE_INLINE void moe_q8_sums_simd128(const moe_linear *l, size_t row, size_t block, size_t quad, const size_t rows,
                                    const size_t quads, int32_t *sums) {
    const size_t cols = l->w->cols_padded, code_bytes = moe_code_bytes(l->w->cols);
    const int8_t *w = (const int8_t *)l->w->data + block * 16 * cols + 16 * quad, *x = l->codes + row * code_bytes;
    v128_t sum[4][8], line[8];
    MOE_UNROLL_FOR (size_t r = 0; r < rows; r++)
        MOE_UNROLL_FOR (size_t i = 0; i < 2 * quads; i++) sum[r][i] = wasm_i32x4_splat(0);
    for (size_t k = 0; k < cols; k += 4, w += 64) {
        MOE_UNROLL_FOR (size_t i = 0; i < 2 * quads; i++) line[i] = wasm_i16x8_load8x8(w + 8 * i);
        moe_step_simd128(sum, line, x + k, code_bytes, rows, 2 * quads);
    }
    MOE_UNROLL_FOR (size_t i = 0; i < rows * quads; i++) {
        const v128_t low = sum[i / quads][i % quads * 2], high = sum[i / quads][i % quads * 2 + 1];
        wasm_v128_store(sums + i / quads * 16 + 4 * (quad + i % quads),
                        wasm_i32x4_add(wasm_i32x4_shuffle(low, high, 0, 2, 4, 6),
                                       wasm_i32x4_shuffle(low, high, 1, 3, 5, 7)));
    }
}

/* The same for Q4 and, with `mids`, for 64 columns of Q4M. The sum of half a group, 16 * 8 * 127 = 16256, fits 16 bits;
 * sums of groups may overflow if a file has extreme subs. */
MOE_INLINE void moe_q4_sums_simd128(const moe_linear *l, size_t row, size_t block, size_t quad, const size_t rows,
                                    const size_t quads, const int mids, int32_t *sums) {
    const size_t groups = l->w->cols_padded / MOE_Q4_GROUP, code_bytes = moe_code_bytes(l->w->cols);
    const int8_t *w = (const int8_t *)l->w->data + block * groups * 256 + 16 * quad, *x = l->codes + row * code_bytes;
    const int8_t *subs = l->w->subs + block * groups * 16 + 4 * quad, *x_sums = x + moe_sums_at(l);
    v128_t sum[4], zero = wasm_i32x4_splat(0);
    MOE_UNROLL_FOR (size_t i = 0; i < 4; i++) sum[i] = zero;
    for (size_t g = 0; g < groups; g++, subs += 16, x_sums += 2) {
        v128_t part[4][8], line[8];
        MOE_UNROLL_FOR (size_t r = 0; r < rows; r++)
            MOE_UNROLL_FOR (size_t i = 0; i < 2 * quads; i++) part[r][i] = zero;
        for (size_t half = 0; half < 8; half++, x += 4, w += half % 2 ? 0 : 64) { /* of a line of 8 columns */
            MOE_UNROLL_FOR (size_t q = 0; q < quads; q++) {
                const v128_t bytes = wasm_v128_load(w + 16 * q), fifteen = wasm_i8x16_splat(15);
                const v128_t nibbles = half % 2 ? wasm_u8x16_shr(bytes, 4) : wasm_v128_and(bytes, fifteen);
                const v128_t codes = wasm_i8x16_sub(nibbles, wasm_i8x16_splat(8));
                line[2 * q] = wasm_i16x8_extend_low_i8x16(codes);
                line[2 * q + 1] = wasm_i16x8_extend_high_i8x16(codes);
            }
            moe_step_simd128(part, line, x, code_bytes, rows, 2 * quads);
        }
        MOE_UNROLL_FOR (size_t i = 0; i < rows * quads; i++) {
            const size_t r = i / quads, q = i % quads;
            const v128_t four = wasm_v128_load32_zero(subs + 4 * q);
            const v128_t two = wasm_i8x16_shuffle(four, zero, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4);
            const v128_t sub = wasm_i16x8_extend_low_i8x16(two);
            const v128_t halves = wasm_i16x8_narrow_i32x4(part[r][2 * q], part[r][2 * q + 1]);
            sum[i] = wasm_i32x4_add(sum[i], wasm_i32x4_dot_i16x8(halves, sub));
            if (mids) {
                const v128_t mid = wasm_i8x16_shuffle(wasm_v128_load32_zero(subs + 32 + 4 * q), zero, 0, 4, 1, 4, 2, 4,
                                                      3, 4, 4, 4, 4, 4, 4, 4, 4, 4);
                const v128_t x_sum = wasm_i16x8_splat((int16_t)moe_code_sum(x_sums + r * code_bytes));
                sum[i] = wasm_i32x4_add(sum[i], wasm_i32x4_dot_i16x8(wasm_i16x8_extend_low_i8x16(mid), x_sum));
            }
        }
    }
    MOE_UNROLL_FOR (size_t i = 0; i < rows * quads; i++)
        wasm_v128_store(sums + i / quads * 16 + 4 * (quad + i % quads), sum[i]);
}

/* Compute a block of 16 outputs in tiles of `rows` by 16 / rows outputs. */
#define MOE_ROWS_SIMD128(n)                                                                    \
    case n:                                                                                    \
        for (size_t quad = 0; quad < 4; quad += 4 / (n))                                       \
            if (l->w->bits == 8) moe_q8_sums_simd128(l, r, block, quad, n, 4 / (n), sums);     \
            else if (l->w->parts) moe_q4_sums_simd128(l, r, block, quad, n, 4 / (n), 1, sums); \
            else moe_q4_sums_simd128(l, r, block, quad, n, 4 / (n), 0, sums);                  \
        break;

/* Compute a quantised linear. Rows are the inner loop, so a block of weights remains in the first-level cache. */
static void moe_quantised_simd128(const moe_linear *l, size_t row0, size_t row1, size_t block0, size_t block1) {
    int32_t sums[4 * 16];
    for (size_t block = block0; block < block1; block++)
        for (size_t r = row0, rows; r < row1; r += rows) {
            rows = row1 - r >= 4 ? 4 : row1 - r >= 2 ? 2 : 1;
            switch (rows) {
                MOE_ROWS_SIMD128(1)
                MOE_ROWS_SIMD128(2)
                MOE_ROWS_SIMD128(4)
            }
            moe_finish_sums(l, r, block, rows, sums, moe_finish_simd128);
        }
}
MOE_LINEAR_OF(simd128, simd128, Q4M, moe_linear_blocks(l, row0, row1, block0, block1, moe_quantised_simd128))

static int moe_simd128_available(void) { return 1; }
MOE_UNUSED static const moe_kernels moe_kernels_simd128 = { MOE_KERNELS_OF(simd128, moe_linear_simd128, simd128) };
#endif /* MOE_SIMD128 */

/* ==== 17. Dispatch ============================================================================================
 * The choice of an instruction set. Invariant: the choice is made once per session and affects only speed. */

#if defined(MOE_ONLY_ISA)
#define MOE_ISAS_OF(X, isa) X(portable) X(isa)
#define MOE_ISAS(X) MOE_ISAS_OF(X, MOE_ONLY_ISA)
#elif MOE_AMX
#define MOE_ISAS(X) X(portable) X(avx2) X(avxvnni) X(avx512vnni) X(amx) /* worst first */
#elif MOE_X86
#define MOE_ISAS(X) X(portable) X(avx2) X(avxvnni) X(avx512vnni)
#elif MOE_ARM
#define MOE_ISAS(X) X(portable) X(neon) X(dotprod) X(i8mm)
#elif MOE_SIMD128
#define MOE_ISAS(X) X(portable) X(simd128)
#else
#define MOE_ISAS(X) X(portable)
#endif
#define MOE_ISA_ROW(isa) &moe_kernels_##isa,
#define MOE_ISA_WORD(isa) " " #isa
static const moe_kernels *const moe_isas[] = { MOE_ISAS(MOE_ISA_ROW) };

const char *moe_isa_names(void) { return &MOE_ISAS(MOE_ISA_WORD)[1]; }

int moe_isa_available(const char *name) {
    for (size_t i = 0; i < MOE_COUNT(moe_isas); i++)
        if (strcmp(moe_isas[i]->name, name) == 0) return moe_isas[i]->available();
    return 0;
}

/* Return the kernels `isa` or, if the first-level cache of `l1` bytes (0 if unknown) is small, their replacement. */
static const moe_kernels *moe_kernels_for(const moe_kernels *isa, size_t l1) {
    return isa->small && l1 && l1 <= MOE_SMALL_L1 ? isa->small : isa;
}

/* Find the kernels called `name`; NULL, "" and "auto" select the best kernels that this machine can run. */
static moe_status moe_choose_kernels(const char *name, const moe_kernels **out, moe_error *error) {
    int automatic = !name || !*name || strcmp(name, "auto") == 0;
    for (size_t i = MOE_COUNT(moe_isas); i-- > 0;) {
        const moe_kernels *isa = moe_isas[i];
        if (!automatic && strcmp(isa->name, name) != 0) continue;
        if (isa->available()) {
            *out = moe_kernels_for(isa, moe_l1_bytes());
            return MOE_OK;
        }
        if (!automatic)
            MOE_FAIL(UNSUPPORTED, "isa", "this machine cannot run the '%s' kernels; use 'auto' or 'portable'", name);
    }
    MOE_FAIL(ARGUMENT, "isa", "unknown kernels '%s'; available: %s", name, moe_isa_names());
}

/* ==== 18. Threads =============================================================================================
 * The worker threads of a session. Invariant: threads claim the tasks of a job one by one from an atomic word
 * (generation, tasks left), so a worker that wakes up late finds no task, and the caller does not wait for this worker.
 * A cancelled session stops after the current task. */

typedef void (*moe_task_fn)(void *arg, size_t task, size_t thread);

enum { MOE_SPINS = 4000 }; /* spins before a worker sleeps: about 40 us, the time between two small jobs */

typedef struct moe_pool {
    pthread_t threads[MOE_MAX_THREADS];
    size_t count; /* threads, including the caller's */
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    atomic_uint_least64_t claim; /* generation << 32 | tasks left */
    atomic_size_t finished;
    atomic_size_t sleepers;
    atomic_int stop;
    atomic_int cancelled; /* 1 to skip the remaining tasks; their outputs are then invalid */
    atomic_size_t next_id;
    moe_task_fn fn; /* `fn`, `arg` and `tasks` do not change while a task of the generation is running */
    void *arg;
    size_t tasks;
    int locks; /* 1 if `mutex` and `wake` are initialised */
} moe_pool;

static int moe_pool_cancelled(const moe_pool *pool) {
    return atomic_load_explicit(&pool->cancelled, memory_order_relaxed);
}

static void moe_pool_work(moe_pool *pool, uint64_t generation, size_t thread) {
    uint_least64_t word = atomic_load_explicit(&pool->claim, memory_order_acquire);
    while (word >> 32 == generation && (word & 0xffffffffu)) {
        if (atomic_compare_exchange_weak(&pool->claim, &word, word - 1)) {
            if (!moe_pool_cancelled(pool)) pool->fn(pool->arg, pool->tasks - (size_t)(word & 0xffffffffu), thread);
            atomic_fetch_add(&pool->finished, 1);
            word = atomic_load_explicit(&pool->claim, memory_order_acquire);
        }
    }
}

static void *moe_pool_thread(void *user) {
    moe_pool *pool = user;
    const size_t thread = atomic_fetch_add(&pool->next_id, 1);
    uint64_t seen = 0;
    while (!atomic_load(&pool->stop)) {
        uint64_t word = atomic_load(&pool->claim);
        for (int spin = 0; spin < MOE_SPINS && word >> 32 == seen; spin++) {
            moe_pause();
            word = atomic_load(&pool->claim);
        }
        if (word >> 32 == seen) {
            pthread_mutex_lock(&pool->mutex);
            atomic_fetch_add(&pool->sleepers, 1);
            while ((word = atomic_load(&pool->claim)) >> 32 == seen && !atomic_load(&pool->stop))
                pthread_cond_wait(&pool->wake, &pool->mutex);
            atomic_fetch_sub(&pool->sleepers, 1);
            pthread_mutex_unlock(&pool->mutex);
        }
        seen = word >> 32;
        moe_pool_work(pool, seen, thread);
    }
    return NULL;
}

/* Run fn(arg, task, thread) for every task and wait for all tasks. Only the session's thread may call this. */
static void moe_pool_run(moe_pool *pool, size_t tasks, moe_task_fn fn, void *arg) {
    if (pool->count <= 1 || tasks <= 1) {
        for (size_t i = 0; i < tasks && !moe_pool_cancelled(pool); i++) fn(arg, i, 0);
        return;
    }
    pool->fn = fn;
    pool->arg = arg;
    pool->tasks = tasks;
    atomic_store(&pool->finished, 0);
    uint64_t generation = ((atomic_load(&pool->claim) >> 32) + 1) & 0xffffffffu;
    atomic_store(&pool->claim, (generation << 32) | (uint64_t)tasks);
    if (atomic_load(&pool->sleepers)) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->mutex);
    }
    moe_pool_work(pool, generation, 0);
    for (unsigned spin = 0; atomic_load(&pool->finished) < tasks; spin++)
        if (spin < MOE_SPINS) moe_pause();
        else sched_yield();
}

static void moe_pool_free(moe_pool *pool, size_t started) {
    atomic_store(&pool->stop, 1);
    if (!pool->locks) return;
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
    for (size_t i = 1; i < started; i++) pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->mutex);
    pool->locks = 0;
}

/* Start the threads of a pool. *pool must be zeroed and must not move. */
static moe_status moe_pool_start(moe_pool *pool, size_t threads, moe_error *error) {
    int code;
    if (pthread_mutex_init(&pool->mutex, NULL)) MOE_FAIL(MEMORY, "threads", "cannot create a mutex");
    if (pthread_cond_init(&pool->wake, NULL)) {
        pthread_mutex_destroy(&pool->mutex);
        MOE_FAIL(MEMORY, "threads", "cannot create a condition variable");
    }
    pool->locks = 1;
    pool->count = threads;
    atomic_store(&pool->next_id, 1);
    for (size_t i = 1; i < threads; i++)
        if ((code = pthread_create(&pool->threads[i], NULL, moe_pool_thread, pool)) != 0) {
            moe_pool_free(pool, i);
            MOE_FAIL(MEMORY, "threads", "cannot start thread %zu of %zu: %s", i + 1, threads, strerror(code));
        }
    return MOE_OK;
}

/* ==== 19. Model file: reader ==================================================================================
 * The parser of model files. Invariant: after moe_file_parse every pointer that this section returns points into the
 * mapping or the copy of the header and is aligned for its type, and all products of counts are checked for overflow.
 *
 * The file format, versions 1 to 3, little-endian (version 3: some tensor is Q3 or Q2):
 *   moe_header
 *   metadata entries, each padded to 8: u32 kind, u32 key length, key, pad to 8, then by kind
 *     INT i64 | REAL f64 | TEXT, BYTES u64 length, bytes | INTS, REALS u64 n, n values | TEXTS u64 n, n times (u64
 *     length, bytes, pad to 8)
 *   tensor directory entries, each padded to 8: u32 type, u32 layout (0 matrix or vector, 1 experts, 2 gated experts),
 *     u32 dimensions, u32 name length, u64 dims[], u64 offset, u64 bytes, u32 CRC-32, u32 zero, name. In version 2
 *     an entry of experts continues with padding to 8 and the u32 CRC-32s of its slabs; the first CRC-32 covers these
 *   tensors at multiples of 64, experts at multiples of 4096, in directory order without overlap. Fewer than 4096 zero
 * bytes precede each tensor; the file ends with the last tensor. An experts tensor [E, hidden, width] consists of E
 * slabs of equal stride (a multiple of 4096), so an expert can be read at once. A slab contains the up matrix [hidden,
 * width], padded to 64, and the down matrix [width, hidden]. In layout 2 experts are gated: the first matrix is [2
 * hidden, width], the rows of the gate followed by those of up. */

enum { MOE_ALIGN = 64, MOE_SLAB_ALIGN = 4096 };
static const char moe_magic[8] = { 'M', 'O', 'E', 'M', 'O', 'D', 'E', 'L' };

typedef struct moe_header {
    char magic[8];
    uint32_t version, checksum; /* CRC-32 of bytes [16, header_bytes) */
    uint64_t header_bytes, file_bytes;
    uint32_t n_meta, n_tensors;
    uint64_t reserved[3]; /* 0 */
} moe_header;
_Static_assert(sizeof(moe_header) == 64, "the header in memory equals the header in the file");

typedef struct moe_meta {
    moe_span key;
    moe_meta_kind kind;
    size_t count;     /* list elements; 1 for a scalar */
    const char *data; /* first value; for texts and BYTES, its length, which precedes it */
    uint32_t *texts;  /* [count] offsets of the lengths from `data` for TEXTS; else NULL */
    moe_span entry;   /* the whole entry in the file */
} moe_meta;

/* The source of an open model. */
typedef struct moe_origin {
    const char *name;       /* name for messages, or NULL */
    int fd, shared;         /* descriptor of a mapped or streamed file, else -1; 1 if the caller has a copy of it */
    uint64_t base;          /* offset of the model in the file */
    moe_file_status opened; /* status of the file when the model was opened */
    void *mapping;          /* [mapped] memory to unmap, or NULL */
    size_t mapped;
} moe_origin;

typedef struct moe_file {
    moe_origin origin;
    const char *data;
    size_t bytes, held; /* size of the file; bytes in memory, which exclude the experts of a streamed file */
    int fd, direct;     /* descriptor of a streamed file or -1; 1 if reads of slabs bypass the page cache */
    uint32_t version;
    moe_layout block; /* memory of the header and of arrays sized by it */
    char *header;     /* [header_bytes] copy that remains valid even if another process writes to the file */
    size_t header_bytes;
    moe_meta *meta;
    size_t n_meta;
    moe_tensor_info *tensors;
    size_t n_tensors;
    const moe_span **keys, **names; /* [n_meta], [n_tensors] sorted names of metadata and tensors */
    size_t *moved;                  /* [n_tensors] number of preceding bytes of the file that are not in memory */
    /* A piece is the unit of verification: a tensor, or a slab if the file has checksums of slabs. */
    size_t *pieces; /* [n_tensors] first piece of each tensor */
    size_t n_pieces;
    atomic_uchar *checked; /* [n_pieces] 1 if verified; NULL if checksums are never verified */
} moe_file;

/* ---- Checksums ----
 * CRC-32 (IEEE) without the inversions before and after: portable code and versions for processors with carry-less
 * multiplication or a CRC instruction, which are ten times as fast and allow verifying a model at every opening. */

static uint32_t moe_crc_bits(uint32_t crc, const uint8_t *p, size_t bytes) {
    for (; bytes; bytes--) {
        crc ^= *p++;
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (0xedb88320u & (0u - (crc & 1u)));
    }
    return crc;
}

static uint32_t moe_crc_portable(uint32_t crc, const uint8_t *p, size_t bytes) {
    uint32_t table[256];
    if (bytes < 1024) return moe_crc_bits(crc, p, bytes);
    for (uint32_t b = 0; b < 256; b++) table[b] = moe_crc_bits(b, (const uint8_t[1]){ 0 }, 1);
    for (; bytes; bytes--) crc = crc >> 8 ^ table[(crc ^ *p++) & 255u];
    return crc;
}

#if MOE_X86
/* Multiply both halves of `a` by x^n, which moves them to the position of b, and add b. `by` contains x^(n + 32) and
 * x^(n - 32) modulo the polynomial, with reversed bits. */
__attribute__((target("pclmul"))) MOE_INLINE __m128i moe_crc_fold(__m128i a, __m128i by, __m128i b) {
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(a, by, 0x00), _mm_clmulepi64_si128(a, by, 0x11)), b);
}

/* Compute the CRC of at least 64 bytes: fold 64 bytes per step into 16 bytes with the same CRC (Gopal et al. 2009,
 * "Fast CRC computation for generic polynomials using PCLMULQDQ"). */
__attribute__((target("pclmul"))) static uint32_t moe_crc_clmul(uint32_t crc, const uint8_t *p, size_t bytes) {
    const __m128i by_64 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by_16 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    uint8_t last[16];
    __m128i x[4];
    for (int i = 0; i < 4; i++) x[i] = _mm_loadu_si128((const void *)(p + 16 * i));
    x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int)crc));
    for (p += 64, bytes -= 64; bytes >= 64; p += 64, bytes -= 64)
        for (int i = 0; i < 4; i++) x[i] = moe_crc_fold(x[i], by_64, _mm_loadu_si128((const void *)(p + 16 * i)));
    for (int i = 1; i < 4; i++) x[0] = moe_crc_fold(x[0], by_16, x[i]);
    _mm_storeu_si128((void *)last, x[0]);
    return moe_crc_bits(moe_crc_bits(0, last, sizeof last), p, bytes);
}
#endif

#if MOE_ARM
static uint32_t moe_crc_arm(uint32_t crc, const uint8_t *p, size_t bytes) {
    for (; bytes >= 8; bytes -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        __asm__(".arch_extension crc\n\tcrc32x %w0, %w0, %x1" : "+r"(crc) : "r"(word));
    }
    return moe_crc_bits(crc, p, bytes);
}
#endif

/* Return the CRC-32 (IEEE) of data[bytes] appended to earlier data with the CRC-32 `crc` (0 if empty). */
static uint32_t moe_crc32(uint32_t crc, const void *data, size_t bytes) {
#if MOE_X86
    if (bytes >= 64 && __builtin_cpu_supports("pclmul")) return ~moe_crc_clmul(~crc, data, bytes);
#elif MOE_ARM
#if defined(__linux__)
    if (getauxval(AT_HWCAP) & HWCAP_CRC32) /* all Macs support CRC32 */
#endif
        return ~moe_crc_arm(~crc, data, bytes);
#endif
    return ~moe_crc_portable(~crc, data, bytes);
}

/* ---- Reading ---- */

/* The unread part [at, end) of a buffer. After a failure all reads return 0. */
typedef struct moe_cursor {
    const char *data;
    size_t at, end;
    int failed;
} moe_cursor;

static const char *moe_take(moe_cursor *c, uint64_t bytes) {
    const char *p = c->data + c->at;
    if (c->failed || bytes > c->end - c->at) {
        c->failed = 1;
        return NULL;
    }
    c->at += (size_t)bytes;
    return p;
}

static uint64_t moe_take_number(moe_cursor *c, size_t bytes) {
    const char *p = moe_take(c, bytes);
    uint64_t v = 0;
    if (p) memcpy(&v, p, bytes);
    return v;
}

static uint32_t moe_take_u32(moe_cursor *c) { return (uint32_t)moe_take_number(c, 4); }
static uint64_t moe_take_u64(moe_cursor *c) { return moe_take_number(c, 8); }

static moe_span moe_take_span(moe_cursor *c, uint64_t bytes) {
    const char *p = moe_take(c, bytes);
    return (moe_span){ p, p ? (size_t)bytes : 0 };
}

static void moe_take_padding(moe_cursor *c) {
    const char *p = moe_take(c, (8 - c->at % 8) % 8);
    for (size_t i = c->at; p && p < c->data + i; p++)
        if (*p) c->failed = 1;
}

static int moe_span_is(moe_span s, const char *text) {
    return s.length == strlen(text) && memcmp(s.data, text, s.length) == 0;
}

static int moe_name_valid(moe_span s) {
    for (size_t i = 0; i < s.length; i++) {
        char c = s.data[i];
        if (!((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-')) return 0;
    }
    return s.length > 0 && s.length < 256;
}

static int moe_utf8_valid(const char *text, size_t length) {
    static const uint32_t least[] = { 0, 0x80, 0x800, 0x10000 };
    const uint8_t *p = (const uint8_t *)text, *end = p + length;
    while (p < end) {
        uint32_t point = *p++;
        const int more = (point >= 0xc0) + (point >= 0xe0) + (point >= 0xf0);
        if ((point >= 0x80 && !more) || point >= 0xf8 || end - p < more) return 0;
        if (more) point &= 0x3fu >> more;
        for (int i = 0; i < more; i++, p++) {
            if ((*p & 0xc0u) != 0x80u) return 0;
            point = point << 6 | (*p & 0x3fu);
        }
        if (point < least[more] || point > 0x10ffffu || (point >= 0xd800u && point < 0xe000u)) return 0;
    }
    return 1;
}

static void moe_take_text(moe_cursor *c) {
    const moe_span text = moe_take_span(c, moe_take_u64(c));
    if (!c->failed && !moe_utf8_valid(text.data, text.length)) c->failed = 1;
    moe_take_padding(c);
}

static moe_status moe_parse_meta(moe_cursor *c, moe_meta *m, const moe_allocator *a, moe_error *error) {
    const size_t begin = c->at;
    char where[48];
    uint64_t n = 1;
    snprintf(where, sizeof where, "offset %zu", begin);
    m->kind = (moe_meta_kind)moe_take_u32(c);
    m->key = moe_take_span(c, moe_take_u32(c));
    moe_take_padding(c);
    if (c->failed || !moe_name_valid(m->key) || m->kind < MOE_META_INT || m->kind > MOE_META_TEXTS)
        MOE_FAIL(FORMAT, where, "invalid metadata entry");
    if (m->kind >= MOE_META_INTS) n = moe_take_u64(c);
    m->count = (size_t)n;
    m->data = c->data + c->at;
    if (m->kind == MOE_META_TEXT) {
        moe_take_text(c);
    } else if (m->kind == MOE_META_BYTES) {
        moe_take(c, moe_take_u64(c));
    } else if (m->kind == MOE_META_TEXTS) {
        if (n > MOE_MAX_TEXTS) c->failed = 1;
        else if (!(m->texts = moe_allocate_zeroed(a, m->count * sizeof *m->texts)))
            MOE_FAIL(MEMORY, where, "out of memory for %zu texts", m->count);
        for (size_t i = 0; i < m->count && !c->failed; i++) {
            m->texts[i] = (uint32_t)(c->data + c->at - m->data);
            moe_take_text(c);
        }
    } else {
        moe_take(c, n > UINT64_MAX / 8 ? UINT64_MAX : n * 8);
    }
    moe_take_padding(c);
    if (c->failed)
        MOE_FAIL(FORMAT, where, "metadata '%.*s' exceeds the header or is not valid UTF-8", (int)m->key.length,
                 m->key.data);
    m->entry = (moe_span){ c->data + begin, c->at - begin };
    return MOE_OK;
}

/* Return the size of an expert's slab in bytes and set *down to the offset of its down matrix; return 0 on overflow. */
static uint64_t moe_slab_bytes(moe_type type, int layout, uint64_t hidden, uint64_t width, uint64_t *down) {
    uint64_t up = moe_matrix_bytes(type, (uint64_t)layout * hidden, width), low = moe_matrix_bytes(type, width, hidden);
    if (!up || !low || up > UINT64_MAX / 4 || low > UINT64_MAX / 4) return 0;
    *down = (up + MOE_ALIGN - 1) / MOE_ALIGN * MOE_ALIGN;
    return (*down + low + MOE_SLAB_ALIGN - 1) / MOE_SLAB_ALIGN * MOE_SLAB_ALIGN;
}

/* Return the matrix of a tensor stored at `data`; for experts, the up or (if `down` is 1) down matrix of an expert. */
static moe_matrix moe_tensor_matrix(const moe_tensor_info *t, const char *data, size_t expert, int down) {
    const size_t rows = t->n_dims > 1 ? (size_t)t->dims[t->n_dims - 2] : 1, cols = (size_t)t->dims[t->n_dims - 1];
    uint64_t below = 0;
    const size_t above = t->experts ? (size_t)t->experts * rows : rows;
    if (t->experts) data += expert * (size_t)moe_slab_bytes(t->type, t->experts, rows, cols, &below);
    return down ? moe_matrix_view(t->type, cols, rows, data + below) : moe_matrix_view(t->type, above, cols, data);
}

/* Return the size in bytes of a tensor, given its type and shape; 0 if the shape is invalid. */
static uint64_t moe_tensor_bytes(const moe_tensor_info *t) {
    uint64_t bytes, down;
    if (!t->experts) return moe_matrix_bytes(t->type, t->n_dims > 1 ? t->dims[0] : 1, t->dims[t->n_dims - 1]);
    bytes = moe_slab_bytes(t->type, t->experts, t->dims[1], t->dims[2], &down);
    return bytes && moe_multiply(bytes, t->dims[0], &bytes) ? bytes : 0;
}

/* Return the number of a tensor's experts, or of its slabs with checksums; 1 if the tensor has none. */
static size_t moe_experts_of(const moe_tensor_info *t) { return t->experts ? (size_t)t->dims[0] : 1; }
static size_t moe_pieces_of(const moe_tensor_info *t) { return t->slabs ? (size_t)t->dims[0] : 1; }

static moe_status moe_parse_tensor(moe_cursor *c, const moe_file *f, uint64_t *data_end, moe_tensor_info *t,
                                   moe_error *error) {
    char where[96];
    uint32_t layout, name_length, zero;
    snprintf(where, sizeof where, "offset %zu", c->at);
    t->type = (moe_type)moe_take_u32(c);
    layout = moe_take_u32(c);
    t->n_dims = moe_take_u32(c);
    name_length = moe_take_u32(c);
    if (c->failed || t->n_dims < 1 || t->n_dims > 3)
        MOE_FAIL(FORMAT, where, "invalid tensor entry: %u dimensions", t->n_dims);
    for (uint32_t i = 0; i < t->n_dims; i++) t->dims[i] = moe_take_u64(c);
    t->offset = moe_take_u64(c);
    t->bytes = moe_take_u64(c);
    t->checksum = moe_take_u32(c);
    zero = moe_take_u32(c);
    t->name = moe_take_span(c, name_length);
    moe_take_padding(c);
    if (c->failed || zero || !moe_name_valid(t->name))
        MOE_FAIL(FORMAT, where, "invalid tensor entry: invalid name or padding");
    snprintf(where, sizeof where, "tensor %.*s", (int)t->name.length, t->name.data);
    if (!moe_type_known((uint32_t)t->type)) MOE_FAIL(UNSUPPORTED, where, "unknown number format %u", t->type);
    t->experts = (int)layout;
    if (layout > 2 || (layout > 0) != (t->n_dims == 3) || (t->n_dims == 1 && t->type != MOE_TYPE_F32))
        MOE_FAIL(FORMAT, where, "invalid combination of layout %u, type %s and %u dimensions", layout,
                 moe_type_name(t->type), t->n_dims);
    t->parameters = 1 + layout; /* number of matrices, multiplied by the dimensions below */
    for (uint32_t i = 0; i < t->n_dims; i++)
        if (!t->dims[i] || t->dims[i] > INT32_MAX || !moe_multiply(t->parameters, t->dims[i], &t->parameters))
            MOE_FAIL(FORMAT, where, "dimension %u is out of range: %" PRIu64, i, t->dims[i]);
    if (moe_type_quantised(t->type) && (t->dims[1] > MOE_Q8_WIDEST || (t->experts && t->dims[2] > MOE_Q8_WIDEST)))
        MOE_FAIL(FORMAT, where, "rows are too long for %s: the limit is %d columns", moe_type_name(t->type),
                 MOE_Q8_WIDEST);
    if (moe_tensor_bytes(t) != t->bytes)
        MOE_FAIL(FORMAT, where, "%" PRIu64 " bytes, but the shape requires %" PRIu64, t->bytes, moe_tensor_bytes(t));
    if (t->offset % (t->experts ? MOE_SLAB_ALIGN : MOE_ALIGN) || t->offset < *data_end || t->offset > f->bytes ||
        t->bytes > f->bytes - t->offset)
        MOE_FAIL(FORMAT, where,
                 "offset %" PRIu64 ", %" PRIu64 " bytes: outside the file (%zu bytes), misaligned or overlapping",
                 t->offset, t->bytes, f->bytes);
    if (t->offset - *data_end >= MOE_SLAB_ALIGN)
        MOE_FAIL(FORMAT, where, "preceded by a gap of %" PRIu64 " bytes", t->offset - *data_end);
    for (uint64_t at = *data_end; at < t->offset && at < f->held; at++)
        if (f->data[at])
            MOE_FAIL(FORMAT, where, "nonzero byte at offset %" PRIu64 " in the preceding gap: damaged file", at);
    *data_end = t->offset + t->bytes;
    if (f->version == 1 || !t->experts) return MOE_OK;
    const size_t bytes = (size_t)t->dims[0] * sizeof *t->slabs;
    t->slabs = (const uint32_t *)(const void *)moe_take(c, bytes);
    moe_take_padding(c);
    if (c->failed || moe_crc32(0, t->slabs, bytes) != t->checksum)
        MOE_FAIL(FORMAT, where, "slab checksums are truncated or damaged");
    return MOE_OK;
}

static void moe_file_free(moe_file *f, const moe_allocator *a) {
    for (size_t i = 0; f->block.base && i < f->n_meta; i++)
        moe_release(a, f->meta[i].texts, f->meta[i].count * sizeof *f->meta[i].texts);
    moe_release(a, f->block.base, f->block.used);
    moe_release(a, f->checked, f->n_pieces * sizeof *f->checked);
}

static int moe_compare_spans(const void *a, const void *b) {
    const moe_span *x = *(const moe_span *const *)a, *y = *(const moe_span *const *)b;
    int order = memcmp(x->data, y->data, moe_min(x->length, y->length));
    return order ? order : (x->length > y->length) - (x->length < y->length);
}

/* Sort the names of `count` structs of `stride` bytes that start with a name; fail on duplicates. */
static moe_status moe_sort_names(const void *first, size_t count, size_t stride, const char *what, const moe_span **out,
                                 moe_error *error) {
    for (size_t i = 0; i < count; i++) out[i] = (const moe_span *)(const void *)((const char *)first + i * stride);
    if (count) qsort(out, count, sizeof *out, moe_compare_spans);
    for (size_t i = 1; i < count; i++)
        if (moe_compare_spans(&out[i - 1], &out[i]) == 0)
            MOE_FAIL(FORMAT, what, "duplicate name '%.*s'", (int)out[i]->length, out[i]->data);
    return MOE_OK;
}

/* Find a name in the output of moe_sort_names. Returns the struct that starts with the name; NULL if missing. */
static const void *moe_find_name(const moe_span *const *names, size_t count, const char *name) {
    const moe_span wanted = { name, strlen(name) }, *key = &wanted;
    const moe_span *const *found = count ? bsearch(&key, names, count, sizeof *names, moe_compare_spans) : NULL;
    return found ? *found : NULL;
}

static void moe_carve_file(moe_file *f, moe_layout *at) {
    f->header = moe_carve(at, f->header_bytes, 1);
    f->meta = moe_carve(at, f->n_meta, sizeof *f->meta);
    f->tensors = moe_carve(at, f->n_tensors, sizeof *f->tensors);
    f->keys = moe_carve(at, f->n_meta, sizeof *f->keys);
    f->names = moe_carve(at, f->n_tensors, sizeof *f->names);
    f->pieces = moe_carve(at, f->n_tensors, sizeof *f->pieces);
    f->moved = moe_carve(at, f->n_tensors, sizeof *f->moved);
}

static moe_status moe_parse_header(moe_file *f, const moe_allocator *a, moe_error *error) {
    const size_t bytes = f->bytes;
    moe_layout measured = { NULL, 0, 0 };
    moe_header h;
    if (bytes < sizeof h) MOE_FAIL(FORMAT, "offset 0", "only %zu bytes: not a model file, or truncated", bytes);
    memcpy(&h, f->data, sizeof h);
    if (memcmp(h.magic, moe_magic, sizeof moe_magic) != 0)
        MOE_FAIL(FORMAT, "offset 0", "not a moe model file: it does not start with MOEMODEL");
    if (h.version < 1 || h.version > MOE_FILE_VERSION)
        MOE_FAIL(UNSUPPORTED, "offset 8", "file version %u is not supported; this program reads 1 to %d", h.version,
                 MOE_FILE_VERSION);
    if (h.file_bytes != bytes)
        MOE_FAIL(FORMAT, "offset 24", "the file has %zu bytes instead of %" PRIu64 ": truncated or damaged", bytes,
                 h.file_bytes);
    if (h.header_bytes < sizeof h || h.header_bytes > bytes || h.header_bytes % 8)
        MOE_FAIL(FORMAT, "offset 16", "invalid header size %" PRIu64, h.header_bytes);
    if (h.header_bytes > moe_min(MOE_MAX_HEADER, f->held))
        MOE_FAIL(UNSUPPORTED, "offset 16", "header of %" PRIu64 " bytes is too large; the limit is %d", h.header_bytes,
                 MOE_MAX_HEADER);
    /* An entry has at least 24 bytes, so invalid counts cannot cause allocations much larger than the file. */
    if (moe_max(h.n_meta, h.n_tensors) > moe_min(MOE_MAX_ENTRIES, (size_t)h.header_bytes / 24))
        MOE_FAIL(FORMAT, "offset 32", "%u metadata entries and %u tensors do not fit the header", h.n_meta,
                 h.n_tensors);
    f->version = h.version;
    f->header_bytes = (size_t)h.header_bytes;
    f->n_meta = h.n_meta;
    f->n_tensors = h.n_tensors;
    moe_carve_file(f, &measured);
    f->block.base = moe_allocate_zeroed(a, measured.used);
    if (!f->block.base) MOE_FAIL(MEMORY, "header", "out of memory for a header of %zu bytes", f->header_bytes);
    moe_carve_file(f, &f->block);
    memcpy(f->header, &h, sizeof h);
    memcpy(f->header + sizeof h, f->data + sizeof h, f->header_bytes - sizeof h);
    if (moe_crc32(0, f->header + 16, f->header_bytes - 16) != h.checksum)
        MOE_FAIL(FORMAT, "offset 12", "wrong header checksum: the file is damaged");
    if (h.reserved[0] || h.reserved[1] || h.reserved[2])
        MOE_FAIL(UNSUPPORTED, "offset 40", "reserved header bytes are not zero");
    return MOE_OK;
}

/* Parse and check everything in a file of `bytes` bytes except the numbers in tensors. data[held], the part in memory,
 * includes the header. The caller frees the file, even on failure. */
static moe_status moe_file_parse(moe_file *f, const void *data, size_t bytes, size_t held, const moe_allocator *a,
                                 moe_error *error) {
    *f = (moe_file){ .origin = f->origin, .data = data, .bytes = bytes, .held = held, .fd = -1 };
    MOE_TRY(moe_parse_header(f, a, error));
    moe_cursor c = { f->header, sizeof(moe_header), f->header_bytes, 0 };
    for (size_t i = 0; i < f->n_meta; i++) MOE_TRY(moe_parse_meta(&c, &f->meta[i], a, error));
    uint64_t data_end = f->header_bytes;
    int low = 0;
    for (size_t i = 0; i < f->n_tensors; i++) {
        MOE_TRY(moe_parse_tensor(&c, f, &data_end, &f->tensors[i], error));
        f->pieces[i] = f->n_pieces;
        f->n_pieces += moe_pieces_of(&f->tensors[i]);
        low |= f->tensors[i].type > MOE_TYPE_Q8B;
    }
    if (low != (f->version == 3))
        MOE_FAIL(FORMAT, "offset 8", "file version %u does not match the number formats: damaged file", f->version);
    if (c.at != c.end) MOE_FAIL(FORMAT, "header", "%zu unexpected bytes after the tensor directory", c.end - c.at);
    if (data_end != f->bytes)
        MOE_FAIL(FORMAT, "end of file", "%" PRIu64 " unexpected bytes after the last tensor", f->bytes - data_end);
    MOE_TRY(moe_sort_names(f->meta, f->n_meta, sizeof *f->meta, "metadata", f->keys, error));
    return moe_sort_names(f->tensors, f->n_tensors, sizeof *f->tensors, "tensor directory", f->names, error);
}

/* Prefix an error message with the model's name, unless it is already there. Omit the start of a long name. Returns the
 * status. */
static moe_status moe_named(const char *name, moe_status status, moe_error *error) {
    char message[sizeof error->message];
    const char *at = status && error && name ? strstr(error->message, name) : NULL;
    if (!status || !error || !name || (at && at[strlen(name)] == ':') || strncmp(error->message, "...", 3) == 0)
        return status;
    memcpy(message, error->message, sizeof message);
    const size_t length = strlen(name), room = sizeof message - moe_min(strlen(message), sizeof message - 64) - 6;
    const int n = snprintf(error->message, sizeof message, "%s%s: ", length > room ? "..." : "",
                           name + length - moe_min(length, room));
    snprintf(error->message + n, sizeof message - (size_t)n, "%s", message);
    return status;
}

/* Fail if another process has changed a mapped file: pages may be missing. Call before and after every use of them. */
static moe_status moe_check_unchanged(const moe_file *f, moe_error *error) {
    moe_file_status now;
    if (f->origin.fd < 0 || (moe_file_state(f->origin.fd, &now) && memcmp(&now, &f->origin.opened, sizeof now) == 0))
        return MOE_OK;
    moe_fail(error, MOE_ERROR_IO, "model",
             "the model file was modified or cut off while in use: reopen it, and replace models by renaming");
    return moe_named(f->origin.name, MOE_ERROR_IO, error);
}

static const char *moe_tensor_data(const moe_file *f, const moe_tensor_info *t) {
    return f->data + (t->offset - f->moved[t - f->tensors]);
}

/* Return the index of the first of n numbers that is not finite or is less than `least`; n if all are valid. The first
 * loop has no branches, because all numbers of a file are checked before its first translation. */
static size_t moe_find_broken(const float *v, size_t n, float least) {
    int fine = 1;
    for (size_t i = 0; i < n; i++) fine &= (v[i] >= least) & (v[i] <= FLT_MAX);
    size_t at = fine ? n : 0;
    while (at < n && v[at] >= least && v[at] <= FLT_MAX) at++;
    return at;
}

/* Return the first row with a scale or part that is not a finite number >= 0; the number of rows if all are valid. */
static size_t moe_broken_scale(const moe_matrix *m) {
    const size_t row = m->scales ? moe_find_broken(m->scales, m->rows, 0) : m->rows, blocks = m->cols_padded / 64;
    for (size_t i = 0; m->parts && i < moe_divide_up(row, 16) * blocks; i++)
        for (size_t r = 0; r < 16; r++) /* a valid part is finite and not negative */
            if ((uint8_t)m->parts[i * m->sides * 16 + 16 + r] >= 0x7c && i / blocks * 16 + r < row)
                return i / blocks * 16 + r;
    return row;
}

/* Verify the checksum of a piece stored at `data` and, for experts, the scales, which binding does not check. */
static moe_status moe_compare_piece(const moe_file *f, const moe_tensor_info *t, size_t piece, const char *data,
                                    moe_error *error) {
    const size_t bytes = (size_t)t->bytes / moe_pieces_of(t),
                 slabs = t->experts ? moe_experts_of(t) / moe_pieces_of(t) : 0;
    const int length = (int)moe_min(t->name.length, 80);
    char where[96], expert[32] = "";
    snprintf(where, sizeof where, "tensor %.*s", length, t->name.data);
    if (t->slabs) snprintf(expert, sizeof expert, "expert %zu of ", piece);
    if (moe_crc32(0, data, bytes) != (t->slabs ? t->slabs[piece] : t->checksum)) {
        moe_fail(error, MOE_ERROR_FORMAT, where, "checksum mismatch in %s%.*s: the file is damaged; download it again",
                 expert, length, t->name.data);
        return moe_named(f->origin.name, MOE_ERROR_FORMAT, error);
    }
    for (size_t i = piece * slabs; i < (piece + 1) * slabs; i++)
        for (int down = 0; down < 2; down++) {
            const moe_matrix m = moe_tensor_matrix(t, data, i - piece * slabs, down);
            if (moe_broken_scale(&m) == m.rows) continue;
            moe_fail(error, MOE_ERROR_FORMAT, where, "invalid scale in expert %zu of %.*s", i, length, t->name.data);
            return moe_named(f->origin.name, MOE_ERROR_FORMAT, error);
        }
    if (f->checked) atomic_store_explicit(&f->checked[f->pieces[t - f->tensors] + piece], 1, memory_order_relaxed);
    return MOE_OK;
}

static moe_status moe_compare_held(const moe_file *f, const moe_tensor_info *t, size_t piece, moe_error *error) {
    return moe_compare_piece(f, t, piece, moe_tensor_data(f, t) + piece * ((size_t)t->bytes / moe_pieces_of(t)), error);
}

/* A damaged piece found by a run of a graph. */
typedef struct moe_damage {
    atomic_size_t piece; /* index of the piece plus 1; 0 if none */
} moe_damage;

static int moe_piece_checked(const moe_file *f, const moe_tensor_info *t, size_t slab) {
    return f->checked && atomic_load_explicit(&f->checked[f->pieces[t - f->tensors] + slab], memory_order_relaxed);
}

/* Verify a piece in memory unless it has been verified before. Record damage in *damage unless that is NULL. */
static moe_status moe_check_piece(const moe_file *f, const moe_tensor_info *t, size_t piece, moe_damage *damage,
                                  moe_error *error) {
    const moe_status status = moe_piece_checked(f, t, piece) ? MOE_OK : moe_compare_held(f, t, piece, error);
    if (status && damage) atomic_store(&damage->piece, f->pieces[t - f->tensors] + piece + 1);
    return status;
}

static moe_status moe_check_tensor(const moe_file *f, const moe_tensor_info *t, moe_damage *damage, moe_error *error) {
    for (size_t i = 0; i < moe_pieces_of(t); i++) MOE_TRY(moe_check_piece(f, t, i, damage, error));
    return MOE_OK;
}

/* Return an error that describes the damaged piece found since the last call, or MOE_OK. */
static moe_status moe_report_damage(const moe_file *f, moe_damage *damage, moe_error *error) {
    const size_t found = atomic_exchange(&damage->piece, 0), piece = found - 1;
    const moe_tensor_info *t = f->tensors + f->n_tensors;
    if (!found) return MOE_OK;
    do t--;
    while (f->pieces[t - f->tensors] > piece);
    MOE_TRY(moe_compare_held(f, t, piece - f->pieces[t - f->tensors], error));
    MOE_FAIL(IO, "model", "the model file changed while in use");
}

/* ---- Streamed files ---- */

/* Read a slab of a streamed file into memory aligned to MOE_SLAB_ALIGN. Returns 0 or errno. */
static int moe_read_slab(const moe_file *f, char *slab, size_t bytes, uint64_t from, size_t *got) {
    const int code = moe_read_at(f->fd, slab, bytes, f->origin.base + from, got);
    if (!f->direct) moe_forget_pages(f->fd, f->origin.base + from, bytes);
    return code;
}

static moe_status moe_read_expert(const moe_file *f, const moe_tensor_info *t, size_t expert, char *slab,
                                  moe_error *error) {
    static const char ending[] = ".experts";
    const size_t bytes = (size_t)(t->bytes / t->dims[0]), n = sizeof ending - 1;
    const moe_span name = t->name;
    const int layer = name.length > n && memcmp(name.data + name.length - n, ending, n) == 0;
    const uint64_t from = t->offset + expert * bytes;
    char where[96];
    size_t got = 0;
    const int code = moe_read_slab(f, slab, bytes, from, &got);
    snprintf(where, sizeof where, "%.*s expert %zu", (int)moe_min(layer ? name.length - n : name.length, 64), name.data,
             expert);
    if (!code && got == bytes) return MOE_OK;
    if (code) moe_fail(error, MOE_ERROR_IO, where, "%s: %s", where, strerror(code));
    else moe_fail(error, MOE_ERROR_IO, where, "%s: the file is truncated at byte %" PRIu64, where, from + got);
    return moe_named(f->origin.name, MOE_ERROR_IO, error);
}

/* Switch to reads that bypass the page cache if such a read of the block at `from` returns the same bytes as a normal
 * read. Some FUSE file systems return other bytes. A descriptor that the caller shares keeps its flags. */
static void moe_read_directly(moe_file *f, uint64_t from) {
    char room[3 * MOE_SLAB_ALIGN], *direct = room + (MOE_SLAB_ALIGN - (uintptr_t)room % MOE_SLAB_ALIGN);
    char *block = direct + MOE_SLAB_ALIGN;
    size_t got[2];
    from += f->origin.base;
    if (moe_read_at(f->fd, block, MOE_SLAB_ALIGN, from, &got[0]) || !moe_bypass_cache(f->fd, 1)) return;
    f->direct = !moe_read_at(f->fd, direct, MOE_SLAB_ALIGN, from, &got[1]) && got[0] == got[1] &&
                memcmp(direct, block, got[0]) == 0;
    if (!f->direct) moe_bypass_cache(f->fd, 0);
}

/* Map memory for a file with a parsed header and read the whole file except the slabs of experts. */
static moe_status moe_file_stream(moe_file *f, moe_error *error) {
    const moe_tensor_info *experts = NULL;
    uint64_t missing = f->n_tensors ? f->tensors[0].offset / MOE_SLAB_ALIGN * MOE_SLAB_ALIGN : 0, at = missing;
    for (size_t i = 0; i < f->n_tensors; i++) {
        const moe_tensor_info *t = &f->tensors[i];
        f->moved[i] = (size_t)missing;
        if (!t->experts) continue;
        if (!t->slabs && f->checked)
            MOE_FAIL(UNSUPPORTED, "stream",
                     "file version 1 has no expert checksums; rewrite the file with moe-quantize");
        missing += t->bytes;
        experts = t;
    }
    f->held = moe_max(1, f->bytes - (size_t)missing);
    char *data = moe_map_memory(f->held);
    if (!data) MOE_FAIL(MEMORY, "stream", "out of memory: cannot load %zu MB of non-expert weights", f->held >> 20);
    f->data = f->origin.mapping = data;
    f->origin.mapped = f->held;
    f->fd = f->origin.fd;
    for (size_t i = 0; i <= f->n_tensors; i++) {
        const int last = i == f->n_tensors;
        if (!last && !f->tensors[i].experts) continue;
        const uint64_t end = last ? f->bytes : f->tensors[i].offset;
        const size_t bytes = (size_t)(end - at);
        size_t got = 0;
        const int code = bytes ? moe_read_slab(f, data, bytes, at, &got) : 0;
        if (code || got < bytes)
            MOE_FAIL(IO, "stream", "cannot read the file: %s", code ? strerror(code) : "unexpected end of file");
        data += bytes;
        if (!last) at = end + f->tensors[i].bytes;
    }
    moe_protect((void *)(uintptr_t)f->data, f->held);
    if (experts && !f->origin.shared) moe_read_directly(f, experts->offset);
    return MOE_OK;
}

static const moe_meta *moe_find_meta(const moe_file *f, const char *key) {
    return moe_find_name(f->keys, f->n_meta, key);
}

static int64_t moe_meta_int(const moe_meta *m, size_t i) {
    int64_t v = 0;
    if ((m->kind == MOE_META_INT || m->kind == MOE_META_INTS) && i < m->count) memcpy(&v, m->data + i * 8, 8);
    return v;
}

static double moe_meta_real(const moe_meta *m, size_t i) {
    double v = 0;
    if (m->kind == MOE_META_INT || m->kind == MOE_META_INTS) return (double)moe_meta_int(m, i);
    if ((m->kind == MOE_META_REAL || m->kind == MOE_META_REALS) && i < m->count) memcpy(&v, m->data + i * 8, 8);
    return v;
}

static moe_span moe_meta_text(const moe_meta *m, size_t i) {
    const int has_text = m->kind == MOE_META_TEXT || m->kind == MOE_META_BYTES || m->kind == MOE_META_TEXTS;
    uint64_t length;
    if (!has_text || i >= m->count) return (moe_span){ "", 0 };
    const char *p = m->data + (m->texts ? m->texts[i] : 0);
    memcpy(&length, p, sizeof length);
    return (moe_span){ p + sizeof length, (size_t)length };
}

static const moe_tensor_info *moe_find_tensor(const moe_file *f, const char *name) {
    return moe_find_name(f->names, f->n_tensors, name);
}

/* ==== 20. Model file: writer ==================================================================================
 * Writing model files. Invariant: files appear completely or not at all, and existing files are never damaged. */

#if !defined(MOE_NO_WRITER)

/* ---- Atomic output ---- */

enum { MOE_WRITE_BYTES = 1 << 24 };

static moe_status moe_output_fail(const moe_output *o, int number, moe_error *error) {
    if (number == EINTR) MOE_FAIL(CANCELLED, "write", "writing %.160s was interrupted by a signal", o->path);
    MOE_FAIL(IO, "write", "cannot write %.160s: %s", o->path, strerror(number));
}

static moe_status moe_output_write(moe_output *o, const void *data, size_t bytes, moe_error *error) {
    for (const char *p = data; bytes;) {
        const int64_t n = moe_write_some(o, p, moe_min(bytes, MOE_WRITE_BYTES));
        if (n == 0 || (n < 0 && errno != EINTR)) return moe_output_fail(o, n ? errno : ENOSPC, error);
        if (n > 0) p += n, bytes -= (size_t)n, o->at += (uint64_t)n;
        if (moe_signal_waits(o)) return moe_output_fail(o, EINTR, error);
    }
    return MOE_OK;
}

static moe_status moe_output_end(moe_output *o, moe_status status, moe_error *error) {
    const int code = status == MOE_OK ? moe_keep_temporary(o) : 0;
    if (status != MOE_OK) moe_drop_temporary(o, o->partial && status == MOE_ERROR_CANCELLED);
    moe_release_signals(o);
    return code ? moe_output_fail(o, code, error) : status;
}

static moe_status moe_output_begin(moe_output *o, const char *path, uint64_t bytes, int partial, moe_error *error) {
    o->path = path;
    o->partial = partial;
    o->fd = -1;
    int code = moe_find_target(o, bytes);
    if (code < 0) MOE_FAIL(IO, "write", "%.160s is not a regular file", path);
    if (code) return moe_output_fail(o, code, error);
    moe_hold_signals(o);
    code = moe_create_temporary(o);
    return code ? moe_output_end(o, moe_output_fail(o, code, error), NULL) : MOE_OK;
}

/* ---- Models ----
 * Code shared by moe_model_save, which copies rows from an existing file, and moe_model_write, which calls a function
 * for each row. Tensors are written piece by piece (slab or matrix), so only one piece is in memory; the header, which
 * contains their checksums, is written last. */

/* A tensor of the new file and the source of its numbers: `old`, `vector` or, if both are NULL, s->fill. */
typedef struct moe_save_tensor {
    moe_tensor_info info;
    const moe_tensor_info *old;
    const float *vector;
    const uint32_t *rows; /* rows or experts of `old` to keep; NULL to keep all */
    uint32_t *sums;       /* [experts] slab checksums in s->header */
} moe_save_tensor;

typedef struct moe_save {
    const moe_file *old;    /* or NULL */
    int same_type;          /* 1 if the numbers of all tensors of `old` are unchanged */
    moe_write_params given; /* parameters of the caller */
    size_t n_tensors;
    uint64_t file_bytes;
    size_t tensors_bytes, header_bytes, piece_bytes, row_bytes; /* sizes of this memory: */
    moe_save_tensor *tensors;
    char *header, *piece;
    float *row; /* a row of floats, followed by its codes and sides */
    int resumed;
    uint64_t pieces; /* written so far */
    moe_output out;
    moe_error *error;
} moe_save;

/* Return 1 if a file has the tensor named by the first `length` bytes of `layer` followed by `part`. */
static int moe_has_part(const moe_file *f, const char *layer, size_t length, const char *part) {
    char name[96];
    snprintf(name, sizeof name, "%.*s%s", (int)moe_min(length, 64), layer, part);
    return moe_find_tensor(f, name) != NULL;
}

/* Return the type in which a tensor is saved. Matrices are converted, except gates and tables of positions and
 * distances, because rounding a gate would change its selections. The "gate" matrix of a feed-forward layer with a
 * `down` matrix and no experts selects nothing and is converted. */
static moe_type moe_save_type(const moe_file *f, const moe_tensor_info *t, const moe_save_params *params) {
    static const char *const parts[] = { ".gate.", ".parent.", "positions.", "rotary.", ".distance." };
    const char *name = t->name.data;
    if (t->n_dims == 1 || (t->experts ? params->experts : params->type) == MOE_TYPE_KEEP) return t->type;
    if (t->experts) return params->experts;
    for (size_t i = 0; i < MOE_COUNT(parts); i++)
        for (size_t at = 0, n = strlen(parts[i]); at + n <= t->name.length; at++)
            if (memcmp(name + at, parts[i], n) == 0)
                return i || !moe_has_part(f, name, at, ".down.weight") || moe_has_part(f, name, at, ".experts") ||
                               moe_has_part(f, name, at, ".experts.weight")
                           ? t->type
                           : params->type;
    return params->type;
}

/* Return 1 if an old metadata entry must be copied. Entries of the caller replace old entries; golden translations and
 * quality measurements are dropped if numbers change. */
static int moe_save_meta(const moe_save *s, const moe_meta *m) {
    for (size_t i = 0; i < s->given.n_entries; i++)
        if (moe_span_is(m->key, s->given.entries[i].key)) return 0;
    return s->same_type || !((m->key.length > 7 && memcmp(m->key.data, "golden.", 7) == 0) ||
                             (m->key.length > 8 && memcmp(m->key.data, "quality.", 8) == 0));
}

static void moe_put(char *out, size_t *at, const void *data, size_t bytes) {
    if (out && bytes) memcpy(out + *at, data, bytes);
    *at += bytes;
}

static void moe_put_entry(char *out, size_t *at, const moe_meta_entry *e) {
    const uint32_t head[2] = { (uint32_t)e->kind, (uint32_t)strlen(e->key) };
    const char between = (char)(e->integer ? e->integer : '\n');
    const int many = e->kind == MOE_META_TEXTS;
    moe_put(out, at, head, sizeof head);
    moe_put(out, at, e->key, head[1]);
    *at = moe_round_up(*at, 8);
    if (e->kind == MOE_META_INT) moe_put(out, at, &e->integer, 8);
    if (e->kind == MOE_META_REAL) moe_put(out, at, &e->real, 8);
    if (e->kind < MOE_META_TEXT) return;
    uint64_t n = e->kind == MOE_META_INTS ? e->text.length / 8 : 1;
    for (size_t i = 0; many && i < e->text.length; i++) n += e->text.data[i] == between;
    if (e->kind >= MOE_META_INTS) moe_put(out, at, &n, 8);
    if (e->kind == MOE_META_INTS) moe_put(out, at, e->text.data, (size_t)n * 8);
    for (size_t begin = 0, end; e->kind != MOE_META_INTS && begin <= e->text.length; begin = end + 1) {
        for (end = begin; end < e->text.length && !(many && e->text.data[end] == between);) end++;
        const uint64_t length = end - begin;
        moe_put(out, at, &length, 8);
        moe_put(out, at, e->text.data + begin, end - begin);
        *at = moe_round_up(*at, 8);
    }
}

/* Write the header of the new file, except slab checksums, to zeroed `out` (unless NULL); return the header's size. */
static size_t moe_save_header(const moe_save *s, char *out) {
    moe_header h = { .version = 2, .file_bytes = s->file_bytes, .n_tensors = (uint32_t)s->n_tensors };
    size_t at = sizeof h, n_old = s->old ? s->old->n_meta : 0;
    memcpy(h.magic, moe_magic, sizeof moe_magic);
    h.n_meta = (uint32_t)s->given.n_entries;
    for (size_t i = 0; i < n_old; i++) {
        const moe_meta *m = &s->old->meta[i];
        if (!moe_save_meta(s, m)) continue;
        moe_put(out, &at, m->entry.data, m->entry.length);
        h.n_meta++;
    }
    for (size_t i = 0; i < s->given.n_entries; i++) moe_put_entry(out, &at, &s->given.entries[i]);
    for (size_t i = 0; i < s->n_tensors; i++) {
        const moe_tensor_info *t = &s->tensors[i].info;
        const uint32_t begin[4] = { (uint32_t)t->type, (uint32_t)t->experts, t->n_dims, (uint32_t)t->name.length };
        const uint64_t place[3] = { t->offset, t->bytes, t->checksum };
        const size_t sums = t->experts ? moe_experts_of(t) * sizeof(uint32_t) : 0;
        if (t->type > MOE_TYPE_Q8B) h.version = MOE_FILE_VERSION;
        moe_put(out, &at, begin, sizeof begin);
        moe_put(out, &at, t->dims, 8 * (size_t)t->n_dims);
        moe_put(out, &at, place, sizeof place);
        moe_put(out, &at, t->name.data, t->name.length);
        at = moe_round_up(at, 8);
        if (out && sums) {
            const uint32_t checksum = moe_crc32(0, out + at, sums);
            memcpy(out + at - moe_round_up(t->name.length, 8) - 8, &checksum, sizeof checksum);
            s->tensors[i].sums = (uint32_t *)(void *)(out + at);
        }
        at = moe_round_up(at + sums, 8);
    }
    h.header_bytes = at;
    if (!out) return at;
    memcpy(out, &h, sizeof h);
    h.checksum = moe_crc32(0, out + 16, at - 16);
    memcpy(out, &h, sizeof h);
    return at;
}

/* Copy the selected rows of an old matrix, or numbers of an old vector, to s->piece, which is zeroed. */
static void moe_save_rows(moe_save *s, const moe_save_tensor *x) {
    const moe_tensor_info *t = x->old;
    const size_t n = (size_t)x->info.dims[0], cols = t->n_dims > 1 ? (size_t)t->dims[1] : 1;
    const moe_matrix from = moe_matrix_view(t->type, (size_t)t->dims[0], cols, moe_tensor_data(s->old, t));
    const moe_matrix to = moe_matrix_view(t->type, n, cols, s->piece);
    for (size_t i = 0; i < n; i++) {
        moe_copy_row(&from, x->rows[i], &to, i);
        if (from.scales) /* the sum of a row's codes */
            memcpy(s->piece + ((const char *)(to.scales + moe_round_up(n, MOE_Q8_ROWS) + i) - s->piece),
                   from.scales + moe_round_up(from.rows, MOE_Q8_ROWS) + x->rows[i], sizeof(int32_t));
    }
}

/* Write the caller's codes of row `r`. Returns 1, 0 if the caller has none, or -1 if they are invalid. */
static int moe_save_codes(moe_save *s, size_t index, size_t r, const moe_matrix *to, char *out) {
    int8_t *codes = (int8_t *)(void *)(s->row + to->cols);
    float scale = -1.0f;
    if (!s->given.codes || to->type != MOE_TYPE_Q8 || s->tensors[index].info.experts) return 0;
    memset(codes, 0, to->cols_padded);
    if (!s->given.codes(s->given.user, index, r, codes, to->cols, &scale)) return 0;
    if (!(scale >= 0.0f && scale <= FLT_MAX) || memchr(codes, -128, to->cols)) return -1;
    moe_pack_codes(to->type, to->rows, to->cols, r, NULL, out, codes, &scale);
    return 1;
}

/* Write a matrix of a tensor, or the up or down matrix of expert `piece`, to s->piece, which is zeroed. */
static moe_status moe_save_matrix(moe_save *s, size_t index, size_t piece, int down) {
    const moe_tensor_info *t = &s->tensors[index].info, *old = s->tensors[index].old;
    const moe_matrix to = moe_tensor_matrix(t, s->piece, 0, down);
    const moe_matrix from = old ? moe_tensor_matrix(old, moe_tensor_data(s->old, old), piece, down) : to;
    char *out = s->piece + ((const char *)to.data - s->piece);
    for (size_t r = 0; r < to.rows; r++) {
        const int coded = old ? 0 : moe_save_codes(s, index, r, &to, out);
        if (coded < 0)
            return moe_fail(s->error, MOE_ERROR_ARGUMENT, "save", "tensor %.*s has an invalid code or scale",
                            (int)t->name.length, t->name.data);
        if (coded) continue;
        if (old) moe_matrix_row(&from, r, s->row);
        else s->given.fill(s->given.user, index, piece, down ? (size_t)t->experts * to.cols + r : r, s->row, to.cols);
        if (!moe_row_fits(t->type, to.cols, s->row))
            return moe_fail(s->error, MOE_ERROR_ARGUMENT, "save", "tensor %.*s has a number that is not finite in %s",
                            (int)t->name.length, t->name.data, moe_type_name(t->type));
        moe_pack_row(t->type, to.rows, to.cols, r, s->row, out, (int8_t *)(void *)(s->row + to.cols));
    }
    return MOE_OK;
}

/* ---- Partial files ----
 * Until its header is written, a partial file begins with a moe_journal, which is shorter, and the checksums of the
 * pieces written so far. Pieces are verified, not believed: after a power failure they may be missing. */

typedef struct moe_journal {
    char magic[8];
    uint32_t header, source; /* CRC-32 of the new file's header without checksums, and of moe_write_params.resume */
    uint64_t header_bytes;
} moe_journal;

static moe_status moe_journal_write(moe_save *s, uint64_t at, const void *data, size_t bytes) {
    const uint64_t next = s->out.at;
    s->out.at = at;
    const moe_status status = moe_output_write(&s->out, data, bytes, s->error);
    s->out.at = next;
    return status;
}

/* Continue the partial file if it has the same header and source; otherwise empty it. */
static moe_status moe_journal_begin(moe_save *s) {
    const moe_journal wanted = { "moepart", moe_crc32(0, s->header, s->header_bytes),
                                 moe_crc32(0, s->given.resume, strlen(s->given.resume)), s->header_bytes };
    moe_journal found;
    moe_file_status state;
    size_t got;
    s->resumed = moe_file_state(s->out.fd, &state) && state.bytes <= s->file_bytes &&
                 moe_read_at(s->out.fd, (char *)&found, sizeof found, 0, &got) == 0 && got == sizeof found &&
                 memcmp(&found, &wanted, sizeof found) == 0;
    if (s->resumed) return MOE_OK;
    if (!moe_empty_temporary(&s->out)) return moe_output_fail(&s->out, errno, s->error);
    return moe_journal_write(s, 0, &wanted, sizeof wanted);
}

static uint64_t moe_journal_place(const moe_save *s) { return sizeof(moe_journal) + s->pieces * sizeof(uint32_t); }

/* Return 1 if the partial file has the next piece; set *sum to its checksum. */
static int moe_journal_has(moe_save *s, size_t bytes, uint32_t *sum) {
    size_t got;
    return s->resumed && moe_read_at(s->out.fd, (char *)sum, sizeof *sum, moe_journal_place(s), &got) == 0 &&
           got == sizeof *sum && moe_read_at(s->out.fd, s->piece, bytes, s->out.at, &got) == 0 && got == bytes &&
           moe_crc32(0, s->piece, bytes) == *sum;
}

static moe_status moe_save_tensor_at(moe_save *s, size_t index) {
    moe_save_tensor *x = &s->tensors[index];
    const size_t n = moe_experts_of(&x->info), bytes = (size_t)(x->info.bytes / n);
    const char *whole = (const char *)x->vector; /* bytes to copy unchanged */
    const uint32_t *experts = x->info.experts ? x->rows : NULL;
    if (x->old) {
        /* Verify the old tensor, because its new checksum would hide any damage. */
        if (!experts || !x->old->slabs) MOE_TRY(moe_check_tensor(s->old, x->old, NULL, s->error));
        if (x->old->type == x->info.type) whole = moe_tensor_data(s->old, x->old);
    }
    if (x->rows && !experts) whole = memset(s->piece, 0, bytes), moe_save_rows(s, x);
    for (size_t p = 0; p < n; p++, s->pieces++) {
        const char *data = whole ? whole + (experts ? experts[p] : p) * bytes : s->piece;
        uint32_t sum;
        if (moe_journal_has(s, bytes, &sum)) {
            x->info.checksum = sum;
            if (x->sums) x->sums[p] = sum;
            s->out.at += bytes;
            if (moe_signal_waits(&s->out)) return moe_output_fail(&s->out, EINTR, s->error);
            continue;
        }
        if (experts && x->old->slabs) MOE_TRY(moe_check_piece(s->old, x->old, experts[p], NULL, s->error));
        if (!whole) memset(s->piece, 0, bytes);
        for (int down = 0; !whole && down <= (x->info.experts > 0); down++) MOE_TRY(moe_save_matrix(s, index, p, down));
        x->info.checksum = moe_crc32(0, data, bytes);
        if (x->sums) x->sums[p] = x->info.checksum;
        MOE_TRY(moe_output_write(&s->out, data, bytes, s->error));
        if (s->given.resume) MOE_TRY(moe_journal_write(s, moe_journal_place(s), &x->info.checksum, sizeof sum));
    }
    return MOE_OK;
}

static moe_status moe_save_all(moe_save *s) {
    static const char zeros[MOE_SLAB_ALIGN];
    if (s->given.resume) MOE_TRY(moe_journal_begin(s));
    s->out.at = s->header_bytes;
    for (size_t i = 0; i < s->n_tensors; i++) {
        MOE_TRY(moe_output_write(&s->out, zeros, (size_t)(s->tensors[i].info.offset - s->out.at), s->error));
        MOE_TRY(moe_save_tensor_at(s, i));
    }
    if (s->given.resume && !moe_sync(s->out.fd)) return moe_output_fail(&s->out, errno, s->error);
    moe_save_header(s, s->header);
    s->out.at = 0;
    MOE_TRY(moe_output_write(&s->out, s->header, s->header_bytes, s->error));
    return s->old ? moe_check_unchanged(s->old, s->error) : MOE_OK;
}

/* Write a file, given the names, types and shapes of its tensors. The header, still without slab checksums, is first
 * checked by moe_file_parse. */
static moe_status moe_save_run(moe_save *s, const char *path) {
    const moe_allocator *a = &s->given.allocator;
    moe_error *error = s->error;
    moe_file f = { .fd = -1 };
    for (size_t i = 0; i < s->given.n_entries; i++) /* moe_file_parse checks the rest */
        if (!s->given.entries[i].key || s->given.entries[i].kind < MOE_META_INT ||
            s->given.entries[i].kind > MOE_META_TEXTS || s->given.entries[i].kind == MOE_META_REALS)
            MOE_FAIL(ARGUMENT, "entries", "metadata entry %zu has no key or an invalid kind", i);
    s->file_bytes = s->header_bytes = moe_save_header(s, NULL);
    for (size_t i = 0; i < s->n_tensors; i++) {
        moe_tensor_info *t = &s->tensors[i].info;
        t->bytes = moe_tensor_bytes(t);
        t->offset = moe_round_up((size_t)s->file_bytes, t->experts ? MOE_SLAB_ALIGN : MOE_ALIGN);
        s->file_bytes = t->offset + t->bytes;
        s->piece_bytes = moe_max(s->piece_bytes, (size_t)(t->bytes / moe_experts_of(t)));
        for (uint32_t d = 0; d < t->n_dims; d++)
            s->row_bytes = moe_max(s->row_bytes, 2 * moe_round_up((size_t)t->dims[d], MOE_Q8_COLS) * sizeof *s->row);
    }
    s->header = moe_allocate_zeroed(a, s->header_bytes);
    if (!s->header) MOE_FAIL(MEMORY, "save", "out of memory for a header of %zu bytes", s->header_bytes);
    moe_save_header(s, s->header);
    moe_status status = moe_file_parse(&f, s->header, (size_t)s->file_bytes, s->header_bytes, a, error);
    moe_file_free(&f, a);
    if (status == MOE_ERROR_FORMAT || status == MOE_ERROR_UNSUPPORTED) status = MOE_ERROR_ARGUMENT;
    if (error && status != MOE_OK) error->code = status;
    MOE_TRY(status);
    s->piece = moe_allocate_zeroed(a, s->piece_bytes);
    s->row = moe_allocate_zeroed(a, s->row_bytes);
    if (!s->piece || !s->row)
        MOE_FAIL(MEMORY, "save", "out of memory: converting a tensor needs %zu bytes", s->piece_bytes);
    MOE_TRY(moe_output_begin(&s->out, path, s->file_bytes, s->given.resume != NULL, error));
    return moe_output_end(&s->out, moe_save_all(s), error);
}

static moe_status moe_save_end(moe_save *s, moe_status status) {
    moe_release(&s->given.allocator, s->tensors, s->tensors_bytes);
    moe_release(&s->given.allocator, s->header, s->header_bytes);
    moe_release(&s->given.allocator, s->piece, s->piece_bytes);
    moe_release(&s->given.allocator, s->row, s->row_bytes);
    return status;
}

/* Add the caller's vector to s->tensors or replace an old vector of the same name. Returns 0 if `v` is invalid. */
static int moe_save_vector(moe_save *s, const moe_vector_entry *v) {
    const moe_tensor_info *old = v->name ? moe_find_tensor(s->old, v->name) : NULL;
    moe_save_tensor *x = &s->tensors[old ? (size_t)(old - s->old->tensors) : s->n_tensors++];
    if (!v->name || !v->data || (old && (old->n_dims != 1 || x->vector))) return 0;
    *x = (moe_save_tensor){
        .info = { .name = { v->name, strlen(v->name) }, .type = MOE_TYPE_F32, .n_dims = 1, .dims = { v->n } },
        .vector = v->data
    };
    return moe_name_valid(x->info.name);
}

/* Restrict a tensor of the old file to the selected rows, without converting it. Returns 0 if `e` is invalid. */
static int moe_save_some(moe_save *s, const moe_rows_entry *e) {
    const moe_tensor_info *old = e->name ? moe_find_tensor(s->old, e->name) : NULL;
    moe_save_tensor *x = old ? &s->tensors[old - s->old->tensors] : NULL;
    if (!x || x->rows || x->vector || x->info.type != old->type || !e->rows || !e->n) return 0;
    for (size_t i = 0; i < e->n; i++)
        if (e->rows[i] >= old->dims[0]) return 0;
    x->info.dims[0] = e->n;
    x->info.slabs = NULL;
    x->rows = e->rows;
    return 1;
}

static moe_status moe_file_save(const moe_file *f, const moe_allocator *a, const char *path,
                                const moe_save_params *params, moe_error *error) {
    moe_save s = { .old = f,
                   .same_type = !params->n_vectors && !params->n_rows,
                   .given = { .allocator = *a, .entries = params->entries, .n_entries = params->n_entries },
                   .n_tensors = f->n_tensors,
                   .tensors_bytes = (f->n_tensors + params->n_vectors) * sizeof *s.tensors,
                   .error = error };
    moe_status status = MOE_OK;
    for (int i = 0; i < 2; i++) {
        const moe_type type = i ? params->experts : params->type;
        if (!moe_type_known((uint32_t)type) && type != MOE_TYPE_KEEP)
            MOE_FAIL(ARGUMENT, "type", "unknown number format");
    }
    s.tensors = moe_allocate_zeroed(a, s.tensors_bytes);
    if (!s.tensors) MOE_FAIL(MEMORY, "save", "out of memory for the tensor directory");
    for (size_t i = 0; i < f->n_tensors; i++) {
        s.tensors[i] = (moe_save_tensor){ .info = f->tensors[i], .old = &f->tensors[i] };
        s.tensors[i].info.type = moe_save_type(f, &f->tensors[i], params);
        s.same_type &= s.tensors[i].info.type == f->tensors[i].type;
    }
    for (size_t i = 0; i < params->n_types && status == MOE_OK; i++) {
        const moe_tensor_info *t = params->types[i].name ? moe_find_tensor(f, params->types[i].name) : NULL;
        const moe_type type = params->types[i].type;
        if (t && t->experts && moe_type_known((uint32_t)type)) s.tensors[t - f->tensors].info.type = type;
        else status = moe_fail(error, MOE_ERROR_ARGUMENT, "types", "entry %zu has an invalid name or type", i);
        s.same_type &= status == MOE_OK && type == t->type;
    }
    for (size_t i = 0; i < params->n_vectors && status == MOE_OK; i++)
        if (!moe_save_vector(&s, &params->vectors[i]))
            status = moe_fail(error, MOE_ERROR_ARGUMENT, "vectors", "vector %zu has an invalid name or no numbers", i);
    for (size_t i = 0; i < params->n_rows && status == MOE_OK; i++)
        if (!moe_save_some(&s, &params->rows[i]))
            status = moe_fail(error, MOE_ERROR_ARGUMENT, "rows", "entry %zu has an invalid name or invalid rows", i);
    return moe_save_end(&s, status ? status : moe_save_run(&s, path));
}

moe_status moe_model_write_sized(const char *path, const moe_write_params *given, size_t size, moe_error *error) {
    moe_save s = { .error = error };
    moe_status status = MOE_OK;
    MOE_TRY(moe_take_struct(&s.given, sizeof s.given, given, size, "moe_write_params", error));
    s.given.allocator = moe_allocator_or_default(&s.given.allocator);
    s.tensors_bytes = s.given.n_tensors * sizeof *s.tensors;
    s.tensors = moe_allocate_zeroed(&s.given.allocator, s.tensors_bytes);
    if (!s.tensors) MOE_FAIL(MEMORY, "write", "out of memory for the tensor directory");
    for (; s.n_tensors < s.given.n_tensors && status == MOE_OK; s.n_tensors++) { /* moe_file_parse checks the rest */
        const moe_tensor_spec *spec = &s.given.tensors[s.n_tensors];
        moe_tensor_info *t = &s.tensors[s.n_tensors].info;
        const int known = spec->name && spec->n_dims >= 1 && spec->n_dims <= 3 && moe_type_known((uint32_t)spec->type);
        *t = (moe_tensor_info){ .name = { spec->name, spec->name ? strlen(spec->name) : 0 },
                                .type = spec->type,
                                .n_dims = spec->n_dims,
                                .experts = spec->n_dims == 3 ? 1 + (s.given.gated != 0) : 0 };
        if (known) memcpy(t->dims, spec->dims, spec->n_dims * sizeof *t->dims);
        if (!known || !moe_name_valid(t->name) || !moe_tensor_bytes(t))
            status = moe_fail(error, MOE_ERROR_ARGUMENT, "tensors", "tensor %zu has an invalid name, type or shape",
                              s.n_tensors);
    }
    return moe_save_end(&s, status ? status : moe_save_run(&s, path));
}

#else

static moe_status moe_file_save(const moe_file *f, const moe_allocator *a, const char *path,
                                const moe_save_params *params, moe_error *error) {
    (void)f, (void)a, (void)path, (void)params;
    MOE_FAIL(UNSUPPORTED, "write", "moe.c was built with MOE_NO_WRITER");
}

moe_status moe_model_write_sized(const char *path, const moe_write_params *given, size_t size, moe_error *error) {
    (void)given, (void)size;
    return moe_file_save(NULL, NULL, path, NULL, error);
}

moe_status moe_session_prompts(moe_session *s, const char *path, int save, moe_error *error) {
    return (void)s, (void)save, moe_file_save(NULL, NULL, path, NULL, error);
}

#endif /* MOE_NO_WRITER */

#endif /* MOE_HOST */

/* ==== 21. Expert cache ========================================================================================
 * The choice of resident experts if a session's memory cannot hold all experts. A bay is memory for one expert. The
 * cache handles only numbers; the caller copies experts. Invariant: residency depends only on earlier runs of layers.
 *
 * For a run of a layer, moe_cache_plan receives the needed experts, puts resident experts first and returns the bays of
 * all these experts. Missing experts are assigned, in the order of fetching, to a few transit bays in turn. A missing
 * expert with a higher value than the least valuable resident becomes a resident in its transit bay, and the evicted
 * resident's bay becomes a transit bay. The value of an expert is the number of runs of its layer so far times its
 * frequency in these runs, a decaying mean: f <- 0.97 f + 0.03 [needed]. If values are equal, the resident remains. The
 * current run is counted only after its experts are placed, because residents of other layers may be needed next;
 * otherwise experts used in rotation would always evict each other, as with LRU. */

typedef struct moe_cache_layer {
    size_t first, count; /* number of the layer's first expert; number of experts in the layer */
    uint64_t runs;
} moe_cache_layer;

typedef struct moe_cache {
    size_t bays;            /* number of bays; 0 without a cache, when all experts are resident */
    size_t transit;         /* number of transit bays, at least 1; 0 if each expert has its own bay */
    size_t turn;            /* index of the next transit bay */
    int32_t *bay;           /* [experts] bay of each expert, or -1 */
    float *frequency;       /* [experts] */
    int32_t *expert;        /* [bays] expert in each bay, or -1 */
    float *value;           /* [bays] value of the resident */
    int32_t *order;         /* [bays] transit bays, then bays of residents, a heap during planning */
    uint64_t hits, fetches; /* number of needed experts that were resident; number that were missing */
} moe_cache;

MOE_SHARED size_t moe_cache_bytes(size_t experts, size_t bays) { return (2 * experts + 3 * bays) * sizeof(int32_t); }

MOE_SHARED void moe_cache_begin(moe_cache *c, void *memory, size_t experts, size_t bays, size_t transit) {
    c->bays = bays;
    c->transit = transit;
    c->turn = 0;
    c->hits = c->fetches = 0;
    c->frequency = (float *)memory;
    c->value = c->frequency + experts;
    c->bay = (int32_t *)(void *)(c->value + bays);
    c->expert = c->bay + experts;
    c->order = c->expert + bays;
    for (size_t i = 0; i < experts; i++) c->frequency[i] = 0.0f, c->bay[i] = -1;
    for (size_t i = 0; i < bays; i++) c->expert[i] = -1, c->value[i] = -1.0f, c->order[i] = (int32_t)i;
}

/* Return 1 if the resident of bay a is evicted before the resident of bay b. */
MOE_SHARED int moe_cache_before(const moe_cache *c, int32_t a, int32_t b) {
    return c->value[a] < c->value[b] || (c->value[a] == c->value[b] && a < b);
}

MOE_SHARED void moe_cache_sink(const moe_cache *c, size_t at) {
    int32_t *heap = c->order + c->transit;
    const size_t n = c->bays - c->transit;
    const int32_t bay = heap[at];
    for (size_t next; (next = 2 * at + 1) < n; at = next) {
        if (next + 1 < n && moe_cache_before(c, heap[next + 1], heap[next])) next++;
        if (moe_cache_before(c, bay, heap[next])) break;
        heap[at] = heap[next];
    }
    heap[at] = bay;
}

MOE_SHARED void moe_cache_heap(const moe_cache *c) {
    for (size_t i = (c->bays - c->transit) / 2; i-- > 0;) moe_cache_sink(c, i);
}

/* Assign a bay to the missing expert `number` and return it. Experts of the current run, with value FLT_MAX, remain. */
MOE_SHARED int32_t moe_cache_place(moe_cache *c, size_t number, float value) {
    int32_t *transit = &c->order[c->turn], *least = &c->order[c->transit];
    if (!c->transit) return c->bay[number] = (int32_t)number;
    const int32_t bay = *transit;
    c->turn = (c->turn + 1) % c->transit;
    if (c->expert[bay] >= 0) c->bay[c->expert[bay]] = -1;
    c->expert[bay] = (int32_t)number;
    c->bay[number] = bay;
    if (c->bays > c->transit && value > c->value[*least]) {
        c->value[bay] = FLT_MAX;
        *transit = *least;
        *least = bay;
        moe_cache_sink(c, 0);
    }
    return bay;
}

/* Plan a run of a layer that needs the experts wanted[n]: sort wanted, resident experts first, and write their bays to
 * place[n]. `transit` consecutive missing experts have distinct bays, which later experts reuse. A resident expert in a
 * transit bay is used before the missing expert that receives the bay. Returns the number of resident experts. */
MOE_SHARED size_t moe_cache_plan(moe_cache *c, moe_cache_layer *layer, int32_t *wanted, size_t n, int32_t *place) {
    float *frequency = c->frequency + layer->first;
    const int32_t *bay = c->bay + layer->first;
    const float runs = (float)++layer->runs;
    size_t here = 0, missing = 0;
    for (size_t e = 0; e < layer->count; e++) {
        frequency[e] = 0.97f * frequency[e];
        if (bay[e] >= 0) c->value[bay[e]] = frequency[e] * runs;
    }
    for (size_t i = 0; i < n; i++) {
        const int32_t e = wanted[i];
        if (bay[e] >= 0) c->value[bay[e]] = FLT_MAX, wanted[here++] = e;
        else place[missing++] = e;
    }
    for (size_t i = 0; i < missing; i++) wanted[here + i] = place[i];
    if (missing) moe_cache_heap(c);
    for (size_t i = 0; i < n; i++) {
        const int32_t e = wanted[i];
        place[i] = i < here ? bay[e] : moe_cache_place(c, layer->first + (size_t)e, frequency[e] * runs);
    }
    for (size_t i = 0; i < n; i++) {
        frequency[wanted[i]] = frequency[wanted[i]] + 0.03f;
        c->value[place[i]] = frequency[wanted[i]] * runs;
    }
    c->hits += here;
    c->fetches += missing;
    return here;
}

/* Choose an expert to prefetch for the layer's next run: a missing expert that nearly all recent runs of the layer
 * needed. Returns the expert's index in the layer and its bay in *place, or -1 if none qualifies. With a threshold of
 * .6, more prefetched experts remained unused, and no expert arrived earlier, because the disk was busy. */
MOE_SHARED int32_t moe_cache_ahead(moe_cache *c, const moe_cache_layer *layer, int32_t *place) {
    for (size_t e = 0; e < layer->count; e++) {
        const size_t number = layer->first + e;
        if (c->bay[number] >= 0 || !(c->frequency[number] >= 0.9f)) continue;
        moe_cache_heap(c);
        *place = moe_cache_place(c, number, c->frequency[number] * (float)layer->runs);
        c->value[*place] = c->frequency[number] * (float)layer->runs;
        return (int32_t)e;
    }
    return -1;
}

MOE_SHARED void moe_cache_forget(moe_cache *c, size_t number) {
    const int32_t bay = c->bay[number];
    if (bay < 0) return;
    c->expert[bay] = c->bay[number] = -1;
    c->value[bay] = -1.0f;
}

#if MOE_HOST

/* ==== 22. Expert bank =========================================================================================
 * The experts of a streamed file: a session's slots, each for one slab, and the threads that read slabs into the slots.
 * Invariant: expert data exists only in slots, and the operations on a slot run in the order in which they were
 * planned. A thread waits only for earlier operations on its slot, so deadlocks cannot occur, even with two slots.
 *
 * A run of a layer is planned before it is computed ("Expert cache" decides residency). Missing experts, in the order
 * of their reads, are interleaved with resident experts: if they were computed last, readers would wait until all
 * residents in the slots had been computed. The operations on a slot, reads and visits by tasks, are numbered;
 * operation n starts when n operations have finished. After planning, experts that nearly all runs of the next layer
 * use are prefetched. A failed read ends the run and removes planned but unread experts; the session remains usable. */

enum { MOE_READERS = 2 };

/* Repeat a statement for the experts `t` of every graph `g`. */
#define MOE_FOR_EXPERTS(g, t, graphs)                                                         \
    for (int g = 0; g < MOE_GRAPHS; g++)                                                      \
        for (moe_node *t = (graphs)[g].nodes; t < (graphs)[g].nodes + (graphs)[g].count; t++) \
            if (t->op == MOE_OP_EXPERTS)

typedef struct moe_bank_layer {
    const moe_experts *experts;
    moe_cache_layer cache;
} moe_bank_layer;

typedef struct moe_bank_read {
    const moe_bank_layer *layer;
    size_t expert, slot; /* `expert` is an index in the layer */
    unsigned number;     /* ordinal of this operation on the slot */
    int done;
} moe_bank_read;

typedef struct moe_bank_visit {
    size_t slot;
    unsigned number;    /* ordinal of this operation on the slot */
    atomic_size_t left; /* unfinished tasks */
} moe_bank_visit;

typedef struct moe_bank {
    const moe_file *file;     /* NULL if the bank is not used because all experts are in memory */
    moe_bank_layer *layers;   /* [n_layers] */
    size_t n_layers, decoder; /* `decoder` is the index of the decoder's first layer, which runs again after the last */
    size_t experts, longest;  /* number of experts in all layers; maximum number in a layer */
    size_t slots, slot_bytes, most_ahead;
    moe_cache cache;
    char *memory;                     /* [slots, slot_bytes] aligned to MOE_SLAB_ALIGN */
    unsigned *planned;                /* [slots] operations planned so far */
    atomic_uint *done;                /* [slots] operations finished so far */
    char *early;                      /* [slots] 1 if the expert was prefetched and has not been visited */
    int32_t *place, *order;           /* [longest] */
    moe_bank_visit *visits;           /* [longest] visits of the current run */
    atomic_size_t open;               /* unfinished visits */
    moe_bank_read *reads;             /* [capacity] ring buffer */
    size_t capacity, claimed, issued; /* size of the ring; numbers of reads claimed and issued so far */
    size_t busy;                      /* number of readers that have claimed a read */
    int stop, abandon;                /* 1 to end the readers; 1 to make readers give up claimed reads */
    atomic_int failed;
    moe_error error; /* first error since the last report */
    pthread_t threads[MOE_READERS];
    size_t n_threads;
    int locks; /* 1 if `mutex` and `changed` are initialised */
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    uint64_t ahead, ahead_used;
    atomic_uint_least64_t fetches, fetch_bytes, wait_ns;
} moe_bank;

/* ---- Setup ---- */

/* Count the experts of the graphs and the slots that fit in `budget` bytes. */
static moe_status moe_bank_measure(moe_bank *b, const moe_graph *graphs, size_t budget, moe_error *error) {
    b->n_layers = b->experts = b->longest = b->slot_bytes = b->decoder = 0;
    MOE_FOR_EXPERTS (g, t, graphs) {
        b->n_layers++;
        b->decoder += g == MOE_ENCODER;
        b->experts += t->experts->count;
        b->longest = moe_max(b->longest, t->experts->count);
        b->slot_bytes = moe_max(b->slot_bytes, t->experts->stride);
    }
    const size_t least = moe_min(2, b->experts);
    if (!b->experts) MOE_FAIL(UNSUPPORTED, "expert_memory", "expert_memory must be 0: the model has no experts");
    b->slots = moe_min(b->experts, budget / b->slot_bytes);
    if (b->slots >= least) return MOE_OK;
    MOE_FAIL(MEMORY, "expert_memory",
             "expert_memory of %zu bytes is too small: %zu experts need %zu bytes; all %zu need %zu bytes", budget,
             least, least * b->slot_bytes, b->experts, b->experts * b->slot_bytes);
}

static void moe_bank_layout(moe_bank *b, const moe_graph *graphs, size_t threads, moe_layout *at) {
    const size_t most = 4 + threads, transit = b->slots < b->experts ? moe_max(2, moe_min(most, b->slots / 8)) : 0;
    size_t n = 0, first = 0;
    b->most_ahead = transit ? transit : most;
    b->capacity = b->longest + 2 * (b->most_ahead + MOE_READERS);
    b->layers = moe_carve(at, b->n_layers, sizeof *b->layers);
    b->planned = moe_carve(at, b->slots, sizeof *b->planned);
    b->done = moe_carve(at, b->slots, sizeof *b->done);
    b->early = moe_carve(at, b->slots, sizeof *b->early);
    b->place = moe_carve(at, moe_max(b->longest, b->most_ahead), sizeof *b->place);
    b->order = moe_carve(at, b->longest, sizeof *b->order);
    b->visits = moe_carve(at, b->longest, sizeof *b->visits);
    b->reads = moe_carve(at, b->capacity, sizeof *b->reads);
    void *cache = moe_carve(at, moe_cache_bytes(b->experts, b->slots), 1);
    b->memory = moe_carve(at, b->slots, b->slot_bytes);
    moe_carve(at, MOE_SLAB_ALIGN, 1);
    if (!at->base) return;
    b->memory += (MOE_SLAB_ALIGN - (uintptr_t)b->memory % MOE_SLAB_ALIGN) % MOE_SLAB_ALIGN;
    moe_advise_huge_pages(b->memory, b->slots * b->slot_bytes);
    moe_cache_begin(&b->cache, cache, b->experts, b->slots, transit);
    for (size_t i = 0; i < b->slots; i++) {
        b->planned[i] = 0;
        b->early[i] = 0;
        atomic_init(&b->done[i], 0);
    }
    MOE_FOR_EXPERTS (g, t, graphs) {
        b->layers[n++] = (moe_bank_layer){ t->experts, { first, t->experts->count, 0 } };
        first += t->experts->count;
    }
}

/* ---- Reading ---- */

static int moe_bank_failed(const moe_bank *b) { return b && atomic_load(&b->failed); }

static int moe_bank_turn(const moe_bank *b, size_t slot, unsigned number) {
    return atomic_load_explicit(&b->done[slot], memory_order_acquire) == number;
}

/* Return 1 if all experts have slots and are loaded, so the readers can end. */
static int moe_bank_complete(const moe_bank *b) { return !b->cache.transit && atomic_load(&b->fetches) == b->experts; }

/* Execute a claimed read. The caller holds the mutex. */
static void moe_bank_serve(moe_bank *b, moe_bank_read *r) {
    const size_t expert = r->expert;
    const moe_file *f = b->file;
    const moe_tensor_info *t = &f->tensors[r->layer->experts->tensor];
    char *slab = b->memory + r->slot * b->slot_bytes;
    moe_error error = { MOE_OK, "", "" };
    while (!moe_bank_turn(b, r->slot, r->number) && !b->stop && !b->abandon && !atomic_load(&b->failed))
        pthread_cond_wait(&b->changed, &b->mutex);
    if (b->stop || b->abandon || atomic_load(&b->failed)) return;
    pthread_mutex_unlock(&b->mutex);
    moe_status status = moe_read_expert(f, t, expert, slab, &error);
    if (!status && f->checked && !moe_piece_checked(f, t, expert))
        status = moe_compare_piece(f, t, expert, slab, &error);
    pthread_mutex_lock(&b->mutex);
    if (status == MOE_OK) {
        r->done = 1;
        atomic_fetch_add(&b->fetches, 1);
        atomic_fetch_add(&b->fetch_bytes, t->bytes / t->dims[0]);
        atomic_fetch_add(&b->done[r->slot], 1);
    } else if (!atomic_load(&b->failed)) {
        b->error = error;
        atomic_store(&b->failed, 1);
    }
}

static void *moe_bank_reader(void *user) {
    moe_bank *b = user;
    pthread_mutex_lock(&b->mutex);
    while (!b->stop && !moe_bank_complete(b)) {
        if (b->claimed == b->issued || b->abandon || atomic_load(&b->failed)) {
            pthread_cond_wait(&b->changed, &b->mutex);
            continue;
        }
        b->busy++;
        moe_bank_serve(b, &b->reads[b->claimed++ % b->capacity]);
        b->busy--;
        pthread_cond_broadcast(&b->changed);
    }
    pthread_mutex_unlock(&b->mutex);
    return NULL;
}

static void moe_bank_close(moe_bank *b) {
    if (!b->locks) return;
    pthread_mutex_lock(&b->mutex);
    b->stop = 1;
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->mutex);
    while (b->n_threads) pthread_join(b->threads[--b->n_threads], NULL);
    pthread_cond_destroy(&b->changed);
    pthread_mutex_destroy(&b->mutex);
    b->locks = 0;
}

/* Start the readers. Call moe_bank_close even after a failure. */
static moe_status moe_bank_open(moe_bank *b, moe_error *error) {
    if (pthread_mutex_init(&b->mutex, NULL)) MOE_FAIL(MEMORY, "expert_memory", "cannot create a mutex");
    if (pthread_cond_init(&b->changed, NULL)) {
        pthread_mutex_destroy(&b->mutex);
        MOE_FAIL(MEMORY, "expert_memory", "cannot create a condition variable");
    }
    b->locks = 1;
    for (; b->n_threads < MOE_READERS; b->n_threads++) {
        const int code = pthread_create(&b->threads[b->n_threads], NULL, moe_bank_reader, b);
        if (code) MOE_FAIL(MEMORY, "expert_memory", "cannot start an expert reader thread: %s", strerror(code));
    }
    return MOE_OK;
}

/* ---- A run of a layer ---- */

static void moe_bank_issue(moe_bank *b, const moe_bank_layer *layer, int32_t expert, int32_t slot, int early) {
    b->reads[b->issued++ % b->capacity] = (moe_bank_read){ layer, (size_t)expert, (size_t)slot, b->planned[slot]++, 0 };
    b->early[slot] = (char)early;
    b->ahead += (uint64_t)early;
}

/* Sort experts by descending number of rows, first[e + 1] - first[e], then by expert number (Shell 1959). */
static void moe_bank_sort(int32_t *experts, size_t n, const size_t *first) {
    for (size_t gap = n / 2; gap; gap /= 2)
        for (size_t i = gap; i < n; i++) {
            const int32_t e = experts[i];
            const size_t rows = first[e + 1] - first[e];
            size_t at = i;
            for (; at >= gap; at -= gap) {
                const int32_t other = experts[at - gap];
                const size_t others = first[other + 1] - first[other];
                if (others > rows || (others == rows && other < e)) break;
                experts[at] = other;
            }
            experts[at] = e;
        }
}

static void moe_bank_swap(const moe_bank *b, int32_t *experts, size_t i, size_t j) {
    const int32_t e = experts[i], slot = b->place[i];
    experts[i] = experts[j], b->place[i] = b->place[j];
    experts[j] = e, b->place[j] = slot;
}

/* Partition n experts that were resident before a run was planned: experts whose slot a missing expert will reuse
 * (counted in *leaving) come first, experts still being read come last. Returns the number of loaded experts. */
static size_t moe_bank_part(const moe_bank *b, const moe_bank_layer *layer, int32_t *experts, size_t n,
                            size_t *leaving) {
    for (size_t i = 0; i < n;) {
        if (moe_bank_turn(b, (size_t)b->place[i], b->planned[b->place[i]])) i++;
        else moe_bank_swap(b, experts, i, --n);
    }
    *leaving = 0;
    for (size_t i = 0; i < n; i++)
        if (b->cache.expert[b->place[i]] != (int32_t)layer->cache.first + experts[i])
            moe_bank_swap(b, experts, i, (*leaving)++);
    return n;
}

/* Plan a run of a layer that needs the experts wanted[n] and sort wanted into the order of the visits. The layer's
 * expert e has first[e + 1] - first[e] rows. `last` is 1 if the next run is of the next layer. */
static void moe_bank_plan(moe_bank *b, const moe_experts *experts, int32_t *wanted, size_t n, const size_t *first,
                          int last) {
    moe_bank_layer *layer = b->layers;
    while (layer->experts != experts) layer++;
    const size_t next = (size_t)(layer - b->layers) + 1;
    const moe_bank_layer *after = &b->layers[next < b->n_layers ? next : b->decoder];
    moe_bank_sort(wanted, n, first);
    const size_t here = moe_cache_plan(&b->cache, &layer->cache, wanted, n, b->place);
    pthread_mutex_lock(&b->mutex);
    size_t leaving, behind = 0;
    const size_t held = moe_bank_part(b, layer, wanted, here, &leaving), awaited = n - held;
    for (size_t i = 0; i < n; i++) {
        const int turn = i >= leaving && (behind + 1) * (n - leaving) <= (i + 1 - leaving) * awaited;
        const size_t at = turn ? held + behind++ : i - behind;
        const int32_t slot = b->place[at];
        b->order[i] = wanted[at];
        if (at >= here) moe_bank_issue(b, layer, wanted[at], slot, 0);
        b->ahead_used += (uint64_t)b->early[slot];
        b->early[slot] = 0;
        b->visits[i].slot = (size_t)slot;
        b->visits[i].number = b->planned[slot]++;
    }
    memcpy(wanted, b->order, n * sizeof *wanted);
    atomic_store(&b->open, n);
    for (size_t i = 0; last && i < b->most_ahead; i++) {
        const int32_t e = moe_cache_ahead(&b->cache, &after->cache, b->place);
        if (e < 0) break;
        moe_bank_issue(b, after, e, b->place[0], 1);
    }
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->mutex);
}

/* Wait until the slab of a visit is loaded and return it; NULL if the run has failed or is cancelled. */
static const char *moe_bank_wait(moe_bank *b, size_t visit, const moe_pool *pool) {
    const moe_bank_visit *v = &b->visits[visit];
    if (!moe_bank_turn(b, v->slot, v->number)) {
        const uint64_t begin = moe_nanoseconds();
        pthread_mutex_lock(&b->mutex);
        while (!moe_bank_turn(b, v->slot, v->number) && !moe_bank_failed(b) && !moe_pool_cancelled(pool))
            pthread_cond_wait(&b->changed, &b->mutex);
        pthread_mutex_unlock(&b->mutex);
        atomic_fetch_add(&b->wait_ns, moe_nanoseconds() - begin);
        if (!moe_bank_turn(b, v->slot, v->number)) return NULL;
    }
    return b->memory + v->slot * b->slot_bytes;
}

/* Finish a task of a visit. After the last task the slot's next operation can start. */
static void moe_bank_done(moe_bank *b, size_t visit) {
    moe_bank_visit *v = &b->visits[visit];
    if (atomic_fetch_sub(&v->left, 1) > 1) return;
    pthread_mutex_lock(&b->mutex);
    atomic_fetch_add(&b->done[v->slot], 1);
    atomic_fetch_sub(&b->open, 1);
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->mutex);
}

/* Clean up after a run that ended early: wait for reads in progress and remove unread experts from the cache. */
static void moe_bank_settle(moe_bank *b) {
    pthread_mutex_lock(&b->mutex);
    b->abandon = 1;
    pthread_cond_broadcast(&b->changed);
    while (b->busy) pthread_cond_wait(&b->changed, &b->mutex);
    for (size_t i = b->issued - moe_min(b->issued, b->capacity); i < b->issued; i++) {
        moe_bank_read *r = &b->reads[i % b->capacity];
        if (!r->done) moe_cache_forget(&b->cache, r->layer->cache.first + r->expert);
        r->done = 1;
    }
    for (size_t i = 0; i < b->slots; i++) atomic_store(&b->done[i], b->planned[i]);
    atomic_store(&b->open, 0);
    b->claimed = b->issued;
    b->abandon = 0;
    pthread_mutex_unlock(&b->mutex);
}

static void moe_bank_stats(const moe_bank *b, moe_stats *stats) {
    stats->experts = b->experts;
    stats->experts_held = b->slots;
    stats->expert_hits = b->cache.hits;
    stats->expert_fetches = atomic_load(&b->fetches);
    stats->expert_fetch_bytes = atomic_load(&b->fetch_bytes);
    stats->expert_wait_ns = atomic_load(&b->wait_ns);
    stats->expert_ahead = b->ahead;
    stats->expert_ahead_used = b->ahead_used;
}

static moe_status moe_bank_status(moe_bank *b, moe_error *error) {
    if (!atomic_load(&b->failed)) return MOE_OK;
    moe_bank_settle(b);
    if (error) *error = b->error;
    const moe_status status = b->error.code;
    atomic_store(&b->failed, 0);
    return status;
}

/* ==== 23. Graph ===============================================================================================
 * Code shared by all ops: adding a node to a graph and computing its rows on all threads. All nodes of a graph have the
 * same number of rows. A graph is built and planned once for a capacity and run with the current number of rows.
 *
 * An op has a line in MOE_OPS, structs for its parameters and scratch (see "Graph data"), a paragraph in one of the
 * next sections (builder, scratch, compute function) and a launcher in moe-cuda.cu. If it has a matrix or scratch
 * memory, add its cases to moe_matrix_of, moe_bind_node and moe_need_node there. */

typedef struct moe_run {
    const moe_kernels *kernels;
    moe_pool *pool;
    const moe_graph *graph;
    const moe_frame *frame;
    size_t thread; /* the thread that computes the current row */
} moe_run;

/* Return the distance between rows of activations in floats: whole cache lines, but not a high power of two, because
 * the rows of a tile would then share a few sets of the cache. */
static size_t moe_row_stride(size_t cols) {
    const size_t stride = moe_round_up(cols, 16);
    return stride % 256 ? stride : stride + 16;
}

/* Add a copy of a node, and extend the lifetimes of its sources and of the nodes that they view. */
static moe_node *moe_add_node(moe_graph *g, const moe_node *node, const char *name) {
    moe_node *t = &g->nodes[moe_min(g->count, g->capacity - 1)];
    if (g->count == g->capacity) g->overflow = 1; /* the planner then rejects the graph */
    if (g->overflow) return t;
    *t = *node;
    t->stride = moe_row_stride(t->cols);
    t->last = g->count++;
    snprintf(t->name, sizeof t->name, "%s", name);
    for (size_t s = 0; s < MOE_COUNT(t->src); s++)
        for (moe_node *read = t->src[s]; read; read = read->op == MOE_OP_VIEW ? read->src[0] : NULL)
            read->last = moe_max(read->last, (size_t)(t - g->nodes));
    return t;
}

/* Add a node with the given members and return it. */
#define MOE_ADD_NODE(g, name, ...) moe_add_node(g, &(moe_node){ __VA_ARGS__ }, name)

static int moe_is_codes(const moe_node *t) { return t->op == MOE_OP_QUANTISE; }

static float *moe_row_of(const moe_node *t, size_t row) { return (float *)t->data + row * t->stride; }

static void moe_carve_threads(const moe_graph *g, moe_node *t, moe_layout *at, size_t floats) {
    t->thread_floats = floats;
    t->thread = moe_carve(at, g->threads * floats, sizeof(float));
}

static float *moe_thread_of(const moe_node *t, size_t thread) { return t->thread + thread * t->thread_floats; }

typedef void (*moe_row_fn)(const moe_run *run, const moe_node *t, size_t row);

/* The tasks that compute rows [first, end) of a node. */
typedef struct moe_job {
    const moe_run *run;
    const moe_node *t;
    size_t first, end, rows_per_task;
    moe_row_fn row;
} moe_job;

static void moe_row_task(void *arg, size_t task, size_t thread) {
    const moe_job *job = arg;
    const size_t first = job->first + task * job->rows_per_task;
    moe_run run = *job->run;
    run.thread = thread;
    for (size_t r = first; r < moe_min(job->end, first + job->rows_per_task); r++) job->row(&run, job->t, r);
}

/* Compute rows one by one, in tasks large enough to be worthwhile at `cost` products per row. */
static void moe_for_rows(const moe_run *run, const moe_node *t, size_t rows, size_t cost, moe_row_fn row) {
    moe_job job = { run, t, 0, rows, moe_max(1, 16384 / moe_max(cost, 1)), row };
    moe_pool_run(run->pool, moe_divide_up(rows, job.rows_per_task), moe_row_task, &job);
}

static void moe_softmax(const moe_kernels *kernels, const float *x, size_t n, float *p) {
    const float sum = kernels->exp_sum(x, n, kernels->max(x, n), p);
    for (size_t i = 0; i < n; i++) p[i] = p[i] / sum;
}

/* ==== 24. Ops: rows ===========================================================================================
 * Ops that compute a row from the same row of other nodes. Invariant for this and the next sections: an op's compute
 * function writes only its node, its scratch and outputs of the frame, and threads divide outputs, never sums. */

static moe_node *moe_op_input(moe_graph *g, size_t cols, const char *name) {
    return MOE_ADD_NODE(g, name, .op = MOE_OP_INPUT, .cols = cols);
}

static void moe_compute_input_row(const moe_run *run, const moe_node *t, size_t row) {
    memcpy(moe_row_of(t, row), run->frame->inputs + row * t->cols, t->cols * sizeof(float));
}

/* Add a node that computes table[id] * scale. */
static moe_node *moe_op_embed(moe_graph *g, const moe_matrix *table, float scale, const char *name) {
    return MOE_ADD_NODE(g, name, .op = MOE_OP_EMBED, .cols = table->cols, .embed = { table, NULL, scale });
}

static void moe_compute_embed_row(const moe_run *run, const moe_node *t, size_t row) {
    float *y = moe_row_of(t, row);
    moe_matrix_row(t->embed.table, (size_t)run->frame->ids[row], y);
    for (size_t c = 0; c < t->cols; c++) y[c] = y[c] * t->embed.scale;
    if (!t->embed.positions) return;
    const float *position = (const float *)t->embed.positions->data + (size_t)run->frame->positions[row] * t->cols;
    for (size_t c = 0; c < t->cols; c++) y[c] = y[c] + position[c];
}

/* Return the quantised form of x, which all readers of x share. */
static moe_node *moe_op_quantise(moe_graph *g, moe_node *x) {
    if (!x->codes) {
        x->codes = MOE_ADD_NODE(g, "", .op = MOE_OP_QUANTISE, .src = { x }, .cols = x->cols);
        x->codes->stride = moe_code_bytes(x->cols);
        snprintf(x->codes->name, sizeof x->codes->name, "%.40s.codes", x->name);
    }
    return x->codes;
}

static void moe_quantise_row(const moe_kernels *kernels, const float *x, size_t cols, int8_t *codes, float *scale) {
    if (scale) *scale = kernels->quantise(x, cols, codes);
    else moe_quantise_blocks(kernels->quantise, x, cols, codes);
}

static void moe_compute_quantise_row(const moe_run *run, const moe_node *t, size_t row) {
    moe_quantise_row(run->kernels, moe_row_of(t->src[0], row), t->cols, (int8_t *)t->data + row * t->stride,
                     t->scales ? t->scales + row : NULL);
}

/* Return the operand of a product with w: x or its quantised form. */
static moe_node *moe_op_factor(moe_graph *g, const moe_matrix *w, moe_node *x) {
    return moe_type_quantised(w->type) ? moe_op_quantise(g, x) : x;
}

/* Add a node that computes w x + bias, where bias may be NULL. */
static moe_node *moe_op_linear(moe_graph *g, const moe_matrix *w, moe_node *x, const float *bias, const char *name) {
    return MOE_ADD_NODE(g, name, .op = MOE_OP_LINEAR, .src = { moe_op_factor(g, w, x) }, .cols = w->rows,
                        .linear = { w, bias, 0 });
}

typedef struct moe_linear_job {
    const moe_kernels *kernels;
    const moe_linear *linear;
    size_t rows, blocks, blocks_per_task, rows_per_task, row_tasks;
} moe_linear_job;

static void moe_linear_task(void *arg, size_t task, size_t thread) {
    const moe_linear_job *job = arg;
    const size_t block = task / job->row_tasks * job->blocks_per_task, row = task % job->row_tasks * job->rows_per_task;
    (void)thread;
    job->kernels->linear(job->linear, row, moe_min(job->rows, row + job->rows_per_task), block,
                         moe_min(job->blocks, block + job->blocks_per_task));
}

/* Compute a matrix product for `rows` rows on all threads. A task computes a multiple of four blocks of outputs and
 * reads their weights once for all rows. Several tasks per thread compensate for threads delayed by other work. Rows
 * are split only if there are too few blocks. The calling thread computes small products alone. */
static void moe_linear_run(const moe_run *run, const moe_linear *l, size_t rows) {
    enum { LEAST = 1 << 16, PER_THREAD = 4, BLOCKS = 4, ROWS = 32 };
    const size_t blocks = moe_divide_up(l->w->rows, 16), cost = rows * blocks * 16 * l->w->cols;
    const size_t wanted = moe_min(run->pool->count * PER_THREAD, moe_max(1, cost / LEAST));
    moe_linear_job job = { run->kernels, l, rows, blocks, 0, rows, 1 };
    job.blocks_per_task = moe_min(blocks, moe_round_up(moe_divide_up(blocks, wanted), BLOCKS));
    if (moe_divide_up(blocks, job.blocks_per_task) < moe_min(wanted, run->pool->count)) {
        job.rows_per_task = moe_min(rows, moe_round_up(moe_divide_up(rows, wanted), ROWS));
        job.row_tasks = moe_divide_up(rows, job.rows_per_task);
    }
    moe_pool_run(run->pool, moe_divide_up(blocks, job.blocks_per_task) * job.row_tasks, moe_linear_task, &job);
}

/* Return the product y = w x, computed from `codes` with `scales` if w is quantised, otherwise from `x`. */
static moe_linear moe_linear_of(const moe_matrix *w, const float *x, size_t x_stride, const int8_t *codes,
                                const float *scales, float *y, size_t y_stride) {
    return (moe_linear){ w, x, x_stride, codes, scales, .y = y, .y_stride = y_stride };
}

/* Return the product of w and the rows of node `x` from `row` on. */
static moe_linear moe_linear_from(const moe_matrix *w, const moe_node *x, size_t row, float *y, size_t y_stride) {
    if (!moe_is_codes(x)) return moe_linear_of(w, moe_row_of(x, row), x->stride, NULL, NULL, y, y_stride);
    return moe_linear_of(w, NULL, 0, (const int8_t *)x->data + row * x->stride, x->scales ? x->scales + row : NULL, y,
                         y_stride);
}

static void moe_compute_linear(const moe_run *run, const moe_node *t) {
    moe_linear l = moe_linear_from(t->linear.w, t->src[0], 0, t->data, t->stride);
    l.bias = t->linear.bias;
    l.relu = t->linear.relu;
    moe_linear_run(run, &l, run->frame->rows);
}

static moe_node *moe_op_pointwise(moe_graph *g, moe_node *a, moe_node *b, int product, const char *name) {
    return MOE_ADD_NODE(g, name, .op = MOE_OP_POINTWISE, .src = { a, b }, .cols = a->cols, .product = product);
}

static void moe_compute_pointwise_row(const moe_run *run, const moe_node *t, size_t row) {
    const float *a = moe_row_of(t->src[0], row), *b = moe_row_of(t->src[1], row);
    float *y = moe_row_of(t, row);
    (void)run;
    if (t->src[1]->cols < t->cols)
        for (size_t c = 0; c < t->cols; c++) y[c] = t->product ? a[c] * b[0] : a[c] + b[0];
    else if (t->product)
        for (size_t c = 0; c < t->cols; c++) y[c] = a[c] * b[c];
    else
        for (size_t c = 0; c < t->cols; c++) y[c] = a[c] + b[c];
}

static moe_node *moe_op_concat(moe_graph *g, moe_node *a, moe_node *b, const char *name) {
    return MOE_ADD_NODE(g, name, .op = MOE_OP_CONCAT, .src = { a, b }, .cols = a->cols + b->cols);
}

static void moe_compute_concat_row(const moe_run *run, const moe_node *t, size_t row) {
    const moe_node *a = t->src[0], *b = t->src[1];
    (void)run;
    memcpy(moe_row_of(t, row), moe_row_of(a, row), a->cols * sizeof(float));
    memcpy(moe_row_of(t, row) + a->cols, moe_row_of(b, row), b->cols * sizeof(float));
}

static moe_node *moe_op_unary(moe_graph *g, moe_unary what, moe_node *x, const char *name) {
    return MOE_ADD_NODE(g, name, .op = MOE_OP_UNARY, .src = { x }, .cols = x->cols, .unary = what);
}

static void moe_compute_unary_row(const moe_run *run, const moe_node *t, size_t row) {
    run->kernels->unary(t->unary, moe_row_of(t->src[0], row), t->cols, moe_row_of(t, row));
}

static moe_node *moe_op_view(moe_graph *g, moe_node *x, size_t column, size_t cols, const char *name) {
    moe_node *t = MOE_ADD_NODE(g, name, .op = MOE_OP_VIEW, .src = { x }, .cols = cols, .column = column);
    t->stride = x->stride;
    return t;
}

/* Ba et al. 2016 (arXiv 1607.06450): (x - mean) / sqrt(variance + epsilon) * weight + bias. RMS norms use mean 0. */
static moe_node *moe_op_norm(moe_graph *g, const moe_norm_op *norm, moe_node *x, const char *name) {
    return MOE_ADD_NODE(g, name, .op = MOE_OP_NORM, .src = { x }, .cols = x->cols, .norm = *norm);
}

static void moe_compute_norm_row(const moe_run *run, const moe_node *t, size_t row) {
    run->kernels->norm(&t->norm, moe_row_of(t->src[0], row), t->cols, moe_row_of(t, row));
}

static moe_node *moe_op_rotary(moe_graph *g, const moe_rotary_op *op, moe_node *x, const char *name) {
    return MOE_ADD_NODE(g, name, .op = MOE_OP_ROTARY, .src = { x }, .cols = x->cols, .rotary = *op);
}

static void moe_rotary(const float *table, const float *x, size_t half, float *y) {
    for (size_t i = 0; i < half; i++) {
        const float a = x[i], b = x[half + i], c = table[i], s = table[half + i];
        y[i] = a * c - b * s;
        y[half + i] = b * c + a * s;
    }
}

static void moe_compute_rotary_row(const moe_run *run, const moe_node *t, size_t row) {
    const moe_rotary_op *o = &t->rotary;
    const size_t width = o->width, position = (size_t)run->frame->positions[row],
                 turned = o->table ? o->table->cols : 0;
    const float *x = moe_row_of(t->src[0], row), *from = x;
    const float *table = turned ? (const float *)o->table->data + position * turned : NULL;
    float *y = moe_row_of(t, row);
    for (size_t head = 0; head < o->queries + o->keys; head++, x += width, y += width, from = x) {
        const moe_norm_op norm = { head < o->queries ? o->query_norm : o->key_norm, NULL, o->epsilon, 1 };
        if (norm.weight && !o->norm_last) run->kernels->norm(&norm, x, width, y), from = y;
        if (table) {
            moe_rotary(table, from, turned / 2, y);
            if (from != y) memcpy(y + turned, from + turned, (width - turned) * sizeof *y);
            from = y;
        }
        if (norm.weight && o->norm_last) run->kernels->norm(&norm, from, width, y);
    }
    memcpy(y, x, o->keys * width * sizeof *y);
}

/* ==== 25. Ops: carried rows ===================================================================================
 * Ops that read and write carried rows, which outlive a run (moe_carry lists the kinds). Invariant: all gathers precede
 * the stores to the same rows, so no second buffer is needed. */

static moe_node *moe_op_gather(moe_graph *g, float *rows, size_t cols, const char *name) {
    return MOE_ADD_NODE(g, name, .op = MOE_OP_GATHER, .cols = cols,
                        .carried = { MOE_BY_PARENT, { MOE_TYPE_F32, cols, cols }, rows });
}

static void moe_compute_gather_row(const moe_run *run, const moe_node *t, size_t row) {
    const int32_t parent = run->frame->beam.parents[row];
    if (parent < 0) memset(moe_row_of(t, row), 0, t->cols * sizeof(float));
    else memcpy(moe_row_of(t, row), t->carried.rows + (size_t)parent * t->cols, t->cols * sizeof(float));
}

static moe_node *moe_op_store(moe_graph *g, moe_node *x, moe_carry by, float *rows, const char *name) {
    return MOE_ADD_NODE(g, name, .op = MOE_OP_STORE, .src = { x }, .cols = x->cols,
                        .carried = { by, { MOE_TYPE_F32, x->cols, x->cols }, rows });
}

static void moe_compute_store_row(const moe_run *run, const moe_node *t, size_t row) {
    const moe_frame *f = run->frame;
    size_t to = row;
    if (t->carried.by == MOE_BY_SOURCE) to = f->packed.destination[row];
    if (t->carried.by == MOE_BY_TOKEN) /* the row's own index, the last of its chain */
        to = (size_t)f->beam.chain[row * run->graph->max_target + (size_t)f->positions[row]];
    moe_keep keep = t->carried.keep;
    const float *x = moe_row_of(t->src[0], row);
    char *kept = (char *)(void *)t->carried.rows + to * moe_keep_bytes(&keep);
    if (keep.type != MOE_TYPE_Q8) keep.group = keep.cols; /* without scales per group, store the row in one piece */
    for (size_t group = 0; group < keep.cols / keep.group; group++, x += keep.group)
        moe_keep_group(&keep, x, group, kept);
}

/* ==== 26. Ops: recurrences ====================================================================================
 * LSTM cells: one step for the rows of a beam, or a whole layer for packed sentences. Invariant: z, the sums of the
 * four gates, remains in a thread's cache from the products to the cell. */

/* Return the size in floats of a thread's buffer for z, the sums of the four gates. It holds as many rows and units as
 * fit in the cache, and at least one row. The units of a row are split only if they are a multiple of 16. */
static size_t moe_cell_floats(size_t rows, size_t hidden) {
    enum { FLOATS = 1 << 15 };
    return moe_max(moe_row_stride(4 * (hidden % 16 ? hidden : 16)), moe_min(FLOATS, rows * moe_row_stride(4 * hidden)));
}

/* Add a node for one step of LSTM cells with rows [h | c]. It computes z = w_x x + bias + w_r r without storing it. */
static moe_node *moe_op_lstm_step(moe_graph *g, const moe_cell *cell, moe_node *x, moe_node *r, moe_node *c,
                                  const char *name) {
    moe_node *x_input = moe_op_factor(g, &cell->w_x, x), *r_input = moe_op_factor(g, &cell->w_r, r);
    return MOE_ADD_NODE(g, name, .op = MOE_OP_LSTM_STEP, .src = { x_input, r_input, c }, .cols = 2 * cell->hidden,
                        .lstm = { .cell = cell });
}

static void moe_lstm_step_scratch(const moe_graph *g, moe_node *t, moe_layout *at) {
    moe_carve_threads(g, t, at, moe_cell_floats(g->rows, t->lstm.cell->hidden));
}

typedef struct moe_strided {
    float *at;
    size_t stride;
} moe_strided;

/* One step of LSTM cells for several rows, split by units and rows so that z remains in a thread's cache. */
typedef struct moe_cells {
    const moe_run *run;
    const moe_node *t;
    const moe_linear *x;        /* w_x x + bias; NULL if r adds precomputed values */
    const moe_linear *r;        /* w_r r */
    moe_strided c_in, h, c_out; /* c_out may be c_in */
    size_t rows, unit_tasks, row_tasks;
} moe_cells;

/* Compute outputs [first, first + count) of a product for `rows` rows from row0 on. If `onto` is set, add them to y. */
static void moe_linear_piece(const moe_kernels *kernels, const moe_linear *l, size_t row0, size_t rows, size_t first,
                             size_t count, int onto, float *y, size_t y_stride, const void *next) {
    moe_matrix w;
    moe_linear piece = moe_linear_cut(l, row0, first, count, &w);
    piece.next = next;
    if (onto) piece.add = y, piece.add_stride = y_stride;
    piece.y = y;
    piece.y_stride = y_stride;
    kernels->linear(&piece, 0, rows, 0, moe_divide_up(count, 16));
}

static void moe_cells_task(void *arg, size_t task, size_t thread) {
    const moe_cells *job = arg;
    const moe_kernels *kernels = job->run->kernels;
    const size_t hidden = job->t->lstm.cell->hidden, blocks = moe_divide_up(hidden, 16), cut = task / job->row_tasks;
    const size_t unit = blocks * cut / job->unit_tasks * 16,
                 end = moe_min(hidden, blocks * (cut + 1) / job->unit_tasks * 16);
    const size_t row0 = job->rows * (task % job->row_tasks) / job->row_tasks;
    const size_t row1 = job->rows * (task % job->row_tasks + 1) / job->row_tasks;
    const size_t units = end - unit, stride = moe_row_stride(4 * units), parts = units == hidden ? 1 : 4,
                 count = 4 * units / parts;
    float *z = moe_thread_of(job->t, thread);
    for (size_t p = 0; p < parts; p++) {
        const size_t first = p * hidden + unit;
        const void *r = moe_matrix_part(job->r->w, first, count).data, *next = NULL;
        if (p + 1 < parts) next = moe_matrix_part((job->x ? job->x : job->r)->w, first + hidden, count).data;
        if (job->x) moe_linear_piece(kernels, job->x, row0, row1 - row0, first, count, 0, z + p * count, stride, r);
        moe_linear_piece(kernels, job->r, row0, row1 - row0, first, count, job->x != NULL, z + p * count, stride, next);
    }
    for (size_t row = row0; row < row1; row++)
        kernels->lstm_cell(z + (row - row0) * stride, job->c_in.at + row * job->c_in.stride + unit, units,
                           job->t->lstm.cell->forget_bias, job->h.at + row * job->h.stride + unit,
                           job->c_out.at + row * job->c_out.stride + unit);
}

static void moe_cells_run(moe_cells *job) {
    /* Tasks with few rows and many units are faster than tasks with many rows and few units. */
    enum { LEAST = 1 << 16, PER_THREAD = 4, UNITS = 192 };
    const size_t hidden = job->t->lstm.cell->hidden, rows = job->rows,
                 cols = job->r->w->cols + (job->x ? job->x->w->cols : 0);
    const size_t threads = job->run->pool->count,
                 wanted = moe_min(threads * PER_THREAD, rows * 4 * hidden * cols / LEAST);
    const size_t floats = job->t->thread_floats / rows, units = moe_max(UNITS, floats > 16 ? (floats - 16) / 4 : 0);
    job->unit_tasks = hidden % 16 ? 1 : moe_max(wanted, moe_divide_up(hidden, units));
    if (job->unit_tasks > 1) job->unit_tasks = moe_min(hidden / 16, moe_round_up(job->unit_tasks, threads));
    job->unit_tasks = moe_max(job->unit_tasks, 1);
    size_t most = moe_min(hidden, moe_divide_up(moe_divide_up(hidden, 16), job->unit_tasks) * 16);
    job->row_tasks = moe_divide_up(rows, job->t->thread_floats / moe_row_stride(4 * most));
    if (hidden % 16) job->row_tasks = moe_min(rows, moe_max(job->row_tasks, wanted));
    moe_pool_run(job->run->pool, job->unit_tasks * job->row_tasks, moe_cells_task, job);
}

static void moe_compute_lstm_step(const moe_run *run, const moe_node *t) {
    const moe_node *c = t->src[2];
    moe_linear x = moe_linear_from(&t->lstm.cell->w_x, t->src[0], 0, NULL, 0);
    const moe_linear r = moe_linear_from(&t->lstm.cell->w_r, t->src[1], 0, NULL, 0);
    moe_cells job = { run, t, &x, &r, .rows = run->frame->rows };
    job.c_in = (moe_strided){ c->data, c->stride };
    job.h = (moe_strided){ t->data, t->stride };
    job.c_out = (moe_strided){ (float *)t->data + t->lstm.cell->hidden, t->stride };
    x.bias = t->lstm.cell->bias;
    moe_cells_run(&job);
}

/* Add a node for an LSTM layer in one direction over packed sentences; zx = w_x x + bias, [T, 4H]. */
static moe_node *moe_op_lstm_layer(moe_graph *g, const moe_cell *cell, int backward, moe_node *zx, const char *name) {
    return MOE_ADD_NODE(g, name, .op = MOE_OP_LSTM_LAYER, .src = { zx }, .cols = cell->state,
                        .lstm = { .cell = cell, .backward = backward });
}

static void moe_lstm_layer_scratch(const moe_graph *g, moe_node *t, moe_layout *at) {
    const size_t n = g->sentences, hidden = t->lstm.cell->hidden, state = t->lstm.cell->state;
    moe_lstm_work *w = &t->work.lstm;
    w->c = moe_carve(at, n * hidden, sizeof *w->c);
    w->h = moe_carve(at, n * hidden, sizeof *w->h);
    w->r = moe_carve(at, n * state, sizeof *w->r);
    w->h_codes = moe_carve(at, n, moe_code_bytes(hidden));
    w->r_codes = moe_carve(at, n, moe_code_bytes(state));
    w->h_scales = g->blocks ? NULL : moe_carve(at, n, sizeof *w->h_scales);
    w->r_scales = g->blocks ? NULL : moe_carve(at, n, sizeof *w->r_scales);
    moe_carve_threads(g, t, at, moe_cell_floats(n, hidden));
}

/* Convert rows to the operand of a product with w: codes or contiguous floats. */
static void moe_recode(const moe_run *run, const moe_matrix *w, float *x, size_t stride, size_t rows, int8_t *codes,
                       float *scales, float *floats) {
    moe_node from = { .data = x, .stride = stride };
    const moe_node to = { .src = { &from },
                          .cols = w->cols,
                          .stride = moe_code_bytes(w->cols),
                          .data = codes,
                          .scales = scales };
    if (moe_type_quantised(w->type)) moe_for_rows(run, &to, rows, w->cols, moe_compute_quantise_row);
    else if (floats != x)
        for (size_t i = 0; i < rows; i++) memcpy(floats + i * w->cols, x + i * stride, w->cols * sizeof *x);
}

static void moe_compute_lstm_layer(const moe_run *run, const moe_node *t) {
    const moe_cell *w = t->lstm.cell;
    const moe_packed *f = &run->frame->packed;
    const size_t hidden = w->hidden, state = w->state;
    const moe_lstm_work *s = &t->work.lstm;
    const size_t begun = f->live[0]; /* every sentence starts from a zero state */
    memset(s->c, 0, begun * hidden * sizeof *s->c);
    memset(s->r, 0, begun * state * sizeof *s->r);
    memset(s->r_codes, 0, begun * moe_code_bytes(state));
    if (s->r_scales) memset(s->r_scales, 0, begun * sizeof *s->r_scales);
    for (size_t n = 0; n < f->steps; n++) {
        const size_t step = t->lstm.backward ? f->steps - 1 - n : n, live = f->live[step], first = f->first[step];
        const moe_strided out = { moe_row_of(t, first), t->stride }, c = { s->c, hidden };
        moe_linear r = moe_linear_of(&w->w_r, s->r, state, s->r_codes, s->r_scales, NULL, 0);
        moe_cells cells = { run, t, NULL, &r, c, w->w_proj.rows ? (moe_strided){ s->h, hidden } : out, c, live, 0, 0 };
        r.add = moe_row_of(t->src[0], first);
        r.add_stride = t->src[0]->stride;
        moe_cells_run(&cells);
        if (w->w_proj.rows) {
            const moe_linear project =
                moe_linear_of(&w->w_proj, s->h, hidden, s->h_codes, s->h_scales, out.at, out.stride);
            moe_recode(run, &w->w_proj, s->h, hidden, live, s->h_codes, s->h_scales, s->h);
            moe_linear_run(run, &project, live);
        }
        moe_recode(run, &w->w_r, out.at, out.stride, live, s->r_codes, s->r_scales, s->r);
    }
    for (size_t i = 0, end = f->steps; t->lstm.last_r && i < f->live[0]; i++) {
        while (f->live[end - 1] <= i) end--;
        const float *last = moe_row_of(t, f->first[t->lstm.backward ? 0 : end - 1] + i);
        memcpy(t->lstm.last_r + f->sentence[i] * state, last, state * sizeof(float));
        memcpy(t->lstm.last_c + f->sentence[i] * hidden, s->c + i * hidden, hidden * sizeof(float));
    }
}

/* SSRU (Kim et al. 2019, D19-5632): c' = f c + (1 - f) u, y = relu(c'). c is the gathered row of the previous step. */
static moe_node *moe_op_ssru(moe_graph *g, moe_node *u, moe_node *f, moe_node *c, const char *name) {
    return MOE_ADD_NODE(g, name, .op = MOE_OP_SSRU, .src = { u, f, c }, .cols = 2 * u->cols);
}

/* Add a node for the mean of a sentence's rows so far. Its `sum` is carried from step to step like the c of an SSRU. */
static moe_node *moe_op_average(moe_graph *g, moe_node *x, moe_node *sum, const char *name) {
    return MOE_ADD_NODE(g, name, .op = MOE_OP_AVERAGE, .src = { x, sum }, .cols = 2 * x->cols);
}

/* Compute a row of an SSRU or, without f, of a mean. Rows of given tokens, which follow their sentence's first row,
 * take c from the row above; no product reads c. */
static void moe_compute_ssru_row(const moe_run *run, const moe_node *t, size_t row) {
    const int32_t *parents = run->frame->beam.parents;
    const moe_node *forget = t->src[2] ? t->src[1] : NULL;
    const float *c = moe_row_of(forget ? t->src[2] : t->src[1], row);
    const size_t n = t->cols / 2;
    if (parents[row] == MOE_ROW_ABOVE) return; /* the loop for the sentence's first row computes this row */
    do {
        const float *u = moe_row_of(t->src[0], row), *f = forget ? moe_row_of(forget, row) : NULL;
        const float count = (float)(run->frame->positions[row] + 1);
        float *y = moe_row_of(t, row);
        for (size_t i = 0; i < n; i++) {
            y[n + i] = f ? f[i] * c[i] + (1.0f - f[i]) * u[i] : c[i] + u[i];
            y[i] = !f ? y[n + i] / count : y[n + i] < 0.0f ? 0.0f : y[n + i];
        }
        c = y + n;
    } while (++row < run->frame->rows && parents[row] == MOE_ROW_ABOVE);
}
#define moe_compute_average_row moe_compute_ssru_row

/* Add Gated DeltaNet for x. A row is [y | convolved q, k, v | decay of each head | beta of each head]. Rows of given
 * tokens, which follow their sentence's first row, continue its state in this run. */
static moe_node *moe_op_delta(moe_graph *g, const moe_delta_op *op, moe_node *x, const char *name) {
    return MOE_ADD_NODE(g, name, .op = MOE_OP_DELTA, .src = { x }, .cols = op->values + op->conv_cols + 2 * op->heads,
                        .delta = *op);
}

static void moe_delta_scratch(const moe_graph *g, moe_node *t, moe_layout *at) {
    t->work.starts = moe_carve(at, g->rows, sizeof *t->work.starts);
    moe_carve_threads(g, t, at, moe_round_up(t->delta.head_size, MOE_LANES) * t->delta.key_size);
}

static float *moe_delta_state(const moe_run *run, const moe_node *t, size_t start) {
    return t->delta.states + (size_t)run->frame->beam.states[start] * t->delta.state_cols;
}

/* Return the row carried by guess of a guess or, for a hypothesis's first row, of the first right guess. */
static float *moe_delta_guess(const moe_run *run, const moe_node *t, size_t row) {
    return t->delta.guesses + (size_t)run->frame->beam.guesses[row] * t->delta.guess_cols;
}

/* Append the inputs of `tokens` rows to a state's inputs of the convolution. */
static void moe_delta_append(const moe_delta_op *s, float *state, const float *in, size_t stride, size_t tokens) {
    const size_t kept = s->kernel - 1, cols = s->conv_cols;
    for (size_t k = 0; k < kept; k++)
        memmove(state + k * cols, k + tokens < kept ? state + (k + tokens) * cols : in + (k + tokens - kept) * stride,
                cols * sizeof *state);
}

/* Clear the state of a new sentence, or copy the state of a parent that another child updates in place. Append the
 * convolution's inputs of right guesses. */
static void moe_delta_begin(const moe_run *run, const moe_node *t, size_t row) {
    const moe_beam *b = &run->frame->beam;
    const size_t cols = t->delta.state_cols;
    if (b->parents[row] == MOE_ROW_ABOVE) return;
    float *state = moe_delta_state(run, t, row);
    if (b->right[row])
        moe_delta_append(&t->delta, state, moe_delta_guess(run, t, row), t->delta.guess_cols, (size_t)b->right[row]);
    if (b->origins[row] == b->states[row]) return;
    if (b->origins[row] < 0) memset(state, 0, cols * sizeof *state);
    else memcpy(state, t->delta.states + (size_t)b->origins[row] * cols, cols * sizeof *state);
}

/* Compute all of a row but y: the convolution, q and k divided by their lengths, and the gates. */
static void moe_delta_row(const moe_run *run, const moe_node *t, size_t row) {
    const moe_delta_op *s = &t->delta;
    const size_t cols = s->conv_cols;
    const float *b = moe_row_of(t->src[0], row) + cols + s->values, *a = b + s->heads;
    float *y = moe_row_of(t, row) + s->values, *decay = y + cols, *beta = decay + s->heads;
    size_t start = row;
    while (run->frame->beam.parents[start] == MOE_ROW_ABOVE) start--;
    const float *state = moe_delta_state(run, t, start);
    memset(y, 0, cols * sizeof *y);
    for (size_t k = 0; k < s->kernel; k++) { /* the input of s->kernel - 1 - k tokens ago */
        const size_t ago = s->kernel - 1 - k;
        const float *w = s->conv + k * cols,
                    *in = row - start >= ago ? moe_row_of(t->src[0], row - ago) : state + (k + row - start) * cols;
        for (size_t c = 0; c < cols; c++) y[c] = y[c] + w[c] * in[c];
    }
    run->kernels->unary(MOE_UNARY_SWISH, y, cols, y);
    for (size_t head = 0; head < 2 * s->key_heads; head++, y += s->key_size) {
        const float root = head < s->key_heads ? sqrtf((float)s->key_size) : 1.0f; /* divides queries */
        const float scale = 1.0f / (sqrtf(run->kernels->dot(y, y, s->key_size) + 1e-6f) * root);
        for (size_t c = 0; c < s->key_size; c++) y[c] = y[c] * scale;
    }
    for (size_t h = 0; h < s->heads; h++) {
        decay[h] = moe_expf(s->rate[h] * moe_softplus(a[h] + s->shift[h]));
        beta[h] = moe_sigmoidf(b[h]);
    }
}

/* Compute y of one value head for all rows of a hypothesis, after the right guesses of the previous run. The state does
 * not include guesses of this run. The last task stores the inputs of the convolution. */
static void moe_delta_task(void *arg, size_t task, size_t thread) {
    const moe_job *job = arg;
    const moe_node *t = job->t;
    const moe_beam *b = &job->run->frame->beam;
    const moe_delta_op *s = &t->delta;
    const size_t head = task % (s->heads + 1), at = task / (s->heads + 1), start = t->work.starts[at];
    const size_t end = at + 1 < job->end ? t->work.starts[at + 1] : job->run->frame->rows, cols = s->conv_cols;
    const size_t size = s->key_size, floats = moe_round_up(s->head_size, MOE_LANES) * size;
    const size_t key = s->tiled ? head % s->key_heads : head / (s->heads / s->key_heads);
    float *state = moe_delta_state(job->run, t, start);
    size_t tokens = end - start;
    while (tokens > 1 && b->guesses[start + tokens - 1] >= 0) tokens--;
    if (head == s->heads) {
        moe_delta_append(s, state, moe_row_of(t->src[0], start), t->src[0]->stride, tokens);
        return;
    }
    state += (s->kernel - 1) * cols + head * floats;
    moe_delta d = { moe_row_of(t, start),
                    t->stride,
                    tokens,
                    s->values + key * size,
                    s->values + (s->key_heads + key) * size,
                    s->values + 2 * s->key_heads * size + head * s->head_size,
                    s->values + cols + head,
                    s->values + cols + s->heads + head,
                    head * s->head_size,
                    size,
                    s->head_size,
                    state };
    moe_delta right = d, guesses = d;
    right.row = b->right[start] ? moe_delta_guess(job->run, t, start) + cols : NULL;
    right.stride = s->guess_cols, right.tokens = (size_t)b->right[start];
    if (right.tokens) job->run->kernels->delta(&right);
    job->run->kernels->delta(&d);
    guesses.row = moe_row_of(t, start + tokens), guesses.tokens = end - start - tokens;
    guesses.state = moe_thread_of(t, thread);
    if (!guesses.tokens) return;
    memcpy(guesses.state, state, floats * sizeof *state);
    job->run->kernels->delta(&guesses);
}

/* Store how a guess changes the state. Its hypothesis must have used the rows that this overwrites. */
static void moe_delta_keep(const moe_run *run, const moe_node *t, size_t row) {
    const moe_delta_op *s = &t->delta;
    const moe_beam *b = &run->frame->beam;
    if (b->parents[row] != MOE_ROW_ABOVE || b->guesses[row] < 0) return;
    float *to = moe_delta_guess(run, t, row);
    memcpy(to, moe_row_of(t->src[0], row), s->conv_cols * sizeof *to);
    memcpy(to + s->conv_cols + s->values, moe_row_of(t, row) + s->values, (t->cols - s->values) * sizeof *to);
}

static void moe_compute_delta(const moe_run *run, const moe_node *t) {
    const moe_beam *b = &run->frame->beam;
    const size_t rows = run->frame->rows;
    moe_job job = { run, t, 0, 0, 0, NULL };
    int guessed = 0;
    for (size_t row = 0; row < rows; row++) {
        if (b->parents[row] != MOE_ROW_ABOVE) t->work.starts[job.end++] = row;
        else guessed |= b->guesses[row] >= 0;
    }
    moe_for_rows(run, t, rows, t->delta.state_cols, moe_delta_begin);
    moe_for_rows(run, t, rows, 8 * t->cols, moe_delta_row);
    moe_pool_run(run->pool, job.end * (t->delta.heads + 1), moe_delta_task, &job);
    if (guessed) moe_for_rows(run, t, rows, t->cols, moe_delta_keep);
}

/* ==== 27. Ops: attention ======================================================================================
 * The context of a row: a weighted sum of values from the source sentence or from the row's own sentence. */

/* Add GNMT's attention to keys [tokens, size] and values [tokens, width], which are carried by source. `before` is NULL
 * or holds the contexts of the previous step, which are copied except for rows that start a sentence. */
static moe_node *moe_op_attention(moe_graph *g, const moe_attention_op *attention, moe_node *query, moe_node *before,
                                  size_t width, const char *name) {
    return MOE_ADD_NODE(g, name, .op = MOE_OP_ATTENTION, .src = { query, before }, .cols = width,
                        .attention = *attention);
}

static void moe_attention_scratch(const moe_graph *g, moe_node *t, moe_layout *at) {
    moe_carve_threads(g, t, at, moe_round_up(g->max_source + t->src[0]->cols, 16)); /* scores, then the scaled query */
}

/* Compute the context sum p_i value_i with p = softmax(s). Additive scores (GNMT) are s_i = v . tanh(key_i + query),
 * product scores (App. G) are s_i = sum_d v_d tanh(x_i U)_d tanh(q W)_d, where the keys already hold tanh(x U). */
static void moe_compute_attention_row(const moe_run *run, const moe_node *t, size_t row) {
    const moe_attention_op *a = &t->attention;
    const moe_kernels *kernels = run->kernels;
    const moe_beam *f = &run->frame->beam;
    const size_t n = f->length[row], size = t->src[0]->cols, width = t->cols;
    const float *keys = a->keys + f->segment[row] * size, *values = a->values + f->segment[row] * width;
    const float *query = moe_row_of(t->src[0], row);
    float *scores = moe_thread_of(t, run->thread), *scaled = scores + run->graph->max_source;
    const int begins = f->parents[row] < 0 || (size_t)f->parents[row] >= run->graph->rows;
    float *context = moe_row_of(t, row);
    if (t->src[1] && !begins) {
        memcpy(context, moe_row_of(t->src[1], row), width * sizeof *context);
        return;
    }
    memset(context, 0, width * sizeof *context);
    if (a->start_zero && begins) {
        memset(scores, 0, n * sizeof *scores);
    } else {
        if (a->product)
            for (size_t d = 0; d < size; d++) scaled[d] = a->v[d] * query[d];
        for (size_t i = 0; i < n; i++)
            scores[i] = a->product ? kernels->dot(keys + i * size, scaled, size)
                                   : kernels->score_additive(keys + i * size, query, a->v, size);
        moe_softmax(kernels, scores, n, scores);
        for (size_t i = 0; i < n; i++) kernels->axpy(scores[i], values + i * width, width, context);
    }
    if (f->attention) memcpy(f->attention + row * run->graph->max_source, scores, n * sizeof *scores);
}
/* Add multi-head attention; moe_heads_op explains `within` and `rows`. */
static moe_node *moe_op_heads(moe_graph *g, size_t heads, size_t share, int within, const float *rows,
                              moe_node *queries, size_t cols, const char *name) {
    const size_t width = cols / heads;
    const moe_heads_op op = { .heads = heads,
                              .share = share,
                              .within = within,
                              .keep = { MOE_TYPE_F32, 2 * cols / share, width },
                              .rows = rows,
                              .scale = 1.0f / sqrtf((float)width) };
    return MOE_ADD_NODE(g, name, .op = MOE_OP_HEADS, .src = { queries }, .cols = cols, .heads = op);
}

enum { MOE_HEADS_ROWS = 4 };   /* rows per task; rows of one sentence read the same keys and values */
enum { MOE_HEADS_BLOCK = 16 }; /* keys or values of a row to unpack at a time */

static void moe_heads_scratch(const moe_graph *g, moe_node *t, moe_layout *at) {
    moe_heads_work *w = &t->work.heads;
    w->longest = moe_round_up(moe_max(g->max_source, g->max_target), 16);
    w->seen = moe_carve(at, g->threads * MOE_HEADS_ROWS * w->longest, sizeof *w->seen);
    w->scores = moe_carve(at, g->threads * MOE_HEADS_ROWS * t->heads.heads * w->longest, sizeof *w->scores);
    w->unpacked_stride = t->heads.keep.type ? moe_row_stride(t->cols / t->heads.share) : 0;
    w->unpacked = moe_carve(at, g->threads * MOE_HEADS_ROWS * MOE_HEADS_BLOCK * w->unpacked_stride, sizeof(float));
}

/* List the rows of keys and values that a row attends to, in token order. Returns the number of rows. */
static size_t moe_heads_seen(const moe_run *run, const moe_node *t, size_t row, const float **seen) {
    const moe_frame *f = run->frame;
    const moe_beam *b = &f->beam;
    const size_t bytes = moe_keep_bytes(&t->heads.keep), position = (size_t)f->positions[row];
    const char *rows = (const char *)t->heads.rows;
    size_t n = 0;
    if (!rows) /* position p of sentence i is row first[p] + i */
        for (size_t i = row - f->packed.first[position]; n < f->packed.steps && f->packed.live[n] > i; n++)
            seen[n] = moe_row_of(t->src[0], f->packed.first[n] + i) + t->cols;
    else if (t->heads.within)
        for (size_t i = moe_window_start(t->heads.window, position); i <= position; i++)
            seen[n++] =
                (const float *)(const void *)(rows + (size_t)b->chain[row * run->graph->max_target + i] * bytes);
    else
        for (; n < b->length[row]; n++) seen[n] = (const float *)(const void *)(rows + (b->segment[row] + n) * bytes);
    return n;
}

/* Compute the scores or the sums of values, depending on `part`, for `rows` rows from `row` on if keys and values are
 * not F32. Blocks are unpacked one at a time, for all rows that attend to the same tokens as the first row. */
static void moe_heads_unpacked(const moe_run *run, const moe_node *t, moe_heads *h, size_t rows, size_t row, int part,
                               size_t thread) {
    const moe_heads_work *w = &t->work.heads;
    const size_t half = t->heads.keep.cols / 2;
    const float **seen = w->seen + thread * MOE_HEADS_ROWS * w->longest;
    size_t n[MOE_HEADS_ROWS], longest = 0;
    for (size_t r = 0; r < rows; r++) {
        n[r] = moe_heads_seen(run, t, row + r, seen + r * w->longest);
        longest = moe_max(longest, n[r]);
    }
    for (size_t first = 0; first < longest; first += MOE_HEADS_BLOCK) {
        for (size_t r = rows; r-- > 0;) {
            h[r].first = first, h[r].n = moe_max(first, moe_min(n[r], first + MOE_HEADS_BLOCK));
            for (size_t i = first; i < h[r].n; i++) {
                const float **at = seen + r * w->longest + i;
                const int own = !r || i >= n[0] || *at != seen[i];
                const size_t place = (thread * MOE_HEADS_ROWS + (own ? r : 0)) * MOE_HEADS_BLOCK + i - first;
                float *to = w->unpacked + place * w->unpacked_stride;
                if (own) run->kernels->unpack(&t->heads.keep, *at, part == MOE_HEADS_BLEND ? half : 0, half, to);
                *at = to;
            }
            h[r].parts = part, h[r].values = 0;
        }
        run->kernels->heads(h, rows);
    }
    for (size_t r = 0; r < rows; r++) h[r].n = n[r], h[r].first = 0, h[r].parts = MOE_HEADS_SOFTMAX;
}

static void moe_mean_of_heads(const moe_heads *h, uint64_t shown, float *mean) {
    float n = 0.0f;
    memset(mean, 0, h->n * sizeof *mean);
    for (size_t head = 0; head < h->heads; head++) {
        if (!(shown >> head & 1)) continue;
        n += 1.0f;
        for (size_t i = 0; i < h->n; i++) mean[i] += h->scores[head * h->stride + i];
    }
    for (size_t i = 0; i < h->n; i++) mean[i] /= n;
}

/* Add the terms that depend on distances to the scores or, with `blend`, to the sums of values. Equal rows of the terms
 * are multiplied once. */
static void moe_add_distances(const moe_run *run, const moe_node *t, const moe_heads *h, size_t row, int blend) {
    const moe_distances *d = &t->heads.distances;
    const size_t position = (size_t)run->frame->positions[row], width = h->width;
    const size_t start = t->heads.rows ? moe_window_start(t->heads.window, position) : 0;
    for (size_t head = 0; head < h->heads; head++) {
        float *scores = h->scores + head * h->stride, product = 0.0f;
        size_t last = SIZE_MAX;
        for (size_t i = 0; i < h->n; i++) {
            const size_t at = moe_distance_row(d->reach, start + i, position);
            if (blend) {
                product = at == last ? product + scores[i] : scores[i];
                if (i + 1 == h->n || moe_distance_row(d->reach, start + i + 1, position) != at)
                    run->kernels->axpy(product, d->values + at * width, width, h->y + head * width);
            } else {
                if (d->keys && at != last)
                    product = run->kernels->dot(h->query + head * width, d->keys + at * width, width) * h->scale;
                scores[i] += d->bias ? d->bias[at * h->heads + head] : product;
            }
            last = at;
        }
    }
}

/* Compute all heads of several rows. In the encoder the rows are positions of one sentence, which are not adjacent. */
static void moe_heads_task(void *arg, size_t task, size_t thread) {
    const moe_job *job = arg;
    const moe_run *run = job->run;
    const moe_node *t = job->t;
    const moe_packed *packed = t->heads.rows ? NULL : &run->frame->packed;
    const moe_beam *b = &run->frame->beam;
    const size_t heads = t->heads.heads, width = t->cols / heads, sentences = packed ? packed->live[0] : 1;
    const moe_heads_work *w = &t->work.heads;
    moe_heads h[MOE_HEADS_ROWS];
    size_t n = 0, at[MOE_HEADS_ROWS];
    for (; n < job->rows_per_task; n++) {
        const size_t place = task / sentences * job->rows_per_task + n, spot = thread * MOE_HEADS_ROWS + n;
        const float **seen = w->seen + spot * w->longest;
        size_t row = place;
        if (place >= (packed ? packed->steps : run->frame->rows)) break;
        if (packed && packed->live[place] <= task % sentences) break;
        if (packed) row = packed->first[place] + task % sentences;
        at[n] = row;
        h[n] = (moe_heads){ .query = moe_row_of(t->src[0], row),
                            .rows = seen,
                            .n = moe_heads_seen(run, t, row, seen),
                            .values = t->cols / t->heads.share,
                            .heads = heads,
                            .share = t->heads.share,
                            .width = width,
                            .scale = t->heads.scale,
                            .scores = w->scores + spot * heads * w->longest,
                            .stride = w->longest,
                            .y = moe_row_of(t, row),
                            .parts = MOE_HEADS_ALL };
    }
    const size_t row0 = task * job->rows_per_task;
    const moe_distances *d = &t->heads.distances;
    const int unpacks = t->heads.keep.type != MOE_TYPE_F32, apart = !unpacks && d->reach;
    if (unpacks) moe_heads_unpacked(run, t, h, n, row0, MOE_HEADS_SCORES, thread);
    for (size_t i = 0; apart && i < n; i++) h[i].parts = MOE_HEADS_SCORES;
    if (apart && n) run->kernels->heads(h, n);
    for (size_t i = 0; (d->bias || d->keys) && i < n; i++) moe_add_distances(run, t, &h[i], at[i], 0);
    for (size_t i = 0; apart && i < n; i++) h[i].parts = MOE_HEADS_SOFTMAX | MOE_HEADS_BLEND;
    if (n) run->kernels->heads(h, n);
    if (unpacks) moe_heads_unpacked(run, t, h, n, row0, MOE_HEADS_BLEND, thread);
    for (size_t i = 0; d->values && i < n; i++) moe_add_distances(run, t, &h[i], at[i], 1);
    for (size_t i = 0, row = row0; t->heads.shown && b->attention && i < n; i++, row++)
        moe_mean_of_heads(&h[i], t->heads.shown, b->attention + row * run->graph->max_source);
}

static void moe_compute_heads(const moe_run *run, const moe_node *t) {
    const size_t rows = run->frame->rows, pays = rows / (2 * run->pool->count);
    moe_job job = { run, t, 0, rows, moe_max(1, moe_min(MOE_HEADS_ROWS, pays)), NULL };
    const moe_packed *packed = &run->frame->packed;
    const size_t tasks = t->heads.rows ? moe_divide_up(rows, job.rows_per_task)
                                       : packed->live[0] * moe_divide_up(packed->steps, job.rows_per_task);
    moe_pool_run(run->pool, tasks, moe_heads_task, &job);
}

/* ==== 28. Ops: gates ==========================================================================================
 * The selection of experts. Invariant: a row's selections are ascending and do not exceed the gate's capacity. Rows are
 * independent, except in batchwise gates, which are for analysis. */

/* Add a gate. For a gate over all experts or groups, x holds logits, `second` noise logits (or NULL). For gates inside
 * groups (`grouped`), x holds features, `second` the selected groups. moe_gate_op explains `layer`. */
static moe_node *moe_op_gate(moe_graph *g, const moe_gating *gating, moe_node *x, moe_node *second, int grouped,
                             const char *layer, const char *name) {
    const size_t groups = grouped ? second->cols : 1;
    const moe_gate kind = g->gating ? (moe_gate)(g->gating - 1) : gating->kind;
    const size_t capacity = (kind == MOE_GATE_TOPK ? gating->k : gating->level) * (grouped ? second->gate.capacity : 1);
    moe_node *t = MOE_ADD_NODE(g, name, .op = MOE_OP_GATE, .src = { x, second }, .cols = groups * gating->level,
                               .gate = { gating, kind, grouped, capacity, layer });
    t->stride = moe_row_stride(2 + 2 * capacity);
    if (g->routed) t->last = SIZE_MAX; /* the session reads selections after the run */
    g->mixes |= kind == MOE_GATE_BATCHWISE;
    return t;
}

static moe_selection moe_selection_of(const moe_node *gate, size_t row) {
    const moe_selections all = { gate->data, gate->stride, gate->gate.capacity };
    return moe_selection_at(&all, row);
}

/* Carve memory per thread: logits, noise and probabilities, or the best rows of an expert in a batchwise gate. */
static void moe_gate_scratch(const moe_graph *g, moe_node *t, moe_layout *at) {
    const int batchwise = t->gate.kind == MOE_GATE_BATCHWISE;
    const size_t dense = g->rows * t->cols, floats = 3 * moe_round_up(t->gate.gating->level, 16);
    moe_carve_threads(g, t, at, batchwise ? moe_max(floats, 2 * moe_round_up(g->rows, 16)) : floats);
    if (g->traced || batchwise) t->work.gate.probabilities = moe_carve(at, dense, sizeof(float));
    if (g->traced) t->work.gate.dense = moe_carve(at, dense, sizeof(float));
    if (batchwise) t->work.gate.mask = moe_carve(at, dense, 1);
}

/* Multiply rows [first, first + n) of an F32 matrix by one row of features. */
static void moe_gate_product(const moe_run *run, const moe_matrix *w, const float *bias, size_t first, size_t n,
                             int relu, const float *x, float *y) {
    const moe_matrix part = moe_matrix_view(MOE_TYPE_F32, n, w->cols, (const float *)w->data + first * w->cols);
    moe_linear l = moe_linear_of(&part, x, w->cols, NULL, NULL, y, n);
    if (bias) l.bias = bias + first;
    l.relu = relu;
    run->kernels->linear(&l, 0, 1, 0, moe_divide_up(n, 16));
}

/* Return a row's logits for one group or all experts: in `scratch` [2 * level], or in src[0] if they are unchanged. */
static const float *moe_gate_logits(const moe_run *run, const moe_node *t, size_t row, size_t group, float *scratch) {
    const moe_gating *gating = t->gate.gating;
    const size_t n = gating->level, first = group * n;
    const float *x = moe_row_of(t->src[0], row), *noise = scratch + moe_round_up(n, 16);
    uint64_t key = run->graph->noise_seed;
    if (t->gate.grouped) moe_gate_product(run, &gating->weight, gating->bias, first, n, gating->relu, x, scratch);
    else if (!run->graph->noise) return x;
    else memcpy(scratch, x, n * sizeof *scratch);
    if (!run->graph->noise) return scratch;
    if (t->gate.grouped) moe_gate_product(run, &gating->noise, NULL, first, n, 0, x, scratch + moe_round_up(n, 16));
    else noise = moe_row_of(t->src[1], row);
    for (const char *c = t->name; *c; c++) key = moe_hash(key ^ (unsigned char)*c);
    key ^= run->frame->keys[row];
    for (size_t i = 0; i < n; i++) scratch[i] = scratch[i] + moe_normal(key, first + i) * moe_softplus(noise[i]);
    return scratch;
}

/* Select the k largest logits, the lower index on ties, and sort the indices. Returns the number selected. */
static size_t moe_select_topk(const float *logits, size_t n, size_t k, uint32_t *chosen) {
    size_t count = 0;
    for (size_t i = 0; i < n; i++) {
        size_t at = count;
        if (count == k && !(logits[i] > logits[chosen[k - 1]])) continue;
        if (count < k) count++;
        else at--;
        for (; at > 0 && logits[i] > logits[chosen[at - 1]]; at--) chosen[at] = chosen[at - 1];
        chosen[at] = (uint32_t)i;
    }
    for (size_t i = 1; i < count; i++) {
        const uint32_t id = chosen[i];
        size_t at = i;
        for (; at > 0 && chosen[at - 1] > id; at--) chosen[at] = chosen[at - 1];
        chosen[at] = id;
    }
    return count;
}

/* Select experts above their threshold (eq 19) or in the mask (eq 18). If none pass, set *empty and use empty_zero. */
static size_t moe_select_masked(const moe_gating *gating, const float *p, const float *threshold, const char *mask,
                                uint32_t *chosen, uint32_t *empty) {
    size_t count = 0, best = 0;
    for (size_t i = 0; i < gating->level; i++) {
        if (p[i] > p[best]) best = i;
        if (mask ? mask[i] : p[i] > threshold[i]) chosen[count++] = (uint32_t)i;
    }
    if (count) return count;
    *empty = 1;
    chosen[0] = (uint32_t)best;
    return !gating->empty_zero;
}

/* Compute p [n], from which a top-k gate derives weights. Returns the ranking values: p or `ranks` [n]. */
static const float *moe_gate_ranks(const moe_kernels *kernels, const moe_gating *gating, const float *logits, float *p,
                                   float *ranks) {
    const size_t n = gating->level;
    if (gating->weights == MOE_WEIGHTS_ALL) moe_softmax(kernels, logits, n, p);
    else kernels->unary(MOE_UNARY_SIGMOID, logits, n, p);
    if (!gating->choice) return p;
    for (size_t i = 0; i < n; i++) ranks[i] = p[i] + gating->choice[i];
    return ranks;
}

/* Select experts of one group, or of all, and append them with their weights: a softmax over the selected logits (eq 3
 * and eq 16 are equal) or sigmoids, multiplied by the weight of the group (eq 12). */
static void moe_gate_append(const moe_run *run, const moe_node *t, size_t row, size_t group, const float *factor) {
    const moe_kernels *kernels = run->kernels;
    const moe_gate_work *work = &t->work.gate;
    float *scratch = moe_thread_of(t, run->thread);
    const moe_gating *gating = t->gate.gating;
    const size_t n = gating->level, first = group * n, at = row * t->cols + first;
    const float *logits = moe_gate_logits(run, t, row, group, scratch);
    const moe_selection s = moe_selection_of(t, row);
    float *p = scratch + 2 * moe_round_up(n, 16), *weights = s.weights + *s.count;
    uint32_t *chosen = s.experts + *s.count;
    size_t count = n;
    if (t->gate.kind == MOE_GATE_THRESHOLD || work->probabilities) moe_softmax(kernels, logits, n, p);
    if (work->probabilities) memcpy(work->probabilities + at, p, n * sizeof *p);
    const int scored = t->gate.kind == MOE_GATE_TOPK && gating->weights != MOE_WEIGHTS_CHOSEN;
    const float *ranks = scored ? moe_gate_ranks(kernels, gating, logits, p, scratch + moe_round_up(n, 16)) : logits;
    if (t->gate.kind == MOE_GATE_TOPK) count = moe_select_topk(ranks, n, gating->k, chosen);
    else if (moe_gate_is_dense(t->gate.kind))
        for (size_t i = 0; i < n; i++) chosen[i] = (uint32_t)i;
    else
        count = moe_select_masked(gating, p, t->gate.kind == MOE_GATE_THRESHOLD ? gating->threshold + first : NULL,
                                  work->mask ? work->mask + at : NULL, chosen, s.empty);
    float sum = 0.0f;
    for (size_t j = 0; j < count; j++) weights[j] = (scored ? p : logits)[chosen[j]], sum = sum + weights[j];
    if (scored && gating->weights == MOE_WEIGHTS_SIGMOID)
        for (size_t j = 0; j < count; j++) weights[j] = weights[j] / (sum + 1e-20f);
    else if (t->gate.kind == MOE_GATE_SIGMOID) kernels->unary(MOE_UNARY_SIGMOID, weights, count, weights);
    else if (!scored) moe_softmax(kernels, weights, count, weights);
    for (size_t j = 0; j < count; j++) {
        if (factor) weights[j] = *factor * weights[j];
        chosen[j] += (uint32_t)first;
    }
    *s.count += (uint32_t)count;
}

static void moe_compute_gate_row(const moe_run *run, const moe_node *t, size_t row) {
    const moe_gate_work *work = &t->work.gate;
    const moe_selection s = moe_selection_of(t, row);
    *s.count = *s.empty = 0;
    if (work->probabilities) memset(work->probabilities + row * t->cols, 0, t->cols * sizeof(float));
    if (t->gate.grouped) {
        const moe_selection groups = moe_selection_of(t->src[1], row);
        *s.empty = *groups.empty;
        for (size_t j = 0; j < *groups.count; j++) moe_gate_append(run, t, row, groups.experts[j], &groups.weights[j]);
    } else moe_gate_append(run, t, row, 0, NULL);
    if (!work->dense) return;
    memset(work->dense + row * t->cols, 0, t->cols * sizeof(float));
    for (size_t j = 0; j < *s.count; j++) work->dense[row * t->cols + s.experts[j]] = s.weights[j];
}

static int moe_gate_competes(const moe_node *t, size_t row, size_t expert) {
    if (!t->gate.grouped) return 1;
    moe_selection groups = moe_selection_of(t->src[1], row);
    for (size_t j = 0; j < *groups.count; j++)
        if (groups.experts[j] == expert / t->gate.gating->level) return 1;
    return 0;
}

/* Compute column `expert` of the batchwise mask (eq 18): rows with the m = k X / n largest of its X probabilities. */
static void moe_batchwise_task(void *arg, size_t expert, size_t thread) {
    const moe_job *job = arg;
    const moe_node *t = job->t;
    const moe_gate_work *work = &t->work.gate;
    float *best = moe_thread_of(t, thread);
    int32_t *rows = (int32_t *)(void *)(best + moe_round_up(job->run->graph->rows, 16));
    size_t competing = 0, m;
    for (size_t r = 0; r < job->end; r++) competing += (size_t)moe_gate_competes(t, r, expert);
    m = moe_min(competing, moe_max(1, t->gate.gating->k * competing / t->gate.gating->level));
    for (size_t i = 0; i < m; i++) best[i] = moe_from_bits(0xff800000u);
    for (size_t r = 0; r < job->end && m; r++)
        if (moe_gate_competes(t, r, expert))
            moe_keep_best(best, rows, m, work->probabilities[r * t->cols + expert], (int32_t)r);
    for (size_t i = 0; i < m && best[i] >= 0.0f; i++) work->mask[(size_t)rows[i] * t->cols + expert] = 1;
}

/* Select the experts of all rows. A batchwise gate first computes all probabilities by row, then the mask by column. */
static void moe_compute_gate(const moe_run *run, const moe_node *t) {
    const size_t cost =
        t->gate.grouped ? t->src[1]->gate.gating->level * t->gate.gating->level : 16 * t->gate.gating->level;
    moe_job job = { run, t, .end = run->frame->rows };
    if (t->work.gate.mask) memset(t->work.gate.mask, 0, job.end * t->cols);
    moe_for_rows(run, t, job.end, cost, moe_compute_gate_row);
    if (!t->work.gate.mask) return;
    moe_pool_run(run->pool, t->cols, moe_batchwise_task, &job);
    moe_for_rows(run, t, job.end, cost, moe_compute_gate_row);
}

/* ==== 29. Ops: experts ========================================================================================
 * The computation of experts. Invariant: the outputs of a row's experts are added in the order of the experts' numbers,
 * whatever the order of computation. Two functions locate the bytes of an expert: on the processor, moe_experts_slab
 * returns their address at each use (streamed files use "Expert bank"); on a GPU, moe_lift_expert in moe-cuda.cu
 * uploads the expert once, or whenever it is missing (see "Expert cache"). moe_compute_pairs computes independent (row,
 * expert) pairs sorted by expert. With ranks, each pair is computed on its expert's rank, and all outputs are sent back
 * before any are added. */

enum { MOE_EXPERT_TILE = 64 }; /* maximum rows of an expert task */

/* Processes or sessions that run the same graphs simultaneously and share the experts. */
typedef struct moe_ranks {
    moe_wire wire;
    moe_status status; /* status of the wire, which is not used after a failure */
    moe_error error;
    int reported; /* 1 if all ranks know the failure that is being returned */
} moe_ranks;

#define MOE_WIRE(ranks, call, ...)                                                                               \
    ((ranks)->status ? (ranks)->status                                                                           \
                     : ((ranks)->status = (ranks)->wire.call((ranks)->wire.user, __VA_ARGS__, &(ranks)->error)))

static size_t moe_rank_count(const moe_graph *g) { return g->ranks ? (size_t)g->ranks->wire.ranks : 1; }

/* Return the place of the first expert of a rank. A rank reads only its own experts. */
static size_t moe_rank_first(const moe_ranks *r, size_t rank, size_t experts) {
    return rank * experts / (size_t)r->wire.ranks;
}

static size_t moe_place_of(const moe_expert_work *w, uint32_t expert) { return w->place ? w->place[expert] : expert; }

/* Compare two experts: the higher load comes first, then the lower number. */
static int moe_compare_loads(const void *a, const void *b) {
    const float *x = *(const float *const *)a, *y = *(const float *const *)b;
    return *x != *y ? (*x < *y) - (*x > *y) : (x > y) - (x < y);
}

/* Assign the same number of experts to each rank: the busiest expert first, always to the rank with the least load so
 * far, because all ranks wait for the slowest one. */
static void moe_place_experts(const moe_ranks *r, moe_node *t, moe_layout *at) {
    double sum[MOE_MAX_RANKS] = { 0 };
    size_t next[MOE_MAX_RANKS], ranks = (size_t)r->wire.ranks, n = t->experts->count;
    const float *load = t->experts->load, **order = moe_carve(at, n, sizeof *order);
    uint32_t *place = t->work.experts.place = moe_carve(at, 2 * n, sizeof *place);
    t->work.experts.expert = at->base ? place + n : NULL;
    for (size_t rank = 0; rank < ranks; rank++) next[rank] = moe_rank_first(r, rank, n);
    for (size_t i = 0; at->base && i < n; i++) order[i] = &load[i];
    if (at->base) qsort(order, n, sizeof *order, moe_compare_loads);
    for (size_t i = 0, best = ranks; at->base && i < n; i++, best = ranks) {
        const size_t expert = (size_t)(order[i] - load);
        for (size_t rank = 0; rank < ranks; rank++)
            if (next[rank] < moe_rank_first(r, rank + 1, n) && (best == ranks || sum[rank] < sum[best])) best = rank;
        sum[best] += (double)*order[i];
        place[expert] = (uint32_t)next[best];
        place[n + next[best]++] = (uint32_t)expert;
    }
}

/* Return 1 if a run is cancelled, or if a slab is missing or damaged. */
static int moe_run_failed(const moe_run *run) {
    const moe_graph *g = run->graph;
    return moe_pool_cancelled(run->pool) || (g->damage && atomic_load(&g->damage->piece)) || moe_bank_failed(g->bank);
}

static moe_node *moe_op_experts(moe_graph *g, const moe_experts *experts, moe_node *x, moe_node *gate,
                                const char *name) {
    return MOE_ADD_NODE(g, name, .op = MOE_OP_EXPERTS, .src = { moe_op_factor(g, &experts->up, x), gate },
                        .cols = x->cols, .experts = experts);
}

/* Locate the two matrices of a visit's expert, and verify them if necessary. Returns 0 if they are not available, which
 * ends the run, or damaged, which the session reports after the run. */
static int moe_experts_slab(const moe_run *run, const moe_experts *e, size_t visit, size_t expert, moe_matrix *up,
                            moe_matrix *down) {
    const moe_tensor_info *t = e->file ? &e->file->tensors[e->tensor] : NULL;
    if (run->graph->bank) {
        const char *slab = moe_bank_wait(run->graph->bank, visit, run->pool);
        if (!slab) return 0;
        *up = moe_tensor_matrix(t, slab, 0, 0);
        *down = moe_tensor_matrix(t, slab, 0, 1);
        return 1;
    }
    if (t && e->file->checked && moe_check_piece(e->file, t, t->slabs ? expert : 0, run->graph->damage, NULL)) return 0;
    *up = moe_matrix_moved(&e->up, expert * e->stride);
    *down = moe_matrix_moved(&e->down, expert * e->stride);
    return 1;
}

/* Return the maximum number of (row, expert) pairs in a chunk: twice the expected number, at most 2^14 over all ranks,
 * but enough for any single row. */
static size_t moe_expert_pairs(const moe_graph *g, const moe_node *gate) {
    size_t wanted = 2 * gate->gate.gating->k;
    if (gate->gate.grouped) wanted *= gate->src[1]->gate.gating->k;
    if (moe_gate_is_dense(gate->gate.kind) || !wanted) wanted = gate->gate.capacity;
    return moe_max(moe_min(g->rows * moe_min(gate->gate.capacity, wanted), (1 << 14) / moe_rank_count(g)),
                   gate->gate.capacity);
}

static size_t moe_expert_input_floats(const moe_experts *e) {
    return moe_max(moe_row_stride(e->up.cols), moe_code_bytes(e->up.cols) / sizeof(float));
}

static size_t moe_expert_input_bytes(const moe_node *t) {
    return moe_is_codes(t->src[0]) ? t->src[0]->stride : t->cols * sizeof(float);
}

/* Carve buffers for the exchange with other ranks. One rank may receive the pairs of all ranks. */
static void moe_ranks_scratch(const moe_graph *g, const moe_node *t, moe_expert_work *w, size_t pairs, moe_layout *at) {
    const size_t ranks = moe_rank_count(g), count = t->experts->count;
    w->each = moe_divide_up(count, ranks) + 1;
    w->input_bytes = moe_expert_input_bytes(t) + (moe_is_codes(t->src[0]) && !g->blocks ? sizeof(float) : 0);
    w->to = moe_carve(at, ranks * w->each, sizeof *w->to);
    w->from = moe_carve(at, ranks * w->each, sizeof *w->from);
    w->to_bytes = moe_carve(at, ranks, sizeof *w->to_bytes);
    w->from_bytes = moe_carve(at, ranks, sizeof *w->from_bytes);
    w->sent = moe_carve(at, pairs, w->input_bytes);
    w->taken = moe_carve(at, ranks * pairs, w->input_bytes);
    w->back = moe_carve(at, ranks * pairs, t->cols * sizeof *w->back);
    w->taken_first = moe_carve(at, count + 2, sizeof *w->taken_first);
    w->taken_row = moe_carve(at, ranks * pairs, sizeof *w->taken_row);
}

static void moe_experts_scratch(const moe_graph *g, moe_node *t, moe_layout *at) {
    const moe_experts *e = t->experts;
    const size_t pairs = moe_expert_pairs(g, t->src[1]), unit_floats = moe_code_bytes(e->hidden) / sizeof(float);
    const size_t unit_stride = moe_row_stride(e->up.rows), out_stride = moe_row_stride(t->cols);
    moe_expert_work *w = &t->work.experts;
    w->first = moe_carve(at, e->count + 2, sizeof *w->first);
    w->pair_row = moe_carve(at, pairs, sizeof *w->pair_row);
    w->row_pair = moe_carve(at, pairs, sizeof *w->row_pair);
    w->row_first = moe_carve(at, g->rows, sizeof *w->row_first);
    w->visit = moe_carve(at, e->count, sizeof *w->visit);
    w->task = moe_carve(at, 3 * (moe_rank_count(g) * pairs + g->threads), sizeof *w->task);
    w->stride = g->ranks ? t->cols : out_stride;
    w->out = moe_carve(at, pairs * w->stride, sizeof *w->out);
    if (g->traced) w->sizes = moe_carve(at, g->rows * e->count, sizeof *w->sizes);
    if (g->ranks) moe_ranks_scratch(g, t, w, pairs, at);
    /* A tile needs inputs, hidden units, their codes, two scales per row and, with ranks, outputs. */
    moe_carve_threads(g, t, at,
                      MOE_EXPERT_TILE *
                          (moe_expert_input_floats(e) + unit_stride + unit_floats + 2 + (g->ranks ? out_stride : 0)));
}

/* Copy the inputs of a row, and their scale unless it is stored with the codes. */
static void moe_expert_input(const moe_node *t, size_t row, void *to, float *scale) {
    const moe_node *x = t->src[0];
    const moe_expert_work *w = &t->work.experts;
    const size_t bytes = moe_expert_input_bytes(t);
    if (w->takes) {
        memcpy(to, w->taken + row * w->input_bytes, bytes);
        memcpy(scale, w->taken + row * w->input_bytes + bytes, w->input_bytes - bytes);
        return;
    }
    if (moe_is_codes(x)) memcpy(to, (const char *)x->data + row * x->stride, bytes);
    else memcpy(to, moe_row_of(x, row), bytes);
    if (x->scales) *scale = x->scales[row];
}

/* Compute x[0 .. n) = swish(x[0 .. n)) * x[n .. 2 n). */
static void moe_gate_units(const moe_kernels *kernels, float *x, size_t n) {
    kernels->unary(MOE_UNARY_SWISH, x, n, x);
    for (size_t i = 0; i < n; i++) x[i] = x[i] * x[n + i];
}

/* Compute one expert for up to MOE_EXPERT_TILE rows: out = w_down relu(w_up x), or the gated form. */
static void moe_expert_task(void *arg, size_t task, size_t thread) {
    const moe_job *job = arg;
    const moe_expert_work *work = &job->t->work.experts;
    const moe_experts *e = job->t->experts;
    const moe_kernels *kernels = job->run->kernels;
    const moe_node *x = job->t->src[0];
    const size_t visit = work->task[3 * task], pair = work->task[3 * task + 1], rows = work->task[3 * task + 2],
                 place = (size_t)work->visit[visit], expert = work->expert ? work->expert[place] : place;
    const size_t width = e->up.cols, hidden = e->hidden, unit_bytes = moe_code_bytes(hidden);
    const size_t unit_stride = moe_row_stride(e->up.rows), out_stride = moe_row_stride(width),
                 input_bytes = moe_expert_input_bytes(job->t);
    float *inputs = moe_thread_of(job->t, thread);
    float *units = inputs + MOE_EXPERT_TILE * moe_expert_input_floats(e);
    int8_t *unit_codes = (int8_t *)(void *)(units + MOE_EXPERT_TILE * unit_stride);
    float *scales = (float *)(void *)(unit_codes + MOE_EXPERT_TILE * unit_bytes),
          *unit_scales = scales + MOE_EXPERT_TILE,
          *out = work->takes ? unit_scales + MOE_EXPERT_TILE : work->out + pair * out_stride;
    const int blocks = moe_is_codes(x) && !x->scales;
    moe_matrix up, down;
    moe_linear first =
        moe_linear_of(&up, inputs, width, (int8_t *)(void *)inputs, blocks ? NULL : scales, units, unit_stride);
    moe_linear second =
        moe_linear_of(&down, units, unit_stride, unit_codes, blocks ? NULL : unit_scales, out, out_stride);
    if (!moe_experts_slab(job->run, e, visit, expert, &up, &down)) return;
    first.relu = !e->gated;
    if (e->up_bias) first.bias = e->up_bias + expert * hidden;
    if (e->down_bias) second.bias = e->down_bias + expert * width;
    for (size_t i = 0; i < rows; i++)
        moe_expert_input(job->t, work->pair_row[pair + i], (char *)inputs + i * input_bytes, &scales[i]);
    kernels->linear(&first, 0, rows, 0, moe_divide_up(e->up.rows, 16));
    for (size_t i = 0; e->gated && i < rows; i++) moe_gate_units(kernels, units + i * unit_stride, hidden);
    for (size_t i = 0; moe_is_codes(x) && i < rows; i++)
        moe_quantise_row(kernels, units + i * unit_stride, hidden, unit_codes + i * unit_bytes,
                         blocks ? NULL : unit_scales + i);
    kernels->linear(&second, 0, rows, 0, moe_divide_up(width, 16));
    for (size_t i = 0; work->takes && i < rows; i++)
        memcpy(work->back + work->pair_row[pair + i] * width, out + i * out_stride, width * sizeof *out);
    if (job->run->graph->bank) moe_bank_done(job->run->graph->bank, visit);
}

/* Compute y = scale * the weighted sum of a row's experts, in index order (eq 1), with outputs out[places[j]]. */
static void moe_weigh(const moe_run *run, const moe_node *t, size_t row, float scale, const float *out, size_t stride,
                      const uint32_t *places) {
    const moe_selection s = moe_selection_of(t->src[1], row);
    float *y = moe_row_of(t, row);
    memset(y, 0, t->cols * sizeof *y);
    for (size_t j = 0; j < *s.count; j++) run->kernels->axpy(s.weights[j], out + places[j] * stride, t->cols, y);
    if (scale != 1.0f)
        for (size_t c = 0; c < t->cols; c++) y[c] = y[c] * scale;
}

/* Compute the norm of each expert's output for a row; 0 for experts that were not selected. */
static void moe_measure_row(const moe_node *t, size_t row, float *sizes) {
    const moe_expert_work *w = &t->work.experts;
    const moe_selection s = moe_selection_of(t->src[1], row);
    memset(sizes, 0, t->experts->count * sizeof *sizes);
    for (size_t j = 0; j < *s.count; j++) {
        const float *out = w->out + w->row_pair[w->row_first[row] + j] * w->stride;
        float sum = 0.0f;
        for (size_t c = 0; c < t->cols; c++) sum = sum + out[c] * out[c];
        sizes[s.experts[j]] = sqrtf(sum);
    }
}

static void moe_combine_row(const moe_run *run, const moe_node *t, size_t row) {
    const moe_expert_work *w = &t->work.experts;
    if (w->sizes) moe_measure_row(t, row, w->sizes + row * t->experts->count);
    moe_weigh(run, t, row, t->experts->scale, w->out, w->stride, w->row_pair + w->row_first[row]);
}

/* Sort the (row, expert) pairs of row job->first and later rows by expert. Set job->end to the first row whose pairs do
 * not fit, since a token may select any number of experts. Returns the number of pairs. */
static size_t moe_sort_pairs(const moe_run *run, const moe_node *t, moe_job *job) {
    const moe_node *gate = t->src[1];
    const moe_expert_work *w = &t->work.experts;
    const size_t n = t->experts->count, capacity = moe_expert_pairs(run->graph, gate);
    size_t pairs = 0;
    memset(w->first, 0, (n + 2) * sizeof *w->first);
    for (job->end = job->first; job->end < run->frame->rows; job->end++) {
        const moe_selection s = moe_selection_of(gate, job->end);
        if (pairs + *s.count > capacity) break;
        w->row_first[job->end] = pairs;
        pairs += *s.count;
        for (size_t j = 0; j < *s.count; j++) w->first[moe_place_of(w, s.experts[j]) + 2]++;
    }
    for (size_t e = 0; e < n; e++) w->first[e + 1] += w->first[e];
    for (size_t r = job->first, pair = 0; r < job->end; r++) {
        const moe_selection s = moe_selection_of(gate, r);
        for (size_t j = 0; j < *s.count; j++) {
            size_t *next = &w->first[moe_place_of(w, s.experts[j]) + 1]; /* becomes the end of the expert's pairs */
            w->pair_row[*next] = (uint32_t)r;
            w->row_pair[pair++] = (uint32_t)(*next)++;
        }
    }
    return pairs;
}

/* Compute sorted pairs with the slabs of their experts, in tasks from one queue. With a bank, all threads but one get
 * an extra task at the end, which sleeps until the last expert is loaded. */
static void moe_compute_pairs(moe_job *job, size_t pairs) {
    const moe_expert_work *w = &job->t->work.experts;
    moe_bank *bank = job->run->graph->bank;
    size_t visits = 0, tasks = 0;
    for (size_t e = 0; e < job->t->experts->count; e++)
        if (w->first[e + 1] > w->first[e]) w->visit[visits++] = (int32_t)e;
    if (bank) moe_bank_plan(bank, job->t->experts, w->visit, visits, w->first, job->end == job->run->frame->rows);
    const size_t idle = bank && visits ? job->run->pool->count - 1 : 0;
    for (size_t v = 0; v < visits; v++) {
        const size_t *first = &w->first[w->visit[v]], begin = tasks;
        for (size_t p = first[0]; p < first[1]; p += MOE_EXPERT_TILE, tasks++) {
            w->task[3 * tasks] = (uint32_t)v;
            w->task[3 * tasks + 1] = (uint32_t)p;
            w->task[3 * tasks + 2] = (uint32_t)moe_min(MOE_EXPERT_TILE, first[1] - p);
        }
        if (bank) atomic_store(&bank->visits[v].left, tasks - begin + (v + 1 == visits ? idle : 0));
    }
    for (size_t i = 0; i < idle; i++, tasks++) {
        w->task[3 * tasks] = (uint32_t)visits - 1;
        w->task[3 * tasks + 1] = w->task[3 * tasks + 2] = 0;
    }
    moe_pool_run(job->run->pool, tasks, moe_expert_task, job);
    if (bank && atomic_load(&bank->open)) moe_bank_settle(bank);
    if (job->run->graph->stats) {
        job->run->graph->stats->expert_pairs += pairs;
        job->run->graph->stats->expert_visits += visits;
    }
}

/* ---- Ranks ---- */

/* Exchange the number of pairs per expert with all ranks. Returns 1 if any rank has more rows. */
static int moe_count_pairs(moe_ranks *r, const moe_node *t, int more) {
    const moe_expert_work *w = &t->work.experts;
    const size_t ranks = (size_t)r->wire.ranks, n = t->experts->count;
    memset(w->to, 0, ranks * w->each * sizeof *w->to);
    for (size_t rank = 0; rank < ranks; rank++) {
        const size_t first = moe_rank_first(r, rank, n), end = moe_rank_first(r, rank + 1, n);
        uint32_t *to = w->to + rank * w->each;
        for (size_t e = first; e < end; e++) to[e - first] = (uint32_t)(w->first[e + 1] - w->first[e]);
        to[w->each - 1] = (uint32_t)more;
    }
    if (MOE_WIRE(r, counts, w->to, w->from, w->each)) return 0;
    more = 0;
    for (size_t rank = 0; rank < ranks; rank++) more |= (int)w->from[(rank + 1) * w->each - 1];
    return more;
}

/* Send the inputs of pairs, `bytes` per pair, to the ranks of their experts; with `home`, send the outputs back. */
static void moe_swap_pairs(moe_ranks *r, const moe_expert_work *w, int home, const void *send, void *take,
                           size_t bytes) {
    for (size_t rank = 0; rank < (size_t)r->wire.ranks; rank++) {
        w->to_bytes[rank] = w->from_bytes[rank] = 0;
        for (size_t i = rank * w->each; i < (rank + 1) * w->each - 1; i++) {
            w->to_bytes[rank] += w->to[i] * bytes;
            w->from_bytes[rank] += w->from[i] * bytes;
        }
    }
    MOE_WIRE(r, swap, send, home ? w->from_bytes : w->to_bytes, take, home ? w->to_bytes : w->from_bytes);
}

/* Sort the received pairs, which arrive in rank order, by expert as in moe_sort_pairs. Returns the number of pairs. */
static size_t moe_sort_taken(const moe_ranks *r, const moe_node *t) {
    const moe_expert_work *w = &t->work.experts;
    const size_t n = t->experts->count, own = moe_rank_first(r, (size_t)r->wire.rank, n);
    const size_t owned = moe_rank_first(r, (size_t)r->wire.rank + 1, n) - own;
    size_t pair = 0, *first = w->taken_first + own + 1;
    memset(w->taken_first, 0, (n + 2) * sizeof *w->taken_first);
    for (size_t rank = 0; rank < (size_t)r->wire.ranks; rank++)
        for (size_t i = 0; i < owned; i++) first[i + 1] += w->from[rank * w->each + i];
    for (size_t e = 0; e < n; e++) w->taken_first[e + 1] += w->taken_first[e];
    for (size_t rank = 0; rank < (size_t)r->wire.ranks; rank++)
        for (size_t i = 0; i < owned; i++)
            for (size_t k = w->from[rank * w->each + i]; k > 0; k--) w->taken_row[first[i]++] = (uint32_t)pair++;
    return pair;
}

static void moe_send_pair(const moe_run *run, const moe_node *t, size_t pair) {
    const moe_expert_work *w = &t->work.experts;
    const size_t bytes = moe_expert_input_bytes(t);
    char *to = w->sent + pair * w->input_bytes;
    float scale = 0.0f;
    (void)run;
    moe_expert_input(t, w->pair_row[pair], to, &scale);
    memcpy(to + bytes, &scale, w->input_bytes - bytes);
}

/* Sort, send, compute, return and combine pairs until no rank has rows left. Ranks without rows take part, and so do
 * failed ranks, whose outputs are not used: all ranks learn of the failure after the run. */
static void moe_share_experts(const moe_run *run, const moe_node *t) {
    moe_ranks *r = run->graph->ranks;
    const moe_expert_work *w = &t->work.experts;
    moe_node theirs = *t;
    moe_job job = { run, t, 0, 0, 1, moe_combine_row }, taken = { run, &theirs, 0, 0, 1, NULL };
    theirs.work.experts.takes = 1;
    theirs.work.experts.first = w->taken_first;
    theirs.work.experts.pair_row = w->taken_row;
    for (int more = 1; more; job.first = job.end) {
        if (moe_run_failed(run)) job.first = run->frame->rows;
        const size_t sent = moe_sort_pairs(run, t, &job);
        more = moe_count_pairs(r, t, job.end < run->frame->rows);
        moe_for_rows(run, t, sent, t->cols, moe_send_pair);
        moe_swap_pairs(r, w, 0, w->sent, w->taken, w->input_bytes);
        if (r->status) return;
        moe_compute_pairs(&taken, moe_sort_taken(r, t));
        moe_swap_pairs(r, w, 1, w->back, w->out, t->cols * sizeof *w->out);
        if (r->status) return;
        moe_pool_run(run->pool, job.end - job.first, moe_row_task, &job);
    }
}

/* Sort, compute and combine pairs in chunks of rows. The size of the chunks does not affect the results. */
static void moe_compute_experts(const moe_run *run, const moe_node *t) {
    moe_job job = { run, t, 0, 0, 1, moe_combine_row };
    if (run->graph->ranks) moe_share_experts(run, t);
    else
        for (; job.first < run->frame->rows; job.first = job.end) {
            moe_compute_pairs(&job, moe_sort_pairs(run, t, &job));
            moe_pool_run(run->pool, job.end - job.first, moe_row_task, &job);
        }
}

/* Add a node that computes the weighted sum of linear experts, whose outputs are concatenated in x. */
static moe_node *moe_op_mix(moe_graph *g, size_t cols, float scale, moe_node *x, moe_node *gate, const char *name) {
    return MOE_ADD_NODE(g, name, .op = MOE_OP_MIX, .src = { x, gate }, .cols = cols, .scale = scale);
}

static void moe_compute_mix_row(const moe_run *run, const moe_node *t, size_t row) {
    moe_weigh(run, t, row, t->scale, moe_row_of(t->src[0], row), t->cols, moe_selection_of(t->src[1], row).experts);
}

/* ==== 30. Ops: output =========================================================================================
 * The output layer and its results for the search: the best tokens of a row and their log-probabilities. The [rows,
 * vocabulary] matrix of logits exists only for traces and callbacks. */

enum { MOE_OUTPUT_ROWS = 64 }; /* maximum rows of a task, which computes MOE_OUTPUT_CHUNK tokens */

static void moe_op_output(moe_graph *g, const moe_output_op *output, moe_node *x) {
    moe_node *t = MOE_ADD_NODE(g, "decoder.logits", .op = MOE_OP_OUTPUT, .src = { moe_op_factor(g, output->w, x) },
                               .cols = output->w->rows, .output = *output);
    if (!g->traced && !g->changed) t->stride = 0;
}

static void moe_output_scratch(const moe_graph *g, moe_node *t, moe_layout *at) {
    moe_output_work *w = &t->work.output;
    w->chunks = moe_divide_up(t->cols, MOE_OUTPUT_CHUNK);
    w->first = moe_carve(at, 2 * g->rows, sizeof *w->first);
    w->max = moe_carve(at, g->rows * w->chunks, sizeof *w->max);
    w->sum = moe_carve(at, g->rows * w->chunks, sizeof *w->sum);
    w->logits = moe_carve(at, g->rows * w->chunks * (1 + g->penalised) * g->top, sizeof *w->logits);
    w->ids = moe_carve(at, g->rows * w->chunks * (1 + g->penalised) * g->top, sizeof *w->ids);
    w->seen = moe_carve(at, g->threads * g->rows * g->top, sizeof *w->seen);
    if (g->samples) {
        w->sampled = moe_carve(at, g->rows, sizeof *w->sampled);
        w->plain = moe_carve(at, (g->sentences + MOE_GUESSES) * t->cols, sizeof *w->plain);
        w->weights = moe_carve(at, (g->sentences + MOE_GUESSES) * t->cols, sizeof *w->weights);
    }
    moe_carve_threads(g, t, at, moe_min(g->rows, MOE_OUTPUT_ROWS) * moe_row_stride(MOE_OUTPUT_CHUNK));
}

enum { MOE_OUTPUT_BLOCK = 64 };

static void moe_forbid(float *logit) {
    if (logit) *logit = moe_from_bits(0xff800000u);
}

/* Find the `top` largest of x[n] and their ids, in descending order. `seen` [top], which is updated, holds the largest
 * numbers that this thread has found in the row so far. A number is skipped only if the row has `top` larger numbers,
 * so the best of a row do not depend on how chunks are distributed over threads. `largest` is an upper bound of x. */
static void moe_find_best(const moe_kernels *kernels, const float *x, size_t n, float largest, size_t top,
                          int32_t first_id, float *seen, float *best, int32_t *ids) {
    int32_t unused[MOE_MAX_BEAM + MOE_MAX_ENDS];
    for (size_t i = 0; i < top; i++) best[i] = moe_from_bits(0xff800000u), ids[i] = -1;
    for (size_t i = 0; i < n && !(largest < seen[top - 1]); i += MOE_OUTPUT_BLOCK) {
        const size_t end = moe_min(n, i + MOE_OUTPUT_BLOCK);
        if (kernels->max(x + i, end - i) < seen[top - 1]) continue;
        for (size_t j = i; j < end; j++)
            if (x[j] >= seen[top - 1]) {
                moe_keep_best(best, ids, top, x[j], first_id + (int32_t)j);
                moe_keep_best(seen, unused, top, x[j], 0);
            }
    }
}

/* Find the `top` largest of x[n] among tokens in `used`, and forbid these tokens in x. The ids of x are in `list` or,
 * if that is NULL, start at first_id. */
static void moe_take_used(const uint32_t *used, const int32_t *list, float *x, size_t n, size_t top, int32_t first_id,
                          float *best, int32_t *ids) {
    for (size_t i = 0; i < top; i++) best[i] = moe_from_bits(0xff800000u), ids[i] = -1;
    for (size_t i = 0; i < n; i++) {
        if (!moe_bit(used, list ? list[i] : first_id + (int32_t)i)) continue;
        if (x[i] > best[top - 1]) moe_keep_best(best, ids, top, x[i], first_id + (int32_t)i);
        moe_forbid(&x[i]);
    }
}

/* All logits are computed and used at once, unless a callback changes them in between. */
typedef enum moe_output_stage { MOE_LOGITS_AT_ONCE, MOE_LOGITS_STORE, MOE_LOGITS_LOAD } moe_output_stage;

typedef struct moe_output_job {
    const moe_run *run;
    const moe_node *t;
    size_t groups;
    moe_output_stage stage;
} moe_output_job;

/* The logits of a row for n tokens, starting at a column of the vocabulary or of a list. */
typedef struct moe_logits {
    const moe_list *list; /* NULL for all tokens */
    size_t column, n;
    float *y;
} moe_logits;

static const moe_list *moe_list_of(const moe_beam *f, size_t row) {
    return f->lists && f->lists[row]->n ? f->lists[row] : NULL;
}

/* Return a pointer to the logit of a token, or NULL if the token is not in the range of `l`. */
static float *moe_logit_of(const moe_logits *l, int32_t id) {
    const size_t at = moe_list_place(l->list, id) - l->column;
    return at < l->n ? l->y + at : NULL;
}

/* Compute logits for `rows` rows. If a list's rows of w are not gathered, compute the blocks that contain the rows. */
static void moe_output_logits(const moe_run *run, const moe_node *t, size_t row0, size_t rows, const moe_logits *out,
                              size_t stride) {
    const moe_list *list = out->list;
    const int gathered = list && list->w.rows;
    const float *bias = gathered ? list->bias : t->output.bias;
    moe_linear l = moe_linear_from(t->output.w, t->src[0], row0, out->y, stride);
    float block[MOE_OUTPUT_ROWS * 16];
    for (size_t i = out->column, end = i + out->n; i < end;) {
        const int pick = list && !gathered;
        const size_t first = pick ? (size_t)list->ids[i] / 16 * 16 : i;
        const moe_matrix w = moe_matrix_part(gathered ? &list->w : t->output.w, first, pick ? 16 : out->n);
        l.w = &w;
        if (bias) l.bias = bias + first;
        if (pick) l.y = block, l.y_stride = 16;
        run->kernels->linear(&l, 0, rows, 0, moe_divide_up(w.rows, 16));
        if (!pick) return;
        for (; i < end && (size_t)list->ids[i] < first + 16; i++)
            for (size_t r = 0; r < rows; r++)
                out->y[r * stride + i - out->column] = block[r * 16 + (size_t)list->ids[i] - first];
    }
}

/* Copy logits to or from the matrix of all logits. */
static void moe_exchange_logits(const moe_node *t, size_t row, const moe_logits *l, int load) {
    for (size_t i = 0; i < l->n; i++) {
        float *stored = moe_row_of(t, row) + (l->list ? (size_t)l->list->ids[l->column + i] : l->column + i);
        if (load) l->y[i] = *stored;
        else *stored = l->y[i];
    }
}

static int moe_is_sampled(const moe_run *run, size_t row) {
    const moe_beam *f = &run->frame->beam;
    return f->samplings && f->samplings[row].how && f->want[row] == -1;
}

static void moe_keep_logits(const moe_run *run, const moe_node *t, size_t row, const moe_logits *l) {
    const moe_beam *f = &run->frame->beam;
    const size_t at = t->work.output.sampled[row] * t->cols + l->column;
    const uint32_t *used = f->used && f->penalty[row] != 1.0f ? f->used + row * moe_bit_words(t->cols) : NULL;
    for (size_t i = 0; i < l->n; i++) {
        const int32_t id = l->list ? l->list->ids[l->column + i] : (int32_t)(l->column + i);
        const float v = used && moe_bit(used, id) ? moe_penalised(l->y[i], f->penalty[row]) : l->y[i];
        t->work.output.plain[at + i] = l->y[i];
        t->work.output.weights[at + i] = moe_to_bits(v);
    }
}

static moe_stop moe_walk(const uint32_t *weights, size_t n, int counts_them, uint64_t target) {
    moe_stop at = { 0, 0, 0 };
    for (int shift = 24; shift >= 0; shift -= 8) {
        unsigned long long counts[MOE_DIGITS] = { 0 }, sums[MOE_DIGITS] = { 0 };
        for (size_t i = 0; i < n; i++) {
            if ((uint64_t)weights[i] >> (shift + 8) != at.weight) continue;
            const uint32_t digit = weights[i] >> shift & (MOE_DIGITS - 1);
            counts[digit]++;
            sums[digit] += weights[i];
        }
        moe_walk_on(&at, counts, sums, counts_them, target);
    }
    return at;
}

/* Sample one of n tokens, converting the bits of logits to weights. Returns its index, or n if the logits are NaN. */
static size_t moe_sample(const moe_sampling *d, uint32_t *weights, size_t n, uint64_t number) {
    float best = moe_from_bits(0xff800000u);
    uint64_t sum = 0, firm = 0;
    moe_stop at;
    size_t i = 0;
    for (; i < n; i++) best = moe_from_bits(weights[i]) > best ? moe_from_bits(weights[i]) : best;
    for (i = 0; i < n; i++) {
        weights[i] = moe_weight_of(d, moe_from_bits(weights[i]), best);
        sum += weights[i];
        if ((float)weights[i] >= d->min_p * MOE_WEIGHT_MOST) firm += weights[i];
    }
    if (!sum) return n;
    if (d->top_k && d->top_k < n) {
        at = moe_walk(weights, n, 1, d->top_k - 1);
        sum = moe_sum_of_first(&at, d->top_k);
    }
    if (d->top_p < 1.0f) {
        const uint64_t target = moe_sum_short_of(d, sum);
        at = moe_walk(weights, n, 0, target);
        sum = moe_sum_up_to(&at, target);
    }
    number = moe_share_of(number, sum < firm ? sum : firm);
    at = moe_walk(weights, n, 0, number);
    for (number = (number - at.sum) / at.weight, i = 0;; i++)
        if (weights[i] == at.weight && !number--) return i;
}

/* Compute a chunk of the vocabulary, or of a list, for a group of rows: logits, best tokens, sum of exponentials. */
static void moe_output_task(void *arg, size_t task, size_t thread) {
    const moe_output_job *job = arg;
    const moe_node *t = job->t;
    const moe_output_op *o = &t->output;
    const moe_output_work *work = &t->work.output;
    const moe_beam *f = &job->run->frame->beam;
    const moe_kernels *kernels = job->run->kernels;
    const size_t chunk = task / job->groups, group = task % job->groups, top = job->run->graph->top,
                 kinds = 1 + job->run->graph->penalised;
    const size_t row0 = work->first[2 * group], rows = work->first[2 * group + 1] - row0,
                 stride = moe_row_stride(MOE_OUTPUT_CHUNK);
    moe_logits l = { .list = moe_list_of(f, row0), .column = chunk * MOE_OUTPUT_CHUNK };
    const size_t all = l.list ? l.list->n : t->cols;
    float *seen = work->seen + thread * job->run->frame->rows * top;
    if (l.column >= all) return;
    l.n = moe_min(MOE_OUTPUT_CHUNK, all - l.column);
    l.y = moe_thread_of(t, thread);
    if (job->stage != MOE_LOGITS_LOAD) moe_output_logits(job->run, t, row0, rows, &l, stride);
    for (size_t row = row0; row < row0 + rows; row++, l.y += stride) {
        const size_t at = row * work->chunks + chunk;
        float *logit;
        if (t->stride) moe_exchange_logits(t, row, &l, job->stage == MOE_LOGITS_LOAD);
        if (job->stage == MOE_LOGITS_STORE) continue;
        for (size_t i = o->n_suppressed; i < o->n_never && !l.list; i++) /* lists do not contain these tokens */
            moe_forbid(moe_logit_of(&l, o->never[i]));
        work->max[at] = kernels->max(l.y, l.n);
        work->sum[at] = kernels->exp_sum(l.y, l.n, work->max[at] >= -FLT_MAX ? work->max[at] : 0.0f, NULL);
        if ((logit = moe_logit_of(&l, f->want[row])) != NULL) f->want_logprob[row] = *logit;
        for (size_t i = row * f->n_starts; i < row * f->n_starts + f->most_starts; i++)
            if ((logit = moe_logit_of(&l, f->starts[i])) != NULL) f->start_logprobs[i] = *logit;
        for (size_t i = 0; i < o->n_suppressed; i++) /* suppressed tokens count in the softmax and can be scored */
            moe_forbid(moe_logit_of(&l, o->never[i]));
        if (f->hold && f->hold[row]) moe_forbid(moe_logit_of(&l, o->eos));
        if (moe_is_sampled(job->run, row)) moe_keep_logits(job->run, t, row, &l);
        float *best = work->logits + at * kinds * top;
        int32_t *ids = work->ids + at * kinds * top;
        if (kinds > 1 && f->want[row] < 0 && f->penalty[row] != 1.0f)
            moe_take_used(f->used + row * moe_bit_words(t->cols), l.list ? l.list->ids + l.column : NULL, l.y, l.n, top,
                          (int32_t)l.column, best + top, ids + top);
        moe_find_best(kernels, l.y, l.n, work->max[at], top, (int32_t)l.column, seen + row * top, best, ids);
    }
}

static int moe_needs_no_logits(const moe_run *run, size_t row) {
    return !run->graph->traced && run->frame->beam.want[row] == MOE_NO_LOGITS;
}

/* Combine the chunks of a row: logp = (logit - max) - log sum exp(logit - max). */
static void moe_output_join(const moe_run *run, const moe_node *t, size_t row) {
    const moe_output_work *work = &t->work.output;
    const moe_beam *f = &run->frame->beam;
    const moe_list *list = moe_list_of(f, row);
    const size_t first = row * work->chunks, top = run->graph->top,
                 end = first + (list ? moe_divide_up(list->n, MOE_OUTPUT_CHUNK) : work->chunks);
    const moe_weighing by = { 1 + run->graph->penalised, f->penalty ? f->penalty[row] : 1.0f, f->top_weighed != NULL };
    float max = moe_from_bits(0xff800000u), sum = 0.0f, log_sum;
    if (moe_needs_no_logits(run, row)) return;
    for (size_t c = first; c < end; c++) max = work->max[c] > max ? work->max[c] : max;
    for (size_t c = first; c < end; c++) sum = sum + work->sum[c] * moe_expf(work->max[c] - max);
    log_sum = moe_logf(sum);
    if (!(sum >= 1.0f && sum <= FLT_MAX)) log_sum = moe_from_bits(0x7fc00000u); /* the best token adds 1 to sum */
    if (f->want[row] >= 0) {
        f->want_logprob[row] = (f->want_logprob[row] - max) - log_sum;
        return;
    }
    for (size_t i = row * f->n_starts; i < row * f->n_starts + f->most_starts; i++)
        f->start_logprobs[i] = (f->start_logprobs[i] - max) - log_sum;
    moe_join_best(&by, work->logits + first * by.kinds * top, work->ids + first * by.kinds * top, end - first, top, max,
                  log_sum, f->top_logprobs + row * top, f->top_weighed ? f->top_weighed + row * top : NULL,
                  f->top_ids + row * top);
    for (size_t i = row * top; i < (row + 1) * top; i++) {
        if (f->top_ids[i] < 0) f->top_ids[i] = t->output.eos;
        else if (list) f->top_ids[i] = list->ids[f->top_ids[i]];
    }
    if (!moe_is_sampled(run, row)) return;
    const size_t n = list ? list->n : t->cols, of = work->sampled[row] * t->cols,
                 sampled = moe_sample(f->samplings[row].how, work->weights + of, n, f->samplings[row].number);
    if (sampled < n)
        moe_put_first(list ? list->ids[sampled] : (int32_t)sampled, (work->plain[of + sampled] - max) - log_sum, top,
                      f->top_ids + row * top, f->top_logprobs + row * top);
}

static void moe_compute_output(const moe_run *run, const moe_node *t) {
    const moe_beam *f = &run->frame->beam;
    const size_t rows = run->frame->rows;
    const moe_output_work *work = &t->work.output;
    moe_output_job job = { run, t, 0, run->frame->change ? MOE_LOGITS_STORE : MOE_LOGITS_AT_ONCE };
    size_t *first = work->first, chunks = 0, sampled = 0;
    for (size_t i = 0; i < run->graph->threads * rows * run->graph->top; i++)
        work->seen[i] = moe_from_bits(0xff800000u);
    for (size_t row = 0; row < rows; row++) {
        const moe_list *list = moe_list_of(f, row);
        if (moe_needs_no_logits(run, row)) continue;
        if (moe_is_sampled(run, row)) work->sampled[row] = sampled++;
        size_t *last = job.groups ? first + 2 * (job.groups - 1) : NULL;
        if (!last || last[1] != row || row - last[0] == MOE_OUTPUT_ROWS || list != moe_list_of(f, row - 1))
            last = first + 2 * job.groups++, last[0] = row;
        last[1] = row + 1;
        chunks = moe_max(chunks, list ? moe_divide_up(list->n, MOE_OUTPUT_CHUNK) : work->chunks);
        for (size_t i = 0; list && t->stride && i < t->cols; i++) moe_row_of(t, row)[i] = moe_from_bits(0xff800000u);
        if (f->want[row] >= 0)
            moe_forbid(&f->want_logprob[row]); /* the list lacks end tokens that are never generated */
    }
    moe_pool_run(run->pool, chunks * job.groups, moe_output_task, &job);
    if (job.stage == MOE_LOGITS_STORE && !moe_pool_cancelled(run->pool)) {
        run->frame->change(run->frame->change_user, moe_row_of(t, 0), t->stride);
        job.stage = MOE_LOGITS_LOAD;
        moe_pool_run(run->pool, chunks * job.groups, moe_output_task, &job);
    }
    if (!moe_run_failed(run)) moe_for_rows(run, t, rows, 512 * chunks, moe_output_join);
}

/* ==== 31. Plan and run ========================================================================================
 * The table of ops, the memory plan and the run of a graph. Invariant: after moe_graph_plan no other node uses the
 * memory of a node's rows until the node's last reader has run. */

typedef struct moe_op_row {
    const char *name;
    void (*scratch)(const moe_graph *g, moe_node *t, moe_layout *at); /* carves the scratch of a node; may be NULL */
    void (*compute)(const moe_run *run, const moe_node *t);
    moe_row_fn row; /* computes one row; used if compute is NULL */
    size_t cost;    /* products per column of a row */
} moe_op_row;

#define MOE_OP_ROWS(name, cost) { #name, NULL, NULL, moe_compute_##name##_row, cost }
#define MOE_OP_SCRATCHED(name, cost) { #name, moe_##name##_scratch, NULL, moe_compute_##name##_row, cost }
#define MOE_OP_WHOLE(name, cost) { #name, NULL, moe_compute_##name, NULL, 0 }
#define MOE_OP_SCRATCH(name, cost) { #name, moe_##name##_scratch, moe_compute_##name, NULL, 0 }
#define MOE_OP_NOTHING(name, cost) { #name, NULL, NULL, NULL, 0 }
#define MOE_OP_ROW(NAME, name, how, cost) [MOE_OP_##NAME] = MOE_OP_##how(name, cost),
static const moe_op_row moe_ops[MOE_OP_COUNT] = { MOE_OPS(MOE_OP_ROW) };

static size_t moe_node_bytes(const moe_graph *g, const moe_node *t) {
    if (t->op == MOE_OP_STORE || t->op == MOE_OP_VIEW) return 0;
    if (moe_is_codes(t)) return moe_round_up(g->rows * t->stride, 64) + moe_round_up(g->rows * sizeof(float), 64);
    return moe_round_up(g->rows * t->stride * sizeof(float), 64);
}

/* Return the lowest offset of a gap of `bytes` between live nodes, which are listed by ascending offset. If `below` is
 * not NULL, set it to the link before the gap. */
static size_t moe_find_gap(const moe_graph *g, moe_node **lowest, size_t bytes, moe_node ***below) {
    size_t at = 0;
    for (; *lowest && (*lowest)->offset - at < bytes; lowest = &(*lowest)->above)
        at = (*lowest)->offset + moe_node_bytes(g, *lowest);
    if (below) *below = lowest;
    return at;
}

static void moe_carve_scratch(const moe_graph *g, moe_node *t, moe_layout *at) {
    if (moe_ops[t->op].scratch && !g->on_device) moe_ops[t->op].scratch(g, t, at);
}

/* Limit of the bytes of a node, so that offsets in an arena and sizes of scratch memory do not overflow. */
#define MOE_MAX_ROWS_BYTES (SIZE_MAX >> 3)

static moe_status moe_too_large(const moe_graph *g, moe_error *error) {
    MOE_FAIL(ARGUMENT, "plan", "graphs of %zu rows are too large for a %zu-bit machine", g->rows, 8 * sizeof(size_t));
}

/* Assign arena offsets to all nodes and compute g->bytes, in one pass with a list of live nodes sorted by offset. */
static moe_status moe_graph_plan(moe_graph *g, moe_error *error) {
    moe_node *lowest = NULL, **link;
    uint64_t bytes = 0;
    for (size_t i = 0; i < g->count && bytes < MOE_MAX_ROWS_BYTES; i++)
        if (!moe_multiply(g->rows, g->nodes[i].stride * sizeof(float), &bytes)) bytes = MOE_MAX_ROWS_BYTES;
    if (g->overflow || bytes >= MOE_MAX_ROWS_BYTES) return moe_too_large(g, error);
    g->bytes = 0;
    for (size_t i = 0; i < g->count; i++) {
        moe_node *t = &g->nodes[i];
        const size_t size = moe_node_bytes(g, t);
        moe_layout work = { NULL, 0, 0 };
        for (link = &lowest; *link;)
            if ((*link)->last < i) *link = (*link)->above;
            else link = &(*link)->above;
        if (size) {
            t->offset = moe_find_gap(g, &lowest, size, &link);
            t->above = *link;
            *link = t;
            g->bytes = moe_max(g->bytes, t->offset + size);
        }
        if (g->bytes > SIZE_MAX >> 1) return moe_too_large(g, error);
        moe_carve_scratch(g, t, &work);
        if (work.overflow) MOE_FAIL(ARGUMENT, "plan", "scratch memory of %s is too large", t->name);
        t->work_bytes = work.used;
        if (!work.used) continue;
        t->work_offset = moe_find_gap(g, &lowest, work.used, NULL);
        g->bytes = moe_max(g->bytes, t->work_offset + work.used);
    }
    return MOE_OK;
}

static void moe_graph_place(moe_graph *g, char *arena) {
    for (size_t i = 0; i < g->count; i++) {
        moe_node *t = &g->nodes[i];
        t->data = arena + t->offset;
        moe_carve_scratch(g, t, &(moe_layout){ arena + t->work_offset, 0, 0 });
        if (t->op == MOE_OP_VIEW) t->data = (float *)t->src[0]->data + t->column;
        if (moe_is_codes(t) && !g->blocks)
            t->scales = (float *)(void *)((char *)t->data + moe_round_up(g->rows * t->stride, 64));
    }
}

/* Trace the rows of a node: of a gate, the weights and the probabilities of all experts; of experts, also the norms of
 * their outputs. */
static void moe_trace_node(const moe_run *run, const moe_node *t, moe_trace_fn trace, void *trace_user) {
    const int gate = t->op == MOE_OP_GATE, experts = t->op == MOE_OP_EXPERTS;
    const size_t rows = run->frame->rows, n = experts ? t->experts->count : t->cols;
    char name[sizeof t->name + 16];
    trace(trace_user, t->name, gate ? t->work.gate.dense : t->data, rows, t->cols, gate ? t->cols : t->stride);
    snprintf(name, sizeof name, "%s.%s", t->name, gate ? "probabilities" : "sizes");
    if (gate) trace(trace_user, name, t->work.gate.probabilities, rows, n, n);
    if (experts) trace(trace_user, name, t->work.experts.sizes, rows, n, n);
}

/* Run a graph. A failed run ends early, but with ranks it still takes part in the exchanges. */
static void moe_graph_run(const moe_run *run, moe_trace_fn trace, void *trace_user) {
    const moe_ranks *ranks = run->graph->ranks;
    for (size_t i = 0; i < run->graph->count; i++) {
        const moe_node *t = &run->graph->nodes[i];
        const moe_op_row *op = &moe_ops[t->op];
        if (moe_run_failed(run) || (ranks && (ranks->status || !run->frame->rows))) {
            if (!ranks || ranks->status) return;
            if (t->op == MOE_OP_EXPERTS) op->compute(run, t);
            continue;
        }
        if (run->graph->watch) run->graph->watch(run->graph->watcher, t, 0);
        if (op->compute) op->compute(run, t);
        else if (op->row) moe_for_rows(run, t, run->frame->rows, op->cost * t->cols, op->row);
        if (run->graph->watch) run->graph->watch(run->graph->watcher, t, 1);
        if (trace && !moe_is_codes(t) && t->op != MOE_OP_STORE) moe_trace_node(run, t, trace, trace_user);
    }
}

/* ==== 32. Layers ==============================================================================================
 * A layer's settings in the file, its weights, its carried rows and its nodes in a graph. Invariant: the shapes of a
 * bound layer match, its ids are in range, and its small tensors are finite; the code below never looks up names again.
 *
 * Each kind of layer has a struct in the union of moe_layer, a part of the next section (keys, binding, nodes and a
 * moe_layer_type) and an entry in moe_layer_types. Its moe_layer_type declares the rows carried from run to run, which
 * sessions allocate. tools/convert/ repeats its keys and shapes (moefile.py) and its formulas (reference.py). */

enum { MOE_CONTEXT_NONE, MOE_CONTEXT_PREVIOUS, MOE_CONTEXT_CURRENT, MOE_CONTEXTS };
enum { MOE_NORM_NONE, MOE_NORM_BEFORE, MOE_NORM_AFTER, MOE_NORM_BOTH };
enum { MOE_EXPERT_MLP, MOE_EXPERT_LINEAR, MOE_EXPERT_GATED };

/* Places for layers, one bit each; a kind may allow several. Decoder layers run step by step and may carry rows. */
enum { MOE_IN_ENCODER = 1, MOE_IN_DECODER = 2, MOE_IN_SIDES = 3, MOE_IN_NETWORK = 4 };

typedef struct moe_layer moe_layer;
typedef struct moe_layer_type moe_layer_type;
typedef struct moe_reader moe_reader;
typedef struct moe_builder moe_builder;

typedef struct moe_affine {
    moe_matrix w;
    const float *bias; /* or NULL */
} moe_affine;

typedef struct moe_lstm_layer {
    size_t proj;
    int bidirectional, merge_sum; /* encoder */
    int context;                  /* decoder: the context appended to the input, MOE_CONTEXT_... */
    const moe_layer *begins;      /* encoder: the decoder layer initialised with this layer's last state, or NULL */
    moe_cell cell[2];             /* forward, backward */
} moe_lstm_layer;

typedef struct moe_ffn_layer {
    moe_unary activation;
    int gated;                 /* down(f(gate x) * up x) (Shazeer 2020, arXiv 2002.05202) instead of down(f(up x)) */
    moe_affine up, gate, down; /* [hidden, D], [hidden, D], [D, hidden] */
} moe_ffn_layer;

typedef struct moe_mixture_layer {
    size_t groups;              /* number of groups in a hierarchical mixture (App. B), else 0 */
    moe_gating parent, gate;    /* gate over the groups; gate over all experts, or over the experts of a group */
    size_t units;               /* hidden units relu(features x + bias) of an MLP gate; 0 if gates read x */
    int relu_logits;            /* 1 to apply relu to the logits of both levels (Eigen et al.) */
    int kind;                   /* MOE_EXPERT_... */
    int no_relu;                /* 1 if linear experts, stored in `stack`, compute W x + b instead of relu(W x + b) */
    int sigmoid;                /* 1 to apply a sigmoid to the weighted sum */
    moe_experts experts;        /* experts with a hidden layer */
    moe_affine features, stack; /* [units, D] F32, [count * hidden, D] */
    size_t shared_hidden;       /* hidden units of `shared`, a gated feed-forward for all rows; 0 if none */
    moe_ffn_layer shared;
    moe_matrix shared_scale; /* [1, D] F32, whose sigmoid multiplies `shared`; 0 rows if none */
} moe_mixture_layer;

/* The decoder's attention to its source (GNMT). One layer computes its query; others read its context. */
typedef struct moe_attention_layer {
    int product;                  /* 1 for the attention of Appendix G instead of additive attention */
    size_t size;                  /* A */
    size_t layer;                 /* index of the layer that computes the query */
    const moe_layer *asks;        /* the layer that computes the query */
    int query_output, start_zero; /* 1 if the query is the output, not the state; 1 if the first context is zero */
    moe_matrix w_key, w_query;    /* [A, memory width], [A, query width] */
    const float *v, *bias;        /* [A] */
    int current;                  /* 1 if a layer reads the context of the current step */
    size_t query_cols;            /* columns of the carried query; 0 if not carried */
    size_t context_cols;          /* columns of the carried context; 0 if not carried */
} moe_attention_layer;

typedef struct moe_heads_layer {
    size_t heads, kv_heads, size; /* query heads; key-value heads; columns per head */
    size_t kv_cols;               /* columns in a row of keys and values */
    uint64_t shown;               /* see moe_heads_op */
    int raw;                      /* 1 for self-attention whose norm "before" applies to queries only */
    size_t window;                /* see moe_heads_op */
    int rotary;                   /* 0 for none, else 1 + index of the model's table of rotary positions */
    int norm;                     /* MOE_NORM_... of queries and keys, before or after the rotation */
    float scale;                  /* of scores; 0 for 1 / sqrt(size) */
    moe_distances distances;
    int gated; /* 1 to multiply the contexts by sigmoids of further rows of q */
    moe_rotary_op rotary_op;
    /* n = heads * size. q is [n + kv_cols, D] for queries, keys and values, or [2n + kv_cols, D] if gated; in "cross"
     * and raw layers q is [n, D] and kv is [kv_cols, D]. out is [D, n]. */
    moe_affine q, kv, out;
} moe_heads_layer;

typedef struct moe_ssru_layer {
    moe_affine input, forget;
} moe_ssru_layer;

/* y = the mean of x so far, followed by depth - 1 products with an activation and, if they change the width, by a
 * product back to D columns. The output is y or, if gated, sigmoid(input x) x + sigmoid(forget y) y. */
enum { MOE_AVERAGE_DEPTH = 4 };
typedef struct moe_average_layer {
    size_t depth;
    moe_unary activation;
    int gated;
    moe_affine units[MOE_AVERAGE_DEPTH - 1], down; /* [hidden, D or hidden], [D, hidden]; down.w.rows may be 0 */
    moe_affine input, forget;                      /* [D, D] */
} moe_average_layer;

/* Gated DeltaNet: out(norm of each head of y * swish(z)), see moe_delta_op. */
typedef struct moe_delta_layer {
    moe_delta_op op;
    moe_rotary_op head_norm;
    moe_affine in, out; /* [conv_cols + values + 2 heads, D] for q, k, v, z, b, a; [D, values] */
} moe_delta_layer;

struct moe_layer {
    const moe_layer_type *type;
    char name[32];  /* e.g. "encoder.0" */
    int place;      /* MOE_IN_... */
    size_t in, out; /* columns of the input, without context, and of the output */
    size_t context; /* columns of the encoder's output, to which the layer can attend; 0 if it cannot */
    size_t hidden;  /* LSTM: H per direction; MoE: an expert's hidden units, or its outputs if it has no hidden layer */
    int residual;
    int parallel; /* 1 if the function reads the input of the previous layer: x + f(x) + g(x) */
    /* MOE_NORM_...: f(norm(x)), norm(x + f(x)), or x + post_norm(f(norm(x))); a "norm" layer uses "before". */
    int norm_place;
    int norms_inside; /* 1 if the layer's own nodes apply a norm "before" */
    moe_norm_op norm, post_norm;
    union {
        moe_lstm_layer lstm;
        moe_mixture_layer mixture;
        moe_heads_layer heads;
        moe_ffn_layer ffn;
        moe_ssru_layer ssru;
        moe_average_layer average;
        moe_delta_layer delta;
        moe_attention_layer attention;
    };
};

/* A setting of a layer, "NAME.key" in the file: an INT that is a count (size_t) or flag (int), a REAL (float), or a
 * TEXT from `names`, stored as its index (int). The default is `fallback`; the key is required if `fallback` is below
 * `low`. If `inherits` is set, the default is the value of the member at that offset, which has been read earlier. */
typedef enum moe_key_kind { MOE_KEY_COUNT, MOE_KEY_FLAG, MOE_KEY_REAL, MOE_KEY_NAME } moe_key_kind;

typedef struct moe_key {
    const char *key;
    moe_key_kind kind;
    const char *const *names;
    double low, high, fallback;
    size_t at, inherits;
} moe_key;

enum { MOE_WIDEST = 1 << 20, MOE_CARRIES = 4 };

/* Rows that a decoder layer carries from run to run: how a run finds the rows, and the offset in moe_layer of the
 * member with their number of columns (0 if the layer carries no such rows). */
typedef struct moe_carries {
    const char *name;
    moe_carry by;
    size_t cols_at;
    int above; /* by parent or state: 1 if nodes support MOE_ROW_ABOVE, so given tokens can share a run */
} moe_carries;

struct moe_layer_type {
    const char *name; /* name in files */
    int places;       /* allowed places: MOE_IN_... bits */
    const moe_key *keys;
    size_t n_keys;
    moe_carries carries[MOE_CARRIES];
    /* Bind the weights and set the columns of the output. */
    void (*bind)(moe_reader *r, moe_layer *layer);
    /* Build the output for x, without norm and residual. */
    moe_node *(*build)(moe_builder *b, const moe_layer *layer, moe_node *x);
    /* Store rows carried by source, computed from the encoder's output x. */
    void (*keep_source)(moe_builder *b, const moe_layer *layer, moe_node *x);
};

#define MOE_AT(member) offsetof(moe_layer, member)
#define MOE_COUNT_KEY(key, low, fallback, member)                              \
    { key, MOE_KEY_COUNT, NULL, low, MOE_WIDEST, fallback, MOE_AT(member), 0 }
#define MOE_FLAG_KEY(key, fallback, member) { key, MOE_KEY_FLAG, NULL, 0, 1, fallback, MOE_AT(member), 0 }
#define MOE_REAL_KEY(key, limit, fallback, member)                            \
    { key, MOE_KEY_REAL, NULL, -(limit), limit, fallback, MOE_AT(member), 0 }
#define MOE_NAMES(...)                          \
    (const char *const[]) { __VA_ARGS__, NULL }
#define MOE_NAME_KEY(key, names, fallback, member) { key, MOE_KEY_NAME, names, 0, 0, fallback, MOE_AT(member), 0 }
#define MOE_ANY_NORM_KEYS                                                   \
    { "epsilon", MOE_KEY_REAL, NULL, 0, 1, 1e-5, MOE_AT(norm.epsilon), 0 }, \
        MOE_NAME_KEY("norm.kind", MOE_NAMES("layer", "rms"), 0, norm.rms)
#define MOE_NORM_KEYS                                                                                                \
    MOE_NAME_KEY("norm", MOE_NAMES("none", "before", "after", "both"), MOE_NORM_NONE, norm_place), MOE_ANY_NORM_KEYS

/* Define a kind of layer with moe_KIND_keys, moe_bind_KIND and moe_build_KIND that carries the listed rows. */
#define MOE_LAYER_TYPE(name, places, kind, keep_source, ...) \
    { name,                                                  \
      places,                                                \
      moe_##kind##_keys,                                     \
      MOE_COUNT(moe_##kind##_keys),                          \
      { __VA_ARGS__ },                                       \
      moe_bind_##kind,                                       \
      moe_build_##kind,                                      \
      keep_source }

/* The tables of rotary positions. Models with two use the second in layers with a window (Gemma 3). */
enum { MOE_ROTARIES = 2 };
static const char *const moe_rotary_names[MOE_ROTARIES] = { "rotary.weight", "rotary.local.weight" };

/* ---- Reading ---- */

/* A reader of tensors and metadata, which checks types and ranges, sets defaults and keeps the first failure. */
struct moe_reader {
    const moe_file *file;
    moe_status status;
    moe_error *error;
    char key[64];             /* name of the last key or tensor read */
    int tensor;               /* 1 if `key` is a tensor */
    const moe_matrix *rotary; /* the model's tables of rotary positions */
};

MOE_PRINTF(2, 3)
static const moe_meta *moe_read(moe_reader *r, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(r->key, sizeof r->key, format, args);
    va_end(args);
    r->tensor = 0;
    return r->status == MOE_OK ? moe_find_meta(r->file, r->key) : NULL;
}

/* Reject the last key or tensor read. */
MOE_PRINTF(2, 3)
static void moe_reader_fail(moe_reader *r, const char *format, ...) {
    char message[192], where[96];
    va_list args;
    if (r->status != MOE_OK) return;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    snprintf(where, sizeof where, "%s%s", r->tensor ? "tensor " : "", r->key);
    r->status =
        moe_fail(r->error, MOE_ERROR_FORMAT, where, r->tensor ? "tensor %s %s" : "metadata '%s' %s", r->key, message);
}

/* Return an integer or, with `real`, any number. A `fallback` below `low` makes the key required. */
static double moe_read_number(moe_reader *r, const moe_meta *m, int real, double low, double high, double fallback) {
    const double v = m ? moe_meta_real(m, 0) : fallback;
    if (!m && fallback < low) moe_reader_fail(r, "is missing");
    else if (m && m->kind != MOE_META_INT && !(real && m->kind == MOE_META_REAL))
        moe_reader_fail(r, real ? "is not a number" : "is not an integer");
    else if (m && !(v >= low && v <= high)) moe_reader_fail(r, "is %.10g, but must be %.10g to %.10g", v, low, high);
    return r->status == MOE_OK ? v : 0;
}

static int64_t moe_read_int(moe_reader *r, const moe_meta *m, int64_t low, int64_t high, int64_t fallback) {
    const int64_t v = m ? moe_meta_int(m, 0) : fallback; /* exact, unlike a double */
    moe_read_number(r, m, 0, (double)low, (double)high, (double)fallback);
    if (m && (v < low || v > high)) moe_reader_fail(r, "is out of range");
    return r->status == MOE_OK ? v : 0;
}

/* Return the index of a text in `names` (NULL-terminated); a `fallback` of -1 makes the key required. */
static int moe_read_choice(moe_reader *r, const moe_meta *m, const char *const *names, int fallback) {
    if (!m && fallback >= 0) return fallback;
    for (int i = 0; m && m->kind == MOE_META_TEXT && names[i]; i++)
        if (moe_span_is(moe_meta_text(m, 0), names[i])) return i;
    moe_reader_fail(r, m ? "has an unknown value" : "is missing");
    return 0;
}

static void moe_read_keys(moe_reader *r, moe_layer *layer) {
    for (size_t i = 0; i < layer->type->n_keys && r->status == MOE_OK; i++) {
        const moe_key *k = &layer->type->keys[i];
        const moe_meta *m = moe_read(r, "%s.%s", layer->name, k->key);
        void *at = (char *)layer + k->at;
        if (!m && k->inherits) {
            memcpy(at, (char *)layer + k->inherits, k->kind == MOE_KEY_COUNT ? sizeof(size_t) : sizeof(int));
        } else if (k->kind == MOE_KEY_NAME) {
            *(int *)at = moe_read_choice(r, m, k->names, (int)k->fallback);
        } else {
            const double v = moe_read_number(r, m, k->kind == MOE_KEY_REAL, k->low, k->high, k->fallback);
            if (k->kind == MOE_KEY_REAL) *(float *)at = (float)v;
            else if (k->kind == MOE_KEY_COUNT) *(size_t *)at = (size_t)v;
            else *(int *)at = (int)v;
        }
    }
}

/* Reject a layer because a key conflicts with others. */
#define MOE_REFUSE(r, layer, part, ...) (moe_read(r, "%s.%s", (layer)->name, part), moe_reader_fail(r, __VA_ARGS__))

/* Find a tensor and check its dimensions (3 for experts). Returns NULL if it is missing or has other dimensions. */
static const moe_tensor_info *moe_find_bound(moe_reader *r, uint32_t n_dims, const uint64_t *dims, int optional,
                                             const char *format, const char *name) {
    const char *experts = n_dims == 3 ? "experts " : "";
    char found[72] = "", wanted[72] = "";
    moe_read(r, format, name);
    r->tensor = 1;
    const moe_tensor_info *t = r->status == MOE_OK ? moe_find_tensor(r->file, r->key) : NULL;
    if (!t && !optional) moe_reader_fail(r, "is missing");
    if (!t || (t->n_dims == n_dims && memcmp(t->dims, dims, n_dims * sizeof *dims) == 0)) return t;
    for (uint32_t i = 0; i < t->n_dims; i++)
        snprintf(found + strlen(found), sizeof found - strlen(found), "%s%" PRIu64, i ? ", " : "", t->dims[i]);
    for (uint32_t i = 0; i < n_dims; i++)
        snprintf(wanted + strlen(wanted), sizeof wanted - strlen(wanted), "%s%" PRIu64, i ? ", " : "", dims[i]);
    moe_reader_fail(r, "is %s[%s], but the layer list needs %s[%s]", t->experts ? "experts " : "", found, experts,
                    wanted);
    return NULL;
}

/* Bind a matrix. Set rows to 0 if it is optional and missing. */
static void moe_bind_matrix(moe_reader *r, moe_matrix *out, size_t rows, size_t cols, int optional, const char *format,
                            const char *name) {
    const moe_tensor_info *t = moe_find_bound(r, 2, (const uint64_t[]){ rows, cols }, optional, format, name);
    *out = (moe_matrix){ .rows = 0 };
    if (!t) return;
    *out = moe_tensor_matrix(t, moe_tensor_data(r->file, t), 0, 0);
    const size_t broken = moe_broken_scale(out);
    if (broken < rows) moe_reader_fail(r, "has an invalid scale in row %zu", broken);
}

/* Reject the last tensor read if one of its n numbers is not finite. */
static void moe_check_finite(moe_reader *r, const float *v, size_t n) {
    const size_t broken = r->status == MOE_OK ? moe_find_broken(v, n, -FLT_MAX) : n;
    if (broken < n) moe_reader_fail(r, "is not finite at element %zu", broken);
}

static const float *moe_bind_vector(moe_reader *r, size_t n, int optional, const char *format, const char *name) {
    const moe_tensor_info *t = moe_find_bound(r, 1, (const uint64_t[]){ n }, optional, format, name);
    const float *v = t ? (const float *)(const void *)moe_tensor_data(r->file, t) : NULL;
    if (v) moe_check_finite(r, v, n);
    return r->status == MOE_OK ? v : NULL;
}

/* Bind a matrix that must be F32 and finite, because it decides routing. */
static void moe_bind_exact(moe_reader *r, moe_matrix *out, size_t rows, size_t cols, int optional, const char *format,
                           const char *name) {
    moe_bind_matrix(r, out, rows, cols, optional, format, name);
    if (out->rows && out->type != MOE_TYPE_F32) moe_reader_fail(r, "must be f32, because it affects routing");
    moe_check_finite(r, out->data, out->rows * out->cols);
}

/* Bind w [rows, cols] and its optional bias: NAME.part.weight, NAME.part.bias. */
static void moe_bind_affine(moe_reader *r, const moe_layer *layer, moe_affine *out, size_t rows, size_t cols,
                            const char *part) {
    char name[64];
    snprintf(name, sizeof name, "%s.%s", layer->name, part);
    moe_bind_matrix(r, &out->w, rows, cols, 0, "%s.weight", name);
    out->bias = moe_bind_vector(r, rows, 1, "%s.bias", name);
}

/* ---- Building ---- */

/* Rows that a layer carries: their address and the node that computes them. For rows carried by parent, `node`
 * initially gathers the rows of the previous step. */
typedef struct moe_carried {
    float *rows; /* NULL while memory is only measured */
    moe_node *node;
} moe_carried;

/* A graph under construction. */
struct moe_builder {
    moe_graph *g;
    const moe_layer *layers;             /* all layers of the model */
    moe_type keep;                       /* type of rows carried by token */
    moe_carried (*carried)[MOE_CARRIES]; /* [layers] */
    size_t first; /* first index of the encoder's final states among rows carried by parent; 0 if none */
    moe_node *contexts[MOE_CONTEXTS]; /* GNMT's contexts, indexed by MOE_CONTEXT_... */
    moe_node *before;                 /* the input of the previous layer */
    int predicts;                     /* 1 if the decoder stores its output for the predictor */
    float *hidden;                    /* [rows, D] this output; NULL while memory is only measured */
};

typedef struct moe_name {
    char text[48];
} moe_name;

static moe_name moe_name_of(const moe_layer *layer, const char *part) {
    moe_name name;
    snprintf(name.text, sizeof name.text, "%s.%s", layer->name, part);
    return name;
}

#define MOE_PART(part) moe_name_of(layer, part).text

static moe_node *moe_build_affine(moe_builder *b, const moe_layer *layer, const moe_affine *w, moe_node *x,
                                  const char *part) {
    return moe_op_linear(b->g, &w->w, x, w->bias, MOE_PART(part));
}

static int moe_norms_input(const moe_layer *layer) {
    return layer->norm_place == MOE_NORM_BEFORE || layer->norm_place == MOE_NORM_BOTH;
}

static moe_node *moe_build_normed(moe_builder *b, const moe_layer *layer, moe_node *x) {
    return moe_op_norm(b->g, &layer->norm, x, MOE_PART("norm"));
}

/* Return the number of columns of a layer's k-th carried rows; 0 if it has none. */
static size_t moe_carried_cols(const moe_layer *layer, size_t k) {
    const size_t at = layer->type->carries[k].cols_at;
    if (!at || layer->place != MOE_IN_DECODER) return 0;
    return *(const size_t *)(const void *)((const char *)layer + at);
}

/* Return the format of a layer's k-th carried rows: `type` in groups of one head if carried by token, else F32. */
static moe_keep moe_keep_of(const moe_layer *layer, size_t k, moe_type type) {
    const size_t cols = moe_carried_cols(layer, k);
    if (layer->type->carries[k].by != MOE_BY_TOKEN) return (moe_keep){ MOE_TYPE_F32, cols, cols };
    return (moe_keep){ type, cols, layer->heads.size };
}

static moe_carried *moe_carried_of(const moe_builder *b, const moe_layer *layer) {
    return b->carried[layer - b->layers];
}

/* Gather the rows that a layer carries by parent, before any stores of the step. */
static void moe_build_gathers(moe_builder *b, const moe_layer *layer) {
    for (size_t k = 0; k < MOE_CARRIES; k++) {
        const moe_carries *c = &layer->type->carries[k];
        const size_t cols = moe_carried_cols(layer, k);
        moe_carried *carried = &moe_carried_of(b, layer)[k];
        carried->node = NULL;
        if (cols && c->by == MOE_BY_PARENT) carried->node = moe_op_gather(b->g, carried->rows, cols, MOE_PART(c->name));
    }
}

/* Store x as the layer's k-th carried rows, if the layer has such rows. */
static void moe_build_store(moe_builder *b, const moe_layer *layer, size_t k, moe_node *x) {
    const moe_carries *c = &layer->type->carries[k];
    moe_carried *carried = &moe_carried_of(b, layer)[k];
    if (!moe_carried_cols(layer, k)) return;
    moe_op_store(b->g, x, c->by, carried->rows, MOE_PART(c->name))->carried.keep = moe_keep_of(layer, k, b->keep);
    carried->node = x;
}

/* ==== 33. Kinds of layers =====================================================================================
 * The keys, weights, carried rows and nodes of each kind of layer. Invariant: the rest of the file does not depend on
 * which kinds exist, except for GNMT's attention, which the decoder's LSTM reads. */

/* ---- LSTM ---- */

static const moe_key moe_lstm_keys[] = {
    MOE_COUNT_KEY("hidden", 1, 0, hidden),
    MOE_FLAG_KEY("residual", 0, residual),
    MOE_COUNT_KEY("proj", 0, 0, lstm.proj),
    MOE_REAL_KEY("forget_bias", 100, 0, lstm.cell[0].forget_bias),
    MOE_FLAG_KEY("bidirectional", 0, lstm.bidirectional),
    MOE_NAME_KEY("merge", MOE_NAMES("concat", "sum"), 0, lstm.merge_sum),
    MOE_NAME_KEY("context", MOE_NAMES("none", "previous", "current"), MOE_CONTEXT_NONE, lstm.context),
};
enum { MOE_LSTM_R, MOE_LSTM_C };

static void moe_bind_lstm(moe_reader *r, moe_layer *layer) {
    moe_lstm_layer *l = &layer->lstm;
    const size_t hidden = layer->hidden, state = l->proj ? l->proj : hidden;
    if (l->context != MOE_CONTEXT_NONE && !layer->context)
        MOE_REFUSE(r, layer, "context", "must be \"none\" without attention");
    if (l->bidirectional && layer->place == MOE_IN_DECODER)
        MOE_REFUSE(r, layer, "bidirectional", "must be 0 in a decoder");
    for (int d = 0; d <= l->bidirectional && r->status == MOE_OK; d++) {
        moe_cell *c = &l->cell[d];
        char prefix[64];
        *c = (moe_cell){ .hidden = hidden, .state = state, .forget_bias = l->cell[0].forget_bias };
        snprintf(prefix, sizeof prefix, "%s%s", layer->name, !l->bidirectional ? "" : d ? ".bwd" : ".fwd");
        moe_bind_matrix(r, &c->w_x, 4 * hidden, layer->in + (l->context ? layer->context : 0), 0, "%s.w_x", prefix);
        moe_bind_matrix(r, &c->w_r, 4 * hidden, state, 0, "%s.w_r", prefix);
        c->bias = moe_bind_vector(r, 4 * hidden, 0, "%s.bias", prefix);
        if (l->proj) moe_bind_matrix(r, &c->w_proj, state, hidden, 0, "%s.w_proj", prefix);
    }
    layer->out = l->bidirectional && !l->merge_sum ? 2 * state : state;
}

/* Build an LSTM over packed sentences in one or both directions. Its last states may initialise the decoder. */
static moe_node *moe_build_lstm_layer(moe_builder *b, const moe_layer *layer, moe_node *x) {
    const moe_lstm_layer *l = &layer->lstm;
    moe_node *y[2] = { NULL, NULL };
    for (int d = 0; d <= l->bidirectional; d++) {
        const moe_cell *cell = &l->cell[d];
        const moe_carried *begins = l->begins && d == l->bidirectional ? moe_carried_of(b, l->begins) : NULL;
        y[d] = moe_op_linear(b->g, &cell->w_x, x, cell->bias, MOE_PART(d ? "bwd.input" : "fwd.input"));
        y[d] = moe_op_lstm_layer(b->g, cell, d, y[d], MOE_PART(d ? "bwd" : "fwd"));
        if (!begins || !begins->rows) continue;
        y[d]->lstm.last_r = begins[MOE_LSTM_R].rows + b->first * cell->state;
        y[d]->lstm.last_c = begins[MOE_LSTM_C].rows + b->first * cell->hidden;
    }
    if (!l->bidirectional) return y[0];
    if (l->merge_sum) return moe_op_pointwise(b->g, y[0], y[1], 0, MOE_PART("merged"));
    return moe_op_concat(b->g, y[0], y[1], MOE_PART("merged"));
}

static moe_node *moe_build_lstm(moe_builder *b, const moe_layer *layer, moe_node *x) {
    const moe_cell *cell = &layer->lstm.cell[0];
    if (layer->place != MOE_IN_DECODER) return moe_build_lstm_layer(b, layer, x);
    const moe_carried *state = moe_carried_of(b, layer);
    if (layer->lstm.context) x = moe_op_concat(b->g, x, b->contexts[layer->lstm.context], MOE_PART("input"));
    x = moe_op_lstm_step(b->g, cell, x, state[MOE_LSTM_R].node, state[MOE_LSTM_C].node, MOE_PART("cell"));
    moe_node *r = moe_op_view(b->g, x, 0, cell->hidden, MOE_PART("h"));
    if (cell->w_proj.rows) r = moe_op_linear(b->g, &cell->w_proj, r, NULL, MOE_PART("r_next"));
    moe_build_store(b, layer, MOE_LSTM_R, r);
    moe_build_store(b, layer, MOE_LSTM_C, moe_op_view(b->g, x, cell->hidden, cell->hidden, MOE_PART("c_next")));
    return r;
}

static const moe_layer_type moe_lstm_type =
    MOE_LAYER_TYPE("lstm", MOE_IN_SIDES, lstm,
                   NULL, [MOE_LSTM_R] = { "r", MOE_BY_PARENT, MOE_AT(lstm.cell[0].state), 0 },
                   [MOE_LSTM_C] = { "c", MOE_BY_PARENT, MOE_AT(hidden), 0 });

/* ---- Hidden units: feed-forward layers and the `shared` units of a mixture ---- */

/* Apply an activation to a product; relu is part of the product's node. */
static moe_node *moe_build_active(moe_builder *b, const moe_layer *layer, moe_unary activation, moe_node *product,
                                  const char *part) {
    if (activation != MOE_UNARY_RELU) return moe_op_unary(b->g, activation, product, MOE_PART(part));
    product->linear.relu = 1;
    return product;
}

#define MOE_UNITS(part) (shared ? "shared." part : (part))

static void moe_bind_units(moe_reader *r, const moe_layer *layer, moe_ffn_layer *f, size_t hidden, int shared) {
    moe_bind_affine(r, layer, &f->up, hidden, layer->in, MOE_UNITS("up"));
    if (f->gated) moe_bind_affine(r, layer, &f->gate, hidden, layer->in, MOE_UNITS("gate"));
    moe_bind_affine(r, layer, &f->down, layer->in, hidden, MOE_UNITS("down"));
}

static moe_node *moe_build_units(moe_builder *b, const moe_layer *layer, const moe_ffn_layer *f, int shared,
                                 moe_node *x) {
    moe_node *units = moe_build_affine(b, layer, &f->up, x, MOE_UNITS("units"));
    moe_node *active = f->gated ? moe_build_affine(b, layer, &f->gate, x, MOE_UNITS("gate")) : units;
    active = moe_build_active(b, layer, f->activation, active, shared ? "shared.active" : "activation");
    if (f->gated) active = moe_op_pointwise(b->g, active, units, 1, MOE_PART(MOE_UNITS("gated")));
    return moe_build_affine(b, layer, &f->down, active, MOE_UNITS("down"));
}

/* ---- Mixtures ---- */

static const char *const moe_file_gates[] = { "softmax", "topk", "threshold", "sigmoid", NULL };
static const char *const moe_empties[] = { "top1", "zero", NULL };
_Static_assert(sizeof(moe_gate) == sizeof(int) && sizeof(moe_gate_weights) == sizeof(int),
               "names of keys are stored as int");
static const moe_key moe_mixture_keys[] = {
    MOE_COUNT_KEY("hidden", 1, 0, hidden),
    MOE_FLAG_KEY("residual", 1, residual),
    MOE_COUNT_KEY("experts", 1, 0, mixture.experts.count),
    MOE_COUNT_KEY("groups", 0, 0, mixture.groups),
    MOE_NAME_KEY("gate", moe_file_gates, -1, mixture.gate.kind),
    MOE_COUNT_KEY("k", 0, 0, mixture.gate.k),
    MOE_NAME_KEY("empty", moe_empties, 0, mixture.gate.empty_zero),
    { "parent.gate", MOE_KEY_NAME, moe_file_gates, 0, 0, 0, MOE_AT(mixture.parent.kind), MOE_AT(mixture.gate.kind) },
    { "parent.k", MOE_KEY_COUNT, NULL, 0, MOE_WIDEST, 0, MOE_AT(mixture.parent.k), MOE_AT(mixture.gate.k) },
    { "parent.empty", MOE_KEY_NAME, moe_empties, 0, 0, 0, MOE_AT(mixture.parent.empty_zero),
      MOE_AT(mixture.gate.empty_zero) },
    MOE_COUNT_KEY("gate.hidden", 0, 0, mixture.units),
    MOE_FLAG_KEY("gate.relu", 0, mixture.relu_logits),
    MOE_NAME_KEY("weights", MOE_NAMES("chosen", "all", "sigmoid"), 0, mixture.gate.weights),
    MOE_NAME_KEY("expert", MOE_NAMES("mlp", "linear", "gated"), 0, mixture.kind),
    MOE_NAME_KEY("activation", MOE_NAMES("relu", "none"), 0, mixture.no_relu),
    MOE_NAME_KEY("output", MOE_NAMES("none", "sigmoid"), 1, mixture.sigmoid),
    MOE_REAL_KEY("scale", 1e6, 1, mixture.experts.scale),
    MOE_COUNT_KEY("shared", 0, 0, mixture.shared_hidden),
    MOE_NORM_KEYS,
};

/* Bind one level of gates: `n` experts or groups, of which `level` compete at a time. `part` is "gate" or "parent". */
static void moe_bind_gating(moe_reader *r, const moe_layer *layer, moe_gating *g, size_t n, size_t level,
                            const char *part) {
    const size_t in = layer->mixture.units ? layer->mixture.units : layer->in;
    char name[64];
    g->level = level;
    g->relu = layer->mixture.relu_logits;
    moe_read_int(r, moe_read(r, g == &layer->mixture.parent ? "%s.parent.k" : "%s.k", layer->name),
                 !moe_gate_is_dense(g->kind), (int64_t)level, (int64_t)g->k);
    if (!moe_gate_is_dense(g->kind) && g->k > level) moe_reader_fail(r, "is %zu, but must be at most %zu", g->k, level);
    snprintf(name, sizeof name, "%s.%s", layer->name, part);
    moe_bind_exact(r, &g->weight, n, in, 0, "%s.weight", name);
    moe_bind_exact(r, &g->noise, n, in, 1, "%s.noise", name);
    g->bias = moe_bind_vector(r, n, 1, "%s.bias", name);
    g->threshold = moe_bind_vector(r, n, g->kind != MOE_GATE_THRESHOLD, "%s.threshold", name);
}

static void moe_bind_experts(moe_reader *r, moe_layer *layer) {
    moe_mixture_layer *x = &layer->mixture;
    moe_experts *e = &x->experts;
    const moe_tensor_info *t =
        moe_find_bound(r, 3, (const uint64_t[]){ e->count, layer->hidden, layer->in }, 0, "%s.experts", layer->name);
    if (!t) return;
    const char *slab = moe_tensor_data(r->file, t);
    e->file = r->file;
    e->tensor = (size_t)(t - e->file->tensors);
    e->hidden = layer->hidden;
    e->stride = (size_t)t->bytes / e->count;
    e->gated = x->kind == MOE_EXPERT_GATED;
    if (t->experts != 1 + e->gated) moe_reader_fail(r, "has the wrong layout for these experts");
    e->up = moe_tensor_matrix(t, slab, 0, 0);
    e->down = moe_tensor_matrix(t, slab, 0, 1);
    e->up_bias = moe_bind_vector(r, e->count * layer->hidden, 1, "%s.experts.up_bias", layer->name);
    if (e->up_bias && e->gated) moe_reader_fail(r, "is not allowed for gated experts");
    e->down_bias = moe_bind_vector(r, e->count * layer->in, 1, "%s.experts.down_bias", layer->name);
    e->load = moe_bind_vector(r, e->count, 1, "%s.experts.load", layer->name);
    for (size_t i = 0; e->load && i < e->count; i++)
        if (e->load[i] < 0) moe_reader_fail(r, "is negative at element %zu", i);
}

static void moe_bind_mixture(moe_reader *r, moe_layer *layer) {
    moe_mixture_layer *x = &layer->mixture;
    const size_t n = x->experts.count;
    if (x->groups && n % x->groups)
        MOE_REFUSE(r, layer, "groups", "is %zu, but must be a divisor of %zu, the number of experts", x->groups, n);
    const int linear = x->kind == MOE_EXPERT_LINEAR, topk = x->gate.kind == MOE_GATE_TOPK && !x->groups;
    if (x->no_relu && !linear) MOE_REFUSE(r, layer, "activation", "must be \"relu\" for experts with a hidden layer");
    if (x->gate.weights && !topk)
        MOE_REFUSE(r, layer, "weights", "must be \"chosen\", except for a top-k gate without groups");
    if (x->shared_hidden && linear) MOE_REFUSE(r, layer, "shared", "must be 0 with linear experts");
    if (r->status == MOE_OK && linear && layer->hidden > (size_t)INT32_MAX / n)
        MOE_REFUSE(r, layer, "hidden", "is %zu, too large for %zu experts", layer->hidden, n);
    if (r->status != MOE_OK) return;
    if (x->units) {
        moe_bind_exact(r, &x->features.w, x->units, layer->in, 0, "%s.gate.hidden.weight", layer->name);
        x->features.bias = moe_bind_vector(r, x->units, 1, "%s.gate.hidden.bias", layer->name);
    }
    moe_bind_gating(r, layer, &x->gate, n, x->groups ? n / x->groups : n, "gate");
    if (x->groups) moe_bind_gating(r, layer, &x->parent, x->groups, x->groups, "parent");
    x->shared = (moe_ffn_layer){ .activation = MOE_UNARY_SWISH, .gated = 1 };
    if (x->gate.weights == MOE_WEIGHTS_SIGMOID)
        x->gate.choice = moe_bind_vector(r, n, 1, "%s.gate.choice", layer->name);
    if (x->shared_hidden) moe_bind_units(r, layer, &x->shared, x->shared_hidden, 1);
    if (x->shared_hidden) moe_bind_exact(r, &x->shared_scale, 1, layer->in, 1, "%s.shared.scale.weight", layer->name);
    if (!linear) {
        moe_bind_experts(r, layer);
        return;
    }
    layer->out = layer->hidden;
    moe_bind_affine(r, layer, &x->stack, n * layer->hidden, layer->in, "experts");
}

/* Build the logits, the noise if enabled, and the gate over all experts or, with `parent`, over groups. */
static moe_node *moe_build_flat_gate(moe_builder *b, const moe_layer *layer, int parent, moe_node *x) {
    const moe_gating *gating = parent ? &layer->mixture.parent : &layer->mixture.gate;
    moe_node *logits =
        moe_op_linear(b->g, &gating->weight, x, gating->bias, MOE_PART(parent ? "parent.logits" : "gate.logits"));
    moe_node *noise = NULL;
    logits->linear.relu = gating->relu;
    if (b->g->noise)
        noise = moe_op_linear(b->g, &gating->noise, x, NULL, MOE_PART(parent ? "parent.noise" : "gate.noise"));
    return moe_op_gate(b->g, gating, logits, noise, 0, parent ? NULL : layer->name,
                       MOE_PART(parent ? "parent" : "gate"));
}

/* Build a mixture's gates for x, or for an MLP's hidden units: one gate, or gates over and inside groups (eq 12). */
static moe_node *moe_build_gate(moe_builder *b, const moe_layer *layer, moe_node *x) {
    const moe_mixture_layer *m = &layer->mixture;
    if (m->units) {
        x = moe_build_affine(b, layer, &m->features, x, "gate.hidden");
        x->linear.relu = 1;
    }
    if (!m->groups) return moe_build_flat_gate(b, layer, 0, x);
    return moe_op_gate(b->g, &m->gate, x, moe_build_flat_gate(b, layer, 1, x), 1, layer->name, MOE_PART("gate"));
}

/* Build the sum of weighted experts G(x)_i E_i(x) (eq 1), with a sigmoid if the layer has one (App. E). */
static moe_node *moe_build_mixture(moe_builder *b, const moe_layer *layer, moe_node *x) {
    const moe_mixture_layer *m = &layer->mixture;
    const moe_name name = moe_name_of(layer, "experts");
    moe_node *gate = moe_build_gate(b, layer, x), *y;
    if (m->kind == MOE_EXPERT_LINEAR) {
        y = moe_build_affine(b, layer, &m->stack, x, "units");
        y->linear.relu = !m->no_relu;
        y = moe_op_mix(b->g, layer->hidden, m->experts.scale, y, gate, name.text);
    } else {
        y = moe_op_experts(b->g, &m->experts, x, gate, name.text);
    }
    moe_node *shared = m->shared_hidden ? moe_build_units(b, layer, &m->shared, 1, x) : NULL;
    if (m->shared_scale.rows) {
        x = moe_op_linear(b->g, &m->shared_scale, x, NULL, MOE_PART("shared.logit"));
        x = moe_op_unary(b->g, MOE_UNARY_SIGMOID, x, MOE_PART("shared.scale"));
        shared = moe_op_pointwise(b->g, shared, x, 1, MOE_PART("shared.scaled"));
    }
    if (shared) y = moe_op_pointwise(b->g, y, shared, 0, MOE_PART("mixed"));
    return m->sigmoid ? moe_op_unary(b->g, MOE_UNARY_SIGMOID, y, MOE_PART("sigmoid")) : y;
}

static const moe_layer_type moe_mixture_type =
    MOE_LAYER_TYPE("moe", MOE_IN_SIDES | MOE_IN_NETWORK, mixture, NULL, { 0 });

/* ---- Multi-head attention: to a row's own sentence, or to the source ---- */

static const moe_key moe_heads_keys[] = {
    MOE_COUNT_KEY("heads", 1, 0, heads.heads),
    MOE_FLAG_KEY("raw", 0, heads.raw),
    { "kv_heads", MOE_KEY_COUNT, NULL, 1, MOE_WIDEST, 0, MOE_AT(heads.kv_heads), MOE_AT(heads.heads) },
    MOE_COUNT_KEY("head.size", 0, 0, heads.size),
    MOE_COUNT_KEY("window", 0, 0, heads.window),
    { "rotary", MOE_KEY_FLAG, NULL, 0, MOE_ROTARIES, 0, MOE_AT(heads.rotary), 0 },
    MOE_NAME_KEY("head.norm", MOE_NAMES("none", "before", "after"), MOE_NORM_NONE, heads.norm),
    MOE_REAL_KEY("scale", 1e6, 0, heads.scale),
    MOE_COUNT_KEY("reach", 0, 0, heads.distances.reach),
    MOE_FLAG_KEY("gated", 0, heads.gated),
    MOE_FLAG_KEY("residual", 1, residual),
    MOE_NORM_KEYS,
};

/* Return 1 if keys and values come from the source instead of the layer's own input. */
static int moe_is_cross(const moe_layer *layer) { return layer->type->keep_source != NULL; }

static void moe_bind_rotary(moe_reader *r, moe_layer *layer) {
    moe_heads_layer *h = &layer->heads;
    const moe_matrix *table = h->rotary ? &r->rotary[h->rotary - 1] : NULL;
    h->rotary_op = (moe_rotary_op){ .queries = h->heads,
                                    .keys = h->kv_heads,
                                    .width = h->size,
                                    .table = table,
                                    .epsilon = layer->norm.epsilon,
                                    .norm_last = h->norm == MOE_NORM_AFTER };
    if (table && (!table->cols || table->cols > h->size || table->cols % 2))
        MOE_REFUSE(r, layer, "rotary", "must be 0 unless %s has up to %zu columns, an even number",
                   moe_rotary_names[h->rotary - 1], h->size);
    if (!h->norm) return;
    h->rotary_op.query_norm = moe_bind_vector(r, h->size, 0, "%s.q_norm.weight", layer->name);
    h->rotary_op.key_norm = moe_bind_vector(r, h->size, 0, "%s.k_norm.weight", layer->name);
}

/* Bind the terms that depend on distances. */
static void moe_bind_distances(moe_reader *r, moe_layer *layer) {
    moe_distances *d = &layer->heads.distances;
    const size_t rows = 2 * d->reach + 1;
    moe_matrix bias, keys, values;
    if (!d->reach) return;
    moe_bind_exact(r, &bias, rows, layer->heads.heads, 1, "%s.distance.bias", layer->name);
    moe_bind_exact(r, &keys, rows, layer->heads.size, bias.rows != 0, "%s.distance.keys", layer->name);
    moe_bind_exact(r, &values, rows, layer->heads.size, 1, "%s.distance.values", layer->name);
    if (bias.rows && keys.rows) MOE_REFUSE(r, layer, "reach", "must be 0 with both distance.bias and distance.keys");
    d->bias = bias.data, d->keys = keys.data, d->values = values.data;
}

static void moe_bind_heads(moe_reader *r, moe_layer *layer) {
    moe_heads_layer *h = &layer->heads;
    const size_t d = layer->in;
    const int cross = moe_is_cross(layer);
    if (!h->size && (h->heads > d || d % h->heads))
        MOE_REFUSE(r, layer, "heads", "is %zu, which does not divide %zu columns", h->heads, d);
    if (h->heads % h->kv_heads)
        MOE_REFUSE(r, layer, "kv_heads", "is %zu, which does not divide %zu heads", h->kv_heads, h->heads);
    if (cross && !layer->context) MOE_REFUSE(r, layer, "kind", "must not be \"cross\" in an encoder");
    if (h->raw && (cross || layer->norm_place != MOE_NORM_BEFORE))
        MOE_REFUSE(r, layer, "raw", "must be 0 without a norm before self-attention");
    if (cross && (h->rotary || h->norm || h->distances.reach))
        MOE_REFUSE(r, layer,
                   h->rotary ? "rotary"
                   : h->norm ? "head.norm"
                             : "reach",
                   "is not supported for cross-attention");
    if (h->window && (cross || layer->place != MOE_IN_DECODER))
        MOE_REFUSE(r, layer, "window", "must be 0 except for self-attention in a decoder");
    if (h->gated && (cross || h->raw)) MOE_REFUSE(r, layer, "gated", "must be 0 except for plain self-attention");
    if (r->status != MOE_OK) return;
    layer->norms_inside = h->raw;
    if (!h->size) h->size = d / h->heads;
    const size_t queries = h->heads * h->size;
    const int apart = cross || h->raw;
    h->kv_cols = 2 * h->kv_heads * h->size;
    moe_bind_affine(r, layer, &h->q, apart ? queries : (1 + (size_t)h->gated) * queries + h->kv_cols, d,
                    apart ? "q" : "qkv");
    if (apart) moe_bind_affine(r, layer, &h->kv, h->kv_cols, cross ? layer->context : d, "kv");
    if (!cross) moe_bind_rotary(r, layer);
    moe_bind_distances(r, layer);
    moe_bind_affine(r, layer, &h->out, d, queries, "out");
}

static moe_node *moe_build_heads(moe_builder *b, const moe_layer *layer, moe_node *x) {
    const moe_heads_layer *h = &layer->heads;
    const size_t queries = h->heads * h->size;
    const int cross = moe_is_cross(layer), carries = layer->place == MOE_IN_DECODER;
    moe_node *q =
        moe_build_affine(b, layer, &h->q, h->raw ? moe_build_normed(b, layer, x) : x, cross || h->raw ? "q" : "qkv");
    if (h->raw) q = moe_op_concat(b->g, q, moe_build_affine(b, layer, &h->kv, x, "raw"), MOE_PART("qkv"));
    moe_node *gate = h->gated ? moe_op_view(b->g, q, queries + h->kv_cols, queries, MOE_PART("gate.logits")) : NULL;
    if (gate) q = moe_op_view(b->g, q, 0, queries + h->kv_cols, MOE_PART("ungated"));
    if (h->rotary || h->norm) q = moe_op_rotary(b->g, &h->rotary_op, q, MOE_PART("rotary"));
    if (carries && !cross) moe_build_store(b, layer, 0, moe_op_view(b->g, q, queries, h->kv_cols, MOE_PART("kv")));
    q = moe_op_heads(b->g, h->heads, h->heads / h->kv_heads, !cross, carries ? moe_carried_of(b, layer)->rows : NULL, q,
                     queries, MOE_PART("heads"));
    if (carries && !cross) q->heads.keep.type = b->keep;
    q->heads.window = h->window;
    if (h->scale != 0.0f) q->heads.scale = h->scale;
    q->heads.distances = h->distances;
    q->heads.shown = h->shown;
    if (gate) gate = moe_op_unary(b->g, MOE_UNARY_SIGMOID, gate, MOE_PART("gate"));
    if (gate) q = moe_op_pointwise(b->g, q, gate, 1, MOE_PART("gated"));
    return moe_build_affine(b, layer, &h->out, q, "out");
}

static void moe_keep_cross(moe_builder *b, const moe_layer *layer, moe_node *x) {
    moe_build_store(b, layer, 0, moe_build_affine(b, layer, &layer->heads.kv, x, "kv"));
}

static const moe_layer_type moe_self_type =
    MOE_LAYER_TYPE("attention", MOE_IN_SIDES, heads, NULL, { "carried", MOE_BY_TOKEN, MOE_AT(heads.kv_cols), 0 });
static const moe_layer_type moe_cross_type = MOE_LAYER_TYPE("cross", MOE_IN_SIDES, heads, moe_keep_cross,
                                                            { "carried", MOE_BY_SOURCE, MOE_AT(heads.kv_cols), 0 });

/* ---- Feed-forward ---- */

static const char *const moe_ffn_activations[] = { [MOE_UNARY_RELU] = "relu",
                                                   [MOE_UNARY_GELU] = "gelu",
                                                   [MOE_UNARY_SWISH] = "swish",
                                                   [MOE_UNARY_GELU_TANH] = "gelu_tanh",
                                                   NULL };
_Static_assert(sizeof(moe_unary) == sizeof(int), "names of keys are stored as int");
static const moe_key moe_ffn_keys[] = {
    MOE_COUNT_KEY("hidden", 1, 0, hidden), MOE_NAME_KEY("activation", moe_ffn_activations, -1, ffn.activation),
    MOE_FLAG_KEY("gated", 0, ffn.gated),   MOE_FLAG_KEY("parallel", 0, parallel),
    MOE_FLAG_KEY("residual", 1, residual), MOE_NORM_KEYS,
};

static void moe_bind_ffn(moe_reader *r, moe_layer *layer) { moe_bind_units(r, layer, &layer->ffn, layer->hidden, 0); }

static moe_node *moe_build_ffn(moe_builder *b, const moe_layer *layer, moe_node *x) {
    return moe_build_units(b, layer, &layer->ffn, 0, x);
}

static const moe_layer_type moe_ffn_type = MOE_LAYER_TYPE("ffn", MOE_IN_SIDES, ffn, NULL, { 0 });

/* ---- SSRU ---- */

static const moe_key moe_ssru_keys[] = { MOE_FLAG_KEY("residual", 1, residual), MOE_NORM_KEYS };

static void moe_bind_ssru(moe_reader *r, moe_layer *layer) {
    moe_bind_affine(r, layer, &layer->ssru.input, layer->in, layer->in, "input");
    moe_bind_affine(r, layer, &layer->ssru.forget, layer->in, layer->in, "forget");
}

static moe_node *moe_build_ssru(moe_builder *b, const moe_layer *layer, moe_node *x) {
    moe_node *u = moe_build_affine(b, layer, &layer->ssru.input, x, "input"), *f;
    f = moe_build_affine(b, layer, &layer->ssru.forget, x, "forget.logits");
    f = moe_op_unary(b->g, MOE_UNARY_SIGMOID, f, MOE_PART("forget"));
    x = moe_op_ssru(b->g, u, f, moe_carried_of(b, layer)->node, MOE_PART("cell"));
    moe_build_store(b, layer, 0, moe_op_view(b->g, x, layer->out, layer->out, MOE_PART("c_next")));
    return moe_op_view(b->g, x, 0, layer->out, MOE_PART("y"));
}

static const moe_layer_type moe_ssru_type =
    MOE_LAYER_TYPE("ssru", MOE_IN_DECODER, ssru, NULL, { "c", MOE_BY_PARENT, MOE_AT(out), 1 });

/* ---- Average attention (Zhang et al. 2018, arXiv 1805.00631) ---- */

static const char *const moe_average_units[MOE_AVERAGE_DEPTH - 1] = { "up.0", "up.1", "up.2" };
static const moe_key moe_average_keys[] = {
    MOE_COUNT_KEY("hidden", 1, 0, hidden),
    { "depth", MOE_KEY_COUNT, NULL, 1, MOE_AVERAGE_DEPTH, 0, MOE_AT(average.depth), 0 },
    MOE_NAME_KEY("activation", moe_ffn_activations, -1, average.activation),
    MOE_FLAG_KEY("gated", 1, average.gated),
    MOE_FLAG_KEY("residual", 1, residual),
    MOE_NORM_KEYS,
};

static void moe_bind_average(moe_reader *r, moe_layer *layer) {
    moe_average_layer *a = &layer->average;
    size_t cols = layer->in;
    for (size_t i = 0; i + 1 < a->depth; i++, cols = layer->hidden)
        moe_bind_affine(r, layer, &a->units[i], layer->hidden, cols, moe_average_units[i]);
    if (cols != layer->in) moe_bind_affine(r, layer, &a->down, layer->in, cols, "down");
    if (a->gated) moe_bind_affine(r, layer, &a->input, layer->in, layer->in, "input");
    if (a->gated) moe_bind_affine(r, layer, &a->forget, layer->in, layer->in, "forget");
    layer->norms_inside = 1;
}

static moe_node *moe_build_average(moe_builder *b, const moe_layer *layer, moe_node *x) {
    const moe_average_layer *a = &layer->average;
    moe_node *y = moe_op_average(b->g, x, moe_carried_of(b, layer)->node, MOE_PART("average")), *gate;
    moe_build_store(b, layer, 0, moe_op_view(b->g, y, layer->out, layer->out, MOE_PART("sum_next")));
    y = moe_op_view(b->g, y, 0, layer->out, MOE_PART("mean"));
    if (moe_norms_input(layer)) y = moe_build_normed(b, layer, y);
    for (size_t i = 0; i + 1 < a->depth; i++)
        y = moe_build_active(b, layer, a->activation, moe_build_affine(b, layer, &a->units[i], y, moe_average_units[i]),
                             "activation");
    if (a->down.w.rows) y = moe_build_affine(b, layer, &a->down, y, "down");
    if (!a->gated) return y;
    gate = moe_build_affine(b, layer, &a->input, x, "input.logits");
    x = moe_op_pointwise(b->g, moe_op_unary(b->g, MOE_UNARY_SIGMOID, gate, MOE_PART("input")), x, 1, MOE_PART("old"));
    gate = moe_build_affine(b, layer, &a->forget, y, "forget.logits");
    y = moe_op_pointwise(b->g, moe_op_unary(b->g, MOE_UNARY_SIGMOID, gate, MOE_PART("forget")), y, 1, MOE_PART("new"));
    return moe_op_pointwise(b->g, x, y, 0, MOE_PART("y"));
}

static const moe_layer_type moe_average_type =
    MOE_LAYER_TYPE("average", MOE_IN_DECODER, average, NULL, { "sum", MOE_BY_PARENT, MOE_AT(out), 1 });

/* ---- Gated DeltaNet ---- */

enum { MOE_MAX_STATE = 1 << 28 }; /* numbers of a hypothesis in a layer */
static const moe_key moe_delta_keys[] = {
    MOE_COUNT_KEY("heads", 1, 0, delta.op.heads),
    { "key_heads", MOE_KEY_COUNT, NULL, 1, MOE_WIDEST, 0, MOE_AT(delta.op.key_heads), MOE_AT(delta.op.heads) },
    MOE_COUNT_KEY("head.size", 1, 0, delta.op.head_size),
    { "key.size", MOE_KEY_COUNT, NULL, 1, MOE_WIDEST, 0, MOE_AT(delta.op.key_size), MOE_AT(delta.op.head_size) },
    { "kernel", MOE_KEY_COUNT, NULL, 1, 64, 4, MOE_AT(delta.op.kernel), 0 },
    MOE_FLAG_KEY("tiled", 0, delta.op.tiled),
    MOE_FLAG_KEY("residual", 1, residual),
    MOE_NORM_KEYS,
};

static void moe_bind_delta(moe_reader *r, moe_layer *layer) {
    moe_delta_layer *d = &layer->delta;
    moe_delta_op *s = &d->op;
    const uint64_t keys = (uint64_t)s->key_heads * s->key_size, values = (uint64_t)s->heads * s->head_size;
    const uint64_t padded = (uint64_t)s->heads * moe_round_up(s->head_size, MOE_LANES), conv = 2 * keys + values;
    if (s->heads % s->key_heads)
        MOE_REFUSE(r, layer, "key_heads", "is %zu, which does not divide %zu heads", s->key_heads, s->heads);
    if (keys > MOE_WIDEST || values > MOE_WIDEST || padded * s->key_size + conv * s->kernel > MOE_MAX_STATE)
        MOE_REFUSE(r, layer, "heads", "is %zu, too large with keys of %zu and values of %zu columns", s->heads,
                   s->key_size, s->head_size);
    if (r->status != MOE_OK) return;
    s->conv_cols = (size_t)conv, s->values = (size_t)values;
    s->state_cols = (s->kernel - 1) * s->conv_cols + (size_t)padded * s->key_size;
    s->guess_cols = 2 * s->conv_cols + s->values + 2 * s->heads;
    moe_bind_affine(r, layer, &d->in, s->conv_cols + s->values + 2 * s->heads, layer->in, "in");
    moe_bind_affine(r, layer, &d->out, layer->in, s->values, "out");
    s->conv = moe_bind_vector(r, s->kernel * s->conv_cols, 0, "%s.conv", layer->name);
    s->rate = moe_bind_vector(r, s->heads, 0, "%s.rate", layer->name);
    s->shift = moe_bind_vector(r, s->heads, 0, "%s.shift", layer->name);
    d->head_norm = (moe_rotary_op){ .queries = s->heads, .width = s->head_size, .epsilon = layer->norm.epsilon };
    d->head_norm.query_norm = moe_bind_vector(r, s->head_size, 0, "%s.head_norm.weight", layer->name);
}

static moe_node *moe_build_delta(moe_builder *b, const moe_layer *layer, moe_node *x) {
    const moe_delta_layer *d = &layer->delta;
    moe_delta_op op = d->op;
    x = moe_build_affine(b, layer, &d->in, x, "in");
    op.states = moe_carried_of(b, layer)[0].rows;
    op.guesses = moe_carried_of(b, layer)[1].rows;
    moe_node *y = moe_op_view(b->g, moe_op_delta(b->g, &op, x, MOE_PART("delta")), 0, op.values, MOE_PART("y"));
    y = moe_op_rotary(b->g, &d->head_norm, y, MOE_PART("head_norm"));
    x = moe_op_unary(b->g, MOE_UNARY_SWISH, moe_op_view(b->g, x, op.conv_cols, op.values, MOE_PART("z")),
                     MOE_PART("gate"));
    return moe_build_affine(b, layer, &d->out, moe_op_pointwise(b->g, y, x, 1, MOE_PART("gated")), "out");
}

static const moe_layer_type moe_delta_type =
    MOE_LAYER_TYPE("delta", MOE_IN_DECODER, delta, NULL, { "state", MOE_BY_STATE, MOE_AT(delta.op.state_cols), 1 },
                   { "guesses", MOE_BY_GUESS, MOE_AT(delta.op.guess_cols), 1 });

/* ---- A norm alone ---- */

static const moe_key moe_norm_keys[] = { MOE_ANY_NORM_KEYS };

static void moe_bind_norm(moe_reader *r, moe_layer *layer) {
    (void)r;
    layer->norm_place = MOE_NORM_BEFORE;
}

static moe_node *moe_build_norm(moe_builder *b, const moe_layer *layer, moe_node *x) { return (void)b, (void)layer, x; }

static const moe_layer_type moe_norm_type = MOE_LAYER_TYPE("norm", MOE_IN_SIDES, norm, NULL, { 0 });

/* ---- GNMT's attention, which is not in the list of layers but runs between two of them ---- */

static const moe_key moe_attention_keys[] = {
    MOE_NAME_KEY("kind", MOE_NAMES("additive", "product"), -1, attention.product),
    MOE_COUNT_KEY("size", 1, 0, attention.size),
    MOE_COUNT_KEY("layer", 0, 0, attention.layer),
    MOE_NAME_KEY("query", MOE_NAMES("state", "output"), -1, attention.query_output),
    MOE_NAME_KEY("start", MOE_NAMES("query", "zero"), 0, attention.start_zero),
};
enum { MOE_ATTENTION_KEYS, MOE_ATTENTION_VALUES, MOE_ATTENTION_QUERY, MOE_ATTENTION_CONTEXT };

/* Bind GNMT's attention. The decoder's layers precede it in the array and are already bound.
 *
 * GNMT's query is the bottom layer's output of the previous step. If no layer reads the current context, the context is
 * computed at the start of the step from the carried query. Otherwise it is computed right after the layer that makes
 * the query, and carried if a layer reads the context of the previous step. A new sentence, which has no carried
 * context, starts with zeros or with a context computed from the initial query. */
static void moe_bind_attention(moe_reader *r, moe_layer *layer) {
    moe_attention_layer *a = &layer->attention;
    const moe_layer *decoder = a->asks - a->layer;
    const size_t memory = layer->context;
    int previous = 0;
    for (const moe_layer *reads = decoder; reads < layer && r->status == MOE_OK; reads++) {
        const int context = reads->type == &moe_lstm_type ? reads->lstm.context : MOE_CONTEXT_NONE;
        previous |= context == MOE_CONTEXT_PREVIOUS;
        a->current |= context == MOE_CONTEXT_CURRENT;
        if (context == MOE_CONTEXT_CURRENT && reads <= a->asks)
            MOE_REFUSE(r, reads, "context", "must not be \"current\": layer %zu, which computes the query, runs later",
                       a->layer);
    }
    if (r->status != MOE_OK) return;
    if (a->asks->type != &moe_lstm_type) MOE_REFUSE(r, layer, "layer", "is %zu, which is not an lstm layer", a->layer);
    layer->in = a->query_output ? a->asks->out : a->asks->lstm.cell[0].state;
    layer->out = memory;
    moe_bind_matrix(r, &a->w_key, a->size, memory, 0, "%s", "attention.w_key");
    moe_bind_matrix(r, &a->w_query, a->size, layer->in, 0, "%s", "attention.w_query");
    a->v = moe_bind_vector(r, a->size, 0, "%s", "attention.v");
    a->bias = moe_bind_vector(r, a->size, 1, "%s", "attention.bias");
    if (a->current && previous) a->context_cols = memory;
    if (a->query_output && (!a->current || (previous && !a->start_zero))) a->query_cols = layer->in;
}

static void moe_keep_attention(moe_builder *b, const moe_layer *layer, moe_node *x) {
    const moe_attention_layer *a = &layer->attention;
    moe_build_store(b, layer, MOE_ATTENTION_VALUES, x);
    x = moe_op_linear(b->g, &a->w_key, x, NULL, "encoder.keys");
    if (a->product) x = moe_op_unary(b->g, MOE_UNARY_TANH, x, "encoder.tanh_keys");
    moe_build_store(b, layer, MOE_ATTENTION_KEYS, x);
}

/* Build GNMT's attention for a query; moe_op_attention explains `before`. */
static moe_node *moe_build_context(moe_builder *b, const moe_layer *layer, moe_node *query, moe_node *before) {
    const moe_attention_layer *a = &layer->attention;
    const moe_carried *carried = moe_carried_of(b, layer);
    const moe_attention_op op = { a->product, a->start_zero && !a->current, a->v, carried[MOE_ATTENTION_KEYS].rows,
                                  carried[MOE_ATTENTION_VALUES].rows };
    query = moe_op_linear(b->g, &a->w_query, query, a->bias, before ? "decoder.first_query" : "decoder.query");
    if (a->product) query = moe_op_unary(b->g, MOE_UNARY_TANH, query, "decoder.tanh_query");
    return moe_op_attention(b->g, &op, query, before, layer->out, before ? "decoder.first_context" : "decoder.context");
}

/* Build the context of the previous step. This precedes the layers of a step. */
static void moe_build_previous(moe_builder *b, const moe_layer *layer) {
    const moe_attention_layer *a = &layer->attention;
    const moe_carried *carried = moe_carried_of(b, layer);
    moe_node *before = carried[MOE_ATTENTION_CONTEXT].node;
    b->contexts[MOE_CONTEXT_PREVIOUS] = before;
    if (a->current && (!before || a->start_zero)) return;
    b->contexts[MOE_CONTEXT_PREVIOUS] = moe_build_context(b, layer,
                                                          a->query_cols ? carried[MOE_ATTENTION_QUERY].node
                                                                        : moe_carried_of(b, a->asks)[MOE_LSTM_R].node,
                                                          before);
}

/* Build the context after the layer that computes the query (output x), and store what the next step needs. */
static moe_node *moe_build_attention(moe_builder *b, const moe_layer *layer, moe_node *x) {
    const moe_attention_layer *a = &layer->attention;
    if (a->current) {
        b->contexts[MOE_CONTEXT_CURRENT] =
            moe_build_context(b, layer, a->query_output ? x : moe_carried_of(b, a->asks)[MOE_LSTM_R].node, NULL);
        moe_build_store(b, layer, MOE_ATTENTION_CONTEXT, b->contexts[MOE_CONTEXT_CURRENT]);
    }
    moe_build_store(b, layer, MOE_ATTENTION_QUERY, x);
    return x;
}

static const moe_layer_type moe_attention_type =
    MOE_LAYER_TYPE("gnmt-attention", 0, attention,
                   moe_keep_attention, [MOE_ATTENTION_KEYS] = { "keys", MOE_BY_SOURCE, MOE_AT(attention.size), 0 },
                   [MOE_ATTENTION_VALUES] = { "values", MOE_BY_SOURCE, MOE_AT(out), 0 },
                   [MOE_ATTENTION_QUERY] = { "query", MOE_BY_PARENT, MOE_AT(attention.query_cols), 0 },
                   [MOE_ATTENTION_CONTEXT] = { "context", MOE_BY_PARENT, MOE_AT(attention.context_cols), 0 });

/* ---- All kinds ---- */

static const moe_layer_type *const moe_layer_types[] = { &moe_lstm_type,     &moe_mixture_type, &moe_self_type,
                                                         &moe_cross_type,    &moe_ffn_type,     &moe_norm_type,
                                                         &moe_ssru_type,     &moe_average_type, &moe_delta_type,
                                                         &moe_attention_type };

static void moe_read_layer(moe_reader *r, moe_layer *layer, const char *side, size_t index, int place, size_t in,
                           size_t context) {
    snprintf(layer->name, sizeof layer->name, "%s.%zu", side, index);
    const moe_meta *kind = moe_read(r, "%s.kind", layer->name);
    for (size_t i = 0; kind && kind->kind == MOE_META_TEXT && i < MOE_COUNT(moe_layer_types); i++)
        if (moe_span_is(moe_meta_text(kind, 0), moe_layer_types[i]->name)) layer->type = moe_layer_types[i];
    if (!layer->type) moe_reader_fail(r, kind ? "has an unknown value" : "is missing");
    else if (!(layer->type->places & place))
        moe_reader_fail(r, "is \"%s\", which is not supported in the %s", layer->type->name, side);
    if (r->status != MOE_OK) return;
    layer->place = place;
    layer->in = layer->out = in;
    layer->context = context;
    moe_read_keys(r, layer);
    if (r->status != MOE_OK) return;
    layer->type->bind(r, layer);
    if (layer->norm_place) {
        const size_t n = layer->norm_place == MOE_NORM_AFTER ? layer->out : layer->in;
        layer->norm.weight = moe_bind_vector(r, n, 0, "%s.norm.weight", layer->name);
        if (!layer->norm.rms) layer->norm.bias = moe_bind_vector(r, n, 0, "%s.norm.bias", layer->name);
    }
    if (layer->norm_place == MOE_NORM_BOTH) {
        layer->post_norm = layer->norm;
        layer->post_norm.weight = moe_bind_vector(r, layer->out, 0, "%s.post_norm.weight", layer->name);
        if (!layer->norm.rms)
            layer->post_norm.bias = moe_bind_vector(r, layer->out, 0, "%s.post_norm.bias", layer->name);
    }
    if (layer->parallel && (!index || layer[-1].in != in))
        MOE_REFUSE(r, layer, "parallel", "must be 0 unless the previous layer has inputs of %zu columns", in);
    if (layer->residual && layer->out != in)
        MOE_REFUSE(r, layer, "residual", "must be 0: the input has %zu columns, the output %zu", in, layer->out);
}

static moe_node *moe_build_layer(moe_builder *b, const moe_layer *layer, moe_node *x) {
    const int before = moe_norms_input(layer) && !layer->norms_inside;
    moe_node *in = layer->parallel ? b->before : x, *y;
    if (layer->place) b->before = x; /* GNMT's attention is part of another layer */
    y = layer->type->build(b, layer, before ? moe_build_normed(b, layer, in) : in);
    if (layer->norm_place == MOE_NORM_BOTH) y = moe_op_norm(b->g, &layer->post_norm, y, MOE_PART("post_norm"));
    if (layer->residual) y = moe_op_pointwise(b->g, x, y, 0, MOE_PART("output"));
    return layer->norm_place == MOE_NORM_AFTER ? moe_build_normed(b, layer, y) : y;
}

/* ==== 34. Models ==============================================================================================
 * The model described by a file's metadata, its graphs, and the public calls for it: open, close, save, query.
 * Invariant: an open model never changes. */

static const char *const moe_rules_names[] = { "paper", "nvidia", "tf", "mlperf", "hf", "marian", NULL };
static const char *const moe_gate_names[] = { "softmax", "topk", "threshold", "sigmoid", "batchwise", NULL };

/* For every source token s, the tokens that its translations may use: ids[offsets[s] .. offsets[s + 1]), stored as F32,
 * which is exact up to 2^24. A sentence may use the tokens listed for its source tokens and those below `first`. */
typedef struct moe_shortlist {
    const float *offsets, *ids; /* [source vocabulary + 1], [n]; NULL without a shortlist */
    size_t n, first;
    size_t multiple; /* tokens from `first` on are added until the list's length is a multiple of this */
    int shared;      /* 1 if translations may also use the tokens of the source */
} moe_shortlist;

struct moe_model {
    moe_model *self;       /* the model without const, to count its holders */
    atomic_size_t holders; /* number of sessions, plus 1 until the caller closes the model */
    moe_allocator allocator;
    moe_file file;
    char *name; /* copy of the origin's name, or NULL */
    moe_kind kind;
    int32_t vocabulary, bos, eos;
    int32_t ends[MOE_MAX_ENDS]; /* [n_ends] end tokens, eos first */
    size_t n_ends;
    int prompted;                          /* 1 if the model has no encoder and the target continues the source */
    int32_t source_vocabulary, source_end; /* vocabulary size and end token of sources */
    int separate;                          /* 1 if sources and language tags have their own ids */
    int source_tag, source_bos, source_eos;
    int32_t *never; /* [n_never] tokens that are never generated, suppressed tokens first (see moe_output_op) */
    size_t n_never, n_suppressed;
    const moe_meta *languages; /* TEXTS or NULL */
    const moe_meta *tags;      /* INTS */
    size_t width;              /* D */
    int blocks;                /* 1 if activations of quantised products have a scale per 64 columns, not per row */
    float embedding_scale;
    moe_matrix source_embedding, target_embedding, output; /* [V, D], except source: [source_vocabulary, D] */
    const float *output_bias;                              /* [V] or NULL */
    moe_shortlist shortlist;
    moe_layer *layers; /* [n_layers] of encoder and decoder (or network), then the predictor's or GNMT's attention */
    size_t n_layers;
    moe_layer *decoder; /* the decoder's first layer */
    size_t n_encoder, n_decoder, n_predictor;
    moe_norm_op predictor_norms[2]; /* of the next token's embedding and of the decoder's output */
    moe_matrix predictor_join;      /* [D, 2 D] */
    const moe_layer *attention;     /* GNMT's attention, or NULL */
    int shows;                      /* 1 if the model can report the weights of GNMT's attention or of aligning heads */
    moe_matrix positions;           /* [positions, D] F32; 0 rows if none */
    moe_matrix rotary[MOE_ROTARIES]; /* [positions, head width] F32; 0 rows if none */
    int forced_tag;                  /* 1 if translations start with the target language's tag */
    size_t memory_width;             /* columns of the encoder's output */
    int decoder_from_encoder;        /* 1 if the decoder starts with the encoder's final states, not with zeros */
    moe_rules rules;
};

/* Read the layers of a side (encoder or decoder) in order. Returns the output columns of the last layer. */
static size_t moe_read_layers(moe_reader *r, const moe_model *m, moe_layer *layers, size_t n, const char *side,
                              int place, size_t context) {
    size_t width = m->width;
    for (size_t i = 0; i < n && r->status == MOE_OK; i++) {
        moe_read_layer(r, &layers[i], side, i, place, width, context);
        width = layers[i].out;
    }
    return width;
}

static int32_t moe_read_token(moe_reader *r, const moe_model *m, const char *key, int required) {
    return (int32_t)moe_read_int(r, moe_read(r, "%s", key), required ? 0 : -1, m->vocabulary - 1, -1);
}

static const moe_meta *moe_read_tokens(moe_reader *r, const char *key, int32_t vocabulary) {
    const moe_meta *m = moe_read(r, "%s", key);
    if (m && m->kind != MOE_META_INTS) moe_reader_fail(r, "is not a list of integers");
    for (size_t i = 0; m && r->status == MOE_OK && i < m->count; i++)
        if (moe_meta_int(m, i) < 0 || moe_meta_int(m, i) >= vocabulary)
            moe_reader_fail(r, "contains token %lld; the largest valid id is %d", (long long)moe_meta_int(m, i),
                            (int)vocabulary - 1);
    return r->status == MOE_OK ? m : NULL;
}

static void moe_bind_embeddings(moe_reader *r, moe_model *m) {
    const size_t v = (size_t)m->vocabulary, sources = (size_t)m->source_vocabulary;
    if (!m->separate) moe_bind_matrix(r, &m->source_embedding, v, m->width, 1, "%s", "embedding.weight");
    m->target_embedding = m->source_embedding;
    if (!m->source_embedding.rows) {
        moe_bind_matrix(r, &m->source_embedding, sources, m->width, 0, "%s", "source.embedding.weight");
        moe_bind_matrix(r, &m->target_embedding, v, m->width, 0, "%s", "target.embedding.weight");
    }
    const moe_tensor_info *t = moe_find_tensor(r->file, "positions.weight");
    moe_bind_exact(r, &m->positions, t && t->n_dims == 2 ? (size_t)t->dims[0] : 1, m->width, 1, "%s",
                   "positions.weight");
    for (size_t i = 0; i < MOE_ROTARIES; i++) {
        t = moe_find_tensor(r->file, moe_rotary_names[i]);
        if (t && t->n_dims == 2)
            moe_bind_exact(r, &m->rotary[i], (size_t)t->dims[0], (size_t)t->dims[1], 1, "%s", moe_rotary_names[i]);
    }
}

/* Initialise the decoder's n-th LSTM layer with the final state of the encoder's n-th LSTM layer. A final state is the
 * state at the last token or, in a bidirectional layer, at the first token, where the backward direction ends. */
static void moe_pair_states(moe_reader *r, moe_model *m) {
    size_t e = 0, d = 0;
    moe_read(r, "decoder.init");
    for (;; e++, d++) {
        while (e < m->n_encoder && m->layers[e].type != &moe_lstm_type) e++;
        while (d < m->n_decoder && m->decoder[d].type != &moe_lstm_type) d++;
        if (e == m->n_encoder || d == m->n_decoder) break;
        m->layers[e].lstm.begins = &m->decoder[d];
        if (m->layers[e].hidden != m->decoder[d].hidden ||
            m->layers[e].lstm.cell[0].state != m->decoder[d].lstm.cell[0].state)
            moe_reader_fail(r, "is \"encoder\", but the states of %s and %s differ in size", m->layers[e].name,
                            m->decoder[d].name);
    }
    if (e < m->n_encoder || d < m->n_decoder)
        moe_reader_fail(r, "is \"encoder\", but encoder and decoder differ in the number of lstm layers");
}

/* Bind the output layer, which has `width` input columns. Without output.weight it uses the target embedding. */
static void moe_bind_output(moe_reader *r, moe_model *m, size_t width) {
    if (width != m->width && m->kind != MOE_MODEL_CLASSIFIER) {
        moe_read(r, "model.width");
        moe_reader_fail(r, "is %zu, but the last decoder layer has %zu output columns", m->width, width);
    }
    moe_bind_matrix(r, &m->output, (size_t)m->vocabulary, width, m->kind != MOE_MODEL_CLASSIFIER, "%s",
                    "output.weight");
    if (!m->output.rows) m->output = m->target_embedding;
    m->output_bias = moe_bind_vector(r, (size_t)m->vocabulary, 1, "%s", "output.bias");
}

static void moe_take_layers(moe_reader *r, moe_model *m, size_t n_encoder, size_t n_decoder) {
    if (r->status != MOE_OK) return;
    m->n_encoder = n_encoder;
    m->n_decoder = n_decoder;
    m->n_predictor = (size_t)moe_read_int(r, m->prompted ? moe_read(r, "predict.layers") : NULL, 0, MOE_MAX_LAYERS, 0);
    m->n_layers = n_encoder + n_decoder + m->n_predictor;
    m->layers = moe_allocate_zeroed(&m->allocator, (m->n_layers + 1) * sizeof *m->layers);
    if (m->layers) m->decoder = m->layers + n_encoder;
    else r->status = moe_fail(r->error, MOE_ERROR_MEMORY, "model", "out of memory for %zu layers", m->n_layers);
}

static size_t moe_read_layer_count(moe_reader *r, const char *side) {
    return (size_t)moe_read_int(r, moe_read(r, "%s.layers", side), 1, MOE_MAX_LAYERS, 0);
}

/* Bind the layers and the output of a model without an encoder. */
static void moe_bind_stack(moe_reader *r, moe_model *m, const char *side, int place) {
    moe_take_layers(r, m, 0, moe_read_layer_count(r, side));
    moe_bind_output(r, m, moe_read_layers(r, m, m->decoder, m->n_decoder, side, place, 0));
}

/* Read the format of sources and targets: tags, begin and end tokens. */
static void moe_read_format(moe_reader *r, moe_model *m, moe_rules rules) {
    static const char *const inits[] = { "zero", "encoder", NULL };
    m->source_tag = (int)moe_read_int(r, moe_read(r, "source.tag"), 0, 2, m->languages != NULL);
    m->source_bos = (int)moe_read_int(r, moe_read(r, "source.bos"), 0, !m->separate, 0);
    m->source_eos = (int)moe_read_int(r, moe_read(r, "source.eos"), 0, 1, 1);
    m->forced_tag = (int)moe_read_int(r, moe_read(r, "target.tag"), 0, 1, 0);
    if (m->forced_tag && m->separate) moe_reader_fail(r, "must be 0 if language tags are source ids");
    m->decoder_from_encoder = moe_read_choice(r, moe_read(r, "decoder.init"), inits, 0);
    m->rules = (moe_rules)moe_read_choice(r, moe_read(r, "decode.rules"), moe_rules_names, (int)rules);
    m->source_end = (int32_t)moe_read_int(r, moe_read(r, "source.token.eos"), 0, m->source_vocabulary - 1,
                                          m->separate ? -1 : m->eos);
    moe_bind_embeddings(r, m);
}

/* Read which heads align source and target, if the file lists any. A Transformer reports the mean of their weights. */
static void moe_read_aligner(moe_reader *r, moe_model *m) {
    const moe_meta *given = moe_read(r, "align.layer");
    moe_layer *layer = &m->decoder[moe_read_int(r, given, 0, (int64_t)m->n_decoder - 1, 0)];
    if (!given) return;
    if (layer->type != &moe_cross_type)
        moe_reader_fail(r, "refers to %s, which does not attend to the source", layer->name);
    if (r->status != MOE_OK) return;
    layer->heads.shown = (uint64_t)moe_read_int(r, moe_read(r, "align.heads"), 1,
                                                (int64_t)(~(uint64_t)0 >> (64 - moe_min(layer->heads.heads, 62))), 0);
    m->shows = 1;
}

/* Bind encoder and decoder, with GNMT's attention if its keys exist or no layer attends to the source. */
static void moe_bind_translation(moe_reader *r, moe_model *m, moe_rules rules) {
    const size_t n_encoder = moe_read_layer_count(r, "encoder"), n_decoder = moe_read_layer_count(r, "decoder");
    int crosses = 0;
    moe_read_format(r, m, rules);
    moe_take_layers(r, m, n_encoder, n_decoder);
    m->memory_width = moe_read_layers(r, m, m->layers, n_encoder, "encoder", MOE_IN_ENCODER, 0);
    moe_bind_output(r, m, moe_read_layers(r, m, m->decoder, n_decoder, "decoder", MOE_IN_DECODER, m->memory_width));
    if (r->status == MOE_OK && m->decoder_from_encoder) moe_pair_states(r, m);
    if (r->status != MOE_OK) return;
    for (size_t i = 0; i < n_decoder; i++) crosses |= m->decoder[i].type == &moe_cross_type;
    if (crosses && !moe_read(r, "attention.kind")) {
        for (size_t i = 0; i < n_decoder; i++)
            if (m->decoder[i].type == &moe_lstm_type && m->decoder[i].lstm.context)
                MOE_REFUSE(r, &m->decoder[i], "context", "must be \"none\": the model has no attention.kind");
        moe_read_aligner(r, m);
        return;
    }
    moe_layer *last = &m->layers[m->n_layers++];
    *last = (moe_layer){ .type = &moe_attention_type, .name = "attention", .place = MOE_IN_DECODER };
    last->context = m->memory_width;
    moe_read_keys(r, last);
    if (last->attention.layer >= n_decoder)
        MOE_REFUSE(r, last, "layer", "is %zu, but must be 0 to %zu", last->attention.layer, n_decoder - 1);
    if (r->status != MOE_OK) return;
    last->attention.asks = &m->decoder[last->attention.layer];
    moe_bind_attention(r, last);
    m->attention = last;
    m->shows = 1;
}

/* Bind the layers that predict the token after the next one (DeepSeek-V3, arXiv 2412.19437, section 2.2), if any. */
static void moe_bind_predictor(moe_reader *r, moe_model *m) {
    static const char *const names[] = { "predict.embedding.norm.weight", "predict.hidden.norm.weight" };
    if (!m->n_predictor || r->status) return;
    moe_layer *layers = m->decoder + m->n_decoder;
    const float epsilon = (float)moe_read_number(r, moe_read(r, "predict.epsilon"), 1, 0, 1, 1e-5);
    for (int i = 0; i < 2; i++)
        m->predictor_norms[i] = (moe_norm_op){ moe_bind_vector(r, m->width, 0, "%s", names[i]), NULL, epsilon, 1 };
    moe_bind_matrix(r, &m->predictor_join, m->width, 2 * m->width, 0, "%s", "predict.join.weight");
    moe_read_layers(r, m, layers, m->n_predictor, "predict", MOE_IN_DECODER, 0);
    for (size_t i = 0; i < m->n_predictor && !r->status; i++) {
        const moe_layer_type *type = layers[i].type;
        if ((type != &moe_self_type && type != &moe_ffn_type && type != &moe_norm_type && type != &moe_mixture_type) ||
            layers[i].out != m->width)
            MOE_REFUSE(r, &layers[i], "kind", "must be attention, ffn, norm or moe, with %zu outputs", m->width);
    }
}

/* Bind a decoder-only model, whose target continues the source. */
static void moe_bind_prompted(moe_reader *r, moe_model *m) {
    m->prompted = 1, m->source_end = m->eos;
    m->source_bos = (int)moe_read_int(r, moe_read(r, "source.bos"), 0, 1, 0);
    m->rules = (moe_rules)moe_read_choice(r, moe_read(r, "decode.rules"), moe_rules_names, MOE_RULES_HF);
    moe_bind_embeddings(r, m);
    moe_bind_stack(r, m, "decoder", MOE_IN_DECODER);
    moe_bind_predictor(r, m);
}

static void moe_read_ends(moe_reader *r, moe_model *m) {
    const moe_meta *more = moe_read_tokens(r, "token.ends", m->vocabulary);
    m->ends[m->n_ends++] = m->eos;
    if (more && more->count >= MOE_MAX_ENDS)
        moe_reader_fail(r, "has %zu tokens, but at most %d are supported", more->count, MOE_MAX_ENDS - 1);
    for (size_t i = 0; more && r->status == MOE_OK && i < more->count; i++) {
        int known = 0;
        m->ends[m->n_ends] = (int32_t)moe_meta_int(more, i);
        for (size_t k = 0; k < m->n_ends; k++) known |= m->ends[k] == m->ends[m->n_ends];
        m->n_ends += !known;
    }
}

static void moe_read_never(moe_reader *r, moe_model *m) {
    const moe_meta *suppressed = moe_read_tokens(r, "token.suppressed", m->vocabulary),
                   *never = moe_read_tokens(r, "token.never", m->vocabulary);
    m->n_suppressed = suppressed ? suppressed->count : 0;
    m->n_never = m->n_suppressed + (never ? never->count : 0);
    if (r->status != MOE_OK || !m->n_never) return;
    m->never = moe_allocate_zeroed(&m->allocator, m->n_never * sizeof *m->never);
    if (!m->never) {
        r->status =
            moe_fail(r->error, MOE_ERROR_MEMORY, "model", "out of memory for the tokens that are never generated");
        return;
    }
    for (size_t i = 0; i < m->n_never; i++)
        m->never[i] =
            (int32_t)(i < m->n_suppressed ? moe_meta_int(suppressed, i) : moe_meta_int(never, i - m->n_suppressed));
}

/* Return 1 if n numbers are integers in [0, end), end <= 2^30. The loop has no branches. */
static int moe_are_whole(const float *v, size_t n, size_t end) {
    const float most = (float)end, exact = 1 << 23; /* larger floats are integers; adding `exact` rounds others */
    int fine = 1;
    for (size_t i = 0; i < n; i++)
        fine &= (v[i] >= 0) & (v[i] < most) & (((v[i] + exact) - exact == v[i]) | (v[i] >= exact));
    return fine;
}

/* Bind and check the shortlist. */
static void moe_bind_shortlist(moe_reader *r, moe_model *m) {
    const size_t tokens = (size_t)m->source_vocabulary, vocabulary = (size_t)m->vocabulary, most = (1 << 24) - 1;
    const size_t n = (size_t)moe_read_int(r, moe_read(r, "shortlist.entries"), 0, (int64_t)most, 0);
    moe_shortlist *s = &m->shortlist;
    if (!n) return;
    s->n = n;
    s->first = (size_t)moe_read_int(r, moe_read(r, "shortlist.first"), 0, m->vocabulary, 0);
    s->multiple = (size_t)moe_read_int(r, moe_read(r, "shortlist.multiple"), 1, 1024, 1);
    s->shared = (int)moe_read_int(r, moe_read(r, "shortlist.shared"), 0, !m->separate, 0);
    const float *offsets = s->offsets = moe_bind_vector(r, tokens + 1, 0, "%s", "shortlist.offsets");
    const float *ids = moe_bind_vector(r, n, 0, "%s", "shortlist.ids");
    if (r->status != MOE_OK) return;
    int fine = offsets[0] == 0.0f && offsets[tokens] == (float)n && moe_are_whole(offsets, tokens + 1, n + 1) &&
               moe_are_whole(ids, n, vocabulary);
    for (size_t t = 0; fine && t < tokens; t++) {
        const size_t end = (size_t)offsets[t + 1];
        fine = offsets[t] <= offsets[t + 1];
        for (size_t i = (size_t)offsets[t] + 1; i < end; i++) fine &= ids[i - 1] < ids[i];
    }
    s->ids = ids;
    if (!fine) moe_reader_fail(r, "or shortlist.offsets is invalid: not ascending or beyond the vocabulary");
}

static moe_status moe_bind(moe_model *m, moe_error *error) {
    enum { GNMT, LANGUAGE, DEEP, TRANSFORMER, DECODER };
    static const char *const architectures[] = { "gnmt-moe", "moe-lm", "deep-moe", "transformer", "decoder", NULL };
    static const moe_kind
        kinds[] = { [LANGUAGE] = MOE_MODEL_LANGUAGE, [DEEP] = MOE_MODEL_CLASSIFIER, [DECODER] = MOE_MODEL_TRANSLATION };
    moe_reader r = { .file = &m->file, .error = error, .rotary = m->rotary };
    const moe_meta *sources, *block;
    const int architecture = moe_read_choice(&r, moe_read(&r, "general.architecture"), architectures, -1);
    m->kind = kinds[architecture];
    m->vocabulary = (int32_t)moe_read_int(&r, moe_read(&r, "vocab.size"), 2, INT32_MAX / 2, 0);
    m->source_vocabulary = m->vocabulary;
    m->width = (size_t)moe_read_int(&r, moe_read(&r, "model.width"), 1, MOE_WIDEST, 0);
    block = moe_read(&r, "activation.block");
    m->blocks = block && moe_read_int(&r, block, MOE_Q8_COLS, MOE_Q8_COLS, 0);
    if (m->kind == MOE_MODEL_CLASSIFIER) {
        m->eos = m->bos = -1;
        moe_bind_stack(&r, m, "network", MOE_IN_NETWORK);
        return r.status;
    }
    m->embedding_scale = (float)moe_read_number(&r, moe_read(&r, "embedding.scale"), 1, -1e6, 1e6, 1);
    m->eos = moe_read_token(&r, m, "token.eos", 1);
    m->bos = moe_read_token(&r, m, "token.bos", 1);
    moe_read_token(&r, m, "token.pad", 0);
    moe_read_token(&r, m, "token.unk", 0);
    moe_read_never(&r, m);
    moe_read_ends(&r, m);
    sources = m->kind == MOE_MODEL_TRANSLATION && architecture != DECODER ? moe_read(&r, "source.vocab.size") : NULL;
    m->separate = sources != NULL;
    if (sources) m->source_vocabulary = (int32_t)moe_read_int(&r, sources, 2, INT32_MAX / 2, 0);
    m->tags = moe_read_tokens(&r, "languages.tags", m->source_vocabulary);
    m->languages = moe_read(&r, "languages.codes");
    if (m->languages && (m->languages->kind != MOE_META_TEXTS || !m->tags || m->tags->count != m->languages->count))
        moe_reader_fail(&r, "must be a list of texts, one per entry of languages.tags");
    if (!m->languages) m->tags = NULL;
    if (m->kind == MOE_MODEL_LANGUAGE) {
        moe_bind_embeddings(&r, m);
        moe_bind_stack(&r, m, "decoder", MOE_IN_DECODER);
    } else if (architecture == DECODER) {
        moe_bind_prompted(&r, m);
    } else {
        moe_bind_translation(&r, m, architecture == TRANSFORMER ? MOE_RULES_HF : MOE_RULES_PAPER);
        moe_bind_shortlist(&r, m);
    }
    return r.status;
}

/* Return 1 if the nodes of any rows carried by `by` support MOE_ROW_ABOVE or, if `above` is 0, do not support it. */
static int moe_model_carries(const moe_model *m, moe_carry by, int above) {
    for (size_t i = 0; i < m->n_layers; i++)
        for (size_t k = 0; k < MOE_CARRIES; k++) {
            const moe_carries *c = &m->layers[i].type->carries[k];
            if (moe_carried_cols(&m->layers[i], k) && c->by == by && c->above == above) return 1;
        }
    return 0;
}

static size_t moe_source_extra(const moe_model *m) {
    return (size_t)(m->source_tag != 0) + (size_t)m->source_bos + (size_t)m->source_eos;
}

/* ---- Opening and closing ---- */

static moe_status moe_verify_streamed(const moe_model *m, const moe_tensor_info *t, moe_error *error) {
    const size_t room = (size_t)(t->bytes / t->dims[0]) + MOE_SLAB_ALIGN;
    char *memory = m->allocator.allocate(m->allocator.user, room);
    moe_status status = MOE_OK;
    if (!memory) MOE_FAIL(MEMORY, "verify", "out of memory for an expert of %zu bytes", room);
    char *slab = memory + (MOE_SLAB_ALIGN - (uintptr_t)memory % MOE_SLAB_ALIGN) % MOE_SLAB_ALIGN;
    for (size_t i = 0; i < t->dims[0] && !status; i++) {
        if (moe_piece_checked(&m->file, t, i)) continue;
        status = moe_read_expert(&m->file, t, i, slab, error);
        if (!status) status = moe_compare_piece(&m->file, t, i, slab, error);
    }
    moe_release(&m->allocator, memory, room);
    return status;
}

moe_status moe_model_verify(const moe_model *m, moe_error *error) {
    moe_status status = moe_check_unchanged(&m->file, error);
    for (size_t i = 0; i < m->file.n_tensors && !status; i++) {
        const moe_tensor_info *t = &m->file.tensors[i];
        status = m->file.fd >= 0 && t->experts ? moe_verify_streamed(m, t, error)
                                               : moe_check_tensor(&m->file, t, NULL, error);
        if (status) MOE_TRY(moe_check_unchanged(&m->file, error)); /* changed rather than damaged */
    }
    return status;
}

/* Load a model that starts with data[held]. If data holds only the header, read the rest from the origin's file. */
static moe_status moe_model_load(moe_model *m, const char *name, const void *data, size_t bytes, size_t held,
                                 const moe_model_params *params, moe_error *error) {
    moe_file *f = &m->file;
    MOE_TRY(moe_file_parse(f, data, bytes, held, &m->allocator, error));
    if (name) {
        m->name = moe_allocate_zeroed(&m->allocator, strlen(name) + 1);
        if (!m->name) MOE_FAIL(MEMORY, "model", "out of memory for the model's name");
        f->origin.name = memcpy(m->name, name, strlen(name));
    }
    if (params->verify >= 0) {
        f->checked = moe_allocate_zeroed(&m->allocator, f->n_pieces * sizeof *f->checked);
        if (!f->checked) MOE_FAIL(MEMORY, "model", "out of memory for verifying tensors");
    }
    if (params->stream) MOE_TRY(moe_file_stream(f, error));
    if (params->verify == 1 || (params->verify == 0 && bytes <= MOE_VERIFY_BYTES)) MOE_TRY(moe_model_verify(m, error));
    return moe_bind(m, error);
}

/* Read `bytes` bytes of a model at offset `from`. Returns 0 or errno. */
static int moe_read_source(const moe_source *s, int fd, void *data, size_t bytes, uint64_t from) {
    size_t got = bytes;
    const int code = s->data   ? (memcpy(data, (const char *)s->data + s->offset + from, bytes), 0)
                     : s->read ? s->read(s->user, data, bytes, s->offset + from)
                               : moe_read_at(fd, data, bytes, s->offset + from, &got);
    return code || got == bytes ? code : EIO; /* the file was truncated */
}

/* Copy a model to anonymous memory, which becomes the origin's mapping. */
static moe_status moe_copy_source(const moe_source *s, size_t bytes, moe_origin *o, moe_error *error) {
    void *data = moe_map_memory(bytes);
    if (!data) MOE_FAIL(MEMORY, "copy", "cannot allocate memory for the model: %s", strerror(errno));
    o->mapping = data, o->mapped = bytes;
    const int code = moe_read_source(s, o->fd, data, bytes, 0);
    if (code) MOE_FAIL(IO, "copy", "cannot read the model: %s", strerror(code));
    moe_protect(data, bytes);
    if (o->fd >= 0) moe_close_descriptor(o->fd);
    o->fd = -1;
    return MOE_OK;
}

/* Load a streamed model: read everything except the experts, which the header locates. */
static moe_status moe_stream_source(const moe_source *s, moe_model *m, size_t bytes, const moe_model_params *params,
                                    moe_error *error) {
    const int fd = m->file.origin.fd;
    moe_header h = { .header_bytes = 0 };
    int code = moe_read_source(s, fd, &h, moe_min(bytes, sizeof h), 0);
    const size_t held = moe_min(bytes, moe_max(sizeof h, moe_min(MOE_MAX_HEADER, (size_t)h.header_bytes)));
    char *header = m->allocator.allocate(m->allocator.user, held);
    if (!header) MOE_FAIL(MEMORY, "header", "out of memory for a header of %zu bytes", held);
    if (!code) code = moe_read_source(s, fd, header, held, 0);
    const moe_status status = code ? moe_fail(error, MOE_ERROR_IO, "header", "cannot read the file: %s", strerror(code))
                                   : moe_model_load(m, s->name, header, bytes, held, params, error);
    moe_release(&m->allocator, header, held);
    return status;
}

/* Open or duplicate the descriptor of a model's file, and determine the size of the model. */
static moe_status moe_open_file(const moe_source *s, moe_origin *o, uint64_t *bytes, moe_error *error) {
    o->fd = s->path ? moe_open_path(s->path) : moe_share_descriptor(s->fd);
    if (o->fd < 0)
        MOE_FAIL(IO, "open", s->path ? "cannot open %s: %s" : "cannot use the descriptor%s: %s", s->path ? s->path : "",
                 strerror(errno));
    if (!moe_file_state(o->fd, &o->opened)) MOE_FAIL(IO, "open", "not a regular file");
    const uint64_t size = o->opened.bytes, rest = moe_less(size, s->offset);
    if (s->offset > size || s->bytes > rest)
        MOE_FAIL(FORMAT, "offset",
                 "%" PRIu64 " bytes at offset %" PRIu64 " exceed the file, which has %" PRIu64 " bytes", s->bytes,
                 s->offset, size);
    *bytes = s->bytes ? s->bytes : rest;
    return MOE_OK;
}

static moe_status moe_open_source(const moe_source *s, const moe_model_params *params, moe_model *m, moe_error *error) {
    moe_origin *o = &m->file.origin;
    const char *data = s->data ? (const char *)s->data + s->offset : NULL;
    const int file = !s->data && !s->read, copy = s->read || (params->copy && !params->stream);
    uint64_t bytes = s->bytes;
    *o = (moe_origin){ .fd = -1, .shared = !s->path, .base = s->offset };
    if ((s->path != NULL) + (s->data != NULL) + (s->read != NULL) > 1)
        MOE_FAIL(ARGUMENT, "moe_source", "set only one of path, data and read");
    if (!file && params->stream) MOE_FAIL(ARGUMENT, "stream", "stream must be 0: only files can be streamed");
    if (params->stream && MOE_WASM) MOE_FAIL(UNSUPPORTED, "stream", "WebAssembly has no threads to read experts");
    if (!copy && (file ? s->offset : (uintptr_t)data) % MOE_ALIGN)
        MOE_FAIL(ARGUMENT, file ? "offset" : "data",
                 "the model must be aligned to %d bytes, unless it is copied (moe_model_params.copy)", MOE_ALIGN);
    if (file) MOE_TRY(moe_open_file(s, o, &bytes, error));
    if (!bytes || bytes > SIZE_MAX / 2) MOE_FAIL(FORMAT, "offset 0", "empty or too large to map");
    if (params->stream) return moe_stream_source(s, m, (size_t)bytes, params, error);
    if (copy) {
        MOE_TRY(moe_copy_source(s, (size_t)bytes, o, error));
        data = o->mapping;
    } else if (file) { /* the mapping starts at the preceding page boundary */
        const size_t skip = (size_t)(o->base % moe_map_alignment());
        o->mapped = (size_t)bytes + skip;
        o->mapping = moe_map_file(o->fd, o->base - skip, o->mapped);
        if (!o->mapping) MOE_FAIL(IO, "mmap", "cannot map the file: %s", strerror(errno));
        data = (const char *)o->mapping + skip;
    }
    return moe_model_load(m, s->name, data, (size_t)bytes, (size_t)bytes, params, error);
}

moe_status moe_model_open_source_sized(const moe_source *given, size_t source_size,
                                       const moe_model_params *given_params, size_t size, moe_model **out,
                                       moe_error *error) {
    moe_source s;
    moe_model_params params;
    MOE_TRY(moe_take_struct(&s, sizeof s, given, source_size, "moe_source", error));
    MOE_TRY(moe_take_struct(&params, sizeof params, given_params, size, "moe_model_params", error));
    if (!s.name) s.name = s.path;
    const moe_allocator a = moe_allocator_or_default(&params.allocator);
    moe_model *m = moe_allocate_zeroed(&a, sizeof *m);
    if (!m) return moe_named(s.name, moe_fail(error, MOE_ERROR_MEMORY, "model", "out of memory for the model"), error);
    m->self = m;
    m->holders = 1;
    m->allocator = a;
    moe_status status = moe_open_source(&s, &params, m, error);
    if ((status == MOE_OK || status == MOE_ERROR_FORMAT) && moe_check_unchanged(&m->file, error))
        status = MOE_ERROR_IO; /* changed rather than damaged */
    moe_named(s.name, status, error);
    if (status == MOE_OK) *out = m;
    else moe_model_close(m);
    return status;
}

moe_status moe_model_open_sized(const char *path, const moe_model_params *params, size_t size, moe_model **out,
                                moe_error *error) {
    const moe_source s = { .path = path ? path : "" };
    return moe_model_open_source_sized(&s, sizeof s, params, size, out, error);
}

moe_status moe_model_open_memory_sized(const void *data, size_t bytes, const moe_model_params *params, size_t size,
                                       moe_model **out, moe_error *error) {
    const moe_source s = { .data = data, .bytes = bytes };
    if (!data) MOE_FAIL(ARGUMENT, "data", "the model data must not be NULL");
    return moe_model_open_source_sized(&s, sizeof s, params, size, out, error);
}

void moe_model_close(moe_model *m) {
    if (!m || atomic_fetch_sub(&m->holders, 1) > 1) return;
    const moe_allocator a = m->allocator;
    const moe_origin *o = &m->file.origin;
    if (o->mapping) moe_unmap(o->mapping, o->mapped);
    if (o->fd >= 0) moe_close_descriptor(o->fd);
    moe_release(&a, m->name, m->name ? strlen(m->name) + 1 : 0);
    moe_release(&a, m->layers, (m->n_encoder + m->n_decoder + m->n_predictor + 1) * sizeof *m->layers);
    moe_release(&a, m->never, m->n_never * sizeof *m->never);
    moe_file_free(&m->file, &a);
    moe_release(&a, m, sizeof *m);
}

moe_status moe_model_save_sized(const moe_model *m, const char *path, const moe_save_params *given, size_t size,
                                moe_error *error) {
    moe_save_params params;
    MOE_TRY(moe_take_struct(&params, sizeof params, given, size, "moe_save_params", error));
    MOE_TRY(moe_check_unchanged(&m->file, error));
    if (m->file.fd >= 0) MOE_FAIL(UNSUPPORTED, "stream", "cannot save a streamed model: open it without stream");
    return moe_file_save(&m->file, &m->allocator, path, &params, error);
}

/* ---- Querying a model ---- */

moe_kind moe_model_kind(const moe_model *m) { return m->kind; }
size_t moe_model_width(const moe_model *m) { return m->width; }

const char *moe_gate_name(moe_gate gate) { return (unsigned)gate <= MOE_GATE_BATCHWISE ? moe_gate_names[gate] : "?"; }

int moe_gate_parse(const char *name, moe_gate *out) {
    const int found = moe_find_word(moe_gate_names, name);
    if (found >= 0) *out = (moe_gate)found;
    return found >= 0;
}

size_t moe_model_layer_count(const moe_model *m) { return m->n_layers; }

void moe_model_layer_sized(const moe_model *m, size_t index, moe_layer_info *out, size_t size) {
    moe_layer_info info = { NULL, NULL, 0, 0 };
    const moe_layer *layer = &m->layers[index];
    if (index < m->n_layers) info = (moe_layer_info){ layer->name, layer->type->name, layer->in, layer->out };
    moe_give_struct(out, size, &info, sizeof info);
}

moe_setting moe_model_layer_setting(const moe_model *m, size_t index, size_t i) {
    const moe_layer *layer = &m->layers[index];
    if (index >= m->n_layers || i >= layer->type->n_keys) return (moe_setting){ NULL, NULL, 0 };
    const moe_key *k = &layer->type->keys[i];
    const void *at = (const char *)layer + k->at;
    if (k->kind == MOE_KEY_COUNT) return (moe_setting){ k->key, NULL, (double)*(const size_t *)at };
    if (k->kind == MOE_KEY_REAL) return (moe_setting){ k->key, NULL, *(const float *)at };
    return (moe_setting){ k->key, k->kind == MOE_KEY_NAME ? k->names[*(const int *)at] : NULL, *(const int *)at };
}

static const moe_layer *moe_find_mixture(const moe_model *m, size_t index) {
    for (size_t i = 0; i < m->n_layers; i++)
        if (m->layers[i].type == &moe_mixture_type && index-- == 0) return &m->layers[i];
    return NULL;
}

size_t moe_model_mixture_count(const moe_model *m) {
    size_t n = 0;
    for (size_t i = 0; i < m->n_layers; i++) n += m->layers[i].type == &moe_mixture_type;
    return n;
}

void moe_model_mixture_sized(const moe_model *model, size_t index, moe_mixture *out, size_t size) {
    const moe_layer *layer = moe_find_mixture(model, index);
    const moe_mixture_layer *m = layer ? &layer->mixture : NULL;
    moe_mixture x = { .layer = NULL };
    if (m)
        x = (moe_mixture){ .layer = layer->name,
                           .experts = m->experts.count,
                           .groups = m->groups,
                           .gate = m->gate.kind,
                           .parent_gate = m->parent.kind,
                           .k = m->gate.k,
                           .parent_k = m->groups ? m->parent.k : 0,
                           .hidden = layer->hidden,
                           .noise = m->gate.noise.rows && (!m->groups || m->parent.noise.rows) };
    moe_give_struct(out, size, &x, sizeof x);
}

size_t moe_model_meta_count(const moe_model *m) { return m->file.n_meta; }
ptrdiff_t moe_model_meta_find(const moe_model *m, const char *key) {
    const moe_meta *found = moe_find_meta(&m->file, key);
    return found ? found - m->file.meta : -1;
}

static const moe_meta *moe_meta_at(const moe_model *m, size_t i) {
    static const moe_meta none = { .key = { "", 0 }, .kind = MOE_META_BYTES };
    return i < m->file.n_meta ? &m->file.meta[i] : &none;
}
moe_span moe_model_meta_key(const moe_model *m, size_t i) { return moe_meta_at(m, i)->key; }
moe_meta_kind moe_model_meta_kind(const moe_model *m, size_t i) { return moe_meta_at(m, i)->kind; }
size_t moe_model_meta_length(const moe_model *m, size_t i) { return moe_meta_at(m, i)->count; }
int64_t moe_model_meta_int(const moe_model *m, size_t e, size_t i) { return moe_meta_int(moe_meta_at(m, e), i); }
double moe_model_meta_real(const moe_model *m, size_t e, size_t i) { return moe_meta_real(moe_meta_at(m, e), i); }
moe_span moe_model_meta_text(const moe_model *m, size_t e, size_t i) { return moe_meta_text(moe_meta_at(m, e), i); }
size_t moe_model_meta_texts(const moe_model *m, size_t e, moe_span *out, size_t n) {
    const moe_meta *texts = moe_meta_at(m, e);
    n = texts->kind == MOE_META_TEXTS ? moe_min(n, texts->count) : 0;
    for (size_t i = 0; i < n; i++) out[i] = moe_meta_text(texts, i);
    return n;
}
size_t moe_model_tensor_count(const moe_model *m) { return m->file.n_tensors; }
void moe_model_tensor_sized(const moe_model *m, size_t i, moe_tensor_info *out, size_t size) {
    const moe_tensor_info none = { .name = { "", 0 } };
    moe_give_struct(out, size, i < m->file.n_tensors ? &m->file.tensors[i] : &none, sizeof none);
}
uint64_t moe_model_file_bytes(const moe_model *m) { return m->file.bytes; }
uint64_t moe_model_held_bytes(const moe_model *m) { return m->file.held; }
uint32_t moe_model_file_version(const moe_model *m) { return m->file.version; }
int32_t moe_model_vocabulary(const moe_model *m) { return m->vocabulary; }
int32_t moe_model_source_vocabulary(const moe_model *m) { return m->source_vocabulary; }
int moe_model_prompted(const moe_model *m) { return m->prompted; }
size_t moe_model_source_extra(const moe_model *m) { return m->kind == MOE_MODEL_LANGUAGE ? 1 : moe_source_extra(m); }
int moe_model_needs_source(const moe_model *m) { return m->source_tag == 2; }
size_t moe_model_language_count(const moe_model *m) { return m->languages ? m->languages->count : 0; }
moe_span moe_model_language(const moe_model *m, size_t i) {
    return m->languages ? moe_meta_text(m->languages, i) : (moe_span){ "", 0 };
}
int32_t moe_model_language_tag_at(const moe_model *m, size_t i) {
    return i < moe_model_language_count(m) ? (int32_t)moe_meta_int(m->tags, i) : -1;
}
int32_t moe_model_language_tag(const moe_model *m, const char *code) {
    for (size_t i = 0; i < moe_model_language_count(m); i++)
        if (moe_span_is(moe_model_language(m, i), code)) return moe_model_language_tag_at(m, i);
    return -1;
}

/* ---- Encoder and decoder: the layer list alone determines their nodes ---- */

static moe_node *moe_build_embedding(moe_graph *g, const moe_model *m, const moe_matrix *table, const char *name) {
    moe_node *x = moe_op_embed(g, table, m->embedding_scale, name);
    if (m->positions.rows) x->embed.positions = &m->positions;
    return x;
}

static void moe_build_encoder(moe_builder *b, const moe_model *m) {
    moe_node *x = moe_build_embedding(b->g, m, &m->source_embedding, "encoder.embedding");
    for (size_t i = 0; i < m->n_encoder; i++) x = moe_build_layer(b, &m->layers[i], x);
    for (size_t i = m->n_encoder; i < m->n_layers; i++)
        if (m->layers[i].type->keep_source) m->layers[i].type->keep_source(b, &m->layers[i], x);
}

/* Build the input of the predictor's layers from the decoder's output and the next token, whose id the frame holds. */
static moe_node *moe_build_join(moe_builder *b, const moe_model *m) {
    moe_node *x = moe_op_embed(b->g, &m->target_embedding, m->embedding_scale, "predict.embedding"),
             *hidden = moe_op_input(b->g, m->width, "predict.hidden");
    x = moe_op_norm(b->g, &m->predictor_norms[0], x, "predict.embedding.norm");
    hidden = moe_op_norm(b->g, &m->predictor_norms[1], hidden, "predict.hidden.norm");
    return moe_op_linear(b->g, &m->predictor_join, moe_op_concat(b->g, x, hidden, "predict.both"), NULL,
                         "predict.join");
}

/* Build the graph of a step for all live hypotheses, of their predictor, or of a classifier for rows of inputs. */
static void moe_build_decoder(moe_builder *b, const moe_model *m, int predictor) {
    const moe_output_op output = { &m->output, m->output_bias, m->never, m->n_never, m->n_suppressed, m->eos };
    const size_t first = predictor ? m->n_decoder : 0, end = predictor ? first + m->n_predictor : m->n_decoder;
    moe_node *x = m->kind == MOE_MODEL_CLASSIFIER ? moe_op_input(b->g, m->width, "network.input")
                  : predictor                     ? moe_build_join(b, m)
                              : moe_build_embedding(b->g, m, &m->target_embedding, "decoder.embedding");
    for (size_t i = m->n_encoder; i < m->n_layers && !predictor; i++) moe_build_gathers(b, &m->layers[i]);
    if (m->attention) moe_build_previous(b, m->attention);
    for (size_t i = first; i < end; i++) {
        x = moe_build_layer(b, &m->decoder[i], x);
        if (m->attention && m->attention->attention.asks == &m->decoder[i]) x = moe_build_layer(b, m->attention, x);
    }
    if (b->predicts && !predictor) moe_op_store(b->g, x, MOE_BY_PARENT, b->hidden, "decoder.hidden");
    moe_op_output(b->g, &output, x);
}

#endif /* MOE_HOST */

/* ==== 35. Beam search =========================================================================================
 * The hypotheses of one sentence. Invariants: the outcome of a sentence depends only on its own rows, ties are broken
 * by rank, and the search accesses only what the slot points to, so results are the same in any batch and on any
 * machine. Each product and sum is rounded separately.
 *
 * A step sorts the candidates of all live hypotheses by descending log-probability (ties: better-ranked hypothesis,
 * then better token) and walks down the list. An end token among the first `beam` candidates finishes a hypothesis;
 * other tokens continue hypotheses, until `beam` of them are live. The walk ends at a candidate worse than the best one
 * by more than the pruning margin; finished hypotheses with scores below that margin are dropped (GNMT section 7). The
 * sentence is done when `beam` hypotheses have finished, none is live, the length limit is reached (live ones then
 * become unfinished results after all finished ones), or nbest have finished and no live one can beat the best.
 *
 * If the start of the translation is given, a single hypothesis first follows its tokens; these steps count towards the
 * limit. Several of them can share a run if the decoder carries no rows by parent.
 *
 * The rules above are MOE_RULES_PAPER; moe_rule_set describes how other rules differ. Three functions drop hypotheses.
 * moe_search_step drops candidates beyond the beam's width or below the margin, and removes finished hypotheses from
 * the beam. moe_insert drops hypotheses beyond the width of a list: finished hypotheses, or the beam of moe_beam_step,
 * which keeps finished ones. moe_end_step drops finished hypotheses below the margin. */

/* Rules of the search. All members except `unseen` are 0 or 1. */
typedef struct moe_rule_set {
    int prunes, reranks, constrains, covers, penalises; /* 1 if the corresponding parameters may be nonzero */
    int by_place;     /* coverage is stored per slot of the beam instead of per hypothesis */
    float unseen;     /* minimum coverage of a source token; with 0, unattended tokens are not penalised */
    int counts_begin; /* the length that divides a score includes the begin token */
    int counts_end;   /* the length that divides a score includes the end token */
    int stay;    /* finished hypotheses remain in the beam (moe_beam_step) instead of leaving it (moe_search_step) */
    int divides; /* with `stay`: length penalties affect the order of the beam, not only final scores */
    int counts_later;  /* with `divides`: lengths include the end token from the next step on */
    int cut_competes;  /* cut hypotheses are ranked among finished ones by score instead of after them */
    int cuts_at_limit; /* the best `beam` candidates of the last step become results, ended or not */
    int waits;         /* the search ends when no live hypothesis can beat the worst of `beam` finished ones */
    int shrinks;       /* each finished hypothesis reduces the width of the beam by one */
    int counts_source; /* the length limit counts all source tokens, including tag and end */
} moe_rule_set;

#if MOE_HOST
/* clang-format off */
static const moe_rule_set moe_rule_sets[] = {
    [MOE_RULES_PAPER] = { .prunes = 1, .reranks = 1, .constrains = 1, .covers = 1, .penalises = 1, .unseen = 1e-10f,
                          .counts_end = 1 },
    [MOE_RULES_NVIDIA] = { .covers = 1, .by_place = 1, .counts_begin = 1, .counts_end = 1, .stay = 1,
                           .cut_competes = 1 },
    [MOE_RULES_TF] = { .stay = 1, .divides = 1, .cut_competes = 1 },
    [MOE_RULES_MLPERF] = { .stay = 1, .divides = 1, .counts_later = 1, .cut_competes = 1 },
    [MOE_RULES_HF] = { .constrains = 1, .penalises = 1, .counts_end = 1, .cut_competes = 1, .cuts_at_limit = 1,
                       .waits = 1 },
    [MOE_RULES_MARIAN] = { .constrains = 1, .penalises = 1, .counts_end = 1, .cut_competes = 1, .cuts_at_limit = 1,
                           .waits = 1, .shrinks = 1, .counts_source = 1 },
};
/* clang-format on */
#endif

typedef struct moe_token {
    int32_t id, parent; /* parent: index of the previous token, -1 at the start */
    int32_t source;     /* source token of the request with the largest attention weight; -1 if none */
    float logprob;
} moe_token;

typedef struct moe_constraint_state {
    size_t first, n;      /* range of its tokens in the slot's constraint_ids */
    size_t begin, length; /* range in the source, including tag and begin token */
    int once;
} moe_constraint_state;

/* A live hypothesis or a result, which has an end token or was cut. */
typedef struct moe_live {
    float logprob;
    float weighed; /* logprob with penalties, from which scores are computed */
    int32_t last;  /* index of its last token, -1 at the start */
    size_t row;    /* its row in this step; SIZE_MAX before the first step */
    size_t state;  /* index of its row carried by state among those of its sentence */
    float rank;    /* value that orders the beam; the score if this is a result */
    float latest;  /* log-probability of the last token, which may be the end token */
    int32_t id;    /* id of the last token */
    int ended;     /* 1 if it has its end token and needs no more rows */
    int looped;    /* 1 if it was cut where it began to repeat itself */
    int dead;      /* 1 if the caller has banned all of its next tokens */
    size_t tokens; /* number of tokens, excluding the end token */
    /* members used with constraints: */
    uint64_t met;  /* bit c is set if the hypothesis contains constraint c */
    size_t inside; /* 1 + number of the constraint that it has begun; 0 if none */
    size_t since;  /* tokens since a constraint was last met, which may start the next constraint */
} moe_live;

/* Settings of the search, shared by all sentences of a session. */
struct moe_search {
    int beam, nbest;
    float alpha, constant, beta, prune;
    moe_rule_set rules;
    int32_t eos, ends[MOE_MAX_ENDS]; /* the end token; all end tokens [n_ends], eos first */
    int n_ends;
    int early_stopping; /* with rules that wait: stop when `beam` hypotheses have finished */
    int force_end;      /* with rules that cut at the limit: append end tokens in the last step at no cost */
    size_t min_target, max_constraints;
    size_t max_target; /* maximum steps of a sentence, including those of a prompt */
    size_t max_prompt; /* maximum tokens of a prompt after its first one; 0 with an encoder */
    size_t ahead;      /* extra rows per step for given tokens; 0 if a step processes one token */
    int aligns;        /* 1 if hypotheses record the source token of each token */
    size_t listed;     /* maximum tokens in a sentence's list; 0 without lists */
    size_t used_words; /* 32-bit words of a set of used tokens; 0 without penalties */
    int samples;       /* 1 if tokens may be sampled */
    int stops_loops;
};

/* A sentence, as passed by the session to the search or to a device that runs the search. */
typedef struct moe_task {
    size_t segment, length; /* range of the sentence's rows carried by source */
    size_t limit, beam;     /* maximum target length, including the end token; number of hypotheses */
    size_t place;           /* index of its first row carried by token, if it has no pages */
    int32_t first;          /* parent of its first row, which holds the encoder's states; -1 if none */
    int32_t begin;          /* the token that precedes the first one */
    size_t n_target;        /* number of given tokens, which are scored or start a translation */
    size_t prompt;          /* leading given tokens that belong to a prompt */
    size_t free;            /* leading given tokens whose log-probability counts as 0 */
    float penalty;          /* repetition penalty; 1 if none */
    size_t spared;          /* leading tokens exempt from the penalty, including the begin token */
    size_t repeats;         /* result of moe_most_repeats for the source */
    uint64_t key;           /* hash of the source, for noise and sampling */
    moe_sampling sampling;
    int scoring;
    float least;           /* a scored target with a log-probability below this is abandoned */
    size_t lead, n_source; /* number of tokens that the session prepends; number of source tokens in the request */
    size_t n_constraints;
} moe_task;

enum { MOE_LOOP_WIDEST = 128 };

/* A sentence being translated. If a device runs the search, the session's slots have no hypotheses. */
struct moe_slot {
    int active;
    moe_task task;
    size_t steps;      /* decoder steps so far */
    size_t ahead;      /* extra steps of given tokens in the current run */
    moe_token *tokens; /* [moe_most_tokens] */
    size_t n_tokens;
    moe_live *live; /* [beam], best first */
    size_t n_live;
    moe_live *finished; /* [beam] results, best first */
    size_t n_finished;
    moe_list list;            /* the sentence's shortlist */
    int32_t *pages;           /* indices of its pages of rows carried by token; NULL if its rows start at task.place */
    size_t n_pages, n_filled; /* number of pages; number of leading pages whose rows are all stored */
    int waits;                /* 1 while it waits for pages; it then has no pages and no rows in a step */
    uint64_t age;             /* sequence number of the sentence */
    uint64_t gave;            /* number of finished sentences when it released its pages; UINT64_MAX if it never did */
    size_t reported;          /* steps before it released its pages, which are recomputed but not reported again */
    size_t keep;              /* steps after which its states are kept for other sentences; 0 if never */
    int32_t from;             /* row of the kept states that it starts with if it shares pages */
    size_t state;             /* index of its first row carried by state */
    int32_t *target;          /* [max_target], n_target used */
    int32_t *draft;           /* [max_target], n_draft used; see "Drafts" */
    size_t n_draft, expected; /* number of tokens; index of the one that is expected next */
    size_t guessed;           /* rows of the current run whose input is a guess, the last of `ahead` */
    size_t guess, accepted;   /* index of the current or previous run's first guess; right ones of the previous run */
    float right;              /* share of the recently expected tokens that were right */
    int asks;                 /* 1 if the predictor writes the draft, one token per run */
    moe_constraint_state *constraints; /* [max_constraints], n_constraints used */
    int32_t *constraint_ids;           /* [max_target] tokens of the constraints */
    size_t shown;                      /* index of the result's first token */
    uint32_t repeats[MOE_LOOP_WIDEST]; /* [period - 1] number of last tokens equal to those one period earlier */
    int broken;                        /* 1 if a log-probability was NaN */
    int stops;                         /* 1 if the caller ends the translation before this step's token */
};

typedef struct moe_row {
    int32_t id, parent;
    int32_t want; /* token to score, -1 to find the best tokens, or MOE_NO_LOGITS */
    int hold;     /* 1 if the translation is too short to end here */
} moe_row;

/* Return the maximum number of tokens of a sentence's hypotheses, which all share the prompt. */
MOE_SHARED size_t moe_most_tokens(const moe_search *s, size_t beam) {
    return s->max_prompt + (s->max_target - s->max_prompt) * beam;
}

MOE_SHARED int moe_is_end(const moe_search *s, int32_t id) {
    int is = 0;
    for (int i = 0; i < s->n_ends; i++) is |= id == s->ends[i];
    return is;
}

/* Start the search for a slot's sentence. Segment, length, limit and target must be set. */
MOE_SHARED void moe_slot_begin(moe_slot *slot) {
    const moe_live first = { 0.0f, 0.0f, -1, SIZE_MAX, 0, 0.0f, 0.0f, 0, 0, 0, 0, 0, 0, 0, 0 };
    slot->active = 1;
    slot->steps = slot->ahead = slot->n_tokens = slot->n_finished = slot->expected = slot->guessed = slot->accepted = 0;
    slot->broken = slot->stops = 0;
    for (size_t i = 0; i < MOE_LOOP_WIDEST; i++) slot->repeats[i] = 0;
    slot->live[0] = first;
    slot->n_live = 1;
}

/* Return the decoder's input for a hypothesis at `position`, counted in steps. */
MOE_SHARED moe_row moe_live_row(const moe_search *s, const moe_slot *slot, const moe_live *live, size_t position) {
    moe_row row;
    row.id = live->last < 0 ? slot->task.begin : slot->tokens[live->last].id;
    row.parent = live->row != SIZE_MAX ? (int32_t)live->row : slot->task.first;
    if (position > slot->steps) row.parent = MOE_ROW_ABOVE;
    row.want = position < slot->task.free       ? MOE_NO_LOGITS
               : position < slot->task.n_target ? slot->target[position]
               : slot->task.scoring             ? s->eos
                                                : -1;
    row.hold = !slot->task.scoring && position < s->min_target + slot->task.prompt;
    return row;
}

/* Return the random number for sampling the token at `position` of this sentence. */
MOE_SHARED uint64_t moe_sample_number(const moe_slot *slot, size_t position) {
    return moe_hash(moe_hash(slot->task.key + slot->task.sampling.seed) + (position - slot->task.prompt));
}

/* Return the row carried by token that belongs to token `last`, or to the begin token if `last` is -1. */
MOE_SHARED int32_t moe_token_place(const moe_slot *slot, int32_t last) {
    if (!slot->pages) return (int32_t)slot->task.place + last + 1;
    return slot->pages[(last + 1) / MOE_PAGE] * MOE_PAGE + (last + 1) % MOE_PAGE;
}

/* List the rows carried by token of the `n` tokens up to `last`, of which the first is the begin token. */
MOE_SHARED void moe_fill_chain(const moe_slot *slot, int32_t last, size_t n, int32_t *chain) {
    for (; n-- > 0; last = last >= 0 ? slot->tokens[last].parent : -1) chain[n] = moe_token_place(slot, last);
}

/* Set the bits of all tokens up to `last`, including the begin token, that are not exempt from the penalty. */
MOE_SHARED void moe_fill_used(const moe_slot *slot, int32_t last, uint32_t *used) {
    if (!slot->task.spared) used[slot->task.begin / 32] |= 1u << slot->task.begin % 32;
    for (; last >= 0 && last + 1 >= (int32_t)slot->task.spared; last = slot->tokens[last].parent)
        used[slot->tokens[last].id / 32] |= 1u << slot->tokens[last].id % 32;
}

/* Return 1 if the beam consists of one hypothesis, as at the start and while the target is given. */
MOE_SHARED int moe_slot_is_one(const moe_slot *slot) { return slot->steps <= slot->task.n_target; }

/* Return how many steps of a sentence fit in the same run as its first step because their tokens are given. With
 * constraints, only prompt tokens count, since other given tokens may be part of a constraint. */
MOE_SHARED size_t moe_task_given(const moe_task *task) {
    const size_t before = task->prompt ? task->prompt - 1 : 0;
    return task->n_constraints ? before : task->n_target;
}

/* The same after a slot's next step. */
MOE_SHARED size_t moe_slot_given(const moe_slot *slot) {
    const size_t end = moe_task_given(&slot->task);
    return slot->active && slot->steps < end ? end - slot->steps : 0;
}

/* Append a token, not yet scored, to a slot's only hypothesis, of which `live` is a copy. */
MOE_SHARED void moe_give_token(moe_slot *slot, moe_live *live, int32_t id) {
    const int32_t at = live->last + 1; /* the tokens of a single hypothesis are contiguous */
    const moe_token token = { id, live->last, -1, 0.0f };
    slot->tokens[at] = token;
    live->last = at;
}

/* Return the length penalty ((c + L) / (c + 1))^alpha of GNMT eq 14. */
MOE_SHARED float moe_length_penalty(const moe_search *s, size_t tokens) {
    const float length = s->constant + (float)tokens; /* 0: the caller stopped before the first token */
    return s->alpha == 0.0f || length == 0.0f ? 1.0f : moe_expf(s->alpha * moe_logf(length / (s->constant + 1.0f)));
}

/* Return the coverage penalty beta * sum_i log(min(sum_j p_ij, 1)) of GNMT eq 14. */
MOE_SHARED float moe_coverage_penalty(const moe_search *s, const float *coverage, size_t length) {
    float sum = 0.0f;
    if (s->beta == 0.0f || !coverage) return 0.0f;
    for (size_t i = 0; i < length; i++) {
        const float c = coverage[i] < 1.0f ? coverage[i] : 1.0f, seen = c > s->rules.unseen ? c : s->rules.unseen;
        if (seen > 0.0f) sum = sum + moe_logf(seen);
    }
    return s->beta * sum;
}

MOE_SHARED float moe_score(const moe_search *s, const moe_slot *slot, const moe_live *live, const float *coverage) {
    const int more = s->rules.counts_begin + (live->ended && s->rules.counts_end);
    return live->weighed / moe_length_penalty(s, live->tokens + (size_t)more) +
           moe_coverage_penalty(s, coverage, slot->task.length);
}

/* Insert a hypothesis into a list of the `beam` best hypotheses, best first, after hypotheses of equal rank. */
MOE_SHARED void moe_insert(const moe_search *s, size_t beam, moe_live *list, size_t *n, const moe_live *h) {
    size_t at = *n;
    for (; at > 0; at--) {
        const moe_live *above = &list[at - 1];
        const int cut_last = !s->rules.cut_competes && h->ended != above->ended;
        if (!(cut_last ? h->ended : h->rank > above->rank)) break;
        if (at < beam) list[at] = *above;
    }
    if (at < beam) list[at] = *h;
    *n += (size_t)(*n < beam);
}

/* Turn a hypothesis into a finished or cut result. `place` is its row, or its index if coverage is per slot. */
MOE_SHARED void moe_add_finished(const moe_search *s, moe_slot *slot, const moe_beam *a, moe_live live, size_t place) {
    live.rank = moe_score(s, slot, &live, a->coverage ? a->coverage + place * a->attention_stride : NULL);
    moe_insert(s, slot->task.beam, slot->finished, &slot->n_finished, &live);
}

/* Return the source token of the request with a row's largest attention weight; -1 if none or not needed. */
MOE_SHARED int32_t moe_attended_token(const moe_search *s, const moe_slot *slot, const moe_beam *a, size_t row) {
    size_t best = 0;
    if (!s->aligns || !slot->task.length) return -1;
    const float *weights = a->attention + row * a->attention_stride;
    for (size_t i = 1; i < slot->task.length; i++)
        if (weights[i] > weights[best]) best = i;
    return best >= slot->task.lead && best < slot->task.lead + slot->task.n_source ? (int32_t)(best - slot->task.lead)
                                                                                   : -1;
}

/* Replace the beam by next[n_next]. Returns 1 if the sentence is done. */
MOE_SHARED int moe_end_step(const moe_search *s, moe_slot *slot, const moe_beam *a, const moe_live *next,
                            size_t n_next) {
    const size_t beam = slot->task.beam;
    float best = -FLT_MAX;
    for (size_t h = 0; h < n_next; h++) slot->live[h] = next[h];
    slot->n_live = n_next;
    if (slot->broken) return 1;
    while (s->prune > 0.0f && slot->n_finished &&
           slot->finished[slot->n_finished - 1].rank < slot->finished[0].rank - s->prune)
        slot->n_finished--;
    if (slot->n_live == 0 || (slot->n_finished >= beam && !s->rules.waits)) return 1;
    if (slot->steps >= slot->task.limit) {
        for (const moe_live *l = slot->live; l < slot->live + n_next; l++) moe_add_finished(s, slot, a, *l, l->row);
        return 1;
    }
    if (s->rules.waits) { /* live hypotheses are compared at their current length */
        best = slot->live[0].weighed / moe_length_penalty(s, slot->steps - slot->task.prompt);
        return slot->n_finished == beam && (s->early_stopping || beam == 1 || best <= slot->finished[beam - 1].rank);
    }
    for (size_t h = 0; h < slot->n_live; h++)
        if (slot->live[h].weighed > best) best = slot->live[h].weighed;
    return slot->n_finished >= (size_t)s->nbest &&
           slot->finished[0].rank >= best / moe_length_penalty(s, slot->task.limit - slot->task.prompt);
}

/* ---- Constraints ----
 * The probability w that a constraint is next is a row's attention on the constraint's source tokens. The candidates
 * of a hypothesis are therefore a mixture, as in a pointer network (See et al. 2017, arXiv 1704.04368): with
 * probability w the constraint's next token, otherwise the decoder's tokens. The mixture orders the beam. Scores use
 * the decoder's own log-probabilities, since all finished hypotheses contain the same constraints. A hypothesis that
 * starts a constraint continues to its end. If its best token is the end, or the remaining length just suffices, it
 * starts the missing constraints. Constraint tokens that the decoder chose by itself count as well. */

/* Without attention, a constraint's first token costs nothing unless it is less probable than exp(-MOE_PATIENCE). */
#define MOE_PATIENCE 6.0f

/* Return 1 if the `n` tokens up to `last` are the first n of constraint `b`. */
MOE_SHARED int moe_ends_in_constraint(const moe_slot *slot, const moe_constraint_state *b, size_t n, int32_t last) {
    for (; n > 0 && last >= 0; last = slot->tokens[last].parent)
        if (slot->tokens[last].id != slot->constraint_ids[b->first + --n]) return 0;
    return n == 0;
}

/* Return 1 if constraint number `c` may come next. */
MOE_SHARED int moe_constraint_is_open(const moe_live *live, size_t c) {
    return live->inside ? c + 1 == live->inside : !(live->met >> c & 1);
}

/* Return the token of constraint number `c` after the longest proper prefix that is a suffix of a hypothesis. */
MOE_SHARED int32_t moe_constraint_next(const moe_slot *slot, size_t c, const moe_live *live) {
    const moe_constraint_state *b = &slot->constraints[c];
    size_t n = b->n - 1 < live->since ? b->n - 1 : live->since;
    while (n && !moe_ends_in_constraint(slot, b, n, live->last)) n--;
    return slot->constraint_ids[b->first + n];
}

/* Set starts [max_constraints] to the next token of each constraint of a row, or to -1. */
MOE_SHARED void moe_fill_starts(const moe_search *s, const moe_slot *slot, const moe_live *live, int32_t *starts) {
    const size_t n = slot->task.scoring || slot->steps < slot->task.n_target ? 0 : slot->task.n_constraints;
    for (size_t c = 0; c < s->max_constraints; c++)
        starts[c] = c < n && moe_constraint_is_open(live, c) ? moe_constraint_next(slot, c, live) : -1;
}

/* Record the constraint that a hypothesis's last token completes: the longest or, on ties, the first. */
MOE_SHARED void moe_constraint_advance(const moe_slot *slot, moe_live *live) {
    size_t best = slot->task.n_constraints;
    live->since++;
    for (size_t c = 0; c < slot->task.n_constraints; c++) {
        const moe_constraint_state *b = &slot->constraints[c];
        if (!moe_constraint_is_open(live, c) || b->n > live->since ||
            !moe_ends_in_constraint(slot, b, b->n, live->last))
            continue;
        if (best == slot->task.n_constraints || b->n > slot->constraints[best].n) best = c;
    }
    if (best == slot->task.n_constraints) return;
    live->met |= (uint64_t)1 << best;
    live->inside = live->since = 0;
}

/* Return the amount that one of the best tokens adds to the rank of a hypothesis. */
MOE_SHARED float moe_weight_at(const moe_beam *a, size_t at) {
    return a->top_weighed ? a->top_weighed[at] : a->top_logprobs[at];
}

/* Return the value that ranks the row's best token number `taken`. The sampled token, number 0, ranks with the row's
 * best value, so that sampling does not change where constraints begin. */
MOE_SHARED float moe_order_at(const moe_slot *slot, const moe_beam *a, size_t row, size_t taken) {
    const float *own = a->top_logprobs + row * a->top;
    if (slot->task.sampling.temperature == 0.0f || taken || a->top < 2) return moe_weight_at(a, row * a->top + taken);
    return own[1] > own[0] ? own[1] : own[0];
}

/* Return a hypothesis extended by a token or, if `ends`, by its end token. */
MOE_SHARED moe_live moe_continue(const moe_live *from, int32_t id, float logprob, float weighed, int ends) {
    moe_live live = *from;
    live.id = id;
    live.latest = logprob;
    live.logprob = from->logprob + logprob;
    live.weighed = from->weighed + weighed;
    live.ended = ends;
    live.tokens += (size_t)!ends;
    return live;
}

MOE_SHARED void moe_add_token(const moe_search *s, moe_slot *slot, const moe_beam *a, moe_live *live) {
    const moe_token token = { live->id, live->last, moe_attended_token(s, slot, a, live->row), live->latest };
    live->last = (int32_t)slot->n_tokens;
    slot->tokens[slot->n_tokens++] = token;
    moe_constraint_advance(slot, live);
}

/* Return 1 if token `id` after a hypothesis would repeat a constraint that may appear only once. */
MOE_SHARED int moe_constraint_repeats(const moe_slot *slot, const moe_live *live, int32_t id) {
    int repeats = 0;
    for (size_t c = 0; c < slot->task.n_constraints; c++) {
        const moe_constraint_state *b = &slot->constraints[c];
        if (id != slot->constraint_ids[b->first + b->n - 1] || !moe_ends_in_constraint(slot, b, b->n - 1, live->last))
            continue;
        if (!(live->met >> c & 1)) return 0; /* the token completes another, equal constraint */
        repeats |= b->once;
    }
    return repeats;
}

typedef struct moe_next {
    size_t bound;  /* index of the constraint that may come next; n_constraints if all are met */
    int32_t id;    /* next token of the constraint */
    float logprob; /* log-probability of the token */
    float rank;    /* amount that the token adds to the rank */
    float stay;    /* amount that every other token adds to the rank, besides its log-probability */
    int commits;   /* 1 if the hypothesis must complete the constraint once it starts it */
    int repeats;   /* 1 if a token may repeat a constraint, because all of the best tokens would */
    int begun;     /* 1 if the token of the constraint has been taken */
    size_t taken;  /* number of the row's best tokens taken or skipped */
} moe_next;

MOE_SHARED moe_next moe_choose_constraint(const moe_search *s, const moe_slot *slot, const moe_beam *a,
                                          const moe_live *live, size_t c) {
    const moe_constraint_state *b = &slot->constraints[c];
    moe_next choice = { c, moe_constraint_next(slot, c, live), 0.0f, 0.0f, 0.0f, 0, 0, 0, 0 };
    float weight = 0.0f, own;
    choice.logprob = a->start_logprobs[live->row * s->max_constraints + c];
    if (live->inside) return choice;
    for (size_t i = 0; a->attention && i < b->length; i++)
        weight = weight + a->attention[live->row * a->attention_stride + b->begin + i];
    if (!a->attention || !b->length) {
        choice.rank = choice.logprob < -MOE_PATIENCE ? choice.logprob + MOE_PATIENCE : 0.0f;
        choice.commits = choice.logprob < -0.7f;
        return choice;
    }
    if (!(weight < 0.999f)) weight = 0.999f;
    own = (1.0f - weight) * moe_expf(choice.logprob);
    choice.commits = weight >= own;
    choice.rank = moe_logf(weight + own > 1e-12f ? weight + own : 1e-12f);
    choice.stay = moe_logf(1.0f - weight);
    return choice;
}

MOE_SHARED moe_next moe_choose(const moe_search *s, const moe_slot *slot, const moe_beam *a, const moe_live *live) {
    moe_next best = { slot->task.n_constraints, -1, 0.0f, 0.0f, 0.0f, 0, 0, 0, 0 };
    size_t missing = 0;
    for (size_t c = 0; c < slot->task.n_constraints; c++) {
        if (!moe_constraint_is_open(live, c)) continue;
        missing += slot->constraints[c].n;
        const moe_next choice = moe_choose_constraint(s, slot, a, live, c);
        if (choice.logprob != choice.logprob || best.bound == slot->task.n_constraints || choice.rank > best.rank)
            best = choice;
    }
    if (live->inside ||
        (missing && (slot->steps + missing >= slot->task.limit || moe_is_end(s, a->top_ids[live->row * a->top])))) {
        best.commits = 1;
        best.taken = a->top;
    }
    best.repeats = best.bound == slot->task.n_constraints;
    for (size_t k = 0; k < a->top && best.repeats; k++)
        best.repeats = moe_constraint_repeats(slot, live, a->top_ids[live->row * a->top + k]);
    return best;
}

/* Skip tokens of a row that its hypothesis must not use. Returns 1 if any tokens are left. */
MOE_SHARED int moe_next_left(const moe_search *s, const moe_slot *slot, const moe_beam *a, const moe_live *live,
                             moe_next *c) {
    for (; c->taken < a->top; c->taken++) {
        const int32_t id = a->top_ids[live->row * a->top + c->taken];
        if (c->bound < slot->task.n_constraints && (moe_is_end(s, id) || id == c->id)) continue;
        if (c->repeats || !moe_constraint_repeats(slot, live, id)) return 1;
    }
    return 0;
}

/* Extend a hypothesis by its constraint's next token (`begins`) or by the best remaining token. */
MOE_SHARED moe_live moe_constraint_follow(const moe_search *s, moe_slot *slot, const moe_beam *a, const moe_live *from,
                                          moe_next *c, int begins, float rank) {
    const size_t at = from->row * a->top + c->taken;
    const int32_t id = begins ? c->id : a->top_ids[at];
    moe_live live = moe_continue(from, id, begins ? c->logprob : a->top_logprobs[at],
                                 begins ? c->logprob : moe_weight_at(a, at), moe_is_end(s, id));
    live.rank = rank;
    if (begins) c->begun = 1;
    else c->taken++;
    if (live.ended) return live;
    if (begins && c->commits) live.inside = c->bound + 1;
    moe_add_token(s, slot, a, &live);
    return live;
}

/* Process the decoder's outputs for the rows of one slot; `next` [beam] is scratch. Returns 1 if the sentence is done.
 * Candidates are ordered by rank, which without constraints is the log-probability. */
MOE_SHARED int moe_search_step(const moe_search *s, moe_slot *slot, const moe_beam *a, moe_live *next) {
    const size_t beam = slot->task.beam - (s->rules.shrinks ? slot->n_finished : 0);
    moe_next choices[MOE_MAX_BEAM];
    size_t n_next = 0;
    float best_candidate = 0.0f;
    const int last_step = s->rules.cuts_at_limit && slot->steps + 1 >= slot->task.limit;
    const size_t most = last_step || s->rules.shrinks ? beam : SIZE_MAX; /* maximum number of candidates */
    slot->steps++;
    for (size_t h = 0; last_step && s->force_end && h < slot->n_live; h++) {
        const moe_live live = moe_continue(&slot->live[h], s->eos, 0.0f, 0.0f, 1);
        moe_add_finished(s, slot, a, live, live.row);
    }
    if (last_step && s->force_end) return 1;
    for (size_t h = 0; h < slot->n_live; h++) choices[h] = moe_choose(s, slot, a, &slot->live[h]);
    for (size_t position = 0; n_next < beam && position < most; position++) {
        size_t best = slot->n_live;
        int begins = 0; /* 1 if the best candidate is a token of a constraint */
        float best_rank = 0.0f;
        for (size_t h = 0; h < slot->n_live; h++) {
            moe_next *c = &choices[h];
            const moe_live *l = &slot->live[h];
            for (int own = 1; own >= 0 && !l->dead;
                 own--) { /* `own` is 1 for the token of the hypothesis's constraint */
                if (own ? c->begun || c->bound == slot->task.n_constraints : !moe_next_left(s, slot, a, l, c)) continue;
                const float logprob = own ? c->logprob : a->top_logprobs[l->row * a->top + c->taken];
                const float rank = l->rank + (own ? c->rank : moe_order_at(slot, a, l->row, c->taken) + c->stay);
                if (logprob != logprob || rank != rank) slot->broken = 1;
                if (best == slot->n_live || rank > best_rank) best = h, best_rank = rank, begins = own;
            }
        }
        if (best == slot->n_live || slot->broken || !(best_rank >= -FLT_MAX)) break;
        if (position == 0) best_candidate = best_rank;
        if (s->prune > 0.0f && best_rank < best_candidate - s->prune) break;
        const moe_live live = moe_constraint_follow(s, slot, a, &slot->live[best], &choices[best], begins, best_rank);
        if (live.ended && position >= beam) continue;
        if (live.ended || last_step) moe_add_finished(s, slot, a, live, live.row);
        else next[n_next++] = live;
    }
    return moe_end_step(s, slot, a, next, n_next);
}

/* ---- Rules that keep finished hypotheses in the beam ---- */

/* Return the rank of a hypothesis; `before` is 1 if it ended in an earlier step. */
MOE_SHARED float moe_rank(const moe_search *s, float logprob, size_t tokens, int before) {
    if (!s->rules.divides) return logprob;
    return logprob / moe_length_penalty(s, tokens + (size_t)(before && s->rules.counts_later));
}

/* Like moe_search_step, for slot number `at`: keep finished hypotheses, and make the best of these and of all
 * continuations the next beam. An end token never gives a hypothesis a better rank than another token of equal
 * log-probability, so the row's `top` best tokens suffice. */
MOE_SHARED int moe_beam_step(const moe_search *s, moe_slot *slot, size_t at, const moe_beam *a, moe_live *next) {
    size_t n = 0, ended = 0;
    slot->steps++;
    for (size_t h = 0; h < slot->n_live; h++) {
        moe_live *from = &slot->live[h];
        if (from->ended) {
            from->rank = moe_rank(s, from->logprob, from->tokens, 1);
            moe_insert(s, slot->task.beam, next, &n, from);
        }
        for (size_t k = 0; k < (slot->task.sampling.temperature == 0.0f ? a->top : 1) && !from->ended && !from->dead;
             k++) {
            const size_t at_k = from->row * a->top + k;
            const int32_t id = a->top_ids[at_k];
            moe_live live = moe_continue(from, id, a->top_logprobs[at_k], a->top_logprobs[at_k], moe_is_end(s, id));
            if (live.logprob != live.logprob) slot->broken = 1;
            if (!(live.logprob >= -FLT_MAX)) break;
            live.rank = moe_rank(s, live.logprob, live.tokens, 0);
            moe_insert(s, slot->task.beam, next, &n, &live);
        }
    }
    if (slot->broken) return 1;
    for (size_t h = 0; h < n; h++) {
        if (!next[h].ended) moe_add_token(s, slot, a, &next[h]);
        ended += (size_t)next[h].ended;
        slot->live[h] = next[h];
    }
    slot->n_live = n;
    const int cut = slot->steps >= slot->task.limit;
    if (ended < n && !cut) return 0;
    for (size_t h = 0; h < n; h++) {
        /* hypotheses cut at the length limit keep their order */
        if (s->rules.divides || cut) moe_insert(s, slot->task.beam, slot->finished, &slot->n_finished, &slot->live[h]);
        else moe_add_finished(s, slot, a, slot->live[h], at * (size_t)s->beam + h);
    }
    return 1;
}

/* Like moe_search_step, for a single hypothesis that follows given tokens and, if they are scored, their end token. */
MOE_SHARED int moe_score_step(const moe_search *s, moe_slot *slot, size_t at, const moe_beam *a) {
    moe_live *live = &slot->live[0];
    const size_t position = slot->steps++, place = s->rules.by_place ? at * (size_t)s->beam : live->row;
    const int ends = position == slot->task.n_target;
    const float logprob = position < slot->task.free ? 0.0f : a->want_logprob[live->row];
    *live = moe_continue(live, ends ? s->eos : slot->target[position], logprob, logprob, ends);
    live->rank = live->logprob;
    slot->broken = live->logprob != live->logprob;
    if (slot->broken) return 1;
    const int done = ends || live->logprob < slot->task.least;
    if (!ends) moe_add_token(s, slot, a, live);
    if (done) moe_add_finished(s, slot, a, *live, place);
    if (position < slot->task.prompt) live->tokens = live->since = 0, live->met = 0; /* do not count prompt tokens */
    return done;
}

/* ---- Loops ----
 * Small models may repeat themselves endlessly. With a beam of 1, a translation is cut when its last tokens equal the
 * tokens one period (at most MOE_LOOP_WIDEST) earlier, for at least MOE_LOOP_LEAST tokens, three periods, and twice the
 * longest such run in the source. One period is kept. */

enum { MOE_LOOP_LEAST = 60 };

/* Return the length of the longest run of ids that equal the ids one period earlier. */
MOE_SHARED size_t moe_most_repeats(const int32_t *ids, size_t n) {
    size_t most = 0;
    for (size_t period = 1; period <= MOE_LOOP_WIDEST; period++)
        for (size_t i = period, run = 0; i < n; i++) {
            run = ids[i] == ids[i - period] ? run + 1 : 0;
            if (run > most) most = run;
        }
    return most;
}

/* Count the new token of the only hypothesis. Returns the number of tokens at its end that form a loop. */
MOE_SHARED size_t moe_count_repeats(moe_slot *slot, const moe_live *live) {
    const moe_token *token = &slot->tokens[live->last]; /* the tokens of a single hypothesis are contiguous */
    size_t loop = 0;
    for (size_t period = MOE_LOOP_WIDEST; period > 0; period--) {
        uint32_t *run = &slot->repeats[period - 1];
        *run = period < live->tokens && token->id == token[-(ptrdiff_t)period].id ? *run + 1 : 0;
        if (*run >= MOE_LOOP_LEAST && *run >= 3 * period && *run > 2 * slot->task.repeats) loop = *run;
    }
    return loop;
}

/* If the only hypothesis loops after its new token, cut it, make it the result and return 1. */
MOE_SHARED int moe_cut_loop(const moe_search *s, moe_slot *slot, const moe_beam *a) {
    moe_live *live = &slot->live[0];
    const size_t run = s->stops_loops ? moe_count_repeats(slot, live) : 0;
    if (!run) return 0;
    live->tokens -= run;
    live->last -= (int32_t)run;
    live->looped = 1;
    live->logprob = 0.0f;
    for (int32_t at = (int32_t)slot->task.prompt; at <= live->last; at++)
        live->logprob = live->logprob + slot->tokens[at].logprob;
    live->weighed = live->logprob;
    slot->n_finished = 0;
    moe_add_finished(s, slot, a, *live, live->row);
    return 1;
}

/* Process a step of slot number `at`. Returns 1 if the sentence is done, which deactivates the slot. */
MOE_SHARED int moe_slot_step(const moe_search *s, moe_slot *slot, size_t at, const moe_beam *a, moe_live *next) {
    const int given = slot->task.scoring || slot->steps < slot->task.n_target;
    int done = given           ? moe_score_step(s, slot, at, a)
               : s->rules.stay ? moe_beam_step(s, slot, at, a, next)
                               : moe_search_step(s, slot, a, next);
    if (!done && !given) done = moe_cut_loop(s, slot, a);
    if (done) slot->active = 0;
    return done;
}

/* ---- Drafts ----
 * A draft is a text that the translation may resemble. Its tokens after the place that the translation has reached are
 * guesses, computed in the rows after the hypothesis's own. A row counts only if the search chooses the row's input, so
 * a draft changes the number of runs, but no bit of the result. Draft-and-verify decoding: Leviathan et al. 2023, arXiv
 * 2211.17192; there, too, the guesses of one text are verified in one run. */

/* Find the place in the draft from which the translation continues after its new token: after the expected token;
 * otherwise after the nearest place with the last two tokens; otherwise after a token soon to come; otherwise the next
 * one, as if one word had been replaced. Returns 1 if the token was expected. */
MOE_SHARED int moe_follow_draft(moe_slot *slot) {
    const size_t from = slot->expected, n = slot->n_draft;
    if (!n || slot->steps <= slot->task.n_target) return 0;
    const moe_token *token = &slot->tokens[slot->live[0].last];
    const int32_t id = token->id, before = token->parent >= 0 ? slot->tokens[token->parent].id : -1;
    const int right = from < n && slot->draft[from] == id;
    if (from < n) slot->right += ((float)right - slot->right) * 0.25f, slot->expected++;
    for (size_t d = 1; d < n && !right; d++)
        for (int back = 0; back < 2; back++) {
            const size_t i = back ? from - d : from + d;
            if (i > 0 && i < n && slot->draft[i] == id && slot->draft[i - 1] == before) {
                slot->expected = i + 1;
                return 0;
            }
        }
    for (size_t i = from + 1; i < n && i < from + 6 && !right; i++)
        if (slot->draft[i] == id) {
            slot->expected = i + 1;
            return 0;
        }
    return right;
}

/* Process all steps of a slot in one run of the decoder. Returns 1 if the sentence is done. */
MOE_SHARED int moe_slot_steps(const moe_search *s, moe_slot *slot, size_t at, const moe_beam *a, moe_live *next) {
    int done = slot->active && moe_slot_step(s, slot, at, a, next);
    for (; slot->active; slot->ahead--) {
        const int right = moe_follow_draft(slot);
        if (!slot->ahead || (slot->guessed && !right)) break;
        slot->live[0].row++;
        done = moe_slot_step(s, slot, at, a, next);
    }
    slot->ahead = 0;
    return done;
}

/* Return the number of results, the first hypotheses of `finished`; 0 if a log-probability was NaN. */
MOE_SHARED size_t moe_slot_results(const moe_search *s, const moe_slot *slot) {
    if (slot->broken) return 0;
    return slot->n_finished < (size_t)s->nbest ? slot->n_finished : (size_t)s->nbest;
}

/* The result of a sentence as 32-bit words, for download from a device: slot, number of hypotheses (0 after NaN). For
 * each hypothesis: n_ids, finished, logprob and score (floats), looped, ids [n_ids], logprobs [n_ids + finished]
 * (floats) and, with search.aligns, sources [n_ids]. moe_result_words counts the words before hypothesis h. */
enum { MOE_HEAD_WORDS = 5 };
MOE_SHARED size_t moe_result_words(const moe_search *s, const moe_slot *slot, size_t h) {
    size_t words = 2;
    for (const moe_live *f = slot->finished; f < slot->finished + h; f++)
        words += MOE_HEAD_WORDS + (size_t)(2 + s->aligns) * f->tokens + (size_t)f->ended;
    return words;
}

MOE_SHARED size_t moe_most_words(const moe_search *s) {
    return 2 + (size_t)s->nbest * (MOE_HEAD_WORDS + 1 + (size_t)(2 + s->aligns) * s->max_target);
}

MOE_SHARED void moe_write_head(const moe_search *s, const moe_slot *slot, size_t at, int32_t *words) {
    words[0] = (int32_t)at;
    words[1] = (int32_t)moe_slot_results(s, slot);
}

MOE_SHARED void moe_write_result(const moe_search *s, const moe_slot *slot, size_t h, int32_t *words) {
    const moe_live *f = &slot->finished[h];
    int32_t *to = words + moe_result_words(s, slot, h), *ids = to + MOE_HEAD_WORDS,
            *sources = ids + 2 * f->tokens + f->ended;
    float *numbers = (float *)(void *)to, *logprobs = numbers + MOE_HEAD_WORDS + f->tokens;
    int32_t at = f->last;
    to[0] = (int32_t)f->tokens;
    to[1] = f->ended;
    numbers[2] = f->logprob;
    numbers[3] = f->rank;
    to[4] = f->looped;
    if (f->ended) logprobs[f->tokens] = f->latest;
    for (size_t i = f->tokens; i-- > 0; at = slot->tokens[at].parent) {
        ids[i] = slot->tokens[at].id;
        logprobs[i] = slot->tokens[at].logprob;
        if (s->aligns) sources[i] = slot->tokens[at].source;
    }
}

#if MOE_HOST

/* ==== 36. Session parameters ==================================================================================
 * The only table of session parameters: one row per parameter, with limits, default, presets and help. To add a
 * decoding option, append it to moe_session_params, add a row here, before the hidden rows, and add a member to
 * moe_search: moe_search_of sets this member, and the step functions of "Beam search" read it, even on a GPU. If only
 * some rules support it, use MOE_ONLY with a member of moe_rule_set. Programs, libmoetext and Python read this table.
 * New search rules need a name and a column of presets. */

enum { MOE_RULE_SETS = MOE_RULES_MARIAN + 1 };

typedef struct moe_param_row {
    moe_param shown;       /* shown.option is NULL if programs have no such option */
    size_t at;             /* offset in moe_session_params */
    double fallback;       /* default if the file has no valid value of `key` */
    const char *key;       /* metadata key of the default; NULL if there is none */
    double stated;         /* largest valid value of this metadata */
    const char *what;      /* name for messages; NULL if all rules support the parameter */
    size_t allowed;        /* offset of the member of moe_rule_set that must be 1, unless `what` is NULL */
    const double *presets; /* [MOE_RULE_SETS] */
} moe_param_row;

#define MOE_PARAM(member, least, most, real, ...)                                                       \
    .shown = { #member, __VA_ARGS__, least, most, real, 0 }, .at = offsetof(moe_session_params, member)
#define MOE_SAMPLING(member, least, most, real, ...)                                                    \
    .shown = { #member, __VA_ARGS__, least, most, real, 1 }, .at = offsetof(moe_session_params, member)
#define MOE_HIDDEN NULL, NULL, NULL
#define MOE_BYTES 2     /* value of moe_param.real for a size_t */
#define MOE_AUTO 0x1p64 /* represents SIZE_MAX */
#define MOE_DEFAULT(metadata, most, otherwise) .fallback = (otherwise), .key = (metadata), .stated = (most)
#define MOE_ONLY(member, name) .allowed = offsetof(moe_rule_set, member), .what = (name)
#define MOE_PRESETS(paper, nvidia, tf, mlperf, hf, marian)                \
    .presets = (const double[]) { paper, nvidia, tf, mlperf, hf, marian }
_Static_assert(MOE_RULE_SETS == 6, "MOE_PRESETS needs a column for every rule set");

static const moe_param_row moe_param_rows[] = {
    { MOE_PARAM(beam, 1, MOE_MAX_BEAM, 0, "beam", "1 to 64",
                "hypotheses kept per step; 1 is greedy (default: the model's)"),
      MOE_DEFAULT("decode.beam", MOE_MAX_BEAM, 4), MOE_PRESETS(8, 5, 10, 10, 4, 12) },
    { MOE_PARAM(nbest, 1, MOE_MAX_BEAM, 0, "nbest", "1 to 64", "translations returned per text (default: 1)"),
      .fallback = 1 },
    { MOE_PARAM(rerank, 0, 100, 1, "rerank", "0 to 100",
                "weight of the source's log-probability given the translation; 0 disables (default: the model's)"),
      MOE_DEFAULT("decode.rerank", 100, 0), MOE_ONLY(reranks, "reranking"), MOE_PRESETS(0, 0, 0, 0, 0, 0) },
    { MOE_PARAM(length_penalty, 0, 100, 1, "length-penalty", "0 to 100",
                "alpha of the GNMT length penalty; 0 disables (default: the model's)"),
      MOE_DEFAULT("decode.length_penalty", 100, 0.6), MOE_PRESETS(0.2, 0.6, 1, 1, 1, 0) },
    { MOE_PARAM(length_constant, 0, 1e6, 1, "length-constant", "0 to 1000000",
                "constant c of the length penalty, 5 in GNMT (default: the model's)"),
      MOE_DEFAULT("decode.length_constant", 1e6, 5), MOE_PRESETS(5, 5, 5, 5, 0, 0) },
    { MOE_PARAM(coverage_penalty, 0, 100, 1, "coverage-penalty", "0 to 100",
                "beta of the GNMT coverage penalty; 0 disables (default: the model's)"),
      MOE_DEFAULT("decode.coverage_penalty", 100, 0), MOE_ONLY(covers, "coverage"), MOE_PRESETS(0.2, 0.1, 0, 0, 0, 0) },
    { MOE_PARAM(prune, 0, 1e6, 1, "prune", "0 to 1000000",
                "drop hypotheses whose score is more than X below the best; 0 disables (default: the model's)"),
      MOE_DEFAULT("decode.prune", 1e6, 0), MOE_ONLY(prunes, "pruning"), MOE_PRESETS(3, 0, 0, 0, 0, 0) },
    { MOE_PARAM(early_stopping, 0, 1, 0, "early-stopping", "0 or 1",
                "stop when the beam is full of finished hypotheses; hf rules only (default: the model's)"),
      MOE_DEFAULT("decode.early_stopping", 1, 0) },
    { MOE_PARAM(min_target, 0, 1 << 20, 0, "min-target", "0 to 1048576",
                "minimum length in tokens, excluding the end token (default: 0)") },
    { MOE_PARAM(max_len_factor, 0, 1e6, 1, "max-len-factor", "0 to 1000000",
                "maximum length in tokens per source token (default: the model's)"),
      MOE_DEFAULT("decode.max_len_factor", 1e6, 2), MOE_PRESETS(2, 0, 2, 2, 0, 3) },
    { MOE_PARAM(max_len_offset, 0, 1 << 20, 0, "max-len-offset", "0 to 1048576",
                "tokens to add to the limit given by max-len-factor (default: the model's)"),
      MOE_DEFAULT("decode.max_len_offset", 1 << 16, 10), MOE_PRESETS(0, 79 /* 80 with begin token */, 0, 0, 200, 0) },
    { MOE_PARAM(shortlist, 0, 1, 0, "shortlist", "0 or 1",
                "restrict translations to the model's shortlist; 0 allows all tokens (default: 1)"),
      .fallback = 1 },
    { MOE_PARAM(repetition_penalty, 0, 100, 1, "repetition-penalty", "0 to 100",
                "penalty for repeated tokens: above 1 makes them less likely, 0 or 1 disables (default: 0)"),
      MOE_ONLY(penalises, "repetition penalty") },
    { MOE_PARAM(stop_loops, 0, 1, 0, "stop-loops", "0 or 1",
                "end translations that repeat themselves; requires --beam 1 (default: 1 without an encoder)") },
    { MOE_PARAM(sample, 0, 1, 0, "sample", "0 or 1",
                "sample tokens instead of using beam search; requires --beam 1 (default: 0)") },
    { MOE_SAMPLING(temperature, 0, 100, 1, "temperature", "0 to 100",
                   "sampling temperature: lower is more conservative; 0 disables (default: the model's)"),
      MOE_DEFAULT("sample.temperature", 100, 1) },
    { MOE_SAMPLING(top_k, 0, 1 << 30, 0, "top-k", "0 to 1073741824",
                   "sample from the N most probable tokens; 0 disables (default: the model's)"),
      MOE_DEFAULT("sample.top_k", 1 << 30, 0) },
    { MOE_SAMPLING(top_p, 0, 1, 1, "top-p", "0 to 1",
                   "sample from the most probable tokens whose probabilities add up to X (default: the model's)"),
      MOE_DEFAULT("sample.top_p", 1, 1) },
    { MOE_SAMPLING(min_p, 0, 1, 1, "min-p", "0 to 1",
                   "sample from tokens with at least X times the probability of the best one (default: the model's)"),
      MOE_DEFAULT("sample.min_p", 1, 0) },
    { MOE_SAMPLING(seed, 0, INT32_MAX, 0, "seed", "0 to 2147483647",
                   "random seed; the same seed and text give the same translation (default: 0)") },
    { MOE_PARAM(kv_bits, 0, 32, 0, "kv-bits", "8, 16 or 32",
                "bits per cached key or value in decoder-only models; others use 32 (default: 16)") },
    { MOE_PARAM(piece, 0, 1 << 16, 0, "piece", "0 to 65536",
                "rows per step for prompts and prefixes (default: 512, or 32 per sentence with an encoder)") },
    { MOE_PARAM(context_memory, 0, 1 << 20, 0, "context-memory", "0 to 1048576",
                "MB for cached keys and values of all sentences; 0 reserves enough for usual prompts (default: 0)") },
    { MOE_PARAM(expert_memory, 0, MOE_AUTO, MOE_BYTES, "expert-memory", "a size such as 8G, or auto",
                "memory for experts, which are read from the file on demand (default: map the whole file)") },
    { MOE_PARAM(max_constraints, 0, MOE_MAX_CONSTRAINTS, 0, MOE_HIDDEN), MOE_ONLY(constrains, "constraints") },
    { MOE_PARAM(threads, 0, MOE_MAX_THREADS, 0, MOE_HIDDEN) },
    { MOE_PARAM(batch, 1, 1 << 16, 0, MOE_HIDDEN), .fallback = 32 },
    { MOE_PARAM(batch_tokens, 0, 1 << 24, 0, MOE_HIDDEN) },
    { MOE_PARAM(max_source, 2, 1 << 20, 0, MOE_HIDDEN), MOE_DEFAULT("limit.source", 1 << 16, 512) },
    { MOE_PARAM(max_target, 2, 1 << 20, 0, MOE_HIDDEN), MOE_DEFAULT("limit.target", 1 << 16, 512) },
    { MOE_PARAM(target_tag, -1, INT32_MAX, 0, MOE_HIDDEN), .fallback = -1 },
    { MOE_PARAM(source_tag, -1, INT32_MAX, 0, MOE_HIDDEN), .fallback = -1 },
};

static double moe_param_value(const moe_param_row *row, const moe_session_params *p) {
    const void *at = (const char *)p + row->at;
    if (row->shown.real == MOE_BYTES) return *(const size_t *)at == SIZE_MAX ? MOE_AUTO : (double)*(const size_t *)at;
    return row->shown.real ? (double)*(const float *)at : *(const int *)at;
}

static void moe_set_param(const moe_param_row *row, moe_session_params *p, double value) {
    void *at = (char *)p + row->at;
    if (row->shown.real == MOE_BYTES) *(size_t *)at = value < (double)SIZE_MAX ? (size_t)value : SIZE_MAX;
    else if (row->shown.real) *(float *)at = (float)value;
    else *(int *)at = (int)value;
}

const moe_param *moe_param_at(size_t i) {
    return i < MOE_COUNT(moe_param_rows) && moe_param_rows[i].shown.option ? &moe_param_rows[i].shown : NULL;
}

/* Return 1 if the caller's struct, which may be shorter or of version 0.1, includes the number at offset `at`. */
static int moe_param_in(const moe_session_params *p, size_t at) {
    const size_t bytes = at >= offsetof(moe_session_params, expert_memory) ? sizeof(size_t) : sizeof(int);
    return p->size <= MOE_LARGEST_STRUCT && at + bytes <= p->size;
}

double moe_param_get(const moe_session_params *p, size_t i) {
    return moe_param_at(i) && moe_param_in(p, moe_param_rows[i].at) ? moe_param_value(&moe_param_rows[i], p) : 0;
}

int moe_param_set(moe_session_params *p, size_t i, double value) {
    const moe_param *shown = moe_param_at(i);
    if (!shown || !moe_param_in(p, moe_param_rows[i].at) || !(value >= shown->least && value <= shown->most)) return 0;
    moe_set_param(&moe_param_rows[i], p, value);
    return 1;
}

int moe_session_params_preset(moe_session_params *p, const char *name) {
    const int rules = name ? moe_find_word(moe_rules_names, name) : -1;
    if (rules < 0) return 0;
    if (moe_param_in(p, offsetof(moe_session_params, rules))) p->rules = (moe_rules)rules;
    for (size_t i = 0; i < MOE_COUNT(moe_param_rows); i++)
        if (moe_param_rows[i].presets) moe_param_set(p, i, moe_param_rows[i].presets[rules]);
    return 1;
}

static double moe_meta_number(const moe_model *m, const char *key, double low, double high, double fallback) {
    const moe_meta *found = moe_find_meta(&m->file, key);
    double v = found ? moe_meta_real(found, 0) : fallback;
    return v >= low && v <= high ? v : fallback;
}

/* Return 1 if the model can also translate in the opposite direction. */
static int moe_can_rerank(const moe_model *m) {
    return m->source_tag == 1 && !m->separate && moe_model_language_count(m) > 1;
}

/* Return the number of positions of a model, or SIZE_MAX if unlimited. */
static size_t moe_places(const moe_model *m) {
    size_t most = m->positions.rows ? m->positions.rows : SIZE_MAX;
    for (size_t i = 0; i < MOE_ROTARIES; i++) most = moe_min(most, m->rotary[i].rows ? m->rotary[i].rows : SIZE_MAX);
    return most;
}

static int moe_stated_source(const moe_model *m) { return (int)moe_meta_number(m, "limit.source", 2, 1 << 16, 512); }

/* Return the default of max_source: the file's or, if larger, the longest prompt that leaves positions for max_target.
 */
static int moe_default_source(const moe_model *m, int max_target) {
    const int stated = moe_stated_source(m);
    const size_t places = moe_places(m), target = max_target < 0 ? 0 : (size_t)max_target;
    if (!m->prompted || places > 1 << 20 || places < target + (size_t)stated) return stated;
    return (int)(places - target);
}

static moe_session_params moe_default_params(const moe_model *m) {
    moe_session_params p;
    memset(&p, 0, sizeof p);
    for (size_t i = 0; i < MOE_COUNT(moe_param_rows); i++) {
        const moe_param_row *row = &moe_param_rows[i];
        moe_set_param(row, &p,
                      row->key ? moe_meta_number(m, row->key, row->shown.least, row->stated, row->fallback)
                               : row->fallback);
    }
    if (!moe_can_rerank(m) || !moe_rule_sets[m->rules].reranks) p.rerank = 0;
    if (!m->shortlist.ids) p.shortlist = 0;
    p.rules = m->rules;
    p.stop_loops = m->prompted;
    const int longest = (int)moe_meta_number(m, "decode.max_new", 1, 1 << 16, 0);
    if (longest) {
        p.max_target = longest < p.max_target ? longest : p.max_target;
        p.max_len_factor = 0;
        p.max_len_offset = longest;
    }
    p.max_source = moe_default_source(m, p.max_target);
    return p;
}

void moe_session_params_init(moe_session_params *out, size_t size, const moe_model *m) {
    moe_session_params p = moe_default_params(m);
    p.size = size;
    if (size <= MOE_LARGEST_STRUCT) moe_give_struct(out, size, &p, sizeof p);
}

/* Copy a caller's parameters, possibly from a shorter struct. */
static moe_status moe_take_params(const moe_model *m, const moe_session_params *given, moe_session_params *out,
                                  moe_error *error) {
    moe_session_params known;
    *out = moe_default_params(m);
    if (!given) return MOE_OK;
    if (given->size < sizeof given->size)
        MOE_FAIL(ARGUMENT, "moe_session_params", "size is %zu; call moe_session_params_init first", given->size);
    MOE_TRY(moe_take_struct(&known, sizeof known, given, given->size, "moe_session_params", error));
    memcpy(out, &known, moe_min(given->size, sizeof known));
    return MOE_OK;
}

static moe_status moe_check_number(const char *name, double value, double least, double most, int real,
                                   moe_error *error) {
    if (value >= least && value <= most) return MOE_OK;
    MOE_FAIL(ARGUMENT, name, real ? "%s is %g, but must be %g to %g" : "%s is %.0f, but must be %.0f to %.0f", name,
             value, least, most);
}

static moe_status moe_check_gates(const moe_model *m, const moe_session_params *p, int *gating, moe_error *error) {
    const moe_layer *layer;
    moe_gate kind = MOE_GATE_SOFTMAX;
    if (p->gating && !moe_gate_parse(p->gating, &kind))
        MOE_FAIL(ARGUMENT, "gating", "unknown gate '%s'; available: softmax, topk, threshold, sigmoid, batchwise",
                 p->gating);
    *gating = p->gating ? 1 + (int)kind : 0;
    for (size_t i = 0; (layer = moe_find_mixture(m, i)); i++)
        for (int parent = 0; parent <= (layer->mixture.groups > 0); parent++) {
            const moe_gating *g = parent ? &layer->mixture.parent : &layer->mixture.gate;
            if (kind == MOE_GATE_THRESHOLD && !g->threshold)
                MOE_FAIL(UNSUPPORTED, "gating", "%s has no thresholds; create them with moe-calibrate", layer->name);
            if ((kind == MOE_GATE_TOPK || kind == MOE_GATE_BATCHWISE) && !g->k)
                MOE_FAIL(UNSUPPORTED, "gating", "%s does not set the number of experts to select (k)", layer->name);
            if (p->noise && !g->noise.rows)
                MOE_FAIL(UNSUPPORTED, "noise", "%s has no noise weights: it was not trained with noisy top-k",
                         layer->name);
        }
    return MOE_OK;
}

static moe_status moe_check_param(const moe_param_row *row, const moe_session_params *p, moe_error *error) {
    const moe_param *shown = &row->shown;
    const double value = moe_param_value(row, p);
    const void *allowed = (const char *)&moe_rule_sets[p->rules] + row->allowed;
    MOE_TRY(moe_check_number(shown->name, value, shown->least, shown->most, shown->real, error));
    if (value == 0 || !row->what || *(const int *)allowed) return MOE_OK;
    MOE_FAIL(ARGUMENT, shown->name, "the %s rules do not support %s: %s must be 0", moe_rules_names[p->rules],
             row->what, shown->name);
}

/* Check the limits of a request's own sampling parameters, `sample` to `min_p`. */
static moe_status moe_check_sampling(const moe_session_params *p, int samples, moe_error *error) {
    if (!samples || !moe_param_in(p, offsetof(moe_session_params, min_p)))
        MOE_FAIL(ARGUMENT, "sampling",
                 "per-request sampling requires a session with sample 1 and parameters that include min_p");
    for (const moe_param_row *row = moe_param_rows; row < moe_param_rows + MOE_COUNT(moe_param_rows); row++)
        if (row->shown.sampling || row->at == offsetof(moe_session_params, sample))
            MOE_TRY(moe_check_number(row->shown.name, moe_param_value(row, p), row->shown.least, row->shown.most,
                                     row->shown.real, error));
    return MOE_OK;
}

static moe_status moe_check_params(const moe_model *m, moe_session_params *p, moe_error *error) {
    MOE_TRY(moe_check_number("rules", (int)p->rules, 0, MOE_RULE_SETS - 1, 0, error));
    if (p->temperature == 0.0f && p->beam > 1) p->sample = 0;
    if (p->sample && p->temperature != 0.0f && p->repetition_penalty == 0.0f && moe_rule_sets[p->rules].penalises)
        p->repetition_penalty = (float)moe_meta_number(m, "sample.repetition_penalty", 0, 100, 0);
    if (p->repetition_penalty == 1.0f) p->repetition_penalty = 0; /* 1 disables the penalty under all rules */
    if (p->beam != 1 || !moe_rule_sets[p->rules].penalises) p->stop_loops = 0;
    if (p->rerank > 0.0f && !moe_can_rerank(m))
        return moe_fail(
            error, MOE_ERROR_UNSUPPORTED, "rerank",
            "rerank must be 0: the model cannot translate back, because it lacks tags of several languages");
    for (size_t i = 0; i < MOE_COUNT(moe_param_rows); i++) MOE_TRY(moe_check_param(&moe_param_rows[i], p, error));
    if (p->shortlist && !m->shortlist.ids)
        MOE_FAIL(UNSUPPORTED, "shortlist", "shortlist must be 0: the model has no shortlist");
    if (!p->kv_bits) p->kv_bits = m->prompted ? 16 : 32;
    if (p->kv_bits % 8 || p->kv_bits == 24)
        MOE_FAIL(ARGUMENT, "kv_bits", "kv_bits is %d, but must be 8, 16 or 32", p->kv_bits);
    if (p->kv_bits != 32 && !m->prompted)
        MOE_FAIL(UNSUPPORTED, "kv_bits", "kv_bits must be 32, except for decoder-only models with attention");
    MOE_TRY(moe_check_number("min_target", p->min_target, 0, p->max_target, 0, error));
    MOE_TRY(moe_check_number("target_tag", p->target_tag, -1, m->source_vocabulary - 1, 0, error));
    MOE_TRY(moe_check_number("source_tag", p->source_tag, -1, m->source_vocabulary - 1, 0, error));
    MOE_TRY(moe_check_number("nbest", p->nbest, 1, p->beam, 0, error));
    if (p->sample && p->beam > 1)
        MOE_FAIL(ARGUMENT, "sample", "sample must be 0 with a beam of %d: sampling needs a beam of 1", p->beam);
    if (m->kind == MOE_MODEL_TRANSLATION && !m->shows && (p->attention || p->coverage_penalty != 0.0f))
        MOE_FAIL(UNSUPPORTED, p->attention ? "attention" : "coverage_penalty",
                 m->prompted ? "the model has no encoder, so it cannot align words"
                             : "the model does not specify which attention heads align words (align.heads)");
    if (m->n_ends > 1 && p->min_target)
        MOE_FAIL(UNSUPPORTED, "min_target", "min_target must be 0 for a model with several end tokens");
    if (p->max_source == moe_default_params(m).max_source) p->max_source = moe_default_source(m, p->max_target);
    const size_t source = (size_t)p->max_source, target = (size_t)p->max_target, places = moe_places(m),
                 longest = m->prompted ? source + target : moe_max(source, target);
    if (longest > places)
        MOE_FAIL(ARGUMENT, "max_source",
                 "max_source and max_target must be at most %zu %s, the model's number of positions", places,
                 m->prompted ? "together" : "each");
    if (m->kind != MOE_MODEL_TRANSLATION) {
        if (p->attention) MOE_FAIL(UNSUPPORTED, "attention", "this model does not translate and has no attention");
        if (p->next_token) MOE_FAIL(UNSUPPORTED, "next_token", "this model does not generate tokens");
        p->max_source = 2;
        p->coverage_penalty = 0;
    }
    if (m->kind == MOE_MODEL_CLASSIFIER) p->max_target = 2;
    if (!p->piece) p->piece = m->prompted ? 512 : 1 + (int)moe_min(1024, 32 * (size_t)p->batch);
    if (!p->threads) p->threads = moe_processors();
    return MOE_OK;
}

/* ==== 37. Sessions: making ====================================================================================
 * A session's block of memory: planning, carving, binding. Invariant: the same code measures and carves the memory. */

/* A translation waiting to be reranked (see "Reranking"). */
typedef struct moe_waiting {
    moe_request request; /* the caller's request; source_tag is -1 until the language has been detected */
    int32_t *source;     /* [n_source] copy of the request's source, without tag and end */
    int used;
    moe_status status; /* status of the first question that failed */
    char message[128];
    uint64_t arrival;           /* 0 while the sentence is being translated */
    size_t n;                   /* hypotheses */
    size_t asked, answered;     /* numbers of questions and answers in this round, one per language or hypothesis */
    size_t language;            /* the most probable language so far */
    float best;                 /* best score of a reranked hypothesis so far */
    moe_hypothesis *hypotheses; /* [n], whose arrays are in `words` */
    int32_t *words;             /* [moe_most_words] */
} moe_waiting;

typedef struct moe_ticket {
    moe_request request;  /* the caller's request, whose arrays may no longer be valid */
    moe_waiting *waiting; /* NULL without reranking */
    size_t question;      /* number of the question; SIZE_MAX for the translation itself */
    size_t staged;        /* index of the request's first id in moe_session.staged */
    int32_t reported;     /* index of the last token reported to the caller or skipped */
} moe_ticket;

/* A page of rows carried by token, which belongs to one sentence or is shared by sentences with the same start. */
typedef struct moe_page {
    uint64_t serial, before; /* id of this page in a shared start, id of the previous page; 0 if none */
    int32_t ids[MOE_PAGE];
    size_t users;       /* sentences that use it */
    int filled, loaded; /* 1 if all rows are stored; 1 if they are from a file */
} moe_page;

/* Decayed sums over the decoder's runs: of 1, rows, seconds, rows * rows and rows * seconds. */
typedef struct moe_pace {
    double n, r, t, rr, rt;
    int mixed; /* 1 if the current run has rows of given tokens, which have no logits */
} moe_pace;

/* A row carried by state that holds the states after a page of a shared start, for sentences that continue there. */
typedef struct moe_states {
    uint64_t serial, used; /* id of the page, 0 if none; number of the last use */
    int32_t row;
} moe_states;

struct moe_session {
    const moe_model *model;
    moe_allocator allocator;
    size_t bytes; /* size of this struct and the nodes after it */
    moe_session_params params;
    moe_search search;
    const moe_kernels *kernels;
    const moe_device_api *api; /* functions of the device that runs the graphs; NULL if the processor runs them */
    moe_device *device;
    int device_index;     /* index of the device */
    int device_automatic; /* 1 if the caller named no device */
    moe_pool pool;
    atomic_int busy; /* 1 during a call of moe_translate or moe_classify */
    char *block;     /* all arrays, except carried rows and activations of a device */
    size_t block_bytes, carried_bytes, arena_bytes;
    void *device_carried, *device_arena;
    moe_graph graphs[MOE_GRAPHS];
    moe_carried (*carried)[MOE_CARRIES]; /* [layers of the model] */
    moe_type keep;                       /* type of rows carried by token */
    size_t carried_rows[MOE_CARRY_COUNT];
    moe_damage damage; /* damage that the session has found in its model */
    moe_bank bank;     /* streamed experts, if any */
    moe_ranks ranks;   /* ranks that share the experts, if there is a wire */
    size_t rows, encode_tokens;
    size_t n_slots;      /* batch, plus slots with one hypothesis for reranking questions */
    moe_slot *slots;     /* [n_slots]; without hypotheses if a device searches */
    moe_ticket *tickets; /* [n_slots] */
    size_t n_waiting;    /* 0 without reranking, when results go directly to the caller */
    moe_waiting *waiting;
    uint64_t arrivals;
    size_t token_rows;      /* rows carried by token per slot, for its longest translations; 0 if none */
    size_t n_pages, n_free; /* numbers of pages for these rows and of free pages, unless a device manages pages */
    moe_page *pages;        /* [n_pages] */
    int32_t *free_pages;    /* [n_free] */
    int shares;             /* 1 if sentences with the same start share the start's pages */
    int32_t *beginnings;    /* [MOE_PAGE n_pages] hash table of pages by their tokens, with the latest page or -1 */
    size_t n_idle;
    int32_t *idle_pages;       /* [n_idle] unused pages of shared starts, least recently used first */
    size_t n_kept;             /* shared starts whose states can be kept */
    moe_states *kept;          /* [n_kept] */
    uint64_t uses;             /* number of uses of kept states so far */
    uint64_t serials;          /* number of serials assigned so far */
    uint64_t begun, ended;     /* number of sentences started so far; number done */
    moe_pace pace, predicting; /* how the time of a run, and of one of the predictor, depends on its rows */
    int predicts, pays;        /* 1 if the session can run the predictor; 1 if this seems to save time */
    float foreseen;            /* share of the recently predicted tokens that were right */
    float *hidden;             /* [rows, D] the decoder's output for the predictor */
    float right;               /* expected share of right tokens in a draft, averaged over recent sentences */
    size_t *active;            /* [n_active] slots in the order of their segments of `length` rows carried by source */
    size_t n_active;
    /* the sentences being encoded */
    int32_t *staged;              /* [encode_tokens] concatenated ids of these sentences */
    uint32_t *listed;             /* a bit for each token of the list being built */
    moe_frame frames[MOE_GRAPHS]; /* if a device searches, the decoder's frame has only the arrays for classifiers */
    float *coverage_next;         /* coverage of the next step; equals `coverage` if stored by slot */
    moe_live *next;
    /* results */
    moe_hypothesis *hypotheses; /* [nbest of the search] */
    int32_t *results;           /* result of one sentence, written by moe_write_result */
    /* arguments of the callback next_token, if any */
    int32_t *next_ids;       /* [beam, max_target] */
    const int32_t **next_of; /* [beam] rows of next_ids */
    moe_stats stats;
    /* set by moe_translate */
    moe_pull_fn pull;
    moe_done_fn done;
    void *user;
};

static moe_status moe_choose_device(moe_session *s, const char *name, moe_error *error) {
    const moe_device_api *api = NULL;
    char *end = NULL;
    long n = 0;
#ifdef MOE_CUDA
    api = moe_cuda();
#endif
    s->device_automatic = !name || !*name || strcmp(name, "auto") == 0;
    if (s->device_automatic) s->api = api;
    if (s->device_automatic || strcmp(name, "cpu") == 0) return MOE_OK;
    if (strncmp(name, "cuda", 4) != 0 || (name[4] && name[4] != ':'))
        MOE_FAIL(ARGUMENT, "device", "unknown device '%s'; available: cpu, cuda, cuda:N", name);
    if (name[4]) n = strtol(name + 5, &end, 10); /* LONG_MAX on overflow */
    if (name[4] && (name[5] < '0' || name[5] > '9' || *end || n > 4096))
        MOE_FAIL(ARGUMENT, "device", "invalid device '%s': expected cuda: and a number", name);
    if (!api)
        MOE_FAIL(UNSUPPORTED, "device", "this build has no CUDA support; build with make CUDA=1 or use device cpu");
    s->api = api;
    s->device_index = (int)n;
    return MOE_OK;
}

/* Carve the rows that layers carry, in zeroed device memory if there is a device. Zero the decoder's initial states. */
static void moe_carried_layout(moe_session *s, moe_layout *at) {
    for (size_t i = 0; i < s->model->n_layers; i++)
        for (size_t k = 0; k < MOE_CARRIES; k++) {
            const moe_layer *layer = &s->model->layers[i];
            const size_t cols = moe_carried_cols(layer, k);
            const moe_keep keep = moe_keep_of(layer, k, s->keep);
            float *rows = moe_carve(at, cols ? s->carried_rows[layer->type->carries[k].by] : 0, moe_keep_bytes(&keep));
            if (!at->base || !cols) continue;
            s->carried[i][k].rows = rows;
            if (!s->api && layer->type->carries[k].by == MOE_BY_PARENT && s->model->decoder_from_encoder)
                memset(rows + s->rows * cols, 0, s->n_slots * cols * sizeof(float));
        }
}

/* Return the maximum number of idle pages: one eighth of all pages, which limits the memory touched; if there are few
 * slots, up to half of a sentence's pages. */
static size_t moe_most_idle(const moe_session *s) { return moe_divide_up(s->n_pages, moe_min(8, 2 * s->n_slots)); }

/* Carve the pages of rows carried by token, all free, and the numbers of rows carried by state. */
static void moe_pages_layout(moe_session *s, moe_beam *b, moe_layout *at) {
    const int states = moe_model_carries(s->model, MOE_BY_STATE, 1);
    if (states) b->states = moe_carve(at, s->rows, sizeof *b->states);
    if (states) b->origins = moe_carve(at, s->rows, sizeof *b->origins);
    if (states) b->guesses = moe_carve(at, s->rows, sizeof *b->guesses);
    if (states) b->right = moe_carve(at, s->rows, sizeof *b->right);
    s->pages = moe_carve(at, s->n_pages, sizeof *s->pages);
    s->free_pages = moe_carve(at, s->n_pages, sizeof *s->free_pages);
    s->beginnings = moe_carve(at, MOE_PAGE * s->n_pages, sizeof *s->beginnings);
    s->idle_pages = moe_carve(at, moe_most_idle(s), sizeof *s->idle_pages);
    s->kept = moe_carve(at, s->n_kept, sizeof *s->kept);
    for (size_t i = 0; at->base && i < s->n_kept; i++)
        s->kept[i] = (moe_states){ .row = (int32_t)(s->carried_rows[MOE_BY_STATE] - s->n_kept + i) };
    s->n_free = s->n_idle = 0;
    for (size_t i = 0; at->base && i < s->n_pages; i++) {
        s->free_pages[s->n_free++] = (int32_t)(s->n_pages - 1 - i);
        s->pages[i] = (moe_page){ .serial = 0 };
        for (size_t k = 0; k < MOE_PAGE; k++) s->beginnings[i * MOE_PAGE + k] = -1;
    }
    for (size_t i = 0; s->n_pages && i < s->n_slots; i++) {
        int32_t *pages = moe_carve(at, moe_divide_up(s->token_rows, MOE_PAGE), sizeof *pages);
        if (at->base) s->slots[i].pages = pages;
    }
}

/* Carve the arguments and results of the graphs' runs, apart from nodes, and memory for a sentence's result. */
static void moe_frame_layout(moe_session *s, moe_layout *at) {
    const size_t max_source = (size_t)s->params.max_source, max_target = s->search.max_target;
    const size_t beam = (size_t)s->params.beam;
    const size_t rows = s->rows, most = moe_max(rows, s->encode_tokens), top = s->graphs[MOE_DECODER].top;
    const int here = !s->api; /* beam search runs on the host */
    const int classifies = s->model->kind == MOE_MODEL_CLASSIFIER;
    moe_frame *e = &s->frames[MOE_ENCODER], *d = &s->frames[MOE_DECODER];
    moe_beam *b = &d->beam;
    e->packed.sentence = moe_carve(at, s->n_slots, sizeof(size_t));
    e->ids = moe_carve(at, s->encode_tokens, sizeof *e->ids);
    e->packed.destination = moe_carve(at, s->encode_tokens, sizeof(size_t));
    e->packed.live = moe_carve(at, max_source, sizeof(size_t));
    e->packed.first = moe_carve(at, max_source, sizeof(size_t));
    /* The graphs never run at the same time. */
    if (!classifies) e->positions = d->positions = moe_carve(at, most, sizeof *d->positions);
    if (here && s->params.noise) e->keys = d->keys = moe_carve(at, most, sizeof *d->keys);
    if (here || classifies) {
        b->want = moe_carve(at, rows, sizeof *b->want);
        b->want_logprob = moe_carve(at, rows, sizeof(float));
        b->top_ids = moe_carve(at, rows * top, sizeof *b->top_ids);
        b->top_logprobs = moe_carve(at, rows * top, sizeof(float));
    }
    if (!here || classifies) return;
    d->ids = moe_carve(at, rows, sizeof *d->ids);
    b->parents = moe_carve(at, rows, sizeof *b->parents);
    if (s->token_rows) b->chain = moe_carve(at, rows * max_target, sizeof *b->chain);
    if (s->params.min_target) b->hold = moe_carve(at, rows, sizeof *b->hold);
    if (s->search.max_constraints) {
        b->n_starts = s->search.max_constraints;
        b->starts = moe_carve(at, rows * b->n_starts, sizeof *b->starts);
        b->start_logprobs = moe_carve(at, rows * b->n_starts, sizeof(float));
    }
    if (s->search.used_words) {
        b->used = moe_carve(at, rows * s->search.used_words, sizeof *b->used);
        b->penalty = moe_carve(at, rows, sizeof *b->penalty);
        if (beam > 1) b->top_weighed = moe_carve(at, rows * top, sizeof *b->top_weighed);
    }
    if (s->search.samples) b->samplings = moe_carve(at, rows, sizeof *b->samplings);
    if (s->params.shortlist) b->lists = moe_carve(at, rows, sizeof *b->lists);
    b->segment = moe_carve(at, rows, sizeof(size_t));
    b->length = moe_carve(at, rows, sizeof(size_t));
    if (s->search.beta != 0.0f || s->params.attention || s->search.aligns)
        b->attention = moe_carve(at, rows * max_source, sizeof(float));
    b->attention_stride = max_source;
    b->top = top;
    if (s->search.beta != 0.0f) b->coverage = s->coverage_next = moe_carve(at, rows * max_source, sizeof(float));
    if (s->search.beta != 0.0f && !s->search.rules.by_place)
        s->coverage_next = moe_carve(at, rows * max_source, sizeof(float));
    s->next = moe_carve(at, beam, sizeof *s->next);
    if (s->params.next_token) {
        s->next_ids = moe_carve(at, beam * max_target, sizeof *s->next_ids);
        s->next_of = moe_carve(at, beam, sizeof *s->next_of);
    }
    s->results = moe_carve(at, moe_most_words(&s->search), sizeof *s->results);
    moe_pages_layout(s, b, at);
    if (s->predicts) s->hidden = moe_carve(at, rows * s->model->width, sizeof *s->hidden);
    s->frames[MOE_PREDICTOR] = (moe_frame){ .ids = d->ids, .positions = d->positions, .inputs = s->hidden };
    s->frames[MOE_PREDICTOR].beam =
        (moe_beam){ .chain = b->chain, .want = b->want, .top_ids = b->top_ids, .top_logprobs = b->top_logprobs };
}

enum { MOE_GATHERED = 4096 }; /* maximum rows of the output layer gathered for a sentence */

static void moe_list_layout(const moe_session *s, int gathers, moe_list *list, moe_layout *at) {
    const moe_matrix *w = &s->model->output;
    const size_t rows = s->api || !gathers ? 0 : moe_min(MOE_GATHERED, moe_round_up(w->rows, MOE_Q8_ROWS));
    list->capacity = rows;
    list->ids = moe_carve(at, w->rows, sizeof *list->ids);
    list->w =
        moe_matrix_view(w->type, rows, w->cols, moe_carve(at, (size_t)moe_matrix_bytes(w->type, rows, w->cols), 1));
    if (s->model->output_bias) list->bias = moe_carve(at, rows, sizeof *list->bias);
}

/* Carve the table of experts per rank, or the slots of streamed experts, which use the remaining memory. */
static moe_status moe_experts_layout(moe_session *s, moe_layout *at, moe_error *error) {
    const size_t asked = s->params.expert_memory;
    MOE_FOR_EXPERTS (g, t, s->graphs)
        if (s->params.wire && t->experts->load) moe_place_experts(&s->ranks, t, at);
    if (!s->bank.file) return MOE_OK;
    if (!at->base)
        MOE_TRY(moe_bank_measure(&s->bank, s->graphs,
                                 asked < SIZE_MAX ? asked : moe_spare_memory(s->model->file.held, at->used), error));
    moe_bank_layout(&s->bank, s->graphs, (size_t)s->params.threads, at);
    return MOE_OK;
}

/* Carve the session's memory and build the graphs in it. Until the memory has been allocated, only measure it. */
static moe_status moe_session_layout(moe_session *s, moe_error *error) {
    const moe_model *m = s->model;
    const size_t batch = (size_t)s->params.batch, beam = (size_t)s->params.beam, slots = s->n_slots,
                 max_source = (size_t)s->params.max_source, max_target = s->search.max_target;
    const size_t begin = (64 - (uintptr_t)s->block % 64) % 64;
    moe_layout block = { s->block ? s->block + begin : NULL, 0, 0 }, lent = { s->device_carried, 0, 0 }, *at = &block,
               *carried = s->api ? &lent : &block;
    moe_builder builder = { .layers = m->layers, .keep = s->keep, .carried = s->carried, .first = s->rows };
    char *arena = s->device_arena;
    moe_carried_layout(s, carried);
    s->slots = moe_carve(at, slots, sizeof *s->slots);
    for (size_t i = 0; i < slots; i++) {
        const size_t kept = i < batch ? beam : 1; /* hypotheses */
        moe_slot slot = { .state = i < batch ? i * beam : batch * beam + i - batch };
        slot.target = moe_carve(at, max_target, sizeof *slot.target);
        slot.draft = moe_carve(at, max_target, sizeof *slot.draft);
        if (!s->api) {
            slot.tokens = moe_carve(at, moe_most_tokens(&s->search, kept), sizeof *slot.tokens);
            slot.live = moe_carve(at, kept, sizeof *slot.live);
            slot.finished = moe_carve(at, kept, sizeof *slot.finished);
        }
        if (s->params.shortlist) moe_list_layout(s, i < batch, &slot.list, at);
        if (i < batch && s->search.max_constraints) {
            slot.constraints = moe_carve(at, s->search.max_constraints, sizeof *slot.constraints);
            slot.constraint_ids = moe_carve(at, max_target, sizeof *slot.constraint_ids);
        }
        if (at->base) s->slots[i] = slot;
    }
    s->tickets = moe_carve(at, slots, sizeof *s->tickets);
    s->waiting = moe_carve(at, s->n_waiting, sizeof *s->waiting);
    for (size_t i = 0; i < s->n_waiting; i++) {
        moe_waiting w = { .used = 0 };
        w.source = moe_carve(at, max_source, sizeof *w.source);
        w.hypotheses = moe_carve(at, beam, sizeof *w.hypotheses);
        w.words = moe_carve(at, moe_most_words(&s->search), sizeof *w.words);
        if (at->base) s->waiting[i] = w;
    }
    s->active = moe_carve(at, slots, sizeof *s->active);
    s->staged = moe_carve(at, s->encode_tokens, sizeof *s->staged);
    if (s->params.shortlist) s->listed = moe_carve(at, (size_t)m->vocabulary / 32 + 1, sizeof *s->listed);
    s->hypotheses = moe_carve(at, (size_t)s->search.nbest, sizeof *s->hypotheses);
    moe_frame_layout(s, at);
    if (at->overflow || carried->overflow)
        MOE_FAIL(ARGUMENT, "session", "these parameters need more memory than can be addressed");
    s->arena_bytes = 0;
    for (int g = 0; g < MOE_GRAPHS; g++) {
        builder.g = &s->graphs[g];
        builder.g->count = 0, builder.g->blocks = m->blocks;
        builder.predicts = s->predicts, builder.hidden = s->hidden;
        if (g == MOE_DECODER || (g == MOE_PREDICTOR && s->predicts)) moe_build_decoder(&builder, m, g == MOE_PREDICTOR);
        else if (g == MOE_ENCODER && m->n_encoder) moe_build_encoder(&builder, m);
        MOE_TRY(moe_graph_plan(builder.g, error));
        s->arena_bytes = moe_max(s->arena_bytes, builder.g->bytes); /* the graphs never run at the same time */
    }
    if (!s->api) arena = moe_carve(at, s->arena_bytes, 1);
    MOE_TRY(moe_experts_layout(s, at, error));
    for (int g = 0; arena && g < MOE_GRAPHS; g++) moe_graph_place(&s->graphs[g], arena);
    s->block_bytes = at->used + 64, s->carried_bytes = lent.used;
    return MOE_OK;
}

/* ---- Plan: resolve the parameters ---- */

/* Return the bytes of a row carried by layer i / MOE_CARRIES, or 0 if these rows are not carried `by`. */
static size_t moe_carried_row(const moe_session *s, size_t i, moe_carry by) {
    const moe_layer *layer = &s->model->layers[i / MOE_CARRIES];
    const moe_keep keep = moe_keep_of(layer, i % MOE_CARRIES, s->keep);
    return layer->type->carries[i % MOE_CARRIES].by == by ? moe_keep_bytes(&keep) : 0;
}

/* Return the bytes of a row carried by token or by state, including all layers. */
static size_t moe_carried_bytes(const moe_session *s, moe_carry by) {
    size_t bytes = 0;
    for (size_t i = 0; i < s->model->n_layers * MOE_CARRIES; i++) bytes += moe_carried_row(s, i, by);
    return bytes;
}

/* Return how many states to keep: enough for the prompts of a few tasks, little compared with the states in use. */
static size_t moe_most_kept(const moe_session *s) {
    const int some = !s->api && s->model->prompted && moe_model_carries(s->model, MOE_BY_STATE, 1);
    return some ? 1 + moe_divide_up(s->n_slots, 8) : 0;
}

/* Divide context_memory between kept states, which take up to a quarter, and pages. */
static moe_status moe_limit_pages(moe_session *s, moe_error *error) {
    const size_t bytes = MOE_PAGE * moe_carried_bytes(s, MOE_BY_TOKEN), state = moe_carried_bytes(s, MOE_BY_STATE);
    const uint64_t memory = (uint64_t)s->params.context_memory << 20;
    if (!bytes)
        MOE_FAIL(UNSUPPORTED, "context_memory", "context_memory must be 0: the model has no cached keys and values");
    if (s->n_kept && memory / 4 / state < s->n_kept) s->n_kept = (size_t)(memory / 4 / state);
    const uint64_t most = (memory - s->n_kept * state) / bytes;
    s->n_pages = moe_max(1, most < s->n_pages ? (size_t)most : s->n_pages);
    return MOE_OK;
}

/* Determine how many slots, pages and rows of each kind the session has, and copy the end tokens. */
static moe_status moe_settle_rows(moe_session *s, moe_error *error) {
    const size_t batch = (size_t)s->params.batch, beam = (size_t)s->params.beam,
                 max_source = (size_t)s->params.max_source;
    const size_t tokens = s->params.batch_tokens ? (size_t)s->params.batch_tokens : 64 * batch;
    const int bits = s->params.kv_bits;
    memcpy(s->search.ends, s->model->ends, sizeof s->search.ends);
    s->keep = bits == 32 ? MOE_TYPE_F32 : bits == 16 ? MOE_TYPE_F16 : MOE_TYPE_Q8;
    if (s->model->prompted) s->search.max_prompt = max_source - 1; /* a prompt's first token starts the target */
    s->search.max_target += s->search.max_prompt;
    s->n_slots = batch;
    s->rows = s->model->kind == MOE_MODEL_TRANSLATION ? batch * beam : batch;
    if (s->params.rerank > 0.0f && beam > 1) {
        s->search.nbest = s->params.beam;
        s->n_waiting = 2 * batch;
        /* Each question needs one row. There are enough slots to fill a step or to hold all questions of a sentence. */
        s->n_slots += moe_max(beam, 4 * batch);
        s->rows += moe_max(beam, 4 * batch);
    }
    s->rows += s->search.ahead;
    /* Every run of an encoder reads nearly all streamed experts, so runs should be large. */
    s->encode_tokens = max_source + moe_min(s->api || s->bank.file ? 4096 : 1024, 32 * s->n_slots);
    /* Every hypothesis may reach the length limit. Memory that no sentence needs is never touched. */
    if (moe_model_carries(s->model, MOE_BY_TOKEN, 0)) s->token_rows = moe_most_tokens(&s->search, beam) + 1;
    if (moe_round_up(s->token_rows, MOE_PAGE) > INT32_MAX / s->n_slots)
        MOE_FAIL(ARGUMENT, "batch",
                 "batch %d, beam %d and max_target %d are too large: their product must be below 2^31", s->params.batch,
                 s->params.beam, s->params.max_target);
    s->carried_rows[MOE_BY_PARENT] = s->rows + (s->model->decoder_from_encoder ? s->n_slots : 0);
    /* A request is pulled before its length is known, so capacity for the longest one is always free. */
    s->carried_rows[MOE_BY_SOURCE] = max_source + tokens + 32 * (s->n_slots - batch);
    s->carried_rows[MOE_BY_TOKEN] = s->token_rows * s->n_slots;
    /* Prompts rarely exceed limit.source. A longer one uses pages of other sentences, which wait. */
    const size_t stated = (size_t)moe_stated_source(s->model) - 1, prompt = s->search.max_prompt,
                 longer = s->params.context_memory ? 0 : moe_min(s->token_rows, prompt - moe_min(prompt, stated));
    if (!s->api) s->n_pages = moe_divide_up(s->token_rows - longer, MOE_PAGE) * s->n_slots;
    s->n_kept = moe_most_kept(s);
    if (s->params.context_memory) MOE_TRY(moe_limit_pages(s, error));
    s->carried_rows[MOE_BY_STATE] = batch * beam + s->n_slots - batch + s->n_kept;
    s->carried_rows[MOE_BY_GUESS] = s->api ? 0 : moe_min(MOE_GUESSES, s->search.ahead);
    if (s->n_pages) s->carried_rows[MOE_BY_TOKEN] = s->n_pages * MOE_PAGE;
    return MOE_OK;
}

/* Return the search settings of a session, except those that moe_settle_rows sets. */
static moe_search moe_search_of(const moe_model *m, const moe_session_params *p) {
    /* Given tokens share a run unless a product reads the previous state, or coverage is added up per token. */
    const int together =
        m->kind == MOE_MODEL_TRANSLATION && !moe_model_carries(m, MOE_BY_PARENT, 0) && p->coverage_penalty == 0.0f;
    const int penalised = p->repetition_penalty != 0.0f || p->stop_loops;
    return (moe_search){ .beam = p->beam,
                         .nbest = p->nbest,
                         .alpha = p->length_penalty,
                         .constant = p->length_constant,
                         .beta = p->coverage_penalty,
                         .prune = p->prune,
                         .rules = moe_rule_sets[p->rules],
                         .eos = m->eos,
                         .n_ends = (int)m->n_ends,
                         .min_target = (size_t)p->min_target,
                         .max_target = (size_t)p->max_target,
                         .max_constraints = (size_t)p->max_constraints,
                         .aligns = p->max_constraints && m->shows,
                         .ahead = together ? (size_t)p->piece - 1 : 0,
                         .listed = p->shortlist ? (size_t)m->vocabulary : 0,
                         .used_words =
                             penalised && m->kind == MOE_MODEL_TRANSLATION ? moe_bit_words((size_t)m->vocabulary) : 0,
                         .stops_loops = p->stop_loops,
                         .samples = p->sample && m->kind == MOE_MODEL_TRANSLATION,
                         .early_stopping = p->early_stopping,
                         .force_end = moe_meta_number(m, "decode.force_end", 0, 1, 0) != 0 };
}

static moe_status moe_check_wire(const moe_wire *w, moe_error *error) {
    if (w->ranks >= 1 && w->ranks <= MOE_MAX_RANKS && w->rank >= 0 && w->rank < w->ranks && w->agree && w->counts &&
        w->swap)
        return MOE_OK;
    MOE_FAIL(ARGUMENT, "wire", "all three functions must be set, and rank must be below ranks, at most %d",
             MOE_MAX_RANKS);
}

/* Create a session, but do not allocate its block of memory. *out must be freed even after a failure. */
static moe_status moe_session_plan(const moe_model *m, const moe_session_params *params, moe_session **out,
                                   moe_error *error) {
    const size_t nodes = 64 + 24 * m->n_layers; /* more than any graph needs */
    const size_t node_bytes = nodes * sizeof(moe_node), carried_bytes = m->n_layers * sizeof *(*out)->carried,
                 bytes = sizeof **out + MOE_GRAPHS * node_bytes + carried_bytes;
    moe_session *s = *out = moe_allocate_zeroed(&m->allocator, bytes);
    if (!s) MOE_FAIL(MEMORY, "session", "out of memory for a session");
    moe_session_params *p = &s->params;
    int gating = 0;
    s->model = m;
    s->allocator = m->allocator;
    s->bytes = bytes;
    s->right = s->foreseen = 0.75f;
    s->carried = (void *)((char *)(s + 1) + MOE_GRAPHS * node_bytes);
    atomic_fetch_add(&m->self->holders, 1);
    MOE_TRY(moe_take_params(m, params, p, error));
    MOE_TRY(moe_check_params(m, p, error));
    MOE_TRY(moe_choose_kernels(p->isa ? p->isa : getenv("MOE_ISA"), &s->kernels, error));
    MOE_TRY(moe_check_gates(m, p, &gating, error));
    MOE_TRY(moe_choose_device(s, p->device ? p->device : getenv("MOE_DEVICE"), error));
    if (s->api && m->prompted && p->max_source == moe_default_source(m, p->max_target)) /* no pages on a device */
        p->max_source = moe_stated_source(m);
    s->search = moe_search_of(m, p);
    if (m->file.fd >= 0) s->bank.file = &m->file;
    else if (p->expert_memory)
        MOE_FAIL(UNSUPPORTED, "expert_memory",
                 "expert_memory must be 0 unless the model was opened with moe_model_params.stream");
    if (p->wire && s->bank.file) MOE_FAIL(UNSUPPORTED, "wire", "a wire is not supported with moe_model_params.stream");
    if (p->wire) MOE_TRY(moe_check_wire(p->wire, error));
    if (p->wire) s->ranks.wire = *p->wire;
    MOE_TRY(moe_settle_rows(s, error));
    for (int g = 0; g < MOE_GRAPHS; g++)
        s->graphs[g] = (moe_graph){ .nodes = (moe_node *)(void *)(s + 1) + (size_t)g * nodes,
                                    .capacity = nodes,
                                    .rows = g == MOE_ENCODER ? s->encode_tokens : s->rows,
                                    .threads = (size_t)p->threads,
                                    .sentences = s->n_slots,
                                    .max_source = (size_t)p->max_source,
                                    .max_target = s->search.max_target,
                                    .penalised = g != MOE_PREDICTOR && s->search.used_words,
                                    .samples = g != MOE_PREDICTOR && s->search.samples,
                                    .traced = p->trace != NULL,
                                    .changed = p->next_token != NULL,
                                    .routed = p->routing != NULL,
                                    .gating = gating,
                                    .noise = p->noise,
                                    .noise_seed = p->noise_seed,
                                    .on_device = s->api != NULL,
                                    .ranks = p->wire ? &s->ranks : NULL };
    s->predicts = m->n_predictor && s->search.ahead && p->beam == 1 && !s->api && !p->wire && !p->trace && !p->noise &&
                  !p->next_token && !s->bank.file;
    s->graphs[MOE_PREDICTOR].top = 1, s->pays = 1;
    s->graphs[MOE_DECODER].top =
        moe_min(m->kind == MOE_MODEL_CLASSIFIER ? (size_t)p->nbest : (size_t)p->beam + m->n_ends,
                (size_t)m->vocabulary);
    return MOE_OK;
}

MOE_PRINTF(2, 3)
static void moe_log(const moe_session *s, const char *format, ...) {
    char message[256];
    va_list args;
    if (!s->params.log) return;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    s->params.log(s->params.log_user, message);
}

/* ---- Place: measure and allocate the memory, and carve it ---- */

static moe_status moe_session_place(moe_session *s, moe_error *error) {
    const moe_device_params device = { s->allocator, s->device_index, s->params.device_memory, s->params.log,
                                       s->params.log_user };
    MOE_TRY(moe_session_layout(s, error));
    s->block = s->allocator.allocate(s->allocator.user, s->block_bytes); /* not zeroed: pages remain untouched */
    if (!s->block)
        MOE_FAIL(MEMORY, "session", "out of memory: the session needs %zu MB; reduce batch, beam or max_source%s",
                 s->block_bytes >> 20, s->bank.file ? ", or expert_memory" : "");
    if (s->api) {
        MOE_TRY(s->api->open(&device, &s->device, error));
        MOE_TRY(s->api->allocate(s->device, s->carried_bytes, "keys, values and states", &s->device_carried, error));
        MOE_TRY(s->api->allocate(s->device, s->arena_bytes, "activations", &s->device_arena, error));
    }
    return moe_session_layout(s, error);
}

/* ---- Bind: weights, threads ---- */

/* Verify a tensor. Expert slabs are verified on first use, or now if a device is used: all of them are uploaded. */
static void moe_verify_task(void *user, size_t task, size_t thread) {
    moe_session *s = user;
    const moe_tensor_info *t = &s->model->file.tensors[task];
    (void)thread;
    if (s->api || !t->slabs) moe_check_tensor(&s->model->file, t, &s->damage, NULL);
}

/* Return 1 if the carried rows of a prompt depend only on its tokens, and no other outputs of its rows are needed. */
static int moe_may_share(const moe_session *s) {
    const moe_graph *g = &s->graphs[MOE_DECODER];
    return s->n_pages && s->model->prompted && !moe_model_carries(s->model, MOE_BY_PARENT, 0) &&
           !moe_model_carries(s->model, MOE_BY_PARENT, 1) &&
           (s->n_kept || !moe_model_carries(s->model, MOE_BY_STATE, 1)) && !g->noise && !g->mixes && !g->routed &&
           !g->traced && !s->params.attention;
}

/* Upload the weights, start the threads, and verify tensors that must be verified now. */
static moe_status moe_session_bind(moe_session *s, moe_error *error) {
    const moe_file *f = &s->model->file;
    const moe_search *search = s->model->kind == MOE_MODEL_CLASSIFIER ? NULL : &s->search;
    if (s->api) MOE_TRY(s->api->bind(s->device, s->graphs, search, error));
    MOE_TRY(moe_pool_start(&s->pool, s->api ? 1 : (size_t)s->params.threads, error));
    if (s->bank.file) MOE_TRY(moe_bank_open(&s->bank, error));
    MOE_TRY(moe_check_unchanged(&s->model->file, error));
    if (f->checked) moe_pool_run(&s->pool, f->n_tensors, moe_verify_task, s);
    MOE_TRY(moe_report_damage(f, &s->damage, error));
    for (int g = 0; g < MOE_GRAPHS; g++) {
        s->graphs[g].stats = &s->stats, s->graphs[g].damage = &s->damage;
        if (s->bank.file) s->graphs[g].bank = &s->bank;
    }
    s->shares = moe_may_share(s);
    s->stats.bytes = s->block_bytes + s->bytes;
    s->stats.isa = s->kernels->name;
    s->stats.device = s->api ? s->api->describe(s->device, &s->stats.device_bytes) : "cpu";
    if (s->api)
        moe_log(s, "%s, %d sentences x beam %d, %llu MB of device memory", s->stats.device, s->params.batch,
                s->params.beam, (unsigned long long)(s->stats.device_bytes >> 20));
    else
        moe_log(s, "%s kernels, %d threads, %d sentences x beam %d, %llu KB of memory", s->kernels->name,
                s->params.threads, s->params.batch, s->params.beam, (unsigned long long)(s->stats.bytes >> 10));
    if (s->bank.file)
        moe_log(s, "%zu of %zu experts fit %zu MB, the others are read %s the page cache", s->bank.slots,
                s->bank.experts, (s->bank.slots * s->bank.slot_bytes) >> 20,
                f->direct ? "around" : "through (direct I/O is not supported)");
    return MOE_OK;
}

/* Begin a call that uses the session until moe_session_leave. */
static moe_status moe_session_enter(moe_session *s, moe_error *error) {
    if (!atomic_exchange(&s->busy, 1)) return MOE_OK;
    MOE_FAIL(ARGUMENT, "session", "the session is in use by another call; create one session per thread");
}

static moe_status moe_check_device(const moe_session *s, moe_error *error) {
    const char *what = s->graphs[MOE_DECODER].routed                             ? "routing"
                       : s->params.context_memory                                ? "context_memory"
                       : s->params.attention                                     ? "attention"
                       : s->params.next_token                                    ? "next_token"
                       : s->bank.file                                            ? "a streamed model"
                       : s->params.wire                                          ? "a wire between ranks"
                       : s->graphs[MOE_DECODER].noise                            ? "noise"
                       : moe_model_carries(s->model, MOE_BY_STATE, 1)            ? "a model with Gated DeltaNet"
                       : s->graphs[MOE_DECODER].gating == 1 + MOE_GATE_BATCHWISE ? "batchwise gating"
                                                                                 : NULL;
    return what ? moe_fail(error, MOE_ERROR_UNSUPPORTED, "device", "%s is only supported on device cpu", what) : MOE_OK;
}

/* Create a session that is not yet known to other ranks. */
static moe_status moe_session_make(const moe_model *model, const moe_session_params *params, moe_session **out,
                                   moe_error *error) {
    moe_session *s = NULL;
    moe_session_params on_cpu;
    moe_error why = { MOE_OK, "", "" };
    moe_status status = moe_session_plan(model, params, &s, error);
    const int on_device = status == MOE_OK && s->api, tries = on_device && s->device_automatic;
    moe_error *failure = tries ? &why : error; /* if the processor is the fallback, the error is only logged */
    if (on_device) status = moe_check_device(s, failure);
    if (status == MOE_OK && tries && s->api->count(failure) < 1) status = MOE_ERROR_UNSUPPORTED;
    if (status == MOE_OK) status = moe_session_place(s, failure);
    if (status == MOE_OK) status = moe_session_bind(s, failure);
    if (status == MOE_OK) *out = s;
    if (status == MOE_OK) return MOE_OK;
    if (tries) {
        moe_log(s, "using the processor instead of %s: %s", s->api->name, why.message);
        on_cpu = s->params;
        on_cpu.size = sizeof on_cpu;
        on_cpu.device = "cpu";
    }
    moe_session_free(s);
    return tries ? moe_session_make(model, &on_cpu, out, error) : status;
}

void moe_session_free(moe_session *s) {
    if (!s) return;
    const moe_allocator a = s->allocator;
    if (s->api) s->api->close(s->device);
    moe_pool_free(&s->pool, s->pool.count);
    moe_bank_close(&s->bank);
    moe_release(&a, s->block, s->block_bytes);
    moe_model_close(s->model->self);
    moe_release(&a, s, s->bytes);
}

moe_status moe_session_bytes(const moe_model *model, const moe_session_params *params, size_t *out, moe_error *error) {
    moe_session *s = NULL;
    moe_status status = moe_session_plan(model, params, &s, error);
    if (status == MOE_OK) status = moe_session_layout(s, error);
    if (status == MOE_OK) *out = s->block_bytes + s->bytes;
    moe_session_free(s);
    return status;
}

size_t moe_session_max_source(const moe_session *s) { return (size_t)s->params.max_source; }

const moe_stat *moe_stat_at(size_t i) {
    enum { SUM, LEVEL, TEXT };
#define MOE_STAT_ROW(kind, name, meaning) { #name, meaning, offsetof(moe_stats, name), (kind) == SUM, (kind) == TEXT },
    static const moe_stat rows[] = { MOE_STATS(MOE_STAT_ROW) };
#undef MOE_STAT_ROW
    return i < MOE_COUNT(rows) ? &rows[i] : NULL;
}

void moe_session_stats_sized(const moe_session *s, moe_stats *out, size_t size) {
    moe_stats stats = s->stats;
    if (s->api) s->api->stats(s->device, &stats);
    if (s->bank.file) moe_bank_stats(&s->bank, &stats);
    moe_give_struct(out, size, &stats, sizeof stats);
}

/* ==== 38. Sessions: running ===================================================================================
 * The runs of a session's graphs and the protocol of ranks: which sessions take part, which graph runs next, when a
 * call ends. Invariant: all ranks run the same graphs in the same order, and a failure of one is reported by all. */

/* ---- Run ---- */

/* If moe_session_cancel has set the flag, clear it and fail. */
static moe_status moe_check_cancelled(moe_session *s, moe_error *error) {
    if (!moe_pool_cancelled(&s->pool)) return MOE_OK;
    atomic_store(&s->pool.cancelled, 0);
    MOE_FAIL(CANCELLED, "session", "cancelled");
}

static moe_status moe_run_frame(moe_session *s, int which, const moe_frame *frame, moe_error *error) {
    const moe_run run = { s->kernels, &s->pool, &s->graphs[which], frame, 0 };
    if (s->api) return s->api->run(s->device, which, run.frame, s->params.trace, s->params.trace_user, error);
    moe_graph_run(&run, s->params.trace, s->params.trace_user);
    if (s->bank.file) MOE_TRY(moe_bank_status(&s->bank, error));
    MOE_TRY(moe_check_unchanged(&s->model->file, error));
    MOE_TRY(moe_report_damage(&s->model->file, &s->damage, error));
    return moe_check_cancelled(s, error);
}

/* ---- The next token ---- */

/* Write the tokens of a hypothesis up to `last` to out, excluding prompt and tag. Returns their number. */
static size_t moe_write_tokens(const moe_slot *slot, int32_t last, size_t position, int32_t *out) {
    const size_t before = slot->task.prompt + slot->shown;
    for (size_t i = position; i-- > before; last = slot->tokens[last].parent) out[i - before] = slot->tokens[last].id;
    return position - before;
}

static int moe_bans_all(const float *logits, size_t n) {
    while (n && logits[n - 1] == -INFINITY) n--;
    return !n;
}

/* Let the callback change the logits of all rows that choose a token in this step, request by request. While tokens are
 * given, the only hypothesis has several rows, of which only the last can choose a token. */
static void moe_change_logits(void *user, float *logits, size_t stride) {
    moe_session *s = user;
    for (size_t at = 0; at < (size_t)s->params.batch; at++) {
        moe_slot *slot = &s->slots[at];
        const size_t position = slot->steps + slot->ahead;
        moe_next_token next = { .user = s->tickets[at].request.user,
                                .vocabulary = (size_t)s->model->vocabulary,
                                .stride = stride,
                                .ids = s->next_of };
        if (!slot->active || slot->waits || slot->task.scoring || position < slot->task.n_target) continue;
        for (size_t h = 0; h < slot->n_live; h++) {
            const moe_live *live = &slot->live[h];
            int32_t *ids = s->next_ids + next.rows * s->search.max_target;
            if (live->ended) continue;
            if (!next.rows) next.logits = logits + (live->row + slot->ahead) * stride;
            s->next_of[next.rows++] = ids;
            /* given tokens are stored in order */
            next.n_ids = moe_write_tokens(slot, slot->ahead ? (int32_t)position - 1 : live->last, position, ids);
        }
        if (next.rows) slot->stops = s->params.next_token(s->params.next_token_user, &next) != 0;
        for (size_t h = 0, row = 0; h < slot->n_live && next.rows; h++)
            if (!slot->live[h].ended) slot->live[h].dead = moe_bans_all(next.logits + row++ * stride, next.vocabulary);
    }
}

/* Turn the hypotheses of a slot into results without their next token, as at the length limit. `coverage` has the
 * values before this step. Returns 1. */
static int moe_stop_slot(const moe_search *s, moe_slot *slot, size_t at, const moe_beam *b, float *coverage) {
    moe_beam before = *b;
    for (; slot->ahead && !slot->broken; slot->ahead--, slot->live[0].row++) moe_slot_step(s, slot, at, b, NULL);
    before.coverage = slot->steps ? coverage : NULL;
    for (const moe_live *live = slot->live; live < slot->live + slot->n_live && !slot->broken; live++)
        if (s->rules.stay) moe_insert(s, slot->task.beam, slot->finished, &slot->n_finished, live);
        else moe_add_finished(s, slot, &before, *live, slot->steps ? (size_t)b->parents[live->row] : 0);
    slot->active = 0;
    return 1;
}

/* ---- Ranks ---- */

/* Agree on the next graph: the first that any rank wants to run. If ranks have failed, all return the error of one. */
static moe_status moe_agree(moe_ranks *r, int *which, moe_status status, moe_error *error) {
    enum { FAILED = 65536, WORDS = sizeof(moe_error) / sizeof(uint32_t) };
    int64_t wanted[] = { MOE_GRAPHS - *which, status ? (int64_t)status * FAILED + r->wire.rank : 0 }, text[WORDS];
    uint32_t words[WORDS];
    moe_error failure;
    MOE_WIRE(r, agree, wanted, 2);
    *which = MOE_GRAPHS - (int)wanted[0];
    const int failed = (int)(wanted[1] % FAILED);
    if (!r->status && !wanted[1]) return MOE_OK;
    memcpy(words, error, sizeof words);
    for (size_t i = 0; i < WORDS; i++) text[i] = failed == r->wire.rank ? words[i] : 0;
    r->reported = 1;
    if (MOE_WIRE(r, agree, text, WORDS))
        return moe_fail(error, r->status, "wire", "the wire between ranks failed: %s", r->error.message);
    for (size_t i = 0; i < WORDS; i++) words[i] = (uint32_t)text[i];
    memcpy(&failure, words, sizeof failure);
    return moe_fail(error, (moe_status)(wanted[1] / FAILED), failure.where, "rank %d: %s", failed, failure.message);
}

/* Compute a checksum of everything that the exchange of experts depends on, which must be equal on all ranks. */
static moe_status moe_ranks_shape(const moe_session *s, uint32_t *shape, moe_error *error) {
    *shape = (uint32_t)s->ranks.wire.ranks;
    MOE_FOR_EXPERTS (g, t, s->graphs) {
        const uint64_t row = moe_max(t->work.experts.input_bytes, t->cols * sizeof(float)),
                       pairs = moe_expert_pairs(&s->graphs[g], t->src[1]) * (uint64_t)s->ranks.wire.ranks,
                       numbers[] = { row, pairs, t->experts->count };
        if (pairs * row > INT32_MAX)
            MOE_FAIL(ARGUMENT, "wire", "%s exchanges more than 2 GB; reduce the batch", t->name);
        *shape = moe_crc32(*shape, numbers, sizeof numbers);
        if (t->work.experts.place) *shape = moe_crc32(*shape, t->work.experts.place, 4 * t->experts->count);
    }
    return MOE_OK;
}

/* Version of the messages between ranks. In all versions, the ranks first compare a single number. */
enum { MOE_WIRE_PROTOCOL = 2 };
#ifndef MOE_SOURCE
#define MOE_SOURCE 0 /* checksum of moe.c and moe.h, set by the Makefile */
#endif

/* Return a checksum of everything that ranks must share to compute the same bytes as one process: protocol, source, and
 * compiled arithmetic, which differs only with options such as -ffast-math. */
static uint32_t moe_identity(void) {
    const uint32_t numbers[] = { MOE_WIRE_PROTOCOL, MOE_VERSION_NUMBER, MOE_SOURCE };
    float x[99], y[99];
    for (int i = 0; i < 99; i++) x[i] = (float)(i * 37 % 100 - 50) / 7.0f;
    moe_kernels_portable.unary(MOE_UNARY_GELU, x, 99, y);
    y[0] = moe_kernels_portable.dot(x, y, 99) + moe_kernels_portable.exp_sum(x, 99, 8, NULL);
    return moe_crc32(moe_crc32(0, numbers, sizeof numbers), y, sizeof y);
}

/* Check that 32-bit numbers are equal on all ranks. If any differ, fails with the message of the first such number. */
static moe_status moe_ranks_alike(moe_ranks *r, const uint32_t *own, size_t n, const char *const *words,
                                  moe_error *error) {
    int64_t values[4];
    for (size_t i = 0; i < n; i++) values[2 * i] = own[i], values[2 * i + 1] = -(int64_t)own[i];
    if (MOE_WIRE(r, agree, values, 2 * n)) return moe_agree(r, &(int){ MOE_GRAPHS }, MOE_OK, error);
    for (size_t i = 0; i < n; i++)
        if (values[2 * i] != -values[2 * i + 1]) MOE_FAIL(ARGUMENT, "wire", "%s", words[i]);
    return MOE_OK;
}

/* Join the sessions of all ranks. Fails unless all were created with the same build, file and shape. */
static moe_status moe_join_ranks(moe_ranks *r, const moe_session *s, moe_status status, moe_error *error) {
    static const char *const words[] = { "the ranks run different builds of moe: use the same build",
                                         "the ranks have different model files: use the same file",
                                         "the ranks' sessions differ in batch, beam, gating or longest source" };
    uint32_t identity = moe_identity(), own[2] = { 0 };
    MOE_TRY(moe_ranks_alike(r, &identity, 1, words, error));
    if (!status) status = moe_ranks_shape(s, &own[1], error);
    MOE_TRY(moe_agree(r, &(int){ MOE_GRAPHS }, status, error));
    memcpy(&own[0], s->model->file.header + offsetof(moe_header, checksum), sizeof own[0]);
    return moe_ranks_alike(r, own, 2, words + 1, error);
}

/* Run each graph that the ranks agree on until `which` has run or, for MOE_GRAPHS, until no rank wants to run a graph.
 * This rank has no rows in graphs that it does not want. After each run all ranks learn whether one has failed. */
static moe_status moe_run_ranks(moe_session *s, int which, moe_status status, moe_error *error) {
    const moe_frame none = { .rows = 0 };
    for (int now = which;; now = which) {
        if (!status) status = moe_check_unchanged(&s->model->file, error);
        MOE_TRY(moe_agree(&s->ranks, &now, status, error));
        if (now == MOE_GRAPHS) return MOE_OK;
        status = moe_run_frame(s, now, now == which ? &s->frames[which] : &none, error);
        MOE_TRY(moe_agree(&s->ranks, &(int){ now }, status, error));
        if (now == which) return MOE_OK;
    }
}

static moe_status moe_session_run(moe_session *s, int which, moe_error *error) {
    if (s->params.wire) return moe_run_ranks(s, which, MOE_OK, error);
    MOE_TRY(moe_check_unchanged(&s->model->file, error));
    return moe_run_frame(s, which, &s->frames[which], error);
}

/* End a call, on all ranks together. If a rank has failed, all return its error, which they may already know. */
static moe_status moe_session_leave(moe_session *s, moe_status status, moe_error *why, moe_error *error) {
    if (s->params.wire && !s->ranks.reported) status = moe_run_ranks(s, MOE_GRAPHS, status, why);
    s->ranks.reported = 0;
    atomic_store(&s->busy, 0);
    if (status && error) *error = *why;
    return status;
}

moe_status moe_session_new(const moe_model *model, const moe_session_params *params, moe_session **out,
                           moe_error *error) {
    const int has = params && moe_param_in(params, offsetof(moe_session_params, wire));
    moe_ranks ranks = { .status = MOE_OK };
    moe_error why = { MOE_OK, "", "" };
    moe_session *s = NULL;
    if (!has || !params->wire) return moe_session_make(model, params, out, error);
    MOE_TRY(moe_check_wire(params->wire, error));
    ranks.wire = *params->wire;
    const moe_status made = moe_session_make(model, params, &s, &why), status = moe_join_ranks(&ranks, s, made, &why);
    if (status && error) *error = why;
    if (status) moe_session_free(s);
    else *out = s;
    return status;
}

/* ==== 39. Drafts ==============================================================================================
 * How many tokens of a draft to compute in a run. Invariant: results do not depend on this number. */

/* Return 1 if guesses can be computed for a sentence: it has one hypothesis, and no callback reads the rows. */
static int moe_follows_drafts(const moe_session *s, const moe_slot *slot) {
    const moe_session_params *p = &s->params;
    return s->search.ahead && slot->task.beam == 1 && !slot->task.scoring && !slot->task.n_constraints && !s->api &&
           !p->next_token && !p->routing && !p->attention && !s->search.rules.stay;
}

/* Return the seconds of a run with `rows` rows, and in *more those of one more row: a line through recent runs that, as
 * long as these hardly differ, assumes that a row costs as much as reading an eighth of the weights. */
static double moe_pace_of(const moe_pace *p, double rows, double *more) {
    const double r = p->n > 0 ? p->r / p->n : rows, t = p->n > 0 ? p->t / p->n : 1, n = p->n > 0 ? p->n : 1;
    const double prior = t / (8 + r), vary = p->rr / n - r * r, slope = (p->rt / n - r * t + prior) / (vary + 1);
    if (p->n <= 0) *more = prior;
    else *more = slope > 0 ? slope : 0;
    return t + *more * (rows - r) > 0 ? t + *more * (rows - r) : t;
}

/* Add a run to the sums, in which older runs count less. */
static void moe_pace_add(moe_pace *p, double rows, double seconds) {
    const double kept = 0.97;
    p->n = kept * p->n + 1, p->r = kept * p->r + rows, p->t = kept * p->t + seconds;
    p->rr = kept * p->rr + rows * rows, p->rt = kept * p->rt + rows * seconds;
}

/* Return how many tokens of the draft to compute in this run: as many as raise the tokens per second, with a margin of
 * a quarter because times vary. */
static size_t moe_guesses(const moe_session *s, const moe_slot *slot, double cost, double seconds) {
    const size_t left = slot->task.limit - moe_min(slot->task.limit, slot->steps + 1);
    const size_t most = moe_min(left, slot->n_draft - slot->expected);
    double likely = (double)slot->right, tokens = 1;
    size_t n = 0;
    if (slot->steps < slot->task.n_target) return 0;
    for (; n < most && likely * seconds > 1.25 * cost * tokens; n++) {
        if (moe_is_end(&s->search, slot->draft[slot->expected + n])) break;
        tokens += likely, seconds += cost, likely *= (double)slot->right;
    }
    return n;
}

/* Let the text of a request or, if that has been right more often, the predictor be the draft of a sentence. */
static void moe_choose_draft(moe_session *s, moe_slot *slot, const moe_request *q) {
    slot->n_draft = moe_follows_drafts(s, slot) && q->draft ? moe_min(q->n_draft, s->search.max_target) : 0;
    slot->right = s->right;
    slot->asks = s->predicts && moe_follows_drafts(s, slot) && !s->graphs[MOE_DECODER].mixes;
    if (slot->asks && !s->pays) slot->asks = 0, s->foreseen += (0.75f - s->foreseen) / 32; /* try again later */
    if (slot->n_draft && s->right >= s->foreseen) slot->asks = 0;
    if (slot->asks) slot->n_draft = 0, slot->right = s->foreseen;
    if (slot->n_draft) memcpy(slot->draft, q->draft, slot->n_draft * sizeof *slot->draft);
}

/* Prepare the predictor's run on the decoder's rows [row, row + n), those of a slot: each needs the token after its
 * own. If guesses were wrong, the last rows are of no use, and later ones replace them. Returns 1 if the slot asks. */
static int moe_ask_predictor(moe_session *s, moe_slot *slot, size_t row, size_t n) {
    const moe_frame *d = &s->frames[MOE_DECODER];
    for (size_t i = row; i < row + n; i++) {
        if ((size_t)d->positions[i] < slot->n_tokens) d->ids[i] = slot->tokens[d->positions[i]].id;
        d->beam.want[i] = MOE_NO_LOGITS;
    }
    if (slot->asks && slot->n_draft && n) s->foreseen += ((float)(d->ids[row] == slot->draft[0]) - s->foreseen) / 32;
    if (slot->asks && !s->pays) slot->asks = 0, slot->n_draft = slot->expected = 0, s->foreseen /= 2;
    if (slot->active && slot->asks) d->beam.want[slot->live[0].row] = -1;
    return slot->active && slot->asks;
}

/* Let the predictor's best token be the draft of each slot that asks for one. */
static moe_status moe_predict(moe_session *s, moe_error *error) {
    moe_frame *f = &s->frames[MOE_PREDICTOR];
    const uint64_t begin = moe_nanoseconds();
    f->rows = s->frames[MOE_DECODER].rows;
    MOE_TRY(moe_session_run(s, MOE_PREDICTOR, error));
    if (!s->pace.mixed) moe_pace_add(&s->predicting, (double)f->rows, (double)(moe_nanoseconds() - begin) * 1e-9);
    for (moe_slot *slot = s->slots; slot < s->slots + s->n_slots; slot++)
        if (slot->active && slot->asks && !slot->waits)
            slot->draft[0] = f->beam.top_ids[slot->live[0].row], slot->n_draft = 1, slot->expected = 0;
    return MOE_OK;
}

/* ==== 40. Reranking ===========================================================================================
 * Reranking of translations before moe_translate delivers them. Reranking needs the log-probability of the source given
 * each hypothesis; a question is a request for one such log-probability. The engine pulls questions like the caller's
 * requests, and this section reads the answers. Invariant: the outcome depends only on the sentence. Questions start
 * before new sentences, so memory for two batches of sentences always suffices. */

/* Return 1 if `id` is valid and a translation may contain it: suppressed tokens are never generated, but may be
 * given. */
static int moe_can_generate(const moe_model *m, int32_t id) {
    for (size_t i = m->n_suppressed; i < m->n_never; i++)
        if (m->never[i] == id) return 0;
    return id >= 0 && id < m->vocabulary && id != m->eos;
}

/* Use entry `w` for a request, which may be invalid. Returns NULL if the request is not reranked or its source
 * cannot be a target. */
static moe_waiting *moe_rerank_begin(const moe_session *s, moe_waiting *w, const moe_request *q) {
    if (!s->n_waiting || (q->target ? !q->prefix : !q->n_source) || q->beam == 1) return NULL;
    if (q->n_source > (size_t)s->params.max_source) return NULL;
    if (q->n_source + 1 + (size_t)(s->model->forced_tag != 0) > s->search.max_target) return NULL;
    for (size_t i = 0; i < q->n_source; i++)
        if (!moe_can_generate(s->model, q->source[i])) return NULL;
    w->request = *q;
    w->request.source = memcpy(w->source, q->source, q->n_source * sizeof *w->source);
    w->used = 1;
    w->status = MOE_OK;
    w->arrival = 0;
    return w;
}

/* Read the hypotheses of a sentence's result; their arrays are in `words`. Returns the words after the result. */
static const int32_t *moe_read_result(const moe_session *s, const int32_t *words, moe_hypothesis *out) {
    const size_t n = (size_t)words[1], shown = s->slots[words[0]].shown;
    words += 2;
    for (moe_hypothesis *h = out; h < out + n; h++) {
        const size_t n_ids = (size_t)words[0];
        const float *numbers = (const float *)(const void *)words;
        const int32_t *ids = words + MOE_HEAD_WORDS, *sources = ids + 2 * n_ids + words[1];
        *h = (moe_hypothesis){ .ids = ids + shown,
                               .token_logprobs = numbers + MOE_HEAD_WORDS + n_ids + shown,
                               .sources = s->search.aligns ? sources + shown : NULL,
                               .n_ids = n_ids - shown,
                               .logprob = numbers[2],
                               .score = numbers[3],
                               .finished = words[1],
                               .looped = words[4] };
        words = sources + (s->search.aligns ? n_ids : 0);
    }
    return words;
}

/* Store a translation for reranking. Returns 0 if a hypothesis is too long to be a source. */
static int moe_rerank_keep(moe_session *s, moe_waiting *w, const int32_t *words) {
    const int32_t *end = moe_read_result(s, words, w->hypotheses);
    w->n = (size_t)words[1];
    for (size_t h = 0; h < w->n; h++)
        if (w->hypotheses[h].n_ids + moe_source_extra(s->model) > (size_t)s->params.max_source) return 0;
    memcpy(w->words, words, (size_t)(end - words) * sizeof *words);
    moe_read_result(s, w->words, w->hypotheses);
    w->asked = w->answered = w->language = 0;
    w->arrival = ++s->arrivals;
    return 1;
}

/* Return the number of questions in this round. Questions ask for the source's probability in every language given the
 * best hypothesis or, in a known language, given each hypothesis that can still win. Scores only decrease, so
 * hypotheses below the best reranked one cannot win. If the caller wants several results, each needs a score. */
static size_t moe_rerank_questions(const moe_session *s, const moe_waiting *w) {
    size_t n = 1;
    if (w->request.source_tag < 0) return s->model->tags->count;
    if (!w->answered) return 1;
    if (s->params.nbest > 1) return w->n;
    while (n < w->n && w->hypotheses[n].finished == w->hypotheses[0].finished && w->hypotheses[n].score >= w->best) n++;
    return moe_max(n, w->asked); /* the best score may have risen since the questions were asked */
}

/* Set `ticket` to the next question of the oldest sentence that has one. */
static int moe_rerank_ask(moe_session *s, moe_ticket *ticket) {
    moe_waiting *w = NULL;
    for (moe_waiting *at = s->waiting; at < s->waiting + s->n_waiting; at++) {
        if (!at->used || !at->arrival || at->asked == moe_rerank_questions(s, at)) continue;
        if (!w || at->arrival < w->arrival) w = at;
    }
    if (!w) return MOE_PULL_LATER;
    ticket->waiting = w;
    ticket->question = w->asked++;
    const int32_t tag = w->request.source_tag;
    const moe_hypothesis *h = &w->hypotheses[tag < 0 ? 0 : ticket->question];
    ticket->request =
        (moe_request){ .source = h->ids,
                       .n_source = h->n_ids,
                       .target = w->source,
                       .n_target = w->request.n_source,
                       .force = -1,
                       .target_tag = tag < 0 ? (int32_t)moe_meta_int(s->model->tags, ticket->question) : tag,
                       .drop = w->request.drop };
    return MOE_PULL_REQUEST;
}

static float moe_rerank_score(const moe_session *s, const moe_waiting *w, const moe_hypothesis *h) {
    return h->score + s->params.rerank * (h->reverse / moe_length_penalty(&s->search, w->request.n_source + 1));
}

/* Return the log-probability below which a question's hypothesis cannot win (sums only fall); -inf for the first. */
static float moe_rerank_least(const moe_session *s, const moe_ticket *ticket) {
    const moe_waiting *w = ticket->waiting;
    if (!w || ticket->question + 1 < 2 || s->params.nbest > 1 || w->request.source_tag < 0) return -INFINITY;
    moe_hypothesis h = w->hypotheses[ticket->question];
    h.reverse =
        (w->best - h.score) / s->params.rerank * moe_length_penalty(&s->search, w->request.n_source + 1) - 0.01f;
    while (moe_rerank_score(s, w, &h) >= w->best && h.reverse >= -FLT_MAX) h.reverse = 2.0f * h.reverse - 1.0f;
    return h.reverse;
}

/* Process the answer to a question; answers arrive in any order. The last one reorders the hypotheses and returns 1. */
static int moe_rerank_answer(const moe_session *s, const moe_ticket *ticket, const moe_result *result) {
    moe_waiting *w = ticket->waiting;
    const size_t which = ticket->question;
    const int detects = w->request.source_tag < 0;
    moe_hypothesis *h = &w->hypotheses[detects ? 0 : which];
    float logprob = result->status ? -FLT_MAX : result->hypotheses[0].logprob;
    if (result->status && !w->status) snprintf(w->message, sizeof w->message, "%s", result->message);
    if (!w->status) w->status = result->status;
    if (!detects || !w->answered || logprob > h->reverse || (logprob == h->reverse && which < w->language)) {
        h->reverse = logprob;
        w->language = which;
    }
    w->answered++;
    if (detects) {
        if (w->answered < moe_rerank_questions(s, w)) return 0;
        w->request.source_tag = (int32_t)moe_meta_int(s->model->tags, w->language);
        w->asked = w->answered = 1;
    }
    logprob = moe_rerank_score(s, w, h);
    if (w->answered == 1 || logprob > w->best) w->best = logprob;
    if (w->answered < moe_rerank_questions(s, w) && !w->status) return 0;
    if (w->answered < w->asked) return 0;
    w->n = w->asked;
    for (size_t i = 0; i < w->n; i++) { /* finished first, then by score; ties keep the order of the search */
        moe_hypothesis better = w->hypotheses[i], *to = &w->hypotheses[i];
        better.score = moe_rerank_score(s, w, &better);
        for (; to > w->hypotheses && better.finished == to[-1].finished && better.score > to[-1].score; to--)
            *to = to[-1];
        *to = better;
    }
    return 1;
}

/* Pull the next request for slot `at`: the caller's or, in a slot after the batch, a pending question. */
static int moe_pull(moe_session *s, size_t at, int wait) {
    moe_ticket *ticket = &s->tickets[at];
    moe_waiting *w = s->waiting;
    if (at >= (size_t)s->params.batch) return moe_rerank_ask(s, ticket);
    while (w < s->waiting + s->n_waiting && w->used) w++;
    if (s->n_waiting && w == s->waiting + s->n_waiting) return MOE_PULL_LATER;
    const moe_request request = { .target_tag = s->params.target_tag, .source_tag = s->params.source_tag, .force = -1 };
    *ticket = (moe_ticket){ .request = request, .question = SIZE_MAX };
    const int answer = s->pull(s->user, wait, &ticket->request);
    if (answer == MOE_PULL_REQUEST) ticket->waiting = moe_rerank_begin(s, w, &ticket->request);
    return answer;
}

/* Deliver the result of the request in slot `at` or, if the result has `words` and must be reranked, store it. */
static void moe_hand_over(moe_session *s, size_t at, moe_result result, const int32_t *words) {
    const moe_ticket *ticket = &s->tickets[at];
    moe_waiting *w = ticket->waiting;
    if (w && ticket->question != SIZE_MAX) {
        if (!moe_rerank_answer(s, ticket, &result)) return;
        result = (moe_result){ w->request.user, MOE_OK, "", w->n, w->hypotheses };
        if (w->status) result = (moe_result){ w->request.user, w->status, w->message, 0, NULL };
    } else if (w && words && moe_rerank_keep(s, w, words)) {
        return;
    }
    result.n_hypotheses = moe_min(result.n_hypotheses, (size_t)s->params.nbest);
    if (result.n_hypotheses)
        s->stats.target_tokens += result.hypotheses[0].n_ids + (size_t)result.hypotheses[0].finished;
    s->done(s->user, &result);
    if (w) w->used = 0;
}

static void moe_refuse(moe_session *s, size_t at, moe_status status, const char *message) {
    moe_hand_over(s, at, (moe_result){ s->tickets[at].request.user, status, message, 0, NULL }, NULL);
}

/* ==== 41. Sessions: places ====================================================================================
 * Where sentences keep their rows: segments of rows carried by source, pages of rows carried by token. Invariant: each
 * row belongs to one sentence, or to a page that several share because they begin with the same tokens. */

/* ---- Segments ---- */

/* Return the start of the first gap of `need` rows between segments; SIZE_MAX if there is none. */
static size_t moe_find_segment(const moe_session *s, size_t need) {
    const size_t rows = s->carried_rows[MOE_BY_SOURCE];
    size_t at = 0;
    for (size_t i = 0; i < s->n_active; i++) {
        const moe_task *task = &s->slots[s->active[i]].task;
        if (need <= task->segment - at) return at;
        at = task->segment + task->length;
    }
    return need <= rows && at <= rows - need ? at : SIZE_MAX;
}

/* Activate a slot and assign the first gap of `length` rows, which must exist. */
static void moe_activate(moe_session *s, size_t at, size_t length) {
    moe_slot *slot = &s->slots[at];
    size_t i = s->n_active;
    slot->active = 1;
    slot->task.length = length;
    slot->task.segment = length ? moe_find_segment(s, length) : 0;
    for (; i > 0 && s->slots[s->active[i - 1]].task.segment > slot->task.segment; i--) s->active[i] = s->active[i - 1];
    s->active[i] = at;
    s->n_active++;
}

/* ---- Pages ---- */

static int32_t moe_take_idle(moe_session *s, size_t at) {
    const int32_t page = s->idle_pages[at];
    memmove(s->idle_pages + at, s->idle_pages + at + 1, (--s->n_idle - at) * sizeof *s->idle_pages);
    return page;
}

static void moe_free_page(moe_session *s, int32_t page) {
    s->pages[page].serial = 0;
    s->free_pages[s->n_free++] = page;
}

/* Allocate free or idle pages for a sentence's first `rows` rows. Returns 0 if there are too few. */
static int moe_take_pages(moe_session *s, moe_slot *slot, size_t rows) {
    while (slot->pages && slot->n_pages * MOE_PAGE < rows) {
        if (!s->n_free && !s->n_idle) return 0;
        const int32_t page = s->n_free ? s->free_pages[--s->n_free] : moe_take_idle(s, 0);
        s->pages[page] = (moe_page){ .users = 1 };
        slot->pages[slot->n_pages++] = page;
        for (size_t i = s->model->n_predictor * MOE_CARRIES, at = s->model->n_decoder * MOE_CARRIES; i-- > 0; at++) {
            const size_t bytes = MOE_PAGE * moe_carried_row(s, at, MOE_BY_TOKEN);
            char *kept = (char *)(void *)s->carried[at / MOE_CARRIES][at % MOE_CARRIES].rows;
            if (bytes) memset(kept + (size_t)page * bytes, 0, bytes); /* the predictor may leave rows out */
        }
    }
    return 1;
}

/* Mark pages whose rows are all stored, so sentences can share them. */
static void moe_mark_filled(moe_session *s, moe_slot *slot) {
    for (; slot->n_filled < moe_min(slot->n_pages, slot->steps / MOE_PAGE); slot->n_filled++)
        s->pages[slot->pages[slot->n_filled]].filled = 1;
}

/* Release a sentence's pages. Pages of a shared start become idle in reverse order: the first is evicted last. */
static void moe_give_pages(moe_session *s, moe_slot *slot) {
    moe_mark_filled(s, slot);
    while (slot->n_pages) {
        const int32_t page = slot->pages[--slot->n_pages];
        moe_page *p = &s->pages[page];
        if (--p->users) continue;
        const int idle = p->serial && p->filled;
        if (idle && s->n_idle == moe_most_idle(s)) moe_free_page(s, moe_take_idle(s, 0));
        if (idle) s->idle_pages[s->n_idle++] = page;
        else moe_free_page(s, page);
    }
    slot->n_filled = 0;
}

/* Return the oldest sentence younger than `age` that waits for pages (or, if `waits` is 0, has them); NULL if none. */
static moe_slot *moe_oldest(const moe_session *s, int waits, uint64_t age) {
    moe_slot *oldest = NULL;
    for (moe_slot *slot = s->slots; slot < s->slots + s->n_slots; slot++)
        if (slot->active && slot->waits == waits && slot->age > age && (!oldest || slot->age < oldest->age))
            oldest = slot;
    return oldest;
}

/* Return the number of rows that a sentence needs for its next step, or to start. */
static size_t moe_rows_needed(const moe_slot *slot) { return 1 + (slot->waits ? slot->task.n_target : slot->n_tokens); }

/* Return the hash table's entry for the page of a shared start with these tokens after page `before`. */
static int32_t *moe_beginning_of(const moe_session *s, uint64_t before, const int32_t *ids) {
    for (size_t i = 0; i < MOE_PAGE; i++) before = moe_hash(before ^ (uint64_t)ids[i]);
    return &s->beginnings[before % (MOE_PAGE * s->n_pages)];
}

/* Return the page of a shared start that contains page `at` of a sentence and follows page `before`, or -1. `ids`
 * receives its tokens, *entry its entry in the hash table. */
static int32_t moe_find_beginning(const moe_session *s, const moe_slot *slot, size_t at, uint64_t before, int32_t *ids,
                                  int32_t **entry) {
    for (size_t i = 0, row = at * MOE_PAGE; i < MOE_PAGE; i++, row++)
        ids[i] = row ? slot->target[row - 1] : slot->task.begin;
    *entry = moe_beginning_of(s, before, ids);
    const moe_page *p = &s->pages[**entry < 0 ? 0 : **entry];
    const int same = p->serial && p->before == before && memcmp(ids, p->ids, sizeof p->ids) == 0;
    return same ? **entry : -1;
}

/* Add a user to a shared page, which is then no longer idle. */
static void moe_share_page(moe_session *s, int32_t page) {
    size_t at = 0;
    if (s->pages[page].users++) return;
    while (s->idle_pages[at] != page) at++;
    moe_take_idle(s, at);
}

/* Return the kept states of a page, or, if it is NULL, those not used for the longest time. NULL if there are none. */
static moe_states *moe_find_kept(const moe_session *s, const moe_page *of) {
    moe_states *oldest = of ? NULL : s->kept;
    for (moe_states *k = s->kept; k < s->kept + s->n_kept; k++)
        if (of ? k->serial == of->serial : k->used < oldest->used) oldest = k;
    return oldest;
}

/* Keep the states of a sentence that has just filled the page before row `keep`. */
static void moe_keep_states(moe_session *s, const moe_slot *slot) {
    moe_states *kept = moe_find_kept(s, NULL);
    const size_t from = slot->state + slot->live[0].state, to = (size_t)kept->row;
    kept->serial = s->pages[slot->pages[slot->keep / MOE_PAGE - 1]].serial, kept->used = ++s->uses;
    for (size_t i = 0, n; i < s->model->n_layers * MOE_CARRIES; i++) {
        char *rows = (char *)(void *)s->carried[i / MOE_CARRIES][i % MOE_CARRIES].rows;
        if ((n = moe_carried_row(s, i, MOE_BY_STATE)) != 0) memcpy(rows + to * n, rows + from * n, n);
    }
}

/* Return the largest number of leading pages that a sentence may share with one of those that wait. */
static size_t moe_common_pages(const moe_session *s, const moe_slot *slot) {
    size_t most = 0, n; /* n: rows in common */
    for (const moe_slot *other = s->slots; other < s->slots + s->n_slots; other++) {
        const int waits = other != slot && other->active && other->waits && other->task.begin == slot->task.begin;
        const size_t rows = waits ? moe_min(slot->task.free, other->task.free) : 0;
        for (n = 1; n < rows && other->target[n - 1] == slot->target[n - 1];) n++;
        most = moe_max(most, moe_min(n, rows) / MOE_PAGE);
    }
    return most;
}

/* Start a waiting sentence, for which there are pages. It shares its first pages with sentences that start with the
 * same tokens, but only rows whose outputs it does not need, and its search continues after these rows. It keeps
 * waiting while another sentence fills one of these pages. With states, it shares pages up to one whose states are
 * kept, replaces the others, and keeps its states after the last of them or of the pages that a waiting one shares. */
static void moe_begin_pages(moe_session *s, size_t at) {
    moe_slot *slot = &s->slots[at];
    size_t alike = s->shares ? slot->task.free / MOE_PAGE : 0, rows = moe_rows_needed(slot), same = 0, shared = 0;
    uint64_t before = 0, last = 0;
    int32_t ids[MOE_PAGE], *entry, page;
    for (; same < alike && (page = moe_find_beginning(s, slot, same, last, ids, &entry)) >= 0; same++) {
        moe_states *kept = moe_find_kept(s, &s->pages[page]);
        if (!s->pages[page].filled) return;
        slot->pages[same] = page, last = s->pages[page].serial;
        if (!s->n_kept || kept) shared = same + 1, before = last;
        if (kept) kept->used = ++s->uses, slot->from = kept->row;
    }
    for (; slot->n_pages < shared; s->stats.shared_rows += MOE_PAGE) {
        s->stats.loaded_rows += s->pages[slot->pages[slot->n_pages]].loaded ? MOE_PAGE : 0;
        moe_share_page(s, slot->pages[slot->n_pages++]);
    }
    slot->n_filled = shared;
    slot->keep = s->n_kept && alike ? MOE_PAGE * (same > shared ? same : moe_common_pages(s, slot)) : 0;
    while (slot->steps < shared * MOE_PAGE) moe_score_step(&s->search, slot, at, &s->frames[MOE_DECODER].beam);
    moe_take_pages(s, slot, rows);
    for (size_t i = shared; i < moe_min(alike, slot->n_pages); i++) {
        moe_page *p = &s->pages[slot->pages[i]];
        page = moe_find_beginning(s, slot, i, before, p->ids, &entry);
        p->before = before;
        p->serial = before = page < 0 ? ++s->serials : s->pages[page].serial;
        *entry = slot->pages[i];
        if (page >= 0 && !s->pages[page].users) moe_share_page(s, page), moe_free_page(s, page);
    }
    slot->waits = 0;
}

/* Assign pages for the next step of all running sentences. If pages run out, the youngest sentence releases its pages,
 * waits, and is recomputed from its start. Then waiting sentences start, oldest first, if there are pages for their
 * given tokens; one that has released its pages also waits until another sentence is done. A single sentence always has
 * enough: moe_must_decode rejects requests that may need more pages than exist. */
static void moe_share_pages(moe_session *s) {
    moe_slot *slot, *youngest;
    for (size_t i = 0; i < s->n_active && s->n_pages; i++) {
        slot = &s->slots[s->active[i]];
        moe_mark_filled(s, slot);
        if (slot->keep && slot->steps == slot->keep) moe_keep_states(s, slot);
        while (!slot->waits && !moe_take_pages(s, slot, moe_rows_needed(slot))) {
            for (moe_slot *next = youngest = slot; next; next = moe_oldest(s, 0, next->age)) youngest = next;
            moe_give_pages(s, youngest);
            youngest->reported = moe_max(youngest->reported, youngest->steps);
            moe_slot_begin(youngest);
            youngest->waits = 1;
            youngest->gave = s->ended;
        }
    }
    int some = moe_oldest(s, 0, 0) != NULL;
    for (uint64_t age = 0; (slot = moe_oldest(s, 1, age)) != NULL; age = slot->age, some = 1) {
        const size_t pages = moe_divide_up(moe_rows_needed(slot), MOE_PAGE);
        if (some && (slot->gave == s->ended || s->n_free + s->n_idle < pages)) break;
        moe_begin_pages(s, (size_t)(slot - s->slots));
    }
}

static void moe_deactivate(moe_session *s, size_t at) {
    size_t i = 0;
    moe_give_pages(s, &s->slots[at]);
    s->ended++;
    while (s->active[i] != at) i++;
    for (s->n_active--; i < s->n_active; i++) s->active[i] = s->active[i + 1];
    s->slots[at].active = 0;
}

/* ==== 42. Sessions: translating ===============================================================================
 * The queue of requests and the main loop. Invariant: the rows of a step are the live hypotheses of active slots in
 * slot order; a finished sentence's slot and its rows carried by source are immediately free for the next request. */

static void moe_report_row(const moe_session *s, int which, size_t row, void *user, size_t position) {
    const moe_graph *g = &s->graphs[which];
    const int32_t token = s->frames[which].ids ? s->frames[which].ids[row] : -1;
    for (size_t i = 0; i < g->count; i++) {
        const moe_node *t = &g->nodes[i];
        if (t->op != MOE_OP_GATE || !t->gate.layer) continue;
        const moe_selection chosen = moe_selection_of(t, row);
        const moe_routing routing = { user,          t->gate.layer,  position,      token, (int)*chosen.empty,
                                      *chosen.count, chosen.experts, chosen.weights };
        s->params.routing(s->params.routing_user, &routing);
    }
}

/* ---- Admitting and encoding ---- */

void moe_request_drop(moe_drop *drop) { __atomic_store_n(&drop->set, 1, __ATOMIC_RELAXED); }
int moe_request_dropped(const moe_drop *drop) { return drop && __atomic_load_n(&drop->set, __ATOMIC_RELAXED); }

static const char moe_dropped_text[] = "dropped by the caller";

#define MOE_BAD(why, ...) moe_fail(why, MOE_ERROR_ARGUMENT, "request", __VA_ARGS__)

static moe_status moe_check_constraints(const moe_session *s, const moe_request *q, size_t n_target, moe_error *why) {
    const moe_model *m = s->model;
    const size_t most = s->search.max_constraints, max_target = (size_t)s->params.max_target;
    size_t tokens = 0;
    if (q->n_constraints > most)
        return MOE_BAD(why, "%zu constraints exceed max_constraints, %zu", q->n_constraints, most);
    for (size_t c = 0; c < q->n_constraints; c++) {
        const moe_constraint *k = &q->constraints[c];
        if (!k->n_ids || k->first > q->n_source || k->n_source > q->n_source - k->first)
            return MOE_BAD(why, "constraint %zu has no tokens or exceeds the source", c);
        tokens += moe_min(k->n_ids, max_target);
        for (size_t i = 0; i < k->n_ids; i++)
            if (!moe_can_generate(m, k->ids[i]) || moe_is_end(&s->search, k->ids[i]))
                return MOE_BAD(why, "token %d of a constraint cannot be generated by this model", (int)k->ids[i]);
    }
    if (n_target + tokens + 1 > max_target && q->n_constraints)
        return MOE_BAD(why, "the constraints have %zu tokens, which exceeds the limit of %zu", tokens, max_target);
    return MOE_OK;
}

/* Return the token that a translation must start with, or -1. */
static int32_t moe_forced_token(const moe_model *m, const moe_request *q) {
    return q->force >= 0 || !m->forced_tag ? q->force : q->target_tag;
}

static moe_status moe_check_request(const moe_session *s, const moe_request *q, moe_error *why) {
    const moe_model *m = s->model;
    const size_t extra = q->raw ? 0 : moe_source_extra(m), max_source = (size_t)s->params.max_source,
                 max_target = (size_t)s->params.max_target;
    const size_t n_target = (q->target ? q->n_target : 0) + (size_t)(m->forced_tag || q->force >= 0);
    const int needs_target = m->forced_tag || m->source_tag == 1;
    if (moe_request_dropped(q->drop)) return moe_fail(why, MOE_ERROR_CANCELLED, "request", "%s", moe_dropped_text);
    for (size_t i = 0; i < q->n_source; i++)
        if (q->source[i] < 0 || q->source[i] >= m->source_vocabulary)
            return MOE_BAD(why, "source token %d is outside the vocabulary (0 to %d)", (int)q->source[i],
                           (int)m->source_vocabulary - 1);
    for (size_t i = 0; q->target && i < q->n_target; i++)
        if (!moe_can_generate(m, q->target[i]))
            return MOE_BAD(why, "target token %d cannot be generated by this model", (int)q->target[i]);
    for (size_t i = 0; q->draft && i < q->n_draft; i++)
        if (q->draft[i] < 0 || q->draft[i] >= m->vocabulary)
            return MOE_BAD(why, "draft token %d is outside the vocabulary (0 to %d)", (int)q->draft[i],
                           (int)m->vocabulary - 1);
    MOE_TRY(moe_check_constraints(s, q, n_target, why));
    if (!q->raw && needs_target && (q->target_tag < 0 || q->target_tag >= m->source_vocabulary))
        return MOE_BAD(why, "this model needs the target language's tag");
    if (q->source_tag < -1 || q->source_tag >= m->source_vocabulary)
        return MOE_BAD(why, "the source language's tag is outside the vocabulary");
    if (!q->raw && m->source_tag == 2 && q->source_tag < 0)
        return MOE_BAD(why, "this model needs the source language's tag");
    if (moe_forced_token(m, q) < -1 || moe_forced_token(m, q) >= m->vocabulary)
        return MOE_BAD(why, "the forced token is outside the vocabulary");
    if (q->n_source > max_source || q->n_source + extra > max_source)
        return moe_fail(why, MOE_ERROR_LIMIT, "request", "%zu source tokens exceed the limit of %zu%s",
                        q->n_source + extra, max_source,
                        s->api && m->prompted ? "; on a GPU, raise max_source, or use device cpu"
                        : max_source + (m->prompted ? max_target : 0) < moe_places(m) ? "; raise max_source"
                                                                                      : ", the model's positions");
    if (n_target + 1 > max_target || q->n_target > max_target)
        return moe_fail(why, MOE_ERROR_LIMIT, "request", "%zu target tokens exceed the limit of %zu", n_target + 1,
                        max_target);
    if (q->repetition_penalty != 0.0f && !s->search.used_words)
        return MOE_BAD(why, "per-request repetition_penalty requires a session with repetition_penalty or stop_loops");
    MOE_TRY(moe_check_number("repetition_penalty", (double)q->repetition_penalty, 0, 100, 1, why));
    if (q->sampling) MOE_TRY(moe_check_sampling(q->sampling, s->search.samples, why));
    if (m->kind == MOE_MODEL_LANGUAGE && (!q->target || q->prefix || q->n_source))
        return MOE_BAD(why, "a language model scores a target and takes no source");
    return MOE_OK;
}

/* Return the maximum target length of a request with `n` source tokens, including tokens that the session adds. */
static size_t moe_limit(const moe_session *s, const moe_request *q, size_t n) {
    const int counts_source = s->search.rules.counts_source;
    const size_t most = (size_t)s->params.max_target, offset = (size_t)s->params.max_len_offset;
    double limit = (double)(float)(counts_source ? n : q->n_source) * (double)s->params.max_len_factor;
    if (counts_source) limit = ceil(limit);
    return moe_min(q->limit ? moe_min(q->limit, most) : most, (limit < (double)most ? (size_t)limit : most) + offset);
}

/* Check that there are enough pages for a valid request if it runs alone. */
static moe_status moe_check_pages(const moe_session *s, const moe_request *q, moe_error *why) {
    const size_t n = q->n_source + (q->raw ? 0 : moe_source_extra(s->model)), prompt = s->model->prompted ? n - 1 : 0;
    const size_t given = (q->target ? q->n_target : 0) + (moe_forced_token(s->model, q) >= 0);
    size_t limit = moe_limit(s, q, n), rows = 1 + prompt + given, tokens = 0;
    for (size_t c = 0; c < q->n_constraints; c++) tokens += q->constraints[c].n_ids;
    limit = moe_max(limit, given + tokens + 1);
    if (!q->target || q->prefix) rows += (limit - given) * (size_t)s->params.beam;
    if (!s->n_pages || rows <= s->n_pages * MOE_PAGE) return MOE_OK;
    const size_t pages = MOE_PAGE * moe_carried_bytes(s, MOE_BY_TOKEN) * moe_divide_up(rows, MOE_PAGE);
    const size_t mb = ((pages + moe_most_kept(s) * moe_carried_bytes(s, MOE_BY_STATE)) >> 20) + 1;
    return moe_fail(why, MOE_ERROR_LIMIT, "request",
                    "the request may need keys and values for %zu tokens, but context_memory holds %zu; raise it to "
                    "%zu MB",
                    rows, s->n_pages * MOE_PAGE, mb);
}

/* Return 1 if the request for slot `at` must be decoded; otherwise deliver its result. */
static int moe_must_decode(moe_session *s, size_t at) {
    const moe_request *q = &s->tickets[at].request;
    const moe_hypothesis nothing = { .ids = NULL };
    const int empty =
        s->model->kind != MOE_MODEL_LANGUAGE && !q->n_source && !(q->target && !q->raw && moe_source_extra(s->model));
    moe_error why = { MOE_OK, "", "" };
    if (moe_check_request(s, q, &why) || (!empty && moe_check_pages(s, q, &why)))
        moe_refuse(s, at, why.code, why.message);
    else if (empty) /* an empty source has an empty translation */
        moe_hand_over(s, at, (moe_result){ q->user, MOE_OK, "", 1, &nothing }, NULL);
    return !empty && why.code == MOE_OK;
}

/* Copy the constraints of a sentence, and raise its length limit to fit them, the given tokens and the end token. */
static void moe_admit_constraints(moe_slot *slot, const moe_request *q) {
    size_t tokens = 0;
    for (size_t c = 0; c < slot->task.n_constraints; c++) {
        const moe_constraint *k = &q->constraints[c];
        slot->constraints[c] =
            (moe_constraint_state){ tokens, k->n_ids, slot->task.lead + k->first, k->n_source, k->once };
        memcpy(slot->constraint_ids + tokens, k->ids, k->n_ids * sizeof *k->ids);
        tokens += k->n_ids;
    }
    slot->task.limit = moe_max(slot->task.limit, slot->task.n_target + tokens + 1);
}

static size_t moe_list_add(uint32_t *listed, int32_t id) {
    const uint32_t bit = 1u << id % 32, had = listed[id / 32] & bit;
    listed[id / 32] |= bit;
    return !had;
}

/* Build the shortlist of a slot's sentence, which depends only on the request and the model. If the sentence is only
 * scored, one run computes many tokens, so gathering rows of the matrix is not worthwhile. The numbers of the lists
 * were checked when the model was opened, but the mapped file may change at any time, so no number is trusted. */
static void moe_make_list(moe_session *s, moe_slot *slot, const int32_t *source) {
    const moe_model *m = s->model;
    const moe_shortlist *lists = &m->shortlist;
    moe_list *list = &slot->list;
    size_t n = 0;
    memset(s->listed, 0, ((size_t)m->vocabulary / 32 + 1) * sizeof *s->listed);
    for (size_t i = 0; i < m->n_ends; i++) n += moe_list_add(s->listed, m->ends[i]);
    for (size_t i = 0; i < lists->first; i++) n += moe_list_add(s->listed, (int32_t)i);
    for (size_t i = 0; i < slot->task.length; i++) {
        const float *of = lists->offsets + source[i];
        for (size_t k = (size_t)of[0], end = moe_min((size_t)of[1], lists->n); k < end; k++) {
            const size_t id = (size_t)lists->ids[k];
            if (id < (size_t)m->vocabulary) n += moe_list_add(s->listed, (int32_t)id);
        }
        if (lists->shared) n += moe_list_add(s->listed, source[i]);
    }
    for (int32_t id = (int32_t)lists->first; n % lists->multiple && id < m->vocabulary; id++)
        n += moe_list_add(s->listed, id);
    for (size_t i = 0; i < slot->task.n_target; i++) moe_list_add(s->listed, slot->target[i]);
    for (size_t c = 0; c < slot->task.n_constraints; c++)
        for (size_t i = 0; i < slot->constraints[c].n; i++)
            moe_list_add(s->listed, slot->constraint_ids[slot->constraints[c].first + i]);
    for (size_t i = m->n_suppressed; i < m->n_never; i++) s->listed[m->never[i] / 32] &= ~(1u << m->never[i] % 32);
    list->n = 0;
    for (int32_t id = 0; id < m->vocabulary; id++) {
        if (!s->listed[id / 32]) id |= 31;
        else if (s->listed[id / 32] >> id % 32 & 1) list->ids[list->n++] = id;
    }
    list->w.rows = list->n <= list->capacity && !slot->task.scoring ? list->n : 0;
}

static void moe_gather_task(void *user, size_t task, size_t thread) {
    const moe_session *s = user;
    const moe_list *list = &s->slots[s->frames[MOE_ENCODER].packed.sentence[task]].list;
    (void)thread;
    for (size_t i = 0; i < moe_round_up(list->w.rows, MOE_Q8_ROWS); i++) { /* fill the last block */
        moe_copy_row(&s->model->output, (size_t)list->ids[moe_min(i, list->w.rows - 1)], &list->w, i);
        if (list->bias && i < list->w.rows) list->bias[i] = s->model->output_bias[list->ids[i]];
    }
}

/* Start the valid request of slot `at` and append its ids to `staged`. Returns the number of ids. */
static size_t moe_admit(moe_session *s, size_t at, size_t staged) {
    const moe_model *m = s->model;
    const moe_request *q = &s->tickets[at].request;
    moe_slot *slot = &s->slots[at];
    int32_t *ids = s->staged + staged;
    const int32_t force = moe_forced_token(m, q);
    size_t n = 0;
    s->tickets[at].staged = staged;
    if (m->source_tag && !q->raw) ids[n++] = m->source_tag == 2 ? q->source_tag : q->target_tag;
    if (m->source_bos && !q->raw) ids[n++] = m->bos;
    slot->task.lead = n;
    slot->task.n_source = q->n_source;
    if (q->n_source) memcpy(ids + n, q->source, q->n_source * sizeof *ids);
    n += q->n_source;
    if (m->source_eos && !q->raw) ids[n++] = m->source_end;
    moe_activate(s, at, m->prompted ? 0 : n);
    slot->task.begin = m->prompted ? ids[0] : m->bos;
    slot->task.prompt = m->prompted ? n - 1 : 0;
    if (slot->task.prompt) memcpy(slot->target, ids + 1, slot->task.prompt * sizeof *ids);
    slot->task.repeats = s->search.stops_loops ? moe_most_repeats(ids, n) : 0;
    slot->task.key = 0;
    for (size_t i = 0; i < n; i++) slot->task.key = moe_hash(slot->task.key ^ (uint64_t)ids[i]);
    const moe_session_params *p = q->sampling ? q->sampling : &s->params;
    slot->task.sampling =
        (moe_sampling){ p->sample ? p->temperature : 0.0f, (size_t)p->top_k, p->top_p, p->min_p, (uint64_t)p->seed };
    slot->task.limit = moe_limit(s, q, n) + slot->task.prompt;
    slot->task.beam = q->beam > 0 ? moe_min((size_t)q->beam, (size_t)s->params.beam) : (size_t)s->params.beam;
    slot->task.scoring = q->target && !q->prefix;
    slot->task.least = moe_rerank_least(s, &s->tickets[at]);
    const float penalty = q->repetition_penalty != 0.0f ? q->repetition_penalty : s->params.repetition_penalty;
    slot->task.penalty = penalty != 0.0f ? penalty : 1.0f;
    slot->task.spared = q->repetition_penalty != 0.0f ? slot->task.prompt + 1 : 0;
    slot->task.free = slot->task.prompt + (force >= 0);
    slot->shown = force >= 0 && !q->raw && q->force < 0 ? 1 : 0;
    slot->task.n_target = slot->task.free + (q->target ? q->n_target : 0);
    s->tickets[at].reported = (int32_t)(slot->task.prompt + slot->shown) - 1;
    slot->task.n_constraints = slot->task.scoring ? 0 : q->n_constraints;
    moe_admit_constraints(slot, q);
    slot->task.place = at * s->token_rows;
    slot->waits = s->n_pages != 0;
    slot->age = ++s->begun;
    slot->gave = UINT64_MAX;
    slot->reported = 0;
    slot->task.first = m->decoder_from_encoder ? (int32_t)(s->rows + at) : -1;
    if (force >= 0) slot->target[slot->task.prompt] = force;
    if (q->target && q->n_target) memcpy(slot->target + slot->task.free, q->target, q->n_target * sizeof *slot->target);
    moe_choose_draft(s, slot, q);
    if (s->params.shortlist) moe_make_list(s, slot, ids);
    if (s->api) s->api->begin(s->device, at, slot);
    else moe_slot_begin(slot);
    if (at >= (size_t)s->params.batch) return n;
    s->stats.sentences++;
    s->stats.source_tokens += n;
    return n;
}

static moe_status moe_encode(moe_session *s, size_t group, moe_error *error) {
    moe_frame *f = &s->frames[MOE_ENCODER];
    moe_packed *p = &f->packed;
    if (!s->graphs[MOE_ENCODER].count) return MOE_OK; /* a model without an encoder */
    if (s->params.shortlist && !s->api) {
        MOE_TRY(moe_check_unchanged(&s->model->file, error)); /* the pull function may have waited for a request */
        moe_pool_run(&s->pool, group, moe_gather_task, s);
    }
    f->rows = 0;
    p->steps = s->slots[p->sentence[0]].task.length;
    for (size_t step = 0; step < p->steps; step++) {
        size_t live = 0;
        p->first[step] = f->rows;
        for (; live < group; live++) {
            const moe_slot *slot = &s->slots[p->sentence[live]];
            if (slot->task.length <= step) break;
            f->ids[f->rows] = s->staged[s->tickets[p->sentence[live]].staged + step];
            if (f->keys) f->keys[f->rows] = moe_hash(slot->task.key ^ step);
            f->positions[f->rows] = (int32_t)step;
            p->destination[f->rows++] = slot->task.segment + step;
        }
        p->live[step] = live;
    }
    MOE_TRY(moe_session_run(s, MOE_ENCODER, error));
    for (size_t step = 0; s->params.routing && step < p->steps; step++)
        for (size_t i = 0; i < p->live[step]; i++)
            if (p->sentence[i] < (size_t)s->params.batch)
                moe_report_row(s, MOE_ENCODER, p->first[step] + i, s->tickets[p->sentence[i]].request.user, step);
    return MOE_OK;
}

static size_t moe_free_slots(const moe_session *s, size_t from, size_t to) {
    size_t n = 0;
    for (size_t i = from; i < to; i++) n += (size_t)!s->slots[i].active;
    return n;
}

/* Admit requests while slots, staging memory and rows carried by source are free: questions if `own`, then the caller's
 * requests if `more`. *last receives the last result of the caller's pull function. */
static moe_status moe_refill(moe_session *s, int own, int more, int *last, moe_error *error) {
    const size_t batch = (size_t)s->params.batch, max_source = (size_t)s->params.max_source;
    size_t *sentence = s->frames[MOE_ENCODER].packed.sentence, group = 0, staged = 0;
    for (size_t i = 0; i < s->n_slots; i++) {
        size_t place = group;
        const size_t at = (batch + i) % s->n_slots; /* slots for questions, which follow the batch, come first */
        int *wanted = at < batch ? &more : &own, answer;
        if (s->slots[at].active || !*wanted) continue;
        if (staged + max_source > s->encode_tokens || moe_find_segment(s, max_source) == SIZE_MAX) break;
        do answer = moe_pull(s, at, s->n_active == 0);
        while (answer == MOE_PULL_REQUEST && !moe_must_decode(s, at));
        if (at < batch) *last = answer;
        *wanted = answer == MOE_PULL_REQUEST;
        if (!*wanted) continue;
        if (s->params.shortlist) MOE_TRY(moe_check_unchanged(&s->model->file, error));
        staged += moe_admit(s, at, staged);
        for (; place > 0 && s->slots[sentence[place - 1]].task.length < s->slots[at].task.length; place--)
            sentence[place] = sentence[place - 1]; /* sort by descending length */
        sentence[place] = at;
        group++;
    }
    return group && *last != MOE_PULL_CANCEL ? moe_encode(s, group, error) : MOE_OK;
}

/* ---- Decoding ---- */

/* Free the slots of dropped requests. Not called for a GPU, which completes its requests. */
static void moe_drop_unwanted(moe_session *s) {
    for (size_t at = 0; at < s->n_slots; at++) {
        if (!s->slots[at].active || !moe_request_dropped(s->tickets[at].request.drop)) continue;
        moe_deactivate(s, at);
        moe_refuse(s, at, MOE_ERROR_CANCELLED, moe_dropped_text);
    }
}

static void moe_fill_row(moe_session *s, const moe_slot *slot, const moe_live *live, size_t position, size_t row) {
    const moe_row asked = moe_live_row(&s->search, slot, live, position);
    moe_frame *f = &s->frames[MOE_DECODER];
    moe_beam *b = &f->beam;
    f->ids[row] = asked.id;
    f->positions[row] = (int32_t)position;
    b->parents[row] = asked.parent;
    if (b->lists) b->lists[row] = &slot->list;
    b->segment[row] = slot->task.segment;
    b->length[row] = slot->task.length;
    b->want[row] = asked.want;
    if (b->states) b->guesses[row] = -1, b->right[row] = 0;
    if (b->chain) moe_fill_chain(slot, live->last, position + 1, b->chain + row * s->search.max_target);
    if (f->keys) {
        f->keys[row] = ~slot->task.key;
        for (int32_t token = live->last; token >= 0; token = slot->tokens[token].parent)
            f->keys[row] = moe_hash(f->keys[row] ^ (uint64_t)slot->tokens[token].id);
    }
    if (b->hold) b->hold[row] = (char)asked.hold;
    if (b->used && (asked.want == -1 || (asked.want == MOE_NO_LOGITS && s->graphs[MOE_DECODER].traced))) {
        uint32_t *used = b->used + row * s->search.used_words;
        b->penalty[row] = slot->task.penalty;
        if (b->penalty[row] != 1.0f) memset(used, 0, s->search.used_words * sizeof *used);
        if (b->penalty[row] != 1.0f) moe_fill_used(slot, live->last, used);
    }
    if (b->samplings)
        b->samplings[row] = (moe_row_sampling){ slot->task.sampling.temperature != 0.0f ? &slot->task.sampling : NULL,
                                                moe_sample_number(slot, position) };
    if (b->starts) moe_fill_starts(&s->search, slot, live, b->starts + row * b->n_starts);
}

/* Choose the row carried by state of hypothesis h. The first child of a parent keeps the parent's; others copy it. */
static void moe_choose_state(moe_session *s, moe_slot *slot, size_t h, size_t row) {
    moe_beam *b = &s->frames[MOE_DECODER].beam;
    const size_t first = slot->state, origin = slot->live[h].state;
    for (size_t i = 0, next = 0; i < slot->n_live; i++) { /* find the lowest state that no hypothesis has */
        if (slot->live[i].ended || i == h || slot->live[i].state != slot->live[h].state) continue;
        if (i > h && slot->live[h].state == origin) break; /* h is the first child */
        slot->live[h].state = next++, i = SIZE_MAX;
    }
    b->states[row] = (int32_t)(first + slot->live[h].state);
    b->origins[row] = slot->live[h].row != SIZE_MAX ? (int32_t)(first + origin) : slot->steps ? slot->from : -1;
    b->guesses[row] = (int32_t)slot->guess, b->right[row] = (int32_t)slot->accepted;
}

/* Fill one row for each live hypothesis, followed by rows of given or guessed tokens while rows are free. Keys and
 * values of all rows are stored before any row attends to them. */
static void moe_fill_frame(moe_session *s) {
    moe_beam *b = &s->frames[MOE_DECODER].beam;
    size_t rows = 0, spare = s->search.ahead, slots = 0, guesses = MOE_GUESSES;
    double cost, share, own;
    b->most_starts = 0;
    for (size_t i = 0; i < s->n_slots; i++) slots += (size_t)(s->slots[i].active && !s->slots[i].waits);
    share = moe_pace_of(&s->pace, (double)slots, &cost) / (double)moe_max(slots, 1);
    own = s->predicting.n > 0 ? moe_pace_of(&s->predicting, (double)slots, &own) / (double)moe_max(slots, 1) : 0;
    s->pays = (double)s->foreseen * share > 1.25 * (cost + own);
    s->pace.mixed = 0;
    for (moe_slot *slot = s->slots; slot < s->slots + s->n_slots; slot++) {
        if (!slot->active || slot->waits) continue;
        b->most_starts = moe_max(b->most_starts, slot->task.n_constraints);
        for (size_t h = 0; h < slot->n_live; h++) {
            if (slot->live[h].ended) continue;
            moe_fill_row(s, slot, &slot->live[h], slot->steps, rows);
            if (b->states) moe_choose_state(s, slot, h, rows);
            slot->live[h].row = rows++;
        }
        moe_live live = slot->live[0];
        for (; spare && slot->ahead < moe_slot_given(slot) && slot->steps + slot->ahead + 1 != slot->keep; spare--) {
            if (!moe_take_pages(s, slot, slot->n_tokens + slot->ahead + 2)) break;
            moe_give_token(slot, &live, slot->target[live.last + 1]);
            moe_fill_row(s, slot, &live, slot->steps + ++slot->ahead, rows++);
            s->pace.mixed = 1;
        }
        const size_t most = moe_min(guesses, moe_min(spare, moe_guesses(s, slot, cost, share)));
        slot->guess = MOE_GUESSES - guesses;
        for (slot->guessed = 0; slot->guessed < most; slot->guessed++, spare--) {
            if (!moe_take_pages(s, slot, slot->n_tokens + slot->ahead + 2)) break;
            moe_give_token(slot, &live, slot->draft[slot->expected + slot->guessed]);
            moe_fill_row(s, slot, &live, slot->steps + ++slot->ahead, rows);
            if (b->states) b->guesses[rows] = (int32_t)(slot->guess + slot->guessed);
            rows++;
        }
        guesses -= slot->guessed;
        s->stats.draft_rows += slot->guessed;
    }
    s->frames[MOE_DECODER].rows = rows;
}

/* Compute the coverage of each row: the parent's coverage plus the attention of this step. With `by_place`, coverage
 * belongs to a place of the beam and does not move with hypotheses. The place of a finished hypothesis adds nothing;
 * while there is only one hypothesis, all places add its attention. */
static void moe_add_coverage(moe_session *s) {
    moe_beam *b = &s->frames[MOE_DECODER].beam;
    const size_t stride = b->attention_stride, beam = (size_t)s->params.beam;
    const int by_place = s->search.rules.by_place;
    float *old = b->coverage;
    for (size_t i = 0; i < s->n_slots; i++) {
        const moe_slot *slot = &s->slots[i];
        const int one = by_place && moe_slot_is_one(slot);
        for (size_t h = 0; slot->active && !slot->waits && h < (one ? beam : slot->n_live); h++) {
            const moe_live *live = &slot->live[one ? 0 : h];
            const size_t to = by_place ? i * beam + h : live->row, from = by_place ? to : (size_t)b->parents[live->row];
            const float *attention = b->attention + live->row * stride;
            float *sum = s->coverage_next + to * stride;
            for (size_t k = 0; k < slot->task.length && !live->ended; k++)
                sum[k] = (slot->steps ? old[from * stride + k] : 0.0f) + attention[k];
        }
    }
    b->coverage = s->coverage_next;
    s->coverage_next = old;
}

/* Deliver the result of a finished slot and free the slot. Returns the words after the result. */
static const int32_t *moe_deliver(moe_session *s, const int32_t *words) {
    const size_t at = (size_t)words[0], n = (size_t)words[1];
    const int32_t *end = moe_read_result(s, words, s->hypotheses);
    moe_deactivate(s, at);
    if (n) moe_hand_over(s, at, (moe_result){ s->tickets[at].request.user, MOE_OK, "", n, s->hypotheses }, words);
    else
        moe_refuse(s, at, MOE_ERROR_NUMERIC,
                   s->params.next_token
                       ? "no token is possible: a logit is NaN or infinite, or next_token bans all tokens"
                       : "the network's output is NaN: the model's weights are invalid");
    return end;
}

/* Return the index of the last token shared by all hypotheses of a slot, or -1. Indices increase along a hypothesis. */
static int32_t moe_common_token(const moe_slot *slot) {
    int32_t common = slot->live[0].last;
    for (size_t h = 1; h < slot->n_live + slot->n_finished; h++) {
        const moe_live *live = h < slot->n_live ? &slot->live[h] : &slot->finished[h - slot->n_live];
        for (int32_t other = live->last; common != other;) {
            int32_t *later = common > other ? &common : &other;
            *later = slot->tokens[*later].parent;
        }
    }
    return common;
}

/* Report the new common tokens of the hypotheses in slot `at` to the caller. Recomputing never changes tokens. */
static void moe_report_tokens(moe_session *s, size_t at) {
    const moe_slot *slot = &s->slots[at];
    moe_ticket *ticket = &s->tickets[at];
    const int32_t reported = ticket->reported;
    size_t n = 0;
    if (!slot->active || slot->task.scoring || !ticket->request.partial) return;
    int32_t last = moe_common_token(slot);
    uint32_t may_go = 0; /* number of final tokens that may be cut as a loop */
    for (size_t i = 0; i < MOE_LOOP_WIDEST; i++) may_go = slot->repeats[i] > may_go ? slot->repeats[i] : may_go;
    last -= (int32_t)may_go;
    for (int32_t i = last; i > reported; i = slot->tokens[i].parent) n++;
    if (!n) return;
    for (int32_t i = last, k = (int32_t)n; i > reported; i = slot->tokens[i].parent)
        s->results[--k] = slot->tokens[i].id;
    ticket->reported = last;
    ticket->request.partial(s->user, ticket->request.user, s->results, n);
}

static void moe_report_live(const moe_session *s, size_t at, size_t row) {
    const moe_slot *slot = &s->slots[at];
    const moe_frame *d = &s->frames[MOE_DECODER];
    const float *weights =
        s->params.attention ? d->beam.attention + row * d->beam.attention_stride + slot->task.lead : NULL;
    const size_t position = (size_t)d->positions[row];
    void *user = s->tickets[at].request.user;
    const moe_attention attention = { user, position - slot->shown, slot->task.n_source, weights };
    if (position < slot->reported) return;
    if (s->params.routing) moe_report_row(s, MOE_DECODER, row, user, position);
    if (weights && position >= slot->shown) s->params.attention(s->params.attention_user, &attention);
}

/* Run one step of decoder and search. A device stores the hypotheses and runs the search itself. */
static moe_status moe_step(moe_session *s, moe_error *error) {
    const moe_frame *d = &s->frames[MOE_DECODER];
    moe_device_results step = { 0, 0, NULL };
    int asked = 0; /* 1 if a slot asks the predictor */
    if (s->api) {
        MOE_TRY(s->api->step(s->device, s->params.trace, s->params.trace_user, &step, error));
    } else {
        moe_share_pages(s);
        moe_fill_frame(s);
        const uint64_t begin = moe_nanoseconds();
        MOE_TRY(moe_session_run(s, MOE_DECODER, error));
        if (!s->pace.mixed) moe_pace_add(&s->pace, (double)d->rows, (double)(moe_nanoseconds() - begin) * 1e-9);
        step.rows = d->rows;
    }
    s->stats.steps++;
    s->stats.rows += step.rows;
    for (; step.done > 0; step.done--) step.results = moe_deliver(s, step.results);
    if (s->api) return MOE_OK;
    for (size_t i = 0; (s->params.routing || s->params.attention) && i < (size_t)s->params.batch; i++)
        for (size_t h = 0; s->slots[i].active && !s->slots[i].waits && h < s->slots[i].n_live; h++)
            for (size_t k = 0; !s->slots[i].live[h].ended && k <= s->slots[i].ahead; k++)
                moe_report_live(s, i, s->slots[i].live[h].row + k);
    if (d->beam.coverage) moe_add_coverage(s);
    for (size_t i = 0; i < s->n_slots; i++) {
        moe_slot *slot = &s->slots[i];
        const size_t steps = slot->steps + 1, row = slot->live[0].row, n = slot->active ? slot->ahead + 1 : 0;
        if (slot->waits) continue;
        const int done = slot->active && slot->stops ? moe_stop_slot(&s->search, slot, i, &d->beam, s->coverage_next)
                                                     : moe_slot_steps(&s->search, slot, i, &d->beam, s->next);
        slot->accepted = slot->guessed && slot->steps > steps ? slot->steps - steps : 0;
        s->stats.draft_tokens += slot->accepted;
        slot->guessed = 0; /* a free slot fills no rows */
        if (s->predicts) asked |= moe_ask_predictor(s, slot, row, n);
        if (!done) {
            moe_report_tokens(s, i);
            continue;
        }
        if (slot->n_draft && !slot->asks) s->right += (slot->right - s->right) * 0.25f;
        moe_write_head(&s->search, &s->slots[i], i, s->results);
        for (int32_t h = 0; h < s->results[1]; h++) moe_write_result(&s->search, &s->slots[i], (size_t)h, s->results);
        moe_deliver(s, s->results);
    }
    return asked ? moe_predict(s, error) : MOE_OK;
}

void moe_session_cancel(moe_session *s) { atomic_store(&s->pool.cancelled, 1); }
void moe_session_uncancel(moe_session *s) { atomic_store(&s->pool.cancelled, 0); }

static moe_status moe_translate_all(moe_session *s, moe_pull_fn pull, moe_done_fn done, void *user, moe_error *error) {
    const size_t batch = (size_t)s->params.batch, behind = s->n_slots - batch, few = batch / (s->bank.file ? 2 : 4);
    moe_status status = MOE_OK;
    int answer = MOE_PULL_REQUEST, beginning = 1;
    if (s->model->kind == MOE_MODEL_CLASSIFIER)
        MOE_FAIL(ARGUMENT, "translate", "this model is a classifier and cannot translate");
    s->pull = pull;
    s->done = done;
    s->user = user;
    if (s->params.next_token) s->frames[MOE_DECODER].change = moe_change_logits;
    s->frames[MOE_DECODER].change_user = s;
    while (status == MOE_OK) {
        if (!s->api) moe_drop_unwanted(s);
        /* The encoder runs on groups of sentences; a large batch starts with several groups. */
        const size_t free = moe_free_slots(s, 0, batch);
        const int own = behind && moe_free_slots(s, batch, s->n_slots) >= behind / 4;
        const int more = answer != MOE_PULL_END && free >= (beginning ? 1 : moe_max(1, few));
        beginning = beginning && free;
        if (own || more) {
            status = moe_refill(s, own, more, &answer, error);
            if (answer == MOE_PULL_CANCEL)
                status = moe_fail(error, MOE_ERROR_CANCELLED, "translate", "cancelled by the caller");
        }
        if (status == MOE_OK) status = moe_check_cancelled(s, error);
        if (status != MOE_OK) break;
        if (s->n_active) status = moe_step(s, error);
        else if (answer == MOE_PULL_END) return MOE_OK;
    }
    for (size_t i = 0; i < s->n_slots; i++) moe_give_pages(s, &s->slots[i]), s->slots[i].active = 0;
    for (size_t i = 0; i < s->n_waiting; i++) s->waiting[i].used = 0;
    s->n_active = 0;
    if (s->api) s->api->forget(s->device);
    return status;
}

moe_status moe_translate(moe_session *s, moe_pull_fn pull, moe_done_fn done, void *user, moe_error *error) {
    moe_error why = { MOE_OK, "", "" };
    MOE_TRY(moe_session_enter(s, error));
    return moe_session_leave(s, moe_translate_all(s, pull, done, user, &why), &why, error);
}

typedef struct moe_sentence {
    const int32_t *source;
    size_t n;
    int pulled;
    int32_t *out;
    size_t capacity, *n_out;
    moe_status status;
    moe_error *error;
} moe_sentence;

static int moe_pull_sentence(void *user, int wait, moe_request *q) {
    moe_sentence *one = user;
    (void)wait;
    q->source = one->source;
    q->n_source = one->n;
    return one->pulled++ ? MOE_PULL_END : MOE_PULL_REQUEST;
}

static void moe_take_sentence(void *user, const moe_result *result) {
    moe_sentence *one = user;
    const moe_hypothesis *best = result->hypotheses;
    if (result->status) one->status = moe_fail(one->error, result->status, "translate", "%s", result->message);
    if (result->status) return;
    *one->n_out = best->n_ids;
    if (best->n_ids > one->capacity)
        one->status = moe_fail(one->error, MOE_ERROR_LIMIT, "capacity",
                               "the translation has %zu tokens, but the capacity is %zu", best->n_ids, one->capacity);
    if (best->n_ids > one->capacity) return;
    if (best->n_ids) memcpy(one->out, best->ids, best->n_ids * sizeof *one->out);
    if (one->n && !best->finished) /* an empty source has an empty translation */
        one->status = moe_fail(one->error, MOE_ERROR_LIMIT, best->looped ? "stop_loops" : "max_target",
                               best->looped ? "incomplete translation: it repeats itself after %zu tokens"
                                            : "incomplete translation: cut at the length limit after %zu tokens",
                               best->n_ids);
}

moe_status moe_translate_ids(moe_session *s, const int32_t *source, size_t n, int32_t *out, size_t capacity,
                             size_t *n_out, moe_error *error) {
    moe_sentence one = { source, n, 0, out, capacity, n_out, MOE_OK, error };
    MOE_TRY(moe_translate(s, moe_pull_sentence, moe_take_sentence, &one, error));
    return one.status;
}

/* ==== 43. Sessions: classifying ===============================================================================
 * The classification of rows of numbers in batches. */

static moe_status moe_classify_all(moe_session *s, const float *inputs, size_t rows, int32_t *classes, float *logprobs,
                                   moe_error *error) {
    const size_t batch = (size_t)s->params.batch, width = s->model->width, top = s->graphs[MOE_DECODER].top,
                 nbest = (size_t)s->params.nbest;
    moe_frame *f = &s->frames[MOE_DECODER];
    const moe_beam *b = &f->beam;
    if (s->model->kind != MOE_MODEL_CLASSIFIER) MOE_FAIL(ARGUMENT, "classify", "this model is not a classifier");
    for (size_t row0 = 0; row0 < rows; row0 += batch) {
        const size_t n = moe_min(batch, rows - row0);
        f->rows = n;
        f->inputs = inputs + row0 * width;
        for (size_t r = 0; r < n; r++) {
            b->want[r] = -1;
            if (f->keys) f->keys[r] = 0;
            for (size_t i = 0; f->keys && i < width; i++)
                f->keys[r] = moe_hash(f->keys[r] ^ moe_to_bits(f->inputs[r * width + i]));
        }
        MOE_TRY(moe_check_cancelled(s, error));
        MOE_TRY(moe_session_run(s, MOE_DECODER, error));
        for (size_t r = 0; r < n; r++) {
            if (s->params.routing) moe_report_row(s, MOE_DECODER, r, NULL, row0 + r);
            if (!(b->top_logprobs[r * top] <= 0.0f))
                MOE_FAIL(NUMERIC, "classify", "row %zu yields NaN: its inputs or the model's weights are invalid",
                         row0 + r);
            for (size_t i = 0; i < nbest; i++) {
                classes[(row0 + r) * nbest + i] = i < top ? b->top_ids[r * top + i] : -1;
                logprobs[(row0 + r) * nbest + i] = i < top ? b->top_logprobs[r * top + i] : moe_from_bits(0xff800000u);
            }
        }
        s->stats.sentences += n;
        s->stats.rows += n;
        s->stats.steps++;
    }
    return MOE_OK;
}

moe_status moe_classify(moe_session *s, const float *inputs, size_t rows, int32_t *classes, float *logprobs,
                        moe_error *error) {
    moe_error why = { MOE_OK, "", "" };
    MOE_TRY(moe_session_enter(s, error));
    return moe_session_leave(s, moe_classify_all(s, inputs, rows, classes, logprobs, &why), &why, error);
}

/* ==== 44. Sessions: prompts ===================================================================================
 * Files of prompts: a head, kept states (the least recently used first) and idle pages (the most recently used first).
 * Each state or page is a record: numbers, rows of all layers and a CRC-32 that also covers the head's checksum and the
 * record's offset. Invariant: a session uses nothing of a file before all records that fit have been verified. */

#if !defined(MOE_NO_WRITER)

typedef struct moe_prompts {
    moe_session *s;
    moe_output file; /* loading only uses `path`, `fd` and `at` */
    int save;
    const char *problem;
    uint32_t sum; /* CRC-32 of the record so far */
    struct moe_prompts_head {
        char magic[8];
        uint32_t sum, model, settings; /* CRC-32 of the rest, the model's header, all else that rows depend on */
        uint32_t n_states;
        uint64_t n_pages, serials;
    } head;
    moe_error *error;
} moe_prompts;

/* Write or read bytes, and add them to the checksum. */
static moe_status moe_prompts_pass(moe_prompts *f, void *data, size_t bytes) {
    size_t got = bytes;
    const int code = f->save ? 0 : moe_read_at(f->file.fd, data, bytes, f->file.at, &got);
    if (code) return moe_fail(f->error, MOE_ERROR_IO, "read", "cannot read %.160s: %s", f->file.path, strerror(code));
    if (f->save) MOE_TRY(moe_output_write(&f->file, data, bytes, f->error));
    else f->file.at += got;
    f->sum = moe_crc32(f->sum, data, got);
    return got == bytes ? MOE_OK : (f->problem = "is truncated", MOE_ERROR_FORMAT);
}

/* Write or read a record: numbers [bytes], and a page of rows carried by token or a row carried by state. */
static moe_status moe_prompts_record(moe_prompts *f, void *numbers, size_t bytes, moe_carry by, int32_t at) {
    f->sum = moe_crc32(f->head.sum, &f->file.at, sizeof f->file.at);
    MOE_TRY(moe_prompts_pass(f, numbers, bytes));
    for (size_t i = 0; i < f->s->model->n_layers * MOE_CARRIES; i++) {
        const size_t each = moe_carried_row(f->s, i, by) * (by == MOE_BY_TOKEN ? MOE_PAGE : 1);
        char *rows = (char *)(void *)f->s->carried[i / MOE_CARRIES][i % MOE_CARRIES].rows;
        if (each) MOE_TRY(moe_prompts_pass(f, rows + (size_t)at * each, each));
    }
    uint32_t sum = f->sum, computed = sum;
    MOE_TRY(moe_prompts_pass(f, &sum, sizeof sum));
    return sum == computed ? MOE_OK : (f->problem = "is damaged", MOE_ERROR_FORMAT);
}

static moe_status moe_prompts_records(moe_prompts *f) {
    moe_session *s = f->s;
    struct moe_prompts_head *h = &f->head, own = *h;
    const moe_status status = moe_prompts_pass(f, h, sizeof *h);
    if (status != MOE_ERROR_FORMAT) MOE_TRY(status);
    const int ours = !status && memcmp(h->magic, own.magic, sizeof own.magic) == 0;
    f->problem = !ours                                               ? "does not contain saved prompts"
                 : moe_crc32(0, &h->model, sizeof *h - 12) != h->sum ? "is damaged"
                 : h->serials >> 62 || (h->n_states && !s->n_kept)   ? "is damaged"
                 : h->model != own.model                             ? "is of another model"
                 : h->settings != own.settings                       ? "is of another version, kv_bits or gating"
                                                                     : NULL;
    if (f->problem) return ours ? MOE_ERROR_FORMAT : MOE_ERROR_ARGUMENT;
    const size_t n = f->save ? s->n_idle : moe_min((size_t)h->n_pages, moe_min(moe_most_idle(s), s->n_free));
    const int32_t *pages = f->save ? s->idle_pages : s->free_pages + s->n_free - n; /* least recently used first */
    for (uint32_t i = 0; i < h->n_states; i++) {
        moe_states *k = moe_find_kept(s, NULL);
        MOE_TRY(moe_prompts_record(f, &k->serial, sizeof k->serial, MOE_BY_STATE, k->row));
        k->used = ++s->uses;
    }
    for (size_t i = n; i-- > 0;) {
        moe_page *p = &s->pages[pages[i]];
        MOE_TRY(moe_prompts_record(f, p, offsetof(moe_page, users), MOE_BY_TOKEN, pages[i]));
        if (p->before >= p->serial || p->serial > h->serials) return f->problem = "is damaged", MOE_ERROR_FORMAT;
    }
    for (s->n_free -= f->save ? 0 : n, s->serials = h->serials; s->n_idle < n; s->n_idle++) {
        moe_page *p = &s->pages[s->idle_pages[s->n_idle] = pages[s->n_idle]];
        p->filled = p->loaded = 1;
        *moe_beginning_of(s, p->before, p->ids) = pages[s->n_idle];
    }
    return MOE_OK;
}

moe_status moe_session_prompts(moe_session *s, const char *path, int save, moe_error *error) {
    const uint64_t page = moe_carried_bytes(s, MOE_BY_TOKEN), state = moe_carried_bytes(s, MOE_BY_STATE);
    const uint64_t keep = (uint64_t)s->keep, gating = (uint64_t)s->graphs[MOE_DECODER].gating;
    const uint64_t settings[] = { MOE_VERSION_NUMBER, MOE_PAGE, page, state, keep, gating };
    moe_prompts f = { s, { .path = path }, save, NULL, 0, { "MOEKEPT", 0, 0, 0, 0, s->n_idle, s->serials }, error };
    moe_status status = MOE_OK;
    char where[32];
    if (!s->shares) MOE_FAIL(UNSUPPORTED, "session", "only decoder-only models on device cpu support saved prompts");
    if (!save && s->serials) MOE_FAIL(ARGUMENT, "session", "the session has already translated; use a new one");
    MOE_TRY(moe_session_enter(s, error));
    memcpy(&f.head.model, s->model->file.header + offsetof(moe_header, checksum), sizeof f.head.model);
    f.head.settings = moe_crc32(0, settings, sizeof settings);
    for (size_t i = 0; i < s->n_kept; i++) /* so that moe_find_kept returns the unused ones last */
        if (s->kept[i].serial) f.head.n_states++;
        else s->kept[i].used = ++s->uses;
    f.head.sum = moe_crc32(0, &f.head.model, sizeof f.head - 12);
    if (save) status = moe_output_begin(&f.file, path, s->block_bytes, 0, error); /* the file is smaller */
    else if ((f.file.fd = moe_open_path(path)) < 0)
        status = moe_fail(error, MOE_ERROR_IO, "open", "cannot open %.160s: %s", path, strerror(errno));
    if (!status) {
        status = moe_prompts_records(&f);
        if (save) status = moe_output_end(&f.file, status, error);
        else moe_close_descriptor(f.file.fd);
        for (size_t i = 0; i < s->n_kept && status && !save; i++) s->kept[i].serial = 0;
    }
    snprintf(where, sizeof where, "before offset %" PRIu64, f.file.at);
    if (f.problem)
        moe_fail(error, status, where, "%.140s %s: %sname another file", path, f.problem,
                 status == MOE_ERROR_FORMAT ? "delete it or " : "");
    atomic_store(&s->busy, 0);
    return status;
}

#endif /* MOE_NO_WRITER */

#endif /* MOE_HOST */
#endif /* MOE_ISA */
