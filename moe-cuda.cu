/* moe-cuda.cu - the CUDA backend of moe.c: runs the graphs and the search of a session on one GPU. The interface is in
 * section Devices of moe.c.
 *
 *   1. Checks and memory  the first failure, device memory within a budget, uploads of weights, bays of experts
 *   2. Kernels            the arithmetic of moe.c's portable kernels, operation by operation
 *   3. Launchers          one function per op, the run of a graph, the table for moe.c
 *
 * The GPU computes the same bytes as the processor. Float code uses moe_mul, moe_add, moe_sub and moe_div, which round
 * once each and are never fused. Code shared with the processor uses plain operators, which round once each only with
 * -fmad=false; no pragma replaces it. Sums run over 16 lanes (lane l takes elements l, l+16, ... ascending), joined by
 * one fixed tree. Adding a product of zeros leaves a lane unchanged, so tiles are padded with zeros. Quantised products
 * are integers, so any order gives the exact sum. cuBLAS multiplies many rows, a dp4a kernel multiplies few.
 *
 * The device stores weights as row-major codes [rows padded to 16, columns padded to 64], with Q4 to Q2 expanded to
 * int8. If not all experts fit, missing ones are uploaded on demand. States and hypotheses are on the device too. The
 * host uploads the ids of each sentence, downloads the next step's number of rows after each step, and the results at
 * the end. For a classifier, it uploads each step's inputs and downloads the best classes. Beam search uses the
 * processor's code, with one thread per sentence.
 *
 * nvcc builds this file with -fmad=false. A C++ compiler can build it with tests/cuda/cuda_emu.h, which runs every
 * kernel on the processor. Therefore only MOE_LAUNCH launches kernels, kernels use no warp primitives, and every
 * thread of a block reaches every barrier.
 */
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#ifndef MOE_CUDA_EMULATOR
#include <cublas_v2.h>
#include <cuda_runtime.h>
#define MOE_UNROLL _Pragma("unroll")
#define MOE_LAUNCH(d, kernel, grid, block, ...)                                           \
    do {                                                                                  \
        if ((d)->status == MOE_OK) {                                                      \
            kernel<<<(unsigned)(grid), (unsigned)(block), 0, (d)->stream>>>(__VA_ARGS__); \
            moe_check(d, cudaGetLastError(), #kernel);                                    \
        }                                                                                 \
    } while (0)
#endif

#include "moe.h"
#define MOE_DEVICE __device__ static inline
#define MOE_SHARED __host__ __device__ static inline
extern "C" {
#include "moe.c" /* graph data, frames, the device interface, elementary functions, the search, the expert cache */
}

/* ==== 1. Checks and memory ====================================================================================
 * Error handling and memory. Invariants: the device records the first failure, after which it calls only functions that
 * free memory; the device's list contains all allocations. */

enum {
    MOE_BUCKETS = 64, /* row counts for which the CUDA graph of a decoder step is cached */
    MOE_TRANSIT = 8,  /* maximum number of transit bays for experts */
    MOE_UP = 11       /* integers per row in a frame's upload */
};
#ifndef MOE_CUDA_EMULATOR                      /* the emulator has small limits that small tests can exceed */
static const size_t MOE_STAGE_BYTES = 8 << 20; /* bytes of each of the two upload buffers for weights; multiple of 64 */
static const size_t MOE_WORKSPACE = 32 << 20;  /* bytes of scratch, so that cuBLAS never allocates memory */
static const size_t MOE_FEW_ROWS = 32;         /* maximum rows (average per expert) for which dp4a replaces cuBLAS */
static const size_t MOE_PAIRS = 1 << 14; /* maximum (row, expert) pairs processed at once; more if one row has more */
static const size_t MOE_SUMS = 1 << 24;  /* maximum integers in `sums`; more if 32 rows need more */
static const size_t MOE_HEAD = 4096;     /* result words in a step's first download; a second download gets the rest */
static const size_t MOE_MARGIN = 512 << 20; /* bytes left for the driver and traces, at most 1/8 of the free memory */
#endif

/* A matrix on the device; for experts, the first expert's matrix. */
typedef struct moe_weights {
    moe_type type; /* quantised types become Q8 or, with F16 scales (parts), Q8B */
    int rows, cols;
    int rows_padded;     /* number of rows; for codes, padded to 16 */
    size_t stride;       /* distance between rows, in codes or numbers */
    size_t step;         /* bytes between experts, for both data and scales */
    const void *data;    /* NULL if missing */
    const float *scales; /* [rows_padded], after the codes; in Q8B, parts [rows_padded, stride / 64] follow */
} moe_weights;

/* The weights of a node on the device. */
typedef struct moe_bound {
    moe_weights w, w_r, w_proj, up, down;
    const float *bias, *threshold, *v, *weight; /* weight and bias of a norm or of a gate's `choice` */
    const float *positions;                     /* positions of an embedding, or rotary positions */
    const float *up_bias, *down_bias;           /* biases of the first expert */
    const int32_t *never;
    moe_cache_layer layer; /* the experts' place in the cache */
} moe_bound;

/* Weights that are already on the device, since nodes share matrices. */
typedef struct moe_known {
    const void *host;
    moe_weights weights;
} moe_known;

/* A sentence to upload. */
typedef struct moe_begun {
    size_t slot;
    moe_task task;
    size_t first, constraint_tokens; /* offset of the target in the upload; constraints and their tokens follow */
    size_t listed;                   /* tokens of the shortlist, which follow the constraint tokens */
} moe_begun;

/* The integers that describe the rows of a step, [rows] each. */
struct moe_step_rows {
    int32_t *ids, *parents, *segment, *length, *want, *hold;
    int32_t *destination; /* index among the rows carried by source or token; -1 if none */
    int32_t *last, *sentence, *positions, *first;
    int32_t *chain; /* [rows, max_target] for the decoder; NULL if no rows are carried by token */
};

/* The search on the device. */
typedef struct moe_searching : moe_step_rows {
    moe_search search;
    int slots;      /* 0 if the device does not search */
    int rows;       /* capacity; parents >= rows are not rows */
    moe_slot *slot; /* [slots], which point to the following arrays */
    moe_token *tokens;
    moe_live *live, *finished, *next; /* next: [slots, beam] scratch */
    int32_t *target;
    moe_constraint_state *constraints; /* [slots, max_constraints] */
    int32_t *constraint_ids;           /* [slots, max_target] */
    int32_t *listed;                   /* [slots, search.listed] */
    int32_t *starts;                   /* [rows, max_constraints] next tokens of constraints */
    float *start_logprobs;
    uint32_t *used;     /* [rows, search.used_words] */
    moe_beam answer;    /* the decoder's outputs, without coverage */
    float *coverage[2]; /* [rows, max_source]; *turn is the previous step's index. Both are equal if stored by slot */
    const float *attention;
    int32_t *turn;
    int32_t *done;    /* [slots] 0, or the offset of a slot's results */
    int32_t *results; /* first MOE_RESULTS words: live hypotheses, finished slots, total words, given tokens ahead */
} moe_searching;

enum { MOE_RESULTS = 4, MOE_CONSTRAINT_WORDS = sizeof(moe_constraint_state) / sizeof(int32_t) };

/* The mapping from rows' selections to pairs sorted by expert. */
typedef struct moe_routes {
    moe_selections chosen;
    int n, row0, rows;           /* number of experts; first and number of the current rows */
    int *row_first;              /* [rows] number of pairs of preceding rows */
    int *place;                  /* [pairs] in row order: index of each pair among the sorted pairs */
    int *count, *first;          /* [2 E] pairs of each expert; [E + 1] first pair of each expert */
    int *totals;                 /* number of pairs; number of tiles */
    uint64_t *stats;             /* pairs and visits in all runs (see moe_stats) */
    int4 *tiles;                 /* expert, first pair, number of pairs */
    int *pair_row, *pair_expert; /* [pairs] */
    const int *bays;             /* [n] bays of experts, which are then stored in pair_expert; or NULL */
} moe_routes;

/* Outputs of chunks of the vocabulary. */
struct moe_chunks {
    float *max, *sum, *logits; /* [rows, chunks], [rows, chunks, top] */
    int *ids;
    float *plain; /* [slots, vocabulary] for rows with a sampled token, like moe_output_work; or NULL */
    uint32_t *weights;
};

struct moe_device : moe_step_rows {
    moe_allocator allocator;
    moe_log_fn log;
    void *log_user;
    int index;
    char name[128];
    size_t budget, used; /* the budget is 0 (unlimited) after binding, because traces allocate more */
    size_t wanted;       /* bytes needed, including allocations that failed */
    int lacking;         /* 1 if the budget was too small */
    moe_status status;   /* the first failure */
    moe_error error;
    cudaStream_t stream;
    cublasHandle_t cublas; /* NULL if cuBLAS is not usable */
    void **blocks;         /* device memory */
    size_t n_blocks, block_capacity;
    void *pinned;
    /* upload */
    char *stage[2];   /* pinned */
    char *landing[2]; /* on the device */
    cudaEvent_t landed[2];
    int next_stage;
    size_t uploaded, announced, bound_bytes; /* bytes; bound_bytes: uploads during binding */
    int8_t *subs;                            /* sides of one matrix */
    moe_known *known;
    size_t n_known, known_capacity;
    /* graphs */
    moe_graph graphs[2];
    moe_bound *bound[2]; /* [count] */
    size_t rows;         /* the larger capacity of both graphs */
    size_t experts;      /* experts in all layers */
    /* If not all experts fit, the cache assigns bays, and missing experts are fetched from the mapped file when a layer
     * needs them. A bay can hold any expert of any layer, so one cache serves all graphs without fragmentation, since
     * a model's experts hardly differ in size. All bays are allocated when graphs are bound. */
    moe_cache cache; /* cache.bays is 0 if all experts are on the device */
    struct {
        char *slabs; /* [bays, bay_bytes] on the device */
        size_t bay_bytes;
        size_t bytes;               /* host memory for the cache, followed by the arrays for a run of a layer */
        int *order, *place, *first; /* experts with pairs, in processing order; their bays; their first pairs */
        int4 *tiles;                /* pinned: tiles of a run */
        int *plan;                  /* after the tiles: [2, experts of a layer] first pairs, bays */
    } fetching;
    cudaGraphExec_t steps[MOE_BUCKETS];
    int no_graphs;
    /* A frame: pinned memory on the host, one block to upload and one to download. */
    int32_t *up_host, *up; /* all of moe_step_rows except `chain` */
    int32_t *chain_host;   /* only if the device does not search */
    char *down_host, *down;
    size_t down_bytes;
    float *top_logprobs, *want_logprob; /* in `down`, followed by top_ids */
    int32_t *top_ids;
    float *attention;            /* [rows, max_source], never downloaded */
    float *inputs_host, *inputs; /* [rows, input_cols] of a graph with numeric inputs */
    size_t input_cols;
    /* The search, and the sentences that start with the next step, in pinned memory on the host. */
    moe_searching searching;
    struct {
        void *pinned;
        moe_begun *begun_host, *begun;   /* [slots] */
        int32_t *targets_host, *targets; /* where moe_begun.first points; room for every slot's maximum */
        int32_t *results_host;
        size_t n, n_targets; /* number of sentences to start; words in `targets` */
        size_t live, ahead;  /* hypotheses in the next step; given tokens that could join this step */
        size_t words;        /* capacity for results */
        int fresh;           /* 1 if the slots must be cleared first */
    } sentences;
    int *live;        /* on the device: number of the frame's rows that are not fillers */
    size_t live_rows; /* current value of *live */
    /* Scratch. Each array is large enough for every node. */
    int32_t *sums;
    size_t n_sums;
    struct {
        float *z, *c, *h, *r, *r_scales, *h_scales;
        int8_t *r_codes, *h_codes;
    } lstm;
    struct moe_mixing : moe_routes {
        int8_t *inputs, *codes; /* [pairs] codes of the inputs, codes of the hidden units */
        float *input_scales, *code_scales;
        float *units, *out; /* [pairs, hidden], [pairs, D]                           */
        int *host;          /* pinned: `first`, or the number of experts of each row */
    } moe;
    moe_chunks output;
};

static size_t moe_longest(const moe_graph *g) { return moe_max(g->max_source, g->max_target); }
static_assert(MOE_TYPE_COUNT == 9,
              "add a new number format to moe_quantised, moe_weight, moe_lift_matrix, moe_data_bytes");
static int moe_quantised(moe_type type) { return type >= MOE_TYPE_Q8; }

/* Return advice on a CUDA error. */
static const char *moe_advice(cudaError_t code) {
    switch (code) {
    case cudaErrorNoDevice:
        return "check that a GPU is visible (nvidia-smi, CUDA_VISIBLE_DEVICES), or use --device cpu";
    case cudaErrorInsufficientDriver: return "install or update the NVIDIA driver, or use --device cpu";
    case cudaErrorMemoryAllocation: return "use a smaller batch, beam or model, or --device cpu";
    case cudaErrorNoKernelImageForDevice: return "this build has no code for this GPU: set CUDA_ARCH and rebuild";
    default: return "see nvidia-smi and the system log; try a new process, or use --device cpu";
    }
}

static moe_status moe_code(cudaError_t code) {
    return code == cudaErrorMemoryAllocation ? MOE_ERROR_MEMORY
           : code == cudaErrorNoDevice || code == cudaErrorInsufficientDriver || code == cudaErrorNoKernelImageForDevice
               ? MOE_ERROR_UNSUPPORTED
               : MOE_ERROR_DEVICE;
}

/* Record a failure, if any. Returns 1 if no failure has been recorded so far. */
static int moe_check(moe_device *d, cudaError_t code, const char *what) {
    if (d->status == MOE_OK && code != cudaSuccess)
        d->status = moe_fail(&d->error, moe_code(code), what, "cuda:%d: %s: %s; %s", d->index, what,
                             cudaGetErrorString(code), moe_advice(code));
    return d->status == MOE_OK;
}

static int moe_check_blas(moe_device *d, cublasStatus_t code, const char *what) {
    if (d->status == MOE_OK && code != CUBLAS_STATUS_SUCCESS)
        d->status =
            moe_fail(&d->error, code == CUBLAS_STATUS_ALLOC_FAILED ? MOE_ERROR_MEMORY : MOE_ERROR_DEVICE, what,
                     "cuda:%d: cuBLAS: %s: %s; %s", d->index, what, cublasGetStatusString(code),
                     moe_advice(code == CUBLAS_STATUS_ALLOC_FAILED ? cudaErrorMemoryAllocation : cudaErrorUnknown));
    return d->status == MOE_OK;
}

/* Return a * b, or record a failure and return 0 if a * b is too large. The sum of a few results cannot overflow. */
static size_t moe_times(moe_device *d, size_t a, size_t b) {
    if (!b || a <= SIZE_MAX / 32 / b) return a * b;
    if (d->status == MOE_OK)
        d->status = moe_fail(&d->error, MOE_ERROR_ARGUMENT, "device",
                             "these parameters require more memory than is addressable");
    return 0;
}

#define MOE_CUDA_TRY(d, call) ((d)->status == MOE_OK && moe_check(d, call, #call))

static int moe_send(moe_device *d, void *to, const void *from, size_t bytes) {
    return MOE_CUDA_TRY(d, cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, d->stream));
}

/* Download data and wait for its arrival. */
static int moe_receive(moe_device *d, void *to, const void *from, size_t bytes) {
    MOE_CUDA_TRY(d, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, d->stream));
    return MOE_CUDA_TRY(d, cudaStreamSynchronize(d->stream));
}

/* Report the first failure, if any. */
static moe_status moe_outcome(const moe_device *d, moe_error *error) {
    if (d->status != MOE_OK && error) *error = d->error;
    return d->status;
}

/* Allocate zeroed host memory with the session's allocator. Returns NULL after a failure, unless the failure is an
 * exceeded budget: binding then continues, to count the memory needed. */
static void *moe_host(moe_device *d, size_t bytes, const char *what) {
    void *memory =
        d->status == MOE_OK || d->lacking ? d->allocator.allocate(d->allocator.user, bytes ? bytes : 1) : NULL;
    if (memory) memset(memory, 0, bytes);
    else if (d->status == MOE_OK) d->status = moe_fail(&d->error, MOE_ERROR_MEMORY, what, "out of memory for %s", what);
    return memory;
}

/* Fail because there is too little memory; `all` is the memory needed for all experts, or 0. */
static void moe_lack(moe_device *d, size_t least, size_t all, size_t limit, const char *what) {
    char rest[64] = "";
    if (all) snprintf(rest, sizeof rest, " (%zu MB to hold all experts)", (all >> 20) + 1);
    d->status =
        moe_fail(&d->error, MOE_ERROR_MEMORY, what, "cuda:%d: needs at least %zu MB%s, but %zu MB are %s%s", d->index,
                 (least >> 20) + 1, rest, limit >> 20, limit == d->budget ? "allowed; allow more, or " : "free; ",
                 moe_advice(cudaErrorMemoryAllocation));
}

/* Allocate count * size bytes of device memory; returns NULL after a failure. */
static void *moe_acquire(moe_device *d, size_t count, size_t size, const char *what) {
    size_t bytes, available = 0, total = 0;
    void *memory = NULL;
    cudaError_t code;
    if (count > SIZE_MAX / 2 / size) {
        if (d->status == MOE_OK)
            d->status = moe_fail(&d->error, MOE_ERROR_ARGUMENT, what,
                                 "these parameters require more memory than is addressable");
        return NULL;
    }
    bytes = count > 0 ? count * size : 1;
    d->wanted += bytes < SIZE_MAX - d->wanted ? bytes : SIZE_MAX - d->wanted;
    if (d->status != MOE_OK) return NULL;
    if (d->n_blocks == d->block_capacity) {
        d->status = moe_fail(&d->error, MOE_ERROR_ARGUMENT, what, "the model has too many tensors for this device");
        return NULL;
    }
    if (d->budget && bytes > d->budget - d->used) {
        d->lacking = 1;
        moe_lack(d, d->wanted, 0, d->budget, what);
        return NULL;
    }
    code = cudaMalloc(&memory, bytes);
    if (code != cudaSuccess) {
        cudaGetLastError(); /* clear CUDA's copy of the error */
        cudaMemGetInfo(&available, &total);
        d->status =
            moe_fail(&d->error, moe_code(code), what,
                     "cuda:%d: %s: %zu MB more needed for %s; %zu of %zu MB are free; %s", d->index,
                     cudaGetErrorString(code), (bytes >> 20) + 1, what, available >> 20, total >> 20, moe_advice(code));
        return NULL;
    }
    d->blocks[d->n_blocks++] = memory;
    d->used += bytes;
    return memory;
}

/* Release device memory. */
static void moe_give(moe_device *d, void *memory, size_t bytes) {
    size_t i = d->n_blocks;
    while (d->blocks[--i] != memory) {}
    d->blocks[i] = d->blocks[--d->n_blocks];
    d->used -= bytes;
    cudaFree(memory);
}

/* ---- Uploads of weights ---- */

static void moe_announce(moe_device *d) {
    char message[128];
    if (!d->log || d->uploaded - d->announced < (size_t)1 << 30) return;
    d->announced = d->uploaded;
    snprintf(message, sizeof message, "uploaded %zu MB of weights to cuda:%d", d->uploaded >> 20, d->index);
    d->log(d->log_user, message);
}

/* Copy up to MOE_STAGE_BYTES to a pinned buffer and start the upload to `to` or, if `to` is NULL, to a staging buffer.
 * Returns the staging buffer. */
static char *moe_lift(moe_device *d, const void *from, size_t bytes, void *to) {
    const int i = d->next_stage;
    if (!MOE_CUDA_TRY(d, cudaEventSynchronize(d->landed[i]))) return NULL;
    d->next_stage = !i;
    memcpy(d->stage[i], from, bytes);
    moe_send(d, to ? to : d->landing[i], d->stage[i], bytes);
    if (to) MOE_CUDA_TRY(d, cudaEventRecord(d->landed[i], d->stream));
    d->uploaded += bytes;
    return d->landing[i];
}

static void moe_upload_to(moe_device *d, void *to, const void *from, size_t bytes) {
    for (size_t at = 0, n; at < bytes && d->status == MOE_OK; at += n) {
        n = moe_min(bytes - at, MOE_STAGE_BYTES);
        moe_lift(d, (const char *)from + at, n, (char *)to + at);
    }
}

static void *moe_upload(moe_device *d, const void *from, size_t bytes, const char *what) {
    void *to = moe_acquire(d, bytes, 1, what);
    if (to) moe_upload_to(d, to, from, bytes);
    return to;
}

/* ---- Bays of experts ---- */

/* Allocate as many bays of `bay_bytes` as fit in `room`. A layer has up to `most` experts and `tiles` tiles. */
static void moe_take_bays(moe_device *d, size_t bay_bytes, size_t room, size_t most, size_t tiles) {
    const size_t bays = moe_min(room / bay_bytes, d->experts);
    const size_t bytes = moe_cache_bytes(d->experts, bays); /* cannot overflow: all these bytes exist in a file */
    const size_t transit = moe_min(moe_max(bays / 16, 1), MOE_TRANSIT);
    char *memory;
    d->fetching.bay_bytes = bay_bytes;
    d->fetching.slabs = (char *)moe_acquire(d, bays, bay_bytes, "experts");
    d->fetching.bytes = bytes + (3 * most + 1) * sizeof(int);
    memory = (char *)moe_host(d, d->fetching.bytes, "the cache of experts");
    if (memory) moe_cache_begin(&d->cache, memory, d->experts, bays, transit);
    MOE_CUDA_TRY(d, cudaMallocHost((void **)&d->fetching.tiles, tiles * sizeof(int4) + 2 * most * sizeof(int)));
    if (d->status != MOE_OK) return;
    d->fetching.plan = (int *)(void *)(d->fetching.tiles + tiles);
    d->fetching.order = (int *)(void *)(memory + bytes);
    d->fetching.place = d->fetching.order + most;
    d->fetching.first = d->fetching.place + most;
}

/* ==== 2. Kernels ==============================================================================================
 * The arithmetic. Invariant: a kernel computes the outputs of a row only from that row's inputs, and returns the same
 * bits as the function of moe.c named in its comment ("Like moe_..."). */

enum {
    MOE_BLOCK = 128,    /* default number of threads per block */
    MOE_OFFSETS = 1024, /* experts per block when counting pairs */
    MOE_TILE = 8        /* maximum rows of a product's tile */
};

MOE_DEVICE float moe_mul(float a, float b) { return __fmul_rn(a, b); }
MOE_DEVICE float moe_add(float a, float b) { return __fadd_rn(a, b); }
MOE_DEVICE float moe_sub(float a, float b) { return __fsub_rn(a, b); }
MOE_DEVICE float moe_div(float a, float b) { return __fdiv_rn(a, b); }
MOE_DEVICE float moe_infinity(void) { return __uint_as_float(0x7f800000u); }

/* Return element `at` of a float matrix. */
MOE_DEVICE float moe_weight(const void *w, moe_type type, size_t at) {
    if (type == MOE_TYPE_F32) return ((const float *)w)[at];
    if (type == MOE_TYPE_F16) return moe_f16_to_f32(((const uint16_t *)w)[at]);
    return __uint_as_float((uint32_t)((const uint16_t *)w)[at] << 16);
}

/* ---- Collective work: all MOE_BLOCK threads of a block call these functions and get the result ---- */

/* Find the best value; the lower index wins ties; -infinity with INT_MAX means none. Two barriers suffice: `all` is
 * overwritten only after the second barrier, and `few` only after the first barrier of the next call. */
