/* gguf.h - reads GGUF files, the format of llama.cpp; the same model files as gguf_file.py */
#ifndef CONVERT_GGUF_H
#define CONVERT_GGUF_H

#include "tools/convert/convert.h"
#include "tools/convert/making.h"

/* Convert a file, or a split file given by any part. */
int gguf_convert(making *m, const convert_options *options);

/* Return the text of a key in the first bytes of a file; data NULL if they do not contain it. */
moe_span gguf_text(moe_span begin, const char *key);
/* Write why gguf_convert does not support a file, as far as its name and first bytes show, or "". Returns 1 if the
 * Python converter may support it. */
int gguf_check(moe_span begin, const char *file, char *why, size_t size);

#endif
