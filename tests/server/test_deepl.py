#!/usr/bin/env python3
"""moe-server with DeepL's own client and with the requests of immersive-translate.

Usage: tests/python tests/server/test_deepl.py      (BIN is the folder of the programs)

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`.
"""

import contextlib
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request

from suite import Suite
from test_server import LINES, MANY, SLOW, moe_translate, serving

try:
    import deepl

    deepl.http_client.max_network_retries = 0  # by default the client retries for half a minute after status 429
except ImportError:
    deepl = None

try:
    import made_up
except ImportError:  # made_up needs NumPy
    made_up = None

test = Suite()
test_client = test.needs(deepl, "deepl")
made_up_test = test.needs(made_up, "NumPy")
FORM = "application/x-www-form-urlencoded"


def client_of(server, key="a key"):
    return deepl.Translator(key, server_url=f"http://127.0.0.1:{server.port}")


@contextlib.contextmanager
def refused(kind, *words):
    try:
        yield
    except kind as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"no {kind.__name__}")


@contextlib.contextmanager
def keys_of(*lines):
    with tempfile.NamedTemporaryFile("w") as keys:
        keys.write("".join(line + "\n" for line in lines))
        keys.flush()
        yield keys.name


@test_client
def deepls_own_client_works():
    with serving() as server:
        client, wanted = client_of(server), moe_translate(LINES, "de")
        results = client.translate_text(LINES, source_lang="EN", target_lang="DE")
        assert [x.text for x in results] == wanted
        assert [x.detected_source_lang for x in results] == ["EN"] * len(LINES)
        assert [x.billed_characters for x in results] == [len(line) for line in LINES]
        one = client.translate_text(LINES[0], target_lang="de", formality="prefer_more", split_sentences="nonewlines",
                                    preserve_formatting=True, context="a library")  # fmt: skip
        assert one.text == wanted[0] and one.detected_source_lang == "EN"
        french = client.translate_text("Où est mon livre ?", target_lang="EN-GB")
        assert french.detected_source_lang == "FR" and french.text == "Where is my book?"
        assert client.translate_text("Où est mon livre ?", target_lang="EN-US").text == french.text
        assert client.translate_text([], source_lang="EN", target_lang="DE") == []


@made_up_test
def prompted_models_see_the_context():
    with tempfile.TemporaryDirectory() as folder:
        # The prompt ends with the context, and the model's answer depends only on the last letter.
        path = made_up.write(
            folder + "/model", {"a": "Anna", "b": "Bert"},
            **{"prompt.context.en": "{target_lang}: {source_text} {background_text}"})  # fmt: skip
        with serving("--threads", "1", model=path, fast=False) as server:
            for given, wanted in ((None, "Anna"), ("the b", "Bert"), ("b\nthe a\n", "Anna"), ("", "Anna")):
                more = {} if given is None else {"context": given}
                assert server.translate("the a", **more) == (200, {"translatedText": "Anna" if not given else wanted})
                body = {"text": ["the a", "the b"], "target_lang": "DE", **more}
                found = [x["text"] for x in server.ask("/v2/translate", body)[1]["translations"]]
                assert found == ([wanted] * 2 if given else ["Anna", "Bert"]), (given, found)
            lines = ("x" * 90 + "\n") * 100 + "the b"  # larger than the server's buffer for forms
            form = urllib.parse.urlencode({"q": "the a", "source": "en", "target": "de", "context": lines})
            assert server.ask("/translate", form.encode(), FORM)[1] == {"translatedText": "Bert"}
            for bad, status in ((7, 400), (["b"], 400), ("b" * 70000, 413), ("a\0b", 400)):
                assert server.translate("the a", context=bad)[0] == status, bad
            form = urllib.parse.urlencode({"q": "the a", "target": "de", "context": b"\xff"})
            assert server.ask("/translate", form.encode(), FORM)[0] == 400
            assert server.translate("the a", context=None)[1] == {"translatedText": "Anna"}
    with serving() as server:  # models without a prompt ignore the context
        assert server.translate(LINES, context="a b")[1] == {"translatedText": moe_translate(LINES, "de")}


@made_up_test
def prompts_name_the_source_that_is_given_or_detected():
    with tempfile.TemporaryDirectory() as folder:
        path = made_up.write(
            folder + "/model", {"n": "from English", "e": "from German"},
            **{"prompt.plain.en": "{target_lang}: {source_text} {source_code}"})  # fmt: skip
        with serving("--threads", "1", model=path, fast=False) as server:
            german, english = "Wo ist mein Buch, und wer hat es?", "Where is my book, and who has it?"
            for text, source, wanted in ((german, "de", "German"), (german, "en", "English"),
                                         (german, "auto", "German"), (english, "auto", "English")):  # fmt: skip
                found = server.ask("/translate", {"q": text, "source": source, "target": "en"})[1]
                assert found["translatedText"] == f"from {wanted}", (text, source, found)
            found = server.ask("/v2/translate", {"text": [german, english], "target_lang": "EN"})[1]["translations"]
            assert [x["text"] for x in found] == ["from German", "from English"], found


