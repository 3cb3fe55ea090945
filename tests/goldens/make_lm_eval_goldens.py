"""Makes lm_eval.json: what lm-evaluation-harness says of the demo model through its own `hf` class, in float32.

    python make_lm_eval_goldens.py FOLDER        (Python 3.12, torch 2.13, lm-eval 0.4.13)

FOLDER holds the demo model in Hugging Face's form (`jaxserve convert --output FOLDER --dtype float32`). The tasks are
those of configs/evaluation/lm_eval; contexts are cut to 100 tokens, so that the passages take several windows.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TASKS = ("example_choice", "example_arithmetic", "example_passages")
MAX_LENGTH = {"example_choice": 2048, "example_arithmetic": 2048, "example_passages": 100}
LIMIT = {"example_choice": 20, "example_arithmetic": 6, "example_passages": 6}


def evaluated(make_model) -> dict:
    """Scores and responses by task; `make_model(max_length)` gives the harness's model."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    os.chdir(ROOT)  # the tasks name their data from here
    manager = TaskManager(include_path="configs/evaluation/lm_eval", include_defaults=False)
    found = {}
    for task in TASKS:
        model = make_model(MAX_LENGTH[task])
        options = {"task_manager": manager, "limit": LIMIT[task], "bootstrap_iters": 0, "log_samples": True}
        result = simple_evaluate(model, tasks=[task], **options)
        scores = {k: v for k, v in result["results"][task].items() if isinstance(v, float) and "stderr" not in k}
        samples = sorted(result["samples"][task], key=lambda sample: sample["doc_id"])
        found[task] = {"scores": scores, "responses": [sample["resps"] for sample in samples]}
    return found


def main(folder: str) -> None:
    from lm_eval.models.huggingface import HFLM

    os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp()
    options = {"dtype": "float32", "device": "cpu", "batch_size": 6}
    found = evaluated(lambda max_length: HFLM(folder, max_length=max_length, **options))
    text = json.dumps(found, indent=1)
    Path(__file__).with_name("lm_eval.json").write_text(text + "\n")
    print({task: values["scores"] for task, values in found.items()})


if __name__ == "__main__":
    main(sys.argv[1])
