/* text.c - see text.h. The sections have the same numbers. */
#define _POSIX_C_SOURCE 200809L

#include "tools/text/text.h"
#include "tools/text/sentences.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <utf8proc.h>

/* ---- 1. Ids -------------------------------------------------------------------------------------------- */

void text_append_ids(text_bytes *bytes, const int32_t *ids, size_t count) {
    for (size_t i = 0; i < count; i++) text_printf(bytes, i ? " %d" : "%d", (int)ids[i]);
    text_append(bytes, "", 0);
}

void text_ids_free(text_ids *ids) {
    free(ids->data);
    *ids = (text_ids){ 0 };
}

moe_status text_ids_append(text_ids *ids, const int32_t *from, size_t count, moe_error *error) {
    return text_add(&ids->data, &ids->length, &ids->capacity, from, count, sizeof *from, error);
}

moe_status text_ids_set(text_ids *ids, const int32_t *from, size_t count, moe_error *error) {
    ids->length = 0;
    return text_ids_append(ids, from, count, error);
}

/* ---- 2. Characters ------------------------------------------------------------------------------------- */

size_t text_composed(const char *data, size_t length, int32_t *out, size_t room) {
    const utf8proc_option_t nfc = UTF8PROC_STABLE | UTF8PROC_COMPOSE;
    const ptrdiff_t n = utf8proc_decompose((const uint8_t *)data, (ptrdiff_t)length, out, (ptrdiff_t)room, nfc);
    if (n <= 0 || (size_t)n > room) return 0;
    const ptrdiff_t composed = utf8proc_normalize_utf32(out, n, nfc);
    return composed > 0 ? (size_t)composed : 0;
}

int text_same(moe_span a, moe_span b) {
    return a.length == b.length && (!a.length || memcmp(a.data, b.data, a.length) == 0);
}

moe_span text_trimmed(const char *data, size_t length, const char *blanks) {
    while (length && data[length - 1] && strchr(blanks, data[length - 1])) length--;
    while (length && *data && strchr(blanks, *data)) data++, length--;
    return (moe_span){ data, length };
}

int32_t text_character(const char *data, size_t length, size_t at, size_t *bytes) {
    int32_t c = 0;
    if (at < length && (unsigned char)data[at] < 0x80) return *bytes = 1, data[at];
    const ptrdiff_t n = utf8proc_iterate((const uint8_t *)data + at, (ptrdiff_t)(length - at), &c);
    *bytes = n > 0 ? (size_t)n : 1;
    return n > 0 ? c : 0;
}

int text_is_letter(int32_t c) {
    const utf8proc_category_t category = utf8proc_category(c);
    return category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO;
}

int text_is_unspaced(const char *data, size_t length, size_t at) {
    size_t bytes;
    const int32_t c = text_character(data, length, at, &bytes);
    return (c >= 0xE00 && c < 0xF00) || (c >= 0x1000 && c < 0x10A0) || (c >= 0x1780 && c < 0x1800) ||
           (c >= 0x2E80 && c < 0xA000) || (c >= 0xF900 && c < 0xFB00) || c >= 0x20000;
}

static int is_small(int32_t c) { return utf8proc_category(c) == UTF8PROC_CATEGORY_LL; }

/* Switch the case of `c` if the result has as many bytes as `c` and maps back to `c`; return 0 otherwise. */
static int swap_case(char *at, int32_t c, size_t bytes, int32_t (*to)(int32_t), int32_t (*back)(int32_t)) {
    const int32_t other = to(c);
    uint8_t letter[4];
    if (other == c || back(other) != c || utf8proc_encode_char(other, letter) != (ptrdiff_t)bytes) return 0;
    if (at) memcpy(at, letter, bytes);
    return 1;
}

static int make_small(char *at, int32_t c, size_t bytes) {
    return swap_case(at, c, bytes, utf8proc_tolower, utf8proc_toupper);
}

int text_is_capitals(const char *data, size_t length) {
    size_t words = 0, letters = 0; /* `letters` is the number of letters in the current word */
    for (size_t at = 0, bytes; at < length; at += bytes) {
        const int32_t c = text_character(data, length, at, &bytes);
        if (is_small(c)) return 0;
        letters = make_small(NULL, c, bytes) ? letters + 1 : 0;
        words += letters == 2;
    }
    return words >= 3;
}

void text_lower_case(char *data, size_t length) {
    for (size_t begin = 0, end; begin < length; begin = end) {
        int first = 1;
        end = begin + text_sentence(data + begin, length - begin);
        for (size_t at = begin, bytes; at < end; at += bytes) {
            const int32_t c = text_character(data, length, at, &bytes);
            if (make_small(first ? NULL : data + at, c, bytes)) first = 0;
        }
    }
}

void text_lower_first(char *data, size_t length) {
    size_t bytes;
    const int32_t c = length ? text_character(data, length, 0, &bytes) : 0;
    if (c) make_small(data, c, bytes);
}

void text_upper_case(char *data, size_t length) {
    enum { SHARP_S = 0xDF };
    for (size_t at = 0, bytes; at < length; at += bytes) {
        const int32_t c = text_character(data, length, at, &bytes);
        if (c == SHARP_S) data[at] = data[at + 1] = 'S';
        else swap_case(data + at, c, bytes, utf8proc_toupper, utf8proc_tolower);
    }
}

enum { BRIEF_WORDS = 5, BRIEF_BYTES = 100 };

