/* ollama.c - Ollama's interface, for clients that expect a server at port 11434.
 *
 * Contents
 *   1. Request
 *   2. Answers
 *   3. Models
 */
#define _POSIX_C_SOURCE 200809L

#include "tools/server/chat.h"

#include <string.h>

/* ==== 1. Request ======================================================================================== */

static const chat_format format;

static int is_filled(const cJSON *all, const char *name) {
    return !chat_is_false(cJSON_GetObjectItemCaseSensitive(all, name));
}

/* Read the members that /api/chat and /api/generate share. Answers are streams by default. */
static void take_common(request *req, const cJSON *all) {
    const cJSON *given = cJSON_GetObjectItemCaseSensitive(all, "options"),
                *wanted = cJSON_GetObjectItemCaseSensitive(all, "format"),
                *stream = cJSON_GetObjectItemCaseSensitive(all, "stream");
    const int is_json = cJSON_IsString(wanted) && strcmp(wanted->valuestring, "json") == 0;
    cJSON *any = is_json ? cJSON_CreateTrue() : NULL;
    if (given && !cJSON_IsObject(given) && !cJSON_IsNull(given)) bad_request(req, "options must be an object");
    chat_take_parameters(req, given);
    if (!req->refusal) chat_take_names(req, all);
    if (is_json && !any) refuse_memory(req);
    else if (cJSON_IsObject(wanted) || any) chat_take_schema(req, any ? any : wanted);
    else if (wanted && !cJSON_IsNull(wanted) && !(cJSON_IsString(wanted) && !*wanted->valuestring))
        bad_request(req, "format must be \"json\" or a JSON schema");
    cJSON_Delete(any);
    req->stream = chat_take_truth(req, all, "stream") || !cJSON_IsBool(stream);
}

/* Accept a request without messages, which only loads the model. */
static void take_nothing(request *req) { req->is_list = 1; }

static void read_chat(request *req, const cJSON *all) {
    const cJSON *messages = cJSON_GetObjectItemCaseSensitive(all, "messages"), *one;
    if (!chat_new(req, &format)) return;
    if (is_filled(all, "tools")) bad_request(req, "tools is not supported");
    cJSON_ArrayForEach(one, messages) if (is_filled(one, "images")) bad_request(req, "images are not supported");
    if (!req->refusal) take_common(req, all);
    if (!req->refusal && cJSON_GetArraySize(messages)) chat_take_messages(req, messages);
    else if (!req->refusal) take_nothing(req);
}

/* Add a message of a role. Return 0 if out of memory. */
static int add_message(cJSON *messages, const char *role, const char *text) {
    cJSON *message = cJSON_CreateObject();
    if (message && cJSON_AddStringToObject(message, "role", role) &&
        cJSON_AddStringToObject(message, "content", text) && cJSON_AddItemToArray(messages, message))
        return 1;
    cJSON_Delete(message);
    return 0;
}

static void read_prompt(request *req, const cJSON *all) {
    static const char *const refused[] = { "images", "suffix", "template", "raw" };
    const cJSON *prompt = cJSON_GetObjectItemCaseSensitive(all, "prompt"),
                *system = cJSON_GetObjectItemCaseSensitive(all, "system");
    const int has_system = cJSON_IsString(system) && *system->valuestring;
    chat *c = chat_new(req, &format);
    if (!c) return;
    c->generates = 1;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        const cJSON *value = cJSON_GetObjectItemCaseSensitive(all, refused[i]);
        if (!chat_is_false(value) && !(cJSON_IsString(value) && !*value->valuestring))
            bad_request(req, "%s is not supported", refused[i]);
    }
    if (!req->refusal) take_common(req, all);
    if (!req->refusal && prompt && !cJSON_IsString(prompt)) bad_request(req, "prompt must be a string");
    if (req->refusal) return;
    if (!prompt || !*prompt->valuestring) {
        take_nothing(req);
        return;
    }
    cJSON *messages = cJSON_CreateArray();
    if (messages && (!has_system || add_message(messages, "system", system->valuestring)) &&
        add_message(messages, "user", prompt->valuestring))
        chat_take_messages(req, messages);
    else refuse_memory(req);
    cJSON_Delete(messages);
}

