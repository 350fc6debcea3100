/* prompts.h - chat templates and prompts of decoder-only models, from prompts.json.
 *
 * Templates are programs, which this converter does not run: a template is looked up by its SHA-256 in the table of
 * those whose pieces are known. prompts.py renders templates.
 */
#ifndef CONVERT_PROMPTS_H
#define CONVERT_PROMPTS_H

#include "tools/convert/making.h"

enum { PROMPT_PREFIX, PROMPT_SUFFIX, PROMPT_SYSTEM, PROMPT_SYSTEM_END, PROMPT_ANSWER, PROMPT_ANSWER_END, PROMPT_END };
enum { PROMPT_PIECES = PROMPT_END + 1, PROMPT_TOKENS = 7 };

extern const char *const prompt_token_names[PROMPT_TOKENS]; /* bos_token, ... */

/* Texts around the turns of a conversation; NULL if the template does not support them. All NULL: no prompt. */
typedef struct prompt_pieces {
    char *texts[PROMPT_PIECES];
    int bare; /* 1 if the tokeniser puts its bos token before a prompt, as before any text */
} prompt_pieces;

/* The keys of a row of prompts.json: model_type, and the model's names. */
typedef struct prompt_model {
    const char *family, *name;
} prompt_model;

/* Find the pieces of a model, or else of its template, and insert the special tokens (NULL if undefined). Leave `out`
 * empty if the model's row has no pieces and there is no template (data NULL). */
int prompts_find(making *m, const char *file, moe_span template, const char *const tokens[PROMPT_TOKENS],
                 prompt_model model, prompt_pieces *out);
/* Return 1 if the prompts of a model with this template are known. */
int prompts_known(moe_span template, prompt_model model);
/* Put the pieces, and the wordings for the model. `named`: languages that the authors name. */
int prompts_put(making *m, const prompt_pieces *pieces, prompt_model model, const moe_span *named, size_t n_named);

#endif
