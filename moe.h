/* moe.h - inference for Mixture-of-Experts translation models: one header, one C file.
 *
 * Build:   cc -O2 app.c moe.c -lm -pthread
 *
 * The mental model
 *   moe_model    what a model file holds. Immutable after opening, mapped from disk, shared by any number of
 *                threads and sessions. It must outlive its sessions.
 *   moe_session  one mutable timeline: memory plan, threads, decoder state. One per concurrent caller; a
 *                session is not to be used by two threads at once. All of its memory is allocated when it is
 *                made (moe_session_bytes says how much); translating allocates nothing.
 *   moe_request  token ids in; moe_result: token ids, scores and log-probabilities out. Text never enters
 *                the library: tools/text/spm.h turns text into ids and back.
 *
 * Promises
 *   - The same bytes everywhere. Results do not depend on the batch, its order, the number of threads or the
 *     instruction set, bit for bit.
 *   - Never aborts, exits, prints or leaks. Every fallible function returns a moe_status and fills the
 *     caller's moe_error (which may be NULL); outputs are untouched on failure unless stated.
 *   - A model file is untrusted input: every length, offset and product in it is checked before use.
 *
 * The smallest program (README.md has it with text in and out):
 *
 *     static int next(void *user, int wait, moe_request *r) {
 *         static const int32_t pieces[] = { 312, 45, 9 };
 *         int *sent = user; (void)wait;
 *         if ((*sent)++) return MOE_PULL_END;
 *         r->source = pieces; r->n_source = 3;
 *         return MOE_PULL_REQUEST;
 *     }
 *     static void done(void *user, const moe_result *r) {
 *         (void)user;
 *         for (size_t i = 0; r->n_hypotheses && i < r->hypotheses[0].n_ids; i++)
 *             printf("%d ", r->hypotheses[0].ids[i]);
 *     }
 *     int main(void) {
 *         moe_error e; moe_model *m; moe_session *s; int sent = 0;
 *         if (moe_model_open("model.bin", NULL, &m, &e)) return fprintf(stderr, "%s\n", e.message), 1;
 *         moe_session_params p = moe_session_params_default(m);
 *         p.target_tag = moe_model_language_tag(m, "de");
 *         if (moe_session_new(m, &p, &s, &e) || moe_translate(s, next, done, &sent, &e))
 *             return fprintf(stderr, "%s\n", e.message), 1;
 *         moe_session_free(s); moe_model_close(m);
 *     }
 *
 * Shapes are written [rows, cols], row-major. Weights are [out, in]. Sources of formulas: Shazeer et al. 2017
 * (arXiv 1701.06538, "eq n" and "App. X" below), Wu et al. 2016 (arXiv 1609.08144, "GNMT").
 */
#ifndef MOE_H
#define MOE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Version and limits -------------------------------------------------------------------------------- */

#define MOE_VERSION "0.1.0"
#define MOE_FILE_VERSION 1 /* highest model file version that this library reads and the one it writes */

enum {
    MOE_MAX_BEAM = 64,          /* largest beam                                   */
    MOE_MAX_LAYERS = 256,       /* layers on one side of a model                  */
    MOE_MAX_THREADS = 256,      /* threads of one session                         */
    MOE_VERIFY_BYTES = 64 << 20 /* files up to this size are verified when opened */
};

const char *moe_version(void);

/* ---- Status and errors --------------------------------------------------------------------------------- */

typedef enum moe_status {
    MOE_OK = 0,
    MOE_ERROR_ARGUMENT,    /* the caller asked for something impossible                               */
    MOE_ERROR_MEMORY,      /* an allocation failed                                                    */
    MOE_ERROR_IO,          /* the operating system could not open, read, map or write a file          */
    MOE_ERROR_FORMAT,      /* the file is not a model, or is damaged                                  */
    MOE_ERROR_UNSUPPORTED, /* the file or the request needs something this build or machine lacks     */
    MOE_ERROR_LIMIT,       /* a request is longer than the session was made for                       */
    MOE_ERROR_NUMERIC,     /* not-a-number appeared where a log-probability was due: broken weights   */
    MOE_ERROR_CANCELLED,   /* the caller asked to stop, or a signal while a file was written */
    MOE_ERROR_DEVICE       /* the GPU or its driver failed                                            */
} moe_status;

