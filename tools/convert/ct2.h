/* ct2.h - converts models of CTranslate2, and packages of Argos Translate, which contain one. */
#ifndef CONVERT_CT2_H
#define CONVERT_CT2_H

#include "tools/convert/convert.h"
#include "tools/convert/making.h"

/* Check if the file at `path` starts as a model.bin of CTranslate2 does. */
int ct2_is_model(const char *path);

/* Convert a folder with model.bin, or a package: a folder with metadata.json, or a zip archive of one. */
int ct2_convert(making *m, const convert_options *options);

#endif