/* ==== 2. Answers ======================================================================================== */

static void put_time(json *j, const char *key, time_t seconds, long nanoseconds) {
    char text[64];
    struct tm parts;
    gmtime_r(&seconds, &parts);
    const size_t n = strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &parts);
    snprintf(text + n, sizeof text - n, ".%06ldZ", nanoseconds / 1000);
    json_text(j, key, text);
}

/* Write an object with a part of the answer, or with the whole answer or its end if `finish` is not NULL. */
static void put_object(request *req, text_bytes *out, const char *text, size_t length, const char *finish) {
    const chat *c = req->chat;
    const char *model = c->model[0] ? c->model : chat_model_name(req->backend);
    struct timespec now = { 0 };
    json j = { .out = out };
    clock_gettime(CLOCK_REALTIME, &now);
    json_open(&j, NULL, '{');
    json_clean(&j, "model", model, strlen(model));
    put_time(&j, "created_at", now.tv_sec, now.tv_nsec);
    if (!c->generates) {
        json_open(&j, "message", '{');
        json_text(&j, "role", "assistant");
        json_string(&j, "content", text ? text : "", length);
        json_close(&j, '}');
    } else json_string(&j, "response", text ? text : "", length);
    json_bool(&j, "done", finish != NULL);
    if (finish) {
        const int64_t duration = (int64_t)(1e9 * (program_seconds() - req->begin));
        json_text(&j, "done_reason", finish);
        if (strcmp(finish, "load") != 0) {
            json_whole(&j, "total_duration", duration);
            json_whole(&j, "load_duration", 0);
            json_whole(&j, "prompt_eval_count", (int64_t)c->n_ids);
            json_whole(&j, "prompt_eval_duration", 0);
            json_whole(&j, "eval_count", (int64_t)c->tokens);
            json_whole(&j, "eval_duration", duration);
        }
    }
    json_close(&j, '}');
}

static void put_event(request *req, const char *text, size_t length, const char *finish) {
    put_object(req, &req->lines, text, length, finish);
    text_append(&req->lines, "\n", 1);
    req->started = 1;
}

static void put_failure(request *req, const char *message, unsigned status) {
    json j = { .out = &req->lines };
    (void)status;
    json_open(&j, NULL, '{');
    json_clean(&j, "error", message, strlen(message));
    json_close(&j, '}');
    text_append(&req->lines, "\n", 1);
}

static void put_answer(request *req, const char *text, size_t length) {
    put_object(req, &req->out, text, length, req->chat->finish);
}

static const chat_format format = { put_event, put_failure, put_answer };

/* ==== 3. Models ========================================================================================= */

static void put_tag(const backend *b, json *j, const char *key) {
    text_bytes tag = { 0 };
    text_printf(&tag, "%.400s%s", chat_model_name(b), strchr(chat_model_name(b), ':') ? "" : ":latest");
    json_clean(j, key, tag.data ? tag.data : "", tag.length);
    j->out->failed |= tag.failed;
    text_bytes_free(&tag);
}

/* Count the weights of a model, and return the name of the type that most of them have. */
static const char *count_weights(const moe_model *model, uint64_t *total) {
    uint64_t by_type[64] = { 0 };
    size_t most = 0;
    *total = 0;
    for (size_t i = 0; model && i < moe_model_tensor_count(model); i++) {
        const moe_tensor_info tensor = moe_model_tensor(model, i);
        const size_t type = (size_t)tensor.type % 64;
        *total += tensor.parameters, by_type[type] += tensor.parameters;
        if (by_type[type] > by_type[most]) most = type;
    }
    return *total ? moe_type_name((moe_type)most) : "unknown";
}

static const char *family_of(const backend *b) {
    const char *family = moetext_model_meta(b->model, "general.architecture");
    return *family ? family : "moe";
}

