/* moe.h - inference for Mixture-of-Experts translation models: one header, one C file.
 * Build:   cc -O2 app.c moe.c -lm -pthread          README.md shows the smallest program.
 *
 * Objects and lifetimes
 *   moe_model    the contents of a model file, which never changes. Any number of threads and sessions share it. It may
 *                be closed while sessions use it: it stays until the last of them is freed.
 *   moe_session  one translator with its threads and memory. One thread at a time may use it. It allocates all of its
 *                memory when it is made (moe_session_bytes: how much).
 *   moe_request  the input: token ids; moe_result: token ids, scores, log-probabilities. tools/text/ makes ids of text.
 * Errors
 *   Every function that can fail returns a moe_status and fills the caller's moe_error, which may be NULL. Outputs are
 *   untouched on failure unless stated otherwise. A request that cannot be served has a status of its own in its
 *   moe_result and does not disturb the others. All other pointers must not be NULL, unless this header allows it.
 * Sizes
 *   Versions never write past each other's structs. moe_session_params contains its size; other structs of the caller
 *   are passed with theirs to functions named ..._sized, which inline functions without this suffix call. New members
 *   come at the end of such structs: a newer program is refused if it sets one that an older library does not have, an
 *   older program gets its default. Other structs, arrays too, change only with the library's number, 0.MINOR for now.
 * Callbacks
 *   pull, done, partial, routing, attention, trace run in the thread that called moe_translate or moe_classify, log in
 *   the thread that makes or runs the session, never two at a time. A callback may read the model, cancel any session,
 *   read the statistics of its own session and use other sessions freely. It must not free its own session, translate
 *   or classify with it, or leave by longjmp or a C++ exception.
 * Promises
 *   - The same bytes everywhere: no result depends on batch, order of requests, number of threads, instruction set.
 *   - The library never aborts, exits, prints or leaks. It has no global state and no signal handler.
 *   - A model file is untrusted input: every length, offset and product in it is checked before use.
 * Processes
 *   A child of fork() may use its parent's models, but must make its own sessions. Calls return MOE_ERROR_IO if a
 *   mapped file was written to or truncated; pages that vanish while a step runs end the process (SIGBUS): replace
 *   model files by renaming, or open them with moe_model_params.copy or stream.
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
#define MOE_FILE_VERSION 2 /* version of the model files that this library writes; it reads all versions up to it */

enum {
    MOE_MAX_BEAM = 64,           /* largest beam                                                          */
    MOE_MAX_CONSTRAINTS = 64,    /* most constraints of a request                                         */
    MOE_MAX_LAYERS = 256,        /* layers on one side of a model                                         */
    MOE_MAX_THREADS = 256,       /* threads of one session                                                */
    MOE_MAX_RANKS = 4096,        /* of a wire                                                             */
    MOE_VERIFY_BYTES = 64 << 20, /* files up to this size are verified when opened                        */
    MOE_MAX_HEADER = 256 << 20,  /* bytes of a file before its first tensor: metadata and directory       */
    MOE_MAX_ENTRIES = 65536,     /* metadata entries, and tensors; their names have 1 to 255 characters   */
    MOE_MAX_TEXTS = 65536        /* texts of one metadata entry                                           */
};

const char *moe_version(void);
int moe_version_number(void); /* version of the loaded library; MOE_VERSION_NUMBER: version of this header */

/* ---- Errors, memory, log ------------------------------------------------------------------------------- */

typedef enum moe_status {
    MOE_OK = 0,
    MOE_ERROR_ARGUMENT,    /* an argument is invalid                                                  */
    MOE_ERROR_MEMORY,      /* an allocation failed                                                    */
    MOE_ERROR_IO,          /* the operating system could not open, read, map or write a file          */
    MOE_ERROR_FORMAT,      /* the file is not a model, or is damaged                                  */
    MOE_ERROR_UNSUPPORTED, /* this build or machine lacks a feature that the file or request needs    */
    MOE_ERROR_LIMIT,       /* a request is longer than the session was made for                       */
    MOE_ERROR_NUMERIC,     /* a log-probability is not-a-number: broken weights                       */
    MOE_ERROR_CANCELLED,   /* the caller cancelled, or a signal came while a file was written         */
    MOE_ERROR_DEVICE       /* the GPU or its driver failed                                            */
} moe_status;
const char *moe_status_name(moe_status status); /* "ok", "format", ... never NULL */

typedef struct moe_error {
    moe_status code;
    char message[256]; /* one line without a newline; names a remedy if there is one */
    char where[96];    /* a file offset, tensor, metadata key or parameter */
} moe_error;