/* What went wrong and where. `where` names the file offset, tensor, metadata key or parameter. */
typedef struct moe_error {
    moe_status code;
    char message[256]; /* one line, no trailing newline, says what to do where there is something to do */
    char where[96];
} moe_error;

const char *moe_status_name(moe_status status); /* "ok", "format", ... never NULL */

/* ---- Memory and log hooks ------------------------------------------------------------------------------ */

/* All three or none. Sizes are exact, so that a hook can count. `allocate` returns memory aligned to 16 bytes
 * or NULL; the hooks may be called from the thread that opens, makes or frees an object only. */
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
    MOE_TYPE_Q8 = 3, /* int8, one float scale per output row; products are exact integers */
    MOE_TYPE_Q4 = 4  /* 4-bit codes times an integer per 32 columns, an int8 again; products are exact integers */
} moe_type;

const char *moe_type_name(moe_type type);            /* "f32", "f16", "bf16", "q8", "q4"; "?" if unknown */
int moe_type_parse(const char *name, moe_type *out); /* 1 and *out set, or 0 */

/* ---- Model --------------------------------------------------------------------------------------------- */

typedef struct moe_model moe_model;

typedef struct moe_model_params {
    moe_allocator allocator; /* all zero: malloc, realloc, free */
    int verify;              /* compare tensors with their checksums: 1 always (reads the whole file), -1 never, 0 if */
                             /* the file has at most MOE_VERIFY_BYTES: that is quick                                  */
    int copy;                /* 1: read the file into memory of its own, in huge pages where the system has them: */
                             /* translates faster, opens slower, shares nothing with other processes             */
} moe_model_params;

/* Map (or copy) and check a model file. `params` may be NULL (defaults).
 * Errors: MOE_ERROR_IO, MOE_ERROR_FORMAT, MOE_ERROR_UNSUPPORTED, MOE_ERROR_MEMORY; *out is untouched then. */
moe_status moe_model_open(const char *path, const moe_model_params *params, moe_model **out, moe_error *error);

/* The same from memory, which is not copied, must be aligned to 64 bytes and must outlive the model. */
moe_status moe_model_open_memory(const void *data, size_t bytes, const moe_model_params *params, moe_model **out,
                                 moe_error *error);

void moe_model_close(moe_model *model); /* NULL is fine */

/* Metadata: typed key-value pairs. Pointers belong to the model. */
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

/* What a model does. Every kind is a list of layers in the file; only what goes in and comes out differs. */
typedef enum moe_model_kind {
    MOE_MODEL_TRANSLATION, /* tokens -> tokens, encoder and decoder with attention: moe_translate           */
    MOE_MODEL_LANGUAGE,    /* the next token from those before it: moe_translate with a target and no source */
    MOE_MODEL_CLASSIFIER   /* numbers -> a class: moe_classify                                               */
} moe_model_kind;

moe_model_kind moe_model_get_kind(const moe_model *model);
size_t moe_model_width(const moe_model *model); /* columns of an embedding, inputs of a classifier */

/* Layers as the file describes them: those of the encoder, of the decoder (a classifier's network), then what attends.
 */
typedef struct moe_layer_info {
    const char *name; /* "encoder.2" */
    const char *kind; /* "lstm", "moe", "attention", "cross", "ffn", "norm", "gnmt-attention" */
    size_t in, out;   /* columns that it reads, context not counted, and makes */
} moe_layer_info;

/* What the metadata key "NAME.key" says of a layer, or its default. */
typedef struct moe_setting {
    const char *key;
    const char *text; /* NULL: a number */
    double number;
} moe_setting;

size_t moe_model_layer_count(const moe_model *model);
moe_layer_info moe_model_layer(const moe_model *model, size_t index);                /* all zero if out of range */
moe_setting moe_model_layer_setting(const moe_model *model, size_t index, size_t i); /* key NULL behind the last */

