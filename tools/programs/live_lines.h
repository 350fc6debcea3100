/* live_lines.h - moe-translate --live: lines that grow while they are read.
 *
 * Input: the bytes of a line are its beginning until a line break ends it. A carriage return that no line break follows
 * starts the line again, as programs for speech recognition write it; a backspace deletes a character, and escape
 * sequences of terminals are ignored.
 *
 * Output: to a pipe, the same: new text, or a carriage return and the line again; a line break after the final
 * translation. To a terminal, the unfinished line. To a file, final translations only. With --json, an object for each
 * change: line, translation, stable (the beginning of the translation that will hardly change), final.
 */
#ifndef LIVE_LINES_H
#define LIVE_LINES_H

#include "tools/programs/program.h"

/* Translate until the input ends; return the exit status. */
int program_live_run(const program_common *options, moetext *translator);

#endif
