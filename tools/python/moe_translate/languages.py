"""Language tags for documents, from the codes of models: "de", "pt_BR" or "deu_Latn"."""

import locale
import re

THREE = dict(
    pair.split("=")
    for pair in "afr=af amh=am arb=ar ara=ar azj=az bel=be ben=bn bos=bs bul=bg cat=ca ces=cs cym=cy dan=da deu=de "
    "cmn=zh ell=el eng=en epo=eo est=et eus=eu fin=fi fra=fr gle=ga glg=gl guj=gu hau=ha heb=he hin=hi hrv=hr hun=hu "
    "hye=hy ibo=ig ind=id isl=is ita=it jpn=ja kan=kn kat=ka kaz=kk khm=km kir=ky kor=ko lao=lo lit=lt lvs=lv mal=ml "
    "mar=mr mkd=mk mlt=mt mya=my nld=nl nno=nn nob=nb npi=ne oci=oc pan=pa pes=fa pol=pl por=pt ron=ro rus=ru slk=sk "
    "slv=sl spa=es srp=sr swe=sv swh=sw tam=ta tel=te tgl=tl tha=th tur=tr ukr=uk urd=ur uzn=uz vie=vi zho=zh zsm=ms "
    "zul=zu".split()
)
RIGHT_TO_LEFT = set(
    "ar arb ary arz acm acq aeb ajp apc ars fa pes prs he heb ur urd ps pbt yi ydd dv ug uig sd snd ckb ks".split()
)


def two_letters(target):
    """Normalise a code: "de" for "deu_Latn", "pt_BR" for "pt-BR", "zh_Hant" for "zho_Hant" (not the default script),
    "yue" for "zh-yue" (Cantonese). Return other unknown codes unchanged."""
    parts = target.replace("-", "_").split("_")
    first, rest = THREE.get(parts[0].lower(), parts[0].lower()), [part.lower() for part in parts[1:]]
    if first == "zh" and "yue" in rest:
        first = "yue"
    script = "_Hant" if first == "zh" and "hant" in rest else ""
    return first + script + "".join("_" + part.upper() for part in rest[:2] if len(part) == 2)


CODE = re.compile(r"[a-z]{2,3}(?:[-_][A-Z][a-z]{3})?(?:[-_][A-Z]{2}|[-_]\d{3})?")
KNOWN = {*THREE, *THREE.values()} | set(
    "co fy gd ku la lb mi mg no ny or ps qu rm rw sa sc sd si so sq st su tk tt ug wo xh yi yo za".split()
)
SAME = {"no": "nb", "nn": "nb", "iw": "he", "in": "id", "mo": "ro", "fil": "tl", "ji": "yi"}


def primary(code):
    language = two_letters(code.strip()).split("_")[0].split(".")[0].split("@")[0]
    return SAME.get(language, language)


def renamed(code, source, target):
    """Return the code that replaces `code` in a translated document, with the same separator: pt_BR for en_US,
    pt-BR for en-US. None if it is not a language code (that of `source`, if given) or need not change."""
    if not target or not CODE.fullmatch(code) or primary(code) == primary(target):
        return None
    known = primary(code) == primary(source) if source else re.split("[-_]", code)[0] in KNOWN
    return two_letters(target).replace("_", "_" if "_" in code else "-") if known else None


def declared(code, target, filled):
    """Return whether a file that declares the language `code` must declare `target` instead. filled: the file keeps
    some of its translations, which must not be mixed with translations into another language."""
    if not target or code and primary(code) == primary(target):
        return False
    if code.strip() and filled:
        raise ValueError(
            f"the file's translations are in {code!r}, not {target!r}: pass -t {code}, or --overwrite to replace them"
        )
    return True


def right_to_left(target):
    return bool(target) and target.replace("-", "_").split("_")[0].lower() in RIGHT_TO_LEFT


def locale_of(target):
    """Return a tag with a region, as office programs expect: "de-DE" for "de"."""
    code = two_letters(target)
    usual = locale.normalize(code).split(".")[0]
    known = "_" not in code and re.fullmatch(r"[a-z]+_(?!AA|XX)[A-Z]{2}", usual)
    return (usual if known else code).replace("_", "-")


def is_asian(target):
    """Return whether office programs store a language separately, as East Asian."""
    return two_letters(target).split("_")[0] in ("zh", "yue", "ja", "ko")


def same_language(one, other):
    """Return whether two tags have the same language, such as en and en-GB."""
    return primary(one) == primary(other)
