/* cues.h - streams of subtitles (SubRip, WebVTT), line by line, for moe-translate --live.
 *
 * A sentence that spans up to four cues is translated as a whole, and its words are distributed over the cues, whose
 * numbers, times and settings do not change. Cues with markup or dashes are translated line by line.
 */
#ifndef CUES_H
#define CUES_H

#include "tools/text/bytes.h"

typedef struct cue {
    text_bytes head; /* its lines up to the times, with their line breaks */
    text_bytes text; /* its lines, separated by line breaks */
    double begin, end;
} cue;

enum { MOST_CUES = 4 }; /* of a sentence */

typedef struct cue_stream {
    int on;          /* 1 for subtitles, -1 for other text, 0 if the lines so far can be both */
    int inside;      /* 1 after the times of a cue, until a blank line */
    int ended;       /* 1 while that blank line is passed */
    int cut;         /* 1 if the input has ended without it */
    text_bytes held; /* lines that precede a cue, or are copied */
    cue cues[MOST_CUES];
    size_t n, now;     /* number of cues; of those that `source` has */
    text_bytes source; /* what to translate */
} cue_stream;

typedef enum cue_step {
    CUE_OTHER,     /* the line is not part of subtitles; `held` has the lines before it, to be treated alike */
    CUE_TAKEN,     /* the line was taken; nothing is to be done */
    CUE_TRANSLATE, /* translate `source`, call cues_write, and pass the line again */
    CUE_COPY       /* the line was taken; write and clear `held` */
} cue_step;

/* Take a line without its line break; NULL at the end of the input. */
cue_step cues_take(cue_stream *stream, const char *line, size_t length);
/* Append the cues with a translation of `source`, and forget them. */
void cues_write(cue_stream *stream, const char *translation, size_t length, text_bytes *out);
void cues_free(cue_stream *stream);

#endif
