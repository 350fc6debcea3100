/* sentences.c - see sentences.h. */
#include "tools/text/sentences.h"
#include "tools/text/bytes.h"
#include "tools/text/spans.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

typedef enum kind {
    ORDINARY, /* not an abbreviation */
    BEFORE,   /* never ends a sentence, such as Dr., vs. */
    NUMBERED, /* an abbreviation before a number, as in No. 5 */
    MAY_END   /* may end a sentence, such as Inc., Mio. */
} kind;

/* Abbreviations by kind. Most are from the suppressions of German, English, French, Spanish, Italian and Portuguese in
 * CLDR 41 (common/segments, Unicode licence), excluding those that are also words. The kinds were assigned by hand. */
static const char *const abbreviations[] = {
    [BEFORE] =
        " CC Ca Capt Cf Cfr Cmdr Col Dipl Dr Dra Dras Drs EE FF Frl Gen Gov Hon Hr Hrn Lt MM Messrs Mgr Mlle Mlles "
        "Mme Mmes Mr Mrs Ms Prof RR Rev Sen Sgt Sr Sra Sras Sres Srta St Ste Vgl bspw bzw ca cf cfr exkl ggf inkl "
        "sog vgl vs zzgl ",
    [NUMBERED] =
        " Abb Abs Apt Art Aufl Bd Cap Ch Chap Fig Figs Jul Jun Kap Mar No Nos Nr Num Núm PP Pos Pág Sec Tab Tel Vol "
        "Ziff apt art cap ch chap ext fig figs no nos nr num núm pp pág págs sec tab tel vol ",
    [MAY_END] =
        " Abt Abw Adj Adr Adv Allg Alm Approx Apr Aug Ausg Ausschl Av Avda Ave Bed Ber Bibl Blvd Cdr Chr Co Comm "
        "Conn Cont Corp Cía Dat Dec Def Dept Desc Desv Dez Dto Dtzd Dª Dña Einh Emm Erf Etc Evtl Exc Excma Excmas "
        "Excmo Excmos Exma Exmas Exmo Exmos Fa Fabric Fam Feb Folg Fr Gebr Geograph Geom Ges Gesch Ggf Hbf Hd Hptst "
        "Hrsg Ilma Ilmas Ilmo Ilmos Inc Ing Inh Inst Int Jahrh Jan Jr Kfm Kl Konv Kop Lcda Lcdo Lda Ldo Lev Lic Liv "
        "Ltd Ltda Ltdo Maj Max Md Mill Min Mio Mons Mrd Msp Mt Nov Obj Oct Okt Op Pfd Phys Prot Proz Pvt Rd Rdo Rdos "
        "Rel Rep Rh Rol Rvdmo Rvdmos Rvdo Rvdos Schr Sdad Seg Sek Sep Sept Sig Spezif Sq Srtas StR Sta Std Sto Str "
        "Temp Trab Tägl UU Univ Urspr Ursprüngl Var Vda Verf Wg Wz Yr Zt Ztr abr abrev acoust adr aer afma afmas "
        "afmo afmos ag agric amtl anat anc anon approx arit arqueol arquit astron autom avr avv bco beil biogr broch "
        "cam categ cel coll com comp compl cont contab créd cx círc cód dept depto deptos desc dez dic dipl dott "
        "dpto dptos dr dtor déb déc educ ehem eigtl einschl ej eletr eletrôn encycl ene entspr erw etc evtl exempl "
        "fac fasc feb fem fev ff filos fisiol fl fot frz févr fís geb gedr gek geom gesch ggfs gouv gr gên hist hnos "
        "hpts hôp illustr imm imprim ind indus ingl jan janv jew jhrl jue juil jul jun jur kath kfm kgl licda licdo "
        "lin liter lun matem max min mitt mié mss mtl mtro máq méd möbl mús neol niv nov ntra ntro náut näml obs oct "
        "odont odontol org organiz pag pq prof profa pron prov próx psicol publ quím relat rep réf röm sam schles "
        "schweiz schwäb sez sociol sras sres srs symb synth syst sáb séc símb südd tav tec tecnol trad transp tägl "
        "univ usw verh verw vid álg éd édit équiv éval índ österr ",
};

