/* moetext.c - the text library. See moetext.h.
 *
 * Contents
 *   1. Models       a model file with its tokeniser
 *   2. Parts        the lines and sentences of a text in progress
 *   3. Words        word alignment and routing, in a second session
 *   4. Results      joins and delivers the parts of a text
 *   5. Stream       texts in, for stream.h
 *   6. Rows         many texts at once
 *   7. Translators
 */
#include "tools/text/align.h"
#include "tools/text/detect.h"
#include "tools/text/drafts.h"
#include "tools/text/memory.h"
#include "tools/text/moetext.h"
#include "tools/text/open.h"
#include "tools/text/protect.h"
#include "tools/text/recall.h"
#include "tools/text/settings.h"
#include "tools/text/several.h"
#include "tools/text/spans.h"
#include "tools/text/stream.h"
#include "tools/text/words.h"

#include <errno.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ==== 1. Models ========================================================================================= */

struct moetext_model {
    moetext_model *self; /* not const, because translators change `holders` */
    atomic_int holders;  /* references of the user and of translators */
    text_set *set;       /* set of several models, for which only the languages below are set; NULL for one model */
    const text_several_ops *ops; /* functions for `set` and its translators */
    text_front front;
    text_form form;
    char *path;    /* of the file; may be NULL */
    size_t copied; /* bytes of the file in private memory */
    size_t n_languages;
    char **languages; /* [n_languages] */
    int32_t *tags;    /* [n_languages] */
    char *sides[2];   /* [n_languages] 1 if the language can be a source (target); NULL if all can */
    char **texts;     /* [metadata entries] NULL for entries that are not text */
};

const char *moetext_version(void) { return MOE_VERSION; }

const char *moetext_tokeniser_version(void) { return spm_library_version(); }

/* Mark the model's languages that the file lists as sources (or targets) in the same spelling. */
static moe_status mark_side(moetext_model *m, int target, moe_error *error) {
    const text_codes listed = text_languages_of(m->front.model, target);
    text_index index = { 0 };
    uint32_t found;
    size_t known = 0;
    moe_status status = MOE_OK;
    if (listed.entry < 0) return MOE_OK;
    if (!(m->sides[target] = calloc(m->n_languages + 1, 1))) return text_out_of_memory(error);
    for (size_t i = 0; i < listed.n && !status; i++) {
        const moe_span code = text_code_at(&listed, i);
        if (!text_index_add(&index, text_hash(code.data, code.length), i)) status = text_out_of_memory(error);
    }
    for (size_t i = 0; i < m->n_languages && !status; i++) {
        const char *name = m->languages[i];
        const size_t length = name ? strlen(name) : 0;
        for (size_t at = 0; length && (found = text_index_next(&index, text_hash(name, length), &at)) != TEXT_NONE;) {
            const moe_span code = text_code_at(&listed, found);
            if (code.length != length || memcmp(code.data, name, length) != 0) continue;
            m->sides[target][i] = 1;
            known++;
        }
    }
    text_index_free(&index);
    if (known < listed.n) free(m->sides[target]), m->sides[target] = NULL; /* OPUS-MT sources have no tags */
    return status;
}

static int is_kind(const moetext_model *m, const text_settings *settings) {
    return moe_model_kind(m->front.model) == (settings->kind > 0 ? MOE_MODEL_LANGUAGE : MOE_MODEL_TRANSLATION);
}

static moe_status copy_texts(moetext_model *m, moe_error *error) {
    const moe_model *engine = m->front.model;
    const size_t entries = moe_model_meta_count(engine), n = moe_model_language_count(engine);
    m->languages = calloc(n + 1, sizeof *m->languages);
    m->tags = calloc(n + 1, sizeof *m->tags);
    m->texts = calloc(entries + 1, sizeof *m->texts);
    if (!m->languages || !m->tags || !m->texts) return text_out_of_memory(error);
    for (; m->n_languages < n; m->n_languages++) {
        const moe_span known = moe_model_language(engine, m->n_languages);
        char *code = text_copy(known.data, known.length);
        if (!code) return text_out_of_memory(error);
        m->languages[m->n_languages] = code;
        m->tags[m->n_languages] = moe_model_language_tag_at(engine, m->n_languages);
    }
    for (int side = 0; side < 2; side++) {
        const moe_status status = mark_side(m, side, error);
        if (status) return status;
    }
    for (size_t i = 0; i < entries; i++) {
        if (moe_model_meta_kind(engine, i) != MOE_META_TEXT) continue;
        const moe_span text = moe_model_meta_text(engine, i, 0);
        if (!(m->texts[i] = text_copy(text.data, text.length))) return text_out_of_memory(error);
    }
    return MOE_OK;
}

static moetext_model *new_model(void) {
    moetext_model *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    m->self = m;
    m->front = (text_front){ .unknown = -1, .target_unknown = -1 };
    atomic_init(&m->holders, 1);
    return m;
}

/* Open a model file without its tokeniser. `verify` has the same meaning as in moe_model_params. */
static moe_status open_file(moetext_model *m, const moe_source *source, const text_settings *settings, int verify,
                            moe_error *error) {
    const moe_allocator none = { 0 };
    const moe_model_params params = { .copy = settings->copy > 0,
                                      .stream = !isnan(text_settings_param(settings, "expert-memory")),
                                      .verify = settings->verify ? verify : -1,
                                      .allocator = settings->max_memory ? text_memory_allocator() : none };
    m->form = settings->form < 0 ? TEXT_FORM_TEXT : (text_form)settings->form;
    if (source->path && !(m->path = text_copy(source->path, strlen(source->path)))) return text_out_of_memory(error);
    const moe_status status =
        text_open_source(source, TEXT_IDS_ONLY | (settings->cache ? 0 : TEXT_NO_CACHE), &params, &m->front, error);
    if (status) return status;
    if (params.copy || params.stream || source->read) m->copied = (size_t)moe_model_held_bytes(m->front.model);
    return copy_texts(m, error);
}

moe_status text_model_begin(const char *path, const text_settings *settings, text_level level, moetext_model **out,
                            moe_error *error) {
    moetext_model *m = new_model();
    if (!m) return text_out_of_memory(error);
    moe_status status = open_file(m, &(moe_source){ .path = path }, settings, 2, error);
    if (!status && is_kind(m, settings)) status = text_begin_tokeniser(&m->front, level, error);
    if (!status && settings->verify && moe_model_file_bytes(m->front.model) <= MOE_VERIFY_BYTES)
        status = moe_model_verify(m->front.model, error); /* runs while the tokeniser is loaded */
    if (status) moetext_model_close(m);
    else *out = m;
    return status;
}

moe_status text_model_wait(const moetext_model *m, moe_error *error) {
    return text_wait_tokeniser(&m->self->front, error); /* has no effect once the model is shared */
}

const text_front *text_front_of(const moetext_model *m) { return &m->front; }

static moe_status open_source(const moe_source *source, const text_settings *settings, moetext_model **out,
                              moe_error *error) {
    static const text_level levels[] = { [TEXT_FORM_TEXT] = TEXT_REQUIRED,
                                         [TEXT_FORM_PIECES] = TEXT_PIECES,
                                         [TEXT_FORM_IDS] = TEXT_IF_THERE,
                                         [TEXT_FORM_RAW_IDS] = TEXT_IF_THERE };
    moe_error e = { .code = MOE_OK };
    moetext_model *m = new_model();
    if (!m) return text_out_of_memory(error);
    moe_status status = open_file(m, source, settings, settings->verify < 0 ? 0 : 1, &e);
    if (!status && !is_kind(m, settings))
        status = text_fail(&e, MOE_ERROR_UNSUPPORTED, "model", "not a %s model",
                           settings->kind > 0 ? "language" : "translation");
    if (!status) status = text_open_tokeniser(&m->front, levels[m->form], &e);
    if (status == MOE_ERROR_UNSUPPORTED && strcmp(e.where, "tokenizer.kind") == 0)
        text_fail(&e, status, "form",
                  m->front.vocabulary.count
                      ? "this model has no tokeniser but a list of pieces: open it with form=pieces"
                      : "this model has no tokeniser: open it with form=ids");
    if (!status) return *out = m, MOE_OK;
    moetext_model_close(m);
    if (error) *error = e;
    return text_name_error(source->name ? source->name : source->path, status, error);
}

moe_status text_model_open(const char *path, const text_settings *settings, moetext_model **out, moe_error *error) {
    return open_source(&(moe_source){ .path = path }, settings, out, error);
}

moe_status moetext_model_open_source_sized(const moe_source *given, size_t size, const char *options,
                                           moetext_model **out, moe_error *error) {
    moe_source source = { .name = NULL };
    text_settings settings = text_settings_none();
    int known = size <= 4096;
    for (size_t i = sizeof source; known && i < size; i++) known = !((const char *)given)[i];
    const moe_status status = text_settings_parse(&settings, options, error);
    if (!known)
        return text_fail(error, MOE_ERROR_ARGUMENT, "moe_source",
                         "the program was compiled with a newer moe.h than this library, " MOE_VERSION);
    memcpy(&source, given, size < sizeof source ? size : sizeof source);
    return status ? status : open_source(&source, &settings, out, error);
}

moe_status text_model_of_set(text_set *set, const text_several_ops *ops, moetext_model **out, moe_error *error) {
    moetext_model *m = new_model();
    if (!m) return text_out_of_memory(error);
    m->languages = (char **)(uintptr_t)ops->languages(set, &m->n_languages);
    m->set = set, m->ops = ops;
    *out = m;
    return MOE_OK;
}

void moetext_model_close(moetext_model *m) {
    if (!m || atomic_fetch_sub(&m->holders, 1) > 1) return;
    if (m->set) m->ops->close(m->set), m->languages = NULL;
    for (size_t i = 0; m->languages && i < m->n_languages; i++) free(m->languages[i]);
    for (size_t i = 0; m->texts && i < moe_model_meta_count(m->front.model); i++) free(m->texts[i]);
    free(m->languages);
    free(m->tags), free(m->sides[0]), free(m->sides[1]);
    free(m->texts), free(m->path);
    text_close(&m->front);
    free(m);
}

const moe_model *moetext_model_engine(const moetext_model *m) { return m->front.model; }

int moetext_model_hops(const moetext_model *m, size_t source, size_t target) {
    if (m->set) return m->ops->hops(m->set, source, target);
    return (!m->sides[0] || m->sides[0][source]) && (!m->sides[1] || m->sides[1][target]);
}

const char *moetext_model_meta(const moetext_model *m, const char *key) {
    if (m->set) return "";
    const ptrdiff_t i = moe_model_meta_find(m->front.model, key);
    return i >= 0 && m->texts[i] ? m->texts[i] : "";
}

size_t moetext_model_language_count(const moetext_model *m) { return m->n_languages; }

const char *moetext_model_language(const moetext_model *m, size_t i) {
    return i < m->n_languages ? m->languages[i] : NULL;
}

ptrdiff_t moetext_model_language_find(const moetext_model *m, const char *code) {
    int32_t tag;
    if (m->set) return m->ops->language(m->set, code);
    for (size_t i = 0; i < m->n_languages; i++)
        if (strcmp(m->languages[i], code) == 0) return (ptrdiff_t)i;
    if (text_language(&m->front, code, 1, &tag, NULL)) return -1;
    for (size_t i = 0; i < m->n_languages; i++)
        if (m->tags[i] == tag) return (ptrdiff_t)i;
    return -1;
}

int moetext_model_needs_source(const moetext_model *m) {
    if (m->set) return m->ops->needs_source(m->set);
    return moe_model_needs_source(m->front.model) || text_prompt_names_source(m->front.model, NULL);
}

static const char *piece_of(const moetext_model *m, moe_span (*find)(const text_front *front, int32_t id), int32_t id,
                            size_t *length) {
    const moe_span piece = m->set ? (moe_span){ NULL, 0 } : find(&m->front, id);
    *length = piece.length;
    return piece.data ? piece.data : "";
}

const char *moetext_model_piece(const moetext_model *m, int32_t id, size_t *length) {
    return piece_of(m, text_piece, id, length);
}

const char *moetext_model_source_piece(const moetext_model *m, int32_t id, size_t *length) {
    return piece_of(m, text_source_piece, id, length);
}

static moe_status no_ids(moe_error *error) {
    return text_fail(error, MOE_ERROR_UNSUPPORTED, "models", "several models have no token ids in common");
}

/* Copy the first `capacity` ids to `ids`, and free `found`. */
static moe_status give_ids(moe_status status, text_ids *found, int32_t *ids, size_t capacity, size_t *count) {
    if (!status) *count = found->length;
    if (!status && found->length && capacity)
        memcpy(ids, found->data, (found->length < capacity ? found->length : capacity) * sizeof *ids);
    text_ids_free(found);
    return status;
}

moe_status moetext_model_encode(const moetext_model *m, const char *text, size_t length, int as_target, int32_t *ids,
                                size_t capacity, size_t *count, moe_error *error) {
    if (m->set) return no_ids(error);
    if (!text_is_usable(text, length))
        return text_fail(error, MOE_ERROR_ARGUMENT, "text", "not valid UTF-8, or contains a NUL byte");
    const text_front front = as_target ? text_front_of_targets(&m->front) : m->front;
    text_ids found = { NULL, 0, 0 };
    const moe_status status = m->form == TEXT_FORM_TEXT     ? text_encode(&front, text, length, &found, error)
                              : m->form == TEXT_FORM_PIECES ? text_parse_pieces(&front, text, length, &found, error)
                                                            : text_parse_ids(&front, text, length, &found, error);
    return give_ids(status, &found, ids, capacity, count);
}

