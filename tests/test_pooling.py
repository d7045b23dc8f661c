"""mean_pool: the mean of the hidden states over real tokens, or over all positions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lmd_utils as lmd

# Two texts of four positions and two dimensions, the second with two real tokens.
STATES = torch.tensor(
    [
        [[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [6.0, 60.0]],
        [[1.0, -1.0], [3.0, -5.0], [100.0, 100.0], [100.0, 100.0]],
    ]
)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def test_mean_over_real_tokens_by_hand():
    pooled = lmd.mean_pool(STATES, MASK)
    torch.testing.assert_close(pooled, torch.tensor([[3.0, 30.0], [2.0, -3.0]]), rtol=0, atol=0)


def test_mean_over_length_by_hand():
    """The authors' divisor: the padded positions add nothing to the sum and count in the divisor."""
    pooled = lmd.mean_pool(STATES, MASK, divisor="length")
    torch.testing.assert_close(pooled, torch.tensor([[3.0, 30.0], [1.0, -1.5]]), rtol=0, atol=0)


def test_the_mask_may_be_boolean_or_float():
    expected = lmd.mean_pool(STATES, MASK)
    for dtype in (torch.bool, torch.float32, torch.int32):
        torch.testing.assert_close(lmd.mean_pool(STATES, MASK.to(dtype)), expected, rtol=0, atol=0)


def test_masked_positions_do_not_count_even_when_they_are_not_finite():
    states = STATES.clone()
    states[1, 2:] = float("nan")
    torch.testing.assert_close(
        lmd.mean_pool(states, MASK), torch.tensor([[3.0, 30.0], [2.0, -3.0]]), rtol=0, atol=0
    )


def test_half_precision_states_are_summed_in_float32():
    """The result is float32; bfloat16 would round it to eight bits, an error of 2e-4 here."""
    states = torch.full((1, 4096, 1), 1e-3, dtype=torch.bfloat16)
    states[0, 0] = 1.0
    expected = states.double().mean(dim=1)
    pooled = lmd.mean_pool(states, torch.ones(1, 4096, dtype=torch.long))
    assert pooled.dtype == torch.float32
    torch.testing.assert_close(pooled.double(), expected, rtol=1e-6, atol=0)


def test_a_row_without_tokens_is_named():
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])
    for divisor in ("tokens", "length"):
        with pytest.raises(ValueError, match=r"\b1\b"):
            lmd.mean_pool(STATES, mask, divisor=divisor)


@pytest.mark.parametrize(
    "states, mask",
    [
        (STATES, MASK[:, :3]),
        (STATES, MASK[:1]),
        (STATES[0], MASK),
        (STATES, MASK[0]),
    ],
)
def test_shapes_that_do_not_fit_are_refused(states, mask):
    with pytest.raises(ValueError, match=r"attention_mask"):
        lmd.mean_pool(states, mask)


def test_an_unknown_divisor_is_refused():
    with pytest.raises(ValueError, match="words"):
        lmd.mean_pool(STATES, MASK, divisor="words")


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    extra=st.integers(0, 9),
    left=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_more_padding_never_changes_the_mean_over_tokens(lengths, extra, left, seed):
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    states = torch.randn(len(lengths), width, 3, generator=generator)
    mask = (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()
    pad = (extra, 0) if left else (0, extra)
    wider = torch.nn.functional.pad(states, (0, 0, *pad), value=7.0)
    wider_mask = torch.nn.functional.pad(mask, pad)
    torch.testing.assert_close(
        lmd.mean_pool(wider, wider_mask), lmd.mean_pool(states, mask), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(
        lmd.mean_pool(wider, wider_mask, divisor="length") * (width + extra),
        lmd.mean_pool(states, mask, divisor="length") * width,
        rtol=1e-5,
        atol=1e-5,
    )