@test_client
def deepls_client_reads_languages_and_usage():
    with serving() as server:
        client = client_of(server)
        assert [(x.code, x.name) for x in client.get_source_languages()] == [
            ("EN", "English"), ("DE", "German"), ("FR", "French"), ("ES", "Spanish")]  # fmt: skip
        targets = client.get_target_languages()
        assert [x.code for x in targets] == ["EN-GB", "EN-US", "DE", "FR", "ES"]
        assert not any(x.supports_formality for x in targets)
        assert server.ask("/v2/languages?type=target")[1][0]["language"] == "EN-GB"
        assert server.ask("/v2/languages?type=both")[0] == 400
        before = client.get_usage().character
        client.translate_text(["Où est mon livre ?", "Es regnet."], target_lang="EN-GB")
        after = client.get_usage().character
        assert (before.count, after.count) == (0, 28) and after.limit == 10**12


@test_client
def markup_is_handled():
    with serving() as server:
        client = client_of(server)
        text = 'We have a <b>house</b> &amp; a <span translate="no">Good dog</span>.'
        got = client.translate_text(text, source_lang="EN", target_lang="DE", tag_handling="html").text
        page = {"q": text, "source": "en", "target": "de", "format": "html"}
        assert got == server.ask("/translate", page)[1]["translatedText"]
        assert got.count("<b>") == got.count("</b>") == 1 and '<span translate="no">Good dog</span>' in got, got


@test_client
def unsupported_parameters_are_refused():
    with serving() as server:
        client = client_of(server)
        for wrong, word in (
            ({"target_lang": "XX"}, "XX is not supported"),
            ({"source_lang": "XX"}, "XX is not supported"),
            ({"formality": "more"}, "'formality' is not supported for given 'target_lang'"),
            ({"formality": "less"}, "'formality' is not supported for given 'target_lang'"),
            ({"glossary": "d6bf30b0-0000-0000-0000-000000000000"}, "'glossary_id' is not supported"),
            ({"tag_handling": "docx"}, "'tag_handling' not supported"),
            ({"split_sentences": "2"}, "'split_sentences' not supported"),
            ({"style_rule": "x"}, "'style_id' is not supported"),
            ({"custom_instructions": ["Be kind."]}, "'custom_instructions' is not supported"),
        ):
            options = {"source_lang": "EN", "target_lang": "DE", **wrong}
            with refused(deepl.DeepLException, "Bad request", word):
                client.translate_text("It rains.", **options)
        assert server.ask("/v2/translate", {"target_lang": "DE"}) == (
            400, {"message": "Invalid request: missing text parameter"})  # fmt: skip
        assert "target_lang" in server.ask("/v2/translate", {"text": ["a"]})[1]["message"]


@test
def weblate_hides_placeholders_in_empty_tags():
    """Weblate's connector sends texts in this form, and requests the languages of both sides."""
    body = {"source_lang": "EN", "target_lang": "DE", "formality": "default", "tag_handling": "xml", "ignore_tags": ["x"]}
    with serving() as server:
        texts = ['The <x id="4"></x> sleeps.', "Where is my book?", "Good<br/>morning."]
        status, answer = server.ask("/v2/translate", {**body, "text": texts})
        found = [x["text"] for x in answer["translations"]]
        assert status == 200 and found[1:2] == moe_translate(texts[1:2], "de") and found[0].count('<x id="4"></x>') == 1, answer
        for wrong, tags in ("Open <x>Settings</x> now.", ["b", "x"]), ("Open <x a='b'>it</x>.", "b,x"), ("<x><x/></x>", ["x"]):
            status, answer = server.ask("/v2/translate", {**body, "text": [wrong], "ignore_tags": tags})
            assert status == 400 and "only supported for empty tags" in answer["message"], (wrong, answer)
        for kind in "source", "target":
            status, answer = server.ask(f"/v2/languages?type={kind}")
            assert status == 200 and {x["language"] for x in answer} >= {"DE", "FR"}, answer


@test
def forms_repeat_their_texts():
    """DeepL's documentation repeats the field: curl -d text=... -d text=... -d target_lang=DE."""
    with serving() as server:
        wanted = moe_translate(LINES[:2], "de")
        form = [("text", LINES[0]), ("text", LINES[1]), ("source_lang", "EN"), ("target_lang", "DE")]
        status, answer = server.ask("/v2/translate", urllib.parse.urlencode(form).encode(), FORM)
        assert status == 200 and [x["text"] for x in answer["translations"]] == wanted, answer
        assert answer["translations"][0] == {"detected_source_language": "EN", "text": wanted[0]}
        status, answer = server.ask("/v2/translate", urllib.parse.urlencode(form[1:]).encode(), FORM)
        assert [x["text"] for x in answer["translations"]] == wanted[1:]


