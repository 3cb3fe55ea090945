import pytest
from golden_models import GOLDEN_NAMES, load_golden

from jaxserve.models.config import CheckpointError, ModelConfig, UnsupportedModelError
from jaxserve.models.rope import RopeScaling

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}


def read(architecture="LlamaForCausalLM", **fields) -> ModelConfig:
    return ModelConfig.from_hf(LLAMA | {"architectures": [architecture]} | fields)


def test_a_plain_llama():
    config = read(torch_dtype="bfloat16", rope_theta=500000.0, eos_token_id=[5, 6])
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (4, 4, 2, 16)
    assert config.q_per_group == 2
    assert (config.rope_theta, config.rope_scaling) == (500000.0, RopeScaling())
    assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (1, (5, 6), "bfloat16")
    assert (config.windows, config.uses_rope) == ((None,) * 4, (True,) * 4)
    assert not any((config.qkv_bias, config.out_bias, config.mlp_bias, config.qk_norm))


def test_what_older_configs_leave_out_is_filled_as_transformers_does():
    old = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert ModelConfig.from_hf(old).num_kv_heads == 4
    assert read().eos_token_ids == (2,)
    assert read().dtype is None
    assert read("SmolLM3ForCausalLM").tie_word_embeddings
    assert read("SmolLM3ForCausalLM").rope_theta == 2_000_000.0
    assert read("Qwen3ForCausalLM").head_dim == 128
    assert read("Qwen2ForCausalLM").eos_token_ids == ()


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_golden_configs_are_read_and_hashable(name):
    golden = load_golden(name)
    config = ModelConfig.from_hf(golden.config, max_model_len=golden.max_model_len)
    assert hash(config) == hash(ModelConfig.from_hf(golden.config, max_model_len=golden.max_model_len))
    assert config.dtype == "float32"


def test_biases_follow_the_family():
    assert (read(attention_bias=True).qkv_bias, read(attention_bias=True).out_bias) == (True, True)
    assert read(mlp_bias=True).mlp_bias
    assert (read("Qwen2ForCausalLM").qkv_bias, read("Qwen2ForCausalLM").out_bias) == (True, False)
    assert not read("MistralForCausalLM", attention_bias=True, sliding_window=None).qkv_bias
    assert read("Qwen3ForCausalLM").qk_norm


def test_layers_without_rope():
    assert read("SmolLM3ForCausalLM").uses_rope == (True, True, True, False)
    assert read("SmolLM3ForCausalLM", no_rope_layer_interval=2).uses_rope == (True, False) * 2
    assert read("SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1, 1]).uses_rope == (False, True, True, True)
    assert read("LlamaForCausalLM", no_rope_layers=[0, 1, 1, 1]).uses_rope == (True,) * 4


def test_windows_of_each_family():
    qwen = {"sliding_window": 8, "max_window_layers": 3}
    assert read("MistralForCausalLM", sliding_window=8).windows == (8,) * 4
    assert read("MistralForCausalLM", sliding_window=None).windows == (None,) * 4
    assert read("MistralForCausalLM").windows == (4096,) * 4
    assert read("LlamaForCausalLM", sliding_window=8).windows == (None,) * 4
    assert read("Qwen2ForCausalLM", **qwen).windows == (None,) * 4
    assert read("Qwen2ForCausalLM", use_sliding_window=True, **qwen).windows == (None, None, None, 8)
    types = ["sliding_attention", "full_attention"] * 2
    listed = read("Qwen3ForCausalLM", use_sliding_window=True, layer_types=types, **qwen)
    assert listed.windows == (8, None, 8, None)
    smollm = read("SmolLM3ForCausalLM", use_sliding_window=True, sliding_window=8)
    assert smollm.windows == (None, None, None, 8)


@pytest.mark.parametrize("field", [name for name in LLAMA if name != "num_key_value_heads"])
def test_a_missing_field_is_named(field):
    with pytest.raises(CheckpointError) as error:
        ModelConfig.from_hf({name: value for name, value in LLAMA.items() if name != field})
    assert "config.json" in str(error.value)
    assert field in str(error.value)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"num_key_value_heads": 3}, ("num_attention_heads=4", "divisible by num_key_value_heads=3")),
        ({"hidden_size": 62}, ("hidden_size=62", "divisible by num_attention_heads=4")),
        ({"head_dim": 7}, ("head_dim=7", "even")),
        ({"num_hidden_layers": "2"}, ("num_hidden_layers='2'", "positive integer")),
        ({"rms_norm_eps": 0}, ("rms_norm_eps=0", "positive number")),
        ({"tie_word_embeddings": 1}, ("tie_word_embeddings=1", "true or false")),
        ({"architectures": []}, ("architectures=[]", "one name")),
    ],
)
def test_a_wrong_field_is_named_with_value_and_rule(fields, parts):
    with pytest.raises(CheckpointError) as error:
        read(**fields)
    assert all(part in str(error.value) for part in ("config.json", *parts))


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        (
            {"architectures": ["LamaForCausalLM"]},
            ("LamaForCausalLM", "did you mean 'LlamaForCausalLM'", "Qwen3"),
        ),
        ({"hidden_act": "gelu"}, ("hidden_act='gelu'", "silu")),
        ({"dtype": "float64"}, ("dtype='float64'", "bfloat16")),
        ({"torch_dtype": "int8"}, ("torch_dtype='int8'",)),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quant_method='gptq'",)),
        ({"rope_scaling": {"rope_type": "su", "factor": 2.0}}, ("rope_scaling: rope_type='su'",)),
    ],
)
def test_what_is_not_supported_is_named(fields, parts):
    with pytest.raises(UnsupportedModelError) as error:
        read(**fields)
    assert all(part in str(error.value) for part in ("config.json", *parts))


def test_a_wrong_layer_list_is_named():
    with pytest.raises(CheckpointError, match=r"no_rope_layers=.*each of 4 layers"):
        read("SmolLM3ForCausalLM", no_rope_layers=[1])
    with pytest.raises(CheckpointError, match=r"no_rope_layers=.*1 .rope. and 0"):
        read("SmolLM3ForCausalLM", no_rope_layers=[1, 2, 1, 1])
    with pytest.raises(UnsupportedModelError, match="layer_types contains 'chunked_attention'"):
        read(
            "Qwen2ForCausalLM",
            use_sliding_window=True,
            sliding_window=8,
            layer_types=["chunked_attention"] * 4,
        )
    with pytest.raises(CheckpointError, match="'max_window_layers' is missing"):
        read("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=8)
