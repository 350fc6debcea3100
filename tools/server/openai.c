/* openai.c - the interface of OpenAI's chat: messages, answered by a model that is asked in words.
 *
 * Contents
 *   1. Request    messages and parameters
 *   2. Answer     as it grows, in the decoder's thread
 *   3. Replies    whole, as events, errors
 *   4. Models
 *
 * A message is the model's own: nothing of it is kept, split or tried again, unlike a text of /translate.
 */
#include "tools/server/server.h"
#include "tools/server/stops.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_MESSAGES = 1000 };

struct chat {
    moetext_message *messages; /* [n] their texts lie in that of the ask's item */
    size_t n;
    int32_t *ids; /* [n_ids] the prompt */
    size_t n_ids, limit;
    stops stops;
    int usage;                   /* a stream ends with it */
    moe_session_params sampling; /* by which it is drawn, */
    uint64_t sampled;            /* where it asks for that: a bit for each parameter, by its number */
    time_t created;
    uint64_t number;
    const char *code; /* of an error; NULL: it has none */

    /* the decoder's; that of the item is the text of the answer */
    size_t tokens, said; /* bytes of the answer that are among the events */
    const char *finish;  /* why it ended; NULL: it goes on */
};

void chat_free(chat *c) {
    if (!c) return;
    for (size_t i = 0; i < c->stops.n; i++) free(c->stops.texts[i]);
    free(c->messages);
    free(c->ids);
    free(c);
}

/* ==== 1. Request ======================================================================================== */

/* A role by its name; -1: it is none that speaks here. */
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

/* The text of a message: one, or parts of it. 0: it is, or has, something else. */
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

static void no_memory(refusal *r) { refuse(r, MHD_HTTP_INTERNAL_SERVER_ERROR, "out of memory%s", ""); }

static void take_messages(ask *a, const cJSON *messages, refusal *r) {
    chat *c = a->chat;
    const cJSON *message;
    text_bytes all = { 0 };
    const int n = cJSON_IsArray(messages) ? cJSON_GetArraySize(messages) : 0;
    if (n < 1 || n > MOST_MESSAGES) {
        refuse(r, MHD_HTTP_BAD_REQUEST, "messages is a list of 1 to 1000 messages%s", "");
        return;
    }
    if (!(c->messages = calloc((size_t)n, sizeof *c->messages))) {
        no_memory(r);
        return;
    }
    text_append(&all, "", 0);
    cJSON_ArrayForEach(message, messages) {
        const int role = role_of(message);
        const size_t begin = all.length;
        if (role < 0)
            refuse(r, MHD_HTTP_BAD_REQUEST, "the role of a message is system, developer, user or assistant%s", "");
        else if (!add_content(message, &all))
            refuse(r, MHD_HTTP_BAD_REQUEST, "the content of a message is a text, or a list of parts that are%s", "");
        if (r->status) break;
        c->messages[c->n++] = (moetext_message){ .role = (moetext_role)role, .length = all.length - begin };
    }
    if (!r->status && (all.failed || !add_text(a, all.data, all.length))) no_memory(r);
    for (size_t i = 0, at = 0; !r->status && i < c->n; at += c->messages[i++].length)
        c->messages[i].text = a->items[0].text + at;
    text_bytes_free(&all);
}

static void take_stop(chat *c, const cJSON *stop, refusal *r) {
    const size_t length = cJSON_IsString(stop) ? strlen(stop->valuestring) : 0;
    if (!length || length > STOPS_LONGEST || c->stops.n == STOPS_MOST)
        refuse(r, MHD_HTTP_BAD_REQUEST, "stop is a text of 1 to 256 bytes, or a list of up to 16%s", "");
    else if (!(c->stops.texts[c->stops.n] = text_copy(stop->valuestring, length))) no_memory(r);
    else c->stops.n++;
    if (length > c->stops.longest) c->stops.longest = length;
}

static int is_false(const cJSON *x) {
    return !x || cJSON_IsNull(x) || cJSON_IsFalse(x) || (cJSON_IsNumber(x) && x->valuedouble == 0) ||
           ((cJSON_IsArray(x) || cJSON_IsObject(x)) && !x->child);
}

