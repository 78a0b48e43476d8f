import importlib

import pytest

from .scripts import FOLDER


@pytest.fixture
def script(monkeypatch):
    """`script("gpu")`: the module, imported as when it is run."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module
