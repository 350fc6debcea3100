/* lines.c - translate or score lines in order; documented in lines.h.
 *
 * Contents
 *   1. Translators  created from the options
 *   2. Reading      lines, paragraphs, messages that span lines
 *   3. Writing      finished lines, in order
 *   4. Running      from the first line to the totals
 */
#define _POSIX_C_SOURCE 200809L /* sigset_t */

#include "tools/programs/lines.h"
#include "tools/text/messages.h"
#include "tools/text/models.h"
#include "tools/text/prompt.h"
#include "tools/text/several.h"
#include "tools/text/spans.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ==== 1. Translators ==================================================================================== */

text_settings program_settings(const program_common *o) {
    text_settings s = o->settings;
    s.copy = o->no_mmap;
    s.verify = o->no_verify ? 0 : -1;
    s.cache = !o->no_cache;
    s.form = o->ids ? TEXT_FORM_IDS : o->pretokenized ? TEXT_FORM_PIECES : TEXT_FORM_TEXT;
    s.routing = o->routing != NULL;
    s.log = o->verbose ? program_log : NULL;
    s.warn = o->quiet ? NULL : program_log;
    s.before = "--";
    return s;
}

typedef struct dry_run {
    const program_common *options;
    const moe_model *model;
    int status; /* exit status, or -1 to continue */
} dry_run;

/* Print the report of --dry-run; `bytes` is the memory for sessions, which the library computes. */
static moe_status report_memory(void *user, size_t bytes, moe_error *error) {
    dry_run *d = user;
    d->status = program_report_memory(d->options, d->model, bytes);
    *error = (moe_error){ .code = MOE_ERROR_CANCELLED };
    return error->code;
}

/* Report an error in a glossary, prompt or style; return the exit status. */
static int refuse_text(const text_settings *s, const moe_error *e) {
    if (e->code == MOE_ERROR_IO || e->code == MOE_ERROR_MEMORY) return program_failed(e);
    if (strncmp(e->where, "glossary", 8) != 0) return program_usage_error("%s", e->message);
    return program_error("%s: %s: %s", s->glossary, e->where, e->message), EXIT_USAGE;
}

static int refuse_session(const moe_error *e) {
    const int source = strcmp(e->where, "source") == 0, language = source || strcmp(e->where, "target") == 0;
    program_error("%s%s", source ? "-s: " : language ? "-t: " : "", e->message);
    return program_session_status(e->code);
}

int program_translator(const program_common *o, text_settings *s, const moetext_model *model, const char *unit,
                       moetext **out) {
    dry_run dry = { o, moetext_model_engine(model), -1 };
    moetext *t = NULL;
    moe_error e;
    sigset_t before;
    if (o->dry_run || s->max_memory) {
        if (text_model_wait(model, &e)) return program_file_error(o->model, &e);
        s->resident = program_memory(o, dry.model);
    }
    program_hold_signals(&before);
    const moe_status begun = text_leg_begin(model, s, o->dry_run ? report_memory : NULL, &dry, &t, &e);
    program_release_signals(&before);
    if (dry.status >= 0) return dry.status;
    if (begun) return refuse_session(&e);
    int status = -1;
    if (text_model_wait(model, &e)) status = program_file_error(o->model, &e);
    else if (text_leg_end(t, &e)) status = refuse_text(s, &e);
    if (status >= 0) return moetext_free(t), status;
    program_warn_of_gating(o, unit);
    *out = t;
    return -1;
}

/* ==== 2. Reading ======================================================================================== */

/* Return the length of a paragraph without the hyphen of a word that continues in the next line, or 0 if its last word
 * is whole. The hyphen remains in "state-of-the-\nart" and "Vor- und Nachteile". */
static size_t hyphenated(const text_bytes *p, const text_line *line) {
    static const char joints[] = "and or to und oder bis et ou y o e";
    size_t end = p->length, begin, word = text_word_end(line->data, line->length, 0);
    if (end < 3 || p->data[end - 1] != '-' || *line->data < 'a' || *line->data > 'z') return 0;
    for (begin = --end; begin && text_is_wordlike_before(p->data, p->length, begin); begin--) {}
    if (begin == end || text_is_listed(joints, line->data, word)) return 0;
    return begin && p->data[begin - 1] == '-' ? end + 1 : end;
}

