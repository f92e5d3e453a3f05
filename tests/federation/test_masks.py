"""Masks and fixed-point sums: exact in the ring, near to real means, uniform, never repeated."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from federation.run_config import ConfigError, parse_run_config
from federation.sums.masks import (
    CHECK,
    Masks,
    check_array,
    decode_update,
    decode_wide,
    encode_update,
    encode_wide,
    round_digest,
    sum_arrays,
)
from federation.sums.members import SumError

DIGEST = hashlib.sha256(b"round").digest()
VECTORS = Path(__file__).parents[2] / "docs" / "masked-sums-vectors.json"


def keys_of(names):
    """Return a private key, and the public keys of the others, for each name."""
    private = {
        name: X25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())
        for name in names
    }
    public = {name: key.public_key().public_bytes_raw().hex() for name, key in private.items()}
    return {n: (private[n], {o: k for o, k in public.items() if o != n}) for n in names}


def masked(names, parts, digest=DIGEST):
    """Return each member's masked upload of ``parts``, dictionaries of arrays."""
    uploads = []
    for name, (key, peers) in keys_of(names).items():
        upload = {k: v.copy() for k, v in parts[name].items()}
        Masks(digest, name, key, peers).add_to(upload)
        uploads.append(upload)
    return uploads


@pytest.mark.parametrize("clients", [3, 10, 50])
def test_a_sum_is_the_weighted_mean(clients):
    random = np.random.default_rng(clients)
    names = [f"client-{i}" for i in random.permutation(clients)]
    sizes = random.integers(1, 5000, clients)
    changes = random.normal(0, 0.05, (clients, 40, 25)).astype(np.float32)
    importance = random.exponential(3.0, (clients, 7)).astype(np.float32)
    shares = sizes / sizes.sum()
    parts = {
        name: {
            "b.weight": encode_update(change, share, 1.0),
            "j": encode_wide(values, share),
            CHECK: check_array(int(size)),
        }
        for name, change, values, share, size in zip(
            names, changes, importance, shares, sizes, strict=True
        )
    }
    uploads = masked(names, parts)
    random.shuffle(uploads)
    total = sum_arrays(iter(uploads))
    assert set(total[CHECK]) == {sizes.sum()}
    received = random.normal(0, 0.05, (40, 25))
    mean = received + np.tensordot(shares, changes.astype(np.float64), 1)
    found = received + decode_update(total["b.weight"], clients, 1.0)
    assert np.linalg.norm(found - mean) <= 1e-7 * np.linalg.norm(mean)
    np.testing.assert_allclose(found, mean, atol=1e-8)
    expected = np.tensordot(shares, importance.astype(np.float64), 1)
    np.testing.assert_allclose(decode_wide(total["j"], clients), expected, atol=1e-10)


@pytest.mark.parametrize("bound", [2.0**-6, 1.0, 2.0**4])
@pytest.mark.parametrize("side", [-1.0, 1.0])
def test_extreme_updates_and_weights_do_not_wrap(bound, side):
    sizes = np.array([1, 10**9] * 25)
    shares = sizes / sizes.sum()
    far = np.full(1000, side * 1e30)
    total = sum((encode_update(far, share, bound) for share in shares), np.zeros(1000, np.uint32))
    np.testing.assert_allclose(decode_update(total, 50, bound), side * bound, rtol=1e-7)
    wide = sum((encode_wide(np.full(9, 1e30), s) for s in shares), np.zeros(9, np.uint64))
    np.testing.assert_allclose(decode_wide(wide, 50), 2.0**20, rtol=1e-7)


