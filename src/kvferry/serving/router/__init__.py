"""One OpenAI endpoint over prefill and decode engines.

    app = router_app(RouterSettings(prefill=("http://a:8000",), decode=("http://b:8000",)))

`bodies` makes the requests for both sides, `backends` chooses the engines, `upstream` sends. `flow` is the
life of one completion, `endpoint` that of any request, and `app` the web application around them.
"""

from kvferry.serving.router.app import RouterApp, router_app
from kvferry.serving.router.settings import RouterSettings

__all__ = ["RouterApp", "RouterSettings", "router_app"]
