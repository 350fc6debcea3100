/* chat.c - see chat.h.
 *
 * Contents
 *   1. Request    read messages and parameters
 *   2. Grammar    choose tokens by a schema
 *   3. Lines      translate the lines of a message
 *   4. Answer     collect the answer and write events (decoder's thread)
 */
#include "tools/server/chat.h"
#include "tools/server/schema.h"
#include "tools/text/system.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_MESSAGES = 1000 };

static const char *const too_long = "context_length_exceeded"; /* code of an error */

/* ==== 1. Request ======================================================================================== */

chat *chat_new(request *req, const chat_format *format) {
    chat *c = req->chat = calloc(1, sizeof *c);
    if (!c) return refuse_memory(req), NULL;
    c->format = format;
    c->created = time(NULL);
    return c;
}

void chat_free(request *req) {
    chat *c = req->chat;
    if (!c) return;
    for (size_t i = 0; i < c->stops.n; i++) free(c->stops.texts[i]);
    free(c->messages);
    free(c->ids);
    cJSON_Delete(c->schema);
    schema_free(c->grammar);
    if (c->lines) shape_free(c->lines);
    free(c->lines);
    free(c);
}

/* Return the role of a message, or -1 if the role is unknown. */
static int role_of(const cJSON *message) {
    static const struct {
        const char *name;
        moetext_role role;
    } roles[] = { { "system", MOETEXT_SYSTEM },
                  { "developer", MOETEXT_SYSTEM },
                  { "user", MOETEXT_USER },
                  { "assistant", MOETEXT_ASSISTANT } };
    const cJSON *role = cJSON_GetObjectItemCaseSensitive(message, "role");
    for (size_t i = 0; cJSON_IsString(role) && i < sizeof roles / sizeof *roles; i++)
        if (strcmp(role->valuestring, roles[i].name) == 0) return (int)roles[i].role;
    return -1;
}

/* Append the content of a message, a string or a list of text parts. Return 0 if the content is anything else. */
static int add_content(const cJSON *message, text_bytes *out) {
    const cJSON *content = cJSON_GetObjectItemCaseSensitive(message, "content"), *part;
    if (cJSON_IsString(content)) return text_append_string(out, content->valuestring), 1;
    if (!cJSON_IsArray(content)) return 0;
    cJSON_ArrayForEach(part, content) {
        const cJSON *type = cJSON_GetObjectItemCaseSensitive(part, "type"),
                    *text = cJSON_GetObjectItemCaseSensitive(part, "text");
        if (!cJSON_IsString(type) || strcmp(type->valuestring, "text") != 0 || !cJSON_IsString(text)) return 0;
        text_append_string(out, text->valuestring);
    }
    return 1;
}

/* Read the messages. Templates expect alternating turns, so join consecutive messages of a role with a blank line, and
 * treat a system message that is not first as the user's. */
void chat_take_messages(request *req, const cJSON *messages) {
    chat *c = req->chat;
    const cJSON *message;
    text_bytes all = { 0 };
    const int n = cJSON_IsArray(messages) ? cJSON_GetArraySize(messages) : 0;
    if (n < 1 || n > MOST_MESSAGES) bad_request(req, "messages must be a list of 1 to 1000 messages");
    else if (!(c->messages = calloc((size_t)n, sizeof *c->messages))) refuse_memory(req);
    if (req->refusal || !c->messages) return;
    text_append(&all, "", 0);
    cJSON_ArrayForEach(message, messages) {
        moetext_message *last = c->n ? &c->messages[c->n - 1] : NULL;
        int role = role_of(message);
        if (role == MOETEXT_SYSTEM && last && last->role != MOETEXT_SYSTEM) role = MOETEXT_USER;
        const int joins = last && (int)last->role == role;
        if (joins && last->length) text_append(&all, "\n\n", 2), last->length += 2;
        const size_t begin = all.length;
        if (role < 0) bad_request(req, "the role of a message must be system, developer, user or assistant");
        else if (!add_content(message, &all))
            bad_request(req, "the content of a message must be a string or a list of strings");
        if (req->refusal) break;
        if (joins) last->length += all.length - begin;
        else c->messages[c->n++] = (moetext_message){ .role = (moetext_role)role, .length = all.length - begin };
    }
    if (!req->refusal && (all.failed || !add_text(req, all.data, all.length))) refuse_memory(req);
    else if (!req->refusal)
        for (size_t i = 0, at = 0; i < c->n; at += c->messages[i++].length)
            c->messages[i].text = req->items[0].text + at;
    text_bytes_free(&all);
}