MOE_DEVICE void moe_block_best(float *value, int *index) {
    __shared__ float all[MOE_BLOCK], few[16];
    __shared__ int all_index[MOE_BLOCK], few_index[16];
    const int t = (int)threadIdx.x;
    float best = -moe_infinity();
    int at = INT_MAX;
    all[t] = *value;
    all_index[t] = *index;
    __syncthreads();
    if (t < 16) {
        for (int i = t * (MOE_BLOCK / 16); i < (t + 1) * (MOE_BLOCK / 16); i++)
            if (all[i] > best || (all[i] == best && all_index[i] < at)) best = all[i], at = all_index[i];
        few[t] = best;
        few_index[t] = at;
    }
    __syncthreads();
    best = few[0];
    at = few_index[0];
    for (int i = 1; i < 16; i++)
        if (few[i] > best || (few[i] == best && few_index[i] < at)) best = few[i], at = few_index[i];
    *value = best;
    *index = at;
}

/* Like moe_max_portable: return the maximum, ignoring NaN; +0 for both zeros. */
MOE_DEVICE float moe_block_max(const float *x, int n) {
    float best = -moe_infinity();
    int unused = 0;
    for (int i = (int)threadIdx.x; i < n; i += MOE_BLOCK) best = x[i] > best ? x[i] : best;
    moe_block_best(&best, &unused);
    return moe_add(best, 0.0f);
}

/* Return the sum of x[n] in lane order; x must have been written before a barrier. */
MOE_DEVICE float moe_block_sum(const float *x, int n) {
    __shared__ float lanes[MOE_LANES];
    const int t = (int)threadIdx.x;
    float sum = 0.0f;
    if (t < MOE_LANES) {
        for (int i = t; i < n; i += MOE_LANES) sum = moe_add(sum, x[i]);
        lanes[t] = sum;
    }
    __syncthreads();
    sum = moe_join_lanes(lanes);
    __syncthreads();
    return sum;
}

/* Compute p = softmax(x), both [n]; p may be x. */
MOE_DEVICE void moe_block_softmax(const float *x, int n, float *p) {
    const float max = moe_block_max(x, n);
    float sum;
    for (int i = (int)threadIdx.x; i < n; i += MOE_BLOCK) p[i] = moe_expf(moe_sub(x[i], max));
    __syncthreads();
    sum = moe_block_sum(p, n);
    for (int i = (int)threadIdx.x; i < n; i += MOE_BLOCK) p[i] = moe_div(p[i], sum);
    __syncthreads();
}

/* Return the sum of `mine` over the preceding threads; *total is the sum over all threads. */
MOE_DEVICE int moe_block_before(int mine, int *total) {
    __shared__ int counts[MOE_BLOCK];
    const int t = (int)threadIdx.x;
    int before = 0, all = 0;
    __syncthreads();
    counts[t] = mine;
    __syncthreads();
    for (int i = 0; i < MOE_BLOCK; i++) {
        before += i < t ? counts[i] : 0;
        all += counts[i];
    }
    *total = all;
    return before;
}

/* Return the first item of thread t if n items are divided evenly among the threads. */
MOE_DEVICE int moe_share(int n, int t) {
    const int at = t * ((n + MOE_BLOCK - 1) / MOE_BLOCK);
    return at < n ? at : n;
}

/* ---- Weights ---- */

/* Return the address of an expert's weights, scales or parts. */
MOE_DEVICE const char *moe_expert_data(const moe_weights *w, int expert) {
    return (const char *)w->data + (size_t)expert * w->step;
}
MOE_DEVICE const float *moe_expert_scales(const moe_weights *w, int expert) {
    return (const float *)(const void *)((const char *)w->scales + (size_t)expert * w->step);
}

MOE_DEVICE const float *moe_expert_parts(const moe_weights *w, int expert) {
    return moe_expert_scales(w, expert) + w->rows_padded;
}

/* Reorder units of four codes from the Q8 layout [n/16][k/4][16][4] to rows. */
__global__ void moe_k_unpack_q8(const uint32_t *from, size_t first_unit, size_t units, size_t cols_padded, int8_t *to) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, unit = first_unit + i, groups = cols_padded / 4;
    if (i < units) {
        const size_t row = unit / (groups * 16) * 16 + unit % 16, group = unit / 16 % groups;
        *(uint32_t *)(void *)(to + row * cols_padded + group * 4) = from[i];
    }
}

/* Expand groups of 32 columns of a row from the layout of Q4, Q3 or Q2; `from` starts with the group `first` of 16
 * rows. Every 64 columns have `sides` rows of subs and, for Q4M, mids. */
__global__ void moe_k_unpack(const uint8_t *from, size_t first, size_t n, size_t bits, size_t cols_padded,
                             const int8_t *subs, size_t sides, int8_t *to) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, group = first + i / 16, groups = cols_padded / 32;
    if (i < n) {
        const uint8_t *at = from + i / 16 * 64 * bits + i % 16 * 4;
        const int8_t *side = subs + (group / 2 * sides + group % 2) * 16 + i % 16;
        const int sub = side[0], mid = sides > 2 ? side[32] : 0;
        int8_t *out = to + (group / groups * 16 + i % 16) * cols_padded + group % groups * 32;
        for (size_t c = 0; c < 32; c++) out[c] = (int8_t)(moe_level(at + c % 4, bits, c / 4) * sub + mid);
    }
}

/* Convert parts (F16 scales), stored in the last two of the `sides` rows, to floats [rows, cols_padded / 64]. */
__global__ void moe_k_unpack_parts(const int8_t *from, size_t sides, size_t n, size_t cols_padded, float *to) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, units = cols_padded / 64;
    if (i < n) {
        const size_t row = i / units;
        const int8_t *low = from + ((row / 16 * units + i % units + 1) * sides - 2) * 16 + row % 16;
        to[i] = moe_f16_to_f32((uint16_t)((uint8_t)low[0] | (uint8_t)low[16] << 8));
    }
}

/* ---- Rows ---- */

__global__ void moe_k_set(int *to, int value) {
    if (threadIdx.x == 0) *to = value;
}

/* Embed ids and, unless `rows` is NULL, add the row of each id's position. `rows` is [positions, columns]. */
__global__ void moe_k_embed(moe_weights table, const int32_t *ids, float factor, const float *rows,
                            const int32_t *positions, float *y, size_t y_stride) {
    const size_t row = blockIdx.x, id = (size_t)ids[row];
    for (int c = (int)threadIdx.x; c < table.cols; c += MOE_BLOCK) {
        const size_t at = id * table.stride + (size_t)c;
        float scale = table.scales ? table.scales[id] : 1.0f, v;
        if (table.type == MOE_TYPE_Q8B)
            scale = moe_mul(scale, moe_expert_parts(&table, 0)[id * (table.stride / 64) + (size_t)c / 64]);
        v = table.scales ? moe_mul((float)((const int8_t *)table.data)[at], scale)
                         : moe_weight(table.data, table.type, at);
        const float scaled = moe_mul(v, factor);
        y[row * y_stride + (size_t)c] =
            rows ? moe_add(scaled, rows[(size_t)positions[row] * (size_t)table.cols + (size_t)c]) : scaled;
    }
}

/* Return the offset of the scales of a row's blocks of 64 codes. */
MOE_DEVICE size_t moe_scales_at(size_t cols_padded) { return cols_padded / 16 * 17; }

/* Like moe_quantise_portable or, if `scales` is NULL, moe_quantise_blocks without the sums. Blocks have `span` columns.
 * `count`, unless NULL, points to the number of rows on the device. */
__global__ void moe_k_quantise(const float *x, size_t x_stride, int cols, int padded, int span, int8_t *q,
                               size_t q_stride, float *scales, const int *count) {
    const size_t parts = (size_t)(padded / span), row = blockIdx.x / parts, part = blockIdx.x % parts;
    float largest = 0.0f, broken = 0.0f, inverse;
    int unused = 0;
    if (count && (int)row >= *count) return; /* all threads of the block return together */
    x += row * x_stride + part * (size_t)span;
    q += row * q_stride;
    scales = scales ? scales + row : (float *)(void *)(q + moe_scales_at((size_t)padded)) + part;
    q += part * (size_t)span;
    cols -= (int)part * span;
    if (cols > span) cols = span;
    for (int c = (int)threadIdx.x; c < cols; c += MOE_BLOCK) {
        const float a = __uint_as_float(__float_as_uint(x[c]) & 0x7fffffffu);
        if (a > largest) largest = a;
        if (!(a <= FLT_MAX)) broken = 1.0f;
    }
    moe_block_best(&largest, &unused);
    moe_block_best(&broken, &unused);
    inverse = moe_div(127.0f, largest);
    if (!(inverse <= FLT_MAX)) inverse = FLT_MAX;
    if (broken != 0.0f || largest < FLT_MIN) cols = 0;
    for (int c = (int)threadIdx.x; c < span; c += MOE_BLOCK) {
        int v = 0;
        if (c < cols) v = (int)(__float_as_uint(moe_add(moe_mul(x[c], inverse), MOE_ROUND_MAGIC)) - 0x4b400000u);
        q[c] = (int8_t)(v > 127 ? 127 : v < -127 ? -127 : v);
    }
    if (threadIdx.x == 0)
        *scales = broken != 0.0f ? __uint_as_float(0x7fc00000u) : largest < FLT_MIN ? 0.0f : moe_div(largest, 127.0f);
}

__global__ void moe_k_pointwise(const float *a, size_t a_stride, const float *b, size_t b_stride, int b_cols,
                                int product, int cols, float *y, size_t y_stride) {
    const size_t row = blockIdx.x;
    for (size_t c = threadIdx.x; c < (size_t)cols; c += MOE_BLOCK) {
        const float left = a[row * a_stride + c], right = b[row * b_stride + (b_cols < cols ? 0 : c)];
        y[row * y_stride + c] = product ? moe_mul(left, right) : moe_add(left, right);
    }
}

__global__ void moe_k_concat(const float *a, size_t a_stride, int a_cols, const float *b, size_t b_stride, int b_cols,
                             float *y, size_t y_stride) {
    const size_t row = blockIdx.x, n = (size_t)a_cols;
    for (size_t c = threadIdx.x; c < n + (size_t)b_cols; c += MOE_BLOCK)
        y[row * y_stride + c] = c < n ? a[row * a_stride + c] : b[row * b_stride + c - n];
}

/* Like moe_compute_ssru_row: one block per row. The block also computes the rows that continue from this row. */
__global__ void moe_k_ssru(const float *u, size_t u_stride, const float *f, size_t f_stride, const float *before,
                           size_t before_stride, const int32_t *parents, int cols, float *y, size_t y_stride) {
    if (parents[blockIdx.x] == MOE_ROW_ABOVE) return;
    for (size_t i = threadIdx.x; i < (size_t)cols; i += MOE_BLOCK) {
        size_t row = blockIdx.x;
        float c = before[row * before_stride + i];
        do {
            const float forget = f[row * f_stride + i];
            c = moe_add(moe_mul(forget, c), moe_mul(moe_sub(1.0f, forget), u[row * u_stride + i]));
            y[row * y_stride + i] = c < 0.0f ? 0.0f : c;
            y[row * y_stride + (size_t)cols + i] = c;
        } while (++row < gridDim.x && parents[row] == MOE_ROW_ABOVE);
    }
}

/* Like moe_compute_average_row, with the blocks of moe_k_ssru. */
__global__ void moe_k_average(const float *x, size_t x_stride, const float *before, size_t before_stride,
                              const int32_t *parents, const int32_t *positions, int cols, float *y, size_t y_stride) {
    if (parents[blockIdx.x] == MOE_ROW_ABOVE) return;
    for (size_t i = threadIdx.x; i < (size_t)cols; i += MOE_BLOCK) {
        size_t row = blockIdx.x;
        float sum = before[row * before_stride + i];
        do {
            sum = moe_add(sum, x[row * x_stride + i]);
            y[row * y_stride + i] = moe_div(sum, (float)(positions[row] + 1));
            y[row * y_stride + (size_t)cols + i] = sum;
        } while (++row < gridDim.x && parents[row] == MOE_ROW_ABOVE);
    }
}

__global__ void moe_k_unary(moe_unary what, const float *x, size_t x_stride, int cols, float *y, size_t y_stride) {
    const size_t row = blockIdx.x;
    for (size_t c = threadIdx.x; c < (size_t)cols; c += MOE_BLOCK)
        y[row * y_stride + c] = moe_unaryf(what, x[row * x_stride + c]);
}

/* Like moe_norm_row; y may be x. */
MOE_DEVICE void moe_block_norm(const float *x, int cols, const float *weight, const float *bias, float epsilon, int rms,
                               float *y) {
    __shared__ float lanes[MOE_LANES];
    const int t = (int)threadIdx.x;
    float mean, scale;
    mean = rms ? 0.0f : moe_div(moe_block_sum(x, cols), (float)cols);
    if (t < MOE_LANES) {
        float sum = 0.0f;
        for (int i = t; i < cols; i += MOE_LANES) {
            const float d = moe_sub(x[i], mean);
            sum = moe_add(sum, moe_mul(d, d));
        }
        lanes[t] = sum;
    }
    __syncthreads();
    scale = moe_div(1.0f, __fsqrt_rn(moe_add(moe_div(moe_join_lanes(lanes), (float)cols), epsilon)));
    for (int c = t; c < cols; c += MOE_BLOCK) {
        const float scaled = moe_mul(moe_mul(moe_sub(x[c], mean), scale), weight[c]);
        y[c] = bias ? moe_add(scaled, bias[c]) : scaled;
    }
}

/* Like moe_compute_norm_row. */
__global__ void moe_k_norm(const float *x, size_t x_stride, int cols, const float *weight, const float *bias,
                           float epsilon, int rms, float *y, size_t y_stride) {
    moe_block_norm(x + blockIdx.x * x_stride, cols, weight, bias, epsilon, rms, y + blockIdx.x * y_stride);
}

/* Like moe_compute_rotary_row: one block per head of a row, including heads of values. */
__global__ void moe_k_rotary(moe_rotary_op o, const float *query_norm, const float *key_norm, const float *table,
                             size_t turned, const int32_t *positions, const float *x, size_t x_stride, float *y,
                             size_t y_stride) {
    const size_t heads = o.queries + 2 * o.keys, head = blockIdx.x % heads, row = blockIdx.x / heads;
    const float *norm = head < o.queries ? query_norm : head < o.queries + o.keys ? key_norm : NULL;
    const size_t half = turned / 2;
    x += row * x_stride + head * o.width;
    y += row * y_stride + head * o.width;
    if (norm && !o.norm_last) moe_block_norm(x, (int)o.width, norm, NULL, o.epsilon, 1, y);
    if (norm && !o.norm_last) x = y;
    __syncthreads();
    if (table && head < o.queries + o.keys) {
        table += (size_t)positions[row] * turned;
        for (size_t i = threadIdx.x; i < half; i += MOE_BLOCK) {
            const float a = x[i], b = x[half + i], c = table[i], sine = table[half + i];
            y[i] = moe_sub(moe_mul(a, c), moe_mul(b, sine));
            y[half + i] = moe_add(moe_mul(b, c), moe_mul(a, sine));
        }
        for (size_t i = turned + threadIdx.x; i < o.width && x != y; i += MOE_BLOCK) y[i] = x[i];
        x = y;
    }
    __syncthreads();
    if (norm && o.norm_last) moe_block_norm(x, (int)o.width, norm, NULL, o.epsilon, 1, y);
    else
        for (size_t i = threadIdx.x; i < o.width && x != y; i += MOE_BLOCK) y[i] = x[i];
}

/* Like moe_gate_units: one block per row of the first *count rows. */
__global__ void moe_k_gate_units(float *x, size_t stride, int n, const int *count) {
    if (count && (int)blockIdx.x >= *count) return;
    x += blockIdx.x * stride;
    for (int i = (int)threadIdx.x; i < n; i += MOE_BLOCK) x[i] = moe_mul(moe_unaryf(MOE_UNARY_SWISH, x[i]), x[n + i]);
}

/* Copy row from[r] of x to row r of y. If from[r] is -1, write zeros; if `from` is NULL, copy row r. */
__global__ void moe_k_gather(const float *x, size_t x_stride, const int32_t *from, int cols, float *y,
                             size_t y_stride) {
    const size_t row = blockIdx.x;
    const int32_t parent = from ? from[row] : (int32_t)row;
    for (size_t c = threadIdx.x; c < (size_t)cols; c += MOE_BLOCK)
        y[row * y_stride + c] = parent < 0 ? 0.0f : x[(size_t)parent * x_stride + c];
}

/* Copy row from[r] of x to row to[r] of y, unless to[r] is negative. If `from` or `to` is NULL, use r instead. */
__global__ void moe_k_scatter(const float *x, size_t x_stride, const int32_t *from, const int32_t *to, int cols,
                              float *y, size_t y_stride) {
    const size_t row = blockIdx.x, source = from ? (size_t)from[row] : row, at = to ? (size_t)to[row] : row;
    for (size_t c = threadIdx.x; c < (size_t)cols && !(to && to[row] < 0); c += MOE_BLOCK)
        y[at * y_stride + c] = x[source * x_stride + c];
}

/* Store row r of x as carried row to[r], one group per thread, unless to[r] is negative. */
__global__ void moe_k_keep(const float *x, size_t x_stride, const int32_t *to, moe_keep keep, char *y) {
    const size_t row = blockIdx.x;
    for (size_t group = threadIdx.x; group < keep.cols / keep.group && to[row] >= 0; group += MOE_BLOCK)
        moe_keep_group(&keep, x + row * x_stride + group * keep.group, group,
                       y + (size_t)to[row] * moe_keep_bytes(&keep));
}

/* Like moe_lstm_cell_portable; c_in may be c_out. */
__global__ void moe_k_lstm_cell(const float *z, size_t z_stride, const float *c_in, size_t c_in_stride, int hidden,
                                float forget_bias, float *h, size_t h_stride, float *c_out, size_t c_out_stride) {
    const size_t row = blockIdx.x, n = (size_t)hidden;
    z += row * z_stride;
    for (size_t j = threadIdx.x; j < n; j += MOE_BLOCK) {
        const float i = moe_sigmoidf(z[j]), f = moe_sigmoidf(moe_add(z[n + j], forget_bias));
        const float g = moe_tanhf(z[2 * n + j]), o = moe_sigmoidf(z[3 * n + j]);
        const float c = moe_add(moe_mul(f, c_in[row * c_in_stride + j]), moe_mul(i, g));
        c_out[row * c_out_stride + j] = c;
        h[row * h_stride + j] = moe_mul(o, moe_tanhf(c));
    }
}

/* ---- Products ---- */

/* A product y[r][j] = dot(x[r], w[j]) + addend, optionally with relu, in tiles of MOE_TILE rows. For experts, each of
 * *n_tiles tiles has an expert (or bay), first pair and number of pairs; pair i reads row x_rows[i], writes row i. */
typedef struct moe_products {
    moe_weights w;
    const void *x;               /* codes or floats */
    size_t x_stride;             /* in bytes or floats */
    const float *x_scales;       /* NULL if each block of 64 codes has a scale */
    int rows;                    /* number of rows; unused for experts */
    const int *x_rows, *n_tiles; /* experts only; if x_rows is NULL, pair i reads row i */
    const int4 *tiles;
    int tiles_at_most;       /* maximum number of tiles; exact if n_tiles is NULL */
    const float *bias, *add; /* bias of the first expert; other experts follow every w.step bytes */
    size_t add_stride;
    int relu;
    float *y;
    size_t y_stride;
} moe_products;

/* Return the tile of a block: expert (x), first row or pair (y), number of rows (z). z is 0 if there is no tile. */
MOE_DEVICE int4 moe_tile_of(const moe_products *p) {
    const int tile = (int)(blockIdx.x % (unsigned)p->tiles_at_most);
    const int row = tile * MOE_TILE;
    int4 t = { 0, row, p->rows - row < MOE_TILE ? p->rows - row : MOE_TILE, 0 };
    if (p->tiles) t = p->tiles[tile];
    if (p->tiles && p->n_tiles && tile >= *p->n_tiles) t.z = 0;
    return t;
}

MOE_DEVICE const float *moe_expert_bias(const moe_products *p, int expert) {
    return (const float *)(const void *)((const char *)p->bias + (size_t)expert * p->w.step);
}

MOE_DEVICE void moe_finish(const moe_products *p, int expert, size_t row, size_t j, float product) {
    const float *bias = p->bias ? moe_expert_bias(p, expert) : NULL;
    const float addend = bias ? bias[j] : p->add ? p->add[row * p->add_stride + j] : 0.0f, y = moe_add(product, addend);
    p->y[row * p->y_stride + j] = p->relu ? moe_reluf(y) : y;
}

enum { MOE_WARPS = MOE_BLOCK / 32, MOE_WARP_OUTPUTS = 4 };

/* Find a tile's rows of codes. If the tile has fewer than MOE_TILE rows, repeat the last row. */
MOE_DEVICE void moe_tile_rows(const moe_products *p, int4 tile, const int8_t *x[MOE_TILE]) {
    MOE_UNROLL
    for (int r = 0; r < MOE_TILE; r++) {
        const int at = tile.y + (r < tile.z ? r : tile.z - 1);
        x[r] = (const int8_t *)p->x + (size_t)(p->x_rows ? p->x_rows[at] : at) * p->x_stride;
    }
}

/* Add the products of 16 columns from column k on to acc. */
MOE_DEVICE void moe_multiply_codes(const moe_products *p, const int8_t *w, const int8_t *const x[MOE_TILE], size_t k,
                                   int acc[MOE_TILE][MOE_WARP_OUTPUTS]) {
    int4 v[MOE_WARP_OUTPUTS];
    MOE_UNROLL
    for (int o = 0; o < MOE_WARP_OUTPUTS; o++) v[o] = *(const int4 *)(const void *)(w + (size_t)o * p->w.stride + k);
    MOE_UNROLL
    for (int r = 0; r < MOE_TILE; r++) {
        const int4 u = *(const int4 *)(const void *)(x[r] + k);
        MOE_UNROLL
        for (int o = 0; o < MOE_WARP_OUTPUTS; o++)
            acc[r][o] = __dp4a(u.x, v[o].x, __dp4a(u.y, v[o].y, __dp4a(u.z, v[o].z, __dp4a(u.w, v[o].w, acc[r][o]))));
    }
}

/* Multiply codes. A warp computes 4 outputs for the rows of a tile; each of its threads takes every 32nd group of 16
 * columns. Thread t then adds up the sums of result t: once at the end or, for sums by block, after every 512 columns,
 * in the order of the blocks. Thread blocks of the same outputs are adjacent, so weights are read once. */
__global__ void moe_k_products(moe_products p) {
    enum { OUTPUTS = MOE_WARP_OUTPUTS, SPAN = 512, THREADS = 64 / 16 };
    __shared__ int sums[MOE_WARPS][32][MOE_TILE * OUTPUTS + 1];
    const int4 tile = moe_tile_of(&p);
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int first = ((int)(blockIdx.x / (unsigned)p.tiles_at_most) * MOE_WARPS + warp) * OUTPUTS;
    const int8_t *w = (const int8_t *)moe_expert_data(&p.w, tile.x) + (size_t)first * p.w.stride, *x[MOE_TILE];
    const size_t row = (size_t)(tile.y + lane / OUTPUTS), j = (size_t)(first + lane % OUTPUTS);
    const int there = lane / OUTPUTS < tile.z && first + lane % OUTPUTS < p.w.rows;
    const size_t x_row = there && p.x_rows ? (size_t)p.x_rows[row] : row;
    const float *scales =
        (const float *)(const void *)((const int8_t *)p.x + x_row * p.x_stride + moe_scales_at(p.w.stride));
    const float *parts =
        p.w.type == MOE_TYPE_Q8B ? moe_expert_parts(&p.w, tile.x) + (there ? j : 0) * (p.w.stride / 64) : NULL;
    const int by_block = !p.x_scales || parts;
    int acc[MOE_TILE][OUTPUTS], sum = 0;
    float total = 0.0f;
    if (tile.z == 0) return; /* all threads of the block return together */
    moe_tile_rows(&p, tile, x);
    for (int r = 0; r < MOE_TILE; r++)
        for (int o = 0; o < OUTPUTS; o++) acc[r][o] = 0;
    for (size_t k0 = 0; k0 < p.w.stride; k0 += SPAN) {
        const size_t k = k0 + (size_t)lane * 16;
        if (first < p.w.rows_padded && k < p.w.stride) moe_multiply_codes(&p, w, x, k, acc);
        if (!by_block && k0 + SPAN < p.w.stride) continue;
        MOE_UNROLL
        for (int r = 0; r < MOE_TILE; r++) MOE_UNROLL
        for (int o = 0; o < OUTPUTS; o++) sums[warp][lane][r * OUTPUTS + o] = acc[r][o], acc[r][o] = 0;
        __syncthreads();
        for (int i = 0; i < 32; i++) {
            sum += sums[warp][i][lane];
            if (!by_block || i % THREADS < THREADS - 1) continue;
            if (there && k0 + (size_t)i * 16 < p.w.stride) {
                const size_t at = k0 / 64 + (size_t)(i / THREADS);
                const float scale = p.x_scales ? p.x_scales[x_row] : scales[at];
                total = moe_add(total, moe_mul((float)sum, parts ? moe_mul(scale, parts[at]) : scale));
            }
            sum = 0;
        }
        __syncthreads();
    }
    if (there)
        moe_finish(&p, tile.x, row, j,
                   by_block ? moe_mul(total, moe_expert_scales(&p.w, tile.x)[j])
                            : moe_mul((float)sum, moe_mul(p.x_scales[x_row], moe_expert_scales(&p.w, tile.x)[j])));
}

