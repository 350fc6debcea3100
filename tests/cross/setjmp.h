/* setjmp.h - for WebAssembly, which has no setjmp: the first failed assertion ends the program. */
#if defined(__wasm__)
#include <stdlib.h>
typedef int jmp_buf;
#define setjmp(buffer) ((void)(buffer), 0)
#define longjmp(buffer, value) exit(((void)(buffer), value))
#else
#pragma GCC system_header
#include_next <setjmp.h>
#endif
