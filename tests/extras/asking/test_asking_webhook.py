"""A webhook that tells of a question has a link to where a person answers it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from asyncgate.extras.webhooks.events import render_receipt
from asyncgate.extras.webhooks.sources import find_console
from asyncgate.parts.model.settings import ConsoleSettings, Settings
from asyncgate.parts.model.stored import Receipt

QUESTION = Receipt("r-1", "", "input.requested", 0.0, "worker", "w1", "human", "boss", "t-1", "l-1", None, "gate", "",
                   '{"key":"deploy"}')
ON: dict[str, Any] = {"console": ConsoleSettings(enabled=True), "public_url": "https://gate.example.com/"}


def test_a_question_has_a_link_and_other_receipts_have_none() -> None:
    console = find_console(Settings(**ON))

    asked, other = [json.loads(render_receipt("t", receipt, console))
                    for receipt in (QUESTION, replace(QUESTION, receipt_type="task.failed"))]

    assert asked["link"] == "https://gate.example.com/console/#/inbox"
    assert "link" not in other


@pytest.mark.parametrize("settings", [{}, {"console": ON["console"]}, {"public_url": ON["public_url"]}])
def test_without_a_console_or_its_address_there_is_no_link(settings: dict[str, Any]) -> None:
    assert "link" not in json.loads(render_receipt("t", QUESTION, find_console(Settings(**settings))))
