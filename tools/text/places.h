/* places.h - paths of installed files. */
#ifndef TEXT_PLACES_H
#define TEXT_PLACES_H

#include <stddef.h>

/* Find a readable data file or folder next to the program or library with this code, as in a Python wheel, or where
 * `make install` puts it. Return 0 if it is not installed. */
int text_place_of_data(const char *name, char *path, size_t size);

#endif