moe_status moetext_model_decode(const moetext_model *m, const int32_t *ids, size_t count, char *text, size_t capacity,
                                size_t *length, moe_error *error) {
    text_bytes found = { NULL, 0, 0, 0 };
    moe_status status = MOE_OK;
    if (m->set) return no_ids(error);
    for (size_t i = 0; !status && i < count; i++)
        if (ids[i] < 0 || ids[i] >= moe_model_vocabulary(m->front.model))
            status = text_fail(error, MOE_ERROR_ARGUMENT, "ids", "an id is not in the model's vocabulary");
    if (!status && m->form >= TEXT_FORM_IDS) text_append_ids(&found, ids, count);
    else if (!status)
        status = (m->form == TEXT_FORM_TEXT ? text_decode : text_join_pieces)(&m->front, ids, count, &found, error);
    if (!status && found.failed) status = text_out_of_memory(error);
    if (!status) {
        *length = found.length;
        if (found.length && capacity) memcpy(text, found.data, found.length < capacity ? found.length : capacity);
    }
    free(found.data);
    return status;
}

moe_status moetext_model_prompt(const moetext_model *m, const moetext_message *messages, size_t n, int32_t *ids,
                                size_t capacity, size_t *count, moe_error *error) {
    text_ids found = { NULL, 0, 0 };
    if (!m->front.prompt || m->form != TEXT_FORM_TEXT)
        return text_fail(error, MOE_ERROR_UNSUPPORTED, "messages",
                         "this model translates, but does not answer messages: its file has no prompt");
    return give_ids(text_prompt_answer(&m->front, messages, n, &found, error), &found, ids, capacity, count);
}

moe_status moetext_detector_new(const moetext_model *m, moetext_detector **out, moe_error *error) {
    if (m->set) return text_detector_open((const char *const *)m->languages, m->n_languages, out, error);
    return text_detector_of_model(m->front.model, out, error);
}

void moetext_detector_free(moetext_detector *detector) { text_detector_close(detector); }

ptrdiff_t moetext_detect(moetext_detector *detector, const char *text, size_t length, float *confidences) {
    float confidence;
    length = text_utf8_valid(text, length); /* detection requires valid UTF-8 */
    return confidences ? text_detect_each(detector, text, length, confidences)
                       : text_detect(detector, text, length, &confidence);
}

/* ==== 2. Parts ========================================================================================== */

/* Token ids of consecutive parts. */
typedef struct sequence {
    text_ids ids;
    size_t *ends; /* [n_ends] end of each part in `ids` */
    size_t n_ends, end_capacity;
} sequence;

/* A hypothesis of a part, or of the joined parts of a text. */
typedef struct hypothesis {
    moetext_hypothesis sums; /* scores, flags, n_links, n_logprobs; other members are set on delivery */
    text_bytes text;
    size_t line; /* start of the last line in `text` */
    sequence tokens;
    float *logprobs;
    moetext_link *links; /* target offsets are relative to the beginning of the part */
    size_t logprob_capacity, link_capacity;
} hypothesis;

/* Hypotheses, best first. The buffers of all `made` hypotheses are reused. */
typedef struct hypotheses {
    hypothesis *each;
    size_t n, made, capacity;
} hypotheses;

/* A line of a text, or a sentence of a line. */
typedef struct part {
    text_job job; /* first member, because stream.h returns a pointer to it */
    struct unit *unit;
    struct part *next, *next_waiting;
    int finished;
    const char *joint; /* separator after the previous part */
    size_t begin;      /* offset in the text */
    moe_span draft;
    hypotheses found;
} part;

/* A text in progress. Its parts are joined in order as they finish, and then reused. */
typedef struct unit {
    struct unit *next;
    moetext_request request;
    int32_t source_tag, target_tag;

    text_cursor cursor;             /* position in the current line */
    size_t at;                      /* start of the next line */
    size_t message_end;             /* lines that begin before this offset belong to a message that is copied */
    size_t counted, earlier;        /* counted: end of the lines that `earlier` includes; see earlier_lines */
    int last_line;                  /* 1 if the current line is the last line */
    const char *joint, *next_joint; /* separators before the next part and the next line */
    int closed;                     /* 1 if no more parts follow */
    text_draft draft;               /* lines of the draft after the current line */
    moe_span line_draft;            /* draft of the current line */
    char *drafted;                  /* the fast model's draft, owned; may be NULL */

    part *first, *last; /* parts that are not joined yet */
    part *before;       /* the last joined part; may be NULL */
    size_t kept;        /* number of parts starting with `first` */
    int lost;           /* 1 if out of memory */
    int dropped;        /* 1 if the caller dropped the text */

    /* results of the joined parts */
    moe_status status;
    unsigned flags;
    size_t shown; /* bytes of the translation already shown to the caller (moetext_partial) */
    size_t parts, translated, blank;
    int found;         /* 1 if a part has a hypothesis */
    sequence source;   /* this and the following members own buffers, which are reused */
    hypotheses joined; /* joined.n is the maximum over the parts */
    text_notes notes;
    moetext_match *matches; /* [n_matches] */
    size_t n_matches, match_capacity;
    moetext_part *pieces; /* [n_pieces] of the joined parts */
    size_t n_pieces, piece_capacity;
    moetext_term_use *terms; /* [n_terms] */
    size_t n_terms, term_capacity;
} unit;

typedef struct row {
    size_t begin, length, message; /* offset in rows.text; its length; offset in rows.messages */
} row;

/* The state of moetext_translate_rows. */
typedef struct rows {
    const char *bytes; /* the texts; NULL if `texts` contains them */
    const int64_t *offsets;
    const uint8_t *valid;
    const char *const *texts;
    const char *source, *target;
    size_t n, next;
    text_bytes text, messages; /* strings, in the order in which results arrive */
    text_bytes bytes_out;
    void *block; /* contains the following arrays [n] */
    size_t capacity;
    row *rows;
    int64_t *offsets_out; /* [n + 1] */
    const char **messages_out, **strings_out;
    float *scores_out;
    uint8_t *statuses_out;
} rows;

/* What the second session observes while it scores a hypothesis, or the source given a hypothesis. */
typedef struct look {
    part *part;
    const hypothesis *of;
    int back;           /* 1 to score the source given the hypothesis */
    int linked, routed; /* 1 to observe attention; 1 to observe routing */
    int failed;
    size_t lead;    /* number of decoder steps before the one that writes the first token */
    float *weights; /* [tokens written, tokens read] */
    size_t capacity;
} look;

/* The words and tokens of a text. */
typedef struct words {
    text_offsets begins; /* offsets of the tokens */
    int32_t *word;       /* [begins.length] index of the token's word, or -1 */
    size_t word_capacity;
    uint32_t *edges; /* [2 * n] beginning and end of each word */
    size_t edge_capacity, n;
} words;

struct moetext_glossary {
    text_rules *rules;
    text_glossaries *terms; /* glossaries of several models, in place of `rules` */
    void (*free_terms)(text_glossaries *terms);
};

struct moetext_memory {
    text_recall *recall;
};

struct moetext {
    text_stream stream;    /* first member, because its functions get a pointer to it */
    text_several *several; /* NULL for one model; several models use only model, settings and rows below */
    const moetext_model *model;
    text_settings settings;
    moe_session *session;
    char prompts[4128];                     /* file of computed prompts; "" without the option prompt-cache */
    uint64_t saved;                         /* number of sentences before the file was written */
    text_prompt_options prompt, in_context; /* `in_context` is for texts with a context */
    moe_error no_context;                   /* reason why texts cannot have a context; its code is MOE_OK if they can */
    text_rules *rules;                      /* NULL if nothing is protected */
    moetext_memory *memory;                 /* of the option; NULL without it */
    int owns_memory;
    int32_t source_tag, target_tag; /* tags for texts without languages; -1 if not given */
    int auto_source;                /* detect the source language of texts without one */
    text_detector *detector;        /* NULL until needed */
    size_t split;
    atomic_int cancelled;
    atomic_int busy; /* 1 during a call that translates */
    moetext_pull_fn pull;
    moetext_done_fn done;
    void *user;

    int kept;                   /* 1 if markup, numbers or terms are protected */
    int variants;               /* text_options.variants */
    text_form reads, writes;    /* form of texts; form of translations and given targets */
    int raw;                    /* 1 if source ids include all special tokens */
    int raw_target;             /* 1 if ids of translations include the end token */
    int language;               /* 1 if the model is a language model */
    int32_t end;                /* the model's end token */
    unit *unit;                 /* the current text; may be NULL */
    unit *units, *spare_units;  /* texts in progress; texts to reuse */
    size_t batch, nbest;        /* batch size of the session; maximum number of hypotheses per result */
    int beam;                   /* of the session */
    moetext *drafter;           /* translator of a fast model; NULL without the option draft */
    size_t most_parts, n_spare; /* limit of parts per text, and of spare parts; number of spare parts */
    size_t under_way;           /* parts that are not decoded yet */
    part *spare_parts;

    /* alignment and routing */
    int aligns;
    moe_session *second;                       /* session that scores and observes hypotheses; NULL if not needed */
    part *first_waiting, *last_waiting;        /* parts for the second session */
    size_t waiting, second_batch;              /* hypotheses of the waiting parts; batch size of `second` */
    look *looks;                               /* [n_looks] */
    size_t n_looks, look_capacity, looks_made; /* looks_made is the number of looks with a buffer */
    size_t next_look;
    text_aligner aligner;
    words source_words, target_words;
    text_bytes read; /* the text as the model reads it */

    /* buffers of the current result */
    moetext_hypothesis *hypotheses;
    size_t hypothesis_capacity;
    text_bytes message;
    text_bytes news, begun; /* texts of moetext_partial */
    rows rows;
};

enum { LARGE = 1 << 14 }; /* buffers with more bytes are not reused */

static hypothesis *add_hypothesis(hypotheses *all, moe_error *error) {
    if (text_reserve(&all->each, &all->capacity, all->n + 1, sizeof *all->each, error)) return NULL;
    hypothesis *h = &all->each[all->n++];
    if (all->n > all->made) *h = (hypothesis){ .line = 0 }, all->made = all->n;
    text_clear(&h->text);
    h->tokens.ids.length = h->tokens.n_ends = h->line = 0;
    h->sums = (moetext_hypothesis){ .finished = 1 };
    return h;
}

static void sequence_free(sequence *s) {
    text_ids_free(&s->ids);
    free(s->ends);
}

static void hypotheses_free(hypotheses *all) {
    for (size_t k = 0; k < all->made; k++) {
        text_bytes_free(&all->each[k].text);
        sequence_free(&all->each[k].tokens);
        free(all->each[k].logprobs);
        free(all->each[k].links);
    }
    free(all->each);
}

static void unit_free(unit *u) {
    hypotheses_free(&u->joined);
    text_notes_free(&u->notes);
    sequence_free(&u->source);
    free(u->drafted);
    free(u->matches);
    free(u->pieces);
    free(u->terms);
    free(u);
}

static unit *unit_new(moetext *t, const moetext_request *q) {
    unit *u = t->spare_units;
    if (u) t->spare_units = u->next;
    else if (!(u = calloc(1, sizeof *u))) return NULL;
    u->source.ids.length = u->source.n_ends = u->joined.n = 0;
    text_notes_clear(&u->notes);
    free(u->drafted);
    *u = (unit){ .next = t->units,
                 .request = *q,
                 .joint = "",
                 .source = u->source,
                 .joined = u->joined,
                 .notes = u->notes,
                 .matches = u->matches,
                 .match_capacity = u->match_capacity,
                 .pieces = u->pieces,
                 .piece_capacity = u->piece_capacity,
                 .terms = u->terms,
                 .term_capacity = u->term_capacity };
    if (q->place) *q->place = u;
    return t->units = u;
}

static void part_free(part *p) {
    text_job_free(&p->job);
    hypotheses_free(&p->found);
    free(p);
}

/* Keep a part (may be NULL) for another text. */
static void part_reuse(moetext *t, part *p) {
    if (!p) return;
    if (t->n_spare >= t->most_parts || p->job.source.capacity > LARGE) part_free(p);
    else p->next = t->spare_parts, t->spare_parts = p, t->n_spare++;
}

/* Stop accepting parts of a text. */
static void unit_close(moetext *t, unit *u) {
    u->closed = 1;
    u->cursor.rest.length = 0;
    if (u->request.place) *u->request.place = NULL;
    if (t->unit == u) t->unit = NULL;
}

/* Keep a unit and its parts for another text. */
static void unit_reuse(moetext *t, unit *u) {
    unit **at = &t->units;
    while (*at != u) at = &(*at)->next;
    *at = u->next;
    for (part *p = u->first, *next; p; p = next) next = p->next, part_reuse(t, p);
    part_reuse(t, u->before);
    if (u->request.length > LARGE) unit_free(u);
    else u->next = t->spare_units, t->spare_units = u;
}

static part *part_new(moetext *t, unit *u, part *before) {
    part *p = t->spare_parts;
    if (p) t->spare_parts = p->next, t->n_spare--;
    else if (!(p = calloc(1, sizeof *p))) return NULL;
    text_job_clear(&p->job);
    p->unit = u;
    p->finished = 0;
    p->next_waiting = NULL;
    p->next = before ? before->next : NULL;
    p->found.n = 0;
    if (before) before->next = p;
    else u->first = p;
    if (!p->next) u->last = p;
    u->kept++, t->under_way++;
    return p;
}

