/* text.c - see text.h for what it is and for the contracts. The sections have the same numbers. */
#define _POSIX_C_SOURCE 200809L

#include "tools/text/messages.h"
#include "tools/text/protect.h"
#include "tools/text/sentences.h"
#include "tools/text/spans.h"
#include "tools/text/text.h"

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <utf8proc.h>

static moe_status fail(moe_error *error, moe_status code, const char *where, const char *format, ...)
#ifdef __GNUC__
    __attribute__((format(printf, 4, 5)))
#endif
    ;

static moe_status fail(moe_error *error, moe_status code, const char *where, const char *format, ...) {
    if (!error) return code;
    error->code = code;
    snprintf(error->where, sizeof error->where, "%s", where);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->message, sizeof error->message, format, arguments);
    va_end(arguments);
    return code;
}

static moe_status out_of_memory(moe_error *error) { return fail(error, MOE_ERROR_MEMORY, "", "out of memory"); }

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
    if (count > ids->capacity - ids->length) {
        const size_t capacity = ids->length + count + ids->capacity / 2;
        int32_t *data = realloc(ids->data, capacity * sizeof *data);
        if (!data) return out_of_memory(error);
        ids->data = data;
        ids->capacity = capacity;
    }
    if (count) memcpy(ids->data + ids->length, from, count * sizeof *from);
    ids->length += count;
    return MOE_OK;
}

moe_status text_ids_set(text_ids *ids, const int32_t *from, size_t count, moe_error *error) {
    ids->length = 0;
    return text_ids_append(ids, from, count, error);
}

/* ---- 2. Capitals --------------------------------------------------------------------------------------- */

/* The character at `at` of valid UTF-8; *bytes of it. */
static int32_t character(const char *data, size_t length, size_t at, size_t *bytes) {
    int32_t c = 0;
    const ptrdiff_t n = utf8proc_iterate((const uint8_t *)data + at, (ptrdiff_t)(length - at), &c);
    *bytes = n > 0 ? (size_t)n : 1;
    return n > 0 ? c : 0;
}

static int is_small(int32_t c) { return utf8proc_category(c) == UTF8PROC_CATEGORY_LL; }

/* Put the other case of `c` in its place, where both take `bytes` and lead to each other: then nothing is lost. 0: it
 * has none. */
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

int text_is_shouted(const char *data, size_t length) {
    size_t words = 0, letters = 0; /* letters of the word at hand */
    for (size_t at = 0, bytes; at < length; at += bytes) {
        const int32_t c = character(data, length, at, &bytes);
        if (is_small(c)) return 0;
        letters = make_small(NULL, c, bytes) ? letters + 1 : 0;
        words += letters == 2;
    }
    return words >= 3;
}

void text_calm(char *data, size_t length) {
    for (size_t begin = 0, end; begin < length; begin = end) {
        int first = 1;
        end = begin + text_sentence(data + begin, length - begin);
        for (size_t at = begin, bytes; at < end; at += bytes) {
            const int32_t c = character(data, length, at, &bytes);
            if (make_small(first ? NULL : data + at, c, bytes)) first = 0;
        }
    }
}

void text_calm_first(char *data, size_t length) {
    size_t bytes;
    const int32_t c = length ? character(data, length, 0, &bytes) : 0;
    if (c) make_small(data, c, bytes);
}

void text_shout(char *data, size_t length) {
    enum { SHARP_S = 0xDF };
    for (size_t at = 0, bytes; at < length; at += bytes) {
        const int32_t c = character(data, length, at, &bytes);
        if (c == SHARP_S) data[at] = data[at + 1] = 'S';
        else swap_case(data + at, c, bytes, utf8proc_toupper, utf8proc_tolower);
    }
}

enum { BRIEF_WORDS = 5, BRIEF_BYTES = 100 };

int text_is_brief(const char *data, size_t length) {
    size_t words = 1, at = 0, bytes = 1, second;
    int32_t c = 0;
    if (!length || length > BRIEF_BYTES) return 0;
    for (; at < length; at += bytes) {
        c = character(data, length, at, &bytes);
        if (strchr(".!?:;|/", data[at])) return 0;
        words += c == ' ';
    }
    if (words > BRIEF_WORDS || utf8proc_category(c) < UTF8PROC_CATEGORY_LU ||
        utf8proc_category(c) > UTF8PROC_CATEGORY_MC)
        return 0;
    c = character(data, length, 0, &bytes);
    const int capital = make_small(NULL, c, bytes), one = bytes == length;
    return 1 + (capital && (one || is_small(character(data, length, bytes, &second))));
}

void text_put_manner(text_manner manner, text_bytes *text) {
    if (manner == TEXT_CLOSED) text_append(text, ".", 1);
    if (manner == TEXT_SMALL && !text->failed) text_calm_first(text->data, text->length);
}

/* Whether s[length] ends with these bytes. */
static int ends_with(const char *s, size_t length, const char *end) {
    const size_t n = strlen(end);
    return length >= n && memcmp(s + length - n, end, n) == 0;
}

size_t text_take_manner(text_manner manner, text_bytes *out, size_t begin) {
    static const char *const signs[] = { ".", "!", "\xE3\x80\x82", "\xEF\xBC\x81" };
    static const char opening[] = "\xC2\xA1";
    size_t bytes, lost = 0;
    if (out->failed || out->length == begin) return 0;
    char *text = out->data + begin;
    if (manner == TEXT_SMALL) {
        character(text, out->length - begin, 0, &bytes);
        text_shout(text, bytes);
    }
    for (size_t i = 0; manner == TEXT_CLOSED && i < sizeof signs / sizeof *signs; i++) {
        if (!ends_with(text, out->length - begin, signs[i])) continue;
        if (*signs[i] == '!' && strncmp(text, opening, 2) == 0) {
            lost = 2;
            memmove(text, text + lost, out->length - begin - lost);
        }
        out->length -= strlen(signs[i]) + lost;
        while (out->length > begin && text[out->length - begin - 1] == ' ') out->length--;
        out->data[out->length] = '\0';
        break;
    }
    return lost;
}

/* ---- 3. Model and tokeniser ---------------------------------------------------------------------------- */

static int64_t meta_int(const moe_model *model, const char *key, int64_t otherwise) {
    ptrdiff_t i = moe_model_meta_find(model, key);
    return i < 0 ? otherwise : moe_model_meta_int(model, (size_t)i, 0);
}

/* What format.md says the session adds to a source, or to what a language model scores. */
static size_t source_extra(const moe_model *model) {
    int languages = moe_model_language_count(model) > 0;
    if (moe_model_get_kind(model) == MOE_MODEL_LANGUAGE) return 1;
    return (size_t)(meta_int(model, "source.tag", languages) != 0) + (size_t)(meta_int(model, "source.bos", 0) != 0) +
           (size_t)(meta_int(model, "source.eos", 1) != 0);
}

static int span_is(moe_span s, const char *text) {
    return s.length == strlen(text) && memcmp(s.data, text, s.length) == 0;
}

/* The id of a piece, of several the first; -1: there is none. */
static int32_t piece_find(const text_vocabulary *v, const char *data, size_t length) {
    const uint32_t hash = text_hash(data, length);
    uint32_t id;
    for (size_t at = 0; (id = text_index_next(&v->index, hash, &at)) != TEXT_NONE;)
        if (v->pieces[id].length == length && memcmp(v->pieces[id].data, data, length) == 0) return (int32_t)id;
    return -1;
}

