/* settings.h - what a user can ask of a translation, by name: the options of libmoetext and of moe-translate. */
#ifndef TEXT_SETTINGS_H
#define TEXT_SETTINGS_H

#include "tools/text/bytes.h"
#include "tools/text/moetext.h"
#include "tools/text/rows.h"

#include <stddef.h>
#include <stdint.h>

enum { TEXT_PARAMS = 32 };
enum { TEXT_SPLIT = 1 }; /* characters of a line that is not split, unless the settings say otherwise */

typedef enum text_form { TEXT_FORM_TEXT, TEXT_FORM_PIECES, TEXT_FORM_IDS, TEXT_FORM_RAW_IDS } text_form;

/* Numbers are -1 and floats NaN where nothing is said; texts are "". */
typedef struct text_settings {
    int verify, copy; /* moe_model_params */
    int form, kind;   /* text_form; 1: a language model */
    char style[256], prompt[1024], target[32], source[32], preset[16], isa[32], device[32], gating[16], glossary[4096];
    double params[TEXT_PARAMS]; /* by the number of moe_param_at; NaN where nothing is said */
    int context;                /* earlier lines; -1: nothing is said */
    int max_len, split, truncate, capitals, protect, alignment;
    float share;
    int threads, batch, batch_tokens, gpu_memory, force, routing;
    int64_t noise;                    /* seed */
    size_t max_memory, models_memory; /* 0: nothing is said */
    const text_bytes *terms;          /* content of the glossary file; NULL: not read yet */

    /* Only for programs that are linked with libmoetext */
    const char *before;   /* prefix of option names in messages; NULL: "option " */
    int scores;           /* 1: every text is scored */
    int writes;           /* 1 + the form of translations; 0: the same as of texts */
    size_t resident;      /* bytes of the process that count in max_memory; 0: those of a copied model */
    moe_log_fn log;       /* as in moe_session_params */
    const moe_wire *wire; /* the same */
} text_settings;

text_settings text_settings_none(void);
struct text_prompt_options text_settings_prompt(
    const text_settings *settings); /* prompt.h; its words are the settings' */

/* Row number `i` of the options, from 0. Returns 0 after the last. */
int text_settings_row(size_t i, option_row *row);
/* "beam=4;target=de"; NULL: nothing. */
moe_status text_settings_parse(text_settings *settings, const char *options, moe_error *error);

/* What is said of a parameter, "beam"; NaN: nothing. */
double text_settings_param(const text_settings *settings, const char *name);
/* 0, or why the preset and the parameters do not go together. */
moe_status text_settings_check(const text_settings *settings, const char *before, moe_error *error);

/* Bytes; where size_t has no such number, its largest. */
size_t text_mebibytes(int n);
/* The preset and the parameters of the search. */
void text_settings_search(const text_settings *settings, moe_session_params *params);
/* The settings of a session, except languages: they need the tokens of a model. */
void text_settings_apply(const text_settings *settings, moe_session_params *params);

#endif