/* Return 1 if texts and translations are text, not ids or pieces. */
static int is_text(const moetext *t) { return t->reads == TEXT_FORM_TEXT && t->writes == TEXT_FORM_TEXT; }

/* Return 1 if a target of raw ids ends with the end token, which the session would add again. */
static int ends_raw(const moetext *t, const text_ids *target) {
    return t->raw_target && target->length && target->data[target->length - 1] == t->end;
}

/* Return the scores of a hypothesis. Exclude the end token if the scored target is raw ids without an end token. */
static moetext_hypothesis sums_of(const moetext *t, const part *p, const moe_hypothesis *h) {
    moetext_hypothesis sums = { .score = h->score,
                                .logprob = h->logprob,
                                .reverse = h->reverse,
                                .finished = h->finished,
                                .looped = h->looped };
    if (!t->raw_target || p->unit->request.task != MOETEXT_SCORE || ends_raw(t, &p->job.target_ids)) return sums;
    sums.finished = 0;
    sums.logprob = 0;
    sums.score = NAN; /* only a complete translation has a score */
    for (size_t i = 0; i < h->n_ids; i++) sums.logprob = sums.logprob + h->token_logprobs[i];
    return sums;
}

static moe_status add_logprobs(hypothesis *h, const float *logprobs, size_t n, moe_error *error) {
    return text_add(&h->logprobs, &h->sums.n_logprobs, &h->logprob_capacity, logprobs, n, sizeof *logprobs, error);
}

/* Return 1 if the last hypothesis of a part repeats the text of a better one or lacks the target prefix. */
static int is_unwanted(const moetext *t, const part *p) {
    const text_bytes *last = &p->found.each[p->found.n - 1].text;
    int unwanted = !text_job_begins(&p->job, last->data ? last->data : "", last->length);
    for (size_t k = 0; k + 1 < p->found.n && t->writes == TEXT_FORM_TEXT; k++) {
        const text_bytes *other = &p->found.each[k].text;
        unwanted |= text_same((moe_span){ other->data, other->length }, (moe_span){ last->data, last->length });
    }
    return unwanted && p->found.n > 1;
}

/* Keep up to `nbest` hypotheses of a result with distinct texts: different tokens can have the same text. */
static moe_status part_keep(const moetext *t, part *p, const moe_result *result, moe_error *error) {
    moe_status status = MOE_OK;
    for (size_t k = 0; !status && k < result->n_hypotheses && p->found.n < t->nbest; k++) {
        const moe_hypothesis *from = &result->hypotheses[k];
        hypothesis *h = add_hypothesis(&p->found, error);
        if (!h) return MOE_ERROR_MEMORY;
        h->sums = sums_of(t, p, from);
        const int finished = h->sums.finished != 0;
        status = text_job_write(t->stream.front, &p->job, from, &h->text, error);
        if (t->raw_target && finished) text_printf(&h->text, from->n_ids ? " %d" : "%d", (int)t->end);
        if (h->text.failed) status = text_out_of_memory(error);
        if (!status) status = text_ids_append(&h->tokens.ids, from->ids, from->n_ids, error);
        if (!status) status = add_logprobs(h, from->token_logprobs, from->n_ids + (size_t)finished, error);
        if (!status && is_unwanted(t, p)) p->found.n--;
    }
    return status;
}

/* Store the translation of a part from the memory, or the source of a part that contains no language. */
static moe_status part_keep_source(part *p, moe_error *error) {
    const text_job *job = &p->job;
    const text_bytes *text = job->match.kind >= TEXT_MATCH_REPAIRED ? &job->recalled : &job->source;
    hypothesis *h = add_hypothesis(&p->found, error);
    if (!h) return MOE_ERROR_MEMORY;
    text_append(&h->text, text->data, text->length);
    return h->text.failed ? text_out_of_memory(error) : MOE_OK;
}

/* ==== 3. Words ========================================================================================== */

static int32_t *ids_or_nothing(const text_ids *ids) {
    static int32_t nothing[1]; /* non-NULL pointer for an empty target (NULL means "no target") */
    return ids->data ? ids->data : nothing;
}

/* Find the words of a text, separated by spaces, and for each token the word that contains its first non-space byte. */
static moe_status find_words(words *w, const char *text, size_t length) {
    size_t token = 0;
    moe_status status = text_reserve(&w->word, &w->word_capacity, w->begins.length, sizeof *w->word, NULL);
    w->n = 0;
    for (size_t at = 0, end; at < length && !status; at = end) {
        for (; at < length && (text[at] == ' ' || text[at] == '\t'); at++) {}
        for (end = at; end < length && text[end] != ' ' && text[end] != '\t'; end++) {}
        if (end == at) break;
        status = text_reserve(&w->edges, &w->edge_capacity, 2 * w->n + 2, sizeof *w->edges, NULL);
        if (status) break;
        w->edges[2 * w->n] = (uint32_t)at;
        w->edges[2 * w->n + 1] = (uint32_t)end;
        for (; token < w->begins.length && w->begins.data[token] < end; token++) w->word[token] = (int32_t)w->n;
        w->n++;
    }
    for (; token < w->begins.length && !status; token++) w->word[token] = -1;
    return status;
}

/* Find the offsets of the tokens `ids` in their text, or of the tokens of `text` if `ids` is NULL. *known is 0 if the
 * offsets are unknown. */
static moe_status find_begins(const moetext *t, words *w, const char *text, size_t length, const text_ids *ids,
                              size_t n, int *known) {
    const text_front *f = t->stream.front;
    const text_offsets *begins = &w->begins;
    const moe_status status = ids ? text_decode_begins(f, ids->data, n, &w->begins, NULL)
                                  : text_encode_begins(f, text, length, &w->begins, NULL);
    *known = !status && begins->length == n;
    for (size_t i = 1; *known && i < n; i++) *known = begins->data[i] >= begins->data[i - 1];
    return status == MOE_ERROR_MEMORY ? status : MOE_OK;
}

typedef struct linking {
    const moetext *t;
    part *part;
    hypothesis *of;
    size_t before; /* length of the white space that starts the source and the translation */
} linking;

static moe_status keep_link(void *user, size_t source, size_t target, moe_error *error) {
    const linking *l = user;
    hypothesis *h = l->of;
    const uint32_t *from = l->t->source_words.edges + 2 * source, *to = l->t->target_words.edges + 2 * target;
    const size_t begin = l->part->begin + l->before;
    const moetext_link link = { begin + from[0], begin + from[1], l->before + to[0], l->before + to[1] };
    return text_add(&h->links, &h->sums.n_links, &h->link_capacity, &link, 1, sizeof link, error);
}

/* Set *read to a job's text as the model reads it. Words have the same offsets in both texts. */
static moe_status read_again(moetext *t, const text_job *job, moe_span *read) {
    if (!job->capitals && !job->title && !job->attempt.variant) return MOE_OK;
    while (job->attempt.variant && read->length && strchr(" \t", read->data[read->length - 1])) read->length--;
    text_clear(&t->read);
    text_append(&t->read, read->data, read->length);
    if (job->capitals && !t->read.failed) text_lower_case(t->read.data, t->read.length);
    if (job->title && !t->read.failed) text_lower_title(t->read.data, t->read.length);
    text_apply_variant(job->attempt.variant, &t->read);
    if (t->read.failed) return MOE_ERROR_MEMORY;
    *read = (moe_span){ t->read.data, t->read.length };
    return MOE_OK;
}

/* Set *does to 1 if the decoded text of `ids`, with the variant undone at its end only, begins with `text`. */
static moe_status begins_with(moetext *t, text_variant variant, const text_ids *ids, const char *text, size_t length,
                              int *does) {
    text_clear(&t->read);
    const moe_status status = text_decode(t->stream.front, ids->data, ids->length, &t->read, NULL);
    *does = !status && !t->read.failed && !text_undo_variant(variant, &t->read, 0) && t->read.length >= length &&
            memcmp(t->read.data, text, length) == 0;
    return status;
}

/* Link the words of a hypothesis by attention, in both directions if both could be scored. */
static moe_status link_words(moetext *t, part *p, hypothesis *h, const look *forward, const look *back) {
    const text_job *job = &p->job;
    const text_ids *ids = &h->tokens.ids;
    const size_t before = job->verbatim || text_job_keeps_source(job) ? SIZE_MAX : text_guard_plain(job->guard);
    if (before == SIZE_MAX || before > h->text.length) return MOE_OK; /* words cannot be distinguished from markup */
    const char *text = h->text.data + before;
    const size_t length = h->text.length - before;
    words *source = &t->source_words, *target = &t->target_words;
    moe_span read = { job->source.data + before, job->source.length - before };
    moe_status status = read_again(t, job, &read);
    int known = 0;
    if (status || !forward->linked || forward->failed || !job->source_ids.length || !ids->length) return status;
    status = find_begins(t, source, read.data, read.length, NULL, job->source_ids.length, &known);
    const text_variant variant = job->attempt.variant;
    if (!status && known && (variant == TEXT_CLOSED || variant == TEXT_SENTENCE)) /* the beginning may be missing */
        status = begins_with(t, variant, ids, text, length, &known);
    if (!status && known) status = find_begins(t, target, text, length, ids, ids->length, &known);
    if (status || !known) return status;
    status = find_words(source, job->source.data + before, job->source.length - before);
    if (!status) status = find_words(target, text, length);
    if (status) return status;
    const text_side sides[2] = { { source->word, source->begins.length, source->n },
                                 { target->word, target->begins.length, target->n } };
    linking l = { t, p, h, before };
    return text_align(&t->aligner, &sides[0], &sides[1], forward->weights,
                      back->failed || !back->linked ? NULL : back->weights,
                      t->settings.share >= 0 ? t->settings.share : 0.7f, keep_link, &l, NULL);
}

/* ---- The second session ---- */

static int second_pull(void *user, int wait, moe_request *request) {
    moetext *t = user;
    (void)wait;
    while (t->next_look < t->n_looks) {
        look *l = &t->looks[t->next_look++];
        const unit *u = l->part->unit;
        const text_job *job = &l->part->job;
        const text_ids *source = job->prompt.length ? &job->prompt : &job->source_ids, *written = &l->of->tokens.ids;
        if (l->failed) continue;
        request->source = ids_or_nothing(l->back ? written : source);
        request->n_source = l->back ? written->length : source->length;
        request->target = ids_or_nothing(l->back ? source : written);
        request->n_target = l->back ? source->length : written->length;
        /* A cut hypothesis has no step that writes the end, so the session adds the one that wrote its last token. */
        if (!l->back && !l->of->sums.finished && written->length) request->n_target--;
        request->target_tag = l->back ? u->source_tag : u->target_tag;
        request->source_tag = l->routed ? u->source_tag : -1;
        if (t->raw) request->raw = 1, request->target_tag = -1;
        request->user = l;
        return MOE_PULL_REQUEST;
    }
    return MOE_PULL_END;
}

static void second_attention(void *user, const moe_attention *attention) {
    const look *l = attention->user;
    const size_t written = l->back ? l->part->job.source_ids.length : l->of->tokens.ids.length;
    (void)user;
    if (l->linked && attention->position < written) /* the end token is not part of a word */
        memcpy(l->weights + attention->position * attention->n, attention->weights,
               attention->n * sizeof *attention->weights);
}

/* Report the routing of a token of a part. After `lead` steps, the decoder writes `ids`. */
static void report_routing(const moetext *t, const part *p, const moe_routing *routing, const text_ids *ids,
                           size_t lead) {
    const moetext_request *q = &p->unit->request;
    const size_t step = routing->position - lead; /* wraps around in a prompt, to a large number */
    const int wrote = step < ids->length && strncmp(routing->layer, "decoder.", 8) == 0;
    const moetext_routing one = { .user = q->user,
                                  .begin = p->begin,
                                  .routing = routing,
                                  .written = wrote ? ids->data[step] : -1 };
    if (q->routing && !p->unit->dropped) q->routing(t->user, &one);
}

static void second_routing(void *user, const moe_routing *routing) {
    const look *l = routing->user;
    if (l->routed) report_routing(user, l->part, routing, &l->of->tokens.ids, l->lead);
}

static void second_done(void *user, const moe_result *result) {
    look *l = result->user;
    text_job *job = &l->part->job;
    (void)user;
    if (!result->status) return;
    l->failed = 1;
    if (!l->routed || job->failed) return;
    job->failed = 1;
    job->status = result->status;
    snprintf(job->note, sizeof job->note, "no routing: %.200s", result->message);
}

/* Return the number of decoder steps for the prompt or the language tag of a part. */
static size_t lead_of(const moetext *t, const part *p) {
    const moe_model *engine = t->stream.front->model;
    const size_t given = p->job.prompt.length ? p->job.prompt.length : p->job.source_ids.length;
    const size_t tag = !t->raw && text_meta_int(engine, "target.tag", 0);
    return tag + (moe_model_prompted(engine) && given ? given - 1 : 0);
}

