/* places.h - where the files lie that this library or program finds by itself. */
#ifndef TEXT_PLACES_H
#define TEXT_PLACES_H

#include <stddef.h>

/* The path of `name`, a file or folder of data that lies beside the program or library that holds this code, or where
 * `make install` puts data for it: 1, or 0 where there is none that can be read. A Python wheel has its data so. */
int text_place_of_data(const char *name, char *path, size_t size);

#endif
