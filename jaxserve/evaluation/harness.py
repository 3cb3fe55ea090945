"""`python -m jaxserve.evaluation.harness run --model jaxserve ...`: lm-evaluation-harness's own command line, which
then knows this model class whatever its version.
"""

from jaxserve.extras import optional

MODEL = "jaxserve.evaluation.lm_eval_model:JaxserveLM"


def register() -> None:
    """Make `jaxserve` a name of the harness's models; twice is fine. ValueError without the extra."""
    registry = optional("lm_eval.api.registry", "lm-eval", "the harness")
    optional("lm_eval.models", "lm-eval", "the harness")  # registers its own, which it only does for an empty list
    if "jaxserve" not in registry.model_registry:
        registry.model_registry.register("jaxserve", target=MODEL)


def main() -> None:
    register()
    optional("lm_eval.__main__", "lm-eval", "the harness").cli_evaluate()


if __name__ == "__main__":
    main()