int text_is_short(const char *data, size_t length) {
    size_t words = 1, at = 0, bytes = 1, second;
    int32_t c = 0;
    if (!length || length > BRIEF_BYTES) return 0;
    for (; at < length; at += bytes) {
        c = text_character(data, length, at, &bytes);
        if (strchr(".!?:;|/", data[at])) return 0;
        words += c == ' ';
    }
    if (words > BRIEF_WORDS || utf8proc_category(c) < UTF8PROC_CATEGORY_LU ||
        utf8proc_category(c) > UTF8PROC_CATEGORY_MC)
        return 0;
    c = text_character(data, length, 0, &bytes);
    const int capital = make_small(NULL, c, bytes), one = bytes == length;
    return 1 + (capital && (one || is_small(text_character(data, length, bytes, &second))));
}

static void upper_first(char *data, size_t length) {
    size_t bytes = 0;
    if (length) text_character(data, length, 0, &bytes);
    text_upper_case(data, bytes);
}

/* Convert the first letter to lower case, except in words such as NATO. */
static void lower_word(char *data, size_t length) {
    size_t bytes = 0, second;
    if (length) text_character(data, length, 0, &bytes);
    if (bytes < length && utf8proc_category(text_character(data, length, bytes, &second)) == UTF8PROC_CATEGORY_LU)
        return;
    text_lower_first(data, length);
}

static int is_closing(text_variant variant) { return variant == TEXT_CLOSED || variant == TEXT_SENTENCE; }

void text_apply_variant(text_variant variant, text_bytes *text) {
    if (is_closing(variant)) text_append(text, ".", 1);
    if (text->failed) return;
    if (variant == TEXT_LOWERED) text_lower_first(text->data, text->length);
    if (variant == TEXT_SENTENCE) upper_first(text->data, text->length);
}

size_t text_undo_variant(text_variant variant, text_bytes *out, size_t begin) {
    static const char *const signs[] = { ".", "!", "\xE3\x80\x82", "\xEF\xBC\x81" };
    static const char opening[] = "\xC2\xA1";
    size_t lost = 0;
    if (out->failed || out->length == begin) return 0;
    char *text = out->data + begin;
    if (variant == TEXT_LOWERED) upper_first(text, out->length - begin);
    for (size_t i = 0; is_closing(variant) && i < sizeof signs / sizeof *signs; i++) {
        if (!text_ends_with(text, out->length - begin, signs[i])) continue;
        if (*signs[i] == '!' && strncmp(text, opening, 2) == 0) {
            lost = 2;
            memmove(text, text + lost, out->length - begin - lost);
        }
        out->length -= strlen(signs[i]) + lost;
        while (out->length > begin && text[out->length - begin - 1] == ' ') out->length--;
        out->data[out->length] = '\0';
        break;
    }
    if (variant == TEXT_SENTENCE) lower_word(text, out->length - begin);
    return lost;
}

/* ---- 3. Model and tokeniser ---------------------------------------------------------------------------- */

int32_t text_vocabulary_find(const text_vocabulary *v, const char *data, size_t length) {
    const uint32_t hash = text_hash(data, length);
    uint32_t id;
    for (size_t at = 0; (id = text_index_next(&v->index, hash, &at)) != TEXT_NONE;)
        if (v->pieces[id].length == length && memcmp(v->pieces[id].data, data, length) == 0) return (int32_t)id;
    return -1;
}

static const text_vocabulary *vocabulary_of(const text_front *front) {
    return !front->of_targets && front->sources.count ? &front->sources : &front->vocabulary;
}

text_front text_front_of_targets(const text_front *front) {
    text_front targets = *front;
    if (front->joiner) targets.tokeniser = front->joiner;
    targets.unknown = front->target_unknown;
    targets.of_targets = 1;
    return targets;
}

/* Pairs of language codes: ISO 639-1 or BCP 47, then NLLB's code (ISO 639-3 and script), whose first part is OPUS-MT's
 * code. Of pairs with the same first or second code, the first pair has priority; the last line has former codes. */