/* Words that nearly always start a sentence when capitalised. */
static const char starters[] =
    " A Aber After Al Als Am An And Après Are As At Au Auch Auf Aux Avec Before Bei But C Can Ce Ces Cette Comme "
    "Como Con Could Cuando Cómo Da Dann Dans Das De Del Dem Den Der Des Did Die Diese Dieser Dieses Do Doch Does "
    "Dort Du Dónde Ein Eine Einen El Ella Ellas Elle Elles Ellos En Er Es Esa Ese Esta Este Esto Está Et For From "
    "Für Has Have Hay He Her Here Heute Hier His How I Ich If Ihr Ihre Il Ils Im In Is It J Ja Je Jetzt L La Las Le "
    "Les Lo Los Ma Mais Man Me Mein Meine Mes Mi Mit Mon My Nach Nein Nicht No Not Nous Now Nur O Oder On Ou Our Où "
    "Par Para Pero Please Por Pour Quand Que Qui Quién Qué Sa Se Sein Seine Ses She Si Sie So Son Su Sur Sus Sí Te "
    "That The Their Then There These They This Those Tu Tú Un Una Und Une Unser Usted Von Vor Vous Wann Warum Was We "
    "Weil Wenn Wer Were What When Where Who Why Wie Will Wir With Wo Would Y Yes Yo You Your Zu À ";

/* LONGEST: maximum bytes of a listed word. RUN: maximum bytes without a space that may be language. EXCHANGE: maximum
 * bytes of a quoted question and its answer that are translated together. */
enum { LONGEST = 12, RUN = 255, EXCHANGE = 120, LONGEST_SPAN = 4096 };

static int is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (unsigned char)c >= 0x80; }
static int is_digit(char c) { return c >= '0' && c <= '9'; }
static int is_space(char c) { return c == ' ' || c == '\t'; }

static size_t over_space(const char *data, size_t length, size_t at) {
    while (at < length && is_space(data[at])) at++;
    return at;
}

/* Return the length of a separator of lines or pages, such as U+2028 or a form feed, or 0. */
static size_t line_separator(const char *data, size_t length) {
    return text_prefix("\v \f \xC2\x85 \xE2\x80\xA8 \xE2\x80\xA9", data, length);
}

static size_t over_blanks(const char *data, size_t length, size_t at) {
    for (size_t n = 1; at < length && n; at += n) n = is_space(data[at]) ? 1 : line_separator(data + at, length - at);
    return at;
}

size_t text_before_blanks(const char *data, size_t length) {
    for (size_t n = 1; length && n; length -= n) {
        n = (size_t)is_space(data[length - 1]);
        for (size_t k = 1; !n && k <= 3 && k <= length; k++)
            if (line_separator(data + length - k, k) == k) n = k;
    }
    return length;
}

/* Return 1 if a list contains a word. */
static int contains(const char *list, const char *word, size_t length) {
    char padded[LONGEST + 3] = " ";
    if (!length || length > LONGEST || memchr(word, '\0', length)) return 0;
    memcpy(padded + 1, word, length);
    padded[length + 1] = ' ';
    return strstr(list, padded) != NULL;
}

/* Return the length of the first word, at most LONGEST + 1. */
static size_t first_word(const char *data, size_t length) {
    size_t n = 0;
    while (n < length && n <= LONGEST && is_letter(data[n])) n++;
    return n;
}

/* Return 1 if the text after a full stop certainly starts a sentence. */
static int starts(const char *data, size_t length) {
    return text_prefix("\xC2\xBF \xC2\xA1", data, length) || contains(starters, data, first_word(data, length));
}