/* Schedule scoring of a part's hypothesis k, or if `back` is 1, of the source given that hypothesis. */
static moe_status add_look(moetext *t, part *p, size_t k, int back, moe_error *error) {
    const hypothesis *h = &p->found.each[k];
    moe_status status = text_reserve(&t->looks, &t->look_capacity, t->n_looks + 1, sizeof *t->looks, error);
    if (status) return status;
    look *l = &t->looks[t->n_looks++];
    if (t->n_looks > t->looks_made) *l = (look){ .failed = 1 }, t->looks_made = t->n_looks;
    const size_t n = t->aligns && !p->job.prompt.length ? p->job.source_ids.length * h->tokens.ids.length : 0;
    if (n) status = text_reserve(&l->weights, &l->capacity, n, sizeof *l->weights, error);
    *l = (look){ .part = p,
                 .of = h,
                 .back = back,
                 .linked = n > 0 && !(back && p->unit->source_tag < 0),
                 .routed = p->unit->request.routing && t->settings.routing > 0 && !k && !back,
                 .lead = lead_of(t, p),
                 .weights = l->weights,
                 .capacity = l->capacity };
    l->failed = !l->linked && !l->routed;
    return status;
}

/* Schedule scoring of all hypotheses of the waiting parts, in both directions for alignment. */
static moe_status make_looks(moetext *t, moe_error *error) {
    moe_status status = MOE_OK;
    t->n_looks = t->next_look = 0;
    for (part *p = t->first_waiting; p; p = p->next_waiting)
        for (size_t k = 0; k < p->found.n; k++)
            for (int back = 0; back <= t->aligns && !status; back++) status = add_look(t, p, k, back, error);
    return status;
}

static void part_done(moetext *t, part *p);

/* Observe the waiting parts and finish them. */
static moe_status observe(moetext *t, moe_error *error) {
    moe_error e;
    const moe_status made = make_looks(t, &e);
    if (made) t->n_looks = 0; /* still run the session, because all ranks must run it */
    moe_status status = moe_translate(t->second, second_pull, second_done, t, &e);
    if (!status) status = made;
    if (status && status != MOE_ERROR_MEMORY) return error ? *error = e, status : status;
    const look *l = t->looks;
    part *next = t->first_waiting;
    t->first_waiting = NULL;
    t->waiting = 0;
    for (part *p = next; p; p = next) {
        moe_status linked = status;
        next = p->next_waiting;
        for (size_t k = 0; k < p->found.n && !status; k++, l += 1 + t->aligns)
            if (!linked && t->aligns) linked = link_words(t, p, &p->found.each[k], l, l + 1);
        if (linked) p->unit->lost = 1;
        part_done(t, p);
    }
    return MOE_OK;
}

/* Observe the waiting parts now, unless there are several ranks, which do so together after the last text. */
static moe_status observe_waiting(moetext *t, moe_error *error) {
    return t->first_waiting && !t->settings.wire ? observe(t, error) : MOE_OK;
}

/* Queue a part for the second session, which runs when the queued parts fill a batch. */
static moe_status wait_for_second(moetext *t, part *p, moe_error *error) {
    if (t->first_waiting) t->last_waiting->next_waiting = p;
    else t->first_waiting = p;
    t->last_waiting = p;
    t->waiting += p->found.n;
    return t->waiting < t->second_batch ? MOE_OK : observe_waiting(t, error);
}

/* Return 1 if the second session observes a translated part. */
static int is_observed(const moetext *t, const part *p) {
    return t->second && p->found.n && p->unit->request.task != MOETEXT_ANSWER &&
           (t->aligns || p->unit->request.routing);
}

/* ==== 4. Results ======================================================================================== */

static moe_status add_ids(sequence *s, const text_ids *ids) {
    return text_ids_append(&s->ids, ids->data, ids->length, NULL);
}

/* Record the end of a part. */
static moe_status add_end(sequence *s) {
    return text_add(&s->ends, &s->n_ends, &s->end_capacity, &s->ids.length, 1, sizeof *s->ends, NULL);
}

/* Append a hypothesis, but not the list of its part ends. */
static moe_status join(hypothesis *to, const hypothesis *more) {
    moetext_hypothesis *sums = &to->sums;
    const size_t links = sums->n_links;
    sums->score += more->sums.score;
    sums->logprob += more->sums.logprob;
    sums->reverse += more->sums.reverse;
    sums->finished &= more->sums.finished;
    sums->looped |= more->sums.looped;
    moe_status status = text_add(&to->links, &sums->n_links, &to->link_capacity, more->links, more->sums.n_links,
                                 sizeof *to->links, NULL);
    for (size_t i = links; i < sums->n_links; i++)
        to->links[i].target_begin += to->text.length, to->links[i].target_end += to->text.length;
    text_append(&to->text, more->text.data, more->text.length);
    if (!status) status = add_ids(&to->tokens, &more->tokens.ids);
    if (!status) status = add_logprobs(to, more->logprobs, more->sums.n_logprobs, NULL);
    return status || !to->text.failed ? status : MOE_ERROR_MEMORY;
}

static int has_text(const part *p) {
    for (size_t k = 0; k < p->found.n; k++)
        if (p->found.each[k].text.length) return 1;
    return 0;
}

/* Append a part's hypothesis k, or its last one if it has fewer, to the text's hypothesis k. */
static moe_status join_hypothesis(unit *u, const part *p, size_t k) {
    hypothesis *h = &u->joined.each[k];
    if (*p->joint == ' ') {
        if (h->text.length > h->line && has_text(p)) text_stream_join(&u->before->job, &h->text);
    } else {
        text_append_string(&h->text, p->joint);
        h->line = h->text.length;
    }
    const size_t last = p->found.n - 1;
    const moe_status status = p->found.n ? join(h, &p->found.each[k < last ? k : last]) : MOE_OK;
    return status ? status : add_end(&h->tokens);
}

/* Extend a text to `n` hypotheses. New hypotheses are copies of the last one. */
static moe_status widen(unit *u, size_t n) {
    moe_status status = MOE_OK;
    while (u->joined.n < n && !status) {
        hypothesis *h = add_hypothesis(&u->joined, NULL);
        if (!h) return MOE_ERROR_MEMORY;
        if (u->joined.n == 1) continue;
        const hypothesis *last = h - 1;
        h->line = last->line;
        status = join(h, last);
        if (!status)
            status = text_add(&h->tokens.ends, &h->tokens.n_ends, &h->tokens.end_capacity, last->tokens.ends,
                              last->tokens.n_ends, sizeof *h->tokens.ends, NULL);
    }
    return status;
}

void text_notes_clear(text_notes *notes) {
    text_clear(&notes->messages);
    notes->n = 0;
}

moe_status text_notes_add(text_notes *notes, size_t of, moe_status status) {
    const moetext_note note = { .part = of, .status = status };
    text_append(&notes->messages, "", 1);
    if (notes->messages.failed) return MOE_ERROR_MEMORY;
    return text_add(&notes->each, &notes->n, &notes->capacity, &note, 1, sizeof note, NULL);
}

void text_notes_give(text_notes *notes, moetext_result *r) {
    const char *message = notes->messages.data;
    for (size_t i = 0; i < notes->n; i++, message += strlen(message) + 1) notes->each[i].message = message;
    r->notes = notes->each;
    r->n_notes = notes->n;
}

void text_notes_free(text_notes *notes) {
    free(notes->each);
    text_bytes_free(&notes->messages);
}

/* Add a note with the remark on a part, or the reason why the part failed. */
static moe_status note_part(unit *u, const part *p) {
    const text_job *job = &p->job;
    const hypothesis *h = p->found.each;
    const int cut = p->found.n && !h->sums.finished && !job->cut && !job->failed && u->request.task != MOETEXT_SCORE;
    if (!job->failed && !job->cut && !job->noted && !cut) return MOE_OK;
    text_append_string(&u->notes.messages, job->note);
    if (cut)
        text_printf(&u->notes.messages, "%sthe translation was cut after %zu tokens", *job->note ? "; " : "",
                    h->tokens.ids.length);
    return text_notes_add(&u->notes, u->parts - 1, job->failed ? job->status : MOE_OK);
}

/* Add the match of a part to its text's. */
static moe_status match_part(unit *u, const part *p) {
    const text_match *m = &p->job.match;
    const moetext_match match = { u->parts - 1, (moetext_recall)m->kind, m->similarity, m->source, m->target };
    if (!m->kind || (m->kind == TEXT_MATCH_FUZZY && !p->found.n)) return MOE_OK;
    return text_add(&u->matches, &u->n_matches, &u->match_capacity, &match, 1, sizeof match, NULL);
}

/* Add the terms in a part to its text's. */
static moe_status add_terms(unit *u, const part *p) {
    const text_rules *rules = p->job.options.rules;
    const text_ids *uses = &p->job.term_uses;
    moe_status status = MOE_OK;
    for (size_t i = 0; i < uses->length && !status; i++) {
        const text_term *term = text_glossary_term(text_rules_glossary(rules), (size_t)uses->data[i] / 2);
        const moetext_term_use one = { u->parts - 1, term->source, term->target, uses->data[i] % 2 };
        status = text_add(&u->terms, &u->n_terms, &u->term_capacity, &one, 1, sizeof one, NULL);
    }
    return status;
}

/* Return MOETEXT_CUT, MOETEXT_TRUNCATED and MOETEXT_KEPT of a part. */
static unsigned flags_of(const unit *u, const part *p) {
    const text_job *job = &p->job;
    const int cut = p->found.n && !p->found.each->sums.finished && u->request.task != MOETEXT_SCORE;
    return (cut ? MOETEXT_CUT : 0u) | (!job->cut ? 0u : text_job_keeps_source(job) ? MOETEXT_KEPT : MOETEXT_TRUNCATED);
}

/* Describe the translation of a part that has been joined. */
static moe_status add_piece(unit *u, const part *p) {
    const hypothesis *all = u->joined.each, *own = p->found.n ? p->found.each : NULL;
    const size_t length = own ? own->text.length : 0;
    const moetext_part piece = { .begin = all->text.length - length,
                                 .end = all->text.length,
                                 .logprobs_end = all->sums.n_logprobs,
                                 .logprob = own ? own->sums.logprob : 0,
                                 .reverse = own ? own->sums.reverse : 0,
                                 .looped = own ? own->sums.looped : 0,
                                 .flags = flags_of(u, p) | (p->job.blank ? MOETEXT_BLANK : 0u) };
    return text_add(&u->pieces, &u->n_pieces, &u->piece_capacity, &piece, 1, sizeof piece, NULL);
}

static void describe_part(unit *u, const part *p) {
    const text_job *job = &p->job;
    const int found = p->found.n > 0;
    if (job->failed && !u->status) u->status = job->status;
    u->flags |= flags_of(u, p);
    u->found |= found;
    u->translated += found && !job->blank;
    u->blank += (size_t)(job->blank && (!found || job->verbatim));
}

/* Append a finished part to its text. */
static moe_status join_part(unit *u, const part *p) {
    u->parts++;
    describe_part(u, p);
    moe_status status = note_part(u, p);
    if (!status) status = match_part(u, p);
    if (!status) status = add_terms(u, p);
    if (!status && !p->job.failed) status = add_ids(&u->source, &p->job.source_ids);
    if (!status) status = add_end(&u->source);
    if (!status) status = widen(u, p->found.n ? p->found.n : 1);
    for (size_t k = 0; k < u->joined.n && !status; k++) status = join_hypothesis(u, p, k);
    return status ? status : add_piece(u, p);
}

/* Set the status, flags and messages of a result. The message is the first failure, else the first remark. Return 0 if
 * out of memory. */
static int describe(moetext *t, unit *u, moetext_result *r) {
    size_t i = 0;
    r->status = u->status;
    r->flags = u->flags;
    if (u->parts > 1) r->flags |= MOETEXT_SPLIT;
    if (r->status && u->translated) r->flags |= MOETEXT_INCOMPLETE;
    if (u->blank == u->parts) r->flags |= MOETEXT_BLANK;
    text_notes_give(&u->notes, r);
    while (i < r->n_notes && !r->notes[i].status) i++;
    if (i == r->n_notes) i = 0;
    text_clear(&t->message);
    if (r->n_notes && u->parts > 1) text_printf(&t->message, "part %zu of %zu: ", r->notes[i].part + 1, u->parts);
    text_append_string(&t->message, r->n_notes ? r->notes[i].message : "");
    r->message = t->message.data;
    return !t->message.failed;
}

static void refuse(const moetext *t, const moetext_request *q, moe_status status, const char *message) {
    const moetext_result r = { .user = q->user, .status = status, .message = message };
    t->done(t->user, &r);
}

static const char AUTO[] = "auto"; /* represents a source language that must be detected */

/* Return the code of a request's language, of the option, or of a tag; "" if unknown. */
static const char *code_of(const moetext *t, const char *given, const char *option, int32_t tag) {
    if (given && strcmp(given, AUTO) != 0) return given;
    for (size_t i = 0; tag >= 0 && i < t->model->n_languages; i++)
        if (t->model->tags[i] == tag) return t->model->languages[i];
    return strcmp(option, AUTO) != 0 ? option : "";
}