static void take_stop(request *req, const cJSON *stop) {
    chat *c = req->chat;
    const size_t length = cJSON_IsString(stop) ? strlen(stop->valuestring) : 0;
    if (!length || length > STOPS_LONGEST || c->stops.n == STOPS_MOST)
        bad_request(req, "stop must be a string of 1 to 256 bytes, or a list of up to 16");
    else if (!text_is_usable(stop->valuestring, length)) bad_request(req, "stop is not valid UTF-8");
    else if (!(c->stops.texts[c->stops.n] = text_copy(stop->valuestring, length))) refuse_memory(req);
    else c->stops.n++;
    if (length > c->stops.longest) c->stops.longest = length;
}

int chat_is_false(const cJSON *x) {
    return !x || cJSON_IsNull(x) || cJSON_IsFalse(x) || (cJSON_IsNumber(x) && x->valuedouble == 0) ||
           ((cJSON_IsArray(x) || cJSON_IsObject(x)) && !x->child);
}

/* Return 1 if a whole number is missing, null or -1, which llama.cpp and its clients send for "none". */
static int is_none(const cJSON *x) { return !x || cJSON_IsNull(x) || (cJSON_IsNumber(x) && x->valuedouble == -1); }

/* Return the token limit, or 0. */
static size_t take_limit(request *req, const cJSON *all) {
    static const char *const names[] = { "max_completion_tokens", "max_tokens", "n_predict", "num_predict" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const cJSON *limit = cJSON_GetObjectItemCaseSensitive(all, names[i]);
        if (is_none(limit) || (i == 3 && cJSON_IsNumber(limit) && limit->valuedouble == -2)) continue;
        const double n = cJSON_IsNumber(limit) ? limit->valuedouble : 0;
        if (n >= 1 && n <= 1e9 && floor(n) == n) return (size_t)n;
        bad_request(req, "%s must be a whole number from 1, or -1 for no limit", names[i]);
        break;
    }
    return 0;
}

/* Read the repetition penalty under the engine's name or llama.cpp's. */
static void take_penalty(request *req, const cJSON *all) {
    static const char *const names[] = { "repetition_penalty", "repeat_penalty" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const cJSON *penalty = cJSON_GetObjectItemCaseSensitive(all, names[i]);
        if (!penalty || cJSON_IsNull(penalty)) continue;
        if (!cJSON_IsNumber(penalty) || !(penalty->valuedouble > 0 && penalty->valuedouble <= 100))
            bad_request(req, "%s must be a number above 0, up to 100; 1 disables the penalty", names[i]);
        else req->chat->penalty = (float)penalty->valuedouble;
        return;
    }
}

