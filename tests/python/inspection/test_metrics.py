"""Ports at which ranks serve their counters."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from ports import free_ports

import sordino.torch as hvd
from sordino import sim
from sordino.errors import UsageError
from sordino.inspection import metrics


@pytest.fixture
def taken() -> Iterator[int]:
    """Return the first of three consecutive ports, of which the first two are taken."""
    pytest.importorskip("prometheus_client")
    port = free_ports(3)
    with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):
        yield port
        metrics.stop()


def test_a_process_that_joins_takes_a_free_port(taken: int) -> None:
    """Ranks are renumbered when one is lost, but keep their ports. So the port of a newcomer's number may be taken."""
    metrics.start(f"127.0.0.1:{taken}", 1, joined=True)
    with socket.create_connection(("127.0.0.1", taken + 2)):
        pass


def test_a_rank_has_the_port_of_its_number_only(taken: int) -> None:
    with pytest.raises(UsageError, match=f"port {taken + 1} cannot be opened"):
        metrics.start(f"127.0.0.1:{taken}", 1)


def test_worlds_of_a_process_with_the_same_labels_count_together() -> None:
    """Groups of torch.distributed are such worlds. Prometheus refuses a name that comes twice with the same labels."""
    core = pytest.importorskip("prometheus_client.core")

    def look() -> None:
        hvd.barrier()
        if hvd.rank() > 0:
            return
        samples = [sample for family in metrics._Collector(core).collect() for sample in family.samples]
        assert len({(one.name, str(one.labels)) for one in samples}) == len(samples)
        (operations,) = (
            one.value for one in samples if one.name == "sordino_operations_total" and one.labels["rank"] == "0"
        )
        assert operations >= 2

    def work() -> None:
        hvd.barrier()
        if hvd.rank() == 0:
            sim.run(2, look)
        hvd.barrier()

    sim.run(2, work)


def test_an_address_of_ipv6_is_in_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("prometheus_client")
    asked: list[tuple[int, str]] = []

    def serve(port: int, host: str, _: object) -> None:
        asked.append((port, host))
        raise OSError

    monkeypatch.setattr(library, "start_http_server", serve)
    with pytest.raises(UsageError):
        metrics.start("[::1]:9400", 1)
    assert asked == [(9401, "::1")]
