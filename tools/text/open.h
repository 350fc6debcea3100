/* open.h - a model with its tokeniser, vocabulary and prompts. */
#ifndef TEXT_OPEN_H
#define TEXT_OPEN_H

#include "tools/text/text.h"

/* Prefix an error message with the file's name, unless it is already there. Return the status. */
moe_status text_name_error(const char *file, moe_status status, moe_error *error);
/* Return a message without the file's name at its start. */
const char *text_without_file(const char *file, const char *message);
/* Format an error as "FILE: WHERE: MESSAGE", or without "FILE: " if `file` is NULL. Copy I/O errors unchanged. */
const char *text_file_error(const char *file, const moe_error *error, char *out, size_t size);

typedef enum text_level {
    TEXT_IDS_ONLY, /* open no tokeniser */
    TEXT_REQUIRED, /* fail without a tokeniser */
    TEXT_PIECES,   /* fail without a tokeniser or list of pieces */
    TEXT_IF_THERE
} text_level;
enum { TEXT_NO_CACHE = 8 }; /* added to a text_level: do not keep the conversion of a published model (published.h) */

/* Append the conversion command to an error (may be NULL) if `path` looks like another program's model. */
void text_say_how_to_convert(const char *path, moe_error *error);

/* Open a model (`params` may be NULL) and its tokeniser. *front is all zero on failure. Messages name the file. A path
 * may be a published model. `level`: a text_level, to which TEXT_NO_CACHE may be added. */
moe_status text_open_source(const moe_source *source, int level, const moe_model_params *params, text_front *front,
                            moe_error *error);
moe_status text_open(const char *path, int level, const moe_model_params *params, text_front *front, moe_error *error);
void text_close(text_front *front);
int64_t text_meta_int(const moe_model *model, const char *key, int64_t otherwise); /* `otherwise` if no such key */
/* Open the tokeniser of a model that was opened with TEXT_IDS_ONLY. *front must be closed in any case. */
moe_status text_open_tokeniser(text_front *front, text_level level, moe_error *error);
/* Open the tokeniser in a thread, while the caller creates a session. Until text_wait_tokeniser returns, the caller may
 * use only front->model, and *front must not move. Works synchronously if no thread can be created. */
moe_status text_begin_tokeniser(text_front *front, text_level level, moe_error *error);
moe_status text_wait_tokeniser(text_front *front, moe_error *error); /* returns MOE_OK if no thread was started */

#endif
