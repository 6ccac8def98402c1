"""docs/settings.md and docs/metrics.md match the code; every setting and metric is described."""

import pytest

from steplog.reference import DOCS, METRICS, PAGES, metrics_of
from steplog.settings import SERVICES, settings_class


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run `make docs`"


@pytest.mark.parametrize("service", SERVICES)
def test_every_setting_has_a_description(service: str) -> None:
    fields = settings_class(service).model_fields
    assert [name for name, field in fields.items() if not field.description] == []


@pytest.mark.parametrize("module", METRICS)
def test_every_metric_has_a_description(module: str) -> None:
    metrics = list(metrics_of(module))
    assert metrics
    assert [name for name, _, _, description in metrics if not description] == []


def test_every_metrics_module_is_in_the_reference() -> None:
    root = DOCS.parent
    files = [*root.glob("*/metrics.py"), *root.glob("*/*/metrics.py")]
    modules = {".".join(file.relative_to(root).with_suffix("").parts) for file in files}
    assert modules == set(METRICS)
