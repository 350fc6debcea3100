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
    BEFORE,   /* never ends a sentence: Dr., vs. */
    NUMBERED, /* an abbreviation before a number: No. 5 */
    MAY_END   /* may end a sentence: Inc., Mio. */
} kind;

typedef struct abbreviation {
    const char *word;
    kind kind;
} abbreviation;

/* Sorted by bytes. Most are the suppressions of German, English, French, Spanish, Italian and Portuguese in CLDR 41
 * (common/segments, Unicode licence), without those that are also words; the kinds were assigned by hand. */
static const abbreviation abbreviations[] = {
    { "Abb", NUMBERED },    { "Abs", NUMBERED },    { "Abt", MAY_END },      { "Abw", MAY_END },
    { "Adj", MAY_END },     { "Adr", MAY_END },     { "Adv", MAY_END },      { "Allg", MAY_END },
    { "Alm", MAY_END },     { "Approx", MAY_END },  { "Apr", MAY_END },      { "Apt", NUMBERED },
    { "Art", NUMBERED },    { "Aufl", NUMBERED },   { "Aug", MAY_END },      { "Ausg", MAY_END },
    { "Ausschl", MAY_END }, { "Av", MAY_END },      { "Avda", MAY_END },     { "Ave", MAY_END },
    { "Bd", NUMBERED },     { "Bed", MAY_END },     { "Ber", MAY_END },      { "Bibl", MAY_END },
    { "Blvd", MAY_END },    { "CC", BEFORE },       { "Ca", BEFORE },        { "Cap", NUMBERED },
    { "Capt", BEFORE },     { "Cdr", MAY_END },     { "Cf", BEFORE },        { "Cfr", BEFORE },
    { "Ch", NUMBERED },     { "Chap", NUMBERED },   { "Chr", MAY_END },      { "Cmdr", BEFORE },
    { "Co", MAY_END },      { "Col", BEFORE },      { "Comm", MAY_END },     { "Conn", MAY_END },
    { "Cont", MAY_END },    { "Corp", MAY_END },    { "Cía", MAY_END },      { "Dat", MAY_END },
    { "Dec", MAY_END },     { "Def", MAY_END },     { "Dept", MAY_END },     { "Desc", MAY_END },
    { "Desv", MAY_END },    { "Dez", MAY_END },     { "Dipl", BEFORE },      { "Dr", BEFORE },
    { "Dra", BEFORE },      { "Dras", BEFORE },     { "Drs", BEFORE },       { "Dto", MAY_END },
    { "Dtzd", MAY_END },    { "Dª", MAY_END },      { "Dña", MAY_END },      { "EE", BEFORE },
    { "Einh", MAY_END },    { "Emm", MAY_END },     { "Erf", MAY_END },      { "Etc", MAY_END },
    { "Evtl", MAY_END },    { "Exc", MAY_END },     { "Excma", MAY_END },    { "Excmas", MAY_END },
    { "Excmo", MAY_END },   { "Excmos", MAY_END },  { "Exma", MAY_END },     { "Exmas", MAY_END },
    { "Exmo", MAY_END },    { "Exmos", MAY_END },   { "FF", BEFORE },        { "Fa", MAY_END },
    { "Fabric", MAY_END },  { "Fam", MAY_END },     { "Feb", MAY_END },      { "Fig", NUMBERED },
    { "Figs", NUMBERED },   { "Folg", MAY_END },    { "Fr", MAY_END },       { "Frl", BEFORE },
    { "Gebr", MAY_END },    { "Gen", BEFORE },      { "Geograph", MAY_END }, { "Geom", MAY_END },
    { "Ges", MAY_END },     { "Gesch", MAY_END },   { "Ggf", MAY_END },      { "Gov", BEFORE },
    { "Hbf", MAY_END },     { "Hd", MAY_END },      { "Hon", BEFORE },       { "Hptst", MAY_END },
    { "Hr", BEFORE },       { "Hrn", BEFORE },      { "Hrsg", MAY_END },     { "Ilma", MAY_END },
    { "Ilmas", MAY_END },   { "Ilmo", MAY_END },    { "Ilmos", MAY_END },    { "Inc", MAY_END },
    { "Ing", MAY_END },     { "Inh", MAY_END },     { "Inst", MAY_END },     { "Int", MAY_END },
    { "Jahrh", MAY_END },   { "Jan", MAY_END },     { "Jr", MAY_END },       { "Jul", NUMBERED },
    { "Jun", NUMBERED },    { "Kap", NUMBERED },    { "Kfm", MAY_END },      { "Kl", MAY_END },
    { "Konv", MAY_END },    { "Kop", MAY_END },     { "Lcda", MAY_END },     { "Lcdo", MAY_END },
    { "Lda", MAY_END },     { "Ldo", MAY_END },     { "Lev", MAY_END },      { "Lic", MAY_END },
    { "Liv", MAY_END },     { "Lt", BEFORE },       { "Ltd", MAY_END },      { "Ltda", MAY_END },
    { "Ltdo", MAY_END },    { "MM", BEFORE },       { "Maj", MAY_END },      { "Mar", NUMBERED },
    { "Max", MAY_END },     { "Md", MAY_END },      { "Messrs", BEFORE },    { "Mgr", BEFORE },
    { "Mill", MAY_END },    { "Min", MAY_END },     { "Mio", MAY_END },      { "Mlle", BEFORE },
    { "Mlles", BEFORE },    { "Mme", BEFORE },      { "Mmes", BEFORE },      { "Mons", MAY_END },
    { "Mr", BEFORE },       { "Mrd", MAY_END },     { "Mrs", BEFORE },       { "Ms", BEFORE },
    { "Msp", MAY_END },     { "Mt", MAY_END },      { "No", NUMBERED },      { "Nos", NUMBERED },
    { "Nov", MAY_END },     { "Nr", NUMBERED },     { "Num", NUMBERED },     { "Núm", NUMBERED },
    { "Obj", MAY_END },     { "Oct", MAY_END },     { "Okt", MAY_END },      { "Op", MAY_END },
    { "PP", NUMBERED },     { "Pfd", MAY_END },     { "Phys", MAY_END },     { "Pos", NUMBERED },
    { "Prof", BEFORE },     { "Prot", MAY_END },    { "Proz", MAY_END },     { "Pvt", MAY_END },
    { "Pág", NUMBERED },    { "RR", BEFORE },       { "Rd", MAY_END },       { "Rdo", MAY_END },
    { "Rdos", MAY_END },    { "Rel", MAY_END },     { "Rep", MAY_END },      { "Rev", BEFORE },
    { "Rh", MAY_END },      { "Rol", MAY_END },     { "Rvdmo", MAY_END },    { "Rvdmos", MAY_END },
    { "Rvdo", MAY_END },    { "Rvdos", MAY_END },   { "Schr", MAY_END },     { "Sdad", MAY_END },
    { "Sec", NUMBERED },    { "Seg", MAY_END },     { "Sek", MAY_END },      { "Sen", BEFORE },
    { "Sep", MAY_END },     { "Sept", MAY_END },    { "Sgt", BEFORE },       { "Sig", MAY_END },
    { "Spezif", MAY_END },  { "Sq", MAY_END },      { "Sr", BEFORE },        { "Sra", BEFORE },
    { "Sras", BEFORE },     { "Sres", BEFORE },     { "Srta", BEFORE },      { "Srtas", MAY_END },
    { "St", BEFORE },       { "StR", MAY_END },     { "Sta", MAY_END },      { "Std", MAY_END },
    { "Ste", BEFORE },      { "Sto", MAY_END },     { "Str", MAY_END },      { "Tab", NUMBERED },
    { "Tel", NUMBERED },    { "Temp", MAY_END },    { "Trab", MAY_END },     { "Tägl", MAY_END },
    { "UU", MAY_END },      { "Univ", MAY_END },    { "Urspr", MAY_END },    { "Ursprüngl", MAY_END },
    { "Var", MAY_END },     { "Vda", MAY_END },     { "Verf", MAY_END },     { "Vgl", BEFORE },
    { "Vol", NUMBERED },    { "Wg", MAY_END },      { "Wz", MAY_END },       { "Yr", MAY_END },
    { "Ziff", NUMBERED },   { "Zt", MAY_END },      { "Ztr", MAY_END },      { "abr", MAY_END },
    { "abrev", MAY_END },   { "acoust", MAY_END },  { "adr", MAY_END },      { "aer", MAY_END },
    { "afma", MAY_END },    { "afmas", MAY_END },   { "afmo", MAY_END },     { "afmos", MAY_END },
    { "ag", MAY_END },      { "agric", MAY_END },   { "amtl", MAY_END },     { "anat", MAY_END },
    { "anc", MAY_END },     { "anon", MAY_END },    { "approx", MAY_END },   { "apt", NUMBERED },
    { "arit", MAY_END },    { "arqueol", MAY_END }, { "arquit", MAY_END },   { "art", NUMBERED },
    { "astron", MAY_END },  { "autom", MAY_END },   { "avr", MAY_END },      { "avv", MAY_END },
    { "bco", MAY_END },     { "beil", MAY_END },    { "biogr", MAY_END },    { "broch", MAY_END },
    { "bspw", BEFORE },     { "bzw", BEFORE },      { "ca", BEFORE },        { "cam", MAY_END },
    { "cap", NUMBERED },    { "categ", MAY_END },   { "cel", MAY_END },      { "cf", BEFORE },
    { "cfr", BEFORE },      { "ch", NUMBERED },     { "chap", NUMBERED },    { "coll", MAY_END },
    { "com", MAY_END },     { "comp", MAY_END },    { "compl", MAY_END },    { "cont", MAY_END },
    { "contab", MAY_END },  { "créd", MAY_END },    { "cx", MAY_END },       { "círc", MAY_END },
    { "cód", MAY_END },     { "dept", MAY_END },    { "depto", MAY_END },    { "deptos", MAY_END },
    { "desc", MAY_END },    { "dez", MAY_END },     { "dic", MAY_END },      { "dipl", MAY_END },
    { "dott", MAY_END },    { "dpto", MAY_END },    { "dptos", MAY_END },    { "dr", MAY_END },
    { "dtor", MAY_END },    { "déb", MAY_END },     { "déc", MAY_END },      { "educ", MAY_END },
    { "ehem", MAY_END },    { "eigtl", MAY_END },   { "einschl", MAY_END },  { "ej", MAY_END },
    { "eletr", MAY_END },   { "eletrôn", MAY_END }, { "encycl", MAY_END },   { "ene", MAY_END },
    { "entspr", MAY_END },  { "erw", MAY_END },     { "etc", MAY_END },      { "evtl", MAY_END },
    { "exempl", MAY_END },  { "exkl", BEFORE },     { "ext", NUMBERED },     { "fac", MAY_END },
    { "fasc", MAY_END },    { "feb", MAY_END },     { "fem", MAY_END },      { "fev", MAY_END },
    { "ff", MAY_END },      { "fig", NUMBERED },    { "figs", NUMBERED },    { "filos", MAY_END },
    { "fisiol", MAY_END },  { "fl", MAY_END },      { "fot", MAY_END },      { "frz", MAY_END },
    { "févr", MAY_END },    { "fís", MAY_END },     { "geb", MAY_END },      { "gedr", MAY_END },
    { "gek", MAY_END },     { "geom", MAY_END },    { "gesch", MAY_END },    { "ggf", BEFORE },
    { "ggfs", MAY_END },    { "gouv", MAY_END },    { "gr", MAY_END },       { "gên", MAY_END },
    { "hist", MAY_END },    { "hnos", MAY_END },    { "hpts", MAY_END },     { "hôp", MAY_END },
    { "illustr", MAY_END }, { "imm", MAY_END },     { "imprim", MAY_END },   { "ind", MAY_END },
    { "indus", MAY_END },   { "ingl", MAY_END },    { "inkl", BEFORE },      { "jan", MAY_END },
    { "janv", MAY_END },    { "jew", MAY_END },     { "jhrl", MAY_END },     { "jue", MAY_END },
    { "juil", MAY_END },    { "jul", MAY_END },     { "jun", MAY_END },      { "jur", MAY_END },
    { "kath", MAY_END },    { "kfm", MAY_END },     { "kgl", MAY_END },      { "licda", MAY_END },
    { "licdo", MAY_END },   { "lin", MAY_END },     { "liter", MAY_END },    { "lun", MAY_END },
    { "matem", MAY_END },   { "max", MAY_END },     { "min", MAY_END },      { "mitt", MAY_END },
    { "mié", MAY_END },     { "mss", MAY_END },     { "mtl", MAY_END },      { "mtro", MAY_END },
    { "máq", MAY_END },     { "méd", MAY_END },     { "möbl", MAY_END },     { "mús", MAY_END },
    { "neol", MAY_END },    { "niv", MAY_END },     { "no", NUMBERED },      { "nos", NUMBERED },
    { "nov", MAY_END },     { "nr", NUMBERED },     { "ntra", MAY_END },     { "ntro", MAY_END },
    { "num", NUMBERED },    { "náut", MAY_END },    { "näml", MAY_END },     { "núm", NUMBERED },
    { "obs", MAY_END },     { "oct", MAY_END },     { "odont", MAY_END },    { "odontol", MAY_END },
    { "org", MAY_END },     { "organiz", MAY_END }, { "pag", MAY_END },      { "pp", NUMBERED },
    { "pq", MAY_END },      { "prof", MAY_END },    { "profa", MAY_END },    { "pron", MAY_END },
    { "prov", MAY_END },    { "próx", MAY_END },    { "psicol", MAY_END },   { "publ", MAY_END },
    { "pág", NUMBERED },    { "págs", NUMBERED },   { "quím", MAY_END },     { "relat", MAY_END },
    { "rep", MAY_END },     { "réf", MAY_END },     { "röm", MAY_END },      { "sam", MAY_END },
    { "schles", MAY_END },  { "schweiz", MAY_END }, { "schwäb", MAY_END },   { "sec", NUMBERED },
    { "sez", MAY_END },     { "sociol", MAY_END },  { "sog", BEFORE },       { "sras", MAY_END },
    { "sres", MAY_END },    { "srs", MAY_END },     { "symb", MAY_END },     { "synth", MAY_END },
    { "syst", MAY_END },    { "sáb", MAY_END },     { "séc", MAY_END },      { "símb", MAY_END },
    { "südd", MAY_END },    { "tab", NUMBERED },    { "tav", MAY_END },      { "tec", MAY_END },
    { "tecnol", MAY_END },  { "tel", NUMBERED },    { "trad", MAY_END },     { "transp", MAY_END },
    { "tägl", MAY_END },    { "univ", MAY_END },    { "usw", MAY_END },      { "verh", MAY_END },
    { "verw", MAY_END },    { "vgl", BEFORE },      { "vid", MAY_END },      { "vol", NUMBERED },
    { "vs", BEFORE },       { "zzgl", BEFORE },     { "álg", MAY_END },      { "éd", MAY_END },
    { "édit", MAY_END },    { "équiv", MAY_END },   { "éval", MAY_END },     { "índ", MAY_END },
    { "österr", MAY_END },
};