/* A model without a list of pieces has an empty vocabulary of `size` tokens. */
static moe_status open_list(const text_front *front, const char *key, int32_t size, text_vocabulary *v,
                            moe_error *error) {
    ptrdiff_t list = moe_model_meta_find(front->model, key);
    if (list < 0) return MOE_OK;
    v->count = moe_model_meta_length(front->model, (size_t)list);
    if (moe_model_meta_kind(front->model, (size_t)list) != MOE_META_TEXTS || v->count != (size_t)size)
        return fail(error, MOE_ERROR_FORMAT, key, "it is not a list of %d texts, one for each token", (int)size);
    v->pieces = malloc(v->count * sizeof *v->pieces);
    if (!v->pieces) return out_of_memory(error);
    moe_model_meta_texts(front->model, (size_t)list, v->pieces, v->count);
    for (size_t i = 0; i < v->count; i++) {
        const moe_span s = v->pieces[i];
        if (s.length && piece_find(v, s.data, s.length) < 0 &&
            !text_index_add(&v->index, text_hash(s.data, s.length), i))
            return out_of_memory(error);
    }
    return MOE_OK;
}

/* The lists of pieces of targets, and of sources where they have token ids of their own. */
static moe_status open_vocabulary(text_front *front, moe_error *error) {
    const moe_model *m = front->model;
    moe_status status = open_list(front, "vocabulary.pieces", moe_model_vocabulary(m), &front->vocabulary, error);
    if (!status && moe_model_meta_find(m, "source.vocab.size") >= 0)
        status = open_list(front, "source.pieces", moe_model_source_vocabulary(m), &front->sources, error);
    if (!status && moe_model_meta_find(m, "source.vocab.size") >= 0 && front->vocabulary.count && !front->sources.count)
        return fail(error, MOE_ERROR_FORMAT, "source.pieces", "sources have token ids of their own, without texts");
    return status;
}

static const text_vocabulary *vocabulary_of(const text_front *front) {
    return !front->of_targets && front->sources.count ? &front->sources : &front->vocabulary;
}

/* The model's ids of SentencePiece's pieces, where the file lists them. */
static moe_status open_map(text_front *front, moe_error *error) {
    const ptrdiff_t list = moe_model_meta_find(front->model, "tokenizer.ids");
    const int32_t vocabulary = moe_model_vocabulary(front->model), size = spm_size(front->tokeniser);
    if (list < 0) return MOE_OK;
    if (moe_model_meta_kind(front->model, (size_t)list) != MOE_META_INTS ||
        moe_model_meta_length(front->model, (size_t)list) != (size_t)size)
        return fail(error, MOE_ERROR_FORMAT, "tokenizer.ids", "it is not a list of %d ids, one for each piece",
                    (int)size);
    front->map.ids = malloc((size_t)size * sizeof(int32_t));
    front->map.pieces = malloc((size_t)vocabulary * sizeof(int32_t));
    if (!front->map.ids || !front->map.pieces) return out_of_memory(error);
    for (int32_t i = 0; i < vocabulary; i++) front->map.pieces[i] = -1;
    for (int32_t i = 0; i < size; i++) {
        const int64_t id = moe_model_meta_int(front->model, (size_t)list, (size_t)i);
        if (id < -1 || id >= vocabulary)
            return fail(error, MOE_ERROR_FORMAT, "tokenizer.ids", "piece %d has an id outside the vocabulary", (int)i);
        front->map.ids[i] = (int32_t)id;
        if (id >= 0 && front->map.pieces[id] < 0) front->map.pieces[id] = i;
    }
    return MOE_OK;
}

/* A SentencePiece model that the file has under a key. */
static moe_status open_spm(const text_front *front, const char *key, spm **out, moe_error *error) {
    const ptrdiff_t at = moe_model_meta_find(front->model, key);
    const moe_span bytes = at < 0 ? (moe_span){ NULL, 0 } : moe_model_meta_text(front->model, (size_t)at, 0);
    char why[200] = "";
    *out = spm_new(bytes.data, bytes.length, why, sizeof why);
    return *out ? MOE_OK : fail(error, errno == ENOMEM ? MOE_ERROR_MEMORY : MOE_ERROR_FORMAT, key, "%s", why);
}

moe_status text_open_tokeniser(text_front *front, text_level level, moe_error *error) {
    if (level == TEXT_IDS_ONLY) return MOE_OK;
    ptrdiff_t kind = moe_model_meta_find(front->model, "tokenizer.kind");
    ptrdiff_t bytes = moe_model_meta_find(front->model, "tokenizer.model");
    moe_span name = { "none", 4 };
    const int64_t unknown = meta_int(front->model, "token.unk", -1),
                  of_sources = meta_int(front->model, "source.token.unk", unknown);
    front->unknown =
        of_sources >= 0 && of_sources < moe_model_source_vocabulary(front->model) ? (int32_t)of_sources : -1;
    front->target_unknown = unknown >= 0 && unknown < moe_model_vocabulary(front->model) ? (int32_t)unknown : -1;
    if (kind >= 0) name = moe_model_meta_text(front->model, (size_t)kind, 0);
    if (!span_is(name, "sentencepiece") || bytes < 0) {
        moe_status status = open_vocabulary(front, error);
        if (status || level == TEXT_IF_THERE || (level == TEXT_PIECES && front->vocabulary.count)) return status;
        return fail(error, MOE_ERROR_UNSUPPORTED, "tokenizer.kind",
                    front->vocabulary.count
                        ? "this model cuts text with Moses and BPE: let tools/convert/moses-bpe.py do that "
                          "and use --pretokenized"
                        : "this model holds no tokeniser: use --ids and give token ids");
    }
    moe_status status = open_spm(front, "tokenizer.model", &front->tokeniser, error);
    if (!status && moe_model_meta_find(front->model, "tokenizer.target_model") >= 0)
        status = open_spm(front, "tokenizer.target_model", &front->joiner, error);
    if (!status) status = open_vocabulary(front, error);
    if (!status) status = open_map(front, error);
    front->special[0] = (int32_t)meta_int(front->model, "token.bos", -1);
    front->special[1] = (int32_t)meta_int(front->model, "token.eos", -1);
    front->special[2] = (int32_t)meta_int(front->model, "token.pad", -1);
    if (status || front->vocabulary.count || front->map.ids) return status;
    if (spm_size(front->tokeniser) > moe_model_vocabulary(front->model))
        return fail(error, MOE_ERROR_FORMAT, "tokenizer.model", "the tokeniser has %d pieces, the model only %d tokens",
                    (int)spm_size(front->tokeniser), (int)moe_model_vocabulary(front->model));
    front->unknown = front->target_unknown = spm_unk(front->tokeniser);
    return MOE_OK;
}

struct text_loading {
    pthread_t thread;
    text_front *front;
    text_level level;
    moe_status status;
    moe_error error;
};

static void *load_tokeniser(void *user) {
    struct text_loading *l = user;
    l->status = text_open_tokeniser(l->front, l->level, &l->error);
    return NULL;
}

moe_status text_begin_tokeniser(text_front *front, text_level level, moe_error *error) {
    struct text_loading *l = level == TEXT_IDS_ONLY ? NULL : calloc(1, sizeof *l);
    pthread_attr_t stack;
    if (!l || pthread_attr_init(&stack)) {
        free(l);
        return text_open_tokeniser(front, level, error);
    }
    l->front = front;
    l->level = level;
    pthread_attr_setstacksize(&stack, 4 << 20); /* SentencePiece takes some for every byte of the longest piece */
    if (pthread_create(&l->thread, &stack, load_tokeniser, l)) free(l);
    else front->loading = l;
    pthread_attr_destroy(&stack);
    return front->loading ? MOE_OK : text_open_tokeniser(front, level, error);
}

