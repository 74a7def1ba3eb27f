"""Which tests `make test` runs."""

import pytest


def repeats(names, cases, keep=1, **more):
    """Parametrize a test, and mark its cases after the first `keep` as `more`.

    `make test` leaves these out: they repeat what the first ones show.
    """
    single = "," not in names if isinstance(names, str) else False
    marked = []
    for case in list(cases)[keep:]:
        if not isinstance(case, type(pytest.param())):
            case = pytest.param(*([case] if single else case))
        marked.append(case._replace(marks=(*case.marks, pytest.mark.more)))
    return pytest.mark.parametrize(names, [*list(cases)[:keep], *marked], **more)
