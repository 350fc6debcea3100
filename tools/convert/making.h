/* making.h - a conversion in progress: its error, its memory and the metadata of the model file.
 *
 * A conversion is a sequence of steps, each of which returns 1, or 0 after an error was stored here. After an error all
 * functions do nothing.
 */
#ifndef CONVERT_MAKING_H
#define CONVERT_MAKING_H

#include "tools/text/bytes.h"

struct making_block;

typedef struct making {
    const char *out; /* the file to write */
    moe_error *error;
    moe_status status;
    void (*note)(void *user, const char *message);              /* may be NULL */
    void (*begin)(void *user, uint64_t bytes, uint64_t source); /* called before writing; may be NULL */
    void *user;
    const char *resume; /* as in moe_write_params; may be NULL */
    struct making_block *blocks;
    moe_meta_entry *entries;
    size_t n_entries, entry_capacity;
} making;

void making_free(making *m);

int making_failed(making *m, moe_status status); /* 1 if the step succeeded */
/* Store an error about a file: MOE_ERROR_FORMAT, or MOE_ERROR_UNSUPPORTED for files that convert.py may support. */
int making_refuse(making *m, const char *file, const char *format, ...)
#ifdef __GNUC__
    __attribute__((format(printf, 3, 4)))
#endif
    ;
int making_unsupported(making *m, const char *file, const char *format, ...)
#ifdef __GNUC__
    __attribute__((format(printf, 3, 4)))
#endif
    ;
int making_no_memory(making *m);
void making_note(making *m, const char *format, ...)
#ifdef __GNUC__
    __attribute__((format(printf, 2, 3)))
#endif
    ;

/* Allocate memory that lasts as long as the conversion, followed by a NUL; NULL after an error. `data` may be NULL. */
void *making_keep(making *m, const void *data, size_t bytes);
char *making_join(making *m, const char *folder, const char *name); /* a path */
/* Return the name of a model that is given none: that of its folder, or of its file without the extension. */
const char *making_default_name(making *m, const char *path, int is_folder);

/* ---- Metadata ---- */

void making_put_int(making *m, const char *key, int64_t value);
void making_put_real(making *m, const char *key, double value);
void making_put_span(making *m, const char *key, moe_meta_kind kind, const void *data, size_t length); /* not copied */
void making_put_text(making *m, const char *key, const char *text); /* not copied; may be NULL */
/* Copy a list of texts, followed by `more` empty ones. */
void making_put_texts(making *m, const char *key, const moe_span *all, size_t n, size_t more);
void making_put_ints(making *m, const char *key, const int64_t *all, size_t n);
moe_meta_entry *making_find(making *m, const char *key); /* NULL if absent */

/* ---- Writing ---- */

/* Write the file from files of `source` bytes; 0 after an error. Fails early if the disk has no room for it. The error
 * that a callback stores precedes that of moe_model_write. */
int making_write(making *m, const moe_write_params *params, uint64_t source);

#endif
