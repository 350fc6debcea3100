/* fingerprints.h - libexttextcat's fingerprints in memory. Compiled with that library by tools/dist/libraries. */
#ifndef MOE_FINGERPRINTS_H
#define MOE_FINGERPRINTS_H

typedef struct moe_fingerprint {
    const char *name, *text; /* such as "de.lm"; the file's contents */
} moe_fingerprint;

extern const moe_fingerprint moe_fingerprints[]; /* ends with a NULL name */

#endif