/* Return a seed in the engine's range, 0 to 2^31 - 1. Other 64-bit seeds are hashed (splitmix64's finaliser). */
static double seed_of(double seed) {
    if (!(fabs(seed) <= 0x1p64) || floor(seed) != seed || (seed >= 0 && seed <= INT32_MAX)) return seed;
    uint64_t h;
    memcpy(&h, &seed, sizeof h);
    h = (h ^ h >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    h = (h ^ h >> 27) * UINT64_C(0x94d049bb133111eb);
    return (double)((h ^ h >> 31) & INT32_MAX);
}

static void take_sampling(request *req, const cJSON *all) {
    chat *c = req->chat;
    const moe_param *param;
    c->sampling.size = sizeof c->sampling;
    for (size_t i = 0; (param = moe_param_at(i)) && !req->refusal; i++) {
        const cJSON *number = param->sampling ? cJSON_GetObjectItemCaseSensitive(all, param->name) : NULL;
        if (!number || cJSON_IsNull(number) || (!param->real && is_none(number))) continue;
        const double value = strcmp(param->name, "seed") == 0 ? seed_of(number->valuedouble) : number->valuedouble;
        c->sampled |= (uint64_t)1 << i;
        if (!cJSON_IsNumber(number) || (!param->real && floor(value) != value) ||
            !moe_param_set(&c->sampling, i, value))
            bad_request(req, "%s must be a %s, %s", param->name, param->real ? "number" : "whole number",
                        param->values);
    }
}

/* Read a Boolean member. */
int chat_take_truth(request *req, const cJSON *all, const char *name) {
    const cJSON *truth = cJSON_GetObjectItemCaseSensitive(all, name);
    if (truth && !cJSON_IsBool(truth) && !cJSON_IsNull(truth)) bad_request(req, "%s must be true or false", name);
    return cJSON_IsTrue(truth);
}

/* Read a language. */
static void take_code(request *req, const cJSON *all, const char *name, char code[36]) {
    const cJSON *language = cJSON_GetObjectItemCaseSensitive(all, name);
    if (cJSON_IsString(language)) take_word(code, 36, language->valuestring, strlen(language->valuestring));
    else if (language && !cJSON_IsNull(language)) bad_request(req, "%s must be the code of a language", name);
}

void chat_take_parameters(request *req, const cJSON *all) {
    const cJSON *stop = cJSON_GetObjectItemCaseSensitive(all, "stop"), *one;
    chat *c = req->chat;
    if (!req->refusal) take_sampling(req, all);
    if (!req->refusal) take_penalty(req, all);
    if (!req->refusal) c->limit = take_limit(req, all);
    if (!req->refusal && cJSON_IsArray(stop)) cJSON_ArrayForEach(one, stop) {
            if (!req->refusal) take_stop(req, one);
        }
    else if (!req->refusal && stop && !cJSON_IsNull(stop)) take_stop(req, stop);
}

void chat_take_names(request *req, const cJSON *all) {
    const cJSON *model = cJSON_GetObjectItemCaseSensitive(all, "model");
    chat *c = req->chat;
    if (cJSON_IsString(model)) take_word(c->model, sizeof c->model, model->valuestring, strlen(model->valuestring));
    if (!req->refusal) take_code(req, all, "source", c->source);
    if (!req->refusal) take_code(req, all, "target", c->target);
}

void chat_take_schema(request *req, const cJSON *schema) {
    req->chat->schema = cJSON_Duplicate(schema, 1);
    if (!req->chat->schema) refuse_memory(req);
}

/* Combine the server's sampling parameters with those of the request. */
static void check_sampling(request *req) {
    const backend *b = req->backend;
    chat *c = req->chat;
    const moe_session_params wanted = c->sampling;
    c->sampling = b->sampling;
    c->sampling.sample = 1;
    for (size_t i = 0; moe_param_at(i); i++)
        if (c->sampled >> i & 1) moe_param_set(&c->sampling, i, moe_param_get(&wanted, i));
    c->sampling.repetition_penalty = c->penalty == 1 && b->sampling.repetition_penalty == 0 ? 0 : c->penalty;
    if (b->samples && !c->sampled && b->greedy) c->sampling.temperature = 0;
    if (b->samples) return;
    if (c->sampled && c->sampling.temperature > 0)
        bad_request(req, "temperature must be 0: this server does not sample (beam search, or sample=0)");
    else if (c->sampling.repetition_penalty != 0)
        bad_request(req, "repetition_penalty must be 1: this server does not sample (beam search, or sample=0)");
    c->sampled = 0;
}

/* Check the messages and make the prompt. */
static void make_prompt(request *req) {
    const backend *b = req->backend;
    chat *c = req->chat;
    moe_error error = { 0 };
    const size_t most = b->max_prompt ? b->max_prompt : 1;
    if (!(c->ids = malloc(most * sizeof *c->ids))) {
        refuse_memory(req);
        return;
    }
    const moe_status status = moetext_model_prompt(b->model, c->messages, c->n, c->ids, most, &c->n_ids, &error);
    if (status == MOE_ERROR_MEMORY) refuse_memory(req);
    else if (status) bad_request(req, "%s", error.message);
    else if (c->n_ids > most) {
        bad_request(req, "the messages and their template have %zu tokens; the limit is %zu", c->n_ids, most);
        c->code = too_long;
    }
    req->prompt = c->n_ids;
}

/* ==== 2. Grammar ======================================================================================== */

/* Return 1 if the spaces of a decoded token are spaces, and not the line breaks that decoding replaces. */
static int has_real_spaces(const backend *b, int32_t id, const char *text, size_t n) {
    static const char *const spaces[] = { " ", "\xc4\xa0", "\xe2\x96\x81" }; /* also those of both tokenisers' pieces */
    size_t length, found = 0, wanted = 0;
    const char *piece = moetext_model_piece(b->model, id, &length);
    for (size_t i = 0; i < n; i++) wanted += text[i] == ' ';
    for (size_t k = 0; k < sizeof spaces / sizeof *spaces && wanted; k++)
        for (size_t i = 0; i + strlen(spaces[k]) <= length; i++)
            found += memcmp(piece + i, spaces[k], strlen(spaces[k])) == 0;
    return found == wanted;
}

/* Decode all tokens. A token is decoded after another one, because some decoders remove a space at the beginning. */
static int decode_tokens(backend *b) {
    const moe_model *engine = moetext_model_engine(b->model);
    const size_t n = engine ? (size_t)moe_model_vocabulary(engine) : 0;
    enum { LONGEST = 512 };
    char text[LONGEST];
    int32_t ids[8];
    size_t n_ids = 0, before = 0, length;
    if (!n || moetext_model_encode(b->model, "a", 1, 1, ids, 7, &n_ids, NULL) || !n_ids || n_ids > 7 ||
        moetext_model_decode(b->model, ids, n_ids, text, LONGEST, &before, NULL))
        return 0;
    uint32_t *ends = calloc(n, sizeof *ends);
    for (size_t i = 0; ends && i < n; i++) {
        ids[n_ids] = (int32_t)i;
        const int known = !moetext_model_decode(b->model, ids, n_ids + 1, text, LONGEST, &length, NULL) &&
                          length > before && length <= LONGEST &&
                          has_real_spaces(b, (int32_t)i, text + before, length - before);
        if (known) text_append(&b->token_bytes, text + before, length - before);
        ends[i] = (uint32_t)b->token_bytes.length;
    }
    if (b->token_bytes.failed) free(ends), ends = NULL;
    b->token_ends = ends;
    return ends != NULL;
}

/* Compile the schema of the answer. */
static void take_grammar(server *s, request *req) {
    backend *b = req->backend;
    chat *c = req->chat;
    const char *why = NULL;
    if (!b->guided) {
        bad_request(req, "response_format must be text: this server cannot choose tokens (on a GPU, or with drafts)");
        return;
    }
    pthread_mutex_lock(&s->detecting);
    const int known = b->token_ends || decode_tokens(b);
    pthread_mutex_unlock(&s->detecting);
    if (known) c->grammar = schema_new(c->schema, &why);
    if (why) bad_request(req, "the schema in response_format is not supported: %s", why);
    else if (!c->grammar) refuse_memory(req);
    for (size_t i = 0; i < c->stops.n; i++) free(c->stops.texts[i]); /* they would break the JSON */
    c->stops.n = 0;
}

static const char *token_text(const backend *b, int32_t id, size_t *length) {
    const size_t from = id ? b->token_ends[id - 1] : 0;
    *length = b->token_ends[id] - from;
    return b->token_bytes.data + from;
}

static int reads(const grammar *g, schema_state *s, const char *text, size_t length) {
    for (size_t i = 0; i < length; i++)
        if (!schema_step(g, s, (unsigned char)text[i])) return 0;
    return 1;
}

/* Ban all tokens that the grammar forbids after a hypothesis. Return the number of others. */
static size_t ban(const backend *b, const grammar *g, const schema_state *s, float *logits, size_t n) {
    unsigned char first[256];
    size_t allowed = 0;
    for (int c = 0; c < 256; c++) {
        schema_state after = *s;
        first[c] = (unsigned char)schema_step(g, &after, (unsigned char)c);
    }
    for (size_t i = 0; i < n; i++) {
        size_t length;
        const char *text = token_text(b, (int32_t)i, &length);
        int fits = length && first[(unsigned char)text[0]];
        if (fits && length > 1) {
            schema_state after;
            after.depth = s->depth;
            memcpy(after.stack, s->stack, (size_t)s->depth * sizeof *s->stack);
            fits = reads(g, &after, text, length);
        }
        if (!fits) logits[i] = -INFINITY;
        else allowed++;
    }
    return allowed;
}

/* Choose among the next tokens. An answer ends with its value; a beam ends with that of its best hypothesis. */
static int guide(void *closure, const moe_next_token *next) {
    const text_item *item = next->user;
    const backend *b = item->request->backend;
    const grammar *g = item->request->chat->grammar;
    (void)closure;
    for (size_t row = 0; row < next->rows; row++) {
        schema_state s;
        size_t length;
        int fits = 1;
        schema_begin(g, &s);
        for (size_t i = 0; i < next->n_ids && fits; i++) {
            const char *text = token_text(b, next->ids[row][i], &length);
            fits = reads(g, &s, text, length);
        }
        float *logits = next->logits + row * next->stride;
        const size_t allowed = fits && s.depth ? ban(b, g, &s, logits, next->vocabulary) : 0;
        if (!allowed && !row) return 1;
        for (size_t i = 0; !allowed && i < next->vocabulary; i++) logits[i] = -INFINITY;
    }
    return 0;
}

/* End an answer that was cut, e.g. at max_tokens, so that it is valid JSON of the schema. */
static void complete(text_item *item) {
    chat *c = item->request->chat;
    schema_state s;
    schema_begin(c->grammar, &s);
    if (!reads(c->grammar, &s, item->answer.data, item->answer.length)) {
        item->status = MOE_ERROR_NUMERIC;
        text_clear(&item->answer);
        text_append_string(&item->answer, "the answer does not fit the schema");
    } else if (!s.depth) c->finish = "stop";
    else if (!schema_complete(c->grammar, &s, &item->answer)) item->status = MOE_ERROR_MEMORY;
}

/* ==== 3. Lines ========================================================================================== */

/* Return the only language into which the model translates, or NULL. */
static const char *only_target(const backend *b) {
    const size_t n = moetext_model_language_count(b->model);
    const char *found = NULL;
    for (size_t to = 0; to < n; to++)
        for (size_t from = 0; from < n; from++) {
            if (from == to || !lists_direction(b, from, to)) continue;
            if (found) return NULL;
            found = moetext_model_language(b->model, to);
            break;
        }
    return found;
}

/* Choose the languages: those of the request, else those of its instruction; the only target of the model; no source if
 * the model cannot translate from it. */
static void choose_languages(request *req, const shape *l) {
    const backend *b = req->backend;
    const chat *c = req->chat;
    const char *target = c->target[0] ? c->target : l->target[0] ? l->target : only_target(b);
    const char *source = c->source[0] ? c->source : l->source;
    if (target) take_word(req->target, sizeof req->target, target, strlen(target));
    const ptrdiff_t to = moetext_model_language_find(b->model, req->target);
    const ptrdiff_t from = moetext_model_language_find(b->model, source);
    const int leads = from >= 0 && to >= 0 && from != to && lists_direction(b, (size_t)from, (size_t)to);
    if (c->source[0] || leads) take_word(req->source, sizeof req->source, source, strlen(source));
    if (!target && moetext_model_language_count(b->model))
        bad_request(req,
                    "the target language is missing: name it in the instruction (\"Translate into German\"), or send "
                    "\"target\": \"de\"");
    else if (!target) take_word(req->target, sizeof req->target, "en", 2); /* the model has one direction */
}

/* Return 1 if a chat model should translate the lines of a message: if the request says so, or if the instruction asks
 * for a translation into a known language and the message has a structure that must not be lost. */
static int is_for_lines(const request *req, const shape *l) {
    const chat *c = req->chat;
    if (!req->backend->answers || c->target[0]) return 1;
    if (!l->structured || !l->translates || !l->target[0]) return 0;
    return moetext_model_language_find(req->backend->model, l->target) >= 0;
}

/* Make the answer fit the schema, if there is one. Return 0 if it does not fit. */
static int fits_schema(const request *req, shape *l) {
    const chat *c = req->chat;
    if (!c->schema) return 1;
    if (!l->json || l->frame.failed) return 0;
    cJSON *answer = cJSON_ParseWithLength(l->frame.data, l->frame.length);
    const char *key = NULL;
    const int fits = answer && schema_fits(c->schema, answer, &key);
    cJSON_Delete(answer);
    if (fits && key) shape_wrap(l, key);
    return fits;
}

/* Replace the message with its lines. Return 0 if the model should answer the message instead. */
static int take_lines(request *req, const moetext_message *system, const moetext_message *message) {
    chat *c = req->chat;
    shape l = { .json = 0 };
    text_item *const before = req->items;
    const size_t n = req->n_items;
    shape_languages(req, system ? system->text : "", system ? system->length : 0, message->text, message->length, &l);
    req->items = NULL, req->n_items = 0;
    if (!req->refusal) shape_read(req, message->text, message->length, &l);
    const int is_ours = req->refusal || is_for_lines(req, &l), fits = fits_schema(req, &l);
    if (is_ours && !req->refusal && (fits || !req->backend->answers)) choose_languages(req, &l);
    if (!req->refusal && is_ours && !fits && !req->backend->answers)
        bad_request(req,
                    l.json ? "this model only translates, and the lines of the message do not fit the schema in "
                             "response_format: name one string for each line"
                           : "this model only translates, and response_format requires JSON lines in the message: send "
                             "them as JSON, or omit response_format");
    if (!is_ours || (!fits && !req->refusal)) {
        items_free(req->items, req->n_items);
        req->items = before, req->n_items = n;
        text_clear(&req->terms), text_clear(&req->context), text_clear(&req->confirmed);
        req->n_terms = req->n_confirmed = 0;
        shape_free(&l);
        return 0;
    }
    items_free(before, n);
    c->lines = malloc(sizeof l);
    if (c->lines) *c->lines = l;
    else shape_free(&l), refuse_memory(req);
    return 1;
}

void chat_check(server *s, request *req) {
    const backend *b = req->backend;
    chat *c = req->chat;
    const moetext_message *last = c->n ? &c->messages[c->n - 1] : NULL;
    const moetext_message *system = c->n && c->messages[0].role == MOETEXT_SYSTEM ? c->messages : NULL;
    const size_t first = system != NULL, turns = c->n > first ? c->n - first - 1 : 0; /* before the last message */
    c->number = ++s->n_answers;
    if (!c->n) { /* Ollama: the model is loaded */
        c->finish = "load";
        if (req->stream) c->format->event(req, NULL, 0, c->finish);
        return;
    }
    const int examples = shape_examples(req, c->messages + first, turns);
    if (!req->refusal && last->role == MOETEXT_USER && !(turns && !examples && b->answers && !c->target[0]) &&
        take_lines(req, system, last)) {
        c->finish = "stop";
        if (req->stream && !req->refusal && !req->n_items) {
            if (c->lines->frame.length) c->format->event(req, c->lines->frame.data, c->lines->frame.length, NULL);
            c->format->event(req, NULL, 0, c->finish);
        }
        return;
    }
    if (req->refusal) return;
    if (!b->answers) bad_request(req, "this model only translates: the last message must be the user's");
    else if (c->schema) take_grammar(s, req);
    if (!req->refusal) check_sampling(req);
    if (!req->refusal) make_prompt(req);
}

/* Add the lines translated so far, in order, to a stream (lock held). */
static void stream_lines(request *req, const text_item *item) {
    chat *c = req->chat;
    size_t last = c->sent;
    text_bytes more = { 0 };
    while (last < req->n_items && req->items[last].finished) last++;
    if (last > c->sent) {
        shape_write(c->lines, req, c->sent, last, &more);
        c->format->event(req, more.data ? more.data : "", more.length, NULL);
        req->lines.failed |= more.failed;
        c->sent = last;
        text_bytes_free(&more);
    }
    if (c->sent == req->n_items) c->format->event(req, NULL, 0, c->finish);
    if (req->n_done < req->n_items || c->sent == req->n_items || !req->started) return;
    while (item->status == MOE_OK) item = &req->items[c->sent]; /* the first one that failed */
    req->cut = failure_status(item);
    c->format->error(req, item->answer.data ? item->answer.data : "out of memory", req->cut);
}

/* ==== 4. Answer ========================================================================================= */

void chat_begin(server *s, text_item *item, moetext_request *next) {
    const chat *c = item->request->chat;
    if (c->lines) {
        next->partial = NULL;
        translation_begin(s, item, next);
        return;
    }
    next->task = MOETEXT_ANSWER;
    next->ids = c->ids, next->n_ids = c->n_ids;
    next->limit = c->limit;
    if (c->grammar) next->next_token = guide;
    if (c->sampled || c->sampling.repetition_penalty != 0) next->sampling = &c->sampling;
}

/* Append text to the answer, and end the answer at a stop sequence. */
static void chat_add(text_item *item, const char *text, size_t length) {
    chat *c = item->request->chat;
    if (stops_add(&c->stops, &item->answer, text, length)) c->finish = "stop";
}

/* Return the model's name, or its file name if the model has no name. */
const char *chat_model_name(const backend *b) {
    const char *name = moetext_model_meta(b->model, "general.name");
    return *name ? name : system_name(b->name);
}

/* Write an event with the unsent part of the answer before byte `end`, if any. */
static void send_more(request *req, size_t end) {
    const text_bytes *answer = &req->items[0].answer;
    chat *c = req->chat;
    if (end <= c->sent) return;
    c->format->event(req, answer->data + c->sent, end - c->sent, NULL);
    c->sent = end;
}

void chat_partial(void *closure, const moetext_partial *partial) {
    text_item *item = partial->user;
    request *req = item->request;
    server *s = req->server;
    (void)closure;
    chat *c = req->chat;
    if (c->finish) return;
    chat_add(item, partial->text, partial->length);
    c->tokens = partial->n_ids;
    if (c->finish) moe_request_drop(&req->drop); /* the rest of the answer is not needed */
    pthread_mutex_lock(&s->lock);
    req->progress = program_seconds();
    if (req->stream && req->connection && req->state == REQUEST_WAITING) {
        send_more(req, item->answer.length - (c->finish ? 0 : stops_held(&c->stops, &item->answer)));
        if (req->started) request_wake(req);
    }
    pthread_mutex_unlock(&s->lock);
}

int chat_done(server *s, text_item *item, const moetext_result *result) {
    chat *c = item->request->chat;
    const moetext_hypothesis *best = result->n_hypotheses ? result->hypotheses : NULL;
    if (c->lines) {
        c->n_ids += result->n_source_ids;
        c->tokens += best ? best->n_ids : 0;
        return translation_done(s, item, result);
    }
    const size_t known = item->answer.length;
    if (c->finish) item->status = MOE_OK; /* the request was dropped at a stop sequence */
    else if (result->status || !best || best->length < known) {
        quota_add(s, item->request, text_utf8_count(item->answer.data, known));
        text_clear(&item->answer);
        text_append_string(&item->answer, result->status ? result->message : "no answer");
        if (!item->status) item->status = MOE_ERROR_NUMERIC;
        if (result->status == MOE_ERROR_LIMIT) c->code = too_long; /* settings or memory allow less than the model */
    } else {
        c->tokens = best->n_logprobs;
        chat_add(item, best->text + known, best->length - known);
        if (!c->finish) c->finish = best->finished ? "stop" : "length";
        if (c->grammar) complete(item);
    }
    if (!item->status) quota_add(s, item->request, text_utf8_count(item->answer.data, item->answer.length));
    text_append(&item->answer, "", 0);
    return 1;
}

/* Write the last events of a stream. A failed stream must not end with [DONE] like a complete one. */
void chat_end(server *s, request *req, const text_item *item) {
    (void)s;
    if (!item) req->chat->format->error(req, requests_why(req), req->cut);
    else if (req->chat->lines) stream_lines(req, item);
    else if (!item->status) {
        send_more(req, item->answer.length);
        req->chat->format->event(req, NULL, 0, req->chat->finish);
    } else if (req->started) { /* an error before the first event is sent as an HTTP status */
        req->cut = failure_status(item);
        req->chat->format->error(req, item->answer.data ? item->answer.data : "out of memory", req->cut);
    }
}

enum MHD_Result chat_send(server *s, request *req) {
    const chat *c = req->chat;
    text_bytes all = { 0 };
    if (c->lines) shape_write(c->lines, req, 0, req->n_items, &all);
    const text_bytes *answer = c->lines || !req->n_items ? &all : &req->items[0].answer;
    c->format->whole(req, answer->data ? answer->data : "", answer->length);
    req->out.failed |= all.failed;
    text_bytes_free(&all);
    return send_json(s, req);
}
