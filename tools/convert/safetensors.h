/* safetensors.h - the tensors of a folder in Hugging Face's layout: one file, or shards with an index. */
#ifndef CONVERT_SAFETENSORS_H
#define CONVERT_SAFETENSORS_H

#include "tools/convert/packed.h"
#include "tools/convert/stored.h"

typedef struct shards {
    packed_file *files; /* mapped; the tensors point to them */
    size_t n;
} shards;

/* Read the headers, checking every length and offset. The caller closes the shards in any case. */
int safetensors_open(making *m, const char *folder, shards *out, stored_list *list);
void safetensors_close(shards *s);

#endif
