import json
import threading

import pytest
import torch

from sam.vllm import row_classes
from sam.vllm.row_classes import RowClass, find_row_class, known_or_found, multiply, rounding_sensitive

WEIGHT = torch.randn(8, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture(autouse=True)
def cache_file(tmp_path, monkeypatch):
    monkeypatch.setattr(row_classes, "CACHE_FILE", tmp_path / "cache" / "classes.json")
    monkeypatch.setattr(row_classes, "_known", {})
    return row_classes.CACHE_FILE


def exact(rows):
    """Integers in float64: bits do not depend on the order of sums."""
    return rows.double().mul(1024).round() @ WEIGHT.mul(1024).round().T


def find(*products):
    return find_row_class(products, 8, 16, torch.float32)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (lambda rows: False, RowClass(1, 8192)),
        (lambda rows: rows == 1, RowClass(2, 8192)),
        (lambda rows: rows < 16, RowClass(16, 8192)),
        (lambda rows: rows in (7, 9), RowClass(10, 8192)),
        (lambda rows: rows > 256, RowClass(1, 256)),
        (lambda rows: rows < 3 or rows == 1024, RowClass(3, 777)),
        (lambda rows: rows != 64, RowClass(64, 64)),
    ],
    ids=["all", "one row", "few", "two numbers", "many", "few and many", "every number another"],
)
def test_the_class_around_64_rows_is_found(wrong, expected):
    """Rows of the kernel differ in their last bits where `wrong(number of rows)`."""
    assert find(lambda rows: exact(rows) + (1 if wrong(len(rows)) else 0)) == expected
    by_place = find(lambda rows: exact(rows) + (torch.arange(len(rows)) % 16 == 0)[:, None])
    assert by_place is None, "rows that depend on their place have no class"


def test_the_order_of_sums_shows_in_bfloat16():
    """Sums of size 1 hide it: of those of normal numbers, rounded, none of 2,048 differs here."""

    def sums(rows, weight, step=1):
        """Products of bfloat16 that are summed in float32 in an order, and rounded."""
        total = torch.zeros(len(rows), len(weight))
        for at in range(64)[::step]:
            total += rows[:, at, None].float() * weight[:, at].float()
        return total.to(torch.bfloat16)

    plain = [torch.randn(n, 64, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (256, 8)]
    rows, weight = (rounding_sensitive(n, 64, torch.bfloat16, seed=n, sign=sign) for n, sign in ((256, 1), (8, -1)))
    assert (sums(*plain) != sums(*plain, -1)).sum() == 0 and (sums(rows, weight) != sums(rows, weight, -1)).sum() > 500

    def kernel(rows):
        return sums(rows, weight, -1 if len(rows) == 18 else 1)

    assert find_row_class([kernel], 8, 64, torch.bfloat16) == RowClass(19, 8192)


@pytest.mark.parametrize("row_class", [RowClass(1, 64), RowClass(2, 64), RowClass(16, 48), RowClass(64, 64)])
def test_any_number_of_rows_is_multiplied_with_numbers_of_the_class(row_class):
    called = []

    def product(rows):
        called.append(len(rows))
        return exact(rows)

    rows = torch.randn(200, 16)
    for count in range(201):
        for multiple in (1, 8):
            found = multiply(product, rows[:count], row_class, multiple)
            assert torch.equal(found, exact(rows[:count]).to(torch.float64))
    assert row_class.smallest <= min(called) and max(called) <= row_class.largest


def test_a_class_is_found_once_by_machine(cache_file, monkeypatch):
    def fail():
        raise AssertionError("compared again")

    assert known_or_found("packed 8x16", lambda: RowClass(2, 64)) == RowClass(2, 64)
    assert known_or_found("plain 8x16", lambda: None) is None
    for _ in range(2):
        assert known_or_found("packed 8x16", fail) == RowClass(2, 64)
        assert known_or_found("plain 8x16", fail) is None
        monkeypatch.setattr(row_classes, "_known", {})  # another process
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert known_or_found("packed 8x16", lambda: RowClass(5, 64)) == RowClass(5, 64)
    assert len(cache_file.read_text().splitlines()) == 3


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"other": 1}', "[1]\n", '["x", [1, 2, 3]]\n', "\xff"])
def test_a_file_that_cannot_be_used_costs_a_comparison_only(cache_file, content):
    if content is None:
        cache_file.parent.touch()  # not a folder
    else:
        cache_file.parent.mkdir()
        cache_file.write_text(content, encoding="latin1")
    found = []
    for _ in range(2):
        assert known_or_found("packed 8x16", lambda: found.append(1) or RowClass(2, 64)) == RowClass(2, 64)
    assert len(found) == 1


def test_what_several_write_at_the_same_time_is_kept(cache_file, monkeypatch):
    def write(name):
        for row in range(20):
            known_or_found(f"{name} {row}", lambda: RowClass(2, 64))

    threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = [json.loads(line) for line in cache_file.read_text().splitlines()]
    assert len({key for key, _ in lines}) == 40 and all(row_class == [2, 64] for _, row_class in lines)