/* Multiply floats. A block computes 32 outputs for the rows of a tile, 64 columns at a time; a thread computes one
 * output of two rows. */
__global__ void moe_k_float_products(moe_products p) {
    enum { OUTPUTS = 32, COLUMNS = 64, ROWS = MOE_TILE / 4 };
    __shared__ float w[OUTPUTS][COLUMNS + 1], x[MOE_TILE][COLUMNS];
    const int4 tile = moe_tile_of(&p);
    const int t = (int)threadIdx.x, output = t % OUTPUTS, group = t / OUTPUTS;
    const int first = (int)(blockIdx.x / (unsigned)p.tiles_at_most) * OUTPUTS;
    const void *weights = moe_expert_data(&p.w, tile.x);
    float lanes[ROWS][MOE_LANES];
    if (tile.z == 0) return; /* all threads of the block return together */
    MOE_UNROLL
    for (int r = 0; r < ROWS; r++) MOE_UNROLL
    for (int l = 0; l < MOE_LANES; l++) lanes[r][l] = 0.0f;
    for (int k0 = 0; k0 < p.w.cols; k0 += COLUMNS) {
        for (int i = t; i < OUTPUTS * COLUMNS; i += MOE_BLOCK) {
            const int j = first + i / COLUMNS, k = k0 + i % COLUMNS;
            w[i / COLUMNS][i % COLUMNS] =
                j < p.w.rows && k < p.w.cols ? moe_weight(weights, p.w.type, (size_t)j * p.w.stride + (size_t)k) : 0.0f;
        }
        for (int i = t; i < MOE_TILE * COLUMNS; i += MOE_BLOCK) {
            const int r = i / COLUMNS, k = k0 + i % COLUMNS, at = tile.y + r;
            x[r][i % COLUMNS] =
                r < tile.z && k < p.w.cols
                    ? ((const float *)p.x)[(size_t)(p.x_rows ? p.x_rows[at] : at) * p.x_stride + (size_t)k]
                    : 0.0f;
        }
        __syncthreads();
        for (int k = 0; k < COLUMNS; k += MOE_LANES) MOE_UNROLL
        for (int l = 0; l < MOE_LANES; l++) MOE_UNROLL
        for (int r = 0; r < ROWS; r++)
            lanes[r][l] = moe_add(lanes[r][l], moe_mul(x[group * ROWS + r][k + l], w[output][k + l]));
        __syncthreads();
    }
    MOE_UNROLL
    for (int r = 0; r < ROWS; r++)
        if (group * ROWS + r < tile.z && first + output < p.w.rows)
            moe_finish(&p, tile.x, (size_t)(tile.y + group * ROWS + r), (size_t)(first + output),
                       moe_join_lanes(lanes[r]));
}

/* Convert integer sums from cuBLAS to outputs. sums [rows, w.rows_padded] starts at row or pair `row0`; `experts`,
 * unless NULL, contains the expert of each pair. */
__global__ void moe_k_finish(moe_products p, const int32_t *sums, int row0, const int *experts) {
    const size_t at = blockIdx.x, row = at + (size_t)row0;
    const int expert = experts ? experts[row] : 0;
    const float *scales = moe_expert_scales(&p.w, expert);
    const float scale = p.x_scales[row];
    for (size_t j = threadIdx.x; j < (size_t)p.w.rows; j += MOE_BLOCK)
        moe_finish(&p, expert, row, j,
                   moe_mul((float)sums[at * (size_t)p.w.rows_padded + j], moe_mul(scale, scales[j])));
}

/* ---- Attention ---- */

typedef struct moe_attending : moe_step_rows {
    const float *query, *v, *keys, *values;
    size_t query_stride;
    int size, width;
    int product, start_zero;
    int begins;          /* parents < 0 or >= `begins` mark the start of a sentence */
    const float *before; /* contexts of rows that do not start a sentence, or NULL */
    size_t before_stride;
    float *scores; /* [rows, max_source] */
    size_t max_source;
    float *y;
    size_t y_stride;
} moe_attending;

/* Like moe_compute_attention_row: 16 threads, one per lane, for each position; softmax; then one thread per column. */
__global__ void moe_k_attention(moe_attending a) {
    __shared__ float lanes[MOE_BLOCK / MOE_LANES][MOE_LANES];
    const size_t row = blockIdx.x, size = (size_t)a.size, width = (size_t)a.width;
    const int t = (int)threadIdx.x, n = a.length[row], group = t / MOE_LANES, lane = t % MOE_LANES;
    const float *query = a.query + row * a.query_stride, *keys = a.keys + (size_t)a.segment[row] * size;
    const float *values = a.values + (size_t)a.segment[row] * width;
    float *scores = a.scores + row * a.max_source;
    const int begins = a.parents[row] < 0 || a.parents[row] >= a.begins; /* equal in all threads of the block */
    if (a.before && !begins) {
        for (size_t c = (size_t)t; c < width; c += MOE_BLOCK)
            a.y[row * a.y_stride + c] = a.before[row * a.before_stride + c];
        return;
    }
    if (a.start_zero && begins) {
        for (int i = t; i < n; i += MOE_BLOCK) scores[i] = 0.0f;
        for (size_t c = (size_t)t; c < width; c += MOE_BLOCK) a.y[row * a.y_stride + c] = 0.0f;
        return;
    }
    for (int first = 0; first < n; first += MOE_BLOCK / MOE_LANES) {
        const int i = first + group;
        const float *key = keys + (size_t)i * size;
        float score = 0.0f;
        for (size_t d = (size_t)lane; i < n && d < size; d += MOE_LANES)
            score = moe_add(score, a.product ? moe_mul(key[d], moe_mul(a.v[d], query[d]))
                                             : moe_mul(a.v[d], moe_tanhf(moe_add(key[d], query[d]))));
        lanes[group][lane] = score;
        __syncthreads();
        if (lane == 0 && i < n) scores[i] = moe_join_lanes(lanes[group]);
        __syncthreads();
    }
    moe_block_softmax(scores, n, scores);
    for (size_t c = (size_t)t; c < width; c += MOE_BLOCK) {
        float y = 0.0f;
        for (int i = 0; i < n; i++) y = moe_add(y, moe_mul(scores[i], values[(size_t)i * width + c]));
        a.y[row * a.y_stride + c] = y;
    }
}

/* Arguments of moe_k_heads: rows of a sentence packed by time step, of a hypothesis's tokens, or of a source. */
typedef struct moe_heads_args {
    const float *query;
    const char *rows; /* keys; values follow after `cols` numbers */
    moe_keep keep;
    size_t query_stride, stride; /* stride of rows in bytes */
    int heads, share, width, cols;
    size_t window; /* see moe_heads_op */
    float scale;
    moe_distances distances;
    const int32_t *positions, *segment, *length;
    const int32_t *first; /* position p of sentence i is row first[p] + i; NULL for carried rows */
    const int32_t *chain; /* [rows, chain_stride] carried rows of each row; NULL: consecutive rows from `segment` */
    size_t chain_stride;
    const int *live; /* rows after *live are fillers, which attend to nothing */
    int row0;
    float *scores; /* [current rows, heads, longest] */
    size_t longest;
    float *y;
    size_t y_stride;
} moe_heads_args;

/* Like moe_heads_seen: return the number of rows that a row attends to, and the n-th of these rows. */
MOE_DEVICE int moe_heads_count(const moe_heads_args *a, size_t row) {
    if (row >= (size_t)*a->live) return 0;
    if (!a->chain) return a->length[row];
    return a->positions[row] + 1 - (int)moe_window_start(a->window, (size_t)a->positions[row]);
}
MOE_DEVICE const void *moe_heads_row(const moe_heads_args *a, size_t row, int n) {
    const size_t from = a->chain ? moe_window_start(a->window, (size_t)a->positions[row]) : 0;
    const size_t at = a->first   ? (size_t)a->first[n] + row - (size_t)a->first[a->positions[row]]
                      : a->chain ? (size_t)a->chain[row * a->chain_stride + from + (size_t)n]
                                 : (size_t)a->segment[row] + (size_t)n;
    return a->rows + at * a->stride;
}

/* Return the row of the terms that depend on the distance of the n-th row that a row attends to. */
MOE_DEVICE size_t moe_distance_of(const moe_heads_args *a, size_t row, int n) {
    const size_t position = (size_t)a->positions[row], from = a->chain ? moe_window_start(a->window, position) : 0;
    return moe_distance_row(a->distances.reach, from + (size_t)n, position);
}

/* Like moe_compute_heads: one block per head of a row. 16 threads, one per lane, for each position; softmax; then one
 * thread per column. */
__global__ void moe_k_heads(moe_heads_args a) {
    enum { AT_ONCE = 32, GROUPS = MOE_BLOCK / MOE_LANES };
    __shared__ float lanes[AT_ONCE][MOE_LANES + 1], distant[AT_ONCE][MOE_LANES + 1];
    const moe_distances *d = &a.distances;
    const size_t head = blockIdx.x % (unsigned)a.heads, row = blockIdx.x / (unsigned)a.heads + (size_t)a.row0;
    const int t = (int)threadIdx.x, lane = t % MOE_LANES, n = moe_heads_count(&a, row);
    const size_t column = head * (size_t)a.width, key_column = head / (unsigned)a.share * (size_t)a.width;
    const float *query = a.query + row * a.query_stride + column;
    float *scores = a.scores + blockIdx.x * a.longest;
    for (int first = 0; first < n; first += AT_ONCE) {
        for (int i = t / MOE_LANES; i < AT_ONCE && first + i < n; i += GROUPS) {
            const void *key = moe_heads_row(&a, row, first + i);
            float score = 0.0f;
            for (int c = lane; c < a.width; c += MOE_LANES)
                score = moe_add(score, moe_mul(query[c], moe_kept(&a.keep, key, key_column + (size_t)c)));
            lanes[i][lane] = score;
            score = 0.0f;
            for (int c = lane; d->keys && c < a.width; c += MOE_LANES)
                score =
                    moe_add(score, moe_mul(query[c],
                                           d->keys[moe_distance_of(&a, row, first + i) * (size_t)a.width + (size_t)c]));
            distant[i][lane] = score;
        }
        __syncthreads();
        if (t < AT_ONCE && first + t < n) {
            float score = moe_mul(moe_join_lanes(lanes[t]), a.scale);
            if (d->keys) score = moe_add(score, moe_mul(moe_join_lanes(distant[t]), a.scale));
            if (d->bias) score = moe_add(score, d->bias[moe_distance_of(&a, row, first + t) * (size_t)a.heads + head]);
            scores[first + t] = score;
        }
        __syncthreads();
    }
    moe_block_softmax(scores, n, scores);
    for (int c = t; c < a.width; c += MOE_BLOCK) {
        float y = 0.0f;
        for (int i = 0; i < n; i++)
            y = moe_add(y, moe_mul(scores[i], moe_kept(&a.keep, moe_heads_row(&a, row, i),
                                                       (size_t)a.cols + key_column + (size_t)c)));
        float sum = 0.0f;
        for (int i = 0; d->values && i < n; i++) {
            const size_t at = moe_distance_of(&a, row, i);
            sum = i && moe_distance_of(&a, row, i - 1) == at ? moe_add(sum, scores[i]) : scores[i];
            if (i + 1 == n || moe_distance_of(&a, row, i + 1) != at)
                y = moe_add(y, moe_mul(sum, d->values[at * (size_t)a.width + (size_t)c]));
        }
        a.y[row * a.y_stride + column + (size_t)c] = y;
    }
}

/* Like moe_mean_of_heads: one block per row, from the scores that moe_k_heads stored. */
__global__ void moe_k_mean_of_heads(moe_heads_args a, uint64_t shown, float *mean, size_t mean_stride) {
    const size_t row = blockIdx.x + (size_t)a.row0;
    const float *scores = a.scores + (size_t)blockIdx.x * (size_t)a.heads * a.longest;
    for (int i = (int)threadIdx.x; i < moe_heads_count(&a, row); i += MOE_BLOCK) {
        float sum = 0.0f, n = 0.0f;
        for (int head = 0; head < a.heads; head++) {
            if (!(shown >> head & 1)) continue;
            n += 1.0f;
            sum = moe_add(sum, scores[(size_t)head * a.longest + (size_t)i]);
        }
        mean[row * mean_stride + (size_t)i] = moe_div(sum, n);
    }
}

/* ---- Gates and experts ---- */

typedef struct moe_gate_args {
    const float *logits; /* row i: logits of all experts or, concatenated, of the groups selected by row row0 + i */
    size_t stride, row0;
    int level, k;
    moe_gate gate;
    int empty_zero;
    moe_gate_weights weights;
    const float *choice;            /* [level] or NULL */
    float *ranks;                   /* [current rows, level] scratch; NULL for MOE_WEIGHTS_CHOSEN */
    const float *threshold;         /* [experts] */
    moe_selections chosen, parents; /* parents.words is NULL without groups */
    const int *live;                /* rows after *live are fillers, which select no experts */
    float *p;                       /* [rows, experts] zeroed, receives the probabilities; NULL if not needed */
    size_t experts;
} moe_gate_args;

/* Arguments of moe_k_group_products: the logits inside the groups that rows have selected. */
typedef struct moe_group_products {
    moe_weights w; /* F32 */
    const float *bias;
    int relu;
    const float *x;
    size_t x_stride, row0;
    moe_selections parents;
    int level, tiles;
    float *y; /* [current rows, parents.capacity, level] */
} moe_group_products;

enum { MOE_GROUP_TILE = 64 }; /* logits per block */

/* Like moe_gate_product: 16 threads, one per lane, for each logit. */
__global__ void moe_k_group_products(moe_group_products a) {
    enum { AT_ONCE = MOE_BLOCK / MOE_LANES };
    __shared__ float lanes[AT_ONCE][MOE_LANES];
    const size_t tile = blockIdx.x % (unsigned)a.tiles, pair = blockIdx.x / (unsigned)a.tiles;
    const size_t slot = pair % a.parents.capacity, row = pair / a.parents.capacity + a.row0;
    const moe_selection groups = moe_selection_at(&a.parents, row);
    const int t = (int)threadIdx.x, group = t / MOE_LANES, lane = t % MOE_LANES;
    const int begin = (int)tile * MOE_GROUP_TILE,
              end = begin + MOE_GROUP_TILE < a.level ? begin + MOE_GROUP_TILE : a.level;
    const float *x = a.x + row * a.x_stride;
    if (slot >= *groups.count) return; /* all threads of the block return together */
    for (int first = begin; first < end; first += AT_ONCE) {
        const int j = first + group;
        const size_t expert = (size_t)groups.experts[slot] * (size_t)a.level + (size_t)j;
        float sum = 0.0f;
        for (int k = lane; j < end && k < a.w.cols; k += MOE_LANES)
            sum = moe_add(sum, moe_mul(x[k], ((const float *)a.w.data)[expert * a.w.stride + (size_t)k]));
        lanes[group][lane] = sum;
        __syncthreads();
        if (lane == 0 && j < end) {
            sum = moe_add(moe_join_lanes(lanes[group]), a.bias ? a.bias[expert] : 0.0f);
            a.y[pair * (size_t)a.level + (size_t)j] = a.relu ? moe_reluf(sum) : sum;
        }
        __syncthreads();
    }
}

/* The condition for selecting element i: x[i] > threshold[i] or, if `threshold` is NULL, i <= sure, x[i] > bound, or
 * both x[i] == bound and i <= last. */
typedef struct moe_choice {
    const float *x, *threshold;
    float bound;
    int last, sure;
} moe_choice;

MOE_DEVICE int moe_is_chosen(const moe_choice *c, int i) {
    if (c->threshold) return c->x[i] > c->threshold[i];
    return i <= c->sure || c->x[i] > c->bound || (c->x[i] == c->bound && i <= c->last);
}

/* Choose the k largest of x[n]; the lower index wins ties. As in moe_select_topk, a NaN among the first k is selected
 * with all elements before it; other NaNs are never selected. */
MOE_DEVICE moe_choice moe_choose_best(const float *x, int n, int k) {
    float none = 0.0f;
    int behind = INT_MAX; /* k - index of the last NaN among the first k */
    moe_choice c = { x, NULL, moe_infinity(), -1, -1 };
    for (int i = (int)threadIdx.x; i < k; i += MOE_BLOCK)
        if (!(x[i] == x[i])) behind = k - i;
    moe_block_best(&none, &behind);
    if (behind != INT_MAX) c.sure = k - behind;
    for (int found = c.sure + 1; found < k; found++) { /* find the next best element */
        float best = -moe_infinity();
        int index = INT_MAX;
        for (int i = (int)threadIdx.x; i < n; i += MOE_BLOCK)
            if (i > c.sure && (x[i] < c.bound || (x[i] == c.bound && i > c.last)) &&
                (x[i] > best || (x[i] == best && index == INT_MAX)))
                best = x[i], index = i;
        moe_block_best(&best, &index);
        c.bound = best;
        c.last = index;
    }
    return c;
}

/* Like moe_gate_append: write the selected experts of the group that starts at expert `first` to `experts` and
 * `weights`, which have room for the whole group. `p` may be `weights` or NULL. Returns the number of experts. */
MOE_DEVICE int moe_select_group(const moe_gate_args *a, const float *logits, size_t first, const float *factor,
                                float *p, uint32_t *experts, float *weights, int *empty) {
    const int t = (int)threadIdx.x, n = a->level, begin = moe_share(n, t), end = moe_share(n, t + 1);
    int mine = 0, selected, at;
    moe_choice c = { p, NULL, 0.0f, -1, n - 1 }; /* select all */
    float *ranks = a->ranks ? a->ranks + blockIdx.x * (size_t)n : NULL, sum = 0.0f;
    if (p) moe_block_softmax(logits, n, p);
    if (ranks && a->weights == MOE_WEIGHTS_ALL) moe_block_softmax(logits, n, ranks);
    for (int i = t; ranks && a->weights == MOE_WEIGHTS_SIGMOID && i < n; i += MOE_BLOCK)
        ranks[i] = a->choice ? moe_add(moe_sigmoidf(logits[i]), a->choice[i]) : moe_sigmoidf(logits[i]);
    __syncthreads();
    if (a->gate == MOE_GATE_TOPK) c = moe_choose_best(ranks ? ranks : logits, n, a->k);
    if (a->gate == MOE_GATE_THRESHOLD) c.threshold = a->threshold + first;
    for (int i = begin; i < end; i++) mine += moe_is_chosen(&c, i);
    at = moe_block_before(mine, &selected);
    for (int i = begin; i < end; i++)
        if (moe_is_chosen(&c, i)) experts[at++] = (uint32_t)(first + (size_t)i);
    if (!selected) {
        *empty = 1;
        if (a->empty_zero) return 0;
        c = moe_choose_best(p, n, 1);
        if (t == 0) experts[0] = (uint32_t)first + (uint32_t)(c.last > c.sure ? c.last : c.sure);
        selected = 1;
    }
    __syncthreads();
    for (int i = t; i < selected; i += MOE_BLOCK) {
        const size_t expert = experts[i] - first;
        const int sigmoid = a->gate == MOE_GATE_SIGMOID || (ranks && a->weights == MOE_WEIGHTS_SIGMOID);
        weights[i] = sigmoid ? moe_sigmoidf(logits[expert]) : (ranks ? ranks : logits)[expert];
    }
    if (a->gate != MOE_GATE_SIGMOID && !ranks) moe_block_softmax(weights, selected, weights);
    if (ranks && a->weights == MOE_WEIGHTS_SIGMOID) {
        __syncthreads();
        for (int i = 0; i < selected; i++) sum = moe_add(sum, weights[i]);
        __syncthreads();
        for (int i = t; i < selected; i += MOE_BLOCK) weights[i] = moe_div(weights[i], moe_add(sum, 1e-20f));
    }
    for (int i = t; factor && i < selected; i += MOE_BLOCK) weights[i] = moe_mul(*factor, weights[i]);
    return selected;
}

/* Like moe_compute_gate_row. */
__global__ void moe_k_gate(moe_gate_args a) {
    const size_t row = blockIdx.x + a.row0, level = (size_t)a.level;
    const moe_selection y = moe_selection_at(&a.chosen, row);
    const float *logits = a.logits + blockIdx.x * a.stride;
    float *p = a.p ? a.p + row * a.experts : NULL;
    const int by_threshold = a.gate == MOE_GATE_THRESHOLD;
    int count = 0, empty = 0;
    if (row >= (size_t)*a.live) { /* all threads of the block enter */
        if (threadIdx.x == 0) *y.count = *y.empty = 0;
        return;
    }
    if (a.parents.words) {
        const moe_selection groups = moe_selection_at(&a.parents, row);
        empty = (int)*groups.empty;
        for (size_t j = 0; j < *groups.count; j++) {
            const size_t first = groups.experts[j] * level;
            count += moe_select_group(&a, logits + j * level, first, &groups.weights[j],
                                      p              ? p + first
                                      : by_threshold ? y.weights + count
                                                     : NULL,
                                      y.experts + count, y.weights + count, &empty);
        }
    } else {
        count = moe_select_group(&a, logits, 0, NULL,
                                 p              ? p
                                 : by_threshold ? y.weights
                                                : NULL,
                                 y.experts, y.weights, &empty);
    }
    if (threadIdx.x == 0) {
        *y.count = (uint32_t)count;
        *y.empty = (uint32_t)empty;
    }
}

/* Count the rows that select each expert. `count` must be zero on entry. */
__global__ void moe_k_count(moe_routes a) {
    const moe_selection s = moe_selection_at(&a.chosen, blockIdx.x + (size_t)a.row0);
    for (uint32_t i = threadIdx.x; i < *s.count; i += MOE_BLOCK) atomicAdd(&a.count[s.experts[i]], 1);
}

/* Store the number of experts that each row selects. */
__global__ void moe_k_selected(moe_selections chosen, size_t rows, int *selected) {
    const size_t row = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row < rows) selected[row] = (int)*moe_selection_at(&chosen, row).count;
}

/* Compute the first pair and the tiles of each expert. One block per MOE_OFFSETS experts counts the pairs of preceding
 * experts itself. The first block also computes the first pair of each row. */
