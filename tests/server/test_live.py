#!/usr/bin/env python3
"""POST /live: texts that grow, in sessions.

Usage: tests/python tests/server/test_live.py      (BIN is the folder of the programs)

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`.
"""
import json
import sys
import tempfile
import threading

from suite import Suite
from test_server import serving

test = Suite()


def post(server, q, session=None, state="growing", target="de", **more):
    """Return the status and the events of a request, or its error."""
    body = {"q": q, "source": "en", "target": target, "state": state, **({"session": session} if session else {}), **more}
    status, answer = server.ask("/live", body)
    if status != 200:
        return status, answer["error"]
    events = answer.split("\n\n")
    assert events.pop() == "" and all(x.startswith("data: ") for x in events), answer
    return status, [json.loads(x[6:]) for x in events]


def translated(server, q):
    return server.translate(q)[1]["translatedText"]


@test
def a_text_grows():
    line = "The contract was signed yesterday in Lisbon. When does the train leave?"
    with serving() as server:
        words, session, shown = line.split(), None, []
        for n in range(1, len(words) + 1):
            status, events = post(server, " ".join(words[:n]), session)
            session = session or events[0]["session"]
            assert status == 200 and events and all(x["session"] == session and not x["final"] for x in events), events
            shown.append(events[-1])
        assert [x["translation"] for x in shown[:2]] == ["", ""] and shown[2]["translation"], shown
        assert shown[6]["stable"] == translated(server, "The contract was signed yesterday in Lisbon."), shown[6]
        assert post(server, line + " So", session, "paused")[1][-1]["translation"].startswith(shown[6]["stable"])
        status, events = post(server, line, session, "final")
        assert events[-1]["final"] and events[-1]["translation"] == translated(server, line), events
        assert post(server, "Yes.", session)[1][-1]["translation"] == "Ja."  # the next text
        assert post(server, "Yes.", session, "final", "fr")[1][-1]["translation"] == "Oui."  # other languages begin again


@test
def requests_of_one_session_meet():
    """Only one request works; a final one takes over. All end."""
    text = "The contract was signed yesterday in Lisbon by both of the ministers who had met there. " * 8
    with serving() as server:
        session = post(server, "", None)[1][0]["session"]
        found, cuts = {}, [(n, "growing") for n in range(90, len(text), 97)] + [(len(text), "final")]
        threads = [threading.Thread(target=lambda n=n, state=state: found.update({n: post(server, text[:n], session, state)}))
                   for n, state in cuts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert len(found) == len(cuts) and all(status == 200 and events for status, events in found.values()), found
        status, events = post(server, text, session, "final")
        assert events[-1]["final"] and events[-1]["translation"] == translated(server, text), events


@test
def bad_requests_are_refused():
    with serving() as server:
        session = post(server, "a", None)[1][0]["session"]
        for wanted, arguments, more in (
            (404, ("a", "0" * 32), {}), (404, ("a", session + "x"), {}), (400, ("a", session, "over"), {}),
            (400, ("a", session), {"target": "xx"}), (400, (["a", "b"], session), {}), (400, ("a\0b", session), {}),
            (413, ("a" * 20000, session), {}),
        ):
            status, error = post(server, *arguments, **more)
            assert status == wanted and error, (arguments, status, error)
        assert server.ask("/live")[0] == 405


@test
def sessions_are_limited():
    with serving() as server:
        sessions = [post(server, "a", None)[1][0]["session"] for _ in range(66)]
        assert len(set(sessions)) == 66
        assert [post(server, "a", x)[0] for x in sessions] == [404] * 2 + [200] * 64  # the oldest have ended


@test
def sessions_belong_to_their_key():
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:
        keys.write("one\ntwo\t30\n")
        keys.flush()
        with serving("--api-keys", keys.name) as server:
            assert post(server, "a")[0] == 403
            session = post(server, "a", api_key="one")[1][0]["session"]
            assert post(server, "a", session, api_key="two")[0] == 404
            assert post(server, "a", session, api_key="one")[0] == 200
            assert post(server, "It rains today.", None, "final", api_key="two")[0] == 200
            status, error = post(server, "It rains tomorrow.", None, "final", api_key="two")
            assert status == 429 and "limit" in error, error


if __name__ == "__main__":
    sys.exit(test.run(*sys.argv[1:2]))
