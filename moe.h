/* moe.h - inference for Mixture-of-Experts translation models: one header, one C file.
 * Build:   cc -O2 app.c moe.c -lm -pthread
 *          Linux, macOS, Windows (MinGW) and WebAssembly (WASI), 64 and 32 bits. Macros for smaller builds:
 *          MOE_PORTABLE (no kernels of an instruction set), MOE_ONLY_ISA=avx2 (the kernels of one of moe_isa_names, and
 *          portable ones), MOE_NO_WRITER (no moe_model_save, moe_model_write, moe_session_save_prompts and
 *          moe_session_load_prompts).
 *
 * How it works
 *   A moe_model is an open model file. A moe_session translates with a model: moe_translate pulls requests (token ids)
 *   from the caller, decodes up to `batch` of them together and hands over each result once it is final, in any order.
 *   moe_translate_ids translates one sentence. tools/text/moetext.h adds the tokeniser and translates text.
 *
 * The smallest program, for "Where is my book?":
 *
 *     int main(void) {
 *         const int32_t source[] = { 1964, 1587, 3734, 266, 576, 3042, 264 };
 *         int32_t ids[512]; size_t n; moe_error e; moe_model *m; moe_session *s;
 *         if (moe_model_open("models/en-de-fr-es.bin", NULL, &m, &e)) return puts(e.message), 1;
 *         moe_session_params p = moe_session_params_default(m);
 *         p.target_tag = moe_model_language_tag(m, "fr");
 *         if (moe_session_new(m, &p, &s, &e) || moe_translate_ids(s, source, 7, ids, 512, &n, &e))
 *             return puts(e.message), 1;
 *         for (size_t i = 0; i < n; i++) printf("%d ", (int)ids[i]);
 *         moe_session_free(s); moe_model_close(m);
 *     }
 *
 * Objects and lifetimes
 *   moe_model    never changes; any number of threads and sessions can share it. It may be closed while in use:
 *                the last session frees it.
 *   moe_session  one translator with its threads and memory, for one thread at a time. It allocates all of its memory
 *                when it is created (moe_session_bytes returns how much).
 * Return values
 *   Functions that can fail return a moe_status, 0 for success, and fill the caller's moe_error, which may be NULL.
 *   Functions that return an int answer a question: 1 is yes, 0 is no. moe_type_parse, moe_gate_parse, moe_param_set
 *   and moe_session_params_preset return 0 if they reject a name or value. Outputs are untouched on failure unless
 *   stated otherwise. A request that cannot be served has a status in its own moe_result and does not affect others.
 *   Pointers must not be NULL unless this header allows it.
 * Zeros
 *   Setting a numeric member to 0 selects its default or disables it, as its comment says; absent ids and tags are -1.
 * Sizes
 *   Library and program may have different versions: moe_session_params contains its size; other structs of the caller
 *   are passed with their size to functions named ..._sized, which inline functions without this suffix call. New
 *   members are appended to such structs. Setting a member that an older library lacks is an error; older programs get
 *   the default of a new member. Other structs and arrays change only in a new major version (for now, 0.MINOR).
 * Callbacks
 *   pull, done, partial, routing, attention, next_token and trace run in the thread that called moe_translate or
 *   moe_classify; log runs in the thread that creates or runs the session. Callbacks of a session never overlap. A
 *   callback may read the model, cancel any session, drop requests, read the statistics of its own session and use
 *   other sessions freely. It must not free its own session, translate or classify with it, or leave by longjmp or a
 *   C++ exception. `done` is the last callback of its request and may free the request's `user`.
 * Promises
 *   - The same bytes everywhere: no result depends on batch, order of requests, number of threads or instruction set.
 *   - The library never aborts, exits, prints or leaks. It has no global state and no signal handler.
 *   - A model file is untrusted input: every length, offset and product in it is checked before use.
 * Processes
 *   A child of fork() may use its parent's models, but must create its own sessions. If a mapped file is changed, calls
 *   return MOE_ERROR_IO; truncation during a step can raise SIGBUS. Replace files by renaming, or use copy or stream.
 *
 * Shapes are written [rows, cols], row-major. Weights are [out, in]. Sources of formulas: Shazeer et al. 2017
 * (arXiv 1701.06538, "eq n" and "App. X" below), Wu et al. 2016 (arXiv 1609.08144, "GNMT").
 */