/* What would make another answer and cannot be had. What is not known is passed over. */
static void refuse_others(const cJSON *all, refusal *r) {
    static const char *const names[] = { "tools",      "functions",        "logprobs",          "top_logprobs",
                                         "logit_bias", "presence_penalty", "frequency_penalty", "audio",
                                         "prediction" };
    const cJSON *n = cJSON_GetObjectItemCaseSensitive(all, "n"),
                *format = cJSON_GetObjectItemCaseSensitive(all, "response_format"),
                *type = cJSON_GetObjectItemCaseSensitive(format, "type");
    for (size_t i = 0; i < sizeof names / sizeof *names && !r->status; i++)
        if (!is_false(cJSON_GetObjectItemCaseSensitive(all, names[i])))
            refuse(r, MHD_HTTP_BAD_REQUEST, "%s is not supported", names[i]);
    if (!r->status && n && !cJSON_IsNull(n) && !(cJSON_IsNumber(n) && n->valuedouble == 1))
        refuse(r, MHD_HTTP_BAD_REQUEST, "%s is not supported but for 1: a request has one answer", "n");
    if (!r->status && cJSON_IsObject(format) && !(cJSON_IsString(type) && strcmp(type->valuestring, "text") == 0))
        refuse(r, MHD_HTTP_BAD_REQUEST, "%s is not supported but for text", "response_format");
}

/* A whole number from 1 on, of the first of two names that is there. */
static size_t take_limit(const cJSON *all, refusal *r) {
    static const char *const names[] = { "max_completion_tokens", "max_tokens" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const cJSON *limit = cJSON_GetObjectItemCaseSensitive(all, names[i]);
        if (!limit || cJSON_IsNull(limit)) continue;
        if (!cJSON_IsNumber(limit) || !(limit->valuedouble >= 1) || limit->valuedouble > 1e9 ||
            (double)(size_t)limit->valuedouble < limit->valuedouble)
            refuse(r, MHD_HTTP_BAD_REQUEST, "%s is a whole number from 1 on", names[i]);
        else return (size_t)limit->valuedouble;
        break;
    }
    return 0;
}

/* How an answer is drawn: parameters of the search by their own names. */
static void take_sampling(chat *c, const cJSON *all, refusal *r) {
    static const char *const names[] = { "temperature", "top_p", "top_k", "min_p", "seed" };
    const moe_param *param;
    char why[96];
    c->sampling.size = sizeof c->sampling;
    for (size_t i = 0; (param = moe_param_at(i)) && !r->status; i++)
        for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
            if (strcmp(param->name, names[k]) != 0) continue;
            const cJSON *number = cJSON_GetObjectItemCaseSensitive(all, names[k]);
            if (!number || cJSON_IsNull(number)) break;
            c->sampled |= (uint64_t)1 << i;
            if (cJSON_IsNumber(number) && (param->real || floor(number->valuedouble) == number->valuedouble) &&
                moe_param_set(&c->sampling, i, number->valuedouble))
                break;
            snprintf(why, sizeof why, "%s is a %s, %s", param->name, param->real ? "number" : "whole number",
                     param->values);
            refuse(r, MHD_HTTP_BAD_REQUEST, "%s", why);
            break;
        }
}

static void chat_read(ask *a, const cJSON *all, refusal *r) {
    const cJSON *stop = cJSON_GetObjectItemCaseSensitive(all, "stop"), *one,
                *wishes = cJSON_GetObjectItemCaseSensitive(all, "stream_options");
    chat *c = a->chat = calloc(1, sizeof *c);
    if (!c) {
        no_memory(r);
        return;
    }
    c->created = time(NULL);
    refuse_others(all, r);
    if (!r->status) take_sampling(c, all, r);
    if (!r->status) c->limit = take_limit(all, r);
    if (!r->status && cJSON_IsArray(stop)) cJSON_ArrayForEach(one, stop) {
            if (!r->status) take_stop(c, one, r);
        }
    else if (!r->status && stop && !cJSON_IsNull(stop)) take_stop(c, stop, r);
    a->stream = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(all, "stream"));
    c->usage = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(wishes, "include_usage"));
    if (!r->status) take_messages(a, cJSON_GetObjectItemCaseSensitive(all, "messages"), r);
}

/* The server's own parameters, with those that are asked for. */
static void check_sampling(const server *s, chat *c, refusal *r) {
    const moe_session_params wishes = c->sampling;
    c->sampling = s->sampling;
    c->sampling.sample = 1;
    for (size_t i = 0; moe_param_at(i); i++)
        if (c->sampled >> i & 1) moe_param_set(&c->sampling, i, moe_param_get(&wishes, i));
    if (s->draws) return;
    if (c->sampled && c->sampling.temperature > 0)
        refuse(r, MHD_HTTP_BAD_REQUEST, "this server draws no tokens (it has a beam, or sample=0): %s can only be 0",
               "temperature");
    c->sampled = 0;
}

