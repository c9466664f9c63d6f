"""The files of a made model, as Hugging Face's loaders see them."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_moe_ep.make_model import MakeModelOptions, ModelReport, make_model
from vllm_moe_ep.make_model.corpus import read_corpus


def test_config_has_what_vllm_and_hugging_face_need(trained_directory: Path) -> None:
    config = json.loads((trained_directory / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert (config["topk_method"], config["scoring_func"]) == ("noaux_tc", "sigmoid")
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (512, 64)
    assert config["q_lora_rank"] and config["norm_topk_prob"]
    assert config["n_routed_experts"] >= 16 and config["num_experts_per_tok"] == 4
    assert 1 < config["topk_group"] < config["n_group"]
    assert config["first_k_dense_replace"] == 1 and config["num_hidden_layers"] >= 3
    assert config["n_shared_experts"] == 1 and config["routed_scaling_factor"] != 1
    assert config["hidden_size"] % 128 == config["moe_intermediate_size"] % 128 == 0
    assert not config["tie_word_embeddings"]


def test_report_counts_and_scores(trained_report: ModelReport, random_report: ModelReport) -> None:
    weights = load_file(trained_report.directory / "model.safetensors")
    num_weights = sum(
        weight.numel() for name, weight in weights.items() if not name.endswith("_bias")
    )
    assert trained_report.num_parameters == num_weights
    assert 4.5e6 <= num_weights <= 6.5e6
    assert trained_report.final_train_loss is not None
    assert random_report.final_train_loss is None
    # Two steps are enough to beat an even guess over the 2048 tokens, which random weights don't.
    assert trained_report.heldout_perplexity < 2048 < random_report.heldout_perplexity
    assert trained_report.unigram_perplexity == random_report.unigram_perplexity < 2048


def test_hugging_face_scores_the_stored_files_as_reported(trained_report: ModelReport) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained_report.directory)
    tokenizer = AutoTokenizer.from_pretrained(trained_report.directory)
    texts = read_corpus().heldout
    stream = [i for text in texts for i in [*tokenizer(text).input_ids[1:], 1]]
    losses = []
    for start in range(0, len(stream) - 511, 512):
        window = stream[start : start + 512]
        with torch.no_grad():
            log_probs = model(torch.tensor([[0, *window[:-1]]])).logits[0].log_softmax(-1)
        losses += [-log_probs[i, token_id].item() for i, token_id in enumerate(window)]
    loss = sum(losses) / len(losses)
    assert math.exp(loss) == pytest.approx(trained_report.heldout_perplexity, rel=1e-4)
    bits_per_byte = loss / math.log(2) * len(stream) / sum(len(text.encode()) for text in texts)
    assert bits_per_byte == pytest.approx(trained_report.heldout_bits_per_byte, rel=1e-4)


def test_tokenizer_gives_back_every_text(trained_directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained_directory)
    texts = ["", "x", "def f(a):\n\treturn a\r\n", "  two  blanks \n\n", "naïve ☃ 日本\0\x7f"]
    texts.append((trained_directory / "heldout.txt").read_text())
    for text in texts:
        token_ids = tokenizer(text).input_ids
        assert token_ids[0] == tokenizer.bos_token_id == 0
        assert tokenizer.decode(token_ids, skip_special_tokens=True) == text
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (1, 2, 2048)
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "import os"}], tokenize=False)
        == "<bos>import os\n"
    )


def test_the_same_seed_gives_the_same_bytes(trained_directory: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    make_model(MakeModelOptions(again, num_steps=2, num_threads=1, show_progress=False))
    names = {path.name for path in trained_directory.iterdir()}
    assert names == {path.name for path in again.iterdir()}
    for name in names - {"make_model.json"}:
        assert (again / name).read_bytes() == (trained_directory / name).read_bytes(), name


def test_weight_types(trained_report: ModelReport, random_report: ModelReport) -> None:
    for report, wanted in ((trained_report, torch.float32), (random_report, torch.bfloat16)):
        for name, weight in load_file(report.directory / "model.safetensors").items():
            is_bias = name.endswith("e_score_correction_bias")
            assert weight.dtype == (torch.float32 if is_bias else wanted), name


def test_router_biases_change_the_choice_of_experts(random_report: ModelReport) -> None:
    model = AutoModelForCausalLM.from_pretrained(random_report.directory, dtype=torch.float32)
    router = model.model.layers[1].mlp.gate
    hidden_states = torch.randn(256, model.config.hidden_size)
    chosen = router(hidden_states)[2].sort().values
    router.e_score_correction_bias.zero_()
    changed = (router(hidden_states)[2].sort().values != chosen).any(dim=1).float().mean().item()
    assert 0.05 < changed < 1


def test_the_import_is_cheap() -> None:
    code = (
        "import sys, vllm_moe_ep.make_model\n"
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
