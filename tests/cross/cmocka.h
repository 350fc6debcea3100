/* cmocka.h - the subset of cmocka that tests/engine/test_kernels.c uses, for `make test-arm`: Debian has no cmocka for
 * its cross-compiler unless a foreign architecture is added. Prints TAP; failed assertions longjmp. */
#ifndef MOE_CROSS_CMOCKA_H
#define MOE_CROSS_CMOCKA_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

struct CMUnitTest {
    const char *name;
    void (*run)(void **state);
};

static jmp_buf cross_failed;

__attribute__((noreturn, format(printf, 3, 4))) static inline void cross_fail(const char *file, int line,
                                                                              const char *format, ...) {
    va_list args;
    va_start(args, format);
    printf("# %s:%d: ", file, line);
    vprintf(format, args);
    printf("\n");
    va_end(args);
    longjmp(cross_failed, 1);
}

#define cross_check(condition) ((condition) ? (void)0 : cross_fail(__FILE__, __LINE__, "%s", #condition))

#define fail_msg(...) cross_fail(__FILE__, __LINE__, __VA_ARGS__)
#define print_message printf
#define assert_true(c) cross_check((c) != 0)
#define assert_false(c) cross_check((c) == 0)
#define assert_null(p) cross_check((p) == NULL)
#define assert_non_null(p) cross_check((p) != NULL)
#define assert_ptr_equal(a, b) cross_check((const void *)(a) == (const void *)(b))
#define assert_int_equal(a, b) cross_check((unsigned long long)(a) == (unsigned long long)(b))
#define assert_string_equal(a, b) cross_check(strcmp(a, b) == 0)
#define assert_string_not_equal(a, b) cross_check(strcmp(a, b) != 0)
#define assert_memory_equal(a, b, n) cross_check(memcmp(a, b, n) == 0)

#define cmocka_unit_test(f) { #f, f }
typedef int (*CMFixtureFunction)(void **state);

static inline int _cmocka_run_group_tests(const char *group, const struct CMUnitTest *tests, size_t n,
                                          CMFixtureFunction before, CMFixtureFunction after) {
    volatile int failed = 0;
    (void)group, (void)before, (void)after;
    printf("1..%zu\n", n);
    for (volatile size_t i = 0; i < n; i++) {
        void *state = NULL;
        if (setjmp(cross_failed) == 0) {
            tests[i].run(&state);
            printf("ok %zu - %s\n", i + 1, tests[i].name);
        } else {
            failed++;
            printf("not ok %zu - %s\n", i + 1, tests[i].name);
        }
        fflush(stdout);
    }
    return failed;
}
#endif
