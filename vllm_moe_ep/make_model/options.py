"""What the caller asks for, and what it gets back."""

import dataclasses
from pathlib import Path

from vllm_moe_ep.errors import SettingsError

WEIGHT_DTYPES = ("float32", "bfloat16")
QUANTISATIONS = ("fp8", "fp8-ue8m0", "v4")

# About two minutes on two cores of a current server CPU.
DEFAULT_NUM_STEPS = 500


@dataclasses.dataclass(frozen=True)
class MakeModelOptions:
    """How to make the model.

    Attributes:
        directory: where the finished model goes. It must not exist yet, be empty, or hold a
            model that this package made.
        random: skip training; the weights are drawn at random.
        seed: decides the initial weights and the order of the training windows, >= 0.
        num_steps: optimizer steps, >= 1; None means `DEFAULT_NUM_STEPS`. Must be None with
            `random`.
        weight_dtype: type of the stored weights, "float32" or "bfloat16". The router biases are
            float32 in both.
        num_threads: CPU threads, >= 1. It decides the order of sums, so the same bytes need the
            same number.
        force: make the model even if the directory holds one; that one is replaced.
        show_progress: write progress to stderr.
        quantisation: make a quantised model from the float one that the options above describe:
            "fp8" and "fp8-ue8m0" are that model in 128 x 128 blocks with fp32 or power-of-two
            scales, "v4" is a DeepSeek-V4 with its experts in FP4. None: the float model itself.
        source: where that float model (in float32) lies or is put; None means beside
            `directory`, with "-float" after its name.

    Raises:
        SettingsError: a field has a value it cannot have.
    """

    directory: Path
    random: bool = False
    seed: int = 0
    num_steps: int | None = None
    weight_dtype: str = "float32"
    num_threads: int = 2
    force: bool = False
    show_progress: bool = True
    quantisation: str | None = None
    source: Path | None = None

    def __post_init__(self) -> None:
        if self.random and self.num_steps is not None:
            raise SettingsError(
                f"A random model is not trained, yet {self.num_steps} training steps were asked "
                "for: leave out --steps or --random."
            )
        if self.weight_dtype not in WEIGHT_DTYPES:
            raise SettingsError(
                f"The weights can be stored as {' or '.join(WEIGHT_DTYPES)}, "
                f"not as {self.weight_dtype!r}."
            )
        self._check_quantisation()
        _require_within(0, 2**63 - 1, "seed", self.seed)
        _require_within(1, 4096, "number of threads", self.num_threads)
        if self.num_steps is not None:
            _require_within(1, 10**9, "number of steps", self.num_steps)

    def _check_quantisation(self) -> None:
        if self.quantisation is None:
            if self.source is not None:
                raise SettingsError(
                    f"A model is made from {self.source} only to quantise it: choose one of the "
                    f"formats {', '.join(QUANTISATIONS)}, or leave out --source."
                )
            return
        if self.quantisation not in QUANTISATIONS:
            raise SettingsError(
                f"A model can be quantised as {', '.join(QUANTISATIONS)}, "
                f"not as {self.quantisation!r}."
            )
        if self.weight_dtype != "bfloat16":
            raise SettingsError(
                f"What stays unquantised in a {self.quantisation} model is bfloat16, so its "
                f"weight_dtype cannot be {self.weight_dtype}."
            )

    @property
    def source_options(self) -> "MakeModelOptions":
        """How the float model of a quantised one is made."""
        beside = self.directory.with_name(f"{self.directory.name}-float")
        return dataclasses.replace(
            self,
            directory=self.source or beside,
            weight_dtype="float32",
            force=False,
            quantisation=None,
            source=None,
        )

    @property
    def recipe(self) -> dict[str, bool | int | str]:
        """The options that decide the bytes of the model, as they go into the manifest."""
        num_trained_steps = DEFAULT_NUM_STEPS if self.num_steps is None else self.num_steps
        quantised = {} if self.quantisation is None else {"quantisation": self.quantisation}
        return {
            "random": self.random,
            "seed": self.seed,
            "num_steps": 0 if self.random else num_trained_steps,
            "weight_dtype": self.weight_dtype,
            "num_threads": self.num_threads,
            **quantised,
        }


@dataclasses.dataclass(frozen=True)
class ModelReport:
    """What was made. Perplexities are per token, over the held-out standard-library files.

    Attributes:
        directory: the finished model.
        reused: True if it was already there, made with the same options.
        num_parameters: all weights, quantised or not; router biases are not counted.
        final_train_loss: mean over the last twentieth of the steps, nats per token; None for a
            random model and for a DeepSeek-V4, which is not trained as a whole.
        heldout_perplexity: of the stored model, its weights as float32.
        unigram_perplexity: of the token frequencies of the training text, the score of a model
            that learned nothing about order.
        heldout_bits_per_byte: the same as `heldout_perplexity`, but independent of the tokenizer.
        corpus_sha256: of the training text; it differs between Python versions.
        seconds: wall time of the making.
    """

    directory: Path
    reused: bool
    num_parameters: int
    final_train_loss: float | None
    heldout_perplexity: float
    unigram_perplexity: float
    heldout_bits_per_byte: float
    corpus_sha256: str
    seconds: float

    def summary(self) -> str:
        """A few lines for a person."""
        loss = "not trained" if self.final_train_loss is None else f"{self.final_train_loss:.3f}"
        origin = "already there" if self.reused else f"made in {self.seconds:.0f} s"
        return (
            f"{self.directory}: {origin}\n"
            f"  parameters           {self.num_parameters / 1e6:.2f} M\n"
            f"  final training loss  {loss}\n"
            f"  held-out perplexity  {self.heldout_perplexity:.1f}"
            f" (unigram {self.unigram_perplexity:.1f};"
            f" {self.heldout_bits_per_byte:.3f} bits per byte)"
        )


def _require_within(minimum: int, maximum: int, what: str, value: int) -> None:
    if not minimum <= value <= maximum:
        raise SettingsError(f"The {what} must be from {minimum} to {maximum}, not {value}.")
