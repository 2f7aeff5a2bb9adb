"""Untrusted chat templates: endless ones stop after the same number of steps everywhere, others render as in
transformers."""

import functools
import resource
import sys
import threading

import pytest
from jinja2 import TemplateError
from jinja2.utils import Namespace
from transformers import AutoTokenizer

from lmmods.cli import main
from lmmods.core.compat import chat_template_environment
from lmmods.core.errors import UserError
from lmmods.data.encode.chat_template import ChatTemplate, bounded_rendering
from lmmods.data.read.conversation import RowProblem

CHAT = [{"role": "user", "content": "Hi <b>&amp;"}, {"role": "assistant", "content": " Ho\n\n  there "},
        {"role": "user", "content": "2 > 1?"}, {"role": "assistant", "content": "é"}]
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
END = "{% endfor %}{% endfor %}{% endfor %}"
DOUBLED = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = "

ENDLESS = {
    "nested loops without output": f"{LOOP}{END}",
    "nested loops with output": f"{LOOP}x{END}",
    "a loop that filters all": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}"
                               "{% endfor %}",
    "a recursive loop": "{% for a in [[]] recursive %}{{ loop([[]]) }}{% endfor %}",
    "a recursive loop that fans out": "{% for a in range(9) recursive %}{% if loop.depth < 60 %}"
                                      "{{ loop(range(99999)) }}{% endif %}{% endfor %}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macros that fan out": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a loop over a string": "{% for a in 'x' * 100000 %}{% for b in 'x' * 100000 %}{% endfor %}{% endfor %}",
    "map over map": "{% for a in range(99999) %}{{ range(99999)|map('string')|list|length }}{% endfor %}",
    "a large string": "{{ 'a' * 10**10 }}", "a large list": "{{ ([0] * 10**10)|length }}",
    "a large list of names": "{{ ([messages] * 10**9)|length }}",
    "a large number": "{{ 9**(9**9) }}", "squares": "{% set ns = namespace(x=9) %}{% for i in range(99) %}"
                                                  "{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "~ doubles": DOUBLED + "ns.x ~ ns.x %}{% endfor %}{{ ns.x|length }}",
    "+ doubles": DOUBLED + "ns.x + ns.x %}{% endfor %}{{ ns.x|length }}",
    "join doubles": DOUBLED + "[ns.x, ns.x]|join %}{% endfor %}{{ ns.x|length }}",
    "replace squares": DOUBLED + "ns.x|replace('a', ns.x) %}{% endfor %}{{ ns.x|length }}",
    "the method replace": DOUBLED + "ns.x.replace('a', ns.x) %}{% endfor %}{{ ns.x|length }}",
    "lists of lists": DOUBLED + "[ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "lists of lists as text": DOUBLED + "[ns.x, ns.x] %}{% endfor %}{{ (ns.x|string)|length }}",
    "lists of lists in mappings": DOUBLED + "{'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x|tojson|length }}",
    "set blocks": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set t %}{{ ns.x }}{{ ns.x }}{% endset %}"
                  "{% set ns.x = t %}{% endfor %}",
    "a wide field": "{{ 'a'.ljust(10**10)|length }}", "a wide number": "{{ '%1000000000000d' % 1 }}",
    "a wide format": "{{ '{:>10000000000}'.format(1) }}",
    "a wide mapping": "{{ '{a:>10000000000}'.format_map({'a': 1}) }}",
    "a width by argument": "{{ '{:>{}}'.format(1, 10**12) }}",
    "format filter": "{{ '%0*d'|format(10**12, 1) }}", "center": "{{ 'a'|center(10000000000) }}",
    "indent": "{{ 'a\nb'|indent(10000000000) }}", "lipsum": "{{ lipsum(n=10**9) }}",
    "bytes": "{{ (1).to_bytes(10**10, 'big')|length }}", "batch": "{{ [1]|batch(10**10, 0)|list|length }}",
    "tabs": "{{ '\t'.expandtabs(10**10)|length }}", "tojson": "{{ [1]|tojson(indent=10**10) }}",
}


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture
def bounded_memory():
    """Limit memory, so that a missed attack fails instead of exhausting the machine.

    Not for tests that start processes: the fork server, which later tests share, would inherit the limit.
    """
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() if sys.platform == "linux" else 0
    if used:
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS.keys())
@pytest.mark.usefixtures("bounded_memory")
def test_an_endless_template_is_stopped(source):
    message = "chat template exceeds the limits of a rendering.*(too m|recursion|is not offered).* in line [12]"
    with pytest.raises(UserError, match=message):
        ChatTemplate(source, {}).render(CHAT, False)


def test_an_endless_template_stops_after_the_same_steps_in_every_thread():
    counts = []
    counting = "{% for a in range(90000) %}{% for b in range(90000) %}{{ note() }}{% endfor %}{% endfor %}"

    def run() -> None:
        count = 0

        def note() -> str:
            nonlocal count
            count += 1
            return ""

        with pytest.raises(UserError, match="too many steps"):
            ChatTemplate(counting, {"note": note}).render(CHAT, False)
        counts.append(count)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == 3 and len(set(counts)) == 1 and counts[0] > 1000


