"""A stand-in for a coordinator's proxy, which answers what ``chambers site`` asks over TLS."""

import ssl
import threading
import time
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def proxy(folder, ahead=0.0, control=403, health=200):
    """Run a stand-in for a proxy, whose clock is ahead by some seconds; yield its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(health if self.path == "/health" else control)
            self.end_headers()

        def date_time_string(self, timestamp=None):
            return formatdate(time.time() + ahead, usegmt=True)

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_):  # refused handshakes
            pass

    server = Server(("127.0.0.1", 0), Handler)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