static const char aliases[] =
    "af afr_Latn ak aka_Latn am amh_Ethi ar arb_Arab as asm_Beng ast ast_Latn ay ayr_Latn az azj_Latn ba bak_Cyrl "
    "be bel_Cyrl bg bul_Cyrl bn ben_Beng bm bam_Latn bo bod_Tibt bs bos_Latn ca cat_Latn ceb ceb_Latn cs ces_Latn "
    "cy cym_Latn da dan_Latn de deu_Latn dz dzo_Tibt ee ewe_Latn el ell_Grek en eng_Latn eo epo_Latn es spa_Latn "
    "et est_Latn eu eus_Latn fa pes_Arab ff fuv_Latn fi fin_Latn fj fij_Latn fo fao_Latn fr fra_Latn ga gle_Latn "
    "gd gla_Latn gl glg_Latn gn grn_Latn gu guj_Gujr ha hau_Latn he heb_Hebr hi hin_Deva hr hrv_Latn ht hat_Latn "
    "hu hun_Latn hy hye_Armn id ind_Latn ig ibo_Latn ilo ilo_Latn is isl_Latn it ita_Latn ja jpn_Jpan jv jav_Latn "
    "ka kat_Geor kg kon_Latn ki kik_Latn kk kaz_Cyrl km khm_Khmr kn kan_Knda ko kor_Hang ks kas_Arab ku kmr_Latn "
    "ky kir_Cyrl lb ltz_Latn lg lug_Latn li lim_Latn ln lin_Latn lo lao_Laoo lt lit_Latn lv lvs_Latn mg plt_Latn "
    "mi mri_Latn mk mkd_Cyrl ml mal_Mlym mn khk_Cyrl mr mar_Deva ms zsm_Latn mt mlt_Latn my mya_Mymr ne npi_Deva "
    "nl nld_Latn nn nno_Latn no nob_Latn nb nob_Latn ns nso_Latn ny nya_Latn oc oci_Latn om gaz_Latn or ory_Orya "
    "pa pan_Guru pl pol_Latn ps pbt_Arab pt por_Latn qu quy_Latn rn run_Latn ro ron_Latn ru rus_Cyrl rw kin_Latn "
    "sa san_Deva sc srd_Latn sd snd_Arab sg sag_Latn si sin_Sinh sk slk_Latn sl slv_Latn sm smo_Latn sn sna_Latn "
    "so som_Latn sq als_Latn sr srp_Cyrl ss ssw_Latn st sot_Latn su sun_Latn sv swe_Latn sw swh_Latn ta tam_Taml "
    "te tel_Telu tg tgk_Cyrl th tha_Thai ti tir_Ethi tk tuk_Latn tl tgl_Latn tn tsn_Latn tr tur_Latn ts tso_Latn "
    "tt tat_Cyrl tw twi_Latn ug uig_Arab uk ukr_Cyrl ur urd_Arab uz uzn_Latn vi vie_Latn wo wol_Latn xh xho_Latn "
    "yi ydd_Hebr yo yor_Latn zh zho_Hans zh cmn_Hans yue yue_Hant zu zul_Latn "
    "iw heb_Hebr in ind_Latn ji ydd_Hebr jw jav_Latn fil tgl_Latn mo ron_Latn ";

/* Convert a code to lower case with '-' between its parts. */
static void plain_code(const char *code, size_t length, char out[32]) {
    size_t n = 0;
    for (; n < length && n < 31; n++)
        out[n] = (char)(code[n] == '_' ? '-' : code[n] >= 'A' && code[n] <= 'Z' ? code[n] + 32 : code[n]);
    out[n] = '\0';
}

moe_span text_code_at(const text_codes *list, size_t i) {
    if (list->codes) return (moe_span){ list->codes[i], strlen(list->codes[i]) };
    return list->entry < 0 ? moe_model_language(list->model, i)
                           : moe_model_meta_text(list->model, (size_t)list->entry, i);
}

/* Return the index of the first code that is equal except for case and dashes, or -1. If `part` is 1, compare only the
 * first part of listed codes. */
static ptrdiff_t code_like(const text_codes *list, const char *code, int part) {
    for (size_t i = 0; i < list->n; i++) {
        const moe_span known = text_code_at(list, i);
        char plain[32];
        plain_code(known.data, known.length, plain);
        if (part) plain[strcspn(plain, "-")] = '\0';
        if (strcmp(plain, code) == 0) return (ptrdiff_t)i;
    }
    return -1;
}

/* Return the index of a language whose listed code and `code` are in the same row of `aliases`, or -1. */
static ptrdiff_t code_of_alias(const text_codes *list, const char *code) {
    char plain[32] = "";
    for (const char *row = aliases; *row;) {
        const size_t shorter = strcspn(row, " "), longer = strcspn(row + shorter + 1, " ");
        char names[3][32]; /* names of one language, such as de, deu-latn and deu */
        plain_code(row, shorter, names[0]);
        plain_code(row + shorter + 1, longer, names[1]);
        plain_code(row + shorter + 1, strcspn(row + shorter + 1, "_"), names[2]);
        row += shorter + longer + 2;
        if (strcmp(code, names[0]) != 0 && strcmp(code, names[1]) != 0 && strcmp(code, names[2]) != 0) continue;
        for (int n = 1; n < 4; n++) {
            const ptrdiff_t found = code_like(list, names[n % 3], 0);
            if (found >= 0) return found;
        }
        if (strcmp(code, names[0]) == 0) memcpy(plain, names[1], sizeof plain);
    }
    return *plain ? code_of_alias(list, plain) : -1; /* he for iw */
}

/* A code parsed as in BCP 47; the language of "zh-yue-HK" is yue. */
typedef struct written {
    char language[32], script[5]; /* script may be empty */
} written;

/* Parse a plain code. The script of Chinese is simplified, except in Taiwan, Hong Kong and Macau. */
static written written_of(const char *plain) {
    written w = { "", "" };
    int first = 1, traditional = 0;
    snprintf(w.language, sizeof w.language, "%.*s", (int)strcspn(plain, "-"), plain);
    for (; (plain = strchr(plain, '-')); first = 0) {
        const size_t n = strcspn(++plain, "-");
        if (n == 3 && first && *plain >= 'a') snprintf(w.language, sizeof w.language, "%.3s", plain);
        if (n == 4 && *plain >= 'a') snprintf(w.script, sizeof w.script, "%.4s", plain);
        if (n == 2) traditional |= !strncmp(plain, "tw", 2) || !strncmp(plain, "hk", 2) || !strncmp(plain, "mo", 2);
    }
    if (!*w.script && (!strcmp(w.language, "zh") || !strcmp(w.language, "zho") || !strcmp(w.language, "cmn")))
        memcpy(w.script, traditional ? "hant" : "hans", sizeof w.script);
    return w;
}