/* The prompt, or why there is none. */
static void chat_check(server *s, ask *a, refusal *r) {
    chat *c = a->chat;
    moe_error error = { 0 };
    c->number = __atomic_add_fetch(&s->n_answers, 1, __ATOMIC_RELAXED);
    const size_t most = s->max_prompt ? s->max_prompt : 1;
    char beyond[96];
    if (s->answers) check_sampling(s, c, r);
    if (r->status) return;
    if (!(c->ids = malloc(most * sizeof *c->ids))) {
        no_memory(r);
        return;
    }
    const moe_status status = moetext_model_prompt(s->model, c->messages, c->n, c->ids, most, &c->n_ids, &error);
    if (status == MOE_ERROR_MEMORY) no_memory(r);
    else if (status == MOE_ERROR_UNSUPPORTED && !s->answers)
        refuse(r, MHD_HTTP_BAD_REQUEST,
               "this model only translates: POST /translate does that; it does not answer messages%s", "");
    else if (status) refuse(r, MHD_HTTP_BAD_REQUEST, "%s", error.message);
    else if (c->n_ids > most) {
        snprintf(beyond, sizeof beyond, "%zu tokens, and at most %zu fit", c->n_ids, most);
        refuse(r, MHD_HTTP_BAD_REQUEST, "with their template the messages have %s", beyond);
        c->code = "context_length_exceeded";
    }
}

/* ==== 2. Answer ========================================================================================= */

void chat_ask(const text_item *item, moetext_request *request) {
    const chat *c = item->of->chat;
    request->task = MOETEXT_ANSWER;
    request->ids = c->ids, request->n_ids = c->n_ids;
    request->limit = c->limit;
    request->partial = chat_partial;
    if (c->sampled) request->sampling = &c->sampling;
}

/* More of an answer; it may end there. */
static void chat_add(text_item *item, const char *text, size_t length) {
    chat *c = item->of->chat;
    if (stops_add(&c->stops, &item->answer, text, length)) c->finish = "stop";
}

/* The name of the model, its own or that of its file. */
static const char *model_name(const server *s) {
    const char *name = moetext_model_meta(s->model, "general.name"), *slash = strrchr(s->options.model, '/');
    return *name ? name : slash ? slash + 1 : s->options.model;
}

