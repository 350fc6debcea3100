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
    MOE_MAX_BEAM = 64,    /* largest beam                                   */
    MOE_MAX_LAYERS = 64,  /* layers on one side of a model                  */
    MOE_MAX_THREADS = 256 /* threads of one session                         */
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
    MOE_ERROR_CANCELLED,   /* the caller's pull function asked to stop, or a signal while a file was written */
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
    int verify;              /* 1: read every tensor and compare its checksum (reads the whole file) */
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
    MOE_RULES_MLPERF /* the same with later versions of TensorFlow 1: the end counts from the step after it           */
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
    const char *isa;      /* kernels to use, see moe_isa_names; NULL: $MOE_ISA, else the best here        */
    const char *device;   /* "cpu", "cuda", "cuda:N"; NULL: $MOE_DEVICE, else a GPU where one can be used */
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

/* ---- Backends (for moe-cuda.cu and tests; not for applications) ---------------------------------------- *
 * What a session tells a device about its two graphs, in plain structs. The session plans; the device owns two blocks
 * whose addresses the plan is made of (states and activations), the weights, and its own scratch. Every row of a tensor
 * is computed from the same row of its inputs, so a device may run any rows together.
 *
 * Order of calls: count, open, allocate (states, activations), bind, run..., close. For translations and scores the
 * device searches as well: run is for the encoder, then come begin... and step; only ids go up, and what is done comes
 * down. */

typedef enum moe_op {
    MOE_OP_INPUT,    /* rows of the frame's inputs                             */
    MOE_OP_EMBED,    /* ids -> rows of an embedding, times scale               */
    MOE_OP_QUANTISE, /* rows -> int8 codes and a scale per row                 */
    MOE_OP_LINEAR,   /* x -> w x + bias, or w x + another tensor               */
    MOE_OP_ADD,
    MOE_OP_CONCAT,
    MOE_OP_UNARY,      /* sigmoid, tanh                                          */
    MOE_OP_VIEW,       /* some columns of another tensor, no work                */
    MOE_OP_GATHER,     /* state -> rows of the parents, zero for a new sentence  */
    MOE_OP_STORE,      /* rows -> state or, in the encoder, attention memory     */
    MOE_OP_LSTM_STEP,  /* x, r, c -> [h | c]: the products with both matrices and the cell */
    MOE_OP_LSTM_LAYER, /* input products of packed sentences -> outputs         */
    MOE_OP_ATTENTION,  /* projected query -> context                             */
    MOE_OP_GATE,       /* logits, or features and a gate over groups, -> selections */
    MOE_OP_EXPERTS,    /* x, selections -> sum of weighted expert outputs        */
    MOE_OP_MIX,        /* outputs of all experts side by side, selections -> the same sum */
    MOE_OP_OUTPUT,     /* logits, best tokens and their log-probabilities        */
    MOE_OP_COUNT
} moe_op;

typedef enum moe_unary { MOE_UNARY_SIGMOID, MOE_UNARY_TANH } moe_unary;

/* A row of selections, as MOE_OP_GATE makes it, is `stride` words of 32 bits: how many experts, 1 if a mask was empty,
 * then uint32 experts [capacity] ascending and float weights [capacity]. */

/* A weight matrix [rows, cols] = [out, in] where its bytes lie; room 4 of moe.c says how. */
typedef struct moe_matrix {
    moe_type type;
    size_t rows, cols;
    size_t cols_padded;  /* Q8, Q4: multiple of 64; else cols */
    const void *data;    /* Q8, Q4: the codes */
    const int8_t *subs;  /* Q4 */
    const float *scales; /* Q8, Q4: [rows padded to 16] */
} moe_matrix;

enum { MOE_OUTPUT_CHUNK = 1024 }; /* the softmax over the vocabulary is joined from chunks of so many tokens */

/* A node of a graph and the tensor that it makes. Weights are in host memory, everything that the session placed (data,
 * scales, state, keys, values) in the device's. */