/* Append a line, stripped of white space at both ends, to the paragraph. */
static void join_line(program_lines *l, const text_line *line) {
    if (!l->paragraph.length) l->number = line->number, l->too_long = 0;
    l->too_long |= line->too_long || l->paragraph.length + line->length > TEXT_MAX_LINE;
    if (l->too_long) return;
    const size_t part = l->paragraph.failed ? 0 : hyphenated(&l->paragraph, line);
    if (part) l->paragraph.length = part;
    else if (l->paragraph.length) text_append(&l->paragraph, " ", 1);
    text_append(&l->paragraph, line->data, line->length);
}

/* Read the next paragraph or blank line. */
static text_read next_paragraph(program_lines *l, int wait, text_line *line) {
    text_read state = TEXT_READ_LINE;
    if (l->over) l->paragraph.length = 0, l->over = 0;
    if (l->blank) {
        l->blank = 0;
        *line = (text_line){ .data = "", .number = l->number };
        return TEXT_READ_LINE;
    }
    while (!l->blank && (state = text_reader_next(&l->reader, wait, line)) == TEXT_READ_LINE) {
        while (line->length && strchr(" \t", line->data[line->length - 1])) line->length--;
        while (line->length && strchr(" \t", *line->data)) line->data++, line->length--;
        if (line->length) join_line(l, line);
        else if (l->paragraph.length) l->blank = 1;
        else return state;
    }
    if (l->paragraph.failed) return text_out_of_memory(&l->trouble), TEXT_READ_STOP;
    if (!l->blank && (state != TEXT_READ_END || !l->paragraph.length)) return state;
    l->over = 1;
    *line = (text_line){ l->paragraph.data, l->paragraph.length, .number = l->number, .too_long = l->too_long };
    return TEXT_READ_LINE;
}

enum { LINES_AHEAD = 64 };

static void put_ahead(program_lines *l, const text_line *line) {
    if (l->lines_ahead++) text_append(&l->ahead, "\n", 1);
    else text_clear(&l->ahead), l->begin = 0, l->number = line->number;
    text_append(&l->ahead, line->data, line->length);
    l->too_long = l->closed = line->too_long;
}

/* Take the first `bytes` bytes of l->ahead: one line, or all lines of a message. */
static void take_ahead(program_lines *l, size_t bytes, text_line *line) {
    const char *data = l->ahead.data + l->begin;
    size_t lines = 1;
    for (const char *at = data; (at = memchr(at, '\n', bytes - (size_t)(at - data))); at++) lines++;
    l->lines_ahead -= lines;
    *line = (text_line){ data, bytes, l->number, l->too_long && !l->lines_ahead, .kept = l->kept_ahead > 0 };
    l->kept_ahead -= l->kept_ahead > 0;
    l->number += lines;
    l->begin += bytes + 1;
}

/* Return the length of the message at the start of l->ahead, and set *first to the length of its first line. Messages
 * that are only copied are read line by line. */
static size_t lines_of_message(const program_lines *l, size_t *first, int *open) {
    const char *data = l->ahead.data + l->begin;
    const size_t length = l->ahead.failed ? 0 : l->ahead.length - l->begin;
    const char *end = length ? memchr(data, '\n', length) : NULL;
    *first = end ? (size_t)(end - data) : length;
    *open = 0;
    return l->kept_ahead || l->ahead.failed ? *first : text_message_lines(data, length, *first, open);
}

/* Read the next line, or all lines of a translatable ICU message. */
static text_read next_line(program_lines *l, int wait, text_line *line) {
    text_read state = TEXT_READ_LINE;
    size_t first, bytes;
    int open;
    if (!l->lines_ahead) {
        state = text_reader_next(&l->reader, wait, line);
        if (state != TEXT_READ_LINE || line->too_long || !l->messages) return state;
        text_message_lines(line->data, line->length, line->length, &open);
        if (!open) return state;
        put_ahead(l, line);
    }
    while ((bytes = lines_of_message(l, &first, &open), open) && l->lines_ahead < LINES_AHEAD && !l->closed) {
        text_line more;
        do {
            state = text_reader_next(&l->reader, wait, &more);
            if (state == TEXT_READ_LATER || state == TEXT_READ_STOP) return state;
            if (state == TEXT_READ_LINE) put_ahead(l, &more);
            else l->closed = 1;
        } while (!l->closed && !memchr(more.data, '}', more.length) && l->lines_ahead < LINES_AHEAD);
    }
    if (l->ahead.failed) return text_out_of_memory(&l->trouble), TEXT_READ_STOP;
    if (bytes > first && (open || !l->splits || !text_message_is(l->ahead.data + l->begin, bytes))) {
        for (size_t at = 0; at < bytes; at++) l->kept_ahead += l->ahead.data[l->begin + at] == '\n';
        l->kept_ahead++;
    }
    take_ahead(l, l->kept_ahead ? first : bytes, line);
    return TEXT_READ_LINE;
}

