"""The trainer's log-probabilities against a plain sum, and the report against the definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_tools import run, tiny_decoder, tiny_engine
from flax import nnx

from jaxserve import CompletionOutput, SamplingParams
from jaxserve.training import logprob_report, output_logprobs, sequence_logprobs

TOKENS = np.random.default_rng(0).integers(0, 300, 40).astype(np.int32)


@nnx.jit
def last_logits(model, tokens):
    """Logits after the last of these tokens."""
    return model.logits(model(tokens, jnp.arange(tokens.shape[0], dtype=jnp.int32))[-1:])[0]


def test_sequence_logprobs_are_the_log_softmax_of_each_prefix_alone():
    model = tiny_decoder("float32", num_hidden_layers=1)
    got = np.asarray(nnx.jit(sequence_logprobs)(model, jnp.asarray(TOKENS)))
    assert got.shape == (39,)
    for length in (1, 17, 39):
        logits = np.asarray(last_logits(model, jnp.asarray(TOKENS[:length]))).astype(np.float64)
        want = logits[TOKENS[length]] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        assert got[length - 1] == pytest.approx(want, abs=2e-5)


def test_sequence_logprobs_have_gradients_and_padding_at_the_end_does_not_matter():
    model = tiny_decoder("float32", num_hidden_layers=1)
    loss = lambda model, tokens: -sequence_logprobs(model, tokens)[:9].mean()
    full, padded = jnp.asarray(TOKENS), jnp.asarray(np.concatenate([TOKENS[:10], np.zeros(30, np.int32)]))

    @nnx.jit
    def measure(model, tokens):
        """The loss, its gradient's sum of magnitudes, and its difference quotient along the gradient's signs."""
        value, gradient = nnx.value_and_grad(loss)(model, tokens)
        graph, state = nnx.split(model)
        moved = lambda size: nnx.merge(
            graph, jax.tree.map(lambda leaf, way: leaf + size * jnp.sign(way), state, gradient)
        )
        quotient = (loss(moved(1e-4), tokens) - loss(moved(-1e-4), tokens)) / 2e-4
        return value, sum(jnp.abs(leaf).sum() for leaf in jax.tree.leaves(gradient)), quotient

    value, along, quotient = map(float, measure(model, full))
    assert along > 0
    assert quotient == pytest.approx(along, rel=0.02)
    assert float(measure(model, padded)[0]) == pytest.approx(value, abs=1e-5)


def test_the_engine_reports_nearly_what_the_trainer_computes():
    model = tiny_decoder("float32")
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=0)
    with tiny_engine("float32") as engine:
        [result] = run(engine, [(TOKENS.tolist(), params)])
    [output] = result.outputs
    trainer = nnx.jit(sequence_logprobs)(model, jnp.asarray(TOKENS.tolist() + output.token_ids))[len(TOKENS) - 1 :]
    report = logprob_report(trainer, output_logprobs(output))
    assert report.num_tokens == 12
    assert report.max_abs_difference < 1e-4
    assert report.clipped_share == 0


def test_the_report_follows_its_definitions():
    trainer, engine = np.log([[0.5, 0.2], [0.3, 0.9]]), np.log([[0.4, 0.25], [0.3, 0.3]])
    ratios = np.array([1.25, 0.8, 1.0, 3.0])
    report = logprob_report(trainer, engine, epsilon=0.21)
    assert report.num_tokens == 4
    assert report.mean_abs_difference == pytest.approx(np.abs(np.log(ratios)).mean())
    assert report.max_abs_difference == pytest.approx(np.log(3))
    assert report.kl_k1 == pytest.approx(-np.log(ratios).mean())
    assert report.kl_k3 == pytest.approx((ratios - 1 - np.log(ratios)).mean())
    assert report.clipped_share == 0.5
    masked = logprob_report(trainer, engine, epsilon=0.21, mask=[[True, True], [True, False]])
    assert (masked.num_tokens, masked.clipped_share) == (3, pytest.approx(1 / 3))
    assert masked.max_abs_difference == pytest.approx(np.log(1.25))


def test_both_estimators_find_the_divergence_of_two_distributions():
    """Samples from the engine's distribution q: the means of k1 and k3 are KL(q || p)."""
    source = np.random.default_rng(1)
    p, q = source.dirichlet(np.ones(20)), source.dirichlet(np.ones(20))
    p = 0.5 * p + 0.5 * q
    samples = source.choice(20, size=200_000, p=q)
    report = logprob_report(np.log(p[samples]), np.log(q[samples]))
    exact = float((q * np.log(q / p)).sum())
    assert report.kl_k1 == pytest.approx(exact, rel=0.02)
    assert report.kl_k3 == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.0], [0.0, 1.0]), r"^engine_logprobs=\(2,\)"),
        (([], []), "^trainer_logprobs=.* at least one token"),
        (([-1.0, float("-inf")], [-1.0, -2.0]), "^trainer_logprobs=.*finite"),
        (([-1.0], [float("nan")]), "^engine_logprobs=.*finite"),
    ],
)
def test_wrong_reports_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        logprob_report(*arguments)


def test_an_answer_without_logprobs_is_refused():
    with pytest.raises(ValueError, match=r"^output.logprobs: None"):
        output_logprobs(CompletionOutput(0, token_ids=[3]))