typedef struct moe_node {
    moe_op op;
    const char *name;
    const struct moe_node *src[3];
    size_t cols;              /* numbers in a row                                                        */
    size_t stride;            /* from row to row: numbers, of codes bytes; 0: the rows need not be there */
    void *data;               /* [rows, stride]                                                          */
    float *scales;            /* quantise: [rows]                                                        */
    const moe_matrix *matrix; /* embed, linear, output; lstm_step: of x                                  */
    const float *bias;        /* linear, lstm_step, output: [rows of the matrix] or NULL                 */
    int add;                  /* linear: src[1] is added instead of a bias                               */
    int relu;                 /* linear; gate over the experts of groups: of its logits                  */
    float factor;             /* embed: scale; lstm_*: forget bias; experts: scale                       */
    moe_unary unary;
    float *state;                   /* gather, store: [rows, cols] without gaps                                */
    size_t hidden;                  /* lstm_*: H; experts: hidden units; mix: columns of an expert             */
    const moe_matrix *w_r, *w_proj; /* lstm_*: of r; lstm_layer: w_proj, NULL without projection           */
    int backward;                   /* lstm_layer                                                              */
    float *last_r, *last_c;         /* lstm_layer: [slots, P], [slots, H] states after every sentence, or NULL */
    size_t experts;                 /* gate, experts, mix: in all                                              */
    size_t level, k;                /* gate: so many compete, so many are wanted                               */
    size_t capacity;                /* gate: experts that a row can select                                     */
    moe_gate gate;                  /* gate: its kind                                                          */
    int grouped;                    /* gate: src[0] are features, src[1] selections of groups of `level` experts; the */
    /* logits of a selected group are its rows of `matrix` (F32) times features, plus `bias` */
    int empty_zero;         /* gate: nothing is selected where the mask is empty, else the best one    */
    const float *threshold; /* gate: [experts]                                                         */
    moe_matrix up, down;    /* experts: of expert 0; the others follow every slab_stride bytes         */
    size_t slab_stride;
    int product, start_zero;    /* attention: Appendix G instead of additive; the first context is zero    */
    const float *v;             /* attention: [src[0]->cols]                                               */
    const float *keys, *values; /* attention: [tokens, src[0]->cols], [tokens, cols]                      */
    const int32_t *never;       /* output: tokens that are never generated                                 */
    size_t n_never;
    int32_t eos;
} moe_node;

/* What differs from run to run. All of it is in host memory. */
typedef struct moe_frame {
    size_t rows;
    const int32_t *ids;   /* [rows] */
    const float *inputs;  /* [rows, columns of the input] */
    const uint64_t *keys; /* [rows] what the noise of a row is drawn from */
    /* encoder: sentences sorted by falling length, packed by time step */
    size_t steps;              /* longest sentence */
    const size_t *live;        /* [steps] sentences that reach step t */
    const size_t *first;       /* [steps] row of the first of them */
    const size_t *destination; /* [rows] row in the attention memory */
    const size_t *sentence;    /* [live[0]] slot of each */
    /* decoder, where the processor searches; classifiers have want, top_ids and top_logprobs of it */
    const int32_t *parents;         /* [rows] row of the step before; -1, or a row past the graph's: sentence begins */
    const size_t *segment, *length; /* [rows] source sentence in the attention memory */
    float *attention; /* [rows, max_source] weights, or NULL if nobody needs them; a device's stay there */
    size_t attention_stride;
    const int32_t *want; /* [rows] token to score, -1: give the best ones */
    float *want_logprob; /* [rows] */
    const char *hold;    /* [rows] 1: the translation is too short to end here; NULL: none is */
    int32_t *top_ids;    /* [rows, top], best first, ties by lower id */
    float *top_logprobs; /* [rows, top]; NaN in a broken row */
} moe_frame;

typedef struct moe_device_graph {
    const moe_node *nodes; /* in the order in which they run */
    size_t count;
    size_t rows; /* capacity */
    size_t sentences, max_source, top;
} moe_device_graph;

typedef struct moe_device moe_device;
typedef struct moe_search moe_search; /* these two: the next section */
typedef struct moe_slot moe_slot;

/* What a step of a device that searches came to. */
typedef struct moe_device_results {
    size_t rows;            /* hypotheses that it advanced */
    size_t done;            /* sentences that are done, in the order of their slots; valid until the next step: */
    const int32_t *results; /* each: slot, hypotheses (0: broken); each of them: n_ids, finished, logprob and score */
                            /* (floats), ids [n_ids], logprobs [n_ids + finished] (floats) */
} moe_device_results;

