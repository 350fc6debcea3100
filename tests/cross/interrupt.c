/* interrupt.c - runs a program on Windows and sends ^C, for windows.py.
 *
 * Usage: interrupt SECONDS|FILE TIMES COMMAND...
 *
 * Creates a console, starts the command in it, and sends ^C TIMES times after SECONDS, or once FILE exists. Prints the
 * exit status. The command's standard input is an empty pipe. */
#define _WIN32_WINNT 0x0A00
#include <fcntl.h>
#include <io.h>
#include <stdio.h>
#include <stdlib.h>
#include <wchar.h>
#include <windows.h>

static BOOL WINAPI ignore(DWORD event) { return event == CTRL_C_EVENT; }

int wmain(int argc, wchar_t **argv) {
    static wchar_t line[32768];
    STARTUPINFOW start = { .cb = sizeof start };
    PROCESS_INFORMATION made;
    SECURITY_ATTRIBUTES inherited = { .nLength = sizeof inherited, .bInheritHandle = TRUE };
    HANDLE empty;
    DWORD status = 0;
    if (argc < 4) return 2;
    _setmode(1, _O_BINARY);
    for (int i = 3; i < argc; i++) {
        wcscat(line, i > 3 ? L" \"" : L"\"");
        wcscat(line, argv[i]);
        wcscat(line, L"\"");
    }
    start.dwFlags = STARTF_USESTDHANDLES;
    if (!CreatePipe(&start.hStdInput, &empty, &inherited, 0)) return 2;
    start.hStdOutput = GetStdHandle(STD_OUTPUT_HANDLE);
    start.hStdError = GetStdHandle(STD_ERROR_HANDLE);
    SetHandleInformation(empty, HANDLE_FLAG_INHERIT, 0);
    FreeConsole();
    if (!AllocConsole()) return fprintf(stderr, "no console: %lu\n", GetLastError()), 2;
    SetConsoleCtrlHandler(ignore, TRUE);
    if (!CreateProcessW(NULL, line, NULL, NULL, TRUE, 0, NULL, NULL, &start, &made))
        return fprintf(stderr, "cannot start: %lu\n", GetLastError()), 2;
    for (int i = 0; i < _wtoi(argv[2]); i++) {
        const double seconds = _wtof(argv[1]);
        while (!seconds && _waccess(argv[1], 0) && WaitForSingleObject(made.hProcess, 100) != WAIT_OBJECT_0) {}
        if (WaitForSingleObject(made.hProcess, (DWORD)(1000 * seconds)) == WAIT_OBJECT_0) break;
        if (!GenerateConsoleCtrlEvent(CTRL_C_EVENT, 0)) return fprintf(stderr, "no ^C: %lu\n", GetLastError()), 2;
    }
    WaitForSingleObject(made.hProcess, INFINITE);
    GetExitCodeProcess(made.hProcess, &status);
    printf("status %lu\n", status);
    return 0;
}