/* Find the shorter name of a language, such as zh for zho and cmn, or else copy its name. */
static void short_name(const char *language, char out[32]) {
    for (const char *row = aliases; *row; row += strcspn(row, " ") + 1) {
        const char *shorter = row;
        row += strcspn(row, " ") + 1;
        plain_code(row, strcspn(row, "_"), out);
        if (strcmp(language, out) != 0) continue;
        plain_code(shorter, strcspn(shorter, " "), out);
        return;
    }
    snprintf(out, 32, "%s", language);
}

int text_codes_agree(const char *a, const char *b) {
    const char *const codes[] = { a, b };
    char names[2][32], regions[2][3] = { "", "" };
    written w[2];
    if (!*a || !*b) return 1;
    for (int i = 0; i < 2; i++) {
        char plain[32];
        plain_code(codes[i], strlen(codes[i]), plain);
        w[i] = written_of(plain);
        short_name(w[i].language, names[i]);
        for (const char *part = plain; (part = strchr(part, '-')); part++)
            if (strcspn(part + 1, "-") == 2) snprintf(regions[i], sizeof regions[i], "%.2s", part + 1);
    }
    return strcmp(names[0], names[1]) == 0 &&
           (!*w[0].script || !*w[1].script || strcmp(w[0].script, w[1].script) == 0) &&
           (!*regions[0] || !*regions[1] || strcmp(regions[0], regions[1]) == 0);
}

/* Return the index of the first listed code with the language and script of `code`; -1 if none, or if `code` implies no
 * script. */
static ptrdiff_t code_in_script(const text_codes *list, const char *code) {
    const written wanted = written_of(code);
    char plain[32], names[2][32];
    short_name(wanted.language, names[0]);
    for (size_t i = 0; *wanted.script && i < list->n; i++) {
        const moe_span known = text_code_at(list, i);
        plain_code(known.data, known.length, plain);
        const written found = written_of(plain);
        if (strcmp(found.script, wanted.script) != 0) continue;
        short_name(found.language, names[1]);
        if (strcmp(names[0], names[1]) == 0) return (ptrdiff_t)i;
    }
    return -1;
}

/* Find a code as listed, then by aliases, then by its script, and if `loose` is 1, by language alone (pt for pt-BR). */
static ptrdiff_t find_code(const text_codes *list, const char *code, int loose) {
    char plain[32];
    for (size_t i = 0; i < list->n; i++) {
        const moe_span known = text_code_at(list, i);
        if (text_is(known.data, known.length, code)) return (ptrdiff_t)i;
    }
    ptrdiff_t found = -1;
    plain_code(code, strlen(code), plain);
    for (int whole = 1; found < 0 && whole >= !loose; whole--) {
        const written w = written_of(plain);
        const char *wanted = whole ? plain : w.language;
        found = code_like(list, wanted, 0);
        if (found < 0) found = code_of_alias(list, wanted);
        if (found < 0 && whole) found = code_in_script(list, plain);
        if (found < 0 && !whole && strlen(wanted) == 3) found = code_like(list, wanted, 1);
    }
    return found;
}

ptrdiff_t text_language_among(const char *const *codes, size_t n, const char *code, int loose) {
    const text_codes list = { .codes = codes, .n = n };
    return find_code(&list, code, loose);
}

static text_codes tags_of(const moe_model *m) {
    return (text_codes){ .model = m, .entry = -1, .n = moe_model_language_count(m) };
}

text_codes text_languages_of(const moe_model *m, int target) {
    const ptrdiff_t entry = moe_model_meta_find(m, target ? "languages.targets" : "languages.sources");
    const int listed = entry >= 0 && moe_model_meta_kind(m, (size_t)entry) == MOE_META_TEXTS;
    const size_t n = listed ? moe_model_meta_length(m, (size_t)entry) : 0;
    return n ? (text_codes){ .model = m, .entry = entry, .n = n } : tags_of(m);
}

moe_span text_language_spelled(const moe_model *m, const char *code, int target) {
    const text_codes list = text_languages_of(m, target);
    const ptrdiff_t found = find_code(&list, code, 1);
    return found < 0 ? (moe_span){ NULL, 0 } : text_code_at(&list, (size_t)found);
}

static void append_codes(const text_codes *list, text_bytes *out) {
    for (size_t i = 0; i < list->n; i++) {
        const moe_span code = text_code_at(list, i);
        if (i) text_append(out, " ", 1);
        text_append_clean(out, code.data, code.length);
    }
}

void text_languages(const text_front *front, text_bytes *out) {
    const text_codes sources = text_languages_of(front->model, 0), targets = text_languages_of(front->model, 1);
    if (sources.entry >= 0 || targets.entry >= 0) append_codes(&sources, out), text_append_string(out, " -> ");
    append_codes(&targets, out);
    text_append(out, "", 0);
}

moe_status text_language(const text_front *front, const char *code, int target, int32_t *tag, moe_error *error) {
    const text_codes list = text_languages_of(front->model, target), tags = tags_of(front->model);
    if (find_code(&list, code, 1) >= 0) {
        const ptrdiff_t tagged = find_code(&tags, code, 1);
        *tag = tagged < 0 ? -1 : moe_model_language_tag_at(front->model, (size_t)tagged);
        return MOE_OK;
    }
    text_bytes known = { 0 }, asked = { 0 };
    append_codes(&list, &known);
    text_append_clean(&asked, code, strlen(code));
    moe_status status = known.failed || asked.failed ? text_out_of_memory(error)
                                                     : text_fail(error, MOE_ERROR_ARGUMENT, "language",
                                                                 "model has no language '%.20s'; available: %.150s",
                                                                 asked.data, known.length ? known.data : "none");
    text_bytes_free(&known);
    text_bytes_free(&asked);
    return status;
}

