"""A byte-level BPE tokenizer of the training text, in the Hugging Face file format."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .architecture import BOS_TOKEN_ID, EOS_TOKEN_ID, PAD_TOKEN_ID, VOCAB_SIZE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BOS_TOKEN = "<bos>"
EOS_TOKEN = "<eos>"
PAD_TOKEN = "<pad>"

# Python-minded pieces: a line break with the next line's indent, a word with one leading blank
# or dot, up to three digits, a run of punctuation, other blanks.
_PIECES = r"\n[ \t]*| ?[A-Za-z_]+|\d{1,3}| ?[^\sA-Za-z_\d]+|[ \t]+|\s"

# Enough for /v1/chat/completions to work: the messages' texts, one after the other.
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
)


def train_tokenizer(texts: Sequence[str]) -> "Tokenizer":
    """Train a BPE of `VOCAB_SIZE` tokens that can spell every byte.

    `encode` puts the bos token first; `decode` gives back exactly the encoded text.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special_tokens = {BOS_TOKEN_ID: BOS_TOKEN, EOS_TOKEN_ID: EOS_TOKEN, PAD_TOKEN_ID: PAD_TOKEN}
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[special_tokens[token_id] for token_id in sorted(special_tokens)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS_TOKEN} $A",
        pair=f"{BOS_TOKEN} $A $B",
        special_tokens=[(BOS_TOKEN, BOS_TOKEN_ID)],
    )
    return tokenizer


def save_tokenizer(tokenizer: "Tokenizer", directory: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    Args:
        max_length: the longest input the model takes, in tokens.
    """
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "pad_token": PAD_TOKEN,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": _CHAT_TEMPLATE,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
