/* jobs.c - see jobs.h for what it is and for the contracts. The sections have the same numbers. */
#define _POSIX_C_SOURCE 200809L

#include "tools/text/jobs.h"
#include "tools/text/sentences.h"
#include "tools/text/spans.h"

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int is_blank(char c) { return c == ' ' || c == '\t'; }

/* ---- 1. Jobs ------------------------------------------------------------------------------------------- */

/* One note per job: the first. */
static void note(text_job *job, int *flag, const char *format, ...)
#ifdef __GNUC__
    __attribute__((format(printf, 3, 4)))
#endif
    ;

static void note(text_job *job, int *flag, const char *format, ...) {
    const int first = !job->cut && !job->failed;
    const size_t said = job->divided ? strlen(job->note) : 0;
    *flag = 1;
    if (job->failed && !job->status) job->status = MOE_ERROR_ARGUMENT;
    if (!first) return;
    va_list arguments;
    va_start(arguments, format);
    const int joint = said ? snprintf(job->note + said, sizeof job->note - said, "; ") : 0;
    vsnprintf(job->note + said + joint, sizeof job->note - said - (size_t)joint, format, arguments);
    va_end(arguments);
}

static const char *before_option(const text_options *options) { return options->option ? options->option : "--"; }

/* How much of a line is fit for use: all of it, or with `truncate` what comes before the first trouble. */
static size_t usable(const text_options *options, const text_line *line, text_job *job) {
    char why[128];
    const size_t length = text_line_usable(line, why, sizeof why);
    if (*why)
        note(job, options->truncate ? &job->cut : &job->failed, options->truncate ? "%s: cut there" : "%s; %s%s", why,
             before_option(options), "truncate would cut it there");
    return length;
}

static moe_status parse_text(const text_front *front, const text_options *options, const char *data, size_t length,
                             text_ids *ids, moe_error *error) {
    return options->ids            ? text_parse_ids(front, data, length, ids, error)
           : options->pretokenized ? text_parse_pieces(front, data, length, ids, error)
                                   : text_encode(front, data, length, ids, error);
}

static moe_status to_ids(const text_front *front, const text_options *options, const text_bytes *text, text_ids *ids,
                         text_job *job, moe_error *error) {
    moe_error why;
    ids->length = 0;
    moe_status status = parse_text(front, options, text->data, text->length, ids, &why);
    if (status == MOE_ERROR_MEMORY) return text_out_of_memory(error);
    if (status) note(job, &job->failed, "%s", why.message);
    return MOE_OK;
}

/* Whether a piece is <0x80> to <0xBF>: the one before it begins the character. */
static int continues_character(const text_front *front, int32_t id) {
    if (front->bpe) return bpe_continues(front->bpe, id);
    const moe_span piece = front->of_targets ? text_piece(front, id) : text_source_piece(front, id);
    const char high = piece.length == 6 && memcmp(piece.data, "<0x", 3) == 0 ? piece.data[3] : 0;
    return (high == '8' || high == '9' || high == 'A' || high == 'B') && piece.data[5] == '>';
}

/* Ids beyond the limit: refuse or cut, and not inside a character that is spelled in bytes. */
static void limit_ids(const text_front *front, const text_options *options, const char *what, size_t limit,
                      text_ids *ids, text_job *job) {
    if (job->failed || ids->length <= limit) return;
    if (!options->truncate) {
        note(job, &job->failed,
             "the %s has %zu tokens, at most %zu fit; %struncate would cut it, %smax-len allows more", what,
             ids->length, limit, before_option(options), before_option(options));
        job->status = MOE_ERROR_LIMIT;
        return;
    }
    size_t keep = limit;
    if (text_cuts(front) && !options->ids && !options->pretokenized) {
        while (keep && continues_character(front, ids->data[keep])) keep--;
    }
    note(job, &job->cut, "the %s has %zu tokens: cut after %zu", what, ids->length, keep);
    ids->length = keep;
}

static size_t room_of(const text_front *front, const text_options *options) { return text_job_room(front, options); }

size_t text_job_room(const text_front *front, const text_options *options) {
    const size_t extra = !text_job_is_asked(front, options) ? front->source_extra
                         : options->wishes                  ? options->wishes->extra
                                                            : text_prompt_extra(front->prompt);
    return options->max_source > extra ? options->max_source - extra : 0;
}

int text_job_is_asked(const text_front *front, const text_options *options) {
    return front->prompt && !options->ids && !options->pretokenized;
}

static int keeps_spans(const text_options *options) { return options->rules && text_rules_spans(options->rules); }

