"""Render a chat template in a separate process: python3 template.py < REQUEST

REQUEST is JSON: {template, values, talks, needed}. The template is rendered for each list of messages in `talks`, with
the variables, functions, filters and tags of transformers' apply_chat_template; `tools` and `documents` are None. The
output is JSON: {texts, dates} or {error}; `dates` are texts that strftime_now() returned. The first `needed` talks must
succeed; the text of a later talk that fails is null. The process is limited to 2 s of processor time and 256 MB. The
template is untrusted and has no access to files or other templates.
"""
import datetime
import json
import sys

SECONDS, BYTES, LONGEST = 2, 256 << 20, 1 << 20


def limit():
    try:
        import resource
    except ImportError:
        return
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    seconds = int(used) + SECONDS + 1
    for what, most in (resource.RLIMIT_AS, BYTES), (resource.RLIMIT_CPU, seconds):
        try:
            resource.setrlimit(what, (most, most))
        except (ValueError, OSError):  # the limit is already lower, or the system (macOS) has no RLIMIT_AS
            pass


def refuse(why):
    raise ValueError(why)


def to_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment_of(dates):
    """Return the environment of templates; strftime_now() appends its results to `dates`."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}BODY{% endgeneration %} renders BODY, which has a scope of its own."""
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("body"), [], [], body).set_lineno(line)

        def body(self, caller):
            return caller()

    def now(form):
        dates.append(datetime.datetime.now().strftime(form))
        return dates[-1]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[Generation, "jinja2.ext.loopcontrols"])
    environment.globals.update(raise_exception=refuse, strftime_now=now)
    environment.filters["tojson"] = to_json
    return environment


def render(request):
    """Return (texts, dates)."""
    texts, dates = [], []
    environment = environment_of(dates)
    limit()
    template = environment.from_string(request["template"])
    for number, messages in enumerate(request["talks"]):
        try:
            texts.append(write(template, messages, request["values"]))
        except Exception:
            if number < request["needed"]:
                raise
            texts.append(None)
    return texts, list(dict.fromkeys(dates))


def write(template, messages, values):
    parts, length = [], 0
    for part in template.generate({**values, "messages": messages, "tools": None, "documents": None,
                                   "add_generation_prompt": True}):
        parts.append(part)
        length += len(part)
        if length > LONGEST:
            refuse(f"the output exceeds {LONGEST} characters")
    return "".join(parts)


def main():
    request = json.load(sys.stdin)
    try:
        texts, dates = render(request)
        answer = {"texts": texts, "dates": dates}
    except ModuleNotFoundError:
        answer = {"error": "rendering chat templates requires Python's module jinja2", "missing": True}
    except MemoryError:
        answer = {"error": f"it requires more than {BYTES >> 20} MB"}
    except Exception as error:  # a template may raise any exception
        at = getattr(error, "lineno", None)
        answer = {"error": (f"line {at}: " if at else "") + f"{error}"[:300].replace("\n", " ")}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