moe_status text_wait_tokeniser(text_front *front, moe_error *error) {
    struct text_loading *l = front->loading;
    if (!l) return MOE_OK;
    pthread_join(l->thread, NULL);
    const moe_status status = l->status;
    if (status && error) *error = l->error;
    free(l);
    front->loading = NULL;
    return status;
}

const char *text_file_error(const char *file, const moe_error *error, char *out, size_t size) {
    if (error->code == MOE_ERROR_IO) snprintf(out, size, "%s", error->message);
    else snprintf(out, size, "%s: %s%s%s", file, error->where, error->where[0] ? ": " : "", error->message);
    return out;
}

moe_status text_open(const char *path, text_level level, const moe_model_params *params, text_front *front,
                     moe_error *error) {
    *front = (text_front){ .unknown = -1, .target_unknown = -1 };
    moe_status status = moe_model_open(path, params, &front->model, error);
    if (status) return status;
    front->source_extra = source_extra(front->model);
    status = text_open_tokeniser(front, level, error);
    if (status) text_close(front);
    return status;
}

void text_close(text_front *front) {
    text_wait_tokeniser(front, NULL);
    spm_free(front->tokeniser);
    spm_free(front->joiner);
    free(front->map.ids);
    free(front->map.pieces);
    free(front->vocabulary.pieces);
    text_index_free(&front->vocabulary.index);
    free(front->sources.pieces);
    text_index_free(&front->sources.index);
    moe_model_close(front->model);
    *front = (text_front){ 0 };
}

text_front text_front_of_targets(const text_front *front) {
    text_front targets = *front;
    if (front->joiner) targets.tokeniser = front->joiner;
    targets.unknown = front->target_unknown;
    targets.of_targets = 1;
    return targets;
}

void text_languages(const text_front *front, text_bytes *out) {
    for (size_t i = 0; i < moe_model_language_count(front->model); i++) {
        moe_span code = moe_model_language(front->model, i);
        if (i) text_append(out, " ", 1);
        text_append_clean(out, code.data, code.length);
    }
    text_append(out, "", 0);
}

/* Names of the same languages: ISO 639-1 or BCP 47, then NLLB's (ISO 639-3 and script), whose first part is what
 * OPUS-MT writes. Where two rows begin alike the first is meant. */
static const char aliases[] =
    "af afr_Latn am amh_Ethi ar arb_Arab as asm_Beng ast ast_Latn az azj_Latn ba bak_Cyrl be bel_Cyrl bg bul_Cyrl "
    "bn ben_Beng bm bam_Latn bo bod_Tibt bs bos_Latn ca cat_Latn ceb ceb_Latn cs ces_Latn cy cym_Latn da dan_Latn "
    "de deu_Latn dz dzo_Tibt ee ewe_Latn el ell_Grek en eng_Latn eo epo_Latn es spa_Latn et est_Latn eu eus_Latn "
    "fa pes_Arab ff fuv_Latn fi fin_Latn fj fij_Latn fo fao_Latn fr fra_Latn ga gle_Latn gd gla_Latn gl glg_Latn "
    "gn grn_Latn gu guj_Gujr ha hau_Latn he heb_Hebr hi hin_Deva hr hrv_Latn ht hat_Latn hu hun_Latn hy hye_Armn "
    "id ind_Latn ig ibo_Latn ilo ilo_Latn is isl_Latn it ita_Latn ja jpn_Jpan jv jav_Latn ka kat_Geor kg kon_Latn "
    "ki kik_Latn kk kaz_Cyrl km khm_Khmr kn kan_Knda ko kor_Hang ks kas_Arab ku kmr_Latn ky kir_Cyrl lb ltz_Latn "
    "lg lug_Latn li lim_Latn ln lin_Latn lo lao_Laoo lt lit_Latn lv lvs_Latn mg plt_Latn mi mri_Latn mk mkd_Cyrl "
    "ml mal_Mlym mn khk_Cyrl mr mar_Deva ms zsm_Latn mt mlt_Latn my mya_Mymr ne npi_Deva nl nld_Latn nn nno_Latn "
    "no nob_Latn nb nob_Latn ns nso_Latn ny nya_Latn oc oci_Latn om gaz_Latn or ory_Orya pa pan_Guru pl pol_Latn "
    "ps pbt_Arab pt por_Latn qu quy_Latn rn run_Latn ro ron_Latn ru rus_Cyrl rw kin_Latn sa san_Deva sc srd_Latn "
    "sd snd_Arab sg sag_Latn si sin_Sinh sk slk_Latn sl slv_Latn sm smo_Latn sn sna_Latn so som_Latn sq als_Latn "
    "sr srp_Cyrl ss ssw_Latn st sot_Latn su sun_Latn sv swe_Latn sw swh_Latn ta tam_Taml te tel_Telu tg tgk_Cyrl "
    "th tha_Thai ti tir_Ethi tk tuk_Latn tl tgl_Latn tn tsn_Latn tr tur_Latn ts tso_Latn tt tat_Cyrl tw twi_Latn "
    "ug uig_Arab uk ukr_Cyrl ur urd_Arab uz uzn_Latn vi vie_Latn wo wol_Latn xh xho_Latn yi ydd_Hebr yo yor_Latn "
    "zh zho_Hans zh-hant zho_Hant zh-tw zho_Hant zh-hk zho_Hant yue yue_Hant zu zul_Latn ";

/* A code in small letters with '-' between its parts. */
static void plain_code(const char *code, size_t length, char out[32]) {
    size_t n = 0;
    for (; n < length && n < 31; n++)
        out[n] = (char)(code[n] == '_' ? '-' : code[n] >= 'A' && code[n] <= 'Z' ? code[n] + 32 : code[n]);
    out[n] = '\0';
}

/* The tag of the first of the model's languages that is written like `code` but for case and dashes; with `part` only
 * its first part needs to be. -1: none. */
static int32_t tag_like(const text_front *front, const char *code, int part) {
    for (size_t i = 0; i < moe_model_language_count(front->model); i++) {
        const moe_span known = moe_model_language(front->model, i);
        char plain[32];
        plain_code(known.data, known.length, plain);
        if (part) plain[strcspn(plain, "-")] = '\0';
        if (strcmp(plain, code) == 0) return moe_model_language_tag_at(front->model, i);
    }
    return -1;
}

/* The tag of a language that the model calls otherwise: by a row of `aliases` one of whose names is `code`. */
static int32_t tag_of_alias(const text_front *front, const char *code) {
    for (const char *row = aliases; *row;) {
        const size_t shorter = strcspn(row, " "), longer = strcspn(row + shorter + 1, " ");
        char names[3][32]; /* de, deu-latn, deu */
        plain_code(row, shorter, names[0]);
        plain_code(row + shorter + 1, longer, names[1]);
        plain_code(row + shorter + 1, strcspn(row + shorter + 1, "_"), names[2]);
        row += shorter + longer + 2;
        if (strcmp(code, names[0]) != 0 && strcmp(code, names[1]) != 0 && strcmp(code, names[2]) != 0) continue;
        for (int n = 1; n < 4; n++) {
            const int32_t tag = tag_like(front, names[n % 3], 0);
            if (tag >= 0) return tag;
        }
    }
    return -1;
}

