"""Read the tokeniser of a checkpoint in Hugging Face's layout (transformer.md, section 5).

    read_tokens(folder, m)    m: family, vocabulary, eos, pad as hf.py read them from config.json

NLLB    sentencepiece.bpe.model splits texts; ids are piece numbers + 1, after 0 to 3: <s> <pad> </s> <unk>
M2M-100 sentencepiece.bpe.model splits texts, vocab.json maps pieces to ids; language codes __xx__ have the next ids
Marian  source.spm splits, target.spm joins, vocab.json maps the pieces of both to ids; with separate_vocabs vocab.json
        maps source pieces and target_vocab.json target pieces; language codes are entries >>xx<<

SMaLL-100 (by tokenizer_class) has M2M-100's files, but its sources begin with the target language, and no token is
forced. If some of the files are missing, conversion fails without --ids-only. Settings that would make transformers
split texts differently from the engine are rejected by name: NLLB's legacy_behaviour, plain added tokens, sampling,
other classes and special tokens, unknown keys.
"""
import os
import re

import numpy as np

import moefile
import tfbundle
from hf_json import contents, read_json, short
from moefile import FormatError

NORMAL, UNKNOWN, CONTROL = 1, 2, 3
NORMALISER = 3  # field that follows the pieces of a SentencePiece model
TRUNCATED = "truncated: a SentencePiece model without its normaliser; download it again"
NO_TOKENS = {"tokenizer.kind": "none", "source.tag": 0}
LARGEST_MODEL = 32 << 20  # equals SPM_MAX_MODEL in spm.h
MAX_PIECES = 1 << 20
# Languages in id order, from fairseq's dictionaries, for checkpoints whose files do not list them.
NLLB_CODES = """
ace_Arab ace_Latn acm_Arab acq_Arab aeb_Arab afr_Latn ajp_Arab aka_Latn amh_Ethi apc_Arab arb_Arab ars_Arab ary_Arab
arz_Arab asm_Beng ast_Latn awa_Deva ayr_Latn azb_Arab azj_Latn bak_Cyrl bam_Latn ban_Latn bel_Cyrl bem_Latn ben_Beng
bho_Deva bjn_Arab bjn_Latn bod_Tibt bos_Latn bug_Latn bul_Cyrl cat_Latn ceb_Latn ces_Latn cjk_Latn ckb_Arab crh_Latn
cym_Latn dan_Latn deu_Latn dik_Latn dyu_Latn dzo_Tibt ell_Grek eng_Latn epo_Latn est_Latn eus_Latn ewe_Latn fao_Latn
pes_Arab fij_Latn fin_Latn fon_Latn fra_Latn fur_Latn fuv_Latn gla_Latn gle_Latn glg_Latn grn_Latn guj_Gujr hat_Latn
hau_Latn heb_Hebr hin_Deva hne_Deva hrv_Latn hun_Latn hye_Armn ibo_Latn ilo_Latn ind_Latn isl_Latn ita_Latn jav_Latn
jpn_Jpan kab_Latn kac_Latn kam_Latn kan_Knda kas_Arab kas_Deva kat_Geor knc_Arab knc_Latn kaz_Cyrl kbp_Latn kea_Latn
khm_Khmr kik_Latn kin_Latn kir_Cyrl kmb_Latn kon_Latn kor_Hang kmr_Latn lao_Laoo lvs_Latn lij_Latn lim_Latn lin_Latn
lit_Latn lmo_Latn ltg_Latn ltz_Latn lua_Latn lug_Latn luo_Latn lus_Latn mag_Deva mai_Deva mal_Mlym mar_Deva min_Latn
mkd_Cyrl plt_Latn mlt_Latn mni_Beng khk_Cyrl mos_Latn mri_Latn zsm_Latn mya_Mymr nld_Latn nno_Latn nob_Latn npi_Deva
nso_Latn nus_Latn nya_Latn oci_Latn gaz_Latn ory_Orya pag_Latn pan_Guru pap_Latn pol_Latn por_Latn prs_Arab pbt_Arab
quy_Latn ron_Latn run_Latn rus_Cyrl sag_Latn san_Deva sat_Beng scn_Latn shn_Mymr sin_Sinh slk_Latn slv_Latn smo_Latn
sna_Latn snd_Arab som_Latn sot_Latn spa_Latn als_Latn srd_Latn srp_Cyrl ssw_Latn sun_Latn swe_Latn swh_Latn szl_Latn
tam_Taml tat_Cyrl tel_Telu tgk_Cyrl tgl_Latn tha_Thai tir_Ethi taq_Latn taq_Tfng tpi_Latn tsn_Latn tso_Latn tuk_Latn
tum_Latn tur_Latn twi_Latn tzm_Tfng uig_Arab ukr_Cyrl umb_Latn urd_Arab uzn_Latn vec_Latn vie_Latn war_Latn wol_Latn
xho_Latn ydd_Hebr yor_Latn yue_Hant zho_Hans zho_Hant zul_Latn
""".split()
M2M_CODES = """
af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy id ig
ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so
sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu
""".split()
CODES = {"m2m100": M2M_CODES, "wmt21": "en ha is ja cs ru zh de".split()}  # values of language_codes