/* Return 1 for the beginning of a number or enumeration, such as 5, +49, (3), IV, B. */
static int is_numbering(const char *data, size_t length) {
    const size_t n = first_word(data, length);
    if (length && (is_digit(*data) || strchr("+(#", *data))) return 1;
    for (size_t i = 0; i < n; i++)
        if (!strchr("IVXLC", data[i])) return n == 1 && (unsigned char)*data < 0x80 && *data != 'A';
    return n > 0;
}

static kind kind_of(const char *data, size_t begin, size_t end) {
    for (int k = BEFORE; k <= MAY_END; k++)
        if (contains(abbreviations[k], data + begin, end - begin)) return (kind)k;
    if (end - begin != 2 || memcmp(data + begin, "ex", 2) != 0) return ORDINARY; /* "ex" may end "p. ex." */
    while (begin && data[begin - 1] == ' ') begin--;
    return begin > 1 && data[begin - 1] == '.' && data[begin - 2] == 'p' ? BEFORE : ORDINARY;
}

/* Return 1 if the letter at data[begin] is the second of an abbreviation such as z. B., d. h. */
static int is_pair(const char *data, size_t begin) {
    while (begin && data[begin - 1] == ' ') begin--;
    return begin > 1 && data[begin - 1] == '.' && data[begin - 2] >= 'a' && data[begin - 2] <= 'z' &&
           (begin == 2 || !is_letter(data[begin - 3]));
}

/* Return 1 if a full stop after the word before data[end] belongs to the word, as in J. Smith, 3. Oktober. */
static int is_abbreviated(const char *data, size_t length, size_t end, size_t next) {
    size_t begin = end;
    const char *after = data + next;
    const size_t left = length - next;
    while (begin && end - begin <= LONGEST && is_letter(data[begin - 1])) begin--;
    switch (kind_of(data, begin, end)) {
    case BEFORE: return 1;
    case NUMBERED:
        if (end - begin == 2 && (data[begin] | 32) == 'n') return left && (is_digit(*after) || *after == '#');
        return is_numbering(after, left) || kind_of(data, next, next + first_word(after, left)) == NUMBERED;
    case MAY_END: return !starts(after, left);
    default: break;
    }
    if (begin < end) {
        if (text_utf8_count(data + begin, end - begin) != 1) return 0;
        return !begin || is_pair(data, begin) || !starts(after, left);
    }
    while (begin && end - begin < 3 && is_digit(data[begin - 1])) begin--;
    if (end - begin != 1 && end - begin != 2) return 0;
    return !begin || (data[begin - 1] == ' ' && !starts(after, left));
}

static int is_small(const char *data, size_t length, size_t at) {
    size_t bytes;
    return utf8proc_category((int32_t)text_utf8_decode(data, length, at, &bytes)) == UTF8PROC_CATEGORY_LL;
}

/* Return 1 for a quoted question and its answer ("Is it?" "Yes."), which models have learned as a pair. */
static int is_exchange(const char *data, size_t length, size_t end, size_t next) {
    static const char quotes[] = "\" \xC2\xAB \xC2\xBB \xE2\x80\x9C \xE2\x80\x9D \xE2\x80\x9E";
    if (end > EXCHANGE || !text_prefix(quotes, data + next, length - next)) return 0;
    return text_prefix(quotes, data + end - 1, 1) || (end > 1 && text_prefix(quotes, data + end - 2, 2)) ||
           (end > 2 && text_prefix(quotes, data + end - 3, 3));
}

/* Signs that only separate cells, and signs between words that sentences may contain. */
#define SEPARATORS "|| | // :: \xC2\xA6 \xC2\xB7 \xE2\x80\x96 \xE2\x80\xA2 \xE2\x88\x99 \xE2\x97\x8F \xE2\x96\xAA"
static const char separators[] = SEPARATORS;
static const char between[] =
    SEPARATORS " / > < ~ \xC2\xBB \xE2\x80\xBA \xE2\x86\x90 \xE2\x86\x92 \xE2\x87\x92 \xE2\x9F\xB6";