static void put_details(const backend *b, json *j) {
    uint64_t weights;
    char size[32];
    const char *type = count_weights(moetext_model_engine(b->model), &weights);
    if (weights >= 1000000000) snprintf(size, sizeof size, "%.1fB", (double)weights / 1e9);
    else snprintf(size, sizeof size, "%.1fM", (double)weights / 1e6);
    json_open(j, "details", '{');
    json_text(j, "parent_model", "");
    json_text(j, "format", "moe");
    json_text(j, "family", family_of(b));
    json_open(j, "families", '[');
    json_text(j, NULL, family_of(b));
    json_close(j, ']');
    json_text(j, "parameter_size", size);
    json_text(j, "quantization_level", type);
    json_close(j, '}');
}

static enum MHD_Result send_tags(server *s, request *req) {
    const backend *b = req->backend;
    const moe_model *engine = moetext_model_engine(b->model);
    const unsigned long long stamp = b->stamp; /* also identifies the settings */
    char digest[65];
    json j = { .out = &req->out };
    snprintf(digest, sizeof digest, "%016llx%016llx%016llx%016llx", stamp, ~stamp, stamp ^ stamp >> 17, stamp * 3);
    json_open(&j, NULL, '{');
    json_open(&j, "models", '[');
    json_open(&j, NULL, '{');
    put_tag(b, &j, "name");
    put_tag(b, &j, "model");
    put_time(&j, "modified_at", b->began, 0);
    json_whole(&j, "size", engine ? (int64_t)moe_model_file_bytes(engine) : 0);
    json_text(&j, "digest", digest);
    put_details(b, &j);
    json_close(&j, '}');
    json_close(&j, ']');
    json_close(&j, '}');
    return send_json(s, req);
}

static enum MHD_Result send_description(server *s, request *req) {
    const backend *b = req->backend;
    const char *licence = moetext_model_meta(b->model, "general.licence");
    uint64_t weights;
    json j = { .out = &req->out };
    count_weights(moetext_model_engine(b->model), &weights);
    json_open(&j, NULL, '{');
    json_clean(&j, "license", licence, strlen(licence));
    json_text(&j, "modelfile", "");
    json_text(&j, "parameters", "");
    json_text(&j, "template", "");
    put_details(b, &j);
    json_open(&j, "model_info", '{');
    json_text(&j, "general.architecture", family_of(b));
    json_clean(&j, "general.basename", chat_model_name(b), strlen(chat_model_name(b)));
    json_whole(&j, "general.parameter_count", (int64_t)weights);
    json_close(&j, '}');
    json_open(&j, "capabilities", '[');
    json_text(&j, NULL, "completion");
    json_close(&j, ']');
    put_time(&j, "modified_at", b->began, 0);
    json_close(&j, '}');
    return send_json(s, req);
}

static enum MHD_Result send_version(server *s, request *req) {
    json j = { .out = &req->out };
    json_open(&j, NULL, '{');
    json_text(&j, "version", moetext_version());
    json_close(&j, '}');
    return send_json(s, req);
}

static const dialect chats = { .denied = MHD_HTTP_UNAUTHORIZED,
                               .stream_type = "application/x-ndjson",
                               .read = read_chat,
                               CHATS };
static const dialect prompts = { .denied = MHD_HTTP_UNAUTHORIZED,
                                 .stream_type = "application/x-ndjson",
                                 .read = read_prompt,
                                 CHATS };
static const dialect models = { .denied = MHD_HTTP_UNAUTHORIZED };

const route ollama_routes[] = {
    { "POST", "/api/chat", NEEDS_BODY | NEEDS_KEY, answer_translate, &chats },
    { "POST", "/api/generate", NEEDS_BODY | NEEDS_KEY, answer_translate, &prompts },
    { "POST", "/api/show", NEEDS_BODY | NEEDS_KEY, send_description, &models },
    { "GET", "/api/tags", NEEDS_KEY, send_tags, &models },
    { "GET", "/api/version", 0, send_version, &models },
    { 0 },
};
