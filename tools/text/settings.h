/* settings.h - the options of libmoetext and of moe-translate. */
#ifndef TEXT_SETTINGS_H
#define TEXT_SETTINGS_H

#include "tools/text/bytes.h"
#include "tools/text/moetext.h"
#include "tools/text/rows.h"

#include <stddef.h>
#include <stdint.h>

enum { TEXT_PARAMS = 32 };
enum { TEXT_SPLIT = 1 }; /* default of the option split */

typedef enum text_form { TEXT_FORM_TEXT, TEXT_FORM_PIECES, TEXT_FORM_IDS, TEXT_FORM_RAW_IDS } text_form;

/* An option that is not set is -1 (numbers), NaN (floats), 0 (sizes) or "" (texts). */
typedef struct text_settings {
    int verify, copy; /* moe_model_params */
    int cache;        /* 0: convert published models for this run only */
    int form, kind;   /* text_form; kind is 1 for a language model */
    char style[256], prompt[1024], target[32], source[32], preset[16], isa[32], device[32], gating[16], glossary[4096];
    char draft[4096];           /* file of a fast model */
    char memory[4096];          /* file of a translation memory */
    char prompt_cache[4096];    /* file or folder of computed prompts */
    double params[TEXT_PARAMS]; /* values by the index of moe_param_at */
    int context;                /* number of earlier lines */
    int max_len, split, truncate, capitals, protect, alignment;
    float share;
    int threads, batch, batch_tokens, gpu_memory, force, routing;
    int guided;                       /* 1 if answers can have next_token; set by the caller, without an option */
    int64_t noise;                    /* seed */
    size_t max_memory, models_memory; /* memory limits in bytes */
    const text_bytes *terms;          /* content of the glossary file; NULL if not read yet */
    struct moetext_memory *recalled;  /* of the option memory, if it is read already */

    /* only for programs that are linked with libmoetext */
    const char *before; /* prefix of option names in messages; NULL for "option " */
    int scores;         /* 1 if all texts are scored */
    int writes;         /* 1 + the form of translations; 0 if they have the form of sources */
    size_t resident;    /* process memory that counts towards max_memory; 0 to count a copied model's bytes */
    size_t last_resort; /* several models: number of files at the end that are used if the others have no way */
    moe_log_fn log;     /* moe_session_params.log */
    moe_log_fn warn;    /* receives warnings about prompt-cache; may be NULL */
    const moe_wire *wire;
} text_settings;

text_settings text_settings_none(void);
/* Return the options of prompt.h, which point into the settings. */
struct text_prompt_options text_settings_prompt(const text_settings *settings);

int text_settings_row(size_t i, option_row *row); /* row `i` of the options; returns 0 after the last */
/* Parse options such as "beam=4;target=de"; `options` may be NULL. */
moe_status text_settings_parse(text_settings *settings, const char *options, moe_error *error);

double text_settings_param(const text_settings *settings, const char *name); /* such as "beam"; NaN if not set */
/* Return an error if the parameters contradict each other. */
moe_status text_settings_check(const text_settings *settings, const char *before, moe_error *error);

size_t text_mebibytes(int n); /* in bytes, at most SIZE_MAX */
/* Apply the preset and the search parameters. */
void text_settings_search(const text_settings *settings, moe_session_params *params);
/* Apply all settings of a session except languages, which need the tokens of a model. */
void text_settings_apply(const text_settings *settings, moe_session_params *params);

#endif