/* Gates: which experts a row goes to and with which weights. Of the logits l [n] of one level, p = softmax(l):
 *   softmax     every expert, weight p_i                                                           (eq 2, 15)
 *   topk        the k largest, softmax over them                                                   (eq 3, 16, 17)
 *   threshold   { i : p_i > T_i }, softmax over them                                               (eq 16, 19)
 *   batchwise   for every expert the k * rows / n rows with its largest p: rows see their neighbours (eq 16, 18) */
typedef enum moe_gate { MOE_GATE_SOFTMAX, MOE_GATE_TOPK, MOE_GATE_THRESHOLD, MOE_GATE_BATCHWISE } moe_gate;

const char *moe_gate_name(moe_gate gate);            /* "softmax", ... "?" if unknown */
int moe_gate_parse(const char *name, moe_gate *out); /* 1 and *out set, or 0 */

/* The mixtures of a model, encoder first. With two levels (App. B) a gate over the groups comes before those inside
 * them. */
typedef struct moe_mixture {
    const char *layer;      /* "encoder.2" */
    size_t experts, groups; /* in all; 0 groups: one level */
    moe_gate gate, parent_gate;
    size_t k, parent_k; /* wanted of a group's (or all) experts, of the groups; 0 where a softmax takes all */
    size_t hidden;      /* units of an expert */
    int noise;          /* 1: the file has W_noise of eq 4 */
} moe_mixture;

size_t moe_model_mixture_count(const moe_model *model);
moe_mixture moe_model_mixture(const moe_model *model, size_t index); /* all zero if out of range */

size_t moe_model_meta_count(const moe_model *model);
moe_span moe_model_meta_key(const moe_model *model, size_t index);
moe_meta_kind moe_model_meta_kind(const moe_model *model, size_t index);
size_t moe_model_meta_length(const moe_model *model, size_t index); /* 1 for a scalar, elements for a list */
/* Index of a key, or -1. */
ptrdiff_t moe_model_meta_find(const moe_model *model, const char *key);
/* Element `i` of entry `index`; 0 or an empty span where kind or range do not fit. INT reads as REAL too. */
int64_t moe_model_meta_int(const moe_model *model, size_t index, size_t i);
double moe_model_meta_real(const moe_model *model, size_t index, size_t i);
moe_span moe_model_meta_text(const moe_model *model, size_t index, size_t i); /* TEXT, TEXTS and BYTES */
/* The first `n` texts of a TEXTS entry in one walk (moe_model_meta_text walks to each); returns how many there were. */
size_t moe_model_meta_texts(const moe_model *model, size_t index, moe_span *out, size_t n);

/* One entry to be written: an integer, a real or a text. */
typedef struct moe_meta_entry {
    const char *key;    /* 1 to 255 of [a-z0-9._-] */
    moe_meta_kind kind; /* MOE_META_INT, MOE_META_REAL or MOE_META_TEXT */
    int64_t integer;
    double real;
    moe_span text; /* UTF-8 */
} moe_meta_entry;

/* A vector to be written, F32. */
typedef struct moe_vector_entry {
    const char *name;
    const float *data; /* [n] */
    size_t n;
} moe_vector_entry;

typedef struct moe_save_params {
    moe_type type;                 /* matrices; gates, thresholds and biases stay F32 */
    moe_type experts;              /* experts */
    const moe_meta_entry *entries; /* [n_entries] metadata to add or replace; may be NULL */
    size_t n_entries;
    const moe_vector_entry *vectors; /* [n_vectors] vectors to add or replace; may be NULL */
    size_t n_vectors;
} moe_save_params;

/* Write the model to `path`, perhaps in other number formats. The file appears whole under its name or not at all, see
 * moe_output below; what is no regular file is refused.
 * Metadata are kept, but for golden.* and quality.* when a type or a vector changes: they belong to one set of numbers.
 * Going from a coarse type to a finer one is allowed but gains nothing back. Errors: MOE_ERROR_ARGUMENT (also a number
 * that the type cannot hold), MOE_ERROR_MEMORY, MOE_ERROR_IO, MOE_ERROR_CANCELLED (by a signal). */
moe_status moe_model_save(const moe_model *model, const char *path, const moe_save_params *params, moe_error *error);

/* A model file from nothing, in the memory of its largest matrix or expert: for converters and benchmarks. Nothing but
 * names, types and shapes is checked; moe_model_open says whether the result is a model. */
