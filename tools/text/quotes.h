/* quotes.h - repairs quotation marks that a model lost or added. */
#ifndef TEXT_QUOTES_H
#define TEXT_QUOTES_H

#include "moe.h"
#include "tools/text/bytes.h"

/* Return the length of the quotation mark at the beginning of a text, or 0. Single marks are not included. */
size_t text_quote(const char *data, size_t length);

/* Make the number of quotation marks in the target out[begin ..) even or odd as in its source, if both differ by one
 * mark. A missing mark is added at the end where its source has it, or at the same punctuation. A mark that is out of
 * turn is removed. If both have the same number, quotations end with the kind of mark that begins them, unless some do
 * not in the source. Otherwise the target stays unchanged. Takes linear time. */
void text_repair_quotes(moe_span source, size_t begin, text_bytes *out);

#endif
