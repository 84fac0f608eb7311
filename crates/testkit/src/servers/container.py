"""Creates an Azure Blob container. Arguments: ENDPOINT ACCOUNT KEY CONTAINER.

The signature follows Azure's "Authorize with Shared Key".
"""

import base64
import email.utils
import hashlib
import hmac
import sys
import urllib.request

endpoint, account, key, container = sys.argv[1:]
headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
lines = ["PUT"] + [""] * 11 + [f"{name}:{headers[name]}" for name in sorted(headers)]
lines += [f"/{account}/{account}/{container}", "restype:container"]
digest = hmac.new(base64.b64decode(key), "\n".join(lines).encode(), hashlib.sha256).digest()
headers["Authorization"] = f"SharedKey {account}:{base64.b64encode(digest).decode()}"
headers["Content-Length"] = "0"
url = f"{endpoint}/{account}/{container}?restype=container"
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
opener.open(urllib.request.Request(url, method="PUT", headers=headers), timeout=30).close()
