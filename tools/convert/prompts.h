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
} prompt_pieces;

/* Look up a template and fill in the special tokens, NULL if undefined. `family`: model_type. */
int prompts_find(making *m, const char *file, moe_span template, const char *const tokens[PROMPT_TOKENS],
                 const char *family, prompt_pieces *out);
/* Return 1 if the template of a family is known. */
int prompts_known(moe_span template, const char *family);
/* Put the pieces, and the wordings for the model's name. `named`: languages that the authors name. */
int prompts_put(making *m, const prompt_pieces *pieces, const char *family, const char *name, const moe_span *named,
                size_t n_named);

#endif
