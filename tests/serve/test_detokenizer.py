"""Incremental detokenization: any split of any tokens gives the text of decoding them at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import VOCAB, write_tokenizer
from small_models import llama_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from llmb.serve.text.detokenizer import DecodingDetokenizer
from llmb.serve.text.text_tokenizer import ByteFallbackTokenizer, HfTokenizer, load_tokenizer

TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def reference(folder):
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(llama_model(vocab=VOCAB), str(folder))


def pushed(detokenizer, tokens) -> list[str]:
    return [*map(detokenizer.push, tokens), detokenizer.finish()]


@settings(max_examples=300, deadline=None)
@given(tokens=TOKENS)
def test_byte_level_text_is_that_of_decoding_at_once(tokenizer, reference, tokens):
    assert "".join(pushed(tokenizer.detokenizer(), tokens)) == reference.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize(
    "text", ["In the beginning", "na\u00efve caf\u00e9", "\u65e5\u672c\u8a9e \U0001f600!", "a\n\n b"]
)
def test_characters_are_never_split(tokenizer, reference, text):
    tokens = tokenizer.encode(text, add_special_tokens=False)
    texts = pushed(tokenizer.detokenizer(), tokens)
    assert "".join(texts) == text
    assert "\ufffd" not in "".join(texts)
    decoding = pushed(DecodingDetokenizer(reference), tokens)
    assert "".join(decoding) == text


def test_special_tokens_have_bytes_and_no_text(tokenizer):
    assert tokenizer.token_bytes(0) == b"<|endoftext|>"
    assert pushed(tokenizer.detokenizer(), [0, 1, 2, 3]) == [""] * 5


def test_other_decoders_are_decoded_with_their_context():
    """A SentencePiece vocabulary: the first token of a text loses its space, and bytes stand alone."""
    vocab = {"<unk>": 0, "\u2581a": 1, "\u2581b": 2, "c": 3, "<0xE2>": 4, "<0x82>": 5, "<0xAC>": 6}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens = [1, 2, 3, 4, 5, 6, 1, 4]
    texts = pushed(HfTokenizer(tokenizer, len(vocab)).detokenizer(), tokens)
    assert texts == ["a", " b", "c", "", "", "\u20ac", " a", "", "\ufffd"]
    assert "".join(texts) == tokenizer.decode(tokens)


def test_invalid_bytes_do_not_hold_text_back_for_ever(reference):
    first_byte = reference.token_to_id("\u00e2")
    texts = [text for text in map(DecodingDetokenizer(reference).push, [first_byte] * 20) if text]
    assert len(texts) >= 2


def test_fallback_gives_every_token_a_text():
    tokenizer = ByteFallbackTokenizer(300)
    assert tokenizer.encode("A\u20ac", add_special_tokens=True) == [65, 0xE2, 0x82, 0xAC]
    assert pushed(tokenizer.detokenizer(), [65, 226, 299, 10]) == ["A", "<226>", "<299>", "<10>", ""]
    assert ByteFallbackTokenizer(50).encode("A", add_special_tokens=True) == [15]