/* Deliver the result of a text after joining all its parts. */
static void deliver(moetext *t, unit *u) {
    moetext_result r = { .user = u->request.user,
                         .n_parts = u->parts,
                         .model = t->model,
                         .model_path = t->model->path,
                         .n_matches = u->n_matches,
                         .matches = u->matches,
                         .n_terms = u->n_terms,
                         .terms = u->terms,
                         .source_language = code_of(t, u->request.source, t->settings.source, u->source_tag),
                         .target_language = code_of(t, u->request.target, t->settings.target, u->target_tag) };
    const int described = !u->lost && describe(t, u, &r);
    const size_t n = u->found || r.flags & MOETEXT_BLANK ? u->joined.n : 0;
    const int lost =
        !described || text_reserve(&t->hypotheses, &t->hypothesis_capacity, n, sizeof *t->hypotheses, NULL);
    for (size_t k = 0; k < n && !lost && !u->dropped; k++) {
        const hypothesis *h = &u->joined.each[k];
        moetext_hypothesis *out = &t->hypotheses[k];
        *out = h->sums;
        out->text = h->text.data, out->length = h->text.length;
        out->ids = h->tokens.ids.data, out->n_ids = h->tokens.ids.length;
        out->token_logprobs = h->logprobs;
        out->links = h->links;
        out->part_ends = h->tokens.ends;
    }
    r.source_ids = u->source.ids.data;
    r.n_source_ids = u->source.ids.length;
    r.part_ends = u->source.ends;
    r.hypotheses = t->hypotheses;
    r.n_hypotheses = n;
    r.parts = n ? u->pieces : NULL;
    if (u->dropped) refuse(t, &u->request, MOE_ERROR_CANCELLED, "cancelled by the caller");
    else if (lost) refuse(t, &u->request, MOE_ERROR_MEMORY, "out of memory");
    else t->done(t->user, &r);
    unit_reuse(t, u);
}

/* Set *out to the separator and the partial text of the first part that is not joined, which follows `h`. Return how
 * many bytes of *out are final. */
static size_t show_part(const moetext *t, const unit *u, const part *p, const hypothesis *h, text_bytes *out) {
    enum { SEEN = 16 }; /* the separator depends on this many bytes before it */
    const size_t all = h ? h->text.length : 0, before = all < SEEN ? all : SEEN;
    text_clear(out);
    if (before) text_append(out, h->text.data + all - before, before);
    if (*p->joint != ' ') text_append_string(out, p->joint);
    else if (h && all > h->line) text_stream_join(&u->before->job, out);
    const size_t joint = out->length - before;
    const size_t final = text_job_show(t->stream.front, &p->job, out);
    if (out->length == before + joint) out->length = before;
    if (before) memmove(out->data, out->data + before, out->length -= before);
    return final ? joint + final : 0;
}

/* Pass new output of a text to the caller's partial function. */
static void show(moetext *t, unit *u) {
    const part *p = u->first;
    const hypothesis *h = u->joined.n ? u->joined.each : NULL;
    const size_t all = h ? h->text.length : 0;
    size_t final = 0, known = u->shown > all ? u->shown - all : 0; /* bytes of the current part */
    if (!u->request.partial || u->dropped || u->lost) return;
    text_clear(&t->news);
    text_clear(&t->begun);
    if (u->shown < all) text_append(&t->news, h->text.data + u->shown, all - u->shown);
    if (p && p->job.partial.text.length) final = show_part(t, u, p, h, &t->begun);
    if (final > known) text_append(&t->news, t->begun.data + known, final - known), known = final;
    text_append(&t->news, "", 0);
    text_append(&t->begun, "", 0);
    if (t->news.failed || t->begun.failed || (!t->news.length && known >= t->begun.length)) return;
    u->shown += t->news.length;
    const moetext_partial partial = { .user = u->request.user,
                                      .text = t->news.data,
                                      .length = t->news.length,
                                      .after = t->begun.data + known,
                                      .after_length = t->begun.length - known,
                                      .n_ids = (h ? h->tokens.ids.length : 0) + (p ? p->job.partial.ids.length : 0) };
    u->request.partial(t->user, &partial);
}

/* Finish a part, and join the finished parts up to the first unfinished one. */
static void part_done(moetext *t, part *p) {
    unit *u = p->unit;
    const part *first = u->first;
    p->finished = 1;
    while ((p = u->first) && p->finished) {
        if (!(u->first = p->next)) u->last = NULL;
        u->kept--;
        if (!u->lost && !u->dropped && join_part(u, p)) u->lost = 1;
        part_reuse(t, u->before);
        u->before = p;
    }
    if (!u->first && u->closed) deliver(t, u);
    else if (u->first != first) show(t, u);
}

/* ==== 5. Stream ========================================================================================= */

static moetext *translator_of(text_stream *stream) { return (moetext *)(void *)stream; }

/* Return 1 if texts need a source language, also for the user's own prompt. */
static int needs_source(const moetext *t) {
    return moetext_model_needs_source(t->model) ||
           (!t->several && text_prompt_names_source(t->model->front.model, &t->prompt));
}

/* Set the tags of a text's languages. The default languages are those of the options. The source language is detected
 * only for models that need it; the other models are trained without it. */
static moe_status tags_of(moetext *t, const moetext_request *q, int32_t *source_tag, int32_t *target_tag,
                          moe_error *error) {
    const int whole = t->raw || (t->reads == TEXT_FORM_IDS && moe_model_prompted(t->model->front.model));
    const int find = q->source ? strcmp(q->source, AUTO) == 0 : t->auto_source;
    moe_status status = find ? text_translator_detects(t, error) : MOE_OK;
    *source_tag = find ? -1 : t->source_tag;
    *target_tag = t->target_tag;
    if (find && !status && t->detector) *source_tag = text_detect_tag(t->detector, q->text, q->length);
    if (find && !status && t->detector && *source_tag < 0) status = text_out_of_memory(error);
    else if (!find && q->source) status = text_language(t->stream.front, q->source, 0, source_tag, error);
    if (!status && q->target) status = text_language(t->stream.front, q->target, 1, target_tag, error);
    if (status || !t->model->n_languages || whole || t->language) return status;
    if (*target_tag < 0)
        return text_fail(error, MOE_ERROR_ARGUMENT, "target",
                         "no target language: set the option target, or give one with the text");
    if (*source_tag < 0 && needs_source(t))
        return text_fail(error, MOE_ERROR_ARGUMENT, "source",
                         "this model requires a source language: set the option source, or give one with the text");
    return MOE_OK;
}

/* Prepare the caller's draft or, without one, a draft of the fast model. */
static void begin_draft(moetext *t, unit *u) {
    const moetext_request *q = &u->request;
    const moe_span text = { q->text ? q->text : "", q->text ? q->length : 0 };
    moe_span draft = { q->draft ? q->draft : "", q->draft ? q->draft_length : 0 };
    if (!q->draft && t->drafter && q->task == MOETEXT_TRANSLATE) {
        const int64_t offsets[] = { 0, (int64_t)text.length };
        moetext_rows found;
        if (moetext_translate_rows(t->drafter, text.data, offsets, 1, NULL, q->source, q->target, &found, NULL) ==
                MOE_OK &&
            (u->drafted = malloc((size_t)found.offsets[1] + 1)) != NULL) {
            draft = (moe_span){ u->drafted, (size_t)found.offsets[1] };
            if (draft.length) memcpy(u->drafted, found.bytes, draft.length);
        }
    }
    u->draft = text_draft_begin(draft, text);
}

/* Begin a text. Return NULL if the text is refused. */
static unit *begin_text(moetext *t, const moetext_request *q) {
    int32_t source_tag = -1, target_tag = -1;
    const int answers = q->task == MOETEXT_ANSWER;
    moe_error e;
    unit *u = NULL;
    if (moe_request_dropped(q->drop)) refuse(t, q, MOE_ERROR_CANCELLED, "cancelled by the caller");
    else if (!answers && tags_of(t, q, &source_tag, &target_tag, &e)) refuse(t, q, e.code, e.message);
    else if ((unsigned)q->task > MOETEXT_ANSWER) refuse(t, q, MOE_ERROR_ARGUMENT, "unknown task");
    else if (t->language && q->task != MOETEXT_SCORE)
        refuse(t, q, MOE_ERROR_UNSUPPORTED, "a language model can only score texts");
    else if (q->routing && t->settings.routing <= 0)
        refuse(t, q, MOE_ERROR_ARGUMENT, "routing requires the option routing=1");
    else if (q->next_token && t->settings.guided <= 0)
        refuse(t, q, MOE_ERROR_ARGUMENT, "this translator does not support next_token");
    else if (answers && (!t->model->front.prompt || !is_text(t) || !q->ids))
        refuse(t, q, MOE_ERROR_UNSUPPORTED, "this model does not support prompts");
    else if (q->context_length && t->no_context.code) refuse(t, q, t->no_context.code, t->no_context.message);
    else if (q->context_length && !text_is_usable(q->context, q->context_length))
        refuse(t, q, MOE_ERROR_ARGUMENT, "the context is not valid UTF-8 or contains a NUL byte");
    else if (!(u = unit_new(t, q))) refuse(t, q, MOE_ERROR_MEMORY, "out of memory");
    else u->source_tag = source_tag, u->target_tag = target_tag, begin_draft(t, u);
    return u;
}

/* Drop a text. Its parts in progress finish soon. */
static void drop_text(moetext *t, unit *u) {
    u->dropped = 1;
    unit_close(t, u);
    if (!u->first) deliver(t, u);
}

/* Set t->unit to a new text, or to a text that the caller returns again. */
static int next_text(moetext *t, int wait) {
    for (;;) {
        if (atomic_load(&t->cancelled))
            return MOE_PULL_CANCEL; /* checked here, because a text can have millions of empty lines */
        if (t->unit) return MOE_PULL_REQUEST;
        if (wait && observe_waiting(t, &t->stream.trouble)) return MOE_PULL_CANCEL;
        moetext_request q = { 0 };
        const int answer = t->pull(t->user, wait, &q);
        if (answer != MOE_PULL_REQUEST) return answer;
        t->unit = q.place && *q.place ? *q.place : begin_text(t, &q);
        if (t->unit) t->unit->request.routing = q.routing;
        if (t->unit && moe_request_dropped(t->unit->request.drop)) drop_text(t, t->unit);
    }
}

moetext_memory text_no_memory = { NULL };

moe_status text_memories_find(moetext_memory *const memories[2], moe_span text, const char *source, const char *target,
                              text_match *match, text_bytes *out, moe_error *error) {
    *match = (text_match){ .kind = TEXT_MATCH_NONE };
    for (int i = 0; i < 2; i++) {
        const size_t begin = out->length;
        text_match found;
        if (!memories[i]) continue;
        const moe_status status = text_recall_find(memories[i]->recall, text, source, target, &found, out, error);
        if (status) return status;
        if (found.kind > match->kind || (found.kind == match->kind && found.similarity > match->similarity)) {
            if (begin) memmove(out->data, out->data + begin, out->length -= begin);
            *match = found;
        } else out->length = begin;
    }
    return MOE_OK;
}

/* Search the memory of the text, then that of the option. */
static moe_status stream_recall(text_stream *stream, moe_span text, text_match *match, text_bytes *out,
                                moe_error *error) {
    const moetext *t = translator_of(stream);
    /* not t->unit, which is NULL after the last part */
    const unit *u = (const unit *)(const void *)((const char *)stream->at - offsetof(unit, cursor));
    moetext_memory *const memories[] = { u->request.memory, t->memory };
    const char *source = code_of(t, u->request.source, t->settings.source, u->source_tag);
    const char *target = code_of(t, u->request.target, t->settings.target, u->target_tag);
    return text_memories_find(memories, text, source, target, match, out, error);
}

/* Select the text of the next part. The current text continues until its end, unless it alternates with others. */
static int stream_turn(text_stream *stream, int wait) {
    moetext *t = translator_of(stream);
    if (t->unit && moe_request_dropped(t->unit->request.drop)) drop_text(t, t->unit);
    else if (t->unit && t->unit->request.place) t->unit = NULL;
    const int answer = next_text(t, wait);
    if (answer != MOE_PULL_REQUEST) return answer;
    const unit *u = t->unit;
    /* At the limit, wait for the first unfinished part. If only the second session has work, run that session now. */
    if (u->kept >= t->most_parts && wait && observe_waiting(t, &stream->trouble)) return MOE_PULL_CANCEL;
    if (u->kept >= t->most_parts) return MOE_PULL_LATER;
    const int plain = !u->request.task;
    stream->at = &t->unit->cursor;
    stream->split = plain ? t->split : 0;
    stream->options.begins = u->request.task == MOETEXT_PREFIX;
    stream->options.pairs = stream->options.begins || (u->request.task == MOETEXT_SCORE && !t->language);
    stream->options.prompt = u->request.context_length ? &t->in_context : &t->prompt;
    stream->options.rules = !plain ? NULL : u->request.glossary ? u->request.glossary->rules : t->rules;
    stream->options.quick = plain && u->request.quick;
    stream->options.variants = plain && t->variants && !u->request.quick;
    const int recalls = u->request.memory != &text_no_memory && (t->memory || u->request.memory);
    stream->recall = plain && is_text(t) && recalls ? stream_recall : NULL;
    stream->options.lower_case = plain && is_text(t) && t->settings.capitals != 0;
    return MOE_PULL_REQUEST;
}

/* Return how many bytes to take: the next line of `line` bytes, or all lines of an ICU message (text_message_lines) if
 * its texts can be translated. Otherwise, set *kept for each line of the message. */
static size_t next_lines(const text_stream *s, unit *u, const char *begin, size_t length, size_t line, int *kept) {
    if (*kept || !text_keeps_spans(&s->options)) return line;
    int open;
    const size_t all = text_message_lines(begin, length, line, &open);
    if (all <= line) return line;
    if (s->split && !open && text_message_is(begin, all)) return all;
    u->message_end = u->at + all;
    *kept = 1;
    return line;
}