/* Sorted by bytes: words that nearly always start a sentence when capitalised. */
static const char *const starters[] = {
    "A",     "Aber",  "After",  "Al",    "Als",   "Am",     "An",    "And",   "Après",  "Are",    "As",    "At",
    "Au",    "Auch",  "Auf",    "Aux",   "Avec",  "Before", "Bei",   "But",   "C",      "Can",    "Ce",    "Ces",
    "Cette", "Comme", "Como",   "Con",   "Could", "Cuando", "Cómo",  "Da",    "Dann",   "Dans",   "Das",   "De",
    "Del",   "Dem",   "Den",    "Der",   "Des",   "Did",    "Die",   "Diese", "Dieser", "Dieses", "Do",    "Doch",
    "Does",  "Dort",  "Du",     "Dónde", "Ein",   "Eine",   "Einen", "El",    "Ella",   "Ellas",  "Elle",  "Elles",
    "Ellos", "En",    "Er",     "Es",    "Esa",   "Ese",    "Esta",  "Este",  "Esto",   "Está",   "Et",    "For",
    "From",  "Für",   "Has",    "Have",  "Hay",   "He",     "Her",   "Here",  "Heute",  "Hier",   "His",   "How",
    "I",     "Ich",   "If",     "Ihr",   "Ihre",  "Il",     "Ils",   "Im",    "In",     "Is",     "It",    "J",
    "Ja",    "Je",    "Jetzt",  "L",     "La",    "Las",    "Le",    "Les",   "Lo",     "Los",    "Ma",    "Mais",
    "Man",   "Me",    "Mein",   "Meine", "Mes",   "Mi",     "Mit",   "Mon",   "My",     "Nach",   "Nein",  "Nicht",
    "No",    "Not",   "Nous",   "Now",   "Nur",   "O",      "Oder",  "On",    "Ou",     "Our",    "Où",    "Par",
    "Para",  "Pero",  "Please", "Por",   "Pour",  "Quand",  "Que",   "Qui",   "Quién",  "Qué",    "Sa",    "Se",
    "Sein",  "Seine", "Ses",    "She",   "Si",    "Sie",    "So",    "Son",   "Su",     "Sur",    "Sus",   "Sí",
    "Te",    "That",  "The",    "Their", "Then",  "There",  "These", "They",  "This",   "Those",  "Tu",    "Tú",
    "Un",    "Una",   "Und",    "Une",   "Unser", "Usted",  "Von",   "Vor",   "Vous",   "Wann",   "Warum", "Was",
    "We",    "Weil",  "Wenn",   "Wer",   "Were",  "What",   "When",  "Where", "Who",    "Why",    "Wie",   "Will",
    "Wir",   "With",  "Wo",     "Would", "Y",     "Yes",    "Yo",    "You",   "Your",   "Zu",     "À",
};