/* The same for a model that is asked in words: it reads all of a text, and what has no words stays as it is. */
static moe_status prepare_asked(const text_front *front, const text_options *options, text_job *job, moe_span source,
                                moe_error *error) {
    while (source.length && is_blank(source.data[source.length - 1])) source.length--;
    while (source.length && is_blank(*source.data)) source.data++, source.length--;
    text_clear(&job->shown);
    text_append(&job->shown, source.data, source.length);
    text_append(&job->shown, "", 0);
    if (job->shown.failed) return text_out_of_memory(error);
    if (keeps_spans(options) && !options->pairs && source.length && !text_prompt_speaks(source.data, source.length))
        job->verbatim = 1;
    return to_ids(front, options, &job->shown, &job->source_ids, job, error);
}

/* The ids of a job's source, but for what is kept of it. */
static moe_status prepare_source(const text_front *front, const text_options *options, text_job *job,
                                 moe_error *error) {
    text_bytes text = { 0 }, read = { 0 };
    if (job->message) text_message_show((text_message_text)job->message, job->source.data, job->source.length, &read);
    const moe_span source =
        job->message ? (moe_span){ read.data, read.length } : (moe_span){ job->source.data, job->source.length };
    moe_span shown = source;
    moe_status status = read.failed ? text_out_of_memory(error) : MOE_OK;
    job->loops = 0;
    if (text_job_is_asked(front, options)) {
        if (!status) status = prepare_asked(front, options, job, source, error);
        text_bytes_free(&read);
        return status;
    }
    if (options->rules && !status)
        status = text_guard_begin(options->rules, source.data, source.length, job->more, job->attempt,
                                  (text_message_text)job->message, (text_terms)job->terms, &job->guard, &shown, error);
    if (!status) text_append(&text, shown.data, shown.length);
    text_bytes_free(&read);
    if (status) return status;
    job->shouted = options->calm && !text.failed && (job->loud || text_is_shouted(text.data, text.length));
    if (job->shouted) text_calm(text.data, text.length);
    job->brief = options->brief && !job->shouted && !text.failed ? text_is_brief(text.data, text.length) : 0;
    text_put_manner(job->manner, &text);
    if ((job->shouted || job->manner) && !text.failed && text_guard_used(job->guard))
        text_guard_recall(job->guard, text.data);
    status = text.failed ? text_out_of_memory(error) : to_ids(front, options, &text, &job->source_ids, job, error);
    if (!status && !job->failed && text_guard_used(job->guard))
        status = text_guard_bind(options->rules, job->guard, text.data, text.length, &job->source_ids,
                                 options->max_target, error);
    text_bytes_free(&text);
    return status;
}

moe_status text_job_prepare(const text_front *front, const text_options *options, const text_line *line, text_job *job,
                            moe_error *error) {
    job->line = line->number;
    job->pair = options->pairs != NULL;
    job->answers = line->prompt != NULL;
    if (job->answers) return text_ids_set(&job->source_ids, line->prompt, line->n_prompt, error);
    size_t length = usable(options, line, job);
    if (job->failed) return MOE_OK; /* source stays empty: what is left of it is not what was written */
    const char *tab = options->pairs && !line->given && length ? memchr(line->data, '\t', length) : NULL;
    const size_t source = tab ? (size_t)(tab - line->data) : length;
    text_append(&job->source, line->data, source);
    if (tab) text_append(&job->target, tab + 1, length - source - 1);
    else text_append(&job->target, line->given, line->given ? line->given_length : 0);
    if (job->source.failed || job->target.failed) return text_out_of_memory(error);
    const int pair = tab || line->given;
    if (line->given && (text_utf8_valid(line->given, line->given_length) < line->given_length ||
                        (line->given_length && memchr(line->given, '\0', line->given_length)))) {
        note(job, &job->failed, "the target is not UTF-8, or has a NUL byte");
        return MOE_OK;
    }
    if (options->pairs && length && !pair) {
        note(job, &job->failed, "%s expects source TAB target, and there is no TAB", options->pairs);
        return MOE_OK;
    }

    int open = 0;
    text_append(&job->source, "", 0); /* data is never NULL */
    if (line->kept || (options->rules && text_rules_spans(options->rules) &&
                       text_has_message(job->source.data, job->source.length, &open)))
        note(job, &job->divided, "an ICU message ({n, plural, ...}) stays as it is: its branches are not translated");
    job->verbatim = open |= line->kept;
    if (open) return MOE_OK;
    const text_front targets = text_front_of_targets(front);
    moe_status status = prepare_source(front, options, job, error);
    if (!status && pair && !job->failed) status = to_ids(&targets, options, &job->target, &job->target_ids, job, error);
    if (status || job->failed) return status;
    limit_ids(front, options, "line", room_of(front, options), &job->source_ids, job);
    if (pair)
        limit_ids(&targets, options, "target", options->max_target ? options->max_target - 1 : 0, &job->target_ids,
                  job);
    /* White space only: no pieces, nothing to say. A score of nothing given nothing is no use either. */
    job->blank = !job->failed && job->source_ids.length == 0 && job->target_ids.length == 0;
    if (job->blank && options->rules) job->verbatim = 1; /* the cells of an empty row of a table */
    return MOE_OK;
}