__global__ void moe_k_offsets(moe_routes a) {
    const int t = (int)threadIdx.x, first = (int)blockIdx.x * MOE_OFFSETS;
    const int last = a.n - first < MOE_OFFSETS ? a.n : first + MOE_OFFSETS, rows = blockIdx.x == 0 ? a.rows : 0;
    const int begin = first + moe_share(last - first, t), end = first + moe_share(last - first, t + 1);
    const int row0 = moe_share(rows, t), row1 = moe_share(rows, t + 1);
    int pairs = 0, tiles = 0, visits = 0, row_pairs = 0, before_pairs, before_tiles, all_pairs, all_tiles, all_visits;
    for (int r = row0; r < row1; r++) row_pairs += (int)*moe_selection_at(&a.chosen, (size_t)(a.row0 + r)).count;
    row_pairs = moe_block_before(row_pairs, &all_pairs);
    for (int r = row0; r < row1; r++) {
        a.row_first[r] = row_pairs;
        row_pairs += (int)*moe_selection_at(&a.chosen, (size_t)(a.row0 + r)).count;
    }
    for (int e = t; e < first; e += MOE_BLOCK) {
        pairs += a.count[e];
        tiles += (a.count[e] + MOE_TILE - 1) / MOE_TILE;
        visits += a.count[e] > 0;
    }
    moe_block_before(pairs, &before_pairs);
    moe_block_before(tiles, &before_tiles);
    pairs = tiles = 0;
    for (int e = begin; e < end; e++) {
        pairs += a.count[e];
        tiles += (a.count[e] + MOE_TILE - 1) / MOE_TILE;
        visits += a.count[e] > 0;
    }
    moe_block_before(visits, &all_visits);
    pairs = before_pairs + moe_block_before(pairs, &all_pairs);
    tiles = before_tiles + moe_block_before(tiles, &all_tiles);
    for (int e = begin; e < end; e++) {
        const int count = a.count[e];
        a.first[e] = pairs;
        for (int i = 0; i < count; i += MOE_TILE, tiles++) {
            const int4 tile = { e, pairs + i, count - i < MOE_TILE ? count - i : MOE_TILE, 0 };
            a.tiles[tiles] = tile;
        }
        pairs += count;
    }
    if (t == 0 && last == a.n) {
        a.first[a.n] = a.totals[0] = before_pairs + all_pairs;
        a.totals[1] = before_tiles + all_tiles;
        a.stats[0] += (uint64_t)(before_pairs + all_pairs);
        a.stats[1] += (uint64_t)all_visits;
    }
}

/* Initialise each expert's cursor to its first pair. */
__global__ void moe_k_cursors(moe_routes a) {
    const int e = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (e < a.n) a.count[e] = a.first[e];
}

/* Assign sorted places to the pairs of a row. The order of an expert's pairs may vary between runs but has no effect,
 * because each row is multiplied separately. */
__global__ void moe_k_place(moe_routes a) {
    const size_t row = blockIdx.x + (size_t)a.row0;
    const moe_selection s = moe_selection_at(&a.chosen, row);
    for (uint32_t i = threadIdx.x; i < *s.count; i += MOE_BLOCK) {
        const int pair = atomicAdd(&a.count[s.experts[i]], 1);
        a.place[(uint32_t)a.row_first[blockIdx.x] + i] = pair;
        a.pair_row[pair] = (int)row;
        a.pair_expert[pair] = a.bays ? a.bays[s.experts[i]] : (int)s.experts[i];
    }
}

/* Gather the code rows of pairs for cuBLAS. */
__global__ void moe_k_collect(const int8_t *x, const float *scales, size_t stride, int bytes, const int *pair_row,
                              int8_t *y, float *y_scales) {
    const size_t pair = blockIdx.x, row = (size_t)pair_row[pair];
    for (int i = (int)threadIdx.x; i < bytes / 16; i += MOE_BLOCK)
        ((int4 *)(void *)(y + pair * stride))[i] = ((const int4 *)(const void *)(x + row * stride))[i];
    if (threadIdx.x == 0) y_scales[pair] = scales[row];
}

/* Like moe_combine_row and moe_compute_mix_row: compute y = scale * sum over the row's experts in index order. `x` has
 * a row per pair or, if pairs are not sorted, the outputs of all experts in each row. */
__global__ void moe_k_combine(moe_routes a, const float *x, size_t x_stride, int cols, float scale, float *y,
                              size_t y_stride) {
    const size_t row = blockIdx.x + (size_t)a.row0;
    const moe_selection s = moe_selection_at(&a.chosen, row);
    const int *place = a.place ? a.place + a.row_first[blockIdx.x] : NULL;
    for (size_t c = threadIdx.x; c < (size_t)cols; c += MOE_BLOCK) {
        float sum = 0.0f;
        for (uint32_t i = 0; i < *s.count; i++) {
            const size_t at = place ? (size_t)place[i] * x_stride : row * x_stride + s.experts[i] * (size_t)cols;
            sum = moe_add(sum, moe_mul(s.weights[i], x[at + c]));
        }
        y[row * y_stride + c] = scale != 1.0f ? moe_mul(sum, scale) : sum;
    }
}

/* ---- Output ---- */

typedef struct moe_outputs : moe_chunks {
    moe_products p;      /* p.y: logits of the current rows; NULL if `sums` has them */
    const int32_t *sums; /* [rows, w.rows_padded] from cuBLAS           */
    int row0, chunks, top;
    const int32_t *never;
    int n_never, n_suppressed, eos;
    const int32_t *hold, *want;
    float *trace; /* [rows, trace_stride] or NULL */
    size_t trace_stride;
    float *want_logprob, *top_logprobs;
    int32_t *top_ids;
    size_t n_starts;
    const int32_t *starts; /* [rows, n_starts] */
    float *start_logprobs;
    const moe_slot *slot; /* the slot of a row is slot[sentence[row]]; or NULL */
    int listed, kinds;    /* listed: 1 if sentences may have lists. kinds: 2 if used tokens are ranked separately */
    const uint32_t *used; /* [rows, used_words] */
    size_t used_words;
    float *top_weighed; /* [rows, top] or NULL */
    const int32_t *sentence;
} moe_outputs;

/* Like moe_list_of. */
MOE_DEVICE const moe_list *moe_row_list(const moe_outputs *a, size_t row) {
    return a->listed && a->slot[a->sentence[row]].list.n ? &a->slot[a->sentence[row]].list : NULL;
}

/* Like moe_is_sampled, but only for the last row of a slot. Filler rows refer to a slot that belongs to other rows. */
MOE_DEVICE int moe_row_is_sampled(const moe_outputs *a, size_t row) {
    const moe_slot *slot = &a->slot[a->sentence[row]];
    return a->want[row] == -1 && slot->active && slot->task.sampling.temperature != 0.0f &&
           slot->live[0].row + slot->ahead == row;
}

/* Like moe_logit_of. */
MOE_DEVICE float *moe_block_logit(const moe_list *list, float *y, int column, int n, int32_t id) {
    const size_t at = moe_list_place(list, id) - (size_t)column;
    return at < (size_t)n ? y + at : NULL;
}

/* Return the logit of token j for row `at` of the current rows, i.e. row `row` of the frame. */
MOE_DEVICE float moe_logit(const moe_outputs *a, size_t at, size_t row, size_t j) {
    if (!a->sums) return a->p.y[at * a->p.y_stride + j];
    return moe_add(moe_mul((float)a->sums[at * (size_t)a->p.w.rows_padded + j],
                           moe_mul(a->p.x_scales[row], a->p.w.scales[j])),
                   a->p.bias ? a->p.bias[j] : 0.0f);
}

/* Like moe_forbid, for the tokens never[first, end). */
MOE_DEVICE void moe_block_forbid(const moe_outputs *a, int first, int end, const moe_list *list, float *y, int column,
                                 int n) {
    for (int i = first + (int)threadIdx.x; i < end; i += MOE_BLOCK) {
        float *logit = moe_block_logit(list, y, column, n, a->never[i]);
        if (logit) *logit = -moe_infinity();
    }
}

/* Like moe_output_task, for one row and one chunk of the vocabulary or of the sentence's list. */
__global__ void moe_k_output(moe_outputs a) {
    __shared__ float y[MOE_OUTPUT_CHUNK], e[MOE_OUTPUT_CHUNK];
    const int t = (int)threadIdx.x, chunk = (int)blockIdx.x % a.chunks, column = chunk * MOE_OUTPUT_CHUNK;
    const size_t at = blockIdx.x / (unsigned)a.chunks, row = at + (size_t)a.row0;
    const size_t place = row * (size_t)a.chunks + (size_t)chunk;
    const moe_list *list = moe_row_list(&a, row);
    const int all = a.p.w.rows, listed = list ? (int)list->n : all;
    const int n = listed < column ? 0 : listed - column < MOE_OUTPUT_CHUNK ? listed - column : MOE_OUTPUT_CHUNK;
    float *end = t == 0 && a.hold[row] ? moe_block_logit(list, y, column, n, a.eos) : NULL, *logit;
    float last = moe_infinity(), max, sum;
    int last_index = -1;
    for (int i = t; i < n; i += MOE_BLOCK)
        y[i] = moe_logit(&a, at, row, (size_t)(list ? list->ids[column + i] : column + i));
    for (int j = column + t; a.trace && j < column + MOE_OUTPUT_CHUNK && j < all; j += MOE_BLOCK)
        a.trace[row * a.trace_stride + (size_t)j] =
            moe_list_place(list, j) == SIZE_MAX ? -moe_infinity() : moe_logit(&a, at, row, (size_t)j);
    __syncthreads();
    moe_block_forbid(&a, a.n_suppressed, a.n_never, list, y, column, n);
    __syncthreads();
    max = moe_block_max(y, n);
    for (int i = t; i < n; i += MOE_BLOCK) e[i] = moe_expf(moe_sub(y[i], max >= -FLT_MAX ? max : 0.0f));
    __syncthreads();
    sum = moe_block_sum(e, n);
    if (t == 0) {
        a.max[place] = max;
        a.sum[place] = sum;
        if ((logit = moe_block_logit(list, y, column, n, a.want[row])) != NULL) a.want_logprob[row] = *logit;
        for (size_t i = row * a.n_starts; i < (row + 1) * a.n_starts; i++)
            if ((logit = moe_block_logit(list, y, column, n, a.starts[i])) != NULL) a.start_logprobs[i] = *logit;
    }
    __syncthreads();
    moe_block_forbid(&a, 0, a.n_suppressed, list, y, column, n);
    if (end) *end = -moe_infinity();
    __syncthreads();
    const uint32_t *used = a.kinds > 1 && a.want[row] < 0 && a.slot[a.sentence[row]].task.penalty != 1.0f
                               ? a.used + row * a.used_words
                               : NULL;
    for (int i = t; a.weights && moe_row_is_sampled(&a, row) && i < n; i += MOE_BLOCK) { /* like moe_keep_logits */
        const size_t to = (size_t)a.sentence[row] * (size_t)all + (size_t)(column + i);
        const int has = used && moe_bit(used, list ? list->ids[column + i] : column + i);
        a.plain[to] = y[i];
        a.weights[to] = moe_to_bits(has ? moe_penalised(y[i], a.slot[a.sentence[row]].task.penalty) : y[i]);
    }
    for (int i = 0; i < a.top * (used ? 2 : 1); i++) { /* find the next best token; the lower id wins ties */
        const size_t to = place * (size_t)(a.kinds * a.top) + (size_t)i;
        float best = -moe_infinity();
        int index = INT_MAX;
        if (i == a.top) last = moe_infinity(), last_index = -1; /* continue with used tokens */
        for (int c = t; c < n; c += MOE_BLOCK) {
            if (!(y[c] < last || (y[c] == last && c > last_index)) || !(y[c] > best)) continue;
            if (used && moe_bit(used, list ? list->ids[column + c] : column + c) != (i >= a.top)) continue;
            best = y[c], index = c;
        }
        moe_block_best(&best, &index);
        if (t == 0) {
            a.logits[to] = best;
            a.ids[to] = index == INT_MAX ? -1 : column + index;
        }
        last = best;
        last_index = index;
    }
}

/* Like moe_output_join. One thread adds up the chunks and merges the chunks' lists; the others prepare inputs. */
__global__ void moe_k_join(moe_outputs a) {
    __shared__ float part[MOE_BLOCK];
    const size_t row = blockIdx.x, first = row * (size_t)a.chunks, top = (size_t)a.top;
    const moe_list *list = moe_row_list(&a, row);
    const int t = (int)threadIdx.x,
              chunks = list ? (int)((list->n + MOE_OUTPUT_CHUNK - 1) / MOE_OUTPUT_CHUNK) : a.chunks;
    const float max = moe_block_max(a.max + first, chunks);
    float sum = 0.0f, log_sum;
    for (int c0 = 0; c0 < chunks; c0 += MOE_BLOCK) {
        const int c = c0 + t;
        __syncthreads();
        if (c < chunks) part[t] = moe_mul(a.sum[first + (size_t)c], moe_expf(moe_sub(a.max[first + (size_t)c], max)));
        __syncthreads();
        for (int i = 0; t == 0 && i < MOE_BLOCK && c0 + i < chunks; i++) sum = moe_add(sum, part[i]);
    }
    if (t != 0) return; /* no barrier follows */
    log_sum = sum >= 1.0f && sum <= FLT_MAX ? moe_logf(sum) : __uint_as_float(0x7fc00000u);
    if (a.want[row] >= 0) {
        /* A list may lack an end token that is never generated. */
        const float want = moe_list_place(list, a.want[row]) == SIZE_MAX ? -moe_infinity() : a.want_logprob[row];
        a.want_logprob[row] = moe_sub(moe_sub(want, max), log_sum);
        return;
    }
    for (size_t i = row * a.n_starts; i < (row + 1) * a.n_starts; i++)
        a.start_logprobs[i] = moe_sub(moe_sub(a.start_logprobs[i], max), log_sum);
    const moe_weighing by = { (size_t)a.kinds, a.kinds > 1 ? a.slot[a.sentence[row]].task.penalty : 1.0f,
                              a.top_weighed != NULL };
    const size_t lists = first * by.kinds * top;
    int32_t *ids = a.top_ids + row * top;
    moe_join_best(&by, a.logits + lists, a.ids + lists, (size_t)chunks, top, max, log_sum, a.top_logprobs + row * top,
                  a.top_weighed ? a.top_weighed + row * top : NULL, ids);
    for (size_t i = 0; i < top; i++) ids[i] = ids[i] < 0 ? a.eos : list ? list->ids[ids[i]] : ids[i];
    a.max[first] = max; /* moe_k_sample reads this maximum */
    a.sum[first] = log_sum;
}

/* Like moe_walk. */
MOE_DEVICE moe_stop moe_block_walk(const uint32_t *weights, int n, int counts_them, uint64_t target) {
    __shared__ unsigned long long counts[MOE_DIGITS], sums[MOE_DIGITS];
    moe_stop at = { 0, 0, 0 };
    for (int shift = 24; shift >= 0; shift -= 8) {
        __syncthreads();
        for (int i = (int)threadIdx.x; i < MOE_DIGITS; i += MOE_BLOCK) counts[i] = sums[i] = 0;
        __syncthreads();
        for (int i = (int)threadIdx.x; i < n; i += MOE_BLOCK) {
            if ((uint64_t)weights[i] >> (shift + 8) != at.weight) continue;
            const uint32_t digit = weights[i] >> shift & (MOE_DIGITS - 1);
            atomicAdd(&counts[digit], 1ull);
            atomicAdd(&sums[digit], (unsigned long long)weights[i]);
        }
        __syncthreads();
        moe_walk_on(&at, counts, sums, counts_them, target);
    }
    return at;
}

/* Like moe_sample, for the block's slot if that slot has a row in `a`; then do the last step of moe_output_join. */
__global__ void moe_k_sample(moe_outputs a) {
    __shared__ unsigned long long all, firm;
    const moe_slot *slot = &a.slot[blockIdx.x];
    const moe_sampling *d = &slot->task.sampling;
    const size_t row = slot->active ? slot->live[0].row + slot->ahead : 0, of = blockIdx.x * (size_t)a.p.w.rows;
    const int t = (int)threadIdx.x, sampled = slot->active && d->temperature != 0.0f && a.want[row] == -1;
    const int n = !sampled ? 0 : slot->list.n ? (int)slot->list.n : a.p.w.rows;
    uint32_t *weights = a.weights + of;
    float best = -moe_infinity();
    int unused = 0, ties = 0, before;
    moe_stop at;
    if (t == 0) all = firm = 0;
    for (int i = t; i < n; i += MOE_BLOCK) best = moe_from_bits(weights[i]) > best ? moe_from_bits(weights[i]) : best;
    moe_block_best(&best, &unused);
    for (int i = t; i < n; i += MOE_BLOCK) {
        weights[i] = moe_weight_of(d, moe_from_bits(weights[i]), best);
        atomicAdd(&all, (unsigned long long)weights[i]);
        if ((float)weights[i] >= d->min_p * MOE_WEIGHT_MOST) atomicAdd(&firm, (unsigned long long)weights[i]);
    }
    __syncthreads();
    uint64_t sum = all;
    if (!sum) return; /* all threads of the block return together */
    if (d->top_k && d->top_k < (size_t)n) {
        at = moe_block_walk(weights, n, 1, d->top_k - 1);
        sum = moe_sum_of_first(&at, d->top_k);
    }
    if (d->top_p < 1.0f) {
        const uint64_t target = moe_sum_short_of(d, sum);
        at = moe_block_walk(weights, n, 0, target);
        sum = moe_sum_up_to(&at, target);
    }
    const uint64_t bits = moe_sample_number(slot, slot->steps + slot->ahead),
                   target = moe_share_of(bits, sum < firm ? sum : firm);
    at = moe_block_walk(weights, n, 0, target);
    const int tie = (int)((target - at.sum) / at.weight), begin = moe_share(n, t), end = moe_share(n, t + 1);
    for (int i = begin; i < end; i++) ties += weights[i] == at.weight;
    before = moe_block_before(ties, &unused);
    for (int i = begin; i < end; i++) {
        if (weights[i] != at.weight || before++ != tie) continue;
        moe_put_first(slot->list.n ? slot->list.ids[i] : i,
                      moe_sub(moe_sub(a.plain[of + (size_t)i], a.max[row * (size_t)a.chunks]),
                              a.sum[row * (size_t)a.chunks]),
                      (size_t)a.top, a.top_ids + row * (size_t)a.top, a.top_logprobs + row * (size_t)a.top);
    }
}

/* ---- The search: a thread per slot, except where slots are counted ---- */

/* Clear all slots. */
__global__ void moe_k_slots(moe_searching a) {
    const size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x, beam = (size_t)a.search.beam;
    if (at == 0) *a.turn = 0;
    if (at < (size_t)a.slots) {
        moe_slot *slot = &a.slot[at];
        slot->active = 0;
        slot->pages = NULL;
        slot->tokens = a.tokens + at * moe_most_tokens(&a.search, beam);
        slot->live = a.live + at * beam;
        slot->finished = a.finished + at * beam;
        slot->target = a.target + at * a.search.max_target;
        slot->constraints = a.constraints + at * a.search.max_constraints;
        slot->constraint_ids = a.constraint_ids + at * a.search.max_target;
        slot->list.ids = a.listed + at * a.search.listed;
        slot->list.n = 0;
        slot->n_draft = 0; /* a GPU computes no drafts */
    }
}

/* Like moe_admit: one block per sentence. */
__global__ void moe_k_begin(moe_searching a, const moe_begun *begun, const int32_t *targets) {
    const moe_begun b = begun[blockIdx.x];
    moe_slot *slot = &a.slot[b.slot];
    const int32_t *constraints = targets + b.first + b.task.n_target,
                  *ids = constraints + MOE_CONSTRAINT_WORDS * b.task.n_constraints;
    for (size_t i = threadIdx.x; i < b.task.n_target; i += MOE_BLOCK) slot->target[i] = targets[b.first + i];
    for (size_t i = threadIdx.x; i < b.constraint_tokens; i += MOE_BLOCK) slot->constraint_ids[i] = ids[i];
    for (size_t i = threadIdx.x; i < b.listed; i += MOE_BLOCK) slot->list.ids[i] = ids[b.constraint_tokens + i];
    if (threadIdx.x != 0) return;
    slot->task = b.task;
    slot->list.n = b.listed;
    memcpy(slot->constraints, constraints, b.task.n_constraints * sizeof *slot->constraints);
    moe_slot_begin(slot);
}

/* Like moe_fill_row. */
MOE_DEVICE void moe_fill_slot_row(const moe_searching *a, const moe_slot *slot, const moe_live *live, size_t position,
                                  int row) {
    const moe_row r = moe_live_row(&a->search, slot, live, position);
    a->ids[row] = r.id;
    a->parents[row] = r.parent;
    a->segment[row] = (int32_t)slot->task.segment;
    a->length[row] = (int32_t)slot->task.length;
    a->want[row] = r.want;
    a->hold[row] = r.hold;
    moe_fill_starts(&a->search, slot, live, a->starts + (size_t)row * a->search.max_constraints);
    a->positions[row] = (int32_t)position;
    a->sentence[row] = (int32_t)(slot - a->slot);
    a->destination[row] = moe_token_place(slot, live->last);
}

MOE_DEVICE size_t moe_slot_rows(const moe_slot *slot) {
    size_t rows = 0;
    for (size_t h = 0; slot->active && h < slot->n_live; h++) rows += (size_t)!slot->live[h].ended;
    return rows;
}

/* Like moe_fill_frame, in one block. Filler rows follow the live rows and start a sentence without source tokens. */
__global__ void moe_k_fill(moe_searching a, int rows) {
    const int t = (int)threadIdx.x, begin = moe_share(a.slots, t), end = moe_share(a.slots, t + 1);
    const int room = (int)a.search.ahead;
    int row = 0, given = 0, live, all_given;
    for (int i = begin; i < end; i++) {
        row += (int)moe_slot_rows(&a.slot[i]);
        given += (int)moe_slot_given(&a.slot[i]);
    }
    row = moe_block_before(row, &live);
    given = moe_block_before(given, &all_given);
    row += given < room ? given : room;
    for (int i = begin; i < end; i++) {
        moe_slot *slot = &a.slot[i];
        moe_live last;
        if (!slot->active) continue;
        for (size_t h = 0; h < slot->n_live; h++) {
            if (slot->live[h].ended) continue;
            moe_fill_slot_row(&a, slot, &slot->live[h], slot->steps, row);
            slot->live[h].row = (size_t)row++;
        }
        last = slot->live[0];
        for (; given < room && slot->ahead < moe_slot_given(slot); given++) {
            moe_give_token(slot, &last, slot->target[last.last + 1]);
            moe_fill_slot_row(&a, slot, &last, slot->steps + ++slot->ahead, row++);
        }
    }
    live += all_given < room ? all_given : room;
    for (row = live + t; row < rows; row += MOE_BLOCK) {
        a.ids[row] = a.segment[row] = a.length[row] = a.hold[row] = a.positions[row] = a.sentence[row] = 0;
        a.parents[row] = a.want[row] = a.destination[row] = -1;
        for (size_t c = 0; c < a.search.max_constraints; c++) a.starts[(size_t)row * a.search.max_constraints + c] = -1;
    }
}

/* Set the bits of all tokens in a slot's hypotheses: one block per slot. */
__global__ void moe_k_used(moe_searching a) {
    const moe_slot *slot = &a.slot[blockIdx.x];
    for (size_t h = 0; slot->active && h < slot->n_live; h++) {
        const moe_live *live = &slot->live[h];
        const size_t row = live->row + slot->ahead; /* only the last of the given tokens chooses a token */
        uint32_t *used = a.used + row * a.search.used_words;
        if (live->ended || a.want[row] >= 0 || slot->task.penalty == 1.0f) continue;
        for (size_t i = threadIdx.x; i < a.search.used_words; i += blockDim.x) used[i] = 0;
        __syncthreads();
        if (threadIdx.x == 0) moe_fill_used(slot, live->last + (int32_t)slot->ahead, used);
    }
}

