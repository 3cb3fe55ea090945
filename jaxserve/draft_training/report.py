"""The curve of a training run."""

from pathlib import Path

from jaxserve.draft_training.trainer import Trained


def plot(trained: Trained, file: Path) -> None:
    """Loss by step, and accuracy by depth after each epoch. RuntimeError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError("no picture without matplotlib: pip install 'jaxserve[train]'") from None

    steps = len(trained.losses)
    figure = Figure(figsize=(9, 4), layout="constrained")
    losses, rates = figure.subplots(1, 2)
    losses.plot(range(1, steps + 1), trained.losses, linewidth=0.8)
    losses.set(xlabel="step", ylabel="loss", yscale="log")
    ends = [steps * (epoch + 1) / len(trained.accuracy) for epoch in range(len(trained.accuracy))]
    for depth, values in enumerate(zip(*trained.accuracy, strict=True), 1):
        rates.plot(ends, values, marker="o", label=f"draft {depth}")
    rates.set(xlabel="step", ylabel="share of drafts that are right", ylim=(0, 1))
    rates.legend()
    figure.savefig(file)
