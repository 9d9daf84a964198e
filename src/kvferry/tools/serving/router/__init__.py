"""One OpenAI endpoint for several prefill and decode engines.

    app = RouterApp(RouterSettings(prefill=("http://a:8000",), decode=("http://b:8000",)))

`endpoint` handles one HTTP request, and `flow` one completion, with its halves `prefilling` and `decoding`.
"""