static void put_head(const server *s, const chat *c, json *j, const char *object) {
    char id[64];
    snprintf(id, sizeof id, "chatcmpl-%llx-%llx", (unsigned long long)c->created, (unsigned long long)c->number);
    json_text(j, "id", id);
    json_text(j, "object", object);
    json_whole(j, "created", (int64_t)c->created);
    json_clean(j, "model", model_name(s), strlen(model_name(s)));
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

/* An event with more of the answer, [length]; NULL: with none of it. `usage`: with that alone. */
static void write_event(const server *s, ask *a, const char *text, size_t length, const char *finish, int usage) {
    chat *c = a->chat;
    json j = { .out = &a->lines };
    text_append_string(&a->lines, "data: ");
    json_open(&j, NULL, '{');
    put_head(s, c, &j, "chat.completion.chunk");
    json_open(&j, "choices", '[');
    if (!usage) {
        json_open(&j, NULL, '{');
        json_whole(&j, "index", 0);
        json_open(&j, "delta", '{');
        if (!a->said) json_text(&j, "role", "assistant");
        if (text) json_string(&j, "content", text, length);
        json_close(&j, '}');
        put_finish(finish, &j);
        json_close(&j, '}');
    }
    json_close(&j, ']');
    if (usage) put_usage(c, &j);
    else if (c->usage) json_null(&j, "usage");
    json_close(&j, '}');
    text_append_string(&a->lines, "\n\n");
    a->said = 1;
}

/* An event with what may be said of the answer, if there is something new. */
static void say_more(const server *s, ask *a, size_t end) {
    const text_bytes *answer = &a->items[0].answer;
    chat *c = a->chat;
    if (end <= c->said) return;
    write_event(s, a, answer->data + c->said, end - c->said, NULL, 0);
    c->said = end;
}

void chat_partial(void *closure, const moetext_partial *partial) {
    server *s = closure;
    text_item *item = partial->user;
    ask *a = item->of;
    chat *c = a->chat;
    if (c->finish) return;
    chat_add(item, partial->text, partial->length);
    c->tokens = partial->n_ids;
    if (c->finish) __atomic_store_n(&a->dropped, 1, __ATOMIC_RELAXED); /* the rest is not wanted */
    pthread_mutex_lock(&s->lock);
    if (a->stream && a->connection && a->state == ASK_WAITING) {
        say_more(s, a, item->answer.length - (c->finish ? 0 : stops_held(&c->stops, &item->answer)));
        if (a->said) ask_wake(a);
    }
    pthread_mutex_unlock(&s->lock);
}

void chat_done(text_item *item, const moetext_result *result) {
    chat *c = item->of->chat;
    const moetext_hypothesis *best = result->n_hypotheses ? result->hypotheses : NULL;
    const size_t known = item->answer.length;
    if (c->finish) item->status = MOE_OK; /* it was stopped */
    else if (result->status || !best || best->length < known) {
        text_clear(&item->answer);
        text_append_string(&item->answer, result->status ? result->message : "there is no answer");
        if (!item->status) item->status = MOE_ERROR_NUMERIC;
    } else {
        c->tokens = best->n_logprobs;
        chat_add(item, best->text + known, best->length - known);
        if (!c->finish) c->finish = best->finished ? "stop" : "length";
    }
    text_append(&item->answer, "", 0);
}

void chat_end(const server *s, ask *a) {
    const text_item *item = &a->items[0];
    if (item->status && !a->said) return; /* it is no stream yet */
    if (item->status) {                   /* what failed does not end like what is whole */
        a->cut = is_theirs(item) ? MHD_HTTP_BAD_REQUEST : MHD_HTTP_INTERNAL_SERVER_ERROR;
        chat_error(a, item->answer.data ? item->answer.data : "out of memory", a->cut);
        return;
    }
    say_more(s, a, item->answer.length);
    write_event(s, a, NULL, 0, a->chat->finish, 0);
    if (a->chat->usage) write_event(s, a, NULL, 0, NULL, 1);
    text_append_string(&a->lines, "data: [DONE]\n\n");
}

/* ==== 3. Replies ======================================================================================== */

/* {"error": {...}} into an object that is open. */
static void put_error(const ask *a, json *j, const char *message, unsigned status) {
    const char *type = status == MHD_HTTP_UNAUTHORIZED        ? "authentication_error"
                       : status == MHD_HTTP_TOO_MANY_REQUESTS ? "rate_limit_error"
                       : status < 500                         ? "invalid_request_error"
                                                              : "server_error";
    const char *code = a->chat && a->chat->code          ? a->chat->code
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

void chat_error(ask *a, const char *message, unsigned status) {
    json j = { .out = &a->lines };
    text_append_string(&a->lines, "data: ");
    json_open(&j, NULL, '{');
    put_error(a, &j, message, status);
    json_close(&j, '}');
    text_append_string(&a->lines, "\n\n");
}

static enum MHD_Result send_answer(server *s, ask *a) {
    const text_bytes *answer = &a->items[0].answer;
    text_bytes out = { 0 };
    json j = { .out = &out };
    json_open(&j, NULL, '{');
    put_head(s, a->chat, &j, "chat.completion");
    json_open(&j, "choices", '[');
    json_open(&j, NULL, '{');
    json_whole(&j, "index", 0);
    json_open(&j, "message", '{');
    json_text(&j, "role", "assistant");
    json_string(&j, "content", answer->data, answer->length);
    json_null(&j, "refusal");
    json_close(&j, '}');
    put_finish(a->chat->finish, &j);
    json_close(&j, '}');
    json_close(&j, ']');
    put_usage(a->chat, &j);
    json_close(&j, '}');
    text_append_string(&out, "\n");
    return send_bytes(s, a, MHD_HTTP_OK, "application/json", &out);
}

const dialect openai_chat = { .texts = "messages",
                              .beyond = MHD_HTTP_TOO_MANY_REQUESTS,
                              .check = chat_check,
                              .send = send_answer,
                              .read = chat_read,
                              .put_error = put_error };
const dialect openai_models = { .put_error = put_error };

/* ==== 4. Models ========================================================================================= */

static void put_model(const server *s, json *j, const char *key) {
    json_open(j, key, '{');
    json_clean(j, "id", model_name(s), strlen(model_name(s)));
    json_text(j, "object", "model");
    json_whole(j, "created", (int64_t)s->began);
    json_text(j, "owned_by", "moe");
    json_close(j, '}');
}

enum MHD_Result openai_list(server *s, ask *a) {
    text_bytes out = { 0 };
    json j = { .out = &out };
    json_open(&j, NULL, '{');
    json_text(&j, "object", "list");
    json_open(&j, "data", '[');
    if (s->answers) put_model(s, &j, NULL);
    json_close(&j, ']');
    json_close(&j, '}');
    text_append_string(&out, "\n");
    return send_bytes(s, a, MHD_HTTP_OK, "application/json", &out);
}

enum MHD_Result openai_model(server *s, ask *a) {
    text_bytes out = { 0 };
    json j = { .out = &out };
    if (!s->answers || strcmp(a->fetched, model_name(s)) != 0)
        return send_error(s, a, MHD_HTTP_NOT_FOUND, "there is no such model: GET /v1/models lists those that answer");
    put_model(s, &j, NULL);
    text_append_string(&out, "\n");
    return send_bytes(s, a, MHD_HTTP_OK, "application/json", &out);
}
