/* choice.h - chooses among the models on this machine; the rest of its interface is in moetext.h.
 *
 * A model that moe-get has fetched counts if its record exists (DATA/OWNER/NAME/moe-get.json) and it has been converted
 * (CACHE/OWNER/NAME.bin). A damaged one is skipped.
 */
#ifndef TEXT_CHOICE_H
#define TEXT_CHOICE_H

#include "tools/text/moetext.h"
#include "tools/text/settings.h"

/* Write the name of a model file: firefox/en-pt for a fetched model, otherwise the file's name without ".bin". Return
 * `out`. */
const char *text_model_name(const char *path, char *out, size_t size);
/* Return the paths of all local models, of which there must be one, in the order for text_choice_open. */
const char *const *text_choice_all(const moetext_choice *choice, size_t *n);
/* Open the files of a choice, or all local models if `all` is 1. */
moe_status text_choice_open(const moetext_choice *choice, int all, const text_settings *settings, moetext_model **out,
                            moe_error *error);
/* Compare a choice for these languages (may be NULL or "") with the one that was last remembered, and remember it in
 * CACHE/choices. If it differs, write a message to `out`, otherwise "". Nothing is written while nothing is fetched. */
const char *text_choice_changed(const moetext_choice *choice, const char *source, const char *target, char *out,
                                size_t size);

#endif
