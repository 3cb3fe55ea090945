"""`jaxserve convert`: a model as a self-contained folder in one dtype, for other programs and for this engine."""

from jsonargparse import ArgumentParser, Namespace

OWN = ("model", "output", "dtype", "format", "overwrite")


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", type=str, help="a folder, a GGUF file or a hub id; none is the demo model")
    parser.add_argument("--output", type=str, required=True, help="the folder to write")
    parser.add_argument("--dtype", type=str, default="auto", help="float32, bfloat16, float16; auto is the model's own")
    parser.add_argument("--format", type=str, default="both", help="orbax, hugging_face or both")
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it holds a model")


def run(options: Namespace) -> int:
    """Convert and print where the result is. Raises as `checkpoint.convert.convert`."""
    from jaxserve.checkpoint.convert import convert  # loads JAX

    given = {name: options[name] for name in ("dtype", "format", "overwrite")}
    print(convert(options.model, options.output, **given))
    return 0
