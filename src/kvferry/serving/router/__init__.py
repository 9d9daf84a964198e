"""One OpenAI endpoint over prefill and decode engines.

    app = router_app(RouterSettings(prefill=("http://a:8000",), decode=("http://b:8000",)))

`bodies` says what each side is sent, `backends` which engine it goes to, `upstream` how it is sent, `flow` is
the life of one completion, `app` the web application around it.
"""

from kvferry.serving.router.app import router_app
from kvferry.serving.router.settings import RouterSettings

__all__ = ["RouterSettings", "router_app"]
