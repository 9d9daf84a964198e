"""An engine process that exits on a poisonous request: `mortal_engine.py POISON LOG FD`.

FD is the number of an inherited listening socket. The engine speaks enough of the OpenAI API for a router. A
prompt that contains POISON ends the process with the request in flight; one that contains "late" is answered
once the file LOG.go exists; one that contains "500" with that status.
"""

import json
import os
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

KV = {"do_remote_prefill": True, "remote_engine_id": "p"}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer(200, {"data": []})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with Path(self.server.log).open("a") as log:
            log.write(json.dumps(body) + "\n")
        if self.server.poison in body["prompt"]:
            os._exit(1)
        if "500" in body["prompt"]:
            self.answer(500, {"error": {"message": "a fault of its own"}})
            return
        if "late" in body["prompt"]:
            while not Path(f"{self.server.log}.go").exists():
                time.sleep(0.01)
        params = KV if (body.get("kv_transfer_params") or {}).get("do_remote_decode") else None
        self.answer(200, {"choices": [{"text": "moved"}], "kv_transfer_params": params})

    def answer(self, status, value):
        raw = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def main(poison, log, fd):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=int(fd))
    server.poison, server.log = poison, log
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