typedef struct moe_device_params {
    moe_allocator allocator; /* for host memory */
    int index;               /* which of the devices */
    size_t memory;  /* bytes that may be taken; 0: whatever is free. Experts that do not fit are fetched as needed */
    moe_log_fn log; /* may be NULL */
    void *log_user;
} moe_device_params;

typedef struct moe_device_api {
    const char *name; /* "cuda" */
    /* Devices here; where there are none, `error` says why. */
    int (*count)(moe_error *error);
    moe_status (*open)(const moe_device_params *params, moe_device **out, moe_error *error);
    /* Device memory, zeroed, that lives as long as the device. NULL, and no error, where params->memory is too little:
     * bind, which knows how much is needed in all, then fails. */
    moe_status (*allocate)(moe_device *device, size_t bytes, const char *what, void **out, moe_error *error);
    /* Take the graphs (encoder, decoder), which stay where they are, as their weights do: upload these, allocate
     * everything else. With `search` (copied) the device searches, a slot for each of the decoder's sentences; NULL:
     * run is given its frames. */
    moe_status (*bind)(moe_device *device, const moe_device_graph graphs[2], const moe_search *search,
                       moe_error *error);
    /* Run graph `which` and fill what the frame names. With a trace every tensor is shown, slowly. */
    moe_status (*run)(moe_device *device, int which, const moe_frame *frame, moe_trace_fn trace, void *trace_user,
                      moe_error *error);
    /* A sentence takes slot `at`, where none is under way: segment, length, limit, scoring and n_target of `slot`, and
     * its target, are copied and go up with the next step. */
    void (*begin)(moe_device *device, size_t at, const moe_slot *slot, const int32_t *target);
    void (*forget)(moe_device *device); /* all sentences */
    /* A decoder step for every sentence under way, of which there is at least one. */
    moe_status (*step)(moe_device *device, moe_trace_fn trace, void *trace_user, moe_device_results *out,
                       moe_error *error);
    const char *(*describe)(const moe_device *device, uint64_t *bytes); /* "cuda:0 NVIDIA H200", memory held */
    /* Fill in the fields of moe_stats that begin with expert; what the device itself counts is 0 after a failure. */
    void (*stats)(moe_device *device, moe_stats *stats);
    void (*close)(moe_device *device); /* NULL is fine */
} moe_device_api;

const moe_device_api *moe_cuda(void); /* in moe-cuda.cu */

#ifdef __cplusplus
}
#endif
#endif /* MOE_H */

/* ---- The search, one definition for the processor and for devices (not for applications) ---------------- *
 * A file that declares moe_expf and moe_logf, defines MOE_SEARCH (what goes before a function: static inline) and then
 * includes this header gets the beam search of a sentence: moe.c in room 20, moe-cuda.cu for its kernels. It is written
 * in what C11 and C++17 have in common, and every product and sum is rounded by itself.
 *
 * Invariant: what happens to a sentence depends on its own rows only, and ties are broken by rank, so that any batch
 * gives the same result.
 *
 * A step: the candidates of all live hypotheses in falling order of accumulated log-probability (ties: better-ranked
 * hypothesis, then better token). Walking down, an end token among the first `beam` candidates finishes a hypothesis,
 * other tokens go on until `beam` are live. Candidates worse than the best one by more than the pruning margin are not
 * looked at; finished ones worse than the best finished score by more than it are dropped (GNMT section 7). The
 * sentence is done when `beam` hypotheses have finished, none is live, the length limit is reached (the live ones are
 * then kept as unfinished, behind all finished ones), or nbest have finished and no live one can still beat the best.
 *
 * Where the beginning of the translation is given, one hypothesis follows it first, and the steps are counted.
 *
 * That is MOE_RULES_PAPER, moe_search_step. The other rules (above: which they are) keep finished hypotheses in the
 * beam and share moe_beam_step; what tells them apart is in moe_rank and moe_score. */
#if defined(MOE_SEARCH) && !defined(MOE_SEARCH_IS_DEFINED)
#define MOE_SEARCH_IS_DEFINED
#include <float.h>