/* Take a whole text of several lines if the memory has its translation. */
static int recalls_whole(text_stream *stream, unit *u, text_line *line) {
    const moetext_request *q = &u->request;
    if (!stream->recall || q->task || u->at || q->length > TEXT_RECALL_BYTES || !q->length ||
        !memchr(q->text, '\n', q->length) || !text_stream_recalls(stream, (moe_span){ q->text, q->length }, 1))
        return 0;
    *line = (text_line){ .data = q->text, .length = q->length, .recalled = 1 };
    u->at = q->length, u->last_line = 1, u->next_joint = "";
    return 1;
}

/* Get the next line of the current text. If the task is not MOETEXT_TRANSLATE, the text is one line. */
static void stream_next(text_stream *stream, text_line *line) {
    unit *u = translator_of(stream)->unit;
    const moetext_request *q = &u->request;
    if (recalls_whole(stream, u, line)) return;
    const char *begin = q->text ? q->text + u->at : "";
    size_t length = q->length - u->at;
    const char *end = length && !q->task ? memchr(begin, '\n', length) : NULL;
    int kept = u->at < u->message_end;
    if (end) length = next_lines(stream, u, begin, length, (size_t)(end - begin), &kept);
    if (u->at + length == q->length) end = NULL;
    const int carriage = end && length && begin[length - 1] == '\r';
    *line = (text_line){ .data = begin, .length = length - (size_t)carriage, .kept = kept };
    line->too_long = line->length > TEXT_MAX_LINE;
    if (line->too_long) line->length = TEXT_MAX_LINE;
    if (q->task == MOETEXT_ANSWER) {
        line->prompt = q->ids, line->n_prompt = q->n_ids;
    } else if (q->task && !translator_of(stream)->language) {
        line->given = q->given ? q->given : "";
        line->given_length = q->given ? q->given_length : 0;
    }
    u->at += length + (size_t)(end != NULL);
    u->line_draft = text_draft_next(&u->draft);
    u->last_line = !end;
    u->next_joint = !end ? "" : carriage ? "\r\n" : "\n";
}

/* Find the beginning of the last *lines non-blank lines, within TEXT_PROMPT_BACK bytes before `end`, and subtract their
 * number from *lines. */
static size_t last_lines(const char *text, size_t end, size_t *lines) {
    size_t begin = end;
    for (size_t at = begin; at && *lines; begin = at) {
        for (at--; at && text[at - 1] != '\n' && end - at <= TEXT_PROMPT_BACK;) at--;
        if (end - at > TEXT_PROMPT_BACK) break;
        *lines -= text_trimmed(text + at, begin - at, " \t\r\n").length > 0;
    }
    return begin;
}

/* Append the non-blank lines of a text, or nothing if it is not UTF-8. */
static void append_lines(const char *text, size_t length, text_bytes *out) {
    if (!length || text_utf8_valid(text, length) < length) return;
    for (size_t at = 0, next; at < length; at = next) {
        const char *end = memchr(text + at, '\n', length - at);
        size_t n = (end ? (size_t)(end - text) : length) - at;
        next = at + n + (end != NULL);
        n -= (size_t)(n && text[at + n - 1] == '\r');
        if (!text_trimmed(text + at, n, " \t\r\n").length) continue;
        text_append(out, text + at, n);
        text_append(out, "\n", 1);
    }
}

/* Return the number of non-blank lines before a line that begins at `end`: the last `most` of the context, and all of
 * the text. */
static size_t earlier_lines(unit *u, size_t end, size_t most) {
    const moetext_request *q = &u->request;
    size_t left = most;
    if (!u->counted && q->context_length) last_lines(q->context, q->context_length, &left), u->earlier = most - left;
    while (u->counted < end) {
        const char *begin = q->text + u->counted, *stop = memchr(begin, '\n', end - u->counted);
        const size_t bytes = stop ? (size_t)(stop + 1 - begin) : end - u->counted;
        u->earlier += text_trimmed(begin, bytes, " \t\r\n").length > 0;
        u->counted += bytes;
    }
    return u->earlier;
}

/* Append the last lines of the context, then the earlier lines of the text: at most `most` lines. */
static void stream_before(text_stream *stream, const text_line *line, size_t most, text_bytes *out) {
    unit *u = translator_of(stream)->unit;
    const moetext_request *q = &u->request;
    const size_t end = q->text ? (size_t)(line->data - q->text) : 0, all = earlier_lines(u, end, most);
    size_t lines = all - text_prompt_first(all, most);
    const size_t own = last_lines(q->text, end, &lines);
    const size_t other = q->context_length ? last_lines(q->context, q->context_length, &lines) : 0;
    if (q->context_length) append_lines(q->context + other, q->context_length - other, out);
    if (end > own) append_lines(q->text + own, end - own, out);
}

static text_job *stream_add(text_stream *stream, const text_line *line, int more) {
    moetext *t = translator_of(stream);
    unit *u = t->unit;
    part *p = part_new(t, u, u->last);
    if (!p) { /* end the text; other parts may be in progress */
        u->lost = 1;
        unit_close(t, u);
        if (!u->first) deliver(t, u);
        return NULL;
    }
    p->joint = u->joint;
    p->draft = u->line_draft;
    p->begin = (size_t)(line->data - (u->request.text ? u->request.text : line->data));
    p->job.more = more;
    u->joint = more ? " " : u->next_joint;
    if (!more && u->last_line) unit_close(t, u);
    return &p->job;
}

static text_job *stream_insert(text_stream *stream, text_job *before, size_t at) {
    part *first = (part *)(void *)before, *p = part_new(translator_of(stream), first->unit, first);
    if (!p) return NULL;
    p->joint = " ";
    p->draft = first->draft;
    p->begin = first->begin + at;
    return &p->job;
}

/* Give a request the tokens of its draft. For a prompted model the text is the default, since the model may copy names,
 * numbers and code. Texts that cannot be encoded are ignored. */
static void add_draft(const moetext *t, text_job *job, moe_span draft, moe_request *request) {
    const text_front targets = text_front_of_targets(&t->model->front);
    job->draft_ids.length = 0;
    if (!draft.length) draft = (moe_span){ job->shown.data, job->shown.length };
    if ((t->beam > 1 && !job->options.quick) || !draft.length || !is_text(t)) return;
    if (text_utf8_valid(draft.data, draft.length) < draft.length || memchr(draft.data, '\0', draft.length)) return;
    if (text_encode(&targets, draft.data, draft.length, &job->draft_ids, NULL)) return;
    request->draft = job->draft_ids.data;
    request->n_draft = job->draft_ids.length;
}

static void stream_request(text_stream *stream, text_job *job, moe_request *request) {
    const moetext *t = translator_of(stream);
    const unit *u = ((const part *)(const void *)job)->unit;
    request->drop = u->request.drop;
    if (t->language) {
        request->target = ids_or_nothing(&job->source_ids);
        request->n_target = job->source_ids.length;
        return;
    }
    request->source = ids_or_nothing(&job->source_ids);
    request->n_source = job->source_ids.length;
    request->source_tag = u->source_tag;
    request->target_tag = u->target_tag;
    request->raw = t->raw;
    request->force = t->settings.force;
    if (job->options.quick) request->beam = 1;
    add_draft(t, job, ((const part *)(const void *)job)->draft, request);
    if (u->request.partial) request->partial = text_stream_partial;
    if (u->request.task == MOETEXT_ANSWER) request->limit = u->request.limit, request->sampling = u->request.sampling;
    if (request->sampling) request->repetition_penalty = request->sampling->repetition_penalty;
    if (!u->request.task || u->request.task == MOETEXT_ANSWER) return;
    request->target = ids_or_nothing(&job->target_ids);
    request->n_target = job->target_ids.length;
    request->prefix = u->request.task == MOETEXT_PREFIX;
    request->n_target -= job->attempt.held;
    request->n_target -= (size_t)ends_raw(t, &job->target_ids);
    if (t->raw) request->force = request->target_tag = -1; /* a raw target includes all tokens */
}

static void stream_partial(text_stream *stream, text_job *job) {
    part *p = (part *)(void *)job;
    if (p == p->unit->first) show(translator_of(stream), p->unit);
}

static void stream_finish(text_stream *stream, text_job *job, const moe_result *result) {
    moetext *t = translator_of(stream);
    part *p = (part *)(void *)job;
    unit *u = p->unit;
    moe_error *trouble = &stream->trouble;
    t->under_way--;
    if (result && !job->failed ? part_keep(t, p, result, trouble)
        : job->verbatim        ? part_keep_source(p, trouble)
                               : MOE_OK) {
        if (trouble->code != MOE_ERROR_MEMORY) return;
        trouble->code = MOE_OK;
        u->lost = 1;
        p->found.n = 0;
    }
    if (job->failed && job->status == MOE_ERROR_MEMORY) u->lost = 1;
    if (job->failed && job->status == MOE_ERROR_CANCELLED) u->dropped = 1;
    if (result && is_observed(t, p)) wait_for_second(t, p, trouble);
    else part_done(t, p);
}

/* Begin a call that uses the translator until `leave`. */
static moe_status enter(moetext *t, moe_error *error) {
    if (!atomic_exchange(&t->busy, 1)) return MOE_OK;
    return text_fail(error, MOE_ERROR_ARGUMENT, "translator",
                     "the translator is in use by another call; create one translator per thread");
}

static moe_status leave(moetext *t, moe_status status) {
    atomic_store(&t->busy, 0);
    return status;
}

static moe_status translate(moetext *t, moetext_pull_fn pull, moetext_done_fn done, void *user, moe_error *error) {
    if (t->several) return t->model->ops->translate(t->several, pull, done, user, error);
    t->pull = pull;
    t->done = done;
    t->user = user;
    t->unit = NULL;
    t->under_way = 0;
    t->stream.trouble.code = MOE_OK;
    moe_status status = text_stream_run(&t->stream, t->session, error);
    if (!status && (t->first_waiting || (t->second && t->settings.wire))) status = observe(t, error);
    t->first_waiting = NULL;
    t->waiting = 0;
    while (t->units) { /* texts that are in progress or wait for their next turn */
        unit *u = t->units;
        unit_close(t, u);
        if (!status) refuse(t, &u->request, MOE_ERROR_CANCELLED, "cancelled by the caller");
        unit_reuse(t, u);
    }
    if (status == MOE_ERROR_CANCELLED) moetext_uncancel(t);
    return status;
}

moe_status moetext_translate(moetext *t, moetext_pull_fn pull, moetext_done_fn done, void *user, moe_error *error) {
    const moe_status status = enter(t, error);
    return status ? status : leave(t, translate(t, pull, done, user, error));
}

/* ==== 6. Rows =========================================================================================== */

static int is_valid(const rows *r, size_t i) { return !r->valid || (r->valid[i / 8] >> i % 8 & 1); }

static int rows_pull(void *user, int wait, moetext_request *request) {
    rows *r = user;
    (void)wait;
    while (r->next < r->n && !is_valid(r, r->next)) r->next++;
    if (r->next == r->n) return MOE_PULL_END;
    const size_t i = r->next++;
    request->text = r->texts ? r->texts[i] : r->bytes + r->offsets[i];
    request->length = r->texts ? strlen(r->texts[i]) : (size_t)(r->offsets[i + 1] - r->offsets[i]);
    request->source = r->source;
    request->target = r->target;
    request->user = &r->rows[i];
    return MOE_PULL_REQUEST;
}

static void rows_done(void *user, const moetext_result *result) {
    rows *r = user;
    row *at = result->user;
    const size_t i = (size_t)(at - r->rows);
    r->statuses_out[i] = (uint8_t)result->status;
    *at = (row){ .begin = r->text.length };
    if (result->n_hypotheses) {
        r->scores_out[i] = result->hypotheses[0].score;
        at->length = result->hypotheses[0].length;
        text_append(&r->text, result->hypotheses[0].text, at->length);
    }
    text_append(&r->text, "", 1);
    if (*result->message) {
        at->message = r->messages.length;
        text_append(&r->messages, result->message, strlen(result->message) + 1);
    }
}

/* Lay out the arrays of `n` rows in one block, which is reused. */
static int rows_reserve(rows *r, size_t n) {
    const size_t each = sizeof(int64_t) + sizeof(row) + 2 * sizeof(char *) + sizeof(float) + 1;
    if (n > SIZE_MAX / each - 1) return 0;
    char *at = text_grown(r->block, &r->capacity, (n + 1) * each, 1);
    if (!at) return 0;
    r->block = at;
    r->offsets_out = (int64_t *)(void *)at, at += (n + 1) * sizeof(int64_t);
    r->rows = (row *)(void *)at, at += n * sizeof(row);
    r->messages_out = (const char **)(void *)at, at += n * sizeof(char *);
    r->strings_out = (const char **)(void *)at, at += n * sizeof(char *);
    r->scores_out = (float *)(void *)at, at += n * sizeof(float);
    r->statuses_out = (uint8_t *)at;
    return 1;
}

