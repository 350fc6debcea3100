/* openai.c - OpenAI's chat interface: a prompted model answers messages.
 *
 * Contents
 *   1. Request    read messages and parameters
 *   2. Answer     collect the answer and write events (decoder's thread)
 *   3. Replies    send whole answers and errors
 *   4. Models
 *
 * Unlike the texts of /translate, messages are not protected, split or retried.
 */
#include "tools/server/server.h"
#include "tools/server/stops.h"
#include "tools/text/system.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_MESSAGES = 1000 };

static const char *const too_long = "context_length_exceeded"; /* code of an error */

struct chat {
    moetext_message *messages; /* [n] messages, which point into the item's text */
    size_t n;
    int32_t *ids; /* [n_ids] tokens of the prompt */
    size_t n_ids, limit;
    stops stops;
    int usage;                   /* 1 if a stream ends with token counts */
    moe_session_params sampling; /* sampling parameters */
    float penalty;               /* repetition penalty, or 0 for the server's */
    uint64_t sampled;            /* bit i is 1 if the request sets parameter i */
    time_t created;
    uint64_t number;
    const char *code; /* code of an error, or NULL */

    /* Owned by the decoder's thread; item.answer holds the answer generated so far */
    size_t tokens, sent; /* tokens generated; bytes of the answer already sent in events */
    const char *finish;  /* reason why the answer ended, or NULL */
};

static void chat_free(request *req) {
    chat *c = req->chat;
    if (!c) return;
    for (size_t i = 0; i < c->stops.n; i++) free(c->stops.texts[i]);
    free(c->messages);
    free(c->ids);
    free(c);
}

