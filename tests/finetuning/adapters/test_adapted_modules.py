"""Which modules a run config's targets adapt, and which of these are safe to adapt by default."""

import pytest
import torch
import transformers
from torch import nn

from finetuning.adapters.adapted_modules import adapted_modules, with_names
from finetuning.adapters.adapter import attach_adapter, trainable_parameters
from finetuning.errors import BaseModelError
from finetuning.settings import AdapterSettings
from tests.finetuning.conftest import ARCHITECTURES, HYBRIDS, SIZES, draw_weights

# Experts and routers of recent versions of transformers only accept adapters without dropout.
MORE = ARCHITECTURES | {
    "phimoe": ("PhimoeConfig", {"num_local_experts": 3}, "q_proj,o_proj"),
    "jetmoe": ("JetMoeConfig", {"num_local_experts": 3, "kv_channels": 8}, "kv_proj"),
}
OUTSIDE = {
    "llama": {"lm_head": ["lm_head"], "embed_tokens": ["model.embed_tokens"]},
    "qwen2": {"lm_head": ["lm_head"], "embed_tokens": ["model.embed_tokens"]},
    "gpt2": {"wte,wpe": ["transformer.wte", "transformer.wpe"], "lm_head": ["lm_head"]},
    "opt": {
        "project_in,project_out": ["model.decoder.project_out", "model.decoder.project_in"],
        "embed_positions": ["model.decoder.embed_positions"],
    },
    "bloom": {"word_embeddings": ["transformer.word_embeddings"]},
    "phimoe": {"router": ["model.layers.0.mlp.router", "model.layers.1.mlp.router"]},
    "jetmoe": {"mlp.router.layer": [f"model.layers.{n}.mlp.router.layer" for n in (0, 1)]},
}


class NumberedConfig(transformers.LlamaConfig):
    model_type = "numbered"


class NumberedForCausalLM(transformers.LlamaForCausalLM):
    """A Llama with a list of linear layers in each block, as experts were once stored."""

    config_class = NumberedConfig

    def __init__(self, config):
        super().__init__(config)
        for block in self.model.layers:
            block.mlp.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))


@pytest.fixture
def find(tmp_path):
    """Return a function that finds the modules that targets adapt in an architecture."""

    def adapted(architecture, targets):
        kind, differences, _ = MORE[architecture]
        getattr(transformers, kind)(**SIZES | differences).save_pretrained(tmp_path)
        settings = AdapterSettings(targets=targets, dropout=0.0)
        return adapted_modules(tmp_path, settings)

    return adapted


@pytest.mark.parametrize("architecture", MORE)
def test_linear_layers_of_blocks_mix_all_tokens(find, architecture):
    targets = MORE[architecture][2]
    found = find(architecture, targets)
    in_each = 1 if architecture in HYBRIDS else len(targets.split(","))
    assert len(found) >= SIZES["num_hidden_layers"] * in_each
    assert set(found.values()) == {True}


@pytest.mark.parametrize(
    ("architecture", "targets", "paths"),
    [(name, *each) for name, outside in OUTSIDE.items() for each in outside.items()],
)
def test_other_modules_depend_on_single_tokens(find, architecture, targets, paths):
    """Embeddings, output heads, experts and routers, whatever an architecture calls them."""
    found = find(architecture, f"{MORE[architecture][2]},{targets}")
    assert sorted(path for path, mixes in found.items() if not mixes) == sorted(paths)


def test_numbered_experts_depend_on_single_tokens(tmp_path):
    transformers.AutoConfig.register("numbered", NumberedConfig)
    transformers.AutoModelForCausalLM.register(NumberedConfig, NumberedForCausalLM)
    NumberedConfig(**SIZES).save_pretrained(tmp_path)
    found = adapted_modules(tmp_path, AdapterSettings(targets="o_proj,experts.1"))
    assert found == {
        f"model.layers.{block}.{path}": mixes
        for block in range(2)
        for path, mixes in (("self_attn.o_proj", True), ("mlp.experts.1", False))
    }


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    ("architecture", "targets"),
    [("mixtral", "k_proj,w2"), ("mixtral", "gate"), ("Qwen3Next", "down_proj")],
)
def test_experts_and_their_routers_are_refused(random_model, architecture, targets, dropout):
    settings = AdapterSettings(targets=targets, dropout=dropout)
    with pytest.raises(BaseModelError, match=r"experts or a router.*use \"all-linear\""):
        attach_adapter(random_model(architecture), settings, None)