#ifndef MOE_H
#define MOE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __GNUC__
#pragma GCC visibility push(default) /* export only what this header declares */
#endif
#ifdef __cplusplus
extern "C" {
#endif

/* ---- Version and limits -------------------------------------------------------------------------------- */

#define MOE_VERSION "0.2.0"
#define MOE_VERSION_NUMBER 2000 /* major * 1000000 + minor * 1000 + patch */
#define MOE_FILE_VERSION 3      /* newest file version; files without Q3 and Q2 are written in version 2 */

enum {
    MOE_MAX_BEAM = 64,           /* maximum beam                                                          */
    MOE_MAX_CONSTRAINTS = 64,    /* maximum constraints of a request                                      */
    MOE_MAX_LAYERS = 256,        /* maximum layers on one side of a model                                 */
    MOE_MAX_THREADS = 256,       /* maximum threads of one session                                        */
    MOE_MAX_RANKS = 4096,        /* maximum ranks of a wire                                               */
    MOE_VERIFY_BYTES = 64 << 20, /* by default, larger files are not verified when they are opened        */
    MOE_MAX_HEADER = 256 << 20,  /* maximum bytes before a file's first tensor: metadata and directory    */
    MOE_MAX_ENTRIES = 65536,     /* maximum metadata entries; maximum tensors. Names: 1 to 255 characters */
    MOE_MAX_TEXTS = 65536        /* maximum texts of one metadata entry                                   */
};

const char *moe_version(void);
int moe_version_number(void); /* version of the loaded library; MOE_VERSION_NUMBER is this header's */

/* ---- Errors, memory, log ------------------------------------------------------------------------------- */

typedef enum moe_status {
    MOE_OK = 0,
    MOE_ERROR_ARGUMENT,    /* an argument is invalid                                                  */
    MOE_ERROR_MEMORY,      /* an allocation failed                                                    */
    MOE_ERROR_IO,          /* the operating system could not open, read, map or write a file          */
    MOE_ERROR_FORMAT,      /* the file is damaged or is not a model                                   */
    MOE_ERROR_UNSUPPORTED, /* this build or machine lacks a feature that the file or request needs    */
    MOE_ERROR_LIMIT,       /* a request or translation is longer than the session allows              */
    MOE_ERROR_NUMERIC,     /* a log-probability is not a number: the weights are invalid              */
    MOE_ERROR_CANCELLED,   /* cancelled by the caller, or by a signal while a file was written        */
    MOE_ERROR_DEVICE       /* the GPU or its driver failed                                            */
} moe_status;
const char *moe_status_name(moe_status status); /* a name such as "format"; never NULL */

typedef struct moe_error {
    moe_status code;
    char message[256]; /* one line without a newline; suggests a fix if possible */
    char where[96];    /* place of the error: a file offset, tensor, metadata key or parameter */
} moe_error;

/* Set all three functions or none. `allocate` returns memory aligned to 16 bytes, or NULL. The library calls these
 * functions only in threads that open, create or free an object. */
typedef struct moe_allocator {
    void *(*allocate)(void *user, size_t bytes);
    void *(*reallocate)(void *user, void *old, size_t old_bytes, size_t new_bytes);
    void (*release)(void *user, void *old, size_t old_bytes);
    void *user;
} moe_allocator;
typedef void (*moe_log_fn)(void *user, const char *message);

/* ---- Number formats ------------------------------------------------------------------------------------ */

typedef enum moe_type {
    MOE_TYPE_F32 = 0,
    MOE_TYPE_F16 = 1,
    MOE_TYPE_BF16 = 2,
    MOE_TYPE_Q8 = 3,  /* int8 and one float scale per output row; products are exact integers */
    MOE_TYPE_Q4 = 4,  /* 4-bit codes, an integer factor per 32 columns, and Q8's scale; products are exact integers */
    MOE_TYPE_Q4M = 5, /* Q4 plus an offset per 32 columns and a scale per 64, with exact products */
    MOE_TYPE_Q8B = 6, /* Q8 plus a scale per 64 columns, as in Q4M */
    MOE_TYPE_Q3 = 7,  /* like Q4 with 3-bit codes; file version 3 */
    MOE_TYPE_Q2 = 8,  /* like Q4 with 2-bit codes for four unequal levels; file version 3 */
    MOE_TYPE_COUNT,
    MOE_TYPE_KEEP = 255 /* moe_save_params only: keep the file's type */
} moe_type;
#define MOE_TYPE_NAMES "f32, f16, bf16, q8, q4, q4m, q8b, q3, q2" /* in the order of moe_type, for messages */
const char *moe_type_name(moe_type type);                         /* a name such as "q8"; "?" if unknown */
int moe_type_parse(const char *name, moe_type *out);              /* sets *out and returns 1; returns 0 if unknown */

/* ---- Model --------------------------------------------------------------------------------------------- */

typedef struct moe_model moe_model;
typedef struct moe_session moe_session;
typedef struct moe_model_params {
    moe_allocator allocator; /* if all members are zero: malloc, realloc, free */
    int verify; /* when to compare tensors with their checksums. 1: when the file is opened, by reading all tensors. */
                /* 2: before a tensor's first use. -1: never. 0: 1 for files of up to MOE_VERIFY_BYTES, else 2       */
    int copy; /* 0: map the file, which processes share, or use the caller's memory. 1: copy the model to huge pages: */
    /* faster, but slower to open */
    int stream; /* 1: load everything except the experts, which sessions cache within expert_memory                 */
} moe_model_params;

/* Open and check a model file. `params` may be NULL for defaults. Error messages, including later ones about a damaged
 * or changed file, begin with the path. Errors: MOE_ERROR_IO, MOE_ERROR_FORMAT, MOE_ERROR_UNSUPPORTED,
 * MOE_ERROR_MEMORY. */
moe_status moe_model_open_sized(const char *path, const moe_model_params *params, size_t size, moe_model **out,
                                moe_error *error);
static inline moe_status moe_model_open(const char *path, const moe_model_params *p, moe_model **out, moe_error *e) {
    return moe_model_open_sized(path, p, sizeof *p, out, e);
}

/* Open a model in memory. Unless the model is copied, `data` must be aligned to 64 bytes (else MOE_ERROR_ARGUMENT) and
 * outlive all sessions. */
moe_status moe_model_open_memory_sized(const void *data, size_t bytes, const moe_model_params *params, size_t size,
                                       moe_model **out, moe_error *error);
static inline moe_status moe_model_open_memory(const void *data, size_t bytes, const moe_model_params *p,
                                               moe_model **out, moe_error *e) {
    return moe_model_open_memory_sized(data, bytes, p, sizeof *p, out, e);
}

/* The source of a model: a file, part of a file such as an archive, memory, or bytes that a callback reads. Set one of
 * path, data and read, or none to use `fd`. Zero all other members. */
typedef struct moe_source {
    const char *name; /* model's name in error messages; NULL for the path, if any */
    const char *path; /* a file */
    const void *data; /* memory that contains the model; must outlive all sessions unless the model is copied */
    /* Copies `bytes` bytes at `offset` to `out`; returns 0 or an errno value. Called only while the model is opened, in
     * the same thread. The model is copied. */
    int (*read)(void *user, void *out, size_t bytes, uint64_t offset);
    void *user;
    int fd;          /* file descriptor; the caller may close it after the call */
    uint64_t offset; /* offset of the model; a multiple of 64 unless the model is copied */
    uint64_t bytes;  /* size of the model; 0 for the rest of the file */
} moe_source;
moe_status moe_model_open_source_sized(const moe_source *source, size_t source_size, const moe_model_params *params,
                                       size_t size, moe_model **out, moe_error *error);
static inline moe_status moe_model_open_source(const moe_source *source, const moe_model_params *p, moe_model **out,
                                               moe_error *e) {
    return moe_model_open_source_sized(source, sizeof *source, p, sizeof *p, out, e);
}
void moe_model_close(moe_model *model); /* NULL is allowed. The model's sessions remain usable */
/* Verify all tensors not yet verified. Another thread may run sessions meanwhile. With verify = 2, moe_session_new
 * verifies everything except experts; each expert is verified before its first use. For a GPU, and for version 1 files,
 * moe_session_new verifies experts too. Errors: MOE_ERROR_FORMAT (names the tensor and expert), MOE_ERROR_IO. */
moe_status moe_model_verify(const moe_model *model, moe_error *error);
/* Metadata: typed key-value pairs. Keys and values are valid as long as the model. */
typedef enum moe_meta_kind {
    MOE_META_INT = 1,   /* int64_t                               */
    MOE_META_REAL = 2,  /* double                                */
    MOE_META_TEXT = 3,  /* UTF-8, not NUL-terminated: use length */
    MOE_META_BYTES = 4, /* opaque                                */
    MOE_META_INTS = 5,
    MOE_META_REALS = 6,
    MOE_META_TEXTS = 7
} moe_meta_kind;
typedef struct moe_span {
    const char *data; /* not NUL-terminated */
    size_t length;
} moe_span;

/* The task of a model. The file describes every kind as a list of layers; only input and output differ. */
typedef enum moe_kind {
    MOE_MODEL_TRANSLATION, /* tokens -> tokens: moe_translate                                          */
    MOE_MODEL_LANGUAGE,    /* previous tokens -> next token: moe_translate with a target and no source */
    MOE_MODEL_CLASSIFIER   /* numbers -> a class: moe_classify                                         */
} moe_kind;
moe_kind moe_model_kind(const moe_model *model);
size_t moe_model_width(const moe_model *model); /* columns of the embedding, or inputs of a classifier */

/* A layer. The encoder's layers come first; the decoder's layers and GNMT's attention follow. */
typedef struct moe_layer_info {
    const char *name; /* such as "encoder.2" */
    const char *kind; /* "lstm", "moe", "attention", "cross", "ffn", "norm", "ssru", "average", "gnmt-attention" */
    size_t in, out;   /* columns of the layer's input (excluding the attention's context) and output */
} moe_layer_info;
/* A setting of a layer: the value of the metadata key "NAME.key", or the key's default. */
typedef struct moe_setting {
    const char *key;
    const char *text; /* NULL if the value is a number */
    double number;
} moe_setting;
size_t moe_model_layer_count(const moe_model *model);
void moe_model_layer_sized(const moe_model *model, size_t index, moe_layer_info *out, size_t size);
static inline moe_layer_info moe_model_layer(const moe_model *model, size_t index) { /* all zero if out of range */
    moe_layer_info layer;
    moe_model_layer_sized(model, index, &layer, sizeof layer);
    return layer;
}
moe_setting moe_model_layer_setting(const moe_model *model, size_t index, size_t i); /* key is NULL after the last */
/* A gate selects the experts of a row and their weights, from the logits l [n] of a level and p = softmax(l). */
typedef enum moe_gate {
    MOE_GATE_SOFTMAX,   /* every expert, with weight p_i (eq 2, 15) */
    MOE_GATE_TOPK,      /* the k experts with the largest l_i, weighted by softmax (eq 3, 16, 17) or as the file says */
    MOE_GATE_THRESHOLD, /* all experts with p_i > T_i, weighted by their softmax (eq 16, 19) */
    MOE_GATE_SIGMOID,   /* every expert, with weight sigmoid(l_i) (Bengio et al. 2015) */
    MOE_GATE_BATCHWISE  /* expert i gets the k * rows / n rows with the largest p_i; rows affect each other (eq 18) */
} moe_gate;
const char *moe_gate_name(moe_gate gate);            /* a name such as "softmax"; "?" if unknown */
int moe_gate_parse(const char *name, moe_gate *out); /* sets *out and returns 1; returns 0 if unknown */

/* A mixture of experts. With two levels (App. B), a parent gate selects groups, and a gate in each selects experts. */
typedef struct moe_mixture {
    const char *layer;          /* such as "encoder.2" */
    size_t experts, groups;     /* total experts; number of groups, 0 with one level */
    moe_gate gate, parent_gate; /* parent_gate and parent_k: two levels only */
    size_t k, parent_k;         /* selected experts per group; selected groups; 0 if dense */
    size_t hidden;              /* hidden units of an expert */
    int noise;                  /* 1 if the file has W_noise (eq 4) */
} moe_mixture;
size_t moe_model_mixture_count(const moe_model *model); /* the encoder's mixtures come first */
void moe_model_mixture_sized(const moe_model *model, size_t index, moe_mixture *out, size_t size);
static inline moe_mixture moe_model_mixture(const moe_model *model, size_t index) { /* all zero if out of range */
    moe_mixture mixture;
    moe_model_mixture_sized(model, index, &mixture, sizeof mixture);
    return mixture;
}
size_t moe_model_meta_count(const moe_model *model);
moe_span moe_model_meta_key(const moe_model *model, size_t index);
moe_meta_kind moe_model_meta_kind(const moe_model *model, size_t index);
size_t moe_model_meta_length(const moe_model *model, size_t index);     /* number of elements; 1 for a scalar */
ptrdiff_t moe_model_meta_find(const moe_model *model, const char *key); /* index of a key; -1 if absent */
/* Return element `i` of entry `index`; 0 or empty if kind or index is invalid. moe_model_meta_real accepts integers. */
int64_t moe_model_meta_int(const moe_model *model, size_t index, size_t i);
double moe_model_meta_real(const moe_model *model, size_t index, size_t i);
moe_span moe_model_meta_text(const moe_model *model, size_t index, size_t i);               /* TEXT, TEXTS and BYTES */
size_t moe_model_meta_texts(const moe_model *model, size_t index, moe_span *out, size_t n); /* number of texts */

typedef struct moe_tensor_info {
    moe_span name;
    moe_type type;
    uint32_t n_dims;
    uint64_t dims[4]; /* [out, in]; experts: [experts, hidden, width] */
    int experts; /* 1: slabs of up [hidden, width], down [width, hidden], aligned to 4096 bytes. 2: gate, up and down */
    uint64_t offset, bytes; /* offset from the start of the file */
    uint64_t parameters;    /* number of weights, excluding padding */
    uint32_t checksum;      /* CRC-32 (IEEE) of the data, or of `slabs` unless NULL */
    const uint32_t *slabs;  /* [experts] CRC-32 of each slab; NULL before file version 2 */
} moe_tensor_info;
size_t moe_model_tensor_count(const moe_model *model);
void moe_model_tensor_sized(const moe_model *model, size_t index, moe_tensor_info *out, size_t size);
static inline moe_tensor_info moe_model_tensor(const moe_model *model, size_t index) { /* all zero if out of range */
    moe_tensor_info tensor;
    moe_model_tensor_sized(model, index, &tensor, sizeof tensor);
    return tensor;
}
uint64_t moe_model_file_bytes(const moe_model *model);
uint64_t moe_model_held_bytes(const moe_model *model); /* in memory or mapped, excluding streamed experts */
uint32_t moe_model_file_version(const moe_model *model);
int32_t moe_model_vocabulary(const moe_model *model);        /* target token ids are 0 .. vocabulary-1 */
int32_t moe_model_source_vocabulary(const moe_model *model); /* source token ids are 0 .. vocabulary-1 */
int moe_model_prompted(const moe_model *model); /* 1 if the model has no encoder, so a target continues its source */
size_t moe_model_source_extra(const moe_model *model); /* tokens added by a session to a source or scored text */
int moe_model_needs_source(const moe_model *model);    /* 1 if requests need a source_tag */
size_t moe_model_language_count(const moe_model *model);
moe_span moe_model_language(const moe_model *model, size_t i); /* code such as "en" */
/* Return the source token id of a language, by code or number; -1 if the model lacks the language. */
int32_t moe_model_language_tag(const moe_model *model, const char *code);
int32_t moe_model_language_tag_at(const moe_model *model, size_t i);

/* ---- Session ------------------------------------------------------------------------------------------- */

/* Receives the output of every graph node, [rows, cols]; row r begins at data + r * stride. `name` is for instance
 * "decoder.logits". The rows of a gate ("encoder.2.gate") are 0 for unselected experts. The next calls have the names
 * "encoder.2.gate.probabilities" (the softmax before the mask, 0 in unselected groups) and, on the CPU, for experts
 * with hidden units, "encoder.2.experts.sizes" (the norms of the experts' outputs). Tracing is slow. */
typedef void (*moe_trace_fn)(void *user, const char *name, const float *data, size_t rows, size_t cols, size_t stride);
/* The experts of one token in one mixture. */
typedef struct moe_routing {
    void *user;        /* moe_request.user */
    const char *layer; /* such as "encoder.2" */
    size_t position;   /* index of the token in the source, including tag and end, or in the target, which starts    */
                       /* with the begin token or a prompt; for a classifier, index of the row                       */
    int32_t token;     /* the token's id; -1 for a classifier                                                        */
    int empty;         /* 1 if no expert passed the mask; the model then uses the best one or none                   */
    size_t n;          /* experts                                                                                    */
    const uint32_t *experts; /* [n] ascending */
    const float *weights;    /* [n] */
} moe_routing;
/* Called for every token of the requests in progress and every mixture; with a beam, for the tokens of all hypotheses.
 * To get the routing of one translation only, score the translation: its tokens select the same experts. */
typedef void (*moe_routing_fn)(void *user, const moe_routing *routing);
typedef struct moe_attention { /* attention weights of a target token: GNMT's, or the mean of align.heads */
    void *user;                /* moe_request.user */
    size_t position;           /* index of the token in the target; for the end token, one more than the last index */
    size_t n;                  /* n_source of the request */
    const float *weights;      /* [n] for the source tokens; the sum is 1 including the weights of tag, begin and end */
} moe_attention;
typedef void (*moe_attention_fn)(void *user, const moe_attention *attention); /* called for every target token */

/* The logits of the next token for all hypotheses of a request. */
typedef struct moe_next_token {
    void *user;                /* moe_request.user */
    size_t rows, vocabulary;   /* number of live hypotheses, best first; number of tokens */
    size_t stride;             /* floats between the beginnings of two rows of `logits` */
    float *logits;             /* [rows, vocabulary]; the callback may change them */
    size_t n_ids;              /* number of tokens in each hypothesis, including a prefix, excluding a prompt */
    const int32_t *const *ids; /* [rows] pointers to the hypotheses' tokens, [n_ids] each */
} moe_next_token;
/* Called once per step for every request that chooses a token, e.g. to guide the search by a grammar or classifier.
 * Logits of -INFINITY ban tokens. A hypothesis whose tokens are all banned leaves the beam. A request without any
 * hypothesis, or with a logit that is NaN or +INFINITY, gets MOE_ERROR_NUMERIC. The softmax follows, so
 * log-probabilities are those of the changed logits; penalties, sampling, minimum length and the model's own bans apply
 * afterwards. Tokens outside a shortlist are -INFINITY and cannot be allowed (shortlist 0 allows all). Return 0 to
 * continue, or 1 to stop: the current hypotheses, without the next token, become the results, with finished 0. To end a
 * single hypothesis, ban all tokens except the end token. Runs in the thread that called moe_translate, in batch order,
 * with any number of threads. Not called for scored or given tokens. If context_memory runs out, a request restarts and
 * repeats its steps; the callback must then repeat its decisions. A callback that changes no logits changes no results.
 */
typedef int (*moe_next_token_fn)(void *user, const moe_next_token *next);

/* The rules of beam search, from the GNMT paper or from programs whose checkpoints this library reads. Only PAPER
 * supports pruning and reranking; only PAPER and NVIDIA have a coverage penalty. NVIDIA, TF and MLPERF keep finished
 * hypotheses in the beam until all have finished or reached the length limit, where cut hypotheses compete too. */
typedef enum moe_rules {
    MOE_RULES_PAPER =
        0,            /* GNMT section 7: finished hypotheses leave the beam and beat cut ones; lengths include ends */
    MOE_RULES_NVIDIA, /* NVIDIA's PyTorch GNMT: penalties apply once all hypotheses have finished, never at the */
                      /* length limit. Lengths include begin and end. Coverage belongs to a position in the beam */
    MOE_RULES_TF,     /* tensorflow/nmt: each step orders the beam by normalised score, excluding the end token */
    MOE_RULES_MLPERF, /* later TensorFlow 1: like TF, but lengths include the end from the next step on */
    MOE_RULES_HF,     /* Hugging Face: lengths include a forced token, cut ones compete, early_stopping applies */
    MOE_RULES_MARIAN  /* Marian: the beam shrinks with each end, cut ones compete, limits include tag and end */
} moe_rules;

/* Communication between ranks 0 .. ranks-1: processes or sessions that share the experts of a model (Shazeer et al.
 * 2017, 3.1). Each rank has its own requests. All ranks create their sessions, and later call moe_translate or
 * moe_classify, at the same time. The calls end together; if a rank fails, all return its error. Results equal those of
 * a single process. A rank reads only its own experts. A session returns the error of a failed wire function. */
typedef struct moe_wire {
    void *user;
    int rank, ranks;
    moe_status (*agree)(void *user, int64_t *values, size_t n, moe_error *error); /* take the maxima over all ranks */
    /* Exchange data between all ranks, in order of rank: `each` integers per rank, or less than 2^31 bytes in total. */
    moe_status (*counts)(void *user, const uint32_t *send, uint32_t *recv, size_t each, moe_error *error);
    moe_status (*swap)(void *user, const void *send, const size_t *send_bytes, void *recv, const size_t *recv_bytes,
                       moe_error *error);
} moe_wire;

/* The members are in the order in which versions added them. By topic:
 *   Capacity     threads, batch, batch_tokens, max_source, max_target, max_constraints, piece
 *   Languages    source_tag, target_tag
 *   Search       beam, nbest, rules, length_penalty, length_constant, coverage_penalty, prune, rerank, early_stopping
 *   Length       max_len_factor, max_len_offset, min_target, stop_loops
 *   Vocabulary   shortlist, repetition_penalty
 *   Sampling     sample, temperature, top_k, top_p, min_p, seed
 *   Gates        gating, noise, noise_seed
 *   Hardware     isa, device, wire
 *   Memory       device_memory, expert_memory, context_memory, kv_bits
 *   Callbacks    log, routing, attention, trace, next_token */
typedef struct moe_session_params {
    size_t size;            /* bytes of the struct; set by moe_session_params_init                          */
    int threads;            /* number of threads, including the caller's; 0: one per processor available to this     */
                            /* thread (affinity, quota of its control groups)                               */
    int batch;              /* sentences decoded at once                                                    */
    int batch_tokens;       /* source tokens decoded at once, approximately; 0: 64 per sentence             */
    int max_source;         /* maximum tokens of a source or prompt, including tag and end. Default without an        */
                            /* encoder: the model's positions less max_target (on a GPU: limit.source)                */
    int max_target;         /* maximum tokens of a target, including the end token, excluding a prompt. A model's    */
                            /* positions limit source and target, or prompt plus target                     */
    int min_target;         /* minimum length of a translation, excluding the end token                     */
    int32_t target_tag;     /* default of moe_request.target_tag, -1 if absent                              */
    int beam;               /* 1: greedy                                                                    */
    int nbest;              /* hypotheses returned, at most `beam`                                          */
    int max_constraints;    /* maximum per request, up to MOE_MAX_CONSTRAINTS                               */
    float length_penalty;   /* alpha of GNMT eq 14; 0: off                                                  */
    float length_constant;  /* c in ((c + |Y|) / (c + 1))^alpha; GNMT eq 14 has c = 5                       */
    float coverage_penalty; /* beta of GNMT eq 14; 0: off                                                   */
    float prune;            /* margin of GNMT section 7: drop candidates and finished hypotheses whose      */
                            /* log-probability is below the best by more than `prune`; 0: off               */
    float rerank;         /* weight of log P(source | translation) when a multilingual model reranks its beam (noisy */
                          /* channel, Yee et al. 2019, arXiv 1908.05731); 0: off */
    int32_t source_tag;   /* default of moe_request.source_tag. -1: unknown; reranking then assumes the language   */
                          /* that makes the source most probable, given the best translation */
    float max_len_factor; /* a target has at most max_len_factor * n_source + max_len_offset tokens */
    int max_len_offset;
    moe_rules rules;
    int early_stopping;   /* MOE_RULES_HF only. 1: stop when `beam` hypotheses have finished. 0: continue while any */
                          /* live hypothesis, at its current length, beats the worst finished one. Beam 1 implies 1 */
    const char *isa;      /* instruction set from moe_isa_names; NULL: $MOE_ISA, else the machine's best */
    const char *device;   /* "cpu", "cuda", "cuda:N"; NULL: $MOE_DEVICE, else a GPU if one works */
    size_t device_memory; /* bytes of GPU memory; 0: all free memory. Missing experts are fetched on demand */
    moe_log_fn log;       /* may be NULL */
    void *log_user;
    const char *gating; /* name of a gate to use in every mixture; NULL: the file's gates. With "batchwise", */
                        /* results depend on the other sentences of the batch, despite the promise above  */
    int noise;          /* 1: add noise to the logits of gates (eq 4), derived from noise_seed and the tokens so far */
    uint64_t noise_seed;
    moe_routing_fn routing; /* may be NULL */
    void *routing_user;
    moe_attention_fn attention; /* may be NULL */
    void *attention_user;
    moe_trace_fn trace; /* may be NULL */
    void *trace_user;
    int shortlist; /* 1: restrict translations to the model's shortlist for the source and the tokens of the request */
    /* r > 1 makes repeated tokens less probable: the logit z of a token in the translation or its prompt becomes z / r,
     * or z * r if negative. With a beam above 1, r applies to the log-probabilities in scores, but results report
     * unchanged log-probabilities. 1: off. 0: the model's default when sampling, else off. */
    float repetition_penalty;
    int piece;   /* rows per step for prompts and other given tokens, up to 1024; 0: 512 or, with an encoder, 32 per */
                 /* sentence                                                                                        */
    int kv_bits; /* bits per cached key or value: 32, 16 (F16) or 8 (Q8 by head). 0: 16, which changes the */
    /* log-probabilities of SmolLM2-135M in F32 by .0006 on average and .017 at most, and its perplexity  */
    /* from 39.054 to 39.055 (tools/convert/README.md). With an encoder: 32 or 0                          */
    /* MB for cached keys and values; sentences with a common prefix share them. Up to a quarter holds states of Gated
     * DeltaNet after such prefixes, at most 1 + batch / 8 of them, rounded up. 0: enough for a batch of prompts of
     * limit.source tokens. If this memory runs out, a sentence waits or restarts; one that needs more than the total is
     * rejected with a message that states the MB needed. Not on a GPU. */
    int context_memory;
    /* sample 1: sample tokens, with a beam of 1; the result depends only on seed, source and position. The temperature
     * divides logits; 0 disables sampling, except for requests with their own temperature. Candidates are the top_k
     * most probable tokens (0: all), reduced to the fewest whose probabilities add up to top_p, and to those at least
     * min_p times as probable as the best token. */
    int sample, top_k, seed;
    float temperature, top_p, min_p;
    int stop_loops; /* 1: with a beam of 1, end translations that repeat themselves; the default without an encoder */
    /* With moe_model_params.stream: bytes of the cache for experts; missing experts are read on demand. SIZE_MAX: the
     * memory that the machine and the process's limits allow, minus 1 GB. */
    size_t expert_memory;
    const moe_wire *wire;         /* shares experts with other ranks; may be NULL. Not on a GPU, and not with stream */
    moe_next_token_fn next_token; /* may be NULL. Not on a GPU. Requires memory for the logits of all rows of a step */
    void *next_token_user;
} moe_session_params;

/* Set all parameters to their defaults in the model file, or else in the library. `size` is sizeof *params. */
void moe_session_params_init(moe_session_params *params, size_t size, const moe_model *model);
static inline moe_session_params moe_session_params_default(const moe_model *model) {
    moe_session_params params;
    moe_session_params_init(&params, sizeof params, model);
    return params;
}
/* Set rules, beam, penalties, pruning and length limit to the values of "paper", "nvidia", "tf", "mlperf", "hf" or
 * "marian", and rerank to 0. Returns 0 and changes nothing if the name is unknown. */
int moe_session_params_preset(moe_session_params *params, const char *name);
/* A numeric parameter that users may set: an option of programs, libmoetext and Python. */
typedef struct moe_param {
    const char *name;   /* name of the member, e.g. "length_penalty" */
    const char *option; /* option of programs, e.g. "length-penalty" */
    const char *values; /* allowed values, e.g. "0 to 100" */
    const char *help;   /* its effect, in one line */
    double least, most;
    int real;     /* 0: an int; 1: a float; 2: a size_t of bytes, where 2^64 means SIZE_MAX ("auto") */
    int sampling; /* 1 if the parameter has no effect unless `sample` is 1 */
} moe_param;
const moe_param *moe_param_at(size_t i); /* NULL after the last */
double moe_param_get(const moe_session_params *params, size_t i);
int moe_param_set(moe_session_params *params, size_t i, double value); /* returns 0 if out of range */
/* Create a session. `params` may be NULL for defaults. A GPU named by params->device must work. If no device is named
 * and no GPU works, the session uses the CPU and logs the reason. Errors: MOE_ERROR_ARGUMENT (names the parameter),
 * MOE_ERROR_MEMORY, MOE_ERROR_UNSUPPORTED (by this machine, build or model), MOE_ERROR_DEVICE. */
moe_status moe_session_new(const moe_model *m, const moe_session_params *params, moe_session **out, moe_error *error);
void moe_session_free(moe_session *session); /* may be NULL */
/* Return the maximum tokens of a source or prompt, including tag and end. */
size_t moe_session_max_source(const moe_session *session);
/* Compute the bytes of host memory that a session with these parameters would allocate. */
moe_status moe_session_bytes(const moe_model *model, const moe_session_params *params, size_t *out, moe_error *error);
/* The statistics of a session, in the order of the struct's members: kind, name, meaning. New members are appended. */
#define MOE_STATS(X)                                                                                          \
    X(SUM, sentences, "requests; reranking counts in steps and rows only")                                    \
    X(SUM, source_tokens, "source tokens, tag and end included")                                              \
    X(SUM, target_tokens, "tokens of the best hypotheses, end included")                                      \
    X(SUM, steps, "decoder runs; a Transformer scores all prefix tokens in one run")                          \
    X(SUM, rows, "rows of these runs, one per token")                                                         \
    X(LEVEL, bytes, "memory of the session")                                                                  \
    X(TEXT, isa, "kernels in use")                                                                            \
    X(TEXT, device, "cpu, or the GPU: cuda:0 NVIDIA H200")                                                    \
    X(LEVEL, device_bytes, "GPU memory of the session")                                                       \
    X(SUM, expert_pairs, "(row, expert) pairs that expert layers computed")                                   \
    X(SUM, expert_visits, "experts with rows, summed over runs of expert layers; several if rows do not fit") \
    X(LEVEL, experts, "GPU, or streamed: experts of all layers")                                              \
    X(LEVEL, experts_held, "experts that fit in memory at a time")                                            \
    X(SUM, expert_hits, "if not all fit: visits that found their expert in memory")                           \
    X(SUM, expert_fetches, "experts fetched from host memory or from the file")                               \
    X(SUM, expert_fetch_bytes, "bytes of these experts")                                                      \
    X(SUM, expert_wait_ns, "total nanoseconds that threads waited for experts")                               \
    X(SUM, expert_ahead, "experts prefetched")                                                                \
    X(SUM, expert_ahead_used, "prefetched experts that were used")                                            \
    X(SUM, draft_rows, "rows that computed tokens of drafts")                                                 \
    X(SUM, draft_tokens, "of these tokens, those of the translation")                                         \
    X(SUM, shared_rows, "rows of prompts that were not computed again")                                       \
    X(SUM, loaded_rows, "of these rows, those from a file of prompts")

#define MOE_STAT_SUM uint64_t
#define MOE_STAT_LEVEL uint64_t
#define MOE_STAT_TEXT const char *
#define MOE_STAT_MEMBER(kind, name, meaning) MOE_STAT_##kind name;
typedef struct moe_stats {
    MOE_STATS(MOE_STAT_MEMBER)
} moe_stats;

/* A row of MOE_STATS, for programs that show or add up all statistics. */
typedef struct moe_stat {
    const char *name, *meaning;
    size_t offset; /* in moe_stats, of a uint64_t or, if `text` is 1, a const char * */
    int sum, text; /* sum 1: total since the session was created; 0: current value */
} moe_stat;
const moe_stat *moe_stat_at(size_t i);                                                 /* NULL after the last */
void moe_session_stats_sized(const moe_session *session, moe_stats *out, size_t size); /* waits until a GPU is idle */
static inline moe_stats moe_session_stats(const moe_session *session) {
    moe_stats stats;
    moe_session_stats_sized(session, &stats, sizeof stats);
    return stats;
}

/* Save the computed prompts of a session to a file, or load them into a new session. Without an encoder, a session
 * computes the common beginning of prompts once: it keeps the keys, values and states of recent prompts, in pages of 16
 * tokens. Loading changes no results. If not all prompts fit, the most recently used are loaded. All data used is
 * verified; after an error the session is usable, but has no prompts. A file is valid for any batch, number of threads
 * and instruction set, and appears completely or not at all. It contains the prompts' tokens. Errors: MOE_ERROR_FORMAT
 * (a damaged file, or one of another model, library version, kv_bits or gating: the caller may replace it),
 * MOE_ERROR_ARGUMENT (another kind of file, or the session has already translated), MOE_ERROR_UNSUPPORTED (a model with
 * an encoder, a GPU, noise, batchwise gates, or callback routing, attention or trace), MOE_ERROR_IO,
 * MOE_ERROR_CANCELLED (by a signal). */
moe_status moe_session_prompts(moe_session *session, const char *path, int save, moe_error *error);
static inline moe_status moe_session_save_prompts(moe_session *s, const char *path, moe_error *e) {
    return moe_session_prompts(s, path, 1, e);
}
static inline moe_status moe_session_load_prompts(moe_session *s, const char *path, moe_error *e) {
    return moe_session_prompts(s, path, 0, e);
}

const char *moe_isa_names(void);         /* instruction sets of this build, the best one last: "portable avx2 ..." */
int moe_isa_available(const char *name); /* 1 if this machine has the instruction set */

/* ---- Translating and scoring --------------------------------------------------------------------------- */

/* Tokens that must appear in the translation, adjacent and in this order. The search places them where attention is on
 * their source tokens (See et al. 2017, arXiv 1704.04368) or, without attention, where they are probable. */
typedef struct moe_constraint {
    const int32_t *ids;            /* [n_ids] at least one */
    size_t n_ids, first, n_source; /* the ids translate n_source source tokens (0 if unknown) from `first` on */
    int once;                      /* 1: avoid these tokens elsewhere in the translation */
} moe_constraint;
/* A flag that drops all requests pointing to it. Initialise the flag to zero; access it only with these functions. */
typedef struct moe_drop {
    int set;
} moe_drop;
void moe_request_drop(moe_drop *drop); /* allowed in any thread or signal handler, even before the request is pulled */
int moe_request_dropped(const moe_drop *drop); /* may be NULL */

/* One sentence. Its ids stand for text only; the session adds the tag, begin and end tokens of the model's format. The
 * session presets every field before it calls the pull function: tags to its defaults, force to -1, the rest to 0. All
 * pointers must remain valid until the next call of the pull function, and `drop` until the result. */
typedef struct moe_request {
    const int32_t *source; /* [n_source] token ids */
    size_t n_source;
    const int32_t *target; /* [n_target] token ids of a translation to be scored, or NULL to translate */
    size_t n_target;
    int32_t force; /* the first token of the translation, which the result includes with log-probability 0. -1: the */
                   /* model's format determines the token (NLLB: the target tag, which the result does not include) */
    int raw;       /* 1: `source` is the whole input of the encoder, or the whole prompt. The session adds no tag,  */
                   /* begin or end, and the result includes a first token forced by the model's format              */
    int prefix;    /* 1: `target` is the beginning of the translation, and the search finds the rest. Scores and    */
                   /* lengths include this beginning, but the length limit always allows one more token             */
    const moe_constraint *constraints; /* [n_constraints]; no two may share a token; scoring ignores them */
    size_t n_constraints;
    int32_t target_tag;   /* the language to translate into, from moe_model_language_tag */
    int32_t source_tag;   /* the language of the source, for reranking and for models that read it (NLLB, M2M-100) */
    void *user;           /* returned with the result */
    const moe_drop *drop; /* may be NULL. Once it is set, the session drops the request before the next step (on a    */
                          /* GPU, only before its first step); the status is then MOE_ERROR_CANCELLED              */
    size_t limit;         /* maximum length including the end, at most the session's; 0: the session's */
    /* May be NULL. Called after each step that extends the common beginning of all hypotheses, with the new ids [n] and
     * the `user` of moe_translate and of this request. A beam of 1 withholds possible loops. Not on a GPU. */
    void (*partial)(void *user, void *request, const int32_t *ids, size_t n);
    float repetition_penalty;           /* for the translation, not its prompt; 0: the session's penalty for both */
    const moe_session_params *sampling; /* NULL, or parameters sample to min_p; requires a session with sample 1 */
    int beam; /* number of hypotheses, at most the session's; 0: the session's. 1 disables reranking */
    /* [n_draft] ids of a text that resembles the translation, such as an older translation or a fast model's, without
     * those of `target`; or NULL. A draft only saves time: the session computes its probable tokens together and keeps
     * those that it would have chosen. It computes none if it expects no gain, with a beam above 1, for LSTM decoders,
     * with constraints or callbacks next_token, routing or attention, and on a GPU. In a session with beam 1, layers of
     * the model that predict further tokens write a draft if there is none or drafts have been worse; not with a wire,
     * trace, noise or a streamed model. */
    const int32_t *draft;
    size_t n_draft;
} moe_request;
typedef struct moe_hypothesis {
    const int32_t *ids;          /* [n_ids] without begin and end                                                  */
    const float *token_logprobs; /* [n_ids + finished] natural logarithms, with the end token last                 */
    const int32_t *sources;      /* [n_ids] index of the source token with the largest attention, or -1;            */
    size_t n_ids;                /* NULL unless max_constraints > 0 and the model can show its attention           */
    float logprob;               /* sum of token_logprobs                                                          */
    float score;                 /* logprob / length penalty + coverage penalty (GNMT eq 14). Reranking adds       */
                                 /* rerank * reverse / length penalty of the source                                */
    int finished, looped;        /* 1 if the end token was reached; 1 if stop_loops cut the translation            */
    float reverse;               /* log P(source and end | this hypothesis); 0 if not reranked or too long         */
} moe_hypothesis;
typedef struct moe_result {
    void *user;                       /* moe_request.user */
    moe_status status;                /* MOE_OK, or the reason why there are no hypotheses */
    const char *message;              /* one line, empty if status is MOE_OK */
    size_t n_hypotheses;              /* at most nbest and the request's beam; scoring returns exactly one */
    const moe_hypothesis *hypotheses; /* best first; valid during the call only */
} moe_result;

/* Return values of a pull function: *request was set; no more requests; no request for now; drop all requests. */
enum { MOE_PULL_REQUEST = 1, MOE_PULL_END = 0, MOE_PULL_LATER = -1, MOE_PULL_CANCEL = -2 };
/* Supplies the next request. If `wait` is 0 (requests are in progress), return MOE_PULL_LATER instead of blocking. */
typedef int (*moe_pull_fn)(void *user, int wait, moe_request *request);
/* Receives a result. Requests finish in any order; moe_request.user identifies them. */
typedef void (*moe_done_fn)(void *user, const moe_result *result);

/* Stop a session, from any thread or signal handler. The running call, or else the next one, drops its requests and
 * returns MOE_ERROR_CANCELLED: within a few milliseconds or, on a GPU, after the current step. */
void moe_session_cancel(moe_session *session);
void moe_session_uncancel(moe_session *session); /* clear a cancellation that came too late for the last call */

/* Pull requests until MOE_PULL_END, decode them together and hand over each result as soon as it is final. A request
 * that cannot be served (too long, unknown id) has a status of its own. Returns MOE_OK, or a failure that loses the
 * requests in progress. The session remains usable after MOE_ERROR_CANCELLED, and after MOE_ERROR_IO or
 * MOE_ERROR_FORMAT (the file was changed, cannot be read or is damaged), but not after MOE_ERROR_DEVICE or a GPU's
 * MOE_ERROR_MEMORY. */
moe_status moe_translate(moe_session *session, moe_pull_fn pull, moe_done_fn done, void *user, moe_error *error);

/* Translate one sentence, the token ids source [n], with the session's defaults. Writes the ids of the best translation
 * to out [capacity] and their number to *n_out. Errors: those of moe_translate, the status of the sentence, and
 * MOE_ERROR_LIMIT, which also sets *n_out. If *n_out then exceeds `capacity`, nothing was written. Otherwise the
 * translation is incomplete: cut at the length limit, or by stop_loops because it repeats itself. */
moe_status moe_translate_ids(moe_session *session, const int32_t *source, size_t n, int32_t *out, size_t capacity,
                             size_t *n_out, moe_error *error);

/* Classify inputs [rows, moe_model_width] in batches of the session's size. Writes the `nbest` most probable classes
 * and their log-probabilities to classes and logprobs [rows, nbest], best first. Errors: MOE_ERROR_ARGUMENT (not a
 * classifier), MOE_ERROR_NUMERIC (a result is NaN), MOE_ERROR_DEVICE. */
moe_status moe_classify(moe_session *session, const float *inputs, size_t rows, int32_t *classes, float *logprobs,
                        moe_error *error);

/* ---- Writing models ------------------------------------------------------------------------------------ */

/* Model files appear completely or not at all: they are written as ".moe-..." in the same folder, flushed to disk and
 * renamed. Symbolic links remain links, a replaced file keeps its permissions, and only regular files are written. A
 * file larger than RLIMIT_FSIZE causes an error, not a signal. The calling thread blocks SIGHUP, SIGINT and SIGTERM if
 * they have their default action, and removes an incomplete file before such a signal ends the process (unless another
 * thread receives the signal). */

typedef struct moe_meta_entry { /* metadata to write */
    const char *key;            /* 1 to 255 characters of [a-z0-9._-] */
    moe_meta_kind kind;         /* any except MOE_META_REALS */
    int64_t integer;            /* MOE_META_TEXTS: the byte between the texts; 0: a newline */
    double real;
    moe_span text; /* UTF-8; MOE_META_BYTES: any bytes; MOE_META_INTS: int64_t [length / 8] */
} moe_meta_entry;
typedef struct moe_vector_entry { /* an F32 vector to write */
    const char *name;
    const float *data; /* [n] */
    size_t n;
} moe_vector_entry;
typedef struct moe_rows_entry { /* a tensor to write in part: only these rows, numbers or experts */
    const char *name;
    const uint32_t *rows; /* [n] */
    size_t n;
} moe_rows_entry;
typedef struct moe_types_entry { /* the type of one experts tensor */
    const char *name;
    moe_type type;
} moe_types_entry;
typedef struct moe_save_params {
    moe_type type, experts; /* number formats of matrices (gates, thresholds and biases stay F32) and of experts */
    const moe_meta_entry *entries; /* [n_entries] metadata to add or replace; may be NULL */
    size_t n_entries;
    const moe_vector_entry *vectors; /* [n_vectors] vectors to add or replace; may be NULL */
    size_t n_vectors;
    const moe_rows_entry *rows; /* [n_rows] tensors to write in part; may be NULL */
    size_t n_rows;
    const moe_types_entry *types; /* [n_types] types of single experts tensors; may be NULL */
    size_t n_types;
} moe_save_params;

/* Write the model to `path` in the number formats of `params`. Keep all metadata, but drop golden.* and quality.* if
 * any number changes. A finer type does not restore lost precision. Errors: MOE_ERROR_ARGUMENT (also if the type cannot
 * hold a number), MOE_ERROR_MEMORY, MOE_ERROR_IO, MOE_ERROR_CANCELLED (by a signal). */
moe_status moe_model_save_sized(const moe_model *model, const char *path, const moe_save_params *params, size_t size,
                                moe_error *error);
static inline moe_status moe_model_save(const moe_model *m, const char *path, const moe_save_params *p, moe_error *e) {
    return moe_model_save_sized(m, path, p, sizeof *p, e);
}

/* Write a new model file, using memory for its largest matrix or expert. Names, types and shapes are checked here;
 * moe_model_open checks whether the file is a model. Errors: those of moe_model_save. */
typedef struct moe_tensor_spec {
    const char *name;
    moe_type type;   /* F32 if n_dims is 1 */
    uint32_t n_dims; /* 1: a vector. 2: a matrix [out, in]. 3: experts [experts, hidden, width] */
    uint64_t dims[3];
} moe_tensor_spec;
/* Fill out[cols] with row `row` of tensor number `tensor`. Expert `piece` has `hidden` rows of a gate matrix (if
 * gated), `hidden` rows of the up matrix and `width` rows of the down matrix. Rows are requested in file order. */
typedef void (*moe_fill_fn)(void *user, size_t tensor, size_t piece, size_t row, float *out, size_t cols);
/* Fill codes[cols] (-127 to 127) and *scale of a row of a Q8 matrix, which are stored unchanged, and return 1. Return 0
 * to have the numbers of moe_fill_fn quantised instead. */
typedef int (*moe_codes_fn)(void *user, size_t tensor, size_t row, int8_t *codes, size_t cols, float *scale);
typedef struct moe_write_params {
    moe_allocator allocator; /* if all members are zero: malloc, realloc, free */
    const moe_meta_entry *entries;
    size_t n_entries;
    const moe_tensor_spec *tensors;
    size_t n_tensors;
    moe_fill_fn fill;
    void *user;
    int gated;          /* 1: experts are gated */
    moe_codes_fn codes; /* may be NULL */
    /* Identifies the source of the numbers, such as a hash. If the call ends with MOE_ERROR_CANCELLED, or the process
     * is killed, PATH.partial remains; the next call with the same metadata, tensors and `resume` verifies and keeps
     * the matrices and experts in it. Only one call at a time may write PATH. NULL: nothing remains after an error. */
    const char *resume;
} moe_write_params;
moe_status moe_model_write_sized(const char *path, const moe_write_params *params, size_t size, moe_error *error);
static inline moe_status moe_model_write(const char *path, const moe_write_params *params, moe_error *error) {
    return moe_model_write_sized(path, params, sizeof *params, error);
}

#ifdef __cplusplus
}
#endif
#ifdef __GNUC__
#pragma GCC visibility pop
#endif
#endif /* MOE_H */
