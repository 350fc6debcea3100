"""Render a chat template in a separate process: python3 template.py < REQUEST

REQUEST is JSON: {template, values, talks, needed}. The template is rendered for each list of messages in `talks`. The
output is JSON: {texts} or {error}. The first `needed` talks must succeed; the text of a later talk that fails is null.
The process is limited to 2 s of processor time and 256 MB. The template is untrusted and has no access to files, the
clock or other templates.
"""
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


def render(request):
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=["jinja2.ext.loopcontrols"])
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = lambda x, indent=None, **_: json.dumps(x, ensure_ascii=False, indent=indent)
    limit()
    template, texts = environment.from_string(request["template"]), []
    for number, messages in enumerate(request["talks"]):
        try:
            texts.append(write(template, messages, request["values"]))
        except Exception:
            if number < request["needed"]:
                raise
            texts.append(None)
    return texts


def write(template, messages, values):
    parts, length = [], 0
    for part in template.generate(messages=messages, add_generation_prompt=True, **values):
        parts.append(part)
        length += len(part)
        if length > LONGEST:
            refuse(f"the output exceeds {LONGEST} characters")
    return "".join(parts)


def main():
    request = json.load(sys.stdin)
    try:
        answer = {"texts": render(request)}
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
