"""The page at `/`: a chat playground beside live gauges. Three files, nothing from outside, no build step."""

from pathlib import Path

from fastapi import FastAPI, Response

_FOLDER = Path(__file__).parent / "page_files"
_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
# They hold nothing of the server's: the page asks for the key, and then for everything else with it.
PAGE_ROUTES = tuple(_FILES)
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_page_routes(app: FastAPI) -> None:
    for route, (name, media_type) in _FILES.items():
        _add_file(app, route, (_FOLDER / name).read_bytes(), f"{media_type}; charset=utf-8")


def _add_file(app: FastAPI, route: str, content: bytes, media_type: str) -> None:
    @app.get(route, include_in_schema=False)
    async def page_file() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)
