/* text.h - the text front end: reads lines, and converts text to token ids and back.
 *
 *   text_front   a model with its tokeniser. Immutable once opened, so threads may share it.
 *   text_reader  cuts a file descriptor into lines. One per input, for one thread.
 *
 * Nothing here prints or exits. Functions that return moe_status fill the caller's moe_error.
 */
#ifndef TEXT_H
#define TEXT_H

#include "moe.h"
#include "tools/text/bpe.h"
#include "tools/text/bytes.h"
#include "tools/text/spm.h"

#include <signal.h> /* sig_atomic_t */
#include <stddef.h>
#include <stdint.h>

/* ---- 1. Ids -------------------------------------------------------------------------------------------- */

void text_append_ids(text_bytes *bytes, const int32_t *ids, size_t count); /* separated by spaces */
void text_ids_free(text_ids *ids);
moe_status text_ids_append(text_ids *ids, const int32_t *from, size_t count, moe_error *error);
moe_status text_ids_set(text_ids *ids, const int32_t *from, size_t count, moe_error *error); /* copies `from` */

/* ---- 2. Characters ------------------------------------------------------------------------------------- */

/* Compose a text (NFC) into out[room]. Return the number of characters; 0 if empty, invalid, or too long when
 * decomposed. */
size_t text_composed(const char *data, size_t length, int32_t *out, size_t room);
int text_same(moe_span a, moe_span b);
moe_span text_trimmed(const char *data, size_t length, const char *blanks); /* without `blanks` at both ends */
/* Return the character at data[at] and its length in bytes, or 0 and 1 if it is invalid. */
int32_t text_character(const char *data, size_t length, size_t at, size_t *bytes);
int text_is_letter(int32_t character);
/* Return 1 if the character at data[at] belongs to a script without spaces. */
int text_is_unspaced(const char *data, size_t length, size_t at);

/* Return 1 if valid UTF-8 has three or more words of two or more letters, and no lower-case letter. */
int text_is_capitals(const char *data, size_t length);
/* Convert valid UTF-8 in place to lower case except the first letter of each sentence, or to upper case. Letters whose
 * other case has a different length stay unchanged. */
void text_lower_case(char *data, size_t length);
void text_lower_first(char *data, size_t length); /* only the first letter of the text */
void text_upper_case(char *data, size_t length);

/* Variants of a short text without final punctuation. Few models have learned such texts. */
typedef enum text_variant {
    TEXT_UNCHANGED,
    TEXT_CLOSED,  /* with a full stop, which is removed from the translation */
    TEXT_LOWERED, /* with the first letter in lower case; the translation is capitalised */
    TEXT_SENTENCE /* capitalised and with a full stop; both are undone in the translation */
} text_variant;

/* Return 1 if a text has up to five words and ends with a letter; 2 if it also starts with a capitalised word. */
int text_is_short(const char *data, size_t length);
void text_apply_variant(text_variant variant, text_bytes *text);
/* Undo a variant in the translation out[begin ..). Return the number of bytes removed at the beginning. */
size_t text_undo_variant(text_variant variant, text_bytes *out, size_t begin);

/* ---- 3. Model and tokeniser ---------------------------------------------------------------------------- */

/* A vocabulary that the model file lists piece by piece, without SentencePiece. May be all zero. */
typedef struct text_vocabulary {
    moe_span *pieces; /* [count] by id, inside the model file */
    size_t count;
    text_index index; /* ids by the hash of their pieces */
} text_vocabulary;

/* Ids of models that renumber SentencePiece's pieces, in both directions; -1 if unmapped. NULL if the model uses
 * SentencePiece's ids, or if pieces are looked up in the vocabulary. */
typedef struct text_map {
    int32_t *ids;    /* [spm_size] */
    int32_t *pieces; /* [vocabulary of the model] */
} text_map;

typedef struct text_front {
    moe_model *model;
    spm *tokeniser; /* if `tokeniser` and `bpe` are NULL, texts must be ids or pieces */
    bpe *bpe;
    struct text_prompt *prompt; /* prompts (prompt.h); NULL if a text is the whole input */
    spm *joiner;                /* decodes the output; NULL if `tokeniser` does */
    text_map map;
    text_vocabulary vocabulary;
    text_vocabulary sources;         /* source pieces; count is 0 if sources use `vocabulary` */
    int of_targets;                  /* 1 in the result of text_front_of_targets */
    int32_t special[3];              /* ids that are not text: begin, end, padding */
    int32_t unknown, target_unknown; /* ids of unknown pieces; -1 if the vocabulary has none */
    size_t source_extra; /* tokens that the session adds: tag, begin and end of a source, or end of a language model's
                            text */
    struct text_loading *loading; /* a tokeniser being opened in a thread */
} text_front;

/* Return the first id of a piece, or -1 if unknown. */
int32_t text_vocabulary_find(const text_vocabulary *vocabulary, const char *data, size_t length);

/* Return the front end for targets, which may have another tokeniser and other ids. Do not close it. */
text_front text_front_of_targets(const text_front *front);

/* Language codes from metadata, from a model's tags, or from a list. */
typedef struct text_codes {
    const moe_model *model;
    ptrdiff_t entry; /* index in the metadata; -1 for the model's tags */
    const char *const *codes;
    size_t n;
} text_codes;

/* Return the source or target languages: languages.sources or languages.targets in the metadata, or the tags. */
text_codes text_languages_of(const moe_model *m, int target);
moe_span text_code_at(const text_codes *codes, size_t i);
/* Return 1 if two codes can be the same language: de, de-AT and deu_Latn, but not pt-BR and pt-PT. "" is any. */
int text_codes_agree(const char *a, const char *b);
/* Find the tag of a source or target language in the model's spelling or a common one: "de" finds "deu_Latn", "pt-BR"
 * finds "pt". *tag is -1 for a language without a tag. An unknown language is MOE_ERROR_ARGUMENT, and the message lists
 * the known ones. */
