/* start.c - where programs start on Windows. They are linked with -municode, which calls wmain instead of main. */
#include "tools/windows/posix.h"

#include <wchar.h>
#define WIN32_NO_STATUS
#include <windows.h>

int _dowildcard = 0; /* do not expand "?" and "*" in texts */
int main(int argc, char **argv);

int wmain(int argc, wchar_t **wide) {
    char **argv = calloc((size_t)argc + 1, sizeof *argv);
    for (int i = 0; argv && i < argc; i++) {
        const size_t size = 3 * wcslen(wide[i]) + 1;
        argv[i] = malloc(size);
        if (!argv[i]) return 3;
        WideCharToMultiByte(CP_UTF8, 0, wide[i], -1, argv[i], (int)size, NULL, NULL);
    }
    posix_begin();
    return argv ? main(argc, argv) : 3;
}
