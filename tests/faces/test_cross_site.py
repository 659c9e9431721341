"""Pages of other sites: a browser says where a request comes from, also for an image, which has no Origin."""

from __future__ import annotations

from typing import Any

import pytest

from asyncgate.parts.model.settings import ConsoleSettings

pytestmark = pytest.mark.anyio

OPERATIONS = [("GET", "/v1/bootstrap?principal_id=ada"), ("GET", "/v1/tasks"), ("POST", "/v1/tasks"),
              ("GET", "/v1/receipts/stream"), ("POST", "/mcp"), ("GET", "/mcp"), ("POST", "/mcp/u"), ("POST", "/lease"),
              ("GET", "/metrics"), ("GET", "/nothing"), ("GET", "/v1/tasks%2f..%2fdocs")]
PAGES = ["/", "/docs", "/openapi.json", "/console", "/console/", "/console/index.html", "/console/about"]
IMAGE = [("sec-fetch-mode", "no-cors"), ("sec-fetch-dest", "image")]
LINK = [("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document"), ("sec-fetch-user", "?1")]


@pytest.fixture
async def dev(serve: Any) -> Any:
    """A gate for development: nobody needs a credential."""
    return await serve(api_key="", allow_insecure_dev=True, console=ConsoleSettings(enabled=True))


@pytest.mark.parametrize("how", [IMAGE, LINK, []], ids=["image", "link", "plain"])
@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_a_page_of_another_site_runs_no_operation_by_an_image_or_a_link(dev: Any, site: str, how: Any) -> None:
    async with dev.unchanged():
        for method, path in OPERATIONS:
            answer = await dev.call(method, path, token=None, headers=[("sec-fetch-site", site), *how])
            assert (answer.status, answer.json()["error"]) == (403, "forbidden"), path
            assert "add it to the setting allowed_origins" in answer.json()["message"]


async def test_people_may_follow_a_link_to_a_page(dev: Any) -> None:
    for path in PAGES:
        answer = await dev.call("GET", path, token=None,
                                headers=[("sec-fetch-site", "cross-site"), ("accept", "text/html"), *LINK])
        assert answer.status in (200, 302), (path, answer)


@pytest.mark.parametrize("headers", [[], [("sec-fetch-site", "same-origin")], [("sec-fetch-site", "none")],
                                     [("sec-fetch-site", "cross-site"), ("origin", "http://127.0.0.1")],
                                     [("sec-fetch-site", "cross-site"), ("origin", "https://friend.example")]], ids=str)
async def test_programs_own_pages_and_allowed_origins_are_answered(serve: Any, headers: Any) -> None:
    served = await serve(allowed_origins=("https://friend.example",))

    answer = await served.call("GET", "/v1/tasks", headers=headers)

    assert answer.status == 200


async def test_an_allowed_origin_must_be_named_to_be_let_through(serve: Any) -> None:
    """Also where no name of this machine is special, and any Origin was let through that a browser does not judge."""
    served = await serve(host="0.0.0.0", allowed_hosts=("localhost",))

    alone = await served.call("GET", "/v1/tasks", headers=[("origin", "https://evil.example")])
    judged = await served.call("GET", "/v1/tasks", headers=[("origin", "https://evil.example"),
                                                            ("sec-fetch-site", "cross-site")])

    assert (alone.status, judged.status) == (200, 403)
