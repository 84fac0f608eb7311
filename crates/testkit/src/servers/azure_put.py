"""Sends a PUT to Azure Blob. Arguments: ENDPOINT ACCOUNT KEY PATH[?NAME=VALUE] [HEADER=VALUE]...

The body is standard input. The signature follows Azure's "Authorize with Shared Key".
"""

import base64
import email.utils
import hashlib
import hmac
import sys
import urllib.parse
import urllib.request

endpoint, account, key, path, *more = sys.argv[1:]
body = sys.stdin.buffer.read()
path, _, query = path.partition("?")
path = urllib.parse.quote(path)
headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
headers.update(header.split("=", 1) for header in more)
kind = "application/octet-stream"
lines = ["PUT", "", "", str(len(body) or ""), "", kind] + [""] * 6
lines += [f"{name}:{headers[name]}" for name in sorted(headers)]
lines += [f"/{account}/{account}/{path}"] + ([query.replace("=", ":")] if query else [])
digest = hmac.new(base64.b64decode(key), "\n".join(lines).encode(), hashlib.sha256).digest()
headers["Authorization"] = f"SharedKey {account}:{base64.b64encode(digest).decode()}"
headers["Content-Length"] = str(len(body))
headers["Content-Type"] = kind
url = f"{endpoint}/{account}/{path}" + (f"?{query}" if query else "")
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
opener.open(urllib.request.Request(url, method="PUT", headers=headers, data=body), timeout=30).close()
