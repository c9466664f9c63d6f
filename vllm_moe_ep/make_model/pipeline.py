"""Text, tokenizer, model, training, score, files: the making of a model from end to end."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import architecture
from .batches import encode_documents
from .checkpoint import build_model, cast_weights, randomize_router_biases, save_model
from .corpus import read_corpus
from .evaluation import score_heldout, score_unigram
from .manifest import find_finished_model, write_manifest
from .options import MakeModelOptions, ModelReport
from .publish import build_beside
from .quantised import make_quantised_files
from .requirements import require_modules
from .tokenizer import save_tokenizer, train_tokenizer
from .training import TrainingPlan, train

HELDOUT_NAME = "heldout.txt"


def make_model(options: MakeModelOptions) -> ModelReport:
    """Write a small DeepSeek model in Hugging Face format, or find it already there.

    The directory holds config.json, generation_config.json, model.safetensors, tokenizer.json,
    tokenizer_config.json, heldout.txt (about 10 KB that the model was not trained on) and
    make_model.json (options and report). It appears only when all of that is complete.

    Raises:
        SettingsError: the directory holds something else, or cannot be written.
        UnsupportedError: a package that this needs is missing.
        FloatingPointError: the training diverged.
    """
    finished = find_finished_model(options)
    if finished is not None:
        return finished
    require_modules()
    source = None if options.quantisation is None else make_model(options.source_options)
    with (
        build_beside(options.directory, replace=options.force) as folder,
        _torch_threads(options.num_threads),
    ):
        if source is None:
            report = _make_files(options, folder)
        else:
            report = make_quantised_files(options, source, folder)
        write_manifest(folder, options, report)
    return report


def _make_files(options: MakeModelOptions, folder: Path) -> ModelReport:
    start = time.monotonic()
    _say(options, "make-model: training the tokenizer on the standard library's sources")
    corpus = read_corpus()
    tokenizer = train_tokenizer(corpus.train)
    train_ids = encode_documents(tokenizer, corpus.train)
    heldout_ids = encode_documents(tokenizer, corpus.heldout)

    config = architecture.model_config(options.weight_dtype)
    model = build_model(config, options.seed)
    final_train_loss = None
    if options.random:
        randomize_router_biases(model, options.seed)
    else:
        num_steps = int(options.recipe["num_steps"])
        _say(options, f"make-model: {len(train_ids)} training tokens, {num_steps} steps")
        plan = TrainingPlan(num_steps)
        final_train_loss = train(model, train_ids, plan, options.seed, options.show_progress)
    cast_weights(model, options.weight_dtype)

    _say(options, "make-model: scoring the held-out files")
    score = score_heldout(model, heldout_ids)
    num_heldout_bytes = sum(len(text.encode()) for text in corpus.heldout)
    save_model(model, config, folder)
    save_tokenizer(tokenizer, folder, config["max_position_embeddings"])
    (folder / HELDOUT_NAME).write_text(corpus.short_heldout, encoding="utf-8")
    return ModelReport(
        directory=options.directory,
        reused=False,
        num_parameters=sum(weight.numel() for weight in model.parameters()),
        final_train_loss=final_train_loss,
        heldout_perplexity=score.perplexity,
        unigram_perplexity=score_unigram(train_ids, heldout_ids).perplexity,
        heldout_bits_per_byte=score.bits_per_byte(len(heldout_ids), num_heldout_bytes),
        corpus_sha256=corpus.sha256,
        seconds=time.monotonic() - start,
    )


@contextmanager
def _torch_threads(num_threads: int) -> Iterator[None]:
    import torch

    previous = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def _say(options: MakeModelOptions, line: str) -> None:
    if options.show_progress:
        print(line, file=sys.stderr, flush=True)
