/* suspicion.c - see suspicion.h. */
#include "tools/text/suspicion.h"
#include "tools/text/text.h"
#include "tools/text/words.h"

#include <stdio.h>
#include <string.h>
#include <utf8proc.h>

/* ---- 1. Scripts of languages --------------------------------------------------------------------------- */

static const struct {
    utf8proc_int32_t first, last;
    char script[5]; /* ISO 15924 */
} blocks[] = { { 0x41, 0x24F, "Latn" },    { 0x400, 0x52F, "Cyrl" },   { 0x590, 0x5FF, "Hebr" },
               { 0x600, 0x77F, "Arab" },   { 0x900, 0x97F, "Deva" },   { 0x980, 0x9FF, "Beng" },
               { 0xA80, 0xAFF, "Gujr" },   { 0xB80, 0xBFF, "Taml" },   { 0xC00, 0xC7F, "Telu" },
               { 0xE00, 0xE7F, "Thai" },   { 0xF00, 0xFFF, "Tibt" },   { 0x1000, 0x109F, "Mymr" },
               { 0x1100, 0x11FF, "Hang" }, { 0x1780, 0x17FF, "Khmr" }, { 0x1800, 0x18AF, "Mong" },
               { 0x1E00, 0x1EFF, "Latn" }, { 0x3040, 0x30FF, "Kana" }, { 0x3130, 0x318F, "Hang" },
               { 0x3400, 0x9FFF, "Hani" }, { 0xAC00, 0xD7AF, "Hang" }, { 0xF900, 0xFAFF, "Hani" },
               { 0xFB50, 0xFDFF, "Arab" }, { 0xFE70, 0xFEFF, "Arab" }, { 0x20000, 0x3FFFF, "Hani" } };

/* Scripts of the languages that decoder-only models translate. Other languages may have any script. */
static const struct {
    const char *codes, *scripts;
} written[] = { { " en fr pt es tr it de vi ms id tl pl cs nl ", "Latn" },
                { " ru uk ", "Cyrl" },
                { " kk ", "Cyrl Arab Latn" },
                { " mn ", "Cyrl Mong" },
                { " ar fa ur ug ", "Arab" },
                { " zh zh-Hant yue ", "Hani" },
                { " ja ", "Hani Kana" },
                { " ko ", "Hang Hani" },
                { " th ", "Thai" },
                { " hi mr ", "Deva" },
                { " km ", "Khmr" },
                { " my ", "Mymr" },
                { " gu ", "Gujr" },
                { " te ", "Telu" },
                { " he ", "Hebr" },
                { " bn ", "Beng" },
                { " ta ", "Taml" },
                { " bo ", "Tibt" } };

/* Frequent characters that occur in only one of the two Chinese scripts. */
static const char simplified[] =
    "这们来时国说会为对过发经还间问题现实开样学长门车马鱼鸟见贝页风飞饭话请谢钱银铁线红绿给结组织",
                  traditional[] =
                      "這們來時國說會為對過發經還間問題現實開樣學長門車馬魚鳥見貝頁風飛飯話請謝錢銀鐵線紅綠給結組織";

enum { BLOCKS = sizeof blocks / sizeof *blocks };

typedef struct writing {
    size_t letters, characters, simplified, traditional;
    size_t of_block[BLOCKS]; /* letters */
} writing;

static int is_of(const char *scripts, size_t block) { return text_is_listed(scripts, blocks[block].script, 4); }

static writing look(moe_span s) {
    writing w = { 0 };
    for (size_t at = 0, bytes, block; at < s.length; at += bytes) {
        const utf8proc_int32_t c = text_character(s.data, s.length, at, &bytes);
        w.characters++;
        if (!text_is_letter(c)) continue;
        w.letters++;
        for (block = 0; block < BLOCKS && (c < blocks[block].first || c > blocks[block].last); block++) {}
        if (block == BLOCKS) continue;
        w.of_block[block]++;
        if (!is_of("Hani", block) || bytes != 3) continue;
        const char han[4] = { s.data[at], s.data[at + 1], s.data[at + 2], '\0' };
        w.simplified += strstr(simplified, han) != NULL;
        w.traditional += strstr(traditional, han) != NULL;
    }
    return w;
}