/* List the rows of a slot's tokens: one block per slot, one thread per live hypothesis or given token. */
__global__ void moe_k_chain(moe_searching a) {
    const moe_slot *slot = &a.slot[blockIdx.x];
    for (size_t i = 1 + threadIdx.x; slot->active && i <= slot->ahead; i += blockDim.x)
        moe_fill_chain(slot, slot->live[0].last + (int32_t)i, slot->steps + i + 1,
                       a.chain + (slot->live[0].row + i) * a.search.max_target);
    for (size_t h = threadIdx.x; slot->active && h < slot->n_live; h += blockDim.x)
        if (!slot->live[h].ended)
            moe_fill_chain(slot, slot->live[h].last, slot->steps + 1,
                           a.chain + slot->live[h].row * a.search.max_target);
}

/* Like moe_add_coverage, for coverage stored by row. */
__global__ void moe_k_coverage(moe_searching a) {
    const size_t row = blockIdx.x, stride = a.answer.attention_stride;
    const int parent = a.parents[row], n = a.length[row];
    const float *old = parent < 0 || parent >= a.rows ? NULL : a.coverage[*a.turn] + (size_t)parent * stride;
    float *sum = a.coverage[!*a.turn] + row * stride;
    for (int i = (int)threadIdx.x; i < n; i += MOE_BLOCK)
        sum[i] = moe_add(old ? old[i] : 0.0f, a.attention[row * stride + (size_t)i]);
}

/* Like moe_add_coverage, for coverage stored by slot. */
__global__ void moe_k_place_coverage(moe_searching a) {
    const size_t beam = (size_t)a.search.beam, h = blockIdx.x % beam, stride = a.answer.attention_stride;
    const moe_slot *slot = &a.slot[blockIdx.x / beam];
    const int one = moe_slot_is_one(slot);
    const moe_live *live = &slot->live[one ? 0 : h];
    float *sum = a.coverage[0] + blockIdx.x * stride;
    if (!slot->active || (!one && h >= slot->n_live) || live->ended) return;
    for (size_t i = threadIdx.x; i < slot->task.length; i += MOE_BLOCK)
        sum[i] = moe_add(slot->steps ? sum[i] : 0.0f, a.attention[live->row * stride + i]);
}

__global__ void moe_k_search(moe_searching a) {
    const size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    moe_beam answer = a.answer;
    if (at >= (size_t)a.slots) return;
    answer.coverage = a.coverage[!*a.turn];
    a.done[at] = moe_slot_steps(&a.search, &a.slot[at], at, &answer, a.next + at * (size_t)a.search.beam);
}

/* Count the rows of the next step and assign offsets to the results of this step, in one block. */
__global__ void moe_k_report(moe_searching a) {
    const int t = (int)threadIdx.x, begin = moe_share(a.slots, t), end = moe_share(a.slots, t + 1);
    int rows = 0, given = 0, done = 0, words = 0, all_words;
    for (int i = begin; i < end; i++) {
        const moe_slot *slot = &a.slot[i];
        rows += (int)moe_slot_rows(slot);
        given += (int)moe_slot_given(slot);
        done += a.done[i];
        if (a.done[i]) words += (int)moe_result_words(&a.search, slot, moe_slot_results(&a.search, slot));
    }
    moe_block_before(rows, &rows);
    moe_block_before(given, &given);
    moe_block_before(done, &done);
    words = MOE_RESULTS + moe_block_before(words, &all_words);
    for (int i = begin; i < end; i++) {
        const moe_slot *slot = &a.slot[i];
        if (!a.done[i]) continue;
        a.done[i] = words;
        words += (int)moe_result_words(&a.search, slot, moe_slot_results(&a.search, slot));
    }
    if (t != 0) return;
    a.results[0] = rows;
    a.results[1] = done;
    a.results[2] = MOE_RESULTS + all_words;
    a.results[3] = given;
    *a.turn = !*a.turn;
}

/* Write the results of finished slots: one block per slot, one thread per hypothesis. */
__global__ void moe_k_results(moe_searching a) {
    const moe_slot *slot = &a.slot[blockIdx.x];
    int32_t *words = a.results + a.done[blockIdx.x];
    if (!a.done[blockIdx.x]) return;
    if (threadIdx.x == 0) moe_write_head(&a.search, slot, blockIdx.x, words);
    for (size_t h = threadIdx.x; h < moe_slot_results(&a.search, slot); h += blockDim.x)
        moe_write_result(&a.search, slot, h, words);
}

/* ==== 3. Launchers ============================================================================================
 * The order of work. Invariant: a launcher's kernels depend only on the number of rows, so a step can be cached as a
 * CUDA graph. The exceptions are nodes for which moe_waits returns 1: their launches depend on numbers read from the
 * device. All work uses a single stream, so data is overwritten only after earlier kernels have used it. */

/* Return the bytes of a row of codes outside nodes, including the scales of its blocks. */
static size_t moe_code_stride(size_t cols) {
    const size_t padded = moe_round_up(cols, 64);
    return padded + moe_round_up(padded / 8, 64);
}

/* ---- Weights ---- */

/* Return the bytes of a matrix's numbers or codes on the device. Scales follow the codes, and an expert's next matrix
 * follows the scales. */
static size_t moe_data_bytes(const moe_matrix *m) {
    return moe_quantised(m->type) ? moe_round_up(m->rows, 16) * m->cols_padded
                                  : m->rows * m->cols * (m->type == MOE_TYPE_F32 ? 4 : 2);
}
static size_t moe_scale_bytes(const moe_matrix *m) {
    const size_t parts = m->parts ? m->cols_padded / 64 : 0;
    return moe_quantised(m->type) ? moe_round_up(m->rows, 16) * (1 + parts) * sizeof(float) : 0;
}
static size_t moe_both_bytes(const moe_matrix *m) { return moe_round_up(moe_data_bytes(m) + moe_scale_bytes(m), 64); }
/* Return the bytes of a matrix and its bias, or of an expert's two matrices and their biases. */
static size_t moe_biased_bytes(const moe_matrix *m, const float *bias) {
    return moe_both_bytes(m) + (bias ? moe_round_up(m->rows * sizeof *bias, 64) : 0);
}
static size_t moe_expert_bytes(const moe_experts *e) {
    return moe_biased_bytes(&e->up, e->up_bias) + moe_biased_bytes(&e->down, e->down_bias);
}

/* Describe the matrix that `at` points to. Its data may not have been uploaded yet. */
static moe_weights moe_weights_at(const moe_matrix *m, const char *at, size_t step) {
    moe_weights w;
    memset(&w, 0, sizeof w);
    w.type = m->parts ? MOE_TYPE_Q8B : moe_quantised(m->type) ? MOE_TYPE_Q8 : m->type;
    w.rows = (int)m->rows;
    w.cols = (int)m->cols;
    w.rows_padded = moe_quantised(m->type) ? (int)(moe_round_up(m->rows, 16)) : w.rows;
    w.stride = m->cols_padded;
    w.step = step;
    w.data = at;
    if (at && moe_quantised(m->type)) w.scales = (const float *)(const void *)(at + moe_data_bytes(m));
    return w;
}

static void moe_lift_matrix(moe_device *d, const moe_matrix *m, char *to) {
    const size_t stride = m->cols_padded, codes = moe_data_bytes(m),
                 bytes = moe_quantised(m->type) ? codes / 8 * m->bits : codes, rows = moe_round_up(m->rows, 16);
    if (!moe_quantised(m->type)) {
        moe_upload_to(d, to, m->data, bytes);
        return;
    }
    if (m->subs) moe_upload_to(d, d->subs, m->subs, codes / 64 * m->sides);
    for (size_t at = 0, n; at < bytes && d->status == MOE_OK; at += n) {
        const int i = d->next_stage;
        char *landing;
        n = moe_min(bytes - at, MOE_STAGE_BYTES - MOE_STAGE_BYTES % (64 * m->bits)); /* whole groups of 32 columns */
        landing = moe_lift(d, (const char *)m->data + at, n, NULL);
        if (m->bits == 8)
            MOE_LAUNCH(d, moe_k_unpack_q8, moe_divide_up(n / 4, 256), 256, (const uint32_t *)(void *)landing, at / 4,
                       n / 4, stride, (int8_t *)to);
        else
            MOE_LAUNCH(d, moe_k_unpack, moe_divide_up(n / (4 * m->bits), 256), 256, (const uint8_t *)(void *)landing,
                       at / (64 * m->bits), n / (4 * m->bits), m->bits, stride, d->subs, m->sides, (int8_t *)to);
        MOE_CUDA_TRY(d, cudaEventRecord(d->landed[i], d->stream));
    }
    moe_upload_to(d, to + codes, m->scales, rows * sizeof(float));
    if (m->parts)
        MOE_LAUNCH(d, moe_k_unpack_parts, moe_divide_up(codes / 64, 256), 256, d->subs, m->sides, codes / 64, stride,
                   (float *)(void *)(to + codes + rows * sizeof(float)));
}

/* Upload expert `e` of a node: two matrices, each followed by its bias. */
static void moe_lift_expert(moe_device *d, const moe_node *n, size_t e, char *to) {
    for (int i = 0; i < 2; i++) {
        const float *bias = i ? n->experts->down_bias : n->experts->up_bias;
        const moe_matrix m = moe_matrix_moved(i ? &n->experts->down : &n->experts->up, e * n->experts->stride);
        moe_lift_matrix(d, &m, to);
        if (bias) moe_upload_to(d, to + moe_both_bytes(&m), bias + e * m.rows, m.rows * sizeof *bias);
        to += moe_biased_bytes(&m, bias);
    }
}

/* A node to run, its rows y, and the rows of its first two sources (x0, x1). */
typedef struct moe_launch {
    const moe_graph *g;
    const moe_node *n, *s0, *s1;
    moe_bound *b;
    const moe_frame *f;
    size_t rows;
    int traced; /* 1 if a trace reads all logits */
    float *y;
    const float *x0, *x1;
} moe_launch;

/* ---- Products ---- */

/* Compute sums [n, rows] = w [k, n]^T x [k, rows]; all are column-major, as cuBLAS expects. */
static cublasStatus_t moe_call_gemm(const moe_device *d, const void *w, int n, int k, const int8_t *x, size_t x_stride,
                                    int rows, int32_t *sums) {
    const int32_t one = 1, zero = 0;
    return cublasGemmEx(d->cublas, CUBLAS_OP_T, CUBLAS_OP_N, n, rows, k, &one, w, CUDA_R_8I, k, x, CUDA_R_8I,
                        (int)x_stride, &zero, sums, CUDA_R_32I, n, CUBLAS_COMPUTE_32I, CUBLAS_GEMM_DEFAULT);
}

static void moe_gemm(moe_device *d, const moe_weights *w, int expert, const int8_t *x, size_t x_stride, int rows,
                     int32_t *sums) {
    const char *codes = (const char *)w->data + (size_t)expert * w->step;
    if (d->status == MOE_OK)
        moe_check_blas(d, moe_call_gemm(d, codes, w->rows_padded, (int)w->stride, x, x_stride, rows, sums),
                       "cublasGemmEx");
}

/* Return 1 if cuBLAS computes a product with this many rows. cuBLAS cannot sum by block. */
static int moe_by_gemm(const moe_device *d, moe_type type, size_t rows) {
    return d->cublas && !d->graphs[1].blocks && (type == MOE_TYPE_Q8 || type == MOE_TYPE_Q4) && rows > MOE_FEW_ROWS;
}

/* Set up cuBLAS on this stream and test a product of ones. Returns NULL, or the reason why cuBLAS cannot be used, in
 * which case the kernel for few rows computes all products. cuBLAS lacks int8 on some GPUs and may not support new GPUs
 * yet. */
static const char *moe_start_blas(moe_device *d) {
    enum { N = 16, K = 64, ROWS = 48 };
    int8_t *ones = NULL;
    int32_t *sums = NULL, *got = NULL; /* [ROWS, N] */
    int wrong = 0;
    cublasStatus_t code = cublasCreate(&d->cublas);
    if (code != CUBLAS_STATUS_SUCCESS) {
        d->cublas = NULL;
        return cublasGetStatusString(code);
    }
    code = cublasSetStream(d->cublas, d->stream);
    if (code == CUBLAS_STATUS_SUCCESS) {
        void *workspace = moe_acquire(d, MOE_WORKSPACE, 1, "cuBLAS");
        if (workspace) code = cublasSetWorkspace(d->cublas, workspace, MOE_WORKSPACE);
    }
    const size_t bytes = ROWS * N * sizeof *got;
    MOE_CUDA_TRY(d, cudaMallocHost((void **)&got, bytes));
    MOE_CUDA_TRY(d, cudaMalloc((void **)&sums, bytes));
    MOE_CUDA_TRY(d, cudaMalloc((void **)&ones, ROWS * K));
    MOE_CUDA_TRY(d, cudaMemsetAsync(ones, 1, ROWS * K, d->stream));
    if (d->status == MOE_OK && code == CUBLAS_STATUS_SUCCESS) code = moe_call_gemm(d, ones, N, K, ones, K, ROWS, sums);
    if (code == CUBLAS_STATUS_SUCCESS)
        MOE_CUDA_TRY(d, cudaMemcpyAsync(got, sums, bytes, cudaMemcpyDeviceToHost, d->stream));
    if (!MOE_CUDA_TRY(d, cudaStreamSynchronize(d->stream)))
        cudaStreamSynchronize(d->stream); /* wait before memory is freed */
    for (int i = 0; d->status == MOE_OK && code == CUBLAS_STATUS_SUCCESS && i < ROWS * N; i++) wrong |= got[i] != K;
    if (ones) cudaFree(ones);
    if (sums) cudaFree(sums);
    if (got) cudaFreeHost(got);
    if (code == CUBLAS_STATUS_SUCCESS && !wrong) return NULL;
    cublasDestroy(d->cublas);
    d->cublas = NULL;
    return wrong ? "its sums are wrong" : cublasGetStatusString(code);
}

/* Launch a kernel that computes all tiles of p. */
static void moe_tiles(moe_device *d, const moe_products *p) {
    const size_t tiles = (size_t)p->tiles_at_most;
    if (moe_quantised(p->w.type))
        MOE_LAUNCH(d, moe_k_products, tiles * moe_divide_up((size_t)p->w.rows_padded, 16), MOE_BLOCK, *p);
    else MOE_LAUNCH(d, moe_k_float_products, tiles * moe_divide_up((size_t)p->w.rows, 32), MOE_BLOCK, *p);
}

/* Describe a product with rows of codes or floats, as the matrix requires. */
static moe_products moe_products_at(const moe_weights *w, const void *x, size_t x_stride, const float *scales,
                                    size_t rows) {
    moe_products p;
    memset(&p, 0, sizeof p);
    p.w = *w;
    p.x = x;
    p.x_stride = x_stride;
    p.x_scales = scales;
    p.rows = (int)rows;
    return p;
}

static moe_products moe_products_of(const moe_weights *w, const moe_node *x, size_t rows) {
    return moe_products_at(w, x->data, x->stride, x->scales, rows);
}

/* Describe a product with rows outside nodes. These rows have codes if a quantised matrix reads them. */
static moe_products moe_products_between(const moe_weights *w, const float *x, size_t cols, const int8_t *codes,
                                         const float *scales, size_t rows) {
    return moe_quantised(w->type) ? moe_products_at(w, codes, moe_code_stride(cols), scales, rows)
                                  : moe_products_at(w, x, cols, scales, rows);
}

/* Compute the product p, add the rows of `add` unless it is NULL, and store the result in y. */
static void moe_multiply_rows(moe_device *d, moe_products p, const float *add, size_t add_stride, float *y,
                              size_t y_stride) {
    const size_t slice = d->n_sums / (size_t)p.w.rows_padded;
    p.add = add;
    p.add_stride = add_stride;
    p.y = y;
    p.y_stride = y_stride;
    if (p.rows == 0) return;
    if (!moe_by_gemm(d, p.w.type, (size_t)p.rows)) {
        p.tiles_at_most = (int)moe_divide_up((size_t)p.rows, MOE_TILE);
        moe_tiles(d, &p);
        return;
    }
    for (size_t row = 0; row < (size_t)p.rows; row += slice) {
        const size_t rows = moe_min((size_t)p.rows - row, slice);
        moe_gemm(d, &p.w, 0, (const int8_t *)p.x + row * p.x_stride, p.x_stride, (int)rows, d->sums);
        MOE_LAUNCH(d, moe_k_finish, rows, MOE_BLOCK, p, d->sums, (int)row, (const int *)NULL);
    }
}

static void moe_quantise(moe_device *d, const float *x, size_t x_stride, size_t cols, int8_t *q, size_t q_stride,
                         float *scales, size_t rows, const int *count) {
    const size_t padded = moe_round_up(cols, 64), span = scales ? padded : 64;
    if (rows)
        MOE_LAUNCH(d, moe_k_quantise, rows * (padded / span), MOE_BLOCK, x, x_stride, (int)cols, (int)padded, (int)span,
                   q, q_stride, scales, count);
}

static void moe_launch_linear(moe_device *d, const moe_launch *l) {
    const moe_node *n = l->n;
    moe_products p = moe_products_of(&l->b->w, l->s0, l->rows);
    p.bias = l->b->bias;
    p.relu = n->linear.relu;
    moe_multiply_rows(d, p, NULL, 0, l->y, n->stride);
}

/* ---- Recurrences ---- */

static void moe_launch_lstm_step(moe_device *d, const moe_launch *l) {
    const moe_node *n = l->n, *c = n->src[2];
    const moe_cell *cell = n->lstm.cell;
    float *h = l->y, *z = d->lstm.z;
    moe_products p = moe_products_of(&l->b->w, l->s0, l->rows);
    p.bias = l->b->bias;
    moe_multiply_rows(d, p, NULL, 0, z, 4 * cell->hidden);
    moe_multiply_rows(d, moe_products_of(&l->b->w_r, l->s1, l->rows), z, 4 * cell->hidden, z, 4 * cell->hidden);
    MOE_LAUNCH(d, moe_k_lstm_cell, l->rows, MOE_BLOCK, z, 4 * cell->hidden, (const float *)c->data, c->stride,
               (int)cell->hidden, cell->forget_bias, h, n->stride, h + cell->hidden, n->stride);
}

static void moe_launch_lstm_layer(moe_device *d, const moe_launch *l) {
    const moe_node *n = l->n;
    const moe_bound *b = l->b;
    const moe_packed *f = &l->f->packed;
    const size_t hidden = n->lstm.cell->hidden, state = n->cols, r_stride = moe_code_stride(state),
                 h_stride = moe_code_stride(hidden), x_stride = n->src[0]->stride;
    const int codes = moe_quantised(b->w_r.type), h_codes = moe_quantised(b->w_proj.type),
              projects = n->lstm.cell->w_proj.rows > 0;
    float *c = d->lstm.c, *h = d->lstm.h;
    /* Every sentence starts from a zero state. */
    MOE_CUDA_TRY(d, cudaMemsetAsync(c, 0, l->g->sentences * hidden * sizeof *c, d->stream));
    if (codes) {
        MOE_CUDA_TRY(d, cudaMemsetAsync(d->lstm.r_codes, 0, l->g->sentences * r_stride, d->stream));
        if (d->lstm.r_scales)
            MOE_CUDA_TRY(d, cudaMemsetAsync(d->lstm.r_scales, 0, l->g->sentences * sizeof(float), d->stream));
    } else {
        MOE_CUDA_TRY(d, cudaMemsetAsync(d->lstm.r, 0, l->g->sentences * state * sizeof(float), d->stream));
    }
    for (size_t i = 0; i < f->steps; i++) {
        const size_t step = n->lstm.backward ? f->steps - 1 - i : i, live = f->live[step], first = f->first[step];
        const float *x = (const float *)n->src[0]->data + first * x_stride;
        float *out = (float *)n->data + first * n->stride;
        moe_multiply_rows(d, moe_products_between(&b->w_r, d->lstm.r, state, d->lstm.r_codes, d->lstm.r_scales, live),
                          x, x_stride, d->lstm.z, 4 * hidden);
        MOE_LAUNCH(d, moe_k_lstm_cell, live, MOE_BLOCK, d->lstm.z, 4 * hidden, c, hidden, (int)hidden,
                   n->lstm.cell->forget_bias, projects ? h : out, projects ? hidden : n->stride, c, hidden);
        if (h_codes) moe_quantise(d, h, hidden, hidden, d->lstm.h_codes, h_stride, d->lstm.h_scales, live, NULL);
        if (projects)
            moe_multiply_rows(d, moe_products_between(&b->w_proj, h, hidden, d->lstm.h_codes, d->lstm.h_scales, live),
                              NULL, 0, out, n->stride);
        if (codes) moe_quantise(d, out, n->stride, state, d->lstm.r_codes, r_stride, d->lstm.r_scales, live, NULL);
        else
            MOE_LAUNCH(d, moe_k_scatter, live, MOE_BLOCK, out, n->stride, (const int32_t *)NULL, (const int32_t *)NULL,
                       (int)state, d->lstm.r, state);
    }
    if (n->lstm.last_r && f->steps) { /* the backward direction ends at the first token, i.e. in the first rows */
        MOE_LAUNCH(d, moe_k_scatter, f->live[0], MOE_BLOCK, (const float *)n->data, n->stride,
                   n->lstm.backward ? NULL : d->last, d->sentence, (int)state, n->lstm.last_r, state);
        MOE_LAUNCH(d, moe_k_scatter, f->live[0], MOE_BLOCK, c, hidden, (const int32_t *)NULL, d->sentence, (int)hidden,
                   n->lstm.last_c, hidden);
    }
}

/* ---- Attention, gate, experts ---- */

static void moe_launch_attention(moe_device *d, const moe_launch *l) {
    const moe_node *n = l->n;
    moe_attending a;
    memset(&a, 0, sizeof a);
    static_cast<moe_step_rows &>(a) = *d;
    a.query = l->x0;
    a.query_stride = l->s0->stride;
    a.v = l->b->v;
    a.keys = n->attention.keys;
    a.values = n->attention.values;
    a.size = (int)n->src[0]->cols;
    a.width = (int)n->cols;
    a.product = n->attention.product;
    a.start_zero = n->attention.start_zero;
    a.scores = d->attention;
    a.begins = (int)l->g->rows;
    a.before = l->x1;
    if (l->s1) a.before_stride = l->s1->stride;
    a.max_source = l->g->max_source;
    a.y = (float *)n->data;
    a.y_stride = n->stride;
    MOE_LAUNCH(d, moe_k_attention, l->rows, MOE_BLOCK, a);
}

/* Compute heads in slices of rows, with the scores in d->sums, which other nodes use for integer sums. */
static void moe_launch_heads(moe_device *d, const moe_launch *l) {
    const moe_node *n = l->n, *x = l->s0;
    const size_t width = n->cols / n->heads.heads;
    const moe_search *search = &d->searching.search;
    const int shows = n->heads.shown && (!d->searching.slots || search->aligns || search->beta != 0.0f);
    moe_heads_args a;
    size_t slice;
    memset(&a, 0, sizeof a);
    a.query = (const float *)x->data;
    a.query_stride = x->stride;
    a.keep = n->heads.keep;
    a.rows = (const char *)(n->heads.rows ? n->heads.rows : a.query + n->cols);
    a.stride = n->heads.rows ? moe_keep_bytes(&a.keep) : x->stride * sizeof(float);
    a.heads = (int)n->heads.heads;
    a.share = (int)n->heads.share;
    a.width = (int)width;
    a.cols = (int)(n->cols / n->heads.share);
    a.window = n->heads.window;
    a.scale = n->heads.scale;
    a.distances.reach = n->heads.distances.reach;
    a.distances.bias = l->b->weight;
    a.distances.keys = l->b->v;
    a.distances.values = l->b->threshold;
    a.positions = d->positions;
    a.segment = d->segment;
    a.length = d->length;
    a.first = n->heads.rows ? NULL : d->first;
    a.chain = n->heads.rows && n->heads.within ? d->chain : NULL;
    a.chain_stride = l->g->max_target;
    a.live = d->live;
    a.scores = (float *)(void *)d->sums; /* scores and sums are both 4 bytes; one row always fits */
    a.longest = moe_longest(l->g);
    a.y = l->y;
    a.y_stride = n->stride;
    slice = d->n_sums / (n->heads.heads * a.longest);
    for (size_t row = 0; row < l->rows; row += slice) {
        a.row0 = (int)row;
        MOE_LAUNCH(d, moe_k_heads, moe_min(l->rows - row, slice) * n->heads.heads, MOE_BLOCK, a);
        if (shows)
            MOE_LAUNCH(d, moe_k_mean_of_heads, moe_min(l->rows - row, slice), MOE_BLOCK, a, n->heads.shown,
                       d->attention, l->g->max_source);
    }
}

