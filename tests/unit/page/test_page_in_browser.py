# SPDX-License-Identifier: Apache-2.0
"""The page in headless Chromium: no error, no request, no horizontal scrolling. VLLM_EDGE_PAGE is a page to take
instead of the example."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.page.data import PageData
from ansible.module_utils.vllm_edge.page.render import render_host

BROWSER = shutil.which("chromium-headless-shell")
PROBE = """<script>document.title = document.documentElement.scrollWidth + ' of ' + window.innerWidth + ', '
  + getComputedStyle(document.body).backgroundColor</script>"""
SCHEMES = {"dark": 0, "light": 1}
THOROUGH = pytest.mark.thorough
NO_BROWSER = "chromium-headless-shell is not installed: apt-get install it (Ubuntu 24.04 has none)"
pytestmark = [pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER), pytest.mark.slow]


@pytest.fixture
def path(page: str, tmp_path: Path) -> Path:
    path = tmp_path / "page.html"
    given = os.environ.get("VLLM_EDGE_PAGE")
    path.write_text(Path(given).read_text() if given else page)
    return path


def browse(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    home = page.parent / "profile"
    words = [str(BROWSER), "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking"]
    words += [f"--user-data-dir={home}", "--enable-logging=stderr", *options, page.as_uri()]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)


def test_no_error_and_no_request(path: Path, tmp_path: Path) -> None:
    log = tmp_path / "net.json"
    done = browse(path, f"--log-net-log={log}", "--dump-dom")
    assert "CONSOLE" not in done.stderr
    urls = re.findall(r'"url":"([^"]+)"', log.read_text())
    assert {url for url in urls if not url.startswith(("file:", "data:"))} == set()


def probe(path: Path, *options: str) -> tuple[int, int, int]:
    """The width of the page and of the window, and how bright the page is."""
    # The policy of the page would forbid the probe.
    path.write_text(re.sub(r"<meta http-equiv[^>]*>", "", path.read_text()).replace("</body>", f"{PROBE}</body>"))
    found = re.search(r"<title>(\d+) of (\d+), rgb\((\d+)", browse(path, *options, "--dump-dom").stdout)
    assert found is not None
    return int(found[1]), int(found[2]), int(found[3])


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (320, "dark"),
        pytest.param(375, "light", marks=THOROUGH),
        pytest.param(768, "dark", marks=THOROUGH),
        (1280, "light"),
    ],
)
def test_width_and_scheme_are_those_of_the_reader(path: Path, width: int, scheme: str) -> None:
    """Nothing scrolls to the side, and the page is dark where the reader's other pages are."""
    wide, window, bright = probe(
        path, f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", f"--window-size={width},900"
    )
    assert wide <= window == width
    assert (bright > 200) == (scheme == "light")


def test_hostile_texts_do_not_widen_the_page(path: Path, hostile: PageData) -> None:
    path.write_text(render_host(hostile))
    assert probe(path, "--window-size=320,900")[0] <= 320


def test_the_policy_is_in_force(path: Path) -> None:
    path.write_text(path.read_text().replace("</body>", f"{PROBE}</body>"))
    assert not re.search(r"<title>\d+ of", browse(path, "--dump-dom").stdout)


def test_net_log_shows_requests(path: Path, tmp_path: Path) -> None:
    log = tmp_path / "net.json"
    path.write_text('<img src="http://127.0.0.1:9/x.png">')
    browse(path, f"--log-net-log={log}", "--dump-dom")
    assert "http://127.0.0.1:9/x.png" in json.dumps(log.read_text())
