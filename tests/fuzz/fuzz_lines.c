/* fuzz_lines.c - compares text_reader_next, which reads random chunks from a pipe, with a simple line reader, and
 * checks sentence splitting and capitals on valid UTF-8.
 *
 * To keep inputs short, a run of equal bytes is written as three bytes: 0xF5, which is invalid in UTF-8, a byte that
 * selects the length of the run, and the byte to repeat. */
#define _GNU_SOURCE /* pipe2 */

#include "moe.h"
#include "tools/text/sentences.h"
#include "tools/text/text.h"

#include "tests/fuzz/fuzz.h"

#include <fcntl.h>

enum { REPEAT = 0xF5, MOST = 5 << 20, JUDGED = 1 << 14 }; /* JUDGED: bytes to split into sentences */

typedef struct text {
    char *data;
    size_t length;
} text;

static text expand(const uint8_t *data, size_t size) {
    static const size_t times[] = {
        2, 3, 15, 64, 4095, 4096, 65536, TEXT_MAX_LINE - 1, TEXT_MAX_LINE, TEXT_MAX_LINE + 1
    };
    text t = { malloc(size % 8 ? size * 4096 + 1 : MOST), 0 };
    if (!t.data) abort();
    for (size_t i = 0; i < size; i++) {
        size_t n = 1;
        if (data[i] == REPEAT && i + 2 < size) { /* only some inputs have overlong lines, which are slow */
            n = times[data[i + 1] % (size % 8 ? 6 : sizeof times / sizeof *times)];
            i += 2;
        }
        if (t.length + n > MOST) break;
        memset(t.data + t.length, data[i], n);
        t.length += n;
    }
    return t;
}

/* ---- Lines ---- */

typedef struct expected {
    const char *data;
    size_t length, at;
    uint64_t number;
} expected;

/* Read the next line according to the contract of text_reader_next. Return 0 at the end. */
static int next_line(expected *e, text_line *line) {
    if (e->at == e->length) return 0;
    const char *begin = e->data + e->at, *end = memchr(begin, '\n', e->length - e->at);
    size_t length = end ? (size_t)(end - begin) : e->length - e->at;
    e->at += length + (end != NULL);
    if (end && length && begin[length - 1] == '\r') length--;
    if (!e->number && length >= 3 && memcmp(begin, "\xEF\xBB\xBF", 3) == 0) begin += 3, length -= 3;
    const int too_long = length > TEXT_MAX_LINE;
    *line = (text_line){ .data = begin,
                         .length = too_long ? TEXT_MAX_LINE : length,
                         .number = ++e->number,
                         .too_long = too_long };
    return 1;
}

static void check_line(const text_line *got, expected *e) {
    text_line want;
    FUZZ_CHECK(next_line(e, &want), "line %llu of %llu", (unsigned long long)got->number,
               (unsigned long long)e->number);
    FUZZ_CHECK(got->number == want.number && !got->too_long == !want.too_long && !got->kept && !got->given,
               "line %llu: number %llu, too long %d, kept %d", (unsigned long long)want.number,
               (unsigned long long)got->number, got->too_long, got->kept);
    FUZZ_CHECK(got->length == want.length, "line %llu: %zu bytes, not %zu", (unsigned long long)want.number,
               got->length, want.length);
    FUZZ_CHECK(memcmp(got->data, want.data, got->length) == 0, "line %llu differs", (unsigned long long)want.number);
}

static void check_usable(const text_line *line) {
    char why[80] = "?";
    const size_t n = text_line_usable(line, why, sizeof why);
    FUZZ_CHECK(n <= line->length && (n < line->length || !why[0] || line->too_long), "%zu of %zu bytes usable: %s", n,
               line->length, why);
    FUZZ_CHECK(!memchr(line->data, 0, n) && text_utf8_valid(line->data, n) == n, "the usable part is invalid");
}

