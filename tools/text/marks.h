/* marks.h - verifies the structure of markup in a translation. */
#ifndef TEXT_MARKS_H
#define TEXT_MARKS_H

#include "tools/text/bytes.h"

/* Return 1 if a translation contains the tag pairs of its source, well nested: each pair is inside the same pair as in
 * the source and contains words if it does in the source, and each placeholder is in the same pair. Return 0 if not, -1
 * if out of memory. Takes linear time for texts without pairs. */
int text_marks_kept(moe_span source, moe_span target);

/* Drop the spaces around tags from byte `begin` of a translation on, if no space is between the same characters of the
 * source: 12:<b>30</b>. */
void text_marks_tighten(moe_span source, size_t begin, text_bytes *out);

#endif
