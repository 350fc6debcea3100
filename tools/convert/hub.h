/* hub.h - reads decoder-only models in Hugging Face's layout; the same model files as decoder.py */
#ifndef CONVERT_HUB_H
#define CONVERT_HUB_H

#include "tools/convert/convert.h"
#include "tools/convert/making.h"

/* Convert a folder with config.json, generation_config.json, tokenizer.json and safetensors. */
int hub_convert(making *m, const convert_options *options);
/* Read all files of a folder except the weights. */
int hub_check(making *m, const convert_options *options);

#endif
