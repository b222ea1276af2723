"""Chat templates: where they come from, and that they cannot reach out of their sandbox."""

import json

import pytest

from llmb.errors import ConfigError
from llmb.serve.text.chat_template import TemplateMismatch, load_chat_template

MESSAGES = [{"role": "user", "content": "Hi"}]


def write(folder, template, **fields):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template} | fields))
    return str(folder)


def test_template_gets_messages_and_special_tokens(tmp_path):
    template = "{{ bos_token }}{% for m in messages %}\n[{{ m['role'] }}] {{ m['content'] | tojson }}\n{% endfor %}"
    loaded = load_chat_template(write(tmp_path, template, bos_token={"content": "<s>"}), True)
    assert loaded.render([{"role": "user", "content": "Caf\u00e9"}]) == '<s>[user] "Caf\u00e9"\n'


def test_file_and_named_templates(tmp_path):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    folder = write(tmp_path, named)
    assert load_chat_template(folder, True).render(MESSAGES) == "yes"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_chat_template(folder, True).render(MESSAGES) == "file"


def test_without_a_template_only_the_fallback_tokenizer_chats(tmp_path):
    assert load_chat_template(str(tmp_path), True) is None
    assert load_chat_template(None, False).render(MESSAGES) == "user: Hi\nassistant:"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].nothing.more }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_errors_and_escapes_refuse_the_messages(tmp_path, template):
    with pytest.raises(TemplateMismatch):
        load_chat_template(write(tmp_path, template), True).render(MESSAGES)


def test_template_with_a_syntax_error_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="is not a chat template"):
        load_chat_template(write(tmp_path, "{% for %}"), True)
