/* units.h - reads the pairs of texts and translations in TMX, XLIFF, PO and TSV files. */
#ifndef TEXT_UNITS_H
#define TEXT_UNITS_H

#include "tools/text/bytes.h"

/* Called with each pair. The languages are codes as the file spells them; empty if the file does not state them. */
typedef moe_status (*text_unit_fn)(void *user, moe_span source_language, moe_span target_language, moe_span source,
                                   moe_span target, moe_error *error);

/* Read a file's content. Its form follows from the content: XML is TMX or XLIFF, msgid starts PO, other text is lines
 * of source TAB translation, of which blank lines, lines that start with # and a first line that names the columns are
 * ignored. UTF-16 with a byte order mark is accepted. Pairs that are not translations yet are skipped: empty ones,
 * fuzzy and obsolete ones in PO, the states new, initial and needs-translation in XLIFF. Markup inside a TMX segment is
 * its own text; XLIFF's is kept as tags. Errors: MOE_ERROR_ARGUMENT (`where` is "line N"), MOE_ERROR_MEMORY, those of
 * `add`. */
moe_status text_units_read(const char *data, size_t length, text_unit_fn add, void *user, moe_error *error);

#endif
