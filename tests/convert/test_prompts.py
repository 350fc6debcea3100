#!/usr/bin/env python3
"""Test the prompts of decoder-only models: chat templates are split, model files
store wordings and languages, and unsupported templates are rejected.

Usage: tests/python tests/convert/test_prompts.py [--only NAME]
"""
import argparse
import json
import os
import sys
import tempfile

from suite import Skip, Suite

try:
    import byte_bpe
    import prompts
except ImportError:  # prompts.py requires NumPy
    prompts = None
try:
    import jinja2
except ImportError:
    jinja2 = None
try:
    import transformers
    if transformers.__version__ != "4.57.6":
        transformers = None
except ImportError:
    transformers = None
test = Suite()
template_test = test.needs(prompts and jinja2, "NumPy, or jinja2")
oracle_test = test.needs(prompts and transformers, "transformers 4.57.6")

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SHARED = os.path.join(ROOT, "..", "shared", "llm")
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
# Templates that resemble those of each family, written for this test from llm.md, section 5.
REASONS = """{%- if reasoning_effort is not defined %}{% set reasoning_effort = 'high' %}{%- endif %}
{{- bos_token + '<mode>' + reasoning_effort }}
{%- for m in messages %}
    {% if m.role == 'user' %}
{{- '<user>' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<assistant><think>' }}{% if reasoning_effort == 'no_think' %}{{ '</think>' }}{% endif %}
{%- endif %}"""
CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""


def cut(template, family="hunyuan_v1_dense"):
    found = pieces(template, family)
    return found["prefix"], found["suffix"]


def pieces(template, family="hunyuan_v1_dense"):
    return prompts.cut(template, {**TOKENS, **prompts.settings_of(family)}, "FILE")


def complaint(template):
    try:
        return f"none: {cut(template)}"
    except prompts.FormatError as error:
        return str(error)


@template_test
def templates_are_split_at_the_users_message():
    assert cut("{{ bos_token }}{{ messages[0].content }}<e>") == ("<s>", "<e>")
    assert cut(REASONS, "hy_v3") == ("<s><mode>no_think<user>", "<assistant><think></think>")
    for family in "qwen3_moe", "llama", "hunyuan_v1_dense":
        assert cut(CHATML, family) == ("<|im_start|>user\n",
                                       "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert cut("{% for m in messages %}{% if loop.first %}{{ m['content'] | trim }}{% break %}{% endif %}{% endfor %}")


def talks(template, family="hunyuan_v1_dense"):
    """Return the pieces of a template that are needed only for several turns or for a system message."""
    return {key: text for key, text in pieces(template, family).items() if "." in key}


@template_test
def templates_may_support_system_messages_and_answers():
    """The assembled pieces must equal a whole conversation as rendered by the template."""
    user, end = "<|im_start|>user\n", "<|im_end|>\n"
    assert talks(CHATML) == {"system.prefix": "<|im_start|>system\n", "system.suffix": end + user,
                             "answer.prefix": end + "<|im_start|>assistant\n", "answer.suffix": end + user}
    default = CHATML.replace("{% for", "{% if messages[0].role != 'system' %}<d>{% endif %}{% for", 1)
    assert cut(default)[0] == "<d>" + user and talks(default) == talks(CHATML)
    assert talks(REASONS, "hy_v3") == {}  # this template uses only user messages
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    assert sorted(talks(refuses)) == ["answer.prefix", "answer.suffix"]
    once = "{% for m in messages %}{% if m.role == 'user' %}{{ '<u>' + m.content }}{% elif m.role == 'system' %}" \
           "{{ '<s>' + m.content }}{% else %}{{ m.content + (loop.index | string) }}{% endif %}{% endfor %}<a>"
    assert sorted(talks(once)) == ["system.prefix", "system.suffix"]  # the suffix differs between answers
    assert pieces(once)["end"] == "2<u>"
    template = "{{ messages | map(attribute='content') | join('|') }}"
    assert talks(template) == {"system.prefix": "", "system.suffix": "|", "answer.prefix": "|", "answer.suffix": "|"}
    whole = jinja2.Template(CHATML, trim_blocks=True).render(messages=[
        {"role": role, "content": role * 2} for role in ("system", "user", "assistant", "user")],
        add_generation_prompt=True, enable_thinking=False)
    p = pieces(CHATML)
    assert whole == (p["system.prefix"] + "systemsystem" + p["system.suffix"] + "useruser" + p["answer.prefix"] +
                     "assistantassistant" + p["answer.suffix"] + "useruser" + p["suffix"])


@template_test
def harmful_templates_are_rejected_by_name():
    for template, part in [
            ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "2 seconds"),
            ("{% set x = namespace(a='x' * 1000000) %}{% for i in range(20) %}{% set x.a = x.a + x.a %}{% endfor %}",
             "256 MB"),
            ("{% for i in range(99999) %}{{ 'a long text' * 100 }}{% endfor %}", "1048576 characters"),
            ("{% include '/etc/passwd' %}", "cannot be rendered"), ("{% import 'x' as y %}", "cannot be rendered"),
            ("{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}", "cannot be rendered"),
            ("{{ raise_exception('no system turn') }}", "no system turn"), ("{{ open('/etc/passwd') }}", "open"),
            ("{% if %}", "line 1"), ("{{ messages", "line 1"), ("{{ messages[0].content.x.y }}", "cannot be rendered"),
            ("{{ messages[0].content }}\ud800", "a lone surrogate"),
            ("\udfff{{ messages[0].content }}", "a lone surrogate"),
            ("{% for m in messages %}{% for m in messages %}{% endfor %}", "cannot be rendered")]:
        log = complaint(template)
        assert log.startswith("FILE: the chat template") and part in log and "\n" not in log, (template, log)