static size_t letters_of(const writing *w, const char *scripts) {
    size_t n = 0;
    for (size_t i = 0; i < BLOCKS; i++) n += is_of(scripts, i) ? w->of_block[i] : 0;
    return n;
}

static int is_code(moe_span language, const char *code) { return text_is(language.data, language.length, code); }

enum { FEW = 40, SOME = 8, TIMES = 4, TOLD = 60 /* minimum number of letters to detect a language */ };

/* Return 1 if the letters are in a script of the language. */
static int is_written(moe_span language, const writing *w) {
    char padded[32];
    const char *scripts = NULL;
    const size_t kana = letters_of(w, "Kana");
    snprintf(padded, sizeof padded, " %.*s ", (int)(language.length < 24 ? language.length : 24),
             language.length ? language.data : "");
    for (size_t i = 0; i < sizeof written / sizeof *written; i++)
        if (strstr(written[i].codes, padded)) scripts = written[i].scripts;
    if (!scripts || w->letters < SOME) return 1;
    if (3 * letters_of(w, scripts) < w->letters) return 0;
    if (is_code(language, "ja") && letters_of(w, "Hani") >= FEW / 2 && !kana) return 0;
    if (!strcmp(scripts, "Hani") && 8 * kana > w->letters) return 0;
    if (is_code(language, "zh") && w->traditional > 3 && w->traditional > 4 * w->simplified) return 0;
    return !(is_code(language, "zh-Hant") && w->simplified > 3 && w->simplified > 4 * w->traditional);
}

/* Return the approximate length of a text if it were in Latin letters; a Han character or kana counts as three. */
static size_t weight(const writing *w) { return w->characters + 2 * letters_of(w, "Hani Kana"); }

/* ---- 2. Phrases of answers about themselves ------------------------------------------------------------ */

/* Beginnings, in lower case, of answers that introduce the translation before a colon. */
static const char preambles[] =
    "here is|here's|here are|sure|certainly|of course|translation|translated|the translation|the translated|"
    "the following is|below is|translate the following|please translate|hier ist die|die übersetzung|übersetzung|"
    "voici la traduction|traduction|la traduction|aquí está la traducción|aquí tienes la traducción|traducción|"
    "la traducción|aqui está a tradução|tradução|ecco la traduzione|traduzione|вот перевод|перевод|以下是|翻译|"
    "译文|好的|当然|将以下文本|请将以下|翻譯|譯文|以下は|翻訳|번역|다음은";

/* Beginnings of a line with a remark on the translation. */
static const char remarks[] =
    "note:|notes:|explanation:|translator's note|hinweis:|anmerkung:|erklärung:|remarque :|remarque:|"
    "explication :|explication:|nota:|explicación:|примечание:|пояснение:|注：|注:|说明：|解释：|備註：|説明：|"
    "참고:|설명:";

/* Phrases that models use to refuse. */
static const char refusals[] =
    "as an ai|i am an ai|i'm an ai|as a language model|assist with that request|assist with this request|als ki-|"
    "als sprachmodell|en tant qu'ia|en tant que modèle|como modelo de lengua|como modelo de lingua|"
    "как языковая модель|作为一个ai|作为ai|作为一个人工智能|作为人工智能|作为一个语言模型|身為ai|作為ai|aiとして|"
    "言語モデルとして|ai로서";
/* Words of texts about language models, which may contain refusals. */
static const char machines[] =
    "model|modèle|sprachm|intelligen|intellig| ai| ki| ia|l'ia|модел|искусств|模型|人工|ai|モデル|모델";

enum { PHRASE = 64 };

/* Convert the first `most` bytes of a text to lower case, into *out. */
static void small_letters(moe_span s, size_t most, text_bytes *out) {
    text_clear(out);
    for (size_t at = 0, bytes; at < s.length && out->length < most; at += bytes) {
        utf8proc_uint8_t letter[4];
        const utf8proc_int32_t c = text_character(s.data, s.length, at, &bytes);
        const utf8proc_ssize_t n = c ? utf8proc_encode_char(utf8proc_tolower(c), letter) : 0;
        if (n > 0) text_append(out, (const char *)letter, (size_t)n);
    }
    text_append(out, "", 0);
}

