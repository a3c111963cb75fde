"""Mean over ranks of matrices that are sent as low-rank factors (`PowerSGD`).

Rank i has the matrix M_i = G_i + E_i, n x m: its values, and its *residual*, the part of earlier M_i that it has not
sent. All ranks have the same factor Q, m x r, with r much less than n and m. <...> is the mean over ranks, an
all-reduce:

    P = orthonormal columns of <M_i Q>              n x r, power iteration
    R = <M_i' P>                                    m x r
    mean of the G_i <- P R'                         = P P' <M_i>: the part of the mean in the directions of P
    E_i <- M_i - P (M_i' P)'                        the other part of this rank's own matrix
    Q <- R / largest element of R                   warm start: the next iteration continues from this one

So the sum of all results so far, plus the mean of the residuals, is the sum of the means of all G_i so far. E_i is a
projection of M_i, so residuals do not grow if the gradients of ranks always differ. The scale of Q would not matter in
exact arithmetic. It keeps the products of very small or large gradients in the range of float32.

The products M_i Q of all matrices travel in one all-reduce, and the products M_i' P in another, together with the
tensors that are sent whole. Source: Vogels et al. 2019, Algorithms 1 and 2.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from sordino.codecs import PowerSGD
from sordino.errors import UsageError
from sordino.runtime.devices import HOST
from sordino.runtime.exchange.block_count import BlockCount
from sordino.runtime.exchange.transfers import Transfers


@dataclass
class _Matrix:
    """One of the tensors, as a matrix.

    Attributes:
        place: its number among the tensors.
        right: the factor Q, float32 [columns, rank]. It is the same on all ranks, and finite.
        residual: E, float32 [rows, columns], finite. A view of the residuals of all tensors.
    """

    place: int
    right: torch.Tensor
    residual: torch.Tensor


class LowRankMean:
    """Mean over some ranks of tensors with fixed shapes, as low-rank factors, computed on the tensors' device.

    Memory: 4 bytes per element of the tensors, and during `run` up to 8 more.

    Args:
        codec: the codec, the same on all ranks.
        tensors: tensors with the shapes and the device of the tensors to average, the same on all ranks.
        name: what the tensors are, for errors.
        transfers: the collectives of the ranks.
    """

    def __init__(self, codec: PowerSGD, tensors: Sequence[torch.Tensor], name: str, transfers: Transfers) -> None:
        self._name, self._transfers = name, transfers
        self._shapes = [tensor.shape for tensor in tensors]
        self._matrices: list[_Matrix] = []
        self.residuals: list[torch.Tensor] = []
        """Residuals of this rank for all elements of the tensors, in one float32 tensor; [] if there are no tensors.

        Residuals of tensors that are sent whole are 0, unless a loaded state has others.
        """
        self._whole: list[tuple[int, torch.Tensor]] = []
        """Numbers of the tensors that are sent whole, and views of their residuals."""
        self._bad = BlockCount(tensors[0].device if tensors else HOST)
        """Number of tensors of this rank that were not finite."""
        self._unreported = False  # whether `report` has not read the count of the last complete mean
        generator = torch.Generator().manual_seed(0)  # the same numbers on all ranks
        every = [codec.factors(tensor.shape) for tensor in tensors]
        counts = [tensor.numel() for tensor in tensors]
        if tensors:
            self.residuals = [torch.zeros(sum(counts), dtype=torch.float32, device=tensors[0].device)]
        for place, (tensor, factors, end) in enumerate(zip(tensors, every, accumulate(counts))):
            residual = self.residuals[0][end - tensor.numel() : end]
            if factors is None:
                self._whole.append((place, residual.view(tensor.shape)))
                continue
            first = torch.randn(factors[1], codec.rank, generator=generator, dtype=torch.float32, device=HOST)
            self._matrices.append(_Matrix(place, first.to(tensor.device), residual.view(factors)))

    @property
    def matrix_residuals(self) -> dict[int, torch.Tensor]:
        """Residuals of this rank by number of the tensor, float32 [rows, columns]. The caller must not change them."""
        return {one.place: one.residual for one in self._matrices}

    @torch.no_grad()
    def run(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by their means over all ranks. Collective. With one rank they stay as they are.

        A tensor with a NaN or an infinity becomes NaN on all ranks if it is sent in factors. Its residual and its
        factor stay unchanged, and the rank that has it warns (`report`).

        Args:
            tensors: floating-point tensors with the shapes of this object, of any strides.

        Raises:
            UsageError: a tensor has another shape.
            PeerLost, Timeout, TransportError: the operation has failed. Tensors, residuals and factors are unchanged,
                except after a late failure on a GPU (`TensorMean.run`).
        """
        shapes = [tensor.shape for tensor in tensors]
        if shapes != self._shapes:
            raise UsageError(f"{self._name}: shapes are {shapes}, and must be {self._shapes}")
        if self._transfers.size == 1 or not tensors:
            return
        self.report()
        with torch.autocast(tensors[0].device.type, enabled=False):  # the caller's autocast would multiply in 16 bits
            self._run(tensors)

    def report(self) -> None:
        """Warn if tensors of this rank in the last complete `run` were not finite (`TensorMean.report`)."""
        if not self._unreported:
            return
        self._unreported = False
        count = self._bad.read()
        if count > 0:
            warnings.warn(
                f"{self._name}: {count} of {len(self._shapes)} tensors of this rank have a NaN or an infinity, so "
                "their means are not finite on any rank",
                RuntimeWarning,
                stacklevel=2,
            )

    def _run(self, tensors: Sequence[torch.Tensor]) -> None:
        values = [self._with_residual(one, tensors[one.place]) for one in self._matrices]
        whole = [tensors[place].to(torch.float32) + residual for place, residual in self._whole]
        bad = [~value.isfinite().all() for value in [*values, *whole]]
        self._bad.value.copy_(torch.stack(bad).sum())
        self._bad.send()
        # A product with an infinity could be finite, in a library that skips zeros.
        products = [
            torch.mm(value, one.right).masked_fill_(no, torch.nan)
            for value, one, no in zip(values, self._matrices, bad)
        ]
        bases = [orthonormal(mean) for mean in self._averaged(products, "left")]
        own = [torch.mm(value.T, basis) for value, basis in zip(values, bases)]
        means = self._averaged([*own, *whole], "right")
        for one, value, basis, sent, mean in zip(self._matrices, values, bases, own, means):
            self._finish(one, value, basis, sent, mean, tensors[one.place])
        for (place, residual), mean in zip(self._whole, means[len(own) :]):
            tensors[place].copy_(mean)
            residual.masked_fill_(mean.isfinite(), 0.0)  # it has been sent
        self._unreported = True

    def _with_residual(self, matrix: _Matrix, tensor: torch.Tensor) -> torch.Tensor:
        """Return the matrix that this rank is to send, in new memory."""
        return tensor.to(torch.float32).reshape(matrix.residual.shape) + matrix.residual

    def _averaged(self, tensors: Sequence[torch.Tensor], part: str) -> list[torch.Tensor]:
        """Return the means of float32 tensors over all ranks, in one all-reduce."""
        if not tensors:
            return []
        mean = self._transfers.all_reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]), part)()
        parts = mean.split([tensor.numel() for tensor in tensors])
        return [one.view(tensor.shape) for one, tensor in zip(parts, tensors)]

    def _finish(
        self,
        matrix: _Matrix,
        values: torch.Tensor,
        basis: torch.Tensor,
        sent: torch.Tensor,
        mean: torch.Tensor,
        tensor: torch.Tensor,
    ) -> None:
        """Write the mean of a matrix, and keep its residual and its factor.

        Args:
            matrix: the matrix.
            values: M_i, which is overwritten.
            basis: P.
            sent: M_i' P.
            mean: R.
            tensor: the tensor that is written.
        """
        found = torch.mm(basis, mean.T)
        fine = found.isfinite().all()
        tensor.copy_(found.masked_fill_(~fine, torch.nan).view(tensor.shape))
        rest = values.addmm_(basis, sent.T, alpha=-1).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        matrix.residual.copy_(torch.where(fine, rest, matrix.residual))
        largest = mean.abs().amax()
        # A mean of 0 has no directions to continue with.
        matrix.right = torch.where(fine & (largest > 0), mean / largest, matrix.right)


def orthonormal(values: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis of a space that contains the columns of a matrix.

    Computed in float64, so that ranks whose libraries round differently nearly always get the same float32 values.

    Args:
        values: float32 [n, r], with n at least r. Columns may be linearly dependent, or 0.

    Returns:
        float32 [n, r]; NaN unless all values are finite.
    """
    fine = values.isfinite().all()
    basis: torch.Tensor = torch.linalg.qr(torch.where(fine, values, 0.0).double()).Q
    return basis.to(torch.float32).masked_fill_(~fine, torch.nan)