@pytest.mark.parametrize("source", [
    "{{ messages[9].content.x }}", "{{ 1 / 0 }}", "{{ messages + 1 }}", "{{ range(10**12) }}",
    "{{ raise_exception('no') }}",
    "{{ messages.nothing() }}", "{{ messages[0]['content'] % 'x' }}", "{% include 'x' %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}",
    pytest.param("{% set ns = namespace(_a=1) %}", marks=pytest.mark.skipif(
        chat_template_environment().globals["namespace"] is Namespace, reason="transformers before 5.23 allows it")),
])
def test_a_row_that_cannot_be_rendered_is_dropped(source):
    with pytest.raises(RowProblem, match="the chat template rejects the conversation"):
        ChatTemplate(source, {}).render(CHAT, False)


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% endif %}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
                                    "{% for a in b %}" * 30 + "{% endfor %}" * 30, "x" * 1_000_001])
def test_an_invalid_template_is_an_error(source):
    with pytest.raises(UserError, match="the tokenizer's chat template .*Set data.template"):
        ChatTemplate(source, {}).render(CHAT, False)


VALID = {
    "roles": "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
             "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "whitespace": "  {%- for m in messages -%}\n  {{ loop.index0 }}/{{ loop.length }}{{ ',' if not loop.last }}\n"
                  "{% if loop.first %}  first {% endif %}\n {%- endfor %}  ",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% elif loop.index == 4 %}"
                     "{% break %}{% endif %}{{ m.content }}{{ loop.previtem is defined }}{{ loop.nextitem.role }}"
                     "{% else %}none{% endfor %}",
    "filters": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }}"
               "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ messages | length }}{{ 'a b' | title }}",
    "a filtered loop": "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content }}{% endfor %}",
    "macros": "{% macro say(m, end='.') %}{{ m.content ~ end }}{{ caller() if caller }}{% endmacro %}"
              "{% for m in messages %}{{ say(m) }}{% endfor %}{% call say(messages[0], '!') %}in{% endcall %}",
    "namespaces": "{% set ns = namespace(n=0, all=[]) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
                  "{% set ns.all = ns.all + [m.role] %}{% endfor %}{{ ns.n }}{{ ns.all }}{{ ns.all[::-1][0] }}",
    "blocks": "{% set t %}{{ messages[0].content }}{% endset %}{{ t }}{% filter upper %}{{ t }}{% endfilter %}"
              "{% generation %}{{ messages[1].content }}{% endgeneration %}",
    "values": "{{ 'a' * 3 }}{{ '-' * 5 ~ 1 }}{{ '%s %d' % ('a', 3) }}{{ 2 ** 5 }}{{ 7 // 2 }}{{ (1, 2) }}"
              "{{ {'a': [1]} }}"
              "{{ none }}{{ true }}{{ undefined_name }}{{ [] + [1] }}{{ 'x'.join(['a', 'b']) }}{{ 'abc'[1:] }}",
    "tools": "{% if tools is defined and tools is not none %}t{% endif %}{{ documents is none }}{{ dict(a=1) }}"
             "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}",
    "escapes": "{% autoescape true %}{{ messages[0].content ~ '<' }}{% endautoescape %}{{ messages[0].content | e }}",
    "recursion": "{% for a in [[1, [2, [3]]]] recursive %}{% if a is iterable %}({{ loop(a) }}){% else %}{{ a }}"
                 "{% endif %}"
                 "{% endfor %}",
}


@pytest.mark.parametrize("source", VALID.values(), ids=VALID.keys())
@pytest.mark.parametrize("open_response", [True, False])
def test_a_valid_template_renders_as_in_transformers(source, open_response, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", source)
    expected = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=open_response)
    assert ChatTemplate(source, tokenizer.special_tokens_map).render(CHAT, open_response) == expected
    with bounded_rendering():
        assert tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=open_response) == expected


@pytest.mark.usefixtures("bounded_memory")
def test_transformers_itself_renders_under_the_limits(tokenizer, monkeypatch):
    """As lm-eval and `inspect` use it: a continued answer, template errors unchanged, endless templates stopped."""
    render = functools.partial(tokenizer.apply_chat_template, CHAT, tokenize=False)
    monkeypatch.setattr(tokenizer, "chat_template", VALID["roles"])
    expected = render(continue_final_message=True)
    assert expected.endswith("é")
    with bounded_rendering():
        assert render(continue_final_message=True) == expected
        monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no') }}")
        with pytest.raises(TemplateError, match="no"):
            render()
        for name in ("lipsum", "nested loops with output"):
            monkeypatch.setattr(tokenizer, "chat_template", ENDLESS[name])
            with pytest.raises(UserError, match="exceeds the limits of a rendering"):
                render()


def test_long_conversations_are_within_the_limits():
    """The limits grow with the conversation."""
    chat = [{"role": "user", "content": "word " * 400}, {"role": "assistant", "content": "text " * 400}] * 200
    source = ("{% set ns = namespace(text='') %}{% for m in messages %}{% for n in messages %}{% endfor %}"
              "{% set ns.text = ns.text ~ m.content | trim | replace('word', 'w') %}{% endfor %}{{ ns.text }}")
    assert ChatTemplate(source, {}).render(chat, False) == ("w " * 399 + "w" + ("text " * 400).strip()) * 200


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_with_an_endless_template_ends_with_one_message(recipe, tokenizer_folder, tmp_path, capsys, workers):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.chat_template = ENDLESS["nested loops without output"]
    tokenizer.save_pretrained(tmp_path / "hostile")
    data = {"data__init_args__tokenizer": str(tmp_path / "hostile"), "data__init_args__template": None,
            "data__init_args__num_proc": workers, "data__init_args__cache_dir": str(tmp_path / "cache")}
    assert main(["fit", *recipe(**data)]) == 2
    assert "chat template exceeds the limits of a rendering" in capsys.readouterr().err
    assert not list((tmp_path / "cache").glob("*/info.json"))