/* Return the next phrase of a list separated by '|', or NULL. */
static const char *next_phrase(const char **list, char phrase[PHRASE]) {
    const size_t n = strcspn(*list, "|");
    if (!n) return NULL;
    snprintf(phrase, PHRASE, "%.*s", (int)n, *list);
    *list += n + ((*list)[n] == '|');
    return phrase;
}

static int has_one_of(const char *text, const char *list) {
    char phrase[PHRASE];
    while (next_phrase(&list, phrase))
        if (strstr(text, phrase)) return 1;
    return 0;
}

static size_t colons(const char *text) {
    size_t n = 0;
    for (; (text = strpbrk(text, ":\xEF")); text++) n += *text == ':' || strncmp(text, "\xEF\xBC\x9A", 3) == 0;
    return n;
}

static int begins(const char *text, const char *list) {
    char phrase[PHRASE];
    text += strspn(text, " *#\"'(");
    while (next_phrase(&list, phrase))
        if (strncmp(text, phrase, strlen(phrase)) == 0) return 1;
    return 0;
}

/* Return how an answer refuses, mentions or explains the translation, or NULL. Both texts are in lower case. */
static const char *phrase_of(const char *source, const char *target) {
    char phrase[PHRASE];
    if (has_one_of(target, refusals) && !has_one_of(source, machines) && !has_one_of(source, refusals))
        return "the model may have refused";
    if (colons(target) <= colons(source)) return NULL;
    if (begins(target, preambles) && !begins(source, preambles)) return "the answer mentions the translation";
    for (const char *list = remarks; next_phrase(&list, phrase);) {
        const char *at = strstr(target, phrase);
        if (at > target && strchr(" (*[\xA0", at[-1])) return "the answer explains the translation";
        if (at > target && (unsigned char)*at >= 0x80 && (unsigned char)at[-1] >= 0x80)
            return "the answer explains the translation";
    }
    return NULL;
}

/* ---- 3. Answers ---------------------------------------------------------------------------------------- */

void text_suspicions_free(text_suspicions *d) {
    text_words_close(d->words);
    *d = (text_suspicions){ NULL, 0 };
}

/* Return 1 if a text is in a language other than `language` that has a word list. */
static int is_foreign(text_suspicions *d, moe_span language, moe_span target) {
    static const char *const known[] = { "de", "en", "es", "fr" };
    ptrdiff_t wanted = -1;
    float confidence;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (is_code(language, known[i])) wanted = (ptrdiff_t)i;
    if (wanted < 0 || d->failed) return 0;
    if (!d->words && !(d->words = text_words_open(known, sizeof known / sizeof *known))) return d->failed = 1, 0;
    const ptrdiff_t found = text_words_detect(d->words, target.data, target.length, &confidence);
    return found >= 0 && found != wanted && confidence > 0.999f;
}

static int ends_of(moe_span in, moe_span of) {
    return in.length > of.length && (memcmp(in.data, of.data, of.length) == 0 ||
                                     memcmp(in.data + in.length - of.length, of.data, of.length) == 0);
}

const char *text_suspicious_reason(text_suspicions *doubts, moe_span language, moe_span source, moe_span target,
                                   int lines) {
    source = text_trimmed(source.data, source.length, " \t"), target = text_trimmed(target.data, target.length, " \t");
    const writing from = look(source), to = look(target);
    text_bytes small[2] = { { 0 }, { 0 } };
    if (!from.letters) return NULL;
    small_letters(source, SIZE_MAX, &small[0]);
    small_letters(target, SIZE_MAX, &small[1]);
    const char *why = small[0].failed || small[1].failed ? NULL : phrase_of(small[0].data, small[1].data);
    text_bytes_free(&small[0]), text_bytes_free(&small[1]);
    if (why) return why;
    if (from.letters >= FEW && text_same(source, target)) return "the translation equals the text";
    if (from.letters >= FEW && ends_of(target, source)) return "the translation contains the text";
    if (!is_written(language, &to)) return "the translation is in another script";
    if (weight(&to) > TIMES * weight(&from) + FEW) return "the translation is far longer than the text";
    if (TIMES * weight(&to) + FEW < weight(&from)) return "the translation is far shorter than the text";
    if (doubts && to.letters >= TOLD && is_foreign(doubts, language, target))
        return "the translation seems to be in another language";
    return lines ? "the translation has several lines" : NULL;
}