/* All three or none. `allocate`: aligned to 16, or NULL. Called only in threads that open, make or free an object. */
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
    MOE_TYPE_Q4 = 4,  /* 4-bit codes, one integer factor for 32 columns, and Q8's scale; products are exact integers */
    MOE_TYPE_Q4M = 5, /* Q4 with a middle too for 32 columns, and a scale for 64, whose products are exact */
    MOE_TYPE_Q8B = 6, /* Q8 with a scale for 64 columns too, as in Q4M */
    MOE_TYPE_COUNT,
    MOE_TYPE_KEEP = 255 /* moe_save_params: as it is in the file */
} moe_type;
#define MOE_TYPE_NAMES "f32, f16, bf16, q8, q4, q4m, q8b" /* in the order of moe_type, for messages */
const char *moe_type_name(moe_type type);                 /* "f32", "f16", "bf16", "q8" and so on; "?" if unknown */
int moe_type_parse(const char *name, moe_type *out);      /* 1 and *out set, or 0 */

/* ---- Model --------------------------------------------------------------------------------------------- */

typedef struct moe_model moe_model;
typedef struct moe_session moe_session;
typedef struct moe_model_params {
    moe_allocator allocator; /* all zero: malloc, realloc, free */
    int verify; /* When tensors are verified (compared with their checksums). 1: at opening, which reads the whole */
                /* file. 2: before their first use. -1: never. 0: 1 up to MOE_VERIFY_BYTES, else 2                 */
    int copy;   /* 0: map the file, which processes share. 1: read it into huge pages: faster, but opened slower   */
    int stream; /* 1: read all but the experts so; a session holds as many of these as its expert_memory allows    */
} moe_model_params;

/* Open and check a model file. `params` NULL: defaults.
 * Errors: MOE_ERROR_IO, MOE_ERROR_FORMAT, MOE_ERROR_UNSUPPORTED, MOE_ERROR_MEMORY. */
moe_status moe_model_open_sized(const char *path, const moe_model_params *params, size_t size, moe_model **out,
                                moe_error *error);
static inline moe_status moe_model_open(const char *path, const moe_model_params *p, moe_model **out, moe_error *e) {
    return moe_model_open_sized(path, p, sizeof *p, out, e);
}

/* The same of bytes in memory, aligned to 64 (else MOE_ERROR_ARGUMENT): they must outlive model and sessions. */
moe_status moe_model_open_memory_sized(const void *data, size_t bytes, const moe_model_params *params, size_t size,
                                       moe_model **out, moe_error *error);
static inline moe_status moe_model_open_memory(const void *data, size_t bytes, const moe_model_params *p,
                                               moe_model **out, moe_error *e) {
    return moe_model_open_memory_sized(data, bytes, p, sizeof *p, out, e);
}
void moe_model_close(moe_model *model); /* NULL is fine. Its sessions go on; new ones cannot be made */
/* Verify every tensor not yet verified, perhaps in another thread while sessions run. With verify = 2, moe_session_new
 * verifies all but experts, and each of these is verified when the first row goes to it (for a GPU, and in files of
 * version 1, by moe_session_new too). Errors: MOE_ERROR_FORMAT (names tensor and expert), MOE_ERROR_IO. */
moe_status moe_model_verify(const moe_model *model, moe_error *error);
/* Metadata: typed key-value pairs. The model owns keys and values; they are valid as long as the model. */
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

/* The task of a model. The file describes every kind by a list of layers; only input and output differ. */
typedef enum moe_kind {
    MOE_MODEL_TRANSLATION, /* tokens -> tokens: moe_translate                                              */
    MOE_MODEL_LANGUAGE,    /* previous tokens -> next token: moe_translate with a target and no source     */
    MOE_MODEL_CLASSIFIER   /* numbers -> a class: moe_classify                                               */
} moe_kind;
moe_kind moe_model_kind(const moe_model *model);
size_t moe_model_width(const moe_model *model); /* columns of an embedding; of a classifier: its inputs */

