/* experts.h - find the experts that the tokens of a text and its translation used, one result at a time. */
#ifndef SERVER_EXPERTS_H
#define SERVER_EXPERTS_H

#include "tools/text/bytes.h"
#include "tools/text/moetext.h"

typedef struct experts experts; /* one thread at a time may use it */

/* settings: the translator's. Errors: those of moe_session_new; MOE_ERROR_UNSUPPORTED (the model has no experts). */
moe_status experts_open(const moetext_model *model, const char *settings, experts **out, moe_error *error);
void experts_close(experts *experts); /* NULL is fine */

/* Score the best translation of a result again and append a JSON object:
 *
 *   {"source":{"layers":[{"layer":"encoder.2","experts":32}],
 *              "tokens":[{"token":"\u2581Where","experts":[[[3,0.61],[17,0.39]]]}]},
 *    "target":{...}}
 *
 * A token has a list for each layer: its experts in ascending order, and their weights. Source tokens include those
 * that the model adds. A target token has the experts of the step that wrote it. source, target: language codes, as in
 * moetext_request. *out is unchanged on failure. */
moe_status experts_write(experts *experts, const char *source, const char *target, const moetext_result *result,
                         text_bytes *out, moe_error *error);

#endif