/* Read the next text. Return MOE_PULL_REQUEST, or another result of a pull function. */
static int next_text(program_lines *l, int wait, text_line *line) {
    if (program_signal || l->out.error || l->trouble.code) return MOE_PULL_CANCEL;
    const text_read got = (l->paragraphs ? next_paragraph : next_line)(l, wait, line);
    if (got == TEXT_READ_ERROR) l->read_error = errno;
    return got == TEXT_READ_LINE    ? MOE_PULL_REQUEST
           : got == TEXT_READ_LATER ? MOE_PULL_LATER
           : got == TEXT_READ_END   ? MOE_PULL_END
                                    : MOE_PULL_CANCEL;
}

static int is_blank(const char *data, size_t length) { return !text_trimmed(data, length, " \t\r\n").length; }

/* Return the last *lines lines, each with its line break, or fewer if they exceed TEXT_PROMPT_BACK. Set *lines to their
 * number. */
static moe_span last_lines(const text_bytes *t, size_t *lines) {
    size_t begin = t->length, n = 0;
    for (size_t at = begin; at && n < *lines; n++, begin = at) {
        for (at--; at && t->data[at - 1] != '\n';) at--;
        if (t->length - at > TEXT_PROMPT_BACK) break;
    }
    *lines = n;
    return (moe_span){ t->data + begin, t->length - begin };
}

/* Set l->shown to the context of a text, and append the text to l->earlier, from which the next context is taken. */
static void look_back(program_lines *l, const text_line *line) {
    char why[128];
    text_clear(&l->shown);
    if (!l->context || is_blank(line->data, line->length)) return;
    const size_t usable = text_line_usable(line, why, sizeof why);
    l->n_earlier -= text_prompt_first(l->n_earlier, l->context);
    const moe_span last = last_lines(&l->earlier, &l->n_earlier);
    text_append(&l->shown, last.data, last.length);
    text_clear(&l->earlier);
    text_append(&l->earlier, last.length ? l->shown.data : "", last.length);
    if (!is_blank(line->data, usable)) {
        text_append(&l->earlier, line->data, usable);
        text_append(&l->earlier, "\n", 1);
        l->n_earlier++;
    }
    if (l->shown.failed || l->earlier.failed) text_out_of_memory(&l->trouble);
}

/* Read the next text of the input and its context. Return the result of a pull function. */
static int read_text(program_lines *l, int wait, text_line *line) {
    const int answer = next_text(l, wait, line);
    if (answer == MOE_PULL_REQUEST) look_back(l, line);
    return answer;
}

/* Header of a text sent to another process; the bytes of the text and its context follow. */
typedef struct record {
    uint64_t number;
    size_t length, context;
    int too_long, kept;
} record;

size_t program_record_bytes(const char *at) {
    record r;
    memcpy(&r, at, sizeof r);
    return sizeof r + r.length + r.context;
}

void program_lines_pack(program_lines *l, size_t n, text_bytes *packed) {
    text_line line;
    for (; n && !packed->failed && read_text(l, 1, &line) == MOE_PULL_REQUEST; n--) {
        const record r = { line.number, line.length, l->shown.length, line.too_long, line.kept };
        text_append(packed, (const char *)&r, sizeof r);
        text_append(packed, line.data, line.length);
        text_append(packed, l->shown.length ? l->shown.data : "", l->shown.length);
    }
    if (packed->failed) text_out_of_memory(&l->trouble);
}