static moe_selections moe_selections_of(const moe_node *gate) {
    moe_selections s;
    s.words = (uint32_t *)gate->data;
    s.stride = gate->stride;
    s.capacity = gate->gate.capacity;
    return s;
}

/* Run a gate. If `p` is not NULL, p [rows, experts] receives the probabilities. */
static void moe_run_gate(moe_device *d, const moe_node *n, const moe_bound *b, size_t rows, float *p) {
    const moe_node *x = n->src[0];
    moe_gate_args a;
    moe_group_products g;
    size_t slice = rows;
    memset(&a, 0, sizeof a);
    a.logits = (const float *)x->data;
    a.stride = x->stride;
    a.level = (int)n->gate.gating->level;
    a.k = (int)n->gate.gating->k;
    a.gate = n->gate.kind;
    a.empty_zero = n->gate.gating->empty_zero;
    a.weights = n->gate.gating->weights;
    a.choice = b->weight;
    a.threshold = b->threshold;
    a.live = d->live;
    a.chosen = moe_selections_of(n);
    a.p = p;
    a.experts = n->cols;
    memset(&g, 0, sizeof g);
    if (n->gate.grouped) {
        a.parents = g.parents = moe_selections_of(n->src[1]);
        a.stride = g.parents.capacity * n->gate.gating->level;
        a.logits = g.y = (float *)(void *)d->sums; /* both types have 4 bytes; a row of all experts always fits */
        slice = d->n_sums / a.stride;
        g.w = b->w;
        g.bias = b->bias;
        g.relu = n->gate.gating->relu;
        g.x = (const float *)x->data;
        g.x_stride = x->stride;
        g.level = a.level;
        g.tiles = (int)moe_divide_up(n->gate.gating->level, MOE_GROUP_TILE);
    }
    const int scored = n->gate.kind == MOE_GATE_TOPK && a.weights != MOE_WEIGHTS_CHOSEN; /* such gates have no groups */
    if (scored) a.ranks = (float *)(void *)d->sums;
    if (scored) slice = d->n_sums / n->gate.gating->level;
    for (size_t row = 0; row < rows; row += slice) {
        const size_t some = moe_min(rows - row, slice);
        if (!n->gate.grouped) a.logits = (const float *)x->data + row * x->stride;
        a.row0 = g.row0 = row;
        if (n->gate.grouped)
            MOE_LAUNCH(d, moe_k_group_products, some * g.parents.capacity * (size_t)g.tiles, MOE_BLOCK, g);
        MOE_LAUNCH(d, moe_k_gate, some, MOE_BLOCK, a);
    }
}

/* Return the approximate mean number of experts per row. */
static size_t moe_wanted(const moe_node *gate) {
    const size_t own =
        moe_gate_is_dense(gate->gate.kind) || !gate->gate.gating->k ? gate->gate.gating->level : gate->gate.gating->k;
    return gate->gate.grouped ? own * moe_wanted(gate->src[1]) : own;
}

/* Return 1 if rows may select different numbers of experts, up to the gate's capacity. */
static int moe_open(const moe_node *gate) {
    return gate->gate.kind == MOE_GATE_THRESHOLD || (gate->gate.grouped && moe_open(gate->src[1]));
}

/* Return the maximum number of pairs processed at once: the number that the rows can select, but
 * no more than the larger of MOE_PAIRS and one row's maximum. */
static size_t moe_pairs(const moe_node *n, size_t rows) {
    const size_t most = n->src[1]->gate.capacity, limit = moe_max(MOE_PAIRS, most);
    return rows < limit / most ? rows * most : limit;
}

/* Experts that are on the device at the same time, and their consecutive pairs. */
typedef struct moe_group {
    size_t begin, pairs; /* first pair; maximum number of pairs */
    const int *count;    /* actual number of pairs; NULL if equal to the maximum */
    size_t tile, tiles;  /* first tile; maximum number of tiles */
    const int *n_tiles;
    /* in host memory, for cuBLAS only: */
    size_t experts;
    const int *first; /* [experts + 1] pairs */
    const int *bays;  /* [experts] bays; NULL if all experts are on the device */
} moe_group;

/* Compute a product for the pairs of each expert with cuBLAS. */
static void moe_expert_gemms(moe_device *d, moe_products p, const int8_t *x, const moe_group *g) {
    const int slice = (int)(d->n_sums / (size_t)p.w.rows_padded), pairs = g->first[g->experts], *first = g->first;
    size_t e = 0;
    for (int from = first[0], to; from < pairs && d->status == MOE_OK; from = to) {
        to = pairs - from < slice ? pairs : from + slice;
        while (first[e + 1] <= from) e++;
        for (size_t at = e; at < g->experts && first[at] < to; at++) {
            const int begin = first[at] > from ? first[at] : from, end = first[at + 1] < to ? first[at + 1] : to;
            if (begin < end)
                moe_gemm(d, &p.w, g->bays ? g->bays[at] : (int)at, x + (size_t)begin * p.x_stride, p.x_stride,
                         end - begin, d->sums + (size_t)(begin - from) * (size_t)p.w.rows_padded);
        }
        MOE_LAUNCH(d, moe_k_finish, to - from, MOE_BLOCK, p, d->sums, from, d->moe.pair_expert);
    }
}

/* Download integers and wait for their arrival. Only this function waits in the middle of a step. */
static void moe_fetch_ints(moe_device *d, const int *from, size_t n) {
    moe_receive(d, d->moe.host, from, n * sizeof *from);
}

/* Return 1 if cuBLAS computes an expert layer, because there are many rows per expert. */
static int moe_experts_by_gemm(const moe_device *d, const moe_node *n, size_t rows) {
    return moe_by_gemm(d, n->experts->up.type, moe_divide_up(rows * moe_wanted(n->src[1]), n->experts->count));
}

/* Return 1 if the rows' selections may exceed the capacity and must be counted. */
static int moe_must_count(const moe_node *n, size_t rows) {
    return moe_open(n->src[1]) && rows * n->src[1]->gate.capacity > moe_pairs(n, rows);
}

/* Return 1 if the launches of a node depend on numbers on the device. */
static int moe_waits(const moe_device *d, const moe_node *n, size_t rows) {
    return n->op == MOE_OP_EXPERTS && (d->cache.bays || moe_experts_by_gemm(d, n, rows) || moe_must_count(n, rows));
}

/* Sort the experts that have pairs into the cache's processing order and assign bays, also on the device. Set *hits to
 * the number of these experts that are resident. Returns the number of experts. */
static size_t moe_plan_experts(moe_device *d, size_t n, moe_cache_layer *layer, moe_routes *a, size_t *hits) {
    int *start = d->fetching.plan, *bays = start + n, *order = d->fetching.order, pair = 0;
    int4 *tiles = d->fetching.tiles;
    size_t wanted = 0, n_tiles = 0;
    moe_fetch_ints(d, a->first, n + 1); /* waits, so the previous run's plan has been uploaded */
    if (d->status != MOE_OK) return 0;
    memset(start, 0, 2 * n * sizeof *start);
    for (size_t e = 0; e < n; e++)
        if (d->moe.host[e] < d->moe.host[e + 1]) order[wanted++] = (int)e;
    *hits = moe_cache_plan(&d->cache, layer, order, wanted, d->fetching.place);
    for (size_t i = 0; i < wanted; i++) {
        const size_t e = (size_t)order[i];
        bays[e] = d->fetching.place[i];
        d->fetching.first[i] = start[e] = pair;
        for (int left = d->moe.host[e + 1] - d->moe.host[e]; left > 0; left -= MOE_TILE) {
            const int4 tile = { bays[e], pair, left < MOE_TILE ? left : MOE_TILE, 0 };
            tiles[n_tiles++] = tile;
            pair += tile.z;
        }
    }
    d->fetching.first[wanted] = pair;
    a->bays = a->count + n;
    moe_send(d, a->count, start, 2 * n * sizeof *start);
    if (n_tiles) moe_send(d, a->tiles, tiles, n_tiles * sizeof *tiles);
    return wanted;
}

/* Compute both products of a group. */
static void moe_run_group(moe_device *d, moe_products up, moe_products down, const moe_group *g, int by_gemm) {
    const size_t above = (size_t)up.w.rows, hidden = (size_t)down.w.cols, unit_stride = moe_code_stride(hidden);
    float *units = d->moe.units + g->begin * above;
    if (!g->pairs) return;
    up.tiles += g->tile;
    down.tiles += g->tile;
    up.n_tiles = down.n_tiles = g->n_tiles;
    up.tiles_at_most = down.tiles_at_most = (int)g->tiles;
    if (by_gemm) moe_expert_gemms(d, up, d->moe.inputs, g);
    else moe_tiles(d, &up);
    if (above > hidden) MOE_LAUNCH(d, moe_k_gate_units, g->pairs, MOE_BLOCK, units, above, (int)hidden, g->count);
    if (moe_quantised(up.w.type))
        moe_quantise(d, units, above, hidden, d->moe.codes + g->begin * unit_stride, unit_stride,
                     d->moe.code_scales ? d->moe.code_scales + g->begin : NULL, g->pairs, g->count);
    if (by_gemm) moe_expert_gemms(d, down, d->moe.codes, g);
    else moe_tiles(d, &down);
}

/* Run experts in groups with distinct bays: first the resident experts, so that the GPU is busy while the host copies
 * the others, then the others after their upload. Replaced experts are no longer in use. */
static void moe_run_groups(moe_device *d, const moe_node *n, const moe_products *up, const moe_products *down,
                           size_t experts, size_t hits, int by_gemm) {
    moe_group g;
    memset(&g, 0, sizeof g);
    for (size_t i = 0; i < experts && d->status == MOE_OK; i += g.experts, g.tile += g.tiles) {
        g.experts = i < hits ? hits : moe_min(experts - i, d->cache.transit);
        g.first = d->fetching.first + i;
        g.bays = d->fetching.place + i;
        g.begin = (size_t)g.first[0];
        g.pairs = (size_t)g.first[g.experts] - g.begin;
        g.tiles = 0;
        for (size_t k = 0; k < g.experts; k++) {
            g.tiles += moe_divide_up((size_t)(g.first[k + 1] - g.first[k]), MOE_TILE);
            if (i >= hits)
                moe_lift_expert(d, n, (size_t)d->fetching.order[i + k],
                                d->fetching.slabs + (size_t)g.bays[k] * d->fetching.bay_bytes);
        }
        moe_run_group(d, *up, *down, &g, by_gemm);
    }
}

/* Run the experts for the current rows, all of whose pairs fit. */
static void moe_run_expert_rows(moe_device *d, const moe_node *n, moe_bound *b, moe_routes a, size_t pairs,
                                int by_gemm) {
    const moe_node *x = n->src[0];
    const size_t hidden = n->experts->hidden, tiles = pairs / MOE_TILE + moe_min(pairs, n->experts->count),
                 rows = (size_t)a.rows;
    size_t experts = 0, hits = 0;
    moe_group all;
    moe_products up = moe_products_of(&b->up, x, 0),
                 down = moe_products_between(&b->down, d->moe.units, hidden, d->moe.codes, d->moe.code_scales, 0);
    MOE_CUDA_TRY(d, cudaMemsetAsync(a.count, 0, n->experts->count * sizeof *a.count, d->stream));
    MOE_LAUNCH(d, moe_k_count, rows, MOE_BLOCK, a);
    MOE_LAUNCH(d, moe_k_offsets, moe_divide_up(n->experts->count, MOE_OFFSETS), MOE_BLOCK, a);
    MOE_LAUNCH(d, moe_k_cursors, moe_divide_up(n->experts->count, MOE_BLOCK), MOE_BLOCK, a);
    if (d->cache.bays) experts = moe_plan_experts(d, n->experts->count, &b->layer, &a, &hits);
    MOE_LAUNCH(d, moe_k_place, rows, MOE_BLOCK, a);
    if (by_gemm && !d->cache.bays) moe_fetch_ints(d, a.first, n->experts->count + 1);
    if (by_gemm || d->cache.bays) pairs = d->status == MOE_OK ? (size_t)d->moe.host[n->experts->count] : 0;
    up.relu = !n->experts->gated;
    up.bias = b->up_bias;
    down.bias = b->down_bias;
    up.x_rows = a.pair_row;
    up.tiles = down.tiles = a.tiles;
    up.y = d->moe.units;
    up.y_stride = n->experts->up.rows;
    if (!moe_quantised(b->down.type)) down.x_stride = up.y_stride;
    down.y = d->moe.out;
    down.y_stride = n->cols;
    if (by_gemm && pairs) {
        MOE_LAUNCH(d, moe_k_collect, pairs, MOE_BLOCK, (const int8_t *)x->data, x->scales, x->stride,
                   (int)moe_code_stride(x->cols), a.pair_row, d->moe.inputs, d->moe.input_scales);
        up.x_scales = d->moe.input_scales;
    }
    if (d->cache.bays) {
        moe_run_groups(d, n, &up, &down, experts, hits, by_gemm);
    } else {
        memset(&all, 0, sizeof all);
        all.pairs = pairs;
        all.count = a.totals;
        all.tiles = tiles;
        all.n_tiles = a.totals + 1;
        all.experts = n->experts->count;
        all.first = d->moe.host;
        moe_run_group(d, up, down, &all, by_gemm);
    }
    MOE_LAUNCH(d, moe_k_combine, rows, MOE_BLOCK, a, (const float *)d->moe.out, n->cols, (int)n->cols,
               n->experts->scale, (float *)n->data, n->stride);
}

/* Run the experts for all rows, in chunks of rows whose pairs fit, because with a threshold a row may select any number
 * of experts. Chunks do not affect the results. */
static void moe_run_experts(moe_device *d, const moe_node *n, moe_bound *b, size_t rows) {
    const size_t most = n->src[1]->gate.capacity, capacity = moe_pairs(n, d->rows);
    const int by_gemm = moe_experts_by_gemm(d, n, rows), look = moe_must_count(n, rows);
    moe_routes a = d->moe;
    a.chosen = moe_selections_of(n->src[1]);
    a.n = (int)n->experts->count;
    for (size_t row = 0, next; row < rows && d->status == MOE_OK; row = next) {
        size_t pairs = 0;
        if (look) { /* count in each chunk, since kernels of the previous chunk overwrite counts */
            MOE_LAUNCH(d, moe_k_selected, moe_divide_up(rows, MOE_BLOCK), MOE_BLOCK, a.chosen, rows, a.row_first);
            moe_fetch_ints(d, a.row_first, rows);
            if (d->status != MOE_OK) return;
            for (next = row; next < rows && pairs + (size_t)d->moe.host[next] <= capacity; next++)
                pairs += (size_t)d->moe.host[next];
        } else {
            next = rows - row < capacity / most ? rows : row + capacity / most;
            pairs = (next - row) * most;
        }
        a.row0 = (int)row;
        a.rows = (int)(next - row);
        moe_run_expert_rows(d, n, b, a, pairs, by_gemm);
    }
}

static void moe_launch_mix(moe_device *d, const moe_launch *l) {
    moe_routes a;
    memset(&a, 0, sizeof a);
    a.chosen = moe_selections_of(l->s1);
    MOE_LAUNCH(d, moe_k_combine, l->rows, MOE_BLOCK, a, l->x0, l->s0->stride, (int)l->n->cols, l->n->scale, l->y,
               l->n->stride);
}

/* ---- Output ---- */

static void moe_launch_output(moe_device *d, const moe_launch *l) {
    const moe_node *n = l->n;
    const moe_bound *b = l->b;
    const size_t chunks = moe_divide_up(n->output.w->rows, MOE_OUTPUT_CHUNK),
                 slice = d->n_sums / (size_t)b->w.rows_padded;
    const int by_gemm = moe_by_gemm(d, b->w.type, l->rows);
    moe_outputs a;
    memset(&a, 0, sizeof a);
    a.chunks = (int)chunks;
    a.top = (int)l->g->top;
    a.never = b->never;
    a.n_never = (int)n->output.n_never;
    a.n_suppressed = (int)n->output.n_suppressed;
    a.eos = n->output.eos;
    a.hold = d->hold;
    a.want = d->want;
    a.trace = l->traced && n->stride ? (float *)n->data : NULL;
    a.trace_stride = n->stride;
    static_cast<moe_chunks &>(a) = d->output;
    a.want_logprob = d->want_logprob;
    a.top_logprobs = d->top_logprobs;
    a.top_ids = d->top_ids;
    a.n_starts = d->searching.search.max_constraints;
    a.starts = d->searching.starts;
    a.start_logprobs = d->searching.start_logprobs;
    a.slot = d->searching.slot;
    a.listed = d->searching.search.listed != 0;
    a.kinds = d->searching.used ? 2 : 1;
    a.used = d->searching.used;
    a.used_words = d->searching.search.used_words;
    a.top_weighed = d->searching.answer.top_weighed;
    a.sentence = d->sentence;
    for (size_t row = 0; row < l->rows; row += slice) {
        const size_t some = moe_min(l->rows - row, slice);
        a.p = moe_products_of(&b->w, n->src[0], some);
        a.p.bias = b->bias;
        if (by_gemm) {
            moe_gemm(d, &b->w, 0, (const int8_t *)a.p.x + row * a.p.x_stride, a.p.x_stride, (int)some, d->sums);
            a.sums = d->sums;
        } else {
            a.p.x = (const char *)a.p.x + row * a.p.x_stride * (moe_quantised(b->w.type) ? 1 : sizeof(float));
            if (a.p.x_scales) a.p.x_scales += row;
            a.p.y = (float *)(void *)d->sums; /* logits and sums are both 4 bytes */
            a.p.y_stride = (size_t)b->w.rows_padded;
            a.p.tiles_at_most = (int)moe_divide_up(some, MOE_TILE);
            moe_tiles(d, &a.p);
        }
        a.row0 = (int)row;
        MOE_LAUNCH(d, moe_k_output, some * chunks, MOE_BLOCK, a);
    }
    MOE_LAUNCH(d, moe_k_join, l->rows, MOE_BLOCK, a);
    if (a.weights) MOE_LAUNCH(d, moe_k_sample, d->searching.slots, MOE_BLOCK, a);
}

/* ---- The run of a graph ---- */

/* Launchers of simple ops. MOE_OPS needs one launcher for each op. */
static void moe_launch_input(moe_device *d, const moe_launch *l) {
    MOE_LAUNCH(d, moe_k_gather, l->rows, MOE_BLOCK, (const float *)d->inputs, d->input_cols, (const int32_t *)NULL,
               (int)l->n->cols, l->y, l->n->stride);
}
static void moe_launch_embed(moe_device *d, const moe_launch *l) {
    MOE_LAUNCH(d, moe_k_embed, l->rows, MOE_BLOCK, l->b->w, d->ids, l->n->embed.scale, l->b->positions, d->positions,
               l->y, l->n->stride);
}
static void moe_launch_quantise(moe_device *d, const moe_launch *l) {
    moe_quantise(d, l->x0, l->s0->stride, l->n->cols, (int8_t *)l->n->data, l->n->stride, l->n->scales, l->rows, NULL);
}
static void moe_launch_pointwise(moe_device *d, const moe_launch *l) {
    MOE_LAUNCH(d, moe_k_pointwise, l->rows, MOE_BLOCK, l->x0, l->s0->stride, l->x1, l->s1->stride, (int)l->s1->cols,
               l->n->product, (int)l->n->cols, l->y, l->n->stride);
}
static void moe_launch_concat(moe_device *d, const moe_launch *l) {
    MOE_LAUNCH(d, moe_k_concat, l->rows, MOE_BLOCK, l->x0, l->s0->stride, (int)l->s0->cols, l->x1, l->s1->stride,
               (int)l->s1->cols, l->y, l->n->stride);
}
static void moe_launch_unary(moe_device *d, const moe_launch *l) {
    MOE_LAUNCH(d, moe_k_unary, l->rows, MOE_BLOCK, l->n->unary, l->x0, l->s0->stride, (int)l->n->cols, l->y,
               l->n->stride);
}
static void moe_launch_norm(moe_device *d, const moe_launch *l) {
    MOE_LAUNCH(d, moe_k_norm, l->rows, MOE_BLOCK, l->x0, l->s0->stride, (int)l->n->cols, l->b->weight, l->b->bias,
               l->n->norm.epsilon, l->n->norm.rms, l->y, l->n->stride);
}
static void moe_launch_rotary(moe_device *d, const moe_launch *l) {
    const moe_rotary_op *o = &l->n->rotary;
    MOE_LAUNCH(d, moe_k_rotary, l->rows * (o->queries + 2 * o->keys), MOE_BLOCK, *o, l->b->weight, l->b->bias,
               l->b->positions, o->table ? o->table->cols : 0, d->positions, l->x0, l->s0->stride, l->y, l->n->stride);
}
static void moe_launch_delta(moe_device *, const moe_launch *) {} /* moe_check_device rejects such models */
static void moe_launch_view(moe_device *, const moe_launch *) {}
static void moe_launch_gather(moe_device *d, const moe_launch *l) {
    MOE_LAUNCH(d, moe_k_gather, l->rows, MOE_BLOCK, l->n->carried.rows, l->n->cols, d->parents, (int)l->n->cols, l->y,
               l->n->stride);
}
static void moe_launch_store(moe_device *d, const moe_launch *l) {
    const moe_carried_op *o = &l->n->carried;
    if (o->keep.type != MOE_TYPE_F32)
        MOE_LAUNCH(d, moe_k_keep, l->rows, MOE_BLOCK, l->x0, l->s0->stride, d->destination, o->keep, (char *)o->rows);
    else
        MOE_LAUNCH(d, moe_k_scatter, l->rows, MOE_BLOCK, l->x0, l->s0->stride, (const int32_t *)NULL,
                   o->by == MOE_BY_PARENT ? NULL : d->destination, (int)l->n->cols, o->rows, l->n->cols);
}
static void moe_launch_ssru(moe_device *d, const moe_launch *l) {
    MOE_LAUNCH(d, moe_k_ssru, l->rows, MOE_BLOCK, l->x0, l->s0->stride, l->x1, l->s1->stride,
               (const float *)l->n->src[2]->data, l->n->src[2]->stride, d->parents, (int)l->s0->cols, l->y,
               l->n->stride);
}
static void moe_launch_average(moe_device *d, const moe_launch *l) {
    MOE_LAUNCH(d, moe_k_average, l->rows, MOE_BLOCK, l->x0, l->s0->stride, l->x1, l->s1->stride, d->parents,
               d->positions, (int)l->s0->cols, l->y, l->n->stride);
}
static void moe_launch_gate(moe_device *d, const moe_launch *l) { moe_run_gate(d, l->n, l->b, l->rows, NULL); }
static void moe_launch_experts(moe_device *d, const moe_launch *l) { moe_run_experts(d, l->n, l->b, l->rows); }

static void moe_run_node(moe_device *d, int which, size_t node, const moe_frame *f, size_t rows, int traced) {
#define MOE_LAUNCHER(NAME, name, how, cost) moe_launch_##name,
    static void (*const launchers[])(moe_device *, const moe_launch *) = { MOE_OPS(MOE_LAUNCHER) };
    const moe_graph *g = &d->graphs[which];
    const moe_node *n = &g->nodes[node], *s0 = n->src[0], *s1 = n->src[1];
    moe_launch l = { g, n, s0, s1, &d->bound[which][node], f, rows, traced, (float *)n->data, NULL, NULL };
    if (s0) l.x0 = (const float *)s0->data;
    if (s1) l.x1 = (const float *)s1->data;
    launchers[n->op](d, &l);
}