/* Convert the return value of an spm.h function. */
static moe_status status_of(int answer, const char *where, const char *why, moe_error *error) {
    if (!answer) return MOE_OK;
    return text_fail(error, answer == SPM_NO_MEMORY ? MOE_ERROR_MEMORY : MOE_ERROR_ARGUMENT, where, "%s", why);
}

/* Split a text into pieces, and look them up in the vocabulary. */
static moe_status encode_pieces(const text_front *front, const char *text, size_t length, text_ids *ids,
                                moe_error *error) {
    char why[200] = "";
    text_bytes pieces = { 0 };
    const int failed = spm_encode_pieces(front->tokeniser, text, length, &pieces, why, sizeof why);
    moe_status status = status_of(failed, "text", why, error);
    ids->length = 0;
    for (size_t at = 0, n; at < pieces.length && !status; at += n + 1) {
        n = strlen(pieces.data + at);
        const int32_t id = text_vocabulary_find(vocabulary_of(front), pieces.data + at, n);
        status = text_ids_append(ids, id < 0 ? &front->unknown : &id, 1, error);
    }
    text_bytes_free(&pieces);
    return status;
}

int text_cuts(const text_front *front) { return front->tokeniser || front->bpe; }

moe_status text_encode_begins(const text_front *front, const char *text, size_t length, text_offsets *begins,
                              moe_error *error) {
    char why[200] = "";
    text_ids ids = { 0 };
    const int failed = front->bpe ? bpe_encode(front->bpe, text, length, 0, &ids, begins, why, sizeof why)
                                  : spm_encode_begins(front->tokeniser, text, length, begins, why, sizeof why);
    text_ids_free(&ids);
    return status_of(failed, "text", why, error);
}

/* Reject unknown pieces if the vocabulary has no unknown token. */
static moe_status check_known(const text_ids *ids, moe_error *error) {
    for (size_t i = 0; i < ids->length; i++)
        if (ids->data[i] < 0)
            return text_fail(error, MOE_ERROR_ARGUMENT, "text",
                             "a piece is not in the vocabulary, which has no unknown token");
    return MOE_OK;
}

moe_status text_encode_as(const text_front *front, int how, const char *text, size_t length, text_ids *ids,
                          moe_error *error) {
    char why[200] = "";
    if (vocabulary_of(front)->count) {
        moe_status status = encode_pieces(front, text, length, ids, error);
        return status ? status : check_known(ids, error);
    }
    if (front->bpe)
        return status_of(bpe_encode(front->bpe, text, length, how, ids, NULL, why, sizeof why), "text", why, error);
    const int failed = spm_encode(front->tokeniser, text, length, ids, why, sizeof why);
    if (failed) return status_of(failed, "text", why, error);
    for (size_t i = 0; front->map.ids && i < ids->length; i++) {
        const int32_t id = front->map.ids[ids->data[i]];
        ids->data[i] = id < 0 ? front->unknown : id;
    }
    return check_known(ids, error);
}

moe_status text_encode(const text_front *front, const char *text, size_t length, text_ids *ids, moe_error *error) {
    return text_encode_as(front, 0, text, length, ids, error);
}

/* Return 1 for ids that are not text: begin, end, padding, or a language tag such as >>de<<. */
static int is_special(const text_front *front, int32_t id) {
    const moe_span piece = text_piece(front, id);
    return id == front->special[0] || id == front->special[1] || id == front->special[2] || !piece.length ||
           (piece.length > 4 && text_begins_with(piece.data, piece.length, ">>") &&
            text_ends_with(piece.data, piece.length, "<<"));
}

/* Replace SentencePiece's white space marks with spaces and trim the text, which has [length + 1] bytes. */
static size_t clear_marks(char *text, size_t length) {
    static const char mark[] = "\xE2\x96\x81";
    size_t n = 0, begin = 0;
    for (size_t i = 0; i < length; i++) {
        const int marked = length - i >= 3 && memcmp(text + i, mark, 3) == 0;
        text[n++] = marked ? ' ' : text[i];
        if (marked) i += 2;
    }
    while (n && text[n - 1] == ' ') n--;
    while (begin < n && text[begin] == ' ') begin++;
    memmove(text, text + begin, n - begin);
    return n - begin;
}

static const spm *joiner_of(const text_front *front) { return front->joiner ? front->joiner : front->tokeniser; }

/* Map the model's ids to SentencePiece's ids, dropping unmapped ids. */
static moe_status map_back(const text_front *front, const int32_t *ids, size_t n, text_ids *mapped, moe_error *error) {
    moe_status status = MOE_OK;
    for (size_t i = 0; i < n && !status; i++)
        if (ids[i] >= 0 && ids[i] < moe_model_vocabulary(front->model) && front->map.pieces[ids[i]] >= 0)
            status = text_ids_append(mapped, &front->map.pieces[ids[i]], 1, error);
    return status;
}

/* Return 1 for control tokens, which are omitted from output. */
static int is_control(const text_front *front, int32_t id) {
    return id == front->special[0] || id == front->special[1] || id == front->special[2] ||
           bpe_is_special(front->bpe, id);
}

