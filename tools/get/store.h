/* store.h - the folders of fetched and converted models.
 *
 * A fetched model is the folder DATA/OWNER/NAME or DATA/firefox/PAIR, where DATA is $XDG_DATA_HOME/moe (or
 * ~/.local/share/moe). It contains the published files and a record, moe-get.json, which is written last: a folder
 * without it is incomplete, and no program uses it. Until then .plan names the files. Only files that the record or the
 * plan names are removed. Converted models are CACHE/OWNER/NAME.bin and
 * CACHE/firefox/PAIR.bin, where CACHE is $XDG_CACHE_HOME/moe (or ~/.cache/moe). Nothing else is written.
 *
 * Errors: MOE_ERROR_IO, MOE_ERROR_MEMORY, MOE_ERROR_FORMAT (a damaged record), MOE_ERROR_CANCELLED.
 */
#ifndef GET_STORE_H
#define GET_STORE_H

#include "moe.h"
#include "tools/get/sources.h"

#include <signal.h>

enum { STORE_PATH = 4096 };

/* A fetched model, or a part of one. */
typedef struct store_model {
    char id[SOURCE_NAME];
    char licence[64], variant[64];
    double comet, bleu; /* negative if unknown */
    uint64_t bytes;     /* of its files, or of the fetched part */
    int complete;       /* 1 if the record names only files that exist with their sizes */
} store_model;

/* Set `out` to the folder of fetched models, or of converted ones. */
moe_status store_data(char out[STORE_PATH], moe_error *error);
moe_status store_cache(char out[STORE_PATH], moe_error *error);
/* Set `out` to the folder of a model, and to the path of its conversion. */
moe_status store_folder(const char *id, char out[STORE_PATH], moe_error *error);
moe_status store_converted(const char *id, char out[STORE_PATH], moe_error *error);
moe_status store_make_folder(const char *path, moe_error *error); /* and its parents */
moe_status store_make_parent(const char *path, moe_error *error); /* the folders that contain a file */

/* Lock a model's folder, waiting while another process has the lock. `waiting`, called once, may be NULL. */
moe_status store_lock(const char *folder, const volatile sig_atomic_t *stop, void (*waiting)(long process), int *lock,
                      moe_error *error);
void store_unlock(const char *folder, int lock); /* removes a folder without files of the model */

/* Write the plan, before files of a model are fetched. Files of an earlier plan that are not in the model are removed.
 */
moe_status store_plan(const char *folder, const source_model *model, moe_error *error);
/* Remove the conversion of an earlier version, and write the record. names[i] and hashes[i] are those of
 * model->files[i]. */
moe_status store_record(const char *folder, const source_model *model, const char *origin, char (*names)[SOURCE_NAME],
                        char (*hashes)[SHA256_TEXT], moe_error *error);
/* Read the record of a model. A missing or damaged record makes it incomplete. */
void store_read(const char *folder, const char *id, store_model *out);
/* List all models in order of their names; the caller frees *out. */
moe_status store_list(store_model **out, size_t *n, moe_error *error);
/* Remove the files of a model and its conversion. *left is 1 if other files remain in its folder. `stop` and `waiting`
 * are those of store_lock. */
moe_status store_remove(const char *id, const volatile sig_atomic_t *stop, void (*waiting)(long process), int *left,
                        moe_error *error);
/* Check that the disk has room for `bytes`, less those of files in the folder. */
moe_status store_check_room(const char *folder, uint64_t bytes, moe_error *error);

#endif