/* As the model has it, then as others write it, then without what follows its first part: the region of pt-BR. */
static int32_t find_language(const text_front *front, const char *code) {
    char plain[32];
    int32_t tag = moe_model_language_tag(front->model, code);
    plain_code(code, strlen(code), plain);
    for (int whole = 1; tag < 0 && whole >= 0; whole--) {
        if (!whole) plain[strcspn(plain, "-")] = '\0';
        tag = tag_like(front, plain, 0);
        if (tag < 0) tag = tag_of_alias(front, plain);
    }
    return tag < 0 && strlen(plain) == 3 ? tag_like(front, plain, 1) : tag;
}

moe_status text_language(const text_front *front, const char *code, int32_t *tag, moe_error *error) {
    int32_t found = find_language(front, code);
    if (found >= 0) return *tag = found, MOE_OK;
    text_bytes known = { 0 }, asked = { 0 };
    text_languages(front, &known);
    text_append_clean(&asked, code, strlen(code));
    moe_status status = known.failed || asked.failed
                            ? out_of_memory(error)
                            : fail(error, MOE_ERROR_ARGUMENT, "language",
                                   "this model does not know the language '%.20s'; it knows: %.150s", asked.data,
                                   known.length ? known.data : "none");
    text_bytes_free(&known);
    text_bytes_free(&asked);
    return status;
}

static moe_status append_id(text_ids *ids, int32_t id, moe_error *error);

moe_status text_spm_failed(int answer, const char *where, const char *why, moe_error *error) {
    return fail(error, answer == SPM_NO_MEMORY ? MOE_ERROR_MEMORY : MOE_ERROR_ARGUMENT, where, "%s", why);
}

/* Pieces as texts, looked up in the vocabulary. */
static moe_status encode_pieces(const text_front *front, const char *text, size_t length, text_ids *ids,
                                moe_error *error) {
    const text_vocabulary *v = vocabulary_of(front);
    char why[200] = "", *pieces = NULL;
    size_t capacity = 0, bytes = 0, n;
    moe_status status = MOE_OK;
    ids->length = 0;
    const int failed = spm_encode_pieces(front->tokeniser, text, length, &pieces, &capacity, &bytes, why, sizeof why);
    if (failed) status = text_spm_failed(failed, "text", why, error);
    for (size_t at = 0; at < bytes && !status; at += n + 1) {
        n = strlen(pieces + at);
        const int32_t id = piece_find(v, pieces + at, n);
        status = append_id(ids, id < 0 ? front->unknown : id, error);
    }
    free(pieces);
    return status;
}

/* That every id is one: an unknown piece may have none. */
static moe_status check_known(const text_ids *ids, moe_error *error) {
    for (size_t i = 0; i < ids->length; i++)
        if (ids->data[i] < 0)
            return fail(error, MOE_ERROR_ARGUMENT, "text",
                        "a piece is not in the vocabulary, which has no unknown token");
    return MOE_OK;
}

moe_status text_encode(const text_front *front, const char *text, size_t length, text_ids *ids, moe_error *error) {
    char why[200] = "";
    if (vocabulary_of(front)->count) {
        moe_status status = encode_pieces(front, text, length, ids, error);
        return status ? status : check_known(ids, error);
    }
    const int failed =
        spm_encode(front->tokeniser, text, length, &ids->data, &ids->capacity, &ids->length, why, sizeof why);
    if (failed) return text_spm_failed(failed, "text", why, error);
    for (size_t i = 0; front->map.ids && i < ids->length; i++) {
        const int32_t id = front->map.ids[ids->data[i]];
        ids->data[i] = id < 0 ? front->unknown : id;
    }
    return check_known(ids, error);
}

/* Whether an id is none of a text: begin, end, padding, or a language's tag such as >>de<<. */
static int is_special(const text_front *front, int32_t id) {
    const moe_span piece = text_piece(front, id);
    return id == front->special[0] || id == front->special[1] || id == front->special[2] || !piece.length ||
           (piece.length > 4 && memcmp(piece.data, ">>", 2) == 0 &&
            memcmp(piece.data + piece.length - 2, "<<", 2) == 0);
}

/* White space marks that SentencePiece left become spaces; there is none at either end. `text` [length + 1]. */
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

/* The text of ids, malloc'ed; 0, or what spm.h answers, with a line in `why`. */
static int join(const text_front *front, const int32_t *ids, size_t count, char **text, size_t *length, char *why,
                size_t size) {
    const spm *joiner = front->joiner ? front->joiner : front->tokeniser;
    size_t capacity = 0;
    int failed;
    if (front->vocabulary.count) {
        text_bytes pieces = { 0 };
        for (size_t i = 0; i < count; i++) {
            const moe_span piece = text_piece(front, ids[i]);
            if (is_special(front, ids[i])) continue;
            text_append(&pieces, piece.data, piece.length);
            text_append(&pieces, "", 1);
        }
        failed = pieces.failed
                     ? SPM_NO_MEMORY
                     : spm_decode_pieces(joiner, pieces.data, pieces.length, text, &capacity, length, why, size);
        text_bytes_free(&pieces);
        if (!failed) *length = clear_marks(*text, *length);
    } else if (front->map.ids) {
        int32_t *mapped = malloc((count ? count : 1) * sizeof *mapped);
        size_t n = 0;
        for (size_t i = 0; mapped && i < count; i++)
            if (ids[i] >= 0 && ids[i] < moe_model_vocabulary(front->model) && front->map.pieces[ids[i]] >= 0)
                mapped[n++] = front->map.pieces[ids[i]];
        failed = mapped ? spm_decode(joiner, mapped, n, text, &capacity, length, why, size) : SPM_NO_MEMORY;
        free(mapped);
    } else {
        failed = spm_decode(joiner, ids, count, text, &capacity, length, why, size);
    }
    return failed;
}

moe_status text_decode(const text_front *front, const int32_t *ids, size_t count, text_bytes *out, moe_error *error) {
    char why[200] = "out of memory", *text = NULL;
    size_t length = 0;
    const int failed = join(front, ids, count, &text, &length, why, sizeof why);
    if (failed) {
        free(text);
        return text_spm_failed(failed, "ids", why, error);
    }
    for (size_t i = 0; i < length; i++)
        if (text[i] == '\n' || text[i] == '\r' || text[i] == '\t' || text[i] == '\0') text[i] = ' ';
    text_append(out, text, length);
    free(text);
    return out->failed ? out_of_memory(error) : MOE_OK;
}

static int is_blank(char c) { return c == ' ' || c == '\t'; }

static moe_status append_id(text_ids *ids, int32_t id, moe_error *error) {
    if (ids->length == ids->capacity) {
        size_t wanted = ids->capacity ? ids->capacity * 2 : 64;
        int32_t *data = realloc(ids->data, wanted * sizeof *data);
        if (!data) return out_of_memory(error);
        ids->data = data;
        ids->capacity = wanted;
    }
    ids->data[ids->length++] = id;
    return MOE_OK;
}

/* The id of a piece; -1 if there is no such piece, or SPM_NO_MEMORY. */
static int32_t piece_id(const text_front *front, const char *piece, size_t length) {
    const text_vocabulary *v = vocabulary_of(front);
    if (v->count) return piece_find(v, piece, length);
    text_bytes name = { 0 };
    text_append(&name, piece, length);
    int32_t id = name.failed ? SPM_NO_MEMORY : spm_id(front->tokeniser, name.data);
    text_bytes_free(&name);
    return id >= 0 && front->map.ids ? front->map.ids[id] : id;
}

