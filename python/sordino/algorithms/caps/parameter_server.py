"""Parameter server: parts of an arena are sent to the ranks that serve them, which average them and send them back.

    exchange            topology    content
    skipping.sent       FromOwner   flags of the sent items, from rank 0; only with servers without a model
    skipping.gather     ToOwner     the sent items, from workers to the server of each: averaged there
    skipping.scatter    FromOwner   the averages, from servers to workers

Segments are numbered by the ranks that serve them. The flags determine which parts are sent, and to which server. Large
items are cut, so that none of them fills a server alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sordino._core import FromOwner, Handle, Layout, ToOwner
from sordino.algorithms import CaPS
from sordino.algorithms.caps import piece_bytes, place_by_size
from sordino.algorithms.caps.items import Items
from sordino.algorithms.caps.recent import Recent
from sordino.runtime.context import Context
from sordino.runtime.dtypes import DTYPE_CODES
from sordino.runtime.exchange.flat_buffer import FlatBuffer
from sordino.runtime.exchange.groups import new_channel
from sordino.runtime.exchange.helpers import Helpers
from sordino.runtime.process_set import ProcessSet, global_process_set


class ParameterServer:
    """Parameter server, as seen by one of its workers or servers. Construction is collective over all of them.

    Args:
        context: the context of all workers and servers.
        all_ranks: the workers and servers. Workers come first.
        algorithm: the algorithm with its settings.
        items: the items of the arena, the same on all ranks.
        values: the parameters of this rank; on a server without a model, a buffer with any content.
    """

    def __init__(
        self, context: Context, all_ranks: ProcessSet, algorithm: CaPS, items: Items, values: FlatBuffer
    ) -> None:
        ranks = all_ranks.ranks or []
        self._items, self._values, self._size = items, values, len(ranks)
        self._workers = len(algorithm.roles(ranks).workers)
        self._servers = algorithm.serving_ranks(self._size)
        self._pieces, self._piece_of = items.cut(piece_bytes(int(items.bytes.sum()), len(self._servers)))
        self._channel = new_channel(context, all_ranks)
        self._channel.compare([values])
        self._layouts: Recent[Layout] = Recent()  # the same sets of items are sent again and again
        # Created once, because the channel identifies topologies by object identity.
        gather, scatter = ToOwner(self._size, self._workers), FromOwner(self._size, self._workers)
        self._ways = ("skipping.gather", gather), ("skipping.scatter", scatter)
        self._from_first = FromOwner(self._size)
        layout = Layout([("sent", DTYPE_CODES[torch.uint8], (len(items),))], groups=[0])
        self._flags = FlatBuffer(context, layout) if algorithm.dedicated else None

    def loads(self, sent: NDArray[np.bool_]) -> list[int]:
        """Return the bytes that each server gets from each worker if the items `sent` are sent."""
        pieces = sent[self._piece_of]
        sizes, owners = self._pieces.bytes[pieces], self._owners(pieces)[pieces]
        return [int(sizes[owners == server].sum()) for server in self._servers]

    def average(self, sent: NDArray[np.bool_]) -> None:
        """Replace the items that are sent by their means over all workers. Collective.

        Args:
            sent: flags of the sent items, bool [items]; the same on all workers. At least one sent item has elements.
        """
        if self._flags is not None:
            flags = self._flags.flat(torch.uint8, 0, len(self._items))
            flags.copy_(torch.from_numpy(sent))
            self._tell().wait()
        self._exchange(sent)

    def serve(self) -> None:
        """Serve as a rank without a model: take part in every exchange in a loop, until an exchange raises.

        Raises:
            PeerLost: the workers have left or, if `World.failed`, a rank is lost.
        """
        assert self._flags is not None
        while True:
            self._tell(serving=True).wait()
            self._exchange(self._flags.flat(torch.uint8, 0, len(self._items)).numpy().astype(bool))

    def _tell(self, serving: bool = False) -> Handle:
        assert self._flags is not None
        return self._channel.start("skipping.sent", self._from_first, self._flags, serving=serving)

    def _exchange(self, sent: NDArray[np.bool_]) -> None:
        layout = self._layouts.get(sent.tobytes(), self._find_layout)
        for label, way in self._ways:
            self._channel.start(label, way, self._values, layout=layout, wait=True).wait()

    def _owners(self, pieces: NDArray[np.bool_]) -> NDArray[np.int64]:
        owners = np.zeros(len(self._pieces), np.int64)
        placed = place_by_size(self._pieces.bytes[pieces].tolist(), len(self._servers))
        owners[pieces] = np.array(self._servers, np.int64)[placed]
        return owners

    def _find_layout(self, sent: bytes) -> Layout:
        pieces = np.frombuffer(sent, dtype=bool)[self._piece_of]
        return Layout.of_parts(self._pieces.parts(pieces, self._owners(pieces)), self._values.layout.bytes)


def helper_server(helpers: Helpers, algorithm: CaPS, description: Any) -> ParameterServer:
    """Return the parameter server of a rank without a model, from the workers' description (`Items.as_lists`).

    Collective over all workers and servers.
    """
    items, count = Items.from_lists(description)
    layout = Layout([("parameters", DTYPE_CODES[torch.uint8], (count,))], groups=[0])
    values = FlatBuffer(helpers.context, layout)
    return ParameterServer(helpers.context, global_process_set, algorithm, items, values)
