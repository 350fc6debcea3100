/* fuzz_get.c - fuzzes what moe-get reads from the network: Firefox's index, descriptions of repositories, model cards
 * and headers. The first byte selects the reader; every file that it returns must have a safe name and address. */
#include "tools/get/fetch.h"
#include "tools/get/sources.h"

#include <stdlib.h>
#include <string.h>

static void check(const source_model *m) {
    int least;
    source_bytes(m, &least);
    for (size_t i = 0; i < m->n; i++) {
        if (!source_safe_name(m->files[i].name) || !source_allowed_url(m->files[i].url, 0)) abort();
        for (size_t j = 0; j < i; j++)
            if (strcmp(m->files[i].name, m->files[j].name) == 0) abort();
    }
}

static void read_json(const char *data, size_t length, const char *word) {
    source_name names[SOURCE_CANDIDATES];
    source_model m;
    size_t n;
    moe_error e;
    char pivot[64];
    cJSON *json = source_json(data, length);
    if (json && !source_parse(word, names, &n, &e)) {
        const moe_status status = names[0].kind == SOURCE_HUB
                                      ? source_from_hub(json, &names[0], &m, &e)
                                      : source_from_index(json, "http://x/y", &names[0], (int)(length & 1), &m, &e);
        if (names[0].kind == SOURCE_FIREFOX) source_pivot(json, &names[0], pivot, sizeof pivot);
        if (!status) check(&m), source_model_free(&m);
    }
    cJSON_Delete(json);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const words[] = { "en-pt", "owner/name", "owner/name/a.gguf" };
    source_name names[SOURCE_CANDIDATES];
    uint64_t numbers[3];
    size_t n;
    char licence[64], *text = size ? malloc(size) : NULL;
    if (!text) return 0;
    memcpy(text, data + 1, size - 1), text[size - 1] = 0;
    if (*data % 8 < 3) read_json(text, size - 1, words[*data % 8]);
    else if (*data % 8 == 3) source_card_licence(text, size - 1, licence);
    else if (*data % 8 == 4) fetch_content_range(text, &numbers[0], &numbers[1], &numbers[2]);
    else if (*data % 8 == 5) fetch_same_origin("https://huggingface.co/x", text);
    else source_parse(text, names, &n, NULL);
    free(text);
    return 0;
}