/* Read the next text from the records. Return the result of a pull function. */
static int unpack_text(program_lines *l, text_line *line) {
    if (program_signal || l->trouble.code) return MOE_PULL_CANCEL;
    if (!l->packed_length) return MOE_PULL_END;
    record r;
    memcpy(&r, l->packed, sizeof r);
    const char *data = l->packed + sizeof r;
    const size_t bytes = sizeof r + r.length + r.context;
    *line = (text_line){ .data = data, .length = r.length, .number = r.number, .too_long = r.too_long, .kept = r.kept };
    text_clear(&l->shown);
    text_append(&l->shown, data + r.length, r.context);
    if (l->shown.failed) text_out_of_memory(&l->trouble);
    l->packed += bytes;
    l->packed_length -= bytes;
    return MOE_PULL_REQUEST;
}

/* Signatures of files that are not text. The last two formats (PDF and RTF) can be valid text. */
static const struct {
    const char *begin, *kind;
} binary[] = {
    { "PK\003\004", "a zip file, e.g. of .docx, .odt or .epub; moe-documents translates documents" },
    { "\xD0\xCF\x11\xE0", "a file of .doc, .xls or .ppt; save it as .docx, .xlsx or .pptx for moe-documents" },
    { "\x1F\x8B", "compressed by gzip; decompress it with gzip -dc" },
    { "BZh", "compressed by bzip2; decompress it with bzip2 -dc" },
    { "\xFD"
      "7zXZ",
      "compressed by xz; decompress it with xz -dc" },
    { "\x28\xB5\x2F\xFD", "compressed by zstd; decompress it with zstd -dc" },
    { "\x7F"
      "ELF",
      "a program, not text" },
    { "MZ\x90", "a program, not text" },
    { "%PDF-1.", "a PDF file; extract its text first, e.g. with pdftotext" },
    { "%PDF-2.", "a PDF file; extract its text first, e.g. with pdftotext" },
    { "{\\rtf1", "an RTF file; save it as .docx for moe-documents" },
};

/* Describe a binary file, judging by its first bytes; return NULL for text. Treat text with a few control characters,
 * and UTF-16, as damaged text, which is reported line by line. */
static const char *binary_kind(const char *data, size_t length) {
    enum { RTF = sizeof binary / sizeof *binary - 3, FIRST = 4096 };
    size_t controls = 0, zeros = 0;
    if (length > FIRST) length = FIRST;
    for (size_t i = 0; i < length; i++) {
        const unsigned char c = (unsigned char)data[i];
        zeros += c == 0;
        controls += c < ' ' && !(c && strchr("\t\n\v\f\r\b\x1B", c));
    }
    for (size_t i = 0; i < sizeof binary / sizeof *binary; i++)
        if (text_begins_with(data, length, binary[i].begin) &&
            (i >= RTF || controls || text_utf8_valid(data, length) + 4 < length))
            return binary[i].kind;
    return controls >= 8 && controls >= length / 20 && zeros < length / 3 ? "binary data, not text" : NULL;
}

/* Refuse a binary file before the output is opened. Return -1, or the exit status after an error message. */
static int refuse_binary(program_lines *l) {
    const program_common *o = l->options;
    if (o->as_text || o->text || isatty(l->reader.fd) || text_reader_peek(&l->reader) != TEXT_READ_LINE) return -1;
    const char *kind = l->reader.buffer.length ? binary_kind(l->reader.buffer.data, l->reader.buffer.length) : NULL;
    return kind ? program_usage_error("%s is %s", o->input ? o->input : "standard input", kind) : -1;
}

/* ==== 3. Writing ======================================================================================== */

static program_line *line_add(program_lines *l, uint64_t number) {
    program_line *x = l->spare;
    if (x) l->spare = x->next;
    else if (!(x = calloc(1, sizeof *x))) return NULL;
    text_bytes *const all[] = { &x->source, &x->given, &x->output, &x->notes, &x->partial };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) text_clear(all[i]);
    x->next = NULL;
    x->number = number;
    x->cut = x->finished = x->failed = x->kept = 0;
    x->said[0] = 0;
    x->routing = NULL;
    if (l->first) l->last->next = x;
    else l->first = x;
    return l->last = x;
}

