import pytest
import torch

from sam.vllm import row_classes
from sam.vllm.row_classes import RowClass, find_row_class, known_or_found, multiply

WEIGHT = torch.randn(8, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(row_classes, "CACHE_FOLDER", tmp_path / "cache" / "classes")
    return row_classes.CACHE_FOLDER


def exact(rows):
    """Integers in float64: bits do not depend on the order of sums."""
    return rows.double().mul(1024).round() @ WEIGHT.mul(1024).round().T


def find(*products):
    return find_row_class(products, 8, 16, torch.float32)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (lambda rows: False, RowClass(1, 8192)),
        (lambda rows: rows < 16, RowClass(16, 8192)),
        (lambda rows: rows < 3 or rows == 1024, RowClass(3, 777)),
        (lambda rows: rows != 64, RowClass(64, 64)),
    ],
    ids=["all", "few", "few and many", "every number another"],
)
def test_the_class_around_64_rows_is_found(wrong, expected):
    """Rows of the kernel differ in their last bits where `wrong(number of rows)`."""
    assert find(lambda rows: exact(rows) + (1 if wrong(len(rows)) else 0)) == expected
    by_place = find(lambda rows: exact(rows) + (torch.arange(len(rows)) % 16 == 0)[:, None])
    assert by_place is None, "rows that depend on their place have no class"


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


def test_a_class_is_found_once_by_machine_and_a_file_that_cannot_be_used_costs_a_comparison_only(folder, monkeypatch):
    found = []

    def find(row_class):
        return lambda: found.append(row_class) or row_class

    for _ in range(2):
        for name, row_class in {"packed 8x16": RowClass(2, 64), "plain 8x16": None}.items():
            assert known_or_found(name, find(row_class)) == row_class
    assert len(found) == len(list(folder.iterdir())) == 2
    for content in (b"{", b"[1]"):
        for path in folder.iterdir():
            path.write_bytes(content)
        assert known_or_found("packed 8x16", find(RowClass(2, 64))) == RowClass(2, 64)
    assert len(found) == 4
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert known_or_found("packed 8x16", find(RowClass(5, 64))) == RowClass(5, 64)
