/* text.h - the front end that programs with text in and text out share: lines in, token ids to the library and back.
 *
 *   text_front   a model with its tokeniser. Immutable after opening, shared by any number of threads.
 *   text_reader  cuts a file descriptor into lines. One per input, used by one thread.
 *
 * jobs.h has what becomes of the lines. Nothing here prints or exits. Functions that return moe_status fill the
 * caller's moe_error.
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

/* Fill an error (NULL: there is none to fill), and return its code. */
moe_status text_fail(moe_error *error, moe_status code, const char *where, const char *format, ...)
#ifdef __GNUC__
    __attribute__((format(printf, 4, 5)))
#endif
    ;
moe_status text_out_of_memory(moe_error *error);

/* ---- 1. Ids -------------------------------------------------------------------------------------------- */

typedef struct text_ids {
    int32_t *data;
    size_t length, capacity;
} text_ids;

void text_append_ids(text_bytes *bytes, const int32_t *ids, size_t count); /* separated by spaces */
void text_ids_free(text_ids *ids);
moe_status text_ids_append(text_ids *ids, const int32_t *from, size_t count, moe_error *error);
moe_status text_ids_set(text_ids *ids, const int32_t *from, size_t count, moe_error *error); /* a copy of `from` */

/* ---- 2. Characters ------------------------------------------------------------------------------------- */

/* The characters of a text in NFC, in which what is composed and what is not are equal. Returns how many; 0: it has
 * none, is no UTF-8, or has more than `room` when they are taken apart. */
size_t text_composed(const char *data, size_t length, int32_t *out, size_t room);
/* Whether the character at data[at] is of a writing without spaces between words. */
int text_is_unspaced(const char *data, size_t length, size_t at);

/* Whether valid UTF-8 is in capitals: three words or more of two letters or more, and no small letter. */
int text_is_capitals(const char *data, size_t length);
/* Valid UTF-8 in small letters, but for those that begin a sentence; in capitals. In place: a letter of which the other
 * case takes more or fewer bytes stays what it is. */
void text_lower_case(char *data, size_t length);
void text_lower_first(char *data, size_t length); /* the first letter alone */
void text_upper_case(char *data, size_t length);

/* How a short text without a sign at its end is written for the model: few models have learned those. */
typedef enum text_variant {
    TEXT_UNCHANGED,
    TEXT_CLOSED, /* with a full stop, which the translation loses again */
    TEXT_LOWERED /* its first letter small; that of the translation is a capital then */
} text_variant;

/* Whether a text is one: five words at most, a letter at its end. 2: it begins with the one capital of its word. */
int text_is_short(const char *data, size_t length);
void text_apply_variant(text_variant manner, text_bytes *text);
/* The translation out[begin ..) as the text has it. Returns the bytes that it lost at its beginning. */
size_t text_undo_variant(text_variant manner, text_bytes *out, size_t begin);

/* ---- 3. Model and tokeniser ---------------------------------------------------------------------------- */

/* A vocabulary that the model file lists piece by piece, without SentencePiece. All zero: none. */
typedef struct text_vocabulary {
    moe_span *pieces; /* [count] by id; they lie in the model file */
    size_t count;
    text_index index; /* ids by the hash of their piece */
} text_vocabulary;

/* Where a model's ids are not SentencePiece's own: of each of its pieces the model's id, and the other way; -1: none.
 * NULL: they are, or texts of pieces are looked up in the vocabulary. */
typedef struct text_map {
    int32_t *ids;    /* [spm_size] */
    int32_t *pieces; /* [vocabulary of the model] */
} text_map;

typedef struct text_front {
    moe_model *model;
    spm *tokeniser; /* both NULL: no text, but ids, and pieces where there is a vocabulary */
    bpe *bpe;
    struct text_prompt *prompt; /* how the model is asked (prompt.h); NULL: a text is all of its input */
    spm *joiner;                /* of what the model writes; NULL: the same */
    text_map map;
    text_vocabulary vocabulary;
    text_vocabulary sources;         /* of sources, where those have ids of their own; count 0: the same */
    int of_targets;                  /* what is cut and looked up is a target: text_front_of_targets */
    int32_t special[3];              /* ids that are no text: begin, end, padding */
    int32_t unknown, target_unknown; /* ids of pieces that are not in the vocabulary; -1: there is none */
    size_t
        source_extra; /* tokens that the session adds to a source: tag, begin, end; to a language model's text: end */
    struct text_loading *loading; /* a tokeniser that was begun */
} text_front;

/* The id of a piece, of several the first; -1: the vocabulary has none. */
int32_t text_vocabulary_find(const text_vocabulary *vocabulary, const char *data, size_t length);

/* The same front end for what the model writes: targets may be cut otherwise than sources, and have other ids. It is
 * borrowed: not to be closed. */
text_front text_front_of_targets(const text_front *front);

/* Codes of languages: in the metadata, the tags of the model, or a list. */
typedef struct text_codes {
    const moe_model *model;
    ptrdiff_t entry; /* of the metadata; -1: the model's tags */
    const char *const *codes;
    size_t n;
} text_codes;

/* The languages that may stand on one side: what the file says (languages.sources, languages.targets in its metadata),
 * or, where it says nothing, the model's tags. */
text_codes text_languages_of(const moe_model *m, int target);
moe_span text_code_at(const text_codes *codes, size_t i);
/* Sets *tag of a source's or a target's language, which may be written as the model has it or as other models do: "de"
 * finds "deu_Latn" and "pt-BR" finds "pt". -1: it is a language of the model without a tag. An
 * unknown language is MOE_ERROR_ARGUMENT, with the known ones in the message. */