static void moe_run_nodes(moe_device *d, int which, const moe_frame *f, size_t rows) {
    for (size_t i = 0; i < d->graphs[which].count; i++) moe_run_node(d, which, i, f, rows, 0);
}

/* Download rows of 32-bit words and wait for their arrival. */
static void moe_fetch_rows(moe_device *d, void *to, const void *from, size_t stride, size_t cols, size_t rows) {
    MOE_CUDA_TRY(d, cudaMemcpy2DAsync(to, stride * 4, from, stride * 4, cols * 4, rows, cudaMemcpyDeviceToHost,
                                      d->stream));
    if (!MOE_CUDA_TRY(d, cudaStreamSynchronize(d->stream)))
        cudaStreamSynchronize(d->stream); /* wait in any case, because the caller releases `to` */
}

/* Like moe_trace_node: trace a gate's weights, with 0 for unselected experts, then its probabilities. */
static void moe_run_traced_gate(moe_device *d, const moe_node *n, const moe_bound *b, size_t rows, moe_trace_fn trace,
                                void *user) {
    const size_t bytes = rows * n->cols * sizeof(float), words = rows * n->stride * sizeof(uint32_t);
    float *p = (float *)moe_acquire(d, bytes, 1, "a trace"), *dense = (float *)moe_host(d, bytes, "a trace");
    uint32_t *chosen = (uint32_t *)moe_host(d, words, "a trace");
    char name[64];
    MOE_CUDA_TRY(d, cudaMemsetAsync(p, 0, bytes, d->stream));
    moe_run_gate(d, n, b, rows, p);
    moe_fetch_rows(d, chosen, n->data, n->stride, n->stride, rows);
    for (size_t r = 0; r < rows && d->status == MOE_OK; r++) {
        const uint32_t *row = chosen + r * n->stride;
        for (size_t i = 0; i < row[0]; i++)
            memcpy(&dense[r * n->cols + row[2 + i]], &row[2 + n->gate.capacity + i], sizeof *dense);
    }
    if (d->status == MOE_OK) trace(user, n->name, dense, rows, n->cols, n->cols);
    moe_fetch_rows(d, dense, p, n->cols, n->cols, rows);
    snprintf(name, sizeof name, "%s.probabilities", n->name);
    if (d->status == MOE_OK) trace(user, name, dense, rows, n->cols, n->cols);
    if (chosen) d->allocator.release(d->allocator.user, chosen, words);
    if (dense) d->allocator.release(d->allocator.user, dense, bytes);
    if (d->status == MOE_OK) moe_give(d, p, bytes); /* after a failure moe_device_close frees p */
}

/* Run a graph node by node and trace each node. */
static void moe_run_traced(moe_device *d, int which, const moe_frame *f, size_t rows, moe_trace_fn trace, void *user) {
    const moe_graph *g = &d->graphs[which];
    for (size_t i = 0; i < g->count && d->status == MOE_OK; i++) {
        const moe_node *n = &g->nodes[i];
        const size_t bytes = rows * n->stride * sizeof(float);
        if (n->op == MOE_OP_GATE) {
            moe_run_traced_gate(d, n, &d->bound[which][i], rows, trace, user);
            continue;
        }
        moe_run_node(d, which, i, f, rows, 1);
        if (n->op == MOE_OP_QUANTISE || n->op == MOE_OP_STORE) continue;
        float *copy = (float *)moe_host(d, bytes, "a trace");
        if (!copy) return;
        if (n->stride)
            moe_fetch_rows(d, copy, n->data, n->stride, n->cols, rows); /* the last row of a view is shorter */
        if (d->status == MOE_OK) trace(user, n->name, copy, n->stride ? rows : 0, n->cols, n->stride);
        d->allocator.release(d->allocator.user, copy, bytes ? bytes : 1);
    }
}

/* ---- The search ---- */

/* Clear slots and start new sentences. This is not part of CUDA graphs, because the number of sentences varies. */
static void moe_lift_sentences(moe_device *d) {
    const size_t n = d->sentences.n, bytes = d->sentences.n_targets * sizeof(int32_t);
    const moe_begun *up = d->sentences.begun_host;
    moe_begun *begun = d->sentences.begun;
    int32_t *targets = d->sentences.targets;
    if (d->sentences.fresh)
        MOE_LAUNCH(d, moe_k_slots, moe_divide_up((size_t)d->searching.slots, MOE_BLOCK), MOE_BLOCK, d->searching);
    d->sentences.fresh = 0;
    if (!n) return;
    moe_send(d, begun, up, n * sizeof *begun);
    if (bytes) moe_send(d, targets, d->sentences.targets_host, bytes);
    MOE_LAUNCH(d, moe_k_begin, n, MOE_BLOCK, d->searching, begun, targets);
    d->sentences.live += n;
    for (size_t i = 0; i < n; i++) d->sentences.ahead += moe_task_given(&up[i].task);
    d->sentences.n = d->sentences.n_targets = 0;
}

/* Apply the decoder's outputs to the hypotheses. */
static void moe_run_search(moe_device *d, size_t rows) {
    const moe_searching *a = &d->searching;
    const size_t slots = (size_t)a->slots;
    if (a->coverage[0] && a->search.rules.by_place)
        MOE_LAUNCH(d, moe_k_place_coverage, slots * (size_t)a->search.beam, MOE_BLOCK, *a);
    else if (a->coverage[0]) MOE_LAUNCH(d, moe_k_coverage, rows, MOE_BLOCK, *a);
    MOE_LAUNCH(d, moe_k_search, moe_divide_up(slots, 32), 32, *a); /* small blocks occupy many multiprocessors */
    MOE_LAUNCH(d, moe_k_report, 1, MOE_BLOCK, *a);
    MOE_LAUNCH(d, moe_k_results, slots, 32, *a);
}

static void moe_run_fill(moe_device *d, size_t rows) {
    MOE_LAUNCH(d, moe_k_fill, 1, MOE_BLOCK, d->searching, (int)rows);
    if (d->searching.chain) MOE_LAUNCH(d, moe_k_chain, d->searching.slots, 32, d->searching);
    if (d->searching.used) MOE_LAUNCH(d, moe_k_used, d->searching.slots, MOE_BLOCK, d->searching);
}

/* Run the decoder, and the search before and after it if the device searches. */
static void moe_run_decoder(moe_device *d, const moe_frame *f, size_t rows) {
    if (d->searching.slots) moe_run_fill(d, rows);
    moe_run_nodes(d, 1, f, rows);
    if (d->searching.slots) moe_run_search(d, rows);
}

/* Download the first MOE_HEAD words of the results, then the rest. */
static void moe_fetch_results(moe_device *d, moe_device_results *out) {
    const size_t head = moe_min(MOE_HEAD, d->sentences.words);
    int32_t *to = d->sentences.results_host;
    const int32_t *from = d->searching.results;
    if (!moe_receive(d, to, from, head * sizeof *to)) return;
    if ((size_t)to[2] > head && !moe_receive(d, to + head, from + head, ((size_t)to[2] - head) * sizeof *to)) return;
    d->sentences.live = (size_t)to[0];
    d->sentences.ahead = (size_t)to[3];
    out->done = (size_t)to[1];
    out->results = to + MOE_RESULTS;
}

/* Round `rows` up to one of the few row counts for which graphs are cached. Each filler row starts a sentence without
 * source tokens, which takes time but has no effect. */
static size_t moe_bucket(size_t rows, size_t capacity, size_t *index) {
    const size_t step = moe_divide_up(capacity, MOE_BUCKETS - 4), unit = step < 16 ? 16 : step;
    size_t bucket = 4;
    *index = 0;
    for (; bucket < 16 && bucket < rows; bucket *= 2) ++*index;
    if (bucket < rows) {
        *index = 2 + moe_divide_up(rows, unit);
        bucket = moe_divide_up(rows, unit) * unit;
    }
    return bucket < capacity ? bucket : capacity;
}

/* Create the CUDA graph of a step. If this fails, log once that steps are launched kernel by kernel. */
static int moe_capture(moe_device *d, const moe_frame *f, size_t rows, cudaGraphExec_t *exec) {
    cudaGraph_t graph = NULL;
    moe_error why = d->error;
    cudaError_t code = cudaStreamBeginCapture(d->stream, cudaStreamCaptureModeThreadLocal);
    if (code == cudaSuccess) {
        moe_run_decoder(d, f, rows);
        why = d->error;
        code = cudaStreamEndCapture(d->stream, &graph);
        if (code == cudaSuccess && d->status == MOE_OK) code = cudaGraphInstantiate(exec, graph, 0);
        if (graph) cudaGraphDestroy(graph);
    }
    if (code == cudaSuccess && d->status == MOE_OK) return 1;
    cudaGetLastError();
    if (d->log) d->log(d->log_user, "CUDA graphs are not available: steps are launched kernel by kernel");
    if (d->log && d->status != MOE_OK) d->log(d->log_user, why.message);
    *exec = NULL;
    d->no_graphs = 1;
    d->status = MOE_OK; /* if the device is lost, the next launch fails again */
    return 0;
}

static void moe_run_step(moe_device *d, const moe_frame *f, size_t rows) {
    const moe_graph *g = &d->graphs[1];
    size_t index = 0;
    int waits = d->no_graphs;
    for (size_t i = 0; i < g->count; i++) waits |= moe_waits(d, &g->nodes[i], rows);
    if (!waits) moe_bucket(rows, g->rows, &index);
    if (!waits && (d->steps[index] || moe_capture(d, f, rows, &d->steps[index]))) {
        MOE_CUDA_TRY(d, cudaGraphLaunch(d->steps[index], d->stream));
        return;
    }
    if (d->status == MOE_OK) moe_run_decoder(d, f, rows);
}

/* Fill the upload buffer for packed sentences: indices of rows, ends of sentences, slots. */
static void moe_lift_packed(moe_device *d, const moe_packed *p) {
    const size_t n = d->rows;
    int32_t *length = d->up_host + (d->length - d->up), *last = d->up_host + (d->last - d->up);
    int32_t *sentence = last + n, *first = d->up_host + (d->first - d->up);
    for (size_t i = 0, end = p->steps; end && i < p->live[0]; i++) {
        while (p->live[end - 1] <= i) end--;
        last[i] = (int32_t)(p->first[end - 1] + i);
        sentence[i] = p->sentence ? (int32_t)p->sentence[i] : 0;
        for (size_t at = 0; at < end; at++) length[p->first[at] + i] = (int32_t)end;
    }
    for (size_t at = 0; at < p->steps; at++) first[at] = (int32_t)p->first[at];
}

/* Upload the chains of the decoder's rows, unless the device searches. */
static void moe_lift_chain(moe_device *d, const moe_frame *f) {
    const size_t stride = d->graphs[1].max_target, n = d->graphs[1].rows * stride;
    int32_t *destination = d->up_host + (d->destination - d->up);
    memset(d->chain_host, 0, n * sizeof *d->chain);
    for (size_t r = 0; r < f->rows; r++) {
        const int32_t *chain = f->beam.chain + r * stride;
        const size_t position = (size_t)f->positions[r];
        memcpy(d->chain_host + r * stride, chain, (position + 1) * sizeof *chain);
        destination[r] = chain[position];
    }
    moe_send(d, d->chain, d->chain_host, n * sizeof *d->chain);
}

/* Fill the upload buffer. Rows from f->rows on are fillers. */
static void moe_lift_frame(moe_device *d, const moe_frame *f, size_t rows) {
    const size_t n = d->rows;
    int32_t *ids = d->up_host, *parents = ids + n, *segment = parents + n, *length = segment + n;
    int32_t *want = length + n, *hold = want + n, *destination = hold + n, *positions = destination + 3 * n;
    for (size_t r = 0; r < rows; r++) {
        const int live = r < f->rows;
        ids[r] = live && f->ids ? f->ids[r] : 0;
        parents[r] = live && f->beam.parents ? f->beam.parents[r] : -1;
        segment[r] = live && f->beam.segment ? (int32_t)f->beam.segment[r] : 0;
        length[r] = live && f->beam.length ? (int32_t)f->beam.length[r] : 0;
        want[r] = live && f->beam.want ? f->beam.want[r] : -1;
        hold[r] = live && f->beam.hold ? f->beam.hold[r] != 0 : 0;
        destination[r] = live && f->packed.destination ? (int32_t)f->packed.destination[r] : -1;
        positions[r] = live && f->positions ? f->positions[r] : 0;
    }
    if (f->packed.steps) moe_lift_packed(d, &f->packed);
    if (f->beam.chain && d->chain_host) moe_lift_chain(d, f);
    moe_send(d, d->up, d->up_host, MOE_UP * n * sizeof *d->up);
    if (!f->inputs) return;
    memcpy(d->inputs_host, f->inputs, f->rows * d->input_cols * sizeof *d->inputs_host);
    memset(d->inputs_host + f->rows * d->input_cols, 0, (rows - f->rows) * d->input_cols * sizeof *d->inputs_host);
    moe_send(d, d->inputs, d->inputs_host, rows * d->input_cols * sizeof *d->inputs);
}

/* Download the outputs of a frame. */
static void moe_fetch_frame(moe_device *d, const moe_frame *f, size_t top) {
    const size_t n = f->rows;
    const char *logprobs = d->down_host, *want = logprobs + ((char *)d->want_logprob - d->down);
    const char *ids = logprobs + ((char *)d->top_ids - d->down);
    if (!moe_receive(d, d->down_host, d->down, d->down_bytes)) return;
    for (size_t r = 0; r < n; r++) {
        if (f->beam.want[r] >= 0) {
            memcpy(&f->beam.want_logprob[r], want + r * sizeof(float), sizeof(float));
            continue;
        }
        memcpy(f->beam.top_logprobs + r * top, logprobs + r * top * sizeof(float), top * sizeof(float));
        memcpy(f->beam.top_ids + r * top, ids + r * top * sizeof(int32_t), top * sizeof(int32_t));
    }
}

/* Set the number of rows that are not fillers. */
static void moe_set_live(moe_device *d, size_t rows) {
    if (rows != d->live_rows) MOE_LAUNCH(d, moe_k_set, 1, MOE_BLOCK, d->live, (int)rows);
    d->live_rows = rows;
}

static moe_status moe_device_run(moe_device *d, int which, const moe_frame *f, moe_trace_fn trace, void *trace_user,
                                 moe_error *error) {
    size_t rows = f->rows, index;
    MOE_CUDA_TRY(d, cudaSetDevice(d->index)); /* each thread has a current device */
    if (which && !trace) rows = moe_bucket(f->rows, d->graphs[1].rows, &index);
    if (d->status == MOE_OK) moe_lift_frame(d, f, rows);
    moe_set_live(d, f->rows);
    if (d->status == MOE_OK && trace) moe_run_traced(d, which, f, rows, trace, trace_user);
    else if (d->status == MOE_OK && which) moe_run_step(d, f, rows);
    else if (d->status == MOE_OK) moe_run_nodes(d, which, f, rows);
    if (which) moe_fetch_frame(d, f, d->graphs[1].top);
    else MOE_CUDA_TRY(d, cudaStreamSynchronize(d->stream));
    return moe_outcome(d, error);
}

static void moe_device_begin(moe_device *d, size_t at, const moe_slot *slot) {
    const moe_task *task = &slot->task;
    const size_t first = d->sentences.n_targets;
    const moe_constraint_state *last = slot->constraints + task->n_constraints; /* one past the last constraint */
    const moe_begun begun = { at, *task, first, task->n_constraints ? last[-1].first + last[-1].n : 0, slot->list.n };
    int32_t *to = d->sentences.targets_host + first;
    d->sentences.begun_host[d->sentences.n++] = begun;
    memcpy(to, slot->target, task->n_target * sizeof *to);
    to += task->n_target;
    memcpy(to, slot->constraints, task->n_constraints * sizeof *slot->constraints);
    to += MOE_CONSTRAINT_WORDS * task->n_constraints;
    if (begun.constraint_tokens) memcpy(to, slot->constraint_ids, begun.constraint_tokens * sizeof *to);
    if (begun.listed) memcpy(to + begun.constraint_tokens, slot->list.ids, begun.listed * sizeof *to);
    d->sentences.n_targets +=
        task->n_target + MOE_CONSTRAINT_WORDS * task->n_constraints + begun.constraint_tokens + begun.listed;
}

static void moe_device_forget(moe_device *d) {
    d->sentences.n = d->sentences.n_targets = d->sentences.live = d->sentences.ahead = 0;
    d->sentences.fresh = 1;
}

static moe_status moe_device_step(moe_device *d, moe_trace_fn trace, void *trace_user, moe_device_results *out,
                                  moe_error *error) {
    moe_frame none; /* an empty frame: moe_run_fill fills the rows on the device */
    size_t rows, index;
    memset(&none, 0, sizeof none);
    MOE_CUDA_TRY(d, cudaSetDevice(d->index)); /* each thread has a current device */
    if (d->status == MOE_OK) moe_lift_sentences(d);
    out->rows = rows = d->sentences.live + moe_min(d->searching.search.ahead, d->sentences.ahead);
    moe_set_live(d, rows);
    if (!trace) rows = moe_bucket(rows, d->graphs[1].rows, &index);
    if (d->status == MOE_OK && trace) {
        moe_run_fill(d, rows);
        moe_run_traced(d, 1, &none, rows, trace, trace_user);
        moe_run_search(d, rows);
    } else if (d->status == MOE_OK) {
        moe_run_step(d, &none, rows);
    }
    if (d->status == MOE_OK) moe_fetch_results(d, out);
    return moe_outcome(d, error);
}

/* ---- Opening, binding, closing ---- */

static int moe_device_count(moe_error *error) {
    int n = 0;
    cudaError_t code = cudaGetDeviceCount(&n);
    if (code == cudaSuccess && n > 0) return n;
    if (code == cudaSuccess) code = cudaErrorNoDevice;
    cudaGetLastError();
    moe_fail(error, MOE_ERROR_UNSUPPORTED, "device", "no GPU: %s; %s", cudaGetErrorString(code), moe_advice(code));
    return 0;
}

static void moe_device_close(moe_device *d) {
    moe_allocator a;
    if (!d) return;
    a = d->allocator;
    cudaSetDevice(d->index);
    if (d->stream) cudaStreamSynchronize(d->stream);
    for (int i = 0; i < MOE_BUCKETS; i++)
        if (d->steps[i]) cudaGraphExecDestroy(d->steps[i]);
    if (d->cublas) cublasDestroy(d->cublas);
    for (size_t i = d->n_blocks; i-- > 0;) cudaFree(d->blocks[i]);
    if (d->pinned) cudaFreeHost(d->pinned);
    if (d->sentences.pinned) cudaFreeHost(d->sentences.pinned);
    if (d->fetching.tiles) cudaFreeHost(d->fetching.tiles);
    for (int i = 0; i < 2; i++) {
        if (d->stage[i]) cudaFreeHost(d->stage[i]);
        if (d->landed[i]) cudaEventDestroy(d->landed[i]);
    }
    if (d->stream) cudaStreamDestroy(d->stream);
    cudaGetLastError();
    for (int i = 0; i < 2; i++)
        if (d->bound[i]) a.release(a.user, d->bound[i], d->graphs[i].count * sizeof *d->bound[i]);
    if (d->cache.bays) a.release(a.user, d->cache.frequency, d->fetching.bytes);
    if (d->known) a.release(a.user, d->known, d->known_capacity * sizeof *d->known);
    if (d->blocks) a.release(a.user, d->blocks, d->block_capacity * sizeof *d->blocks);
    a.release(a.user, d, sizeof *d);
}

static void moe_device_start(moe_device *d) {
    struct cudaDeviceProp properties;
    const char *why;
    char message[256];
    MOE_CUDA_TRY(d, cudaSetDevice(d->index));
    if (!MOE_CUDA_TRY(d, cudaGetDeviceProperties(&properties, d->index))) return;
    snprintf(d->name, sizeof d->name, "cuda:%d %.100s", d->index, properties.name);
    if (properties.major * 10 + properties.minor < 75) {
        d->status = moe_fail(&d->error, MOE_ERROR_UNSUPPORTED, "device",
                             "%s has compute capability %d.%d, but 7.5 is required; use --device cpu", d->name,
                             properties.major, properties.minor);
        return;
    }
    MOE_CUDA_TRY(d, cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking));
    why = d->status == MOE_OK ? moe_start_blas(d) : NULL;
    if (!why || d->status != MOE_OK || !d->log) return;
    snprintf(message, sizeof message, "cuda:%d: cuBLAS is not usable, using built-in kernels: %s", d->index, why);
    d->log(d->log_user, message);
}

static moe_status moe_device_open(const moe_device_params *params, moe_device **out, moe_error *error) {
    moe_error why;
    const int devices = moe_device_count(&why);
    moe_device *d;
    if (!devices) {
        if (error) *error = why;
        return why.code;
    }
    if (params->index >= devices)
        return moe_fail(error, MOE_ERROR_UNSUPPORTED, "device", "no device cuda:%d: found %d GPU%s, counted from 0",
                        params->index, devices, devices > 1 ? "s" : "");
    d = (moe_device *)params->allocator.allocate(params->allocator.user, sizeof *d);
    if (!d) return moe_fail(error, MOE_ERROR_MEMORY, "device", "out of memory for the device description");
    memset(d, 0, sizeof *d);
    d->allocator = params->allocator;
    d->log = params->log;
    d->log_user = params->log_user;
    d->index = params->index;
    d->budget = params->memory;
    d->block_capacity = 1 << 13;
    d->blocks = (void **)moe_host(d, d->block_capacity * sizeof *d->blocks, "the list of device memory");
    moe_device_start(d);
    if (d->status != MOE_OK && !d->lacking) {
        const moe_status status = moe_outcome(d, error);
        moe_device_close(d);
        return status;
    }
    *out = d;
    return MOE_OK;
}

static moe_status moe_device_allocate(moe_device *d, size_t bytes, const char *what, void **out, moe_error *error) {
    void *memory;
    MOE_CUDA_TRY(d, cudaSetDevice(d->index));
    memory = moe_acquire(d, bytes, 1, what);
    if (memory) MOE_CUDA_TRY(d, cudaMemsetAsync(memory, 0, bytes, d->stream));
    if (memory) MOE_CUDA_TRY(d, cudaStreamSynchronize(d->stream));
    *out = memory;
    return d->lacking ? MOE_OK : moe_outcome(d, error); /* moe_device_bind reports the total memory needed */
}

/* Upload a matrix, unless another node has already uploaded it. */
static moe_weights moe_upload_matrix(moe_device *d, const moe_matrix *m, const char *what) {
    moe_weights w;
    char *to;
    for (size_t i = 0; i < d->n_known; i++)
        if (d->known[i].host == m->data) return d->known[i].weights;
    to = (char *)moe_acquire(d, 1, moe_both_bytes(m), what);
    if (to) moe_lift_matrix(d, m, to);
    if (to) moe_announce(d);
    w = moe_weights_at(m, to, 0);
    if (d->known && d->n_known < d->known_capacity) { /* even after a failure, so that no matrix is counted twice */
        d->known[d->n_known].host = m->data;
        d->known[d->n_known++].weights = w;
    }
    return w;
}

static const float *moe_upload_vector(moe_device *d, const float *v, size_t n, const char *what) {
    return v ? (const float *)moe_upload(d, v, n * sizeof *v, what) : NULL;
}

/* Return the matrix that a node multiplies by or reads rows from, and its bias; NULL unless there is exactly one. */
static const moe_matrix *moe_matrix_of(const moe_node *n, const float **bias) {
    switch (n->op) {
    case MOE_OP_EMBED: return n->embed.table;
    case MOE_OP_LINEAR: *bias = n->linear.bias; return n->linear.w;
    case MOE_OP_LSTM_STEP: *bias = n->lstm.cell->bias; return &n->lstm.cell->w_x;
    case MOE_OP_GATE: *bias = n->gate.gating->bias; return n->gate.grouped ? &n->gate.gating->weight : NULL;
    case MOE_OP_OUTPUT: *bias = n->output.bias; return n->output.w;
    default: return NULL;
    }
}

