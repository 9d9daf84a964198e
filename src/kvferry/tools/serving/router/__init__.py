"""One OpenAI endpoint for several prefill and decode engines.

    app = RouterApp(RouterSettings(prefill=("http://a:8000",), decode=("http://b:8000",)))

`endpoint` handles one HTTP request, and `flow` the prefill, decode and retries of one completion.
"""