def parse_pieces(data, path):
    """Return [(piece, type)] of a SentencePiece model."""
    pieces, whole = [], False
    try:
        for number, value in tfbundle.fields(data):
            whole = whole or number == NORMALISER and isinstance(value, bytes)
            if number in (2, NORMALISER, 5) and isinstance(value, bytes):  # settings, which must be whole
                list(tfbundle.fields(value))
            if number == 1 and isinstance(value, bytes):
                about = dict(tfbundle.fields(value))
                pieces.append((about[1].decode(), about.get(3, NORMAL)))
                if not about[1] or b"\0" in about[1]:
                    raise FormatError("invalid piece")
                if len(pieces) > MAX_PIECES:
                    break
    except (FormatError, KeyError, AttributeError, TypeError, UnicodeDecodeError):
        raise FormatError(f"{path}: not a SentencePiece model, or damaged") from None
    if len(pieces) > MAX_PIECES:
        raise FormatError(f"{path}: more than {MAX_PIECES} pieces")
    if not pieces:
        raise FormatError(f"{path}: not a SentencePiece model: no pieces")
    if not whole:
        raise FormatError(f"{path}: {TRUNCATED}")
    return pieces


def read_pieces(path):
    """Return (bytes of a SentencePiece model, [(piece, type)])."""
    data = moefile.read_bounded(path, LARGEST_MODEL, "a SentencePiece model")
    return data, parse_pieces(data, path)


def read_vocabulary(path, size, **wanted):
    """Read {piece: id} from vocab.json. Ids must be unique and within the vocabulary, and agree with `wanted`."""
    vocabulary = read_json(path)
    ids = list(vocabulary.values())
    if not all(type(i) is int and 0 <= i < size for i in ids):
        raise FormatError(f"{path}: ids must be integers below {size}, the model's vocabulary")
    if len(set(ids)) != len(ids):
        raise FormatError(f"{path}: two pieces have the same id")
    for piece, i in wanted.items():
        if vocabulary.get(piece) != i:
            raise FormatError(f"{path}: {piece} has id {vocabulary.get(piece)}, but {i} in config.json")
    for piece in ("</s>", "<unk>"):
        if piece not in vocabulary:
            raise FormatError(f"{path}: {piece} is missing")
    return vocabulary


def names_of(vocabulary, size, path):
    """Return a list of pieces by id; "" marks unused ids."""
    if size > moefile.MAX_TEXTS:
        raise FormatError(f"{path}: {size} tokens; the limit of a model file is {moefile.MAX_TEXTS}")
    names = {i: piece for piece, i in vocabulary.items()}
    return [names.get(i, "") for i in range(size)]


def sources_meta(m, end):
    """Return the metadata of a model with separate source ids."""
    return {"source.vocab.size": m.source_vocabulary, "source.token.eos": end}


def read_file(folder, name):
    """Return a JSON file of the folder, or {} if it is missing."""
    path = os.path.join(folder, name) if folder else ""
    return read_json(path) if os.path.lexists(path) else {}


def added_ids(values):
    """Return {token: id or None} of the tokens that a tokeniser's file adds to the SentencePiece model."""
    found, added, more = {}, values.get("added_tokens_decoder"), values.get("added_tokens")
    for i, about in added.items() if isinstance(added, dict) else ():
        found.update(dict.fromkeys(contents([about]), int(i) if re.fullmatch("[0-9]{1,9}", i) else None))
    for about in more if isinstance(more, list) else ():
        i = about.get("id") if isinstance(about, dict) else None
        found.update(dict.fromkeys(contents([about]), i if type(i) is int else None))
    for token in contents(values.get("additional_special_tokens")):
        found.setdefault(token)
    return found