/* A layer: of the encoder, then of the decoder, then the attention of a GNMT model; or of a classifier's network. */
typedef struct moe_layer_info {
    const char *name; /* "encoder.2" */
    const char *kind; /* "lstm", "moe", "attention", "cross", "ffn", "norm", "ssru", "average", "gnmt-attention" */
    size_t in, out;   /* columns of its input (the attention's context not counted) and of its output */
} moe_layer_info;
/* One setting of a layer: the value of the metadata key "NAME.key", or its default where the file has no such key. */
typedef struct moe_setting {
    const char *key;
    const char *text; /* the value if it is a word; NULL if it is a number */
    double number;
} moe_setting;
size_t moe_model_layer_count(const moe_model *model);
void moe_model_layer_sized(const moe_model *model, size_t index, moe_layer_info *out, size_t size);
static inline moe_layer_info moe_model_layer(const moe_model *model, size_t index) { /* all zero if out of range */
    moe_layer_info layer;
    moe_model_layer_sized(model, index, &layer, sizeof layer);
    return layer;
}
moe_setting moe_model_layer_setting(const moe_model *model, size_t index, size_t i); /* `key` NULL after the last */
/* A gate says to which experts a row goes, and with which weights. Of the logits l [n] of a level, p = softmax(l): */
typedef enum moe_gate {
    MOE_GATE_SOFTMAX,   /* every expert, with weight p_i (eq 2, 15) */
    MOE_GATE_TOPK,      /* the k largest, with a softmax over them (eq 3, 16, 17); a file may say other weights */
    MOE_GATE_THRESHOLD, /* { i : p_i > T_i }, with a softmax over them (eq 16, 19) */
    MOE_GATE_SIGMOID,   /* every expert, with weight sigmoid(l_i) (Bengio et al. 2015) */
    MOE_GATE_BATCHWISE  /* for each expert the k * rows / n rows with its largest p: rows affect each other (eq 18) */
} moe_gate;
const char *moe_gate_name(moe_gate gate);            /* "softmax", ... "?" if unknown */
int moe_gate_parse(const char *name, moe_gate *out); /* 1 and *out set, or 0 */

/* A mixture of experts. With two levels (App. B) a parent gate selects groups, a gate inside each of them experts. */
typedef struct moe_mixture {
    const char *layer;          /* "encoder.2" */
    size_t experts, groups;     /* experts of all groups together; groups 0: one level */
    moe_gate gate, parent_gate; /* parent_gate, parent_k: two levels only */
    size_t k, parent_k;         /* experts selected per group (one level: of all), groups selected; 0: all, if dense */
    size_t hidden;              /* units of an expert */
    int noise;                  /* 1: the file has W_noise of eq 4 */
} moe_mixture;
size_t moe_model_mixture_count(const moe_model *model);
void moe_model_mixture_sized(const moe_model *model, size_t index, moe_mixture *out, size_t size);
static inline moe_mixture moe_model_mixture(const moe_model *model, size_t index) { /* encoder first; or all zero */
    moe_mixture mixture;
    moe_model_mixture_sized(model, index, &mixture, sizeof mixture);
    return mixture;
}
size_t moe_model_meta_count(const moe_model *model);
moe_span moe_model_meta_key(const moe_model *model, size_t index);
moe_meta_kind moe_model_meta_kind(const moe_model *model, size_t index);
size_t moe_model_meta_length(const moe_model *model, size_t index);     /* elements of a list; 1 for a scalar */
ptrdiff_t moe_model_meta_find(const moe_model *model, const char *key); /* the index of a key, or -1 */
/* Element `i` of entry `index`: 0 or an empty span if kind or range do not match. An INT can be read as REAL too. */
int64_t moe_model_meta_int(const moe_model *model, size_t index, size_t i);
double moe_model_meta_real(const moe_model *model, size_t index, size_t i);
moe_span moe_model_meta_text(const moe_model *model, size_t index, size_t i);               /* TEXT, TEXTS and BYTES */
size_t moe_model_meta_texts(const moe_model *model, size_t index, moe_span *out, size_t n); /* returns how many */

typedef struct moe_tensor_info {
    moe_span name;
    moe_type type;
    uint32_t n_dims;
    uint64_t dims[4]; /* [out, in]; experts: [experts, hidden, width] */
    int experts; /* 1: slabs, aligned to 4096 bytes: up [hidden, width], down [width, hidden]. 2: a gate comes first */
    uint64_t offset, bytes; /* offset: from the start of the file */
    uint64_t parameters;    /* trained numbers, without padding */
    uint32_t checksum;      /* CRC-32 (IEEE) of the bytes; of `slabs` if that is not NULL */
    const uint32_t *slabs;  /* experts, file version 2: [experts] CRC-32 of each slab; else NULL */
} moe_tensor_info;
size_t moe_model_tensor_count(const moe_model *model);
void moe_model_tensor_sized(const moe_model *model, size_t index, moe_tensor_info *out, size_t size);
static inline moe_tensor_info moe_model_tensor(const moe_model *model, size_t index) { /* all zero if out of range */
    moe_tensor_info tensor;
    moe_model_tensor_sized(model, index, &tensor, sizeof tensor);
    return tensor;
}
uint64_t moe_model_file_bytes(const moe_model *model);
uint64_t moe_model_held_bytes(const moe_model *model); /* of them, in memory or mapped: streamed, all but experts */
uint32_t moe_model_file_version(const moe_model *model);
int32_t moe_model_vocabulary(const moe_model *model);        /* token ids are 0 .. vocabulary-1 */
int32_t moe_model_source_vocabulary(const moe_model *model); /* of sources, which may have ids of their own */
int moe_model_prompted(const moe_model *model); /* 1: no encoder. A source is a prompt, the beginning of its target */
size_t moe_model_source_extra(const moe_model *model); /* tokens that a session adds to a source; or to a scored text */
int moe_model_needs_source(const moe_model *model); /* 1: requests need a source_tag: sources have the language's tag */
size_t moe_model_language_count(const moe_model *model);
moe_span moe_model_language(const moe_model *model, size_t i); /* "en" */
/* The token id, one of sources, that stands for a language, by code or number; -1 if the model does not have it. */
int32_t moe_model_language_tag(const moe_model *model, const char *code);
int32_t moe_model_language_tag_at(const moe_model *model, size_t i);

