"""Which tests `make test` runs."""

import pytest


def repeats(names, cases, keep=1, few=None, **more):
    """Parametrize a test, and mark the cases that repeat what the first ones show.

    After the first `keep` they are `more`, which `make test` leaves out, and after the first `few`
    `slow` as well, which only `make test-all` runs. So does it with what is marked `more` twice,
    by two `repeats` or by another mark of the test.
    """
    single = "," not in names if isinstance(names, str) else False
    marked = []
    for k, case in enumerate(cases):
        if not isinstance(case, type(pytest.param())):
            case = pytest.param(*([case] if single else case))
        marks = [pytest.mark.more] if k >= keep else []
        if few is not None and k >= few:
            marks.append(pytest.mark.slow)
        marked.append(case._replace(marks=(*case.marks, *marks)))
    return pytest.mark.parametrize(names, marked, **more)