/* Put the rows in order. */
static moe_status rows_collect(rows *r, moetext_rows *out, moe_error *error) {
    if (r->text.failed || r->messages.failed) return text_out_of_memory(error);
    text_clear(&r->bytes_out);
    for (size_t i = 0; i < r->n; i++) {
        const row *at = &r->rows[i];
        r->offsets_out[i] = (int64_t)r->bytes_out.length;
        text_append(&r->bytes_out, r->text.data + at->begin, at->length);
        r->strings_out[i] = r->text.data + at->begin;
        r->messages_out[i] = r->messages.data + at->message;
    }
    text_append(&r->bytes_out, "", 0);
    if (r->bytes_out.failed) return text_out_of_memory(error);
    r->offsets_out[r->n] = (int64_t)r->bytes_out.length;
    *out = (moetext_rows){ r->n,
                           r->bytes_out.data,
                           r->offsets_out,
                           r->statuses_out,
                           r->messages_out,
                           r->scores_out,
                           r->texts ? r->strings_out : NULL };
    return MOE_OK;
}

/* Translate the texts of `given`, in which only the input members are set. */
static moe_status rows_translate(moetext *t, const rows *given, moetext_rows *out, moe_error *error) {
    rows *r = &t->rows;
    moe_error e = { .code = MOE_OK };
    int32_t tags[2];
    const moetext_request first = { .text = "", .source = given->source, .target = given->target };
    moe_status status = t->several ? t->model->ops->check(t->several, given->source, given->target, error)
                                   : tags_of(t, &first, &tags[0], &tags[1], error);
    if (status) return status;
    r->bytes = given->bytes, r->offsets = given->offsets, r->valid = given->valid, r->texts = given->texts;
    r->source = given->source, r->target = given->target;
    r->n = given->n, r->next = 0;
    text_clear(&r->text), text_clear(&r->messages);
    if (!rows_reserve(r, r->n)) return text_out_of_memory(error);
    text_append(&r->text, "", 1);
    text_append(&r->messages, "\0cancelled", sizeof "\0cancelled"); /* message 0 is empty, message 1 "cancelled" */
    for (size_t i = 0; i < r->n; i++) {
        const int given_one = is_valid(r, i);
        r->rows[i] = (row){ .message = given_one ? 1 : 0 };
        r->statuses_out[i] = given_one ? MOE_ERROR_CANCELLED : MOE_OK;
        r->scores_out[i] = 0;
    }
    status = translate(t, rows_pull, rows_done, r, &e);
    if (!status || status == MOE_ERROR_CANCELLED) {
        const moe_status collected = rows_collect(r, out, &e);
        if (collected) status = collected;
    }
    if (status && error) *error = e;
    return status;
}

moe_status moetext_translate_rows(moetext *t, const char *bytes, const int64_t *offsets, size_t n, const uint8_t *valid,
                                  const char *source, const char *target, moetext_rows *out, moe_error *error) {
    for (size_t i = 0; i < n; i++)
        if (offsets[i] < 0 || offsets[i + 1] < offsets[i])
            return text_fail(error, MOE_ERROR_ARGUMENT, "offsets", "the offsets decrease or are negative");
    const rows given = { .bytes = bytes,
                         .offsets = offsets,
                         .valid = valid,
                         .source = source,
                         .target = target,
                         .n = n };
    const moe_status status = enter(t, error);
    return status ? status : leave(t, rows_translate(t, &given, out, error));
}

moe_status moetext_translate_strings(moetext *t, const char *const *texts, size_t n, const char *source,
                                     const char *target, moetext_rows *out, moe_error *error) {
    static const char *const none[1] = { "" };
    const rows given = { .texts = texts ? texts : none, .source = source, .target = target, .n = n };
    const moe_status status = enter(t, error);
    return status ? status : leave(t, rows_translate(t, &given, out, error));
}

static void rows_free(rows *r) {
    free(r->block);
    text_bytes_free(&r->text);
    text_bytes_free(&r->messages);
    text_bytes_free(&r->bytes_out);
}

/* ==== 7. Translators ==================================================================================== */

/* Set the parameters of the second session, which scores the output of the first. */
static moe_status describe_second(moetext *t, const moe_session_params *params, moe_session_params *second,
                                  moe_error *error) {
    moe_session_params p = *params;
    if (t->aligns && !is_text(t))
        return text_fail(error, MOE_ERROR_ARGUMENT, "alignment", "option alignment requires form=text");
    if (t->aligns && t->model->front.vocabulary.count)
        return text_fail(error, MOE_ERROR_UNSUPPORTED, "alignment", "this model does not support word alignment");
    p.beam = p.nbest = 1;
    p.prune = p.coverage_penalty = p.rerank = 0;
    p.rules = MOE_RULES_PAPER;
    p.device = "cpu";
    p.max_constraints = p.min_target = 0;
    p.log = NULL;
    p.next_token = NULL;
    if (t->aligns) p.attention = second_attention;
    if (t->settings.routing > 0) p.routing = second_routing, p.routing_user = t;
    *second = p;
    return MOE_OK;
}

/* Report the routing of a language model, whose texts are scored in the first session. */
static void language_routing(void *user, const moe_routing *routing) {
    const part *p = routing->user;
    report_routing(user, p, routing, &p->job.source_ids, 0);
}

/* Let the caller choose among the next tokens of an answer. */
static int guide(void *user, const moe_next_token *next) {
    const moetext *t = user;
    const moetext_request *q = &((const part *)next->user)->unit->request;
    moe_next_token one = *next;
    one.user = q->user;
    return q->task == MOETEXT_ANSWER && q->next_token ? q->next_token(t->user, &one) : 0;
}

moe_status text_in_step(const moe_wire *wire, moe_status status, moe_error *error) {
    int64_t worst = (int64_t)status;
    if (!wire) return status;
    const moe_status agreed = wire->agree(wire->user, &worst, 1, error);
    if (agreed || status || !worst) return agreed ? agreed : status;
    return text_fail(error, (moe_status)worst, "wire", "another process failed");
}

/* Open one or two sessions within the memory limit; `room` (may be NULL) can refuse them. */
static moe_status open_sessions(moetext *t, moe_session_params *params, text_room_fn room, void *user,
                                moe_error *error) {
    const moe_model *engine = t->model->front.model;
    const size_t n = t->aligns || (t->settings.routing > 0 && !t->language) ? 2 : 1;
    if (t->language && t->settings.routing > 0) params->routing = language_routing, params->routing_user = t;
    if (t->settings.guided > 0) params->next_token = guide, params->next_token_user = t;
    moe_session_params both[2] = { *params };
    text_memory memory = { .limit = t->settings.max_memory,
                           .beside = t->settings.resident ? t->settings.resident : t->model->copied,
                           .nbest = (int)t->nbest,
                           .as_arguments = t->settings.before != NULL };
    moe_status status = n == 2 ? describe_second(t, params, &both[1], error) : MOE_OK;
    if (!status && (memory.limit || room)) status = text_memory_check(engine, both, n, &memory, error);
    if (!status && room) status = room(user, memory.sessions, error);
    status = text_in_step(t->settings.wire, status, error);
    if (!status) status = moe_session_new(engine, &both[0], &t->session, error);
    if (!status && n == 2) {
        t->second_batch = (size_t)both[1].batch;
        status = moe_session_new(engine, &both[1], &t->second, error);
    }
    return status;
}

/* ---- Computed prompts ---- */

static int is_folder(const char *path) {
    struct stat found;
    return stat(path, &found) == 0 && S_ISDIR(found.st_mode);
}

/* Check that the folder of a new file exists, before texts are translated in vain. */
static moe_status check_place(const char *path, moe_error *error) {
    const char *end = strrchr(path, '/');
    char folder[sizeof((moetext *)0)->prompts];
    snprintf(folder, sizeof folder, "%.*s", end ? (int)(end - path) : 0, path);
    if (!folder[0] || is_folder(folder)) return MOE_OK;
    return text_fail(error, MOE_ERROR_IO, "prompt-cache", "cannot write %.160s: its folder does not exist: create it",
                     path);
}

/* Load the prompts of the option prompt-cache. A file that the session cannot use is replaced later. */
static moe_status load_prompts(moetext *t, moe_error *error) {
    const moe_model *engine = t->model->front.model;
    const char *path = t->settings.prompt_cache;
    uint64_t hash = UINT64_C(0xcbf29ce484222325); /* FNV-1a of the weights' checksums */
    struct stat found;
    moe_error e = { 0 };
    if (!*path) return MOE_OK;
    if (t->settings.wire)
        return text_fail(error, MOE_ERROR_UNSUPPORTED, "prompt-cache", "%sprompt-cache requires a single process",
                         t->settings.before ? t->settings.before : "option ");
    for (size_t i = 0; i < moe_model_tensor_count(engine); i++)
        hash = (hash ^ moe_model_tensor(engine, i).checksum) * UINT64_C(0x100000001b3);
    if (is_folder(path)) snprintf(t->prompts, sizeof t->prompts, "%s/%016llx.prompts", path, (unsigned long long)hash);
    else snprintf(t->prompts, sizeof t->prompts, "%s", path);
    if (stat(t->prompts, &found) == 0 && !S_ISREG(found.st_mode))
        return text_fail(error, MOE_ERROR_ARGUMENT, "prompt-cache",
                         "%.160s is not a regular file: name a file or folder for prompts", t->prompts);
    if (stat(t->prompts, &found) == 0 && found.st_size == 0) return MOE_OK; /* to be written */
    moe_status status = moe_session_load_prompts(t->session, t->prompts, &e);
    if (status == MOE_ERROR_IO && stat(t->prompts, &found) != 0)
        return check_place(t->prompts, error); /* no file yet */
    if (status != MOE_ERROR_FORMAT && status != MOE_ERROR_UNSUPPORTED)
        return status ? text_fail(error, status, "prompt-cache", "%s", e.message) : MOE_OK;
    if (status == MOE_ERROR_UNSUPPORTED) t->prompts[0] = '\0'; /* nothing to save */
    char warning[sizeof e.message + 32], *fix = strstr(e.message, ": delete it");
    if (fix) *fix = '\0';
    snprintf(warning, sizeof warning, status == MOE_ERROR_FORMAT ? "%s; it will be replaced" : "no prompt cache: %s",
             e.message);
    if (t->settings.warn) t->settings.warn(NULL, warning);
    return MOE_OK;
}

moe_status moetext_save_prompts(moetext *t, moe_error *error) {
    if (t->several) return t->model->ops->save_prompts(t->several, error);
    const uint64_t sentences = t->prompts[0] ? moe_session_stats(t->session).sentences : t->saved;
    if (sentences == t->saved) return MOE_OK;
    t->saved = sentences;
    return moe_session_save_prompts(t->session, t->prompts, error);
}

/* Return 1 if markup, numbers or terms are protected, which requires text and a search with constraints. */
static int keeps(const moetext *t, const moe_session_params *params) {
    const text_settings *s = &t->settings;
    if (!is_text(t) || t->language || s->scores || (!s->protect && !s->glossary[0]) ||
        (params->rules != MOE_RULES_PAPER && params->rules < MOE_RULES_HF))
        return 0;
    const moe_model *engine = t->model->front.model; /* without this key, each text is a whole prompt */
    return !moe_model_prompted(engine) || moe_model_meta_find(engine, "prompt.prefix") >= 0;
}

static moe_status open_rules(moetext *t, moe_error *error) {
    const text_settings *s = &t->settings;
    const char *glossary = s->terms || *s->glossary ? s->glossary : NULL;
    return text_rules_new(&t->model->front, s->protect != 0, glossary, s->terms, &t->rules, error);
}

/* Open the fast model that makes drafts, with the languages and threads of the translator. */
static moe_status open_drafter(moetext *t, moe_error *error) {
    text_settings s = text_settings_none();
    moetext_model *m;
    s.threads = t->settings.threads;
    memcpy(s.target, t->settings.target, sizeof s.target);
    memcpy(s.source, t->settings.source, sizeof s.source);
    const moe_status status = text_model_open(t->settings.draft, &s, &m, error);
    if (status) return status;
    const moe_status made = text_leg_new(m, &s, NULL, NULL, &t->drafter, error);
    moetext_model_close(m);
    return made;
}

moe_status text_leg_end(moetext *t, moe_error *error) {
    const moetext_model *m = t->model;
    const int plain = t->reads != TEXT_FORM_TEXT, both = plain && t->writes != TEXT_FORM_TEXT;
    moe_status status = text_model_wait(m, error);
    if (!status && !both && !text_cuts(&m->front))
        status = text_fail(error, MOE_ERROR_UNSUPPORTED, "form",
                           "this model has no tokeniser, so it cannot be used with text or a pivot language");
    t->prompt = text_settings_prompt(&t->settings);
    if (!status) status = text_prompt_check(&m->front, &t->prompt, plain, error);
    t->in_context = t->prompt;
    if (!t->in_context.context) t->in_context.context = TEXT_PROMPT_CONTEXT;
    if (!status) text_prompt_check(&m->front, &t->in_context, plain, &t->no_context);
    if (!status && t->settings.draft[0] && t->beam > 1)
        status = text_fail(error, MOE_ERROR_ARGUMENT, "draft", "a draft requires a beam of 1; the beam is %d", t->beam);
    if (!status && t->settings.draft[0]) status = open_drafter(t, error);
    return status || !t->kept ? status : open_rules(t, error);
}

moe_status moetext_memory_new(const char *path, moetext_memory **out, moe_error *error) {
    moetext_memory *m = calloc(1, sizeof *m);
    if (!m) return text_out_of_memory(error);
    moe_status status = text_recall_new(&m->recall, error);
    if (!status && path) status = text_recall_load(m->recall, path, error);
    if (status) return moetext_memory_free(m), status;
    return *out = m, MOE_OK;
}

