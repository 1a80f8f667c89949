#!/bin/sh
cat > /app/server.py <<'END'
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(int(self.path[1:]) + 1).encode())


HTTPServer(("127.0.0.1", 8765), Handler).serve_forever()
END
