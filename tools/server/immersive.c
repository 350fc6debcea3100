/* immersive.c - the interface of immersive-translate. */
#include "tools/server/server.h"

#include <string.h>

static void take_immersive(request *req, const char *name, const char *value, size_t length, refusal *r) {
    (void)r;
    if (strcmp(name, "token") == 0) take_word(req->key, sizeof req->key, value, length);
}

static enum MHD_Result send_immersive(server *s, request *req) {
    text_bytes out = { 0 };
    json j = { .out = &out };
    json_open(&j, NULL, '{');
    json_open(&j, "translations", '[');
    for (size_t i = 0; i < request_count(req); i++) {
        const ptrdiff_t language = request_source(s, req, i);
        json_open(&j, NULL, '{');
        json_text(&j, "detected_source_lang", language < 0 ? "en" : moetext_model_language(s->model, (size_t)language));
        put_text(req, &j, "text", i, 0);
        json_close(&j, '}');
    }
    json_close(&j, ']');
    json_close(&j, '}');
    return send_json(s, req, &out);
}

static const dialect immersive = { .texts = "text_list",
                                   .source = "source_lang",
                                   .target = "target_lang",
                                   .error = "error",
                                   .take = take_immersive,
                                   .send = send_immersive,
                                   TRANSLATES };

const route immersive_routes[] = {
    { "POST", "/imme", NEEDS_BODY | NEEDS_KEY, answer_translate, &immersive },
    { 0 },
};