static moe_status bpe_decode_begins(const text_front *front, const int32_t *ids, size_t n, text_offsets *begins,
                                    moe_error *error) {
    const moe_status status = text_reserve(&begins->data, &begins->capacity, n, sizeof *begins->data, error);
    int begun = 0;
    for (size_t at = 0; begins->length < n && !status; begins->length++) {
        const int32_t id = ids[begins->length];
        begins->data[begins->length] = (uint32_t)at;
        if (is_control(front, id)) continue;
        at += bpe_token_bytes(front->bpe, id) - (begun ? 0 : (size_t)bpe_is_trimmed(front->bpe, id));
        begun = 1;
    }
    return status;
}

moe_status text_decode_begins(const text_front *front, const int32_t *ids, size_t n, text_offsets *begins,
                              moe_error *error) {
    char why[200] = "";
    text_ids mapped = { 0 };
    begins->length = 0;
    if (front->bpe) return bpe_decode_begins(front, ids, n, begins, error);
    if (front->vocabulary.count) return MOE_OK;
    moe_status status = front->map.ids ? map_back(front, ids, n, &mapped, error) : MOE_OK;
    if (front->map.ids) ids = mapped.data;
    if (!status && (!front->map.ids || mapped.length == n))
        status = status_of(spm_decode_begins(joiner_of(front), ids, n, begins, why, sizeof why), "ids", why, error);
    text_ids_free(&mapped);
    return status;
}

/* Append more output, without control tokens. */
static void bpe_add(const text_front *front, bpe_stream *stream, const int32_t *ids, size_t count, text_bytes *out) {
    for (size_t i = 0; i < count; i++)
        if (!is_control(front, ids[i])) bpe_decode(front->bpe, stream, &ids[i], 1, out);
}

static moe_status join_pieces(const text_front *front, const int32_t *ids, size_t count, text_bytes *text,
                              moe_error *error) {
    char why[200] = "out of memory";
    text_bytes pieces = { 0 };
    for (size_t i = 0; i < count; i++) {
        const moe_span piece = text_piece(front, ids[i]);
        if (is_special(front, ids[i])) continue;
        text_append(&pieces, piece.data, piece.length);
        text_append(&pieces, "", 1);
    }
    const int failed = pieces.failed
                           ? SPM_NO_MEMORY
                           : spm_decode_pieces(joiner_of(front), pieces.data, pieces.length, text, why, sizeof why);
    text_bytes_free(&pieces);
    if (!failed) text->length = clear_marks(text->data, text->length);
    return status_of(failed, "ids", why, error);
}

/* Decode ids to `text`, which must be empty. */
static moe_status join(const text_front *front, const int32_t *ids, size_t count, text_bytes *text, moe_error *error) {
    char why[200] = "";
    text_ids mapped = { 0 };
    bpe_stream stream = { 0 };
    if (front->bpe) {
        bpe_add(front, &stream, ids, count, text);
        bpe_decode_end(&stream, text);
        return status_of(text->failed ? SPM_NO_MEMORY : 0, "ids", "out of memory", error);
    }
    if (front->vocabulary.count) return join_pieces(front, ids, count, text, error);
    moe_status status = front->map.ids ? map_back(front, ids, count, &mapped, error) : MOE_OK;
    if (front->map.ids) ids = mapped.data, count = mapped.length;
    if (!status) status = status_of(spm_decode(joiner_of(front), ids, count, text, why, sizeof why), "ids", why, error);
    text_ids_free(&mapped);
    return status;
}

/* Replace NUL bytes with spaces, and also line breaks and TABs unless `lines` is 1. */
static void blank_breaks(char *text, size_t length, int lines) {
    for (size_t i = 0; i < length; i++)
        if (!text[i] || (!lines && (text[i] == '\n' || text[i] == '\r' || text[i] == '\t'))) text[i] = ' ';
}

moe_status text_decode(const text_front *front, const int32_t *ids, size_t count, text_bytes *out, moe_error *error) {
    text_bytes text = { 0 };
    moe_status status = join(front, ids, count, &text, error);
    if (!status) {
        blank_breaks(text.data, text.length, 0);
        text_append(out, text.data, text.length);
        if (out->failed) status = text_out_of_memory(error);
    }
    text_bytes_free(&text);
    return status;
}

int text_decodes_lines(const text_front *front, const int32_t *ids, size_t n) {
    text_bytes text = { 0 };
    if (join(front, ids, n, &text, NULL)) text.length = 0;
    blank_breaks(text.data, text.length, 1);
    const moe_span s = text_trimmed(text.data, text.length, " \t\r\n");
    const int lines = s.length && memchr(s.data, '\n', s.length) != NULL;
    text_bytes_free(&text);
    return lines;
}

void text_decode_more(const text_front *front, bpe_stream *stream, const int32_t *ids, size_t count, int lines,
                      text_bytes *out) {
    const size_t begin = out->length;
    bpe_add(front, stream, ids, count, out);
    if (!out->failed && out->length > begin) blank_breaks(out->data + begin, out->length - begin, lines);
}

static int is_blank(char c) { return c == ' ' || c == '\t'; }