/* ---- Session ------------------------------------------------------------------------------------------- */

/* Receives the output of every graph node after it ran, [rows, cols]; row r begins at data + r * stride. `name` is for
 * instance "decoder.logits". A gate, "encoder.2.gate", is dense: [rows, experts], 0 if not selected. Then comes
 * "encoder.2.gate.probabilities", the softmax before the mask (0 in groups that were not selected); behind experts with
 * hidden units, but on no GPU, "encoder.2.experts.sizes", the norms of their outputs. Tracing is slow. */
typedef void (*moe_trace_fn)(void *user, const char *name, const float *data, size_t rows, size_t cols, size_t stride);
/* The experts of one token in one mixture. */
typedef struct moe_routing {
    void *user;        /* of the request                                                                             */
    const char *layer; /* "encoder.2"                                                                                */
    size_t position;   /* of the token in the source, tag and end counted; or in the target, where position 0 is the */
                       /* begin token, or the first of a prompt; for a classifier, the number of the row             */
    int32_t token;     /* the id at this position; -1 in a classifier                                                */
    int empty;         /* 1: the mask selected no expert, and the model's policy chose instead                       */
    size_t n;          /* experts                                                                                    */
    const uint32_t *experts; /* [n] ascending */
    const float *weights;    /* [n] */
} moe_routing;
/* Called for every token and mixture while requests are under way, with a beam for the rows of all hypotheses. To get
 * the routing of one translation only, score that translation: the bytes are the same. */
typedef void (*moe_routing_fn)(void *user, const moe_routing *routing);
typedef struct moe_attention { /* the weights of one target token: GNMT's, or of the heads of align.heads */
    void *user;                /* of the request */
    size_t position;           /* of the token in the target; the end token comes after the last one */
    size_t n;                  /* n_source of the request */
    const float *weights;      /* [n] on the tokens of the request; tag, begin and end have the rest to 1 */
} moe_attention;
typedef void (*moe_attention_fn)(void *user, const moe_attention *attention); /* as moe_routing_fn, for target tokens */

/* The rules of beam search: the paper's, or those of another program whose checkpoints this library reads. Only the
 * paper's prune and rerank, only the paper's and NVIDIA's have a coverage penalty. NVIDIA, TF and MLPERF keep finished
 * hypotheses in the beam until all have finished, or until the length limit, where those that it cuts compete too. */
typedef enum moe_rules {
    MOE_RULES_PAPER = 0, /* GNMT section 7: finished ones leave the beam, above cut ones. Lengths count the end     */
    MOE_RULES_NVIDIA,    /* NVIDIA's PyTorch GNMT: penalties count once all hypotheses have finished, never at the  */
                         /* length limit. Lengths count begin and end. Coverage is kept per place in the beam       */
    MOE_RULES_TF,        /* tensorflow/nmt: every step orders the beam by normalised score, the end not counted     */
    MOE_RULES_MLPERF,    /* the same with later TensorFlow 1: lengths count the end from the step after it          */
    MOE_RULES_HF,        /* Hugging Face: lengths count a forced token, cut ones compete, early_stopping ends search */
    MOE_RULES_MARIAN     /* Marian: the beam shrinks with each end, cut ones compete, limits count tag and end      */
} moe_rules;

/* What ranks 0 .. ranks-1, processes or sessions that share the experts of a model (Shazeer et al. 2017, 3.1),
 * exchange. Each has requests of its own. All make their sessions, and call moe_translate or moe_classify, at the same
 * time: these calls end together, an error of one is an error of all, results are those of one process. A rank reads
 * only its own experts. Once a function of the wire has failed, the session returns its error. */