typedef struct moe_token {
    int32_t id, parent; /* parent: index of the token before, -1 at the beginning */
    float logprob;
} moe_token;

typedef struct moe_live {
    float logprob;
    int32_t last; /* index of its last token, -1 at the beginning */
    size_t row;   /* in the step at hand; before the first one SIZE_MAX */
    /* moe_beam_step only */
    float rank;    /* what the beam is ordered by */
    float latest;  /* log-probability of its last token, the end counted */
    int32_t id;    /* that token */
    int ended;     /* it has its end token and no row any more */
    size_t tokens; /* without the end token */
} moe_live;

typedef struct moe_finished {
    float logprob, score, end_logprob;
    int32_t last;
    size_t tokens; /* without the end token */
    size_t order;
    int finished;
} moe_finished;

/* What all sentences of a session have in common. */
struct moe_search {
    int beam, nbest;
    float alpha, constant, beta, prune;
    moe_rules rules;
    int32_t bos, eos;
    size_t min_target, max_target;
    int from_encoder; /* states of a sentence begin with what the encoder left for its slot */
};

/* One sentence under translation. Where a device searches, the session has one as well, without hypotheses. */
struct moe_slot {
    int active;
    void *user;
    uint64_t key;           /* of its source, for noise */
    size_t segment, length; /* its tokens in the attention memory */
    size_t limit;           /* longest target, end included */
    size_t steps;           /* decoder steps made */
    moe_token *tokens;      /* [max_target * beam] */
    size_t n_tokens;
    moe_live *live; /* [beam] best first */
    size_t n_live;
    moe_finished *finished; /* [2 * beam] */
    size_t n_finished, n_ended;
    int32_t *target; /* [max_target] to be scored or, without scoring, to begin with */
    size_t n_target;
    int scoring;
    int broken; /* not-a-number turned up */
};

/* What a live hypothesis asks of the decoder. */
typedef struct moe_row {
    int32_t id, parent;
    int32_t want; /* the token to score, -1: the best ones */
    int hold;     /* too short to end here */
} moe_row;

/* What the decoder answered, by row. */
typedef struct moe_answer {
    size_t top;
    const int32_t *top_ids;                   /* [rows, top], best first */
    const float *top_logprobs, *want_logprob; /* [rows, top], [rows] */
    const float *coverage; /* [rows, stride], NVIDIA's by place: [slots, beam, stride]; NULL: no penalty */
    size_t stride;
} moe_answer;

/* A slot whose segment, length, limit and target are set begins. */
MOE_SEARCH void moe_slot_begin(moe_slot *slot) {
    const moe_live first = { 0.0f, -1, SIZE_MAX, 0.0f, 0.0f, 0, 0, 0 };
    slot->active = 1;
    slot->steps = slot->n_tokens = slot->n_finished = slot->n_ended = 0;
    slot->broken = 0;
    slot->live[0] = first;
    slot->n_live = 1;
}

/* Rows of the next step. */
MOE_SEARCH size_t moe_slot_rows(const moe_slot *slot) {
    size_t rows = 0;
    for (size_t h = 0; slot->active && h < slot->n_live; h++) rows += (size_t)!slot->live[h].ended;
    return rows;
}

/* `first`: the parent that stands for none. */
MOE_SEARCH moe_row moe_live_row(const moe_search *s, const moe_slot *slot, const moe_live *live, int32_t first) {
    moe_row row;
    row.id = live->last < 0 ? s->bos : slot->tokens[live->last].id;
    row.parent = live->row != SIZE_MAX ? (int32_t)live->row : first;
    row.want = slot->steps < slot->n_target ? slot->target[slot->steps] : slot->scoring ? s->eos : -1;
    row.hold = !slot->scoring && slot->steps < s->min_target;
    return row;
}

/* Whether all places of the beam are still one hypothesis: at the beginning, and while it follows a given target. */
MOE_SEARCH int moe_slot_is_one(const moe_slot *slot) { return slot->steps <= slot->n_target; }

/* GNMT eq 14: ((c + L) / (c + 1))^alpha. */
MOE_SEARCH float moe_length_penalty(const moe_search *s, size_t tokens) {
    float ratio;
    if (s->alpha == 0.0f) return 1.0f;
    ratio = (s->constant + (float)tokens) / (s->constant + 1.0f);
    return moe_expf(s->alpha * moe_logf(ratio));
}