/* The white space at both ends of a source, without what is between. */
static moe_span blanks_before(const text_bytes *source) {
    size_t n = 0;
    while (n < source->length && is_blank(source->data[n])) n++;
    return (moe_span){ source->data, n };
}

static moe_span blanks_behind(const text_bytes *source) {
    size_t n = 0;
    while (n < source->length && is_blank(source->data[source->length - 1 - n])) n++;
    return (moe_span){ source->length ? source->data + source->length - n : "", n };
}

/* An answer in words, trimmed, with the white space of its source. */
static moe_status write_asked(const text_front *front, const text_options *options, const text_job *job,
                              const moe_hypothesis *h, text_bytes *out, int *sound, moe_error *error) {
    const int keeps = keeps_spans(options) && !job->pair;
    const moe_span before = blanks_before(&job->source), behind = blanks_behind(&job->source);
    text_bytes answer = { 0 };
    moe_status status = text_decode(front, h->ids, h->n_ids, &answer, error);
    size_t begin = 0, end = answer.length;
    *sound = 1;
    while (end && is_blank(answer.data[end - 1])) end--;
    while (begin < end && is_blank(answer.data[begin])) begin++;
    const size_t at = out->length;
    if (keeps && before.length < job->source.length) text_append(out, before.data, before.length);
    text_append(out, end ? answer.data + begin : "", end - begin);
    if (keeps && before.length < job->source.length) text_append(out, behind.data, behind.length);
    if (!status && job->message)
        *sound = text_message_mend((text_message_text)job->message, job->source.data, job->source.length, at, out);
    text_bytes_free(&answer);
    return status || !out->failed ? status : text_out_of_memory(error);
}

/* An answer with its line breaks. */
static moe_status write_answer(const text_front *front, const moe_hypothesis *h, text_bytes *out, moe_error *error) {
    bpe_stream stream = { 0 };
    text_decode_more(front, &stream, h->ids, h->n_ids, 1, out);
    bpe_decode_end(&stream, out);
    return out->failed ? text_out_of_memory(error) : MOE_OK;
}

/* What the model wrote for a job whose source does not stay, appended to *out; *sound: it has all that is kept. */
static moe_status write_job(const text_front *front, const text_options *options, const text_job *job, int shout,
                            const moe_hypothesis *h, text_bytes *out, int *sound, moe_error *error) {
    const size_t begin = out->length;
    const int guarded = options->rules && text_guard_used(job->guard);
    moe_status status = MOE_OK;
    *sound = 1;
    if (job->answers) return write_answer(front, h, out, error);
    if (text_job_is_asked(front, options)) return write_asked(front, options, job, h, out, sound, error);
    if (guarded) status = text_guard_restore(options->rules, job->guard, h, job->manner, shout, out, error);
    else if (options->pretokenized) status = text_join_pieces(front, h->ids, h->n_ids, out, error);
    else if (options->ids) text_append_ids(out, h->ids, h->n_ids);
    else status = text_decode(front, h->ids, h->n_ids, out, error);
    if (!status && !guarded) text_take_manner(job->manner, out, begin);
    if (!status && !out->failed && shout && !guarded) text_shout(out->data + begin, out->length - begin);
    *sound = status || !guarded || text_guard_sound(job->guard);
    if (!status && job->message)
        *sound &= text_message_mend((text_message_text)job->message, job->source.data, job->source.length, begin, out);
    return status || !out->failed ? status : text_out_of_memory(error);
}

static void stay(text_job *job) {
    job->stays = 1;
    note(job, &job->cut, "what is to be kept did not come through the translation: the text stays as it is");
}

/* With other stand-ins. If that has been, or cannot be, the text stays. */
static moe_status second_try(const text_front *front, const text_options *options, text_job *job, int *again,
                             moe_error *error) {
    *again = 0;
    if (options->rules && text_guard_used(job->guard) && !job->attempt && !job->target_ids.length) {
        job->attempt = 1;
        const moe_status status = prepare_source(front, options, job, error);
        *again = !status && !job->failed && job->source_ids.length <= room_of(front, options);
        if (status || *again) return status;
        job->failed = 0;
    }
    stay(job);
    return MOE_OK;
}

