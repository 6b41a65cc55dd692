"""The table of ``tools/mutants.py`` fits the package; the tool itself is run by hand, as it takes minutes."""

from __future__ import annotations

import re

import pytest

from .test_project import ROOT, tool

mutants = tool("mutants")


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=str)
def test_each_mutant_changes_a_text_that_is_there_once(mutant):
    text = mutants.mutated(mutant)
    assert text != (ROOT / "src" / "psgd" / mutant.file).read_text("utf-8")
    compile(text, mutant.file, "exec")


def test_each_mutant_has_a_name_of_its_own_and_tests_that_there_are():
    names = [str(mutant) for mutant in mutants.MUTANTS]
    assert len(set(names)) == len(names)
    for test in {test for mutant in mutants.MUTANTS for test in mutant.tests.split()}:
        file, _, name = test.partition("::")
        text = (ROOT / "tests" / file).read_text("utf-8")
        name = name.partition("[")[0]
        assert not name or re.search(rf"^def {name}\(", text, flags=re.MULTILINE), test


def test_a_text_that_is_not_there_once_is_an_error():
    gone = mutants.MUTANTS[0]._replace(old="no such text")
    with pytest.raises(mutants.WrongTableError, match="occurs 0 times instead of once"):
        mutants.mutated(gone)
    often = mutants.MUTANTS[0]._replace(old="import")
    with pytest.raises(mutants.WrongTableError, match=r"occurs \d+ times instead of once"):
        mutants.mutated(often)


def test_mutants_can_be_listed(capsys):
    assert mutants.main(["--list", "--only", "groups/balance.py"]) == 0
    assert "groups/balance.py: balancing changes the product" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        mutants.main(["--list", "--only", "no such mutant"])