/* Return the id of a piece, -1 if unknown, or SPM_NO_MEMORY. */
static int32_t piece_id(const text_front *front, const char *piece, size_t length) {
    const text_vocabulary *v = vocabulary_of(front);
    if (v->count) return text_vocabulary_find(v, piece, length);
    if (front->bpe) return bpe_id(front->bpe, piece, length);
    text_bytes name = { 0 };
    text_append(&name, piece, length);
    int32_t id = name.failed ? SPM_NO_MEMORY : spm_id(front->tokeniser, name.data);
    text_bytes_free(&name);
    return id >= 0 && front->map.ids ? front->map.ids[id] : id;
}

static moe_span next_word(const char *text, size_t length, size_t *at) {
    while (*at < length && is_blank(text[*at])) ++*at;
    const size_t begin = *at;
    while (*at < length && !is_blank(text[*at])) ++*at;
    return (moe_span){ text + begin, *at - begin };
}

static moe_status refuse_word(moe_span word, const char *where, const char *why, moe_error *error) {
    text_bytes shown = { 0 };
    text_append_clean(&shown, word.data, word.length);
    const moe_status status = shown.failed ? text_out_of_memory(error)
                                           : text_fail(error, MOE_ERROR_ARGUMENT, where, "'%s' %s", shown.data, why);
    text_bytes_free(&shown);
    return status;
}

moe_status text_parse_pieces(const text_front *front, const char *text, size_t length, text_ids *ids,
                             moe_error *error) {
    moe_span word;
    moe_status status = MOE_OK;
    ids->length = 0;
    for (size_t at = 0; !status && (word = next_word(text, length, &at)).length;) {
        int32_t id = piece_id(front, word.data, word.length);
        if (id == SPM_NO_MEMORY) return text_out_of_memory(error);
        if (id < 0) id = front->unknown;
        if (id < 0) {
            word.length = text_utf8_cut(word.data, word.length, 40);
            status = refuse_word(word, "pieces", "is not in the vocabulary, which has no unknown token", error);
        } else status = text_ids_append(ids, &id, 1, error);
    }
    return status;
}

moe_span text_piece(const text_front *front, int32_t id) {
    const text_vocabulary *v = &front->vocabulary;
    const spm *joiner = joiner_of(front);
    if (id < 0 || id >= moe_model_vocabulary(front->model)) return (moe_span){ NULL, 0 };
    if (v->count) return v->pieces[id];
    if (front->bpe) {
        size_t length;
        const char *piece = bpe_piece(front->bpe, id, &length);
        return (moe_span){ piece, length };
    }
    if (joiner && front->map.pieces) id = front->map.pieces[id];
    if (!joiner || id < 0 || id >= spm_size(joiner)) return (moe_span){ NULL, 0 };
    const char *piece = spm_piece(joiner, id);
    return (moe_span){ piece, strlen(piece) };
}

moe_span text_source_piece(const text_front *front, int32_t id) {
    const text_vocabulary *v = &front->sources;
    if (!v->count) return text_piece(front, id);
    return id >= 0 && (size_t)id < v->count ? v->pieces[id] : (moe_span){ NULL, 0 };
}

moe_status text_join_pieces(const text_front *front, const int32_t *ids, size_t count, text_bytes *out,
                            moe_error *error) {
    size_t begin = out->length;
    for (size_t i = 0; i < count; i++) {
        moe_span piece = text_piece(front, ids[i]);
        if (i) text_append(out, " ", 1);
        text_append(out, piece.data, piece.length);
    }
    text_append(out, "", 0);
    for (size_t i = begin; i < out->length && !out->failed; i++)
        if (strchr("\n\r\t", out->data[i])) out->data[i] = ' '; /* strchr finds NUL too */
    return out->failed ? text_out_of_memory(error) : MOE_OK;
}

int text_is_unknown(const text_front *front, int32_t id) { return id >= 0 && id == front->unknown; }

moe_status text_parse_ids(const text_front *front, const char *text, size_t length, text_ids *ids, moe_error *error) {
    const int32_t vocabulary =
        front->of_targets ? moe_model_vocabulary(front->model) : moe_model_source_vocabulary(front->model);
    moe_span word;
    moe_status status = MOE_OK;
    ids->length = 0;
    for (size_t at = 0; !status && (word = next_word(text, length, &at)).length;) {
        const size_t most = word.length < 20 ? word.length : 20;
        int64_t id = 0;
        size_t n = 0;
        while (n < word.length && word.data[n] >= '0' && word.data[n] <= '9' && id <= INT32_MAX)
            id = id * 10 + (word.data[n++] - '0');
        if (n < word.length) {
            char why[64];
            snprintf(why, sizeof why, "is not a token id (0 to %d)", (int)vocabulary - 1);
            status = refuse_word((moe_span){ word.data, most }, "ids", why, error);
        } else if (id >= vocabulary) {
            status = text_fail(error, MOE_ERROR_ARGUMENT, "ids", "token id %.*s is out of range (0 to %d)", (int)most,
                               word.data, (int)vocabulary - 1);
        } else status = text_ids_append(ids, &(int32_t){ (int32_t)id }, 1, error);
    }
    return status;
}

/* ---- 4. Lines in --------------------------------------------------------------------------------------- */

void text_reader_init(text_reader *reader, int fd, const volatile sig_atomic_t *stop, int wake) {
    *reader = (text_reader){ .fd = fd, .stop = stop, .wake = wake };
}

int text_reader_take(text_reader *reader, const char *text) {
    text_append_string(&reader->buffer, text);
    reader->at_end = 1;
    return !reader->buffer.failed;
}