/* ==== 1. Request ======================================================================================== */

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
static void take_messages(request *req, const cJSON *messages) {
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

static int is_false(const cJSON *x) {
    return !x || cJSON_IsNull(x) || cJSON_IsFalse(x) || (cJSON_IsNumber(x) && x->valuedouble == 0) ||
           ((cJSON_IsArray(x) || cJSON_IsObject(x)) && !x->child);
}

/* Refuse unsupported parameters that would change the answer; unknown ones are ignored. */
static void refuse_others(request *req, const cJSON *all) {
    static const char *const names[] = { "tools",      "functions",        "logprobs",          "top_logprobs",
                                         "logit_bias", "presence_penalty", "frequency_penalty", "audio",
                                         "prediction" };
    const cJSON *n = cJSON_GetObjectItemCaseSensitive(all, "n"),
                *format = cJSON_GetObjectItemCaseSensitive(all, "response_format"),
                *type = cJSON_GetObjectItemCaseSensitive(format, "type");
    for (size_t i = 0; i < sizeof names / sizeof *names && !req->refusal; i++)
        if (!is_false(cJSON_GetObjectItemCaseSensitive(all, names[i])))
            bad_request(req, "%s is not supported", names[i]);
    if (!req->refusal && n && !cJSON_IsNull(n) && !(cJSON_IsNumber(n) && n->valuedouble == 1))
        bad_request(req, "n must be 1: other values are not supported");
    if (!req->refusal && cJSON_IsObject(format) && !(cJSON_IsString(type) && strcmp(type->valuestring, "text") == 0))
        bad_request(req, "response_format must be text: other formats are not supported");
}

/* Return 1 if a whole number is missing, null or -1, which llama.cpp and its clients send for "none". */
static int is_none(const cJSON *x) { return !x || cJSON_IsNull(x) || (cJSON_IsNumber(x) && x->valuedouble == -1); }

/* Return the token limit, or 0. */
static size_t take_limit(request *req, const cJSON *all) {
    static const char *const names[] = { "max_completion_tokens", "max_tokens", "n_predict" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const cJSON *limit = cJSON_GetObjectItemCaseSensitive(all, names[i]);
        if (is_none(limit)) continue;
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
static int take_truth(request *req, const cJSON *all, const char *name) {
    const cJSON *truth = cJSON_GetObjectItemCaseSensitive(all, name);
    if (truth && !cJSON_IsBool(truth) && !cJSON_IsNull(truth)) bad_request(req, "%s must be true or false", name);
    return cJSON_IsTrue(truth);
}

static void chat_read(request *req, const cJSON *all) {
    const cJSON *stop = cJSON_GetObjectItemCaseSensitive(all, "stop"), *one,
                *stream_options = cJSON_GetObjectItemCaseSensitive(all, "stream_options");
    chat *c = req->chat = calloc(1, sizeof *c);
    if (!c) {
        refuse_memory(req);
        return;
    }
    c->created = time(NULL);
    refuse_others(req, all);
    if (!req->refusal) take_sampling(req, all);
    if (!req->refusal) take_penalty(req, all);
    if (!req->refusal) c->limit = take_limit(req, all);
    if (!req->refusal && cJSON_IsArray(stop)) cJSON_ArrayForEach(one, stop) {
            if (!req->refusal) take_stop(req, one);
        }
    else if (!req->refusal && stop && !cJSON_IsNull(stop)) take_stop(req, stop);
    req->stream = take_truth(req, all, "stream");
    c->usage = take_truth(req, stream_options, "include_usage");
    if (!req->refusal) take_messages(req, cJSON_GetObjectItemCaseSensitive(all, "messages"));
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

/* Check the request and make the prompt. */
static void chat_check(server *s, request *req) {
    const backend *b = req->backend;
    chat *c = req->chat;
    moe_error error = { 0 };
    c->number = ++s->n_answers;
    const size_t most = b->max_prompt ? b->max_prompt : 1;
    if (b->answers) check_sampling(req);
    if (!req->refusal && !(c->ids = malloc(most * sizeof *c->ids))) refuse_memory(req);
    if (req->refusal) return;
    const moe_status status = moetext_model_prompt(b->model, c->messages, c->n, c->ids, most, &c->n_ids, &error);
    if (status == MOE_ERROR_MEMORY) refuse_memory(req);
    else if (status == MOE_ERROR_UNSUPPORTED && !b->answers)
        bad_request(req, "this model only translates and does not answer messages: use POST /translate");
    else if (status) bad_request(req, "%s", error.message);
    else if (c->n_ids > most) {
        bad_request(req, "the messages and their template have %zu tokens; the limit is %zu", c->n_ids, most);
        c->code = too_long;
    }
    req->prompt = c->n_ids;
}

/* ==== 2. Answer ========================================================================================= */

static void chat_begin(server *s, text_item *item, moetext_request *next) {
    const chat *c = item->request->chat;
    (void)s;
    next->task = MOETEXT_ANSWER;
    next->ids = c->ids, next->n_ids = c->n_ids;
    next->limit = c->limit;
    if (c->sampled || c->sampling.repetition_penalty != 0) next->sampling = &c->sampling;
}

/* Append text to the answer, and end the answer at a stop sequence. */
static void chat_add(text_item *item, const char *text, size_t length) {
    chat *c = item->request->chat;
    if (stops_add(&c->stops, &item->answer, text, length)) c->finish = "stop";
}

/* Return the model's name, or its file name if the model has no name. */
static const char *model_name(const backend *b) {
    const char *name = moetext_model_meta(b->model, "general.name");
    return *name ? name : system_name(b->name);
}

static void put_head(const backend *b, const chat *c, json *j, const char *object) {
    char id[64];
    snprintf(id, sizeof id, "chatcmpl-%llx-%llx", (unsigned long long)c->created, (unsigned long long)c->number);
    json_text(j, "id", id);
    json_text(j, "object", object);
    json_whole(j, "created", (int64_t)c->created);
    json_clean(j, "model", model_name(b), strlen(model_name(b)));
}

static void put_usage(const chat *c, json *j) {
    json_open(j, "usage", '{');
    json_whole(j, "prompt_tokens", (int64_t)c->n_ids);
    json_whole(j, "completion_tokens", (int64_t)c->tokens);
    json_whole(j, "total_tokens", (int64_t)(c->n_ids + c->tokens));
    json_close(j, '}');
}

static void put_finish(const char *finish, json *j) {
    json_null(j, "logprobs");
    if (finish) json_text(j, "finish_reason", finish);
    else json_null(j, "finish_reason");
}

/* Write an event with a part of the answer (`text` may be NULL), or only with the token counts if `usage` is 1. */
static void write_event(request *req, const char *text, size_t length, const char *finish, int usage) {
    chat *c = req->chat;
    json j = { .out = &req->lines };
    text_append_string(&req->lines, "data: ");
    json_open(&j, NULL, '{');
    put_head(req->backend, c, &j, "chat.completion.chunk");
    json_open(&j, "choices", '[');
    if (!usage) {
        json_open(&j, NULL, '{');
        json_whole(&j, "index", 0);
        json_open(&j, "delta", '{');
        if (!req->started) json_text(&j, "role", "assistant");
        if (text) json_string(&j, "content", text, length);
        json_close(&j, '}');
        put_finish(finish, &j);
        json_close(&j, '}');
    }
    json_close(&j, ']');
    if (usage) put_usage(c, &j);
    else if (c->usage) json_null(&j, "usage");
    json_close(&j, '}');
    text_append_string(&req->lines, "\n\n");
    req->started = 1;
}

/* Write an event with the unsent part of the answer before byte `end`, if any. */
static void send_more(request *req, size_t end) {
    const text_bytes *answer = &req->items[0].answer;
    chat *c = req->chat;
    if (end <= c->sent) return;
    write_event(req, answer->data + c->sent, end - c->sent, NULL, 0);
    c->sent = end;
}

static void chat_partial(void *closure, const moetext_partial *partial) {
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

static int chat_done(server *s, text_item *item, const moetext_result *result) {
    chat *c = item->request->chat;
    const moetext_hypothesis *best = result->n_hypotheses ? result->hypotheses : NULL;
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
    }
    if (!item->status) quota_add(s, item->request, text_utf8_count(item->answer.data, item->answer.length));
    text_append(&item->answer, "", 0);
    return 1;
}

/* Write a member "error": {...} into the open object. */
static void put_error(const request *req, json *j, const char *message, unsigned status) {
    const char *type = status == MHD_HTTP_UNAUTHORIZED        ? "authentication_error"
                       : status == MHD_HTTP_TOO_MANY_REQUESTS ? "rate_limit_error"
                       : status < 500                         ? "invalid_request_error"
                                                              : "server_error";
    const char *code = req->chat && req->chat->code      ? req->chat->code
                       : status == MHD_HTTP_UNAUTHORIZED ? "invalid_api_key"
                                                         : NULL;
    json_open(j, "error", '{');
    json_clean(j, "message", message, strlen(message));
    json_text(j, "type", type);
    json_null(j, "param");
    if (code) json_text(j, "code", code);
    else json_null(j, "code");
    json_close(j, '}');
}

static void write_error(request *req, const char *message, unsigned status) {
    json j = { .out = &req->lines };
    text_append_string(&req->lines, "data: ");
    json_open(&j, NULL, '{');
    put_error(req, &j, message, status);
    json_close(&j, '}');
    text_append_string(&req->lines, "\n\n");
}

/* Write the last events of a stream. A failed stream must not end with [DONE] like a complete one. */
static void chat_end(server *s, request *req, const text_item *item) {
    (void)s;
    if (!item) write_error(req, requests_why(req), req->cut);
    else if (!item->status) {
        send_more(req, item->answer.length);
        write_event(req, NULL, 0, req->chat->finish, 0);
        if (req->chat->usage) write_event(req, NULL, 0, NULL, 1);
        text_append_string(&req->lines, "data: [DONE]\n\n");
    } else if (req->started) { /* an error before the first event is sent as an HTTP status */
        req->cut = failure_status(item);
        write_error(req, item->answer.data ? item->answer.data : "out of memory", req->cut);
    }
}

/* ==== 3. Replies ======================================================================================== */

static enum MHD_Result send_answer(server *s, request *req) {
    const text_bytes *answer = &req->items[0].answer;
    json j = { .out = &req->out };
    json_open(&j, NULL, '{');
    put_head(req->backend, req->chat, &j, "chat.completion");
    json_open(&j, "choices", '[');
    json_open(&j, NULL, '{');
    json_whole(&j, "index", 0);
    json_open(&j, "message", '{');
    json_text(&j, "role", "assistant");
    json_string(&j, "content", answer->data, answer->length);
    json_null(&j, "refusal");
    json_close(&j, '}');
    put_finish(req->chat->finish, &j);
    json_close(&j, '}');
    json_close(&j, ']');
    put_usage(req->chat, &j);
    json_close(&j, '}');
    return send_json(s, req);
}

static const dialect completions = { .texts = "messages",
                                     .denied = MHD_HTTP_UNAUTHORIZED,
                                     .stream_type = "text/event-stream",
                                     .read = chat_read,
                                     .check = chat_check,
                                     .begin = chat_begin,
                                     .partial = chat_partial,
                                     .done = chat_done,
                                     .end = chat_end,
                                     .send = send_answer,
                                     .put_error = put_error,
                                     .free = chat_free };
static const dialect models = { .denied = MHD_HTTP_UNAUTHORIZED, .put_error = put_error };

/* ==== 4. Models ========================================================================================= */

static void put_model(const backend *b, json *j) {
    json_open(j, NULL, '{');
    json_clean(j, "id", model_name(b), strlen(model_name(b)));
    json_text(j, "object", "model");
    json_whole(j, "created", (int64_t)b->began);
    json_text(j, "owned_by", "moe");
    json_close(j, '}');
}

static enum MHD_Result send_models(server *s, request *req) {
    const backend *b = req->backend;
    json j = { .out = &req->out };
    json_open(&j, NULL, '{');
    json_text(&j, "object", "list");
    json_open(&j, "data", '[');
    if (b->answers) put_model(b, &j);
    json_close(&j, ']');
    json_close(&j, '}');
    return send_json(s, req);
}

static enum MHD_Result send_model(server *s, request *req) {
    const backend *b = req->backend;
    json j = { .out = &req->out };
    if (!b->answers || strcmp(req->fetched, model_name(b)) != 0)
        return send_error(s, req, MHD_HTTP_NOT_FOUND, "model not found: GET /v1/models lists the available models");
    put_model(b, &j);
    return send_json(s, req);
}

const route openai_routes[] = {
    { "POST", "/v1/chat/completions", NEEDS_BODY | NEEDS_KEY, answer_translate, &completions },
    { "GET", "/v1/models", NEEDS_KEY, send_models, &models },
    { "GET", "/v1/models/", NEEDS_KEY, send_model, &models },
    { 0 },
};
