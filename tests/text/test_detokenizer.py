import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.tokenizer import Tokenizer

KINDS = ["byte_level", "llama2", "gemma", "metaspace", "word_piece", "bare"]


def push_all(tokenizer: Tokenizer, pieces: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    return [detokenizer.push(piece) for piece in pieces] + [detokenizer.flush()]


def draw_pieces(data: st.DataObject, size: int) -> list[list[int]]:
    """Ids in pieces; one in a few examples uses a handful of ids only, so that runs and repeats happen."""
    few = st.lists(st.integers(0, size - 1), min_size=1, max_size=4)
    ids = st.one_of(st.integers(0, size - 1), st.sampled_from(data.draw(few)))
    return data.draw(st.lists(st.lists(ids, max_size=5), max_size=12))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_joined_deltas_are_the_whole_text(small_tokenizers, kind, data, skip):
    tokenizer = small_tokenizers[kind]
    pieces = draw_pieces(data, tokenizer.vocab_size)
    ids = [token_id for piece in pieces for token_id in piece]
    assert "".join(push_all(tokenizer, pieces, skip)) == tokenizer.decode(ids, skip)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_joined_deltas_are_the_whole_text_of_the_demo_model(demo_tokenizer, data, skip):
    pieces = draw_pieces(data, demo_tokenizer.vocab_size)
    ids = [token_id for piece in pieces for token_id in piece]
    assert "".join(push_all(demo_tokenizer, pieces, skip)) == demo_tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "gemma"])
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_a_valid_text_never_shows_half_a_character(small_tokenizers, kind, text):
    tokenizer = small_tokenizers[kind]
    ids = tokenizer.encode(text)
    deltas = push_all(tokenizer, [[token_id] for token_id in ids])
    assert "".join(deltas) == tokenizer.decode(ids)
    assert "".join(deltas).count("�") == text.count("�")


@pytest.mark.parametrize("kind", ["byte_level", "demo"])
@settings(max_examples=200, deadline=None)
@given(text=st.text(min_size=1, max_size=20))
def test_byte_level_text_is_given_as_early_as_possible(request, small_tokenizers, kind, text):
    tokenizer = request.getfixturevalue("demo_tokenizer") if kind == "demo" else small_tokenizers[kind]
    ids = tokenizer.encode(text)
    assume(tokenizer.decode(ids) == text)  # the demo model's vocabulary lacks the bytes of rare characters
    detokenizer, seen, data = IncrementalDetokenizer(tokenizer), "", b""
    for token_id in ids:
        seen += detokenizer.push([token_id])
        data += tokenizer.token_bytes(token_id)
        assert seen == data.decode(errors="ignore")


@pytest.fixture(scope="module")
def byte_ids(small_tokenizers) -> dict[int, int]:
    """The token of each single byte in the byte-level vocabulary."""
    tokenizer = small_tokenizers["byte_level"]
    contents = {token_id: tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)}
    return {content[0]: token_id for token_id, content in contents.items() if len(content) == 1}


# The first and last bytes of every row of the Unicode standard's table 3-7, and some that are in none.
EDGES = bytes.fromhex("41 7f 80 8f 90 9f a0 bf c0 c2 df e0 e1 ec ed ee ef f0 f1 f3 f4 f5 ff")
BYTES = st.lists(st.sampled_from(list(EDGES)) | st.integers(0, 255), max_size=10).map(bytes)


@settings(max_examples=500, deadline=None)
@given(data=BYTES)
def test_bytes_that_are_no_utf8_decode_as_the_library_decodes_them(small_tokenizers, byte_ids, data):
    tokenizer = small_tokenizers["byte_level"]
    ids = [byte_ids[byte] for byte in data]
    text = tokenizer.decode(ids)
    assert text == data.decode(errors="replace")
    assert text == "".join(push_all(tokenizer, [[token_id] for token_id in ids]))


def test_half_a_character_is_held_and_flushed_as_a_replacement(small_tokenizers, byte_ids):
    tokenizer = small_tokenizers["byte_level"]
    first, second, third = (byte_ids[byte] for byte in "語".encode())
    assert push_all(tokenizer, [[first], [second], [third]]) == ["", "", "語", ""]
    assert push_all(tokenizer, [[first], [second]]) == ["", "", "�"]


def test_a_run_of_byte_tokens_is_held_until_it_ends(small_tokenizers):
    tokenizer = small_tokenizers["llama2"]
    run = [3 + byte for byte in "é".encode()]
    word = tokenizer.encode("cat")[-1]
    assert push_all(tokenizer, [[word], run, [word]])[1:] == ["", "é cat", ""]
    assert push_all(tokenizer, [[word], run[:1], [word]])[1:] == ["", "� cat", ""]


def test_special_tokens_do_not_break_a_character_unless_shown(small_tokenizers, byte_ids):
    tokenizer = small_tokenizers["byte_level"]
    first, second = (byte_ids[byte] for byte in "é".encode())
    eos = min(tokenizer.special_ids)
    assert "".join(push_all(tokenizer, [[first, eos], [second]])) == "é"
    assert "".join(push_all(tokenizer, [[first, eos], [second]], False)) == "�<|eos|>�"


def test_ids_outside_the_vocabulary_are_refused(small_tokenizers):
    tokenizer = small_tokenizers["byte_level"]
    with pytest.raises(ValueError, match=rf"token ids must be in \[0, {tokenizer.vocab_size}\), got -1"):
        IncrementalDetokenizer(tokenizer).push([5, -1])


@pytest.mark.parametrize("decoder", [decoders.CTC(), decoders.BPEDecoder(), decoders.Strip(" ", 0, 1)])
def test_a_decoder_that_looks_at_neighbours_is_refused(decoder):
    backend = Backend(models.WordLevel({"the": 0}, unk_token="the"))
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoder])
    with pytest.raises(ValueError, match="cannot be applied token by token"):
        IncrementalDetokenizer(Tokenizer(backend))


@pytest.mark.parametrize("kind", ["byte_level", "llama2"])
def test_the_cost_of_a_token_does_not_grow_with_the_text(small_tokenizers, kind):
    tokenizer = small_tokenizers[kind]
    ids = tokenizer.encode("the cat é日" * 8)

    def seconds(repeats: int) -> float:
        detokenizer, start = IncrementalDetokenizer(tokenizer), time.perf_counter()
        for token_id in ids * repeats:
            detokenizer.push([token_id])
        return (time.perf_counter() - start) / repeats

    seconds(1)
    assert min(seconds(100) for _ in range(3)) < 4 * min(seconds(5) for _ in range(3))
