"""What the tests of Pallas kernels share: interpretation with races counted, and kernels broken on purpose."""

from contextlib import contextmanager

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

SYNCHRONISATION = ("barrier_wait", "commit_smem", "wait_smem_to_gmem")


class Races:
    """The race detection of every kernel that ran; JAX itself keeps the last one's only."""

    def __init__(self):
        self.states = []

    def found(self) -> bool:
        assert self.states, "no kernel was interpreted with race detection"
        return any(state.races_found for state in self.states)


@contextmanager
def watched_races():
    """Collects the race detection of the kernels interpreted within. Resets the interpreter if one of them raised."""
    races, made = Races(), gpu_callbacks.GPURaceDetectionState

    def recorded(**arguments):
        races.states.append(made(**arguments))
        return races.states[-1]

    gpu_callbacks.GPURaceDetectionState = recorded
    try:
        yield races
    except BaseException:
        gpu_callbacks.reset_gpu_interpret_mode_state()
        raise
    finally:
        gpu_callbacks.GPURaceDetectionState = made


class Calls:
    """Replaces one function of `plgpu`: counts its calls while kernels are traced and leaves one of them out."""

    def __init__(self, monkeypatch, name: str, left_out: int | None = None):
        self.count, self.left_out, self._function = 0, left_out, getattr(plgpu, name)
        monkeypatch.setattr(plgpu, name, self)

    def __call__(self, *arguments, **options):
        number, self.count = self.count, self.count + 1
        if number != self.left_out:
            self._function(*arguments, **options)