static void line_free(program_line *x) {
    text_bytes *const all[] = { &x->source, &x->given, &x->output, &x->notes, &x->partial };
    text_bytes_free_all(all, sizeof all / sizeof *all);
    free(x);
}

/* A message and the number of parts with it. */
typedef struct told {
    size_t at, parts;
} told;

/* Print each message of a line once. */
static void tell_notes(program_lines *l, const program_line *x) {
    text_index index = { 0 };
    told *all = NULL;
    size_t n = 0, capacity = 0;
    for (size_t at = 0, length; at < x->notes.length; at += length + 1) {
        const char *message = x->notes.data + at;
        length = strlen(message);
        const uint32_t hash = text_hash(message, length);
        uint32_t found = TEXT_NONE;
        for (size_t slot = 0; all && (found = text_index_next(&index, hash, &slot)) != TEXT_NONE;)
            if (strcmp(message, x->notes.data + all[found].at) == 0) break;
        if (found != TEXT_NONE) all[found].parts++;
        else if (!text_index_add(&index, hash, n) ||
                 text_add(&all, &n, &capacity, &(told){ at, 1 }, 1, sizeof *all, &l->trouble)) {
            text_out_of_memory(&l->trouble);
            break;
        }
    }
    for (size_t i = 0; all && i < n; i++) {
        char parts[40] = "";
        if (all[i].parts > 1) snprintf(parts, sizeof parts, " (%zu parts)", all[i].parts);
        program_error("line %llu: %s%s", (unsigned long long)x->number, x->notes.data + all[i].at, parts);
    }
    text_index_free(&index);
    free(all);
}

/* Move a finished line from the queue to the block. */
static void leave(program_lines *l, program_line *x) {
    if (x->notes.length) tell_notes(l, x);
    text_append(&l->block, x->output.data ? x->output.data : "", x->output.length);
    text_append(&l->block, "\n", 1);
    l->progress.failed += x->failed || x->kept;
    l->progress.lines++;
    if (!x->routing) return;
    if (x->failed) x->routing->n_entries = 0;
    routing_put(l->routing, x->routing, &l->trouble);
}

/* Write all finished lines at the head of the queue with one call. */
static void drain(program_lines *l) {
    for (program_line *x; !l->trouble.code && (x = l->first) && x->finished;) {
        leave(l, x);
        l->first = x->next;
        x->next = l->spare;
        l->spare = x;
    }
    if (l->block.failed) text_out_of_memory(&l->trouble);
    else if (l->block.length && !l->packed) {
        program_progress_hide();
        program_write(&l->out, l->block.data, l->block.length);
        text_clear(&l->block);
    }
    program_progress_show(&l->progress);
}

static void add_note(const program_lines *l, program_line *x, int is_failure, const char *message) {
    if (is_failure || !l->options->quiet) text_append(&x->notes, message, strlen(message) + 1);
}

/* Record the result of a line. */
static void finish(program_lines *l, program_line *x, const moetext_result *r) {
    x->failed = r->status != MOE_OK;
    x->kept = (r->flags & MOETEXT_KEPT) != 0;
    for (size_t i = 0; i < r->n_notes; i++) add_note(l, x, x->kept || r->notes[i].status, r->notes[i].message);
    if (x->failed && !r->n_notes) add_note(l, x, 1, r->message);
    if (r->n_hypotheses) l->progress.tokens += r->hypotheses[0].n_logprobs;
    l->write(l, x, r);
    if (x->output.failed || x->notes.failed || x->source.failed || x->given.failed) text_out_of_memory(&l->trouble);
    else x->finished = 1, drain(l);
}

const char *program_line_note(const program_line *line, const moetext_result *result) {
    return line->said[0] ? line->said : result->message;
}

static int refuse(program_lines *l, program_line *x, const char *message) {
    finish(l, x, &(moetext_result){ .status = MOE_ERROR_ARGUMENT, .message = message });
    return 0;
}

/* Copy a line of an untranslated ICU message to the output. */
static void keep_line(program_lines *l, program_line *x, const char *data, size_t length) {
    const moetext_note note = { .message = "left untranslated: the line contains an ICU message ({n, plural, ...})" };
    text_append(&x->partial, data, length);
    const moetext_hypothesis h = { .text = x->partial.data, .length = length, .finished = 1 };
    const moetext_result r = { .message = note.message,
                               .n_hypotheses = 1,
                               .hypotheses = &h,
                               .n_notes = 1,
                               .notes = &note };
    if (x->partial.failed) text_out_of_memory(&l->trouble);
    else finish(l, x, &r);
}