/* GNMT eq 14: beta * sum_i log(min(sum_j p_ij, 1)). */
MOE_SEARCH float moe_coverage_penalty(const moe_search *s, const float *coverage, size_t length) {
    float sum = 0.0f;
    if (s->beta == 0.0f || !coverage) return 0.0f;
    for (size_t i = 0; i < length; i++) {
        const float c = coverage[i] < 1.0f ? coverage[i] : 1.0f;
        sum = sum + moe_logf(c > 1e-10f ? c : 1e-10f);
    }
    return s->beta * sum;
}

/* The same where a position that was never looked at is left out: log 0 counts as 0. */
MOE_SEARCH float moe_seen_penalty(const moe_search *s, const float *coverage, size_t length) {
    float sum = 0.0f;
    if (s->beta == 0.0f || !coverage) return 0.0f;
    for (size_t i = 0; i < length; i++)
        if (coverage[i] > 0.0f) sum = sum + moe_logf(coverage[i] < 1.0f ? coverage[i] : 1.0f);
    return s->beta * sum;
}

/* What a hypothesis of `tokens` tokens is worth; `ended`: and an end token. */
MOE_SEARCH float moe_score(const moe_search *s, float logprob, size_t tokens, int ended, const float *coverage,
                           size_t length) {
    switch (s->rules) {
    case MOE_RULES_NVIDIA: return logprob / moe_length_penalty(s, tokens + 2) + moe_seen_penalty(s, coverage, length);
    case MOE_RULES_TF:
    case MOE_RULES_MLPERF: return logprob / moe_length_penalty(s, tokens);
    default: return logprob / moe_length_penalty(s, tokens + (size_t)ended) + moe_coverage_penalty(s, coverage, length);
    }
}

MOE_SEARCH void moe_add_finished(const moe_search *s, moe_slot *slot, float logprob, float end_logprob, int32_t last,
                                 int finished, const float *coverage) {
    const size_t tokens = slot->steps - (size_t)finished;
    const float score = moe_score(s, logprob, tokens, finished, coverage, slot->length);
    const moe_finished f = { logprob, score, end_logprob, last, tokens, slot->n_ended++, finished };
    slot->finished[slot->n_finished++] = f;
}

/* Better first: finished before cut (the paper's rules), then by score, then by order of finishing. */
MOE_SEARCH int moe_better(const moe_search *s, const moe_finished *a, const moe_finished *b) {
    if (s->rules == MOE_RULES_PAPER && a->finished != b->finished) return a->finished;
    if (a->score != b->score) return a->score > b->score;
    return a->order < b->order;
}

MOE_SEARCH void moe_sort_finished(const moe_search *s, moe_slot *slot) {
    for (size_t i = 1; i < slot->n_finished; i++) {
        const moe_finished f = slot->finished[i];
        size_t at = i;
        for (; at > 0 && moe_better(s, &f, &slot->finished[at - 1]); at--) slot->finished[at] = slot->finished[at - 1];
        slot->finished[at] = f;
    }
}

/* Returns its index. */
MOE_SEARCH int32_t moe_add_token(moe_slot *slot, int32_t id, int32_t parent, float logprob) {
    const moe_token token = { id, parent, logprob };
    slot->tokens[slot->n_tokens] = token;
    return (int32_t)slot->n_tokens++;
}

