"""Chromium for tests, where Playwright and a Chromium are installed: neither is fetched."""

import shutil
from contextlib import contextmanager

import pytest

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@contextmanager
def chromium(profile):
    """A headless Chromium with an empty profile in the folder `profile`: Playwright's context of it."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install 'jaxserve[browser]'")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs Chromium, such as Debian's package of this name")
    with playwright.sync_playwright() as started:
        context = started.chromium.launch_persistent_context(
            profile, executable_path=path, headless=True, args=FLAGS, viewport={"width": 1300, "height": 850}
        )
        context.set_default_timeout(15_000)
        try:
            yield context
        finally:
            context.close()