/* Upload the weights of a node, except experts. */
static void moe_bind_node(moe_device *d, const moe_node *n, moe_bound *b) {
    const float *bias = NULL;
    const moe_matrix *w = moe_matrix_of(n, &bias);
    const moe_cell *cell = n->op == MOE_OP_LSTM_STEP || n->op == MOE_OP_LSTM_LAYER ? n->lstm.cell : NULL;
    if (w) b->w = moe_upload_matrix(d, w, n->name);
    if (w) b->bias = moe_upload_vector(d, bias, w->rows, n->name);
    if (n->op == MOE_OP_EMBED && n->embed.positions)
        b->positions = (const float *)moe_upload_matrix(d, n->embed.positions, n->name).data;
    if (cell) b->w_r = moe_upload_matrix(d, &cell->w_r, n->name);
    if (n->op == MOE_OP_LSTM_LAYER && cell->w_proj.rows) b->w_proj = moe_upload_matrix(d, &cell->w_proj, n->name);
    if (n->op == MOE_OP_NORM) b->weight = moe_upload_vector(d, n->norm.weight, n->cols, n->name);
    if (n->op == MOE_OP_NORM) b->bias = moe_upload_vector(d, n->norm.bias, n->cols, n->name);
    if (n->op == MOE_OP_ROTARY) {
        if (n->rotary.table) b->positions = (const float *)moe_upload_matrix(d, n->rotary.table, n->name).data;
        b->weight = moe_upload_vector(d, n->rotary.query_norm, n->rotary.width, n->name);
        b->bias = moe_upload_vector(d, n->rotary.key_norm, n->rotary.width, n->name);
    }
    if (n->op == MOE_OP_GATE) b->weight = moe_upload_vector(d, n->gate.gating->choice, n->cols, n->name);
    if (n->op == MOE_OP_GATE) b->threshold = moe_upload_vector(d, n->gate.gating->threshold, n->cols, n->name);
    if (n->op == MOE_OP_HEADS) {
        const moe_distances *x = &n->heads.distances;
        const size_t rows = 2 * x->reach + 1, width = n->cols / n->heads.heads;
        b->weight = moe_upload_vector(d, x->bias, rows * n->heads.heads, n->name);
        b->v = moe_upload_vector(d, x->keys, rows * width, n->name);
        b->threshold = moe_upload_vector(d, x->values, rows * width, n->name);
    }
    if (n->op == MOE_OP_ATTENTION) b->v = moe_upload_vector(d, n->attention.v, n->src[0]->cols, n->name);
    if (n->op == MOE_OP_OUTPUT)
        b->never =
            (const int32_t *)moe_upload(d, n->output.never, n->output.n_never * sizeof *n->output.never, n->name);
}

static void moe_most_of(size_t *most, size_t n) { *most = moe_max(*most, n); }

/* Maximum of each kind of scratch over all nodes. */
typedef struct moe_needs {
    size_t hidden, sentences, state, z, experts, pairs, tiles, units, unit_codes, inputs, out, outputs, subs, chunks,
        input_cols, chain;
} moe_needs;

static void moe_need_matrix(moe_needs *need, const moe_matrix *m) {
    const size_t rows = moe_round_up(m->rows, 16);
    moe_most_of(&need->outputs, rows);
    if (m->subs) moe_most_of(&need->subs, rows * m->cols_padded / 64 * m->sides);
}

static void moe_need_node(moe_needs *need, const moe_node *n, const moe_graph *g, size_t rows) {
    const float *bias = NULL;
    const moe_matrix *w = moe_matrix_of(n, &bias);
    if (w) moe_need_matrix(need, w);
    if (n->op == MOE_OP_LSTM_STEP || n->op == MOE_OP_LSTM_LAYER) moe_need_matrix(need, &n->lstm.cell->w_r);
    if (n->op == MOE_OP_LSTM_LAYER && n->lstm.cell->w_proj.rows) moe_need_matrix(need, &n->lstm.cell->w_proj);
    if (n->op == MOE_OP_LSTM_STEP) {
        moe_most_of(&need->z, rows * 4 * n->lstm.cell->hidden);
    } else if (n->op == MOE_OP_LSTM_LAYER) {
        moe_most_of(&need->sentences, g->sentences);
        moe_most_of(&need->hidden, n->lstm.cell->hidden);
        moe_most_of(&need->state, n->cols);
        moe_most_of(&need->z, g->sentences * 4 * n->lstm.cell->hidden);
    } else if (n->op == MOE_OP_HEADS) {
        moe_most_of(&need->outputs, n->heads.heads * moe_longest(g));
        if (n->heads.rows && n->heads.within) moe_most_of(&need->chain, g->rows * g->max_target);
    } else if (n->op == MOE_OP_INPUT) {
        moe_most_of(&need->input_cols, n->cols);
    } else if (n->op == MOE_OP_EXPERTS) {
        const size_t pairs = moe_pairs(n, rows);
        moe_need_matrix(need, &n->experts->up);
        moe_need_matrix(need, &n->experts->down);
        moe_most_of(&need->experts, n->experts->count);
        moe_most_of(&need->pairs, pairs);
        moe_most_of(&need->tiles, pairs / MOE_TILE + moe_min(pairs, n->experts->count));
        moe_most_of(&need->units, pairs * n->experts->up.rows);
        moe_most_of(&need->unit_codes, pairs * moe_code_stride(n->experts->hidden));
        moe_most_of(&need->inputs, pairs * n->src[0]->stride);
        moe_most_of(&need->out, pairs * n->cols);
    } else if (n->op == MOE_OP_OUTPUT) {
        moe_most_of(&need->chunks, moe_divide_up(w->rows, MOE_OUTPUT_CHUNK));
    }
}

static void moe_take_scratch(moe_device *d, const moe_needs *need) {
    const char *what = "scratch", *frame = "uploads and downloads of a step";
    const size_t rows = d->rows, top = d->graphs[1].top, kinds = 1 + d->graphs[1].penalised, up = MOE_UP * rows;
    const size_t attention = moe_times(d, d->graphs[1].rows, d->graphs[1].max_source);
    const size_t host_ints = moe_max(need->experts + 1, moe_max(rows, 4)), inputs = rows * need->input_cols;
    int32_t **const parts[MOE_UP] = { &d->ids,         &d->parents, &d->segment,  &d->length,    &d->want, &d->hold,
                                      &d->destination, &d->last,    &d->sentence, &d->positions, &d->first };
    size_t down, chain;
    d->n_sums = moe_min(moe_max(MOE_SUMS, need->outputs * 32), need->outputs * moe_max(rows, need->pairs));
    d->sums = (int32_t *)moe_acquire(d, d->n_sums, sizeof *d->sums, what);
    d->lstm.z = (float *)moe_acquire(d, need->z, sizeof(float), what);
    d->lstm.c = (float *)moe_acquire(d, need->sentences * need->hidden, sizeof(float), what);
    d->lstm.h = (float *)moe_acquire(d, need->sentences * need->hidden, sizeof(float), what);
    d->lstm.r = (float *)moe_acquire(d, need->sentences * need->state, sizeof(float), what);
    d->lstm.r_codes = (int8_t *)moe_acquire(d, need->sentences, moe_code_stride(need->state) + 64, what);
    d->lstm.h_codes = (int8_t *)moe_acquire(d, need->sentences, moe_code_stride(need->hidden) + 64, what);
    if (!d->graphs[1].blocks) {
        d->lstm.r_scales = (float *)moe_acquire(d, need->sentences, sizeof(float), what);
        d->lstm.h_scales = (float *)moe_acquire(d, need->sentences, sizeof(float), what);
        d->moe.code_scales = (float *)moe_acquire(d, need->pairs, sizeof(float), what);
    }
    d->moe.row_first = (int *)moe_acquire(d, rows, sizeof(int), what);
    d->moe.place = (int *)moe_acquire(d, need->pairs, sizeof(int), what);
    d->moe.count = (int *)moe_acquire(d, need->experts, 2 * sizeof(int), what);
    d->moe.first = (int *)moe_acquire(d, need->experts + 1, sizeof(int), what);
    d->moe.totals = (int *)moe_acquire(d, 2, sizeof(int), what);
    d->moe.stats = (uint64_t *)moe_acquire(d, 2, sizeof(uint64_t), what);
    d->live = (int *)moe_acquire(d, 1, sizeof(int), what);
    MOE_CUDA_TRY(d, cudaMemsetAsync(d->moe.stats, 0, 2 * sizeof(uint64_t), d->stream));
    MOE_CUDA_TRY(d, cudaMemsetAsync(d->live, 0, sizeof(int), d->stream));
    d->moe.tiles = (int4 *)moe_acquire(d, need->tiles, sizeof(int4), what);
    d->moe.pair_row = (int *)moe_acquire(d, need->pairs, sizeof(int), what);
    d->moe.pair_expert = (int *)moe_acquire(d, need->pairs, sizeof(int), what);
    d->moe.inputs = (int8_t *)moe_acquire(d, need->inputs, 1, what);
    d->moe.input_scales = (float *)moe_acquire(d, need->pairs, sizeof(float), what);
    d->moe.units = (float *)moe_acquire(d, need->units, sizeof(float), what);
    d->moe.codes = (int8_t *)moe_acquire(d, need->unit_codes, 1, what);
    d->moe.out = (float *)moe_acquire(d, need->out, sizeof(float), what);
    d->output.max = (float *)moe_acquire(d, d->graphs[1].rows * need->chunks, sizeof(float), what);
    d->output.sum = (float *)moe_acquire(d, d->graphs[1].rows * need->chunks, sizeof(float), what);
    d->output.logits = (float *)moe_acquire(d, d->graphs[1].rows * need->chunks * kinds * top, sizeof(float), what);
    d->output.ids = (int *)moe_acquire(d, d->graphs[1].rows * need->chunks * kinds * top, sizeof(int), what);
    d->attention = (float *)moe_acquire(d, attention, sizeof *d->attention, what);
    /* Allocate a block to upload, one to download, and pinned copies of both. The search has its own results block. */
    d->down_bytes = d->graphs[1].rows * (2 * top + 1) * sizeof(float);
    d->up = (int32_t *)moe_acquire(d, up, sizeof *d->up, frame);
    d->down = (char *)moe_acquire(d, d->down_bytes, 1, frame);
    d->inputs = (float *)moe_acquire(d, inputs, sizeof *d->inputs, frame);
    d->input_cols = need->input_cols;
    if (need->chain) d->chain = (int32_t *)moe_acquire(d, need->chain, sizeof *d->chain, frame);
    down = d->searching.slots ? 0 : d->down_bytes;
    chain = d->searching.slots ? 0 : need->chain;
    if (!MOE_CUDA_TRY(d, cudaMallocHost(&d->pinned, (up + host_ints + inputs + chain) * sizeof(int32_t) + down)))
        return;
    d->up_host = (int32_t *)d->pinned;
    d->moe.host = (int *)d->up_host + up;
    d->inputs_host = (float *)(void *)(d->moe.host + host_ints);
    if (chain) d->chain_host = (int32_t *)(void *)(d->inputs_host + inputs);
    d->down_host = (char *)(d->inputs_host + inputs + chain);
    memset(d->up_host, 0, up * sizeof *d->up_host);
    for (size_t i = 0; i < MOE_UP; i++) *parts[i] = d->up + i * rows;
    d->top_logprobs = (float *)(void *)d->down;
    d->want_logprob = d->top_logprobs + d->graphs[1].rows * top;
    d->top_ids = (int32_t *)(void *)(d->want_logprob + d->graphs[1].rows);
}

/* Allocate slots, their memory, and buffers for uploading and downloading sentences, after all other scratch. */
static void moe_take_search(moe_device *d) {
    moe_searching *a = &d->searching;
    const char *what = "hypotheses";
    const moe_graph *g = &d->graphs[1];
    const size_t slots = (size_t)a->slots, beam = (size_t)a->search.beam, max_target = a->search.max_target;
    const size_t constraints = a->search.max_constraints,
                 constraint_ids = constraints ? moe_times(d, slots, max_target) : 0;
    const size_t hypotheses = moe_times(d, slots, beam), listed = moe_times(d, slots, a->search.listed);
    const size_t targets = moe_times(d, slots, max_target) + constraint_ids +
                           MOE_CONSTRAINT_WORDS * moe_times(d, slots, constraints) + listed;
    const size_t coverage = a->search.beta != 0.0f ? moe_times(d, g->rows, g->max_source) : 0;
    const size_t result =
        moe_times(d, (size_t)a->search.nbest,
                  moe_times(d, max_target, a->search.aligns ? 3 : 2) + MOE_HEAD_WORDS + 1); /* words */
    const size_t words = moe_times(d, slots, result + 2) + MOE_RESULTS;
    const size_t begun_bytes = moe_times(d, slots, sizeof *d->sentences.begun);
    const size_t target_bytes = moe_times(d, targets, sizeof *d->sentences.targets);
    const size_t bytes = begun_bytes + target_bytes + moe_times(d, words, sizeof *a->results);
    if (d->status == MOE_OK && words > INT_MAX)
        d->status = moe_fail(&d->error, MOE_ERROR_ARGUMENT, what,
                             "the results are too large: reduce batch, nbest or max_target");
    a->rows = (int)g->rows;
    a->slot = (moe_slot *)moe_acquire(d, slots, sizeof *a->slot, what);
    a->tokens =
        (moe_token *)moe_acquire(d, moe_times(d, slots, moe_most_tokens(&a->search, beam)), sizeof *a->tokens, what);
    a->live = (moe_live *)moe_acquire(d, hypotheses, sizeof *a->live, what);
    a->next = (moe_live *)moe_acquire(d, hypotheses, sizeof *a->next, what);
    a->finished = (moe_live *)moe_acquire(d, hypotheses, sizeof *a->finished, what);
    a->target = (int32_t *)moe_acquire(d, moe_times(d, slots, max_target), sizeof *a->target, what);
    a->constraints =
        (moe_constraint_state *)moe_acquire(d, moe_times(d, slots, constraints), sizeof *a->constraints, what);
    a->constraint_ids = (int32_t *)moe_acquire(d, constraint_ids, sizeof *a->constraint_ids, what);
    a->listed = (int32_t *)moe_acquire(d, listed, sizeof *a->listed, what);
    a->starts = (int32_t *)moe_acquire(d, moe_times(d, g->rows, constraints), sizeof *a->starts, what);
    a->start_logprobs = (float *)moe_acquire(d, moe_times(d, g->rows, constraints), sizeof(float), what);
    if (a->search.used_words)
        a->used = (uint32_t *)moe_acquire(d, moe_times(d, g->rows, a->search.used_words), sizeof *a->used, what);
    if (a->search.used_words && beam > 1)
        a->answer.top_weighed = (float *)moe_acquire(d, moe_times(d, g->rows, g->top), sizeof(float), what);
    if (a->search.samples) {
        const size_t logits = moe_times(d, slots, g->nodes[g->count - 1].output.w->rows);
        d->output.plain = (float *)moe_acquire(d, logits, sizeof(float), what);
        d->output.weights = (uint32_t *)moe_acquire(d, logits, sizeof(uint32_t), what);
    }
    a->turn = (int32_t *)moe_acquire(d, 1, sizeof *a->turn, what);
    a->done = (int32_t *)moe_acquire(d, slots, sizeof *a->done, what);
    a->results = (int32_t *)moe_acquire(d, words, sizeof *a->results, what);
    if (coverage) a->coverage[0] = a->coverage[1] = (float *)moe_acquire(d, coverage, sizeof(float), what);
    if (coverage && !a->search.rules.by_place) a->coverage[1] = (float *)moe_acquire(d, coverage, sizeof(float), what);
    a->attention = d->attention;
    static_cast<moe_step_rows &>(*a) = *d;
    a->answer.top = g->top;
    a->answer.top_ids = d->top_ids;
    a->answer.top_logprobs = d->top_logprobs;
    a->answer.want_logprob = d->want_logprob;
    a->answer.attention_stride = g->max_source;
    a->answer.attention = a->search.aligns ? d->attention : NULL;
    a->answer.start_logprobs = a->start_logprobs;
    d->sentences.begun = (moe_begun *)moe_acquire(d, slots, sizeof *d->sentences.begun, what);
    d->sentences.targets = (int32_t *)moe_acquire(d, targets, sizeof *d->sentences.targets, what);
    if (!MOE_CUDA_TRY(d, cudaMallocHost(&d->sentences.pinned, bytes))) return;
    d->sentences.begun_host = (moe_begun *)d->sentences.pinned;
    d->sentences.targets_host = (int32_t *)(void *)(d->sentences.begun_host + slots);
    d->sentences.results_host = d->sentences.targets_host + targets;
    d->sentences.words = words;
    d->sentences.fresh = 1;
}

/* Point the matrices and biases of `b` to the first expert, at `slabs`. */
static void moe_bind_slabs(const moe_experts *e, const char *slabs, size_t step, moe_bound *b) {
    const char *down = slabs + moe_biased_bytes(&e->up, e->up_bias);
    b->up = moe_weights_at(&e->up, slabs, step);
    b->down = moe_weights_at(&e->down, down, step);
    if (e->up_bias) b->up_bias = (const float *)(const void *)(slabs + moe_both_bytes(&e->up));
    if (e->down_bias) b->down_bias = (const float *)(const void *)(down + moe_both_bytes(&e->down));
}

/* Allocate all experts or, if they do not fit, bays. Call this after all other allocations. */
static void moe_place_experts(moe_device *d, const moe_needs *need) {
    const size_t fixed = d->wanted;
    size_t all = 0, largest = 0, everything, available = 0, total = 0, room;
    char message[128];
    for (int which = 0; which < 2; which++)
        for (size_t i = 0; i < d->graphs[which].count; i++) {
            const moe_node *n = &d->graphs[which].nodes[i];
            if (n->op != MOE_OP_EXPERTS || !d->bound[which]) continue;
            d->bound[which][i].layer.first = d->experts;
            d->bound[which][i].layer.count = n->experts->count;
            d->experts += n->experts->count;
            const size_t bytes = moe_expert_bytes(n->experts), count = n->experts->count;
            moe_most_of(&largest, bytes);
            all += moe_min(count < SIZE_MAX / bytes ? count * bytes : SIZE_MAX, SIZE_MAX - all);
        }
    everything = fixed < SIZE_MAX - all ? fixed + all : SIZE_MAX;
    if (d->lacking) moe_lack(d, fixed + largest, d->experts ? everything : 0, d->budget, "device");
    if (!d->experts || !MOE_CUDA_TRY(d, cudaMemGetInfo(&available, &total))) return;
    room = available - moe_min(available / 8, MOE_MARGIN);
    if (d->budget) room = moe_min(room, d->budget - d->used);
    if (room < largest) moe_lack(d, fixed + largest, everything, d->used + room, "experts");
    else if (room < all) moe_take_bays(d, largest, room, need->experts, need->tiles);
    if (d->cache.bays && d->log) {
        snprintf(message, sizeof message, "%zu of %zu experts fit on cuda:%d, the others are fetched on demand",
                 d->cache.bays, d->experts, d->index);
        d->log(d->log_user, message);
    }
    for (int which = 0; which < 2; which++)
        for (size_t i = 0; i < d->graphs[which].count && d->status == MOE_OK; i++) {
            const moe_node *n = &d->graphs[which].nodes[i];
            char *slabs = d->fetching.slabs;
            size_t step;
            if (n->op != MOE_OP_EXPERTS) continue;
            step = slabs ? largest : moe_expert_bytes(n->experts);
            if (!slabs) slabs = (char *)moe_acquire(d, n->experts->count, step, n->name);
            if (!slabs) return;
            moe_bind_slabs(n->experts, slabs, step, &d->bound[which][i]);
            for (size_t e = 0; e < n->experts->count && !d->cache.bays && d->status == MOE_OK; e++) {
                moe_lift_expert(d, n, e, slabs + e * step);
                moe_announce(d);
            }
        }
}

static void moe_bind_graphs(moe_device *d, const moe_needs *need) {
    d->subs = (int8_t *)moe_acquire(d, need->subs, 1, "Q4 groups");
    for (int i = 0; i < 2; i++) {
        MOE_CUDA_TRY(d, cudaMallocHost((void **)&d->stage[i], MOE_STAGE_BYTES));
        d->landing[i] = (char *)moe_acquire(d, 1, MOE_STAGE_BYTES, "weight uploads");
        MOE_CUDA_TRY(d, cudaEventCreateWithFlags(&d->landed[i], cudaEventDisableTiming));
        MOE_CUDA_TRY(d, cudaEventRecord(d->landed[i], d->stream));
    }
    for (int which = 0; which < 2; which++) /* continue after a failure, to count the memory needed */
        for (size_t i = 0; i < d->graphs[which].count && d->bound[which]; i++)
            moe_bind_node(d, &d->graphs[which].nodes[i], &d->bound[which][i]);
    moe_place_experts(d, need);
    MOE_CUDA_TRY(d, cudaStreamSynchronize(d->stream));
    d->bound_bytes = d->uploaded;
    d->budget = 0;
    for (int i = 0; i < 2 && d->status == MOE_OK && !d->cache.bays; i++) { /* after a failure, closing frees buffers */
        cudaFreeHost(d->stage[i]);
        moe_give(d, d->landing[i], MOE_STAGE_BYTES);
        d->stage[i] = d->landing[i] = NULL;
    }
}

static moe_status moe_device_bind(moe_device *d, const moe_graph graphs[MOE_GRAPHS], const moe_search *search,
                                  moe_error *error) {
    moe_needs need;
    size_t nodes = 0;
    memset(&need, 0, sizeof need);
    if (search) {
        d->searching.search = *search;
        d->searching.slots = (int)graphs[1].sentences;
    }
    MOE_CUDA_TRY(d, cudaSetDevice(d->index));
    for (int which = 0; which < 2; which++) {
        const moe_graph *g = &graphs[which];
        d->graphs[which] = *g;
        if (!g->count) continue; /* no encoder */
        moe_most_of(&d->rows, g->rows);
        nodes += g->count;
        d->bound[which] = (moe_bound *)moe_host(d, g->count * sizeof *d->bound[which], "the weights of a graph");
    }
    for (int which = 0; which < 2; which++)
        for (size_t i = 0; i < graphs[which].count; i++)
            moe_need_node(&need, &graphs[which].nodes[i], &graphs[which], d->rows);
    d->known_capacity = 4 * nodes;
    d->known = (moe_known *)moe_host(d, d->known_capacity * sizeof *d->known, "the list of weights");
    moe_take_scratch(d, &need);
    if (search) moe_take_search(d);
    moe_bind_graphs(d, &need);
    return moe_outcome(d, error);
}

static const char *moe_device_describe(const moe_device *d, uint64_t *bytes) {
    if (bytes) *bytes = d->used;
    return d->name;
}

static void moe_device_stats(moe_device *d, moe_stats *s) {
    uint64_t counted[2] = { 0, 0 };
    MOE_CUDA_TRY(d, cudaSetDevice(d->index)); /* each thread has a current device */
    if (d->status == MOE_OK) moe_fetch_ints(d, (const int *)(const void *)d->moe.stats, 4);
    if (d->status == MOE_OK) memcpy(counted, d->moe.host, sizeof counted);
    s->expert_pairs = counted[0];
    s->expert_visits = counted[1];
    s->experts = d->experts;
    s->experts_held = d->cache.bays ? d->cache.bays : d->experts;
    s->expert_hits = d->cache.hits;
    s->expert_fetches = d->cache.fetches;
    s->expert_fetch_bytes = d->uploaded - d->bound_bytes;
}

const moe_device_api *moe_cuda(void) {
    static const moe_device_api api = { "cuda",          moe_device_count,    moe_device_open,  moe_device_allocate,
                                        moe_device_bind, moe_device_run,      moe_device_begin, moe_device_forget,
                                        moe_device_step, moe_device_describe, moe_device_stats, moe_device_close };
    return &api;
}