static moe_status prompt_of(const text_front *front, const text_options *options, const text_job *job, int strictly,
                            text_ids *ids, size_t *left, moe_error *error) {
    const text_asked asked = { .text = { job->shown.data, job->shown.length },
                               .context = { job->context.data, job->context.length },
                               .source = job->from,
                               .target = job->language,
                               .glossary = options->rules ? text_rules_glossary(options->rules) : NULL,
                               .strictly = strictly };
    return text_prompt_ids(front, options->wishes, &asked, options->max_source, ids, left, error);
}

/* Whether a second try would ask for the same in other words: in the same ones it would give the same. */
static moe_status may_vary(const text_front *front, const text_options *options, const text_job *job, int *varies,
                           moe_error *error) {
    text_ids other = { 0 };
    size_t left = 0;
    const moe_status status = prompt_of(front, options, job, 1, &other, &left, error);
    *varies = !status && (other.length != job->prompt.length ||
                          memcmp(other.data, job->prompt.data, other.length * sizeof *other.data) != 0);
    text_ids_free(&other);
    return status;
}

moe_status text_job_ask(const text_front *front, const text_options *options, text_job *job, moe_request *request,
                        moe_error *error) {
    size_t left = 0;
    job->language = request->target_tag, job->from = request->source_tag;
    const moe_status status = prompt_of(front, options, job, job->attempt == 1, &job->prompt, &left, error);
    if (!status && left && !job->attempt)
        note(job, &job->divided, "terms of the glossary that have no place in the prompt: %zu", left);
    request->source = job->prompt.data;
    request->n_source = job->prompt.length;
    request->constraints = job->attempt ? job->bound->each : NULL;
    request->n_constraints = job->attempt ? job->bound->n : 0;
    return status;
}

moe_status text_job_loops(text_job *job, const moe_hypothesis *h, int *again, moe_error *error) {
    *again = job->loops < TEXT_LOOPS;
    if (!*again) return MOE_OK;
    job->loops++;
    return text_ids_set(&job->sound_ids, h->ids, h->n_ids, error);
}

void text_job_go_on(const text_job *job, moe_request *request) {
    static const float penalties[TEXT_LOOPS] = { 1.1f, 1.3f };
    /* A token that the session writes itself is among them, unless it is the tag of a request that is not raw. */
    const size_t forced = request->force >= 0 || (request->raw && job->sound_ids.data[0] == request->target_tag);
    request->target = job->sound_ids.data + forced;
    request->n_target = job->sound_ids.length - forced;
    request->prefix = 1;
    request->repetition_penalty = penalties[job->loops - 1];
}

void text_job_say_looped(text_job *job) {
    note(job, &job->cut, "the translation repeats itself again and again: it ends where that begins");
}

/* Ask for a text once more: strictly, where signs were lost, and what is kept of it must be there. */
static moe_status bind(const text_front *front, const text_options *options, text_job *job, moe_span target,
                       int strictly, int *again, moe_error *error) {
    const moe_span source = { job->shown.data, job->shown.length };
    if (!job->bound && !(job->bound = calloc(1, sizeof *job->bound))) return text_out_of_memory(error);
    moe_status status =
        text_prompt_bind(front, source, target, options->max_target - options->max_target / 4, job->bound, error);
    *again = !status && job->bound->n;
    if (!status && !*again && strictly) status = may_vary(front, options, job, again, error);
    if (*again) job->attempt = strictly ? 1 : 2, job->loops = 0;
    return status;
}

int text_job_is_bound(const text_job *job) { return job->attempt && job->bound && job->bound->n; }

static int is_nothing(moe_span text) {
    size_t n = 0;
    while (n < text.length && is_blank(text.data[n])) n++;
    return n == text.length;
}

