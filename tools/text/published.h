/* published.h - opens models as they are published: Firefox's folders, folders in Hugging Face's layout, GGUF files.
 *
 * A model is converted when it is first opened, into CACHE/files (see text_place_of_models). The file's name contains a
 * hash of the source's path, and one of the names, sizes, times and inodes of its files and of the contents of small
 * ones: a changed source is converted again, and replaces the previous conversion; a damaged one is made again.
 */
#ifndef TEXT_PUBLISHED_H
#define TEXT_PUBLISHED_H

#include "moe.h"

int text_is_published(const char *path); /* 1 if a file or a folder looks like a published model */

/* Open a published model. Writes a line to standard error before converting, which may take minutes. If `cached` is 0,
 * the conversion is a temporary file in TMPDIR or /var/tmp, which exists only until the model is closed. Errors: those
 * of convert_model and moe_model_open. */
moe_status text_published_open(const char *path, int cached, const moe_model_params *params, moe_model **out,
                               moe_error *error);

#endif