@template_test
def templates_must_show_the_turn_exactly_once():
    for template, part in [("{{ bos_token }}", "0 times"), ("", "0 times"),
                           ("{{ messages[0].content }}{{ messages[0].content }}", "2 times"),
                           ("{{ messages[0].content | upper }}", "0 times"),
                           ("{{ messages[0].content | e }}", "0 times"),
                           ("{{ messages[0].content | tojson }}", "0 times"),
                           ("{{ messages[0].content }}{{ messages[0].content | length }}", "depend on"),
                           ("{{ 'x' * 20000 }}{{ messages[0].content }}", "16384 bytes")]:
        log = complaint(template)
        assert part in log, (template, log)


def folder_with(**files):
    found = tempfile.TemporaryDirectory()
    for name, content in files.items():
        name = {"jinja": "chat_template.jinja", "config": "tokenizer_config.json", "card": "README.md"}[name]
        with open(os.path.join(found.name, name), "wb") as file:
            file.write(content if isinstance(content, bytes) else json.dumps(content).encode())
    return found


def meta(family="hy_v3", name="x", wanted=None, log=lambda x: None, **files):
    with folder_with(**files) as folder:
        return prompts.prompt_meta(folder, family, name, log, wanted)


@template_test
def templates_are_found_in_three_places():
    about = {"bos_token": {"content": "<s>"}, "eos_token": None,
             "chat_template": "A{{ bos_token + messages[0].content }}"}
    assert meta(config=about)["prompt.prefix"] == "A<s>"
    several = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D{{ messages[0].content }}"}]
    assert meta(config={**about, "chat_template": several})["prompt.prefix"] == "D"
    assert meta(config=about, jinja=b"B{{ messages[0].content }}C")["prompt.prefix"] == "B"
    log = []
    assert meta(config={}, log=log.append) == {} and "no chat template" in log[0]
    assert meta(config=about, wanted="none", log=log.append) == {} and "--prompts none" in log[1]
    for bad in {"config": {"chat_template": 5}}, {"jinja": b"\xff{{ messages[0].content }}"}, {"config": b"{"}:
        try:
            assert not meta(**bad), bad
        except prompts.FormatError as error:
            assert "chat_template" in str(error) or "tokenizer_config" in str(error), error