def tokeniser_files(folder):
    """Yield (file name, {added token: id or None}) in transformers' order."""
    for name in "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json":
        yield name, added_ids(read_file(folder, name))
    added = read_file(folder, "added_tokens.json")
    yield "added_tokens.json", {token: i if type(i) is int else None for token, i in added.items()}


def named_codes(folder, pattern):
    """Return {language code: id or None} in the order of the tokeniser's files; files with ids come first."""
    files = [{code[1]: i for token, i in added.items() if (code := pattern.fullmatch(token))}
             for _, added in (tokeniser_files(folder) if folder else ())]
    with_ids = [{code: i for code, i in found.items() if i is not None} for found in files]
    return next((found for found in with_ids + files if found), {})


def languages_meta(found, m, first):
    """Return the metadata of languages, given {code: id or None}. Missing ids are numbered from `first`."""
    tags = [first + i if tag is None else tag for i, tag in enumerate(found.values())]
    if not 0 <= min(tags) <= max(tags) < m.vocabulary or len(set(tags)) != len(tags):
        raise FormatError(f"tokeniser does not match the model: {len(tags)} language token ids ({min(tags)} to "
                          f"{max(tags)}) must be distinct and below {m.vocabulary}")
    return {"languages.codes": list(found), "languages.tags": np.array(tags, np.int64), "source.tag": 2,
            "target.tag": 1}


def nllb_meta(folder, m, path):
    data, pieces = read_pieces(path)
    if [kind for _, kind in pieces[:3]] != [UNKNOWN, CONTROL, CONTROL] or (m.eos, m.pad) != (2, 1):
        raise FormatError(f"{path}: not NLLB's tokeniser: wrong first tokens, or wrong </s> or <pad> in config.json")
    ids = np.arange(1, len(pieces) + 1, dtype=np.int64)
    ids[:3] = 3, 0, 2
    if len(pieces) >= m.vocabulary:
        raise FormatError(f"{path}: {len(pieces)} pieces do not match the model's {m.vocabulary} tokens")
    return {"tokenizer.model": data, "tokenizer.ids": ids, "token.unk": 3,
            **languages_meta(named_codes(folder, re.compile("([a-z]{3}_[A-Z][a-z]{3})")) or dict.fromkeys(NLLB_CODES),
                             m, len(pieces) + 1)}


def m2m_languages(folder, m, first):
    """Return {language code: id or None}. Like transformers, number the table that language_codes names."""
    path, name = os.path.join(folder, CONFIG), read_file(folder, CONFIG).get("language_codes") or "m2m100"
    if not isinstance(name, str) or name not in CODES:
        raise FormatError(f"{path}: language_codes {short(name)} is not supported: expected {', '.join(CODES)}")
    table = {code: first + i for i, code in enumerate(CODES[name])}
    found = named_codes(folder, re.compile("__([a-z]{2,3})__"))
    if first + len(table) > m.vocabulary and found:  # reduced to some languages
        return found
    for code, i in found.items():
        if i is not None and table.setdefault(code, i) != i:
            raise FormatError(f"{path}: language {code} has id {i}, but {table[code]} in the list {name} of "
                              "language_codes")
    return table


def m2m_meta(folder, m, path):
    data, pieces = read_pieces(path)
    vocabulary = read_vocabulary(os.path.join(folder, "vocab.json"), m.vocabulary, **{"</s>": m.eos, "<pad>": m.pad})
    ids = np.array([vocabulary.get(piece, -1) for piece, _ in pieces], np.int64)
    for i, (_, kind) in enumerate(pieces):
        if kind == UNKNOWN:
            ids[i] = vocabulary["<unk>"]
    return {"tokenizer.model": data, "tokenizer.ids": ids, "token.unk": vocabulary["<unk>"],
            **languages_meta(m2m_languages(folder, m, len(vocabulary)), m, len(vocabulary))}


def small100_meta(folder, m, path):
    """Return the metadata of SMaLL-100: sources begin with the target language, and targets with text."""
    return {**m2m_meta(folder, m, path), "source.tag": 1, "target.tag": 0}