/* LONGEST: bytes of a word of these tables. RUN: bytes without a space that may be language. EXCHANGE: bytes of a
 * quoted question and answer that are translated together. */
enum { LONGEST = 12, RUN = 255, EXCHANGE = 120, LONGEST_SPAN = 4096 };

static int32_t character(const char *data, size_t length, size_t at, size_t *bytes) {
    int32_t c = 0;
    const ptrdiff_t n = utf8proc_iterate((const uint8_t *)data + at, (ptrdiff_t)(length - at), &c);
    *bytes = n > 0 ? (size_t)n : 1;
    return n > 0 ? c : 0;
}

/* Length of the first member of `list`, separated by spaces, that is a prefix of the text, or 0. */
static size_t begins_with(const char *list, const char *data, size_t length) {
    for (size_t n; *list; list += n + (list[n] == ' ')) {
        n = strcspn(list, " ");
        if (n <= length && memcmp(list, data, n) == 0) return n;
    }
    return 0;
}

static int is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (unsigned char)c >= 0x80; }
static int is_digit(char c) { return c >= '0' && c <= '9'; }
static int is_space(char c) { return c == ' ' || c == '\t'; }

static size_t over_space(const char *data, size_t length, size_t at) {
    while (at < length && is_space(data[at])) at++;
    return at;
}