@template_test
def wordings_and_languages_match_the_family():
    template = {"jinja": b"{{ messages[0].content }}"}
    rows = {"hy_v3": {"Hy-MT2-30B-A3B": "hy_mt2"}, "qwen3_moe": {"Hy-MT2": "general"},
            "hunyuan_v1_dense": {"Hy-MT2-7B": "hy_mt2", "HY-MT1.5-7B": "hy_mt1_5", "Hunyuan-MT-7B": "hy_mt1_5"}}
    for family, names in rows.items():
        for name, row in names.items():
            assert meta(family, name, **template)["prompt.name"] == row, (family, name)
    assert meta("qwen3_moe", wanted="hy_mt2", **template)["prompt.name"] == "hy_mt2"
    try:
        assert not meta(wanted="other", **template)
    except prompts.FormatError as error:
        assert "--prompts other" in str(error) and "hy_mt2" in str(error)
    found = meta(**template)
    assert len(found["languages.codes"]) == len(set(found["languages.codes"])) == 38
    both = zip(found["languages.english"], found["languages.chinese"], strict=True)
    names = dict(zip(found["languages.codes"], both))
    assert names["zh-Hant"] == ("Traditional Chinese", "繁体中文") and names["yue"] == ("Cantonese", "粤语")
    assert names["de"] == ("German", "德语") and names["bo"] == ("Tibetan", "藏语")
    for row in prompts.data()["rows"]:
        assert any(key.startswith("plain.") for key in row["wordings"]), row
        for key, text in row["wordings"].items():
            assert text.count("{source_text}") == 1 and "{target_lang}" in text, (row["name"], key)
            assert "languages" in row or "{source_lang}" not in text, row["name"]
        codes = [code for code, *_ in row.get("languages", prompts.data()["languages"])]
        assert len(codes) == len(set(codes)), row["name"]


# Names of models, languages, a text, and the user's turn as in the authors' examples.
PANTS = "Una camisa, un pantalón vaquero y una canción"
EXAMPLES = (
    ("LMT-60-8B", "qwen3", "en", "zh", "The concept came from China where plum blossoms were the flower of choice.",
     "Translate the following text from English into Chinese:\nEnglish: The concept came from China where plum blossoms "
     "were the flower of choice.\nChinese:"),
    ("MiLMMT-46-4B-v1.0", "llama", "zh", "en", "我爱机器翻译",
     "Translate this from Chinese (Simplified) to English:\nChinese (Simplified): 我爱机器翻译\nEnglish:"),
    ("Seed-X-PPO-7B", "mistral", "en", "zh", "May the force be with you",
     "Translate the following English sentence into Chinese:\nMay the force be with you <zh>"),
    ("salamandraTA-7b-instruct", "llama", "es", "ca", PANTS,
     f"Translate the following text from Spanish into Catalan.\nSpanish: {PANTS} \nCatalan:"),
    ("EuroLLM-1.7B-Instruct", "llama", "en", "pt", "I am a language model for european languages.",
     "Translate the following English source text to Portuguese:\nEnglish: I am a language model for european languages. "
     "\nPortuguese: "),
    ("TowerInstruct-7B-v0.2", "llama", "pt", "en", "Olá.",
     "Translate the following text from Portuguese into English.\nPortuguese: Olá.\nEnglish:"),
    ("translategemma-4b-it", "llama", "en", "de", "Hello.",
     "You are a professional English (en) to German (de) translator. Your goal is to accurately convey the meaning and "
     "nuances of the original English text while adhering to German grammar, vocabulary, and cultural sensitivities.\n"
     "Produce only the German translation, without any additional explanations or commentary. Please translate the "
     "following English text into German:\n\n\nHello."))


