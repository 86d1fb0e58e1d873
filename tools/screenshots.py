"""Take the screenshot of the explorer with Chromium: python -m tools.screenshots"""

import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, ViewportSize, expect, sync_playwright

from hf_posenc import explorer
from hf_posenc.evaluation import terminals
from hf_posenc.serialization.atomic import atomic_file

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SIZE = ViewportSize(width=1150, height=900)


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("Chromium was not found. Install it: apt-get install chromium")
    served = explorer.serve(port=0, block=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        window = browser.new_page(viewport=SIZE)
        window.goto(str(served.local_url))
        window.get_by_role("tab", name="Two encodings").click()
        expect(window.locator("img").filter(visible=True)).to_have_count(3, timeout=60_000)
        save(window, "explore.png")
        browser.close()
    served.close()


def save(window: Page, name: str) -> None:
    window.wait_for_timeout(1000)  # for animations to finish
    taken = Image.open(io.BytesIO(window.screenshot(full_page=True)))
    with atomic_file(IMAGES / name, "wb") as file:
        taken.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(file, format="PNG", optimize=True)
    print(f"docs/images/{name}", flush=True)


if __name__ == "__main__":
    terminals.set_up()
    main()