moe_status text_job_look(const text_front *front, const text_options *options, text_job *job, const moe_hypothesis *h,
                         text_doubts *doubts, int *again, moe_error *error) {
    text_bytes written = { 0 };
    int sound = 0;
    *again = 0;
    if (job->failed || job->stays || job->pair) return MOE_OK;
    moe_status status = write_job(front, options, job, 0, h, &written, &sound, error);
    const moe_span source = { job->source.data, job->source.length },
                   target = { written.data ? written.data : "", written.length };
    const int keeps = keeps_spans(options), lost = keeps && (!sound || text_prompt_lost(source, target).length);
    moe_span number = { NULL, 0 };
    if (!status && keeps) status = text_prompt_lost_number(source, target, &number, error);
    if (!status && !job->attempt && (lost || number.length))
        status = bind(front, options, job, target, lost, again, error);
    if (*again) {
    } else if (!status && lost) {
        stay(job);
    } else if (!status && is_nothing(target)) {
        note(job, &job->failed, "the model answered nothing");
        job->status = MOE_ERROR_UNSUPPORTED;
    } else if (!status && h->finished) {
        const moe_span none = { "", 0 };
        const int lines = !job->message && text_decodes_lines(front, h->ids, h->n_ids);
        const char *why =
            text_doubt(doubts, job->language < 0 ? none : moe_model_language(front->model, (size_t)job->language),
                       source, target, lines);
        if (why) note(job, &job->divided, "doubtful: %s", why);
        else if (number.length)
            note(job, &job->divided, "doubtful: it lacks the number %.*s",
                 (int)text_utf8_cut(number.data, number.length, 40), number.data);
    }
    text_bytes_free(&written);
    return status;
}

moe_status text_job_again(const text_front *front, const text_options *options, text_job *job, const moe_hypothesis *h,
                          int *again, moe_error *error) {
    text_bytes unused = { 0 };
    const int guarded = options->rules && text_guard_used(job->guard);
    int sound;
    *again = 0;
    if (job->failed || job->stays || !(guarded || job->message)) return MOE_OK;
    moe_status status = write_job(front, options, job, 0, h, &unused, &sound, error);
    text_bytes_free(&unused);
    text_terms terms = (text_terms)job->terms;
    if (!status && guarded) status = text_guard_next_terms(job->guard, h, sound, &terms, error);
    if (status) return status;
    for (; terms != (text_terms)job->terms; terms = TEXT_TERMS_LAST) { /* LAST, where stand-ins cannot be */
        job->terms = (int)terms;
        status = prepare_source(front, options, job, error);
        *again = !status && !job->failed && job->source_ids.length <= room_of(front, options);
        if (status || *again) return status;
        job->failed = 0;
    }
    if (sound) return MOE_OK;
    return second_try(front, options, job, again, error);
}

moe_status text_job_refused(const text_front *front, const text_options *options, text_job *job, int *again,
                            moe_error *error) {
    const moe_hypothesis nothing = { .score = -FLT_MAX };
    if (job->manner) return text_job_vary(front, options, job, &nothing, 0, again, error);
    const moe_status status = second_try(front, options, job, again, error);
    job->verbatim = !status && !*again;
    return status;
}

moe_status text_job_aside(const text_front *front, const text_options *options, text_job *job, const moe_hypothesis *h,
                          moe_error *error) {
    text_bytes text = { 0 };
    size_t source;
    int small;
    moe_status status = MOE_OK;
    job->aside_ids.length = 0;
    if (!options->rules || !text_guard_used(job->guard)) return MOE_OK;
    if (h) {
        text_guard_aside(job->guard, job->asides++, &source, &small);
        status = text_decode(front, h->ids, h->n_ids, &text, error);
        if (!status && (text.failed || !text_guard_know(job->guard, source, text.data ? text.data : "", text.length)))
            status = text_out_of_memory(error);
    }
    text_clear(&text);
    const moe_span words = text_guard_aside(job->guard, job->asides, &source, &small);
    if (!status && words.length) {
        text_append(&text, words.data, words.length);
        text_put_manner(small ? TEXT_SMALL : TEXT_AS_IT_IS, &text);
        status = text.failed ? text_out_of_memory(error)
                             : text_encode(front, text.data, text.length, &job->aside_ids, error);
        if (!status && job->aside_ids.length > room_of(front, options)) job->aside_ids.length = 0;
    }
    text_bytes_free(&text);
    return status;
}

/* Prepare a job once more, in another manner; *fits 0: the model cannot read it so. */
static moe_status prepare_manner(const text_front *front, const text_options *options, text_job *job,
                                 text_manner manner, int *fits, moe_error *error) {
    text_options form = *options;
    form.brief = 0;
    job->manner = manner;
    const moe_status status = prepare_source(front, &form, job, error);
    *fits = !job->failed && job->source_ids.length <= room_of(front, options);
    return status;
}

/* Whether a translation ends with a sign, though its text does not. */
static int is_closed(const text_bytes *t) {
    static const char *const signs[] = { ".", "!", "?", ":", "\xE2\x80\xA6", "\xEF\xBC\x9F" };
    int closed = !t->length;
    for (size_t i = 0; i < sizeof signs / sizeof *signs; i++) closed |= text_ends_with(t->data, t->length, signs[i]);
    return closed;
}