@template_test
def turns_match_the_examples_of_the_authors():
    for name, family, source, target, text, wanted in EXAMPLES:
        found = meta(family, name, jinja=b"{{ messages[0].content }}", config={"bos_token": "<s>"})
        names = dict(zip(found["languages.codes"], found["languages.english"], strict=True))
        turn = found["prompt.plain.en"]
        for mark, value in (("source_lang", names[source]), ("target_lang", names[target]), ("source_code", source),
                            ("target_code", target), ("source_text", text)):
            turn = turn.replace("{" + mark + "}", value)
        assert turn == wanted, (name, turn)
    wanted = {"Marco-Mini-Instruct": ("marco", "qwen3_moe", 29), "LMT-60-0.6B": ("lmt", "qwen3", 60),
              "MiLMMT-46-1B-v0.1": ("milmmt", "llama", 46), "Qwen3-8B": ("general", "qwen3", 38)}
    for name, (row, family, count) in wanted.items():
        found = meta(family, name, jinja=b"{{ messages[0].content }}", config={"bos_token": "<s>"})
        assert (found["prompt.name"], len(found["languages.codes"])) == (row, count), found["prompt.name"]


@template_test
def authors_of_some_models_use_no_template_or_no_settings():
    thinks = b"{{ 'U' + messages[0].content + 'A' }}{% if enable_thinking is false %}{{ '<think></think>' }}{% endif %}"
    assert meta("qwen3", "Qwen3-8B", jinja=thinks)["prompt.suffix"] == "A<think></think>"
    assert meta("qwen3", "LMT-60-8B", jinja=thinks)["prompt.suffix"] == "A"
    for more in {}, {"jinja": b"{{ raise_exception('a list is expected') }}"}:
        found = meta("mistral", "Seed-X-PPO-7B", config={"bos_token": "<s>"}, **more)
        assert (found["prompt.prefix"], found["prompt.suffix"]) == ("", "") and prompts.is_bare(found)
        found = meta("llama", "translategemma-12b-it", config={"bos_token": "<bos>"}, **more)
        assert found["prompt.prefix"] == "<bos><start_of_turn>user\n" and not prompts.is_bare(found)
    try:
        meta("qwen3_moe", "translategemma")
    except prompts.FormatError as error:
        assert "bos_token, which is undefined" in str(error), error
    else:
        raise AssertionError("a prompt without its first token")
    assert meta("qwen3", "Qwen3-8B") == {}


@template_test
def languages_that_the_authors_name_are_stored():
    template = {"jinja": b"{{ messages[0].content }}"}
    for card, wanted in (
        (b"---\nlicense: mit\nlanguage:\n- en # English\n- 'fr'\ntags:\n- de\n---\n# Model\n", "en fr"),
        (b"---\nlanguage: en\n---\n", "en"), (b"---\nlanguage: [en, zh-Hant]\n---\n", "en zh-Hant"),
        (b"---\nlanguage:\n  - en\n  - multilingual\n---\n", None), (b"---\ntags: x\n---\nlanguage: en\n", None),
        (b"language: en\n", None), (b"\xff\xfe", None), (b"", None),
    ):
        assert meta("qwen3_moe", card=card, **template).get("languages.named") == wanted, card
    assert "languages.named" not in meta("hy_v3", card=b"---\nlanguage: en\n---\n", **template)  # its prompts name 38


@template_test
def wordings_match_the_published_ones():
    if not os.path.isdir(SHARED):
        raise Skip("no ../shared/llm here")
    with open(os.path.join(SHARED, "prompts.json"), encoding="utf-8") as file:
        published = json.load(file)
    for row in prompts.data()["rows"]:
        if "languages" in row and row["name"] != "marco":
            continue  # EXAMPLES has these
        of = published.get(row["name"], published["hy_mt2"])
        for key, text in row["wordings"].items():
            kind, language = key.split(".")
            assert of[kind][language] == text, (row["name"], key)


