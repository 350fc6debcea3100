/* test.h - TEST(name) { ... } defines a test; run_all_tests runs all tests of a program in file order. */
#ifndef MOE_TEST_H
#define MOE_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

static struct CMUnitTest all_tests[256];
static size_t test_count;

#define TEST(name)                                                           \
    static void name(void **state);                                          \
    __attribute__((constructor)) static void add_##name(void) {              \
        all_tests[test_count++] = (struct CMUnitTest)cmocka_unit_test(name); \
    }                                                                        \
    static void name(__attribute__((unused)) void **state)

/* Define a function for run_all_tests, which returns 0 on success. */
#define FIXTURE(name) static int name(__attribute__((unused)) void **state)

static inline int run_all_tests(CMFixtureFunction before, CMFixtureFunction after) {
    return _cmocka_run_group_tests("tests", all_tests, test_count, before, after);
}
#endif