moe_status text_job_vary(const text_front *front, const text_options *options, text_job *job, const moe_hypothesis *h,
                         int fits, int *again, moe_error *error) {
    const text_manner tried = job->manner;
    const int brief = job->brief;
    text_bytes written = { 0 };
    int sound = 1;
    moe_status status = MOE_OK;
    *again = 0;
    if (tried) {
        status = write_job(front, options, job, 0, h, &written, &sound, error);
        fits &= sound && !is_closed(&written) && !(text_guard_used(job->guard) && text_guard_lacks_term(job->guard));
        text_bytes_free(&written);
        if (status) return status;
    }
    if (!tried || (fits && h->score > job->best_score)) job->best = tried, job->best_score = h->score;
    for (text_manner next = tried + 1; next < TEXT_MANNERS && !*again && !status; next++)
        if (next != TEXT_SMALL || brief > 1) status = prepare_manner(front, options, job, next, again, error);
    job->failed = 0;
    if (*again || status) job->brief = brief;
    else if (job->best != job->manner) return prepare_manner(front, options, job, job->best, again, error);
    return status;
}

moe_status text_job_divide(const text_front *front, const text_options *options, text_job *job, text_job *second,
                           size_t at, moe_error *error) {
    const text_bytes gap = second->gap;
    const size_t end = text_before_mark(job->source.data, at);
    second->gap = job->gap, job->gap = gap;
    text_clear(&job->gap);
    text_append(&second->source, job->source.data + at, job->source.length - at);
    text_append(&job->gap, job->source.data + end, at - end);
    job->source.data[job->source.length = end] = '\0';
    second->line = job->line;
    second->more = job->more, job->more = 1;
    second->rules = job->rules, second->calm = job->calm;
    second->tag = job->tag, second->tagged = job->tagged;
    second->names = job->names;
    second->message = job->message;
    second->joined = job->joined, job->joined = 0;
    second->dividable = 1;
    second->loud = job->loud |= job->shouted;
    job->manner = TEXT_AS_IT_IS;
    job->attempt = job->terms = 0;
    text_guard_clear(job->guard); /* of another text */
    text_append(&second->context, job->context.data, job->context.length);
    moe_status status =
        job->gap.failed || second->source.failed || second->context.failed ? text_out_of_memory(error) : MOE_OK;
    if (!status) status = prepare_source(front, options, job, error);
    return status ? status : prepare_source(front, options, second, error);
}

void text_job_keep(text_job *job) {
    job->stays = 1;
    note(job, &job->cut, "the model cannot translate a part of it: that stays as it is");
}

moe_status text_job_write(const text_front *front, const text_options *options, const text_job *job,
                          const moe_hypothesis *h, text_bytes *out, moe_error *error) {
    const size_t begin = out->length;
    int sound = 0;
    if (!job->stays) {
        const moe_status status = write_job(front, options, job, job->shouted, h, out, &sound, error);
        if (status || sound) return status;
    }
    out->length = begin; /* it stays, or is one of several */
    text_append(out, job->source.data, job->source.length);
    return out->failed ? text_out_of_memory(error) : MOE_OK;
}

/* Whether the translation of a job is the one that is written, whatever it is. */
static int is_steady(const text_front *front, const text_options *options, const text_job *job) {
    if (job->answers) return 1;
    if (job->dividable || job->brief || job->message || job->shouted || job->manner || text_guard_used(job->guard))
        return 0;
    const moe_span source = { job->source.data, job->source.length }, nothing = { "", 0 };
    moe_span number = { NULL, 0 };
    if (job->pair || !text_job_is_asked(front, options) || !keeps_spans(options)) return 1;
    if (text_prompt_lost(source, nothing).length) return 0;
    return !text_prompt_lost_number(source, nothing, &number, NULL) && !number.length;
}

void text_job_begin(const text_front *front, const text_options *options, text_job *job) {
    text_clear(&job->begun);
    job->begun_ids.length = 0;
    job->decoding = (bpe_stream){ 0 };
    job->steady = is_steady(front, options, job);
}

void text_job_grow(const text_front *front, const text_options *options, text_job *job, const int32_t *ids, size_t n) {
    moe_status status = text_ids_append(&job->begun_ids, ids, n, NULL);
    const text_ids *all = &job->begun_ids;
    if (front->bpe && !options->ids && !options->pretokenized) {
        text_decode_more(front, &job->decoding, ids, n, job->answers, &job->begun);
    } else if (!status) {
        text_clear(&job->begun);
        if (options->ids) text_append_ids(&job->begun, all->data, all->length);
        else
            status = (options->pretokenized ? text_join_pieces : text_decode)(front, all->data, all->length,
                                                                              &job->begun, NULL);
    }
    job->begun.failed |= status != MOE_OK;
}