@template_test
def shared_templates_match_transformers():
    if not os.path.isdir(SHARED):
        raise Skip("no ../shared/llm here")
    families = {"hy-v3": "hy_v3", "hunyuan-dense": "hunyuan_v1_dense", "qwen3-moe": "qwen3_moe"}
    for name, family in families.items():
        found = prompts.prompt_meta(os.path.join(SHARED, name), family, name, print)
        with open(os.path.join(SHARED, name, "tokenizer_cases.json"), encoding="utf-8") as file:
            cases = json.load(file)["chat"]
        plain = [c for c in cases if len(c["messages"]) == 1]
        assert plain, name
        for case in plain:
            text = found["prompt.prefix"] + case["messages"][0]["content"] + found["prompt.suffix"]
            thinks = text.replace("<think>\n\n</think>\n\n", "")  # the expected texts do not disable Qwen3's thinking
            assert case["text"] in (text, thinks), (name, case["text"], text)


# ---- transformers ----------------------------------------------------------------------------------------------------

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
LOOP = "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}<{{ m.role }}>{{ m.content }}" \
       "{% if loop.index > 9 %}{% break %}{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
FIRST = "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}" \
        "{% set rest = messages[1:] %}{% else %}{% set system = 'Be kind' | upper %}{% set rest = messages %}" \
        "{% endif %}<<{{ system }}>>{% for m in rest %}[{{ m['content'].strip() }}]{% endfor %}"
MACRO = "{% macro turn(role, text) -%}<|{{ role }}|>{{ text | trim }}{{ '\\n' }}{%- endmacro %}" \
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ turn(m.role, m.content) }}" \
        "{% endfor %}{{ 'n' if ns.n > 99 else 'few' }}"
LAYOUT = "  {% if messages %}\n    {%- for m in messages %}\n  {% if true %}\n  {{ m.content }}\n  {% endif %}\n" \
         "    {% endfor %}\n  {# a comment #}\n{% endif %}\nend\n"
GENERATION = "{% set x = 'outer' %}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}" \
             "{% set x = 'i' %}{{ m.content }}{{ x }}\n{% endgeneration %}{% else %}<{{ m.role }}>{{ m.content }}" \
             "{% endif %}{% endfor %}{{ x }}"
JSON = "{{ {'b': 'ü<&>', 'a': [1, 2.5, none, true]} | tojson }}{{ [1, {'z': 1, 'a': 2}] | tojson(indent=2) }}" \
       "{{ {'b': 1, 'a': 'é'} | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}" \
       "{{ 'é' | tojson(true) }}"
