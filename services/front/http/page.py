"""The page at `/`: files of this package, read once, under a policy that lets nothing else in.

The page needs no key to load, and holds nothing that needs one: what it shows it asks for with the key.
"""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.front.http.errors import HttpError

FOLDER = Path(__file__).parents[1] / "page"
INDEX = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Whatever a model writes into the page: no script, style, image or connection but this server's own files.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def routes() -> list[Route]:
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES}

    async def index(request: Request) -> Response:
        return _file(INDEX)

    async def page(request: Request) -> Response:
        return _file(request.path_params["name"])

    def _file(name: str) -> Response:
        if name not in files:
            raise HttpError(HTTPStatus.NOT_FOUND, f"the page has no file {name[:80]!r}")
        return Response(files[name], headers=HEADERS, media_type=MEDIA_TYPES[Path(name).suffix])

    return [Route("/", index), Route("/page/{name}", page)]