typedef struct moe_tensor_spec {
    const char *name;
    moe_type type;   /* F32 where n_dims is 1 */
    uint32_t n_dims; /* 1 a vector, 2 a matrix [out, in], 3 experts [experts, hidden, width] */
    uint64_t dims[3];
} moe_tensor_spec;

/* Fill out[cols] with row `row` of a tensor. Of experts, `piece` is the expert, rows 0 .. hidden-1 are its up matrix
 * and the following `width` rows its down matrix. Rows come in the order of the file, each once. */
typedef void (*moe_fill_fn)(void *user, size_t tensor, size_t piece, size_t row, float *out, size_t cols);

typedef struct moe_write_params {
    moe_allocator allocator; /* all zero: malloc, realloc, free */
    const moe_meta_entry *entries;
    size_t n_entries;
    const moe_tensor_spec *tensors;
    size_t n_tensors;
    moe_fill_fn fill;
    void *user;
} moe_write_params;

moe_status moe_model_write(const char *path, const moe_write_params *params, moe_error *error);

/* A file of any kind, written as the models are. A new or a regular file grows under a name of its own in the same
 * folder, ".moe-...", reaches the disk and takes its name at the end: it is there whole or not at all, other writers of
 * the same name do no harm, a symbolic link stays one, and a file that is replaced passes on its permissions. What is
 * no regular file (a device, a pipe) is written as what it is. Beyond RLIMIT_FSIZE is an error, not a signal. SIGHUP,
 * SIGINT and SIGTERM, where they have their default action, are held back in the calling thread until the file is
 * closed; a write notices them (MOE_ERROR_CANCELLED), and they end the process when nothing is left of the file, unless
 * another thread takes them. So open, write and close in one thread. Errors: MOE_ERROR_IO, MOE_ERROR_MEMORY,
 * MOE_ERROR_CANCELLED. */
typedef struct moe_output moe_output;

moe_status moe_output_open(const char *path, const moe_allocator *allocator, moe_output **out, moe_error *error);
moe_status moe_output_write(moe_output *output, const void *data, size_t bytes, moe_error *error);
/* keep 0: nothing is left of it. Frees `output` in any case; NULL is fine. */
moe_status moe_output_close(moe_output *output, int keep, moe_error *error);
/* The name under which it grows, for signal handlers, which may unlink it; NULL: its own. */
const char *moe_output_temporary(const moe_output *output);

/* Tensors as the file's directory lists them. */
typedef struct moe_tensor_info {
    moe_span name;
    moe_type type;
    uint32_t n_dims;
    uint64_t dims[4]; /* [out, in]; experts: [experts, hidden, width], each slab holds up [hidden, width] */
                      /* and down [width, hidden]                                                         */
    int experts;      /* 1: a row of expert slabs, each aligned to 4096 bytes */
    uint64_t offset;  /* from the start of the file */
    uint64_t bytes;
    uint64_t parameters; /* numbers that were trained, padding not counted */
    uint32_t checksum;   /* CRC-32 (IEEE) of the bytes */
} moe_tensor_info;

size_t moe_model_tensor_count(const moe_model *model);
moe_tensor_info moe_model_tensor(const moe_model *model, size_t index); /* all zero if out of range */

uint64_t moe_model_file_bytes(const moe_model *model);
uint32_t moe_model_file_version(const moe_model *model);
int32_t moe_model_vocabulary(const moe_model *model); /* token ids are 0 .. vocabulary-1 */
size_t moe_model_language_count(const moe_model *model);
moe_span moe_model_language(const moe_model *model, size_t i); /* "en" */
/* Token id of a target language's tag; -1 if the model does not know the language. */
int32_t moe_model_language_tag(const moe_model *model, const char *code);

/* ---- Session ------------------------------------------------------------------------------------------- */

typedef struct moe_session moe_session;

/* Sees the output of every graph node after it ran: rows x cols floats, row r begins at data + r * stride.
 * `name` is the node's (for instance "encoder.2.gate", "decoder.logits"). Gates are shown dense, [rows, experts] with 0
 * where an expert is not selected, and after "encoder.2.gate" come "encoder.2.gate.probabilities", the softmax before
 * the mask (0 in groups that were not selected). Slow; for tests and analysis. */
