"""Warnings are written once, whatever has been done to the root logger."""

import logging

import pytest

from sam.log import LINE, show_warnings


@pytest.fixture
def root():
    """The root logger; its level is put back."""
    level = logging.root.level
    yield logging.root
    logging.root.setLevel(level)


@pytest.fixture
def package(root):
    """A package's name, on a root logger that shows errors only."""
    root.setLevel(logging.ERROR)
    name = "a_package_of_this_test"
    yield name
    logger = logging.getLogger(name)
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)


def said_by(package, capsys, *of_the_application):
    """Lines on standard error, in a process whose root logger has these handlers; pytest's own are away."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.root, "handlers", [logging.NullHandler(), *of_the_application])
        logging.getLogger(f"{package}.part").warning("no drafts: %s", "a fault")
        logging.getLogger(f"{package}.part").info("all is well")
    return capsys.readouterr().err.splitlines()


def test_a_warning_is_one_line_that_is_found_again(package, capsys):
    assert said_by(package, capsys) == [], "as the root logger has it"
    for _ in range(3):
        show_warnings(package)
    (line,) = said_by(package, capsys)
    assert LINE.fullmatch(line).groups() == (f"{package}.part", "no drafts: a fault")


def test_a_handler_of_the_application_writes_it_alone(package, capsys):
    show_warnings(package)
    written = []
    handler = logging.Handler()
    handler.emit = written.append
    assert said_by(package, capsys, handler) == [] and len(written) == 1
    handler.setLevel(logging.ERROR)  # as the package that raises the root's level does to its handlers
    assert len(said_by(package, capsys, handler)) == 1 and len(written) == 1


def test_the_level_that_an_application_has_set_stays(package, capsys):
    logging.getLogger(package).setLevel(logging.ERROR)
    show_warnings(package)
    assert said_by(package, capsys) == []


def test_vllms_plugin_shows_them_where_there_is_no_recipe(monkeypatch):
    from sam.vllm import plugin

    logger = logging.getLogger("sam")
    monkeypatch.setattr(logger, "handlers", [])
    plugin.register()
    plugin.register()
    assert [type(handler).__name__ for handler in logger.handlers] == ["WarningsOnStderr"]
