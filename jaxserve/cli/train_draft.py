"""`jaxserve train-draft`: trains a draft head for a model on what the model itself says; see docs/SPECULATION.md."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from jaxserve.cli.options import add_shared_options, encoded, engine_config
from jaxserve.draft_training.options import TrainingOptions
from jaxserve.validation import require

if TYPE_CHECKING:
    from jaxserve.engine import Engine
    from jaxserve.models.decoder import Decoder

TRAINING = {
    "draft_vocab": "tokens that the head knows; 0 is all",
    "epochs": "times that the answers are seen, the last quarter of them three drafts deep",
    "batch_size": "sequences in a step",
    "learning_rate": "the highest",
}
OWN = ("output_dir", "prompts", "num_prompts", "length", "seed", *TRAINING)


def add_options(parser: ArgumentParser) -> None:
    add_shared_options(parser, sampling=False)
    parser.add_argument("--output_dir", type=str, required=True, help="a folder for the head and all that leads to it")
    parser.add_argument("--prompts", type=str, help="a JSONL file of prompts, turns or messages; none: the model's own")
    parser.add_argument("--num_prompts", type=int, default=2048, help="prompts that the model answers")
    parser.add_argument("--length", type=int, default=256, help="tokens of prompt and answer together")
    for name, meaning in TRAINING.items():
        default = getattr(TrainingOptions, name)
        parser.add_argument(f"--{name}", type=type(default), default=default, help=meaning)
    parser.add_argument("--seed", type=int, default=0, help="of prompts, answers and training")


def run(options: Namespace) -> int:
    """Generate, train, write `output_dir/head`. What is there already is not done again."""
    from jaxserve.checkpoint.draft_head import save_head
    from jaxserve.draft_training import corpus
    from jaxserve.draft_training.report import plot
    from jaxserve.draft_training.trainer import train

    for name in ("num_prompts", "length"):
        require(options[name] >= 8, name, options[name], "an integer of at least 8")
    given = {name: options[name] for name in TRAINING} | {"draft_vocab": options.draft_vocab or None}
    training, folder = TrainingOptions(**given, seed=options.seed), Path(options.output_dir)
    target, count = _answer(options, folder)
    shards = corpus.num_shards(count)
    with _bar("steps", None) as advance:
        trained = train(target, folder / "corpus", shards, training, folder, report=advance)
    save_head(trained.head, folder / "head")
    plot(trained, folder / "curve.svg")
    rates = ", ".join(f"{rate:.3f}" for rate in trained.accuracy[-1])
    print(f"{folder / 'head'}: drafts that are right, by depth, where those before are: {rates}")
    return 0


def _answer(options: Namespace, output: Path) -> tuple["Decoder", int]:
    """The target, and how many prompts it has answered."""
    from jaxserve.checkpoint.hugging_face import dtype_of, read_config
    from jaxserve.checkpoint.loading import load_decoder, model_folder
    from jaxserve.draft_training.corpus import write_corpus
    from jaxserve.engine import Engine
    from jaxserve.text.tokenizer import Tokenizer

    config = engine_config(options)
    folder = model_folder(config.model)
    described = read_config(folder, max_model_len=config.max_model_len)
    target = load_decoder(folder, dtype=dtype_of(described, config.dtype), max_model_len=config.max_model_len)
    tokenizer = Tokenizer.from_folder(model_folder(config.tokenizer or config.model), vocab_size=described.vocab_size)
    with Engine(config, decoder=target, text=tokenizer) as engine:
        prompts = encoded(_prompts(options, engine, output), engine)
        require(bool(prompts), "prompts", options.prompts, "a file with at least one prompt")
        with _bar("answers", len(prompts)) as advance:
            how = {"length": options.length, "seed": options.seed, "report": advance}
            write_corpus(engine, target, prompts, output / "corpus", **how)
    return target, len(prompts)


def _prompts(options: Namespace, engine: "Engine", output: Path) -> list[str | list]:
    from jaxserve.bench.workload import jsonl_prompts
    from jaxserve.draft_training.prompts import own_prompts

    file = Path(options.prompts or output / "prompts.jsonl")
    if options.prompts:
        require(file.is_file(), "prompts", options.prompts, "an existing file")
    else:
        output.mkdir(parents=True, exist_ok=True)
        with _bar("prompts", options.num_prompts) as advance:
            own_prompts(engine, options.num_prompts, file, seed=options.seed, report=advance)
    return list(jsonl_prompts(file, options.num_prompts))


@contextmanager
def _bar(what: str, total: int | None) -> Iterator[Callable[..., None]]:
    """A bar on stderr, told how many more there are and, with `loss`, how the training stands."""
    from tqdm import tqdm

    with tqdm(total=total, desc=what, dynamic_ncols=True) as bar:

        def advance(count: int, *, of: int | None = None, loss: float | None = None) -> None:
            if of is not None:
                bar.total = of
            if loss is not None:
                bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            bar.update(count)

        yield advance