/* The outcome of a step for the rows of one slot; `next` [beam] is scratch. Returns 1 when the sentence is done. */
MOE_SEARCH int moe_search_step(const moe_search *s, moe_slot *slot, const moe_answer *a, moe_live *next) {
    const size_t beam = (size_t)s->beam;
    uint8_t taken[MOE_MAX_BEAM]; /* of every row's candidates; up to `top`, which is beam + 1 at most */
    size_t n_next = 0;
    float best_candidate = 0.0f;
    slot->steps++;
    for (size_t h = 0; h < slot->n_live; h++) taken[h] = 0;
    for (size_t position = 0; n_next < beam; position++) {
        size_t best = slot->n_live, at;
        float best_logprob = 0.0f, logprob;
        const moe_live *from;
        for (size_t h = 0; h < slot->n_live; h++) { /* every row's candidates are sorted: compare their heads */
            if (taken[h] >= a->top) continue;
            logprob = slot->live[h].logprob + a->top_logprobs[slot->live[h].row * a->top + taken[h]];
            if (logprob != logprob) slot->broken = 1;
            if (best == slot->n_live || logprob > best_logprob) best = h, best_logprob = logprob;
        }
        if (best == slot->n_live || slot->broken || !(best_logprob >= -FLT_MAX)) break;
        from = &slot->live[best];
        if (position == 0) best_candidate = best_logprob;
        if (s->prune > 0.0f && best_logprob < best_candidate - s->prune) break;
        at = from->row * a->top + taken[best]++;
        if (a->top_ids[at] == s->eos) {
            if (position < beam)
                moe_add_finished(s, slot, best_logprob, a->top_logprobs[at], from->last, 1,
                                 a->coverage ? a->coverage + from->row * a->stride : NULL);
        } else {
            const int32_t last = moe_add_token(slot, a->top_ids[at], from->last, a->top_logprobs[at]);
            const moe_live live = { best_logprob, last, from->row, 0.0f, 0.0f, 0, 0, 0 };
            next[n_next++] = live;
        }
    }
    for (size_t h = 0; h < n_next; h++) slot->live[h] = next[h];
    slot->n_live = n_next;
    if (slot->broken) return 1;
    moe_sort_finished(s, slot);
    while (s->prune > 0.0f && slot->n_finished &&
           slot->finished[slot->n_finished - 1].score < slot->finished[0].score - s->prune)
        slot->n_finished--;
    if (slot->n_finished >= beam || slot->n_live == 0) return 1;
    if (slot->steps >= slot->limit) {
        for (size_t h = 0; h < slot->n_live; h++)
            moe_add_finished(s, slot, slot->live[h].logprob, 0.0f, slot->live[h].last, 0,
                             a->coverage ? a->coverage + slot->live[h].row * a->stride : NULL);
        moe_sort_finished(s, slot);
        return 1;
    }
    return slot->n_finished >= (size_t)s->nbest &&
           slot->finished[0].score >= slot->live[0].logprob / moe_length_penalty(s, slot->limit);
}

/* What the beam is ordered by: log-probability, or that over the length penalty. `before`: it had ended in a step
 * before. */
MOE_SEARCH float moe_rank(const moe_search *s, float logprob, size_t tokens, int before) {
    if (s->rules == MOE_RULES_NVIDIA) return logprob;
    return logprob / moe_length_penalty(s, tokens + (size_t)(before && s->rules == MOE_RULES_MLPERF));
}

/* Put a hypothesis behind those of `next` that are as good, if that is within the beam. */
MOE_SEARCH void moe_beam_insert(moe_live *next, size_t *n, size_t beam, const moe_live *candidate) {
    size_t at;
    if (*n == beam && !(candidate->rank > next[beam - 1].rank)) return;
    if (*n < beam) ++*n;
    for (at = *n - 1; at > 0 && candidate->rank > next[at - 1].rank; at--) next[at] = next[at - 1];
    next[at] = *candidate;
}

/* moe_search_step for the other rules: finished hypotheses stay in the beam as they are, and the beam is what is best
 * of them and of all continuations. `coverage` [beam, stride] (or NULL) belongs to places in the beam. An end token
 * costs at least as much as any other of its log-probability, so the `top` best tokens of a row are enough. */