typedef struct moe_wire {
    void *user;
    int rank, ranks;
    moe_status (*agree)(void *user, int64_t *values, size_t n, moe_error *error); /* each: the largest of all ranks */
    /* To and from each rank, one behind the other: `each` numbers; bytes, together less than 2^31. */
    moe_status (*counts)(void *user, const uint32_t *send, uint32_t *recv, size_t each, moe_error *error);
    moe_status (*swap)(void *user, const void *send, const size_t *send_bytes, void *recv, const size_t *recv_bytes,
                       moe_error *error);
} moe_wire;

typedef struct moe_session_params {
    size_t size;            /* of the struct; moe_session_params_init sets it                              */
    int threads;            /* threads that compute, the caller's included; 0: one per processor           */
    int batch;              /* sentences decoded at once                                                   */
    int batch_tokens;       /* source tokens of the sentences decoded at once, about; 0: 64 per sentence   */
    int max_source;         /* longest source in tokens, tag and end included; or longest prompt           */
    int max_target;         /* longest target, end included, prompt not. Positions limit both, or prompt and target */
    int min_target;         /* least number of tokens of a translation, end not counted                    */
    int32_t target_tag;     /* default of moe_request.target_tag; -1: none                                 */
    int beam;               /* 1: greedy                                                                   */
    int nbest;              /* hypotheses returned, at most `beam`                                         */
    int max_constraints;    /* of a request, at most MOE_MAX_CONSTRAINTS                                   */
    float length_penalty;   /* alpha of GNMT eq 14; 0: none                                                */
    float length_constant;  /* c in ((c + |Y|) / (c + 1))^alpha, 5 in GNMT eq 14                           */
    float coverage_penalty; /* beta of GNMT eq 14; 0: none                                                 */
    float prune;            /* log-probability margin of GNMT section 7: candidates of a step and finished */
                            /* hypotheses are dropped if they are worse than the best by more; 0: none are */
    float rerank;         /* weight of log P(source | translation), by which the model, if it has several languages, */
                          /* reranks the beam (noisy channel, Yee et al. 2019, arXiv 1908.05731); 0: none            */
    int32_t source_tag;   /* default of moe_request.source_tag, the language of the sources. -1: unknown; reranking  */
                          /* then takes that under which the source is most probable, given the best translation     */
    float max_len_factor; /* a target has at most max_len_factor * n_source + max_len_offset tokens                  */
    int max_len_offset;
    moe_rules rules;
    int early_stopping;   /* of MOE_RULES_HF. 1: search ends once `beam` hypotheses have finished. 0: once no live  */
                          /* one scores better, at its present length, than the worst of these. The same for beam 1 */
    const char *isa;      /* kernels to use, one of moe_isa_names; NULL: $MOE_ISA, else the best of this machine    */
    const char *device;   /* "cpu", "cuda", "cuda:N"; NULL: $MOE_DEVICE, else a GPU if one can be used              */
    size_t device_memory; /* bytes of GPU memory for the session; 0: all that is free. Experts beyond are fetched    */
    moe_log_fn log;       /* may be NULL                                                                            */
    void *log_user;
    const char *gating; /* kind of gate for every mixture, by name; NULL: the file's. "batchwise" breaks a promise:  */
                        /* a result then depends on the other sentences of its batch                                 */
    int noise;          /* 1: noise on the logits of gates (eq 4), which depends on noise_seed and the tokens so far */
    uint64_t noise_seed;
    moe_routing_fn routing; /* may be NULL */
    void *routing_user;
    moe_attention_fn attention; /* may be NULL */
    void *attention_user;
    moe_trace_fn trace; /* may be NULL */
    void *trace_user;
    int shortlist; /* 1: only the tokens that the model's shortlist has for the source, and those of the request */
    /* r: tokens that the translation, or the prompt before it, has become less probable: logits z become z / r or,
     * where negative, z * r if the beam is 1, else log-probabilities do, and scores are made of these; the
     * log-probabilities of a result stay those of the model. 0: none, or with `sample` the model's; 1: none */
    float repetition_penalty;
    int piece; /* rows of a step for given tokens beside others; 0: 512, with an encoder 32 a sentence, 1024 at most */
    int kv_bits; /* of a kept key or value: 32, 16 (F16) or 8 (Q8 by head); 0: 16, with an encoder 32, no other */
    int context_memory; /* MB of keys and values of all sentences under way, shared where they begin alike; 0: what   */
                        /* they can need. Without room one waits, or begins again, or is refused. Not on a GPU        */
    /* 1: tokens are drawn, by seed, source and place alone, with a beam of 1. Temperature divides logits; of the most
     * probable tokens top_k (0: all) stay, of these as few as reach top_p, then those with min_p of the best one's. */
    int sample, top_k, seed; /* temperature 0: none is drawn but for a moe_request.sampling */
    float temperature, top_p, min_p;
    int stop_loops; /* 1: with a beam of 1 a translation that repeats itself ends there. 1 without an encoder, else 0 */
    /* With moe_model_params.stream: bytes for the experts that are held at a time, the others are read when they are
     * needed; SIZE_MAX: what the machine and the limits of the process leave, less 1 GB. */
    size_t expert_memory;
    const moe_wire *wire; /* of ranks, which share the experts; NULL: alone. Not on a GPU, and not with stream      */
} moe_session_params;

