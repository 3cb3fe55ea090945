"""`jaxserve convert`: a model as a self-contained folder in one dtype."""

from jsonargparse import ArgumentParser, Namespace


def parser(**options) -> ArgumentParser:
    """The command's options; `options` are those of the parser itself."""
    parser = ArgumentParser(
        description="Write a model to a folder, in one dtype: as Hugging Face's safetensors, for other programs, "
        "and as an Orbax tree, as the engine holds it. The folder can be loaded like any other model.",
        **options,
    )
    parser.add_argument("model", nargs="?", type=str, help="a folder, a GGUF file or a hub id; none is the demo model")
    parser.add_argument("--output", type=str, required=True, help="the folder to write")
    parser.add_argument("--dtype", type=str, default="auto", help="float32, bfloat16, float16; auto is the model's own")
    parser.add_argument("--format", type=str, default="both", help="orbax, hugging_face or both")
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it holds a model")
    return parser


def run(options: Namespace) -> int:
    """Convert and print where the result is; returns the exit status. Raises as `convert`."""
    from jaxserve.checkpoint.convert import convert  # loads JAX

    print(
        convert(
            options.model,
            options.output,
            dtype=options.dtype,
            format=options.format,
            overwrite=options.overwrite,
        )
    )
    return 0