moe_status text_parse_pieces(const text_front *front, const char *text, size_t length, text_ids *ids,
                             moe_error *error) {
    ids->length = 0;
    for (size_t i = 0;;) {
        while (i < length && is_blank(text[i])) i++;
        if (i == length) return MOE_OK;
        size_t begin = i;
        while (i < length && !is_blank(text[i])) i++;
        int32_t id = piece_id(front, text + begin, i - begin);
        if (id == SPM_NO_MEMORY) return out_of_memory(error);
        if (id < 0) id = front->unknown;
        moe_status status = MOE_OK;
        if (id < 0) {
            text_bytes piece = { 0 };
            text_append_clean(&piece, text + begin, text_utf8_cut(text + begin, i - begin, 40));
            status = piece.failed ? out_of_memory(error)
                                  : fail(error, MOE_ERROR_ARGUMENT, "pieces",
                                         "'%s' is not in the vocabulary, which has no unknown token", piece.data);
            text_bytes_free(&piece);
        }
        if (!status) status = append_id(ids, id, error);
        if (status) return status;
    }
}

moe_span text_piece(const text_front *front, int32_t id) {
    const text_vocabulary *v = &front->vocabulary;
    const spm *joiner = front->joiner ? front->joiner : front->tokeniser;
    if (id < 0 || id >= moe_model_vocabulary(front->model)) return (moe_span){ NULL, 0 };
    if (v->count) return v->pieces[id];
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
        if (strchr("\n\r\t", out->data[i])) out->data[i] = ' '; /* NUL too: it ends the searched string */
    return out->failed ? out_of_memory(error) : MOE_OK;
}

int text_is_unknown(const text_front *front, int32_t id) { return id >= 0 && id == front->unknown; }

moe_status text_parse_ids(const text_front *front, const char *text, size_t length, text_ids *ids, moe_error *error) {
    const int32_t vocabulary =
        front->of_targets ? moe_model_vocabulary(front->model) : moe_model_source_vocabulary(front->model);
    ids->length = 0;
    for (size_t i = 0;;) {
        while (i < length && is_blank(text[i])) i++;
        if (i == length) return MOE_OK;
        size_t begin = i;
        int64_t id = 0;
        while (i < length && text[i] >= '0' && text[i] <= '9' && id <= INT32_MAX) id = id * 10 + (text[i++] - '0');
        if (i < length && !is_blank(text[i])) {
            while (i < length && !is_blank(text[i])) i++;
            text_bytes word = { 0 };
            text_append_clean(&word, text + begin, i - begin < 20 ? i - begin : 20);
            moe_status status = word.failed ? out_of_memory(error)
                                            : fail(error, MOE_ERROR_ARGUMENT, "ids", "'%s' is not a token id (0 to %d)",
                                                   word.data, (int)vocabulary - 1);
            text_bytes_free(&word);
            return status;
        }
        if (id >= vocabulary)
            return fail(error, MOE_ERROR_ARGUMENT, "ids", "token id %.*s is out of range (0 to %d)",
                        i - begin < 20 ? (int)(i - begin) : 20, text + begin, (int)vocabulary - 1);
        moe_status status = append_id(ids, (int32_t)id, error);
        if (status) return status;
    }
}

/* ---- 4. Lines in --------------------------------------------------------------------------------------- */

void text_reader_init(text_reader *reader, int fd, const volatile sig_atomic_t *stop) {
    *reader = (text_reader){ .fd = fd, .stop = stop };
}

int text_reader_take(text_reader *reader, const char *text) {
    text_append_string(&reader->buffer, text);
    reader->at_end = 1;
    return !reader->buffer.failed;
}

/* What a line that is no UTF-8 may be, behind a comma. */
static const char *encoding_of(const char *data, size_t length) {
    size_t zeros = 0, high = 0, letters = 0, windows = 0;
    if (length > 1 && (memcmp(data, "\xff\xfe", 2) == 0 || memcmp(data, "\xfe\xff", 2) == 0)) return ", as in UTF-16";
    if (length > 1 && memcmp(data, "\x1f\x8b", 2) == 0) return ", as in a file of gzip";
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
    const int split = line->too_long && line->length - valid < 4; /* the cut may have split a character */
    *why = '\0';
    const char *encoding = nul || (valid < line->length && !split) ? encoding_of(line->data, line->length) : "";
    if (nul) snprintf(why, size, "NUL byte at byte %zu%s", length + 1, encoding);
    else if (valid < line->length && !split) snprintf(why, size, "invalid UTF-8 at byte %zu%s", length + 1, encoding);
    else if (line->too_long) snprintf(why, size, "longer than %d bytes", (int)TEXT_MAX_LINE);
    return length;
}

void text_reader_free(text_reader *reader) { text_bytes_free(&reader->buffer); }

