"""The orthogonal matrix nearest to a matrix, nearly, by products alone (Jordan et al. 2024,
kellerjordan.github.io/posts/muon).
"""

from collections.abc import Callable

import torch

# steepest at 0; singular values end up between 0.7 and 1.2 instead of at 1
COEFFICIENTS = 3.4445, -4.7750, 2.0315


def newton_schulz(
    matrix: torch.Tensor, num_steps: int, poll: Callable[[], None] = lambda: None
) -> torch.Tensor:
    """Return U S V' of a matrix U D V', with all of S near 1: X <- a X + b (X X') X + c (X X')^2 X.

    poll: called between the `num_steps` steps, so that messages move on meanwhile.
    """
    (a, b, c), (rows, columns) = COEFFICIENTS, matrix.shape
    x = matrix.mT if rows > columns else matrix  # X X' is then the smaller one
    x = x / torch.linalg.vector_norm(x).clamp(min=1e-7)
    for _ in range(num_steps):
        poll()
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if rows > columns else x
