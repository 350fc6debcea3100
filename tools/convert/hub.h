/* hub.h - reads decoder-only models in Hugging Face's layout; the same model files as decoder.py */
#ifndef CONVERT_HUB_H
#define CONVERT_HUB_H

#include "tools/convert/convert.h"
#include "tools/convert/decoder.h"

/* Convert a folder with config.json, generation_config.json, tokenizer.json and safetensors. */
int hub_convert(making *m, const convert_options *options);
/* Convert a model whose weights and settings were read; the folder has its tokeniser. */
int hub_convert_read(making *m, const convert_options *options, const decoder *d, const decoder_search *search,
                     stored_list *list, moe_type type, uint64_t source);
/* Read all files of a folder except the weights. */
int hub_check(making *m, const convert_options *options);

#endif