/* Guess the encoding of a line that is not valid UTF-8. Return the end of an error message. */
static const char *encoding_of(const char *data, size_t length) {
    size_t zeros = 0, high = 0, letters = 0, windows = 0;
    if (text_prefix("\xff\xfe \xfe\xff", data, length)) return ", as in UTF-16";
    if (text_begins_with(data, length, "\x1f\x8b")) return ", as in a file of gzip";
    for (size_t i = 0; i < length; i++) {
        const unsigned char c = (unsigned char)data[i];
        zeros += c == 0, high += c >= 0x80, windows += c >= 0x80 && c < 0xa0;
        letters += (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    }
    if (zeros && zeros >= length / 3) return ", as in UTF-16";
    if (zeros || !high || high > letters) return "";
    return windows ? ", as in Windows-1252 (iconv -f WINDOWS-1252 -t UTF-8)"
                   : ", as in Latin-1 (iconv -f LATIN1 -t UTF-8)";
}

size_t text_line_usable(const text_line *line, char *why, size_t size) {
    const size_t valid = text_utf8_valid(line->data, line->length);
    const char *nul = valid ? memchr(line->data, '\0', valid) : NULL;
    const size_t length = nul ? (size_t)(nul - line->data) : valid;
    const int split = line->too_long && line->length - valid < 4; /* the limit may have split a character */
    *why = '\0';
    const char *encoding = nul || (valid < line->length && !split) ? encoding_of(line->data, line->length) : "";
    if (nul) snprintf(why, size, "NUL byte at byte %zu%s", length + 1, encoding);
    else if (valid < line->length && !split) snprintf(why, size, "invalid UTF-8 at byte %zu%s", length + 1, encoding);
    else if (line->too_long) snprintf(why, size, "longer than %d bytes", (int)TEXT_MAX_LINE);
    return length;
}

void text_reader_free(text_reader *reader) { text_bytes_free(&reader->buffer); }

/* Read more bytes into the buffer. Return TEXT_READ_LINE after reading or at the end of input. */
static text_read fill(text_reader *r, int wait) {
    enum { CHUNK = 1 << 16 };
    for (;;) {
        if (r->stop && *r->stop) return TEXT_READ_STOP;
        /* A signal handler writes to r->wake, so poll() notices signals that arrive just before it. */
        struct pollfd ready[] = { { .fd = r->fd, .events = POLLIN }, { .fd = r->wake, .events = POLLIN } };
        int n = poll(ready, 2, wait ? -1 : 0);
        if (n < 0 && errno != EINTR) return TEXT_READ_ERROR;
        if (n <= 0 || !ready[0].revents) {
            if (!wait) return r->stop && *r->stop ? TEXT_READ_STOP : TEXT_READ_LATER;
            continue;
        }
        if (r->begin) { /* move the rest, at most a part of one line, to the front */
            memmove(r->buffer.data, r->buffer.data + r->begin, r->buffer.length - r->begin);
            r->buffer.length -= r->begin, r->searched -= r->begin, r->begin = 0;
        }
        if (!text_room(&r->buffer, CHUNK)) return errno = ENOMEM, TEXT_READ_ERROR;
        ssize_t got = read(r->fd, r->buffer.data + r->buffer.length, CHUNK);
        if (got < 0 && (errno == EINTR || errno == EAGAIN)) {
            if (!wait && errno == EAGAIN) return TEXT_READ_LATER;
            continue;
        }
        if (got < 0) return TEXT_READ_ERROR;
        if (got == 0) r->at_end = 1;
        r->buffer.length += (size_t)got;
        return TEXT_READ_LINE;
    }
}

text_read text_reader_peek(text_reader *r) {
    text_read state = TEXT_READ_LINE;
    while (state == TEXT_READ_LINE && !r->at_end && r->buffer.length < 8 &&
           !(r->buffer.length && memchr(r->buffer.data, '\n', r->buffer.length)))
        state = fill(r, 1);
    return state;
}

text_read text_reader_next(text_reader *r, int wait, text_line *line) {
    for (;;) {
        char *data = r->buffer.data;
        char *end =
            r->searched < r->buffer.length ? memchr(data + r->searched, '\n', r->buffer.length - r->searched) : NULL;
        size_t stop = end ? (size_t)(end - data) : r->buffer.length;
        if (r->skipping) { /* skip the rest of a line that was already returned */
            r->begin = r->searched = end ? stop + 1 : stop;
            r->skipping = !end;
            if (end) continue;
            if (r->at_end) return TEXT_READ_END;
        } else if (end || stop - r->begin > TEXT_MAX_LINE + 1 || (r->at_end && stop > r->begin)) {
            /* + 1 for the CR at the end of a line of maximum length */
            *line = (text_line){ .data = data + r->begin, .length = stop - r->begin, .number = ++r->lines };
            r->begin = r->searched = end ? stop + 1 : stop;
            r->skipping = !end && !r->at_end;
            if (end && line->length && line->data[line->length - 1] == '\r') line->length--;
            if (line->number == 1 && text_begins_with(line->data, line->length, "\xEF\xBB\xBF"))
                line->data += 3, line->length -= 3;
            line->too_long = line->length > TEXT_MAX_LINE;
            if (line->too_long) line->length = TEXT_MAX_LINE;
            return TEXT_READ_LINE;
        } else {
            r->searched = stop;
            if (r->at_end) return TEXT_READ_END;
        }
        text_read state = fill(r, wait);
        if (state != TEXT_READ_LINE) return state;
    }
}