/* Set all parameters to the defaults of the model's file, or else of the library. `size`: sizeof *params. */
void moe_session_params_init(moe_session_params *params, size_t size, const moe_model *model);
static inline moe_session_params moe_session_params_default(const moe_model *model) {
    moe_session_params params;
    moe_session_params_init(&params, sizeof params, model);
    return params;
}
/* Set rules, beam, penalties, pruning and length limit to the values of "paper", "nvidia", "tf", "mlperf", "hf" or
 * "marian", and rerank to 0. Returns 1, or 0 for another name, which changes nothing. */
int moe_session_params_preset(moe_session_params *params, const char *name);
/* A numeric parameter that users may set. Programs, libmoetext and Python have an option for each. */
typedef struct moe_param {
    const char *name;   /* name of the member: "length_penalty" */
    const char *option; /* "length-penalty" */
    const char *values; /* "0 to 100" */
    const char *help;   /* its effect, in one line */
    double least, most;
    int real;     /* 2: a size_t, bytes, 2^64 being SIZE_MAX, "auto"; 1: a float; 0: an int */
    int sampling; /* 1: a detail of sampling, which applies if `sample` is 1 */
} moe_param;
const moe_param *moe_param_at(size_t i); /* NULL after the last */
double moe_param_get(const moe_session_params *params, size_t i);
int moe_param_set(moe_session_params *params, size_t i, double value); /* 1; 0: outside its limits, nothing changed */
/* Make a session. `params` NULL: defaults. A GPU that params->device names must work; if it names none, and none works
 * here, the session uses the processor and logs the reason. Errors: MOE_ERROR_ARGUMENT (names the parameter),
 * MOE_ERROR_MEMORY, MOE_ERROR_UNSUPPORTED (by this machine, build or model), MOE_ERROR_DEVICE. */
moe_status moe_session_new(const moe_model *m, const moe_session_params *params, moe_session **out, moe_error *error);
void moe_session_free(moe_session *session); /* NULL is fine */
/* The bytes of host memory that a session with these parameters would allocate. */
moe_status moe_session_bytes(const moe_model *model, const moe_session_params *params, size_t *out, moe_error *error);
/* The statistics of a session, in the order of the struct's members: kind, name, meaning. New ones come at the end. */
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
    X(SUM, expert_ahead_used, "prefetched experts that were used")

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
    size_t offset; /* in moe_stats: a uint64_t, or const char * if `text` */
    int sum, text; /* sum 1: counted since the session was made; 0: the present value */
} moe_stat;
const moe_stat *moe_stat_at(size_t i);                                                 /* NULL after the last */
void moe_session_stats_sized(const moe_session *session, moe_stats *out, size_t size); /* waits until a GPU is idle */
static inline moe_stats moe_session_stats(const moe_session *session) {
    moe_stats stats;
    moe_session_stats_sized(session, &stats, sizeof stats);
    return stats;
}

const char *moe_isa_names(void);         /* instruction sets of this build's kernels, best last: "portable avx2 ..." */
int moe_isa_available(const char *name); /* 1 if this machine has the instruction set */

/* ---- Translating and scoring --------------------------------------------------------------------------- */

/* Tokens that must appear in the translation, in this order without a gap: where the attention is on the source tokens
 * that they translate (See et al. 2017, arXiv 1704.04368), or where a model without attention finds them probable. */
typedef struct moe_constraint {
    const int32_t *ids;            /* [n_ids] at least one */
    size_t n_ids, first, n_source; /* they translate source tokens first .. first+n_source-1; n_source 0: unknown */
    int once;                      /* 1: they appear nowhere else, if possible */
} moe_constraint;
/* Drops the requests that point to it. Zero at first; only these functions may access it. */
typedef struct moe_drop {
    int set;
} moe_drop;
void moe_request_drop(moe_drop *drop); /* from any thread or signal handler, before or after the request is pulled */
int moe_request_dropped(const moe_drop *drop); /* 1 if it was called; NULL is fine */

/* One sentence. Its ids are pieces of text only: the session adds the tag, begin and end tokens of the model's format.
 * Before the pull function is called, the session presets every field: tags to the session's defaults, force to
 * -1, the rest to 0. `source` and `target` must stay valid until the pull function is called again. */