void moetext_memory_free(moetext_memory *m) {
    if (m) text_recall_free(m->recall);
    free(m);
}

static moe_span span_of(const char *s) { return (moe_span){ s ? s : "", s ? strlen(s) : 0 }; }

moe_status moetext_memory_add(moetext_memory *m, const char *source_language, const char *target_language,
                              const char *source, size_t source_length, const char *target, size_t target_length,
                              moe_error *error) {
    return text_recall_add(m->recall, span_of(source_language), span_of(target_language),
                           (moe_span){ source, source_length }, (moe_span){ target, target_length }, error);
}

size_t moetext_memory_count(const moetext_memory *m) { return text_recall_count(m->recall); }

const char *moetext_memory_hash(const moetext_memory *m) { return text_recall_hash(m->recall); }

moetext_memory *moetext_memory_of(const moetext *t) { return t->memory; }

/* Open the memory of the options. */
static moe_status open_memory(moetext *t, moe_error *error) {
    const text_settings *s = &t->settings;
    if (!s->recalled && !s->memory[0]) return MOE_OK;
    if (s->scores || (t->several ? s->form > 0 : !is_text(t)))
        return text_fail(error, MOE_ERROR_ARGUMENT, "memory", "a translation memory requires form=text and no scoring");
    t->memory = s->recalled, t->owns_memory = !s->recalled;
    return s->recalled ? MOE_OK : moetext_memory_new(s->memory, &t->memory, error);
}

moe_status moetext_glossary_new(const moetext *t, const char *const *sources, const char *const *translations, size_t n,
                                moetext_glossary **out, moe_error *error) {
    if (t->several ? t->settings.protect == 0 : !t->rules)
        return text_fail(error, MOE_ERROR_UNSUPPORTED, "glossary",
                         "a glossary requires form=text and the option protect");
    moetext_glossary *g = calloc(1, sizeof *g);
    if (!g) return text_out_of_memory(error);
    const moe_status status = t->several
                                  ? t->model->ops->terms_new(t->several, sources, translations, n, &g->terms, error)
                                  : text_rules_with(t->rules, sources, translations, n, &g->rules, error);
    if (status) return free(g), status;
    if (t->several) g->free_terms = t->model->ops->terms_free;
    *out = g;
    return MOE_OK;
}

static moetext_term term_of(const text_rules *rules, size_t i) {
    const text_glossary *g = rules ? text_rules_glossary(rules) : NULL;
    if (i >= text_glossary_count(g)) return (moetext_term){ 0 };
    const text_term *term = text_glossary_term(g, i);
    const text_term_count *count = text_glossary_counts(g, i);
    return (moetext_term){ term->source, term->target, count->asked, count->kept };
}

moetext_term moetext_term_at(const moetext *t, size_t i) {
    return t->several ? t->model->ops->term(t->several, i) : term_of(t->rules, i);
}

moetext_term text_glossary_term_at(const moetext_glossary *g, size_t i) { return term_of(g->rules, i); }

const char *moetext_glossary_heading(const moetext *t) {
    if (t->several) return t->model->ops->heading(t->several);
    return text_glossary_heading(t->rules ? text_rules_glossary(t->rules) : NULL);
}

text_glossaries *text_glossaries_of(const moetext_glossary *g) { return g->terms; }

moe_status text_leg_glossary(const moetext *leg, moetext_glossary **out, moe_error *error) {
    const size_t n = leg->rules ? text_glossary_count(text_rules_glossary(leg->rules)) : 0;
    *out = NULL;
    if (!n) return MOE_OK;
    const char **targets = calloc(n, sizeof *targets);
    if (!targets) return text_out_of_memory(error);
    for (size_t i = 0; i < n; i++) targets[i] = text_glossary_term(text_rules_glossary(leg->rules), i)->target;
    const moe_status status = moetext_glossary_new(leg, targets, targets, n, out, error);
    free(targets);
    return status;
}

void moetext_glossary_free(moetext_glossary *g) {
    if (g) text_rules_free(g->rules);
    if (g && g->terms) g->free_terms(g->terms);
    free(g);
}

static void set_stream(moetext *t, const moe_session_params *p) {
    t->stream = (text_stream){ .front = &t->model->front,
                               .turn = stream_turn,
                               .next = stream_next,
                               .add = stream_add,
                               .insert = stream_insert,
                               .request = stream_request,
                               .finish = stream_finish,
                               .partial = stream_partial,
                               .before = stream_before };
    t->stream.blank_too = t->language;
    t->stream.options = (text_options){
        .option = t->settings.before ? t->settings.before : "option ",
        .ids = t->reads >= TEXT_FORM_IDS,
        .pretokenized = t->reads == TEXT_FORM_PIECES,
        .target_ids = t->writes >= TEXT_FORM_IDS,
        .target_pieces = t->writes == TEXT_FORM_PIECES,
        .truncate = t->settings.truncate > 0,
        .prompt = &t->prompt,
        .max_source = t->language ? (size_t)p->max_target
                                  : moe_session_max_source(t->session) + (t->raw ? t->model->front.source_extra : 0),
        .max_target = (size_t)p->max_target + (size_t)t->raw_target
    }; /* a target can include the end token */
    t->batch = (size_t)p->batch;
    t->beam = p->beam;
    t->most_parts = 16 * t->batch + 256;
    t->split = !is_text(t) ? 0 : t->settings.split < 0 ? TEXT_SPLIT : (size_t)t->settings.split;
}

/* Find the tag of the language that an option sets; -1 if the option is not set. */
static moe_status option_tag(const moetext_model *m, const char *name, const char *code, int target, int32_t *tag,
                             moe_error *error) {
    *tag = -1;
    const moe_status status = *code ? text_language(&m->front, code, target, tag, error) : MOE_OK;
    if (status && error) snprintf(error->where, sizeof error->where, "%s", name);
    return status;
}

/* Return the parameters of the translating session. */
static moe_session_params describe_session(moetext *t) {
    const moe_model *engine = t->model->front.model;
    const int longest = (int)text_meta_int(engine, "limit.target", 0);
    moe_session_params params = moe_session_params_default(engine);
    text_settings_apply(&t->settings, &params);
    if (t->settings.scores && !t->language && t->settings.max_len < 0 && longest > params.max_target)
        params.max_target = longest; /* a given translation may be longer than the model's own */
    t->nbest = (size_t)params.nbest;
    const int recalls = t->settings.memory[0] || t->settings.recalled;
    if ((t->nbest > 1 || recalls) && t->writes == TEXT_FORM_TEXT && !t->settings.scores)
        params.nbest = params.beam; /* some may have the same text; a fuzzy match sorts them again */
    t->kept = keeps(t, &params);
    if (t->kept) params.max_constraints = MOE_MAX_CONSTRAINTS;
    t->variants = t->kept && t->settings.protect && params.rules == MOE_RULES_PAPER;
    return params;
}

static moetext *new_translator(const moetext_model *m, const text_settings *settings) {
    moetext *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    t->model = m;
    atomic_fetch_add(&m->self->holders, 1);
    t->settings = *settings;
    return t;
}

moe_status text_leg_begin(const moetext_model *m, const text_settings *settings, text_room_fn room, void *user,
                          moetext **out, moe_error *error) {
    moetext *t = new_translator(m, settings);
    if (!t) return text_out_of_memory(error);
    moe_status status = MOE_OK;
    atomic_init(&t->cancelled, 0);
    t->reads = t->settings.form < 0 ? m->form : (text_form)t->settings.form;
    t->writes = t->settings.writes ? (text_form)(t->settings.writes - 1) : t->reads;
    t->raw = t->reads == TEXT_FORM_RAW_IDS;
    t->raw_target = t->writes == TEXT_FORM_RAW_IDS;
    t->end = (int32_t)text_meta_int(m->front.model, "token.eos", 0);
    t->language = moe_model_kind(m->front.model) == MOE_MODEL_LANGUAGE;
    t->aligns = t->settings.alignment > 0;
    t->auto_source = strcmp(t->settings.source, AUTO) == 0;
    t->source_tag = -1;
    if (!t->auto_source) status = option_tag(m, "source", t->settings.source, 0, &t->source_tag, error);
    if (!status) status = option_tag(m, "target", t->settings.target, 1, &t->target_tag, error);
    moe_session_params params = describe_session(t);
    if (!status) status = open_sessions(t, &params, room, user, error);
    if (!status) status = load_prompts(t, error);
    if (!status) status = open_memory(t, error);
    if (status) return moetext_free(t), status;
    set_stream(t, &params);
    *out = t;
    return MOE_OK;
}

moe_status text_leg_new(const moetext_model *m, const text_settings *settings, text_room_fn room, void *user,
                        moetext **out, moe_error *error) {
    moetext *t = NULL;
    moe_status status = text_leg_begin(m, settings, room, user, &t, error);
    if (!status && (status = text_leg_end(t, error))) moetext_free(t);
    if (!status) *out = t;
    return status;
}

moe_status text_translator_new(const moetext_model *m, const text_settings *settings, moetext **out, moe_error *error) {
    if (!m->set && settings->form >= 0 && (text_form)settings->form != m->form)
        return text_fail(error, MOE_ERROR_ARGUMENT, "form", "option form differs from that of the model");
    if (!m->set) return text_leg_new(m, settings, NULL, NULL, out, error);
    if (settings->prompt_cache[0] && !is_folder(settings->prompt_cache))
        return text_fail(error, MOE_ERROR_ARGUMENT, "prompt-cache",
                         "several models need a folder for prompts: create %s", settings->prompt_cache);
    moetext *t = new_translator(m, settings);
    if (!t) return text_out_of_memory(error);
    moe_status status = m->ops->create(m->set, settings, &t->several, error);
    if (!status) status = open_memory(t, error);
    if (!status) m->ops->recall(t->several, t->memory);
    if (status) moetext_free(t);
    else *out = t;
    return status;
}

moe_status moetext_new(const moetext_model *m, const char *options, moetext **out, moe_error *error) {
    text_settings settings = text_settings_none();
    const moe_status status = text_settings_parse(&settings, options, error);
    return status ? status : text_translator_new(m, &settings, out, error);
}

int text_translator_keeps_spans(const moetext *t) {
    return t->several ? t->settings.protect != 0 && !t->settings.scores : t->rules && text_rules_spans(t->rules);
}

size_t text_translator_batch(const moetext *t) {
    return t->several ? (size_t)(t->settings.batch > 0 ? t->settings.batch : 32) : t->batch;
}

size_t text_translator_terms(const moetext *t) {
    return t->rules ? text_glossary_count(text_rules_glossary(t->rules)) : 0;
}

void text_translator_pieces(const moetext *t, uint64_t *pieces, uint64_t *unknown) {
    if (t->several) t->model->ops->pieces(t->several, pieces, unknown);
    else *pieces = t->stream.pieces, *unknown = t->stream.unknown_pieces;
}

moe_status text_translator_detects(moetext *t, moe_error *error) {
    if (t->several || t->detector || !needs_source(t)) return MOE_OK;
    return text_detector_of_model(t->model->front.model, &t->detector, error);
}

const text_set *text_set_of(const moetext *t) { return t->model->set; }

text_several *text_several_of(const moetext *t) { return t->several; }

void moetext_free(moetext *t) {
    if (!t) return;
    for (part *p = t->spare_parts, *next; p; p = next) next = p->next, part_free(p);
    for (unit *u = t->spare_units, *next; u; u = next) next = u->next, unit_free(u);
    rows_free(&t->rows);
    if (t->several) t->model->ops->free(t->several);
    for (size_t i = 0; i < t->looks_made; i++) free(t->looks[i].weights);
    free(t->source_words.begins.data), free(t->source_words.word), free(t->source_words.edges);
    free(t->target_words.begins.data), free(t->target_words.word), free(t->target_words.edges);
    text_bytes_free_all((text_bytes *[]){ &t->read, &t->message, &t->news, &t->begun }, 4);
    text_aligner_free(&t->aligner);
    free(t->looks);
    text_detector_close(t->detector);
    moetext_free(t->drafter);
    free(t->hypotheses);
    text_stream_free(&t->stream);
    if (t->owns_memory) moetext_memory_free(t->memory);
    text_rules_free(t->rules);
    moe_session_free(t->session);
    moe_session_free(t->second);
    moetext_model_close(t->model->self);
    free(t);
}

static void set_cancelled(moetext *t, int on) {
    void (*const set)(moe_session *) = on ? moe_session_cancel : moe_session_uncancel;
    atomic_store(&t->cancelled, on);
    if (t->several) t->model->ops->cancel(t->several, on);
    if (t->session) set(t->session);
    if (t->second) set(t->second);
}

void moetext_cancel(moetext *t) { set_cancelled(t, 1); }

void moetext_uncancel(moetext *t) { set_cancelled(t, 0); }

void moetext_stats_sized(const moetext *t, moe_stats *out, size_t size) {
    const moe_stats stats = t->several ? t->model->ops->stats(t->several) : moe_session_stats(t->session);
    memset(out, 0, size);
    memcpy(out, &stats, size < sizeof stats ? size : sizeof stats);
}

int moetext_takes_context(const moetext *t) { return !t->several && !t->no_context.code; }

size_t moetext_under_way(const moetext *t) { return t->several ? t->model->ops->under_way(t->several) : t->under_way; }