def test_gradients_agree_on_which_modules_mix_tokens(random_model, tmp_path):
    settings = AdapterSettings(targets="q_proj,o_proj,down_proj,embed_tokens", dropout=0.0)
    model = random_model()
    model.config.save_pretrained(tmp_path)
    model = draw_weights(attach_adapter(model, settings, None))
    tokens = torch.arange(2, 6)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    unchanged = {
        name.removeprefix("base_model.model.").partition(".lora_")[0].replace(".base_layer", "")
        for name, parameter in trainable_parameters(model).items()
        if not (parameter.grad.any(0).all() and parameter.grad.any(1).all())
    }
    found = adapted_modules(tmp_path, settings)
    assert unchanged == {path for path, mixes in found.items() if not mixes} != set(found)


def test_a_prefix_adapts_no_module(tmp_path):
    assert adapted_modules(tmp_path, AdapterSettings(kind="prefix")) == {}


LINEAR = {
    "falcon_h1": (
        ("FalconH1Config", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}),
        "down_proj,gate_proj,in_proj,k_proj,o_proj,q_proj,up_proj,v_proj",
    ),
    "gpt_oss": (("GptOssConfig", {"num_local_experts": 4}), "k_proj,o_proj,q_proj,v_proj"),
    "qwen3_5_moe": (
        ("Qwen3_5MoeTextConfig", {"num_experts": 4, "layer_types": ["full_attention"] * 2}),
        "down_proj,gate_proj,k_proj,o_proj,q_proj,up_proj,v_proj",
    ),
    "glm4_moe": (("Glm4MoeConfig", {"n_routed_experts": 4}), "k_proj,o_proj,q_proj,v_proj"),
}


@pytest.mark.parametrize("targets", ["", "all-linear"])
@pytest.mark.parametrize("architecture", LINEAR)
def test_all_linear_excludes_gates_experts_and_fused_layers(tmp_path, architecture, targets):
    (kind, differences), expected = LINEAR[architecture]
    getattr(transformers, kind)(**SIZES | differences).save_pretrained(tmp_path)
    found = with_names(tmp_path, AdapterSettings(targets=targets))
    assert found.targets == expected
    assert set(adapted_modules(tmp_path, found).values()) == {True}


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        ("", "q_proj,v_proj"),
        ("v_proj, self_attn.q_proj", "v_proj,self_attn.q_proj"),
        (r".*\.[01]\..*\.(q|k)_proj", "k_proj,q_proj"),
        (r".*\.1\..*\.[kv]_proj|lm_head", "1.self_attn.k_proj,1.self_attn.v_proj,lm_head"),
    ],
)
def test_targets_become_the_shortest_names(tmp_path, targets, names):
    transformers.LlamaConfig(**SIZES).save_pretrained(tmp_path)
    found = with_names(tmp_path, AdapterSettings(targets=targets))
    assert found.targets == names
    assert with_names(tmp_path, found) == found


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        ("q_proj,k_porj", "k_porj matches no module of a LlamaForCausalLM, such as model"),
        (r".*\.7\..*", r"matches no module"),
        ("(q_proj", "malformed: missing"),
    ],
)
def test_targets_that_match_nothing_are_refused(tmp_path, targets, reason):
    transformers.LlamaConfig(**SIZES).save_pretrained(tmp_path)
    with pytest.raises(BaseModelError, match=reason):
        with_names(tmp_path, AdapterSettings(targets=targets))