typedef struct moe_request {
    const int32_t *source; /* [n_source] token ids */
    size_t n_source;
    const int32_t *target; /* [n_target] token ids of a translation to be scored; NULL: translate */
    size_t n_target;
    int32_t force; /* the first token of the translation; the result has it, with log-probability 0. -1: none, or   */
                   /* what the model's format forces (NLLB: the target's tag), which the result does not have       */
    int raw;       /* 1: `source` is the whole input of the encoder, or prompt: the session adds no tag, begin or   */
                   /* end, and the result includes a first token that the model's format forces                     */
    int prefix;    /* 1: `target` is the beginning of the translation, and the search finds the rest. It counts in  */
                   /* scores and lengths, but the length limit always allows one more token                         */
    const moe_constraint *constraints; /* [n_constraints]; no two may share a token; scoring ignores them */
    size_t n_constraints;
    int32_t target_tag; /* the language to translate into, by moe_model_language_tag */
    int32_t source_tag; /* the language of the source, for reranking and for models that read it (NLLB, M2M-100) */
    void *user;         /* handed back with the result */
    /* NULL, or valid until the result: moe_request_drop drops the request with MOE_ERROR_CANCELLED before the next
     * step, on a GPU only if it has not begun. */
    const moe_drop *drop;
    size_t limit; /* most tokens of the translation, end included, where the session allows more; 0: the session's */
    /* NULL, or called with moe_translate's user and this request's, after each step that adds to the beginning that all
     * hypotheses have in common (with a beam of 1 all but what may be a loop): the next ids [n] of it. Not on a GPU. */
    void (*partial)(void *user, void *request, const int32_t *ids, size_t n);
    float repetition_penalty; /* of tokens of this translation, its prompt not counted. 0: the session's for both */
    const moe_session_params *sampling; /* NULL, or its own sample to min_p, as valid as `source`; needs sample 1 */
} moe_request;
typedef struct moe_hypothesis {
    const int32_t *ids;          /* [n_ids] without begin and end                                                  */
    const float *token_logprobs; /* [n_ids + finished] natural logarithms; the end token's comes last              */
    const int32_t *sources;      /* [n_ids] source token with each token's largest attention weight, -1: none;     */
    size_t n_ids;                /* NULL unless max_constraints > 0 and the model can show its attention           */
    float logprob;               /* their sum                                                                      */
    float score;                 /* logprob / length penalty + coverage penalty (GNMT eq 14). Reranking adds       */
                                 /* rerank * reverse / length penalty of the source                                */
    int finished, looped;        /* finished 0: no end token. Cut at the length limit, or, looped 1, by stop_loops */
    float reverse;               /* log P(source | this hypothesis), end included; 0: not reranked, or too long    */
} moe_hypothesis;
typedef struct moe_result {
    void *user;                       /* of the request */
    moe_status status;                /* MOE_OK, or why this request has no hypotheses */
    const char *message;              /* one line if status is not MOE_OK, else "" */
    size_t n_hypotheses;              /* at most nbest, best first; scoring returns exactly one */
    const moe_hypothesis *hypotheses; /* valid during the call only */
} moe_result;

/* What a pull function returns: a request, no more requests, none at the moment, stop and drop all work. */
enum { MOE_PULL_REQUEST = 1, MOE_PULL_END = 0, MOE_PULL_LATER = -1, MOE_PULL_CANCEL = -2 };
/* Gives the next request. With `wait` 0 other requests are under way: return MOE_PULL_LATER rather than block. */
typedef int (*moe_pull_fn)(void *user, int wait, moe_request *request);
/* Receives a result. Requests finish in any order: moe_request.user tells them apart. */
typedef void (*moe_done_fn)(void *user, const moe_result *result);

/* Stop a session, from any thread or a signal handler (it sets a flag): the running call, or else the next one, drops
 * its requests and returns MOE_ERROR_CANCELLED within a few milliseconds, on a GPU after the current step. */
void moe_session_cancel(moe_session *session);
void moe_session_uncancel(moe_session *session); /* forget a cancel that came too late for the last call */

/* Pull requests until MOE_PULL_END, decode them together and hand over each result as soon as it is final. A request
 * that cannot be served (too long, unknown id) has a status of its own. Returns MOE_OK, or a failure that loses the
 * requests under way: MOE_ERROR_CANCELLED, MOE_ERROR_IO or _FORMAT (the file was changed, cannot be read, is damaged),
 * after which the session can be used again; MOE_ERROR_DEVICE or _MEMORY (of a GPU), which every later call returns. */
moe_status moe_translate(moe_session *session, moe_pull_fn pull, moe_done_fn done, void *user, moe_error *error);

