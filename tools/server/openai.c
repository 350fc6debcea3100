/* openai.c - OpenAI's chat interface.
 *
 * Contents
 *   1. Request
 *   2. Events
 *   3. Replies    send whole answers and errors
 *   4. Models
 */
#include "tools/server/chat.h"

#include <string.h>

/* ==== 1. Request ======================================================================================== */

/* Refuse unsupported parameters that would change the answer; unknown ones are ignored. */
static void refuse_others(request *req, const cJSON *all) {
    static const char *const names[] = { "tools",      "functions",        "logprobs",          "top_logprobs",
                                         "logit_bias", "presence_penalty", "frequency_penalty", "audio",
                                         "prediction" };
    const cJSON *n = cJSON_GetObjectItemCaseSensitive(all, "n");
    for (size_t i = 0; i < sizeof names / sizeof *names && !req->refusal; i++)
        if (!chat_is_false(cJSON_GetObjectItemCaseSensitive(all, names[i])))
            bad_request(req, "%s is not supported", names[i]);
    if (!req->refusal && n && !cJSON_IsNull(n) && !(cJSON_IsNumber(n) && n->valuedouble == 1))
        bad_request(req, "n must be 1: other values are not supported");
}

/* Read response_format: text, json_object, or json_schema with its schema. */
static void take_format(request *req, const cJSON *format) {
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(format, "type"),
                *named = cJSON_GetObjectItemCaseSensitive(format, "json_schema"),
                *schema = cJSON_GetObjectItemCaseSensitive(named ? named : format, "schema");
    const char *kind = cJSON_IsString(type) ? type->valuestring : "";
    if (!format || cJSON_IsNull(format) || strcmp(kind, "text") == 0) return;
    if (strcmp(kind, "json_object") == 0 || strcmp(kind, "json_schema") == 0) {
        cJSON *any = schema ? NULL : cJSON_CreateTrue();
        if (schema || any) chat_take_schema(req, schema ? schema : any);
        else refuse_memory(req);
        cJSON_Delete(any);
        if (!schema && strcmp(kind, "json_schema") == 0)
            bad_request(req, "response_format.json_schema.schema is missing");
    } else bad_request(req, "response_format must be text, json_object or json_schema");
}

static const chat_format openai_format;

static void read_messages(request *req, const cJSON *all) {
    const cJSON *stream_options = cJSON_GetObjectItemCaseSensitive(all, "stream_options");
    chat *c = chat_new(req, &openai_format);
    if (!c) return;
    refuse_others(req, all);
    if (!req->refusal) chat_take_parameters(req, all);
    if (!req->refusal) chat_take_names(req, all);
    if (!req->refusal) take_format(req, cJSON_GetObjectItemCaseSensitive(all, "response_format"));
    if (req->refusal) return;
    req->stream = chat_take_truth(req, all, "stream");
    c->usage = chat_take_truth(req, stream_options, "include_usage");
    if (!req->refusal) chat_take_messages(req, cJSON_GetObjectItemCaseSensitive(all, "messages"));
}

/* ==== 2. Events ========================================================================================= */

static void put_head(const backend *b, const chat *c, json *j, const char *object) {
    char id[64];
    snprintf(id, sizeof id, "chatcmpl-%llx-%llx", (unsigned long long)c->created, (unsigned long long)c->number);
    json_text(j, "id", id);
    json_text(j, "object", object);
    json_whole(j, "created", (int64_t)c->created);
    json_clean(j, "model", chat_model_name(b), strlen(chat_model_name(b)));
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

static void put_event(request *req, const char *text, size_t length, const char *finish) {
    write_event(req, text, length, finish, 0);
    if (finish && req->chat->usage) write_event(req, NULL, 0, NULL, 1);
    if (finish) text_append_string(&req->lines, "data: [DONE]\n\n");
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

/* ==== 3. Replies ======================================================================================== */

static void put_answer(request *req, const char *text, size_t length) {
    json j = { .out = &req->out };
    json_open(&j, NULL, '{');
    put_head(req->backend, req->chat, &j, "chat.completion");
    json_open(&j, "choices", '[');
    json_open(&j, NULL, '{');
    json_whole(&j, "index", 0);
    json_open(&j, "message", '{');
    json_text(&j, "role", "assistant");
    json_string(&j, "content", text, length);
    json_null(&j, "refusal");
    json_close(&j, '}');
    put_finish(req->chat->finish, &j);
    json_close(&j, '}');
    json_close(&j, ']');
    put_usage(req->chat, &j);
    json_close(&j, '}');
}

static const chat_format openai_format = { put_event, write_error, put_answer };

static const dialect completions = { .denied = MHD_HTTP_UNAUTHORIZED,
                                     .stream_type = "text/event-stream",
                                     .read = read_messages,
                                     .put_error = put_error,
                                     CHATS };
static const dialect models = { .denied = MHD_HTTP_UNAUTHORIZED, .put_error = put_error };

/* ==== 4. Models ========================================================================================= */

static void put_model(const backend *b, json *j) {
    json_open(j, NULL, '{');
    json_clean(j, "id", chat_model_name(b), strlen(chat_model_name(b)));
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
    put_model(b, &j);
    json_close(&j, ']');
    json_close(&j, '}');
    return send_json(s, req);
}

static enum MHD_Result send_model(server *s, request *req) {
    const backend *b = req->backend;
    json j = { .out = &req->out };
    if (strcmp(req->fetched, chat_model_name(b)) != 0)
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