typedef void (*moe_trace_fn)(void *user, const char *name, const float *data, size_t rows, size_t cols, size_t stride);

/* Where one token went in one mixture. */
typedef struct moe_routing {
    void *user;        /* the request's */
    const char *layer; /* "encoder.2" */
    size_t position;   /* of the token: in the source with tag and end; in the target, 0 reads the begin token; a row */
    int32_t token;     /* that the position reads; -1 in a classifier */
    int empty;         /* 1: a mask selected nothing and the model's policy stepped in */
    size_t n;          /* experts */
    const uint32_t *experts; /* [n] ascending */
    const float *weights;    /* [n] */
} moe_routing;

/* Called for every token and mixture while requests are under way. A beam shows the rows of all its hypotheses; to see
 * those of one translation, score it: they are the same bytes. */
typedef void (*moe_routing_fn)(void *user, const moe_routing *routing);

/* Where the decoder looked for one token: the attention's weights, of which the whole row adds up to 1. */
typedef struct moe_attention {
    void *user;           /* the request's */
    size_t position;      /* of the token in the target; the end token's is behind the last one */
    size_t n;             /* n_source */
    const float *weights; /* [n] on the request's own tokens: what the session adds to them has the rest */
} moe_attention;

/* Called for every token while requests are under way, as moe_routing_fn is. */
typedef void (*moe_attention_fn)(void *user, const moe_attention *attention);

/* How a beam is searched. The last three are those of engines whose checkpoints this one reads, quirks included. They
 * keep `beam` hypotheses side by side, finished ones among them, until all have finished or the length limit is
 * reached; a cut hypothesis competes with the finished ones, and pruning is not known. Each looks at its own sentence
 * only. */
typedef enum moe_rules {
    MOE_RULES_PAPER = 0, /* GNMT section 7: finished hypotheses leave the beam; lengths count the end token */
    MOE_RULES_NVIDIA, /* NVIDIA's PyTorch GNMT: penalties when all have finished (at the length limit: none), lengths */
    /* count begin and end, coverage stays with the place in the beam when hypotheses change places  */
    MOE_RULES_TF, /* tensorflow/nmt: the beam is ordered by normalised score at every step; the end is not counted; */
                  /* no coverage penalty                                                                           */
    MOE_RULES_MLPERF, /* the same with later versions of TensorFlow 1: the end counts from the step after it */
    MOE_RULES_HF /* Hugging Face's transformers: as the paper's, but what the limit cuts competes with what has ended
                  */
} moe_rules;

typedef struct moe_session_params {
    int threads;            /* threads that compute, the caller's included; 0: one per processor           */
    int batch;              /* sentences decoded at once                                                    */
    int batch_tokens;       /* source tokens of the sentences decoded at once, about; 0: 64 a sentence      */
    int max_source;         /* longest source in tokens, tag and end included                               */
    int max_target;         /* longest target in tokens, end included                                       */
    int min_target;         /* tokens before the end that a translation has at least; 0: it may be empty    */
    int32_t target_tag;     /* default language tag of requests; -1: none                                   */
    int beam;               /* 1: greedy                                                                    */
    int nbest;              /* hypotheses returned, at most `beam`                                          */
    float length_penalty;   /* alpha of GNMT eq 14; 0: none                                                 */
    float length_constant;  /* the 5 in (5 + |Y|)^alpha / 6^alpha                                           */
    float coverage_penalty; /* beta of GNMT eq 14; 0: none                                                  */
    float prune;            /* log-probability margin of GNMT section 7, used per step and on finished      */
                            /* hypotheses; 0: no pruning                                                    */
    float rerank;       /* weight of log P(source | translation) in the score, by the same model (the noisy channel, */
                        /* Yee et al. 2019, arXiv 1908.05731): each of the beam's hypotheses is scored in that  */
                        /* direction before the best is chosen; 0: none. For models of several languages. With a beam */
                        /* of 1 there is nothing to choose and this has no effect                       */
    int32_t source_tag; /* for that, default tag of the language that sources are in; -1: it is the one under */
                        /* which the source is most probable, given the best translation before that    */
    float max_len_factor; /* a target ends after max_len_factor * pieces + max_len_offset tokens          */
    int max_len_offset;
    moe_rules rules;
    int early_stopping; /* MOE_RULES_HF: 1: search ends when `beam` hypotheses have finished, else when no other can  */
                        /* be better any more                                                         */
    const char *isa;    /* kernels to use, see moe_isa_names; NULL: $MOE_ISA, else the best here        */
    const char *device; /* "cpu", "cuda", "cuda:N"; NULL: $MOE_DEVICE, else a GPU where one can be used */
    size_t device_memory; /* bytes of GPU memory the session may take; 0: whatever is free. Experts that  */
                          /* do not fit stay in host memory and are fetched when a token goes to them     */
    moe_log_fn log;       /* may be NULL */
    void *log_user;
    const char
        *gating; /* NULL: the file's gates. "softmax", "topk", "threshold", "batchwise": this kind in every mixture, */
                 /* of which "batchwise" breaks the promise: a result depends on what shares its batch */
    int noise;   /* 1: noise on the logits of gates (eq 4), drawn from noise_seed and the tokens so far alone */
    uint64_t noise_seed;
    moe_routing_fn routing; /* may be NULL */
    void *routing_user;
    moe_attention_fn attention; /* may be NULL */
    void *attention_user;
    moe_trace_fn trace; /* may be NULL */
    void *trace_user;
} moe_session_params;

