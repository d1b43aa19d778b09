"""Exit with 0 if the server of this container is healthy; an image has no curl."""

import os
import ssl
import sys
import urllib.request

TIMEOUT_SECONDS = 4.0

url = os.environ.get("HEALTH_URL", "http://127.0.0.1:8080/healthz")
context = ssl.create_default_context()
# The certificate names the service, not the loopback address at which the container asks itself.
context.check_hostname = False
context.verify_mode = ssl.CERT_NONE
try:
    urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS, context=context).close()
except OSError as error:
    sys.exit(f"{url} is not healthy: {error}")
