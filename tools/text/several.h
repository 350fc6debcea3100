/* several.h - a translator that uses several models.
 *
 * Each model has its own translator, called a leg, which is created when a text first needs it. One leg runs at a time.
 * If a text needs two legs, the second translates the output of the first, with the same result as two programs
 * connected by a pipe. A leg alternates between long texts after each sentence.
 */
#ifndef TEXT_SEVERAL_H
#define TEXT_SEVERAL_H

#include "tools/text/models.h"
#include "tools/text/recall.h"
#include "tools/text/settings.h"

typedef struct text_several text_several;
typedef struct text_glossaries text_glossaries; /* a glossary for all legs */

/* Functions of models.h and several.c that moetext.c calls through pointers, since both files depend on moetext.c. */
typedef struct text_several_ops {
    void (*close)(text_set *set);
    const char *const *(*languages)(const text_set *set, size_t *n);
    ptrdiff_t (*language)(const text_set *set, const char *code);
    int (*hops)(const text_set *set, size_t source, size_t target);
    int (*needs_source)(const text_set *set);
    moe_status (*create)(text_set *set, const text_settings *settings, text_several **out, moe_error *error);
    void (*free)(text_several *several);
    moe_status (*translate)(text_several *several, moetext_pull_fn pull, moetext_done_fn done, void *user,
                            moe_error *error);
    moe_status (*check)(text_several *several, const char *source, const char *target, moe_error *error);
    void (*cancel)(text_several *several, int on);
    moe_stats (*stats)(const text_several *several);
    size_t (*under_way)(const text_several *several);
    void (*pieces)(const text_several *several, uint64_t *pieces, uint64_t *unknown);
    moe_status (*terms_new)(const text_several *several, const char *const *sources, const char *const *translations,
                            size_t n, text_glossaries **out, moe_error *error);
    void (*terms_free)(text_glossaries *terms);
    moetext_term (*term)(const text_several *several, size_t i);
    const char *(*heading)(const text_several *several);
    moe_status (*save_prompts)(text_several *several, moe_error *error);
    void (*recall)(text_several *several, moetext_memory *memory); /* set the memory of the options */
} text_several_ops;

/* Notes on a text, all zero if empty. */
typedef struct text_notes {
    moetext_note *each; /* [n] without messages until text_notes_give */
    size_t n, capacity;
    text_bytes messages;
} text_notes;

void text_notes_clear(text_notes *notes);
/* Add a note, whose message the caller has appended to `messages`. */
moe_status text_notes_add(text_notes *notes, size_t part, moe_status status);
void text_notes_give(text_notes *notes, moetext_result *result);
void text_notes_free(text_notes *notes);

/* ---- Functions of moetext.c for programs that are linked with it ---- */

/* Open models and create a translator like moetext_models_open and moetext_new, with parsed options. */
moe_status text_models_open(const char *const *paths, size_t n, const text_settings *settings, moetext_model **out,
                            moe_error *error);
moe_status text_translator_new(const moetext_model *model, const text_settings *settings, moetext **out,
                               moe_error *error);
/* Functions for several models. The last two find the way (models.h) between the option languages, and open a file;
 * *opened is 0 if the file caused the error, and 1 if the file was opened but the options are wrong. */
const text_set *text_set_of(const moetext *translator);
text_several *text_several_of(const moetext *translator); /* NULL for one model */
moe_status text_translator_way(moetext *translator, text_way *way, moe_error *error);
moe_status text_translator_open(moetext *translator, size_t file, int *opened, moe_error *error);

int text_translator_keeps_spans(const moetext *translator); /* 1 if it protects markup and other spans */
size_t text_translator_terms(const moetext *translator);    /* number of terms in its glossary */
/* Return a term of a glossary for single texts, as moetext_term_at does. */
moetext_term text_glossary_term_at(const moetext_glossary *glossary, size_t i);
/* Count the pieces of all texts so far, and those that are not in the vocabulary. */
void text_translator_pieces(const moetext *translator, uint64_t *pieces, uint64_t *unknown);
size_t text_translator_batch(const moetext *translator); /* number of sentences that each model decodes at once */
/* Add the statistics of another translator; leave out its memory and experts if it is closed. */
void text_add_stats(moe_stats *sum, const moe_stats *stats, int closed);
/* Open the language detector now instead of at the first text, if the model needs source languages. */
moe_status text_translator_detects(moetext *translator, moe_error *error);

/* Let ranks agree on a status: return `status`, or the failure of another rank. `wire` may be NULL. */
moe_status text_in_step(const moe_wire *wire, moe_status status, moe_error *error);

/* ---- Functions of moetext.c for several.c ---- */

/* Called before a session that takes `bytes` bytes of memory is created. */
typedef moe_status (*text_room_fn)(void *user, size_t bytes, moe_error *error);
/* Make a leg in two steps, for a model from text_model_begin. The second step waits for the tokeniser; call
 * text_model_wait first to learn whether loading it failed. */
moe_status text_leg_begin(const moetext_model *model, const text_settings *settings, text_room_fn room, void *user,
                          moetext **out, moe_error *error);
moe_status text_leg_end(moetext *translator, moe_error *error);
moe_status text_leg_new(const moetext_model *model, const text_settings *settings, text_room_fn room, void *user,
                        moetext **out, moe_error *error);
/* Make a glossary that copies the translations in the option's glossary, or set *out to NULL if it has none. */
moe_status text_leg_glossary(const moetext *leg, moetext_glossary **out, moe_error *error);
text_glossaries *text_glossaries_of(const moetext_glossary *glossary);
/* Find a text in two memories, each of which may be NULL; the first wins over an equal match in the second. */
moe_status text_memories_find(moetext_memory *const memories[2], moe_span text, const char *source, const char *target,
                              text_match *match, text_bytes *out, moe_error *error);
extern moetext_memory text_no_memory; /* the memory of a request for which the option's must not be searched */
/* Make a model that owns a set. */
moe_status text_model_of_set(text_set *set, const text_several_ops *ops, moetext_model **out, moe_error *error);

#endif