/* Read from a pipe that delivers random chunks. */
static void read_lines(const text *t, uint64_t *r) {
    int ends[2];
    text_reader reader;
    text_line line;
    expected e = { t->data, t->length, 0, 0 };
    size_t written = 0, chunk = 1 + fuzz_below(r, fuzz_one_in(r, 2) ? 8 : 70000);
    if (pipe2(ends, O_NONBLOCK | O_CLOEXEC) != 0) abort();
    if (t->length > JUDGED && chunk < 1000) chunk = 1000 + chunk * 1000;
    text_reader_init(&reader, ends[0], NULL, -1);
    for (text_read got = TEXT_READ_LATER; got != TEXT_READ_END;) {
        if (ends[1] >= 0 && written < t->length) {
            size_t n = 1 + fuzz_below(r, chunk);
            if (n > t->length - written) n = t->length - written;
            const ssize_t done = write(ends[1], t->data + written, n);
            if (done > 0) written += (size_t)done;
        } else if (ends[1] >= 0) {
            close(ends[1]);
            ends[1] = -1;
        }
        const int wait = ends[1] < 0;
        while ((got = text_reader_next(&reader, wait, &line)) == TEXT_READ_LINE) {
            check_line(&line, &e);
            check_usable(&line);
        }
        FUZZ_CHECK(got == TEXT_READ_LATER || got == TEXT_READ_END, "unexpected reader status %d", (int)got);
        FUZZ_CHECK(!wait || got == TEXT_READ_END, "the reader does not end");
    }
    FUZZ_CHECK(!next_line(&e, &line), "no line after %llu", (unsigned long long)e.number);
    text_reader_free(&reader);
    close(ends[0]);
}

/* ---- Cells, sentences, halves and capitals ---- */

static void check_sentences(const char *data, size_t length) {
    char *lower, *again, *upper;
    size_t at = 0;
    if (length > JUDGED) length = text_utf8_cut(data, length, JUDGED);
    while (at < length) {
        const size_t n = text_sentence(data + at, length - at);
        FUZZ_CHECK(n && n <= length - at, "sentence length %zu of %zu bytes", n, length - at);
        FUZZ_CHECK(text_utf8_valid(data + at, n) == n, "a sentence ends inside a character");
        at += n;
    }
    for (at = 0; at < length;) {
        int separates;
        const size_t n = text_cell(data + at, length - at, 1, &separates);
        FUZZ_CHECK(n && n <= length - at, "cell length %zu of %zu bytes", n, length - at);
        FUZZ_CHECK(text_utf8_valid(data + at, n) == n, "a cell ends inside a character");
        at += n;
    }
    at = text_half(data, length, 1);
    FUZZ_CHECK(at <= length && text_before_mark(data, at) <= at && (!at || at < length), "halving %zu bytes failed",
               length);
    lower = malloc(3 * length + 3), again = lower + length + 1, upper = again + length + 1;
    if (!lower) abort();
    memcpy(lower, data, length);
    memcpy(upper, data, length);
    text_lower_case(lower, length);
    text_upper_case(upper, length);
    FUZZ_CHECK(text_utf8_valid(lower, length) == length && text_utf8_valid(upper, length) == length,
               "changing capitals gives invalid UTF-8");
    memcpy(again, lower, length);
    text_upper_case(again, length);
    FUZZ_CHECK(memcmp(again, upper, length) == 0, "lower-casing changed other letters");
    memcpy(again, upper, length);
    text_upper_case(again, length);
    FUZZ_CHECK(memcmp(again, upper, length) == 0, "text_upper_case is not idempotent");
    memcpy(again, data, length);
    text_upper_case(again, length);
    text_lower_case(again, length);
    FUZZ_CHECK(!text_is_capitals(again, length), "lower-case text is still in capitals");
    free(lower);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    uint64_t r = fuzz_hash(size, data, size);
    text t = expand(data, size);
    read_lines(&t, &r);
    for (size_t at = 0; at < t.length && at < JUDGED;) { /* each section of valid UTF-8 */
        const size_t n = text_utf8_valid(t.data + at, t.length - at);
        if (n) check_sentences(t.data + at, n);
        at += n + 1;
    }
    free(t.data);
    return 0;
}
