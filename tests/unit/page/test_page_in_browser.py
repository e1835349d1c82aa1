# SPDX-License-Identifier: Apache-2.0
"""The page in headless Chromium: no error, no request, no horizontal scrolling, and screenshots.

VLLM_EDGE_SCREENSHOTS is a directory for the screenshots, VLLM_EDGE_PAGE a page to take instead of the example.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.page.data import PageData
from ansible.module_utils.vllm_edge.page.pages import build

BROWSER = shutil.which("chromium-headless-shell")
PROBE = "<script>document.title = document.documentElement.scrollWidth + ' of ' + window.innerWidth</script>"
SCHEMES = {"dark": 0, "light": 1}
THOROUGH = pytest.mark.thorough
NO_BROWSER = "chromium-headless-shell is not installed: apt-get install it (Ubuntu 24.04 has none)"
pytestmark = [pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER), pytest.mark.slow]


@pytest.fixture
def page(full: PageData, tmp_path: Path) -> Path:
    path = tmp_path / "page.html"
    given = os.environ.get("VLLM_EDGE_PAGE")
    path.write_text(Path(given).read_text() if given else build(full).page)
    return path


def browse(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    home = page.parent / "profile"
    words = [str(BROWSER), "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking"]
    words += [f"--user-data-dir={home}", "--enable-logging=stderr", *options, page.as_uri()]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)


def test_no_error_and_no_request(page: Path, tmp_path: Path) -> None:
    log = tmp_path / "net.json"
    done = browse(page, f"--log-net-log={log}", "--dump-dom")
    assert "CONSOLE" not in done.stderr
    urls = re.findall(r'"url":"([^"]+)"', log.read_text())
    assert {url for url in urls if not url.startswith(("file:", "data:"))} == set()


@pytest.mark.parametrize("width", [320, pytest.param(375, marks=THOROUGH), pytest.param(768, marks=THOROUGH), 1280])
def test_no_horizontal_scrolling(page: Path, width: int) -> None:
    # The policy of the page would forbid the probe.
    page.write_text(re.sub(r"<meta http-equiv[^>]*>", "", page.read_text()).replace("</body>", f"{PROBE}</body>"))
    dom = browse(page, f"--window-size={width},900", "--dump-dom").stdout
    found = re.search(r"<title>(\d+) of (\d+)</title>", dom)
    assert found is not None and int(found[2]) == width
    assert int(found[1]) <= width


@pytest.mark.parametrize(("width", "scheme"), [(375, "dark"), (1280, "light")])
def test_screenshots_follow_the_scheme(page: Path, tmp_path: Path, width: int, scheme: str) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow, which comes with matplotlib, is not installed")
    target = Path(os.environ.get("VLLM_EDGE_SCREENSHOTS") or tmp_path) / f"page-{width}-{scheme}.png"
    target.parent.mkdir(parents=True, exist_ok=True)
    height = 6800 if width == 375 else 5200
    scheme_option = f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"
    browse(page, scheme_option, f"--window-size={width},{height}", f"--screenshot={target}")
    shot = image.open(target).convert("RGB")
    assert shot.size == (width, height)
    assert (min(shot.getpixel((2, 2))) > 200) == (scheme == "light")


def test_the_policy_is_in_force(page: Path) -> None:
    page.write_text(page.read_text().replace("</body>", f"{PROBE}</body>"))
    assert not re.search(r"<title>\d+ of", browse(page, "--dump-dom").stdout)


def test_net_log_shows_requests(page: Path, tmp_path: Path) -> None:
    log = tmp_path / "net.json"
    page.write_text('<img src="http://127.0.0.1:9/x.png">')
    browse(page, f"--log-net-log={log}", "--dump-dom")
    assert "http://127.0.0.1:9/x.png" in json.dumps(log.read_text())
