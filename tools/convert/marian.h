/* marian.h - converts Marian's own model files (Firefox's and Bergamot's students, OPUS-MT).
 *
 * Writes the same bytes as tools/convert/convert.py --from marian, which also reads .npz archives, vocabularies in
 * JSON, shortlists in text and files compressed by zstd.
 */
#ifndef CONVERT_MARIAN_H
#define CONVERT_MARIAN_H

#include "tools/convert/convert.h"
#include "tools/convert/making.h"

/* Convert a folder with one model, or a model with its vocabularies next to it; 0 after an error. The default type is
 * Q8, which stores the codes of intgemm8 unchanged. Compressed files are unpacked to unnamed files in the folder of
 * m->out. */
int marian_convert(making *m, const convert_options *options);

#endif