size_t text_job_show(const text_front *front, const text_options *options, const text_job *job, text_bytes *out) {
    static const char broken[] = "\xEF\xBF\xBD"; /* bytes of a character that may become whole */
    const size_t at = out->length;
    const char *data = job->begun.data;
    size_t begin = 0, end = job->begun.failed || job->stays ? 0 : job->begun.length;
    if (job->message || job->manner || text_guard_used(job->guard)) end = 0;
    if (!job->answers && !options->ids && !options->pretokenized) {
        const int asked = text_job_is_asked(front, options);
        while (end && (is_blank(data[end - 1]) || (!front->bpe && text_ends_with(data, end, broken))))
            end -= is_blank(data[end - 1]) ? 1 : sizeof broken - 1;
        while (asked && begin < end && is_blank(data[begin])) begin++;
        const moe_span before = blanks_before(&job->source);
        if (asked && begin < end && job->rules && text_rules_spans(job->rules))
            text_append(out, before.data, before.length);
    }
    if (begin < end) text_append(out, data + begin, end - begin);
    if (job->shouted && !out->failed) text_shout(out->data + at, out->length - at);
    return job->steady ? out->length - at : 0;
}

void text_job_clear(text_job *job) {
    text_clear(&job->source);
    text_clear(&job->target);
    text_clear(&job->output);
    text_clear(&job->shown);
    text_clear(&job->context);
    text_clear(&job->begun);
    text_guard_clear(job->guard); /* the next text may come without rules */
    job->source_ids.length = job->target_ids.length = job->prompt.length = 0;
    job->blank = job->cut = job->failed = job->finished = job->more = job->shouted = 0;
    job->attempt = job->terms = job->stays = job->brief = job->loops = 0;
    job->manner = TEXT_AS_IT_IS;
    job->aside_ids.length = job->asides = 0;
    job->divided = job->verbatim = job->message = job->joined = job->pair = job->answers = 0;
    job->dividable = job->names = job->loud = job->tagged = 0;
    job->rules = NULL;
    text_clear(&job->gap);
    job->note[0] = '\0';
    job->line = 0;
    job->status = MOE_OK;
    job->extra = NULL;
    job->next = NULL;
}

void text_job_free(text_job *job) {
    text_bytes *const all[] = { &job->source, &job->target,  &job->output, &job->gap,
                                &job->shown,  &job->context, &job->begun };
    text_bytes_free_all(all, sizeof all / sizeof *all);
    text_ids_free(&job->source_ids);
    text_ids_free(&job->target_ids);
    text_ids_free(&job->aside_ids);
    text_ids_free(&job->sound_ids);
    text_ids_free(&job->prompt);
    text_ids_free(&job->begun_ids);
    text_guard_free(job->guard);
    if (job->bound) text_ids_free(&job->bound->ids);
    free(job->bound);
}

/* ---- 2. The queue --------------------------------------------------------------------------------------- */

text_job *text_queue_insert(text_queue *queue, text_job *before) {
    text_job *job = queue->spare;
    if (job) {
        queue->spare = job->next;
    } else {
        job = calloc(1, sizeof *job);
        if (!job) return NULL;
    }
    text_job_clear(job);
    text_job **place = before ? &before->next : &queue->first;
    job->next = *place;
    *place = job;
    if (!job->next) queue->last = job;
    return job;
}

text_job *text_queue_add(text_queue *queue) { return text_queue_insert(queue, queue->last); }

text_job *text_queue_first(text_queue *queue) { return queue->first && queue->first->finished ? queue->first : NULL; }

void text_queue_remove(text_queue *queue) {
    text_job *job = queue->first;
    if (!job) return;
    queue->first = job->next;
    if (!queue->first) queue->last = NULL;
    job->next = queue->spare;
    queue->spare = job;
}

void text_queue_free(text_queue *queue) {
    for (int list = 0; list < 2; list++) {
        for (text_job *job = list ? queue->spare : queue->first, *next; job; job = next) {
            next = job->next;
            text_job_free(job);
            free(job);
        }
    }
    *queue = (text_queue){ 0 };
}

/* ---- 3. Samples ---------------------------------------------------------------------------------------- */

/* Cut what comes before the next TAB off `rest`; 0 if there is none. */
static int next_field(moe_span *rest, moe_span *field) {
    const char *tab = memchr(rest->data, '\t', rest->length);
    if (!tab) return 0;
    *field = (moe_span){ rest->data, (size_t)(tab - rest->data) };
    *rest = (moe_span){ tab + 1, rest->length - field->length - 1 };
    return 1;
}