static int compare_words(const void *word, const void *entry) {
    return strcmp(word, *(const char *const *)entry); /* works for abbreviations too: the word is their first member */
}

static const void *find(const char *data, size_t length, const void *table, size_t n, size_t size) {
    char word[LONGEST + 1];
    if (!length || length > LONGEST || memchr(data, '\0', length)) return NULL;
    memcpy(word, data, length);
    word[length] = '\0';
    return bsearch(word, table, n, size, compare_words);
}

/* Return the bytes of the first word, at most one more than the tables have. */
static size_t first_word(const char *data, size_t length) {
    size_t n = 0;
    while (n < length && n <= LONGEST && is_letter(data[n])) n++;
    return n;
}

/* Return 1 if the text after a full stop certainly starts a sentence. */
static int starts(const char *data, size_t length) {
    return begins_with("\xC2\xBF \xC2\xA1", data, length) ||
           find(data, first_word(data, length), starters, sizeof starters / sizeof *starters, sizeof *starters);
}

/* Return 1 for numbers and the like: 5, +49, (3), IV, A. */
static int is_numbering(const char *data, size_t length) {
    const size_t n = first_word(data, length);
    if (length && (is_digit(*data) || strchr("+(#", *data))) return 1;
    for (size_t i = 0; i < n; i++)
        if (!strchr("IVXLC", data[i])) return n == 1 && (unsigned char)*data < 0x80 && *data != 'A';
    return n > 0;
}