/* Translate one sentence, the pieces of text source [n], with the session's defaults. The ids of the best translation
 * are written to out [capacity], and their number to *n_out. Errors: those of moe_translate, the status of the
 * sentence, and MOE_ERROR_LIMIT, which sets *n_out too: to more than `capacity` if `out` is too small and nothing was
 * written; else `out` has an incomplete translation, cut at the length limit or, with stop_loops, where it repeats
 * itself. */
moe_status moe_translate_ids(moe_session *session, const int32_t *source, size_t n, int32_t *out, size_t capacity,
                             size_t *n_out, moe_error *error);

/* Classify inputs [rows, moe_model_width], a batch of the session at a time. The `nbest` most probable classes and
 * their log-probabilities go to classes, logprobs [rows, nbest], best first. Errors: MOE_ERROR_ARGUMENT (it is no
 * classifier), MOE_ERROR_NUMERIC (a result is not-a-number), MOE_ERROR_DEVICE. */
moe_status moe_classify(moe_session *session, const float *inputs, size_t rows, int32_t *classes, float *logprobs,
                        moe_error *error);

/* ---- Writing models ------------------------------------------------------------------------------------ */

/* A model file appears whole or not at all: it is written as ".moe-..." in the same folder, flushed to the disk and
 * renamed. Symbolic links stay links, permissions of a replaced file are kept, only regular files are written. A file
 * beyond RLIMIT_FSIZE is an error, no signal. SIGHUP, SIGINT, SIGTERM with their default action are blocked in the
 * calling thread: what is not whole is removed before they end the process (unless another thread receives them). */

typedef struct moe_meta_entry { /* metadata to write: an integer, a real or a text */
    const char *key;            /* 1 to 255 characters of [a-z0-9._-] */
    moe_meta_kind kind;         /* MOE_META_INT, MOE_META_REAL, MOE_META_TEXT; MOE_META_TEXTS: the lines of `text` */
    int64_t integer;
    double real;
    moe_span text; /* UTF-8 */
} moe_meta_entry;
typedef struct moe_vector_entry { /* an F32 vector to write */
    const char *name;
    const float *data; /* [n] */
    size_t n;
} moe_vector_entry;
typedef struct moe_rows_entry { /* a tensor that keeps some of its rows, numbers or experts as they are */
    const char *name;
    const uint32_t *rows; /* [n] */
    size_t n;
} moe_rows_entry;
typedef struct moe_save_params {
    moe_type type, experts; /* number formats of matrices (gates, thresholds and biases stay F32) and of experts */
    const moe_meta_entry *entries; /* [n_entries] metadata to add or replace; may be NULL */
    size_t n_entries;
    const moe_vector_entry *vectors; /* [n_vectors] vectors to add or replace; may be NULL */
    size_t n_vectors;
    const moe_rows_entry *rows; /* [n_rows] may be NULL */
    size_t n_rows;
} moe_save_params;

/* Write the model to `path` in the number formats of `params`. All metadata are kept, but golden.* and quality.* only
 * if no number changes. A finer type does not restore lost precision. Errors: MOE_ERROR_ARGUMENT (also for a
 * number that the type cannot hold), MOE_ERROR_MEMORY, MOE_ERROR_IO, MOE_ERROR_CANCELLED (by a signal). */
moe_status moe_model_save_sized(const moe_model *model, const char *path, const moe_save_params *params, size_t size,
                                moe_error *error);
static inline moe_status moe_model_save(const moe_model *m, const char *path, const moe_save_params *p, moe_error *e) {
    return moe_model_save_sized(m, path, p, sizeof *p, e);
}

/* A new model file takes memory for its largest matrix or expert. Names, types and shapes are checked; moe_model_open
 * checks that the result is a model. Errors: those of moe_model_save. */
typedef struct moe_tensor_spec {
    const char *name;
    moe_type type;   /* F32 where n_dims is 1 */
    uint32_t n_dims; /* 1: a vector. 2: a matrix [out, in]. 3: experts [experts, hidden, width] */
    uint64_t dims[3];
} moe_tensor_spec;
/* Fill out[cols] with row `row` of tensor number `tensor`; of expert `piece` rows 0 .. hidden-1 are the up matrix, the
 * next `width` rows the down matrix; of a gated one `hidden` rows of the gate come first. Rows come in file order. */
typedef void (*moe_fill_fn)(void *user, size_t tensor, size_t piece, size_t row, float *out, size_t cols);
typedef struct moe_write_params {
    moe_allocator allocator; /* all zero: malloc, realloc, free */
    const moe_meta_entry *entries;
    size_t n_entries;
    const moe_tensor_spec *tensors;
    size_t n_tensors;
    moe_fill_fn fill;
    void *user;
    int gated; /* 1: experts are gated */
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