/* ==== 4. Running ======================================================================================== */

static void on_routing(void *user, const moetext_routing *r) {
    program_line *x = r->user;
    (void)user;
    routing_keep(x->routing, r->routing);
}

enum { SHOWN_A_SECOND = 20 }; /* maximum number of updates of the unfinished line per second */

static void on_partial(void *user, const moetext_partial *partial) {
    program_lines *l = user;
    program_line *x = partial->user;
    const double now = program_seconds();
    text_append(&x->partial, partial->text, partial->length);
    if (x != l->first || now - l->shown_at < 1.0 / (double)SHOWN_A_SECOND) return;
    text_clear(&l->growing);
    text_append(&l->growing, x->partial.data, x->partial.length);
    text_append(&l->growing, partial->after, partial->after_length);
    if (x->partial.failed || l->growing.failed || !l->growing.length) return;
    l->shown_at = now;
    program_show_line(l->growing.data, l->growing.length);
}

/* Split a line into the two texts of a pair, or return one text if lines are not pairs. Only the first `length` bytes
 * of the line are usable. Return 0 if the line is refused. */
static int cut_line(program_lines *l, program_line *x, const char *data, size_t length, const char *why,
                    moe_span *source, moe_span *given) {
    const int fails = *why && l->options->settings.truncate <= 0;
    if (*why)
        snprintf(x->said, sizeof x->said, fails ? "%s; --truncate cuts the line there" : "%s; the line was cut there",
                 why);
    if (fails) return refuse(l, x, x->said);
    x->cut = *why != 0;
    if (x->cut) add_note(l, x, 0, x->said);
    const char *tab = l->pairs && length ? memchr(data, '\t', length) : NULL;
    *source = (moe_span){ data, tab ? (size_t)(tab - data) : length };
    if (tab) *given = (moe_span){ tab + 1, length - source->length - 1 };
    if (!l->pairs || !length || tab) return 1;
    text_append(&x->source, data, length);
    snprintf(x->said, sizeof x->said, "%s expects source TAB target: missing TAB", l->pairs);
    return refuse(l, x, x->said);
}

/* Fill the request for a line. Return 0 if the line needs no request, or after an error. */
static int ask(program_lines *l, program_line *x, const text_line *line, moetext_request *request) {
    char why[128];
    const size_t usable = text_line_usable(line, why, sizeof why);
    moe_span source = { line->data, line->length }, given = { "", 0 };
    const int whole = l->pairs || l->packed || l->paragraphs || line->kept || l->options->settings.truncate <= 0;
    /* Truncate pairs, kept lines and long whole texts here; the library truncates other texts and reports problems. */
    if (line->too_long && !whole) source.length++;
    else if ((l->pairs || line->kept || line->too_long) && !cut_line(l, x, line->data, usable, why, &source, &given))
        return 0;
    if (l->keeps && (!*why || l->options->settings.truncate > 0)) {
        text_append(&x->source, source.data, source.length < usable ? source.length : usable);
        text_append(&x->given, given.data, given.length);
    }
    if (line->kept) return keep_line(l, x, source.data, source.length), 0;
    if (l->routing && !(x->routing = routing_begin(l->routing, x->number))) text_out_of_memory(&l->trouble);
    if (l->trouble.code) return 0;
    *request = (moetext_request){ .text = source.data,
                                  .length = source.length,
                                  .task = l->task,
                                  .given = given.data,
                                  .given_length = given.length,
                                  .context = l->shown.data,
                                  .context_length = l->shown.length,
                                  .partial = l->grows ? on_partial : NULL,
                                  .routing = x->routing ? on_routing : NULL,
                                  .user = x };
    return 1;
}

static int lines_pull(void *user, int wait, moetext_request *request) {
    program_lines *l = user;
    for (text_line line;;) {
        const int answer = l->packed ? unpack_text(l, &line) : read_text(l, wait, &line);
        if (answer != MOE_PULL_REQUEST) return answer;
        program_line *x = line_add(l, line.number);
        if (!x) return text_out_of_memory(&l->trouble), MOE_PULL_CANCEL;
        if (ask(l, x, &line, request)) return MOE_PULL_REQUEST;
    }
}

