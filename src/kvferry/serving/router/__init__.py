"""One OpenAI endpoint for several prefill and decode engines.

    app = router_app(RouterSettings(prefill=("http://a:8000",), decode=("http://b:8000",)))

- `app`: the web application, with `router_app`; `settings`: `RouterSettings`.
- `endpoint`: handling of one HTTP request; `flow`: prefill, decode and retries of one completion.
- `introductions`: connections between engines before the first request.
- `routes`: table of all paths of vLLM's server; `responses`: the engine that keeps a response.
- `bodies`: requests for the engines; `backends`: choice of the engines; `upstream`: HTTP client for engines.
"""
