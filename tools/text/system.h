/* system.h - differences between systems that are not functions: tools/windows/posix.h provides those of POSIX. */
#ifndef TEXT_SYSTEM_H
#define TEXT_SYSTEM_H

#include <string.h>

#ifdef _WIN32
enum { SYSTEM_IS_WINDOWS = 1 };
#define SYSTEM_SEPARATORS "/\\"
#define SYSTEM_LIST ";"            /* separates the folders of PATH */
#define SYSTEM_PROGRAM ".exe"      /* end of a program's name */
#define SYSTEM_HOME "LOCALAPPDATA" /* variable with the folder of the following two */
#define SYSTEM_DATA "moe/models"
#define SYSTEM_CACHE "moe/cache"
#define SYSTEM_TEMPORARY "TEMP" /* variable with the folder of temporary files, and its default */
#define SYSTEM_TEMPORARY_DEFAULT "."
#else
enum { SYSTEM_IS_WINDOWS = 0 };
#define SYSTEM_SEPARATORS "/"
#define SYSTEM_LIST ":"
#define SYSTEM_PROGRAM ""
#define SYSTEM_HOME "HOME"
#define SYSTEM_DATA ".local/share/moe"
#define SYSTEM_CACHE ".cache/moe"
#define SYSTEM_TEMPORARY "TMPDIR"
#define SYSTEM_TEMPORARY_DEFAULT "/var/tmp"
#endif

/* Return the last separator of a path, or NULL. */
static inline const char *system_slash(const char *path) {
    const char *last = NULL;
    for (const char *at = path; *(at += strcspn(at, SYSTEM_SEPARATORS)); at++) last = at;
    return last;
}

/* Return the last component of a path. */
static inline const char *system_name(const char *path) {
    const char *slash = system_slash(path);
    return slash ? slash + 1 : path;
}

/* Return 1 for a path that does not depend on the current folder. */
static inline int system_is_absolute(const char *path) {
    const size_t drive = SYSTEM_IS_WINDOWS && *path && path[1] == ':' ? 2 : 0;
    return path[drive] && strchr(SYSTEM_SEPARATORS, path[drive]) != NULL;
}

/* Separate the components of a path by "/" only. */
static inline void system_use_slashes(char *path) {
    for (; SYSTEM_IS_WINDOWS && *path; path++)
        if (*path == '\\') *path = '/';
}

#endif