@test_client
def keys_and_quotas_are_checked():
    with keys_of("right", "small\t20") as keys, serving("--api-keys", keys) as server:
        for call in (
            lambda client: client.translate_text("It rains.", source_lang="EN", target_lang="DE"),
            lambda client: client.get_source_languages(),
            lambda client: client.get_target_languages(),
            lambda client: client.get_usage(),
        ):
            with refused(deepl.AuthorizationException):
                call(client_of(server, "wrong"))
            call(client_of(server, "right"))
        small = client_of(server, "small")
        assert small.get_usage().character.limit == 20
        assert small.translate_text("It rains.", source_lang="EN", target_lang="DE").text == "Es regnet."
        assert small.translate_text("It snows.", source_lang="EN", target_lang="DE").text
        for wrong in ({"target_lang": "XX"}, {"formality": "more"}):  # refused requests do not count as usage
            with refused(deepl.DeepLException, "Bad request"):
                small.translate_text("ab", **{"source_lang": "EN", "target_lang": "DE", **wrong})
        assert small.get_usage().character.count == 18
        with refused(deepl.QuotaExceededException):
            small.translate_text("abc", source_lang="EN", target_lang="DE")
        small.translate_text("ab", source_lang="EN", target_lang="DE")
        usage = small.get_usage()
        assert usage.character.count == 20 and usage.any_limit_reached
        assert client_of(server, "right").get_usage().character.count == 9
        status, answer = server.ask("/translate", {"q": "a", "source": "en", "target": "de", "api_key": "small"})
        assert status == 429 and "limit has been reached" in answer["error"], (status, answer)
        form = urllib.parse.urlencode({"text": "It rains.", "target_lang": "DE", "auth_key": "right"}).encode()
        assert server.ask("/v2/translate", form, FORM)[0] == 200
        more = {"q": "It rains.", "source": "en", "target": "de", "context": "Wet é", "api_key": "right"}
        assert server.ask("/translate", more)[0] == 200
        assert client_of(server, "right").get_usage().character.count == 9 + 9 + 9 + 5  # a context counts too


@test
def untranslated_texts_do_not_count():
    """Texts in rejected requests do not count as usage. After a timeout all texts count, since some were translated."""
    options = ["--max-queue", "900", "--timeout", "2", "--set", "split=0", *SLOW]
    with keys_of("key") as keys, serving("--api-keys", keys, *options, fast=False) as server:
        def counted(q, wanted):
            """Assert that a request gets this status; return the number of characters it adds to the usage."""
            before = server.ask("/v2/usage", b"auth_key=key", FORM)[1]["character_count"]
            status, answer = server.translate(q, api_key="key")
            assert status == wanted, (status, answer)
            return server.ask("/v2/usage", b"auth_key=key", FORM)[1]["character_count"] - before

        assert counted("It rains.", 200) == 9
        assert counted(["a"] * 901, 413) == 0  # more texts than the queue holds
        assert counted(["It rains.", "dog " * 600], 400) == 0  # more tokens than the model's limit
        assert counted(MANY, 504) == sum(map(len, MANY))


@test_client
def too_many_requests_are_429():
    with serving("--rate", "1") as server:
        client_of(server).get_usage()
        with refused(deepl.TooManyRequestsException):
            client_of(server).get_usage()


@test
def invalid_quotas_are_reported():
    for line in ("\t20", "a\t", "a\t0", "a\t-1", "a\t20 b", "a\tmany"):
        with keys_of("right", line) as keys:
            try:
                with serving("--api-keys", keys):
                    raise AssertionError(f"{line!r} was taken")
            except AssertionError as error:
                assert "did not start" in str(error), error


@test
def immersive_translate_works():
    with serving() as server:
        wanted = moe_translate(LINES[:2], "de")
        body = {"source_lang": "auto", "target_lang": "de", "text_list": LINES[:2]}
        assert server.ask("/imme", body) == (
            200, {"translations": [{"detected_source_lang": "en", "text": text} for text in wanted]})  # fmt: skip
        assert server.ask("/imme", {**body, "source_lang": "en", "text_list": []}) == (200, {"translations": []})
        kept = "<b0></b0> Good morning <b1></b1> my friend {0} and {1}"
        (got,) = server.ask("/imme", {**body, "text_list": [kept]})[1]["translations"]
        assert all(got["text"].count(x) == 1 for x in ("<b0></b0>", "<b1></b1>", "{0}", "{1}")), got
        for wrong, word in (
            ({"target_lang": "xx"}, "xx is not supported"),
            ({"text_list": [1]}, "text_list must contain"),
            ({"text_list": None}, "missing text_list"),
        ):
            status, answer = server.ask("/imme", {**body, **wrong})
            assert status == 400 and word in answer["error"], answer
    with keys_of("right") as keys, serving("--api-keys", keys) as server:
        assert server.ask("/imme", body)[0] == 403
        assert server.ask("/imme?token=right", body)[0] == 200


if __name__ == "__main__":
    sys.exit(test.run())
