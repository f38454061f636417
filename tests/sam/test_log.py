"""Warnings are written once, whatever has been done to the root logger."""

import logging

import pytest

from sam.log import LINE, show_warnings


def said_by(package, capsys, *of_the_application):
    """Lines on standard error, in a process whose root logger has these handlers; pytest's own are away."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.root, "handlers", [logging.NullHandler(), *of_the_application])
        logging.getLogger(f"{package}.part").warning("no drafts: %s", "a fault")
        logging.getLogger(f"{package}.part").info("all is well")
    return capsys.readouterr().err.splitlines()


def test_a_warning_is_one_line_that_is_found_again_and_what_an_application_has_set_stays(capsys, caplog):
    caplog.set_level(logging.ERROR)  # of the root logger, as vLLM's API server leaves it
    assert said_by(package := "a_package_of_this_test", capsys) == [], "as the root logger has it"
    for _ in range(3):
        show_warnings(package)
    (line,) = said_by(package, capsys)
    assert LINE.fullmatch(line).groups() == (f"{package}.part", "no drafts: a fault")
    written, handler = [], logging.Handler()
    handler.emit = written.append
    assert said_by(package, capsys, handler) == [] and len(written) == 1, "its handler writes the line alone"
    handler.setLevel(logging.ERROR)  # as the package that raises the root's level does to its handlers
    assert len(said_by(package, capsys, handler)) == 1 and len(written) == 1
    logging.getLogger(package).setLevel(logging.ERROR)
    show_warnings(package)
    assert said_by(package, capsys) == []