moe_status text_language(const text_front *front, const char *code, int target, int32_t *tag, moe_error *error);
/* Return the model's spelling of a language; `data` is NULL if unknown. */
moe_span text_language_spelled(const moe_model *m, const char *code, int target);
/* Return the index of a language in a list of codes, or -1. If `loose` is 1, "pt-BR" finds "pt". */
ptrdiff_t text_language_among(const char *const *codes, size_t n, const char *code, int loose);
/* Append the languages as "de en es fr", or as "en -> pt" if the file specifies the direction. */
void text_languages(const text_front *front, text_bytes *out);
int text_cuts(const text_front *front); /* 1 if the front end has a tokeniser */
moe_status text_encode(const text_front *front, const char *text, size_t length, text_ids *ids, moe_error *error);
/* Encode a text with flags of bpe_encode, which other tokenisers ignore. */
moe_status text_encode_as(const text_front *front, int how, const char *text, size_t length, text_ids *ids,
                          moe_error *error);
/* Append the text of ids to *out; line breaks and TABs become spaces. */
moe_status text_decode(const text_front *front, const int32_t *ids, size_t count, text_bytes *out, moe_error *error);
int text_decodes_lines(const text_front *front, const int32_t *ids, size_t n); /* 1 if the text has several lines */
/* Append the text of more ids, for bpe (end with bpe_decode_end). Keep line breaks and TABs if `lines` is 1. */
void text_decode_more(const text_front *front, bpe_stream *stream, const int32_t *ids, size_t count, int lines,
                      text_bytes *out);
/* Find the offset of each id from text_encode in its text. */
moe_status text_encode_begins(const text_front *front, const char *text, size_t length, text_offsets *begins,
                              moe_error *error);
/* Find the offsets of ids in their decoded text; none if unknown, for example for pieces without SentencePiece ids. */
moe_status text_decode_begins(const text_front *front, const int32_t *ids, size_t n, text_offsets *begins,
                              moe_error *error);
/* Parse pieces of the vocabulary separated by spaces ("A@@ long word"); unknown pieces become the unknown token. */
moe_status text_parse_pieces(const text_front *front, const char *text, size_t length, text_ids *ids, moe_error *error);
/* Append ids as pieces separated by spaces. Line breaks and TABs become spaces. */
moe_status text_join_pieces(const text_front *front, const int32_t *ids, size_t count, text_bytes *out,
                            moe_error *error);
/* Return the piece of a target or source id; `data` is NULL for unknown ids or without a vocabulary. */
moe_span text_piece(const text_front *front, int32_t id);
moe_span text_source_piece(const text_front *front, int32_t id);
/* Return 1 if the id is the unknown token. */
int text_is_unknown(const text_front *front, int32_t id);
/* Parse decimal ids separated by spaces ("12 7 350"), all in the model's vocabulary of sources or targets. */
moe_status text_parse_ids(const text_front *front, const char *text, size_t length, text_ids *ids, moe_error *error);

/* ---- 4. Lines in --------------------------------------------------------------------------------------- */

enum { TEXT_MAX_LINE = 1 << 20 }; /* maximum bytes per line */

typedef enum text_read {
    TEXT_READ_LINE,
    TEXT_READ_LATER, /* no input is available yet */
    TEXT_READ_END,
    TEXT_READ_STOP, /* *stop was set while waiting */
    TEXT_READ_ERROR /* see errno */
} text_read;

typedef struct text_line {
    const char *data; /* valid until the next call; without its "\n" or "\r\n" */
    size_t length;
    uint64_t number;   /* number of the line, from 1 */
    int recalled;      /* 1 if text_stream has its translation */
    int too_long;      /* 1 if the rest beyond TEXT_MAX_LINE bytes was dropped */
    int kept;          /* 1 if the line is part of a multi-line ICU message that must be copied */
    const char *given; /* [given_length] the target, if lines have one (text_options.pairs) */
    size_t given_length;
    const int32_t *prompt; /* [n_prompt] ids to answer instead of `data`; may be NULL */
    size_t n_prompt;
} text_line;

typedef struct text_reader {
    int fd;
    const volatile sig_atomic_t *stop; /* may be NULL */
    int wake;                          /* readable once *stop is set; may be -1 */
    text_bytes buffer;                 /* buffer.data[begin .. length) contains bytes read but not yet returned */
    size_t begin, searched;            /* buffer.data has no line break between `begin` and `searched` */
    uint64_t lines;
    int at_end, skipping; /* `skipping` is 1 while the rest of a line that is too long is dropped */
} text_reader;

/* The caller closes the descriptor. */
void text_reader_init(text_reader *reader, int fd, const volatile sig_atomic_t *stop, int wake);
/* Make a reader that reads a copy of `text`; return 0 if out of memory. */
int text_reader_take(text_reader *reader, const char *text);
/* Wait for the first bytes: at least eight, a line, or all. They remain in the buffer. */
text_read text_reader_peek(text_reader *reader);
/* Return the next line. Never blocks if `wait` is 0. The last line needs no line break; an initial byte order mark is
 * skipped. Lines may contain NUL bytes. */
text_read text_reader_next(text_reader *reader, int wait, text_line *line);
/* Return how many bytes of a line precede a NUL byte, invalid UTF-8 or the length limit. Write the problem to
 * why[size], or "" if there is none. */
size_t text_line_usable(const text_line *line, char *why, size_t size);
void text_reader_free(text_reader *reader);

#endif /* TEXT_H */
