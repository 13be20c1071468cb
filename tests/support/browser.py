"""Headless Chromium through chromedriver, by the W3C WebDriver protocol: no package is needed for it."""

import base64
import json
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    def __init__(self, width: int = 1200, height: int = 800) -> None:
        self._process = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
        port = None
        for line in self._process.stdout:
            if found := re.search(r"started successfully on port (\d+)", line):
                port = found[1]
                break
        assert port, "chromedriver did not start"
        threading.Thread(target=self._process.stdout.read, daemon=True).start()
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)
        arguments = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        options = {"binary": CHROMIUM, "args": [*arguments, f"--window-size={width},{height}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    def close(self) -> None:
        try:
            self._ask("DELETE", self._session)
        finally:
            self._http.close()
            self._process.terminate()
            self._process.wait(10)

    def open(self, url: str) -> None:
        self._ask("POST", f"{self._session}/url", {"url": url})

    def script(self, code: str, *args: Any) -> Any:
        """The value that `code` returns in the page."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": code, "args": list(args)})

    def type(self, selector: str, text: str) -> None:
        """As keys pressed in that element; "\\ue007" is Enter."""
        self._ask("POST", f"{self._session}/element/{self._find(selector)}/value", {"text": text})

    def click(self, selector: str) -> None:
        self._ask("POST", f"{self._session}/element/{self._find(selector)}/click", {})

    def text(self, selector: str) -> str:
        return self.script("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def is_shown(self, selector: str) -> bool:
        return self.script("return document.querySelector(arguments[0])?.checkVisibility() ?? false", selector)

    def wait(self, code: str, timeout_s: float = 30) -> Any:
        """Until `code` returns something true: that."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.script(code)):
            assert time.monotonic() < deadline, f"{code}: {self.script('return document.body.innerText')}"
            time.sleep(0.05)
        return value

    def log(self) -> list[str]:
        """What the console has shown since the last call, errors of loading included."""
        entries = self._ask("POST", f"{self._session}/se/log", {"type": "browser"})
        return [f"{entry['level']}: {entry['message']}" for entry in entries]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("GET", f"{self._session}/screenshot")))

    def _find(self, selector: str) -> str:
        found = self._ask("POST", f"{self._session}/element", {"using": "css selector", "value": selector})
        return found[_ELEMENT]

    def _ask(self, method: str, path: str, body: dict | None = None) -> Any:
        response = self._http.request(method, path, content=None if body is None else json.dumps(body))
        value = response.json()["value"]
        assert response.status_code == 200, value
        return value
