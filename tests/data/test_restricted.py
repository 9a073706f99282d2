from __future__ import annotations

import os
import pickle
import resource
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsedp.data.restricted import field_of, restricted_loads
from sparsedp.errors import UsageError

ARRAYS = [
    np.arange(12, dtype=np.uint8).reshape(3, 4), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.zeros((1, 5), np.int64),
    np.arange(4, dtype=">i2"), np.array(3.5, np.float32), np.arange(10, dtype=np.uint8)[::2],
]  # fmt: skip


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("number", range(len(ARRAYS)))
def test_arrays_and_plain_values_come_back_as_they_were(protocol, number):
    content = pickle.dumps({"data": ARRAYS[number], "labels": [1, -2, 300], "name": "x", "raw": b"y"}, protocol=protocol)
    values = restricted_loads(content)
    found = field_of(values, "data", "x")
    assert found.dtype == ARRAYS[number].dtype
    assert np.array_equal(found, ARRAYS[number])
    assert field_of(values, "labels", "x") == [1, -2, 300]


def test_a_batch_as_python_2_wrote_it():
    raw = (
        b"\x80\x02}q\x00U\x04dataq\x01cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85U\x01b\x87Rq\x04"
        b"(K\x01K\x02K\x03\x86cnumpy\ndtype\nq\x05U\x02u1K\x00K\x01\x87Rq\x06(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89U\x06abcdeftbsU\x06labelsq\x07]q\x08(K\x01K\x02es."
    )
    assert field_of(pickle.loads(raw, encoding="bytes"), "labels", "x") == [1, 2]  # noqa: S301 - the bytes above
    values = restricted_loads(raw)
    assert field_of(values, "data", "x").tolist() == [[97, 98, 99], [100, 101, 102]]
    assert field_of(values, "labels", "x") == [1, 2]


class Payload:
    def __init__(self, function, *given):
        self.parts = (function, given)

    def __reduce__(self):
        return self.parts


@pytest.mark.parametrize("protocol", range(6))
def test_code_in_a_pickle_is_not_executed(tmp_path, protocol):
    mark = tmp_path / "executed"
    payloads = [
        Payload(os.system, f"touch {mark}"), Payload(os.mkdir, str(mark)), Payload(subprocess.check_call, ["touch", str(mark)]),
        Payload(eval, f"open({str(mark)!r}, 'w')"), Payload(getattr, "x", "upper"), Payload(np.load, str(mark)),
    ]  # fmt: skip
    for payload in payloads:
        for value in (payload, {"data": payload}, {"data": [payload]}):
            with pytest.raises(UsageError, match="a pickle of more than arrays"):
                restricted_loads(pickle.dumps(value, protocol=protocol))
    assert not mark.exists()
    pickle.loads(pickle.dumps(payloads[1]))  # noqa: S301 - the same bytes do act where they are trusted
    assert mark.exists()


HOSTILE = {
    "object array": pickle.dumps({"data": np.array([object, 1], dtype=object)}),
    "structured array": pickle.dumps({"data": np.zeros(2, dtype=[("a", "i4")])}),
    "dates": pickle.dumps({"data": np.zeros(2, "M8[s]")}),
    "a set": pickle.dumps({"data": {1, 2}}),
    "a complex": pickle.dumps({"data": 1j}),
    "persistent id": b"\x80\x02}U\x01aU\x01bQs.",
    "memo of four billion": b"\x80\x02}r\xff\xff\xff\xff.",
    "state for a dictionary": b"\x80\x02}}U\x01aK\x01sb.",
    "attributes of a stand-in": b"\x80\x02}U\x01acnumpy\ndtype\nN}U\x04nameK\x01s\x86bs.",
    "wrong length": pickle.dumps({"data": np.zeros(6, np.uint8)}).replace(b"K\x06\x85", b"K\x07\x85"),
    "tuples without end": b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"K\x01s.",
    "new object": b"\x80\x02}U\x01acnumpy\nndarray\n)\x81s.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused_in_a_sentence(name):
    with pytest.raises(UsageError, match="it is a pickle of more than|it is not a complete pickle") as error:
        restricted_loads(HOSTILE[name])
    assert "\n" not in str(error.value)


def test_what_is_no_dictionary_or_lacks_an_entry_is_refused():
    with pytest.raises(UsageError, match="holds a list where a dictionary belongs"):
        restricted_loads(pickle.dumps([1]))
    with pytest.raises(UsageError, match="has no entry 'data'"):
        field_of(restricted_loads(pickle.dumps({})), "data", "x")


SEEDS = [pickle.dumps({"data": np.arange(6, dtype=np.uint8).reshape(2, 3), "labels": [1, 2]}, protocol=p) for p in (2, 3, 4, 5)]


@given(st.sampled_from(SEEDS), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4), st.integers(0, 400))
def test_damaged_pickles_parse_or_are_refused_in_a_sentence(seed, changes, end):
    content = bytearray(seed)
    for place, value in changes:
        content[place % len(content)] = value
    try:
        values = restricted_loads(bytes(content[: end or None]))
    except UsageError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(values, dict)


@given(st.binary(max_size=40))
def test_any_bytes_are_refused_in_a_sentence(content):
    try:
        restricted_loads(b"\x80\x02}" + content)
    except UsageError as error:
        assert "\n" not in str(error)


def collisions(count):
    """Whole numbers that all hash to zero, as the keys of a dictionary: each insertion looks at all that came before."""
    numbers = ((place + 1) * (2**61 - 1) for place in range(count))
    return b"\x80\x02}(" + b"".join(b"\x8a\x0a" + n.to_bytes(10, "little") + b"N" for n in numbers) + b"u."


def copies(count, build):
    """One text, encoded again and again."""
    text = b"X" + struct.pack("<I", 1 << 18) + b"a" * (1 << 18)
    if build:
        state = b"(K\x01M\x00\x01M\x00\x04\x86h\x01\x89h\x00t"  # version, shape, kind, order, text
        kind = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tbq\x010"
        made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R" + state + b"b"
        return b"\x80\x02}U\x04data](" + text + b"q\x000" + kind + made * count + b"es."
    again = b"h\x01h\x02R"
    return b"\x80\x02}U\x04data](" + text + b"q\x000c_codecs\nencode\nq\x010h\x00U\x06latin1\x86q\x020" + again * count + b"es."


@pytest.mark.parametrize(
    "content",
    [collisions(60_000), copies(4000, False), copies(4000, True), b"\x80\x02]" + b"]a" * 60_000_000 + b"."],
    ids=["collisions", "copies", "copies in arrays", "lists"],
)
def test_a_small_file_takes_neither_hours_nor_all_memory(content):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    with pytest.raises(UsageError, match="more than arrays"):
        restricted_loads(content)
    assert time.process_time() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << (10 if sys.platform != "darwin" else 20)


def test_one_copy_of_a_text_is_no_bomb():
    assert len(field_of(restricted_loads(copies(1, False)), "data", "x")[0]) == 1 << 18
    assert field_of(restricted_loads(copies(1, True)), "data", "x")[0].value.shape == (256, 1024)