moe_status text_language(const text_front *front, const char *code, int target, int32_t *tag, moe_error *error);
/* A language of one side as the model spells it, by the same spellings; its data is NULL where it is none. */
moe_span text_language_spelled(const moe_model *m, const char *code, int target);
/* The number of a language in a list of codes, by the same spellings; -1: it is not there. With `loose` "pt-BR" finds
 * "pt", too. */
ptrdiff_t text_language_among(const char *const *codes, size_t n, const char *code, int loose);
/* "de en es fr", or "en -> pt" of a model whose file says it */
void text_languages(const text_front *front, text_bytes *out);
int text_cuts(const text_front *front); /* whether it has a tokeniser */
/* The error that an answer of spm.h's other than 0 is: MOE_ERROR_MEMORY, or MOE_ERROR_ARGUMENT. */
moe_status text_spm_failed(int answer, const char *where, const char *why, moe_error *error);
moe_status text_encode(const text_front *front, const char *text, size_t length, text_ids *ids, moe_error *error);
/* The same of a template, whose added tokens are tokens (bpe.h); other tokenisers have none. */
moe_status text_encode_template(const text_front *front, const char *text, size_t length, text_ids *ids,
                                moe_error *error);
/* Appends to *out. The result holds no line break and no TAB, whatever the pieces say: they become spaces. */
moe_status text_decode(const text_front *front, const int32_t *ids, size_t count, text_bytes *out, moe_error *error);
int text_decodes_lines(const text_front *front, const int32_t *ids, size_t count); /* whether there are several */
/* The same of tokens as they come, appended to *out, so that all of it together is what one call gives. `lines`: line
 * breaks and TABs stay. Only with bpe (bpe_decode_end ends it). */
void text_decode_more(const text_front *front, bpe_stream *stream, const int32_t *ids, size_t count, int lines,
                      text_bytes *out);
/* Where each of the ids that text_encode gives begins in the text, as spm_encode_begins. */
int text_encode_begins(const text_front *front, const char *text, size_t length, uint32_t **begins, size_t *capacity,
                       size_t *count, char *error, size_t error_size);
/* Where each of the ids begins in the text that they are joined to, as spm_decode_begins. *count 0: it cannot
 * be told, as with vocabularies whose pieces SentencePiece does not number. */
int text_decode_begins(const text_front *front, const int32_t *ids, size_t n, uint32_t **begins, size_t *capacity,
                       size_t *count, char *error, size_t error_size);
/* "A@@ long word": pieces of the model's own vocabulary separated by spaces; unknown ones become the unknown token. */
moe_status text_parse_pieces(const text_front *front, const char *text, size_t length, text_ids *ids, moe_error *error);
/* The other way, appended to *out. No line break and no TAB, as with text_decode. */
moe_status text_join_pieces(const text_front *front, const int32_t *ids, size_t count, text_bytes *out,
                            moe_error *error);
/* What the vocabulary calls an id of a target, and of a source; `data` NULL: there is none, or no vocabulary. */
moe_span text_piece(const text_front *front, int32_t id);
moe_span text_source_piece(const text_front *front, int32_t id);
/* 1 if the id stands for an unknown piece. */
int text_is_unknown(const text_front *front, int32_t id);
/* "12 7 350": decimal ids separated by spaces. Every id must be in the model's vocabulary of sources, or of targets. */
moe_status text_parse_ids(const text_front *front, const char *text, size_t length, text_ids *ids, moe_error *error);

/* ---- 4. Lines in --------------------------------------------------------------------------------------- */

enum { TEXT_MAX_LINE = 1 << 20 }; /* bytes of a line that are kept */

typedef enum text_read {
    TEXT_READ_LINE,
    TEXT_READ_LATER, /* nothing there yet                                 */
    TEXT_READ_END,
    TEXT_READ_STOP, /* *stop became non-zero while waiting               */
    TEXT_READ_ERROR /* errno says why                                    */
} text_read;

typedef struct text_line {
    const char *data; /* valid until the next call; without its "\n" or "\r\n" */
    size_t length;
    uint64_t number;   /* 1 for the first                                */
    int too_long;      /* more than TEXT_MAX_LINE bytes: the rest is gone */
    int kept;          /* it is of an ICU message that goes over several lines, and stays as it is */
    const char *given; /* [given_length] the target, NULL: there is none, or it is in `data` (text_options.pairs) */
    size_t given_length;
    const int32_t *prompt; /* [n_prompt] ids that are answered, in the place of `data`; NULL: there are none */
    size_t n_prompt;
} text_line;

typedef struct text_reader {
    int fd;
    const volatile sig_atomic_t *stop; /* may be NULL */
    int wake;                          /* can be read from once *stop is not zero; -1: there is no such descriptor */
    text_bytes buffer;                 /* bytes read and not handed out: buffer.data[begin .. length) */
    size_t begin, searched;            /* no line break before `searched` */
    uint64_t lines;
    int at_end, skipping; /* skipping: inside the rest of a line that is too long */
} text_reader;

/* The descriptor stays the caller's. */
void text_reader_init(text_reader *reader, int fd, const volatile sig_atomic_t *stop, int wake);
/* Lines of a text, which is copied, in place of those of a descriptor; 0: no memory. */
int text_reader_take(text_reader *reader, const char *text);
/* The next line. `wait` 0 never blocks. A last line without a line break counts; a byte order mark at the very
 * beginning does not. Lines may hold NUL bytes. */
text_read text_reader_next(text_reader *reader, int wait, text_line *line);
/* How many bytes of a line come before the first trouble: a NUL byte, what is no UTF-8, or that it is too long. `why`
 * [size] says which, and is empty where there is none. */
size_t text_line_usable(const text_line *line, char *why, size_t size);
void text_reader_free(text_reader *reader);

#endif /* TEXT_H */
