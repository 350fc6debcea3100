/* open.h - a model with its tokeniser, vocabulary and prompts. */
#ifndef TEXT_OPEN_H
#define TEXT_OPEN_H

#include "tools/text/text.h"

/* "FILE: WHERE: MESSAGE" for a file that could not be used; messages about input and output name the file themselves.
 */
const char *text_file_error(const char *file, const moe_error *error, char *out, size_t size);

typedef enum text_level {
    TEXT_IDS_ONLY, /* leave the tokeniser alone       */
    TEXT_REQUIRED, /* a model without one is an error */
    TEXT_PIECES,   /* a tokeniser or a list of pieces is required */
    TEXT_IF_THERE
} text_level;

/* Where `path` looks like another program's model: let the error (may be NULL) end with the command that converts it.
 */
void text_say_how_to_convert(const char *path, moe_error *error);

/* Open a model (`params` may be NULL) and the tokeniser inside it. *front is all zero on failure. */
moe_status text_open(const char *path, text_level level, const moe_model_params *params, text_front *front,
                     moe_error *error);
void text_close(text_front *front);
/* The tokeniser later, for a model that was opened with TEXT_IDS_ONLY. *front can be closed in any case. */
moe_status text_open_tokeniser(text_front *front, text_level level, moe_error *error);
/* The same in a thread of its own, while the caller makes a session. Until text_wait_tokeniser has returned, the caller
 * may look at the model alone, and *front must stay where it is. Without a thread to be had, text_begin_tokeniser does
 * all the work. */
moe_status text_begin_tokeniser(text_front *front, text_level level, moe_error *error);
moe_status text_wait_tokeniser(text_front *front, moe_error *error); /* MOE_OK where nothing was begun */

#endif