def marian_meta(folder, m, _):
    source, target, path = (os.path.join(folder, x) for x in ("source.spm", "target.spm", "vocab.json"))
    meta, second = {"tokenizer.model": read_pieces(source)[0]}, read_pieces(target)[0]
    about, said = os.path.join(folder, CONFIG), read_file(folder, CONFIG)
    separate = said.get("separate_vocabs")
    if separate not in (None, False, True):
        raise FormatError(f"{about}: invalid separate_vocabs {short(separate)}")
    if separate and m.shared:
        raise FormatError(f"{about}: separate_vocabs contradicts config.json: sources and targets share an embedding")
    if separate:
        sources = read_vocabulary(path, m.source_vocabulary)
        path = os.path.join(folder, "target_vocab.json")
        vocabulary = read_vocabulary(path, m.vocabulary, **{"</s>": m.eos})
    else:
        if m.source_vocabulary != m.vocabulary:
            raise FormatError(f"{path}: {m.source_vocabulary} source tokens, but {m.vocabulary} target "
                              "tokens: set separate_vocabs in tokenizer_config.json")
        sources = vocabulary = read_vocabulary(path, m.vocabulary, **{"</s>": m.eos, "<pad>": m.pad})
    meta.update({"vocabulary.pieces": names_of(vocabulary, m.vocabulary, path), "token.unk": vocabulary["<unk>"],
                 "source.tag": 0})
    if separate:
        meta.update({**sources_meta(m, sources["</s>"]), "source.token.unk": sources["<unk>"],
                     "source.pieces": names_of(sources, m.source_vocabulary, path)})
    if second != meta["tokenizer.model"]:
        meta["tokenizer.target_model"] = second
    codes = {piece[2:-2]: i for piece, i in sorted(sources.items(), key=lambda x: x[1])
             if re.fullmatch(">>[^<>]+<<", piece)}
    if codes:
        meta.update({"languages.codes": list(codes), "languages.tags": np.array(list(codes.values()), np.int64),
                     "source.tag": 1})
    for side, key in ("sources", "source_lang"), ("targets", "target_lang"):  # needed for pivot translation
        code = said.get(key)
        is_code = isinstance(code, str) and re.fullmatch("[a-z]{2,3}(_[A-Z][a-z]{3})?", code)
        if is_code and not (codes and side == "targets"):
            meta[f"languages.{side}"] = [code]
    return meta


def t5_meta(folder, m, path):
    """Return the metadata of T5: ids are piece numbers; sources begin with <2xx> in models with such pieces."""
    data, pieces = read_pieces(path)
    names = [piece for piece, _ in pieces]
    if len(names) > m.vocabulary or m.eos >= len(names) or names[m.eos] != "</s>":
        raise FormatError(f"{path}: {len(names)} pieces do not match the model's {m.vocabulary} tokens and </s> "
                          f"{m.eos}")
    unknown = [i for i, (_, kind) in enumerate(pieces) if kind == UNKNOWN]
    pattern = re.compile("<2([a-z]{2,3}([-_][A-Za-z]+)*)>")
    codes = {code[1]: i for i, piece in enumerate(names) if (code := pattern.fullmatch(piece))}
    meta = {"tokenizer.model": data, "token.unk": unknown[0] if unknown else -1, "source.tag": 0}
    if codes:
        meta.update({"languages.codes": list(codes), "languages.tags": np.array(list(codes.values()), np.int64),
                     "source.tag": 1})
    return meta


ORDINARY = re.compile("<s>|</s>|<unk>|<pad>|<mask>|<special[0-9]*>|madeupword[0-9]+|__[a-z]{2,3}__|"
                      "<extra_id_[0-9]+>|<2[A-Za-z_-]+>|"
                      "[a-z]{3}_[A-Z][a-z]{3}|>>[^<>]+<<")  # tokens that never split a text
# Keys with only one supported meaning, listed with its synonyms.
SETTINGS = {"legacy_behaviour": (None, False), "sp_model_kwargs": (None, {}), "do_lower_case": (None, False),
            "auto_map": (None,), "extra_special_tokens": (None, {}, []), "unk_token": (None, "<unk>"),
            "bos_token": (None, "<s>"), "eos_token": (None, "</s>"), "pad_token": (None, "<pad>"),
            "add_bos_token": (None, False), "add_eos_token": (None, True)}
ADVICE = {"legacy_behaviour": ": sources end with </s> and the language; set it to false if the model was trained with "
                              "the language first", "auto_map": ": code in checkpoints is never run"}