/* Return the length of a sign from `signs` at data[at], or 0. Both neighbours must be white space or missing. */
static size_t sign_of(const char *signs, const char *data, size_t length, size_t at) {
    const size_t n = !at || is_space(data[at - 1]) ? text_prefix(signs, data + at, length - at) : 0;
    return n && (at + n == length || is_space(data[at + n])) ? n : 0;
}

/* Return 1 if data[at] is in a protected span, and set *begin to the end of the span, otherwise to `at`. Scan from
 * data[*begin] on, with `scan` if it is not NULL. */
static int is_kept(text_scan *scan, const char *data, size_t length, size_t *begin, size_t at) {
    const size_t base = scan ? 0 : *begin;
    text_scan part;
    if (!scan) {
        part = text_scan_begin(data + base, text_utf8_cut(data + base, length - base, at - base + LONGEST_SPAN));
        scan = &part;
    }
    for (size_t bytes; *begin < at; *begin += bytes) text_span_next(scan, *begin - base, &bytes);
    return *begin > at;
}

/* Return the offset of the next sign in `signs` outside protected spans, or of the next TAB with *bytes 0; else
 * `length`. If `scan` is NULL, the sign must also be outside brackets and quotes that open after `at`. A closing quote
 * is not a sign. */
static size_t next_sign(const char *signs, text_scan *scan, const char *data, size_t length, size_t at, size_t *bytes) {
    static const char opening[] = "( [ \xC2\xAB", closing[] = ") ] \xC2\xBB";
    size_t begin = at, open = 0;
    for (; at < length; at++) {
        *bytes = 0;
        if (data[at] == '\t' || line_separator(data + at, length - at)) return at;
        if (open && text_prefix(closing, data + at, length - at)) open--;
        else if ((!open || scan) && (*bytes = sign_of(signs, data, length, at))) {
            if (!is_kept(scan, data, length, &begin, at)) return at;
            at = begin - 1;
        } else open += text_prefix(opening, data + at, length - at) > 0;
    }
    return length;
}

size_t text_cell(const char *data, size_t length, int spans, int *separates) {
    size_t at = over_blanks(data, length, 0), bytes;
    for (*separates = 0; spans && (bytes = sign_of(separators, data, length, at)); *separates = 1)
        at = over_space(data, length, at + bytes);
    if (*separates) return at;
    at = next_sign(spans ? separators : "", NULL, data, length, at, &bytes);
    return bytes ? at : over_blanks(data, length, at);
}

size_t text_sign(text_scan *scan, size_t at, size_t *bytes) {
    const char *const data = scan->data;
    const size_t length = scan->length;
    at = over_space(data, length, at); /* skip signs before the first word */
    while ((*bytes = sign_of(between, data, length, at))) at = over_space(data, length, at + *bytes);
    do at = next_sign(between, scan, data, length, at, bytes);
    while (at < length && !*bytes && ++at);
    return over_space(data, length, at + *bytes) < length ? at : length;
}

/* ---- Frames ---- */

/* Return the length of the letter, Roman numeral or number of an enumeration. */
static size_t item(const char *data, size_t length) {
    size_t n = 0;
    while (n < length && n < 3 && is_digit(data[n])) n++;
    if (n || !length) return n;
    for (const char *roman = "ivxlcIVXLC"; n < length && n < 6 && strchr(roman, data[n]) && data[n]; n++) {}
    return n ? n : (data[0] | 32) >= 'a' && (data[0] | 32) <= 'z';
}

