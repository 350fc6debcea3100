/* places.h - paths of installed files. */
#ifndef TEXT_PLACES_H
#define TEXT_PLACES_H

#include "moe.h"

#include <stddef.h>

/* Find a readable data file or folder next to the program or library with this code, as in a Python wheel, or where
 * `make install` puts it. Return 0 if it is not installed. */
int text_place_of_data(const char *name, char *path, size_t size);

/* Find the program or library that contains this code. Return 0 if unknown. */
int text_place_of_self(char *path, size_t size);

/* Find a program next to this code, in ../bin or in $PATH; this program, if it contains all (tools/dist): the caller
 * passes `name` as argument 0. Return 0 if it is not installed. */
int text_place_of_program(const char *name, char *path, size_t size);

/* Find the model that is installed with this code, or a program that contains one. Return 0 if there is none. */
int text_place_of_shipped(char *path, size_t size);

/* Write the folder of models that moe-get has fetched: $XDG_DATA_HOME/moe or ~/.local/share/moe; if `converted` is 1,
 * that of their conversions: $XDG_CACHE_HOME/moe or ~/.cache/moe. Windows: in %LOCALAPPDATA%. Errors: MOE_ERROR_IO. */
moe_status text_place_of_models(int converted, char *path, size_t size, moe_error *error);

#endif
