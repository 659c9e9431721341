"""The console as a test uses it: its views by name, its keys, and signing in."""

from __future__ import annotations

from typing import Any

from tests.support.chromium import Screen

VIEWS = {"inbox": "i", "tasks": "t", "queues": "q", "traffic": "f", "workers": "w", "schedules": "s",
         "limits": "m", "ledger": "l", "admin": "a", "health": "h"}      # with the letter that leads there after a g
MARK_LEFT = """place => {
    const main = document.getElementById("main");
    if (main && location.hash.split("?")[0] !== `#/${place}`) main.dataset.left = "";
}"""


class Console(Screen):
    """The console in a window of its own."""

    def visit(self, place: str, **more: Any) -> None:
        """Go to a place such as `tasks?q=status:queued`, as from a link, and wait until it is drawn."""
        path = place.partition("?")[0]
        self.page.evaluate(MARK_LEFT, path)     # else the view that is left could be taken for the one that comes
        self.open(f"/console/#/{place}", **more)
        self.await_view(path.partition("/")[0])

    def await_view(self, name: str) -> None:
        """Wait until a view has its content."""
        self.page.wait_for_selector(f"#main:not([data-left]) .view.{name}")

    def sign_in(self, credential: str) -> None:
        """Sign in with a key, on the page that asks for one."""
        self.open("/console/")
        self.page.get_by_label("Key", exact=True).fill(credential)
        self.page.get_by_role("button", name="Sign in", exact=True).click()
        self.page.wait_for_selector("#main .view")

    def text(self) -> str:
        """Return what a reader sees of the view."""
        return self.page.locator("#main").inner_text()

    def buttons(self) -> list[str]:
        """Return the names of the buttons of the view."""
        return [button.get_attribute("aria-label") or button.inner_text()
                for button in self.page.locator("#main").get_by_role("button").all()]