/* The model's own decode defaults where its file states them. */
moe_session_params moe_session_params_default(const moe_model *model);

/* Set rules, beam, penalties, pruning and length limit to those of "paper", "nvidia", "tf" or "mlperf", none of which
 * reranks: 1, or 0 and nothing is changed if the name is another. */
int moe_session_params_preset(moe_session_params *params, const char *name);
const char *moe_rules_name(moe_rules rules); /* "paper", ... "?" if unknown */

/* `params` NULL: defaults. A GPU that was asked for by name is used or is an error; without a name the processor takes
 * over where there is no GPU or it fails here, and the log says why. Errors: MOE_ERROR_ARGUMENT (names the parameter),
 * MOE_ERROR_MEMORY, MOE_ERROR_UNSUPPORTED (this machine or build lacks the instruction set or device asked for),
 * MOE_ERROR_DEVICE. */
moe_status moe_session_new(const moe_model *model, const moe_session_params *params, moe_session **out,
                           moe_error *error);
void moe_session_free(moe_session *session); /* NULL is fine */

/* Bytes that a session with these parameters allocates, computed without allocating them. On a GPU: those of the host.
 */
moe_status moe_session_bytes(const moe_model *model, const moe_session_params *params, size_t *out, moe_error *error);

typedef struct moe_stats {
    uint64_t sentences;             /* requests; what reranking asks of the model is among the steps and rows only */
    uint64_t source_tokens;         /* tag and end included                                  */
    uint64_t target_tokens;         /* of the best hypotheses, end included                  */
    uint64_t steps;                 /* decoder steps                                         */
    uint64_t rows;                  /* hypotheses advanced over all steps                    */
    uint64_t bytes;                 /* memory of the session                                 */
    const char *isa;                /* kernels in use                                        */
    const char *device;             /* "cpu", or the GPU: "cuda:0 NVIDIA H200"               */
    uint64_t device_bytes;          /* memory of the GPU that the session holds              */
    uint64_t expert_pairs;          /* (row, expert) pairs that expert layers computed       */
    uint64_t expert_visits;         /* experts that had a row, over all runs of such a layer; */
                                    /* rows that do not fit at once run one chunk after the other */
    uint64_t experts, experts_held; /* GPU: of all layers, those that are in its memory at a time */
    uint64_t expert_hits;           /* GPU that does not hold all: visits of experts that were there... */
    uint64_t expert_fetches;        /* ...and of those that had to be fetched from host memory          */
    uint64_t expert_fetch_bytes;
} moe_stats;

/* On a GPU this waits for it. */
moe_stats moe_session_stats(const moe_session *session);

/* ---- Translating and scoring --------------------------------------------------------------------------- */