static kind kind_of(const char *data, size_t begin, size_t end) {
    const abbreviation *found = find(data + begin, end - begin, abbreviations,
                                     sizeof abbreviations / sizeof *abbreviations, sizeof *abbreviations);
    if (found) return found->kind;
    if (end - begin != 2 || memcmp(data + begin, "ex", 2) != 0) return ORDINARY; /* p. ex. */
    while (begin && data[begin - 1] == ' ') begin--;
    return begin > 1 && data[begin - 1] == '.' && data[begin - 2] == 'p' ? BEFORE : ORDINARY;
}

/* Return 1 if the letter before data[end] is the second of z. B., d. h. */
static int is_pair(const char *data, size_t begin) {
    while (begin && data[begin - 1] == ' ') begin--;
    return begin > 1 && data[begin - 1] == '.' && data[begin - 2] >= 'a' && data[begin - 2] <= 'z' &&
           (begin == 2 || !is_letter(data[begin - 3]));
}

/* Return 1 if a full stop after the word before data[end] belongs to the word, given `next`: J. Smith, 3. Oktober. */
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
    return utf8proc_category(character(data, length, at, &bytes)) == UTF8PROC_CATEGORY_LL;
}

/* "Is it?" "Yes." together: models have learned such pairs, and how languages write them. */
static int is_exchange(const char *data, size_t length, size_t end, size_t next) {
    static const char quotes[] = "\" \xC2\xAB \xC2\xBB \xE2\x80\x9C \xE2\x80\x9D \xE2\x80\x9E";
    if (end > EXCHANGE || !begins_with(quotes, data + next, length - next)) return 0;
    return begins_with(quotes, data + end - 1, 1) || (end > 1 && begins_with(quotes, data + end - 2, 2)) ||
           (end > 2 && begins_with(quotes, data + end - 3, 3));
}

