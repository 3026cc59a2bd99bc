"""Secret draws: 256 bits go in, all of them matter, and the server sees no two batches permuted alike."""

import numpy as np
import torch

from privlab.split.protocol.secret import batch_draws, generator, new_secret


def drawn(rng: torch.Generator, n: int = 50) -> torch.Tensor:
    return torch.randperm(n, generator=rng)


def test_a_generator_is_the_mersenne_twister_with_the_state_that_the_secret_gives() -> None:
    """NumPy's is the oracle: the same 624 words, the same numbers."""
    import hashlib

    words = np.frombuffer(hashlib.shake_256(b"s/1/batch").digest(4 * 624), "<u4")
    oracle = np.random.MT19937()
    oracle.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 624}}
    want = oracle.random_raw(2000).astype(np.int64)
    found = torch.randint(2**16, (2000,), generator=generator("s", 1, "batch"))
    assert torch.equal(found, torch.from_numpy(want) % 2**16)


def test_seeds_that_share_32_bits_are_one_generator_and_secrets_are_not() -> None:
    """Why `manual_seed` is not used: a server could try all of its orders."""
    one, other = (torch.Generator().manual_seed(seed) for seed in (5, 5 + 2**32))
    assert torch.equal(drawn(one), drawn(other))
    secrets = [f"{bit:064x}" for bit in (0, 1, 2**32, 2**64, 2**255)]
    orders = {tuple(drawn(generator(secret, "model")).tolist()) for secret in secrets}
    assert len(orders) == len(secrets)


def test_the_same_purpose_draws_the_same_and_another_something_else() -> None:
    assert torch.equal(drawn(generator("s", 1, "batch")), drawn(generator("s", 1, "batch")))
    purposes = [(1, "batch"), (2, "batch"), (1, "image", 0), (1, "image", 1), ("model",)]
    assert len({tuple(drawn(generator("s", *purpose)).tolist()) for purpose in purposes}) == len(purposes)


def test_the_models_draws_outlive_a_batch_and_no_others_do() -> None:
    first, second = batch_draws("s", 1, 3), batch_draws("s", 2, 3)
    assert torch.equal(drawn(first.model), drawn(second.model))
    assert not torch.equal(drawn(first.batch), drawn(second.batch))
    orders = {tuple(drawn(rng).tolist()) for draws in (first, second) for rng in draws.images}
    assert len(orders) == 6


def test_fresh_draws_leave_the_models_alone() -> None:
    usual, fresh = batch_draws("s", 1, 2), batch_draws("s", 1, 2, fresh="f")
    assert torch.equal(drawn(usual.model), drawn(fresh.model))
    assert not torch.equal(drawn(usual.batch), drawn(fresh.batch))
    assert not torch.equal(drawn(usual.images[0]), drawn(fresh.images[0]))


def test_orders_are_uniform() -> None:
    """Each value stands at each place equally often: χ² with 81 degrees of freedom stays below its 99.99 % point."""
    n, draws = 10, 3000
    counts = torch.zeros(n, n)
    for i in range(draws):
        counts[torch.arange(n), drawn(generator("s", i), n)] += 1
    assert float(((counts - draws / n) ** 2 / (draws / n)).sum()) < 138


def test_new_secrets_have_256_bits_and_differ() -> None:
    secrets = {new_secret() for _ in range(10)}
    assert len(secrets) == 10
    assert {len(bytes.fromhex(secret)) for secret in secrets} == {32}