NAMES = "".join("{{ %s_token }}|" % name for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
ADDED = {"content": "<｜User｜>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
TYPED = {**ADDED, "__type": "AddedToken"}  # as in tokenizer_config.json
THINK, OTHER = "<think>", "</think>"
GUARDED = "{% if strftime_now is defined %}{% set d = strftime_now('%B %Y') %}{% else %}{% set d = '2024' %}{% endif %}"
TEMPLATES = [  # template, tokenizer_config.json, special_tokens_map.json
    ("{% if tools is not none %}tools{% endif %}{% if documents is not none %}documents{% endif %}" + TURNS, {}, {}),
    ("{{ tools is defined }}{{ documents }}{{ tools | tojson }}{% if not tools %}none{% endif %}" + TURNS, {}, {}),
    (JSON + TURNS, {}, {}), ("{{ 5 | tojson(unknown=1) }}" + TURNS, {}, {}), (GENERATION, {}, {}),
    ("{%- generation -%} a {%- endgeneration -%}" + TURNS, {}, {}), ("{% generation %}" + TURNS, {}, {}),
    (NAMES + TURNS, {}, {"bos_token": THINK, "eos_token": ADDED}),
    (NAMES + TURNS, {"bos_token": THINK, "eos_token": OTHER}, {"eos_token": THINK, "unk_token": ADDED}),
    (NAMES + TURNS, {"bos_token": TYPED, "added_tokens_decoder": {}}, {"bos_token": THINK, "eos_token": OTHER}),
    (NAMES + TURNS, {"sep_token": THINK, "cls_token": OTHER, "mask_token": TYPED, "pad_token": None}, {}),
    (NAMES + TURNS, {"tokenizer_class": "Qwen2Tokenizer", "eos_token": OTHER}, {}),
    (NAMES + TURNS, {"tokenizer_class": "Qwen2TokenizerFast", "pad_token": None}, {"bos_token": THINK}),
    (NAMES + TURNS, {"tokenizer_class": "GPT2Tokenizer", "bos_token": OTHER}, {}),
    (NAMES + TURNS, {"tokenizer_class": "LlamaTokenizer"}, {}),
    (NAMES + TURNS, {"tokenizer_class": None}, {}),
    ("{{ additional_special_tokens[1] }}{{ additional_special_tokens | length }}" + TURNS,
     {"additional_special_tokens": [THINK, TYPED]}, {"additional_special_tokens": [OTHER, THINK]}),
    ("{{ additional_special_tokens is defined }}{{ nothing }}{{ nothing is defined }}" + TURNS, {}, {}),
    ("{{ image_token }}{{ eoi }}" + TURNS, {"extra_special_tokens": {"image_token": THINK, "eoi": OTHER}}, {}),
    (GUARDED + "Today: {{ d }}" + TURNS, {}, {}), ("{{ strftime_now('%Y') }}" + TURNS, {}, {}),
    ("{% if messages[0].role not in ['user', 'system'] %}{{ raise_exception('roles') }}{% endif %}" + TURNS, {}, {}),
    ("{{ raise_exception('never') }}" + TURNS, {}, {}),
    (LOOP, {}, {}), (FIRST, {}, {}), (MACRO, {}, {}), (LAYOUT, {}, {}),
    ("{% for m in messages %}{{ m.items() | list | length }}{{ m | dictsort | first | last }}"
     "{% if m.content is string and m is mapping %}!{% endif %}{% endfor %}", {}, {}),
    ("{% set x = [] %}{% set y = x.append(1) %}" + TURNS, {}, {}), ("{% do messages %}" + TURNS, {}, {}),
    ([{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D" + TURNS}], {}, {}),
    ([{"name": "a", "template": "A" + TURNS}, {"name": "b", "template": "B" + TURNS}], {}, {}),
    ({"default": "D" + TURNS, "rag": "R"}, {}, {})]


def add_tokens(folder, *texts):
    """Write a tokeniser with more special tokens."""
    import make_decoder
    make_decoder.write_tokeniser(folder)
    path = os.path.join(folder, "tokenizer.json")
    with open(path, encoding="utf-8") as file:
        values = json.load(file)
    values["added_tokens"] += [{"id": 430 + i, "content": text, "special": True, "single_word": False, "lstrip": False,
                                "rstrip": False, "normalized": False} for i, text in enumerate(texts)]
    with open(path, "w", encoding="utf-8") as file:
        json.dump(values, file)


@template_test
def special_tokens_that_the_tokeniser_splits_are_rejected():
    for token, part in ("<s>", "bos_token '<s>', which tokenizer.json does not add"), ("<think>", None):
        with folder_with(config={"bos_token": token}, jinja=b"{{ bos_token }}{{ messages[0].content }}") as at:
            add_tokens(at)
            added = "tokenizer.json", [x.content for x in byte_bpe.tokenizer_blob(at).added]
            try:
                found = prompts.prompt_meta(at, "llama", "x", print, None, added)
                assert found["prompt.prefix"] == token and part is None, token
            except prompts.FormatError as error:
                assert part in str(error), error


SAID = "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n\n{% endfor %}Assistant:"
TALKS = [["Hello there"], ["Be brief.", "one two"], ["one", "two", "three."], ["s", "a", "b ", " c", "d", "e\n"], [""]]


@oracle_test
def prompts_have_the_tokens_of_transformers():
    """Regression: text was tokenised apart from the template's text around it, so that " one" became two tokens."""
    import make_decoder
    from converting import convert_quietly
    from moe_translate import Model
    for template in SAID, SAID.replace("\\n\\n", "\\n"), "<think>" + SAID, SAID.replace("{{ m.content }}", "{{ m.content }}</think>"):
        with folder_with(config={"chat_template": template, "eos_token": "</think>"}) as at:
            add_tokens(at)
            make_decoder.make(at, "llama", vocab_size=512)
            there = transformers.PreTrainedTokenizerFast(tokenizer_file=at + "/tokenizer.json", chat_template=template)
            complaint = convert_quietly("--from", "hf", at, "-o", at + "/model.bin")
            assert complaint is None, (template, complaint)
            model = Model(at + "/model.bin")
            for texts in TALKS:
                roles = ["system"] * (len(texts) % 2 == 0) + ["user", "assistant"] * 3
                talk = [{"role": role, "content": text} for role, text in zip(roles, texts)]
                found, wanted = model.prompt(talk), there.apply_chat_template(talk, add_generation_prompt=True)
                assert list(found) == list(wanted), (template, texts, there.decode(found), there.decode(wanted))


@oracle_test
def templates_see_what_transformers_passes():
    """Prompts assembled from the pieces must equal apply_chat_template's; templates that fail there are rejected."""
    import make_decoder
    talk = [{"role": role, "content": f"{role} {i}: text"}
            for i, role in enumerate(["system", "user", "assistant", "user", "assistant", "user"])]
    rejected, turns = 0, 0
    for template, about, special in TEMPLATES:
        about = {"tokenizer_class": "PreTrainedTokenizerFast", **about, "chat_template": template}
        with folder_with(config=about) as at:
            add_tokens(at, "<s>", "</s>", "<unk>", "<|endoftext|>")
            make_decoder.write_config(at, make_decoder.CONFIGS["llama"])
            with open(os.path.join(at, "special_tokens_map.json"), "w", encoding="utf-8") as file:
                json.dump(special, file)
            there = transformers.AutoTokenizer.from_pretrained(at)

            def wanted(messages):
                return there.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            try:
                found = prompts.prompt_meta(at, "llama", "x", lambda message: None)
            except prompts.FormatError as error:
                assert "--prompts none" in str(error), (template, str(error))
                found = None
            try:
                text = wanted(talk[1:2])
            except Exception as error:  # noqa: BLE001 - jinja2, TypeError, ValueError
                text = f"{type(error)}"
                assert found is None, (template, text, found)
            rejected += found is None
            if found is None:
                assert text.startswith("<class"), (template, text)
                continue
            p = {key.removeprefix("prompt."): value for key, value in found.items() if key.startswith("prompt.")}
            assert p["prefix"] + talk[1]["content"] + p["suffix"] == text, (template, p["prefix"], p["suffix"], text)
            if "answer.prefix" in p and "system.prefix" in p:
                turns += 1
                text = p["system.prefix"] + talk[0]["content"] + p["system.suffix"] + talk[1]["content"]
                for answer, question in zip(talk[2::2], talk[3::2]):
                    text += p["answer.prefix"] + answer["content"] + p["answer.suffix"] + question["content"]
                assert text + p["suffix"] == wanted(talk), (template, text)
    assert len(TEMPLATES) > 30 and rejected == 6 and turns > 15, (len(TEMPLATES), rejected, turns)


@template_test
def dates_of_templates_are_noted():
    log = []
    found = meta(jinja=b"{{ strftime_now('%Y') }}{{ messages[0].content }}", log=log.append)
    assert found["prompt.prefix"] in log[0] and "date of the conversion" in log[0], (found, log)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="run tests with matching names")
    sys.exit(test.run(parser.parse_args().only))