/* Return the length of a) (iv) 3.) or a. at the beginning of a text, or 0. */
static size_t enumeration(const char *data, size_t length) {
    const size_t begin = length && *data == '(';
    const size_t n = item(data + begin, length - begin);
    size_t end = begin + n;
    if (!n || end + 1 >= length) return 0;
    if (data[end] == '.' && data[end + 1] == ')') end++;
    if (data[end] == ')') return end + 1;
    const char first = data[0], next = end + 2 < length ? data[end + 2] : ' ';
    const int roman = (n > 1 && first >= 'a') || (n == 1 && first && strchr("IVX", first));
    const int letter = n == 1 && first >= 'a' && first <= 'i';
    const int another = end + 3 < length && data[end + 3] == '.'; /* as in "a. C." */
    return !begin && (letter || roman) && data[end] == '.' && next >= 'A' && next <= 'Z' && !another ? end + 1 : 0;
}

/* Return the length of a list marker or > at the beginning of a text with its white space, or 0. */
static size_t marker(const char *data, size_t length) {
    static const char bullets[] = "-- - + * #### ### ## # [x] [X] \xC2\xBB \xE2\x80\x93 \xE2\x80\x94 \xE2\x80\x95 "
                                  "\xE2\x80\xA2 \xE2\x80\xA3 \xE2\x97\xA6 \xE2\x96\xAA \xE2\x96\xA0 "
                                  "\xE2\x96\xA1 \xE2\x97\x8F \xE2\x97\x8B \xE2\x9E\xA2 \xE2\x83\x98 \xC2\xB7 o ",
                      dashes[] = "- \xE2\x80\x93 \xE2\x80\x94 \xE2\x80\x95",
                      speech[] = "\" \xC2\xBF \xC2\xA1 \xE2\x80\x9C \xE2\x80\x9E \xC2\xAB";
    if (length && *data == '>') return over_space(data, length, 1);
    size_t n = text_begins_with(data, length, "[ ]") ? 3 : text_prefix(bullets, data, length), bytes;
    if (!n) n = enumeration(data, length);
    if (n && n < length && is_space(data[n])) {
        n = over_space(data, length, n);
        return *data != 'o' || (n < length && data[n] >= 'A' && data[n] <= 'Z') ? n : 0;
    }
    n = text_prefix(dashes, data, length);
    if (!n || n == length) return 0;
    if (text_prefix(speech, data + n, length - n)) return n;
    const int32_t first = (int32_t)text_utf8_decode(data, length, n, &bytes);
    return utf8proc_category(first) == UTF8PROC_CATEGORY_LU && n + bytes < length && is_small(data, length, n + bytes)
               ? n
               : 0;
}

/* Return 1 if a bracket at the beginning of a text is closed by its last byte. */
static int is_bracketed(const char *data, size_t length) {
    const char close = length < 3 || (*data != '(' && *data != '[') || data[1] == *data ? 0 : *data == '(' ? ')' : ']';
    size_t depth = 1, at = 1;
    for (; close && at < length && depth; at++) depth += (size_t)(data[at] == *data) - (size_t)(data[at] == close);
    return close && at == length && !depth;
}

size_t text_frame(const char *data, size_t length, size_t *after) {
    size_t end = text_before_blanks(data, length), at = over_blanks(data, end, 0), n;
    const size_t begin = at;
    while ((n = marker(data + at, end - at))) at += n;
    if (at == end) at = begin; /* nothing else */
    if (is_bracketed(data + at, end - at)) at++, end--;
    *after = length - end;
    return at;
}

size_t text_sentence(const char *data, size_t length) {
    static const char ends[] = ". ! ? \xE2\x80\xA6",
                      wide[] = "\xE3\x80\x82 \xEF\xBC\x81 \xEF\xBC\x9F"; /* the Chinese and Japanese . ! ? */
    static const char closing[] = ") ] } \" ' \xC2\xBB \xE2\x80\x9D \xE2\x80\x99 \xE2\x80\x9C \xE3\x80\x8D";
    for (size_t at = 0, n; at < length; at++) {
        size_t end = at;
        int spaced = 1; /* the sentence must be followed by white space */
        if ((n = text_prefix(wide, data + at, length - at))) spaced = 0;
        else if (!(n = text_prefix(ends, data + at, length - at))) continue;
        for (; n; n = text_prefix(spaced ? ends : wide, data + end, length - end)) end += n;
        const int alone = data[at] == '.' && end == at + 1;
        if (text_begins_with(data + end, length - end, " \xC2\xBB")) end += 3; /* French quotes */
        while ((n = text_prefix(closing, data + end, length - end))) end += n;
        const size_t next = over_space(data, length, end);
        if (next == length) return length;
        if (spaced && (next == end || text_prefix(ends, data + next, length - next) || is_small(data, length, next) ||
                       is_exchange(data, length, end, next) || (alone && is_abbreviated(data, length, at, next))))
            at = end - 1;
        else return next;
    }
    return length;
}

