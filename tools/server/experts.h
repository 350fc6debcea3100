/* experts.h - which experts the tokens of a text and of its translation went to, for one result at a time. */
#ifndef SERVER_EXPERTS_H
#define SERVER_EXPERTS_H

#include "tools/text/bytes.h"
#include "tools/text/moetext.h"

typedef struct experts experts; /* one thread at a time may use it */

/* `settings`: of the translator. MOE_ERROR_UNSUPPORTED: the model has no mixture. Errors: those of moe_session_new. */
moe_status experts_open(const moetext_model *model, const char *settings, experts **out, moe_error *error);
void experts_close(experts *experts); /* NULL is fine */

/* The best translation of a result is scored once more, and this JSON object appended:
 *
 *   {"source":{"layers":[{"layer":"encoder.2","experts":32}],
 *              "tokens":[{"token":"\u2581Where","experts":[[[3,0.61],[17,0.39]]]}]},
 *    "target":{...}}
 *
 * A token has a list for each layer: the numbers of its experts, ascending, and their weights. Tokens of the source
 * include what the model adds to it; the experts of a token of the target are those that the step went to which wrote
 * it. `source` and `target`: codes of languages, as in moetext_request. On failure *out is as it was. */
moe_status experts_write(experts *experts, const char *source, const char *target, const moetext_result *result,
                         text_bytes *out, moe_error *error);

#endif