/* The session adds tag, begin and end as the model's format wants them: ids are pieces only. */
typedef struct moe_request {
    const int32_t *source; /* [n_source] token ids; must stay valid until the pull function is called again */
    size_t n_source;
    const int32_t *target; /* NULL: translate. Else [n_target]: compute its log-probability instead */
    size_t n_target;
    int32_t force;      /* the first token of the translation, which costs nothing; preset to -1: none, or what the */
                        /* model's format has there, which the result then leaves out */
    int raw;            /* 1: `source` is all that the encoder reads: no tag, begin or end is added */
    int prefix;         /* 1: `target` is how translations begin, and the search finds how they go on; what it costs */
                        /* counts. Limits on length include it and leave room for one more token at least */
    int32_t target_tag; /* preset to the session's */
    int32_t source_tag; /* the same; of use with reranking only */
    void *user;         /* handed back with the result */
} moe_request;

typedef struct moe_hypothesis {
    const int32_t *ids;          /* [n_ids] without begin and end */
    const float *token_logprobs; /* [n_ids + finished] natural logarithms; the end token's comes last */
    size_t n_ids;
    float logprob; /* their sum */
    float score;   /* logprob / length penalty + coverage penalty (GNMT eq 14); reranked: + rerank * reverse */
                   /* over the length penalty of the source */
    int finished;  /* 0: cut at the length limit, no end token */
    float reverse; /* log P(source | this), end included, where it was reranked; else 0. It is not where the */
                   /* session's limits leave no room for the source as a target, or for one of the */
                   /* hypotheses as a source: then the order is that of the search alone */
} moe_hypothesis;

typedef struct moe_result {
    void *user;
    moe_status status;                /* MOE_OK, or why this request has no hypotheses; the others go on */
    const char *message;              /* one line where status is not MOE_OK, else "" */
    size_t n_hypotheses;              /* best first; scoring returns exactly one */
    const moe_hypothesis *hypotheses; /* valid during the call only */
} moe_result;

enum { MOE_PULL_REQUEST = 1, MOE_PULL_END = 0, MOE_PULL_LATER = -1, MOE_PULL_CANCEL = -2 };

/* Gives the next request. `wait` 0: work is under way, so answer MOE_PULL_LATER rather than block. */
typedef int (*moe_pull_fn)(void *user, int wait, moe_request *request);

/* Takes a finished request. Order is that of finishing, not of pulling. */
typedef void (*moe_done_fn)(void *user, const moe_result *result);

/* End the call of this session that is running, or else its next one: before its next step it returns
 * MOE_ERROR_CANCELLED, and what was under way is dropped. For other threads and for signal handlers. */
void moe_session_cancel(moe_session *session);

/* Pull requests until MOE_PULL_END, decode them together, hand over each as soon as it is final.
 * A request that cannot be served (too long, unknown id) is handed over with its own status; the return value
 * is about the session: MOE_OK, MOE_ERROR_CANCELLED, MOE_ERROR_DEVICE, MOE_ERROR_MEMORY (of a GPU). After the first two
 * the session can be used again; after a failure of the GPU what was under way is lost and every call fails in the same
 * way. */
moe_status moe_translate(moe_session *session, moe_pull_fn pull, moe_done_fn done, void *user, moe_error *error);

/* Classify `rows` rows of inputs [rows, moe_model_width] with a classifier: the session's `nbest` most probable classes
 * of each, best first, into classes [rows, nbest] and their log-probabilities into logprobs [rows, nbest]. In portions
 * of the session's batch. Errors: MOE_ERROR_ARGUMENT (another kind of model), MOE_ERROR_NUMERIC (a row gave
 * not-a-number), MOE_ERROR_DEVICE. */
moe_status moe_classify(moe_session *session, const float *inputs, size_t rows, int32_t *classes, float *logprobs,
                        moe_error *error);

/* ---- Instruction sets ---------------------------------------------------------------------------------- */

/* "portable avx2 ...": the kernel sets in this build, best last, separated by spaces. */
const char *moe_isa_names(void);
/* 1 if this machine can run the set. */
int moe_isa_available(const char *name);

#ifdef __cplusplus
}
#endif
#endif /* MOE_H */
