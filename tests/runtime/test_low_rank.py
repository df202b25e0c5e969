"""Matrices as products of two factors of few columns."""

import pytest
import torch

from toolkit.cost.compression import LOW_RANK
from toolkit.runtime.low_rank import factor, multiply


def read(*tensors):
    """What matrices and vectors are read as that travel in one message."""
    shapes = [(len(tensor), tensor[0].numel()) for tensor in tensors]
    numbers = torch.cat([tensor.flatten() for tensor in tensors])
    content = factor(numbers, shapes, LOW_RANK)
    assert content.dtype == torch.uint8
    assert len(content) == LOW_RANK.n_bytes(shapes)
    pieces = multiply(content, shapes, LOW_RANK, numbers.dtype).split(
        [tensor.numel() for tensor in tensors]
    )
    return [piece.view_as(x) for piece, x in zip(pieces, tensors, strict=True)]


def drawn(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("shape", [(30, 40), (40, 30), (17, 16)])
def test_matrices_of_low_rank_arrive_as_they_are(shape):
    n_rows, n_columns = shape
    matrix = drawn(n_rows, 4) @ drawn(4, n_columns)
    torch.testing.assert_close(read(matrix)[0], matrix, rtol=1e-5, atol=1e-5)


def test_others_lose_little_more_than_their_smallest_parts():
    matrix = drawn(40, 60)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    values = 0.5 ** torch.arange(40, dtype=torch.float64)
    matrix = left @ values.diag() @ right
    least_error = values[4:].norm()
    assert least_error <= (read(matrix)[0] - matrix).norm() <= 1.05 * least_error


def test_small_ones_and_vectors_arrive_as_they_are():
    tensors = [drawn(16, 16), drawn(30, 40), drawn(100), drawn(1, 50)]
    arrived = read(*tensors)
    for index in (0, 2, 3):
        torch.testing.assert_close(arrived[index], tensors[index].float().double())
    assert torch.linalg.matrix_rank(arrived[1], rtol=1e-5) == 4


def test_zeros_arrive_as_zeros():
    assert not read(torch.zeros(30, 40))[0].any()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_what_is_not_finite_arrives_so(broken):
    matrix = drawn(30, 40)
    matrix[3, 5] = broken
    assert not read(matrix)[0].isfinite().any()


def test_no_matrix_takes_no_bytes():
    content = factor(torch.empty(0), [], LOW_RANK)
    assert content.numel() == 0
    assert multiply(content, [], LOW_RANK, torch.float32).numel() == 0
