"""A small pipeline that went through all three steps on the real broker, and copies of its lake to damage.

Two batches. Of 14 records of Invoices and 7 of InvoiceStatus, each partition's offsets from 0:

    Invoices 0    c1 c2 c3 c5 c5 | u9      two with the key 5: the second is a surplus
    Invoices 1    c4 c(null) bytes tombstone d1 | c6 c7 c8
    Status 0      s1 s2 s5 | s4 x3 x7      the x are of a newer writer schema; s3 and s6 to s8 are missing

so that 1, 2, 5 and, in the second batch, 4, 3 and 7 are joined; c6, c8, the second c5 and the null key wait. The delete
d1 comes before s1, and is emitted all the same: the output is not held.
"""

from __future__ import annotations

import json
import secrets
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template

import pytest

from zync_assets.kafka.registry import Registry
from zync_assets.local.services import Services
from zync_assets.pipeline import Pipeline, RegistryConfig
from zync_assets_tests.mini import framed, make_pipeline, run_steps, send

INVOICE = {
    "type": "record",
    "name": "Invoice",
    "fields": [
        {"name": "op", "type": "string"},
        {"name": "ID", "type": ["null", "long"]},
        {"name": "customer", "type": ["null", "string"]},
    ],
}
STATUS = {
    "type": "record",
    "name": "Status",
    "fields": [{"name": "InvoiceID", "type": "long"}, {"name": "status", "type": "string"}],
}
WIDER_STATUS = {**STATUS, "fields": [*STATUS["fields"], {"name": "note", "type": "string", "default": ""}]}

FILE = """
inputs:
  - {topic: $invoices, pool: Raw, key-format: string, value-format: avro}
  - {topic: $status, pool: Raw, key-format: string, value-format: avro}
outputs:
  - {topic: $new, pool: Staging, key-format: string, value-format: avro, create: {replication-factor: 1}, hold: false}
transforms:
  - name: new-invoice
    type: denorm
    where: {left: value.op = 'c', right: value.status <> 'void'}
    left: $invoices
    right: $status
    join-on: left.value.ID = right.value.InvoiceID
    out: $new
    key: left.key
    value: {ID: left.value.ID, customer: left.value.customer, status: right.value.status}
  - name: delete
    type: stateless
    where: value.op = 'd'
    in: $invoices
    out: $new
    key: in.key
    value: null
"""


@dataclass(frozen=True)
class Chain:
    """A pipeline whose lake may be damaged, and the names of its topics."""

    pipeline: Pipeline
    invoices: str
    status: str
    new: str

    @property
    def lake(self) -> Path:
        return Path(self.pipeline.lake)


def make_chain(services: Services, folder: Path, prefix: str) -> Chain:
    """Topics with the given prefix, filled in two batches, each taken through all steps."""
    invoices, status, new = (f"{prefix}.{name}" for name in ("Invoices", "InvoiceStatus", "New"))
    text = Template(FILE).substitute(invoices=invoices, status=status, new=new)
    pipeline = make_pipeline(services, folder, text, name="chain", lake="./lake", partitions=(2, 1))
    registry = Registry(RegistryConfig(services.registry_url))
    ids = {
        "invoice": registry.register(f"{invoices}-value", json.dumps(INVOICE)),
        "status": registry.register(f"{status}-value", json.dumps(STATUS)),
        "wider": registry.register(f"{status}-value", json.dumps(WIDER_STATUS)),
    }

    def invoice(op: str, number: int | None) -> tuple[str, bytes]:
        value = {"op": op, "ID": number, "customer": f"customer {number}"}
        return f"k{number}", framed(ids["invoice"], INVOICE, value)

    def state(number: int, wider: bool = False) -> tuple[str, bytes]:
        value = {"InvoiceID": number, "status": "paid", "note": "n"}
        return f"s{number}", framed(ids["wider" if wider else "status"], WIDER_STATUS if wider else STATUS, value)

    def put(topic: str, partition: int, records: list[tuple[str | None, bytes | None]]) -> None:
        send(pipeline, topic, records, partition, times=[1_700_000_000_000] * len(records))

    put(invoices, 0, [invoice("c", 1), invoice("c", 2), invoice("c", 3), invoice("c", 5), invoice("c", 5)])
    put(
        invoices,
        1,
        [invoice("c", 4), invoice("c", None), ("bad", b"no avro"), ("k1", None), invoice("d", 1)],
    )
    put(status, 0, [state(1), state(2), state(5)])
    run_steps(pipeline)
    put(invoices, 0, [invoice("u", 9)])
    put(invoices, 1, [invoice("c", 6), invoice("c", 7), invoice("c", 8)])
    put(status, 0, [state(4), state(3, True), state(7, True)])
    run_steps(pipeline)
    return Chain(pipeline, invoices, status, new)


@pytest.fixture(scope="session")
def sound_chain(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """The chain as it should be. Leave it so."""
    return make_chain(services, tmp_path_factory.mktemp("chain"), f"chain-{secrets.token_hex(4)}")


@pytest.fixture
def chain(sound_chain: Chain, tmp_path: Path) -> Chain:
    """The chain with a lake of its own, for a test to damage. Its topics are shared."""
    lake = tmp_path / "lake"
    shutil.copytree(sound_chain.lake, lake)
    path = tmp_path / "pipeline.yaml"
    path.write_text(sound_chain.pipeline.path.read_text())
    return replace(sound_chain, pipeline=replace(sound_chain.pipeline, path=path, lake=str(lake)))