/* The ids of a source; of a model that is asked in words, of the prompt. */
static moe_status parse_source(const text_front *front, const text_options *options, moe_span source, text_pair *p,
                               moe_error *error) {
    const text_asked asked = { .text = source, .source = p->source_tag, .target = p->tag };
    size_t left;
    if (!front->prompt || options->ids || options->pretokenized)
        return parse_text(front, options, source.data, source.length, &p->source, error);
    return text_prompt_ids(front, options->wishes, &asked, SIZE_MAX, &p->source, &left, error);
}

static moe_status read_pair(const text_front *front, const text_options *options, moe_span rest, int targets_wanted,
                            text_pair *p, moe_error *error) {
    const text_front targets = text_front_of_targets(front);
    moe_span fields[3], *source = &fields[2];
    char code[32];
    moe_status status = MOE_OK;
    if (moe_model_get_kind(front->model) == MOE_MODEL_LANGUAGE) {
        p->has_target = 1;
        return parse_text(&targets, options, rest.data, rest.length, &p->target, error);
    }
    int n = 0;
    while (n < 3 && next_field(&rest, &fields[n])) n++;
    if (n == 2 && !targets_wanted) *source = rest, rest.length = 0;
    else if (n < 3)
        return text_fail(error, MOE_ERROR_ARGUMENT, "",
                         "expected source language, target language, source and target, TABs between");
    for (int side = 0; side < 2 && moe_model_language_count(front->model); side++) {
        snprintf(code, sizeof code, "%.*s", fields[side].length < 31 ? (int)fields[side].length : 31,
                 fields[side].data);
        status = text_language(front, code, side, side ? &p->tag : &p->source_tag, error);
        if (status == MOE_ERROR_ARGUMENT && !side) p->source_tag = -1;
        else if (status) return status;
    }
    status = parse_source(front, options, *source, p, error);
    p->has_target = targets_wanted || rest.length;
    if (!status && p->has_target) status = parse_text(&targets, options, rest.data, rest.length, &p->target, error);
    return status;
}

static moe_status add_pair(const text_front *front, const text_options *options, const text_line *line,
                           int targets_wanted, text_sample *sample, moe_error *error) {
    char why[128];
    moe_status status = MOE_OK;
    if (sample->count == sample->capacity) {
        size_t more = sample->capacity ? 2 * sample->capacity : 256;
        text_pair *grown = realloc(sample->pairs, more * sizeof *grown);
        if (!grown) return text_out_of_memory(error);
        sample->pairs = grown;
        sample->capacity = more;
    }
    text_pair *p = &sample->pairs[sample->count];
    *p = (text_pair){ .line = line->number, .source_tag = -1, .tag = -1 };
    text_line_usable(line, why, sizeof why);
    if (*why) status = text_fail(error, MOE_ERROR_ARGUMENT, "", "%s", why);
    else status = read_pair(front, options, (moe_span){ line->data, line->length }, targets_wanted, p, error);
    if (status) {
        text_ids_free(&p->source);
        text_ids_free(&p->target);
        if (error) snprintf(error->where, sizeof error->where, "line %llu", (unsigned long long)line->number);
        return status;
    }
    sample->count++;
    return MOE_OK;
}

static int only_blanks(const text_line *line) {
    size_t i = 0;
    while (i < line->length && is_blank(line->data[i])) i++;
    return i == line->length;
}

moe_status text_sample_read(const text_front *front, const text_options *options, const char *path, int targets_wanted,
                            text_sample *sample, moe_error *error) {
    const int language = moe_model_get_kind(front->model) == MOE_MODEL_LANGUAGE;
    text_reader reader;
    text_line line;
    text_read got = TEXT_READ_END;
    moe_status status = MOE_OK;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return text_fail(error, MOE_ERROR_IO, "open", "cannot open %s: %s", path, strerror(errno));
    text_reader_init(&reader, fd, NULL, -1);
    while (!status && (got = text_reader_next(&reader, 1, &line)) == TEXT_READ_LINE)
        if (!language || !only_blanks(&line)) status = add_pair(front, options, &line, targets_wanted, sample, error);
    if (!status && got != TEXT_READ_END)
        status = text_fail(error, MOE_ERROR_IO, "read", "%s: %s", path, strerror(errno));
    if (!status && !sample->count)
        status = text_fail(error, MOE_ERROR_IO, "read", "%s: nothing in it to measure with", path);
    text_reader_free(&reader);
    close(fd);
    return status;
}

void text_sample_free(text_sample *sample) {
    for (size_t i = 0; i < sample->count; i++) {
        text_ids_free(&sample->pairs[i].source);
        text_ids_free(&sample->pairs[i].target);
    }
    free(sample->pairs);
    *sample = (text_sample){ 0 };
}