/* Signs that only separate cells, and signs between words that sentences may contain. */
#define SEPARATORS "|| | // :: \xC2\xA6 \xC2\xB7 \xE2\x80\x96 \xE2\x80\xA2 \xE2\x88\x99 \xE2\x97\x8F \xE2\x96\xAA"
static const char separators[] = SEPARATORS;
static const char between[] =
    SEPARATORS " / > < ~ \xC2\xBB \xE2\x80\xBA \xE2\x86\x90 \xE2\x86\x92 \xE2\x87\x92 \xE2\x9F\xB6";

/* Return the bytes of a sign of `signs` at data[at] with white space or nothing on both sides, or 0. */
static size_t sign_of(const char *signs, const char *data, size_t length, size_t at) {
    const size_t n = !at || is_space(data[at - 1]) ? begins_with(signs, data + at, length - at) : 0;
    return n && (at + n == length || is_space(data[at + n])) ? n : 0;
}

/* Return 1 if data[at] is in a protected span, which the scan from data[*begin] on finds. *begin: its end, otherwise
 * `at`. `scan`: of the whole text, or NULL to scan only from there. */
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

/* Return the offset of the next of `signs` outside protected spans, or of the next TAB with *bytes 0, otherwise
 * `length`. Without a scan of the whole text, also outside brackets and quotes that open after `at`. A closing quote is
 * not a sign. */
static size_t next_sign(const char *signs, text_scan *scan, const char *data, size_t length, size_t at, size_t *bytes) {
    static const char opening[] = "( [ \xC2\xAB", closing[] = ") ] \xC2\xBB";
    size_t begin = at, open = 0;
    for (; at < length; at++) {
        *bytes = 0;
        if (data[at] == '\t') return at;
        if (open && begins_with(closing, data + at, length - at)) open--;
        else if ((!open || scan) && (*bytes = sign_of(signs, data, length, at))) {
            if (!is_kept(scan, data, length, &begin, at)) return at;
            at = begin - 1;
        } else open += begins_with(opening, data + at, length - at) > 0;
    }
    return length;
}

size_t text_cell(const char *data, size_t length, int spans, int *separates) {
    size_t at = over_space(data, length, 0), bytes;
    for (*separates = 0; spans && (bytes = sign_of(separators, data, length, at)); *separates = 1)
        at = over_space(data, length, at + bytes);
    if (*separates) return at;
    at = next_sign(spans ? separators : "", NULL, data, length, at, &bytes);
    return bytes ? at : over_space(data, length, at);
}

size_t text_sign(text_scan *scan, size_t at, size_t *bytes) {
    const char *const data = scan->data;
    const size_t length = scan->length;
    at = over_space(data, length, at); /* a sign before all words separates nothing */
    while ((*bytes = sign_of(between, data, length, at))) at = over_space(data, length, at + *bytes);
    do at = next_sign(between, scan, data, length, at, bytes);
    while (at < length && !*bytes && ++at);
    return over_space(data, length, at + *bytes) < length ? at : length;
}