/* Return the length of the text up to a space. *verbatim is 1 if it is long and mostly ASCII, and therefore not
 * words. */
static size_t run(const char *data, size_t length, int *verbatim) {
    size_t n = 0, ascii = 0;
    for (; n < length && n <= 4 * RUN && !is_space(data[n]); n++) ascii += (unsigned char)data[n] < 0x80;
    *verbatim = n > RUN && ascii > n / 2;
    while (*verbatim && n < length && !is_space(data[n])) n++;
    return n;
}

/* Return 1 if the sign of *bytes bytes at data[at] ends a clause, 2 if it does so even without white space. */
static int ends_clause(const char *data, size_t length, size_t at, size_t *bytes) {
    static const char marks[] = "; : , \xE2\x80\x93 \xE2\x80\x94 - \xD8\x8C",
                      wide[] = "\xEF\xBC\x8C \xEF\xBC\x9B \xE3\x80\x81 \xEF\xBC\x9A";
    if ((*bytes = text_prefix(wide, data + at, length - at))) return 2;
    return (*bytes = text_prefix(marks, data + at, length - at)) > 0;
}

size_t text_clause(const char *data, size_t length, size_t limit, int spans, int *verbatim) {
    size_t at = over_space(data, length, 0), clause = 0, word = 0, any = 0, bytes, seen;
    *verbatim = 0;
    if (length <= limit) limit = length;
    text_scan scan = text_scan_begin(data, text_utf8_cut(data, length, limit + LONGEST_SPAN));
    seen = at + run(data + at, length - at, verbatim); /* end of the last examined run */
    if (*verbatim) return over_space(data, length, seen);
    while (at < limit) {
        if (is_space(data[at])) {
            word = at = over_space(data, length, at);
            int no_language = 0;
            if (at >= seen) seen = at + run(data + at, length - at, &no_language);
            if (no_language) return word;
            continue;
        }
        const int ends = ends_clause(data, length, at, &bytes);
        if (ends && at + bytes <= limit && (ends == 2 || (at + bytes < length && is_space(data[at + bytes]))))
            clause = over_space(data, length, at + bytes);
        if (spans && text_span_next(&scan, at, &bytes) != TEXT_SPAN_NONE) at += bytes;
        else at = text_utf8_next(data, length, at);
        if (at <= limit) any = at;
    }
    if (limit == length) return length;
    if (clause > limit / 4) return clause;
    if (word) return word;
    return any && seen > RUN ? any : over_space(data, length, at > seen ? at : seen);
}

/* Return the length of the letters before or after data[at], up to `most`; 0 if a capital is among them and `small`
 * is 1. */
static size_t letters_at(const char *data, size_t length, size_t at, int step, int small) {
    size_t n = 0;
    for (size_t i = at; i < length && n < 2; i += (size_t)step, n++) {
        if (!is_letter(data[i])) break;
        if (small && data[i] >= 'A' && data[i] <= 'Z') return 0;
    }
    return n;
}