/* Bring more bytes into the buffer. TEXT_READ_LINE stands for "there are more, or the end was reached". */
static text_read fill(text_reader *r, int wait) {
    enum { CHUNK = 1 << 16 };
    for (;;) {
        if (r->stop && *r->stop) return TEXT_READ_STOP;
        /* While waiting, wake now and then: a signal that came just before poll() would go unnoticed otherwise. */
        struct pollfd ready = { .fd = r->fd, .events = POLLIN };
        int n = poll(&ready, 1, wait ? 200 : 0);
        if (n < 0 && errno != EINTR) return TEXT_READ_ERROR;
        if (n <= 0) {
            if (!wait) return r->stop && *r->stop ? TEXT_READ_STOP : TEXT_READ_LATER;
            continue;
        }
        if (r->begin) { /* what is left moves to the front: at most a part of one line */
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

text_read text_reader_next(text_reader *r, int wait, text_line *line) {
    for (;;) {
        char *data = r->buffer.data;
        char *end =
            r->searched < r->buffer.length ? memchr(data + r->searched, '\n', r->buffer.length - r->searched) : NULL;
        size_t stop = end ? (size_t)(end - data) : r->buffer.length;
        if (r->skipping) { /* the rest of a line that was handed out already */
            r->begin = r->searched = end ? stop + 1 : stop;
            if (end) {
                r->skipping = 0;
                continue;
            }
            if (r->at_end) return TEXT_READ_END;
        } else if (end || stop - r->begin > TEXT_MAX_LINE + 1 || (r->at_end && stop > r->begin)) {
            /* + 1: room for the CR of a line that is as long as may be */
            line->data = data + r->begin;
            line->length = stop - r->begin;
            line->number = ++r->lines;
            line->given = NULL;
            line->kept = 0;
            r->begin = r->searched = end ? stop + 1 : stop;
            r->skipping = !end && !r->at_end;
            if (end && line->length && line->data[line->length - 1] == '\r') line->length--;
            if (line->number == 1 && line->length >= 3 && memcmp(line->data, "\xEF\xBB\xBF", 3) == 0)
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

/* ---- 5. Jobs ------------------------------------------------------------------------------------------- */

/* One note per job: the first. */
static void note(text_job *job, int *flag, const char *format, ...)
#ifdef __GNUC__
    __attribute__((format(printf, 3, 4)))
#endif
    ;

static void note(text_job *job, int *flag, const char *format, ...) {
    const int first = !job->cut && !job->failed;
    const size_t said = job->divided ? strlen(job->note) : 0;
    *flag = 1;
    if (job->failed && !job->status) job->status = MOE_ERROR_ARGUMENT;
    if (!first) return;
    va_list arguments;
    va_start(arguments, format);
    const int joint = said ? snprintf(job->note + said, sizeof job->note - said, "; ") : 0;
    vsnprintf(job->note + said + joint, sizeof job->note - said - (size_t)joint, format, arguments);
    va_end(arguments);
}

static const char *before_option(const text_options *options) { return options->option ? options->option : "--"; }

/* How much of a line is fit for use: all of it, or with `truncate` what comes before the first trouble. */
static size_t usable(const text_options *options, const text_line *line, text_job *job) {
    char why[128];
    const size_t length = text_line_usable(line, why, sizeof why);
    if (*why)
        note(job, options->truncate ? &job->cut : &job->failed, options->truncate ? "%s: cut there" : "%s; %s%s", why,
             before_option(options), "truncate would cut it there");
    return length;
}

static moe_status parse_text(const text_front *front, const text_options *options, const char *data, size_t length,
                             text_ids *ids, moe_error *error) {
    return options->ids            ? text_parse_ids(front, data, length, ids, error)
           : options->pretokenized ? text_parse_pieces(front, data, length, ids, error)
                                   : text_encode(front, data, length, ids, error);
}

static moe_status to_ids(const text_front *front, const text_options *options, const text_bytes *text, text_ids *ids,
                         text_job *job, moe_error *error) {
    moe_error why;
    ids->length = 0;
    moe_status status = parse_text(front, options, text->data, text->length, ids, &why);
    if (status == MOE_ERROR_MEMORY) return out_of_memory(error);
    if (status) note(job, &job->failed, "%s", why.message);
    return MOE_OK;
}

/* Whether a piece is <0x80> to <0xBF>: the one before it begins the character. */
static int continues_character(const text_front *front, int32_t id) {
    const moe_span piece = front->of_targets ? text_piece(front, id) : text_source_piece(front, id);
    const char high = piece.length == 6 && memcmp(piece.data, "<0x", 3) == 0 ? piece.data[3] : 0;
    return (high == '8' || high == '9' || high == 'A' || high == 'B') && piece.data[5] == '>';
}

/* Ids beyond the limit: refuse or cut, and not inside a character that is spelled in bytes. */
static void limit_ids(const text_front *front, const text_options *options, const char *what, size_t limit,
                      text_ids *ids, text_job *job) {
    if (job->failed || ids->length <= limit) return;
    if (!options->truncate) {
        note(job, &job->failed,
             "the %s has %zu tokens, at most %zu fit; %struncate would cut it, %smax-len allows more", what,
             ids->length, limit, before_option(options), before_option(options));
        job->status = MOE_ERROR_LIMIT;
        return;
    }
    size_t keep = limit;
    if (front->tokeniser && !options->ids && !options->pretokenized) {
        while (keep && continues_character(front, ids->data[keep])) keep--;
    }
    note(job, &job->cut, "the %s has %zu tokens: cut after %zu", what, ids->length, keep);
    ids->length = keep;
}

/* The ids of a job's source, but for what is kept of it. */
static moe_status prepare_source(const text_front *front, const text_options *options, text_job *job,
                                 moe_error *error) {
    text_bytes text = { 0 }, read = { 0 };
    if (job->message) text_message_show((text_message_text)job->message, job->source.data, job->source.length, &read);
    const moe_span source =
        job->message ? (moe_span){ read.data, read.length } : (moe_span){ job->source.data, job->source.length };
    moe_span shown = source;
    moe_status status = read.failed ? out_of_memory(error) : MOE_OK;
    if (options->rules && !status)
        status = text_guard_begin(options->rules, source.data, source.length, job->more, job->attempt,
                                  (text_message_text)job->message, (text_terms)job->terms, &job->guard, &shown, error);
    if (!status) text_append(&text, shown.data, shown.length);
    text_bytes_free(&read);
    if (status) return status;
    job->shouted = options->calm && !text.failed && (job->loud || text_is_shouted(text.data, text.length));
    if (job->shouted) text_calm(text.data, text.length);
    job->brief = options->brief && !job->shouted && !text.failed ? text_is_brief(text.data, text.length) : 0;
    text_put_manner(job->manner, &text);
    if ((job->shouted || job->manner) && !text.failed && text_guard_used(job->guard))
        text_guard_recall(job->guard, text.data);
    status = text.failed ? out_of_memory(error) : to_ids(front, options, &text, &job->source_ids, job, error);
    if (!status && !job->failed && text_guard_used(job->guard))
        status = text_guard_bind(options->rules, job->guard, text.data, text.length, &job->source_ids,
                                 options->max_target, error);
    text_bytes_free(&text);
    return status;
}

static size_t room_of(const text_front *front, const text_options *options) {
    return options->max_source > front->source_extra ? options->max_source - front->source_extra : 0;
}

moe_status text_job_prepare(const text_front *front, const text_options *options, const text_line *line, text_job *job,
                            moe_error *error) {
    job->line = line->number;
    size_t length = usable(options, line, job);
    if (job->failed) return MOE_OK; /* source stays empty: what is left of it is not what was written */
    const char *tab = options->pairs && !line->given && length ? memchr(line->data, '\t', length) : NULL;
    const size_t source = tab ? (size_t)(tab - line->data) : length;
    text_append(&job->source, line->data, source);
    if (tab) text_append(&job->target, tab + 1, length - source - 1);
    else text_append(&job->target, line->given, line->given ? line->given_length : 0);
    if (job->source.failed || job->target.failed) return out_of_memory(error);
    const int pair = tab || line->given;
    if (line->given && (text_utf8_valid(line->given, line->given_length) < line->given_length ||
                        (line->given_length && memchr(line->given, '\0', line->given_length)))) {
        note(job, &job->failed, "the target is not UTF-8, or has a NUL byte");
        return MOE_OK;
    }
    if (options->pairs && length && !pair) {
        note(job, &job->failed, "%s wants source TAB target, and there is no TAB", options->pairs);
        return MOE_OK;
    }

    int open = 0;
    text_append(&job->source, "", 0); /* data is never NULL */
    if (line->kept || (options->rules && text_rules_spans(options->rules) &&
                       text_has_message(job->source.data, job->source.length, &open)))
        note(job, &job->divided, "an ICU message ({n, plural, ...}) stays as it is: its branches are not translated");
    job->verbatim = open |= line->kept;
    if (open) return MOE_OK;
    const text_front targets = text_front_of_targets(front);
    moe_status status = prepare_source(front, options, job, error);
    if (!status && pair && !job->failed) status = to_ids(&targets, options, &job->target, &job->target_ids, job, error);
    if (status || job->failed) return status;
    limit_ids(front, options, "line", room_of(front, options), &job->source_ids, job);
    if (pair)
        limit_ids(&targets, options, "target", options->max_target ? options->max_target - 1 : 0, &job->target_ids,
                  job);
    /* White space only: no pieces, nothing to say. A score of nothing given nothing is no use either. */
    job->blank = !job->failed && job->source_ids.length == 0 && job->target_ids.length == 0;
    if (job->blank && options->rules) job->verbatim = 1; /* the cells of an empty row of a table */
    return MOE_OK;
}

/* What the model wrote for a job whose source does not stay, appended to *out; *sound: it has all that is kept. */
static moe_status write_job(const text_front *front, const text_options *options, const text_job *job, int shout,
                            const moe_hypothesis *h, text_bytes *out, int *sound, moe_error *error) {
    const size_t begin = out->length;
    const int guarded = options->rules && text_guard_used(job->guard);
    moe_status status = MOE_OK;
    if (guarded) status = text_guard_restore(options->rules, job->guard, h, job->manner, shout, out, error);
    else if (options->pretokenized) status = text_join_pieces(front, h->ids, h->n_ids, out, error);
    else if (options->ids) text_append_ids(out, h->ids, h->n_ids);
    else status = text_decode(front, h->ids, h->n_ids, out, error);
    if (!status && !guarded) text_take_manner(job->manner, out, begin);
    if (!status && !out->failed && shout && !guarded) text_shout(out->data + begin, out->length - begin);
    *sound = status || !guarded || text_guard_sound(job->guard);
    if (!status && job->message)
        *sound &= text_message_mend((text_message_text)job->message, job->source.data, job->source.length, begin, out);
    return status || !out->failed ? status : out_of_memory(error);
}

/* With other stand-ins. If that has been, or cannot be, the text stays. */
static moe_status second_try(const text_front *front, const text_options *options, text_job *job, int *again,
                             moe_error *error) {
    *again = 0;
    if (options->rules && text_guard_used(job->guard) && !job->attempt && !job->target_ids.length) {
        job->attempt = 1;
        const moe_status status = prepare_source(front, options, job, error);
        *again = !status && !job->failed && job->source_ids.length <= room_of(front, options);
        if (status || *again) return status;
        job->failed = 0;
    }
    job->stays = 1;
    note(job, &job->cut, "what is to be kept did not come through the translation: the text stays as it is");
    return MOE_OK;
}

moe_status text_job_again(const text_front *front, const text_options *options, text_job *job, const moe_hypothesis *h,
                          int *again, moe_error *error) {
    text_bytes unused = { 0 };
    const int guarded = options->rules && text_guard_used(job->guard);
    int sound;
    *again = 0;
    if (job->failed || job->stays || !(guarded || job->message)) return MOE_OK;
    moe_status status = write_job(front, options, job, 0, h, &unused, &sound, error);
    text_bytes_free(&unused);
    text_terms terms = (text_terms)job->terms;
    if (!status && guarded) status = text_guard_next_terms(job->guard, h, sound, &terms, error);
    if (status) return status;
    for (; terms != (text_terms)job->terms; terms = TEXT_TERMS_LAST) { /* LAST, where stand-ins cannot be */
        job->terms = (int)terms;
        status = prepare_source(front, options, job, error);
        *again = !status && !job->failed && job->source_ids.length <= room_of(front, options);
        if (status || *again) return status;
        job->failed = 0;
    }
    if (sound) return MOE_OK;
    return second_try(front, options, job, again, error);
}

moe_status text_job_refused(const text_front *front, const text_options *options, text_job *job, int *again,
                            moe_error *error) {
    const moe_hypothesis nothing = { .score = -FLT_MAX };
    if (job->manner) return text_job_vary(front, options, job, &nothing, 0, again, error);
    const moe_status status = second_try(front, options, job, again, error);
    job->verbatim = !status && !*again;
    return status;
}

moe_status text_job_aside(const text_front *front, const text_options *options, text_job *job, const moe_hypothesis *h,
                          moe_error *error) {
    text_bytes text = { 0 };
    size_t source;
    int small;
    moe_status status = MOE_OK;
    job->aside_ids.length = 0;
    if (!options->rules || !text_guard_used(job->guard)) return MOE_OK;
    if (h) {
        text_guard_aside(job->guard, job->asides++, &source, &small);
        status = text_decode(front, h->ids, h->n_ids, &text, error);
        if (!status && (text.failed || !text_guard_know(job->guard, source, text.data ? text.data : "", text.length)))
            status = out_of_memory(error);
    }
    text_clear(&text);
    const moe_span words = text_guard_aside(job->guard, job->asides, &source, &small);
    if (!status && words.length) {
        text_append(&text, words.data, words.length);
        text_put_manner(small ? TEXT_SMALL : TEXT_AS_IT_IS, &text);
        status =
            text.failed ? out_of_memory(error) : text_encode(front, text.data, text.length, &job->aside_ids, error);
        if (!status && job->aside_ids.length > room_of(front, options)) job->aside_ids.length = 0;
    }
    text_bytes_free(&text);
    return status;
}

/* Prepare a job once more, in another manner; *fits 0: the model cannot read it so. */
static moe_status prepare_manner(const text_front *front, const text_options *options, text_job *job,
                                 text_manner manner, int *fits, moe_error *error) {
    text_options form = *options;
    form.brief = 0;
    job->manner = manner;
    const moe_status status = prepare_source(front, &form, job, error);
    *fits = !job->failed && job->source_ids.length <= room_of(front, options);
    return status;
}

/* Whether a translation ends with a sign, though its text does not. */
static int is_closed(const text_bytes *t) {
    static const char *const signs[] = { ".", "!", "?", ":", "\xE2\x80\xA6", "\xEF\xBC\x9F" };
    int closed = !t->length;
    for (size_t i = 0; i < sizeof signs / sizeof *signs; i++) closed |= ends_with(t->data, t->length, signs[i]);
    return closed;
}

moe_status text_job_vary(const text_front *front, const text_options *options, text_job *job, const moe_hypothesis *h,
                         int fits, int *again, moe_error *error) {
    const text_manner tried = job->manner;
    const int brief = job->brief;
    text_bytes written = { 0 };
    int sound = 1;
    moe_status status = MOE_OK;
    *again = 0;
    if (tried) {
        status = write_job(front, options, job, 0, h, &written, &sound, error);
        fits &= sound && !is_closed(&written) && !(text_guard_used(job->guard) && text_guard_lacks_term(job->guard));
        text_bytes_free(&written);
        if (status) return status;
    }
    if (!tried || (fits && h->score > job->best_score)) job->best = tried, job->best_score = h->score;
    for (text_manner next = tried + 1; next < TEXT_MANNERS && !*again && !status; next++)
        if (next != TEXT_SMALL || brief > 1) status = prepare_manner(front, options, job, next, again, error);
    job->failed = 0;
    if (*again || status) job->brief = brief;
    else if (job->best != job->manner) return prepare_manner(front, options, job, job->best, again, error);
    return status;
}

size_t text_before_mark(const char *data, size_t length) {
    return length > 1 && (data[length - 1] == ',' || data[length - 1] == ';') && !is_blank(data[length - 2])
               ? length - 1
               : length;
}

moe_status text_job_divide(const text_front *front, const text_options *options, text_job *job, text_job *second,
                           size_t at, moe_error *error) {
    const text_bytes gap = second->gap;
    size_t end = at;
    second->gap = job->gap, job->gap = gap;
    text_clear(&job->gap);
    text_append(&second->source, job->source.data + at, job->source.length - at);
    while (end && is_blank(job->source.data[end - 1])) end--;
    end = text_before_mark(job->source.data, end);
    text_append(&job->gap, job->source.data + end, at - end);
    job->source.data[job->source.length = end] = '\0';
    second->line = job->line;
    second->more = job->more, job->more = 1;
    second->rules = job->rules, second->calm = job->calm;
    second->tag = job->tag, second->tagged = job->tagged;
    second->names = job->names;
    second->message = job->message;
    second->joined = job->joined, job->joined = 0;
    second->dividable = 1;
    second->loud = job->loud |= job->shouted;
    job->manner = TEXT_AS_IT_IS;
    job->attempt = job->terms = 0;
    text_guard_clear(job->guard); /* of another text */
    moe_status status = job->gap.failed || second->source.failed ? out_of_memory(error) : MOE_OK;
    if (!status) status = prepare_source(front, options, job, error);
    return status ? status : prepare_source(front, options, second, error);
}

void text_job_keep(text_job *job) {
    job->stays = 1;
    note(job, &job->cut, "the model cannot translate a part of it: that stays as it is");
}

moe_status text_job_write(const text_front *front, const text_options *options, const text_job *job,
                          const moe_hypothesis *h, text_bytes *out, moe_error *error) {
    const size_t begin = out->length;
    int sound = 0;
    if (!job->stays) {
        const moe_status status = write_job(front, options, job, job->shouted, h, out, &sound, error);
        if (status || sound) return status;
    }
    out->length = begin; /* it stays, or is one of several */
    text_append(out, job->source.data, job->source.length);
    return out->failed ? out_of_memory(error) : MOE_OK;
}

void text_job_clear(text_job *job) {
    text_clear(&job->source);
    text_clear(&job->target);
    text_clear(&job->output);
    text_guard_clear(job->guard); /* the next text may come without rules */
    job->source_ids.length = job->target_ids.length = 0;
    job->blank = job->cut = job->failed = job->finished = job->more = job->shouted = 0;
    job->attempt = job->terms = job->stays = job->brief = 0;
    job->manner = TEXT_AS_IT_IS;
    job->aside_ids.length = job->asides = 0;
    job->divided = job->verbatim = job->message = job->joined = 0;
    job->dividable = job->names = job->loud = job->tagged = 0;
    job->rules = NULL;
    text_clear(&job->gap);
    job->note[0] = '\0';
    job->line = 0;
    job->status = MOE_OK;
    job->extra = NULL;
    job->next = NULL;
}

void text_job_free(text_job *job) {
    text_bytes_free(&job->source);
    text_bytes_free(&job->target);
    text_bytes_free(&job->output);
    text_bytes_free(&job->gap);
    text_ids_free(&job->source_ids);
    text_ids_free(&job->target_ids);
    text_ids_free(&job->aside_ids);
    text_guard_free(job->guard);
}

text_job *text_queue_insert(text_queue *queue, text_job *before) {
    text_job *job = queue->spare;
    if (job) {
        queue->spare = job->next;
    } else {
        job = calloc(1, sizeof *job);
        if (!job) return NULL;
    }
    text_job_clear(job);
    text_job **place = before ? &before->next : &queue->first;
    job->next = *place;
    *place = job;
    if (!job->next) queue->last = job;
    return job;
}

text_job *text_queue_add(text_queue *queue) { return text_queue_insert(queue, queue->last); }

text_job *text_queue_first(text_queue *queue) { return queue->first && queue->first->finished ? queue->first : NULL; }

void text_queue_remove(text_queue *queue) {
    text_job *job = queue->first;
    if (!job) return;
    queue->first = job->next;
    if (!queue->first) queue->last = NULL;
    job->next = queue->spare;
    queue->spare = job;
}

void text_queue_free(text_queue *queue) {
    for (int list = 0; list < 2; list++) {
        for (text_job *job = list ? queue->spare : queue->first, *next; job; job = next) {
            next = job->next;
            text_job_free(job);
            free(job);
        }
    }
    *queue = (text_queue){ 0 };
}

/* ---- 6. Samples ---------------------------------------------------------------------------------------- */

/* Cut what comes before the next TAB off `rest`; 0 if there is none. */
static int next_field(moe_span *rest, moe_span *field) {
    const char *tab = memchr(rest->data, '\t', rest->length);
    if (!tab) return 0;
    *field = (moe_span){ rest->data, (size_t)(tab - rest->data) };
    *rest = (moe_span){ tab + 1, rest->length - field->length - 1 };
    return 1;
}

static moe_status read_pair(const text_front *front, const text_options *options, moe_span rest, int targets_wanted,
                            text_pair *p, moe_error *error) {
    const text_front targets = text_front_of_targets(front);
    moe_span fields[3], *source = &fields[2];
    char code[32];
    moe_status status = MOE_OK;
    if (moe_model_get_kind(front->model) == MOE_MODEL_LANGUAGE) {
        p->has_target = 1;
        return parse_text(&targets, options, rest.data, rest.length, &p->target, error);
    }
    int n = 0;
    while (n < 3 && next_field(&rest, &fields[n])) n++;
    if (n == 2 && !targets_wanted) *source = rest, rest.length = 0;
    else if (n < 3)
        return fail(error, MOE_ERROR_ARGUMENT, "",
                    "expected source language, target language, source and target, TABs between");
    snprintf(code, sizeof code, "%.*s", fields[1].length < 31 ? (int)fields[1].length : 31, fields[1].data);
    if (moe_model_language_count(front->model)) status = text_language(front, code, &p->tag, error);
    if (!status) status = parse_text(front, options, source->data, source->length, &p->source, error);
    p->has_target = targets_wanted || rest.length;
    if (!status && p->has_target) status = parse_text(&targets, options, rest.data, rest.length, &p->target, error);
    return status;
}

static moe_status add_pair(const text_front *front, const text_options *options, const text_line *line,
                           int targets_wanted, text_sample *sample, moe_error *error) {
    char why[128];
    moe_status status = MOE_OK;
    if (sample->count == sample->capacity) {
        size_t more = sample->capacity ? 2 * sample->capacity : 256;
        text_pair *grown = realloc(sample->pairs, more * sizeof *grown);
        if (!grown) return out_of_memory(error);
        sample->pairs = grown;
        sample->capacity = more;
    }
    text_pair *p = &sample->pairs[sample->count];
    *p = (text_pair){ .line = line->number, .tag = -1 };
    text_line_usable(line, why, sizeof why);
    if (*why) status = fail(error, MOE_ERROR_ARGUMENT, "", "%s", why);
    else status = read_pair(front, options, (moe_span){ line->data, line->length }, targets_wanted, p, error);
    if (status) {
        text_ids_free(&p->source);
        text_ids_free(&p->target);
        if (error) snprintf(error->where, sizeof error->where, "line %llu", (unsigned long long)line->number);
        return status;
    }
    sample->count++;
    return MOE_OK;
}

static int only_blanks(const text_line *line) {
    size_t i = 0;
    while (i < line->length && is_blank(line->data[i])) i++;
    return i == line->length;
}

moe_status text_sample_read(const text_front *front, const text_options *options, const char *path, int targets_wanted,
                            text_sample *sample, moe_error *error) {
    const int language = moe_model_get_kind(front->model) == MOE_MODEL_LANGUAGE;
    text_reader reader;
    text_line line;
    text_read got = TEXT_READ_END;
    moe_status status = MOE_OK;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return fail(error, MOE_ERROR_IO, "open", "cannot open %s: %s", path, strerror(errno));
    text_reader_init(&reader, fd, NULL);
    while (!status && (got = text_reader_next(&reader, 1, &line)) == TEXT_READ_LINE)
        if (!language || !only_blanks(&line)) status = add_pair(front, options, &line, targets_wanted, sample, error);
    if (!status && got != TEXT_READ_END) status = fail(error, MOE_ERROR_IO, "read", "%s: %s", path, strerror(errno));
    if (!status && !sample->count)
        status = fail(error, MOE_ERROR_IO, "read", "%s: nothing in it to measure with", path);
    text_reader_free(&reader);
    close(fd);
    return status;
}

void text_sample_free(text_sample *sample) {
    for (size_t i = 0; i < sample->count; i++) {
        text_ids_free(&sample->pairs[i].source);
        text_ids_free(&sample->pairs[i].target);
    }
    free(sample->pairs);
    *sample = (text_sample){ 0 };
}
