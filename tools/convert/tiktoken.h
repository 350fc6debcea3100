/* tiktoken.h - reads hy.tiktoken, the tokeniser of Hunyuan-MT-7B and Hy-MT2-7B, as byte_bpe.py does. */
#ifndef CONVERT_TIKTOKEN_H
#define CONVERT_TIKTOKEN_H

#include "tools/convert/bpe_pack.h"

/* Read the lines "BASE64 RANK" of a file, in the order of the ranks 0, 1, 2 ... Set all members of `parts` except
 * `file`, which names it in messages. */
int tiktoken_read(making *m, const char *path, pack_parts *parts);

#endif