MOE_SEARCH int moe_beam_step(const moe_search *s, moe_slot *slot, const moe_answer *a, const float *coverage,
                             moe_live *next) {
    size_t n = 0, ended = 0;
    int cut;
    slot->steps++;
    for (size_t h = 0; h < slot->n_live; h++) {
        const moe_live *from = &slot->live[h];
        moe_live candidate = *from;
        if (from->ended) {
            candidate.rank = moe_rank(s, from->logprob, from->tokens, 1);
            moe_beam_insert(next, &n, (size_t)s->beam, &candidate);
            continue;
        }
        for (size_t k = 0; k < a->top; k++) {
            candidate.id = a->top_ids[from->row * a->top + k];
            candidate.latest = a->top_logprobs[from->row * a->top + k];
            candidate.logprob = from->logprob + candidate.latest;
            if (candidate.logprob != candidate.logprob) slot->broken = 1;
            if (!(candidate.logprob >= -FLT_MAX)) break;
            candidate.ended = candidate.id == s->eos;
            candidate.tokens = from->tokens + (size_t)!candidate.ended;
            candidate.rank = moe_rank(s, candidate.logprob, candidate.tokens, 0);
            moe_beam_insert(next, &n, (size_t)s->beam, &candidate);
        }
    }
    if (slot->broken) return 1;
    for (size_t h = 0; h < n; h++) {
        if (!next[h].ended) next[h].last = moe_add_token(slot, next[h].id, next[h].last, next[h].latest);
        ended += (size_t)next[h].ended;
        slot->live[h] = next[h];
    }
    slot->n_live = n;
    cut = slot->steps >= slot->limit;
    if (ended < n && !cut) return 0;
    for (size_t h = 0; h < n; h++) {
        const moe_live *l = &slot->live[h];
        const float *seen = coverage ? coverage + h * a->stride : NULL;
        const float score = s->rules != MOE_RULES_NVIDIA || cut
                                ? l->rank /* NVIDIA's: of a cut beam nothing is normalised */
                                : moe_score(s, l->logprob, l->tokens, 1, seen, slot->length);
        const float end = l->ended ? l->latest : 0.0f;
        const moe_finished f = { l->logprob, score, end, l->last, l->tokens, slot->n_ended++, l->ended };
        slot->finished[slot->n_finished++] = f;
    }
    moe_sort_finished(s, slot);
    return 1;
}

/* The same where the token is given, and at last the end of a target that is scored: one live hypothesis follows. */
MOE_SEARCH int moe_score_step(const moe_search *s, moe_slot *slot, float logprob, const float *coverage) {
    moe_live *live = &slot->live[0];
    const size_t position = slot->steps++;
    live->logprob = live->logprob + logprob;
    if (live->logprob != live->logprob) {
        slot->broken = 1;
        return 1;
    }
    if (position == slot->n_target) {
        moe_add_finished(s, slot, live->logprob, logprob, live->last, 1, coverage);
        return 1;
    }
    live->last = moe_add_token(slot, slot->target[position], live->last, logprob);
    live->tokens++;
    return 0;
}

/* A step of slot number `at`, whichever it is. Returns 1 when the sentence is done: it is not active any more. */
MOE_SEARCH int moe_slot_step(const moe_search *s, moe_slot *slot, size_t at, const moe_answer *a, moe_live *next) {
    const size_t place = at * (size_t)s->beam;
    int done;
    if (slot->scoring || slot->steps < slot->n_target) {
        const size_t row = slot->live[0].row;
        done =
            moe_score_step(s, slot, a->want_logprob[row],
                           a->coverage ? a->coverage + (s->rules == MOE_RULES_NVIDIA ? place : row) * a->stride : NULL);
    } else if (s->rules == MOE_RULES_PAPER) {
        done = moe_search_step(s, slot, a, next);
    } else {
        done = moe_beam_step(s, slot, a, a->coverage ? a->coverage + place * a->stride : NULL, next);
    }
    if (done) slot->active = 0;
    return done;
}

/* Hypotheses that a sentence gives, the first of `finished`; 0: it is broken. */
MOE_SEARCH size_t moe_slot_results(const moe_search *s, const moe_slot *slot) {
    if (slot->broken) return 0;
    return slot->n_finished < (size_t)s->nbest ? slot->n_finished : (size_t)s->nbest;
}

/* The tokens of one, `ids` [tokens], and `logprobs` [tokens + finished]. */
MOE_SEARCH void moe_write_finished(const moe_slot *slot, const moe_finished *f, int32_t *ids, float *logprobs) {
    int32_t at = f->last;
    if (f->finished) logprobs[f->tokens] = f->end_logprob;
    for (size_t i = f->tokens; i-- > 0; at = slot->tokens[at].parent) {
        ids[i] = slot->tokens[at].id;
        logprobs[i] = slot->tokens[at].logprob;
    }
}

#endif /* MOE_SEARCH */
