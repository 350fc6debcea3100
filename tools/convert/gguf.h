/* gguf.h - reads GGUF files, the format of llama.cpp; the same model files as gguf_file.py */
#ifndef CONVERT_GGUF_H
#define CONVERT_GGUF_H

#include "tools/convert/convert.h"
#include "tools/convert/making.h"

/* Convert a file, or a split file given by any part. */
int gguf_convert(making *m, const convert_options *options);

#endif
