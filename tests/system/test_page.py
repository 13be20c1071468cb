"""The page at `/` in a real browser, on a real server of a tiny model."""

import browser as browsers
import pytest

from llmq.cli.local_server import serving

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        not (browsers.CHROMIUM and browsers.DRIVER), reason="no chromium with chromedriver on this machine"
    ),
]

ENTER = "\ue007"
NOTE = "return document.querySelector('.turn:last-child small')?.textContent"


@pytest.fixture(scope="module")
def model(tiny_llama):
    return tiny_llama(max_position_embeddings=4096)


@pytest.fixture(scope="module")
def url(model):
    with serving(model, "--threads", "1") as url:
        yield url


@pytest.fixture
def browser():
    made = browsers.Browser()
    yield made
    made.close()


def say(browser: browsers.Browser, text: str) -> str:
    """Send a message; the note under its answer."""
    turns = browser.script("return document.querySelectorAll('.turn').length")
    browser.type("#text", text + ENTER)
    browser.wait(f"return document.querySelectorAll('.turn').length === {turns + 2}")
    return browser.wait(NOTE)


def test_a_conversation_beside_its_gauges(browser, url, model):
    browser.open(url)
    browser.wait("return document.querySelector('#model').textContent.includes('4,096 tokens')")
    assert model.name in browser.text("#model")
    browser.click("summary")
    browser.type("#max-tokens", "12")
    note = say(browser, "hello <img src=x onerror=alert(1)>")
    assert "tokens" in note
    assert "TTFT" in note
    assert browser.text(".turn.user p") == "hello <img src=x onerror=alert(1)>"
    assert browser.script("return document.images.length") == 0
    assert browser.text(".turn.assistant p")
    say(browser, "and again")
    assert browser.script("return messages.map(one => one.role)") == ["user", "assistant"] * 2

    browser.wait("return document.querySelector('#rate').textContent !== '–'")
    browser.wait("return document.querySelector('#ttft').textContent.endsWith('s')")
    assert browser.text("#running") == "0"
    assert int(browser.text("#total").replace(",", "")) > 100
    assert browser.script("return document.querySelector('#line').points.length") > 0
    browser.click("#reset")
    assert browser.script("return messages.length") == 0

    loaded = browser.script("return performance.getEntriesByType('resource').map(one => one.name)")
    assert loaded
    assert all(name.startswith((url, "data:")) for name in loaded)
    assert browser.log() == []


def test_gauges_move_and_an_answer_is_stopped(browser, url):
    browser.open(url)
    browser.wait("return model")
    # Answers of a random model may end at once: several are asked for, with the page's own means.
    ask = """for (let i = 0; i < 4; i++) fetch('v1/completions', {method: 'POST',
      headers: {'content-type': 'application/json'},
      body: JSON.stringify({model: model.id, prompt: 'x' + i, max_tokens: 3000, ignore_eos: true})})"""
    browser.script(ask)
    browser.wait("return Number(document.querySelector('#running').textContent) >= 3")
    browser.wait("return Number(document.querySelector('#rate').textContent.replace(',', '')) > 0")
    assert browser.script("return document.querySelector('#kv').value") > 0
    browser.script(
        "request = (f => text => ({...f(text), body: f(text).body.replace('{', '{\"ignore_eos\":true,')}))(request)"
    )
    browser.type("#text", "on and on" + ENTER)
    browser.wait("return document.querySelector('.turn.assistant p')?.textContent.length > 10")
    assert browser.is_shown("#stop")
    browser.click("#stop")
    assert browser.wait(NOTE) == "stopped"
    assert not browser.is_shown("#stop")
    assert browser.script("return messages.length") == 2


def test_a_server_with_keys_asks_for_one(browser, model):
    with serving(model, "--threads", "1", "--api-key", "sesame") as url:
        browser.open(url)
        browser.wait("return document.querySelector('#key-form').checkVisibility()")
        browser.type("#key", "wrong" + ENTER)
        browser.wait("return document.querySelector('#key-error').textContent.includes('not a key')")
        assert browser.script("return document.querySelector('#send').disabled")
        browser.type("#key", "sesame" + ENTER)
        browser.wait("return model")
        assert not browser.is_shown("#key-form")
        browser.click("summary")
        browser.type("#max-tokens", "5")
        assert "tokens" in say(browser, "hi")
        browser.wait("return document.querySelector('#total').textContent !== '–'")
        browser.open(url)  # the key is kept for as long as the tab is open
        browser.wait("return model")
        assert not browser.is_shown("#key-form")


def test_a_refusal_is_shown_in_the_servers_words(browser, url):
    browser.open(url)
    browser.wait("return model")
    browser.click("summary")
    browser.type("#max-tokens", "99999")
    assert "max_tokens" in say(browser, "hi")
    assert browser.is_shown(".turn.wrong")
    assert browser.script("return messages.length") == 0
