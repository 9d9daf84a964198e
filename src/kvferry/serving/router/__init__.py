"""One OpenAI endpoint for several prefill and decode engines.

    app = router_app(RouterSettings(prefill=("http://a:8000",), decode=("http://b:8000",)))

- `app`: the web application; `endpoint`: handling of one HTTP request; `flow`: prefill, decode and retries of
  one completion.
- `bodies`: requests for the engines; `backends`: choice of the engines; `upstream`: HTTP client for engines.
"""

from kvferry.serving.router.app import RouterApp, router_app
from kvferry.serving.router.settings import RouterSettings

__all__ = ["RouterApp", "RouterSettings", "router_app"]
