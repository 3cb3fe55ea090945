import json
import subprocess
import sys

import pytest
from small_backends import byte_fallback_backend, byte_level_backend
from tokenizers import AddedToken, processors

from jaxserve.text.tokenizer import Tokenizer


def save(folder, backend, **config) -> None:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_round_trip_and_ids(tmp_path):
    save(tmp_path, byte_level_backend(), eos_token="<|eos|>", clean_up_tokenization_spaces=True)
    tokenizer = Tokenizer.from_folder(tmp_path)
    text = "the cat , naïve 🎉 .\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.folder == tmp_path
    assert tokenizer.bos_token_id is None
    assert tokenizer.token_text(tokenizer.eos_token_id) == "<|eos|>"
    assert tokenizer.special_ids == {0, 1}
    ids = tokenizer.encode("a<|eos|>b")
    assert ids[1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|eos|>b"


def test_token_texts_within_a_text(small_tokenizers):
    llama, word_piece = small_tokenizers["llama2"], small_tokenizers["word_piece"]
    ids = llama.encode("the cat é")
    assert "".join(llama.token_text(i) for i in ids) == "<s> the cat é"
    assert llama.token_text(3 + 0xC3) == "�"
    assert llama.token_bytes(3 + 0xC3) == b"\xc3"
    assert [word_piece.token_text(i) for i in word_piece.encode("the cats")] == [" the", " cat", "s"]


def test_the_beginning_token_is_added_unless_told_otherwise(small_tokenizers):
    tokenizer = small_tokenizers["llama2"]
    assert tokenizer.encode("cat")[0] == 1
    assert tokenizer.encode("cat", add_special_tokens=False) == tokenizer.encode("cat")[1:]


def test_tokens_that_only_the_configuration_knows(tmp_path):
    size = byte_level_backend().get_vocab_size()
    added = {
        str(size + 1): {"content": "<|b|>", "special": True, "normalized": False},
        str(size): {"content": "<a>", "special": False, "normalized": False, "lstrip": True},
    }
    save(tmp_path, byte_level_backend(), added_tokens_decoder=added, pad_token="<|pad|>", eos_token="<|b|>")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode(" <a><|b|><|pad|>") == [size, size + 1, size + 2]
    assert tokenizer.vocab_size == size + 3
    assert tokenizer.special_ids == {0, 1, size + 1, size + 2}
    assert tokenizer.eos_token_id == size + 1


def test_transformers_reads_a_folder_the_same_way(tmp_path):
    from transformers import AutoTokenizer

    backend = byte_fallback_backend()
    backend.add_tokens([AddedToken("<more>", special=True)])
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    options = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
        "additional_special_tokens": ["<x>"],
    }
    save(tmp_path, backend, tokenizer_class="PreTrainedTokenizerFast", **options)
    ours, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the cat", " the  cat<more> <x>日本</s>", "", "é 🎉 cat."):
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids
        for skip in (False, True):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_ids >= set(theirs.all_special_ids)


def test_truncation_and_padding_in_the_file_do_not_count(tmp_path):
    backend = byte_level_backend()
    expected = backend.encode("the cat sat").ids
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    save(tmp_path, backend)
    assert Tokenizer.from_folder(tmp_path).encode("the cat sat") == expected


def test_ids_that_only_the_model_has_are_silent():
    tokenizer = Tokenizer(byte_level_backend(), vocab_size=512)
    assert tokenizer.decode([511]) == tokenizer.token_text(511) == ""
    assert Tokenizer(byte_level_backend(), vocab_size=3).vocab_size > 3


@pytest.mark.parametrize("wrong", [[512], [-1], [5, 2**40, -7]])
def test_ids_out_of_range_are_named(wrong):
    tokenizer = Tokenizer(byte_level_backend(), vocab_size=512)
    named = ", ".join(str(i) for i in wrong if i != 5)
    with pytest.raises(ValueError, match=rf"token ids must be in \[0, 512\), got {named}$"):
        tokenizer.decode(wrong)


def test_a_lone_surrogate_is_refused_by_name():
    tokenizer = Tokenizer(byte_level_backend())
    with pytest.raises(ValueError, match=r"messages\[2\] must be valid Unicode.*U\+D83D, at position 4"):
        tokenizer.encode("the \ud83d cat", field="messages[2]")


def test_a_folder_without_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path} holds no tokenizer: none of tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    save(tmp_path, byte_level_backend())
    content = (tmp_path / name).read_text()
    (tmp_path / name).write_text(content[: len(content) // 2])
    with pytest.raises(ValueError, match=rf"{name}"):
        Tokenizer.from_folder(tmp_path)


def test_transformers_is_not_imported_for_a_tokenizer_json(tmp_path):
    save(tmp_path, byte_level_backend())
    code = (
        "import sys; from jaxserve.text.tokenizer import Tokenizer; Tokenizer.from_folder(sys.argv[1]);"
        "assert not {'transformers', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
