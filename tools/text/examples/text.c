#include <moetext.h>
#include <stdio.h>
int main(void) {
    const char *const texts[] = { "Good morning, my friend.", "Where is my book?" };
    moe_error e = { 0 };
    moetext_model *model;
    moetext *translator;
    moetext_rows rows;
    if (moetext_model_open(NULL, NULL, &model, &e) || moetext_new(model, "target=de;beam=4", &translator, &e) ||
        moetext_translate_strings(translator, texts, 2, NULL, NULL, &rows, &e))
        return fprintf(stderr, "%s\n", e.message), 1;
    for (size_t i = 0; i < rows.n; i++) puts(rows.statuses[i] ? rows.messages[i] : rows.strings[i]);
    moetext_free(translator), moetext_model_close(model);
}
