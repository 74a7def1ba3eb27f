"""docs/lightning.md: its Python runs, from top to bottom, as it stands."""

import re
import sys
from pathlib import Path

import pytest

from tests import python

PAGE = Path(__file__).parents[2] / "docs/lightning.md"


@pytest.mark.more
@pytest.mark.timeout(300)
def test_the_page_s_python_runs_and_the_taggers_learn(tmp_path):
    pytest.importorskip("numba")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 7
    (tmp_path / "page.py").write_text("\n".join(blocks))
    done = python.run([sys.executable, "page.py"], cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr
    returns = [float(each) for each in re.findall(r"tagger (-?[\d.]+),", done.stdout)]
    assert len(returns) == 4
    assert max(returns) > 8.5  # by chance 6, at most 10 (`tests/test_learning.py`)
    assert "42 epochs, 215040 env steps" in done.stdout
    # Nothing is written but where the page says.
    assert {path.name for path in tmp_path.iterdir()} == {"page.py", "cartpole", "tag", "logs"}