# Keys that are read elsewhere, and keys without effect: names of files, limits and defaults of calls, and
# clean_up_tokenization_spaces, which removes spaces before punctuation from translations.
KNOWN = set("""
    tokenizer_class language_codes added_tokens_decoder additional_special_tokens separate_vocabs source_lang
    target_lang sep_token cls_token mask_token src_lang tgt_lang vocab vocab_file spm_file source_spm target_spm
    target_vocab_file tokenizer_file special_tokens_map_file name_or_path init_inputs model_max_length max_length
    truncation truncation_side truncation_strategy stride padding padding_side pad_to_multiple_of pad_token_type_id
    return_token_type_ids return_attention_mask return_tensors model_input_names use_fast processor_class
    num_madeup_words extra_ids clean_up_tokenization_spaces split_special_tokens add_prefix_space from_slow legacy
    verbose backend is_local local_files_only revision chat_template transformers_version""".split())


def check_settings(folder):
    """Reject settings that make transformers split or join texts differently from the engine."""
    for name, added in tokeniser_files(folder):
        path = os.path.join(folder, name)
        for token in added:
            if not ORDINARY.fullmatch(token):
                raise FormatError(f"{path}: added token {short(token)} is not supported, because it splits texts")
        for key, value in read_file(folder, name).items() if name in (CONFIG, "special_tokens_map.json") else ():
            plain = (contents([value]) or [value])[0]
            if key in SETTINGS and plain not in SETTINGS[key]:
                raise FormatError(f"{path}: {key} is {short(plain)}, which is not supported" + ADVICE.get(key, ""))
            if key not in SETTINGS and key not in KNOWN and value is not None:
                raise FormatError(f"{path}: unknown key {short(key)} with value {short(value)}: remove it if texts do "
                                  "not depend on it")


def no_tokeniser(missing, unread=()):
    """Reject a text model without a tokeniser; unread: parts of one that were found."""
    raise FormatError(f"no tokeniser: {' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing" +
                      f"; found only {' and '.join(unread)}" * bool(unread) +
                      ". To convert a model that accepts token ids only, use --ids-only")


# Names of files with the pieces of a tokeniser
PIECES = re.compile(r"tokenizer\.(json|model)|.*vocab.*\.(json|txt|yml)|merges\.txt|.*(spiece|sentencepiece).*\.model|"
                    r".*\.(spm|tiktoken|bpe)")


def pieces_in(folder):
    """Return the names of files with pieces in a folder."""
    return sorted(name for name in os.listdir(folder) if PIECES.fullmatch(name))


CONFIG = "tokenizer_config.json"
SPM = "sentencepiece.bpe.model"
# Classes of transformers for each family, with the function that reads their files and the files that it requires. The
# default is the first class with the fewest missing files.
M2M, NLLB = (m2m_meta, (SPM, "vocab.json")), (nllb_meta, (SPM,))
CLASSES = {"m2m": {"M2M100Tokenizer": M2M, "NllbTokenizer": NLLB, "SMALL100Tokenizer": (small100_meta, M2M[1])},
           "mixture": {"NllbTokenizer": NLLB},
           "marian": {"MarianTokenizer": (marian_meta, ("source.spm", "target.spm", "vocab.json"))},
           "t5": {"T5Tokenizer": (t5_meta, ("spiece.model",))}}


def class_of(folder, m, there):
    """Return (function, required files) of the tokeniser's class."""
    classes, given = CLASSES[m.family], read_file(folder, CONFIG).get("tokenizer_class") or m.tokenizer_class
    if given is None:
        return min(classes.values(), key=lambda x: len(set(x[1]) - there))
    name = given.removesuffix("Fast") if isinstance(given, str) else given
    if not isinstance(name, str) or name not in classes:
        raise FormatError(f"{folder}: tokenizer_class {short(given)} is not supported for this model: expected "
                          f"{' or '.join(classes)}")
    return classes[name]


def read_tokens(folder, m, ids_only=False):
    """Return the metadata of a folder's tokeniser, or of a model that accepts ids only."""
    if ids_only:
        return {**NO_TOKENS, **(sources_meta(m, m.eos) if m.source_vocabulary != m.vocabulary else {})}
    there = pieces_in(folder)
    read, wanted = class_of(folder, m, set(there))
    missing = [name for name in wanted if name not in there]
    if missing:
        no_tokeniser(missing, there)
    check_settings(folder)
    return {"tokenizer.kind": "sentencepiece", **read(folder, m, os.path.join(folder, wanted[0]))}
