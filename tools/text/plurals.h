/* plurals.h - regular plurals of glossary terms that change more than the ending of the last word. */
#ifndef TEXT_PLURALS_H
#define TEXT_PLURALS_H

#include <stddef.h>

enum { TEXT_PLURALS = 16, TEXT_PLURAL_BYTES = 216 }; /* maximum number of plurals per term, and bytes of each */

/* Write a term's plurals to out, NUL-terminated; return their number. The language is unknown, so some do not exist.
 * English company: companies; French journal: journaux, base de données: bases de données; Spanish luz: luces; German
 * Haus: Häus, to which the glossary adds endings, neuer Vertrag: neuen Vertrag, neue Verträg. `length` is at most 200
 * bytes. */
size_t text_plurals(const char *term, size_t length, char out[TEXT_PLURALS][TEXT_PLURAL_BYTES]);

#endif
