"""The default partitioner, against the Java client in the jars of the local broker."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zync_assets.kafka.partitioner import key_partitions
from zync_assets.local.java import find_java, resolve

JAVA = """
import java.util.HexFormat;
import java.util.Scanner;
import org.apache.kafka.clients.producer.internals.BuiltInPartitioner;

public class Partitions {
    public static void main(String[] arguments) {
        Scanner lines = new Scanner(System.in);
        while (lines.hasNextLine()) {
            String[] words = lines.nextLine().split(" ", -1);
            byte[] key = HexFormat.of().parseHex(words[1]);
            System.out.println(BuiltInPartitioner.partitionForKey(key, Integer.parseInt(words[0])));
        }
    }
}
"""
Ask = Callable[[Sequence[bytes], int], list[int]]


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """The partitions of keys by the Java client."""
    found = find_java()
    source = Path(tmp_path_factory.mktemp("java"), "Partitions.java")
    source.write_text(JAVA)
    command = [str(found), "-cp", f"{resolve(found).kafka}/*", str(source)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, answers = process.stdin, process.stdout

        def ask(keys: Sequence[bytes], count: int) -> list[int]:
            asked.writelines(f"{count} {key.hex()}\n" for key in keys)
            asked.flush()
            return [int(answers.readline()) for _ in keys]

        yield ask


@given(
    keys=st.lists(st.binary(max_size=70), max_size=40),
    count=st.sampled_from([1, 2, 3, 12, 100_000]),
    cut=st.integers(0, 3),
)
def test_partitions_equal_those_of_the_java_client(java: Ask, keys: list[bytes], count: int, cut: int) -> None:
    array = pa.array([b"before", *keys], pa.binary()).slice(1)[cut:]
    assert key_partitions(array, count).tolist() == java(keys[cut:], count)


def test_long_keys_among_short_ones(java: Ask) -> None:
    keys = [b"", b"\xff" * 4, b"ab" * 5_000, *(bytes([at]) * at for at in range(100)), b"long" * 20_001]
    assert key_partitions(pa.array(keys, pa.binary()), 12).tolist() == java(keys, 12)


def test_a_null_key_goes_to_partition_0() -> None:
    found = key_partitions(pa.array([None, b"k1", None, b""], pa.binary()), 3)
    whole = key_partitions(pa.array([b"k1", b""], pa.binary()), 3)
    assert found.tolist() == [0, whole[0], 0, whole[1]]
    assert key_partitions(pa.array([], pa.binary()), 3).dtype == np.int32
    assert key_partitions(pa.array([None, None], pa.binary()), 3).tolist() == [0, 0]