def test_masks_are_uniform_and_of_no_other_array_peer_or_round():
    names = ["a", "b", "c"]
    streams = {}
    for name, (key, peers) in keys_of(names).items():
        for digest in (DIGEST, hashlib.sha256(b"other").digest()):
            for peer, public in peers.items():
                arrays = {n: np.zeros(2**16, np.uint32) for n in ("x", "y")}
                Masks(digest, name, key, {peer: public}).add_to(arrays)
                streams |= {(name, peer, digest, n): a for n, a in arrays.items()}
    for values in streams.values():
        counts = np.bincount(values.view(np.uint8), minlength=256)
        expected = 2**18 / 256
        assert ((counts - expected) ** 2 / expected).sum() < 255 + 6 * (2 * 255) ** 0.5
        # Values at the ends of the ring occur; Flower's SecAgg+ never draws the top two.
        assert values.max() > 2**32 - 2**20
        assert values.min() < 2**20
    words = np.concatenate([v.reshape(-1, 4) for k, v in streams.items() if k[0] < k[1]])
    assert len(np.unique(words, axis=0)) == len(words)


def test_secrets_that_are_equal_after_folding_give_other_masks():
    """Flower's SecAgg+ folds a seed of 256 bits to 32 by XOR."""
    arrays = []
    for digest in (bytes(32), bytes.fromhex("01" * 4 + "01" * 4 + "00" * 24)):
        (key, peers), *_ = keys_of(["a", "b"]).values()
        array = np.zeros(64, np.uint32)
        Masks(digest, "a", key, peers).add_to({"x": array})
        arrays.append(array)
    assert not np.any(arrays[0] == arrays[1])


def test_what_cannot_be_summed_is_refused():
    for value in (float("nan"), float("inf")):
        with pytest.raises(FloatingPointError):
            encode_update(np.array([0.0, value]), 0.5, 1.0)
        with pytest.raises(FloatingPointError):
            encode_wide(np.array([value]), 0.5)
    with pytest.raises(SumError, match=r"beyond sums\.bound"):
        decode_update(np.array([2**30 + 9], np.uint32), 3, 1.0)
    with pytest.raises(SumError, match="beyond 2²⁰"):
        decode_wide(np.array([2**63], np.uint64), 3)
    with pytest.raises(SumError, match="key can't be used"):
        Masks(DIGEST, "a", X25519PrivateKey.generate(), {"b": "00" * 32})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"sums.bound": 0.3}, "must be a power of two"),
        ({"sums.bound": 1024.0}, "must be a power of two"),
        ({"sums.members": "members.json"}, "must be an absolute path"),
        ({"sums.enabled": False, "sums.bound": 2.0}, "need sums.enabled"),
        ({"strategy": "fl-glm"}, "sees each client's hidden states"),
        ({"late-replies": True}, "late-replies = true is not for sums.enabled"),
        ({"evaluate.show-answers": 2, "evaluate.generate": True}, "single clients' texts"),
        ({"min-nodes": 2}, "min-nodes of at least 3"),
    ],
)
def test_settings_that_sums_exclude_are_refused(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        parse_run_config({"sums.enabled": True, "min-nodes": 3} | settings)


def test_the_published_vectors():
    """Another implementation can be compared with these."""
    vectors = json.loads(VECTORS.read_text())
    keys = {n: bytes.fromhex(k) for n, k in vectors["private keys"].items()}
    public = {
        n: X25519PrivateKey.from_private_bytes(k).public_key().public_bytes_raw().hex()
        for n, k in keys.items()
    }
    received = np.array(vectors["received"], np.float32)
    digest = round_digest(
        vectors["facts"],
        {"arrays": {"weight": received}},
        [text.encode() for text in vectors["announcements"]],
    )
    assert digest.hex() == vectors["digest"]
    for name, upload in vectors["uploads"].items():
        change = np.array(vectors["adapters"][name], np.float32) - received.astype(np.float64)
        arrays = {
            "weight": encode_update(change, vectors["shares"][name], vectors["bound"]),
            CHECK: check_array(vectors["rows"][name]),
        }
        key = X25519PrivateKey.from_private_bytes(keys[name])
        peers = {n: k for n, k in public.items() if n != name}
        Masks(digest, name, key, peers).add_to(arrays)
        assert arrays["weight"].tolist() == upload["weight"]
        assert arrays[CHECK].tolist() == upload[CHECK]
