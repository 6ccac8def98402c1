"""The reference is what the code says, and the code says something of everything."""

import pytest

from steplog.reference import DOCS, METRICS, PAGES, metrics_of
from steplog.settings import SERVICES, settings_class


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_the_code_gives(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run `make docs`"


@pytest.mark.parametrize("service", SERVICES)
def test_every_setting_says_what_it_means(service: str) -> None:
    fields = settings_class(service).model_fields
    assert [name for name, field in fields.items() if not field.description] == []


@pytest.mark.parametrize("module", METRICS)
def test_every_metric_says_what_it_means(module: str) -> None:
    found = list(metrics_of(module))
    assert found
    assert [name for name, _, _, what in found if not what] == []


def test_no_module_of_metrics_is_left_out() -> None:
    root = DOCS.parent
    files = [*root.glob("*/metrics.py"), *root.glob("*/*/metrics.py")]
    modules = {".".join(file.relative_to(root).with_suffix("").parts) for file in files}
    assert modules == set(METRICS)