static void lines_done(void *user, const moetext_result *result) {
    program_lines *l = user;
    if (!program_signal && !l->out.error && !l->trouble.code) finish(l, result->user, result);
}

int program_lines_outcome(const program_lines *l, moe_status status, const moe_error *e) {
    const program_common *o = l->options;
    const uint64_t failed = l->progress.failed;
    if (l->out.error)
        program_error("%s: %s; %llu complete lines were written", l->out.name, strerror(l->out.error),
                      (unsigned long long)l->out.lines);
    else if (l->read_error)
        program_error("%s: %s, after line %llu", o->input ? o->input : "standard input", strerror(l->read_error),
                      (unsigned long long)l->reader.lines);
    if (l->out.error || l->read_error) return EXIT_INPUT_OUTPUT;
    if (l->trouble.code) return program_failed(&l->trouble);
    if (program_signal) return l->packed ? 128 + (int)program_signal : program_stopped(o, &l->out);
    if (status) return program_failed(e);
    if (l->packed) return EXIT_DONE;
    if (l->stats) l->stats(l, &l->totals);
    if (failed)
        program_error("%llu of %llu lines could not be %s", (unsigned long long)failed,
                      (unsigned long long)l->progress.lines, l->done_word);
    return failed ? EXIT_SOME_LINES : EXIT_DONE;
}

static void sum_up(program_lines *l, double seconds) {
    l->totals = (program_totals){ .stats = moetext_stats(l->translator),
                                  .seconds = l->totals.seconds + seconds,
                                  .resident = program_resident() };
    text_translator_pieces(l->translator, &l->totals.pieces, &l->totals.unknown_pieces);
}

static int translate(program_lines *l) {
    moe_error e = { .code = MOE_OK };
    l->progress.begin = program_seconds();
    program_stoppable(l->translator);
    const moe_status status = moetext_translate(l->translator, lines_pull, lines_done, l, &e);
    program_stoppable(NULL);
    if (l->stats) sum_up(l, program_seconds() - l->progress.begin);
    program_progress_hide();
    return program_lines_outcome(l, status, &e);
}

int program_lines_translate(program_lines *l, const char *packed, size_t length) {
    l->packed = packed;
    l->packed_length = length;
    l->grows = 0;
    l->progress.lines = l->progress.failed = 0;
    text_clear(&l->block);
    const int status = translate(l);
    l->packed = NULL;
    return status;
}

int program_lines_open(program_lines *l) {
    const program_common *o = l->options;
    int in, status = program_open_input(o, &in, &l->out);
    text_reader_init(&l->reader, in, &program_signal, program_wake);
    if (status < 0) status = refuse_binary(l);
    if (status < 0) status = program_open_output(o, in, &l->out);
    if (status >= 0) return status;
    if (o->text && !text_reader_take(&l->reader, o->text)) return program_error("out of memory"), EXIT_MODEL;
    const int terminal = isatty(STDERR_FILENO), from_terminal = isatty(in), to_terminal = isatty(l->out.fd);
    if (!o->quiet && from_terminal && terminal) fputs("One sentence per line; end with ^D.\n", stderr);
    l->progress.on = !o->quiet && terminal && !to_terminal && !from_terminal;
    l->grows = l->grows && !o->quiet && terminal && to_terminal;
    return -1;
}

int program_lines_close(program_lines *l, int opened, int status) {
    text_bytes *const all[] = { &l->paragraph, &l->ahead, &l->earlier, &l->shown, &l->block, &l->growing };
    if (opened) status = program_close_streams(l->options, l->reader.fd, &l->out, status);
    text_reader_free(&l->reader);
    for (program_line *x = l->first, *next; x; x = next) next = x->next, line_free(x);
    for (program_line *x = l->spare, *next; x; x = next) next = x->next, line_free(x);
    text_bytes_free_all(all, sizeof all / sizeof *all);
    return status;
}

int program_lines_run(program_lines *l) {
    int status = program_lines_open(l);
    if (status < 0) status = translate(l);
    return program_lines_close(l, 1, status);
}