size_t text_joint(const char *data, size_t length, size_t at) {
    static const char dashes[] = "--- -- \xE2\x80\x94 \xE2\x80\x95 \xE2\x80\x93 /";
    if (!at || at >= length || is_letter(data[at]) > ((unsigned char)data[at] >= 0x80)) return 0;
    const size_t n = text_prefix(dashes, data + at, length - at);
    if (!n || at + n >= length || is_space(data[at - 1])) return 0;
    const int slash = data[at] == '/', plain = slash || data[at + n - 1] == '\x93';
    if (plain) /* not Paris-Berlin, 1/2, TCP/IP */
        return letters_at(data, length, at - 1, -1, !slash) > 1 && letters_at(data, length, at + n, 1, 1) > 1 ? n : 0;
    return text_is_wordlike(data, length, at + n) && data[at - 1] != '-' &&
                   !(is_digit(data[at - 1]) && is_digit(data[at + n]))
               ? n
               : 0;
}

size_t text_before_mark(const char *data, size_t length) {
    for (size_t n = 1; n <= 3 && n < length; n++) /* a joint before the words that the caller has cut off */
        if (text_prefix("--- -- \xE2\x80\x94 \xE2\x80\x95 \xE2\x80\x93 /", data + length - n, n) == n &&
            !is_space(data[length - n - 1]))
            return length - n;
    while (length && is_space(data[length - 1])) length--;
    if (length > 1 && (data[length - 1] == ',' || data[length - 1] == ';') && !is_space(data[length - 2])) length--;
    size_t word = length;
    while (word && !is_space(data[word - 1])) word--;
    if (!word || sign_of(between, data, length, word) != length - word) return length;
    while (word && is_space(data[word - 1])) word--;
    return word;
}

/* Return the start of the words after the sign nearest to the middle, or 0. */
static size_t behind_sign(const char *data, size_t length) {
    size_t best = 0, bytes;
    text_scan scan = text_scan_begin(data, length);
    for (size_t at = 0; (at = text_sign(&scan, at, &bytes)) < length;) {
        at = over_space(data, length, at + bytes);
        if (!best || at <= length / 2) best = at;
    }
    return best;
}

size_t text_half_at_bracket(const char *data, size_t length) {
    static const char open[] = "( [ \" \xE2\x80\x9C \xE2\x80\x9E \xC2\xAB",
                      close[] = ") ] \" \xE2\x80\x9D \xE2\x80\x9C \xC2\xBB";
    size_t best = 0, n;
    length = text_before_blanks(data, length);
    for (size_t at = 1; at < length; at++) {
        size_t cut = 0;
        if (is_space(data[at - 1]) && text_prefix(open, data + at, length - at)) cut = at;
        else if ((n = text_prefix(close, data + at, length - at))) {
            for (cut = at + n; cut < length && strchr(".,;:!?", data[cut]); cut++) {}
            cut = cut < length && is_space(data[cut]) ? over_space(data, length, cut) : 0;
        }
        if (cut && (!best || (cut > length / 2 ? cut - length / 2 : length / 2 - cut) <
                                 (best > length / 2 ? best - length / 2 : length / 2 - best)))
            best = cut;
    }
    return best;
}

size_t text_half_at_joint(const char *data, size_t length, size_t joints[2]) {
    size_t best = 0, bytes, n, first = 0;
    text_scan scan = text_scan_begin(data, length);
    joints[0] = joints[1] = 0;
    while (first < length && !text_joint(data, length, first)) first++;
    if (first == length) return 0;
    for (size_t at = 0; at < length; at += bytes) {
        if (text_span_next(&scan, at, &bytes) != TEXT_SPAN_NONE || !(n = text_joint(data, length, at))) continue;
        joints[data[at] == '/']++;
        if (!best || at <= length / 2) best = at + n;
        bytes = n;
    }
    return best;
}

size_t text_half(const char *data, size_t length, int spans) {
    int verbatim;
    while (length && is_space(data[length - 1])) length--;
    const size_t sign = behind_sign(data, length);
    if (sign) return sign;
    const size_t half = length ? text_clause(data, length, length / 2, spans, &verbatim) : 0;
    return half < length ? half : 0;
}
