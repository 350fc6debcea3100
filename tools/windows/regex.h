/* regex.h - POSIX's regular expressions without parts, by PCRE2. */
#ifndef MOE_REGEX_H
#define MOE_REGEX_H

#include "tools/windows/posix.h"

typedef struct posix_regex {
    void *code;
} regex_t;
enum { REG_EXTENDED = 1, REG_NOSUB = 2 };
#define regcomp posix_regcomp
#define regexec posix_regexec
#define regfree posix_regfree
int regcomp(regex_t *out, const char *pattern, int flags);
int regexec(const regex_t *regex, const char *text, size_t n, void *none, int flags);
void regfree(regex_t *regex);

#endif