size_t text_sentence(const char *data, size_t length) {
    static const char ends[] = ". ! ? \xE2\x80\xA6",
                      wide[] = "\xE3\x80\x82 \xEF\xBC\x81 \xEF\xBC\x9F"; /* full stops of Chinese and Japanese */
    static const char closing[] = ") ] } \" ' \xC2\xBB \xE2\x80\x9D \xE2\x80\x99 \xE2\x80\x9C \xE3\x80\x8D";
    for (size_t at = 0, n; at < length; at++) {
        size_t end = at, next;
        int spaced = 1; /* the sentence must be followed by white space */
        if ((n = begins_with(wide, data + at, length - at))) spaced = 0;
        else if (!(n = begins_with(ends, data + at, length - at))) continue;
        for (; n; n = begins_with(spaced ? ends : wide, data + end, length - end)) end += n;
        const int alone = data[at] == '.' && end == at + 1;
        if (length - end > 2 && memcmp(data + end, " \xC2\xBB", 3) == 0) end += 3; /* French quotes */
        while ((n = begins_with(closing, data + end, length - end))) end += n;
        for (next = end; next < length && is_space(data[next]); next++) {}
        if (next == length) return length;
        if (spaced && (next == end || begins_with(ends, data + next, length - next) || is_small(data, length, next) ||
                       is_exchange(data, length, end, next) || (alone && is_abbreviated(data, length, at, next))))
            at = end - 1;
        else return next;
    }
    return length;
}

/* Return the bytes without a space, and whether they are not language: many, few of them non-ASCII letters. Stops as
 * soon as this is known. */
static size_t run(const char *data, size_t length, int *verbatim) {
    size_t n = 0, ascii = 0;
    for (; n < length && n <= 4 * RUN && !is_space(data[n]); n++) ascii += (unsigned char)data[n] < 0x80;
    *verbatim = n > RUN && ascii > n / 2;
    while (*verbatim && n < length && !is_space(data[n])) n++;
    return n;
}

/* Return 1 if data[at] ends a clause, 2 if it does so even without white space. *bytes: of the sign. */
static int ends_clause(const char *data, size_t length, size_t at, size_t *bytes) {
    static const char marks[] = "; : , \xE2\x80\x93 \xE2\x80\x94 - \xD8\x8C",
                      wide[] = "\xEF\xBC\x8C \xEF\xBC\x9B \xE3\x80\x81 \xEF\xBC\x9A";
    if ((*bytes = begins_with(wide, data + at, length - at))) return 2;
    return (*bytes = begins_with(marks, data + at, length - at)) > 0;
}

size_t text_clause(const char *data, size_t length, size_t limit, int spans, int *verbatim) {
    size_t at = over_space(data, length, 0), clause = 0, word = 0, any = 0, bytes, seen;
    *verbatim = 0;
    if (length <= limit) limit = length;
    text_scan scan = text_scan_begin(data, text_utf8_cut(data, length, limit + LONGEST_SPAN));
    seen = at + run(data + at, length - at, verbatim); /* the end of an examined run */
    if (*verbatim) return over_space(data, length, seen);
    while (at < limit) {
        if (is_space(data[at])) {
            word = at = over_space(data, length, at);
            int no_language;
            if (at >= seen) seen = at + run(data + at, length - at, &no_language);
            else no_language = 0;
            if (no_language) return word;
            continue;
        }
        const int ends = ends_clause(data, length, at, &bytes);
        if (ends && at + bytes <= limit && (ends == 2 || (at + bytes < length && is_space(data[at + bytes]))))
            clause = over_space(data, length, at + bytes);
        if (!spans || text_span_next(&scan, at, &bytes) == TEXT_SPAN_NONE) character(data, length, at, &bytes);
        at += bytes;
        if (at <= limit) any = at;
    }
    if (limit == length) return length;
    if (clause > limit / 4) return clause;
    if (word) return word;
    return any && seen > RUN ? any : over_space(data, length, at > seen ? at : seen);
}

size_t text_before_mark(const char *data, size_t length) {
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

size_t text_half(const char *data, size_t length, int spans) {
    int verbatim;
    while (length && is_space(data[length - 1])) length--;
    const size_t sign = behind_sign(data, length);
    if (sign) return sign;
    const size_t half = length ? text_clause(data, length, length / 2, spans, &verbatim) : 0;
    return half < length ? half : 0;
}
